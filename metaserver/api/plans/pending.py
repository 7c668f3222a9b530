"""The running plans of asynchronous planning, and the last finished plans."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from seamark.formats.runtime.errors import TooManyRequests
from seamark.metaserver.access.principal import ANONYMOUS_NAME
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

PENDING_PLANS_MAX = 64
"""The maximum number of running plans that clients poll, for each worker.

If the limit is reached, the request itself waits for its plan.
"""
FINISHED_PLANS_MAX = 4
"""The maximum number of finished plans that are kept for polling clients, each with its view of the snapshot."""

_Key = tuple[str, str]
"""The plan id and the name of the principal."""


class PendingPlans:
    """The running and finished plans of one worker. A poll that does not find its plan here starts it again.

    Equal requests have the same plan id. Each principal has its own plans, so that it can cancel only its own. The
    planner computes equal plans only once.
    """

    def __init__(self) -> None:
        self._tasks: dict[_Key, asyncio.Task[ScanPlan]] = {}

    def is_full(self, principal_name: str) -> bool:
        """Return whether a principal has reached the limit of running plans.

        If the server has logins, the limit of a principal is half of the limit of the worker.
        """
        owners = [owner for (owner, _), task in self._tasks.items() if not task.done()]
        share = PENDING_PLANS_MAX if principal_name == ANONYMOUS_NAME else PENDING_PLANS_MAX // 2
        return len(owners) >= PENDING_PLANS_MAX or owners.count(principal_name) >= share

    def start(
        self, plan_id: str, principal_name: str, make_plan: Callable[[], Awaitable[ScanPlan]]
    ) -> asyncio.Task[ScanPlan]:
        """Start the task of a plan, or return the existing task.

        The task is independent of the request, and is started even if a different worker has begun the same plan.

        Raises:
            TooManyRequests: The principal has reached the limit.
        """
        key = (principal_name, plan_id)
        task = self._tasks.get(key)
        if task is None:
            if self.is_full(principal_name):
                raise TooManyRequests("This principal has reached its limit of running plans; retry in 5 s", 5)

            async def run() -> ScanPlan:
                return await make_plan()

            task = self._tasks[key] = asyncio.create_task(run(), name="plan")
            task.add_done_callback(lambda finished_task: self._keep_finished_plan(key, finished_task))
        return task

    def cancel(self, plan_id: str, principal_name: str) -> None:
        task = self._tasks.pop((principal_name, plan_id), None)
        if task is not None:
            task.cancel()

    async def close(self, _: web.Application) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep_finished_plan(self, key: _Key, task: asyncio.Task[ScanPlan]) -> None:
        """Keep the latest finished plans for polling clients, because the planner may have evicted large plans."""
        if self._tasks.get(key) is not task:
            return
        if task.cancelled() or task.exception() is not None:  # The next poll repeats the plan, and receives the error.
            del self._tasks[key]
            return
        self._tasks[key] = self._tasks.pop(key)  # Move the task to the end, so that the oldest finished plan is first.
        finished_keys = [finished_key for finished_key, finished_task in self._tasks.items() if finished_task.done()]
        for finished_key in finished_keys[:-FINISHED_PLANS_MAX]:
            del self._tasks[finished_key]
