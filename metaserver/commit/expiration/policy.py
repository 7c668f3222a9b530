"""Selects expired snapshots and references, without I/O.

The properties are Iceberg's (`history.expire.*`, and the properties of each reference; Iceberg spec, "Snapshot
Retention Policy"). One rule differs, to protect readers: the age of a snapshot counts from the commit that replaced it,
instead of from its own commit. Therefore every snapshot that was current within the maximum age is kept. Otherwise, the
first commit after a long pause could expire the snapshot that a query is reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.metadata.compaction import find_recently_undone
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import parse_int, parse_long
from seamark.formats.iceberg.metadata.retention import (
    MAX_REF_AGE,
    MAX_SNAPSHOT_AGE,
    MAX_SNAPSHOT_AGE_DEFAULT_MS,
    MIN_SNAPSHOTS,
)
from seamark.formats.iceberg.metadata.snapshot import MAIN, SnapshotRef
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.store.passed_time import PassedTime

_FOREVER = (1 << 63) - 1
READS_MAX = 2_000_000
"""The maximum number of snapshots that are read for all branches together, which takes up to two seconds."""


class ExpirationPolicy(msgspec.Struct, frozen=True):
    """The limits by which snapshots and references expire. A reference may have its own limits.

    Attributes:
        older_than_ms: A time in milliseconds since the epoch. A snapshot that was replaced before this time has
            expired, unless it is one of the `retain_last` newest snapshots of a branch.
        retain_last: The number of newest snapshots that each branch keeps.
        max_ref_age_ms: The age in milliseconds at which references expire.
    """

    older_than_ms: int
    retain_last: int
    max_ref_age_ms: int

    @staticmethod
    def from_metadata(
        metadata: TableMetadata,
        now_ms: int,
        *,
        older_than_ms: int | None = None,
        retain_last: int | None = None,
        passed_time: PassedTime | None = None,
    ) -> ExpirationPolicy:
        """Return the policy for a table.

        Args:
            metadata: The table's metadata.
            now_ms: The current time in milliseconds since the epoch.
            older_than_ms: The time before which a replaced snapshot has expired. If it is None, a property of the table
                states the age at which a replaced snapshot expires.
            retain_last: The number of newest snapshots that each branch keeps. If it is None, a property of the table
                states the number.
            passed_time: Measures ages by the time that has certainly passed, without periods in which the clock may
                have been set forward. If it is None, ages are measured by the clock.

        Raises:
            BadRequest: `retain_last` is below 1, or a property of the table is invalid.
        """
        properties = metadata.properties
        if older_than_ms is None:
            age_ms = parse_long(properties, MAX_SNAPSHOT_AGE, MAX_SNAPSHOT_AGE_DEFAULT_MS)
            older_than_ms = (passed_time or PassedTime(now_ms, now_ms)).find_time_ago(age_ms)
        if retain_last is None:
            retain_last = parse_int(properties, MIN_SNAPSHOTS, 1)
        if retain_last < 1:
            raise BadRequest(f"The number of snapshots to retain is {retain_last}; it must be at least 1")
        return ExpirationPolicy(older_than_ms, retain_last, parse_long(properties, MAX_REF_AGE, _FOREVER))


class Expired(NamedTuple):
    """The expired snapshots, the oldest first, and the expired references."""

    refs: tuple[str, ...]
    snapshot_ids: tuple[int, ...]


def find_expired(
    metadata: TableMetadata,
    policy: ExpirationPolicy,
    now_ms: int,
    in_use: Collection[int] = (),
    passed_time: PassedTime | None = None,
) -> Expired:
    """Return the snapshots and references that the policy removes.

    Args:
        in_use: The ids of further snapshots that do not expire, such as those of plans. Recently undone snapshots do
            not expire either.
        passed_time: Measures ages by the time that has certainly passed, without periods in which the clock may have
            been set forward. If it is None, ages are measured by the clock.

    Raises:
        BadRequest: The branches keep so many snapshots that their history would take too long to read.
    """
    passed_time = passed_time or PassedTime(now_ms, now_ms)
    kept_ids: set[int] = {*in_use, *find_recently_undone(metadata.snapshots, now_ms)}
    expired_refs: list[str] = []
    branches: list[SnapshotRef] = []
    for name, ref in metadata.refs.items():
        snapshot = metadata.snapshot(ref.snapshot_id)
        max_age_ms = policy.max_ref_age_ms if ref.max_ref_age_ms is None else ref.max_ref_age_ms
        if name != MAIN and (snapshot is None or snapshot.timestamp_ms < passed_time.find_time_ago(max_age_ms)):
            expired_refs.append(name)
        elif ref.is_branch:
            branches.append(ref)
        else:
            kept_ids.add(ref.snapshot_id)
    referenced_ids = _find_ancestors(metadata, branches)
    kept_ids |= _find_retained(metadata, branches, policy, passed_time)
    # A snapshot that is in no branch, for example after a rollback, expires by the time when it was replaced.
    replaced_ms = _find_replacement_times(metadata)
    kept_ids |= {
        snapshot.snapshot_id
        for snapshot in metadata.snapshots
        if snapshot.snapshot_id not in referenced_ids
        and replaced_ms.get(snapshot.snapshot_id, snapshot.timestamp_ms) >= policy.older_than_ms
    }
    expired_snapshots = sorted(
        (snapshot.timestamp_ms, snapshot.snapshot_id)
        for snapshot in metadata.snapshots
        if snapshot.snapshot_id not in kept_ids
    )
    return Expired(tuple(expired_refs), tuple(snapshot_id for _, snapshot_id in expired_snapshots))


def _find_ancestors(metadata: TableMetadata, branches: Iterable[SnapshotRef]) -> set[int]:
    """Return the ids of the snapshots in the histories of the branches. A snapshot that branches share is read once."""
    snapshot_ids: set[int] = set()
    for ref in branches:
        for snapshot_id, _ in _walk_history(metadata, ref.snapshot_id):
            if snapshot_id in snapshot_ids:
                break
            snapshot_ids.add(snapshot_id)
    return snapshot_ids


def _find_retained(
    metadata: TableMetadata, branches: Iterable[SnapshotRef], policy: ExpirationPolicy, passed_time: PassedTime
) -> set[int]:
    """Return the ids of the snapshots that a branch keeps, because they are young or among its newest.

    Raises:
        BadRequest: More than `READS_MAX` snapshots would have to be read.
    """
    branch_limits = set[tuple[int, int, int]]()
    """For each branch: the time before which snapshots expire, the minimum number of snapshots, and the id of the
    newest snapshot."""
    for ref in branches:
        age_ms, min_snapshots = ref.max_snapshot_age_ms, ref.min_snapshots_to_keep
        older_than_ms = policy.older_than_ms if age_ms is None else passed_time.find_time_ago(age_ms)
        branch_limits.add(
            (older_than_ms, policy.retain_last if min_snapshots is None else min_snapshots, ref.snapshot_id)
        )
    kept_ids: set[int] = set()
    young_ids: set[int] = set()
    """The snapshots that are kept because of their age.

    The branch with the longest age is read first, so the ancestors of a snapshot in this set need not be read again.
    """
    reads = 0
    for older_than_ms, min_snapshots, head in sorted(branch_limits):
        # The newest snapshots are kept regardless of their age. The age counts from the time at which a snapshot was
        # replaced.
        for number, (snapshot_id, replaced_ms) in enumerate(_walk_history(metadata, head)):
            reads += 1
            if reads > READS_MAX:
                raise BadRequest(
                    f"The branches keep more than {READS_MAX:,} snapshots together, because each keeps its newest; "
                    f"remove branches, or lower {MIN_SNAPSHOTS} or the min-snapshots-to-keep of the branches"
                )
            if number >= min_snapshots:
                if snapshot_id in young_ids or (replaced_ms is not None and replaced_ms < older_than_ms):
                    break
                young_ids.add(snapshot_id)
            kept_ids.add(snapshot_id)
    return kept_ids


def _walk_history(metadata: TableMetadata, head: int) -> Iterator[tuple[int, int | None]]:
    """Yield the id of the snapshot `head` and of each of its ancestors, with the time at which its child was committed.

    The time is None for `head`.
    """
    snapshot, replaced_ms = metadata.snapshot(head), None
    visited_ids: set[int] = set()
    # Writers set the parents, which may therefore form a cycle.
    while snapshot is not None and snapshot.snapshot_id not in visited_ids:
        visited_ids.add(snapshot.snapshot_id)
        yield snapshot.snapshot_id, replaced_ms
        replaced_ms = snapshot.timestamp_ms
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot(parent)


def _find_replacement_times(metadata: TableMetadata) -> dict[int, int]:
    """Return the time in ms at which each earlier current snapshot was replaced, according to the snapshot log.

    After a rollback, an earlier current snapshot need not be an ancestor of any branch.
    """
    log = metadata.snapshot_log
    times_ms: dict[int, int] = {}
    for entry, next_entry in pairwise(log):
        times_ms[entry.snapshot_id] = max(next_entry.timestamp_ms, times_ms.get(entry.snapshot_id, 0))
    return times_ms
