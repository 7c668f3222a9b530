"""Writes deletion vectors, position deletes and equality deletes (Iceberg spec, "Row-level Deletes").

New deletes never undelete a row. A data file has at most one deletion vector. Therefore a new vector includes the rows
that were deleted before, and the old vector is listed for removal. The same commit must add the new vector and remove
the old vector, or it would undelete rows or be refused. A data file without remaining rows is also listed for removal,
and the commit then also removes its deletes. Until a commit adds them, delete files are unreferenced.

Tables of version 3 use deletion vectors, many of them in one Puffin file (Puffin spec, `deletion-vector-v1`). Tables of
version 2 use Parquet files of paths and positions. Equality deletes need no positions, but add work to every read.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyroaring

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import Unwritable, build_arrow_schema, conform
from seamark.connector.arrow.partitions import Partitioner
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.metrics import Mode, list_modes
from seamark.connector.read.deleted_rows import Deletes, union_positions
from seamark.connector.write.data_files import FileWriter, NewFile
from seamark.connector.write.locations import make_data_location
from seamark.connector.write.table_writer import discard_on_error
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.files.puffin import MAGIC, Blob, write_puffin
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.reserved import DELETED_PATH, DELETED_POSITION
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.runtime.repetitions import find_repeated

VECTOR = "deletion-vector-v1"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_ROW_POSITION_ID = 2147483645
"""The reserved field id of the row position. The Puffin spec requires it as the field of a deletion vector."""
_POSITION_DELETES = Schema(
    (Field(DELETED_PATH, "file_path", True, "string"), Field(DELETED_POSITION, "pos", True, "long"))
)
_EXACT = Mode(True, True, None)
"""The metrics mode with counts and with bounds that are not truncated."""
_ROW_GROUP_ROWS = 1 << 20
GRANULARITY, BY_FILE = "write.delete.granularity", "file"
_VECTORS_SINCE, _DELETES_SINCE = 3, 2
_DELETE_FILE_PREFIX, _ALL_FILES_PREFIX = "write.delete.parquet.", "write.parquet."


@dataclass(frozen=True)
class DeletedRows:
    """Rows of one data file to delete.

    Attributes:
        positions: The positions of the rows, as int64[rows], in any order.
        spec_id: The id of the data file's partition spec.
        partition: The partition values in the ContentFile of the data file.
        deletes: The delete files that a plan lists for the data file.
    """

    path: str
    spec_id: int
    partition: Sequence[Any]
    positions: Longs
    deletes: Sequence[Mapping[str, Any]] = ()
    records: int | None = None
    """The number of rows of the data file. If it is set, the data file is removed when all its rows are deleted."""

    @property
    def positional(self) -> list[Mapping[str, Any]]:
        """The position delete files, including deletion vectors."""
        return [file for file in self.deletes if file["content"] == "position-deletes"]

    def removes_all_rows(self, reader: Deletes) -> bool:
        """Return whether these deletes and earlier position deletes remove all rows of the data file.

        Return False if this is uncertain, for example because equality deletes apply.

        Raises:
            Unreadable: A delete file cannot be read.
        """
        # The record counts are an upper bound. The delete files are read only if all rows may be deleted.
        deleted_before = sum(int(file.get("record-count") or 0) for file in self.positional)
        if self.records is None or len(self.positions) + deleted_before < self.records:
            return False
        return len(union_positions(reader.load(self.path, self.positional).positions, self.positions)) == self.records


@dataclass(frozen=True)
class WrittenDeletes:
    """The files that a commit adds and removes to delete rows.

    Attributes:
        files: The ContentFiles to add.
        removed: The files to remove in the same commit: delete files that the new files replace, and data files without
            remaining rows.
    """

    files: tuple[dict[str, Any], ...] = ()
    removed: tuple[dict[str, Any], ...] = ()

    @staticmethod
    def join(parts: Iterable[WrittenDeletes]) -> WrittenDeletes:
        results = list(parts)
        return WrittenDeletes(
            tuple(file for result in results for file in result.files),
            tuple(file for result in results for file in result.removed),
        )

    def discard(self, storage: Storage) -> None:
        """Delete the files in `files`, and ignore errors of the storage.

        Call this only if no commit has added the files, and no commit can still add them.
        """
        for location in {file["file-path"] for file in self.files}:
            with suppress(OSError):
                storage.delete(location)


def write_deletes(target: WriteTarget, rows: Iterable[DeletedRows], reader: Deletes) -> WrittenDeletes:
    """Write deletion vectors or position delete files, depending on the table's format version.

    Args:
        target: The table.
        rows: The rows to delete, grouped by data file.
        reader: The reader of the table's earlier deletes.

    Raises:
        Unreadable: Earlier deletes, which a new vector must include, cannot be read.
        ValueError: A position is negative, or a data file occurs twice.
    """
    rows_to_delete = _select_non_empty(rows)
    emptied_paths = {rows_of_file.path for rows_of_file in rows_to_delete if rows_of_file.removes_all_rows(reader)}
    partial_deletes = [rows_of_file for rows_of_file in rows_to_delete if rows_of_file.path not in emptied_paths]
    if target.format_version >= _VECTORS_SINCE:
        written_deletes = _write_deletion_vectors(target, partial_deletes, reader)
    else:
        written_deletes = _write_position_deletes(target, partial_deletes)
    return WrittenDeletes(
        written_deletes.files, (*({"file-path": path} for path in sorted(emptied_paths)), *written_deletes.removed)
    )


# Deletion vectors


def _write_deletion_vectors(target: WriteTarget, rows: Iterable[DeletedRows], reader: Deletes) -> WrittenDeletes:
    """Write one Puffin file with a deletion vector for each data file. The vectors include earlier deletes.

    No file is written if all rows were deleted before.
    """
    location = _generate_location(target, ".puffin")
    blobs: list[Blob] = []
    files: list[dict[str, Any]] = []
    replaced_files: list[dict[str, Any]] = []
    offset = len(MAGIC)
    for rows_of_file in rows:
        old_positions = reader.load(rows_of_file.path, rows_of_file.positional).positions
        positions = union_positions(old_positions, rows_of_file.positions)
        if len(positions) == len(old_positions):
            continue
        blob = encode_vector(positions)
        properties = {"referenced-data-file": rows_of_file.path, "cardinality": str(len(positions))}
        blobs.append(Blob(VECTOR, (blob,), (_ROW_POSITION_ID,), properties=properties))
        files.append(
            {
                "content": "position-deletes",
                "file-path": location,
                "file-format": "PUFFIN",
                "spec-id": rows_of_file.spec_id,
                "partition": list(rows_of_file.partition),
                "record-count": len(positions),
                "referenced-data-file": rows_of_file.path,
                "content-offset": offset,
                "content-size-in-bytes": len(blob),
            }
        )
        offset += len(blob)
        replaced_files.extend(
            entry for file in rows_of_file.positional if (entry := _build_removal(file, rows_of_file.path)) is not None
        )
    if not files:
        return WrittenDeletes()
    size_bytes = target.storage.write(location, write_puffin(blobs, {"created-by": "Seamark"}))
    # Readers request the vectors in this order. After a vector, DuckDB 1.5.5 continues to read up to the next bytes in
    # its cache, and its Iceberg extension uses the first vector of such a range for all vectors in the range. In
    # descending order, the cache already contains the bytes after each vector, so each range has only one vector.
    content_files = tuple({**file, "file-size-in-bytes": size_bytes} for file in reversed(files))
    return WrittenDeletes(content_files, tuple(replaced_files))


def _build_removal(file: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """Return the entry that removes a delete file whose rows a new vector includes.

    Return None if the delete file also applies to other data files.

    Args:
        file: The ContentFile of the delete file. It has a `content-offset` if it is a vector in a Puffin file.
        path: The path of the data file.
    """
    if file.get("referenced-data-file") != path:
        return None
    entry: dict[str, Any] = {"file-path": file["file-path"]}
    if file.get("content-offset") is not None:
        entry["content-offset"] = file["content-offset"]
    return entry


def encode_vector(positions: Longs) -> bytes:
    """Return a blob `deletion-vector-v1`.

    The blob consists of its length, a magic number, a portable 64-bit roaring bitmap, and a CRC-32 of the magic number
    and the bitmap.

    Args:
        positions: The deleted positions, ascending and distinct.
    """
    body = _VECTOR_MAGIC + _encode_roaring(positions)
    return struct.pack(">I", len(body)) + body + struct.pack(">I", zlib.crc32(body))


def _encode_roaring(positions: Longs) -> bytes:
    """Return the number of 32-bit bitmaps, and the bitmaps, each preceded by the high 32 bits of its positions.

    The format is defined by RoaringFormatSpec, "Extension for 64-bit implementations".
    """
    high_bits = positions >> 32
    starts = np.flatnonzero(np.diff(high_bits, prepend=-1))
    parts = [struct.pack("<Q", len(starts))]
    for group in np.split(positions, starts[1:]) if len(starts) else ():
        # pyroaring reads an `array` of Python in bulk, but a numpy array element by element.
        bitmap = pyroaring.BitMap(array("I", (group & 0xFFFFFFFF).astype(np.uint32).tobytes()))
        bitmap.run_optimize()
        parts.extend((struct.pack("<I", int(group[0]) >> 32), bitmap.serialize()))
    return b"".join(parts)


def _select_non_empty(rows: Iterable[DeletedRows]) -> list[DeletedRows]:
    """Return the data files with positions to delete, in the order of `rows`.

    Raises:
        ValueError: A position is negative, or a data file occurs twice.
    """
    by_path: dict[str, DeletedRows] = {}
    for rows_of_file in rows:
        if rows_of_file.path in by_path:
            raise ValueError(f"{rows_of_file.path} occurs twice; pass all positions of a data file in one entry")
        if len(rows_of_file.positions) and int(rows_of_file.positions.min()) < 0:
            raise ValueError(
                f"{rows_of_file.path} has no row {int(rows_of_file.positions.min())}; positions begin at 0"
            )
        if len(rows_of_file.positions):
            by_path[rows_of_file.path] = rows_of_file
    return list(by_path.values())


# Position deletes


def _write_position_deletes(target: WriteTarget, rows: Iterable[DeletedRows]) -> WrittenDeletes:
    """Write Parquet files of paths and positions, sorted by both.

    There is one file for each partition, or for each data file if the table's `write.delete.granularity` is `file`.
    Earlier delete files remain.
    """
    _check_version(target, "position deletes")
    by_file = target.properties.get(GRANULARITY, "").lower() == BY_FILE
    sorted_rows = sorted(rows, key=lambda rows_of_file: (_make_partition_key(rows_of_file), rows_of_file.path.encode()))
    parts: list[WrittenDeletes] = []
    with discard_on_error(parts, target.storage):
        for _, group in groupby(
            sorted_rows,
            key=lambda rows_of_file: (_make_partition_key(rows_of_file), rows_of_file.path if by_file else ""),
        ):
            parts.append(WrittenDeletes((_write_position_file(target, list(group)),)))
    return WrittenDeletes.join(parts)


def _make_partition_key(rows_of_file: DeletedRows) -> tuple[int, str]:
    return rows_of_file.spec_id, json.dumps(list(rows_of_file.partition))


def _write_position_file(target: WriteTarget, rows: Sequence[DeletedRows]) -> dict[str, Any]:
    """Write one position delete file. If all rows are in one data file, the delete file names this data file.

    Args:
        rows: The rows to delete in data files of one partition, sorted by path.
    """
    writer = _open_delete_writer(
        target, _POSITION_DELETES, dict.fromkeys((DELETED_PATH, DELETED_POSITION), _EXACT), "position"
    )
    positions = [union_positions(rows_of_file.positions) for rows_of_file in rows]
    codes = np.repeat(np.arange(len(rows), dtype=np.int32), [len(rows_deleted) for rows_deleted in positions])
    paths = pa.DictionaryArray.from_arrays(
        pa.array(codes), pa.array([rows_of_file.path for rows_of_file in rows], pa.large_string())
    )
    position_column = pa.array(np.concatenate(positions))
    try:
        for start in range(0, len(codes), _ROW_GROUP_ROWS):
            path_column = paths.slice(start, _ROW_GROUP_ROWS).dictionary_decode()
            schema = build_arrow_schema(_POSITION_DELETES)
            writer.write(
                pa.Table.from_arrays([path_column, position_column.slice(start, _ROW_GROUP_ROWS)], schema=schema)
            )
        file = writer.close()
    except BaseException:
        writer.abort()
        raise
    reference = {"referenced-data-file": rows[0].path} if len(rows) == 1 else {}
    partition = {"spec-id": rows[0].spec_id, "partition": list(rows[0].partition)}
    return {"content": "position-deletes", **file, **partition, **reference}


# Equality deletes


def write_equality_deletes(
    target: WriteTarget, keys: pa.Table, columns: Sequence[str], *, spec: PartitionSpec | None = None
) -> WrittenDeletes:
    """Write equality delete files, which delete the rows with one of the keys in these columns.

    The deletes apply to data files with lower sequence numbers, and with the same spec and partition. Deletes of a spec
    without fields apply to the data files of every spec.

    Args:
        target: The table.
        keys: The keys.
        columns: The names of the key columns, which are top-level columns.
        spec: The partition spec of the deletes. The default is the table's current spec. The source columns of its
            fields must be in `columns`.

    Raises:
        Unwritable: A column cannot be a key column.
    """
    spec, schema = target.spec if spec is None else spec, check_equality_deletes(target, columns)
    sources = {source for field in spec.fields if not field.is_void for source in field.sources}
    missing = sources - {field.id for field in schema.fields}
    if missing:
        partition_columns = [
            target.schema.index.by_id[column_id].name
            for column_id in sorted(missing)
            if column_id in target.schema.index.by_id
        ]
        raise Unwritable(
            f"the table is partitioned by {', '.join(partition_columns) or 'dropped columns'}, not in the key "
            f"{', '.join(columns)}: the partitions of the stored rows are unknown; use a spec without fields"
        )
    arrow, partitioner = build_arrow_schema(schema), Partitioner(spec, schema)
    rows = keys.select(list(columns)).combine_chunks()
    batches = [conform(batch, schema, arrow) for batch in rows.to_batches()]
    groups: dict[str, tuple[list[object], list[pa.RecordBatch]]] = {}
    for batch in batches:
        for partition, row_indexes in partitioner.split(batch):
            values = partitioner.convert_to_json(partition)
            _, group_batches = groups.setdefault(json.dumps(values), (values, []))
            group_batches.append(batch if row_indexes is None else batch.take(pa.array(row_indexes)))
    parts: list[WrittenDeletes] = []
    modes = list_modes(schema, target.properties, target.sort_order)
    with discard_on_error(parts, target.storage):
        for values, group_rows in groups.values():
            writer = _open_delete_writer(target, schema, modes, "equality")
            try:
                writer.write(pa.Table.from_batches(group_rows, arrow))
                file = writer.close()
            except BaseException:
                writer.abort()
                raise
            ids = {"equality-ids": [field.id for field in schema.fields], "sort-order-id": 0}
            partition_fields = {"spec-id": spec.spec_id, "partition": values}
            parts.append(WrittenDeletes(({"content": "equality-deletes", **file, **partition_fields, **ids},)))
    return WrittenDeletes.join(parts)


def check_equality_deletes(target: WriteTarget, columns: Sequence[str]) -> Schema:
    """Check that equality deletes can use these columns, and return the schema of the columns.

    Raises:
        Unwritable: The table or one of these columns does not support equality deletes.
    """
    _check_version(target, "equality deletes")
    return _select_key_schema(target.schema, columns)


def _select_key_schema(schema: Schema, columns: Sequence[str]) -> Schema:
    by_name = {field.name: field for field in schema.fields}
    if unknown := [name for name in columns if name not in by_name]:
        raise Unwritable(f"the table has no column {unknown[0]}, so it cannot be a key column")
    fields = [by_name[name] for name in columns]
    for field in fields:
        if not isinstance(field.type, str) or field.type in FLOATS:
            raise Unwritable(
                f"column {field.name} has a type that readers compare differently; it cannot be a key column"
            )
    if not fields:
        raise Unwritable("the key has no columns; name at least one column")
    if (repeated_name := find_repeated(columns)) is not None:
        raise Unwritable(f"the key has the column {repeated_name} twice; name each column once")
    return Schema(tuple(msgspec.structs.replace(field, required=False) for field in fields), schema.id)


def _check_version(target: WriteTarget, feature: str) -> None:
    if target.format_version < _DELETES_SINCE:
        raise Unwritable(
            f"A table of version {target.format_version} has no {feature}; upgrade it to version 2 or later"
        )


def _open_delete_writer(target: WriteTarget, schema: Schema, modes: Mapping[int, Mode], kind: str) -> FileWriter:
    overrides = {
        _ALL_FILES_PREFIX + name.removeprefix(_DELETE_FILE_PREFIX): value
        for name, value in target.properties.items()
        if name.startswith(_DELETE_FILE_PREFIX)
    }
    properties, location = {**target.properties, **overrides}, _generate_location(target, ".parquet")
    key_values = {"delete-type": kind}
    return FileWriter(
        NewFile(location, target.storage, schema, build_arrow_schema(schema), properties, modes, key_values)
    )


def _generate_location(target: WriteTarget, suffix: str) -> str:
    """Return a location outside of partition folders, because a delete file may belong to several partitions."""
    return make_data_location(target.location, target.properties, "", f"{uuid.uuid4()}-deletes{suffix}")
