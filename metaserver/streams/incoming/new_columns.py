"""Finds the columns of rows that the table does not have, and their types. The module is pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import check_name
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.streams.incoming.changes import KIND_FIELD, list_debezium_values

NEW_COLUMNS = "seamark.stream.new-columns"
"""The table property that determines how rows with a new column are handled (`NewColumns`)."""
ADDED_COLUMNS_MAX = 100
"""The maximum number of columns that one request adds."""
TABLE_COLUMNS_MAX = 1_000
"""The maximum number of columns of a table to which requests add columns."""
_LONG_END = 1 << 63
"""The integer after the greatest 64-bit integer."""
_SHOWN_CHARACTERS = 100


class NewColumns(Enum):
    """The rule of a table for rows with a new column, which the table does not have."""

    DEFAULT = "dead-letter"
    """Rows with a new column do not fit the table.

    They become dead letters if the table has a dead-letter table. Otherwise, the request is refused.
    """
    REFUSE = "refuse"
    """A request with a new column is refused, even if the table has a dead-letter table."""
    ADD = "add"
    """The column is added to the table."""


def read_new_columns_rule(metadata: TableMetadata) -> NewColumns:
    """Return the rule of a table for rows with a column that the table does not have.

    Raises:
        BadRequest: The property has an unknown value.
    """
    text = metadata.properties.get(NEW_COLUMNS, NewColumns.DEFAULT.value)
    try:
        return NewColumns(text)
    except ValueError:
        rules = ", ".join(rule.value for rule in NewColumns)
        raise BadRequest(f"{NEW_COLUMNS} is {text[:_SHOWN_CHARACTERS]!r}; it has to be one of {rules}") from None


class MissingColumns(NamedTuple):
    """The new columns in the rows of a request, which the table does not have.

    Attributes:
        types: The types of the columns, by name.
        empty: The columns that have only nulls. They have no type, and are left out of the rows.
    """

    types: Mapping[str, str]
    empty: AbstractSet[str]


NO_COLUMNS = MissingColumns({}, frozenset())


def find_missing_columns(
    rows: Sequence[Any], metadata: TableMetadata, subject: str, *, is_envelope: bool = False
) -> MissingColumns:
    """Return the columns to add to a table before rows are appended.

    The result is empty if the table's rule does not add columns.

    Args:
        rows: Decoded JSON rows, or the record batches of Arrow rows.
        metadata: The metadata of the table.
        subject: The name of the table, for messages.
        is_envelope: Whether JSON rows are envelopes of Debezium.

    Raises:
        BadRequest: The rule of the table refuses rows with new columns, or the type of a column cannot be added.
    """
    rule = read_new_columns_rule(metadata)
    if rule is NewColumns.DEFAULT or not rows:
        return NO_COLUMNS
    names = {*(field.name for field in metadata.current_schema.fields), KIND_FIELD}
    if isinstance(rows[0], pa.RecordBatch):
        columns = find_arrow_columns(rows[0].schema, names)
    elif is_envelope:
        columns = find_debezium_columns(rows, names)
    else:
        columns = find_json_columns(rows, names)
    if rule is NewColumns.REFUSE and columns:
        raise BadRequest(
            f"The rows have the column {_show_name(next(iter(columns)))}, which {subject} does not have, and its "
            f"property {NEW_COLUMNS} refuses such rows"
        )
    types = {name: kind for name, kind in columns.items() if kind is not None}
    return MissingColumns(types, columns.keys() - types.keys())


def find_json_columns(rows: Sequence[Any], names: AbstractSet[str]) -> dict[str, str | None]:
    """Return the columns of JSON rows that are not in `names`, with a type for their values.

    The type is None if all values are null.

    Raises:
        BadRequest: The values of a column have no common primitive type.
    """
    kinds: dict[str, set[str]] = {}
    for row in rows:
        if isinstance(row, dict) and not row.keys() <= names:
            for name in row.keys() - names:
                kinds.setdefault(name, set()).update(_list_json_types(name, row[name]))
    return {name: _choose_type(name, types) for name, types in sorted(kinds.items())}


def find_debezium_columns(messages: Sequence[Any], names: AbstractSet[str]) -> dict[str, str | None]:
    """Return the columns of changed rows that are not in `names`, with their types.

    The type of a column comes from the schemas of the messages. If a message has no schema, the type comes from the
    JSON value. The type is None if all values are null. Invalid envelopes are ignored.

    Raises:
        BadRequest: A column has no common primitive type in all messages.
    """
    kinds: dict[str, set[str]] = {}
    for message in messages:
        for value in list_debezium_values(message, names):
            types = kinds.setdefault(value.column, set())
            if value.value is not None:
                types |= _list_json_types(value.column, value.value) if value.kind is None else {value.kind}
    return {name: _choose_type(name, types) for name, types in sorted(kinds.items())}


def _list_json_types(name: str, value: Any) -> set[str]:
    """Return a set with the Iceberg type of a JSON value, or an empty set for null.

    The type of an object or an array is `struct`, which `_choose_type` refuses.

    Raises:
        BadRequest: The value is an integer that does not fit into 64 bits.
    """
    if value is None:
        return set()
    if type(value) is int and not -_LONG_END <= value < _LONG_END:
        raise BadRequest(f"The new column {_show_name(name)} has the value {value}, which no long integer has")
    return {_JSON_TYPES.get(type(value), "struct")}


_JSON_TYPES: Mapping[type, str] = {bool: "boolean", int: "long", float: "double", str: "string"}
_WIDER_TYPES: Mapping[frozenset[str], str] = {
    frozenset(("int", "long")): "long",
    frozenset(("float", "double")): "double",
    frozenset(("long", "double")): "double",
}
"""The type of a column whose values have these two types."""


def _choose_type(name: str, types: set[str]) -> str | None:
    """Return the type for all values of a new column, or None if the column has no value.

    Two types may have a wider common type, such as a long and a double. The type `struct` represents all types that
    cannot be added.

    Raises:
        BadRequest: The types of the values have no common primitive type.
    """
    if not types:
        return None
    kind = _WIDER_TYPES.get(frozenset(types), next(iter(types)) if len(types) == 1 else "struct")
    if kind == "struct":
        raise BadRequest(
            f"The values of the new column {_show_name(name)} have several types, or are objects or arrays, or "
            "decimals without a precision; add the column to the table with its type first"
        )
    return kind


def find_arrow_columns(schema: pa.Schema, names: AbstractSet[str]) -> dict[str, str | None]:
    """Return the columns of Arrow rows that are not in `names`, with their types. The type of a null column is None.

    Raises:
        BadRequest: A column occurs twice, or has a type that requests cannot add to a table.
    """
    repeated_names = [name for name, count in Counter(schema.names).items() if count > 1]
    if repeated_names:
        raise BadRequest(f"The rows have the column {_show_name(repeated_names[0])} twice; send each column once")
    return {field.name: _find_iceberg_type(field) for field in schema if field.name not in names}


def _find_iceberg_type(field: pa.Field) -> str | None:
    """Return the Iceberg type for a new column with an Arrow type, or None for the type null.

    Raises:
        BadRequest: Requests cannot add columns of this type.
    """
    kind, types = field.type, pa.types
    if types.is_null(kind):  # All values are null, so any type is possible.
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
    raise BadRequest(
        f"The new column {_show_name(field.name)} has the type {kind}; add it to the table with its type first"
    )


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
        BadRequest: A name is invalid, a name differs from another name only in case, or there are too many columns.
    """
    column_count = len(metadata.current_schema.fields)
    if len(columns) > ADDED_COLUMNS_MAX or column_count + len(columns) > TABLE_COLUMNS_MAX:
        raise BadRequest(
            f"The rows have {len(columns):,} new columns, and the table has {column_count:,}; a request adds at most "
            f"{ADDED_COLUMNS_MAX}, up to {TABLE_COLUMNS_MAX:,} columns of the table. Add the columns to the table first"
        )
    name_by_lower_case = {field.name.lower(): field.name for field in metadata.current_schema.fields}
    for name in columns:
        check_name(name, "new column")
        if name.lower() in name_by_lower_case:
            raise BadRequest(
                f"The new column {_show_name(name)} differs from the column "
                f"{_show_name(name_by_lower_case[name.lower()])} only in case, and engines would confuse them; rename "
                "it in the rows"
            )
        name_by_lower_case[name.lower()] = name


def _show_name(name: str) -> str:
    return repr(name[:_SHOWN_CHARACTERS])
