"""The second part of `seamark demo`: an unmodified reader sees rows before a commit adds them to the table.

A thread posts rows at a constant rate, and unmodified PyIceberg repeatedly scans the table for new rows. The delay of a
row is the time from its creation to the end of the scan that returned it. No commit is made while the rows arrive.
Afterwards, a flush adds all rows in one commit.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

import click
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType, TimestamptzType
from rich.console import Console

from seamark.commands.terminal import show_count
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.status import flush_stream
from seamark.connector.streams.writer import stream_writer
from seamark.formats.runtime.clock import SystemClock

TABLE = "demo.clicks"
ROWS_PER_SECOND = 1_000
STREAM_SECONDS = 5.0
_TICK_S = 0.02
"""The time in seconds between two posts of rows."""
_NOT_SEEN_S = 60.0
"""The time after which the demo fails if the reader has not seen all rows."""
_FLUSH_INTERVAL_MS = 600_000
"""The interval of flushes, in milliseconds. It is longer than the demo, which requests its flush."""
_SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "at", TimestamptzType(), required=True),
    NestedField(3, "page", StringType()),
)
_CLOCK = SystemClock()


@dataclass(frozen=True)
class StreamResult:
    """The result of the second part of the demo.

    Attributes:
        rows: The number of rows that were posted and seen.
        scans: The number of scans by PyIceberg.
        delays_ms: The delay of each row, from its creation to the end of the scan that returned it.
        commits: The number of commits between the first posted row and the last seen row.
        flushed_files: The number of data files that the flush added.
    """

    rows: int
    scans: int
    delays_ms: list[float]
    commits: int
    flushed_files: int


def measure_stream(catalog: RestCatalog, url: str, seconds: float = STREAM_SECONDS) -> StreamResult:
    """Post rows for some seconds while PyIceberg scans, then flush.

    Raises:
        ClickException: PyIceberg does not return each row once, before or after the flush.
        ClientError: The server refuses the rows or the flush.
    """
    properties = {
        "seamark.stream.enabled": "true",
        "seamark.stream.flush-interval-ms": str(_FLUSH_INTERVAL_MS),
    }
    catalog.create_table(TABLE, _SCHEMA, properties=properties)
    count, delays_ms, scans = int(ROWS_PER_SECOND * seconds), list[float](), 0
    with contextlib.closing(SeamarkClient(url)) as client, ThreadPoolExecutor(1) as pool:
        # The first row of a table is committed at once. Posting it also connects both programs.
        _post_rows(client, 0, 1)
        flush_stream(client, TABLE)
        table = catalog.load_table(TABLE)
        snapshots_before, files_before = len(table.snapshots()), len(list(table.scan().plan_files()))
        posting = pool.submit(_post_rows, client, 1, count)
        deadline_s = _CLOCK.monotonic() + seconds + _NOT_SEEN_S
        while len(delays_ms) < count and _CLOCK.monotonic() < deadline_s:
            if posting.done():
                posting.result()
            scan = catalog.load_table(TABLE).scan(f"id > {len(delays_ms)}", selected_fields=("at",))
            row_times = scan.to_arrow().column("at").to_pylist()
            now_ms, scans = _CLOCK.now_ms(), scans + 1
            delays_ms += [now_ms - time.timestamp() * 1_000 for time in row_times]
        posting.result()
        table = catalog.load_table(TABLE)
        _check_ids(table.scan(selected_fields=("id",)).to_arrow(), count + 1)
        commits = len(table.snapshots()) - snapshots_before
        flush_stream(client, TABLE)
        scan = catalog.load_table(TABLE).scan(selected_fields=("id",))
        _check_ids(scan.to_arrow(), count + 1)
    return StreamResult(count, scans, delays_ms, commits, len(list(scan.plan_files())) - files_before)


def _post_rows(client: SeamarkClient, first: int, count: int) -> None:
    """Post `count` rows at a constant rate. The id of the first row is `first`."""
    begun_s, sent_rows = _CLOCK.monotonic(), 0
    with stream_writer(client, TABLE) as writer:
        while sent_rows < count:
            due_rows = min(count, int((_CLOCK.monotonic() - begun_s) * ROWS_PER_SECOND) + 1)
            time_text = datetime.fromtimestamp(_CLOCK.now_ms() / 1_000, UTC).isoformat()
            writer.write(
                [
                    {"id": first + row, "at": time_text, "page": f"/page/{row % 50}"}
                    for row in range(sent_rows, due_rows)
                ]
            )
            sent_rows = due_rows
            time.sleep(_TICK_S)


def _check_ids(rows: pa.Table, count: int) -> None:
    """Check that the ids from 0 to `count` - 1 occur once each.

    Raises:
        ClickException: A row is missing, or occurs twice.
    """
    ids = rows["id"]
    if ids.take(pc.sort_indices(ids)).to_pylist() != list(range(count)):
        raise click.ClickException(f"PyIceberg returned {len(rows)} rows of {TABLE}, but {count} were posted")


def show_stream(result: StreamResult, console: Console) -> None:
    """Print the delays, and the result of the flush."""
    median_ms, percentile_99_ms = np.percentile(result.delays_ms, (50, 99))
    console.print(
        f"\n{show_count(result.rows, 'row')} posted at {ROWS_PER_SECOND:,} a second, and read by unmodified PyIceberg "
        f"meanwhile in {show_count(result.scans, 'scan')}: half of the rows were visible within "
        f"{median_ms:,.0f} ms, 99 % within {percentile_99_ms:,.0f} ms, each once and after "
        f"{show_count(result.commits, 'commit')}. "
        f"Then one commit added them as {show_count(result.flushed_files, 'file')}.",
        highlight=False,
    )
