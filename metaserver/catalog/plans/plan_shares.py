"""The leases and bytes of plans that each principal uses.

A lease counts until it ends or is withdrawn. The bytes of a plan count until its files are deleted.

Invariant: a principal may have at most half of all leases and half of all bytes, so that no principal can
exclude the others. A lease counts for the principal that requested or renewed it, for the requested time.
After a lease ends, the files are kept for a grace period for running queries, and their bytes count until
the end of this period.

An instance belongs to one worker and starts empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.catalog.quotas import Quota

PLAN_BYTES_MIN = 4096
"""The size in bytes with which the smallest plan counts. It covers the row in the database and the minimum object size
that storage services bill."""
_ALL_PRINCIPALS = "all"
"""The holder under which the bytes of all principals together are counted."""
_SWEEP_MIN = 10_000
"""The minimum number of leases at which ended leases are removed from memory."""


class _GrantedLease(NamedTuple):
    until_s: float
    size_bytes: int


_NO_LEASE = _GrantedLease(0.0, 0)


class PlanShares:
    """The leases and bytes of each principal. Times are seconds of a monotonic clock."""

    def __init__(self, *, leases: int, size_bytes: int, grace_s: float) -> None:
        self._leases = Quota(max(1, leases // 2))
        self._bytes = Quota(max(1, size_bytes // 2))
        self._total_bytes = Quota(size_bytes)
        self._grace_s = grace_s
        self._granted_leases: dict[tuple[str, int], _GrantedLease] = {}
        """The leases, by holder and plan number."""
        self._sweep_at = _SWEEP_MIN

    def find_exhausted_limit(self, principal: str, now_s: float, leases: int = 1) -> str | None:
        """Return the name of the limit that `leases` additional leases would exceed, or None if there is room."""
        holder = _find_holder(principal)
        if not self._leases.has_room(holder, now_s, leases):
            return "leases of one principal"
        if not self._bytes.has_room(holder, now_s):
            return "bytes of one principal"
        return None if self._total_bytes.has_room(_ALL_PRINCIPALS, now_s) else "bytes"

    def count_new_leases(self, principal: str, plans: Iterable[int], now_s: float) -> int:
        """Return the number of plans for which the principal has no lease yet.

        Without logins, leases are not counted, so every plan is new.
        """
        holder = _find_holder(principal) or ""
        return sum(self._granted_leases.get((holder, plan), _NO_LEASE).until_s <= now_s for plan in plans)

    def grant(self, principal: str, plan: int, now_s: float, until_s: float, size_bytes: int = 0) -> None:
        """Add a lease of the plan, or extend it.

        Args:
            size_bytes: The size of the files that are written for the plan, or 0 if the plan already exists.
        """
        holder = _find_holder(principal)
        counted_bytes = max(size_bytes, PLAN_BYTES_MIN) if size_bytes else 0
        if holder is None:
            # Without logins, requests cannot be distinguished, so only the limit of all principals together applies.
            self._total_bytes.add(_ALL_PRINCIPALS, now_s, until_s + self._grace_s, counted_bytes)
            return
        former_lease = self._granted_leases.get((holder, plan), _NO_LEASE)
        self._replace_lease(
            holder, plan, now_s, max(until_s, former_lease.until_s), former_lease.size_bytes + counted_bytes
        )

    def withdraw(self, principal: str, plans: Iterable[int], now_s: float) -> None:
        """End the leases of these plans. Their files stay for the grace period."""
        holder = _find_holder(principal)
        for plan in plans:
            if holder is not None and (holder, plan) in self._granted_leases:
                self._replace_lease(holder, plan, now_s, now_s, self._granted_leases[holder, plan].size_bytes)

    def _replace_lease(self, holder: str, plan: int, now_s: float, until_s: float, size_bytes: int) -> None:
        """Count a lease and its bytes instead of the earlier lease of the same plan.

        The bytes count for the holder and for all principals together. They count for a grace period after the lease
        ends, because the files are kept for running queries. A lease that has ended already counts only with its bytes.
        Ended leases are removed from memory when the number of leases reaches `_sweep_at`.
        """
        if len(self._granted_leases) >= self._sweep_at:
            self._granted_leases = {key: lease for key, lease in self._granted_leases.items() if lease.until_s > now_s}
            self._sweep_at = max(_SWEEP_MIN, 2 * len(self._granted_leases))
        former_lease = self._granted_leases.pop((holder, plan), None)
        if former_lease is not None:
            self._leases.take_back(holder, former_lease.until_s)
            for quota, share_holder in ((self._bytes, holder), (self._total_bytes, _ALL_PRINCIPALS)):
                quota.take_back(share_holder, former_lease.until_s + self._grace_s, former_lease.size_bytes)
        for quota, share_holder in ((self._bytes, holder), (self._total_bytes, _ALL_PRINCIPALS)):
            quota.add(share_holder, now_s, until_s + self._grace_s, size_bytes)
        if until_s > now_s:
            self._leases.add(holder, now_s, until_s)
            self._granted_leases[holder, plan] = _GrantedLease(until_s, size_bytes)

    def check_invariants(self) -> None:
        for quota in (self._leases, self._bytes, self._total_bytes):
            quota.check_invariants()


def _find_holder(principal: str) -> str | None:
    """Return the holder whose share is charged, or None if the server has no logins."""
    return None if principal == ANONYMOUS_NAME else principal
