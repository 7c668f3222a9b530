"""Tests of the route that plans an aggregate query over a cube: its groups, its plan table, and what it rejects."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.metaserver.api.plans import cube_plans, plan_tables
from tests.api.client import Answer
from tests.connector.lake import append_parts, create_lake_table, open_catalog
from tests.connector.server_thread import ServerThread

PATH = "/api/v1/tables/db/t/cube-plans"
UNLESS = {"type": "lt", "term": "id", "value": 200}
"""Files that may have a row with this condition are read. File n has the ids from 100 n to 100 n + 9."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """Serve a table of five data files. Its cube covers four files, and the fifth is added after the cube's build."""
    with ServerThread(tmp_path_factory.mktemp("cube_plans")) as server:
        create_lake_table(server.url)
        append_parts(server.url, "db.t", [range(100 * part, 100 * part + 10) for part in range(4)])
        with closing(IndexClient(server.url)) as client, closing(InProcessWorkers()) as workers:
            client.put_index("db.t", "cube", kind="cube", columns=["country"], measures=["sum(discount)"])
            build(client, "db.t", "cube", workers)
        append_parts(server.url, "db.t", [range(400, 410)])
        yield server


@pytest.fixture(scope="module")
def definition_id(server: ServerThread) -> str:
    with closing(IndexClient(server.url)) as client:
        return str(client.index("db.t", "cube").json["definition-id"])


def post_plan(server: ServerThread, body: dict[str, Any], path: str = PATH, **headers: str) -> Answer:
    answer = server.run(server.api("POST", path, body, headers=headers))
    assert isinstance(answer, Answer)
    return answer


def plan_cube(server: ServerThread, body: dict[str, Any], **headers: str) -> tuple[dict[str, Any], pa.Table]:
    answer = post_plan(server, body, **headers)
    assert answer.status == 200, answer.raw
    groups = pa.ipc.open_stream(answer.raw).read_all()
    return json.loads(groups.schema.metadata[b"plan"]), groups


def test_each_file_is_in_the_groups_or_in_the_plan_table(server: ServerThread, definition_id: str) -> None:
    body = {"definition-id": definition_id, "columns": ["d0", "m0"]}
    plan_report, groups = plan_cube(server, body)
    assert (plan_report["covered-files"], plan_report["row-files"], plan_report["considered-files"]) == (4, 1, 5)
    assert sum(groups["m0"].to_pylist()) == 40
    with open_catalog(server.url) as catalog:
        rows = catalog.load_table(f"db.{plan_report['name']}").scan().to_arrow()
    assert sorted(rows["id"].to_pylist()) == list(range(400, 410))
    second_plan, _ = plan_cube(server, body)
    assert second_plan["name"] != plan_report["name"], "the covered files may differ, so the plan table is not shared"


def test_files_that_the_filter_excludes_are_in_neither(server: ServerThread, definition_id: str) -> None:
    body = {"definition-id": definition_id, "columns": ["m0"], "predicate": "id BETWEEN 100 AND 250"}
    plan_report, groups = plan_cube(server, body)
    assert (plan_report["covered-files"], plan_report["row-files"], plan_report["name"]) == (2, 0, None)
    assert sum(groups["m0"].to_pylist()) == 20


def test_files_with_rows_that_match_the_unless_filter_are_read(server: ServerThread, definition_id: str) -> None:
    body = {"definition-id": definition_id, "columns": ["m0"], "unless": UNLESS}
    plan_report, groups = plan_cube(server, body)
    assert (plan_report["covered-files"], plan_report["row-files"]) == (2, 3)
    body["filter"] = {"type": "gt-eq", "term": "id", "value": 205}
    plan_report, groups = plan_cube(server, body)
    assert (plan_report["covered-files"], plan_report["row-files"]) == (2, 1)
    assert sum(groups["m0"].to_pylist()) == 20
    body["unless"] = {"type": "lt", "term": "id", "value": 205}
    assert plan_cube(server, body)[0]["covered-files"] == 1, (
        "the opposite of the filter is not restricted by the filter"
    )


@pytest.mark.parametrize("field", ["predicate", "filter", "unless"])
def test_long_condition_is_read_outside_of_the_event_loop(
    server: ServerThread, definition_id: str, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    threads, read_filter = list[str](), plan_tables.read_filter

    def record_thread(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read_filter(*arguments)

    monkeypatch.setattr(cube_plans, "read_filter", record_thread)
    ids = list(range(1000, 1200))
    condition = {"type": "in", "term": "id", "values": ids}
    text = f"id IN ({', '.join(map(str, ids))})"
    body = {"definition-id": definition_id, "columns": ["m0"]}
    plan_cube(server, {**body, field: text if field == "predicate" else condition})
    loop_thread = server.run(_get_thread_name())
    assert threads[-1] != loop_thread
    threads.clear()
    plan_cube(server, {**body, "predicate": "id < 100"})
    assert threads == [loop_thread], "a short condition is read at once"


async def _get_thread_name() -> str:
    return threading.current_thread().name


def test_request_with_the_plans_header_gets_a_snapshot_id_instead_of_a_name(
    server: ServerThread, definition_id: str
) -> None:
    """With the header `X-Seamark-Plans`, the stored plan is a snapshot of the table and not a table with a name."""
    body = {"definition-id": definition_id, "columns": ["m0"]}
    plan_report, _ = plan_cube(server, body, **{"X-Seamark-Plans": "engines"})
    assert plan_report["name"] is None
    table_snapshot_id_max = 1 << 32  # The table's own snapshots have smaller ids.
    assert plan_report["plan-snapshot-id"] > table_snapshot_id_max


def test_plan_states_why_the_cube_is_not_used(server: ServerThread, definition_id: str) -> None:
    body = {"definition-id": definition_id, "columns": ["d0"], "groups-max": 1}
    plan_report, groups = plan_cube(server, body)
    assert plan_report["reason"] == "the answer has 7 groups; the maximum is 1"
    assert groups.num_rows == 0
    body = {"definition-id": definition_id, "columns": ["d0"], "predicate": "id >= 400"}
    assert plan_cube(server, body)[0]["reason"] == "the cube has no entry of a file of the plan"


def test_cube_that_saves_few_rows_is_not_used(
    server: ServerThread, definition_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cube_plans, "CUBE_UNCHECKED_ROWS_MAX", 0)
    body = {"definition-id": definition_id, "columns": ["m0"]}
    assert plan_cube(server, body)[0]["row-files"] == 1
    assert plan_cube(server, {**body, "predicate": "id BETWEEN 300 AND 409"})[0]["row-files"] == 1
    plan_report, groups = plan_cube(server, {**body, "unless": {"type": "lt", "term": "id", "value": 300}})
    assert plan_report["reason"] == "the cube covers too few rows: 40 of 50 rows would still be read"
    assert groups.num_rows == 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"definition-id": "other", "columns": ["m0"]}, 404, "has no cube with this definition-id"),
        ({"columns": ["m0", "d0"]}, 400, "columns must be some of d0, m0, m1 in this order"),
        ({"columns": ["m0"], "groups-max": 0}, 400, "groups-max is 0; it must be from 1 to"),
        ({"columns": ["m0"], "lease-s": 0}, 400, "lease"),
        ({"columns": ["m0"], "predicate": "id ="}, 400, "The predicate is not valid SQL"),
        ({"columns": ["m0"], "unless": {"type": "lt", "term": "gone", "value": 1}}, 400, "gone"),
        ({"columns": ["m0"], "unless": {}, "filter": True, "predicate": "id = 1"}, 400, "both predicate and filter"),
    ],
)
def test_invalid_request_is_refused(
    server: ServerThread, definition_id: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = post_plan(server, {"definition-id": definition_id, **body})
    assert (answer.status, message in answer.error[2]) == (status, True), answer.raw
