"""How fast does a server acknowledge rows over HTTP, compared with Kafka with the same durability?

Each writer sends a batch and waits for the answer. A batch is durable on the disk when it is acknowledged. The peer is
confluent-kafka with `acks=all`, an idempotent producer, and a topic with `flush.messages=1`: the broker writes each
record to the disk before it answers. The bound is the disk alone: one writer that calls fdatasync after each batch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from pathlib import Path

import aiohttp
import pyarrow as pa

from bench.measure import read_cpu_s
from bench.report import OURS, Report, Row
from bench.streams.kafka import measure_producer
from bench.streams.log import AppendMeasurements, measure_bare_disk
from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.writer import ARROW
from tests.services.kafka import Kafka, run_kafka_broker
from tests.services.seamark import Seamark

PEER, BARE = "kafka, synced", "bare fdatasync"
ROWS = (1, 10, 1_000, 10_000)
ROW_BYTES = (100, 1_000)
WRITERS = (1, 32)
JSON_ROWS_MAX = 10
"""The largest batch that is sent as JSON. Larger batches are Arrow IPC streams."""
SECONDS, QUICK_SECONDS = 1.5, 0.1
_PAUSE_S = 0.02
"""The pause in seconds of a writer whose request the server refuses because its memory is full."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    seconds = QUICK_SECONDS if quick else SECONDS
    report = Report("streams_appends", "How fast does a server acknowledge rows over HTTP?", peer=PEER)
    smallest = measure_bare_disk(folder, 1, seconds)
    report.bounds = {
        "fdatasync of this disk after a write of 1 byte": f"{smallest.rate:,.0f} a second, p50 "
        f"{smallest.compute_quantile_ms(0.5):.2f} ms, p99 {smallest.compute_quantile_ms(0.99):.2f} ms",
    }
    with run_kafka_broker(folder / "broker") as kafka, Seamark(folder / "home") as server:
        client = SeamarkClient(server.base_url)
        create_namespace(client, "bench", {})
        for row_bytes, rows in itertools.product(ROW_BYTES, ROWS[:2] if quick else ROWS):
            disk = measure_bare_disk(folder, rows * row_bytes, seconds / 2)
            for writers in WRITERS:
                await _add_case(report, kafka, server, (rows, row_bytes, writers), disk, seconds)
    report.notes += [
        f"{seconds:g} s a case. All writers append to one table with one shard. Batches up to {JSON_ROWS_MAX} rows are "
        "JSON, larger batches are Arrow. The server decodes and checks them, and flushes them to Parquet meanwhile. "
        "Kafka stores opaque bytes.",
        "The writers run in one process on the same two cores as the server and the broker. CPU is that of the server.",
        "A writer that the server refuses, because its memory for rows or bodies is full, sends the batch again after "
        f"{1000 * _PAUSE_S:g} ms.",
    ]
    return report


async def _add_case(
    report: Report, kafka: Kafka, server: Seamark, case: tuple[int, int, int], disk: AppendMeasurements, seconds: float
) -> None:
    rows, row_bytes, writers = case
    peer = await measure_producer(kafka, rows, row_bytes, writers, seconds, is_synced=True)
    measurements = await measure_requests(server, rows, row_bytes, writers, seconds)
    name, mib = f"{rows:,} rows of {row_bytes:,} B, {writers} writers", rows * row_bytes / 2**20
    add = report.rows.append
    rates = {OURS: measurements.rate * rows, PEER: peer.rate * rows, BARE: disk.rate * rows}
    add(Row(name, "acknowledged", "rows/s", rates, False, PEER))
    sizes = {OURS: measurements.rate * mib, PEER: peer.rate * mib, BARE: disk.rate * mib}
    add(Row(name, "acknowledged bytes", "MiB/s", sizes, False, PEER))
    for quantile, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
        values = {
            OURS: measurements.compute_quantile_ms(share),
            PEER: peer.compute_quantile_ms(share),
            BARE: disk.compute_quantile_ms(share),
        }
        add(Row(name, quantile, "ms", values, peer=PEER))
    add(
        Row(
            name,
            "bytes a second of CPU",
            "MiB/s",
            {OURS: measurements.rate * mib * measurements.seconds / measurements.cpu_s},
            False,
        )
    )


async def measure_requests(
    server: Seamark, rows: int, row_bytes: int, writers: int, seconds: float, suffix: str = ""
) -> AppendMeasurements:
    """Append batches to a new table, whose name has the suffix, for `seconds`, and return the measurements."""
    name = f"t{rows}_{row_bytes}_{writers}{suffix}"
    client = SeamarkClient(server.base_url)
    fields = [
        {"id": 1, "name": "id", "required": True, "type": "long"},
        {"id": 2, "name": "payload", "required": False, "type": "string"},
    ]
    schema = {"type": "struct", "fields": fields}
    properties = {"seamark.stream.enabled": "true"}
    await asyncio.to_thread(create_table, client, ("bench", name), schema, properties=properties)
    body, media_type = make_body(rows, row_bytes)
    url, latencies = f"{server.base_url}/api/v1/tables/bench/{name}/rows", list[float]()
    connector = aiohttp.TCPConnector(limit=writers)
    async with aiohttp.ClientSession(connector=connector, headers={"Content-Type": media_type}) as http:

        async def append() -> None:
            while True:
                async with http.post(url, data=body) as answer:
                    if answer.status == 200:
                        await answer.read()
                        return
                    assert answer.status in (429, 503), await answer.text()
                await asyncio.sleep(_PAUSE_S)

        async def write() -> None:
            while (call_began_s := time.perf_counter()) - started_s < seconds:
                await append()
                latencies.append(time.perf_counter() - call_began_s)

        await append()
        started_s, cpu_s = time.perf_counter(), read_cpu_s(server.pid)
        await asyncio.gather(*(write() for _ in range(writers)))
        seconds, cpu_s = time.perf_counter() - started_s, read_cpu_s(server.pid) - cpu_s
    return AppendMeasurements(latencies, seconds, max(cpu_s, 0.01), len(latencies))


def make_body(rows: int, row_bytes: int) -> tuple[bytes, str]:
    """Return a body with rows whose values have about `row_bytes` bytes, and its media type."""
    # In hexadecimal, each random byte has two characters. Eight bytes remain for the id.
    payloads = [os.urandom(row_bytes // 2 - 4).hex() for _ in range(rows)]
    if rows <= JSON_ROWS_MAX:
        objects = [{"id": number, "payload": payload} for number, payload in enumerate(payloads)]
        return json.dumps(objects).encode(), "application/json"
    table = pa.table({"id": range(rows), "payload": payloads})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes(), ARROW
