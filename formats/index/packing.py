"""Packed columns, which a scan compares without decoding them.

They have one value per row, in the fewest bytes that keep the order. Every Iceberg type has one of three forms:

    integers  boolean, int, long, date, time, timestamps, decimals of up to 18 digits: unsigned codes over a base
    floats    float, double: 4 bytes if that is exact, otherwise 8
    strings   string, binary, fixed, uuid, longer decimals (biased to 16 bytes): the first bytes after the column's
              common prefix as a big-endian code, with length and tail to resolve ties

A row with an absent value stays in every scan, because an unknown bound excludes nothing. Therefore an absent value is
the minimum code in a column of lower bounds, the maximum code in a column of upper bounds, and NaN for floats. A bitmap
marks absent values.

The scan (`_scan.pyx`) reads these arrays. Offsets are relative to the block's memory.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.types.values import Value, get_decimal_precision
from seamark.formats.index.kernels._pack import SOURCES

MISSING = -(1 << 63)
"""The number that represents an absent value in int64 arrays.

A real value that equals it counts as absent, which only prunes less.
"""
ALIGNMENT_BYTES = 64
LONG_MAX = (1 << 63) - 1
_BIAS = 1 << 127
"""The number that is added to the unscaled value of a long decimal, so that it is not negative."""
_WIDE_DECIMAL_BYTES = 16
_CODE_DIGITS_MAX = 18
"""The maximum number of digits of a decimal that is packed as an integer."""
_END_BYTES = 4
"""The size of the end of a tail."""
NONE = -1
"""The offset of an array that does not exist."""

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Form(IntEnum):
    """The form of the values of a packed column."""

    INTEGERS = 0
    FLOATS = 1
    STRINGS = 2


_FORMS = {
    "boolean": Form.INTEGERS,
    "int": Form.INTEGERS,
    "long": Form.INTEGERS,
    "date": Form.INTEGERS,
    "time": Form.INTEGERS,
    "timestamp": Form.INTEGERS,
    "timestamptz": Form.INTEGERS,
    "timestamp_ns": Form.INTEGERS,
    "timestamptz_ns": Form.INTEGERS,
    "float": Form.FLOATS,
    "double": Form.FLOATS,
    "string": Form.STRINGS,
    "binary": Form.STRINGS,
    "uuid": Form.STRINGS,
}


_NARROW_TYPES = frozenset({"int", "long", "date"})
"""The types whose values can have four bytes. A long may have been written before its column was promoted from int."""
NO_ORDER = -1


def get_form(kind: str) -> Form | None:
    """Return the packed form of an Iceberg type, or None for a type without an order (variant, geometry, unknown)."""
    form = _FORMS.get(kind)
    if form is not None:
        return form
    if kind.startswith("decimal("):
        return Form.INTEGERS if get_decimal_precision(kind) <= _CODE_DIGITS_MAX else Form.STRINGS
    return Form.STRINGS if kind.startswith("fixed[") else None


def get_packer_type_code(kind: str) -> int:
    """Return the code by which the C packer reads stored bounds of an Iceberg type, or NO_ORDER if it has no order."""
    form = get_form(kind)
    if form is None:
        return NO_ORDER
    if kind.startswith("decimal"):
        return SOURCES["short_decimals" if form is Form.INTEGERS else "decimals"]
    if form is Form.INTEGERS:
        return SOURCES["narrow" if kind in _NARROW_TYPES else "wide"]
    return SOURCES["floats" if form is Form.FLOATS else "spans"]


def encode_key(form: Form, kind: str, value: Value) -> int | float | bytes:
    """Convert a value to the form that scans of packed columns compare: int, float or bytes.

    An integer outside 64 bits becomes the nearest limit. A long decimal becomes 16 big-endian bytes of the value plus
    2^127, so that the order of bytes is the order of values.
    """
    if form is Form.INTEGERS:
        assert not isinstance(value, (str, bytes))
        return max(MISSING, min(LONG_MAX, int(value)))
    if form is Form.FLOATS:
        assert not isinstance(value, (str, bytes))
        return float(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return value
    # A literal for a truncated decimal can exceed 16 bytes, but stored values cannot.
    return max(0, min(2 * _BIAS - 1, int(value) + _BIAS)).to_bytes(_WIDE_DECIMAL_BYTES, "big")


def decode_value(form: Form, kind: str, key: int | float | bytes) -> Value:
    """Convert the result of `encode_key` back to the value. A string may be truncated within a character."""
    if kind == "boolean":
        return bool(key)
    if form is not Form.STRINGS:
        return key
    assert isinstance(key, bytes)
    if kind == "string":
        return key.decode("utf-8", "replace")
    if kind.startswith("decimal"):
        return int.from_bytes(key, "big") - _BIAS
    return key


class Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The description of a packed column: one value per row, in the fewest bytes that keep the order.

    Attributes:
        form: The form of the values (`Form`).
        width: The bytes of each value's code. If it is 0, all values are equal.
        codes: The offset of the codes. A number's code is its distance from `base`. A string's code is the first bytes
            after the prefix `common`, and the rest of a longer string is its tail.
        low: A bound below all values. For strings, it is an 8-byte big-endian prefix. If a value is absent in a column
            of lower bounds, it is the form's minimum, so that scans keep the row.
        high: A bound above all values, in the same form.
        base: The smallest integer, to which the codes are added.
        common: The common prefix of all strings.
        lengths_width: The bytes of each length in `lengths`.
        tails: The offset of the tails, the bytes of strings after their codes.
    """

    form: int
    width: int
    codes: int
    presence: int
    """The offset of a bitmap of present values, least significant bit first, or NONE if no value is absent."""
    low: int | float
    high: int | float
    base: int = 0
    common: bytes = b""
    common_at: int = NONE
    """The offset of the common prefix, for the scan."""
    lengths: int = NONE
    """The offset of the lengths after the common prefix, only for strings."""
    lengths_width: int = 0
    ends: int = NONE
    """The offset of uint32[rows], the ends of the tails.

    Only strings have it. If no value is longer than its code, it is NONE.
    """
    tails: int = NONE
    start: int = 0
    """The offset of the column's arrays. Together, they have `size` bytes and the checksum `crc` (CRC-32)."""
    size: int = 0
    crc: int = 0


class PackedColumn:
    """Read access to a packed column in memory."""

    __slots__ = ("_memory", "packed", "rows")

    def __init__(self, memory: Bytes, packed_values: Packed, rows: int) -> None:
        self._memory = memory
        self.packed = packed_values
        self.rows = rows

    def read_array(self, offset: int, dtype: str, count: int) -> npt.NDArray[Any]:
        """Return `count` values of the column's memory, from `offset` on."""
        return np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def present(self) -> npt.NDArray[np.bool_]:
        """Return whether each row has a value, bool[rows]."""
        if self.packed.presence == NONE:
            return np.ones(self.rows, dtype=np.bool_)
        bits = self._memory[self.packed.presence : self.packed.presence + (self.rows + 7) // 8]
        return np.unpackbits(bits, count=self.rows, bitorder="little").view(np.bool_)

    def read_longs(self) -> Longs:
        """Return the integers, widened to int64[rows]. Absent values are MISSING."""
        packed_values = self.packed
        if packed_values.width == 0:
            return np.full(self.rows, packed_values.base, dtype=np.int64)
        codes = self.read_array(packed_values.codes, f"<u{packed_values.width}", self.rows).astype(np.uint64)
        # Unsigned numbers wrap around, so a negative base is added as its two's complement.
        values = (codes + np.uint64(packed_values.base & 0xFFFFFFFFFFFFFFFF)).view(np.int64)
        if packed_values.presence != NONE:
            values[~self.present()] = MISSING
        return values

    def doubles(self) -> npt.NDArray[np.float64]:
        """Return the numbers, float64[rows]. Absent values are NaN."""
        return self.read_array(self.packed.codes, f"<f{self.packed.width}", self.rows).astype(np.float64)

    def read_key(self, row: int) -> int | float | bytes | None:
        """Return the value of a row in the form of `encode_key`, or None if it is absent.

        An integer is stored as its distance from the base. If the width is 0, all values equal the base.
        """
        packed_values = self.packed
        if packed_values.presence != NONE and not self._memory[packed_values.presence + row // 8] >> (row % 8) & 1:
            return None
        if packed_values.form == Form.STRINGS:
            return self._read_string(row)
        if packed_values.width == 0:
            return packed_values.base
        if packed_values.form == Form.FLOATS:
            offset = packed_values.codes + row * packed_values.width
            (number,) = self.read_array(offset, f"<f{packed_values.width}", 1).tolist()
            return float(number)
        code_bytes = self._read_bytes(packed_values.codes + row * packed_values.width, packed_values.width)
        return packed_values.base + int.from_bytes(code_bytes, "little")

    def may_have_dots(self) -> bool:
        """Return whether a string may contain two consecutive dots. If the result is False, no string does.

        The function searches the common prefix, all codes and all tails, which is cheaper than reading every string.
        A dot at the end of one part may be followed by a dot in the next part, so the result is then True.
        """
        packed_values = self.packed
        if packed_values.common.endswith(b".") or b".." in packed_values.common:
            return True
        if packed_values.width == 0:
            return False
        # The bytes of each code are reversed, so its first byte is the last byte of the text. A dot there may be
        # followed by a dot in the tail.
        codes = self._memory[packed_values.codes : packed_values.codes + packed_values.width * self.rows]
        if b".." in codes.tobytes() or bool((codes[:: packed_values.width] == ord(".")).any()):
            return True
        if packed_values.ends == NONE or not self.rows:
            return False
        tails_bytes = int(self.read_array(packed_values.ends, "<u4", self.rows)[-1])
        return b".." in self._read_bytes(packed_values.tails, tails_bytes)

    def _read_bytes(self, offset: int, size: int) -> bytes:
        return self._memory[offset : offset + size].tobytes()

    def _read_string(self, row: int) -> bytes:
        """Return the string of a row, which is present.

        A string consists of the common prefix of the column, a head of at most `width` bytes, which is stored as a code
        (a number), and a tail. The array `ends` has the end of each tail in the bytes of all tails.
        """
        packed_values = self.packed
        if packed_values.width == 0:
            return packed_values.common
        width, lengths_width = packed_values.width, packed_values.lengths_width
        length_bytes = self._read_bytes(packed_values.lengths + lengths_width * row, lengths_width)
        length = int.from_bytes(length_bytes, "little")
        # The code has its bytes in reversed order, and zeros after a short text.
        code = self._read_bytes(packed_values.codes + row * width, width)
        head = code[::-1][:length]
        if length <= width:
            return packed_values.common + head
        tail_end = int.from_bytes(self._read_bytes(packed_values.ends + _END_BYTES * row, _END_BYTES), "little")
        tail_bytes = length - width
        return packed_values.common + head + self._read_bytes(packed_values.tails + tail_end - tail_bytes, tail_bytes)
