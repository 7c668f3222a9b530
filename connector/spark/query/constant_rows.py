"""Finds the constant rows of a query: the rows of VALUES, and the elements of a constant array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seamark.connector.plans.literals import Literal
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.conditions import SparkColumn, make_literal
from seamark.connector.spark.scala import to_list

CONSTANT_ROWS_MAX = 1_000
_KINDS = ("int", "bigint", "string", "date", "timestamp", "timestamp_ntz")


def find_constant_columns(catalyst: Catalyst, node: Node) -> list[tuple[int, SparkColumn, tuple[Literal, ...]]]:
    """Return the columns with supported types of the constant rows of a plan node.

    The node is VALUES (`LocalRelation`), or `explode` of a constant array (`Generate`). The result is empty for more
    than `CONSTANT_ROWS_MAX` rows of VALUES. A column is left out if one of its values is not supported.

    Returns:
        For each column: the id of its attribute, the column, and its distinct values without null.
    """
    match catalyst.find_kind(node):
        case "LocalRelation":
            if node.isStreaming() or node.data().size() > CONSTANT_ROWS_MAX:
                return []
            rows = to_list(node.data())
            attribute_values = [
                (attribute, [_read_value(row, number, attribute) for row in rows])
                for number, attribute in enumerate(to_list(node.output()))
            ]
        case "Generate":
            outputs, array = to_list(node.generatorOutput()), node.generator()
            array = array.child() if catalyst.find_kind(array) == "Explode" and len(outputs) == 1 else None
            if array is None or not catalyst.read_type(array).startswith("array<"):
                return []
            attribute_values = [(outputs[0], list(_read_elements(catalyst, array, outputs[0])))]
        case _:
            return []
    columns = []
    for attribute, values in attribute_values:
        kind = catalyst.read_type(attribute)
        literals = (
            tuple(dict.fromkeys(make_literal(value, kind) for value in values if value is not None))
            if kind in _KINDS
            else ()
        )
        if literals and None not in literals:
            number = catalyst.read_id(attribute)
            columns.append(
                (number, SparkColumn(str(number), kind), tuple(literal for literal in literals if literal is not None))
            )
    return columns


def _read_value(row: Any, number: int, attribute: Node) -> Any:
    return None if row.isNullAt(number) else row.get(number, attribute.dataType())


def _read_elements(catalyst: Catalyst, array: Node, attribute: Node) -> Iterable[Any]:
    if catalyst.find_kind(array) == "CreateArray":
        values = to_list(array.children())
        if len(values) <= CONSTANT_ROWS_MAX and all(catalyst.find_kind(value) == "Literal" for value in values):
            yield from (literal.value() for literal in values)
    elif (
        catalyst.find_kind(array) == "Literal"
        and array.value() is not None
        and array.value().numElements() <= CONSTANT_ROWS_MAX
    ):
        yield from (_read_value(array.value(), number, attribute) for number in range(array.value().numElements()))
