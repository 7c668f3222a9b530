"""A set of many keys of one type: the keys of a dynamic filter (`planner/joins/joins.py`).

The values of a predicate are looked up in an index key by key. A key set is used in the other direction: the distinct
keys of a file, or of all files together, are looked up in the set. So the cost depends on the index and not on the size
of the set. Codes in a small range are looked up in a table of bits. Byte keys are looked up by hash, so the results may
contain more than the matching keys. The functions have no side effects.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.types.values import INT_MAX, INT_MIN
from seamark.formats.index.kernels import _bitmap
from seamark.formats.index.keys.hashing import Hashes, hash_keys
from seamark.formats.index.keys.keys import CODE_MAX, Bytes, Codes, KeyRange, KeyRanges, Keys, has_codes
from seamark.formats.index.keys.ranks import CLIPPED_BYTES, Distinct

Words = npt.NDArray[np.uint64]

_SIGN, _BIAS = 1 << 63, 1 << 127
_WIDE_DECIMAL_BYTES = 16
"""The size of the key of a decimal with more than 18 digits, in bytes (`keys.py`)."""
_TABLE_BITS_MAX = 1 << 27
"""The maximum number of bits of a table of codes, which take 16 MiB."""
_HASH_BYTES, _OBJECT_BYTES = 8, 1000
"""The memory of a cached hash, and of the set's objects without its arrays."""
_TABLE_BITS_PER_KEY = 1 << 12
"""The maximum number of bits per key of a table of codes. Codes in a wider range are found by binary search."""


class KeySpan:
    """A set of keys that consists of all codes from `low` to `high`, inclusive."""

    def __init__(self, kind: str, low: int, high: int) -> None:
        self.kind = kind
        self.bit_table: tuple[Words | None, int, int] | None = (
            (None, low, high - low + 1) if high - low < CODE_MAX else None
        )
        """The table of bits (see `KeySet.bit_table`), whose bits are None, because all of them are set.

        The table is None if its number of bits does not fit into 64 bits.
        """
        self._low, self._high = np.uint64(low), np.uint64(high)

    def mark_keys(self, distinct: Distinct) -> Bytes:
        """Return 1 for each key that is in the span, otherwise 0, as uint8[n]. The n keys must be ascending."""
        assert distinct.codes is not None
        mask: Bytes = ((distinct.codes >= self._low) & (distinct.codes <= self._high)).view(np.uint8)
        return mask


WantedKeys: TypeAlias = "KeySet | KeySpan"


class KeySet:
    """A set of keys of type `kind`.

    Args:
        kind: The Iceberg type of the values.
        distinct: The keys, ascending.

    Raises:
        ValueError: A key is so long that it cannot be distinguished from others.
    """

    def __init__(self, kind: str, distinct: Distinct) -> None:
        if distinct.clipped:
            raise ValueError(f"keys of {CLIPPED_BYTES} bytes and more cannot be distinguished from each other")
        self.kind = kind
        self.distinct = distinct

    def __len__(self) -> int:
        return len(self.distinct)

    @property
    def size_bytes(self) -> int:
        """The memory of the set, including caches."""
        parts = (self.distinct.codes, self.distinct.starts, self.distinct.heap)
        has_table = self.distinct.codes is not None
        table_bytes = min(_TABLE_BITS_MAX, _TABLE_BITS_PER_KEY * len(self)) // 8 if has_table else 0
        keys_bytes = sum(part.nbytes for part in parts if part is not None)
        return keys_bytes + _HASH_BYTES * len(self) + table_bytes + _OBJECT_BYTES

    @cached_property
    def digest(self) -> str:
        """A digest of the type and the keys."""
        digest = hashlib.sha256(self.kind.encode())
        for part in (self.distinct.codes, self.distinct.starts, self.distinct.heap):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @cached_property
    def keys(self) -> Keys:
        distinct = self.distinct
        return Keys(self.kind, len(distinct), distinct.codes, distinct.starts, distinct.heap, None, None)

    @cached_property
    def extremes(self) -> KeyRanges:
        """The range from the lowest to the highest key. If the set is empty, there is no range."""
        if not len(self):
            return KeyRanges(self.kind, ())
        low, high = self.get_key(0), self.get_key(len(self) - 1)
        return KeyRanges(self.kind, (KeyRange(low, high),))

    def get_key(self, index: int) -> int | bytes:
        distinct = self.distinct
        if distinct.codes is not None:
            return int(distinct.codes[index])
        assert distinct.starts is not None
        assert distinct.heap is not None
        return distinct.heap[distinct.starts[index] : distinct.starts[index + 1]].tobytes()

    def convert_to_kind(self, kind: str) -> KeySet:
        """Convert the keys to another type. Values that the other type cannot represent are omitted.

        Both types must be integers, or decimals of the same scale.
        """
        if self.kind == kind:
            return self
        codes = self.distinct.codes
        # Both types are decimals with more than 18 digits, whose keys have the same form.
        if codes is None and not has_codes(kind):
            return KeySet(kind, self.distinct)
        if codes is not None and has_codes(kind):
            if kind == "int":
                codes = codes[(codes >= np.uint64(INT_MIN + _SIGN)) & (codes <= np.uint64(INT_MAX + _SIGN))]
            return KeySet(kind, Distinct(codes))
        if codes is not None:
            key_bytes = b"".join(_encode_wide(code - _SIGN) for code in codes.tolist())
            starts = np.arange(len(codes) + 1, dtype=np.int64) * _WIDE_DECIMAL_BYTES
            return KeySet(kind, Distinct(None, starts, np.frombuffer(key_bytes, dtype=np.uint8)))
        unscaled_values = (_decode_wide(self.get_key(index)) for index in range(len(self)))
        new_codes = [value + _SIGN for value in unscaled_values if -_SIGN <= value < _SIGN]
        return KeySet(kind, Distinct(np.array(new_codes, dtype=np.uint64)))

    def mark_keys(self, distinct: Distinct) -> Bytes:
        """Return 1 for each key that is in the set, otherwise 0, as uint8[n]. The n keys must be ascending.

        Keys of bytes are compared by their hashes, so a key outside the set is also marked if a key in the set has the
        same hash.
        """
        if distinct.codes is not None:
            return self._mark_codes(distinct.codes)
        assert distinct.starts is not None
        assert distinct.heap is not None
        hashes = hash_keys(Keys(self.kind, len(distinct), None, distinct.starts, distinct.heap, None, None), 0)
        mask = _mark_members(self._hashes, hashes)
        # Truncated keys never match.
        mask[np.diff(distinct.starts) >= CLIPPED_BYTES] = 0
        return mask

    def _mark_codes(self, codes: Codes) -> Bytes:
        table = self.bit_table
        if table is not None:
            bits, low, span = table
            if bits is not None:
                return _bitmap.marks_of(codes, bits, low, span)
        assert self.distinct.codes is not None
        return _mark_members(self.distinct.codes, codes)

    @cached_property
    def bit_table(self) -> tuple[Words | None, int, int] | None:
        """The table of bits of a set of codes, or None if their range is too wide or the set is empty.

        It consists of a bit for each code from the lowest on, the lowest code, and the number of bits.
        """
        codes = self.distinct.codes
        if codes is None or not len(codes):
            return None
        low, high = int(codes[0]), int(codes[-1])
        span = min(high - low, CODE_MAX - 1) + 1  # Fits into 64 bits. Such a wide range gets no table anyway.
        if span > min(_TABLE_BITS_MAX, _TABLE_BITS_PER_KEY * len(codes)):
            return None
        return _bitmap.table_of(codes, low, span), low, span

    @cached_property
    def _hashes(self) -> Hashes:
        hashes: Hashes = np.sort(hash_keys(self.keys, 0))
        return hashes


def _mark_members(sorted_values: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64]) -> Bytes:
    """Return 1 for each value that is in `sorted_values`, otherwise 0, as uint8[n]."""
    if not len(sorted_values):
        return np.zeros(len(values), dtype=np.uint8)
    positions = np.minimum(np.searchsorted(sorted_values, values), len(sorted_values) - 1)
    mask: Bytes = (sorted_values[positions] == values).view(np.uint8)
    return mask


def _encode_wide(unscaled_value: int) -> bytes:
    """Return the key of a decimal with more than 18 digits. The bias of 2^127 keeps the order of values in bytes."""
    return (unscaled_value + _BIAS).to_bytes(_WIDE_DECIMAL_BYTES, "big")


def _decode_wide(key: int | bytes) -> int:
    """Return the unscaled value of the key of a decimal with more than 18 digits."""
    assert isinstance(key, bytes)
    return int.from_bytes(key, "big") - _BIAS
