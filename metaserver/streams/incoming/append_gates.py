"""Orders appends and the commits that change how rows are written, so that no append overlaps such a commit.

An append compares its rows with the schema of the table, and then the log stores them. If a commit changed the schema
in between, the log would have rows that the table may no longer accept, for example rows without a column that has
become required. So such a commit waits until the running appends to its tables have ended, and later appends wait until
the commit has ended. They then compare their rows with the new schema.

The gates belong to one process. `TableGates` adds gates for all processes with a shared log.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from seamark.formats.runtime.errors import RetryLater

APPEND_WAIT_S = 5.0
"""The maximum time for which an append waits for commits, from the arrival of its rows."""
CHANGE_WAIT_S = 10.0
"""The maximum time for which a commit waits for running appends and other commits."""


class AppendGates:
    """The gates of all tables. An instance belongs to one event loop.

    Several gates are entered in one step, so that appends and commits of several tables never wait for each other.
    """

    def __init__(self) -> None:
        self._append_counts: Counter[str] = Counter()
        """The number of running appends, by the UUID of the table."""
        self._changing: set[str] = set()
        """The UUIDs of the tables that a commit changes."""
        self._ended = asyncio.Event()
        """An event that is set, and replaced, when appends or a commit for which others wait have ended."""

    @property
    def changing_uuids(self) -> Collection[str]:
        """The UUIDs of the tables whose gates are closed for appends."""
        return self._changing

    @asynccontextmanager
    async def hold_commits(self, uuids: Collection[str], arrived_s: float | None = None) -> AsyncIterator[None]:
        """Block commits that change how rows of the tables are written, such as their schemas, during an append.

        The commits are blocked while the context is active. If such a commit is running, first wait until it ends.

        Args:
            uuids: The UUIDs of the tables.
            arrived_s: When the rows arrived, by the clock of the event loop. The time since then counts for the maximum
                wait. The default is now.

        Raises:
            RetryLater: A commit takes too long.
        """
        if not self._changing.isdisjoint(uuids):
            now_s = asyncio.get_running_loop().time()
            await self._wait(
                lambda: self._changing.isdisjoint(uuids),
                APPEND_WAIT_S - (0 if arrived_s is None else now_s - arrived_s),
                "A commit changes the schema of the stream table; send the rows again",
            )
        self._append_counts.update(uuids)
        try:
            yield
        finally:
            self._append_counts.subtract(uuids)
            for uuid in uuids:
                if not self._append_counts[uuid]:
                    del self._append_counts[uuid]
            if not self._changing.isdisjoint(uuids):  # A commit waits until the appends have ended.
                self._wake()

    @asynccontextmanager
    async def hold_appends(self, uuids: Collection[str]) -> AsyncIterator[None]:
        """Block appends to the tables while the context is active. First wait until running appends have ended.

        Raises:
            RetryLater: Running appends or other commits take too long.
        """
        message = "Appends to the stream table take too long; repeat the commit later"
        await self._wait(lambda: self._changing.isdisjoint(uuids), CHANGE_WAIT_S, message)
        self._changing.update(uuids)
        try:
            await self._wait(lambda: not any(uuid in self._append_counts for uuid in uuids), CHANGE_WAIT_S, message)
            yield
        finally:
            self._changing.difference_update(uuids)
            self._wake()

    async def _wait(self, is_ready: Callable[[], bool], limit_s: float, message: str) -> None:
        """Wait until a condition holds.

        Raises:
            RetryLater: The condition did not hold in time. The error has the message.
        """
        try:
            async with asyncio.timeout(limit_s):
                while not is_ready():
                    await self._ended.wait()
        except TimeoutError:
            raise RetryLater(message) from None

    def _wake(self) -> None:
        """Let all waiting tasks check their conditions.

        Tasks that wait again use a new event, because the set event would wake them at once.
        """
        self._ended.set()
        self._ended = asyncio.Event()
