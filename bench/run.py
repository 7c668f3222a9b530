"""`python -m bench.run [NAME …] [--quick]` runs benchmarks, prints their tables, and saves them in `bench/results/`.

Without names it runs all. `--quick` is for the tests: each benchmark makes a short run, and saves nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench import commits, duckdb_point, load_table, memory, mix, readme, small_request, sql_point
from bench.report import Report, describe_machine, format_cells

Bench = Callable[..., Coroutine[Any, Any, Report]]
BENCHES: dict[str, Bench] = {
    "load_table": load_table.run,
    "small_request": small_request.run,
    "commits": commits.run,
    "mix": mix.run,
    "memory": memory.run,
    "duckdb_point": duckdb_point.run,
    "sql_point": sql_point.run,
}


def main() -> None:
    parser = build_parser("bench.run", __doc__, BENCHES)
    parser.add_argument("--folder", type=Path, help="where servers keep their data (the disk that is measured)")
    arguments = parser.parse_args()
    run_benches(BENCHES, choose_benchmarks(parser, arguments, BENCHES), quick=arguments.quick, folder=arguments.folder)


def build_parser(module: str, description: str | None, benches: Mapping[str, Bench]) -> argparse.ArgumentParser:
    """Return a parser for the arguments of every runner of benchmarks: names and --quick."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(benches)}; default: all")
    parser.add_argument("--quick", action="store_true", help="a short run that writes no results")
    return parser


def choose_benchmarks(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, benches: Mapping[str, Bench]
) -> Sequence[str]:
    """Return the names of the chosen benchmarks, or of all if none is chosen. An unknown name ends the process."""
    unknown_names = set(arguments.names) - set(benches)
    if unknown_names:
        parser.error(f"no bench {', '.join(sorted(unknown_names))}; there are {', '.join(benches)}")
    return arguments.names or list(benches)


def run_benches(
    benches: Mapping[str, Bench],
    names: Sequence[str],
    *,
    quick: bool,
    save: bool = True,
    folder: Path | None = None,
    options: Callable[[str], Mapping[str, Any]] = lambda _: {},
) -> None:
    """Run, print and save benchmarks one after another.

    Args:
        names: The benchmarks to run.
        quick: Make a short run, and save nothing.
        save: Save the results; False if the sizes are not those of the README.
        options: Returns the additional keyword arguments of a benchmark, by its name.
    """
    save = save and not quick
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=160)
    for name in names:
        facts = describe_machine()
        with (
            console.status(f"bench {name}"),
            tempfile.TemporaryDirectory(prefix="seamark-bench-", dir=folder) as folder_name,
        ):
            report = uvloop.run(_run_interruptibly(benches[name](Path(folder_name), quick=quick, **options(name))))
        report.machine = facts
        print_report(report, console)
        if save:
            report.save()
    if save:
        readme.update_pages()


async def _run_interruptibly(work: Coroutine[Any, Any, Report]) -> Report:
    """Run `work`, and cancel it when the process receives a signal to end, so that it stops its servers."""
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise SystemExit("interrupted") from None


def print_report(report: Report, console: Console) -> None:
    table = Table(title=f"{report.bench}: {report.question}", title_justify="left")
    servers = report.list_servers()
    for number, name in enumerate(["case", "measure", "ratio", *servers, "goal"]):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    previous_case = ""
    for row in report.rows:
        case, *values = format_cells(row, servers)
        table.add_row("" if case == previous_case else case, *values)
        previous_case = case
    console.print(table)
    for name, value in report.bounds.items():
        console.print(f"  bound: {name}: {value}", highlight=False)
    for note in report.notes:
        console.print(f"  {note}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
