"""Encodes and decodes the frames of a segment file.

A segment is a sequence of frames, each at a multiple of 8 bytes. A frame has a header of 32 bytes, all little-endian,
and a body:

    magic   4 bytes   b"SMLG"
    crc     4 bytes   CRC32C of the number of the segment, the position of the frame, and all following bytes
    body    4 bytes   length of the body, without the padding
    meta    4 bytes   length of the entry in MessagePack, with which the body begins; the payloads of its batches follow
    kind    1 byte    `FrameKind`
    –       15 bytes  zero

The checksum includes the number and the position, so that bytes of a deleted segment, or a frame inside a payload, are
never mistaken for a frame.

The first frame is the head: the state of the log before the segment. After each sync, the writer adds a mark, which is
not synced itself. Everything before a mark is durable. So a damaged frame before a mark was acknowledged, and the log
refuses to open. A damaged frame without a later mark was being written when the process or the machine stopped. It is
the end of the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
from awscrt.checksums import crc32c

from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.log.port import Batch, Shard
from seamark.metaserver.log.state import AppendEntry, BatchEntry, Entry, StateSummary

HEADER_BYTES = 32
ALIGNMENT_BYTES = 8
_MAGIC = b"SMLG"
_HEADER = struct.Struct("<4sIIIB15x")
_MAGIC_AND_CRC_BYTES = 8
_CHECKED_FIELDS = struct.Struct("<IIB15x")
"""The fields of the header after the checksum, which the checksum covers."""
_FRAME_PLACE = struct.Struct("<QQ")
"""The number of the segment and the position of the frame, with which the checksum begins."""
_ENCODER = msgspec.msgpack.Encoder()

Buffer = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """The content of a frame, which is one checksummed record in a segment file."""

    HEAD = 1
    """The state of the log at the beginning of the segment."""
    ENTRY = 2
    """An append, the beginning of a session, or the removal of a stream."""
    MARK = 3
    """No content. A mark shows that all frames before it are durable."""


class Frame(NamedTuple):
    """A complete, undamaged frame in a segment.

    Attributes:
        position: The position of the frame in the segment.
        end: The position after the frame and its padding.
        meta: The entry, or the state, in MessagePack.
        payloads: The payloads of the batches, one after another.
    """

    position: int
    end: int
    kind: FrameKind
    meta: memoryview
    payloads: memoryview

    def decode_entry(self) -> Entry:
        """Return the entry of a frame of the kind ENTRY."""
        entry: Entry = convert_msgpack(self.meta, Entry)
        return entry

    def decode_state(self) -> StateSummary:
        """Return the state of a frame of the kind HEAD."""
        return convert_msgpack(self.meta, StateSummary)


def measure_frame(meta: bytes, payloads: Sequence[bytes]) -> int:
    """Return the size of a frame in bytes, including its padding."""
    return _round_up_size(HEADER_BYTES + len(meta) + sum(map(len, payloads)))


def encode_meta(content: Entry | StateSummary) -> bytes:
    """Encode an entry or a state in MessagePack."""
    return _ENCODER.encode(content)


def list_payloads(batches: Sequence[Batch]) -> list[bytes]:
    """Return the payload and the kinds of each batch, without empty kinds. They follow the entry in a frame."""
    return [part for batch in batches for part in (batch.payload, batch.kinds) if part]


def encode_frame(segment: int, position: int, kind: FrameKind, meta: bytes, payloads: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a frame, which must be written one after another at `position`.

    The checksum also includes the segment and the position, so that a frame at a wrong place counts as damaged.

    Args:
        segment: The number of the segment.
        position: The position of the frame in the segment.
        kind: The content of the frame.
        meta: The encoded entry or state.
        payloads: The bytes that follow `meta`.
    """
    body_bytes = len(meta) + sum(map(len, payloads))
    crc = crc32c(_CHECKED_FIELDS.pack(body_bytes, len(meta), kind), crc32c(_FRAME_PLACE.pack(segment, position)))
    crc = crc32c(meta, crc)
    for part in payloads:
        crc = crc32c(part, crc)
    header = _HEADER.pack(_MAGIC, crc, body_bytes, len(meta), kind)
    return [header, meta, *payloads, bytes(_round_up_size(HEADER_BYTES + body_bytes) - HEADER_BYTES - body_bytes)]


def encode_mark(segment: int, position: int) -> bytes:
    """Return the bytes of a mark at `position`, a frame which shows that all frames before it are durable."""
    return b"".join(encode_frame(segment, position, FrameKind.MARK, b"", ()))


def read_frame(segment: int, position: int, buffer: Buffer, start: int = 0) -> Frame | None:
    """Return the frame at a position of a segment, or None if there is no complete, undamaged frame.

    A frame has a header, the entry or the state, and the payloads. The checksum covers all of these, the number of the
    segment and the position.

    Args:
        segment: The number of the segment.
        position: The position of the frame.
        buffer: Bytes of the segment.
        start: The position of the first byte of `buffer` in the segment.
    """
    index = position - start
    if index + HEADER_BYTES > len(buffer):
        return None
    magic, crc, body_bytes, meta_bytes, kind = _HEADER.unpack_from(buffer, index)
    end = index + HEADER_BYTES + body_bytes
    frame_kind = _KINDS.get(kind)
    if magic != _MAGIC or end > len(buffer) or meta_bytes > body_bytes or frame_kind is None:
        return None
    view = memoryview(buffer)
    # The checksum covers all bytes of the header after the checksum.
    actual_crc = crc32c(view[index + _MAGIC_AND_CRC_BYTES : end], crc32c(_FRAME_PLACE.pack(segment, position)))
    if actual_crc != crc:
        return None
    body = view[index + HEADER_BYTES : end]
    return Frame(
        position,
        position + _round_up_size(HEADER_BYTES + body_bytes),
        frame_kind,
        body[:meta_bytes],
        body[meta_bytes:],
    )


def read_frames(segment: int, buffer: Buffer) -> Iterator[Frame]:
    """Yield the frames of a segment, up to the first position without a complete, undamaged frame."""
    position = 0
    while (frame := read_frame(segment, position, buffer)) is not None:
        yield frame
        position = frame.end


def check_tail(segment: int, position: int, buffer: Buffer, name: str) -> None:
    """Check that the bytes after the last undamaged frame were never acknowledged.

    A mark is a frame without content. The log writes it only after all frames before it are durable. So a mark after
    the damage shows that acknowledged rows are damaged. Without such a mark, the bytes are from an append that was
    interrupted.

    Args:
        position: The position after the last undamaged frame.
        buffer: The bytes of the segment.
        name: The path of the segment for the message.

    Raises:
        Corrupt: A mark follows after `position`.
    """
    find = buffer.find if isinstance(buffer, bytes | bytearray) else bytes(buffer).find
    found_position = position
    while (found_position := find(_MAGIC, found_position + 1)) >= 0:
        # A frame begins only at a multiple of this number, so these bytes are part of a payload.
        if found_position % ALIGNMENT_BYTES:
            continue
        frame = read_frame(segment, found_position, buffer)
        if frame is not None and frame.kind is FrameKind.MARK:
            raise make_damage_error(name, position)


def make_damage_error(name: str, position: int) -> Corrupt:
    """Return the error for acknowledged rows that cannot be read."""
    return Corrupt(
        f"The log has a damaged record at byte {position} of {name}, and its rows were acknowledged. Nothing was "
        "changed. Restore this file from a copy, then start again"
    )


def split_payloads(entry: AppendEntry, payloads: memoryview) -> Iterator[tuple[BatchEntry, memoryview]]:
    """Yield each batch of an append with its bytes.

    The bytes are the rows, and then one byte for each row which says whether it is an insert, update or delete. Without
    these bytes, all rows are inserts.
    """
    start = 0
    for batch in entry.batches:
        yield batch, payloads[start : start + batch.size_bytes]
        start += batch.size_bytes


def find_batch(entry: AppendEntry, payloads: memoryview, shard: Shard) -> tuple[int, Batch] | None:
    """Return the batch of a shard in an append, and the offset of its first row, or None if there is no such batch."""
    for batch, data in split_payloads(entry, payloads):
        if batch.shard == shard:
            payload, kinds = bytes(data[: batch.payload_bytes]), bytes(data[batch.payload_bytes :])
            return batch.offset, Batch(batch.rows, payload, kinds)
    return None


def read_frame_length(header: bytes) -> int:
    """Return the size of a frame in bytes, as stated in its header. The header may be damaged.

    So a caller must check the frame with `read_frame` after it has read this number of bytes.
    """
    _, _, body_bytes, _, _ = _HEADER.unpack_from(header)
    return _round_up_size(HEADER_BYTES + body_bytes)


_KINDS = {int(kind): kind for kind in FrameKind}


def _round_up_size(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
