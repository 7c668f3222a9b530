"""What every file of the catalog works with, and the small moves they share: paging, idempotency, instants."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec import structs

from metaserver.access.page_tokens import PageTokens
from metaserver.catalog.documents import Documents
from metaserver.catalog.values import Caller, Page
from metaserver.clock import Clock
from metaserver.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Forbidden,
    NoSuchFunction,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    RetryLater,
    SeamarkError,
)
from metaserver.iceberg.metadata.properties import check_client_properties
from metaserver.objects.locations import Warehouse, parse_location
from metaserver.objects.port import ObjectStore
from metaserver.settings import Settings
from metaserver.store.port import (
    Entry,
    EntryKind,
    IdempotencyRecord,
    Instant,
    InstantFilter,
    InstantState,
    Namespace,
    NamespacePath,
    Operation,
    PointerStore,
    RecordInstant,
    SaveIdempotency,
    SwapPointer,
)
from metaserver.timeline.timeline import Timeline
from metaserver.wire import show

PATH_PROPERTIES = (
    "write.metadata.path",
    "write.data.path",
    "write.object-storage.path",
    "write.folder-storage.path",
)
"""Table properties that name folders for files, besides the table's location."""

_MISSING = {EntryKind.TABLE: NoSuchTable, EntryKind.VIEW: NoSuchView, EntryKind.FUNCTION: NoSuchFunction}
_SETTLE_TRIES = 5

T = TypeVar("T")


@dataclass
class Unclaimed:
    """Of what was created before claims were kept, that whose places are not known yet (`claims.fill`)."""

    unread: int = 0
    """So many whose metadata the storage did not give; the rest was not looked at."""
    lost: dict[str, list[str]] = field(default_factory=dict)
    """By UUID, where those may lie whose metadata are gone or broken. Keys of locations."""
    tried_s: float = -math.inf


@dataclass(frozen=True)
class CatalogContext:
    """The catalog's surroundings; one instance a server."""

    settings: Settings
    store: PointerStore
    objects: ObjectStore
    warehouse: Warehouse
    clock: Clock
    documents: Documents
    timeline: Timeline
    pages: PageTokens
    unclaimed: Unclaimed = field(default_factory=Unclaimed)

    async def require_namespace(self, path: NamespacePath) -> Namespace:
        found = await self.store.namespace(path)
        if found is None:
            raise NoSuchNamespace(f"Namespace does not exist: {show(path)}")
        return found

    async def check_location(
        self, caller: Caller, location: str, what: str, within: NamespacePath | None = None
    ) -> None:
        """BadRequest outside the warehouse; Forbidden where the caller's grants end.

        Who may write in one namespace only must not place a table over another's files: signatures and purges go by
        the table's location. `within` is the namespace that it is for, where the caller may write and which may lie
        apart from those above it.
        """
        wanted = self.warehouse.parse(location, what)
        if caller.confined_to is None:
            return
        for path in caller.confined_to if within is None else (*caller.confined_to, within):
            namespace = await self.store.namespace(path)
            own = None if namespace is None else namespace.properties.get("location")
            root = parse_location(own or self.warehouse.namespace_location(path), "location of the namespace")
            if root != wanted and root.holds(wanted):
                return
        raise Forbidden(
            f"{what} {str(wanted)!r} lies outside the namespaces that {caller.who} may write; leave it out, and the "
            "server chooses one"
        )

    async def check_properties(
        self, caller: Caller, properties: dict[str, str], before: dict[str, str], within: NamespacePath
    ) -> None:
        """BadRequest for properties that steer clients; and as `check_location`, for those that lead writers elsewhere,
        where they are set anew."""
        check_client_properties(properties, "A table or view")
        if caller.confined_to is None:
            return
        for key in PATH_PROPERTIES:
            if key in properties and properties[key] != before.get(key):
                await self.check_location(caller, properties[key], key, within)

    async def transact(self, operations: Sequence[Operation]) -> None:
        """As the store's; wakes those who watch the timeline. A lost outcome is settled where an instant tells of it.

        CommitUnknown only when the database does not answer that question either; what the client then hears is that
        nobody knows, and no file is removed.
        """
        instant = next((each.instant for each in operations if isinstance(each, RecordInstant)), None)
        try:
            await self.store.transact(operations)
        except CommitUnknown:
            swaps = any(isinstance(operation, SwapPointer) for operation in operations)
            if instant is None or not await self._settle(instant, CommitConflict if swaps else RetryLater):
                raise
        if instant is not None:
            self.timeline.notify()

    async def _settle(self, instant: Instant, undone: type[SeamarkError]) -> bool:
        """Whether a transaction with a lost reply happened. True: it did. `undone`: it did not, and never will; for
        anything but a commit that is no conflict, which clients would take for a name that is taken.

        Not finding the instant proves nothing: the commit may still be under way in the database. So its id is taken by
        a rolled-back instant: if that insert succeeds, the lost transaction can no longer commit; if the id is taken,
        it has. False when the database does not answer either.
        """
        for attempt in range(1, _SETTLE_TRIES + 1):
            try:
                happened = await self._happened(instant)
            except SeamarkError:
                # Whatever keeps us from asking must not pass for an answer: the files would be removed.
                await self.back_off(attempt)
                continue
            if not happened:
                raise undone("The change was rolled back after the database lost it; retry it")
            return True
        return False

    async def _happened(self, instant: Instant) -> bool:
        tombstone = structs.replace(
            instant, state=InstantState.ROLLED_BACK, completed_ms=self.clock.now_ms(), fingerprint=None
        )
        try:
            await self.store.transact([RecordInstant(instant=tombstone)])
        except AlreadyExists:
            found = await self.store.instant(instant.id)
            if found is None:
                raise CommitUnknown(f"The instant {instant.id} is recorded, but cannot be read") from None
            # A purge is recorded in flight; whatever is there and not rolled back is the lost transaction's.
            return found.state is not InstantState.ROLLED_BACK
        return False

    async def back_off(self, attempt: int) -> None:
        """Waits longer with each attempt, half a second at most, jittered."""
        ceiling_s = min(0.5, 0.005 * 2**attempt)
        jitter = int.from_bytes(self.clock.random_bytes(2), "big") / 65536
        await asyncio.sleep(ceiling_s * (0.5 + jitter / 2))

    async def require_entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry:
        """Where the pointer stands now. NoSuchTable, NoSuchView or NoSuchFunction."""
        entry = await self.store.entry(kind, namespace, name)
        if entry is None:
            raise _MISSING[kind](f"{kind.value.capitalize()} does not exist: {show(namespace, name)}")
        return entry

    async def is_uuid_taken(self, uuid: str) -> bool:
        """Whether something has this UUID, or had it before it was purged: by its UUID a thing's timeline, reports and
        index files are found, and whether its files may go."""
        if await self.store.names_of(uuid):
            return True
        for state in (InstantState.COMPLETED, InstantState.INFLIGHT):  # what was rolled back may be tried again
            if await self.store.instants(InstantFilter(uuid=uuid, state=state), 1):
                return True
        return False

    async def choose_location(
        self, caller: Caller, kind: EntryKind, namespace: NamespacePath, name: str, uuid: str, asked: str | None
    ) -> str:
        """Where a new table, view or function lies: as asked, checked; else a fresh folder below its namespace's."""
        if asked:
            location = asked.rstrip("/") or asked
            await self.check_location(caller, location, f"The {kind.value}'s location", namespace)
            return location
        parent = await self.require_namespace(namespace)
        base = parent.properties.get("location") or self.warehouse.namespace_location(namespace)
        return self.warehouse.table_location(base, name, uuid)

    def instant(
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
        """A finished instant about `entry`, completed now."""
        return RecordInstant(
            instant=Instant(
                id=str(self.clock.uuid7()),
                action=action,
                state=InstantState.COMPLETED,
                kind=entry.kind,
                namespace=entry.namespace,
                name=entry.name,
                uuid=entry.uuid,
                requested_ms=requested_ms,
                completed_ms=self.clock.now_ms(),
                who=caller.who,
                snapshot_id=snapshot_id,
                metadata_location=entry.metadata_location,
                fingerprint=fingerprint,
                summary={"request-id": caller.request_id, **(summary or {})},
            )
        )

    def remember(
        self, caller: Caller, *, status: int, body: bytes | None = None, metadata_location: str | None = None
    ) -> list[Operation]:
        """The operation that records the first answer, where the caller brought an idempotency key."""
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

    async def page(
        self,
        read: Callable[[str | None, int], Awaitable[list[T]]],
        key: Callable[[T], str],
        page_token: str | None,
        page_size: int | None,
    ) -> Page[T]:
        """One page, or everything where neither token nor size was given (the spec: who does not page gets all)."""
        limit = self.settings.page_limit
        if page_size is not None:
            if page_size < 1:
                raise BadRequest(f"pageSize must be at least 1, not {page_size}")
            limit = min(page_size, limit)
        after = self.pages.decode(page_token) if page_token is not None else None
        if page_token is None and page_size is None:
            everything: list[T] = []
            while True:
                rows = await read(after, limit)
                everything += rows
                if len(rows) < limit:
                    return Page(items=everything, next_token=None)
                after = key(rows[-1])
        rows = await read(after, limit + 1)
        more = len(rows) > limit
        rows = rows[:limit]
        return Page(items=rows, next_token=self.pages.encode(key(rows[-1])) if more else None)

    async def list_names(
        self, kind: EntryKind, path: NamespacePath, page_token: str | None, page_size: int | None
    ) -> Page[str]:
        await self.require_namespace(path)

        async def read(after: str | None, limit: int) -> list[str]:
            return [entry.name for entry in await self.store.entries(kind, path, after, limit)]

        return await self.page(read, lambda name: name, page_token, page_size)
