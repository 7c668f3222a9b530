"""Ranks: the position of each row's key among the distinct keys of a file, ascending.

If keys ascend, are in a small range, or are few, there are faster methods than sorting. The cheapest one is used. Keys
of more than 1,024 bytes are truncated to 1,025 bytes: a key of 1,025 bytes represents all keys with this prefix. Except
for these keys, order and distinctness are kept. The functions have no side effects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seamark.formats.index.kernels import _bitmap
from seamark.formats.index.keys.keys import Bytes, Codes, Keys, Longs

Ranks = npt.NDArray[np.uint32]

CLIPPED_BYTES = 1025
"""The length of a truncated key in bytes. Shorter keys are stored completely."""
ROWS_MAX = 1 << 28
"""The maximum number of rows of a data file with a bitmap index, which need 32 MiB of bits.

An index file states its own number of rows, and a run of any length takes only a few bytes. Therefore this limit bounds
the memory of a reader.
"""

_SPAN_PER_ROW_MAX = 4
_SPAN_MIN = 1 << 16
"""The maximum size of a table of all codes in a range: per row, and for few rows in total."""
_NUMBERING_TABLE_BITS = 15
"""The size of a numbering table as a power of two. 2^15 slots, for up to 2^14 distinct codes, fit into a core's cache.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """Distinct keys in ascending order.

    They are `codes`, or slices of `heap` that begin at `starts`, int64[n + 1].
    """

    codes: Codes | None
    starts: Longs | None = None
    heap: Bytes | None = None

    def __len__(self) -> int:
        if self.codes is not None:
            return len(self.codes)
        return 0 if self.starts is None else len(self.starts) - 1

    @property
    def clipped(self) -> bool:
        """Whether some keys are truncated values."""
        return self.starts is not None and bool((np.diff(self.starts) == CLIPPED_BYTES).any())


def rank_keys(keys: Keys) -> tuple[Distinct, Ranks]:
    """Return the distinct keys, and the rank of each row's key as uint32[rows].

    Rows that are null or NaN have the rank 0, which is also the rank of the lowest key. `keys.present` distinguishes
    them.

    Raises:
        ValueError: There are more rows than ranks can count.
    """
    if keys.rows > ROWS_MAX:
        raise ValueError(f"a data file of {keys.rows:,} rows has too many rows for a bitmap index")
    has_key = keys.present
    if keys.codes is not None:
        distinct, ranks = rank_codes(keys.codes if has_key is None else keys.codes[has_key])
    else:
        assert keys.starts is not None
        assert keys.heap is not None
        begins, ends = keys.starts[:-1], keys.starts[1:]
        if has_key is not None:
            begins, ends = begins[has_key], ends[has_key]
        distinct, ranks = rank_bytes(begins, ends, keys.heap)
    if has_key is None:
        return distinct, ranks
    ranks_of_rows = np.zeros(keys.rows, dtype=np.uint32)
    ranks_of_rows[has_key] = ranks
    return distinct, ranks_of_rows


def rank_codes(codes: Codes) -> tuple[Distinct, Ranks]:
    """Return the distinct codes, and the rank of each code, by the cheapest method.

    Ascending codes are ranked in one pass, and codes in a short range by a table of the range. Few distinct codes are
    numbered in the order in which they first appear, and only they are sorted. If there are too many, all are sorted.
    """
    codes = np.ascontiguousarray(codes)
    if not len(codes):
        return Distinct(codes), np.zeros(0, dtype=np.uint32)
    low, high, is_ascending = _bitmap.extent(codes)
    if is_ascending:
        distinct_codes, ranks = _bitmap.rank_ascending(codes)
    elif high - low < _SPAN_PER_ROW_MAX * len(codes) or high - low < _SPAN_MIN:
        distinct_codes, ranks = _bitmap.rank_span(codes, low, high - low)
    else:
        codes_and_numbers = _bitmap.number_codes(codes, _NUMBERING_TABLE_BITS)
        if codes_and_numbers is None:
            distinct_codes, ranks = _bitmap.rank_sorting(codes, low, high - low)
        else:
            numbered_codes, numbers = codes_and_numbers
            order = np.argsort(numbered_codes)
            distinct_codes, ranks = numbered_codes[order], _to_ranks(order, numbers)
    return Distinct(distinct_codes), ranks


def rank_bytes(begins: Longs, ends: Longs, heap: Bytes) -> tuple[Distinct, Ranks]:
    """Return the distinct keys, truncated to CLIPPED_BYTES, and the rank of each key.

    Keys are first numbered in the order in which they first appear, so that only distinct keys are sorted.

    Args:
        begins: The position of each key in `heap`.
        ends: The position after each key.
        heap: The bytes of the keys.
    """
    begins = np.ascontiguousarray(begins)
    ends = np.minimum(ends, begins + CLIPPED_BYTES)
    firsts, numbers = _bitmap.number_bytes(begins, ends, heap)
    begins, ends = begins[firsts], ends[firsts]
    order = _bitmap.order_bytes(begins, ends, heap)
    starts, joined_bytes = _bitmap.gather_bytes(begins[order], ends[order], heap)
    return Distinct(None, starts, joined_bytes), _to_ranks(order, numbers)


def _to_ranks(order: npt.NDArray[np.integer], numbers: Ranks) -> Ranks:
    """Replace the number of each row's key by the rank of the key.

    The distinct keys are numbered in the order of their first appearance. The rank is the position in sorted order.

    Args:
        order: The numbers of the distinct keys, in the order of their ranks.
        numbers: The number of each row's key.
    """
    ranks_by_number = np.empty(len(order), dtype=np.uint32)
    ranks_by_number[order] = np.arange(len(order), dtype=np.uint32)
    return ranks_by_number[numbers]
