"""The dropped: kept as rows until their retention ends, so that undrop is a row, too. Then purged, if that was asked.

Files are deleted only here, and only those of a table that no live name shares (its UUID is asked in the same
transaction that forgets the row). A purge is an instant: in flight once the row is gone, completed when the files are;
one that a crash cut short is found in flight and done again: deleting is idempotent.
"""

from __future__ import annotations

import msgspec

from metaserver.catalog.parts import CatalogContext
from metaserver.catalog.purge import check_purgeable, reachable_files
from metaserver.catalog.values import Caller, Page
from metaserver.errors import CommitConflict, NotFound, RetryLater, SeamarkError
from metaserver.store.port import (
    DropEntry,
    DroppedEntry,
    Entry,
    EntryKind,
    ForgetDropped,
    Instant,
    InstantFilter,
    InstantState,
    MoveInstant,
    NamespacePath,
    Operation,
    RecordInstant,
    ReleaseLocations,
    RestoreEntry,
)
from metaserver.wire import check_new_name

_BATCH = 100
HOUSEKEEPER = Caller(who="seamark", request_id="housekeeping")


class Dropped:
    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts

    async def get(self, dropped_id: str) -> DroppedEntry:
        found = await self._parts.store.dropped_entry(dropped_id)
        if found is None:
            raise no_such_dropped(dropped_id)
        return found

    async def list(
        self, namespace: NamespacePath | None, page_token: str | None, page_size: int | None
    ) -> Page[DroppedEntry]:
        async def read(after: str | None, limit: int) -> list[DroppedEntry]:
            return await self._parts.store.dropped(namespace, after, limit)

        return await self._parts.page(read, lambda row: row.id, page_token, page_size)

    async def restore(
        self, caller: Caller, dropped_id: str, namespace: NamespacePath | None, name: str | None
    ) -> Entry:
        """Brings it back under its old name or another. AlreadyExists, NoSuchNamespace, NotFound once it expired."""
        requested_ms = self._parts.clock.now_ms()
        row = await self.get(dropped_id)
        if row.expires_ms <= requested_ms:
            raise NotFound(f"The retention of {dropped_id} has ended; it can no longer be undropped")
        path = row.entry.namespace if namespace is None else namespace
        to_name = check_new_name(row.entry.name if name is None else name, f"{row.entry.kind.value} name")
        entry = msgspec.structs.replace(row.entry, namespace=path, name=to_name)
        await self._parts.transact(
            [
                RestoreEntry(dropped_id=dropped_id, namespace=path, name=to_name),
                self._parts.instant(caller, entry, "undrop", requested_ms=requested_ms),
            ]
        )
        return await self._parts.store.entry(entry.kind, path, to_name) or entry

    async def purge(self, caller: Caller, dropped_id: str) -> None:
        """Now, before its retention ends: files too, even if the drop did not ask for it. BadRequest where the table
        says that its files are not to be deleted."""
        row = await self.get(dropped_id)
        if row.entry.kind is EntryKind.TABLE:
            await check_purgeable(self._parts, row.entry)
        await self._forget(caller, msgspec.structs.replace(row, purge=True))

    async def purge_expired(self) -> int:
        """A round of housekeeping: unfinished purges again, then what has expired. Returns how many were dealt with."""
        unfinished = await self._parts.store.instants(
            InstantFilter(action="purge", state=InstantState.INFLIGHT, archived=False), _BATCH
        )
        for instant in unfinished:
            await self._delete_files(instant)
        expired = await self._parts.store.dropped_expired(self._parts.clock.now_ms(), _BATCH)
        for row in expired:
            try:
                await self._forget(HOUSEKEEPER, row)
            except NotFound:  # another replica was first, or it was undropped this moment
                continue
        return len(unfinished) + len(expired)

    async def _forget(self, caller: Caller, row: DroppedEntry) -> None:
        if not row.purge or row.entry.kind is not EntryKind.TABLE:
            await self._parts.transact([ForgetDropped(dropped_id=row.id)])
            return
        now = self._parts.clock.now_ms()
        instant = self._parts.instant(caller, row.entry, "purge", requested_ms=now).instant
        instant = msgspec.structs.replace(instant, state=InstantState.INFLIGHT, completed_ms=None)
        try:
            await self._parts.transact(
                [ForgetDropped(dropped_id=row.id, unshared=True), RecordInstant(instant=instant)]
            )
        except CommitConflict:
            # Its files live on under a name registered since; only the row goes.
            await self._parts.transact([ForgetDropped(dropped_id=row.id)])
            return
        await self._delete_files(instant)

    async def _delete_files(self, instant: Instant) -> None:
        """Manifests after the files they name, the metadata file last: whatever is left can still be found. While the
        storage is away the instant stays in flight, and a later round goes on."""
        deleted = failed = 0
        assert instant.metadata_location is not None
        try:
            async for location in reachable_files(self._parts, instant.uuid, instant.metadata_location):
                try:
                    await self._parts.objects.delete(location)
                    deleted += 1
                except RetryLater:
                    raise
                except SeamarkError:
                    failed += 1
        except RetryLater:
            return
        except SeamarkError:
            # Metadata that cannot be read leads to no files; what is there stays, and the instant says so.
            failed += 1
        self._parts.documents.forget(instant.metadata_location)
        try:
            await self._parts.transact(
                [
                    MoveInstant(
                        id=instant.id,
                        expected=InstantState.INFLIGHT,
                        state=InstantState.COMPLETED,
                        now_ms=self._parts.clock.now_ms(),
                        summary={**instant.summary, "deleted-files": deleted, "failed-files": failed},
                    ),
                    ReleaseLocations(uuid=instant.uuid),
                ]
            )
        except CommitConflict:
            return  # another replica finished it


def no_such_dropped(dropped_id: str) -> NotFound:
    """Of an id that is unknown, and of one whose namespace the caller may not see: an answer tells neither apart."""
    return NotFound(
        f"Nothing dropped has the id {dropped_id[:100]!r}; list what can be undropped with GET /api/v1/dropped"
    )


def drop_operations(
    parts: CatalogContext, caller: Caller, entry: Entry, *, purge: bool, requested_ms: int
) -> list[Operation]:
    """Drops a name and remembers it for the retention; without one, only a purge is remembered, and due at once."""
    retention_ms = parts.settings.drop_retention_s * 1000
    keep = None
    if retention_ms > 0 or purge:
        keep = DroppedEntry(
            id=str(parts.clock.uuid7()),
            entry=entry,
            purge=purge,
            dropped_ms=requested_ms,
            expires_ms=requested_ms + retention_ms,
            who=caller.who,
        )
    drop = DropEntry(kind=entry.kind, namespace=entry.namespace, name=entry.name, keep=keep, uuid=entry.uuid)
    summary = {"purge": purge, **({"dropped-id": keep.id} if keep else {})}
    return [drop, parts.instant(caller, entry, "drop", requested_ms=requested_ms, summary=summary)]
