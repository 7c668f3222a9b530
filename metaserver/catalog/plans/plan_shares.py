"""What each principal has of the plans: leases, each until it ends or is withdrawn, and bytes, until the files go.

The rule it keeps: one principal has half of the leases and half of the bytes, so that nobody stops the plans of others.
A lease counts for whom it was granted to, for as long as it was granted, by a first request or by one that renews it.
Files stay for a grace after that, for queries that have begun, and so do their bytes.

Belongs to one worker and starts empty.
"""

from __future__ import annotations

from collections.abc import Iterable

from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.catalog.quotas import Quota

PLAN_BYTES_MIN = 4096
"""What a plan counts for at least: its row in the database, and its files as storage bills them."""
_EVERYBODY = "all"
_SWEEP_MIN = 10_000


class PlanShares:
    """Times are those of a monotonic clock."""

    def __init__(self, *, leases: int, size_bytes: int, grace_s: float) -> None:
        self._leases = Quota(max(1, leases // 2))
        self._bytes = Quota(max(1, size_bytes // 2))
        self._bytes_of_all = Quota(size_bytes)
        self._grace_s = grace_s
        self._granted: dict[tuple[str, int], tuple[float, int]] = {}
        """By holder and number of the plan: until when, and the bytes that count for it."""
        self._sweep_at = _SWEEP_MIN

    def exhausted(self, who: str, now_s: float, leases: int = 1) -> str | None:
        """What there is no room in for so many more leases; None: there is room."""
        holder = _holder(who)
        if not self._leases.has_room(holder, now_s, leases):
            return "leases of one principal"
        if not self._bytes.has_room(holder, now_s):
            return "bytes of one principal"
        return None if self._bytes_of_all.has_room(_EVERYBODY, now_s) else "bytes"

    def unknown(self, who: str, plans: Iterable[int], now_s: float) -> int:
        """How many of the plans would be further leases of theirs."""
        holder = _holder(who) or ""
        return sum(self._granted.get((holder, plan), (0.0, 0))[0] <= now_s for plan in plans)

    def grant(self, who: str, plan: int, now_s: float, until_s: float, size_bytes: int = 0) -> None:
        """A lease of the plan of this number, or a longer one. `size_bytes` where its files are written for it."""
        holder = _holder(who)
        size = max(size_bytes, PLAN_BYTES_MIN) if size_bytes else 0
        if holder is None:
            self._bytes_of_all.add(_EVERYBODY, now_s, until_s + self._grace_s, size)
            return
        before_s, before = self._granted.get((holder, plan), (0.0, 0))
        self._move(holder, plan, now_s, max(until_s, before_s), before + size)

    def withdraw(self, who: str, plans: Iterable[int], now_s: float) -> None:
        """The leases of these plans end now; their files stay for the grace."""
        holder = _holder(who)
        for plan in plans:
            if holder is not None and (holder, plan) in self._granted:
                self._move(holder, plan, now_s, now_s, self._granted[holder, plan][1])

    def _move(self, holder: str, plan: int, now_s: float, until_s: float, size: int) -> None:
        if len(self._granted) >= self._sweep_at:
            self._granted = {key: kept for key, kept in self._granted.items() if kept[0] > now_s}
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._granted))
        before = self._granted.pop((holder, plan), None)
        if before is not None:
            self._leases.take_back(holder, before[0])
            for quota, of in ((self._bytes, holder), (self._bytes_of_all, _EVERYBODY)):
                quota.take_back(of, before[0] + self._grace_s, before[1])
        for quota, of in ((self._bytes, holder), (self._bytes_of_all, _EVERYBODY)):
            quota.add(of, now_s, until_s + self._grace_s, size)
        if until_s > now_s:
            self._leases.add(holder, now_s, until_s)
            self._granted[holder, plan] = until_s, size

    def check_invariants(self) -> None:
        for quota in (self._leases, self._bytes, self._bytes_of_all):
            quota.check_invariants()


def _holder(who: str) -> str | None:
    """Whose share it counts against; without a login there are none."""
    return None if who == ANONYMOUS_NAME else who
