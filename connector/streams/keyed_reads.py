"""Reads the rows with given keys for the server. They are located as an upsert locates them, and read by position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import ClientError
from seamark.connector.client.names import Name
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable
from seamark.connector.streams.stored_files import ServedStorage, ServerFiles, StoredRowsPort
from seamark.connector.write.latest_rows import KeyedBatch, find_latest_rows, read_column
from seamark.connector.write.row_locations import MatchedRows, locate
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.parquet import EncryptedFile, Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest, Corrupt, TooLarge


class _LimitedFiles(ServerFiles):
    """Plans scans like `ServerFiles`, but refuses plans with more than `files_max` files."""

    def __init__(self, stored_rows: StoredRowsPort, key: Sequence[str], files_max: int) -> None:
        super().__init__(stored_rows, files_max)
        self._key = key

    def plan(self, table: Name, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            yield from super().plan(table, body)
        except TooLarge as error:
            key = ", ".join(self._key)
            raise TooLarge(f"{error.message}. Create a record index on {key}, or send fewer keys") from None


def get_keyed_rows(
    keys: pa.RecordBatch,
    columns: Sequence[str],
    metadata: TableMetadata,
    stored_rows: StoredRowsPort,
    *,
    rows_max: int,
    bytes_max: int,
    files_max: int,
) -> tuple[pa.Table, list[int]]:
    """Return the rows of the current snapshot that have one of the keys, in the order of the keys.

    Args:
        keys: The keys, with the names of the key columns. A key may be repeated.
        columns: The columns to return.
        metadata: The table's metadata.
        stored_rows: The interface of the server that finds rows in the current snapshot.
        rows_max: The maximum number of rows.
        bytes_max: The maximum size of the rows in memory.
        files_max: The maximum number of files that are read.

    Returns:
        The rows, and the ascending indexes of the keys without a row. For a repeated key, it is the first index.

    Raises:
        BadRequest: The keys do not fit the columns, or the rows are encrypted.
        TooLarge: A limit is exceeded.
        Corrupt: A file of the table cannot be read.
    """
    names = keys.schema.names
    try:
        distinct = find_latest_rows([keys], metadata.current_schema, names)
        server = _LimitedFiles(stored_rows, names, files_max)
        storage = ServedStorage({}, "", stored_rows, server.sizes_bytes)
        # The server's plans and lookups are of one table, so its name is not used.
        source_table = OpenTable("db.t", metadata, metadata.current_schema, metadata.current_snapshot_id, storage, ())
        matched_files = locate(server, source_table, distinct.keys, rows_max=rows_max).files
        rows = _read_rows(source_table, columns, matched_files, bytes_max)
    except Unwritable as error:
        raise BadRequest(f"The keys do not fit the table: {error}") from None
    except EncryptedFile as error:
        raise BadRequest(f"The server has no keys for encrypted files of the table: {error.reason}") from None
    except Unreadable as error:
        raise Corrupt(f"The rows of the keys cannot be read: {error}") from None
    except ClientError as error:
        raise BadRequest(f"The rows of the keys cannot be read: {error}") from None
    first_numbers = _find_first_numbers(keys, distinct)
    numbers = np.concatenate(
        [np.zeros(0, np.int64), *(first_numbers[matched_rows.keys] for matched_rows in matched_files)]
    )
    order = np.argsort(numbers, kind="stable")
    return rows.take(pa.array(order)), np.setdiff1d(first_numbers, numbers).tolist()


def _read_rows(
    source_table: OpenTable, columns: Sequence[str], matched_files: Sequence[MatchedRows], bytes_max: int
) -> pa.Table:
    """Return the rows at the located positions, file by file.

    Raises:
        TooLarge: The rows have more than `bytes_max` bytes.
        Unreadable: A file cannot be read.
    """
    read_plan = plan_read(source_table, columns, TRUE)
    reader = TaskReader(read_plan, source_table.storage)
    batches: list[pa.RecordBatch] = []
    size_bytes = 0
    for matched_rows in matched_files:
        rows = 0
        for batch in reader.read(matched_rows.task, matched_rows.positions):
            size_bytes += batch.nbytes
            if size_bytes > bytes_max:
                raise TooLarge(f"The rows have more than {bytes_max:,} bytes; send fewer keys, or select fewer columns")
            batches.append(batch)
            rows += batch.num_rows
        if rows != len(matched_rows.positions):
            raise Unreadable(
                matched_rows.task.path, f"{len(matched_rows.positions)} rows were located, but {rows} were read"
            )
    return pa.Table.from_batches(batches, read_plan.arrow)


def _find_first_numbers(keys: pa.RecordBatch, distinct: KeyedBatch) -> Longs:
    """Return the index in `keys` of the first key that is equal to each distinct key, as int64[distinct keys].

    The assignments run from the last key to the first, so that of equal keys the first remains.
    """
    table = pa.Table.from_batches([keys])
    ordinals = distinct.keys.match([read_column(table, field) for field in distinct.keys.fields])
    numbers = np.zeros(distinct.keys.count, np.int64)
    numbers[ordinals[::-1]] = np.arange(len(ordinals))[::-1]
    return numbers
