"""What a predicate means for the keys of an index: the ranges of keys that match, and whether null and NaN do.

Clients do not agree on zeros, NaN and uuids (`iceberg/expressions/evaluation.py`). Indexes know nothing of that: they
answer ranges over ordered keys, exactly, and who asks decides here in whose meaning:

- POSSIBLE, for pruning: whatever matches to any client. What is left out matches to none.
- ICEBERG, as Java's evaluator: -0.0 is below 0.0, NaN above every number.
- SQL, as IEEE 754 and Trino: zeros are equal, NaN is in no order and equal to nothing.

Null follows Iceberg in all three: `not-eq`, `not-in`, `not-starts-with` and `not-nan` match it. SQL's own "not" has a
`not-null` beside it by the time it is an expression (`sql.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from metaserver.iceberg.expressions.evaluation import NULL_MATCHES
from metaserver.iceberg.expressions.expression import ORDERED, Bound, Op
from metaserver.iceberg.expressions.ranges import after_prefix
from metaserver.iceberg.types.values import FLOATS, Value
from metaserver.index.keys.keys import Key, KeyRange, KeyRanges, key_of

_EVERYTHING = (KeyRange(None, None),)


class ComparisonSemantics(Enum):
    POSSIBLE = "possible"
    ICEBERG = "iceberg"
    SQL = "sql"


def key_ranges(predicate: Bound, kind: str, semantics: ComparisonSemantics) -> KeyRanges | None:
    """The keys, made of values of type `kind`, that match a predicate on a term of that or a comparable type.

    None where ranges cannot say it: the order of uuids, about which clients differ, and values that keys of this kind
    do not reach (a decimal that was widened since).
    """
    try:
        return _key_ranges(predicate, kind, semantics)
    except ValueError:
        return None


def _key_ranges(predicate: Bound, kind: str, semantics: ComparisonSemantics) -> KeyRanges | None:
    op, values = predicate.op, predicate.values
    nulls = op in NULL_MATCHES
    if op is Op.IS_NULL or op is Op.IS_NAN:
        return KeyRanges(kind, (), nulls, op is Op.IS_NAN)
    if op is Op.NOT_NULL or op is Op.NOT_NAN:
        return KeyRanges(kind, _EVERYTHING, nulls, op is Op.NOT_NULL)
    if op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH):
        prefix = _prefix(values[0])
        return KeyRanges(kind, (prefix,) if op is Op.STARTS_WITH else _complement([prefix]), nulls, False)
    if op in ORDERED:
        if predicate.result == "uuid":
            return None
        ranges = (_ordered(op, values[0], kind, semantics),)
        above = op in (Op.GT, Op.GT_EQ) and semantics is not ComparisonSemantics.SQL
        return KeyRanges(kind, ranges, nulls, above and kind in FLOATS)
    inside = op in (Op.EQ, Op.IN)
    points = _points(values, kind, both_zeros=_both_zeros(semantics, inside=inside))
    if inside:
        return KeyRanges(kind, tuple(points), nulls, False)
    return KeyRanges(kind, _complement(points), nulls, kind in FLOATS)


def _both_zeros(semantics: ComparisonSemantics, *, inside: bool) -> bool:
    """Whether a zero among the values stands for the other one, too: for what has to be equal it does when it may, for
    what has to differ only when it must."""
    return semantics is ComparisonSemantics.SQL or (semantics is ComparisonSemantics.POSSIBLE and inside)


def _ordered(op: Op, value: Value, kind: str, semantics: ComparisonSemantics) -> KeyRange:
    below = op in (Op.LT, Op.LT_EQ)
    closed = op in (Op.LT_EQ, Op.GT_EQ)
    # As keys -0.0 comes before 0.0, which is Java's order. To others the two are equal.
    equal = semantics is ComparisonSemantics.SQL or (semantics is ComparisonSemantics.POSSIBLE and closed)
    if kind in FLOATS and value == 0 and equal:
        value = 0.0 if below == closed else -0.0
    key = key_of(value, kind)
    return KeyRange(None, key, False, not closed) if below else KeyRange(key, None, not closed, False)


def _points(values: Iterable[Value], kind: str, *, both_zeros: bool) -> list[KeyRange]:
    keys: set[Key] = set()
    for value in values:
        zero = kind in FLOATS and value == 0
        keys.update(key_of(one, kind) for one in ((-0.0, 0.0) if zero and both_zeros else (value,)))
    ordered: list[Key] = sorted(keys)
    return [KeyRange(key, key) for key in ordered]


def _prefix(value: Value) -> KeyRange:
    assert isinstance(value, str)
    prefix = value.encode("utf-8", "surrogatepass")
    after = after_prefix(prefix)
    return KeyRange(prefix, after, False, after is not None)


def _complement(ranges: Sequence[KeyRange]) -> tuple[KeyRange, ...]:
    """What lies between the ranges, which ascend and are disjoint."""
    found: list[KeyRange] = []
    low: Key | None = None
    low_open = False
    for one in ranges:
        if one.low is not None and (low is not None or one.low_open or one.low != b""):
            found.append(KeyRange(low, one.low, low_open, not one.low_open))
        if one.high is None:
            return tuple(found)
        low, low_open = one.high, not one.high_open
    found.append(KeyRange(low, None, low_open, False))
    return tuple(found)
