"""Tests of repeated requests for plan tables: a cached answer is valid only for the same state of the table."""

from __future__ import annotations

from typing import Any

from tests.api.client import Api
from tests.api.plans.planned import T, append_files, build_ten_id_files

PLAN_TABLES = "/api/v1/tables/db/t/plan-tables"


async def request_plan_table(api: Api, **body: Any) -> dict[str, Any]:
    answer = await api("POST", PLAN_TABLES, body)
    assert answer.status == 200, answer.raw
    answer_body: dict[str, Any] = answer.json
    return answer_body


async def test_declined_request_is_planned_again_after_a_commit(api_with_files: Api) -> None:
    request = {"predicate": "id < 200", "kept-max": 0.5}
    declined_plan = await request_plan_table(api_with_files, **request)
    assert declined_plan["name"] is None
    assert await request_plan_table(api_with_files, **request) == declined_plan
    assert (declined_plan["files"], declined_plan["considered-files"]) == (20, 30)
    await append_files(api_with_files, "t", build_ten_id_files(60)[30:], snapshot_id=2, parent=1)
    answer = await request_plan_table(api_with_files, **request)
    assert (answer["files"], answer["considered-files"], answer["name"] is not None) == (20, 60, True)


async def test_declined_request_is_planned_again_for_a_larger_share_of_files(api_with_files: Api) -> None:
    request = {"predicate": "id < 200"}
    assert (await request_plan_table(api_with_files, **request, **{"kept-max": 0.5}))["name"] is None
    assert (await request_plan_table(api_with_files, **request, **{"kept-max": 0.7}))["name"] is not None
    assert (await request_plan_table(api_with_files, **request))["name"] is not None
    assert (await request_plan_table(api_with_files, **request, **{"kept-max": 0.5}))["name"] is None


async def test_request_is_bound_again_under_another_schema(api_with_files: Api) -> None:
    """Two columns swap their names. The condition then filters the column that has this name in the new schema.

    Under the new schema `id` is a text. A condition that compares it with a number prunes none of the 30 files.
    The texts of each file are from `a` to `z`, so each file can contain `m`.
    """
    request = {"predicate": "id = 5"}
    for _ in range(2):
        assert (await request_plan_table(api_with_files, **request))["files"] == 1
    fields = [
        {"id": 1, "name": "data", "required": True, "type": "long"},
        {"id": 2, "name": "id", "required": False, "type": "string"},
    ]
    schema = {"type": "struct", "schema-id": 1, "fields": fields}
    updates = [{"action": "add-schema", "schema": schema}, {"action": "set-current-schema", "schema-id": -1}]
    assert (await api_with_files("POST", T, {"requirements": [], "updates": updates})).status == 200
    assert (await request_plan_table(api_with_files, **request))["files"] == 30
    assert (await request_plan_table(api_with_files, predicate="data = 5"))["files"] == 1
    assert (await request_plan_table(api_with_files, predicate="id = 'm'"))["files"] == 30
