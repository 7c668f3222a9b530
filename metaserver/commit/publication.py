"""Publishes commits: writes their metadata files, and moves their pointers in one transaction of the pointer store.

Commits of engines and changes of writers use the same publication. A commit is durable when the transaction is durable.
A publication has three outcomes: committed, conflict and unknown (docs/design/0001). Written files are deleted only if
it is certain that no pointer refers to them. If the outcome is unknown, the files are kept, and the client receives
CommitUnknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata, add_previous_file
from seamark.formats.iceberg.metadata.properties import parse_bool
from seamark.formats.iceberg.metadata.replacement import find_row_count_mismatch
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.index.definitions import read_definitions
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import CommitUnknown, ObjectExists, RetryLater, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import compress_document
from seamark.metaserver.catalog.encrypted_columns import check_encrypted_columns
from seamark.metaserver.catalog.ownership.claims import (
    check_unclaimed,
    check_writable,
    list_claimed,
    make_claim,
    may_add_locations,
)
from seamark.metaserver.catalog.ownership.own_files import make_allow_operations
from seamark.metaserver.catalog.pointers import build_pointer_swap, create_metadata_location, get_uuid, make_entry
from seamark.metaserver.catalog.policies import record_setters
from seamark.metaserver.catalog.purge import make_ownership_check
from seamark.metaserver.catalog.values import Caller, LoadedTable
from seamark.metaserver.objects.cleanup import Cleanup
from seamark.metaserver.store.model import Entry, NamespacePath
from seamark.metaserver.store.operations import EndPriority, Operation, RecordInstant, TakePriority
from seamark.metaserver.store.port import IdempotencyTaken

_DELETE_AFTER_COMMIT = "write.metadata.delete-after-commit.enabled"
_CODEC = "write.metadata.compression-codec"
_PRIORITY_AFTER, _PRIORITY_MS = 3, 3000
"""The number of lost races after which a commit takes priority, and the duration of the priority in milliseconds.

The duration is sufficient for several attempts on slow storage.
"""
_BACK_OFF_MAX = 5
"""The number of the attempt from which on the pause between attempts no longer grows."""
_RECORDED_UPDATES_MAX = 50
"""The maximum number of updates of one commit that the timeline records."""
_SUMMARY_KEYS = ("added-data-files", "deleted-data-files", "added-records", "deleted-records", "added-delete-files")
_SUMMARY_CHARACTERS_MAX = 100
"""The maximum length of a value in a summary on the timeline.

A writer may send values of megabytes, and an answer of the timeline may contain a thousand instants.
"""
OTHER_ROWS = "other-rows"
"""The key in the timeline's summary for the reason why a `replace` snapshot cannot have the rows of its parent."""

SNAPSHOT_ADDED = ("add-snapshot", "set-snapshot-ref")
MANIFESTS_REWRITTEN = ("rewrite-manifests",)
"""The update names of an event in which the server lists the same files in different manifests.

No update of the REST specification has this name, so a client's commit cannot record it.
"""
FILES_REPLACED = ("replace-files",)
"""The update names of an event in which a change replaces files by files with the same rows, such as a compaction.

A commit of an engine cannot record this name.
"""


class CommitEvent(msgspec.Struct, frozen=True):
    """The record of one change, or of one snapshot of an engine, in the timeline, the history of the catalog."""

    caller: Caller
    requested_ms: int
    snapshot_id: int | None
    summary: Mapping[str, Any] = {}
    """The summary of the snapshot. The timeline keeps only its operation and its counts."""
    updates: tuple[str, ...] = SNAPSHOT_ADDED
    """The actions of the metadata updates."""
    fingerprint: str | None = None


class PreparedCommit(msgspec.Struct, frozen=True):
    """Everything that the publication of a commit writes for one table, in one attempt."""

    namespace: NamespacePath
    name: str
    uuid: str
    entry: Entry | None
    """The pointer before the commit. None if the commit creates the table."""
    metadata: TableMetadata
    events: Sequence[CommitEvent]
    files: Sequence[tuple[str, bytes]] = ()
    """Locations and contents of files to write, to which the metadata refers."""
    document: bytes = b""
    """The encoded metadata file."""
    location: str = ""
    """The location to which `document` is written, or an empty text if the metadata does not change."""
    unneeded: Sequence[str] = ()
    """Metadata files that are no longer in the metadata log and may be deleted."""
    claims: tuple[Operation, ...] = ()
    """The claims of the locations that the table will have."""

    def make_entry(self, now_ms: int) -> Entry:
        """Return the entry after this commit."""
        return make_entry(self.namespace, self.name, self.uuid, self.location, now_ms)


class EnginePriority(Protocol):
    """Makes the changes of writers wait for an engine after several of its commits were refused."""

    def record_refusal(self, namespace: NamespacePath, name: str, uuid: str, principal: str) -> None: ...

    def end_priority(self, namespace: NamespacePath, name: str, uuid: str, principal: str) -> None: ...


class Races:
    """Counts the races that a commit has lost against other processes, and gives it priority after several losses.

    The priority is stored in the database. While a process has priority, other processes lose their races. The priority
    ends with the `async with` block, or after `_PRIORITY_MS`. Therefore no process loses every race, even if other
    processes commit very fast.
    """

    def __init__(self, context: CatalogContext, holder: str) -> None:
        self._context = context
        self._holder = holder
        self._lost_races = 0
        self._until_s = context.clock.monotonic() + context.settings.storage_timeout_s
        self._prioritized_uuids: set[str] = set()

    async def record_loss(self, uuids: Iterable[str]) -> bool:
        """Count a lost race for the tables with these UUIDs, and wait before the next attempt.

        A commit that has lost several races takes priority in the database, so that other processes wait for it. It
        then makes the next attempt without a pause. It is given up when both the number of races and its time have
        passed their limits.

        Returns:
            Whether the commit may make another attempt.
        """
        self._lost_races += 1
        is_late = self._context.clock.monotonic() >= self._until_s
        if self._lost_races > self._context.settings.commit_retries and is_late:
            return False
        if self._lost_races >= _PRIORITY_AFTER:
            for uuid in uuids:
                # Ignore the error if another process has priority, or the database does not respond.
                with contextlib.suppress(SeamarkError):
                    await self._context.store.transact([TakePriority(uuid, self._holder, _PRIORITY_MS)])
                    self._prioritized_uuids.add(uuid)
        if not self._prioritized_uuids:
            await self._context.back_off(min(self._lost_races, _BACK_OFF_MAX))
        return True

    async def __aenter__(self) -> Races:
        return self

    async def __aexit__(self, *error: object) -> None:
        for uuid in self._prioritized_uuids:
            with contextlib.suppress(SeamarkError):  # The priority ends after `_PRIORITY_MS`.
                await self._context.store.transact([EndPriority(uuid, self._holder)])


class Publisher:
    """Publishes commits.

    A server has one instance, because commits of engines and changes of writers must take the same locks.
    """

    def __init__(self, context: CatalogContext) -> None:
        self._context = context
        self._locks: WeakValueDictionary[tuple[NamespacePath, str], asyncio.Lock] = WeakValueDictionary()
        self._cleanup = Cleanup(context.objects)
        self._holder = str(context.clock.uuid4())
        self.engine_priority: EnginePriority | None = None

    async def close(self) -> None:
        """Wait until unneeded metadata files are deleted."""
        await self._cleanup.close()

    def lock(self, namespace: NamespacePath, name: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Take the lock of a table, so that no other commit of this process changes the table at the same time."""
        return self.lock_all([(namespace, name)])

    @contextlib.asynccontextmanager
    async def lock_all(self, names: Sequence[tuple[NamespacePath, str]]) -> AsyncIterator[None]:
        """Take the locks of tables, which exclude other commits of this process.

        Without the locks, these commits would lose races, and each lost race would waste a metadata file.

        Raises:
            RetryLater: Other commits have held one of the locks for a long time.
        """
        timeout_s = self._context.settings.storage_timeout_s
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout_s):
                    # With one order for all commits, no two of them can wait for each other.
                    for name in sorted(names):
                        lock = self._locks.setdefault(name, asyncio.Lock())
                        await stack.enter_async_context(lock)
            except TimeoutError:
                # Limit the wait, because otherwise the waits of all queued commits would add up while the storage does
                # not respond.
                raise RetryLater(
                    f"The commit has waited in the table's queue for {timeout_s:g} s (storage_timeout_s); try again"
                ) from None
            yield

    def is_locked(self, namespace: NamespacePath, name: str) -> bool:
        """Return whether a commit of this process holds the lock of the table."""
        lock = self._locks.get((namespace, name))
        return lock is not None and lock.locked()

    def make_race_counter(self) -> Races:
        """Return a counter of the races that a commit loses against other processes."""
        return Races(self._context, self._holder)

    async def publish(
        self,
        caller: Caller,
        entry: Entry,
        base: TableMetadata,
        metadata: TableMetadata,
        *,
        events: Sequence[CommitEvent],
        operations: Sequence[Operation],
        check_stored: Callable[[], Awaitable[None]] | None = None,
        is_checked: bool = False,
    ) -> LoadedTable:
        """Publish `metadata` as the table's current metadata, in one attempt. The caller holds `lock`.

        Args:
            caller: The principal that commits.
            entry: The pointer from which `base` was read.
            base: The table's current metadata.
            metadata: The new metadata, which is derived from `base`.
            events: The events that the timeline records, at least one.
            operations: Further operations of the transaction that moves the pointer.
            check_stored: Waits until the files to which the metadata refers are written. It raises an error if a write
                fails.
            is_checked: Whether the caller has called `check_writable` for `base`.

        Raises:
            CommitConflict: The pointer has moved, or an operation conflicts.
            CommitUnknown: The outcome is unknown. After any other error, nothing was committed.
            ValueError: `metadata` is `base`, or `events` is empty.
        """
        if metadata is base:
            raise ValueError("metadata is unchanged; publish needs changed metadata")
        if not events:
            raise ValueError("events is empty; publish needs at least one")
        name = (entry.namespace, entry.name)
        prepared_commit = await self.prepare(caller, name, entry, base, metadata, events=events, is_checked=is_checked)
        return (await self.publish_all([prepared_commit], operations, check_stored))[0]

    async def prepare(
        self,
        caller: Caller,
        full_name: tuple[NamespacePath, str],
        entry: Entry | None,
        base: TableMetadata | None,
        metadata: TableMetadata,
        *,
        events: Sequence[CommitEvent],
        files: Sequence[tuple[str, bytes]] = (),
        is_checked: bool = False,
    ) -> PreparedCommit:
        """Prepare the publication of `metadata`.

        The locations and properties in `metadata` must be allowed for the caller.

        Args:
            caller: The principal that commits.
            full_name: The namespace and the name of the table.
            entry: The pointer from which `base` was read, or None for a new table.
            base: The table's metadata before the commit, or None for a new table.
            metadata: The table's metadata after the commit. If it is `base` itself, nothing is written.
            events: The events that the timeline records.
            files: Locations and contents of files to write, to which the metadata refers.
            is_checked: Whether the caller has called `check_writable` for `base`.
        """
        (namespace, name), uuid = full_name, get_uuid(entry, metadata)
        if base is not None and metadata is base:
            return PreparedCommit(namespace, name, uuid, entry, metadata, events, files)
        if base is None or metadata.location != base.location:
            await self._context.check_location(caller, metadata.location, "The table's location", namespace)
            await check_unclaimed(self._context, caller, metadata.location, "The table's location", full_name, uuid)
        base_properties = {} if base is None else base.properties
        await self._context.check_properties(caller, metadata.properties, base_properties, namespace)
        if base is None or metadata.properties != base_properties or not _has_same_layout(metadata, base):
            check_encrypted_columns(metadata, base, _list_indexed_columns)
            metadata = msgspec.structs.replace(
                metadata,
                properties=record_setters(
                    caller.principal_name, metadata.properties, base_properties, caller.keeps_setters_of
                ),
            )
        files_to_delete: Sequence[str] = ()
        if entry is not None and base is not None:
            metadata, removed_files = add_previous_file(metadata, entry.metadata_location, base.last_updated_ms)
            if parse_bool(metadata.properties, _DELETE_AFTER_COMMIT, False) and removed_files:
                files_to_delete = await self._select_own(entry.uuid, metadata, removed_files)
        document, suffix = compress_document(metadata.properties.get(_CODEC, "none"), encode_table(metadata))
        previous_location = None if entry is None else entry.metadata_location
        location = create_metadata_location(
            self._context, metadata.location, metadata.properties, previous_location, suffix
        )
        claims: tuple[Operation, ...] = ()
        if may_add_locations(base, metadata):
            new_entry = make_entry(namespace, name, uuid, location, 0)
            claims = (await make_claim(self._context, caller, metadata, new_entry, is_new_uuid=base is None),)
        elif entry is not None and not is_checked:
            await check_writable(self._context, entry.uuid, metadata)
        claims += tuple(await make_allow_operations(self._context, caller, uuid, metadata.properties, base_properties))
        return PreparedCommit(
            namespace, name, uuid, entry, metadata, events, files, document, location, files_to_delete, claims
        )

    async def _select_own(self, uuid: str, metadata: TableMetadata, removed_files: Sequence[str]) -> Sequence[str]:
        """Return the removed metadata files that belong to the table.

        The metadata log and the location come from the metadata file, which the writers of the table can overwrite.
        Therefore each file must also be in a location that the table claims in the database.
        """
        is_own = make_ownership_check(self._context, metadata)
        own_files = [location for location in removed_files if is_own(location)]
        return await list_claimed(self._context, uuid, own_files) if own_files else ()

    async def publish_all(
        self,
        commits: Sequence[PreparedCommit],
        operations: Sequence[Operation],
        check_stored: Callable[[], Awaitable[None]] | None = None,
    ) -> list[LoadedTable]:
        """Write the files, and then move the pointers, in one attempt. The caller holds the locks of `lock_all`.

        If the transaction has certainly failed, the written files are deleted.

        Args:
            commits: The commits of the tables.
            operations: Further operations of the transaction that moves the pointers.
            check_stored: Called before the transaction, or None. It raises an error if a file of the commits is
                missing.

        Raises:
            CommitConflict: A pointer has moved, or an operation conflicts.
            CommitUnknown: The outcome of the transaction is unknown. The written files are kept.
        """
        files: list[tuple[str, bytes]] = []
        for prepared_commit in commits:
            if prepared_commit.location:  # Write the metadata file last, because it refers to the other files.
                files += [*prepared_commit.files, (prepared_commit.location, prepared_commit.document)]
        written_paths: list[str] = []
        try:
            for location, data in files:
                # Record the file before the write, because a write with an unknown outcome may have created it.
                written_paths.append(location)
                try:
                    await self._context.objects.create(location, data)
                except ObjectExists:  # Another writer has created a file with this name.
                    written_paths.remove(location)
                    raise
            if check_stored is not None:
                await check_stored()
            await self._move_pointers(commits, operations)
        except CommitUnknown:
            raise
        except (SeamarkError, IdempotencyTaken):
            self._cleanup.remove(written_paths)
            raise
        return [self._finish_commit(prepared_commit) for prepared_commit in commits]

    async def _move_pointers(self, commits: Sequence[PreparedCommit], further_operations: Sequence[Operation]) -> None:
        """Make the metadata files the current files of their tables, and record the commits, in one transaction."""
        operations: list[Operation] = []
        for prepared_commit in commits:
            operations += prepared_commit.claims
            if prepared_commit.location:
                now_ms = self._context.clock.now_ms()
                if prepared_commit.entry is None:
                    caller = prepared_commit.events[0].caller
                    operations += self._context.make_create_operations(caller, prepared_commit.make_entry(now_ms))
                else:
                    operations.append(
                        build_pointer_swap(prepared_commit.entry, prepared_commit.location, now_ms, self._holder)
                    )
                operations += [self._build_instant(prepared_commit, event) for event in prepared_commit.events]
        operations += further_operations
        if operations:
            await self._context.transact(operations)

    def _build_instant(self, prepared_commit: PreparedCommit, event: CommitEvent) -> RecordInstant:
        """Return the operation that records a commit on the timeline, the list of all actions in the catalog.

        The summary also reports if a snapshot that claims to only replace files has other rows than its parent.
        """
        summary: dict[str, Any] = {"updates": list(event.updates[:_RECORDED_UPDATES_MAX])}
        if event.snapshot_id is not None:
            event_summary = event.summary
            summary["operation"] = _shorten_value(event_summary.get("operation"))
            summary |= {key: _shorten_value(event_summary[key]) for key in _SUMMARY_KEYS if key in event_summary}
            if (reason := _describe_difference(prepared_commit.metadata, event.snapshot_id)) is not None:
                summary[OTHER_ROWS] = reason
        now_ms = self._context.clock.now_ms()
        return self._context.make_instant(
            event.caller,
            prepared_commit.make_entry(now_ms),
            "create" if prepared_commit.entry is None else "commit",
            requested_ms=event.requested_ms,
            snapshot_id=event.snapshot_id,
            fingerprint=event.fingerprint,
            summary=summary,
        )

    def _finish_commit(self, prepared_commit: PreparedCommit) -> LoadedTable:
        """Cache the committed metadata, start the removal of unneeded metadata files, and return the table."""
        now_ms = self._context.clock.now_ms()
        if not prepared_commit.location:  # The commit has not changed the metadata.
            assert prepared_commit.entry is not None
            return LoadedTable(entry=prepared_commit.entry, metadata=prepared_commit.metadata)
        # `document` has the bytes of the file. For a compressed file, they are not the JSON that requests need.
        if prepared_commit.location.endswith(".gz.metadata.json"):
            self._context.documents.render(prepared_commit.location, prepared_commit.metadata, "all")
        else:
            self._context.documents.remember_table(
                prepared_commit.location, prepared_commit.metadata, prepared_commit.document
            )
        if prepared_commit.unneeded:
            is_in_use = partial(self._has_another_name, prepared_commit.uuid)
            self._cleanup.remove(prepared_commit.unneeded, is_in_use=is_in_use)
        entry = prepared_commit.make_entry(now_ms)
        if prepared_commit.entry is not None:
            entry = msgspec.structs.replace(
                entry,
                version=prepared_commit.entry.version + 1,
                previous_location=prepared_commit.entry.metadata_location,
                created_ms=prepared_commit.entry.created_ms,
            )
        return LoadedTable(entry=entry, metadata=prepared_commit.metadata)

    async def _has_another_name(self, uuid: str) -> bool:
        """Return whether another name refers to the table, and may need the files."""
        return await self._context.store.count_names(uuid) > 1


@contextlib.asynccontextmanager
async def open_publisher(context: CatalogContext) -> AsyncIterator[Publisher]:
    """Open a publisher. On exit, wait for the deletion of metadata files."""
    publisher = Publisher(context)
    try:
        yield publisher
    finally:
        await publisher.close()


def _describe_difference(metadata: TableMetadata, snapshot_id: int) -> str | None:
    """Return the reason why a `replace` snapshot cannot have the rows of its parent, or None if there is no reason."""
    snapshot = metadata.snapshot(snapshot_id)
    parent_id = None if snapshot is None else snapshot.parent_snapshot_id
    parent = None if parent_id is None else metadata.snapshot(parent_id)
    return None if snapshot is None else find_row_count_mismatch(snapshot, parent)


def _has_same_layout(metadata: TableMetadata, base: TableMetadata) -> bool:
    return (metadata.default_spec_id, metadata.default_sort_order_id) == (
        base.default_spec_id,
        base.default_sort_order_id,
    )


def _list_indexed_columns(metadata: TableMetadata) -> list[int]:
    """Return the ids of the columns that the indexes of the table use."""
    definitions = read_definitions(metadata).by_name.values()
    return [column_id for definition in definitions for column_id in definition.column_ids]


def _shorten_value(value: object) -> object:
    return value[:_SUMMARY_CHARACTERS_MAX] if isinstance(value, str) else value


def make_pointer_moved_error(namespace: NamespacePath, name: str) -> CommitUnknown:
    """Return the error for a commit that succeeded, if the name no longer refers to the table.

    After an answer of 404 or 409, clients would delete files that the dropped or renamed table still uses.
    CommitUnknown gives an answer after which they keep the files.
    """
    return CommitUnknown(
        f"This commit succeeded, but {format_path(namespace, name)} was dropped, renamed or replaced since; keep its "
        f"files"
    )
