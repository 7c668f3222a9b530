"""Writes a partition statistics file: a Parquet file with totals of each partition of a snapshot.

The Iceberg spec defines the format ("Partition Statistics File"). The totals come from the server's list of partitions,
so no data file is read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.values import At
from seamark.connector.read.tables import OpenTable
from seamark.formats.iceberg.expressions.arrow import build_arrow_array
from seamark.formats.iceberg.files.parquet import FIELD_ID
from seamark.formats.iceberg.manifests.content_file import UNKNOWN, list_partition_types
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import Value, decode_json

_COLUMNS: tuple[tuple[int, str, pa.DataType, str | None], ...] = (
    (2, "spec_id", pa.int32(), "spec_id"),
    (3, "data_record_count", pa.int64(), "record_count"),
    (4, "data_file_count", pa.int32(), "file_count"),
    (5, "total_data_file_size_in_bytes", pa.int64(), "file_size_in_bytes"),
    (6, "position_delete_record_count", pa.int64(), "position_delete_records"),
    (7, "position_delete_file_count", pa.int32(), "position_delete_files"),
    (8, "equality_delete_record_count", pa.int64(), "equality_delete_records"),
    (9, "equality_delete_file_count", pa.int32(), "equality_delete_files"),
    (10, "total_record_count", pa.int64(), None),
    (11, "last_updated_at", pa.int64(), "last_updated_ms"),
    (12, "last_updated_snapshot_id", pa.int64(), "last_updated_snapshot_id"),
)
"""The field id, name and type of each column of the file, and its name in the server's list of partitions.

The name in the list is None if the value is unknown without reading the deletes. The fields up to id 5
(`data_file_size`) are required, and in format version 3 the fields up to id 9.
"""
_REQUIRED_ID_MAX, _REQUIRED_ID_MAX_V3 = 5, 9
_DV_COUNT = (13, "dv_count")
_VECTORS = "puffin"
_DECIMAL_BYTES = 16
"""The number of bytes of a value of Arrow's decimal128."""


def is_partitioned(metadata: TableMetadata) -> bool:
    """Return whether a partition spec has a field with a typed value, as partition statistics require."""
    return bool(_unify_fields(metadata))


def write_partition_statistics(
    client: SeamarkClient, source_table: OpenTable, metadata: TableMetadata, location: str, snapshot_id: int
) -> tuple[int, int]:
    """Write the partition statistics file, and return the number of partitions and the file's size in bytes.

    Since format version 3, deletion vectors are counted in their own column and not as position delete files, and more
    columns are required.

    Raises:
        OSError: The file cannot be written.
    """
    partition_rows = client.partitions(source_table.name, at=At(snapshot_id)).to_pylist()
    has_vectors = metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION
    vectors = _count_vectors(client, source_table, snapshot_id) if has_vectors else Counter()
    for row in partition_rows:
        row["vectors"] = vectors[row["spec_id"], row["partition"]]
        row["position_delete_files"] -= row["vectors"]
        row["values"] = _map_values_by_id(metadata, row)
    fields_by_id = _unify_fields(metadata)
    partition_rows.sort(key=lambda row: [_make_sort_key(row["values"].get(field_id)) for field_id in fields_by_id])
    fields, arrays = [], []
    parts = [
        pa.field(name, build_arrow_array(kind, ()).type, True, {FIELD_ID: str(field_id)})
        for field_id, (name, kind) in fields_by_id.items()
    ]
    values = [
        _make_partition_array(kind, [row["values"].get(field_id) for row in partition_rows])
        for field_id, (_, kind) in fields_by_id.items()
    ]
    fields.append(pa.field("partition", pa.struct(parts), False, {FIELD_ID: "1"}))
    arrays.append(pa.StructArray.from_arrays(values, fields=parts))
    for field_id, name, kind, source in _COLUMNS:
        optional = field_id > (_REQUIRED_ID_MAX_V3 if has_vectors else _REQUIRED_ID_MAX)
        fields.append(pa.field(name, kind, optional, {FIELD_ID: str(field_id)}))
        arrays.append(pa.array([None if source is None else row[source] for row in partition_rows], kind))
    if has_vectors:
        count_id, count_name = _DV_COUNT
        fields.append(pa.field(count_name, pa.int32(), False, {FIELD_ID: str(count_id)}))
        arrays.append(pa.array([row["vectors"] for row in partition_rows], pa.int32()))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), sink, compression="zstd")
    return len(partition_rows), source_table.storage.write(location, [memoryview(sink.getvalue())])


def _make_partition_array(kind: str, values: Sequence[Value | None]) -> pa.Array:
    """Return the values like `build_arrow_array`, except that decimals may have one digit more than their type.

    Truncation may add a digit: -999.99 truncated to a multiple of 10.00 is -1000.00. Manifests and Parquet can store
    this decimal, because both store the unscaled number in whole bytes.
    """
    if get_base_name(kind) != "decimal":
        return build_arrow_array(kind, values)
    # The Arrow buffer is built directly, because pyarrow refuses a decimal with too many digits.
    numbers = b"".join(int(value or 0).to_bytes(_DECIMAL_BYTES, "little", signed=True) for value in values)
    valid = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
    return pa.Array.from_buffers(build_arrow_array(kind, ()).type, len(values), [valid, pa.py_buffer(numbers)])


def _unify_fields(metadata: TableMetadata) -> dict[int, tuple[str, str]]:
    """Return the name and type of each field of all specs, by field id.

    Void fields and fields of an unknown type are left out. If a field has different names in several specs, the name in
    the newest spec is used.
    """
    fields: dict[int, tuple[str, str]] = {}
    for spec in sorted(metadata.partition_specs, key=lambda spec: -spec.spec_id):
        for field, kind in zip(spec.fields, list_partition_types(metadata, spec), strict=True):
            if field.field_id is not None and not field.is_void and kind != UNKNOWN:
                fields.setdefault(field.field_id, (field.name, kind))
    return dict(sorted(fields.items()))


def _map_values_by_id(metadata: TableMetadata, row: dict[str, Any]) -> dict[int, Any]:
    """Return the values of a partition by field id. Nulls, and values of an unknown type or spec, are left out."""
    spec = metadata.spec(row["spec_id"])
    values = json.loads(row["partition"])
    if spec is None:
        return {}
    kinds = list_partition_types(metadata, spec)
    return {
        field.field_id: decode_json(kind, values[field.name])
        for field, kind in zip(spec.fields, kinds, strict=True)
        if field.field_id is not None and values.get(field.name) is not None and kind != UNKNOWN
    }


def _count_vectors(client: SeamarkClient, source_table: OpenTable, snapshot_id: int) -> Counter[tuple[int, str]]:
    vectors: Counter[tuple[int, str]] = Counter()
    for page in client.iter_files(source_table.name, content="deletes", at=At(snapshot_id)):
        columns = [page[name].to_pylist() for name in ("file_format", "spec_id", "partition")]
        vectors.update(
            (spec_id, partition) for kind, spec_id, partition in zip(*columns, strict=True) if kind == _VECTORS
        )
    return vectors


def _make_sort_key(value: Any) -> tuple[bool, Any]:
    """Return a sort key of a value by which null is first."""
    return (value is not None, 0 if value is None else value)
