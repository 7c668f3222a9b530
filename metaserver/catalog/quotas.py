"""What each principal has had stored lately: amounts that count until a moment of their own.

Belongs to one worker and starts empty; what it bounds is therefore bounded once per worker. Bounded itself: a holder's
amounts of the same few seconds are one, and holders all of whose amounts have ended are forgotten.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

_GRAIN_S = 5.0
"""Amounts that end within the same span of so many seconds end together, at its end."""
_HOLDERS_MIN = 1000
"""Of no more holders those who hold nothing any more are not looked for."""


class _Held:
    __slots__ = ("amounts", "ends", "total")

    def __init__(self) -> None:
        self.total = 0
        self.amounts: dict[int, int] = {}
        """By the number of the span that they end in."""
        self.ends: list[int] = []
        """A heap of these numbers."""


class Quota:
    """`share` of something for each holder. The holder None has no share of its own."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._held: dict[str, _Held] = {}
        self._sweep_at = _HOLDERS_MIN

    def has_room(self, holder: str | None, now_s: float, amount: int = 1) -> bool:
        return holder is None or self._held_by(holder, now_s) + amount <= self._share

    def add(self, holder: str | None, now_s: float, until_s: float, amount: int = 1) -> None:
        """Counts `amount` until then."""
        if holder is None or not amount:
            return
        self._held_by(holder, now_s)
        if len(self._held) >= self._sweep_at:
            for each in list(self._held):
                self._held_by(each, now_s)
            self._sweep_at = max(_HOLDERS_MIN, 2 * len(self._held))
        held, end = self._held.setdefault(holder, _Held()), _span_of(until_s)
        if end not in held.amounts:
            heappush(held.ends, end)
        held.amounts[end] = held.amounts.get(end, 0) + amount
        held.total += amount

    def take_back(self, holder: str, until_s: float, amount: int = 1) -> None:
        """Of what was added until then: it counts no more. What has ended before is passed over."""
        held, end = self._held.get(holder), _span_of(until_s)
        if held is None or end not in held.amounts:
            return
        amount = min(amount, held.amounts[end])
        held.amounts[end] -= amount  # of 0, too: its end stands in the heap
        held.total -= amount

    def _held_by(self, holder: str, now_s: float) -> int:
        held = self._held.get(holder)
        if held is None:
            return 0
        while held.ends and held.ends[0] * _GRAIN_S <= now_s:
            held.total -= held.amounts.pop(heappop(held.ends))
        if not held.ends:
            del self._held[holder]
        return held.total

    def check_invariants(self) -> None:
        for held in self._held.values():
            assert held.total == sum(held.amounts.values())
            assert sorted(held.ends) == sorted(held.amounts)
            assert all(amount >= 0 for amount in held.amounts.values())


def _span_of(until_s: float) -> int:
    return math.ceil(until_s / _GRAIN_S)
