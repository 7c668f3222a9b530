"""Tests of POST /api/v1/aggregate: it returns groups with the rights of the caller, and uses cubes if it can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import pytest_asyncio

from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.open import open_store
from tests.api.client import Answer
from tests.api.sql.test_statements import ARROW, GRANTS, ServerWithTokens, open_server_with_tokens
from tests.connector.lake import append_parts, create_lake_table, open_catalog, spread_ids
from tests.server.rig import run_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
COUNTRY_REQUEST = {
    "namespace": ["db"],
    "table": "t",
    "dimensions": ["country"],
    "measures": ["sum(discount)", "count(*)"],
}


def fill_table(url: str) -> None:
    create_lake_table(url)
    append_parts(url, "db.t", spread_ids(3))
    with closing(IndexClient(url)) as client:
        client.put_index("db.t", "by_country", kind="cube", columns=["country"], measures=["sum(discount)"])
        build(client, "db.t", "by_country", InProcessWorkers())
    append_parts(url, "db.t", [[60, 61, 62]])
    create_lake_table(url, "db.renamed")
    append_parts(url, "db.renamed", [[0, 1]])
    with open_catalog(url) as catalog, catalog.load_table("db.renamed").update_schema() as update:
        update.rename_column("country", "land")
        update.rename_column("id", "country")
    with open_catalog(url) as catalog:
        table = catalog.load_table("db.renamed")
        table.append(pa.table({"country": [2], "land": ["c9"], "discount": [5]}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server_with_tokens(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerWithTokens]:
    """Yield a server with a table of 63 rows in 4 data files, and with a cube that covers 3 of these files."""
    folder: Path = tmp_path_factory.mktemp("aggregates")
    async with run_server(folder) as server:
        await asyncio.to_thread(fill_table, server.url)
    tokens, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{folder}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in ("rita", "olga"):
            grants = [grant for grant in GRANTS if grant.principal == name]
            tokens[name] = await create_token(store, clock, name, ttl_s=None, grants=grants)
    (folder / "tokens.json").write_text(json.dumps(tokens))
    async with open_server_with_tokens(folder) as server_with_tokens:
        yield server_with_tokens


async def request_groups(
    server_with_tokens: ServerWithTokens, body: dict[str, Any], user: str = "rita", **headers: str
) -> Answer:
    login = {"Authorization": f"Bearer {server_with_tokens.tokens[user]}"}
    return await server_with_tokens.api("POST", "/api/v1/aggregate", body, headers={**login, **headers})


async def test_answer_has_the_groups_and_the_number_of_files_that_the_cube_covers(
    server_with_tokens: ServerWithTokens,
) -> None:
    answer = await request_groups(
        server_with_tokens, {**COUNTRY_REQUEST, "order": [{"by": "country", "descending": True}], "limit": 2}
    )
    assert answer.status == 200, answer.raw
    ids = range(63)
    expected_rows = [
        [
            f"c{remainder}",
            sum(id_ % 11 for id_ in ids if id_ % 7 == remainder),
            sum(1 for id_ in ids if id_ % 7 == remainder),
        ]
        for remainder in (6, 5)
    ]
    assert answer.json["rows"] == expected_rows
    assert [column["name"] for column in answer.json["columns"]] == ["country", "sum(discount)", "count(*)"]
    assert answer.json["cube"] == {"index": "by_country", "files": 3, "row-files": 1, "reason": None}
    answer_without_cube = await request_groups(
        server_with_tokens,
        {**COUNTRY_REQUEST, "order": [{"by": "country", "descending": True}], "limit": 2, "cubes": "off"},
    )
    assert answer_without_cube.json["rows"] == expected_rows
    assert answer_without_cube.json["cube"]["reason"] == "the session does not use cubes"


async def test_conditions_snapshots_and_arrow_work_as_in_sql(server_with_tokens: ServerWithTokens) -> None:
    body = {**COUNTRY_REQUEST, "where": "country IN ('c1', 'c2') -- two", "having": "count(*) > 9 AND country <> 'c1'"}
    streamed_answer = await request_groups(server_with_tokens, body, **ARROW)
    assert pa.ipc.open_stream(streamed_answer.raw).read_all()["country"].to_pylist() == []
    count_request = {"namespace": ["db"], "table": "t", "measures": ["count(*)"]}
    loaded_table = (
        await server_with_tokens.api(
            "GET",
            "/v1/namespaces/db/tables/t",
            headers={"Authorization": f"Bearer {server_with_tokens.tokens['rita']}"},
        )
    ).json
    snapshot_ids = [snapshot["snapshot-id"] for snapshot in loaded_table["metadata"]["snapshots"]]
    # Three appends of 20 rows, which the cube covers, and one of three rows, which it does not cover.
    for number, snapshot_id in enumerate(snapshot_ids):
        answer = await request_groups(server_with_tokens, {**count_request, "snapshot-id": snapshot_id})
        assert answer.json["rows"] == [[min(63, 20 * (number + 1))]]
        assert answer.json["cube"]["files"] == min(3, number + 1)
    plan = (await request_groups(server_with_tokens, {**count_request, "explain": True})).json
    assert "rows" not in plan
    assert plan["cube"]["index"] == "by_country"


@pytest.mark.slow
async def test_column_names_of_a_request_belong_to_the_requested_snapshot(server_with_tokens: ServerWithTokens) -> None:
    body = {"namespace": ["db"], "table": "renamed", "measures": ["sum(discount)", "count(*)"]}
    login = {"Authorization": f"Bearer {server_with_tokens.tokens['rita']}"}
    metadata = (await server_with_tokens.api("GET", "/v1/namespaces/db/tables/renamed", headers=login)).json["metadata"]
    first_snapshot, second_snapshot = metadata["snapshots"]
    for version in ({"snapshot-id": first_snapshot["snapshot-id"]}, {"as-of": second_snapshot["timestamp-ms"] - 1}):
        for name, values in ("id", [0, 1]), ("country", ["c0", "c1"]):
            answer = await request_groups(
                server_with_tokens, {**body, **version, "dimensions": [name], "order": [{"by": name}]}
            )
            assert answer.json["rows"] == [[values[0], 0, 1], [values[1], 1, 1]], answer.raw
    for version in ({}, {"ref": "main"}, {"snapshot-id": second_snapshot["snapshot-id"]}):
        answer = await request_groups(
            server_with_tokens, {**body, **version, "dimensions": ["country"], "order": [{"by": "country"}]}
        )
        assert answer.json["rows"] == [[0, 0, 1], [1, 1, 1], [2, 5, 1]], answer.raw


async def test_answer_explains_why_a_cube_was_not_used(server_with_tokens: ServerWithTokens) -> None:
    answer = await request_groups(server_with_tokens, {**COUNTRY_REQUEST, "where": "id < 5"})
    assert answer.status == 200
    assert answer.json["cube"]["index"] is None
    assert "by_country: The column id does not exist" in answer.json["cube"]["reason"]


async def test_request_runs_with_the_rights_of_the_caller(server_with_tokens: ServerWithTokens) -> None:
    refusals = [
        await request_groups(server_with_tokens, {**COUNTRY_REQUEST, "table": name}, "olga")
        for name in ("t", "nothing")
    ]
    assert [answer.status for answer in refusals] == [403, 403]
    assert refusals[0].raw == refusals[1].raw, "the answer does not reveal whether the table exists"


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"measures": []}, "1 to 64 measures"),
        ({"measures": ["median(id)"]}, "begin with one of"),
        ({"measures": ["sum(nope)"]}, "no such column"),
        ({"dimensions": ["lower(country)"]}, "not a dimension"),
        ({"dimensions": ["country", "country"]}, "is repeated"),
        ({"dimensions": ["lookup[db.t@5:1:2:string](country)"]}, "attribute of another table"),
        ({"order": [{"by": "id"}]}, "one of the dimensions or measures"),
        ({"limit": -1}, "limit"),
        ({"namespace": []}, "namespace"),
        ({"namespace": ["a.b"]}, "contains a dot"),
        ({"cubes": "maybe"}, "one of on, exact, off"),
        ({"where": "1 = 1); DELETE FROM db.t WHERE (id = 1"}, "cannot be parsed"),
        ({"snapshot-id": 1}, "snapshot"),
    ],
)
async def test_invalid_request_gets_400_with_the_reason(
    server_with_tokens: ServerWithTokens, change: dict[str, Any], reason: str
) -> None:
    answer = await request_groups(server_with_tokens, {**COUNTRY_REQUEST, **change})
    assert answer.status == 400, answer.raw
    assert reason in answer.json["error"]["message"]


async def test_groups_of_a_cube_are_returned_to_readers_only(server_with_tokens: ServerWithTokens) -> None:
    body = {"definition-id": "x", "columns": ["d0"], "files": ""}
    answers = []
    for user in ("rita", "olga"):
        login = {"Authorization": f"Bearer {server_with_tokens.tokens[user]}"}
        answers.append(await server_with_tokens.api("POST", "/api/v1/tables/db/t/cube-groups", body, headers=login))
    assert [answer.status for answer in answers] == [404, 403]
