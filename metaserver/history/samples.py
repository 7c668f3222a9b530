"""Samples of the values that statements compare, in the form that the setting `query_history_literals` allows.

`dropped`: a sample has no value. For each column with a range, it has the width of the range as a share of the
column's values, rounded to half a power of two. It has no position, so no literal can be computed from it.
`hashed`: a sample also has a keyed hash of the literals, which shows whether statements repeat them.
`kept`: a sample also has the filter with its literals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Op
from seamark.formats.iceberg.types.transforms import IDENTITY

DROPPED, HASHED, KEPT = "dropped", "hashed", "kept"
LITERALS = (DROPPED, HASHED, KEPT)
FILTER_CHARACTERS_MAX = 2000
"""The maximum length of a filter that is kept with its literals."""
LOW, HIGH, BOTH = "low", "high", "both"
"""The side of a column's values in which a range lies: it has no lower limit, no upper limit, or both limits."""


class RangeWidth(msgspec.Struct, frozen=True, array_like=True):
    """The width of a range.

    Attributes:
        side: LOW, HIGH or BOTH.
        share: The width divided by the distance of the column's smallest and largest value, rounded to half a power
            of two.
    """

    column_id: int
    side: str
    share: float


class FilterSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sample of one filter.

    Attributes:
        widths: The widths of its ranges.
        digest: The keyed hash of its literals, or empty.
        filter: The filter as JSON of the REST specification, or empty.
    """

    widths: tuple[RangeWidth, ...] = ()
    digest: str = ""
    filter: str = ""


def widths_of(bound: Expression, limits: Mapping[int, tuple[float, float]]) -> tuple[RangeWidth, ...]:
    """Return the widths of the ranges that all rows must be in.

    Args:
        bound: The bound filter.
        limits: The smallest and the largest value of numeric columns, by column id.
    """
    ranges: dict[int, list[float | None]] = {}
    for part in conjuncts_on_columns(bound):
        side = 0 if part.op in (Op.GT, Op.GT_EQ) else 1 if part.op in (Op.LT, Op.LT_EQ) else None
        if side is None or part.column_id not in limits:
            continue
        value, interval = float(part.values[0]), ranges.setdefault(part.column_id, [None, None])
        known = interval[side]
        interval[side] = value if known is None else (min if side else max)(known, value)
    widths = []
    for column_id, (low, high) in sorted(ranges.items()):
        smallest, largest = limits[column_id]
        distance = largest - smallest
        if not distance > 0:
            continue
        start, end = (
            max(smallest, low) if low is not None else smallest,
            min(largest, high) if high is not None else largest,
        )
        share = min(1.0, max(0.0, end - start) / distance)
        widths.append(
            RangeWidth(column_id, BOTH if None not in (low, high) else LOW if low is None else HIGH, _round(share))
        )
    return tuple(widths)


def conjuncts_on_columns(bound: Expression) -> Iterable[Bound]:
    """Return the predicates on plain columns that all rows must satisfy."""
    parts = bound.children if isinstance(bound, And) else (bound,)
    return (part for part in parts if isinstance(part, Bound) and part.transform == IDENTITY)


def _round(share: float) -> float:
    """Round to half a power of two, because an exact width would show something of the literals."""
    return 0.0 if share < 2**-30 else 2 ** (round(math.log2(share) * 2) / 2)
