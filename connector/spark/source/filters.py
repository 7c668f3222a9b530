"""Filters that Spark pushes down, as expressions that are true for the same rows: exactly, or not at all.

What is taken is applied to every row by the reader, and Spark does not ask again. So a filter that would mean anything
else than Spark means by it is left to Spark: other columns than the table's, values of other types than the column's,
text in place of a uuid, `LIKE` patterns beyond a beginning. NaN is above every number and equal to itself, and zeros
are equal, to Spark and to the reader (`filtering.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from math import isnan

from pyspark.sql import datasource as spark

from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.expressions.binding import OPPOSITE, bind
from seamark.metaserver.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.metaserver.iceberg.expressions.expression import FALSE, Expression, Not, Op, Unbound, all_of, any_of
from seamark.metaserver.iceberg.types.schema import Column, Field, Schema, StructType
from seamark.metaserver.iceberg.types.transforms import IDENTITY
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import FLOATS

_COMPARED: dict[type[spark.Filter], Op] = {
    spark.EqualTo: Op.EQ,
    spark.LessThan: Op.LT,
    spark.LessThanOrEqual: Op.LT_EQ,
    spark.GreaterThan: Op.GT,
    spark.GreaterThanOrEqual: Op.GT_EQ,
}
_NAN = {
    Op.EQ: Op.IS_NAN,
    Op.NOT_EQ: Op.NOT_NAN,
    Op.LT: Op.NOT_NAN,
    Op.GT_EQ: Op.IS_NAN,
    Op.LT_EQ: Op.NOT_NULL,
}
"""What a comparison with NaN says; nothing is above it."""


class _Unfit(Exception):
    pass


def expression_of(given: spark.Filter, schema: Schema) -> Expression | None:
    """Bound to the schema; None for a filter that is left to Spark."""
    try:
        return bind(_read(given, schema, negated=False), schema, (), case_sensitive=True)
    except (_Unfit, BadRequest):
        return None


def _read(given: spark.Filter, schema: Schema, *, negated: bool) -> Expression:
    """What is true where the filter is, or `negated` where it is false: SQL's "not" of null is not true."""
    match given:
        case spark.Not(child):
            return _read(child, schema, negated=not negated)
        case spark.IsNull(path) | spark.IsNotNull(path):
            op = Op.IS_NULL if isinstance(given, spark.IsNull) != negated else Op.NOT_NULL
            return Unbound(op, _column(path, schema).name, IDENTITY, ())
        case spark.EqualNullSafe(path, value):
            return _null_safe(_column(path, schema), value, negated)
        case spark.In(path, values):
            return _among(_column(path, schema), values, negated)
        case spark.StringStartsWith(path, value):
            column = _column(path, schema)
            if column.type != "string" or not isinstance(value, str):
                raise _Unfit
            return _is(column, _op(Op.STARTS_WITH, negated), value)
    if type(given) in _COMPARED:
        column = _column(given.attribute, schema)  # type: ignore[attr-defined]
        return _compared(_op(_COMPARED[type(given)], negated), column, given.value)  # type: ignore[attr-defined]
    raise _Unfit


def _op(op: Op, negated: bool) -> Op:
    return OPPOSITE[op] if negated else op


def _column(path: Sequence[str], schema: Schema) -> Column:
    fields: tuple[Field, ...] = schema.fields
    found: Field | None = None
    for name in path:
        found = next((one for one in fields if one.name == name), None)
        if found is None:
            raise _Unfit
        fields = found.type.fields if isinstance(found.type, StructType) else ()
    column = None if found is None else schema.column(found.id)
    if column is None or schema.column_named(column.name) is not column:
        raise _Unfit
    return column


def _is(column: Column, op: Op, *literals: object) -> Expression:
    """A predicate that does not hold for null."""
    found = Unbound(op, column.name, IDENTITY, literals)
    return all_of(Unbound(Op.NOT_NULL, column.name, IDENTITY, ()), found) if op in NULL_MATCHES else found


def _compared(op: Op, column: Column, value: object) -> Expression:
    literal = _literal(column, value)
    if not _is_nan(literal):
        return _is(column, op, literal)
    return FALSE if op is Op.GT else _is(column, _NAN[op])


def _is_nan(literal: object) -> bool:
    return isinstance(literal, float) and isnan(literal)


def _among(column: Column, values: Sequence[object], negated: bool) -> Expression:
    there = [_literal(column, one) for one in values if one is not None]
    if not there:
        raise _Unfit
    if negated and len(there) < len(values):
        return FALSE  # not in a list with null: null at best
    numbers = [one for one in there if not _is_nan(one)]
    found = [_is(column, _op(Op.IN, negated), *numbers)] if numbers else []
    found += [_is(column, _op(Op.IS_NAN, negated))] if len(numbers) < len(there) else []
    return all_of(*found) if negated else any_of(*found)


def _null_safe(column: Column, value: object, negated: bool) -> Expression:
    if value is None:
        return Unbound(Op.NOT_NULL if negated else Op.IS_NULL, column.name, IDENTITY, ())
    equal = _compared(Op.EQ, column, value)
    return Not(equal) if negated else equal


def _literal(column: Column, value: object) -> object:
    """As JSON has a value of the column's type."""
    kind = column.type if isinstance(column.type, str) else ""
    match value:
        case bool() if kind == "boolean":
            return value
        case bool():
            raise _Unfit
        case int() if kind in ("int", "long"):
            return value
        case float() if kind in FLOATS:
            return value
        case Decimal() if base_name(kind) == "decimal" and value.is_finite():
            return format(value, "f")
        case str() if kind == "string":
            return value
        case bytes() | bytearray() if base_name(kind) in ("binary", "fixed"):
            return bytes(value).hex()
        case datetime() if kind == "timestamp" and value.tzinfo is None:
            return value.isoformat()
        case datetime() if kind == "timestamptz" and value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case datetime():
            raise _Unfit
        case date() if kind == "date":
            return value.isoformat()
    raise _Unfit
