"""Tests that Seamark's readers return every acknowledged row of a stream table once, before and after its flush."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import BadRequestError
from pyiceberg.table.snapshots import Operation

import seamark
import seamark.duckdb
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, Unavailable
from seamark.connector.client.values import At
from seamark.connector.read.tables import open_table, plan
from seamark.connector.sql.session import SqlSession
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.metaserver.streams.keys import KEY
from tests.api.plans.planned import JAVA_HEADERS
from tests.seeds import examples, first_seed
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, create_stream_table, open_stream_server

TABLE = ("db", "t")
FRESH = {"header.X-Seamark-Fresh": "true"}


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    """Serve a stream table with one flushed row and two unflushed rows."""
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1, "name": "a"})
        await stream.flush()
        await stream.post({"id": 2, "name": "b"}, {"id": 3, "name": "a"})
        yield stream


def scan_ids(url: str, **options: Any) -> list[int]:
    rows = seamark.scan(SeamarkClient(url), TABLE, ["id"], **options).to_arrow()
    return sorted(rows.column("id").to_pylist())


def query_rows(url: str, statement: str) -> list[tuple[Any, ...]]:
    with SqlSession(url) as session:
        rows = session.sql(statement).to_arrow()
    return sorted(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def query_duckdb_rows(url: str, statement: str) -> list[tuple[Any, ...]]:
    con = seamark.duckdb.connect(url)
    try:
        relation = seamark.duckdb.sql(con, statement)
        return [] if relation is None else sorted(relation.fetchall())  # For an INSERT, DuckDB returns no relation.
    finally:
        con.close()


def read_ids_with_own_plan(url: str) -> list[int]:
    """Return the ids that an engine reads if it plans its scans itself.

    It sends the header that requests rows which are not flushed yet.
    """
    with RestCatalog("fresh", uri=url, **FRESH) as catalog:
        return sorted(catalog.load_table("db.t").scan().to_arrow().column("id").to_pylist())


async def test_all_readers_return_rows_before_their_flush(stream: StreamServer) -> None:
    url = stream.server.url
    join = "SELECT a.id FROM db.t a JOIN db.t b ON a.name = b.name WHERE b.id = 3"

    def read() -> None:
        assert scan_ids(url) == [1, 2, 3]
        assert scan_ids(url, where="name = 'b'") == [2]
        assert query_rows(url, "SELECT count(*), max(id) FROM db.t") == [(3, 3)]
        assert query_rows(url, join) == [(1,), (3,)]
        assert query_duckdb_rows(url, "SELECT id FROM sea.db.t WHERE name = 'b'") == [(2,)]
        assert query_duckdb_rows(url, "SELECT id FROM sea.db.t") == [(1,), (2,), (3,)]
        assert query_duckdb_rows(url, join.replace("db.t", "sea.db.t")) == [(1,), (3,)]
        client = SeamarkClient(url).with_fresh_rows()
        assert client.explain(TABLE, "id > 1").records == 2
        name = client.plan_table(TABLE, "id >= 0").name
        assert name is not None
        opened_table = open_table(client, ("db", name), At())
        assert sum(task.records for task in plan(client, opened_table)) == 3

    await asyncio.to_thread(read)
    await stream.flush()
    await asyncio.to_thread(read)


async def test_read_of_a_snapshot_branch_or_time_has_no_unflushed_rows(stream: StreamServer) -> None:
    url = stream.server.url

    def read() -> None:
        snapshot = open_table(SeamarkClient(url), TABLE, At()).history[0]
        for at in (At(snapshot_id=snapshot.snapshot_id), At(ref="main"), At(as_of_ms=snapshot.timestamp_ms)):
            assert scan_ids(url, at=at) == [1]
        for version in (str(snapshot.snapshot_id), "'main'"):
            assert query_rows(url, f"SELECT id FROM db.t FOR VERSION AS OF {version}") == [(1,)]
        client = SeamarkClient(url).with_fresh_rows()
        assert client.explain(TABLE, at=At(ref="main")).files == 1
        assert client.plan_table(TABLE, at=At(ref="main")).files == 1

    await asyncio.to_thread(read)


@pytest.mark.slow
async def test_scans_of_an_open_table_read_the_same_rows_while_new_rows_arrive(stream: StreamServer) -> None:
    client = SeamarkClient(stream.server.url).with_fresh_rows()

    def count_planned_rows(opened_table: Any) -> int:
        return sum(task.records for task in plan(client, opened_table))

    opened_table = await asyncio.to_thread(open_table, client, TABLE, At())
    assert await asyncio.to_thread(count_planned_rows, opened_table) == 3
    await stream.post({"id": 4, "name": "b"})
    await stream.flush()
    await stream.post({"id": 5, "name": "b"})
    assert await asyncio.to_thread(count_planned_rows, opened_table) == 3
    assert await asyncio.to_thread(client.explain, TABLE, at=At(snapshot_id=opened_table.snapshot_id)) is not None
    assert await asyncio.to_thread(scan_ids, stream.server.url) == [1, 2, 3, 4, 5]
    fresh_snapshots = stream.server.components.streams.snapshots._by_id.values()
    snapshot = next(snapshot for snapshot in fresh_snapshots if snapshot.made_s)
    snapshot.used_s -= 10_000  # The last use was so long ago that the snapshot has expired.
    with pytest.raises(InvalidRequest, match="it has expired; load the table again"):
        await asyncio.to_thread(count_planned_rows, opened_table)


async def test_upsert_and_delete_apply_to_rows_acknowledged_earlier(stream: StreamServer) -> None:
    url = stream.server.url
    assert await asyncio.to_thread(query_rows, url, "UPDATE db.t SET name = 'z' WHERE id = 3") == [(1,)]
    await stream.post({"id": 4, "name": "b"})
    assert await asyncio.to_thread(query_rows, url, "DELETE FROM db.t WHERE name = 'b'") == [(2,)]
    await stream.post({"id": 5, "name": "b"})
    insert_statement = "INSERT INTO db.t SELECT id + 10, name, day FROM db.t WHERE id = 5"
    assert await asyncio.to_thread(query_rows, url, insert_statement) == [(1,)]
    rows = pa.table({"id": pa.array([5], pa.int64()), "name": ["upserted"]})
    await stream.post({"id": 6, "name": "c"})
    report = await asyncio.to_thread(lambda: seamark.upsert(SeamarkClient(url), TABLE, rows, keys=["id"]))
    assert (report.updated, report.inserted) == (1, 0)
    expected = [(1, "a"), (3, "z"), (5, "upserted"), (6, "c"), (15, "b")]
    assert await asyncio.to_thread(query_rows, url, "SELECT id, name FROM db.t") == expected


@pytest.mark.slow
async def test_an_append_of_a_catalog_that_reads_waiting_rows_adds_only_its_rows(stream: StreamServer) -> None:
    url = stream.server.url

    def append(number: int) -> None:
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
        with RestCatalog("fresh", uri=url, **FRESH) as catalog:
            table = catalog.load_table("db.t")
            assert len(table.scan().to_arrow()) >= 3
            table.append(pa.table({"id": [number], "name": ["p"]}, schema=schema))

    await asyncio.to_thread(append, 10)
    assert await stream.ids() == [1, 2, 3, 10]
    status, metadata = await stream.server.get("/v1/namespaces/db/tables/t")
    assert (status, metadata["metadata"]["snapshots"][-1]["summary"]["total-records"]) == (200, "2")
    await stream.flush()
    await stream.post({"id": 4})
    await asyncio.to_thread(append, 11)
    assert await stream.ids() == [1, 2, 3, 4, 10, 11]
    await asyncio.to_thread(query_duckdb_rows, url, "INSERT INTO sea.db.t VALUES (12, 'd', NULL)")
    assert await asyncio.to_thread(read_ids_with_own_plan, url) == [1, 2, 3, 4, 10, 11, 12]
    await stream.flush()
    assert await stream.ids() == [1, 2, 3, 4, 10, 11, 12]


async def test_a_removal_by_a_catalog_that_reads_waiting_rows_is_refused_and_succeeds_when_repeated(
    stream: StreamServer,
) -> None:
    def delete() -> None:
        with RestCatalog("fresh", uri=stream.server.url, **FRESH) as catalog:
            catalog.load_table("db.t").delete("name = 'a'")

    with pytest.raises(BadRequestError, match="run the statement again"):
        await asyncio.to_thread(delete)
    assert await stream.ids() == [1, 2, 3]
    await asyncio.to_thread(delete)
    assert await stream.ids() == [2]


@pytest.mark.slow
async def test_a_transaction_over_several_tables_flushes_rows_before_their_key_changes(stream: StreamServer) -> None:
    await asyncio.to_thread(stream.catalog.create_table, "db.u", SCHEMA)

    def build_change(name: str, updates: dict[str, str]) -> dict[str, Any]:
        identifier = {"namespace": ["db"], "name": name}
        update = {"action": "set-properties", "updates": updates}
        return {"identifier": identifier, "requirements": [], "updates": [update]}

    body = {"table-changes": [build_change("t", {KEY: "id"}), build_change("u", {"a": "b"})]}
    url = f"{stream.server.url}/v1/transactions/commit"
    async with stream.server.http.post(url, json=body) as answer:
        assert answer.status == 204, await answer.text()
    (table,) = stream.server.components.streams.tables.values()
    assert table.unflushed_rows == 0


async def test_a_read_with_a_token_has_the_rows_of_the_token_or_is_refused(stream: StreamServer) -> None:
    url, plan_path = stream.server.url, f"{stream.server.url}/v1/namespaces/db/tables/t/plan"

    def write() -> str:
        with seamark.stream_writer(SeamarkClient(url), TABLE) as writer:
            assert writer.token() == ""
            writer.write({"id": 4})
            return writer.token()

    async def request_plan(token: str) -> tuple[int, str]:
        async with stream.server.http.post(plan_path, json={}, headers={"X-Seamark-After": token}) as answer:
            return answer.status, answer.headers.get("Retry-After", "")

    token = await asyncio.to_thread(write)
    assert await asyncio.to_thread(lambda: scan_ids(url, after=token)) == [1, 2, 3, 4]
    assert await request_plan(token) == (200, "")
    uuid = token.partition("/")[0]
    late_token = f"{uuid}/0:99"
    assert await request_plan(late_token) == (503, "1")
    assert await request_plan(f"00000000-0000-0000-0000-000000000000/0:99 {token}") == (200, "")
    assert (await request_plan("yesterday"))[0] == 400
    with pytest.raises(Unavailable, match="needs the rows up to offset 99"):
        await asyncio.to_thread(lambda: seamark.scan(SeamarkClient(url, retries=0), TABLE, after=late_token))
    path = "/v1/namespaces/db/tables/t"
    assert (await stream.server.get(path, headers={"X-Seamark-After": token}))[0] == 503
    await stream.flush()
    assert (await stream.server.get(path, headers={"X-Seamark-After": token}))[0] == 200
    first_answer = await stream.post({"id": 5}, query="?producer=p&sequence=0")
    second_answer = await stream.post({"id": 5}, query="?producer=p&sequence=0")
    assert first_answer["token"] == second_answer["token"] == f"{uuid}/0:5"


READERS: dict[str, Callable[[str], list[int]]] = {
    "scan": scan_ids,
    "sql": lambda url: [number for (number,) in query_rows(url, "SELECT id FROM db.t")],
    "sql with a join": lambda url: [
        number for (number,) in query_rows(url, "SELECT a.id FROM db.t a JOIN db.t b ON a.id = b.id WHERE b.id >= 0")
    ],
    "duckdb": lambda url: [number for (number,) in query_duckdb_rows(url, "SELECT id FROM sea.db.t")],
    "duckdb with plans": lambda url: [
        number for (number,) in query_duckdb_rows(url, "SELECT id FROM sea.db.t WHERE id >= 0 AND name IN ('a', 'b')")
    ],
    "a client that plans": read_ids_with_own_plan,
}


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(12, number_in_ordinary_runs=1)))
async def test_random_changes_leave_every_reader_with_the_rows_of_the_model(tmp_path: Path, seed: int) -> None:
    rng, last_id = random.Random(seed), 0
    flushed_ids, waiting_ids, ids_by_snapshot = set[int](), set[int](), dict[int, set[int]]()

    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={"format-version": rng.choice(["2", "3"])})
        url, client = stream.server.url, SeamarkClient(stream.server.url)

        def build_rows(numbers: list[int]) -> list[dict[str, Any]]:
            return [{"id": number, "name": "ab"[number % 2]} for number in numbers]

        def apply_change(action: str) -> None:
            nonlocal flushed_ids, waiting_ids
            if action == "append":
                table = pa.table(
                    {"id": pa.array(numbers, pa.int64()), "name": ["ab"[number % 2] for number in numbers]}
                )
                seamark.append(client, TABLE, table)
                flushed_ids |= set(numbers)
            elif action == "delete":
                seamark.delete(client, TABLE, where=f"id < {numbers[0] - 20}")
                flushed_ids = {row_id for row_id in flushed_ids | waiting_ids if row_id >= numbers[0] - 20}
                waiting_ids = set()
            elif action == "update":
                query_rows(url, f"UPDATE db.t SET name = 'b' WHERE id = {numbers[0] - 1}")
                flushed_ids, waiting_ids = flushed_ids | waiting_ids, set()
            elif action == "compact":
                compact(client, TABLE, policy=CompactionPolicy(1 << 20, 2, 1 << 20))
            elif action == "insert":
                query_rows(url, f"INSERT INTO db.t SELECT {numbers[0]}, 'a', NULL FROM db.t LIMIT 1")
                flushed_ids |= {numbers[0]} if flushed_ids | waiting_ids else set()
            elif action == "rollback" and ids_by_snapshot:
                head = rng.choice(sorted(ids_by_snapshot))
                update = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": head}
                client._request_json(
                    "POST", "/v1/namespaces/db/tables/t", {}, {"requirements": [], "updates": [update]}
                )
                flushed_ids = set(ids_by_snapshot[head])

        for _ in range(14):
            action = rng.choice(
                ["post", "post", "flush", "append", "delete", "update", "compact", "insert", "rollback"]
            )
            numbers = list(range(last_id + 1, last_id + 1 + rng.randint(1, 9)))
            last_id = numbers[-1]
            if action == "post" or not (flushed_ids or waiting_ids):
                await stream.post(*build_rows(numbers))
                waiting_ids |= set(numbers)
                if not flushed_ids:
                    await stream.flush()
                    flushed_ids, waiting_ids = waiting_ids, set()
            elif action == "flush":
                if stream.server.components.streams.tables:
                    await stream.flush()
                flushed_ids, waiting_ids = flushed_ids | waiting_ids, set()
            else:
                await asyncio.to_thread(apply_change, action)
            opened_table = await asyncio.to_thread(open_table, client, TABLE, At())
            if opened_table.snapshot_id is not None:
                ids_by_snapshot.setdefault(opened_table.snapshot_id, set(flushed_ids))
                assert ids_by_snapshot[opened_table.snapshot_id] == flushed_ids, action
            for name in rng.sample(sorted(READERS), 2):
                reader_task = asyncio.create_task(asyncio.to_thread(READERS[name], url))
                if rng.random() < 0.3 and stream.server.components.streams.tables:
                    await stream.flush()  # These rows arrive during the read.
                    flushed_ids, waiting_ids = flushed_ids | waiting_ids, set()
                assert await reader_task == sorted(flushed_ids | waiting_ids), (action, name)
            opened_table = await asyncio.to_thread(open_table, client, TABLE, At())
            if opened_table.snapshot_id is not None:
                ids_by_snapshot.setdefault(opened_table.snapshot_id, set(flushed_ids))


async def test_java_client_reads_rows_that_were_acknowledged_before_it_loaded_the_table(stream: StreamServer) -> None:
    """The client names the snapshot that it has loaded.

    Before its plan, a flush and a compaction may replace this snapshot.
    """
    url, http = stream.server.url, stream.server.http
    loaded_table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    assert await stream.flush() == 2
    # With these limits, the compaction merges the two small files.
    policy = CompactionPolicy(target_bytes=1 << 20, min_files=2, small_file_fraction=1 << 20)
    await asyncio.to_thread(compact, SeamarkClient(url), TABLE, policy=policy)
    compacted_table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    assert compacted_table.metadata.snapshots[-1].summary.operation is Operation.REPLACE
    await stream.post({"id": 4})
    for table in (loaded_table, compacted_table):
        body = {"snapshot-id": table.metadata.current_snapshot_id}
        async with http.post(f"{url}/v1/namespaces/db/tables/t/plan", json=body, headers=JAVA_HEADERS) as answer:
            tasks = (await answer.json())["file-scan-tasks"]
        assert sum(task["data-file"]["record-count"] for task in tasks) == 4
