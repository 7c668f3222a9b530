"""Plans of stream tables: with the rows that were acknowledged and that no commit has added yet.

A plan has fresh rows if it reads the current state and nothing else shows that the client changes files: an engine that
rewrites or deletes files could not commit that for fresh files.
"""

from __future__ import annotations

import msgspec

from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.runtime.decoding import from_json
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.plans.scan_requests import PlanTableScan
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.planner.scan.request import PinnedRequest
from seamark.metaserver.store.model import Entry
from seamark.metaserver.streams.fresh_snapshots import with_fresh_snapshot


async def load_fresh(call: Call, entry: Entry, data: bytes) -> tuple[LoadedTable, Snapshot | None]:
    """Return the stream table as the plan request of this body reads it, and its fresh snapshot if it reads one."""
    body = await call.parse(data, PlanTableScan)
    if body.reads_current_state:
        fresh = await call.components.streams.load_fresh(entry)
        return fresh.loaded, fresh.snapshot
    return LoadedTable(entry, await call.components.catalog.documents.table(entry.metadata_location)), None


def with_fresh(loaded: LoadedTable, request: PinnedRequest) -> LoadedTable:
    """Return the table with the fresh snapshot that the request reads, if it reads one."""
    if not request.fresh:
        return loaded
    metadata = with_fresh_snapshot(loaded.metadata, from_json(request.fresh, Snapshot))
    return msgspec.structs.replace(loaded, metadata=metadata)
