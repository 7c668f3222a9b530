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
_LONG_LIST = 15
"""The length in the header of a list whose real length follows as a number."""
_FIELD_STEP_MAX = 15
"""The largest difference of field ids that fits into the header of a field."""
_NUMBER_BITS_MAX = 63
"""The maximum shift of a group of seven bits, so that a number has at most 64 bits."""


def read_structure(data: bytes | memoryview, offset: int = 0) -> tuple[Fields, int]:
    """Return the structure at the position `offset`, and the position after it."""
    try:
        return _read_struct(memoryview(data), offset, 0)
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError(f"invalid Thrift structure: {error!r}") from None


def _read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > _NUMBER_BITS_MAX:
            raise ValueError("a number is longer than 64 bits")


def _read_integer(data: memoryview, offset: int, _: int) -> tuple[int, int]:
    value, offset = _read_varint(data, offset)
    return (value >> 1) ^ -(value & 1), offset


def _read_byte(data: memoryview, offset: int, _: int) -> tuple[int, int]:
    return data[offset], offset + 1


def _read_double(data: memoryview, offset: int, _: int) -> tuple[bytes, int]:
    return _read_bytes(data, offset, 8)


def _read_binary(data: memoryview, offset: int, _: int) -> tuple[bytes, int]:
    size, offset = _read_varint(data, offset)
    return _read_bytes(data, offset, size)


def _read_bytes(data: memoryview, offset: int, size: int) -> tuple[bytes, int]:
    if size > len(data) - offset:
        raise ValueError(f"{size} bytes at position {offset} exceed the data")
    return bytes(data[offset : offset + size]), offset + size


def _read_list(data: memoryview, offset: int, depth: int) -> tuple[tuple[int, list[Any]], int]:
    """Read a list of the compact protocol, and return the type of its items, the items, and the position after it.

    The upper half of the header is the length, or 15 if the length follows, and the lower half is the type.

    Args:
        data: The encoded structure.
        offset: The position of the list.
        depth: The depth of the structure that contains the list. The outermost structure has depth 0.

    Raises:
        ValueError: The list has more items than bytes follow, or its items are nested too deeply.
        IndexError, KeyError: The list is truncated, or the type of its items is unknown.
    """
    header = data[offset]
    offset += 1
    size, kind = header >> 4, header & 15
    if size == _LONG_LIST:
        size, offset = _read_varint(data, offset)
    if size > len(data) - offset:  # Each item takes at least one byte.
        raise ValueError(f"a list of {size} items at position {offset} exceeds the data")
    read_value = _read_byte if kind in (TRUE, FALSE) else _READERS[kind]
    values = []
    for _ in range(size):
        value, offset = read_value(data, offset, depth)
        values.append(value)
    return (kind, values), offset


def _read_struct(data: memoryview, offset: int, depth: int) -> tuple[Fields, int]:
    if depth > _DEPTH_MAX:
        raise ValueError("structures are nested too deeply")
    fields: Fields = {}
    number = 0
    while header := data[offset]:
        offset += 1
        kind = header & 15
        if header >> 4:
            number += header >> 4
        else:
            number, offset = _read_integer(data, offset, depth)
        if number in fields:
            raise ValueError(f"the field {number} is repeated")
        if not -0x8000 <= number <= 0x7FFF:  # Other readers interpret a longer id as a number of 16 bits.
            raise ValueError(f"the id {number} of a field exceeds 16 bits")
        if kind in (TRUE, FALSE):
            fields[number] = kind, None
            continue
        value, offset = _READERS[kind](data, offset, depth + 1)
        fields[number] = kind, value
    return fields, offset + 1


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


class MemoryEstimateExceeded(ValueError):
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
        MemoryEstimateExceeded: The memory exceeds `limit_bytes`. A list states its length before its items, and readers
            allocate memory for it. Therefore the error is raised as soon as the stated lengths are too large.
        ValueError: The bytes are not a structure, or structures are nested too deeply.
    """
    estimate = _Weighing(memoryview(data), weights, item, field, limit_bytes)
    try:
        estimate.weigh_structure(0, 0)
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError(f"these bytes are not a Thrift structure: {error!r}") from None
    return estimate.total


class _Weighing:
    """The estimate of the memory of a structure, which is not built."""

    def __init__(self, data: memoryview, weights: Weights, item: int, field: int, limit_bytes: int) -> None:
        self._data, self._weights, self._item, self._field, self._limit_bytes = data, weights, item, field, limit_bytes
        self.total = 0

    def weigh_structure(self, offset: int, depth: int) -> int:
        """Add the memory of a structure to the estimate, and return the position after the structure.

        A field header has the distance from the previous field id in its upper half, and the type in its lower half. If
        the distance is 0, the id follows. A boolean has no further bytes: its type is its value.

        Raises:
            ValueError: Structures are nested too deeply.
        """
        if depth > _DEPTH_MAX:
            raise ValueError("structures are nested too deeply")
        data, number = self._data, 0
        while header := data[offset]:
            offset += 1
            if header >> 4:
                number += header >> 4
            else:
                number, offset = _read_integer(data, offset, depth)
            self._charge(self._field)
            if (kind := header & 15) not in (TRUE, FALSE):
                offset = self._weigh_and_skip_value(kind, offset, depth, number)
        return offset + 1

    def _weigh_and_skip_value(self, kind: int, offset: int, depth: int, number: int) -> int:
        """Add the memory of a value's fields and items to the estimate, and return the position after the value.

        A value without fields and items is only skipped. The highest bit of an integer's byte states whether another
        byte follows. `number` is the id of the field that contains the value.
        """
        data = self._data
        if kind in (I16, I32, I64):
            while data[offset] & 0x80:
                offset += 1
            return offset + 1
        if kind == STRUCT:
            return self.weigh_structure(offset, depth + 1)
        if kind == BINARY:
            size, offset = _read_varint(data, offset)
            return offset + size
        if kind in (LIST, SET):
            return self._weigh_list(offset, depth, number)
        return offset + {I8: 1, DOUBLE: 8}[kind]

    def _weigh_list(self, offset: int, depth: int, number: int) -> int:
        """Add the memory of a list to the estimate, and return the position after the list.

        The upper half of the header is the length, or 15 if the length follows. The memory of all items is charged
        first, because a reader allocates it before it reads the items. `number` is the field id of the list.
        """
        header = self._data[offset]
        offset += 1
        size, kind = header >> 4, header & 15
        if size == _LONG_LIST:
            size, offset = _read_varint(self._data, offset)
        self._charge(size * self._weights.get((depth, number), self._item))
        if kind in (TRUE, FALSE):  # Each boolean of a list takes one byte.
            return offset + size
        for _ in range(size):
            # A list inside a list has its own depth. A structure itself increases the depth.
            offset = self._weigh_and_skip_value(kind, offset, depth + (kind != STRUCT), number)
        return offset

    def _charge(self, size_bytes: int) -> None:
        """Add to the estimate. Raise MemoryEstimateExceeded if it exceeds the limit."""
        self.total += size_bytes
        if self.total > self._limit_bytes:
            raise MemoryEstimateExceeded(f"the decoded structure takes more than {self._limit_bytes:,} bytes")


def write_structure(fields: Fields) -> bytes:
    """Encode a structure in Thrift's compact protocol.

    Args:
        fields: The type and the value of each field, by field id, as `read_structure` returns them.
    """
    buffer = bytearray()
    _put_struct(buffer, fields)
    return bytes(buffer)


def _put_varint(buffer: bytearray, value: int) -> None:
    while value >= 0x80:
        buffer.append(value & 0x7F | 0x80)
        value >>= 7
    buffer.append(value)


def _put_integer(buffer: bytearray, value: int) -> None:
    _put_varint(buffer, (value << 1) ^ (value >> 63))


def _put_binary(buffer: bytearray, value: bytes) -> None:
    _put_varint(buffer, len(value))
    buffer += value


def _put_list(buffer: bytearray, value: tuple[int, list[Any]]) -> None:
    kind, values = value
    if len(values) < _LONG_LIST:
        buffer.append(len(values) << 4 | kind)
    else:
        buffer.append(_LONG_LIST << 4 | kind)
        _put_varint(buffer, len(values))
    put_item = bytearray.append if kind in (TRUE, FALSE) else _WRITERS[kind]
    for item in values:
        put_item(buffer, item)


def _put_struct(buffer: bytearray, fields: Fields) -> None:
    previous_number = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - previous_number <= _FIELD_STEP_MAX:
            buffer.append(number - previous_number << 4 | kind)
        else:
            buffer.append(kind)
            _put_integer(buffer, number)
        previous_number = number
        if kind not in (TRUE, FALSE):
            _WRITERS[kind](buffer, value)
    buffer.append(0)


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
