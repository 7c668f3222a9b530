"""`python -m bench.index.run [NAME …] [--quick]` runs benchmarks of indexes, and prints and saves their results.

Without names it runs all except `hudi`, which needs the download of `make hudi`, and `ssb_cubes`, which generates a
large table.
"""

from __future__ import annotations

from bench.index import attributes, bitmap, bloom, build, cubes, dashboard, hudi, record
from bench.run import Bench, build_parser, choose_benchmarks, run_benches
from bench.ssb import cubes as ssb_cubes

BENCHES: dict[str, Bench] = {
    "bloom": bloom.run,
    "bitmap": bitmap.run,
    "record": record.run,
    "build": build.run,
    "cubes": cubes.run,
    "dashboard": dashboard.run,
    "attributes": attributes.run,
}
BY_NAME: dict[str, Bench] = {**BENCHES, "hudi": hudi.run, "ssb_cubes": ssb_cubes.run}


def main() -> None:
    parser = build_parser("bench.index.run", __doc__, BY_NAME)
    arguments = parser.parse_args()
    names = choose_benchmarks(parser, arguments, BY_NAME) if arguments.names else list(BENCHES)
    run_benches(BY_NAME, names, quick=arguments.quick)


if __name__ == "__main__":
    main()
