"""The index of a segment: the positions of the records of each shard.

The index of a complete segment is stored in a file beside it. If the index file is missing or damaged, the server reads
the segment instead, which takes longer.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import msgspec
from awscrt.checksums import crc32c

from seamark.formats.runtime.decoding import convert_msgpack
from seamark.metaserver.log.port import Shard
from seamark.metaserver.log.state import AppendEntry

_VERSION = 1
_CRC_BYTES = 4
"""The size of a CRC32C, and of the length of the header."""
_OFFSET_BYTES = 8
"""The size of an item in the arrays of offsets and of times. An item of the two other arrays has half of this size."""
_RECORD_BYTES = 24
"""The size of the items of one record in the four arrays of a `ShardIndex`."""


class FramePlace(NamedTuple):
    """The position and the length of a frame in its segment."""

    position: int
    length: int


class ShardIndex:
    """The records of one shard in one segment, in order.

    Attributes:
        offsets: For each record, the offset of its first row.
        times: For each record, its time in milliseconds.
        positions: For each record, the position of its frame in the segment.
        lengths: For each record, the length of its frame.
    """

    __slots__ = ("end", "lengths", "offsets", "positions", "size_bytes", "times")

    def __init__(self) -> None:
        self.offsets = array("Q")
        self.times = array("Q")
        self.positions = array("I")
        self.lengths = array("I")
        self.end = 0
        self.size_bytes = 0

    def add(self, offset: int, end: int, time_ms: int, place: FramePlace, size_bytes: int) -> None:
        """Add the next record."""
        self.offsets.append(offset)
        self.times.append(time_ms)
        self.positions.append(place.position)
        self.lengths.append(place.length)
        self.end = end
        self.size_bytes += size_bytes

    def find_frames(self, offset: int, *, limit_bytes: int, end: int | None) -> list[FramePlace]:
        """Return the frames of consecutive records. The first record contains the row at `offset`.

        The result contains at least one frame, unless the row is not in this index.

        Args:
            limit_bytes: The maximum total length of the frames.
            end: The offset before which the records begin, or None.
        """
        if offset >= self.end:
            return []
        # `offset` may be in the middle of a record, so search for the last record that begins at or before it.
        first = max(bisect.bisect_right(self.offsets, offset) - 1, 0)
        after_last = len(self.offsets) if end is None else bisect.bisect_left(self.offsets, end)
        frames: list[FramePlace] = []
        for index in range(first, after_last):
            limit_bytes -= self.lengths[index]
            if frames and limit_bytes < 0:
                break
            frames.append(FramePlace(self.positions[index], self.lengths[index]))
        return frames

    def find_offset(self, time_ms: int) -> int | None:
        """Return the offset of the first record at or after `time_ms`, or None if all records are earlier."""
        index = bisect.bisect_left(self.times, time_ms)
        return self.offsets[index] if index < len(self.offsets) else None

    def to_bytes(self) -> bytes:
        """Encode the offsets, times, positions and lengths, one array after another."""
        return b"".join(values.tobytes() for values in (self.offsets, self.times, self.positions, self.lengths))

    @classmethod
    def from_bytes(cls, data: bytes, rows: ShardRange) -> ShardIndex | None:
        """Decode the result of `to_bytes`. Return None if the bytes do not describe these rows."""
        count = rows.length // _RECORD_BYTES
        if len(data) != rows.length or not count or rows.length % _RECORD_BYTES:
            return None
        index = cls()
        times_start = _OFFSET_BYTES * count
        positions_start = 2 * times_start  # A time has as many bytes as an offset.
        lengths_start = positions_start + times_start // 2  # A position has half as many.
        index.offsets.frombytes(data[:times_start])
        index.times.frombytes(data[times_start:positions_start])
        index.positions.frombytes(data[positions_start:lengths_start])
        index.lengths.frombytes(data[lengths_start:])
        index.end = rows.end
        is_ascending = all(earlier < later for earlier, later in pairwise((*index.offsets, rows.end)))
        has_these_rows = index.offsets[0] == rows.first and index.times[-1] == rows.last_time_ms
        return index if is_ascending and has_these_rows else None


class ShardRange(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one shard in one segment, and the position of their index in the index file.

    Attributes:
        first: The offset of the first row.
        end: The offset after the last row.
        last_time_ms: The time of the last record.
        size_bytes: The size of the records.
        position: The position of the shard's index after the header of the index file.
        length: The length of the shard's index.
    """

    stream: str
    number: int
    first: int
    end: int
    last_time_ms: int
    size_bytes: int
    position: int
    length: int

    @property
    def shard(self) -> Shard:
        return Shard(self.stream, self.number)


class SegmentIndexHeader(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of an index file.

    Attributes:
        segment: The number of the segment.
        segment_bytes: The number of bytes of the segment that the index describes.
        segment_crc: The CRC32C of these bytes.
        body_crc: The CRC32C of the bytes after the header.
    """

    version: int
    segment: int
    segment_bytes: int
    segment_crc: int
    body_crc: int
    ranges: tuple[ShardRange, ...]


@dataclass(slots=True)
class SegmentIndex:
    """The records of all shards in a segment.

    Attributes:
        time_ms: The time of the last entry.
        first_time_ms: The time of the first entry, or 0 if there is none.
        shards: The index of each shard, in memory.
    """

    time_ms: int = 0
    first_time_ms: int = 0
    shards: dict[Shard, ShardIndex] = field(default_factory=dict)

    def add(self, entry: AppendEntry, place: FramePlace) -> None:
        """Add the batches of an append, which has one batch for each of its shards."""
        self.time_ms = entry.time_ms
        self.first_time_ms = self.first_time_ms or entry.time_ms
        for batch in entry.batches:
            index = self.shards.get(batch.shard)
            if index is None:
                index = self.shards[batch.shard] = ShardIndex()
            index.add(batch.offset, batch.offset + batch.rows, entry.time_ms, place, batch.size_bytes)

    def list_ranges(self) -> dict[Shard, ShardRange]:
        """Return the range of rows of each shard, with the position of its index in the body of the index file."""
        ranges: dict[Shard, ShardRange] = {}
        position = 0
        for shard, index in self.shards.items():
            length = len(index.offsets) * _RECORD_BYTES
            ranges[shard] = ShardRange(
                *shard, index.offsets[0], index.end, index.times[-1], index.size_bytes, position, length
            )
            position += length
        return ranges


def encode_index(index: SegmentIndex, segment: int, segment_bytes: int, segment_crc: int) -> bytes:
    """Return the content of an index file.

    The file contains a checksum, the length of the header, the header, and the indexes of all shards.

    Args:
        index: The records of the segment.
        segment: The number of the segment.
        segment_bytes: The size of the segment.
        segment_crc: The CRC32C of the segment.
    """
    body = b"".join(shard_index.to_bytes() for shard_index in index.shards.values())
    header = msgspec.msgpack.encode(
        SegmentIndexHeader(
            _VERSION, segment, segment_bytes, segment_crc, crc32c(body), tuple(index.list_ranges().values())
        )
    )
    length = len(header).to_bytes(_CRC_BYTES, "little")
    return b"".join((crc32c(header, crc32c(length)).to_bytes(_CRC_BYTES, "little"), length, header, body))


def decode_index(data: bytes, segment: int) -> tuple[SegmentIndexHeader, int] | None:
    """Return the header of an index file and the position of its body, or None if the file cannot be used.

    A file cannot be used if it is damaged, has another version, or describes another segment.
    """
    header_position = 2 * _CRC_BYTES  # The checksum and the length of the header precede it.
    header_crc = int.from_bytes(data[:_CRC_BYTES], "little")
    body_position = header_position + int.from_bytes(data[_CRC_BYTES:header_position], "little")
    if len(data) < body_position or crc32c(data[_CRC_BYTES:body_position]) != header_crc:
        return None
    try:
        header = convert_msgpack(data[header_position:body_position], SegmentIndexHeader)
    except msgspec.DecodeError:
        return None
    is_body_intact = crc32c(data[body_position:]) == header.body_crc
    is_valid = header.version == _VERSION and header.segment == segment and is_body_intact
    return (header, body_position) if is_valid else None


def compute_crc(parts: Iterable[bytes]) -> int:
    """Return the CRC32C of the concatenated parts."""
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return crc
