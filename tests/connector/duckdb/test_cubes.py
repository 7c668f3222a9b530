"""Tests that `seamark.duckdb` answers aggregate queries from cubes with the same rows and types as without cubes."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import duckdb
import pytest

import seamark.duckdb
from seamark.connector.client.indexes import IndexClient
from seamark.connector.cubes.summaries import EXACT, OFF, CubeSummary
from seamark.connector.duckdb.queries import rewrite_query
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import to_comparable_value
from tests.connector.sql.test_cubes import CubeWorld, RandomAggregates, sales, server
from tests.seeds import examples, first_seed

__all__ = ["sales", "server"]


@pytest.fixture
def con(server: ServerThread) -> Iterator[duckdb.DuckDBPyConnection]:
    with seamark.duckdb.connect(server.url) as con:
        con.execute("SET TimeZone = 'UTC'")
        yield con


def count_rows(relation: duckdb.DuckDBPyRelation) -> Counter[str]:
    return Counter(repr([to_comparable_value(value) for value in row]) for row in relation.fetchall())


def compare_with_rows(con: duckdb.DuckDBPyConnection, text: str) -> CubeSummary | None:
    """Check that a query has the same result with and without cubes.

    Returns:
        How the rewritten query uses cubes, or None if it is not rewritten for a cube.
    """
    expected = seamark.duckdb.sql(con, text, cubes=OFF)
    actual = seamark.duckdb.sql(con, text)
    assert (actual.columns, actual.types) == (expected.columns, expected.types), text
    assert count_rows(actual) == count_rows(expected), text
    return rewrite_query(con, text).cube


def run_case(server: ServerThread, con: duckdb.DuckDBPyConnection, seed: int, queries: int) -> Counter[str]:
    """Change a table at random, and compare the answers of queries with and without cubes.

    Returns:
        The number of queries by how they used cubes.
    """
    rng = random.Random(seed)
    aggregates, counts = RandomAggregates(rng, has_structs=True), Counter[str]()
    with closing(IndexClient(server.url)) as client:
        world = CubeWorld(server, client, rng, f"db.duck{seed}")
        world.create_table()
        world.append()
        world.add_cube(*aggregates.draw_cube())
        for steps in (("build", "append"), ("delete", "build"), ("damage", "append")):
            for step in steps:
                match step:
                    case "append":
                        world.append(rng.choice((1, 30)))
                    case "delete":
                        world.delete(rng.choice(("id = 3", "k = 7")))
                    case "build":
                        world.build()
                    case "damage" if rng.random() < 0.5:
                        world.damage_index_file(is_deleted=rng.random() < 0.5)
            with open_catalog(server.url) as catalog:
                snapshots = [snapshot.snapshot_id for snapshot in catalog.load_table(world.name).metadata.snapshots]
            for _ in range(queries):
                source = f"sea.{world.name}"
                text = aggregates.query(*rng.choice(world.cubes), source)
                # The alias `a` of the table removes an ambiguity: in `n.deep.name`, n could also be a schema.
                text = re.sub(r"(?<!\.)\bn\.deep\.", "a.n.deep.", text)
                if rng.random() < 0.3:
                    text = text.replace(f"{source} a", f"{source} a AT (VERSION => {rng.choice(snapshots)})")
                summary = compare_with_rows(con, text)
                assert summary is not None, f"seed {seed}: {text}\n{rewrite_query(con, text).summary}"
                counts["rows" if summary.index is None else "cube and rows" if summary.row_files else "cube"] += 1
    return counts


@pytest.mark.slow
def test_random_queries_return_the_same_rows_from_cubes(server: ServerThread, con: duckdb.DuckDBPyConnection) -> None:
    counts = Counter[str]()
    for seed in range(first_seed(), first_seed() + examples(10, 1)):
        counts += run_case(server, con, seed, 6)
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 5, counts


def test_query_reads_groups_and_the_rows_of_files_without_an_entry(
    server: ServerThread, sales: CubeWorld, con: duckdb.DuckDBPyConnection
) -> None:
    text = f"SELECT country, sum(n), avg(n) AS mean, count(*) FROM sea.{sales.name} GROUP BY country ORDER BY country"
    assert compare_with_rows(con, text) == CubeSummary("cube0", 3, 0)
    sales.delete("n = 1")
    assert compare_with_rows(con, text) == CubeSummary("cube0", 2, 0)
    assert "cube cube0 answers 2 files; rows of 0 files are read" in rewrite_query(con, text).summary
    assert seamark.duckdb.sql(con, text).fetchall() == [("a", 20, 1.0, 20), ("b", 20, 1.0, 20)]


@pytest.mark.slow
def test_query_with_parameters_subtotals_or_constants_follows_from_a_cube(
    server: ServerThread, sales: CubeWorld, con: duckdb.DuckDBPyConnection
) -> None:
    text = (
        f"SELECT country, date_trunc('month', ts) AS month, grouping(country), count(1), sum(1), count(country) "
        f"FROM sea.{sales.name} GROUP BY ROLLUP (country, month) HAVING count(*) > 1"
    )
    assert compare_with_rows(con, text) == CubeSummary("cube0", 3, 0)
    text = f"SELECT sum(n) FROM sea.{sales.name} WHERE country = ?"
    assert seamark.duckdb.sql(con, text, ["a"]).fetchall() == [(30,)]
    assert rewrite_query(con, text, ["a"]).cube == CubeSummary("cube0", 3, 0)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ("max(x)", "x is not a dimension"),
        ("sum(n + 1)", "not a measure"),
        ("min(country, 2)", "not supported"),
        ("string_agg(country, ',')", "not supported"),
        ("count(DISTINCT n)", "n is not a dimension"),
        ("sum(n), sum(n) OVER ()", "window"),
        ("count(*) FROM (SELECT 1) AS a UNION ALL SELECT sum(n)", "one SELECT"),
    ],
)
def test_summary_states_why_a_cube_cannot_answer_a_query(
    server: ServerThread, sales: CubeWorld, con: duckdb.DuckDBPyConnection, outputs: str, reason: str
) -> None:
    rewritten = rewrite_query(con, f"SELECT {outputs} FROM sea.{sales.name}")
    assert rewritten.cube is not None
    assert rewritten.cube.index is None
    assert reason in rewritten.summary


def test_exact_queries_do_not_average_from_cubes(
    server: ServerThread, sales: CubeWorld, con: duckdb.DuckDBPyConnection
) -> None:
    text = f"SELECT avg(n), sum(n) FROM sea.{sales.name}"
    rewritten = rewrite_query(con, text, cubes=EXACT)
    assert rewritten.cube is not None
    assert "adds floats" in str(rewritten.cube.reason)
    assert rewrite_query(con, text.replace("avg(n), ", ""), cubes=EXACT).cube == CubeSummary("cube0", 3, 0)
    with pytest.raises(ValueError, match="cubes must be one of on, exact, off, not 'maybe'"):
        seamark.duckdb.sql(con, text, cubes="maybe")


def test_distinct_values_are_estimated_from_groups_and_rows(
    server: ServerThread, sales: CubeWorld, con: duckdb.DuckDBPyConnection
) -> None:
    """Estimates use the sketches of a cube. Rows are read for a file whose deleted rows a cube cannot leave out.

    An exact count of distinct values never uses a sketch.
    """
    sales.add_cube(["country"], ["approx_distinct(ts)"])
    sales.build()
    sales.delete("n = 1")
    text = f"SELECT country, approx_count_distinct(ts) AS times FROM sea.{sales.name} GROUP BY country ORDER BY country"
    assert rewrite_query(con, text).cube == CubeSummary("cube1", files=2, row_files=0)
    assert seamark.duckdb.sql(con, text).fetchall() == [("a", 10), ("b", 10)]
    sales.delete("n = 0 AND country = 'b'")
    assert rewrite_query(con, text).cube == CubeSummary("cube1", files=1, row_files=1)
    assert seamark.duckdb.sql(con, text).fetchall() == [("a", 10), ("b", 10)]
    rewritten_count_distinct = rewrite_query(con, text.replace("approx_count_distinct(ts)", "count(DISTINCT ts)"))
    assert rewritten_count_distinct.cube is not None
    assert "ts is not a dimension" in str(rewritten_count_distinct.cube.reason)
    rewritten_without_estimates = rewrite_query(con, text, cubes=EXACT)
    assert rewritten_without_estimates.cube is not None
    assert "is estimated differently by the engine" in str(rewritten_without_estimates.cube.reason)
