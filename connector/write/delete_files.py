"""Delete files written: deletion vectors, position deletes, equality deletes (Iceberg spec, "Row-level Deletes").

The rule kept: what is written removes the rows that it names and brings none back. A data file has one deletion vector
at most, so a new one holds also what was deleted before, and the old one is told for removal; the commit that adds the
one and not the other would undelete rows, or be refused. A data file of which no row is left is told for removal, too:
the commit takes the deletes that are its own with it. As data files, delete files are nobody's before a commit.

A table of version 3 has deletion vectors, many in one Puffin file (Puffin spec, `deletion-vector-v1`); one of version 2
has Parquet files of paths and positions. Equality deletes need no positions, and cost every reader.
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
import numpy.typing as npt
import pyarrow as pa
import pyroaring

from seamark.connector.arrow.casting import Unwritable, arrow_schema, conform
from seamark.connector.arrow.partitions import Partitioner
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.metrics import Mode, modes_of
from seamark.connector.read.deleted_rows import Deletes, united
from seamark.connector.write.data_files import FileWriter
from seamark.connector.write.locations import data_location
from seamark.connector.write.target import WriteTarget
from seamark.metaserver.iceberg.files.puffin import MAGIC, Blob, write_puffin
from seamark.metaserver.iceberg.metadata.partition import PartitionSpec
from seamark.metaserver.iceberg.types.reserved import DELETED_PATH, DELETED_POSITION
from seamark.metaserver.iceberg.types.schema import Field, Schema
from seamark.metaserver.iceberg.types.values import FLOATS

Longs = npt.NDArray[np.int64]

VECTOR = "deletion-vector-v1"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_ROW_POSITION_ID = 2147483645
"""Reserved field id of a row's position, the field that vectors are of."""
_POSITION_DELETES = Schema(
    (Field(DELETED_PATH, "file_path", True, "string"), Field(DELETED_POSITION, "pos", True, "long"))
)
_EXACT = Mode(True, True, None)
_ROW_GROUP_ROWS = 1 << 20
_GRANULARITY, _BY_FILE = "write.delete.granularity", "file"
_VECTORS_SINCE, _DELETES_SINCE = 3, 2
_OWN, _ALL = "write.delete.parquet.", "write.parquet."


@dataclass(frozen=True)
class DeletedRows:
    """Rows of one data file that are to go: int64[n], in any order. `spec_id` and `partition` are as its ContentFile
    has them, `deletes` the delete files that a plan lists with it."""

    path: str
    spec_id: int
    partition: Sequence[Any]
    positions: Longs
    deletes: Sequence[Mapping[str, Any]] = ()
    records: int | None = None
    """Of the data file; where it is given, the file goes once no row is left."""

    @property
    def positional(self) -> list[Mapping[str, Any]]:
        """Of the delete files, vectors among them."""
        return [file for file in self.deletes if file["content"] == "position-deletes"]

    def is_whole(self, reader: Deletes) -> bool:
        """Whether they are all rows of the file that positions have left. Unreadable. In doubt, as where equality
        deletes took some, they are not."""
        before = sum(int(file.get("record-count") or 0) for file in self.positional)
        if self.records is None or len(self.positions) + before < self.records:
            return False
        return len(united(reader.of(self.path, self.positional).positions, self.positions)) == self.records


@dataclass(frozen=True)
class WrittenDeletes:
    """For a commit: `files` are ContentFiles to add, `removed` what is to be removed with them: delete files that they
    hold, and data files of which nothing is left."""

    files: tuple[dict[str, Any], ...] = ()
    removed: tuple[dict[str, Any], ...] = ()

    def discard(self, storage: Storage) -> None:
        """Deletes all of it, as far as storage lets it: for files that no commit has named, nor ever will."""
        for location in {file["file-path"] for file in self.files}:
            with suppress(OSError):
                storage.delete(location)


def write_deletes(target: WriteTarget, rows: Iterable[DeletedRows], reader: Deletes) -> WrittenDeletes:
    """In the form that the table's version has: deletion vectors, or position deletes. `reader` is of the table.

    Unreadable where a delete file that a vector is to hold cannot be read, since its rows would come back. ValueError
    for what is no position, or a data file that comes twice.
    """
    given = _by_path(rows)
    whole = {one.path for one in given if one.is_whole(reader)}
    rest = [one for one in given if one.path not in whole]
    if target.format_version >= _VECTORS_SINCE:
        written = _deletion_vectors(target, rest, reader)
    else:
        written = _position_deletes(target, rest)
    return WrittenDeletes(written.files, (*({"file-path": path} for path in sorted(whole)), *written.removed))


# Deletion vectors


def _deletion_vectors(target: WriteTarget, rows: Iterable[DeletedRows], reader: Deletes) -> WrittenDeletes:
    """One Puffin file of a vector for each data file, each with what was deleted before; none where nothing is new."""
    location = _new_location(target, ".puffin")
    blobs: list[Blob] = []
    files: list[dict[str, Any]] = []
    removed: list[dict[str, Any]] = []
    offset = len(MAGIC)
    for one in rows:
        before = reader.of(one.path, one.positional).positions
        both = united(before, one.positions)
        if len(both) == len(before):
            continue
        blob = encode_vector(both)
        properties = {"referenced-data-file": one.path, "cardinality": str(len(both))}
        blobs.append(Blob(VECTOR, (blob,), (_ROW_POSITION_ID,), properties=properties))
        files.append(
            {
                "content": "position-deletes",
                "file-path": location,
                "file-format": "PUFFIN",
                "spec-id": one.spec_id,
                "partition": list(one.partition),
                "record-count": len(both),
                "referenced-data-file": one.path,
                "content-offset": offset,
                "content-size-in-bytes": len(blob),
            }
        )
        offset += len(blob)
        removed.extend(named for file in one.positional if (named := _replaced(file, one.path)) is not None)
    if not files:
        return WrittenDeletes()
    size_bytes = target.storage.write(location, write_puffin(blobs, {"created-by": "Seamark"}))
    return WrittenDeletes(tuple({**file, "file-size-in-bytes": size_bytes} for file in files), tuple(removed))


def _replaced(file: Mapping[str, Any], path: str) -> dict[str, Any] | None:
    """How a commit names a delete file that the new vector holds; None for one that other data files need."""
    if file.get("referenced-data-file") != path:
        return None
    named: dict[str, Any] = {"file-path": file["file-path"]}
    if file.get("content-offset") is not None:
        named["content-offset"] = file["content-offset"]
    return named


def encode_vector(positions: Longs) -> bytes:
    """Of positions that ascend, each once. A blob `deletion-vector-v1`: length, magic, 64-bit roaring bitmap in its
    portable form, CRC-32 of both."""
    inside = _VECTOR_MAGIC + _roaring(positions)
    return struct.pack(">I", len(inside)) + inside + struct.pack(">I", zlib.crc32(inside))


def _roaring(positions: Longs) -> bytes:
    """Bitmaps of 32 bits behind the numbers of their high halves (RoaringFormatSpec, "Extension for 64-bit")."""
    high = positions >> 32
    starts = np.flatnonzero(np.diff(high, prepend=-1))
    parts = [struct.pack("<Q", len(starts))]
    for low in np.split(positions, starts[1:]) if len(starts) else ():
        # An array of Python's own is read at once, one of numpy's number by number.
        bitmap = pyroaring.BitMap(array("I", (low & 0xFFFFFFFF).astype(np.uint32).tobytes()))
        bitmap.run_optimize()
        parts.extend((struct.pack("<I", int(low[0]) >> 32), bitmap.serialize()))
    return b"".join(parts)


def _by_path(rows: Iterable[DeletedRows]) -> list[DeletedRows]:
    """One for each data file, those with no position left out. ValueError for what is no position or comes twice."""
    found: dict[str, DeletedRows] = {}
    for one in rows:
        if one.path in found:
            raise ValueError(f"{one.path} is given twice; give all its positions at once")
        if len(one.positions) and int(one.positions.min()) < 0:
            raise ValueError(f"{one.path} has no row {int(one.positions.min())}")
        if len(one.positions):
            found[one.path] = one
    return list(found.values())


# Position deletes


def _position_deletes(target: WriteTarget, rows: Iterable[DeletedRows]) -> WrittenDeletes:
    """Parquet files of paths and positions, sorted by both: one for each partition, or for each data file where the
    table's `write.delete.granularity` is `file`. What was deleted before stays where it is."""
    _check_version(target, "position deletes")
    by_file = target.properties.get(_GRANULARITY, "").lower() == _BY_FILE
    given = sorted(rows, key=lambda one: (_group(one), one.path.encode()))
    files: list[dict[str, Any]] = []
    try:
        for _, group in groupby(given, key=lambda one: (_group(one), one.path if by_file else "")):
            files.append(_position_file(target, list(group)))
    except BaseException:
        WrittenDeletes(tuple(files)).discard(target.storage)
        raise
    return WrittenDeletes(tuple(files))


def _group(one: DeletedRows) -> tuple[int, str]:
    return one.spec_id, json.dumps(list(one.partition))


def _position_file(target: WriteTarget, rows: Sequence[DeletedRows]) -> dict[str, Any]:
    """One file, of data files of one partition, sorted by path."""
    writer = _delete_writer(
        target, _POSITION_DELETES, dict.fromkeys((DELETED_PATH, DELETED_POSITION), _EXACT), "position"
    )
    positions = [united(one.positions) for one in rows]
    codes = np.repeat(np.arange(len(rows), dtype=np.int32), [len(one) for one in positions])
    paths = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array([one.path for one in rows], pa.large_string()))
    spots = pa.array(np.concatenate(positions))
    try:
        for start in range(0, len(codes), _ROW_GROUP_ROWS):
            part = paths.slice(start, _ROW_GROUP_ROWS).dictionary_decode()
            arrow = arrow_schema(_POSITION_DELETES)
            writer.write(pa.Table.from_arrays([part, spots.slice(start, _ROW_GROUP_ROWS)], schema=arrow))
        file = writer.close()
    except BaseException:
        writer.abort()
        raise
    one = {"referenced-data-file": rows[0].path} if len(rows) == 1 else {}
    where = {"spec-id": rows[0].spec_id, "partition": list(rows[0].partition)}
    return {"content": "position-deletes", **file, **where, **one}


# Equality deletes


def write_equality_deletes(
    target: WriteTarget, keys: pa.Table, columns: Sequence[str], *, spec: PartitionSpec | None = None
) -> WrittenDeletes:
    """Files of keys: rows that equal one in these columns are gone, of all data files of lower sequence numbers.

    Of those in the key's partition of `spec`, by default the table's: its columns are to be among the key's, and only
    data files of this very spec are meant. A spec without fields means all data files, of any spec. `columns` are names
    at the top level. Unwritable for columns that make no key.
    """
    spec, schema = target.spec if spec is None else spec, check_equality_deletes(target, columns)
    sources = {source for one in spec.fields if not one.is_void for source in one.sources}
    missing = sources - {one.id for one in schema.fields}
    if missing:
        named = [target.schema.index.by_id[one].name for one in sorted(missing) if one in target.schema.index.by_id]
        raise Unwritable(
            f"the table is partitioned by {', '.join(named) or 'columns that are gone'}, not in the key "
            f"{', '.join(columns)}: in which partitions rows go is not known; use a spec without fields"
        )
    arrow, partitioner = arrow_schema(schema), Partitioner(spec, schema)
    rows = keys.select(list(columns)).combine_chunks()
    batches = [conform(batch, schema, arrow) for batch in rows.to_batches()]
    parts: dict[str, tuple[list[object], list[pa.RecordBatch]]] = {}
    for batch in batches:
        for partition, chosen in partitioner.split(batch):
            values = partitioner.json(partition)
            held = parts.setdefault(json.dumps(values), (values, []))
            held[1].append(batch if chosen is None else batch.take(pa.array(chosen)))
    files: list[dict[str, Any]] = []
    modes = modes_of(schema, target.properties, target.sort_order)
    try:
        for values, held_rows in parts.values():
            writer = _delete_writer(target, schema, modes, "equality")
            try:
                writer.write(pa.Table.from_batches(held_rows, arrow))
                file = writer.close()
            except BaseException:
                writer.abort()
                raise
            ids = {"equality-ids": [one.id for one in schema.fields], "sort-order-id": 0}
            where = {"spec-id": spec.spec_id, "partition": values}
            files.append({"content": "equality-deletes", **file, **where, **ids})
    except BaseException:
        WrittenDeletes(tuple(files)).discard(target.storage)
        raise
    return WrittenDeletes(tuple(files))


def check_equality_deletes(target: WriteTarget, columns: Sequence[str]) -> Schema:
    """The columns alone. Unwritable where the table has no equality deletes, or none by these."""
    _check_version(target, "equality deletes")
    return _key_schema(target.schema, columns)


def _key_schema(schema: Schema, columns: Sequence[str]) -> Schema:
    by_name = {one.name: one for one in schema.fields}
    if unknown := [name for name in columns if name not in by_name]:
        raise Unwritable(f"the table has no column {unknown[0]}, which is to be of a key")
    fields = [by_name[name] for name in columns]
    for one in fields:
        if not isinstance(one.type, str) or one.type in FLOATS:
            raise Unwritable(f"column {one.name} is of a type that readers do not compare alike; it makes no key")
    if not fields or len(set(columns)) < len(columns):
        raise Unwritable("a key has at least one column, and each once")
    return Schema(tuple(msgspec.structs.replace(one, required=False) for one in fields), schema.id)


def _check_version(target: WriteTarget, what: str) -> None:
    if target.format_version < _DELETES_SINCE:
        raise Unwritable(f"A table of version {target.format_version} has no {what}; upgrade it to version 2 or later")


def _delete_writer(target: WriteTarget, schema: Schema, modes: Mapping[int, Mode], kind: str) -> FileWriter:
    own = {_ALL + name.removeprefix(_OWN): value for name, value in target.properties.items() if name.startswith(_OWN)}
    return FileWriter(
        _new_location(target, ".parquet"),
        target.storage,
        schema,
        arrow_schema(schema),
        {**target.properties, **own},
        modes,
        key_values={"delete-type": kind},
    )


def _new_location(target: WriteTarget, suffix: str) -> str:
    """In no partition's folder: a vector file is of many, and readers go by manifests."""
    return data_location(target.location, target.properties, "", f"{uuid.uuid4()}-deletes{suffix}")
