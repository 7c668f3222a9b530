"""Writer of one record batch as an Arrow IPC stream in a single buffer. Columns are decoded directly into the buffer.

Arrow's writer takes complete arrays, and copies them. This module computes the head of the message first, and then
unpacks the packed columns of blocks behind the head. The head is a FlatBuffer (Arrow, "Serialization and Interprocess
Communication", Message.fbs). The tables of a FlatBuffer may have any order. This module uses a fixed order.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from seamark.metaserver.planner.lookup import _lookup
from seamark.metaserver.planner.lookup.lookup import IntegerColumn

_ALIGNMENT_BYTES = 8
_CONTINUATION = b"\xff\xff\xff\xff"
_END = _CONTINUATION + bytes(4)
_VERSION_5, _RECORD_BATCH = 4, 3
"""The numbers of the metadata version V5 and of the message kind RecordBatch in Arrow's FlatBuffers."""
_TABLES = struct.Struct("<I 6H 5H 6x iIqhB5x iIqI4x 4xI")
"""The fixed tables of a message.

Their order is: the offset of the message; the vtables of the message and of the batch; the message (vtable,
header, length of the body, version, kind of header); the batch (vtable, nodes, rows, buffers); and the number of
nodes, which follow.
"""
_MESSAGE, _BATCH, _NODES = 32, 56, 84
"""The offsets of the message, of the batch, and of the number of nodes in `_TABLES`."""
_MESSAGE_VTABLE, _BATCH_VTABLE = 4, 16
"""The offsets of the vtables of the message and of the batch in `_TABLES`."""
_SPAN_BYTES = 16
"""The size of the description of a node (rows, nulls) or of a buffer (offset, size): two integers of 64 bits."""


class RecordBatchWriter:
    """Writes the columns of one record batch, in order. Each column has `rows` values."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._fields: list[tuple[str, pa.DataType]] = []
        self._columns: list[IntegerColumn | pa.Array] = []

    def add(self, name: str, kind: pa.DataType, values: IntegerColumn | pa.Array) -> None:
        """Add a column.

        If `values` are packed integers, `kind` is an integer type of 32 or 64 bits. Otherwise, it is the type of the
        array.
        """
        self._fields.append((name, kind))
        self._columns.append(values)

    def build_stream(self, schema_metadata: Mapping[str, str]) -> bytearray:
        """Return the Arrow IPC stream with the added columns."""
        schema = _make_schema(tuple(self._fields), tuple(schema_metadata.items()))
        buffer_sizes = [
            self._measure_buffers(kind, column) for (_, kind), column in zip(self._fields, self._columns, strict=True)
        ]
        spans: list[tuple[int, int]] = []
        position = 0
        for size in (size for column_sizes in buffer_sizes for size in column_sizes):
            spans.append((position, size))
            position += size + -size % _ALIGNMENT_BYTES
        # The message of the record batch, without its body, has a marker, tables, nodes and buffers (`_encode_head`).
        marker_size = 4 + 4  # The continuation marker, and the length of the message.
        nodes_size = 4 + _SPAN_BYTES * len(buffer_sizes)  # The number of nodes (one for each column), and the nodes.
        buffers_size = 4 + 4 + _SPAN_BYTES * len(spans)  # Padding, the number of buffers, and their positions.
        head_size = marker_size + _NODES + nodes_size + buffers_size
        body_at = len(schema) + head_size
        buffer = _lookup.allocate_buffer(body_at + position + len(_END))
        with memoryview(buffer) as view:
            body = view[body_at : body_at + position]
            null_counts = self._write_columns(body, spans)
            view[len(schema) : body_at] = _encode_head(self._rows, null_counts, spans, position)
            view[: len(schema)] = schema
            view[body_at + position :] = _END
            body.release()
        return buffer

    def _measure_buffers(self, kind: pa.DataType, values: IntegerColumn | pa.Array) -> list[int]:
        """Return the sizes of the buffers of a column. An unnecessary validity bitmap has the size 0."""
        if isinstance(values, IntegerColumn):
            return [(self._rows + 7) // 8 if values.nullable else 0, self._rows * (kind.bit_width // 8)]
        return [0 if buffer is None else buffer.size for buffer in _list_buffers(values)]

    def _write_columns(self, body: memoryview, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Write the columns, and return the number of nulls of each column."""
        null_counts = []
        remaining_spans = iter(spans)
        for (_, kind), column in zip(self._fields, self._columns, strict=True):
            if isinstance(column, IntegerColumn):
                validity_span, values_span = next(remaining_spans), next(remaining_spans)
                null_counts.append(
                    column.write(_slice_body(body, values_span), kind.bit_width // 8, _slice_body(body, validity_span))
                )
            else:
                null_counts.append(column.null_count)
                for buffer in _list_buffers(column):
                    span = next(remaining_spans)
                    if buffer is not None:
                        _slice_body(body, span)[:] = memoryview(buffer).cast("B")
        for start, size in spans:
            padding = -size % _ALIGNMENT_BYTES
            if padding:
                body[start + size : start + size + padding] = bytes(padding)
        return null_counts


def _list_buffers(array: pa.Array) -> list[pa.Buffer | None]:
    """Return the buffers of an array that a stream contains. An array of type null has no buffers."""
    return [] if pa.types.is_null(array.type) else array.buffers()


def _slice_body(body: memoryview, span: tuple[int, int]) -> memoryview:
    return body[span[0] : span[0] + span[1]]


@lru_cache(maxsize=256)
def _make_schema(fields: tuple[tuple[str, Any], ...], metadata: tuple[tuple[str, str], ...]) -> bytes:
    schema = pa.schema([pa.field(name, kind) for name, kind in fields], metadata=dict(metadata))
    message: bytes = schema.serialize().to_pybytes()
    return message


def _encode_head(rows: int, null_counts: Sequence[int], spans: Sequence[tuple[int, int]], body_size: int) -> bytes:
    """Encode the message of a record batch without its body.

    The message consists of the Flatbuffers tables `Message` and `RecordBatch`. Each table begins with the distance to
    its vtable, which lists the offsets of its fields.

    Args:
        rows: The number of rows.
        null_counts: The number of nulls of each column.
        spans: The start and size of each buffer in the body.
        body_size: The size of the body in bytes.
    """
    nodes_end = _NODES + 4 + _SPAN_BYTES * len(null_counts)
    tables = _TABLES.pack(
        _MESSAGE,
        # The vtable of `Message`: the sizes of the vtable and of the table come first, then the offset of each field.
        *(12, 24, 16, 18, 4, 8),
        *(10, 24, 8, 4, 16),  # The vtable of `RecordBatch`.
        *(_MESSAGE - _MESSAGE_VTABLE, _BATCH - (_MESSAGE + 4), body_size, _VERSION_5, _RECORD_BATCH),
        # The offsets to the nodes and the buffers count from the fields that contain them.
        *(_BATCH - _BATCH_VTABLE, _NODES - (_BATCH + 4), rows, nodes_end + 4 - (_BATCH + 16)),
        len(null_counts),
    )
    nodes = np.empty((len(null_counts), 2), dtype="<i8")
    nodes[:, 0] = rows
    nodes[:, 1] = null_counts
    span_array = np.array(spans, dtype="<i8")
    message = b"".join((tables, nodes.tobytes(), bytes(4), len(spans).to_bytes(4, "little"), span_array.tobytes()))
    return _CONTINUATION + len(message).to_bytes(4, "little") + message
