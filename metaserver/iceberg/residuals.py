"""Residuals: what is left of a filter to check on the rows of a file, given its partition values.

A predicate that all rows of the partition match is TRUE, one that none can match is FALSE, any other stays as it is
(Java: `ResidualEvaluator`). For every row of the partition the residual and the whole filter give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from metaserver.iceberg.evaluation import may_match, must_match
from metaserver.iceberg.expressions import FALSE, TRUE, And, Bound, Expression, Or, Value, all_of, any_of
from metaserver.iceberg.partition import PartitionSpec
from metaserver.iceberg.projection import inclusive, strict
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
    """The residuals of a bound expression for the partitions of one spec; prepared once, then pure and shareable."""

    def __init__(self, expression: Expression, spec: PartitionSpec) -> None:
        self._expression = expression
        self._of = _prepared(expression, spec)

    def __call__(self, partition: Mapping[int, Value | None]) -> Expression:
        """The residual for a file with these partition values by field id; one that is not there decides nothing."""
        return self._expression if self._of is None else self._of(partition)


def _prepared(expression: Expression, spec: PartitionSpec) -> Callable[[_Partition], Expression] | None:
    """The expression's residual by partition; None where no partition decides anything."""
    match expression:
        case And(children) | Or(children):
            join = all_of if isinstance(expression, And) else any_of
            parts = [(child, _prepared(child, spec)) for child in children]
            if all(part is None for _, part in parts):
                return None
            return lambda values: join(*(child if part is None else part(values) for child, part in parts))
        case Bound():
            possible, certain = inclusive(expression, spec), strict(expression, spec)
            if possible == TRUE and certain == FALSE:
                return None
            return lambda values: _decided(expression, possible, certain, values)
    return None


def _decided(predicate: Bound, possible: Expression, certain: Expression, values: _Partition) -> Expression:
    if must_match(certain, values):
        return TRUE
    return predicate if may_match(possible, values) else FALSE
