"""Counts the distinct values of Arrow columns with theta sketches, which contain hashes of serialised values.

The Iceberg spec defines the serialisation ("Binary single-value serialization"): numbers are little-endian, and
decimals have the shortest big-endian two's complement form. Spark and Trino hash the same bytes, so their sketches can
be merged with the sketches of this module.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.index.keys.theta import Hashes, SketchBuilder, hash_bytes, hash_fixed

_BYTES_BY_TYPE = {
    "int": 4,
    "date": 4,
    "float": 4,
    **dict.fromkeys(("long", "double", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), 8),
}
_BYTES_PER_DECIMAL = 16
Bytes = npt.NDArray[np.uint8]


def add_values(builder: SketchBuilder, column: pa.Array, kind: str) -> None:
    """Add the values of a column, except nulls, to a sketch.

    Args:
        builder: The sketch.
        column: The column, with the Arrow type that readers return for the Iceberg type.
        kind: The Iceberg type.
    """
    values = column.storage if isinstance(column, pa.ExtensionArray) else column
    if values.null_count:
        values = values.drop_null()
    if len(values):
        builder.add(_hash_values(values, kind))


def _hash_values(values: pa.Array, kind: str) -> Hashes:
    """Return the hashes of the values of a column whose Iceberg type is `kind`.

    Equal booleans or decimals are hashed only once. This does not matter, because distinct values are counted.
    A value is hashed in the form of Iceberg's single-value serialisation. A decimal therefore has its shortest form.
    """
    name = get_base_name(kind)
    if name in _BYTES_BY_TYPE:
        width = _BYTES_BY_TYPE[name]
        return hash_fixed(_read_fixed_bytes(values, width), width)
    if name == "boolean":
        return hash_fixed(pc.unique(values).cast(pa.uint8()).to_numpy(zero_copy_only=False), 1)
    if name == "decimal":
        # The shortest form is computed only for distinct values.
        values = pc.unique(values)
        return hash_bytes(
            *_encode_shortest(_read_fixed_bytes(values, _BYTES_PER_DECIMAL).reshape(-1, _BYTES_PER_DECIMAL))
        )
    if pa.types.is_fixed_size_binary(values.type):
        width = values.type.byte_width
        return hash_fixed(_read_fixed_bytes(values, width), width)
    values = values.cast(pa.large_binary())
    # The buffers of an array are the validity, the offsets (8 bytes each) and the bytes of the values.
    _, offsets, heap = values.buffers()
    starts = np.frombuffer(offsets, np.int64, len(values) + 1, 8 * values.offset)
    return hash_bytes(np.frombuffer(heap, np.uint8) if heap is not None else np.zeros(0, np.uint8), starts)


def _read_fixed_bytes(values: pa.Array, width: int) -> Bytes:
    """Return the bytes of the values, as uint8[values, width].

    Raises:
        ValueError: The width of the values differs.
    """
    if values.type.bit_width != 8 * width:
        raise ValueError(f"values of {values.type} do not have {width} bytes")
    return np.frombuffer(values.buffers()[1], np.uint8, len(values) * width, values.offset * width)


def _encode_shortest(little_endian: Bytes) -> tuple[Bytes, npt.NDArray[np.int64]]:
    """Return the shortest big-endian forms of numbers: a heap of bytes, and the start of each number in the heap.

    Leading bytes that only repeat the sign are removed.

    Args:
        little_endian: The numbers in little-endian form, as uint8[rows, 16].
    """
    big_endian = little_endian[:, ::-1]
    # The first bit is the sign. A byte that repeats it has eight equal bits.
    sign = np.where(big_endian[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8)
    # A byte can be removed if it and all preceding bytes repeat the sign, and the next byte has the same sign.
    repeats = (big_endian[:, :-1] == sign) & ((big_endian[:, 1:] >= 0x80) == (sign == 0xFF))
    removed_bytes = np.logical_and.accumulate(repeats, axis=1).sum(axis=1)
    is_significant = np.arange(big_endian.shape[1]) >= removed_bytes[:, None]
    starts = np.zeros(len(big_endian) + 1, dtype=np.int64)
    np.cumsum(big_endian.shape[1] - removed_bytes, out=starts[1:])
    return np.ascontiguousarray(big_endian[is_significant]), starts
