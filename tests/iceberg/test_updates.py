"""Tests of every update action: its effect, when it does nothing, and its errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from seamark.formats.iceberg.metadata.table_json import decode_table, encode_table
from seamark.formats.iceberg.metadata.updates import TABLE_ACTIONS
from seamark.formats.iceberg.types.schema import copy_with_id
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.samples import (
    EVENTS,
    NOW_MS,
    UUID,
    Json,
    add_snapshot,
    add_snapshots,
    apply_json,
    apply_json_updates,
    build_creation,
    build_field,
    build_order,
    build_schema,
    build_spec,
    build_statistics,
    build_table,
    set_ref,
)

LATER_MS = NOW_MS + 1_000_000
WIDER = build_schema(*EVENTS["fields"], build_field(4, "extra", "int"))


def test_all_actions_of_the_specification_are_recognised() -> None:
    assert set(TABLE_ACTIONS) == {
        "assign-uuid", "upgrade-format-version", "add-schema", "set-current-schema", "add-spec", "set-default-spec",
        "add-sort-order", "set-default-sort-order", "add-snapshot", "set-snapshot-ref", "remove-snapshots",
        "remove-snapshot-ref", "set-location", "set-properties", "remove-properties", "set-statistics",
        "remove-statistics", "set-partition-statistics", "remove-partition-statistics", "remove-partition-specs",
        "remove-schemas", "enable-row-lineage", "add-encryption-key", "remove-encryption-key",
    }  # fmt: skip


# Identity, version, location, properties


def test_uuid_is_assigned_only_once() -> None:
    metadata = build_table()
    assert apply_json_updates(metadata, {"action": "assign-uuid", "uuid": UUID.upper()}) is metadata
    with pytest.raises(BadRequest, match="Cannot reassign uuid"):
        apply_json_updates(metadata, {"action": "assign-uuid", "uuid": "00000000-0000-0000-0000-000000000001"})
    with pytest.raises(BadRequest, match="Invalid uuid"):
        apply_json_updates(metadata, {"action": "assign-uuid", "uuid": "nope"})


def test_format_version_can_only_increase() -> None:
    metadata = add_snapshots(build_table(1), 1)
    v2 = apply_json_updates(metadata, {"action": "upgrade-format-version", "format-version": 2})
    assert (v2.format_version, v2.last_sequence_number) == (2, 0)
    v3 = apply_json_updates(v2, {"action": "upgrade-format-version", "format-version": 3})
    assert (v3.format_version, v3.next_row_id) == (3, 0)
    assert apply_json_updates(v3, {"action": "upgrade-format-version", "format-version": 3}) is v3
    with pytest.raises(BadRequest, match="Cannot downgrade v3 table to v2"):
        apply_json_updates(v3, {"action": "upgrade-format-version", "format-version": 2})
    with pytest.raises(BadRequest, match="unsupported format version: v4"):
        apply_json_updates(v3, {"action": "upgrade-format-version", "format-version": 4})


def test_location_and_properties_change() -> None:
    metadata = apply_json_updates(
        build_table(properties={"old": "1"}),
        {"action": "set-location", "location": "s3://lake/moved/"},
        {"action": "set-properties", "updates": {"a": "1", "b": "2", "format-version": "3"}},
        {"action": "remove-properties", "removals": ["a", "never-there", "old"]},
    )
    assert metadata.location == "s3://lake/moved"
    assert metadata.properties == {"b": "2", "write.parquet.compression-codec": "zstd"}
    assert metadata.last_updated_ms == LATER_MS


def test_early_field_names_of_property_updates_are_read() -> None:
    metadata = apply_json_updates(build_table(), {"action": "set-properties", "updated": {"a": "1", "b": "2"}})
    assert apply_json_updates(metadata, {"action": "remove-properties", "removed": ["a"]}).properties.keys() == {
        "b",
        "write.parquet.compression-codec",
    }
    with pytest.raises(BadRequest, match="set-properties update: Object missing required field `updates`"):
        apply_json_updates(metadata, {"action": "set-properties"})
    with pytest.raises(BadRequest, match="remove-properties update: Object missing required field `removals`"):
        apply_json_updates(metadata, {"action": "remove-properties"})


def test_updates_without_effect_return_the_base_metadata() -> None:
    metadata = add_snapshots(build_table(), 1)
    assert apply_json_updates(metadata) is metadata
    assert (
        apply_json_updates(
            metadata,
            {"action": "set-location", "location": metadata.location},
            {"action": "set-properties", "updates": {}},
            {"action": "add-schema", "schema": EVENTS},
            {"action": "set-current-schema", "schema-id": 0},
            {"action": "set-default-spec", "spec-id": 0},
            {"action": "set-default-sort-order", "sort-order-id": 0},
            {"action": "remove-snapshots", "snapshot-ids": [99]},
            {"action": "remove-snapshot-ref", "ref-name": "gone"},
            {"action": "remove-statistics", "snapshot-id": 1},
            {"action": "remove-partition-statistics", "snapshot-id": 1},
            set_ref(1),
        )
        is metadata
    )


def test_clock_that_steps_back_does_not_make_metadata_older() -> None:
    metadata = add_snapshots(build_table(), 1)
    assert (
        apply_json_updates(metadata, {"action": "set-location", "location": "s3://x"}, now_ms=5).last_updated_ms
        == metadata.last_updated_ms
    )


# Schemas


def test_new_schema_gets_the_next_id_and_becomes_current() -> None:
    metadata = apply_json_updates(
        build_table(),
        {"action": "add-schema", "schema": {**WIDER, "schema-id": 77}, "last-column-id": 4},
        {"action": "set-current-schema", "schema-id": -1},
    )
    assert [schema.id for schema in metadata.schemas] == [0, 1]
    assert (metadata.current_schema_id, metadata.last_column_id) == (1, 4)


def test_existing_schema_is_reused_and_counts_as_last_added() -> None:
    metadata = apply_json_updates(
        build_table(), {"action": "add-schema", "schema": WIDER}, {"action": "set-current-schema", "schema-id": -1}
    )
    reverted_metadata = apply_json_updates(
        metadata, {"action": "add-schema", "schema": EVENTS}, {"action": "set-current-schema", "schema-id": -1}
    )
    assert (len(reverted_metadata.schemas), reverted_metadata.current_schema_id, reverted_metadata.last_column_id) == (
        2,
        0,
        4,
    )


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "set-current-schema", "schema-id": -1}, "no schema has been added"),
        ({"action": "set-current-schema", "schema-id": 9}, "unknown schema: 9"),
        ({"action": "remove-schemas", "schema-ids": [0]}, "Cannot remove the current schema"),
        (
            {"action": "add-schema", "schema": build_schema(build_field(1, "v", "variant"))},
            "variant is not supported until v3",
        ),
        (
            {"action": "add-schema", "schema": build_schema(build_field(1, "v", "long", **{"write-default": 1}))},
            "until v3",
        ),
        (
            {"action": "add-schema", "schema": build_schema(build_field(1, "v"), build_field(1, "w"))},
            "multiple fields for id 1",
        ),
    ],
)
def test_impossible_schema_update_is_rejected(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_json_updates(build_table(), update)


@pytest.mark.parametrize("kind", ["timestamp", "timestamp_ns"])
def test_date_partitioned_by_bucket_cannot_be_promoted(kind: str) -> None:
    """A timestamp's hash differs from its date's hash, so readers would look for its rows in other partitions."""
    date_schema, timestamp_schema = (
        build_schema(build_field(1, "at", column_type), build_field(2, "n")) for column_type in ("date", kind)
    )
    promotion_updates = (
        {"action": "add-schema", "schema": timestamp_schema},
        {"action": "set-current-schema", "schema-id": -1},
    )
    bucketed_table = build_table(3, schema=date_schema, partition_spec=build_spec((1, "bucket[4]", "b")))
    metadata = add_snapshots(bucketed_table, 1)
    with pytest.raises(BadRequest, match=r"from date to \w+: partition field 1000: b: bucket\[4\]\(1\)"):
        apply_json_updates(metadata, *promotion_updates)
    # A table without rows, or with partitions by a transform other than bucket, can be changed.
    assert apply_json_updates(bucketed_table, *promotion_updates).current_schema.fields[0].type == kind
    replaced_metadata = apply_json_updates(
        metadata, {"action": "remove-snapshot-ref", "ref-name": "main"}, *promotion_updates
    )
    assert replaced_metadata.current_schema.fields[0].type == kind
    table_by_month = add_snapshots(build_table(3, schema=date_schema, partition_spec=build_spec((1, "month", "m"))), 1)
    assert apply_json_updates(table_by_month, *promotion_updates).current_schema.fields[0].type == kind


def test_unused_schemas_are_removed() -> None:
    metadata = apply_json_updates(
        build_table(), {"action": "add-schema", "schema": WIDER}, {"action": "set-current-schema", "schema-id": 1}
    )
    assert [
        schema.id for schema in apply_json_updates(metadata, {"action": "remove-schemas", "schema-ids": [0, 5]}).schemas
    ] == [1]


def test_column_needed_by_a_partition_or_sort_field_cannot_be_dropped() -> None:
    schema_without_ts = build_schema(EVENTS["fields"][0], EVENTS["fields"][2])
    drop_updates = (
        {"action": "add-schema", "schema": schema_without_ts},
        {"action": "set-current-schema", "schema-id": -1},
    )
    with pytest.raises(BadRequest, match=r"partition field: 1000: d: day\(2\)"):
        apply_json_updates(build_table(partition_spec=build_spec((2, "day", "d"))), *drop_updates)
    with pytest.raises(BadRequest, match=r"sort field: identity\(2\) ASC NULLS FIRST"):
        apply_json_updates(build_table(sort_order=build_order((2, "identity"))), *drop_updates)
    metadata_with_former_spec = apply_json_updates(
        build_table(partition_spec=build_spec((2, "day", "d"))),
        {"action": "add-spec", "spec": build_spec()},
        {"action": "set-default-spec", "spec-id": -1},
        *drop_updates,
    )
    assert len(metadata_with_former_spec.partition_specs) == 2


def test_new_column_cannot_have_the_name_of_a_partition_field() -> None:
    with pytest.raises(BadRequest, match="sourced from different field in schema: extra"):
        apply_json_updates(
            build_table(partition_spec=build_spec((2, "day", "extra"))),
            {"action": "add-schema", "schema": WIDER},
            {"action": "set-current-schema", "schema-id": -1},
        )


# Partition specs


def test_new_spec_gets_the_next_id_and_raises_the_last_partition_id() -> None:
    metadata = apply_json_updates(
        build_table(partition_spec=build_spec((2, "day", "d"))),
        {"action": "add-spec", "spec": build_spec((2, "hour", "h"), ids=(1001,), spec_id=40)},
        {"action": "set-default-spec", "spec-id": -1},
    )
    assert (metadata.default_spec_id, metadata.last_partition_id, len(metadata.partition_specs)) == (1, 1001, 2)


def test_equal_spec_with_different_ids_is_reused() -> None:
    metadata = build_table(partition_spec=build_spec((2, "day", "d")))
    same_spec = build_spec((2, "DAY", "d"), ids=(1044,), spec_id=3)
    assert (
        apply_json_updates(
            metadata, {"action": "add-spec", "spec": same_spec}, {"action": "set-default-spec", "spec-id": -1}
        )
        is metadata
    )


def test_missing_partition_field_ids_are_assigned() -> None:
    metadata = apply_json_updates(
        build_table(partition_spec=build_spec((2, "day", "d"))),
        {"action": "add-spec", "spec": build_spec((1, "bucket[4]", "b"), (2, "day", "dd"), (3, "truncate[2]", "t"))},
    )
    assert [field.field_id for field in metadata.partition_specs[1].fields] == [1001, 1000, 1002]
    assert metadata.last_partition_id == 1002


def test_equal_fields_of_one_spec_get_separate_ids() -> None:
    metadata = apply_json_updates(
        build_table(partition_spec=build_spec((1, "bucket[4]", "b"))),
        {"action": "add-spec", "spec": build_spec((1, "bucket[4]", "b"), (1, "bucket[4]", "b2"))},
    )
    assert [field.field_id for field in metadata.partition_specs[1].fields] == [1000, 1001]


def test_version_1_specs_need_sequential_ids() -> None:
    metadata = build_table(1, partition_spec=build_spec((2, "day", "d")))
    with pytest.raises(BadRequest, match="sequential IDs"):
        apply_json_updates(metadata, {"action": "add-spec", "spec": build_spec((2, "hour", "h"), ids=(1001,))})
    spec_with_void = build_spec((2, "void", "d"), (2, "hour", "h"), ids=(1000, 1001))
    assert apply_json_updates(metadata, {"action": "add-spec", "spec": spec_with_void}).last_partition_id == 1001


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "set-default-spec", "spec-id": -1}, "no spec has been added"),
        ({"action": "set-default-spec", "spec-id": 9}, "unknown spec: 9"),
        ({"action": "remove-partition-specs", "spec-ids": [0]}, "Cannot remove the default partition spec"),
        ({"action": "add-spec", "spec": build_spec((9, "identity", "x"))}, "Cannot find source column"),
        ({"action": "add-spec", "spec": build_spec((1, "year", "x"))}, "Invalid source type long for transform: year"),
        ({"action": "add-spec", "spec": build_spec((1, "identity", ""))}, "empty partition name"),
        (
            {"action": "add-spec", "spec": build_spec((1, "identity", "a"), (2, "day", "b"), ids=(1000,))},
            "1 missing of 2",
        ),
        (
            {"action": "add-spec", "spec": build_spec((1, "identity", "a"), (2, "day", "b"), ids=(7, 7))},
            "more than once",
        ),
        ({"action": "add-spec", "spec": build_spec((1, "identity", "ts"))}, "different field in schema: ts"),
    ],
)
def test_impossible_spec_update_is_rejected(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_json_updates(build_table(), update)


def test_unused_specs_are_removed() -> None:
    metadata = apply_json_updates(build_table(), {"action": "add-spec", "spec": build_spec((2, "day", "d"))})
    assert [
        spec.spec_id
        for spec in apply_json_updates(metadata, {"action": "remove-partition-specs", "spec-ids": [1]}).partition_specs
    ] == [0]


# Sort orders


def test_new_sort_order_gets_the_next_id_and_an_equal_sort_order_is_reused() -> None:
    metadata = apply_json_updates(
        build_table(),
        {"action": "add-sort-order", "sort-order": build_order((1, "identity"), order_id=30)},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    )
    assert [order.order_id for order in metadata.sort_orders] == [0, 1]
    assert metadata.default_sort_order_id == 1
    unchanged_metadata = apply_json_updates(
        metadata, {"action": "add-sort-order", "sort-order": build_order((1, "IDENTITY"), order_id=5)}
    )
    assert unchanged_metadata is metadata
    unsorted_metadata = apply_json_updates(
        metadata,
        {"action": "add-sort-order", "sort-order": build_order(order_id=0)},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    )
    assert unsorted_metadata.default_sort_order_id == 0


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "set-default-sort-order", "sort-order-id": -1}, "no sort order has been added"),
        ({"action": "set-default-sort-order", "sort-order-id": 9}, "unknown sort order: 9"),
        ({"action": "add-sort-order", "sort-order": build_order((9, "identity"))}, "Cannot find source column"),
        ({"action": "add-sort-order", "sort-order": build_order((3, "hour"))}, "Invalid source type string"),
    ],
)
def test_impossible_sort_order_update_is_rejected(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_json_updates(build_table(), update)


# Creation of tables from updates


@pytest.mark.parametrize("version", [None, 1, 2, 3])
def test_staged_table_is_built_from_its_updates(version: int | None) -> None:
    metadata = apply_json(None, build_creation(version), now_ms=NOW_MS)
    assert metadata.format_version == (version or 2)
    assert metadata.properties == {"a": "b"}
    assert (metadata.last_column_id, metadata.last_partition_id, metadata.default_sort_order_id) == (3, 1000, 1)
    assert decode_table(encode_table(metadata), "f") == metadata
    staged_metadata = build_table(
        metadata.format_version, partition_spec=build_spec((2, "day", "d")), sort_order=build_order((1, "identity"))
    )
    assert (metadata.schemas, metadata.partition_specs, metadata.sort_orders) == (
        staged_metadata.schemas,
        staged_metadata.partition_specs,
        staged_metadata.sort_orders,
    )


def test_table_created_with_data_has_its_snapshot() -> None:
    snapshot = add_snapshot(1, 1, **{"first-row-id": 0, "added-rows": 3})
    metadata = apply_json(None, [*build_creation(), snapshot, set_ref(1)], now_ms=NOW_MS)
    assert (metadata.current_snapshot_id, metadata.next_row_id) == (1, 3)


def test_new_table_without_a_uuid_gets_the_supplied_uuid() -> None:
    assert apply_json(None, build_creation()[1:], now_ms=NOW_MS, new_uuid=UUID).table_uuid == UUID
    with pytest.raises(BadRequest, match="UUID is required"):
        apply_json(None, build_creation()[1:], now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("missing_action", "message"),
    [
        ("set-location", "Table location is required"),
        ("add-schema", "no schema has been added"),
        ("add-spec", "no spec has been added"),
        ("add-sort-order", "no sort order has been added"),
    ],
)
def test_incomplete_creation_is_rejected(missing_action: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_json(None, [update for update in build_creation() if update["action"] != missing_action], now_ms=NOW_MS)


def test_snapshot_that_is_added_before_its_schema_is_rejected() -> None:
    with pytest.raises(BadRequest, match="Attempting to add a snapshot before a schema is added"):
        apply_json(None, [add_snapshot(1, 1), *build_creation()], now_ms=NOW_MS)


# Invalid updates


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "drop-table"}, r"Unknown metadata update action: drop-table \(known: assign-uuid, "),
        ({"action": "add-view-version"}, "Cannot apply update add-view-version to a table"),
        ({"action": 3}, r"Invalid metadata update: .*\$.action"),
        ({}, "missing required field `action`"),
        (None, "Expected `object`, got `null`"),
        ("add-schema", "Expected `object`, got `str`"),
        ({"action": "set-current-schema"}, "set-current-schema update: .*`schema-id`"),
        ({"action": "set-current-schema", "schema-id": "1"}, r"set-current-schema update: .*\$.schema-id"),
        ({"action": "set-current-schema", "schema-id": 2**31}, r"set-current-schema update: .*\$.schema-id"),
        ({"action": "add-schema", "schema": {"type": "struct", "fields": [{}]}}, r"\$.schema.fields\[0\]"),
        ({"action": "remove-snapshots", "snapshot-ids": [1, "2"]}, r"\$.snapshot-ids\[1\]"),
        ({"action": "set-properties", "updates": {"a": None}}, r"set-properties update: .*\$.updates"),
    ],
)
def test_invalid_update_is_named_in_the_error(update: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_json_updates(build_table(), update)


def test_action_names_are_read_in_any_case() -> None:
    assert apply_json_updates(build_table(), {"action": "SET-LOCATION", "location": "s3://x"}).location == "s3://x"


def test_updates_never_change_the_base_metadata() -> None:
    metadata = add_snapshots(build_table(3), 1)
    data_before = encode_table(metadata)
    apply_json_updates(
        metadata, set_ref(1, "b"), {"action": "set-properties", "updates": {"z": "1"}}, build_statistics(1)
    )
    with pytest.raises(BadRequest):
        apply_json_updates(metadata, {"action": "set-location", "location": "s3://x"}, set_ref(9))
    assert encode_table(metadata) == data_before


def test_ids_after_the_largest_id_are_rejected() -> None:
    """A registered table may have any ids. No engine could read metadata with an id that is no 32-bit integer."""
    table = build_table()
    metadata = msgspec.structs.replace(
        table,
        schemas=(copy_with_id(table.current_schema, 2**31 - 1),),
        current_schema_id=2**31 - 1,
        last_partition_id=2**31 - 1,
    )
    schema = {"action": "add-schema", "schema": build_schema(build_field(1, "n", "int"))}
    spec = {"action": "add-spec", "spec": build_spec((1, "bucket[4]", "b"))}
    for update, subject in ((schema, "schema"), (spec, "partition field")):
        with pytest.raises(BadRequest, match=f"id of the new {subject} would be 2147483648"):
            apply_json_updates(metadata, update)
