"""Finds the keys of the stored rows that a statement can change. Plans of Spark compute the keys.

    MERGE … ON t.id = s.id                  the values of s.id
    UPDATE, DELETE … WHERE id IN (1, 2)     the constants
    UPDATE, DELETE … WHERE id IN (SELECT …) the rows of the subquery

Only two kinds of equality are used: of a column of the target with a value of the same type, and of an int column with
a bigint. A row without one of these values never meets the condition, because Spark and the key lookup compare values
in the same way, including NaN and both zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import SparkColumn
from seamark.connector.spark.scala import to_list
from seamark.connector.spark.statements.plan_nodes import PlanBuilder

_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_FLOATS = frozenset({"float", "double"})


@dataclass(frozen=True)
class KeyValues:
    """The values that a condition requires in some columns.

    Attributes:
        columns: The columns of the changed table.
        make_plan: A function that returns the plan of the values. It is called only if the values are needed.
        attribute_ids: For each column, the id of the attribute with its values, or None if they come from another
            expression.
    """

    columns: tuple[SparkColumn, ...]
    make_plan: Callable[[], Node]
    attribute_ids: tuple[int | None, ...]
    is_exact: bool = False
    """Whether the condition is true for exactly the stored rows with these values.

    It is False for floats, because IN with many constants distinguishes the two zeros.
    """

    @cached_property
    def plan(self) -> Node:
        """A plan that returns the values, with the names of the columns."""
        return self.make_plan()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)


def find_join_keys(
    catalyst: Catalyst,
    builder: PlanBuilder,
    condition: Node,
    columns: Mapping[int, SparkColumn],
    outputs: Iterable[int],
    source: Callable[[], Node],
) -> KeyValues | None:
    """Find the columns of a join's target that must equal an expression of the source, and return these values.

    Return None if the condition compares no column of the target for equality with a value of the source.

    Args:
        catalyst: Access to the plan.
        builder: Builds plans in the session.
        condition: The condition of the join.
        columns: The columns of the target, by the ids of their attributes.
        outputs: The ids of the source's attributes.
        source: A function that returns a plan of the source's rows.
    """
    source_ids = frozenset(outputs)
    pairs: dict[SparkColumn, Node] = {}
    parts = catalyst.list_operands(condition, "And")
    for part in parts:
        if catalyst.find_kind(part) != "EqualTo":
            continue
        for side, other in ((part.left(), part.right()), (part.right(), part.left())):
            column, used_ids = _find_column(catalyst, side, columns), catalyst.list_reference_ids(other)
            if column is not None and used_ids and used_ids <= source_ids and other.deterministic():
                pairs.setdefault(column, other)
    if not pairs:
        return None
    return _project_values(catalyst, builder, pairs, source, is_exact=len(pairs) == len(parts))


def find_condition_keys(
    catalyst: Catalyst, builder: PlanBuilder, condition: Node, columns: Mapping[int, SparkColumn]
) -> list[KeyValues]:
    """Return the values that each part of a condition requires in columns of the target.

    A part is an equality with a constant, IN with constants, or IN with a subquery. The values are exact only if the
    condition has no other part.
    """
    key_values = []
    parts = catalyst.list_operands(condition, "And")
    is_only_part = len(parts) == 1
    for part in parts:
        kind = catalyst.find_kind(part)
        if kind == "EqualTo":
            for side, other in ((part.left(), part.right()), (part.right(), part.left())):
                column = _find_column(catalyst, side, columns)
                if column is not None and catalyst.is_constant(other):
                    constants = builder.build_seq([other])
                    key_values.append(_explode_constants(builder, column, constants, is_exact=is_only_part))
        elif kind == "In":
            column, values = _find_column(catalyst, part.value(), columns), part.list()
            if column is not None and builder.are_constants(values):
                key_values.append(_explode_constants(builder, column, values, is_exact=is_only_part))
        elif kind == "InSubquery":
            value_columns = [_find_column(catalyst, side, columns) for side in to_list(part.values())]
            plan = part.query().plan()
            key_columns = [column for column in value_columns if column is not None]
            if len(key_columns) == len(value_columns) and part.query().outerAttrs().isEmpty() and plan.deterministic():
                outputs = to_list(plan.output())
                pairs = dict(zip(key_columns, outputs, strict=True))
                has_each_column_once = len(pairs) == len(key_columns)
                key_values.append(
                    _project_values(
                        catalyst,
                        builder,
                        pairs,
                        partial(_return_plan, plan),
                        is_exact=is_only_part and has_each_column_once,
                    )
                )
    return key_values


def _return_plan(plan: Node) -> Node:
    return plan


def _project_values(
    catalyst: Catalyst,
    builder: PlanBuilder,
    pairs: Mapping[SparkColumn, Node],
    child: Callable[[], Node],
    *,
    is_exact: bool,
) -> KeyValues:
    """Return key values that are computed from the rows of a plan.

    Args:
        catalyst: Access to the plan.
        builder: Builds plans in the session.
        pairs: The expressions of the values, by the column of the target that equals the value.
        child: A function that returns the plan of the rows.
        is_exact: Whether the condition compares nothing but these values.
    """

    def make_plan() -> Node:
        return builder.project([builder.name_output(value, column.name) for column, value in pairs.items()], child())

    numbers = [
        catalyst.read_id(value) if catalyst.find_kind(value) == "AttributeReference" else None
        for value in pairs.values()
    ]
    return KeyValues(tuple(pairs), make_plan, tuple(numbers), is_exact and _are_exact(pairs))


def _explode_constants(builder: PlanBuilder, column: SparkColumn, values: Node, *, is_exact: bool) -> KeyValues:
    def make_plan() -> Node:
        return builder.explode_values(values, column.name)

    return KeyValues((column,), make_plan, (None,), is_exact and _are_exact([column]))


def _are_exact(columns: Iterable[SparkColumn]) -> bool:
    return not any(column.kind in _FLOATS for column in columns)


def select_fitting_rows(values: pa.Table, columns: Iterable[SparkColumn]) -> pa.Table:
    """Return the rows of key values that a stored row can equal.

    Rows with nulls, and with numbers outside the range of an int column, are left out.
    """
    for column in columns:
        values = values.filter(pa.array(fits_column(values[column.name], column)))
    return values


def fits_column(values: pa.ChunkedArray, column: SparkColumn) -> npt.NDArray[np.bool_]:
    """Return whether a stored value can equal each of these values, as bool[values]."""
    can_match = pc.is_valid(values)
    if column.kind == "int" and pa.types.is_int64(values.type):
        is_within = pc.and_(pc.greater_equal(values, _INT_MIN), pc.less_equal(values, _INT_MAX))
        can_match = pc.and_(can_match, pc.fill_null(is_within, False))
    mask: npt.NDArray[np.bool_] = can_match.to_numpy()
    return mask


def _find_column(catalyst: Catalyst, node: Node, columns: Mapping[int, SparkColumn]) -> SparkColumn | None:
    """Return the target's column in a node, or None. The node may cast an int column to bigint."""
    node = catalyst.remove_identity_casts(node)
    kind = catalyst.read_type(node)
    if catalyst.find_kind(node) == "Cast" and kind == "bigint" and catalyst.read_type(node.child()) == "int":
        node, kind = catalyst.remove_identity_casts(node.child()), "int"
    if catalyst.find_kind(node) != "AttributeReference":
        return None
    column = columns.get(catalyst.read_id(node))
    return column if column is not None and column.kind == kind else None
