"""Finds the metadata files of a warehouse, and the newest file of each table, view and function.

The storage is not trusted: a user who may write files of one table may write any metadata file in its folders.
Therefore, if a file is unreadable, or several files may be the newest, the module reports this and does not guess.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple
from uuid import NAMESPACE_URL, uuid5

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest, Corrupt, RetryLater, SeamarkError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.documents import Documents
from seamark.metaserver.catalog.plans.plan_tables import is_temporary_file
from seamark.metaserver.catalog.pointers import parse_metadata_version, table_uuid
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.store.model import EntryKind

Metadata = TableMetadata | ViewMetadata | None

_TABLE_FILE = re.compile(r"\.metadata\.json(?:\.gz)?\Z")
_FUNCTION_FILE = re.compile(r"\.function\.json\Z")
_LARGE_FILE_BYTES = 8 << 20
"""The minimum size of a large file. Only one large file is in memory at a time."""
_CONCURRENT_FOLDERS_MAX = 64


class FoundFile(NamedTuple):
    """A metadata file and its content.

    Attributes:
        table_location: The location of the table or view. For a function, the folder above the file's folder.
        updated_ms: The time of the last change of the metadata. For a function, the time when the file was written.
        previous: The earlier metadata files that the file lists, newest last.
        metadata: The decoded metadata, or None for a function.
    """

    location: str
    kind: EntryKind
    uuid: str
    table_location: str
    updated_ms: int
    previous: tuple[str, ...]
    metadata: Metadata

    @property
    def number(self) -> int:
        return _make_sort_key(self.location)[0]

    @property
    def folder(self) -> str:
        return self.location.rpartition("/")[0]


class Finding(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """A file or table that is not registered, and the reason.

    Attributes:
        location: The metadata file.
        reason: A sentence that says what is wrong and what to do.
        name: The name that the table would have, if it is known.
    """

    location: str
    reason: str
    name: str = ""


class NewestFiles(NamedTuple):
    """The newest file of each UUID in one folder.

    Attributes:
        newest: The newest file of each UUID for which the files show which of them is the newest.
        uncertain: One file of each other UUID.
        findings: The files that cannot be registered, and the reasons.
    """

    newest: tuple[FoundFile, ...]
    uncertain: tuple[FoundFile, ...]
    findings: tuple[Finding, ...]


class _FunctionDocument(msgspec.Struct, rename="kebab"):
    function_uuid: str


async def list_metadata_files_by_folder(objects: ObjectStore, warehouse: Warehouse) -> dict[str, list[ObjectInfo]]:
    """Return the metadata files in the warehouse and the allowed locations, by folder. Leave out files of plans."""
    folders: dict[str, dict[str, ObjectInfo]] = {}
    for root in warehouse.roots:
        async for info in objects.list(str(root)):
            name = info.location
            if (_TABLE_FILE.search(name) or _FUNCTION_FILE.search(name)) and not is_temporary_file(name):
                # An allowed location may be inside the warehouse.
                folders.setdefault(name.rpartition("/")[0], {})[name] = info
    return {folder: list(files.values()) for folder, files in folders.items()}


class FileReader:
    """Reads metadata files, and chooses the newest file of each folder."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._large_file_lock = asyncio.Lock()

    async def read_folders(self, folders: Mapping[str, Sequence[ObjectInfo]]) -> AsyncIterator[NewestFiles]:
        """Yield the newest files of each folder, in the order of `folders`.

        Several folders are read at the same time.
        """
        pending = list(folders.values())
        for start in range(0, len(pending), _CONCURRENT_FOLDERS_MAX):
            for result in await asyncio.gather(
                *map(self.read_folder, pending[start : start + _CONCURRENT_FOLDERS_MAX])
            ):
                yield result

    async def read_folder(self, files: Sequence[ObjectInfo]) -> NewestFiles:
        """Return the newest file of each table, view and function of a folder.

        A file is newer than the previous files that it lists. The method reads the files in descending order of their
        numbers, and skips files that are listed. So it usually reads one file for each table.
        """
        pending = {info.location: info for info in files}
        newest: dict[str, FoundFile] = {}
        rivals: dict[str, list[FoundFile]] = {}
        findings: list[Finding] = []
        unreadable: list[tuple[int, str]] = []
        for info in sorted(files, key=lambda info: _make_sort_key(info.location), reverse=True):
            if pending.pop(info.location, None) is None:
                continue
            try:
                file = await self.read(info)
            except RetryLater:
                raise
            except SeamarkError as error:
                unreadable.append((_make_sort_key(info.location)[0], info.location))
                findings.append(Finding(info.location, f"The file cannot be used: {error.message}"))
                continue
            for location in file.previous:
                pending.pop(location, None)
            newest_file = newest.setdefault(file.uuid, file)
            if newest_file is not file and _may_be_newer(file, newest_file):
                rivals.setdefault(file.uuid, [newest_file]).append(file)
        uncertain: list[FoundFile] = []
        for uuid, candidates in rivals.items():
            uncertain.append(newest.pop(uuid))
            file_names = ", ".join(candidate.location.rpartition("/")[2] for candidate in candidates)
            findings += (
                Finding(
                    candidate.location,
                    f"Several files may be the newest of {candidate.kind.value} {uuid}: {file_names}. Choose one of "
                    "them",
                )
                for candidate in candidates
            )
        usable: list[FoundFile] = []
        for file in newest.values():
            damaged_locations = [location for number, location in unreadable if number >= file.number]
            if damaged_locations:
                reason = f"A later file cannot be used: {damaged_locations[0]}. Restore that file, or choose this file"
                findings.append(Finding(file.location, reason))
                uncertain.append(file)
            else:
                usable.append(file)
        if unreadable and not newest and not rivals:
            _, first_unreadable = unreadable[0]
            uncertain.append(_make_unreadable(first_unreadable))
        return NewestFiles(tuple(usable), tuple(uncertain), tuple(findings))

    async def read(self, info: ObjectInfo) -> FoundFile:
        """Read one file.

        Raises:
            SeamarkError: The file is missing, too large, damaged, or was overwritten.
        """
        if info.size_bytes <= _LARGE_FILE_BYTES:
            return await self._read(info)
        async with self._large_file_lock:
            return await self._read(info)

    async def _read(self, info: ObjectInfo) -> FoundFile:
        """Read a metadata file of a table, view or function.

        Raises:
            Corrupt: The content is none of them.
        """
        location = info.location
        if _FUNCTION_FILE.search(location):
            return await self._read_function(info)
        try:
            table = await self._documents.peek(location)
        except Corrupt as error:
            try:
                view = await self._documents.view(location)
            except (Corrupt, BadRequest):
                raise error from None
            updated_ms = max((entry.timestamp_ms for entry in view.version_log), default=0)
            return FoundFile(location, EntryKind.VIEW, view.view_uuid, view.location, updated_ms, (), view)
        previous = tuple(normalize_location(entry.metadata_file) for entry in table.metadata_log)
        # Drop the histories, which are not needed, because a warehouse may have very many tables.
        table = msgspec.structs.replace(
            table, snapshots=table.snapshots[-1:], snapshot_log=(), metadata_log=(), statistics=()
        )
        return FoundFile(
            location, EntryKind.TABLE, table_uuid(table), table.location, table.last_updated_ms, previous, table
        )

    async def _read_function(self, info: ObjectInfo) -> FoundFile:
        folder = info.location.rpartition("/")[0].removesuffix("/metadata")
        try:
            document = convert_json(await self._documents.read_raw(info.location), _FunctionDocument)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{info.location} is not valid function metadata: {error}") from None
        return FoundFile(info.location, EntryKind.FUNCTION, document.function_uuid, folder, info.modified_ms, (), None)


def _make_sort_key(location: str) -> tuple[int, str]:
    """Return a sort key: a later file of the same table, view or function compares greater.

    The names of the files of functions begin with a UUID of version 7, so they sort by the time of writing.
    """
    return (0 if _FUNCTION_FILE.search(location) else parse_metadata_version(location)), location


def normalize_location(location: str) -> str:
    """Return a location in the form that listings use. Return an invalid location unchanged."""
    try:
        return str(parse_location(location))
    except BadRequest:
        return location


def _make_unreadable(location: str) -> FoundFile:
    """Return an entry for an unreadable file, with only the location.

    The UUID is derived from the location of the table, so that it differs from the UUIDs of all other tables.
    """
    folder = location.rpartition("/")[0].removesuffix("/metadata")
    return FoundFile(location, EntryKind.TABLE, str(uuid5(NAMESPACE_URL, folder)), folder, 0, (), None)


def _may_be_newer(file: FoundFile, chosen_file: FoundFile) -> bool:
    """Return whether `file` may be newer than the chosen file, whose metadata log does not contain `file`.

    A file with a lower number is older, unless its time is later: after an older file is registered, commits continue
    with its lower number.
    """
    if file.kind is EntryKind.FUNCTION:
        # The names of these files sort by the time of writing, so the chosen file is certainly the newest.
        return False
    return file.number == chosen_file.number or file.updated_ms > chosen_file.updated_ms
