"""Tests that `seamark.spark.sql` returns the same rows and types from cubes as Spark returns without cubes."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.spark.query.queries import rewrite_query
from seamark.formats.index.keys.distinct_sketches import STANDARD_ERROR
from seamark.spark import sql
from tests.connector.cubes.test_wide_queries import define_cube, quote_terms
from tests.connector.cubes.test_wide_sessions import WideWorld
from tests.connector.cubes.wide_queries import SPARK, WideQueries
from tests.connector.lake import open_catalog
from tests.connector.sql.comparing import to_comparable_value
from tests.connector.sql.test_cubes import CubeWorld, RandomAggregates
from tests.connector.sql.test_star_joins import StarSchema
from tests.seeds import examples, first_seed
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def count_rows(frame: DataFrame) -> Counter[str]:
    return Counter(repr([to_comparable_value(value) for value in row]) for row in frame.collect())


def compare_with_rows(spark: SparkSession, text: str) -> str:
    """Check that a query has the same result with and without cubes, and return how the session answered it."""
    try:
        expected = spark.sql(text)
    except AnalysisException:  # Spark refuses some queries, such as an aggregate in ORDER BY after HAVING.
        with pytest.raises(AnalysisException):
            sql(spark, text, cubes="on").collect()
        return "invalid"
    actual = sql(spark, text, cubes="on")
    assert actual.columns == expected.columns, text
    assert [field.dataType for field in actual.schema] == [field.dataType for field in expected.schema], text
    assert count_rows(actual) == count_rows(expected), text
    summary = rewrite_query(spark, text, cubes="on").cube
    assert summary is not None
    if summary.index is None:
        return f"rows: {summary.reason}"[:80]
    return "cube and rows" if summary.row_files else "cube"


def add_condition(text: str, source: str, condition: str) -> str:
    """Return the query with one more condition in WHERE."""
    if " WHERE " in text:
        return text.replace(" WHERE ", f" WHERE {condition} AND ")
    return text.replace(source, f"{source} WHERE {condition}")


def test_random_queries_return_the_same_rows_from_cubes(spark: SparkSession, tmp_path: Path) -> None:
    counts = Counter[str]()
    with Seamark(tmp_path) as server, closing(IndexClient(server.base_url)) as client:
        catalog = new_catalog(spark, server.base_url)
        served_catalog: Any = type("Served", (), {"url": server.base_url})
        for seed in range(first_seed(), first_seed() + examples(20, 2)):
            rng = random.Random(seed)
            aggregates = RandomAggregates(rng, has_structs=True)
            world = CubeWorld(served_catalog, client, rng, f"db.spark{seed}")
            world.create_table()
            world.append()
            world.append()
            world.add_cube(*aggregates.draw_cube())
            world.build()
            world.append()
            with open_catalog(server.base_url) as tables:
                snapshots = [snapshot.snapshot_id for snapshot in tables.load_table(world.name).metadata.snapshots]
            for _ in range(15):
                source = f"{catalog}.{world.name}"
                source += f" VERSION AS OF {rng.choice(snapshots)}" if rng.random() < 0.2 else ""
                text = aggregates.query(*rng.choice(world.cubes), source)
                if rng.random() < 0.2:
                    condition = rng.choice(("id < 100", "k BETWEEN -3 AND 7", "name <> 'q'"))
                    text = add_condition(text, f" FROM {source} a", condition)
                counts[compare_with_rows(spark, text)] += 1
    assert counts["invalid"] < counts.total() / 8, counts
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 8, counts


def test_random_queries_of_many_forms_return_the_same_rows_from_cubes(spark: SparkSession, tmp_path: Path) -> None:
    counts = Counter[str]()
    with Seamark(tmp_path) as server, closing(IndexClient(server.base_url)) as client:
        catalog = new_catalog(spark, server.base_url)
        served_catalog: Any = type("Served", (), {"url": server.base_url})
        for seed in range(first_seed(), first_seed() + examples(20, 2)):
            rng = random.Random(seed)
            wide_queries = WideQueries(rng, SPARK)
            world = WideWorld(served_catalog, client, rng, f"db.wide{seed}")
            world.create_table()
            world.append()
            dimensions, measures = wide_queries.draw_cube()
            measures = define_cube(dimensions, measures)[1]
            world.add_cube(quote_terms(dimensions), quote_terms(measures))
            world.build()
            world.append()
            for _ in range(25):
                text = wide_queries.draw_query(dimensions, measures, f"{catalog}.{world.name}")
                try:
                    spark.sql(text).collect()
                except (AnalysisException, PySparkException):  # An overflow, or a function that Spark does not have.
                    with pytest.raises((AnalysisException, PySparkException)):
                        sql(spark, text, cubes="on").collect()
                    counts["refused"] += 1
                    continue
                counts[compare_with_rows(spark, text)] += 1
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 20, counts


def test_distinct_values_are_estimated_from_sketches(spark: SparkSession, tmp_path: Path) -> None:
    """Spark merges the sketches of all groups. If a file has no entry, the original query runs."""
    rows = pa.table({"country": ["FR", "DE", None, "IT"] * 10_000, "id": range(40_000)})
    with Seamark(tmp_path) as server, closing(IndexClient(server.base_url)) as client:
        catalog = new_catalog(spark, server.base_url)
        with open_catalog(server.base_url) as tables:
            tables.create_namespace("db")
            table = tables.create_table("db.visitors", schema=rows.schema)
            for file_rows in (rows, rows.slice(20_000), rows.slice(0, 3)):
                table.append(file_rows)
        client.put_index("db.visitors", "cube", kind="cube", columns=["country"], measures=["approx_distinct(id)"])
        with closing(InProcessWorkers()) as workers:
            build(client, "db.visitors", "cube", workers)
        text = f"SELECT country, approx_count_distinct(id) AS n FROM {catalog}.db.visitors GROUP BY ROLLUP (country)"
        cube_answer = rewrite_query(spark, text, cubes="on").cube
        assert cube_answer is not None
        assert (cube_answer.index, cube_answer.row_files) == ("cube", 0)
        estimates = sorted((row.n for row in sql(spark, text, cubes="on").collect()), reverse=True)
        for estimate, count in zip(estimates, (40_000, *[10_000] * 4), strict=True):
            assert abs(estimate - count) <= 5 * STANDARD_ERROR * count
        query_without_rows = f"SELECT approx_count_distinct(id) AS n FROM {catalog}.db.visitors WHERE country = 'XX'"
        assert [row.n for row in sql(spark, query_without_rows, cubes="on").collect()] == [0]
        with open_catalog(server.base_url) as tables:
            tables.load_table("db.visitors").append(rows.slice(0, 3))
        refusal = rewrite_query(spark, text, cubes="on").cube
        assert refusal is not None
        assert "rows cannot be added to its sketches" in str(refusal.reason)


def test_random_star_joins_return_the_same_rows_from_attributes(spark: SparkSession, tmp_path: Path) -> None:
    counts = Counter[str]()
    with Seamark(tmp_path) as server, closing(IndexClient(server.base_url)) as client:
        catalog = new_catalog(spark, server.base_url)
        served_catalog: Any = type("Served", (), {"url": server.base_url})
        for seed in range(first_seed(), first_seed() + examples(20, 2)):
            name = f"stars{seed}"
            star = StarSchema(served_catalog, client, random.Random(seed), name)
            star.append_facts(60)
            star.pin_attributes()
            star.append_facts(40)
            for number in range(30):
                if number == 20:
                    star.change_dimension()
                text = star.draw_query().replace(f"{name}.", f"{catalog}.{name}.")
                if "sum(DISTINCT" not in text:  # Spark fails while it adds texts.
                    counts[compare_with_rows(spark, text)] += 1
    assert counts["invalid"] < counts.total() / 8, counts
    assert counts["cube and rows"] > 2, counts
