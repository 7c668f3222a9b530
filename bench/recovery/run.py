"""`python -m bench.recovery.run` measures rebuilds of a catalog, copies of its database, and imports of tables."""

from __future__ import annotations

from pathlib import Path

from bench.recovery import moving, rebuild
from bench.run import Bench, build_parser, choose_benchmarks, run_benches

BENCHES: dict[str, Bench] = {"rebuild": rebuild.run, "import": moving.run}


def main() -> None:
    parser = build_parser("bench.recovery.run", __doc__, BENCHES)
    parser.add_argument("--folder", type=Path, help="a folder for the warehouse, on the disk to measure")
    arguments = parser.parse_args()
    run_benches(BENCHES, choose_benchmarks(parser, arguments, BENCHES), quick=arguments.quick, folder=arguments.folder)


if __name__ == "__main__":
    main()
