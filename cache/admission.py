"""A memory tier that stores an entry only if it is requested more often than the entries that it would replace.

In an LRU cache, a scan evicts the frequently used entries. In this cache, a new entry starts in a small window (LRU).
When it leaves the window, it competes with the entries that would be evicted for it: the sum of their frequencies
(`frequency.py`) must be less than its own frequency. The main part is a segmented LRU: an entry that is requested again
moves from probation to the protected segment. Pinned entries are in a separate segment, from which only pinned entries
can take space.

A holder, such as a tenant, can use at most its share of the budget. At this limit, a new entry competes with other
entries of the same holder. The holder has the same share of the pinned part, where its own pinned entries are evicted.
Otherwise a holder that pins many entries would evict the pinned entries of all other holders.

Like `MemoryCache`, this cache is single-threaded and never exceeds its budget. Sources: Einziger, Friedman, Manes,
"TinyLFU: a highly efficient cache admission policy", 2017; for the sum of frequencies, Einziger and others,
"Lightweight robust size aware cache management", 2021.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Literal, TypeVar, get_args

from seamark.cache.frequency import FrequencySketch
from seamark.cache.holders import Holders
from seamark.cache.memory import BudgetedCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_Segment = Literal["window", "probation", "protected", "pinned"]
_WINDOW_FRACTION = 0.01
"""The part of the budget, without the pinned entries, for the window. The rest is the main part."""
_PROTECTED_FRACTION = 0.8
"""The part of the main part for the protected segment."""


class _Entry(Generic[V]):
    __slots__ = ("charged_bytes", "holder", "segment", "value")

    def __init__(self, value: V, charged_bytes: int, holder: str, segment: _Segment) -> None:
        self.value = value
        self.charged_bytes = charged_bytes
        self.holder = holder
        self.segment: _Segment = segment


class _KeyList(Generic[K]):
    """Keys in the order of their last use, least recent first, and the total bytes of their entries."""

    def __init__(self) -> None:
        self.keys: OrderedDict[K, None] = OrderedDict()
        self.used_bytes = 0

    def add(self, key: K, charged_bytes: int) -> None:
        self.keys[key] = None
        self.used_bytes += charged_bytes

    def remove(self, key: K, charged_bytes: int) -> None:
        del self.keys[key]
        self.used_bytes -= charged_bytes


class AdmittingCache(BudgetedCache[K, V]):
    """A cache that stores up to `budget_bytes`, or nothing if the budget is 0.

    Args:
        budget_bytes: The maximum size.
        sketch: Counts the requests of each `identify(key)`. Several tiers can share a sketch.
        pinned_bytes: The part of the budget that pinned entries can use.
        holder_bytes: The part of the budget that each holder can use. Each holder can use the same share of the pinned
            part.
        identify: Returns the object that the sketch counts for a key.
        name: See `BudgetedCache`.

    Raises:
        ValueError: The budget is negative, or `pinned_bytes` is not between 0 and the budget.
    """

    _entries: dict[K, _Entry[V]]

    def __init__(
        self,
        budget_bytes: int,
        sketch: FrequencySketch,
        *,
        pinned_bytes: int = 0,
        holder_bytes: int | None = None,
        identify: Callable[[K], Hashable] = lambda key: key,
        name: str = "",
    ) -> None:
        if not 0 <= pinned_bytes <= budget_bytes:
            raise ValueError(
                f"budget_bytes is {budget_bytes} and pinned_bytes is {pinned_bytes}; "
                "pinned_bytes must be between 0 and budget_bytes"
            )
        super().__init__(budget_bytes, {}, name)
        self._pinned_bytes = pinned_bytes
        self._holder_bytes = budget_bytes if holder_bytes is None else holder_bytes
        share = self._holder_bytes / max(1, budget_bytes)
        self._holder_pinned_bytes = int(pinned_bytes * min(1.0, share))
        self._sketch = sketch
        self._identify = identify
        self._segments: dict[_Segment, _KeyList[K]] = {name: _KeyList() for name in get_args(_Segment)}
        self._holders: Holders[K] = Holders()
        self._pinned_holders: Holders[K] = Holders()
        self._rejections = 0

    @property
    def rejected(self) -> int:
        """The number of entries that were requested less often than the entries that they would have replaced."""
        return self._rejections

    def get_held_bytes(self, holder: str) -> int:
        return self._holders.get_used_bytes(holder)

    def get(self, key: K, *, counted: bool = True) -> V | None:
        """Return the value, or None if it is not in the cache.

        Args:
            key: The key.
            counted: False if the call continues an earlier request, such as the next small read of a sequential reader
                in the same block. These calls do not make the block popular.
        """
        if counted:
            self._sketch.count(self._identify(key))
        entry = self._entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self._hits += 1
        if counted:
            self._use(key, entry)
        return entry.value

    def put(self, key: K, value: V, size_bytes: int, holder: str = "", *, pinned: bool = False) -> bool:
        """Store a value, and return whether it is in the cache now.

        The previous value of the key is removed in any case. If a pinned value is too large for the holder's share of
        the pinned part, it is stored without the pin. Otherwise, it replaces the oldest pinned values. Other values
        begin in the window, the part for new entries.
        """
        charged_bytes = self._remove_and_compute_charge(key, size_bytes, min(self._budget_bytes, self._holder_bytes))
        if charged_bytes is None:
            return False
        is_pinned = pinned and charged_bytes <= self._holder_pinned_bytes
        if not self._make_room_within_share(holder, key, charged_bytes, is_pinned):
            self._rejections += 1
            return False
        while is_pinned and self._pinned_holders.get_used_bytes(holder) + charged_bytes > self._holder_pinned_bytes:
            self._evict(next(self._pinned_holders.iter_oldest(holder)))
        self._add(key, _Entry(value, charged_bytes, holder, "pinned" if is_pinned else "window"))
        if is_pinned:
            while self._segments["pinned"].used_bytes > self._pinned_bytes:
                self._evict(next(iter(self._segments["pinned"].keys)))
        self._shrink_to_budget()
        return key in self._entries

    def discard(self, key: K) -> None:
        """Remove the key, if it is in the cache."""
        if key in self._entries:
            self._remove(key)

    def _use(self, key: K, entry: _Entry[V]) -> None:
        """Record a use of an entry, which makes it the most recently used entry of its segment.

        An entry in the segment `probation` moves to the segment `protected`, whose entries are evicted last. If that
        segment then exceeds its share, its oldest entries move back.
        """
        self._holders.use(entry.holder, key)
        if entry.segment != "probation":
            self._segments[entry.segment].keys.move_to_end(key)
            if entry.segment == "pinned":
                self._pinned_holders.use(entry.holder, key)
            return
        self._move(key, entry, "protected")
        while self._segments["protected"].used_bytes > _PROTECTED_FRACTION * self._compute_main_bytes():
            oldest = next(iter(self._segments["protected"].keys))
            if oldest == key:
                break
            self._move(oldest, self._entries[oldest], "probation")

    def _make_room_within_share(self, holder: str, candidate: K, charged_bytes: int, is_pinned: bool) -> bool:
        """Make room for the candidate within its holder's share, and return whether it fits.

        Entries of the holder are evicted only if the candidate is pinned, or is requested more often than all of them
        together. Only a pinned candidate evicts pinned entries. If holders have no share, every candidate fits.
        """
        excess = self.get_held_bytes(holder) + charged_bytes - self._holder_bytes
        if excess <= 0 or self._holder_bytes >= self._budget_bytes:
            return True
        victims = []
        for key in self._holders.iter_oldest(holder):
            if is_pinned or self._entries[key].segment != "pinned":
                victims.append(key)
                excess -= self._entries[key].charged_bytes
                if excess <= 0:
                    break
        if excess > 0 or not (is_pinned or self._should_admit(candidate, victims)):
            return False
        for key in victims:
            self._evict(key)
        return True

    def _compute_main_bytes(self) -> float:
        return (self._budget_bytes - self._segments["pinned"].used_bytes) * (1 - _WINDOW_FRACTION)

    def _shrink_to_budget(self) -> None:
        """Move entries from the window to the main part, and evict entries to keep the budget.

        Entries leave the window until it is within its share, or has a single entry. Entries are evicted until all are
        within the budget. The oldest entry of the window (the candidate) moves to the main part if it needs no eviction
        there, or if it is requested more often than the entries that it replaces (the victims). Otherwise, the
        candidate is evicted. It is also evicted if space is needed and the main part has no entries.
        """
        window = self._segments["window"]
        window_bytes = (self._budget_bytes - self._segments["pinned"].used_bytes) * _WINDOW_FRACTION
        while window.keys and (
            (window.used_bytes > window_bytes and len(window.keys) > 1) or self._count_excess_bytes() > 0
        ):
            candidate = next(iter(window.keys))
            entry = self._entries[candidate]
            victims = self._find_victims(self._count_excess_bytes())
            if not victims or self._should_admit(candidate, victims):
                for victim in victims:
                    self._evict(victim)
                self._move(candidate, entry, "probation")
                if not victims and self._count_excess_bytes() > 0:
                    self._evict(candidate)
            else:
                self._rejections += 1
                self._evict(candidate)
        while self._count_excess_bytes() > 0:
            self._evict(self._find_victims(1)[0])

    def _count_excess_bytes(self) -> int:
        return self._used_bytes - self._budget_bytes

    def _find_victims(self, need_bytes: int) -> list[K]:
        """Return the entries of the main part that would be evicted to free `need_bytes`.

        If the main part has too few entries, the list is shorter.
        """
        victims: list[K] = []
        for segment in ("probation", "protected"):
            for key in self._segments[segment].keys:
                if need_bytes <= 0:
                    return victims
                victims.append(key)
                need_bytes -= self._entries[key].charged_bytes
        return victims

    def _should_admit(self, candidate: K, victims: list[K]) -> bool:
        frequency = self._sketch.estimate(self._identify(candidate))
        for victim in victims:
            frequency -= self._sketch.estimate(self._identify(victim))
            if frequency <= 0:
                return False
        return True

    def _add(self, key: K, entry: _Entry[V]) -> None:
        self._entries[key] = entry
        self._used_bytes += entry.charged_bytes
        self._segments[entry.segment].add(key, entry.charged_bytes)
        self._holders.add(entry.holder, key, entry.charged_bytes)
        if entry.segment == "pinned":
            self._pinned_holders.add(entry.holder, key, entry.charged_bytes)

    def _move(self, key: K, entry: _Entry[V], segment: _Segment) -> None:
        self._segments[entry.segment].remove(key, entry.charged_bytes)
        entry.segment = segment
        self._segments[segment].add(key, entry.charged_bytes)

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key)
        self._used_bytes -= entry.charged_bytes
        self._segments[entry.segment].remove(key, entry.charged_bytes)
        self._holders.remove(entry.holder, key, entry.charged_bytes)
        if entry.segment == "pinned":
            self._pinned_holders.remove(entry.holder, key, entry.charged_bytes)

    def _evict(self, key: K) -> None:
        self._remove(key)
        self._evictions += 1

    def check_invariants(self) -> None:
        """Check that the sizes match the entries. The time is linear in the number of entries, so only tests call this.

        Raises:
            AssertionError: A size does not match.
        """
        self._check_used_bytes([entry.charged_bytes for entry in self._entries.values()])
        for name, keys in self._segments.items():
            assert keys.used_bytes == sum(self._entries[key].charged_bytes for key in keys.keys)
            assert all(self._entries[key].segment == name for key in keys.keys)
        assert sum(len(keys.keys) for keys in self._segments.values()) == len(self._entries)
        assert self._segments["pinned"].used_bytes <= self._pinned_bytes
        bytes_by_entry = {(entry.holder, key): entry.charged_bytes for key, entry in self._entries.items()}
        self._holders.check_invariants(bytes_by_entry, self._holder_bytes)
        pinned_bytes_by_entry = {
            (holder, key): size for (holder, key), size in bytes_by_entry.items() if self._is_pinned(key)
        }
        self._pinned_holders.check_invariants(pinned_bytes_by_entry, self._holder_pinned_bytes)

    def _is_pinned(self, key: K) -> bool:
        return self._entries[key].segment == "pinned"
