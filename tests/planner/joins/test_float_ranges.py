"""Ranges of special floats: each comparison that Trino, DuckDB or Spark finds true is in the condition."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable

import pyarrow as pa
import pytest

from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.metaserver.planner.joins.dimension_columns import FileColumn
from seamark.metaserver.planner.joins.ranges import (
    PlannedColumn,
    can_limit_by_range,
    compute_spans,
    convert_spans_to_key_sets,
    make_range_condition,
)

SPECIAL_FLOATS = [-math.inf, -1.5, -5e-324, -0.0, 0.0, 5e-324, 1.5, 1.7976931348623157e308, math.inf, math.nan]
OPERATORS: dict[str, Callable[[object, object], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}
_OPS = {Op.LT_EQ: "<=", Op.GT_EQ: ">=", Op.EQ: "="}


def compare_floats(value: float, op: str, literal: float) -> bool:
    """Compare two values as DuckDB and Spark do: NaN is equal to NaN and greater than all numbers."""
    keys = [(item != item, 0.0 if item != item else item) for item in (value, literal)]
    return OPERATORS[op](keys[0], keys[1])


def is_met(condition: Expression, value: float) -> bool:
    """Return whether a value meets the condition when file statistics are compared, where NaN equals no number."""
    match condition:
        case Always(result):
            return result
        case And(children):
            return all(is_met(child, value) for child in children)
        case Or(children):
            return any(is_met(child, value) for child in children)
        case Bound(op=Op.IS_NAN):
            return value != value
        case Bound():
            return OPERATORS[_OPS[condition.op]](value, condition.values[0])
    raise TypeError(condition)


@pytest.mark.parametrize("operators", [*((op,) for op in ("<", "<=", ">", ">=")), (">", "<"), (">=", "<=")])
def test_range_of_special_floats_contains_each_value_that_an_engine_finds(operators: tuple[str, ...]) -> None:
    for limits in itertools.product(SPECIAL_FLOATS, repeat=len(operators)):
        columns = [FileColumn.from_array(pa.chunked_array([pa.array([limit])]), "double").codes for limit in limits]
        spans = compute_spans([(*column, "double") for column in columns], operators, "double")
        condition = make_range_condition(PlannedColumn(1, "x", "double"), *convert_spans_to_key_sets(*spans, "double"))
        for value in SPECIAL_FLOATS:
            is_found = all(compare_floats(value, op, limit) for op, limit in zip(operators, limits, strict=True))
            assert is_met(condition, value) or not is_found, (value, operators, limits, condition)
        if all(map(math.isfinite, limits)) and (">" in operators or ">=" in operators) and len(operators) > 1:
            assert not is_met(condition, math.nan), (operators, limits)


@pytest.mark.parametrize(
    ("kind", "other", "expected"),
    [
        ("decimal(9, 2)", "decimal(18, 2)", True),
        ("decimal(9, 2)", "decimal(19, 2)", False),
        ("decimal(19, 2)", "decimal(38, 2)", True),
        ("decimal(9, 2)", "decimal(9, 3)", False),
        ("float", "double", True),
        ("double", "long", False),
        ("decimal(9, 0)", "long", False),
        ("string", "string", True),
        ("string", "uuid", False),
        ("binary", "binary", False),
    ],
)
def test_only_types_with_one_order_have_ranges(kind: str, other: str, expected: bool) -> None:
    assert can_limit_by_range(kind, other) is can_limit_by_range(other, kind) is expected
