"""The memory of a remote blob of which only some ranges have been read."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
"""A range of a blob: the offset in the blob, and the length in bytes."""


class SparseMemory:
    """The memory of a blob that contains only the ranges that have been read.

    All other bytes are zero and take no memory. A range is never written again, so a checksum has to be compared only
    once.
    """

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(self._map)
        self._filled_ranges: list[Range] = []
        """The start and the end of each range that has been read, ascending. Ranges neither overlap nor touch."""
        self.filled_bytes = 0
        """The number of bytes that have been read, plus a memory page for each range."""

    def list_missing(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the offsets and lengths of the parts of `ranges` that have not been read, ascending.

        Adjacent parts are joined.
        """
        gaps: list[Range] = []
        previous_end = 0
        for offset, length in sorted(ranges):
            for start, end in self._find_gaps(offset, offset + length):
                if gaps and start <= previous_end:
                    previous_end = max(previous_end, end)
                    gaps[-1] = gaps[-1][0], previous_end
                else:
                    previous_end = end
                    gaps.append((start, end))
        return [(start, end - start) for start, end in gaps]

    def fill(self, offset: int, data: bytes) -> None:
        """Store bytes that were read at `offset`. Bytes that are already stored stay unchanged."""
        # The list is complete before the loop changes the filled ranges.
        for start, end in list(self._find_gaps(offset, offset + len(data))):
            self.memory[start:end] = data[start - offset : end - offset]
            self._add_range(start, end)
            self.filled_bytes += end - start + mmap.PAGESIZE  # A part can begin and end within a page of memory.

    def _find_gaps(self, start: int, end: int) -> Iterator[Range]:
        """Yield the start and the end of each part between `start` and `end` that has not been read."""
        index = max(0, bisect_right(self._filled_ranges, (start, len(self.memory))) - 1)
        for filled_start, filled_end in self._filled_ranges[index:]:
            if filled_start >= end:
                break
            if filled_start > start:
                yield start, filled_start
            start = max(start, filled_end)
        if start < end:
            yield start, end

    def _add_range(self, start: int, end: int) -> None:
        """Record that the bytes from `start` to `end` have been read.

        They were a gap before, so they can touch the next and the previous range, and are joined with these.
        """
        index = bisect_right(self._filled_ranges, (start, end))
        if index < len(self._filled_ranges):
            next_start, next_end = self._filled_ranges[index]
            if next_start == end:
                del self._filled_ranges[index]
                end = next_end
        if index:
            previous_start, previous_end = self._filled_ranges[index - 1]
            if previous_end == start:
                del self._filled_ranges[index - 1]
                start = previous_start
        insort(self._filled_ranges, (start, end))
