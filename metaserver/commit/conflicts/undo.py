"""Undoes a snapshot that changed no rows, even if writers have committed later snapshots.

The undone snapshot replaced files by files with the same rows, or manifests by manifests with the same files. The
change removes the files that it added, and restores the files that it removed, with their sequence numbers and row ids.
The rows and equality deletes of later commits remain: the equality deletes still apply, because they are newer than the
restored files. If later commits changed the added files, the undo is refused, because these changes cannot be moved to
the restored files. If the snapshot rewrote only manifests, the old manifests are restored, provided that the head still
lists all new manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from seamark.formats.iceberg.manifests.content_file import DATA, POSITION_DELETES, ContentFile
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import EXISTING, ManifestEntry
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.commit.change_requests.change_body import REPLACE, Remove
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.commit.conflicts.conflicts import find_first_between
from seamark.metaserver.commit.snapshots.manifest_filter import drop_dead_manifests, make_file_key
from seamark.metaserver.commit.snapshots.manifests import Manifests, run_by_count

_Entries = dict[Remove, ManifestEntry]


class Undo(NamedTuple):
    """The effects of the snapshot to undo.

    Attributes:
        added: The files that the snapshot added.
        removed: The entries of the files that the snapshot removed.
        manifests: If the snapshot rewrote only manifests: the manifests of the branch's current snapshot, with the old
            manifests in place of the manifests that the undone snapshot wrote. Otherwise empty.
    """

    added: frozenset[Remove]
    removed: tuple[ManifestEntry, ...]
    manifests: tuple[ManifestFile, ...] = ()

    @property
    def restored_files(self) -> list[ContentFile]:
        return [entry.file for entry in self.removed]

    def group_by_manifest(self) -> Iterable[tuple[int, int, list[ManifestEntry]]]:
        """Return the spec id, the content type and the entries of each manifest of restored files.

        A manifest has files of one spec and one content type (0 for data files, 1 for delete files). The entries are
        EXISTING, so the files keep their sequence numbers.
        """
        groups: dict[tuple[int, int], list[ManifestEntry]] = {}
        for entry in self.removed:
            groups.setdefault((entry.file.spec_id, int(entry.file.content != DATA)), []).append(
                ManifestEntry(
                    EXISTING, entry.snapshot_id, entry.sequence_number, entry.file_sequence_number, entry.file
                )
            )
        return [(spec_id, content, entries) for (spec_id, content), entries in groups.items()]


async def compute_undo(manifests: Manifests, metadata: TableMetadata, head: Snapshot | None, snapshot_id: int) -> Undo:
    """Check that a snapshot can be undone on `head`, and return its effects.

    An undo removes the files that the snapshot added, and restores the files that it removed. If the snapshot changed
    no files, it rewrote only manifests, and the old manifests are restored. Otherwise, later commits must not have
    changed the files that are removed.

    Args:
        manifests: Reads manifests.
        metadata: The table's metadata.
        head: The current snapshot of the branch, or None if the branch has no snapshot.
        snapshot_id: The snapshot to undo.

    Raises:
        BadRequest: The snapshot can never be undone.
        Collision: Later commits prevent the undo.
    """
    undone, parent = _find_snapshots(metadata, head, snapshot_id)
    assert head is not None
    parent_entries, undone_entries = await _compare_live_entries(manifests, metadata, parent, undone)
    count = len(parent_entries) + len(undone_entries)

    def compare() -> tuple[set[Remove], set[Remove]]:
        return undone_entries.keys() - parent_entries.keys(), parent_entries.keys() - undone_entries.keys()

    # The files that the snapshot added, and the files that it removed.
    added_keys, removed_keys = await run_by_count(count, compare)
    if not added_keys and not removed_keys:
        return Undo(frozenset(), (), await _restore_manifests(manifests, metadata, (parent, undone, head)))
    entries_after_snapshot, head_entries = await _compare_live_entries(manifests, metadata, undone, head)

    def check() -> Undo:
        removed_later = [entries_after_snapshot[key] for key in entries_after_snapshot.keys() - head_entries.keys()]
        added_later = [head_entries[key] for key in head_entries.keys() - entries_after_snapshot.keys()]
        _check_removed(removed_later, added_keys, {key.file_path for key in removed_keys})
        _check_new(added_later, {key.file_path for key in added_keys}, removed_keys)
        return Undo(frozenset(added_keys), tuple(parent_entries[key] for key in removed_keys))

    return await run_by_count(count + len(entries_after_snapshot) + len(head_entries), check)


def _find_snapshots(metadata: TableMetadata, head: Snapshot | None, snapshot_id: int) -> tuple[Snapshot, Snapshot]:
    """Return the snapshot to undo and its parent.

    The snapshot must be in the history of `head`, the current snapshot of the branch. It must have changed no rows, and
    its parent must still exist.

    Raises:
        BadRequest: The snapshot does not meet these conditions, or its rows would get other row ids.
    """
    snapshot = head
    while snapshot is not None and snapshot.snapshot_id != snapshot_id:
        parent_id = snapshot.parent_snapshot_id
        snapshot = None if parent_id is None else metadata.snapshot(parent_id)
    if snapshot is None:
        raise BadRequest(
            f"Snapshot {snapshot_id} is not in the history of the branch, or has expired; it cannot be undone"
        )
    operation = snapshot.build_summary_map().get("operation")
    if operation != REPLACE:
        raise BadRequest(
            f"Snapshot {snapshot_id} has the operation {operation!r}; only snapshots that replace files by files with "
            "the same rows can be undone"
        )
    parent = None if snapshot.parent_snapshot_id is None else metadata.snapshot(snapshot.parent_snapshot_id)
    if parent is None:
        raise BadRequest(
            f"The snapshot before {snapshot_id} has expired, and the files that it replaced may be deleted; it cannot "
            "be undone"
        )
    if metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION and parent.first_row_id is None:
        raise BadRequest(f"The table was upgraded after snapshot {snapshot_id}, and rows would get other row ids")
    return snapshot, parent


async def _restore_manifests(
    manifests: Manifests, metadata: TableMetadata, snapshots: tuple[Snapshot, Snapshot, Snapshot]
) -> tuple[ManifestFile, ...]:
    """Return the current manifests of a branch, with the old manifests in place of those of the undone snapshot.

    Args:
        manifests: Reads manifests.
        metadata: The table's metadata.
        snapshots: The parent of the undone snapshot, the undone snapshot, and the current snapshot of the branch.

    Raises:
        BadRequest: The undone snapshot changed no manifests, or the restored rows would get other row ids.
        Collision: A later commit replaced a manifest that the undone snapshot had written.
    """
    parent_manifests, undone_manifests, head_manifests = [
        drop_dead_manifests(await manifests.read_list(snapshot)) for snapshot in snapshots
    ]
    parent_paths, undone_paths, head_paths = (
        {manifest.manifest_path for manifest in manifest_files}
        for manifest_files in (parent_manifests, undone_manifests, head_manifests)
    )
    new_paths, old_paths = undone_paths - parent_paths, parent_paths - undone_paths
    if not new_paths and not old_paths:
        raise BadRequest(f"Snapshot {snapshots[1].snapshot_id} changed no files and no manifests; nothing to undo")
    if not new_paths <= head_paths:
        missing_path = min(new_paths - head_paths)
        raise Collision("undo", f"A later commit replaced {missing_path}, which the snapshot had written")
    restored_manifests = [manifest for manifest in parent_manifests if manifest.manifest_path in old_paths]
    if metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION and any(
        manifest.content == 0 and manifest.first_row_id is None for manifest in restored_manifests
    ):
        raise BadRequest("The table was upgraded after the manifests were written, and rows would get other row ids")
    return (*restored_manifests, *(manifest for manifest in head_manifests if manifest.manifest_path not in new_paths))


async def _compare_live_entries(
    manifests: Manifests, metadata: TableMetadata, older_snapshot: Snapshot, newer_snapshot: Snapshot
) -> tuple[_Entries, _Entries]:
    """Return for each of two snapshots the live entries of the manifests that only this snapshot lists.

    Manifests that both snapshots list contain the same entries, so they are not read.
    """
    older_manifests = drop_dead_manifests(await manifests.read_list(older_snapshot))
    newer_manifests = drop_dead_manifests(await manifests.read_list(newer_snapshot))
    older_paths = {manifest.manifest_path for manifest in older_manifests}
    newer_paths = {manifest.manifest_path for manifest in newer_manifests}
    only_older = [manifest for manifest in older_manifests if manifest.manifest_path not in newer_paths]
    only_newer = [manifest for manifest in newer_manifests if manifest.manifest_path not in older_paths]
    return (
        await _read_entries(manifests, metadata, only_older),
        await _read_entries(manifests, metadata, only_newer),
    )


async def _read_entries(
    manifests: Manifests, metadata: TableMetadata, manifest_files: Sequence[ManifestFile]
) -> _Entries:
    entries_by_key: _Entries = {}
    for manifest in manifest_files:
        entries = await manifests.read_entries(manifest, metadata)
        await run_by_count(len(entries), partial(_add_entries, entries, entries_by_key))
    return entries_by_key


def _add_entries(entries: Iterable[ManifestEntry], entries_by_key: _Entries) -> None:
    entries_by_key.update((make_file_key(entry.file), entry) for entry in entries)


def _check_removed(
    removed_entries: Sequence[ManifestEntry], added_files: Iterable[Remove], restored_paths: set[str]
) -> None:
    """Check that later commits have not removed files that the snapshot added, or deletes of restored files.

    A removed delete file that names no data file may also apply to restored files.

    Args:
        removed_entries: The entries that later commits have removed.
        added_files: The files that the snapshot added.
        restored_paths: The paths of the files that the undo restores.

    Raises:
        Collision: A later commit has removed such a file.
    """
    keys = set(added_files)
    for entry in removed_entries:
        file = entry.file
        if make_file_key(file) in keys:
            raise Collision(
                "undo", f"A later commit replaced or deleted {file.file_path}, which the snapshot had added"
            )
        may_apply = file.referenced_data_file is None or file.referenced_data_file in restored_paths
        if file.content != DATA and may_apply:
            raise Collision("undo", f"A later commit removed {file.file_path}, whose deletes the old files may need")


def _check_new(new_entries: Sequence[ManifestEntry], added_paths: set[str], removed_files: Iterable[Remove]) -> None:
    """Check that later commits have added no files that prevent the undo.

    Args:
        new_entries: The entries that later commits have added.
        added_paths: The paths of the files that the snapshot added.
        removed_files: The files that the snapshot removed.

    Raises:
        Collision: A later commit has added such a file.
    """
    keys, paths = set(removed_files), sorted(path.encode() for path in added_paths)
    for entry in new_entries:
        file = entry.file
        if make_file_key(file) in keys:
            raise Collision("undo", f"{file.file_path} is in the table again; the snapshot is undone already")
        if file.content == POSITION_DELETES and _may_refer(file, paths):
            raise Collision("undo", f"Later deletes in {file.file_path} name rows of the files that the snapshot added")


def _may_refer(file: ContentFile, paths: Sequence[bytes]) -> bool:
    if file.referenced_data_file is not None:
        return file.referenced_data_file.encode() in paths
    return find_first_between(paths, file) is not None
