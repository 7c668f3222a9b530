"""Conditions on the day, month, year or hour of a column, from the values that it must equal in another table.

`CAST(ts AS date) = d.day` requires that the day of `ts` is one of the days of the other table. A value of the other
table that is not the start of a period equals no period. Consecutive periods become a range. If there are too many
ranges, neighbouring ranges are joined. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op, join_by_and, join_by_or
from seamark.formats.iceberg.types.transforms import (
    accepts_type,
    compute_values_type,
    find_start_of_month,
    make_monotone_function,
)
from seamark.formats.index.keys.key_set import KeySet
from seamark.metaserver.planner.pruning.file_pruning import pack_key

RANGES_MAX = 200
"""The maximum number of ranges in a condition."""
KEYS_MAX = 100_000
"""The maximum number of keys from which a condition is made."""
_EPOCH_YEAR, _LAST_YEAR = 1970, 9999
_DAY_HOURS, _HOUR_MICROS = 24, 3_600_000_000
_DAY_MICROS = _DAY_HOURS * _HOUR_MICROS
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""The first and the last day of the years 1 to 9999. Engines represent infinity by later or earlier days."""
_YEAR_KINDS = ("int", "long")


def can_identify_period(transform: str, kind: str, other: str) -> bool:
    """Return whether values of type `other` can identify a period of a column of type `kind`, such as its month.

    A number can be a year, and a date or timestamp can be the start of a period. The start of a
    period of `timestamptz` depends on the time zone of the session, so only years and dates are accepted for it.
    """
    if not accepts_type(transform, kind) or kind not in ("date", "timestamp", "timestamptz"):
        return False
    if other in _YEAR_KINDS:
        return transform == "year"
    if transform == "day" and other == "date":
        return True
    return kind != "timestamptz" and other in ("date", "timestamp")


def make_period_condition(column_id: int, name: str, kind: str, transform: str, keys: KeySet) -> Expression:
    """Return the condition that the transform of the column is the period of one of the keys.

    Keys that are not the start of a period match no row. Periods are merged to a limited number of ranges.

    Raises:
        ValueError: There are too many keys, or a time is not in the years 1 to 9999.
    """
    if len(keys) > KEYS_MAX:
        raise ValueError(
            f"the key set has {len(keys):,} keys; the limit for days, months, years and hours is {KEYS_MAX:,}"
        )
    ordinals = set()
    for position in range(len(keys)):
        value = pack_key(keys.get_key(position), keys.kind)
        assert isinstance(value, int)
        ordinal = _number_period(value, keys.kind, transform)
        if ordinal is not None:
            ordinals.add(ordinal)

    def make_predicate(op: Op, value: int) -> Bound:
        return Bound(op, column_id, name, kind, transform, compute_values_type(transform, kind), (value,))

    def make_span_condition(low: int, high: int) -> Expression:
        if low == high:
            return make_predicate(Op.EQ, low)
        return join_by_and(make_predicate(Op.GT_EQ, low), make_predicate(Op.LT_EQ, high))

    return join_by_or(*(make_span_condition(low, high) for low, high in merge_ordinals(sorted(ordinals))))


def merge_ordinals(ordinals: Sequence[int]) -> list[tuple[int, int]]:
    """Return at most `RANGES_MAX` ranges that contain all of the ascending ordinals.

    A range includes both of its ends. The ranges exclude the widest gaps between the ordinals.
    """
    if not ordinals:
        return []
    gaps = [(next_ordinal - ordinal, number) for number, (ordinal, next_ordinal) in enumerate(pairwise(ordinals), 1)]
    # Between `RANGES_MAX` ranges, there are `RANGES_MAX - 1` gaps.
    widest_gaps = sorted((gap, number) for gap, number in gaps if gap > 1)[1 - RANGES_MAX :]
    begins = [0, *sorted(number for _, number in widest_gaps)]
    return [(ordinals[begin], ordinals[end - 1]) for begin, end in pairwise([*begins, len(ordinals)])]


def _number_period(value: int, kind: str, transform: str) -> int | None:
    """Return the number of the period that begins at the value. An integer value is a year.

    Returns:
        None if no period begins at the value.

    Raises:
        ValueError: The year or time is outside of the supported years.
    """
    if kind in _YEAR_KINDS:
        # An integer value is a year, not a time.
        if not 1 <= value <= _LAST_YEAR:
            raise ValueError(f"the key set has a year that is not from 1 to {_LAST_YEAR}")
        return value - _EPOCH_YEAR
    micros = value * _DAY_MICROS if kind == "date" else value
    day, time_of_day = divmod(micros, _DAY_MICROS)
    if not _FIRST_DAY <= day <= _LAST_DAY:
        raise ValueError("the key set has a time that is not in the years 1 to 9999")
    if transform == "hour":
        return None if micros % _HOUR_MICROS else micros // _HOUR_MICROS
    number: int = make_monotone_function(transform, "date")(day)
    begin = {"day": day, "month": find_start_of_month(number), "year": find_start_of_month(12 * number)}[transform]
    return number if begin == day and not time_of_day else None
