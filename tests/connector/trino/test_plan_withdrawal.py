"""Tests that plans are visible while a statement needs them, and that no statement loses a plan that it has taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from seamark.connector.client.errors import ClientError, ServerFailed
from seamark.connector.plans.async_client import Name
from seamark.connector.trino.protocol.plan_withdrawal import PlanWithdrawal
from tests.waits import until

T, U = ("db", "t"), ("db", "u")


class PlanRecorder:
    """A fake catalog that records the requests for leases, and which plans are visible.

    A lease of 0 seconds withdraws a plan. Every other lease makes the plan visible.
    """

    def __init__(self) -> None:
        self.visible_plans: set[tuple[Name, int]] = set()
        self.requests: list[tuple[Name, list[int], int | None]] = []
        self.wait_s = 0.0
        self.is_failing = False

    def add_plans(self, *plans: tuple[Name, int]) -> None:
        self.visible_plans.update(plans)

    async def lease(self, name: Name, ids: list[int], lease_s: int | None) -> None:
        self.requests.append((name, ids, lease_s))
        await asyncio.sleep(self.wait_s)
        if self.is_failing:
            raise ServerFailed("down")
        plans = {(name, id_) for id_ in ids}
        self.visible_plans = self.visible_plans - plans if lease_s == 0 else self.visible_plans | plans


@asynccontextmanager
async def open_withdrawal(idle_s: float = 0.05) -> AsyncIterator[tuple[PlanRecorder, PlanWithdrawal]]:
    catalog = PlanRecorder()
    withdrawal = PlanWithdrawal(catalog.lease, idle_s)
    yield catalog, withdrawal
    await withdrawal.close()


def make_plans(catalog: PlanRecorder, withdrawal: PlanWithdrawal, *plans: tuple[Name, int]) -> None:
    catalog.add_plans(*plans)
    for plan in plans:
        withdrawal.note(plan, time.monotonic())


async def test_unneeded_plans_are_withdrawn_with_one_request_for_each_table() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        plans = [(T, 1), (T, 2), (U, 3)]
        make_plans(catalog, withdrawal, *plans)
        await withdrawal.take(plans)
        await withdrawal.take([(T, 1)])
        withdrawal.release(plans)
        await until(lambda: catalog.visible_plans == {(T, 1)})
        assert sorted((table, sorted(ids), lease) for table, ids, lease in catalog.requests) == [
            (T, [2], 0),
            (U, [3], 0),
        ]
        withdrawal.release([(T, 1)])
        await until(lambda: not catalog.visible_plans)


async def test_plans_that_no_statement_used_are_withdrawn() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        make_plans(catalog, withdrawal, (T, 1))
        await until(lambda: not catalog.visible_plans)


async def test_plan_that_is_taken_during_its_withdrawal_is_leased_again() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        catalog.wait_s = 0.5
        make_plans(catalog, withdrawal, (T, 1))
        await until(lambda: (T, [1], 0) in catalog.requests)
        await withdrawal.take([(T, 1)])
        # A lease of 0 seconds withdraws the plan, and None requests the default lease.
        assert catalog.requests == [(T, [1], 0), (T, [1], None)]
        assert catalog.visible_plans == {(T, 1)}
        await asyncio.sleep(0.6)
        assert catalog.visible_plans == {(T, 1)}


async def test_plan_that_was_made_before_its_withdrawal_is_leased_again() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        requested_s = time.monotonic()
        make_plans(catalog, withdrawal, (T, 1))
        await until(lambda: not catalog.visible_plans)
        withdrawal.note((T, 1), requested_s)
        await withdrawal.take([(T, 1)])
        assert catalog.visible_plans == {(T, 1)}


async def test_failed_lease_is_raised_to_the_statement_that_takes_the_plan() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        catalog.is_failing = True
        with pytest.raises(ClientError):
            await withdrawal.take([(T, 1)])
        catalog.is_failing = False


async def test_all_plans_are_withdrawn_at_the_end_even_if_the_server_fails() -> None:
    for is_failing in (False, True):
        async with open_withdrawal(600.0) as (catalog, withdrawal):
            make_plans(catalog, withdrawal, (T, 1), (U, 2))
            await withdrawal.take([(T, 1)])
            catalog.is_failing = is_failing
        assert bool(catalog.visible_plans) == is_failing


async def test_flush_withdraws_unneeded_plans_immediately() -> None:
    async with open_withdrawal(600.0) as (catalog, withdrawal):
        make_plans(catalog, withdrawal, (T, 1), (T, 2))
        await withdrawal.take([(T, 1)])
        await withdrawal.withdraw_unused()
        assert catalog.visible_plans == {(T, 1)}


async def test_plan_that_trino_may_not_have_analysed_is_left_to_its_lease() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        make_plans(catalog, withdrawal, (T, 1))
        await withdrawal.take([(T, 1)])
        withdrawal.forget([(T, 1)])
        await asyncio.sleep(0.2)
    assert catalog.visible_plans == {(T, 1)}


async def test_client_that_disconnects_during_a_lease_keeps_no_plan() -> None:
    async with open_withdrawal() as (catalog, withdrawal):
        catalog.wait_s = 0.5
        make_plans(catalog, withdrawal, (T, 1))
        await until(lambda: (T, [1], 0) in catalog.requests)
        take_task = asyncio.create_task(withdrawal.take([(T, 1)]))
        await asyncio.sleep(0.01)
        take_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await take_task
        await until(lambda: not catalog.visible_plans)
        catalog.wait_s = 0.0
        make_plans(catalog, withdrawal, (T, 1))
        await until(lambda: not catalog.visible_plans)
