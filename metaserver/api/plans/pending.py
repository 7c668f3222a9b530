"""Running plans of asynchronous planning, and the last finished plans."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from seamark.formats.runtime.errors import TooManyRequests
from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

PENDING_LIMIT = 64
"""The number of running plans that clients poll, per worker. Beyond it, the request itself waits for the plan."""
FINISHED_LIMIT = 4
"""The number of finished plans that are kept for polling clients, each with its view of the snapshot."""

_Key = tuple[str, str]
"""Principal and plan id."""


class PendingPlans:
    """Belongs to one worker; no result depends on it. Equal requests have the same plan id, so each principal has its
    own plans, and cancels only these; the planner computes equal plans once."""

    def __init__(self) -> None:
        self._tasks: dict[_Key, asyncio.Task[ScanPlan]] = {}

    def is_full(self, who: str) -> bool:
        """Whether `who` has reached the limit: with logins, a principal has at most half of the places."""
        owners = [owner for (owner, _), task in self._tasks.items() if not task.done()]
        share = PENDING_LIMIT if who == ANONYMOUS_NAME else PENDING_LIMIT // 2
        return len(owners) >= PENDING_LIMIT or owners.count(who) >= share

    def start(self, plan_id: str, who: str, make: Callable[[], Awaitable[ScanPlan]]) -> asyncio.Task[ScanPlan]:
        """Starts the plan's task, which runs independently of the request. Also starts a plan that another worker has
        begun. TooManyRequests above the limit."""
        key = (who, plan_id)
        task = self._tasks.get(key)
        if task is None:
            if self.is_full(who):
                raise TooManyRequests("The limit of running plans of this principal is reached; retry in 5 s", 5)

            async def run() -> ScanPlan:
                return await make()

            task = self._tasks[key] = asyncio.create_task(run(), name="plan")
            task.add_done_callback(lambda done: self._finish(key, done))
        return task

    def cancel(self, plan_id: str, who: str) -> None:
        task = self._tasks.pop((who, plan_id), None)
        if task is not None:
            task.cancel()

    async def close(self, _: web.Application) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, key: _Key, task: asyncio.Task[ScanPlan]) -> None:
        """Keeps the latest plans for polling clients, because the planner may have evicted a large plan."""
        if self._tasks.get(key) is not task:
            return
        if task.cancelled() or task.exception() is not None:  # a poll repeats the plan and gets the error
            del self._tasks[key]
            return
        self._tasks[key] = self._tasks.pop(key)
        finished = [one for one, kept in self._tasks.items() if kept.done()]
        for one in finished[:-FINISHED_LIMIT]:
            del self._tasks[one]
