"""A log in memory, for tests and simulations. Its rows are lost with the process."""

from __future__ import annotations

import bisect
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import LogUnavailable
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
from seamark.metaserver.log.state import Group, LogState
from seamark.metaserver.log.waiting import Waiters


class MemoryLog:
    """A `StreamLog` in memory. Open it with `open_memory_log`."""

    def __init__(self, clock: Clock, *, producers_max: int, keep_ms: int, append_bytes_max: int) -> None:
        self._clock = clock
        self._append_bytes_max = append_bytes_max
        self._state = LogState(producers_max, keep_ms)
        self._records: dict[Shard, list[Record]] = {}
        self._waiters = Waiters(self._state.read_watermark)
        self._closed = False
        self.identity = "memory"

    async def catch_up(self) -> None:
        self._check_open()

    def close(self) -> None:
        """Refuse all later calls."""
        self._closed = True

    async def append(self, batches: Mapping[Shard, Batch], producer: StreamProducer | None = None) -> Acknowledgement:
        self._check_open()
        check_append(batches, producer, limit_bytes=self._append_bytes_max)
        group = self._begin_group()
        acknowledgement = group.append(batches, producer)
        group.apply()
        if not acknowledgement.duplicate:
            name, sequence = (producer.name, producer.sequence) if producer is not None else ("", -1)
            for position, batch in zip(acknowledgement.positions, batches.values(), strict=True):
                record = Record(position.shard, position.offset, batch, group.time_ms, name, sequence)
                self._records.setdefault(position.shard, []).append(record)
            self._waiters.wake(batches)
        return acknowledgement

    async def fence(self, name: str) -> StreamProducerState:
        self._check_open()
        check_producer_name(name)
        group = self._begin_group()
        state = group.fence(name)
        group.apply()
        return state

    def find_producer(self, name: str) -> StreamProducerState | None:
        self._check_open()
        return self._state.find_producer(name)

    def read_watermarks(self, shards: Iterable[Shard]) -> dict[Shard, int]:
        self._check_open()
        return self._state.read_watermarks(shards)

    async def read(self, shard: Shard, offset: int, *, limit_bytes: int, end: int | None = None) -> Sequence[Record]:
        self._check_open()
        self._state.check_readable(shard, offset)
        records = self._records.get(shard, [])
        records_to_return: list[Record] = []
        size_bytes = 0
        for record in records[bisect.bisect_right(records, offset, key=lambda record: record.end) :]:
            size_bytes += record.batch.size_bytes
            if (end is not None and record.offset >= end) or (records_to_return and size_bytes > limit_bytes):
                break
            records_to_return.append(record)
        return records_to_return

    async def wait(self, positions: Mapping[Shard, int], timeout_s: float) -> bool:
        self._check_open()
        return await self._waiters.wait(positions, timeout_s)

    async def find_offset(self, shard: Shard, time_ms: int) -> int:
        self._check_open()
        records = self._records.get(shard, [])
        index = bisect.bisect_left(records, time_ms, key=lambda record: record.time_ms)
        return records[index].offset if index < len(records) else self._state.read_watermark(shard)

    def list_shards(self, stream: str | None = None) -> dict[Shard, ShardState]:
        self._check_open()
        return self._state.list_shard_states(stream)

    async def release(self, offsets: Mapping[Shard, int]) -> None:
        self._check_open()
        self._state.release(offsets)

    async def remove(self, stream: str) -> None:
        self._check_open()
        group = self._begin_group()
        group.remove(stream)
        group.apply()
        for shard in [shard for shard in self._records if shard.stream == stream]:
            del self._records[shard]

    def trim(self) -> None:
        """Remove the records whose rows are all released."""
        for shard, records in self._records.items():
            summary = self._state.shards[shard]
            first_index = bisect.bisect_right(records, summary.released, key=lambda record: record.end)
            summary.start = records[first_index].offset if first_index < len(records) else summary.watermark
            summary.size_bytes = sum(record.batch.size_bytes for record in records[first_index:])
            del records[:first_index]

    def _begin_group(self) -> Group:
        now_ms = self._clock.now_ms()
        self._state.forget(now_ms, now_ms)
        return Group(self._state, now_ms)

    def _check_open(self) -> None:
        if self._closed:
            raise LogUnavailable("The log is closed, because the server stops; retry later")


@asynccontextmanager
async def open_memory_log(
    clock: Clock, *, producers_max: int = 50_000, keep_ms: int = 7 * 86_400_000, append_bytes_max: int = 64 << 20
) -> AsyncIterator[MemoryLog]:
    """Open a log in memory. Its rows are lost at the end of the block.

    The default limits are those of a server's log.
    """
    log = MemoryLog(clock, producers_max=producers_max, keep_ms=keep_ms, append_bytes_max=append_bytes_max)
    try:
        yield log
    finally:
        log.close()
