"""Finds the columns of rows that the table does not have, and their types. The module is pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import check_name
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.streams.incoming.changes import KIND_FIELD

NEW_COLUMNS = "seamark.stream.new-columns"
"""The property that states what happens to rows with a column that the table does not have."""
ADDED_COLUMNS_MAX = 100
"""The maximum number of columns that one request adds."""
TABLE_COLUMNS_MAX = 1_000
"""The maximum number of columns of a table to which requests add columns."""
_LONG = 1 << 63
_SHOWN_CHARACTERS = 100


class NewColumns(Enum):
    """The rule of a table for rows with a column that the table does not have."""

    DEFAULT = "dead-letter"
    """Rows with a new column do not fit.

    They become dead letters if the table has a dead-letter table; otherwise, they are refused.
    """
    REFUSE = "refuse"
    """A row with a new column causes the request to be refused, even if the table has a dead-letter table."""
    ADD = "add"
    """The table gets the column."""


def read_rule(metadata: TableMetadata) -> NewColumns:
    """Return the rule of a table.

    Raises:
        BadRequest: The property has an unknown value.
    """
    text = metadata.properties.get(NEW_COLUMNS, NewColumns.DEFAULT.value)
    try:
        return NewColumns(text)
    except ValueError:
        rules = ", ".join(rule.value for rule in NewColumns)
        raise BadRequest(f"{NEW_COLUMNS} is {text[:_SHOWN_CHARACTERS]!r}; it has to be one of {rules}") from None


def list_names(metadata: TableMetadata) -> set[str]:
    """Return the names that rows may have: the columns of the table, and the field of the kind."""
    return {*(field.name for field in metadata.current_schema.fields), KIND_FIELD}


def find_json_columns(rows: Sequence[Any], names: AbstractSet[str]) -> dict[str, str | None]:
    """Return the columns that JSON rows have and that are not in `names`, with a type for their values.

    The type is None if all values are null.

    Raises:
        BadRequest: The values of a column have no common primitive type.
    """
    kinds: dict[str, set[type]] = {}
    for row in rows:
        if isinstance(row, dict) and not row.keys() <= names:
            for name in row.keys() - names:
                value = row[name]
                if type(value) is int and not -_LONG <= value < _LONG:
                    raise BadRequest(f"The new column {_show(name)} has the value {value}, which no long integer has")
                kinds.setdefault(name, set()).add(type(value))
    return {name: _choose_type(name, types - {type(None)}) for name, types in sorted(kinds.items())}


def _choose_type(name: str, types: set[type]) -> str | None:
    if not types:
        return None
    if types == {int, float}:
        return "double"
    kind = {bool: "boolean", int: "long", float: "double", str: "string"}.get(next(iter(types)))
    if len(types) > 1 or kind is None:
        raise BadRequest(
            f"The values of the new column {_show(name)} have several types, or are objects or arrays; add the column "
            "to the table with its type first"
        )
    return kind


def find_arrow_columns(schema: pa.Schema, names: AbstractSet[str]) -> dict[str, str | None]:
    """Return the columns of Arrow rows that are not in `names`, with their types; None for columns of nulls.

    Raises:
        BadRequest: A column occurs twice, or has a type that requests cannot add.
    """
    repeated = [name for name, count in Counter(schema.names).items() if count > 1]
    if repeated:
        raise BadRequest(f"The rows have the column {_show(repeated[0])} twice; send each column once")
    return {field.name: _to_iceberg(field) for field in schema if field.name not in names}


def _to_iceberg(field: pa.Field) -> str | None:
    kind, types = field.type, pa.types
    if types.is_null(kind):
        return None
    if types.is_timestamp(kind) and kind.unit != "ns":
        return "timestamp" if kind.tz is None else "timestamptz"
    if types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return f"decimal({kind.precision}, {kind.scale})"
    if types.is_time(kind) and kind.unit != "ns":
        return "time"
    for is_kind, name in _ARROW_KINDS:
        if is_kind(kind):
            return name
    raise BadRequest(f"The new column {_show(field.name)} has the type {kind}; add it to the table with its type first")


_ARROW_KINDS = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: kind in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()), "int"),
    (lambda kind: kind in (pa.int64(), pa.uint32()), "long"),
    (lambda kind: kind in (pa.float16(), pa.float32()), "float"),
    (pa.types.is_float64, "double"),
    (lambda kind: kind in (pa.string(), pa.large_string(), pa.string_view()), "string"),
    (lambda kind: kind in (pa.binary(), pa.large_binary(), pa.binary_view()), "binary"),
    (pa.types.is_date32, "date"),
)


def check_new_columns(columns: Mapping[str, str], metadata: TableMetadata) -> None:
    """Check that columns can be added to a table.

    Raises:
        BadRequest: A name is invalid, differs from another name only in case, or there are too many columns.
    """
    present = len(metadata.current_schema.fields)
    if len(columns) > ADDED_COLUMNS_MAX or present + len(columns) > TABLE_COLUMNS_MAX:
        raise BadRequest(
            f"The rows have {len(columns):,} new columns, and the table has {present:,}; a request adds at most "
            f"{ADDED_COLUMNS_MAX}, up to {TABLE_COLUMNS_MAX:,} columns of the table. Add the columns to the table first"
        )
    lower = {field.name.lower(): field.name for field in metadata.current_schema.fields}
    for name in columns:
        check_name(name, "new column")
        if name.lower() in lower:
            raise BadRequest(
                f"The new column {_show(name)} differs from the column {_show(lower[name.lower()])} only in case, and "
                "engines would confuse them; rename it in the rows"
            )
        lower[name.lower()] = name


def _show(name: str) -> str:
    return repr(name[:_SHOWN_CHARACTERS])
