"""Ranges of keys compared with predicates evaluated value by value, by a second implementation of the rules."""

from __future__ import annotations

import math
import random
from typing import Any

import pyarrow as pa
import pytest

from seamark.formats.iceberg.expressions.expression import Bound, Op
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.keys import KeyRanges, make_key
from seamark.metaserver.planner.pruning.semantics import ComparisonSemantics, compute_key_ranges

NAN = math.nan
VALUES: dict[str, list[Any]] = {
    "boolean": [False, True],
    "int": [-(2**31), -1, 0, 1, 7, 2**31 - 1],
    "long": [-(2**63), -5, 0, 3, 2**63 - 1],
    "date": [-1, 0, 19000],
    "timestamp_ns": [-(10**18), 0, 10**18],
    "decimal(9, 2)": [-999999999, -1, 0, 12345],
    "decimal(38, 4)": [-(10**37), -1, 0, 10**37],
    "double": [-math.inf, -2.5, -0.0, 0.0, 5e-324, 1.5, math.inf, NAN],
    "float": [-1.5, -0.0, 0.0, 3.0, NAN],
    "string": ["", "a", "ab", "abc", "b", "é", "￿", "\U0010ffff", "\U0010ffff\U0010ffff"],
    "binary": [b"", b"\0", b"a", b"\xff", b"\xff\xff"],
    "uuid": [bytes(16), b"\x7f" + bytes(15), b"\xff" * 16],
}
EQUALITY_OPS = [Op.EQ, Op.NOT_EQ]
LIST_OPS = [Op.IN, Op.NOT_IN]
ORDER_OPS = [Op.LT, Op.LT_EQ, Op.GT, Op.GT_EQ]


def build_predicate(op: Op, kind: str, *values: Any) -> Bound:
    return Bound(op, 1, "c", kind, "identity", kind, values)


def is_below(left: Any, right: Any, *, java: bool) -> bool:
    """Return whether left < right, in Java's order of floats or in the order of IEEE 754."""
    if isinstance(left, float) and java:
        if math.isnan(left) or math.isnan(right):
            return not math.isnan(left) and math.isnan(right)
        if left == right == 0:
            return math.copysign(1, left) < math.copysign(1, right)
    return bool(left < right)


def are_same(left: Any, right: Any, *, java: bool) -> bool:
    if isinstance(left, float) and java:
        return not is_below(left, right, java=True) and not is_below(right, left, java=True)
    return bool(left == right)


def matches(bound: Bound, value: Any, *, java: bool) -> bool:
    op, values = bound.op, bound.values
    if value is None:
        return op in (Op.IS_NULL, Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH, Op.NOT_NAN)
    is_nan = isinstance(value, float) and math.isnan(value)
    match op:
        case Op.IS_NULL:
            return False
        case Op.NOT_NULL:
            return True
        case Op.IS_NAN:
            return is_nan
        case Op.NOT_NAN:
            return not is_nan
        case Op.LT:
            return is_below(value, values[0], java=java)
        case Op.LT_EQ:
            return is_below(value, values[0], java=java) or are_same(value, values[0], java=java)
        case Op.GT:
            return is_below(values[0], value, java=java)
        case Op.GT_EQ:
            return is_below(values[0], value, java=java) or are_same(value, values[0], java=java)
        case Op.EQ | Op.IN:
            return any(are_same(value, other, java=java) for other in values)
        case Op.NOT_EQ | Op.NOT_IN:
            return not any(are_same(value, other, java=java) for other in values)
        case Op.STARTS_WITH:
            return bool(value.startswith(values[0]))
        case Op.NOT_STARTS_WITH:
            return not value.startswith(values[0])
    raise AssertionError(op)


def list_predicates(kind: str) -> list[Bound]:
    literals = [value for value in VALUES[kind] if value == value and value not in (math.inf, -math.inf)]
    predicates = [build_predicate(op, kind) for op in (Op.IS_NULL, Op.NOT_NULL)]
    if kind in ("float", "double"):
        predicates += [build_predicate(op, kind) for op in (Op.IS_NAN, Op.NOT_NAN)]
    order_ops = [] if kind in ("uuid", "boolean") else ORDER_OPS
    predicates += [build_predicate(op, kind, value) for op in (*EQUALITY_OPS, *order_ops) for value in literals]
    rng = random.Random(kind)
    for op in LIST_OPS * 6:  # six lists for each operator
        some_literals = rng.sample(literals, min(len(literals), rng.randint(2, 4)))
        if len(set(some_literals)) == len(some_literals):
            predicates.append(build_predicate(op, kind, *sorted(some_literals)))
    if kind == "string":
        predicates += [
            build_predicate(op, kind, value) for op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH) for value in literals
        ]
    return predicates


def is_in_ranges(ranges: KeyRanges, kind: str, value: Any) -> bool:
    if value is None:
        return ranges.nulls
    if isinstance(value, float) and math.isnan(value):
        return ranges.nans
    return ranges.contains(make_key(value, kind))


@pytest.mark.parametrize("kind", VALUES)
def test_comparison_semantics_match_the_answers_of_their_clients(kind: str) -> None:
    for bound in list_predicates(kind):
        for value in (*VALUES[kind], None):
            matches_java, matches_sql = matches(bound, value, java=True), matches(bound, value, java=False)
            expected = {
                ComparisonSemantics.ICEBERG: matches_java,
                ComparisonSemantics.SQL: matches_sql,
                ComparisonSemantics.POSSIBLE: matches_java or matches_sql,
            }
            for semantics, answer in expected.items():
                ranges = compute_key_ranges(bound, kind, semantics)
                assert ranges is not None
                assert is_in_ranges(ranges, kind, value) == answer, (bound, value, semantics, ranges)


@pytest.mark.parametrize("op", ORDER_OPS)
def test_uuid_comparisons_are_left_to_the_reader(op: Op) -> None:
    assert compute_key_ranges(build_predicate(op, "uuid", bytes(16)), "uuid", ComparisonSemantics.POSSIBLE) is None


def test_value_outside_the_range_of_a_narrower_key_type_decides_nothing() -> None:
    assert (
        compute_key_ranges(
            build_predicate(Op.LT, "decimal(38, 0)", 10**30), "decimal(9, 0)", ComparisonSemantics.POSSIBLE
        )
        is None
    )


def test_literal_of_a_promoted_type_finds_keys_of_the_older_type() -> None:
    keys = convert_to_keys(pa.array([1.5, 2.5], pa.float32()), "float")
    ranges = compute_key_ranges(build_predicate(Op.EQ, "double", 2.5), "float", ComparisonSemantics.POSSIBLE)
    assert ranges is not None
    assert keys.codes is not None
    assert [ranges.contains(int(code)) for code in keys.codes] == [False, True]
