"""The context of the catalog's services, and operations that they share: paging, idempotency, instants."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import check_client_properties
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Forbidden,
    NoSuchFunction,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    ObjectExists,
    RetryLater,
    SeamarkError,
)
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.access.page_tokens import PageTokens
from seamark.metaserver.catalog.database_limits import NamespaceSizes
from seamark.metaserver.catalog.documents import Documents
from seamark.metaserver.catalog.large_requests import LargeRequestLock
from seamark.metaserver.catalog.values import Caller, Page, PropertyChanges, make_owner
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import (
    Entry,
    EntryKind,
    IdempotencyRecord,
    Instant,
    InstantState,
    Namespace,
    NamespacePath,
)
from seamark.metaserver.store.operations import CreateEntry, Operation, RecordInstant, SaveIdempotency, SwapPointer
from seamark.metaserver.store.port import IdempotencyTaken, InstantFilter, PointerStore
from seamark.metaserver.timeline.timeline import Timeline

PATH_PROPERTIES = (
    "write.metadata.path",
    "write.data.path",
    "write.object-storage.path",
    "write.folder-storage.path",
)
"""The table properties that name folders for files, in addition to the table's location."""

_MISSING_ERRORS = {EntryKind.TABLE: NoSuchTable, EntryKind.VIEW: NoSuchView, EntryKind.FUNCTION: NoSuchFunction}
_SETTLE_TRIES_MAX = 5
_FIRST_BACKOFF_S = 0.005
_BACKOFF_MAX_S = 0.5
_CHANGED_NAMES_CHARACTERS_MAX = 32 << 10
"""The maximum number of characters of all names of changed properties in an instant.

Receivers of events refuse long events.
"""

T = TypeVar("T")


@dataclass
class UnclaimedEntries:
    """Entries whose locations are not known yet, because an earlier version of the server did not record them.

    `claims.create_missing_claims` reads their locations from their metadata.
    """

    unread: int = 0
    """The number of entries whose metadata could not be read from storage. Later entries were not read."""
    lost: dict[str, list[str]] = field(default_factory=dict)
    """By UUID, the keys of the possible locations of entries with missing or damaged metadata."""
    tried_s: float = -math.inf
    """The monotonic time of the last attempt to read the metadata of these entries."""


@dataclass(frozen=True)
class CatalogContext:
    """The services that the catalog depends on. Each open warehouse has one instance."""

    settings: Settings
    store: PointerStore
    objects: ObjectStore
    warehouse: Warehouse
    clock: Clock
    documents: Documents
    timeline: Timeline
    pages: PageTokens
    unclaimed: UnclaimedEntries = field(default_factory=UnclaimedEntries)
    large: LargeRequestLock = field(default_factory=LargeRequestLock)
    sizes: NamespaceSizes = field(default_factory=NamespaceSizes)

    async def require_namespace(self, path: NamespacePath) -> Namespace:
        namespace = await self.store.load_namespace(path)
        if namespace is None:
            raise NoSuchNamespace(f"Namespace does not exist: {format_path(path)}")
        return namespace

    async def check_location(
        self, caller: Caller, location: str, description: str, target_namespace: NamespacePath | None = None
    ) -> None:
        """Check that the caller may place an entry at the location.

        Signatures and purges depend on the location of a table, so a principal with write access to one namespace
        must not place a table over the files of another namespace.

        Args:
            target_namespace: The namespace of the new entry, in which the caller may write. Its location may be outside
                the locations of its parents.

        Raises:
            BadRequest: The location is outside the warehouse.
            Forbidden: The location is outside the caller's grants.
        """
        parsed_location = self.warehouse.parse(location, description)
        if caller.confined_to is None:
            return
        for path in caller.confined_to if target_namespace is None else (*caller.confined_to, target_namespace):
            namespace = await self.store.load_namespace(path)
            location_property = None if namespace is None else namespace.properties.get("location")
            root = parse_location(
                location_property or self.warehouse.make_namespace_location(path), "location of the namespace"
            )
            if root != parsed_location and root.holds(parsed_location):
                return
        raise Forbidden(
            f"{description} {str(parsed_location)!r} is outside the namespaces that {caller.principal_name} may "
            "write; omit it, and the server chooses a location"
        )

    async def check_registered_places(
        self, caller: Caller, namespace: NamespacePath, location: str, metadata: TableMetadata | ViewMetadata, uuid: str
    ) -> None:
        """Check that the caller may register a table or view in the namespace with the locations in its metadata.

        Args:
            caller: The principal that registers the entry.
            namespace: The namespace of the entry.
            location: The metadata file.
            metadata: The content of the file.
            uuid: The UUID of the entry, which the metadata of a table may lack.

        Raises:
            BadRequest: A location is outside the warehouse, or a property is invalid.
            Forbidden: The caller is confined to some namespaces, and a location is outside them. The same
                error is raised if another namespace has or had the entry, or if the entry has earlier locations there.
        """
        if caller.confined_to is None:
            return
        # A caller with rights on the whole warehouse is confined only if something in the warehouse is denied to it.
        # Such a caller has the empty path, which contains every location. Without this path, the grants on namespaces
        # and `namespace` itself decide.
        caller = structs.replace(caller, confined_to=tuple(path for path in caller.confined_to if path))
        await self.check_location(caller, location, "metadata-location", namespace)
        await self.check_location(caller, metadata.location, "The location in the metadata file", namespace)
        await self.check_properties(caller, metadata.properties, {}, namespace)
        for claimed_location in await self.store.claims(uuid):
            if not claimed_location.allowed:
                place = claimed_location.spelled or claimed_location.location
                await self.check_location(caller, place, f"The earlier location of {uuid}", namespace)
        if await self.store.count_names(uuid) > await self.store.count_names(uuid, namespace=namespace):
            raise Forbidden(
                f"The metadata file {location} has the UUID {uuid} of an entry of another namespace, so "
                f"{caller.principal_name} may not register it in {format_path(namespace)}"
            )

    async def check_properties(
        self,
        caller: Caller,
        properties: dict[str, str],
        old_properties: dict[str, str],
        target_namespace: NamespacePath,
    ) -> None:
        """Check that the caller may set the properties.

        Args:
            caller: The principal that sets the properties.
            properties: All properties after the change.
            old_properties: The properties before the change.
            target_namespace: The namespace of the table or view.

        Raises:
            BadRequest: The name of a property is reserved for settings that the server sends to clients, or a property
                has an invalid location.
            Forbidden: A changed property makes writers write to a location outside the caller's grants.
        """
        # The size includes the stored properties, because they are checked too, even if the request is short.
        size_bytes = sum(len(key) + len(value) for key, value in properties.items())
        check = partial(check_client_properties, properties, "A table or view")
        await self.large.run_by_size(caller.principal_name, size_bytes, check)
        if caller.confined_to is None:
            return
        for key in PATH_PROPERTIES:
            if key in properties and properties[key] != old_properties.get(key):
                await self.check_location(caller, properties[key], key, target_namespace)

    async def transact(self, operations: Sequence[Operation]) -> None:
        """Run the operations in one transaction, and wake the requests that watch the timeline.

        One of the operations records an instant. If the reply of the database is lost, the method looks for this
        instant to determine whether the transaction was committed.

        Raises:
            Forbidden: An operation adds to a namespace that has reached its limit.
            CommitConflict: The reply was lost, and a change of a pointer was rolled back.
            RetryLater: The reply was lost, and a transaction without a change of a pointer was rolled back.
            CommitUnknown: The reply was lost, and all queries for the instant failed, or no operation records an
                instant. The caller must not delete any file of the transaction.
        """
        await self.sizes.check_and_count_additions(self.store, self.settings, self.clock, operations)
        instant = next((operation.instant for operation in operations if isinstance(operation, RecordInstant)), None)
        try:
            await self.store.transact(operations)
        except CommitUnknown:
            # A conflict is the error of a commit. For other requests, clients take a conflict for an existing name.
            is_pointer_swapped = any(isinstance(operation, SwapPointer) for operation in operations)
            if instant is None or not await self._settle_commit(
                instant, CommitConflict if is_pointer_swapped else RetryLater
            ):
                raise
        if instant is not None:
            self.timeline.notify()

    def make_create_operations(self, caller: Caller, entry: Entry) -> list[Operation]:
        """Return the operations that create an entry, and make the caller its owner if its rights include this."""
        return [CreateEntry(entry=entry), *make_owner(caller, entry.namespace, entry.kind.value, entry.name)]

    async def create_and_transact(self, location: str, data: bytes, operations: Sequence[Operation]) -> None:
        """Write a new file, then run the operations with `transact`.

        If the transaction is known to have failed, the file is deleted.
        """
        try:
            await self.objects.create(location, data)
            await self.transact(operations)
        except (CommitUnknown, ObjectExists):
            raise  # An orphaned file is harmless, but an existing file belongs to another writer.
        except (SeamarkError, IdempotencyTaken):
            with suppress(SeamarkError):  # The file stays as an orphan. The client must receive the first error.
                await self.objects.delete(location)
            raise

    async def _settle_commit(self, instant: Instant, rollback_error: type[SeamarkError]) -> bool:
        """Settle a transaction with a lost reply, and return whether it was committed.

        The transaction may still be running in the database. Therefore the method inserts a rolled-back instant with
        the same id as the transaction's instant, which is its record in the timeline. If the insert succeeds, the lost
        transaction can no longer commit. If the id exists, the transaction has committed.

        Args:
            instant: The instant that the transaction records.
            rollback_error: The error to raise if the transaction was not committed and can no longer commit. It is a
                conflict for a commit. For other requests it is not, because clients interpret a conflict as an existing
                name.

        Returns:
            True if the transaction was committed. False if the outcome is unknown, because the database does not
            answer.

        Raises:
            SeamarkError: The error of the type `rollback_error`.
        """
        for attempt in range(1, _SETTLE_TRIES_MAX + 1):
            try:
                is_recorded = await self._block_or_find_commit(instant)
            except SeamarkError:
                # If the query fails, the outcome is unknown. On any other result, the caller would delete the files.
                await self.back_off(attempt)
                continue
            if not is_recorded:
                raise rollback_error("The database lost the connection and rolled the change back; retry it")
            return True
        return False

    async def _block_or_find_commit(self, instant: Instant) -> bool:
        """Record a rolled-back instant with the id of `instant`, so that a transaction with this id can not commit.

        Returns:
            Whether the transaction had committed before. Then nothing is recorded.

        Raises:
            CommitUnknown: The id exists, but its instant cannot be read.
        """
        tombstone = structs.replace(
            instant, state=InstantState.ROLLED_BACK, completed_ms=self.clock.now_ms(), fingerprint=None
        )
        try:
            await self.store.transact([RecordInstant(instant=tombstone)])
        except AlreadyExists:
            stored_instant = await self.store.load_instant(instant.id)
            if stored_instant is None:
                raise CommitUnknown(f"The instant {instant.id} is recorded, but cannot be read") from None
            # Any state except rolled back proves the commit. The state may be in flight, because the
            # instant of a purge is recorded in this state.
            return stored_instant.state is not InstantState.ROLLED_BACK
        return False

    async def back_off(self, attempt: int) -> None:
        """Wait before the next attempt, with exponential backoff and jitter."""
        ceiling_s = min(_BACKOFF_MAX_S, _FIRST_BACKOFF_S * 2**attempt)
        # A random number from 0 to 1, so that requests that failed together do not try again together.
        fraction = int.from_bytes(self.clock.draw_bytes(2), "big") / 65536
        await asyncio.sleep(ceiling_s * (0.5 + fraction / 2))

    async def require_entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry:
        """Return the current pointer of an entry.

        Raises:
            NoSuchTable, NoSuchView, NoSuchFunction: The entry does not exist.
        """
        entry = await self.store.load_entry(kind, namespace, name)
        if entry is None:
            raise _MISSING_ERRORS[kind](f"{kind.value.capitalize()} does not exist: {format_path(namespace, name)}")
        return entry

    async def is_uuid_taken(self, uuid: str) -> bool:
        """Return whether an entry has this UUID, or had it before a purge removed the entry.

        The UUID identifies the timeline, the reports and the index files of an entry, and decides whether its
        files may be deleted.
        """
        if await self.store.count_names(uuid):
            return True
        # The UUID of a change that was rolled back is free, so that the change can be repeated.
        for state in (InstantState.COMPLETED, InstantState.INFLIGHT):
            if await self.store.list_instants(InstantFilter(uuid=uuid, state=state), 1):
                return True
        return False

    async def choose_location(
        self,
        caller: Caller,
        kind: EntryKind,
        namespace: NamespacePath,
        name: str,
        uuid: str,
        requested_location: str | None,
    ) -> str:
        """Return the location of a new table, view or function.

        The location is the requested location, after checks, or a new folder below the location of the namespace.

        Raises:
            BadRequest: The requested location is outside the warehouse.
            Forbidden: The requested location is outside the caller's grants.
        """
        if requested_location:
            location = requested_location.rstrip("/") or requested_location
            await self.check_location(caller, location, f"The {kind.value}'s location", namespace)
            return location
        parent = await self.require_namespace(namespace)
        base = parent.properties.get("location") or self.warehouse.make_namespace_location(namespace)
        return self.warehouse.table_location(base, name, uuid)

    def make_instant(
        self,
        caller: Caller,
        entry: Entry,
        action: str,
        *,
        requested_ms: int,
        snapshot_id: int | None = None,
        fingerprint: str | None = None,
        summary: dict[str, Any] | None = None,
    ) -> RecordInstant:
        """Return the operation that records a completed instant of an entry. The instant ends now."""
        return self._make_completed_instant(
            caller,
            action,
            requested_ms,
            kind=entry.kind,
            namespace=entry.namespace,
            name=entry.name,
            uuid=entry.uuid,
            snapshot_id=snapshot_id,
            metadata_location=entry.metadata_location,
            fingerprint=fingerprint,
            summary=summary or {},
        )

    def make_namespace_instant(
        self,
        caller: Caller,
        path: NamespacePath,
        action: str,
        *,
        requested_ms: int,
        changes: PropertyChanges | None = None,
    ) -> RecordInstant:
        """Return the operation that records a completed instant of a namespace: one action, which ends now.

        Args:
            changes: The names of the changed properties. If they are too long for an event, they are left out.
        """
        summary: dict[str, Any] = {}
        if changes is not None:
            names = {"updated": changes.updated, "removed": changes.removed}
            if sum(len(name) for group in names.values() for name in group) <= _CHANGED_NAMES_CHARACTERS_MAX:
                summary = names
        return self._make_completed_instant(
            caller, action, requested_ms, kind=EntryKind.NAMESPACE, namespace=path, name="", uuid="", summary=summary
        )

    def _make_completed_instant(
        self, caller: Caller, action: str, requested_ms: int, *, summary: Mapping[str, Any], **fields: Any
    ) -> RecordInstant:
        """Return the operation that records a completed instant with the current time.

        Args:
            caller: The caller, whose name and request id the instant has.
            action: The action, such as `create` (see `Instant`).
            requested_ms: The time of the request, in milliseconds since the epoch.
            summary: The summary of the instant without the request id.
            fields: The other fields of the instant.
        """
        return RecordInstant(
            instant=Instant(
                id=str(self.clock.uuid7()),
                action=action,
                state=InstantState.COMPLETED,
                requested_ms=requested_ms,
                completed_ms=self.clock.now_ms(),
                principal_name=caller.principal_name,
                summary={"request-id": caller.request_id, **summary},
                **fields,
            )
        )

    def make_answer_record(
        self, caller: Caller, *, status: int, body: bytes | None = None, metadata_location: str | None = None
    ) -> list[Operation]:
        """Return the operation that records the request's answer for repeated requests.

        A repeated request has the same idempotency key, and gets the recorded answer. The list is empty if the request
        has no such key.
        """
        key = caller.idempotency
        if key is None:
            return []
        record = IdempotencyRecord(
            key=key.key,
            scope=key.scope,
            request_hash=key.request_hash,
            status=status,
            body=body,
            metadata_location=metadata_location,
            expires_ms=self.clock.now_ms() + self.settings.idempotency_ttl_s * 1000,
        )
        return [SaveIdempotency(record=record)]

    async def read_page(
        self,
        read_items: Callable[[str | None, int], Awaitable[list[T]]],
        key: Callable[[T], str],
        page_token: str | None,
        page_size: int | None,
    ) -> Page[T]:
        """Return a page of items, or all items if the request has neither a token nor a size.

        The REST specification says that clients that do not page receive all items.

        Args:
            read_items: Reads at most the given number of items after a key, or from the start if the key is None.
            key: Returns the key of an item.
            page_token: The token of the previous page, which contains the key of its last item.
            page_size: The maximum number of items. The setting `page_limit` also limits it.

        Raises:
            BadRequest: The size is less than 1, or the token is invalid.
        """
        limit = self.settings.page_limit
        if page_size is not None:
            if page_size < 1:
                raise BadRequest(f"pageSize is {page_size}; it must be at least 1")
            limit = min(page_size, limit)
        after = self.pages.decode(page_token) if page_token is not None else None
        if page_token is None and page_size is None:
            all_items: list[T] = []
            while True:
                items = await read_items(after, limit)
                all_items += items
                if len(items) < limit:
                    return Page(items=all_items, next_token=None)
                after = key(items[-1])
        # An additional item shows whether there is another page.
        items = await read_items(after, limit + 1)
        has_more = len(items) > limit
        items = items[:limit]
        return Page(items=items, next_token=self.pages.encode(key(items[-1])) if has_more else None)

    async def list_names(
        self, kind: EntryKind, path: NamespacePath, page_token: str | None, page_size: int | None
    ) -> Page[str]:
        await self.require_namespace(path)

        async def read_names(after: str | None, limit: int) -> list[str]:
            return [entry.name for entry in await self.store.list_entries(kind, path, after, limit)]

        return await self.read_page(read_names, lambda name: name, page_token, page_size)
