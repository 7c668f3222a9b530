"""Refuses requests to the other catalog at once while it does not answer.

After a request without an answer, a task sends its own request, because only one object of the other catalog may be
slow. If this request gets no answer either, the breaker opens, and no request of a client waits for the other catalog.
The task sends its request from time to time, and closes the breaker when the other catalog answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from seamark.formats.runtime.errors import RetryLater

PAUSE_S = 0.5
"""The pause before the first attempt to reach the other catalog again. It doubles with each attempt."""
_PAUSE_S_MAX = 10.0
_log = structlog.get_logger("seamark.warehouses")


class CatalogBreaker:
    """The breaker of one catalog. An instance belongs to one event loop."""

    def __init__(self, is_answering: Callable[[], Awaitable[bool]]) -> None:
        """Create a breaker that permits requests.

        The breaker is open, and refuses requests with `_message`, while the other catalog does not answer.
        `_is_closed` means that `close` was called, and the breaker sends no more requests.

        Args:
            is_answering: Sends a request to the other catalog, and returns whether it answers.
        """
        self._is_answering = is_answering
        self._message = ""
        self._is_open = False
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Check that requests to the federated catalog are not paused.

        Raises:
            RetryLater: The federated catalog has not answered, so requests to it are paused.
        """
        if self._is_open:
            raise RetryLater(self._message)

    def report_failure(self, message: str) -> None:
        """Start a task that checks whether the other catalog answers. If not, requests are refused until it does.

        Nothing happens if the task already runs, or after `close`.

        Args:
            message: The message of the refusals.
        """
        if self._task is None and not self._is_closed:
            self._message = message
            self._task = asyncio.create_task(self._watch(), name="federation breaker")

    async def close(self) -> None:
        """End the task that probes the other catalog. After later failures, no new task is started."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        """Keep the breaker open while the other catalog does not answer."""
        pause_s = PAUSE_S
        try:
            while not await self._probe():
                self._is_open = True
                await asyncio.sleep(pause_s)
                pause_s = min(_PAUSE_S_MAX, 2 * pause_s)
        finally:
            self._is_open, self._task = False, None

    async def _probe(self) -> bool:
        """Return whether the federated catalog, from which the warehouse reads its names, answers now."""
        try:
            return await self._is_answering()
        except Exception as error:  # noqa: BLE001  the task must not end while requests are paused
            _log.error("a request to the catalog of a warehouse failed unexpectedly", exc_info=error)
            return False
