"""Residuals: what is left of a filter to check on the rows of a file, given its partition values.

A predicate that all rows of the partition match is TRUE, one that none can match is FALSE, any other stays as it is
(Java: `ResidualEvaluator`). For every row of the partition the residual and the whole filter give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from msgspec.structs import replace

from metaserver.iceberg.expressions.evaluation import may_match, must_match
from metaserver.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    And,
    Bound,
    Expression,
    Op,
    Or,
    all_of,
    any_of,
    predicates_of,
)
from metaserver.iceberg.expressions.projection import ProjectedExpression, project
from metaserver.iceberg.metadata.partition import PartitionSpec
from metaserver.iceberg.types.schema import Schema
from metaserver.iceberg.types.transforms import IDENTITY
from metaserver.iceberg.types.types import base_name
from metaserver.iceberg.types.values import INTS, LONGS, TIMESTAMPS, Value

_Partition: TypeAlias = Mapping[int, Value | None]


def nameable(expression: Expression, schema: Schema) -> Expression:
    """The residual of a bound expression as far as clients can bind it: a predicate whose column has another name in
    the table's current schema, or whose name another column has by now, is TRUE.

    Java's client binds a residual twice, to the current schema for the partition and to what it reads, which after a
    rename have no name in common for a column (`ResidualEvaluator`, `ParquetMetricsRowGroupFilter`). Engines filter
    rows again, so a wider residual costs them time at most. `IcebergGenerics` does not: it returns rows that do not
    match, and no residual would be right for it where a client binds it twice.
    """
    match expression:
        case And(children) | Or(children):
            told = [nameable(child, schema) for child in children]
            if all(one is child for one, child in zip(told, children, strict=True)):
                return expression
            return all_of(*told) if isinstance(expression, And) else any_of(*told)
        case Bound():
            return expression if schema.index.by_name.get(expression.name) == expression.column_id else TRUE
    return expression


def weakened(residual: Expression) -> Expression:
    """A short expression that every row matches which the residual matches, and never the constant TRUE.

    For clients that insist on a residual and filter rows by the original filter: a list of values becomes the range
    around it. PyIceberg counts the rows of a file whose residual is TRUE without looking at them, so where nothing is
    known, a tautology about a column stands for it.
    """
    predicates = predicates_of(residual)
    if not predicates:
        return residual
    found = _weakened(residual)
    if isinstance(found, And):
        found = all_of(*found.children[:_CONJUNCTS_MAX])
    return tautology(predicates[0]) if found == TRUE else found


def tautology(predicate: Bound) -> Expression:
    """True of every row, said by the column of the predicate."""
    column = replace(predicate, transform=IDENTITY, result=predicate.kind, values=())
    return any_of(replace(column, op=Op.IS_NULL), replace(column, op=Op.NOT_NULL))


_CONJUNCTS_MAX = 8
_ORDERED_KINDS = INTS | LONGS | TIMESTAMPS | {"date", "time"}


def _weakened(expression: Expression) -> Expression:
    match expression:
        case And(children):
            return all_of(*[_weakened(child) for child in children])
        case Or(children):
            column = {(one.column_id, one.transform) for one in children if isinstance(one, Bound)}
            listed = [one for one in children if isinstance(one, Bound) and one.op in (Op.EQ, Op.IN)]
            if len(column) > 1 or len(listed) < len(children):
                return TRUE
            return _weakened_predicate(listed[0], [value for one in listed for value in one.values])
        case Bound():
            return _weakened_predicate(expression, list(expression.values))
    return expression


def _weakened_predicate(predicate: Bound, values: list[Any]) -> Expression:
    if predicate.transform != IDENTITY or predicate.op in (Op.NOT_EQ, Op.NOT_IN, Op.NOT_STARTS_WITH):
        return TRUE
    if not values:
        return predicate
    if base_name(predicate.kind) not in _ORDERED_KINDS:
        return replace(predicate, op=Op.NOT_NULL, values=())
    if predicate.op not in (Op.EQ, Op.IN):
        return predicate
    lowest = replace(predicate, op=Op.GT_EQ, values=(min(values),))
    return all_of(lowest, replace(predicate, op=Op.LT_EQ, values=(max(values),)))


class Residuals:
    """The residuals of a bound expression for the partitions of one spec; pure and shareable."""

    def __init__(
        self, expression: Expression, spec: PartitionSpec, projected: ProjectedExpression | None = None
    ) -> None:
        """`projected` is what `project` makes of the two, where that is at hand."""
        self._projected = project(expression, spec) if projected is None else projected

    def __call__(self, partition: Mapping[int, Value | None]) -> Expression:
        """The residual for a file with these partition values by field id; one that is not there decides nothing."""
        return _residual(self._projected, partition)


def _residual(projected: ProjectedExpression, values: _Partition) -> Expression:
    expression = projected.expression
    if not projected.decides:
        return expression
    if isinstance(expression, Bound):
        if must_match(projected.certain, values):
            return TRUE
        return expression if may_match(projected.possible, values) else FALSE
    parts = [_residual(part, values) for part in projected.parts]
    return all_of(*parts) if isinstance(expression, And) else any_of(*parts)
