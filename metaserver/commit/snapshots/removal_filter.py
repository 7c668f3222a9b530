"""Removes the DELETED marks of files from past snapshots, before an undo restores these files.

Iceberg's incremental clean-up (Java's `IncrementalFileCleanup`, with which Trino, Flink and programs expire snapshots)
does not read the remaining snapshots. It deletes each file that a manifest of an expired snapshot marks as DELETED by
an expired snapshot in the history of the branch. After an undo, such a file may be live again. Therefore no manifest of
any snapshot may mark a restored file as DELETED. The server rewrites the manifests without these entries, and the
manifest lists that name the manifests. The live files of each snapshot stay the same, with their sequence numbers and
row ids. Only the location of its manifest list changes. The old files are kept for current readers, until they are
removed as orphan files.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import msgspec

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ADDED, DATA_MANIFEST, EXISTING, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import BadRequest, Corrupt
from seamark.metaserver.commit.snapshots.manifest_merge import can_encode_partitions
from seamark.metaserver.commit.snapshots.manifests import MANIFESTS_CONCURRENT_MAX, Manifests, run_by_count
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter
from seamark.metaserver.runtime.gathering import gather

_Identity = tuple[str, int, int | None]
"""The path of a manifest, and the values that its entries inherit."""


class RemovalFilter:
    """Rewrites manifests without DELETED marks, for one commit. Later attempts reuse the files of earlier attempts."""

    def __init__(self, writer: SnapshotWriter) -> None:
        self._writer = writer
        self._filtered_manifests: dict[_Identity, ManifestFile | None] = {}
        """The replacement of each manifest: the same manifest, a new manifest, or None if no entry remains."""
        self._lists: dict[str, str] = {}
        """The location of the replacement of each manifest list, by location."""
        self.written: set[str] = set()
        """The locations of the manifests and manifest lists that were written."""

    async def drop_removals(
        self,
        manifests: Manifests,
        metadata: TableMetadata,
        undone_snapshot: Snapshot,
        paths: Collection[str],
        *,
        snapshots_max: int,
    ) -> TableMetadata:
        """Remove DELETED marks, and return the new table metadata.

        Args:
            undone_snapshot: The snapshot to undo. Its marks and those of later snapshots are removed.
            paths: The files whose marks are removed. They must be the same in all attempts.
            snapshots_max: The maximum number of snapshots to read.

        Raises:
            BadRequest: More than `snapshots_max` snapshots would have to be read.
        """
        later_snapshots = [
            snapshot for snapshot in metadata.snapshots if snapshot.sequence_number >= undone_snapshot.sequence_number
        ]
        if len(later_snapshots) > snapshots_max:
            raise BadRequest(
                f"The table has {len(later_snapshots):,} snapshots since {undone_snapshot.snapshot_id}, which an undo "
                f"must read; the limit is {snapshots_max:,} (commit_history_limit). Expire snapshots first, but keep "
                f"the snapshot before {undone_snapshot.snapshot_id}"
            )
        lists = await gather(
            [partial(manifests.read_list, snapshot) for snapshot in later_snapshots], MANIFESTS_CONCURRENT_MAX
        )
        marked_manifests = {
            _identify(manifest): manifest
            for manifest_files in lists
            for manifest in manifest_files
            if manifest.deleted_files_count != 0 and _identify(manifest) not in self._filtered_manifests
        }
        work = [
            partial(self._filter_manifest, manifests, metadata, manifest, paths)
            for manifest in marked_manifests.values()
        ]
        self._filtered_manifests |= zip(marked_manifests, await gather(work, MANIFESTS_CONCURRENT_MAX), strict=True)
        lists_by_snapshot: dict[int, str] = {}
        for snapshot, manifest_files in zip(later_snapshots, lists, strict=True):
            filtered_manifests = [
                self._filtered_manifests.get(_identify(manifest), manifest) for manifest in manifest_files
            ]
            remaining_manifests = tuple(manifest for manifest in filtered_manifests if manifest is not None)
            if remaining_manifests != manifest_files:
                assert snapshot.manifest_list is not None
                lists_by_snapshot[snapshot.snapshot_id] = await self._write_list(
                    snapshot, remaining_manifests, metadata
                )
        if not lists_by_snapshot:
            return metadata
        return msgspec.structs.replace(
            metadata,
            snapshots=tuple(
                msgspec.structs.replace(snapshot, manifest_list=lists_by_snapshot[snapshot.snapshot_id])
                if snapshot.snapshot_id in lists_by_snapshot
                else snapshot
                for snapshot in metadata.snapshots
            ),
        )

    async def _filter_manifest(
        self, manifests: Manifests, metadata: TableMetadata, manifest: ManifestFile, paths: Collection[str]
    ) -> ManifestFile | None:
        """Return a manifest without the DELETED marks of the files at these paths.

        A DELETED mark shows that a snapshot has removed a file. After an undo, the file is live again, and engines must
        not delete it when they expire this snapshot. The manifest keeps its snapshot and its sequence number.

        Returns:
            The same manifest if it has no such mark, or None if no entry remains.

        Raises:
            BadRequest: A source column of the manifest's partition spec was dropped, so the manifest cannot be
                rewritten.
            Corrupt: The manifest is damaged, or its manifest list lacks `added_snapshot_id`.
        """
        removals = await manifests.read_removals(manifest, metadata)
        remaining_removals = await run_by_count(
            len(removals), lambda: [entry for entry in removals if entry.file.file_path not in paths]
        )
        if len(remaining_removals) == len(removals):
            return manifest
        entries = [*await manifests.read_entries(manifest, metadata), *remaining_removals]
        if not entries:
            return None
        if metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION and manifest.content == DATA_MANIFEST:
            # A reader assigns consecutive row ids to the rows of added files without an explicit row id. So the removal
            # of an entry would change the row ids of later files.
            entries = await run_by_count(len(entries), partial(_mark_existing, entries))
        if manifest.added_snapshot_id is None:
            raise Corrupt(f"{manifest.manifest_path}: its manifest list lacks added_snapshot_id")
        if not can_encode_partitions(metadata, manifest.partition_spec_id):
            raise BadRequest(
                f"{manifest.manifest_path} has the partition spec {manifest.partition_spec_id}. A source column of "
                "this spec was dropped, so the manifest cannot be rewritten for the undo"
            )
        stored_manifest = await self._writer.write_manifest(
            entries, metadata, manifest.partition_spec_id, manifest.content
        )
        self.written.add(stored_manifest.path)
        new_manifest = stored_manifest.describe(manifest.added_snapshot_id, manifest.sequence_number)
        return msgspec.structs.replace(new_manifest, first_row_id=manifest.first_row_id)

    async def _write_list(
        self, snapshot: Snapshot, manifests: tuple[ManifestFile, ...], metadata: TableMetadata
    ) -> str:
        assert snapshot.manifest_list is not None
        location = self._lists.get(snapshot.manifest_list)
        if location is None:
            location = await self._writer.write_manifest_list(
                manifests,
                metadata,
                snapshot.parent_snapshot_id,
                snapshot.sequence_number,
                of_snapshot_id=snapshot.snapshot_id,
            )
            self._lists[snapshot.manifest_list] = location
            self.written.add(location)
        return location


def _mark_existing(entries: Sequence[ManifestEntry]) -> list[ManifestEntry]:
    """Return the entries with the status EXISTING instead of ADDED."""
    return [msgspec.structs.replace(entry, status=EXISTING) if entry.status == ADDED else entry for entry in entries]


def _identify(manifest: ManifestFile) -> _Identity:
    return manifest.manifest_path, manifest.sequence_number, manifest.first_row_id
