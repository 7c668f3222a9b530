"""The commit: plan against what stands, write metadata, swap the pointers in one transaction; again after a lost race.

A commit has three outcomes (docs/design/0001). Metadata files that we wrote are removed only when it is *known* that no
pointer names them; where the outcome could not be learned they stay, and the client hears CommitUnknown.
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

from metaserver.catalog.claims import check_unclaimed, check_writable, claim, claimed, moves
from metaserver.catalog.documents import compress
from metaserver.catalog.own_files import allow, check_added
from metaserver.catalog.parts import CatalogContext
from metaserver.catalog.purge import owned
from metaserver.catalog.rebase import Rebased, asked_for, rebase
from metaserver.catalog.values import Caller, LoadedTable, TableChange
from metaserver.errors import (
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
from metaserver.iceberg.metadata.metadata import TableMetadata, with_previous_file
from metaserver.iceberg.metadata.properties import METADATA_PATH, as_bool, metadata_folder
from metaserver.iceberg.metadata.requirements import check_requirements
from metaserver.iceberg.metadata.table_json import encode_table
from metaserver.iceberg.metadata.updates import apply_updates
from metaserver.objects.cleanup import Cleanup
from metaserver.store.port import (
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
from metaserver.wire import check_new_name, show

_DELETE_AFTER_COMMIT = "write.metadata.delete-after-commit.enabled"
_CODEC = "write.metadata.compression-codec"
_UPDATES_TOLD = 50
"""Of one commit, in the timeline."""
_NUMBER = re.compile(r"v?(\d{1,9})[-.]")
"""What a metadata file's name begins with: 00012-<uuid>.metadata.json, or v12.metadata.json of Hadoop tables."""
_SUMMARY_KEYS = ("added-data-files", "deleted-data-files", "added-records", "deleted-records", "added-delete-files")


class CommitEvent(msgspec.Struct, frozen=True):
    """What the timeline hears of one change, or of one snapshot."""

    caller: Caller
    requested_ms: int
    snapshot_id: int | None
    summary: Mapping[str, Any] = {}
    """The snapshot's; the timeline keeps the operation and the counts."""
    updates: tuple[str, ...] = ("add-snapshot", "set-snapshot-ref")
    """The actions by which the metadata changed."""
    fingerprint: str | None = None


class PlannedCommit(msgspec.Struct):
    """One table's part of one attempt."""

    namespace: NamespacePath
    name: str
    entry: Entry | None
    """None: the table is created."""
    metadata: TableMetadata
    happened: Sequence[CommitEvent] = ()
    files: Sequence[tuple[str, bytes]] = ()
    """What the metadata names and the server writes."""
    document: bytes = b""
    location: str = ""
    """Where `document` is written; empty when nothing changes."""
    forgotten: list[str] = []
    """Metadata files that left the log, and are the table's to delete."""
    claims: tuple[Operation, ...] = ()
    """Of places that it comes to have."""

    def new_entry(self, now_ms: int) -> Entry:
        """Where the pointer stands when this has happened."""
        return created_entry(self.namespace, self.name, _uuid_of(self.entry, self.metadata), self.location, now_ms)

    def written_files(self) -> list[tuple[str, bytes]]:
        """In this order: whoever sees the last sees what it names."""
        return [*self.files, (self.location, self.document)]


class _Request(msgspec.Struct, frozen=True):
    """What stays the same over the attempts of one commit."""

    caller: Caller
    changes: Sequence[TableChange]
    single: bool
    requested_ms: int
    fingerprint: str | None


class Repeat(Exception):
    """This very commit happened before; carries what it led to, nothing for a transaction."""

    def __init__(self, outcome: list[LoadedTable]) -> None:
        super().__init__()
        self.outcome = outcome


class Committer:
    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts
        self._locks: WeakValueDictionary[tuple[NamespacePath, str], asyncio.Lock] = WeakValueDictionary()
        self._cleanup = Cleanup(parts.objects)

    async def close(self) -> None:
        """Waits for metadata files that are being removed."""
        await self._cleanup.close()

    async def commit(self, caller: Caller, changes: Sequence[TableChange], *, single: bool) -> list[LoadedTable]:
        """All changes or none. `single`: the idempotent answer is the table's, not an empty 204.

        CommitConflict when a requirement does not hold or every swap was lost; NoSuchTable; AlreadyExists when a
        created name is taken; BadRequest for what could never be applied; CommitUnknown when nobody can tell.
        """
        # In one order for all, so that no two transactions wait for each other's rows.
        changes = sorted(changes, key=lambda change: (change.namespace, change.name))
        names = [(change.namespace, change.name) for change in changes]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"{show(*twice)} is named twice in one transaction; merge its changes")
        async with self._locked(names):
            try:
                return await self._attempts(
                    _Request(caller, changes, single, self._parts.clock.now_ms(), fingerprint(changes))
                )
            except Repeat as repeat:
                return repeat.outcome

    @contextlib.asynccontextmanager
    async def turn(self, namespace: NamespacePath, name: str) -> AsyncIterator[None]:
        """While it is held, no other commit of this process to that table is under way. RetryLater when it takes long.

        Not for `commit`, which takes turns itself."""
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
        """Makes `metadata`, which was made of `base`, the table's: one attempt, within a `turn`.

        `entry` is the pointer as it was when it led to `base`. `instants`, at least one, and `operations` happen in the
        transaction that moves it. CommitConflict where the pointer has moved or an operation says so; on any error
        nothing has happened, but for CommitUnknown: then nobody can tell.
        """
        if metadata is base or not instants:
            raise ValueError("there is nothing to publish")
        plan = await self._prepare(caller, (entry.namespace, entry.name), entry, base, metadata)
        plan.happened = instants
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
        """Writes, then swaps. Removes what it wrote where the transaction is known not to have happened."""
        written: list[str] = []
        try:
            for location, data in (file for plan in planned if plan.location for file in plan.written_files()):
                # Before the write: an error that leaves the outcome of the write open may have left the file, too.
                written.append(location)
                try:
                    await self._parts.objects.create(location, data)
                except ObjectExists:  # not ours to remove
                    written.remove(location)
                    raise
            await self._swap(planned, further)
        except CommitUnknown:
            raise
        except (SeamarkError, IdempotencyTaken):
            self._cleanup.remove(written)
            raise
        return [self._finish(plan) for plan in planned]

    async def _swap(self, planned: list[PlannedCommit], further: Sequence[Operation]) -> None:
        operations: list[Operation] = [claimed for plan in planned for claimed in plan.claims]
        for plan in planned:
            if plan.location:
                operations.append(self._pointer_operation(plan))
                operations += [self._instant(plan, happening) for happening in plan.happened]
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

    def _instant(self, plan: PlannedCommit, happening: CommitEvent) -> RecordInstant:
        summary: dict[str, Any] = {"updates": list(happening.updates[:_UPDATES_TOLD])}
        if happening.snapshot_id is not None:
            said = happening.summary
            summary["operation"] = said.get("operation")
            summary |= {key: said[key] for key in _SUMMARY_KEYS if key in said}
        now = self._parts.clock.now_ms()
        return self._parts.instant(
            happening.caller,
            plan.new_entry(now),
            "create" if plan.entry is None else "commit",
            requested_ms=happening.requested_ms,
            snapshot_id=happening.snapshot_id,
            fingerprint=happening.fingerprint,
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
        asked: TableChange | None = change
        try:
            check_requirements(base, change.requirements)
            metadata = self._apply(base, change.updates)
        except CommitConflict:
            if base is not None:
                await check_added(self._parts, request.caller, _uuid_of(entry, base), base, base, change)
            asked, rebased = None, await self._rebase(request, change, base)
            if rebased is None:
                raise
            change = msgspec.structs.replace(change, updates=rebased.updates)
            metadata, files = self._apply(base, change.updates), rebased.files
        if base is None and _is_derived(table_uuid(metadata)):
            raise BadRequest(f"The UUID {metadata.table_uuid} is one of version 5; choose a random one (version 4)")
        if base is None and await self._parts.is_uuid_taken(table_uuid(metadata)):
            raise BadRequest(f"There is a table with the UUID {metadata.table_uuid} already; stage the table again")
        plan = await self._prepare(request.caller, (change.namespace, change.name), entry, base, metadata)
        if asked is not None:
            await check_added(self._parts, request.caller, _uuid_of(entry, metadata), base, metadata, asked)
        plan.happened, plan.files = [_happening(request, change)], files
        return plan

    def _apply(self, base: TableMetadata | None, updates: list[dict[str, Any]]) -> TableMetadata:
        clock = self._parts.clock
        return apply_updates(base, updates, now_ms=clock.now_ms(), new_uuid=str(clock.uuid4()))

    async def _rebase(self, request: _Request, change: TableChange, base: TableMetadata | None) -> Rebased | None:
        """A refused append onto the head that overtook it, where its table has that (`rebase.py`)."""
        append = asked_for(base, change) if base is not None and request.single else None
        if base is None or append is None:
            return None
        # It may be refused because it is there already; and its snapshot may have expired since.
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
        """The metadata made into a document, with its place; both empty where it is the base itself."""
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
            # The log, and the location, are what the table's file says, which its writers may have written over.
            mine = [old for old in forgotten if owns(old)] if deletes else []
            forgotten = await claimed(self._parts, entry.uuid, mine) if mine else []
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
        """A commit is refused, too, when it was applied before and its reply was lost: then that is the answer.

        A 4xx would make the client delete files that are live now.
        """
        if request.fingerprint is None:
            return
        change = next(change for change in request.changes if _adds_snapshot(change))
        # By the UUIDs that the change itself names, also: its table may have another name or none by now.
        uuids = [named.get("uuid") for named in change.requirements if named.get("type") == "assert-table-uuid"][:1]
        uuids += [named.get("uuid") for named in change.updates if named.get("action") == "assign-uuid"][:1]
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is not None:
            uuids.append(entry.uuid)
        for uuid in dict.fromkeys(text for text in uuids if isinstance(text, str)):
            instant = await self._parts.store.instant_by_fingerprint(uuid, request.fingerprint)
            if instant is not None:  # that of one table proves it for all
                raise Repeat([await self._outcome(change, instant)] if request.single else [])

    async def _outcome(self, change: TableChange, instant: Instant) -> LoadedTable:
        """What the first one led to; CommitUnknown where the name leads to that table no more."""
        entry = await self._parts.store.entry(EntryKind.TABLE, change.namespace, change.name)
        if entry is None or entry.uuid != instant.uuid:
            raise moved_on(change.namespace, change.name)
        then = msgspec.structs.replace(entry, metadata_location=instant.metadata_location or entry.metadata_location)
        try:
            metadata = await self._parts.documents.table(then.metadata_location)
        except NotFound:  # left the metadata log since; what stands now contains it or came after it
            then, metadata = entry, await self._parts.documents.table(entry.metadata_location)
        return LoadedTable(entry=then, metadata=metadata)

    def _finish(self, plan: PlannedCommit) -> LoadedTable:
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
        """Whose table may still need what this one's commits have left behind."""
        return await self._parts.store.names_of(uuid) > 1

    @contextlib.asynccontextmanager
    async def _locked(self, names: Sequence[tuple[NamespacePath, str]]) -> AsyncIterator[None]:
        """Commits to one table take turns within a process: a lost race would have written a file for nothing."""
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
                # While storage hangs, each that waits would wait for all before it.
                raise RetryLater(f"Commits to this table have waited for storage longer than {timeout_s:g} s") from None
            yield


def moved_on(namespace: NamespacePath, name: str) -> CommitUnknown:
    """For a commit that succeeded, on a table that the name no longer leads to: a 404 or 409 would make clients delete
    files that a dropped or renamed table still holds."""
    return CommitUnknown(
        f"This commit succeeded, but {show(namespace, name)} was dropped, renamed or replaced since; keep its files"
    )


def is_create(change: TableChange) -> bool:
    """Whether the table is to come into being with this commit (what else stands beside it is checked later)."""
    return any(requirement.get("type") == "assert-create" for requirement in change.requirements)


def fingerprint(changes: Sequence[TableChange]) -> str | None:
    """Names a commit that can happen only once, because it adds a snapshot (their ids are unique)."""
    if not any(_adds_snapshot(change) for change in changes):
        return None
    said: Any = changes[0].updates
    if len(changes) > 1:
        said = [(change.namespace, change.name, change.updates) for change in changes]
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


def _happening(request: _Request, change: TableChange) -> CommitEvent:
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
    """AlreadyExists early, before anything is written; the transaction checks again."""
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
    """A new name each time: no file is ever written twice. BadRequest when write.metadata.path leads outside.

    Numbered after the file it follows, whoever wrote that one, so that the highest number is the newest file.
    """
    folder = _checked_folder(parts, location, properties)
    number = _NUMBER.match(previous.rpartition("/")[2]) if previous is not None else None
    version = int(number[1]) + 1 if number is not None else int(previous is not None)
    return f"{folder}/{version:05d}-{parts.clock.uuid4()}{suffix}"


def _checked_folder(parts: CatalogContext, location: str, properties: dict[str, str]) -> str:
    """BadRequest when write.metadata.path leads outside."""
    if METADATA_PATH in properties:
        parts.warehouse.check(properties[METADATA_PATH], METADATA_PATH)
    return metadata_folder(location, properties)


def check_uuid(entry: Entry, metadata: TableMetadata) -> None:
    """Forbidden for metadata of another table than the one that the entry names. Metadata files lie where the table's
    writers may write, and by the UUID it is known which files are the table's."""
    if metadata.table_uuid not in (None, entry.uuid) and not _is_derived(entry.uuid):
        raise Forbidden(
            f"The metadata file of {show(entry.namespace, entry.name)} was written over with another table's; register "
            "an older one"
        )


def _is_derived(uuid: str) -> bool:
    """Whether `table_uuid` made it of a location: then metadata may have got another since."""
    return uuid[14:15] == "5"


def table_uuid(metadata: TableMetadata) -> str:
    """Version 1 metadata of old writers has none; the table's location then stands for it, the same each time."""
    return metadata.table_uuid or str(uuid5(NAMESPACE_URL, metadata.location))


def _uuid_of(entry: Entry | None, metadata: TableMetadata) -> str:
    """As the database has it, where the table is there: its writers could name another's in its metadata, and by the
    UUID it is known which files, places and instants are the table's."""
    return table_uuid(metadata) if entry is None else entry.uuid


def _location(plan: PlannedCommit) -> str:
    assert plan.entry is not None
    return plan.entry.metadata_location
