"""Encodes the files of the rows of a stream for the server. They are encoded in memory, because the server stores them.

The server names this module in its extensions, and uses the functions as its port `RowFiles`
(`metaserver/streams/row_files.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from seamark.connector.arrow.casting import Unwritable, build_arrow_schema, conform
from seamark.connector.parquet.projection import FileProjection
from seamark.connector.streams.index_files import encode_index_files as encode_index_files
from seamark.connector.streams.keyed_reads import get_keyed_rows as get_keyed_rows
from seamark.connector.streams.keyed_rows import (
    DELETE,
    EncodedRowDeletes,
    KeyColumns,
    KeyedFile,
    KeyedRows,
    are_complete,
    check_key,
    encode_deletes,
    hash_keys,
    select_rows,
)
from seamark.connector.streams.stored_files import MemoryStorage, StoredRowsPort
from seamark.connector.write.data_files import finish_data_file, open_data_file_writer
from seamark.connector.write.target import WriteTarget, check_unencrypted, create_target
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.files.parquet import FIELD_ID, AmbiguousColumn, Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest, Corrupt

_SCHEMA_ID = b"seamark.schema-id"
"""The key in the metadata of the Arrow schema for the id of the table's schema to which the rows conform."""
_KEY_IDS = b"seamark.key-ids"
"""The key in the metadata of the Arrow schema for the ids of the key columns, if the table has a key."""


_IPC_OPTIONS = pa.ipc.IpcWriteOptions()
"""The default options. Without them, each stream reads the environment, which costs as much as ten rows."""
_ARROW_SCHEMAS_MAX = 64
"""The maximum number of Arrow schemas in memory. One of a thousand columns takes about a megabyte with its schema."""


class _Slice(Protocol):
    """Consecutive rows of a packed batch."""

    @property
    def payload(self) -> bytes: ...
    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def kinds(self) -> bytes: ...


class EncodedRows(NamedTuple):
    """A Parquet file in memory, and its ContentFile as JSON."""

    location: str
    data: bytes
    content_file: bytes
    rows: int


def conform_rows(rows: pa.RecordBatch, metadata: TableMetadata, kinds: bytes, key: Sequence[str]) -> pa.RecordBatch:
    """Return the rows with the columns of the table's current schema.

    Args:
        rows: The rows.
        metadata: The table's metadata.
        kinds: The kind of each row; empty if all are inserts. A row that deletes needs its key columns only.
        key: The names of the key columns; empty for a table without a key.

    Raises:
        BadRequest: If rows do not fit the schema or have no key.
    """
    for name in key:
        present = rows.schema.get_field_index(name) >= 0
        if rows.num_rows and (not present or rows.column(name).null_count):
            row = int(np.flatnonzero(rows.column(name).is_null().to_numpy(zero_copy_only=False))[0]) if present else 0
            raise BadRequest(f"Row {row} has no value in the column {name}, which is a part of the table's key")
    try:
        check_unencrypted(metadata)
        if DELETE in kinds:
            return _conform_with_deletes(rows, metadata.current_schema, kinds, key)
        return conform(rows, metadata.current_schema, _arrow_schema_of(metadata.current_schema))
    except Unwritable as error:
        raise BadRequest(f"The rows do not fit the table: {error}") from None


def _conform_with_deletes(rows: pa.RecordBatch, schema: Schema, kinds: bytes, key: Sequence[str]) -> pa.RecordBatch:
    """Conform rows of which those that delete may lack required columns.

    Raises:
        Unwritable: Rows do not fit the schema.
    """
    fields = tuple(
        field if field.name in key else msgspec.structs.replace(field, required=False) for field in schema.fields
    )
    arrow, relaxed = _arrow_schema_of(schema), Schema(fields, schema.id)
    conformed = conform(rows, relaxed, build_arrow_schema(relaxed))
    written = pa.array(np.frombuffer(kinds, dtype=np.uint8) != DELETE)
    conform(conformed.filter(written), schema, arrow)
    return pa.RecordBatch.from_arrays(conformed.columns, schema=arrow)


class _SameSchema:
    """A schema as a key of a cache. Two keys are equal if they have the same object, so that no field is compared."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameSchema) and other.schema is self.schema


def _arrow_schema_of(schema: Schema) -> pa.Schema:
    """Return `arrow_schema(schema)`, which the requests of a table share."""
    return _cache_arrow_schema(_SameSchema(schema))


@lru_cache(_ARROW_SCHEMAS_MAX)
def _cache_arrow_schema(key: _SameSchema) -> pa.Schema:
    return build_arrow_schema(key.schema)


def shard_rows(rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str], shards: int) -> list[int]:
    """Return the shard of each row of `conform_rows`: rows with the same key are in one shard."""
    keys = KeyColumns(check_key(metadata, key))
    hashes = hash_keys(keys.fields, keys.read(rows, metadata.current_schema))
    numbers: list[int] = (hashes.high % np.uint64(shards)).tolist()
    return numbers


def pack_rows(rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str]) -> bytes:
    """Return rows of `conform_rows` as an Arrow IPC stream.

    Its schema has the id of the table's schema and, for rows with a key, the ids of the key columns.
    """
    names = {_SCHEMA_ID: str(metadata.current_schema_id).encode()}
    if key:
        ids = {field.name: field.id for field in metadata.current_schema.fields}
        names[_KEY_IDS] = ",".join(str(ids[name]) for name in key).encode()
    schema = rows.schema.with_metadata(names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_IPC_OPTIONS) as stream:
        stream.write_batch(rows.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue())


def decode_rows(rows: Sequence[_Slice], metadata: TableMetadata) -> list[pa.RecordBatch]:
    """Return a batch for each slice, with the columns of the table's current schema and their field ids.

    Raises:
        BadRequest: If a column cannot be read as the type that it has now.
    """
    fields = metadata.current_schema.fields
    arrow = pa.schema(
        [pa.field(field.name, to_row_type(field.type), metadata={FIELD_ID: str(field.id)}) for field in fields]
    )
    projections: dict[bytes, FileProjection] = {}
    batches = []
    for packed in rows:
        with pa.ipc.open_stream(pa.py_buffer(packed.payload)) as stream:
            batch = stream.read_next_batch().slice(packed.first, packed.rows)
        schema_id = stream.schema.metadata[_SCHEMA_ID]
        try:
            if schema_id not in projections:
                projections[schema_id] = FileProjection(list(batch.schema), fields, {})
            columns = projections[schema_id].columns(batch, [field.id for field in fields], batch.num_rows)
        except AmbiguousColumn as error:
            raise BadRequest(f"Rows of the stream cannot be read with the table's schema: {error}") from None
        batches.append(pa.RecordBatch.from_arrays([columns[field.id] for field in fields], schema=arrow))
    return batches


def encode_rows(rows: Sequence[_Slice], metadata: TableMetadata, folder: str | None) -> list[EncodedRows]:
    """Return packed rows as Parquet files, one for each schema and partition.

    Rows that were packed for an earlier schema are written with that schema: readers know what its columns are now.

    Args:
        rows: The rows, in order.
        metadata: The table's metadata.
        folder: The folder of the files; None for those of data files.

    Raises:
        BadRequest: If the table has a property that writers do not support.
    """
    by_schema: dict[int, list[pa.RecordBatch]] = {}
    for batch, schema_id in map(_unpack, rows):
        by_schema.setdefault(schema_id, []).append(batch)
    return [file for file, _ in _encode(by_schema, metadata, folder)]


def encode_keyed_rows(
    rows: Sequence[_Slice], metadata: TableMetadata, folder: str | None, key: Sequence[str]
) -> tuple[list[EncodedRows], KeyedRows]:
    """Return the latest row of each key as Parquet files, and the keys of all rows.

    Args:
        rows: The rows, in the order of the log.
        metadata: The table's metadata.
        folder: The folder of the files; None for those of data files.
        key: The names of the key columns; if it is empty, the rows state their key.

    Raises:
        BadRequest: If the table has a property that writers do not support.
    """
    keys = KeyColumns(check_key(metadata, key or _read_key(rows, metadata)))
    batches = [_unpack(packed) for packed in rows]
    for batch, schema_id in batches:
        keys.add(batch, _schema_of(metadata, schema_id))
    kinds = b"".join(packed.kinds or bytes(packed.rows) for packed in rows)
    latest = select_rows(keys.fields, keys.concatenate(), kinds)
    by_schema: dict[int, list[pa.RecordBatch]] = {}
    start = 0
    for batch, schema_id in batches:
        stays = latest.stays[start : start + batch.num_rows]
        start += batch.num_rows
        if stays.any():
            by_schema.setdefault(schema_id, []).append(batch.filter(pa.array(stays)))
    files, file_keys = [], []
    for file, table in _encode(by_schema, metadata, folder):
        files.append(file)
        schema = _schema_of(metadata, int(table.schema.metadata[_SCHEMA_ID]))
        columns = keys.read(table, schema)
        content = msgspec.json.decode(file.content_file)
        file_keys.append(KeyedFile(content, hash_keys(keys.fields, columns), are_complete(columns)))
    return files, KeyedRows(latest.keys, latest.hashes, tuple(file_keys))


def encode_row_deletes(
    parts: Sequence[KeyedRows], metadata: TableMetadata, stored: StoredRowsPort, folder: str | None
) -> EncodedRowDeletes:
    """Return the deletes of the rows that keyed rows replace (`encode_deletes`).

    Raises:
        BadRequest: If the table does not support deletes.
        Corrupt: If a file of the table cannot be read.
    """
    try:
        return encode_deletes(parts, metadata, stored, folder)
    except Unwritable as error:
        raise BadRequest(f"The rows that later rows replace cannot be deleted: {error}") from None
    except Unreadable as error:
        raise Corrupt(f"The rows that later rows replace cannot be located: {error}") from None


def _unpack(packed: _Slice) -> tuple[pa.RecordBatch, int]:
    """Return the rows of a slice, and the id of their schema."""
    with pa.ipc.open_stream(pa.py_buffer(packed.payload)) as stream:
        batch = stream.read_next_batch()
    schema_id = int(stream.schema.metadata[_SCHEMA_ID])
    return batch.slice(packed.first, packed.rows).replace_schema_metadata(None), schema_id


def _read_key(rows: Sequence[_Slice], metadata: TableMetadata) -> list[str]:
    """Return the key that the last of the rows with a key state, as names of the current schema.

    Raises:
        BadRequest: A column of the key was dropped.
    """
    ids: list[int] = []
    for packed in rows:
        with pa.ipc.open_stream(pa.py_buffer(packed.payload)) as stream:
            ids = [int(text) for text in stream.schema.metadata.get(_KEY_IDS, b"").split(b",") if text] or ids
    names = {field.id: field.name for field in metadata.current_schema.fields}
    if lacking := [column_id for column_id in ids if column_id not in names]:
        raise BadRequest(
            f"Rows of the stream replace others by the column with id {lacking[0]}, which was dropped from the table; "
            "add the rows to the table before the column is dropped"
        )
    return [names[column_id] for column_id in ids]


def _schema_of(metadata: TableMetadata, schema_id: int) -> Schema:
    """Return a schema of the table.

    Raises:
        BadRequest: The table no longer has the schema.
    """
    schema = metadata.schema(schema_id)
    if schema is None:
        raise BadRequest(f"The table no longer has the schema {schema_id}, in which rows of its stream are stored")
    return schema


def _encode(
    by_schema: Mapping[int, Sequence[pa.RecordBatch]], metadata: TableMetadata, folder: str | None
) -> Iterator[tuple[EncodedRows, pa.Table]]:
    """Yield the files of rows by their schema, each with its rows in the order of the file.

    Raises:
        BadRequest: The rows cannot be written.
    """
    try:
        for schema_id, batches in by_schema.items():
            target = _target_of(metadata, _schema_of(metadata, schema_id))
            table = pa.Table.from_batches(batches, target.arrow).combine_chunks()
            for batch in table.to_batches():
                for file, rows in _encode_batch(batch, target, folder):
                    yield file, rows.replace_schema_metadata({_SCHEMA_ID: str(schema_id).encode()})
    except Unwritable as error:
        raise BadRequest(f"The rows cannot be written: {error}") from None


def _encode_batch(
    batch: pa.RecordBatch, target: WriteTarget, folder: str | None
) -> Iterator[tuple[EncodedRows, pa.Table]]:
    storage = target.storage
    assert isinstance(storage, MemoryStorage)
    for partition, chosen in target.partitioner.split(batch):
        rows = pa.Table.from_batches([batch if chosen is None else batch.take(pa.array(chosen))])
        if target.ordering is not None:
            rows = target.ordering.sort(rows)
        location = target.generate_location(partition) if folder is None else f"{folder}/{uuid.uuid4()}.parquet"
        writer = open_data_file_writer(target, location)
        writer.write(rows)
        content = msgspec.json.encode(finish_data_file(writer, target, partition))
        yield EncodedRows(location, storage.data(location), content, rows.num_rows), rows
        storage.delete(location)


def _target_of(metadata: TableMetadata, schema: Schema) -> WriteTarget:
    """Return the target for files with a schema of the table, and the newest partition spec whose columns it has."""
    target = replace(create_target(metadata, MemoryStorage()), indexes=())
    if schema.id == metadata.current_schema_id:
        return target
    columns = schema.index.by_id
    specs = (metadata.default_spec, *sorted(metadata.partition_specs, key=lambda spec: -spec.spec_id))
    spec = next((spec for spec in specs if all(set(field.sources) <= columns.keys() for field in spec.fields)), None)
    if spec is None:
        raise Unwritable(f"no partition spec of the table has only columns of its schema {schema.id}")
    order = target.sort_order if set(target.sort_order.column_ids) <= columns.keys() else None
    target = replace(target, schema=schema, spec=spec)
    return target if order is not None else replace(target, sort_order=type(target.sort_order)(0, ()))
