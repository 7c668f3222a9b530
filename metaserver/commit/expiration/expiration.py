"""Expires snapshots: commits their removal, and then deletes the files that no other snapshot needs.

The commit moves the table's pointer like any other commit, and is computed again after a lost race. So no writer waits,
and a reference that is created meanwhile keeps its snapshot. The transaction records an instant in flight with the
location of the earlier metadata file. The instant is completed when the files are deleted. If the server stops before
this, housekeeping finds the instant, computes the files again from both metadata files, and continues. Ages are
measured in passed time (`PassedTime`), so a clock that jumps ahead does not make a snapshot old.

Files are deleted only in the table's own locations. If several names share the table's UUID, for example after a second
registration, no files are deleted, because the snapshots of the other name may need them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any

import msgspec
import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.updates import RemoveSnapshotRef, RemoveSnapshots, Update, apply_updates
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import BadRequest, CommitConflict, NotFound, SeamarkError
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.pointers import check_uuid
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.catalog.purge import is_collectable, make_deletable_check
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.expiration.policy import ExpirationPolicy, Expired, find_expired
from seamark.metaserver.commit.expiration.unused_files import TooManyEntries, UnusedFiles, find_unused
from seamark.metaserver.commit.publication import CommitEvent, Publisher
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry, EntryKind, Instant, InstantState, NamespacePath
from seamark.metaserver.store.operations import MoveInstant, RecordInstant
from seamark.metaserver.store.passed_time import read_passed_time
from seamark.metaserver.store.port import InstantFilter, PointerStore

ACTION = "expiration"
SNAPSHOTS_MAX = 1000
"""The maximum number of snapshots that an expiration removes. The next expiration removes further snapshots."""
_MEMORY_DIVISOR = 8
"""The divisor of `commit_memory_bytes` for the memory of the manifests that an expiration reads."""
_PENDING_EXPIRATIONS_MAX = 100
"""The maximum number of unfinished expirations that are read at once."""
_EXPIRATIONS_CONCURRENT_MAX = 2
"""The maximum number of concurrent expirations. It is limited because each expiration has many file names in memory."""
_DELETES_CONCURRENT_MAX = 16
_LOCKED_FROM, _LOCKED_S = 2, 2.0
"""The number of the first attempt that takes the table's commit lock, and the maximum seconds for which it has it."""
_RESUMED_AFTER_MS = 3_600_000
"""The age at which housekeeping continues an instant in flight.

The server that began a younger expiration may still be working on it.
"""
_GIVEN_UP_AFTER_MS = 24 * _RESUMED_AFTER_MS
"""The age after which housekeeping no longer tries to delete files that the storage does not delete."""
METADATA_BEFORE, _REMOVED_COUNT, _REMOVED_IDS = "metadata-location-before", "removed-snapshots", "removed-snapshot-ids"
"""Keys in the summary of an instant: the location of the earlier metadata file, and the removed snapshots."""
_log = structlog.get_logger("seamark.expiration")


class ExpireSnapshotsRequest(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    older_than_ms: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None,
        msgspec.Meta(
            description="Expire snapshots that were replaced before this time (ms since the epoch). By default, the "
            "table property history.expire.max-snapshot-age-ms determines the time, or 5 days before now."
        ),
    ] = None
    retain_last: Annotated[
        Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None,
        msgspec.Meta(
            description="Minimum number of snapshots to keep in each branch. The default is the table property "
            "history.expire.min-snapshots-to-keep, or 1."
        ),
    ] = None
    dry_run: Annotated[bool, msgspec.Meta(description="Report what would be removed, without removing it.")] = False


class ExpirationReport(msgspec.Struct, frozen=True, rename="kebab"):
    """The result of an expiration. The report of a dry run has the result that the expiration would have.

    Attributes:
        snapshots_left: The number of expired snapshots that remain for the next expiration.
        files_failed: The number of files that the storage did not delete. Housekeeping tries to delete them again.
    """

    snapshots: int = 0
    refs: tuple[str, ...] = ()
    snapshots_left: int = 0
    content_files: int = 0
    manifests: int = 0
    other_files: int = 0
    size_in_bytes: int = 0
    files_failed: int = 0


class _Removal(msgspec.Struct, frozen=True):
    """One attempt of an expiration: the metadata before and after the commit, and the files that become unused.

    Attributes:
        remaining_count: The number of expired snapshots that remain for the next expiration.
        entry: The pointer from which the metadata were read.
        unused: The files that become unused. They are deleted after the commit.
        expired: The expired snapshots and references.
    """

    entry: Entry
    base_metadata: TableMetadata
    new_metadata: TableMetadata
    expired: Expired
    remaining_count: int
    unused: UnusedFiles


async def list_pending_expirations(store: PointerStore, uuid: str | None = None) -> list[Instant]:
    """Return the expirations of one table, or of all tables, whose files are not all deleted yet.

    An expiration is in flight in the timeline until its files are deleted.
    """
    instant_filter = InstantFilter(uuid=uuid, action=ACTION, state=InstantState.INFLIGHT, archived=False)
    return await store.list_instants(instant_filter, _PENDING_EXPIRATIONS_MAX)


class Expiration:
    """Expires the snapshots of tables. An instance belongs to one event loop."""

    def __init__(self, catalog: Catalog, publisher: Publisher, planner: Planner) -> None:
        self._context = catalog.context
        self._publisher = publisher
        self._planner = planner
        self._slots = asyncio.Semaphore(_EXPIRATIONS_CONCURRENT_MAX)
        # Do not use the caches of commits: reading all manifests would evict the manifests that writers need.
        self._manifests = Manifests.from_settings(self._context.objects, self._context.settings, _MEMORY_DIVISOR)

    async def expire(
        self, caller: Caller, namespace: NamespacePath, name: str, request: ExpireSnapshotsRequest
    ) -> ExpirationReport:
        """Remove the expired snapshots of a table, and delete the files that become unused.

        After one of the errors below, nothing was removed. After any other error, the snapshots may be removed.

        Raises:
            NoSuchTable: The table does not exist.
            BadRequest: The table's properties forbid the deletion of files, or are invalid.
            Corrupt: A manifest cannot be read.
            CommitConflict: Concurrent commits conflicted in every attempt.
        """
        async with self._slots:
            return await self._run_attempts(caller, namespace, name, request)

    async def _run_attempts(
        self, caller: Caller, namespace: NamespacePath, name: str, request: ExpireSnapshotsRequest
    ) -> ExpirationReport:
        retries = self._context.settings.commit_retries
        for attempt in range(retries + 1):
            if attempt:
                await self._context.back_off(attempt)
            try:
                removal, instant = await self._attempt(caller, namespace, name, request, attempt)
            except CommitConflict:
                if attempt == retries:
                    raise
                continue
            report = _make_report(removal)
            if instant is None:
                return report
            failed_count = await self._delete(instant, removal.unused)
            return msgspec.structs.replace(report, files_failed=failed_count)
        raise AssertionError("the loop returns or raises")

    async def _attempt(
        self, caller: Caller, namespace: NamespacePath, name: str, request: ExpireSnapshotsRequest, attempt: int
    ) -> tuple[_Removal, Instant | None]:
        """Try to commit an expiration once.

        Args:
            caller: The principal that expires snapshots.
            namespace: The namespace of the table.
            name: The name of the table.
            request: The request.
            attempt: The number of earlier attempts.

        Returns:
            The removal and its instant. The instant is None for a dry run, or if nothing has expired.

        Raises:
            CommitConflict: Another commit changed the table meanwhile.
        """
        # The first attempts read without the lock, because this may take long.
        if attempt < _LOCKED_FROM:
            removal = await self._plan_removal(namespace, name, request)
            if request.dry_run or removal.new_metadata is removal.base_metadata:
                return removal, None
            return removal, await self._commit(caller, removal)
        # A writer that commits continuously would always commit first. Take the lock from this attempt on: only the
        # files that were added since the last attempt must be read under it.
        async with self._publisher.lock(namespace, name):
            try:
                async with asyncio.timeout(_LOCKED_S):
                    removal = await self._plan_removal(namespace, name, request)
            except TimeoutError:
                raise CommitConflict(
                    f"{format_path(namespace, name)} changes faster than the expiration can read it; try again later"
                ) from None
            if request.dry_run or removal.new_metadata is removal.base_metadata:
                return removal, None
            return removal, await self._publish(caller, removal)

    async def resume(self) -> int:
        """Continue deletions that a stopped server did not complete. Housekeeping calls this method periodically.

        An error of one deletion does not stop the others. A deletion that fails for too long is given up.

        Returns:
            The number of continued deletions.
        """
        pending_instants = await list_pending_expirations(self._context.store)
        old_expirations = [
            instant
            for instant in pending_instants
            if self._context.clock.now_ms() - instant.requested_ms > _RESUMED_AFTER_MS
        ]
        for instant in old_expirations:
            try:
                await self._resume(instant)
            except SeamarkError as error:
                if self._is_given_up(instant):
                    await self._complete_instant(instant, {"error": error.message[:1000]})
        return len(old_expirations)

    def _is_given_up(self, instant: Instant) -> bool:
        return self._context.clock.now_ms() - instant.requested_ms > _GIVEN_UP_AFTER_MS

    async def _plan_removal(self, namespace: NamespacePath, name: str, request: ExpireSnapshotsRequest) -> _Removal:
        context = self._context
        entry = await context.require_entry(EntryKind.TABLE, namespace, name)
        former_metadata = await context.documents.table(entry.metadata_location)
        check_uuid(entry, former_metadata)
        if not is_collectable(former_metadata):
            raise BadRequest(
                f"Cannot expire snapshots of {format_path(namespace, name)}: its gc.enabled is false, so others may "
                f"use its "
                "files"
            )
        passed_time = await read_passed_time(context.store, context.clock)
        now_ms = passed_time.now_ms
        policies = await load_policies(context.store, namespace)
        policy = ExpirationPolicy.from_metadata(
            with_policies(former_metadata, policies),
            now_ms,
            older_than_ms=request.older_than_ms,
            retain_last=request.retain_last,
            passed_time=passed_time,
        )
        in_use = await context.store.list_planned_snapshots(entry.uuid, now_ms)
        # A table may have tens of thousands of branches.
        expired = await asyncio.to_thread(find_expired, former_metadata, policy, now_ms, in_use, passed_time)
        count = min(len(expired.snapshot_ids), SNAPSHOTS_MAX)
        while True:
            chosen_snapshots = Expired(expired.refs, expired.snapshot_ids[:count])
            new_metadata = self._remove_expired(former_metadata, chosen_snapshots)
            try:
                unused_files = await self._find_unused_files(entry.uuid, former_metadata, new_metadata)
            except TooManyEntries:  # Remove fewer snapshots.
                count //= 2
                continue
            return _Removal(
                entry,
                former_metadata,
                new_metadata,
                chosen_snapshots,
                len(expired.snapshot_ids) - count,
                unused_files,
            )

    def _remove_expired(self, base: TableMetadata, removal: Expired) -> TableMetadata:
        updates: list[Update] = [RemoveSnapshotRef(name) for name in removal.refs]
        if removal.snapshot_ids:
            updates.append(RemoveSnapshots(tuple(removal.snapshot_ids)))
        if not updates:
            return base
        clock = self._context.clock
        return apply_updates(base, updates, now_ms=clock.now_ms(), new_uuid=str(clock.uuid4()))

    async def _find_unused_files(
        self,
        uuid: str,
        old_metadata: TableMetadata,
        new_metadata: TableMetadata,
        *,
        repeated_ids: Collection[int] | None = None,
    ) -> UnusedFiles:
        """Return the files of the table that become unused.

        There are none if the metadata do not change, if the properties forbid the deletion, or if several names share
        the files.

        The method neither reads nor returns files of other tables.

        Args:
            uuid: The UUID of the table.
            old_metadata: The metadata before the expiration.
            new_metadata: The metadata after the expiration.
            repeated_ids: The removed snapshots of an earlier attempt to delete the files, or None in the first attempt.
        """
        if old_metadata is new_metadata or not is_collectable(new_metadata) or await self._is_shared(uuid):
            return UnusedFiles((), (), (), 0)
        may_delete = await make_deletable_check(self._context, uuid, new_metadata)

        check = partial(self._planner.check_paths, old_metadata, uuid)
        manifests = self._manifests.with_checks(lambda paths: check(list(paths)), None)
        return await find_unused(manifests, old_metadata, new_metadata, may_delete, repeated_ids=repeated_ids)

    async def _is_shared(self, uuid: str) -> bool:
        """Return whether the number of names of the table, live or dropped, differs from one.

        Several names share the files of the table, so another table may need them. A table without a name may have been
        dropped and removed since. In both cases, the expiration deletes no files.
        """
        return await self._context.store.count_names(uuid) != 1

    async def _commit(self, caller: Caller, removal: _Removal) -> Instant:
        async with self._publisher.lock(removal.entry.namespace, removal.entry.name):
            return await self._publish(caller, removal)

    async def _publish(self, caller: Caller, removal: _Removal) -> Instant:
        """Publish the removal, and return its instant. The caller holds the lock of the table's commits.

        The instant, which is the record in the timeline, stays in flight until the files are deleted. After a crash,
        another process continues the deletion.

        Raises:
            CommitConflict: A plan was created meanwhile on a snapshot to remove, so its files are needed. Or another
                commit changed the table.
        """
        context, entry = self._context, removal.entry
        requested_ms = context.clock.now_ms()
        removed_ids = list(removal.expired.snapshot_ids)
        summary = {
            _REMOVED_COUNT: len(removed_ids),
            _REMOVED_IDS: removed_ids,
            METADATA_BEFORE: entry.metadata_location,
        }
        record = context.make_instant(caller, entry, ACTION, requested_ms=requested_ms, summary=summary).instant
        instant = msgspec.structs.replace(record, state=InstantState.INFLIGHT, completed_ms=None)
        actions = ("remove-snapshot-ref",) * bool(removal.expired.refs)
        actions += ("remove-snapshots",) * bool(removal.expired.snapshot_ids)
        event = CommitEvent(caller, requested_ms, None, updates=actions)
        if not (await context.store.list_planned_snapshots(entry.uuid, context.clock.now_ms())).isdisjoint(removed_ids):
            raise CommitConflict("A plan was created on a snapshot that was about to expire; try again")
        await self._publisher.publish(
            caller,
            entry,
            removal.base_metadata,
            removal.new_metadata,
            events=[event],
            operations=[RecordInstant(instant=instant)],
        )
        return instant

    async def _resume(self, instant: Instant) -> None:
        """Continue the deletion of the files of one expiration."""
        old_metadata = await self._context.documents.table(str(instant.summary[METADATA_BEFORE]))
        entry = await self._load_current(instant)
        new_metadata = await self._context.documents.table(entry.metadata_location)
        # The instant records which snapshots were removed. An interrupted attempt may have deleted some of their files,
        # so missing files of these snapshots are not an error.
        unused_files = await self._find_unused_files(
            instant.uuid, old_metadata, new_metadata, repeated_ids=set(instant.summary.get(_REMOVED_IDS, ()))
        )
        await self._delete(instant, unused_files)

    async def _load_current(self, instant: Instant) -> Entry:
        """Return the current entry of the table.

        Raises:
            NotFound: The table was dropped or renamed.
        """
        assert instant.name is not None
        entry = await self._context.store.load_entry(EntryKind.TABLE, instant.namespace, instant.name)
        if entry is None or entry.uuid != instant.uuid:
            raise NotFound(f"{format_path(instant.namespace, instant.name)} was dropped or renamed")
        return entry

    async def _delete(self, instant: Instant, unused_files: UnusedFiles) -> int:
        """Delete the unused files, and return the number of files that could not be deleted.

        The files are deleted in groups: content files, then manifests, then manifest lists. If a file cannot be
        deleted, the later groups are kept, because they refer to it, and the instant remains in flight. Housekeeping
        repeats the deletion for one day.
        """
        failed_count = deleted_count = 0

        async def delete(location: str) -> None:
            nonlocal failed_count, deleted_count
            try:
                await self._context.objects.delete(location)
                deleted_count += 1
            except SeamarkError as error:
                failed_count += 1
                _log.warning("unused file not deleted", location=location, reason=error.message)

        for files in (unused_files.content_files, unused_files.manifests, unused_files.list_files):
            if await self._is_shared(instant.uuid):  # The table was registered again after the commit.
                break
            await gather([partial(delete, location) for location in files], _DELETES_CONCURRENT_MAX)
            if failed_count:
                break
        if not failed_count or self._is_given_up(instant):
            summary = {
                "deleted-files": deleted_count,
                "failed-files": failed_count,
                "size-in-bytes": unused_files.size_bytes,
            }
            await self._complete_instant(instant, summary)
        return failed_count

    async def _complete_instant(self, instant: Instant, summary: dict[str, Any]) -> None:
        move = MoveInstant(
            id=instant.id,
            expected=InstantState.INFLIGHT,
            state=InstantState.COMPLETED,
            now_ms=self._context.clock.now_ms(),
            summary={**instant.summary, **summary},
        )
        try:
            await self._context.transact([move])
        except CommitConflict:
            return  # Another replica has completed the instant.


def _make_report(removal: _Removal) -> ExpirationReport:
    unused_files = removal.unused
    return ExpirationReport(
        snapshots=len(removal.expired.snapshot_ids),
        refs=removal.expired.refs,
        snapshots_left=removal.remaining_count,
        content_files=len(unused_files.content_files),
        manifests=len(unused_files.manifests),
        other_files=len(unused_files.list_files),
        size_in_bytes=unused_files.size_bytes,
    )
