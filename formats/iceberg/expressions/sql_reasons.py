"""Explain to users why a part of an SQL predicate is not used."""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from seamark.formats.iceberg.expressions.sql_literals import parse_literal
from seamark.formats.iceberg.expressions.typed_literals import TypedLiteral
from seamark.formats.iceberg.types.types import get_base_name

_SHOWN_MAX = 60
_FORMS = {
    **dict.fromkeys(("int", "long", "float", "double", "decimal"), "a number without quotes"),
    "boolean": "true or false",
    "string": "text in single quotes",
    "date": "DATE '2026-01-31'",
    "time": "TIME '23:59:00'",
    **dict.fromkeys(("timestamp", "timestamp_ns"), "TIMESTAMP '2026-01-31 23:59:00'"),
    **dict.fromkeys(("timestamptz", "timestamptz_ns"), "TIMESTAMP '2026-01-31 23:59:00 UTC'"),
    "uuid": "the UUID's 36 characters in single quotes",
    "fixed": "bytes as X'00ff', as many as the type has",
    "binary": "bytes as X'00ff'",
}
"""The SQL form of a literal of each Iceberg type."""


def explain_misfit(literal: TypedLiteral, name: str, kind: str) -> str:
    """Return the reason why the literal is not compared with the term: engines convert one of them in different ways.

    Args:
        literal: The literal.
        name: The name of the term's column.
        kind: The type of the term.
    """
    if literal.kind in ("number", "double", "boolean"):
        text = literal.text
    else:
        text = f"X'{literal.text}'" if literal.kind == "bytes" else f"'{literal.text}'"
    reason = f"{_abbreviate_text(text)} is not a literal of {_abbreviate_text(name)}, which is {kind}"
    form = _FORMS.get(get_base_name(kind))
    return f"{reason}; write {form}" if form else reason


def explain_unsupported(node: exp.Expr, is_column: Callable[[str], bool]) -> str:
    """Return the reason why an Iceberg expression cannot represent the node.

    Args:
        node: The node.
        is_column: A function that returns whether a name is in the table's schemas.
    """
    for side in _list_operands(node):
        if isinstance(side, exp.Column) and len(side.parts) == 1 and not is_column(side.name):
            is_quoted = side.this.args.get("quoted")
            hint = "double quotes and backticks are for names, and " if is_quoted else ""
            name = _abbreviate_text(side.name)
            return f"{hint}{name} is not a column; write '{name}' for a string"
    sides = _list_operands(node)
    if len(sides) == 2 and all(parse_literal(side) is None for side in sides):
        if all(isinstance(side, exp.Column | exp.Dot) for side in sides):
            return "the condition compares two columns, and planning compares a column with a value"
        return "one side must be a value, such as 5 or 'text'"
    if isinstance(node, exp.Like | exp.Escape):
        return "planning uses only the text of a LIKE pattern before its first wildcard"
    function = next(node.find_all(exp.Func), None)
    if function is not None and not isinstance(function, exp.Connector | exp.Cast):
        function_name = function.name if isinstance(function, exp.Anonymous) else function.sql_name()
        return f"{_abbreviate_text(function_name.lower())}() is not a transform of a column"
    return "Iceberg expressions cannot represent it"


def _list_operands(node: exp.Expr) -> list[exp.Expr]:
    if isinstance(node, exp.Binary) and not isinstance(node, exp.Connector | exp.Dot):
        return [node.this, node.expression]
    return []


def _abbreviate_text(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
