"""Which rows of Arrow columns a bound expression is true for.

The meaning of null is Iceberg's, as everywhere in expressions: comparisons never match it, `not-eq`, `not-in`,
`not-starts-with` and `not-nan` do. SQL's own "not" has a `not-null` beside it by then (`sql.py`). Numbers are compared
as Spark and DuckDB do: 0.0 equals -0.0, NaN is above every number. Uuids are compared as unsigned bytes, which is the
order of their text. Every answer is exact: what cannot be decided is a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.metaserver.iceberg.expressions.arrow import arrow_array
from seamark.metaserver.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.metaserver.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.metaserver.iceberg.types.transforms import IDENTITY, function
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import FLOATS, Value, decimal_scale, unscaled_floor

Mask = npt.NDArray[np.bool_]

_COMPARED: dict[Op, Callable[[pa.Array, pa.Scalar], pa.Array]] = {
    Op.LT: pc.less,
    Op.LT_EQ: pc.less_equal,
    Op.GT: pc.greater,
    Op.GT_EQ: pc.greater_equal,
    Op.EQ: pc.equal,
    Op.NOT_EQ: pc.not_equal,
}
_ABOVE = frozenset({Op.GT, Op.GT_EQ})
_NULLITY = frozenset({Op.IS_NULL, Op.NOT_NULL})
_NOT_PRIMITIVE = frozenset({"struct", "list", "map", "variant"})


def matching(expression: Expression, columns: Mapping[int, pa.Array], rows: int) -> Mask:
    """bool[rows]. `columns` by id, of the Arrow types of their Iceberg types; a column inside a struct is null where
    the struct is. ValueError for a predicate that has no exact answer here."""
    match expression:
        case Always(value):
            return np.full(rows, value)
        case And(children):
            return np.asarray(np.logical_and.reduce([matching(one, columns, rows) for one in children]))
        case Or(children):
            return np.asarray(np.logical_or.reduce([matching(one, columns, rows) for one in children]))
        case Bound():
            return _holds(expression, columns[expression.column_id])
    raise TypeError(f"not a bound expression: {expression}")


def check_filter(expression: Expression) -> None:
    """ValueError, naming it, for a predicate that `matching` cannot answer."""
    match expression:
        case And(children) | Or(children):
            for one in children:
                check_filter(one)
        case Bound(op, _, name, kind) if kind in _NOT_PRIMITIVE and not (kind == "struct" and op in _NULLITY):
            raise ValueError(f"rows cannot be chosen by {op} of {name}, a {kind}, or within one")


def _holds(predicate: Bound, column: pa.Array) -> Mask:
    if predicate.transform != IDENTITY:
        column = _transformed(predicate, column)
    found: pa.Array
    op, values = predicate.op, predicate.values
    if op in _NULLITY:
        found = column.is_null() if op is Op.IS_NULL else column.is_valid()
    elif op in (Op.IS_NAN, Op.NOT_NAN):
        found = pc.is_nan(column) if op is Op.IS_NAN else pc.invert(pc.is_nan(column))
    elif op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH):
        found = pc.starts_with(column, str(values[0]))
        found = found if op is Op.STARTS_WITH else pc.invert(found)
    elif op in _COMPARED:
        found = _COMPARED[op](column, arrow_array(_kind(predicate), values)[0])
        if op in _ABOVE and predicate.result in FLOATS:
            found = pc.or_(found, pc.is_nan(column))
    else:
        found = _among(column, predicate)
    mask: Mask = pc.fill_null(found, op in NULL_MATCHES).to_numpy(zero_copy_only=False)
    return mask


def _among(column: pa.Array, predicate: Bound) -> pa.Array:
    values = arrow_array(_kind(predicate), predicate.values)
    if predicate.result in FLOATS:  # `is_in` takes the two zeros for two values
        zero = pa.scalar(0.0, column.type)
        column, values = pc.add(column, zero), pc.add(values, zero)
    found = pc.if_else(column.is_valid(), pc.is_in(column, values), None)
    return found if predicate.op is Op.IN else pc.invert(found)


def _transformed(predicate: Bound, column: pa.Array) -> pa.Array:
    """Each distinct value once."""
    apply = function(predicate.transform, predicate.kind)
    coded = column.dictionary_encode()
    results = [None if one is None else apply(one) for one in plain_values(coded.dictionary, predicate.kind)]
    return arrow_array(_kind(predicate), results).take(coded.indices)


def _kind(predicate: Bound) -> str:
    """What truncation makes of a decimal may have more digits than its type."""
    kind = predicate.result
    cut = predicate.transform != IDENTITY and base_name(kind) == "decimal"
    return f"decimal(38, {decimal_scale(kind)})" if cut else kind


def plain_values(column: pa.Array, kind: str) -> Iterable[Value | None]:
    """The values of an array of a primitive type's Arrow type, in the form of `expressions.py`."""
    name = base_name(kind)
    if name == "decimal":
        scale = decimal_scale(kind)
        return [None if one is None else unscaled_floor(one, scale)[0] for one in column.to_pylist()]
    if name == "date":
        column = column.cast(pa.int32())
    elif name == "time" or name.startswith("timestamp"):
        column = column.view(pa.int64())
    values: list[Any] = column.to_pylist()
    return values
