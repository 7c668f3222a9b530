"""A `StreamLog` with rows in Apache Kafka, which any number of replicas can use concurrently.

A shard is a partition. An append has two steps: it writes its rows to the partitions of their shards, and then a record
to the journal (`journal.py`), which determines the offsets of the rows. All waiting appends run both steps together.
Kafka replicates and stores the rows and the journal, so this module needs no consensus protocol.

- If the rows cannot be written, the append fails. Its rows are not part of the log, because no record of the journal
  refers to them.
- If it is unknown whether the record was written, the outcome of the append is unknown. The client repeats the append
  with the same sequence number.
- A replica that was paused applies the records that it has missed before it answers a request that depends on them.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import cast

import msgspec
import structlog
from msgspec import structs

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    CommitUnknown,
    LogUnavailable,
    OffsetOutOfRange,
    SeamarkError,
    StreamRemoved,
    TooLarge,
    TooManyRequests,
)
from seamark.metaserver.log.kafka.broker import Broker, NewRecord
from seamark.metaserver.log.kafka.journal import (
    AppendRequest,
    FenceRequest,
    JournalGroup,
    MoveGatesRequest,
    ReleaseRequest,
    RemoveRequest,
    Request,
    RowsEntry,
    StoredBatch,
    TrimRequest,
    choose_version,
    compute_bytes_max,
    decode_record,
    encode_group,
    encode_head,
)
from seamark.metaserver.log.kafka.journal_state import JournalReader, JournalState, Outcome
from seamark.metaserver.log.kafka.pieces import (
    RECORD_BYTES_MAX,
    build_record,
    count_records,
    find_batch_index,
    split_batch,
)
from seamark.metaserver.log.port import (
    Acknowledgement,
    Batch,
    GateMoved,
    Record,
    Shard,
    ShardState,
    StreamGate,
    StreamProducer,
    StreamProducerState,
    check_append,
    check_producer_name,
)
from seamark.metaserver.log.state import REMEMBERED_MS
from seamark.metaserver.log.waiting import Waiters

RunInThread = Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]]
_NO_LIMIT_OFFSET = 1 << 62
APPEND_SHARDS_MAX = 1000
"""The maximum number of shards of an append, so that a group fits into one record of the journal."""
TRIMMED_SHARDS_MAX = 4000
"""The maximum number of shards in a `TrimRequest`, so that it fits into one record of the journal."""
_log = structlog.get_logger("seamark.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaLimits:
    """The limits of a log in Kafka.

    Attributes:
        append_bytes_max: The maximum size of one append.
        waiting_bytes_max: The maximum total size of the waiting appends.
        group_bytes_max: The maximum size of a group of appends. A single append may be larger.
        groups_max: The maximum number of groups that are written concurrently.
        retention_ms: The age at which released rows are removed.
        retention_bytes: The total size above which the oldest released rows are removed earlier.
        batches_max: The maximum number of released batches, because their positions are in memory. The oldest are
            removed.
        producers_max: The maximum number of remembered producers.
        head_groups: The number of groups after which the state of the log is written to the journal.
        answer_timeout_s: The maximum time for which an append waits until its record of the journal is read back. Also
            the maximum time for which a reader waits until the journal is read up to its end.
        request_timeout_s: The maximum time of an append after its arrival.
        open_timeout_s: The maximum time for opening the log.
        trim_interval_s: The interval at which old rows are removed.
    """

    append_bytes_max: int = 64 << 20
    waiting_bytes_max: int = 256 << 20
    group_bytes_max: int = 16 << 20
    groups_max: int = 4
    retention_ms: int = 7 * 86_400_000
    retention_bytes: int = 64 << 30
    batches_max: int = 200_000
    producers_max: int = 50_000
    head_groups: int = 20_000
    answer_timeout_s: float = 30
    request_timeout_s: float = 120
    open_timeout_s: float = 60
    trim_interval_s: float = 60


@dataclass(slots=True)
class _QueuedRequest:
    """A waiting request. `batches` are the rows of an append, whose positions in Kafka are not known yet."""

    request: Request
    future: asyncio.Future[Outcome]
    batches: Mapping[Shard, Batch]
    size_bytes: int = 0
    is_taken: bool = False
    """Whether the request is in a group. If so, its rows may be stored."""

    @property
    def journal_bytes_max(self) -> int:
        """The maximum size of the request in the journal, so that a group fits into one record of Kafka."""
        return compute_bytes_max(self.request, {shard: count_records(batch) for shard, batch in self.batches.items()})


class KafkaLog:
    """A `StreamLog` in Kafka. An instance belongs to one event loop. Open it with `open_kafka_log`."""

    def __init__(self, broker: Broker, clock: Clock, limits: KafkaLimits, run_in_thread: RunInThread) -> None:
        self._run_in_thread = run_in_thread
        self._broker = broker
        self._clock = clock
        self._limits = limits
        self._writer = str(clock.uuid4())
        self._reader = JournalReader(0)
        self._journal = JournalState()
        self._requests: deque[_QueuedRequest] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(limits.groups_max)
        self._answers: dict[int, list[asyncio.Future[Outcome]]] = {}
        """The requests of the groups whose records were written, but not read back yet, by the number of the group."""
        self._next_group = 0
        self._waiters = Waiters(lambda shard: self._journal.state.read_watermark(shard))
        self._apply_waiters: list[tuple[int, asyncio.Future[None]]] = []
        """The tasks that wait until the journal is applied up to an offset."""
        self._query_lock = asyncio.Lock()
        self._query_count = self._answered_query = self._end = 0
        """The numbers of the last sent and of the last answered query for the end of the journal, and its result."""
        self._failed_query = 0
        self._query_error: SeamarkError | None = None
        """The number of the last failed query, and its error."""
        self._deleted_offsets: dict[Shard, int] = {}
        """Kafka's offset of each shard up to which this replica has deleted records."""
        self._dropped_streams: set[str] = set()
        """The streams whose topics this replica has deleted."""
        self._failure: str | None = None
        self.groups = 0
        """The number of written groups, which is a metric."""

    @property
    def identity(self) -> str:
        return self._broker.identity

    # -- the journal -------------------------------------------------------------------------------------------------

    def receive(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Apply the next records of the journal, and answer the requests of this replica."""
        if self._failure is not None:
            return
        try:
            for offset, data in records:
                record = decode_record(data)
                outcomes = self._reader.apply(offset, record)
                if isinstance(record, JournalGroup) and record.writer == self._writer:
                    self._answer(record.number, outcomes)
        except Exception as error:  # noqa: BLE001  no caller may wait for a state that no longer changes
            self._fail(error)
            return
        # After `restart`, a new reader builds its state from a later record. Until it is as recent as the earlier
        # state, continue with the earlier state.
        if self._reader.is_recovered and self._reader.journal.applied >= self._journal.applied:
            self._journal = self._reader.journal
            self._waiters.wake_all()
            self._wake_apply_waiters(self._journal.applied)

    def restart(self, start: int) -> None:
        """Continue at a later record, because records were deleted while this replica was paused."""
        self._reader = JournalReader(start)
        for number in list(self._answers):
            self._answer(number, None)  # The outcomes of deleted requests are not known.

    def _answer(self, number: int, outcomes: Sequence[Outcome] | None) -> None:
        futures = self._answers.pop(number, [])
        for index, future in enumerate(futures):
            if future.done():
                continue
            if not outcomes:
                future.set_exception(_make_unknown_error())
            elif isinstance(outcome := outcomes[index], SeamarkError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _wake_apply_waiters(self, applied_offset: int) -> None:
        for end, future in self._apply_waiters:
            if end <= applied_offset and not future.done():
                future.set_result(None)
        self._apply_waiters = [(end, future) for end, future in self._apply_waiters if not future.done()]

    def _fail(self, error: Exception) -> None:
        message = error.message if isinstance(error, SeamarkError) else "The log has failed unexpectedly"
        self._failure = f"{message}. Restart the server after the cause is removed"
        _log.error("log failed", error=str(error), exc_info=not isinstance(error, SeamarkError))
        for number in list(self._answers):
            self._answer(number, None)
        self._refuse_waiting()
        self._waiters.close()
        self._wake_apply_waiters(_NO_LIMIT_OFFSET)

    async def catch_up(self) -> None:
        self._check_open()
        timeout_s = self._limits.answer_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_applied(await self._find_journal_end())
        except TimeoutError:
            raise _make_unread_error(timeout_s) from None
        self._check_open()

    async def _find_journal_end(self) -> int:
        """Return the end of the journal at a time after the start of the call.

        Concurrent calls share a query to Kafka. They also share its error, so that they do not send failing queries one
        after another.
        """
        query_number = self._query_count
        async with self._query_lock:
            if self._answered_query > query_number:  # A query that began after this call was answered.
                return self._end
            if self._query_error is not None and self._failed_query > query_number:
                raise self._query_error
            number = self._query_count = self._query_count + 1
            try:
                self._end = (await self._broker.read_journal_range()).end
            except SeamarkError as error:
                self._failed_query, self._query_error = number, error
                raise
            self._answered_query = number
            return self._end

    async def _wait_applied(self, end: int) -> None:
        """Wait until the journal is applied up to the offset `end`, or the log fails."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._apply_waiters.append((end, future))
        self._wake_apply_waiters(self._journal.applied)
        await future

    # -- appending ---------------------------------------------------------------------------------------------------

    async def append(
        self,
        batches: Mapping[Shard, Batch],
        producer: StreamProducer | None = None,
        gates: Mapping[str, int] | None = None,
    ) -> Acknowledgement:
        check_append(batches, producer, limit_bytes=self._limits.append_bytes_max)
        if len(batches) > APPEND_SHARDS_MAX:
            raise TooLarge(f"An append has at most {APPEND_SHARDS_MAX} shards, not {len(batches)}; send fewer rows")
        self._check_open()
        state = self._journal.state
        for shard in batches:
            if shard.stream in state.removed:
                raise StreamRemoved(f"The stream {shard.stream} was removed with its table; load the table again")
        if producer is not None:
            # A retry can be answered now, without writing its rows again. Everything else is certain only after the
            # journal contains it.
            previous = state.producers.get(producer.name)
            if previous is None:
                state.check_producer_room(producer.name, limit=self._limits.producers_max)
            elif producer.epoch == previous.epoch and producer.sequence <= previous.sequence:
                repeats = (
                    append.make_acknowledgement() for append in previous.appends if append.sequence == producer.sequence
                )
                return next(repeats, Acknowledgement((), duplicate=True))
        numbers = gates or {}
        if any(self._journal.read_gate(shard.stream).number > numbers.get(shard.stream, 0) for shard in batches):
            raise GateMoved("A commit has changed how rows of the stream table are written; send the rows again")
        await self._broker.create_partitions(batches)
        size_bytes = sum(batch.size_bytes for batch in batches.values())
        if self._requests and self._waiting_bytes + size_bytes > self._limits.waiting_bytes_max:
            raise TooManyRequests(
                f"{self._waiting_bytes} bytes of rows wait for Kafka, at most {self._limits.waiting_bytes_max}; send "
                "rows more slowly"
            )
        producer_values = (
            (producer.name, producer.sequence, producer.epoch, producer.sparse) if producer is not None else ()
        )
        moved_gates = tuple((stream, number) for stream, number in numbers.items() if number)
        request = structs.replace(AppendRequest((), *producer_values), gates=moved_gates)
        answer = await self._request(request, dict(batches), size_bytes)
        return cast(Acknowledgement, answer)

    def read_gates(self, streams: Iterable[str]) -> dict[str, StreamGate]:
        self._check_open()
        return {stream: self._journal.read_gate(stream) for stream in streams}

    def list_gates(self) -> Collection[str]:
        self._check_open()
        return self._journal.list_gates()

    async def move_gates(self, numbers: Mapping[str, int], *, is_closed: bool) -> None:
        await self._request(MoveGatesRequest(tuple(numbers.items()), is_closed))

    async def fence(self, name: str) -> StreamProducerState:
        check_producer_name(name)
        self._check_open()
        if name not in self._journal.state.producers:
            self._journal.state.check_producer_room(name, limit=self._limits.producers_max)
        return cast(StreamProducerState, await self._request(FenceRequest(name)))

    async def remove(self, stream: str) -> None:
        await self._request(RemoveRequest(stream))
        await self._broker.delete_stream(stream)

    async def release(self, offsets: Mapping[Shard, int]) -> None:
        self._check_open()
        shards = self._journal.state.shards
        moved_offsets = tuple(
            (shard.stream, shard.number, offset)
            for shard, offset in offsets.items()
            if shard in shards and shards[shard].released < min(offset, shards[shard].watermark)
        )
        if moved_offsets:
            await self._request(ReleaseRequest(moved_offsets))

    async def _request(
        self, request: Request, batches: Mapping[Shard, Batch] | None = None, size_bytes: int = 0
    ) -> Outcome:
        self._check_open()
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        waiting_request = _QueuedRequest(request, future, batches or {}, size_bytes)
        self._requests.append(waiting_request)
        self._waiting_bytes += size_bytes
        self._wake.set()
        timeout_s = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            if waiting_request.is_taken:
                raise _make_unknown_error() from None
            raise LogUnavailable(
                f"The rows have waited {timeout_s:g} s for Kafka, and nothing of the request is stored; send it again "
                "later"
            ) from None

    async def run(self) -> None:
        """Write groups until the log is closed or fails."""
        try:
            await self._write_groups()
        except Exception as error:  # noqa: BLE001  no caller may wait for a task that has ended
            self._fail(error)

    async def _write_groups(self) -> None:
        previous_started = asyncio.Event()  # Each group waits for the previous group, so that they keep their order.
        previous_started.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._requests and self._failure is None:
                await self._slots.acquire()
                await asyncio.sleep(0)  # Ready tasks can add their appends to this group.
                group = self._take_group()
                if not group:  # All requests were cancelled.
                    self._slots.release()
                    continue
                started = asyncio.Event()
                task = asyncio.create_task(self._write_group(group, previous_started, started), name="log-group")
                self._groups.add(task)
                task.add_done_callback(partial(self._end_group, group, started))
                previous_started = started

    def _take_group(self) -> list[_QueuedRequest]:
        group: list[_QueuedRequest] = []
        size_bytes = journal_bytes = 0
        while self._requests:
            request = self._requests[0]
            size_bytes += request.size_bytes
            journal_bytes += request.journal_bytes_max
            if group and (size_bytes > self._limits.group_bytes_max or journal_bytes > RECORD_BYTES_MAX):
                break
            self._requests.popleft()
            self._waiting_bytes -= request.size_bytes
            if not request.future.done():  # Leave out cancelled requests.
                request.is_taken = True
                group.append(request)
        return group

    def _end_group(self, group: Sequence[_QueuedRequest], started: asyncio.Event, task: asyncio.Task[None]) -> None:
        """End a group, even if it was cancelled before it began, so that the next groups can continue."""
        self._groups.discard(task)
        started.set()
        self._slots.release()
        _fail_futures([waiting_request.future for waiting_request in group], _make_unknown_error())

    async def _write_group(self, group: list[_QueuedRequest], previous: asyncio.Event, started: asyncio.Event) -> None:
        """Write the rows of a group, then its record of the journal.

        Args:
            group: The requests.
            previous: Set after the previous group has started writing its record, or has failed.
            started: Set after this group has started writing its record, or has failed.
        """
        futures = [waiting_request.future for waiting_request in group]
        try:
            requests, futures = await self._write_rows(group)
            await previous.wait()
            if not requests:  # All appends were refused.
                return
            number = self._next_group
            self._next_group += 1
            version = choose_version(requests)
            record = JournalGroup(version, self._writer, number, self._clock.now_ms(), tuple(requests))
            journal_write = self._broker.write_journal(encode_group(record))
            self._answers[number] = futures
            started.set()
            try:
                async with asyncio.timeout(self._limits.answer_timeout_s):
                    await journal_write
                    await asyncio.wait(futures)  # Unlike `gather`, it does not cancel the futures at the timeout.
                self.groups += 1
            finally:
                self._answer(number, None)
        except SeamarkError as error:
            _fail_futures(futures, error)
        except TimeoutError:
            pass  # `_answer` has failed the futures, because it is unknown whether the record is stored.
        except Exception:  # noqa: BLE001  `_end_group` refuses its requests
            _log.exception("a group of the log failed")

    async def _write_rows(self, group: list[_QueuedRequest]) -> tuple[list[Request], list[asyncio.Future[Outcome]]]:
        """Write the rows of a group.

        An append whose rows cannot be written is refused, without affecting the other requests.

        Returns:
            The remaining requests with their positions in Kafka, and the futures of these requests.
        """
        records = [
            NewRecord(shard, piece)
            for waiting_request in group
            for shard, batch in waiting_request.batches.items()
            for piece in split_batch(batch)
        ]
        results = iter(await self._broker.write(records) if records else ())
        requests: list[Request] = []
        futures: list[asyncio.Future[Outcome]] = []
        for waiting_request in group:
            request = waiting_request.request
            if isinstance(request, AppendRequest):
                entries: list[RowsEntry] = []
                errors: list[LogUnavailable] = []
                for shard, batch in waiting_request.batches.items():
                    outcomes = list(islice(results, count_records(batch)))
                    errors += [outcome for outcome in outcomes if isinstance(outcome, LogUnavailable)]
                    offsets = tuple(outcome for outcome in outcomes if isinstance(outcome, int))
                    sizes = batch.rows, len(batch.payload), len(batch.kinds)
                    entries.append(RowsEntry(shard.stream, shard.number, *sizes, offsets))
                if errors:
                    _fail_futures([waiting_request.future], errors[0])
                    continue
                request = structs.replace(request, batches=tuple(entries))
            requests.append(request)
            futures.append(waiting_request.future)
        return requests, futures

    def _refuse_waiting(self) -> None:
        while self._requests:
            _fail_futures([self._requests.popleft().future], LogUnavailable(self._failure or ""))
        self._waiting_bytes = 0

    # -- reading -----------------------------------------------------------------------------------------------------

    def find_producer(self, name: str) -> StreamProducerState | None:
        self._check_open()
        return self._journal.state.find_producer(name)

    def read_watermarks(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        self._check_open()
        return self._journal.state.read_watermarks(shards)

    async def read(self, shard: Shard, offset: int, *, limit_bytes: int, end: int | None = None) -> Sequence[Record]:
        self._check_open()
        self._journal.state.check_readable(shard, offset)
        chosen_batches: list[StoredBatch] = []
        size_bytes = 0
        batches = self._journal.list_batches(shard)
        for index in range(find_batch_index(batches, offset), len(batches)):
            batch = batches[index]
            size_bytes += batch.size_bytes
            if (end is not None and batch.offset >= end) or (chosen_batches and size_bytes > limit_bytes):
                break
            chosen_batches.append(batch)
        if not chosen_batches:
            return []
        try:
            values = await self._broker.read(shard, [record for batch in chosen_batches for record in batch.records])
        except OffsetOutOfRange:
            await self.catch_up()  # Another replica has removed rows. Apply its record of the journal.
            self._journal.state.check_readable(shard, offset)
            raise
        return [build_record(shard, batch, values) for batch in chosen_batches]

    async def wait(self, positions: Mapping[Shard, int], timeout_s: float) -> bool:
        self._check_open()
        is_reached = await self._waiters.wait(positions, timeout_s)
        self._check_open()
        return is_reached

    async def find_offset(self, shard: Shard, time_ms: int) -> int:
        self._check_open()
        batches = self._journal.list_batches(shard)
        index = bisect.bisect_left(batches, time_ms, key=lambda batch: batch.time_ms)
        return batches[index].offset if index < len(batches) else self._journal.state.read_watermark(shard)

    def list_shards(self, stream: str | None = None) -> dict[Shard, ShardState]:
        self._check_open()
        return self._journal.state.list_shard_states(stream)

    def count_unreleased_bytes(self, stream: str) -> int:
        return self._journal.count_unreleased_bytes(stream)

    # -- retention ---------------------------------------------------------------------------------------------------

    async def maintain(self) -> None:
        """Remove old rows, and write heads, the states from which replicas start, until the task is cancelled."""
        while True:
            await asyncio.sleep(self._limits.trim_interval_s)
            try:
                await self.trim()
                if self._journal.groups >= self._limits.head_groups:
                    await self.write_head()
            except SeamarkError as error:  # The next run tries again.
                _log.warning("log maintenance failed", error=error.message)
            except Exception:  # noqa: BLE001  a bug must not stop the retention permanently
                _log.exception("log maintenance failed unexpectedly")

    async def trim(self) -> None:
        """Remove released rows after their retention, forget old producers, and delete topics of removed streams."""
        self._check_open()
        limits, now_ms = self._limits, self._clock.now_ms()
        starts = self._journal.choose_starts(
            oldest_ms=now_ms - limits.retention_ms,
            batches_max=limits.batches_max,
            bytes_max=limits.retention_bytes,
        )
        # A TrimRequest also makes the replicas forget old producers, so send one from time to time without rows.
        if starts or now_ms - self._journal.trimmed_ms >= REMEMBERED_MS:
            await self._request(TrimRequest(tuple(starts[:TRIMMED_SHARDS_MAX]), limits.retention_ms))
        # The state of the journal no longer contains the records before these offsets. Delete each record only once.
        first_records = {
            shard: record
            for shard, record in self._journal.get_deletable_offsets().items()
            if self._deleted_offsets.get(shard, 0) < record
        }
        if first_records:
            await self._broker.delete_records(first_records)
            self._deleted_offsets.update(first_records)
        for stream in self._journal.state.removed.keys() - self._dropped_streams:
            await self._broker.delete_stream(stream)
            self._dropped_streams.add(stream)

    async def write_head(self) -> None:
        """Write a head, the state of the log, to the journal, and delete the records that it replaces."""
        self._check_open()
        journal = self._journal
        head, after = journal.summarize(), journal.applied
        pieces = await self._run_in_thread(partial(encode_head, head, str(self._clock.uuid4()), after))
        for piece in pieces:
            await self._broker.write_journal(piece)
        await self._broker.delete_journal(after)  # Last, so that a crash leaves the records or the complete head.

    # -- opening and closing -----------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Read the journal up to its current end.

        Raises:
            LogUnavailable: Kafka does not answer, or the journal contains no complete state.
        """
        start, end = await self._broker.read_journal_range()
        self._reader = JournalReader(start)
        self._broker.follow_journal(start, self)
        timeout_s = self._limits.open_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_applied(end)
        except TimeoutError:
            raise _make_unread_error(timeout_s) from None
        self._check_open()

    def close(self) -> None:
        """Refuse all later calls."""
        self._failure = self._failure or "The log is closed, because the server stops; retry later"
        self._refuse_waiting()
        self._waiters.close()
        self._wake_apply_waiters(_NO_LIMIT_OFFSET)

    def cancel_groups(self) -> list[asyncio.Task[None]]:
        """Cancel the running groups, and return their tasks."""
        for task in self._groups:
            task.cancel()
        return list(self._groups)

    def check_invariants(self) -> None:
        """Check the conditions that are true after every step. Only tests call this method."""
        self._journal.check_invariants()

    def take_snapshot(self) -> tuple[int, bytes]:
        """Return the offset of the next record of the journal and the encoded state. Only tests call this method."""
        return self._journal.applied, msgspec.msgpack.encode(self._journal.summarize())

    def _check_open(self) -> None:
        if self._failure is not None:
            raise LogUnavailable(self._failure)


def _make_unread_error(timeout_s: float) -> LogUnavailable:
    return LogUnavailable(f"The journal of the log in Kafka was not read within {timeout_s:g} s; retry later")


def _make_unknown_error() -> CommitUnknown:
    return CommitUnknown(
        "Kafka did not answer while it stored the rows: they may be stored or not. Repeat the request with the same "
        "sequence number"
    )


def _fail_futures(futures: Sequence[asyncio.Future[Outcome]], error: SeamarkError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


@asynccontextmanager
async def open_log_over(
    broker: Broker,
    clock: Clock,
    limits: KafkaLimits,
    *,
    run_in_thread: RunInThread = asyncio.to_thread,
    maintains: bool = True,
) -> AsyncIterator[KafkaLog]:
    """Open a log in a cluster.

    Args:
        broker: The cluster.
        clock: The clock for times of records and for timeouts.
        limits: The maximum sizes, times and numbers of the log.
        run_in_thread: Runs the encoding of heads (stored states of the log) in a thread. Tests replace it.
        maintains: Whether this process removes old rows, and writes heads.

    Raises:
        LogUnavailable: Kafka does not answer.
    """
    log = KafkaLog(broker, clock, limits, run_in_thread)
    tasks: list[asyncio.Task[None]] = []
    try:
        await log.recover()
        tasks.append(asyncio.create_task(log.run(), name="log-writer"))
        if maintains:
            tasks.append(asyncio.create_task(log.maintain(), name="log-maintenance"))
        yield log
    finally:
        log.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *log.cancel_groups(), return_exceptions=True)
