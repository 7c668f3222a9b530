"""Conversion of Arrow arrays to keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.iceberg.files.budget import compute_expanded_bytes, has_shared_values
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS, TIMESTAMPS, get_decimal_scale
from seamark.formats.index.keys.keys import (
    SIGN,
    WIDE_DECIMAL_BYTES,
    Bits,
    Bytes,
    Codes,
    Keys,
    Longs,
    Mask,
    has_codes,
    pack_mask,
)
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

EXPANDED_MAX = 1 << 30
"""The maximum memory of shared values, such as those of a dictionary, if each row had its own copy, in bytes."""
_VIEW_NUMBERS = 4
"""The number of 32-bit numbers in a view of a string: its length, its first bytes, and the position of its other bytes.
"""
_UNITS_A_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_SECONDS_A_DAY = 86_400


class _Piece(NamedTuple):
    """The keys of one chunk of a column, in the form of `Keys`, except that `valid` and `nan` are bool[rows].

    Bits of several chunks could not be joined, because a chunk may end within a byte.
    """

    rows: int
    codes: Codes | None
    starts: Longs | None
    heap: Bytes | None
    valid: Mask | None
    nan: Mask | None


def convert_to_keys(array: pa.Array | pa.ChunkedArray, kind: str) -> Keys:
    """Convert a column to the keys that indexes store, one key for each row.

    The key of a value of up to 8 bytes is an unsigned 64-bit number, a code, and the key of any other value is bytes.
    The order of the keys is the order of the values.

    Args:
        array: The values.
        kind: The Iceberg type of the column.

    Raises:
        ValueError: An array does not have values of the Iceberg type.
    """
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    convert = _encode_piece if has_codes(kind) else _make_byte_keys
    pieces = [convert(_to_plain_array(chunk), kind) for chunk in chunks]
    pieces = pieces or [convert(pa.nulls(0), kind)]
    rows = sum(piece.rows for piece in pieces)
    return Keys(
        kind,
        rows,
        _concatenate_arrays([piece.codes for piece in pieces]),
        _concatenate_starts([piece.starts for piece in pieces]),
        _concatenate_arrays([piece.heap for piece in pieces]),
        _concatenate_masks(pieces, [piece.valid for piece in pieces], True),
        _concatenate_masks(pieces, [piece.nan for piece in pieces], False),
    )


def _concatenate_arrays(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    existing_parts = [part for part in parts if part is not None]
    return existing_parts[0] if len(existing_parts) == 1 else np.concatenate(existing_parts) if existing_parts else None


def _concatenate_starts(parts: Sequence[Longs | None]) -> Longs | None:
    """Return the positions at which the joined keys begin, or None if no part has positions.

    Each array has the positions in its own bytes, and ends with the end of its last key. So each array is moved by the
    number of bytes of the arrays before it.
    """
    existing_parts = [part for part in parts if part is not None]
    if len(existing_parts) < 2:
        return existing_parts[0] if existing_parts else None
    edges = np.cumsum([0] + [part[-1] for part in existing_parts])
    moved_parts = (part[:-1] + edge for part, edge in zip(existing_parts, edges[:-1], strict=True))
    return np.concatenate([*moved_parts, edges[-1:]])


def _concatenate_masks(pieces: Sequence[_Piece], masks: Sequence[Mask | None], default: bool) -> Bits | None:
    """Join the masks of pieces. A mask that is None has the value `default` in all rows."""
    if all(mask is None for mask in masks):
        return None
    full_masks = (
        np.full(piece.rows, default) if mask is None else mask for piece, mask in zip(pieces, masks, strict=True)
    )
    return pack_mask(np.concatenate(list(full_masks)))


def _to_plain_array(array: pa.Array) -> pa.Array:
    """Return the array without extension type, dictionary, runs or views, which only affect how values are stored.

    Raises:
        ValueError: The values would take more than EXPANDED_MAX bytes if each row had its own copy.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if has_shared_values(array.type) and compute_expanded_bytes(array) > EXPANDED_MAX:
        raise ValueError(f"the values would take more than {EXPANDED_MAX:,} bytes if each row had its own copy")
    if pa.types.is_dictionary(array.type):
        return _to_plain_array(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        return _to_plain_array(pc.run_end_decode(array))
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        return _clear_views_of_nulls(array).cast(pa.large_binary())
    return array


def _clear_views_of_nulls(array: pa.Array) -> pa.Array:
    """Return the array with empty views for nulls.

    Arrow validates only the views of values. Its cast also copies the views of nulls, and their lengths can be
    negative.
    """
    if array.null_count == 0:
        return array
    is_present = array.is_valid()
    views = np.frombuffer(array.buffers()[1], dtype=np.int32).reshape(-1, _VIEW_NUMBERS)
    views = views[array.offset : array.offset + len(array)].copy()
    views[~is_present.to_numpy(zero_copy_only=False)] = 0
    validity = pc.if_else(is_present, True, None).buffers()[0]
    return pa.Array.from_buffers(array.type, len(array), [validity, pa.py_buffer(views), *array.buffers()[2:]])


def _read_validity(array: pa.Array) -> Mask | None:
    """Return which rows are not null, or None if no row is null."""
    if array.null_count == 0:
        return None
    valid: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _make_null_mask(rows: int) -> Mask | None:
    """Return False for each row, because all rows are null. Without rows, the result is None."""
    return np.zeros(rows, dtype=np.bool_) if rows else None


def _view_numbers(array: pa.Array, dtype: str, width: int = 1) -> npt.NDArray[Any]:
    """Return the fixed-width values of an array without copying them. The values of nulls are undefined.

    Args:
        array: The array, which can be a slice of a larger array.
        dtype: The numpy type of an item.
        width: The number of items of each value.
    """
    item_dtype = np.dtype(dtype)
    data = array.buffers()[1]
    if len(array) == 0 or data is None:
        return np.zeros(0, dtype=item_dtype)
    return np.frombuffer(data, item_dtype, len(array) * width, array.offset * width * item_dtype.itemsize)


def _encode_piece(array: pa.Array, kind: str) -> _Piece:
    """Convert an array whose keys are codes, 64-bit numbers in the order of the values.

    Signed integers become unsigned codes by a flip of the sign bit. A null has the code 0.
    """
    rows, name = len(array), get_base_name(kind)
    if pa.types.is_null(array.type):
        codes = np.zeros(rows, dtype=np.uint64)
        return _Piece(rows, codes, starts=None, heap=None, valid=_make_null_mask(rows), nan=None)
    valid, nan = _read_validity(array), None
    if name in FLOATS and pa.types.is_floating(array.type):
        codes, nan = _encode_floats(array, name, valid)
    elif name == "boolean" and pa.types.is_boolean(array.type):
        codes = array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64)
    else:
        codes = _read_integers(array, kind, name, valid).view(np.uint64) ^ np.uint64(SIGN)
    if valid is not None:
        codes[~valid] = 0
    return _Piece(rows, codes, starts=None, heap=None, valid=valid, nan=nan)


def _encode_floats(array: pa.Array, name: str, valid: Mask | None) -> tuple[Codes, Mask | None]:
    """Return the codes of floats, and bool[rows] of the NaNs, or None if there are no NaNs.

    A code consists of the bits of the double, in an order that unsigned comparisons keep: a negative number has all
    bits inverted, and any other number has its sign bit set. A double in a column of floats must be a float.
    """
    # The numpy types by their size in bytes.
    numbers = _view_numbers(array, {2: "f2", 4: "f4", 8: "f8"}[array.type.bit_width // 8])
    # This ignores a warning about a signalling NaN, or a double outside the range of floats.
    with np.errstate(invalid="ignore", over="ignore"):
        doubles = numbers.astype(np.float64)
        if name == "float" and numbers.itemsize > 4:
            float32_numbers = numbers.astype(np.float32)
            # A NaN differs from itself, so `numbers == numbers` excludes NaNs.
            _refuse_values((float32_numbers != numbers) & (numbers == numbers), valid, array.type, name)
    signs = (doubles.view(np.int64) >> 63).view(np.uint64)
    codes = doubles.view(np.uint64) ^ (signs | np.uint64(SIGN))
    nan = np.isnan(doubles)
    if valid is not None:
        nan &= valid
    if not nan.any():
        return codes, None
    codes[nan] = 0
    return codes, nan


def _read_integers(array: pa.Array, kind: str, name: str, valid: Mask | None) -> Longs:
    """Return the values of a type with integer values, int64[rows]. The values of nulls are undefined.

    Callers must not write to the array, because it may share the memory of the Arrow array.
    """
    arrow = array.type
    if name == "decimal" and pa.types.is_decimal(arrow):
        high, low = _split_halves(array, kind, valid)
        numbers = low.view(np.int64)
        # The number fits into 64 bits if the high half only repeats the sign of the low half.
        _refuse_values(high != numbers >> 63, valid, arrow, kind)
        return numbers
    if name in ("int", "long") and pa.types.is_integer(arrow):
        numbers = _view_numbers(array, f"{'i' if pa.types.is_signed_integer(arrow) else 'u'}{arrow.bit_width // 8}")
        # Java reads unsigned integers as signed, or not at all.
        if numbers.dtype.kind == "u" and numbers.itemsize >= 4:
            _refuse_values(numbers > np.iinfo(f"i{numbers.itemsize}").max, valid, arrow, kind)
        return numbers.astype(np.int64)
    if (name == "date" or name in TIMESTAMPS) and pa.types.is_date(arrow):
        # The file was written before its column was promoted from date to a timestamp (spec: "Schema Evolution").
        # A date32 is in days, and a date64 in milliseconds.
        stored_units = 1 if pa.types.is_date32(arrow) else _SECONDS_A_DAY * 1000
        numbers = _view_numbers(array, "i4" if pa.types.is_date32(arrow) else "i8").astype(np.int64, copy=False)
        wanted_units = 1 if name == "date" else _SECONDS_A_DAY * _UNITS_A_SECOND[_read_unit(name)]
        return _rescale_numbers(numbers, stored_units, wanted_units, valid, arrow, kind)
    if (name == "time" and pa.types.is_time(arrow)) or (name in TIMESTAMPS and pa.types.is_timestamp(arrow)):
        if name in TIMESTAMPS and _read_unit(name) == "ns" and arrow.unit != "ns":
            # Files with INT96 timestamps are read in microseconds, without their nanoseconds.
            raise _make_no_values_error(arrow, kind)
        numbers = _view_numbers(array, f"i{arrow.bit_width // 8}").astype(np.int64, copy=False)
        return _rescale_numbers(
            numbers, _UNITS_A_SECOND[arrow.unit], _UNITS_A_SECOND[_read_unit(name)], valid, arrow, kind
        )
    raise _make_no_values_error(arrow, kind)


def _read_unit(name: str) -> str:
    return "ns" if name.endswith("_ns") else "us"


def _rescale_numbers(
    numbers: Longs, stored_units: int, wanted_units: int, valid: Mask | None, arrow: pa.DataType, kind: str
) -> Longs:
    """Convert times of one unit to another unit. A time that the other unit cannot represent exactly is refused.

    Args:
        numbers: The times.
        stored_units: How many units of `numbers` are in a period, such as 1,000 milliseconds in a second.
        wanted_units: How many units of the result are in the same period. It divides `stored_units`, or vice versa.
        valid: The rows that are not null, or None for all rows.
        arrow: The Arrow type, for the message of the error.
        kind: The Iceberg type, for the message of the error.
    """
    if wanted_units > stored_units:
        factor = wanted_units // stored_units
        limit = (SIGN - 1) // factor
        _refuse_values((numbers > limit) | (numbers < -limit), valid, arrow, kind)
        return numbers * factor
    if wanted_units < stored_units:
        quotients, remainders = np.divmod(numbers, stored_units // wanted_units)
        _refuse_values(remainders != 0, valid, arrow, kind)
        return quotients
    return numbers


def _split_halves(array: pa.Array, kind: str, valid: Mask | None) -> tuple[Longs, Codes]:
    """Return the high and the low 64 bits of the unscaled values of a decimal array of any width.

    In a narrow array, the high bits are those of the sign. Wider values than 128 bits are refused.
    """
    if array.type.scale != get_decimal_scale(kind):
        raise _make_no_values_error(array.type, kind)
    width = array.type.bit_width // 8
    if width <= 8:
        numbers = _view_numbers(array, f"i{width}").astype(np.int64, copy=False)
        return numbers >> 63, numbers.view(np.uint64)
    words = _view_numbers(array, "u8", width // 8).reshape(-1, width // 8)
    high = words[:, 1].view(np.int64)
    # The further words of a decimal256 must only repeat the sign.
    for word in range(2, width // 8):
        _refuse_values(words[:, word].view(np.int64) != high >> 63, valid, array.type, kind)
    return high, words[:, 0]


def _refuse_values(is_wrong: Mask, valid: Mask | None, arrow: pa.DataType, kind: str) -> None:
    """Check that only nulls are wrong, because the values of nulls are undefined.

    Args:
        is_wrong: The rows whose values cannot be represented.
        valid: The rows that are not null, or None for all rows.
        arrow: The Arrow type, for the message of the error.
        kind: The Iceberg type, for the message of the error.

    Raises:
        ValueError: A row that is not null is wrong.
    """
    if (is_wrong if valid is None else is_wrong & valid).any():
        raise _make_no_values_error(arrow, kind)


def _make_no_values_error(arrow: pa.DataType, kind: str) -> ValueError:
    return ValueError(f"a column of Arrow type {arrow} does not have values of type {kind}")


def _make_byte_keys(array: pa.Array, kind: str) -> _Piece:
    """Convert an array whose keys are bytes.

    A wide decimal becomes 16 big-endian bytes with an inverted sign bit, so that the order of bytes is the order of
    values. Other values keep their bytes.
    """
    rows, arrow = len(array), array.type
    if pa.types.is_null(arrow):
        nothing = np.zeros(0, dtype=np.uint8)
        no_starts = np.zeros(rows + 1, dtype=np.int64)
        return _Piece(rows, codes=None, starts=no_starts, heap=nothing, valid=_make_null_mask(rows), nan=None)
    valid = _read_validity(array)
    if get_base_name(kind) == "decimal" and pa.types.is_decimal(arrow):
        high, low = _split_halves(array, kind, valid)
        big_endian_words = np.empty((rows, 2), dtype=">u8")
        big_endian_words[:, 0], big_endian_words[:, 1] = high.view(np.uint64) ^ np.uint64(SIGN), low
        starts, heap = _make_even_starts(rows, WIDE_DECIMAL_BYTES), big_endian_words.view(np.uint8).reshape(-1)
    elif get_base_name(kind) != "decimal" and pa.types.is_fixed_size_binary(arrow):
        starts, heap = _make_even_starts(rows, arrow.byte_width), _view_numbers(array, "u1", arrow.byte_width)
    elif get_base_name(kind) != "decimal" and (offset_dtype := _OFFSET_DTYPES.get(arrow)) is not None:
        starts, heap = _make_variable_keys(array, offset_dtype)
    else:
        raise _make_no_values_error(arrow, kind)
    if valid is not None:
        starts, heap = _remove_nulls(starts, heap, valid)
    return _Piece(rows, codes=None, starts=starts, heap=heap, valid=valid, nan=None)


_OFFSET_DTYPES = {pa.string(): "i4", pa.binary(): "i4", pa.large_string(): "i8", pa.large_binary(): "i8"}


def _make_even_starts(rows: int, width: int) -> Longs:
    return np.arange(rows + 1, dtype=np.int64) * width


def _make_variable_keys(array: pa.Array, offset_dtype: str) -> tuple[Longs, Bytes]:
    """Return the starts and the bytes of texts or of bytes of any length."""
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return np.zeros(len(array) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    skipped_bytes = array.offset * np.dtype(offset_dtype).itemsize
    starts = np.frombuffer(offsets, offset_dtype, len(array) + 1, skipped_bytes).astype(np.int64, copy=False)
    heap = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    # A slice of an Arrow array shares the bytes of the whole array, so remove the bytes outside the slice.
    return starts - starts[0], heap[starts[0] : starts[-1]]


def _remove_nulls(starts: Longs, heap: Bytes, valid: Mask) -> tuple[Longs, Bytes]:
    """Return the positions and the bytes of keys without the bytes of nulls. Arrow allows a null to have bytes.

    Args:
        starts: int64[rows + 1], the position of each key in `heap`, and the end of the last key.
        heap: The bytes of all keys.
        valid: The rows that are not null.
    """
    lengths = np.diff(starts)
    if not lengths[~valid].any():
        return starts, heap
    mask = np.repeat(valid, lengths)
    lengths[~valid] = 0
    return np.concatenate([[0], np.cumsum(lengths)]), heap[mask]
