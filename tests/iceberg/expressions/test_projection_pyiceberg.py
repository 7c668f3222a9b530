"""Comparison of projections with PyIceberg.
Seamark skips each partition that PyIceberg skips, and decides each predicate that PyIceberg's residuals decide.

The tests exclude cases where PyIceberg differs from Java on purpose or by mistake: times before 1970, results that
wrap around, zeros of two signs, NaN, comparisons with a null partition in residuals (it fails), and UUIDs.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyiceberg.expressions as pyiceberg_expressions
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyiceberg.expressions.literals import (
    BinaryLiteral,
    BooleanLiteral,
    DecimalLiteral,
    DoubleLiteral,
    LongLiteral,
    StringLiteral,
)
from pyiceberg.expressions.visitors import expression_evaluator, inclusive_projection, residual_evaluator_of
from pyiceberg.partitioning import PartitionField as PyIcebergField
from pyiceberg.partitioning import PartitionSpec as PyIcebergSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
)

from seamark.formats.iceberg.expressions.evaluation import may_match
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.projection import project_inclusive
from seamark.formats.iceberg.expressions.residuals import Residuals
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from tests.iceberg.expressions.predicates import (
    compute_partition,
    draw_expression,
    draw_predicate,
    draw_spec,
    index_by_field,
)
from tests.seeds import examples

TYPES: dict[str, tuple[IcebergType, Any]] = {
    "boolean": (BooleanType(), BooleanLiteral),
    "int": (IntegerType(), LongLiteral),
    "long": (LongType(), LongLiteral),
    "date": (DateType(), LongLiteral),
    "timestamp": (TimestampType(), LongLiteral),
    "decimal(9, 2)": (DecimalType(9, 2), lambda value: DecimalLiteral(Decimal(value).scaleb(-2))),
    "double": (DoubleType(), DoubleLiteral),
    "string": (StringType(), StringLiteral),
    "binary": (BinaryType(), BinaryLiteral),
}
"""The type in PyIceberg, and the function that makes a literal of it."""

COLUMNS = dict(enumerate(TYPES, start=1))

DAY_US = 86_400_000_000

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": st.integers(-20, 20),
    "long": st.integers(-20, 20),
    "date": st.integers(1, 1000),
    "timestamp": st.integers(DAY_US, 800 * DAY_US) | st.integers(1, 40).map(lambda day: day * DAY_US),
    "decimal(9, 2)": st.integers(-300, 300),
    "double": st.sampled_from([-2.5, 1.0, 3.5]),
    "string": st.text("abc", max_size=4),
    "binary": st.text("abc", max_size=4).map(str.encode),
}

SCHEMA = Schema(
    *(NestedField(column, f"c{column}", TYPES[kind][0], required=False) for column, kind in COLUMNS.items())
)

PREDICATES: dict[Op, Any] = {
    Op.IS_NULL: pyiceberg_expressions.IsNull,
    Op.NOT_NULL: pyiceberg_expressions.NotNull,
    Op.IS_NAN: pyiceberg_expressions.IsNaN,
    Op.NOT_NAN: pyiceberg_expressions.NotNaN,
    Op.LT: pyiceberg_expressions.LessThan,
    Op.LT_EQ: pyiceberg_expressions.LessThanOrEqual,
    Op.GT: pyiceberg_expressions.GreaterThan,
    Op.GT_EQ: pyiceberg_expressions.GreaterThanOrEqual,
    Op.EQ: pyiceberg_expressions.EqualTo,
    Op.NOT_EQ: pyiceberg_expressions.NotEqualTo,
    Op.IN: pyiceberg_expressions.In,
    Op.NOT_IN: pyiceberg_expressions.NotIn,
    Op.STARTS_WITH: pyiceberg_expressions.StartsWith,
    Op.NOT_STARTS_WITH: pyiceberg_expressions.NotStartsWith,
}

SPECS = draw_spec(COLUMNS).filter(lambda spec: all(field.transform != "truncate[2147483647]" for field in spec.fields))


def to_pyiceberg(expression: Expression) -> pyiceberg_expressions.BooleanExpression:
    if isinstance(expression, Always):
        return pyiceberg_expressions.AlwaysTrue() if expression.value else pyiceberg_expressions.AlwaysFalse()
    if isinstance(expression, And | Or):
        combine = pyiceberg_expressions.And if isinstance(expression, And) else pyiceberg_expressions.Or
        return combine(*map(to_pyiceberg, expression.children))
    assert isinstance(expression, Bound)
    operator, literal = PREDICATES[expression.op], TYPES[expression.kind][1]
    if expression.op in (Op.IN, Op.NOT_IN):
        result = operator(expression.name, {literal(value) for value in expression.values})
    else:
        result = operator(expression.name, *map(literal, expression.values))
    assert isinstance(result, pyiceberg_expressions.BooleanExpression)
    return result


def to_pyiceberg_spec(spec: PartitionSpec) -> PyIcebergSpec:
    return PyIcebergSpec(
        *(
            PyIcebergField(field.sources[0], field.field_id, parse_transform(field.transform), field.name)
            for field in spec.fields
        )
    )


def to_pyiceberg_record(spec: PartitionSpec, partition: tuple[Any, ...]) -> Record:
    values = []
    for field, value in zip(spec.fields, partition, strict=True):
        kind = COLUMNS[field.sources[0]]
        is_scaled = kind.startswith("decimal") and "bucket" not in field.transform and value is not None
        values.append(Decimal(value).scaleb(-2) if is_scaled and field.transform != "zorder" else value)
    return Record(*values)


def draw_partition(data: st.DataObject, spec: PartitionSpec, nulls: bool) -> tuple[Any, ...]:
    values = {column: st.none() | VALUES[kind] if nulls else VALUES[kind] for column, kind in COLUMNS.items()}
    row = {column: data.draw(values[column]) for column in sorted({field.sources[0] for field in spec.fields})}
    return compute_partition(spec, COLUMNS, row, as_old_java=False)


@given(st.data())
@settings(max_examples=examples(200))
def test_partitions_that_pyiceberg_skips_are_skipped(data: st.DataObject) -> None:
    spec = data.draw(SPECS)
    columns = {field.sources[0]: COLUMNS[field.sources[0]] for field in spec.fields}
    expression = data.draw(draw_expression(columns, with_transforms=False, values=VALUES))
    partition = draw_partition(data, spec, nulls=True)
    assume(may_match(project_inclusive(expression, spec), index_by_field(spec, partition)))
    projected_predicate = inclusive_projection(SCHEMA, to_pyiceberg_spec(spec))(to_pyiceberg(expression))
    struct = Schema(*to_pyiceberg_spec(spec).partition_type(SCHEMA).fields)
    evaluate = expression_evaluator(struct, projected_predicate, case_sensitive=True)
    assert evaluate(to_pyiceberg_record(spec, partition)), projected_predicate


@given(st.data())
@settings(max_examples=examples(200))
def test_predicates_that_pyicebergs_residual_decides_are_decided(data: st.DataObject) -> None:
    spec = data.draw(SPECS)
    columns = {field.sources[0]: COLUMNS[field.sources[0]] for field in spec.fields}
    query = data.draw(draw_predicate(columns, with_transforms=False, values=VALUES))
    partition = draw_partition(data, spec, nulls=False)
    evaluator = residual_evaluator_of(to_pyiceberg_spec(spec), to_pyiceberg(query), case_sensitive=True, schema=SCHEMA)
    expected = evaluator.residual_for(to_pyiceberg_record(spec, partition))
    residual = Residuals(query, spec)(index_by_field(spec, partition))
    if isinstance(expected, pyiceberg_expressions.AlwaysTrue):
        assert residual == TRUE
    if isinstance(expected, pyiceberg_expressions.AlwaysFalse):
        assert residual == FALSE
