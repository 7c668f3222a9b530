"""What a build of an index is: an instant `indexing` on the timeline, what its summary says, and how far it has come.

Whoever has its id can go on with it. It excludes others of its index as long as it is heard of, and is rolled back when
nothing was heard of it for long; what it has registered stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import structlog
from aiohttp import web

from metaserver.api.http.keys import CLOCK, STORE, TIMELINE
from metaserver.api.http.requests import path_name, path_namespace
from metaserver.api.indexes.index_state import TableIndexes, load
from metaserver.api.indexes.indexes import defined_index
from metaserver.errors import CommitConflict, NotFound
from metaserver.index.files.definitions import IndexDefinition
from metaserver.index.kinds.kinds import parameters
from metaserver.store.port import Instant, InstantFilter, InstantState, MoveInstant

ACTION = "indexing"
ABANDONED_MS = 3_600_000
"""A build that was silent for so long is rolled back when the next one on its table begins."""
HEARD_OF_MS = 300_000
"""As long a build excludes others after it was last heard of: after that its builder is taken to be gone."""
_UNDER_WAY_MAX = 1000
_COUNT = {"type": "integer"}
_log = structlog.get_logger("seamark.indexes")

_PROGRESS: dict[str, Any] = {
    "type": "object",
    "required": ["files-done", "files-total", "rows-done", "rows-total", "index-files", "size-in-bytes", "eta-ms"],
    "properties": {
        "files-done": {"type": "integer", "description": "Data files in the index files that this build registered."},
        "files-total": {"type": "integer", "description": "Data files that were missing when it began."},
        "rows-done": _COUNT,
        "rows-total": _COUNT,
        "index-files": _COUNT,
        "size-in-bytes": _COUNT,
        "eta-ms": {
            "type": ["integer", "null"],
            "description": "When it will be done, at its speed so far, in ms since the epoch; null at first.",
        },
    },
}
BUILD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["build-id", "index", "state", "snapshot-id", "table-uuid", "folder", "definition-id", "progress"],
    "properties": {
        "build-id": {"type": "string", "description": "Id of its instant on the table's timeline."},
        "index": {"type": "string"},
        "state": {"enum": [state.value for state in InstantState]},
        "reason": {"type": ["string", "null"], "description": "Why it was rolled back."},
        "snapshot-id": {"type": ["integer", "null"], "description": "The current snapshot when it began."},
        "table-uuid": {"type": "string", "description": "What index files name."},
        "folder": {"type": "string", "description": "Where its index files go, under names not used before."},
        "definition-id": {"type": "string", "description": "What index files carry."},
        "kind": {"type": "string"},
        "terms": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "field-id": _COUNT,
                    "name": {"type": "string", "description": "The column's, now."},
                    "transform": {"type": "string"},
                    "source-type": {"type": "string"},
                    "type": {"type": "string", "description": "Of the term's values."},
                },
            },
        },
        **{name: {"type": "number"} for name in parameters()},
        "progress": _PROGRESS,
    },
}


@dataclass(frozen=True)
class Build:
    table: TableIndexes
    definition: IndexDefinition
    instant: Instant

    @property
    def folder(self) -> str:
        return str(self.instant.summary["folder"])


async def load_build(request: web.Request, *, inflight: bool = False) -> Build:
    """NotFound unless it is a build of this index of this table; CommitConflict where it has ended, and must not."""
    name, build_id = path_name(request, "index"), path_name(request, "build")
    table = await load(request, path_namespace(request), path_name(request, "table"))
    instant = await request.app[STORE].instant(build_id)
    mine = instant is not None and instant.action == ACTION and instant.uuid == table.entry.uuid
    if instant is None or not mine or instant.summary.get("index") != name:
        raise NotFound(f"The index {name[:200]!r} has no build {build_id[:100]!r}; begin one with seamark index build")
    definition = defined_index(table.metadata, name)
    if inflight:
        require_inflight(instant)
        if definition.id != instant.summary["definition"]:
            raise CommitConflict(f"The index {name} was defined anew since the build {build_id} began; begin another")
    return Build(table, definition, instant)


def require_inflight(instant: Instant) -> None:
    if instant.state is not InstantState.INFLIGHT:
        raise CommitConflict(f"The build {instant.id} is {instant.state.value}; begin another")


def progress_of(build: Build) -> dict[str, Any]:
    """By what is registered of the build's folder, whatever became of it since."""
    mine = [one for one in build.table.registered.files if one.location.startswith(build.folder + "/")]
    said, began_ms = build.instant.summary, build.instant.requested_ms
    done = sum(one.rows for one in mine)
    latest_ms = max((one.created_ms for one in mine), default=began_ms)
    left = max(0, said["rows-total"] - done)
    return {
        "files-done": sum(one.files for one in mine),
        "files-total": said["files-total"],
        "rows-done": done,
        "rows-total": said["rows-total"],
        "index-files": len(mine),
        "size-in-bytes": sum(one.size_bytes for one in mine),
        "eta-ms": latest_ms + left * (latest_ms - began_ms) // done if done else None,
    }


async def tell_progress(request: web.Request, build: Build) -> None:
    """On the timeline, for those who watch. Of several at once, one may be told last that is not the furthest."""
    try:
        await move(request, build.instant, InstantState.INFLIGHT, progress_of(build))
    except CommitConflict:
        _log.info("a build ended while index files were registered", build=build.instant.id)


async def move(request: web.Request, instant: Instant, state: InstantState, more: dict[str, Any]) -> None:
    now_ms = request.app[CLOCK].now_ms()
    summary = {**instant.summary, **more, "active-ms": now_ms}
    await request.app[STORE].transact(
        [MoveInstant(id=instant.id, expected=instant.state, state=state, now_ms=now_ms, summary=summary)]
    )
    request.app[TIMELINE].notify()


async def require_alone(request: web.Request, table: TableIndexes, name: str, *, but: str = "") -> None:
    """CommitConflict while another build of the index is under way."""
    since_ms = request.app[CLOCK].now_ms() - HEARD_OF_MS
    for one in await _under_way(request, table):
        if one.id != but and one.summary["index"] == name and one.summary["active-ms"] >= since_ms:
            raise CommitConflict(f"The build {one.id} of the index {name}, by {one.who}, is under way; try again later")


async def _under_way(request: web.Request, table: TableIndexes) -> list[Instant]:
    where = InstantFilter(uuid=table.entry.uuid, action=ACTION, state=InstantState.INFLIGHT, archived=False)
    return await request.app[STORE].instants(where, _UNDER_WAY_MAX)


async def roll_back_abandoned(request: web.Request, table: TableIndexes) -> None:
    """Builds of this table whose builder died long ago; what they registered stays."""
    silent_since_ms = request.app[CLOCK].now_ms() - ABANDONED_MS
    for instant in await _under_way(request, table):
        if instant.summary["active-ms"] < silent_since_ms:
            reason = f"abandoned: nothing was heard of it for {ABANDONED_MS // 60_000} minutes"
            try:
                await move(request, instant, InstantState.ROLLED_BACK, {"reason": reason})
            except CommitConflict:
                continue  # it ended, or began to speak


def shown(build: Build) -> dict[str, Any]:
    said = build.instant.summary
    return {
        "build-id": build.instant.id,
        "index": said["index"],
        "state": build.instant.state.value,
        "reason": said.get("reason"),
        "snapshot-id": build.instant.snapshot_id,
        "table-uuid": build.instant.uuid,
        "folder": build.folder,
        "definition-id": said["definition"],
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
        **build.definition.parameters,
        "progress": progress_of(build),
    }
