"""The state of an index build: an instant `indexing` on the timeline, its summary and its progress.

Any client that has the id of a build can continue the build. While a build is active, it excludes other builds of its
index. After a long inactivity, it is rolled back. The index files that it has registered are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog

from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.kinds.kinds import list_parameters
from seamark.formats.runtime.errors import CommitConflict, NotFound
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.indexes.index_state import TableIndexes, load_requested_table
from seamark.metaserver.api.indexes.indexes import find_defined_index
from seamark.metaserver.store.model import Instant, InstantState
from seamark.metaserver.store.operations import MoveInstant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.timeline.instants import INDEXING

ABANDONED_MS = 3_600_000
"""The time after which an inactive build is rolled back, in milliseconds. The next build of its table does this."""
EXCLUSIVE_MS = 300_000
"""The time after its last activity for which a build excludes other builds, in milliseconds.

After this time, the builder counts as dead.
"""
_RUNNING_BUILDS_MAX = 1000
"""The maximum number of running builds of a table that are read."""
_COUNT = {"type": "integer"}
_log = structlog.get_logger("seamark.indexes")

_PROGRESS: dict[str, Any] = {
    "type": "object",
    "required": ["files-done", "files-total", "rows-done", "rows-total", "index-files", "size-in-bytes", "eta-ms"],
    "properties": {
        "files-done": {"type": "integer", "description": "Data files in the registered index files."},
        "files-total": {"type": "integer", "description": "Data files without an index when the build began."},
        "rows-done": _COUNT,
        "rows-total": _COUNT,
        "index-files": _COUNT,
        "size-in-bytes": _COUNT,
        "eta-ms": {
            "type": ["integer", "null"],
            "description": "The estimated end in ms since the epoch, from the speed until now. It is null at first.",
        },
    },
}
BUILD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["build-id", "index", "state", "snapshot-id", "table-uuid", "folder", "definition-id", "progress"],
    "properties": {
        "build-id": {"type": "string", "description": "The id of the build's instant on the table's timeline."},
        "index": {"type": "string"},
        "state": {"enum": [state.value for state in InstantState]},
        "reason": {"type": ["string", "null"], "description": "The reason for the rollback."},
        "snapshot-id": {"type": ["integer", "null"], "description": "The current snapshot when the build began."},
        "table-uuid": {"type": "string", "description": "The table UUID that index files must contain."},
        "folder": {"type": "string", "description": "The folder for the index files, which must have new names."},
        "definition-id": {"type": "string", "description": "The definition id that index files must contain."},
        "kind": {"type": "string"},
        "terms": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "field-id": _COUNT,
                    "name": {"type": "string", "description": "The current name of the column."},
                    "transform": {"type": "string"},
                    "source-type": {"type": "string"},
                    "type": {"type": "string", "description": "The type of the term's values."},
                },
            },
        },
        **{name: {"type": "number"} for name in list_parameters()},
        "earlier-index-files": {
            "type": "array",
            "description": "In the answer to the start of a build: the index files of definitions that differ only by "
            "the snapshots of dimension tables, the newest first. A builder may copy their entries of data files whose "
            "keys have the same attributes.",
            "items": {
                "type": "object",
                "required": ["location", "definition-id"],
                "properties": {"location": {"type": "string"}, "definition-id": {"type": "string"}},
            },
        },
        "progress": _PROGRESS,
    },
}


@dataclass(frozen=True)
class Build:
    """An index build, with its table and its definition."""

    table: TableIndexes
    definition: IndexDefinition
    instant: Instant

    @property
    def folder(self) -> str:
        return str(self.instant.summary["folder"])


async def load_requested_build(call: Call, *, inflight: bool = False) -> Build:
    """Return the build in the path.

    Raises:
        NotFound: This index and table have no such build.
        CommitConflict: `inflight` is True, and the build has ended.
    """
    _, name, build_id = call.names
    table = await load_requested_table(call)
    instant = await call.components.store.load_instant(build_id)
    belongs_to_table = instant is not None and instant.action == INDEXING and instant.uuid == table.entry.uuid
    if instant is None or not belongs_to_table or instant.summary.get("index") != name:
        raise NotFound(f"The index {name[:200]!r} has no build {build_id[:100]!r}; start one with seamark index build")
    definition = find_defined_index(table.metadata, name)
    if inflight:
        require_inflight(instant)
        if definition.id != instant.summary["definition"]:
            raise CommitConflict(
                f"The index {name} was redefined after the build {build_id} began; start another build"
            )
    return Build(table, definition, instant)


def require_inflight(instant: Instant) -> None:
    if instant.state is not InstantState.INFLIGHT:
        raise CommitConflict(f"The build {instant.id} is {instant.state.value}; start another build")


def compute_progress(build: Build) -> dict[str, Any]:
    """Return the progress of a build, which may be running or have ended.

    It is computed from the registered index files in the folder of the build.
    """
    files = [file for file in build.table.registered.files if file.location.startswith(build.folder + "/")]
    summary, began_ms = build.instant.summary, build.instant.requested_ms
    indexed_rows = sum(file.rows for file in files)
    latest_ms = max((file.created_ms for file in files), default=began_ms)
    # The estimated end assumes that the remaining rows take as long per row as the indexed rows.
    rows_left = max(0, summary["rows-total"] - indexed_rows)
    return {
        "files-done": sum(file.files for file in files),
        "files-total": summary["files-total"],
        "rows-done": indexed_rows,
        "rows-total": summary["rows-total"],
        "index-files": len(files),
        "size-in-bytes": sum(file.size_bytes for file in files),
        "eta-ms": latest_ms + rows_left * (latest_ms - began_ms) // indexed_rows if indexed_rows else None,
    }


async def record_progress(call: Call, build: Build) -> None:
    """Record the progress of a build on the timeline.

    If several requests record progress at the same time, the last record may not have the most progress. If the build
    has ended, nothing is recorded.
    """
    try:
        await move_build(call, build.instant, InstantState.INFLIGHT, compute_progress(build))
    except CommitConflict:
        _log.info("a build ended while index files were registered", build=build.instant.id)


async def move_build(call: Call, instant: Instant, state: InstantState, fields: dict[str, Any]) -> None:
    """Move a build to a state on the timeline, and add fields to the summary of its instant.

    The summary also gets the present time as the time of the last activity.

    Raises:
        CommitConflict: The build is in another state now.
    """
    now_ms = call.components.clock.now_ms()
    summary = {**instant.summary, **fields, "active-ms": now_ms}
    await call.components.store.transact(
        [MoveInstant(id=instant.id, expected=instant.state, state=state, now_ms=now_ms, summary=summary)]
    )
    call.components.timeline.notify()


async def require_no_other_build(call: Call, table: TableIndexes, name: str, *, own_id: str = "") -> None:
    """Check that no other build of the index is in progress.

    A build that has been inactive for `EXCLUSIVE_MS` does not count. If the caller has a build itself, `own_id` is its
    id.

    Raises:
        CommitConflict: Another build is in progress.
    """
    since_ms = call.components.clock.now_ms() - EXCLUSIVE_MS
    for build in await _list_running_builds(call, table):
        if build.id != own_id and build.summary["index"] == name and build.summary["active-ms"] >= since_ms:
            raise CommitConflict(
                f"The build {build.id} of the index {name}, by {build.principal_name}, is in progress; try again later"
            )


async def _list_running_builds(call: Call, table: TableIndexes) -> list[Instant]:
    instant_filter = InstantFilter(uuid=table.entry.uuid, action=INDEXING, state=InstantState.INFLIGHT, archived=False)
    return await call.components.store.list_instants(instant_filter, _RUNNING_BUILDS_MAX)


async def roll_back_abandoned(call: Call, table: TableIndexes) -> None:
    """Roll back the builds of this table that have been inactive for a long time.

    Their index files stay registered.
    """
    last_activity_min_ms = call.components.clock.now_ms() - ABANDONED_MS
    for instant in await _list_running_builds(call, table):
        if instant.summary["active-ms"] < last_activity_min_ms:
            reason = f"abandoned: inactive for {ABANDONED_MS // 60_000} minutes"
            try:
                await move_build(call, instant, InstantState.ROLLED_BACK, {"reason": reason})
            except CommitConflict:
                continue  # The build has ended, or is active again.


def describe_build(build: Build) -> dict[str, Any]:
    """Return a build in the form of an answer."""
    summary = build.instant.summary
    return {
        "build-id": build.instant.id,
        "index": summary["index"],
        "state": build.instant.state.value,
        "reason": summary.get("reason"),
        "snapshot-id": build.instant.snapshot_id,
        "table-uuid": build.instant.uuid,
        "folder": build.folder,
        "definition-id": summary["definition"],
        "kind": build.definition.kind,
        "terms": [
            {
                "field-id": term.column_id,
                "name": term.name,
                "transform": term.transform,
                "source-type": term.source,
                "type": term.kind,
            }
            for term in build.definition.terms
        ],
        "measures": [measure.text for measure in build.definition.measures],
        **build.definition.parameters,
        "progress": compute_progress(build),
    }
