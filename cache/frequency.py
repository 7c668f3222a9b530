"""How often keys were requested lately, estimated in a few bytes for each key: a count-min sketch with a doorkeeper.

Four rows of counters from 0 to 15; the estimate is the least of a key's four counters, so that it is never below the
true count since the last ageing, up to 16. The doorkeeper, a Bloom filter, takes the first request of each key, so that
keys that are requested once use no counters. After ten requests for each expected key all counters are halved and the
doorkeeper is cleared: old popularity fades. Source: Einziger, Friedman, Manes, "TinyLFU: a highly efficient cache
admission policy", 2017.
"""

from __future__ import annotations

from collections.abc import Hashable

COUNT_MAX = 15
_SAMPLE = 10
_MASK64 = (1 << 64) - 1
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd constants of known mixing functions: each row of counters has its own position for a key."""
_HALVED = bytes(count // 2 for count in range(256))


class FrequencySketch:
    """`keys_expected` is the number of keys whose frequencies matter, such as the entries of a cache.

    It has 5 to 10 bytes for each. Belongs to one thread.
    """

    def __init__(self, keys_expected: int) -> None:
        """ValueError for less than one key."""
        if keys_expected < 1:
            raise ValueError(f"keys_expected is {keys_expected}; it must be 1 or more")
        bits = max(4, (keys_expected - 1).bit_length())
        self._shift = 64 - bits
        self._rows = tuple(bytearray(1 << bits) for _ in _FACTORS)
        self._doorkeeper = bytearray(1 << bits)
        """Eight bits for each key; two are set for each key."""
        self._sample = _SAMPLE * keys_expected
        self._counted = 0

    def count(self, key: Hashable) -> None:
        slots = self._slots(key)
        self._counted += 1
        if self._counted >= self._sample:
            self._age()
        if not self._enter(slots):
            return
        rows = self._rows
        minimum = min(row[slot] for row, slot in zip(rows, slots, strict=True))
        if minimum < COUNT_MAX:
            # Only the lowest counters: a counter that is shared with a frequent key stays that key's.
            for row, slot in zip(rows, slots, strict=True):
                if row[slot] == minimum:
                    row[slot] = minimum + 1

    def estimate(self, key: Hashable) -> int:
        """0 for a key that was not counted lately; at most 16."""
        slots = self._slots(key)
        count = min(row[slot] for row, slot in zip(self._rows, slots, strict=True))
        return count + self._is_inside(slots)

    def _slots(self, key: Hashable) -> tuple[int, int, int, int]:
        value = hash(key) & _MASK64
        value ^= value >> 32
        shift = self._shift
        first, second, third, fourth = _FACTORS
        return (
            ((value * first) & _MASK64) >> shift,
            ((value * second) & _MASK64) >> shift,
            ((value * third) & _MASK64) >> shift,
            ((value * fourth) & _MASK64) >> shift,
        )

    def _enter(self, slots: tuple[int, int, int, int]) -> bool:
        """Return whether the doorkeeper had the key before."""
        had = self._is_inside(slots)
        for slot, bit in ((slots[0], slots[1] & 7), (slots[2], slots[3] & 7)):
            self._doorkeeper[slot] |= 1 << bit
        return had

    def _is_inside(self, slots: tuple[int, int, int, int]) -> bool:
        door = self._doorkeeper
        return bool(door[slots[0]] >> (slots[1] & 7) & 1 and door[slots[2]] >> (slots[3] & 7) & 1)

    def _age(self) -> None:
        for row in self._rows:
            row[:] = row.translate(_HALVED)
        self._doorkeeper[:] = bytes(len(self._doorkeeper))
        self._counted //= 2
