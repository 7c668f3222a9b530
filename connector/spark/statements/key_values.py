"""The keys of the stored rows that a statement can change, as plans of Spark.

    MERGE … ON t.id = s.id                  the values of s.id
    UPDATE, DELETE … WHERE id IN (1, 2)     the constants
    UPDATE, DELETE … WHERE id IN (SELECT …) the rows of the subquery

Only equality of a column of the target with a value of the same type is used, or of an int column with a bigint. A row
without one of these values meets no such condition: Spark compares as keys are compared, also NaN and both zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import SparkColumn
from seamark.connector.spark.scala import items
from seamark.connector.spark.statements.plan_nodes import PlanBuilder

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class KeyValues:
    """A plan whose outputs are values of these columns. `numbers`: the attributes that it takes them from, None for
    other expressions."""

    columns: tuple[SparkColumn, ...]
    plan: Node
    numbers: tuple[int | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def keys_of_join(
    catalyst: Catalyst, build: PlanBuilder, condition: Node, columns: Mapping[int, SparkColumn], source: Node
) -> KeyValues | None:
    """The values that the join's source has for columns of the target; None without an equality of such columns."""
    numbers = {catalyst.id_of(one) for one in items(source.output())}
    pairs: dict[SparkColumn, Node] = {}
    for part in catalyst.operands(condition, "And"):
        if catalyst.kind(part) != "EqualTo":
            continue
        for one, other in ((part.left(), part.right()), (part.right(), part.left())):
            column, used = _column(catalyst, one, columns), _ids(catalyst, other)
            if column is not None and used and used <= numbers and other.deterministic():
                pairs.setdefault(column, other)
    if not pairs:
        return None
    return _projected(catalyst, build, pairs, source)


def keys_of_condition(
    catalyst: Catalyst, build: PlanBuilder, condition: Node, columns: Mapping[int, SparkColumn]
) -> list[KeyValues]:
    """The values that each part of a condition requires of columns of the target."""
    found = []
    for part in catalyst.operands(condition, "And"):
        kind = catalyst.kind(part)
        if kind == "EqualTo":
            for one, other in ((part.left(), part.right()), (part.right(), part.left())):
                column = _column(catalyst, one, columns)
                if column is not None and catalyst.is_constant(other):
                    found.append(_constants(build, column, build.seq([other])))
        elif kind == "In":
            column, values = _column(catalyst, part.value(), columns), part.list()
            if column is not None and build.are_constants(values):
                found.append(_constants(build, column, values))
        elif kind == "InSubquery":
            sought = [_column(catalyst, one, columns) for one in items(part.values())]
            plan = part.query().plan()
            named = [column for column in sought if column is not None]
            if len(named) == len(sought) and part.query().outerAttrs().isEmpty() and plan.deterministic():
                found.append(_projected(catalyst, build, dict(zip(named, items(plan.output()), strict=True)), plan))
    return found


def _projected(catalyst: Catalyst, build: PlanBuilder, pairs: Mapping[SparkColumn, Node], child: Node) -> KeyValues:
    outputs = [build.named(value, column.name) for column, value in pairs.items()]
    numbers = [
        catalyst.id_of(value) if catalyst.kind(value) == "AttributeReference" else None for value in pairs.values()
    ]
    return KeyValues(tuple(pairs), build.project(outputs, child), tuple(numbers))


def _constants(build: PlanBuilder, column: SparkColumn, values: Node) -> KeyValues:
    return KeyValues((column,), build.exploded_values(values, column.name), (None,))


def fitting_rows(values: pa.Table, columns: Iterable[SparkColumn]) -> pa.Table:
    """The rows that a stored row can be equal to: without nulls, and without numbers that an int column cannot hold."""
    for column in columns:
        array = values[column.name]
        fits = pc.is_valid(array)
        if column.kind == "int" and pa.types.is_int64(array.type):
            within = pc.and_(pc.greater_equal(array, _INT_MIN), pc.less_equal(array, _INT_MAX))
            fits = pc.and_(fits, pc.fill_null(within, False))
        values = values.filter(fits)
    return values


def _column(catalyst: Catalyst, node: Node, columns: Mapping[int, SparkColumn]) -> SparkColumn | None:
    """The target's column; also of an int column that is cast to bigint."""
    node = catalyst.uncast(node)
    kind = catalyst.type_of(node)
    if catalyst.kind(node) == "Cast" and kind == "bigint" and catalyst.type_of(node.child()) == "int":
        node, kind = catalyst.uncast(node.child()), "int"
    if catalyst.kind(node) != "AttributeReference":
        return None
    column = columns.get(catalyst.id_of(node))
    return column if column is not None and column.kind == kind else None


def _ids(catalyst: Catalyst, node: Node) -> frozenset[int]:
    return frozenset(catalyst.id_of(one) for one in items(node.references().toSeq()))
