"""What each principal has had stored lately: amounts that count until a moment of their own.

Belongs to one worker and starts empty; what it bounds is therefore bounded once per worker. Bounded itself: a holder's
entries of the same few seconds are one, and holders all of whose entries have ended are forgotten.
"""

from __future__ import annotations

from collections import deque

_GRAIN_S = 5.0
"""Amounts that end within so many seconds of each other end together."""
_HOLDERS_MIN = 1000
"""Of no more holders those who hold nothing any more are not looked for."""


class Quota:
    """`share` of something for each holder. The holder None has no share of its own."""

    def __init__(self, share: int) -> None:
        self._share = share
        self._entries: dict[str, deque[tuple[float, int]]] = {}
        self._held: dict[str, int] = {}
        self._sweep_at = _HOLDERS_MIN

    def has_room(self, holder: str | None, now_s: float, amount: int = 1) -> bool:
        return holder is None or self._held_by(holder, now_s) + amount <= self._share

    def add(self, holder: str | None, now_s: float, until_s: float, amount: int = 1) -> None:
        """Counts `amount` until then, which is no earlier than what was said before of this holder, about."""
        if holder is None:
            return
        self._held_by(holder, now_s)
        if len(self._entries) >= self._sweep_at:
            for each in list(self._entries):
                self._held_by(each, now_s)
            self._sweep_at = max(_HOLDERS_MIN, 2 * len(self._entries))
        entries = self._entries.setdefault(holder, deque())
        if entries and until_s <= entries[-1][0] + _GRAIN_S:
            last_s, counted = entries[-1]
            entries[-1] = (max(last_s, until_s) if len(entries) == 1 else last_s, counted + amount)
        else:
            entries.append((until_s, amount))
        self._held[holder] = self._held.get(holder, 0) + amount

    def _held_by(self, holder: str, now_s: float) -> int:
        entries = self._entries.get(holder)
        if entries is None:
            return 0
        while entries and entries[0][0] <= now_s:
            self._held[holder] -= entries.popleft()[1]
        if entries:
            return self._held[holder]
        del self._entries[holder], self._held[holder]
        return 0

    def check_invariants(self) -> None:
        assert self._held == {holder: sum(amount for _, amount in kept) for holder, kept in self._entries.items()}
