"""How much CPU time does each part of an append of 10,000 rows need in the server?

The bench calls the server's own functions on one Arrow request of the bench of appends.
So it shows which part limits the rate of large batches. It measures CPU time, which other programs disturb little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from awscrt.checksums import crc32c

from bench.report import OURS, Report, Row
from bench.streams.appends import make_body
from seamark.connector.streams.row_files import conform_rows, encode_rows, pack_rows
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.metaserver.streams.row_files import RowSlice

ROWS, ROW_BYTES = 10_000, 1_000
CALLS, QUICK_CALLS = 10, 2
_FIELDS = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "payload", "required": False, "type": "string"},
]


async def run(folder: Path, *, quick: bool = False) -> Report:
    return await asyncio.to_thread(_measure_parts, QUICK_CALLS if quick else CALLS)


def _measure_parts(calls: int) -> Report:
    report = Report("streams_costs", "How much CPU time does each part of a large append need in the server?")
    body, _ = make_body(ROWS, ROW_BYTES)
    metadata = build_table_metadata(
        uuid="4fd1a2c0-6a52-4a37-a5b5-9d2f4a1f6f10",
        location="file:///t",
        schema={"type": "struct", "fields": _FIELDS},
        partition_spec=None,
        sort_order=None,
        properties={},
        now_ms=1,
    )
    rows = _decode(body, metadata)
    payload = pack_rows(rows, metadata, ())
    table = pa.Table.from_batches([rows])
    parts: dict[str, Callable[[], object]] = {
        "decode and check the rows": lambda: conform_rows(
            pa.ipc.open_stream(body).read_next_batch(), metadata, b"", ()
        ),
        "pack the rows for the log": lambda: pack_rows(rows, metadata, ()),
        "checksum of the frame": lambda: crc32c(payload),
        "encode the data file of the flush": lambda: encode_rows([RowSlice(payload, 0, ROWS, b"")], metadata, None),
        "the same Parquet file by pyarrow alone": lambda: _write(table, "zstd"),
        "the same Parquet file without compression": lambda: _write(table, "none"),
    }
    for name, call in parts.items():
        report.rows.append(
            Row(f"{ROWS:,} rows of {ROW_BYTES:,} B: {name}", "CPU time", "ms", {OURS: _measure_ms(call, calls)})
        )
    report.notes.append(f"Mean of {calls} calls, one after the other. A request has {len(body) / 2**20:.1f} MiB.")
    return report


def _decode(body: bytes, metadata: TableMetadata) -> pa.RecordBatch:
    return conform_rows(pa.ipc.open_stream(body).read_next_batch(), metadata, b"", ())


def _write(table: pa.Table, codec: str) -> None:
    pq.write_table(table, pa.BufferOutputStream(), compression=codec)


def _measure_ms(call: Callable[[], object], calls: int) -> float:
    """Return the mean CPU time of a call, after a first call that is not measured."""
    call()
    began_s = time.process_time()
    for _ in range(calls):
        call()
    return round(1000 * (time.process_time() - began_s) / calls, 2)
