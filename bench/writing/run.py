"""`python -m bench.writing.run [NAME …] [--quick] [--rows N …] [--batches N] [--commits N]`: the benches of writing,
printed and written. Without names all.

`--rows` takes other table sizes for `upserts`, and another size for `statements`; `--batches` another number of
batches before reading is measured; `--commits` another number of commits for `maintenance`; `--quick` runs everything
on small tables and writes nothing. Tables are made below .cache/bench/writing when they are not there: 6 GB for all
sizes. Hudi takes part where `make hudi` has fetched it.
"""

from __future__ import annotations

from typing import Any

from bench.run import Bench, names_of, parser_of, run_benches
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
    parser = parser_of("bench.writing.run", __doc__, BENCHES)
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the tables, instead of 1 M, 10 M and 50 M")
    parser.add_argument("--batches", type=int, help="batches before reading is measured, instead of 100")
    parser.add_argument("--commits", type=int, help="commits of the tables of `maintenance`, instead of 100")
    chosen = parser.parse_args()
    options: dict[str, Any] = {}
    if chosen.rows:
        options["sizes"] = tuple(chosen.rows)
    if chosen.batches:
        options["batches"] = chosen.batches
    run_benches(
        BENCHES,
        names_of(parser, chosen, BENCHES),
        quick=chosen.quick,
        options=lambda name: {
            "upserts": options,
            "maintenance": {"commits": chosen.commits},
            "statements": {key: value for key, value in options.items() if key == "sizes"},
        }.get(name, {}),
    )


if __name__ == "__main__":
    main()
