"""Residuals give every row of a partition the answer that the whole filter gives; single values to every client."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.evaluation import evaluate, may_match, must_match
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.residuals import Residuals, nameable, with_both_zeros
from seamark.formats.iceberg.metadata.partition import UNPARTITIONED, PartitionField, PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.values import Value
from tests.iceberg.expressions.predicates import (
    COLUMNS,
    DAY,
    by_field,
    expressions,
    holds,
    javas_order,
    matches,
    partition_of,
    predicates,
    pythons_order,
    specs,
    values_of,
)
from tests.seeds import examples


def predicate(op: Op, kind: str, *values: Value) -> Bound:
    return Bound(op, 1, "x", kind, "identity", kind, values)


def residual(asked: Expression, transform: str, value: Value | None) -> Expression:
    spec = PartitionSpec(0, (PartitionField("p", transform, source_id=1, field_id=1000),))
    return Residuals(asked, spec)({1000: value})


@given(st.data())
@settings(max_examples=examples(200))
def test_the_residual_gives_each_row_of_the_partition_the_answer_of_the_filter(data: st.DataObject) -> None:
    columns = {column: COLUMNS[column] for column in data.draw(st.sets(st.sampled_from(sorted(COLUMNS)), min_size=1))}
    spec, expression = data.draw(specs(columns)), data.draw(expressions(columns))
    row = {column: data.draw(st.none() | values_of(kind)) for column, kind in columns.items()}
    partition = partition_of(spec, columns, row, old=data.draw(st.booleans()))
    found = Residuals(expression, spec)(by_field(spec, partition))
    for order in (javas_order, pythons_order):
        assert matches(found, row, order) == matches(expression, row, order), found


DAY_100 = (100 * DAY, 101 * DAY)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (predicate(Op.LT, "timestamp", DAY_100[0]), "false"),
        (predicate(Op.LT, "timestamp", DAY_100[0] + 1), "rest"),
        (predicate(Op.LT, "timestamp", DAY_100[1]), "true"),
        (predicate(Op.GT_EQ, "timestamp", DAY_100[0]), "true"),
        (predicate(Op.GT, "timestamp", DAY_100[0]), "rest"),
        (predicate(Op.EQ, "timestamp", DAY_100[1]), "false"),
        (predicate(Op.EQ, "timestamp", DAY_100[0]), "rest"),
        (predicate(Op.NOT_EQ, "timestamp", DAY_100[1]), "true"),
        (predicate(Op.NOT_IN, "timestamp", DAY_100[0], DAY_100[1]), "rest"),
        (predicate(Op.IS_NULL, "timestamp"), "false"),
        (predicate(Op.NOT_NULL, "timestamp"), "true"),
    ],
)
def test_the_residual_in_a_day_of(asked: Bound, expected: str) -> None:
    assert residual(asked, "day", 100) == {"true": TRUE, "false": FALSE, "rest": asked}[expected]


def test_in_a_partition_of_nulls_comparisons_fail_and_inequality_holds() -> None:
    assert residual(predicate(Op.LT, "int", 5), "identity", None) == FALSE
    assert residual(predicate(Op.GT_EQ, "int", -(2**31)), "truncate[8]", None) == FALSE
    assert residual(predicate(Op.NOT_EQ, "int", 5), "bucket[4]", None) == TRUE
    assert residual(predicate(Op.NOT_STARTS_WITH, "string", "abc"), "truncate[2]", None) == TRUE
    assert residual(predicate(Op.IS_NULL, "int"), "identity", None) == TRUE


def test_only_the_undecided_predicates_of_a_tree_remain() -> None:
    day, other = predicate(Op.LT, "timestamp", DAY_100[1]), Bound(Op.EQ, 2, "y", "int", "identity", "int", (1,))
    inside = predicate(Op.GT, "timestamp", DAY_100[0] + 5)
    assert residual(And((day, other)), "day", 100) == other
    assert residual(And((day, other)), "day", 101) == FALSE
    assert residual(Or((And((inside, other)), day)), "day", 101) == other
    assert residual(And((inside, other, day)), "day", 100) == And((inside, other))


def test_without_partitions_the_filter_remains_as_it_is() -> None:
    expression = And((predicate(Op.EQ, "int", 1), predicate(Op.IS_NULL, "int")))
    assert Residuals(expression, UNPARTITIONED)({}) is expression
    void = PartitionSpec(0, (PartitionField("p", "void", 1, (), 1000),))
    assert Residuals(expression, void)({1000: None}) is expression


def test_a_field_that_the_partition_lacks_decides_nothing() -> None:
    expression = predicate(Op.GT, "int", 1)
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
def test_where_clients_read_a_number_differently_the_file_and_the_predicate_stay(
    op: Op, value: float, literal: float
) -> None:
    asked = predicate(op, "double", *([literal, 7.0] if op == Op.IN else [literal]))
    assert evaluate(asked, value) is None
    assert residual(asked, "identity", value) == asked


def test_nan_is_less_than_nothing_and_different_from_all() -> None:
    assert evaluate(predicate(Op.LT, "double", 1.0), math.nan) is False
    assert evaluate(predicate(Op.NOT_EQ, "double", 1.0), math.nan) is True
    assert evaluate(predicate(Op.NOT_IN, "double", 0.0, 1.0), math.nan) is True
    assert evaluate(predicate(Op.IS_NAN, "double"), math.nan) is True
    assert evaluate(predicate(Op.NOT_NAN, "double"), None) is True


@given(st.data())
@settings(max_examples=examples(200))
def test_a_single_value_is_judged_as_both_readers_do_or_left_open_where_they_differ(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(COLUMNS.values())))
    asked = data.draw(predicates({1: kind}, terms=False))
    value: Any = data.draw(st.none() | values_of(kind))
    javas, pythons = holds(asked, value, javas_order), holds(asked, value, pythons_order)
    assert evaluate(asked, value) == (javas if javas == pythons else None)
    assert may_match(asked, {1: value}) == (javas or pythons)
    assert must_match(asked, {1: value}) == (javas and pythons)


def test_a_field_without_a_value_decides_nothing() -> None:
    asked = predicate(Op.EQ, "int", 1)
    assert may_match(asked, {})
    assert not must_match(asked, {})


def test_a_residual_names_only_what_the_current_schema_calls_so() -> None:
    """Java binds it by name: after a rename to nothing, or worse, to the column that has the name by now."""
    schema = Schema((Field(1, "x", False, "int"), Field(2, "renamed", False, "int"), Field(4, "old", False, "int")))

    def on(column_id: int, name: str) -> Bound:
        return Bound(Op.EQ, column_id, name, "int", "identity", "int", (5,))

    kept, renamed, replaced, dropped = on(1, "x"), on(2, "before"), on(3, "old"), on(9, "gone")
    both = And((kept, on(4, "old")))
    assert nameable(both, schema) is both
    for other in (renamed, replaced, dropped):
        assert nameable(other, schema) == TRUE
        assert nameable(And((kept, other)), schema) == kept
        assert nameable(Or((kept, other)), schema) == TRUE
        assert nameable(And((kept, Or((other, FALSE)))), schema) == kept
    assert nameable(FALSE, schema) == FALSE


def test_a_residual_for_java_names_both_zeros_where_one_satisfies_it() -> None:
    """Java's readers skip row groups in which only the other zero occurs."""
    for op, literals, expected in (
        (Op.EQ, (0.0,), (Op.IN, "(-0.0, 0.0)")),
        (Op.EQ, (-0.0,), (Op.IN, "(-0.0, 0.0)")),
        (Op.IN, (-1.0, 0.0, 2.0), (Op.IN, "(-1.0, -0.0, 0.0, 2.0)")),
        (Op.GT_EQ, (0.0,), (Op.GT_EQ, "(-0.0,)")),
        (Op.LT_EQ, (-0.0,), (Op.LT_EQ, "(0.0,)")),
        (Op.GT, (0.0,), (Op.GT, "(0.0,)")),
        (Op.EQ, (1.0,), (Op.EQ, "(1.0,)")),
    ):
        asked = predicate(op, "double", *literals)
        found = with_both_zeros(And((asked, predicate(Op.EQ, "int", 0))))
        assert isinstance(found, And)
        first, second = found.children
        assert isinstance(first, Bound)
        assert (first.op, repr(first.values)) == expected
        assert second == predicate(Op.EQ, "int", 0)
