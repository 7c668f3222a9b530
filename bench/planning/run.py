"""`python -m bench.planning.run [NAME …] [--quick] [--files N …]`: the benches of planning, printed and written.

Without names all of them. `--files` takes other table sizes; `--quick` runs everything on small tables and writes
nothing. Tables are made below .cache/bench/planning when they are not there: 400 MB for the largest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from bench import readme
from bench.planning import cold, http, lookup, memory, warm
from bench.report import Report, machine
from bench.run import show

Bench = Callable[..., Coroutine[Any, Any, Report]]
BENCHES: dict[str, Bench] = {
    "warm": warm.run,
    "cold": cold.run,
    "memory": memory.run,
    "http": http.run,
    "lookup": lookup.run,
}
SIZED = {"warm", "cold", "memory"}
"""Those that ask their question of tables of several sizes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="a short run that writes no results")
    parser.add_argument("--files", type=int, nargs="+", help="files of the tables, instead of 10 k, 100 k and 1 M")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(BENCHES)
    if unknown:
        parser.error(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=160)
    for name in chosen.names or BENCHES:
        facts = machine()
        sizes = {"sizes": tuple(chosen.files)} if chosen.files and name in SIZED else {}
        with (
            console.status(f"bench {name}"),
            tempfile.TemporaryDirectory(prefix="seamark-bench-") as folder,
        ):
            report = uvloop.run(BENCHES[name](Path(folder), quick=chosen.quick, **sizes))
        report.machine = facts
        show(report, console)
        if not chosen.quick:
            report.save()
    if not chosen.quick:
        readme.update()


if __name__ == "__main__":
    main()
