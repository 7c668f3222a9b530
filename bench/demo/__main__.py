"""Run the demo with `python -m bench.demo` or `make demo`.

The data of the Star Schema Benchmark are generated once and kept in `.cache/ssb`. `seamark serve` starts with
default settings, PyIceberg writes the tables through it, and the server builds the indexes and cubes. DuckDB
checks every answer on the source data. One wrong row fails the demo. `bench/demo/options.py` lists the
environment variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import webbrowser
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.text import Text

from bench import connect
from bench.demo import lake, trino
from bench.demo.options import NOTE, DemoFailed, Options, provide_home
from bench.demo.queries import Comparison, RunQuery, build_spark_runners, compare_configurations, warm_up
from bench.demo.report import format_report, read_ranges
from bench.demo.screen import print_result
from bench.ssb.bounds import count_files_with_rows, list_data_paths
from bench.ssb.generate import generate_ssb
from bench.ssb.queries import Oracle
from bench.ssb.spark import FACT
from bench.trino.asking import TrinoStatementFailed
from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.session import iceberg_jars
from tests.services.process import CACHE, ServiceFailed
from tests.services.seamark import Seamark

TRINO_ROUNDS = 1
SERVER = {"SEAMARK_SERVICES_WORKERS": "1"}
"""The default number of service workers of `seamark serve`; the tests' server helper would start none."""


def main() -> int:
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # The server and Trino end as well.
    try:
        run(Options.read(os.environ), console)
    except (DemoFailed, TrinoStatementFailed, ServiceFailed, FileNotFoundError) as error:
        reason = str(error)
    except (Py4JError, PySparkException) as error:
        reason = "Spark: " + "\n".join(str(error).splitlines()[:6])
    else:
        return 0
    console.print("[bold red]The demo failed:[/]", Text(reason))
    return 1


def run(options: Options, console: Console) -> list[Comparison]:
    """Run the whole demo and return what each engine read.

    Raises:
        DemoFailed: An answer is wrong.
    """
    columns = TextColumn("{task.description:<48}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with provide_home(options) as folder, Progress(*columns, console=console) as progress:
        steps = progress.add_task("Seamark and Spark start", total=2)
        with (
            contextlib.ExitStack() as engines,
            ThreadPoolExecutor(1) as background,
            Seamark(folder / "server", port=options.port, env=SERVER) as server,
        ):
            progress.advance(steps)
            # The tables are written while Spark starts, and the answers are computed while Spark clusters.
            write_future = background.submit(_generate_and_write, server.base_url, options, progress)
            oracle_future = background.submit(lambda: _compute_answers(write_future.result()))
            with (
                lake.open_demo_session(server.base_url, folder) as spark,
                contextlib.closing(IndexClient(server.base_url)) as client,
            ):
                progress.advance(steps)
                data = write_future.result()
                lake.cluster_facts(spark, client, options, progress)
                written_paths, clustered_paths = (
                    list_data_paths(client, table) for table in (lake.WRITTEN, lake.CLUSTERED)
                )
                needed_files_future = background.submit(count_files_with_rows, clustered_paths, data)
                query_runners, oracle = build_spark_runners(spark), oracle_future.result()
                warm_up("Spark", query_runners, oracle, progress)  # The server builds indexes meanwhile.
                # One process builds the rest of the indexes, and Trino starts on the other core.
                trino_future = background.submit(_start_trino, options, server, folder, progress, engines)
                lake.wait_for_indexes(client, progress)
                trino_runners, needed_files = trino_future.result(), needed_files_future.result()
                comparisons = [
                    compare_configurations(
                        "Spark", query_runners, oracle, needed_files, progress, rounds=options.rounds
                    )
                ]
            layouts = [background.submit(read_ranges, paths, data) for paths in (written_paths, clustered_paths)]
            if trino_runners is not None:  # Two cores are not enough for queries in both engines at a time.
                warm_up("Trino", trino_runners, oracle, progress)
                wait(layouts)
                comparisons.append(
                    compare_configurations("Trino", trino_runners, oracle, needed_files, progress, rounds=TRINO_ROUNDS)
                )
            oracle.close()
            page = format_report(comparisons, *(layout.result() for layout in layouts), options.scale)  # type: ignore[call-arg]
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(page)
            progress.stop()
            print_result(comparisons, options.scale, console)
            console.print(f"Pictures of both layouts: {options.report}", highlight=False, soft_wrap=True)
            if not trino.is_installed():
                console.print("With a JDK 25 (JAVA25) the demo asks Trino, too.")
            if options.keep:
                _leave_server_running(server, folder, console)
    return comparisons


def _generate_and_write(uri: str, options: Options, progress: Progress) -> Path:
    """Generate the data if they are not there, write the tables, and return the folder of the data."""
    data = _generate(options, progress)
    lake.write_demo_tables(uri, data, options, progress)
    return data


def _compute_answers(data: Path) -> Oracle:
    oracle = Oracle(data)
    oracle.prepare()
    return oracle


def _start_trino(
    options: Options, server: Seamark, folder: Path, progress: Progress, engines: contextlib.ExitStack
) -> Mapping[str, RunQuery] | None:
    """Start Trino and the proxy, and return the functions that run a query, or None without Trino.

    Both end with `engines`.
    """
    if not (options.trino and trino.is_installed()):
        return None
    task = progress.add_task("Trino and the proxy start", total=1)
    query_runners = engines.enter_context(trino.open_query_runners(folder, server.base_url))
    progress.update(task, completed=1)
    return query_runners


def _generate(options: Options, progress: Progress) -> Path:
    task = progress.add_task("data", total=1)

    def advance(step: str, steps_done: int, total: int) -> None:
        progress.update(task, description=f"data: {step}", completed=steps_done, total=total)

    folder = generate_ssb(CACHE / "ssb", options.scale, advance)
    progress.update(task, description=f"data, scale {options.scale:g}", completed=1, total=1)
    return folder


def _leave_server_running(server: Seamark, folder: Path, console: Console) -> None:
    """Leave the server running after the demo, and print how to use and end it.

    The URL and the process id of the server are written to the file `NOTE`, from which the next demo finds the server.
    On a machine with a display, the console opens in a web browser.
    """
    (folder / NOTE).write_text(json.dumps({"pid": server.pid, "url": server.base_url}))
    server.leave_running()
    table = f"{lake.NAMESPACE}.{FACT}"
    console.print(f"\nThe server keeps running at [bold]{server.base_url}[/], its files in {folder}.")
    console.print(f"To end it: [bold]kill {server.pid}[/]", highlight=False)
    console.print(f"The console, with the layouts, plans and indexes of the tables: [bold]{server.base_url}/[/]")
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(f"{server.base_url}/#/table/{'/'.join(lake.CLUSTERED)}/layout")
    jars = iceberg_jars(CACHE / "jars")
    for engine, language, text in (
        ("Spark", "bash", connect.format_spark(server.base_url, jars, table)),
        ("PyIceberg", "python", connect.format_pyiceberg(server.base_url, table)),
        ("Trino, on this machine", "properties", connect.format_trino(server.base_url, table)),
        ("DuckDB", "sql", connect.format_duckdb(server.base_url, table)),
    ):
        console.rule(engine, align="left")
        console.print(Syntax(text, language, background_color="default"), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
