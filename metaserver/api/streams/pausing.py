"""Routes that pause, resume and drain a stream table.

A pause is a property of the table. So it survives restarts, and applies to every server of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import check_changeable, show
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.table_updates import commit_updates
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.streams.pauses import PAUSED, REASON_CHARACTERS_MAX, read_pause
from seamark.metaserver.streams.stream_properties import check_stream_table

_COMMITS_MAX = 8
"""The maximum number of commits of one request, if other requests revert them."""
_STREAM = "/api/v1/tables/{namespace}/{table}/stream"
_NO_REASON = "no reason was given"


class PauseStream(msgspec.Struct, forbid_unknown_fields=True):
    reason: Annotated[
        str, doc("The reason why the table accepts no rows, for the writers.", maxLength=REASON_CHARACTERS_MAX)
    ] = ""


class PausedStream(msgspec.Struct, frozen=True):
    paused: Annotated[str | None, doc("The reason of the pause; null if the table accepts rows.")]


class DrainedStream(msgspec.Struct, frozen=True):
    paused: Annotated[str | None, doc("The reason of the pause.")]
    rows: Annotated[int, doc("The rows that this request has added to the table's files.")]


_ANSWERS = (
    ResponseSpec(200, "Whether the table is paused now", PausedStream),
    ResponseSpec(400, "The table is not a stream table, or the reason is too long"),
    ResponseSpec(404, "No such table"),
    ResponseSpec(409, "Concurrent commits conflicted in every attempt; try again"),
)


@Route(
    "POST",
    f"{_STREAM}/pause",
    "pauseStream",
    "Refuse rows of a stream table until it is resumed; flushes continue",
    tags=("streams",),
    is_body_optional=True,
    answers=_ANSWERS,
).takes(PauseStream)
async def pause_stream(call: Call, body: PauseStream) -> PausedStream:
    return PausedStream(read_pause((await _pause(call, body)).metadata))


@Route(
    "POST",
    f"{_STREAM}/resume",
    "resumeStream",
    "Accept rows of a paused stream table again",
    tags=("streams",),
    answers=_ANSWERS,
)
async def resume_stream(call: Call) -> PausedStream:
    def compute_update(metadata: TableMetadata) -> dict[str, Any] | None:
        return {"action": "remove-properties", "removals": [PAUSED]} if PAUSED in metadata.properties else None

    loaded = await _update(call, compute_update)
    assert loaded.entry is not None
    call.components.streams.pauses.forget(loaded.entry.uuid)
    return PausedStream(read_pause(loaded.metadata))


@Route(
    "POST",
    f"{_STREAM}/drain",
    "drainStream",
    "Refuse rows of a stream table until it is resumed, and add all waiting rows to its files",
    tags=("streams",),
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "The table is paused, and every row that was acknowledged is in its files", DrainedStream),
        *_ANSWERS[1:],
        ResponseSpec(503, "Another server has the log"),
    ),
).takes(PauseStream)
async def drain_stream(call: Call, body: PauseStream) -> DrainedStream:
    loaded = await _pause(call, body)
    assert loaded.entry is not None
    rows = await call.components.streams.drain(loaded.entry.uuid) if loaded.entry.flushed else 0
    return DrainedStream(read_pause(loaded.metadata), rows)


async def _pause(call: Call, body: PauseStream) -> LoadedTable:
    """Set the pause, and return the paused table."""
    reason = body.reason or _NO_REASON
    if len(reason) > REASON_CHARACTERS_MAX:
        raise BadRequest(f"reason has {len(reason)} characters; the limit is {REASON_CHARACTERS_MAX}")

    def compute_update(metadata: TableMetadata) -> dict[str, Any] | None:
        if metadata.properties.get(PAUSED) == reason or (PAUSED in metadata.properties and not body.reason):
            return None
        return {"action": "set-properties", "updates": {PAUSED: reason}}

    loaded = await _update(call, compute_update)
    assert loaded.entry is not None
    call.components.streams.pauses.record(loaded.entry.uuid, loaded.metadata)
    return loaded


async def _update(call: Call, compute_update: Callable[[TableMetadata], dict[str, Any] | None]) -> LoadedTable:
    """Commit the update that `compute_update` computes until the table needs no update, and return the table.

    Raises:
        BadRequest: The table is not a stream table.
        CommitConflict: Many attempts conflicted.
    """
    check_changeable(call.name)
    subject = show(call.namespace, call.name)

    def compute_updates(metadata: TableMetadata) -> list[dict[str, Any]]:
        check_stream_table(metadata, subject)
        update = compute_update(metadata)
        return [] if update is None else [update]

    for _ in range(_COMMITS_MAX):
        loaded = await commit_updates(call, compute_updates, reads_schema=False)
        if loaded is not None:
            return loaded
    raise CommitConflict(f"{subject} was changed by other commits in all attempts; try again")
