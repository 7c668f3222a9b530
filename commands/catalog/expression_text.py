"""Convert Iceberg expressions from JSON to text for people, as SQL where possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN_VALUES_MAX = 5
_OPERATORS = {"eq": "=", "not-eq": "<>", "lt": "<", "lt-eq": "<=", "gt": ">", "gt-eq": ">="}
_TESTS = {"is-null": "IS NULL", "not-null": "IS NOT NULL", "is-nan": "IS NaN", "not-nan": "IS NOT NaN"}
_PREFIXES = {"starts-with": "LIKE", "not-starts-with": "NOT LIKE"}


def format_expression(expression: Any) -> str:
    """Return an expression as text. A long list of values is cut after its first values."""
    if not isinstance(expression, Mapping):
        return str(expression).lower()
    kind = str(expression.get("type"))
    if kind in ("and", "or"):
        return f" {kind.upper()} ".join(
            _write_operand(expression[side], parent_kind=kind) for side in ("left", "right")
        )
    if kind == "not":
        return f"NOT ({format_expression(expression['child'])})"
    if kind in ("true", "false"):
        return kind
    term = _write_term(expression.get("term"))
    if kind in _TESTS:
        return f"{term} {_TESTS[kind]}"
    if kind in ("in", "not-in"):
        values = expression["values"]
        shown_values = ", ".join(map(_write_value, values[:SHOWN_VALUES_MAX]))
        omission = f", … {len(values):,} values" if len(values) > SHOWN_VALUES_MAX else ""
        return f"{term} {kind.replace('-', ' ').upper()} ({shown_values}{omission})"
    if kind in _PREFIXES:
        return f"{term} {_PREFIXES[kind]} {_write_value(str(expression['value']) + '%')}"
    return f"{term} {_OPERATORS.get(kind, kind)} {_write_value(expression.get('value'))}"


def _write_operand(operand: Any, *, parent_kind: str) -> str:
    text = format_expression(operand)
    kind = operand.get("type") if isinstance(operand, Mapping) else None
    return f"({text})" if kind in ("and", "or") and kind != parent_kind else text


def _write_term(term: Any) -> str:
    if isinstance(term, Mapping):
        return f"{term.get('transform')}({_write_term(term.get('term', term.get('reference')))})"
    return str(term)


def _write_value(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else str(value)
