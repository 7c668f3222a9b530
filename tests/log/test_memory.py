"""Tests of the log in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import LogUnavailable, OffsetOutOfRange, TooManyRequests
from seamark.metaserver.log.port import StreamProducer
from tests.log.contract import LIMIT_BYTES, A, StreamLogContract, build_batch
from tests.log.memory import MemoryLog, open_memory_log


class TestMemoryLog(StreamLogContract):
    @pytest.fixture
    async def log(self) -> AsyncIterator[MemoryLog]:
        async with open_memory_log(SystemClock()) as log:
            yield log


async def test_released_rows_are_trimmed() -> None:
    async with open_memory_log(SystemClock()) as log:
        for text in "abc":
            await log.append({A: build_batch(text, 10)})
        await log.release({A: 25})
        log.trim()
        assert [record.offset for record in await log.read(A, 20, limit_bytes=LIMIT_BYTES)] == [20]
        with pytest.raises(OffsetOutOfRange, match="has the rows 20 to 30"):
            await log.read(A, 19, limit_bytes=LIMIT_BYTES)


async def test_too_many_producers_are_refused() -> None:
    async with open_memory_log(SystemClock(), producers_max=2) as log:
        for name in ("p", "q"):
            await log.append({A: build_batch(name)}, StreamProducer(name, 0))
        with pytest.raises(TooManyRequests, match="'r' is new"):
            await log.append({A: build_batch("r")}, StreamProducer("r", 0))
        await log.append({A: build_batch("p")}, StreamProducer("p", 1))


async def test_one_owner_cannot_use_the_whole_limit_of_producers() -> None:
    clock = SimulatedClock(1)
    # An owner, whose name is the second part of a producer's name, can have half of the 8 producers.
    async with open_memory_log(clock, producers_max=8, keep_ms=1000) as log:
        for number in range(4):
            await log.append({A: build_batch("x")}, StreamProducer(f"table{number}/greedy/p", sequence=0))
        with pytest.raises(TooManyRequests, match="4 of them of the owner"):
            await log.append({A: build_batch("x")}, StreamProducer("table4/greedy/p", sequence=0))
        for number in range(2):
            await log.append({A: build_batch("x")}, StreamProducer(f"table{number}/modest/p", sequence=0))
        await log.append({A: build_batch("x")}, StreamProducer("table0/greedy/p", sequence=1))
        clock.advance(5000)
        for number in range(4, 8):  # The log has forgotten the earlier names.
            await log.append({A: build_batch("x")}, StreamProducer(f"table{number}/greedy/p", sequence=0))


async def test_closed_log_refuses_appends() -> None:
    async with open_memory_log(SystemClock()) as log:
        pass
    with pytest.raises(LogUnavailable):
        await log.append({A: build_batch("x")})
