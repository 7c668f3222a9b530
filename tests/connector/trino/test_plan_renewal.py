"""Tests that plans are renewed while their statement waits in Trino's queue for longer than their leases."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from seamark.connector.trino.protocol import queued_statements
from seamark.connector.trino.protocol.queued_statements import QueuedStatements
from seamark.connector.trino.rewriter import RewriteLimits
from tests.connector.trino.protocol import (
    END,
    PLAN_ID,
    QUEUED_PAGE,
    ROWS,
    ScriptedTrino,
    run_fake_seamark,
    run_fake_trino,
)
from tests.connector.trino.rig import run_proxy

STATEMENT = "SELECT x FROM lake.db.t WHERE x = 1"
SLOW_LIMITS = RewriteLimits(budget_s=10)
PLANS = [(("db", "t"), 5)]


def test_plans_are_renewed_by_status_requests_of_a_queued_statement() -> None:
    statements = QueuedStatements(lease_s=0)
    assert statements.take_plans_to_renew("/v1/statement/queued/q1/slug/1") == ()
    statements.add("/v1/statement/queued/q1/slug/1", PLANS, time.monotonic())
    statements.add("/v1/statement/executing/q2/slug/1", PLANS, time.monotonic())
    statements.add("/v1/statement/queued/q3/slug/1", [], time.monotonic())
    for target in ("queued/q1/slug/2", "queued/q1/slug/3"):
        assert statements.take_plans_to_renew(f"/v1/statement/{target}") == PLANS
    for target in ("executing/q1/slug/4", "queued/q2/slug/1", "queued/q3/slug/1", "queued/q1", "queued"):
        assert statements.take_plans_to_renew(f"/v1/statement/{target}") == ()


def test_plans_are_renewed_only_after_a_part_of_their_lease() -> None:
    statements = QueuedStatements(lease_s=1000)
    statements.add("/v1/statement/queued/q1/slug/1", PLANS, time.monotonic())
    assert statements.take_plans_to_renew("/v1/statement/queued/q1/slug/2") == ()
    # Plans are renewed after a quarter of their lease. If the coordinator took longer to answer, the next request
    # renews them immediately.
    statements.add("/v1/statement/queued/q1/slug/1", PLANS, time.monotonic() - 300)
    assert statements.take_plans_to_renew("/v1/statement/queued/q1/slug/2") == PLANS
    assert statements.take_plans_to_renew("/v1/statement/queued/q1/slug/3") == ()


def test_number_of_remembered_statements_is_bounded() -> None:
    statements = QueuedStatements(lease_s=0)
    for number in range(100_000):
        statements.add(f"/v1/statement/queued/q{number}/slug/1", PLANS, time.monotonic())
    remembered_count = sum(
        bool(statements.take_plans_to_renew(f"/v1/statement/queued/q{number}/slug/2")) for number in range(100_000)
    )
    assert 1000 < remembered_count < 50_000
    assert statements.take_plans_to_renew("/v1/statement/queued/q99999/slug/2") == PLANS


async def list_renewed_plans(trino: ScriptedTrino, has_several_coordinators: bool, slow_stage: str) -> list[str]:
    """Run a statement, and return the paths of the renewal requests that were sent before its first rows.

    Each page of `slow_stage` takes ten seconds by a simulated clock, and the lease of a plan takes one second.
    """
    now_s = time.monotonic()
    async with (
        AsyncExitStack() as stack,
        run_fake_seamark() as seamark,
        run_fake_trino(lambda _: [END]) as other_trino,
        run_proxy(
            trino.url,
            *[other_trino.url] * has_several_coordinators,
            seamark=seamark.url,
            lease_s=1,
            hold_s=0,
            rules=False,
            limits=SLOW_LIMITS,
        ) as rig,
    ):
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(queued_statements, "time", SimpleNamespace(monotonic=lambda: now_s))
        _, headers, body = await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
        assert headers["X-Seamark-Plan"] == "planned"
        page = json.loads(body)
        while "nextUri" in page:
            if f"/{slow_stage}/" in page["nextUri"]:
                now_s += 10
            _, _, body = await rig.ask("GET", page["nextUri"].removeprefix(rig.url))
            page = json.loads(body)
    assert all(request == {"snapshot-ids": [PLAN_ID], "lease-s": 1} for _, request in seamark.renewals)
    return [path for path, _ in seamark.renewals]


async def test_proxy_renews_the_plans_of_a_queued_statement() -> None:
    async with run_fake_trino(lambda _: [*[QUEUED_PAGE] * 8, ROWS, END]) as trino:
        for has_several_coordinators in (False, True):
            renewed_plans = await list_renewed_plans(trino, has_several_coordinators, "queued")
            assert set(renewed_plans) == {"db/t"}


async def test_plans_of_a_running_statement_are_not_renewed() -> None:
    async with run_fake_trino(lambda _: [QUEUED_PAGE, *[ROWS] * 8, END]) as trino:
        assert await list_renewed_plans(trino, False, "executing") == []


async def test_unreachable_seamark_does_not_fail_a_waiting_statement() -> None:
    async with AsyncExitStack() as seamark_stack, run_fake_trino(lambda _: [*[QUEUED_PAGE] * 3, ROWS, END]) as trino:
        seamark = await seamark_stack.enter_async_context(run_fake_seamark())
        async with run_proxy(
            trino.url, seamark=seamark.url, lease_s=1, hold_s=0, rules=False, limits=SLOW_LIMITS
        ) as rig:
            _, _, body = await rig.ask("POST", "/v1/statement", data=STATEMENT.encode())
            await seamark_stack.aclose()
            await asyncio.sleep(0.3)
            for stage in ("queued", "queued", "queued", "executing"):
                page = json.loads(body)
                assert f"/{stage}/" in page["nextUri"]
                status, _, body = await rig.ask("GET", page["nextUri"].removeprefix(rig.url))
                assert status == 200
