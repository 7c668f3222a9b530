"""Routes for the results of audits: quarantine a damaged index file, record an audit, rebuild the registry.

An audit of an index is an instant `auditing` on the table's timeline. Listings take the time of the audit from it.
`metaserver/index/files/registry_rebuild.py` rebuilds the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.runtime.errors import BadRequest, NotFound
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.indexes.index_state import AUDITING, READER, TableIndexes, load_requested_table
from seamark.metaserver.api.indexes.indexes import INDEXES_PATH, NO_INDEX, find_defined_index
from seamark.metaserver.catalog.pointers import get_files_folder
from seamark.metaserver.index.files.registry_rebuild import FOLDER_FILES_MAX, FolderIndexFile, RegistryRebuild
from seamark.metaserver.store.model import IndexFileState, RegisteredIndexFile

REASON_MAX = 1000
_LEFT_OUT_MAX = 100
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RecordAuditRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """The result of an audit."""

    index_files: Annotated[Count, doc("The number of index files that were verified.")]
    damaged: Annotated[Count, doc("The number of damaged index files.")] = 0
    size_in_bytes: Count = 0


class QuarantineIndexFileRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to quarantine an index file."""

    location: Annotated[str, doc("The location of a registered index file of this index.")]
    reason: Annotated[str, doc("The problem of the index file.")]
    check: Annotated[
        bool, doc("Whether the server first reads the whole file, and quarantines it only if it is damaged or missing.")
    ] = False


class QuarantineIndexFileResponse(msgspec.Struct):
    """The state of an index file."""

    location: str
    state: IndexFileState
    reason: str | None


class RecordAuditResponse(msgspec.Struct, rename="kebab"):
    """The instant of an audit."""

    id: str
    audited_ms: int


class RebuiltIndex(msgspec.Struct, rename="kebab"):
    """The index files of one index that a rebuild has registered."""

    index: str
    index_files: int
    files: int
    rows: int
    size_in_bytes: int


class SkippedIndexFile(msgspec.Struct):
    """A file that a rebuild has not registered."""

    location: str
    reason: str


class RebuildRegistryResponse(msgspec.Struct, rename="kebab"):
    """The result of a rebuild of the registry."""

    folder: Annotated[str, doc("The folder that was searched.")]
    registered_before: Annotated[int, doc("The number of its files that the registry listed before.")] = msgspec.field(
        name="known"
    )
    registered: Annotated[list[RebuiltIndex], doc("The newly registered index files, which plans now use, by index.")]
    redundant: Annotated[int, doc("The number of intact index files whose data files other index files also cover.")]
    left_out: Annotated[
        list[SkippedIndexFile],
        doc(f"The first {_LEFT_OUT_MAX} files that are not usable index files of this table."),
    ]
    left_out_files: int


@Route(
    "POST",
    f"{INDEXES_PATH}/{{index}}/quarantine",
    "quarantineIndexFile",
    "Quarantine an index file that an audit found wrong. Plans no longer use it, and its data files are not covered",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The state of the index file", QuarantineIndexFileResponse),
        ResponseSpec(400, "The reason is missing"),
        ResponseSpec(404, "No such table or index, or no such index file of it"),
    ),
).takes(QuarantineIndexFileRequest)
async def quarantine_index_file(call: Call, body: QuarantineIndexFileRequest) -> QuarantineIndexFileResponse:
    """Quarantine an index file that an audit found wrong, so that plans no longer use it.

    If the request sets `check`, the server reads the file first, and quarantines it only if it is damaged.
    """
    if not body.reason.strip():
        raise BadRequest("reason is empty; describe what is wrong with the index file")
    table = await load_requested_table(call)
    definition = find_defined_index(table.metadata, call.names[1])
    file = _find_registered_file(table, definition, body.location)
    if body.check:
        if file.state is IndexFileState.LIVE:
            await call.components.indexes.verify_source([file], body.reason[:REASON_MAX])
    else:
        await call.components.registry.quarantine_file(file.uuid, file.location, body.reason[:REASON_MAX])
    file = _find_registered_file(await load_requested_table(call), definition, body.location)
    return QuarantineIndexFileResponse(file.location, file.state, file.reason)


def _find_registered_file(table: TableIndexes, definition: IndexDefinition, location: str) -> RegisteredIndexFile:
    """Return a registered index file of the index.

    Raises:
        NotFound: The index has no file at this location.
    """
    for file in table.registered.files:
        if (file.location, file.definition) == (location, definition.id):
            return file
    raise NotFound(
        f"The index {definition.name} has no index file {location[:500]!r}; list its files with seamark index show"
    )


@Route(
    "POST",
    f"{INDEXES_PATH}/{{index}}/audits",
    "recordIndexAudit",
    "Record that all live index files of an index were verified, so that the next audit is due later",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(ResponseSpec(200, "The instant `auditing` on the table's timeline", RecordAuditResponse), NO_INDEX),
).takes(RecordAuditRequest)
async def record_index_audit(call: Call, body: RecordAuditRequest) -> RecordAuditResponse:
    """Record that all live index files of an index were verified, so that the next audit is due later."""
    table = await load_requested_table(call)
    definition = find_defined_index(table.metadata, call.names[1])
    now_ms = call.components.clock.now_ms()
    record = call.components.catalog.context.make_instant(
        call.caller,
        table.entry,
        AUDITING,
        requested_ms=now_ms,
        snapshot_id=table.metadata.current_snapshot_id,
        summary={
            "index": call.names[1],
            "definition": definition.id,
            "index-files": body.index_files,
            "damaged": body.damaged,
            "size-in-bytes": body.size_in_bytes,
        },
    )
    await call.components.store.transact([record])
    call.components.timeline.notify()
    return RecordAuditResponse(record.instant.id, now_ms)


@Route(
    "POST",
    f"{INDEXES_PATH}/rebuild-registry",
    "rebuildIndexRegistry",
    "Register index files in the table's folder that the registry lacks, for example after the loss of the database",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The registered files. A repeated request registers none", RebuildRegistryResponse),
        NO_INDEX,
        ResponseSpec(413, f"The folder has more than {FOLDER_FILES_MAX:,} files"),
    ),
)
async def rebuild_index_registry(call: Call) -> RebuildRegistryResponse:
    """Register index files in the table's folder that the registry lacks, for example after a data loss."""
    table = await load_requested_table(call)
    components = call.components
    rebuild = RegistryRebuild(components.objects, call.app[READER], components.registry, components.clock)
    folder = get_files_folder(components.settings, table.metadata)
    rebuilt = await rebuild.run(table.entry.uuid, table.metadata, table.registered, folder)
    return RebuildRegistryResponse(
        folder=rebuilt.folder,
        registered_before=rebuilt.registered_before,
        registered=[_summarize_index(definition, files) for definition, files in rebuilt.registered],
        redundant=rebuilt.redundant,
        left_out=[
            SkippedIndexFile(location, reason) for location, reason in sorted(rebuilt.left_out.items())[:_LEFT_OUT_MAX]
        ],
        left_out_files=len(rebuilt.left_out),
    )


def _summarize_index(definition: IndexDefinition, files: Sequence[FolderIndexFile]) -> RebuiltIndex:
    """Return the totals of the index files of an index."""
    headers = [file.described.header for file in files]
    return RebuiltIndex(
        index=definition.name,
        index_files=len(files),
        files=sum(header.files for header in headers),
        rows=sum(header.rows for header in headers),
        size_in_bytes=sum(header.size_bytes for header in headers),
    )
