"""Tests that each wait for the log in Kafka has a limit, and ends with an error that says what is stored.

A real broker cannot stop answering at a chosen step, so the tests use `StuckBroker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import CommitUnknown, LogUnavailable
from seamark.metaserver.log.kafka.broker import JournalListener, JournalRange, NewRecord
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog, open_log_over
from seamark.metaserver.log.port import Shard
from tests.log.contract import A as SHARD
from tests.log.contract import build_batch

LIMITS = KafkaLimits(answer_timeout_s=0.2, request_timeout_s=60)


class StuckBroker:
    """A cluster in memory that does not answer the step `stuck_call`: write, journal, follow or "range for ever".

    For "range" it answers with an error, and for "fault" it raises an unexpected error.
    """

    identity = "kafka/stuck"

    def __init__(self) -> None:
        self.stuck_call = ""
        self.range_requests = 0
        self._listener: JournalListener | None = None
        self._journal: list[bytes] = []
        self._end_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end_future.set_result(None)

    async def _hang_if_stuck(self, step: str) -> None:
        """Return at once, or never if `step` is the step that does not answer."""
        if self.stuck_call == step:
            await asyncio.Event().wait()

    async def create_partitions(self, shards: Iterable[Shard]) -> None:
        pass

    async def write(self, records: Sequence[NewRecord]) -> Sequence[int | LogUnavailable]:
        await self._hang_if_stuck("write")
        return range(len(records))

    def write_journal(self, value: bytes) -> Awaitable[None]:
        if self.stuck_call == "fault":
            raise ValueError("a fault of this program")
        self._journal.append(value)
        if self.stuck_call != "follow" and self._listener is not None:
            records = [(len(self._journal) - 1, value)]
            asyncio.get_running_loop().call_soon(self._listener.receive, records)
        return self._hang_if_stuck("journal")

    async def read(self, shard: Shard, records: Sequence[int]) -> Mapping[int, bytes]:
        return {}

    async def read_journal_range(self) -> JournalRange:
        self.range_requests += 1
        if self.stuck_call == "range":
            await asyncio.sleep(0.01)
            raise LogUnavailable("the cluster does not answer")
        await self._hang_if_stuck("range for ever")
        return JournalRange(0, len(self._journal))

    async def delete_records(self, offsets_before: Mapping[Shard, int]) -> None:
        pass

    async def delete_journal(self, offset_before: int) -> None:
        pass

    async def delete_stream(self, stream: str) -> None:
        pass

    def follow_journal(self, start: int, listener: JournalListener) -> None:
        self._listener = listener


@asynccontextmanager
async def open_stuck_log(limits: KafkaLimits = LIMITS) -> AsyncIterator[tuple[StuckBroker, KafkaLog]]:
    broker = StuckBroker()
    async with open_log_over(broker, SystemClock(), limits) as log:
        yield broker, log


@pytest.mark.parametrize("stuck_call", ["follow", "fault"])
async def test_append_without_an_answer_to_its_record_has_an_unknown_outcome(stuck_call: str) -> None:
    async with open_stuck_log() as (broker, log):
        broker.stuck_call = stuck_call
        appends = (log.append({SHARD: build_batch(str(number))}) for number in range(3))
        for outcome in await asyncio.gather(*appends, return_exceptions=True):
            assert isinstance(outcome, CommitUnknown)
        broker.stuck_call = ""
        await log.append({SHARD: build_batch("next")})


async def test_append_that_waits_too_long_for_its_turn_is_refused() -> None:
    async with open_stuck_log(replace(LIMITS, groups_max=1, request_timeout_s=0.2)) as (broker, log):
        broker.stuck_call = "write"
        first_task = asyncio.create_task(log.append({SHARD: build_batch("first")}))
        await asyncio.sleep(0.01)
        with pytest.raises(LogUnavailable, match="nothing of the request is stored"):
            await log.append({SHARD: build_batch("second")})
        with pytest.raises(CommitUnknown):
            await first_task


async def test_appends_end_when_the_log_is_closed_before_their_group_begins() -> None:
    """The log writes waiting appends as a group."""
    async with open_stuck_log() as (_, log):
        appends = [asyncio.create_task(log.append({SHARD: build_batch(str(number))})) for number in range(3)]
        while not log._groups:  # The task of the group exists, but has not run yet.
            await asyncio.sleep(0)
    for outcome in await asyncio.gather(*appends, return_exceptions=True):
        assert isinstance(outcome, CommitUnknown)


async def test_appends_are_refused_after_an_unexpected_error_of_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(log: KafkaLog) -> None:
        raise ValueError("a fault of this program")

    monkeypatch.setattr(KafkaLog, "_take_group", fail)
    async with open_stuck_log() as (_, log):
        for _ in range(2):
            with pytest.raises(LogUnavailable, match="Restart the server"):
                await log.append({SHARD: build_batch("x")})


async def test_concurrent_readers_share_one_failed_request_for_the_end_of_the_journal() -> None:
    async with open_stuck_log() as (broker, log):
        broker.stuck_call, broker.range_requests = "range", 0
        outcomes = await asyncio.gather(*(log.catch_up() for _ in range(20)), return_exceptions=True)
        assert {str(outcome) for outcome in outcomes} == {"the cluster does not answer"}
        assert broker.range_requests <= 2
        broker.stuck_call = ""
        await log.catch_up()


async def test_readers_are_refused_if_the_end_of_the_journal_is_not_read_in_time() -> None:
    async with open_stuck_log() as (broker, log):
        broker.stuck_call = "range for ever"
        for outcome in await asyncio.gather(*(log.catch_up() for _ in range(3)), return_exceptions=True):
            assert isinstance(outcome, LogUnavailable)
            assert "was not read within 0.2 s" in outcome.message
