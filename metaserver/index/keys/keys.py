"""Keys: the common form of values in all indexes, and predicates as ranges of keys.

A value of up to 8 bytes is a *code*, an unsigned 64-bit number; any other is its bytes. Both keep the order of values,
so indexes compare, hash and sort keys without knowing the type. By Iceberg type:

    boolean                            0, 1
    int, long, date, time, timestamps  value + 2^63
    decimal of up to 18 digits         unscaled value + 2^63
    float, double                      the bits of the double: inverted if it is negative, else with the sign bit set
    string                             UTF-8
    binary, fixed, uuid                unchanged
    decimal of more digits             16 bytes, big-endian, of unscaled value + 2^127

So -0.0 and 0.0 are adjacent and distinct: the caller decides whether they are equal. Null and NaN have no key, only a
bit each. An array that does not match its type exactly (nanoseconds in a column of microseconds) is a ValueError,
because readers differ about it, and a file without an index is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.metaserver.deferred import Deferred
from seamark.metaserver.iceberg.files.budget import expanded_bytes
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import (
    FLOATS,
    INTS,
    LONGS,
    TIMESTAMPS,
    Value,
    decimal_precision,
    decimal_scale,
)

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = Deferred("pyarrow.compute")

Key: TypeAlias = int | bytes
Bits: TypeAlias = npt.NDArray[np.uint64]
"""Row r is bit r % 64 of word r // 64; bits after the last row are zero."""
Codes: TypeAlias = npt.NDArray[np.uint64]
Longs: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]

CODE_MAX = (1 << 64) - 1
POINTS_MAX = 1024
"""Keys of wider ranges that are listed one by one, in addition to any number of single keys."""

EXPANDED_MAX = 1 << 30
"""Memory limit of shared values, such as a dictionary's, if each row had its own copy."""
_RAW = frozenset({"binary", "fixed", "uuid"})
_SIGN = 1 << 63
_BIAS = 1 << 127
_CODE_DIGITS_MAX, _DIGITS_MAX = 18, 38
_WIDE_DECIMAL = 16
_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<Q")
_UNITS_A_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The values of a term in the rows of one file, in their physical order.

    Either `codes`, uint64[rows], or `starts`, int64[rows + 1], into `heap`, uint8[]. The code of a null is 0 and its
    bytes are empty; the code of a NaN is 0, and it is valid. `valid` and `nan` are None without nulls and NaNs.
    """

    kind: str
    rows: int
    codes: Codes | None
    starts: Longs | None
    heap: Bytes | None
    valid: Bits | None
    nan: Bits | None

    @property
    def present(self) -> Mask | None:
        """bool[rows]: the rows with a key, neither null nor NaN; None for all."""
        if self.valid is None and self.nan is None:
            return None
        present = np.ones(self.rows, dtype=np.bool_) if self.valid is None else mask_of(self.valid, self.rows)
        return present if self.nan is None else present & ~mask_of(self.nan, self.rows)


class KeyRange(NamedTuple):
    """The keys between two bounds; None is unbounded. Null and NaN are in no range."""

    low: Key | None
    high: Key | None
    low_open: bool = False
    high_open: bool = False

    def contains(self, key: Key) -> bool:
        low: Any = self.low
        high: Any = self.high
        above = low is None or key > low or (key == low and not self.low_open)
        return above and (high is None or key < high or (key == high and not self.high_open))


@dataclass(frozen=True)
class KeyRanges:
    """The keys of a term that match a predicate: ascending, disjoint ranges, with flags for null and NaN.

    ValueError if the ranges overlap or are unordered.
    """

    kind: str
    ranges: tuple[KeyRange, ...]
    nulls: bool = False
    nans: bool = False

    def __post_init__(self) -> None:
        for before, after in pairwise(self.ranges):
            if _overlap(before, after):
                raise ValueError(f"ranges of keys overlap or are out of order: {before}, {after}")

    def contains(self, key: Key) -> bool:
        """Whether a row with this key matches."""
        return any(key_range.contains(key) for key_range in self.ranges)

    @cached_property
    def closed(self) -> tuple[KeyRange, ...]:
        """The same keys in ranges whose bounds are closed if the bound's key has a neighbour; ranges of codes always
        are.
        """
        ranges = self.ranges
        if has_codes(self.kind):
            ranges = tuple(_bounded(key_range) for key_range in ranges)
        return tuple(closed for closed in map(_closed, ranges) if closed is not None)

    @cached_property
    def points(self) -> tuple[Key, ...] | None:
        """All keys of the ranges, ascending, if these are single keys; None otherwise.

        A range of a few codes counts as single keys: 0.0 of any sign is two keys.
        """
        points: list[Key] = []
        listed = 0
        for key_range in self.closed:
            if key_range.low is not None and key_range.low == key_range.high:
                points.append(key_range.low)
            elif (
                isinstance(key_range.low, int)
                and isinstance(key_range.high, int)
                and key_range.high - key_range.low < POINTS_MAX - listed
            ):
                listed += key_range.high - key_range.low + 1
                points.extend(range(key_range.low, key_range.high + 1))
            else:
                return None
        return tuple(points)


def _overlap(before: KeyRange, after: KeyRange) -> bool:
    """Whether a key may be in both, or they are unordered."""
    high: Any = before.high
    low: Any = after.low
    if high is None or low is None:
        return True
    return bool(high > low) or (high == low and not before.high_open and not after.low_open)


def _bounded(key_range: KeyRange) -> KeyRange:
    """A range of codes with the minimum and maximum code in place of missing bounds."""
    low = (0, False) if key_range.low is None else (key_range.low, key_range.low_open)
    high = (CODE_MAX, False) if key_range.high is None else (key_range.high, key_range.high_open)
    return KeyRange(low[0], high[0], low[1], high[1])


def _closed(key_range: KeyRange) -> KeyRange | None:
    """The same keys with closed bounds if the bound's key has a neighbour; None for an empty range.

    The successor of a bytes key is the key and a zero; only keys that end in a zero have a predecessor.
    """
    low, high, low_open, high_open = key_range
    if low is not None and low_open:
        if low == CODE_MAX:
            return None
        low, low_open = (low + b"\0" if isinstance(low, bytes) else low + 1), False
    if high is not None and high_open:
        if high in (0, b""):
            return None
        if isinstance(high, int):
            high, high_open = high - 1, False
        elif high.endswith(b"\0"):
            high, high_open = high[:-1], False
    if low is not None and not KeyRange(None, high, False, high_open).contains(low):
        return None
    return KeyRange(low, high, low_open, high_open)


@lru_cache(maxsize=1024)
def has_codes(kind: str) -> bool:
    """Whether keys of the Iceberg type are codes, not bytes. ValueError for a type without keys."""
    name = base_name(kind)
    if name == "decimal":
        return decimal_precision(kind) <= _CODE_DIGITS_MAX
    if name == "string" or name in _RAW:
        return False
    # a column of type unknown has only nulls, and their code is 0
    if name in ("boolean", "unknown") or name in INTS or name in LONGS or name in FLOATS:
        return True
    raise ValueError(f"values of type {kind} have no order, so they have no keys: they cannot be indexed")


def family(kind: str) -> str:
    """One name for all types with the same keys: an index stays valid when a column is promoted within it."""
    name = base_name(kind)
    if name == "decimal":
        digits = _CODE_DIGITS_MAX if has_codes(kind) else _DIGITS_MAX
        return f"decimal({digits}, {decimal_scale(kind)})"
    return "long" if name == "int" else "double" if name == "float" else kind


def key_of(value: Value, kind: str) -> Key:
    """The key of a literal (`expression.py`). ValueError for NaN, which has none, and for a value of another type."""
    match value:
        case bool() if kind == "boolean":
            return int(value)
        case _ if isinstance(value, bool) or kind == "boolean":
            pass
        case int() | float() if kind in FLOATS:
            if value != value:
                raise ValueError("NaN has no key: use the flag for NaN")
            (word,) = _WORD.unpack(_DOUBLE.pack(value))
            return int(word ^ CODE_MAX if word & _SIGN else word | _SIGN)
        case int() if has_codes(kind) and -_SIGN <= value < _SIGN:
            return value + _SIGN
        case int() if not has_codes(kind) and base_name(kind) == "decimal" and -_BIAS <= value < _BIAS:
            return (value + _BIAS).to_bytes(_WIDE_DECIMAL, "big")
        case str() if kind == "string":
            return value.encode()
        case bytes() if base_name(kind) in _RAW:
            return value
    raise ValueError(f"{value!r} is not a value of type {kind}")


def mask_of(bits: Bits, rows: int) -> Mask:
    """bool[rows] of packed bits."""
    return np.unpackbits(bits.view(np.uint8), count=rows, bitorder="little").view(np.bool_)


def bits_of(mask: Mask) -> Bits:
    """Packed bits of bool[rows]."""
    packed = np.zeros(-(-len(mask) // 64) * 8, dtype=np.uint8)
    packed[: -(-len(mask) // 8)] = np.packbits(mask, bitorder="little")
    return packed.view(np.uint64)


class _Piece(NamedTuple):
    """The keys of one contiguous array. `valid` and `nan` are bool[rows]."""

    rows: int
    codes: Codes | None
    starts: Longs | None
    heap: Bytes | None
    valid: Mask | None
    nan: Mask | None


def keys_of(array: pa.Array | pa.ChunkedArray, kind: str) -> Keys:
    """The keys of a column, row by row. ValueError if an array does not have values of the Iceberg type."""
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    convert = _coded if has_codes(kind) else _byte_keys
    pieces = [convert(_plain(chunk), kind) for chunk in chunks]
    pieces = pieces or [convert(pa.nulls(0), kind)]
    rows = sum(piece.rows for piece in pieces)
    return Keys(
        kind,
        rows,
        _joined([piece.codes for piece in pieces]),
        _joined_starts([piece.starts for piece in pieces]),
        _joined([piece.heap for piece in pieces]),
        _marked(pieces, [piece.valid for piece in pieces], True),
        _marked(pieces, [piece.nan for piece in pieces], False),
    )


def _joined(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else np.concatenate(present) if present else None


def _joined_starts(parts: Sequence[Longs | None]) -> Longs | None:
    present = [part for part in parts if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    ends = np.cumsum([0] + [part[-1] for part in present])
    return np.concatenate([*(part[:-1] + end for part, end in zip(present, ends[:-1], strict=True)), ends[-1:]])


def _marked(pieces: Sequence[_Piece], marks: Sequence[Mask | None], otherwise: bool) -> Bits | None:
    if all(mark is None for mark in marks):
        return None
    filled = (
        np.full(piece.rows, otherwise) if mark is None else mark for piece, mark in zip(pieces, marks, strict=True)
    )
    return bits_of(np.concatenate(list(filled)))


def _plain(array: pa.Array) -> pa.Array:
    """The array without extension type, dictionary, runs or views, which only affect storage."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if _is_shared(array.type) and expanded_bytes(array) > EXPANDED_MAX:
        raise ValueError(f"expanded to one value per row, they take more than {EXPANDED_MAX:,} bytes")
    if pa.types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        return _plain(pc.run_end_decode(array))
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _is_shared(kind: pa.DataType) -> bool:
    """Whether rows of an array may share the bytes of one value."""
    is_view = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
    return bool(is_view or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind))


def _valid(array: pa.Array) -> Mask | None:
    if array.null_count == 0:
        return None
    valid: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _none_valid(rows: int) -> Mask | None:
    return np.zeros(rows, dtype=np.bool_) if rows else None


def _numbers(array: pa.Array, dtype: str, width: int = 1) -> npt.NDArray[Any]:
    """The fixed-width values of an array in place, `width` items per row; undefined for nulls."""
    values = np.dtype(dtype)
    data = array.buffers()[1]
    if len(array) == 0 or data is None:
        return np.zeros(0, dtype=values)
    return np.frombuffer(data, values, len(array) * width, array.offset * width * values.itemsize)


def _coded(array: pa.Array, kind: str) -> _Piece:
    rows, name = len(array), base_name(kind)
    if pa.types.is_null(array.type):
        return _Piece(rows, np.zeros(rows, dtype=np.uint64), None, None, _none_valid(rows), None)
    valid, nan = _valid(array), None
    if name in FLOATS and pa.types.is_floating(array.type):
        codes, nan = _float_codes(array, name, valid)
    elif name == "boolean" and pa.types.is_boolean(array.type):
        codes = array.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint64)
    else:
        codes = _integers(array, kind, name, valid).view(np.uint64) ^ np.uint64(_SIGN)
    if valid is not None:
        codes[~valid] = 0
    return _Piece(rows, codes, None, None, valid, nan)


def _float_codes(array: pa.Array, name: str, valid: Mask | None) -> tuple[Codes, Mask | None]:
    numbers = _numbers(array, {2: "f2", 4: "f4", 8: "f8"}[array.type.bit_width // 8])
    with np.errstate(invalid="ignore", over="ignore"):  # of a signalling NaN, or a double beyond floats
        doubles = numbers.astype(np.float64)
        if name == "float" and numbers.itemsize > 4:
            narrow = numbers.astype(np.float32)
            _refuse((narrow != numbers) & (numbers == numbers), valid, array.type, name)
    signs = (doubles.view(np.int64) >> 63).view(np.uint64)
    codes = doubles.view(np.uint64) ^ (signs | np.uint64(_SIGN))
    nan = np.isnan(doubles)
    if valid is not None:
        nan &= valid
    if not nan.any():
        return codes, None
    codes[nan] = 0
    return codes, nan


def _integers(array: pa.Array, kind: str, name: str, valid: Mask | None) -> Longs:
    """int64[rows] of a type with integer values; undefined for nulls. The array is new, or never written to."""
    arrow = array.type
    if name == "decimal" and pa.types.is_decimal(arrow):
        high, low = _halves(array, kind, valid)
        numbers = low.view(np.int64)
        _refuse(high != numbers >> 63, valid, arrow, kind)
        return numbers
    if name in ("int", "long") and pa.types.is_integer(arrow):
        numbers = _numbers(array, f"{'i' if pa.types.is_signed_integer(arrow) else 'u'}{arrow.bit_width // 8}")
        if numbers.dtype.kind == "u" and numbers.itemsize >= 4:  # Java reads these as signed, or not at all
            _refuse(numbers > np.iinfo(f"i{numbers.itemsize}").max, valid, arrow, kind)
        return numbers.astype(np.int64)
    if (name == "date" or name in TIMESTAMPS) and pa.types.is_date(arrow):
        # a file from before a date was promoted to a timestamp (spec: "Schema Evolution")
        have = 1 if pa.types.is_date32(arrow) else _SECONDS_A_DAY * 1000
        numbers = _numbers(array, "i4" if pa.types.is_date32(arrow) else "i8").astype(np.int64, copy=False)
        want = 1 if name == "date" else _SECONDS_A_DAY * _UNITS_A_SECOND[_unit(name)]
        return _rescaled(numbers, have, want, valid, arrow, kind)
    if (name == "time" and pa.types.is_time(arrow)) or (name in TIMESTAMPS and pa.types.is_timestamp(arrow)):
        numbers = _numbers(array, f"i{arrow.bit_width // 8}").astype(np.int64, copy=False)
        return _rescaled(numbers, _UNITS_A_SECOND[arrow.unit], _UNITS_A_SECOND[_unit(name)], valid, arrow, kind)
    raise _no_values(arrow, kind)


def _unit(name: str) -> str:
    return "ns" if name.endswith("_ns") else "us"


def _rescaled(numbers: Longs, have: int, want: int, valid: Mask | None, arrow: pa.DataType, kind: str) -> Longs:
    """Converts counts of 1/`have` to counts of 1/`want`; one divides the other."""
    if want > have:
        factor = want // have
        limit = (_SIGN - 1) // factor
        _refuse((numbers > limit) | (numbers < -limit), valid, arrow, kind)
        return numbers * factor
    if want < have:
        whole, rest = np.divmod(numbers, have // want)
        _refuse(rest != 0, valid, arrow, kind)
        return whole
    return numbers


def _halves(array: pa.Array, kind: str, valid: Mask | None) -> tuple[Longs, Codes]:
    """High and low 64 bits of the unscaled values of a decimal array of any width."""
    if array.type.scale != decimal_scale(kind):
        raise _no_values(array.type, kind)
    width = array.type.bit_width // 8
    if width <= 8:
        narrow = _numbers(array, f"i{width}").astype(np.int64, copy=False)
        return narrow >> 63, narrow.view(np.uint64)
    words = _numbers(array, "u8", width // 8).reshape(-1, width // 8)
    high = words[:, 1].view(np.int64)
    for extra in range(2, width // 8):
        _refuse(words[:, extra].view(np.int64) != high >> 63, valid, array.type, kind)
    return high, words[:, 0]


def _refuse(wrong: Mask, valid: Mask | None, arrow: pa.DataType, kind: str) -> None:
    """ValueError if a row that is not null is wrong."""
    if (wrong if valid is None else wrong & valid).any():
        raise _no_values(arrow, kind)


def _no_values(arrow: pa.DataType, kind: str) -> ValueError:
    return ValueError(f"a column of Arrow type {arrow} does not hold values of type {kind}")


def _byte_keys(array: pa.Array, kind: str) -> _Piece:
    rows, arrow = len(array), array.type
    if pa.types.is_null(arrow):
        nothing = np.zeros(0, dtype=np.uint8)
        return _Piece(rows, None, np.zeros(rows + 1, dtype=np.int64), nothing, _none_valid(rows), None)
    valid = _valid(array)
    if base_name(kind) == "decimal" and pa.types.is_decimal(arrow):
        high, low = _halves(array, kind, valid)
        big = np.empty((rows, 2), dtype=">u8")
        big[:, 0], big[:, 1] = high.view(np.uint64) ^ np.uint64(_SIGN), low
        starts, heap = _even_starts(rows, _WIDE_DECIMAL), big.view(np.uint8).reshape(-1)
    elif base_name(kind) != "decimal" and pa.types.is_fixed_size_binary(arrow):
        starts, heap = _even_starts(rows, arrow.byte_width), _numbers(array, "u1", arrow.byte_width)
    elif base_name(kind) != "decimal" and (reader := _OFFSETS.get(arrow)) is not None:
        starts, heap = _variable(array, reader)
    else:
        raise _no_values(arrow, kind)
    if valid is not None:
        starts, heap = _without_nulls(starts, heap, valid)
    return _Piece(rows, None, starts, heap, valid, None)


_OFFSETS = {pa.string(): "i4", pa.binary(): "i4", pa.large_string(): "i8", pa.large_binary(): "i8"}


def _even_starts(rows: int, width: int) -> Longs:
    return np.arange(rows + 1, dtype=np.int64) * width


def _variable(array: pa.Array, dtype: str) -> tuple[Longs, Bytes]:
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return np.zeros(len(array) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint8)
    spots = np.frombuffer(offsets, dtype, len(array) + 1, array.offset * int(dtype[1])).astype(np.int64, copy=False)
    heap = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return spots - spots[0], heap[spots[0] : spots[-1]]


def _without_nulls(starts: Longs, heap: Bytes, valid: Mask) -> tuple[Longs, Bytes]:
    """The bytes without those of nulls, which Arrow allows."""
    lengths = np.diff(starts)
    if not lengths[~valid].any():
        return starts, heap
    mask = np.repeat(valid, lengths)
    lengths[~valid] = 0
    return np.concatenate([[0], np.cumsum(lengths)]), heap[mask]
