"""Shares reads of the database between concurrent requests. Each request gets a read that began after its call.

A request that comes while a read runs waits for the next read, because a commit may have ended after the running read
began. So at most two reads of a key exist: one that runs, and one for which all later requests wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from seamark.metaserver.runtime.staleness import get_current_staleness

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedReads(Generic[K, V]):
    """Reads that concurrent callers share, by key. An instance belongs to one event loop.

    A caller joins the next read of its key, and not the running read, which may have begun before a change that the
    caller knows. So there are at most two reads of a key: the running read, and the next read for all later callers.
    """

    def __init__(self, read: Callable[[K], Awaitable[V]]) -> None:
        self._read = read
        self._running: dict[K, asyncio.Task[V]] = {}
        self._next: dict[K, asyncio.Task[V]] = {}

    async def load(self, key: K) -> V:
        """Return the result of a read that begins after the call. All callers of a read also share its error.

        A request that allows stale answers reads alone, because other requests must not get its answer.
        """
        if get_current_staleness() is not None:
            return await self._read(key)
        task = self._next.get(key)
        if task is None:
            task = self._next[key] = asyncio.create_task(self._read_after(key, self._running.get(key)))
            task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)

    async def _read_after(self, key: K, earlier: asyncio.Task[V] | None) -> V:
        """Read after an earlier read of the key has ended."""
        if earlier is not None:
            await asyncio.wait((earlier,))
        task = self._next.pop(key)
        self._running[key] = task
        try:
            return await self._read(key)
        finally:
            if self._running.get(key) is task:
                del self._running[key]

    def close(self) -> None:
        """Cancel all reads."""
        for task in (*self._running.values(), *self._next.values()):
            task.cancel()


def _retrieve_error(task: asyncio.Task[V]) -> None:
    """Mark the error of a read as retrieved, because all its callers may have been cancelled."""
    if not task.cancelled():
        task.exception()
