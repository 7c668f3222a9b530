"""What order-preserving transforms do to ranges of values: forwards onto partitions, backwards onto source columns.

Ranges are half open and their bounds are values as in `expressions.py`; None is no bound. Values are integers,
strings or bytes, and each of these has a next one, so a half-open range can say everything that a closed one can.
An integer result that does not fit its type wraps (`transforms.py`), so the values at one end of the source may lie
at the other end of the result: forwards and backwards both give as many ranges as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from metaserver.iceberg.types.transforms import (
    INTEGER_BITS,
    UNITS_PER_DAY,
    first_day,
    is_known,
    monotone,
    name_of,
    result_type,
    width_of,
)
from metaserver.iceberg.types.types import base_name

CALENDAR = frozenset({"year", "month", "day", "hour"})
Prefix = TypeVar("Prefix", str, bytes)

_INT_WIDTH_MAX = 1 << 30
"""Above it Java's 32-bit arithmetic overflows inside the remainder: its results are in no order, and its alone."""


class Range(NamedTuple):
    """`low <= value < high`."""

    low: Any
    high: Any


def is_ordered(transform: str, kind: str) -> bool:
    """Whether the (canonical, accepted) transform keeps the order of values, but for those that wrap; not identity."""
    name = name_of(transform)
    if name == "truncate" and is_known(transform):
        return kind != "int" or width_of(transform) <= _INT_WIDTH_MAX
    return name in CALENDAR


def is_rounded(transform: str, kind: str) -> bool:
    """Whether Java up to 0.10 stored the (canonical) transform's results before 1970 one too high."""
    return transform in CALENDAR and (transform, kind) != ("day", "date")


def next_value(value: Any) -> Any:
    """The least value above this one."""
    if isinstance(value, int):
        return value + 1
    return value + "\0" if isinstance(value, str) else value + b"\0"


def forwards(transform: str, kind: str, source: Range) -> list[Range]:
    """Ranges that hold the result of each source value in the range, and little else."""
    exact = monotone(transform, kind)
    if base_name(kind) in ("string", "binary"):
        low, high = source
        if high is not None and exact(high) != high:
            # a value just below `high` may begin as it does
            high = next_value(exact(high))
        return [Range(low if low is None else exact(low), high)]
    first, end = _limits(kind)
    low, high = _clipped(source, first, end)
    if low >= high:
        return []
    least, beyond = exact(low), exact(high - 1) + 1
    result = result_type(transform, kind)
    start, stop = _limits(result)
    found = []
    for shift in _shifts(result):
        piece = _clipped(Range(least + shift, beyond + shift), start, stop)
        if piece.low >= piece.high:
            continue
        # no value lies beyond the source's limits, so no result does: one bound less to test
        no_low = piece.low == start or (low == first and shift == 0)
        no_high = piece.high == stop or (high == end and shift == 0)
        found.append(Range(None if no_low else piece.low, None if no_high else piece.high))
    return found


def backwards(transform: str, kind: str, results: Iterable[Range]) -> list[Range]:
    """Exactly the source values whose result is in one of the ranges: disjoint ranges in order."""
    if base_name(kind) in ("string", "binary"):
        return _merged(list(_strings_backwards(width_of(transform), results)))
    begin = _first_with(transform, kind)
    first, end = _limits(kind)
    result = result_type(transform, kind)
    start, stop = _limits(result)
    found = []
    for span in results:
        low, high = _clipped(span, start, stop)
        if low < high:
            found += [_clipped(Range(begin(low + shift), begin(high + shift)), first, end) for shift in _shifts(result)]
    return [
        Range(None if low == first else low, None if high == end else high)
        for low, high in _merged([span for span in found if span.low < span.high])
    ]


def _strings_backwards(width: int, results: Iterable[Range]) -> Iterator[Range]:
    for span in results:
        low, high = (bound if bound is None or len(bound) <= width else after_prefix(bound[:width]) for bound in span)
        if low is None and span.low is not None:
            continue  # no string is that great
        if low is None or high is None or low < high:
            yield Range(low, high)


def complement(ranges: list[Range]) -> list[Range]:
    """The values outside of disjoint ranges in order."""
    found, low = [], None
    for index, span in enumerate(ranges):
        if index > 0 or span.low is not None:
            found.append(Range(low, span.low))
        low = span.high
    if not ranges or low is not None:
        found.append(Range(low, None))
    return found


def _limits(kind: str) -> Range:
    """All values of an integer type; of a decimal's, with room for the widest truncation of the least."""
    if bits := INTEGER_BITS.get(kind):
        return Range(-(1 << bits - 1), 1 << bits - 1)
    edge = 10 ** int(kind.partition("(")[2].partition(",")[0]) + (1 << 31)
    return Range(-edge, edge)


def _clipped(span: Range, first: int, end: int) -> Range:
    low = first if span.low is None else max(span.low, first)
    return Range(low, end if span.high is None else min(span.high, end))


def _shifts(result: str) -> tuple[int, ...]:
    """By how much a stored result may differ from the exact one; decimals do not wrap."""
    bits = INTEGER_BITS.get(result)
    return (0,) if bits is None else (0, 1 << bits, -(1 << bits))


def _first_with(transform: str, kind: str) -> Callable[[int], int]:
    """From an exact result to the least source value that has it or a greater one."""
    name = name_of(transform)
    if name == "truncate":
        width = width_of(transform)
        return lambda result: -(-result // width) * width
    day = UNITS_PER_DAY[kind]
    if name == "hour":
        return lambda result: result * (day // 24)
    if name == "day":
        return lambda result: result * day
    months = 1 if name == "month" else 12
    return lambda result: first_day(result * months) * day


def after_prefix(prefix: Prefix) -> Prefix | None:
    """The least value above all that begin with the prefix; None when there is none."""
    if isinstance(prefix, bytes):
        kept = prefix.rstrip(b"\xff")
        return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    # the halves of surrogate pairs are no characters
    return kept[:-1] + ("\ue000" if kept[-1] == "\ud7ff" else chr(ord(kept[-1]) + 1))


def _merged(ranges: list[Range]) -> list[Range]:
    """Ranges that touch or overlap made one, in order."""
    unbounded = [span for span in ranges if span.low is None]
    merged: list[Range] = []
    for span in unbounded + sorted((span for span in ranges if span.low is not None), key=lambda span: span.low):
        if not merged:
            merged.append(span)
        elif (high := merged[-1].high) is None:
            break
        elif span.low is None or span.low <= high:
            merged[-1] = Range(merged[-1].low, None if span.high is None else max(high, span.high))
        else:
            merged.append(span)
    return merged
