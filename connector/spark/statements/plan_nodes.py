"""Builds plans of Spark through py4j: creates nodes, and replaces nodes of plans.

Spark identifies an attribute by a number. A new node gets the attributes of the node that it replaces, so the
references in the nodes above stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.classic.column import _to_seq
from pyspark.sql.types import StructType

from seamark.connector.spark.query.catalyst import Node
from seamark.connector.spark.scala import OPTIMIZER, SPARK, find_statics, to_list

_LOGICAL, _EXPRESSIONS = f"{SPARK}catalyst.plans.logical.", f"{SPARK}catalyst.expressions."


class PlanBuilder:
    """Builds plans of one Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._statics = find_statics(spark)

    # Frames and plans

    def frame(self, plan: Node) -> DataFrame:
        return DataFrame(
            self.find_class(f"{SPARK}classic.Dataset").ofRows(self._spark._jsparkSession, plan), self._spark
        )

    def replace_current_time(self, plan: Node) -> Node:
        """Return the plan with the current time as literals, so that parts of it that run later use the same time."""
        return self._load_object(OPTIMIZER, "ComputeCurrentTime").apply(plan)

    def build_local_rows(self, rows: pa.Table, schema: StructType) -> Node:
        """Return a plan of rows that the driver has."""
        table = pa.table([column.combine_chunks() for column in rows.columns], names=rows.column_names)
        return self._spark.createDataFrame(table, schema)._jdf.queryExecution().analyzed()

    # Nodes

    def build_seq(self, nodes: Iterable[Node]) -> Node:
        return _to_seq(self._spark._sc, list(nodes))

    def project(self, outputs: Iterable[Node], child: Node) -> Node:
        return self._construct(_LOGICAL, "Project", self.build_seq(outputs), child)

    def filter_rows(self, condition: Node, child: Node) -> Node:
        return self._construct(_LOGICAL, "Filter", condition, child)

    def limit(self, rows: int, child: Node) -> Node:
        return self._load_object(_LOGICAL, "Limit").apply(self.build_literal(rows), child)

    def build_literal(self, value: object) -> Node:
        return self._load_object(_EXPRESSIONS, "Literal").apply(value)

    def build_default(self, kind: Node) -> Node:
        """Return Spark's default literal of a type, such as 0 or an empty string. It is not null."""
        return self._load_object(_EXPRESSIONS, "Literal").default(kind)

    def build_empty_frame(self) -> DataFrame:
        """Return a frame that has neither rows nor columns."""
        return self.frame(self.limit(0, self._make_one_row()))

    def as_attribute(self, expression: Node, attribute: Node, name: str | None = None) -> Node:
        """Return the expression as an output with the id of an attribute, so that references to the attribute read it.

        Args:
            expression: The expression.
            attribute: The attribute.
            name: The name of the attribute, or None to read it from the attribute.
        """
        return self._make_alias(expression, str(attribute.name()) if name is None else name, attribute.exprId())

    def name_output(self, expression: Node, name: str) -> Node:
        """Return the expression as an output with a name and a new id."""
        return self._make_alias(expression, name, self._load_object(_EXPRESSIONS, "NamedExpression").newExprId())

    def with_subquery(self, part: Node, plan: Node) -> Node:
        """Return the condition `… IN (SELECT …)` with a new subquery, whose plan has the same attributes."""
        return part.copy(part.values(), part.query().withNewPlan(plan))

    def with_operands(self, condition: Node, parts: Sequence[tuple[Node, Node]]) -> Node:
        """Return a conjunction with some of its operands replaced.

        Args:
            condition: The conjunction, or a condition without AND.
            parts: Pairs of an operand and its replacement.
        """
        for old, new_part in parts:
            if condition.fastEquals(old):
                return new_part
        if str(condition.getClass().getSimpleName()) != "And":
            return condition
        return condition.copy(self.with_operands(condition.left(), parts), self.with_operands(condition.right(), parts))

    def are_constants(self, values: Node) -> bool:
        """Return whether all values in a Scala Seq are constants. One call to the JVM checks all of them."""
        array = self._make_array(values)
        return bool(array.foldable()) and bool(array.deterministic())

    def explode_values(self, values: Node, name: str) -> Node:
        """Return a plan with a row for each of the constants in a Scala Seq."""
        rows = self._construct(_EXPRESSIONS, "Explode", self._make_array(values))
        return self.project([self.name_output(rows, name)], self._make_one_row())

    def _make_one_row(self) -> Node:
        return self._load_object(_LOGICAL, "OneRowRelation").apply()

    def _make_array(self, values: Node) -> Node:
        return self._load_object(_EXPRESSIONS, "CreateArray").apply(values)

    def _make_alias(self, expression: Node, name: str, number: Node) -> Node:
        no_value, no_items = (
            self._load_object("scala.", "None"),
            self._load_object("scala.collection.immutable.", "Nil"),
        )
        return self._construct(_EXPRESSIONS, "Alias", expression, name, number, no_items, no_value, no_items)

    def _construct(self, package: str, kind: str, *arguments: Any) -> Node:
        return self._statics.find_class(f"{package}{kind}")(*arguments)

    def _load_object(self, package: str, name: str) -> Any:
        return self._statics.find_object(f"{package}{name}")

    def find_class(self, name: str) -> Any:
        """Return a class of the JVM."""
        return self._statics.find_class(name)

    # Replacement of nodes

    def replace_nodes(self, plan: Node, replacements: Sequence[tuple[Node, Node]]) -> Node:
        """Return the plan in which new nodes replace old nodes. Subqueries do not change.

        Args:
            plan: The root of the plan.
            replacements: Pairs of an old node and its new node.
        """
        for old, new_node in replacements:
            if plan.fastEquals(old):
                return new_node
        children = to_list(plan.children())
        return (
            plan.withNewChildren(self.build_seq([self.replace_nodes(child, replacements) for child in children]))
            if children
            else plan
        )
