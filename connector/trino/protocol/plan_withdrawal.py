"""Plans that this proxy has had made, and those of them that no statement needs any more.

A plan is shown to Trino as a snapshot of its table, so the catalog's answers grow with each that is shown. A statement
needs its plans until Trino has analysed it. Some time after, the plans of all statements that are done are withdrawn,
one request for each table. What a statement was answered and then did not use is withdrawn in the same way. A proxy
that dies leaves its plans to their leases.

The catalog shares a plan among the statements of one proxy. So a plan may be asked for while it is being withdrawn: the
statement that takes it waits for that, and has it leased again first.
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
"""Repeated statements share a plan for so long without the catalog having to write anything."""
_AT_ONCE = 500
_REMEMBERED_S = 60.0
_KNOWN_MAX = 100_000
"""Beyond that many, plans are left to their leases."""
_log = structlog.get_logger("seamark.trino-proxy")

Plan = tuple[Name, int]
"""The table, or the view, and the plan's id."""
Lease = Callable[[Name, list[int], int | None], Awaitable[None]]


@dataclass(slots=True)
class _State:
    statements: int = 0
    idle_since_s: float = 0.0
    left: asyncio.Event | None = None
    """Set once it is withdrawn; None while it is shown."""


class Withdrawing:
    """Belongs to one event loop. `lease` is the catalog's: without seconds it renews, with 0 it withdraws."""

    def __init__(self, lease: Lease, idle_s: float = IDLE_S) -> None:
        self._lease = lease
        self._idle_s = idle_s
        self._plans: dict[Plan, _State] = {}
        self._gone_s: dict[Plan, float] = {}
        """When plans were withdrawn lately."""
        self._task: asyncio.Task[None] | None = None

    def note(self, plan: Plan, asked_s: float) -> None:
        """The catalog has answered with this plan. `asked_s`: when the question was sent, by the monotonic clock."""
        if len(self._plans) >= _KNOWN_MAX:
            return
        state = self._plans.setdefault(plan, _State())
        state.idle_since_s = time.monotonic()
        if state.left is None and self._gone_s.get(plan, -math.inf) >= asked_s:
            state.left = asyncio.Event()
            state.left.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._sweep())

    async def take(self, plans: Iterable[Plan]) -> None:
        """A statement is to read these. ClientError where one that was withdrawn meanwhile does not come back; on any
        error, and where it is cancelled, none of them is taken."""
        plans = list(plans)
        again: defaultdict[Name, list[int]] = defaultdict(list)
        leaving = []
        for plan in plans:
            state = self._plans.get(plan)
            if state is None or state.left is not None:
                again[plan[0]].append(plan[1])
                leaving += [state.left] if state is not None and state.left is not None else []
                state = self._plans[plan] = _State()
            state.statements += 1
        try:
            for event in leaving:
                await event.wait()
            for of, ids in again.items():
                await self._lease(of, ids, None)
        except BaseException:
            self.release(plans)
            raise

    def release(self, plans: Iterable[Plan]) -> None:
        """Trino has analysed the statement that took these, or it has failed."""
        for plan in plans:
            state = self._plans.get(plan)
            if state is not None:
                state.statements = max(0, state.statements - 1)
                state.idle_since_s = time.monotonic()

    def forget(self, plans: Iterable[Plan]) -> None:
        """Nobody knows when Trino will have analysed the statement: its plans are left to their leases."""
        for plan in plans:
            self._plans.pop(plan, None)

    async def flush(self) -> None:
        """Withdraws all that no statement needs now."""
        await self._withdraw(math.inf)

    async def _sweep(self) -> None:
        """As long as there are plans."""
        while self._plans:
            await asyncio.sleep(self._idle_s / 2)
            now_s = time.monotonic()
            await self._withdraw(now_s - self._idle_s)
            self._gone_s = {plan: at_s for plan, at_s in self._gone_s.items() if now_s - at_s < _REMEMBERED_S}

    async def _withdraw(self, before_s: float) -> None:
        """Those that no statement has needed since."""
        idle: defaultdict[Name, list[int]] = defaultdict(list)
        for (of, plan_id), state in self._plans.items():
            if not state.statements and state.idle_since_s <= before_s:
                idle[of].append(plan_id)
        for of, ids in idle.items():
            for first in range(0, len(ids), _AT_ONCE):
                await self._withdraw_of(of, ids[first : first + _AT_ONCE])

    async def _withdraw_of(self, of: Name, ids: list[int]) -> None:
        found = {plan: state for one in ids if (state := self._plans.get(plan := (of, one))) is not None}
        leaving = {plan: state for plan, state in found.items() if not state.statements}
        event = asyncio.Event()
        for state in leaving.values():
            state.left = event
        try:
            if leaving:
                await self._lease(of, [plan_id for _, plan_id in leaving], 0)
        except ClientError as error:
            _log.warning("plans were not withdrawn; their leases will end", error=error.message)
        finally:
            event.set()
            for plan, state in leaving.items():
                self._gone_s[plan] = time.monotonic()
                if self._plans.get(plan) is state:  # else a statement has taken it meanwhile
                    del self._plans[plan]

    async def close(self) -> None:
        """Withdraws all."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for state in self._plans.values():
            state.statements = 0
        await self._withdraw(math.inf)
