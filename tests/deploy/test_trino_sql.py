"""The SQL entry's dialect is Trino's: DuckDB, by our translation, and Trino give the same rows and types."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest

from seamark.connector.client.errors import BadRequest
from seamark.connector.sql.choice import DUCKDB, TRINO
from seamark.connector.sql.session import Engines, SqlSession
from tests.connector.lake import catalog_at
from tests.connector.sql import hand_made
from tests.connector.sql.comparing import rows_of
from tests.connector.sql.random_queries import SCHEMA, TABLES, RandomQueries, random_rows
from tests.seeds import first_seed
from tests.services.trino import CATALOG, NEEDS_TRINO
from tests.services.trino_lake import TrinoLake

pytestmark = NEEDS_TRINO
NAMESPACE = "sql_entry"
HAND_MADE = "hand_made"
SEED = 5


@pytest.fixture(scope="module")
def filled(trino_lake: TrinoLake) -> Iterator[TrinoLake]:
    """Each table has several files, and deleted rows."""
    rng = random.Random(SEED)
    with catalog_at(trino_lake.seamark.base_url) as catalog:
        catalog.create_namespace(NAMESPACE)
        for name in TABLES:
            table = catalog.create_table(f"{NAMESPACE}.{name}", schema=SCHEMA)
            for _ in range(4):
                table.append(random_rows(rng, 12))
            table.delete("id = 3")
    yield trino_lake
    with catalog_at(trino_lake.seamark.base_url) as catalog:
        for name in TABLES:
            catalog.drop_table(f"{NAMESPACE}.{name}")
        catalog.drop_namespace(NAMESPACE)


def session(lake: TrinoLake, engine: str) -> SqlSession:
    url = f"http://tests@127.0.0.1:{lake.trino.port}?catalog={CATALOG}"
    return SqlSession(lake.seamark.base_url, engines=Engines(wanted=engine, trino=url))


def kind_of(trino_type: str) -> str:
    """In the dialect all texts are one type, and all times have microseconds."""
    plain = trino_type.replace("(3)", "").replace("(6)", "").replace(", ", ",")
    return "varchar" if plain.startswith("varchar") else plain


def check(lake: TrinoLake, seed: int, queries: int) -> Counter[str]:
    told: Counter[str] = Counter()
    drawn = RandomQueries(random.Random(seed), NAMESPACE)
    with session(lake, DUCKDB) as ours, session(lake, TRINO) as theirs:
        for number in range(queries):
            text = drawn.query()
            expected = theirs.sql(text)
            found = ours.sql(text)
            where = f"seed {seed}, query {number}: {text}"
            assert [kind_of(one) for one in found.types] == [kind_of(one) for one in expected.types], where
            assert rows_of(found) == rows_of(expected), where
            told["queries"] += 1
            told["files left out"] += sum(one.considered_files - one.files for one in found.explanation.tables)
    return told


def test_random_queries_give_the_same_rows_on_duckdb_and_trino(filled: TrinoLake) -> None:
    told = check(filled, first_seed(), 20)
    assert told["files left out"] > 0


@pytest.mark.slow
def test_a_thousand_random_queries_give_the_same_rows_on_duckdb_and_trino(filled: TrinoLake) -> None:
    told = check(filled, first_seed(), 1000)
    assert told["files left out"] > 100


@pytest.fixture
def hand_made_tables(trino_lake: TrinoLake) -> Iterator[TrinoLake]:
    with catalog_at(trino_lake.seamark.base_url) as catalog:
        catalog.create_namespace(HAND_MADE)
        for name, schema in hand_made.TABLES.items():
            table = catalog.create_table(f"{HAND_MADE}.{name}", schema=schema)
            for rows in hand_made.files_of(name):
                table.append(rows)
        yield trino_lake
        for name in hand_made.TABLES:
            catalog.drop_table(f"{HAND_MADE}.{name}")
        catalog.drop_namespace(HAND_MADE)


@pytest.mark.slow
def test_hand_made_statements_give_the_same_rows_on_duckdb_and_trino(hand_made_tables: TrinoLake) -> None:
    compared, wrong = 0, []
    with session(hand_made_tables, DUCKDB) as ours, session(hand_made_tables, TRINO) as theirs:
        for text in (re.sub(r"\bdb\b", HAND_MADE, one) for one in (*hand_made.STATEMENTS, *hand_made.OF_TRINO)):
            try:
                found = rows_of(ours.sql(text))
            except BadRequest as error:
                if "DuckDB does not run this" not in str(error):
                    raise
                continue
            try:
                expected = rows_of(theirs.sql(text))
            except BadRequest as error:
                if "correlated subquery" not in str(error):  # Trino does not run all of them
                    wrong.append(f"{text}\n  {error}")
                continue
            if found != expected:
                wrong.append(f"{text}\n  besides {found - expected}\n  without {expected - found}")
            compared += 1
    assert not wrong, "\n".join(wrong)
    assert compared > 0.8 * len(hand_made.STATEMENTS)


def test_what_is_large_or_unknown_to_duckdb_runs_on_trino(filled: TrinoLake) -> None:
    url = f"http://tests@127.0.0.1:{filled.trino.port}?catalog={CATALOG}"
    engines = Engines(trino=url, large_bytes=10_000)
    with SqlSession(filled.seamark.base_url, engines=engines) as entry:
        assert entry.explain(f"SELECT id FROM {NAMESPACE}.t1 WHERE id < -1000").engine == DUCKDB
        large = entry.sql(f"SELECT count(*) AS n, max(d) AS last FROM sea.{NAMESPACE}.t1")
        assert large.explanation.engine == TRINO
        assert "bytes" in large.explanation.why
        assert large.to_arrow().column_names == ["n", "last"]
        unknown = entry.sql(f"SELECT approx_distinct(id) AS n FROM {NAMESPACE}.t1")
        assert (unknown.explanation.engine, unknown.to_arrow().schema) == (TRINO, pa.schema([("n", pa.int64())]))
        with pytest.raises(BadRequest, match="Trino refuses"):
            entry.sql("SELECT no_such_function(1)")
    with pytest.raises(BadRequest, match="no Trino is configured"), SqlSession(filled.seamark.base_url) as alone:
        alone.sql(f"SELECT approx_distinct(id) FROM {NAMESPACE}.t1")


def test_a_runtime_error_is_one_on_both(filled: TrinoLake) -> None:
    with session(filled, DUCKDB) as ours, session(filled, TRINO) as theirs:
        for text in (f"SELECT id / 0 FROM {NAMESPACE}.t1", f"SELECT price / 0 FROM {NAMESPACE}.t1"):
            for entry in (ours, theirs):
                with pytest.raises(BadRequest, match="ivision by zero"):
                    entry.sql(text).to_arrow()
