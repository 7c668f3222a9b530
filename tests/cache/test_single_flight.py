"""Tests of single flight: one fetch for a key at a time, and a cancelled waiter does not affect the others."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from seamark.cache.single_flight import SingleFlight
from tests.seeds import mark_fast


class HeldSource:
    """A source that counts fetches. The test decides when they end."""

    def __init__(self) -> None:
        self.started_count = 0
        self.cancelled_count = 0
        self.gate = asyncio.Event()

    async def fetch(self) -> str:
        self.started_count += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled_count += 1
            raise
        return f"fetch {self.started_count}"


async def test_many_callers_share_one_fetch() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    source = HeldSource()
    callers = [asyncio.create_task(flights.run("k", source.fetch)) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(flights) == 1
    source.gate.set()
    assert set(await asyncio.gather(*callers)) == {"fetch 1"}
    assert source.started_count == 1
    assert len(flights) == 0
    flights.check_invariants()


async def test_calls_for_different_keys_run_concurrently_and_results_are_not_cached() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    slow_source, quick = HeldSource(), HeldSource()
    quick.gate.set()
    waiting_task = asyncio.create_task(flights.run("slow", slow_source.fetch))
    assert await flights.run("quick", quick.fetch) == "fetch 1"
    assert await flights.run("quick", quick.fetch) == "fetch 2"
    slow_source.gate.set()
    await waiting_task


async def test_error_reaches_every_waiter_and_the_next_call_fetches_again() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    attempts = 0

    async def fail() -> str:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        raise LookupError(f"attempt {attempts}")

    results = await asyncio.gather(*(flights.run("k", fail) for _ in range(10)), return_exceptions=True)
    assert [str(result) for result in results] == ["attempt 1"] * 10
    with pytest.raises(LookupError, match="attempt 2"):
        await flights.run("k", fail)


async def test_cancelled_waiter_cancels_neither_the_fetch_nor_other_waiters() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    source = HeldSource()
    first_task, second_task = (asyncio.create_task(flights.run("k", source.fetch)) for _ in range(2))
    await asyncio.sleep(0)
    first_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first_task
    source.gate.set()
    assert await second_task == "fetch 1"
    assert source.cancelled_count == 0


async def test_fetch_is_cancelled_with_its_last_waiter_and_a_new_caller_fetches_again() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    source = HeldSource()
    only_waiter = asyncio.create_task(flights.run("k", source.fetch))
    for _ in range(2):  # The waiter starts, and then its fetch.
        await asyncio.sleep(0)
    only_waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only_waiter
    source.gate.set()
    assert await flights.run("k", source.fetch) == "fetch 2"
    assert source.cancelled_count == 1
    flights.check_invariants()


async def test_failure_without_waiters_causes_no_warning() -> None:
    flights: SingleFlight[str, str] = SingleFlight()
    reported_errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported_errors.append(context["message"]))
    gate = asyncio.Event()

    async def fail() -> str:
        await gate.wait()
        raise LookupError

    only_waiter = asyncio.create_task(flights.run("k", fail))
    for _ in range(2):  # The waiter starts, and then its fetch.
        await asyncio.sleep(0)
    gate.set()
    only_waiter.cancel()
    await asyncio.gather(only_waiter, return_exceptions=True)
    await asyncio.sleep(0)
    gc.collect()
    assert reported_errors == []


@pytest.mark.parametrize("seed", mark_fast(range(10), 2))
async def test_every_remaining_waiter_gets_its_value_under_random_cancellations(seed: int) -> None:
    source = random.Random(seed)
    flights: SingleFlight[int, int] = SingleFlight()
    running_numbers: set[int] = set()

    async def fetch(key: int) -> int:
        assert key not in running_numbers, f"two fetches for {key} at once, seed {seed}"
        running_numbers.add(key)
        try:
            await asyncio.sleep(source.random() / 200)
        finally:
            running_numbers.discard(key)
        return key

    tasks: list[tuple[int, asyncio.Task[int]]] = []
    for _ in range(300):
        key = source.randrange(5)
        tasks.append((key, asyncio.create_task(flights.run(key, lambda key=key: fetch(key)))))
        if source.random() < 0.4:
            source.choice(tasks)[1].cancel()
        if source.random() < 0.2:
            await asyncio.sleep(source.random() / 400)
        flights.check_invariants()
    results = await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    for (key, _), result in zip(tasks, results, strict=True):
        assert result == key or isinstance(result, asyncio.CancelledError), f"seed {seed}: {result!r}"
    assert len(flights) == 0
