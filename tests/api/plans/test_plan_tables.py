"""Tests of plan tables over HTTP: the route's answers, shared names, leases and all errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import SaveGrant
from tests.api.client import SCHEMA, VIEW_VERSION, Answer, Api, build_property_commit
from tests.api.plans.planned import EQ_5, append_files, build_ten_id_files
from tests.planner.lakes.entries import read_data_files, read_manifest_list
from tests.server.rig import OffsetClock, RunningServer, run_server

OWN_TABLES, STANDARD_TABLES = "/api/v1/tables/db", "/v1/namespaces/db/tables"
LEASE_S, GRACE_S = 100, 50
UNKNOWN_PLAN_NAME = "t~plan~" + "0" * 32


class UserApi(Api):
    """An API client that sends the token of one user."""

    def __init__(self, server: RunningServer, secret: str) -> None:
        super().__init__(server)
        self._login = {"Authorization": f"Bearer {secret}"}

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        return await super().__call__(
            method, path, body, headers={**self._login, **options.pop("headers", {})}, **options
        )


class PlanApi(Api):
    """An API client of a server whose clock a test can advance.

    `db.t` has 30 files in 3 manifests. File n has the ids from 10 n to 10 n + 9.
    """

    clock: OffsetClock

    def advance_leases(self, leases: float) -> None:
        """Advance the clock by `leases` times the length of the default lease."""
        self.clock.ahead_ms += round(leases * LEASE_S * 1000)

    async def create_plan_table(self, table: str = "t", **body: Any) -> dict[str, Any]:
        """Create a plan table: a read-only table with the files of `table` that a scan needs. Return the answer."""
        answer = await self("POST", f"{OWN_TABLES}/{table}/plan-tables", body)
        assert answer.status == 200, answer.raw
        answer_body: dict[str, Any] = answer.json
        return answer_body

    async def load(self, name: str) -> dict[str, Any]:
        answer = await self("GET", f"{STANDARD_TABLES}/{name}")
        assert answer.status == 200, answer.raw
        body: dict[str, Any] = answer.json
        return body

    async def list_files_of_plan(self, name: str) -> list[int]:
        """Return the numbers of the files in the plan table with this name."""
        return list_file_numbers(await self.load(name))


def list_file_numbers(loaded_table: dict[str, Any]) -> list[int]:
    (snapshot,) = loaded_table["metadata"]["snapshots"]
    paths = read_data_files(read_manifest_list(snapshot["manifest-list"]), 2)
    return sorted(int(path.rpartition("/")[2].removesuffix(".parquet")) for path in paths)


@asynccontextmanager
async def open_plan_api(tmp_path: Path, **arguments: Any) -> AsyncIterator[PlanApi]:
    clock = OffsetClock()
    settings = {"plan_table_lease_s": LEASE_S, "plan_table_grace_s": GRACE_S, "housekeeping_interval_s": 1e6}
    async with run_server(tmp_path, clock=clock, **settings, **arguments) as server:
        plan_api = PlanApi(server)
        plan_api.clock = clock
        await plan_api.create_table()
        await append_files(plan_api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        yield plan_api


def list_plan_files(tmp_path: Path) -> list[Path]:
    """Return the files of plan tables below the warehouse."""
    return [path for path in tmp_path.glob("warehouse/**/_seamark/plans/**/*") if path.is_file()]


async def test_plan_answer_has_the_name_of_a_table_with_its_files(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id BETWEEN 95 AND 118")
    now_ms = plan_api.clock.now_ms()
    name, expires_ms = plan.pop("name"), plan.pop("expires-at-ms")
    assert plan.pop("statement"), "the client reports the time of the statement by this fingerprint"
    assert plan == {
        "snapshot-id": 1,
        "files": 3,
        "bytes": 30_000,
        "considered-files": 30,
        "considered-bytes": 300_000,
    }
    assert name == name.lower()
    assert name.startswith("t~plan~")
    assert 0.9 * LEASE_S * 1000 < expires_ms - now_ms <= LEASE_S * 1000
    loaded_table = await plan_api.load(name)
    assert list_file_numbers(loaded_table) == [9, 10, 11]
    table = await plan_api.load("t")
    equal_fields = (
        "table-uuid",
        "format-version",
        "schemas",
        "partition-specs",
        "current-schema-id",
        "last-sequence-number",
    )
    assert all(loaded_table["metadata"][key] == table["metadata"][key] for key in equal_fields)
    assert loaded_table["metadata"]["current-snapshot-id"] == 1
    assert loaded_table["config"]["scan-planning-mode"] == "client"
    assert table["config"]["scan-planning-mode"] == "server"
    assert (await plan_api("HEAD", f"{STANDARD_TABLES}/{name}")).status == 204


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("body", "file_numbers"),
    [
        ({"filter": EQ_5}, [0]),
        ({"predicate": "ID = 5"}, [0]),
        ({"filter": {**EQ_5, "term": "ID"}, "case-sensitive": False}, [0]),
        ({"predicate": "id < 100"}, list(range(10))),
        ({"predicate": "id < -1"}, []),
        ({}, list(range(30))),
        ({"snapshot-id": 1, "filter": {"type": "gt-eq", "term": "id", "value": 290}}, [29]),
        ({"ref": "main", "predicate": "id IN (5, 105, 205)"}, [0, 10, 20]),
        ({"predicate": "length(data) = 3"}, list(range(30))),
    ],
)
async def test_plan_table_lists_the_files_that_the_plan_keeps(
    plan_api: PlanApi, body: dict[str, Any], file_numbers: list[int]
) -> None:
    plan = await plan_api.create_plan_table(**body)
    assert (plan["files"], plan["considered-files"]) == (len(file_numbers), 30)
    assert await plan_api.list_files_of_plan(plan["name"]) == file_numbers


async def test_no_plan_table_is_made_for_a_reader_with_an_older_schema(plan_api: PlanApi) -> None:
    """Two columns swap their names after the reader has loaded the table.

    A plan table has the current schema, in which the condition of the reader would filter the wrong column.
    """
    past_snapshot = {"snapshot-id": 1, "use-snapshot-schema": True}
    assert await plan_api.list_files_of_plan(
        (await plan_api.create_plan_table(predicate="id = 5", **past_snapshot))["name"]
    ) == [0]
    fields = [
        {"id": 1, "name": "data", "required": True, "type": "long"},
        {"id": 2, "name": "id", "required": False, "type": "string"},
    ]
    schema = {"type": "struct", "schema-id": 1, "fields": fields}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
    assert (await plan_api("POST", f"{STANDARD_TABLES}/t", {"requirements": [], "updates": updates})).status == 200
    plan = await plan_api.create_plan_table(predicate="data = 5", **past_snapshot)
    assert (plan["name"], plan["snapshot-id"]) == (None, 1)
    assert await plan_api.list_files_of_plan((await plan_api.create_plan_table(predicate="data = 5"))["name"]) == [0]


async def test_table_without_a_snapshot_has_no_plan_table(plan_api: PlanApi) -> None:
    await plan_api.create_table("empty")
    plan = await plan_api.create_plan_table("empty", predicate="id = 5")
    assert plan["name"] is None
    assert (plan["snapshot-id"], plan["files"], plan["considered-files"], plan["expires-at-ms"]) == (None, 0, 0, None)


async def test_error_names_the_invalid_part_of_a_plan_table_request(plan_api: PlanApi) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"predicate": "nosuch = 5"}, "nosuch"),
        ({"predicate": "id ="}, ""),
        ({"filter": {"type": "eq", "term": "nosuch", "value": 5}}, "nosuch"),
        ({"filter": EQ_5, "predicate": "id = 5"}, "has both predicate and filter"),
        ({"snapshot-id": 7}, "Cannot find snapshot 7"),
        ({"snapshot-id": 1, "ref": "main"}, "set one of them"),
        ({"ref": "nosuch"}, "nosuch"),
        ({"lease-s": 0}, "lease-s is 0"),
        ({"kept-max": 1.5}, "kept-max is 1.5"),
        ({"kept-max": -0.1}, "kept-max is -0.1"),
        ({"where": "id = 5"}, "where"),
    ]
    for body, reason in cases:
        answer = await plan_api("POST", f"{OWN_TABLES}/t/plan-tables", body)
        code, kind, message = answer.error
        assert (code, kind) == (400, "BadRequestException"), reason
        assert reason in message, reason


async def test_no_plan_table_is_made_when_the_plan_keeps_more_than_the_requested_share(
    plan_api: PlanApi, tmp_path: Path
) -> None:
    # The plan keeps a third of the files.
    for share in (0.0, 0.3, 0.32):
        plan = await plan_api.create_plan_table(predicate="id < 100", **{"kept-max": share})
        assert (plan["files"], plan["name"], plan["expires-at-ms"]) == (10, None, None), share
        assert list_plan_files(tmp_path) == []
    for share in (0.34, 1.0):
        plan = await plan_api.create_plan_table(predicate="id < 100", **{"kept-max": share})
        assert plan["files"] == 10
        assert None not in (plan["name"], plan["expires-at-ms"]), share
    # The same plan exists since the request with 0.34, but its name is not in the answer to a request with 0.2.
    assert (await plan_api.create_plan_table(predicate="id < 100", **{"kept-max": 0.2}))["name"] is None
    assert (await plan_api.create_plan_table(predicate="id < -5", **{"kept-max": 0.0}))["name"] is not None


async def test_no_plan_table_is_made_when_it_would_rewrite_more_entries_than_the_limit(tmp_path: Path) -> None:
    async with run_server(tmp_path, plan_table_files_limit=4) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        for predicate, is_listed in (("id < 40", True), ("id < 50", False), ("id < 100", True), ("id < 150", False)):
            body = (await api("POST", f"{OWN_TABLES}/t/plan-tables", {"predicate": predicate})).json
            assert (body["name"] is not None) == is_listed, predicate


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("limits", [{"plan_table_files_limit": 4}, {"plan_tables_limit": 0}])
async def test_reader_that_needs_a_plan_table_gets_the_limit_that_prevents_it(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    """A plan table is a read-only table with the files of a scan plan. A reader can read it in place of the table.

    DuckDB, which requests `hide-partitions`, would skip files with rows of its query in the partitioned table. Here a
    limit prevents a plan table. The answer then names this limit in the field `misread`.
    """
    field = {"name": "p", "transform": "truncate[10]", "source-id": 1, "field-id": 1000}
    async with run_server(tmp_path, **limits) as server:
        api = Api(server)
        for table, spec in (("partitioned", {"fields": [field]}), ("plain", {"fields": []})):
            await api.create_table(table, **{"partition-spec": spec})
            await append_files(api, table, build_ten_id_files(30), snapshot_id=1, manifests=3)
            body = {"predicate": "id < 50", "hide-partitions": True}
            plan = (await api("POST", f"{OWN_TABLES}/{table}/plan-tables", body)).json
            assert plan["name"] is None
            if table == "partitioned":
                assert all(setting in plan["misread"] for setting in limits)
            else:
                assert "misread" not in plan
            body["hide-partitions"] = False
            assert "misread" not in (await api("POST", f"{OWN_TABLES}/{table}/plan-tables", body)).json


async def test_number_of_plan_tables_is_limited_by_the_setting(tmp_path: Path) -> None:
    async with run_server(tmp_path, plan_tables_limit=2) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        plans = [
            (await api("POST", f"{OWN_TABLES}/t/plan-tables", {"predicate": f"id = {n}"})).json for n in (5, 15, 25, 5)
        ]
        assert [plan["name"] is not None for plan in plans] == [True, True, False, True]
        assert plans[2]["files"] == 1
        assert plans[3] == plans[0]


async def test_identical_plans_share_a_name_and_its_files(plan_api: PlanApi, tmp_path: Path) -> None:
    first_plan = await plan_api.create_plan_table(predicate="id = 5")
    files = list_plan_files(tmp_path)
    assert len(files) == 3
    assert await plan_api.create_plan_table(filter=EQ_5) == first_plan
    assert await plan_api.create_plan_table(predicate="5 = id", **{"snapshot-id": 1}) == first_plan
    assert list_plan_files(tmp_path) == files
    assert (await plan_api.create_plan_table(predicate="id = 6"))["name"] != first_plan["name"]
    await append_files(plan_api, "t", build_ten_id_files(30)[:1], snapshot_id=2, parent=1)
    assert (await plan_api.create_plan_table(predicate="id = 5", **{"snapshot-id": 1}))["name"] != first_plan["name"], (
        "other metadata"
    )


async def test_incomplete_plan_is_not_shared(tmp_path: Path) -> None:
    """The server has no time to plan, so each plan keeps all 30 files.

    If such a plan were shared, later requests would get too many files as long as any reader renews the plan.
    """
    async with open_plan_api(tmp_path, plan_time_budget_s=0) as plan_api:
        plans = [await plan_api.create_plan_table(predicate="id = 5") for _ in range(3)]
        assert len({plan["name"] for plan in plans}) == 3
        assert [await plan_api.list_files_of_plan(plan["name"]) for plan in plans] == [list(range(30))] * 3


async def test_concurrent_identical_requests_make_one_plan(plan_api: PlanApi, tmp_path: Path) -> None:
    plans = await asyncio.gather(*(plan_api.create_plan_table(predicate="id = 5") for _ in range(20)))
    assert len({plan["name"] for plan in plans}) == 1
    assert len(list_plan_files(tmp_path)) == 3


async def test_concurrent_requests_for_one_plan_leave_one_set_of_files(plan_api: PlanApi, tmp_path: Path) -> None:
    """Requests with different leases are not combined into one, so each of the eight writes the files of the plan.

    The files of a plan are a metadata file, a manifest list and a manifest.
    """
    plans = await asyncio.gather(
        *(plan_api.create_plan_table(predicate="id = 5", **{"lease-s": 100 + number}) for number in range(8))
    )
    (name,) = {plan["name"] for plan in plans}
    assert len(list_plan_files(tmp_path)) == 3
    assert await plan_api.list_files_of_plan(name) == [0]
    assert max(plan["expires-at-ms"] for plan in plans) > plan_api.clock.now_ms() + 100_000


async def test_plan_table_name_is_valid_until_its_lease_ends(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    plan_api.clock.ahead_ms += (LEASE_S - 2) * 1000
    assert (await plan_api("HEAD", f"{STANDARD_TABLES}/{plan['name']}")).status == 204
    tag = (await plan_api("GET", f"{STANDARD_TABLES}/{plan['name']}")).headers["ETag"]
    plan_api.clock.ahead_ms += 2000
    for method, path in (("GET", ""), ("GET", "/credentials"), ("POST", "/plan"), ("POST", "/metrics")):
        answer = await plan_api(method, f"{STANDARD_TABLES}/{plan['name']}{path}", {} if method == "POST" else None)
        assert answer.error[:2] == (404, "NoSuchTableException"), path
    assert (await plan_api("HEAD", f"{STANDARD_TABLES}/{plan['name']}")).status == 404
    answer = await plan_api("GET", f"{STANDARD_TABLES}/{plan['name']}", headers={"If-None-Match": tag})
    assert answer.status == 404


async def test_lease_has_the_requested_length_up_to_the_limit(plan_api: PlanApi) -> None:
    for requested_s, granted_s in ((7, 7), (3600, 3600), (10**6, 3600)):
        plan = await plan_api.create_plan_table(predicate=f"id = {requested_s}", **{"lease-s": requested_s})
        assert abs(plan["expires-at-ms"] - plan_api.clock.now_ms() - granted_s * 1000) < 1000


async def test_requested_plan_is_renewed_after_half_of_its_lease(plan_api: PlanApi, tmp_path: Path) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    files = list_plan_files(tmp_path)
    plan_api.advance_leases(0.4)
    assert await plan_api.create_plan_table(predicate="id = 5") == plan
    plan_api.advance_leases(0.2)
    second_plan = await plan_api.create_plan_table(predicate="id = 5")
    assert second_plan["name"] == plan["name"]
    assert second_plan["expires-at-ms"] >= plan["expires-at-ms"] + 0.5 * LEASE_S * 1000
    plan_api.advance_leases(1.1)
    assert (await plan_api("HEAD", f"{STANDARD_TABLES}/{plan['name']}")).status == 404
    # The plan's files still exist, so another lease reuses them.
    plan_under_a_new_lease = await plan_api.create_plan_table(predicate="id = 5")
    assert plan_under_a_new_lease["name"] == plan["name"]
    assert list_plan_files(tmp_path) == files
    assert await plan_api.list_files_of_plan(plan_under_a_new_lease["name"]) == [0]


async def test_plan_name_can_be_renewed_after_any_change_to_its_table(plan_api: PlanApi, tmp_path: Path) -> None:
    """A waiting statement renews the name, because a repeated request after a commit would make another plan."""
    name = (await plan_api.create_plan_table(predicate="id = 5"))["name"]
    await append_files(plan_api, "t", build_ten_id_files(31)[30:], snapshot_id=2, parent=1)
    assert (await plan_api.create_plan_table(predicate="id = 5", **{"snapshot-id": 1}))["name"] != name
    for _ in range(4):
        plan_api.advance_leases(0.9)
        answer = await plan_api("POST", f"{OWN_TABLES}/{name}/lease", {"lease-s": LEASE_S})
        assert answer.json == {"expires-at-ms": pytest.approx(plan_api.clock.now_ms() + LEASE_S * 1000, abs=5000)}
        assert await plan_api.list_files_of_plan(name) == [0]
    # An expired name is valid again while its files exist.
    plan_api.advance_leases(1.1)
    assert (await plan_api("HEAD", f"{STANDARD_TABLES}/{name}")).status == 404
    assert (await plan_api("POST", f"{OWN_TABLES}/{name}/lease", {})).status == 200
    assert await plan_api.list_files_of_plan(name) == [0]
    plan_api.clock.ahead_ms += (LEASE_S + GRACE_S + 1) * 1000
    await plan_api.server.components.housekeeping.run_round()
    for table_name in (name, UNKNOWN_PLAN_NAME, "t", "nosuch"):
        assert (await plan_api("POST", f"{OWN_TABLES}/{table_name}/lease", {})).error[:2] == (
            404,
            "NoSuchTableException",
        )
    for bad_body in ({"lease-s": 0}, {"lease": 5}, []):
        assert (await plan_api("POST", f"{OWN_TABLES}/{name}/lease", bad_body)).error[:2] == (
            400,
            "BadRequestException",
        )


async def test_files_are_deleted_after_the_lease_and_the_plan_can_be_made_again(
    plan_api: PlanApi, tmp_path: Path
) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    other_plan = await plan_api.create_plan_table(predicate="id = 15", **{"lease-s": 1000})
    plan_api.clock.ahead_ms += (LEASE_S + GRACE_S - 1) * 1000
    assert (await plan_api.server.components.housekeeping.run_round())["plan_tables_cleaned"] == 0
    assert len(list_plan_files(tmp_path)) == 6
    plan_api.clock.ahead_ms += 2000
    assert (await plan_api.server.components.housekeeping.run_round())["plan_tables_cleaned"] == 1
    assert len(list_plan_files(tmp_path)) == 3
    assert await plan_api.list_files_of_plan(other_plan["name"]) == [1]
    assert await plan_api.server.components.store.list_retired_plan_tables(None, 10) == []
    second_plan = await plan_api.create_plan_table(predicate="id = 5")
    assert second_plan["name"] == plan["name"]
    assert await plan_api.list_files_of_plan(second_plan["name"]) == [0]
    assert len(list_plan_files(tmp_path)) == 6


async def test_plan_whose_files_are_about_to_be_deleted_is_made_anew(plan_api: PlanApi, tmp_path: Path) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    plan_files_before = set(list_plan_files(tmp_path))
    plan_api.clock.ahead_ms += (LEASE_S + GRACE_S + 1) * 1000
    objects, delete = plan_api.server.components.objects, plan_api.server.components.objects.delete

    async def plan_again_and_delete(location: str) -> None:
        objects.delete = delete  # type: ignore[method-assign]
        second_plan = await plan_api.create_plan_table(predicate="id = 5")
        assert second_plan["name"] == plan["name"]
        await delete(location)

    objects.delete = plan_again_and_delete  # type: ignore[method-assign]
    assert (await plan_api.server.components.housekeeping.run_round())["plan_tables_cleaned"] == 1
    assert plan_files_before.isdisjoint(list_plan_files(tmp_path))
    assert await plan_api.list_files_of_plan(plan["name"]) == [0]


async def test_plan_table_name_is_valid_only_for_the_table_that_was_planned(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    path = f"{STANDARD_TABLES}/{plan['name']}"
    assert (await plan_api("DELETE", f"{STANDARD_TABLES}/t")).status == 204
    assert (await plan_api("GET", path)).error[:2] == (404, "NoSuchTableException")
    await plan_api.create_table()
    assert (await plan_api("GET", path)).error[:2] == (404, "NoSuchTableException")
    await append_files(plan_api, "t", build_ten_id_files(3), snapshot_id=1)
    new_plan = await plan_api.create_plan_table(predicate="id = 5")
    assert new_plan["name"] != plan["name"]
    assert await plan_api.list_files_of_plan(new_plan["name"]) == [0]
    body = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "moved"}}
    assert (await plan_api("POST", "/v1/tables/rename", body)).status == 204
    assert (await plan_api("GET", f"{STANDARD_TABLES}/{new_plan['name']}")).error[:2] == (404, "NoSuchTableException")
    assert (await plan_api.create_plan_table("moved", predicate="id = 5"))["name"].startswith("moved~plan~")


async def test_plan_table_survives_commits_and_the_expiry_of_its_snapshot(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    await append_files(plan_api, "t", build_ten_id_files(31)[30:], snapshot_id=2, parent=1)
    assert await plan_api.list_files_of_plan(plan["name"]) == [0]
    removal = {"requirements": [], "updates": [{"action": "remove-snapshots", "snapshot-ids": [1]}]}
    assert (await plan_api("POST", f"{STANDARD_TABLES}/t", removal)).status == 200
    assert await plan_api.list_files_of_plan(plan["name"]) == [0]
    answer = await plan_api("POST", f"{OWN_TABLES}/t/plan-tables", {"predicate": "id = 5", "snapshot-id": 1})
    assert "Cannot find snapshot 1" in answer.error[2]


async def test_plan_table_of_a_mixed_case_table_has_a_lower_case_name(plan_api: PlanApi) -> None:
    await plan_api.create_table("Größe T")
    await append_files(plan_api, "Gr%C3%B6%C3%9Fe%20T", build_ten_id_files(3), snapshot_id=1)
    plan = await plan_api.create_plan_table("Gr%C3%B6%C3%9Fe%20T", predicate="id = 15")
    assert plan["name"].startswith("größe t~plan~")
    loaded_table = await plan_api(
        "GET", f"{STANDARD_TABLES}/gr%C3%B6%C3%9Fe%20t~plan~{plan['name'].rpartition('~')[2]}"
    )
    assert list_file_numbers(loaded_table.json) == [1]
    await plan_api.create_table("x" * 250)
    await append_files(plan_api, "x" * 250, build_ten_id_files(3), snapshot_id=1)
    assert (await plan_api.create_plan_table("x" * 250, predicate="id = 15"))["name"] is None, (
        "the name would be too long"
    )


async def test_client_with_server_side_planning_can_plan_a_plan_table(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id < 100")
    answer = await plan_api(
        "POST", f"{STANDARD_TABLES}/{plan['name']}/plan", {"filter": {"type": "gt", "term": "id", "value": 75}}
    )
    file_paths = [task["data-file"]["file-path"][-14:] for task in answer.json["file-scan-tasks"]]
    assert file_paths == ["000007.parquet", "000008.parquet", "000009.parquet"]


async def test_reports_on_a_plan_table_are_stored_for_its_table(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    report = {"report-type": "scan-report", "table-name": "t", "snapshot-id": 1, "filter": True, "metrics": {}}
    assert (await plan_api("POST", f"{STANDARD_TABLES}/{plan['name']}/metrics", report)).status == 204
    assert len((await plan_api("GET", f"{OWN_TABLES}/t/metrics")).json["reports"]) == 1


async def test_plan_tables_are_never_listed(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id = 5")
    assert [identifier["name"] for identifier in (await plan_api("GET", STANDARD_TABLES)).json["identifiers"]] == ["t"]
    assert (await plan_api("GET", "/v1/namespaces/db/views")).json["identifiers"] == []
    assert plan["name"] not in (await plan_api("GET", "/api/v1/timeline")).raw.decode()


async def test_requests_that_change_or_create_a_table_with_a_plan_name_are_rejected(plan_api: PlanApi) -> None:
    name = (await plan_api.create_plan_table(predicate="id = 5"))["name"]
    table_request = {"name": UNKNOWN_PLAN_NAME, "schema": SCHEMA}
    view_request = {**table_request, "view-version": VIEW_VERSION, "properties": {}}
    loaded_table = await plan_api.load("t")
    register_request = {"name": UNKNOWN_PLAN_NAME, "metadata-location": loaded_table["metadata-location"]}
    table_change = {"identifier": {"namespace": ["db"], "name": name}, **build_property_commit(a="b")}
    staged_commit = {"requirements": [{"type": "assert-create"}], "updates": []}

    def build_rename_request(source: str, target: str) -> dict[str, Any]:
        return {
            "source": {"namespace": ["db"], "name": source},
            "destination": {"namespace": ["db"], "name": target},
        }

    requests: list[tuple[str, str, Any]] = [
        ("POST", f"{STANDARD_TABLES}/{name}", build_property_commit(a="b")),
        ("POST", f"{STANDARD_TABLES}/{UNKNOWN_PLAN_NAME}", staged_commit),
        ("DELETE", f"{STANDARD_TABLES}/{name}", None),
        ("DELETE", f"{STANDARD_TABLES}/{name}?purgeRequested=true", None),
        ("POST", f"{STANDARD_TABLES}/{name}/unregister", None),
        ("POST", "/v1/tables/rename", build_rename_request(name, "other")),
        ("POST", "/v1/tables/rename", build_rename_request("t", UNKNOWN_PLAN_NAME)),
        ("POST", "/v1/views/rename", build_rename_request("v", UNKNOWN_PLAN_NAME)),
        ("POST", "/v1/transactions/commit", {"table-changes": [table_change]}),
        ("POST", STANDARD_TABLES, table_request),
        ("POST", STANDARD_TABLES, {**table_request, "name": "x~PLAN~y"}),
        ("POST", STANDARD_TABLES, {**table_request, "stage-create": True}),
        ("POST", "/v1/namespaces/db/register", register_request),
        ("POST", "/v1/namespaces/db/register", {**register_request, "overwrite": True}),
        ("POST", "/v1/namespaces/db/views", view_request),
        ("POST", f"{OWN_TABLES}/{name}/commit", {"add": []}),
        ("PUT", f"{OWN_TABLES}/{name}/indexes/i", {"kind": "bloom", "columns": ["id"]}),
        ("POST", f"{OWN_TABLES}/{name}/indexes/i/builds", {}),
    ]
    for method, path, body in requests:
        code, kind, message = (await plan_api(method, path, body)).error
        assert (code, kind) == (400, "BadRequestException"), (method, path)
        assert "plan table" in message, (method, path)
    assert await plan_api.list_files_of_plan(name) == [0]
    assert [identifier["name"] for identifier in (await plan_api("GET", STANDARD_TABLES)).json["identifiers"]] == ["t"]


async def test_dropped_table_cannot_be_restored_under_a_plan_name(plan_api: PlanApi) -> None:
    assert (await plan_api("DELETE", f"{STANDARD_TABLES}/t")).status == 204
    (dropped_entry,) = (await plan_api("GET", "/api/v1/dropped")).json["dropped"]
    answer = await plan_api("POST", f"/api/v1/dropped/{dropped_entry['id']}/undrop", {"name": UNKNOWN_PLAN_NAME})
    assert answer.error[:2] == (400, "BadRequestException")


async def test_plan_of_a_plan_table_is_rejected(plan_api: PlanApi) -> None:
    plan = await plan_api.create_plan_table(predicate="id < 100")
    answer = await plan_api("POST", f"{OWN_TABLES}/{plan['name']}/plan-tables", {"predicate": "id = 5"})
    assert answer.error[:2] == (404, "NoSuchTableException")


async def test_plan_table_requires_the_same_rights_as_its_table(tmp_path: Path) -> None:
    """A plan table is a read-only table with the files of a scan plan. Its name is `t~plan~` and a digest."""
    secrets, clock = {}, SystemClock()
    grants = {"root": [Grant("root", "admin")], "rita": [Grant("rita", "reader", ("db",))], "nobody": []}
    grants["tess"] = [Grant("tess", "browse", ("db",))]
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, grant in grants.items():
            secrets[name] = await create_token(store, clock, name, ttl_s=None, grants=grant)
        await store.transact([SaveGrant(Grant("tess", "read", ("db",), "table", "t"))])
    async with run_server(tmp_path, auth="token") as server:
        root, rita, nobody, tess = (UserApi(server, secrets[name]) for name in grants)
        await root.create_table()
        await append_files(root, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        answer = await rita("POST", f"{OWN_TABLES}/t/plan-tables", {"predicate": "id = 5"})
        assert answer.status == 200, "a reader's right"
        name = answer.json["name"]
        assert (await rita("GET", f"{STANDARD_TABLES}/{name}")).status == 200
        assert (await rita("POST", f"{OWN_TABLES}/{name}/lease", {})).status == 200
        for method, path, body in (
            ("POST", f"{OWN_TABLES}/t/plan-tables", {"predicate": "id = 5"}),
            ("GET", f"{STANDARD_TABLES}/{name}", None),
            ("GET", f"{STANDARD_TABLES}/{name}/credentials", None),
            ("POST", f"{STANDARD_TABLES}/{name}/plan", {}),
            ("POST", f"{OWN_TABLES}/{name}/lease", {}),
        ):
            refusal = (await nobody(method, path, body)).error
            assert refusal[:2] == (403, "ForbiddenException")
            assert (await tess(method, path, body)).status in (200, 204), "tess may read only the table t"
        error_by_plan = (await nobody("GET", f"{STANDARD_TABLES}/{name}")).error
        assert error_by_plan == (await nobody("GET", f"{STANDARD_TABLES}/t")).error
        assert (await nobody("HEAD", f"{STANDARD_TABLES}/{name}")).status == 403
        # A user without rights does not learn whether the plan exists.
        assert error_by_plan == (await nobody("GET", f"{STANDARD_TABLES}/{UNKNOWN_PLAN_NAME}")).error


async def test_purge_deletes_unknown_files_of_plan_tables(plan_api: PlanApi, tmp_path: Path) -> None:
    await plan_api.create_plan_table(predicate="id = 5")
    (list_plan_files(tmp_path)[0].parent / "left-by-a-crash.avro").write_bytes(b"Obj")
    assert (await plan_api("DELETE", f"{STANDARD_TABLES}/t?purgeRequested=true")).status == 204
    plan_api.clock.ahead_ms += 30 * 86_400_000
    await plan_api.server.components.housekeeping.run_round()
    assert list_plan_files(tmp_path) == []
