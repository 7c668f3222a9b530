"""Tests of plan views made with `X-Seamark-Plans`: only their user can read them, until they are withdrawn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.client import build_property_commit
from tests.api.plans.test_plan_snapshots import HEADER_OF_ANOTHER_ENGINE, PLANS_HEADER, make_plan, request_lease
from tests.api.plans.test_plan_tables import PlanApi, open_plan_api
from tests.api.plans.test_plan_views import (
    OUTER_VIEW_TEXT,
    OWN_VIEWS,
    OWNER_PROPERTIES,
    TABLE_POSITION,
    TEXT,
    VIEWS,
    build_version,
    read_text,
)

GUARD = "IF(current_user = 'o''hara', TRUE, CAST('this plan belongs to another user' AS BOOLEAN))"


@pytest.fixture
async def plan_api(tmp_path: Path) -> AsyncIterator[PlanApi]:
    async with open_plan_api(tmp_path) as plan_api:
        await plan_api.view(**{"view-version": build_version()}, properties=OWNER_PROPERTIES)
        yield plan_api


async def build_view_request(plan_api: PlanApi, **fields: Any) -> dict[str, Any]:
    plan_snapshot_id = (await make_plan(plan_api))["plan-snapshot-id"]
    location = (await plan_api("GET", f"{VIEWS}/v")).json["metadata-location"]
    table = {
        "start": TABLE_POSITION,
        "end": TABLE_POSITION + 1,
        "table": ["db", "t"],
        "plan-snapshot-id": plan_snapshot_id,
    }
    return {"metadata-location": location, "predicate": '"id" = 5', "tables": [table], "reader": "o'hara", **fields}


async def make_plan_view(plan_api: PlanApi, **fields: Any) -> dict[str, Any]:
    answer = await plan_api(
        "POST", f"{OWN_VIEWS}/v/plan-views", await build_view_request(plan_api, **fields), headers=PLANS_HEADER
    )
    assert answer.status == 200, answer.raw
    body: dict[str, Any] = answer.json
    return body


async def test_plan_view_reads_table_versions_and_shows_its_rows_to_one_user(plan_api: PlanApi) -> None:
    body = await build_view_request(plan_api)
    answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body, headers=PLANS_HEADER)
    loaded_view = (await plan_api("GET", f"{VIEWS}/{answer.json['name']}", headers=PLANS_HEADER)).json
    plan_snapshot_id = body["tables"][0]["plan-snapshot-id"]
    text = TEXT.replace(" t ", f" t FOR VERSION AS OF {plan_snapshot_id} ", 1)
    assert read_text(loaded_view) == f'SELECT * FROM (\n{text}\n) AS "v" WHERE {GUARD} AND ("id" = 5\n)'
    assert loaded_view["metadata"]["properties"] == OWNER_PROPERTIES


async def test_plan_view_name_resolves_only_with_its_header_until_it_is_withdrawn(plan_api: PlanApi) -> None:
    plan = await make_plan_view(plan_api)
    path = f"{VIEWS}/{plan['name']}"
    for headers, status in ((PLANS_HEADER, 200), (HEADER_OF_ANOTHER_ENGINE, 404), ({}, 404)):
        assert (await plan_api("GET", path, headers=headers)).status == status
        assert (await plan_api("HEAD", path, headers=headers)).status == (204 if status == 200 else 404)
        lease = await plan_api("POST", f"/api/v1/tables/db/{plan['name']}/lease", {}, headers=headers)
        assert lease.status == 404
    body = {"snapshot-ids": [plan["plan-snapshot-id"]], "lease-s": 0}
    answer = await plan_api("POST", "/api/v1/tables/db/v/plan-snapshots", body, headers=PLANS_HEADER)
    assert answer.json == {"found": 1}
    assert (await plan_api("GET", path, headers=PLANS_HEADER)).status == 404
    assert (await make_plan_view(plan_api))["name"] == plan["name"]
    assert (await plan_api("GET", path, headers=PLANS_HEADER)).status == 200
    plan_api.advance_leases(1.1)
    assert (await plan_api("GET", path, headers=PLANS_HEADER)).status == 404


async def test_each_user_and_each_holder_has_a_separate_plan_view(plan_api: PlanApi) -> None:
    names = {
        (await make_plan_view(plan_api, reader=reader, holder=holder))["name"]
        for reader in ("anna", "Anna", "rita")
        for holder in ("a", "b")
    }
    assert len(names) == 6
    assert (await make_plan_view(plan_api, reader="anna", holder="a"))["name"] in names


async def test_plan_view_requires_the_current_view_and_plans_that_are_shown(plan_api: PlanApi) -> None:
    plan, body = await make_plan_view(plan_api), await build_view_request(plan_api)
    assert (await plan_api("POST", f"{VIEWS}/v", build_property_commit(comment="another"))).status == 200
    assert (await plan_api("GET", f"{VIEWS}/{plan['name']}", headers=PLANS_HEADER)).status == 404
    assert (await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body, headers=PLANS_HEADER)).status == 404
    body = await build_view_request(plan_api)
    await request_lease(plan_api, [body["tables"][0]["plan-snapshot-id"]], 0)
    assert (await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body, headers=PLANS_HEADER)).status == 404


async def test_plan_view_checks_all_columns_of_an_inner_view(plan_api: PlanApi) -> None:
    await plan_api.view("w", **{"view-version": build_version(OUTER_VIEW_TEXT)})
    inner_name = (await make_plan_view(plan_api))["name"]
    location = (await plan_api("GET", f"{VIEWS}/w")).json["metadata-location"]
    position = OUTER_VIEW_TEXT.index("db.")
    table = {"start": position, "end": position + len('db."V"'), "plan": ["db", inner_name], "alias": True}
    body = {"metadata-location": location, "predicate": "id > 4", "tables": [table], "reader": "o'hara"}
    answer = await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body, headers=PLANS_HEADER)
    assert answer.status == 200, answer.raw
    text = read_text((await plan_api("GET", f"{VIEWS}/{answer.json['name']}", headers=PLANS_HEADER)).json)
    assert text.startswith('WITH "~0" AS (SELECT "id", "data" FROM db."V" WHERE FALSE) SELECT * FROM (\n')
    assert f'db."{inner_name}" AS "V"' in text
    assert GUARD in text


async def test_contradictory_parts_of_a_request_are_rejected(plan_api: PlanApi) -> None:
    valid_body = await build_view_request(plan_api)
    (table,) = valid_body["tables"]
    name = (await plan_api.create_plan_table(predicate="id = 5"))["name"]
    body_without_reader = {key: value for key, value in valid_body.items() if key != "reader"}
    wrong_requests: list[tuple[dict[str, Any], dict[str, str], int]] = [
        (valid_body, {}, 400),
        (body_without_reader, PLANS_HEADER, 400),
        ({**valid_body, "reader": ""}, PLANS_HEADER, 400),
        ({**valid_body, "tables": [{**table, "plan": ["db", name]}]}, PLANS_HEADER, 400),
        ({**valid_body, "tables": [{**table, "table": ["t"]}]}, PLANS_HEADER, 400),
        ({**valid_body, "tables": [{**table, "plan-snapshot-id": 1}]}, PLANS_HEADER, 404),
        ({**valid_body, "tables": [{**table, "table": ["db", "v"]}]}, PLANS_HEADER, 404),
        (
            {**valid_body, "tables": [{"start": TABLE_POSITION, "end": TABLE_POSITION + 1, "plan": ["db", name]}]},
            PLANS_HEADER,
            404,
        ),
        (
            {**valid_body, "tables": [{**table, "start": TABLE_POSITION + 1, "end": TABLE_POSITION + 2}]},
            PLANS_HEADER,
            400,
        ),
        (valid_body, HEADER_OF_ANOTHER_ENGINE, 404),
    ]
    for body, headers, status in wrong_requests:
        answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body, headers=headers)
        assert answer.error[0] == status, (body, headers, answer.raw)
