"""Serves the routes that pause, resume and drain a stream table.

A pause is a property of the table. It therefore survives restarts, and applies to every server of the catalog.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import check_changeable, format_path
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.table_updates import commit_updates
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.streams.pauses import PAUSED, REASON_CHARACTERS_MAX, read_pause
from seamark.metaserver.streams.stream_properties import check_stream_table

_COMMITS_MAX = 8
"""The maximum number of commits of one request. A request commits again if another request has reverted its commit."""
_STREAM = "/api/v1/tables/{namespace}/{table}/stream"
_NO_REASON = "no reason was given"


class PauseStream(msgspec.Struct, forbid_unknown_fields=True):
    """A request that pauses a stream table."""

    reason: Annotated[
        str, doc("The reason why the table accepts no rows, for the writers.", maxLength=REASON_CHARACTERS_MAX)
    ] = ""


class PausedStream(msgspec.Struct, frozen=True):
    """The state of a stream table after a pause or a resumption."""

    paused: Annotated[str | None, doc("The reason for the pause, or null if the table accepts rows.")]


class DrainedStream(msgspec.Struct, frozen=True):
    """The result of draining a stream table."""

    paused: Annotated[str | None, doc("The reason for the pause.")]
    rows: Annotated[int, doc("The number of rows that this request has added to the table's files.")]


_ANSWERS = (
    ResponseSpec(200, "The state of the table after the request", PausedStream),
    ResponseSpec(400, "The table is not a stream table, or the reason is too long"),
    ResponseSpec(404, "The table does not exist"),
    ResponseSpec(409, "Concurrent commits conflicted with every attempt. Try again"),
)


@Route(
    "POST",
    f"{_STREAM}/pause",
    "pauseStream",
    "Refuse rows of a stream table until it is resumed, while flushes continue",
    tags=("streams",),
    is_body_optional=True,
    answers=_ANSWERS,
).takes(PauseStream)
async def pause_stream(call: Call, body: PauseStream) -> PausedStream:
    """Pause a stream table."""
    return PausedStream(read_pause((await _pause_table(call, body)).metadata))


@Route(
    "POST",
    f"{_STREAM}/resume",
    "resumeStream",
    "Accept rows of a paused stream table again",
    tags=("streams",),
    answers=_ANSWERS,
)
async def resume_stream(call: Call) -> PausedStream:
    """Resume a stream table."""

    def compute_update(metadata: TableMetadata) -> dict[str, Any] | None:
        return {"action": "remove-properties", "removals": [PAUSED]} if PAUSED in metadata.properties else None

    loaded_table = await _commit_until_settled(call, compute_update)
    assert loaded_table.entry is not None
    call.components.streams.pauses.forget(loaded_table.entry.uuid)
    return PausedStream(read_pause(loaded_table.metadata))


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
    """Pause a stream table and flush its rows."""
    loaded_table = await _pause_table(call, body)
    assert loaded_table.entry is not None
    rows = await call.components.streams.drain(loaded_table.entry.uuid) if loaded_table.entry.flushed else 0
    return DrainedStream(read_pause(loaded_table.metadata), rows)


async def _pause_table(call: Call, body: PauseStream) -> LoadedTable:
    """Pause the table, and return it.

    A table that is already paused keeps its reason if the request gives none.

    Raises:
        BadRequest: The reason is too long.
    """
    reason = body.reason or _NO_REASON
    if len(reason) > REASON_CHARACTERS_MAX:
        raise BadRequest(f"reason has {len(reason)} characters; the limit is {REASON_CHARACTERS_MAX}")

    def compute_update(metadata: TableMetadata) -> dict[str, Any] | None:
        if metadata.properties.get(PAUSED) == reason or (PAUSED in metadata.properties and not body.reason):
            return None
        return {"action": "set-properties", "updates": {PAUSED: reason}}

    loaded_table = await _commit_until_settled(call, compute_update)
    assert loaded_table.entry is not None
    call.components.streams.pauses.record(loaded_table.entry.uuid, loaded_table.metadata)
    return loaded_table


async def _commit_until_settled(
    call: Call, compute_update: Callable[[TableMetadata], dict[str, Any] | None]
) -> LoadedTable:
    """Commit the update that `compute_update` returns until the table needs no update, and return the table.

    An attempt without a result has conflicted with another commit, so the next attempt uses the new metadata.

    Raises:
        BadRequest: The table is not a stream table.
        CommitConflict: All attempts conflicted with other commits.
    """
    check_changeable(call.name)
    subject = format_path(call.namespace, call.name)

    def compute_updates(metadata: TableMetadata) -> list[dict[str, Any]]:
        check_stream_table(metadata, subject)
        update = compute_update(metadata)
        return [] if update is None else [update]

    for _ in range(_COMMITS_MAX):
        loaded_table = await commit_updates(call, compute_updates, reads_schema=False)
        if loaded_table is not None:
            return loaded_table
    raise CommitConflict(f"Other commits changed {subject} during every attempt; try again")
