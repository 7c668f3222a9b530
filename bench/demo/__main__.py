"""Run the demo with `python -m bench.demo` or `make demo`.

The data of the Star Schema Benchmark are generated once and kept in `.cache/ssb`. `seamark serve` starts with
default settings, Spark writes the tables through it, and the server builds the indexes. DuckDB checks every
answer on the source data. One wrong row fails the demo. `bench/demo/options.py` lists the environment
variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from bench.demo.queries import Comparison, build_spark_runners, compare, warm_up
from bench.demo.report import write_report
from bench.demo.screen import show
from bench.ssb.bounds import count_files_with_rows, list_data_paths
from bench.ssb.generate import generate
from bench.ssb.queries import Oracle
from bench.ssb.spark import FACT
from bench.trino.asking import Failed
from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.session import iceberg_jars
from tests.services.process import CACHE, ServiceFailed
from tests.services.seamark import Seamark

SPARK_WARM_UPS = 2
TRINO_ROUNDS = 1
SERVER = {"SEAMARK_SERVICES_WORKERS": "1"}
"""The default of `seamark serve`. The servers of the tests set no such workers."""


def main() -> int:
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # The server and Trino end as well.
    try:
        run(Options.read(os.environ), console)
    except (DemoFailed, Failed, ServiceFailed, FileNotFoundError) as error:
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
        with ThreadPoolExecutor(1) as meanwhile, Seamark(folder / "server", port=options.port, env=SERVER) as server:
            generated = meanwhile.submit(_generate, options, progress)
            future = meanwhile.submit(lambda: _compute_answers(generated.result()))  # Runs while Spark starts.
            progress.advance(steps)
            with (
                lake.open_demo_session(server.base_url, folder) as spark,
                contextlib.closing(IndexClient(server.base_url)) as client,
            ):
                progress.advance(steps)
                data = generated.result()
                lake.write(spark, data, options, progress)
                lake.define_indexes(client, lake.WRITTEN)  # The server indexes while Spark clusters.
                lake.cluster_facts(spark, client, options, progress)
                lake.define_indexes(client, lake.CLUSTERED)
                asks, oracle = build_spark_runners(spark), future.result()
                warm_up("Spark", asks, oracle, progress, repeats=SPARK_WARM_UPS)  # The server indexes meanwhile.
                lake.wait_for_indexes(client, progress)
                written_paths, clustered_paths = (
                    list_data_paths(client, table) for table in (lake.WRITTEN, lake.CLUSTERED)
                )
                bounds = _compute_bounds(clustered_paths, data, progress)
                comparisons = [compare("Spark", asks, oracle, bounds, progress, rounds=options.rounds)]
            if options.trino and trino.is_installed():
                comparisons.append(_run_in_trino(server, folder, oracle, bounds, progress))
            oracle.close()
            page = write_report(comparisons, written_paths, clustered_paths, data, options.scale)
            options.report.parent.mkdir(parents=True, exist_ok=True)
            options.report.write_text(page)
            progress.stop()
            show(comparisons, options.scale, console)
            console.print(f"Pictures of both layouts: {options.report}", highlight=False, soft_wrap=True)
            if not trino.is_installed():
                console.print("With a JDK 25 (JAVA25) the demo asks Trino, too.")
            if options.keep:
                _keep(server, folder, console)
    return comparisons


def _compute_answers(data: Path) -> Oracle:
    oracle = Oracle(data)
    oracle.prepare()
    return oracle


def _compute_bounds(clustered_paths: Sequence[str], data: Path, progress: Progress) -> dict[str, int]:
    task = progress.add_task("DuckDB finds the files that hold rows of answers", total=1)
    bounds = count_files_with_rows(clustered_paths, data)
    progress.update(task, completed=1)
    return bounds


def _run_in_trino(
    server: Seamark, folder: Path, oracle: Oracle, bounds: Mapping[str, int], progress: Progress
) -> Comparison:
    """Run the queries in Trino, after Spark has ended: two cores are not enough for both."""
    task = progress.add_task("Trino and the proxy start", total=1)
    with trino.open_query_runners(folder, server.base_url) as asks:
        progress.update(task, completed=1)
        warm_up("Trino", asks, oracle, progress)
        return compare("Trino", asks, oracle, bounds, progress, rounds=TRINO_ROUNDS)


def _generate(options: Options, progress: Progress) -> Path:
    task = progress.add_task("data", total=1)

    def advance(step: str, steps_done: int, total: int) -> None:
        progress.update(task, description=f"data: {step}", completed=steps_done, total=total)

    folder = generate(CACHE / "ssb", options.scale, advance)
    progress.update(task, description=f"data, scale {options.scale:g}", completed=1, total=1)
    return folder


def _keep(server: Seamark, folder: Path, console: Console) -> None:
    (folder / NOTE).write_text(json.dumps({"pid": server.pid, "url": server.base_url}))
    server.leave_running()
    table = f"{lake.NAMESPACE}.{FACT}"
    console.print(f"\nThe server stays up at [bold]{server.base_url}[/], its files in {folder}.")
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
