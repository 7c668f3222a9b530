"""The memory tier: values under hashable keys, within a budget of bytes, the least recently used leaving first.

The rule it keeps: `used_bytes` is the sum of the sizes its callers declared and is never above the budget, at no
instant: room is made before an entry is taken in. A value larger than the whole budget is not taken, and displaces
nothing. Sizes come from the caller because only it knows what a decoded object weighs.

Single-threaded by design, like the event loop that owns it: no method awaits, so none is ever seen half done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_OVERHEAD_BYTES = 200
"""Added to each declared size: two dict slots, a list node, a tuple and a key of ordinary length in CPython 3.11."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, and what is held now. `refused` counts values larger than the budget."""

    hits: int
    misses: int
    evictions: int
    refused: int
    entries: int
    used_bytes: int
    budget_bytes: int


class MemoryCache(Generic[K, V]):
    """An LRU within `budget_bytes`; 0 keeps nothing. ValueError for a negative budget or size."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}; it cannot be negative")
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._used_bytes = 0
        self._hits = self._misses = self._evictions = self._refused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        """Neither counts as a use nor as a hit."""
        return key in self._entries

    @property
    def used_bytes(self) -> int:
        """As in `stats`, for who asks often."""
        return self._used_bytes

    def get(self, key: K) -> V | None:
        """The value, which is the most recently used from now on; None when it is not held."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> bool:
        """Whether it was taken in. Replaces what was under the key, also when the new value is refused."""
        if size_bytes < 0:
            raise ValueError(f"size_bytes is {size_bytes}; it cannot be negative")
        self.discard(key)
        charged = size_bytes + ENTRY_OVERHEAD_BYTES
        if charged > self._budget_bytes:
            self._refused += 1
            return False
        while self._used_bytes + charged > self._budget_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._used_bytes -= freed
            self._evictions += 1
        self._entries[key] = (value, charged)
        self._used_bytes += charged
        return True

    def discard(self, key: K) -> None:
        """Forgets the key; that it was not held is no error."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry[1]

    def clear(self) -> None:
        """Forgets every entry; the counts stay."""
        self._entries.clear()
        self._used_bytes = 0

    def stats(self) -> CacheStats:
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refused=self._refused,
            entries=len(self._entries),
            used_bytes=self._used_bytes,
            budget_bytes=self._budget_bytes,
        )

    def check_invariants(self) -> None:
        """AssertionError when the account does not add up. Linear; for tests."""
        charged = [size for _, size in self._entries.values()]
        assert self._used_bytes == sum(charged), f"{self._used_bytes} bytes on the account, {sum(charged)} held"
        assert self._used_bytes <= self._budget_bytes, f"{self._used_bytes} bytes over a budget of {self._budget_bytes}"
        assert all(size >= ENTRY_OVERHEAD_BYTES for size in charged), "an entry was charged less than its overhead"
