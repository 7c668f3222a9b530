"""Plans that are being made while their client waits elsewhere, and the last few of them that are finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from metaserver.planner.scan import Scan

PENDING_LIMIT = 64
"""Plans being made for clients that come back, per worker; more are waited for at once."""
FINISHED_LIMIT = 4
"""Finished plans kept for clients that come back, each with its view of the snapshot."""


class Pending:
    """Belongs to one worker; nothing depends on it."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Scan]] = {}

    @property
    def full(self) -> bool:
        return sum(not task.done() for task in self._tasks.values()) >= PENDING_LIMIT

    def start(self, plan_id: str, make: Callable[[], Awaitable[Scan]]) -> asyncio.Task[Scan]:
        """The plan's task, which goes on by itself. A plan that another worker began is begun here, too."""
        task = self._tasks.get(plan_id)
        if task is None:

            async def run() -> Scan:
                return await make()

            task = self._tasks[plan_id] = asyncio.create_task(run(), name="plan")
            task.add_done_callback(lambda done: self._finish(plan_id, done))
        return task

    def cancel(self, plan_id: str) -> None:
        task = self._tasks.pop(plan_id, None)
        if task is not None:
            task.cancel()

    async def close(self, _: web.Application) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finish(self, plan_id: str, task: asyncio.Task[Scan]) -> None:
        """Keeps the latest plans for those who come back: the planner may have let a large one go already."""
        if self._tasks.get(plan_id) is not task:
            return
        if task.cancelled() or task.exception() is not None:  # met again by who asks
            del self._tasks[plan_id]
            return
        self._tasks[plan_id] = self._tasks.pop(plan_id)
        finished = [key for key, kept in self._tasks.items() if kept.done()]
        for key in finished[:-FINISHED_LIMIT]:
            del self._tasks[key]
