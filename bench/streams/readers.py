"""How much do readers slow down the writers of a stream table?

Writers send rows at a steady rate, first alone, then while PyIceberg scans the new rows in a loop, as fast as it
can. Each reader is a separate process. With the log in Kafka, readers use the server of the writers, or a server that
only reads.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import aiohttp
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.expressions import GreaterThan

from bench.report import OURS, Report, Row
from bench.streams.log import AppendMeasurements
from bench.streams.visible import PAYLOAD, SCHEMA
from tests.services.kafka import run_kafka_broker
from tests.services.postgres import postgres_server
from tests.services.seamark import Seamark

WITHOUT_READERS = "without readers"
RATE, BATCH_ROWS, WRITERS = 10_000, 100, 4
SECONDS, QUICK_SECONDS = 15.0, 1.0
READERS = (1, 2)
GOAL_SHARE = 0.95


@dataclass(frozen=True)
class Servers:
    """The servers of a case.

    Attributes:
        label: The case.
        writer_url: The server of the writers.
        reader_url: The server of the readers.
        prefix: The beginning of the names of the tables.
    """

    label: str
    writer_url: str
    reader_url: str
    prefix: str


async def run(folder: Path, *, quick: bool = False) -> Report:
    seconds = QUICK_SECONDS if quick else SECONDS
    report = Report("streams_readers", "How much do readers slow writers?", peer=WITHOUT_READERS)
    with Seamark(folder / "home") as server:
        RestCatalog("bench", uri=server.base_url).create_namespace("bench")
        await _add_cases(report, [Servers("log in files", server.base_url, server.base_url, "f")], seconds)
    with ExitStack() as stack:
        kafka = stack.enter_context(run_kafka_broker(folder / "broker"))
        database = stack.enter_context(postgres_server()).create_database()
        env = {"SEAMARK_STREAM_LOG": f"kafka://{kafka.address}/bench"}
        warehouse = f"file://{folder / 'warehouse'}"
        writer = stack.enter_context(Seamark(folder / "writer", warehouse=warehouse, database=database, env=env))
        env |= {"SEAMARK_ROLE": "read", "SEAMARK_WRITER_URLS": writer.base_url}
        reader = stack.enter_context(Seamark(folder / "reader", warehouse=warehouse, database=database, env=env))
        RestCatalog("bench", uri=writer.base_url).create_namespace("bench")
        cases = [
            Servers("log in Kafka, the server of the writers", writer.base_url, writer.base_url, "k"),
            Servers("log in Kafka, a server that only reads", writer.base_url, reader.base_url, "r"),
        ]
        await _add_cases(report, cases, seconds)
    report.notes.append(
        f"{WRITERS} writers send {RATE:,} rows a second in batches of {BATCH_ROWS} (JSON). Servers, writers, readers "
        "and the broker share two cores, so a reader also takes CPU from the server while the server handles "
        "none of its requests."
    )
    return report


async def _add_cases(report: Report, cases: Sequence[Servers], seconds: float) -> None:
    """Measure the first case without readers, then each case with each number of readers."""
    without_readers, _ = await _measure_readers(cases[0], 0, seconds)
    for servers in cases:
        for readers in READERS:
            with_readers, scans = await _measure_readers(servers, readers, seconds)
            case = f"{readers} readers at full speed, {servers.label}"
            rates = {OURS: with_readers.rate * BATCH_ROWS, WITHOUT_READERS: without_readers.rate * BATCH_ROWS}
            goal = GOAL_SHARE * rates[WITHOUT_READERS]
            report.rows.append(Row(case, "acknowledged", "rows/s", rates, False, WITHOUT_READERS, goal))
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                values = {
                    OURS: with_readers.compute_quantile_ms(share),
                    WITHOUT_READERS: without_readers.compute_quantile_ms(share),
                }
                report.rows.append(Row(case, name, "ms", values, peer=WITHOUT_READERS))
            report.notes.append(f"{case}: {scans:,} scans in {seconds:g} s")


async def _measure_readers(servers: Servers, readers: int, seconds: float) -> tuple[AppendMeasurements, int]:
    """Return the measurements of the writers, and the number of scans during the writes."""
    name = f"{servers.prefix}{readers}"
    catalog = RestCatalog("bench", uri=servers.writer_url)
    catalog.create_table(f"bench.{name}", SCHEMA, properties={"seamark.stream.enabled": "true"})
    context = multiprocessing.get_context("spawn")
    is_ready, is_ending, scans = context.Event(), context.Event(), context.Value("i", 0)
    processes = [
        context.Process(target=scan_repeatedly, args=(servers.reader_url, name, is_ready, is_ending, scans))
        for _ in range(readers)
    ]
    for process in processes:
        process.start()
    try:
        if readers:
            await asyncio.to_thread(is_ready.wait)
        scans_before = scans.value
        measurements = await _write_steadily(f"{servers.writer_url}/api/v1/tables/bench/{name}/rows", seconds)
        return measurements, scans.value - scans_before
    finally:
        is_ending.set()
        for process in processes:
            process.join()


async def _write_steadily(url: str, seconds: float) -> AppendMeasurements:
    """Send batches at a steady rate. A late batch is sent immediately."""
    latencies: list[float] = []
    every_s = BATCH_ROWS * WRITERS / RATE
    async with aiohttp.ClientSession() as http:

        async def append(first_id: int) -> None:
            read_time_s = time.time()
            rows = [
                {"id": first_id + row_number, "at": read_time_s, "payload": PAYLOAD} for row_number in range(BATCH_ROWS)
            ]
            call_began_s = time.perf_counter()
            async with http.post(url, json=rows) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            latencies.append(time.perf_counter() - call_began_s)

        async def write(writer_number: int) -> None:
            for round_number in range(1, int(seconds / every_s) + 1):
                await asyncio.sleep(max(0.0, started_s + round_number * every_s - time.perf_counter()))
                await append((round_number * WRITERS + writer_number) * BATCH_ROWS)

        await append(0)  # The first append opens the log and the table.
        latencies.clear()
        started_s = time.perf_counter()
        await asyncio.gather(*map(write, range(WRITERS)))
        return AppendMeasurements(latencies, time.perf_counter() - started_s, 0.0, len(latencies))


def scan_repeatedly(url: str, name: str, is_ready: Event, is_ending: Event, scans: Synchronized[int]) -> None:
    """Scan the rows after the last row that was read, until `is_ending` is set."""
    catalog = RestCatalog("bench", uri=url, **{"rest-scan-planning-enabled": "true"})
    last_number = -1
    while not is_ending.is_set():
        scan = catalog.load_table(f"bench.{name}").scan(GreaterThan("id", last_number), selected_fields=("id", "at"))  # type: ignore[call-arg]
        rows = scan.to_arrow()
        if rows.num_rows:
            last_number = max(rows.column("id").to_pylist())
        with scans.get_lock():
            scans.value += 1
        is_ready.set()
