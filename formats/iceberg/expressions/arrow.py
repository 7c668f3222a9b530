"""Convert Iceberg types and values to Arrow.

A conversion is exact or raises ValueError; nothing is rounded. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache

import pyarrow as pa

from seamark.formats.iceberg.types.schema import ListType, MapType, StructType, Type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import Value, get_decimal_precision, get_decimal_scale, get_fixed_length

_UUID_BYTES = 16
_ARROW_TYPES = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamptz_ns": pa.timestamp("ns", tz="UTC"),
    "string": pa.string(),
    "binary": pa.binary(),
    "uuid": pa.binary(_UUID_BYTES),
    "unknown": pa.null(),
}


def to_row_type(kind: Type) -> pa.DataType:
    """Return the Arrow type of a column in a result: without field ids, and nullable except for map keys.

    Raises:
        ValueError: The type has no Arrow equivalent: variant, geometry, geography, or a type of a later format version.
    """
    match kind:
        case StructType(fields):
            return pa.struct([pa.field(field.name, to_row_type(field.type)) for field in fields])
        case ListType():
            return pa.list_(pa.field("element", to_row_type(kind.element)))
        case MapType():
            return pa.map_(pa.field("key", to_row_type(kind.key), nullable=False), to_row_type(kind.value))
    return _to_primitive_type(kind)


@lru_cache(maxsize=1024)
def _to_primitive_type(kind: str) -> pa.DataType:
    name = get_base_name(kind)
    if name == "decimal":
        return pa.decimal128(get_decimal_precision(kind), get_decimal_scale(kind))
    if name == "fixed":
        return pa.binary(get_fixed_length(kind))
    if name not in _ARROW_TYPES:
        raise ValueError(f"values of type {kind} are not supported")
    return _ARROW_TYPES[name]


def build_arrow_array(kind: str, values: Iterable[Value | None]) -> pa.Array:
    """Return an array of a primitive type, from values in the form that bound predicates have.

    In this form, dates and times are integers (days, microseconds or nanoseconds), a decimal is its unscaled integer,
    and a UUID is bytes.

    Raises:
        ValueError: A value is out of range, or does not have the type.
    """
    arrow_type = _to_primitive_type(kind)
    # Dates and times are numbers, so build arrays of numbers, and then change the type.
    try:
        if get_base_name(kind) == "decimal":
            scale = get_decimal_scale(kind)
            return pa.array([None if value is None else _to_decimal(value, scale) for value in values], arrow_type)
        if pa.types.is_date(arrow_type):
            return pa.array(values, pa.int32()).cast(arrow_type)
        if pa.types.is_timestamp(arrow_type) or pa.types.is_time(arrow_type):
            return pa.array(values, pa.int64()).view(arrow_type)
        return pa.array(values, arrow_type)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ValueError(f"a value does not have the type {kind}: {error}") from None


def _to_decimal(unscaled_value: Value, scale: int) -> Decimal:
    digits = tuple(map(int, str(abs(int(unscaled_value)))))
    return Decimal((int(unscaled_value) < 0, digits, -scale))
