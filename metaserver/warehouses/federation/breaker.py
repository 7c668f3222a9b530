"""Refuses requests to the other catalog at once while it does not answer.

The first request that gets no answer opens the breaker. Then no request of a client waits for the other catalog. A task
sends its own request from time to time, and closes the breaker when the other catalog answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from seamark.formats.runtime.errors import RetryLater

PAUSE_S = 0.5
"""The pause before the first attempt to reach the other catalog again. It doubles with each attempt."""
_PAUSE_S_MAX = 10.0


class CatalogBreaker:
    """The breaker of one catalog. An instance belongs to one event loop.

    Args:
        is_answering: Sends a request to the other catalog, and returns whether it answers.
    """

    def __init__(self, is_answering: Callable[[], Awaitable[bool]]) -> None:
        self._is_answering = is_answering
        self._message = ""
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Return if requests can be sent.

        Raises:
            RetryLater: The other catalog does not answer.
        """
        if self._task is not None:
            raise RetryLater(self._message)

    def open(self, message: str) -> None:
        """Refuse requests with this message until the other catalog answers."""
        if self._task is None:
            self._message = message
            self._task = asyncio.create_task(self._wait_for_answer(), name="federation breaker")

    async def close(self) -> None:
        """End the task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _wait_for_answer(self) -> None:
        pause_s = PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            if await self._is_answering():
                self._task = None
                return
            pause_s = min(_PAUSE_S_MAX, 2 * pause_s)
