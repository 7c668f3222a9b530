"""How soon does PyIceberg read a row of a stream table?

A process sends rows at a steady rate; each row contains the time at which it was made. PyIceberg, without Seamark's
code, loads the table and scans the rows after the last row that it has read, again and again. The delay of a row is the
time from its making to the end of the scan that returns it. It includes the writer's batching, the acknowledgement, the
plan, and the read.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import GreaterThan
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, LongType, NestedField, StringType

from bench.report import OURS, Report, Row
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.writer import stream_writer
from tests.services.seamark import Seamark

RATES, QUICK_RATES = (100, 1_000, 10_000), (100, 1_000)
SECONDS, QUICK_SECONDS = 20.0, 4.0
WARM_S = 2.0
"""The first seconds, whose rows do not count, because both sides import modules and connect."""
GOAL_MS = 1_000.0
PAYLOAD = "x" * 80
TICK_S = 0.01
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "at", DoubleType(), required=True),
    NestedField(3, "payload", StringType()),
)


Read = Callable[[int], pa.Table]
"""A function that reads the columns `id` and `at` of the rows with an id greater than its argument."""


def measure_visibility(url: str, name: str, rate: int, seconds: float, read: Read) -> tuple[list[float], int]:
    """Send rows to a stream table at a steady rate, and read them in a loop.

    Returns:
        The delay of each row in milliseconds, and the number of scans.
    """
    writer = multiprocessing.get_context("spawn").Process(target=send_rows, args=(url, name, rate, seconds))
    writer.start()
    try:
        return read_until(read, int(rate * seconds))
    finally:
        writer.join()


def read_until(read: Read, count: int | None, seconds: float = 0.0) -> tuple[list[float], int]:
    """Read new rows in a loop, until the row with the id `count` - 1 is read, or for `seconds` if `count` is None.

    Returns:
        The delay of each row in milliseconds, and the number of scans.
    """
    delays, last_number, scans = list[float](), -1, 0
    begun_s: float | None = None
    while last_number < count - 1 if count is not None else begun_s is None or time.time() < begun_s + seconds:
        rows = read(last_number)
        now_s, scans = time.time(), scans + 1
        if not rows.num_rows:
            continue
        made_s = rows.column("at").to_numpy()
        begun_s = made_s.min() if begun_s is None else begun_s
        delays += ((now_s - made_s[made_s > begun_s + WARM_S]) * 1000).tolist()
        last_number = max(rows.column("id").to_pylist())
    return delays, scans


def read_by_pyiceberg(catalog: Catalog, name: str) -> Read:
    """Return a function that loads the table and scans it with PyIceberg."""

    def read(last_number: int) -> pa.Table:
        scan = catalog.load_table(f"bench.{name}").scan(GreaterThan("id", last_number), selected_fields=("id", "at"))  # type: ignore[call-arg]
        return scan.to_arrow()

    return read


def add_delays(
    report: Report,
    case: str,
    delays: list[float],
    peers: Mapping[str, list[float]],
    peer: str,
    *,
    goal_ms: float = GOAL_MS,
) -> None:
    """Add the quantiles of the delays until readers see a row to the report.

    Args:
        delays: The milliseconds from the making of each row to the end of the scan that returns it, with Seamark.
        peers: The delays with other systems, by the name of the system.
        peer: The system with which the report compares Seamark, or empty.
        goal_ms: The goal for the 99th percentile.
    """
    for percent, goal in ((50, None), (99, goal_ms), (99.9, None)):
        values = {server: round(float(np.percentile(each, percent)), 1) for server, each in peers.items()}
        values[OURS] = round(float(np.percentile(delays, percent)), 1)
        report.rows.append(Row(case, f"visible, p{percent:g}", "ms", values, peer=peer, goal=goal))


def send_rows(url: str, name: str, rate: int, seconds: float) -> None:
    """Send `rate` rows per second to a stream table, for `seconds`."""
    sent_count, count, begun_s = 0, int(rate * seconds), time.monotonic()
    with stream_writer(SeamarkClient(url), ("bench", name)) as writer:
        while sent_count < count:
            due = min(count, int((time.monotonic() - begun_s) * rate) + 1)
            now_s = time.time()
            writer.write([{"id": number, "at": now_s, "payload": PAYLOAD} for number in range(sent_count, due)])
            sent_count = due
            time.sleep(TICK_S)


async def run(folder: Path, *, quick: bool = False) -> Report:
    return await asyncio.to_thread(_run_bench, folder, quick)


def _run_bench(folder: Path, quick: bool) -> Report:
    seconds = QUICK_SECONDS if quick else SECONDS
    report = Report(
        "streams_visible", "After how long does unmodified PyIceberg read a row of a stream table?", peer="none"
    )
    with Seamark(folder / "home") as server:
        catalog = RestCatalog("bench", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
        catalog.create_namespace("bench")
        for rate in QUICK_RATES if quick else RATES:
            name = f"t{rate}"
            catalog.create_table(f"bench.{name}", SCHEMA, properties={"seamark.stream.enabled": "true"})
            delays, scans = measure_visibility(server.base_url, name, rate, seconds, read_by_pyiceberg(catalog, name))
            assert catalog.load_table(f"bench.{name}").scan().count() == int(rate * seconds)
            add_delays(report, f"{rate:,} rows/s", delays, {}, "")
            report.notes.append(f"{rate:,} rows/s: {scans:,} scans by PyIceberg, {len(delays):,} rows counted")
    report.notes.append(
        "The delay is from the making of a row to the end of the scan that returned it. Writer, server and reader are "
        "processes on the same two cores."
    )
    return report
