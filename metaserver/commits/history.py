"""What happened to a branch since a snapshot: data files and delete files that came, and files that went.

Only manifests that the snapshots themselves added are read, and of those that rewrote some, the ones they put them in
place of. A `replace` snapshot, a compaction, brings the same rows in other files: nothing of it counts as added or
deleted, but files that it took away are gone all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from metaserver.commits.change import APPEND, DELETE, REPLACE
from metaserver.commits.manifests import Manifests
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.strings import strings
from metaserver.planner.pruning.incremental import keep_appended
from metaserver.planner.view.selection import Selection
from metaserver.planner.view.view import TableView

_DATA = 0


class AddedFiles(NamedTuple):
    """Files that were added: which of the view's rows they are."""

    view: TableView
    selection: Selection


class RemovedFiles(NamedTuple):
    """Data files, or delete files, that one snapshot removed; None where its parent has expired: it may be any."""

    snapshot: Snapshot
    deletes: bool
    files: AddedFiles | None


class TooLong(Exception):
    """There are more snapshots since than are looked at."""


def since(
    metadata: TableMetadata, head: Snapshot | None, read_snapshot_id: int | None, look_back: int
) -> list[Snapshot] | None:
    """The snapshots after the one that was read (None: the empty table) up to the head, newest first.

    None where what was read is no ancestor of the head, or cannot be told to be one. TooLong.
    """
    found: list[Snapshot] = []
    current = head
    while current is not None:
        if current.snapshot_id == read_snapshot_id:
            return found
        if len(found) >= look_back:
            raise TooLong
        found.append(current)
        parent = current.parent_snapshot_id
        if parent == read_snapshot_id:  # which may have expired since
            return found
        current = None if parent is None else metadata.snapshot(parent)
    return found if head is None and read_snapshot_id is None else None


class History:
    """What some snapshots did, read when it is asked for."""

    def __init__(self, manifests: Manifests, metadata: TableMetadata, snapshots: Sequence[Snapshot]) -> None:
        self._manifests = manifests
        self._metadata = metadata
        self.snapshots = tuple(snapshots)
        self._operations = {snapshot.snapshot_id: snapshot.summary_map().get("operation", "") for snapshot in snapshots}

    def _changing(self) -> tuple[Snapshot, ...]:
        """Those that changed rows."""
        return tuple(snapshot for snapshot in self.snapshots if self._operations[snapshot.snapshot_id] != REPLACE)

    async def added(self, *, deletes: bool, replaced: bool = False) -> AddedFiles:
        """Data files, or delete files, that they added; with `replaced` also in compactions."""
        mine: list[ManifestFile] = []
        changing = self.snapshots if replaced else self._changing()
        for snapshot in changing:
            mine += [
                one
                for one in await self._own(snapshot)
                if (one.content != _DATA) == deletes and one.added_files_count != 0
            ]
        view = TableView(mine, await self._manifests.blocks(mine))
        selection = Selection.everything(view)
        keep_appended(selection, {one.snapshot_id for one in changing})
        return AddedFiles(view, selection)

    def writing(self, deletes: AddedFiles) -> AddedFiles:
        """Of the deletes that were added, those of snapshots that may have written rows, too."""
        ids = {one for one, operation in self._operations.items() if operation != DELETE}
        selection = deletes.selection.copy()
        keep_appended(selection, ids)
        return AddedFiles(deletes.view, selection)

    async def removed(self, *, deletes: bool, replaced: bool) -> list[RemovedFiles]:
        """Data files, or delete files, that they removed; with `replaced` also in compactions."""
        found = []
        for snapshot in self.snapshots:
            operation = self._operations[snapshot.snapshot_id]
            if operation == APPEND or (operation == REPLACE and not replaced) or snapshot.parent_snapshot_id is None:
                continue
            parent = self._metadata.snapshot(snapshot.parent_snapshot_id)
            files = None if parent is None else await self._removed_by(snapshot, parent, deletes)
            found.append(RemovedFiles(snapshot, deletes, files))
        return found

    async def _removed_by(self, snapshot: Snapshot, parent: Snapshot, deletes: bool) -> AddedFiles:
        listed = await self._manifests.listed(snapshot)
        still = {manifest.manifest_path for manifest in listed}
        dropped = [
            manifest
            for manifest in await self._manifests.listed(parent)
            if manifest.manifest_path not in still and (manifest.content != _DATA) == deletes
        ]
        own = [one for one in await self._own(snapshot) if (one.content != _DATA) == deletes] if dropped else []
        kept = {key for block in await self._manifests.blocks(own) for key in _keys(block)}
        view = TableView(dropped, await self._manifests.blocks(dropped))
        selection = Selection.everything(view)
        for number, block in enumerate(view.blocks):
            selection.keep(number, np.array([key not in kept for key in _keys(block)], dtype=np.bool_))
        return AddedFiles(view, selection)

    async def _own(self, snapshot: Snapshot) -> list[ManifestFile]:
        """The manifests that the snapshot added."""
        listed = await self._manifests.listed(snapshot)
        return [manifest for manifest in listed if manifest.added_snapshot_id == snapshot.snapshot_id]


def _keys(block: Block) -> list[tuple[bytes | None, int]]:
    """What each file of a block is known by: its path, and a deletion vector's offset in it."""
    rows = np.arange(block.rows, dtype=np.int64)
    paths = strings(block.text_column("file_path"), rows)
    return list(zip(paths, block.longs("content_offset").tolist(), strict=True))


def rows_of(block: Block, paths: Iterable[str]) -> dict[str, int]:
    """The rows of those of the files that the block lists."""
    wanted = {path.encode(): path for path in paths}
    found = strings(block.text_column("file_path"), np.arange(block.rows, dtype=np.int64))
    return {wanted[path]: row for row, path in enumerate(found) if path is not None and path in wanted}
