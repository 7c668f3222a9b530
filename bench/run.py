"""`python -m bench.run [NAME …] [--quick]`: runs benches, prints their tables, writes `bench/results/`.

Without names all of them. `--quick` is for the tests: it runs everything shortly and writes nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench import commits, load_table, memory, mix, readme, small_request
from bench.report import Report, cells, machine

Bench = Callable[..., Coroutine[Any, Any, Report]]
BENCHES: dict[str, Bench] = {
    "load_table": load_table.run,
    "small_request": small_request.run,
    "commits": commits.run,
    "mix": mix.run,
    "memory": memory.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="a short run that writes no results")
    parser.add_argument("--folder", type=Path, help="where servers keep their data (the disk that is measured)")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(BENCHES)
    if unknown:
        parser.error(f"no bench {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}")
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=160)
    for name in chosen.names or BENCHES:
        facts = machine()
        with (
            console.status(f"bench {name}"),
            tempfile.TemporaryDirectory(prefix="seamark-bench-", dir=chosen.folder) as at,
        ):
            report = uvloop.run(BENCHES[name](Path(at), quick=chosen.quick))
        report.machine = facts
        show(report, console)
        if not chosen.quick:
            report.save()
    if not chosen.quick:
        readme.update()


def show(report: Report, console: Console) -> None:
    table = Table(title=f"{report.bench}: {report.question}", title_justify="left")
    servers = report.servers()
    for number, name in enumerate(["case", "measure", "ratio", *servers, "goal"]):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    before = ""
    for row in report.rows:
        case, *rest = cells(row, servers)
        table.add_row("" if case == before else case, *rest)
        before = case
    console.print(table)
    for name, value in report.bounds.items():
        console.print(f"  bound: {name}: {value}", highlight=False)
    for note in report.notes:
        console.print(f"  {note}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
