"""Iceberg expressions, as the server sends them in JSON, as text for people: SQL as far as SQL has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VALUES_SHOWN = 5
_OPERATORS = {"eq": "=", "not-eq": "<>", "lt": "<", "lt-eq": "<=", "gt": ">", "gt-eq": ">="}
_TESTS = {"is-null": "IS NULL", "not-null": "IS NOT NULL", "is-nan": "IS NaN", "not-nan": "IS NOT NaN"}
_PREFIXES = {"starts-with": "LIKE", "not-starts-with": "NOT LIKE"}


def expression_text(given: Any) -> str:
    """Of lists of values the first few."""
    if not isinstance(given, Mapping):
        return str(given).lower()
    kind = str(given.get("type"))
    if kind in ("and", "or"):
        return f" {kind.upper()} ".join(_operand(given[side], within=kind) for side in ("left", "right"))
    if kind == "not":
        return f"NOT ({expression_text(given['child'])})"
    if kind in ("true", "false"):
        return kind
    term = _term(given.get("term"))
    if kind in _TESTS:
        return f"{term} {_TESTS[kind]}"
    if kind in ("in", "not-in"):
        values = given["values"]
        shown = ", ".join(map(_value, values[:VALUES_SHOWN]))
        more = f", … {len(values):,} values" if len(values) > VALUES_SHOWN else ""
        return f"{term} {kind.replace('-', ' ').upper()} ({shown}{more})"
    if kind in _PREFIXES:
        return f"{term} {_PREFIXES[kind]} {_value(str(given['value']) + '%')}"
    return f"{term} {_OPERATORS.get(kind, kind)} {_value(given.get('value'))}"


def _operand(given: Any, *, within: str) -> str:
    text = expression_text(given)
    kind = given.get("type") if isinstance(given, Mapping) else None
    return f"({text})" if kind in ("and", "or") and kind != within else text


def _term(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"{given.get('transform')}({_term(given.get('term', given.get('reference')))})"
    return str(given)


def _value(given: Any) -> str:
    if isinstance(given, str):
        return "'" + given.replace("'", "''") + "'"
    return str(given).lower() if isinstance(given, bool) else str(given)
