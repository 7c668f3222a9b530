"""Plans that are being made while their client waits elsewhere, and the last few of them that are finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from metaserver.access.principal import ANONYMOUS_NAME
from metaserver.errors import TooManyRequests
from metaserver.planner.scan.scan import Scan

PENDING_LIMIT = 64
"""Plans being made for clients that come back, per worker; more are waited for at once."""
FINISHED_LIMIT = 4
"""Finished plans kept for clients that come back, each with its view of the snapshot."""


class Pending:
    """Belongs to one worker; nothing depends on it."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Scan]] = {}
        self._owners: dict[str, str] = {}

    def is_full(self, who: str) -> bool:
        """Whether `who` may have no other plan made now: nobody has more than half of the places, but where there are
        no logins."""
        owners = [self._owners[plan_id] for plan_id, task in self._tasks.items() if not task.done()]
        share = PENDING_LIMIT if who == ANONYMOUS_NAME else PENDING_LIMIT // 2
        return len(owners) >= PENDING_LIMIT or owners.count(who) >= share

    def start(self, plan_id: str, who: str, make: Callable[[], Awaitable[Scan]]) -> asyncio.Task[Scan]:
        """The plan's task, which goes on by itself. A plan that another worker began is begun here, too.

        TooManyRequests where that one is too many."""
        task = self._tasks.get(plan_id)
        if task is None:
            if self.is_full(who):
                raise TooManyRequests("Too many plans are being made for you; ask again when one is finished", 5)
            self._owners[plan_id] = who

            async def run() -> Scan:
                return await make()

            task = self._tasks[plan_id] = asyncio.create_task(run(), name="plan")
            task.add_done_callback(lambda done: self._finish(plan_id, done))
        return task

    def cancel(self, plan_id: str) -> None:
        task = self._tasks.pop(plan_id, None)
        self._owners.pop(plan_id, None)
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
            del self._tasks[plan_id], self._owners[plan_id]
            return
        self._tasks[plan_id] = self._tasks.pop(plan_id)
        finished = [key for key, kept in self._tasks.items() if kept.done()]
        for key in finished[:-FINISHED_LIMIT]:
            del self._tasks[key], self._owners[key]
