"""The embedded log: segment files on the local disk of one server.

All shards of all streams share one sequence of segments, so that many small tables do not need many syncs. One task
forms groups: all waiting appends become durable together with one write and one sync. Appends that arrive during the
sync form the next group.

- If the disk is full, the log refuses appends immediately, and stores nothing of them. It works again when there is
  space.
- After any other failed write, the state of the disk is unknown. The log refuses all calls until it is opened again,
  and the outcome of the group's appends is unknown.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, cast

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    CommitUnknown,
    Corrupt,
    LogFull,
    LogUnavailable,
    SeamarkError,
    TooManyRequests,
)
from seamark.metaserver.log.compaction import is_worth_rewriting, list_unreleased_offsets, rewrite_segment
from seamark.metaserver.log.files import FolderFiles, LogFiles, sync_folder
from seamark.metaserver.log.frames import HEADER_BYTES, encode_meta, list_payloads, measure_frame
from seamark.metaserver.log.index import ShardIndex
from seamark.metaserver.log.port import (
    Acknowledgement,
    Batch,
    Record,
    Shard,
    ShardState,
    StreamProducer,
    StreamProducerState,
    check_append,
    check_producer_name,
)
from seamark.metaserver.log.recovery import FULL, RecoveredLog, create_segment_file, recover_log
from seamark.metaserver.log.segment import LogSegment, find_segment, make_index_name, select_segments_from
from seamark.metaserver.log.state import AppendEntry, Group, LogState
from seamark.metaserver.log.waiting import Waiters
from seamark.metaserver.log.writer import SegmentWriter

_LOADED_INDEXES_MAX = 256
"""The maximum number of shard indexes from index files that are kept in memory."""
_IDENTITY_FILE = "identity"
READER_THREADS = 4
"""The number of threads that read."""

T = TypeVar("T")
Answer = Acknowledgement | StreamProducerState | None
_log = structlog.get_logger("seamark.log")


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentLimits:
    """The limits of a log on the local disk.

    Attributes:
        segment_bytes: The size of a segment at which the next segment begins.
        append_bytes_max: The maximum size of one append.
        waiting_bytes_max: The maximum total size of the waiting appends.
        group_bytes_max: The maximum size of a group of appends. A single append may be larger.
        retention_ms: The age at which released rows are removed.
        retention_bytes: The size of all segments above which the oldest released rows are removed earlier.
        drops_unreleased: Whether retention also removes rows that are in no data file.
        producers_max: The maximum number of remembered producers.
        trim_interval_s: The interval at which old segments are removed.
    """

    segment_bytes: int = 64 << 20
    append_bytes_max: int = 64 << 20
    waiting_bytes_max: int = 256 << 20
    group_bytes_max: int = 16 << 20
    retention_ms: int = 7 * 86_400_000
    retention_bytes: int = 64 << 30
    drops_unreleased: bool = False
    producers_max: int = 50_000
    trim_interval_s: float = 60


class DiskRunner(Protocol):
    """Runs blocking work on the disk."""

    def write(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run work of the writer. The calls run one after another, in their order."""

    def read(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run work of a reader, concurrently with the writer."""


class ThreadRunner:
    """Runs blocking work in threads: one thread for the writer, and several threads for readers."""

    def __init__(self, readers: int) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="log-writer")
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="log-reader")

    def write(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._writer, work)

    def read(self, work: Callable[[], T]) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._readers, work)

    def close(self) -> None:
        """End the threads."""
        self._writer.shutdown()
        self._readers.shutdown()


@dataclass(slots=True)
class _Request:
    """A waiting call, such as an append.

    Attributes:
        admit: Adds the call to a group, the calls that become durable together, and returns its answer.
        batches: The rows of an append, or none.
        size_bytes: The size of the rows.
        future: Receives the answer when the group is durable.
    """

    admit: Callable[[Group], Answer]
    batches: Sequence[Batch]
    size_bytes: int
    future: asyncio.Future[Answer]


class SegmentLog:
    """A `StreamLog` in segment files. `open_segment_log` opens it."""

    def __init__(
        self,
        files: LogFiles,
        runner: DiskRunner,
        clock: Clock,
        limits: SegmentLimits,
        recovered_log: RecoveredLog,
        identity: str,
    ) -> None:
        self._files = files
        self._runner = runner
        self._clock = clock
        self._limits = limits
        self._state = recovered_log.state
        self._segments = recovered_log.segments
        active = recovered_log.segments[-1]
        self._writer = SegmentWriter(active.number, recovered_log.file, active.size_bytes)
        self._requests: deque[_Request] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._wake_maintenance = asyncio.Event()
        self._maintenance_lock = asyncio.Lock()
        self._waiters = Waiters(self._state.read_watermark)
        self._loaded: OrderedDict[tuple[LogSegment, Shard], ShardIndex] = OrderedDict()
        self._failure: str | None = None
        self._is_closing = False
        self.identity = identity
        self.syncs = 0
        """The number of written groups, which is a metric."""

    async def catch_up(self) -> None:
        self._check_open()  # The watermarks are current, because no other process appends.

    # -- appending ---------------------------------------------------------------------------------------------------

    async def append(self, batches: Mapping[Shard, Batch], producer: StreamProducer | None = None) -> Acknowledgement:
        check_append(batches, producer, limit_bytes=self._limits.append_bytes_max)
        size_bytes = sum(batch.size_bytes for batch in batches.values())
        if self._requests and self._waiting_bytes + size_bytes > self._limits.waiting_bytes_max:
            raise TooManyRequests(
                f"{self._waiting_bytes} bytes of rows wait for the disk of the log, at most "
                f"{self._limits.waiting_bytes_max}; send rows more slowly"
            )
        answer = await self._request(lambda group: group.append(batches, producer), tuple(batches.values()), size_bytes)
        return cast(Acknowledgement, answer)

    async def fence(self, name: str) -> StreamProducerState:
        check_producer_name(name)
        return cast(StreamProducerState, await self._request(lambda group: group.fence(name)))

    async def remove(self, stream: str) -> None:
        await self._request(lambda group: group.remove(stream))

    async def _request(
        self, admit: Callable[[Group], Answer], batches: Sequence[Batch] = (), size_bytes: int = 0
    ) -> Answer:
        self._check_open()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.append(_Request(admit, batches, size_bytes, future))
        self._waiting_bytes += size_bytes
        self._wake.set()
        return await future

    async def run(self) -> None:
        """Write groups until the log is closed or fails. No other task changes the state."""
        try:
            while not self._is_closing:
                await self._wake.wait()
                self._wake.clear()
                if not self._is_closing:  # Ready tasks can add their appends to this group.
                    await asyncio.sleep(0)
                while self._requests and self._failure is None:
                    await self._write_group()
        except Exception:  # noqa: BLE001  no caller may wait for a task that has ended
            self._failure = "The log has failed unexpectedly; restart the server"
            _log.exception("log failed")
        finally:
            if self._failure is None:
                self._failure = "The log is closed, because the server stops; retry later"
            self._refuse_waiting()
            self._waiters.close()

    async def _write_group(self) -> None:
        group = Group(self._state, self._clock.now_ms())
        answers: list[tuple[asyncio.Future[Answer], Answer]] = []
        frames: list[tuple[bytes, Sequence[bytes]]] = []
        size_bytes = 0
        while self._requests and (not frames or size_bytes < self._limits.group_bytes_max):
            request = self._requests.popleft()
            self._waiting_bytes -= request.size_bytes
            if request.future.done():  # Skip a cancelled request.
                continue
            entry_count = len(group.entries)
            try:
                answers.append((request.future, request.admit(group)))
            except SeamarkError as error:
                request.future.set_exception(error)
                continue
            if len(group.entries) > entry_count:  # A repeated request adds no entry.
                meta, payloads = encode_meta(group.entries[-1]), list_payloads(request.batches)
                frames.append((meta, payloads))
                size_bytes += measure_frame(meta, payloads)
        try:
            if frames and not await self._store(group, frames, size_bytes, answers):
                return
        except BaseException:
            for future, _ in answers:
                if not future.done():
                    future.set_exception(CommitUnknown("The log ended while it stored the rows; repeat the request"))
            raise
        for future, answer in answers:
            if not future.done():
                future.set_result(answer)

    async def _store(
        self,
        group: Group,
        frames: list[tuple[bytes, Sequence[bytes]]],
        size_bytes: int,
        answers: list[tuple[asyncio.Future[Answer], Answer]],
    ) -> bool:
        """Make a group durable, and apply it. If this fails, refuse its requests, and return False."""
        try:
            if self._is_too_small(size_bytes) or self._is_too_old():
                await self._begin_segment(size_bytes)
            places = await self._runner.write(partial(self._writer.write, frames))
        except (OSError, LogFull) as error:
            refusal = error if isinstance(error, LogFull) else self._fail(error)
            for future, _ in answers:
                if not future.done():
                    future.set_exception(refusal)
            return False
        self.syncs += 1
        active = self._segments[-1]
        active.size_bytes = self._writer.position
        assert active.index is not None
        group.apply()
        for entry, place in zip(group.entries, places, strict=True):
            if isinstance(entry, AppendEntry):
                active.index.add(entry, place)
                self._waiters.wake(batch.shard for batch in entry.batches)
        return True

    def _fail(self, error: OSError) -> CommitUnknown:
        """Mark the log as failed, so that it refuses all later calls. Return the error for the running appends."""
        self._failure = (
            f"The disk of the log failed ({error.strerror}), and it is unknown what is durable; restart the server "
            "when the disk works"
        )
        _log.error("log failed", error=str(error))
        self._refuse_waiting()
        self._waiters.close()
        return CommitUnknown(
            f"The disk of the log failed while it stored the rows ({error.strerror}): they may be stored or not. "
            "Repeat the request with the same sequence number when the log works again"
        )

    def _refuse_waiting(self) -> None:
        while self._requests:
            request = self._requests.popleft()
            if not request.future.done():
                request.future.set_exception(LogUnavailable(self._failure or ""))
        self._waiting_bytes = 0

    # -- segments ----------------------------------------------------------------------------------------------------

    def _is_too_small(self, size_bytes: int) -> bool:
        """Return whether the active segment has entries, and no space for `size_bytes` more.

        A segment without entries accepts a group of any size, because a new segment would not have more space.
        """
        end = self._writer.position + size_bytes + HEADER_BYTES  # A mark, which has only a header, follows the entries.
        return end > self._limits.segment_bytes and self._segments[-1].has_entries

    def _is_too_old(self) -> bool:
        """Return whether the first rows of the active segment have half of the age at which rows are removed.

        Retention removes only complete segments, so the next segment begins early enough.
        """
        index = self._segments[-1].index
        first_ms = index.first_time_ms if index is not None else 0
        return bool(first_ms) and self._clock.now_ms() - first_ms > self._limits.retention_ms // 2

    async def _begin_segment(self, size_bytes: int) -> None:
        """Continue in a new segment. If the disk is full, raise LogFull, and keep the active segment.

        Args:
            size_bytes: The size of the next group of appends, for which the segment must have space.
        """
        self._state.forget(self._clock.now_ms(), self._segments[0].head_time_ms)
        head, time_ms = encode_meta(self._state.summarize()), self._state.time_ms
        number = self._writer.number + 1
        # Also reserve space for the headers and the padding of the first frames, and for the mark: a frame after the
        # group which shows that the frames before it are durable.
        reserve_bytes = max(self._limits.segment_bytes, len(head) + size_bytes + 4 * HEADER_BYTES)
        previous_writer = self._writer
        try:
            segment = await self._runner.write(
                partial(create_segment_file, self._files, number, head, time_ms, segment_bytes=reserve_bytes)
            )
            file = await self._runner.write(partial(self._files.open, segment.name))
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise LogFull(
                "The disk of the log is full, and no row of the request was stored; make room, then retry"
            ) from error
        self._writer = SegmentWriter(number, file, segment.size_bytes)
        self._segments[-1].size_bytes = previous_writer.durable_position
        self._segments.append(segment)
        await self._runner.write(previous_writer.finish)
        self._wake_maintenance.set()

    async def maintain(self) -> None:
        """Store the indexes of complete segments, and remove old segments, until the task is cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.trim_interval_s):
                    await self._wake_maintenance.wait()
            self._wake_maintenance.clear()
            try:
                await self.store_indexes()
                await self.trim()
            except OSError as error:  # The segments have not changed, and the next run tries again.
                _log.warning("log maintenance failed", error=str(error))
            except Corrupt as error:  # Retention cannot pass this segment until an operator restores its file.
                _log.error("log has a damaged segment", error=error.message)
            except Exception:  # noqa: BLE001  a bug must not stop the retention permanently
                _log.exception("log maintenance failed unexpectedly")

    async def store_indexes(self) -> None:
        """Write the missing index files of complete segments.

        Raises:
            OSError: The disk is full or fails. The log works without the index files.
        """
        async with self._maintenance_lock:
            for segment in self._segments[:-1]:
                if segment.index is not None:
                    await self._runner.read(partial(segment.store_index, self._files))
                    segment.use_index_file(await self._runner.read(partial(segment.load_index_header, self._files)))

    async def trim(self) -> int:
        """Remove the oldest segments after their retention, and return the number of removed segments.

        Segments are removed up to the first segment with rows that are in no data file yet. That segment and the later
        segments are rewritten without their rows that are already in data files. If `SegmentLimits.drops_unreleased` is
        true, old segments are always removed.

        Raises:
            OSError: The disk fails.
        """
        async with self._maintenance_lock:
            return await self._trim()

    async def _trim(self) -> int:
        """Remove and rewrite the oldest segments, as `trim` describes, and return the number of removed segments.

        The caller has the maintenance lock.
        """
        oldest_ms = self._clock.now_ms() - self._limits.retention_ms
        # Use the released offsets of one moment for all segments. Otherwise a later segment could lose rows of a shard
        # while an earlier segment still has rows of it.
        released_offsets = self._state.get_released_offsets()
        size_bytes = self.size_bytes
        removed_segments: list[LogSegment] = []
        for segment in self._segments[:-1]:
            is_kept = segment.find_last_time_ms() >= oldest_ms and size_bytes <= self._limits.retention_bytes
            if is_kept or not (self._limits.drops_unreleased or segment.is_released(released_offsets)):
                break
            size_bytes -= segment.size_bytes
            removed_segments.append(segment)
        for segment in removed_segments:
            self._move_starts(segment, {})
            self._subtract_bytes(segment, None)
            segment.is_gone = True
        del self._segments[: len(removed_segments)]
        # Remove these files before later segments are rewritten, so that even after a crash, no rows of a shard are
        # missing between two segments.
        if removed_segments:
            names = [name for segment in removed_segments for name in (segment.name, make_index_name(segment.number))]
            await self._runner.read(partial(self._files.remove, names))
        # Segments with unreleased rows remain. Rewrite those that are old enough, or until the log is small enough.
        for index, segment in enumerate(self._segments[:-1]):
            is_kept = segment.find_last_time_ms() >= oldest_ms and size_bytes <= self._limits.retention_bytes
            if is_kept or not await self._rewrite(segment, released_offsets):
                break
            size_bytes -= segment.size_bytes - self._segments[index].size_bytes
        return len(removed_segments)

    async def _rewrite(self, segment: LogSegment, released_offsets: Mapping[Shard, int]) -> bool:
        """Rewrite a segment with only its unreleased rows. Return False if it still contains released rows.

        A segment that contains only unreleased rows remains unchanged, and the result is True. A segment that would
        lose less than half of its bytes remains unchanged as well, and the result is False.
        """
        unreleased_offsets = list_unreleased_offsets(segment, released_offsets)
        if all(
            shard in unreleased_offsets and (segment.get_first_offset(shard) or 0) >= unreleased_offsets[shard]
            for shard in segment.list_shards()
        ):
            return True
        if not is_worth_rewriting(segment, unreleased_offsets):
            return False
        self._move_starts(segment, unreleased_offsets)
        replacement = await self._runner.read(partial(rewrite_segment, self._files, segment, unreleased_offsets))
        self._segments[self._segments.index(segment)] = replacement
        segment.is_gone = True
        self._subtract_bytes(segment, replacement)
        return True

    def _move_starts(self, segment: LogSegment, released_offsets: Mapping[Shard, int]) -> None:
        """Make the rows of a segment below `released_offsets` unreadable, before they are removed."""
        for shard in segment.list_shards():
            summary = self._state.shards.get(shard)
            if summary is not None:
                summary.start = max(summary.start, released_offsets.get(shard, segment.get_end(shard) or 0))

    def _subtract_bytes(self, segment: LogSegment, replacement: LogSegment | None) -> None:
        """Subtract the bytes of removed rows from the sizes of shards, after a segment was replaced or removed."""
        for shard in segment.list_shards():
            summary = self._state.shards.get(shard)
            if summary is not None:
                remaining_bytes = replacement.measure_bytes(shard) if replacement is not None else 0
                summary.size_bytes -= segment.measure_bytes(shard) - remaining_bytes

    # -- reading -----------------------------------------------------------------------------------------------------

    def find_producer(self, name: str) -> StreamProducerState | None:
        self._check_open()
        return self._state.find_producer(name)

    def read_watermarks(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        self._check_open()
        return self._state.read_watermarks(shards)

    async def read(self, shard: Shard, offset: int, *, limit_bytes: int, end: int | None = None) -> Sequence[Record]:
        self._check_open()
        self._state.check_readable(shard, offset)
        segment = find_segment(self._segments, shard, offset)
        if segment is None or (end is not None and offset >= end):
            return []
        try:
            index = await self._load_index(segment, shard)
            places = index.find_frames(offset, limit_bytes=limit_bytes, end=end)
            records = await self._runner.read(partial(segment.read_records, self._files, shard, places, offset))
        except (Corrupt, OSError) as error:
            # Retention may be removing or rewriting the segment. Wait until it has finished and set `is_gone`.
            async with self._maintenance_lock:
                pass
            if not segment.is_gone:
                if isinstance(error, Corrupt):
                    raise
                raise LogUnavailable(f"The disk of the log failed ({error.strerror}); retry later") from error
        if segment.is_gone:
            return await self.read(shard, offset, limit_bytes=limit_bytes, end=end)
        return records

    async def _load_index(self, segment: LogSegment, shard: Shard) -> ShardIndex:
        if segment.index is not None:
            return segment.index.shards[shard]
        key = (segment, shard)
        index = self._loaded.get(key)
        if index is None:
            index = self._loaded[key] = await self._runner.read(partial(segment.load_index, self._files, shard))
            if len(self._loaded) > _LOADED_INDEXES_MAX:
                self._loaded.popitem(last=False)
        else:
            self._loaded.move_to_end(key)
        return index

    async def wait(self, positions: Mapping[Shard, int], timeout_s: float) -> bool:
        self._check_open()
        is_reached = await self._waiters.wait(positions, timeout_s)
        self._check_open()
        return is_reached

    async def find_offset(self, shard: Shard, time_ms: int) -> int:
        self._check_open()
        for segment in select_segments_from(self._segments, time_ms):
            last_ms = segment.get_last_time_ms(shard)
            if last_ms is not None and last_ms >= time_ms:
                try:
                    offset = (await self._load_index(segment, shard)).find_offset(time_ms)
                except (Corrupt, OSError) as error:
                    # Retention may be removing or rewriting the segment. Wait until it has finished and set `is_gone`.
                    async with self._maintenance_lock:
                        pass
                    if not segment.is_gone:
                        if isinstance(error, Corrupt):
                            raise
                        raise LogUnavailable(f"The disk of the log failed ({error.strerror}); retry later") from error
                if segment.is_gone:
                    return await self.find_offset(shard, time_ms)
                if offset is not None:
                    return offset
        return self._state.read_watermark(shard)

    def list_shards(self, stream: str | None = None) -> dict[Shard, ShardState]:
        self._check_open()
        return self._state.list_shard_states(stream)

    async def release(self, offsets: Mapping[Shard, int]) -> None:
        self._check_open()
        self._state.release(offsets)

    @property
    def size_bytes(self) -> int:
        """The size of all segments in bytes, which is a metric."""
        return sum(segment.size_bytes for segment in self._segments)

    # -- opening and closing -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Refuse the waiting requests, and make `run` end after its current group."""
        self._is_closing = True
        self._wake.set()
        self._waiters.close()

    async def close(self) -> None:
        """Close the active segment. `run` must have ended before."""
        await self._runner.write(self._writer.close)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise LogUnavailable(self._failure)


@asynccontextmanager
async def open_segments(
    files: LogFiles, runner: DiskRunner, clock: Clock, limits: SegmentLimits, identity: str = ""
) -> AsyncIterator[SegmentLog]:
    """Open a log with the given files and runner.

    Args:
        files: The files in the folder of the log.
        runner: Runs the blocking work on the disk.
        clock: The clock for the times of records.
        limits: The maximum sizes and ages of the log.
        identity: The id of the log, without which offsets of two logs could be confused.

    Raises:
        Corrupt: Acknowledged rows are damaged or missing.
        LogUnavailable: The disk fails.
    """
    state = LogState(limits.producers_max, limits.retention_ms)
    try:
        recovered_log = await runner.write(
            partial(recover_log, files, state, clock.now_ms(), segment_bytes=limits.segment_bytes)
        )
    except OSError as error:
        raise LogUnavailable(
            f"The log cannot be opened from its disk: {error}; correct this, then start again"
        ) from error
    if recovered_log.torn_bytes:
        _log.warning(
            "an incomplete record at the end of the log was removed",
            size_bytes=recovered_log.torn_bytes,
            segment=recovered_log.segments[-1].name,
        )
    log = SegmentLog(files, runner, clock, limits, recovered_log, identity)
    run_task = asyncio.create_task(log.run(), name="log-writer")
    maintenance_task = asyncio.create_task(log.maintain(), name="log-maintenance")
    try:
        yield log
    finally:
        log.stop()
        maintenance_task.cancel()
        await asyncio.gather(run_task, maintenance_task, return_exceptions=True)
        await log.close()


@asynccontextmanager
async def open_segment_log(folder: Path, clock: Clock, limits: SegmentLimits) -> AsyncIterator[SegmentLog]:
    """Open the log in a folder of the local disk. If the folder does not exist, create it.

    Raises:
        ConfigError: Another process uses the folder.
        Corrupt: Acknowledged rows are damaged or missing.
        LogUnavailable: The disk fails.
    """
    try:
        files = await asyncio.to_thread(FolderFiles, folder)
    except OSError as error:
        raise LogUnavailable(f"The folder {folder} of the log does not open: {error.strerror}") from error
    runner = ThreadRunner(READER_THREADS)
    try:
        identity = await runner.read(partial(_read_or_create_identity, folder, clock))
        async with open_segments(files, runner, clock, limits, identity) as log:
            yield log
    finally:
        await asyncio.to_thread(runner.close)
        files.close()


def _read_or_create_identity(folder: Path, clock: Clock) -> str:
    """Return the identity of the log in a folder, or give a new log an identity. The caller has locked the folder.

    Raises:
        LogUnavailable: The disk fails.
    """
    path, temporary_path = folder / _IDENTITY_FILE, folder / f"{_IDENTITY_FILE}.new"
    try:
        if path.exists():
            return path.read_text()
        identity = str(clock.uuid4())
        with open(os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(identity)
            file.flush()
            os.fsync(file.fileno())
        temporary_path.rename(path)
        sync_folder(folder)
    except OSError as error:
        raise LogUnavailable(f"The identity of the log in {folder} cannot be read: {error}") from error
    return identity
