"""Decides which fresh files of a shard to write next, and which to remove. The module does no I/O.

A part is a range of offsets, with the fresh files that contain exactly its rows. The parts of a shard follow each other
without a gap. A new part replaces small parts before it, as in a log-structured merge, so a plan contains few files,
and each row is written only a few times. No part crosses the end of a running flush, because after the flush, its first
rows would be both in the part and in the table's files.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from seamark.metaserver.streams.row_files import EncodedFile, KeyedRows, RowKey

MERGED_ROWS_MAX = 50_000
"""The maximum number of rows of a part that replaces earlier parts. A reader waits while the part is written."""
_PARTS_MIN = 16
"""A part that replaces earlier parts may have all waiting rows divided by this number, if this exceeds
`MERGED_ROWS_MAX`."""
_MERGE_RATIO = 2
"""A new part replaces the part before it if the earlier part has at most this multiple of the new part's rows."""


class FreshPart(msgspec.Struct, frozen=True):
    """The fresh files with the rows of a shard from `start` to `end` (exclusive).

    Fresh files contain rows that no commit has added to the table yet. Plans refer to them, so that queries see these
    rows.

    Attributes:
        files: The files, without their data.
        key: The key by which the rows replace stored rows. All parts of a table have the same key.
        keyed: The keys of the rows of a table with a key, otherwise None. The files of such a table contain only the
            latest row of each key.
    """

    shard: int
    start: int
    end: int
    files: tuple[EncodedFile, ...]
    key: RowKey = ()
    keyed: KeyedRows = None


class OffsetRange(msgspec.Struct, frozen=True):
    """The offsets of the rows of a part to write, from `start` to `end` (exclusive)."""

    start: int
    end: int


class FreshParts:
    """The parts of one shard, in ascending order."""

    def __init__(self) -> None:
        self.parts: tuple[FreshPart, ...] = ()

    def get_covered_offset(self, flushed_offset: int) -> int:
        """Return the offset after the last row of the parts, or `flushed_offset` if there are no parts.

        Rows below the result are in fresh files or in the table's files.
        """
        return self.parts[-1].end if self.parts else flushed_offset

    def drop_flushed(self, flushed_offset: int) -> list[FreshPart]:
        """Remove and return the parts with rows before `flushed_offset`, because these rows are in the table's files.

        A part that crosses the offset is also removed. The parts after it stay only if they follow `flushed_offset`
        without a gap.
        """
        remaining = tuple(part for part in self.parts if part.start >= flushed_offset)
        if remaining and remaining[0].start != flushed_offset:
            remaining = ()
        dropped_parts = [part for part in self.parts if part not in remaining]
        self.parts = remaining
        return dropped_parts

    def choose_ranges(self, flushed_offset: int, end: int, cut_offset: int | None) -> list[OffsetRange]:
        """Return the ranges of the parts to write, in ascending order, so that the parts reach `end`.

        A range may extend to the existing small parts before it, which the new part then replaces. No part crosses
        `cut_offset`, so that the end of the flush does not remove a part with later rows.

        Args:
            flushed_offset: The flushed offset of the shard.
            end: The offset that the parts must reach.
            cut_offset: The offset at which the running flush ends, or None if no flush is running.
        """
        covered_end = self.get_covered_offset(flushed_offset)
        if covered_end >= end:
            return []
        if cut_offset is not None and covered_end < cut_offset < end:
            return [self._merge(OffsetRange(covered_end, cut_offset), None), OffsetRange(cut_offset, end)]
        return [self._merge(OffsetRange(covered_end, end), cut_offset)]

    def _merge(self, new_range: OffsetRange, cut_offset: int | None) -> OffsetRange:
        """Extend a range to include the small parts before it.

        A part is included if it is not much larger than the range after it, so that each row is rewritten only a few
        times. The merged range has at most `rows_max` rows, because readers wait while it is written. With many waiting
        rows, this limit is their number divided by `_PARTS_MIN`.

        Args:
            new_range: The range of offsets of a part to write.
            cut_offset: The offset at which the running flush ends, or None. The range does not cross it, so that the
                end of the flush does not remove a part with later rows.
        """
        start = new_range.start
        first = self.parts[0].start if self.parts else start
        rows_max = max(MERGED_ROWS_MAX, (new_range.end - first) // _PARTS_MIN)
        for part in reversed(self.parts):
            rows = new_range.end - start
            if part.end - part.start > _MERGE_RATIO * rows or new_range.end - part.start > rows_max:
                break
            if cut_offset is not None and part.start < cut_offset <= start:
                break
            start = part.start
        return OffsetRange(start, new_range.end)

    def clear(self) -> list[FreshPart]:
        """Remove and return all parts."""
        dropped_parts, self.parts = list(self.parts), ()
        return dropped_parts

    def is_next(self, start: int, flushed_offset: int) -> bool:
        """Return whether a part that begins at `start` follows the last part, or `flushed_offset`, without a gap.

        This may be false for a part that was being written while another process flushed rows before it.
        """
        covered_end = max((part.end for part in self.parts if part.end <= start), default=flushed_offset)
        return covered_end == start

    def replace(self, written_parts: Sequence[FreshPart]) -> list[FreshPart]:
        """Add written parts, and return the parts that they replace.

        All parts that end after the beginning of the first written part are replaced.
        """
        first = written_parts[0].start
        earlier = tuple(part for part in self.parts if part.end <= first)
        replaced_parts = [part for part in self.parts if part.end > first]
        self.parts = (*earlier, *written_parts)
        return replaced_parts

    def check_invariants(self) -> None:
        """Check that the parts follow each other without a gap. Only tests call this method."""
        for earlier, later in zip(self.parts, self.parts[1:], strict=False):
            assert earlier.end == later.start, (earlier, later)
        assert all(part.start < part.end for part in self.parts)
        for part in self.parts:
            rows = sum(file.rows for file in part.files)
            assert rows == part.end - part.start or (part.keyed is not None and rows < part.end - part.start)
