"""The distinct keys of a file in ascending order, and the ranges of a predicate as intervals of ranks.

A key's rank is its position in the dictionary. A range of keys is an interval of ranks, which two searches in the
packed dictionary find (`_ordered.pyx`). This module has no side effects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _ordered
from seamark.formats.index.keys.keys import CODE_MAX, Bytes, Codes, KeyRanges, has_codes
from seamark.formats.index.keys.ranks import CLIPPED_BYTES, Distinct

RankArray = npt.NDArray[np.uint64]

CODES, BYTES = 0, 1
"""The forms of keys."""


class Intervals(NamedTuple):
    """Intervals [begin, end) of ranks, each as uint64[n]. They are ascending, disjoint, not adjacent, and not empty."""

    begins: RankArray
    ends: RankArray


class Bounds:
    """The bounds of a predicate's ranges, as keys that are searched in a dictionary.

    Raises:
        ValueError: The keys of the ranges do not have the form of the index.
    """

    def __init__(self, ranges: KeyRanges, form: int) -> None:
        if has_codes(ranges.kind) != (form == CODES):
            raise ValueError(
                f"the index has keys of the form {('codes', 'bytes')[form]}, so keys of type {ranges.kind} cannot be "
                "looked up in it"
            )
        self.form = form
        self.exact = True
        """Whether all bounds can be distinguished from other keys. A long bound cannot."""
        if form == CODES:
            self._read_codes(ranges)
        else:
            self._read_bytes(ranges)

    def _read_codes(self, ranges: KeyRanges) -> None:
        """Read the bounds of ranges whose keys are codes. Empty ranges are left out."""
        lows, highs = [], []
        for key_range in ranges.ranges:
            low = 0 if key_range.low is None else int(key_range.low) + key_range.low_open
            high = CODE_MAX if key_range.high is None else int(key_range.high) - key_range.high_open
            if low <= high:
                lows.append(low)
                highs.append(high)
        self.count = len(lows)
        self.lows: Codes = np.array(lows, dtype=np.uint64)
        self.highs: Codes = np.array(highs, dtype=np.uint64)

    def _read_bytes(self, ranges: KeyRanges) -> None:
        """Read the bounds of ranges whose keys are bytes.

        Bounds are truncated to CLIPPED_BYTES, like the keys of an index. Keys that differ only after this length are
        then equal. So a truncated bound is inclusive, and the ranges are no longer exact.
        """
        self.low_bytes: list[bytes] = []
        self.high_bytes: list[bytes] = []
        excludes_low, includes_high = [], []
        for key_range in ranges.ranges:
            low, high = key_range.low or b"", key_range.high
            assert isinstance(low, bytes)
            if isinstance(high, bytes):
                if low > high:
                    continue
                self.high_bytes.append(high[:CLIPPED_BYTES])
                includes_high.append(not key_range.high_open or len(high) >= CLIPPED_BYTES)
                self.exact &= len(high) < CLIPPED_BYTES
            self.low_bytes.append(low[:CLIPPED_BYTES])
            excludes_low.append(key_range.low is not None and key_range.low_open and len(low) < CLIPPED_BYTES)
            self.exact &= len(low) < CLIPPED_BYTES
        self.count = len(self.low_bytes)
        self._excludes_low: Bytes = np.array(excludes_low, dtype=np.uint8)
        self._includes_high: Bytes = np.array(includes_high, dtype=np.uint8)

    def list_edges(self, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the lowest and the greatest key of each range, inclusive.

        Keys of bytes are truncated or padded with zeros to `width` bytes.
        """
        if self.form == CODES:
            return self.lows, self.highs
        lows = [low[:width] for low in self.low_bytes]
        highs = [high[:width] for high in self.high_bytes]
        highs += [b"\xff" * width] * (self.count - len(highs))  # The last range can have no upper bound.
        return np.array(lows, dtype=f"S{width}"), np.array(highs, dtype=f"S{width}")

    def find_intervals(self, dictionary: _ordered.Numbers | _ordered.Strings) -> Intervals:
        """Return the intervals of the ranks of all keys of the dictionary that are in one of the ranges.

        Raises:
            ValueError: The dictionary is damaged.
        """
        if isinstance(dictionary, _ordered.Numbers):
            begins, ends = dictionary.below(self.lows, False), dictionary.below(self.highs, True)
        else:
            begins = dictionary.below(self.low_bytes, self._excludes_low)
            ends = np.full(self.count, dictionary.count, dtype=np.uint64)  # The last range can have no upper bound.
            ends[: len(self.high_bytes)] = dictionary.below(self.high_bytes, self._includes_high)
        if len(begins) > 1:
            return _join_intervals(begins, ends)
        return Intervals(begins, ends) if len(begins) and begins[0] < ends[0] else _NO_INTERVALS


_NO_INTERVALS = Intervals(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64))


def _join_intervals(begins: RankArray, ends: RankArray) -> Intervals:
    """Remove empty intervals, and join intervals that touch or overlap. Intervals of truncated keys can overlap."""
    is_non_empty = begins < ends
    begins, ends = begins[is_non_empty], ends[is_non_empty]
    if len(begins) < 2:
        return Intervals(begins, ends)
    is_apart = begins[1:] > ends[:-1]
    return Intervals(begins[np.r_[True, is_apart]], ends[np.r_[is_apart, True]])


def pack_dictionary(distinct: Distinct) -> Bytes:
    """Encode the distinct keys of a file."""
    if distinct.codes is not None:
        return _ordered.pack_numbers(distinct.codes)
    assert distinct.starts is not None
    assert distinct.heap is not None
    return _ordered.pack_strings(distinct.starts, distinct.heap)


def open_dictionary(data: bytes | memoryview, count: int, form: int) -> _ordered.Numbers | _ordered.Strings:
    """Open a dictionary of `count` keys without copying it, if its bytes are aligned.

    Args:
        data: The bytes of the dictionary.
        count: The number of keys.
        form: The form of the keys: CODES (64-bit numbers) or BYTES.

    Raises:
        ValueError: The bytes are damaged.
    """
    memory = align_bytes(data)
    return _ordered.Numbers(memory, count) if form == CODES else _ordered.Strings(memory, count)


def align_bytes(data: bytes | memoryview) -> Bytes:
    """Return the bytes without copying them if they are aligned to 8 bytes, otherwise a copy.

    Kernels read 64-bit numbers in place, which requires aligned bytes.
    """
    memory = np.frombuffer(data, dtype=np.uint8)
    return memory if memory.ctypes.data % 8 == 0 else memory.copy()


def read_distinct(dictionary: _ordered.Numbers | _ordered.Strings) -> Distinct:
    """Return all keys of a dictionary."""
    if isinstance(dictionary, _ordered.Numbers):
        return Distinct(dictionary.all())
    return Distinct(None, *dictionary.all())
