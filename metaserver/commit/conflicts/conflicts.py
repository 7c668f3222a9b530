"""Detects conflicts of a change with snapshots that were committed after its read (docs/design/0004, "What conflicts").

A change is accepted only if its computation from the current snapshot would give the same result, as far as the
isolation level requires. If this is uncertain, the change is refused. So a refused change may have been correct, but an
accepted change is always correct. The checks compare partitions, column bounds, and the files to which deletes apply.
If these cannot exclude a conflict, and the files are small, `key_comparison.py` compares the values of the rows.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np

from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.expressions.projection import project_inclusive
from seamark.formats.iceberg.manifests.content_file import DATA, EQUALITY_DELETES, POSITION_DELETES, ContentFile
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ManifestEntry
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.types.reserved import DELETED_PATH
from seamark.formats.index.packing import Longs
from seamark.metaserver.commit.change_requests.change import Change, ReadScope, list_partitions
from seamark.metaserver.commit.change_requests.change_body import SERIALIZABLE
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.commit.conflicts.history import (
    History,
    HistoryTooLong,
    SelectedFiles,
    find_rows_by_path,
    list_later_snapshots,
)
from seamark.metaserver.commit.conflicts.key_comparison import (
    CheckedFiles,
    find_first_match,
    keep_matching_data,
    keep_matching_deletes,
)
from seamark.metaserver.commit.conflicts.overlap import PartitionOverlap, Targets
from seamark.metaserver.commit.snapshots.manifest_filter import (
    FilesToRemove,
    drop_dead_manifests,
    find_referring_entries,
    make_file_key,
)
from seamark.metaserver.commit.snapshots.manifests import Manifests, run_by_count
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats
from seamark.metaserver.planner.view.selection import never_expires
from seamark.metaserver.planner.view.view import ENTRY_BITS, TableView

_IN_LOOP_FILES_MAX = 200
"""The maximum number of files and partitions that are compared on the event loop. A thread compares larger numbers."""


class ConflictCheck:
    """Checks one change against one head of its branch.

    Attributes:
        manifest_files: The manifests of the head.
        to_remove: The files to remove.
    """

    def __init__(
        self,
        files: CheckedFiles,
        manifests: Manifests,
        metadata: TableMetadata,
        manifest_files: Sequence[ManifestFile],
        change: Change,
        to_remove: FilesToRemove,
    ) -> None:
        self._files = files
        self._manifests = manifests
        self._metadata = metadata
        self._manifest_files = drop_dead_manifests(manifest_files)
        self._change = change
        self._files_to_remove = to_remove
        self._partitions = PartitionOverlap(metadata)
        self._targets: tuple[ReadScope, Targets] | None = None

    async def check(self, head: Snapshot | None, look_back: int) -> None:
        """Check that the change can be applied to the head.

        Args:
            head: The current snapshot of the branch.
            look_back: The maximum number of snapshots between the head and the snapshot that the change has read.

        Raises:
            Collision: The change conflicts with the head. Or there are too many snapshots since the snapshot that it
                has read, or this snapshot is unknown.
        """
        change = self._change
        if not (change.deletes or change.removes or change.scope):
            return
        count = len(change.data) + len(change.deletes)
        referenced_paths, stored_paths = await run_by_count(count, partial(_list_referenced_files, change))
        await self._check_files_live(stored_paths)
        await self._check_vectors()
        history = await self._list_history(head, look_back)
        if history is None or not history.snapshots:
            return
        deletes = await history.find_added(deletes=True)
        if deletes.selection.count():
            await self._check_deletes(history, deletes, referenced_paths)
        await self._check_unnamed(history)
        await self._check_other_specs(history)
        if change.request.isolation == SERIALIZABLE:
            # A change may replace rows that it has not read. To avoid losing rows that other commits have added to the
            # replaced scope, check the added files and added deletes in it.
            for scope in (change.scope, None if change.replaced is change.scope else change.replaced):
                if scope is not None:
                    await self._check_scope(history, deletes, scope)
        elif change.replaced is not None:  # With snapshot isolation, added rows may remain, but no delete may be lost.
            await self._refuse_in_scope(deletes, change.replaced, "added deletes of rows that the change replaces")

    # Checks of the current snapshot

    async def _check_files_live(self, paths: set[str]) -> None:
        """Check that the data files at these paths are live.

        Deletes of a file that another commit has removed would have no effect, so the deleted rows would remain.

        Raises:
            Collision: A data file is not live.
        """
        _, missing_path = await self._find_live_files(paths)
        if missing_path is not None:
            raise Collision(
                "file-gone",
                f"The change adds deletes for {missing_path[:1000]}, which is no longer in the table; compute the "
                "change again from the current snapshot",
            )

    async def _find_live_files(self, paths: set[str]) -> tuple[tuple[TableView, Longs], str | None]:
        """Find the live data files at these paths.

        Entry ids number the files in a view, which is the list of files in some manifests.

        Returns:
            The view with the entry ids of the live data files, and a path without a live data file, or None.

        Raises:
            Corrupt: A manifest cannot be read.
        """
        data = [manifest for manifest in self._manifest_files if manifest.content == DATA]
        manifest_files = await self._manifests.find_listing_manifests(data, paths)
        view = TableView(manifest_files, await self._manifests.read_blocks(manifest_files))
        entry_ids, missing_path = await run_by_count(
            view.file_count + len(paths), partial(_find_entry_ids, view, paths)
        )
        return (view, entry_ids), missing_path

    async def _check_vectors(self) -> None:
        """Check that a change which adds a deletion vector for a data file also removes the existing vector.

        A data file may have only one deletion vector.

        Raises:
            Collision: The change does not remove an existing vector.
        """
        data_paths = await run_by_count(len(self._change.deletes), self._list_files_with_new_vector)
        for _, entries in await find_referring_entries(
            self._manifests, self._manifest_files, data_paths, self._metadata
        ):
            other_vector = await run_by_count(len(entries), partial(self._find_other_vector, entries, data_paths))
            if other_vector is not None:
                file = other_vector.file
                raise Collision(
                    "deletion-vector",
                    f"{file.referenced_data_file} has a deletion vector already: {make_file_key(file)}, added by "
                    f"snapshot {other_vector.snapshot_id}. Merge it into the new vector and remove it in the same "
                    "change",
                )

    def _list_files_with_new_vector(self) -> set[str]:
        """Return the paths of the data files for which the change adds deletion vectors."""
        referenced = {file.referenced_data_file for file in self._change.deletes if file.is_deletion_vector}
        return {path for path in referenced if path is not None}

    def _find_other_vector(self, entries: Sequence[ManifestEntry], paths: Collection[str]) -> ManifestEntry | None:
        """Return the first deletion vector of a data file in `paths` that the change does not remove, or None."""
        return next(
            (
                entry
                for entry in entries
                if entry.file.is_deletion_vector
                and entry.file.referenced_data_file in paths
                and make_file_key(entry.file) not in self._files_to_remove.removed
            ),
            None,
        )

    # Checks of the snapshots since the read

    async def _list_history(self, head: Snapshot | None, look_back: int) -> History | None:
        """Return the history since the read snapshot, or None if the change does not depend on a read.

        A change depends on a read if it has a scope, removes or replaces files, or deletes rows that it has read.

        Raises:
            Collision: There are too many later snapshots, or the read snapshot has expired or is not in the branch.
        """
        change = self._change
        has_scope = change.scope is not None or change.replaced is not None
        if not change.request.reads:
            return None
        depends_on_read = has_scope or change.request.remove
        if not depends_on_read and not await run_by_count(len(change.deletes), self._deletes_read_rows):
            return None
        read_snapshot_id = change.request.read_snapshot_id
        try:
            snapshots = list_later_snapshots(self._metadata, head, read_snapshot_id, look_back)
        except HistoryTooLong:
            raise Collision(
                "history",
                f"More than {look_back} snapshots were committed after snapshot {read_snapshot_id}; compute the "
                "change again from the current snapshot",
            ) from None
        if snapshots is None:
            raise Collision(
                "read-snapshot",
                f"Snapshot {read_snapshot_id}, which the change was computed from, has expired or is not an ancestor "
                f"of the head of {change.request.branch!r}; compute the change again from the current snapshot",
            )
        return History(self._manifests, self._metadata, snapshots)

    def _deletes_read_rows(self) -> bool:
        """Return whether the change adds deletes of rows that it has read.

        An equality delete without a partition deletes rows by value in the whole table, without a read.
        """
        return bool(self._change.position_deletes or self._list_partitioned_equality_deletes())

    async def _check_deletes(self, history: History, deletes: SelectedFiles, referenced_paths: set[str]) -> None:
        """Refuse the change if new deletes apply to rows of removed files, or to rows that the change rewrites.

        Otherwise, these deletes would be lost. A change that only deletes rows may delete rows that other commits have
        deleted, but not rows that other commits have rewritten. A snapshot that has added both deletes and data may
        have rewritten the deleted rows.

        Args:
            history: The snapshots since the read.
            deletes: The delete files that these snapshots added.
            referenced_paths: The data files to which the change's position deletes refer.

        Raises:
            Collision: A delete applies to such rows.
        """
        change = self._change
        removed_paths = await run_by_count(len(self._files_to_remove.files), self._list_removed_by_name)
        # New deletes of removed files would be lost.
        await self._refuse_matching(deletes, removed_paths, includes_all_deletes=True)
        writing_deletes = deletes if change.data else history.select_deletes_of_rewrites(deletes)
        if change.scope is not None and change.scope.bound is not None:
            # The change has read each row that it deletes by position, so these rows are in its scope.
            writing_deletes = await keep_matching_deletes(self._files, writing_deletes, change.scope.bound)
        await self._refuse_matching(writing_deletes, referenced_paths, includes_all_deletes=True)
        # A data file has at most one deletion vector, which hides older position delete files. New vectors of other
        # commits were found before.
        paths_with_new_vector = await run_by_count(len(change.deletes), self._list_files_with_new_vector)
        await self._refuse_matching(deletes, paths_with_new_vector, includes_all_deletes=False)
        # Position deletes that name no data file may apply to any file of their partition.
        deletes_without_data_file = await run_by_count(len(change.deletes), self._list_deletes_without_data_file)
        if deletes_without_data_file:
            partitions = await run_by_count(
                len(deletes_without_data_file), partial(list_partitions, deletes_without_data_file)
            )
            scope = ReadScope(partitions=partitions)
            await self._refuse_in_scope(writing_deletes, scope, "rewrote rows that the change deletes")

    def _list_removed_by_name(self) -> set[str]:
        """Return the paths of the removed data files that the request names explicitly."""
        by_name = set(self._change.request.remove)
        return {
            file.file_path
            for file in self._files_to_remove.files
            if file.content == DATA and make_file_key(file) in by_name
        }

    def _list_deletes_without_data_file(self) -> list[ContentFile]:
        """Return the position deletes of the change that name no data file, so they may apply to several."""
        return [file for file in self._change.position_deletes if file.referenced_data_file is None]

    async def _refuse_matching(self, deletes: SelectedFiles, paths: set[str], *, includes_all_deletes: bool) -> None:
        """Refuse the change if one of `deletes` applies to a data file at one of the paths.

        Args:
            deletes: Delete files that other commits have added.
            paths: The paths of data files.
            includes_all_deletes: Whether deletion vectors and equality deletes count. Position delete files always
                count, because a new deletion vector would hide them.

        Raises:
            Collision: A delete file applies to one of the data files.
        """
        if not paths or not deletes.selection.count():
            return
        (view, entry_ids), _ = await self._find_live_files(paths)
        joined_view = TableView(view.manifests, view.blocks, deletes.view.manifests, deletes.view.blocks)
        find = partial(self._find_pairs, joined_view, entry_ids, deletes, includes_all_deletes=includes_all_deletes)
        pairs = await run_by_count(joined_view.file_count + joined_view.delete_file_count, find)
        matching_pair = await find_first_match(self._files, joined_view, self._metadata, pairs)
        if matching_pair is not None:
            data_block, data_row = joined_view.locate(matching_pair[0])
            delete_block, delete_row = joined_view.locate_delete(matching_pair[1])
            raise Collision(
                "deletes",
                f"{delete_block.read_text('file_path', delete_row)}, committed since the read, deletes rows of "
                f"{data_block.read_text('file_path', data_row)}; compute the change again from the current snapshot",
            )

    def _find_pairs(
        self, joined_view: TableView, entry_ids: Longs, deletes: SelectedFiles, *, includes_all_deletes: bool
    ) -> list[tuple[int, int]]:
        """Return pairs of a data file and a delete file that applies to it.

        Args:
            joined_view: A view of the data files and the delete files.
            entry_ids: The entry ids of the data files.
            deletes: The delete files.
            includes_all_deletes: Whether deletion vectors and equality deletes count, besides position delete files.

        Returns:
            The entry id of the data file, and the position of the delete file among the view's delete files.
        """
        index = DeleteIndex(joined_view, self._metadata.partition_specs, self._metadata.schemas)
        selected_deletes = set(deletes.selection.list_positions().tolist())
        return [
            (entry_id, delete)
            for entry_id, deletes_of_file in zip(entry_ids.tolist(), index.find_deletes(entry_ids), strict=True)
            for delete in sorted(selected_deletes.intersection(deletes_of_file))
            if includes_all_deletes or _is_position_delete_file(joined_view, delete)
        ]

    async def _check_unnamed(self, history: History) -> None:
        """Refuse the change if its position deletes name no data file, and may apply to a removed data file.

        Raises:
            Collision: A position delete may apply to a removed data file, or the removed files are unknown.
        """
        deletes_without_data_file = await run_by_count(len(self._change.deletes), self._list_deletes_without_data_file)
        if not deletes_without_data_file:
            return
        for removed in await history.find_removed(deletes=False, replaced=True):
            if removed.files is None:
                raise Collision(
                    "file-gone",
                    f"The parent of snapshot {removed.snapshot.snapshot_id} has expired, so its removals are unknown; "
                    "compute the change again from the current snapshot",
                )
            file_and_path = await asyncio.to_thread(
                self._find_possible_delete, deletes_without_data_file, removed.files
            )
            if file_and_path is not None:
                file, path = file_and_path
                raise Collision(
                    "file-gone",
                    f"{file.file_path} may delete rows of {path.decode()}, which snapshot "
                    f"{removed.snapshot.snapshot_id} removed; compute the change again from the current snapshot",
                )

    def _find_possible_delete(
        self, deletes_without_data_file: Sequence[ContentFile], removed: SelectedFiles
    ) -> tuple[ContentFile, bytes] | None:
        """Return a position delete file and the path of a removed data file to which it may apply, or None.

        `deletes_without_data_file` are position delete files that do not name their data file, so they may apply to
        several data files.

        Files are compared by partition, and by the bounds of the paths in the delete file. After a maximum number of
        comparisons, every removed file counts as affected.
        """
        removed_files = find_files_at(removed.view, removed.selection.list_entry_ids())
        groups = group_by_partition(removed_files)
        paths_by_group: list[list[bytes]] = [[] for _ in groups.partitions]
        paths = removed_files.read_texts("file_path").list_values()
        for path, number in zip(paths, groups.numbers.tolist(), strict=True):
            if path is not None:
                paths_by_group[number].append(path)
        for paths_of_group in paths_by_group:
            paths_of_group.sort()
        for file in deletes_without_data_file:
            target = Targets(self._partitions, [(file.spec_id, file.partition)])
            for partition, paths_of_group in zip(groups.partitions, paths_by_group, strict=True):
                is_compared = self._partitions.may_compare(1)
                path = find_first_between(paths_of_group, file) if is_compared else next(iter(paths_of_group), None)
                if path is not None and (not is_compared or target.overlap(partition)):
                    return file, path
        return None

    async def _check_other_specs(self, history: History) -> None:
        """Refuse equality deletes if another commit has added files with a partition spec that no delete has.

        An equality delete with a partition applies only to files of the same partition spec. So it would not apply to
        rows that were written with a new spec, for example after a change of the bucket count. Files of compactions are
        checked as well.

        Raises:
            Collision: There is such a file in a partition of the deletes.
        """
        equality_deletes = await run_by_count(len(self._change.deletes), self._list_partitioned_equality_deletes)
        if not equality_deletes:
            return
        specs = {file.spec_id for file in equality_deletes}
        files = await history.find_added(deletes=False, include_compacted=True)
        selection = files.selection.copy()
        for number in np.flatnonzero(selection.state).tolist():
            block = files.view.blocks[number]
            if block.spec_id in specs:
                selection.keep(number, np.zeros(block.rows, dtype=np.bool_))
        partitions = await run_by_count(len(equality_deletes), partial(list_partitions, equality_deletes))
        scope = ReadScope(partitions=partitions)
        description = "wrote rows with a partition spec that none of the equality deletes has"
        await self._refuse_in_scope(SelectedFiles(files.view, selection), scope, description)

    def _list_partitioned_equality_deletes(self) -> list[ContentFile]:
        """Return the equality delete files of the change, or nothing if one of them has no partition.

        An equality delete file without a partition applies to all data files, so no partition or spec need be checked.
        """
        deletes = [file for file in self._change.deletes if file.content == EQUALITY_DELETES]
        return deletes if all(file.partition for file in deletes) else []

    async def _check_scope(self, history: History, deletes: SelectedFiles, scope: ReadScope) -> None:
        """Refuse the change if other commits have added or removed rows of a scope.

        Args:
            history: The snapshots since the read.
            deletes: The delete files that these snapshots added.
            scope: The rows that the change has read or replaces.

        Raises:
            Collision: Rows were added or removed, or the removed files are unknown.
        """
        added = await history.find_added(deletes=False)
        await self._refuse_in_scope(added, scope, "added rows that the change may have to read", are_data_files=True)
        await self._refuse_in_scope(deletes, scope, "added deletes of rows that the change has read")
        for are_deletes in (False, True):
            for removed in await history.find_removed(deletes=are_deletes, replaced=False):
                if removed.files is None:
                    raise Collision(
                        "scope",
                        f"The parent of snapshot {removed.snapshot.snapshot_id} has expired; its removals are unknown; "
                        "compute the change again from the current snapshot",
                    )
                description = "removed files that the change has read"
                await self._refuse_in_scope(removed.files, scope, description, are_data_files=not are_deletes)

    async def _refuse_in_scope(
        self, files: SelectedFiles, scope: ReadScope, description: str, *, are_data_files: bool = False
    ) -> None:
        """Check that no file may contain or delete rows of the scope.

        Args:
            files: Files that other commits have added or removed.
            scope: The rows that the change has read or replaces.
            description: Describes the files in the error message.
            are_data_files: Whether the files are data files. Their column bounds describe the rows that they contain.
                The bounds of delete files do not.

        Raises:
            Collision: A file may contain or delete rows of the scope.
        """
        select_in_scope = partial(self._select_in_scope, files, scope, are_data_files=are_data_files)
        # A thread evaluates the filter, because it may have two hundred thousand values.
        is_short = scope.bound in (None, TRUE) and files.selection.count() + len(scope.partitions) <= _IN_LOOP_FILES_MAX
        rows = select_in_scope() if is_short else await asyncio.to_thread(select_in_scope)
        if len(rows) and scope.bound is not None:
            keep_matching = keep_matching_data if are_data_files else keep_matching_deletes
            rows = (
                await keep_matching(self._files, _select_entries(files, rows), scope.bound)
            ).selection.list_entry_ids()
        if len(rows):
            block, local = files.view.locate(int(rows[0]))
            raise Collision(
                "scope",
                f"Since snapshot {self._change.request.read_snapshot_id} another commit {description}: "
                f"{block.read_text('file_path', local)}. Compute the change again from the current snapshot",
            )

    def _select_in_scope(self, files: SelectedFiles, scope: ReadScope, *, are_data_files: bool) -> Longs:
        """Return the entry ids of the files that may contain or delete rows of the scope, int64[files].

        A scope with a filter is compared with the partitions and, for data files, with the column bounds. Any other
        scope is compared with the partitions only.
        """
        selection = files.selection.copy()
        if scope.bound is not None:
            if scope.bound != TRUE:
                by_spec = {
                    spec.spec_id: project_inclusive(scope.bound, spec)
                    for spec in self._metadata.partition_specs
                    if spec.spec_id in files.view.specs
                }
                narrow_by_partition(selection, by_spec, never_expires)
                if are_data_files:
                    narrow_by_stats(selection, scope.bound, never_expires)
            return selection.list_entry_ids()
        rows = selection.list_entry_ids()
        groups = group_by_partition(find_files_at(files.view, rows))
        targets = self._make_targets(scope)
        overlaps = [targets.overlap(partition) for partition in groups.partitions]
        return rows[np.array(overlaps, dtype=np.bool_)[groups.numbers]] if len(rows) else rows

    def _make_targets(self, scope: ReadScope) -> Targets:
        """Return the partitions of a scope as targets of a comparison.

        The partitions are converted once for each scope, because they are compared with the files of many snapshots.
        """
        if self._targets is None or self._targets[0] is not scope:
            self._targets = scope, Targets(self._partitions, scope.partitions)
        return self._targets[1]


def _list_referenced_files(change: Change) -> tuple[set[str], set[str]]:
    """Return a tuple (all, not added) of paths of data files.

    The first set has the data files to which the change's position deletes refer. The second set has those of them
    that the change does not add.
    """
    paths = {file.referenced_data_file for file in change.position_deletes}
    referenced_paths = {path for path in paths if path is not None}
    return referenced_paths, referenced_paths - {file.file_path for file in change.data}


def _find_entry_ids(view: TableView, paths: Iterable[str]) -> tuple[Longs, str | None]:
    """Return the entry ids of the data files at these paths, and a path that is not in the view, or None.

    If several paths are missing, the lowest in byte order is returned.
    """
    searched_paths = {path.encode() for path in paths}
    missing_paths, entry_ids = set(searched_paths), list[int]()
    for number, block in enumerate(view.blocks):
        rows_by_path = find_rows_by_path(block, searched_paths)
        missing_paths.difference_update(rows_by_path)
        # An entry id consists of the number of the block (the files of one manifest) and the row in the block.
        entry_ids += [(number << ENTRY_BITS) | row for row in rows_by_path.values()]
    first_missing_path = min(missing_paths).decode() if missing_paths else None
    return np.array(sorted(entry_ids), dtype=np.int64), first_missing_path


def find_first_between(paths: Sequence[bytes], file: ContentFile) -> bytes | None:
    """Return the first of the sorted paths that is within the bounds of a position delete file, or None.

    A delete file with a missing bound may refer to any path in that direction.
    """
    low, high = (file.lower_bounds or {}).get(DELETED_PATH), (file.upper_bounds or {}).get(DELETED_PATH)
    position = 0 if low is None else bisect_left(paths, low)
    return paths[position] if position < len(paths) and (high is None or paths[position] <= high) else None


def _select_entries(files: SelectedFiles, entry_ids: Longs) -> SelectedFiles:
    """Return the files with these entry ids, as a selection of the same view."""
    mask = np.zeros(files.view.file_count, dtype=np.uint8)
    mask[files.view.find_positions(entry_ids)] = 1
    selection = files.selection.copy()
    selection.intersect(mask)
    return SelectedFiles(files.view, selection)


def _is_position_delete_file(view: TableView, delete: int) -> bool:
    """Return whether the file is a position delete file and not a deletion vector.

    Both have the same content type, but only a deletion vector has an offset in its file.
    """
    block, local = view.locate_delete(delete)
    return block.read_long("content", local) == POSITION_DELETES and block.read_long("content_offset", local) is None
