"""Many keys of one type, each once: what a join demands of a column (`planner/joins/joins.py`).

Lists of a predicate are searched key by key. Here it is the other way round: the distinct keys of a file, or of all
files together, are looked up among the wanted ones, so that what it costs goes by what an index holds, and a hundred
thousand wanted keys cost as much as ten. Codes that lie close together are looked up in a table of bits; keys of bytes
by their hash, so that of those answers are supersets. Pure.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from metaserver.iceberg.types.values import INT_MAX, INT_MIN
from metaserver.index.kernels import _bitmap
from metaserver.index.keys.hashing import Hashes, hash_keys
from metaserver.index.keys.keys import CODE_MAX, Bytes, Codes, KeyRange, KeyRanges, Keys, has_codes
from metaserver.index.keys.ranks import CLIPPED_BYTES, Distinct

Places = npt.NDArray[np.uint64]

_SIGN, _BIAS = 1 << 63, 1 << 127
_WIDE_DECIMAL = 16
"""Bytes of a decimal of many digits (`keys.py`)."""
_SPAN_MAX = 1 << 27
"""Bits of a table of codes: 16 MiB,"""
_SPAN_A_KEY = 1 << 12
"""or so many for each key; codes that are further apart are searched."""


class KeySpan:
    """All codes from one to another, both included."""

    def __init__(self, kind: str, low: int, high: int) -> None:
        self.kind = kind
        self.table: tuple[Places | None, int, int] | None = (
            (None, low, high - low + 1) if high - low < CODE_MAX else None
        )
        """As of `KeySet`."""
        self._low, self._high = np.uint64(low), np.uint64(high)

    def marks(self, distinct: Distinct) -> Bytes:
        """As of `KeySet`."""
        assert distinct.codes is not None
        found: Bytes = ((distinct.codes >= self._low) & (distinct.codes <= self._high)).view(np.uint8)
        return found


WantedKeys: TypeAlias = "KeySet | KeySpan"


class KeySet:
    """`distinct` are its keys in order, of type `kind`. ValueError where one is too long to be told from others."""

    def __init__(self, kind: str, distinct: Distinct) -> None:
        if distinct.clipped:
            raise ValueError(f"keys of {CLIPPED_BYTES} bytes and more are not told apart")
        self.kind = kind
        self.distinct = distinct

    def __len__(self) -> int:
        return len(self.distinct)

    @property
    def size_bytes(self) -> int:
        """With all that it may come to remember."""
        parts = (self.distinct.codes, self.distinct.starts, self.distinct.heap)
        table = min(_SPAN_MAX, _SPAN_A_KEY * len(self)) // 8 if self.distinct.codes is not None else 0
        return sum(part.nbytes for part in parts if part is not None) + 8 * len(self) + table + 1000

    @cached_property
    def digest(self) -> str:
        """Of its type and its keys."""
        told = hashlib.sha256(self.kind.encode())
        for part in (self.distinct.codes, self.distinct.starts, self.distinct.heap):
            if part is not None:
                told.update(np.ascontiguousarray(part).data)
        return told.hexdigest()

    @cached_property
    def keys(self) -> Keys:
        """As a column."""
        one = self.distinct
        return Keys(self.kind, len(one), one.codes, one.starts, one.heap, None, None)

    @cached_property
    def extremes(self) -> KeyRanges:
        """All keys from its least to its most; of an empty set none."""
        if not len(self):
            return KeyRanges(self.kind, ())
        low, high = self.at(0), self.at(len(self) - 1)
        return KeyRanges(self.kind, (KeyRange(low, high),))

    def at(self, place: int) -> int | bytes:
        one = self.distinct
        if one.codes is not None:
            return int(one.codes[place])
        assert one.starts is not None
        assert one.heap is not None
        return one.heap[one.starts[place] : one.starts[place + 1]].tobytes()

    def of_kind(self, kind: str) -> KeySet:
        """The same values as keys of another type, both integers or decimals of one scale; those that it has."""
        if self.kind == kind:
            return self
        codes = self.distinct.codes
        if codes is None and not has_codes(kind):  # decimals of many digits, all of one length
            return KeySet(kind, self.distinct)
        if codes is not None and has_codes(kind):
            if kind == "int":
                codes = codes[(codes >= np.uint64(INT_MIN + _SIGN)) & (codes <= np.uint64(INT_MAX + _SIGN))]
            return KeySet(kind, Distinct(codes))
        if codes is not None:
            spelled = b"".join(_wide(code - _SIGN) for code in codes.tolist())
            starts = np.arange(len(codes) + 1, dtype=np.int64) * _WIDE_DECIMAL
            return KeySet(kind, Distinct(None, starts, np.frombuffer(spelled, dtype=np.uint8)))
        numbers = (_narrow(self.at(place)) for place in range(len(self)))
        narrow = [number + _SIGN for number in numbers if -_SIGN <= number < _SIGN]
        return KeySet(kind, Distinct(np.array(narrow, dtype=np.uint64)))

    def marks(self, distinct: Distinct) -> Bytes:
        """uint8[n]: 1 where it holds this key, of n in ascending order."""
        if distinct.codes is not None:
            return self._coded(distinct.codes)
        assert distinct.starts is not None
        assert distinct.heap is not None
        hashes = hash_keys(Keys(self.kind, len(distinct), None, distinct.starts, distinct.heap, None, None), 0)
        found = _among(self._hashes, hashes)
        # What stands for longer values is none that is here.
        found[np.diff(distinct.starts) >= CLIPPED_BYTES] = 0
        return found

    def _coded(self, codes: Codes) -> Bytes:
        table = self.table
        if table is not None and table[0] is not None:
            return _bitmap.marks_of(codes, table[0], *table[1:])
        assert self.distinct.codes is not None
        return _among(self.distinct.codes, codes)

    @cached_property
    def table(self) -> tuple[Places | None, int, int] | None:
        """Of codes: (bits of all codes from the least on, that, how many); None where they are too far apart, or
        none."""
        codes = self.distinct.codes
        if codes is None or not len(codes):
            return None
        low, high = int(codes[0]), int(codes[-1])
        span = min(high - low, CODE_MAX - 1) + 1
        if span > min(_SPAN_MAX, _SPAN_A_KEY * len(codes)):
            return None
        return _bitmap.table_of(codes, low, span), low, span

    @cached_property
    def _hashes(self) -> Hashes:
        found: Hashes = np.sort(hash_keys(self.keys, 0))
        return found


def _among(ascending: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64]) -> Bytes:
    if not len(ascending):
        return np.zeros(len(values), dtype=np.uint8)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: Bytes = (ascending[at] == values).view(np.uint8)
    return found


def _wide(unscaled: int) -> bytes:
    return (unscaled + _BIAS).to_bytes(_WIDE_DECIMAL, "big")


def _narrow(key: int | bytes) -> int:
    assert isinstance(key, bytes)
    return int.from_bytes(key, "big") - _BIAS
