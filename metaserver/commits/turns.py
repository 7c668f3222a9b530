"""Turns: a change that has collided several times may commit before all others of its table, for a short time.

Located upserts beside a stream of other writers could lose each race. The server counts the collisions of a change by
the id that all its attempts share. After some of them it holds back the table's other changes until that change has
committed or its time is up. Only who waits longest has a turn. Turns decide who comes first and never what is right:
they are this process's own, and are lost with it.

Bounds: a turn ends after `turn_s` at the latest, and nobody waits longer than that for turns that follow each other
(`committing.py`). A table whose turn was not used has no other one for some time, so that nobody can hold back others
by colliding on purpose for more than a small share of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

_CHANGES_MAX = 10_000
"""Whose collisions are remembered. Of more the ones that collided least recently are forgotten."""
_FORGET_S = 120.0
_LEAST_S = 3.0
"""Clients wait up to two seconds before they try again."""
_REST = 10
"""A table has no turn for so many times the length of one that was not used."""

ChangeId = tuple[str, str]
"""The caller and the id that it chose for all attempts of one change."""


class _Waiting:
    __slots__ = ("collisions", "first_s", "last_s", "took_s")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.collisions = 0
        self.took_s = 0.0


class _Turn(NamedTuple):
    change: ChangeId
    end_s: float
    length_s: float


class Turns:
    """Of all tables, by uuid. Times are those of a monotonic clock."""

    def __init__(self, *, after: int, turn_s: float) -> None:
        """`after`: so many collisions earn a turn; 0 seconds is none for anybody."""
        self._after = after
        self._turn_s = turn_s
        self._waiting: OrderedDict[tuple[str, ChangeId], _Waiting] = OrderedDict()
        self._turns: dict[str, _Turn] = {}
        self._rests: OrderedDict[str, float] = OrderedDict()

    def collided(self, table: str, change: ChangeId, now_s: float) -> None:
        """Counts it, and gives the turn to whoever has waited longest where it is free."""
        key = (table, change)
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting(now_s)
        waiting.collisions += 1
        waiting.took_s, waiting.last_s = now_s - waiting.last_s, now_s
        self._waiting.move_to_end(key)
        while len(self._waiting) > _CHANGES_MAX or self._oldest_s() < now_s - _FORGET_S:
            self._waiting.popitem(last=False)
        self._grant(table, now_s)

    def ended(self, table: str, change: ChangeId, now_s: float) -> None:
        """It has committed, or will not be tried again."""
        self._waiting.pop((table, change), None)
        turn = self._turns.get(table)
        if turn is not None and turn.change == change:
            del self._turns[table]
            self._grant(table, now_s)

    def holder(self, table: str, now_s: float) -> tuple[ChangeId, float] | None:
        """Whose turn it is, and for how many seconds yet."""
        turn = self._turns.get(table)
        if turn is None:
            return None
        if now_s < turn.end_s:
            return turn.change, turn.end_s - now_s
        del self._turns[table]
        self._waiting.pop((table, turn.change), None)
        self._rests[table] = now_s + _REST * turn.length_s
        while len(self._rests) > _CHANGES_MAX:
            self._rests.popitem(last=False)
        return None

    def _oldest_s(self) -> float:
        return next(iter(self._waiting.values())).last_s

    def _grant(self, table: str, now_s: float) -> None:
        if self._turn_s <= 0 or self.holder(table, now_s) is not None or self._rests.get(table, 0.0) > now_s:
            return
        self._rests.pop(table, None)
        waiting = [
            (one.first_s, change, one)
            for (of, change), one in self._waiting.items()
            if of == table and one.collisions >= self._after
        ]
        if waiting:
            _, change, one = min(waiting, key=lambda each: each[0])
            length_s = min(self._turn_s, _LEAST_S + 2 * one.took_s)
            self._turns[table] = _Turn(change, now_s + length_s, length_s)
