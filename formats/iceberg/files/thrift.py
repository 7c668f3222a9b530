"""Read and write Thrift's compact protocol without a schema (Apache Thrift: "Thrift Compact protocol encoding").

Parquet's footers, page headers and page indexes are Thrift structures. A structure becomes a dictionary of (type,
value) by field id, in the order of the file. A list becomes (type, values). Therefore one field of a footer can be
changed and all other fields are kept, including fields of later Parquet versions. Libraries require a schema, and drop
unknown fields.

ValueError is raised for invalid bytes. It is also raised for a structure that repeats a field, because readers differ
in which of the two they use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

TRUE, FALSE, I8, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)

Fields: TypeAlias = dict[int, tuple[int, Any]]
_DEPTH_MAX = 64


def read_structure(data: bytes | memoryview, at: int = 0) -> tuple[Fields, int]:
    """Return the structure at the position `at`, and the position after it."""
    try:
        return _read_struct(memoryview(data), at, 0)
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError(f"invalid Thrift structure: {error!r}") from None


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def _read_integer(data: memoryview, at: int, _: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_byte(data: memoryview, at: int, _: int) -> tuple[int, int]:
    return data[at], at + 1


def _read_double(data: memoryview, at: int, _: int) -> tuple[bytes, int]:
    return _read_bytes(data, at, 8)


def _read_binary(data: memoryview, at: int, _: int) -> tuple[bytes, int]:
    size, at = _read_varint(data, at)
    return _read_bytes(data, at, size)


def _read_bytes(data: memoryview, at: int, size: int) -> tuple[bytes, int]:
    if size > len(data) - at:
        raise ValueError(f"{size} bytes at position {at} exceed the data")
    return bytes(data[at : at + size]), at + size


def _read_list(data: memoryview, at: int, depth: int) -> tuple[tuple[int, list[Any]], int]:
    head = data[at]
    at += 1
    size, kind = head >> 4, head & 15
    if size == 15:
        size, at = _read_varint(data, at)
    if size > len(data) - at:  # Each item takes at least one byte.
        raise ValueError(f"a list of {size} items at position {at} exceeds the data")
    read_value = _read_byte if kind in (TRUE, FALSE) else _READERS[kind]
    values = []
    for _ in range(size):
        value, at = read_value(data, at, depth)
        values.append(value)
    return (kind, values), at


def _read_struct(data: memoryview, at: int, depth: int) -> tuple[Fields, int]:
    if depth > _DEPTH_MAX:
        raise ValueError("structures are nested too deeply")
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_integer(data, at, depth)
        if number in fields:
            raise ValueError(f"the field {number} is repeated")
        if not -0x8000 <= number <= 0x7FFF:  # Other readers interpret a longer id as a number of 16 bits.
            raise ValueError(f"the id {number} of a field exceeds 16 bits")
        if kind in (TRUE, FALSE):
            fields[number] = kind, None
            continue
        value, at = _READERS[kind](data, at, depth + 1)
        fields[number] = kind, value
    return fields, at + 1


_READERS: dict[int, Callable[[memoryview, int, int], tuple[Any, int]]] = {
    I8: _read_byte,
    I16: _read_integer,
    I32: _read_integer,
    I64: _read_integer,
    DOUBLE: _read_double,
    BINARY: _read_binary,
    LIST: _read_list,
    SET: _read_list,
    STRUCT: _read_struct,
}


class TooHeavy(ValueError):
    """The estimated memory of a structure exceeds the limit."""


Weights: TypeAlias = Mapping[tuple[int, int], int]
"""The bytes of memory for each item of a list, by (depth, field id) of the list. The outermost structure has depth 0.
"""


def estimate_decoded_memory(
    data: bytes | memoryview, weights: Weights, *, item: int, field: int, limit_bytes: int
) -> int:
    """Return the approximate memory in bytes that readers need for the structure at position 0, without building it.

    Args:
        data: The encoded structure.
        weights: The bytes for each item of some lists.
        item: The bytes for each item of all other lists.
        field: The bytes for each field.
        limit_bytes: The maximum result.

    Raises:
        TooHeavy: The memory exceeds `limit_bytes`. A list states its length before its items, and readers allocate
            memory for it. Therefore the error is raised as soon as the stated lengths are too large.
    """
    weighing = _Weighing(memoryview(data), weights, item, field, limit_bytes)
    try:
        weighing.weigh_structure(0, 0)
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError(f"these bytes are not a Thrift structure: {error!r}") from None
    return weighing.total


class _Weighing:
    """The estimate of the memory of a structure, which is not built."""

    def __init__(self, data: memoryview, weights: Weights, item: int, field: int, limit_bytes: int) -> None:
        self._data, self._weights, self._item, self._field, self._limit_bytes = data, weights, item, field, limit_bytes
        self.total = 0

    def weigh_structure(self, at: int, depth: int) -> int:
        """Add the memory of a structure, and return the position after the structure."""
        if depth > _DEPTH_MAX:
            raise ValueError("structures are nested too deeply")
        data, number = self._data, 0
        while head := data[at]:
            at += 1
            if head >> 4:
                number += head >> 4
            else:
                number, at = _read_integer(data, at, depth)
            self._add(self._field)
            if (kind := head & 15) not in (TRUE, FALSE):
                at = self._read_value(kind, at, depth, number)
        return at + 1

    def _read_value(self, kind: int, at: int, depth: int, number: int) -> int:
        """Add the memory of a value, and return the position after it."""
        data = self._data
        if kind in (I16, I32, I64):
            while data[at] & 0x80:
                at += 1
            return at + 1
        if kind == STRUCT:
            return self.weigh_structure(at, depth + 1)
        if kind == BINARY:
            size, at = _read_varint(data, at)
            return at + size
        if kind in (LIST, SET):
            return self._list(at, depth, number)
        return at + {I8: 1, DOUBLE: 8}[kind]

    def _list(self, at: int, depth: int, number: int) -> int:
        """Add the memory of a list, and return the position after it."""
        head = self._data[at]
        at += 1
        size, kind = head >> 4, head & 15
        if size == 15:
            size, at = _read_varint(self._data, at)
        self._add(size * self._weights.get((depth, number), self._item))
        if kind in (TRUE, FALSE):
            return at + size
        for _ in range(size):
            at = self._read_value(kind, at, depth + (kind != STRUCT), number)
        return at

    def _add(self, size_bytes: int) -> None:
        self.total += size_bytes
        if self.total > self._limit_bytes:
            raise TooHeavy(f"the decoded structure takes more than {self._limit_bytes:,} bytes")


def write_structure(fields: Fields) -> bytes:
    """Encode fields that have the form of the result of `read`."""
    out = bytearray()
    _put_struct(out, fields)
    return bytes(out)


def _put_varint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_integer(out: bytearray, value: int) -> None:
    _put_varint(out, (value << 1) ^ (value >> 63))


def _put_binary(out: bytearray, value: bytes) -> None:
    _put_varint(out, len(value))
    out += value


def _put_list(out: bytearray, value: tuple[int, list[Any]]) -> None:
    kind, values = value
    if len(values) < 15:
        out.append(len(values) << 4 | kind)
    else:
        out.append(0xF0 | kind)
        _put_varint(out, len(values))
    put_item = bytearray.append if kind in (TRUE, FALSE) else _WRITERS[kind]
    for item in values:
        put_item(out, item)


def _put_struct(out: bytearray, fields: Fields) -> None:
    last = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - last < 16:
            out.append(number - last << 4 | kind)
        else:
            out.append(kind)
            _put_integer(out, number)
        last = number
        if kind not in (TRUE, FALSE):
            _WRITERS[kind](out, value)
    out.append(0)


_WRITERS: dict[int, Callable[[bytearray, Any], None]] = {
    I8: bytearray.append,
    I16: _put_integer,
    I32: _put_integer,
    I64: _put_integer,
    DOUBLE: bytearray.extend,
    BINARY: _put_binary,
    LIST: _put_list,
    SET: _put_list,
    STRUCT: _put_struct,
}
