"""`python -m bench.trino.run [NAME …] [--quick] [--statements N] [--talked N]`: the benches of Trino's adapter, printed
and written. Without names all.

`--statements` are sent to Trino, `--talked` to a coordinator that only talks, while `overhead` looks at the adapter's
memory. Trino is what `make trino` fetches, and a JDK 25.
"""

from __future__ import annotations

from bench.run import Bench, names_of, parser_of, run_benches
from bench.trino import overhead, point

BENCHES: dict[str, Bench] = {"overhead": overhead.run, "point": point.run}


def main() -> None:
    parser = parser_of("bench.trino.run", __doc__, BENCHES)
    parser.add_argument("--statements", type=int, help="instead of 5,000")
    parser.add_argument("--talked", type=int, help="instead of 100,000")
    chosen = parser.parse_args()
    given = {"statements": chosen.statements, "talked": chosen.talked}
    options = {"overhead": {name: value for name, value in given.items() if value is not None}}
    run_benches(
        BENCHES, names_of(parser, chosen, BENCHES), quick=chosen.quick, options=lambda name: options.get(name, {})
    )


if __name__ == "__main__":
    main()
