"""Encodes the files with the rows of a stream in memory, for the server, which stores them.

The server loads this module by its name, and uses its functions as the port `RowFiles`
(`metaserver/streams/row_files.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from seamark.connector.arrow.casting import UNKNOWN, Unwritable, build_arrow_schema, conform
from seamark.connector.arrow.partitions import Partitioner
from seamark.connector.arrow.sort_order import Ordering
from seamark.connector.parquet.projection import FileProjection
from seamark.connector.streams.index_files import encode_index_files as encode_index_files
from seamark.connector.streams.keyed_reads import get_keyed_rows as get_keyed_rows
from seamark.connector.streams.keyed_rows import (
    DELETE,
    EncodedRowDeletes,
    KeyedFile,
    KeyedRows,
    are_complete,
    check_key,
    encode_deletes,
    hash_keys,
    read_key_columns,
    select_rows,
)
from seamark.connector.streams.packed_rows import (
    SCHEMA_ID,
    PackedSlice,
    build_key,
    convert_rows,
    find_schema,
    group_by_key,
    unpack_rows,
)
from seamark.connector.streams.packed_rows import list_keys as list_keys
from seamark.connector.streams.packed_rows import pack_rows as pack_rows
from seamark.connector.streams.packed_rows import read_schema_id as read_schema_id
from seamark.connector.streams.stored_files import MemoryStorage, StoredRowsPort
from seamark.connector.write.data_files import finish_data_file, open_data_file_writer
from seamark.connector.write.target import WriteTarget, check_unencrypted, create_target
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.files.parquet import FIELD_ID, AmbiguousColumn, Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.metadata.sort_order import UNSORTED
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY, canonicalize_transform
from seamark.formats.runtime.errors import BadRequest, Corrupt

_ARROW_SCHEMAS_MAX = 64
"""The maximum number of cached Arrow schemas. With its schema, one of a thousand columns takes about a megabyte."""


class EncodedRows(NamedTuple):
    """A Parquet file in memory, and its ContentFile as JSON."""

    location: str
    data: bytes
    content_file: bytes
    rows: int


def conform_rows(rows: pa.RecordBatch, metadata: TableMetadata, kinds: bytes, key: Sequence[str]) -> pa.RecordBatch:
    """Return the rows converted to the columns of the table's current schema.

    Args:
        rows: The rows.
        metadata: The table's metadata.
        kinds: The kind of each row. Empty if all rows are inserts. A row that deletes needs only its key columns.
        key: The names of the key columns. Empty for a table without a key.

    Raises:
        BadRequest: Rows do not fit the schema, or a key column is null.
    """
    for name in key:
        has_column = rows.schema.get_field_index(name) >= 0
        if rows.num_rows and (not has_column or rows.column(name).null_count):
            row_number = (
                int(np.flatnonzero(rows.column(name).is_null().to_numpy(zero_copy_only=False))[0]) if has_column else 0
            )
            raise BadRequest(f"Row {row_number} has no value in the column {name}, which is a part of the table's key")
    try:
        check_unencrypted(metadata)
        if DELETE in kinds:
            return _conform_with_deletes(rows, metadata.current_schema, kinds, key)
        return conform(rows, metadata.current_schema, _build_cached_arrow_schema(metadata.current_schema))
    except Unwritable as error:
        raise BadRequest(f"The rows do not fit the table: {error}") from None


def _conform_with_deletes(rows: pa.RecordBatch, schema: Schema, kinds: bytes, key: Sequence[str]) -> pa.RecordBatch:
    """Convert rows to a schema. Rows that delete a key may have null in required columns.

    All columns except the key are first converted as optional. The other rows are then checked for nulls.

    Raises:
        Unwritable: Rows do not fit the schema.
    """
    fields = tuple(
        field if field.name in key else msgspec.structs.replace(field, required=False) for field in schema.fields
    )
    relaxed_schema = Schema(fields, schema.id)
    conformed_rows = conform(rows, relaxed_schema, build_arrow_schema(relaxed_schema))
    is_written = np.frombuffer(kinds, dtype=np.uint8) != DELETE
    stored_fields = [field for field in schema.fields if field.type != UNKNOWN]  # Rows have no columns of this type.
    for field, column in zip(stored_fields, conformed_rows.columns, strict=True):
        if field.required and column.null_count:
            invalid_rows = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False) & is_written)
            if len(invalid_rows):
                raise Unwritable(
                    f"column {field.name} is required, but {len(invalid_rows):,} of its values are null; "
                    "the first is in "
                    f"row {invalid_rows[0]}"
                )
    return pa.RecordBatch.from_arrays(conformed_rows.columns, schema=_build_cached_arrow_schema(schema))


class _SameSchema:
    """The key of a schema in a cache. Keys are equal if they have the same schema object, so no fields are compared."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def __hash__(self) -> int:
        return id(self.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameSchema) and other.schema is self.schema


def _build_cached_arrow_schema(schema: Schema) -> pa.Schema:
    """Return the cached result of `build_arrow_schema(schema)`."""
    return _cache_arrow_schema(_SameSchema(schema))


@lru_cache(_ARROW_SCHEMAS_MAX)
def _cache_arrow_schema(key: _SameSchema) -> pa.Schema:
    return build_arrow_schema(key.schema)


def shard_rows(rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str], shards: int) -> list[int]:
    """Return the shard of each row from `conform_rows`. Rows with the same key are in the same shard."""
    fields = check_key(metadata, key)
    hashes = hash_keys(fields, read_key_columns(fields, rows, metadata.current_schema))
    numbers: list[int] = (hashes.high % np.uint64(shards)).tolist()
    return numbers


def decode_rows(rows: Sequence[PackedSlice], metadata: TableMetadata) -> list[pa.RecordBatch]:
    """Return a batch for each slice, with the columns of the table's current schema and their field ids.

    Raises:
        BadRequest: The values of a column cannot be converted to its current type.
    """
    fields = metadata.current_schema.fields
    arrow = pa.schema(
        [pa.field(field.name, to_row_type(field.type), metadata={FIELD_ID: str(field.id)}) for field in fields]
    )
    projections: dict[bytes, FileProjection] = {}
    batches = []
    for packed_slice in rows:
        with pa.ipc.open_stream(pa.py_buffer(packed_slice.payload)) as stream:
            batch = stream.read_next_batch().slice(packed_slice.first, packed_slice.rows)
        schema_id = stream.schema.metadata[SCHEMA_ID]
        try:
            if schema_id not in projections:
                projections[schema_id] = FileProjection(list(batch.schema), fields, {})
            columns = projections[schema_id].project_columns(batch, [field.id for field in fields], batch.num_rows)
        except AmbiguousColumn as error:
            raise BadRequest(f"Rows of the stream cannot be read with the table's schema: {error}") from None
        batches.append(pa.RecordBatch.from_arrays([columns[field.id] for field in fields], schema=arrow))
    return batches


def encode_rows(rows: Sequence[PackedSlice], metadata: TableMetadata, folder: str | None) -> list[EncodedRows]:
    """Return packed rows as Parquet files. There is one file for each schema and partition.

    Rows that were packed for an earlier schema are written with that schema, because readers convert its columns.

    Args:
        rows: The rows, in order.
        metadata: The table's metadata.
        folder: The folder of the files, or None for the table's data folders.

    Raises:
        BadRequest: The rows cannot be written, for example because writers do not support a property of the table.
    """
    by_schema: dict[int, list[pa.RecordBatch]] = {}
    for packed_slice in rows:
        unpacked_rows = unpack_rows(packed_slice, metadata)
        by_schema.setdefault(unpacked_rows.schema.id, []).append(unpacked_rows.rows)
    return [file for file, _ in _encode(by_schema, metadata, folder)]


def encode_keyed_rows(
    rows: Sequence[PackedSlice], metadata: TableMetadata, folder: str | None, key: Sequence[str]
) -> tuple[list[EncodedRows], KeyedRows]:
    """Return the rows that no later row replaces as Parquet files, and the keys of all rows.

    Each row replaces earlier rows by the key columns in its payload, which may be earlier key columns of the table.

    Args:
        rows: The rows. Those of each shard are in the order of the log.
        metadata: The table's metadata.
        folder: The folder of fresh files, whose rows must have the same key columns (`list_keys`), or None for the
            table's data folders.
        key: The names of the current key columns. Empty for a table without a valid key.

    Raises:
        BadRequest: The rows cannot be written, for example because writers do not support a property of the table. Or
            the rows that later rows replace cannot be found.
    """
    unpacked_rows = [unpack_rows(packed_slice, metadata) for packed_slice in rows]
    groups = group_by_key(unpacked_rows, build_key(metadata.current_schema, key))
    if folder is not None and len(groups) > 1:
        raise ValueError("the rows of a fresh file have different key columns; divide them by list_keys")
    try:
        latest = select_rows(groups, metadata)
    except Unwritable as error:
        raise BadRequest(f"The rows that later rows replace cannot be found: {error}") from None
    by_schema: dict[int, list[pa.RecordBatch]] = {}
    start = 0
    for unpacked in (unpacked for group in groups for unpacked in group):
        stays = latest.stays[start : start + unpacked.rows.num_rows]
        start += unpacked.rows.num_rows
        if stays.any():
            by_schema.setdefault(unpacked.schema.id, []).append(unpacked.rows.filter(pa.array(stays)))
    files, file_keys = [], []
    for file, table in _encode(by_schema, metadata, folder):
        files.append(file)
        if folder is not None:  # Later parts may delete rows of fresh files, so the hashes of their keys are needed.
            schema = find_schema(metadata, int(table.schema.metadata[SCHEMA_ID]))
            columns = read_key_columns(latest.fields, table, schema)
            content = msgspec.json.decode(file.content_file)
            file_keys.append(KeyedFile(content, hash_keys(latest.fields, columns), are_complete(columns)))
    return files, KeyedRows(latest.keys, latest.hashes, tuple(file_keys))


def encode_row_deletes(
    parts: Sequence[KeyedRows], metadata: TableMetadata, stored_rows: StoredRowsPort, folder: str | None
) -> EncodedRowDeletes:
    """Return the deletes of the rows that keyed rows replace (`encode_deletes`).

    Raises:
        BadRequest: The table does not support deletes.
        Corrupt: A file of the table cannot be read.
    """
    try:
        return encode_deletes(parts, metadata, stored_rows, folder)
    except Unwritable as error:
        raise BadRequest(f"The rows that later rows replace cannot be deleted: {error}") from None
    except Unreadable as error:
        raise Corrupt(f"The rows that later rows replace cannot be located: {error}") from None


def _encode(
    by_schema: Mapping[int, Sequence[pa.RecordBatch]], metadata: TableMetadata, folder: str | None
) -> Iterator[tuple[EncodedRows, pa.Table]]:
    """Yield the files of rows that are grouped by the id of their schema, each with its rows in the file's order.

    Raises:
        BadRequest: The rows cannot be written.
    """
    try:
        for packed_schema_id, batches in by_schema.items():
            target = _find_target(metadata, find_schema(metadata, packed_schema_id))
            schema_id = target.schema.id
            rows = (
                batches
                if schema_id == packed_schema_id
                else [_convert_batch(batch, target.schema) for batch in batches]
            )
            table = pa.Table.from_batches(rows, target.arrow).combine_chunks()
            for batch in table.to_batches():
                for file, file_rows in _encode_batch(batch, target, folder):
                    yield file, file_rows.replace_schema_metadata({SCHEMA_ID: str(schema_id).encode()})
    except (AmbiguousColumn, Unwritable) as error:
        raise BadRequest(f"The rows cannot be written: {error}") from None


def _encode_batch(
    batch: pa.RecordBatch, target: WriteTarget, folder: str | None
) -> Iterator[tuple[EncodedRows, pa.Table]]:
    """Yield a file for each partition of the rows, with its rows in the file's order.

    A file is removed from the storage in memory after the caller has received its data.
    """
    storage = target.storage
    assert isinstance(storage, MemoryStorage)
    for partition, row_indexes in target.partitioner.split(batch):
        rows = pa.Table.from_batches([batch if row_indexes is None else batch.take(pa.array(row_indexes))])
        if target.ordering is not None:
            rows = target.ordering.sort(rows)
        location = target.generate_location(partition) if folder is None else f"{folder}/{uuid.uuid4()}.parquet"
        writer = open_data_file_writer(target, location)
        writer.write(rows)
        content = msgspec.json.encode(finish_data_file(writer, target, partition))
        yield EncodedRows(location, storage.read_data(location), content, rows.num_rows), rows
        storage.delete(location)


def _find_target(metadata: TableMetadata, schema: Schema) -> WriteTarget:
    """Return the target for files with a schema, and with a partition spec whose columns the schema has.

    The default spec is preferred, and then the spec with the highest id. If no spec fits, return the target for files
    with the current schema.
    """
    target = replace(create_target(metadata, MemoryStorage()), indexes=())
    if schema.id == metadata.current_schema_id:
        return target
    columns = schema.index.by_id
    specs = (metadata.default_spec, *sorted(metadata.partition_specs, key=lambda spec: -spec.spec_id))
    spec = next((spec for spec in specs if _can_partition(spec, schema, metadata.current_schema)), None)
    if spec is None:
        return target
    order = target.sort_order if set(target.sort_order.column_ids) <= columns.keys() else None
    target = replace(target, schema=schema, spec=spec)
    return target if order is not None and _can_sort(target) else replace(target, sort_order=UNSORTED)


def _can_partition(spec: PartitionSpec, schema: Schema, current: Schema) -> bool:
    """Return whether files of a schema can have a partition spec.

    Values of an identity partition must have the current type of their column, so rows with an earlier type must be
    converted.
    """
    old_columns, current_columns = schema.index.by_id, current.index.by_id
    for field in spec.fields:
        if not set(field.sources) <= old_columns.keys():
            return False
        is_identity = canonicalize_transform(field.transform) == IDENTITY
        if is_identity and any(
            current_columns[source].type != old_columns[source].type
            for source in field.sources
            if source in current_columns
        ):
            return False
    try:
        Partitioner(spec, schema)
    except Unwritable:  # The transform requires the type to which the column was promoted.
        return False
    return True


def _can_sort(target: WriteTarget) -> bool:
    try:
        Ordering(target.sort_order, target.schema)
    except Unwritable:
        return False
    return True


def _convert_batch(rows: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Convert rows that have another schema of the table to `schema`.

    Raises:
        AmbiguousColumn: A value of a column does not fit its type in the schema.
        Unwritable: A required column would be null.
    """
    converted_rows = convert_rows(rows, schema)
    for field, column in zip(converted_rows.schema, converted_rows.columns, strict=True):
        if not field.nullable and column.null_count:
            raise Unwritable(f"column {field.name} is required, but rows that were appended earlier do not have it")
    return converted_rows
