"""Makes Spark's analyser rewrite MERGE, UPDATE and DELETE to a query that returns row changes of the target table.

Each row of the query is a change: an operation, new values, and the position of the stored row. The query includes
Spark's conversions, default values, checks of nulls, and its check that a stored row has only one source row. The
target of the statement is replaced by an in-memory copy of the table's definition with the mode merge-on-read, because
the query for copy-on-write also returns unchanged rows. The query never runs on this copy: `row_changes.py` replaces
the copy by the rows that an index locates. Therefore Spark itself decides how these rows change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import SparkSession

from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import to_list
from seamark.connector.spark.statements.plan_nodes import PlanBuilder
from seamark.connector.spark.statements.targets import (
    SPARK_TABLE,
    MustRunInIceberg,
    StatementTarget,
    check_session,
    find_relation_target,
    find_target_relation,
)
from seamark.connector.write.upserts import MERGE_ON_READ

MERGE, UPDATE, DELETE = "MERGE", "UPDATE", "DELETE"
KINDS = {"MergeIntoTable": MERGE, "UpdateTable": UPDATE, "DeleteFromTable": DELETE}
"""The kinds of statements, by Spark's name of the parsed node."""
_OPERATION_TABLE = "org.apache.spark.sql.connector.write.RowLevelOperationTable"
_MODES = ("write.delete.mode", "write.update.mode", "write.merge.mode")


@dataclass(frozen=True)
class RowStatement:
    """A statement that changes rows, in the form of a query.

    Attributes:
        query: The query that returns the changes.
        stored: The leaf of the query with the stored rows.
        source: The node with the source of a MERGE, or None.
        condition: The ON of a MERGE, or the condition of an UPDATE or DELETE.
        appends: Whether the query returns only new rows, without a column for the operation.
    """

    kind: str
    target: StatementTarget
    query: Node
    stored: Node
    source: Node | None = None
    condition: Node | None = None
    appends: bool = False
    filter: Node | None = None
    """The node with the condition of an UPDATE or DELETE."""
    join: Node | None = None
    """The node that joins the stored rows of a MERGE with its source."""

    def with_parts(self, builder: PlanBuilder, parts: Sequence[tuple[Node, Node]]) -> RowStatement:
        """Return the statement with parts of its condition replaced: pairs of an old part and a new part."""
        assert self.filter is not None
        condition = builder.with_operands(self.condition, parts)
        new_filter = self.filter.copy(condition, self.filter.child())
        query = builder.replace_nodes(self.query, [(self.filter, new_filter)])
        return replace(self, query=query, condition=condition, filter=new_filter)


class RowStatementReader:
    """Converts the statements of one session to queries."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._catalyst = Catalyst(spark)
        self._builder = PlanBuilder(spark)

    def read(self, statement: Node) -> RowStatement:
        """Return the query of a parsed statement. If Spark cannot analyse it, the error is Spark's error.

        The statement is analysed with a copy of the table that has the mode merge-on-read, because Spark rewrites it
        to a query of the changed rows only in this mode.

        Raises:
            MustRunInIceberg: Iceberg has to run the statement.
        """
        kind = KINDS[self._catalyst.find_kind(statement)]
        check_session(self._spark)
        if kind == MERGE and bool(statement.withSchemaEvolution()):
            raise MustRunInIceberg("the statement may change the table's schema")
        if kind == MERGE and not statement.notMatchedBySourceActions().isEmpty():
            raise MustRunInIceberg("WHEN NOT MATCHED BY SOURCE can change every stored row")
        name = self._find_name_node(statement.targetTable() if kind == MERGE else statement.table())
        table = self._catalyst.analyze(name)
        relation = find_target_relation(self._spark, table)
        target = find_relation_target(self._catalyst, relation)
        # Spark replaces a node only if the new node is not equal to the old node. Tables with equal names are equal.
        copy = relation.copy(
            self._copy_with_merge_on_read(relation.table()),
            relation.output(),
            relation.catalog(),
            relation.identifier(),
            relation.options(),
            relation.timeTravelSpec(),
        ).newInstance()
        resolved_relation = self._builder.replace_nodes(table, [(relation, copy)])
        plan = self._catalyst.analyze(self._builder.replace_nodes(statement, [(name, resolved_relation)]))
        return self._read_rewritten(kind, target, plan, copy)

    # The target

    def _find_name_node(self, node: Node) -> Node:
        """Return the node with the name of the target table, which may be below aliases.

        Raises:
            MustRunInIceberg: The target is not the name of a table.
        """
        while self._catalyst.find_kind(node) == "SubqueryAlias":
            node = node.child()
        if self._catalyst.find_kind(node) != "UnresolvedRelation":
            raise MustRunInIceberg("the target is not the name of a table")
        return node

    def _copy_with_merge_on_read(self, table: Node) -> Node:
        """Return a copy of Spark's table with the mode merge-on-read.

        In this mode, Spark rewrites a MERGE, UPDATE or DELETE to a query that returns the changed rows. The copy has
        its own metadata in memory, so the properties of the stored table do not change.
        """
        iceberg = table.table()
        operations = iceberg.operations()
        properties = self._builder.find_class("java.util.HashMap")(operations.current().properties())
        for mode in _MODES:
            properties.put(mode, MERGE_ON_READ)
        metadata = operations.current().replaceProperties(properties)
        static_operations = self._load_iceberg_class("StaticTableOperations")(
            metadata, operations.io(), operations.locationProvider()
        )
        return self._load_iceberg_class("spark.source.SparkTable")(
            self._load_iceberg_class("BaseTable")(static_operations, iceberg.name())
        )

    def _load_iceberg_class(self, name: str) -> Any:
        return self._builder.find_class(f"org.apache.iceberg.{name}")

    # The query

    def _read_rewritten(self, kind: str, target: StatementTarget, plan: Node, copy: Node) -> RowStatement:
        """Return the query in the plan to which Spark has rewritten the statement.

        Args:
            kind: MERGE, UPDATE or DELETE.
            target: The table that the statement changes.
            plan: The plan of the statement after Spark's analysis.
            copy: The leaf with the copy of the table, with which the statement was analysed.

        Raises:
            MustRunInIceberg: Iceberg has to run the statement.
        """
        catalyst = self._catalyst
        plan = self._builder.replace_current_time(catalyst.inline_with(plan))
        command = catalyst.find_kind(plan)
        if command not in ("WriteDelta", "AppendData"):
            raise MustRunInIceberg(
                f"Spark does not rewrite it to changes of rows, but to {command or 'another command'}"
            )
        query = plan.query()
        stored_leaf = self._find_stored(query, target, copy)
        if kind == MERGE:
            join = self._find_above(query, stored_leaf, "Join")
            # Without a clause for matched rows, Spark appends rows of the source, which is the left side of the join.
            # Otherwise, the left side is the table.
            source = join.left() if command == "AppendData" else join.right()
            appends = command == "AppendData"
            return RowStatement(kind, target, query, stored_leaf, source, join.condition().get(), appends, join=join)
        node = self._find_above(query, stored_leaf, "Filter")
        return RowStatement(kind, target, query, stored_leaf, None, node.condition(), filter=node)

    def _find_stored(self, query: Node, target: StatementTarget, copy: Node) -> Node:
        """Return the leaf of the query that reads the stored rows.

        Args:
            query: The query that returns the changed rows.
            target: The table that the statement changes.
            copy: The leaf with the copy of the table, with which the statement was analysed.

        Raises:
            MustRunInIceberg: Another part of the statement reads the table.
        """
        stored_leaves = []
        for leaf in self._catalyst.leaves(query):
            if not self._catalyst.is_catalog_table(leaf):
                continue
            table, kind = leaf.table(), self._catalyst.read_class_name(leaf.table())
            if kind == _OPERATION_TABLE or leaf.fastEquals(copy):
                stored_leaves.append(leaf)
            elif kind == SPARK_TABLE and str(table.table().uuid()) == target.uuid:
                raise MustRunInIceberg("the statement also reads the table that it changes")
        if len(stored_leaves) != 1:
            raise MustRunInIceberg("the statement also reads the table that it changes")
        return stored_leaves[0]

    def _find_above(self, query: Node, leaf: Node, kind: str) -> Node:
        """Return the lowest node of this kind above the leaf.

        Raises:
            MustRunInIceberg: The leaf is in a subquery, or there is no such node.
        """
        node, ancestor = query, None
        while not node.fastEquals(leaf):
            if self._catalyst.find_kind(node) == kind:
                ancestor = node
            for child in to_list(node.children()):
                if any(lower_leaf.fastEquals(leaf) for lower_leaf in to_list(child.collectLeaves())):
                    node = child
                    break
            else:
                raise MustRunInIceberg("the stored rows are read in a subquery")
        if ancestor is None:
            raise MustRunInIceberg("the statement has no condition")
        return ancestor
