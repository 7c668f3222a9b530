"""One change, from its request to a snapshot on whatever parent it gets; again on another where a race was lost.

`prepare` is done before the turn: the files are checked and the manifests of what is added are written. `apply` is done
in it: what the change removes is looked for, what happened since it read is checked, the rest is written. What one
attempt has written serves the next where it still fits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from metaserver.catalog.own_files import own_places
from metaserver.catalog.parts import CatalogContext
from metaserver.catalog.values import Caller
from metaserver.commits.change import Change, ChangeRequest, TableShape, read_change, shape_of
from metaserver.commits.collision import Collision
from metaserver.commits.conflicts import Conflicts
from metaserver.commits.manifests import Manifests
from metaserver.commits.merging import Merging
from metaserver.commits.producing import Produced, produce
from metaserver.commits.removing import Removing, find, key_of, live
from metaserver.commits.replacing import replaced_files
from metaserver.commits.summary import NOTHING, SummaryCounts, counts_of
from metaserver.commits.writing import StoredManifest, Writer, write_added
from metaserver.errors import AlreadyExists, BadRequest, Forbidden
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.properties import metadata_folder
from metaserver.iceberg.metadata.snapshot import MAIN, Snapshot
from metaserver.planner.plan.planner import Planner

_IN_THREAD_FILES = 200
"""More are decoded in a thread."""


class ChangeApplication:
    """Belongs to one request."""

    def __init__(
        self,
        parts: CatalogContext,
        manifests: Manifests,
        planner: Planner,
        caller: Caller,
        request: ChangeRequest,
        uuid: str,
    ) -> None:
        """`uuid`: the table's, as the database has it."""
        self._parts = parts
        self._uuid = uuid
        self._manifests = manifests
        self._planner = planner
        self._caller = caller
        self.request = request
        self._shape: TableShape | None = None
        self._change: Change | None = None
        self._counts = NOTHING
        self._added: tuple[StoredManifest, ...] = ()
        self._writer: Writer | None = None
        self._removing: Removing | None = None
        self._merging: Merging | None = None
        self._needed: frozenset[str] = frozenset()

    @property
    def written(self) -> list[str]:
        """Everything that was stored for it."""
        return [] if self._writer is None else self._writer.written

    @property
    def unneeded(self) -> list[str]:
        """What was stored and the last snapshot that was made does not lead to."""
        return [path for path in self.written if path not in self._needed]

    async def prepare(self, metadata: TableMetadata) -> None:
        """BadRequest or Forbidden for files that do not fit; what is added is stored then."""
        shape = shape_of(metadata)
        if self._shape == shape:
            return
        check_path = await self._path_check(metadata)

        def read() -> tuple[Change, SummaryCounts]:
            change = read_change(self.request, metadata, check_path)
            return change, counts_of((*change.data, *change.deletes))

        few = len(self.request.add) <= _IN_THREAD_FILES
        change, counts = read() if few else await asyncio.to_thread(read)
        if self._writer is None:
            self._begin(metadata)
        assert self._writer is not None
        self._added = await write_added(self._writer, change, metadata)
        self._change, self._counts, self._shape = change, counts, shape

    async def warm(self, metadata: TableMetadata) -> None:
        """Reads before the turn what will be looked through in it, so that others wait for less. What comes of it is
        nobody's yet: it is asked again on what stands then."""
        change = self._change
        assert change is not None
        if not (change.removes or change.deletes):
            return
        parent = head_of(self.request.branch, metadata)
        listed = live(await self._manifests.listed(parent))
        named = {one.file_path for one in self.request.remove}
        named |= {file.referenced_data_file for file in change.deletes if file.referenced_data_file is not None}
        await self._manifests.holding(listed, named)
        if change.replaced is not None:
            with contextlib.suppress(BadRequest):
                await replaced_files(self._planner, metadata, parent, change.replaced)

    def _begin(self, metadata: TableMetadata) -> None:
        parts = self._parts
        folder = metadata_folder(metadata.location, metadata.properties)
        parts.warehouse.check(folder, "The folder of the table's metadata")
        snapshot_id = int.from_bytes(parts.clock.random_bytes(8), "big") >> 1 or 1
        self._writer = Writer(parts.objects, parts.clock, self._manifests, folder, snapshot_id)
        self._removing = Removing(self._writer, self._manifests)
        self._merging = Merging(self._writer, self._manifests)

    async def _path_check(self, metadata: TableMetadata) -> Callable[[str], object]:
        """Files lie in the warehouse. Who may not write all of it adds files in the places of this table alone: else
        another table's could be read, and deleted, by way of this one. The places are those in the database, since
        the metadata file may have been written over."""
        warehouse = self._parts.warehouse
        if self._caller.confined_to is None:
            return lambda path: warehouse.parse(path, "The file")
        own = await own_places(self._parts, self._uuid)

        def check(path: str) -> None:
            warehouse.parse(path, "The file")
            if not own.holds(path):
                raise Forbidden(
                    f"The file {path[:500]!r} lies outside the folders of the table, where {self._caller.who} may "
                    f"write; put it below {metadata.location}"
                )

        return check

    async def apply(self, metadata: TableMetadata) -> Produced:
        """The snapshot on the head of the branch in `metadata`; stored, and nobody knows of it.

        Collision where the change cannot be applied to what stands there now.
        """
        await self.prepare(metadata)
        change, writer = self._change, self._writer
        assert change is not None
        assert writer is not None
        assert self._merging is not None
        assert self._removing is not None
        parent = head_of(self.request.branch, metadata)
        listed = await self._manifests.listed(parent)
        # They may be merged into manifests of this table's.
        await self._planner.check_paths(metadata, self._uuid, [one.manifest_path for one in listed])
        await self._check_new(change, listed, metadata)
        wanted = set(self.request.remove)
        if change.replaced is not None:
            wanted |= await replaced_files(self._planner, metadata, parent, change.replaced)
        found = await find(self._manifests, listed, wanted, metadata)
        conflicts = Conflicts(self._parts.objects, self._manifests, metadata, listed, change, found)
        await conflicts.check(parent, self._parts.settings.commit_history_limit)
        sequence_number = metadata.last_sequence_number + 1 if metadata.format_version > 1 else 0
        removed = await self._removing.remove(listed, found, metadata, sequence_number)
        made = await produce(
            writer,
            change,
            self._added,
            self._counts,
            removed,
            metadata,
            parent,
            merging=self._merging,
            now_ms=self._parts.clock.now_ms(),
        )
        self._needed = made.needed
        return made

    async def _check_new(self, change: Change, listed: tuple[ManifestFile, ...], metadata: TableMetadata) -> None:
        """AlreadyExists for a file that is live, as far as that is known without reading: a change that comes again
        after its reply was lost must not count twice, and its files are not to be deleted."""
        fresh = {key_of(file) for file in (*change.data, *change.deletes)}
        for manifest in self._manifests.known_to_hold(listed, {one.file_path for one in fresh}):
            for entry in await self._manifests.entries(manifest, metadata):
                if key_of(entry.file) in fresh:
                    raise AlreadyExists(
                        f"The file {entry.file.file_path} is in the table already, by snapshot {entry.snapshot_id}; "
                        "nothing was changed. Keep the file"
                    )


def head_of(branch: str, metadata: TableMetadata) -> Snapshot | None:
    """The snapshot that a commit to the branch follows; None for `main` of an empty table. Collision where there is no
    such branch."""
    ref = metadata.refs.get(branch)
    if ref is None:
        if branch == MAIN and metadata.current_snapshot is None:
            return None
        if branch != MAIN:
            raise Collision("branch", f"The table has no branch {branch[:100]!r}; a commit creates none")
        return metadata.current_snapshot
    if not ref.is_branch:
        raise BadRequest(f"{branch[:100]!r} is a tag; commits go to branches")
    return metadata.snapshot(ref.snapshot_id)
