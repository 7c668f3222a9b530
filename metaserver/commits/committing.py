"""Turns of a table: changes that wait for it are applied one after the other and published together.

The rules it keeps. A change is committed once, refused, or nobody can tell (docs/design/0001, "The commit"). Changes of
one group share a metadata file and a transaction; each keeps its own snapshot, instant, answer and conflict, and one
that is refused holds up no other. A producer's last sequence is read before its change is applied and moved in the
transaction that publishes it. Files written in vain go, once it is known that they are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import msgspec
import structlog
from msgspec import structs

from metaserver.catalog.catalog import Catalog
from metaserver.catalog.claims import check_writable
from metaserver.catalog.commit import CommitEvent, check_uuid, moved_on
from metaserver.catalog.parts import CatalogContext
from metaserver.catalog.values import Caller
from metaserver.clock import Clock
from metaserver.commits.applying import ChangeApplication, head_of
from metaserver.commits.change import ChangeRequest
from metaserver.commits.collision import Collision
from metaserver.commits.manifests import Manifests
from metaserver.commits.producers import Last, last_of, snapshot_of
from metaserver.commits.producing import Produced
from metaserver.commits.turns import ChangeId, Turns
from metaserver.errors import CommitConflict, CommitUnknown, NotFound, RetryLater, SeamarkError
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.objects.cleanup import Cleanup
from metaserver.objects.port import ObjectStore
from metaserver.planner.plan.planner import Planner
from metaserver.settings import Settings
from metaserver.store.port import (
    AdvanceProducer,
    Entry,
    IdempotencyTaken,
    NamespacePath,
    Operation,
    PointerStore,
    RegisteredIndexFile,
    ReplaceIndexFiles,
)
from metaserver.timeline.timeline import Timeline
from metaserver.wire import encode_json

_log = structlog.get_logger("seamark.commits")

IndexFiles = Callable[[Entry, TableMetadata], Awaitable[Sequence[RegisteredIndexFile]]]
"""Reads the index files that come with a change to this table. BadRequest for one that is none of the table's."""


class CommitMetrics(Protocol):
    """Who counts what happens here."""

    def committed_together(self, changes: int) -> None: ...

    def collided(self, reason: str) -> None: ...


class Committed(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What a change led to. None where its snapshot has expired since."""

    snapshot_id: int | None
    parent_snapshot_id: int | None
    sequence_number: int | None
    operation: str | None
    table_uuid: str
    duplicate: bool
    summary: dict[str, str]


class CommitResult(msgspec.Struct, frozen=True):
    committed: Committed
    metadata_location: str
    """A metadata file that has the snapshot, or came after it."""


class _Job:
    """One change on its way."""

    def __init__(self, caller: Caller, uuid: str, applying: ChangeApplication, requested_ms: int) -> None:
        self.caller = caller
        self.uuid = uuid
        """The table's that it was prepared for."""
        self.applying = applying
        self.index_files: Sequence[RegisteredIndexFile] = ()
        self.requested_ms = requested_ms
        change_id = applying.request.change_id
        self.change: ChangeId | None = None if change_id is None else (caller.who, change_id)
        self.queued_s = 0.0
        """Since when it waits, by the monotonic clock."""
        self.begun = False
        self.offered = False
        """Whether it was handed over to be published: its files may be live then, if nobody knows what came of it."""
        self.done: asyncio.Future[CommitResult] = asyncio.get_running_loop().create_future()
        # Whoever waits may have gone; asyncio would warn of an error that nobody took.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def request(self) -> ChangeRequest:
        return self.applying.request

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def land(self, landed: CommitResult) -> None:
        if not self.done.done():
            self.done.set_result(landed)


class _Queue:
    """The changes that wait for one table, and the task that takes them in turn."""

    def __init__(self) -> None:
        self.waiting: deque[_Job] = deque()
        self.changed = asyncio.Event()
        """Set where one more waits, or a turn is over."""
        self.task: asyncio.Task[None] | None = None


class _Attempt:
    """A group's changes on one state of the table."""

    def __init__(self, entry: Entry, base: TableMetadata) -> None:
        self.entry = entry
        self.base = base
        self.metadata = base
        self.made: list[tuple[_Job, Produced]] = []
        self.repeats: list[_Job] = []
        """What this group commits already, by another change of the same producer."""
        self.refused: list[tuple[_Job, SeamarkError | Collision]] = []
        """What others of this group are in the way of."""
        self.producers: dict[str, Last] = {}
        self.keys: set[str] = set()
        """Idempotency keys of what is made."""
        self.twins: list[_Job] = []
        """What came with a key of these: they get the answer of the first."""


class Commits:
    """Belongs to one event loop. Opened by `open_commits`."""

    def __init__(
        self, parts: CatalogContext, catalog: Catalog, planner: Planner, manifests: Manifests, told: CommitMetrics
    ) -> None:
        self._parts = parts
        self._catalog = catalog
        self._planner = planner
        self._manifests = manifests
        self._told = told
        self._look_back = parts.settings.commit_history_limit
        self._queues: dict[tuple[NamespacePath, str], _Queue] = {}
        settings = parts.settings
        self._turn_s = min(settings.commit_turn_s, settings.storage_timeout_s / 2)
        """So long the others wait at most, for however many turns."""
        self._turns = Turns(after=settings.commit_turn_after, turn_s=self._turn_s)
        self._cleanup = Cleanup(parts.objects)

    async def close(self) -> None:
        """Waits for changes that are under way, and for files that are being removed."""
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
        """The change as a snapshot at the head of its branch, which its index files get, too.

        NoSuchTable. BadRequest for what does not fit the table, Forbidden for files where the caller may not write.
        CommitConflict where it collides with what was committed since it read, or lost every race: nothing happened.
        CommitUnknown; also for what a producer has committed, to a table that the name leads to no more.
        IdempotencyTaken.
        """
        try:
            loaded = await self._catalog.tables.load(namespace, name)
        except NotFound:
            await self._check_not_done(request, request.table_uuid, namespace, name)
            raise
        entry = loaded.entry
        assert entry is not None
        applying = ChangeApplication(self._parts, self._manifests, self._planner, caller, request, entry.uuid)
        job = _Job(caller, entry.uuid, applying, self._parts.clock.now_ms())
        ended = True
        try:
            await self._check_table(job, entry)
            last = await self._last(job, entry, loaded.metadata)
            if last is not None and _is_repeat(job, last):
                return self._repeated(job, last, entry, loaded.metadata)
            if request.repeats_only:
                raise Collision("no repeat", "The producer has not committed this change; nothing was changed")
            head_of(request.branch, loaded.metadata)  # before anything is written
            job.index_files = await index_files(entry, loaded.metadata)
            await applying.prepare(loaded.metadata)
            await applying.warm(loaded.metadata)
            landed = await self._in_turn(namespace, name, job)
        except CommitUnknown:
            raise  # its files may be live
        except Collision as collision:
            self._told.collided(collision.reason)
            if job.change is not None:
                self._turns.collided(job.uuid, job.change, self._parts.clock.monotonic())
                ended = False
            self._cleanup.remove(applying.written)
            raise CommitConflict(collision.message) from None
        except (SeamarkError, IdempotencyTaken):
            self._cleanup.remove(applying.written)
            raise
        except Exception:
            if not job.offered:
                self._cleanup.remove(applying.written)
            raise
        finally:
            if ended:
                self._end_turn(namespace, name, job)
        self._cleanup.remove(applying.written if landed.committed.duplicate else applying.unneeded)
        return landed

    def _end_turn(self, namespace: NamespacePath, name: str, job: _Job) -> None:
        if job.change is not None:
            self._turns.ended(job.uuid, job.change, self._parts.clock.monotonic())
            if (queue := self._queues.get((namespace, name))) is not None:
                queue.changed.set()

    async def _in_turn(self, namespace: NamespacePath, name: str, job: _Job) -> CommitResult:
        queue = self._queues.get((namespace, name))
        if queue is None:
            queue = self._queues[namespace, name] = _Queue()
        job.queued_s = self._parts.clock.monotonic()
        queue.waiting.append(job)
        queue.changed.set()
        if queue.task is None:
            queue.task = asyncio.create_task(self._work(namespace, name, queue))
        timeout_s = self._parts.settings.storage_timeout_s
        await asyncio.wait((job.done,), timeout=timeout_s)
        if not job.begun:
            queue.waiting.remove(job)
            raise RetryLater(f"Commits to this table have waited for storage longer than {timeout_s:g} s")
        return await job.done

    async def _work(self, namespace: NamespacePath, name: str, queue: _Queue) -> None:
        """Takes the changes that wait, as many at once as may be, until there are none."""
        try:
            while queue.waiting:
                group = await self._next_group(queue)
                for job in group:
                    job.begun = True
                try:
                    if group:
                        await self._commit_group(namespace, name, group)
                except SeamarkError as error:
                    _fail(group, error)
                except Exception as error:  # noqa: BLE001  whoever waits must hear of a bug, too
                    _log.error("a commit failed unexpectedly", table=name, exc_info=error)
                    _fail(group, error)
        finally:
            del self._queues[namespace, name]

    async def _next_group(self, queue: _Queue) -> Sequence[_Job]:
        """Those that have waited longest; where one has the turn, it alone, until another has waited for as long as one
        turn may be, since turns may follow each other without end. Nobody, where it is still to come."""
        queue.changed.clear()
        now_s = self._parts.clock.monotonic()
        patience_s = queue.waiting[0].queued_s + self._turn_s - now_s
        turn = self._turns.holder(queue.waiting[0].uuid, now_s)
        if turn is None or patience_s <= 0:
            count = min(len(queue.waiting), self._parts.settings.commit_group_max)
            return [queue.waiting.popleft() for _ in range(count)]
        change, left_s = turn
        mine = [job for job in queue.waiting if job.change == change]
        for job in mine:
            queue.waiting.remove(job)
        if not mine:
            with suppress(TimeoutError):
                await asyncio.wait_for(queue.changed.wait(), min(left_s, patience_s))
        return mine

    async def _commit_group(self, namespace: NamespacePath, name: str, group: Sequence[_Job]) -> None:
        """Every change of the group has its outcome afterwards, or shares that of the error."""
        retries = self._parts.settings.commit_retries
        for number in range(retries + 1):
            if number:
                await self._parts.back_off(number)
            left = [job for job in group if not job.done.done()]
            try:
                async with self._catalog.committer.turn(namespace, name):
                    await self._attempt(namespace, name, left)
            except CommitConflict:  # another process was first
                if number == retries:
                    raise
            except IdempotencyTaken as error:
                await self._fail_taken(left, error)
            if all(job.done.done() for job in group):
                return
        raise RetryLater("Commits to this table lose to others again and again; try again")

    async def _attempt(self, namespace: NamespacePath, name: str, group: Sequence[_Job]) -> None:
        """CommitConflict: the table has moved, and what has no outcome yet is to be tried again."""
        try:
            entry = await self._catalog.tables.entry(namespace, name)
        except NotFound as error:
            for job in group:
                try:
                    await self._check_not_done(job.request, job.uuid, namespace, name)
                except CommitUnknown as done:
                    job.fail(done)
            _fail(group, error)
            return
        metadata = await self._catalog.documents.table(entry.metadata_location)
        check_uuid(entry, metadata)
        await check_writable(self._catalog.parts, entry.uuid, metadata)
        attempt = _Attempt(entry, metadata)
        for job in group:
            try:
                await self._add(attempt, job)
            except (SeamarkError, Collision) as error:
                if attempt.made:  # by what is not published yet, and may never be
                    attempt.refused.append((job, error))
                else:
                    job.fail(error)
            except Exception as error:  # noqa: BLE001  a bug that one change meets is not the others'
                _log.error("a change failed unexpectedly", table=name, exc_info=error)
                job.fail(error)
        if not attempt.made:
            return
        for job, _ in attempt.made:
            job.offered = True
        happened = [
            CommitEvent(job.caller, job.requested_ms, made.snapshot.snapshot_id, made.summary)
            for job, made in attempt.made
        ]
        operations = [operation for job, made in attempt.made for operation in self._operations(job, made)]
        try:
            loaded = await self._catalog.committer.publish(
                group[0].caller, entry, attempt.base, attempt.metadata, instants=happened, operations=operations
            )
        except CommitUnknown as error:
            _fail(group, error)
            return
        assert loaded.entry is not None
        self._told.committed_together(len(attempt.made))
        for job, made in attempt.made:
            committed = _committed(made.snapshot.snapshot_id, loaded.metadata, job.uuid)
            job.land(CommitResult(committed, loaded.entry.metadata_location))
        for job, refusal in attempt.refused:
            job.fail(refusal)
        _fail(attempt.twins, IdempotencyTaken("by another change of the group"))
        for job in attempt.repeats:
            assert job.request.producer is not None
            last = attempt.producers[job.request.producer.id]
            job.land(self._repeated(job, last, loaded.entry, loaded.metadata))

    async def _add(self, attempt: _Attempt, job: _Job) -> None:
        """Applies the change to what the ones before it have made of the table."""
        await self._check_table(job, attempt.entry)
        key, producer = job.caller.idempotency, job.request.producer
        if key is not None and key.key in attempt.keys:  # recorded twice, the transaction would fail for all
            attempt.twins.append(job)
            return
        if producer is not None:
            last = attempt.producers.get(producer.id)
            if last is not None and _is_repeat(job, last):
                attempt.repeats.append(job)
                return
            last = last or await self._last(job, attempt.entry, attempt.base)
            if last is not None and _is_repeat(job, last):
                job.land(self._repeated(job, last, attempt.entry, attempt.base))
                return
        made = await job.applying.apply(attempt.metadata)
        attempt.metadata = made.metadata
        attempt.made.append((job, made))
        if key is not None:
            attempt.keys.add(key.key)
        if producer is not None:
            attempt.producers[producer.id] = Last(producer.sequence, made.snapshot.snapshot_id)

    async def _check_table(self, job: _Job, entry: Entry) -> None:
        wanted = job.request.table_uuid or job.uuid
        if entry.uuid == job.uuid == wanted:
            return
        await self._check_not_done(job.request, wanted, entry.namespace, entry.name)
        raise Collision("table", f"The name leads to the table {entry.uuid} now, not to {wanted}")

    async def _check_not_done(
        self, request: ChangeRequest, uuid: str | None, namespace: NamespacePath, name: str
    ) -> None:
        """CommitUnknown (`moved_on`) for what its producer has committed to the table that it is for, which the name
        leads to no more: a refusal would make the client delete files that are live."""
        if request.producer is None or uuid is None:
            return
        state = await self._parts.store.producer(uuid, request.producer.id)
        if state is not None and request.producer.sequence <= state.sequence:
            raise moved_on(namespace, name)

    async def _last(self, job: _Job, entry: Entry, metadata: TableMetadata) -> Last | None:
        producer = job.request.producer
        if producer is None:
            return None
        return await last_of(self._parts.store, entry.uuid, producer.id, metadata, self._look_back)

    def _repeated(self, job: _Job, last: Last, entry: Entry, metadata: TableMetadata) -> CommitResult:
        """The first answer to what a producer has committed before."""
        producer = job.request.producer
        assert producer is not None
        snapshot_id = snapshot_of(producer.id, producer.sequence, last, metadata, self._look_back)
        committed = structs.replace(_committed(snapshot_id, metadata, entry.uuid), duplicate=True)
        return CommitResult(committed, entry.metadata_location)

    def _operations(self, job: _Job, made: Produced) -> list[Operation]:
        """What else happens in the transaction that publishes the change."""
        now_ms, snapshot_id = self._parts.clock.now_ms(), made.snapshot.snapshot_id
        operations: list[Operation] = []
        if job.request.producer is not None:
            producer = job.request.producer
            operations.append(AdvanceProducer(job.uuid, producer.id, producer.sequence, snapshot_id, now_ms))
        by_definition: dict[str, list[RegisteredIndexFile]] = {}
        for file in job.index_files:
            by_definition.setdefault(file.definition, []).append(structs.replace(file, snapshot_id=snapshot_id))
        operations += [
            ReplaceIndexFiles(job.uuid, definition, tuple(files), (), now_ms)
            for definition, files in by_definition.items()
        ]
        # Without the metadata's location, which is chosen later: who repeats it is told where the table is then.
        answer = encode_json(_committed(snapshot_id, made.metadata, job.uuid))
        return [*operations, *self._parts.remember(job.caller, status=200, body=answer)]

    async def _fail_taken(self, group: Sequence[_Job], error: IdempotencyTaken) -> None:
        """Those whose idempotency key another request was first with; the others go on."""
        now_ms = self._parts.clock.now_ms()
        for job in group:
            key = job.caller.idempotency
            if key is not None and await self._parts.store.idempotency(key.key, now_ms) is not None:
                job.fail(error)


def _fail(jobs: Sequence[_Job], error: BaseException) -> None:
    for job in jobs:
        job.fail(error)


def _is_repeat(job: _Job, last: Last) -> bool:
    producer = job.request.producer
    return producer is not None and producer.sequence <= last.sequence


def _committed(snapshot_id: int | None, metadata: TableMetadata, uuid: str) -> Committed:
    snapshot = None if snapshot_id is None else metadata.snapshot(snapshot_id)
    summary = {} if snapshot is None else snapshot.summary_map()
    return Committed(
        snapshot_id=snapshot_id,
        parent_snapshot_id=None if snapshot is None else snapshot.parent_snapshot_id,
        sequence_number=None if snapshot is None else snapshot.sequence_number,
        operation=summary.pop("operation", None),
        table_uuid=uuid,
        duplicate=False,
        summary=summary,
    )


@asynccontextmanager
async def open_commits(
    settings: Settings,
    store: PointerStore,
    objects: ObjectStore,
    clock: Clock,
    timeline: Timeline,
    catalog: Catalog,
    planner: Planner,
    told: CommitMetrics,
) -> AsyncIterator[Commits]:
    """Leaving it waits for what is under way."""
    parts = CatalogContext(
        settings=settings,
        store=store,
        objects=objects,
        warehouse=catalog.warehouse,
        clock=clock,
        documents=catalog.documents,
        timeline=timeline,
        pages=catalog.pages,
    )
    manifests = Manifests(
        objects, budget_bytes=settings.commit_memory_bytes, limit_bytes=settings.plan_manifest_limit_bytes
    )
    commits = Commits(parts, catalog, planner, manifests, told)
    try:
        yield commits
    finally:
        await commits.close()
