"""Converts the filters that Spark pushes down to equivalent expressions, or leaves them to Spark.

The reader applies an accepted filter to every row, and Spark does not evaluate it again. Therefore a filter whose
meaning might differ is left to Spark: a filter on a column that the table does not have, a filter with a value whose
type is not the column's, a filter with text for a uuid, and a `LIKE` pattern that is not a prefix. For Spark and for
the reader, NaN is greater than every number and equal to itself, and 0.0 equals -0.0
(`formats/iceberg/expressions/arrow_filters.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from math import isnan

from pyspark.sql import datasource as spark

from seamark.formats.iceberg.expressions.binding import OPPOSITE, bind
from seamark.formats.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.formats.iceberg.expressions.expression import FALSE, Expression, Not, Op, Unbound, join_by_and, join_by_or
from seamark.formats.iceberg.types.schema import Column, Field, Schema, StructType
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.runtime.errors import BadRequest

_COMPARISON_OPS: dict[type[spark.Filter], Op] = {
    spark.EqualTo: Op.EQ,
    spark.LessThan: Op.LT,
    spark.LessThanOrEqual: Op.LT_EQ,
    spark.GreaterThan: Op.GT,
    spark.GreaterThanOrEqual: Op.GT_EQ,
}
_NAN_PREDICATES = {
    Op.EQ: Op.IS_NAN,
    Op.NOT_EQ: Op.NOT_NAN,
    Op.LT: Op.NOT_NAN,
    Op.GT_EQ: Op.IS_NAN,
    Op.LT_EQ: Op.NOT_NULL,
}
"""The predicates with the same results as comparisons with NaN, by operator. No value is greater than NaN."""


class _FilterNotSupported(Exception):
    """Raised if the data source cannot evaluate a filter. Spark then evaluates it."""


def build_expression(spark_filter: spark.Filter, schema: Schema) -> Expression | None:
    """Return the filter as an expression that is bound to the schema, or None if it is left to Spark."""
    try:
        return bind(_convert(spark_filter, schema, negated=False), schema, (), case_sensitive=True)
    except (_FilterNotSupported, BadRequest):
        return None


def _convert(spark_filter: spark.Filter, schema: Schema, *, negated: bool) -> Expression:
    """Return an expression that is true for the rows for which the filter is true or, with `negated`, false.

    Raises:
        _FilterNotSupported: The expression cannot represent the filter.
    """
    match spark_filter:
        case spark.Not(child):
            return _convert(child, schema, negated=not negated)
        case spark.IsNull(path) | spark.IsNotNull(path):
            op = Op.IS_NULL if isinstance(spark_filter, spark.IsNull) != negated else Op.NOT_NULL
            return Unbound(op, _find_column(path, schema).name, IDENTITY, ())
        case spark.EqualNullSafe(path, value):
            return _compare_null_safe(_find_column(path, schema), value, negated)
        case spark.In(path, values):
            return _compare_list(_find_column(path, schema), values, negated)
        case spark.StringStartsWith(path, value):
            column = _find_column(path, schema)
            if column.type != "string" or not isinstance(value, str):
                raise _FilterNotSupported
            return _make_predicate(column, _choose_op(Op.STARTS_WITH, negated), value)
    if type(spark_filter) in _COMPARISON_OPS:
        column = _find_column(spark_filter.attribute, schema)  # type: ignore[attr-defined]
        return _compare(_choose_op(_COMPARISON_OPS[type(spark_filter)], negated), column, spark_filter.value)  # type: ignore[attr-defined]
    raise _FilterNotSupported


def _choose_op(op: Op, negated: bool) -> Op:
    return OPPOSITE[op] if negated else op


def _find_column(path: Sequence[str], schema: Schema) -> Column:
    """Return the column with this path of names.

    Raises:
        _FilterNotSupported: There is no such column, or its name is ambiguous.
    """
    fields: tuple[Field, ...] = schema.fields
    field: Field | None = None
    for name in path:
        field = next((candidate for candidate in fields if candidate.name == name), None)
        if field is None:
            raise _FilterNotSupported
        fields = field.type.fields if isinstance(field.type, StructType) else ()
    column = None if field is None else schema.column(field.id)
    if column is None or schema.find_column_by_name(column.name) is not column:
        raise _FilterNotSupported
    return column


def _make_predicate(column: Column, op: Op, *literals: object) -> Expression:
    """Return a predicate on a column that is false for null."""
    predicate = Unbound(op, column.name, IDENTITY, literals)
    return join_by_and(Unbound(Op.NOT_NULL, column.name, IDENTITY, ()), predicate) if op in NULL_MATCHES else predicate


def _compare(op: Op, column: Column, value: object) -> Expression:
    literal = _to_literal(column, value)
    if not _is_nan(literal):
        return _make_predicate(column, op, literal)
    return FALSE if op is Op.GT else _make_predicate(column, _NAN_PREDICATES[op])


def _is_nan(literal: object) -> bool:
    return isinstance(literal, float) and isnan(literal)


def _compare_list(column: Column, values: Sequence[object], negated: bool) -> Expression:
    """Return IN or, with `negated`, NOT IN. NaN in the list becomes a separate predicate, because IN never matches it.

    Raises:
        _FilterNotSupported: A value has another type than the column, or the list contains only nulls.
    """
    literals = [_to_literal(column, value) for value in values if value is not None]
    if not literals:
        raise _FilterNotSupported
    if negated and len(literals) < len(values):
        return FALSE  # NOT IN is never true if its list contains null.
    numbers = [literal for literal in literals if not _is_nan(literal)]
    parts = [_make_predicate(column, _choose_op(Op.IN, negated), *numbers)] if numbers else []
    parts += [_make_predicate(column, _choose_op(Op.IS_NAN, negated))] if len(numbers) < len(literals) else []
    return join_by_and(*parts) if negated else join_by_or(*parts)


def _compare_null_safe(column: Column, value: object, negated: bool) -> Expression:
    if value is None:
        return Unbound(Op.NOT_NULL if negated else Op.IS_NULL, column.name, IDENTITY, ())
    equality = _compare(Op.EQ, column, value)
    return Not(equality) if negated else equality


def _to_literal(column: Column, value: object) -> object:
    """Return the value in the JSON form of the column's type.

    Raises:
        _FilterNotSupported: The value has another type than the column. A bool is an int in Python, so it is checked
            first.
    """
    kind = column.type if isinstance(column.type, str) else ""
    match value:
        case bool() if kind == "boolean":
            return value
        case bool():
            raise _FilterNotSupported
        case int() if kind in ("int", "long"):
            return value
        case float() if kind in FLOATS:
            return value
        case Decimal() if get_base_name(kind) == "decimal" and value.is_finite():
            return format(value, "f")
        case str() if kind == "string":
            return value
        case bytes() | bytearray() if get_base_name(kind) in ("binary", "fixed"):
            return bytes(value).hex()
        case datetime() if kind == "timestamp" and value.tzinfo is None:
            return value.isoformat()
        case datetime() if kind == "timestamptz" and value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case datetime():
            raise _FilterNotSupported
        case date() if kind == "date":
            return value.isoformat()
    raise _FilterNotSupported
