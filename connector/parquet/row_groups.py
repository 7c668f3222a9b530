"""Prunes row groups without matching rows by the statistics in the footer of a Parquet file.

A row group is not pruned if its statistics are missing or uncertain. Statistics are used only for columns whose
physical values are ordered like the table's values: integers, dates and timestamps in the table's unit, floats and
strings. Statistics of floats exclude NaN, which is larger than every number, so the upper bound of a float column is
not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or, collect_predicates
from seamark.formats.iceberg.files.parquet import AmbiguousColumn, find_columns
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.values import FLOATS

_INTEGER_TYPES = frozenset({"int", "long", "date", "timestamp", "timestamptz"})
_COMPARED = _INTEGER_TYPES | FLOATS | {"string"}


class RowGroups:
    """Decides which row groups of one file may match one bound filter."""

    def __init__(self, file: pq.FileMetaData, fields: Iterable[pa.Field], expression: Expression) -> None:
        """Prepare the statistics of the filter's columns.

        Args:
            file: The metadata in the footer.
            fields: The columns of the file, with field ids.
            expression: The bound filter.
        """
        self._file = file
        self._expression = expression
        self._chunks = _map_comparable_chunks(file, list(fields), collect_predicates(expression))

    def may_match(self, number: int) -> bool:
        return self._expression_may_match(self._expression, self._file.row_group(number))

    def _expression_may_match(self, expression: Expression, group: pq.RowGroupMetaData) -> bool:
        match expression:
            case And(children):
                return all(self._expression_may_match(child, group) for child in children)
            case Or(children):
                return any(self._expression_may_match(child, group) for child in children)
            case Always(value):
                return value
            case Bound(transform=transform) if transform == IDENTITY and expression.column_id in self._chunks:
                return _can_predicate_match(expression, group.column(self._chunks[expression.column_id]))
        return True


def _map_comparable_chunks(
    file: pq.FileMetaData, fields: list[pa.Field], predicates: Iterable[Bound]
) -> dict[int, int]:
    """Return the indexes of the column chunks whose statistics can be compared, by column id.

    The result is empty if it is unclear which column of the file a predicate compares.
    """
    kinds = {
        predicate.column_id: predicate.kind
        for predicate in predicates
        if predicate.transform == IDENTITY and predicate.kind in _COMPARED
    }
    if not kinds:
        return {}
    try:
        column_paths = find_columns(fields, kinds)
    except AmbiguousColumn:
        return {}
    paths: dict[str, list[int]] = {}
    for number in range(file.num_columns):
        paths.setdefault(file.schema.column(number).path, []).append(number)
    chunks = {}
    for column_id, column_path in column_paths.items():
        numbers = paths.get(".".join(column_path), [])
        if len(numbers) == 1 and _is_comparable(_find_type(fields, column_path), kinds[column_id]):
            chunks[column_id] = numbers[0]
    return chunks


def _find_type(fields: list[pa.Field], column_path: tuple[str, ...]) -> pa.DataType:
    kind = next(field.type for field in fields if field.name == column_path[0])
    for name in column_path[1:]:
        kind = kind.field(name).type
    return kind


def _is_comparable(kind: pa.DataType, target: str) -> bool:
    target_type = to_row_type(target)
    if target in ("long", "double"):
        return kind in (pa.int32(), pa.int64()) if target == "long" else kind in (pa.float32(), pa.float64())
    if pa.types.is_timestamp(kind):
        return bool(pa.types.is_timestamp(target_type)) and kind.unit == target_type.unit
    return bool(kind.equals(target_type)) or (target == "string" and kind == pa.large_string())


def _can_predicate_match(predicate: Bound, chunk: pq.ColumnChunkMetaData) -> bool:
    statistics = chunk.statistics
    if statistics is None:
        return True
    op = predicate.op
    nulls = statistics.null_count if statistics.has_null_count else None
    has_only_nulls = nulls is not None and nulls == chunk.num_values
    if op is Op.IS_NULL:
        return nulls is None or nulls > 0
    if op in NULL_MATCHES:
        return True
    if has_only_nulls:
        return False
    if not statistics.has_min_max or op in (Op.NOT_NULL, Op.IS_NAN):
        return True
    return _can_range_match(predicate, *_read_min_max(predicate.kind, statistics))


def _read_min_max(kind: str, statistics: Any) -> tuple[Any, Any]:
    low, high = statistics.min_raw, statistics.max_raw
    if kind != "string":
        return low, high
    return tuple(bound.encode() if isinstance(bound, str) else bytes(bound) for bound in (low, high))  # type: ignore[return-value]


def _can_range_match(predicate: Bound, low: Any, high: Any) -> bool:
    """Return whether a value between the bounds of a row group can meet the predicate."""
    if low != low or high != high:  # A bound that is NaN is invalid, so it is not used.
        return True
    values: list[Any] = [value.encode() if isinstance(value, str) else value for value in predicate.values]
    # The bounds of a float column exclude NaN, which is larger than every number, so `high` is not used.
    is_float = predicate.kind in FLOATS
    match predicate.op:
        case Op.LT:
            return bool(low < values[0])
        case Op.LT_EQ:
            return bool(low <= values[0])
        case Op.GT:
            return is_float or bool(high > values[0])
        case Op.GT_EQ:
            return is_float or bool(high >= values[0])
        case Op.EQ | Op.IN:
            return any(low <= value <= high for value in values)
        case Op.STARTS_WITH:
            return bool(low[: len(values[0])] <= values[0] <= high[: len(values[0])])
    return True
