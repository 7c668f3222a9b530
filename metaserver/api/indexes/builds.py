"""Routes of index builds: begin, list the files without index, register index files, finish.

The only state of a build is an instant `indexing` on the table's timeline. Any client that has the id of the build can
continue it after a crash, on any worker. The missing files are computed from the current table, so a builder that
continues until no file is missing has also indexed the files of concurrent commits. Index files are written to the
folder of the build, and the registered files in this folder are its progress. Registering a file twice has no further
effect.

Builders are not trusted: the server reads the footer and the files table of each index file before plans use it.
Builds neither wait for writers nor delay them.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import numpy as np

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.lookups import PREFIX as LOOKUP_PREFIX
from seamark.formats.index.keys.lookups import remove_snapshots
from seamark.formats.index.packing import Longs
from seamark.formats.protocol.wire import INDEX_FOLDER
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from seamark.metaserver.api.formats.listings import FILE_COLUMNS, FileListing, make_items
from seamark.metaserver.api.http.describe import BodySize, Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.parameters.paging import parse_page_size
from seamark.metaserver.api.indexes.build_state import (
    Build,
    compute_progress,
    describe_build,
    load_requested_build,
    move_build,
    record_progress,
    require_inflight,
    require_no_other_build,
    roll_back_abandoned,
)
from seamark.metaserver.api.indexes.dimension_rights import check_dimension_rights
from seamark.metaserver.api.indexes.index_state import (
    READER,
    REFUSED_FILES,
    SnapshotFiles,
    find_missing_files,
    find_named_snapshots,
    find_new_files_by_snapshot,
    load_requested_table,
)
from seamark.metaserver.api.indexes.indexes import INDEXES_PATH, NO_INDEX, find_defined_index
from seamark.metaserver.catalog.pointers import get_files_folder
from seamark.metaserver.index.files.registration import read_index_file
from seamark.metaserver.index.files.registry import IndexFiles
from seamark.metaserver.planner.lookup.lookup import find_files_at
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import EntryKind, IndexFileState, Instant, InstantState, RegisteredIndexFile
from seamark.metaserver.store.operations import MoveInstant, RecordInstant
from seamark.metaserver.timeline.instants import INDEXING

REGISTERED_MAX = 1000
"""The maximum number of index files in one request."""
REFUSED_MAX = 1000
"""The maximum number of refused data files in one request."""
_EARLIER_FILES_MAX = 1000
"""The maximum number of index files of earlier definitions in the answer to the start of a build."""
_FILE_FIELDS = ("file-path", "file-size-in-bytes", "record-count", "file-format", "spec-id", "partition")

_REFUSED = "refused"

_BUILDS = f"{INDEXES_PATH}/{{index}}/builds"
_BUILD = f"{_BUILDS}/{{build}}"
_ONE_BUILD = ResponseSpec(200, "The state of the build", {"$ref": "#/components/schemas/IndexBuild"})
_NO_BUILD = ResponseSpec(404, "No such table, index or build")
_BUILD_ENDED = ResponseSpec(409, "The build has ended, or another build replaced an index file first")


class WrittenIndexFile(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """An index file that a builder has written."""

    location: str
    size_in_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RegisterIndexFilesRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to register index files of a build."""

    index_files: Annotated[list[WrittenIndexFile], doc(f"1 to {REGISTERED_MAX} index files.")]
    replaces: Annotated[
        list[str],
        doc(
            f"At most {REGISTERED_MAX} live index files of the same definition, which the new files supersede in one "
            "transaction."
        ),
    ] = []


class StartBuildRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to start a build."""

    exclusive: Annotated[bool, doc("Whether to start only if no other build of the index is running.")] = False


class RefusedFile(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A data file of which the index cannot have an entry."""

    file_path: str
    reason: str


class FinishBuildRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to end a build."""

    outcome: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["completed", "rolled-back"]})] = "completed"
    reason: Annotated[str | None, doc("The reason why the build was rolled back.")] = None
    refused_files: Annotated[
        list[RefusedFile],
        doc(
            f"At most {REFUSED_MAX} data files that no build of this index can describe. Later builds receive these "
            "files with the reason, and need not read them. The server may forget them."
        ),
    ] = []


class _Token(msgspec.Struct, frozen=True, array_like=True):
    """The position in a listing of the files that a build has to index.

    The files of a snapshot keep their positions while they are indexed, so pages neither skip nor repeat files.

    Attributes:
        build: The id of the build.
        snapshots: The snapshots whose files are listed, one after another.
        at: The number of the next snapshot in `snapshots`.
        row: The position of the next file in this snapshot.
    """

    build: str
    snapshots: tuple[int, ...]
    at: int
    row: int


@Route(
    "POST",
    _BUILDS,
    "startIndexBuild",
    "Start a build of an index: create an instant on the timeline and a folder for its index files",
    tags=("indexes",),
    is_body_optional=True,
    answers=(
        _ONE_BUILD,
        ResponseSpec(400, "The index is paused or its definition is invalid"),
        ResponseSpec(403, "The caller may not read a dimension table whose attributes the cube has"),
        NO_INDEX,
        ResponseSpec(409, "The request is exclusive, and another build of the index is running"),
    ),
).takes(StartBuildRequest)
async def start_index_build(call: Call, body: StartBuildRequest) -> dict[str, Any]:
    """Start a build of an index: create an instant on the timeline and a folder for its index files."""
    name, table = call.names[1], await load_requested_table(call)
    definition = find_defined_index(table.metadata, name)
    await check_dimension_rights(call, definition.dimension_tables)
    if not definition.enabled:
        raise BadRequest(f"The index {name} is paused; resume it before you build it")
    await roll_back_abandoned(call, table)
    if body.exclusive:
        await require_no_other_build(call, table, name)
    new_files = await find_new_files_by_snapshot(call, table.metadata, find_named_snapshots(table.metadata))
    live_files = table.registered.list_live_files(definition.id)
    missing_files = [(entry.files, await find_missing_files(call, entry, live_files)) for entry in new_files]
    clock = call.components.clock
    build_id, now_ms = str(clock.uuid7()), clock.now_ms()
    summary = {
        "request-id": call.caller.request_id,
        "index": name,
        "definition": definition.id,
        "folder": f"{get_files_folder(call.components.settings, table.metadata)}/{INDEX_FOLDER}/{build_id}",
        "files-total": sum(int(mask.sum()) for _, mask in missing_files),
        "rows-total": sum(files.count_rows(mask) for files, mask in missing_files),
        "active-ms": now_ms,
    }
    instant = Instant(
        id=build_id,
        action=INDEXING,
        state=InstantState.REQUESTED,
        kind=EntryKind.TABLE,
        namespace=call.namespace,
        name=table.entry.name,
        uuid=table.entry.uuid,
        requested_ms=now_ms,
        principal_name=call.caller.principal_name,
        snapshot_id=table.metadata.current_snapshot_id,
        metadata_location=table.entry.metadata_location,
        summary=summary,
    )
    # Use one transaction. Otherwise, a lost answer could leave an instant in the state requested.
    begin = MoveInstant(id=build_id, expected=instant.state, state=InstantState.INFLIGHT, now_ms=now_ms)
    await call.components.store.transact([RecordInstant(instant=instant), begin])
    call.components.timeline.notify()
    instant = msgspec.structs.replace(instant, state=InstantState.INFLIGHT)
    if body.exclusive:
        # Check again, because other builds now see this build. If two builds begin at the same time, at least one is
        # rolled back.
        try:
            await require_no_other_build(call, table, name, own_id=build_id)
        except CommitConflict:
            await move_build(call, instant, InstantState.ROLLED_BACK, {"reason": "another build was in progress"})
            raise
    answer = describe_build(Build(table, definition, instant))
    return {**answer, "earlier-index-files": list_earlier_files(table.registered, definition)}


def list_earlier_files(registered: IndexFiles, definition: IndexDefinition) -> list[dict[str, str]]:
    """Return the index files of definitions that differ only by the snapshots of dimension tables, newest first.

    At most `_EARLIER_FILES_MAX` files are returned. Quarantined files are left out.
    """
    if not definition.dimension_tables:
        return []
    id_without_snapshots = remove_snapshots(definition.id)
    # A table has thousands of index files, but few definitions.
    other_definitions = {file.definition for file in registered.files} - {definition.id}
    earlier_definitions = {
        other
        for other in other_definitions
        if LOOKUP_PREFIX in other and remove_snapshots(other) == id_without_snapshots
    }
    earlier_files = [
        file
        for file in registered.files
        if file.state is not IndexFileState.QUARANTINED and file.definition in earlier_definitions
    ]
    return [
        {"location": file.location, "definition-id": file.definition}
        for file in sorted(earlier_files, key=lambda file: file.created_ms, reverse=True)[:_EARLIER_FILES_MAX]
    ]


@Route(
    "GET",
    _BUILD,
    "loadIndexBuild",
    "Return the progress of a build",
    tags=("indexes",),
    answers=(_ONE_BUILD, _NO_BUILD),
)
async def load_index_build(call: Call) -> dict[str, Any]:
    """Return the progress of an index build."""
    return describe_build(await load_requested_build(call))


@Route(
    "GET",
    f"{_BUILD}/files",
    "listIndexBuildFiles",
    "List data files that the index does not cover, first in the current snapshot, and then in the snapshots of"
    " branches and tags. Repeat the request until the list is empty",
    tags=("indexes",),
    parameters=(
        Parameter("page-token", "query", "The next-page-token of the previous answer.", {"type": "string"}),
        Parameter("limit", "query", "The maximum number of files.", {"type": "integer", "minimum": 1}),
    ),
    answers=(
        ResponseSpec(
            200,
            "One page of files, from the snapshots that were current or referenced at the time of the first page",
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
                            "properties": {
                                **{name: FILE_COLUMNS[name] for name in _FILE_FIELDS},
                                _REFUSED: {
                                    "type": "string",
                                    "description": "The reason why an earlier build could not index the file.",
                                },
                            },
                        },
                    },
                    "next-page-token": {"type": ["string", "null"]},
                },
            },
        ),
        _NO_BUILD,
        _BUILD_ENDED,
    ),
)
async def list_index_build_files(call: Call) -> dict[str, Any]:
    """List data files that the index does not cover, first in the current snapshot and then in branches and tags."""
    page_max = call.components.settings.page_limit
    limit = parse_page_size(call.query.get("limit", str(page_max)), "limit", page_max)
    build = await load_requested_build(call, inflight=True)
    metadata = build.table.metadata
    token = _read_token(call, build) or _Token(build.instant.id, find_named_snapshots(metadata), 0, 0)
    new_files = await find_new_files_by_snapshot(call, metadata, token.snapshots)
    live_files = build.table.registered.list_live_files(build.definition.id)
    page: list[tuple[SnapshotFiles, Longs]] = []
    next_token = None
    for position in range(token.at, len(new_files)):
        rows = np.flatnonzero(await find_missing_files(call, new_files[position], live_files))
        rows = rows[rows >= token.row] if position == token.at else rows
        page_rows, limit = rows[:limit], limit - min(limit, len(rows))
        page.append((new_files[position].files, page_rows))
        if len(rows) > len(page_rows):
            next_token = _Token(token.build, token.snapshots, position, int(rows[len(page_rows)]))
            break

    refused_files, index_key = call.app[REFUSED_FILES], (build.table.entry.uuid, build.definition.id)

    def build_answer() -> dict[str, Any]:
        files_json = [file_json for files, rows in page for file_json in _list_items(metadata, files, rows)]
        reasons = refused_files.find_reasons(index_key, (file_json["file-path"] for file_json in files_json))
        for file_json in files_json:
            if file_json["file-path"] in reasons:
                file_json[_REFUSED] = reasons[file_json["file-path"]]
        return {
            "snapshot-id": token.snapshots[0] if token.snapshots else None,
            "files": files_json,
            "next-page-token": None
            if next_token is None
            else call.components.catalog.pages.encode(msgspec.json.encode(next_token).decode()),
        }

    return await asyncio.to_thread(build_answer)


def _list_items(metadata: TableMetadata, files: SnapshotFiles, rows: Longs) -> list[dict[str, Any]]:
    """Return the files at these positions among the data files of a snapshot as items of the answer."""
    entry_ids = np.concatenate(
        [np.empty(0, dtype=np.int64), *map(files.view.list_block_entry_ids, range(len(files.view.blocks)))]
    )
    no_files = find_files_at(TableView((), ()), entry_ids[:0])
    return make_items(
        FileListing(metadata, find_files_at(files.view, entry_ids[rows]), no_files, None), _FILE_FIELDS, 0, len(rows)
    )


@Route(
    "POST",
    f"{_BUILD}/index-files",
    "registerIndexFiles",
    "Register index files of a build. The server checks each file, and plans use it afterwards",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(
        _ONE_BUILD,
        ResponseSpec(400, "A file is not an index file of this build; no file is registered"),
        _NO_BUILD,
        _BUILD_ENDED,
    ),
).takes(RegisterIndexFilesRequest)
async def register_index_files(call: Call, body: RegisterIndexFilesRequest) -> dict[str, Any]:
    """Register index files of a build. The server checks each file, and plans use it afterwards."""
    if max(len(body.index_files), len(body.replaces)) > REGISTERED_MAX:
        raise BadRequest(f"The request has more than {REGISTERED_MAX} index files; send them in several requests")
    if not body.index_files:
        raise BadRequest("index-files is empty; name the files that the build has written")
    build = await load_requested_build(call, inflight=True)
    checked_files = await asyncio.gather(*(_read_checked_file(call, build, file) for file in body.index_files))
    registry = call.components.registry
    await registry.replace(build.table.entry.uuid, build.definition.id, add=checked_files, remove=body.replaces)
    build = await load_requested_build(call)
    await record_progress(call, build)
    return describe_build(build)


@Route(
    "POST",
    f"{_BUILD}/finish",
    "finishIndexBuild",
    "End a build. Its registered index files stay",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    is_body_optional=True,
    answers=(_ONE_BUILD, _NO_BUILD, _BUILD_ENDED),
).takes(FinishBuildRequest)
async def finish_index_build(call: Call, body: FinishBuildRequest) -> dict[str, Any]:
    """End a build. Its registered index files stay."""
    states = {"completed": InstantState.COMPLETED, "rolled-back": InstantState.ROLLED_BACK}
    if body.outcome not in states:
        raise BadRequest(f"outcome is {body.outcome[:40]!r}; it must be completed or rolled-back")
    if len(body.refused_files) > REFUSED_MAX:
        raise BadRequest(f"The request has more than {REFUSED_MAX} refused files; send only the first")
    build = await load_requested_build(call)
    # If the index was redefined during the build, the reasons do not apply to the new definition.
    if build.definition.id == build.instant.summary["definition"]:
        reasons = [(file.file_path, file.reason) for file in body.refused_files]
        call.app[REFUSED_FILES].add((build.table.entry.uuid, build.definition.id), reasons)
    if build.instant.state is not states[body.outcome]:  # A repeated request changes nothing.
        require_inflight(build.instant)
        reason = {} if body.reason is None else {"reason": body.reason[:1000]}
        await move_build(call, build.instant, states[body.outcome], {**compute_progress(build), **reason})
        build = await load_requested_build(call)
    return describe_build(build)


async def _read_checked_file(call: Call, build: Build, written_file: WrittenIndexFile) -> RegisteredIndexFile:
    """Read an index file, and return its registry entry.

    Raises:
        BadRequest: The index file does not belong to the build.
    """
    file = await read_index_file(
        call.app[READER],
        written_file.location,
        written_file.size_in_bytes,
        folder=build.folder,
        table_uuid=build.table.entry.uuid,
        snapshot_id=build.instant.snapshot_id,
        now_ms=call.components.clock.now_ms(),
    )
    if (file.definition, file.kind) != (build.definition.id, build.definition.kind):
        raise BadRequest(
            f"Cannot register {file.location}: it belongs to the index {file.kind} {file.definition[:500]}"
        )
    return file


def _read_token(call: Call, build: Build) -> _Token | None:
    """Return the position in the page token of a request, or None if there is no token.

    Raises:
        BadRequest: The token belongs to a different listing, or a snapshot has expired.
    """
    text = call.query.get("page-token")
    if text is None:
        return None
    try:
        token_json = (call.components.catalog.pages.decode(text) or "").encode()
        token = convert_json(token_json, _Token)
    except (BadRequest, msgspec.DecodeError):
        token = None
    if token is None or token.build != build.instant.id or token.row < 0 or not 0 <= token.at < len(token.snapshots):
        raise BadRequest(f"page-token is {text[:40]!r}, which does not belong to this listing; start again without it")
    for snapshot_id in token.snapshots:
        if build.table.metadata.snapshot(snapshot_id) is None:
            raise BadRequest(f"The snapshot {snapshot_id} of the listing has expired; start again without page-token")
    return token
