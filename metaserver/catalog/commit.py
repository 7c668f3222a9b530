"""Optimistic commits: plan against the current metadata, write metadata files, swap the pointers in one transaction;
after a lost race, retry.

A commit has three outcomes: committed, conflict and unknown (docs/design/0001). Written metadata files are deleted only
when it is certain that no pointer refers to them. When the outcome is unknown they stay, and the client receives
CommitUnknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import NAMESPACE_URL, uuid5
from weakref import WeakValueDictionary

import msgspec

from seamark.metaserver.catalog.claims import check_unclaimed, check_writable, claim, claimed, moves
from seamark.metaserver.catalog.documents import compress
from seamark.metaserver.catalog.own_files import allow, check_added
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.catalog.purge import owned
from seamark.metaserver.catalog.rebase import Rebased, rebase, requested_append
from seamark.metaserver.catalog.values import Caller, LoadedTable, TableChange
from seamark.metaserver.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Forbidden,
    NoSuchTable,
    NotFound,
    ObjectExists,
    RequestError,
    RetryLater,
    SeamarkError,
)
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata, with_previous_file
from seamark.metaserver.iceberg.metadata.properties import METADATA_PATH, as_bool, metadata_folder
from seamark.metaserver.iceberg.metadata.requirements import check_requirements
from seamark.metaserver.iceberg.metadata.table_json import encode_table
from seamark.metaserver.iceberg.metadata.updates import apply_updates
from seamark.metaserver.objects.cleanup import Cleanup
from seamark.metaserver.store.port import (
    CreateEntry,
    Entry,
    EntryKind,
    IdempotencyTaken,
    Instant,
    NamespacePath,
    Operation,
    RecordInstant,
    SwapPointer,
)
from seamark.metaserver.wire import check_new_name, show

_DELETE_AFTER_COMMIT = "write.metadata.delete-after-commit.enabled"
_CODEC = "write.metadata.compression-codec"
_UPDATES_RECORDED = 50
"""The largest number of updates of one commit that the timeline records."""
_NUMBER = re.compile(r"v?(\d{1,9})[-.]")
"""The version at the start of a metadata file name: 00012-<uuid>.metadata.json, or v12.metadata.json (Hadoop)."""
_SUMMARY_KEYS = ("added-data-files", "deleted-data-files", "added-records", "deleted-records", "added-delete-files")


class CommitEvent(msgspec.Struct, frozen=True):
    """The timeline record of one change or one snapshot."""

    caller: Caller
    requested_ms: int
    snapshot_id: int | None
    summary: Mapping[str, Any] = {}
    """The snapshot's summary; the timeline keeps the operation and the counts."""
    updates: tuple[str, ...] = ("add-snapshot", "set-snapshot-ref")
    """The actions of the metadata updates."""
    fingerprint: str | None = None


class PlannedCommit(msgspec.Struct):
    """The part of one attempt that concerns one table."""

    namespace: NamespacePath
    name: str
    entry: Entry | None
    """None: the commit creates the table."""
    metadata: TableMetadata
    events: Sequence[CommitEvent] = ()
    files: Sequence[tuple[str, bytes]] = ()
    """Files that the metadata refers to and the server writes."""
    document: bytes = b""
    location: str = ""
    """Where `document` is written. Empty when the metadata does not change."""
    forgotten: list[str] = []
    """Metadata files that left the metadata log and may be deleted."""
    claims: tuple[Operation, ...] = ()
    """Claims of the locations that the table gets."""

    def new_entry(self, now_ms: int) -> Entry:
        """Where the pointer stands when this has happened."""
        return created_entry(self.namespace, self.name, _uuid_of(self.entry, self.metadata), self.location, now_ms)

    def written_files(self) -> list[tuple[str, bytes]]:
        """In write order: each file follows the files that it refers to."""
        return [*self.files, (self.location, self.document)]


class _Request(msgspec.Struct, frozen=True):
    """The parts of a commit that all attempts share."""

    caller: Caller
    changes: Sequence[TableChange]
    single: bool
    requested_ms: int
    fingerprint: str | None


class Repeat(Exception):
    """This commit was applied before. Carries its outcome, which is empty for a transaction."""

    def __init__(self, outcome: list[LoadedTable]) -> None:
        super().__init__()
        self.outcome = outcome


class Committer:
    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts
        self._locks: WeakValueDictionary[tuple[NamespacePath, str], asyncio.Lock] = WeakValueDictionary()
        self._cleanup = Cleanup(parts.objects)

    async def close(self) -> None:
        """Waits for the deletion of metadata files."""
        await self._cleanup.close()

    async def commit(self, caller: Caller, changes: Sequence[TableChange], *, single: bool) -> list[LoadedTable]:
        """Commits all changes or none. `single`: the idempotent answer is that of the table, not an empty 204.

        CommitConflict when a requirement fails or every swap was lost; NoSuchTable; AlreadyExists when a created name
        exists; BadRequest for updates that cannot be applied; CommitUnknown when the outcome is unknown.
        """
        # All commits sort in the same order, so that no two transactions deadlock on rows.
        changes = sorted(changes, key=lambda change: (change.namespace, change.name))
        names = [(change.namespace, change.name) for change in changes]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"The transaction has two changes for {show(*twice)}; merge them")
        async with self._locked(names):
            try:
                return await self._attempts(
                    _Request(caller, changes, single, self._parts.clock.now_ms(), fingerprint(changes))
                )
            except Repeat as repeat:
                return repeat.outcome

    @contextlib.asynccontextmanager
    async def lock(self, namespace: NamespacePath, name: str) -> AsyncIterator[None]:
        """Excludes other commits of this process to the table. RetryLater after a long wait.

        Not for `commit`, which takes the lock itself."""
        async with self._locked([(namespace, name)]):
            yield

    async def publish(
        self,
        caller: Caller,
        entry: Entry,
        base: TableMetadata,
        metadata: TableMetadata,
        *,
        instants: Sequence[CommitEvent],
        operations: Sequence[Operation],
    ) -> LoadedTable:
        """Makes `metadata`, derived from `base`, the table's current metadata: one attempt, under `lock`.

        `entry` is the pointer that led to `base`. `instants`, at least one, and `operations` are part of the
        transaction that moves the pointer. CommitConflict when the pointer has moved or an operation conflicts. After
        any error but CommitUnknown nothing was committed; after CommitUnknown the outcome is unknown.
        """
        if metadata is base or not instants:
            raise ValueError("instants is empty; publish needs at least one")
        plan = await self._prepare(caller, (entry.namespace, entry.name), entry, base, metadata)
        plan.events = instants
        return (await self._try([plan], operations))[0]

    async def _attempts(self, request: _Request) -> list[LoadedTable]:
        retries = self._parts.settings.commit_retries
        for attempt in range(retries + 1):
            if attempt:
                await self._parts.back_off(attempt)
            try:
                planned = [await self._plan(request, change) for change in request.changes]
                try:
                    return await self._try(planned, self._remember(request, planned))
                except CommitConflict:
                    if attempt == retries:
                        raise
            except (CommitConflict, RequestError):
                await self._raise_if_repeat(request)
                raise
        raise AssertionError("the loop returns or raises")

    def _remember(self, request: _Request, planned: list[PlannedCommit]) -> list[Operation]:
        single = request.single
        location = (planned[0].location or _location(planned[0])) if single else None
        return self._parts.remember(request.caller, status=200 if single else 204, metadata_location=location)

    async def _try(self, planned: list[PlannedCommit], further: Sequence[Operation]) -> list[LoadedTable]:
        """Writes the files, then swaps the pointers. Deletes the files when the transaction is known to have failed."""
        written: list[str] = []
        try:
            for location, data in (file for plan in planned if plan.location for file in plan.written_files()):
                # Recorded before the write: a write with an unknown outcome may have created the file.
                written.append(location)
                try:
                    await self._parts.objects.create(location, data)
                except ObjectExists:  # another writer's file
                    written.remove(location)
                    raise
            await self._swap(planned, further)
        except CommitUnknown:
            raise
        except (SeamarkError, IdempotencyTaken):
            self._cleanup.remove(written)
            raise
        return [self._loaded(plan) for plan in planned]

    async def _swap(self, planned: list[PlannedCommit], further: Sequence[Operation]) -> None:
        operations: list[Operation] = [claimed for plan in planned for claimed in plan.claims]
        for plan in planned:
            if plan.location:
                operations.append(self._pointer_operation(plan))
                operations += [self._instant(plan, event) for event in plan.events]
        operations += further
        if not operations:
            return
        await self._parts.transact(operations)

    def _pointer_operation(self, plan: PlannedCommit) -> Operation:
        now = self._parts.clock.now_ms()
        if plan.entry is None:
            return CreateEntry(entry=plan.new_entry(now))
        return SwapPointer(
            kind=EntryKind.TABLE,
            namespace=plan.namespace,
            name=plan.name,
            uuid=plan.entry.uuid,
            expected_location=plan.entry.metadata_location,
            new_location=plan.location,
            now_ms=now,
        )

    def _instant(self, plan: PlannedCommit, event: CommitEvent) -> RecordInstant:
        summary: dict[str, Any] = {"updates": list(event.updates[:_UPDATES_RECORDED])}
        if event.snapshot_id is not None:
            recorded = event.summary
            summary["operation"] = recorded.get("operation")
            summary |= {key: recorded[key] for key in _SUMMARY_KEYS if key in recorded}
        now = self._parts.clock.now_ms()
        return self._parts.instant(
            event.caller,
            plan.new_entry(now),
            "create" if plan.entry is None else "commit",
            requested_ms=event.requested_ms,
            snapshot_id=event.snapshot_id,
            fingerprint=event.fingerprint,
            summary=summary,
        )

    async def _plan(self, request: _Request, change: TableChange) -> PlannedCommit:
        creates = is_create(change)
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is None and not creates:
            raise NoSuchTable(f"Table does not exist: {show(change.namespace, change.name)}")
        if entry is None:
            check_new_name(change.name, "table name")
            await check_name_free(self._parts, change.namespace, change.name)
        base = await self._parts.documents.table(entry.metadata_location) if entry else None
        if entry is not None and base is not None:
            check_uuid(entry, base)
        files: Sequence[tuple[str, bytes]] = ()
        requested: TableChange | None = change
        try:
            check_requirements(base, change.requirements)
            metadata = self._apply(base, change.updates)
        except CommitConflict:
            if base is not None:
                await check_added(self._parts, request.caller, _uuid_of(entry, base), base, base, change)
            requested, rebased = None, await self._rebase(request, change, base)
            if rebased is None:
                raise
            change = msgspec.structs.replace(change, updates=rebased.updates)
            metadata, files = self._apply(base, change.updates), rebased.files
        if base is None and _is_derived(table_uuid(metadata)):
            raise BadRequest(f"The UUID {metadata.table_uuid} has version 5; choose a random UUID (version 4)")
        if base is None and await self._parts.is_uuid_taken(table_uuid(metadata)):
            raise BadRequest(f"A table with the UUID {metadata.table_uuid} exists already; stage the table again")
        plan = await self._prepare(request.caller, (change.namespace, change.name), entry, base, metadata)
        if requested is not None:
            await check_added(self._parts, request.caller, _uuid_of(entry, metadata), base, metadata, requested)
        plan.events, plan.files = [_commit_event(request, change)], files
        return plan

    def _apply(self, base: TableMetadata | None, updates: list[dict[str, Any]]) -> TableMetadata:
        clock = self._parts.clock
        return apply_updates(base, updates, now_ms=clock.now_ms(), new_uuid=str(clock.uuid4()))

    async def _rebase(self, request: _Request, change: TableChange, base: TableMetadata | None) -> Rebased | None:
        """Rebases a refused append onto the new head, if the table has that enabled (`rebase.py`)."""
        append = requested_append(base, change) if base is not None and request.single else None
        if base is None or append is None:
            return None
        # The refusal may mean that the append was applied already; its snapshot may even have expired since.
        await self._raise_if_repeat(request)
        return await rebase(self._parts, _checked_folder(self._parts, base.location, base.properties), base, append)

    async def _prepare(
        self,
        caller: Caller,
        named: tuple[NamespacePath, str],
        entry: Entry | None,
        base: TableMetadata | None,
        metadata: TableMetadata,
    ) -> PlannedCommit:
        """The metadata as a document, with its location; both empty when the metadata equals the base."""
        (namespace, name), uuid = named, _uuid_of(entry, metadata)
        if base is not None and metadata is base:
            return PlannedCommit(namespace=namespace, name=name, entry=entry, metadata=metadata)
        if base is None or metadata.location != base.location:
            await self._parts.check_location(caller, metadata.location, "The table's location", namespace)
            await check_unclaimed(self._parts, metadata.location, "The table's location", named, uuid)
        before = {} if base is None else base.properties
        await self._parts.check_properties(caller, metadata.properties, before, namespace)
        forgotten: list[str] = []
        if entry is not None and base is not None:
            metadata, forgotten = with_previous_file(metadata, entry.metadata_location, base.last_updated_ms)
            deletes = as_bool(metadata.properties, _DELETE_AFTER_COMMIT, False)
            owns = owned(self._parts, metadata)
            # The metadata file provides the log and the location, and the table's writers can overwrite it.
            own = [old for old in forgotten if owns(old)] if deletes else []
            forgotten = await claimed(self._parts, entry.uuid, own) if own else []
        document, location = self._place(metadata, entry)
        claims: tuple[Operation, ...] = ()
        if moves(base, metadata):
            new = created_entry(namespace, name, uuid, location, 0)
            claims = (await claim(self._parts, caller, metadata, new, fresh=base is None),)
        elif entry is not None:
            await check_writable(self._parts, entry.uuid, metadata)
        claims += tuple(await allow(self._parts, caller, uuid, metadata.properties, before))
        return PlannedCommit(
            namespace=namespace,
            name=name,
            entry=entry,
            metadata=metadata,
            document=document,
            location=location,
            forgotten=forgotten,
            claims=claims,
        )

    def _place(self, metadata: TableMetadata, entry: Entry | None) -> tuple[bytes, str]:
        document, suffix = compress(metadata.properties.get(_CODEC, "none"), encode_table(metadata))
        previous = None if entry is None else entry.metadata_location
        return document, metadata_location(self._parts, metadata.location, metadata.properties, previous, suffix)

    async def _raise_if_repeat(self, request: _Request) -> None:
        """Raises Repeat with the first outcome, when the refused commit was applied before and its reply was lost.

        After a 4xx the client would delete files that are live.
        """
        if request.fingerprint is None:
            return
        change = next(change for change in request.changes if _adds_snapshot(change))
        # The UUIDs in the change count, too: the table may have been renamed or dropped since.
        uuids = [named.get("uuid") for named in change.requirements if named.get("type") == "assert-table-uuid"][:1]
        uuids += [named.get("uuid") for named in change.updates if named.get("action") == "assign-uuid"][:1]
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is not None:
            uuids.append(entry.uuid)
        for uuid in dict.fromkeys(text for text in uuids if isinstance(text, str)):
            instant = await self._parts.store.instant_by_fingerprint(uuid, request.fingerprint)
            if instant is not None:  # the transaction is atomic, so one table proves it for all
                raise Repeat([await self._outcome(change, instant)] if request.single else [])

    async def _outcome(self, change: TableChange, instant: Instant) -> LoadedTable:
        """The outcome of the first commit. CommitUnknown when the name no longer refers to that table."""
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is None or entry.uuid != instant.uuid:
            raise moved_on(change.namespace, change.name)
        then = msgspec.structs.replace(entry, metadata_location=instant.metadata_location or entry.metadata_location)
        try:
            metadata = await self._parts.documents.table(then.metadata_location)
        except NotFound:  # dropped from the metadata log; the current metadata contains the commit
            then, metadata = entry, await self._parts.documents.table(entry.metadata_location)
        return LoadedTable(entry=then, metadata=metadata)

    def _loaded(self, plan: PlannedCommit) -> LoadedTable:
        now = self._parts.clock.now_ms()
        if not plan.location:
            assert plan.entry is not None
            return LoadedTable(entry=plan.entry, metadata=plan.metadata)
        if plan.location.endswith(".gz.metadata.json"):
            self._parts.documents.render(plan.location, plan.metadata, "all")
        else:
            self._parts.documents.remember_table(plan.location, plan.metadata, plan.document)
        if plan.forgotten:
            shared = partial(self._has_another_name, _uuid_of(plan.entry, plan.metadata))
            self._cleanup.remove(plan.forgotten, unless=shared)
        entry = plan.new_entry(now)
        if plan.entry is not None:
            entry = msgspec.structs.replace(
                entry,
                version=plan.entry.version + 1,
                previous_location=plan.entry.metadata_location,
                created_ms=plan.entry.created_ms,
            )
        return LoadedTable(entry=entry, metadata=plan.metadata)

    async def _has_another_name(self, uuid: str) -> bool:
        """Whether another name refers to the table, which may still need the files."""
        return await self._parts.store.names_of(uuid) > 1

    @contextlib.asynccontextmanager
    async def _locked(self, names: Sequence[tuple[NamespacePath, str]]) -> AsyncIterator[None]:
        """Serialises the commits of this process to a table: a lost race would waste a metadata file."""
        timeout_s = self._parts.settings.storage_timeout_s
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout_s):
                    for name in sorted(names):
                        lock = self._locks.get(name)
                        if lock is None:
                            lock = self._locks[name] = asyncio.Lock()
                        await stack.enter_async_context(lock)
            except TimeoutError:
                # While the storage hangs, the wait would otherwise add up over all queued commits.
                raise RetryLater(
                    f"The commit has waited in the table's queue for {timeout_s:g} s (storage_timeout_s); try again"
                ) from None
            yield


def moved_on(namespace: NamespacePath, name: str) -> CommitUnknown:
    """For a commit that succeeded on a table that the name no longer refers to. After a 404 or 409 clients would delete
    files that the dropped or renamed table still uses."""
    return CommitUnknown(
        f"This commit succeeded, but {show(namespace, name)} was dropped, renamed or replaced since; keep its files"
    )


def is_create(change: TableChange) -> bool:
    """Whether the commit creates the table. The other requirements are checked later."""
    return any(requirement.get("type") == "assert-create" for requirement in change.requirements)


def fingerprint(changes: Sequence[TableChange]) -> str | None:
    """Identifies a commit that can be applied only once, because it adds a snapshot (snapshot ids are unique)."""
    if not any(_adds_snapshot(change) for change in changes):
        return None
    content: Any = changes[0].updates
    if len(changes) > 1:
        content = [(change.namespace, change.name, change.updates) for change in changes]
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def _commit_event(request: _Request, change: TableChange) -> CommitEvent:
    added = [update.get("snapshot") or {} for update in change.updates if update.get("action") == "add-snapshot"]
    snapshot = added[-1] if added else {}
    return CommitEvent(
        caller=request.caller,
        requested_ms=request.requested_ms,
        snapshot_id=snapshot.get("snapshot-id"),
        summary=snapshot.get("summary") or {},
        updates=tuple(str(update.get("action")) for update in change.updates),
        fingerprint=request.fingerprint,
    )


def _adds_snapshot(change: TableChange) -> bool:
    return any(update.get("action") == "add-snapshot" for update in change.updates)


async def check_name_free(parts: CatalogContext, namespace: NamespacePath, name: str) -> None:
    """AlreadyExists before anything is written. The transaction checks again."""
    await parts.require_namespace(namespace)
    for kind in (EntryKind.TABLE, EntryKind.VIEW):
        if await parts.store.entry(kind, namespace, name) is not None:
            what = "Table already exists" if kind is EntryKind.TABLE else "View with same name already exists"
            raise AlreadyExists(f"{what}: {show(namespace, name)}")


def created_entry(namespace: NamespacePath, name: str, uuid: str, location: str, now_ms: int) -> Entry:
    return Entry(
        kind=EntryKind.TABLE,
        namespace=namespace,
        name=name,
        uuid=uuid,
        metadata_location=location,
        created_ms=now_ms,
        updated_ms=now_ms,
    )


def metadata_location(
    parts: CatalogContext, location: str, properties: dict[str, str], previous: str | None, suffix: str
) -> str:
    """A new location for a metadata file; no location is written twice. BadRequest when write.metadata.path is outside
    the warehouse.

    The number follows that of the previous file, so that the highest number is the newest file.
    """
    folder = _checked_folder(parts, location, properties)
    number = _NUMBER.match(previous.rpartition("/")[2]) if previous is not None else None
    version = int(number[1]) + 1 if number is not None else int(previous is not None)
    return f"{folder}/{version:05d}-{parts.clock.uuid4()}{suffix}"


def _checked_folder(parts: CatalogContext, location: str, properties: dict[str, str]) -> str:
    """The folder for metadata files. BadRequest when write.metadata.path is outside the warehouse."""
    if METADATA_PATH in properties:
        parts.warehouse.check(properties[METADATA_PATH], METADATA_PATH)
    return metadata_folder(location, properties)


def check_uuid(entry: Entry, metadata: TableMetadata) -> None:
    """Forbidden when the metadata belongs to another table than the entry. The table's writers can overwrite metadata
    files, and the UUID decides which files belong to the table."""
    if metadata.table_uuid not in (None, entry.uuid) and not _is_derived(entry.uuid):
        raise Forbidden(
            f"The metadata file of {show(entry.namespace, entry.name)} was overwritten with that of another table; "
            "register an older metadata file"
        )


def _is_derived(uuid: str) -> bool:
    """Whether `table_uuid` derived the UUID from a location. The metadata may have got a UUID since."""
    return uuid[14:15] == "5"


def table_uuid(metadata: TableMetadata) -> str:
    """The table's UUID. Version 1 metadata may have none; then it is derived from the location."""
    return metadata.table_uuid or str(uuid5(NAMESPACE_URL, metadata.location))


def _uuid_of(entry: Entry | None, metadata: TableMetadata) -> str:
    """As the database has it, where the table is there: its writers could name another's in its metadata, and by the
    UUID it is known which files, places and instants are the table's."""
    return table_uuid(metadata) if entry is None else entry.uuid


def _location(plan: PlannedCommit) -> str:
    assert plan.entry is not None
    return plan.entry.metadata_location
