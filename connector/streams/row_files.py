"""Files of the rows of a stream, which the server encodes: in memory, because the server stores them itself.

The server names this module in its extensions, and uses the functions as its port `RowFiles`
(`metaserver/streams/row_files.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import msgspec
import pyarrow as pa

from seamark.connector.arrow.casting import Unwritable, conform
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.projection import FileProjection
from seamark.connector.write.data_files import FileWriter, finish_data_file, open_data_file_writer
from seamark.connector.write.target import WriteTarget, target_of
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.files.parquet import FIELD_ID, AmbiguousColumn
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest

_SCHEMA_ID = b"seamark.schema-id"
"""In the metadata of the Arrow schema: the id of the table's schema to which the rows conform."""


class _Slice(Protocol):
    """Consecutive rows of a packed batch."""

    @property
    def payload(self) -> bytes: ...
    @property
    def first(self) -> int: ...
    @property
    def rows(self) -> int: ...


class EncodedRows(NamedTuple):
    """A Parquet file in memory, and its ContentFile as JSON."""

    location: str
    data: bytes
    content_file: bytes
    rows: int


@dataclass(frozen=True)
class _Memory(Storage):
    """Storage that keeps the one file that is written."""

    def open_output_stream(self, location: str) -> pa.NativeFile:
        return pa.BufferOutputStream()

    def local_path(self, location: str) -> None:
        return None

    def delete(self, location: str) -> None:
        """Do nothing: the file was never stored."""


def conform_rows(rows: pa.RecordBatch, metadata: TableMetadata) -> pa.RecordBatch:
    """Return the rows with the columns of the table's current schema.

    Raises:
        BadRequest: If rows do not fit the schema.
    """
    try:
        target = _target_of(metadata, metadata.current_schema)
        return conform(rows, target.schema, target.arrow)
    except Unwritable as error:
        raise BadRequest(f"The rows do not fit the table: {error}") from None


def pack_rows(rows: pa.RecordBatch, metadata: TableMetadata) -> bytes:
    """Return rows of `conform_rows` as an Arrow IPC stream, whose schema has the id of the table's schema."""
    schema_id = str(metadata.current_schema_id).encode()
    schema = rows.schema.with_metadata({_SCHEMA_ID: schema_id})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
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
    for packed in rows:
        with pa.ipc.open_stream(pa.py_buffer(packed.payload)) as stream:
            batch = stream.read_next_batch()
        schema_id = int(stream.schema.metadata[_SCHEMA_ID])
        by_schema.setdefault(schema_id, []).append(batch.slice(packed.first, packed.rows).replace_schema_metadata(None))
    files: list[EncodedRows] = []
    try:
        for schema_id, batches in by_schema.items():
            schema = metadata.schema(schema_id)
            if schema is None:
                raise BadRequest(
                    f"The table no longer has the schema {schema_id}, in which rows of its stream are stored"
                )
            target = _target_of(metadata, schema)
            table = pa.Table.from_batches(batches, target.arrow).combine_chunks()
            for batch in table.to_batches():
                files += _encode_batch(batch, target, folder)
    except Unwritable as error:
        raise BadRequest(f"The rows cannot be written: {error}") from None
    return files


def _encode_batch(batch: pa.RecordBatch, target: WriteTarget, folder: str | None) -> list[EncodedRows]:
    files = []
    for partition, chosen in target.partitioner.split(batch):
        rows = pa.Table.from_batches([batch if chosen is None else batch.take(pa.array(chosen))])
        if target.ordering is not None:
            rows = target.ordering.sort(rows)
        location = target.generate_location(partition) if folder is None else f"{folder}/{uuid.uuid4()}.parquet"
        writer = open_data_file_writer(target, location)
        writer.write(rows)
        content = finish_data_file(writer, target, partition)
        files.append(EncodedRows(location, _data_of(writer), msgspec.json.encode(content), rows.num_rows))
    return files


def _data_of(writer: FileWriter) -> bytes:
    stream: Any = writer._stream
    return bytes(stream.getvalue())


def _target_of(metadata: TableMetadata, schema: Schema) -> WriteTarget:
    """Return the target for files with a schema of the table, and the newest partition spec whose columns it has."""
    target = replace(target_of(metadata, _Memory()), indexes=())
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
