"""Random filters on the columns of a random table: Iceberg's expression JSON, and the rows that they match."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.connector.histories.columns import NESTED_KINDS, STRUCT, RandomColumn, draw_value
from tests.planner.lakes.literal_forms import render

Row = dict[int, Any]
Test = Callable[[Row], bool]


class DrawnFilter(NamedTuple):
    """A filter as JSON, with a test of the rows that match it, and a test of the rows that match its negation.

    Iceberg pushes NOT down to the comparisons, so the negated filter has its own test.
    """

    expression: dict[str, Any]
    matches: Test
    fails: Test


_NEGATIONS = {
    **{"eq": "not-eq", "lt": "gt-eq", "lt-eq": "gt", "is-null": "not-null"},
    **{"in": "not-in", "starts-with": "not-starts-with", "is-nan": "not-nan"},
}
_NEGATIONS |= {other: op for op, other in _NEGATIONS.items()}
_COMPARISONS = {"lt": operator.lt, "lt-eq": operator.le, "gt": operator.gt, "gt-eq": operator.ge, "eq": operator.eq}


def draw_filter(
    rng: random.Random, columns: Sequence[RandomColumn], rows: Sequence[Row], depth: int = 2
) -> DrawnFilter:
    """Return a random filter as JSON, with a test of the rows that match it and a test of the rows that fail it."""
    if depth and rng.random() < 0.4:
        left, right = (draw_filter(rng, columns, rows, depth - 1) for _ in range(2))
        operator, negated_operator = rng.choice((("and", "or"), ("or", "and")))
        return DrawnFilter(
            {"type": operator, "left": left.expression, "right": right.expression},
            _join_tests(operator, left.matches, right.matches),
            _join_tests(negated_operator, left.fails, right.fails),
        )
    if depth and rng.random() < 0.15:
        child = draw_filter(rng, columns, rows, depth - 1)
        return DrawnFilter({"type": "not", "child": child.expression}, child.fails, child.matches)
    name, column, get = rng.choice(_list_terms(columns))
    if column.kind in NESTED_KINDS:
        op = rng.choice(("is-null", "not-null"))
        return DrawnFilter({"type": op, "term": name}, _build_test(op, (), get), _build_test(_NEGATIONS[op], (), get))
    stored_values = [value for row in rows if (value := get(row)) is not None and value == value]

    def draw_literal() -> Any:
        while True:
            value = rng.choice(stored_values) if stored_values and rng.random() < 0.8 else draw_value(rng, column.kind)
            if value == value:
                return value

    ops = ["eq", "lt", "lt-eq", "in", "in", "is-null"]
    ops += ["starts-with"] * 3 if column.kind == "string" else ["is-nan"] if column.kind in ("float", "double") else []
    op = rng.choice([*ops, *map(_NEGATIONS.__getitem__, ops)])
    values = [draw_literal() for _ in range(rng.randint(1, 4))]
    if "starts" in op:
        values = [values[0][: rng.randint(0, 3)]]
    expression = {"type": op, "term": name}
    if op in ("in", "not-in"):
        expression["values"] = [render(column.kind, value, "spec") for value in values]
    elif not op.endswith(("null", "nan")):
        expression["value"] = render(column.kind, values[0], "spec")
    return DrawnFilter(expression, _build_test(op, values, get), _build_test(_NEGATIONS[op], values, get))


def _join_tests(operator: str, test: Test, other_test: Test) -> Test:
    if operator == "and":
        return lambda row: test(row) and other_test(row)
    return lambda row: test(row) or other_test(row)


def _list_terms(columns: Sequence[RandomColumn]) -> list[tuple[str, RandomColumn, Callable[[Row], Any]]]:
    """Return columns and fields of structs, each with its name and a function that reads it from a row.

    Fields that are structs, lists or maps are left out.
    """
    readers: list[tuple[str, RandomColumn, Callable[[Row], Any]]] = []
    for column in columns:
        readers.append((column.name, column, column.read_value))
        fields = [child for child in column.children if column.kind == STRUCT and child.kind not in NESTED_KINDS]
        readers += [(f"{column.name}.{field.name}", field, _read_within(column, field)) for field in fields]
    return readers


def _read_within(column: RandomColumn, child: RandomColumn) -> Callable[[Row], Any]:
    return lambda row: None if column.read_value(row) is None else child.read_value(column.read_value(row))


def _build_test(op: str, values: Sequence[Any], get: Callable[[Row], Any]) -> Test:
    known_keys = [_sort_key(value) for value in values]
    match op:
        case "is-null":
            return lambda row: get(row) is None
        case "is-nan":
            return lambda row: (value := get(row)) is not None and value != value
        case "in":
            return lambda row: get(row) is not None and _sort_key(get(row)) in known_keys
        case "starts-with":
            return lambda row: get(row) is not None and get(row).startswith(values[0])
        case "lt" | "lt-eq" | "gt" | "gt-eq" | "eq":
            return lambda row: get(row) is not None and bool(_COMPARISONS[op](_sort_key(get(row)), known_keys[0]))
    # A negated operation matches all other rows. Null and NaN match it, because they do not match the operation itself.
    opposite = _build_test(_NEGATIONS[op], values, get)
    return lambda row: not opposite(row)


def _sort_key(value: Any) -> Any:
    """Return a sort key. Seamark's readers order NaN after each number, and both zeros are equal."""
    if not isinstance(value, float):
        return value
    return (1, 0.0) if value != value else (0, value + 0.0)
