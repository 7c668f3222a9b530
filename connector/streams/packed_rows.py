"""Rows of a stream as payloads of the log, and the key by which the rows of each payload replace others.

A payload is an Arrow IPC stream. The metadata of its Arrow schema states for which metadata of the table the rows were
packed: the id of the schema, the ids of the key columns, and the time. Columns are found by their field ids, because
two columns may have similar names in files. Rows replace others by the key that they came with. So rows of several keys
can wait for the same flush, and `group_by_key` returns them in the order in which the table had these keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from seamark.formats.iceberg.files.parquet import FIELD_ID
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.keys.keys import get_family
from seamark.formats.runtime.errors import BadRequest

SCHEMA_ID = b"seamark.schema-id"
"""The key in the metadata of the Arrow schema for the id of the table's schema to which the rows conform."""
_KEY_IDS = b"seamark.key-ids"
"""The key in the metadata of the Arrow schema for the ids of the key columns, if the table has a key."""
_PACKED_MS = b"seamark.packed-ms"
"""The key in the metadata of the Arrow schema for `last_updated_ms` of the table's metadata. Older rows lack it."""
_IPC_OPTIONS = pa.ipc.IpcWriteOptions()
"""The default options. Without them, each stream reads the environment, which costs as much as ten rows."""
_PREFIX_BYTES = 8
"""The size of the marker and the length before the first message of an Arrow IPC stream."""
_HEADERS_MAX = 256

RowKey: TypeAlias = tuple[tuple[int, str], ...]
"""The ids of the key columns, and the families of their types when the rows were packed; empty for rows without a key.

The shard of a row depends on the family, because hashes do (`get_family`).
"""


class PackedSlice(Protocol):
    """Consecutive rows of a payload."""

    @property
    def payload(self) -> bytes: ...
    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def kinds(self) -> bytes: ...


class PackedHeader(NamedTuple):
    """The facts that a payload states about its rows.

    Attributes:
        schema_id: The id of the table's schema to which the rows conform.
        key_ids: The ids of the key columns; empty for rows without a key.
        packed_ms: `last_updated_ms` of the metadata for which the rows were packed; 0 if it is unknown.
    """

    schema_id: int
    key_ids: tuple[int, ...]
    packed_ms: int


class UnpackedRows(NamedTuple):
    """The rows of a slice.

    Attributes:
        rows: The rows, with the columns of their schema in files.
        schema: The table's schema to which they conform.
        key: The key by which they replace others.
        packed_ms: When the metadata was made for which they were packed.
        kinds: The kind of each row.
    """

    rows: pa.RecordBatch
    schema: Schema
    key: RowKey
    packed_ms: int
    kinds: bytes


def pack_rows(rows: pa.RecordBatch, metadata: TableMetadata, key: Sequence[str]) -> bytes:
    """Return rows with the table's current schema as an Arrow IPC stream."""
    names = {
        SCHEMA_ID: str(metadata.current_schema_id).encode(),
        _PACKED_MS: str(metadata.last_updated_ms).encode(),
    }
    if key:
        ids = {field.name: field.id for field in metadata.current_schema.fields}
        names[_KEY_IDS] = ",".join(str(ids[name]) for name in key).encode()
    schema = rows.schema.with_metadata(names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=_IPC_OPTIONS) as stream:
        stream.write_batch(rows.replace_schema_metadata(schema.metadata))
    return bytes(sink.getvalue())


def unpack_rows(packed: PackedSlice, metadata: TableMetadata) -> UnpackedRows:
    """Return the rows of a slice.

    Raises:
        BadRequest: The table no longer has the schema of the rows.
    """
    with pa.ipc.open_stream(pa.py_buffer(packed.payload)) as stream:
        batch = stream.read_next_batch()
    header = _parse_header(stream.schema.metadata)
    schema = find_schema(metadata, header.schema_id)
    rows = batch.slice(packed.first, packed.rows).replace_schema_metadata(None)
    kinds = packed.kinds or bytes(packed.rows)
    return UnpackedRows(rows, schema, _find_key(header, schema), header.packed_ms, kinds)


def list_keys(rows: Sequence[PackedSlice], metadata: TableMetadata) -> frozenset[RowKey]:
    """Return the keys by which rows replace others.

    Raises:
        BadRequest: The table no longer has the schema of some rows.
    """
    headers = {_read_header(packed.payload) for packed in rows}
    return frozenset(_find_key(header, find_schema(metadata, header.schema_id)) for header in headers)


def group_by_key(rows: Sequence[UnpackedRows], current: RowKey) -> list[list[UnpackedRows]]:
    """Return the rows in groups with the same key, in the order in which the table had these keys.

    Rows of one group stay in their order. An append may read the table's metadata before its key changes, and be
    acknowledged after the change. Its rows are in the group before the change, because the append was running then.

    Args:
        rows: The rows, those of each shard in the order of the log. Rows of a group that replace each other are in one
            shard.
        current: The current key of the table, which is later than others of the same time.
    """
    if len({each.key for each in rows}) <= 1:
        return [list(rows)] if rows else []
    groups: list[list[UnpackedRows]] = []
    by_time: dict[tuple[int, RowKey], list[UnpackedRows]] = {}
    previous: RowKey | None = None
    times = sorted({(each.packed_ms, each.key == current, each.key) for each in rows})
    for packed_ms, _, key in times:
        if not groups or key != previous:
            groups.append([])
            previous = key
        by_time[packed_ms, key] = groups[-1]
    for each in rows:
        by_time[each.packed_ms, each.key].append(each)
    return groups


def find_column(rows: pa.RecordBatch | pa.Table, column_id: int) -> pa.ChunkedArray | pa.Array | None:
    """Return the column with a field id, or None if the rows lack it."""
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
    """Return the key with these column names in a schema."""
    by_name = {field.name: field for field in schema.fields}
    return tuple((by_name[name].id, get_family(str(by_name[name].type))) for name in names)


def _find_key(header: PackedHeader, schema: Schema) -> RowKey:
    types = {field.id: str(field.type) for field in schema.fields}
    return tuple((column_id, get_family(types[column_id])) for column_id in header.key_ids)


def _read_header(payload: bytes) -> PackedHeader:
    """Return what a payload states, without reading its rows."""
    length = int.from_bytes(payload[4:_PREFIX_BYTES], "little")
    return _read_schema_message(payload[: _PREFIX_BYTES + length])


@lru_cache(_HEADERS_MAX)
def _read_schema_message(message: bytes) -> PackedHeader:
    return _parse_header(pa.ipc.read_schema(pa.py_buffer(message)).metadata)


def _parse_header(texts: dict[bytes, bytes]) -> PackedHeader:
    key_ids = tuple(int(text) for text in texts.get(_KEY_IDS, b"").split(b",") if text)
    return PackedHeader(int(texts[SCHEMA_ID]), key_ids, int(texts.get(_PACKED_MS, b"0")))
