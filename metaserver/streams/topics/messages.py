"""Reads the rows in messages of an input topic. The module does no I/O.

A message is JSON (an object, or an array of objects), JSON lines, an Arrow IPC stream, or an Avro object container
file. The header `content-type` states the format. Without this header, the first bytes determine the format. An
unreadable message is rejected with a reason, and does not affect other messages.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import BadRequest, SeamarkError, TooLarge
from seamark.metaserver.log.kafka.topics import TopicMessage
from seamark.metaserver.streams.incoming import avro_rows
from seamark.metaserver.streams.incoming.arrow_body import read_stream
from seamark.metaserver.streams.incoming.rows import RejectedRow, RowFormat, decode_rows
from seamark.metaserver.streams.incoming.sizes import DECODED_BYTES_MAX, check_columns, check_size

MESSAGE_BYTES_MAX = 8 << 20
"""The maximum size of a message."""
RUN_BYTES_MAX = 4 << 20
"""The total size of the messages of a run at which no further message is added."""
RAW_CHARACTERS_MAX = 64 << 10
"""The maximum number of characters of a rejected message in a dead letter."""
CONTENT_TYPE = "content-type"
AVRO_TYPES = ("application/avro", "avro/binary")
_ARROW_START = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow IPC stream: the marker before each message."""
_REGISTRY_STARTS = (b"\x00", b"\xc3\x01")
"""The first bytes of Avro rows with a schema in a registry: Confluent's format, and Avro's single-object encoding."""


@dataclass
class MessageRun:
    """Consecutive messages of a partition whose rows are appended together.

    Attributes:
        messages: The messages.
        rows: The JSON rows, if the messages are JSON.
        batches: The record batches, if the messages are Arrow or Avro.
        rejected: The unreadable messages, and the lines that are not valid JSON.
        decoded_bytes: The approximate size of the record batches.
    """

    messages: list[TopicMessage] = field(default_factory=list)
    rows: list[Any] = field(default_factory=list)
    batches: list[pa.RecordBatch] = field(default_factory=list)
    rejected: list[RejectedRow] = field(default_factory=list)
    decoded_bytes: int = 0

    @property
    def row_count(self) -> int:
        rows: int = sum(batch.num_rows for batch in self.batches)
        return len(self.rows) + rows


def divide_messages(
    messages: Iterable[TopicMessage], metadata: TableMetadata, *, rows_max: int
) -> Iterator[MessageRun]:
    """Read messages of one partition, and yield runs, which are consecutive messages that fit into one append.

    JSON messages and messages with record batches are in different runs.

    Args:
        messages: The messages, in their order.
        metadata: The table's metadata.
        rows_max: The maximum number of rows of a run.
    """
    run, size_bytes = MessageRun(), 0
    for message in messages:
        message_run = read_messages([message], metadata, rows_max=rows_max)
        is_full = (
            (run.rows and message_run.batches)
            or (run.batches and message_run.rows)
            or size_bytes > RUN_BYTES_MAX
            or run.decoded_bytes + message_run.decoded_bytes > DECODED_BYTES_MAX
            or not _fits_one_append(run.row_count + message_run.row_count, metadata, rows_max)
        )
        if run.messages and is_full:
            yield run
            run, size_bytes = MessageRun(), 0
        run.messages += message_run.messages
        run.rows += message_run.rows
        run.batches += message_run.batches
        run.rejected += message_run.rejected
        run.decoded_bytes += message_run.decoded_bytes
        size_bytes += len(message.value or b"")
    if run.messages:
        yield run


def _fits_one_append(rows: int, metadata: TableMetadata, rows_max: int) -> bool:
    try:
        check_columns(rows, metadata)
    except TooLarge:
        return False
    return rows <= rows_max


def read_messages(messages: Sequence[TopicMessage], metadata: TableMetadata, *, rows_max: int) -> MessageRun:
    """Read the rows of messages with one format.

    A message that cannot be read becomes a rejected row, and does not stop the others.

    Args:
        messages: The messages, in their order.
        metadata: The table's metadata.
        rows_max: The maximum number of rows of a message.

    Raises:
        MemoryError: The process lacks memory.
    """
    run = MessageRun(list(messages))
    for message in messages:
        if message.value is None:  # A tombstone has no rows.
            continue
        try:
            rows, decoded_bytes = _read_message(message.value, _read_format(message), metadata, rows_max)
        except SeamarkError as error:
            run.rejected.append(make_rejected_row(message, error.message))
            continue
        except MemoryError:  # The message has not caused this error, so it is not rejected. The caller reads it again.
            raise
        except Exception as error:  # noqa: BLE001  a message must not block later messages
            run.rejected.append(make_rejected_row(message, f"The message cannot be read ({type(error).__name__})"))
            continue
        run.decoded_bytes += decoded_bytes
        for row in rows:
            if isinstance(row, pa.RecordBatch):
                run.batches.append(row)
            elif isinstance(row, RejectedRow):  # The row is an invalid line.
                run.rejected.append(make_rejected_row(message, row.reason, row.raw))
            else:
                run.rows.append(row)
    return run


def make_rejected_row(message: TopicMessage, reason: str, raw: str | None = None) -> RejectedRow:
    """Return a message as a rejected row.

    Args:
        message: The message.
        reason: The reason.
        raw: The text of the row, if it is only a part of the message. Otherwise the message is used as text, or in
            base64 if it is not text.
    """
    value = message.value or b""
    if raw is None:
        try:
            raw = value.decode()
        except UnicodeDecodeError:
            raw = f"base64:{base64.b64encode(value[:RAW_CHARACTERS_MAX]).decode()}"
    return RejectedRow(raw[:RAW_CHARACTERS_MAX], f"{reason} (partition {message.partition}, offset {message.offset})")


def _read_format(message: TopicMessage) -> RowFormat | None:
    """Return the format of a message, or None for Avro.

    The header `content-type` states the format. Without it, the first bytes of the message show the format. The default
    is JSON.

    Raises:
        BadRequest: The format is not supported.
    """
    value = message.value or b""
    header = message.headers.get(CONTENT_TYPE, b"").decode("latin-1").partition(";")[0].strip().lower()
    if header in AVRO_TYPES or (not header and value.startswith(avro_rows.MAGIC)):
        return None
    if header:
        for row_format in RowFormat:
            if header in row_format.value:
                return row_format
        types = ", ".join((*(name for row_format in RowFormat for name in row_format.value), *AVRO_TYPES))
        raise BadRequest(f"The header content-type is {header[:100]!r}; messages have one of {types}")
    if value.startswith(_ARROW_START):
        return RowFormat.ARROW
    if value.startswith(_REGISTRY_STARTS):
        raise BadRequest(
            "The message has no format that is known. If it is Avro with a schema in a registry, write Avro object "
            "container files, which have their schema"
        )
    return RowFormat.JSON


def _read_message(
    value: bytes, row_format: RowFormat | None, metadata: TableMetadata, rows_max: int
) -> tuple[Sequence[Any], int]:
    """Return the record batches or the JSON rows of a message, and the approximate size of the batches.

    A JSON object is a message with one row. It is decoded as an array with one element.

    Raises:
        BadRequest: The message is invalid.
        TooLarge: The message has too many rows, or its rows are too large.
    """
    if len(value) > MESSAGE_BYTES_MAX:
        raise TooLarge(f"The message has {len(value):,} bytes; the limit is {MESSAGE_BYTES_MAX:,} bytes")
    if row_format is None or row_format is RowFormat.ARROW:
        if row_format is None:
            batches = [avro_rows.read_avro(value, "The message", rows_max=rows_max)]
        else:
            batches = read_stream(value, "The message", rows_max=rows_max).to_batches()
        return batches, check_size(batches, metadata)
    is_object = row_format is RowFormat.JSON and not value.lstrip().startswith(b"[")
    rows = decode_rows(b"[%b]" % value if is_object else value, row_format, rows_max=rows_max)
    if is_object and len(rows) != 1:
        raise BadRequest("The message is not one JSON object, or an array of objects")
    check_columns(len(rows), metadata)
    if not all(isinstance(row, dict | RejectedRow) for row in rows):
        raise BadRequest("A row of the message is not a JSON object")
    return rows, 0
