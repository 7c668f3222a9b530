"""The memory of a blob of which only some ranges have been read."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator

Range = tuple[int, int]
"""(offset in the blob, length in bytes)."""


class SparseMemory:
    """A blob's memory, filled where somebody has read it: the rest is zeros, and takes no memory.

    What is there once is never written again: checksums are compared once.
    """

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(self._map)
        self._there: list[Range] = []
        """(start, end), ascending and apart."""
        self.filled_bytes = 0
        """Pages of memory are taken whole."""

    def missing(self, ranges: Iterable[Range]) -> list[Range]:
        """(offset, length) of what is to be read yet of these, neighbours together, ascending."""
        found: list[Range] = []
        for offset, length in sorted(ranges):
            for start, end in self._gaps(offset, offset + length):
                if found and start <= found[-1][1]:
                    found[-1] = found[-1][0], max(found[-1][1], end)
                else:
                    found.append((start, end))
        return [(start, end - start) for start, end in found]

    def fill(self, offset: int, data: bytes) -> None:
        for start, end in list(self._gaps(offset, offset + len(data))):
            self.memory[start:end] = data[start - offset : end - offset]
            self._add(start, end)
            self.filled_bytes += end - start + mmap.PAGESIZE

    def _gaps(self, start: int, end: int) -> Iterator[Range]:
        """(start, end) of what is not there between these two."""
        place = max(0, bisect_right(self._there, (start, len(self.memory))) - 1)
        for begun, ended in self._there[place:]:
            if begun >= end:
                break
            if begun > start:
                yield start, begun
            start = max(start, ended)
        if start < end:
            yield start, end

    def _add(self, start: int, end: int) -> None:
        """Of a gap; with its neighbours where they touch."""
        place = bisect_right(self._there, (start, end))
        if place < len(self._there) and self._there[place][0] == end:
            end = self._there.pop(place)[1]
        if place and self._there[place - 1][1] == start:
            start = self._there.pop(place - 1)[0]
        insort(self._there, (start, end))
