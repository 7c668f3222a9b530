"""`python -m bench.index.run [NAME …] [--quick]`: the benches of indexes, printed and written. Without names all."""

from __future__ import annotations

from bench.index import bitmap, bloom, build, record
from bench.run import Bench, names_of, parser_of, run_benches

BENCHES: dict[str, Bench] = {
    "bloom": bloom.run,
    "bitmap": bitmap.run,
    "record": record.run,
    "build": build.run,
}


def main() -> None:
    parser = parser_of("bench.index.run", __doc__, BENCHES)
    chosen = parser.parse_args()
    run_benches(BENCHES, names_of(parser, chosen, BENCHES), quick=chosen.quick)


if __name__ == "__main__":
    main()
