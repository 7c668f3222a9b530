"""Ranks: which distinct key of a file each row has, counted from the least.

Keys that ascend, lie close together or are few have cheaper ways than a sort, so the cheapest that fits is taken. Bytes
past 1 KiB are cut one byte later: a value of 1,025 bytes in a dictionary stands for all that begin with it, so order
and distinctness hold but for those. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from metaserver.index.kernels import _bitmap
from metaserver.index.keys.keys import Bytes, Codes, Keys, Longs

Ranks = npt.NDArray[np.uint32]

CLIPPED_BYTES = 1025
"""So long is what stands for longer values; all that are shorter are whole."""
ROWS_MAX = (1 << 32) - 2

_SPAN_A_ROW = 4
_SPAN_MIN = 1 << 16
"""A table of all codes between the least and the most may have so many entries, or so many a row."""
_NUMBERED_BITS = 15
"""A table of 2^15 slots, for up to 2^14 distinct codes, stays in a core's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """Keys in ascending order, each once: `codes`, or `starts` int64[n + 1] into `heap`."""

    codes: Codes | None
    starts: Longs | None = None
    heap: Bytes | None = None

    def __len__(self) -> int:
        if self.codes is not None:
            return len(self.codes)
        return 0 if self.starts is None else len(self.starts) - 1

    @property
    def clipped(self) -> bool:
        """Whether some stand for longer values."""
        return self.starts is not None and bool((np.diff(self.starts) == CLIPPED_BYTES).any())


def ranked(keys: Keys) -> tuple[Distinct, Ranks]:
    """The distinct keys and each row's rank among them, uint32[rows]; 0 where a row is null or NaN.

    Raises ValueError for more rows than a rank can count.
    """
    if keys.rows > ROWS_MAX:
        raise ValueError(f"a data file of {keys.rows:,} rows is too long for a bitmap index")
    present = keys.present
    if keys.codes is not None:
        distinct, ranks = ranked_codes(keys.codes if present is None else keys.codes[present])
    else:
        assert keys.starts is not None
        assert keys.heap is not None
        begins, ends = keys.starts[:-1], keys.starts[1:]
        if present is not None:
            begins, ends = begins[present], ends[present]
        distinct, ranks = ranked_bytes(begins, ends, keys.heap)
    if present is None:
        return distinct, ranks
    spread = np.zeros(keys.rows, dtype=np.uint32)
    spread[present] = ranks
    return distinct, spread


def ranked_codes(codes: Codes) -> tuple[Distinct, Ranks]:
    codes = np.ascontiguousarray(codes)
    if not len(codes):
        return Distinct(codes), np.zeros(0, dtype=np.uint32)
    low, high, ascending = _bitmap.extent(codes)
    if ascending:
        found, ranks = _bitmap.rank_ascending(codes)
    elif high - low < _SPAN_A_ROW * len(codes) or high - low < _SPAN_MIN:
        found, ranks = _bitmap.rank_span(codes, low, high - low)
    else:
        numbered = _bitmap.number_codes(codes, _NUMBERED_BITS)
        if numbered is None:
            found, ranks = _bitmap.rank_sorting(codes, low, high - low)
        else:
            order = np.argsort(numbered[0])
            found, ranks = numbered[0][order], _renumbered(order, numbered[1])
    return Distinct(found), ranks


def ranked_bytes(begins: Longs, ends: Longs, heap: Bytes) -> tuple[Distinct, Ranks]:
    begins = np.ascontiguousarray(begins)
    ends = np.minimum(ends, begins + CLIPPED_BYTES)
    firsts, numbers = _bitmap.number_bytes(begins, ends, heap)
    begins, ends = begins[firsts], ends[firsts]
    order = _bitmap.order_bytes(begins, ends, heap)
    starts, together = _bitmap.gather_bytes(begins[order], ends[order], heap)
    return Distinct(None, starts, together), _renumbered(order, numbers)


def _renumbered(order: npt.NDArray[np.integer], numbers: Ranks) -> Ranks:
    """From numbers to ranks, where `order` lists the numbers by rank."""
    rank = np.empty(len(order), dtype=np.uint32)
    rank[order] = np.arange(len(order), dtype=np.uint32)
    return rank[numbers]
