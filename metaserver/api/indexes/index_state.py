"""How indexes stand: which files of a snapshot each covers, from the registry, the index files and the view.

Shared by the listing of indexes and by builds, so that what is listed as missing is what a build is told to index.
An index file that turns out to be damaged or gone is quarantined at once: its data files are missing then.
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

from metaserver.api.http.keys import CATALOG, OBJECTS, PLANNER, REGISTRY, STORE
from metaserver.catalog.values import LoadedTable
from metaserver.errors import Corrupt, ObjectMissing
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.index.files.headers import IndexReader
from metaserver.index.files.index_file import UnknownVersion
from metaserver.index.files.registry import IndexFiles
from metaserver.planner.indexes.coverage import FileIds, file_ids_of
from metaserver.planner.lookup.lookup import lookup
from metaserver.planner.scan.request import ScanRequest
from metaserver.planner.view.view import TableView
from metaserver.store.port import Entry, InstantFilter, NamespacePath, RegisteredIndexFile

READER: web.AppKey[IndexReader] = web.AppKey("index_reader", IndexReader)
_IN_THREAD_FILES = 5_000
SNAPSHOTS_MAX = 32
"""Snapshots of branches and tags whose files are to be indexed; of more, those of the oldest are not."""
AUDITING = "auditing"
_AUDITS_MAX = 1000

Mask = npt.NDArray[np.bool_]
_log = structlog.get_logger("seamark.indexes")


@dataclass(frozen=True)
class TableIndexes:
    """A table with what is registered for it. `entry` is where it stood when it was read."""

    entry: Entry
    metadata: TableMetadata
    registered: IndexFiles


@dataclass(frozen=True)
class SnapshotFiles:
    """The files of a snapshot. `records` int64[rows], negative where nobody counted."""

    view: TableView
    ids: FileIds
    records: npt.NDArray[np.int64]

    def rows_in(self, mask: Mask) -> int:
        return int(self.records[mask].clip(0).sum())


class NewFiles(NamedTuple):
    """The files of a snapshot, and bool[rows]: those that none of the snapshots before it has."""

    files: SnapshotFiles
    fresh: Mask


async def load(request: web.Request, namespace: NamespacePath, name: str) -> TableIndexes:
    """NoSuchTable. Forbidden where the table's metadata lead to another's places: index files are listed and written
    below its location."""
    loaded: LoadedTable = await request.app[CATALOG].tables.load(namespace, name)
    assert loaded.entry is not None
    await request.app[CATALOG].check_writable(loaded)
    return TableIndexes(loaded.entry, loaded.metadata, await request.app[REGISTRY].files(loaded.entry))


async def view_of(request: web.Request, metadata: TableMetadata, snapshot_id: int | None) -> TableView:
    """Of a snapshot; empty where the table has none."""
    if snapshot_id is None:
        return TableView((), ())
    return await request.app[PLANNER].view(metadata, ScanRequest(snapshot_id=snapshot_id))


async def files_of(request: web.Request, metadata: TableMetadata, snapshot_id: int | None) -> SnapshotFiles:
    """Of a snapshot; none where the table has none."""
    view = await view_of(request, metadata, snapshot_id)

    def read() -> SnapshotFiles:
        return SnapshotFiles(view, file_ids_of(view), lookup(view).longs("record_count"))

    return read() if view.rows <= _IN_THREAD_FILES else await asyncio.to_thread(read)


def snapshots_named(metadata: TableMetadata) -> tuple[int, ...]:
    """The current snapshot, then what branches and tags name otherwise, the newest first; at most SNAPSHOTS_MAX."""
    named = {ref.snapshot_id for ref in metadata.refs.values()} - {metadata.current_snapshot_id}
    others = [one for one in (metadata.snapshot(snapshot_id) for snapshot_id in named) if one is not None]
    others.sort(key=lambda one: (-one.timestamp_ms, one.snapshot_id))
    current = () if metadata.current_snapshot_id is None else (metadata.current_snapshot_id,)
    return (*current, *(other.snapshot_id for other in others))[:SNAPSHOTS_MAX]


async def held_files(request: web.Request, metadata: TableMetadata, snapshots: Sequence[int]) -> list[NewFiles]:
    """Of each snapshot in turn, every file once."""
    held: list[NewFiles] = []
    for snapshot_id in snapshots:
        files = await files_of(request, metadata, snapshot_id)
        fresh = np.ones(files.ids.rows, dtype=np.bool_)
        for before in held:
            fresh &= ~await asyncio.to_thread(files.ids.described, before.files.ids.ids)
        held.append(NewFiles(files, fresh))
    return held


async def covered(request: web.Request, files: SnapshotFiles, live: tuple[RegisteredIndexFile, ...]) -> Mask:
    """bool[rows]: which of the files these index files describe."""
    described = await asyncio.gather(*(_described(request, one) for one in live))
    ids = np.concatenate([np.empty((0, 2), dtype=np.uint64), *described])
    if files.view.rows + len(ids) <= _IN_THREAD_FILES:
        return files.ids.described(ids)
    return await asyncio.to_thread(files.ids.described, ids)


async def audited_ms(request: web.Request, table: TableIndexes) -> dict[str, int]:
    """By definition id, when the index was last audited, in ms since the epoch; of those whose audit is among the last
    of the table's."""
    where = InstantFilter(uuid=table.entry.uuid, action=AUDITING, newest_first=True)
    found: dict[str, int] = {}
    for instant in await request.app[STORE].instants(where, _AUDITS_MAX):
        found.setdefault(str(instant.summary.get("definition")), instant.requested_ms)
    return found


async def missing(request: web.Request, held: NewFiles, live: tuple[RegisteredIndexFile, ...]) -> Mask:
    """bool[rows]: files that none before has, and that these index files do not describe and could."""
    return ~await covered(request, held.files, live) & held.files.ids.identified & held.fresh


async def _described(request: web.Request, file: RegisteredIndexFile) -> npt.NDArray[np.uint64]:
    try:
        found = await request.app[READER].describe(file.location, file.size_bytes)
        if (found.header.table_uuid, found.header.definition) == (file.uuid, file.definition):
            return found.ids
        reason = f"{file.location}: is of another table or index"
    except (Corrupt, ObjectMissing) as error:
        reason = error.message
    except UnknownVersion as error:
        _log.warning("index file not read", location=file.location, reason=str(error))
        return np.empty((0, 2), dtype=np.uint64)
    _log.warning("index file quarantined", location=file.location, reason=reason)
    await request.app[REGISTRY].quarantine(file.uuid, file.location, reason)
    return np.empty((0, 2), dtype=np.uint64)


def add_parts(app: web.Application) -> None:
    """What these routes keep for themselves; nothing in an application that is only to be described."""
    if OBJECTS in app:
        app[READER] = IndexReader(app[OBJECTS])
