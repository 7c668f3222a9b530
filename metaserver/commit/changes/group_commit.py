"""Commits the waiting changes of a table as a group: applies them one after the other, and publishes them together.

The outcome of a change is committed, refused or unknown (docs/design/0001, "The commit"). The changes of a group share
a metadata file and a transaction. Each change has its own snapshot, instant, response and conflicts, and a refused
change does not affect the other changes. The last sequence number of a producer is read before its change is applied,
and is advanced in the transaction that publishes the change. When it is certain that no snapshot
refers to a file, the file is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import structlog
from msgspec import structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import encode_json
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, NotFound, RetryLater, SeamarkError
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.ownership.claims import check_writable
from seamark.metaserver.catalog.pointers import check_uuid
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.commit.change_requests.change import ChangeRequest
from seamark.metaserver.commit.change_requests.change_body import REPLACE
from seamark.metaserver.commit.change_requests.collision import Collision
from seamark.metaserver.commit.changes.change_application import ChangeApplication, find_head
from seamark.metaserver.commit.changes.commit_priority import CommitPriority
from seamark.metaserver.commit.changes.commit_result import CommitResult, make_committed_change
from seamark.metaserver.commit.changes.pending_changes import ChangeQueue, GroupAttempt, PendingChange
from seamark.metaserver.commit.changes.producers import LastCommit, find_last_commit, find_producer_snapshot
from seamark.metaserver.commit.publication import (
    FILES_REPLACED,
    SNAPSHOT_ADDED,
    CommitEvent,
    Publisher,
    make_pointer_moved_error,
)
from seamark.metaserver.commit.removed_files import read_removal_note
from seamark.metaserver.commit.snapshots.manifests import Manifests
from seamark.metaserver.commit.snapshots.snapshot_producer import ProducedSnapshot
from seamark.metaserver.objects.cleanup import Cleanup
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.store.lease import SERVICES
from seamark.metaserver.store.model import Entry, NamespacePath, RegisteredIndexFile
from seamark.metaserver.store.operations import (
    AdvanceProducer,
    CheckFence,
    FlushedRange,
    MoveFlushedOffsets,
    Operation,
    ReplaceIndexFiles,
)
from seamark.metaserver.store.port import IdempotencyTaken, LostRace

_log = structlog.get_logger("seamark.commits")
_ENGINE = "a snapshot of a standard engine"
"""The change id of engines, whose commits have no id."""

IndexFiles = Callable[[Entry, TableMetadata], Awaitable[Sequence[RegisteredIndexFile]]]
"""A function that reads the index files of a change. It raises BadRequest if an index file belongs to another table."""


class CommitObserver(Protocol):
    """Receives the commit events that the metrics count."""

    def observe_group(self, changes: int) -> None: ...

    def observe_conflict(self, reason: str) -> None: ...


class Commits:
    """Commits changes. An instance belongs to one event loop. Open it with `open_commits`."""

    def __init__(
        self, catalog: Catalog, publisher: Publisher, planner: Planner, manifests: Manifests, metrics: CommitObserver
    ) -> None:
        self._context = catalog.context
        self._tables = catalog.tables
        self._publisher = publisher
        self._planner = planner
        self._manifests = manifests
        self._metrics = metrics
        self._queues: dict[tuple[NamespacePath, str], ChangeQueue] = {}
        settings = self._context.settings
        self._history_limit = settings.commit_history_limit
        self._priority_s = min(settings.commit_turn_s, settings.storage_timeout_s / 2)
        """The maximum time in seconds for which a change waits for changes with priority."""
        self._priority = CommitPriority(after=settings.commit_turn_after, longest_s=self._priority_s)
        self._cleanup = Cleanup(self._context.objects)
        # The commits of engines report their refusals and successes to this object (`record_refusal`, `end_priority`).
        publisher.engine_priority = self

    def record_refusal(self, namespace: NamespacePath, name: str, uuid: str, principal: str) -> None:
        """Count a refused commit of an engine.

        After several refusals, the engine gets priority: the table's changes wait until the engine has read the table
        again and committed.
        """
        self._priority.record_collision(uuid, (principal, _ENGINE), self._context.clock.monotonic())
        if (queue := self._queues.get((namespace, name))) is not None:
            queue.changed.set()

    def end_priority(self, namespace: NamespacePath, name: str, uuid: str, principal: str) -> None:
        """End the priority of an engine after a successful commit, and forget the refusals of its earlier commits.

        The changes of the table that waited for the engine are then committed.
        """
        self._priority.release(uuid, (principal, _ENGINE), self._context.clock.monotonic())
        if (queue := self._queues.get((namespace, name))) is not None:
            queue.changed.set()

    async def close(self) -> None:
        """Wait for running commits, and for the removal of files."""
        await asyncio.gather(*(queue.task for queue in self._queues.values() if queue.task), return_exceptions=True)
        await self._cleanup.close()

    async def commit(
        self,
        caller: Caller,
        namespace: NamespacePath,
        name: str,
        request: ChangeRequest,
        index_files: IndexFiles,
    ) -> CommitResult:
        """Commit the change as a snapshot at the head of its branch, and register its index files.

        Raises:
            NoSuchTable: The table does not exist.
            BadRequest: Files do not fit the table.
            Forbidden: The caller may not write a location.
            CommitConflict: The change conflicts with later commits, or concurrent commits conflicted in every attempt.
                Nothing was committed.
            CommitUnknown: The outcome is unknown, or the producer has already committed the change to a table to which
                the name no longer refers.
            IdempotencyTaken: Another request has used the idempotency key.
        """
        try:
            loaded_table = await self._tables.load(namespace, name)
        except NotFound:
            await self._check_not_done(request, request.table_uuid, namespace, name)
            raise
        entry = loaded_table.entry
        assert entry is not None
        application = ChangeApplication(self._context, self._manifests, self._planner, caller, request, entry.uuid)
        pending = PendingChange(caller, entry.uuid, application, self._context.clock.now_ms())
        ends_priority = True
        try:
            await self._check_table(pending, entry)
            last_commit = await self._load_last_commit(pending, entry, loaded_table.metadata)
            if last_commit is not None and _is_repeat(pending, last_commit):
                return self._build_repeated_result(pending, last_commit, entry, loaded_table.metadata)
            if request.repeats_only:
                raise Collision("no repeat", "The producer has not committed this change; nothing was changed")
            find_head(request.branch, loaded_table.metadata)  # Refuse an unknown branch before writing any file.
            pending.index_files = await index_files(entry, loaded_table.metadata)
            await application.prepare(loaded_table.metadata)
            await application.preload(loaded_table.metadata)
            result = await self._queue_and_wait(namespace, name, pending)
        except CommitUnknown:
            raise  # Keep the files of the change, because they may be live.
        except Collision as collision:
            self._metrics.observe_conflict(collision.reason)
            if pending.change_key is not None:
                self._priority.record_collision(pending.uuid, pending.change_key, self._context.clock.monotonic())
                ends_priority = False
            await self._remove_written(application)
            raise CommitConflict(collision.message) from None
        except (SeamarkError, IdempotencyTaken):
            await self._remove_written(application)
            raise
        except Exception:
            if not pending.offered:
                await self._remove_written(application)
            raise
        finally:
            if ends_priority:
                self._end_priority(namespace, name, pending)
            # Without an outcome, another task may be applying the change, although its client has disconnected.
            if pending.done.done():
                application.end()
        if result.committed.duplicate:
            await self._remove_written(application)
        else:
            self._cleanup.remove(application.unneeded)
        return result

    async def _remove_written(self, application: ChangeApplication) -> None:
        """Wait until all writes of an uncommitted change have ended, and delete its files."""
        with suppress(Exception):  # The change already has an outcome, so a failed write has no consequence.
            await application.settle()
        self._cleanup.remove(application.written)

    def _end_priority(self, namespace: NamespacePath, name: str, pending: PendingChange) -> None:
        if pending.change_key is not None:
            self._priority.release(pending.uuid, pending.change_key, self._context.clock.monotonic())
            if (queue := self._queues.get((namespace, name))) is not None:
                queue.changed.set()

    async def _queue_and_wait(self, namespace: NamespacePath, name: str, pending: PendingChange) -> CommitResult:
        """Put a change into the queue of its table, and wait for its outcome. Start the queue's task if necessary.

        Raises:
            RetryLater: The commit of the change did not begin within `storage_timeout_s`.
        """
        queue = self._queues.get((namespace, name))
        if queue is None:
            queue = self._queues[namespace, name] = ChangeQueue()
        pending.queued_s = self._context.clock.monotonic()
        queue.waiting.append(pending)
        queue.changed.set()
        if queue.task is None:
            queue.task = asyncio.create_task(self._work(namespace, name, queue))
        timeout_s = self._context.settings.storage_timeout_s
        await asyncio.wait((pending.done,), timeout=timeout_s)
        if not pending.started:
            queue.waiting.remove(pending)
            raise RetryLater(
                f"The commit has waited in the table's queue for {timeout_s:g} s (storage_timeout_s); try again"
            )
        return await pending.done

    async def _work(self, namespace: NamespacePath, name: str, queue: ChangeQueue) -> None:
        """Commit the waiting changes in groups until the queue is empty."""
        try:
            while queue.waiting:
                group = await self._take_group(queue)
                for pending in group:
                    pending.started = True
                try:
                    if group:
                        await self._commit_group(namespace, name, group)
                except SeamarkError as error:
                    _fail_changes(group, error)
                except Exception as error:  # noqa: BLE001  the waiting requests must receive the error
                    # Set the outcomes before writing the log entry, because logging may fail as well.
                    _fail_changes(group, error)
                    _log.error("a commit failed unexpectedly", table=name, exc_info=error)
        finally:
            del self._queues[namespace, name]

    async def _take_group(self, queue: ChangeQueue) -> Sequence[PendingChange]:
        """Return the changes that have waited longest, or only the change that has priority.

        While a change has priority, the method waits for the next attempt of its client, and the result may be empty.
        Several changes may get priority one after the other. So no change waits longer than the maximum duration of
        priority after it was queued.
        """
        queue.changed.clear()
        now_s = self._context.clock.monotonic()
        wait_s = queue.waiting[0].queued_s + self._priority_s - now_s
        holder_and_remaining_s = self._priority.expire_and_find_holder(queue.waiting[0].uuid, now_s)
        if holder_and_remaining_s is None or wait_s <= 0:
            count = min(len(queue.waiting), self._context.settings.commit_group_max)
            return [queue.waiting.popleft() for _ in range(count)]
        change_key, remaining_s = holder_and_remaining_s
        attempts = [pending for pending in queue.waiting if pending.change_key == change_key]
        for pending in attempts:
            queue.waiting.remove(pending)
        if not attempts:
            with suppress(TimeoutError):
                await asyncio.wait_for(queue.changed.wait(), min(remaining_s, wait_s))
        return attempts

    async def _commit_group(self, namespace: NamespacePath, name: str, group: Sequence[PendingChange]) -> None:
        """Commit the changes of a group, and set the outcome of each change.

        If the whole group fails, the method raises one error for all changes.

        Raises:
            CommitConflict: Other commits changed the table in every attempt.
            RetryLater: Other processes committed first in every attempt.
        """
        retries, attempts = self._context.settings.commit_retries, 0
        async with self._publisher.make_race_counter() as races:
            while attempts <= retries:
                open_changes = [pending for pending in group if not pending.done.done()]
                try:
                    async with self._publisher.lock(namespace, name):
                        await self._attempt(namespace, name, open_changes)
                except LostRace:  # Another process has moved the pointer. The changes need not conflict.
                    if not await races.record_loss({pending.uuid for pending in open_changes}):
                        break
                    continue
                except CommitConflict:
                    if attempts == retries:
                        raise
                except IdempotencyTaken as error:
                    await self._fail_taken(open_changes, error)
                if all(pending.done.done() for pending in group):
                    return
                attempts += 1
                await self._context.back_off(attempts)
        raise RetryLater("The commit lost every race against other processes, and nothing was committed; try again")

    async def _attempt(self, namespace: NamespacePath, name: str, group: Sequence[PendingChange]) -> None:
        """Try to commit the changes of a group together.

        Raises:
            CommitConflict: Another commit came first. The caller must try the changes without an outcome again.
        """
        try:
            entry = await self._tables.load_entry(namespace, name)
        except NotFound as error:
            for pending in group:
                try:
                    await self._check_not_done(pending.request, pending.uuid, namespace, name)
                except CommitUnknown as unknown:
                    pending.fail(unknown)
            _fail_changes(group, error)
            return
        metadata = await self._context.documents.table(entry.metadata_location)
        check_uuid(entry, metadata)
        await check_writable(self._context, entry.uuid, metadata)
        attempt = GroupAttempt(entry, metadata, await read_removal_note(self._context, entry.uuid))
        for pending in group:
            try:
                await self._apply_change(attempt, pending)
            except (SeamarkError, Collision) as error:
                # The change may conflict with an earlier change of this group that is not published yet.
                if attempt.produced:
                    attempt.refused.append((pending, error))
                else:
                    pending.fail(error)
            except Exception as error:  # noqa: BLE001  an unexpected error of one change must not fail the others
                pending.fail(error)
                _log.error("a change failed unexpectedly", table=name, exc_info=error)
        if not attempt.produced:
            return
        for pending, _ in attempt.produced:
            pending.offered = True
        events = [
            CommitEvent(
                pending.caller,
                pending.requested_ms,
                produced.snapshot.snapshot_id,
                produced.summary,
                _get_update_names(produced),
            )
            for pending, produced in attempt.produced
        ]
        operations = [
            operation
            for pending, produced in attempt.produced
            for operation in self._build_operations(pending, produced)
        ]
        try:
            loaded_table = await self._publisher.publish(
                group[0].caller,
                entry,
                attempt.base,
                attempt.metadata,
                events=events,
                operations=operations,
                check_stored=attempt.wait_until_stored,
                is_checked=True,
            )
        except CommitUnknown as error:
            _fail_changes(group, error)
            return
        assert loaded_table.entry is not None
        self._metrics.observe_group(len(attempt.produced))
        for pending, produced in attempt.produced:
            committed = make_committed_change(produced.snapshot.snapshot_id, loaded_table.metadata, pending.uuid)
            pending.succeed(CommitResult(committed, loaded_table.entry.metadata_location))
        for pending, refusal in attempt.refused:
            pending.fail(refusal)
        _fail_changes(attempt.same_key_changes, IdempotencyTaken("by another change of the group"))
        for pending in attempt.repeats:
            assert pending.request.producer is not None
            last_commit = attempt.producers[pending.request.producer.id]
            pending.succeed(
                self._build_repeated_result(pending, last_commit, loaded_table.entry, loaded_table.metadata)
            )

    async def _apply_change(self, attempt: GroupAttempt, pending: PendingChange) -> None:
        """Apply a change to the result of the earlier changes in the group.

        A repeat of a change gets the answer of the first attempt. If an earlier change of the group has the same
        idempotency key, the change gets the answer of that earlier change. The checks that the transaction would repeat
        are made first, because a failed transaction would refuse the whole group.
        """
        await self._check_table(pending, attempt.entry)
        # In the transaction, a wrong fencing number would fail the whole group.
        await self._check_fence(pending.request.fence)
        self._check_flushed(pending.request.flushed, attempt.entry)
        key, producer = pending.caller.idempotency, pending.request.producer
        # In the transaction, a duplicate idempotency key would fail the whole group.
        if key is not None and key.key in attempt.keys:
            attempt.same_key_changes.append(pending)
            return
        if producer is not None:
            last_commit = attempt.producers.get(producer.id)
            if last_commit is not None and _is_repeat(pending, last_commit):
                attempt.repeats.append(pending)
                return
            last_commit = last_commit or await self._load_last_commit(pending, attempt.entry, attempt.base)
            if last_commit is not None and _is_repeat(pending, last_commit):
                pending.succeed(self._build_repeated_result(pending, last_commit, attempt.entry, attempt.base))
                return
        if pending.index_files:
            await self._check_index_files(attempt, pending)
        produced = await pending.application.apply(attempt.metadata, attempt.removal_note)
        attempt.metadata = produced.metadata
        attempt.produced.append((pending, produced))
        if key is not None:
            attempt.keys.add(key.key)
        if producer is not None:
            attempt.producers[producer.id] = LastCommit(producer.sequence, produced.snapshot.snapshot_id)

    async def _check_index_files(self, attempt: GroupAttempt, pending: PendingChange) -> None:
        """Check that no index file of the change is registered for another index.

        In the transaction, an index file of another index would fail the whole group.

        Raises:
            Collision: An index file is registered for another index.
        """
        if attempt.definitions is None:
            attempt.definitions = {
                file.location: file.definition for file in await self._context.store.index_files(pending.uuid)
            }
        for file in pending.index_files:
            if attempt.definitions.setdefault(file.location, file.definition) != file.definition:
                raise Collision("index-file", f"The index file {file.location} is registered for another index")

    async def _check_fence(self, fence: int | None) -> None:
        if fence is not None and fence != await self._context.store.read_fencing_number(SERVICES):
            raise Collision("fence", "Another replica runs the table services now; this job was stopped")

    @staticmethod
    def _check_flushed(ranges: Sequence[FlushedRange], entry: Entry) -> None:
        """Check that no other flush has moved the flushed offsets of the stream.

        In the transaction, a moved offset would fail the whole group.

        Raises:
            Collision: Another flush has moved an offset.
        """
        offsets = entry.parse_flushed_offsets()
        if any(offsets.get(flushed_range.shard) != flushed_range.start for flushed_range in ranges):
            raise Collision("flush", "Rows of this flush were flushed before; nothing was changed")

    async def _check_table(self, pending: PendingChange, entry: Entry) -> None:
        expected_uuid = pending.request.table_uuid or pending.uuid
        if entry.uuid == pending.uuid == expected_uuid:
            return
        await self._check_not_done(pending.request, expected_uuid, entry.namespace, entry.name)
        raise Collision(
            "table", f"The name refers to table {entry.uuid} now, not to {expected_uuid}; load the table again"
        )

    async def _check_not_done(
        self, request: ChangeRequest, uuid: str | None, namespace: NamespacePath, name: str
    ) -> None:
        """Check that the producer has not committed the change to an earlier table of this name.

        After a refusal, the client would delete the files, which the earlier table contains.

        Raises:
            CommitUnknown: The producer has committed the change to a table to which the name no longer refers.
        """
        if request.producer is None or uuid is None:
            return
        state = await self._context.store.load_producer(uuid, request.producer.id)
        if state is not None and request.producer.sequence <= state.sequence:
            raise make_pointer_moved_error(namespace, name)

    async def _load_last_commit(
        self, pending: PendingChange, entry: Entry, metadata: TableMetadata
    ) -> LastCommit | None:
        producer = pending.request.producer
        if producer is None:
            return None
        return await find_last_commit(self._context.store, entry.uuid, producer.id, metadata, self._history_limit)

    def _build_repeated_result(
        self, pending: PendingChange, last_commit: LastCommit, entry: Entry, metadata: TableMetadata
    ) -> CommitResult:
        """Return the first response to a change that the producer has committed before."""
        producer = pending.request.producer
        assert producer is not None
        snapshot_id = find_producer_snapshot(producer.id, producer.sequence, last_commit, metadata, self._history_limit)
        committed = structs.replace(make_committed_change(snapshot_id, metadata, entry.uuid), duplicate=True)
        return CommitResult(committed, entry.metadata_location)

    def _build_operations(self, pending: PendingChange, produced: ProducedSnapshot) -> list[Operation]:
        """Return the operations to add to the transaction that publishes the change."""
        now_ms, snapshot_id, fence = self._context.clock.now_ms(), produced.snapshot.snapshot_id, pending.request.fence
        # A change of a table service states the number of its lease. If another process has taken the lease since, the
        # transaction fails.
        operations: list[Operation] = [] if fence is None else [CheckFence(SERVICES, fence)]
        if pending.request.producer is not None:
            producer = pending.request.producer
            operations.append(AdvanceProducer(pending.uuid, producer.id, producer.sequence, snapshot_id, now_ms))
        if pending.request.flushed:
            operations.append(MoveFlushedOffsets(pending.uuid, pending.request.flushed))
        files_by_definition: dict[str, list[RegisteredIndexFile]] = {}
        for file in pending.index_files:
            files_by_definition.setdefault(file.definition, []).append(structs.replace(file, snapshot_id=snapshot_id))
        operations += [
            ReplaceIndexFiles(pending.uuid, definition, tuple(files), (), now_ms)
            for definition, files in files_by_definition.items()
        ]
        # The location of the metadata file is chosen later, so the record does not contain it. A repeated request
        # receives the current location.
        answer = encode_json(make_committed_change(snapshot_id, produced.metadata, pending.uuid))
        return [*operations, *self._context.make_answer_record(pending.caller, status=200, body=answer)]

    async def _fail_taken(self, group: Sequence[PendingChange], error: IdempotencyTaken) -> None:
        """Refuse the changes whose idempotency key another request has used. The remaining changes continue.

        An idempotency key identifies a request, so that a repeat is not executed twice.
        """
        now_ms = self._context.clock.now_ms()
        for pending in group:
            key = pending.caller.idempotency
            if key is not None and await self._context.store.find_idempotency_record(key.key, now_ms) is not None:
                pending.fail(error)


def _fail_changes(changes: Sequence[PendingChange], error: BaseException) -> None:
    for pending in changes:
        pending.fail(error)


def _get_update_names(produced: ProducedSnapshot) -> tuple[str, ...]:
    return FILES_REPLACED if produced.summary.get("operation") == REPLACE else SNAPSHOT_ADDED


def _is_repeat(pending: PendingChange, last_commit: LastCommit) -> bool:
    """Return whether the producer of the change has committed it before.

    A producer numbers its changes, so a number that is not higher than its last number is a repeat.
    """
    producer = pending.request.producer
    return producer is not None and producer.sequence <= last_commit.sequence


@asynccontextmanager
async def open_commits(
    catalog: Catalog, publisher: Publisher, planner: Planner, metrics: CommitObserver
) -> AsyncIterator[Commits]:
    """Open the commits of changes. On exit, wait for running commits."""
    manifests = Manifests.from_settings(catalog.context.objects, catalog.context.settings)
    commits = Commits(catalog, publisher, planner, manifests, metrics)
    try:
        yield commits
    finally:
        await commits.close()
