"""Opens the log of this process when it is first needed: most servers have no stream tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from seamark.formats.runtime.errors import ConfigError, LogUnavailable
from seamark.metaserver.log.port import StreamLog


class LogElsewhere(LogUnavailable):
    """Another process has the log, or this process has another log: no reader has seen rows of it."""


class LogSource:
    """Opens the log of this process. Belongs to one event loop."""

    def __init__(
        self,
        stack: AsyncExitStack,
        open_log: Callable[[], AbstractAsyncContextManager[StreamLog]],
        exists: Callable[[], bool],
    ) -> None:
        """Keep what `open_log_source` says."""
        self._stack = stack
        self._open_log = open_log
        self._exists = exists
        self._lock = asyncio.Lock()
        self._log: StreamLog | None = None

    @property
    def exists(self) -> bool:
        """Return whether the log is open, or an earlier process has left a log."""
        return self._log is not None or self._exists()

    async def open(self) -> StreamLog:
        """Return the log.

        Raises:
            LogElsewhere: Another process uses the log.
            LogUnavailable: The disk fails.
        """
        if self._log is None:
            async with self._lock:
                if self._log is None:
                    try:
                        self._log = await self._stack.enter_async_context(self._open_log())
                    except ConfigError as error:
                        raise LogElsewhere(error.message) from None
        return self._log


@asynccontextmanager
async def open_log_source(
    open_log: Callable[[], AbstractAsyncContextManager[StreamLog]], exists: Callable[[], bool]
) -> AsyncIterator[LogSource]:
    """Return a source of the log. If the log was opened, it is closed at the end of the block.

    Args:
        open_log: Opens the log.
        exists: Whether there is a log of an earlier process.
    """
    async with AsyncExitStack() as stack:
        yield LogSource(stack, open_log, exists)
