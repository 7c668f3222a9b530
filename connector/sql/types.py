"""Defines the types of the SQL dialect, which are Trino's types, and finds the common type of two types.

A type has a name, and a decimal also has a precision and a scale. Iceberg's nested types become `NESTED` with the types
of their parts. Nested types are equal only if all their parts and the names of their fields are equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sqlglot.dialects.trino import Trino

from seamark.formats.iceberg.types.schema import ListType, MapType, StructType
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale

PRECISION_MAX = 38
_PLAIN_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
"""The names of fields that Trino writes without quotes, unless they are reserved words."""
_INTEGER_DIGITS = {"integer": 10, "bigint": 19}
"""The number of digits of the decimal type to which Trino converts each integer type."""


class UnsupportedInDuckDB(Exception):
    """Raised if the statement cannot be translated to DuckDB's SQL with the result that the dialect defines.

    A different engine may be able to run the statement.
    """


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type of the SQL dialect.

    Attributes:
        element: The type of the elements of a list, or of the values of a map.
        key: The type of the keys of a map.
        fields: The names and types of the fields of a struct.
    """

    name: str
    precision: int = 0
    scale: int = 0
    element: SqlType | None = None
    key: SqlType | None = None
    fields: tuple[tuple[str, SqlType], ...] = ()

    def __str__(self) -> str:
        if self.name == "decimal":
            return f"decimal({self.precision}, {self.scale})"
        if self.fields:
            return f"row({', '.join(f'{_write_field_name(name)} {kind}' for name, kind in self.fields)})"
        if self.key is not None:
            return f"map({self.key}, {self.element})"
        return self.name if self.element is None else f"array({self.element})"

    @property
    def is_integer(self) -> bool:
        return self.name in _INTEGER_DIGITS

    @property
    def is_float(self) -> bool:
        return self.name in ("double", "real")

    @property
    def is_number(self) -> bool:
        return self.is_integer or self.is_float or self.name == "decimal"

    @property
    def is_time(self) -> bool:
        return self in (DATE, TIMESTAMP, ZONED)

    @property
    def is_nested(self) -> bool:
        return self.name == "nested"

    @property
    def is_comparable(self) -> bool:
        return self.name not in ("nested", "interval")


def _write_field_name(name: str) -> str:
    """Return the name of a field as Trino writes it in the name of a type."""
    is_plain = _PLAIN_NAME.fullmatch(name) and name.lower() not in Trino.Generator.RESERVED_KEYWORDS
    return name if is_plain else '"' + name.replace('"', '""') + '"'


BOOLEAN, INTEGER, BIGINT = SqlType("boolean"), SqlType("integer"), SqlType("bigint")
REAL, DOUBLE, VARCHAR, VARBINARY = SqlType("real"), SqlType("double"), SqlType("varchar"), SqlType("varbinary")
DATE, TIME, UUID = SqlType("date"), SqlType("time"), SqlType("uuid")
TIMESTAMP, ZONED = SqlType("timestamp"), SqlType("timestamp with time zone")
UNKNOWN, NESTED, INTERVAL = SqlType("unknown"), SqlType("nested"), SqlType("interval")
UNREADABLE = SqlType("unreadable")
"""The type of a column that cannot be read: a time with nanoseconds, or a type of a later format version."""
_TYPES_BY_ICEBERG_NAME = {
    "boolean": BOOLEAN,
    "int": INTEGER,
    "long": BIGINT,
    "float": REAL,
    "double": DOUBLE,
    "string": VARCHAR,
    "binary": VARBINARY,
    "fixed": VARBINARY,
    "date": DATE,
    "time": TIME,
    "uuid": UUID,
    "timestamp": TIMESTAMP,
    "timestamptz": ZONED,
}
_DUCKDB_NAMES = {
    "boolean": "BOOLEAN",
    "integer": "INTEGER",
    "bigint": "BIGINT",
    "real": "FLOAT",
    "double": "DOUBLE",
    "varchar": "VARCHAR",
    "varbinary": "BLOB",
    "date": "DATE",
    "time": "TIME",
    "uuid": "UUID",
    "timestamp": "TIMESTAMP",
    "timestamp with time zone": "TIMESTAMPTZ",
    "unknown": "INTEGER",
}


def make_decimal(precision: int, scale: int) -> SqlType:
    return SqlType("decimal", precision, scale)


def from_iceberg(iceberg_type: object) -> SqlType:
    """Return the type of a column, or of a field, an element, a key or a value in it."""
    match iceberg_type:
        case StructType():
            fields = tuple((field.name, from_iceberg(field.type)) for field in iceberg_type.fields)
            return replace(NESTED, fields=fields)
        case ListType():
            return replace(NESTED, element=from_iceberg(iceberg_type.element))
        case MapType():
            return replace(NESTED, key=from_iceberg(iceberg_type.key), element=from_iceberg(iceberg_type.value))
    if not isinstance(iceberg_type, str):
        return NESTED
    name = get_base_name(iceberg_type)
    if name == "decimal":
        return make_decimal(get_decimal_precision(iceberg_type), get_decimal_scale(iceberg_type))
    return _TYPES_BY_ICEBERG_NAME.get(name, UNREADABLE)


def has_duckdb_name(kind: SqlType) -> bool:
    """Return whether the type has a name in DuckDB's SQL, so that values can be cast to it."""
    return kind.name == "decimal" or kind.name in _DUCKDB_NAMES


def name_duckdb_type(kind: SqlType) -> str:
    """Return the type in DuckDB's SQL.

    Raises:
        UnsupportedInDuckDB: The type has no name, because it is nested, an interval or unreadable.
    """
    if not has_duckdb_name(kind):
        raise UnsupportedInDuckDB(f"A conversion to the type {kind} is not translated")
    return f"DECIMAL({kind.precision}, {kind.scale})" if kind.name == "decimal" else _DUCKDB_NAMES[kind.name]


def as_decimal(kind: SqlType) -> SqlType:
    """Return the decimal type to which an integer is converted. Other types are returned unchanged."""
    return make_decimal(_INTEGER_DIGITS[kind.name], 0) if kind.is_integer else kind


def find_common_type(left: SqlType, right: SqlType) -> SqlType | None:
    """Return the type to which values of both types are converted when they are compared or combined in a column.

    Return None if the types have no common type. A decimal has enough digits on both sides of the point for both types,
    up to `PRECISION_MAX`.

    Raises:
        UnsupportedInDuckDB: The types are different nested types. DuckDB matches the fields of structs by name, but
            Trino matches them by position.
    """
    if left == right:
        return left
    if left.is_nested and right.is_nested:
        raise UnsupportedInDuckDB(f"A conversion between the types {left} and {right} is not translated")
    if UNKNOWN in (left, right):
        return left if right == UNKNOWN else right
    if left.is_number and right.is_number:
        if DOUBLE in (left, right):
            return DOUBLE
        if REAL in (left, right):
            return REAL
        if left.is_integer and right.is_integer:
            return BIGINT
        left, right = as_decimal(left), as_decimal(right)
        scale = max(left.scale, right.scale)
        digits = max(left.precision - left.scale, right.precision - right.scale)
        return make_decimal(min(PRECISION_MAX, digits + scale), scale)
    if left.is_time and right.is_time:
        return ZONED if ZONED in (left, right) else TIMESTAMP
    return None
