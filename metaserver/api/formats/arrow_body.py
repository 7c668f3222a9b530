"""Arrow IPC streams that clients send, read with suspicion.

The rule it keeps: nothing is decoded before it is known that it inflates to nothing and how many rows it claims, and
nothing is used before Arrow has validated it. So a small body cannot become a large one: streams with compressed
buffers are refused (what a body needs, `Content-Encoding` does).
"""

from __future__ import annotations

import struct

import pyarrow as pa

from metaserver.errors import BadRequest, TooLarge

_U16, _I32, _U32, _I64 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<q")
_HEADER_TYPE, _HEADER = 1, 2
"""Fields of a Message, by their places in its table (Arrow's Message.fbs)."""
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_BATCH_OF_DICTIONARY = 1
_LENGTH, _COMPRESSION = 0, 3
"""Fields of a RecordBatch."""


def read_stream(body: bytes, what: str, *, rows_max: int) -> pa.Table:
    """All of a stream. BadRequest for what is none; TooLarge for more than `rows_max` rows."""
    source = pa.py_buffer(body)
    try:
        rows = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            rows += _rows_of(memoryview(message.metadata), what)
            if rows > rows_max:
                raise TooLarge(f"{what} has more than {rows_max:,} rows; send them in several requests")
        table = pa.ipc.open_stream(source).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise BadRequest(f"{what} is no Arrow IPC stream: {(str(error).splitlines() or [''])[0][:200]}") from None
    return table


def _rows_of(message: memoryview, what: str) -> int:
    """Rows that a message claims; 0 for one that is no record batch."""
    root = _U32.unpack_from(message)[0]
    at = _field(message, root, _HEADER_TYPE)
    kind = message[at] if at else 0
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return 0
    batch = _table(message, root, _HEADER)
    if kind == _DICTIONARY_BATCH:
        batch = _table(message, batch, _BATCH_OF_DICTIONARY)
    if _field(message, batch, _COMPRESSION):
        raise BadRequest(f"{what} has compressed buffers; write it without, and compress the body with gzip instead")
    at = _field(message, batch, _LENGTH)
    length: int = _I64.unpack_from(message, at)[0] if at else 0
    return length


def _table(message: memoryview, table: int, number: int) -> int:
    at = _field(message, table, number)
    if not at:
        raise ValueError("a batch is missing in a message")
    return int(at + _U32.unpack_from(message, at)[0])


def _field(message: memoryview, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table lies; 0 where it is left out."""
    vtable = table - _I32.unpack_from(message, table)[0]
    if vtable < 0:
        raise ValueError("a message's table lies outside of it")
    place = 4 + 2 * number
    if place >= _U16.unpack_from(message, vtable)[0]:
        return 0
    offset = _U16.unpack_from(message, vtable + place)[0]
    return table + offset if offset else 0
