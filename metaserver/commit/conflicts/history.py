"""Finds the data and delete files that the snapshots of a branch have added and removed since a given snapshot.

Only two kinds of manifests are read: manifests that these snapshots added, and manifests that a rewrite of manifests
replaced. A snapshot with the operation `replace`, such as a compaction, moves the same rows to different files.
Therefore its files count neither as added rows nor as deleted rows, but the files that it removed no longer exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.replacement import is_replace
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.metaserver.commit.change_requests.change_body import APPEND, DELETE, OVERWRITE, REPLACE
from seamark.metaserver.commit.snapshots.manifests import Manifests, run_by_count
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.strings import read_strings
from seamark.metaserver.planner.pruning.file_pruning import keep_appended_files
from seamark.metaserver.planner.view.selection import FileSelection
from seamark.metaserver.planner.view.view import TableView

_DATA = 0
"""The content of a manifest of data files."""


class SelectedFiles(NamedTuple):
    """A set of data files or delete files that snapshots added or removed, as a selection of the files of a view.

    A view is the list of files in some manifests.
    """

    view: TableView
    selection: FileSelection


class RemovedFiles(NamedTuple):
    """The data files or delete files that a snapshot removed.

    The files are None if they are unknown because the parent of the snapshot has expired.

    Attributes:
        snapshot: The snapshot that removed the files.
        deletes: Whether the files are delete files.
        files: The files, or None if they are unknown.
    """

    snapshot: Snapshot
    deletes: bool
    files: SelectedFiles | None


class HistoryTooLong(Exception):
    """Raised if more snapshots were committed since the read snapshot than `look_back` allows."""


def list_later_snapshots(
    metadata: TableMetadata, head: Snapshot | None, read_snapshot_id: int | None, look_back: int
) -> list[Snapshot] | None:
    """Return the snapshots of a branch from the newest back to the read snapshot, which is not included.

    The result is None if the read snapshot is not an ancestor of the newest, or if the ancestors are unknown.

    Args:
        metadata: The table's metadata.
        head: The newest snapshot of the branch, or None if the branch is empty.
        read_snapshot_id: The read snapshot, or None if an empty table was read.
        look_back: The maximum number of snapshots.

    Raises:
        HistoryTooLong: There are more than `look_back` snapshots.
    """
    snapshots: list[Snapshot] = []
    current = head
    while current is not None:
        if current.snapshot_id == read_snapshot_id:
            return snapshots
        if len(snapshots) >= look_back:
            raise HistoryTooLong
        snapshots.append(current)
        parent = current.parent_snapshot_id
        if parent == read_snapshot_id:  # The parent itself may have expired.
            return snapshots
        current = None if parent is None else metadata.snapshot(parent)
    # An empty table was read, and the branch is still empty. In any other case, the read snapshot was not found.
    return snapshots if head is None and read_snapshot_id is None else None


class History:
    """The files that a sequence of snapshots has added and removed. Manifests are read on demand."""

    def __init__(self, manifests: Manifests, metadata: TableMetadata, snapshots: Sequence[Snapshot]) -> None:
        self._manifests = manifests
        self._metadata = metadata
        self.snapshots = tuple(snapshots)
        self._operations = {snapshot.snapshot_id: _read_operation(snapshot) for snapshot in snapshots}

    def _list_changing_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the snapshots that have changed rows."""
        return tuple(snapshot for snapshot in self.snapshots if self._operations[snapshot.snapshot_id] != REPLACE)

    async def find_added(self, *, deletes: bool, include_compacted: bool = False) -> SelectedFiles:
        """Return the data files or delete files that the snapshots have added.

        Args:
            deletes: Whether to return delete files instead of data files.
            include_compacted: Whether to include the files that compactions added.
        """
        manifests: list[ManifestFile] = []
        snapshots = self.snapshots if include_compacted else self._list_changing_snapshots()
        for snapshot in snapshots:
            manifests += [
                manifest
                for manifest in await self._list_own_manifests(snapshot)
                if (manifest.content != _DATA) == deletes and manifest.added_files_count != 0
            ]
        view = TableView(manifests, await self._manifests.read_blocks(manifests))
        selection = FileSelection.select_all(view)
        keep_appended_files(selection, {snapshot.snapshot_id for snapshot in snapshots})
        return SelectedFiles(view, selection)

    def select_deletes_of_rewrites(self, deletes: SelectedFiles) -> SelectedFiles:
        """Return the delete files whose snapshots may have rewritten the deleted rows to new data files.

        A snapshot with the operation `delete` adds no data files, so it has rewritten no rows.
        """
        ids = {snapshot_id for snapshot_id, operation in self._operations.items() if operation != DELETE}
        selection = deletes.selection.copy()
        keep_appended_files(selection, ids)
        return SelectedFiles(deletes.view, selection)

    async def find_removed(self, *, deletes: bool, replaced: bool) -> list[RemovedFiles]:
        """Return the data files or delete files that the snapshots have removed.

        Snapshots that only append, and snapshots without a parent, have removed nothing. If the parent of a snapshot
        has expired, the files of its item are None.

        Args:
            deletes: Whether to return delete files instead of data files.
            replaced: Whether to include the files that compactions removed.
        """
        removals = []
        for snapshot in self.snapshots:
            operation = self._operations[snapshot.snapshot_id]
            if operation == APPEND or (operation == REPLACE and not replaced) or snapshot.parent_snapshot_id is None:
                continue
            parent = self._metadata.snapshot(snapshot.parent_snapshot_id)
            files = None if parent is None else await self._read_removed_files(snapshot, parent, deletes)
            removals.append(RemovedFiles(snapshot, deletes, files))
        return removals

    async def _read_removed_files(self, snapshot: Snapshot, parent: Snapshot, deletes: bool) -> SelectedFiles:
        """Return the data files that a snapshot removed, or the delete files if `deletes` is True.

        A removed file is in a manifest that only the parent lists, and in no manifest that the snapshot added. A
        manifest that only the parent lists may also have other files: the snapshot lists them in its new manifests.
        """
        listed_paths = {manifest.manifest_path for manifest in await self._manifests.read_list(snapshot)}
        dropped_manifests = [
            manifest
            for manifest in await self._manifests.read_list(parent)
            if manifest.manifest_path not in listed_paths and (manifest.content != _DATA) == deletes
        ]
        own_manifests = []
        if dropped_manifests:
            own_manifests = [
                manifest
                for manifest in await self._list_own_manifests(snapshot)
                if (manifest.content != _DATA) == deletes
            ]
        own_blocks = await self._manifests.read_blocks(own_manifests)
        view = TableView(dropped_manifests, await self._manifests.read_blocks(dropped_manifests))
        rows = view.file_count + sum(block.rows for block in own_blocks)
        return SelectedFiles(view, await run_by_count(rows, partial(_select_missing, view, own_blocks)))

    async def _list_own_manifests(self, snapshot: Snapshot) -> list[ManifestFile]:
        """Return the manifests that the snapshot added."""
        manifest_files = await self._manifests.read_list(snapshot)
        return [manifest for manifest in manifest_files if manifest.added_snapshot_id == snapshot.snapshot_id]


def _read_operation(snapshot: Snapshot) -> str:
    operation = snapshot.build_summary_map().get("operation", "")
    return OVERWRITE if operation == REPLACE and not is_replace(snapshot) else operation


def _select_missing(view: TableView, blocks: Iterable[Block]) -> FileSelection:
    """Return the files of the view that none of the blocks lists. A block has the files of one manifest."""
    block_keys = {key for block in blocks for key in _list_keys(block)}
    selection = FileSelection.select_all(view)
    for number, block in enumerate(view.blocks):
        selection.keep(number, np.array([key not in block_keys for key in _list_keys(block)], dtype=np.bool_))
    return selection


def _list_keys(block: Block) -> list[tuple[bytes | None, int]]:
    """Return a key for each file of a block: its path and, for a deletion vector, its offset."""
    rows = np.arange(block.rows, dtype=np.int64)
    paths = read_strings(block.find_text_column("file_path"), rows)
    return list(zip(paths, block.read_longs("content_offset").tolist(), strict=True))


def find_rows_by_path(block: Block, paths: Collection[bytes]) -> dict[bytes, int]:
    """Return the rows of the block with these paths, by path."""
    stored_paths = read_strings(block.find_text_column("file_path"), np.arange(block.rows, dtype=np.int64))
    return {path: row for row, path in enumerate(stored_paths) if path is not None and path in paths}
