"""Conditions on a column that is less or greater than values of another table, or between two of them.

`ts BETWEEN d.start AND d.end` requires that `ts` is in one of the ranges of the rows of `d`. Ranges that overlap or
touch are merged, and many ranges become fewer, wider ranges. Only types whose values are integers in the order of the
values are compared. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, all_of, any_of
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.values import INT_MAX, INT_MIN
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import SIGN, Codes, Mask
from seamark.formats.index.keys.ranks import Distinct
from seamark.formats.index.packing import Form, Longs, value_of

RANGES_MAX = 200
OPERATORS = ("=", "<", "<=", ">", ">=")
_INTEGERS = frozenset({"int", "long", "date", "timestamp", "timestamptz"})
_COMPARABLE = (frozenset({"int", "long"}), frozenset({"date", "timestamp"}))
"""Pairs of types that engines compare by their exact values."""
_DAY_MICROS = 86_400_000_000
_FIRST_DAY, _END_DAY = -719_162, 2_932_897
"""The years 1 to 9999. Engines represent infinity by values beyond these."""
_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1


class LimitedColumn(NamedTuple):
    """The column that is compared, with its full name and type."""

    column_id: int
    name: str
    kind: str


def has_order(kind: str, other: str) -> bool:
    """Return whether a column of type `kind` may be limited by values of type `other`."""
    return kind in _INTEGERS and other in _INTEGERS and (kind == other or {kind, other} in _COMPARABLE)


def limits_of_kind(kind: str) -> tuple[int, int]:
    """Return the least and the greatest value of a type; dates are 32-bit integers."""
    return (INT_MIN, INT_MAX) if kind in ("int", "date") else (_LONG_MIN, _LONG_MAX)


def to_inclusive_limits(values: Longs, op: str, kind: str, other: str) -> tuple[Longs, Mask]:
    """Return the inclusive limits of a column that follow from comparisons with values of the other table.

    Args:
        values: The values of the other table.
        op: An operator other than `=`: `column op value`.
        kind: The type of the column.
        other: The type of the values.

    Returns:
        The limits, and bool[values]: the values with which a comparison may be true. Limits may be beyond the range
        of
        `kind`.

    Raises:
        ValueError: A value has no exact counterpart of type `kind`.
    """
    is_strict, is_lower = op in ("<", ">"), op in (">", ">=")
    if kind == other or {kind, other} == {"int", "long"}:
        limits = values
    else:
        unit = 1 if other == "date" else _DAY_MICROS
        if len(values) and not (_FIRST_DAY * unit <= values.min() and values.max() < _END_DAY * unit):
            raise ValueError("it has times beyond the years 1 to 9999")
        if other == "date":
            limits = values * _DAY_MICROS
        else:
            # `day >= t` requires the next midnight, unless t is midnight. `day > t` requires a day after the day of t.
            days = values // _DAY_MICROS
            is_midnight = values % _DAY_MICROS == 0
            if is_lower:
                return np.where(is_midnight & ~np.bool_(is_strict), days, days + 1), np.ones(
                    len(values), dtype=np.bool_
                )
            return np.where(is_midnight & np.bool_(is_strict), days - 1, days), np.ones(len(values), dtype=np.bool_)
    if not is_strict:
        return limits, np.ones(len(values), dtype=np.bool_)
    possible: Mask = limits < _LONG_MAX if is_lower else limits > _LONG_MIN
    shifted: Longs = np.where(possible, limits, 0) + (1 if is_lower else -1)
    return shifted, possible


def limit_condition(column: LimitedColumn, op: str, value: int, other: str) -> Expression:
    """Return the condition that a column is less or greater than a value of type `other`.

    Raises:
        ValueError: The value has no exact counterpart of the column's type.
    """
    limits, possible = to_inclusive_limits(np.array([value], dtype=np.int64), op, column.kind, other)
    if not possible[0]:
        return FALSE
    low, high = limits_of_kind(column.kind)
    limit = int(limits[0])
    return span_condition(column, limit, high) if op in (">", ">=") else span_condition(column, low, limit)


def span_condition(column: LimitedColumn, start: int, end: int) -> Expression:
    """Return the condition that a column is at least `start` and at most `end`."""
    low, high = limits_of_kind(column.kind)
    if start > high or end < low or start > end:
        return FALSE

    def compare(op: Op, value: int) -> Bound:
        literal = value_of(Form.INTEGERS, column.kind, value)
        return Bound(op, column.column_id, column.name, column.kind, IDENTITY, column.kind, (literal,))

    if start == end:
        return compare(Op.EQ, start)
    return all_of(
        compare(Op.GT_EQ, start) if start > low else TRUE,
        compare(Op.LT_EQ, end) if end < high else TRUE,
    )


def merge_spans(starts: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """Return at most `RANGES_MAX` ascending, disjoint spans that contain all values of these spans.

    Both ends of a span are included. Spans that end before they start are empty. The widest gaps between the spans
    are not in the result.
    """
    is_span = starts <= ends
    starts, ends = starts[is_span], ends[is_span]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    is_apart = (starts[1:] > ends[:-1]) & (starts[1:] - 1 > ends[:-1])
    begins = np.flatnonzero(is_apart) + 1
    if len(begins) >= RANGES_MAX:
        gaps = starts[begins].view(np.uint64) - ends[begins - 1].view(np.uint64)
        widest = np.argsort(gaps, kind="stable")[len(begins) - RANGES_MAX + 1 :]
        begins = np.sort(begins[widest])
    return starts[np.concatenate([[0], begins])], ends[np.concatenate([begins - 1, [len(ends) - 1]])]


def spans_of_rows(
    columns: Sequence[tuple[Codes, Mask, str]], operators: Sequence[str], kind: str
) -> tuple[Longs, Longs]:
    """Return the merged spans in which rows of the other table allow a column of type `kind`.

    Args:
        columns: For each operator, the codes of a column of the other table (`keys.py`), the rows that have a code,
            and the type of the column.
        operators: The operators between the limited column and these columns. All of them must be true for a row.
        kind: The type of the limited column.

    Raises:
        ValueError: A value has no exact counterpart of type `kind`.
    """
    rows = np.logical_and.reduce([present for _, present, _ in columns])
    low, high = limits_of_kind(kind)
    starts, ends = np.full(int(rows.sum()), low, dtype=np.int64), np.full(int(rows.sum()), high, dtype=np.int64)
    possible = np.ones(len(starts), dtype=np.bool_)
    for (codes, _, other), op in zip(columns, operators, strict=True):
        values: Longs = (codes[rows] ^ np.uint64(SIGN)).view(np.int64)
        limits, is_possible = to_inclusive_limits(values, op, kind, other)
        possible &= is_possible
        if op in (">", ">="):
            starts = np.maximum(starts, limits)
        else:
            ends = np.minimum(ends, limits)
    return merge_spans(starts[possible], ends[possible])


def to_key_sets(starts: Longs, ends: Longs, kind: str) -> tuple[KeySet, KeySet]:
    """Return the starts and the ends of merged spans as keys."""
    sign = np.uint64(SIGN)
    return KeySet(kind, Distinct(starts.view(np.uint64) ^ sign)), KeySet(kind, Distinct(ends.view(np.uint64) ^ sign))


def make_range_condition(column: LimitedColumn, starts: KeySet, ends: KeySet) -> Expression:
    """Return the condition that a column is in one of the spans. It is FALSE if there is no span."""
    spans = ((starts.at(position), ends.at(position)) for position in range(len(starts)))
    return any_of(*(span_condition(column, int(start) - SIGN, int(end) - SIGN) for start, end in spans))
