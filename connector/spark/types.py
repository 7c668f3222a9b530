"""Converts Iceberg's types to Spark types as Iceberg's Spark catalog does, and Arrow arrays to the types for Spark.

In Spark, a uuid is a string and a fixed is binary. Fields inside structs, lists and maps are nullable. Spark compares
the types of Arrow batches with the declared types, so the batches of all files must have equal types.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from seamark.connector.arrow.casting import conform
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.types.schema import ListType, MapType, StructType, Type, describe_type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale

_SPARK_TYPES: dict[str, spark.DataType] = {
    "boolean": spark.BooleanType(),
    "int": spark.IntegerType(),
    "long": spark.LongType(),
    "float": spark.FloatType(),
    "double": spark.DoubleType(),
    "date": spark.DateType(),
    "timestamp": spark.TimestampNTZType(),
    "timestamptz": spark.TimestampType(),
    "string": spark.StringType(),
    "uuid": spark.StringType(),
    "binary": spark.BinaryType(),
    "fixed": spark.BinaryType(),
}
_DIGITS = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_HYPHENS = (8, 13, 18, 23)
_UUID_BYTES, _UUID_CHARACTERS = 16, 36
Convert = Callable[[pa.Array], pa.Array]


def convert_to_spark_type(kind: Type) -> spark.DataType:
    """Return the Spark type of an Iceberg type.

    Raises:
        ValueError: Spark has no equivalent type. Time, nanoseconds, variant, geometry and geography have none.
    """
    match kind:
        case StructType(fields):
            return spark.StructType(
                [spark.StructField(field.name, convert_to_spark_type(field.type)) for field in fields]
            )
        case ListType():
            return spark.ArrayType(convert_to_spark_type(kind.element))
        case MapType():
            return spark.MapType(convert_to_spark_type(kind.key), convert_to_spark_type(kind.value))
    name = get_base_name(kind)
    if name == "decimal":
        return spark.DecimalType(get_decimal_precision(kind), get_decimal_scale(kind))
    if name not in _SPARK_TYPES:
        raise ValueError(f"Spark has no type for {describe_type(kind)}")
    return _SPARK_TYPES[name]


def find_spark_conversion(kind: Type) -> Convert | None:
    """Return a function that converts an array of type `to_row_type(kind)` for Spark, or None if none is needed.

    Spark has no type for UUIDs and no binary type of a fixed length. A nested type is converted if a type in it is.
    """
    match kind:
        case StructType(fields):
            inner = [find_spark_conversion(field.type) for field in fields]
            if any(inner):
                return lambda array: _convert_struct(array, inner)
        case ListType():
            element = find_spark_conversion(kind.element)
            if element is not None:
                return lambda array: _convert_list(array, element)
        case MapType():
            key, value = find_spark_conversion(kind.key), find_spark_conversion(kind.value)
            if key or value:
                return lambda array: _convert_map(array, key, value)
        case str() if kind == "uuid":
            return _convert_uuids
        case str() if get_base_name(kind) == "fixed":
            return lambda array: array.cast(pa.binary())
    return None


def _convert_struct(array: pa.Array, inner: list[Convert | None]) -> pa.Array:
    parts = [pc.struct_field(array, [number]) for number in range(len(inner))]
    children = [part if convert is None else convert(part) for part, convert in zip(parts, inner, strict=True)]
    return pa.StructArray.from_arrays(children, [field.name for field in array.type], mask=array.is_null())


def _convert_list(array: pa.Array, element: Convert) -> pa.Array:
    joined_array = pa.concat_arrays([array])
    return pa.ListArray.from_arrays(joined_array.offsets, element(joined_array.values), mask=joined_array.is_null())


def _convert_map(array: pa.Array, key: Convert | None, value: Convert | None) -> pa.Array:
    joined_array = pa.concat_arrays([array])
    keys = joined_array.keys if key is None else key(joined_array.keys)
    items = joined_array.items if value is None else value(joined_array.items)
    return pa.MapArray.from_arrays(joined_array.offsets, keys, items, mask=joined_array.is_null())


def _convert_uuids(array: pa.Array) -> pa.Array:
    """Convert uuids to strings such as `123e4567-e89b-12d3-a456-426614174000`."""
    rows = len(array)
    if not rows:
        return pa.array([], pa.string())
    data = array.buffers()[1]
    first_byte = array.offset * _UUID_BYTES
    raw_bytes = np.frombuffer(data, np.uint8, rows * _UUID_BYTES, first_byte).reshape(rows, _UUID_BYTES)
    text = np.full((rows, _UUID_CHARACTERS), ord("-"), dtype=np.uint8)
    places = [position for position in range(_UUID_CHARACTERS) if position not in _HYPHENS]
    # Each byte has two hexadecimal digits: its high and its low four bits.
    text[:, places[::2]] = _DIGITS[raw_bytes >> 4]
    text[:, places[1::2]] = _DIGITS[raw_bytes & 15]
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * _UUID_CHARACTERS)
    texts = pa.StringArray.from_buffers(rows, offsets.buffers()[1], pa.py_buffer(text.tobytes()))
    return pc.if_else(array.is_valid(), texts, None)


def check_fits(schema: spark.StructType, target: WriteTarget) -> None:
    """Check that the names and types of a DataFrame's columns match the table.

    Raises:
        Unwritable: The columns do not match.
    """
    conform(pa.RecordBatch.from_pylist([], to_arrow_schema(schema)), target.schema, target.arrow)
