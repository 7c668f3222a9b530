"""Tests that connections of one database can use the functions for sketches, in and after transactions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import duckdb
import pytest

from seamark.connector.cubes.sketch_calls import format_count_sql, format_sketch_sql
from seamark.connector.duckdb.sketch_functions import create_functions

QUERY = f"SELECT {format_count_sql(format_sketch_sql('x', 'BIGINT'))} FROM range(3) rows(x)"


@pytest.fixture
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as con:
        yield con


def count_values(con: duckdb.DuckDBPyConnection) -> list[tuple[int]]:
    return con.sql(QUERY).fetchall()


def test_cursors_can_use_the_functions(con: duckdb.DuckDBPyConnection) -> None:
    with con.cursor() as cursor:
        assert create_functions(cursor)
        assert count_values(cursor) == [(3,)]
    for connection in (con, con.cursor()):
        assert create_functions(connection)
        assert count_values(connection) == [(3,)]


def test_rollback_keeps_the_functions(con: duckdb.DuckDBPyConnection) -> None:
    con.begin()
    assert not create_functions(con)
    assert con.sql("SELECT 1").fetchall() == [(1,)]
    con.rollback()
    assert create_functions(con)
    con.begin()
    assert create_functions(con)
    assert count_values(con) == [(3,)]


def test_functions_are_created_by_several_threads(con: duckdb.DuckDBPyConnection) -> None:
    with ThreadPoolExecutor(4) as executor:
        for cursor in executor.map(lambda _: _create_in_cursor(con), range(4)):
            assert create_functions(cursor)
            assert count_values(cursor) == [(3,)]


def _create_in_cursor(con: duckdb.DuckDBPyConnection) -> duckdb.DuckDBPyConnection:
    cursor = con.cursor()
    create_functions(cursor)
    return cursor
