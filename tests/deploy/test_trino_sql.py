"""Tests that the SQL entry's dialect equals Trino's: DuckDB with Seamark's translation gives the same rows and
types.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
import trino.dbapi

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.choice import DUCKDB, TRINO
from seamark.connector.sql.session import Engines, SqlSession
from tests.connector.lake import open_catalog
from tests.connector.sql import hand_made
from tests.connector.sql.comparing import count_rows
from tests.connector.sql.mixed_predicates import MixedPredicates
from tests.connector.sql.random_queries import SCHEMA, TABLES, RandomQueries, draw_rows
from tests.seeds import examples, first_seed
from tests.services.needs import NEEDS_TRINO
from tests.services.trino import CATALOG
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy

pytestmark = NEEDS_TRINO
NAMESPACE = "sql_entry"
HAND_MADE = "hand_made"
SEED = 5


@pytest.fixture(scope="module")
def lake_with_tables(trino_lake: TrinoLake) -> Iterator[TrinoLake]:
    """Add tables with several files and a deleted row to the catalog, and drop them after the tests."""
    rng = random.Random(SEED)
    with open_catalog(trino_lake.seamark.base_url) as catalog:
        catalog.create_namespace(NAMESPACE)
        for name in TABLES:
            table = catalog.create_table(f"{NAMESPACE}.{name}", schema=SCHEMA)
            for _ in range(4):
                table.append(draw_rows(rng, 12))
            table.delete("id = 3")
    yield trino_lake
    with open_catalog(trino_lake.seamark.base_url) as catalog:
        for name in TABLES:
            catalog.drop_table(f"{NAMESPACE}.{name}")
        catalog.drop_namespace(NAMESPACE)


@pytest.fixture(scope="module")
def proxy(lake_with_tables: TrinoLake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrinoProxy]:
    flags = ("--trino", lake_with_tables.trino.base_url, "--kept-max", "1", "--budget-ms", "30000", "--trust-time-zone")
    with run_trino_proxy(tmp_path_factory.mktemp("proxy"), *flags, seamark=lake_with_tables.seamark.base_url) as proxy:
        yield proxy


def open_session(lake: TrinoLake, engine: str, port: int | None = None) -> SqlSession:
    """Open a session. `port` is the port of a proxy in front of Trino."""
    url = f"http://tests@127.0.0.1:{port or lake.trino.port}?catalog={CATALOG}"
    return SqlSession(lake.seamark.base_url, engines=Engines(wanted=engine, trino=url))


def to_dialect_type(trino_type: str) -> str:
    """Return the type of Seamark's SQL for a type of Trino.

    Seamark's SQL has one text type, and all its times have microseconds, so lengths and precisions are dropped.
    """
    plain_type = trino_type.replace("(3)", "").replace("(6)", "").replace(", ", ",")
    return "varchar" if plain_type.startswith("varchar") else plain_type


def compare_engines(lake: TrinoLake, proxy: TrinoProxy, seed: int, queries: int) -> Counter[str]:
    """Check that Trino, Trino behind the proxy, and DuckDB with Seamark's translation return the same rows.

    A statement that Trino refuses is not compared. If Seamark cannot translate a statement for DuckDB, only Trino and
    the proxy are compared.

    Returns:
        The numbers of statements by outcome, and the number of files that plans left out.
    """
    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    random_queries = RandomQueries(rng, NAMESPACE)
    mixed_predicates = MixedPredicates(rng)
    count_before = proxy.count_statements("rewritten")
    with (
        open_session(lake, DUCKDB) as duckdb_session,
        open_session(lake, TRINO) as trino_session,
        open_session(lake, TRINO, proxy.port) as proxied_session,
    ):
        for number in range(queries):
            text = random_queries.draw_query()
            if number % 3 == 0:
                text = f"SELECT * FROM {NAMESPACE}.{rng.choice(TABLES)} WHERE {mixed_predicates.draw_trino_predicate()}"
            note = f"seed {seed}, query {number}: {text}"
            counts["queries"] += 1
            try:
                expected = trino_session.sql(text)
                expected_rows = count_rows(expected)
            except InvalidRequest as error:
                counts[f"refused: {str(error)[:60]}"] += 1
                continue
            assert count_rows(proxied_session.sql(text)) == expected_rows, f"the proxy, {note}"
            try:
                actual = duckdb_session.sql(text)
                actual_rows = count_rows(actual)
            except InvalidRequest as error:
                if "DuckDB does not run this" not in str(error):
                    raise
                counts["not translated"] += 1
                continue
            assert actual_rows == expected_rows, note
            assert [to_dialect_type(kind) for kind in actual.types] == [
                to_dialect_type(kind) for kind in expected.types
            ], note
            counts["translated"] += 1
            counts["files left out"] += sum(table.considered_files - table.files for table in actual.explanation.tables)
    counts["rewritten"] = proxy.count_statements("rewritten") - count_before
    return counts


def check_campaign_counts(counts: Counter[str]) -> None:
    assert counts["translated"] > 0.6 * counts["queries"], counts
    assert counts["rewritten"] > 0.1 * counts["queries"], counts
    assert counts["files left out"] > 0.1 * counts["queries"], counts


def test_random_queries_give_the_same_rows_on_duckdb_and_trino(lake_with_tables: TrinoLake, proxy: TrinoProxy) -> None:
    count = examples(20, 5)
    counts = compare_engines(lake_with_tables, proxy, first_seed(), count)
    assert min(counts["translated"], counts["rewritten"]) > count / 5, counts


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_random_queries_give_the_same_rows_on_duckdb_and_trino(
    lake_with_tables: TrinoLake, proxy: TrinoProxy, part: int
) -> None:
    check_campaign_counts(compare_engines(lake_with_tables, proxy, first_seed() + part, 1000))


@pytest.mark.slow
def test_local_times_compared_with_zoned_times_are_in_the_sessions_zone(
    lake_with_tables: TrinoLake, proxy: TrinoProxy
) -> None:
    """On the day of this test, the local time 02:45 does not exist in Berlin.

    Compared with a zoned time it is 03:45, which is after 03:20.
    """
    times = [datetime(2020, 3, 29, hour, minute) for hour, minute in ((1, 0), (2, 45), (3, 20), (4, 0))]
    with open_catalog(lake_with_tables.seamark.base_url) as catalog:
        table = catalog.create_table(f"{NAMESPACE}.times", schema=pa.schema([("ts", pa.timestamp("us"))]))
        for moment in times:
            table.append(pa.table({"ts": pa.array([moment], pa.timestamp("us"))}))
    try:
        for condition in (
            "ts BETWEEN TIMESTAMP '2020-03-29 03:30:00' AND TIMESTAMP '2020-05-01 00:00:00 UTC'",
            "ts BETWEEN TIMESTAMP '2020-03-29 03:30:00' AND TIMESTAMP '2020-05-01 00:00:00'",
            "ts IN (TIMESTAMP '2020-03-29 03:45:00', TIMESTAMP '2020-05-01 00:00:00 UTC')",
            "ts NOT BETWEEN TIMESTAMP '2020-03-29 03:30:00' AND now()",
        ):
            for zone in ("Europe/Berlin", "UTC"):
                text = f"SELECT ts FROM {NAMESPACE}.times WHERE {condition}"
                direct_rows = _read_rows_in_zone(lake_with_tables.trino.port, zone, text)
                assert _read_rows_in_zone(proxy.port, zone, text) == direct_rows, (zone, text)
    finally:
        with open_catalog(lake_with_tables.seamark.base_url) as catalog:
            catalog.drop_table(f"{NAMESPACE}.times")


def _read_rows_in_zone(port: int, zone: str, text: str) -> list[list[Any]]:
    connection: Any = trino.dbapi.connect(  # type: ignore[no-untyped-call]
        host="127.0.0.1", port=port, user="tests", catalog=CATALOG, timezone=zone
    )
    try:
        rows: list[list[Any]] = connection.cursor().execute(text).fetchall()
        return sorted(rows)
    finally:
        connection.close()


@pytest.fixture
def hand_made_tables(trino_lake: TrinoLake) -> Iterator[TrinoLake]:
    with open_catalog(trino_lake.seamark.base_url) as catalog:
        catalog.create_namespace(HAND_MADE)
        for name, schema in hand_made.TABLES.items():
            table = catalog.create_table(f"{HAND_MADE}.{name}", schema=schema)
            for rows in hand_made.split_into_files(name):
                table.append(rows)
        yield trino_lake
        for name in hand_made.TABLES:
            catalog.drop_table(f"{HAND_MADE}.{name}")
        catalog.drop_namespace(HAND_MADE)


@pytest.mark.slow
def test_handwritten_statements_give_the_same_rows_on_duckdb_and_trino(hand_made_tables: TrinoLake) -> None:
    compared_count, wrong_queries = 0, []
    with (
        open_session(hand_made_tables, DUCKDB) as duckdb_session,
        open_session(hand_made_tables, TRINO) as trino_session,
    ):
        for text in (
            re.sub(r"\bdb\b", HAND_MADE, statement)
            for statement in (*hand_made.STATEMENTS, *hand_made.TRINO_STATEMENTS)
        ):
            try:
                rows = count_rows(duckdb_session.sql(text))
            except InvalidRequest as error:
                if "DuckDB does not run this" not in str(error):
                    raise
                continue
            try:
                expected = count_rows(trino_session.sql(text))
            except InvalidRequest as error:
                if "correlated subquery" not in str(error):  # Trino refuses some of the statements.
                    wrong_queries.append(f"{text}\n  {error}")
                continue
            if rows != expected:
                wrong_queries.append(f"{text}\n  additional {rows - expected}\n  missing {expected - rows}")
            compared_count += 1
    assert not wrong_queries, "\n".join(wrong_queries)
    # Each engine may refuse a few statements, which are not compared.
    assert compared_count > 0.8 * len(hand_made.STATEMENTS)


@pytest.mark.slow
def test_statements_that_are_large_or_not_supported_in_duckdb_run_on_trino(lake_with_tables: TrinoLake) -> None:
    url = f"http://tests@127.0.0.1:{lake_with_tables.trino.port}?catalog={CATALOG}"
    engines = Engines(trino=url, large_bytes=10_000)
    with SqlSession(lake_with_tables.seamark.base_url, engines=engines) as session:
        assert session.explain(f"SELECT id FROM {NAMESPACE}.t1 WHERE id < -1000").engine == DUCKDB
        large_answer = session.sql(f"SELECT count(*) AS n, max(d) AS last FROM sea.{NAMESPACE}.t1")
        assert large_answer.explanation.engine == TRINO
        assert "bytes" in large_answer.explanation.why
        assert large_answer.to_arrow().column_names == ["n", "last"]
        unknown_answer = session.sql(f"SELECT approx_percentile(id, 0.5) AS n FROM {NAMESPACE}.t1")
        assert (unknown_answer.explanation.engine, unknown_answer.to_arrow().schema) == (
            TRINO,
            pa.schema([("n", pa.int64())]),
        )
        with pytest.raises(InvalidRequest, match="Trino refuses"):
            session.sql("SELECT no_such_function(1)")
    with (
        pytest.raises(InvalidRequest, match="no Trino is configured"),
        SqlSession(lake_with_tables.seamark.base_url) as plain_session,
    ):
        plain_session.sql(f"SELECT approx_percentile(id, 0.5) FROM {NAMESPACE}.t1")


@pytest.mark.slow
def test_runtime_error_occurs_on_both_engines(lake_with_tables: TrinoLake) -> None:
    with (
        open_session(lake_with_tables, DUCKDB) as duckdb_session,
        open_session(lake_with_tables, TRINO) as trino_session,
    ):
        for text in (f"SELECT id / 0 FROM {NAMESPACE}.t1", f"SELECT price / 0 FROM {NAMESPACE}.t1"):
            for session in (duckdb_session, trino_session):
                with pytest.raises(InvalidRequest, match="ivision by zero"):
                    session.sql(text).to_arrow()
