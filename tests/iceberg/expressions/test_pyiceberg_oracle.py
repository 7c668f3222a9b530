"""Comparison with PyIceberg: both apply a random history of commits and must produce the same metadata.

Each step starts both from the same JSON. The comparison excludes points where PyIceberg differs from Java and the
specification: it reads the wall clock, keeps the log across a gap, clears the parents of snapshots whose parent is
removed and leaves their partition statistics, and does not keep version 1's legacy fields.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pyiceberg.table.metadata import TableMetadata as PyIcebergMetadata
from pyiceberg.table.metadata import TableMetadataUtil
from pyiceberg.table.update import TableUpdate, update_table_metadata

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import encode_table
from tests.iceberg.samples import (
    NOW_MS,
    Json,
    add_snapshot,
    apply_json,
    build_field,
    build_order,
    build_spec,
    build_table,
    set_ref,
)
from tests.seeds import examples

UPDATE: TypeAdapter[Any] = TypeAdapter(TableUpdate)

TYPES = ["int", "string", "decimal(9, 2)", "timestamptz", "uuid", "date"]


def evolve_schema(draw: st.DrawFn, metadata: TableMetadata) -> list[Json]:
    fields = [
        {"id": field.id, "name": field.name, "required": field.required, "type": field.type}
        for field in metadata.current_schema.fields
    ]
    new_id = metadata.last_column_id + 1
    fields.append(build_field(new_id, f"c{new_id}", draw(st.sampled_from(TYPES))))
    document = {"type": "struct", "schema-id": max(schema.id for schema in metadata.schemas) + 1, "fields": fields}
    updates: list[Json] = [{"action": "add-schema", "schema": document}]
    if draw(st.booleans()):
        updates.append({"action": "set-current-schema", "schema-id": -1})
    return updates


def evolve_spec(draw: st.DrawFn, metadata: TableMetadata) -> list[Json]:
    spec_id = max(spec.spec_id for spec in metadata.partition_specs) + 1
    if metadata.format_version == 1:
        # A version 1 spec keeps the fields of the previous spec.
        old_fields = metadata.partition_specs[-1].fields
        fields = [(field.source_id or 0, field.transform, field.name) for field in old_fields]
        fields.append((1, f"bucket[{spec_id + 1}]", f"p{spec_id}"))
        ids = tuple(range(1000, 1000 + len(fields)))
    else:
        fields, ids = [(1, f"bucket[{spec_id + 1}]", f"p{spec_id}")], (metadata.last_partition_id + 1,)
    updates: list[Json] = [{"action": "add-spec", "spec": build_spec(*fields, ids=ids, spec_id=spec_id)}]
    if draw(st.booleans()):
        updates.append({"action": "set-default-spec", "spec-id": -1})
    return updates


def evolve_order(draw: st.DrawFn, metadata: TableMetadata) -> list[Json]:
    order_id = max(order.order_id for order in metadata.sort_orders) + 1
    updates: list[Json] = [
        {"action": "add-sort-order", "sort-order": build_order((1, f"truncate[{order_id}]"), order_id=order_id)}
    ]
    if draw(st.booleans()):
        updates.append({"action": "set-default-sort-order", "sort-order-id": -1})
    return updates


def append_snapshot(draw: st.DrawFn, metadata: TableMetadata) -> list[Json]:
    # This number grows with each commit, also after snapshots were removed.
    number = len(metadata.snapshots) + metadata.last_sequence_number + len(metadata.snapshot_log) + 1
    snapshot_id = 1000 + number
    while snapshot_id in metadata.snapshots_by_id:
        snapshot_id += 1
    sequence = metadata.last_sequence_number + 1 if metadata.format_version > 1 else 0
    lineage = (
        {"first-row-id": metadata.next_row_id, "added-rows": draw(st.integers(0, 9))}
        if metadata.format_version == 3
        else {}
    )
    update = add_snapshot(snapshot_id, sequence, metadata.current_snapshot_id, **lineage)
    update["snapshot"]["timestamp-ms"] = metadata.last_updated_ms + 1
    return [update, set_ref(snapshot_id, draw(st.sampled_from(["main", "dev"])))]


def draw_snapshot_id(draw: st.DrawFn, metadata: TableMetadata) -> int:
    return draw(st.sampled_from([snapshot.snapshot_id for snapshot in metadata.snapshots]))


def draw_statistics(draw: st.DrawFn, metadata: TableMetadata) -> list[Json]:
    snapshot_id = draw_snapshot_id(draw, metadata)
    document = {
        "snapshot-id": snapshot_id,
        "statistics-path": f"s3://lake/{draw(st.integers(0, 99))}",
        "file-size-in-bytes": 9,
    }
    if draw(st.booleans()):
        return [{"action": "set-partition-statistics", "partition-statistics": document}]
    return [
        {"action": "set-statistics", "statistics": {**document, "file-footer-size-in-bytes": 3, "blob-metadata": []}}
    ]


@st.composite
def draw_commit(draw: st.DrawFn, metadata: TableMetadata) -> list[Json]:
    """Return updates of a commit that are valid for `metadata` and that PyIceberg implements."""
    name = draw(st.text("abc", min_size=1, max_size=2))
    choices: list[Any] = [
        lambda: evolve_schema(draw, metadata),
        lambda: evolve_spec(draw, metadata),
        lambda: evolve_order(draw, metadata),
        lambda: append_snapshot(draw, metadata),
        lambda: append_snapshot(draw, metadata),
        lambda: [{"action": "set-properties", "updates": {name: draw(st.text(max_size=5))}}],
        lambda: [{"action": "set-location", "location": f"s3://lake/{name}"}],
        lambda: [
            {
                "action": "set-current-schema",
                "schema-id": draw(st.sampled_from([schema.id for schema in metadata.schemas])),
            }
        ],
        lambda: [
            {
                "action": "set-default-spec",
                "spec-id": draw(st.sampled_from([spec.spec_id for spec in metadata.partition_specs])),
            }
        ],
    ]
    if metadata.properties:
        choices.append(
            lambda: [{"action": "remove-properties", "removals": [draw(st.sampled_from(sorted(metadata.properties)))]}]
        )
    if metadata.format_version == 1:
        choices.append(lambda: [{"action": "upgrade-format-version", "format-version": 2}])
    old_schemas = [schema.id for schema in metadata.schemas if schema.id != metadata.current_schema_id]
    if old_schemas:
        choices.append(lambda: [{"action": "remove-schemas", "schema-ids": [draw(st.sampled_from(old_schemas))]}])
    old_specs = [spec.spec_id for spec in metadata.partition_specs if spec.spec_id != metadata.default_spec_id]
    if old_specs and metadata.format_version > 1:
        choices.append(lambda: [{"action": "remove-partition-specs", "spec-ids": [draw(st.sampled_from(old_specs))]}])
    if metadata.snapshots:
        choices += [
            lambda: draw_statistics(draw, metadata),
            lambda: [set_ref(draw_snapshot_id(draw, metadata), name, "tag", **{"max-ref-age-ms": 5})],
            lambda: [set_ref(draw_snapshot_id(draw, metadata), "main")],
            lambda: [{"action": "remove-snapshots", "snapshot-ids": [draw_snapshot_id(draw, metadata)]}],
            lambda: [{"action": "remove-snapshot-ref", "ref-name": draw(st.sampled_from([*metadata.refs, "main"]))}],
        ]
    if metadata.statistics:
        choices.append(lambda: [{"action": "remove-statistics", "snapshot-id": metadata.statistics[0].snapshot_id}])
    updates: list[Json] = draw(st.sampled_from(choices))()
    return updates


def to_comparable(metadata: PyIcebergMetadata, *, expired: bool) -> dict[str, Any]:
    """Return the fields that must be equal in both implementations.

    After a removal of snapshots, `expired` is True. Then the snapshot log, the partition statistics and the parents of
    snapshots may differ.
    """
    document = {name: getattr(metadata, name) for name in type(metadata).model_fields}
    document.pop("last_updated_ms")
    # PyIceberg does not update version 1's older names, and reads them only if the new names are missing.
    document.pop("schema_", None)
    document.pop("partition_spec", None)
    document["snapshot_log"] = None if expired else [entry.snapshot_id for entry in metadata.snapshot_log]
    if expired:
        document["partition_statistics"] = None
        document["snapshots"] = [
            snapshot.model_copy(update={"parent_snapshot_id": None}) for snapshot in metadata.snapshots
        ]
    files_by_name = {name: document[name] for name in ("statistics", "partition_statistics") if document[name]}
    document.update({name: sorted(files, key=lambda file: file.snapshot_id) for name, files in files_by_name.items()})
    return document


@pytest.mark.parametrize("version", [1, 2, 3])
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_commit_produces_the_metadata_of_pyiceberg(version: int, data: st.DataObject) -> None:
    metadata = build_table(version)
    for _ in range(data.draw(st.integers(1, 12))):
        updates = data.draw(draw_commit(metadata))
        metadata_before = TableMetadataUtil.parse_raw(encode_table(metadata).decode())
        expected_metadata = update_table_metadata(
            metadata_before, tuple(UPDATE.validate_python(update) for update in updates)
        )
        metadata = apply_json(metadata, updates, now_ms=metadata.last_updated_ms + 10)
        own_metadata = TableMetadataUtil.parse_raw(encode_table(metadata).decode())
        is_expiration = updates[0]["action"] == "remove-snapshots"
        assert to_comparable(own_metadata, expired=is_expiration) == to_comparable(
            expected_metadata, expired=is_expiration
        ), updates
    assert metadata.last_updated_ms >= NOW_MS
