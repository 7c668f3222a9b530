"""`python -m bench.planning.run [NAME …] [--quick] [--files N …]`: the benches of planning, printed and written.

Without names all of them. `--files` takes other table sizes, `--quick` runs everything on small tables; both write
nothing. Tables are made below .cache/bench/planning when they are not there: 400 MB for the largest.
"""

from __future__ import annotations

from bench.history import advisor, database, plans, seconds
from bench.planning import cold, http, lookup, memory, warm
from bench.run import Bench, build_parser, choose_names, run_benches

BENCHES: dict[str, Bench] = {
    "warm": warm.run,
    "cold": cold.run,
    "memory": memory.run,
    "http": http.run,
    "history": plans.run,
    "history-database": database.run,
    "advisor": advisor.run,
    "advisor-seconds": seconds.run,
    "lookup": lookup.run,
}
BENCHES_WITH_SIZES = {"warm", "cold", "memory"}
"""The benches that run on tables of several sizes."""


def main() -> None:
    parser = choose_names("bench.planning.run", __doc__, BENCHES)
    parser.add_argument("--files", type=int, nargs="+", help="files of the tables, instead of 10 k, 100 k and 1 M")
    arguments = parser.parse_args()
    sizes = {"sizes": tuple(arguments.files)} if arguments.files else {}
    run_benches(
        BENCHES,
        build_parser(parser, arguments, BENCHES),
        quick=arguments.quick,
        save=not arguments.files,
        options=lambda name: sizes if name in BENCHES_WITH_SIZES else {},
    )


if __name__ == "__main__":
    main()
