"""`python -m bench.writing.run [NAME …] [--quick] [--rows N …] [--batches N] [--commits N]` runs benchmarks of writing.

It prints and saves their results. Without names it runs all.

`--rows` sets other table sizes for `upserts`, and another size for `statements`. `--batches` sets the number of batches
before the measurement of reading. `--commits` sets the number of commits for `maintenance`. `--quick` runs everything
on small tables and saves nothing. Missing tables are created below .cache/bench/writing: 6 GB for all sizes.
Hudi takes part if `make hudi` has downloaded it.
"""

from __future__ import annotations

from typing import Any

from bench.run import Bench, build_parser, choose_benchmarks, run_benches
from bench.writing import (
    buckets,
    contention,
    decisions,
    feed,
    layouts,
    maintenance,
    reader,
    services,
    statements,
    upserts,
)

BENCHES: dict[str, Bench] = {
    "upserts": upserts.run,
    "statements": statements.run,
    "reader": reader.run,
    "contention": contention.run,
    "buckets": buckets.run,
    "services": services.run,
    "feed": feed.run,
    "layouts": layouts.run,
    "decisions": decisions.run,
    "maintenance": maintenance.run,
}


def main() -> None:
    parser = build_parser("bench.writing.run", __doc__, BENCHES)
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the tables; default: 1 M, 10 M and 50 M")
    parser.add_argument("--batches", type=int, help="batches before reading is measured; default: 100")
    parser.add_argument("--commits", type=int, help="commits of the tables of `maintenance`; default: 100")
    arguments = parser.parse_args()
    options: dict[str, Any] = {}
    if arguments.rows:
        options["sizes"] = tuple(arguments.rows)
    if arguments.batches:
        options["batches"] = arguments.batches
    run_benches(
        BENCHES,
        choose_benchmarks(parser, arguments, BENCHES),
        quick=arguments.quick,
        options=lambda name: {
            "upserts": options,
            "maintenance": {"commits": arguments.commits},
            "statements": {key: value for key, value in options.items() if key == "sizes"},
        }.get(name, {}),
    )


if __name__ == "__main__":
    main()
