"""Estimates the size of Arrow data before they are decoded, because a small stream can represent many values.

A dictionary, a run or a view can refer to one value many times, and null arrays and fixed-size lists of nulls take no
bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.runtime.errors import BadRequest

_NESTED_VALUE_BYTES = 8
"""The size of the offset of a list or a map."""
_NULL_BYTES = 8
"""The size that is assumed for a value of a null array."""


def estimate_expanded_bytes(array: pa.Array, path: str) -> int:
    """Return the approximate number of bytes that the array has without dictionaries, runs and views.

    These encodings refer to a value several times, so a small body may expand to very many bytes.

    Args:
        array: The values of a column, or of a part of it.
        path: The name of the column, for messages.

    Raises:
        BadRequest: The size of the array's values cannot be estimated.
    """
    kind: Any = array.type
    if pa.types.is_primitive(kind):
        return len(array) * max(1, int(kind.bit_width) // 8)
    if any(is_kind(kind) for is_kind in _VARIABLE_SIZE_CHECKS):
        return int(array.nbytes)
    if isinstance(array, pa.ExtensionArray):
        return estimate_expanded_bytes(array.storage, path)
    if pa.types.is_dictionary(kind):
        sizes = _measure_values(array.dictionary, path)
        return _sum_sizes(pc.take(sizes, array.indices))
    if pa.types.is_run_end_encoded(kind):
        sizes = _measure_values(array.values, path)
        return _sum_sizes(pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(array.run_ends, sizes)))
    if pa.types.is_struct(kind):
        children = (estimate_expanded_bytes(array.field(n), path) for n in range(kind.num_fields))
        return len(array) + sum(children)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        if _sum_sizes(pc.list_value_length(array)) > len(array.values):
            raise BadRequest(f"Column {path}: the list views name an element twice; send lists")
        return _NESTED_VALUE_BYTES * len(array) + estimate_expanded_bytes(array.values, path)
    if pa.types.is_map(kind):
        return (
            _NESTED_VALUE_BYTES * len(array)
            + estimate_expanded_bytes(array.keys, path)
            + estimate_expanded_bytes(array.items, path)
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _NESTED_VALUE_BYTES * len(array) + estimate_expanded_bytes(array.values, path)
    return _sum_sizes(_measure_values(array, path))


def _sum_sizes(sizes: pa.Array) -> int:
    return int(pc.sum(pc.cast(sizes, pa.int64())).as_py() or 0)


def _measure_values(array: pa.Array, path: str) -> pa.Array:
    """Return the size of each value in bytes.

    Raises:
        BadRequest: The values are nested, or are themselves a dictionary, runs or a union.
    """
    kind: Any = array.type
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.array(_read_view_lengths(array))
    if any(is_kind(kind) for is_kind in _VARIABLE_SIZE_CHECKS):
        return pc.cast(pc.binary_length(array), pa.int64())
    if (
        pa.types.is_null(kind)
        or pa.types.is_primitive(kind)
        or pa.types.is_fixed_size_binary(kind)
        or _is_decimal(kind)
    ):
        width = _NULL_BYTES if pa.types.is_null(kind) else max(1, kind.bit_width // 8)
        return pa.array(np.full(len(array), width, np.int64))
    raise BadRequest(f"Column {path} has {str(kind)[:100]} values; send them without a dictionary, runs or unions")


def _is_decimal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_decimal(kind))


_VARIABLE_SIZE_CHECKS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)


def _read_view_lengths(array: pa.Array) -> Any:
    """Return the length of each value of an array of string views or binary views, int64[values]."""
    # A view has four numbers of 32 bits. The first is the length of the value.
    views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)
    lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
    is_valid = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(is_valid, np.maximum(lengths, 0), 0)
