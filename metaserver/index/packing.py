"""Packed columns: one value a row, in the fewest bytes that keep order, so that a scan compares codes where they lie.

Every Iceberg type is one of three forms:

    integers  boolean, int, long, date, time, timestamps, decimals of up to 18 digits: unsigned codes over a base
    floats    float, double: 4 bytes where that is exact, else 8
    strings   string, binary, fixed, uuid, longer decimals (biased to 16 bytes): what follows the column's common
              prefix, its first bytes as a big-endian code, with length and tail to settle ties

A value that is absent keeps its row in every scan (an unknown bound rules nothing out): as the least code in a column
of lower bounds, the greatest in one of upper bounds, NaN among floats. A bitmap says which those are.

The scan (`_scan.pyx`) reads these arrays; offsets are relative to the block's memory.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from metaserver.iceberg.expressions import Value
from metaserver.index import _pack

MISSING = -(1 << 63)
"""Stands for an absent number in arrays of int64; that number itself counts as absent, which prunes less, not more."""
ALIGNMENT = 64
LONG_MAX = (1 << 63) - 1
_DECIMAL = re.compile(r"decimal\((\d+), (\d+)\)")
_BIAS = 1 << 127
NONE = -1
"""An offset that is not there."""

Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Form(IntEnum):
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


_NARROW = frozenset({"int", "long", "date"})
"""Types of which four bytes hold values; a long's, from before it was widened."""


def form_of(kind: str) -> Form | None:
    """How values of an Iceberg type are packed; None for types without an order (variant, geometry, unknown)."""
    form = _FORMS.get(kind)
    if form is not None:
        return form
    if match := _DECIMAL.fullmatch(kind):
        return Form.INTEGERS if int(match[1]) <= 18 else Form.STRINGS
    return Form.STRINGS if kind.startswith("fixed[") else None


def key_of(form: Form, kind: str, value: Value) -> int | float | bytes:
    """A value as the scan compares it: int, float, or bytes."""
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
    # A literal of a truncated decimal may be beyond what 16 bytes hold; no value is.
    return max(0, min(2 * _BIAS - 1, int(value) + _BIAS)).to_bytes(16, "big")


def value_of(form: Form, kind: str, key: int | float | bytes) -> Value:
    """The inverse of `key_of`."""
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


class Spans:
    """Byte strings within a heap: `starts` int64[rows], `lengths` int32[rows], -1 for none."""

    __slots__ = ("heap", "lengths", "starts")

    def __init__(self, heap: Bytes, starts: Longs, lengths: npt.NDArray[np.int32]) -> None:
        self.heap = heap
        self.starts = starts
        self.lengths = lengths


class Packed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where one column lies. Widths in bytes; a width of 0 means that every value is the same.

    `low` and `high` bound the values; where any is absent the side that keeps its row is open (see `open_low`).
    Strings: `low` and `high` are 8-byte big-endian prefixes of whole values.
    """

    form: int
    width: int
    codes: int
    presence: int
    """Offset of a bitmap, least significant bit first; NONE when every value is there."""
    low: int | float
    high: int | float
    base: int = 0
    common: bytes = b""
    common_at: int = NONE
    """Offset of the same bytes, for the scan."""
    lengths: int = NONE
    """Strings: offset of the lengths after the common prefix."""
    lengths_width: int = 0
    ends: int = NONE
    """Strings: offset of uint32[rows], ends of the tails; NONE when no value is longer than its code."""
    tails: int = NONE


class Writer:
    """Lays arrays out one after another, aligned."""

    def __init__(self) -> None:
        self.buffers: list[bytes | memoryview] = []
        self.size_bytes = 0

    def add(self, array: npt.NDArray[np.generic]) -> int:
        """The offset at which the array will lie."""
        offset = self.size_bytes
        if array.nbytes:
            self.buffers.append(np.ascontiguousarray(array).view(np.uint8).data)
        padding = -array.nbytes % 8
        if padding:
            self.buffers.append(b"\0" * padding)
        self.size_bytes += array.nbytes + padding
        return offset


_NOT_GIVEN: Bytes = np.empty(0, dtype=np.uint8)


def pack_longs(writer: Writer, values: Longs, present: Bytes | None = None, *, absent_low: bool) -> Packed | None:
    """Integers. `present` uint8[rows] tells which are there; without it MISSING is absent. With `absent_low` what is
    absent takes the least code, else the greatest. None when all are."""
    packed = _pack.pack_longs(values, _NOT_GIVEN if present is None else present, absent_low)
    if packed is None:
        return None
    width, base, low, high, codes, presence = packed
    if presence is not None:
        low, high = (MISSING, high) if absent_low else (low, LONG_MAX)
    return Packed(Form.INTEGERS, width, _add(writer, codes), _add(writer, presence), low, high, base=base)


def pack_doubles(
    writer: Writer, values: npt.NDArray[np.float64], present: Bytes | None = None, *, absent_low: bool
) -> Packed | None:
    """Floats. `present` uint8[rows] tells a NaN that is a value from one that is absent; without it all are absent."""
    packed = _pack.pack_doubles(values, _NOT_GIVEN if present is None else present, absent_low)
    if packed is None:
        return None
    width, low, high, codes, presence = packed
    if presence is not None:
        low, high = (-np.inf, high) if absent_low else (low, np.inf)
    return Packed(Form.FLOATS, width, writer.add(codes), _add(writer, presence), low, high)


def pack_spans(writer: Writer, spans: Spans, *, absent_low: bool) -> Packed | None:
    packed = _pack.pack_spans(spans.heap, spans.starts, spans.lengths, absent_low)
    if packed is None:
        return None
    width, common, least, most, codes, presence, lengths, lengths_width, ends, tails = packed
    low, high = _prefix(common, least, width), _prefix(common, most, width)
    if presence is not None:
        low, high = (0, high) if absent_low else (low, 0xFFFFFFFFFFFFFFFF)
    return Packed(
        Form.STRINGS,
        width,
        _add(writer, codes),
        _add(writer, presence),
        low,
        high,
        common=common,
        common_at=writer.add(np.frombuffer(common, dtype=np.uint8)),
        lengths=_add(writer, lengths),
        lengths_width=lengths_width,
        ends=_add(writer, ends),
        tails=_add(writer, tails),
    )


def _add(writer: Writer, array: npt.NDArray[Any] | None) -> int:
    return NONE if array is None else writer.add(array)


def _prefix(common: bytes, code: int, width: int) -> int:
    """The first 8 bytes of a value, by its code."""
    return int.from_bytes((common[:8] + code.to_bytes(width, "big")).ljust(8, b"\0")[:8], "big")


def pack_bounds(writer: Writer, kind: str, spans: Spans, *, absent_low: bool) -> Packed | None:
    """Single-value binaries of type `kind`. None where the type has no order, or no value is there."""
    form = form_of(kind)
    if form is None:
        return None
    heap, starts, lengths = spans.heap, spans.starts, spans.lengths
    if kind.startswith("decimal"):
        return _pack_decimals(writer, form, *_pack.gather_decimals(heap, starts, lengths), absent_low=absent_low)
    if form is Form.INTEGERS:
        narrow = kind in _NARROW
        return pack_longs(writer, _pack.gather_longs(heap, starts, lengths, absent_low, narrow), absent_low=absent_low)
    if form is Form.FLOATS:
        return pack_doubles(writer, _pack.gather_doubles(heap, starts, lengths), absent_low=absent_low)
    return pack_spans(writer, spans, absent_low=absent_low)


def _pack_decimals(
    writer: Writer, form: Form, high: Longs, low: npt.NDArray[np.uint64], present: Bytes, *, absent_low: bool
) -> Packed | None:
    if form is Form.INTEGERS:
        longs = low.view(np.int64)
        # A value that needs more than the type's 18 digits was not written by this type's rules.
        longs[(present == 0) | (high != (longs >> 63))] = MISSING
        return pack_longs(writer, longs, absent_low=absent_low)
    biased = high.view(np.uint64) ^ np.uint64(1 << 63)
    heap = np.stack([biased, low], axis=1).astype(">u8").view(np.uint8).reshape(-1)
    starts = np.arange(len(high), dtype=np.int64) * 16
    lengths = np.where(present != 0, 16, -1).astype(np.int32)
    return pack_spans(writer, Spans(heap, starts, lengths), absent_low=absent_low)


class Column:
    """Read access to one packed column in memory."""

    __slots__ = ("_memory", "packed", "rows")

    def __init__(self, memory: Bytes, packed: Packed, rows: int) -> None:
        self._memory = memory
        self.packed = packed
        self.rows = rows

    def _array(self, offset: int, dtype: str, count: int) -> npt.NDArray[np.generic]:
        return np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def present(self) -> npt.NDArray[np.bool_]:
        """bool[rows]."""
        if self.packed.presence == NONE:
            return np.ones(self.rows, dtype=np.bool_)
        bits = self._memory[self.packed.presence : self.packed.presence + (self.rows + 7) // 8]
        return np.unpackbits(bits, count=self.rows, bitorder="little").view(np.bool_)

    def longs(self) -> Longs:
        """Integers widened to int64[rows], MISSING where absent."""
        packed = self.packed
        if packed.width == 0:
            return np.full(self.rows, packed.base, dtype=np.int64)
        codes = self._array(packed.codes, f"<u{packed.width}", self.rows).astype(np.uint64)
        values = (codes + np.uint64(packed.base & 0xFFFFFFFFFFFFFFFF)).view(np.int64)
        if packed.presence != NONE:
            values[~self.present()] = MISSING
        return values

    def doubles(self) -> npt.NDArray[np.float64]:
        """float64[rows], NaN where absent."""
        return self._array(self.packed.codes, f"<f{self.packed.width}", self.rows).astype(np.float64)

    def key(self, row: int) -> int | float | bytes | None:
        """The value of one row as `key_of` makes it; None where absent."""
        packed = self.packed
        if packed.presence != NONE and not self._memory[packed.presence + row // 8] >> (row % 8) & 1:
            return None
        if packed.form == Form.STRINGS:
            return self._string(row)
        if packed.width == 0:
            return packed.base
        if packed.form == Form.FLOATS:
            return float(self._array(packed.codes + row * packed.width, f"<f{packed.width}", 1)[0])
        code = int.from_bytes(self._bytes(packed.codes + row * packed.width, packed.width), "little")
        return packed.base + code

    def _bytes(self, offset: int, size: int) -> bytes:
        return self._memory[offset : offset + size].tobytes()

    def _string(self, row: int) -> bytes:
        packed = self.packed
        if packed.width == 0:
            return packed.common
        size = packed.lengths_width
        length = int.from_bytes(self._bytes(packed.lengths + size * row, size), "little")
        head = self._bytes(packed.codes + row * packed.width, packed.width)[::-1][:length]
        if length <= packed.width:
            return packed.common + head
        end = int.from_bytes(self._bytes(packed.ends + 4 * row, 4), "little")
        size = length - packed.width
        return packed.common + head + self._bytes(packed.tails + end - size, size)
