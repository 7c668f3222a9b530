"""Recent request frequencies of keys, estimated in a few bytes per key: a count-min sketch and a Bloom filter.

The sketch has four rows of counters from 0 to 15. The estimate is the lowest of a key's four counters. So it is never
less than the true count since the last ageing, up to 16. A Bloom filter (the paper's doorkeeper) records the first
request of each key, so that keys that are requested once use no counters. After ten requests per expected key, all
counters are halved and the Bloom filter is cleared, so that old requests lose their weight. Source: Einziger, Friedman,
Manes, "TinyLFU: a highly efficient cache admission policy", 2017.
"""

from __future__ import annotations

from collections.abc import Hashable

COUNT_MAX = 15
_REQUESTS_PER_KEY = 10
"""The number of requests per expected key after which all counts are halved."""
_MASK64 = (1 << 64) - 1
_HASH_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
"""Odd constants of known mixing functions, which give a key a different position in each row of counters."""
_HALVED_COUNTS = bytes(count // 2 for count in range(256))


class FrequencySketch:
    """An estimator of how often keys were requested recently. It belongs to one thread.

    The sketch uses 5 to 10 bytes for each of `keys_expected`, the number of keys whose frequencies matter, such as the
    entries of a cache.
    """

    def __init__(self, keys_expected: int) -> None:
        """Create a sketch without counts.

        Raises:
            ValueError: `keys_expected` is less than 1.
        """
        if keys_expected < 1:
            raise ValueError(f"keys_expected is {keys_expected}; it must be 1 or more")
        # The number of counters in a row is a power of two, so that the highest bits of a hash are a position in it.
        bits = max(4, (keys_expected - 1).bit_length())
        self._shift = 64 - bits
        self._rows = tuple(bytearray(1 << bits) for _ in _HASH_FACTORS)
        self._seen_keys = bytearray(1 << bits)
        """A Bloom filter of keys that were requested at least once. It has eight bits for each expected key."""
        self._requests_per_ageing = _REQUESTS_PER_KEY * keys_expected
        self._count_total = 0

    def count(self, key: Hashable) -> None:
        """Count a request of a key.

        The first request is only noted in the Bloom filter, and later requests increase the counters. After a fixed
        number of requests of all keys, all counters are halved, so that old requests count less.
        """
        slots = self._find_slots(key)
        self._count_total += 1
        if self._count_total >= self._requests_per_ageing:
            self._halve_counts()
        if not self._add_to_seen_keys(slots):
            return
        rows = self._rows
        minimum = min(row[slot] for row, slot in zip(rows, slots, strict=True))
        if minimum < COUNT_MAX:
            # Increase only the lowest counters, because the other counters also count keys that are more frequent.
            for row, slot in zip(rows, slots, strict=True):
                if row[slot] == minimum:
                    row[slot] = minimum + 1

    def estimate(self, key: Hashable) -> int:
        """Return the estimated number of recent requests, from 0 to 16."""
        slots = self._find_slots(key)
        count = min(row[slot] for row, slot in zip(self._rows, slots, strict=True))
        return count + self._is_inside(slots)

    def _find_slots(self, key: Hashable) -> tuple[int, int, int, int]:
        value = hash(key) & _MASK64
        value ^= value >> 32
        shift = self._shift
        first, second, third, fourth = _HASH_FACTORS
        return (
            ((value * first) & _MASK64) >> shift,
            ((value * second) & _MASK64) >> shift,
            ((value * third) & _MASK64) >> shift,
            ((value * fourth) & _MASK64) >> shift,
        )

    def _add_to_seen_keys(self, slots: tuple[int, int, int, int]) -> bool:
        """Add a key to the Bloom filter of keys that were requested once, and return whether it was already in it."""
        was_inside = self._is_inside(slots)
        # Slots of two rows choose bytes of the filter. The lowest three bits of the other slots choose their bits.
        for slot, bit in ((slots[0], slots[1] & 7), (slots[2], slots[3] & 7)):
            self._seen_keys[slot] |= 1 << bit
        return was_inside

    def _is_inside(self, slots: tuple[int, int, int, int]) -> bool:
        seen_keys = self._seen_keys
        return bool(seen_keys[slots[0]] >> (slots[1] & 7) & 1 and seen_keys[slots[2]] >> (slots[3] & 7) & 1)

    def _halve_counts(self) -> None:
        for row in self._rows:
            row[:] = row.translate(_HALVED_COUNTS)
        self._seen_keys[:] = bytes(len(self._seen_keys))
        self._count_total //= 2
