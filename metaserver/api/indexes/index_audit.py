"""Routes for the results of audits: quarantine a damaged index file, record an audit, rebuild the registry.

An audit of an index is an instant `auditing` on the table's timeline. Listings take the time of the audit from it.

The list of index files in the pointer store is a registry that can be rebuilt, because each file contains
everything that the registry records. After the loss of the database the registry is rebuilt from the table's
folder. The server checks the files in the folder as it checks the files of a builder. If several files describe the
same data files, merged and newer files are preferred. Files stay quarantined if the registry still lists them as
quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from seamark.formats.index.definitions import IndexDefinition, read_definitions
from seamark.formats.index.index_file import UnknownVersion
from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER, INDEX_FOLDER
from seamark.formats.runtime.errors import BadRequest, Corrupt, NotFound, ObjectMissing, TooLarge
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.indexes.index_state import AUDITING, READER, TableIndexes, load
from seamark.metaserver.api.indexes.indexes import INDEXES_PATH, NO_INDEX, find_defined_index
from seamark.metaserver.index.files.headers import IndexFileSummary
from seamark.metaserver.objects.port import ObjectInfo
from seamark.metaserver.store.model import IndexFileState, RegisteredIndexFile

REASON_MAX = 1000
FOLDER_FILES_MAX = 100_000
"""The maximum number of files in a folder of indexes that the server searches."""
_FILES_READ_CONCURRENTLY = 32
_FILES_PER_REGISTRATION_MAX = 1000
_LEFT_OUT_MAX = 100
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class RecordAuditRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    index_files: Annotated[Count, doc("Index files that were verified.")]
    damaged: Annotated[Count, doc("How many of them were not right.")] = 0
    size_in_bytes: Count = 0


class QuarantineIndexFileRequest(msgspec.Struct, forbid_unknown_fields=True):
    location: Annotated[str, doc("Of a registered index file of this index.")]
    reason: Annotated[str, doc("What is wrong with it.")]
    check: Annotated[bool, doc("Only if the server, which reads the whole file, finds it damaged or gone, too.")] = (
        False
    )


class QuarantineIndexFileResponse(msgspec.Struct):
    location: str
    state: IndexFileState
    reason: str | None


class RecordAuditResponse(msgspec.Struct, rename="kebab"):
    id: str
    audited_ms: int


class RebuiltIndex(msgspec.Struct, rename="kebab"):
    index: str
    index_files: int
    files: int
    rows: int
    size_in_bytes: int


class SkippedIndexFile(msgspec.Struct):
    location: str
    reason: str


class RebuildRegistryResponse(msgspec.Struct, rename="kebab"):
    folder: Annotated[str, doc("That was looked through.")]
    known: Annotated[int, doc("Files in it that the registry lists, in any state.")]
    registered: Annotated[list[RebuiltIndex], doc("By index, what plans use from now on.")]
    redundant: Annotated[int, doc("Sound ones that describe nothing that others do not describe, too.")]
    left_out: Annotated[
        list[SkippedIndexFile],
        doc(f"What is no index file of this table that can be used; the first {_LEFT_OUT_MAX}."),
    ]
    left_out_files: int


class _FolderFile(NamedTuple):
    """An index file in the folder, and the summary in its footer."""

    info: ObjectInfo
    described: IndexFileSummary

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """The sort key.

        Merged files come before the files from which they were merged, and newer files come before older files.
        """
        return -self.described.header.level, -self.info.modified_ms, -self.described.header.files, self.info.location


@Route(
    "POST",
    f"{INDEXES_PATH}/{{index}}/quarantine",
    "quarantineIndexFile",
    "Quarantines an index file that an audit found wrong: plans no longer use it, and its data files are uncovered",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The state of the index file", QuarantineIndexFileResponse),
        ResponseSpec(400, "The reason is missing"),
        ResponseSpec(404, "No such table or index, or no such index file of it"),
    ),
).takes(QuarantineIndexFileRequest)
async def quarantine_index_file(call: Call, body: QuarantineIndexFileRequest) -> QuarantineIndexFileResponse:
    if not body.reason.strip():
        raise BadRequest("reason is empty; describe what is wrong with the index file")
    table = await load(call)
    definition = find_defined_index(table.metadata, call.names[1])
    file = _find_registered_file(table, definition, body.location)
    if body.check:
        if file.state is IndexFileState.LIVE:
            await call.components.indexes.verify_source([file], body.reason[:REASON_MAX])
    else:
        await call.components.registry.quarantine(file.uuid, file.location, body.reason[:REASON_MAX])
    file = _find_registered_file(await load(call), definition, body.location)
    return QuarantineIndexFileResponse(file.location, file.state, file.reason)


def _find_registered_file(table: TableIndexes, definition: IndexDefinition, location: str) -> RegisteredIndexFile:
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
    "Records that all live index files of an index were verified, so that the next audit is due later",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(ResponseSpec(200, "The instant `auditing` on the table's timeline", RecordAuditResponse), NO_INDEX),
).takes(RecordAuditRequest)
async def record_index_audit(call: Call, body: RecordAuditRequest) -> RecordAuditResponse:
    table = await load(call)
    definition = find_defined_index(table.metadata, call.names[1])
    now_ms = call.components.clock.now_ms()
    record = call.components.catalog.context.instant(
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
    "Registers index files in the table's folder that the registry lacks, for example after the loss of the database",
    tags=("indexes",),
    body_size=BodySize.MEDIUM,
    answers=(
        ResponseSpec(200, "The registered files; a repeat registers nothing", RebuildRegistryResponse),
        NO_INDEX,
        ResponseSpec(413, f"The folder holds more than {FOLDER_FILES_MAX:,} files"),
    ),
)
async def rebuild_index_registry(call: Call) -> RebuildRegistryResponse:
    table = await load(call)
    folder = f"{table.metadata.location.rstrip('/')}/{INDEX_FOLDER}"
    registered_locations = {file.location for file in table.registered.files}
    former = f"{table.metadata.location.rstrip('/')}/{FORMER_INDEX_FOLDER}"
    folder_objects = [*await _list_folder(call, folder), *await _list_folder(call, former)]
    definitions = {definition.id: definition for definition in read_definitions(table.metadata).by_name.values()}
    files, left_out = await _describe_files(
        call, table, definitions, [info for info in folder_objects if info.location not in registered_locations]
    )
    registered, redundant = [], 0
    for definition in definitions.values():
        candidates = sorted(
            (file for file in files if file.described.header.definition == definition.id), key=lambda file: file.rank
        )
        needed = await _select_needed(call, table, definition, candidates)
        redundant += len(candidates) - len(needed)
        if needed:
            await _register(call, table, definition, needed)
            registered.append(_summarize_index(definition, needed))
    return RebuildRegistryResponse(
        folder=folder,
        known=sum(info.location in registered_locations for info in folder_objects),
        registered=registered,
        redundant=redundant,
        left_out=[SkippedIndexFile(location, reason) for location, reason in sorted(left_out.items())[:_LEFT_OUT_MAX]],
        left_out_files=len(left_out),
    )


async def _list_folder(call: Call, folder: str) -> list[ObjectInfo]:
    """List the files of a folder, without files that are being written. The names of those begin with a dot."""
    folder_objects: list[ObjectInfo] = []
    async for info in call.components.objects.list(folder):
        if not info.location.rpartition("/")[2].startswith("."):
            folder_objects.append(info)
        if len(folder_objects) > FOLDER_FILES_MAX:
            raise TooLarge(
                f"{folder} has more than {FOLDER_FILES_MAX:,} files; delete the folder and build the indexes again"
            )
    return folder_objects


async def _describe_files(
    call: Call,
    table: TableIndexes,
    definitions: Mapping[str, IndexDefinition],
    files: Sequence[ObjectInfo],
) -> tuple[list[_FolderFile], dict[str, str]]:
    """Return the files of the table's indexes, and, by location, the reasons why the other files were left out."""
    slots = asyncio.Semaphore(_FILES_READ_CONCURRENTLY)

    async def describe(info: ObjectInfo) -> IndexFileSummary | str:
        async with slots:
            try:
                summary = await call.app[READER].describe(info.location, info.size_bytes)
            except (Corrupt, ObjectMissing) as error:
                return error.message
            except UnknownVersion as error:
                return str(error)
        header = summary.header
        if header.table_uuid != table.entry.uuid:
            return f"it belongs to table {header.table_uuid}"
        definition = definitions.get(header.definition)
        if definition is None or definition.kind != header.kind:
            return f"the table has no index {header.kind} {header.definition[:500]}"
        return summary

    folder_files: list[_FolderFile] = []
    left_out: dict[str, str] = {}
    for info, result in zip(files, await asyncio.gather(*map(describe, files)), strict=True):
        if isinstance(result, str):
            left_out[info.location] = result
        else:
            folder_files.append(_FolderFile(info, result))
    return folder_files, left_out


async def _select_needed(
    call: Call, table: TableIndexes, definition: IndexDefinition, candidates: Sequence[_FolderFile]
) -> list[_FolderFile]:
    """Return the candidates that describe a data file that no live file and no earlier candidate describes.

    The order stays the same. Data files are compared by half of their identity. If two data files are equal in this
    half, one of them is indexed again.
    """
    if not candidates:
        return []
    live_summaries = []
    for file in table.registered.live(definition.id):
        # An unreadable file describes nothing. The next plan that uses the file quarantines it.
        with suppress(Corrupt, ObjectMissing, UnknownVersion):
            live_summaries.append(await call.app[READER].describe(file.location, file.size_bytes))
    ids = [summary.ids[:, 0] for summary in (*live_summaries, *(candidate.described for candidate in candidates))]

    def choose() -> list[_FolderFile]:
        owners = np.repeat(np.arange(len(ids)), [len(id_) for id_ in ids])
        _, first = np.unique(np.concatenate(ids), return_index=True)
        return [
            candidates[number - len(live_summaries)]
            for number in np.unique(owners[first]).tolist()
            if number >= len(live_summaries)
        ]

    return await asyncio.to_thread(choose)


async def _register(call: Call, table: TableIndexes, definition: IndexDefinition, files: Sequence[_FolderFile]) -> None:
    now_ms = call.components.clock.now_ms()
    add = [
        RegisteredIndexFile(
            uuid=table.entry.uuid,
            location=file.info.location,
            definition=definition.id,
            kind=definition.kind,
            level=file.described.header.level,
            files=file.described.header.files,
            rows=file.described.header.rows,
            size_bytes=file.info.size_bytes,
            snapshot_id=None,
            created_ms=file.info.modified_ms,
            changed_ms=now_ms,
        )
        for file in files
    ]
    for start in range(0, len(add), _FILES_PER_REGISTRATION_MAX):
        part = add[start : start + _FILES_PER_REGISTRATION_MAX]
        await call.components.registry.replace(table.entry.uuid, definition.id, add=part)


def _summarize_index(definition: IndexDefinition, files: Sequence[_FolderFile]) -> RebuiltIndex:
    headers = [file.described.header for file in files]
    return RebuiltIndex(
        index=definition.name,
        index_files=len(files),
        files=sum(header.files for header in headers),
        rows=sum(header.rows for header in headers),
        size_in_bytes=sum(header.size_bytes for header in headers),
    )
