"""Rewrites an old segment so that it contains only rows that are in no data file yet.

The log removes the oldest segments first. If a table cannot be flushed, the segment with its oldest row and all later
segments must stay, with the rows of all tables. Rewriting these segments makes them small. A rewritten segment keeps
its number.

The released rows of a shard are the rows below an offset, so the remaining rows are always the last rows of the shard.
"""

from __future__ import annotations

from collections.abc import Mapping

from seamark.metaserver.log.files import LogFiles
from seamark.metaserver.log.frames import (
    FrameKind,
    encode_frame,
    encode_meta,
    make_damage_error,
    read_frames,
    split_payloads,
)
from seamark.metaserver.log.index import FramePlace, SegmentIndex
from seamark.metaserver.log.port import Shard
from seamark.metaserver.log.segment import LogSegment, make_index_name
from seamark.metaserver.log.state import AppendEntry, BatchEntry, StateSummary


def list_unreleased_offsets(segment: LogSegment, released_offsets: Mapping[Shard, int]) -> dict[Shard, int]:
    """Return the released offset of each shard that has unreleased rows in the segment.

    Rows at or after a shard's released offset are in no data file yet, so a rewrite of the segment keeps them.
    """
    return {
        shard: released_offsets[shard]
        for shard in segment.list_shards()
        if shard in released_offsets and (segment.get_end(shard) or 0) > released_offsets[shard]
    }


def is_worth_rewriting(segment: LogSegment, released_offsets: Mapping[Shard, int]) -> bool:
    """Return whether the rewritten segment would have at most half of the bytes.

    Otherwise the rewrite would free too little space for the bytes that it writes.

    Args:
        segment: A complete segment of the log.
        released_offsets: The released offset of each shard whose rows the rewrite keeps.
    """
    return 2 * sum(map(segment.measure_bytes, released_offsets)) <= segment.size_bytes - segment.head_bytes


def rewrite_segment(files: LogFiles, segment: LogSegment, released_offsets: Mapping[Shard, int]) -> LogSegment:
    """Replace a complete segment by a segment with only its unreleased rows, and return the new segment.

    Args:
        files: The files of the log.
        segment: The segment to rewrite.
        released_offsets: The released offset of each shard with rows to keep. Rows below it are left out.

    Raises:
        Corrupt: A record is damaged. The segment is unchanged.
        OSError: The disk has failed. The file contains either the old or the new segment.
    """
    # Write no state into the new segment, because later segments begin with a state.
    head = encode_meta(StateSummary(segment.head_time_ms, [], {}, {}))
    parts = encode_frame(segment.number, 0, FrameKind.HEAD, head, ())
    size_bytes = sum(map(len, parts))
    index = SegmentIndex()
    new_segment = LogSegment(segment.number, size_bytes, size_bytes, segment.head_time_ms, index)
    end = 0
    for frame in read_frames(segment.number, files.read(segment.name, 0, segment.size_bytes)):
        end = frame.end
        entry = frame.decode_entry() if frame.kind is FrameKind.ENTRY else None
        if not isinstance(entry, AppendEntry):
            continue
        unreleased_batches: list[BatchEntry] = []
        payloads: list[bytes] = []
        for batch, data in split_payloads(entry, frame.payloads):
            if batch.offset + batch.rows > released_offsets.get(batch.shard, batch.offset + batch.rows):
                unreleased_batches.append(batch)
                payloads.append(bytes(data))
        if unreleased_batches:
            moved_entry = AppendEntry(
                entry.time_ms, tuple(unreleased_batches), entry.producer, entry.epoch, entry.sequence
            )
            encoded_frame = encode_frame(
                segment.number, new_segment.size_bytes, FrameKind.ENTRY, encode_meta(moved_entry), payloads
            )
            frame_place = FramePlace(new_segment.size_bytes, sum(map(len, encoded_frame)))
            index.add(moved_entry, frame_place)
            new_segment.size_bytes += frame_place.length
            parts += encoded_frame
    if end < segment.size_bytes:
        raise make_damage_error(files.describe(segment.name), end)
    files.remove([make_index_name(segment.number)])
    files.replace(segment.name, b"".join(parts))
    return new_segment
