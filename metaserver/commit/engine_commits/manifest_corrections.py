"""Corrects new manifests of engines that would harm readers, or would make a clean-up delete live files.

The server reads the manifests that a snapshot adds. Before the commit, it rewrites the manifests that need a
correction, and the manifest list. The live files of the snapshot stay the same. As after a rebase, Iceberg Java then
deletes the manifests that it wrote and that the snapshot does not list. There are four corrections:

- *Shared Puffin files.* A Puffin file contains several deletion vectors. Engines mark the entry of each vector that
  they remove or replace as DELETED. When such a snapshot expires, Iceberg's incremental clean-up deletes the file of
  each marked entry, even if other vectors in the file are live (apache/iceberg#17456). Therefore only the removal of
  the last vector in a file stays marked. The server's own changes follow the same rule (`manifest_filter.py`).
- *Lost vectors.* DuckDB removes all vectors of a Puffin file if it replaces one of them. The others stay live
  (`lost_vectors.py`).
- *Partitions of deletes.* DuckDB writes deletes of older data files under the current partition spec, where no reader
  applies them. They get the partition of their data file (`delete_partitions.py`).
- *Metrics.* Other readers cannot use some of the metrics that engines write, such as bounds that are cut within a
  character (`repaired_metrics.py`).

A partition value of a data file cannot be corrected, because delete files are matched to data files by it. Therefore a
commit is refused if it adds a data file whose value of `truncate` on text or binary is longer than the width. Readers
would never find the rows of this file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np
from msgspec import structs

from seamark.formats.iceberg.manifests.content_file import DATA, DeclaredTypes
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, ManifestFile
from seamark.formats.iceberg.manifests.repaired_metrics import FindType, has_unusable_metrics, repair_file
from seamark.formats.iceberg.manifests.writer import ADDED, DATA_MANIFEST, DELETE_MANIFEST, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.metadata.updates import AddSnapshot, Update
from seamark.formats.iceberg.types.transforms import get_transform_name, get_transform_width
from seamark.formats.index.packing import MISSING
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, RetryLater, SeamarkError
from seamark.metaserver.commit.change_requests.change_body import APPEND
from seamark.metaserver.commit.engine_commits.commit_manifests import CommitManifests, ManifestReaders
from seamark.metaserver.commit.engine_commits.delete_partitions import (
    assign_partitions_to_deletes,
    find_data_files,
    get_referenced_path,
    has_other_spec,
    has_suspicious_partitions,
)
from seamark.metaserver.commit.engine_commits.lost_vectors import read_lost_vectors, select_candidates
from seamark.metaserver.commit.engine_commits.rebase import RevisedUpdates
from seamark.metaserver.commit.snapshots.manifest_filter import drop_dead_manifests, find_used_puffins, make_file_key
from seamark.metaserver.commit.snapshots.manifest_merge import can_encode_partitions
from seamark.metaserver.commit.snapshots.manifests import MANIFESTS_CONCURRENT_MAX, Manifests
from seamark.metaserver.commit.snapshots.snapshot_writer import HeldFiles, SnapshotWriter, StoredManifest
from seamark.metaserver.runtime.gathering import gather

_VECTORS_MIN_FORMAT_VERSION = 3
_UNASSIGNED = -1
"""The sequence number that decoding gives to entries without their own number."""
_MEMORY_BYTES = 256 << 20
"""The maximum memory in bytes for the decoded manifests of one snapshot."""
_CHECKED_MANIFESTS_MAX, _CHECKED_BYTES_MAX = 256, 64 << 20
"""The maximum number, and the maximum total size, of a snapshot's new manifests that are searched for wrong metrics.

Further manifests are not corrected.
"""
_IN_LOOP_BYTES = 64 << 10
"""The maximum size of a manifest that is searched on the event loop. A larger manifest is searched in a thread."""
_SHOWN_CHARACTERS_MAX = 100
"""The maximum number of characters of a partition value in an error."""

Files = list[tuple[str, bytes]]
"""The locations and contents of files to write: manifests, and finally the manifest list that names them."""


class ManifestCorrections:
    """Corrects the manifests of commits. A server has one instance."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def preload(self, manifests: CommitManifests, uuid: str, updates: Iterable[Update]) -> None:
        """Read the new manifests into the cache before the table's lock is taken, so that other commits wait less.

        Errors are ignored, because `correct` reads the manifests again.
        """
        own_manifests = manifests.with_checks(uuid, _MEMORY_BYTES).own
        for update in updates:
            if isinstance(update, AddSnapshot) and update.snapshot.manifest_list is not None:
                with contextlib.suppress(SeamarkError, ValueError):
                    manifest_files = await own_manifests.read_list_at(update.snapshot.manifest_list)
                    new_manifests = _select_new(manifest_files, {update.snapshot.snapshot_id})
                    await gather(
                        [partial(own_manifests.read_encoded, manifest) for manifest in new_manifests],
                        MANIFESTS_CONCURRENT_MAX,
                    )

    async def correct(
        self,
        manifests: CommitManifests,
        uuid: str,
        folder: str,
        base: TableMetadata | None,
        metadata: TableMetadata,
        updates: Sequence[Update],
        rebased_updates: RevisedUpdates | None,
    ) -> RevisedUpdates | None:
        """Return the updates with corrected snapshots, and the files to write before the commit.

        Args:
            manifests: The manifests that the commit has already read.
            uuid: The table's UUID.
            folder: The folder for new files.
            base: The table's metadata before the updates, or None for a new table.
            metadata: The table's metadata after the updates.
            updates: The updates of the commit, after a rebase.
            rebased_updates: The result of the rebase, or None if there was no rebase.

        Returns:
            The updates and files. None if no snapshot needs a correction, or a file cannot be read.

        Raises:
            BadRequest: A data file has an impossible partition value, or deletes cannot get the partition of their data
                file.
            RetryLater: The storage does not answer.
        """
        revised_updates: list[Update] = []
        files = dict(rebased_updates.files if rebased_updates else ())
        # The manifest list of a rebased snapshot is not written yet, so its manifests are passed to the corrections.
        rebased_manifests = rebased_updates.listed if rebased_updates else None
        is_changed = False
        new_ids = frozenset(update.snapshot.snapshot_id for update in updates if isinstance(update, AddSnapshot))
        for update in updates:
            revised_updates.append(update)
            snapshot = metadata.snapshot(update.snapshot.snapshot_id) if isinstance(update, AddSnapshot) else None
            if snapshot is None or (base is not None and base.snapshot(snapshot.snapshot_id) is not None):
                continue
            assert isinstance(update, AddSnapshot)
            readers = manifests.with_checks(uuid, _MEMORY_BYTES)
            correction = _Correction(self._clock, readers, folder, metadata, new_ids)
            # First, because the other corrections cannot read a manifest that contradicts its manifest list.
            moved_files = await correction.correct_delete_partitions(snapshot, rebased_manifests)
            snapshot = _replace_list(snapshot, files, moved_files)
            if base is not None:
                parent = _find_published_ancestor(snapshot, metadata, base)
                # After a correction, the manifest list of the snapshot can be read.
                unwritten_manifests = None if moved_files else rebased_manifests
                correction_files = await correction.keep_shared_puffins(snapshot, parent, unwritten_manifests)
                snapshot = _replace_list(snapshot, files, correction_files)
            snapshot = _replace_list(snapshot, files, await correction.correct_metrics(snapshot))
            if snapshot.manifest_list != update.snapshot.manifest_list:
                is_changed = True
                corrected_snapshot = structs.replace(update.snapshot, manifest_list=snapshot.manifest_list)
                revised_updates[-1] = AddSnapshot(corrected_snapshot)
        return RevisedUpdates(tuple(revised_updates), tuple(files.items())) if is_changed else None


class _Correction:
    """Corrects the snapshots that a commit adds to one table.

    `new_ids` are the ids of these snapshots. The manifest list of the second snapshot also names manifests of the first
    snapshot, without their corrections.
    """

    def __init__(
        self,
        clock: Clock,
        manifests: ManifestReaders,
        folder: str,
        metadata: TableMetadata,
        new_snapshot_ids: Collection[int],
    ) -> None:
        self._new_snapshot_ids = new_snapshot_ids
        self._clock = clock
        self._published = manifests.published
        self._own_manifests = manifests.own
        self._folder = folder
        self._metadata = metadata

    async def keep_shared_puffins(
        self, snapshot: Snapshot, parent: Snapshot | None, manifest_files: Sequence[ManifestFile] | None
    ) -> Files:
        """Remove the entries with the status DELETED of deletion vectors whose Puffin file has other live vectors.

        Deletion vectors that the engine removed by mistake, although their data files are live, are kept as well.

        Args:
            snapshot: The new snapshot.
            parent: The nearest ancestor of the snapshot that the table already has, or None.
            manifest_files: The manifests of the snapshot if its manifest list is not written yet, otherwise None.

        Returns:
            The files to write. The list is empty if the snapshot needs no correction. It is also empty if the snapshot
            cannot be read: a refusal would not help, because the engine could not correct the snapshot.

        Raises:
            RetryLater: The storage does not answer. Without the correction, deleted rows could come back.
        """
        if self._metadata.format_version < _VECTORS_MIN_FORMAT_VERSION or snapshot.manifest_list is None:
            return []
        if self._is_only_append(snapshot):
            return []
        try:
            manifest_files = await self._own_manifests.read_list(snapshot) if manifest_files is None else manifest_files
            removals = await self._read_removals(manifest_files)
            # Do not select the entries by their snapshot id, because DuckDB 1.5.5 does not write the id of its
            # snapshot.
            marks = [entry for entries in removals.values() for entry in entries if entry.file.is_deletion_vector]
            removed_keys = {make_file_key(entry.file) for entry in marks}
            if not removed_keys:
                return []
            parent_manifests = await self._published.read_list(parent)
            published_paths = {manifest.manifest_path for manifest in parent_manifests}
            old_manifests = [manifest for manifest in manifest_files if manifest.manifest_path in published_paths]
            new_manifests = [manifest for manifest in manifest_files if manifest.manifest_path not in published_paths]
            in_use = await find_used_puffins(self._published, old_manifests, removed_keys, self._metadata, {})
            in_use |= await find_used_puffins(self._own_manifests, new_manifests, removed_keys, self._metadata, {})
            lost_vectors = await self._find_lost_vectors(marks, parent_manifests, old_manifests, new_manifests)
            in_use |= {entry.file.file_path for entry in lost_vectors}
            return await self._write_without_marks(snapshot, manifest_files, removals, in_use, lost_vectors)
        except RetryLater:
            raise
        except SeamarkError:
            return []

    def _is_only_append(self, snapshot: Snapshot) -> bool:
        """Return whether the commit only appends, so that none of its manifests removes or deletes anything."""
        # With several new snapshots, the snapshot also lists manifests of the others, which may remove or delete files.
        return len(self._new_snapshot_ids) == 1 and snapshot.build_summary_map().get("operation") == APPEND

    async def _find_lost_vectors(
        self,
        marks: Sequence[ManifestEntry],
        parent_manifests: Sequence[ManifestFile],
        old_manifests: Sequence[ManifestFile],
        new_manifests: Sequence[ManifestFile],
    ) -> list[ManifestEntry]:
        """Return the entries of the deletion vectors that the snapshot removes by mistake.

        If the new manifests have a vector for a data file, they replace its old vector on purpose. Other vectors of the
        same Puffin file may be removed by mistake (`select_candidates`).

        Args:
            marks: The entries of deletion vectors with the status DELETED.
            parent_manifests: The manifests of the parent.
            old_manifests: The manifests of the snapshot that its parent has too.
            new_manifests: The other manifests of the snapshot.
        """
        replaced_data_files: set[str] = set()
        for manifest in drop_dead_manifests(new_manifests):
            if manifest.content != DATA:
                entries = await self._own_manifests.read_entries(manifest, self._metadata)
                paths = (entry.file.referenced_data_file for entry in entries if entry.file.is_deletion_vector)
                replaced_data_files.update(path for path in paths if path is not None)
        candidates = select_candidates(marks, replaced_data_files)
        if not candidates:
            return []
        data_paths = {entry.file.referenced_data_file or "" for entry in candidates}
        live_files = await find_data_files(self._published, old_manifests, data_paths, self._metadata)
        live_files |= await find_data_files(self._own_manifests, new_manifests, data_paths, self._metadata)
        return await read_lost_vectors(self._published, parent_manifests, candidates, set(live_files), self._metadata)

    async def _read_removals(self, manifest_files: Iterable[ManifestFile]) -> dict[str, list[ManifestEntry]]:
        """Return the entries with the status DELETED in each new delete manifest, by the path of the manifest.

        Manifests that are encrypted, or that the server cannot write again, are left out, because it could not correct
        them.
        """
        removals: dict[str, list[ManifestEntry]] = {}
        for manifest in manifest_files:
            if (
                manifest.content != DATA
                and manifest.added_snapshot_id in self._new_snapshot_ids
                and manifest.deleted_files_count != 0
                and manifest.key_metadata is None
                and can_encode_partitions(self._metadata, manifest.partition_spec_id)
            ):
                removals[manifest.manifest_path] = await self._own_manifests.read_removals(manifest, self._metadata)
        return removals

    async def _write_without_marks(
        self,
        snapshot: Snapshot,
        manifest_files: Sequence[ManifestFile],
        removals: dict[str, list[ManifestEntry]],
        in_use: Collection[str],
        lost_vectors: Sequence[ManifestEntry],
    ) -> Files:
        """Write the manifests without the DELETED entries of files in use, and write the manifest list.

        The new manifest list also has manifests for vectors that were removed by mistake, so that these stay live.

        Args:
            removals: The DELETED entries of each manifest, by its path.
            in_use: The paths of the Puffin files with other live vectors.
            lost_vectors: The live entries of the vectors that the snapshot removes by mistake.
        """
        files, writer = self._open_writer(snapshot)
        manifests: list[ManifestFile] = []
        for manifest in manifest_files:
            marks = removals.get(manifest.manifest_path, [])
            remaining = [entry for entry in marks if entry.file.file_path not in in_use]
            if len(remaining) == len(marks):
                manifests.append(manifest)
                continue
            # Without the number of the manifest, an entry that inherits it differs from an entry with its own number.
            # `_inherit_numbers` keeps this difference in the new manifest.
            manifest_without_number = structs.replace(manifest, sequence_number=_UNASSIGNED)
            entries = [
                _inherit_numbers(entry)
                for entry in await self._own_manifests.read_entries(manifest_without_number, self._metadata)
            ]
            entries += remaining
            if not entries:
                continue
            stored_manifest = await writer.write_manifest(
                entries, self._metadata, manifest.partition_spec_id, DELETE_MANIFEST
            )
            manifests.append(_describe_corrected_manifest(stored_manifest, manifest))
        for spec_id in sorted({entry.file.spec_id for entry in lost_vectors}):
            entries = [entry for entry in lost_vectors if entry.file.spec_id == spec_id]
            stored_manifest = await writer.write_manifest(entries, self._metadata, spec_id, DELETE_MANIFEST)
            manifests.append(stored_manifest.describe(snapshot.snapshot_id, snapshot.sequence_number))
        if len(manifests) == len(manifest_files) and not files.files:
            return []
        await self._write_list(writer, snapshot, manifests)
        return files.files

    async def correct_delete_partitions(
        self, snapshot: Snapshot, manifest_files: Sequence[ManifestFile] | None
    ) -> Files:
        """Give the deletes of the snapshot the partitions of the data files to which they apply.

        Nothing is corrected in two cases. If the table has one partition spec, all deletes have it. If the commit only
        appends, it has no deletes.

        Args:
            snapshot: The new snapshot.
            manifest_files: The manifests of the snapshot if its manifest list is not written yet, otherwise None.

        Returns:
            The files to write. The list is empty if the snapshot needs no correction or cannot be read.

        Raises:
            BadRequest: The partition of a data file cannot be written.
            RetryLater: The storage does not answer. Without the correction, deleted rows could come back.
        """
        if snapshot.manifest_list is None or len(self._metadata.partition_specs) == 1:
            return []
        if self._is_only_append(snapshot):
            return []
        try:
            manifest_files = await self._own_manifests.read_list(snapshot) if manifest_files is None else manifest_files
            corrected_entries = await self._assign_partitions(snapshot, manifest_files)
            return (
                await self._write_corrected_partitions(snapshot, manifest_files, corrected_entries)
                if corrected_entries
                else []
            )
        except _ImpossibleValue as error:
            raise BadRequest(str(error)) from None
        except RetryLater:
            raise
        except (SeamarkError, ValueError):
            # The server cannot read a file. A refusal would not help, because the engine cannot repair the file.
            return []

    async def _assign_partitions(
        self, snapshot: Snapshot, manifest_files: Sequence[ManifestFile]
    ) -> dict[str, list[ManifestEntry]]:
        """Return the corrected entries of the manifests whose deletes have wrong partitions, by the manifest's path.

        A manifest whose spec differs from the manifest list is also written again, even if its entries are correct.
        """
        new_manifests = _select_new(manifest_files, self._new_snapshot_ids)
        entries_by_manifest: dict[str, list[ManifestEntry]] = {}
        contradictory_paths: set[str] = set()
        for manifest in new_manifests:
            if manifest.content != DATA:
                manifest_rows = await self._own_manifests.decode(manifest)
                if has_suspicious_partitions(manifest_rows, manifest, self._metadata):
                    entries = await self._read_all_entries(self._own_manifests, manifest)
                    entries_by_manifest[manifest.manifest_path] = entries
                if has_other_spec(manifest_rows, manifest):
                    contradictory_paths.add(manifest.manifest_path)
        paths = {get_referenced_path(entry.file) for entries in entries_by_manifest.values() for entry in entries}
        data_paths = {path for path in paths if path is not None}
        if not data_paths and not contradictory_paths:
            return {}
        new_paths = {manifest.manifest_path for manifest in new_manifests}
        old_manifests = [manifest for manifest in manifest_files if manifest.manifest_path not in new_paths]
        data_files = await find_data_files(self._published, old_manifests, data_paths, self._metadata)
        data_files |= await find_data_files(self._own_manifests, new_manifests, data_paths, self._metadata)
        corrected_entries = {
            path: assign_partitions_to_deletes(entries, data_files) for path, entries in entries_by_manifest.items()
        }
        return {
            path: entries
            for path, entries in corrected_entries.items()
            if path in contradictory_paths or entries != entries_by_manifest[path]
        }

    async def _write_corrected_partitions(
        self,
        snapshot: Snapshot,
        manifest_files: Sequence[ManifestFile],
        corrected_entries: dict[str, list[ManifestEntry]],
    ) -> Files:
        """Write the delete manifests whose deletes now have the partitions of their data files, and the manifest list.

        A manifest has files of one partition spec, so a corrected manifest may become several. Other manifests are
        listed without a change.

        Args:
            snapshot: The new snapshot.
            manifest_files: The manifests of the snapshot.
            corrected_entries: The entries of each corrected manifest, by its path.

        Raises:
            _ImpossibleValue: The partition values of a spec cannot be encoded.
        """
        files, writer = self._open_writer(snapshot)
        find_type = DeclaredTypes(self._metadata)
        manifests: list[ManifestFile] = []
        for manifest in manifest_files:
            if manifest.manifest_path not in corrected_entries:
                manifests.append(manifest)
                continue
            by_spec: dict[int, list[ManifestEntry]] = {}
            for entry in corrected_entries[manifest.manifest_path]:
                repaired_entry = structs.replace(entry, file=repair_file(entry.file, find_type))
                by_spec.setdefault(entry.file.spec_id, []).append(_inherit_numbers(repaired_entry))
            for spec_id, entries in by_spec.items():
                if not can_encode_partitions(self._metadata, spec_id):
                    raise _ImpossibleValue(
                        f"The commit deletes rows of files with the partition spec {spec_id}, whose source column no "
                        "longer exists, but its delete files have another spec, so no reader would apply them. "
                        "DuckDB 1.5.5 writes such files: delete the rows with `seamark sql` or another engine"
                    )
                stored_manifest = await writer.write_manifest(entries, self._metadata, spec_id, DELETE_MANIFEST)
                manifests.append(_describe_corrected_manifest(stored_manifest, manifest))
        await self._write_list(writer, snapshot, manifests)
        return files.files

    async def correct_metrics(self, snapshot: Snapshot) -> Files:
        """Correct the metrics (counts and bounds of columns) that readers cannot use.

        Returns:
            The files to write. The list is empty if the snapshot needs no correction or cannot be read.

        Raises:
            BadRequest: A data file has an impossible partition value.
        """
        if snapshot.manifest_list is None:
            return []
        try:
            manifest_files = await self._own_manifests.read_list(snapshot)
            find_type = DeclaredTypes(self._metadata)
            paths_to_correct = await self._find_wrong_metrics(
                _select_new(manifest_files, self._new_snapshot_ids), find_type
            )
            return (
                await self._write_corrected(snapshot, manifest_files, paths_to_correct, find_type)
                if paths_to_correct
                else []
            )
        except _ImpossibleValue as error:
            raise BadRequest(str(error)) from None
        except (SeamarkError, ValueError):
            # The commit is valid without the correction, and after a refusal, the engine could not repair an unreadable
            # file.
            return []

    async def _find_wrong_metrics(self, new_manifests: Iterable[ManifestFile], find_type: FindType) -> set[str]:
        """Return the paths of the manifests whose metrics need a correction.

        `find_type` returns the type of a column.
        """
        paths_to_correct: set[str] = set()

        async def check(manifest: ManifestFile) -> None:
            manifest_rows = await self._own_manifests.decode(manifest)
            search = partial(_needs_correction, manifest_rows, manifest, self._metadata, find_type)
            if search() if len(manifest_rows.heap) <= _IN_LOOP_BYTES else await asyncio.to_thread(search):
                paths_to_correct.add(manifest.manifest_path)

        await gather([partial(check, manifest) for manifest in new_manifests], MANIFESTS_CONCURRENT_MAX)
        return paths_to_correct

    async def _write_corrected(
        self,
        snapshot: Snapshot,
        manifest_files: Sequence[ManifestFile],
        paths_to_correct: set[str],
        find_type: FindType,
    ) -> Files:
        """Write the manifests at the given paths again, with corrected metrics, and write the manifest list."""
        files, writer = self._open_writer(snapshot)
        manifests: list[ManifestFile] = []
        for manifest in manifest_files:
            if manifest.manifest_path not in paths_to_correct:
                manifests.append(manifest)
                continue
            entries = await self._read_all_entries(self._own_manifests, manifest)
            entries = [
                _inherit_numbers(structs.replace(entry, file=repair_file(entry.file, find_type))) for entry in entries
            ]
            stored_manifest = await writer.write_manifest(
                entries, self._metadata, manifest.partition_spec_id, manifest.content
            )
            new_manifest = _describe_corrected_manifest(stored_manifest, manifest)
            manifests.append(structs.replace(new_manifest, first_row_id=manifest.first_row_id))
        await self._write_list(writer, snapshot, manifests)
        return files.files

    async def _read_all_entries(self, source: Manifests, manifest: ManifestFile) -> list[ManifestEntry]:
        """Return the live and the deleted entries of a manifest, without filling in inherited sequence numbers."""
        manifest_without_number = structs.replace(manifest, sequence_number=_UNASSIGNED)
        live_entries = await source.read_entries(manifest_without_number, self._metadata)
        return [*live_entries, *await source.read_removals(manifest_without_number, self._metadata)]

    def _open_writer(self, snapshot: Snapshot) -> tuple[HeldFiles, SnapshotWriter]:
        files = HeldFiles()
        return files, SnapshotWriter(files, self._clock, self._own_manifests, self._folder, snapshot.snapshot_id)

    async def _write_list(self, writer: SnapshotWriter, snapshot: Snapshot, manifests: list[ManifestFile]) -> None:
        parent_id, sequence_number = snapshot.parent_snapshot_id, snapshot.sequence_number
        await writer.write_manifest_list(tuple(manifests), self._metadata, parent_id, sequence_number)


def _replace_list(snapshot: Snapshot, files: dict[str, bytes], list_files: Files) -> Snapshot:
    """Return the snapshot with the new manifest list, and add the written files to `files`, the files of the commit.

    The manifest list is the last of `list_files`. It replaces the manifest list that the rebase or an earlier
    correction of the same snapshot has added to `files`.
    """
    if not list_files:
        return snapshot
    files.pop(snapshot.manifest_list or "", None)
    files.update(list_files)
    return structs.replace(snapshot, manifest_list=list_files[-1][0])


def _describe_corrected_manifest(stored_manifest: StoredManifest, manifest: ManifestFile) -> ManifestFile:
    """Return the entry of a corrected manifest in a manifest list.

    It has the snapshot id and the sequence number of the original manifest.
    """
    assert manifest.added_snapshot_id is not None, "only manifests of the new snapshots are corrected"
    return stored_manifest.describe(manifest.added_snapshot_id, manifest.sequence_number)


def _find_published_ancestor(snapshot: Snapshot, metadata: TableMetadata, base: TableMetadata) -> Snapshot | None:
    """Return the nearest ancestor of a new snapshot that the table already has, or None.

    The number of steps is limited, because the parents of an engine's snapshots may form a cycle.
    """
    ancestor: Snapshot | None = snapshot
    for _ in range(len(metadata.snapshots)):
        if ancestor is None or base.snapshot(ancestor.snapshot_id) is not None:
            return ancestor
        ancestor = metadata.snapshot(ancestor.parent_snapshot_id or 0)  # No snapshot has the id 0.
    return None


def _select_new(manifest_files: Iterable[ManifestFile], snapshot_ids: Collection[int]) -> list[ManifestFile]:
    """Return the manifests that the snapshots add.

    Encrypted manifests are left out. The number and the size of the manifests are limited, because the commit waits
    while the server reads them.
    """
    new_manifests, size_bytes = list[ManifestFile](), 0
    for manifest in manifest_files:
        if manifest.added_snapshot_id not in snapshot_ids or manifest.key_metadata is not None:
            continue
        size_bytes += manifest.manifest_length
        if size_bytes > _CHECKED_BYTES_MAX or len(new_manifests) == _CHECKED_MANIFESTS_MAX:
            break
        new_manifests.append(manifest)
    return new_manifests


class _ImpossibleValue(Exception):
    """Raised if a partition has a value that its transform cannot produce."""


def _needs_correction(
    manifest_rows: DecodedManifest, manifest: ManifestFile, metadata: TableMetadata, find_type: FindType
) -> bool:
    """Return whether a manifest has wrong metrics and can be rewritten without changing row ids.

    Raises:
        _ImpossibleValue: An added file has an impossible partition value.
    """
    if manifest.content == DATA_MANIFEST:
        _check_truncated(manifest_rows, metadata)
    if not has_unusable_metrics(manifest_rows, find_type) or not can_encode_partitions(
        metadata, manifest.partition_spec_id
    ):
        return False
    if metadata.format_version < ROW_LINEAGE_MIN_FORMAT_VERSION or manifest.content != DATA_MANIFEST:
        return True
    is_added = manifest_rows.longs["status"] == ADDED
    # Row ids stay the same only if added files inherit their row ids, and existing files have explicit row ids.
    return bool(((manifest_rows.longs["first_row_id"] == MISSING) == is_added).all())


def _check_truncated(manifest: DecodedManifest, metadata: TableMetadata) -> None:
    """Check that the `truncate` values of added files are not longer than the width of the transform.

    Raises:
        _ImpossibleValue: A value is too long.
    """
    spec = metadata.spec(int(manifest.metadata.get("partition-spec-id") or 0))
    transforms = {} if spec is None else {field.field_id: field.transform for field in spec.fields}
    is_added = manifest.longs["status"] == ADDED
    for values in manifest.partition:
        transform = transforms.get(values.field_id, "")
        if values.spans is None or values.logical == "decimal" or get_transform_name(transform) != "truncate":
            continue
        width, starts, lengths = get_transform_width(transform), values.spans.starts, values.spans.lengths
        for row in np.flatnonzero(is_added & (lengths > width)).tolist():
            value = manifest.heap[starts[row] : starts[row] + lengths[row]].tobytes()
            # The width of text counts characters, and the lengths count bytes.
            size = len(value.decode(errors="replace")) if values.type == "string" else len(value)
            if size > width:
                excerpt = value.decode(errors="replace")[:_SHOWN_CHARACTERS_MAX]
                raise _ImpossibleValue(
                    f"A data file of the commit has the partition value {excerpt!r} of {transform}, which has {size} "
                    "characters or bytes. Readers would not find its rows. DuckDB 1.5.5 writes such values if a text "
                    "contains characters that are composed of several code points: write these rows with "
                    "`seamark sql` or another engine"
                )


def _inherit_numbers(entry: ManifestEntry) -> ManifestEntry:
    """Return an added entry that inherits each sequence number that the engine did not write.

    An explicit sequence number stays: it belongs to a rewritten delete file, which must not apply to later rows.
    """
    if entry.status != ADDED:
        return entry
    numbers = (entry.sequence_number, entry.file_sequence_number)
    data_number, file_number = (None if number == _UNASSIGNED else number for number in numbers)
    return structs.replace(entry, sequence_number=data_number, file_sequence_number=file_number)
