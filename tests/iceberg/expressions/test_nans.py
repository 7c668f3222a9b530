"""Tests of NaN with `>` and `>=`: the expression matches the same rows as Spark, and is no longer than necessary."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.expression import (
    Always,
    And,
    Bound,
    Expression,
    Op,
    Or,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.expressions.residuals import add_nan, remove_nan

GT, LT, OTHER = (
    Bound(op, column_id, name, "double", "identity", "double", (3.0,))
    for op, column_id, name in ((Op.GT, 1, "x"), (Op.LT, 1, "x"), (Op.GT_EQ, 2, "y"))
)
NAN = Bound(Op.IS_NAN, 1, "x", "double", "identity", "double", ())
OTHER_NAN = Bound(Op.IS_NAN, 2, "y", "double", "identity", "double", ())
LONG_PREDICATE = Bound(Op.GT, 3, "n", "long", "identity", "long", (3,))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (GT, join_by_or(GT, NAN)),
        (LT, LT),
        (LONG_PREDICATE, LONG_PREDICATE),
        (join_by_and(GT, LONG_PREDICATE), join_by_and(join_by_or(GT, NAN), LONG_PREDICATE)),
        (join_by_and(GT, LT), join_by_and(GT, LT)),
        (join_by_and(join_by_or(GT, NAN), LT), join_by_and(GT, LT)),
        (join_by_and(join_by_or(GT, LONG_PREDICATE), LT), join_by_and(join_by_or(GT, LONG_PREDICATE), LT)),
        (join_by_and(OTHER, LT), join_by_and(join_by_or(OTHER, OTHER_NAN), LT)),
        (join_by_or(GT, NAN), join_by_or(GT, NAN)),
        (join_by_or(NAN, GT, LONG_PREDICATE), join_by_or(GT, LONG_PREDICATE, NAN)),
        (join_by_or(GT, OTHER), join_by_or(GT, OTHER, NAN, OTHER_NAN)),
    ],
)
def test_only_greater_than_comparisons_of_floats_get_a_nan_test(expression: Expression, expected: Expression) -> None:
    assert add_nan(expression) == expected
    assert add_nan(add_nan(expression)) == expected


def test_random_expressions_match_the_rows_that_spark_matches() -> None:
    rng = random.Random(1)
    values = (math.nan, 2.0, 3.0, 4.0)
    for _ in range(2000):
        expression = _draw_expression(rng, 3)
        widened_filter = add_nan(expression)
        for value in values:
            for other_value in values:
                row = {1: value, 2: other_value}
                assert _matches(widened_filter, row, nan_above=False) == _matches(expression, row, nan_above=True), (
                    expression
                )
                if not math.isnan(value) and not math.isnan(other_value):
                    assert _matches(remove_nan(widened_filter), row, nan_above=False) == _matches(
                        expression, row, nan_above=True
                    )


def _draw_expression(rng: random.Random, depth: int) -> Expression:
    if depth and rng.random() < 0.6:
        children = [_draw_expression(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return (join_by_and if rng.random() < 0.5 else join_by_or)(*children)
    column, op = rng.randint(1, 2), rng.choice((Op.GT, Op.GT_EQ, Op.LT, Op.LT_EQ, Op.EQ, Op.NOT_EQ, Op.IS_NAN))
    values = () if op is Op.IS_NAN else (3.0,)
    return Bound(op, column, "xy"[column - 1], "double", "identity", "double", values)


def _matches(expression: Expression, row: dict[int, float], *, nan_above: bool) -> bool:
    """Return whether the row matches. With `nan_above`, NaN is above all numbers, as in Spark.

    The literal of each comparison is 3, as in `_draw_expression`.
    """
    match expression:
        case And(children):
            return all(_matches(child, row, nan_above=nan_above) for child in children)
        case Or(children):
            return any(_matches(child, row, nan_above=nan_above) for child in children)
        case Bound(op, column_id, values=values):
            value: Any = row[column_id]
            if math.isnan(value):
                return op in (Op.IS_NAN, Op.NOT_EQ) or (nan_above and op in (Op.GT, Op.GT_EQ))
            comparisons = {Op.GT: value > 3, Op.GT_EQ: value >= 3, Op.LT: value < 3, Op.LT_EQ: value <= 3}
            return bool(values) and (comparisons | {Op.EQ: value == 3, Op.NOT_EQ: value != 3})[op]
    assert isinstance(expression, Always)
    return expression.value
