"""Tests of residuals. For each row of a partition and for every client, the residual and the filter have the same
result.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.evaluation import evaluate, may_match, must_match
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.residuals import Residuals, make_bindable, match_both_zeros
from seamark.formats.iceberg.metadata.partition import UNPARTITIONED, PartitionField, PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.values import Value
from tests.iceberg.expressions.predicates import (
    COLUMNS,
    DAY,
    compute_partition,
    draw_expression,
    draw_predicate,
    draw_spec,
    draw_values_of,
    holds,
    index_by_field,
    matches,
    order_like_java,
    order_like_python,
)
from tests.seeds import examples


def build_predicate(op: Op, kind: str, *values: Value) -> Bound:
    return Bound(op, 1, "x", kind, "identity", kind, values)


def compute_residual(expression: Expression, transform: str, value: Value | None) -> Expression:
    spec = PartitionSpec(0, (PartitionField("p", transform, source_id=1, field_id=1000),))
    return Residuals(expression, spec)({1000: value})


@given(st.data())
@settings(max_examples=examples(200))
def test_residual_agrees_with_the_filter_on_each_row_of_the_partition(data: st.DataObject) -> None:
    columns = {column: COLUMNS[column] for column in data.draw(st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1))}
    spec, expression = data.draw(draw_spec(columns)), data.draw(draw_expression(columns))
    row = {column: data.draw(st.none() | draw_values_of(kind)) for column, kind in columns.items()}
    # Old versions of Iceberg's Java library stored other partition values, for example for times before 1970.
    partition = compute_partition(spec, columns, row, as_old_java=data.draw(st.booleans()))
    residual = Residuals(expression, spec)(index_by_field(spec, partition))
    for order in (order_like_java, order_like_python):
        assert matches(residual, row, order) == matches(expression, row, order), residual


DAY_START, DAY_END = 100 * DAY, 101 * DAY


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (build_predicate(Op.LT, "timestamp", DAY_START), "false"),
        (build_predicate(Op.LT, "timestamp", DAY_START + 1), "undecided"),
        (build_predicate(Op.LT, "timestamp", DAY_END), "true"),
        (build_predicate(Op.GT_EQ, "timestamp", DAY_START), "true"),
        (build_predicate(Op.GT, "timestamp", DAY_START), "undecided"),
        (build_predicate(Op.EQ, "timestamp", DAY_END), "false"),
        (build_predicate(Op.EQ, "timestamp", DAY_START), "undecided"),
        (build_predicate(Op.NOT_EQ, "timestamp", DAY_END), "true"),
        (build_predicate(Op.NOT_IN, "timestamp", DAY_START, DAY_END), "undecided"),
        (build_predicate(Op.IS_NULL, "timestamp"), "false"),
        (build_predicate(Op.NOT_NULL, "timestamp"), "true"),
    ],
)
def test_day_partition_decides_a_timestamp_filter_or_keeps_it(condition: Bound, expected: str) -> None:
    assert compute_residual(condition, "day", 100) == {"true": TRUE, "false": FALSE, "undecided": condition}[expected]


def test_comparisons_are_false_and_inequality_is_true_in_a_null_partition() -> None:
    assert compute_residual(build_predicate(Op.LT, "int", 5), "identity", None) == FALSE
    assert compute_residual(build_predicate(Op.GT_EQ, "int", -(2**31)), "truncate[8]", None) == FALSE
    assert compute_residual(build_predicate(Op.NOT_EQ, "int", 5), "bucket[4]", None) == TRUE
    assert compute_residual(build_predicate(Op.NOT_STARTS_WITH, "string", "abc"), "truncate[2]", None) == TRUE
    assert compute_residual(build_predicate(Op.IS_NULL, "int"), "identity", None) == TRUE


def test_only_undecided_predicates_remain_in_a_residual() -> None:
    day_predicate, other_predicate = (
        build_predicate(Op.LT, "timestamp", DAY_END),
        Bound(Op.EQ, 2, "y", "int", "identity", "int", (1,)),
    )
    inner_predicate = build_predicate(Op.GT, "timestamp", DAY_START + 5)
    assert compute_residual(And((day_predicate, other_predicate)), "day", 100) == other_predicate
    assert compute_residual(And((day_predicate, other_predicate)), "day", 101) == FALSE
    assert compute_residual(Or((And((inner_predicate, other_predicate)), day_predicate)), "day", 101) == other_predicate
    assert compute_residual(And((inner_predicate, other_predicate, day_predicate)), "day", 100) == And(
        (inner_predicate, other_predicate)
    )


def test_residual_of_an_unpartitioned_table_is_the_filter() -> None:
    expression = And((build_predicate(Op.EQ, "int", 1), build_predicate(Op.IS_NULL, "int")))
    assert Residuals(expression, UNPARTITIONED)({}) is expression
    void = PartitionSpec(0, (PartitionField("p", "void", 1, (), 1000),))
    assert Residuals(expression, void)({1000: None}) is expression


def test_field_missing_from_the_partition_decides_nothing() -> None:
    expression = build_predicate(Op.GT, "int", 1)
    spec = PartitionSpec(0, (PartitionField("p", "identity", source_id=1, field_id=1000),))
    assert Residuals(expression, spec)({}) == expression
    assert Residuals(expression, spec)({1000: None}) == FALSE


@pytest.mark.parametrize(
    ("op", "value", "literal"),
    [
        (Op.GT, math.nan, 1.0),
        (Op.EQ, -0.0, 0.0),
        (Op.LT, -0.0, 0.0),
        (Op.LT_EQ, 0.0, -0.0),
        (Op.NOT_EQ, 0.0, -0.0),
        (Op.IN, -0.0, 0.0),
    ],
)
def test_file_and_predicate_are_kept_when_clients_read_a_number_differently(
    op: Op, value: float, literal: float
) -> None:
    query_predicate = build_predicate(op, "double", *([literal, 7.0] if op == Op.IN else [literal]))
    assert evaluate(query_predicate, value) is None
    assert compute_residual(query_predicate, "identity", value) == query_predicate


def test_nan_is_less_than_no_value_and_differs_from_all_values() -> None:
    assert evaluate(build_predicate(Op.LT, "double", 1.0), math.nan) is False
    assert evaluate(build_predicate(Op.NOT_EQ, "double", 1.0), math.nan) is True
    assert evaluate(build_predicate(Op.NOT_IN, "double", 0.0, 1.0), math.nan) is True
    assert evaluate(build_predicate(Op.IS_NAN, "double"), math.nan) is True
    assert evaluate(build_predicate(Op.NOT_NAN, "double"), None) is True


@given(st.data())
@settings(max_examples=examples(200))
def test_single_value_is_decided_only_if_all_clients_agree(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(COLUMNS.values())))
    query = data.draw(draw_predicate({1: kind}, with_transforms=False))
    value: Any = data.draw(st.none() | draw_values_of(kind))
    java_answer, python_answer = holds(query, value, order_like_java), holds(query, value, order_like_python)
    assert evaluate(query, value) == (java_answer if java_answer == python_answer else None)
    assert may_match(query, {1: value}) == (java_answer or python_answer)
    assert must_match(query, {1: value}) == (java_answer and python_answer)


def test_field_without_a_value_decides_nothing() -> None:
    query_predicate = build_predicate(Op.EQ, "int", 1)
    assert may_match(query_predicate, {})
    assert not must_match(query_predicate, {})


def test_residual_uses_only_names_of_the_current_schema() -> None:
    """Java binds residuals by name. After a rename, the old name is unknown, or even belongs to another column."""
    schema = Schema((Field(1, "x", False, "int"), Field(2, "renamed", False, "int"), Field(4, "old", False, "int")))

    def build_equality(column_id: int, name: str) -> Bound:
        return Bound(Op.EQ, column_id, name, "int", "identity", "int", (5,))

    kept_field, renamed_field, replaced_field, dropped_field = (
        build_equality(1, "x"),
        build_equality(2, "before"),
        build_equality(3, "old"),
        build_equality(9, "gone"),
    )
    both_conditions = And((kept_field, build_equality(4, "old")))
    assert make_bindable(both_conditions, schema) is both_conditions
    for unbindable_predicate in (renamed_field, replaced_field, dropped_field):
        assert make_bindable(unbindable_predicate, schema) == TRUE
        assert make_bindable(And((kept_field, unbindable_predicate)), schema) == kept_field
        assert make_bindable(Or((kept_field, unbindable_predicate)), schema) == TRUE
        assert make_bindable(And((kept_field, Or((unbindable_predicate, FALSE)))), schema) == kept_field
    assert make_bindable(FALSE, schema) == FALSE


def test_residual_for_java_includes_both_zeros_if_either_satisfies_it() -> None:
    """Java's readers skip row groups whose bounds contain only the other zero."""
    for op, literals, expected in (
        (Op.EQ, (0.0,), (Op.IN, "(-0.0, 0.0)")),
        (Op.EQ, (-0.0,), (Op.IN, "(-0.0, 0.0)")),
        (Op.IN, (-1.0, 0.0, 2.0), (Op.IN, "(-1.0, -0.0, 0.0, 2.0)")),
        (Op.GT_EQ, (0.0,), (Op.GT_EQ, "(-0.0,)")),
        (Op.LT_EQ, (-0.0,), (Op.LT_EQ, "(0.0,)")),
        (Op.GT, (0.0,), (Op.GT, "(0.0,)")),
        (Op.EQ, (1.0,), (Op.EQ, "(1.0,)")),
    ):
        query_predicate = build_predicate(op, "double", *literals)
        widened_predicate = match_both_zeros(And((query_predicate, build_predicate(Op.EQ, "int", 0))))
        assert isinstance(widened_predicate, And)
        first_predicate, second_predicate = widened_predicate.children
        assert isinstance(first_predicate, Bound)
        assert (first_predicate.op, repr(first_predicate.values)) == expected
        assert second_predicate == build_predicate(Op.EQ, "int", 0)
