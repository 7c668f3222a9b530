"""The commit route: a writer sends a change to a table, and the server creates the snapshot (docs/design/0004).

A repeated request has the same idempotency key, or the same producer and sequence. The server answers it with the first
answer and the current metadata location of the table.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import parse_definition
from seamark.formats.protocol.wire import INDEX_FOLDER
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, NotFound
from seamark.metaserver.api.http.describe import BodySize, Parameter, ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route, make_json_answer
from seamark.metaserver.api.http.idempotency import run_idempotent
from seamark.metaserver.api.http.parameters.requests import IDEMPOTENCY_KEY
from seamark.metaserver.api.indexes.index_state import READER
from seamark.metaserver.catalog.large_requests import LARGE_BYTES
from seamark.metaserver.commit.change_requests.change import ChangeRequest, read_request
from seamark.metaserver.commit.change_requests.change_body import REPLACE, ChangeBody
from seamark.metaserver.commit.changes.commit_result import CommittedChange
from seamark.metaserver.commit.publication import make_pointer_moved_error
from seamark.metaserver.index.files.registration import read_index_file
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath, RegisteredIndexFile

_CONCURRENT_READS_MAX = 8
"""The maximum number of index files of one change that are read concurrently."""
_LOCATION = "metadata-location"
_KEY = Parameter(
    IDEMPOTENCY_KEY,
    "header",
    "A UUID of version 7. A repeated request with the same key receives the first answer.",
    {"type": "string"},
)


class CommitAnswer(CommittedChange, frozen=True, kw_only=True, rename="kebab"):
    """A committed change, with the metadata location of the table after it."""

    metadata_location: str


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/commit",
    "commitChange",
    "Commit a change: the added files, the removed files, and the rows that the writer read",
    tags=("commits",),
    parameters=(_KEY,),
    body_size=BodySize.LARGE,
    is_idempotent=True,
    answers=(
        ResponseSpec(200, "The change is committed", CommitAnswer),
        ResponseSpec(400, "The change does not fit the table, or contradicts itself"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "The change conflicts with a commit after its read snapshot; nothing was changed"),
        ResponseSpec(
            500,
            "CommitStateUnknownException: the outcome is unknown; a producer can repeat the request to determine it",
        ),
    ),
).takes(ChangeBody)
async def commit_change(call: Call, body: ChangeBody) -> web.Response:
    """Commit a change: the added files, the removed files, and the rows that the writer read."""
    namespace, name = call.namespace, call.name
    read_change = partial(read_request, body, files_max=call.components.settings.commit_files_limit)
    change = read_change() if call.caller.request_bytes <= LARGE_BYTES else await asyncio.to_thread(read_change)
    # A change that depends on the rows it has read conflicts with rows of a stream that are not in files yet. So these
    # rows are written to files first. A replacement keeps all rows, and has no such conflict.
    if change.reads and change.operation != REPLACE:
        entry = await call.components.store.load_entry(EntryKind.TABLE, namespace, name)
        if entry is not None:
            await call.components.streams.flush_for_removal(entry, change.read_snapshot_id)

    response = await run_idempotent(
        call,
        lambda caller: call.components.commits.commit(
            caller, namespace, name, change, partial(_read_index_files, call, change)
        ),
        lambda result: make_json_answer({**msgspec.to_builtins(result.committed), _LOCATION: result.metadata_location}),
    )
    return await _add_location(call, response, namespace, name)


async def _add_location(call: Call, response: web.Response, namespace: NamespacePath, name: str) -> web.Response:
    """Add the current metadata location of the table to the answer to a repeated request.

    The answer to a first request already has the location. The recorded answer to a repeated request lacks it.

    Raises:
        CommitUnknown: The name no longer refers to the table, although the change was committed.
    """
    if response.status != 200:
        return response
    assert isinstance(response.body, bytes)
    answer = convert_json(response.body, dict[str, Any])
    if _LOCATION in answer:
        return response
    try:
        entry = await call.components.catalog.tables.load_entry(namespace, name)
    except NotFound:
        entry = None
    if entry is None or entry.uuid != answer["table-uuid"]:
        raise make_pointer_moved_error(namespace, name)
    return make_json_answer({**answer, _LOCATION: entry.metadata_location})


async def _read_index_files(
    call: Call, change: ChangeRequest, entry: Entry, metadata: TableMetadata
) -> list[RegisteredIndexFile]:
    """Read the index files of the change.

    Raises:
        BadRequest: A file does not belong to the table, or its index definition does not fit the table.
    """
    folder = f"{metadata.location.rstrip('/')}/{INDEX_FOLDER}"
    slots = asyncio.Semaphore(_CONCURRENT_READS_MAX)

    async def read_file(location: str, size_bytes: int) -> RegisteredIndexFile:
        async with slots:
            file = await read_index_file(
                call.app[READER],
                location,
                size_bytes,
                folder=folder,
                table_uuid=entry.uuid,
                snapshot_id=None,
                now_ms=call.components.clock.now_ms(),
            )
        try:
            parse_definition(file.definition, metadata.current_schema, metadata.schemas)
        except BadRequest as error:
            raise BadRequest(f"Cannot register {location}: {error.message}") from None
        return file

    return await asyncio.gather(
        *(read_file(index_file.location, index_file.size_in_bytes) for index_file in change.index_files)
    )
