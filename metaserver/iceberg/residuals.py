"""Residuals: what is left of a filter to check on the rows of a file, given its partition values.

A predicate that all rows of the partition match is TRUE, one that none can match is FALSE, any other stays as it is
(Java: `ResidualEvaluator`). For every row of the partition the residual and the whole filter give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from metaserver.iceberg.evaluation import may_match, must_match
from metaserver.iceberg.expressions import FALSE, TRUE, And, Bound, Expression, Or, Value, all_of, any_of
from metaserver.iceberg.partition import PartitionSpec
from metaserver.iceberg.projection import Projected, project
from metaserver.iceberg.schema import Schema

_Partition: TypeAlias = Mapping[int, Value | None]


def nameable(expression: Expression, schema: Schema) -> Expression:
    """The residual of a bound expression as far as clients can bind it: a predicate whose column has another name in
    the table's current schema, or whose name another column has by now, is TRUE.

    Java's client binds a residual twice, to the current schema for the partition and to what it reads, which after a
    rename have no name in common for a column (`ResidualEvaluator`, `ParquetMetricsRowGroupFilter`). Engines filter
    rows again, so a wider residual costs them time at most.
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


class Residuals:
    """The residuals of a bound expression for the partitions of one spec; pure and shareable."""

    def __init__(self, expression: Expression, spec: PartitionSpec, projected: Projected | None = None) -> None:
        """`projected` is what `project` makes of the two, where that is at hand."""
        self._projected = project(expression, spec) if projected is None else projected

    def __call__(self, partition: Mapping[int, Value | None]) -> Expression:
        """The residual for a file with these partition values by field id; one that is not there decides nothing."""
        return _residual(self._projected, partition)


def _residual(projected: Projected, values: _Partition) -> Expression:
    expression = projected.expression
    if not projected.decides:
        return expression
    if isinstance(expression, Bound):
        if must_match(projected.certain, values):
            return TRUE
        return expression if may_match(projected.possible, values) else FALSE
    parts = [_residual(part, values) for part in projected.parts]
    return all_of(*parts) if isinstance(expression, And) else any_of(*parts)
