"""Every update action: what it does, when it does nothing, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from metaserver.errors import BadRequest, CommitConflict
from metaserver.iceberg.table_json import decode_table, encode_table
from metaserver.iceberg.updates import TABLE_ACTIONS, apply_updates
from tests.iceberg.samples import (
    EVENTS,
    NOW,
    UUID,
    Json,
    add_snapshot,
    commit,
    field,
    order,
    schema,
    set_ref,
    spec,
    table,
    with_snapshots,
)

LATER = NOW + 1_000_000
WIDER = schema(*EVENTS["fields"], field(4, "extra", "int"))


def test_all_actions_of_the_spec_are_known() -> None:
    assert set(TABLE_ACTIONS) == {
        "assign-uuid", "upgrade-format-version", "add-schema", "set-current-schema", "add-spec", "set-default-spec",
        "add-sort-order", "set-default-sort-order", "add-snapshot", "set-snapshot-ref", "remove-snapshots",
        "remove-snapshot-ref", "set-location", "set-properties", "remove-properties", "set-statistics",
        "remove-statistics", "set-partition-statistics", "remove-partition-statistics", "remove-partition-specs",
        "remove-schemas", "enable-row-lineage", "add-encryption-key", "remove-encryption-key",
    }  # fmt: skip


# identity, version, location, properties


def test_a_uuid_is_assigned_once() -> None:
    m = table()
    assert commit(m, {"action": "assign-uuid", "uuid": UUID.upper()}) is m
    with pytest.raises(BadRequest, match="Cannot reassign uuid"):
        commit(m, {"action": "assign-uuid", "uuid": "00000000-0000-0000-0000-000000000001"})
    with pytest.raises(BadRequest, match="Invalid uuid"):
        commit(m, {"action": "assign-uuid", "uuid": "nope"})


def test_versions_only_rise() -> None:
    m = with_snapshots(table(1), 1)
    v2 = commit(m, {"action": "upgrade-format-version", "format-version": 2})
    assert (v2.format_version, v2.last_sequence_number) == (2, 0)
    v3 = commit(v2, {"action": "upgrade-format-version", "format-version": 3})
    assert (v3.format_version, v3.next_row_id) == (3, 0)
    assert commit(v3, {"action": "upgrade-format-version", "format-version": 3}) is v3
    with pytest.raises(BadRequest, match="Cannot downgrade v3 table to v2"):
        commit(v3, {"action": "upgrade-format-version", "format-version": 2})
    with pytest.raises(BadRequest, match="unsupported format version: v4"):
        commit(v3, {"action": "upgrade-format-version", "format-version": 4})


def test_location_and_properties_change() -> None:
    m = commit(
        table(properties={"old": "1"}),
        {"action": "set-location", "location": "s3://lake/moved/"},
        {"action": "set-properties", "updates": {"a": "1", "b": "2", "format-version": "3"}},
        {"action": "remove-properties", "removals": ["a", "never-there", "old"]},
    )
    assert m.location == "s3://lake/moved"
    assert m.properties == {"b": "2", "write.parquet.compression-codec": "zstd"}
    assert m.last_updated_ms == LATER


def test_early_field_names_of_property_updates_are_read() -> None:
    m = commit(table(), {"action": "set-properties", "updated": {"a": "1", "b": "2"}})
    assert commit(m, {"action": "remove-properties", "removed": ["a"]}).properties.keys() == {
        "b",
        "write.parquet.compression-codec",
    }
    with pytest.raises(BadRequest, match="set-properties update: Object missing required field `updates`"):
        commit(m, {"action": "set-properties"})
    with pytest.raises(BadRequest, match="remove-properties update: Object missing required field `removals`"):
        commit(m, {"action": "remove-properties"})


def test_updates_that_change_nothing_give_back_the_base() -> None:
    m = with_snapshots(table(), 1)
    assert commit(m) is m
    assert (
        commit(
            m,
            {"action": "set-location", "location": m.location},
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
        is m
    )


def test_a_clock_that_stepped_back_does_not_make_metadata_older() -> None:
    m = with_snapshots(table(), 1)
    assert commit(m, {"action": "set-location", "location": "s3://x"}, now_ms=5).last_updated_ms == m.last_updated_ms


# schemas


def test_a_schema_gets_the_next_id_and_becomes_current() -> None:
    m = commit(
        table(),
        {"action": "add-schema", "schema": {**WIDER, "schema-id": 77}, "last-column-id": 4},
        {"action": "set-current-schema", "schema-id": -1},
    )
    assert [s.id for s in m.schemas] == [0, 1]
    assert (m.current_schema_id, m.last_column_id) == (1, 4)


def test_an_existing_schema_is_reused_and_counts_as_last_added() -> None:
    m = commit(table(), {"action": "add-schema", "schema": WIDER}, {"action": "set-current-schema", "schema-id": -1})
    back = commit(m, {"action": "add-schema", "schema": EVENTS}, {"action": "set-current-schema", "schema-id": -1})
    assert (len(back.schemas), back.current_schema_id, back.last_column_id) == (2, 0, 4)


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "set-current-schema", "schema-id": -1}, "no schema has been added"),
        ({"action": "set-current-schema", "schema-id": 9}, "unknown schema: 9"),
        ({"action": "remove-schemas", "schema-ids": [0]}, "Cannot remove the current schema"),
        ({"action": "add-schema", "schema": schema(field(1, "v", "variant"))}, "variant is not supported until v3"),
        ({"action": "add-schema", "schema": schema(field(1, "v", "long", **{"write-default": 1}))}, "until v3"),
        ({"action": "add-schema", "schema": schema(field(1, "v"), field(1, "w"))}, "multiple fields for id 1"),
    ],
)
def test_an_impossible_schema_update_is_refused(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        commit(table(), update)


def test_unused_schemas_are_removed() -> None:
    m = commit(table(), {"action": "add-schema", "schema": WIDER}, {"action": "set-current-schema", "schema-id": 1})
    assert [s.id for s in commit(m, {"action": "remove-schemas", "schema-ids": [0, 5]}).schemas] == [1]


def test_a_column_that_a_partition_or_sort_field_needs_cannot_go() -> None:
    without_ts = schema(EVENTS["fields"][0], EVENTS["fields"][2])
    drop = ({"action": "add-schema", "schema": without_ts}, {"action": "set-current-schema", "schema-id": -1})
    with pytest.raises(BadRequest, match=r"partition field: 1000: d: day\(2\)"):
        commit(table(partition_spec=spec((2, "day", "d"))), *drop)
    with pytest.raises(BadRequest, match=r"sort field: identity\(2\) ASC NULLS FIRST"):
        commit(table(sort_order=order((2, "identity"))), *drop)
    past = commit(
        table(partition_spec=spec((2, "day", "d"))),
        {"action": "add-spec", "spec": spec()},
        {"action": "set-default-spec", "spec-id": -1},
        *drop,
    )
    assert len(past.partition_specs) == 2


def test_a_new_column_cannot_take_a_partition_fields_name() -> None:
    with pytest.raises(BadRequest, match="sourced from different field in schema: extra"):
        commit(
            table(partition_spec=spec((2, "day", "extra"))),
            {"action": "add-schema", "schema": WIDER},
            {"action": "set-current-schema", "schema-id": -1},
        )


# partition specs


def test_a_spec_gets_the_next_id_and_raises_the_last_partition_id() -> None:
    m = commit(
        table(partition_spec=spec((2, "day", "d"))),
        {"action": "add-spec", "spec": spec((2, "hour", "h"), ids=(1001,), spec_id=40)},
        {"action": "set-default-spec", "spec-id": -1},
    )
    assert (m.default_spec_id, m.last_partition_id, len(m.partition_specs)) == (1, 1001, 2)


def test_an_equal_spec_is_reused_whatever_its_ids() -> None:
    m = table(partition_spec=spec((2, "day", "d")))
    same = spec((2, "DAY", "d"), ids=(1044,), spec_id=3)
    assert commit(m, {"action": "add-spec", "spec": same}, {"action": "set-default-spec", "spec-id": -1}) is m


def test_missing_partition_field_ids_are_assigned() -> None:
    m = commit(
        table(partition_spec=spec((2, "day", "d"))),
        {"action": "add-spec", "spec": spec((1, "bucket[4]", "b"), (2, "day", "dd"), (3, "truncate[2]", "t"))},
    )
    assert [f.field_id for f in m.partition_specs[1].fields] == [1001, 1000, 1002]
    assert m.last_partition_id == 1002


def test_equal_fields_of_one_spec_get_ids_of_their_own() -> None:
    m = commit(
        table(partition_spec=spec((1, "bucket[4]", "b"))),
        {"action": "add-spec", "spec": spec((1, "bucket[4]", "b"), (1, "bucket[4]", "b2"))},
    )
    assert [f.field_id for f in m.partition_specs[1].fields] == [1000, 1001]


def test_version_1_specs_need_sequential_ids() -> None:
    m = table(1, partition_spec=spec((2, "day", "d")))
    with pytest.raises(BadRequest, match="sequential IDs"):
        commit(m, {"action": "add-spec", "spec": spec((2, "hour", "h"), ids=(1001,))})
    kept = spec((2, "void", "d"), (2, "hour", "h"), ids=(1000, 1001))
    assert commit(m, {"action": "add-spec", "spec": kept}).last_partition_id == 1001


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "set-default-spec", "spec-id": -1}, "no spec has been added"),
        ({"action": "set-default-spec", "spec-id": 9}, "unknown spec: 9"),
        ({"action": "remove-partition-specs", "spec-ids": [0]}, "Cannot remove the default partition spec"),
        ({"action": "add-spec", "spec": spec((9, "identity", "x"))}, "Cannot find source column"),
        ({"action": "add-spec", "spec": spec((1, "year", "x"))}, "Invalid source type long for transform: year"),
        ({"action": "add-spec", "spec": spec((1, "identity", ""))}, "empty partition name"),
        ({"action": "add-spec", "spec": spec((1, "identity", "a"), (2, "day", "b"), ids=(1000,))}, "1 missing of 2"),
        ({"action": "add-spec", "spec": spec((1, "identity", "a"), (2, "day", "b"), ids=(7, 7))}, "more than once"),
        ({"action": "add-spec", "spec": spec((1, "identity", "ts"))}, "different field in schema: ts"),
    ],
)
def test_an_impossible_spec_update_is_refused(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        commit(table(), update)


def test_unused_specs_are_removed() -> None:
    m = commit(table(), {"action": "add-spec", "spec": spec((2, "day", "d"))})
    assert [s.spec_id for s in commit(m, {"action": "remove-partition-specs", "spec-ids": [1]}).partition_specs] == [0]


# sort orders


def test_a_sort_order_gets_the_next_id_and_an_equal_one_is_reused() -> None:
    m = commit(
        table(),
        {"action": "add-sort-order", "sort-order": order((1, "identity"), order_id=30)},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    )
    assert [o.order_id for o in m.sort_orders] == [0, 1]
    assert m.default_sort_order_id == 1
    again = commit(m, {"action": "add-sort-order", "sort-order": order((1, "IDENTITY"), order_id=5)})
    assert again is m
    off = commit(
        m,
        {"action": "add-sort-order", "sort-order": order(order_id=0)},
        {"action": "set-default-sort-order", "sort-order-id": -1},
    )
    assert off.default_sort_order_id == 0


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"action": "set-default-sort-order", "sort-order-id": -1}, "no sort order has been added"),
        ({"action": "set-default-sort-order", "sort-order-id": 9}, "unknown sort order: 9"),
        ({"action": "add-sort-order", "sort-order": order((9, "identity"))}, "Cannot find source column"),
        ({"action": "add-sort-order", "sort-order": order((3, "hour"))}, "Invalid source type string"),
    ],
)
def test_an_impossible_sort_order_update_is_refused(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        commit(table(), update)


# snapshots and references


def test_a_snapshot_on_main_becomes_current_and_is_logged_at_its_own_time() -> None:
    m = commit(table(), add_snapshot(5, 1), set_ref(5))
    assert (m.current_snapshot_id, m.last_sequence_number) == (5, 1)
    assert [(e.snapshot_id, e.timestamp_ms) for e in m.snapshot_log] == [(5, NOW + 1000)]
    assert decode_table(encode_table(m), "f") == m


def test_a_staged_snapshot_leaves_main_alone() -> None:
    m = commit(with_snapshots(table(), 1), add_snapshot(2, 2, 1), set_ref(2, "audit"))
    assert (m.current_snapshot_id, len(m.snapshot_log), m.refs["audit"].snapshot_id) == (1, 1, 2)


def test_a_rollback_is_logged_at_the_time_of_the_commit() -> None:
    m = commit(with_snapshots(table(), 1, 2), set_ref(1))
    assert [e.snapshot_id for e in m.snapshot_log] == [1, 2, 1]
    assert m.snapshot_log[-1].timestamp_ms == LATER


def test_snapshots_current_only_inside_a_commit_are_not_logged() -> None:
    m = commit(with_snapshots(table(), 1), add_snapshot(2, 2, 1), set_ref(2), add_snapshot(3, 3, 2), set_ref(3))
    assert [e.snapshot_id for e in m.snapshot_log] == [1, 3]
    assert len(m.snapshots) == 3


def test_a_stale_sequence_number_is_a_conflict_and_not_an_error_of_the_client() -> None:
    m = with_snapshots(table(), 1, 2)
    with pytest.raises(CommitConflict, match="sequence number 2 older than last sequence number 2"):
        commit(m, add_snapshot(3, 2, 1))


def test_a_snapshot_without_a_parent_may_share_a_sequence_number() -> None:
    # two concurrent replacements of one table both start anew
    m = commit(with_snapshots(table(), 1, 2), {"action": "remove-snapshot-ref", "ref-name": "main"}, add_snapshot(3, 1))
    assert m.last_sequence_number == 2
    assert m.current_snapshot_id is None
    assert "main" not in m.refs


@pytest.mark.parametrize(
    ("version", "snapshot", "message"),
    [
        (2, {"snapshot-id": 1}, "Snapshot already exists for id: 1"),
        (2, {"manifest-list": None}, "missing required field `manifest-list`"),
        (2, {"manifest-list": None, "manifests": ["a"]}, "missing required field `manifest-list`"),
        (2, {"summary": {"added-records": "1"}}, "missing required key `operation`"),
        (2, {"summary": {"operation": 1}}, r"add-snapshot update: .*\$.snapshot.summary"),
        (2, {"sequence-number": -1}, "Invalid sequence number: -1"),
        (1, {"sequence-number": 3}, "Sequence number must be 0 in v1"),
        (3, {}, "first-row-id is null"),
        (3, {"first-row-id": 7}, "Invalid added-rows"),
        (3, {"first-row-id": -7, "added-rows": 1}, "Invalid first-row-id"),
        (3, {"first-row-id": 7, "added-rows": -1}, "Invalid added-rows"),
    ],
)
def test_an_impossible_snapshot_is_refused(version: int, snapshot: Json, message: str) -> None:
    m = with_snapshots(table(version), 1)
    update = add_snapshot(2, 2 if version > 1 else 0, 1)
    update["snapshot"].update(snapshot)
    with pytest.raises(BadRequest, match=message):
        commit(m, update)


def test_version_1_may_list_manifests_in_the_snapshot() -> None:
    update = add_snapshot(2, 0, **{"manifest-list": None, "manifests": ["s3://a"]})
    assert commit(table(1), update).snapshots[0].manifests == ("s3://a",)


def test_row_ids_are_given_out_once() -> None:
    m = commit(table(3), add_snapshot(1, 1, **{"first-row-id": 0, "added-rows": 10}), set_ref(1))
    assert m.next_row_id == 10
    with pytest.raises(CommitConflict, match="first-row-id is behind table next-row-id: 9 < 10"):
        commit(m, add_snapshot(2, 2, 1, **{"first-row-id": 9, "added-rows": 1}))
    ahead = commit(m, add_snapshot(2, 2, 1, **{"first-row-id": 15, "added-rows": 5}))
    assert ahead.next_row_id == 20


def test_row_lineage_fields_are_dropped_before_version_3() -> None:
    m = commit(table(2), add_snapshot(1, 1, **{"first-row-id": 0, "added-rows": 10}))
    assert (m.snapshots[0].first_row_id, m.next_row_id) == (None, 0)


def test_enabling_row_lineage_is_a_no_op_on_version_3_only() -> None:
    m = table(3)
    assert commit(m, {"action": "enable-row-lineage"}) is m
    with pytest.raises(BadRequest, match="not supported until v3"):
        commit(table(2), {"action": "enable-row-lineage"})


@pytest.mark.parametrize("ahead_ms", [61_000, 10**9])
def test_a_snapshot_from_the_future_is_refused(ahead_ms: int) -> None:
    update = add_snapshot(1, 1, **{"timestamp-ms": NOW + ahead_ms})
    with pytest.raises(BadRequest, match="Invalid update timestamp"):
        commit(table(), update, set_ref(1), now_ms=NOW)
    within_skew = add_snapshot(1, 1, **{"timestamp-ms": NOW + 59_000})
    assert commit(table(), within_skew, set_ref(1), now_ms=NOW).current_snapshot_id == 1


def test_a_snapshot_long_before_the_current_one_is_refused() -> None:
    m = with_snapshots(table(), 1)
    with pytest.raises(BadRequest, match="Invalid snapshot timestamp"):
        commit(m, add_snapshot(2, 2, 1, **{"timestamp-ms": NOW - 100_000}), set_ref(2))


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (set_ref(9), "Cannot set main to unknown snapshot: 9"),
        (set_ref(1, "main", "tag"), "Cannot set main to a tag"),
        (set_ref(1, "b", "twig"), "Invalid snapshot ref type: twig"),
        (set_ref(1, "b", "tag", **{"min-snapshots-to-keep": 1}), "Tags do not support setting minSnapshotsToKeep"),
        (set_ref(1, "b", "tag", **{"max-snapshot-age-ms": 1}), "Tags do not support setting maxSnapshotAgeMs"),
        (set_ref(1, "b", **{"min-snapshots-to-keep": 0}), "Min snapshots to keep must be greater than 0"),
        (set_ref(1, "b", **{"max-snapshot-age-ms": 0}), "Max snapshot age must be greater than 0 ms"),
        (set_ref(1, "b", **{"max-ref-age-ms": -1}), "Max reference age must be greater than 0"),
    ],
)
def test_an_impossible_reference_is_refused(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        commit(with_snapshots(table(), 1), update)


def test_removed_snapshots_take_their_refs_statistics_and_older_history_along() -> None:
    m = with_snapshots(table(), 1, 2, 3)
    m = commit(m, set_ref(2, "v1", "tag"), statistics(2), statistics(3), partition_statistics(2))
    left = commit(m, {"action": "remove-snapshots", "snapshot-ids": [2]})
    assert [s.snapshot_id for s in left.snapshots] == [1, 3]
    assert left.refs.keys() == {"main"}
    assert [f.snapshot_id for f in left.statistics] == [3]
    assert left.partition_statistics == ()
    # snapshot 1 stays valid, but when it stopped being current can no longer be told
    assert [e.snapshot_id for e in left.snapshot_log] == [3]


def test_removing_the_current_snapshot_leaves_none() -> None:
    m = commit(with_snapshots(table(), 1), {"action": "remove-snapshots", "snapshot-ids": [1]})
    assert (m.current_snapshot_id, m.refs, m.snapshots, m.snapshot_log) == (None, {}, (), ())
    assert decode_table(encode_table(m), "f") == m


def test_a_removed_ref_leaves_its_snapshot() -> None:
    m = commit(with_snapshots(table(), 1), set_ref(1, "b"))
    assert commit(m, {"action": "remove-snapshot-ref", "ref-name": "b"}).refs.keys() == {"main"}
    gone = commit(m, {"action": "remove-snapshot-ref", "ref-name": "main"})
    assert (gone.current_snapshot_id, len(gone.snapshots)) == (None, 1)


# statistics and keys


def statistics(snapshot_id: int, path: str = "s3://lake/a.puffin") -> Json:
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


def partition_statistics(snapshot_id: int, path: str = "s3://lake/a.parquet") -> Json:
    return {
        "action": "set-partition-statistics",
        "partition-statistics": {"snapshot-id": snapshot_id, "statistics-path": path, "file-size-in-bytes": 10},
    }


def test_a_snapshot_has_one_statistics_file_of_each_kind() -> None:
    m = commit(
        with_snapshots(table(), 1),
        statistics(1),
        statistics(1, "b"),
        partition_statistics(1),
        partition_statistics(1, "c"),
    )
    assert [f.statistics_path for f in m.statistics] == ["b"]
    assert [f.statistics_path for f in m.partition_statistics] == ["c"]
    empty = commit(
        m,
        {"action": "remove-statistics", "snapshot-id": 1},
        {"action": "remove-partition-statistics", "snapshot-id": 1},
    )
    assert (empty.statistics, empty.partition_statistics) == ((), ())


def test_encryption_keys_come_and_go_in_version_3() -> None:
    key = {"key-id": "k1", "encrypted-key-metadata": "AAEC", "encrypted-by-id": "kek", "properties": {"a": "b"}}
    m = commit(table(3), {"action": "add-encryption-key", "encryption-key": key})
    assert [k.key_id for k in m.encryption_keys] == ["k1"]
    assert commit(m, {"action": "add-encryption-key", "encryption-key": key}) is m
    assert decode_table(encode_table(m), "f") == m
    assert commit(m, {"action": "remove-encryption-key", "key-id": "k1"}).encryption_keys == ()
    assert commit(m, {"action": "remove-encryption-key", "key-id": "k2"}) is m
    with pytest.raises(BadRequest, match="not base64"):
        commit(m, {"action": "add-encryption-key", "encryption-key": {**key, "encrypted-key-metadata": "?"}})
    with pytest.raises(BadRequest, match="not supported until v3"):
        commit(table(2), {"action": "add-encryption-key", "encryption-key": key})


# creation from nothing


def creation(version: int | None = 3) -> list[Json]:
    upgrade: list[Json] = [] if version is None else [{"action": "upgrade-format-version", "format-version": version}]
    return [
        {"action": "assign-uuid", "uuid": UUID},
        *upgrade,
        {"action": "add-schema", "schema": EVENTS, "last-column-id": 3},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": spec((2, "day", "d"), ids=(1000,))},
        {"action": "set-default-spec", "spec-id": -1},
        {"action": "add-sort-order", "sort-order": order((1, "identity"))},
        {"action": "set-default-sort-order", "sort-order-id": -1},
        {"action": "set-location", "location": "s3://lake/events"},
        {"action": "set-properties", "updates": {"a": "b"}},
    ]


@pytest.mark.parametrize("version", [None, 1, 2, 3])
def test_a_staged_table_is_built_from_its_updates(version: int | None) -> None:
    m = apply_updates(None, creation(version), now_ms=NOW)
    assert m.format_version == (version or 2)
    assert m.properties == {"a": "b"}
    assert (m.last_column_id, m.last_partition_id, m.default_sort_order_id) == (3, 1000, 1)
    assert decode_table(encode_table(m), "f") == m
    staged = table(m.format_version, partition_spec=spec((2, "day", "d")), sort_order=order((1, "identity")))
    assert (m.schemas, m.partition_specs, m.sort_orders) == (staged.schemas, staged.partition_specs, staged.sort_orders)


def test_a_table_created_with_data_has_it() -> None:
    snapshot = add_snapshot(1, 1, **{"first-row-id": 0, "added-rows": 3})
    m = apply_updates(None, [*creation(), snapshot, set_ref(1)], now_ms=NOW)
    assert (m.current_snapshot_id, m.next_row_id) == (1, 3)


def test_a_new_table_without_a_uuid_gets_the_given_one() -> None:
    assert apply_updates(None, creation()[1:], now_ms=NOW, new_uuid=UUID).table_uuid == UUID
    with pytest.raises(BadRequest, match="UUID is required"):
        apply_updates(None, creation()[1:], now_ms=NOW)


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ("set-location", "Table location is required"),
        ("add-schema", "no schema has been added"),
        ("add-spec", "no spec has been added"),
        ("add-sort-order", "no sort order has been added"),
    ],
)
def test_an_incomplete_creation_is_refused(without: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_updates(None, [u for u in creation() if u["action"] != without], now_ms=NOW)


def test_a_snapshot_before_its_schema_is_refused() -> None:
    with pytest.raises(BadRequest, match="Attempting to add a snapshot before a schema is added"):
        apply_updates(None, [add_snapshot(1, 1), *creation()], now_ms=NOW)


# scale


def test_ten_thousand_snapshots_can_be_expired_by_as_many_updates() -> None:
    ids = range(1, 10_001)
    added = [add_snapshot(n, n, **{"timestamp-ms": NOW}) for n in ids]
    m = commit(table(), *added, set_ref(10_000))
    left = commit(m, *({"action": "remove-snapshots", "snapshot-ids": [n]} for n in ids[:-1]))
    assert [s.snapshot_id for s in left.snapshots] == [10_000]
    assert left.current_snapshot_id == 10_000


# what is not an update


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
def test_what_is_not_an_update_is_named(update: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        commit(table(), update)


def test_action_names_are_read_in_any_case() -> None:
    assert commit(table(), {"action": "SET-LOCATION", "location": "s3://x"}).location == "s3://x"


def test_the_base_is_never_changed() -> None:
    m = with_snapshots(table(3), 1)
    before = encode_table(m)
    commit(m, set_ref(1, "b"), {"action": "set-properties", "updates": {"z": "1"}}, statistics(1))
    with pytest.raises(BadRequest):
        commit(m, {"action": "set-location", "location": "s3://x"}, set_ref(9))
    assert encode_table(m) == before
