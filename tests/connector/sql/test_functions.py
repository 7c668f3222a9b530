"""Tests that functions in a `SqlSession` return the values of Trino. Trino 483 has computed the expected values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.choice import DUCKDB
from seamark.connector.sql.session import Engines, SqlSession
from seamark.connector.sql.trino_engine import find_arrow_type
from seamark.connector.sql.types import INTEGER, SqlType
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("ts", pa.timestamp("us")),
        ("tz", pa.timestamp("us", tz="UTC")),
        ("price", pa.decimal128(12, 2)),
        ("x", pa.float64()),
        ("ok", pa.bool_()),
        ("data", pa.binary()),
        ("tags", pa.list_(pa.string())),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("place", pa.struct([("city", pa.string()), ("Number", pa.int32())])),
        ("spot", pa.struct([("Number", pa.int32()), ("city", pa.string())])),
        ("names", pa.map_(pa.int64(), pa.string())),
        ("clock", pa.time64("us")),
    ]
)
MOMENT = datetime(2024, 1, 31, 23, 59, 59, 999999)
ROWS = [
    {
        **{"id": 1, "name": "\u2003a_b ", "ts": MOMENT, "tz": MOMENT.replace(tzinfo=UTC), "price": Decimal("-1.25")},
        **{"x": math.nan, "ok": True, "data": b"\x00ab", "tags": ["a", None], "counts": [("k", 7)]},
        "place": {"city": "Bern", "Number": 3},
        "names": [(0, "zero"), (1, "one"), (-1, "minus")],
    },
    {
        **{"id": 2, "name": "b", "ts": datetime(1969, 12, 31, 23, 59, 59, 500), "tz": None, "price": None, "x": 1.5},
        **{"ok": None, "data": b"", "tags": [], "counts": [], "place": {"city": None, "Number": 4}},
    },
    dict.fromkeys(SCHEMA.names) | {"id": 3},
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlSession]:
    home = tmp_path_factory.mktemp("functions")
    with ServerThread(home, warehouse=home.as_uri(), services_workers=0) as server:
        with open_catalog(server.url) as catalog:
            catalog.create_table("db.t", schema=SCHEMA).append(pa.Table.from_pylist(ROWS, schema=SCHEMA))
        with SqlSession(server.url, engines=Engines(wanted=DUCKDB)) as session:
            yield session


@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("is_nan(x)", [True, False, None]),
        ("is_finite(x) OR x = infinity()", [False, True, None]),
        ("nan() = x", [False, False, None]),
        ("floor(price)", [Decimal(-2), None, None]),
        ("ceiling(price)", [Decimal(-1), None, None]),
        ("trim(name)", ["a_b", "b", None]),
        ("rtrim(name)", ["\u2003a_b", "b", None]),
        ("split_part(trim(name), '_', 2)", ["b", None, None]),
        ("concat_ws('-', name, 'q')", ["\u2003a_b -q", "b-q", "q"]),
        ("length(data)", [3, 0, None]),
        ("data > X'00'", [True, False, None]),
        ("CAST(ok AS varchar)", ["true", None, None]),
        ("CAST(ok AS integer)", [1, None, None]),
        ("ok IS NOT TRUE", [False, True, True]),
        ("(id, ok) = (1, true)", [True, False, False]),
        ("id IN (VALUES 1, 3)", [True, False, True]),
        ("id <> ALL (SELECT id FROM db.t WHERE id < 3)", [False, False, True]),
        ("CAST(ts AS timestamp)", [datetime(2024, 2, 1), datetime(1969, 12, 31, 23, 59, 59, 1000), None]),
        ("CAST(tz AS timestamp(6))", [MOMENT, None, None]),
        ("date_format(ts, '%Y-%m-%d %H:%i')", ["2024-02-01 00:00", "1969-12-31 23:59", None]),
        ("date_add('month', 1, CAST(ts AS date))", [date(2024, 2, 29), date(1970, 1, 31), None]),
        ("date_add('quarter', -1, date(ts))", [date(2023, 10, 31), date(1969, 9, 30), None]),
        ("last_day_of_month(ts)", [date(2024, 1, 31), date(1969, 12, 31), None]),
        ("year_of_week(ts)", [2024, 1970, None]),
        ("extract(dow FROM ts)", [3, 3, None]),
        ("ts > date_parse('2024-01-31', '%Y-%m-%d')", [True, False, None]),
        ("place.city", ["Bern", None, None]),
        ("t.place.number + 1", [4, 5, None]),
        ("element_at(tags, 1)", ["a", None, None]),
        ("element_at(tags, -1)", [None, None, None]),
        ("cardinality(tags)", [2, 0, None]),
        ("contains(tags, 'a')", [True, False, None]),
        ("contains(tags, 'z')", [None, False, None]),
        ("element_at(counts, 'k')", [7, None, None]),
        ("cardinality(counts)", [1, 0, None]),
        ("if(id = 1, names[id])", ["one", None, None]),
        ("element_at(names, id - 2)", ["minus", None, None]),
        ("lag(id, 1, 0) OVER (ORDER BY id)", [0, 1, 2]),
        ("lead(name) OVER (ORDER BY id)", ["b", None, None]),
        ("last_value(id) OVER (ORDER BY id ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING)", [3, 3, 3]),
        ("sum(id) OVER (ORDER BY id ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING)", [3, 6, 5]),
        ("ntile(2) OVER (ORDER BY id)", [1, 1, 2]),
    ],
)
def test_expression_has_the_values_of_trino(session: SqlSession, expression: str, values: list[Any]) -> None:
    result = session.sql(f"SELECT {expression} AS v, id FROM db.t").to_arrow()
    assert dict(zip(result["id"].to_pylist(), result["v"].to_pylist(), strict=True)) == dict(
        zip((1, 2, 3), values, strict=True)
    )


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("SELECT id, tag FROM db.t CROSS JOIN UNNEST(tags) AS u(tag)", [(1, "a"), (1, None)]),
        ("SELECT n, u.tag FROM db.t, UNNEST(t.tags) WITH ORDINALITY AS u(tag, n) WHERE n = 2", [(2, None)]),
        ("SELECT max_by(place.city, id), min_by(name, id) FROM db.t", [(None, "\u2003a_b ")]),
        ("SELECT place.city, count(*) FROM db.t WHERE place.number > 3 GROUP BY place.city", [(None, 1)]),
    ],
)
def test_query_has_the_rows_of_trino(session: SqlSession, query: str, rows: list[tuple[Any, ...]]) -> None:
    result = session.sql(query).to_arrow()
    assert sorted(map(repr, zip(*(column.to_pylist() for column in result.columns), strict=True))) == sorted(
        map(repr, rows)
    )


@pytest.mark.parametrize(
    "expression",
    [
        "year(TIMESTAMP '2024-01-01 00:30:00 +02:00')",
        "CAST(TIMESTAMP '2024-01-01 00:30:00 +02:00' AS date)",
        "coalesce(tz, TIMESTAMP '2024-01-01 00:30:00 +02:00') + INTERVAL '1' month",
        "CAST('2024-01-01 00:00:00.123456' AS timestamp)",
        '"$path"',
        "(id, ok) IN ((1, true))",
        "(id, ok) > (1, true)",
        "date_format(ts, '%W')",
        "contains(tags, 1)",
        "tags[id]",
        "names[-1]",
        "names[CAST(id AS bigint)]",
        "names[length(name)]",
        "coalesce(place, spot)",
        "CASE WHEN ok THEN place ELSE spot END",
        "if(ok, tags, counts)",
        "lag(place, 1, spot) OVER (ORDER BY id)",
        "(VALUES (place), (spot))",
        "(VALUES (place), (NULL))",
        "x IN (VALUES nan(), 1.5e0)",
        "DISTINCT counts",
        "count(DISTINCT place)",
        "count(*) OVER (PARTITION BY counts)",
        "first_value(INTERVAL '1' day) OVER ()",
        "lag(INTERVAL '1' day) OVER (ORDER BY id)",
        "lag(NULL, 1, 'x') OVER (ORDER BY id)",
        "hour(clock)",
        "place FROM db.t UNION ALL SELECT spot",
        "lag(id) IGNORE NULLS OVER (ORDER BY id)",
        "sum(id) OVER (ORDER BY id RANGE BETWEEN 1 PRECEDING AND CURRENT ROW)",
    ],
)
def test_expression_with_another_result_in_duckdb_is_left_to_trino(session: SqlSession, expression: str) -> None:
    with pytest.raises(InvalidRequest, match="DuckDB does not run this statement"):
        session.sql(f"SELECT {expression} FROM db.t")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("place.street", "there is no field 'street'"),
        ("name.city", "there is no field 'city'"),
        ("tags[0]", "counted from 1"),
        ("X'0'", "even number of hexadecimal digits"),
        ("lag(id)", "requires OVER"),
        ("sum(id) OVER (ORDER BY id ROWS BETWEEN 1 FOLLOWING AND CURRENT ROW)", "ends before its start"),
        ("(id, ok) = (1, true, 2)", "rows of 2 and 3 fields"),
        ("place + NULL", r"not defined for the type row\(city varchar, Number integer\)"),
    ],
)
def test_invalid_expression_is_refused(session: SqlSession, expression: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        session.sql(f"SELECT {expression} FROM db.t")


@pytest.mark.parametrize(
    ("alias", "message"),
    [("WITH ORDINALITY AS u(tag)", "1 names for 2"), ("WITH ORDINALITY AS u(a, b, c)", "3 names for 2")],
)
def test_unnest_needs_a_name_for_each_column(session: SqlSession, alias: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        session.sql(f"SELECT id FROM db.t CROSS JOIN UNNEST(tags) {alias}")


def test_columns_of_unnest_without_names_have_numbers(session: SqlSession) -> None:
    result = session.sql("SELECT id, u.* FROM db.t CROSS JOIN UNNEST(tags) WITH ORDINALITY AS u")
    assert result.schema.names == ["id", "_col1", "_col2"]


@pytest.mark.parametrize("expression", ["id / CAST('0' AS bigint) = 1", "id % BIGINT '-0' = 1"])
def test_division_by_a_typed_zero_is_an_error(session: SqlSession, expression: str) -> None:
    with pytest.raises(InvalidRequest, match="Division by zero"):
        session.sql(f"SELECT {expression} FROM db.t").to_arrow()


def _nest_calls(function: str, argument: str, depth: int) -> str:
    """Return nested calls, each of which makes the text in DuckDB's SQL twice as long."""
    return argument if depth == 0 else function.format(_nest_calls(function, argument, depth - 1))


@pytest.mark.parametrize(
    "query",
    [
        "SELECT " + ", ".join([_nest_calls("nullif({}, 1)", "id", 14)] * 40) + " FROM db.t",
        f"SELECT count(*) FROM db.t WHERE {_nest_calls('nullif({}, 1e0)', 'x', 12)} IN ({', '.join(['1e0'] * 5000)})",
        f"SELECT CASE {_nest_calls('nullif({}, 1)', 'id', 14)} {'WHEN 1 THEN 2 ' * 2000} END FROM db.t",
        f"SELECT {_nest_calls('nullif({}, 1)', 'id', 14)} FROM db.t GROUP BY {', '.join('1' * 5000)}",
        f"SELECT id FROM db.t WHERE {' OR '.join([_nest_calls('nullif({}, 1)', 'id', 14) + ' = 1'] * 40)}",
    ],
)
def test_statement_that_becomes_too_long_is_refused(session: SqlSession, query: str) -> None:
    with pytest.raises(InvalidRequest, match="characters in DuckDB's SQL"):
        session.sql(query)


def test_nested_columns_have_the_types_of_trino(session: SqlSession) -> None:
    result = session.sql("SELECT tags, counts, place FROM db.t")
    assert result.types == ("array(varchar)", "map(varchar, integer)", "row(city varchar, Number integer)")


def test_names_of_fields_are_quoted_as_in_trino() -> None:
    names = ("select", "a b", 'x"', "A_1")
    kind = SqlType("nested", fields=tuple((name, INTEGER) for name in names))
    assert str(kind) == 'row("select" integer, "a b" integer, "x""" integer, A_1 integer)'


def test_new_value_of_a_nested_column_has_its_type(session: SqlSession) -> None:
    for statement in ("UPDATE db.t SET place = spot", "INSERT INTO db.t (id, place) SELECT id, spot FROM db.t"):
        with pytest.raises(InvalidRequest, match="DuckDB does not run this statement"):
            session.sql(statement)


@pytest.mark.parametrize("expression", ["tags[2] = 'b'", "counts['z'] = 1"])
def test_absent_element_in_brackets_is_an_error(session: SqlSession, expression: str) -> None:
    with pytest.raises(InvalidRequest, match=r"array length|not present in map"):
        session.sql(f"SELECT {expression} FROM db.t WHERE id = 2").to_arrow()


@pytest.mark.parametrize(
    ("trino_type", "arrow_type"),
    [
        ("array(varchar(3))", pa.list_(pa.string())),
        ("map(varchar, array(decimal(5,2)))", pa.map_(pa.string(), pa.list_(pa.decimal128(5, 2)))),
        (
            'row("a, ""b""" integer, c timestamp(6) with time zone, d row(e bigint))',
            pa.struct(
                [
                    ('a, "b"', pa.int32()),
                    ("c", pa.timestamp("us", tz="UTC")),
                    ("d", pa.struct([("e", pa.int64())])),
                ]
            ),
        ),
        ("row(bigint, varchar)", pa.struct([("field0", pa.int64()), ("field1", pa.string())])),
        ("row(time(6), time(3) with time zone)", pa.struct([("field0", pa.time64("us")), ("field1", pa.string())])),
        ("row(timestamp(3) with time zone)", pa.struct([("field0", pa.timestamp("us", tz="UTC"))])),
    ],
)
def test_nested_type_of_trino_has_an_arrow_type(trino_type: str, arrow_type: pa.DataType) -> None:
    assert find_arrow_type(trino_type) == arrow_type
