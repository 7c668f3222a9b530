"""Tracks the plans that this proxy has requested, and withdraws plans that no statement needs.

Trino sees a plan as a snapshot of its table, so each plan makes the catalog's responses larger. A statement needs its
plans until Trino has analysed the statement. After an idle time, the proxy withdraws the plans that no statement needs,
with one request per table. It also withdraws plans that were created for a statement but not used by it. If a proxy
dies, its plans exist until their leases end.

Statements of one proxy may share a plan. Therefore a statement may receive a plan that is being withdrawn. The
statement then waits for the end of the withdrawal, and renews the lease before it uses the plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from seamark.connector.client.errors import ClientError
from seamark.connector.plans.async_client import Name

IDLE_S = 1.0
"""The idle time in seconds after which a plan is withdrawn. Until then, repeated statements share the plan."""
_WITHDRAWN_PLANS_PER_REQUEST = 500
_REMEMBERED_S = 60.0
"""The time in seconds for which withdrawals are stored. Plans that were requested before a withdrawal are withdrawn."""
_KNOWN_MAX = 100_000
"""The maximum number of plans that are tracked. Further plans exist until their leases end."""
_log = structlog.get_logger("seamark.trino-proxy")

PlanSnapshotRef = tuple[Name, int]
"""A table or view, and the id of its plan snapshot or plan view."""
Lease = Callable[[Name, list[int], int | None], Awaitable[None]]


@dataclass(slots=True)
class _State:
    """The state of a plan: the number of statements that need it, or its withdrawal."""

    statements: int = 0
    idle_since_s: float = 0.0
    withdrawal: asyncio.Event | None = None
    """An event that is set at the end of a withdrawal, or None while the plan is available."""


class PlanWithdrawal:
    """Tracks and withdraws plans. An instance belongs to one event loop.

    Attributes:
        lease: A function that sends a lease request to the catalog. Its arguments are a table, the ids of plans, and
            the seconds of the lease: 0 withdraws the plans, and None renews their leases.
    """

    def __init__(self, lease: Lease, idle_s: float = IDLE_S) -> None:
        self._lease = lease
        self._idle_s = idle_s
        self._plans: dict[PlanSnapshotRef, _State] = {}
        self._withdrawn_s: dict[PlanSnapshotRef, float] = {}
        """The times of recent withdrawals, by plan."""
        self._task: asyncio.Task[None] | None = None

    def note(self, plan: PlanSnapshotRef, requested_s: float) -> None:
        """Record a plan that the catalog has returned, so that it is withdrawn when no statement needs it.

        If the plan was withdrawn after it was requested, it no longer exists. It is then recorded as withdrawn.
        If `_KNOWN_MAX` plans are recorded already, the plan is not recorded, and exists until its lease ends.

        Args:
            plan: The plan.
            requested_s: The time at which the plan was requested, on a monotonic clock.
        """
        if len(self._plans) >= _KNOWN_MAX:
            return
        state = self._plans.setdefault(plan, _State())
        state.idle_since_s = time.monotonic()
        if state.withdrawal is None and self._withdrawn_s.get(plan, -math.inf) >= requested_s:
            state.withdrawal = asyncio.Event()
            state.withdrawal.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._sweep())

    async def take(self, plans: Iterable[PlanSnapshotRef]) -> None:
        """Reserve the plans that a statement will read.

        The lease of a plan that is unknown or withdrawn is renewed, after the end of a running withdrawal. After an
        error or a cancellation, no plan is reserved.

        Raises:
            ClientError: The lease of a withdrawn plan cannot be renewed.
        """
        plans = list(plans)
        renewals: defaultdict[Name, list[int]] = defaultdict(list)
        withdrawals = []
        for plan in plans:
            state = self._plans.get(plan)
            if state is None or state.withdrawal is not None:
                renewals[plan[0]].append(plan[1])
                withdrawals += [state.withdrawal] if state is not None and state.withdrawal is not None else []
                state = self._plans[plan] = _State()
            state.statements += 1
        try:
            for event in withdrawals:
                await event.wait()
            for name, ids in renewals.items():
                await self._lease(name, ids, None)
        except BaseException:
            self.release(plans)
            raise

    def release(self, plans: Iterable[PlanSnapshotRef]) -> None:
        """Release the plans of a statement after Trino has analysed it, or after it has failed."""
        for plan in plans:
            state = self._plans.get(plan)
            if state is not None:
                state.statements = max(0, state.statements - 1)
                state.idle_since_s = time.monotonic()

    def forget(self, plans: Iterable[PlanSnapshotRef]) -> None:
        """Stop tracking plans, because it is unknown when Trino will analyse the statement.

        Their leases end by themselves.
        """
        for plan in plans:
            self._plans.pop(plan, None)

    async def withdraw_unused(self) -> None:
        """Withdraw all plans that no statement needs."""
        await self._withdraw(math.inf)

    async def _sweep(self) -> None:
        """Withdraw idle plans periodically, as long as there are plans. Forget withdrawals after `_REMEMBERED_S`."""
        while self._plans:
            await asyncio.sleep(self._idle_s / 2)
            now_s = time.monotonic()
            await self._withdraw(now_s - self._idle_s)
            self._withdrawn_s = {
                plan: withdrawn_s
                for plan, withdrawn_s in self._withdrawn_s.items()
                if now_s - withdrawn_s < _REMEMBERED_S
            }

    async def _withdraw(self, before_s: float) -> None:
        """Withdraw the plans that no statement has needed since `before_s`."""
        idle: defaultdict[Name, list[int]] = defaultdict(list)
        for (name, plan_id), state in self._plans.items():
            if not state.statements and state.idle_since_s <= before_s:
                idle[name].append(plan_id)
        for name, ids in idle.items():
            for start in range(0, len(ids), _WITHDRAWN_PLANS_PER_REQUEST):
                await self._withdraw_plans(name, ids[start : start + _WITHDRAWN_PLANS_PER_REQUEST])

    async def _withdraw_plans(self, name: Name, ids: list[int]) -> None:
        """Withdraw the plans of a table or view that no statement uses. A lease of 0 seconds withdraws a plan.

        A statement that reserves a plan in the meantime waits for the event of the withdrawal.
        """
        states = {plan: state for plan_id in ids if (state := self._plans.get(plan := (name, plan_id))) is not None}
        unused_plans = {plan: state for plan, state in states.items() if not state.statements}
        event = asyncio.Event()
        for state in unused_plans.values():
            state.withdrawal = event
        try:
            if unused_plans:
                await self._lease(name, [plan_id for _, plan_id in unused_plans], 0)
        except ClientError as error:
            _log.warning("plans were not withdrawn; they exist until their leases end", error=error.message)
        finally:
            event.set()
            for plan, state in unused_plans.items():
                self._withdrawn_s[plan] = time.monotonic()
                if self._plans.get(plan) is state:  # If the state differs, a statement has reserved the plan again.
                    del self._plans[plan]

    async def close(self) -> None:
        """Withdraw all plans."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for state in self._plans.values():
            state.statements = 0  # The proxy ends, so no statement of the proxy needs a plan.
        await self._withdraw(math.inf)  # The limit is infinite, so plans that were used just now are included.
