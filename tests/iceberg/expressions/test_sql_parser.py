"""Tests that a text with too many possible readings for sqlglot is rejected after few steps, in every interface for
SQL.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from seamark.commands.serving.query_tables import read_query
from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import find_scans
from seamark.connector.client.errors import InvalidRequest as StatementRefused
from seamark.connector.duckdb.statements import DuckDBStatement
from seamark.connector.sql import statement
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.expressions.sql_parser import TooManyReadings, parse_statements
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest

NESTED = f"SELECT {'ROW(' * 60}1{')' * 60} FROM c.s.t"
"""For this text sqlglot alone would take 2⁵² times as long as for eight levels."""


OPENINGS = ("ROW(", "(", "f(", "ARRAY[", "MAP(", "CAST(", "a IN (", "CASE WHEN ", "INTERVAL ", "x -> ", "IF(", "NOT ")
CLOSINGS = {"(": ")", "[": "]", " ": ""}


@pytest.mark.parametrize("dialect", ["trino", "duckdb", "spark", None])
def test_parsing_of_30_nested_levels_always_ends(dialect: str | None) -> None:
    sql_dialect = Dialect.get_or_raise(dialect)
    for first_opening, second_opening in zip(OPENINGS, OPENINGS[3:] + OPENINGS[:3], strict=True):
        nested_text = "1"
        for opening in (first_opening, second_opening) * 15:
            nested_text = f"{opening}{nested_text}{CLOSINGS[opening[-1]]}"
        with suppress(SqlglotError, RecursionError):
            parse_statements(sql_dialect, f"SELECT {nested_text}")


def test_nested_rows_are_read() -> None:
    tree = parse_statements(Dialect.get_or_raise("trino"), f"SELECT {'ROW(' * 6}1{')' * 6}")[0]
    assert tree is not None
    assert len(list(tree.find_all(exp.Struct))) == 6


@pytest.mark.parametrize(("dialect", "text"), [("spark", "SELECT MAP(1)"), (None, "{{ : }} INTERVAL ( CASE FILTER")])
def test_exception_of_sqlglot_is_reported_as_an_error_of_the_text(dialect: str | None, text: str) -> None:
    with pytest.raises(SqlglotError, match="cannot be parsed"):
        parse_statements(Dialect.get_or_raise(dialect), text)


def test_every_sql_interface_rejects_a_text_that_can_be_parsed_in_too_many_ways() -> None:
    with pytest.raises(TooManyReadings):
        parse_statements(Dialect.get_or_raise("trino"), NESTED)
    with pytest.raises(StatementRefused, match="nested parts"):
        statement.parse(NESTED)
    with pytest.raises(UnsupportedStatement):
        DuckDBStatement(NESTED)
    assert find_scans(NESTED, find_columns=lambda _: {"x": "int"}) == ()
    for dialect in ("trino", "duckdb"):
        with pytest.raises((BadRequest, UnsupportedStatement)):
            read_query(NESTED, dialect)
    schema = Schema(0, ())
    with pytest.raises(BadRequest):
        parse_sql(NESTED.removeprefix("SELECT ").removesuffix(" FROM c.s.t"), schema)
