"""Evaluation of bound predicates on single values, such as partition values.

Null follows Iceberg: `not-eq`, `not-in`, `not-starts-with` and `not-nan` match null, and comparisons do not. (Java's
evaluator sorts null first, so that `lt` matches null. Its metrics evaluators and all engines do not.)

Clients differ about some values. NaN is greater than all numbers and equal to itself in Java and Spark, and unordered
in PyIceberg. -0.0 is less than 0.0 in Java, and equal to 0.0 elsewhere. Java orders UUIDs as two signed halves. If
clients differ, the result is None: the file is kept, and the predicate stays in the residual. So if zeros of different
signs are compared, Seamark keeps files that Java would skip, because Spark and PyIceberg need them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from math import copysign, isnan
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.types.values import Value

NULL_MATCHES = frozenset({Op.IS_NULL, Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH, Op.NOT_NAN})

_COMPARED: dict[Op, Callable[[Any, Any], bool]] = {
    Op.LT: lt,
    Op.LT_EQ: le,
    Op.GT: gt,
    Op.GT_EQ: ge,
    Op.EQ: eq,
    Op.NOT_EQ: ne,
}


def evaluate(predicate: Bound, value: Value | None) -> bool | None:
    """Return whether the term's `value` satisfies the predicate, or None if clients differ.

    Zeros, NaN and UUIDs have another order in Java than in Python, so these values are compared in both orders. The
    values of IN and NOT_IN are sorted, which allows a binary search.
    """
    op = predicate.op
    if value is None:
        return op in NULL_MATCHES
    if op in (Op.IS_NULL, Op.NOT_NULL):
        return op == Op.NOT_NULL
    if op in (Op.IS_NAN, Op.NOT_NAN):
        return (isinstance(value, float) and isnan(value)) == (op == Op.IS_NAN)
    if op in (Op.STARTS_WITH, Op.NOT_STARTS_WITH):
        return str(value).startswith(str(predicate.values[0])) == (op == Op.STARTS_WITH)
    if isinstance(value, float) and (value == 0 or isnan(value)):
        return _compare_in_both_orders(predicate, value, _make_float_key)
    if predicate.result == "uuid" and op in _COMPARED:
        return _compare_in_both_orders(predicate, value, _make_uuid_key)
    if (compare := _COMPARED.get(op)) is not None:
        return compare(value, predicate.values[0])
    sorted_values: tuple[Any, ...] = predicate.values
    index = bisect_left(sorted_values, value)
    return (index < len(sorted_values) and sorted_values[index] == value) == (op == Op.IN)


def may_match(expression: Expression, values: Mapping[int, Value | None]) -> bool:
    """Return whether a row with these values matches for at least one client.

    Args:
        expression: A bound expression with identity terms.
        values: The values by field id. A field without an entry can have any value.
    """
    return _evaluate(expression, values, if_unknown=True)


def must_match(expression: Expression, values: Mapping[int, Value | None]) -> bool:
    """Return whether a row with these values surely matches, for every client.

    Clients differ about NaN, the sign of zero and the order of UUIDs. If the result depends on such a difference, or on
    a value that is not in `values`, return False.

    Args:
        expression: A bound expression with identity terms.
        values: The values by field id. A field without an entry can have any value.
    """
    return _evaluate(expression, values, if_unknown=False)


def _evaluate(expression: Expression, values: Mapping[int, Value | None], *, if_unknown: bool) -> bool:
    """Return whether the expression is true.

    A predicate has the result `if_unknown` if the value is not in `values`, or if clients differ about the result.
    """
    match expression:
        case Bound():
            if expression.column_id not in values:
                return if_unknown
            matches = evaluate(expression, values[expression.column_id])
            return if_unknown if matches is None else matches
        case And(children):
            return all(_evaluate(child, values, if_unknown=if_unknown) for child in children)
        case Or(children):
            return any(_evaluate(child, values, if_unknown=if_unknown) for child in children)
        case Always(value):
            return value
    raise TypeError(f"expected a bound expression, not {expression}")


def _compare_in_both_orders(predicate: Bound, value: Value, make_java_key: Callable[[Any], Any]) -> bool | None:
    """Return whether a value satisfies a predicate, or None if the answer is different in Java's order."""
    result = _compare(predicate.op, value, predicate.values)
    java_result = _compare(predicate.op, make_java_key(value), tuple(map(make_java_key, predicate.values)))
    return result if result == java_result else None


def _compare(op: Op, value: Any, values: tuple[Any, ...]) -> bool:
    if (compare := _COMPARED.get(op)) is not None:
        return compare(value, values[0])
    # The operator `in` would compare NaN by identity.
    return any(value == other for other in values) == (op == Op.IN)


def _make_float_key(value: float) -> tuple[bool, float, float]:
    """Return the sort key of a number in the order of Java's `Double.compare`."""
    return (True, 0.0, 0.0) if isnan(value) else (False, value, copysign(1.0, value))


def _make_uuid_key(value: bytes) -> tuple[int, int]:
    """Return the sort key of a UUID in the order of Java's `UUID.compareTo`."""
    return int.from_bytes(value[:8], signed=True), int.from_bytes(value[8:], signed=True)
