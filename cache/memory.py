"""The memory tier: an LRU cache of values by hashable keys, within a budget of bytes.

The rule: `used_bytes` is the sum of the sizes that callers declared, and never exceeds the budget, because space is
freed before an entry is added. A value that is larger than the whole budget is refused and evicts nothing. The caller
passes the size, because only the caller can measure a decoded object.

The cache is single-threaded, like the event loop that owns it. No method awaits, so that no caller sees an incomplete
operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Hashable, MutableMapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from seamark.cache.holders import Holders

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

ENTRY_OVERHEAD_BYTES = 200
"""The memory in bytes that is added to each size: two dict slots, a list node, a tuple and a typical key in CPython
3.11.
"""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The counts of a cache since the start, and its current contents.

    Attributes:
        hits: The number of gets that found a value.
        misses: The number of gets that found no value.
        evictions: The number of evicted values.
        refused: The number of values that were refused because they were larger than the budget, or than the share of a
            holder.
        entries: The current number of values.
        used_bytes: Their current size.
        budget_bytes: The maximum size.
    """

    hits: int
    misses: int
    evictions: int
    refused: int
    entries: int
    used_bytes: int
    budget_bytes: int


class BudgetedCache(ABC, Generic[K, V]):
    """The common part of the memory tiers: a budget, the sum of the used bytes, and counts.

    A subclass stores the entries.

    Args:
        budget_bytes: The maximum size. If it is 0, nothing is stored.
        entries: The dictionary in which the subclass stores the entries.
        name: The name under which `measure_named_caches` reports the used bytes. Several caches can have the same name.
            The name is empty if the owner reports its memory itself.

    Raises:
        ValueError: The budget is negative.
    """

    def __init__(self, budget_bytes: int, entries: MutableMapping[K, Any], name: str = "") -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}; it must be 0 or more")
        self._budget_bytes = budget_bytes
        self._entries = entries
        self._used_bytes = 0
        self._hits = self._misses = self._evictions = self._refusals = 0
        self.name = name
        if name:
            with _NAME_LOCK:
                _named_caches.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        """Return whether the key is in the cache. The call is neither a use nor a hit."""
        return key in self._entries

    @property
    def used_bytes(self) -> int:
        """The number of used bytes, without computing all of the stats."""
        return self._used_bytes

    @abstractmethod
    def discard(self, key: K) -> None:
        """Remove the key, if it is in the cache."""

    def _remove_and_compute_charge(self, key: K, size_bytes: int, limit_bytes: int) -> int | None:
        """Remove the old value of a key, and return the bytes to charge for its new value.

        If the charge exceeds the limit, count a refusal and return None.

        Raises:
            ValueError: The size is negative.
        """
        if size_bytes < 0:
            raise ValueError(f"size_bytes is {size_bytes}; it must be 0 or more")
        self.discard(key)
        charged_bytes = size_bytes + ENTRY_OVERHEAD_BYTES
        if charged_bytes > limit_bytes:
            self._refusals += 1
            return None
        return charged_bytes

    def read_stats(self) -> CacheStats:
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            refused=self._refusals,
            entries=len(self._entries),
            used_bytes=self._used_bytes,
            budget_bytes=self._budget_bytes,
        )

    def _check_used_bytes(self, entry_bytes: Collection[int]) -> None:
        """Check that the counted memory (`used_bytes`) is the sum of the entries and within the budget.

        Only tests call this.

        Args:
            entry_bytes: The charged size of each entry.

        Raises:
            AssertionError: The sum differs or exceeds the budget, or an entry was charged less than its overhead.
        """
        assert len(entry_bytes) == len(self._entries)
        assert self._used_bytes == sum(entry_bytes), (
            f"the cache counts {self._used_bytes} bytes, but the entries have {sum(entry_bytes)}"
        )
        assert self._used_bytes <= self._budget_bytes, (
            f"{self._used_bytes} used bytes exceed the budget of {self._budget_bytes}"
        )
        assert all(size >= ENTRY_OVERHEAD_BYTES for size in entry_bytes), "an entry was charged less than its overhead"


class MemoryCache(BudgetedCache[K, V]):
    """An LRU cache that stores at most `budget_bytes`."""

    _entries: OrderedDict[K, tuple[V, int]]

    def __init__(self, budget_bytes: int, name: str = "") -> None:
        super().__init__(budget_bytes, OrderedDict(), name)

    def get(self, key: K) -> V | None:
        """Return the value, or None if it is not in the cache. The value becomes the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        value, _ = entry
        return value

    def put(self, key: K, value: V, size_bytes: int) -> bool:
        """Store a value, and return whether it was stored.

        A value that is larger than the budget is refused. The key's previous value is removed in this case, too.

        Raises:
            ValueError: The size is negative.
        """
        charged_bytes = self._remove_and_compute_charge(key, size_bytes, self._budget_bytes)
        if charged_bytes is None:
            return False
        while self._used_bytes + charged_bytes > self._budget_bytes:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self._used_bytes -= freed_bytes
            self._evictions += 1
        self._entries[key] = (value, charged_bytes)
        self._used_bytes += charged_bytes
        return True

    def discard(self, key: K) -> None:
        """Remove the key, if it is in the cache."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            _, charged_bytes = entry
            self._used_bytes -= charged_bytes

    def clear(self) -> None:
        """Remove all entries, and keep the counts."""
        self._entries.clear()
        self._used_bytes = 0

    def check_invariants(self) -> None:
        """Check that the sizes match the entries. The time is linear in the number of entries, so only tests call this.

        Raises:
            AssertionError: A size does not match.
        """
        self._check_used_bytes([entry_bytes for _, entry_bytes in self._entries.values()])


class SharedCache(BudgetedCache[K, V]):
    """An LRU cache of `budget_bytes`, in which each holder, such as a tenant, can use at most `holder_bytes`.

    When a holder has used its share, its own least recently used entry is evicted.
    """

    _entries: OrderedDict[K, tuple[V, int, str]]

    def __init__(self, budget_bytes: int, holder_bytes: int, name: str = "") -> None:
        super().__init__(budget_bytes, OrderedDict(), name)
        self._holder_bytes = min(budget_bytes, holder_bytes)
        self._holders: Holders[K] = Holders()

    def get(self, key: K) -> V | None:
        """Return the value, or None if it is not in the cache. The value becomes the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        self._entries.move_to_end(key)
        value, _, holder = entry
        self._holders.use(holder, key)
        return value

    def put(self, key: K, value: V, size_bytes: int, holder: str) -> bool:
        """Store a value, and return whether it was stored.

        A value that is larger than the share of a holder is refused. The key's previous value is removed in this case,
        too.

        Raises:
            ValueError: The size is negative.
        """
        charged_bytes = self._remove_and_compute_charge(key, size_bytes, self._holder_bytes)
        if charged_bytes is None:
            return False
        while self._holders.get_used_bytes(holder) + charged_bytes > self._holder_bytes:
            self._evict(next(self._holders.iter_oldest(holder)))
        while self._used_bytes + charged_bytes > self._budget_bytes:
            self._evict(next(iter(self._entries)))
        self._entries[key] = (value, charged_bytes, holder)
        self._used_bytes += charged_bytes
        self._holders.add(holder, key, charged_bytes)
        return True

    def discard(self, key: K) -> None:
        """Remove the key, if it is in the cache."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            _, charged_bytes, holder = entry
            self._used_bytes -= charged_bytes
            self._holders.remove(holder, key, charged_bytes)

    def _evict(self, key: K) -> None:
        self.discard(key)
        self._evictions += 1

    def check_invariants(self) -> None:
        """Check that the sizes match the entries. The time is linear in the number of entries, so only tests call this.

        Raises:
            AssertionError: A size does not match.
        """
        self._check_used_bytes([entry_bytes for _, entry_bytes, _ in self._entries.values()])
        bytes_by_entry = {(holder, key): size for key, (_, size, holder) in self._entries.items()}
        self._holders.check_invariants(bytes_by_entry, self._holder_bytes)


_named_caches: WeakSet[BudgetedCache[Any, Any]] = WeakSet()
_NAME_LOCK = Lock()
"""The lock for `_named_caches`. Caches belong to the event loop, but some caches are created in threads."""


def measure_named_caches() -> dict[str, int]:
    """Return the used bytes of the named caches of this process, by name, for the metrics."""
    with _NAME_LOCK:
        caches = list(_named_caches)
    bytes_by_name: dict[str, int] = {}
    for cache in caches:
        bytes_by_name[cache.name] = bytes_by_name.get(cache.name, 0) + cache.used_bytes
    return bytes_by_name
