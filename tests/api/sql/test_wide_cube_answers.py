"""Answers that the server computes from cubes have the rows of the statement, with values at the limits of types."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.cubes.summaries import EXACT, OFF, ON
from seamark.connector.sql.session import SqlSession
from tests.api.sql.test_cube_answers import ARROW, RUNS_STATEMENT, CubeAggregates, list_rows, server
from tests.connector.cubes.test_wide_queries import define_cube, quote_terms
from tests.connector.cubes.test_wide_sessions import WideWorld
from tests.connector.cubes.wide_queries import SEAMARK, WideQueries
from tests.connector.server_thread import ServerThread
from tests.seeds import first_seed

__all__ = ["server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def draw_request(
    rng: random.Random, wide_queries: WideQueries, dimensions: list[str], measures: list[str]
) -> dict[str, Any]:
    """Return a random request that a cube with these dimensions and measures can mostly answer.

    If the request has an order of rows, all its measures and dimensions are part of it, so that two answers have the
    same order.
    """
    chosen_dimensions = quote_terms(rng.sample(dimensions, rng.randint(0, min(3, len(dimensions)))))
    chosen_measures = quote_terms(rng.sample(measures, rng.randint(1, min(4, len(measures)))))
    body: dict[str, Any] = {
        "dimensions": chosen_dimensions,
        "measures": chosen_measures,
        "cubes": rng.choice((ON, ON, EXACT)),
    }
    if rng.random() < 0.7:
        body["where"] = wide_queries.draw_condition(dimensions)
    if rng.random() < 0.5:
        body["order"] = [
            {"by": key, "descending": rng.random() < 0.5} for key in (*chosen_measures, *chosen_dimensions)
        ]
        if rng.random() < 0.5:
            body["limit"] = rng.choice((0, 1, 3, 1000))
    return body


def compare(aggregates: CubeAggregates, plain_session: SqlSession, body: dict[str, Any], context: str) -> str:
    """Compare the server's answer with the rows of the same SQL statement without cubes.

    Return "cube" if the server answered from a cube, "statement" if it would have run the statement, or the refusal.
    """
    status, raw = aggregates.ask(body)
    if status != 200:
        return "statement" if RUNS_STATEMENT in raw.decode() else f"refused: {raw.decode()}"[:60]
    try:
        expected_result = plain_session.sql(aggregates.write_statement(body))
        expected_rows = expected_result.to_arrow()
    except ClientError as error:
        raise AssertionError(f"the statement fails: {error}\n{context}\n{raw!r}") from error
    answer = json.loads(raw)
    assert [column["type"] for column in answer["columns"]] == list(expected_result.types), context
    groups = pa.ipc.open_stream(aggregates.ask(body, Accept=ARROW)[1]).read_all()
    assert groups.schema == expected_rows.schema, context
    assert list_rows(groups, body) == list_rows(expected_rows, body), context
    return "cube"


def run_case(server: ServerThread, seed: int, request_count: int) -> Counter[str]:
    """Append to a table in three rounds, and compare `request_count` answers of each round with the rows.

    Return the number of answers by the way in which the server answered.
    """
    rng = random.Random(seed)
    wide_queries, counts = WideQueries(rng, SEAMARK), Counter[str]()
    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
    ):
        world = WideWorld(server, client, rng, f"db.answers{seed}")
        world.create_table()
        world.append()
        cubes = []
        for _ in range(2):
            dimensions, measures = wide_queries.draw_cube()
            measures = define_cube(dimensions, measures)[1]
            world.add_cube(quote_terms(dimensions), quote_terms(measures))
            cubes.append((dimensions, measures))
        aggregates = CubeAggregates(server, session, plain_session, world.name)
        for _ in range(3):
            world.build()
            for _ in range(request_count):
                body = draw_request(rng, wide_queries, *rng.choice(cubes))
                counts[compare(aggregates, plain_session, body, f"seed {seed}: {body}")] += 1
            world.append(rng.choice((1, 30)))
    return counts


def test_random_requests_have_the_rows_of_their_statements(server: ServerThread) -> None:
    counts = Counter[str]()
    for seed in range(first_seed(), first_seed() + 60):
        counts += run_case(server, seed, 12)
    assert counts["cube"] > counts.total() / 5, counts
