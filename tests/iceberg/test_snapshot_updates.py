"""Tests of update actions on snapshots, references, statistics and encryption keys."""

from __future__ import annotations

import pytest

from seamark.formats.iceberg.metadata.table_json import decode_table, encode_table
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from tests.iceberg.samples import (
    NOW_MS,
    Json,
    add_snapshot,
    add_snapshots,
    apply_json_updates,
    build_partition_statistics,
    build_statistics,
    build_table,
    set_ref,
)

LATER_MS = NOW_MS + 1_000_000

# Snapshots and references


def test_snapshot_on_main_becomes_current_and_is_logged_at_its_own_time() -> None:
    metadata = apply_json_updates(build_table(), add_snapshot(5, 1), set_ref(5))
    assert (metadata.current_snapshot_id, metadata.last_sequence_number) == (5, 1)
    assert [(entry.snapshot_id, entry.timestamp_ms) for entry in metadata.snapshot_log] == [(5, NOW_MS + 1000)]
    assert decode_table(encode_table(metadata), "f") == metadata


def test_staged_snapshot_does_not_change_main() -> None:
    metadata = apply_json_updates(add_snapshots(build_table(), 1), add_snapshot(2, 2, 1), set_ref(2, "audit"))
    assert (metadata.current_snapshot_id, len(metadata.snapshot_log), metadata.refs["audit"].snapshot_id) == (1, 1, 2)


def test_rollback_is_logged_at_the_time_of_the_commit() -> None:
    metadata = apply_json_updates(add_snapshots(build_table(), 1, 2), set_ref(1))
    assert [entry.snapshot_id for entry in metadata.snapshot_log] == [1, 2, 1]
    assert metadata.snapshot_log[-1].timestamp_ms == LATER_MS


def test_snapshots_that_are_current_only_within_a_commit_are_not_logged() -> None:
    metadata = apply_json_updates(
        add_snapshots(build_table(), 1), add_snapshot(2, 2, 1), set_ref(2), add_snapshot(3, 3, 2), set_ref(3)
    )
    assert [entry.snapshot_id for entry in metadata.snapshot_log] == [1, 3]
    assert len(metadata.snapshots) == 3


def test_stale_sequence_number_is_a_conflict_and_not_a_bad_request() -> None:
    metadata = add_snapshots(build_table(), 1, 2)
    with pytest.raises(CommitConflict, match="sequence number 2 older than last sequence number 2"):
        apply_json_updates(metadata, add_snapshot(3, 2, 1))


def test_snapshot_without_a_parent_may_share_a_sequence_number() -> None:
    # Two concurrent replacements of one table have no parent.
    metadata = apply_json_updates(
        add_snapshots(build_table(), 1, 2), {"action": "remove-snapshot-ref", "ref-name": "main"}, add_snapshot(3, 1)
    )
    assert metadata.last_sequence_number == 2
    assert metadata.current_snapshot_id is None
    assert "main" not in metadata.refs


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
def test_impossible_snapshot_is_rejected(version: int, snapshot: Json, message: str) -> None:
    metadata = add_snapshots(build_table(version), 1)
    update = add_snapshot(2, 2 if version > 1 else 0, 1)
    update["snapshot"].update(snapshot)
    with pytest.raises(BadRequest, match=message):
        apply_json_updates(metadata, update)


def test_version_1_snapshot_may_list_its_manifests() -> None:
    update = add_snapshot(2, 0, **{"manifest-list": None, "manifests": ["s3://a"]})
    assert apply_json_updates(build_table(1), update).snapshots[0].manifests == ("s3://a",)


def test_row_ids_are_assigned_only_once() -> None:
    metadata = apply_json_updates(
        build_table(3), add_snapshot(1, 1, **{"first-row-id": 0, "added-rows": 10}), set_ref(1)
    )
    assert metadata.next_row_id == 10
    with pytest.raises(CommitConflict, match="first-row-id is behind table next-row-id: 9 < 10"):
        apply_json_updates(metadata, add_snapshot(2, 2, 1, **{"first-row-id": 9, "added-rows": 1}))
    metadata_ahead = apply_json_updates(metadata, add_snapshot(2, 2, 1, **{"first-row-id": 15, "added-rows": 5}))
    assert metadata_ahead.next_row_id == 20


def test_row_ids_beyond_64_bits_are_rejected() -> None:
    """No engine, and no server after a restart, could read metadata with a larger number."""
    update = add_snapshot(1, 1, **{"first-row-id": 8, "added-rows": 2**63 - 9})
    assert apply_json_updates(build_table(3), update).next_row_id == 2**63 - 1
    update["snapshot"]["added-rows"] += 1
    with pytest.raises(BadRequest, match="next-row-id after this snapshot would be 9223372036854775808"):
        apply_json_updates(build_table(3), update)


def test_row_lineage_fields_are_dropped_in_versions_1_and_2() -> None:
    metadata = apply_json_updates(build_table(2), add_snapshot(1, 1, **{"first-row-id": 0, "added-rows": 10}))
    assert (metadata.snapshots[0].first_row_id, metadata.next_row_id) == (None, 0)


def test_enabling_row_lineage_does_nothing_and_is_allowed_only_on_version_3() -> None:
    metadata = build_table(3)
    assert apply_json_updates(metadata, {"action": "enable-row-lineage"}) is metadata
    with pytest.raises(BadRequest, match="not supported until v3"):
        apply_json_updates(build_table(2), {"action": "enable-row-lineage"})


@pytest.mark.parametrize("ahead_ms", [61_000, 10**9])
def test_snapshot_from_the_future_is_rejected(ahead_ms: int) -> None:
    update = add_snapshot(1, 1, **{"timestamp-ms": NOW_MS + ahead_ms})
    with pytest.raises(BadRequest, match="Invalid update timestamp"):
        apply_json_updates(build_table(), update, set_ref(1), now_ms=NOW_MS)
    within_skew = add_snapshot(1, 1, **{"timestamp-ms": NOW_MS + 59_000})
    assert apply_json_updates(build_table(), within_skew, set_ref(1), now_ms=NOW_MS).current_snapshot_id == 1


def test_snapshot_long_before_the_current_one_is_rejected() -> None:
    metadata = add_snapshots(build_table(), 1)
    with pytest.raises(BadRequest, match="Invalid snapshot timestamp"):
        apply_json_updates(metadata, add_snapshot(2, 2, 1, **{"timestamp-ms": NOW_MS - 100_000}), set_ref(2))


@pytest.mark.parametrize("ahead_ms", [70_000, 10**9])
def test_snapshots_after_a_clock_was_ahead_are_accepted_and_the_log_stays_ordered(ahead_ms: int) -> None:
    first_update = add_snapshot(1, 1, **{"timestamp-ms": NOW_MS + ahead_ms})
    metadata = apply_json_updates(build_table(), first_update, set_ref(1), now_ms=NOW_MS + ahead_ms)
    for number in (2, 3):
        update = add_snapshot(number, number, number - 1, **{"timestamp-ms": NOW_MS + number})
        metadata = apply_json_updates(metadata, update, set_ref(number), now_ms=NOW_MS + number)
    assert [entry.snapshot_id for entry in metadata.snapshot_log] == [1, 2, 3]
    times = [entry.timestamp_ms for entry in metadata.snapshot_log]
    assert times == sorted(times)
    assert metadata.last_updated_ms >= times[-1]
    assert [snapshot.timestamp_ms for snapshot in metadata.snapshots][1:] == [NOW_MS + 2, NOW_MS + 3]
    metadata = apply_json_updates(metadata, set_ref(1), now_ms=NOW_MS + 4)
    assert metadata.snapshot_log[-1].timestamp_ms >= times[-1]
    late_update = add_snapshot(4, 4, 1, **{"timestamp-ms": NOW_MS + 2 * ahead_ms + 61_000})
    metadata_after_wait = apply_json_updates(metadata, late_update, set_ref(4), now_ms=NOW_MS + 2 * ahead_ms + 61_000)
    assert metadata_after_wait.snapshot_log[-1].timestamp_ms == NOW_MS + 2 * ahead_ms + 61_000


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
def test_impossible_reference_is_rejected(update: Json, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_json_updates(add_snapshots(build_table(), 1), update)


def test_removed_snapshots_lose_their_refs_statistics_and_older_history() -> None:
    metadata = add_snapshots(build_table(), 1, 2, 3)
    metadata = apply_json_updates(
        metadata, set_ref(2, "v1", "tag"), build_statistics(2), build_statistics(3), build_partition_statistics(2)
    )
    metadata_after_removal = apply_json_updates(metadata, {"action": "remove-snapshots", "snapshot-ids": [2]})
    assert [snapshot.snapshot_id for snapshot in metadata_after_removal.snapshots] == [1, 3]
    assert metadata_after_removal.refs.keys() == {"main"}
    assert [file.snapshot_id for file in metadata_after_removal.statistics] == [3]
    assert metadata_after_removal.partition_statistics == ()
    # Snapshot 1 stays valid, but the time when it was replaced is no longer known.
    assert [entry.snapshot_id for entry in metadata_after_removal.snapshot_log] == [3]


def test_table_has_no_current_snapshot_after_its_removal() -> None:
    metadata = apply_json_updates(add_snapshots(build_table(), 1), {"action": "remove-snapshots", "snapshot-ids": [1]})
    assert (metadata.current_snapshot_id, metadata.refs, metadata.snapshots, metadata.snapshot_log) == (
        None,
        {},
        (),
        (),
    )
    assert decode_table(encode_table(metadata), "f") == metadata


def test_snapshot_stays_when_its_ref_is_removed() -> None:
    metadata = apply_json_updates(add_snapshots(build_table(), 1), set_ref(1, "b"))
    assert apply_json_updates(metadata, {"action": "remove-snapshot-ref", "ref-name": "b"}).refs.keys() == {"main"}
    metadata_without_main = apply_json_updates(metadata, {"action": "remove-snapshot-ref", "ref-name": "main"})
    assert (metadata_without_main.current_snapshot_id, len(metadata_without_main.snapshots)) == (None, 1)


# Statistics and keys


def test_snapshot_has_one_statistics_file_of_each_kind() -> None:
    metadata = apply_json_updates(
        add_snapshots(build_table(), 1),
        build_statistics(1),
        build_statistics(1, "b"),
        build_partition_statistics(1),
        build_partition_statistics(1, "c"),
    )
    assert [file.statistics_path for file in metadata.statistics] == ["b"]
    assert [file.statistics_path for file in metadata.partition_statistics] == ["c"]
    metadata_without_statistics = apply_json_updates(
        metadata,
        {"action": "remove-statistics", "snapshot-id": 1},
        {"action": "remove-partition-statistics", "snapshot-id": 1},
    )
    assert (metadata_without_statistics.statistics, metadata_without_statistics.partition_statistics) == ((), ())


def test_encryption_keys_are_added_and_removed_in_version_3() -> None:
    key = {"key-id": "k1", "encrypted-key-metadata": "AAEC", "encrypted-by-id": "kek", "properties": {"a": "b"}}
    metadata = apply_json_updates(build_table(3), {"action": "add-encryption-key", "encryption-key": key})
    assert [key.key_id for key in metadata.encryption_keys] == ["k1"]
    assert apply_json_updates(metadata, {"action": "add-encryption-key", "encryption-key": key}) is metadata
    assert decode_table(encode_table(metadata), "f") == metadata
    assert apply_json_updates(metadata, {"action": "remove-encryption-key", "key-id": "k1"}).encryption_keys == ()
    assert apply_json_updates(metadata, {"action": "remove-encryption-key", "key-id": "k2"}) is metadata
    with pytest.raises(BadRequest, match="not base64"):
        apply_json_updates(
            metadata, {"action": "add-encryption-key", "encryption-key": {**key, "encrypted-key-metadata": "?"}}
        )
    with pytest.raises(BadRequest, match="not supported until v3"):
        apply_json_updates(build_table(2), {"action": "add-encryption-key", "encryption-key": key})


# Scale


def test_ten_thousand_snapshots_can_be_expired_by_as_many_updates() -> None:
    ids = range(1, 10_001)
    updates = [add_snapshot(snapshot_id, snapshot_id, **{"timestamp-ms": NOW_MS}) for snapshot_id in ids]
    metadata = apply_json_updates(build_table(), *updates, set_ref(10_000))
    metadata_after_removal = apply_json_updates(
        metadata, *({"action": "remove-snapshots", "snapshot-ids": [snapshot_id]} for snapshot_id in ids[:-1])
    )
    assert [snapshot.snapshot_id for snapshot in metadata_after_removal.snapshots] == [10_000]
    assert metadata_after_removal.current_snapshot_id == 10_000
