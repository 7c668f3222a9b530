"""A segment file of a log: its description, and reads of its records."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.log.files import LogFiles
from seamark.metaserver.log.frames import FrameKind, find_batch, make_damage_error, read_frame
from seamark.metaserver.log.index import (
    FramePlace,
    SegmentIndex,
    SegmentIndexHeader,
    ShardIndex,
    ShardRange,
    compute_crc,
    decode_index,
    encode_index,
)
from seamark.metaserver.log.port import Record, Shard
from seamark.metaserver.log.state import AppendEntry

SEGMENT_SUFFIX = ".segment"
INDEX_SUFFIX = ".index"
_DIGITS = 20
"""The number of digits in the names of segments. All numbers of 64 bits fit."""
_GAP_BYTES_MAX = 32 << 10
"""The maximum number of unneeded bytes between two records that are read together with them in one read."""
_SPAN_BYTES_MAX = 4 << 20
"""The maximum size of one read of several records."""
_CHECK_BYTES = 1 << 20
"""The size of the pieces in which a segment is read to compute its checksum."""


def make_segment_name(number: int) -> str:
    """Return the name of a segment file."""
    return f"{number:0{_DIGITS}}{SEGMENT_SUFFIX}"


def make_index_name(number: int) -> str:
    """Return the name of the index file of a segment."""
    return f"{number:0{_DIGITS}}{INDEX_SUFFIX}"


def parse_segment_number(name: str, suffix: str) -> int | None:
    """Return the number in the name of a file with this suffix, or None for any other name."""
    digits = name.removesuffix(suffix)
    return int(digits) if name.endswith(suffix) and len(digits) == _DIGITS and digits.isdecimal() else None


@dataclass(slots=True, eq=False)
class LogSegment:
    """A complete segment, or the active segment.

    Attributes:
        size_bytes: The size of all frames.
        head_bytes: The size of the first frame.
        head_time_ms: The time of the state in the first frame.
        index: The index of the records in memory, or None if it is in the index file.
        ranges: The rows of each shard, if the index is in the index file.
        body_position: The position of the body in the index file.
    """

    number: int
    size_bytes: int
    head_bytes: int
    head_time_ms: int
    index: SegmentIndex | None
    ranges: dict[Shard, ShardRange] = field(default_factory=dict)
    body_position: int = 0
    is_gone: bool = False
    """Whether the file was removed or replaced."""

    @property
    def name(self) -> str:
        return make_segment_name(self.number)

    @property
    def has_entries(self) -> bool:
        return self.size_bytes > self.head_bytes

    def list_shards(self) -> Iterable[Shard]:
        """Return the shards that have rows in this segment."""
        return self.ranges if self.index is None else self.index.shards

    def get_end(self, shard: Shard) -> int | None:
        """Return the offset after the last row of a shard, or None if it has no rows in this segment."""
        if self.index is not None:
            index = self.index.shards.get(shard)
            return index.end if index is not None else None
        rows = self.ranges.get(shard)
        return rows.end if rows is not None else None

    def get_first_offset(self, shard: Shard) -> int | None:
        """Return the offset of the first row of a shard, or None if it has no rows in this segment."""
        if self.index is not None:
            index = self.index.shards.get(shard)
            return index.offsets[0] if index is not None else None
        rows = self.ranges.get(shard)
        return rows.first if rows is not None else None

    def get_last_time_ms(self, shard: Shard) -> int | None:
        """Return the time of the last record of a shard, or None if it has no rows in this segment."""
        if self.index is not None:
            index = self.index.shards.get(shard)
            return index.times[-1] if index is not None else None
        rows = self.ranges.get(shard)
        return rows.last_time_ms if rows is not None else None

    def measure_bytes(self, shard: Shard) -> int:
        """Return the size of a shard's rows in bytes."""
        if self.index is not None:
            index = self.index.shards.get(shard)
            return index.size_bytes if index is not None else 0
        rows = self.ranges.get(shard)
        return rows.size_bytes if rows is not None else 0

    def find_last_time_ms(self) -> int:
        """Return the time of the last record. If there is no record, return the time of the head."""
        if self.index is not None:
            return self.index.time_ms or self.head_time_ms
        return max((shard_range.last_time_ms for shard_range in self.ranges.values()), default=self.head_time_ms)

    def is_released(self, released_offsets: Mapping[Shard, int]) -> bool:
        """Return whether retention may remove all rows. `released_offsets` contains no shards of removed streams.

        Rows of removed streams do not count, because no reader needs them.
        """
        return all(
            (self.get_end(shard) or 0) <= released_offsets[shard]
            for shard in self.list_shards()
            if shard in released_offsets
        )

    def load_index(self, files: LogFiles, shard: Shard) -> ShardIndex:
        """Return the index of a shard that has rows in this segment.

        Raises:
            Corrupt: The index file does not describe this segment.
            OSError: The index file cannot be read.
        """
        if self.index is not None:
            return self.index.shards[shard]
        rows = self.ranges[shard]
        name = make_index_name(self.number)
        index = ShardIndex.from_bytes(files.read(name, self.body_position + rows.position, rows.length), rows)
        if index is None:
            raise Corrupt(
                f"The index file {files.describe(name)} of the log is damaged. No row is lost. Restart the server: "
                "it builds the file again"
            )
        return index

    def read_records(
        self, files: LogFiles, shard: Shard, places: Sequence[FramePlace], first_offset: int
    ) -> list[Record]:
        """Return the consecutive records of a shard at these places.

        Args:
            first_offset: The offset of a row in the first record. It is checked, because after a rewrite of the
                segment's file, a different record may be at one of the places.

        Raises:
            Corrupt: A record is damaged, or is not the expected record.
            OSError: The segment cannot be read.
        """
        records = [record for span in _split_into_runs(places) for record in self._read_span(files, shard, span)]
        next_offset = first_offset
        for place, record in zip(places, records, strict=True):
            end = record.offset + record.batch.rows
            if not record.offset <= next_offset < end or (record is not records[0] and record.offset != next_offset):
                raise make_damage_error(files.describe(self.name), place.position)
            next_offset = end
        return records

    def _read_span(self, files: LogFiles, shard: Shard, places: Sequence[FramePlace]) -> Iterator[Record]:
        """Yield the records of a shard in frames that are read together.

        Raises:
            Corrupt: A frame is damaged, or has no record of the shard.
        """
        start = places[0].position
        data = files.read(self.name, start, places[-1].position + places[-1].length - start)
        for place in places:
            frame = read_frame(self.number, place.position, data, start)
            entry = frame.decode_entry() if frame is not None and frame.kind is FrameKind.ENTRY else None
            if frame is None or not isinstance(entry, AppendEntry):
                raise make_damage_error(files.describe(self.name), place.position)
            batch = find_batch(entry, frame.payloads, shard)
            if batch is None:
                raise make_damage_error(files.describe(self.name), place.position)
            yield Record(shard, *batch, entry.time_ms, entry.producer, entry.sequence)

    def store_index(self, files: LogFiles) -> None:
        """Write the index file of a complete segment.

        Raises:
            OSError: The file cannot be written. The index stays in memory.
        """
        assert self.index is not None
        crc = compute_crc(self._read_slices(files))
        data = encode_index(self.index, self.number, self.size_bytes, crc)
        files.create(make_index_name(self.number), data)

    def load_index_header(self, files: LogFiles) -> tuple[SegmentIndexHeader, int] | None:
        """Return the header of the index file and the position of its body, or None if the file is damaged."""
        return decode_index(files.read_whole(make_index_name(self.number)), self.number)

    def use_index_file(self, header_and_position: tuple[SegmentIndexHeader, int] | None) -> None:
        """Use the index file from now on, and release the index in memory.

        `header_and_position` is the result of `load_index_header`. If it is None, because the file is damaged, nothing
        changes.
        """
        if header_and_position is not None:
            header, self.body_position = header_and_position
            self.ranges = {shard_range.shard: shard_range for shard_range in header.ranges}
            self.size_bytes = header.segment_bytes
            self.index = None

    def is_intact(self, files: LogFiles, crc: int) -> bool:
        """Return whether the bytes of the segment have the checksum `crc`, which the index file contains."""
        return compute_crc(self._read_slices(files)) == crc

    def _read_slices(self, files: LogFiles) -> Iterator[bytes]:
        for position in range(0, self.size_bytes, _CHECK_BYTES):
            yield files.read(self.name, position, min(_CHECK_BYTES, self.size_bytes - position))


def find_segment(segments: Sequence[LogSegment], shard: Shard, offset: int) -> LogSegment | None:
    """Return the segment with the row at an offset, or None. The search starts at the newest segment.

    Most readers read new rows. The first segment that begins at or before the row is the only segment that can contain
    it.
    """
    for segment in reversed(segments):
        first = segment.get_first_offset(shard)
        if first is not None and first <= offset:
            return segment if offset < (segment.get_end(shard) or 0) else None
    return None


def select_segments_from(segments: Sequence[LogSegment], time_ms: int) -> Sequence[LogSegment]:
    """Return the segments that may contain records at or after a time."""
    # The last times of the segments ascend.
    return segments[bisect.bisect_left(segments, time_ms, key=LogSegment.find_last_time_ms) :]


def _split_into_runs(places: Sequence[FramePlace]) -> Iterator[Sequence[FramePlace]]:
    """Split the places of frames into runs that are read together.

    A run has no gap of more than `_GAP_BYTES_MAX`, and at most `_SPAN_BYTES_MAX`. So a read returns few unneeded bytes,
    and uses limited memory.
    """
    run_start = 0
    for index in range(1, len(places) + 1):
        if index < len(places):
            previous, current = places[index - 1], places[index]
            is_near = current.position - previous.position - previous.length <= _GAP_BYTES_MAX
            if is_near and current.position + current.length - places[run_start].position <= _SPAN_BYTES_MAX:
                continue
        yield places[run_start:index]
        run_start = index
