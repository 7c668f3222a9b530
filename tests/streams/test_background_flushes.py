"""Tests of work on stream tables that no request causes: openings, flushes, and releases of flushed rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import LogUnavailable, RetryLater
from seamark.metaserver.log.port import Shard
from seamark.metaserver.log.segments import SegmentLog
from seamark.metaserver.peers.membership import Membership
from seamark.metaserver.store.model import STREAM_OWNER_PROTOCOL, Entry, Replica
from seamark.metaserver.streams import streams
from seamark.metaserver.streams.catalog_tables import CatalogTables
from seamark.metaserver.streams.log_opening import LogSource
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.stream_table import StreamTable
from seamark.metaserver.streams.table_openings import TableOpenings
from tests.log.memory import MemoryLog, open_memory_log
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server
from tests.streams.test_rows_over_http import stream as stream
from tests.streams.world import UUID, build_batch
from tests.waits import until

LEASE_S = 10.0
FLUSH_INTERVAL_S = 20.0


class SharedMemoryLog:
    """A source of the log with only what `TableOpenings` uses.

    The log exists, and other processes append to it as well (`is_shared`).
    """

    exists = is_shared = True

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def open(self) -> MemoryLog:
        return self._log


class OpeningProcess:
    """The table openings of one process. Its catalog fails in the first `failure_count` attempts.

    `TableOpenings` only passes the other parts of a server on, so they are None here.
    """

    def __init__(self, log: MemoryLog, clock: SimulatedClock, owners: StreamOwners) -> None:
        self.open_tables: dict[str, StreamTable] = {}
        self.failure_count = 0
        self.attempt_count = 0
        self.openings = TableOpenings(
            cast("LogSource", SharedMemoryLog(log)),
            owners,
            cast("Any", self),
            cast("Any", None),
            cast("Any", None),
            clock,
            self.open_tables,
            self.open_table,
            int(1000 * FLUSH_INTERVAL_S),
        )

    async def load(self, uuid: str) -> tuple[Entry, TableMetadata]:
        """Return the UUID in place of the entry, which `TableOpenings` only passes to `open_table`.

        Raises:
            RetryLater: This is one of the first `failure_count` calls.
        """
        self.attempt_count += 1
        if self.attempt_count <= self.failure_count:
            raise RetryLater("the storage is busy")
        return cast("Any", uuid), cast("Any", None)

    async def open_table(self, entry: Entry, metadata: TableMetadata) -> StreamTable:
        table = cast("StreamTable", None)
        self.open_tables[cast("str", entry)] = table
        return table

    async def open_waiting_tables(self) -> bool:
        """Open the table if it has waiting rows. Return whether it is open."""
        await self.openings.open_waiting_tables()
        for _ in range(3):
            await asyncio.sleep(0)  # This lets the task of the opening run.
        return UUID in self.open_tables


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(1)


@pytest.fixture
async def log(clock: SimulatedClock) -> AsyncIterator[MemoryLog]:
    async with open_memory_log(clock) as log:
        await log.append({Shard(UUID, 0): build_batch(1, 2)})
        yield log


def build_owners(clock: SimulatedClock, *, as_owner: bool) -> StreamOwners:
    """Return the object with which one of two live processes finds the owners of tables.

    With `as_owner`, it is the process that owns the table, otherwise the other process.
    """
    replicas = [
        Replica(address, weight=1, version="", protocol=STREAM_OWNER_PROTOCOL, started_ms=0) for address in ("a", "b")
    ]
    memberships = []
    for replica in replicas:
        # The process reads no leases from a store, because the test names the live replicas.
        membership = Membership(cast("Any", None), clock, replica, lease_s=LEASE_S)
        membership.replace(replicas)
        memberships.append(StreamOwners(membership, lease_s=LEASE_S))
    return next(owners for owners in memberships if owners.is_owner(UUID) == as_owner)


async def test_a_failed_opening_is_repeated_after_growing_pauses(log: MemoryLog, clock: SimulatedClock) -> None:
    process = OpeningProcess(log, clock, StreamOwners(None))
    process.failure_count = 3
    attempts_s: list[int] = []
    for second in range(20):
        if await process.open_waiting_tables():
            break
        clock.advance(1000)
        if process.attempt_count > len(attempts_s):
            attempts_s.append(second)
    assert attempts_s == [0, 1, 3]
    assert process.open_tables.keys() == {UUID}
    assert process.attempt_count == 4


async def test_an_opening_that_never_succeeds_is_repeated_every_half_minute(
    log: MemoryLog, clock: SimulatedClock
) -> None:
    process = OpeningProcess(log, clock, StreamOwners(None))
    process.failure_count = 1 << 62  # The number is never reached, so no opening succeeds.
    for _ in range(1200):  # After 1,024 failures, a pause that doubles without a limit would exceed the largest float.
        await process.open_waiting_tables()
        clock.advance(30_000)
    assert process.attempt_count == 1200


async def test_only_the_owner_opens_a_table_that_it_flushes(log: MemoryLog, clock: SimulatedClock) -> None:
    owner = OpeningProcess(log, clock, build_owners(clock, as_owner=True))
    other_process = OpeningProcess(log, clock, build_owners(clock, as_owner=False))
    assert await owner.open_waiting_tables()
    for number in range(3, 20):
        assert not await other_process.open_waiting_tables()
        clock.advance(int(1000 * FLUSH_INTERVAL_S))
        await log.append({Shard(UUID, 0): build_batch(number)})
        await log.release({Shard(UUID, 0): number - 1})


async def test_another_process_opens_a_table_whose_owner_does_not_flush_it(
    log: MemoryLog, clock: SimulatedClock
) -> None:
    other_process = OpeningProcess(log, clock, build_owners(clock, as_owner=False))
    assert not await other_process.open_waiting_tables()
    clock.advance(int(1000 * (FLUSH_INTERVAL_S + LEASE_S)) - 1)
    assert not await other_process.open_waiting_tables()
    clock.advance(1)
    assert await other_process.open_waiting_tables()


async def test_a_process_that_only_reads_opens_no_table(log: MemoryLog, clock: SimulatedClock) -> None:
    reader = OpeningProcess(log, clock, StreamOwners(None, only_reads=True))
    for _ in range(3):
        assert not await reader.open_waiting_tables()
        clock.advance(int(1000 * (FLUSH_INTERVAL_S + LEASE_S)))


async def load_released_offset(stream: StreamServer) -> int:
    """Return the offset below which the log may remove the rows of the table."""
    components = stream.server.components
    entry = await components.catalog.tables.load_entry(("db",), "t")
    metadata = await components.catalog.documents.table(entry.metadata_location)
    log = await components.streams.open_log(entry, metadata)
    return log.list_shards(entry.uuid)[Shard(entry.uuid, 0)].released


async def test_the_flush_of_the_first_rows_leaves_later_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush that creates the table's first snapshot may wait for another flush. Afterwards it has nothing to do."""
    # With this pause, the background loop does not flush tables during the test.
    monkeypatch.setattr(streams, "_TICK_S", 3600)
    is_committing, may_commit = asyncio.Event(), asyncio.Event()
    commit, flush = CatalogTables.commit, StreamTable.flush
    flushed_rows: list[int] = []
    flush_count = 0

    async def commit_later(tables: CatalogTables, *arguments: Any, **options: Any) -> None:
        is_committing.set()
        await may_commit.wait()
        await commit(tables, *arguments, **options)

    async def count_flush(table: StreamTable, **options: Any) -> int:
        nonlocal flush_count
        flush_count += 1
        flushed_rows.append(await flush(table, **options))
        return flushed_rows[-1]

    monkeypatch.setattr(CatalogTables, "commit", commit_later)
    monkeypatch.setattr(StreamTable, "flush", count_flush)
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        flush_task = asyncio.create_task(stream.flush())
        await is_committing.wait()
        await stream.post({"id": 2})  # The table has no snapshot yet, so a flush is due.
        await stream.server.components.streams.start_due_flushes()
        await until(lambda: flush_count == 2)
        may_commit.set()
        await flush_task
        await until(lambda: len(flushed_rows) == 2)
        assert flushed_rows == [1, 0]
        assert await stream.ids() == [1, 2]


async def test_rows_whose_flush_was_not_released_are_released_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this release, the log would keep the rows of a table that gets no later rows for ever."""

    async def fail(log: SegmentLog, offsets: Mapping[Shard, int]) -> None:
        raise LogUnavailable("the process ends before it releases the rows")

    with monkeypatch.context() as patches:
        patches.setattr(SegmentLog, "release", fail)
        async with open_stream_server(tmp_path) as stream:
            await create_stream_table(stream)
            await stream.post({"id": 1})
            assert await stream.flush() == 1
    async with open_stream_server(tmp_path) as stream:
        await until(lambda: stream.server.components.streams.tables)
        assert await load_released_offset(stream) == 1


async def test_a_failed_release_is_repeated(stream: StreamServer, monkeypatch: pytest.MonkeyPatch) -> None:
    release, failures = SegmentLog.release, [LogUnavailable("the log does not answer")]

    async def fail_once(log: SegmentLog, offsets: Mapping[Shard, int]) -> None:
        if failures:
            raise failures.pop()
        await release(log, offsets)

    monkeypatch.setattr(SegmentLog, "release", fail_once)
    await stream.post({"id": 1})
    await stream.flush()
    (table,) = stream.server.components.streams.tables.values()
    await table.clean()
    assert not failures
    assert await load_released_offset(stream) == 1
