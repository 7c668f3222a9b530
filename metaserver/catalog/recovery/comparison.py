"""Compares the pointers of a restored database with the metadata files in storage.

A restored backup does not contain the pointers of later commits, so the next commit to a table would lose them.
Therefore the comparison reports tables with newer metadata files, and can move their pointers to the newest files.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import RetryLater, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.claims import make_claim
from seamark.metaserver.catalog.pointers import build_pointer_swap, parse_metadata_version
from seamark.metaserver.catalog.recovery.found_files import (
    FileReader,
    Finding,
    FoundFile,
    list_metadata_files_by_folder,
    normalize_location,
)
from seamark.metaserver.catalog.recovery.selection import check_folder_and_user, check_no_stream_rows
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.objects.port import ObjectInfo
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import Operation
from seamark.metaserver.store.port import PointerStore

_ENTRIES_PER_PAGE = 1000
_CHAIN_MAX = 10_000
"""The maximum number of files that are read to decide whether a newer file descends from the file of a pointer."""


class OutdatedPointer(msgspec.Struct, frozen=True, rename="kebab"):
    """A table or view with metadata files that are newer than its pointer.

    Attributes:
        pointer: The metadata file that the database names.
        newest: The newest metadata file, which descends from the file of the pointer.
        is_advanced: Whether the pointer was moved to the newest file.
    """

    name: str
    pointer: str
    newest: str
    is_advanced: bool = False


class PointerComparison(msgspec.Struct, frozen=True, rename="kebab"):
    """The result of a comparison of the database with the metadata files in storage.

    Attributes:
        entries: The number of compared pointers. A pointer is the current metadata file of a table, view or function.
        missing: The pointers whose metadata files do not exist, or are outside the warehouse and allowed locations.
        later: The tables and views with newer metadata files.
        findings: Files that may be newer, and the reasons why they were not used.
    """

    entries: int
    missing: tuple[Finding, ...]
    later: tuple[OutdatedPointer, ...]
    findings: tuple[Finding, ...]


async def compare_with_storage(context: CatalogContext, caller: Caller, *, advance: bool) -> PointerComparison:
    """Compare all pointers with storage.

    Args:
        advance: Whether to move the pointers of tables and views with newer files.
    """
    folders = await list_metadata_files_by_folder(context.objects, context.warehouse)
    comparer = _Comparer(context, caller, folders, advance=advance)
    async for entry in _list_entries(context.store):
        await comparer.compare(entry)
    after_id = None
    while rows := await context.store.list_dropped(None, after_id, _ENTRIES_PER_PAGE):
        for row in rows:
            comparer.check_metadata_file(row.entry, "dropped ")
        after_id = rows[-1].id
    return PointerComparison(
        comparer.entries, tuple(comparer.missing), tuple(comparer.outdated), tuple(comparer.findings)
    )


class _Comparer:
    def __init__(
        self, context: CatalogContext, caller: Caller, folders: Mapping[str, Sequence[ObjectInfo]], *, advance: bool
    ) -> None:
        self._context = context
        self._caller = caller
        self._folders = folders
        self._advance = advance
        self._reader = FileReader(context.documents)
        self.entries = 0
        self.missing: list[Finding] = []
        self.outdated: list[OutdatedPointer] = []
        self.findings: list[Finding] = []

    def check_metadata_file(self, entry: Entry, state: str = "") -> bool:
        """Count the entry, and return whether storage has its metadata file. Otherwise, add the file to `missing`.

        A file outside of the compared locations is also added to `missing`, with this reason.

        `state` is an adjective for the message, such as "dropped ", or an empty text.
        """
        self.entries += 1
        pointer = normalize_location(entry.metadata_location)
        if any(info.location == pointer for info in self._folders.get(pointer.rpartition("/")[0], ())):
            return True
        name = format_path(entry.namespace, entry.name)
        subject = f"The metadata file of the {state}{entry.kind.value}"
        if self._context.warehouse.contains(pointer):
            reason = f"{subject} is missing in storage. Restore the file"
        else:
            roots = ", ".join(map(str, self._context.warehouse.roots))
            reason = (
                f"{subject} was not compared, because it is outside the warehouse and the allowed locations of this "
                f"command ({roots}). Run the command with the --config, --warehouse and --allowed-locations of the "
                "server"
            )
        self.missing.append(Finding(entry.metadata_location, reason, name))
        return False

    async def compare(self, entry: Entry) -> None:
        """Compare the current metadata file of an entry with the other metadata files in its folder.

        For a function, only the existence of the file is checked.
        """
        if not self.check_metadata_file(entry) or entry.kind is EntryKind.FUNCTION:
            return
        pointer = normalize_location(entry.metadata_location)
        files = self._folders[pointer.rpartition("/")[0]]
        number = parse_metadata_version(pointer)
        if all(info.location == pointer or parse_metadata_version(info.location) < number for info in files):
            return
        name = format_path(entry.namespace, entry.name)
        result = await self._reader.read_folder(files)
        newest = next((file for file in result.newest if file.uuid == entry.uuid), None)
        if newest is None:
            self.findings += (msgspec.structs.replace(finding, name=name) for finding in result.findings)
        elif newest.location != pointer:
            try:
                await self._handle_outdated(entry, newest, name)
            except RetryLater:
                raise
            except SeamarkError as error:
                reason = f"The file is newer than the pointer, which was not moved: {error.message}"
                self.findings.append(Finding(newest.location, reason, name))

    async def _handle_outdated(self, entry: Entry, newest: FoundFile, name: str) -> None:
        """Record an entry for which storage has a newer metadata file. If requested, make this file the current file.

        A file that does not descend from the current file is only reported as a finding.
        """
        if not await self._follows(entry, newest):
            reason = f"The file may be newer than {entry.metadata_location}, but does not follow from it. Compare both"
            self.findings.append(Finding(newest.location, reason, name))
            return
        if self._advance:
            check_no_stream_rows(newest)
            check_folder_and_user(newest, self._context.warehouse)
            assert newest.metadata is not None
            now_ms = self._context.clock.now_ms()
            new_entry = msgspec.structs.replace(entry, metadata_location=newest.location)
            operations: list[Operation] = [
                await make_claim(self._context, self._caller, newest.metadata, new_entry),
                build_pointer_swap(entry, newest.location, now_ms),
                self._context.make_instant(
                    self._caller, new_entry, "register", requested_ms=now_ms, summary={"advanced": "true"}
                ),
            ]
            await self._context.transact(operations)
        self.outdated.append(OutdatedPointer(name, entry.metadata_location, newest.location, is_advanced=self._advance))

    async def _follows(self, entry: Entry, newest: FoundFile) -> bool:
        """Return whether the newest file descends from the current metadata file in the catalog entry.

        Table metadata list the previous metadata files. If the list does not reach back to the pointer, the method
        reads the oldest listed file, and continues with its list.
        """
        if entry.kind is EntryKind.VIEW:
            # View metadata list no previous files, so only the numbers in the names show the order.
            return newest.number > parse_metadata_version(entry.metadata_location)
        files = {info.location: info for info in self._folders[newest.folder]}
        pointer, current = normalize_location(entry.metadata_location), newest
        for _ in range(_CHAIN_MAX):
            if pointer in current.previous:
                return True
            oldest = next((files[location] for location in current.previous if location in files), None)
            if oldest is None or parse_metadata_version(oldest.location) <= parse_metadata_version(pointer):
                return False
            current = await self._reader.read(oldest)
        return False


async def _list_entries(store: PointerStore) -> AsyncIterator[Entry]:
    """Yield the pointers of all tables, views and functions."""
    unvisited: list[NamespacePath] = [()]
    while unvisited:
        parent = unvisited.pop()
        after_name = None
        while children := await store.list_namespaces(parent, after_name, _ENTRIES_PER_PAGE):
            unvisited += children
            after_name = children[-1][-1]
        for kind in EntryKind if parent else ():
            after_name = None
            while entries := await store.list_entries(kind, parent, after_name, _ENTRIES_PER_PAGE):
                for entry in entries:
                    yield entry
                after_name = entries[-1].name
