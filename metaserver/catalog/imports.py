"""Imports: registers tables and views that another catalog has written.

The metadata files stay where they are. An import does not trust them: a table may name only files in its own locations,
and receives no rights from its properties. A repeated import changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import check_client_properties
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.protocol.wire import check_new_name, format_path
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Corrupt,
    NotFound,
    RetryLater,
    SeamarkError,
    TooLarge,
)
from seamark.formats.runtime.fair_lock import FairLock
from seamark.formats.storage.locations import LOCATION_CHARS_MAX, Location, parse_location
from seamark.metaserver.catalog.context import PATH_PROPERTIES, CatalogContext
from seamark.metaserver.catalog.documents import METADATA_BYTES_MAX
from seamark.metaserver.catalog.ownership.claims import make_claim
from seamark.metaserver.catalog.ownership.own_files import ALLOWED_LOCATIONS, replace_allowed_locations
from seamark.metaserver.catalog.ownership.owners import borrows_rights, check_author
from seamark.metaserver.catalog.plans.plan_tables import check_lasting
from seamark.metaserver.catalog.pointers import make_entry, table_uuid
from seamark.metaserver.catalog.tables import PropertyCheck, Tables, make_purged_error
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.catalog.views import Views
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import Operation

_CONCURRENT_CHECKS_MAX = 16
"""The maximum number of small metadata files in the memory of a process at the same time, for all imports."""
_SMALL_FILE_BYTES_MAX = 2 << 20
"""The maximum size of a small metadata file, and of its decompressed content.

A larger file may need a gigabyte of memory, so an import reads it alone.
"""
FILE_NAMES_MAX = 1_000_000
"""The maximum number of files that the metadata of an imported table name, without the files in its manifests.

A check of this number of names takes seconds in a thread.
"""
_NAMES_IN_LOOP_MAX = 300
"""The maximum number of names of files and properties that are checked in the event loop, where each takes 10 to 30 µs.

More names are checked in a thread.
"""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
"""Matches the names of files that every storage accepts in every folder, and that every reader reads alike."""
_TABLES_PER_TRANSACTION_MAX = 64
"""The maximum number of tables of a transaction that registers tables. Other changes wait for it."""
T = TypeVar("T")
ImportResult = tuple[Entry, bool] | SeamarkError
"""The entry of an imported table, and whether it is new, or the reason why it is not imported."""


@dataclass(frozen=True)
class _CheckedTable:
    """A table that may be imported, and the operations that register it: first `creations`, then `claims`."""

    entry: Entry
    creations: Sequence[Operation]
    claims: Sequence[Operation]


class ImportLimits:
    """The limits of the memory and of the threads of imports. All warehouses of a process share them."""

    def __init__(self) -> None:
        self.small_files = asyncio.Semaphore(_CONCURRENT_CHECKS_MAX)
        self.large_file = FairLock()
        """The queue in which large metadata files are in memory one at a time."""
        self.checking = FairLock()
        """The queue in which many names are checked in a thread, one file at a time."""

    @property
    def is_idle(self) -> bool:
        """Whether both queues are free, and the maximum number of small files is not reached. Only tests call it."""
        return self.large_file.is_free and self.checking.is_free and not self.small_files.locked()


class Imports:
    def __init__(self, context: CatalogContext, tables: Tables, views: Views, limits: ImportLimits) -> None:
        self._context = context
        self._tables = tables
        self._views = views
        self._limits = limits

    async def import_table(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        location: str,
        *,
        dry_run: bool,
        check_properties: PropertyCheck | None = None,
    ) -> tuple[Entry, bool]:
        """Register a table of another catalog. If the name already refers to this metadata file, change nothing.

        Args:
            location: The metadata file.
            dry_run: Whether to check the table without registering it. The namespace need not exist.
            check_properties: Raises an error if an imported table may not have these properties.

        Returns:
            The entry, and whether it is new.

        Raises:
            AlreadyExists: The name refers to another metadata file, or the table already has another name.
            BadRequest: The metadata file, or a location in it, is outside the warehouse or the table's own locations.
        """
        # The result of a table that cannot be imported is the error.
        (result,) = await self.import_tables(
            caller, namespace, {name: location}, dry_run=dry_run, check_properties=check_properties
        )
        if isinstance(result, SeamarkError):
            raise result
        return result

    async def import_tables(
        self,
        caller: Caller,
        namespace: NamespacePath,
        locations: Mapping[str, str],
        *,
        dry_run: bool,
        check_properties: PropertyCheck | None = None,
    ) -> list[ImportResult]:
        """Register tables as `import_table` does, several in one transaction, and return the result of each table.

        If a transaction fails, each of its tables is registered in its own, so that a table that cannot be registered
        has no effect on the others.

        Args:
            locations: The metadata files by the names of the tables. The results have the same order.
        """
        if not dry_run:
            await self._context.require_namespace(namespace)

        names_by_file: dict[str, list[str]] = {}
        for name, location in locations.items():
            names_by_file.setdefault(location, []).append(name)
        check = partial(self._check_file, caller, namespace, check_properties=check_properties, dry_run=dry_run)
        checked_files = await gather([partial(check, *file) for file in names_by_file.items()], _CONCURRENT_CHECKS_MAX)
        results_by_name = {name: result for results in checked_files for name, result in results.items()}
        check_results = await self._add_purge_errors([results_by_name[name] for name in locations])
        _raise_if_unavailable(check_results)
        if dry_run:
            return [(result.entry, True) if isinstance(result, _CheckedTable) else result for result in check_results]
        checked_tables = [result for result in check_results if isinstance(result, _CheckedTable)]
        registered: list[ImportResult] = []
        for start in range(0, len(checked_tables), _TABLES_PER_TRANSACTION_MAX):
            tables = checked_tables[start : start + _TABLES_PER_TRANSACTION_MAX]
            registered += await self._register_tables(caller, tables)
        remaining_results = iter(registered)
        return [next(remaining_results) if isinstance(result, _CheckedTable) else result for result in check_results]

    async def _check_file(
        self,
        caller: Caller,
        namespace: NamespacePath,
        location: str,
        names: Sequence[str],
        *,
        check_properties: PropertyCheck | None,
        dry_run: bool,
    ) -> dict[str, _CheckedTable | ImportResult]:
        """Check a metadata file, which is read once, for each name under which the request imports it.

        Returns:
            By name: the checked table, the existing entry if the name already refers to the file, or the error. An
            error of the file is the result of all its new names.
        """
        results: dict[str, _CheckedTable | ImportResult] = {}
        new_names: list[str] = []
        for name in names:
            try:
                existing_entry = await self._find(EntryKind.TABLE, namespace, name, location)
                if existing_entry is None:
                    check_new_name(name, "table name")
            except SeamarkError as error:
                results[name] = error
            else:
                if existing_entry is None:
                    new_names.append(name)
                else:
                    results[name] = existing_entry, False
        if not new_names:
            return results
        try:
            async with self._hold_metadata(caller, location, self._read_table) as metadata:
                await self._check_metadata(caller, namespace, location, metadata, check_properties)
                for name in new_names:
                    try:
                        results[name] = await self._prepare_registration(
                            caller, namespace, name, location, metadata, dry_run=dry_run
                        )
                    except SeamarkError as error:
                        results[name] = error
        except SeamarkError as error:
            results |= dict.fromkeys(new_names, error)
        return results

    @asynccontextmanager
    async def _hold_metadata(
        self, caller: Caller, location: str, read: Callable[[str, int], Awaitable[T]]
    ) -> AsyncIterator[T]:
        """Read a metadata file, and yield the metadata.

        While the context is active, other imports of large files wait. Imports of small files wait only if the maximum
        number of them is reached.

        Args:
            read: Reads the file at a location. It raises TooLarge if the file has more bytes than its second argument.

        Raises:
            BadRequest: The file is outside the warehouse.
            TooLarge: The file is too large for any table or view.
        """
        self._context.warehouse.check(location, "metadata-location")
        async with self._limits.small_files:
            metadata = None
            with suppress(TooLarge):
                metadata = await read(location, _SMALL_FILE_BYTES_MAX)
            if metadata is not None:
                yield metadata
                return
        async with self._limits.large_file.hold(caller.principal_name):
            yield await read(location, METADATA_BYTES_MAX)

    async def _read_table(self, location: str, limit_bytes: int) -> TableMetadata:
        try:
            return await self._context.documents.read_unregistered_table(location, limit_bytes)
        except NotFound:
            raise NotFound(f"Cannot register {location}: the file does not exist") from None
        except Corrupt as error:  # The client named the file, so this is an error of the request.
            raise BadRequest(f"Cannot register {location}: {error.message}") from None

    async def _read_view(self, location: str, limit_bytes: int) -> ViewMetadata:
        try:
            return await self._context.documents.read_unregistered_view(location, limit_bytes)
        except Corrupt as error:
            raise BadRequest(f"Cannot import {location}: {error.message}") from None

    async def _check_metadata(
        self,
        caller: Caller,
        namespace: NamespacePath,
        location: str,
        metadata: TableMetadata,
        check_properties: PropertyCheck | None,
    ) -> None:
        """Check that the metadata of a table may be imported into the namespace. The checks do not depend on its name.

        Raises:
            BadRequest, Forbidden: A property or a location is not allowed.
        """
        context = self._context

        def check_contents() -> None:
            check_client_properties(metadata.properties, "An imported table")
            if ALLOWED_LOCATIONS in metadata.properties:
                raise BadRequest(
                    f"The metadata file {location} has the property {ALLOWED_LOCATIONS}, which an import does not take "
                    "from another catalog; remove it there, and set it after the import"
                )
            check_lasting(location, metadata)
            check_table_locations(context.warehouse, metadata, location)

        # Metadata with many names of properties and files are checked in a thread.
        if has_many_names(metadata):
            await self._limits.checking.run(caller.principal_name, check_contents)
        else:
            check_contents()
        await context.check_registered_places(caller, namespace, location, metadata, table_uuid(metadata))
        if check_properties is not None:
            await check_properties(metadata.properties)

    async def _prepare_registration(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        location: str,
        metadata: TableMetadata,
        *,
        dry_run: bool,
    ) -> _CheckedTable | tuple[Entry, bool]:
        """Check that the table can get the name, and prepare its registration.

        Returns:
            The table with the operations that register it. If the same metadata file is already registered under this
            name: its entry, and False for "not registered by this call".

        Raises:
            AlreadyExists: The table has another name, or the name refers to another metadata file.
        """
        context = self._context
        requested_ms = context.clock.now_ms()
        entry = make_entry(namespace, name, table_uuid(metadata), location, requested_ms)
        try:
            await self._check_unnamed(entry)
        except AlreadyExists:
            # Another request may have registered the entry under this name since the start.
            existing = await self._find(entry.kind, namespace, name, location)
            if existing is None:
                raise
            return existing, False
        claims: list[Operation] = [
            # Without a transaction, this checks whether other entries have the locations.
            await make_claim(context, caller, metadata, entry, may_restore=not dry_run, requires_only_name=True),
            # The property is not imported, so this removes the allowed locations of an earlier name of the table.
            await replace_allowed_locations(context, caller, entry.uuid, {}),
            context.make_instant(caller, entry, "register", requested_ms=requested_ms),
        ]
        return _CheckedTable(entry, context.make_create_operations(caller, entry), claims)

    async def _add_purge_errors(
        self, results: Sequence[_CheckedTable | ImportResult]
    ) -> list[_CheckedTable | ImportResult]:
        """Return the results, with an error for each table whose files are being purged."""
        uuids = {result.entry.uuid for result in results if isinstance(result, _CheckedTable)}
        purged_uuids = await self._tables.find_purged(uuids)
        return [
            make_purged_error(result.entry.metadata_location, result.entry.uuid)
            if isinstance(result, _CheckedTable) and result.entry.uuid in purged_uuids
            else result
            for result in results
        ]

    async def _register_tables(self, caller: Caller, tables: Sequence[_CheckedTable]) -> list[ImportResult]:
        """Register tables in one transaction, or else each of them in its own. Return the result of each table.

        Raises:
            CommitUnknown, RetryLater: Whether the tables are registered is not known, or the database is not available.
        """
        # Two names of one table would fail the transaction, because an imported table has only one name.
        if len({table.entry.uuid for table in tables}) == len(tables) > 1:
            try:
                await self._context.transact(_order_operations(tables))
            except (CommitUnknown, RetryLater):
                raise
            except SeamarkError:
                pass  # One of the tables cannot be registered, and has no effect on the others below.
            else:
                return await self._check_registered(caller, [table.entry for table in tables])
        return [await self._register_table(caller, table) for table in tables]

    async def _register_table(self, caller: Caller, table: _CheckedTable) -> ImportResult:
        try:
            entry, is_new = await self._register(
                table.entry, lambda: self._context.transact(_order_operations([table]))
            )
        except (CommitUnknown, RetryLater):
            raise
        except SeamarkError as error:
            return error
        if not is_new:
            return entry, False
        (result,) = await self._check_registered(caller, [entry])
        return result

    async def _check_registered(self, caller: Caller, entries: Sequence[Entry]) -> list[ImportResult]:
        errors = await self._tables.check_all_registered(caller, entries)
        return [(entry, True) if error is None else error for entry, error in zip(entries, errors, strict=True)]

    async def import_view(
        self, caller: Caller, namespace: NamespacePath, name: str, location: str, *, keep_owner: bool, dry_run: bool
    ) -> tuple[Entry, bool]:
        """Register a view of another catalog, as `import_table` registers a table.

        Args:
            keep_owner: Whether the view may run with the rights of the user that its properties name.

        Returns:
            The entry, and whether it is new.

        Raises:
            AlreadyExists, BadRequest: As for a table. Or the view runs with the rights of a user, and `keep_owner` is
                false.
            Forbidden: The caller may not name the user with whose rights the view runs, or may not store the view
                at this location.
        """
        existing_entry = await self._find(EntryKind.VIEW, namespace, name, location)
        if existing_entry is not None:
            return existing_entry, False
        async with self._hold_metadata(caller, location, self._read_view) as metadata:
            await self._check_view(caller, namespace, name, location, metadata, keep_owner=keep_owner)
            entry = make_entry(
                namespace, name, metadata.view_uuid, location, self._context.clock.now_ms(), EntryKind.VIEW
            )
            if dry_run:
                return await self._check(caller, entry, metadata)
        return await self._register(
            entry, lambda: self._views.register(caller, namespace, name, location, only_name=True)
        )

    async def _check_view(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        location: str,
        metadata: ViewMetadata,
        *,
        keep_owner: bool,
    ) -> None:
        """Check that a view may be imported.

        Raises:
            BadRequest, Forbidden: A property or a location is not allowed, or the view runs with the rights of a user.
        """
        check_client_properties(metadata.properties, "An imported view")
        check_view_locations(self._context.warehouse, metadata, location)
        if borrows_rights(metadata) and not keep_owner:
            raise BadRequest(
                f"The view {format_path(namespace, name)} runs with the rights of the user in its properties, which "
                "is a user of the other catalog; import it with keep-owner if this user is the same here"
            )
        check_author(caller, metadata)
        await self._context.check_registered_places(caller, namespace, location, metadata, metadata.view_uuid)

    async def _check(self, caller: Caller, entry: Entry, metadata: TableMetadata | ViewMetadata) -> tuple[Entry, bool]:
        """Run the checks of a registration without registering the entry, for a dry run."""
        check_new_name(entry.name, f"{entry.kind.value} name")
        await self._check_unnamed(entry)
        await make_claim(self._context, caller, metadata, entry)
        return entry, True

    async def _register(self, entry: Entry, register: Callable[[], Awaitable[object]]) -> tuple[Entry, bool]:
        """Register the entry, and return it and whether this call registered it.

        If another request registers it at the same time, return the entry of that request.
        """
        try:
            await self._check_unnamed(entry)
            await register()
        except (AlreadyExists, CommitConflict):
            existing_entry = await self._find(entry.kind, entry.namespace, entry.name, entry.metadata_location)
            if existing_entry is None:
                raise
            return existing_entry, False
        return entry, True

    async def _find(self, kind: EntryKind, namespace: NamespacePath, name: str, location: str) -> Entry | None:
        """Return the entry if it refers to this metadata file, or None if the name is free.

        Raises:
            AlreadyExists: The name refers to another metadata file, or an entry of the other kind has the name.
        """
        other_kind = EntryKind.VIEW if kind is EntryKind.TABLE else EntryKind.TABLE
        if await self._context.store.load_entry(other_kind, namespace, name) is not None:
            raise AlreadyExists(
                f"{other_kind.value.capitalize()} with same name already exists: {format_path(namespace, name)}"
            )
        entry = await self._context.store.load_entry(kind, namespace, name)
        if entry is not None and entry.metadata_location != location:
            raise AlreadyExists(
                f"{kind.value.capitalize()} {format_path(namespace, name)} exists with the metadata file "
                f"{entry.metadata_location}; rename one of both, or drop the {kind.value} here and import it again"
            )
        return entry

    async def _check_unnamed(self, entry: Entry) -> None:
        """Check that no entry with the UUID exists, except dropped entries.

        Raises:
            AlreadyExists: An entry with the UUID exists.
        """
        if await self._context.store.count_names(entry.uuid, dropped=False):
            raise AlreadyExists(
                f"The {entry.kind.value} {entry.uuid} of {entry.metadata_location} is live under another name, so it "
                f"cannot become {format_path(entry.namespace, entry.name)}; import each {entry.kind.value} under one "
                f"name"
            )


def _order_operations(tables: Sequence[_CheckedTable]) -> list[Operation]:
    """Return the operations of tables in an order in which two transactions never wait for each other.

    A claim is the record that a location belongs to an entry, and claims are added under a table lock. A transaction
    waits for an earlier transaction that creates the same name, and for this lock. So it creates its entries in the
    order of their names, and then makes all claims.
    """
    tables = sorted(tables, key=lambda table: table.entry.name)
    creations = [operation for table in tables for operation in table.creations]
    return creations + [operation for table in tables for operation in table.claims]


def _raise_if_unavailable(results: Iterable[_CheckedTable | ImportResult]) -> None:
    """Raise the first error after which the client can repeat the request, or whose outcome is not known.

    Raises:
        CommitUnknown, RetryLater: The storage or the database has not answered.
    """
    for result in results:
        if isinstance(result, CommitUnknown | RetryLater):
            raise result


def has_many_names(metadata: TableMetadata) -> bool:
    """Return whether the names in the metadata are so many that they must be checked in a thread."""
    files = islice(_list_files(metadata), _NAMES_IN_LOOP_MAX + 1)
    return len(metadata.properties) + sum(1 for _ in files) > _NAMES_IN_LOOP_MAX


def check_table_locations(warehouse: Warehouse, metadata: TableMetadata, location: str) -> None:
    """Check that an imported table names only files in its own locations, and that they are in the warehouse.

    Planning checks the files in the manifests of the table. Call this in a thread if `has_many_names` is true.

    Raises:
        BadRequest: A location is outside the warehouse, a file is outside the table's locations, or the metadata name
            too many files.
    """
    own_locations = _check_own_locations(warehouse, metadata, location)
    # If a file in a folder is accepted, each file with a plain name in the same folder is accepted too.
    own_folders: set[str] = set()
    for number, (description, path) in enumerate(_list_files(metadata)):
        if number >= FILE_NAMES_MAX:
            raise BadRequest(
                f"The metadata file {location} names more than {FILE_NAMES_MAX:,} files; expire snapshots of the table "
                "before the import"
            )
        folder, _, name = path.rpartition("/")
        if folder in own_folders and _PLAIN_NAME.fullmatch(name) and len(path) <= LOCATION_CHARS_MAX:
            continue
        _check_inside(own_locations, path, description)
        if _PLAIN_NAME.fullmatch(name):
            own_folders.add(folder)


def check_view_locations(warehouse: Warehouse, metadata: ViewMetadata, location: str) -> None:
    """Check the locations of an imported view in the same way as `check_table_locations`."""
    _check_own_locations(warehouse, metadata, location)


def _check_own_locations(warehouse: Warehouse, metadata: TableMetadata | ViewMetadata, location: str) -> list[Location]:
    """Return the locations in which the entry may name files.

    Raises:
        BadRequest: A location is outside the warehouse, or the metadata file is outside these locations.
    """
    own_locations = [warehouse.parse(metadata.location, "The location in the metadata file")]
    own_locations += [
        warehouse.parse(metadata.properties[name], f"The property {name}")
        for name in PATH_PROPERTIES
        if name in metadata.properties
    ]
    _check_inside(own_locations, location, "The metadata file")
    return own_locations


def _list_files(metadata: TableMetadata) -> Iterator[tuple[str, str]]:
    """Yield a description and the path of each file that the metadata names."""
    for entry in metadata.metadata_log:
        yield "The earlier metadata file", entry.metadata_file
    for snapshot in metadata.snapshots:
        if snapshot.manifest_list is not None:
            yield "The manifest list", snapshot.manifest_list
        for path in snapshot.manifests or ():
            yield "The manifest", path
    for statistics in metadata.statistics:
        yield "The statistics file", statistics.statistics_path
    for partition_statistics in metadata.partition_statistics:
        yield "The statistics file", partition_statistics.statistics_path


def _check_inside(own_locations: list[Location], path: str, description: str) -> None:
    parsed_location = parse_location(path, description)
    if not any(location.holds(parsed_location) and location != parsed_location for location in own_locations):
        raise BadRequest(
            f"{description} {str(parsed_location)!r} is outside the table's own location {str(own_locations[0])!r}; "
            "an import "
            "takes only tables and views whose files are below their location or their write.*.path folders"
        )
