"""Leaves removals out of the snapshots of standard engines that would make a clean-up delete live deletion vectors.

A Puffin file holds several deletion vectors. Engines mark the entry of each vector that they remove or replace as
DELETED, and when that snapshot expires, Iceberg's incremental clean-up deletes the file of each such entry, whether or
not other vectors of the file are live (apache/iceberg#17456). As for this server's own changes (`manifest_filter.py`),
only the removal of the last vector of a file is marked. The server writes the manifests with other marks again, and the
manifest list, before the commit: the live files of the snapshot stay the same. Iceberg Java then deletes the manifests
that it wrote and the snapshot does not list, as after a rebase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from seamark.formats.iceberg.manifests.content_file import DATA
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ADDED, DELETE_MANIFEST, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import Forbidden, SeamarkError
from seamark.metaserver.catalog.ownership.own_files import foreign
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.commit.change_requests.change_body import APPEND
from seamark.metaserver.commit.engine_commits.attempt_manifests import AttemptManifests
from seamark.metaserver.commit.engine_commits.rebase import Rebased
from seamark.metaserver.commit.snapshots.manifest_filter import key_of, puffins_in_use
from seamark.metaserver.commit.snapshots.manifest_merge import can_be_written
from seamark.metaserver.commit.snapshots.snapshot_writer import HeldFiles, SnapshotWriter

_VECTORS_SINCE = 3
"""Format version."""
_NO_NUMBER = -1
"""For what an entry inherits, to distinguish it from an explicit number."""
_MEMORY_BYTES = 256 << 20
"""Of the decoded manifests of one snapshot."""


class SharedPuffins:
    """For the commits of one server."""

    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts

    async def keep(
        self,
        manifests: AttemptManifests,
        uuid: str,
        folder: str,
        base: TableMetadata,
        metadata: TableMetadata,
        updates: Sequence[Mapping[str, Any]],
        rebased: Rebased | None,
    ) -> Rebased | None:
        """Replaces the updates of a commit, which lead from `base` to `metadata`, and the files to write before it; new
        files are for `folder`. `rebased`: what a rebase made of the commit. None if no update needs to change, or a
        file cannot be read."""
        if metadata.format_version < _VECTORS_SINCE:
            return None
        kept: list[dict[str, Any]] = []
        pending = dict(rebased.files if rebased else ())
        is_changed = False
        for update in updates:
            fields = update.get("snapshot")
            fresh = dict(update)
            if update.get("action") == "add-snapshot" and isinstance(fields, Mapping):
                snapshot = metadata.snapshot(int(fields.get("snapshot-id") or 0))
                if snapshot is not None and base.snapshot(snapshot.snapshot_id) is None:
                    listed = rebased.listed if rebased else None
                    parent = base.snapshot(snapshot.parent_snapshot_id or 0)
                    written = await self._rewritten(manifests, uuid, folder, metadata, snapshot, parent, listed)
                    if written:
                        pending.pop(snapshot.manifest_list or "", None)
                        pending |= written
                        fresh["snapshot"] = {**fields, "manifest-list": written[-1][0]}
                        is_changed = True
            kept.append(fresh)
        return Rebased(kept, list(pending.items())) if is_changed else None

    async def _rewritten(
        self,
        manifests: AttemptManifests,
        uuid: str,
        folder: str,
        metadata: TableMetadata,
        snapshot: Snapshot,
        parent: Snapshot | None,
        listed: Sequence[ManifestFile] | None,
    ) -> list[tuple[str, bytes]]:
        """Manifests and, last, the manifest list that names them. Empty if the snapshot can stay unchanged. `parent`:
        None if the table does not have it yet. `listed`: the manifests of the snapshot, where its manifest list is not
        written yet."""

        async def check_paths(paths: Iterable[str]) -> None:
            if await foreign(self._parts, uuid, paths):
                raise Forbidden("a file is in a location of another table")

        if snapshot.manifest_list is None or snapshot.summary_map().get("operation") == APPEND:
            return []
        checked = manifests.checked(check_paths, _MEMORY_BYTES)
        try:
            if listed is None:
                listed = await checked.own.listed(snapshot)
            return await self._without_marks(checked, folder, metadata, snapshot, parent, listed)
        except SeamarkError:
            # The commit is as valid as without this; an engine could not repair what the server cannot read.
            return []

    async def _without_marks(
        self,
        manifests: AttemptManifests,
        folder: str,
        metadata: TableMetadata,
        snapshot: Snapshot,
        parent: Snapshot | None,
        listed: Sequence[ManifestFile],
    ) -> list[tuple[str, bytes]]:
        removals: dict[str, list[ManifestEntry]] = {}
        for manifest in listed:
            if (
                manifest.content != DATA
                and manifest.added_snapshot_id == snapshot.snapshot_id
                and manifest.deleted_files_count != 0
                and manifest.key_metadata is None
                and can_be_written(metadata, manifest.partition_spec_id)
            ):
                removals[manifest.manifest_path] = await manifests.own.removals(manifest, metadata)
        removed = {
            key_of(entry.file)
            for entries in removals.values()
            for entry in entries
            if entry.file.is_deletion_vector and entry.snapshot_id == snapshot.snapshot_id
        }
        if not removed:
            return []
        before = {manifest.manifest_path for manifest in await manifests.published.listed(parent)}
        old = [manifest for manifest in listed if manifest.manifest_path in before]
        new = [manifest for manifest in listed if manifest.manifest_path not in before]
        in_use = await puffins_in_use(manifests.published, old, removed, metadata, {})
        in_use |= await puffins_in_use(manifests.own, new, removed, metadata, {})
        held = HeldFiles()
        writer = SnapshotWriter(held, self._parts.clock, manifests.own, folder, snapshot.snapshot_id)
        replaced: list[ManifestFile] = []
        for manifest in listed:
            marks = removals.get(manifest.manifest_path, [])
            others = [entry for entry in marks if entry.file.file_path not in in_use]
            if len(others) == len(marks):
                replaced.append(manifest)
                continue
            unnumbered = structs.replace(manifest, sequence_number=_NO_NUMBER)
            entries = [as_written(entry) for entry in await manifests.own.entries(unnumbered, metadata)]
            entries += others
            if not entries:
                continue
            stored = await writer.manifest(entries, metadata, manifest.partition_spec_id, DELETE_MANIFEST)
            replaced.append(stored.described(snapshot.snapshot_id, manifest.sequence_number))
        if len(replaced) == len(listed) and not held.files:
            return []
        await writer.manifest_list(tuple(replaced), metadata, snapshot.parent_snapshot_id, snapshot.sequence_number)
        return held.files


def as_written(entry: ManifestEntry) -> ManifestEntry:
    """Added files inherit the sequence numbers that the engine did not write. Those that it wrote stay: they are of
    delete files that were rewritten, and that must not apply to later rows."""
    if entry.status != ADDED:
        return entry
    numbers = (entry.sequence_number, entry.file_sequence_number)
    of_data, of_file = (None if number == _NO_NUMBER else number for number in numbers)
    return structs.replace(entry, sequence_number=of_data, file_sequence_number=of_file)
