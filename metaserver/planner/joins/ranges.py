"""Conditions on a column that is less or greater than values of another table, or between two of them.

`ts BETWEEN d.start AND d.end` requires that `ts` is in one of the ranges of the rows of `d`. Ranges that overlap or
touch are merged. If there are too many ranges, neighbouring ranges are joined.

The limits of a range are 64-bit integers in the order of the values:

- Integers, dates, times and decimals of up to 18 digits: the values themselves.
- Floats: the positions of their codes (`keys.py`). The greatest integer is NaN, which Spark and DuckDB order above all
  numbers. In Trino, no comparison with NaN is true, so Trino needs no further rows.
- Texts and longer decimals: twice the rank of the value among all values of the other table. An odd number is a
  position between two values.

The functions are pure.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Expression, Op, join_by_and, join_by_or
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS, INT_MAX, INT_MIN, Value, get_decimal_scale
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import CODE_MAX, SIGN, WIDE_DECIMAL_BYTES, Codes, Mask, has_codes, make_key
from seamark.formats.index.keys.ranks import CLIPPED_BYTES, Distinct, Ranks
from seamark.formats.index.kinds.dictionary import BYTES
from seamark.formats.index.kinds.postings import rank_parts
from seamark.formats.index.packing import Form, Longs, decode_value

RANGES_MAX = 200
"""The maximum number of spans in a condition."""
OPERATORS = ("=", "<", "<=", ">", ">=")
_INTEGERS = frozenset({"int", "long", "date", "timestamp", "timestamptz"})
_COMPARABLE = (frozenset({"int", "long"}), frozenset({"date", "timestamp"}))
"""Sets of types that engines compare with each other by their exact values."""
_DAY_US = 86_400_000_000
_DISTANCE_BYTES = 8
"""The number of bytes of texts from which distances are computed."""
_FIRST_DAY, _END_DAY = -719_162, 2_932_897
"""The first day of the year 1, and the day after the year 9999. Engines represent infinity by earlier or later days."""
_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1
_NAN = _LONG_MAX
_NEGATIVE_ZERO, _ZERO = -1, 0
"""The positions of the two zeros, which all engines compare as equal."""
_LOWEST, _HIGHEST = b"", b"\xff" * WIDE_DECIMAL_BYTES
"""The limits of a range of texts or long decimals that has no start or no end."""
_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<Q")
Distance: TypeAlias = Callable[[Longs, Longs], Codes]
"""A function of starts and ends that returns the distance of each start from an end, uint64[n]."""


class PlannedColumn(NamedTuple):
    """The compared column of the planned table, with its full name and type."""

    column_id: int
    name: str
    kind: str


def can_limit_by_extreme(column_kind: str, value_kind: str) -> bool:
    """Return whether the minimum or maximum of values of one type can limit a column of another type."""
    return (
        column_kind in _INTEGERS
        and value_kind in _INTEGERS
        and (column_kind == value_kind or {column_kind, value_kind} in _COMPARABLE)
    )


def can_limit_by_range(kind: str, other: str) -> bool:
    """Return whether ranges of values of type `other` can limit a column of type `kind`.

    Decimals must have the same scale, and both must have keys of the same form (integers or bytes).
    """
    names = {get_base_name(kind), get_base_name(other)}
    if names == {"decimal"}:
        return get_decimal_scale(kind) == get_decimal_scale(other) and has_codes(kind) == has_codes(other)
    return can_limit_by_extreme(kind, other) or names <= FLOATS or names == {"string"}


def get_kind_limits(kind: str) -> tuple[int, int]:
    """Return the least and the greatest value of a type. Dates are 32-bit integers."""
    return (INT_MIN, INT_MAX) if kind in ("int", "date") else (_LONG_MIN, _LONG_MAX)


def to_inclusive_limits(values: Longs, op: str, kind: str, value_kind: str) -> tuple[Longs, Mask]:
    """Return the inclusive limits of a column that follow from comparisons with values of the other table.

    Args:
        values: int64[values]: the values. For floats, integers that have the order of the floats.
        op: An operator other than `=`: `column op value`.
        kind: The type of the column.
        value_kind: The type of the values.

    Returns:
        The limits, and bool[values], whether the comparison with each value may be true. Limits may be beyond the
        range of `kind`.

    Raises:
        ValueError: A value has no exact counterpart of type `kind`.
    """
    is_strict, is_lower = op in ("<", ">"), op in (">", ">=")
    if {kind, value_kind} != {"date", "timestamp"}:
        limits = values
        if kind in FLOATS and not is_strict:
            # 0.0 and -0.0 are equal, but different integers. A limit at either zero must include both.
            zeros = (_ZERO, _NEGATIVE_ZERO) if is_lower else (_NEGATIVE_ZERO, _ZERO)
            limits = np.where(values == zeros[0], zeros[1], values)
    else:
        unit = 1 if value_kind == "date" else _DAY_US
        if len(values) and not (_FIRST_DAY * unit <= values.min() and values.max() < _END_DAY * unit):
            raise ValueError("the other table has a time that is not in the years 1 to 9999")
        if value_kind == "date":
            limits = values * _DAY_US
        else:
            # `day >= t` requires the next midnight, unless t is midnight. `day > t` requires a day after the day of t.
            days = values // _DAY_US
            is_midnight = values % _DAY_US == 0
            if is_lower:
                return np.where(is_midnight & ~np.bool_(is_strict), days, days + 1), np.ones(
                    len(values), dtype=np.bool_
                )
            return np.where(is_midnight & np.bool_(is_strict), days - 1, days), np.ones(len(values), dtype=np.bool_)
    if not is_strict:
        return limits, np.ones(len(values), dtype=np.bool_)
    is_possible: Mask = limits < _LONG_MAX if is_lower else limits > _LONG_MIN
    shifted_limits: Longs = np.where(is_possible, limits, 0) + (1 if is_lower else -1)
    return shifted_limits, is_possible


def make_limit_condition(column: PlannedColumn, op: str, value: int, value_kind: str) -> Expression:
    """Return the condition `column op value` for a value of the type `value_kind`.

    Args:
        column: The column.
        op: The operator: `<`, `<=`, `>` or `>=`.
        value: The value. For a float, an integer that has the order of the floats.
        value_kind: The type of the value.

    Raises:
        ValueError: The value has no exact counterpart of the column's type.
    """
    limits, is_possible = to_inclusive_limits(np.array([value], dtype=np.int64), op, column.kind, value_kind)
    if not is_possible[0]:
        return FALSE
    low, high = get_kind_limits(column.kind)
    limit = int(limits[0])
    return make_span_condition(column, limit, high) if op in (">", ">=") else make_span_condition(column, low, limit)


def make_span_condition(column: PlannedColumn, start: int, end: int) -> Expression:
    """Return the condition that a column is at least `start` and at most `end`."""
    if column.kind in FLOATS:
        return _make_float_span_condition(column, start, end)
    low, high = get_kind_limits(column.kind)
    if start > high or end < low or start > end:
        return FALSE

    def decode(limit: int) -> Value:
        return decode_value(Form.INTEGERS, column.kind, limit)

    return _make_between(column, decode(start) if start > low else None, decode(end) if end < high else None)


def _make_between(column: PlannedColumn, low: Value | None, high: Value | None) -> Expression:
    """Return the condition that a column is between two values. None means that there is no limit."""
    if low is not None and low == high:
        return _make_comparison(column, Op.EQ, low)
    return join_by_and(
        TRUE if low is None else _make_comparison(column, Op.GT_EQ, low),
        TRUE if high is None else _make_comparison(column, Op.LT_EQ, high),
    )


def _make_comparison(column: PlannedColumn, op: Op, *values: Value) -> Bound:
    return Bound(op, column.column_id, column.name, column.kind, IDENTITY, column.kind, values)


def _make_float_span_condition(column: PlannedColumn, start: int, end: int) -> Expression:
    """Return the condition that a column's value is in a span. A span up to NaN includes NaN.

    Args:
        column: The column.
        start: The position of the first value among all doubles in ascending order, where NaN is last.
        end: The position of the last value.
    """
    lowest, highest = _get_position(-np.inf), _get_position(np.inf)
    is_nan = _make_comparison(column, Op.IS_NAN) if end == _NAN else FALSE
    if start > min(end, highest) or end < lowest:
        return is_nan if start <= end else FALSE
    low = _decode_float(start) if start > lowest else None
    high = _decode_float(end) if end < highest else None
    return join_by_or(_make_between(column, low, high), is_nan)


def _get_position(value: float) -> int:
    code = make_key(value, "double")
    assert isinstance(code, int)
    return code - SIGN


def _decode_float(position: int) -> float:
    """Return the double at a position in the order of all doubles.

    The code of a double is its bits, changed so that codes have the order of the numbers. A position is a code as a
    signed integer. This function reverses both steps.
    """
    code = position + SIGN
    (value,) = _DOUBLE.unpack(_WORD.pack(code ^ SIGN if code >= SIGN else code ^ CODE_MAX))
    assert isinstance(value, float)
    return value


def _measure_integers(starts: Longs, ends: Longs) -> Codes:
    distance: Codes = starts.view(np.uint64) - ends.view(np.uint64)
    return distance


def merge_spans(starts: Longs, ends: Longs, distance: Distance = _measure_integers) -> tuple[Longs, Longs]:
    """Return at most `RANGES_MAX` ascending, disjoint spans that contain all values of the given spans.

    A span includes both of its ends. Spans that end before they start are empty. The result excludes the widest gaps
    between the spans.
    """
    is_span = starts <= ends
    starts, ends = starts[is_span], ends[is_span]
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # Spans are apart if a value is between them. The first comparison avoids an overflow of the subtraction.
    is_apart = (starts[1:] > ends[:-1]) & (starts[1:] - 1 > ends[:-1])
    begins = np.flatnonzero(is_apart) + 1
    if len(begins) >= RANGES_MAX:
        # Keep the widest gaps. Between `RANGES_MAX` spans, there are `RANGES_MAX - 1` gaps.
        widest_gaps = np.argsort(distance(starts[begins], ends[begins - 1]), kind="stable")[1 - RANGES_MAX :]
        begins = np.sort(begins[widest_gaps])
    return starts[np.concatenate([[0], begins])], ends[np.concatenate([begins - 1, [len(ends) - 1]])]


def compute_spans(
    columns: Sequence[tuple[Codes, Mask, str]], operators: Sequence[str], kind: str
) -> tuple[Longs, Longs]:
    """Return the ranges of values for which a row of the other table satisfies all operators.

    Ranges that overlap or touch are merged.

    Args:
        columns: For each operator, a column of the other table as a tuple (codes, is_present, kind). The codes are
            unsigned integers in the order of the values. `is_present`, bool[rows], marks the rows that have a code.
            `kind` is the type of the column.
        operators: The operators between the column of the planned table and `columns`. All of them must be true.
        kind: The type of the column of the planned table.

    Raises:
        ValueError: A value has no exact counterpart of type `kind`.
    """
    rows = np.logical_and.reduce([is_present for _, is_present, _ in columns])
    low, high = get_kind_limits(kind)
    starts, ends = np.full(int(rows.sum()), low, dtype=np.int64), np.full(int(rows.sum()), high, dtype=np.int64)
    is_row_possible = np.ones(len(starts), dtype=np.bool_)
    for (codes, _, value_kind), op in zip(columns, operators, strict=True):
        values: Longs = (codes[rows] ^ np.uint64(SIGN)).view(np.int64)
        limits, is_possible = to_inclusive_limits(values, op, kind, value_kind)
        is_row_possible &= is_possible
        if op in (">", ">="):
            starts = np.maximum(starts, limits)
        else:
            ends = np.minimum(ends, limits)
    return merge_spans(starts[is_row_possible], ends[is_row_possible])


class RankedColumn(NamedTuple):
    """A column of texts or long decimals in one file: its distinct keys, and the rank of each row's key.

    `present`, bool[rows], says which rows have a key.
    """

    distinct: Distinct
    ranks: Ranks
    present: Mask


def find_ranked_spans(
    files: Sequence[Sequence[RankedColumn]], operators: Sequence[str], kind: str
) -> tuple[KeySet, KeySet]:
    """Return the ranges of texts or long decimals for which a row of the other table satisfies all operators.

    For example, the row ('a', 'c') of the other table gives the range from 'a' to 'c' for `>=` and `<=`. Ranges that
    overlap or touch are merged.

    Args:
        files: For each file of the other table, the columns that the operators compare. `present` marks the rows that
            match the filter and have a value.
        operators: The operators between the column of the planned table and these columns. All of them must be true.
        kind: The type of the column of the planned table.

    Raises:
        ValueError: A value is too long to be compared.
    """
    parts = [column.distinct for columns in files for column in columns]
    if any(part.clipped for part in parts):
        raise ValueError(f"values of {CLIPPED_BYTES} bytes and more cannot be compared")
    values, ranks = rank_parts(parts, BYTES)
    ranks_of_part = iter(
        np.split(ranks.astype(np.int64), np.cumsum([len(part) for part in parts], dtype=np.int64)[:-1])
    )
    starts, ends = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for columns in files:
        rows = np.logical_and.reduce([column.present for column in columns])
        # The value with the rank r has the position 2 r. Odd positions are between two values, as in `> value`.
        start = np.full(int(rows.sum()), -1, dtype=np.int64)
        end = np.full(len(start), 2 * len(values), dtype=np.int64)
        for column, op in zip(columns, operators, strict=True):
            positions = 2 * next(ranks_of_part)[column.ranks[rows]]
            if op in (">", ">="):
                start = np.maximum(start, positions + (op == ">"))
            else:
                end = np.minimum(end, positions - (op == "<"))
        starts.append(start)
        ends.append(end)
    span_starts, span_ends = merge_spans(
        np.concatenate(starts), np.concatenate(ends), partial(_measure_distances, values)
    )
    # The key of an odd start is the next lower value, and the key of an odd end is the next higher value.
    start_ranks, end_ranks = span_starts >> 1, (span_ends + 1) >> 1
    return _select_keys_at_ranks(values, start_ranks, kind), _select_keys_at_ranks(values, end_ranks, kind)


def _measure_distances(values: Distinct, starts: Longs, ends: Longs) -> Codes:
    """Compute the distance of each start from an end, as a difference of the bytes after the common prefix.

    Args:
        values: The sorted values, all with the same prefix.
        starts: Positions of starts: twice the rank of a value, or one more for the gap after it.
        ends: Positions of ends.
    """
    assert values.starts is not None
    assert values.heap is not None
    begins, stops = values.starts[:-1], values.starts[1:]
    # The values are sorted, so the common prefix of the first and the last value is common to all values.
    first, last = values.heap[begins[0] : stops[0]], values.heap[begins[-1] : stops[-1]]
    count = min(len(first), len(last))
    differing_positions = np.flatnonzero(first[:count] != last[:count])
    prefix_bytes = int(differing_positions[0]) if len(differing_positions) else count
    numbers = np.zeros(len(values), dtype=np.uint64)
    for position in range(prefix_bytes, prefix_bytes + _DISTANCE_BYTES):
        has_byte = begins + position < stops
        byte = np.zeros(len(values), dtype=np.uint64)
        byte[has_byte] = values.heap[begins[has_byte] + position]
        numbers = (numbers << np.uint64(8)) | byte
    # Half of a position is the rank of a value. For a gap, a start uses the value before it, an end the value after it.
    distance: Codes = numbers[starts >> 1] - numbers[(ends + 1) >> 1]
    return distance


def _select_keys_at_ranks(values: Distinct, ranks: Longs, kind: str) -> KeySet:
    """Return the keys at ascending ranks, as the starts or the ends of ranges.

    The rank -1 gives a key below all values, for a range without a start. A rank equal to the number of values gives a
    key above all values, for a range without an end.
    """
    all_keys = KeySet(kind, values)
    keys = [
        _LOWEST if rank < 0 else _HIGHEST if rank == len(values) else bytes(all_keys.get_key(rank))
        for rank in ranks.tolist()
    ]
    starts = np.concatenate([[0], np.cumsum([len(key) for key in keys])]).astype(np.int64)
    return KeySet(kind, Distinct(None, starts, np.frombuffer(b"".join(keys), dtype=np.uint8)))


def convert_spans_to_key_sets(starts: Longs, ends: Longs, kind: str) -> tuple[KeySet, KeySet]:
    """Return the starts and the ends of merged spans as keys.

    A key is the number as an unsigned integer with the same order, so its first bit is inverted.
    """
    sign = np.uint64(SIGN)
    return KeySet(kind, Distinct(starts.view(np.uint64) ^ sign)), KeySet(kind, Distinct(ends.view(np.uint64) ^ sign))


def make_range_condition(column: PlannedColumn, starts: KeySet, ends: KeySet) -> Expression:
    """Return the condition that a column is in one of the spans, or FALSE if there is no span.

    Raises:
        ValueError: A limit is not a valid text.
    """
    spans = ((starts.get_key(position), ends.get_key(position)) for position in range(len(starts)))
    return join_by_or(*(_make_key_span_condition(column, start, end) for start, end in spans))


def _make_key_span_condition(column: PlannedColumn, start: int | bytes, end: int | bytes) -> Expression:
    """Return the condition that a column is between two keys. `_LOWEST` and `_HIGHEST` mean that there is no limit."""
    if isinstance(start, int) and isinstance(end, int):  # The key of an integer is the integer plus SIGN.
        return make_span_condition(column, start - SIGN, end - SIGN)
    assert isinstance(start, bytes)
    assert isinstance(end, bytes)

    def decode(key: bytes) -> Value:
        return key.decode() if column.kind == "string" else decode_value(Form.STRINGS, column.kind, key)

    return _make_between(column, decode(start) if start != _LOWEST else None, decode(end) if end != _HIGHEST else None)
