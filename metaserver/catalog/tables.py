"""Tables: list, create, stage, register, load, rename and drop. `metaserver/commit/` changes tables."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.metadata.properties import check_client_properties
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.protocol.wire import check_changeable, check_new_name, format_path
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Corrupt,
    NotFound,
    RetryLater,
    SeamarkError,
)
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import compress_document
from seamark.metaserver.catalog.dropped import make_drop_operations
from seamark.metaserver.catalog.encrypted_columns import check_encrypted_columns
from seamark.metaserver.catalog.large_requests import index_columns
from seamark.metaserver.catalog.ownership.claims import check_unclaimed, make_claim
from seamark.metaserver.catalog.ownership.own_files import make_allow_operations, replace_allowed_locations
from seamark.metaserver.catalog.plans.plan_tables import check_lasting
from seamark.metaserver.catalog.pointers import (
    build_pointer_swap,
    check_name_free,
    check_uuid,
    create_metadata_location,
    make_entry,
    table_uuid,
)
from seamark.metaserver.catalog.policies import record_setters
from seamark.metaserver.catalog.purge import check_purgeable
from seamark.metaserver.catalog.values import Caller, CreateTable, LoadedTable, Page, TableIdentifier
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry, EntryKind, InstantState, NamespacePath, make_retained_id
from seamark.metaserver.store.operations import DropEntry, RenameEntry
from seamark.metaserver.store.port import InstantFilter

_CONCURRENT_CHECKS_MAX = 16
"""The maximum number of newly registered tables that are checked at the same time."""
_PURGES_MAX = 1000
"""The maximum number of running purges that are read with one query."""
_SNAPSHOT_BYTES = 256
_PROPERTY_BYTES = 64
"""The approximate size of a snapshot and of a property as JSON."""
PropertyCheck = Callable[[Mapping[str, str]], Awaitable[None]]
FormerCheck = Callable[[Entry, TableMetadata], Awaitable[None]]
ReturnCheck = Callable[[Entry | None, TableMetadata], Awaitable[None]]


class Tables:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context

    async def list(self, namespace: NamespacePath, page_token: str | None, page_size: int | None) -> Page[str]:
        return await self._context.list_names(EntryKind.TABLE, namespace, page_token, page_size)

    async def load_entry(self, namespace: NamespacePath, name: str) -> Entry:
        """Return the current catalog entry of a table: its name, UUID and metadata file.

        Raises:
            NoSuchTable: The table does not exist.
        """
        return await self._context.require_entry(EntryKind.TABLE, namespace, name)

    async def exists(self, namespace: NamespacePath, name: str) -> bool:
        return await self._context.store.load_entry(EntryKind.TABLE, namespace, name) is not None

    async def load(self, namespace: NamespacePath, name: str) -> LoadedTable:
        """Return a table with its metadata.

        Raises:
            NoSuchTable: The table does not exist.
            NotFound: The metadata file is missing in storage.
            Forbidden: The metadata file contains the metadata of another table.
        """
        entry = await self.load_entry(namespace, name)
        await self._context.documents.ensure_exists(entry.metadata_location)
        metadata = await self._context.documents.table(entry.metadata_location)
        check_uuid(entry, metadata)
        return LoadedTable(entry=entry, metadata=metadata)

    async def stage(self, caller: Caller, namespace: NamespacePath, request: CreateTable) -> LoadedTable:
        """Return the metadata of a new table without storing it. The client creates the table with assert-create."""
        metadata = await self._make_metadata(caller, namespace, request)
        return LoadedTable(entry=None, metadata=metadata)

    async def create(self, caller: Caller, namespace: NamespacePath, request: CreateTable) -> LoadedTable:
        """Create an empty table: write its first metadata file, and record its name and locations."""
        requested_ms = self._context.clock.now_ms()
        metadata = await self._make_metadata(caller, namespace, request)
        codec = metadata.properties.get("write.metadata.compression-codec", "none")
        document, suffix = compress_document(codec, encode_table(metadata))
        location = create_metadata_location(self._context, metadata.location, metadata.properties, None, suffix)
        entry = make_entry(namespace, request.name, table_uuid(metadata), location, requested_ms)
        claim = await make_claim(self._context, caller, metadata, entry, is_new_uuid=True)
        allowed_operations = await make_allow_operations(self._context, caller, entry.uuid, metadata.properties, {})
        operations = [
            claim,
            *allowed_operations,
            *self._context.make_create_operations(caller, entry),
            self._context.make_instant(caller, entry, "create", requested_ms=requested_ms),
            *self._context.make_answer_record(caller, status=200, metadata_location=location),
        ]
        await self._context.create_and_transact(location, document, operations)
        return LoadedTable(entry=entry, metadata=metadata)

    async def register(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        location: str,
        *,
        overwrite: bool,
        allows_locations: bool = True,
        check_properties: PropertyCheck | None = None,
        check_drop: Callable[[], Awaitable[None]] | None = None,
        check_overwritten: FormerCheck | None = None,
        check_returning: ReturnCheck | None = None,
    ) -> LoadedTable:
        """Create a name for an existing metadata file of a table.

        Args:
            overwrite: Whether the name may already exist.
            allows_locations: Whether the table may name files at the locations in its property
                `seamark.allowed-locations`.
            check_properties: Raises an error if the caller may not set these properties of a table.
            check_drop: Raises an error if the caller may not drop the table that has the name.
            check_overwritten: Raises an error if the pointer of a table may not be replaced by other metadata of it.
            check_returning: Raises an error if a table cannot return with other metadata than its last. The last entry
                is None if the catalog does not remember the table.

        Raises:
            BadRequest: The file is outside the warehouse, or is not a valid metadata file.
            Forbidden: The caller may not place entries at the location of the file or of its table.
            AlreadyExists: The name exists, or the metadata belongs to a table with another live name: with two names,
                commits would change the same files.
        """
        requested_ms = self._context.clock.now_ms()
        check_new_name(name, "table name")
        self._context.warehouse.check(location, "metadata-location")
        await self._context.require_namespace(namespace)
        current = await self._context.store.load_entry(EntryKind.TABLE, namespace, name)
        if current is None or not overwrite:
            await check_name_free(self._context, namespace, name)
        metadata = await self.check_registrable(location)
        snapshots_bytes = len(metadata.snapshots) * _SNAPSHOT_BYTES
        check = partial(check_lasting, location, metadata)
        await self._context.large.run_by_size(caller.principal_name, snapshots_bytes, check)
        self._context.warehouse.check(metadata.location, "The location in the metadata file")
        await self._context.check_registered_places(caller, namespace, location, metadata, table_uuid(metadata))
        properties = await self._context.documents.read_stored_properties(location)
        check_names = partial(check_client_properties, properties, "A registered table")
        await self._context.large.run_by_size(caller.principal_name, len(properties) * _PROPERTY_BYTES, check_names)
        if check_properties is not None:
            await check_properties(metadata.properties)
        entry = make_entry(namespace, name, table_uuid(metadata), location, requested_ms)
        is_same = current is not None and current.uuid == entry.uuid
        if overwrite and not is_same and await self._context.store.count_names(entry.uuid, dropped=False):
            raise AlreadyExists(
                f"Cannot overwrite {format_path(namespace, name)} with {location}, the metadata of table {entry.uuid}, "
                "which is live under another name; rename or drop that table first, or register it without overwrite "
                "under a name that is free"
            )
        operations: builtins.list[Any] = []
        if current is not None and current.uuid == entry.uuid:
            if check_overwritten is not None and current.metadata_location != location:
                await check_overwritten(current, metadata)
            operations.append(build_pointer_swap(current, location, requested_ms))
        else:
            if check_returning is not None:
                retained = await self._context.store.find_dropped(make_retained_id(entry.uuid))
                if retained is None or retained.entry.metadata_location != location:
                    await check_returning(None if retained is None else retained.entry, metadata)
            if current is not None:
                if check_drop is not None:
                    await check_drop()
                operations += make_drop_operations(
                    self._context, caller, current, purge=False, requested_ms=requested_ms
                )
            operations += self._context.make_create_operations(caller, entry)
        only_name = overwrite and not is_same
        operations.append(
            await make_claim(
                self._context, caller, metadata, entry, may_restore=not is_same, requires_only_name=only_name
            )
        )
        allowing_properties = metadata.properties if allows_locations else {}
        operations.append(await replace_allowed_locations(self._context, caller, entry.uuid, allowing_properties))
        operations.append(self._context.make_instant(caller, entry, "register", requested_ms=requested_ms))
        operations += self._context.make_answer_record(caller, status=200, metadata_location=location)
        await self._context.transact(operations)
        await self.verify_or_undo_registration(caller, entry)
        stored_entry = await self._context.store.load_entry(EntryKind.TABLE, namespace, name)
        return LoadedTable(entry=stored_entry or entry, metadata=metadata)

    async def verify_or_undo_registration(self, caller: Caller, entry: Entry) -> None:
        """Check that the files of a newly registered table are not being deleted. Otherwise remove its name again.

        A concurrent purge or expiration of snapshots may have begun before the table had the new name.

        Raises:
            NotFound: The metadata file is missing.
            BadRequest: The files are being deleted, or the file is not a valid metadata file.
        """
        try:
            await self.check_registrable(entry.metadata_location)
        except (NotFound, BadRequest):
            instant = self._context.make_instant(caller, entry, "unregister", requested_ms=self._context.clock.now_ms())
            drop = DropEntry(
                kind=entry.kind,
                namespace=entry.namespace,
                name=entry.name,
                expected_location=entry.metadata_location,
            )
            with contextlib.suppress(CommitConflict, NotFound):  # Another request has already changed the name.
                await self._context.transact([drop, instant])
            raise

    async def check_all_registered(
        self, caller: Caller, entries: Sequence[Entry]
    ) -> builtins.list[SeamarkError | None]:
        """Check several newly registered tables, and remove the name of each table whose files are being deleted.

        Returns:
            The error of each table, or None for a table without an error.

        Raises:
            CommitUnknown, RetryLater: The storage or the database does not answer.
        """
        # This query finds the purges that are running. If a purge has ended before the query, it has deleted the
        # metadata file, and `exists` below returns False.
        purged_uuids = await self.find_purged({entry.uuid for entry in entries})

        async def check(entry: Entry) -> SeamarkError | None:
            is_purged = entry.uuid in purged_uuids
            if not is_purged and await self._context.objects.exists(entry.metadata_location):
                return None
            try:
                await self.verify_or_undo_registration(caller, entry)
            except (CommitUnknown, RetryLater):
                raise
            except SeamarkError as error:
                return error
            return None

        return await gather([partial(check, entry) for entry in entries], _CONCURRENT_CHECKS_MAX)

    async def unregister(self, caller: Caller, namespace: NamespacePath, name: str) -> LoadedTable:
        """Remove the name, keep all files, and return the table as it was. Later commits fail.

        The table cannot be undropped, but it can be registered again.

        Raises:
            NoSuchTable: The table does not exist.
            CommitConflict: Another commit changed the table in every attempt.
        """
        requested_ms = self._context.clock.now_ms()
        for attempt in range(self._context.settings.commit_retries + 1):
            loaded = await self.load(namespace, name)
            entry = loaded.entry
            assert entry is not None
            drop = DropEntry(
                kind=EntryKind.TABLE, namespace=namespace, name=name, expected_location=entry.metadata_location
            )
            try:
                await self._context.transact(
                    [
                        drop,
                        self._context.make_instant(caller, entry, "unregister", requested_ms=requested_ms),
                        *self._context.make_answer_record(
                            caller, status=200, metadata_location=entry.metadata_location
                        ),
                    ]
                )
            except CommitConflict:  # Try again, because the answer must include the other commit.
                if attempt == self._context.settings.commit_retries:
                    raise
            else:
                return loaded
        raise AssertionError("the loop returns or raises")

    async def drop(self, caller: Caller, namespace: NamespacePath, name: str, *, purge: bool) -> None:
        """Drop a table. It can be restored until its retention ends.

        If `purge` is true, the files of the table are deleted after the retention.
        """
        requested_ms = self._context.clock.now_ms()
        entry = await self.load_entry(namespace, name)
        if purge:
            await check_purgeable(self._context, entry)
        operations = make_drop_operations(self._context, caller, entry, purge=purge, requested_ms=requested_ms)
        await self._context.transact([*operations, *self._context.make_answer_record(caller, status=204)])

    async def rename(self, caller: Caller, source: TableIdentifier, target: TableIdentifier) -> None:
        await rename_entry(self._context, caller, EntryKind.TABLE, source, target)

    async def _make_metadata(self, caller: Caller, namespace: NamespacePath, request: CreateTable) -> TableMetadata:
        """Check the request for a new table, choose its UUID and location, and return its first metadata."""
        check_new_name(request.name, "table name")
        await check_name_free(self._context, namespace, request.name)
        uuid = str(self._context.clock.uuid4())
        location = await self._context.choose_location(
            caller, EntryKind.TABLE, namespace, request.name, uuid, request.location
        )
        await check_unclaimed(self._context, caller, location, "The table's location", (namespace, request.name))
        await self._context.check_properties(caller, request.properties or {}, {}, namespace)
        work = partial(
            build_table_metadata,
            uuid=uuid,
            location=location,
            schema=request.schema,
            partition_spec=request.partition_spec,
            sort_order=request.write_order,
            properties=request.properties or {},
            now_ms=self._context.clock.now_ms(),
        )
        metadata = await self._context.large.run_by_size(
            caller.principal_name, caller.request_bytes, lambda: index_columns(work())
        )
        check_encrypted_columns(metadata, None)
        return structs.replace(metadata, properties=record_setters(caller.principal_name, metadata.properties, {}))

    async def check_registrable(self, location: str) -> TableMetadata:
        """Return the metadata in a file that a client named.

        Raises:
            NotFound: The file does not exist.
            BadRequest: The file is outside the warehouse or invalid, or the files of its table are being purged.
        """
        self._context.warehouse.check(location, "metadata-location")
        # Check the storage itself, because the cache may contain a file that no longer exists.
        if not await self._context.objects.exists(location):
            raise NotFound(f"Cannot register {location}: the file does not exist")
        try:
            metadata = await self._context.documents.table(location)
        except Corrupt as error:  # The client named the file, so this is an error of the request.
            raise BadRequest(f"Cannot register {location}: {error.message}") from None
        if await self.find_purged({table_uuid(metadata)}):
            raise make_purged_error(location, table_uuid(metadata))
        return metadata

    async def find_purged(self, uuids: Collection[str]) -> set[str]:
        """Return the UUIDs of those tables whose files are being purged."""
        store = self._context.store
        running_purge = InstantFilter(action="purge", state=InstantState.INFLIGHT)
        if len(uuids) > 1:
            # Few purges run at a time, so one query for all of them is faster than a query for each table.
            purges = await store.list_instants(running_purge, _PURGES_MAX + 1)
            if len(purges) <= _PURGES_MAX:
                return {purge.uuid for purge in purges} & set(uuids)
        return {uuid for uuid in uuids if await store.list_instants(structs.replace(running_purge, uuid=uuid), 1)}


def make_purged_error(location: str, uuid: str) -> BadRequest:
    """Return the error for a table that cannot be registered, because its files are being purged."""
    return BadRequest(f"Cannot register {location}: the files of table {uuid} are being purged")


async def rename_entry(
    context: CatalogContext, caller: Caller, kind: EntryKind, source: TableIdentifier, target: TableIdentifier
) -> None:
    """Rename a table or view. Files are not moved.

    Raises:
        AlreadyExists: The target exists.
        BadRequest: A name is invalid, or the source cannot be changed.
        NoSuchNamespace: The namespace of the target does not exist.
        NoSuchTable, NoSuchView: The source does not exist.
    """
    requested_ms = context.clock.now_ms()
    check_changeable(source.name)
    check_new_name(target.name, f"{kind.value} name")
    entry = await context.store.load_entry(kind, source.namespace, source.name)
    rename = RenameEntry(
        kind=kind,
        namespace=source.namespace,
        name=source.name,
        to_namespace=target.namespace,
        to_name=target.name,
        uuid=None if entry is None else entry.uuid,
    )
    operations: list[Any] = [rename]
    # The store raises the error for a missing entry.
    if entry is not None:
        summary = {"to": format_path(target.namespace, target.name), "to-namespace": list(target.namespace)}
        operations.append(context.make_instant(caller, entry, "rename", requested_ms=requested_ms, summary=summary))
    operations += context.make_answer_record(caller, status=204)
    await context.transact(operations)
