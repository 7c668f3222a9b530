"""The parts of a generated table without its entries: Avro schemas, manifest list records, and the metadata file.

Avro field ids, names and types are the same as in files that Iceberg's Java library 1.12 writes for version 2 tables
(spec: "Manifests", "Manifest Lists"). The schemas contain no documentation strings.
"""

from __future__ import annotations

import datetime
import json
import struct
import uuid
from typing import Any

from bench.planning.columns import BUCKETS, DAY_US, START_DAY, StatisticsColumn

SPEC_FIELDS = [
    {"source-id": 2, "field-id": 1000, "name": "day", "transform": "identity"},
    {"source-id": 4, "field-id": 1001, "name": "user_id_bucket", "transform": f"bucket[{BUCKETS}]"},
]
FIRST_SNAPSHOT_ID = 4_611_686_018_427_000_000
"""The id of the snapshot that added the first manifest. It is as long as the ids that engines draw."""
SNAPSHOT_ID_STEP = 7919
"""The difference between the ids of two successive snapshots."""


def compute_snapshot_id(manifest: int) -> int:
    """Return the id of the snapshot that added the manifest with this number."""
    return FIRST_SNAPSHOT_ID + manifest * SNAPSHOT_ID_STEP


def format_day(day: int) -> str:
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()


def build_schema(columns: tuple[StatisticsColumn, ...]) -> dict[str, Any]:
    return {"type": "struct", "schema-id": 0, "fields": [column.to_field() for column in columns]}


def build_manifest_header(columns: tuple[StatisticsColumn, ...]) -> dict[str, str]:
    """Return the key-value metadata of every manifest."""
    return {
        "schema": json.dumps(build_schema(columns), separators=(",", ":")),
        "partition-spec": json.dumps(SPEC_FIELDS, separators=(",", ":")),
        "partition-spec-id": "0",
        "format-version": "2",
        "content": "data",
    }


def _build_field(name: str, kind: Any, field_id: int, *, optional: bool = False) -> dict[str, Any]:
    if optional:
        return {"name": name, "type": ["null", kind], "default": None, "field-id": field_id}
    return {"name": name, "type": kind, "field-id": field_id}


def _build_map(key_id: int, value_id: int, value_type: str) -> dict[str, Any]:
    """Return a map by column id, which Avro can express only as an array of pairs."""
    pair = [_build_field("key", "int", key_id), _build_field("value", value_type, value_id)]
    items = {"type": "record", "name": f"k{key_id}_v{value_id}", "fields": pair}
    return {"type": "array", "items": items, "logicalType": "map"}


def build_entry_schema() -> dict[str, Any]:
    """Return the Avro schema of a manifest's entries.

    `tables.py` encodes the fields in this order.
    """
    partition = [
        _build_field("day", {"type": "int", "logicalType": "date"}, 1000, optional=True),
        _build_field("user_id_bucket", "int", 1001, optional=True),
    ]
    data_file_fields = [
        _build_field("content", "int", 134),
        _build_field("file_path", "string", 100),
        _build_field("file_format", "string", 101),
        _build_field("partition", {"type": "record", "name": "r102", "fields": partition}, 102),
        _build_field("record_count", "long", 103),
        _build_field("file_size_in_bytes", "long", 104),
        _build_field("column_sizes", _build_map(117, 118, "long"), 108, optional=True),
        _build_field("value_counts", _build_map(119, 120, "long"), 109, optional=True),
        _build_field("null_value_counts", _build_map(121, 122, "long"), 110, optional=True),
        _build_field("nan_value_counts", _build_map(138, 139, "long"), 137, optional=True),
        _build_field("lower_bounds", _build_map(126, 127, "bytes"), 125, optional=True),
        _build_field("upper_bounds", _build_map(129, 130, "bytes"), 128, optional=True),
        _build_field("key_metadata", "bytes", 131, optional=True),
        _build_field("split_offsets", {"type": "array", "items": "long", "element-id": 133}, 132, optional=True),
        _build_field("equality_ids", {"type": "array", "items": "int", "element-id": 136}, 135, optional=True),
        _build_field("sort_order_id", "int", 140, optional=True),
        _build_field("referenced_data_file", "string", 143, optional=True),
    ]
    entry_fields = [
        _build_field("status", "int", 0),
        _build_field("snapshot_id", "long", 1, optional=True),
        _build_field("sequence_number", "long", 3, optional=True),
        _build_field("file_sequence_number", "long", 4, optional=True),
        _build_field("data_file", {"type": "record", "name": "r2", "fields": data_file_fields}, 2),
    ]
    return {"type": "record", "name": "manifest_entry", "fields": entry_fields}


def build_manifest_file_schema() -> dict[str, Any]:
    """Return the Avro schema of a manifest list's entries."""
    summary = [
        _build_field("contains_null", "boolean", 509),
        _build_field("contains_nan", "boolean", 518, optional=True),
        _build_field("lower_bound", "bytes", 510, optional=True),
        _build_field("upper_bound", "bytes", 511, optional=True),
    ]
    summaries = {
        "type": "array",
        "items": {"type": "record", "name": "r508", "fields": summary},
        "element-id": 508,
    }
    fields = [
        _build_field("manifest_path", "string", 500),
        _build_field("manifest_length", "long", 501),
        _build_field("partition_spec_id", "int", 502),
        _build_field("content", "int", 517),
        _build_field("sequence_number", "long", 515),
        _build_field("min_sequence_number", "long", 516),
        _build_field("added_snapshot_id", "long", 503),
        _build_field("added_files_count", "int", 504),
        _build_field("existing_files_count", "int", 505),
        _build_field("deleted_files_count", "int", 506),
        _build_field("added_rows_count", "long", 512),
        _build_field("existing_rows_count", "long", 513),
        _build_field("deleted_rows_count", "long", 514),
        _build_field("partitions", summaries, 507, optional=True),
        _build_field("key_metadata", "bytes", 519, optional=True),
    ]
    return {"type": "record", "name": "manifest_file", "fields": fields}


def build_manifest_file(
    number: int, path: str, length: int, files: int, rows: int, days: tuple[int, int], buckets: tuple[int, int]
) -> dict[str, Any]:
    """Return the manifest list's record of manifest `number`, which was added by its own append.

    The ranges `days` and `buckets` are inclusive.
    """
    summaries = [
        {
            "contains_null": False,
            "contains_nan": False,
            "lower_bound": struct.pack("<i", low),
            "upper_bound": struct.pack("<i", high),
        }
        for low, high in (days, buckets)
    ]
    return {
        "manifest_path": path,
        "manifest_length": length,
        "partition_spec_id": 0,
        "content": 0,
        "sequence_number": number + 1,
        "min_sequence_number": number + 1,
        "added_snapshot_id": compute_snapshot_id(number),
        "added_files_count": files,
        "existing_files_count": 0,
        "deleted_files_count": 0,
        "added_rows_count": rows,
        "existing_rows_count": 0,
        "deleted_rows_count": 0,
        "partitions": summaries,
        "key_metadata": None,
    }


def build_table_metadata(
    location: str, manifest_list: str, columns: tuple[StatisticsColumn, ...], manifests: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the metadata.json of a version 2 table whose older snapshots have been expired."""
    last_manifest = len(manifests) - 1
    at_ms = START_DAY * DAY_US // 1000 + last_manifest * 60_000
    files = sum(manifest["added_files_count"] for manifest in manifests)
    rows = sum(manifest["added_rows_count"] for manifest in manifests)
    snapshot = {
        "sequence-number": last_manifest + 1,
        "snapshot-id": compute_snapshot_id(last_manifest),
        "timestamp-ms": at_ms,
        "summary": {
            "operation": "append",
            "added-data-files": str(manifests[-1]["added_files_count"]),
            "total-data-files": str(files),
            "total-records": str(rows),
            "total-delete-files": "0",
            "total-position-deletes": "0",
            "total-equality-deletes": "0",
        },
        "manifest-list": manifest_list,
        "schema-id": 0,
    }
    return {
        "format-version": 2,
        "table-uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, location)),
        "location": location,
        "last-sequence-number": last_manifest + 1,
        "last-updated-ms": at_ms,
        "last-column-id": len(columns),
        "current-schema-id": 0,
        "schemas": [build_schema(columns)],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": SPEC_FIELDS}],
        "last-partition-id": SPEC_FIELDS[-1]["field-id"],
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {"write.parquet.compression-codec": "zstd"},
        "current-snapshot-id": snapshot["snapshot-id"],
        "refs": {"main": {"snapshot-id": snapshot["snapshot-id"], "type": "branch"}},
        "snapshots": [snapshot],
        "snapshot-log": [{"timestamp-ms": at_ms, "snapshot-id": snapshot["snapshot-id"]}],
        "metadata-log": [],
        "statistics": [],
        "partition-statistics": [],
    }
