"""Decodes Arrow IPC streams from clients, which are not trusted.

Before anything is decoded, the stream is checked for compression, and its rows are counted. No value is used before
Arrow has validated it. Streams with compressed buffers are refused, so that a small body cannot become large. Clients
can compress the whole body with `Content-Encoding` instead.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from seamark.formats.runtime.errors import BadRequest, TooLarge

_U16, _I32, _U32, _I64 = struct.Struct("<H"), struct.Struct("<i"), struct.Struct("<I"), struct.Struct("<q")
_HEADER_TYPE, _HEADER = 1, 2
"""The positions of the fields of a Message in its flatbuffer table (Arrow's Message.fbs)."""
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""The values of the header type for messages with rows or with dictionary values."""
_BATCH_OF_DICTIONARY = 1
"""The position of the field `data`, a RecordBatch, in the flatbuffer table of a DictionaryBatch."""
_LENGTH, _COMPRESSION = 0, 3
"""The positions of the fields of a RecordBatch in its flatbuffer table."""


def read_stream(body: bytes, subject: str, *, rows_max: int) -> pa.Table:
    """Decode an Arrow IPC stream.

    The rows are counted before they are decoded, so that a small body cannot make the server decode very many rows.

    Args:
        body: The stream.
        subject: What the stream is, for messages, such as the body of a request.
        rows_max: The maximum number of rows.

    Raises:
        BadRequest: The data are invalid.
        TooLarge: The stream has more than `rows_max` rows.
    """
    source = pa.py_buffer(body)
    try:
        rows = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            rows += _read_row_count(memoryview(message.metadata), subject)
            if rows > rows_max:
                raise TooLarge(f"{subject} has more than {rows_max:,} rows; send them in several requests")
        table = pa.ipc.open_stream(source).read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, struct.error) as error:
        raise BadRequest(
            f"{subject} is not an Arrow IPC stream: {(str(error).splitlines() or [''])[0][:200]}"
        ) from None
    return table


def _read_row_count(message: memoryview, subject: str) -> int:
    """Return the number of rows in the header of a message with rows or a dictionary, or 0 for any other message.

    For a dictionary, the number is the number of its values.

    Raises:
        BadRequest: The buffers are compressed, so that their decoded size is unknown.
    """
    root = _U32.unpack_from(message)[0]
    offset = _find_field(message, root, _HEADER_TYPE)
    kind = message[offset] if offset else 0
    if kind not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return 0
    batch = _find_table(message, root, _HEADER)
    if kind == _DICTIONARY_BATCH:
        batch = _find_table(message, batch, _BATCH_OF_DICTIONARY)
    if _find_field(message, batch, _COMPRESSION):
        raise BadRequest(f"{subject} has compressed buffers; write it uncompressed and compress the body with gzip")
    offset = _find_field(message, batch, _LENGTH)
    length: int = _I64.unpack_from(message, offset)[0] if offset else 0
    return length


def _find_table(message: memoryview, table: int, number: int) -> int:
    """Return the position of the table that a field of a flatbuffer table refers to.

    Raises:
        ValueError: The field is absent.
    """
    offset = _find_field(message, table, number)
    if not offset:
        raise ValueError(f"a message lacks the required field {number}")
    return int(offset + _U32.unpack_from(message, offset)[0])


def _find_field(message: memoryview, table: int, number: int) -> int:
    """Return the position of a field in a flatbuffer table, or 0 if the field is absent.

    A flatbuffer table refers to a vtable, which contains the positions of its fields.

    Args:
        message: The bytes of the header of an Arrow message.
        table: The position of the table.
        number: The number of the field in the schema of the table.
    """
    vtable = table - _I32.unpack_from(message, table)[0]
    if vtable < 0:
        raise ValueError("the table of a message is outside the message")
    # The vtable begins with two sizes of 16 bits, and then has an offset of 16 bits for each field.
    entry = 4 + 2 * number
    if entry >= _U16.unpack_from(message, vtable)[0]:
        return 0
    offset = _U16.unpack_from(message, vtable + entry)[0]
    return table + offset if offset else 0
