"""Tests of the OpenLineage events of statements: valid, without literals, and with the tables that were read."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.sql.session import SqlSession
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.types.schema import Field, MapType, Schema, StructType
from seamark.metaserver.timeline import statement_lineage
from seamark.metaserver.timeline.lineage import CatalogName, measure_schema
from seamark.metaserver.timeline.statement_lineage import (
    RUNS_MAX,
    StatementRun,
    StatementRuns,
    make_input,
    name_statement_job,
    remove_literals,
)
from tests.api.client import Api
from tests.api.sql.test_statements import LONG_STATEMENT
from tests.connector.lake import append_parts, create_lake_table, spread_ids
from tests.server.rig import RunningServer, run_server
from tests.timeline.test_lineage import validate_event
from tests.timeline.test_webhooks import Receiver, run_receiver
from tests.waits import PATIENCE_S


async def run_sql(server: RunningServer, statement: str, **options: Any) -> int:
    answer = await Api(server)("POST", "/api/v1/sql", {"statement": statement, **options})
    return answer.status


async def cancel_running_statement(server: RunningServer) -> None:
    statement_task = asyncio.create_task(run_sql(server, LONG_STATEMENT, id="long"))
    async with asyncio.timeout(PATIENCE_S):
        while (await Api(server)("DELETE", "/api/v1/sql/long")).status != 204:
            await asyncio.sleep(0.02)
    assert await statement_task == 400


def list_outcomes(receiver: Receiver) -> list[tuple[str, str, int]]:
    """Return (type, error, number of inputs) of the event that ends each run.

    Check that the received events are pairs of a START and an end of the same run, job and inputs.
    """
    outcomes = []
    for start, end in zip(receiver.events[::2], receiver.events[1::2], strict=True):
        assert (start["eventType"], start["run"]["runId"]) == ("START", end["run"]["runId"])
        assert start["job"] == end["job"]
        assert start["inputs"] == end["inputs"]
        error = end["run"]["facets"].get("errorMessage", {"message": ""})["message"]
        outcomes.append((end["eventType"], error, len(end["inputs"])))
    return outcomes


async def test_statements_are_sent_as_valid_runs_without_literals(tmp_path: Path) -> None:
    async with (
        run_receiver() as receiver,
        run_server(tmp_path, openlineage_url=f"{receiver.url}/lineage", openlineage_namespace="lake") as server,
    ):
        await asyncio.to_thread(create_lake_table, server.url)
        await asyncio.to_thread(append_parts, server.url, "db.t", spread_ids(1))
        receiver.answers = [503]
        assert await run_sql(server, "SELECT count(*) FROM db.t WHERE id > 41 -- hunter2") == 200
        assert await run_sql(server, "select COUNT(*)  from db.t where id > 7") == 200
        assert await run_sql(server, "SELECT count(*) FROM db.t WHERE id > 8", explain=True) == 200
        assert await run_sql(server, "SELECT 'hunter2' FROM db.missing") == 404
        assert await run_sql(server, "SELECT CAST('hunter2' AS BIGINT) FROM db.t") == 400
        await cancel_running_statement(server)
        await receiver.wait_for_events_count(10)
        for event in receiver.events:
            validate_event(event)
            assert event["outputs"] == []
        assert b"hunter2" not in b"".join(receiver.bodies)
        first_start, second_start, *_ = receiver.events[::2]
        assert first_start["job"]["name"] == receiver.events[2]["job"]["name"] == second_start["job"]["name"]
        outcomes = list_outcomes(receiver)
        assert [outcome[0] for outcome in outcomes] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL", "ABORT"]
        assert [outcome[2] for outcome in outcomes[:3]] == [1, 1, 0]
        (dataset,) = first_start["inputs"]
        table = (await Api(server)("GET", "/v1/namespaces/db/tables/t")).json["metadata"]
        assert (dataset["namespace"], dataset["name"]) == ("file", table["location"].removeprefix("file://"))
        fields = [field["name"] for field in table["schemas"][-1]["fields"]]
        assert [field["name"] for field in dataset["facets"]["schema"]["fields"]] == fields


async def test_statements_that_clients_run_are_sent_as_runs_of_their_tables(tmp_path: Path) -> None:
    async with (
        run_receiver() as receiver,
        run_server(tmp_path, openlineage_url=f"{receiver.url}/lineage", openlineage_namespace="lake") as server,
    ):
        for name in ("db.t", "db.u"):
            await asyncio.to_thread(create_lake_table, server.url, name)
            await asyncio.to_thread(append_parts, server.url, name, spread_ids(1))

        def run_statements() -> None:
            with SqlSession(server.url) as session:
                for low in (41, 7):
                    sql = f"SELECT count(*) FROM sea.db.t JOIN sea.db.u ON t.id = u.id WHERE t.id > {low} AND u.id <> 8"
                    session.sql(sql).to_arrow()
                session.sql("SELECT id FROM sea.db.t WHERE id > 3").close()  # It has not ended, so it is not reported.

        await asyncio.to_thread(run_statements)
        # A report names only tables that exist and that the caller may read.
        body = {"statement": "0" * 16, "seconds": 2.5, "files": 1, "bytes": 10}
        run = {"id": "0190b5a2-0000-7000-8000-000000000000", "tables": [["db", "t"]]}
        status = (await Api(server)("POST", "/api/v1/tables/db/t/history/times", body | {"run": run})).status
        assert status == 204
        missing_run = {**run, "tables": [["db", "missing"], ["elsewhere", "t"], ["db", "t"]]}
        status = (await Api(server)("POST", "/api/v1/tables/db/t/history/times", body | {"run": missing_run})).status
        assert status == 204
        for invalid_fields in (
            {"tables": []},
            {"tables": [["t"]]},
            {"tables": [["db", "t" * 256]]},
            {"tables": [["db\n", "t"]]},
            {"id": "x"},
            {"id": f"{run['id']}\n"},
        ):
            answer = await Api(server)(
                "POST", "/api/v1/tables/db/t/history/times", body | {"run": {**run, **invalid_fields}}
            )
            assert answer.status == 400
        await receiver.wait_for_events_count(8)
        for event in receiver.events:
            validate_event(event)
        assert list_outcomes(receiver) == [("COMPLETE", "", 2)] * 2 + [("COMPLETE", "", 1)] * 2
        first_start, second_start, third_start, _ = receiver.events[::2]
        assert first_start["job"] == second_start["job"] != third_start["job"]
        locations = {
            (await Api(server)("GET", f"/v1/namespaces/db/tables/{name}")).json["metadata"]["location"]
            for name in ("t", "u")
        }
        assert {f"file://{dataset['name']}" for dataset in first_start["inputs"]} == locations


def test_statements_that_differ_in_literals_have_one_form() -> None:
    rng = random.Random(3)
    literals = (
        "7",
        "'a''b'",
        "1.5e-3",
        "'-- no comment'",
        "'/*'",
        "$$a 'b'$$",
        "0x1F",
        "'it''s'",
        ".5",
        "'unended \"'",
    )
    template = 'SELECT "Col 1", t2.c FROM db.t /* hint */ WHERE a = {} AND b IN ({}) AND c LIKE {} -- end'
    forms = set()
    for _ in range(300):
        values = ", ".join(rng.choice(literals) for _ in range(rng.randint(1, 4)))
        forms.add(remove_literals(template.format(rng.choice(literals), values, rng.choice(literals))))
    assert forms == {'select "Col 1" , t2 . c from db . t where a = ? and b in ( ? ) and c like ?'}
    assert remove_literals("SELECT 'unended hunter2") == "select ?"
    assert remove_literals("SELECT $tag$hunter2") == "select ?"
    assert remove_literals("SELECT a FROM t1") != remove_literals("SELECT a FROM t2")


class CountedFailures:
    """A replacement of the delivery metrics, which counts only the failed deliveries."""

    count = 0

    def count_failed_delivery(self, kind: str) -> None:
        self.count += 1

    def set_delivery_lag(self, kind: str, name: str, seconds: float) -> None: ...


@pytest.mark.parametrize("dropped_count", [0, 5])
async def test_runs_beyond_the_limit_are_dropped_and_counted(dropped_count: int) -> None:
    failures = CountedFailures()
    runs = StatementRuns(failures)
    for _ in range(RUNS_MAX + dropped_count):
        runs.record(StatementRun("id", "select 1", 0, 1, "COMPLETE", "", ()))
    assert failures.count == dropped_count


async def test_names_of_tables_count_as_characters_of_a_run() -> None:
    failures = CountedFailures()
    runs = StatementRuns(failures)
    for _ in range(9):
        runs.record(
            StatementRun(
                "id", "", started_ms=0, ended_ms=1, outcome="COMPLETE", error="", tables=(("db", "t" * (1 << 20)),)
            )
        )
    assert failures.count == 2  # The limit is 8 Mi characters, and each run counts a little more than 1 Mi.


async def test_principal_fills_only_its_share_of_the_queue() -> None:
    failures = CountedFailures()
    runs = StatementRuns(failures)
    for _ in range(RUNS_MAX):
        runs.record(StatementRun("id", "select 1", 0, 1, "COMPLETE", "", (), principal="tina"))
    assert failures.count == RUNS_MAX - RUNS_MAX // 4, "the share is a quarter of the runs"
    runs.record(StatementRun("id", "select 1", 0, 1, "COMPLETE", "", (), principal="otto"))
    for _ in range(3):
        runs.record(StatementRun("id", "+" * (1 << 20), 0, 1, "COMPLETE", "", (), principal="wendy"))
    assert failures.count == RUNS_MAX - RUNS_MAX // 4 + 1, "the share is also a quarter of 8 Mi characters"


def test_schemas_beyond_the_limit_are_left_out_of_an_event() -> None:
    nested_types = StructType((Field(3, "key", True, "long"),)), MapType(4, "string", 5, "long", False)
    fields = (
        Field(1, "id", True, "long", "the id"),
        *(Field(number, f"c{number}", False, type_) for number, type_ in enumerate((*nested_types, "long"), 6)),
    )
    size = measure_schema(fields, 1 << 20)
    assert size > 7 * len("name, type"), "the schema has seven fields, with those in the nested types"
    assert measure_schema(fields * 3, 1 << 20) == 3 * size
    metadata = build_table_metadata(
        uuid="0190b5a2-0000-7000-8000-000000000000",
        location="file:///lake/t",
        schema=Schema(fields),
        partition_spec=None,
        sort_order=None,
        properties={},
        now_ms=1,
    )
    inputs = []
    for chars_max in (size, size - 1):
        dataset, schema_chars = make_input(["db"], "t", metadata, CatalogName("lake", "file:///lake"), chars_max)
        inputs.append(("schema" in dataset["facets"], schema_chars, dataset["name"]))
    assert inputs == [(True, size, "/lake/t"), (False, 0, "/lake/t")]


async def test_long_statement_is_recorded_without_a_search_for_literals(monkeypatch: pytest.MonkeyPatch) -> None:
    searched_lengths: list[int] = []

    def record_length(statement: str) -> str:
        searched_lengths.append(len(statement))
        return remove_literals(statement)

    monkeypatch.setattr(statement_lineage, "remove_literals", record_length)
    failures = CountedFailures()
    runs = StatementRuns(failures)
    # The queue holds at most eight Mi characters, so it drops the ninth of these statements.
    for _ in range(9):
        runs.record(StatementRun("id", "+" * (1 << 20), 0, 1, "COMPLETE", "", ()))
    assert (searched_lengths, failures.count) == ([], 1)
    assert name_statement_job("select 1") == name_statement_job("SELECT 2")
    assert name_statement_job("+" * (1 << 20)) != name_statement_job("-" * (1 << 20))
    assert searched_lengths == [8, 8]
