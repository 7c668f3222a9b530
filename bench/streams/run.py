"""`python -m bench.streams.run [NAME …] [--quick] [--folder FOLDER]` runs the benchmarks of streams, and saves them."""

from __future__ import annotations

from pathlib import Path

from bench.run import Bench, build_parser, choose_benchmarks, run_benches
from bench.streams import (
    appends,
    costs,
    databases,
    ducklake,
    kafka,
    keyed,
    log,
    readers,
    recovery,
    spark,
    topics,
    visible,
)

BENCHES: dict[str, Bench] = {
    "log": log.run,
    "kafka": kafka.run,
    "appends": appends.run,
    "costs": costs.run,
    "databases": databases.run,
    "ducklake": ducklake.run,
    "visible": visible.run,
    "readers": readers.run,
    "recovery": recovery.run,
    "topics": topics.run,
    "spark": spark.run,
    "keyed": keyed.run,
}


def main() -> None:
    parser = build_parser("bench.streams.run", __doc__, BENCHES)
    parser.add_argument("--folder", type=Path, help="a folder on the disk that is measured")
    arguments = parser.parse_args()
    run_benches(BENCHES, choose_benchmarks(parser, arguments, BENCHES), quick=arguments.quick, folder=arguments.folder)


if __name__ == "__main__":
    main()
