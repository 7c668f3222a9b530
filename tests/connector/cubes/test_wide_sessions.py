"""Queries of many forms return the same rows with and without cubes, in `seamark sql` and `seamark.duckdb`."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing

import duckdb
import pytest

import seamark.duckdb
from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.cubes.summaries import OFF
from seamark.connector.duckdb.queries import rewrite_query
from seamark.connector.sql.session import SqlSession
from tests.connector.cubes.test_wide_queries import count_rows, define_cube, quote_terms
from tests.connector.cubes.wide_queries import DUCKDB, SCHEMA, SEAMARK, WideQueries, draw_rows
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import count_rows as count_session_rows
from tests.connector.sql.test_cubes import CubeWorld, server
from tests.seeds import first_seed

__all__ = ["server"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ZONES = ("UTC", "UTC", "Asia/Kolkata", "America/New_York")


class WideWorld(CubeWorld):
    """A table with the columns of `wide_queries`. In a fifth of the tables, some sums overflow."""

    def create_table(self) -> None:
        self._overflows = self.rng.random() < 0.2
        with open_catalog(self.server.url) as catalog:
            catalog.create_namespace_if_not_exists("db")
            catalog.create_table(self.name, schema=SCHEMA, properties={"write.delete.mode": "merge-on-read"})

    def append(self, rows: int = 30) -> None:
        with open_catalog(self.server.url) as catalog:
            catalog.load_table(self.name).append(draw_rows(self.rng, rows, overflows=self._overflows))

    def change(self) -> None:
        """Make random changes of the table or its cubes: append or delete rows, build cubes, or damage an index file.

        There are at most three changes.
        """
        for step in self.rng.sample(("append", "append one", "delete", "build", "build", "damage"), 3):
            match step:
                case "append":
                    self.append()
                case "append one":
                    self.append(1)
                case "delete":
                    self.delete(self.rng.choice(("k = 1", "x = 0", '"count" > 4', "ok", "\"Mixed Case\" = '🙂'")))
                case "build":
                    self.build()
                case "damage" if self.rng.random() < 0.3:
                    self.damage_index_file(is_deleted=self.rng.random() < 0.5)


def compare_sessions(session: SqlSession, plain_session: SqlSession, text: str, context: str) -> str:
    """Compare a query with and without cubes, and return how the session with cubes answered it."""
    try:
        expected = plain_session.sql(text)
        rows = count_session_rows(expected)
    except (ClientError, duckdb.Error) as error:
        with pytest.raises((ClientError, duckdb.Error)):
            session.sql(text).to_arrow()
        return f"invalid: {error}"[:60]
    answer = session.sql(text)
    summary = answer.explanation.cube
    assert (answer.types, answer.schema) == (expected.types, expected.schema), context
    assert count_session_rows(answer) == rows, f"{context}\n{answer.explanation}"
    if summary is None or summary.index is None:
        return "rows"
    return "cube and rows" if summary.row_files else "cube"


def compare_in_duckdb(con: duckdb.DuckDBPyConnection, text: str, context: str) -> str:
    """Compare a query of DuckDB with and without cubes, and return how the query used cubes."""
    try:
        expected = seamark.duckdb.sql(con, text, cubes=OFF)
        rows = count_rows(expected)
    except (duckdb.Error, ValueError) as error:
        with pytest.raises((duckdb.Error, ValueError)):
            seamark.duckdb.sql(con, text).fetchall()
        return f"invalid: {error}"[:60]
    actual = seamark.duckdb.sql(con, text)
    assert (actual.columns, actual.types) == (expected.columns, expected.types), context
    assert count_rows(actual) == rows, f"{context}\n{rewrite_query(con, text)}"
    summary = rewrite_query(con, text).cube
    if summary is None or summary.index is None:
        return "rows"
    return "cube and rows" if summary.row_files else "cube"


def run_case(server: ServerThread, seed: int, queries: int) -> Counter[str]:
    """Compare queries with and without cubes in three rounds, and change the table at random after each round.

    Return the number of queries by how they were answered.
    """
    rng = random.Random(seed)
    seamark_queries, duckdb_queries, counts = WideQueries(rng, SEAMARK), WideQueries(rng, DUCKDB), Counter[str]()
    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
        seamark.duckdb.connect(server.url) as con,
    ):
        con.execute(f"SET TimeZone = '{rng.choice(ZONES)}'")
        world = WideWorld(server, client, rng, f"db.wide{seed}")
        world.create_table()
        if rng.random() < 0.9:
            world.append()
        cubes = []
        for _ in range(2):
            dimensions, measures = seamark_queries.draw_cube()
            measures = define_cube(dimensions, measures)[1]
            world.add_cube(quote_terms(dimensions), quote_terms(measures))
            cubes.append((dimensions, measures))
        world.build()
        for _ in range(3):
            for _ in range(queries):
                text = seamark_queries.draw_query(*rng.choice(cubes), world.name)
                counts[compare_sessions(session, plain_session, text, f"seed {seed}: {text}")] += 1
                text = duckdb_queries.draw_query(*rng.choice(cubes), f"sea.{world.name}")
                counts[f"duckdb {compare_in_duckdb(con, text, f'seed {seed}: {text}')}"] += 1
            world.change()
    return counts


def test_random_queries_return_the_same_rows_from_cubes(server: ServerThread) -> None:
    counts = Counter[str]()
    for seed in range(first_seed(), first_seed() + 60):
        counts += run_case(server, seed, 8)
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 10, counts
    assert counts["duckdb cube"] + counts["duckdb cube and rows"] > counts.total() / 10, counts
