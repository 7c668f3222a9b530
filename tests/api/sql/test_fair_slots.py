"""Tests of slots for statements: no few principals can prevent others from running a statement."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from seamark.formats.runtime.errors import RetryLater, TooManyRequests
from seamark.metaserver.api.sql.fair_slots import FairSlots
from tests.seeds import mark_fast


async def _hold_slot(slots: FairSlots, holder: str | None, end: asyncio.Event, started_names: list[str | None]) -> None:
    async with slots.hold_slot(holder, 60):
        started_names.append(holder)
        await end.wait()


async def hold_slot_or_leave(slots: FairSlots, holder: str | None, end: asyncio.Event) -> None:
    with suppress(TooManyRequests, RetryLater):
        await _hold_slot(slots, holder, end, [])


async def run_pending_tasks() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_two_principals_with_statements_leave_a_slot_to_a_third() -> None:
    slots, end, started_holders = FairSlots("statements", limit=4), asyncio.Event(), list[str | None]()
    async with asyncio.TaskGroup() as group:
        for holder in ("ann", "ann", "bob", "bob"):
            group.create_task(_hold_slot(slots, holder, end, started_holders))
        await run_pending_tasks()
        # Bob's second request waits: the fourth slot is for a principal without a running statement.
        assert started_holders == ["ann", "ann", "bob"]
        # Ann runs two statements, and bob runs one and waits for one. Both have their whole share.
        for holder in ("ann", "bob"):
            with pytest.raises(TooManyRequests, match="whole share, 2 of"):
                async with slots.hold_slot(holder, wait_s=60):
                    raise AssertionError
        async with slots.hold_slot("cleo", wait_s=0):
            slots.check_invariants()
        assert slots.taken == 3
        end.set()
    assert started_holders == ["ann", "ann", "bob", "bob"]
    assert slots.taken == 0


async def test_free_slot_goes_to_the_principal_with_the_fewest_slots() -> None:
    slots, ends, started_holders = (
        FairSlots("statements", limit=8),
        [asyncio.Event() for _ in range(8)],
        list[str | None](),
    )
    async with asyncio.TaskGroup() as group:
        for holder, end in zip(("ann", "ann", "ann", "bob", "bob", "bob", "cleo", "dora"), ends, strict=True):
            group.create_task(_hold_slot(slots, holder, end, started_holders))
        await run_pending_tasks()
        assert slots.taken == 8
        release_event = asyncio.Event()
        for holder in ("bob", "cleo", "eve"):  # The requests begin to wait in this order.
            group.create_task(_hold_slot(slots, holder, release_event, started_holders))
        await run_pending_tasks()
        ends[0].set()
        await run_pending_tasks()
        assert started_holders[8:] == ["eve"]
        for end in (*ends, release_event):
            end.set()


async def test_statement_that_times_out_or_is_cancelled_takes_no_slot() -> None:
    slots = FairSlots("statements", limit=1)
    async with slots.hold_slot("ann", wait_s=0):
        with pytest.raises(RetryLater, match="limit of 1"):
            async with slots.hold_slot("bob", wait_s=0.01):
                raise AssertionError
        leaving_task = asyncio.create_task(_hold_slot(slots, "bob", asyncio.Event(), []))
        await run_pending_tasks()
        leaving_task.cancel()
        with suppress(asyncio.CancelledError):
            await leaving_task
        granted_task = asyncio.create_task(_hold_slot(slots, "bob", asyncio.Event(), []))
        await run_pending_tasks()
    granted_task.cancel()  # The slot is granted, but the statement has not run yet.
    with suppress(asyncio.CancelledError):
        await granted_task
    assert slots.taken == 0
    async with slots.hold_slot(None, wait_s=0):
        slots.check_invariants()


async def test_queue_length_is_limited() -> None:
    slots, end = FairSlots("statements", limit=1), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(9):  # One statement runs, and eight may wait for its slot.
            group.create_task(_hold_slot(slots, f"p{number}", end, []))
        await run_pending_tasks()
        with pytest.raises(RetryLater):
            async with slots.hold_slot("late", wait_s=60):
                raise AssertionError
        end.set()


@pytest.mark.parametrize("seed", mark_fast(range(40), 3))
async def test_slots_are_used_and_shared_in_any_order_of_requests(seed: int) -> None:
    rng = random.Random(seed)
    limit = rng.choice((1, 2, 3, 4, 8))
    slots = FairSlots("statements", limit)
    running_tasks: list[tuple[asyncio.Task[None], asyncio.Event]] = []
    for _ in range(200):
        if running_tasks and rng.random() < 0.45:
            task, end = running_tasks.pop(rng.randrange(len(running_tasks)))
            if rng.random() < 0.3:
                task.cancel()
            end.set()
        else:
            end = asyncio.Event()
            holder = rng.choice((None, "ann", "bob", "cleo", "dora"))
            running_tasks.append((asyncio.create_task(hold_slot_or_leave(slots, holder, end)), end))
        if rng.random() < 0.7:
            await run_pending_tasks()
            slots.check_invariants()
    for _, end in running_tasks:
        end.set()
    await asyncio.gather(*(task for task, _ in running_tasks), return_exceptions=True)
    await run_pending_tasks()
    slots.check_invariants()
    assert slots.taken == 0
