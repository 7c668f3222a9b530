"""SQL predicates as Iceberg expressions, compared with DuckDB row by row.

The expression never loses a row, and it is exact if it represents the whole predicate.
"""

from __future__ import annotations

import json
import math
import random
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import duckdb
import msgspec
import pytest

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types import schema as seamark_schema
from seamark.formats.runtime.errors import BadRequest
from tests.planner.lakes.lake import Row
from tests.planner.lakes.predicates import SPARK_FLOAT_ORDER, Names, matches
from tests.planner.lakes.schemas import Field, Schema
from tests.seeds import examples

EPOCH = date(1970, 1, 1)
COLUMNS = {
    "id": ("long", "BIGINT"),
    "a": ("int", "INTEGER"),
    "b": ("boolean", "BOOLEAN"),
    "s": ("string", "VARCHAR"),
    "f": ("float", "FLOAT"),
    "d": ("double", "DOUBLE"),
    "day": ("date", "DATE"),
    "ts": ("timestamp", "TIMESTAMP"),
    "tz": ("timestamptz", "TIMESTAMPTZ"),
    "t": ("time", "TIME"),
    "p": ("decimal(9, 2)", "DECIMAL(9, 2)"),
    "q": ("decimal(20, 3)", "DECIMAL(20, 3)"),
    "u": ("uuid", "UUID"),
    "x": ("binary", "BLOB"),
    "Two Words": ("int", "INTEGER"),
}
FIELDS = tuple(Field(number, name, False, kind) for number, (name, (kind, _)) in enumerate(COLUMNS.items(), 1))
NESTED_FIELD = Field(
    50, "st", False, (Field(51, "in", False, "int"), Field(52, "deep", False, (Field(53, "y", False, "int"),)))
)
SCHEMA = Schema(0, (*FIELDS, NESTED_FIELD))
BOUND_TO = msgspec.convert(SCHEMA.build_json(), type=seamark_schema.Schema)
NAMES = Names(SCHEMA, case_sensitive=False)
UUIDS = [uuid.UUID(int=number) for number in (0, 1, 2**127, 2**128 - 1)]
TEXTS = ["", "a", "ab", "abc", "b", "a%b", "a_b", "é", "A", "z\\z", "'"]
ROWS = 80


@dataclass(frozen=True)
class Sql:
    """A predicate, or a part of it, as SQL of Seamark and as SQL of DuckDB.

    `is_fully_convertible` is False if an Iceberg expression cannot represent the whole predicate.
    """

    seamark_text: str
    duckdb_text: str
    is_fully_convertible: bool = True


def draw_value(rng: random.Random, name: str) -> Any:
    """Return a Python value for the column `name`, which may be NaN or None."""
    if rng.random() < 0.15:
        return None
    match name:
        case "b":
            return rng.random() < 0.5
        case "s":
            return rng.choice(TEXTS)
        case "f" | "d":
            return math.nan if rng.random() < 0.1 else rng.choice([-0.0, 0.0, 0.5, 0.7, -1.25, 3.0, 2.75])
        case "day":
            return EPOCH + timedelta(rng.choice([-1, 0, 19_722, 19_723, 19_724]))
        case "ts" | "tz":
            return datetime(2024, 1, rng.choice([1, 2]), rng.choice([0, 23]), 0, 0, rng.choice([0, 1]))
        case "t":
            return time(rng.choice([0, 10, 23]), 30)
        case "p":
            return Decimal(rng.randint(-200, 200)) / 100
        case "q":
            return Decimal(rng.choice([-(10**19), 0, 1555, 10**19])) / 1000
        case "u":
            return rng.choice(UUIDS)
        case "x":
            return rng.choice([b"", b"\x00", b"\xff", b"ab"])
    return rng.randint(-3, 3)


def to_row_value(kind: str, value: Any) -> Any:
    """Return the value in the form in which the test stores its rows, for example a time as microseconds."""
    if value is None or kind in ("boolean", "string", "binary", "int", "long", "double"):
        return value
    if kind == "float":
        return struct.unpack("<f", struct.pack("<f", value))[0]
    if kind == "date":
        return (value - EPOCH).days
    if kind.startswith("timestamp"):
        return (value - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    if kind == "time":
        return ((value.hour * 60 + value.minute) * 60 + value.second) * 10**6 + value.microsecond
    if kind == "uuid":
        return value.bytes
    scale = int(kind.rstrip(")").split(",")[1])
    return int(value.scaleb(scale))  # The unscaled value of a decimal(precision, scale)


@pytest.fixture(scope="module")
def table() -> Iterator[tuple[duckdb.DuckDBPyConnection, list[Row]]]:
    """Yield a DuckDB connection with random rows in the table `rows`, and the same rows by column id."""
    rng = random.Random(4)
    db = duckdb.connect()
    db.execute("SET TimeZone = 'UTC'")
    columns = ", ".join(f'"{name}" {kind}' for name, (_, kind) in COLUMNS.items())
    db.execute(f'CREATE TABLE rows (n INTEGER, {columns}, st STRUCT("in" INTEGER, deep STRUCT(y INTEGER)))')
    rows: list[Row] = []
    for number in range(ROWS):
        values = {name: draw_value(rng, name) for name in COLUMNS}
        inner, deep_value = draw_value(rng, "in"), draw_value(rng, "y")
        zoned_values = [
            f"{value}+00" if name == "tz" and value is not None else value for name, value in values.items()
        ]
        placeholders = ", ".join("?" for _ in values)
        struct_text = "{'in': ?::INTEGER, 'deep': {'y': ?::INTEGER}}"
        db.execute(
            f"INSERT INTO rows VALUES (?, {placeholders}, {struct_text})", [number, *zoned_values, inner, deep_value]
        )
        new_row: Row = {field.id: to_row_value(COLUMNS[field.name][0], values[field.name]) for field in FIELDS}
        # Columns 50 and 52 are the structs `st` and `deep`, and True means that a struct is not null. Columns 51 and 53
        # are the fields `in` and `y`.
        rows.append(new_row | {50: True, 51: inner, 52: True, 53: deep_value})
    yield db, rows
    db.close()


# Random predicates


def draw_literal(rng: random.Random, name: str) -> Sql:
    """Return a literal that suits a column.

    `is_fully_convertible` is False for a literal that a float column cannot represent, because it would be rounded.
    """
    literal_value = draw_value(rng, name)
    if literal_value is None:
        return make_common_sql("NULL")
    match name:
        case "b":
            return make_common_sql(str(literal_value).upper())
        case "s":
            return make_common_sql(quote_text(literal_value))
        case "f" | "d":
            if math.isnan(literal_value):
                return make_common_sql("1e2")
            return Sql(
                repr(literal_value), repr(literal_value), is_fully_convertible=name == "d" or literal_value != 0.7
            )
        case "day":
            choices = [
                f"DATE '{literal_value}'",
                f"CAST('{literal_value}' AS DATE)",
                f"'{literal_value}'",
                f"TIMESTAMP '{literal_value} 12:00:00'",
            ]
            return make_common_sql(rng.choice(choices))
        case "ts":
            choices = [
                f"TIMESTAMP '{literal_value}'",
                f"'{literal_value}'",
                f"DATE '{literal_value.date()}'",
                f"CAST('{literal_value}' AS TIMESTAMP)",
            ]
            return make_common_sql(rng.choice(choices))
        case "tz":
            return make_common_sql(
                rng.choice(
                    [f"TIMESTAMPTZ '{literal_value}+00'", f"TIMESTAMPTZ '{literal_value + timedelta(hours=1)}+01'"]
                )
            )
        case "t":
            return make_common_sql(rng.choice([f"TIME '{literal_value}'", f"CAST('{literal_value}' AS TIME)"]))
        case "p" | "q":
            return make_common_sql(
                rng.choice([str(literal_value), str(literal_value + Decimal("0.0001")), str(int(literal_value))])
            )
        case "u":
            return make_common_sql(rng.choice([f"UUID '{literal_value}'", f"'{literal_value}'"]))
        case "x":
            return Sql(
                f"X'{literal_value.hex()}'", "'" + "".join(f"\\x{byte:02X}" for byte in literal_value) + "'::BLOB"
            )
    return make_common_sql(
        rng.choice(
            [
                str(literal_value),
                str(literal_value),
                f"{literal_value}.5",
                f"({literal_value})",
                f"CAST('{literal_value}' AS INTEGER)",
            ]
        )
    )


def make_common_sql(text: str, *, is_fully_convertible: bool = True) -> Sql:
    """Return a predicate with the same text in Seamark and in DuckDB."""
    return Sql(text, text, is_fully_convertible)


def quote_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def draw_column(rng: random.Random) -> tuple[str, Sql]:
    """Return the name of a column that determines the type of literals, and the column's SQL in a predicate."""
    draw = rng.random()
    if draw < 0.05:
        return "a", Sql("`two words`", '"Two Words"')
    if draw < 0.12:
        return "a", Sql("ST.IN", 'st."in"')
    if draw < 0.16:
        return "a", make_common_sql("st.deep.y")
    name = rng.choice([column_name for column_name in COLUMNS if " " not in column_name])
    return name, make_common_sql(rng.choice([name, name.upper(), f'"{name}"']))


def draw_predicate(rng: random.Random, depth: int = 0) -> Sql:
    draw = rng.random()
    if depth < 3 and draw < 0.35:
        left, right = draw_predicate(rng, depth + 1), draw_predicate(rng, depth + 1)
        return join_predicates(f"({{}}) {rng.choice(['AND', 'OR', 'and'])} ({{}})", left, right)
    if depth < 3 and draw < 0.5:
        return join_predicates("NOT ({})", draw_predicate(rng, depth + 1))
    return draw_leaf(rng)


def join_predicates(template: str, *parts: Sql) -> Sql:
    return Sql(
        template.format(*(part.seamark_text for part in parts)),
        template.format(*(part.duckdb_text for part in parts)),
        all(part.is_fully_convertible for part in parts),
    )


def draw_leaf(rng: random.Random) -> Sql:
    literal_column, column = draw_column(rng)
    draw = rng.random()
    if draw < 0.4:
        sides = [column, draw_literal(rng, literal_column)]
        if rng.random() < 0.3:
            sides.reverse()
        return join_predicates(f"{{}} {rng.choice(['=', '<>', '!=', '<', '<=', '>', '>='])} {{}}", *sides)
    if draw < 0.5:
        operator = rng.choice(["BETWEEN", "NOT BETWEEN"])
        return join_predicates(
            f"{{}} {operator} {{}} AND {{}}",
            column,
            draw_literal(rng, literal_column),
            draw_literal(rng, literal_column),
        )
    if draw < 0.6:
        literals = [draw_literal(rng, literal_column) for _ in range(rng.randint(1, 4))]
        return join_predicates(
            f"{{}} {rng.choice(['IN', 'NOT IN'])} ({', '.join(['{}'] * len(literals))})", column, *literals
        )
    if draw < 0.68:
        return join_predicates(f"{{}} IS {rng.choice(['', 'NOT '])}NULL", column)
    if draw < 0.73:
        return join_predicates(
            f"{{}} IS {rng.choice(['', 'NOT '])}DISTINCT FROM {{}}", column, draw_literal(rng, literal_column)
        )
    if draw < 0.78:
        return make_common_sql(f"b {rng.choice(['', 'IS TRUE', 'IS NOT TRUE', 'IS FALSE', 'IS NOT FALSE', '= TRUE'])}")
    if draw < 0.86:
        return draw_like(rng)
    if draw < 0.9:
        day = draw_value(rng, "day") or EPOCH
        cast_text = rng.choice(["CAST(ts AS DATE)", "CAST(day AS DATE)", "CAST(tz AS DATE)"])
        return make_common_sql(f"{cast_text} {rng.choice(['=', '<', '>=', '<>'])} DATE '{day}'")
    if draw < 0.93:
        column_name, op = rng.choice(["ts", "day", "tz"]), rng.choice(["=", "<", ">", "<>"])
        return make_common_sql(f"year({column_name}) {op} {rng.choice([1969, 1970, 2024])}")
    return make_common_sql(rng.choice(INCONVERTIBLE_CONDITIONS), is_fully_convertible=False)


INCONVERTIBLE_CONDITIONS = (
    "id = a",
    "abs(a) = 1",
    "length(s) > 1",
    "a + 1 = 2",
    "s ILIKE 'A%'",
    "a IN (id, 1)",
    "a IN (SELECT 1)",
    "s = 'a' || 'b'",
    "month(ts) = 1",
    "day(ts) = 2",
    "coalesce(a, 0) = 0",
    "CASE WHEN b THEN a ELSE 1 END = 1",
    "(a = 1) IS NOT TRUE",
    "CAST(a AS VARCHAR) = '1'",
    "a % 2 = 0",
    "b = (a = 1)",
)


def draw_like(rng: random.Random) -> Sql:
    operator = rng.choice(["LIKE", "NOT LIKE"])
    pattern = rng.choice(["a%", "a", "%", "ab%", "a%%", "é%", "", "a\\%%", "A%"])
    if pattern == "a\\%%":
        return make_common_sql(f"s {operator} 'a!%%' ESCAPE '!'")
    if rng.random() < 0.3:
        return make_common_sql(
            f"s {operator} {quote_text(rng.choice(['a_b', '%b', 'a%b', '_', 'a!_b']))}", is_fully_convertible=False
        )
    return make_common_sql(f"s {operator} {quote_text(pattern)}")


def evaluate_sql(text: str, rows: list[Row]) -> tuple[set[int], tuple[str, ...]]:
    """Evaluate a predicate for a client that treats NaN as greater than all numbers.

    Returns:
        The numbers of the kept rows, and the parts of the predicate that were not used.
    """
    parsed_sql = parse_sql(text, BOUND_TO)
    bound = bind(parsed_sql.expression, BOUND_TO, schemas=(), case_sensitive=True)
    bound_json = encode_expression(bound)
    json.dumps(bound_json, allow_nan=False)
    return {
        number for number, row in enumerate(rows) if matches(bound_json, row, NAMES, SPARK_FLOAT_ORDER)
    }, parsed_sql.unused


def compare_with_duckdb(seed: int, db: duckdb.DuckDBPyConnection, rows: list[Row]) -> bool:
    """Compare one random predicate with DuckDB.

    Returns:
        Whether an Iceberg expression can represent the whole predicate.
    """
    sql = draw_predicate(random.Random(seed))
    actual_numbers = {number for (number,) in db.execute(f"SELECT n FROM rows WHERE {sql.duckdb_text}").fetchall()}
    kept_rows, unused_parts = evaluate_sql(sql.seamark_text, rows)
    context = (
        f"seed {seed}: {sql.seamark_text}\nDuckDB {sorted(actual_numbers)}\nSeamark {sorted(kept_rows)}\n"
        f"unused {unused_parts}"
    )
    assert actual_numbers <= kept_rows, context
    assert not (sql.is_fully_convertible and unused_parts), context
    if sql.is_fully_convertible:
        # A NaN, which does not equal itself, is only in the columns f (id 5) and d (id 6). Engines differ on such rows.
        numbers = {number for number, row in enumerate(rows) if row[5] == row[5] and row[6] == row[6]}
        assert actual_numbers & numbers == kept_rows & numbers, context
    return sql.is_fully_convertible


def test_expression_keeps_exactly_the_rows_of_duckdb_if_the_whole_predicate_is_converted(
    table: tuple[duckdb.DuckDBPyConnection, list[Row]],
) -> None:
    are_fully_convertible = [compare_with_duckdb(seed, *table) for seed in range(examples(1500, 80))]
    # The test needs many predicates that an expression represents as a whole, and many that it does not.
    assert len(are_fully_convertible) / 3 < sum(are_fully_convertible) < len(are_fully_convertible) * 14 / 15


@pytest.mark.slow
def test_expressions_keep_the_rows_of_duckdb_over_many_predicates(
    table: tuple[duckdb.DuckDBPyConnection, list[Row]],
) -> None:
    for seed in range(10_000, 20_000):
        compare_with_duckdb(seed, *table)


# Cases that a comparison with DuckDB's rows cannot show


def parse_to_json(text: str) -> Any:
    """Parse a predicate, check that the expression represents all of it, and return the expression as JSON."""
    parsed_sql = parse_sql(text, BOUND_TO)
    assert parsed_sql.unused == (), text
    return encode_expression(bind(parsed_sql.expression, BOUND_TO, schemas=(), case_sensitive=True))


@pytest.mark.parametrize(
    ("text", "transform", "value"),
    [
        ("bucket(4, id) = 3", "bucket[4]", 3),
        ("bucket(id, 4) = 3", "bucket[4]", 3),
        ("system.bucket(4, id) = 3", "bucket[4]", 3),
        ("3 = cat.system.bucket(4, id)", "bucket[4]", 3),
        ("years(ts) = 54", "year", 54),
        ("system.years(ts) = 54", "year", 54),
        ("months(ts) = 648", "month", 648),
        ("days(ts) = DATE '2024-01-01'", "day", "2024-01-01"),
        ("days(ts) = 19723", "day", "2024-01-01"),
        ("hours(ts) = 473352", "hour", 473352),
        ("date(ts) = DATE '2024-01-01'", "day", "2024-01-01"),
        ("truncate(s, 2) = 'ab'", "truncate[2]", "ab"),
        ("truncate(2, s) = 'ab'", "truncate[2]", "ab"),
        ("system.truncate(10, id) = 20", "truncate[10]", 20),
    ],
)
def test_transforms_are_read_in_the_syntax_of_spark_and_trino(text: str, transform: str, value: object) -> None:
    filter_json = parse_to_json(text)
    assert (filter_json["type"], filter_json["term"]["transform"], filter_json["value"]) == ("eq", transform, value)


@pytest.mark.parametrize(
    "text",
    [
        "truncate(id, 10) = 20",
        "truncate(10, id) = 20",
        "day(ts) = 1",
        "month(ts) = 1",
        "hour(ts) = 1",
        "years(id) = 3",
        "bucket(0, id) = 3",
        "bucket(a, id) = 3",
        "year(ts) = 2024.5",
        "id = '5a'",
        "s = 5",
        "day = 19723",
        "ts = TIMESTAMPTZ '2024-01-01 00:00:00+00'",
        "p = '1.555'",
        "id = 9.007199254740993e15",
        "x = 'ab'",
        "u = 'no uuid'",
        "st = 5",
        "a BETWEEN SYMMETRIC 3 AND 1",
        "s LIKE ANY ('a', 'b')",
        "ts = '2024-01-01 10:00:00 Europe/Berlin'",
        "s RLIKE 'a'",
        "EXISTS (SELECT 1)",
        "a > ALL (SELECT 1)",
        "5",
    ],
)
def test_predicates_that_engines_evaluate_differently_prune_nothing_and_are_reported(text: str) -> None:
    for condition in (text, f"NOT ({text})"):
        parsed_sql = parse_sql(condition, BOUND_TO)
        assert encode_expression(parsed_sql.expression) is True
        assert len(parsed_sql.unused) == 1


def test_only_the_unusable_part_of_a_conjunction_is_omitted() -> None:
    parsed_sql = parse_sql("id = 1 AND abs(a) = 3 AND s LIKE 'a_c%'", BOUND_TO)
    assert parsed_sql.unused == ("ABS(a) = 3", "s LIKE 'a_c%'")
    assert encode_expression(parsed_sql.expression)["left"] == {"type": "eq", "term": "id", "value": "1"}


def test_comparison_with_a_value_that_no_float_equals_keeps_neighbouring_floats() -> None:
    assert parse_to_json("f < 0.7")["type"] == "lt-eq"  # The float 0.7 is less than the double 0.7.
    assert parse_to_json("f <> 0.7") == {"type": "not-null", "term": "f"}


def test_comparison_with_null_is_never_true() -> None:
    for text in ("a = NULL", "NOT (a = NULL)", "a NOT IN (1, NULL)", "a BETWEEN NULL AND NULL", "s LIKE NULL", "NULL"):
        assert parse_to_json(text) is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("id =", "line 1, column 4"),
        ("id = 1 foo", "line 1, column 10"),
        ("id = 1 AND\n  )", "line 2, column 3"),
        ("id = 'abc", "id = 'ab"),
        ("SELECT 1", "line 1"),
        ("id = 1; DROP TABLE x", "line 1, column 12"),
        ("(" * 50_000 + "id = 1" + ")" * 50_000, "100000"),
        ("(" * 9_000 + "id = 1" + ")" * 9_000, "nested"),
        ("nope = 1", "nope"),
        ("idd = 1", "did you mean id"),
    ],
)
def test_text_that_is_not_a_predicate_is_rejected_with_the_position(text: str, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_sql(text, BOUND_TO)
    assert message in error.value.message


@pytest.mark.parametrize("digits", ["9" * 5_000, "0" * 5_000, "0" * 5_000 + "1"])
@pytest.mark.parametrize(
    "text",
    ["bucket({0}, id) = 1", "truncate(s, {0}) = 'a'", "p = CAST('1' AS DECIMAL({0}, 2))"],
)
def test_numbers_with_too_many_digits_for_python_are_rejected_or_not_used(text: str, digits: str) -> None:
    try:
        sql = parse_sql(f"{text.format(digits)} AND id > 1", BOUND_TO)
    except BadRequest:
        return
    assert sql.unused or digits[0] == "0"


@pytest.mark.parametrize(
    ("literal", "is_used"),
    [
        ("DECIMAL '1.4'", True),
        ("CAST(1.4 AS DECIMAL(3, 1))", True),
        ("CAST(14 AS DECIMAL)", True),
        ("CAST(1.4 AS DECIMAL)", False),  # Trino and Spark round it to 1, and DuckDB keeps 1.4.
        ("CAST(12345678901 AS DECIMAL)", False),  # Spark's default precision is 10.
    ],
)
def test_cast_to_decimal_is_used_if_all_engines_keep_the_number(literal: str, is_used: bool) -> None:
    assert (parse_sql(f"p = {literal}", BOUND_TO).unused == ()) == is_used


def test_chain_of_thousands_of_predicates_is_read() -> None:
    parsed_sql = parse_sql(" OR ".join(f"id = {number}" for number in range(3000)), BOUND_TO)
    assert parsed_sql.unused == ()


def test_dropped_column_is_found_in_an_older_schema() -> None:
    old_schema = msgspec.convert(
        {"type": "struct", "schema-id": 7, "fields": [{"id": 90, "name": "gone", "required": False, "type": "int"}]},
        type=seamark_schema.Schema,
    )
    assert parse_sql("GONE = 1", BOUND_TO, (BOUND_TO, old_schema)).unused == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("id = 'abc'", "'abc' is not a literal of id, which is long; write a number without quotes"),
        ("s = 5", "5 is not a literal of s, which is string; write text in single quotes"),
        ("day > 5", "5 is not a literal of day, which is date; write DATE '2026-01-31'"),
        ("b IN (1)", "1 is not a literal of b, which is boolean; write true or false"),
        ("x = X'0ff'", "X'0ff' is not a literal of x, which is binary; write bytes as X'00ff'"),
        ('s = "FR"', "double quotes and backticks are for names, and FR is not a column; write 'FR' for a string"),
        ("s = FR", "FR is not a column; write 'FR' for a string"),
        ("id = a", "the condition compares two columns, and planning compares a column with a value"),
        ("id + 1 = a", "one side must be a value, such as 5 or 'text'"),
        ("length(s) = 3", "length() is not a transform of a column"),
        ("s LIKE 'a%b'", "planning uses only the text of a LIKE pattern before its first wildcard"),
    ],
)
def test_unused_part_is_reported_with_its_reason(text: str, reason: str) -> None:
    sql = parse_sql(f"{text} AND id > 1", BOUND_TO)
    assert sql.reasons == (reason,)
    assert len(sql.unused) == 1
    assert not sql.exact


@pytest.mark.parametrize(
    ("text", "equal_text"),
    [
        ("id IN (5, 1e0)", "id IN (5e0, 1e0)"),
        ("id BETWEEN -5 AND 1e10", "id >= -5e0 AND id <= 1e10"),
        ("p NOT IN (0.3, -1, 1e0)", "p NOT IN (0.3e0, -1e0, 1e0)"),
        ("d BETWEEN 0.3 AND 1e0", "d >= 0.3 AND d <= 1e0"),
        ("id IN (9007199254740993, 1e0)", None),
        ("id BETWEEN 9007199254740993 AND 1e300", None),
        ("q BETWEEN 0.3 AND 1e0", None),
        ("id IN (5, CAST(NULL AS double))", None),
        ("s LIKE 'a!' ESCAPE '!'", None),
        ("s LIKE 'a!b%' ESCAPE '!'", None),
    ],
)
def test_numbers_compared_with_doubles_are_compared_as_doubles(text: str, equal_text: str | None) -> None:
    sql = parse_sql(text, BOUND_TO)
    if equal_text is None:
        assert len(sql.unused) == 1
        return
    assert sql.unused == ()
    bound = [
        bind(parse_sql(predicate, BOUND_TO).expression, BOUND_TO, (), case_sensitive=False)
        for predicate in (text, equal_text)
    ]
    assert bound[0] == bound[1]


@pytest.mark.parametrize(
    ("text", "is_exact"),
    [
        ("a = 1 AND s IN ('a', 'b') AND NOT b", True),
        ("p > 1.5 OR day < DATE '2020-01-01' OR ts >= DATE '2020-01-01'", True),
        ("ts < TIMESTAMP '2020-01-01 00:00:00' AND tz IS NOT NULL AND s LIKE 'a%'", True),
        ("year(day) = 2020 AND CAST(ts AS date) = DATE '2020-01-01'", True),
        ("a = '1'", False),
        ("s = 1", False),
        ("day = '2020-01-01'", False),
        ("CAST(ts AS date) = 18262", False),
        ("a = 1e0", False),
        ("d > 1", False),
        ("u IS NULL AND u = UUID '00000000-0000-0000-0000-000000000000'", False),
        ("day = TIMESTAMP '2020-01-01 00:00:00'", False),
        ("tz > TIMESTAMP '2020-01-01 00:00:00'", False),
        ("days(ts) = DATE '2020-01-01'", False),
        ("bucket(4, id) = 1", False),
        ("a IS NOT DISTINCT FROM 1", False),
        ("a IN (1, NULL)", False),
        ("a = NULL", False),
        ("1 = 1", False),
        ("isnan(d)", False),
        ("b IS NOT TRUE", False),
    ],
)
def test_strict_predicates_require_literals_of_their_columns_type(text: str, is_exact: bool) -> None:
    assert parse_sql(text, BOUND_TO, strict=True).exact == is_exact
