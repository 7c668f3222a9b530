"""`seamark demo`: shows a lookup before and after an index is built, and rows that a reader sees before a commit.

The demo starts a server with default settings in a temporary home. Unmodified PyIceberg writes the table and looks rows
up; the server's table services build the index. The rows of both lookups must equal the rows that were written. The
demo needs no JVM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.transforms import IdentityTransform
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from seamark.commands.demo.streaming import measure_stream, show_stream
from seamark.commands.terminal import print_bars, show_count
from seamark.connector.client.errors import ClientError, NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.decoding import convert_json

NAMESPACE, TABLE, INDEX = "demo", "demo.events", "by_user"
DEFINITION = "bloom(user_id, fpp=0.001)"
ROWS_A_FILE, EVENTS_A_USER = 500, 8
FILES_MAX = 20_000
START_S, BUILD_S = 60.0, 300.0
"""The maximum times in seconds for the start of the server and for the build of the index."""
_POLL_S = 0.05
_SHOWN_LOG_LINES = 5
"""The number of lines of the server's log that are shown if the server does not start."""
_CLOCK = SystemClock()


@dataclass(frozen=True)
class DemoLookup:
    """The result of a lookup of one user's rows.

    Attributes:
        files: The number of data files that PyIceberg opened.
        seconds: The time of planning and reading.
        rows: The rows.
    """

    files: int
    seconds: float
    rows: pa.Table


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo.

    Attributes:
        files: The number of data files of the table.
        files_with_rows: The number of data files that contain a row of the result. Every plan must contain them.
        lookup_before: The lookup before the index was built.
        lookup_after: The lookup after the index was built.
        build_s: The time until the index was built, in seconds.
    """

    files: int
    files_with_rows: int
    lookup_before: DemoLookup
    lookup_after: DemoLookup
    build_s: float


@click.command()
@click.option(
    "--files", default=2000, show_default=True, help=f"Number of data files of the table, at most {FILES_MAX}."
)
@click.option("--keep", is_flag=True, help="Keep the server and the table until Ctrl-C.")
def demo(files: int, keep: bool) -> None:
    """Look up one user in 2,000 files, before and after an index is built. Then read rows while they arrive.

    The command starts its own server in a temporary folder, writes the table with PyIceberg, and deletes everything at
    the end. It takes less than a minute.
    """
    if not 1 <= files <= FILES_MAX:
        raise click.BadParameter(
            f"The number of files is {files}, but it must be between 1 and {FILES_MAX:,}", param_hint="--files"
        )
    console = Console()
    # Exit normally on SIGTERM, so that the server ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["no_proxy"] = "127.0.0.1"  # PyIceberg must not connect to the server through a proxy.
    with tempfile.TemporaryDirectory(prefix="seamark-demo-") as folder:
        try:
            _run_demo(Path(folder), files, console, keep=keep)
        except ClientError as error:
            raise click.ClickException(error.message) from None


def _run_demo(folder: Path, files: int, console: Console, *, keep: bool) -> None:
    """Run both parts of the demo with a server in `folder`, and print the results."""
    columns = TextColumn("{task.description:<43}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting seamark serve", total=1)
        with _run_server(folder) as url:
            progress.update(task, completed=1)
            result = measure_lookups(url, files, progress)
            progress.stop()
            show_demo_result(result, console)
            console.print()
            with contextlib.closing(RestCatalog("demo", uri=url)) as catalog:
                show_stream(measure_stream(catalog, url), console)
            if keep:
                console.print(f"The server runs at [bold]{url}[/] until Ctrl-C. The table is {TABLE}.")
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()


@contextlib.contextmanager
def _run_server(folder: Path) -> Iterator[str]:
    """Start a server with default settings, yield its URL, and stop it when the context ends.

    Raises:
        ClickException: The server does not start.
    """
    home, log = folder / "home", folder / "server.log"
    argv = [sys.executable, "-c", "from seamark.commands.main import main; main()", "serve"]
    argv += ["--home", str(home), "--host", "127.0.0.1", "--port", "0"]
    # The settings of another server must not apply to the demo.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEAMARK_")}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            argv, stdout=output, stderr=output, cwd=folder, env=environment, start_new_session=True
        )
    try:
        yield _wait_for_url(process, home / "server.json", log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], server_json: Path, log: Path) -> str:
    deadline_s = _CLOCK.monotonic() + START_S
    while process.poll() is None and _CLOCK.monotonic() < deadline_s:
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError):
            return str(convert_json(server_json.read_bytes(), dict[str, object])["url"])
        time.sleep(_POLL_S)
    last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:])
    raise click.ClickException(f"The server did not start:\n{last_lines}")


def measure_lookups(url: str, files: int, progress: Progress) -> DemoResult:
    """Write the table, and look up a user before and after the index is built.

    Raises:
        ClickException: A lookup returns other rows than were written.
    """
    events = make_events(files)
    user = int(events["user_id"][len(events) // 2].as_py())
    expected = _sort_rows(events.filter(pc.equal(events["user_id"], user)))
    with contextlib.closing(RestCatalog("demo", uri=url)) as catalog, contextlib.closing(IndexClient(url)) as client:
        with _step(progress, f"PyIceberg writes {show_count(files, 'file')}"):
            write_events(catalog, events)
        with _step(progress, f"PyIceberg looks user {user} up"):
            lookup_before = look_up_user(catalog, user)
        task = progress.add_task(f"the server builds {DEFINITION}", total=files)
        build_s = build_demo_index(catalog, client, progress, task)
        with _step(progress, f"PyIceberg looks user {user} up again"):
            lookup_after = look_up_user(catalog, user)
    for lookup in (lookup_before, lookup_after):
        if not lookup.rows.equals(expected):
            raise click.ClickException(
                f"A lookup returned {len(lookup.rows)} rows instead of the {len(expected)} rows that were written"
            )
    files_with_rows = len(pc.unique(expected["batch"]))
    return DemoResult(files, files_with_rows, lookup_before, lookup_after, build_s)


@contextlib.contextmanager
def _step(progress: Progress, text: str) -> Iterator[None]:
    task = progress.add_task(text, total=1)
    yield
    progress.update(task, completed=1)


def make_events(files: int) -> pa.Table:
    """Return 500 events for each file. The users are in random order, so column bounds of users prune no files."""
    # With a fixed seed, each run of the demo has the same events.
    rng, count = np.random.default_rng(1), files * ROWS_A_FILE
    pages = pa.array([f"/page/{number}" for number in range(50)])
    return pa.table(
        {
            "batch": pa.array(np.repeat(np.arange(files, dtype=np.int32), ROWS_A_FILE)),
            "user_id": rng.integers(0, max(1, count // EVENTS_A_USER), count),
            "amount": np.round(rng.random(count) * 100, 2),
            "page": pages.take(pa.array(rng.integers(0, len(pages), count))),
        }
    )


def write_events(catalog: RestCatalog, events: pa.Table) -> None:
    """Write one data file for each batch, in one append."""
    catalog.create_namespace(NAMESPACE)
    table = catalog.create_table(TABLE, schema=events.schema)
    with table.update_spec() as spec:
        spec.add_field("batch", IdentityTransform(), "batch")
    table.append(events)


def look_up_user(catalog: RestCatalog, user: int) -> DemoLookup:
    started_s = _CLOCK.monotonic()
    scan = catalog.load_table(TABLE).scan(row_filter=f"user_id = {user}")
    rows = _sort_rows(scan.to_arrow())
    seconds = _CLOCK.monotonic() - started_s
    return DemoLookup(len(list(scan.plan_files())), seconds, rows)


def build_demo_index(catalog: RestCatalog, client: IndexClient, progress: Progress, task: TaskID) -> float:
    """Define the index by a table property, and return the seconds until the server has built it.

    Raises:
        ClickException: The build takes longer than `BUILD_S`.
    """
    started_s = _CLOCK.monotonic()
    with catalog.load_table(TABLE).transaction() as transaction:
        transaction.set_properties({f"seamark.index.{INDEX}": DEFINITION})
    while _CLOCK.monotonic() < started_s + BUILD_S:
        with contextlib.suppress(NoSuchResource):
            index = client.index(TABLE, INDEX)
            progress.update(task, completed=index.files)
            if index.files == index.files_total:
                return _CLOCK.monotonic() - started_s
        time.sleep(_POLL_S)
    raise click.ClickException(f"The index was not built within {BUILD_S:g} s")


def _sort_rows(rows: pa.Table) -> pa.Table:
    columns = ["batch", "user_id", "amount", "page"]
    types = pa.schema([("batch", pa.int32()), ("user_id", pa.int64()), ("amount", pa.float64()), ("page", pa.string())])
    return rows.select(columns).cast(types).sort_by([(name, "ascending") for name in columns]).combine_chunks()


def show_demo_result(result: DemoResult, console: Console) -> None:
    """Print the result as bars and a sentence."""
    scan_before, scan_after = result.lookup_before, result.lookup_after
    rows = (
        ("Iceberg alone", scan_before.files, scan_before.seconds),
        (f"with {DEFINITION}", scan_after.files, scan_after.seconds),
        ("files that hold a row of the answer", result.files_with_rows, None),
    )
    console.print(
        f"\nOne user of {result.files * ROWS_A_FILE:,} events in {show_count(result.files, 'file')}: files opened\n"
    )
    texts = [f"{files:>6,}{'' if seconds is None else f'{seconds:8.3f} s'}" for _, files, seconds in rows]
    print_bars([(name, files, text) for (name, files, _), text in zip(rows, texts, strict=True)], console)
    ratio = scan_before.seconds / max(scan_after.seconds, 1e-6)  # The time may be 0 on a coarse clock.
    console.print(
        f"\nThe same data, the same reader, the same {show_count(len(scan_after.rows), 'row')}: "
        f"{scan_before.files:,} → {show_count(scan_after.files, 'file')}, {ratio:,.0f}× sooner. "
        f"The server built the index automatically in {result.build_s:.1f} s.",
        highlight=False,
    )
