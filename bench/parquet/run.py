"""`python -m bench.parquet.run [NAME …] [--quick]` runs the benchmarks of Parquet rewrites, and saves the results."""

from __future__ import annotations

from bench.parquet import copies, encryption, statements, written_merges
from bench.run import Bench, build_parser, choose_benchmarks, run_benches

BENCHES: dict[str, Bench] = {
    "copies": copies.run,
    "encryption": encryption.run,
    "statements": statements.run,
    "written_merges": written_merges.run,
}


def main() -> None:
    parser = build_parser("bench.parquet.run", __doc__, BENCHES)
    arguments = parser.parse_args()
    run_benches(BENCHES, choose_benchmarks(parser, arguments, BENCHES), quick=arguments.quick)


if __name__ == "__main__":
    main()
