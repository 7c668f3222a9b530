"""Small tables and update actions for cases. JSON values are plain dicts, as in a request body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.metadata.updates import apply_updates, read_updates

UUID = "5b0c6e1a-8f2e-4a57-9a64-0d1c5f3b7e21"
NOW_MS = 1_700_000_000_000

Json = dict[str, Any]


def build_field(field_id: int, name: str, kind: object = "long", required: bool = False, **fields: object) -> Json:
    return {"id": field_id, "name": name, "required": required, "type": kind, **fields}


def build_schema(*fields: Json, schema_id: int = 0, identifiers: tuple[int, ...] = ()) -> Json:
    document: Json = {"type": "struct", "schema-id": schema_id, "fields": list(fields)}
    return {**document, "identifier-field-ids": list(identifiers)} if identifiers else document


EVENTS = build_schema(
    build_field(1, "id", "long", True), build_field(2, "ts", "timestamptz"), build_field(3, "payload", "string")
)


def build_table(version: int = 2, **fields: Any) -> TableMetadata:
    properties = {"format-version": str(version), **fields.pop("properties", {})}
    options: Json = {"schema": EVENTS, "location": "s3://lake/events", "uuid": UUID, "now_ms": NOW_MS, **fields}
    return build_table_metadata(properties=properties, **options)


def build_spec(*fields: tuple[int, str, str], ids: tuple[int, ...] = (), spec_id: int = 0) -> Json:
    field_documents: list[Json] = [
        {"source-id": source, "transform": transform, "name": name} for source, transform, name in fields
    ]
    for entry, field_id in zip(field_documents, ids, strict=False):
        entry["field-id"] = field_id
    return {"spec-id": spec_id, "fields": field_documents}


def build_order(*fields: tuple[int, str], order_id: int = 1) -> Json:
    return {
        "order-id": order_id,
        "fields": [
            {"source-id": source, "transform": transform, "direction": "asc", "null-order": "nulls-first"}
            for source, transform in fields
        ],
    }


def add_snapshot(snapshot_id: int, sequence: int, parent: int | None = None, **fields: Any) -> Json:
    document: Json = {
        "snapshot-id": snapshot_id,
        "sequence-number": sequence,
        "timestamp-ms": NOW_MS + 1000 * sequence,
        "manifest-list": f"s3://lake/events/metadata/snap-{snapshot_id}.avro",
        "summary": {"operation": "append", "added-records": "7"},
        "schema-id": 0,
        **fields,
    }
    if parent is not None:
        document["parent-snapshot-id"] = parent
    return {"action": "add-snapshot", "snapshot": document}


def set_ref(snapshot_id: int, name: str = "main", kind: str = "branch", **fields: object) -> Json:
    return {"action": "set-snapshot-ref", "ref-name": name, "type": kind, "snapshot-id": snapshot_id, **fields}


def apply_json(
    metadata: TableMetadata | None, updates: Sequence[object], *, now_ms: int, new_uuid: str | None = None
) -> TableMetadata:
    return apply_updates(metadata, read_updates(updates), now_ms=now_ms, new_uuid=new_uuid)


def apply_json_updates(
    metadata: TableMetadata | None, *updates: Json, now_ms: int = NOW_MS + 1_000_000
) -> TableMetadata:
    return apply_json(metadata, updates, now_ms=now_ms)


def add_snapshots(metadata: TableMetadata, *ids: int) -> TableMetadata:
    """Commit one snapshot to main for each id, in order, and return the metadata.

    The times of the snapshots are one second apart.
    """
    for snapshot_id in ids:
        number = metadata.last_sequence_number + 1
        # Only version 3 has row ids. The number of added rows may be any number.
        lineage = {"first-row-id": metadata.next_row_id, "added-rows": 7} if metadata.format_version >= 3 else {}
        sequence = number if metadata.format_version > 1 else 0
        update = add_snapshot(snapshot_id, sequence, metadata.current_snapshot_id, **lineage)
        update["snapshot"]["timestamp-ms"] = NOW_MS + 1000 * (len(metadata.snapshots) + 1)
        metadata = apply_json_updates(
            metadata, update, set_ref(snapshot_id), now_ms=NOW_MS + 1000 * (len(metadata.snapshots) + 1)
        )
    return metadata


def build_statistics(snapshot_id: int, path: str = "s3://lake/a.puffin") -> Json:
    return {
        "action": "set-statistics",
        "snapshot-id": snapshot_id,
        "statistics": {
            "snapshot-id": snapshot_id,
            "statistics-path": path,
            "file-size-in-bytes": 10,
            "file-footer-size-in-bytes": 3,
            "blob-metadata": [],
        },
    }


def build_partition_statistics(snapshot_id: int, path: str = "s3://lake/a.parquet") -> Json:
    return {
        "action": "set-partition-statistics",
        "partition-statistics": {"snapshot-id": snapshot_id, "statistics-path": path, "file-size-in-bytes": 10},
    }


def build_creation(version: int | None = 3) -> list[Json]:
    upgrade: list[Json] = [] if version is None else [{"action": "upgrade-format-version", "format-version": version}]
    return [
        {"action": "assign-uuid", "uuid": UUID},
        *upgrade,
        {"action": "add-schema", "schema": EVENTS, "last-column-id": 3},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": build_spec((2, "day", "d"), ids=(1000,))},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": build_order((1, "identity"))},
        {"action": "set-default-sort-order", "sort-order-id": -1},
        {"action": "set-location", "location": "s3://lake/events"},
        {"action": "set-properties", "updates": {"a": "b"}},
    ]
