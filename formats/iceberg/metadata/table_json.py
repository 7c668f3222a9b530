"""Conversion of table metadata from and to JSON (Iceberg spec, appendix C), for each format version.

The output follows Java's TableMetadataParser, because all engines are tested against it:

- Version 1 repeats the current schema and spec under their old names, and has no sequence number.
- "No current snapshot" is -1 up to version 2, and null in version 3.
- Version 3 always has `next-row-id`.

Gzip is detected by the first bytes of a file, not by its name. Every stored file is validated when it is read. If its
parts contradict each other, Corrupt is raised with the file's location.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from seamark.formats.iceberg.metadata.metadata import FORMAT_VERSION_MAX, TableMetadata, check_invariants
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec, number_fields
from seamark.formats.iceberg.metadata.snapshot import (
    MAIN,
    EncryptedKey,
    MetadataLogEntry,
    PartitionStatisticsFile,
    Snapshot,
    SnapshotLogEntry,
    SnapshotRef,
    StatisticsFile,
)
from seamark.formats.iceberg.metadata.sort_order import UNSORTED, SortOrder
from seamark.formats.iceberg.types.reading import Int32, Int64
from seamark.formats.iceberg.types.schema import Schema, copy_with_id
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, Corrupt

_UNPACKED_BYTES_MIN, _UNPACKED_RATIO_MAX = 16 << 20, 64
"""The inflated size in bytes that every file may have, and the maximum ratio of inflated to compressed size above it.

Metadata usually compress ten to thirty times.
"""
UNPACKED_BYTES_MAX = 1 << 28
"""The maximum inflated size of a gzipped file in bytes. A small file could otherwise exceed the machine's memory."""
_GZIP_BITS = 31
"""The parameter of zlib for a gzip stream."""
GZIP_MAGIC = b"\x1f\x8b"
"""The first bytes of a gzip file."""
_NO_SNAPSHOT = -1
_NULL_SNAPSHOT_MIN_FORMAT_VERSION = 3
_ROW_IDS_MIN_FORMAT_VERSION = 3

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType
T = TypeVar("T")


class _TableJson(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The JSON object of a table. Fields that are not set are omitted."""

    format_version: Int32
    table_uuid: str | UnsetType | None = UNSET
    location: str
    last_sequence_number: Int64 | UnsetType = UNSET
    last_updated_ms: Int64
    last_column_id: Int32
    schema: Schema | UnsetType = UNSET
    current_schema_id: Int32 | UnsetType = UNSET
    schemas: tuple[Schema, ...] | UnsetType = UNSET
    partition_spec: tuple[PartitionField, ...] | UnsetType = UNSET
    default_spec_id: Int32 | UnsetType = UNSET
    partition_specs: tuple[PartitionSpec, ...] | UnsetType = UNSET
    last_partition_id: Int32 | UnsetType | None = UNSET
    default_sort_order_id: Int32 | UnsetType = UNSET
    sort_orders: tuple[SortOrder, ...] | UnsetType = UNSET
    properties: dict[str, str] | UnsetType | None = UNSET
    current_snapshot_id: Int64 | UnsetType | None = UNSET
    next_row_id: Int64 | UnsetType = UNSET
    encryption_keys: tuple[EncryptedKey, ...] | UnsetType | None = UNSET
    refs: dict[str, SnapshotRef] | UnsetType | None = UNSET
    snapshots: tuple[Snapshot, ...] | UnsetType | None = UNSET
    statistics: tuple[StatisticsFile, ...] | UnsetType | None = UNSET
    partition_statistics: tuple[PartitionStatisticsFile, ...] | UnsetType | None = UNSET
    snapshot_log: tuple[SnapshotLogEntry, ...] | UnsetType | None = UNSET
    metadata_log: tuple[MetadataLogEntry, ...] | UnsetType | None = UNSET


_ENCODER = msgspec.json.Encoder()


def decode_table(data: bytes, source: str) -> TableMetadata:
    """Decode a metadata file, plain or gzipped.

    Raises:
        Corrupt: The metadata are invalid. The message names `source`, the file's location.
    """
    try:
        return _decode_table(convert_json(decompress_if_gzip(data), _TableJson))
    except RecursionError:
        raise Corrupt(f"{source} is not valid table metadata: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError, zlib.error, BadRequest) as error:
        raise Corrupt(f"{source} is not valid table metadata: {error}") from error


def decompress_if_gzip(data: bytes, content_bytes_max: int | None = None) -> bytes:
    """Return the content of a gzip file, or `data` if it is not a gzip file.

    The size of the content is also limited in proportion to `data`, because a small file could expand to gigabytes.

    Args:
        data: The content of the file.
        content_bytes_max: The maximum size of the decompressed content. The default is `UNPACKED_BYTES_MAX`.

    Raises:
        zlib.error: The gzip stream is damaged or too large.
    """
    if not data.startswith(GZIP_MAGIC):
        return data
    unpacker = zlib.decompressobj(wbits=_GZIP_BITS)
    if content_bytes_max is None:
        content_bytes_max = UNPACKED_BYTES_MAX
    limit_bytes = min(content_bytes_max, _UNPACKED_BYTES_MIN + _UNPACKED_RATIO_MAX * len(data))
    content = unpacker.decompress(data, limit_bytes)
    if not unpacker.eof:
        raise zlib.error(f"the gzip stream is truncated, or contains more than {limit_bytes} bytes")
    return content


def encode_table(metadata: TableMetadata) -> bytes:
    """Encode the metadata as UTF-8 JSON, for a metadata file or a REST response."""
    return _ENCODER.encode(_to_json(metadata))


def encode_refs_view(metadata: TableMetadata) -> bytes:
    """Encode the metadata as JSON with only the snapshots of branches and tags, and their statistics.

    This is the answer to `snapshots=refs` (REST spec, loadTable): the snapshot log is complete, and clients request the
    other snapshots when they need them. Do not write it as a metadata file, because the table would lose its history.
    """
    snapshot_ids = {ref.snapshot_id for ref in metadata.refs.values()}
    snapshots_by_id = metadata.snapshots_by_id
    # Sequence numbers ascend along the history, so sorting by them gives the table's order without reading the history.
    snapshots = sorted(
        (snapshots_by_id[snapshot_id] for snapshot_id in snapshot_ids),
        key=lambda snapshot: (snapshot.sequence_number, snapshot.timestamp_ms),
    )
    return encode_table(
        msgspec.structs.replace(
            metadata,
            snapshots=tuple(snapshots),
            statistics=tuple(file for file in metadata.statistics if file.snapshot_id in snapshot_ids),
            partition_statistics=tuple(
                file for file in metadata.partition_statistics if file.snapshot_id in snapshot_ids
            ),
        )
    )


def _decode_table(table: _TableJson) -> TableMetadata:
    version = table.format_version
    if not 1 <= version <= FORMAT_VERSION_MAX:
        raise BadRequest(f"Unsupported format version: v{version} (supported: v{FORMAT_VERSION_MAX})")
    schemas, current_schema_id = _decode_schemas(table)
    specs, default_spec_id = _decode_specs(table)
    last_partition_id = _require(table.last_partition_id, "last-partition-id", version, None)
    if last_partition_id is None:
        last_partition_id = max(spec.last_field_id for spec in specs)
    orders = _require(table.sort_orders, "sort-orders", version, ()) or (UNSORTED,)
    current_snapshot_id = _replace_unset(table.current_snapshot_id, None)
    if current_snapshot_id == _NO_SNAPSHOT:
        current_snapshot_id = None
    refs = _replace_unset(table.refs, {})
    if current_snapshot_id is not None and MAIN not in refs:
        # Main always refers to the current snapshot, even if the map of references is missing (spec).
        refs = {**refs, MAIN: SnapshotRef(current_snapshot_id, "branch")}
    if version >= _ROW_IDS_MIN_FORMAT_VERSION and table.next_row_id is UNSET:
        raise BadRequest("next-row-id must exist in format v3")
    metadata = TableMetadata(
        format_version=version,
        table_uuid=_replace_unset(table.table_uuid, None),
        location=table.location,
        last_sequence_number=0 if version == 1 else _require(table.last_sequence_number, "last-sequence-number", 2, 0),
        last_updated_ms=table.last_updated_ms,
        last_column_id=table.last_column_id,
        schemas=schemas,
        current_schema_id=current_schema_id,
        partition_specs=specs,
        default_spec_id=default_spec_id,
        last_partition_id=last_partition_id,
        sort_orders=orders,
        default_sort_order_id=_require(table.default_sort_order_id, "default-sort-order-id", version, 0),
        properties=_replace_unset(table.properties, {}),
        current_snapshot_id=current_snapshot_id,
        snapshots=_replace_unset(table.snapshots, ()),
        snapshot_log=_replace_unset(table.snapshot_log, ()),
        metadata_log=_replace_unset(table.metadata_log, ()),
        refs=refs,
        statistics=_replace_unset(table.statistics, ()),
        partition_statistics=_replace_unset(table.partition_statistics, ()),
        next_row_id=_replace_unset(table.next_row_id, 0) if version >= _ROW_IDS_MIN_FORMAT_VERSION else 0,
        encryption_keys=_replace_unset(table.encryption_keys, ()),
    )
    check_invariants(metadata)
    return metadata


def _decode_schemas(table: _TableJson) -> tuple[tuple[Schema, ...], int]:
    """Return the schemas, and the id of the current schema. Version 1 may have only one schema, in an older field.

    Raises:
        BadRequest: A required field is missing.
    """
    if table.schemas is not UNSET and table.schemas:
        current_schema_id = table.current_schema_id
        if current_schema_id is UNSET:
            raise BadRequest("current-schema-id must exist if schemas exists")
        return tuple(copy_with_id(schema, schema.id) for schema in table.schemas), current_schema_id
    if table.format_version > 1 or table.schema is UNSET:
        raise BadRequest(f"schemas must exist in format v{table.format_version}")
    return (copy_with_id(table.schema, table.schema.id),), table.schema.id


def _decode_specs(table: _TableJson) -> tuple[tuple[PartitionSpec, ...], int]:
    """Return the specs, and the id of the default spec. Version 1 may have only one spec, in an older field.

    Raises:
        BadRequest: A required field is missing.
    """
    if table.partition_specs is not UNSET and table.partition_specs:
        default_spec_id = table.default_spec_id
        if default_spec_id is UNSET:
            raise BadRequest("default-spec-id must exist if partition-specs exists")
        return tuple(number_fields(spec) for spec in table.partition_specs), default_spec_id
    if table.format_version > 1:
        raise BadRequest(f"partition-specs must exist in format v{table.format_version}")
    fields = () if table.partition_spec is UNSET else table.partition_spec
    return (number_fields(PartitionSpec(0, fields)),), 0


def _require(value: T | UnsetType, name: str, format_version: int, default: T) -> T:
    """Return the value of a field that only version 2 and later require.

    If the field is missing in version 1, the result is `default`.

    Raises:
        BadRequest: The field is missing in a later version.
    """
    if value is not UNSET:
        return value
    if format_version > 1:
        raise BadRequest(f"{name} must exist in format v{format_version}")
    return default


def _replace_unset(value: T | UnsetType | None, default: T) -> T:
    return default if value is UNSET or value is None else value


def _to_json(metadata: TableMetadata) -> _TableJson:
    version = metadata.format_version
    no_snapshot = None if version >= _NULL_SNAPSHOT_MIN_FORMAT_VERSION else _NO_SNAPSHOT
    return _TableJson(
        format_version=version,
        table_uuid=metadata.table_uuid if metadata.table_uuid is not None else UNSET,
        location=metadata.location,
        last_sequence_number=metadata.last_sequence_number if version > 1 else UNSET,
        last_updated_ms=metadata.last_updated_ms,
        last_column_id=metadata.last_column_id,
        schema=metadata.current_schema if version == 1 else UNSET,
        current_schema_id=metadata.current_schema_id,
        schemas=metadata.schemas,
        partition_spec=metadata.default_spec.fields if version == 1 else UNSET,
        default_spec_id=metadata.default_spec_id,
        partition_specs=metadata.partition_specs,
        last_partition_id=metadata.last_partition_id,
        default_sort_order_id=metadata.default_sort_order_id,
        sort_orders=metadata.sort_orders,
        properties=metadata.properties,
        current_snapshot_id=metadata.current_snapshot_id if metadata.current_snapshot_id is not None else no_snapshot,
        next_row_id=metadata.next_row_id if version >= _ROW_IDS_MIN_FORMAT_VERSION else UNSET,
        encryption_keys=metadata.encryption_keys or UNSET,
        refs=metadata.refs,
        snapshots=metadata.snapshots,
        statistics=metadata.statistics,
        partition_statistics=metadata.partition_statistics,
        snapshot_log=metadata.snapshot_log,
        metadata_log=metadata.metadata_log,
    )
