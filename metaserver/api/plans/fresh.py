"""Plans of stream tables, which include the acknowledged rows that no commit has added yet.

A plan has fresh rows if the client reads the current state of the table. In this case, PyIceberg names no snapshot.
Spark always names the snapshot that was current when it loaded the table, even if the user named no snapshot. So if
Java's client plans the current snapshot, or a snapshot that only flushes and compactions have replaced recently, it
reads the current state.

A statement that rewrites or deletes rows of files gets no fresh files, because a commit cannot remove rows of fresh
files. Instead, their rows are flushed first, so that the statement's commit conflicts if it would have changed them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.replacement import is_replace
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.fresh_reads import find_fresh_snapshot, load_fresh
from seamark.metaserver.api.http.parameters.fresh import reads_fresh
from seamark.metaserver.api.plans.scan_requests import FILE_COLUMN, PlanTableScan
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.answer.content_files import ClientDialect
from seamark.metaserver.planner.scan.request import PinnedRequest
from seamark.metaserver.store.model import Entry
from seamark.metaserver.streams.catalog_tables import is_flush
from seamark.metaserver.streams.fresh_snapshots import with_fresh_snapshot

REPLACED_MS_MAX = 10_000
"""The maximum age in milliseconds of flushes and compactions that happened between a client's load and its plan."""


class FreshPlan(NamedTuple):
    """The table and the snapshot that a plan request of a stream table reads.

    Attributes:
        loaded: The table. If `snapshot` is not None, it is the current snapshot of the table.
        snapshot: The fresh snapshot that the plan reads, or None if it reads a snapshot of the table. A fresh snapshot
            has rows that are not in files of the table yet.
        is_live: Whether the plan reads the current state of the table, even if the request names an older snapshot.
    """

    loaded: LoadedTable
    snapshot: Snapshot | None
    is_live: bool


async def choose_fresh_plan(call: Call, entry: Entry, data: bytes, dialect: ClientDialect) -> FreshPlan:
    """Resolve the table and the snapshot that a plan request reads, and write pending rows to files if necessary.

    The caller plans the scan. A request for the current state reads a fresh snapshot, which also has the appended rows
    that are not in files of the table yet. A statement that rewrites files cannot use a fresh snapshot, so these rows
    are first written to files of the table.
    """
    body = await call.parse(data, PlanTableScan)
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    if reads_fresh(call.headers) and body.snapshot_id is not None and metadata.snapshot(body.snapshot_id) is None:
        # The catalog has loaded the fresh snapshot as the current snapshot.
        snapshot = await find_fresh_snapshot(call, entry, metadata, body.snapshot_id)
        return FreshPlan(LoadedTable(entry, with_fresh_snapshot(metadata, snapshot)), snapshot, is_live=False)
    if not _is_live(body, metadata, dialect, call.components.clock.now_ms()):
        return FreshPlan(LoadedTable(entry, metadata), None, is_live=False)
    if dialect.changes_files and FILE_COLUMN in (body.select or ()):
        await call.components.streams.flush(entry.uuid)
        return FreshPlan(LoadedTable(entry, metadata), None, is_live=False)
    fresh_table = await load_fresh(call, entry, metadata)
    return FreshPlan(fresh_table.loaded, fresh_table.snapshot, is_live=True)


def _is_live(body: PlanTableScan, metadata: TableMetadata, dialect: ClientDialect, now_ms: int) -> bool:
    """Return whether the request reads the current state of the table.

    An engine that changes files first loads the table, and then plans the loaded snapshot. Flushes and replacements may
    have added snapshots since. They do not change the rows, so the loaded snapshot is still the current state if only
    such snapshots of the last `REPLACED_MS_MAX` follow it.
    """
    if body.start_snapshot_id is not None or body.end_snapshot_id is not None:
        return False
    if body.snapshot_id is None:
        return True
    snapshot = metadata.current_snapshot
    while dialect.changes_files and snapshot is not None:
        if snapshot.snapshot_id == body.snapshot_id:
            return True
        is_same_state = is_flush(snapshot, metadata.table_uuid) or is_replace(snapshot)
        if not is_same_state or now_ms - snapshot.timestamp_ms > REPLACED_MS_MAX:
            return False
        parent_id = snapshot.parent_snapshot_id
        snapshot = None if parent_id is None else metadata.snapshot(parent_id)
    return False


def add_fresh_snapshot(loaded_table: LoadedTable, request: PinnedRequest) -> LoadedTable:
    """Return the table, with the fresh snapshot of the request as its current snapshot if there is one.

    A fresh snapshot also has appended rows that are not in files of the table yet. It is in no metadata file, so the
    request contains it as JSON.
    """
    if not request.fresh:
        return loaded_table
    metadata = with_fresh_snapshot(loaded_table.metadata, convert_json(request.fresh, Snapshot))
    return msgspec.structs.replace(loaded_table, metadata=metadata)
