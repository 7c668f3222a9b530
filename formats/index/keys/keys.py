"""Keys: the form that values have in all indexes, and predicates as ranges of keys.

A value of up to 8 bytes is represented as a *code*, an unsigned 64-bit number, and any other value as bytes. Both keep
the order of values, so that indexes compare, hash and sort keys without knowing the type. By Iceberg type:

    boolean                            0, 1
    int, long, date, time, timestamps  value + 2^63
    decimal of up to 18 digits         unscaled value + 2^63
    float, double                      the bits of the double: inverted if it is negative, else with the sign bit set
    string                             UTF-8
    binary, fixed, uuid                unchanged
    decimal of more digits             16 bytes, big-endian, of unscaled value + 2^127

Therefore -0.0 and 0.0 are adjacent and distinct: the caller decides whether they are equal. Null and NaN have no key,
only a bit each. An array that does not match its type exactly (nanoseconds in a column of microseconds) raises
ValueError, because readers interpret it in different ways. Its file gets no index, so plans keep it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import (
    FLOATS,
    INTS,
    LONGS,
    Value,
    get_decimal_precision,
    get_decimal_scale,
)

Key: TypeAlias = int | bytes
Bits: TypeAlias = npt.NDArray[np.uint64]
"""One bit for each row: row r is bit r % 64 of word r // 64. Bits after the last row are zero."""
Codes: TypeAlias = npt.NDArray[np.uint64]
Longs: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Mask: TypeAlias = npt.NDArray[np.bool_]

CODE_MAX = (1 << 64) - 1
POINTS_MAX = 1024
"""The maximum number of keys in ranges of several keys that are listed one by one. Single keys are not limited."""

_UNCHANGED_TYPES = frozenset({"binary", "fixed", "uuid"})
SIGN = 1 << 63
_BIAS = 1 << 127
_CODE_DIGITS_MAX, _DIGITS_MAX = 18, 38
WIDE_DECIMAL_BYTES = 16
_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The values of a term (a column, or a transform or function of it) in the rows of a file, in physical order.

    Attributes:
        kind: The Iceberg type of the values.
        rows: The number of rows.
        codes: uint64[rows], for types of up to 8 bytes. Null and NaN have the code 0. For other types, it is None.
        starts: int64[rows + 1], the position in `heap` of each key, for types whose keys are bytes.
        heap: uint8[], the bytes of all keys. A null has no bytes.
        valid: A bit for each row that is not null, or None if there are no nulls. A NaN is valid.
        nan: A bit for each row with NaN, or None if there are no NaNs.
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
        """The rows with a key, as bool[rows], or None if all rows have a key. Null and NaN have no key."""
        if self.valid is None and self.nan is None:
            return None
        has_key = np.ones(self.rows, dtype=np.bool_) if self.valid is None else unpack_bits(self.valid, self.rows)
        return has_key if self.nan is None else has_key & ~unpack_bits(self.nan, self.rows)


class KeyRange(NamedTuple):
    """The keys between two bounds. A bound of None means that there is no limit.

    No range contains null or NaN.
    """

    low: Key | None
    high: Key | None
    low_open: bool = False
    high_open: bool = False

    def contains(self, key: Key) -> bool:
        low: Any = self.low
        high: Any = self.high
        is_above_low = low is None or key > low or (key == low and not self.low_open)
        return is_above_low and (high is None or key < high or (key == high and not self.high_open))


@dataclass(frozen=True)
class KeyRanges:
    """The keys of a term that match a predicate: ascending, disjoint ranges, and flags for null and NaN.

    Raises:
        ValueError: The ranges overlap or are not in order.
    """

    kind: str
    ranges: tuple[KeyRange, ...]
    nulls: bool = False
    nans: bool = False
    of_function: bool = False
    """Whether the keys belong to an index on a function of a column (`functions.py`)."""

    def __post_init__(self) -> None:
        for lower_range, higher_range in pairwise(self.ranges):
            if _may_overlap(lower_range, higher_range):
                raise ValueError(f"ranges of keys overlap or are out of order: {lower_range}, {higher_range}")

    def contains(self, key: Key) -> bool:
        """Return whether a row with this key matches."""
        return any(key_range.contains(key) for key_range in self.ranges)

    @cached_property
    def closed(self) -> tuple[KeyRange, ...]:
        """Equivalent ranges with closed bounds, where possible.

        An open bound becomes closed if its key has a direct neighbour, as each code does: `> 5` becomes `>= 6`.
        """
        ranges = self.ranges
        if has_codes(self.kind):
            ranges = tuple(_fill_bounds(key_range) for key_range in ranges)
        return tuple(closed_range for closed_range in map(_close_range, ranges) if closed_range is not None)

    @cached_property
    def points(self) -> tuple[Key, ...] | None:
        """All keys of the ranges in ascending order if the ranges are single keys, otherwise None.

        A range of a few codes counts as single keys. For example, -0.0 and 0.0 are two adjacent codes. All such ranges
        together can have at most POINTS_MAX keys.
        """
        points: list[Key] = []
        point_count = 0
        for key_range in self.closed:
            if key_range.low is not None and key_range.low == key_range.high:
                points.append(key_range.low)
            elif (
                isinstance(key_range.low, int)
                and isinstance(key_range.high, int)
                and key_range.high - key_range.low < POINTS_MAX - point_count
            ):
                point_count += key_range.high - key_range.low + 1
                points.extend(range(key_range.low, key_range.high + 1))
            else:
                return None
        return tuple(points)


def _may_overlap(lower_range: KeyRange, higher_range: KeyRange) -> bool:
    """Return whether a key may be in both ranges.

    Also return True if the first range does not precede the second range.
    """
    high: Any = lower_range.high
    low: Any = higher_range.low
    if high is None or low is None:  # There is no limit between the ranges.
        return True
    return bool(high > low) or (high == low and not lower_range.high_open and not higher_range.low_open)


def _fill_bounds(key_range: KeyRange) -> KeyRange:
    """Return a range of codes with the lowest and highest code instead of missing bounds."""
    low, low_open = (0, False) if key_range.low is None else (key_range.low, key_range.low_open)
    high, high_open = (CODE_MAX, False) if key_range.high is None else (key_range.high, key_range.high_open)
    return KeyRange(low, high, low_open, high_open)


def _close_range(key_range: KeyRange) -> KeyRange | None:
    """Return an equivalent range with closed bounds where the bound's key has a neighbour, or None for an empty range.

    The successor of a key of bytes is the key followed by a zero byte. Only keys that end with a zero byte have a
    predecessor.
    """
    low, high, is_low_open, is_high_open = key_range
    if low is not None and is_low_open:
        if low == CODE_MAX:
            return None
        low, is_low_open = (low + b"\0" if isinstance(low, bytes) else low + 1), False
    if high is not None and is_high_open:
        if high in (0, b""):
            return None
        if isinstance(high, int):
            high, is_high_open = high - 1, False
        elif high.endswith(b"\0"):
            high, is_high_open = high[:-1], False
    if low is not None and not KeyRange(None, high, False, is_high_open).contains(low):
        return None
    return KeyRange(low, high, is_low_open, is_high_open)


@lru_cache(maxsize=1024)
def has_codes(kind: str) -> bool:
    """Return whether keys of the Iceberg type are codes rather than bytes.

    Raises:
        ValueError: The type has no keys.
    """
    name = get_base_name(kind)
    if name == "decimal":
        return get_decimal_precision(kind) <= _CODE_DIGITS_MAX
    if name == "string" or name in _UNCHANGED_TYPES:
        return False
    # A column of type unknown has only nulls, whose code is 0.
    if name in ("boolean", "unknown") or name in INTS or name in LONGS or name in FLOATS:
        return True
    raise ValueError(f"values of type {kind} cannot be indexed: they have no order, and therefore no keys")


def has_keys(kind: str) -> bool:
    """Return whether indexes can store values of the Iceberg type.

    A key is the form in which an index stores a value: a number or bytes with the order of the values. Types without an
    order, such as geometries, have no keys.
    """
    try:
        has_codes(kind)
    except ValueError:
        return False
    return True


def get_family(kind: str) -> str:
    """Return the name of a type's family: all types whose values have the same keys in an index.

    An index stays valid if a column is promoted to another type of the family.
    """
    name = get_base_name(kind)
    if name == "decimal":
        digits = _CODE_DIGITS_MAX if has_codes(kind) else _DIGITS_MAX
        return f"decimal({digits}, {get_decimal_scale(kind)})"
    return "long" if name == "int" else "double" if name == "float" else kind


def make_key(value: Value, kind: str) -> Key:
    """Return the key of a literal: an unsigned 64-bit number, or bytes. The order of keys is the order of values.

    A float becomes its bits, in an order that unsigned comparisons keep: a negative number has all bits inverted, and
    any other number has its sign bit set. An integer is moved by 2^63, so that no key is negative. A decimal of more
    than 18 digits is moved by 2^127, and becomes 16 bytes.

    Args:
        value: The literal as a bound predicate has it: dates and times are integers (days, microseconds or
            nanoseconds), and a decimal is its unscaled integer.
        kind: The Iceberg type.

    Raises:
        ValueError: The value is NaN, which has no key, or is not a value of the type.
    """
    match value:
        case bool() if kind == "boolean":
            return int(value)
        case _ if isinstance(value, bool) or kind == "boolean":
            pass  # In Python, a bool is an int, but here it is no value of a number type, and vice versa.
        case int() | float() if kind in FLOATS:
            if value != value:
                raise ValueError("NaN has no key; use the flag for NaN")
            (word,) = _WORD.unpack(_DOUBLE.pack(value))
            return int(word ^ CODE_MAX if word & SIGN else word | SIGN)
        case int() if has_codes(kind) and -SIGN <= value < SIGN:
            return value + SIGN
        case int() if not has_codes(kind) and get_base_name(kind) == "decimal" and -_BIAS <= value < _BIAS:
            return (value + _BIAS).to_bytes(WIDE_DECIMAL_BYTES, "big")
        case str() if kind == "string":
            return value.encode()
        case bytes() if get_base_name(kind) in _UNCHANGED_TYPES:
            return value
    raise ValueError(f"{value!r} is not a value of type {kind}")


def unpack_bits(bits: Bits, rows: int) -> Mask:
    """Convert packed bits, least significant bit first, to bool[rows]."""
    return np.unpackbits(bits.view(np.uint8), count=rows, bitorder="little").view(np.bool_)


def pack_mask(mask: Mask) -> Bits:
    """Convert bool[rows] to packed bits, least significant bit first, padded with zeros to words of 64 bits."""
    bits = np.zeros(-(-len(mask) // 64) * 8, dtype=np.uint8)
    bits[: -(-len(mask) // 8)] = np.packbits(mask, bitorder="little")
    return bits.view(np.uint64)
