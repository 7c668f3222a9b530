"""Row groups that cannot hold a row that a filter is true for, by the statistics in a Parquet file's footer.

The rule it keeps: doubt keeps the row group. Looked at are columns whose physical values compare as the table's do:
integers, dates and timestamps in the table's unit, floats and strings. Statistics of floats leave NaN out, which is
above every number, so no upper bound of theirs rules anything out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seamark.metaserver.iceberg.expressions.arrow import plain_type
from seamark.metaserver.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.metaserver.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or, predicates_of
from seamark.metaserver.iceberg.files.parquet import InDoubt, places_of
from seamark.metaserver.iceberg.types.transforms import IDENTITY
from seamark.metaserver.iceberg.types.values import FLOATS

_WHOLE = frozenset({"int", "long", "date", "timestamp", "timestamptz"})
_COMPARED = _WHOLE | FLOATS | {"string"}


class RowGroups:
    """Of one file, for one filter, which is bound."""

    def __init__(self, file: pq.FileMetaData, fields: Iterable[pa.Field], expression: Expression) -> None:
        """`fields` are the file's columns, with ids."""
        self._file = file
        self._expression = expression
        self._chunks = _chunks(file, list(fields), predicates_of(expression))

    def may_match(self, number: int) -> bool:
        return self._may(self._expression, self._file.row_group(number))

    def _may(self, expression: Expression, group: pq.RowGroupMetaData) -> bool:
        match expression:
            case And(children):
                return all(self._may(one, group) for one in children)
            case Or(children):
                return any(self._may(one, group) for one in children)
            case Always(value):
                return value
            case Bound() if expression.column_id in self._chunks:
                return _may(expression, group.column(self._chunks[expression.column_id]))
        return True


def _chunks(file: pq.FileMetaData, fields: list[pa.Field], predicates: Iterable[Bound]) -> dict[int, int]:
    """The number of the column chunk of each column that can be looked at, by column id."""
    kinds = {one.column_id: one.kind for one in predicates if one.transform == IDENTITY and one.kind in _COMPARED}
    try:
        places = places_of(fields, kinds)
    except InDoubt:
        return {}
    paths: dict[str, list[int]] = {}
    for number in range(file.num_columns):
        paths.setdefault(file.schema.column(number).path, []).append(number)
    found = {}
    for column_id, place in places.items():
        numbers = paths.get(".".join(place), [])
        if len(numbers) == 1 and _comparable(_type_at(fields, place), kinds[column_id]):
            found[column_id] = numbers[0]
    return found


def _type_at(fields: list[pa.Field], place: tuple[str, ...]) -> pa.DataType:
    kind = next(one.type for one in fields if one.name == place[0])
    for name in place[1:]:
        kind = kind.field(name).type
    return kind


def _comparable(kind: pa.DataType, target: str) -> bool:
    wanted = plain_type(target)
    if target in ("long", "double"):
        return kind in (pa.int32(), pa.int64()) if target == "long" else kind in (pa.float32(), pa.float64())
    if pa.types.is_timestamp(kind):
        return bool(pa.types.is_timestamp(wanted)) and kind.unit == wanted.unit
    return bool(kind.equals(wanted)) or (target == "string" and kind == pa.large_string())


def _may(predicate: Bound, chunk: pq.ColumnChunkMetaData) -> bool:
    found = chunk.statistics
    if found is None:
        return True
    op = predicate.op
    nulls = found.null_count if found.has_null_count else None
    empty = nulls is not None and nulls == chunk.num_values
    if op is Op.IS_NULL:
        return nulls is None or nulls > 0
    if op in NULL_MATCHES:
        return True
    if empty:
        return False
    if not found.has_min_max or op in (Op.NOT_NULL, Op.IS_NAN):
        return True
    return _within(predicate, *_bounds(predicate.kind, found))


def _bounds(kind: str, found: Any) -> tuple[Any, Any]:
    low, high = found.min_raw, found.max_raw
    if kind != "string":
        return low, high
    return tuple(one.encode() if isinstance(one, str) else bytes(one) for one in (low, high))  # type: ignore[return-value]


def _within(predicate: Bound, low: Any, high: Any) -> bool:
    if low != low or high != high:  # NaN, which no writer should have put there
        return True
    values: list[Any] = [one.encode() if isinstance(one, str) else one for one in predicate.values]
    floats = predicate.kind in FLOATS
    match predicate.op:
        case Op.LT:
            return bool(low < values[0])
        case Op.LT_EQ:
            return bool(low <= values[0])
        case Op.GT:
            return floats or bool(high > values[0])
        case Op.GT_EQ:
            return floats or bool(high >= values[0])
        case Op.EQ | Op.IN:
            return any(low <= one <= high for one in values)
        case Op.STARTS_WITH:
            return bool(low[: len(values[0])] <= values[0] <= high[: len(values[0])])
    return True
