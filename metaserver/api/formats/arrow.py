"""Conversion of NumPy columns to Arrow, without copies where possible, and of tables to Arrow IPC streams.

Arrow types correspond to Iceberg types as in the specification ("Parquet", whose logical types are those of Arrow).
UUIDs and fixed are bytes. Metadata of an answer, such as the next page's token, is metadata of the stream's schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.index.packing import MISSING, Longs
from seamark.formats.runtime.errors import NotAcceptable, TooLarge
from seamark.metaserver.planner.lookup.lookup import Strings

ARROW_STREAM = "application/vnd.apache.arrow.stream"
_JSON_RANGES = ("application/json", "application/*", "*/*")
_OFFSET_MAX = 2**31 - 1
"""The largest offset in an Arrow array of strings, whose offsets have 32 bits."""


def wants_arrow(headers: Mapping[str, str]) -> bool:
    """Return whether the client prefers an Arrow IPC stream to JSON, by the weights of the types in `Accept`.

    If both have the same weight, the type that is first in the header is preferred.

    Raises:
        NotAcceptable: The client accepts only other types (RFC 9110).
    """
    accept_header = headers.get("Accept", "*/*")
    best_weight, prefers_arrow = 0.0, False
    for part in accept_header.split(","):
        name, *parameters = [piece.strip().lower() for piece in part.split(";")]
        weight = _parse_weight(parameters)
        is_arrow = name == ARROW_STREAM
        if (is_arrow or name in _JSON_RANGES) and weight > best_weight:
            best_weight, prefers_arrow = weight, is_arrow
    if best_weight == 0:
        raise NotAcceptable(
            f"Accept is {accept_header[:100]!r}; the server can send application/json and {ARROW_STREAM}"
        )
    return prefers_arrow


def _parse_weight(parameters: Sequence[str]) -> float:
    """Return the weight of a media type in `Accept`. The default is 1, and an invalid weight counts as 0."""
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


def encode_stream(columns: Mapping[str, pa.Array], metadata: Mapping[str, str]) -> bytes:
    """Return an Arrow IPC stream with one record batch.

    Args:
        columns: The columns by name. In the names in the stream, `-` is replaced by `_`.
        metadata: The metadata of the schema.
    """
    fields = [pa.field(name.replace("-", "_"), array.type) for name, array in columns.items()]
    schema = pa.schema(fields, metadata=dict(metadata))
    batch = pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(batch)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def make_integer_array(values: Longs, kind: pa.DataType | None = None) -> pa.Array:
    """Convert int64[rows] to an array of type `kind`, with null for MISSING.

    `kind` is boolean, or a type of 32 or 64 bits with integer storage. The default is int64.
    """
    arrow_type = kind or pa.int64()
    is_present = values != MISSING
    if pa.types.is_boolean(arrow_type):
        return pa.array(values == 1, mask=~is_present)
    converted_values = (
        np.where(is_present, values, 0).astype(np.int32) if arrow_type.bit_width == 32 else np.ascontiguousarray(values)
    )
    return pa.Array.from_buffers(arrow_type, len(values), [_pack_validity(is_present), pa.py_buffer(converted_values)])


def make_text_array(strings: Strings, kind: pa.DataType | None = None) -> pa.Array:
    """Convert strings to an Arrow array.

    Args:
        strings: The strings.
        kind: The type of the array, which has 32-bit offsets, such as binary. The default is string.

    Raises:
        TooLarge: The strings do not fit into one array.
    """
    if strings.ends[-1] > _OFFSET_MAX:
        raise TooLarge(f"The strings of the page have {strings.ends[-1]:,} bytes, more than 2 GiB; use a smaller limit")
    buffers = [
        _pack_validity(strings.present != 0),
        pa.py_buffer(strings.ends.astype(np.int32)),
        pa.py_buffer(strings.data),
    ]
    array = pa.Array.from_buffers(kind or pa.string(), len(strings.present), buffers)
    if kind is None or pa.types.is_string(kind):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid:  # A writer truncated a value within a character.
            return pa.array(
                [None if string is None else string.decode("utf-8", "replace") for string in strings.list_values()]
            )
    return array


def find_arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type for the bounds of an Iceberg type, or null for types without an order.

    Bounds may be shorter than values, so this type may differ from the Arrow type of the values.
    """
    if get_base_name(kind) in ("uuid", "fixed"):
        return pa.binary()
    try:
        return to_row_type(kind)
    except ValueError:
        return pa.null()


def is_stored_as_integer(kind: pa.DataType) -> bool:
    """Return whether Arrow stores values of the type as integers, as it does for integers, dates and times."""
    return bool(pa.types.is_integer(kind) or pa.types.is_temporal(kind))


def make_bound_array(values: Longs | npt.NDArray[np.float64] | Strings, kind: str) -> pa.Array:
    """Convert bounds from `FoundStatistics.read_bounds` to an array of the column's type."""
    arrow_type = find_arrow_type(kind)
    if pa.types.is_null(arrow_type):
        return pa.nulls(len(values.present if isinstance(values, Strings) else values))
    if isinstance(values, Strings):
        return (
            _convert_long_decimals(values, arrow_type)
            if pa.types.is_decimal(arrow_type)
            else make_text_array(values, arrow_type)
        )
    if values.dtype == np.float64:
        converted_values = np.ascontiguousarray(values, dtype=np.float32 if arrow_type.bit_width == 32 else np.float64)
        return pa.Array.from_buffers(
            arrow_type, len(values), [_pack_validity(~np.isnan(values)), pa.py_buffer(converted_values)]
        )
    longs = values.astype(np.int64, copy=False)
    if pa.types.is_decimal(arrow_type):
        # A decimal of Arrow has 128 bits: the low word is the number, and the high word repeats its sign.
        word_pairs = np.stack([longs, longs >> np.int64(63)], axis=1)
        return pa.Array.from_buffers(
            arrow_type, len(longs), [_pack_validity(longs != MISSING), pa.py_buffer(word_pairs)]
        )
    return make_integer_array(longs, arrow_type)


def _convert_long_decimals(values: Strings, arrow_type: pa.DataType) -> pa.Array:
    """Convert decimals of 128 bits to Arrow's little-endian form.

    The values are big-endian, with 2**127 added, so that their order as bytes is that of the numbers.
    """
    is_present = values.present != 0
    words = np.zeros((len(is_present), 2), dtype=np.uint64)
    words[is_present] = values.data.view(">u8").reshape(-1, 2)[:, ::-1]
    words[is_present, 1] ^= np.uint64(1 << 63)  # This subtracts 2**127.
    return pa.Array.from_buffers(arrow_type, len(is_present), [_pack_validity(is_present), pa.py_buffer(words)])


def _pack_validity(is_present: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    """Return the validity bitmap, or None if no value is null."""
    return None if is_present.all() else pa.py_buffer(np.packbits(is_present, bitorder="little"))
