"""Statements in `hand_made.sql`, one on each line, that are easily answered wrong.

They have nulls in NOT IN, rows that outer joins keep, names that hide other names, and conditions above windows,
groups and set operations. Their tables are in the schema `db`.

The statements have the same meaning in DuckDB, as `open_plain_database` opens it, and in Trino. Those in
`hand_made_spark.sql` are for Spark; their schema `{db}` also has the tables of `tests/engines/spark/star.py`, and
`{old}` is a snapshot of `sales`.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

STATEMENTS = tuple(Path(__file__).with_suffix(".sql").read_text().splitlines())
SPARK_STATEMENTS = tuple(Path(__file__).with_name("hand_made_spark.sql").read_text().splitlines())
FORMERLY_WRONG_STATEMENTS = tuple(
    statement
    for statement in STATEMENTS
    if re.search(r"year\(|, db\.\w+ (RIGHT|FULL)|ORDER BY (-t|x \+|total)", statement)
)
"""Statements with clauses for which Seamark once returned wrong rows."""
GROUPING_SETS = (
    "SELECT k, s, count(*), sum(id), grouping(k, s) FROM db.a GROUP BY ROLLUP (k, s)",
    "SELECT k, count(*), grouping(k) AS g FROM db.a WHERE id < 9 GROUP BY CUBE (k, ok) ORDER BY g, 1, 2",
    "SELECT k, s, max(id) FROM db.a GROUP BY GROUPING SETS ((k, s), k, ()) HAVING k IS NULL OR grouping(s) = 0",
    "SELECT k, count(*) FROM db.a WHERE id < 0 GROUP BY ROLLUP (k)",
    "SELECT a.k, b.w, count(*) FROM db.a JOIN db.b ON a.k = b.k GROUP BY a.k, ROLLUP (b.w) HAVING a.k > 2",
    "SELECT k, n FROM (SELECT k, count(*) AS n FROM db.a GROUP BY ROLLUP (k)) q WHERE k IS NULL",
)
"""Statements with several grouping sets, in the dialects of Trino and DuckDB."""
TRINO_STATEMENTS = (
    *GROUPING_SETS,
    "SELECT id, -k AS k FROM db.a WHERE k IS NOT NULL ORDER BY k + 0, id LIMIT 4",
    "SELECT k, count(*) AS n, sum(id) AS s FROM db.a GROUP BY k ORDER BY s / n DESC, k LIMIT 3",
    "SELECT upper(s), lower(s), length(s) FROM db.a",
    "SELECT id FROM db.a WHERE upper(s) = 'STRAßE'",
    "SELECT id FROM db.a WHERE upper(s) = 'STRASSE' OR upper(s) = 'STRAẞE'",
    "SELECT id FROM db.a WHERE f > 0.1E0",
    "SELECT a.id, b.id FROM db.a JOIN db.b ON a.v = b.v WHERE a.k < 2",
    "SELECT k, s, b.id, c.n FROM db.b JOIN db.c USING (k, s)",
)
"""Statements that have another meaning in DuckDB."""
_ROWS_PER_FILE = {"a": 4, "b": 3, "c": 2, "e": 1}
TABLES = {
    "a": pa.schema(
        [
            ("id", pa.int64()),
            ("k", pa.int32()),
            ("v", pa.float64()),
            ("f", pa.float32()),
            ("s", pa.string()),
            ("p", pa.decimal128(9, 2)),
            ("d", pa.date32()),
            ("ts", pa.timestamp("us")),
            ("z", pa.timestamp("us", tz="UTC")),
            ("ok", pa.bool_()),
        ]
    ),
    "b": pa.schema(
        [
            ("id", pa.int64()),
            ("k", pa.int64()),
            ("s", pa.string()),
            ("p", pa.decimal128(12, 3)),
            ("d", pa.date32()),
            ("w", pa.int32()),
            ("v", pa.float64()),
        ]
    ),
    "c": pa.schema([("k", pa.int32()), ("n", pa.string()), ("s", pa.string()), ("d", pa.date32())]),
    "e": pa.schema([("id", pa.int64()), ("k", pa.int32()), ("s", pa.string()), ("v", pa.float64())]),
}
_ICEBERG_TYPES = {
    pa.int64(): "long",
    pa.int32(): "int",
    pa.float64(): "double",
    pa.float32(): "float",
    pa.string(): "string",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", tz="UTC"): "timestamptz",
    pa.bool_(): "boolean",
}
_NAN = float("nan")


def list_iceberg_types(table: str) -> dict[str, str]:
    fields = TABLES[table]
    return {
        field.name: _ICEBERG_TYPES.get(field.type) or f"decimal({field.type.precision}, {field.type.scale})"
        for field in fields
    }


def _build_row_of_a(n: int) -> dict[str, Any]:
    """Return row `n` of the table `a`. In each column, some rows have null or another special value."""
    return {
        "id": n if n % 7 else None,
        "k": None if n % 11 == 3 else n // 4,
        "v": [0.0, -0.0, _NAN, 1.5, None, -2.25, float("inf"), 0.1][n % 8],
        "f": [0.1, None, -0.0, _NAN, 2.5, 1.5][n % 6],
        "s": [None, "", "a", "ab", "a ", "Straße", "b%c", "B", "é"][n % 9],
        "p": None if n % 10 == 9 else Decimal(n * 125 - 1000) / 100,
        "d": None if n % 8 == 5 else date(2020, 1, 28) + timedelta(days=n // 2),
        "ts": None if n % 9 == 4 else datetime(2020, 2, 28, 12) + timedelta(hours=6 * n, microseconds=n % 3),
        "z": None if n % 9 == 1 else datetime(2020, 3, 1, tzinfo=UTC) + timedelta(hours=7 * n),
        "ok": [True, False, None][n % 3],
    }


def _build_row_of_b(n: int) -> dict[str, Any]:
    return {
        "id": n * 2 if n % 5 else None,
        "k": None if n % 6 == 5 else n // 3,
        "s": [None, "a", "ab", "A", "Straße", ""][n % 6],
        "p": None if n == 7 else Decimal(n * 1250 - 5000) / 1000,
        "d": None if n == 3 else date(2020, 1, 30) + timedelta(days=n),
        "w": n % 4,
        "v": [0.0, -0.0, _NAN, 1.5, None][n % 5],
    }


def _build_row_of_c(n: int) -> dict[str, Any]:
    return {
        "k": n if n < 5 else None,
        "n": ["zero", "one", "two", None, "four", "none"][n],
        "s": [None, "a", "ab", "", "Straße", "b%c"][n],
        "d": date(2020, 1, 30) + timedelta(days=3 * n),
    }


def split_into_files(table: str) -> list[pa.Table]:
    """Return the rows of each data file.

    The rows of a file have similar values. The table `e` is empty.
    """
    rows = {
        "a": [_build_row_of_a(n) for n in range(24)],
        "b": [_build_row_of_b(n) for n in range(15)],
        "c": [_build_row_of_c(n) for n in range(6)],
        "e": [],
    }[table]
    rows_per_file = _ROWS_PER_FILE[table]
    return [
        pa.Table.from_pylist(rows[start : start + rows_per_file], schema=TABLES[table])
        for start in range(0, len(rows), rows_per_file)
    ]


def open_plain() -> duckdb.DuckDBPyConnection:
    """Return a DuckDB connection that divides integers, sorts nulls and reads times as Trino does."""
    plain_connection = duckdb.connect(config={"threads": 1})
    plain_connection.execute("SET TimeZone = 'UTC'")
    plain_connection.execute("SET integer_division = true")
    plain_connection.execute("SET default_null_order = 'nulls_last'")
    return plain_connection


def open_plain_database() -> duckdb.DuckDBPyConnection:
    """Return a DuckDB connection from `open_plain` with the tables."""
    plain_connection = open_plain()
    plain_connection.execute("CREATE SCHEMA db")
    plain_connection.execute("SET schema = 'db'")
    for name, schema in TABLES.items():
        files = split_into_files(name)
        plain_connection.register("rows", pa.concat_tables(files) if files else schema.empty_table())
        plain_connection.execute(f"CREATE TABLE db.{name} AS SELECT * FROM rows")
        plain_connection.unregister("rows")
    return plain_connection
