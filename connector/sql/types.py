"""Defines the types of the SQL dialect, which are Trino's types, and finds the common type of two types.

A type has a name, and a decimal also has a precision and a scale. Iceberg's nested types become `NESTED` with the types
of their parts. The comparison of nested types ignores these parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from seamark.formats.iceberg.types.schema import ListType, MapType, StructType
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale

PRECISION_MAX = 38
_INTEGER_DIGITS = {"integer": 10, "bigint": 19}
"""The number of digits of the decimal type to which Trino converts each integer type."""


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
    element: SqlType | None = field(default=None, compare=False)
    key: SqlType | None = field(default=None, compare=False)
    fields: tuple[tuple[str, SqlType], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"decimal({self.precision}, {self.scale})" if self.name == "decimal" else self.name

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


BOOLEAN, INTEGER, BIGINT = SqlType("boolean"), SqlType("integer"), SqlType("bigint")
REAL, DOUBLE, VARCHAR, VARBINARY = SqlType("real"), SqlType("double"), SqlType("varchar"), SqlType("varbinary")
DATE, TIME, UUID = SqlType("date"), SqlType("time"), SqlType("uuid")
TIMESTAMP, ZONED = SqlType("timestamp"), SqlType("timestamp with time zone")
UNKNOWN, NESTED, INTERVAL = SqlType("unknown"), SqlType("nested"), SqlType("interval")
UNREADABLE = SqlType("unreadable")
"""The type of a column that cannot be read: a time with nanoseconds, or a type of a later format version."""
_OF_ICEBERG = {
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
_DUCKDB = {
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
            fields = tuple((each.name, from_iceberg(each.type)) for each in iceberg_type.fields)
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
    return _OF_ICEBERG.get(name, UNREADABLE)


def has_duckdb_name(kind: SqlType) -> bool:
    """Return whether the type has a name in DuckDB's SQL, so that values can be cast to it."""
    return kind.name == "decimal" or kind.name in _DUCKDB


def name_duckdb_type(kind: SqlType) -> str:
    """Return the type in DuckDB's SQL.

    Raises:
        KeyError: The type is nested.
    """
    return f"DECIMAL({kind.precision}, {kind.scale})" if kind.name == "decimal" else _DUCKDB[kind.name]


def as_decimal(kind: SqlType) -> SqlType:
    """Return the decimal type to which an integer is converted."""
    return make_decimal(_INTEGER_DIGITS[kind.name], 0) if kind.is_integer else kind


def find_common_type(left: SqlType, right: SqlType) -> SqlType | None:
    """Return the type to which values of both types are converted when they are compared or combined in a column.

    Return None if the types have no common type.
    """
    if left == right:
        # The equality of nested types does not compare what they contain.
        return left if not left.is_nested or repr(left) == repr(right) else NESTED
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
