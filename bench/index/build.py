"""What does an index cost to build for columns that a job reads anyway, and how large are the index files?

The data files have the form that writers produce: zstd, dictionaries, field ids. The benchmark uses one core. The peer
only reads the same columns into Arrow, which every index needs. Seamark also builds and writes a durable index file.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.report import OURS, Report, Row
from seamark.connector.index.files import DataFile, IndexTask, index_data_files
from seamark.connector.parquet.columns import Projection, read_columns
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import define_index

FILES, ROWS = 4, 1_000_000
QUICK_FILES, QUICK_ROWS = 2, 20_000
SCHEMA = Schema(
    (
        Field(1, "order_key", True, "long"),
        Field(2, "customer", True, "string"),
        Field(3, "discount", True, "int"),
        Field(4, "quantity", True, "int"),
        Field(5, "revenue", True, "decimal(15, 2)"),
        Field(6, "city", True, "string"),
        Field(7, "ordered_at", True, "timestamp"),
    )
)
CASES = {
    "bitmap of discount, 11 values": ("bitmap", ["discount"]),
    "bitmap of city, 250 values": ("bitmap", ["city"]),
    "bitmap of revenue, mostly distinct": ("bitmap", ["revenue"]),
    "bloom of order_key, distinct": ("bloom", ["order_key"]),
    "bloom of customer, 30,000 values": ("bloom", ["customer"]),
    "record of order_key": ("record", ["order_key"]),
}


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("index_build", "What does an index cost to build, and to keep?", peer="reading the same columns")
    count, rows = (QUICK_FILES, QUICK_ROWS) if quick else (FILES, ROWS)
    files = [_write_data_file(folder / f"{number}.parquet", number, rows) for number in range(count)]
    data_bytes = sum(file.size_bytes for file in files)
    for case, (kind, columns) in CASES.items():
        task = IndexTask("t", define_index("i", kind, columns, SCHEMA), Projection(SCHEMA), (folder / "index").as_uri())
        ids = [term.column_id for term in task.definition.terms]
        reading, building, size = _measure_task(task, files, rounds=1 if quick else 3)
        values = {
            OURS: count * rows / building / 1e6,
            "reading": count * rows / reading / 1e6,
        }
        column_bytes = sum(_sum_column_bytes(file, ids) for file in files)
        report.rows += [
            Row(case, "built, one core", "M rows/s", values, lower_is_better=False, peer="reading"),
            Row(case, "index a byte of all data", "B", {OURS: size / data_bytes}, peer="reading"),
            Row(case, "index a byte of the columns", "B", {OURS: size / column_bytes}, peer="reading"),
        ]
    report.notes += [
        "`index a byte` is the size of the index divided by the size of the data or of the indexed columns.",
        f"{count} files of {rows:,} rows, {len(SCHEMA.fields)} columns, {data_bytes / count / rows:.0f} bytes a row.",
        "CPU time of one thread, medians of 3; from the page cache, written and synced to disk.",
    ]
    return report


def _measure_task(task: IndexTask, files: list[DataFile], *, rounds: int) -> tuple[float, float, int]:
    """Measure an index task.

    Returns:
        (CPU seconds to read the columns, CPU seconds to make the index file, bytes of the index file).
    """
    column_ids = [term.column_id for term in task.definition.terms]
    reading, building = [], []
    size = 0
    for _ in range(rounds):
        started_s = time.thread_time()
        for file in files:
            _read_columns(task, file, column_ids)
        reading.append(time.thread_time() - started_s)
        started_s = time.thread_time()
        size = index_data_files(task, files).size_bytes
        building.append(time.thread_time() - started_s)
    return statistics.median(reading), statistics.median(building), size


def _write_data_file(path: Path, number: int, rows: int) -> DataFile:
    """Write a Parquet file with random rows of all columns of `SCHEMA`.

    Args:
        number: The number of the file, from which its random values follow.
    """
    draw = np.random.default_rng(number)
    columns = [
        draw.integers(0, 1 << 40, rows),
        [f"Customer#{item:09d}" for item in draw.integers(0, 30_000, rows)],
        draw.integers(0, 11, rows, dtype=np.int32),
        draw.integers(1, 51, rows, dtype=np.int32),
        pa.array(draw.integers(10_000, 10_000_000, rows)).cast(pa.decimal128(38, 0)),
        [f"CITY OF {item:03d}" for item in draw.integers(0, 250, rows)],
        pa.array(draw.integers(0, 7 * 365 * 86_400, rows) * 1_000_000).cast(pa.timestamp("us")),
    ]
    kinds = [pa.int64(), pa.string(), pa.int32(), pa.int32(), pa.decimal128(15, 2), pa.string(), pa.timestamp("us")]
    # The random integers are cents: the same 16 bytes are read as a decimal with two places, without a multiplication.
    columns[4] = pa.Array.from_buffers(pa.decimal128(15, 2), rows, columns[4].buffers())
    fields = [
        pa.field(field.name, kind, nullable=False, metadata={"PARQUET:field_id": str(field.id)})
        for field, kind in zip(SCHEMA.fields, kinds, strict=True)
    ]
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, kind)
        for column, kind in zip(columns, kinds, strict=True)
    ]
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), path, compression="zstd")
    return DataFile(path.as_uri(), path.stat().st_size, rows)


def _read_columns(task: IndexTask, file: DataFile, column_ids: list[int]) -> None:
    filesystem, place = task.storage.open(file.path)
    read_columns(place, column_ids, task.projection, filesystem=filesystem, rows=file.records)


def _sum_column_bytes(file: DataFile, column_ids: list[int]) -> int:
    footer = pq.read_metadata(file.path.removeprefix("file://"))
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    return sum(group.column(column_id - 1).total_compressed_size for group in groups for column_id in column_ids)
