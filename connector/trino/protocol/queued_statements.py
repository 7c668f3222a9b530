"""Rewritten statements that wait in Trino's queue, and when the leases of their plans have to be renewed.

Trino looks for a plan when its statement leaves the queue, which may be longer than any lease. All that time the
client asks below `/v1/statement/queued/` how far it is, through the proxy: so the proxy needs no clock and no task of
its own to know who still waits. What it knows of them is bounded, and is lost when it ends; then the plans are good for
the leases that they have. Only statements that are not checked for Trino's rules (`rules.py`) wait with their plans.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from seamark.cache.memory import MemoryCache
from seamark.connector.trino.protocol.plan_withdrawal import Plan

_QUEUED = ["", "v1", "statement", "queued"]
_BYTES = 16 << 20
_BYTES_PER_PLAN = 500
_EVERY_S_MAX = 300.0
"""The server may grant less than it is asked for."""


@dataclass(slots=True)
class _Waits:
    plans: Sequence[Plan]
    renewed_s: float


class Waiting:
    """Belongs to one event loop. The server renews what has less than half of `lease_s` left; asked for every quarter,
    no plan is ever within a quarter of its end."""

    def __init__(self, lease_s: float) -> None:
        self._every_s = min(lease_s / 4, _EVERY_S_MAX)
        self._waits: MemoryCache[str, _Waits] = MemoryCache(_BYTES)

    def add(self, target: str, plans: Sequence[Plan], made_s: float) -> None:
        """A statement that reads `plans`, and goes on at `target`, if that is in the queue. `made_s`: when they were
        asked for, by the monotonic clock."""
        query = _queued(target)
        if query is not None and plans:
            self._waits.put(query, _Waits(plans, made_s), _BYTES_PER_PLAN * len(plans))

    def due(self, target: str) -> Sequence[Plan]:
        """The plans to renew now that a client asks for `target`."""
        query = _queued(target) if len(self._waits) else None
        waits = self._waits.get(query) if query is not None else None
        if waits is None or time.monotonic() - waits.renewed_s < self._every_s:
            return ()
        waits.renewed_s = time.monotonic()
        return waits.plans


def _queued(target: str) -> str | None:
    """The query that a path in the queue is of."""
    parts = target.split("/", 5)
    return parts[4] if len(parts) == 6 and parts[:4] == _QUEUED else None
