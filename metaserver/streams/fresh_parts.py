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

    def get_covered_offset(self, flushed: int) -> int:
        """Return the offset after the last row of the parts, or `flushed` if there are no parts."""
        return self.parts[-1].end if self.parts else flushed

    def drop_flushed(self, flushed: int) -> list[FreshPart]:
        """Remove and return the parts with rows before `flushed`, because these rows are in the table's files.

        A part that crosses the offset is also removed. The parts after it stay only if they follow `flushed` without a
        gap.
        """
        remaining = tuple(part for part in self.parts if part.start >= flushed)
        if remaining and remaining[0].start != flushed:
            remaining = ()
        dropped = [part for part in self.parts if part not in remaining]
        self.parts = remaining
        return dropped

    def choose_ranges(self, flushed: int, end: int, cut: int | None) -> list[OffsetRange]:
        """Return the ranges of the parts to write, in ascending order, so that the parts reach `end`.

        Args:
            flushed: The flushed offset of the shard.
            end: The offset that the parts must reach.
            cut: The end of the running flush, or None.
        """
        covered = self.get_covered_offset(flushed)
        if covered >= end:
            return []
        if cut is not None and covered < cut < end:
            return [self._merge(OffsetRange(covered, cut), None), OffsetRange(cut, end)]
        return [self._merge(OffsetRange(covered, end), cut)]

    def _merge(self, added: OffsetRange, cut: int | None) -> OffsetRange:
        """Extend a range to include the small parts before it."""
        start = added.start
        first = self.parts[0].start if self.parts else start
        rows_max = max(MERGED_ROWS_MAX, (added.end - first) // _PARTS_MIN)
        for part in reversed(self.parts):
            rows = added.end - start
            if part.end - part.start > _MERGE_RATIO * rows or added.end - part.start > rows_max:
                break
            if cut is not None and part.start < cut <= start:
                break
            start = part.start
        return OffsetRange(start, added.end)

    def clear(self) -> list[FreshPart]:
        """Remove and return all parts."""
        dropped, self.parts = list(self.parts), ()
        return dropped

    def is_next(self, start: int, flushed: int) -> bool:
        """Return whether a part that begins at `start` follows the last part, or `flushed`, without a gap.

        This may be false for a part that was being written while another process flushed rows before it.
        """
        covered_end = max((part.end for part in self.parts if part.end <= start), default=flushed)
        return covered_end == start

    def replace(self, written: Sequence[FreshPart]) -> list[FreshPart]:
        """Add written parts, and return the parts that they replace."""
        first = written[0].start
        earlier = tuple(part for part in self.parts if part.end <= first)
        replaced = [part for part in self.parts if part.end > first]
        self.parts = (*earlier, *written)
        return replaced

    def check_invariants(self) -> None:
        """Check that the parts follow each other without a gap. Only tests call this method."""
        for before, after in zip(self.parts, self.parts[1:], strict=False):
            assert before.end == after.start, (before, after)
        assert all(part.start < part.end for part in self.parts)
        for part in self.parts:
            rows = sum(file.rows for file in part.files)
            assert rows == part.end - part.start or (part.keyed is not None and rows < part.end - part.start)
