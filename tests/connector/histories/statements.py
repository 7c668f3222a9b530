"""Random UPDATE, DELETE and INSERT statements on a random table, and the rows that they match and write."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tests.connector.histories.columns import RandomColumn, draw_value
from tests.connector.histories.predicates import Row
from tests.planner.lakes.literal_forms import render

_LITERAL_WORDS = {"date": "DATE", "timestamp": "TIMESTAMP", "timestamptz": "TIMESTAMP"}
_KINDS = ("boolean", "int", "long", "double", "string", *_LITERAL_WORDS)
_DAYS_MIN, _DAYS_MAX = -719_162, 2_932_896
"""Days of the years 1 and 9999, the first and the last that literals can express."""


@dataclass
class DrawnStatement:
    """An UPDATE or a DELETE.

    Attributes:
        text: The statement.
        matches: Returns whether the condition of the statement is true for a row.
        new_values: The new values by column id.
    """

    text: str
    matches: Callable[[Row], bool]
    new_values: Row = field(default_factory=dict)


def can_be_written(column: RandomColumn) -> bool:
    """Return True if statements can compare and set the column.

    They cannot if SQL has no literals of its type, as for the type real.
    """
    return column.kind in _KINDS or column.kind.startswith("decimal(")


def can_be_read(column: RandomColumn) -> bool:
    """Return True if statements can read the column. They cannot read times with nanoseconds."""
    return all(not child.kind.endswith("_ns") for child in column.walk())


def make_sql_column(column: RandomColumn) -> RandomColumn:
    """Return the column as results of statements have it: UUIDs are texts."""
    kind = "string" if column.kind == "uuid" else column.kind
    return RandomColumn(column.id, column.name, kind, [make_sql_column(child) for child in column.children])


def to_sql_value(column: RandomColumn, value: Any) -> Any:
    """Return a value of the column as results of statements have it."""
    if value is None:
        return None
    match column.kind:
        case "uuid":
            return str(UUID(bytes=value))
        case "struct":
            return {child.id: to_sql_value(child, child.read_value(value)) for child in column.children}
        case "list":
            return [to_sql_value(column.children[0], item) for item in value]
        case "map":
            key_column, value_column = column.children
            return [(to_sql_value(key_column, key), to_sql_value(value_column, item)) for key, item in value]
    return value


def draw_change(
    rng: random.Random,
    table: str,
    columns: Sequence[RandomColumn],
    settable_columns: Sequence[RandomColumn],
    rows: Sequence[Row],
) -> DrawnStatement | None:
    """Return a random UPDATE or DELETE with a condition of one or two parts.

    Return None if statements can compare no column.
    """
    writable_columns = [column for column in columns if can_be_written(column)]
    if not writable_columns:
        return None
    parts = [_draw_condition(rng, rng.choice(writable_columns), rows) for _ in range(rng.choice((1, 1, 2)))]
    operator = rng.choice(("AND", "OR"))
    where = f" {operator} ".join(text for text, _ in parts)
    combine = all if operator == "AND" else any

    def matches(row: Row) -> bool:
        return combine(test(row) for _, test in parts)

    settable_columns = [column for column in settable_columns if can_be_written(column)]
    if not settable_columns or rng.random() < 0.3:
        return DrawnStatement(f"DELETE FROM {table} WHERE {where}", matches)
    chosen_columns = rng.sample(settable_columns, rng.randint(1, len(settable_columns)))
    new_row: Row = {column.id: draw_literal_value(rng, column) for column in chosen_columns}
    sets = ", ".join(
        f"{quote(column.name)} = {format_literal(column.kind, new_row[column.id])}" for column in chosen_columns
    )
    return DrawnStatement(f"UPDATE {table} SET {sets} WHERE {where}", matches, new_row)


def quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def format_literal(kind: str, value: Any) -> str:
    """Return the value as a literal of Trino's SQL."""
    if value is None:
        return "NULL"
    if kind.startswith("decimal("):
        return f"DECIMAL '{render(kind, value, 'spec')}'"
    if kind in _LITERAL_WORDS:
        text = str(render(kind, value, "spec")).replace("T", " ").replace("+00:00", " UTC")
        return f"{_LITERAL_WORDS[kind]} '{text}'"
    if kind == "string":
        return "'" + value.replace("'", "''") + "'"
    if kind == "double":
        return f"{value!r}e0" if "e" not in repr(value) else repr(value)
    return str(value).lower()


def _draw_condition(rng: random.Random, column: RandomColumn, rows: Sequence[Row]) -> tuple[str, Callable[[Row], bool]]:
    name = quote(column.name)
    stored_values = [
        value for row in rows if (value := column.read_value(row)) is not None and _has_literal(column.kind, value)
    ]

    def draw_value() -> Any:
        return (
            rng.choice(stored_values)
            if stored_values and rng.random() < 0.8
            else draw_literal_value(rng, column, nulls=False)
        )

    match rng.choice(("=", "=", "IN", "<", "IS NULL", "BETWEEN")):
        case "IS NULL":
            return f"{name} IS NULL", lambda row: column.read_value(row) is None
        case "IN":
            values = [draw_value() for _ in range(rng.randint(1, 3))]
            texts = ", ".join(format_literal(column.kind, value) for value in values)
            return f"{name} IN ({texts})", _test_value(column, lambda value: value in values)
        case "<":
            limit = draw_value()
            return f"{name} < {format_literal(column.kind, limit)}", _test_value(
                column, lambda value: bool(value < limit)
            )
        case "BETWEEN":
            low, high = draw_value(), draw_value()
            text = f"{name} BETWEEN {format_literal(column.kind, low)} AND {format_literal(column.kind, high)}"
            return text, _test_value(column, lambda value: bool(low <= value <= high))
    equal_value = draw_value()
    return f"{name} = {format_literal(column.kind, equal_value)}", _test_value(
        column, lambda value: bool(value == equal_value)
    )


def _test_value(column: RandomColumn, test: Callable[[Any], bool]) -> Callable[[Row], bool]:
    return lambda row: column.read_value(row) is not None and test(column.read_value(row))


def draw_literal_value(rng: random.Random, column: RandomColumn, *, nulls: bool = True) -> Any:
    """Return a random value that a literal can express."""
    if nulls and rng.random() < 0.1:
        return None
    while True:
        value = draw_value(rng, column.kind)
        if _has_literal(column.kind, value):
            return value


def _has_literal(kind: str, value: Any) -> bool:
    if kind == "double":
        # Some engines have no literal for NaN, infinity or very large numbers.
        return value == value and abs(value) < 1e30
    if kind == "string":
        return "\0" not in value
    if kind in _LITERAL_WORDS:
        days = value if kind == "date" else value // 86_400_000_000
        return _DAYS_MIN <= days <= _DAYS_MAX
    return True
