"""Finds how a query uses each of its tables in Spark's plan, for the query history.

The query does not depend on the uses. Each call to the JVM takes time, so the uses of a large plan are not read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from seamark.connector.plans.scan import TableUse
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import to_list, to_strings

_NODES_MAX = 200
"""The maximum number of plan nodes, and of expressions in the outputs of one aggregation, that are read."""
_COLUMNS_MAX, _KEYS_MAX = 64, 32
"""The maximum numbers of columns, and of grouping keys or aggregates, that the server accepts."""
_NAME_CHARACTERS_MAX = 500
_FUNCTIONS = {"Count": "count", "Sum": "sum", "Min": "min", "Max": "max", "Average": "avg"}
_OTHER = "other"
_PASSING = frozenset({"SubqueryAlias", "View", "Distinct", "Expand"})
"""Nodes that only pass on the attributes of their child. A column is read if another node uses it."""
_ID = re.compile(r"#([0-9]+)")
_NEW_NAME = " AS "
"""Spark writes this text in each output of a projection that is not an attribute of the child."""


class _PlanTooLarge(Exception):
    """Raised if a plan has more than `_NODES_MAX` nodes."""


def read_table_uses(catalyst: Catalyst, plan: Node, markers: Mapping[int, int]) -> dict[int, TableUse]:
    """Return how a query uses each of its tables, for the query history: the columns, grouping keys and aggregates.

    Args:
        catalyst: Access to the plan.
        plan: The analysed plan.
        markers: The number of the table to which each attribute belongs, by the id of the attribute. Tables are
            numbered by their references in the query's text (the markers of `name_positions.py`).

    Returns:
        The uses, by the numbers of the tables. The result is empty if the plan is too large.
    """
    reader = _UseReader(catalyst, markers)
    try:
        reader.read(plan)
    except (_PlanTooLarge, RecursionError):
        return {}
    return {table_number: reader.build_use(table_number) for table_number in set(markers.values())}


class _UseReader:
    """Reads the uses of the tables of one plan."""

    def __init__(self, catalyst: Catalyst, markers: Mapping[int, int]) -> None:
        self._catalyst = catalyst
        self._markers = markers
        self._nodes_left = _NODES_MAX
        self._columns: defaultdict[int, set[str]] = defaultdict(set)
        self._grouping: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._aggregates: defaultdict[int, dict[tuple[str, str], None]] = defaultdict(dict)

    def read(self, plan: Node) -> None:
        self._has_subqueries = self._catalyst.has_subqueries(plan)
        self._add_columns(self._catalyst.list_attributes(plan))
        self._read_node(plan)

    def build_use(self, table_number: int) -> TableUse:
        columns = tuple(sorted(self._columns[table_number]))
        return TableUse(
            tuple(sorted(self._grouping[table_number])[:_KEYS_MAX]),
            tuple(self._aggregates[table_number])[:_KEYS_MAX],
            columns if len(columns) <= _COLUMNS_MAX else (),
        )

    def _read_node(self, node: Node) -> set[int]:
        """Read a node and the nodes below it, and return the numbers of its tables.

        Nodes that only pass on columns (`_PASSING`) use no column. A projection uses only the columns from which it
        computes new values, because any other column counts only where a node above uses it.

        Raises:
            _PlanTooLarge: The plan has more than `_NODES_MAX` nodes.
        """
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise _PlanTooLarge
        kind, children = self._catalyst.find_kind(node), self._catalyst.list_children(node)
        child_tables = set().union(*map(self._read_node, children))
        if not children:
            return {
                self._markers[number] for number, _ in self._catalyst.list_attributes(node) if number in self._markers
            }
        if self._has_subqueries:
            for subquery in to_list(node.subqueries()):
                self._add_columns(self._catalyst.list_attributes(subquery))
                self._read_node(subquery)
        if kind == "Project":
            self._add_columns(self._find_computed(node))
        elif kind not in _PASSING:
            self._add_columns(self._catalyst.list_references(node))
        if len(children) > 1 and kind != "Join":  # A set operation reads all columns of its inputs.
            for child in children:
                self._add_columns(self._catalyst.list_attributes(child))
        if kind == "Aggregate":
            self._read_aggregate(node, child_tables)
        return child_tables

    def _find_computed(self, project: Node) -> list[tuple[int, str]]:
        """Return the ids and names of the attributes from which a projection computes new values.

        The text of the outputs is read, because it takes two calls to the JVM for any number of outputs.
        """
        texts = [text for text in to_strings(project.projectList()) if _NEW_NAME in text]
        ids = {int(number) for text in texts for number in _ID.findall(text)}
        return (
            [(number, name) for number, name in self._catalyst.list_references(project) if number in ids] if ids else []
        )

    def _add_columns(self, attributes: Iterable[tuple[int, str]]) -> None:
        for number, name in attributes:
            if number in self._markers and len(name) <= _NAME_CHARACTERS_MAX:
                self._columns[self._markers[number]].add(name)

    def _read_aggregate(self, node: Node, child_tables: set[int]) -> None:
        """Record the grouping keys and the aggregates of an aggregation for the tables whose columns they use.

        An aggregate of an expression is recorded without a column name for every table below the node.

        Args:
            node: The aggregation.
            child_tables: The numbers of the tables below the node.
        """
        for key in to_list(node.groupingExpressions()):
            for number, name in self._catalyst.list_references(key):
                for table_number in self._find_possible_tables(number, name, child_tables):
                    self._grouping[table_number][name] = None
        for aggregate in self._list_aggregates(to_list(node.aggregateExpressions())):
            function = aggregate.aggregateFunction()
            values = to_list(function.children())
            is_column = len(values) == 1 and self._catalyst.find_kind(values[0]) == "AttributeReference"
            (number, name) = next(iter(self._catalyst.list_references(values[0]))) if is_column else (0, "")
            for table_number in self._find_possible_tables(number, name, child_tables) if is_column else child_tables:
                self._aggregates[table_number][_FUNCTIONS.get(self._catalyst.find_kind(function), _OTHER), name] = None

    def _list_aggregates(self, outputs: list[Node]) -> Iterator[Node]:
        """Yield the aggregates in the outputs of an aggregation. Only the first `_NODES_MAX` expressions are read."""
        pending_nodes, expressions_left = outputs[::-1], _NODES_MAX
        while pending_nodes and expressions_left:
            expression = pending_nodes.pop()
            expressions_left -= 1
            if self._catalyst.find_kind(expression) == "AggregateExpression":
                yield expression
            elif self._catalyst.find_kind(expression) != "AttributeReference":
                pending_nodes += to_list(expression.children())[::-1]

    def _find_possible_tables(self, attribute_id: int, name: str, child_tables: set[int]) -> set[int]:
        """Return the numbers of the tables to which an attribute may belong. There are none for a very long name.

        The tables below the node have the numbers `child_tables`.

        ROLLUP and subqueries change the ids of attributes. An attribute with a new id may belong to each table below
        the node, and the server drops names that a table does not have.
        """
        if len(name) > _NAME_CHARACTERS_MAX:
            return set()
        table_number = self._markers.get(attribute_id)
        return child_tables if table_number is None else {table_number}
