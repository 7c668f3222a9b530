"""Tests of the snapshots that a policy keeps. The expected snapshots follow from its definition, branch by branch."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot, SnapshotRef
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.commit.expiration import policy as policies
from seamark.metaserver.commit.expiration.policy import ExpirationPolicy, Expired, find_expired

NOW_MS = 1000
NEVER_MS = 1 << 60
"""The age at which references expire, so that none does."""


def build_table(snapshots: list[Snapshot], refs: dict[str, SnapshotRef]) -> TableMetadata:
    by_id = {snapshot.snapshot_id: snapshot for snapshot in snapshots}
    metadata = SimpleNamespace(refs=refs, snapshots=tuple(snapshots), snapshot=by_id.get, snapshot_log=())
    return cast(TableMetadata, metadata)


def find_snapshots_to_keep(metadata: Any, policy: ExpirationPolicy) -> set[int]:
    """Return the ids of the snapshots that a policy keeps, if the table's branches and tags never expire.

    It follows the ancestors of each reference separately, so it is slow but simple.
    """
    kept_ids, referenced_ids = set(), set()
    for ref in metadata.refs.values():
        snapshot, replaced_ms, ancestor_ids = metadata.snapshot(ref.snapshot_id), None, list[int]()
        age_ms, kept_min = ref.max_snapshot_age_ms, ref.min_snapshots_to_keep
        older_than_ms = policy.older_than_ms if age_ms is None else NOW_MS - age_ms
        kept_min = policy.retain_last if kept_min is None else kept_min
        is_kept = True
        while snapshot is not None and snapshot.snapshot_id not in ancestor_ids:
            is_young = replaced_ms is None or replaced_ms >= older_than_ms
            is_kept = is_kept and (len(ancestor_ids) < kept_min or is_young)
            ancestor_ids.append(snapshot.snapshot_id)
            referenced_ids.add(snapshot.snapshot_id)
            if is_kept:
                kept_ids.add(snapshot.snapshot_id)
            replaced_ms = snapshot.timestamp_ms
            snapshot = metadata.snapshot(snapshot.parent_snapshot_id)
    free_ids = {
        snapshot.snapshot_id for snapshot in metadata.snapshots if snapshot.timestamp_ms >= policy.older_than_ms
    } - referenced_ids
    return kept_ids | free_ids


def test_branches_that_share_snapshots_keep_the_union_of_what_each_keeps() -> None:
    """Compare the server with a simple computation, for random tables. Some have cyclic or missing parents."""
    rng = random.Random(7)
    for _ in range(3000):
        snapshot_count = rng.randint(1, 9)
        snapshots = [
            Snapshot(
                number,
                rng.randint(0, NOW_MS),
                parent_snapshot_id=rng.choice((None, *range(snapshot_count + 1), number - 1)),
            )
            for number in range(snapshot_count)
        ]
        refs = {
            f"b{number}": SnapshotRef(
                rng.randrange(snapshot_count + 1),
                "branch",
                rng.choice((None, 1, 2, 3, 100)),
                rng.choice((None, 1, rng.randint(1, NOW_MS))),
            )
            for number in range(rng.randint(0, 5))
        }
        refs = {name: ref for name, ref in refs.items() if ref.snapshot_id < snapshot_count}
        metadata = build_table(snapshots, refs)
        policy = ExpirationPolicy(rng.randint(0, NOW_MS), rng.randint(1, 3), NEVER_MS)
        kept_ids = set(range(snapshot_count)) - set(find_expired(metadata, policy, NOW_MS).snapshot_ids)
        assert kept_ids == find_snapshots_to_keep(metadata, policy), (snapshots, refs, policy)


def test_many_branches_over_a_long_history_read_each_snapshot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer can create 30,000 branches with one request.

    If the server read the 10,000 snapshots of a table again for each branch, it would take minutes.
    """
    snapshots = [Snapshot(number, number, parent_snapshot_id=number - 1 if number else None) for number in range(300)]
    refs = {f"b{number}": SnapshotRef(299 - number % 9, "branch", 1, 900 + number) for number in range(300)}
    # 300 branches over 300 snapshots: one read of each snapshot is within the limit. Nine branches that keep at least
    # 200 snapshots each need more than 1,500 reads.
    monkeypatch.setattr(policies, "READS_MAX", 1500)
    assert find_expired(build_table(snapshots, refs), ExpirationPolicy(0, 1, NEVER_MS), NOW_MS) == Expired((), ())
    refs_with_long_histories = {f"b{number}": SnapshotRef(299, "branch", 200 + number, 1) for number in range(9)}
    with pytest.raises(BadRequest, match="1,500"):
        find_expired(build_table(snapshots, refs_with_long_histories), ExpirationPolicy(0, 1, NEVER_MS), NOW_MS)
