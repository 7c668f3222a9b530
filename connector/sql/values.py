"""Converts translated values to other types, and checks their types and the clauses of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.scopes import SqlValue, describe
from seamark.connector.sql.types import (
    UNKNOWN,
    VARBINARY,
    SqlType,
    UnsupportedInDuckDB,
    find_common_type,
    name_duckdb_type,
)

_DEFAULT_ARGS = frozenset(("this", "expression", "safe", "typed", "big_int"))
"""The operands of a node, and the flags of sqlglot that do not change the meaning of a translated node."""


def cast(value: SqlValue, target_type: SqlType) -> SqlValue:
    """Return the value, implicitly converted to a type. Only a conversion to a double may lose digits."""
    if value.type == target_type:
        return value
    return SqlValue(f"CAST({value.sql} AS {name_duckdb_type(target_type)})", target_type, value.literal)


def to_common_type(values: Sequence[SqlValue], node: exp.Expr) -> list[SqlValue]:
    """Return the values, converted to their common type. A value of unknown type, such as NULL, is not converted.

    Raises:
        InvalidRequest: The values have no common type.
        UnsupportedInDuckDB: The values have different nested types.
    """
    kind = UNKNOWN
    for value in values:
        common = find_common_type(kind, value.type)
        if common is None:
            raise InvalidRequest(
                f"{describe(node)} has values of the types {kind} and {value.type}; convert one of them with CAST"
            )
        kind = common
    return [value if value.type == UNKNOWN else cast(value, kind) for value in values]


def find_type(values: Sequence[SqlValue]) -> SqlType:
    return next((value.type for value in values if value.type != UNKNOWN), UNKNOWN)


def require_type(value: SqlValue, kind: SqlType, node: exp.Expr) -> SqlValue:
    """Return the value, which must have the type `kind` or be null.

    Raises:
        InvalidRequest: The value has a different type.
        UnsupportedInDuckDB: The value is binary or nested. Trino has some functions for these types too.
    """
    if value.type == VARBINARY or value.type.is_nested:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    if value.type not in (kind, UNKNOWN):
        raise InvalidRequest(
            f"{describe(node)} requires a value of the type {kind}, but the value has the type {value.type}"
        )
    return value


def check_args(node: exp.Expr, allowed_names: frozenset[str] = _DEFAULT_ARGS) -> None:
    """Check that a node has only the arguments `allowed_names`.

    Raises:
        UnsupportedInDuckDB: The node has a clause that is not translated.
    """
    for name, value in node.args.items():
        if value and name not in allowed_names:
            raise UnsupportedInDuckDB(f"{describe(node)}: {name.strip('_').replace('_', ' ')} is not translated")


def read_whole_number(node: exp.Expr | None, maximum: int) -> int | None:
    """Return the number of an integer literal without a sign, or None for other nodes and for larger numbers."""
    text = str(node.this) if isinstance(node, exp.Literal) and not node.is_string else ""
    return int(text) if text.isascii() and text.isdigit() and int(text) <= maximum else None


def check_comparable(value: SqlValue, node: exp.Expr) -> None:
    if not value.type.is_comparable:
        raise UnsupportedInDuckDB(f"{describe(node)}: values of the type {value.type} cannot be compared")
