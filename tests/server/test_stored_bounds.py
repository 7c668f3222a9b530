"""Tests of the limits on stored data of clients: in number, in bytes, and for each principal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import TooManyRequests
from seamark.metaserver.api.http import idempotency
from seamark.metaserver.api.plans import pending
from seamark.metaserver.catalog.quotas import Quota
from tests.api.client import SCHEMA, Api, create_key
from tests.api.plans.planned import append_files, build_ten_id_files
from tests.server.rig import OffsetClock, RunningServer, run_server
from tests.server.test_bodies import make_tokens
from tests.waits import until

TABLE = "/v1/namespaces/db/tables/t"
REPORT = {
    "report-type": "commit-report",
    "table-name": "db.t",
    "snapshot-id": 1,
    "sequence-number": 1,
    "operation": "append",
    "metrics": {},
}


async def send_request(
    server: RunningServer, secret: str | None, method: str, path: str, body: Any, **headers: str
) -> Any:
    """Send a request, and return (status, headers, JSON)."""
    login = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with server.http.request(method, server.url + path, json=body, headers={**login, **headers}) as answer:
        raw = await answer.read()
        return answer.status, answer.headers, json.loads(raw) if raw else None


async def test_only_the_newest_reports_of_a_table_are_kept(tmp_path: Path) -> None:
    clock = OffsetClock()
    async with run_server(tmp_path, clock=clock, metrics_reports_limit=5) as server:
        api = Api(server)
        uuid, other_uuid = [(await api.create_table(name))["metadata"]["table-uuid"] for name in ("t", "u")]
        assert (await api("POST", "/v1/namespaces/db/tables/u/metrics", REPORT)).status == 204
        for number in range(20):
            clock.ahead_ms += 1  # Two reports with the same time have no order.
            assert (await api("POST", f"{TABLE}/metrics", {**REPORT, "snapshot-id": number})).status == 204
        reports = await server.components.store.list_metrics_reports(uuid, since=None, limit=100)
        assert [metrics_report.snapshot_id for metrics_report in reports] == [15, 16, 17, 18, 19]
        assert len(await server.components.store.list_metrics_reports(other_uuid, since=None, limit=100)) == 1


async def test_bytes_of_reports_are_limited_for_each_reader_and_minute(tmp_path: Path) -> None:
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", metrics_rate_bytes=50_000) as server:
        await send_request(server, secrets["root"], "POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})
        large_report = {**REPORT, "metadata": {"x": "y" * 10_000}}
        answers = [
            await send_request(server, secrets["rita"], "POST", f"{TABLE}/metrics", large_report) for _ in range(8)
        ]
        assert [status for status, *_ in answers] == [204] * 4 + [429] * 4
        _, last_headers, _ = answers[-1]
        assert int(last_headers["Retry-After"]) >= 1
        assert (await send_request(server, secrets["ron"], "POST", f"{TABLE}/metrics", large_report))[0] == 204


async def test_number_of_indexes_is_limited_and_decreases_with_a_drop(tmp_path: Path) -> None:
    async with run_server(tmp_path, indexes_limit=2) as server:
        api = Api(server)
        await api.create_table()
        path = "/api/v1/tables/db/t/indexes"
        for number, fpp in enumerate((0.1, 0.01)):
            body = {"kind": "bloom", "columns": ["id"], "fpp": fpp}
            assert (await api("PUT", f"{path}/i{number}", body)).status == 200
        refusal = await api("PUT", f"{path}/more", {"kind": "bitmap", "columns": ["data"]})
        assert refusal.error[0] == 400
        assert "2 indexes" in refusal.error[2]
        assert (await api("PUT", f"{path}/i1", {"state": "paused"})).status == 200
        assert (await api("DELETE", f"{path}/i1")).status == 204
        assert (await api("PUT", f"{path}/more", {"kind": "bitmap", "columns": ["data"]})).status == 200


@pytest.mark.parametrize("limits", [{"plan_tables_limit": 6}, {"plan_tables_bytes": 60_000}])
async def test_one_reader_makes_at_most_half_of_the_plan_tables(tmp_path: Path, limits: dict[str, int]) -> None:
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", **limits) as server:
        api = Api(server)
        root_headers = {"Authorization": f"Bearer {secrets['root']}"}
        assert (
            await api("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA}, headers=root_headers)
        ).status == 200
        server.http.headers.update(root_headers)
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        del server.http.headers["Authorization"]

        async def make_plan_table(principal: str, number: int) -> bool:
            """Request a plan table for a filter. Return False if the server makes none."""
            body = {"predicate": f"id < {number}"}
            path = "/api/v1/tables/db/t/plan-tables"
            status, _, answer = await send_request(server, secrets[principal], "POST", path, body)
            assert status == 200
            return answer["name"] is not None

        were_made = [await make_plan_table("rita", 10 * number + 15) for number in range(12)]
        # Half of 6 plan tables are 3. Half of 60,000 bytes allow a number of plan tables that depends on their sizes.
        assert 1 <= sum(were_made) <= 8
        assert not were_made[-1]
        assert await make_plan_table("ron", 17)


async def test_withdrawn_plans_do_not_count_for_the_limit_and_rejections_are_counted(tmp_path: Path) -> None:
    """A client withdraws plans if it renews their leases with a length of 0.

    One principal may have three plans here.
    """
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", plan_tables_limit=6) as server:
        api = Api(server)
        root_headers = {"Authorization": f"Bearer {secrets['root']}"}
        creation = await api("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA}, headers=root_headers)
        assert creation.status == 200
        server.http.headers.update(root_headers)
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        del server.http.headers["Authorization"]
        path, headers = "/api/v1/tables/db/t", {"X-Seamark-Plans": "adapter"}
        headers["Authorization"] = f"Bearer {secrets['rita']}"

        async def request_plan(number: int) -> int | None:
            answer = await api("POST", f"{path}/plan-tables", {"predicate": f"id < {number}"}, headers=headers)
            plan_snapshot_id: int | None = answer.json.get("plan-snapshot-id")
            return plan_snapshot_id

        async def renew_lease(ids: list[int | None], lease_s: int) -> int:
            body = {"snapshot-ids": ids, "lease-s": lease_s}
            return (await api("POST", f"{path}/plan-snapshots", body, headers=headers)).status

        for round_number in range(4):
            ids = [await request_plan(10 * number + 15 + round_number) for number in range(3)]
            assert None not in ids
            assert await request_plan(5 + round_number) is None
            assert await renew_lease(ids, lease_s=600) == 200, "a renewal does not need a new place"
            # 1 and 2 are not the ids of stored plans, so their leases would be new.
            assert await renew_lease([1, 2], lease_s=600) == 429
            assert await renew_lease(ids, lease_s=0) == 200, "the plans are withdrawn"
        refused_counts = server.components.catalog.plan_tables.refused
        # Each of the four rounds had a refused plan and a refused renewal.
        assert refused_counts == {"leases of one principal": 8}
        for _ in range(2):  # A second sample does not add the same rejections again.
            server.components.metrics.plans.set_values(server.components.planner.read_stats(), refused_counts)
            text = server.components.metrics.render().decode()
            line = 'seamark_plan_tables_refused_total{exhausted="leases of one principal"} 8.0'
            assert line in text.splitlines()


async def test_number_of_stored_errors_under_idempotency_keys_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "KEPT_MAX", 3)
    async with run_server(tmp_path) as server:
        api = Api(server)
        keys = [create_key() for _ in range(6)]
        for key in keys:
            assert (await api("POST", "/v1/namespaces", {"namespace": ["db"]}, key=key)).status == 409
        store, now_ms = server.components.store, server.components.clock.now_ms()
        assert [await store.find_idempotency_record(key, now_ms) is not None for key in keys] == [True] * 3 + [
            False
        ] * 3
        assert (await api("POST", "/v1/namespaces", {"namespace": ["db"]}, key=keys[-1])).status == 409


async def test_one_principal_has_at_most_half_of_the_watches(tmp_path: Path) -> None:
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", watchers_limit=4) as server:
        path = "/api/v1/tables/db/t/timeline?since=latest&wait=60"
        timeline = server.components.timeline
        await send_request(server, secrets["root"], "POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})
        watch_tasks = [asyncio.create_task(send_request(server, secrets["rita"], "GET", path, None)) for _ in range(4)]
        await until(lambda: timeline.watchers == sum(task.done() for task in watch_tasks) == 2)
        other_task = asyncio.create_task(send_request(server, secrets["ron"], "GET", path, None))
        await until(lambda: timeline.watchers == 3)
        timeline.drain()
        assert (await other_task)[0] == 200
        assert sorted(status for status, *_ in await asyncio.gather(*watch_tasks)) == [200, 200, 429, 429]


def test_quota_counts_each_amount_until_it_expires() -> None:
    # The arguments of `add` are the holder of the amount, the current time, the end of the amount, and the amount.
    # An amount may count up to 5 s longer, because its end is rounded up to a multiple of 5 s.
    quota = Quota(10)
    quota.add("a", 0, 100, 6)
    assert quota.has_room("a", 0, 4)
    assert not quota.has_room("a", 0, 5)
    assert quota.has_room("b", 0, 10)
    assert quota.has_room(None, 0, 1000)
    quota.add("a", 50, 150, 4)
    quota.check_invariants()
    assert not quota.has_room("a", 99)
    assert quota.has_room("a", 105.5, 6)
    assert quota.has_room("a", 155, 10)
    quota.check_invariants()


async def test_one_principal_has_at_most_half_of_the_running_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "PENDING_PLANS_MAX", 6)
    plans, may_finish = pending.PendingPlans(), asyncio.Event()

    async def wait() -> Any:
        await may_finish.wait()

    tasks = [plans.start(f"rita-{number}", "rita", wait) for number in range(3)]
    with pytest.raises(TooManyRequests):
        plans.start("rita-3", "rita", wait)
    assert plans.start("rita-2", "rita", wait) is tasks[2]
    assert not plans.is_full("ron")
    tasks += [plans.start(f"other-{number}", "anonymous", wait) for number in range(3)]
    assert plans.is_full("ron")
    may_finish.set()
    await asyncio.gather(*tasks)
    assert not plans.is_full("rita")
