"""Map ranges of values through transforms that keep the order of values.

The ranges are mapped forwards, from source columns to partitions, and backwards.

Ranges are half open, with bounds in the form that `expression.py` describes. None means unbounded. Values are integers,
strings or bytes. All of them have a successor, so half-open ranges can also express closed ranges. An integer result
that does not fit its type wraps (`transforms.py`), so values at one end of the source may map to the other end of the
result. Therefore both directions return as many ranges as needed. If an int column is promoted to long, the results
that have wrapped do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from seamark.formats.iceberg.types.transforms import (
    INTEGER_BITS,
    UNITS_PER_DAY,
    compute_result_type,
    find_start_of_month,
    get_transform_name,
    get_transform_width,
    is_known,
    make_monotone_function,
    wrap_to_bits,
)
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision

CALENDAR = frozenset({"year", "month", "day", "hour"})
Prefix = TypeVar("Prefix", str, bytes)

_INT_WIDTH_MAX = 1 << 30
"""The largest width of a truncation whose results are ordered for ints.

For a greater width, Java's 32-bit arithmetic overflows in the remainder. A long column may have been an int when files
were written.
"""


_TRUNCATION_WIDTH_MAX = 1 << 31


class Range(NamedTuple):
    """The values with `low <= value < high`."""

    low: Any
    high: Any


def keeps_order(transform: str, kind: str) -> bool:
    """Return whether a transform changes values and keeps their order, except for results that overflow.

    A wide truncation of integers is excluded, because too many of its results overflow. For identity, the result is
    False: callers use predicates on plain values without mapping ranges. The transform is canonical and accepts the
    type.
    """
    name = get_transform_name(transform)
    if name == "truncate" and is_known(transform):
        return kind not in ("int", "long") or get_transform_width(transform) <= _INT_WIDTH_MAX
    return name in CALENDAR


def may_be_stored_one_too_high(transform: str, kind: str) -> bool:
    """Return whether Java up to 0.10 stored results of the transform before 1970 that are too high by one.

    The transform must be canonical.
    """
    return transform in CALENDAR and (transform, kind) != ("day", "date")


def get_successor(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    return value + "\0" if isinstance(value, str) else value + b"\0"


def transform_range(transform: str, kind: str, source: Range) -> list[Range]:
    """Return ranges that contain the results of all source values in a range, and few other values.

    Integer results may overflow when they are stored. So the range of exact results is also moved by 2^32 or 2^64, and
    the parts within the type are returned. If old files can have an overflowed result as another
    value (`find_overflowed_truncation`), a range with this value is added last.
    """
    compute_exact = make_monotone_function(transform, kind)
    if get_base_name(kind) in ("string", "binary"):
        low, high = source
        if high is not None and compute_exact(high) != high:
            # A value just below `high` may have the same prefix.
            high = get_successor(compute_exact(high))
        return [Range(low if low is None else compute_exact(low), high)]
    first, end = _find_limits(kind)
    low, high = _clip_range(source, first, end)
    if low >= high:
        return []
    lowest, highest = compute_exact(low), compute_exact(high - 1)
    result_type = compute_result_type(transform, kind)
    result_first, result_end = _find_limits(result_type)
    results = []
    for shift in _find_shifts(result_type):
        piece = _clip_range(Range(lowest + shift, highest + 1 + shift), result_first, result_end)
        if piece.low >= piece.high:
            continue
        # No value is beyond the limits of the source type, so a bound at a limit can be omitted.
        is_low_unbounded = piece.low == result_first or (low == first and shift == 0)
        is_high_unbounded = piece.high == result_end or (high == end and shift == 0)
        results.append(Range(None if is_low_unbounded else piece.low, None if is_high_unbounded else piece.high))
    overflowed = find_overflowed_truncation(transform, kind)
    if overflowed is None or low >= overflowed.end or high <= _find_limits("int").low:
        return results
    return (
        results
        if contains_value(results, overflowed.wrapped)
        else [*results, Range(overflowed.wrapped, overflowed.wrapped + 1)]
    )


class OverflowedTruncation(NamedTuple):
    """The result of truncating the lowest ints, which overflowed in the partition values of some files.

    For example, `truncate[10]` of the lowest int, -2147483648, is -2147483650, which is no int. Files that were written
    when the column was an int have the wrapped value 2147483646 instead.

    Attributes:
        exact: The exact result.
        wrapped: The value after the overflow, which old files contain.
        end: Ints below this value may have other results than the equal longs. From this value on, they are equal.
    """

    exact: int
    wrapped: int
    end: int


def find_overflowed_truncation(transform: str, kind: str) -> OverflowedTruncation | None:
    """Return the result of a truncated long that may be stored as another value, because the column was an int.

    The result is None if no result of an int wraps.
    """
    if kind != "long" or get_transform_name(transform) != "truncate":
        return None
    lowest_int = _find_limits("int").low
    width = get_transform_width(transform)
    exact = lowest_int - lowest_int % width
    # Only the ints of the lowest truncated group overflow. If the width is too large to keep the order, the result of
    # any int may differ from the result of the long with the same value.
    end = exact + width if keeps_order(transform, kind) else _find_limits("int").high
    return OverflowedTruncation(exact, wrap_to_bits(exact, INTEGER_BITS["int"]), end) if exact < lowest_int else None


def contains_value(ranges: Iterable[Range], value: int) -> bool:
    return any((low is None or low <= value) and (high is None or value < high) for low, high in ranges)


def invert_ranges(transform: str, kind: str, results: Iterable[Range]) -> list[Range]:
    """Return the source values whose results are in one of the ranges, as disjoint ranges in ascending order.

    Integer results may overflow when they are stored, so each range is also moved by 2^32 or 2^64. A limit of the type
    becomes None, because no value is beyond it.
    """
    if get_base_name(kind) in ("string", "binary"):
        return _merge_ranges(list(_invert_prefix_ranges(get_transform_width(transform), results)))
    find_first_source = _make_inverse(transform, kind)
    first, end = _find_limits(kind)
    result_type = compute_result_type(transform, kind)
    result_first, result_end = _find_limits(result_type)
    sources = []
    for result in results:
        low, high = _clip_range(result, result_first, result_end)
        if low < high:
            sources += [
                _clip_range(Range(find_first_source(low + shift), find_first_source(high + shift)), first, end)
                for shift in _find_shifts(result_type)
            ]
    return [
        Range(None if low == first else low, None if high == end else high)
        for low, high in _merge_ranges([source for source in sources if source.low < source.high])
    ]


def _invert_prefix_ranges(width: int, results: Iterable[Range]) -> Iterator[Range]:
    """Yield the strings or bytes whose first `width` characters or bytes are in one of the ranges."""
    for span in results:
        low, high = (
            bound if bound is None or len(bound) <= width else find_end_of_prefix(bound[:width]) for bound in span
        )
        # A longer bound is greater than its prefix, so it becomes the lowest value without this prefix.
        if low is None and span.low is not None:
            continue  # No string is greater than the prefix.
        if low is None or high is None or low < high:
            yield Range(low, high)


def compute_complement(ranges: list[Range]) -> list[Range]:
    """Return the values outside some disjoint, ordered ranges."""
    gaps, low = [], None
    for index, span in enumerate(ranges):
        if index > 0 or span.low is not None:
            gaps.append(Range(low, span.low))
        low = span.high
    if not ranges or low is not None:
        gaps.append(Range(low, None))
    return gaps


def _find_limits(kind: str) -> Range:
    """Return the range of all values of an integer type.

    For a decimal, the range also contains the result of the widest truncation of the minimum.
    """
    if bits := INTEGER_BITS.get(kind):
        return Range(-(1 << bits - 1), 1 << bits - 1)
    limit = 10 ** get_decimal_precision(kind) + _TRUNCATION_WIDTH_MAX
    return Range(-limit, limit)


def _clip_range(span: Range, first: int, end: int) -> Range:
    low = first if span.low is None else max(span.low, first)
    return Range(low, end if span.high is None else min(span.high, end))


def _find_shifts(result: str) -> tuple[int, ...]:
    """Return the possible differences between a stored result and the exact result.

    Integer results may wrap around. For other types, the only difference is 0.
    """
    bits = INTEGER_BITS.get(result)
    return (0,) if bits is None else (0, 1 << bits, -(1 << bits))


def _make_inverse(transform: str, kind: str) -> Callable[[int], int]:
    """Return a function that maps an exact result to the lowest source value whose result is not lower."""
    name = get_transform_name(transform)
    if name == "truncate":
        width = get_transform_width(transform)
        return lambda result: -(-result // width) * width
    day_units = UNITS_PER_DAY[kind]
    if name == "hour":
        return lambda result: result * (day_units // 24)
    if name == "day":
        return lambda result: result * day_units
    months = 1 if name == "month" else 12
    return lambda result: find_start_of_month(result * months) * day_units


def find_end_of_prefix(prefix: Prefix) -> Prefix | None:
    """Return the lowest value that is greater than all values with a prefix, or None if there is none."""
    if isinstance(prefix, bytes):
        stem = prefix.rstrip(b"\xff")  # The last byte has no successor.
        return stem[:-1] + bytes([stem[-1] + 1]) if stem else None
    stem = prefix.rstrip("\U0010ffff")  # The last code point has no successor.
    if not stem:
        return None
    # The code points between these limits are surrogates, which are not characters.
    return stem[:-1] + ("\ue000" if stem[-1] == "\ud7ff" else chr(ord(stem[-1]) + 1))


def _merge_ranges(ranges: list[Range]) -> list[Range]:
    """Return the ranges in ascending order. Adjacent and overlapping ranges are merged.

    Ranges without a lower limit are first. A range without an upper limit contains all later ranges.
    """
    ranges_without_low = [span for span in ranges if span.low is None]
    merged_ranges: list[Range] = []
    for span in ranges_without_low + sorted(
        (span for span in ranges if span.low is not None), key=lambda span: span.low
    ):
        if not merged_ranges:
            merged_ranges.append(span)
        elif (high := merged_ranges[-1].high) is None:
            break
        elif span.low is None or span.low <= high:
            merged_ranges[-1] = Range(merged_ranges[-1].low, None if span.high is None else max(high, span.high))
        else:
            merged_ranges.append(span)
    return merged_ranges
