"""Our own routes for what an audit finds: an index file that is wrong is put aside, one that was forgotten is listed.

That an index was audited is an instant `auditing` on the table's timeline, from which listings tell when.

The list of index files in the pointer store is a registry, not the truth: each file says of itself all that the
registry knows. So a registry that was lost with its database is made anew from the table's folder. What is registered
again is believed no further than what a builder registers; where several files describe the same data files, the
merged and the newer ones are taken. What was quarantined and is still listed stays so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from metaserver.api.http.keys import CLOCK, INDEXES, OBJECTS, REGISTRY, STORE, TIMELINE
from metaserver.api.http.render import json_answer
from metaserver.api.http.requests import allow, caller, path_name, path_namespace, read_json
from metaserver.api.indexes.index_state import AUDITING, READER, TableIndexes, load
from metaserver.api.indexes.indexes import INDEX, NO_INDEX, defined_index
from metaserver.errors import BadRequest, Corrupt, NotFound, ObjectMissing, TooLarge
from metaserver.index.files.definitions import IndexDefinition, read_definitions
from metaserver.index.files.headers import IndexFileSummary
from metaserver.index.files.index_file import UnknownVersion
from metaserver.objects.port import ObjectInfo
from metaserver.store.port import EntryKind, IndexFileState, Instant, InstantState, RecordInstant, RegisteredIndexFile
from metaserver.wire import INDEX_FOLDER

REASON_MAX = 1000
FOLDER_FILES_MAX = 100_000
"""More files than that in the folder of a table's indexes are not looked through."""
_READ_AT_ONCE = 32
_REGISTERED_AT_ONCE = 1000
_TOLD_MAX = 100
_COUNT = {"type": "integer"}
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class AuditedBody(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    index_files: Count
    damaged: Count = 0
    size_in_bytes: Count = 0


class QuarantineBody(msgspec.Struct, forbid_unknown_fields=True):
    location: str
    reason: str
    check: bool = False


class _Found(NamedTuple):
    """An index file in the folder, with what it says of itself."""

    info: ObjectInfo
    described: IndexFileSummary

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """The merged before what they were merged of, then the newest."""
        return -self.described.header.level, -self.info.modified_ms, -self.described.header.files, self.info.location


@describe(
    "quarantineIndexFile",
    "Quarantines an index file that an audit found wrong: plans no longer use it, and its data files are uncovered",
    tags=("indexes",),
    parameters=(NAMESPACE, TABLE, INDEX),
    body={
        "type": "object",
        "required": ["location", "reason"],
        "additionalProperties": False,
        "properties": {
            "location": {"type": "string", "description": "Of a registered index file of this index."},
            "reason": {"type": "string", "description": "What is wrong with it."},
            "check": {
                "type": "boolean",
                "default": False,
                "description": "Only if the server, which reads the whole file, finds it damaged or gone, too.",
            },
        },
    },
    answers=(
        ResponseSpec(
            200,
            "The state of the index file",
            {
                "type": "object",
                "required": ["location", "state", "reason"],
                "properties": {
                    "location": {"type": "string"},
                    "state": {"enum": [state.value for state in IndexFileState]},
                    "reason": {"type": ["string", "null"]},
                },
            },
        ),
        ResponseSpec(400, "The reason is missing"),
        ResponseSpec(404, "No such table or index, or no such index file of it"),
    ),
)
async def quarantine_index_file(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "index")
    allow(request, namespace)
    body = await read_json(request, QuarantineBody)
    if not body.reason.strip():
        raise BadRequest("reason is empty; say what is wrong with the index file")
    table = await load(request, namespace, path_name(request, "table"))
    definition = defined_index(table.metadata, name)
    file = _registered(table, definition, body.location)
    if body.check:
        if file.state is IndexFileState.LIVE:
            await request.app[INDEXES].suspect([file], body.reason[:REASON_MAX])
    else:
        await request.app[REGISTRY].quarantine(file.uuid, file.location, body.reason[:REASON_MAX])
    file = _registered(await load(request, namespace, path_name(request, "table")), definition, body.location)
    return json_answer({"location": file.location, "state": file.state.value, "reason": file.reason})


def _registered(table: TableIndexes, definition: IndexDefinition, location: str) -> RegisteredIndexFile:
    for one in table.registered.files:
        if (one.location, one.definition) == (location, definition.id):
            return one
    raise NotFound(
        f"The index {definition.name} has no index file {location[:500]!r}; seamark index show tells which it has"
    )


@describe(
    "recordIndexAudit",
    "Records that all live index files of an index were verified, so that the next audit is due later",
    tags=("indexes",),
    parameters=(NAMESPACE, TABLE, INDEX),
    body={
        "type": "object",
        "required": ["index-files"],
        "additionalProperties": False,
        "properties": {
            "index-files": {"type": "integer", "description": "Index files that were verified."},
            "damaged": {"type": "integer", "default": 0, "description": "How many of them were not right."},
            "size-in-bytes": {"type": "integer", "default": 0},
        },
    },
    answers=(
        ResponseSpec(
            200,
            "The instant `auditing` on the table's timeline",
            {
                "type": "object",
                "required": ["id", "audited-ms"],
                "properties": {"id": {"type": "string"}, "audited-ms": _COUNT},
            },
        ),
        NO_INDEX,
    ),
)
async def record_index_audit(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "index")
    allow(request, namespace)
    body = await read_json(request, AuditedBody)
    table = await load(request, namespace, path_name(request, "table"))
    definition = defined_index(table.metadata, name)
    clock = request.app[CLOCK]
    now_ms = clock.now_ms()
    instant = Instant(
        id=str(clock.uuid7()),
        action=AUDITING,
        state=InstantState.COMPLETED,
        kind=EntryKind.TABLE,
        namespace=namespace,
        name=table.entry.name,
        uuid=table.entry.uuid,
        requested_ms=now_ms,
        completed_ms=now_ms,
        who=caller(request).who,
        snapshot_id=table.metadata.current_snapshot_id,
        metadata_location=table.entry.metadata_location,
        summary={
            "request-id": caller(request).request_id,
            "index": name,
            "definition": definition.id,
            "index-files": body.index_files,
            "damaged": body.damaged,
            "size-in-bytes": body.size_in_bytes,
        },
    )
    await request.app[STORE].transact([RecordInstant(instant=instant)])
    request.app[TIMELINE].notify()
    return json_answer({"id": instant.id, "audited-ms": now_ms})


@describe(
    "rebuildIndexRegistry",
    "Registers index files in the table's folder that the registry lacks, for example after the loss of the database",
    tags=("indexes",),
    parameters=(NAMESPACE, TABLE),
    answers=(
        ResponseSpec(
            200,
            "The registered files; a repeat registers nothing",
            {
                "type": "object",
                "required": ["folder", "known", "registered", "redundant", "left-out", "left-out-files"],
                "properties": {
                    "folder": {"type": "string", "description": "That was looked through."},
                    "known": {"type": "integer", "description": "Files in it that the registry lists, in any state."},
                    "registered": {
                        "type": "array",
                        "description": "By index, what plans use from now on.",
                        "items": {
                            "type": "object",
                            "required": ["index", "index-files", "files", "rows", "size-in-bytes"],
                            "properties": {
                                "index": {"type": "string"},
                                **dict.fromkeys(("index-files", "files", "rows", "size-in-bytes"), _COUNT),
                            },
                        },
                    },
                    "redundant": {
                        "type": "integer",
                        "description": "Sound ones that describe nothing that others do not describe, too.",
                    },
                    "left-out": {
                        "type": "array",
                        "description": f"What is no index file of this table that can be used; the first {_TOLD_MAX}.",
                        "items": {
                            "type": "object",
                            "required": ["location", "reason"],
                            "properties": {"location": {"type": "string"}, "reason": {"type": "string"}},
                        },
                    },
                    "left-out-files": _COUNT,
                },
            },
        ),
        NO_INDEX,
        ResponseSpec(413, f"The folder holds more than {FOLDER_FILES_MAX:,} files"),
    ),
)
async def rebuild_index_registry(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    table = await load(request, namespace, path_name(request, "table"))
    folder = f"{table.metadata.location.rstrip('/')}/{INDEX_FOLDER}"
    known = {one.location for one in table.registered.files}
    listed = await _listed(request, folder)
    definitions = {one.id: one for one in read_definitions(table.metadata).by_name.values()}
    found, left_out = await _described(
        request, table, definitions, [one for one in listed if one.location not in known]
    )
    registered, redundant = [], 0
    for definition in definitions.values():
        mine = sorted((one for one in found if one.described.header.definition == definition.id), key=lambda f: f.rank)
        needed = await _needed(request, table, definition, mine)
        redundant += len(mine) - len(needed)
        if needed:
            await _register(request, table, definition, needed)
            registered.append(_told(definition, needed))
    return json_answer(
        {
            "folder": folder,
            "known": sum(one.location in known for one in listed),
            "registered": registered,
            "redundant": redundant,
            "left-out": [{"location": one, "reason": why} for one, why in sorted(left_out.items())[:_TOLD_MAX]],
            "left-out-files": len(left_out),
        }
    )


async def _listed(request: web.Request, folder: str) -> list[ObjectInfo]:
    """Without what somebody is writing: names that begin with a dot."""
    found: list[ObjectInfo] = []
    async for one in request.app[OBJECTS].list(folder):
        if not one.location.rpartition("/")[2].startswith("."):
            found.append(one)
        if len(found) > FOLDER_FILES_MAX:
            raise TooLarge(f"{folder} holds more than {FOLDER_FILES_MAX:,} files; delete it and build the indexes anew")
    return found


async def _described(
    request: web.Request,
    table: TableIndexes,
    definitions: Mapping[str, IndexDefinition],
    files: Sequence[ObjectInfo],
) -> tuple[list[_Found], dict[str, str]]:
    """Those that are of the table and of one of its indexes; of the others, by location, what is wrong."""
    at_once = asyncio.Semaphore(_READ_AT_ONCE)

    async def described(one: ObjectInfo) -> IndexFileSummary | str:
        async with at_once:
            try:
                found = await request.app[READER].describe(one.location, one.size_bytes)
            except (Corrupt, ObjectMissing) as error:
                return error.message
            except UnknownVersion as error:
                return str(error)
        header = found.header
        if header.table_uuid != table.entry.uuid:
            return f"it is of the table {header.table_uuid}"
        definition = definitions.get(header.definition)
        if definition is None or definition.kind != header.kind:
            return f"no index of the table is {header.kind} {header.definition[:500]}"
        return found

    found: list[_Found] = []
    left_out: dict[str, str] = {}
    for one, said in zip(files, await asyncio.gather(*map(described, files)), strict=True):
        if isinstance(said, str):
            left_out[one.location] = said
        else:
            found.append(_Found(one, said))
    return found, left_out


async def _needed(
    request: web.Request, table: TableIndexes, definition: IndexDefinition, found: Sequence[_Found]
) -> list[_Found]:
    """Of these, in their order, each that describes a data file that neither a live one nor one before it does.

    Data files are told apart by half of their identity: should two agree in it, one is indexed anew.
    """
    if not found:
        return []
    live = []
    for one in table.registered.live(definition.id):
        # One that cannot be read describes nothing; whoever plans with it next puts it aside.
        with suppress(Corrupt, ObjectMissing, UnknownVersion):
            live.append(await request.app[READER].describe(one.location, one.size_bytes))
    ids = [one.ids[:, 0] for one in (*live, *(one.described for one in found))]

    def choose() -> list[_Found]:
        owners = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
        _, first = np.unique(np.concatenate(ids), return_index=True)
        return [found[number - len(live)] for number in np.unique(owners[first]).tolist() if number >= len(live)]

    return await asyncio.to_thread(choose)


async def _register(
    request: web.Request, table: TableIndexes, definition: IndexDefinition, files: Sequence[_Found]
) -> None:
    now_ms = request.app[CLOCK].now_ms()
    add = [
        RegisteredIndexFile(
            uuid=table.entry.uuid,
            location=one.info.location,
            definition=definition.id,
            kind=definition.kind,
            level=one.described.header.level,
            files=one.described.header.files,
            rows=one.described.header.rows,
            size_bytes=one.info.size_bytes,
            snapshot_id=None,
            created_ms=one.info.modified_ms,
            changed_ms=now_ms,
        )
        for one in files
    ]
    for start in range(0, len(add), _REGISTERED_AT_ONCE):
        part = add[start : start + _REGISTERED_AT_ONCE]
        await request.app[REGISTRY].replace(table.entry.uuid, definition.id, add=part)


def _told(definition: IndexDefinition, files: Sequence[_Found]) -> dict[str, Any]:
    headers = [one.described.header for one in files]
    return {
        "index": definition.name,
        "index-files": len(files),
        "files": sum(header.files for header in headers),
        "rows": sum(header.rows for header in headers),
        "size-in-bytes": sum(header.size_bytes for header in headers),
    }


def add_routes(app: web.Application) -> None:
    # aiohttp's own pattern for a variable leaves out braces, which names may hold.
    indexes = "/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/indexes"
    app.router.add_post(f"{indexes}/rebuild-registry", rebuild_index_registry)
    app.router.add_post(f"{indexes}/{{index:[^/]+}}/quarantine", quarantine_index_file)
    app.router.add_post(f"{indexes}/{{index:[^/]+}}/audits", record_index_audit)
