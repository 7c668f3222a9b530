"""Tracks rewritten statements in Trino's queue, and decides when the leases of their plans have to be renewed.

Trino resolves a plan when the statement leaves the queue, possibly after the lease of the plan has ended. While the
statement is queued, its client polls `/v1/statement/queued/` through the proxy. These requests trigger the renewals, so
the proxy needs no timer and no task. The number of tracked statements is bounded. When the proxy stops, it forgets the
statements, and their plans exist until their leases end. A statement whose access rules are checked
(`access_rules.py`) is not tracked, because it has no plans while the client polls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from seamark.cache.memory import MemoryCache
from seamark.connector.trino.protocol.plan_withdrawal import PlanSnapshotRef

_QUEUED = ["", "v1", "statement", "queued"]
"""The parts of a path in Trino's queue before the query id: `/v1/statement/queued/QUERY_ID/SECRET/TOKEN`."""
_STATEMENTS_BYTES_MAX = 16 << 20
_BYTES_PER_PLAN = 500
_RENEWAL_INTERVAL_MAX_S = 300.0
"""The maximum time in seconds between renewals, because the server may grant a shorter lease than requested."""


@dataclass(slots=True)
class _QueuedStatement:
    """A queued statement, and the time of the last renewal of its plans."""

    plans: Sequence[PlanSnapshotRef]
    renewed_s: float


class QueuedStatements:
    """Tracks queued statements. An instance belongs to one event loop.

    The server renews a lease only if less than half of `lease_s` remains. A renewal is requested every quarter of
    `lease_s`, so at least a quarter of `lease_s` always remains.
    """

    def __init__(self, lease_s: float) -> None:
        self._renewal_interval_s = min(lease_s / 4, _RENEWAL_INTERVAL_MAX_S)
        self._statements: MemoryCache[str, _QueuedStatement] = MemoryCache(_STATEMENTS_BYTES_MAX)

    def add(self, target: str, plans: Sequence[PlanSnapshotRef], requested_s: float) -> None:
        """Track a statement that reads `plans`, if `target` is a path of Trino's queue.

        Args:
            target: The path of the statement's next URI.
            plans: The plans that the statement reads.
            requested_s: The time at which the plans were requested, on a monotonic clock.
        """
        query_id = _find_query_id(target)
        if query_id is not None and plans:
            self._statements.put(query_id, _QueuedStatement(plans, requested_s), _BYTES_PER_PLAN * len(plans))

    def take_plans_to_renew(self, target: str) -> Sequence[PlanSnapshotRef]:
        """Return the plans to renew before the proxy forwards a client's request for `target`.

        The plans then count as renewed, so the next requests of the interval return none.
        """
        query_id = _find_query_id(target) if len(self._statements) else None
        statement = self._statements.get(query_id) if query_id is not None else None
        if statement is None or time.monotonic() - statement.renewed_s < self._renewal_interval_s:
            return ()
        statement.renewed_s = time.monotonic()
        return statement.plans


def _find_query_id(target: str) -> str | None:
    """Return the query id in a path of Trino's queue, or None for other paths.

    The id follows the levels `_QUEUED`, and at least one further level follows the id.
    """
    prefix_length = len(_QUEUED)
    parts = target.split("/", prefix_length + 1)
    has_id = len(parts) == prefix_length + 2 and parts[:prefix_length] == _QUEUED
    return parts[prefix_length] if has_id else None
