"""Run the benchmarks of the Trino proxy, and save their results.

    python -m bench.trino.run [NAME …] [--quick] [--statements N] [--simulated-statements N] [--scale N] [--files N]
                              [--rounds N]

Without names, all benchmarks run. `overhead` sends `--statements` to Trino and `--simulated-statements` to a simulated
coordinator while it measures the proxy's memory. `ssb` has scale 1 (6 million facts) in 1,000 files, and runs each
query three times; `--scale`, `--files` and `--rounds` change these values. `ssb_large` has scale 5 (30 million facts)
in 5,000 files, clustered, and accepts `--rounds`. The tables are created once, in .cache/bench/trino. The benchmarks
need Trino (`make trino`) and a JDK 25.
"""

from __future__ import annotations

from bench.run import Bench, build_parser, choose_benchmarks, run_benches
from bench.trino import overhead, point, ssb

BENCHES: dict[str, Bench] = {"overhead": overhead.run, "point": point.run, "ssb": ssb.run, "ssb_large": ssb.run_large}


def main() -> None:
    parser = build_parser("bench.trino.run", __doc__, BENCHES)
    parser.add_argument("--statements", type=int, help="statements that `overhead` sends to Trino; default: 5,000")
    parser.add_argument(
        "--simulated-statements",
        "--talked",
        type=int,
        help="statements that `overhead` sends to the simulated coordinator; default: 100,000",
    )
    parser.add_argument("--scale", type=float, help="scale of `ssb`; default: 1")
    parser.add_argument("--files", type=int, help="files of the facts of `ssb`; default: 1,000")
    parser.add_argument("--rounds", type=int, help="rounds of `ssb` and `ssb_large`; default: 3 and 5")
    arguments = parser.parse_args()
    options_by_bench = {
        "overhead": ("statements", "simulated_statements"),
        "ssb": ("scale", "files", "rounds"),
        "ssb_large": ("rounds",),
    }
    options = {
        bench: {name: value for name in names if (value := getattr(arguments, name)) is not None}
        for bench, names in options_by_bench.items()
    }
    run_benches(
        BENCHES,
        choose_benchmarks(parser, arguments, BENCHES),
        quick=arguments.quick,
        options=lambda name: options.get(name, {}),
    )


if __name__ == "__main__":
    main()
