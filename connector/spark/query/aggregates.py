"""Reads the aggregates of Spark's plans: conditions on the rows that they use, and expressions of minima and maxima."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import to_list
from seamark.formats.protocol.wire import MAXIMUM, MINIMUM

_WITHOUT_NULLS = ("Sum", "Average", "Min", "Max", "Count")
"""The aggregates that ignore nulls, and return the same value for no rows as for rows of nulls."""


_EXTREMES = {"Min": MINIMUM, "Max": MAXIMUM}


class AggregateExtreme(NamedTuple):
    """The minimum or maximum of an expression.

    Attributes:
        kind: `MINIMUM` or `MAXIMUM`.
        is_filtered: Whether the aggregate has a FILTER clause.
    """

    expression: Node
    kind: str
    is_filtered: bool


def find_extreme(catalyst: Catalyst, output: Node) -> AggregateExtreme | None:
    """Return the minimum or maximum that an output of an aggregation is, or None if it is neither."""
    aggregate = output.child() if catalyst.find_kind(output) == "Alias" else output
    if catalyst.find_kind(aggregate) != "AggregateExpression":
        return None
    function = aggregate.aggregateFunction()
    extreme = _EXTREMES.get(catalyst.find_kind(function))
    return (
        None if extreme is None else AggregateExtreme(function.child(), extreme, bool(aggregate.filter().isDefined()))
    )


def list_row_conditions(catalyst: Catalyst, outputs: Sequence[Node]) -> list[Node]:
    """Return conditions such that each row that affects an output of an aggregation meets one of the conditions.

    The aggregation has no grouping keys. The conditions come from FILTER, and from CASE inside an aggregate. The list
    is empty if any row may affect an output.
    """
    row_conditions: list[Node] = []
    remaining_outputs = list(outputs)
    while remaining_outputs:
        node = remaining_outputs.pop()
        kind = catalyst.find_kind(node)
        if kind == "AggregateExpression":
            conditions = _find_conditions(catalyst, node)
            if not conditions:
                return []
            row_conditions += conditions
        elif kind in ("", "PythonUDF", "PythonUDAF"):
            return []  # The function may not be Spark's, so it may use any row.
        else:
            remaining_outputs += to_list(node.children())
    return row_conditions


def _find_conditions(catalyst: Catalyst, aggregate: Node) -> list[Node]:
    """Return the conditions of an aggregate such that it ignores rows that meet none of them.

    The condition is that of FILTER, or that of a CASE without ELSE in an aggregate that ignores nulls. The list is
    empty if the aggregate may use any row.
    """
    if aggregate.filter().isDefined():
        return [aggregate.filter().get()]
    function = aggregate.aggregateFunction()
    values = to_list(function.children()) if catalyst.find_kind(function) in _WITHOUT_NULLS else []
    if len(values) != 1:
        return []
    value = values[0]
    while catalyst.find_kind(value) == "Cast":  # A cast of null is null.
        value = value.child()
    match catalyst.find_kind(value):
        case "If" if _is_null(catalyst, value.falseValue()):
            return [value.predicate()]
        case "CaseWhen":
            otherwise = value.elseValue()
            if otherwise.isEmpty() or _is_null(catalyst, otherwise.get()):
                return [branch._1() for branch in to_list(value.branches())]
    return []


def _is_null(catalyst: Catalyst, node: Node) -> bool:
    while catalyst.find_kind(node) == "Cast":
        node = node.child()
    return catalyst.find_kind(node) == "Literal" and node.value() is None
