"""How long does a server take to serve a stream table again after `kill -9`, with a gigabyte of rows in its log?

There are two cases. With the default flush interval, most rows of the log are in data files. Without any flush, the
server has to read all rows again; this case needs more memory for rows than the default.
"""

from __future__ import annotations

import asyncio
import io
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import requests
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from bench.report import OURS, Report, Row
from seamark.connector.streams.writer import ARROW
from tests.services.seamark import Seamark

LOG_BYTES, QUICK_LOG_BYTES = 1 << 30, 8 << 20
BATCH_ROWS, ROW_BYTES = 2_000, 1_000
GOAL_S = 5.0
NEVER_MS = 3_600_000
"""A flush interval that is longer than the benchmark."""
CASES = {
    "rows of the last interval wait for a flush": {},
    "all rows wait for a flush": {
        "SEAMARK_STREAM_FLUSH_INTERVAL_MS": str(NEVER_MS),
        "SEAMARK_STREAM_MEMORY_BYTES": str(16 << 30),
    },
}
SCHEMA = Schema(NestedField(1, "id", LongType()), NestedField(2, "payload", StringType()))
_BUSY = (429, 503)
"""The statuses of answers that refuse rows for some time."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    return await asyncio.to_thread(_run_bench, folder, QUICK_LOG_BYTES if quick else LOG_BYTES)


def _run_bench(folder: Path, size_bytes: int) -> Report:
    report = Report("streams_recovery", "How soon does a server serve a stream table again after kill -9?")
    for number, (case, settings) in enumerate(CASES.items()):
        name = f"{size_bytes / 2**20:,.0f} MiB in the log, {case}"
        with Seamark(folder / str(number), env=settings) as server:
            for measure, seconds in _measure_recovery(server, size_bytes).items():
                goal = GOAL_S if measure == "until the first scan" else None
                report.rows.append(Row(name, measure, "s", {OURS: round(seconds, 2)}, goal=goal))
    report.notes.append(
        f"Rows of {ROW_BYTES:,} random bytes, in Arrow requests of {BATCH_ROWS:,}. All times are from the start of the "
        "new process. The scan counts all rows by unmodified PyIceberg with a plan of the server, and is checked. "
        "The files are in the page cache."
    )
    return report


def _measure_recovery(server: Seamark, size_bytes: int) -> dict[str, float]:
    """Fill the log, kill and start the server, and return the seconds until each step succeeds, by step."""
    catalog = RestCatalog("bench", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
    catalog.create_namespace("bench")
    catalog.create_table("bench.t", SCHEMA, properties={"seamark.stream.enabled": "true"})
    payload = [os.urandom(ROW_BYTES // 2).hex() for _ in range(BATCH_ROWS)]
    rows = 0
    with requests.Session() as http:

        def append(first: int) -> None:
            body = _encode_rows(first, payload)
            url = f"{server.base_url}/api/v1/tables/bench/t/rows"
            while (answer := http.post(url, body, headers={"Content-Type": ARROW})).status_code in _BUSY:
                time.sleep(0.05)
            assert answer.status_code == 200, answer.text

        while rows * ROW_BYTES < size_bytes:
            append(rows)
            rows += BATCH_ROWS
        server.kill9()
        begun_s = time.monotonic()
        server.start()
        steps = {"until the server is ready": time.monotonic() - begun_s}
        append(rows)
        steps["until the first append"] = time.monotonic() - begun_s
        count = catalog.load_table("bench.t").scan(selected_fields=("id",)).to_arrow().num_rows
        steps["until the first scan"] = time.monotonic() - begun_s
        assert count == rows + BATCH_ROWS, f"{count:,} rows were read, and {rows + BATCH_ROWS:,} were acknowledged"
    return steps


def _encode_rows(first: int, payload: list[str]) -> bytes:
    """Encode rows as an Arrow IPC stream. The ids begin with `first`."""
    table, sink = pa.table({"id": np.arange(first, first + len(payload)), "payload": payload}), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()
