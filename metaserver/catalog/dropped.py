"""Dropped tables, views and functions.

The rows of dropped entries stay in the database until the retention ends, so that the entries can be restored. Then the
entries are purged.

If files of an entry remain after the purge, the entry is retained: it cannot be restored, and its locations stay
claimed for its namespace until its files are removed, or an admin releases the locations.

Only this module deletes files of dropped tables, and only if no live name uses the files: the transaction that
deletes the row checks the UUID. A purge is an instant. The instant is in flight after the row is deleted, and completed
after the files are deleted. If a crash interrupts a purge, its instant stays in flight, and the purge is repeated.
Deletion is idempotent.

The retention is measured in passed time (`PassedTime`), so a clock that jumps ahead does not end it.
"""

from __future__ import annotations

import msgspec

from seamark.formats.protocol.wire import check_new_name, format_path
from seamark.formats.runtime.errors import BadRequest, CommitConflict, NotFound, RetryLater, SeamarkError
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.ownership.claims import has_files
from seamark.metaserver.catalog.purge import check_purgeable, list_reachable_files
from seamark.metaserver.catalog.values import Caller, Page
from seamark.metaserver.store.model import (
    DroppedEntry,
    Entry,
    EntryKind,
    Instant,
    InstantState,
    NamespacePath,
    make_retained_id,
)
from seamark.metaserver.store.operations import (
    DropEntry,
    ForgetDropped,
    MoveInstant,
    Operation,
    RecordInstant,
    RecordRetainedCheck,
    ReleaseLocations,
    RestoreEntry,
)
from seamark.metaserver.store.passed_time import PassedTime, read_passed_time
from seamark.metaserver.store.port import InstantFilter

_ENTRIES_PER_ROUND = 100
_CHECKED_EVERY_S = 6 * 3600
"""The interval in which the server checks whether a retained entry still has files."""
HOUSEKEEPER = Caller(principal_name="seamark", request_id="housekeeping")


class Dropped:
    def __init__(self, context: CatalogContext) -> None:
        self._context = context

    async def get(self, dropped_id: str) -> DroppedEntry:
        row = await self._context.store.find_dropped(dropped_id)
        if row is None:
            raise make_unknown_dropped_error(dropped_id)
        return row

    async def list(
        self, namespace: NamespacePath | None, page_token: str | None, page_size: int | None
    ) -> Page[DroppedEntry]:
        async def read(after: str | None, limit: int) -> list[DroppedEntry]:
            return await self._context.store.list_dropped(namespace, after, limit)

        return await self._context.read_page(read, lambda row: row.id, page_token, page_size)

    async def list_retained(
        self, namespace: NamespacePath | None, page_token: str | None, page_size: int | None
    ) -> Page[DroppedEntry]:
        """Return a page of the retained entries: they have files and locations, but can no longer be restored."""

        async def read(after: str | None, limit: int) -> list[DroppedEntry]:
            return await self._context.store.list_retained(namespace, after, limit)

        return await self._context.read_page(read, lambda row: row.id, page_token, page_size)

    async def release(self, dropped_id: str) -> None:
        """Release the locations of a dropped entry, so that other entries can use them. Its files are not deleted.

        A claim is the record that a location belongs to an entry. A retained entry can no longer be restored, but keeps
        its claims while it has files.

        Raises:
            BadRequest: The entry can still be restored.
        """
        row = await self.get(dropped_id)
        passed_time = await read_passed_time(self._context.store, self._context.clock)
        if not row.is_retained and not _is_expired(row, passed_time):
            raise BadRequest(
                f"{format_path(row.entry.namespace, row.entry.name)} can be restored until its retention ends; purge "
                "it, or release its locations after that"
            )
        forget_operations = [] if row.is_retained else [ForgetDropped(dropped_id=row.id)]
        await self._context.transact([*forget_operations, ReleaseLocations(uuid=row.entry.uuid)])

    async def release_unused(self) -> int:
        """Release the locations of retained entries without files. Housekeeping calls this method periodically.

        A retained entry can no longer be restored, but its locations stay claimed, which means that no other entry can
        use them.

        Returns:
            The number of entries whose claims ended.
        """
        now_ms = self._context.clock.now_ms()
        released_count = 0
        for row in await self._context.store.list_unchecked(now_ms - _CHECKED_EVERY_S * 1000, _ENTRIES_PER_ROUND):
            # Record the time of the check, so that the next rounds check other entries.
            operation: Operation = RecordRetainedCheck(uuid=row.entry.uuid, now_ms=now_ms)
            if not await has_files(self._context, row.entry):
                operation = ReleaseLocations(uuid=row.entry.uuid)
                released_count += 1
            await self._context.transact([operation])
        return released_count

    async def restore(
        self, caller: Caller, dropped_id: str, namespace: NamespacePath | None, name: str | None
    ) -> Entry:
        """Restore an entry under its old name or another name.

        Raises:
            AlreadyExists: The name exists.
            NoSuchNamespace: The namespace does not exist.
            NotFound: The retention has ended.
        """
        requested_ms = self._context.clock.now_ms()
        row = await self.get(dropped_id)
        passed_time = await read_passed_time(self._context.store, self._context.clock)
        if _is_expired(row, passed_time):
            raise NotFound(f"The retention of {dropped_id} has ended; it can no longer be undropped")
        path = row.entry.namespace if namespace is None else namespace
        to_name = check_new_name(row.entry.name if name is None else name, f"{row.entry.kind.value} name")
        entry = msgspec.structs.replace(row.entry, namespace=path, name=to_name)
        await self._context.transact(
            [
                RestoreEntry(dropped_id=dropped_id, namespace=path, name=to_name, is_kept=True),
                self._context.make_instant(caller, entry, "undrop", requested_ms=requested_ms),
            ]
        )
        return await self._context.store.load_entry(entry.kind, path, to_name) or entry

    async def purge(self, caller: Caller, dropped_id: str) -> None:
        """Purge an entry and its files before the retention ends, even if the drop did not request it.

        Raises:
            BadRequest: The table's properties forbid the deletion of files.
        """
        row = await self.get(dropped_id)
        if row.entry.kind is EntryKind.TABLE:
            await check_purgeable(self._context, row.entry)
        await self._forget(caller, msgspec.structs.replace(row, purge=True))

    async def purge_expired(self) -> int:
        """Repeat interrupted purges, and purge expired entries. Housekeeping calls this method periodically.

        Returns:
            The number of repeated purges plus the number of purged entries.
        """
        unfinished_instants = await self._context.store.list_instants(
            InstantFilter(action="purge", state=InstantState.INFLIGHT, archived=False), _ENTRIES_PER_ROUND
        )
        for instant in unfinished_instants:
            await self._delete_files(instant)
        passed_time = await read_passed_time(self._context.store, self._context.clock)
        retention_ms = self._context.settings.drop_retention_s * 1000
        # A row stores its expiry: the time of the drop plus the retention at that time. `find_time_ago` limits the time
        # of the drop, so the retention is added to get a limit for the expiry. After a change of the setting, the rows
        # may include entries that have not expired yet, and may lack expired entries.
        rows = await self._context.store.list_expired(
            passed_time.find_time_ago(retention_ms) + retention_ms, _ENTRIES_PER_ROUND
        )
        expired_entries = [row for row in rows if _is_expired(row, passed_time)]
        for row in expired_entries:
            try:
                await self._forget(HOUSEKEEPER, row)
            except NotFound:  # Another replica did this first, or the row was restored.
                continue
        return len(unfinished_instants) + len(expired_entries)

    async def _forget(self, caller: Caller, row: DroppedEntry) -> None:
        """Remove the row of a dropped entry, and delete the files of a table if `row.purge` is true."""
        if not row.purge or row.entry.kind is not EntryKind.TABLE:
            # No file is deleted, because the drop did not request it, or because files of views and functions are never
            # deleted. An entry that can no longer be restored (a retained entry) has only its locations left.
            operation = ReleaseLocations(uuid=row.entry.uuid) if row.is_retained else ForgetDropped(dropped_id=row.id)
            await self._context.transact([operation])
            return
        now_ms = self._context.clock.now_ms()
        instant = self._context.make_instant(caller, row.entry, "purge", requested_ms=now_ms).instant
        instant = msgspec.structs.replace(instant, state=InstantState.INFLIGHT, completed_ms=None)
        try:
            await self._context.transact(
                [ForgetDropped(dropped_id=row.id, unshared=True), RecordInstant(instant=instant)]
            )
        except CommitConflict:
            # The same table is registered under another name, which needs the files. So only the row is deleted.
            await self._context.transact([ForgetDropped(dropped_id=row.id)])
            return
        await self._delete_files(instant)

    async def _delete_files(self, instant: Instant) -> None:
        """Delete the files of an entry, and complete the instant of the purge.

        Manifests are deleted after the files that they list, and the metadata file is deleted last. So a later
        attempt can still find the remaining files.

        If the storage is unavailable, the instant stays in flight, and a later round continues the purge.
        """
        deleted_count = failed_count = 0
        assert instant.metadata_location is not None
        try:
            async for location in list_reachable_files(self._context, instant.uuid, instant.metadata_location):
                try:
                    await self._context.objects.delete(location)
                    deleted_count += 1
                except RetryLater:
                    raise
                except SeamarkError:
                    failed_count += 1
        except RetryLater:
            return
        except SeamarkError:
            # Without readable metadata, the purge deletes no files, and the instant records the failure.
            failed_count += 1
        self._context.documents.forget(instant.metadata_location)
        try:
            await self._context.transact(
                [
                    MoveInstant(
                        id=instant.id,
                        expected=InstantState.INFLIGHT,
                        state=InstantState.COMPLETED,
                        now_ms=self._context.clock.now_ms(),
                        summary={**instant.summary, "deleted-files": deleted_count, "failed-files": failed_count},
                    ),
                    await self._make_release(instant),
                ]
            )
        except CommitConflict:
            # Another replica has completed the purge.
            return

    async def _make_release(self, instant: Instant) -> ReleaseLocations:
        """Return the operation that releases the claims after a purge.

        A purge deletes only files that the metadata names. If other files remain in the locations of the entry, the
        entry keeps its claims.
        """
        assert instant.metadata_location is not None
        entry = Entry(
            kind=EntryKind.TABLE,
            namespace=instant.namespace,
            name=instant.name,
            uuid=instant.uuid,
            metadata_location=instant.metadata_location,
        )
        dropped_entry = DroppedEntry(
            id=make_retained_id(instant.uuid),
            entry=entry,
            purge=True,
            dropped_ms=instant.requested_ms,
            expires_ms=instant.requested_ms,
            principal_name=instant.principal_name,
        )
        return ReleaseLocations(
            uuid=instant.uuid, retained=dropped_entry if await has_files(self._context, entry) else None
        )


def _is_expired(row: DroppedEntry, passed_time: PassedTime) -> bool:
    """Return whether the entry's retention has passed."""
    return passed_time.measure_ms(row.dropped_ms, passed_time.now_ms) >= row.expires_ms - row.dropped_ms


def make_unknown_dropped_error(dropped_id: str) -> NotFound:
    """Return the error for an unknown id.

    The same error is necessary for the id of an entry in a namespace that the caller cannot see.
    """
    return NotFound(f"No dropped entry has the id {dropped_id[:100]!r}; list them with GET /api/v1/dropped")


def make_drop_operations(
    context: CatalogContext, caller: Caller, entry: Entry, *, purge: bool, requested_ms: int
) -> list[Operation]:
    """Return the operations that drop a name, and keep its row until the retention ends.

    Without a retention, nothing can be restored. If `purge` is true, the row is kept nevertheless, and its purge is due
    now.
    """
    retention_ms = context.settings.drop_retention_s * 1000
    keep = None
    if retention_ms > 0 or purge:
        keep = DroppedEntry(
            id=str(context.clock.uuid7()),
            entry=entry,
            purge=purge,
            dropped_ms=requested_ms,
            expires_ms=requested_ms + retention_ms,
            principal_name=caller.principal_name,
        )
    drop = DropEntry(kind=entry.kind, namespace=entry.namespace, name=entry.name, keep=keep, uuid=entry.uuid)
    summary = {"purge": purge, **({"dropped-id": keep.id} if keep else {})}
    return [drop, context.make_instant(caller, entry, "drop", requested_ms=requested_ms, summary=summary)]
