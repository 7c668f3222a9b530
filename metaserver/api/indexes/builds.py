"""Routes of index builds: begin, list the files without index, register index files, finish.

The only state of a build is an instant `indexing` on the table's timeline. Any client that has its id can continue it
after a crash, on any worker. The missing files are computed from the current table, so that a builder that asks until
none is left has indexed concurrent commits, too. Index files are written to the build's folder, and the registered
files of that folder are its progress; registering a file twice has no further effect.

Builders are not trusted: the server reads the footer and the files table of each index file before plans use it.
Builds neither wait for writers nor delay them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web

from seamark.metaserver.api.formats.listings import FILE_COLUMNS, FileListing, items
from seamark.metaserver.api.http.describe import NAMESPACE, TABLE, Parameter, ResponseSpec, describe
from seamark.metaserver.api.http.keys import CLOCK, PAGES, REGISTRY, SETTINGS, STORE, TIMELINE
from seamark.metaserver.api.http.paging import page_size
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, caller, path_name, path_namespace, read_body, read_json
from seamark.metaserver.api.indexes.build_state import (
    ACTION,
    Build,
    load_build,
    move,
    progress_of,
    record_progress,
    require_alone,
    require_inflight,
    roll_back_abandoned,
    shown,
)
from seamark.metaserver.api.indexes.index_state import (
    READER,
    SnapshotFiles,
    load,
    missing,
    new_files_by_snapshot,
    snapshots_named,
)
from seamark.metaserver.api.indexes.indexes import INDEX, NO_INDEX, defined_index
from seamark.metaserver.errors import BadRequest, CommitConflict
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.index.blocks.packing import Longs
from seamark.metaserver.index.files.registration import read_index_file
from seamark.metaserver.planner.lookup.lookup import files_at
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import EntryKind, Instant, InstantState, RegisteredIndexFile
from seamark.metaserver.store.operations import MoveInstant, RecordInstant
from seamark.metaserver.wire import INDEX_FOLDER, decode_as

REGISTERED_MAX = 1000
"""The limit of index files in one request."""
_FILE_FIELDS = ("file-path", "file-size-in-bytes", "record-count", "file-format", "spec-id", "partition")
_COUNT = {"type": "integer"}

_BUILD = Parameter("build", "path", "The id of the build.", {"type": "string"}, True)
_AT = (NAMESPACE, TABLE, INDEX, _BUILD)
_ONE = ResponseSpec(200, "The state of the build", {"$ref": "#/components/schemas/IndexBuild"})
_NO_BUILD = ResponseSpec(404, "No such table, index or build")
_ENDED = ResponseSpec(409, "The build has ended, or another build replaced an index file first")


class _RegisteredFile(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    location: str
    size_in_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RegisterBody(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    index_files: list[_RegisteredFile]
    replaces: list[str] = []


class StartBody(msgspec.Struct, forbid_unknown_fields=True):
    exclusive: bool = False


class FinishBody(msgspec.Struct, forbid_unknown_fields=True):
    outcome: str = "completed"
    reason: str | None = None


class _Token(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a view keep their numbers while files are indexed, so that pages neither skip nor repeat files. The
    listing continues with row `row` of snapshot number `at`."""

    build: str
    snapshots: tuple[int, ...]
    at: int
    row: int


@describe(
    "startIndexBuild",
    "Starts a build of an index: creates an instant on the timeline and a folder for its index files",
    tags=("indexes",),
    parameters=(NAMESPACE, TABLE, INDEX),
    body={
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "exclusive": {
                "type": "boolean",
                "default": False,
                "description": "Only if no other build of the index is under way.",
            },
        },
    },
    answers=(
        _ONE,
        ResponseSpec(400, "The index is paused or its definition is invalid"),
        NO_INDEX,
        ResponseSpec(409, "The request is exclusive and another build of the index runs"),
    ),
)
async def start_index_build(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "index")
    allow(request, namespace)
    given = await read_body(request)
    body = decode_as(given, StartBody, "The body") if given else StartBody()
    table = await load(request, namespace, path_name(request, "table"))
    definition = defined_index(table.metadata, name)
    if not definition.enabled:
        raise BadRequest(f"The index {name} is paused; resume it before you build it")
    await roll_back_abandoned(request, table)
    if body.exclusive:
        await require_alone(request, table, name)
    new_files = await new_files_by_snapshot(request, table.metadata, snapshots_named(table.metadata))
    live = table.registered.live(definition.id)
    lag = [(new.files, await missing(request, new, live)) for new in new_files]
    clock = request.app[CLOCK]
    build_id, now_ms = str(clock.uuid7()), clock.now_ms()
    summary = {
        "request-id": caller(request).request_id,
        "index": name,
        "definition": definition.id,
        "folder": f"{table.metadata.location.rstrip('/')}/{INDEX_FOLDER}/{build_id}",
        "files-total": sum(int(mask.sum()) for _, mask in lag),
        "rows-total": sum(files.rows_in(mask) for files, mask in lag),
        "active-ms": now_ms,
    }
    instant = Instant(
        id=build_id,
        action=ACTION,
        state=InstantState.REQUESTED,
        kind=EntryKind.TABLE,
        namespace=namespace,
        name=table.entry.name,
        uuid=table.entry.uuid,
        requested_ms=now_ms,
        who=caller(request).who,
        snapshot_id=table.metadata.current_snapshot_id,
        metadata_location=table.entry.metadata_location,
        summary=summary,
    )
    # In one transaction: otherwise a lost answer could leave a requested instant behind.
    begin = MoveInstant(id=build_id, expected=instant.state, state=InstantState.INFLIGHT, now_ms=now_ms)
    await request.app[STORE].transact([RecordInstant(instant=instant), begin])
    request.app[TIMELINE].notify()
    instant = msgspec.structs.replace(instant, state=InstantState.INFLIGHT)
    if body.exclusive:
        # Checked again now that others see this build: of two builds that begin together, at least one is rolled back.
        try:
            await require_alone(request, table, name, but=build_id)
        except CommitConflict:
            await move(request, instant, InstantState.ROLLED_BACK, {"reason": "another build was in progress"})
            raise
    return json_answer(shown(Build(table, definition, instant)))


@describe(
    "loadIndexBuild",
    "Returns the progress of a build",
    tags=("indexes",),
    parameters=_AT,
    answers=(_ONE, _NO_BUILD),
)
async def load_index_build(request: web.Request) -> web.Response:
    allow(request, path_namespace(request))
    return json_answer(shown(await load_build(request)))


@describe(
    "listIndexBuildFiles",
    "Lists data files that the index does not cover, in the current snapshot and then in the snapshots of"
    " branches and tags; repeat until the list is empty",
    tags=("indexes",),
    parameters=(
        *_AT,
        Parameter("page-token", "query", "The next-page-token of the previous answer.", {"type": "string"}),
        Parameter("limit", "query", "Maximum number of files.", {"type": "integer", "minimum": 1}),
    ),
    answers=(
        ResponseSpec(
            200,
            "One page, of the snapshots that were current or referenced at the first page",
            {
                "type": "object",
                "required": ["snapshot-id", "files", "next-page-token"],
                "properties": {
                    "snapshot-id": {"type": ["integer", "null"], "description": "The first of these snapshots."},
                    "files": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": list(_FILE_FIELDS),
                            "properties": {name: FILE_COLUMNS[name] for name in _FILE_FIELDS},
                        },
                    },
                    "next-page-token": {"type": ["string", "null"]},
                },
            },
        ),
        _NO_BUILD,
        _ENDED,
    ),
)
async def list_index_build_files(request: web.Request) -> web.Response:
    allow(request, path_namespace(request))
    most = request.app[SETTINGS].page_limit
    limit = page_size(request.query.get("limit", str(most)), "limit", most)
    build = await load_build(request, inflight=True)
    metadata = build.table.metadata
    token = _token(request, build) or _Token(build.instant.id, snapshots_named(metadata), 0, 0)
    new_files = await new_files_by_snapshot(request, metadata, token.snapshots)
    live = build.table.registered.live(build.definition.id)
    page: list[tuple[SnapshotFiles, Longs]] = []
    following = None
    for at in range(token.at, len(new_files)):
        rows = np.flatnonzero(await missing(request, new_files[at], live))
        rows = rows[rows >= token.row] if at == token.at else rows
        chosen, limit = rows[:limit], limit - min(limit, len(rows))
        page.append((new_files[at].files, chosen))
        if len(rows) > len(chosen):
            following = _Token(token.build, token.snapshots, at, int(rows[len(chosen)]))
            break

    def answer() -> dict[str, Any]:
        return {
            "snapshot-id": token.snapshots[0] if token.snapshots else None,
            "files": [manifest for files, rows in page for manifest in _items(metadata, files, rows)],
            "next-page-token": None
            if following is None
            else request.app[PAGES].encode(msgspec.json.encode(following).decode()),
        }

    return json_answer(await asyncio.to_thread(answer))


def _items(metadata: TableMetadata, files: SnapshotFiles, rows: Longs) -> list[dict[str, Any]]:
    """The answer's items for these rows of a view."""
    named = np.concatenate([np.empty(0, dtype=np.int64), *map(files.view.rows_of, range(len(files.view.blocks)))])
    none = files_at(TableView((), ()), named[:0])
    return items(FileListing(metadata, files_at(files.view, named[rows]), none, None), _FILE_FIELDS, 0, len(rows))


@describe(
    "registerIndexFiles",
    "Registers index files of a build: the server checks each file, and plans use it afterwards",
    tags=("indexes",),
    parameters=_AT,
    body={
        "type": "object",
        "required": ["index-files"],
        "additionalProperties": False,
        "properties": {
            "index-files": {
                "type": "array",
                "maxItems": REGISTERED_MAX,
                "items": {
                    "type": "object",
                    "required": ["location", "size-in-bytes"],
                    "properties": {"location": {"type": "string"}, "size-in-bytes": _COUNT},
                },
            },
            "replaces": {
                "type": "array",
                "maxItems": REGISTERED_MAX,
                "items": {"type": "string"},
                "description": "Live index files of the same definition that these supersede, in one transaction.",
            },
        },
    },
    answers=(
        ResponseSpec(200, "The state of the build", {"$ref": "#/components/schemas/IndexBuild"}),
        ResponseSpec(400, "A file is not an index file of this build; no file is registered"),
        _NO_BUILD,
        _ENDED,
    ),
)
async def register_index_files(request: web.Request) -> web.Response:
    allow(request, path_namespace(request))
    body = await read_json(request, RegisterBody)
    if max(len(body.index_files), len(body.replaces)) > REGISTERED_MAX:
        raise BadRequest(f"The request has more than {REGISTERED_MAX} index files; send them in several requests")
    if not body.index_files:
        raise BadRequest("index-files is empty; name the files that the build has written")
    build = await load_build(request, inflight=True)
    add = await asyncio.gather(*(_checked(request, build, file) for file in body.index_files))
    registry = request.app[REGISTRY]
    await registry.replace(build.table.entry.uuid, build.definition.id, add=add, remove=body.replaces)
    build = await load_build(request)
    await record_progress(request, build)
    return json_answer(shown(build))


@describe(
    "finishIndexBuild",
    "Ends a build; its registered index files stay",
    tags=("indexes",),
    parameters=_AT,
    body={
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "outcome": {"enum": ["completed", "rolled-back"]},
            "reason": {"type": ["string", "null"], "description": "Why it was rolled back."},
        },
    },
    answers=(_ONE, _NO_BUILD, _ENDED),
)
async def finish_index_build(request: web.Request) -> web.Response:
    allow(request, path_namespace(request))
    given = await read_body(request)
    body = decode_as(given, FinishBody, "The body") if given else FinishBody()
    states = {"completed": InstantState.COMPLETED, "rolled-back": InstantState.ROLLED_BACK}
    if body.outcome not in states:
        raise BadRequest(f"outcome is {body.outcome[:40]!r}; it must be completed or rolled-back")
    build = await load_build(request)
    if build.instant.state is not states[body.outcome]:  # otherwise it is a repeat
        require_inflight(build.instant)
        reason = {} if body.reason is None else {"reason": body.reason[:1000]}
        await move(request, build.instant, states[body.outcome], {**progress_of(build), **reason})
        build = await load_build(request)
    return json_answer(shown(build))


async def _checked(request: web.Request, build: Build, file_body: _RegisteredFile) -> RegisteredIndexFile:
    """The registry's record of the index file, read from the file itself. BadRequest if it does not fit the build."""
    file = await read_index_file(
        request.app[READER],
        file_body.location,
        file_body.size_in_bytes,
        folder=build.folder,
        table_uuid=build.table.entry.uuid,
        snapshot_id=build.instant.snapshot_id,
        now_ms=request.app[CLOCK].now_ms(),
    )
    if (file.definition, file.kind) != (build.definition.id, build.definition.kind):
        raise BadRequest(
            f"Cannot register {file.location}: it belongs to the index {file.kind} {file.definition[:500]}"
        )
    return file


def _token(request: web.Request, build: Build) -> _Token | None:
    text = request.query.get("page-token")
    if text is None:
        return None
    try:
        packed = (request.app[PAGES].decode(text) or "").encode()
        token = msgspec.json.decode(packed, type=_Token)
    except (BadRequest, msgspec.DecodeError):
        token = None
    if token is None or token.build != build.instant.id or token.row < 0 or not 0 <= token.at < len(token.snapshots):
        raise BadRequest(f"page-token is {text[:40]!r}, which is not of this listing; start again without it")
    for snapshot_id in token.snapshots:
        if build.table.metadata.snapshot(snapshot_id) is None:
            raise BadRequest(f"The snapshot {snapshot_id} of the listing has expired; start again without page-token")
    return token


def add_routes(app: web.Application) -> None:
    # aiohttp's default pattern for a variable excludes braces, which names may contain.
    builds = "/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/indexes/{index:[^/]+}/builds"
    app.router.add_post(builds, start_index_build)
    build = f"{builds}/{{build:[^/]+}}"
    app.router.add_get(build, load_index_build)
    app.router.add_get(f"{build}/files", list_index_build_files)
    app.router.add_post(f"{build}/index-files", register_index_files)
    app.router.add_post(f"{build}/finish", finish_index_build)
