"""What collides with a change (docs/design/0004, "What conflicts"): what it rests on is not so any more.

The rule: a change that is let through could have been made just now with the same result, as far as its isolation asks.
In doubt it is refused. What is looked at are partitions, bounds, which files deletes apply to and, of small files that
a filter cannot rule out by these, the rows' values (`sparing.py`); so what is refused may have been right, and what is
let through is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from metaserver.commits.change import SERIALIZABLE, Change, ReadScope, partitions_of
from metaserver.commits.collision import Collision
from metaserver.commits.history import AddedFiles, History, TooLong, rows_of, since
from metaserver.commits.manifests import Manifests
from metaserver.commits.overlap import PartitionOverlap, Targets
from metaserver.commits.removing import FilesToRemove, key_of, live, referring
from metaserver.commits.sparing import first_meeting, spare_data, spare_deletes
from metaserver.iceberg.expressions.expression import TRUE
from metaserver.iceberg.expressions.projection import inclusive
from metaserver.iceberg.manifests.content_file import DATA, EQUALITY_DELETES, POSITION_DELETES, ContentFile
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.iceberg.types.reserved import DELETED_PATH
from metaserver.index.blocks.packing import Longs
from metaserver.objects.port import ObjectStore
from metaserver.planner.deletes.delete_index import DeleteIndex
from metaserver.planner.lookup.lookup import files_at
from metaserver.planner.lookup.partitions import group_by_partition
from metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats
from metaserver.planner.view.selection import never
from metaserver.planner.view.view import ROW_BITS, TableView

_IN_THREAD = 200
"""More files and partitions are compared in a thread."""


class Conflicts:
    """Of one change on one head. `listed` are the head's manifests, `found` what is to go of their files."""

    def __init__(
        self,
        objects: ObjectStore,
        manifests: Manifests,
        metadata: TableMetadata,
        listed: Sequence[ManifestFile],
        change: Change,
        found: FilesToRemove,
    ) -> None:
        self._objects = objects
        self._manifests = manifests
        self._metadata = metadata
        self._listed = live(listed)
        self._change = change
        self._found = found
        self._partitions = PartitionOverlap(metadata)

    async def check(self, head: Snapshot | None, look_back: int) -> None:
        """Collision where the change may not be applied to the head."""
        change = self._change
        if not (change.deletes or change.removes or change.scope):
            return
        named = {file.referenced_data_file for file in change.positional} - {None}
        referenced = {path for path in named if path is not None}
        await self._check_live(referenced - {file.file_path for file in change.data})
        await self._check_vectors()
        history = await self._history(head, look_back)
        if history is None or not history.snapshots:
            return
        deletes = await history.added(deletes=True)
        if deletes.selection.count():
            await self._check_deletes(history, deletes, referenced)
        await self._check_unnamed(history)
        await self._check_other_specs(history)
        if change.request.isolation == SERIALIZABLE:
            # Rows that go unread are no less lost for what else was read.
            for scope in (change.scope, None if change.replaced is change.scope else change.replaced):
                if scope is not None:
                    await self._check_scope(history, deletes, scope)
        elif change.replaced is not None:
            await self._refuse_in_scope(deletes, change.replaced, "added deletes of rows that are to be replaced")

    # What stands

    async def _check_live(self, paths: set[str]) -> None:
        _, missing = await self._standing(paths)
        if missing:
            raise Collision(
                "file-gone",
                f"There are deletes for {min(missing)[:1000]}, which is not live any more; begin again from what "
                "stands now",
            )

    async def _standing(self, paths: set[str]) -> tuple[tuple[TableView, Longs], set[str]]:
        """The live data files at these paths, as rows of a view; and which are not live."""
        data = [one for one in self._listed if one.content == DATA]
        holding = await self._manifests.holding(data, paths)
        view = TableView(holding, await self._manifests.blocks(holding))
        missing, rows = set(paths), []
        for number, block in enumerate(view.blocks):
            mine = rows_of(block, paths)
            missing -= mine.keys()
            rows += [(number << ROW_BITS) | row for row in mine.values()]
        return (view, np.array(sorted(rows), dtype=np.int64)), missing

    async def _check_vectors(self) -> None:
        """A data file has one deletion vector: another that stands must be named among what goes."""
        vectors = {file.referenced_data_file for file in self._change.deletes if file.is_deletion_vector} - {None}
        paths = [path for path in vectors if path is not None]
        for _, entries in await referring(self._manifests, self._listed, paths, self._metadata):
            for entry in entries:
                file = entry.file
                if file.is_deletion_vector and file.referenced_data_file in vectors and not self._goes(file):
                    raise Collision(
                        "deletion-vector",
                        f"{file.referenced_data_file} has a deletion vector already, {key_of(file)}, by snapshot "
                        f"{entry.snapshot_id}; merge it into the new one, and remove it with it",
                    )

    def _goes(self, file: ContentFile) -> bool:
        return key_of(file) in self._found.gone

    # What happened

    async def _history(self, head: Snapshot | None, look_back: int) -> History | None:
        """None where nothing rests on what was read."""
        change = self._change
        scoped = change.scope is not None or change.replaced is not None
        rests = scoped or change.request.remove or change.positional or self._keyed()
        if not rests or not change.request.reads:
            return None
        read = change.request.read_snapshot_id
        try:
            snapshots = since(self._metadata, head, read, look_back)
        except TooLong:
            raise Collision(
                "history", f"More than {look_back} snapshots came after {read}; begin again from what stands now"
            ) from None
        if snapshots is None:
            raise Collision(
                "read-snapshot",
                f"The snapshot {read}, which the change was computed from, is no ancestor of the head of "
                f"{change.request.branch!r}, or has expired; begin again from what stands now",
            )
        return History(self._manifests, self._metadata, snapshots)

    async def _check_deletes(self, history: History, deletes: AddedFiles, referenced: set[str]) -> None:
        """New deletes of rows of files that go, or whose rows are written anew, would be lost.

        Who only deletes may delete what others have deleted, but not what they have written anew.
        """
        change = self._change
        by_name = set(change.request.remove)
        gone = {file.file_path for file in self._found.files if file.content == DATA and key_of(file) in by_name}
        await self._refuse_applying(deletes, gone, vectors=True)
        writing = deletes if change.data else history.writing(deletes)
        if change.scope is not None and change.scope.bound is not None:
            # What the change deletes by position it has read, so it is of the scope.
            writing = await spare_deletes(self._objects, writing, change.scope.bound)
        await self._refuse_applying(writing, referenced, vectors=True)
        covered = {file.referenced_data_file for file in change.deletes if file.is_deletion_vector}
        await self._refuse_applying(deletes, {path for path in covered if path is not None}, vectors=False)
        unnamed = [file for file in change.positional if file.referenced_data_file is None]
        if unnamed:
            scope = ReadScope(partitions=partitions_of(unnamed))
            await self._refuse_in_scope(writing, scope, "wrote rows anew that are to be deleted")

    async def _refuse_applying(self, deletes: AddedFiles, paths: set[str], *, vectors: bool) -> None:
        """`vectors`: deletion vectors count, and equality deletes; else position deletes alone, which a deletion vector
        would hide."""
        if not paths or not deletes.selection.count():
            return
        (view, rows), _ = await self._standing(paths)
        joined = TableView(view.manifests, view.blocks, deletes.view.manifests, deletes.view.blocks)
        index = DeleteIndex(joined, self._metadata.partition_specs, self._metadata.schemas)
        fresh = set(deletes.selection.positions().tolist())
        pairs = [
            (row, delete)
            for row, applying in zip(rows.tolist(), index.deletes_for(rows), strict=True)
            for delete in sorted(fresh.intersection(applying))
            if vectors or _has_positions_alone(joined, delete)
        ]
        hit = await first_meeting(self._objects, joined, self._metadata, pairs)
        if hit is not None:
            (file, at), (block, local) = joined.locate(hit[0]), joined.locate_delete(hit[1])
            raise Collision(
                "deletes",
                f"{block.text('file_path', local)}, committed since, deletes rows of {file.text('file_path', at)}; "
                "begin again from what stands now",
            )

    async def _check_unnamed(self, history: History) -> None:
        """Position deletes that do not say of which data file: none that they could be of may have gone."""
        unnamed = [file for file in self._change.positional if file.referenced_data_file is None]
        if not unnamed:
            return
        for went in await history.removed(deletes=False, replaced=True):
            if went.files is None:
                raise Collision("file-gone", f"Nobody knows what snapshot {went.snapshot.snapshot_id} removed")
            hit = await asyncio.to_thread(self._may_delete, unnamed, went.files)
            if hit is not None:
                file, path = hit
                raise Collision(
                    "file-gone",
                    f"{file.file_path} may delete rows of {path.decode()}, which snapshot "
                    f"{went.snapshot.snapshot_id} removed; begin again from what stands now",
                )

    def _may_delete(self, unnamed: Sequence[ContentFile], went: AddedFiles) -> tuple[ContentFile, bytes] | None:
        """A position delete file and the path of one that went which it may be of."""
        found = files_at(went.view, went.selection.rows())
        groups = group_by_partition(found)
        paths = found.texts("file_path").values()
        for file in unnamed:
            target = Targets(self._partitions, [(file.spec_id, file.partition)])
            meets = [target.overlap(one) for one in groups.partitions]
            low, high = (file.lower_bounds or {}).get(DELETED_PATH), (file.upper_bounds or {}).get(DELETED_PATH)
            for path, number in zip(paths, groups.numbers.tolist(), strict=True):
                if path is None or not meets[number]:
                    continue
                if (low is None or path >= low) and (high is None or path <= high):
                    return file, path
        return None

    async def _check_other_specs(self, history: History) -> None:
        """Equality deletes of a partition take rows of their own spec's files alone. What was written by a spec that
        none of them is of, as after a resize of buckets, would keep its rows: by whomever, compactions too."""
        keyed = self._keyed()
        if not keyed:
            return
        specs = {file.spec_id for file in keyed}
        came = await history.added(deletes=False, replaced=True)
        selection = came.selection.copy()
        for number in np.flatnonzero(selection.state).tolist():
            block = came.view.blocks[number]
            if block.spec_id in specs:
                selection.keep(number, np.zeros(block.rows, dtype=np.bool_))
        scope = ReadScope(partitions=partitions_of(keyed))
        what = "wrote rows by a partition spec that none of the equality deletes is of"
        await self._refuse_in_scope(AddedFiles(came.view, selection), scope, what)

    def _keyed(self) -> list[ContentFile]:
        """The equality deletes, where each is of a partition: one of none is for all files."""
        found = [file for file in self._change.deletes if file.content == EQUALITY_DELETES]
        return found if all(file.partition for file in found) else []

    async def _check_scope(self, history: History, deletes: AddedFiles, scope: ReadScope) -> None:
        added = await history.added(deletes=False)
        await self._refuse_in_scope(added, scope, "added rows that the change may have had to read", stats=True)
        await self._refuse_in_scope(deletes, scope, "added deletes of rows that the change has read")
        for of_deletes in (False, True):
            for went in await history.removed(deletes=of_deletes, replaced=False):
                if went.files is None:
                    raise Collision("scope", f"Nobody knows what snapshot {went.snapshot.snapshot_id} removed")
                what = "removed files that the change has read"
                await self._refuse_in_scope(went.files, scope, what, stats=not of_deletes)

    async def _refuse_in_scope(self, came: AddedFiles, scope: ReadScope, what: str, *, stats: bool = False) -> None:
        """Collision where one of the files may hold, or delete, rows of the scope. `stats`: their bounds are of rows
        that they hold."""
        size = came.selection.count() + len(scope.partitions)
        read = partial(self._in_scope, came, scope, stats=stats)
        rows = read() if size <= _IN_THREAD else await asyncio.to_thread(read)
        if len(rows) and scope.bound is not None:
            spare = spare_data if stats else spare_deletes
            rows = (await spare(self._objects, _chosen(came, rows), scope.bound)).selection.rows()
        if len(rows):
            block, local = came.view.locate(int(rows[0]))
            raise Collision(
                "scope",
                f"Since snapshot {self._change.request.read_snapshot_id} others {what}: "
                f"{block.text('file_path', local)}; begin again from what stands now",
            )

    def _in_scope(self, came: AddedFiles, scope: ReadScope, *, stats: bool) -> Longs:
        """int64[files], rows of the view."""
        selection = came.selection.copy()
        if scope.bound is not None:
            if scope.bound != TRUE:
                specs = {spec.spec_id: inclusive(scope.bound, spec) for spec in self._metadata.partition_specs}
                by_spec = {number: demand for number, demand in specs.items() if number in came.view.specs}
                narrow_by_partition(selection, by_spec, never)
                if stats:
                    narrow_by_stats(selection, scope.bound, never)
            return selection.rows()
        rows = selection.rows()
        groups = group_by_partition(files_at(came.view, rows))
        targets = Targets(self._partitions, scope.partitions)
        meets = [targets.overlap(one) for one in groups.partitions]
        return rows[np.array(meets, dtype=np.bool_)[groups.numbers]] if len(rows) else rows


def _chosen(came: AddedFiles, rows: Longs) -> AddedFiles:
    """These rows of the view alone."""
    numbers, local = came.view.split(rows)
    kept = np.zeros(came.view.rows, dtype=np.uint8)
    kept[np.asarray(came.view.starts, dtype=np.int64)[numbers] + local] = 1
    selection = came.selection.copy()
    selection.intersect(kept)
    return AddedFiles(came.view, selection)


def _has_positions_alone(view: TableView, delete: int) -> bool:
    """Whether it is a position delete file, and no deletion vector."""
    block, local = view.locate_delete(delete)
    return block.long("content", local) == POSITION_DELETES and block.long("content_offset", local) is None
