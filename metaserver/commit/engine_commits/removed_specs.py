"""Refuses to remove a partition spec that files of the table have, because no reader could read these files.

Clients compute which specs are unused, and assert that no branch has changed since then. The server checks it again,
because not all clients send the assertion, and a spec cannot be restored under its id.
"""

from __future__ import annotations

import contextlib
from functools import partial

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import CommitConflict, Corrupt, RequestError
from seamark.metaserver.commit.engine_commits.commit_manifests import ManifestReaders
from seamark.metaserver.commit.snapshots.manifests import MANIFESTS_CONCURRENT_MAX
from seamark.metaserver.runtime.gathering import gather

_CHECKED_SNAPSHOTS_MAX = 1_000
"""The maximum number of snapshots whose manifest lists are read, in addition to the heads of branches and tags."""


async def check_removed_specs(readers: ManifestReaders, base: TableMetadata, metadata: TableMetadata) -> None:
    """Check that no snapshot of the new metadata has files of a spec that the commit removes.

    The newest snapshots, and the snapshots of all branches and tags, are checked. Manifest lists that are missing,
    damaged or in the location of another table are skipped.

    Raises:
        CommitConflict: A snapshot has such files.
        RetryLater, StorageError: The storage does not answer, so it is unknown which specs the files have.
    """
    removed_ids = {spec.spec_id for spec in base.partition_specs} - {spec.spec_id for spec in metadata.partition_specs}
    if not removed_ids:
        return
    newest_snapshots = sorted(metadata.snapshots, key=lambda snapshot: snapshot.timestamp_ms)[-_CHECKED_SNAPSHOTS_MAX:]
    snapshots = {snapshot.snapshot_id: snapshot for snapshot in newest_snapshots}
    for ref in metadata.refs.values():
        head = metadata.snapshot(ref.snapshot_id)
        if head is not None:
            snapshots[head.snapshot_id] = head

    spec_by_snapshot: dict[int, int] = {}
    """A removed spec of which each snapshot has files, by snapshot id."""

    async def check(snapshot: Snapshot) -> None:
        is_published = base.snapshot(snapshot.snapshot_id) is not None
        manifests = readers.published if is_published else readers.own
        with contextlib.suppress(Corrupt, RequestError):
            used_ids = {manifest.partition_spec_id for manifest in await manifests.read_list(snapshot)}
            if used_ids & removed_ids:
                spec_by_snapshot[snapshot.snapshot_id] = min(used_ids & removed_ids)

    await gather([partial(check, snapshot) for snapshot in snapshots.values()], MANIFESTS_CONCURRENT_MAX)
    for snapshot_id, spec_id in sorted(spec_by_snapshot.items()):
        raise CommitConflict(
            f"Cannot remove partition spec {spec_id}: manifests of snapshot {snapshot_id} have it. Rewrite its "
            "files and expire the snapshot first"
        )
