"""Samples of the values that statements compare, in the form that the setting `query_history_literals` allows.

With `dropped`, a sample has no value. For each column with a range, it has the width of the range as a fraction of the
distance between the column's smallest and largest value. `round_share` rounds it. The sample does not show where a
range with two limits is. For a range with one limit, the width shows roughly where this limit is. With `hashed`, a
sample also has a keyed hash of the literals, which shows whether statements repeat them. With `kept`, a sample also has
the filter with its literals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Op
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.metaserver.history.shapes import drop_nan

DROPPED, HASHED, KEPT = "dropped", "hashed", "kept"
LITERALS = (DROPPED, HASHED, KEPT)
FILTER_CHARACTERS_MAX = 2000
"""The maximum number of characters of a filter that is kept with its literals."""
REPEATS_STATEMENTS_MIN = 8
"""The minimum number of statements of which repeated literals are counted."""
_SHARE_MIN = 2**-30
"""The fraction below which a range counts as empty. Above 1 minus this fraction, a range counts as complete."""
_ALL_DIGITS_MIN_FRACTION = 0.999
"""The fraction above which all digits are kept, because the digits after the nines distinguish it from 1."""
LOW, HIGH, BOTH = "low", "high", "both"
"""The side of a column's values in which a range lies: LOW has no lower limit, HIGH no upper limit, BOTH has both
limits.
"""


class RangeWidth(msgspec.Struct, frozen=True, array_like=True):
    """The width of a range.

    Attributes:
        column_id: The field id of the column.
        side: Which limits the range has: LOW has only an upper limit, HIGH only a lower limit, BOTH has both.
        share: The width divided by the distance between the column's smallest and largest value, rounded.
    """

    column_id: int
    side: str
    share: float


class FilterSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sample of a filter.

    Attributes:
        widths: The widths of the filter's ranges.
        digest: The keyed hash of the filter's literals, or an empty text if literals are not stored as a hash.
        filter: The filter as JSON of the REST specification, or an empty text if literals are not stored.
        repeats: The fraction of the pairs of statements that have the same literals, rounded, or -1 if it is unknown.
    """

    widths: tuple[RangeWidth, ...] = ()
    digest: str = ""
    filter: str = ""
    repeats: float = -1.0


def compute_repeats(literals: Sequence[int]) -> float:
    """Return the fraction of the pairs of statements that have the same literals, or -1 for few statements.

    The fraction is large if statements often compare the same few values. It does not reveal these values.

    Args:
        literals: A hash of the literals of each statement.
    """
    statements = len(literals)
    if statements < REPEATS_STATEMENTS_MIN:
        return -1.0
    equal_pairs = sum(count * (count - 1) for count in Counter(literals).values())
    return round(equal_pairs / (statements * (statements - 1)), 3)


def compute_widths(bound: Expression, limits: Mapping[int, tuple[float, float]]) -> tuple[RangeWidth, ...]:
    """Return the widths of the ranges that all rows must be in.

    A width is a share of the distance between the smallest and the largest value of the column, and is rounded.

    Args:
        bound: The bound filter.
        limits: The smallest and the largest value of numeric columns, by column id.
    """
    ranges: dict[int, list[float | None]] = {}
    for part in list_column_conjuncts(bound):
        index = 0 if part.op in (Op.GT, Op.GT_EQ) else 1 if part.op in (Op.LT, Op.LT_EQ) else None
        if index is None or part.column_id not in limits:
            continue
        # A range has its lower limit at index 0, and its upper limit at index 1. All conditions must be true, so the
        # largest lower limit and the smallest upper limit are kept.
        limit, interval = float(part.values[0]), ranges.setdefault(part.column_id, [None, None])
        narrowest = interval[index]
        interval[index] = limit if narrowest is None else (min if index else max)(narrowest, limit)
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
            RangeWidth(column_id, BOTH if None not in (low, high) else LOW if low is None else HIGH, round_share(share))
        )
    return tuple(widths)


def list_column_conjuncts(bound: Expression) -> Iterable[Bound]:
    """Return the comparisons of plain columns, without a transform, that all rows must satisfy."""
    parts = bound.children if isinstance(bound, And) else (bound,)
    # The server adds `OR x IS NAN` to comparisons for some engines. The statement did not contain it.
    predicates = map(drop_nan, parts)
    return (part for part in predicates if isinstance(part, Bound) and part.transform == IDENTITY)


def round_share(share: float) -> float:
    """Round the width of a range, as a fraction of the distance between a column's smallest and largest value.

    With the exact fraction, a reader of the history could compute the literals of the statement.

    The odds, share / (1 - share), are rounded to a power of two with an exponent in quarters. So fractions close to 0
    and fractions close to 1 have the same relative precision. Both matter: in a skewed column, the few rows outside of
    a wide range may spread over most of its values. The result has few digits, because the history stores it as text.
    """
    if not _SHARE_MIN < share < 1 - _SHARE_MIN:
        return float(share > 0.5)
    odds = 2 ** (round(math.log2(share / (1 - share)) * 4) / 4)
    rounded_share = odds / (1 + odds)
    return float(f"{rounded_share:.5g}") if rounded_share < _ALL_DIGITS_MIN_FRACTION else float(rounded_share)
