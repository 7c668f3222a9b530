"""`python -m bench.trino.run [NAME …] [--quick] [--statements N] [--talked N] [--scale N] [--files N] [--rounds N]`:
the benches of Trino's adapter, printed and written. Without names all.

`--statements` are sent to Trino, `--talked` to a coordinator that only talks, while `overhead` looks at the adapter's
memory. `ssb` has scale 1, 6 M facts, in 1,000 files, and asks each query three times: `--scale`, `--files` and
`--rounds` say otherwise; `ssb_large` has scale 5, 30 M facts, in 5,000 files, clustered, and takes `--rounds`. Their
tables are made once, below .cache/bench/trino. Trino is what `make trino` fetches, and a JDK 25.
"""

from __future__ import annotations

from bench.run import Bench, names_of, parser_of, run_benches
from bench.trino import overhead, point, ssb

BENCHES: dict[str, Bench] = {"overhead": overhead.run, "point": point.run, "ssb": ssb.run, "ssb_large": ssb.run_large}


def main() -> None:
    parser = parser_of("bench.trino.run", __doc__, BENCHES)
    parser.add_argument("--statements", type=int, help="instead of 5,000")
    parser.add_argument("--talked", type=int, help="instead of 100,000")
    parser.add_argument("--scale", type=float, help="instead of 1")
    parser.add_argument("--files", type=int, help="instead of 1,000")
    parser.add_argument("--rounds", type=int, help="instead of 3, or 5")
    chosen = parser.parse_args()
    taken = {"overhead": ("statements", "talked"), "ssb": ("scale", "files", "rounds"), "ssb_large": ("rounds",)}
    options = {
        bench: {name: value for name in names if (value := getattr(chosen, name)) is not None}
        for bench, names in taken.items()
    }
    run_benches(
        BENCHES, names_of(parser, chosen, BENCHES), quick=chosen.quick, options=lambda name: options.get(name, {})
    )


if __name__ == "__main__":
    main()
