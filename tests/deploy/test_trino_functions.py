"""Tests that functions and predicates give the same rows in Trino, behind the proxy, and in DuckDB's translation.

The tables are partitioned by transforms, and have nested, binary and UUID columns, times before 1970, and NaN.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trino.dbapi

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.choice import DUCKDB, TRINO
from seamark.connector.sql.session import Engines, SqlResult, SqlSession
from tests.connector.lake import open_catalog
from tests.connector.sql.comparing import to_comparable_value
from tests.seeds import first_seed
from tests.services.needs import NEEDS_TRINO
from tests.services.trino import CATALOG
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy

pytestmark = [*NEEDS_TRINO, pytest.mark.slow]

NAMESPACE = "functions"
SQL = Path(__file__).parents[1] / "connector" / "sql"
PREDICATES = (SQL / "predicates.sql").read_text().splitlines()
STATEMENTS = (SQL / "functions.sql").read_text().splitlines()
COLUMNS = (
    "id bigint, k integer, name varchar, d date, ts timestamp(6), tz timestamp(6) with time zone, amt decimal(12, 2),"
    " x double, r real, b boolean, tags array(varchar), m map(varchar, integer), s row(a integer, c varchar),"
    " bin varbinary, u uuid"
)
PARTITIONS = {
    "plain": "ARRAY[]",
    "by_day": "ARRAY['day(ts)', 'truncate(name, 2)']",
    "by_bucket": "ARRAY['bucket(id, 4)', 'month(d)']",
    "by_hour": "ARRAY['truncate(amt, 100)', 'hour(tz)']",
}
_NAMES = (
    None,
    "",
    "a",
    "ab",
    "abc",
    "Abc",
    "äb",
    "Straße",
    "STRASSE",
    "x%y",
    "x_y",
    "z\\",
    "é",
    " a",
    "a ",
    "𝒳y",
    "10",
    "9",
)
_DAYS = (None, date(1969, 12, 31), date(1970, 1, 1), date(2024, 2, 29), date(2023, 12, 31), date(2000, 1, 31))
_AMOUNTS = (None, "0.00", "-0.01", "99.99", "100.00", "1234.50", "-250.25", "12.25")
_DOUBLES = ("NULL", "0e0", "-0e0", "nan()", "infinity()", "-infinity()", "0.1e0", "1.5e0", "-2.25e0", "1e18")
_TAGS = ("NULL", "ARRAY[]", "ARRAY['a']", "ARRAY['a', NULL, 'b']")
_MAPS = ("NULL", "MAP()", "MAP(ARRAY['a'], ARRAY[1])", "MAP(ARRAY['b', 'a'], ARRAY[NULL, 2])")
_ROWS = ("NULL", "ROW(1, 'q')", "ROW(NULL, 'r')", "ROW(7, NULL)")
_BYTES = ("NULL", "X''", "X'00'", "X'6162'", "X'FFFE'")
_UUIDS = (None, UUID(int=1), UUID(int=1 << 127), UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7"))


def quote(value: object, kind: str = "") -> str:
    return "NULL" if value is None else f"{kind}'{value}'".strip()


def draw_row(rng: random.Random, number: int) -> str:
    """Return a row of VALUES with borderline values.

    A third of the times are before or around 1970. Nulls occur with different periods, so that they do not coincide.
    """
    base = datetime(1969, 12, 30) if number % 3 == 0 else datetime(2024, 2, 28, 12)
    ts = base + timedelta(hours=rng.randrange(96), microseconds=rng.choice((0, 1, 999_999, 500_000, 500)))
    tz = ts.replace(tzinfo=UTC) + timedelta(days=10)
    values = (
        str(rng.choice((number, number, -number, "NULL", 9_007_199_254_740_993))),  # 2**53 + 1 has no double.
        str(rng.choice(("NULL", 0, 1, 2, 3, -1, 2_147_483_647))),
        quote(rng.choice(_NAMES)),
        quote(rng.choice(_DAYS), "DATE "),
        quote(None if number % 13 == 0 else f"{ts:%Y-%m-%d %H:%M:%S.%f}", "TIMESTAMP "),
        quote(None if number % 11 == 0 else f"{tz:%Y-%m-%d %H:%M:%S.%f} UTC", "TIMESTAMP "),
        quote(rng.choice(_AMOUNTS), "DECIMAL "),
        rng.choice(_DOUBLES),
        f"CAST({rng.choice(_DOUBLES[:-1])} AS real)",
        rng.choice(("NULL", "true", "false")),
        rng.choice(_TAGS),
        rng.choice(_MAPS),
        rng.choice(_ROWS),
        rng.choice(_BYTES),
        quote(rng.choice(_UUIDS), "UUID "),
    )
    column_types = (
        "bigint",
        "integer",
        "varchar",
        "date",
        "timestamp(6)",
        "timestamp(6) with time zone",
        "decimal(12, 2)",
    )
    column_types += (
        "double",
        "real",
        "boolean",
        "array(varchar)",
        "map(varchar, integer)",
        "row(a integer, c varchar)",
    )
    column_types += ("varbinary", "uuid")
    return f"({', '.join(f'CAST({value} AS {kind})' for value, kind in zip(values, column_types, strict=True))})"


@pytest.fixture(scope="module")
def lake(trino_lake: TrinoLake) -> Iterator[TrinoLake]:
    """Create tables of three files, some with deleted rows, and drop them after the tests of the module."""
    rng = random.Random(first_seed())
    with open_catalog(trino_lake.seamark.base_url) as catalog:
        catalog.create_namespace(NAMESPACE)
    connection = trino.dbapi.connect(host="127.0.0.1", port=trino_lake.trino.port, user="tests", catalog=CATALOG)

    def run(text: str) -> None:
        connection.cursor().execute(text).fetchall()

    for table, transforms in PARTITIONS.items():
        partition_clause = "" if table == "plain" else f" WITH (partitioning = {transforms})"
        run(f"CREATE TABLE {NAMESPACE}.{table} ({COLUMNS}){partition_clause}")
        for file in range(3):
            rows = ", ".join(draw_row(rng, number) for number in range(file * 12, file * 12 + 12))
            run(f"INSERT INTO {NAMESPACE}.{table} VALUES {rows}")
        run(f"DELETE FROM {NAMESPACE}.{table} WHERE k = 3 AND id > 10")
    yield trino_lake
    for table in PARTITIONS:
        run(f"DROP TABLE {NAMESPACE}.{table}")
    run(f"DROP SCHEMA {NAMESPACE}")
    connection.close()


@pytest.fixture(scope="module")
def proxy(lake: TrinoLake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrinoProxy]:
    flags = ("--trino", lake.trino.base_url, "--kept-max", "1", "--budget-ms", "60000")
    with run_trino_proxy(tmp_path_factory.mktemp("proxy"), *flags, seamark=lake.seamark.base_url) as proxy:
        yield proxy


def open_session(lake: TrinoLake, engine: str, port: int | None = None) -> SqlSession:
    url = f"http://tests@127.0.0.1:{port or lake.trino.port}?catalog={CATALOG}"
    return SqlSession(lake.seamark.base_url, engines=Engines(wanted=engine, trino=url))


def to_comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: to_comparable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_comparable(item) for item in value]
    return str(value) if isinstance(value, Decimal | UUID) else to_comparable_value(value)


def count_rows(result: SqlResult) -> Counter[str]:
    columns = [[to_comparable(value) for value in column.to_pylist()] for column in result.to_arrow().columns]
    return Counter(map(repr, zip(*columns, strict=True)))


@pytest.mark.parametrize("part", range(4))
def test_functions_give_the_same_rows_on_duckdb_and_trino(lake: TrinoLake, proxy: TrinoProxy, part: int) -> None:
    tables = list(PARTITIONS)
    table, other_table = (f"{NAMESPACE}.{tables[(part + shift) % 4]}" for shift in (0, 1))
    predicates = [f"SELECT id, k, name, ts FROM {table} p WHERE {predicate}" for predicate in PREDICATES[part::4]]
    statements = [*predicates, *(text.replace("FROM {t}", f"FROM {table}") for text in STATEMENTS[part::4])]
    differences, translated_count = [], 0
    with (
        open_session(lake, DUCKDB) as duckdb_session,
        open_session(lake, TRINO) as trino_session,
        open_session(lake, TRINO, proxy.port) as proxied_session,
    ):
        for statement in statements:
            text = statement.replace("{t}", table).replace("{o}", other_table)
            expected = count_rows(trino_session.sql(text))
            if count_rows(proxied_session.sql(text)) != expected:
                differences.append(f"proxy: {text}")
            try:
                actual = count_rows(duckdb_session.sql(text))
            except InvalidRequest as error:
                if "DuckDB does not run this" not in str(error):
                    raise
                continue
            translated_count += 1
            if actual != expected:
                differences.append(f"{text}\n  additional {actual - expected}\n  missing {expected - actual}")
    assert not differences, "\n".join(differences)
    assert translated_count > 0.6 * len(statements)
