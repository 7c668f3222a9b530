"""Applies one change: creates its snapshot on the current head of the branch, and on each new head after a lost race.

`prepare` runs before the commit lock is taken. It checks the files and writes the manifests of the added files. `apply`
runs under the lock. It finds the files to remove, checks for conflicts, and writes all other files. Later attempts
reuse files of earlier attempts that are still valid.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.manifests.writer import ManifestEntry
from seamark.formats.iceberg.metadata.compaction import UNDONE
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN, Snapshot
from seamark.formats.runtime.errors import AlreadyExists, BadRequest, Forbidden
from seamark.formats.runtime.fair_lock import free_later
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.large_requests import LARGE_BYTES
from seamark.metaserver.catalog.ownership.own_files import list_own_locations
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.change_requests.change import (
    Change,
    ChangeRequest,
    TableShape,
    read_change,
    read_shape,
)
from seamark.metaserver.commit.change_requests.change_body import Remove
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.commit.conflicts.conflicts import ConflictCheck
from seamark.metaserver.commit.conflicts.key_comparison import CheckedFiles
from seamark.metaserver.commit.conflicts.overwrite import find_replaced_files
from seamark.metaserver.commit.conflicts.row_counts import check_row_counts
from seamark.metaserver.commit.conflicts.undo import Undo, compute_undo
from seamark.metaserver.commit.removed_files import check_stored, is_recent, read_removal_note
from seamark.metaserver.commit.snapshots.manifest_filter import (
    ManifestFilter,
    RewrittenManifests,
    drop_dead_manifests,
    find_files,
    make_file_key,
)
from seamark.metaserver.commit.snapshots.manifest_merge import ManifestMerge
from seamark.metaserver.commit.snapshots.manifests import Manifests, run_by_count
from seamark.metaserver.commit.snapshots.removal_filter import RemovalFilter
from seamark.metaserver.commit.snapshots.snapshot_producer import ProducedSnapshot, SnapshotTerms, produce_snapshot
from seamark.metaserver.commit.snapshots.snapshot_writer import (
    SnapshotWriter,
    StoredManifest,
    open_writer,
    write_added,
)
from seamark.metaserver.commit.snapshots.summary import NOTHING, SummaryCounts, count_files
from seamark.metaserver.planner.plan.planner import Planner

DECODED_BYTES_MAX = 2 << 30
"""The memory limit for the decoded manifests of one change."""
_IN_LOOP_FILES_MAX = 200
"""The maximum number of added files that are decoded in the event loop. A thread decodes more files."""


class LocationChecks:
    """Checks that the table may refer to the files that a change reads. An instance belongs to one attempt.

    Writers can overwrite manifest lists and manifests after their commit. Therefore the server checks each path before
    it reads the file. Otherwise, the outcome of a change could reveal the content of another table's file. Each
    folder is checked once.
    """

    def __init__(self, planner: Planner, metadata: TableMetadata, uuid: str) -> None:
        self._planner = planner
        self._metadata = metadata
        self._uuid = uuid
        self._checked_folders: set[str] = set()

    async def __call__(self, paths: Iterable[str]) -> None:
        """Check that no path is in a location that another table claims.

        Raises:
            Forbidden: A path is in the location of another table.
        """
        # One path of each folder that is not checked yet.
        path_by_folder = {
            folder: path for path in paths if (folder := path.rpartition("/")[0]) not in self._checked_folders
        }
        if path_by_folder:
            await self._planner.check_paths(self._metadata, self._uuid, list(path_by_folder.values()))
            self._checked_folders |= path_by_folder.keys()


class ChangeApplication:
    """The attempts of one change. An instance belongs to one request."""

    def __init__(
        self,
        context: CatalogContext,
        manifests: Manifests,
        planner: Planner,
        caller: Caller,
        request: ChangeRequest,
        uuid: str,
    ) -> None:
        """Prepare the application of a change.

        Args:
            uuid: The UUID of the table in the database. The metadata file may state a different UUID.
            context: The database, the storage and the settings.
            manifests: Reads manifests through the caches.
            planner: Plans the filters of the change, and checks paths.
            caller: The principal that sends the change.
            request: The change.
        """
        self._context = context
        self._uuid = uuid
        self._manifests = manifests
        self._planner = planner
        self._caller = caller
        self.request = request
        self._shape: TableShape | None = None
        self._change: Change | None = None
        self._counts = NOTHING
        self._added_keys: frozenset[Remove] = frozenset()
        """The keys of the added files."""
        self._added_manifests: tuple[StoredManifest, ...] = ()
        self._writer: SnapshotWriter | None = None
        self._manifest_filter: ManifestFilter | None = None
        self._manifest_merge: ManifestMerge | None = None
        self._removal_filter: RemovalFilter | None = None
        self._needed_paths: frozenset[str] = frozenset()
        self._removal_note: str | None = None
        """The note of the last removal of orphan files after which the added files were found in storage."""

    @property
    def written(self) -> list[str]:
        """The locations of all files that were stored for the change."""
        return [] if self._writer is None else self._writer.written

    @property
    def unneeded(self) -> list[str]:
        """The stored files that the snapshot of the last attempt does not refer to."""
        return [path for path in self.written if path not in self._needed_paths]

    async def settle(self) -> None:
        """Wait until the files of the change are stored.

        If a file could not be stored, its error is raised, and the change is not applied.
        """
        if self._writer is not None:
            await self._writer.settle()

    def end(self) -> None:
        """Release the memory of the change's files. Call this after the last attempt."""
        change, added_keys = self._change, self._added_keys
        self._change, self._added_keys = None, frozenset()
        if change is not None:
            free_later(change.data, change.deletes, added_keys)

    async def prepare(self, metadata: TableMetadata) -> None:
        """Check the files and store the manifests of added files.

        If the parts of the metadata on which this depends have not changed since the last attempt, nothing is done.
        The last step checks that no removal of orphan files has deleted an added file.

        Raises:
            BadRequest: A file does not fit the table, or a removal of orphan files has deleted it.
            Forbidden: A file is in a location that the caller may not write.
        """
        shape = read_shape(metadata)
        if self._shape == shape:
            return
        check_path = await self._make_path_check(metadata)

        def read() -> tuple[Change, SummaryCounts, frozenset[Remove]]:
            change = read_change(self.request, metadata, check_path)
            files = (*change.data, *change.deletes)
            return change, count_files(files), frozenset(map(make_file_key, files))

        is_small = len(self.request.add) <= _IN_LOOP_FILES_MAX and self._caller.request_bytes <= LARGE_BYTES
        change, counts, added_keys = read() if is_small else await asyncio.to_thread(read)
        await self._context.objects.check_links([file.file_path for file in (*change.data, *change.deletes)])
        if self._writer is None:
            await self._create_writers(metadata)
        assert self._writer is not None
        self._added_manifests = await write_added(self._writer, change, metadata)
        self._change, self._counts, self._added_keys, self._shape = change, counts, added_keys, shape
        await self._check_stored(await read_removal_note(self._context, self._uuid))

    async def _check_stored(self, note: str | None) -> None:
        """Check that no removal of orphan files has deleted an added file.

        A note that was checked before is not checked again.

        Args:
            note: The note of the table's last removal of orphan files (files to which no metadata refer), or None.

        Raises:
            BadRequest: A removal has deleted an added file.
        """
        change = self._change
        if note is None or note == self._removal_note:
            return
        assert change is not None
        if await is_recent(self._context, note):
            paths = await run_by_count(
                len(self.request.add), lambda: [file.file_path for file in (*change.data, *change.deletes)]
            )
            await check_stored(self._context, paths)
        self._removal_note = note

    async def preload(self, metadata: TableMetadata) -> None:
        """Read the files that `apply` will need into the caches, before the lock is taken.

        So other changes wait less. The current snapshot of the branch may change before the lock is taken. `apply` then
        reads the files for the new snapshot.

        Errors of a change that does not fit are ignored here, because `apply` raises them for the current snapshot.
        """
        change = self._change
        assert change is not None
        if not (change.removes or change.deletes):
            return
        parent = find_head(self.request.branch, metadata)
        manifests = self._manifests.with_checks(LocationChecks(self._planner, metadata, self._uuid), DECODED_BYTES_MAX)
        if self.request.undo_snapshot_id is not None:
            with contextlib.suppress(BadRequest, Collision):
                undo = await compute_undo(manifests, metadata, parent, self.request.undo_snapshot_id)
                await self._restore_removals(manifests, metadata, undo)
            return
        live_manifests = drop_dead_manifests(await manifests.read_list(parent))

        def list_paths() -> set[str]:
            referenced_paths = (file.referenced_data_file for file in change.deletes)
            removed_paths = (remove.file_path for remove in self.request.remove)
            return {*removed_paths, *(path for path in referenced_paths if path is not None)}

        await manifests.find_listing_manifests(
            live_manifests, await run_by_count(len(self.request.remove) + len(change.deletes), list_paths)
        )
        if change.replaced is not None:
            with contextlib.suppress(BadRequest):
                await find_replaced_files(self._planner, metadata, parent, change.replaced)

    async def _create_writers(self, metadata: TableMetadata) -> None:
        self._writer = await open_writer(self._context, self._manifests, self._uuid, metadata, is_deferred=True)
        self._manifest_filter = ManifestFilter(self._writer, self._manifests)
        self._manifest_merge = ManifestMerge(self._writer, self._manifests)

    async def _make_path_check(self, metadata: TableMetadata) -> Callable[[str], object]:
        """Return a function that checks the location of a file.

        A location must be in the warehouse. If the writer is confined to some namespaces, the files must also be in the
        locations of the table. Otherwise, the table would give access to files of another table. The locations of the
        table come from the database, because a writer may overwrite the metadata file.
        """
        warehouse = self._context.warehouse
        if self._caller.confined_to is None:
            return lambda path: warehouse.parse(path, "The file")
        own_locations = await list_own_locations(self._context, self._uuid)

        def check(path: str) -> None:
            warehouse.parse(path, "The file")
            if not own_locations.holds(path):
                raise Forbidden(
                    f"The file {path[:500]!r} is outside the folders of the table; {self._caller.principal_name} may "
                    "write only "
                    f"there. Write the file below {metadata.location}"
                )

        return check

    async def apply(self, metadata: TableMetadata, removal_note: str | None) -> ProducedSnapshot:
        """Store a snapshot on the head of the branch in `metadata`. No pointer refers to the snapshot yet.

        Args:
            metadata: The current metadata of the table.
            removal_note: The note of the table's last removal of orphan files, read under the lock.

        Raises:
            Collision: The change conflicts with the current head.
        """
        await self.prepare(metadata)
        await self._check_stored(removal_note)
        change, writer = self._change, self._writer
        assert change is not None
        assert writer is not None
        assert self._manifest_merge is not None
        assert self._manifest_filter is not None
        parent = find_head(self.request.branch, metadata)
        check_paths = LocationChecks(self._planner, metadata, self._uuid)
        manifests = self._manifests.with_checks(check_paths, DECODED_BYTES_MAX)
        removals = await run_by_count(len(self.request.remove), partial(set[Remove], self.request.remove))
        summary = self.request.summary
        undo: Undo | None = None
        if self.request.undo_snapshot_id is not None:
            undo = await compute_undo(manifests, metadata, parent, self.request.undo_snapshot_id)
            metadata = await self._restore_removals(manifests, metadata, undo)
            parent = find_head(self.request.branch, metadata)
            removals |= undo.added
            summary = {**summary, UNDONE: str(self.request.undo_snapshot_id)}
        parent_manifests = await manifests.read_list(parent)
        await self._check_not_live(parent_manifests, metadata)
        if change.replaced is not None:
            removals |= await find_replaced_files(self._planner, metadata, parent, change.replaced)
        to_remove = await find_files(manifests, parent_manifests, removals, metadata)
        files = CheckedFiles(self._context.objects, check_paths)
        added, counts = self._added_manifests, self._counts
        if undo is None:
            conflicts = ConflictCheck(files, manifests, metadata, parent_manifests, change, to_remove)
            await conflicts.check(parent, self._context.settings.commit_history_limit)
            await check_row_counts(manifests, parent_manifests, change, to_remove)
        else:  # The undo has already checked the later commits.
            added, counts = await self._restore(undo, metadata), count_files(undo.restored_files)
        new_deletes = change.deletes if undo is None else undo.restored_files
        vectors = await run_by_count(
            len(new_deletes), lambda: {file.file_path for file in new_deletes if file.is_deletion_vector}
        )
        to_remove = to_remove._replace(in_use=to_remove.in_use | vectors)
        sequence_number = metadata.last_sequence_number + 1 if metadata.format_version > 1 else 0
        if undo is not None and undo.manifests:
            rewritten = RewrittenManifests(undo.manifests, ())
        else:
            rewritten = await self._manifest_filter.remove(parent_manifests, to_remove, metadata, sequence_number)
        request = self.request
        produced = await produce_snapshot(
            writer,
            SnapshotTerms(change.operation, request.branch, summary, request.producer),
            added,
            counts,
            rewritten,
            metadata,
            parent,
            # A merge could remove the old manifests that the undo restores.
            merge=None if undo is not None and undo.manifests else self._manifest_merge,
            now_ms=self._context.clock.now_ms(),
        )
        self._needed_paths = (
            produced.needed_paths
            if self._removal_filter is None
            else produced.needed_paths | self._removal_filter.written
        )
        return produced

    async def _restore_removals(self, manifests: Manifests, metadata: TableMetadata, undo: Undo) -> TableMetadata:
        """Return table metadata in whose snapshots no manifest marks a restored file as DELETED.

        Raises:
            BadRequest: The table has more than `commit_history_limit` snapshots since the undone snapshot.
        """
        assert self._writer is not None
        assert self.request.undo_snapshot_id is not None
        undone = metadata.snapshot(self.request.undo_snapshot_id)
        if undone is None or not undo.removed:
            return metadata
        if self._removal_filter is None:
            self._removal_filter = RemovalFilter(self._writer)
        limit, paths = self._context.settings.commit_history_limit, {file.file_path for file in undo.restored_files}
        return await self._removal_filter.drop_removals(manifests, metadata, undone, paths, snapshots_max=limit)

    async def _restore(self, undo: Undo, metadata: TableMetadata) -> tuple[StoredManifest, ...]:
        """Store manifests of the files that an undo adds to the table again.

        Raises:
            Forbidden: The caller may not add one of the files.
        """
        assert self._writer is not None
        check_path = await self._make_path_check(metadata)
        restored = undo.restored_files
        await run_by_count(len(restored), lambda: [check_path(file.file_path) for file in restored])
        stored_manifests: list[StoredManifest] = []
        for spec_id, content, entries in await run_by_count(len(restored), undo.group_by_manifest):
            stored_manifests += await self._writer.write_manifests(entries, metadata, spec_id, content)
        return tuple(stored_manifests)

    async def _check_not_live(self, manifests: tuple[ManifestFile, ...], metadata: TableMetadata) -> None:
        """Check that no added file is already live, according to cached manifests.

        After a lost reply, a client may send a change again. Its files must not be added twice, and the server must not
        delete them after it refuses the change. Manifests whose paths are not in the cache are not searched.

        Raises:
            AlreadyExists: An added file is live.
        """
        if not manifests:
            return
        added_keys = self._added_keys
        paths = await run_by_count(len(added_keys), lambda: [key.file_path for key in added_keys])
        for manifest in await self._manifests.find_listing_manifests_in_cache(manifests, paths):
            entries = await self._manifests.read_entries(manifest, metadata)
            live_entry = await run_by_count(len(entries), partial(_find_first_entry, entries, added_keys))
            if live_entry is not None:
                raise AlreadyExists(
                    f"The file {live_entry.file.file_path} is in the table already, added by snapshot "
                    f"{live_entry.snapshot_id}; this change was not applied. Keep the file"
                )


def _find_first_entry(entries: Sequence[ManifestEntry], file_keys: Collection[Remove]) -> ManifestEntry | None:
    """Return the first entry whose file has one of the keys, or None."""
    return next((entry for entry in entries if make_file_key(entry.file) in file_keys), None)


def find_head(branch: str, metadata: TableMetadata) -> Snapshot | None:
    """Return the current snapshot of the branch, or None for `main` of an empty table.

    A new snapshot is based on this snapshot.

    Raises:
        BadRequest: The reference is a tag.
        Collision: The branch is unknown.
    """
    ref = metadata.refs.get(branch)
    if ref is None:
        if branch == MAIN and metadata.current_snapshot is None:
            return None
        if branch != MAIN:
            raise Collision(
                "branch",
                f"The table has no branch {branch[:100]!r}; create it first",
            )
        return metadata.current_snapshot  # Metadata without a reference `main` have only the current snapshot.
    if not ref.is_branch:
        raise BadRequest(f"{branch[:100]!r} is a tag; commits go to branches")
    return metadata.snapshot(ref.snapshot_id)
