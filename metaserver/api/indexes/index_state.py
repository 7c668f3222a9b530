"""The state of indexes: which files of a snapshot each index covers.

The state is computed from the registry, the index files and the view.

The listing of indexes and the builds share this module, so builds index exactly the files that are listed as missing. A
damaged or missing index file is quarantined immediately. Its data files then count as not indexed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from aiohttp import web

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.kinds.kind import UnknownVersion
from seamark.formats.runtime.errors import Corrupt, ObjectMissing
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.index.files.headers import IndexReader
from seamark.metaserver.index.files.refused_files import RefusedFiles
from seamark.metaserver.index.files.registry import IndexFiles
from seamark.metaserver.planner.indexes.coverage import FileIds, compute_view_file_ids
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import Entry, RegisteredIndexFile
from seamark.metaserver.store.port import InstantFilter

READER: web.AppKey[IndexReader] = web.AppKey("index_reader", IndexReader)
REFUSED_FILES: web.AppKey[RefusedFiles] = web.AppKey("refused_files", RefusedFiles)
_IN_LOOP_FILES_MAX = 5_000
"""The maximum number of files that are handled in the event loop. More files are handled in a thread."""
SNAPSHOTS_MAX = 32
"""The maximum number of snapshots of branches and tags that are indexed. Older snapshots are not indexed."""
AUDITING = "auditing"
"""The action of the instant that records an audit of an index."""
_AUDITS_MAX = 1000

Mask = npt.NDArray[np.bool_]
_log = structlog.get_logger("seamark.indexes")


@dataclass(frozen=True)
class TableIndexes:
    """A table and its registered index files.

    `entry` is the catalog entry at the time of the read.
    """

    entry: Entry
    metadata: TableMetadata
    registered: IndexFiles


@dataclass(frozen=True)
class SnapshotFiles:
    """The files of a snapshot. `records`, int64[rows], is negative if the number of records is unknown."""

    view: TableView
    ids: FileIds
    records: npt.NDArray[np.int64]

    def count_rows(self, mask: Mask) -> int:
        return int(self.records[mask].clip(0).sum())


class NewFiles(NamedTuple):
    """The files of one snapshot in a list of snapshots.

    Attributes:
        files: The files.
        is_new: Whether each file is in no earlier snapshot of the list, bool[files].
    """

    files: SnapshotFiles
    is_new: Mask


async def load_requested_table(call: Call) -> TableIndexes:
    """Load the table that the path names, with its index files.

    Raises:
        NoSuchTable: The table does not exist.
        Forbidden: The metadata name a location that the table does not claim. Index files are listed and written
            below the location, so they would be among files of another entry.
    """
    loaded_table: LoadedTable = await call.components.catalog.tables.load(call.namespace, call.name)
    assert loaded_table.entry is not None
    await call.components.catalog.check_writable(loaded_table)
    return TableIndexes(
        loaded_table.entry, loaded_table.metadata, await call.components.registry.load_files(loaded_table.entry)
    )


async def load_view(call: Call, metadata: TableMetadata, snapshot_id: int | None) -> TableView:
    """Return the view of a snapshot. It is empty if the table has no snapshot."""
    if snapshot_id is None:
        return TableView((), ())
    return await call.components.planner.view(metadata, ScanRequest(snapshot_id=snapshot_id))


async def load_snapshot_files(call: Call, metadata: TableMetadata, snapshot_id: int | None) -> SnapshotFiles:
    """Return the files of a snapshot. There are no files if the table has no snapshot."""
    view = await load_view(call, metadata, snapshot_id)

    def read_files() -> SnapshotFiles:
        return SnapshotFiles(view, compute_view_file_ids(view), find_files_by_prefix(view).read_longs("record_count"))

    return read_files() if view.file_count <= _IN_LOOP_FILES_MAX else await asyncio.to_thread(read_files)


def find_named_snapshots(metadata: TableMetadata) -> tuple[int, ...]:
    """Return the id of the current snapshot, and then the ids of other snapshots of branches and tags, newest first.

    The result has at most SNAPSHOTS_MAX snapshots.
    """
    ref_snapshot_ids = {ref.snapshot_id for ref in metadata.refs.values()} - {metadata.current_snapshot_id}
    other_snapshots = [
        snapshot
        for snapshot in (metadata.snapshot(snapshot_id) for snapshot_id in ref_snapshot_ids)
        if snapshot is not None
    ]
    other_snapshots.sort(key=lambda snapshot: (-snapshot.timestamp_ms, snapshot.snapshot_id))
    current_ids = () if metadata.current_snapshot_id is None else (metadata.current_snapshot_id,)
    return (*current_ids, *(other.snapshot_id for other in other_snapshots))[:SNAPSHOTS_MAX]


async def find_new_files_by_snapshot(call: Call, metadata: TableMetadata, snapshots: Sequence[int]) -> list[NewFiles]:
    """Return the new files of each snapshot, in the order of the snapshots, so that each file occurs once."""
    new_files: list[NewFiles] = []
    for snapshot_id in snapshots:
        files = await load_snapshot_files(call, metadata, snapshot_id)
        is_new = np.ones(files.ids.count, dtype=np.bool_)
        for earlier_files in new_files:
            is_new &= ~await asyncio.to_thread(files.ids.mark_files_in, earlier_files.files.ids.ids)
        new_files.append(NewFiles(files, is_new))
    return new_files


async def find_covered_files(call: Call, files: SnapshotFiles, live_files: tuple[RegisteredIndexFile, ...]) -> Mask:
    """Return whether these index files describe each file, bool[files]."""
    ids_by_file = await asyncio.gather(*(read_ids_or_quarantine(call, file) for file in live_files))
    ids = np.concatenate([np.empty((0, 2), dtype=np.uint64), *ids_by_file])
    if files.view.file_count + len(ids) <= _IN_LOOP_FILES_MAX:
        return files.ids.mark_files_in(ids)
    return await asyncio.to_thread(files.ids.mark_files_in, ids)


async def read_audit_times_ms(call: Call, table: TableIndexes) -> dict[str, int]:
    """Return the time of the last audit of each index in milliseconds since the epoch, by definition id.

    Only the last `_AUDITS_MAX` audits of the table are read.
    """
    instant_filter = InstantFilter(uuid=table.entry.uuid, action=AUDITING, newest_first=True)
    audit_times_ms: dict[str, int] = {}
    for instant in await call.components.store.list_instants(instant_filter, _AUDITS_MAX):
        audit_times_ms.setdefault(str(instant.summary.get("definition")), instant.requested_ms)
    return audit_times_ms


async def find_missing_files(call: Call, new_files: NewFiles, live_files: tuple[RegisteredIndexFile, ...]) -> Mask:
    """Return whether each file is new and could be indexed, but is not described by these index files, bool[files]."""
    return (
        ~await find_covered_files(call, new_files.files, live_files)
        & new_files.files.ids.has_identity
        & new_files.is_new
    )


async def read_ids_or_quarantine(call: Call, file: RegisteredIndexFile) -> npt.NDArray[np.uint64]:
    """Return the ids of the data files in an index file, uint64[n, 2].

    The result is empty for a file of an unknown version. It is also empty for a damaged file, and for a file that
    belongs to another table or index. Such a file is quarantined.
    """
    try:
        summary = await call.app[READER].describe(file.location, file.size_bytes)
        if (summary.header.table_uuid, summary.header.definition) == (file.uuid, file.definition):
            return summary.ids
        reason = f"{file.location} belongs to another table or index"
    except (Corrupt, ObjectMissing) as error:
        reason = error.message
    except UnknownVersion as error:
        _log.warning("index file not read", location=file.location, reason=str(error))
        return np.empty((0, 2), dtype=np.uint64)
    _log.warning("index file quarantined", location=file.location, reason=reason)
    await call.components.registry.quarantine_file(file.uuid, file.location, reason)
    return np.empty((0, 2), dtype=np.uint64)


def add_components(app: web.Application) -> None:
    app[READER] = IndexReader(app[COMPONENTS].objects)
    app[REFUSED_FILES] = RefusedFiles(app[COMPONENTS].clock.monotonic)
