"""Removal of unused index files, a part of the server's housekeeping.

Superseded and quarantined files are kept for a retention time, for running plans and for operators who examine the
damage. Then they are deleted first from storage, and afterwards from the registry. If the server crashes between the
two steps, the row remains for the next attempt. If the table no longer defines an index, the files of the index become
superseded. Files in a table's index folder that are not in the registry are from failed builds, and are deleted when
they are old. The age of a file is measured in `PassedTime`, so a clock that jumps ahead does not make files old.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import groupby

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.index.definitions import read_definitions
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.objects.clock_check import read_storage_time_ms
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.passed_time import read_passed_time
from seamark.metaserver.store.port import PointerStore

_FILES_PER_ROUND_MAX = 1000
_TABLES_PER_ROUND_MAX = 200
_ORPHAN_INTERVAL_MS = 6 * 3_600_000
"""The interval at which a folder is searched for unregistered files."""
_FOLDERS_MAX = 100_000
"""The maximum number of folders whose last search is remembered."""
_ORPHAN_AGE_MS = 24 * 3_600_000
"""The minimum age at which an unregistered file is deleted.

A build registers its files within minutes, but a builder's clock may be wrong by hours.
"""

log = structlog.get_logger()


class Cleaner:
    """Removes unused index files.

    An instance belongs to one event loop.

    Args:
        load: A function that reads a metadata file.
        list_claimed: A function that returns those of the given folders that the table has claimed in the database.
        folders: The names of the folders of index files. They are in the folder that `find_folder` returns.
        find_folder: A function that returns the folder of Seamark's files of a table.
        retention_s: The time for which superseded and quarantined files are kept, in seconds.
    """

    def __init__(
        self,
        store: PointerStore,
        registry: Registry,
        objects: ObjectStore,
        clock: Clock,
        load: Callable[[str], Awaitable[TableMetadata]],
        list_claimed: Callable[[str, Sequence[str]], Awaitable[Sequence[str]]],
        *,
        folders: Sequence[str],
        find_folder: Callable[[TableMetadata], str],
        retention_s: int,
    ) -> None:
        self._store = store
        self._registry = registry
        self._objects = objects
        self._clock = clock
        self._load = load
        self._list_claimed = list_claimed
        self._folders = folders
        self._find_folder = find_folder
        self._retention_ms = retention_s * 1000
        self._after: str | None = None
        """The UUID of the table after which the next round continues."""
        self._listed_ms: dict[str, int] = {}
        """The time of the last listing of each folder in milliseconds, by location."""

    async def clean(self) -> int:
        """Run one round of cleaning.

        Returns:
            The number of files that were deleted, or superseded because their index was dropped.
        """
        return await self._delete_unused() + await self._clean_tables()

    async def _delete_unused(self) -> int:
        """Delete superseded and quarantined files after their retention, and return their number."""
        deleted_count = 0
        before_ms = (await read_passed_time(self._store, self._clock)).find_time_ago(self._retention_ms)
        for file in await self._store.list_unused_index_files(before_ms, _FILES_PER_ROUND_MAX):
            try:
                await self._objects.delete(file.location)
                await self._registry.forget(file.uuid, file.location)
                deleted_count += 1
            except SeamarkError as error:
                log.warning("index file not cleaned", location=file.location, reason=error.message)
        return deleted_count

    async def _clean_tables(self) -> int:
        """Clean the indexes of the next tables, and return the number of superseded and deleted files."""
        entries = await self._store.list_indexed_tables(self._after, _TABLES_PER_ROUND_MAX)
        self._after = entries[-1].uuid if entries else None
        cleaned_count = 0
        for _, group in groupby(entries, key=lambda entry: entry.uuid):
            table_entries = list(group)  # A table can have several names.
            try:
                tables = [await self._load(entry.metadata_location) for entry in table_entries]
                cleaned_count += await self._supersede_undefined(table_entries[0], tables)
                cleaned_count += await self._delete_orphans(table_entries[0], tables)
            except SeamarkError as error:
                log.warning("indexes not cleaned", table=table_entries[0].name, reason=error.message)
        return cleaned_count

    async def _supersede_undefined(self, entry: Entry, tables: list[TableMetadata]) -> int:
        """Mark as superseded the old files of indexes that the table no longer defines, and return their number.

        A file is old if its state has not changed for `_retention_ms`. Plans do not use superseded files, and a later
        round deletes them. If a definition is unreadable, no file is superseded.

        Args:
            entry: An entry of the table.
            tables: The metadata of all entries with the UUID of the table.
        """
        definitions_of_entries = [read_definitions(table) for table in tables]
        defined_ids = {
            definition.id for definitions in definitions_of_entries for definition in definitions.by_name.values()
        }
        if any(definitions.problems for definitions in definitions_of_entries):
            return 0  # The definition of these files may be one of the unreadable definitions.
        index_files = await self._registry.load_files(entry)
        superseded_count = 0
        before_ms = (await read_passed_time(self._store, self._clock)).find_time_ago(self._retention_ms)
        for definition_id in set(index_files.definition_ids) - defined_ids:
            old_locations = [
                file.location for file in index_files.list_live_files(definition_id) if file.changed_ms < before_ms
            ]
            if old_locations:
                await self._registry.replace(entry.uuid, definition_id, add=(), remove=old_locations)
                superseded_count += len(old_locations)
        return superseded_count

    async def _delete_orphans(self, entry: Entry, tables: list[TableMetadata]) -> int:
        """Delete old files in the table's index folders that are not registered, and return their number.

        A file is old after `_ORPHAN_AGE_MS`. A folder is searched again after `_ORPHAN_INTERVAL_MS`.

        Raises:
            BadRequest: The clocks of the storage and of this server differ.
        """
        now_ms = self._clock.now_ms()
        registered_locations = {file.location for file in (await self._registry.load_files(entry)).files}
        deleted_count = 0
        # Writers of the table can put any location into the metadata file. So only folders that the table has claimed
        # in the database are cleaned.
        index_folders = {f"{self._find_folder(table)}/{name}" for table in tables for name in self._folders}
        for folder in await self._list_claimed(entry.uuid, sorted(index_folders)):
            if now_ms - self._listed_ms.get(folder, 0) < _ORPHAN_INTERVAL_MS:
                continue
            if len(self._listed_ms) >= _FOLDERS_MAX:
                self._listed_ms.clear()
            self._listed_ms[folder] = now_ms
            before_ms = (await read_passed_time(self._store, self._clock)).find_time_ago(_ORPHAN_AGE_MS)
            # Complete the listing first, because deletions during a listing may make it skip files.
            old_files = [file async for file in self._objects.list(folder) if file.modified_ms < before_ms]
            orphans = [file.location for file in old_files if file.location not in registered_locations]
            if orphans:
                # Ages compare the storage's times with this server's clock. This raises BadRequest if they differ.
                await read_storage_time_ms(self._objects, self._clock, f"{folder.rpartition('/')[0]}/clock")
            for location in orphans:
                await self._objects.delete(location)
                deleted_count += 1
        return deleted_count
