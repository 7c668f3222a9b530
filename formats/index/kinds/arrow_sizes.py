"""Read the decompressed size of record batches from the metadata of an Arrow IPC file.

Arrow allocates the size that a compressed buffer states, and a few bytes can decompress to gigabytes. So a reader
checks the size of a batch before Arrow decodes it. The metadata are FlatBuffers: `Footer` in Arrow's `File.fbs`, and
`Message` and `RecordBatch` in `Message.fbs`. This module has no side effects.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_INT16, _INT32, _INT64 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<q")
_BLOCK = struct.Struct("<qi4xq")
"""The layout of `Block` in `File.fbs`: the position of a message, the size of its metadata, and the size of its
buffers.
"""
_BUFFER = struct.Struct("<qq")
"""The layout of `Buffer` in `Schema.fbs`: a position after the metadata of the message, and a size in bytes."""
_END_BYTES = 10
"""The number of bytes after the footer: its length, and the magic `ARROW1`."""
_PREFIX_BYTES = 8
"""The number of bytes before the metadata of a message: a marker and a length."""
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_BATCH_BUFFERS, _BATCH_COMPRESSION = 2, 3


class BatchPlace(NamedTuple):
    """The positions in the file of a record batch's message and of its buffers."""

    message: int
    buffers: int


def find_batches(data: memoryview) -> list[BatchPlace]:
    """Return the positions of the record batches of an Arrow IPC file.

    Raises:
        ValueError: The file is damaged, or has dictionaries, which Arrow decodes with the first batch.
    """
    end = len(data) - _END_BYTES
    (footer_bytes,) = _unpack_struct(_INT32, data, end)
    footer = _follow_offset(data, end - footer_bytes)
    _, dictionary_count = _find_vector(data, footer, _FOOTER_DICTIONARIES)
    if dictionary_count:
        raise ValueError("an Arrow file with dictionaries is not supported")
    start, count = _find_vector(data, footer, _FOOTER_BATCHES)
    places = []
    for index in range(count):
        message, metadata_bytes, _ = _unpack_struct(_BLOCK, data, start + index * _BLOCK.size)
        places.append(BatchPlace(message, message + metadata_bytes))
    return places


def count_decoded_bytes(data: memoryview, place: BatchPlace) -> int:
    """Return the number of bytes of a record batch after decompression, without decompressing it.

    A compressed buffer begins with its decompressed size.

    Raises:
        ValueError: The file is damaged, or its buffers are not compressed.
    """
    message = _follow_offset(data, place.message + _PREFIX_BYTES)
    header = _find_field(data, message, _MESSAGE_HEADER)
    batch = _follow_offset(data, header)
    if not _find_field(data, batch, _BATCH_COMPRESSION):
        raise ValueError("an Arrow file without compression is not supported")
    start, count = _find_vector(data, batch, _BATCH_BUFFERS)
    total_bytes = 0
    for index in range(count):
        position, size = _unpack_struct(_BUFFER, data, start + index * _BUFFER.size)
        if size < 0:
            raise ValueError(f"a buffer of an Arrow file states {size} bytes")
        if size >= _INT64.size:
            # A buffer that compression does not shrink is stored without compression, and states -1.
            (decoded_size,) = _unpack_struct(_INT64, data, place.buffers + position)
            total_bytes += decoded_size if decoded_size >= 0 else size
    return total_bytes


def _find_field(data: memoryview, table: int, number: int) -> int:
    """Return the position of a field of a table of FlatBuffers, Arrow's format for metadata, or 0 if it is absent."""
    # A table begins with the distance of its vtable. A vtable has its own size, the table's size, and an offset for
    # each field.
    (distance,) = _unpack_struct(_INT32, data, table)
    vtable = table - distance
    (vtable_bytes,) = _unpack_struct(_INT16, data, vtable)
    entry_offset = (2 + number) * _INT16.size
    if entry_offset >= vtable_bytes:
        return 0
    (field_offset,) = _unpack_struct(_INT16, data, vtable + entry_offset)
    return table + field_offset if field_offset else 0


def _find_vector(data: memoryview, table: int, number: int) -> tuple[int, int]:
    """Return the position of the first item of a vector, and the number of its items: (0, 0) if it is absent.

    Args:
        data: The Arrow file.
        table: The position of the table of FlatBuffers that has the vector as a field.
        number: The index of the field in the table.
    """
    field = _find_field(data, table, number)
    if not field:
        return 0, 0
    vector = _follow_offset(data, field)
    (count,) = _unpack_struct(_INT32, data, vector)
    return vector + _INT32.size, count


def _follow_offset(data: memoryview, position: int) -> int:
    """Return the position to which the offset at the position `position` refers."""
    (offset,) = _unpack_struct(_INT32, data, position)
    return position + offset


def _unpack_struct(layout: struct.Struct, data: memoryview, position: int) -> tuple[int, ...]:
    """Return the numbers at a position. Raise ValueError if they are not within the data."""
    if not 0 <= position <= len(data) - layout.size:
        raise ValueError(f"an Arrow file of {len(data)} bytes refers to byte {position}")
    return layout.unpack_from(data, position)
