"""NaN in comparisons, about which clients differ.

Spark and DuckDB order NaN above every number. Iceberg's metrics evaluators, PyIceberg and Trino do not: to them NaN is
neither less nor greater than a number, and bounds exclude it.
"""

from __future__ import annotations

from msgspec.structs import replace

from seamark.metaserver.iceberg.expressions.expression import (
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
from seamark.metaserver.iceberg.types.values import FLOATS

_ABOVE = frozenset({Op.GT, Op.GT_EQ})


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
            return all_of(*map(_added, children))
        case Or(children):
            tests = dict.fromkeys(child for child in children if isinstance(child, Bound) and child.op is Op.IS_NAN)
            others = [child for child in children if child not in tests]
            added = any_of(*map(_added, others))
            parts = added.children if isinstance(added, Or) else (added,)
            # A filter that already tests for NaN, such as one that was SQL, does not become longer.
            return any_of(*[part for part in parts if part not in tests], *tests)
        case Bound() if _matches_nan_above(expression):
            return any_of(expression, replace(expression, op=Op.IS_NAN, values=()))
    return expression
