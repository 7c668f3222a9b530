"""Packs rows of a stream into payloads of the log, and unpacks them with the key columns that the table then had.

A payload is an Arrow IPC stream. The metadata of its Arrow schema identifies the metadata of the table for which the
rows were packed: the id of the schema, the ids of the key columns, and the time. Columns are found by their field ids,
because two columns may have similar names in files. If the table no longer has the schema, the rows are converted to
the current schema. Rows replace earlier rows by the key columns in their payload. If the table's key columns change,
rows with different key columns can wait for the same flush, and `group_by_key` returns them in the order in which the
table had these key columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

import msgspec
import pyarrow as pa

from seamark.connector.arrow.casting import UNKNOWN, Unwritable, build_arrow_schema, conform, get_arrow_type
from seamark.connector.parquet.projection import FileProjection
from seamark.formats.iceberg.files.parquet import FIELD_ID, AmbiguousColumn
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.keys.keys import get_family
from seamark.formats.runtime.errors import BadRequest

SCHEMA_ID = b"seamark.schema-id"
"""The key in the Arrow schema's metadata for the id of the table's schema to which the rows conform."""
_KEY_IDS = b"seamark.key-ids"
"""The key in the Arrow schema's metadata for the ids of the key columns, if the table has a key."""
_LAST_UPDATED_MS = b"seamark.packed-ms"
"""The key in the Arrow schema's metadata for `last_updated_ms` of the table's metadata. Older payloads lack it."""
_IPC_OPTIONS = pa.ipc.IpcWriteOptions()
"""The default options. Without this object, each stream reads the environment, which costs as much as ten rows."""
_PREFIX_BYTES = 8
"""The size of the marker and the length, of 4 bytes each, that precede the first message of an Arrow IPC stream."""
_HEADERS_MAX = 256
_KEY_TYPES = {
    get_arrow_type(kind): kind
    for kind in (
        *("boolean", "int", "long", "date", "time", "string", "uuid", "binary"),
        *("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"),
    )
}
"""The Iceberg types without parameters that key columns may have, by their Arrow types in files."""

RowKey: TypeAlias = tuple[tuple[int, str], ...]
"""The ids of the key columns, and the families of their types when the rows were packed. Empty without a key.

Hashes, and therefore the shard of a row, depend on the families (`get_family`).
"""


class PackedSlice(Protocol):
    """Consecutive rows of a payload, which is an Arrow stream with one batch. `first` is the position of the first row.

    `kinds` has one byte for each row (insert, update or delete), or is empty if all rows are inserts.
    """

    @property
    def payload(self) -> bytes: ...
    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def kinds(self) -> bytes: ...


class PackedHeader(NamedTuple):
    """The metadata of a payload.

    Attributes:
        schema_id: The id of the table's schema to which the rows conform.
        key: The key columns of the rows. Empty for rows without a key.
        packed_ms: `last_updated_ms` of the table metadata for which the rows were packed, or 0 if it is unknown.
    """

    schema_id: int
    key: RowKey
    packed_ms: int


class UnpackedRows(NamedTuple):
    """The unpacked rows of a slice of a payload.

    Attributes:
        rows: The rows, with the columns that their schema has in files.
        schema: The table's schema to which the rows conform.
        key: The key columns by which the rows replace earlier rows.
        packed_ms: `last_updated_ms` of the table metadata for which the rows were packed, or 0 if it is unknown.
        kinds: The kind of each row, as bytes[rows]. Empty if all rows are inserts.
    """

    rows: pa.RecordBatch
    schema: Schema
    key: RowKey
    packed_ms: int
    kinds: bytes


def pack_rows(rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str]) -> bytes:
    """Return rows as a payload of the stream's log: an Arrow IPC stream with one batch.

    The metadata of its schema identifies the table's schema, its key columns, and the time of the table's metadata.

    Args:
        rows: The rows, in the table's current schema.
        metadata: The metadata of the table.
        key: The names of the key columns. Empty for a table without a key.
    """
    schema_metadata = {
        SCHEMA_ID: str(metadata.current_schema_id).encode(),
        _LAST_UPDATED_MS: str(metadata.last_updated_ms).encode(),
    }
    if key:
        ids = {field.name: field.id for field in metadata.current_schema.fields}
        schema_metadata[_KEY_IDS] = ",".join(str(ids[name]) for name in key).encode()
    schema = rows.schema.with_metadata(schema_metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_IPC_OPTIONS) as stream:
        stream.write_batch(rows.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue())


def unpack_rows(packed_slice: PackedSlice, metadata: TableMetadata) -> UnpackedRows:
    """Return the rows of a slice. If the table no longer has their schema, convert them to the current schema.

    Raises:
        BadRequest: The table no longer has the schema of the rows, and the rows do not fit the current schema.
    """
    with pa.ipc.open_stream(pa.py_buffer(packed_slice.payload)) as stream:
        batch = stream.read_next_batch()
    header = _parse_header(stream.schema)
    rows = batch.slice(packed_slice.first, packed_slice.rows).replace_schema_metadata(None)
    kinds = packed_slice.kinds or bytes(packed_slice.rows)
    schema = metadata.schema(header.schema_id)
    if schema is None:
        rows, schema = _replace_schema(rows, header, metadata), metadata.current_schema
    return UnpackedRows(rows, schema, header.key, header.packed_ms, kinds)


def _replace_schema(rows: pa.RecordBatch, header: PackedHeader, metadata: TableMetadata) -> pa.RecordBatch:
    """Convert rows to the current schema, because the table no longer has the schema of the rows.

    Raises:
        BadRequest: The current schema does not have a key column, or a value does not fit the type of its column.
    """
    schema = metadata.current_schema
    try:
        if missing_ids := {column_id for column_id, _ in header.key} - {field.id for field in schema.fields}:
            raise Unwritable(f"the key column with the id {min(missing_ids)} was dropped")
        return convert_rows(rows, schema)
    except (AmbiguousColumn, Unwritable) as error:
        raise BadRequest(
            f"The table no longer has the schema {header.schema_id}, in which rows of its stream are stored, and the "
            f"rows do not fit the current schema: {error}; add a schema with the columns of these rows"
        ) from None


def convert_rows(rows: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Convert rows of any schema of the table to the columns that files of a schema have.

    Required columns may be null, because rows that delete a key may have only the key columns.

    Raises:
        AmbiguousColumn: Several columns may be the requested column, or a value does not fit the type of its column.
        Unwritable: A column has an unsupported type.
    """
    stored_fields = [field for field in schema.fields if field.type != UNKNOWN]  # Rows have no columns of this type.
    field_ids = [field.id for field in stored_fields]
    columns = FileProjection(list(rows.schema), stored_fields, {}).project_columns(rows, field_ids, rows.num_rows)
    relaxed_schema = Schema(tuple(msgspec.structs.replace(field, required=False) for field in stored_fields), schema.id)
    batch = pa.RecordBatch.from_arrays(
        [columns[field.id] for field in stored_fields], names=[field.name for field in stored_fields]
    )
    conformed_rows = conform(batch, relaxed_schema, build_arrow_schema(relaxed_schema))
    return pa.RecordBatch.from_arrays(conformed_rows.columns, schema=build_arrow_schema(schema))


def read_schema_id(payload: bytes) -> int:
    """Return the id of the table's schema to which the rows of a payload conform."""
    return _read_header(payload).schema_id


def list_keys(rows: Sequence[PackedSlice], metadata: TableMetadata) -> frozenset[RowKey]:
    """Return each set of key columns by which some of the rows replace earlier rows.

    The server calls this function with the table's metadata, but only the headers of the payloads are read.
    """
    return frozenset(_read_header(packed_slice.payload).key for packed_slice in rows)


def group_by_key(rows: Sequence[UnpackedRows], current: RowKey) -> list[list[UnpackedRows]]:
    """Group rows by their key columns, in the order in which the table had these key columns.

    Each row has the time of the table metadata for which it was packed (`packed_ms`). The groups are in the order of
    these times, and successive times with the same key columns form one group. The rows of a group stay in their order.

    An append may read the table's metadata before the key columns change, and be acknowledged after the change. Its
    rows have the time of the earlier metadata, so they are in an earlier group.

    Args:
        rows: The rows. Those of each shard are in the order of the log. Rows with the same key columns that replace
            each other are in one shard.
        current: The current key columns of the table. If two sets of key columns have the same time, the group with
            the current key columns is last.
    """
    if len({unpacked.key for unpacked in rows}) <= 1:
        return [list(rows)] if rows else []
    groups: list[list[UnpackedRows]] = []
    by_time: dict[tuple[int, RowKey], list[UnpackedRows]] = {}
    previous: RowKey | None = None
    times = sorted({(unpacked.packed_ms, unpacked.key == current, unpacked.key) for unpacked in rows})
    for packed_ms, _, key in times:
        if not groups or key != previous:
            groups.append([])
            previous = key
        by_time[packed_ms, key] = groups[-1]
    for unpacked in rows:
        by_time[unpacked.packed_ms, unpacked.key].append(unpacked)
    return groups


def find_column(rows: pa.RecordBatch | pa.Table, column_id: int) -> pa.ChunkedArray | pa.Array | None:
    """Return the column with a field id, or None if the rows do not have it."""
    text = str(column_id).encode()
    for place, field in enumerate(rows.schema):
        if (field.metadata or {}).get(FIELD_ID) == text:
            return rows.column(place)
    return None


def find_schema(metadata: TableMetadata, schema_id: int) -> Schema:
    """Return a schema of the table.

    Raises:
        BadRequest: The table no longer has the schema.
    """
    schema = metadata.schema(schema_id)
    if schema is None:
        raise BadRequest(f"The table no longer has the schema {schema_id}, in which rows of its stream are stored")
    return schema


def build_key(schema: Schema, names: Sequence[str]) -> RowKey:
    """Return the `RowKey` of the columns with these names in a schema."""
    by_name = {field.name: field for field in schema.fields}
    return tuple((by_name[name].id, get_family(str(by_name[name].type))) for name in names)


def _read_header(payload: bytes) -> PackedHeader:
    """Return the metadata of a payload, without reading its rows.

    An Arrow stream begins with a marker of 4 bytes and the length of the message with the schema and its metadata.
    """
    length = int.from_bytes(payload[4:_PREFIX_BYTES], "little")
    return _read_schema_message(payload[: _PREFIX_BYTES + length])


@lru_cache(_HEADERS_MAX)
def _read_schema_message(message: bytes) -> PackedHeader:
    return _parse_header(pa.ipc.read_schema(pa.py_buffer(message)))


def _parse_header(schema: pa.Schema) -> PackedHeader:
    texts = schema.metadata
    types = {(field.metadata or {}).get(FIELD_ID): field.type for field in schema}
    ids = [text for text in texts.get(_KEY_IDS, b"").split(b",") if text]
    key = tuple((int(text), get_family(_name_key_type(types[text]))) for text in ids)
    return PackedHeader(int(texts[SCHEMA_ID]), key, int(texts.get(_LAST_UPDATED_MS, b"0")))


def _name_key_type(kind: pa.DataType) -> str:
    """Return the Iceberg type of a key column that has this Arrow type in files."""
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    if pa.types.is_fixed_size_binary(kind):
        return f"fixed[{kind.byte_width}]"
    return _KEY_TYPES[kind]
