"""Conversion of rows to JSON, in the form of appended rows: Iceberg's JSON of single values (spec, Appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.types.schema import Field, ListType, MapType, StructType, Type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import encode_json

_INTEGERS = {"date": pa.int32(), "time": pa.int64(), "timestamp": pa.int64(), "timestamptz": pa.int64()}
"""The types whose values are integers: days, microseconds or nanoseconds."""


def write_json_rows(rows: pa.Table, fields: Sequence[Field]) -> list[dict[str, Any]]:
    """Convert rows to JSON objects.

    Args:
        rows: The rows, with a column for each field.
        fields: The columns of the table, in the order of the rows' columns.
    """
    names = [field.name for field in fields]
    columns = [
        _convert_array(pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0), field.type)
        for column, field in zip(rows.columns, fields, strict=True)
    ]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _convert_array(array: pa.Array, kind: Type) -> list[Any]:
    """Return the values of a column in the form of Iceberg's JSON single values.

    The function calls itself for the columns in a struct, list or map. A map becomes a list of keys and a list of
    values, because keys need not be texts.
    """
    if isinstance(kind, StructType):
        names = [field.name for field in kind.fields]
        children = [
            _convert_array(child, field.type) for child, field in zip(array.flatten(), kind.fields, strict=True)
        ]
        objects = zip(*children, strict=True) if children else [()] * len(array)
        return [
            dict(zip(names, values, strict=True)) if is_valid else None
            for values, is_valid in zip(objects, array.is_valid().to_pylist(), strict=True)
        ]
    if isinstance(kind, ListType):
        return _slice_values(_convert_array(pc.list_flatten(array), kind.element), array)
    if isinstance(kind, MapType):
        entries = array.cast(pa.list_(pa.struct([("key", array.type.key_type), ("value", array.type.item_type)])))
        keys, values = pc.list_flatten(entries).flatten()
        key_lists = _slice_values(_convert_array(keys, kind.key), entries)
        value_lists = _slice_values(_convert_array(values, kind.value), entries)
        return [
            None if keys is None else {"keys": keys, "values": values}
            for keys, values in zip(key_lists, value_lists, strict=True)
        ]
    return [encode_json(kind, value) for value in _read_values(array, kind)]


def _slice_values(values: list[Any], lists: pa.Array) -> list[Any]:
    """Divide consecutive values into lists with the lengths of an array of lists."""
    slices: list[Any] = []
    start = 0
    for length in pc.list_value_length(lists).to_pylist():
        slices.append(None if length is None else values[start : start + length])
        start += length or 0
    return slices


def _read_values(array: pa.Array, kind: str) -> list[Any]:
    """Return primitive values in Iceberg's form: dates and times are integers, and UUIDs are bytes."""
    name = get_base_name(kind)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if name == "decimal":
        scale = array.type.scale
        return [None if value is None else int(value.scaleb(scale)) for value in array.to_pylist()]
    integers = _INTEGERS.get(name.removesuffix("_ns"))  # Types of nanoseconds are stored in the same integers.
    values: list[Any] = (array if integers is None else array.cast(integers)).to_pylist()
    return values
