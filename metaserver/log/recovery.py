"""Opens the files of a log: finds the end of the log, and checks that no acknowledged row is missing."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.log.files import LogFile, LogFiles
from seamark.metaserver.log.frames import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    check_tail,
    encode_frame,
    encode_meta,
    make_damage_error,
    read_frame,
    read_frame_length,
    read_frames,
)
from seamark.metaserver.log.index import FramePlace, SegmentIndex
from seamark.metaserver.log.port import Shard
from seamark.metaserver.log.segment import (
    INDEX_SUFFIX,
    SEGMENT_SUFFIX,
    LogSegment,
    make_segment_name,
    parse_segment_number,
)
from seamark.metaserver.log.state import AppendEntry, Entry, LogState, ShardSummary

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The errors of a disk that has no space for more bytes."""


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """An open log.

    Attributes:
        segments: All segments, the oldest first. The last is the active segment.
        file: The file of the active segment.
        torn_bytes: The number of bytes after the last complete frame (a checksummed record of a segment). They were
            never acknowledged, and were removed.
        state: The state after the last entry.
    """

    state: LogState
    segments: list[LogSegment]
    file: LogFile
    torn_bytes: int


def recover_log(files: LogFiles, state: LogState, now_ms: int, *, segment_bytes: int) -> RecoveredLog:
    """Open the log in a folder, or begin a new log.

    Args:
        files: The files in the folder.
        state: An empty state, which the function fills with the state of the log.
        now_ms: The current time.
        segment_bytes: The size to reserve for a new segment.

    Raises:
        Corrupt: Acknowledged rows are damaged or missing. No acknowledged row was removed.
        OSError: The disk fails.
    """
    numbers = _list_segment_numbers(files)
    if not numbers:
        return _begin_log(files, state, now_ms, segment_bytes)
    segments = [_open_segment(files, number, is_last=number == numbers[-1]) for number in numbers]
    torn_bytes, file = _recover_last_segment(files, segments, state, segment_bytes)
    try:
        _restore_starts(segments, state)
        _check_unreleased(files, segments[:-1], state)
        files.remove([name for name in files.list_names() if _is_orphan(name, numbers)])
    except BaseException:
        file.close()
        raise
    return RecoveredLog(state, segments, file, torn_bytes)


def _list_segment_numbers(files: LogFiles) -> list[int]:
    """Return the numbers of the segments in ascending order.

    Raises:
        Corrupt: A segment in between is missing.
    """
    numbers = sorted(
        number for name in files.list_names() if (number := parse_segment_number(name, SEGMENT_SUFFIX)) is not None
    )
    for previous, number in pairwise(numbers):
        if number != previous + 1:
            raise Corrupt(
                f"The file {files.describe(make_segment_name(previous + 1))} of the log is missing, but later files "
                "exist. Restore it from a copy, then start again"
            )
    return numbers


def _begin_log(files: LogFiles, state: LogState, now_ms: int, segment_bytes: int) -> RecoveredLog:
    state.time_ms = now_ms
    files.remove([name for name in files.list_names() if parse_segment_number(name, INDEX_SUFFIX) is not None])
    segment = create_segment(files, 1, state, segment_bytes=segment_bytes)
    return RecoveredLog(state, [segment], files.open(segment.name), 0)


def create_segment(files: LogFiles, number: int, state: LogState, *, segment_bytes: int) -> LogSegment:
    """Create a segment that begins with the state of the log.

    Raises:
        OSError: The file cannot be created. No file with its name exists.
    """
    head, time_ms = encode_meta(state.summarize()), state.time_ms
    return create_segment_file(files, number, head, time_ms, segment_bytes=segment_bytes)


def create_segment_file(files: LogFiles, number: int, head: bytes, time_ms: int, *, segment_bytes: int) -> LogSegment:
    """Create a segment that begins with an encoded state.

    The file is created with the reserved size, so that later appends need not extend it.

    Args:
        number: The number of the segment.
        head: The encoded state of the log.
        time_ms: The time of the last entry before the segment.
        segment_bytes: The size to reserve. A longer head makes the file larger.
    """
    data = b"".join(encode_frame(number, 0, FrameKind.HEAD, head, ()))
    files.create(make_segment_name(number), data, reserve_bytes=max(segment_bytes, len(data)))
    return LogSegment(number, len(data), len(data), time_ms, SegmentIndex())


def _open_segment(files: LogFiles, number: int, *, is_last: bool) -> LogSegment:
    """Open a segment with its index file, or read its frames if its index file cannot be used.

    An index file cannot be used if it is missing or damaged, or if it describes more bytes than the segment has.

    The frames of the last segment are read later, by `_recover_last_segment`.
    """
    segment = LogSegment(number, 0, 0, 0, SegmentIndex())
    head = _read_head(files, segment)
    segment.head_bytes, segment.head_time_ms = head.end, head.decode_state().time_ms
    if is_last:
        return segment
    try:
        header_and_position = segment.load_index_header(files)
    except OSError:
        header_and_position = None
    if header_and_position is None or header_and_position[0].segment_bytes > files.measure_size(segment.name):
        _index_segment(files, segment)
        return segment
    segment.use_index_file(header_and_position)
    return segment


def _index_segment(files: LogFiles, segment: LogSegment) -> None:
    """Add the frames of a complete segment to its index in memory, because the segment has no index file.

    Raises:
        Corrupt: A frame is damaged, although all frames were acknowledged. `_check_continuity` detects damage at the
            end.
    """
    assert segment.index is not None
    data = files.read_whole(segment.name)
    end = 0
    for frame in read_frames(segment.number, data):
        end = frame.end
        # Ignore a mark, which shows that all frames before it are durable. A mark at the end may not be durable itself.
        if frame.kind is not FrameKind.MARK:
            _index_frame(segment, frame)
    check_tail(segment.number, end, data, files.describe(segment.name))


def _index_frame(segment: LogSegment, frame: Frame) -> Entry | None:
    """Add a frame to the index of its segment, and return its entry.

    Return None for a head, the state of the log at the start of a segment, and for a mark, which shows that all frames
    before it are durable.
    """
    segment.size_bytes = frame.end
    if frame.kind is not FrameKind.ENTRY:
        return None
    entry = frame.decode_entry()
    if isinstance(entry, AppendEntry) and segment.index is not None:
        segment.index.add(entry, FramePlace(frame.position, frame.end - frame.position))
    return entry


def _read_head(files: LogFiles, segment: LogSegment) -> Frame:
    """Return the first frame of a segment, which contains the state of the log at the start of the segment.

    Raises:
        Corrupt: The frame is damaged, or is not of the kind `HEAD`.
    """
    header = files.read(segment.name, 0, HEADER_BYTES)
    if len(header) == HEADER_BYTES:
        frame = read_frame(segment.number, 0, files.read(segment.name, 0, read_frame_length(header)))
        if frame is not None and frame.kind is FrameKind.HEAD:
            return frame
    raise make_damage_error(files.describe(segment.name), 0)


def _recover_last_segment(
    files: LogFiles, segments: list[LogSegment], state: LogState, segment_bytes: int
) -> tuple[int, LogFile]:
    """Apply the entries of the last segment, truncate its file after them, and open the file.

    A mark is a frame which shows that all frames before it are durable. The frames after the last mark may be only in
    the memory of the kernel, because a sync may have failed. So they are written again before the log treats them as
    durable.

    Returns:
        The number of bytes of an incomplete frame at the end, which were removed, and the open file.
    """
    segment = segments[-1]
    data = files.read_whole(segment.name)
    marked_position = 0
    for frame in read_frames(segment.number, data):
        entry = _index_frame(segment, frame)
        if entry is not None:
            state.apply(entry)
        elif frame.kind is FrameKind.MARK:
            marked_position = frame.position
        else:  # The first frame is the head.
            state.restore(frame.decode_state())
            _check_continuity(files, segments, state)
    end = segment.size_bytes
    check_tail(segment.number, end, data, files.describe(segment.name))
    # The reserved space after the frames is zero.
    torn_bytes = len(data[end:].rstrip(b"\0"))
    file = files.open(segment.name)
    with _close_after_failure(file):
        if torn_bytes:
            file.truncate(end)
        try:
            file.reserve(max(segment_bytes, end))
        except OSError as error:
            if error.errno not in FULL:  # On a full disk, the log can still be read.
                raise
        file.write(marked_position, [data[marked_position:end]])
        file.sync()
    return torn_bytes, file


@contextmanager
def _close_after_failure(file: LogFile) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.close()
        raise


def _check_continuity(files: LogFiles, segments: list[LogSegment], state: LogState) -> None:
    """Check that no rows are missing between the segments.

    The rows of each shard in a segment must follow its rows in the earlier segments. `state` is the state at the start
    of the last segment, so its watermark must be the end of the rows in the earlier segments.

    Shards that the state no longer contains are not checked, because their streams were removed.

    Raises:
        Corrupt: Rows are missing.
    """
    ends: dict[Shard, int] = {}
    for segment in segments[:-1]:
        for shard in segment.list_shards():
            first, end = segment.get_first_offset(shard), segment.get_end(shard)
            if shard in state.shards and ends.get(shard, first) != first:
                raise make_damage_error(files.describe(segment.name), 0)
            ends[shard] = end or 0
    for shard, end in ends.items():
        if shard in state.shards and state.shards[shard].watermark != end:
            raise make_damage_error(files.describe(segments[-2].name), segments[-2].size_bytes)


def _restore_starts(segments: list[LogSegment], state: LogState) -> None:
    """Determine the first existing row of each shard, and the size of its rows.

    The segments are read from the newest to the oldest, so the last value that a shard gets is its first row. A shard
    without rows in any segment starts at its watermark.
    """
    for summary in state.shards.values():
        summary.start, summary.size_bytes = summary.watermark, 0
    for segment in reversed(segments):
        for shard in segment.list_shards():
            shard_summary: ShardSummary | None = state.shards.get(shard)
            if shard_summary is not None:
                shard_summary.start = segment.get_first_offset(shard) or 0
                shard_summary.size_bytes += segment.measure_bytes(shard)


def _check_unreleased(files: LogFiles, segments: list[LogSegment], state: LogState) -> None:
    """Check the bytes of the segments that contain rows that are in no data file yet.

    All other segments are checked when they are read.

    Raises:
        Corrupt: The bytes are damaged.
    """
    released_offsets = state.get_released_offsets()
    for segment in segments:
        # The frames of a segment with an index in memory were read and checked before.
        if segment.index is not None or segment.is_released(released_offsets):
            continue
        header_and_position = segment.load_index_header(files)
        if header_and_position is None or not segment.is_intact(files, header_and_position[0].segment_crc):
            undamaged_end = 0
            for frame in read_frames(segment.number, files.read_whole(segment.name)):
                undamaged_end = frame.end
            raise make_damage_error(files.describe(segment.name), undamaged_end)


def _is_orphan(name: str, segment_numbers: list[int]) -> bool:
    """Return whether a file is the index file of a removed segment, which a crash during the removal can leave.

    `segment_numbers` are the numbers of all segments in ascending order. The oldest segments are removed first.
    """
    number = parse_segment_number(name, INDEX_SUFFIX)
    return number is not None and number < segment_numbers[0]
