"""Evaluate bound expressions on Arrow columns.

Null has the semantics of Iceberg expressions: comparisons do not match null, but `not-eq`, `not-in`, `not-starts-with`
and `not-nan` do. For SQL's NOT, the parser adds `not-null` (`sql.py`). Numbers are compared as in Spark and DuckDB: 0.0
equals -0.0, and NaN is larger than every number. UUIDs are compared as unsigned bytes, which is also the order of their
text. Results are exact. If a predicate cannot be evaluated exactly, ValueError is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.expressions.arrow import build_arrow_array
from seamark.formats.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.types.transforms import IDENTITY, make_function
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS, Value, floor_unscaled, get_decimal_scale

Mask = npt.NDArray[np.bool_]
_TransformKey = tuple[int, str, str, str]
"""The id of a column, its type, a transform, and the type of the transform's results."""

_COMPARED: dict[Op, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    Op.LT: pc.less,
    Op.LT_EQ: pc.less_equal,
    Op.GT: pc.greater,
    Op.GT_EQ: pc.greater_equal,
    Op.EQ: pc.equal,
    Op.NOT_EQ: pc.not_equal,
}
_NAN_MATCHING_OPS = frozenset({Op.GT, Op.GT_EQ})
"""The operators that NaN satisfies, because it is larger than every number."""
_NULL_OPS = frozenset({Op.IS_NULL, Op.NOT_NULL})
_NESTED_KINDS = frozenset({"struct", "list", "map", "variant"})


def evaluate_filter(expression: Expression, columns: Mapping[int, pa.Array], rows: int) -> Mask:
    """Return the rows for which the expression is true, as bool[rows].

    Args:
        expression: The expression.
        columns: The columns by id, with the types of `to_row_type`. A column inside a struct is null where the struct
            is null.
        rows: The number of rows.

    Raises:
        ValueError: A predicate cannot be evaluated exactly.
    """
    return _evaluate(expression, columns, rows, {})


def _evaluate(
    expression: Expression, columns: Mapping[int, pa.Array], rows: int, transform_results: dict[_TransformKey, pa.Array]
) -> Mask:
    """Return the rows for which the expression is true, as bool[rows].

    Args:
        expression: The expression.
        columns: The columns by id.
        rows: The number of rows.
        transform_results: The transformed columns of earlier predicates. This function adds its own.
    """
    match expression:
        case Always(value):
            return np.full(rows, value)
        case And(children):
            mask = np.full(rows, True)
            for child in children:
                mask &= _evaluate(child, columns, rows, transform_results)
            return mask
        case Or(children):
            mask = np.full(rows, False)
            for child in children:
                mask |= _evaluate(child, columns, rows, transform_results)
            return mask
        case Bound(_, column_id, _, kind, transform, result):
            column = columns[column_id]
            if transform != IDENTITY:
                key = (column_id, kind, transform, result)
                if key not in transform_results:
                    transform_results[key] = _transform_distinct(expression, column)
                column = transform_results[key]
            return _find_matches(expression, column)
    raise TypeError(f"expected a bound expression, not {expression}")


def check_filter(expression: Expression) -> None:
    """Check that `evaluate_filter` can evaluate the expression.

    Raises:
        ValueError: A predicate cannot be evaluated. The message contains the name of the column.
    """
    match expression:
        case And(children) | Or(children):
            for child in children:
                check_filter(child)
        case Bound(op, _, name, kind) if kind in _NESTED_KINDS and op not in _NULL_OPS:
            raise ValueError(f"cannot select rows by {op} of {name}, because the column is a {kind} or is inside one")


def _find_matches(predicate: Bound, column: pa.Array) -> Mask:
    """Return which values match the predicate, as bool[rows].

    NaN is greater than all numbers here, so `>` and `>=` also match NaN.

    Args:
        predicate: The predicate.
        column: The values, to which the predicate's transform has been applied.
    """
    matches: pa.Array
    op, values = predicate.op, predicate.values
    if op in _NULL_OPS:
        matches = column.is_null() if op is Op.IS_NULL else column.is_valid()
    elif op in (Op.IS_NAN, Op.NOT_NAN):
        matches = pc.is_nan(column) if op is Op.IS_NAN else pc.invert(pc.is_nan(column))
    elif op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH):
        matches = pc.starts_with(column, str(values[0]))
        matches = matches if op is Op.STARTS_WITH else pc.invert(matches)
    elif op in _COMPARED:
        matches = _COMPARED[op](column, build_arrow_array(_get_result_type(predicate), values)[0])
        if op in _NAN_MATCHING_OPS and predicate.result in FLOATS:
            matches = pc.or_(matches, pc.is_nan(column))
    else:
        matches = _find_members(column, predicate)
    mask: Mask = pc.fill_null(matches, op in NULL_MATCHES).to_numpy(zero_copy_only=False)
    return mask


def _find_members(column: pa.Array, predicate: Bound) -> pa.Array:
    """Return which values of a column satisfy `in` or `not-in`. The result is null for null."""
    values = build_arrow_array(_get_result_type(predicate), predicate.values)
    if predicate.result in FLOATS:  # `is_in` distinguishes -0.0 from 0.0. Adding 0.0 makes them equal.
        zero = pa.scalar(0.0, column.type)
        column, values = pc.add(column, zero), pc.add(values, zero)
    is_member = pc.if_else(column.is_valid(), pc.is_in(column, values), None)
    return is_member if predicate.op is Op.IN else pc.invert(is_member)


def _transform_distinct(predicate: Bound, column: pa.Array) -> pa.Array:
    """Apply the predicate's transform to a column, once for each distinct value."""
    apply = make_function(predicate.transform, predicate.kind)
    dictionary_array = column.dictionary_encode()
    results = [
        None if value is None else apply(value) for value in to_literals(dictionary_array.dictionary, predicate.kind)
    ]
    return build_arrow_array(_get_result_type(predicate), results).take(dictionary_array.indices)


def _get_result_type(predicate: Bound) -> str:
    """Return the type of the predicate's transformed values.

    For a truncated decimal, this is a decimal of 38 digits, because truncation can add digits.
    """
    kind = predicate.result
    is_truncated_decimal = predicate.transform != IDENTITY and get_base_name(kind) == "decimal"
    return f"decimal(38, {get_decimal_scale(kind)})" if is_truncated_decimal else kind


def to_literals(column: pa.Array, kind: str) -> Iterable[Value | None]:
    """Return the values of an array as Python literals of expressions.

    Args:
        column: The array.
        kind: The primitive Iceberg type of the values.
    """
    name = get_base_name(kind)
    if name == "decimal":
        scale = get_decimal_scale(kind)
        return [None if value is None else floor_unscaled(value, scale)[0] for value in column.to_pylist()]
    if name == "date":
        column = column.cast(pa.int32())
    elif name == "time" or name.startswith("timestamp"):
        column = column.view(pa.int64())
    values: list[Any] = column.to_pylist()
    return values
