"""Finds the types of a table's columns by the names that a statement can use for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NESTED = "nested"
"""The type of a nested column."""


def read_column_type(kind: Any) -> str:
    """Return the type of a column as its name in the table metadata, or `NESTED`."""
    return kind if isinstance(kind, str) else NESTED


def list_column_types(fields: Sequence[tuple[str, Any]]) -> dict[str, str] | None:
    """Return the types of columns by their lower-case names. Fields of structs are named `struct.field`.

    The result is None if two names differ only in case. Fields are left out if a column has a dot in its name, because
    such a name may be equal to the name of a field.

    Args:
        fields: The names and types in the form of the table metadata.
    """
    columns = {name.lower(): read_column_type(kind) for name, kind in fields}
    if len(columns) != len(fields):
        return None
    if not any("." in name for name in columns):
        for name, kind in fields:
            columns |= _list_fields(name.lower(), kind)
    return columns


def _list_fields(name: str, kind: Any) -> dict[str, str]:
    """Return the types of the fields of a struct and of its inner structs, as `struct.field`.

    Lists and maps are left out. The result is empty if `kind` is not a struct, or if a field's name is ambiguous.
    """
    fields = kind.get("fields", ()) if isinstance(kind, dict) and kind.get("type") == "struct" else ()
    kinds_by_name = {str(field["name"]).lower(): field["type"] for field in fields}
    if len(kinds_by_name) != len(fields) or any("." in field_name for field_name in kinds_by_name):
        return {}
    types: dict[str, str] = {}
    for field_name, inner in kinds_by_name.items():
        types |= (
            {f"{name}.{field_name}": inner} if isinstance(inner, str) else _list_fields(f"{name}.{field_name}", inner)
        )
    return types
