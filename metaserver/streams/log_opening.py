"""Opens the log of this process when it is first needed: most servers have no stream tables."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError, LogUnavailable
from seamark.metaserver.log.files import sync_folder
from seamark.metaserver.log.port import StreamLog


class LogElsewhere(LogUnavailable):
    """Another process has the log, or this process has another log: no reader has seen rows of it."""


_IDENTITY = "identity"


class LogSource:
    """Opens the log of this process. Belongs to one event loop.

    Attributes:
        identity: The identity of the open log; empty before it is open.
    """

    def __init__(
        self,
        stack: AsyncExitStack,
        open_log: Callable[[], AbstractAsyncContextManager[StreamLog]],
        exists: Callable[[], bool],
        read_identity: Callable[[], str],
    ) -> None:
        """Keep what `open_log_source` says."""
        self._stack = stack
        self._open_log = open_log
        self._exists = exists
        self._read_identity = read_identity
        self.identity = ""
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
                        log = await self._stack.enter_async_context(self._open_log())
                    except ConfigError as error:
                        raise LogElsewhere(error.message) from None
                    try:
                        self.identity = await asyncio.to_thread(self._read_identity)
                    except OSError as error:
                        await self._stack.aclose()
                        raise LogUnavailable(f"The identity of the log cannot be read: {error}") from error
                    self._log = log
        return self._log


@asynccontextmanager
async def open_log_source(
    open_log: Callable[[], AbstractAsyncContextManager[StreamLog]],
    exists: Callable[[], bool],
    read_identity: Callable[[], str],
) -> AsyncIterator[LogSource]:
    """Return a source of the log. If the log was opened, it is closed at the end of the block.

    Args:
        open_log: Opens the log.
        exists: Whether there is a log of an earlier process.
        read_identity: Returns the identity of the open log; blocks.
    """
    async with AsyncExitStack() as stack:
        yield LogSource(stack, open_log, exists, read_identity)


def read_identity(folder: Path, clock: Clock) -> str:
    """Return the identity of the log in a folder, which the caller has locked. A new log gets one.

    Raises:
        OSError: The disk fails.
    """
    path = folder / _IDENTITY
    if path.exists():
        return path.read_text()
    identity, temporary = str(clock.uuid4()), folder / f"{_IDENTITY}.new"
    with temporary.open("w") as file:
        file.write(identity)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(folder)
    return identity
