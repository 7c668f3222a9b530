"""Tests that concurrent requests share reads of the database, and that each gets a read that began after its call."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.runtime.shared_reads import SharedReads
from tests.seeds import examples, first_seed


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(20, number_in_ordinary_runs=3)))
async def test_each_request_gets_a_read_that_began_after_its_call(seed: int) -> None:
    rng = Random(seed)
    values = dict.fromkeys("ab", 0)
    read_count = 0

    async def pass_time() -> None:
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)

    async def read(key: str) -> int:
        nonlocal read_count
        read_count += 1
        value = values[key]
        await pass_time()
        if rng.random() < 0.1:
            raise RetryLater("PostgreSQL does not answer")
        return value

    shared_reads = SharedReads(read)

    async def request() -> None:
        await pass_time()
        key = rng.choice("ab")
        values[key] += rng.random() < 0.3  # Before three of ten requests, a commit changes the value.
        value_before = values[key]
        try:
            assert value_before <= await shared_reads.load(key) <= values[key]
        except RetryLater:
            pass

    tasks = [asyncio.create_task(request()) for _ in range(300)]
    for task in rng.sample(tasks, 20):
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    # Without sharing, the 300 requests would need about 300 reads.
    assert read_count < 100
    assert not shared_reads._running
    assert not shared_reads._next
