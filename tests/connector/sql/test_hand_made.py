"""Tests that the statements of `hand_made.sql` return the rows of plain DuckDB.

They run translated, on the rows that the analysis keeps, and on a server's tables.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import patch

import duckdb
import pyarrow as pa
import pytest
from sqlglot import exp

from seamark.connector.analysis.scans import find_scans, read_from_view
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.plans.splices import splice
from seamark.connector.sql import reads
from seamark.connector.sql.queries import translate
from seamark.connector.sql.session import SqlSession
from seamark.connector.sql.statement import parse
from seamark.connector.sql.types import UnsupportedInDuckDB, from_iceberg
from tests.connector.analysis.statements import RandomStatements, quote
from tests.connector.analysis.test_scans_oracle import draw_join_conditions
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import to_comparable_value
from tests.connector.sql.hand_made import (
    FORMERLY_WRONG_STATEMENTS,
    GROUPING_SETS,
    STATEMENTS,
    TABLES,
    list_iceberg_types,
    open_plain,
    open_plain_database,
    split_into_files,
)
from tests.seeds import first_seed

NOW = datetime(2026, 1, 2, tzinfo=UTC)
_STAR = re.compile(r"SELECT (DISTINCT )?\*|\.\*", re.IGNORECASE)


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with open_plain_database() as connection:
        yield connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("hand_made")) as server:
        with open_catalog(server.url) as catalog:
            catalog.create_namespace_if_not_exists("db")
            for name, schema in TABLES.items():
                table = catalog.create_table(f"db.{name}", schema=schema)
                for rows in split_into_files(name):
                    table.append(rows)
        yield server


def to_comparable(value: Any) -> Any:
    """Return the value in a comparable form.

    Numbers become floats, because DuckDB's sums and quotients have different types.
    """
    return to_comparable_value(
        float(value) if isinstance(value, int | Decimal) and not isinstance(value, bool) else value
    )


def count_rows(table: pa.Table) -> Counter[str]:
    columns = [[to_comparable(value) for value in column.to_pylist()] for column in table.columns]
    return Counter(map(repr, zip(*columns, strict=True)))


def answer_query(connection: duckdb.DuckDBPyConnection, text: str) -> Counter[str]:
    return count_rows(connection.execute(text).to_arrow_table())


def test_translated_statement_returns_the_rows_of_the_original(connection: duckdb.DuckDBPyConnection) -> None:
    types_by_table = {
        table: {name: from_iceberg(kind) for name, kind in list_iceberg_types(table).items()} for table in TABLES
    }
    translated_count = 0
    for text in STATEMENTS:
        try:
            query = translate(parse(text).tree, lambda node: types_by_table[node.name.lower()], NOW)
        except UnsupportedInDuckDB:
            continue
        for table in query.tables:
            columns = ", ".join(f"{name} AS c{number}" for number, name in enumerate(table.columns))
            name = table.node.name
            connection.execute(f"CREATE OR REPLACE TEMP VIEW {table.name} AS SELECT {columns} FROM db.{name}")
        assert answer_query(connection, query.text) == answer_query(connection, text), f"{text}\n{query.text}"
        translated_count += 1
    assert translated_count > 0.85 * len(STATEMENTS)


def _differs_in_plain_duckdb(tree: exp.Expr) -> bool:
    """Return whether plain DuckDB may compute other rows than Trino.

    In Trino, a cast to a timestamp rounds to milliseconds, and rows are compared field by field, with the rules of AND
    for null.
    """
    has_rounding_cast = any(cast.to.this is exp.DataType.Type.TIMESTAMP for cast in tree.find_all(exp.Cast))
    return has_rounding_cast or any(isinstance(pair.this, exp.Tuple) for pair in tree.find_all(exp.EQ, exp.NEQ))


@pytest.mark.parametrize("database_count", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_translated_random_statements_return_the_rows_of_the_originals(database_count: int) -> None:
    """The random statements have the same meaning in Trino's SQL and in plain DuckDB, except for generated names.

    Statements with differences that are known, or that are not translated, are skipped.
    """
    counts, seed = Counter[str](), first_seed()
    for number in range(database_count):
        rng = random.Random(f"{seed}/{number}")
        statements = RandomStatements(rng, mixed_cases=False, recursive_share=0)
        with open_plain() as connection:
            for text in statements.make_tables():
                connection.execute(text)
            tables_by_name = {table.name.lower(): table for table in statements.tables}
            types_by_table = {
                name: {column: from_iceberg(kind) for column, kind in table.columns.items()}
                for name, table in tables_by_name.items()
            }
            for _ in range(40):
                text = statements.draw_query(depth=rng.choice([1, 1, 2, 2, 3]))
                # NOW is a different time in DuckDB. In Trino a USING column is the first of `*`, and not part of `t.*`.
                if "current_date" in text or "now()" in text or ("USING" in text and _STAR.search(text)):
                    continue
                try:
                    expected = answer_query(connection, text)
                except duckdb.Error:
                    continue
                counts["queries"] += 1
                try:
                    tree = parse(text).tree
                    if _differs_in_plain_duckdb(tree):
                        continue
                    query = translate(tree, lambda node, types=types_by_table: types[node.name.lower()], NOW)
                except (UnsupportedInDuckDB, InvalidRequest):
                    continue
                for table in query.tables:
                    name = quote(tables_by_name[table.node.name.lower()].name)
                    columns = ", ".join(f"{quote(column)} AS c{index}" for index, column in enumerate(table.columns))
                    connection.execute(f"CREATE OR REPLACE TEMP VIEW {table.name} AS SELECT {columns} FROM {name}")
                counts["translated"] += 1
                assert answer_query(connection, query.text) == expected, f"seed {seed}/{number}\n{text}\n{query.text}"
    assert counts["translated"] > 0.3 * counts["queries"], f"too few statements were compared: {counts}"


@pytest.mark.parametrize(
    ("has_columns", "interval"),
    [(True, 4), pytest.param(True, 1, marks=pytest.mark.slow), pytest.param(False, 1, marks=pytest.mark.slow)],
)
def test_statements_return_the_same_rows_on_the_rows_that_the_analysis_keeps(
    connection: duckdb.DuckDBPyConnection, has_columns: bool, interval: int
) -> None:
    columns = {table: list_iceberg_types(table) for table in TABLES}
    omitted_count = 0
    for number, text in enumerate(STATEMENTS[::interval]):
        scans = find_scans(
            text, find_columns=lambda names: columns[names[2]] if has_columns else None, utc=True, today=NOW.date()
        )
        replacements = []
        for scan_number, scan in enumerate(scans):
            condition = "TRUE" if scan.predicate is None else f"({scan.predicate})"
            join_conditions = "".join(
                draw_join_conditions(random.Random(f"{number}/{scan_number}"), scans, (scan_number,))
            )
            rows = f"SELECT * FROM db.{scan.table} AS j1 WHERE {condition}{join_conditions}"
            connection.execute(f"CREATE OR REPLACE TABLE db.p{scan_number} AS {rows}")
            omitted_count += connection.execute(
                f"SELECT (SELECT count(*) FROM db.{scan.table}) > count(*) FROM db.p{scan_number}"
            ).fetchall()[0][0]
            replacements.append(read_from_view(scan, f"p{scan_number}"))
        assert answer_query(connection, splice(text, replacements)) == answer_query(connection, text), (
            f"{text}\n{scans}"
        )
    assert omitted_count > (200 if has_columns else 100) / interval


@pytest.mark.parametrize(
    "statements",
    [(*FORMERLY_WRONG_STATEMENTS, *GROUPING_SETS), pytest.param(STATEMENTS, marks=pytest.mark.slow)],
    ids=["formerly wrong", "all"],
)
def test_statements_return_the_rows_of_plain_duckdb_with_and_without_plans(
    server: ServerThread, connection: duckdb.DuckDBPyConnection, statements: tuple[str, ...]
) -> None:
    omitted_count = 0
    # A session caches the analysis of a statement, so the statement without an analysis runs in a separate session.
    with SqlSession(server.url) as session, SqlSession(server.url) as unpruned_session:
        for text in statements:
            try:
                result = session.sql(text)
            except InvalidRequest as error:
                if "DuckDB does not run this" not in str(error):
                    raise
                continue
            omitted_count += sum(table.considered_files - table.files for table in result.explanation.tables)
            rows = count_rows(result.to_arrow())
            assert rows == answer_query(connection, text), text
            with patch.object(reads, "collect_scans", lambda *_, **__: ()):
                assert count_rows(unpruned_session.sql(text).to_arrow()) == rows, text
    assert omitted_count > 10, "most plans leave out no file, so the comparison says little about plans"


def test_conditions_on_times_leave_files_out(server: ServerThread) -> None:
    with SqlSession(server.url) as session:
        for condition in ("ts > TIMESTAMP '2020-03-03 00:00:00'", "z > TIMESTAMP '2020-03-06 00:00:00 UTC' AND id > 0"):
            (table,) = session.explain(f"SELECT id FROM db.a WHERE {condition}").tables
            assert table.files < table.considered_files, condition


def test_unnamed_column_is_numbered_among_the_columns_of_the_result(server: ServerThread) -> None:
    with SqlSession(server.url) as session:
        assert session.sql("SELECT *, k + 1 FROM db.c").schema.names == ["k", "n", "s", "d", "_col4"]


def test_order_by_prefers_names_of_select_to_names_of_from(server: ServerThread) -> None:
    """In `ORDER BY k + 0`, Trino uses the output `k` of SELECT, and DuckDB uses the column `k` of FROM."""
    with SqlSession(server.url) as session:
        rows = session.sql("SELECT -k AS k FROM db.c WHERE k IS NOT NULL ORDER BY k + 0 LIMIT 2").to_arrow()
        assert rows.column(0).to_pylist() == [-4, -3]
        with pytest.raises(InvalidRequest, match="ambiguous"):
            session.sql("SELECT n AS k, k FROM db.c ORDER BY length(k)")


def test_upper_keeps_a_character_without_a_single_capital(server: ServerThread) -> None:
    """Java has no single capital of ß; DuckDB has one."""
    with SqlSession(server.url) as session:
        query = "SELECT upper(s), upper(s || 'ßxß'), upper('ẞß') FROM db.c WHERE upper(s) = 'STRAßE' OR s IS NULL"
        rows = {tuple(row.values()) for row in session.sql(query).to_arrow().to_pylist()}
        assert rows == {("STRAßE", "STRAßEßXß", "ẞß"), (None, None, "ẞß")}
