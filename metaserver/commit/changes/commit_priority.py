"""Gives priority to a change that has collided several times: it commits before the other changes of its table.

Without priority, a slow change could lose every race against a stream of other writers. All attempts of a change share
an id, by which the server counts its collisions. After a number of collisions, the change gets priority: the table's
other changes wait until it has committed, or until its priority expires. Only the change that has waited longest
gets priority. Priority affects the order of commits and never their correctness. It is local to this process and is not
persisted.

The delay is bounded. Priority expires after `longest_s`, and no change waits longer than that for changes with priority
(`group_commit.py`). After a priority that expired unused, no change of the table gets priority for some time. Therefore
a client that collides on purpose delays other changes only for a small share of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

_CHANGES_MAX = 10_000
"""The maximum number of changes whose collisions are counted.

If there are more, the changes that collided longest ago are forgotten.
"""
_FORGET_S = 120.0
"""The time after its last collision at which a change is forgotten."""
_PRIORITY_MIN_S = 3.0
"""The minimum duration of priority. It is longer than the two seconds that clients may wait before they try again."""
_PAUSE_FACTOR = 10
"""The length of the pause after a priority that expired unused, as a multiple of the priority's duration.

During the pause, no change of the table gets priority.
"""

ChangeId = tuple[str, str]
"""The principal that commits, and the id that all attempts of its change share."""


class _CollidingChange:
    """The collisions of a change. After a collision with another commit, the client computes the change again.

    Attributes:
        collisions: The number of collisions.
        first_s, last_s: The times of the first and the last collision. They are readings of a monotonic clock.
        took_s: The time between the last two collisions.
    """

    __slots__ = ("collisions", "first_s", "last_s", "took_s")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s
        self.collisions = 0
        self.took_s = 0.0


class _Priority(NamedTuple):
    """The priority of a change, and the time at which it expires.

    Attributes:
        change: The change for which other changes of the table wait.
        end_s: The time at which the priority expires, on a monotonic clock.
        length_s: The duration of the priority.
    """

    change: ChangeId
    end_s: float
    length_s: float


class CommitPriority:
    """The changes with priority, by table UUID. Times are readings of a monotonic clock in seconds."""

    def __init__(self, *, after: int, longest_s: float) -> None:
        """Set the limits of priority.

        Args:
            after: The number of collisions after which a change gets priority.
            longest_s: The maximum duration of priority. With 0, no change gets priority.
        """
        self._collisions_min = after
        self._priority_max_s = longest_s
        self._colliding_changes: OrderedDict[tuple[str, ChangeId], _CollidingChange] = OrderedDict()
        self._priorities: dict[str, _Priority] = {}
        self._pauses: OrderedDict[str, float] = OrderedDict()

    def record_collision(self, table: str, change: ChangeId, now_s: float) -> None:
        """Count a collision of a change. If no change has priority, grant it to the change that has waited longest.

        A change is forgotten if its last collision is long ago. If there are too many changes, the changes with the
        oldest last collisions are forgotten.
        """
        key = (table, change)
        colliding_change = self._colliding_changes.get(key)
        if colliding_change is None:
            colliding_change = self._colliding_changes[key] = _CollidingChange(now_s)
        colliding_change.collisions += 1
        colliding_change.took_s, colliding_change.last_s = now_s - colliding_change.last_s, now_s
        self._colliding_changes.move_to_end(key)
        while len(self._colliding_changes) > _CHANGES_MAX or self._get_oldest_s() < now_s - _FORGET_S:
            self._colliding_changes.popitem(last=False)
        self._grant(table, now_s)

    def release(self, table: str, change: ChangeId, now_s: float) -> None:
        """Forget the collisions of a change that has committed or will not be repeated. End its priority.

        If it had priority, the waiting change of the table that collided first gets it.
        """
        self._colliding_changes.pop((table, change), None)
        granted = self._priorities.get(table)
        if granted is not None and granted.change == change:
            del self._priorities[table]
            self._grant(table, now_s)

    def expire_and_find_holder(self, table: str, now_s: float) -> tuple[ChangeId, float] | None:
        """End the priority of a table if it has expired, and return the change that has priority.

        The result also has the remaining seconds of the priority. It is None if no change has priority.

        After a priority that has expired, a pause follows, in which no change of the table gets priority, so
        that a client that never commits cannot delay others again and again.
        """
        granted = self._priorities.get(table)
        if granted is None:
            return None
        if now_s < granted.end_s:
            return granted.change, granted.end_s - now_s
        del self._priorities[table]
        self._colliding_changes.pop((table, granted.change), None)
        self._pauses[table] = now_s + _PAUSE_FACTOR * granted.length_s
        while len(self._pauses) > _CHANGES_MAX:
            self._pauses.popitem(last=False)
        return None

    def _get_oldest_s(self) -> float:
        return next(iter(self._colliding_changes.values())).last_s

    def _grant(self, table: str, now_s: float) -> None:
        """Give priority to the change that has waited longest, unless a priority or a pause is active.

        Only changes with enough collisions are considered. The change with the earliest first collision has waited
        longest. If the setting disables priority, no change gets it.

        Args:
            table: The UUID of the table.
            now_s: The current time on a monotonic clock.
        """
        if (
            self._priority_max_s <= 0
            or self.expire_and_find_holder(table, now_s) is not None
            or self._pauses.get(table, 0.0) > now_s
        ):
            return
        self._pauses.pop(table, None)
        waiting_changes = [
            (colliding_change.first_s, change, colliding_change)
            for (table_of_change, change), colliding_change in self._colliding_changes.items()
            if table_of_change == table and colliding_change.collisions >= self._collisions_min
        ]
        if waiting_changes:
            _, change, colliding_change = min(waiting_changes, key=lambda candidate: candidate[0])
            # The next attempt may take longer than the last attempt, so it gets twice the time of the last attempt.
            length_s = min(self._priority_max_s, _PRIORITY_MIN_S + 2 * colliding_change.took_s)
            self._priorities[table] = _Priority(change, now_s + length_s, length_s)
