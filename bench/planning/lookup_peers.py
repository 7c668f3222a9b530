"""Column statistics in the stores that a catalog without columnar blocks would use, for prefix lookups.

An entry is one column of one file: (column id, day, bucket, file number) → file name, value, null and NaN counts,
serialised bounds. Each store is sorted by that key, so that the entries of a column in a partition are adjacent:

- Parquet with one row group for each column and page indexes, queried by DataFusion and by DuckDB in SQL. Each engine
  has registered the file before, and answers with Arrow batches.
- LMDB with big-endian keys, read by a cursor from the first entry with the prefix.
- Avro, which has no index, read from its beginning as a reader of Hudi's log files would.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datafusion
import duckdb
import fastavro
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.planning.columns import Stats, build_columns
from bench.planning.ragged import (
    Cells,
    Ints,
    encode_little_endian,
    encode_records,
    encode_varint,
    encode_varints,
    encode_with_lengths,
)
from bench.planning.tables import FORMAT as TABLE_FORMAT
from bench.planning.tables import SYNC, GeneratedTable, build_file_names, read_statistics

FORMAT = 1
"""The version of the stores. A new version replaces stored files."""
KEY = struct.Struct(">HiHI")
_PREFIX_BYTES = struct.calcsize(">Hi")
"""The size of the column id and the day, with which each key begins."""
"""The key: column id, day, bucket, file number."""
_LMDB_BYTES_MAX = 1 << 34
"""The maximum size of the LMDB file, which LMDB requires in advance. Only the written part uses the disk."""
STATISTICS = "value_count, null_count, nan_count, lower, upper"


@dataclass(frozen=True)
class ComparedAnswer:
    """The numbers of an answer by which stores are compared."""

    rows: int
    values: int
    nulls: int


@dataclass(frozen=True)
class ColumnEntries:
    """The entries of one column: its statistics in all files, sorted by day, bucket and file number.

    Attributes:
        day, bucket: The partition of each file.
        file: The number of each file.
        name: The name of each file.
        values: The number of values of the column in each file.
        stats: The counts of nulls and NaNs, and the bounds.
    """

    column_id: int
    day: Ints
    bucket: Ints
    file: Ints
    name: Cells
    values: Ints
    stats: Stats


class LookupPeer(Protocol):
    name: str

    def lookup(self, column_id: int, day: int, *, names: bool) -> Any:
        """Return the entries of a column in the files of a day, in the form that the store's interface returns.

        The entries have the names of the files if `names` is set, otherwise the numbers of the files.
        """

    def summarize_answer(self, answer: Any) -> ComparedAnswer: ...

    def close(self) -> None: ...


def list_entries(table: GeneratedTable) -> Iterator[ColumnEntries]:
    """Yield the entries of one column after another."""
    random_statistics = list(read_statistics(table))
    day, bucket, number, records = (
        np.concatenate([getattr(item.batch, name) for item in random_statistics])
        for name in ("day", "bucket", "numbers", "records")
    )
    order = np.lexsort((number, bucket, day))
    names = stack_cells([build_file_names(table, item.batch) for item in random_statistics])
    for column_number, column in enumerate(build_columns(table.columns)):
        results = [item.stats[column_number] for item in random_statistics]
        nans = [result.nans for result in results if result.nans is not None]
        presence = [
            np.ones(len(result.nulls), np.bool_) if result.present is None else result.present for result in results
        ]
        stats = Stats(
            take_cells(stack_cells([result.lower for result in results]), order),
            take_cells(stack_cells([result.upper for result in results]), order),
            np.concatenate([result.nulls for result in results])[order],
            np.concatenate(nans)[order] if nans else None,
            np.concatenate(presence)[order],
        )
        yield ColumnEntries(
            column.id, day[order], bucket[order], number[order], take_cells(names, order), records[order], stats
        )


def stack_cells(parts: list[Cells]) -> Cells:
    """Return the rows of all parts. Narrower parts are padded with bytes that are marked as unused."""
    width = max(part.matrix.shape[1] for part in parts)
    matrix = [np.pad(part.matrix, ((0, 0), (0, width - part.matrix.shape[1]))) for part in parts]
    masks = [np.pad(part.mask(), ((0, 0), (0, width - part.matrix.shape[1]))) for part in parts]
    return Cells(np.concatenate(matrix), np.concatenate(masks))


def take_cells(part: Cells, order: Ints) -> Cells:
    return Cells(part.matrix[order], part.mask()[order])


def create_stores(table: GeneratedTable) -> Path:
    """Return the folder with the entries in Parquet, LMDB and Avro, and create it if it does not exist."""
    folder = table.folder.parent / f"{table.folder.name}-lookup"
    expected = {"format": FORMAT, "table": TABLE_FORMAT}
    marker = folder / "made.json"
    if marker.exists() and json.loads(marker.read_text()) == expected:
        return folder
    building = table.folder.parent / f".{table.folder.name}-lookup-{os.getpid()}"
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        _write_stores(table, building)
        (building / marker.name).write_text(json.dumps(expected))
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _write_stores(table: GeneratedTable, folder: Path) -> None:
    """Write all entries of the table in Parquet, LMDB and Avro to `folder`."""
    writer = None
    environment = lmdb.open(str(folder / "entries.lmdb"), map_size=_LMDB_BYTES_MAX, sync=False, readahead=False)
    with (folder / "entries.avro").open("wb") as avro:
        fastavro.writer(avro, _build_avro_schema(), [], sync_marker=SYNC)
        for entry in list_entries(table):
            batch = _build_record_batch(entry)
            if writer is None:
                # Readers are fastest without compression, and without dictionaries for values that rarely repeat.
                writer = pq.ParquetWriter(
                    folder / "entries.parquet",
                    batch.schema,
                    compression="NONE",
                    use_dictionary=["column_id", "day", "bucket"],
                    write_page_index=True,
                    data_page_size=1 << 16,
                    sorting_columns=[pq.SortingColumn(n) for n in range(4)],
                )
            writer.write_batch(batch, row_group_size=batch.num_rows)
            with environment.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(_encode_pairs(entry), append=True)
            data, _ = encode_records(_encode_avro(entry))
            avro.write(encode_varint(len(entry.day)) + encode_varint(len(data)) + data.tobytes() + SYNC)
    if writer is not None:
        writer.close()
    environment.sync()
    environment.close()


def _build_binary_array(part: Cells, kind: pa.DataType, presence: Any = None) -> pa.Array:
    """Return an Arrow array of texts or bytes without making a Python object for each value."""
    data, lengths = encode_records([part])
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    validity = None if presence is None else pa.array(presence, pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(kind, len(lengths), [validity, pa.py_buffer(offsets), pa.py_buffer(data)])


def _build_record_batch(entries: ColumnEntries) -> pa.RecordBatch:
    rows, stats = len(entries.day), entries.stats
    nans = pa.nulls(rows, pa.int64()) if stats.nans is None else pa.array(stats.nans, pa.int64())
    return pa.RecordBatch.from_pydict(
        {
            "column_id": pa.array(np.full(rows, entries.column_id, np.int32)),
            "day": pa.array(entries.day.astype(np.int32)),
            "bucket": pa.array(entries.bucket.astype(np.int32)),
            "file": pa.array(entries.file.astype(np.int32)),
            "name": _build_binary_array(entries.name, pa.string()),
            "value_count": pa.array(entries.values),
            "null_count": pa.array(stats.nulls),
            "nan_count": nans,
            "lower": _build_binary_array(stats.lower, pa.binary(), stats.present),
            "upper": _build_binary_array(stats.upper, pa.binary(), stats.present),
        }
    )


def _encode_pairs(entries: ColumnEntries) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of LMDB. A NaN count of -1 means that the column's type has no NaN."""
    rows = len(entries.day)
    nans = np.full(rows, -1, np.int64) if entries.stats.nans is None else entries.stats.nans
    body = [encode_little_endian(entries.values), encode_little_endian(entries.stats.nulls), encode_little_endian(nans)]
    body += [
        encode_with_lengths(entries.stats.lower),
        encode_with_lengths(entries.stats.upper),
        encode_with_lengths(entries.name),
    ]
    value_bytes, lengths = encode_records(body)
    all_values, offset = value_bytes.tobytes(), 0
    for day, bucket, file, length in zip(entries.day, entries.bucket, entries.file, lengths, strict=True):
        yield KEY.pack(entries.column_id, day, bucket, file), all_values[offset : offset + length]
        offset += length


def _build_avro_schema() -> dict[str, Any]:
    ints = [{"name": name, "type": "int"} for name in ("column_id", "day", "bucket", "file")]
    longs = [{"name": name, "type": "long"} for name in ("value_count", "null_count", "nan_count")]
    texts = [{"name": "name", "type": "string"}, *({"name": name, "type": "bytes"} for name in ("lower", "upper"))]
    return {"type": "record", "name": "entry", "fields": [*ints, *longs, *texts]}


def _encode_avro(entries: ColumnEntries) -> list[Cells]:
    rows = len(entries.day)
    nans = np.full(rows, -1, np.int64) if entries.stats.nans is None else entries.stats.nans
    numbers = [
        np.full(rows, entries.column_id, np.int64),
        entries.day,
        entries.bucket,
        entries.file,
        entries.values,
        entries.stats.nulls,
        nans,
    ]
    return [
        *map(encode_varints, numbers),
        encode_with_lengths(entries.name),
        encode_with_lengths(entries.stats.lower),
        encode_with_lengths(entries.stats.upper),
    ]


def _format_sql(column_id: int, day: int, *, names: bool) -> str:
    file = "name" if names else "file"
    return f"SELECT {file}, {STATISTICS} FROM entries WHERE column_id = {column_id} AND day = {day}"


class DataFusionLookup:
    name = "parquet-datafusion"

    def __init__(self, folder: Path) -> None:
        settings = {
            "datafusion.execution.parquet.pushdown_filters": "true",
            "datafusion.execution.parquet.reorder_filters": "true",
        }
        config = datafusion.SessionConfig(settings)
        self._context = datafusion.SessionContext(config)
        self._context.register_parquet("entries", str(folder / "entries.parquet"))

    def lookup(self, column_id: int, day: int, *, names: bool) -> Any:
        sql = _format_sql(column_id, day, names=names)
        return self._context.sql(sql).collect()

    def summarize_answer(self, answer: Any) -> ComparedAnswer:
        return _compute_facts(pa.Table.from_batches(answer))

    def close(self) -> None:
        del self._context


class DuckDBLookup:
    name = "parquet-duckdb"

    def __init__(self, folder: Path) -> None:
        self._db = duckdb.connect()
        self._db.execute("SET enable_object_cache = true; SET parquet_metadata_cache = true")
        self._db.execute(f"CREATE VIEW entries AS FROM read_parquet('{folder / 'entries.parquet'}')")

    def lookup(self, column_id: int, day: int, *, names: bool) -> Any:
        sql = _format_sql(column_id, day, names=names)
        return self._db.sql(sql).to_arrow_table()

    def summarize_answer(self, answer: Any) -> ComparedAnswer:
        return _compute_facts(answer)

    def close(self) -> None:
        self._db.close()


class Lmdb:
    name = "lmdb"

    def __init__(self, folder: Path) -> None:
        self._environment = lmdb.open(str(folder / "entries.lmdb"), readonly=True, lock=False, readahead=False)

    def lookup(self, column_id: int, day: int, *, names: bool) -> Any:
        # The values have both the numbers and the names of the files, so `names` changes nothing.
        prefix = KEY.pack(column_id, day, 0, 0)[:_PREFIX_BYTES]
        results = []
        with self._environment.begin() as transaction, transaction.cursor() as cursor:
            if cursor.set_range(prefix):
                for key, value in cursor:
                    if key[:_PREFIX_BYTES] != prefix:
                        break
                    results.append(value)
        return results

    def summarize_answer(self, answer: Any) -> ComparedAnswer:
        counts = [struct.unpack_from("<qq", value) for value in answer]
        return ComparedAnswer(len(counts), sum(values for values, _ in counts), sum(nulls for _, nulls in counts))

    def close(self) -> None:
        self._environment.close()


class Avro:
    name = "avro"

    def __init__(self, folder: Path) -> None:
        self._path = folder / "entries.avro"

    def lookup(self, column_id: int, day: int, *, names: bool) -> Any:
        with self._path.open("rb") as file:
            reader: Any = fastavro.reader(file)
            return [item for item in reader if item["column_id"] == column_id and item["day"] == day]

    def summarize_answer(self, answer: Any) -> ComparedAnswer:
        return ComparedAnswer(
            len(answer), sum(item["value_count"] for item in answer), sum(item["null_count"] for item in answer)
        )

    def close(self) -> None:
        """Do nothing: no file is open between lookups."""


def _compute_facts(answer: pa.Table) -> ComparedAnswer:
    values, nulls = (int(answer.column(name).to_numpy().sum()) for name in ("value_count", "null_count"))
    return ComparedAnswer(answer.num_rows, values, nulls)
