"""NaN in comparisons, about which clients differ.

Spark and DuckDB order NaN above every number. Iceberg's metrics evaluators, PyIceberg and Trino do not: to them NaN is
neither less nor greater than a number, and bounds exclude it.
"""

from __future__ import annotations

from msgspec.structs import replace

from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    And,
    Bound,
    Expression,
    Op,
    Or,
    all_of,
    any_of,
    predicates_of,
    replaced,
)
from seamark.formats.iceberg.types.values import FLOATS

_ABOVE = frozenset({Op.GT, Op.GT_EQ})
_NEVER_NAN = frozenset({Op.LT, Op.LT_EQ, Op.EQ, Op.IN, Op.NOT_NAN})
"""Operators that NaN satisfies for no client."""


def add_nan(expression: Expression) -> Expression:
    """Return a bound expression whose `>` and `>=` of floats also match NaN.

    A plan of the result keeps the files in which only NaN matches, and its residual skips no row group that has NaN.
    """
    if any(map(_matches_nan_above, predicates_of(expression))):
        return _added(expression)
    return expression


def remove_nan(expression: Expression) -> Expression:
    """Return a bound expression without its tests for NaN, for a file that has no NaN in the tested columns."""
    return replaced(expression, lambda predicate: FALSE if predicate.op is Op.IS_NAN else predicate)


def _matches_nan_above(predicate: Bound) -> bool:
    return predicate.op in _ABOVE and predicate.result in FLOATS


def _added(expression: Expression) -> Expression:
    match expression:
        case And(children):
            # `x > 1 AND x < 5` matches NaN for no client. With a test for NaN, bounds would decide less of it.
            without_nan = {_term(child) for child in children if isinstance(child, Bound) and child.op in _NEVER_NAN}
            return all_of(*[_without_tests(_added(child), without_nan) for child in children])
        case Or(children):
            added = any_of(*map(_added, children))
            parts = added.children if isinstance(added, Or) else (added,)
            # Each test once: a filter that already tests for NaN, such as one that was SQL, does not become longer.
            tests = dict.fromkeys(filter(_is_test, parts))
            return any_of(*[part for part in parts if not _is_test(part)], *tests)
        case Bound() if _matches_nan_above(expression):
            return any_of(expression, replace(expression, op=Op.IS_NAN, values=()))
    return expression


def _without_tests(expression: Expression, terms: set[tuple[int, str]]) -> Expression:
    """A disjunction without its tests for NaN of these terms."""
    if not terms or not isinstance(expression, Or):
        return expression
    left = [child for child in expression.children if not (isinstance(child, Bound) and _is_test_of(child, terms))]
    return any_of(*left)


def _is_test_of(predicate: Bound, terms: set[tuple[int, str]]) -> bool:
    return _is_test(predicate) and _term(predicate) in terms


def _is_test(expression: Expression) -> bool:
    return isinstance(expression, Bound) and expression.op is Op.IS_NAN


def _term(predicate: Bound) -> tuple[int, str]:
    return predicate.column_id, predicate.transform
