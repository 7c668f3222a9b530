"""The commit route: a writer sends a change to a table, and the server creates the snapshot (docs/design/0004).

A repeat, by idempotency key or producer, gets the first answer with the current metadata location of the table.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.describe import BodySize, Parameter, ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route, json_answer
from seamark.metaserver.api.http.idempotency import once
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, COMMITS, SETTINGS
from seamark.metaserver.api.http.parameters.requests import IDEMPOTENCY_KEY
from seamark.metaserver.api.indexes.index_state import READER
from seamark.metaserver.catalog.large_requests import LARGE_BYTES
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.changes.change import (
    ISOLATIONS,
    OPERATIONS,
    WRITTEN,
    ChangeBody,
    ChangeRequest,
    read_request,
)
from seamark.metaserver.commit.native.commit_result import CommitResult
from seamark.metaserver.commit.publication import pointer_moved
from seamark.metaserver.decoding import from_json
from seamark.metaserver.errors import BadRequest, NotFound
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.index.files.definitions import of_id
from seamark.metaserver.index.files.registration import read_index_file
from seamark.metaserver.store.model import Entry, NamespacePath, RegisteredIndexFile
from seamark.metaserver.wire import INDEX_FILES_MAX, INDEX_FOLDER

_READ_AT_ONCE = 8
"""Index files of one change that are read concurrently."""
_LOCATION = "metadata-location"
_COUNT = {"type": "integer"}
_ID = {"type": ["integer", "null"]}
_FILTER: dict[str, Any] = {"description": "An expression of the Iceberg REST specification."}
_KEY = Parameter(
    IDEMPOTENCY_KEY,
    "header",
    "UUID of version 7: a repeat with the same key receives the first answer.",
    {"type": "string"},
)

_BODY: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "table-uuid": {"type": ["string", "null"], "description": "409 if the name refers to another table."},
        "branch": {"type": "string", "default": "main"},
        "producer": {
            "type": ["object", "null"],
            "required": ["id", "sequence"],
            "additionalProperties": False,
            "properties": {"id": {"type": "string"}, "sequence": {"type": "integer", "minimum": 0}},
            "description": "The writer and the sequence number of this change: each sequence is committed once.",
        },
        "repeats-only": {
            "type": "boolean",
            "default": False,
            "description": "Answer a repeat of the producer's change as the first time, and refuse all else by 409, "
            "so that a writer who finds rows changed since it read them learns whether its own change did that.",
        },
        "change-id": {
            "type": ["string", "null"],
            "description": "Shared by all attempts of one change. After several collisions, the change gets a table "
            "lock for some time, and other changes to the table wait.",
        },
        "fence": {
            "type": ["integer", "null"],
            "description": "The fencing number of a job of the table services; 409 if another replica runs them now, "
            "so that a job which its server has lost commits nothing.",
        },
        "operation": {
            "enum": [*OPERATIONS, None],
            "description": "The operation of the snapshot (Iceberg specification); by default derived from the change.",
        },
        "read-snapshot-id": {
            **_ID,
            "description": "The snapshot that the change was computed from; null for an empty table. Required with "
            "removed files, position deletes, deletion vectors or a scope.",
        },
        "isolation": {"enum": list(ISOLATIONS), "default": "serializable"},
        "schema-id": {
            **_ID,
            "description": "The schema that resolves names in filters; by default the current schema. 409 when another "
            "schema is current now and the scope has a filter, because its names may mean other columns.",
        },
        "format-version": {
            "type": ["integer", "null"],
            "description": "The format version for which files were rewritten; 409 if the table has another one now. "
            "Rows of rewritten files have their row ids from version 3 on.",
        },
        "scope": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {
                "filter": _FILTER,
                "partitions": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["spec-id", "values"],
                        "additionalProperties": False,
                        "properties": {"spec-id": _COUNT, "values": {"type": "array"}},
                    },
                },
            },
            "description": "The rows that the change has read, as a filter or as partitions. Default: all rows when "
            "the "
            "change removes files or adds position deletes or deletion vectors, otherwise none.",
        },
        "add": {
            "type": "array",
            "items": {"type": "object"},
            "description": "Data and delete files, each a ContentFile of the Iceberg REST specification.",
        },
        "remove": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["file-path"],
                "additionalProperties": False,
                "properties": {"file-path": {"type": "string"}, "content-offset": {"type": ["integer", "null"]}},
            },
            "description": "Live files. A deletion vector is named by its path and its offset.",
        },
        "replace": {
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {"filter": _FILTER, "partitions": {"enum": [WRITTEN]}},
            "description": "Removes every live file whose rows all match the filter, or every live file in the "
            "partitions of the added files.",
        },
        "index-files": {
            "type": "array",
            "maxItems": INDEX_FILES_MAX,
            "items": {
                "type": "object",
                "required": ["location", "size-in-bytes"],
                "additionalProperties": False,
                "properties": {"location": {"type": "string"}, "size-in-bytes": _COUNT},
            },
            "description": f"Index files that are registered with the snapshot; stored below {INDEX_FOLDER} of the "
            "table.",
        },
        "undo-snapshot-id": {
            "type": ["integer", "null"],
            "description": "Undoes this snapshot, whose operation is replace: removes the files that it added, and "
            "restores those that it removed. 409 if later commits changed the added files. Without files of its own.",
        },
        "summary": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
COMMITTED_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": [
        "snapshot-id",
        "parent-snapshot-id",
        "sequence-number",
        "operation",
        "metadata-location",
        "table-uuid",
        "duplicate",
        "summary",
    ],
    "properties": {
        "snapshot-id": _ID,
        "parent-snapshot-id": _ID,
        "sequence-number": _ID,
        "operation": {"enum": [*OPERATIONS, None]},
        "metadata-location": {"type": "string"},
        "table-uuid": {"type": "string"},
        "duplicate": {
            "type": "boolean",
            "description": "The producer had committed this change before; null fields have expired since.",
        },
        "summary": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/commit",
    "commitChange",
    "Commits a change: files added, files removed, rows read. The server creates the snapshot",
    tags=("commits",),
    parameters=(_KEY,),
    body_size=BodySize.LARGE,
    is_idempotent=True,
    body=_BODY,
    answers=(
        ResponseSpec(200, "The change is committed", {"$ref": "#/components/schemas/CommitResult"}),
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
    namespace, name = call.namespace, call.name
    read = partial(read_request, body, files_max=call.app[SETTINGS].commit_files_limit)
    change = read() if call.caller.request_bytes <= LARGE_BYTES else await asyncio.to_thread(read)

    async def work(caller: Caller) -> CommitResult:
        return await call.app[COMMITS].commit(caller, namespace, name, change, partial(_index_files, call, change))

    async def answer(result: CommitResult) -> web.Response:
        return json_answer({**msgspec.to_builtins(result.committed), _LOCATION: result.metadata_location})

    return await _located(call, await once(call, work, answer), namespace, name)


async def _located(call: Call, response: web.Response, namespace: NamespacePath, name: str) -> web.Response:
    """A recorded answer with the current metadata location."""
    if response.status != 200:
        return response
    assert isinstance(response.body, bytes)
    recorded = from_json(response.body, dict[str, Any])
    if _LOCATION in recorded:
        return response
    try:
        entry = await call.app[CATALOG].tables.entry(namespace, name)
    except NotFound:
        entry = None
    if entry is None or entry.uuid != recorded["table-uuid"]:
        raise pointer_moved(namespace, name)
    return json_answer({**recorded, _LOCATION: entry.metadata_location})


async def _index_files(
    call: Call, change: ChangeRequest, entry: Entry, metadata: TableMetadata
) -> list[RegisteredIndexFile]:
    """Reads the index files of the change. BadRequest for a file that does not belong to the table."""
    folder = f"{metadata.location.rstrip('/')}/{INDEX_FOLDER}"
    slots = asyncio.Semaphore(_READ_AT_ONCE)

    async def registered(location: str, size_bytes: int) -> RegisteredIndexFile:
        async with slots:
            file = await read_index_file(
                call.app[READER],
                location,
                size_bytes,
                folder=folder,
                table_uuid=entry.uuid,
                snapshot_id=None,
                now_ms=call.app[CLOCK].now_ms(),
            )
        try:
            of_id(file.definition, metadata.current_schema, metadata.schemas)
        except BadRequest as error:
            raise BadRequest(f"Cannot register {location}: {error.message}") from None
        return file

    return await asyncio.gather(*(registered(given.location, given.size_in_bytes) for given in change.index_files))
