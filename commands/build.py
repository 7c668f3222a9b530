"""`seamark index build`: builds an index for the files that it does not cover, while writers continue.

Small builds run in this process. Larger builds run in Spark, which is embedded unless `--master` names a cluster. Exit
codes: 0 if the index covers all files that it can cover, 1 after a refusal, 2 for invalid arguments, 130 after Ctrl-C,
143 after SIGTERM. Ctrl-C and SIGTERM roll the build back. Its index files are kept, and the next build continues from
them.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from types import FrameType
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as ProgressBar

from seamark.commands.connecting import server_command
from seamark.commands.options import Misconfigured
from seamark.commands.terminal import open_console, print_json, say, show_count, show_size
from seamark.connector.client.errors import Conflict
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import (
    AdaptiveWorkers,
    BuildProgress,
    BuildReport,
    ClusterFailed,
    InProcessWorkers,
    TableReplaced,
    Workers,
    build,
)
from seamark.formats.runtime.errors import Corrupt

_SKIPPED_SHOWN_MAX = 10
_OTHER_BUILDER_POLL_S = 1.0
_WAITING = "Waiting for its end. A build whose process was killed counts as ended after 5 minutes."
_IN_PROGRESS = "is in progress"
"""The words of the server's refusal to start a build while a different build runs."""
ENGINES = ("auto", "process", "spark")


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--engine` and `--master` to a command."""
    command = click.option(
        "--master",
        default="local[*]",
        show_default=True,
        envvar="SPARK_MASTER",
        show_envvar=True,
        help="Spark master: local[N], or the URL of a cluster whose workers have this package installed.",
    )(command)
    return click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default="auto",
        show_default=True,
        help="Engine that reads the data files: process (this process), spark, or auto (Spark if there are many "
        "files).",
    )(command)


@contextmanager
def open_workers(engine: str, master: str) -> Iterator[Workers]:
    """Open the workers that read data files, and close them when the context ends.

    Raises:
        Misconfigured: Spark is requested but not installed.
        ClickException: Spark is requested, and cannot be started.
    """
    start = partial(start_spark, master)
    workers: Workers = InProcessWorkers()
    if engine == "spark":
        try:
            workers = start()
        except ClusterFailed as error:
            raise click.ClickException(str(error)) from None
    elif engine == "auto" and has_spark():
        workers = AdaptiveWorkers(start)
    try:
        yield workers
    finally:
        workers.close()


def has_spark() -> bool:
    return importlib.util.find_spec("pyspark") is not None


def start_spark(master: str) -> Workers:
    """Start Spark, and return workers that run on it.

    Only this function imports PySpark, because it is an optional dependency.

    Raises:
        Misconfigured: Spark is not installed.
        ClusterFailed: Spark cannot be started.
    """
    if not has_spark():
        raise Misconfigured("Spark is not installed; run pip install 'seamark[spark]', or use --engine process")
    workers: Workers = importlib.import_module("seamark.connector.spark.index_job").SparkWorkers.start(master)
    return workers


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C while the context is active.

    Both signals raise KeyboardInterrupt. The command ends without an error message, with the exit code of a process
    that a signal ended. Further signals have no effect, because they would interrupt the clean-up. SIGKILL ends the
    process immediately.
    """
    signals: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not signals:
            signals.append(number)
            raise KeyboardInterrupt(signal.Signals(number).name)

    previous_handlers: dict[int, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous_handlers[number] = signal.signal(number, interrupt)
        yield
    except KeyboardInterrupt:
        if not signals:
            raise
        previous_handlers.clear()  # The process ends now. Further signals have no effect until it has ended.
        raise SystemExit(128 + signals[0]) from None
    finally:
        for handled_signal, handler in previous_handlers.items():
            signal.signal(handled_signal, handler)


@click.command("build")
@click.argument("table")
@click.argument("name", required=False)
@engine_options
@server_command
def build_command(client: IndexClient, table: str, name: str | None, engine: str, master: str, as_json: bool) -> None:
    """Build the index NAME of TABLE, or all its indexes, for data files that are not covered.

    The command reads only the indexed columns. Writers do not wait, and the build includes files that they commit
    meanwhile. If the server or another command builds the index, the command waits for this build first.
    """
    indexes = client.indexes(table) if name is None else [client.index(table, name)]
    broken_indexes = [index for index in indexes if index.health == "broken" and name is None]
    # A bucket index is the partitioning of the table by bucket. It has no index files to build.
    names = [
        index.name
        for index in indexes
        if index.kind != "bucket" and index not in broken_indexes and (name is not None or index.state == "enabled")
    ]
    if not names and not broken_indexes:
        raise Misconfigured(f"{table} has no index to build; define one with seamark index create")
    reports: list[BuildReport] = []
    with handle_sigterm(), open_workers(engine, master) as workers:
        for index_name in names:
            try:
                reports.append(_build_index(client, table, index_name, workers, as_json=as_json))
            except (OSError, ClusterFailed, TableReplaced, Corrupt) as error:
                raise click.ClickException(f"Index {index_name} was not built: {error}") from None
    if as_json:
        print_json([report.json for report in reports])
    if broken_indexes:
        problems = "; ".join(f"{index.name}: {index.problem}" for index in broken_indexes)
        subject = (
            "1 index is broken and was"
            if len(broken_indexes) == 1
            else f"{len(broken_indexes)} indexes are broken and were"
        )
        raise click.ClickException(f"{subject} not built: {problems}")


def _build_index(client: IndexClient, table: str, name: str, workers: Workers, *, as_json: bool) -> BuildReport:
    """Build an index with a progress bar, and print the result."""
    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with ProgressBar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task_id = bar.add_task(f"Index {name}", total=None, text="")
        build_once = partial(build, client, table, name, workers, exclusive=True)
        report = _wait_for_other_builder(
            lambda: build_once(on_progress=partial(_show_progress, bar, task_id)), client, table, name
        )
    progress = report.progress
    if not as_json:
        say(
            f"Index {name}: {show_count(progress.files_done, 'data file')}, {show_count(progress.rows_done, 'row')} in "
            f"{show_count(progress.index_files, 'index file')}, {show_size(progress.size_bytes)}"
        )
    _print_skipped_files(report)
    if report.json["state"] != "completed":
        raise click.ClickException(f"Index {name} was not built: {report.json['reason']}")
    return report


def _wait_for_other_builder(
    build_once: Callable[[], BuildReport], client: IndexClient, table: str, name: str
) -> BuildReport:
    """Build an index after the build of a different builder has ended, so that no file is indexed twice.

    The server excludes other builds until a build has been inactive for some minutes, so the wait ends.
    """
    has_told = False
    while True:
        try:
            return build_once()
        except Conflict as error:
            if _IN_PROGRESS not in error.message:
                raise
            if not has_told:
                say(f"{error.message.removesuffix('; try again later')}. {_WAITING}", err=True)
            has_told = True
        time.sleep(_OTHER_BUILDER_POLL_S)


def _show_progress(bar: ProgressBar, task_id: TaskID, progress: BuildProgress) -> None:
    text = show_size(progress.size_bytes)
    if progress.eta_ms is not None:
        text += f", done about {datetime.fromtimestamp(progress.eta_ms / 1000, UTC).astimezone():%H:%M:%S}"
    bar.update(task_id, completed=progress.files_done + progress.files_skipped, total=progress.files_total, text=text)


def _print_skipped_files(report: BuildReport) -> None:
    if report.files_not_indexed:
        say(f"Plans always keep {show_count(report.files_not_indexed, 'data file')} that cannot be indexed:", err=True)
    for path, reason in report.skipped[:_SKIPPED_SHOWN_MAX]:
        say(f"  {path}: {reason}", err=True)
    if report.files_not_indexed > _SKIPPED_SHOWN_MAX:
        say("  …", err=True)
