"""Tests that statements give the same rows, names and types of columns, counts and errors with and without the
proxy.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.catalog import load_catalog

from bench.ssb.queries import QUERIES
from seamark.connector.sql.choice import DUCKDB, TRINO
from seamark.connector.sql.session import Engines, SqlSession
from tests.connector.analysis.statements import RandomStatements
from tests.connector.sql.comparing import count_rows
from tests.services.needs import NEEDS_TRINO
from tests.services.trino import CATALOG
from tests.services.trino_lake import TrinoLake
from tests.support.trino_comparison import TrinoAndProxy, make_benchmark_tables, open_trino_and_proxy, write_files

pytestmark = NEEDS_TRINO
TPCH = [part for part in Path(__file__).with_name("tpch.sql").read_text().split(";") if part.strip()]
QUERIES_PER_LAKE = 30


@pytest.fixture(scope="module")
def trino_and_proxy(tmp_path_factory: pytest.TempPathFactory, trino_lake: TrinoLake) -> Iterator[TrinoAndProxy]:
    with open_trino_and_proxy(tmp_path_factory.mktemp("identity"), trino_lake) as trino_and_proxy:
        yield trino_and_proxy


@pytest.fixture(scope="module")
def benchmark_tables(trino_lake: TrinoLake, tmp_path_factory: pytest.TempPathFactory) -> None:
    make_benchmark_tables(tmp_path_factory.mktemp("benchmarks"), trino_lake)


@pytest.mark.slow
@pytest.mark.usefixtures("benchmark_tables")
@pytest.mark.parametrize("query_step", [7, 3, 1])
def test_queries_of_tpc_h_and_the_star_schema_benchmark_are_equal_through_the_proxy(
    trino_and_proxy: TrinoAndProxy, query_step: int
) -> None:
    """`query_step` is the step between tested queries: every seventh query, every third query, or all queries."""
    tpch, ssb = TPCH[::query_step], list(QUERIES.values())[::query_step]
    count_before = trino_and_proxy.proxy.count_statements("rewritten")
    for sql in tpch:
        assert trino_and_proxy.ask(sql, schemas=("tpch", "tpch")).rows
    tpch_rewritten = trino_and_proxy.proxy.count_statements("rewritten") - count_before
    for sql in ssb:
        assert trino_and_proxy.ask(sql, schemas=("ssb", "ssb")).columns
    assert len(TPCH) == 22
    # Some queries of TPC-H have no condition that can prune files. At least these numbers are rewritten, by step.
    assert tpch_rewritten >= {1: 14, 3: 4, 7: 1}[query_step]
    assert trino_and_proxy.proxy.count_statements("rewritten") - count_before - tpch_rewritten == len(ssb)
    assert trino_and_proxy.proxy.count_statements("original") == 0


@pytest.mark.usefixtures("benchmark_tables")
# The fast tests include random queries of the SQL entry over Trino.
@pytest.mark.slow
@pytest.mark.parametrize("query_step", [7, 1])
def test_sql_entry_answers_the_queries_of_both_benchmarks_like_trino(trino_lake: TrinoLake, query_step: int) -> None:
    url = f"http://tests@127.0.0.1:{trino_lake.trino.port}?catalog={CATALOG}"
    for schema, queries in (("tpch", TPCH), ("ssb", list(QUERIES.values()))):
        with (
            SqlSession(trino_lake.seamark.base_url, schema=schema, engines=Engines(DUCKDB)) as duckdb_session,
            SqlSession(trino_lake.seamark.base_url, schema=schema, engines=Engines(TRINO, url)) as trino_session,
        ):
            for sql in queries[::query_step]:
                assert count_rows(duckdb_session.sql(sql)) == count_rows(trino_session.sql(sql)), sql


# Random statements, and statements that write


def create_random_tables(rng: random.Random, trino_lake: TrinoLake, schema: str) -> RandomStatements:
    """Create tables of a few rows, each row in its own file. Return a generator of statements over them."""
    statements = RandomStatements(rng, recursive_share=0)
    catalog = load_catalog("seamark", type="rest", uri=trino_lake.seamark.base_url)
    catalog.create_namespace(schema)
    with duckdb.connect() as db:
        for text in statements.make_tables():
            db.execute(text)
        for table in statements.tables:
            name = table.name.replace('"', '""')
            rows = db.sql(f'FROM "{name}"').to_arrow_table()
            write_files(catalog, (schema, table.name.lower()), rows, len(rows) or 1)
    catalog.close()
    return statements


def translate_to_trino(text: str, schema: str) -> str:
    """Translate a statement from DuckDB's syntax to Trino's: the order of LIMIT and OFFSET, and the schema's name."""
    text = re.sub(r" LIMIT (\d+) OFFSET (\d+)", r" OFFSET \2 LIMIT \1", text)
    return re.sub(r"\bmain(?=\.| \. |/\*\*/\.)", schema, text)


def replace_numbers(rng: random.Random, text: str) -> tuple[str, list[Any]]:
    """Replace some of the numbers with parameters, and return the text and the values of the parameters."""
    values: list[Any] = []

    def bind(match: re.Match[str]) -> str:
        if rng.random() < 0.5:
            return match[0]
        values.append(int(match[2]))
        return f"{match[1]}?"

    return re.sub(r"( (?:=|<>|<|>|<=|>=) )(-?\d+)(?![\w.])", bind, text), values


def run_campaign(trino_and_proxy: TrinoAndProxy, trino_lake: TrinoLake, seed: str, queries: int) -> None:
    for first_query in range(0, queries, QUERIES_PER_LAKE):
        rng, schema = random.Random(f"{seed}/{first_query}"), f"random_{seed}_{first_query}"
        statements = create_random_tables(rng, trino_lake, schema)
        for _ in range(min(QUERIES_PER_LAKE, queries - first_query)):
            text, values = translate_to_trino(statements.draw_query(rng.choice([1, 1, 2, 2, 3])), schema), []
            if rng.random() < 0.3:
                text, values = replace_numbers(rng, text)
            trino_and_proxy.ask(text, values, schemas=(schema, schema), legacy_prepared_statements=rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "queries"),
    [
        (61, 6),
        pytest.param(60, 60, marks=pytest.mark.slow),
        pytest.param(1000, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_random_queries_are_equal_through_the_proxy(
    trino_and_proxy: TrinoAndProxy, trino_lake: TrinoLake, seed: int, queries: int
) -> None:
    """The proxy does not change the rows of queries with many features of SQL.

    The queries have joins, subqueries, set operations, grouping sets, windows, quoted names, comments and parameters.
    """
    counts_before, rewritten_before = trino_and_proxy.counts.copy(), trino_and_proxy.proxy.count_statements("rewritten")
    run_campaign(trino_and_proxy, trino_lake, f"{seed}", queries)
    counts = trino_and_proxy.counts - counts_before
    rewritten = trino_and_proxy.proxy.count_statements("rewritten") - rewritten_before
    print(f"{dict(counts)}, {rewritten} rewritten")
    assert counts["asked"] == queries
    # A campaign of queries that mostly fail, or return or rewrite nothing, would test little.
    assert counts["failed"] < 0.2 * queries
    assert counts["with rows"] > 0.4 * queries
    assert rewritten > 0.3 * queries
    assert trino_and_proxy.proxy.count_statements("original") <= counts["failed"]


@pytest.mark.slow
def test_statements_that_write_are_equal_through_the_proxy(
    trino_and_proxy: TrinoAndProxy, trino_lake: TrinoLake
) -> None:
    """All writing statements of Trino's connector run in two schemas: through the proxy, and without it."""
    schemas = ("written", "written_through")
    for schema in schemas:
        trino_lake.trino.rows(f"CREATE SCHEMA {schema}")
    count_before = trino_and_proxy.proxy.count_statements("rewritten")
    for text in WRITE_STATEMENTS:
        trino_and_proxy.ask(text, schemas=schemas)
        for table in ("t", "u", "copy", "view"):
            trino_and_proxy.ask(f"SELECT * FROM {table} WHERE id BETWEEN 11 AND 18", schemas=schemas)
    for table in ("t", "u"):
        trino_and_proxy.ask(f"SELECT * FROM {table}", schemas=schemas)
    assert trino_and_proxy.counts["failed"] > 0
    assert trino_and_proxy.proxy.count_statements("rewritten") - count_before > len(WRITE_STATEMENTS)


WRITE_STATEMENTS = [
    "CREATE TABLE t (id bigint, land varchar, day date, price decimal(9, 2)) "
    "WITH (partitioning = ARRAY['land'], sorted_by = ARRAY['id'], format_version = 2)",
    *[
        f"INSERT INTO t SELECT n, 'l' || cast(n % 2 AS varchar), DATE '2026-01-01' + n * INTERVAL '1' DAY, n / 4.0 "
        f"FROM UNNEST(sequence({first_id}, {first_id + 4})) s (n)"
        for first_id in range(0, 40, 5)
    ],
    "CREATE TABLE u AS SELECT * FROM t WHERE id BETWEEN 12 AND 30",
    "CREATE TABLE u AS SELECT 1 AS id",
    "CREATE TABLE IF NOT EXISTS u AS SELECT 1 AS id",
    "CREATE VIEW view AS SELECT id, land FROM t WHERE id > 15",
    "INSERT INTO u SELECT id + 100, land, day, price FROM t WHERE id < 4",
    "INSERT INTO u (id) VALUES (17), (18)",
    "INSERT INTO u VALUES ('wrong')",
    "UPDATE t SET price = price * 2 WHERE id BETWEEN 13 AND 16",
    "UPDATE t SET price = (SELECT max(price) FROM u WHERE u.id = 14) WHERE id = 14",
    "DELETE FROM t WHERE id = 15",
    "DELETE FROM t WHERE land = 'l1' AND id > 30",
    "DELETE FROM t WHERE id IN (SELECT id FROM u WHERE id = 17)",
    "MERGE INTO t USING (SELECT * FROM u WHERE id BETWEEN 10 AND 20) AS s ON t.id = s.id "
    "WHEN MATCHED AND s.id = 12 THEN DELETE WHEN MATCHED THEN UPDATE SET price = 1 "
    "WHEN NOT MATCHED THEN INSERT (id, land) VALUES (s.id, 'new')",
    "MERGE INTO t USING u ON t.id < u.id WHEN MATCHED THEN UPDATE SET price = 2",
    "DELETE FROM t WHERE land = 'l0' AND id IS NULL",
    "CREATE TABLE copy (LIKE t INCLUDING PROPERTIES)",
    "INSERT INTO copy SELECT * FROM t WHERE id = 13 UNION ALL SELECT * FROM u WHERE id = 18",
    "CREATE OR REPLACE TABLE copy AS SELECT t.id, u.price FROM t JOIN u ON t.id = u.id WHERE u.id < 20",
    "ALTER TABLE t ADD COLUMN extra row(a bigint, b varchar)",
    "ALTER TABLE t ADD COLUMN extra.c double",
    "INSERT INTO t VALUES (16, 'l3', NULL, NULL, ROW(1, 'x', 1e0))",
    "ALTER TABLE t RENAME COLUMN price TO cost",
    "ALTER TABLE u ALTER COLUMN price SET DATA TYPE decimal(12, 2)",
    "ALTER TABLE t DROP COLUMN day",
    "ALTER TABLE t RENAME COLUMN land TO day",
    "ALTER TABLE t SET PROPERTIES partitioning = ARRAY['bucket(id, 3)']",
    "INSERT INTO t (id, day) SELECT id, 'again' FROM t WHERE id > 36",
    "ALTER TABLE t EXECUTE optimize WHERE id < 100",
    "ALTER TABLE t EXECUTE optimize_manifests",
    "ANALYZE t",
    "COMMENT ON TABLE t IS 'where id = 1'",
    "COMMENT ON COLUMN t.id IS 'é'",
    "TRUNCATE TABLE u",
    "ALTER TABLE copy RENAME TO other",
    "ALTER TABLE other RENAME TO copy",
    "DROP VIEW view",
    "DROP TABLE copy",
    "DROP TABLE copy",
    "DROP TABLE IF EXISTS copy",
    "SELECT nothing FROM t WHERE id = 1",
    "SELECT 1 / (id - 16) FROM t WHERE id = 16",
]
