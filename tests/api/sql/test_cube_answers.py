"""Tests that answers from cubes have the same rows and types as the SQL statement that reads the rows."""

from __future__ import annotations

import json
import random
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from seamark.connector.client.indexes import IndexClient
from seamark.connector.sql.cubes.plans import EXACT, OFF, ON
from seamark.connector.sql.session import SqlSession
from seamark.formats.protocol.json_rows import to_json_rows
from seamark.formats.runtime import errors
from seamark.metaserver.api.sql import aggregates, cube_answers
from seamark.metaserver.api.sql.aggregates import AggregateRequest, write_query
from seamark.metaserver.api.sql.cube_answers import ENGINE
from seamark.metaserver.planner.cubes import aggregation, segments
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import to_comparable_value
from tests.connector.sql.test_cubes import COMPARED_COLUMNS, OPERANDS, SKETCHED, CubeWorld
from tests.seeds import examples, first_seed

RUNS_STATEMENT = "the request runs as a statement"
ARROW = "application/vnd.apache.arrow.stream"
DIMENSIONS = {
    "id": ["id"],
    "k": ["k"],
    "name": ["name"],
    "price": ["price"],
    "x": ["x"],
    "y": ["y"],
    "ok": ["ok"],
    "d": ["d", "month(d)"],
    "tz": ["tz", "year(tz)", "day(tz)"],
    "month(d)": ["month(d)", "year(d)"],
    "day(ts)": ["day(ts)", "month(ts)", "year(ts)"],
    "hour(ts)": ["hour(ts)", "day(ts)"],
    "day(tz)": ["day(tz)", "year(tz)"],
    "n.f": ["n.f"],
    "n.deep.v": ["n.deep.v"],
    "day(n.ts)": ["day(n.ts)", "year(n.ts)"],
}
"""By dimension of a cube: the dimensions of requests that the cube can answer."""
CONDITIONS = {
    "id": ["id = 3", "id <> 3", "NOT id IN (1, 2)", "id BETWEEN 2 AND 1.5e1", "id < 2.5", "id = '3'"],
    "k": ["k >= 5", "k IN (1, 2, NULL)", "NOT (k > 3 OR k IS NULL)", "k = 1.0", "k <= 7 AND k <> 4"],
    "name": ["name = 'a'", "name LIKE 'b%'", "name NOT IN ('ab', 'A')", "name IS NULL", "name > 'B'", "name LIKE '%b'"],
    "price": ["price > 10.5", "price = 1.00001", "price < -3", "price > 1e1"],
    "x": ["x > 1", "x IS NULL", "NOT x = 1.5"],
    "y": ["y < 0", "y IS NOT NULL"],
    "ok": ["ok", "NOT ok", "ok IS NOT TRUE", "ok = TRUE"],
    "d": ["d < DATE '1970-01-01'", "year(d) = 1969", "year(d) IN (1969, 1970)", "d = '1970-01-01'", "month(d) = 3"],
    "tz": ["tz IS NOT NULL", "year(tz) = 1970", "tz >= TIMESTAMP '1970-01-01 00:00:00 UTC'"],
    "month(d)": ["d >= DATE '1970-01-01'", "d < DATE '1969-06-01'", "year(d) = 1969", "d <= DATE '1969-12-31'"],
    "day(ts)": ["ts >= DATE '1969-12-31'", "CAST(ts AS date) = DATE '1970-01-01'", "ts > DATE '1970-01-01'"],
    "hour(ts)": ["ts < TIMESTAMP '1970-02-03 00:00:00'", "year(ts) = 1969", "CAST(ts AS date) > DATE '1969-12-31'"],
    "day(tz)": ["year(tz) = 1970", "tz IS NULL"],
    "n.f": ["n.f > 1", "n.f IS NULL", "n.f IN (1, 3)"],
    "n.deep.v": ["n.deep.v = -1", "NOT n.deep.v = 2"],
    "day(n.ts)": ["n.ts >= DATE '1970-01-01'", "n.ts IS NULL", "year(n.ts) = 1969"],
}  # fmt: skip


class RandomRequests:
    """Draws random cubes, and requests that these cubes can mostly answer."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw_cube(self) -> tuple[list[str], list[str]]:
        """Return the dimensions and the measures of a cube."""
        rng = self._rng
        measures = {"count(*)"}
        for _ in range(rng.randint(2, 7)):
            function = rng.choice(("sum", "avg", "count", "min", "max", "approx_distinct"))
            operands = COMPARED_COLUMNS if function in ("count", "min", "max") else [*OPERANDS, "n.f", "n.deep.v + k"]
            operands = SKETCHED if function == "approx_distinct" else operands
            measures.add(f"{function}({rng.choice(operands)})")
        return rng.sample(list(DIMENSIONS), rng.randint(1, 4)), sorted(measures)

    def draw_request(self, dimensions: list[str], measures: list[str]) -> dict[str, Any]:
        """Draw a request that a cube with these dimensions and measures can mostly answer.

        If the request has an order of rows, all dimensions are part of it, so that two answers have the same order.
        """
        rng = self._rng
        offered_columns = sorted({text for dimension in dimensions for text in DIMENSIONS[dimension]})
        chosen_dimensions = rng.sample(offered_columns, rng.randint(0, min(3, len(offered_columns))))
        chosen_measures = rng.sample(measures, rng.randint(1, min(4, len(measures))))
        body: dict[str, Any] = {
            "dimensions": chosen_dimensions,
            "measures": chosen_measures,
            "cubes": rng.choice((ON, ON, EXACT)),
        }
        if rng.random() < 0.6:
            conditions = [rng.choice(CONDITIONS[rng.choice(dimensions)]) for _ in range(rng.randint(1, 2))]
            body["where"] = rng.choice((" AND ", " OR ")).join(conditions)
        if rng.random() < 0.5:
            order_keys = [*rng.sample(chosen_measures, 1), *chosen_dimensions]
            body["order"] = [{"by": key, "descending": rng.random() < 0.5} for key in order_keys]
            if rng.random() < 0.5:
                body["limit"] = rng.choice((0, 1, 5, 1000))
        return body


class CubeAggregates:
    """Compares answers from cubes with the rows of the same statement without cubes.

    Args:
        session: A session that reads groups of cubes from segments.
        plain_session: A session without cubes.
        name: The table.
    """

    def __init__(self, server: ServerThread, session: SqlSession, plain_session: SqlSession, name: str) -> None:
        self._server = server
        self._session = session
        self._plain_session = plain_session
        self._namespace, self._table = name.split(".")

    def ask(self, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
        """Send a request to `/api/v1/aggregate` for the table, and return (status, body)."""
        data = json.dumps({"namespace": [self._namespace], "table": self._table, **body}).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{self._server.url}/api/v1/aggregate", data, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def compare(self, body: dict[str, Any], context: str) -> str:
        """Compare the server's answer with the rows of the same SQL statement without cubes.

        Return "cube" if the server answered from a cube, or "statement" if it would have run the statement.
        """
        status, raw = self.ask(body)
        statement = self.write_statement(body)
        if status != 200:
            assert RUNS_STATEMENT in raw.decode(), f"{context}: {raw!r}"
            return "statement"
        expected_result = self._plain_session.sql(statement)
        expected_table = expected_result.to_arrow()
        answer = json.loads(raw)
        assert answer["engine"] == ENGINE
        assert [column["type"] for column in answer["columns"]] == list(expected_result.types), context
        streamed_groups = pa.ipc.open_stream(self.ask(body, Accept=ARROW)[1]).read_all()
        assert streamed_groups.schema == expected_table.schema, context
        assert list_rows(streamed_groups, body) == list_rows(expected_table, body), context
        expected_rows = [row for batch in expected_table.to_batches() for row in to_json_rows(batch)]
        assert sort_texts(answer["rows"]) == sort_texts(expected_rows), context
        assert list_rows(self._session.sql(statement).to_arrow(), body) == list_rows(expected_table, body), context
        return "cube"

    def write_statement(self, body: dict[str, Any]) -> str:
        tables = self._server.components.catalog.tables
        metadata = self._server.run(tables.load((self._namespace,), self._table)).metadata
        request = {"namespace": [self._namespace], "table": self._table, **body}
        return write_query(msgspec.convert(request, AggregateRequest), metadata)


def list_rows(table: pa.Table, body: dict[str, Any]) -> list[str]:
    """Return each row as a comparable text, in order if the request has an order."""
    columns = [[to_comparable_value(value) for value in column.to_pylist()] for column in table.columns]
    rows = [repr(row) for row in zip(*columns, strict=True)]
    return rows if "order" in body else sorted(rows)


def sort_texts(rows: list[list[Any]]) -> list[str]:
    return sorted(repr([to_comparable_value(value) for value in row]) for row in rows)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """Yield a server that runs no SQL statement for a request, so that it answers from cubes or with an error."""

    async def refuse(*_: object) -> None:
        raise errors.BadRequest(RUNS_STATEMENT)

    server = ServerThread(tmp_path_factory.mktemp("cube-answers"), index_wait_s=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregates, "answer_statement", refuse)
        patch.setattr(segments, "_ENTRY_FILES_MAX", 2)  # So even a small table has several entries of a cube.
        server.start()
        yield server
        server.stop()


def run_case(server: ServerThread, seed: int, request_count: int) -> Counter[str]:
    """Change a table at random in four rounds, and compare `request_count` answers of each round with the rows.

    Return the number of answers from cubes and of requests that need a SQL statement.
    """
    rng = random.Random(seed)
    random_requests = RandomRequests(rng)
    counts: Counter[str] = Counter()
    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
    ):
        world = CubeWorld(server, client, rng, f"db.t{seed}")
        world.create_table()
        world.append()
        for _ in range(2):
            world.add_cube(*random_requests.draw_cube())
        world.build()
        comparison = CubeAggregates(server, session, plain_session, world.name)
        for _ in range(4):
            for step in rng.sample(("append", "append", "delete", "tag", "roll back", "damage", "lose"), 2):
                match step:
                    case "append":
                        world.append(rng.choice((1, 30)))
                    case "delete" if rng.random() < 0.4:
                        world.delete(rng.choice(("id = 3", "name = 'a'")))
                    case "tag":
                        world.tag()
                    case "roll back" if rng.random() < 0.5:
                        world.roll_back()
                    case "damage" | "lose" if rng.random() < 0.3:
                        world.damage_index_file(is_deleted=step == "lose")
            if rng.random() < 0.8:
                world.build()
            for _ in range(request_count):
                body = random_requests.draw_request(*rng.choice(world.cubes))
                if world.tags and rng.random() < 0.2:
                    body["ref"] = rng.choice(world.tags)
                counts[comparison.compare(body, f"seed {seed}: {body}")] += 1
    return counts


def test_random_requests_have_the_rows_of_their_statements(server: ServerThread) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed(), first_seed() + examples(8, 1)):
        counts += run_case(server, seed, 8)
    assert counts["cube"] > counts.total() / 4, counts
    assert counts["statement"] > 0, counts


def test_answer_follows_commits_and_counts_as_a_use_of_the_cube(server: ServerThread) -> None:
    rng = random.Random(7)
    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
    ):
        world = CubeWorld(server, client, rng, "db.uses")
        world.create_table()
        world.append()
        world.add_cube(["k"], ["sum(id)"])
        world.build()
        comparison = CubeAggregates(server, session, plain_session, world.name)
        body: dict[str, Any] = {"dimensions": ["k"], "measures": ["sum(id)", "count(*)"]}
        first_answer = comparison.ask(body)[1]
        second_answer = comparison.ask(body)[1]
        assert json.loads(first_answer)["rows"] == json.loads(second_answer)["rows"]
        assert json.loads(first_answer)["statement-id"] != json.loads(second_answer)["statement-id"]
        use_counts = client.index(world.name, "cube0").json["used"]
        assert (use_counts["plans"], use_counts["files-in"], use_counts["files-removed"]) == (2, 2, 2)
        world.tag()
        world.append()
        assert comparison.compare(body, "a file has no entry") == "statement"
        world.build()
        assert comparison.compare(body, "all files have entries") == "cube"
        assert json.loads(comparison.ask({**body, "ref": "tag0"})[1])["rows"] == json.loads(first_answer)["rows"]
        world.delete("id = 3")
        assert comparison.compare(body, "a file has deleted rows") == "statement"


def test_answer_from_a_cube_requires_that_its_plan_is_allowed(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forbid(*_: object) -> None:
        raise errors.Forbidden("the snapshot names files of another table")

    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
    ):
        world = CubeWorld(server, client, random.Random(8), "db.forbidden")
        world.create_table()
        world.append()
        world.add_cube(["k"], ["sum(id)"])
        world.build()
        comparison = CubeAggregates(server, session, plain_session, world.name)
        body = {"dimensions": ["k"], "measures": ["count(*)"]}
        assert comparison.ask({**body, "limit": 5})[0] == 200
        monkeypatch.setattr(server.components.planner, "plan", forbid)
        assert comparison.ask({**body, "limit": 6})[0] == 403, "the check runs although files and groups are in memory"
        assert comparison.ask({**body, "limit": 5})[0] == 403, "the check runs although the answer is in memory"


@pytest.mark.slow
def test_many_values_are_aggregated_outside_of_the_event_loop(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread_names, finished_measures = list[str](), list[str]()
    aggregate, finish = aggregation.aggregate_groups, aggregation._finish_measure

    def record_thread(*arguments: Any) -> pa.Table:
        thread_names.append(threading.current_thread().name)
        return aggregate(*arguments)

    def record_measure(measure: Any, partials: Any) -> Any:
        finished_measures.append(measure.text)
        return finish(measure, partials)

    with closing(IndexClient(server.url)) as client, SqlSession(server.url) as session:
        world = CubeWorld(server, client, random.Random(9), "db.wide")
        world.create_table()
        world.append()
        world.add_cube(["k"], ["avg(price)"])
        world.build()
        comparison = CubeAggregates(server, session, session, world.name)
        body = {"dimensions": ["k"], "measures": ["avg(price)"]}
        rows = json.loads(comparison.ask(body)[1])["rows"]
        monkeypatch.setattr(cube_answers, "aggregate_groups", record_thread)
        monkeypatch.setattr(aggregation, "_finish_measure", record_measure)
        monkeypatch.setattr(cube_answers, "_IN_LOOP_VALUES", 2 * len(rows))  # The values of two columns
        wide_body = {**body, "measures": ["avg(price)", "avg( price)"], "order": [{"by": "k"}, {"by": "k"}]}
        raw = comparison.ask(wide_body)[1]
        assert sort_texts([row[:2] for row in json.loads(raw)["rows"]]) == sort_texts(rows)
        assert all(average == same_average for _, average, same_average in json.loads(raw)["rows"])
        assert finished_measures == ["avg(price)"], "equal measures are computed once"
        assert comparison.ask({**body, "limit": 1000})[0] == 200
    name_for_wide_answer, name_for_narrow_answer = thread_names
    assert name_for_wide_answer != name_for_narrow_answer


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_random_requests_have_the_rows_of_their_statements(server: ServerThread) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed() + 1000, first_seed() + 1080):
        counts += run_case(server, seed, 12)
    assert counts["cube"] > counts.total() / 4, counts
