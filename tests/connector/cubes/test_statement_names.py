"""Tests that the translation of engines' queries refuses names that engines may resolve differently."""

from __future__ import annotations

import pytest
import sqlglot

from seamark.connector.cubes.dialects import DUCKDB, SPARK, TRINO, CubeDialect, NotFromCube
from seamark.connector.cubes.statements import CubeStatement, CubeTable, translate_statement
from seamark.formats.iceberg.types.schema import Field, Schema, StructType
from seamark.formats.index.definitions import define_index

DIALECTS = [TRINO, SPARK, DUCKDB]
FIELD = Field(3, "f", required=False, type="long")
NESTED_FIELD = Field(4, "t", required=False, type=StructType((Field(5, "f", required=False, type="long"),)))
SCHEMA = Schema(
    (
        Field(1, "f", required=False, type="long"),
        Field(2, "s", required=False, type=StructType((FIELD, NESTED_FIELD))),
        Field(6, "g", required=False, type="long"),
    )
)
CUBE = define_index("c", "cube", ["f", "g", "s.f", "s.t.f"], SCHEMA, measures=["count(*)"])


def translate(text: str, dialect: CubeDialect) -> CubeStatement:
    return translate_statement(sqlglot.parse_one(text, dialect=dialect.name), CubeTable(SCHEMA, (CUBE,)), dialect)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("output", ["s.f", "T.S.F", "(s.f)", "s.f AS f", "s.f + 1 AS F"])
@pytest.mark.parametrize(
    "clauses",
    ["GROUP BY s.f, f", "GROUP BY s.f, t.f ORDER BY f LIMIT 1", "GROUP BY s.f, t.f HAVING f > 1", "GROUP BY 1, f + 1"],
)
def test_name_of_an_output_and_of_a_column_is_refused(dialect: CubeDialect, output: str, clauses: str) -> None:
    with pytest.raises(NotFromCube, match="may be an output or a column"):
        translate(f"SELECT {output}, count(*) FROM t {clauses}", dialect)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "text",
    [
        "SELECT s.f, count(*) FROM t GROUP BY s.f, t.f ORDER BY t.f, 2",
        "SELECT f, t.g, count(*) FROM t GROUP BY f, g ORDER BY f, g",
        "SELECT f AS f, (g) FROM t GROUP BY f, g HAVING f > g",
        "SELECT a.s.t.f, count(*) FROM t AS a GROUP BY a.s.t.f ORDER BY 1",
    ],
)
def test_names_with_one_meaning_are_translated(dialect: CubeDialect, text: str) -> None:
    assert translate(text, dialect).cube == CUBE


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    "text", ["SELECT s.t.f FROM s.t GROUP BY 1", "SELECT s.t.f FROM t GROUP BY 1", "SELECT s.f FROM s GROUP BY 1"]
)
def test_path_that_begins_with_a_name_of_the_table_is_refused(dialect: CubeDialect, text: str) -> None:
    with pytest.raises(NotFromCube, match="it may be the table or a column"):
        translate(text, dialect)


@pytest.mark.parametrize("text", ['SELECT "s.f" FROM t GROUP BY 1', 'SELECT s."t.f" FROM u GROUP BY 1'])
def test_name_with_a_dot_is_not_a_field(text: str) -> None:
    with pytest.raises(NotFromCube, match="name with a dot"):
        translate(text, TRINO)


def test_name_that_spark_gives_to_a_cast_is_refused() -> None:
    text = "SELECT CAST(f AS string), count(*) FROM t GROUP BY f"
    for clause in ("ORDER BY f LIMIT 1", "HAVING f > 9"):
        translate(f"{text} {clause}".replace("string", "varchar"), TRINO)
        with pytest.raises(NotFromCube, match="may be an output or a column"):
            translate(f"{text} {clause}", SPARK)
    for clause in ("ORDER BY t.f", "ORDER BY CAST(f AS string)", "ORDER BY 1"):
        translate(f"{text} {clause}", SPARK)


def test_output_in_parentheses_keeps_its_name() -> None:
    assert ' AS "f"' in translate("SELECT (s.f), count(*) FROM u GROUP BY s.f", TRINO).write("groups", None)
