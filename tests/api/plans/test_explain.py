"""Tests of explain: its counts, its errors, and that it reports the plan that an engine would get."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.api.plans import explain as routes
from tests.api.client import Api
from tests.api.plans.planned import append_files, build_data_file
from tests.planner.lakes.cases import draw_cases
from tests.seeds import examples
from tests.server.rig import run_server

T = "/api/v1/tables/db/t"


@pytest.fixture
async def api_with_table(api: Api) -> Api:
    """Return the API with `db.t`: 20 files in 2 manifests. File n has the ids from 10 n to 10 n + 9."""
    await api.create_table()
    files = [build_data_file(f"file:///t/{n:02d}.parquet", low=10 * n, high=10 * n + 9) for n in range(20)]
    await append_files(api, "t", files, snapshot_id=1, manifests=2)
    return api


async def explain_table(api: Api, path: str = T, **body: Any) -> dict[str, Any]:
    answer = await api("POST", f"{path}/explain", body)
    assert answer.status == 200, answer.raw
    answer_body: dict[str, Any] = answer.json
    return answer_body


async def test_each_stage_reports_its_input_removed_and_remaining_files(api_with_table: Api) -> None:
    explanation = await explain_table(api_with_table, where="id >= 150 AND data < 'm'")
    assert (explanation["files"], explanation["bytes"], explanation["records"], explanation["delete-files"]) == (
        5,
        50_000,
        500,
        0,
    )
    assert explanation["stages"][0] | {"microseconds": 0} == {
        "name": "manifests",
        "files-in": 20,
        "files-removed": 0,
        "files-left": 20,
        "bytes-in": 200_000,
        "bytes-removed": 0,
        "bytes-left": 200_000,
        "microseconds": 0,
        "complete": True,
    }
    for stage, next_stage in zip(explanation["stages"], explanation["stages"][1:], strict=False):
        assert (next_stage["files-in"], next_stage["bytes-in"]) == (stage["files-left"], stage["bytes-left"])
        assert next_stage["files-in"] - next_stage["files-removed"] == next_stage["files-left"]
    assert explanation["stages"][-1]["files-left"] == 5
    assert [column["name"] for column in explanation["columns"]] == ["id", "data"]
    assert explanation["columns"][0] == {"name": "id", "id": 1, "type": "long"}
    assert explanation["not-used"] == []
    assert explanation["residuals"] == [{"residual": explanation["filter"], "files": 5}]
    assert "kept" not in explanation


async def test_remaining_files_are_listed_on_request_up_to_a_limit(api_with_table: Api) -> None:
    explanation = await explain_table(api_with_table, where="id >= 150", files=True, limit=2)
    assert [file["file-path"] for file in explanation["kept"]] == ["file:///t/15.parquet", "file:///t/16.parquet"]
    assert explanation["files"] == 5
    assert (await explain_table(api_with_table, where="id > 900", files=True))["kept"] == []


async def test_sql_without_an_equivalent_expression_is_reported_and_prunes_nothing(api_with_table: Api) -> None:
    explanation = await explain_table(api_with_table, where="id = 5 OR length(data) = 3")
    assert (explanation["files"], explanation["not-used"], explanation["filter"]) == (20, ["LENGTH(data) = 3"], True)
    explanation = await explain_table(api_with_table, where="id = 5 AND length(data) = 3")
    assert (explanation["files"], explanation["not-used"]) == (1, ["LENGTH(data) = 3"])


async def test_explain_accepts_an_iceberg_expression_as_filter(api_with_table: Api) -> None:
    json_filter = {"type": "lt", "term": "ID", "value": 25}
    assert (await explain_table(api_with_table, filter=json_filter, **{"case-sensitive": False}))["files"] == 3
    assert (await explain_table(api_with_table))["files"] == 20
    answer = await api_with_table("POST", f"{T}/explain", {"filter": json_filter})
    assert answer.error[:2] == (400, "BadRequestException")


async def test_any_snapshot_can_be_explained(api_with_table: Api) -> None:
    extra_files = [build_data_file("file:///t/20.parquet", 200, 209)]
    await append_files(api_with_table, "t", extra_files, snapshot_id=2, parent=1)
    assert (await explain_table(api_with_table))["files"] == 21
    assert (await explain_table(api_with_table, **{"snapshot-id": 1}))["snapshot-id"] == 1
    assert (await explain_table(api_with_table, ref="main"))["files"] == 21
    assert (await explain_table(api_with_table, **{"as-of": 99_999_999_999_999}))["files"] == 21


async def test_invalid_explain_requests_are_rejected_with_the_reason(api_with_table: Api) -> None:
    cases: list[tuple[Any, str]] = [
        ({"where": "id ="}, "line 1, column 4"),
        ({"where": ""}, "empty"),
        ({"where": "nope = 1"}, "nope"),
        ({"where": "id = 1", "filter": True}, "has both where and filter"),
        ({"filter": {"type": "resembles", "term": "id"}}, "resembles"),
        ({"filter": None}, "filter"),
        ({"where": 5}, "where"),
        ({"wher": "id = 1"}, "wher"),
        ({"limit": 0}, "limit"),
        ({"ref": "nope"}, "nope"),
        ({"ref": "main", "snapshot-id": 1}, "set one of them"),
    ]
    for body, expected in cases:
        answer = await api_with_table("POST", f"{T}/explain", body)
        assert answer.error[:2] == (400, "BadRequestException"), body
        assert expected in answer.error[2], body


async def test_explain_of_a_table_without_a_snapshot_has_nothing_to_plan(api: Api) -> None:
    await api.create_table()
    explanation = await explain_table(api, where="id = 5", files=True)
    assert (explanation["snapshot-id"], explanation["files"], explanation["kept"], explanation["residuals"]) == (
        None,
        0,
        [],
        [],
    )


@pytest.mark.slow
async def test_long_predicates_and_large_plans_are_explained_off_the_event_loop(
    api_with_table: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_IN_LOOP_FILES_MAX", 0)
    where = " OR ".join(f"id = {number}" for number in range(500))
    assert len(where) > 2_000
    assert (await explain_table(api_with_table, where=where))["files"] == 20


async def test_explain_reports_missing_residuals_beyond_the_partition_limit(
    api_with_table: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "RESIDUAL_PARTITIONS_MAX", 0)
    explanation = await explain_table(api_with_table, where="id = 5")
    assert (explanation["residuals"], explanation["residuals-complete"]) == ([], False)


@pytest.fixture
async def lake_api(tmp_path: Path) -> AsyncIterator[Api]:
    async with run_server(tmp_path / "home", warehouse=tmp_path.as_uri(), plan_inline_limit=1_000_000) as server:
        yield Api(server)


async def test_explain_reports_the_files_that_the_plan_keeps(lake_api: Api, tmp_path: Path) -> None:
    """Compare explanations with plans of the standard route, for random filters on random tables.

    Pruning can keep a file whose residual is false. An explanation lists this file, and a plan leaves it out.
    """
    task_count, seeds = 0, range(300, 300 + examples(30, 6))
    for seed in seeds:
        for case in draw_cases(seed, tmp_path, count=4):
            if case.number == 0:
                body = {"name": f"t{seed}", "metadata-location": case.lake.metadata_location}
                assert (await lake_api("POST", "/v1/namespaces/db/register", body)).status == 200
            request = {"filter": case.filter, "snapshot-id": case.snapshot.id, "case-sensitive": case.case_sensitive}
            plan = await lake_api("POST", f"/v1/namespaces/db/tables/t{seed}/plan", request)
            if plan.status != 200 or case.uses_names_of_snapshot:
                continue
            explanation = await explain_table(lake_api, f"/api/v1/tables/db/t{seed}", **request, files=True, limit=1000)
            tasks = plan.json.get("file-scan-tasks", [])
            planned_paths = {task["data-file"]["file-path"] for task in tasks}
            kept_file_paths = [file["file-path"] for file in explanation["kept"]]
            assert [path for path in kept_file_paths if path in planned_paths] == [
                task["data-file"]["file-path"] for task in tasks
            ]
            files_with_false_residual = sum(
                residual["files"] for residual in explanation["residuals"] if residual["residual"] is False
            )
            assert len(kept_file_paths) == len(planned_paths) + files_with_false_residual
            if not files_with_false_residual:
                assert explanation["delete-files"] == len(plan.json.get("delete-files", [])), case
            residuals: dict[str, int] = {}
            for task in tasks:
                text = json.dumps(task["residual-filter"])
                residuals[text] = residuals.get(text, 0) + 1
            residual_files = {
                json.dumps(residual["residual"]): residual["files"] for residual in explanation["residuals"]
            }
            assert {text: files for text, files in residual_files.items() if text != "false"} == residuals, case
            task_count += len(tasks)
    assert task_count > 6 * len(seeds)  # With fewer scan tasks, the test would have compared little.
