"""Quotas: limits of the amounts that principals use. Each amount counts until a given time.

Each worker has its own quotas, which start empty, so a limit applies to each worker. The memory is limited:
amounts of a holder that end within the same few seconds are merged, and holders without current amounts
are removed.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

_GRAIN_S = 5.0
"""The length of an interval. Amounts that would end within the same interval are merged, and end with it."""
_HOLDERS_MIN = 1000
"""The minimum number of holders at which holders without current amounts are removed."""


class _Usage:
    __slots__ = ("amounts", "ends", "total")

    def __init__(self) -> None:
        self.total = 0
        self.amounts: dict[int, int] = {}
        """The amounts, by the number of the interval in which they end."""
        self.ends: list[int] = []
        """A heap of these interval numbers."""


class Quota:
    """A limit of `share` for each holder. There is no limit for the holder None."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._usages: dict[str, _Usage] = {}
        self._sweep_count = _HOLDERS_MIN

    def has_room(self, holder: str | None, now_s: float, amount: int = 1) -> bool:
        return holder is None or self._remove_ended_and_sum(holder, now_s) + amount <= self._share

    def add(self, holder: str | None, now_s: float, until_s: float, amount: int = 1) -> None:
        """Count `amount` for the holder until `until_s`. Nothing is counted for the holder None, which has no limit.

        When the number of holders has doubled, the amounts that have ended are removed for all holders. Otherwise
        holders that add nothing again would stay in memory.
        """
        if holder is None or not amount:
            return
        self._remove_ended_and_sum(holder, now_s)
        if len(self._usages) >= self._sweep_count:
            for other in list(self._usages):
                self._remove_ended_and_sum(other, now_s)
            self._sweep_count = max(_HOLDERS_MIN, 2 * len(self._usages))
        usage, end = self._usages.setdefault(holder, _Usage()), _find_interval(until_s)
        if end not in usage.amounts:
            heappush(usage.ends, end)
        usage.amounts[end] = usage.amounts.get(end, 0) + amount
        usage.total += amount

    def take_back(self, holder: str, until_s: float, amount: int = 1) -> None:
        """Remove an amount that was added with this `until_s`. An amount that has ended is ignored."""
        usage, end = self._usages.get(holder), _find_interval(until_s)
        if usage is None or end not in usage.amounts:
            return
        amount = min(amount, usage.amounts[end])
        # An amount of 0 is kept, because its end is in the heap.
        usage.amounts[end] -= amount
        usage.total -= amount

    def _remove_ended_and_sum(self, holder: str, now_s: float) -> int:
        """Remove the amounts of the holder that have ended, and return the sum of the others.

        Amounts that end in the same interval of `_GRAIN_S` seconds are stored as one amount, which ends with it.
        """
        usage = self._usages.get(holder)
        if usage is None:
            return 0
        while usage.ends and usage.ends[0] * _GRAIN_S <= now_s:
            usage.total -= usage.amounts.pop(heappop(usage.ends))
        if not usage.ends:
            del self._usages[holder]
        return usage.total

    def check_invariants(self) -> None:
        for usage in self._usages.values():
            assert usage.total == sum(usage.amounts.values())
            assert sorted(usage.ends) == sorted(usage.amounts)
            assert all(amount >= 0 for amount in usage.amounts.values())


def _find_interval(until_s: float) -> int:
    """Return the number of the interval in which `until_s` is. Interval n ends at n times `_GRAIN_S`."""
    return math.ceil(until_s / _GRAIN_S)
