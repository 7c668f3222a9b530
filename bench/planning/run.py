"""`python -m bench.planning.run [NAME …] [--quick] [--files N …]` runs benchmarks of planning and prints their results.

Without names it runs all. `--files` sets other table sizes, and `--quick` runs everything on small tables; results are
saved only without both. Missing tables are generated below .cache/bench/planning: 400 MB for the largest.
"""

from __future__ import annotations

from bench.history import advisor, database, plans, seconds
from bench.planning import cold, http, lookup, memory, warm
from bench.run import Bench, build_parser, choose_benchmarks, run_benches

BENCHES: dict[str, Bench] = {
    "warm": warm.run,
    "cold": cold.run,
    "memory": memory.run,
    "http": http.run,
    "history": plans.run,
    "history_database": database.run,
    "advisor": advisor.run,
    "advisor_seconds": seconds.run,
    "lookup": lookup.run,
}
BENCHES_WITH_SIZES = {"warm", "cold", "memory"}
"""The benchmarks that run on tables of several sizes."""


def main() -> None:
    parser = build_parser("bench.planning.run", __doc__, BENCHES)
    parser.add_argument("--files", type=int, nargs="+", help="files of the tables, instead of 10 k, 100 k and 1 M")
    arguments = parser.parse_args()
    sizes = {"sizes": tuple(arguments.files)} if arguments.files else {}
    run_benches(
        BENCHES,
        choose_benchmarks(parser, arguments, BENCHES),
        quick=arguments.quick,
        save=not arguments.files,
        options=lambda name: sizes if name in BENCHES_WITH_SIZES else {},
    )


if __name__ == "__main__":
    main()
