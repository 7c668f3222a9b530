"""Tests of hedged reads: the gateway uses the answer that begins first, and cancels the other request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.gateway.caching import hedging
from seamark.metaserver.gateway.caching.hedging import HedgedStore
from seamark.metaserver.gateway.caching.store import StoreAnswer
from tests.gateway.fake_store import FakeStore
from tests.gateway.test_cache import BLOCK_BYTES, draw_name, open_worker, to_location
from tests.seeds import first_seed
from tests.waits import until


@dataclass
class ScriptedAnswer:
    """The behaviour of the store for one request: it waits until `release_event` is set, and then answers or fails.

    Attributes:
        status: The status of the answer.
        must_fail: Whether the request fails without an answer.
        must_break: Whether the connection ends within the body of the answer.
        outcome: What has happened to the request.
    """

    status: int = 206
    must_fail: bool = False
    must_break: bool = False
    release_event: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: str = ""


class ScriptedStore:
    """A store that gives the scripted answers in order, and records how each of them ended."""

    def __init__(self, *answers: ScriptedAnswer) -> None:
        self.answers = list(answers)
        self.sent_count = 0

    @asynccontextmanager
    async def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AsyncIterator[StoreAnswer]:
        answer = self.answers[self.sent_count]
        self.sent_count += 1
        try:
            await answer.release_event.wait()
            if answer.must_fail:
                raise RetryLater("no answer")
            yield StoreAnswer(answer.status, {"turn": str(self.answers.index(answer))}, self._yield_pieces(answer))
            answer.outcome = "read"
        except asyncio.CancelledError:
            answer.outcome = "cancelled"
            raise
        except ConnectionError:
            answer.outcome = "broken"
            raise RetryLater("the answer ended early") from None

    async def _yield_pieces(self, answer: ScriptedAnswer) -> AsyncIterator[bytes]:
        yield b"a"
        if answer.must_break:
            raise ConnectionError


@pytest.fixture(autouse=True)
def send_second_request_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time after which the gateway sends a second request to zero, so that tests do not wait."""
    monkeypatch.setattr(hedging, "_INITIAL_WAIT_S", 0.0)
    monkeypatch.setattr(hedging, "_WAIT_MIN_S", 0.0)
    monkeypatch.setattr(hedging, "_WAIT_MAX_S", 0.0)


async def read_object(store: HedgedStore) -> tuple[str, bytes]:
    async with store.request("GET", "b", "k", {}) as answer:
        return answer.headers["turn"], b"".join([piece async for piece in answer.pieces])


async def test_answer_that_begins_first_is_used_and_the_other_request_is_cancelled() -> None:
    for faster in (0, 1):
        answers = ScriptedAnswer(), ScriptedAnswer()
        scripted_store = ScriptedStore(*answers)
        reading = asyncio.create_task(read_object(HedgedStore(scripted_store, SystemClock(), percent=100)))
        await until(lambda scripted_store=scripted_store: scripted_store.sent_count == 2)
        answers[faster].release_event.set()
        assert await reading == (str(faster), b"a")
        assert (answers[faster].outcome, answers[1 - faster].outcome) == ("read", "cancelled")


@pytest.mark.parametrize(
    "refused_answer", [ScriptedAnswer(status=503), ScriptedAnswer(must_fail=True)], ids=["503", "no answer"]
)
async def test_failure_is_used_only_if_no_answer_arrives(refused_answer: ScriptedAnswer) -> None:
    last_answer = ScriptedAnswer()
    scripted_store = ScriptedStore(refused_answer, last_answer)
    reading = asyncio.create_task(read_object(HedgedStore(scripted_store, SystemClock(), percent=100)))
    await until(lambda: scripted_store.sent_count == 2)
    refused_answer.release_event.set()
    await asyncio.sleep(0)
    last_answer.release_event.set()
    assert await reading == ("1", b"a")


async def test_error_of_the_store_is_returned_if_both_requests_fail() -> None:
    answers = ScriptedAnswer(must_fail=True), ScriptedAnswer(must_fail=True)
    scripted_store = ScriptedStore(*answers)
    reading = asyncio.create_task(read_object(HedgedStore(scripted_store, SystemClock(), percent=100)))
    await until(lambda: scripted_store.sent_count == 2)
    for answer in answers:
        answer.release_event.set()
    with pytest.raises(RetryLater, match="no answer"):
        await reading


async def test_interrupted_answer_has_the_error_of_its_request() -> None:
    answer = ScriptedAnswer(must_break=True)
    answer.release_event.set()
    with pytest.raises(RetryLater, match="ended early"):
        await read_object(HedgedStore(ScriptedStore(answer, ScriptedAnswer()), SystemClock(), percent=100))
    assert answer.outcome == "broken"


async def test_reader_that_disconnects_cancels_both_requests() -> None:
    answers = ScriptedAnswer(), ScriptedAnswer()
    scripted_store = ScriptedStore(*answers)
    reading = asyncio.create_task(read_object(HedgedStore(scripted_store, SystemClock(), percent=100)))
    await until(lambda: scripted_store.sent_count == 2)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert [answer.outcome for answer in answers] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("percent", [0, 5, 50])
async def test_hedged_requests_stay_within_their_percentage_of_all_requests(percent: int) -> None:
    read_count = 400
    scripted_store = ScriptedStore(*(ScriptedAnswer() for _ in range(2 * read_count)))
    store = HedgedStore(scripted_store, SystemClock(), percent=percent)
    for number in range(read_count):
        first_request = scripted_store.sent_count
        reading = asyncio.create_task(read_object(store))
        while scripted_store.sent_count == first_request:
            await asyncio.sleep(0)
        for _ in range(20):  # These turns of the event loop suffice for a second request.
            await asyncio.sleep(0)
        scripted_store.answers[first_request].release_event.set()
        await reading
        assert store.hedged <= (number + 1) * percent / 100
    assert scripted_store.sent_count == read_count + store.hedged
    half_of_allowed = read_count * percent // 100 // 2
    assert store.hedged >= half_of_allowed, "the store hedged less than half of the requests that the percentage allows"


async def test_every_hedged_read_has_the_right_bytes(tmp_path: Path) -> None:
    """The store breaks a tenth of the answers in every second round. Most reads send two requests."""
    rng = random.Random(first_seed())
    store = FakeStore(rng)
    paths = [draw_name(rng) for _ in range(6)]
    for path in paths:
        store.put(to_location(path), rng.randbytes(rng.randrange(1, 12 * BLOCK_BYTES)))
    no_cache = {"gateway_cache_memory_bytes": 0, "gateway_cache_disk_bytes": 0}
    async with open_worker(store, tmp_path, SimulatedClock(1), gateway_hedged_percent=100, **no_cache) as worker:
        for round_number in range(150):
            store.failure_rate = (0.0, 0.1)[round_number % 2]
            path = rng.choice(paths)
            data = store.objects[to_location(path)].data
            start = rng.randrange(len(data))
            end = rng.randrange(start, len(data)) + 1
            try:
                status, body, _ = await worker.send("GET", path, Range=f"bytes={start}-{end - 1}")
            except aiohttp.ClientError:  # An interrupted answer does not count as wrong.
                status, body = 0, b""
            assert status == 206 or store.failure_rate
            assert status != 206 or body == data[start:end]
        assert worker.backend._tiers.store.hedged > 10  # With fewer second requests, the test would have tested little.
    worker.backend._fetches.check_invariants()
