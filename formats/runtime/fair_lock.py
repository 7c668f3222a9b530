"""A lock for long work on input from clients, which runs in a thread, one task at a time. Clients alternate.

The work is Python code and shares the interpreter with the event loop. Several threads with this work would leave the
loop little time, and use the threads that all other work of the server needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

FREED_IN_LOOP_MAX = 10_000
"""The maximum number of objects that are freed in the event loop.

This takes a few milliseconds, which is too short to use a thread.
"""
_FREED_PER_STEP = 1000
"""The number of objects that the thread frees before other threads may run."""
_in_thread = asyncio.to_thread


class FairLock:
    """A lock for one task at a time. Each holder has only one place in the queue.

    A client that sends many requests waits for its earlier requests. The lock belongs to one event loop.
    """

    def __init__(self) -> None:
        self._common_lock = asyncio.Lock()
        self._locks_by_holder: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def hold(self, holder: str) -> AsyncIterator[None]:
        """Hold the lock for `holder` while the context is active.

        Each holder has its own lock, which it must have before it waits for the common lock. So a holder with many
        requests has only one place in the queue.
        """
        holder_lock = self._locks_by_holder.setdefault(holder, asyncio.Lock())
        async with holder_lock, self._common_lock:
            yield

    async def run(self, holder: str, work: Callable[[], T], *, group: str | None = None) -> T:
        """Run `work` in a thread, and return its result.

        The lock is held until the thread ends, even if the caller is cancelled earlier. A thread cannot be stopped, and
        a client that disconnects early must not have several threads.

        Args:
            holder: The client. It has only one place in the queue for the lock.
            work: A function that runs in the thread.
            group: A group of holders. See `run_to_end`.
        """
        return await self.run_to_end(holder, lambda: _in_thread(work), group=group)

    async def run_to_end(
        self, holder: str, start: Callable[[], Coroutine[Any, Any, T]], *, group: str | None = None
    ) -> T:
        """Wait for the lock, run the work that `start` returns to its end, and return its result.

        The lock is held until the work ends, even if the caller is cancelled earlier, because the work may have started
        a thread.

        Args:
            holder: The client. It has only one place in the queue for the lock.
            start: A function that returns the work.
            group: A group of holders, such as all holders of an address. A group has only one place in the queue too.
        """
        names = dict.fromkeys((holder,) if group is None else (holder, group))
        locks = [*(self._locks_by_holder.setdefault(name, asyncio.Lock()) for name in names), self._common_lock]
        acquired_locks: list[asyncio.Lock] = []
        try:
            for lock in locks:
                await lock.acquire()
                acquired_locks.append(lock)
        except BaseException:
            _release_locks(acquired_locks)
            raise
        task = asyncio.create_task(start())
        task.add_done_callback(lambda finished_task: _end_work(finished_task, acquired_locks))
        return await asyncio.shield(task)

    @property
    def is_free(self) -> bool:
        """Whether no work runs or waits. Only tests use this property."""
        return not self._common_lock.locked() and not any(lock.locked() for lock in self._locks_by_holder.values())


def free_later(*collections: Collection[object]) -> None:
    """Free the elements of large collections in a thread, some at a time.

    For hundreds of thousands of objects, this takes a tenth of a second, in which the event loop could not serve
    clients. The thread begins after the present step of the event loop, in which the caller removes its own references.
    """
    large_collections = [collection for collection in collections if len(collection) > FREED_IN_LOOP_MAX]
    if large_collections:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.run_in_executor(None, _drop_contents, large_collections))


def _drop_contents(collections: list[Collection[object]]) -> None:
    while collections:
        objects = list(collections.pop())
        while objects:  # Between these steps, the interpreter can run other threads.
            del objects[-_FREED_PER_STEP:]


def _end_work(task: asyncio.Task[T], locks: list[asyncio.Lock]) -> None:
    _release_locks(locks)
    if not task.cancelled():
        task.exception()  # Mark the error as retrieved, because the caller may have been cancelled.


def _release_locks(locks: list[asyncio.Lock]) -> None:
    for lock in reversed(locks):
        lock.release()
