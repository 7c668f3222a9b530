"""Tests of slow plans: the server returns an id at once, and clients poll or cancel the plan."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from seamark.metaserver.api.plans import planning
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import BoundScan
from seamark.metaserver.store.model import Entry
from tests.api.client import SCHEMA, Api
from tests.api.plans.planned import EQ_5, PYICEBERG, T, append_files, build_ten_id_files, list_planned_numbers
from tests.server.rig import run_server
from tests.server.test_bodies import make_tokens


class SlowPlanner:
    """A planner whose plans wait until `may_plan` is set.

    It reports more entries to decode than the setting `plan_async_files`, so the server answers later.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_plan = asyncio.Event()
        self.plan_count = 0
        plan = Planner.plan

        async def plan_when_allowed(planner: Planner, bound_scan: BoundScan, entry: Entry) -> Any:
            await self.may_plan.wait()
            self.plan_count += 1
            return await plan(planner, bound_scan, entry)

        async def estimate_many_entries(planner: Planner, bound_scan: BoundScan, entry: Entry) -> int:
            return 10_000_000  # Far more than the default of `plan_async_files`

        monkeypatch.setattr(Planner, "plan", plan_when_allowed)
        monkeypatch.setattr(Planner, "estimate_entries_to_decode", estimate_many_entries)
        # A poll answers "submitted" after a short time, so that tests need not wait for it.
        monkeypatch.setattr(planning, "POLL_S", 0.05)


async def test_plan_that_reads_very_much_is_answered_later(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_planner = SlowPlanner(monkeypatch)
    submitted_plan = await api_with_files("POST", f"{T}/plan", {"filter": EQ_5})
    assert set(submitted_plan.json) == {"status", "plan-id"}
    assert submitted_plan.json["status"] == "submitted"
    plan_path = f"{T}/plan/{submitted_plan.json['plan-id']}"
    assert (await api_with_files("GET", plan_path)).json == {"status": "submitted"}
    slow_planner.may_plan.set()
    while (answer := await api_with_files("GET", plan_path)).json["status"] == "submitted":
        await asyncio.sleep(0.01)
    assert answer.json["status"] == "completed"
    assert list_planned_numbers(answer) == [0]
    assert (await api_with_files("GET", plan_path)).json == answer.json, "the client may request the result again"
    assert slow_planner.plan_count == 1, "the second request does not plan again"


async def test_plan_id_is_known_to_every_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_planner = SlowPlanner(monkeypatch)
    async with run_server(tmp_path) as first_server, run_server(tmp_path) as second_server:
        first_api, second_api = Api(first_server), Api(second_server)
        await first_api.create_table()
        await append_files(first_api, "t", build_ten_id_files(3), snapshot_id=1)
        plan_id = (await first_api("POST", f"{T}/plan", {})).json["plan-id"]
        slow_planner.may_plan.set()
        while (answer := await second_api("GET", f"{T}/plan/{plan_id}")).json["status"] == "submitted":
            await asyncio.sleep(0.01)
        assert list_planned_numbers(answer) == [0, 1, 2]
        assert (await second_api("DELETE", f"{T}/plan/{plan_id}")).status == 204
        other_answer = await second_api("GET", f"/v1/namespaces/db/tables/t/plan/{plan_id[:-4]}AAAA")
        assert other_answer.error[:2] == (404, "NoSuchPlanIdException")


async def test_cancelled_plan_is_not_continued(api_with_files: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_planner = SlowPlanner(monkeypatch)
    plan_id = (await api_with_files("POST", f"{T}/plan", {})).json["plan-id"]
    monkeypatch.setattr(planning, "POLL_S", 20)  # The poll still waits when the plan is cancelled.
    polling_task = asyncio.create_task(api_with_files("GET", f"{T}/plan/{plan_id}"))
    await asyncio.sleep(0.1)
    assert (await api_with_files("DELETE", f"{T}/plan/{plan_id}")).status == 204
    # The answer is not "cancelled", because another client may have the same plan. A client that has cancelled does not
    # poll.
    assert (await polling_task).json == {"status": "submitted"}
    slow_planner.may_plan.set()
    await asyncio.sleep(0.05)
    assert slow_planner.plan_count == 0
    assert (await api_with_files("DELETE", f"{T}/plan/{plan_id}")).status == 204, (
        "a repeated cancellation gets the same answer"
    )


async def test_principal_cancels_its_own_plan_and_not_another_principals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal requests for a table have equal plan ids, so the plans of two principals have the same id."""
    slow_planner, secrets = SlowPlanner(monkeypatch), await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token") as server:
        api = Api(server)

        async def send_as(principal: str, method: str, path: str, body: Any = None) -> Any:
            return await api(method, path, body, headers={"Authorization": f"Bearer {secrets[principal]}"})

        assert (
            await send_as("root", "POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})
        ).status == 200
        await append_files(cast(Api, partial(send_as, "root")), "t", build_ten_id_files(3), snapshot_id=1)
        plan_id_of_rita, plan_id_of_ron = [
            (await send_as(principal, "POST", f"{T}/plan", {})).json["plan-id"] for principal in ("rita", "ron")
        ]
        assert plan_id_of_rita == plan_id_of_ron
        monkeypatch.setattr(planning, "POLL_S", 60)  # Rita's poll still waits when ron cancels.
        task_of_rita = asyncio.create_task(send_as("rita", "GET", f"{T}/plan/{plan_id_of_rita}"))
        await asyncio.sleep(0)
        assert (await send_as("ron", "DELETE", f"{T}/plan/{plan_id_of_ron}")).status == 204
        slow_planner.may_plan.set()
        answer = await task_of_rita
        assert answer.json["status"] == "completed"
        assert list_planned_numbers(answer) == [0, 1, 2]


async def test_pyiceberg_which_does_not_poll_waits_for_its_plan(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_planner = SlowPlanner(monkeypatch)
    slow_planner.may_plan.set()
    assert list_planned_numbers(await api_with_files("POST", f"{T}/plan", {"filter": EQ_5}, headers=PYICEBERG)) == [0]


async def test_plan_whose_id_is_too_long_for_a_url_is_awaited(
    api_with_files: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowPlanner(monkeypatch).may_plan.set()
    # A plan id contains the filter in compressed form. Values without an order compress badly, so the id is long.
    values = [n * 7919 % 1_000_003 for n in range(5_000)]
    answer = await api_with_files("POST", f"{T}/plan", {"filter": {"type": "in", "term": "id", "values": values}})
    assert answer.json["status"] == "completed"


async def test_server_stops_while_plans_are_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SlowPlanner(monkeypatch)
    async with run_server(tmp_path, drain_timeout_s=2) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(3), snapshot_id=1)
        assert (await api("POST", f"{T}/plan", {})).json["status"] == "submitted"
