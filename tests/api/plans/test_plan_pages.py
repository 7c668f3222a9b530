"""Tests of plans in pages: plan tasks contain every file once, on every replica, after any commits and expirations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest
from seamark.metaserver.store.model import Entry
from tests.api.client import SCHEMA, Answer, Api
from tests.api.plans.planned import PYICEBERG, T, append_files, build_ten_id_files, list_planned_numbers, read_all_pages
from tests.server.rig import run_server


@pytest.fixture
async def paging_api(tmp_path: Path) -> AsyncIterator[Api]:
    """Yield an API whose `db.t` has 30 files. The server splits an answer of more than 2 files into pages of 4."""
    async with run_server(tmp_path, plan_inline_limit=2, plan_page_size=4) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        yield api


async def test_plan_tasks_cover_each_file_once_when_files_exceed_one_answer(paging_api: Api) -> None:
    whole_plan = await paging_api("POST", f"{T}/plan", {})
    assert whole_plan.json["file-scan-tasks"] == []
    assert len(whole_plan.json["plan-tasks"]) == 8
    assert await read_all_pages(paging_api, whole_plan) == list(range(30))
    answer = await paging_api("POST", f"{T}/plan", {"filter": {"type": "gt-eq", "term": "id", "value": 200}})
    assert len(answer.json["plan-tasks"]) == 3
    assert await read_all_pages(paging_api, answer) == list(range(20, 30))
    small_plan = await paging_api("POST", f"{T}/plan", {"filter": {"type": "gt-eq", "term": "id", "value": 280}})
    assert "plan-tasks" not in small_plan.json
    assert list_planned_numbers(small_plan) == [28, 29]


async def test_every_page_follows_the_options_for_residuals_and_sequence_numbers(paging_api: Api) -> None:
    """Seamark's client requests tasks without residuals and with data sequence numbers.

    Other clients receive the fields of the Iceberg REST specification: residuals, and no data sequence numbers.
    """
    filter_body = {"filter": {"type": "gt", "term": "id", "value": 5}}
    for is_seamark, options in ((True, {"seamark": {"residuals": False, "sequence-numbers": True}}), (False, {})):
        whole_plan = await paging_api("POST", f"{T}/plan", {**filter_body, **options})
        pages = [
            await paging_api("POST", f"{T}/tasks", {"plan-task": token}) for token in whole_plan.json["plan-tasks"]
        ]
        tasks = [task for page in pages for task in page.json["file-scan-tasks"]]
        assert len(tasks) == 30
        assert all(("residual-filter" in task) is not is_seamark for task in tasks)
        assert {task["data-file"].get("data-sequence-number") for task in tasks} == {1 if is_seamark else None}
    refusal = await paging_api("POST", f"{T}/plan", {"seamark": {"residuals": "no"}})
    assert refusal.error[:2] == (400, "BadRequestException")


async def test_later_commits_do_not_change_the_pages_of_a_plan(paging_api: Api) -> None:
    whole_plan = await paging_api("POST", f"{T}/plan", {"filter": {"type": "gt-eq", "term": "id", "value": 100}})
    await append_files(paging_api, "t", build_ten_id_files(60)[30:], snapshot_id=2, parent=1)
    renamed_schema = {**SCHEMA, "schema-id": 1, "fields": [{**SCHEMA["fields"][0], "name": "key"}, SCHEMA["fields"][1]]}
    other_field = {"id": 3, "name": "id", "required": False, "type": "string"}
    renamed_schema["fields"].append(other_field)
    change = {
        "requirements": [],
        "updates": [
            {"action": "add-schema", "schema": renamed_schema},
            {"action": "set-current-schema", "schema-id": -1},
        ],
    }
    assert (await paging_api("POST", T, change)).status == 200
    assert await read_all_pages(paging_api, whole_plan) == list(range(10, 30))


async def test_any_replica_answers_a_plan_task(tmp_path: Path) -> None:
    settings = {"plan_inline_limit": 2, "plan_page_size": 10}
    async with run_server(tmp_path, **settings) as first_server, run_server(tmp_path, **settings) as second_server:
        first_api, second_api = Api(first_server), Api(second_server)
        await first_api.create_table()
        await append_files(first_api, "t", build_ten_id_files(30), snapshot_id=1)
        whole_plan = await first_api("POST", f"{T}/plan", {})
        assert await read_all_pages(second_api, whole_plan) == list(range(30))


async def test_replica_that_prunes_fewer_files_answers_pages_without_loss(
    paging_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica without enough time keeps files that other replicas prune.

    For this reason, a page is a range of all files of the snapshot, and not of the files that a plan keeps.
    """
    filter_body = {"filter": {"type": "in", "term": "id", "values": [15, 95, 105, 185, 255]}}
    whole_plan = await paging_api("POST", f"{T}/plan", filter_body)
    assert await read_all_pages(paging_api, whole_plan) == [1, 9, 10, 18, 25]
    plan = Planner.plan

    async def plan_without_pruning(self: Planner, bound_scan: BoundScan, entry: Entry) -> Any:
        unfiltered_scan = BoundScan.bind(bound_scan.metadata, ScanRequest(snapshot_id=bound_scan.options.snapshot_id))
        return await plan(self, unfiltered_scan, entry)

    monkeypatch.setattr(Planner, "plan", plan_without_pruning)
    assert await read_all_pages(paging_api, whole_plan) == list(range(30))


async def test_plan_task_is_valid_for_its_table_while_its_snapshot_exists(paging_api: Api) -> None:
    token = (await paging_api("POST", f"{T}/plan", {})).json["plan-tasks"][0]
    await paging_api.create_table("u")
    await append_files(paging_api, "u", build_ten_id_files(3), snapshot_id=1)
    other_answer = await paging_api("POST", "/v1/namespaces/db/tables/u/tasks", {"plan-task": token})
    assert other_answer.error[:2] == (404, "NoSuchPlanTaskException")
    await append_files(paging_api, "t", build_ten_id_files(3), snapshot_id=2)
    await expire_snapshots(paging_api, 1)
    answer_after_expiration = await paging_api("POST", f"{T}/tasks", {"plan-task": token})
    assert answer_after_expiration.error[:2] == (404, "NoSuchPlanTaskException")
    assert "expired" in answer_after_expiration.error[2]


async def expire_snapshots(api: Api, *snapshot_ids: int) -> None:
    removal = {"requirements": [], "updates": [{"action": "remove-snapshots", "snapshot-ids": list(snapshot_ids)}]}
    assert (await api("POST", T, removal)).status == 200


async def test_pages_of_an_incremental_scan_work_after_its_start_expired(paging_api: Api) -> None:
    """The start snapshot is exclusive. After it expires, scans from this snapshot and their pages continue to work."""
    await append_files(paging_api, "t", build_ten_id_files(60)[30:], snapshot_id=2, parent=1)
    snapshot_range = {"start-snapshot-id": 1, "end-snapshot-id": 2}
    plan_before = await paging_api("POST", f"{T}/plan", snapshot_range)
    await expire_snapshots(paging_api, 1)
    assert await read_all_pages(paging_api, plan_before) == list(range(30, 60))
    assert await read_all_pages(paging_api, await paging_api("POST", f"{T}/plan", snapshot_range)) == list(
        range(30, 60)
    )


async def test_pages_of_an_incremental_scan_lose_no_file_when_snapshots_expire(paging_api: Api) -> None:
    """A scan without a start begins with the oldest snapshot. The expiry of that snapshot must not change the pages."""
    await append_files(paging_api, "t", build_ten_id_files(60)[30:], snapshot_id=2, parent=1)
    await append_files(paging_api, "t", build_ten_id_files(90)[60:], snapshot_id=3, parent=2)
    whole_plan = await paging_api("POST", f"{T}/plan", {"end-snapshot-id": 3})
    assert await read_all_pages(paging_api, whole_plan) == list(range(90))
    await expire_snapshots(paging_api, 1)
    for token in whole_plan.json["plan-tasks"]:
        answer = await paging_api("POST", f"{T}/tasks", {"plan-task": token})
        assert answer.error[:2] == (404, "NoSuchPlanTaskException")
    later_plan = await paging_api("POST", f"{T}/plan", {"end-snapshot-id": 3})
    assert await read_all_pages(paging_api, later_plan) == list(range(30, 90))
    await expire_snapshots(paging_api, 2)
    for token in later_plan.json["plan-tasks"]:
        answer = await paging_api("POST", f"{T}/tasks", {"plan-task": token})
        assert answer.error[:2] == (404, "NoSuchPlanTaskException")


@pytest.mark.slow
async def test_filter_too_long_for_tokens_is_answered_in_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.planner.scan.tokens.TOKENS_BYTES_MAX", 2_000)
    async with run_server(tmp_path, plan_inline_limit=2, plan_page_size=4) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1)
        long_answer = await api("POST", f"{T}/plan", {"filter": LONG_IN_FILTER})
        assert "plan-tasks" not in long_answer.json
        assert list_planned_numbers(long_answer) == list(range(30))


JAVA_HEADERS = {"X-Client-Version": "Apache Iceberg 1.12.0"}
SHORT_RESIDUALS = {"X-Seamark-Residuals": "short"}
LONG_IN_FILTER = {"type": "in", "term": "id", "values": [n * 7919 % 10_007 for n in range(2_000)]}
"""A filter whose values are in no order, because a plan task has compressed values."""


RESIDUAL_BYTES = 50_000


async def fetch_tasks(api: Api, answer: Answer, headers: dict[str, str]) -> list[Any]:
    """Return the scan tasks of an answer and, recursively, of its plan tasks.

    Check that the residuals of each answer with several tasks have at most about `RESIDUAL_BYTES` bytes. `json.dumps`
    adds spaces to the server's text, for which the check allows a fifth more.
    """
    assert answer.status == 200, answer.raw
    file_scan_tasks = answer.json["file-scan-tasks"]
    assert (
        len(file_scan_tasks) < 2
        or sum(len(json.dumps(file_scan_task["residual-filter"])) for file_scan_task in file_scan_tasks)
        < 1.2 * RESIDUAL_BYTES
    )
    for token in answer.json.get("plan-tasks", []):
        page = await api("POST", f"{T}/tasks", {"plan-task": token}, headers=headers)
        file_scan_tasks = file_scan_tasks + await fetch_tasks(api, page, headers)
    return file_scan_tasks


@pytest.fixture
async def api_with_small_pages(tmp_path: Path) -> AsyncIterator[Api]:
    """Yield an API whose answers have space for about three residuals of `LONG_IN_FILTER`."""
    async with run_server(tmp_path, plan_residual_bytes=RESIDUAL_BYTES) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1)
        yield api


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "headers", [JAVA_HEADERS, {"X-Seamark-Residuals": "exact"}, {**JAVA_HEADERS, "X-Seamark-Residuals": "Exact"}]
)
async def test_client_that_filters_only_by_residuals_gets_complete_residuals_on_smaller_pages(
    api_with_small_pages: Api, headers: dict[str, str]
) -> None:
    whole_plan = await api_with_small_pages("POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers=headers)
    assert len(whole_plan.json["plan-tasks"]) > 5
    tasks = await fetch_tasks(api_with_small_pages, whole_plan, headers)
    assert [Path(task["data-file"]["file-path"]).stem for task in tasks] == [f"{n:06d}" for n in range(30)]
    assert all(task["residual-filter"] == {**LONG_IN_FILTER, "values": ANY} for task in tasks)
    assert all(sorted(task["residual-filter"]["values"]) == sorted(LONG_IN_FILTER["values"]) for task in tasks)


async def test_client_that_filters_rows_again_gets_short_residuals_in_one_answer(api_with_small_pages: Api) -> None:
    for headers, residual_type in (
        ({**JAVA_HEADERS, **SHORT_RESIDUALS}, "and"),
        (PYICEBERG, "and"),
        (SHORT_RESIDUALS, None),
        ({}, None),
    ):
        answer = await api_with_small_pages("POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers=headers)
        assert list_planned_numbers(answer) == list(range(30))
        residuals = [task.get("residual-filter") for task in answer.json["file-scan-tasks"]]
        assert {residual and residual["type"] for residual in residuals} == {residual_type}
    # Java's client needs the complete residuals, so it gets an answer with pages, and not the cached answer.
    second_answer = await api_with_small_pages("POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers=JAVA_HEADERS)
    assert "plan-tasks" in second_answer.json


async def test_plan_tasks_with_short_residuals_are_split_when_fetched_with_complete_residuals(tmp_path: Path) -> None:
    async with run_server(tmp_path, plan_residual_bytes=RESIDUAL_BYTES, plan_inline_limit=2) as server:
        api = Api(server)
        await api.create_table()
        await append_files(api, "t", build_ten_id_files(30), snapshot_id=1)
        short_answer = await api(
            "POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers={**JAVA_HEADERS, **SHORT_RESIDUALS}
        )
        assert len(short_answer.json["plan-tasks"]) == 2
        tasks = await fetch_tasks(api, short_answer, JAVA_HEADERS)
        assert len(tasks) == len({task["data-file"]["file-path"] for task in tasks}) == 30
        assert {task["residual-filter"]["type"] for task in tasks} == {"in"}


async def test_plan_task_too_large_for_one_answer_is_split_again(
    api_with_small_pages: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.planner.scan.tokens.TOKENS_BYTES_MAX", 20_000)
    whole_plan = await api_with_small_pages("POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers=JAVA_HEADERS)
    assert 2 <= len(whole_plan.json["plan-tasks"]) < 5
    tasks = await fetch_tasks(api_with_small_pages, whole_plan, JAVA_HEADERS)
    assert len(tasks) == len({task["data-file"]["file-path"] for task in tasks}) == 30


@pytest.mark.slow
async def test_filter_too_long_for_plan_tasks_and_exact_residuals_is_rejected_with_advice(
    api_with_small_pages: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.planner.scan.tokens.TOKENS_BYTES_MAX", 2_000)
    refusal = await api_with_small_pages("POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers=JAVA_HEADERS)
    assert refusal.error[:2] == (400, "BadRequestException")
    assert all(advice in refusal.error[2] for advice in ("X-Seamark-Residuals: short", "scan-planning-mode=client"))
    assert list_planned_numbers(
        await api_with_small_pages(
            "POST", f"{T}/plan", {"filter": LONG_IN_FILTER}, headers={**JAVA_HEADERS, **SHORT_RESIDUALS}
        )
    ) == list(range(30))


async def test_unknown_value_of_the_residuals_header_is_rejected(paging_api: Api) -> None:
    refusal = await paging_api("POST", f"{T}/plan", {}, headers={"X-Seamark-Residuals": "brief"})
    assert refusal.error[:2] == (400, "BadRequestException")
    assert "'brief'" in refusal.error[2]
