"""Rows of keyed stream tables: the latest row of each key as files, and the deletes of the rows that it replaces.

The rows that a new row replaces are in two places. Rows in the table's files are located as an upsert locates them
(`write/row_locations.py`), in the snapshot on which the change is made. Rows in earlier fresh files are known by their
hashes, which are kept in memory until the flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import pyarrow as pa

from seamark.connector.arrow.arrays import Longs, Mask
from seamark.connector.arrow.casting import Unwritable
from seamark.connector.read.deleted_rows import Deletes, union_positions
from seamark.connector.read.tables import OpenTable
from seamark.connector.streams.stored_files import MemoryStorage, ServedStorage, ServerFiles, StoredRowsPort
from seamark.connector.write.delete_files import BY_FILE, GRANULARITY, DeletedRows, write_deletes
from seamark.connector.write.latest_rows import Rank, read_column, select_latest
from seamark.connector.write.row_locations import BatchKeys, MatchedRows, find_key_fields, hash_key_columns, locate
from seamark.connector.write.target import create_target
from seamark.connector.write.upserts import read_scope
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.expressions.residuals import add_nan
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.hashing import Hashes
from seamark.formats.runtime.errors import BadRequest

DELETE = 2
"""The kind of a row that deletes the row with its key (`RowKind` of the log)."""
_FILES_BY_FILE_MAX = 64
"""The maximum number of data files whose position deletes are in a file each, which plans name for that file alone."""


_Version = tuple[int | None, int, int]
"""The ids of a snapshot, a schema and a partition spec. Scan tasks depend on them."""


class KeyHashes(NamedTuple):
    """The 128-bit hashes of keys, in two halves: uint64[keys] each."""

    high: Hashes
    low: Hashes

    def take(self, rows: Longs) -> KeyHashes:
        return KeyHashes(self.high[rows], self.low[rows])


class KeyedFile:
    """A written file, and the keys of its rows. Each key occurs once. Rows without a key are never found."""

    def __init__(self, content: dict[str, Any], hashes: KeyHashes, complete: Mask) -> None:
        """Sort the keys.

        Args:
            content: The ContentFile.
            hashes: The hash of the key of each row, in the order of the file.
            complete: Whether each row has a key: bool[rows].
        """
        self.content = content
        keyed = np.flatnonzero(complete)
        own = hashes.take(keyed)
        order = np.lexsort((own.low, own.high))
        self._positions: Longs = keyed[order]
        self._sorted = own.take(order)
        _, runs = np.unique(self._sorted.high, return_counts=True)
        self._run = int(runs.max(initial=0))

    def find(self, keys: KeyHashes) -> Longs:
        """Return the positions of the rows with one of the keys, in any order."""
        positions = []
        start = np.searchsorted(self._sorted.high, keys.high)
        # More than one step is needed only if high halves of hashes are equal.
        for step in range(self._run):
            places = np.minimum(start + step, len(self._positions) - 1)
            is_same = (self._sorted.high[places] == keys.high) & (self._sorted.low[places] == keys.low)
            positions.append(self._positions[places[is_same]])
        return np.unique(np.concatenate(positions)) if positions else np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class KeyedRows:
    """Consecutive rows of a keyed stream: their keys, and the files with the latest row of each key.

    Attributes:
        keys: The distinct keys of the rows, including deleted rows.
        hashes: The hashes of these keys.
        files: The files.
        located: A version of the table, and the rows in its files that have one of the keys.
        replaced: The positions of the rows of each file that a later part replaces, by the later part.
    """

    keys: BatchKeys
    hashes: KeyHashes
    files: tuple[KeyedFile, ...]
    located: tuple[_Version, tuple[MatchedRows, ...]] | None = None
    replaced: WeakKeyDictionary[KeyedRows, list[Longs]] = field(default_factory=WeakKeyDictionary)

    def find_replaced(self, later: KeyedRows) -> list[Longs]:
        """Return the positions of the rows of each file that a later part replaces."""
        positions = self.replaced.get(later)
        if positions is None:
            positions = self.replaced[later] = [file.find(later.hashes) for file in self.files]
        return positions


class EncodedRowDeletes(NamedTuple):
    """The deletes of the rows that keyed rows replace.

    Attributes:
        files: Locations and data of the files to store.
        content_files: The ContentFiles of the delete files as JSON; several may be in one stored file.
        removed: The delete files and the data files that the deletes replace: location and, for a deletion vector, its
            offset.
        scope: The filter of the rows that were read, as JSON; empty if none were read.
    """

    files: list[tuple[str, bytes]]
    content_files: list[bytes]
    removed: list[tuple[str, int | None]]
    scope: bytes


@dataclass
class KeyColumns:
    """The key of rows with several schemas, collected batch by batch."""

    fields: tuple[Field, ...]
    columns: list[list[pa.Array]] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch | pa.Table, schema: Schema) -> None:
        self.columns.append(self.read(batch, schema))

    def read(self, batch: pa.RecordBatch | pa.Table, schema: Schema) -> list[pa.Array]:
        """Return the key columns of rows with a schema of the table; a column that the schema lacks is null."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        arrays = []
        for key_field in self.fields:
            stored = schema.index.by_id.get(key_field.id)
            column = pa.chunked_array([pa.nulls(table.num_rows)]) if stored is None else table.column(stored.name)
            arrays.append(read_column(pa.table({key_field.name: column}), key_field))
        return arrays

    def concatenate(self) -> list[pa.Array]:
        return [pa.concat_arrays(column) for column in zip(*self.columns, strict=True)]


def key_fields(metadata: TableMetadata, key: Sequence[str]) -> tuple[Field, ...]:
    """Return the fields of the key columns in the current schema."""
    return tuple(find_key_fields(metadata.current_schema, key))


def hash_keys(fields: Sequence[Field], columns: Sequence[pa.Array]) -> KeyHashes:
    return KeyHashes(*hash_key_columns(fields, columns))


def are_complete(columns: Sequence[pa.Array]) -> Mask:
    """Return whether each row has a value in all key columns: bool[rows]."""
    complete = np.ones(len(columns[0]), dtype=np.bool_)
    for column in columns:
        complete &= column.is_valid().to_numpy(zero_copy_only=False)
    return complete


class LatestRows(NamedTuple):
    """The rows of a stream that stay when later rows have replaced earlier rows.

    Attributes:
        keys: The distinct keys of all rows.
        hashes: Their hashes.
        stays: Whether each row is written to a file: bool[rows].
    """

    keys: BatchKeys
    hashes: KeyHashes
    stays: Mask


def select_rows(fields: Sequence[Field], columns: Sequence[pa.Array], kinds: bytes) -> LatestRows:
    """Return the latest row of each key.

    A row without a complete key stays. Such rows were accepted before the table had this key.

    Args:
        fields: The key.
        columns: The key columns of all rows, in the order of the log.
        kinds: The kind of each row.
    """
    complete = are_complete(columns)
    keyed = np.flatnonzero(complete)
    keyed_columns = [column.take(pa.array(keyed)) for column in columns]
    hashes = hash_keys(fields, keyed_columns)
    latest = select_latest(hashes, Rank.of(None, None, len(keyed)))
    stays = ~complete
    stays[keyed[latest]] = True
    stays &= np.frombuffer(kinds, dtype=np.uint8) != DELETE
    chosen = pa.array(latest)
    keys = BatchKeys(fields, [column.take(chosen) for column in keyed_columns])
    return LatestRows(keys, hashes.take(latest), stays)


def encode_deletes(
    parts: Sequence[KeyedRows], metadata: TableMetadata, stored: StoredRowsPort, folder: str | None
) -> EncodedRowDeletes:
    """Return the deletes of the rows that keyed rows replace in the current snapshot, and in files of earlier parts.

    Args:
        parts: The keyed rows, in order. The rows of a part replace the rows of earlier parts.
        metadata: The table's metadata.
        stored: Finds rows in the current snapshot.
        folder: The folder of fresh files. If it is None, the deletes are for a commit, which also removes data files
            without remaining rows.

    Raises:
        Unwritable: The table does not support deletes.
        Unreadable: A file of the table cannot be read.
    """
    server = ServerFiles(stored)
    storage = ServedStorage({}, "", stored, server.sizes_bytes)
    opened = OpenTable("db.t", metadata, metadata.current_schema, metadata.current_snapshot_id, storage, ())
    deleted = [*_delete_stored(parts, opened, server, is_commit=folder is None), *_delete_fresh(parts)]
    target = replace(create_target(metadata, memory := MemoryStorage()), indexes=())
    if folder is not None and len(deleted) <= _FILES_BY_FILE_MAX:
        target = replace(target, properties={**target.properties, GRANULARITY: BY_FILE})
    written = write_deletes(target, deleted, Deletes(storage, metadata))
    rename: Callable[[str], str] = (lambda path: path) if folder is None else (lambda path: _move(path, folder))
    return EncodedRowDeletes(
        [(rename(location), memory.data(location)) for location in memory.written],
        [msgspec.json.encode({**file, "file-path": rename(file["file-path"])}) for file in written.files],
        [(file["file-path"], file.get("content-offset")) for file in written.removed],
        _encode_scope(parts[0].keys, opened) if folder is None else b"",
    )


def _encode_scope(keys: BatchKeys, opened: OpenTable) -> bytes:
    """Return the filter of the rows that a commit of these keys has read, as JSON; empty without keys."""
    return msgspec.json.encode(encode_expression(add_nan(read_scope(keys, opened)))) if keys.count else b""


def _move(path: str, folder: str) -> str:
    return f"{folder}/{path.rpartition('/')[2]}"


def _delete_stored(
    parts: Iterable[KeyedRows], opened: OpenTable, server: ServerFiles, *, is_commit: bool
) -> list[DeletedRows]:
    """Return the rows in the table's files that have one of the keys."""
    by_path: dict[str, tuple[MatchedRows, list[Longs]]] = {}
    metadata = opened.metadata
    version = opened.snapshot_id, metadata.current_schema_id, metadata.default_spec_id
    for part in parts:
        # Another thread may replace `part.located` by the rows of another version at any time.
        located = part.located
        if located is None or located[0] != version:
            located = part.located = version, locate(server, opened, part.keys).files
        for rows in located[1]:
            server.add_sizes([rows.task.file, *rows.task.deletes])
            by_path.setdefault(rows.task.path, (rows, []))[1].append(rows.positions)
    return [
        DeletedRows(
            path,
            rows.task.spec_id,
            rows.task.file.get("partition") or (),
            union_positions(*positions),
            rows.task.deletes,
            rows.task.records if is_commit else None,
        )
        for path, (rows, positions) in by_path.items()
    ]


def _delete_fresh(parts: Sequence[KeyedRows]) -> list[DeletedRows]:
    """Return the rows in files of parts that a later part replaces."""
    deleted = []
    for number, part in enumerate(parts[:-1]):
        by_part = [part.find_replaced(later) for later in parts[number + 1 :]]
        for file, positions in zip(part.files, zip(*by_part, strict=True), strict=True):
            replaced = union_positions(*positions)
            if len(replaced):
                content = file.content
                deleted.append(
                    DeletedRows(
                        content["file-path"], content.get("spec-id", 0), content.get("partition") or (), replaced
                    )
                )
    return deleted


def check_key(metadata: TableMetadata, key: Sequence[str]) -> tuple[Field, ...]:
    """Return the fields of a key.

    Raises:
        BadRequest: A column cannot be a key column.
    """
    try:
        return key_fields(metadata, key)
    except Unwritable as error:
        raise BadRequest(f"The key of the stream table is not valid: {error}") from None
