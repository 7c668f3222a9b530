"""Residuals: the part of a filter that readers must still evaluate on the rows of a file.

The residual depends on the partition values of the file. A predicate that all rows of the partition match becomes TRUE.
A predicate that no row can match becomes FALSE. All other predicates stay (Java: `ResidualEvaluator`). The residual and
the filter give the same result for every row of the partition.

Clients interpret the same expression in different ways, so the module also creates the forms that clients need. Spark
and DuckDB order NaN above all numbers. Iceberg's metrics evaluators, PyIceberg and Trino do not: for them, NaN is
neither less nor greater than a number, and bounds exclude it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec.structs import replace

from seamark.formats.iceberg.expressions.evaluation import may_match, must_match
from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    And,
    Bound,
    Expression,
    Op,
    Or,
    collect_predicates,
    join_by_and,
    join_by_or,
    replace_predicates,
)
from seamark.formats.iceberg.expressions.projection import ProjectedExpression, project
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS, INTS, LONGS, TIMESTAMPS, Value

_GREATER_OPS = frozenset({Op.GT, Op.GT_EQ})
_NEVER_NAN_OPS = frozenset({Op.LT, Op.LT_EQ, Op.EQ, Op.IN, Op.NOT_NAN})
"""The operators that NaN does not satisfy for any client."""


def add_nan(expression: Expression) -> Expression:
    """Return a bound expression in which `>` and `>=` on floats also match NaN.

    In Spark, NaN is greater than all numbers, but statistics of files do not include NaN. With the additional tests for
    NaN, a plan keeps files that match only because of NaN, and readers do not skip row groups that contain NaN. An
    expression without such comparisons is returned unchanged.
    """
    if any(map(_matches_nan_above, collect_predicates(expression))):
        return _add_nan_tests(expression)
    return expression


def remove_nan(expression: Expression) -> Expression:
    """Return a bound expression without its tests for NaN.

    The result is for a file that has no NaN in the tested columns.
    """
    return replace_predicates(expression, lambda predicate: FALSE if predicate.op is Op.IS_NAN else predicate)


def _matches_nan_above(predicate: Bound) -> bool:
    return predicate.op in _GREATER_OPS and predicate.result in FLOATS


def _add_nan_tests(expression: Expression) -> Expression:
    """Add a test for NaN to each predicate with `>` or `>=` on floats, unless another predicate excludes NaN."""
    match expression:
        case And(children):
            # For no client does NaN match `x > 1 AND x < 5`. With a test for NaN, bounds would prune fewer files.
            terms_without_nan = {
                _get_term(child) for child in children if isinstance(child, Bound) and child.op in _NEVER_NAN_OPS
            }
            return join_by_and(*[_remove_nan_tests(_add_nan_tests(child), terms_without_nan) for child in children])
        case Or(children):
            expression_with_tests = join_by_or(*map(_add_nan_tests, children))
            parts = (
                expression_with_tests.children if isinstance(expression_with_tests, Or) else (expression_with_tests,)
            )
            # Add a test only once, so that a filter that already tests for NaN, such as a converted SQL filter, does
            # not become longer.
            nan_tests = dict.fromkeys(filter(_is_nan_test, parts))
            return join_by_or(*[part for part in parts if not _is_nan_test(part)], *nan_tests)
        case Bound() if _matches_nan_above(expression):
            return join_by_or(expression, replace(expression, op=Op.IS_NAN, values=()))
    return expression


def _remove_nan_tests(expression: Expression, terms: set[tuple[int, str]]) -> Expression:
    """Return a disjunction without its tests for NaN of some terms. Other expressions do not change.

    Args:
        expression: The expression.
        terms: The terms, each as column id and transform.
    """
    if not terms or not isinstance(expression, Or):
        return expression
    other_children = [
        child for child in expression.children if not (isinstance(child, Bound) and _is_nan_test_of(child, terms))
    ]
    return join_by_or(*other_children)


def _is_nan_test_of(predicate: Bound, terms: set[tuple[int, str]]) -> bool:
    return _is_nan_test(predicate) and _get_term(predicate) in terms


def _is_nan_test(expression: Expression) -> bool:
    return isinstance(expression, Bound) and expression.op is Op.IS_NAN


def _get_term(predicate: Bound) -> tuple[int, str]:
    return predicate.column_id, predicate.transform


_Partition: TypeAlias = Mapping[int, Value | None]


def make_bindable(expression: Expression, schema: Schema) -> Expression:
    """Return the residual in a form that clients can bind.

    If a column has another name in the table's current schema, or its name belongs to another column there, its
    predicate becomes TRUE. Java's client binds a residual twice: to the current schema for the partition, and to the
    schema that it reads. After a rename, these schemas have no common name for the column (`ResidualEvaluator`,
    `ParquetMetricsRowGroupFilter`).

    Engines filter rows again, so a wider residual only costs time. `IcebergGenerics` does not filter again, and returns
    rows that do not match. No residual is correct for a client that binds it twice and does not filter again.
    """
    match expression:
        case And(children) | Or(children):
            rewritten = [make_bindable(child, schema) for child in children]
            if all(new is child for new, child in zip(rewritten, children, strict=True)):
                return expression
            return join_by_and(*rewritten) if isinstance(expression, And) else join_by_or(*rewritten)
        case Bound():
            return expression if schema.index.by_name.get(expression.name) == expression.column_id else TRUE
    return expression


def match_both_zeros(residual: Expression) -> Expression:
    """Return a bound expression in which an equality with a zero also matches the zero of the other sign.

    Java's readers order -0.0 below 0.0. They skip row groups by statistics, dictionaries and Bloom filters if only the
    other zero occurs. Spark treats the two zeros as equal.
    """
    if not any(0.0 in predicate.values and predicate.result in FLOATS for predicate in collect_predicates(residual)):
        return residual
    return replace_predicates(residual, _add_other_zero)


def _add_other_zero(predicate: Bound) -> Bound:
    """Replace a comparison with a zero by a comparison that also matches the other zero.

    Readers order -0.0 below 0.0, so `>=` uses -0.0, and `<=` uses 0.0. Other operators do not match both zeros.
    """
    if predicate.result not in FLOATS or 0.0 not in predicate.values:
        return predicate
    match predicate.op:
        case Op.EQ | Op.IN:
            values = [value for value in predicate.values if value != 0]
            return replace(predicate, op=Op.IN, values=tuple(sorted([-0.0, 0.0, *values])))
        case Op.GT_EQ:
            return replace(predicate, values=(-0.0,))
        case Op.LT_EQ:
            return replace(predicate, values=(0.0,))
    return predicate


def weaken_residual(residual: Expression) -> Expression:
    """Return a short expression that is true for at least the same rows, but is not the constant TRUE.

    It is for clients that require a residual (the filter on the rows of a file) but filter rows by their original
    filter. A list of values becomes its range, and only the first conditions of a conjunction stay. If the residual
    of a file is TRUE, PyIceberg counts the file's rows from metadata. Therefore a condition that all rows satisfy, but
    that names a column, replaces TRUE.
    """
    predicates = collect_predicates(residual)
    if not predicates:
        return residual
    weak_residual = _weaken_expression(residual)
    if isinstance(weak_residual, And):
        weak_residual = join_by_and(*weak_residual.children[:_CONJUNCTS_MAX])
    return make_tautology(predicates[0]) if weak_residual == TRUE else weak_residual


def make_tautology(predicate: Bound) -> Expression:
    """Return a condition on the predicate's column that all rows satisfy: it is null, or it is not null."""
    column = replace(predicate, transform=IDENTITY, result=predicate.kind, values=())
    return join_by_or(replace(column, op=Op.IS_NULL), replace(column, op=Op.NOT_NULL))


def collect_tautologies(expression: Expression) -> list[Bound]:
    """Return the predicate `not null` of each tautology in the expression.

    A tautology is the condition that a column is null or not null. Binding replaces a predicate by a tautology if the
    value of its literal is unknown.
    """
    match expression:
        case And(children):
            return [predicate for child in children for predicate in collect_tautologies(child)]
        case Or(children):
            tested_for_null = {
                child.column_id for child in children if isinstance(child, Bound) and child.op is Op.IS_NULL
            }
            not_null_tests = [
                child
                for child in children
                if isinstance(child, Bound) and child.op is Op.NOT_NULL and child.column_id in tested_for_null
            ]
            return not_null_tests or [predicate for child in children for predicate in collect_tautologies(child)]
    return []


_CONJUNCTS_MAX = 8
"""The maximum number of conditions in a weakened residual. The first are kept."""
_ORDERED_KINDS = INTS | LONGS | TIMESTAMPS | {"date", "time"}


def _weaken_expression(expression: Expression) -> Expression:
    """Return an expression that is true for at least the same rows, in which lists of values are ranges.

    A disjunction becomes one range if all its parts are equalities of the same term, otherwise TRUE.
    """
    match expression:
        case And(children):
            return join_by_and(*[_weaken_expression(child) for child in children])
        case Or(children):
            terms = {_get_term(child) for child in children if isinstance(child, Bound)}
            equalities = [child for child in children if isinstance(child, Bound) and child.op in (Op.EQ, Op.IN)]
            if len(terms) > 1 or len(equalities) < len(children):
                return TRUE
            return _weaken_predicate(equalities[0], [value for predicate in equalities for value in predicate.values])
        case Bound():
            return _weaken_predicate(expression, list(expression.values))
    return expression


def _weaken_predicate(predicate: Bound, values: list[Any]) -> Expression:
    """Return a predicate that is true for at least the same rows, with a range instead of a list of values.

    The result is TRUE for a negated predicate, because a range of its values would exclude rows that match. It is also
    TRUE for a predicate on a transform. For types outside `_ORDERED_KINDS`, the result is
    only that the value is not null.

    Args:
        predicate: The predicate.
        values: The values of the predicate, or of all equalities that it represents.
    """
    if predicate.transform != IDENTITY or predicate.op in (Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH):
        return TRUE
    if not values:
        return predicate
    if get_base_name(predicate.kind) not in _ORDERED_KINDS:
        return replace(predicate, op=Op.NOT_NULL, values=())
    if predicate.op not in (Op.EQ, Op.IN):
        return predicate
    lowest = replace(predicate, op=Op.GT_EQ, values=(min(values),))
    return join_by_and(lowest, replace(predicate, op=Op.LT_EQ, values=(max(values),)))


class Residuals:
    """The residuals of a bound expression: the parts that the partition values of a file do not decide.

    Several threads can share an instance.
    """

    def __init__(
        self, expression: Expression, spec: PartitionSpec, projection: ProjectedExpression | None = None
    ) -> None:
        """Prepare the residuals.

        Args:
            expression: The bound expression.
            spec: The partition spec.
            projection: The result of `project`, if the caller already has it.
        """
        self._projected = project(expression, spec) if projection is None else projection

    def __call__(self, partition: Mapping[int, Value | None]) -> Expression:
        """Return the residual for a file.

        Args:
            partition: The partition values by field id. A field without an entry can have any value.
        """
        return _reduce_residual(self._projected, partition)


def _reduce_residual(projection: ProjectedExpression, values: _Partition) -> Expression:
    """Return the part of a projected expression that these partition values do not decide.

    A predicate becomes TRUE if all rows of the partition match, and FALSE if no row can match.
    """
    expression = projection.expression
    if not projection.decides:
        return expression
    if isinstance(expression, Bound):
        if must_match(projection.certain, values):
            return TRUE
        return expression if may_match(projection.possible, values) else FALSE
    parts = [_reduce_residual(part, values) for part in projection.parts]
    return join_by_and(*parts) if isinstance(expression, And) else join_by_or(*parts)
