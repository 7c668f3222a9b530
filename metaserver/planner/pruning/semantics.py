"""The index keys that match a predicate: ranges of keys, and whether null and NaN match.

Clients differ about zeros, NaN and UUIDs (`iceberg/expressions/evaluation.py`). An index evaluates ranges over ordered
keys exactly. The caller chooses the semantics of the comparison:

- POSSIBLE, for pruning: a value matches if it matches for any client. All other values match for no client.
- ICEBERG, as in Java's evaluator: -0.0 is less than 0.0, and NaN is greater than every number.
- SQL, as in IEEE 754 and Trino: the zeros are equal, and NaN is unordered and equal to nothing.

In all three, null is compared as in Iceberg: it satisfies `not-eq`, `not-in`, `not-starts-with` and `not-nan`. The
conversion from SQL (`sql.py`) adds a `not-null` predicate to a negation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from seamark.formats.iceberg.expressions.evaluation import NULL_MATCHES
from seamark.formats.iceberg.expressions.expression import ORDERED, Bound, Op
from seamark.formats.iceberg.expressions.ranges import find_end_of_prefix
from seamark.formats.iceberg.types.values import FLOATS, Value
from seamark.formats.index.keys.keys import Key, KeyRange, KeyRanges, make_key

_EVERYTHING = (KeyRange(None, None),)


class ComparisonSemantics(Enum):
    """The rules for comparisons of null, NaN, zeros and UUIDs.

    They are the rules of Iceberg, the rules of SQL, or all rules that a client may have (`POSSIBLE`).
    """

    POSSIBLE = "possible"
    ICEBERG = "iceberg"
    SQL = "sql"


def compute_key_ranges(predicate: Bound, kind: str, semantics: ComparisonSemantics) -> KeyRanges | None:
    """Return the keys of type `kind` that match a predicate on a term of that type or a comparable type.

    Returns:
        None if ranges cannot express the predicate. There are two cases: a comparison of UUIDs, whose order differs
        between clients, and a value that keys of this type cannot represent, for example after a decimal column was
        widened.
    """
    try:
        return _list_key_ranges(predicate, kind, semantics)
    except ValueError:
        return None


def _list_key_ranges(predicate: Bound, kind: str, semantics: ComparisonSemantics) -> KeyRanges | None:
    """Return the ranges of the keys that match a predicate, or None if ranges cannot express it.

    For UUIDs, `<`, `<=`, `>` and `>=` have no ranges, because clients order UUIDs differently. NaN is greater than all
    numbers, except in SQL.

    Raises:
        ValueError: Keys of this type cannot represent a value of the predicate.
    """
    op, values = predicate.op, predicate.values
    nulls = op in NULL_MATCHES
    if op is Op.IS_NULL or op is Op.IS_NAN:
        return KeyRanges(kind, (), nulls, op is Op.IS_NAN)
    if op is Op.NOT_NULL or op is Op.NOT_NAN:
        return KeyRanges(kind, _EVERYTHING, nulls, op is Op.NOT_NULL)
    if op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH):
        prefix = _make_prefix_range(values[0])
        return KeyRanges(kind, (prefix,) if op is Op.STARTS_WITH else _find_gaps([prefix]), nulls, False)
    if op in ORDERED:
        if predicate.result == "uuid":
            return None
        ranges = (_to_ordered_range(op, values[0], kind, semantics),)
        includes_nan = op in (Op.GT, Op.GT_EQ) and semantics is not ComparisonSemantics.SQL
        return KeyRanges(kind, ranges, nulls, includes_nan and kind in FLOATS)
    is_equality = op in (Op.EQ, Op.IN)
    points = _find_points(values, kind, both_zeros=_covers_both_zeros(semantics, is_equality=is_equality))
    if is_equality:
        return KeyRanges(kind, tuple(points), nulls, False)
    return KeyRanges(kind, _find_gaps(points), nulls, kind in FLOATS)


def _covers_both_zeros(semantics: ComparisonSemantics, *, is_equality: bool) -> bool:
    """Return whether a zero among the values also represents the other zero (-0.0 or 0.0).

    In an equality, the result is True if any client treats the zeros as equal. In an inequality, it is True only if
    every client does.

    Args:
        semantics: The rules for comparisons.
        is_equality: Whether the operator is an equality (`=` or IN).
    """
    return semantics is ComparisonSemantics.SQL or (semantics is ComparisonSemantics.POSSIBLE and is_equality)


def _to_ordered_range(op: Op, value: Value, kind: str, semantics: ComparisonSemantics) -> KeyRange:
    """Return the range of keys that satisfy `<`, `<=`, `>` or `>=` with the value."""
    is_upper_limit = op in (Op.LT, Op.LT_EQ)
    is_closed = op in (Op.LT_EQ, Op.GT_EQ)
    # As keys, -0.0 precedes 0.0, as in Java. In SQL the two are equal. So use the zero that includes both zeros if
    # the range contains its limit, and that excludes both zeros if it does not.
    includes_equal = semantics is ComparisonSemantics.SQL or (semantics is ComparisonSemantics.POSSIBLE and is_closed)
    if kind in FLOATS and value == 0 and includes_equal:
        value = 0.0 if is_upper_limit == is_closed else -0.0
    key = make_key(value, kind)
    return KeyRange(None, key, False, not is_closed) if is_upper_limit else KeyRange(key, None, not is_closed, False)


def _find_points(values: Iterable[Value], kind: str, *, both_zeros: bool) -> list[KeyRange]:
    """Return a range with a single key for each value, ascending."""
    keys: set[Key] = set()
    for value in values:
        is_zero = kind in FLOATS and value == 0
        keys.update(make_key(number, kind) for number in ((-0.0, 0.0) if is_zero and both_zeros else (value,)))
    sorted_keys: list[Key] = sorted(keys)
    return [KeyRange(key, key) for key in sorted_keys]


def _make_prefix_range(value: Value) -> KeyRange:
    """Return the range of the keys that start with the prefix."""
    assert isinstance(value, str)
    prefix = value.encode("utf-8", "surrogatepass")
    prefix_end = find_end_of_prefix(prefix)
    return KeyRange(prefix, prefix_end, False, prefix_end is not None)


def _find_gaps(ranges: Sequence[KeyRange]) -> tuple[KeyRange, ...]:
    """Return the gaps before, between and after ranges that are ascending and disjoint."""
    gaps: list[KeyRange] = []
    low: Key | None = None
    is_low_open = False
    for key_range in ranges:
        # There is no gap before a range without a lower limit, or with the empty string, the lowest key, as its limit.
        if key_range.low is not None and (low is not None or key_range.low_open or key_range.low != b""):
            gaps.append(KeyRange(low, key_range.low, is_low_open, not key_range.low_open))
        if key_range.high is None:
            return tuple(gaps)
        low, is_low_open = key_range.high, not key_range.high_open
    gaps.append(KeyRange(low, None, is_low_open, False))
    return tuple(gaps)
