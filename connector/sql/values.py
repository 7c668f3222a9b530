"""Typed values of a translation: conversions, and checks of their types."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from seamark.connector.client.errors import BadRequest
from seamark.connector.sql.scopes import UnsupportedInDuckDB, Value, shown
from seamark.connector.sql.types import UNKNOWN, SqlType, common_type, duckdb_name

_NO_ARGS = frozenset(("this", "expression", "safe", "typed", "big_int"))


def cast(value: Value, to: SqlType) -> Value:
    """Return an implicit conversion, which loses nothing but digits of a double."""
    if value.type == to:
        return value
    return Value(f"CAST({value.sql} AS {duckdb_name(to)})", to, value.literal)


def together(values: Sequence[Value], node: exp.Expr) -> list[Value]:
    """Return the values in their common type.

    Raises:
        BadRequest: If they have none.
    """
    kind = UNKNOWN
    for value in values:
        found = common_type(kind, value.type)
        if found is None:
            raise BadRequest(f"{shown(node)} has values of the types {kind} and {value.type}: convert one with CAST")
        kind = found
    return [value if value.type == UNKNOWN else cast(value, kind) for value in values]


def type_of(values: Sequence[Value]) -> SqlType:
    return next((one.type for one in values if one.type != UNKNOWN), UNKNOWN)


def need(value: Value, kind: SqlType, node: exp.Expr) -> Value:
    """BadRequest for a value of another type."""
    if value.type not in (kind, UNKNOWN):
        raise BadRequest(f"{shown(node)} needs a value of the type {kind}, and has one of the type {value.type}")
    return value


def check_args(node: exp.Expr, allowed: frozenset[str] = _NO_ARGS) -> None:
    """UnsupportedInDuckDB for a clause that the translation does not know."""
    for name, value in node.args.items():
        if value and name not in allowed:
            raise UnsupportedInDuckDB(f"{shown(node)}: {name.strip('_').replace('_', ' ')} is not translated")


def check_comparable(value: Value, node: exp.Expr) -> None:
    if not value.type.is_comparable:
        raise UnsupportedInDuckDB(f"{shown(node)}: values of the type {value.type} are not compared")
