"""Single flight: concurrent requests for a key share one fetch and its result or error.

The rule: cancelling a waiter cancels only that waiter. The fetch runs in a separate task, which is cancelled when its
last waiter is cancelled. Results are not stored, because storing is the task of a cache, and errors are never stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _SharedFetch(Generic[V]):
    """A running fetch, and the number of callers that wait for its result."""

    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[K, V]):
    """The running fetches by key. An instance belongs to one event loop."""

    def __init__(self) -> None:
        self._fetches: dict[K, _SharedFetch[V]] = {}

    def __len__(self) -> int:
        """Return the number of running fetches."""
        return len(self._fetches)

    async def run(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return the result of the running fetch for this key. If no fetch runs, start `fetch`.

        An error of the fetch is raised for all its waiters.

        Raises:
            CancelledError: The caller is cancelled, or the fetch cancels itself.
        """
        shared_fetch = self._fetches.get(key)
        if shared_fetch is None:
            shared_fetch = self._fetches[key] = self._start(key, fetch)
        shared_fetch.waiters += 1
        try:
            return await asyncio.shield(shared_fetch.task)
        finally:
            shared_fetch.waiters -= 1
            if shared_fetch.waiters == 0 and not shared_fetch.task.done():
                # Later callers must not join a fetch that is being cancelled.
                self._forget(key, shared_fetch)
                shared_fetch.task.cancel()
            # The traceback of an error references this frame, and the task references the error. Break this cycle.
            del shared_fetch

    def _start(self, key: K, fetch: Callable[[], Awaitable[V]]) -> _SharedFetch[V]:
        async def run_fetch() -> V:
            return await fetch()

        shared_fetch = _SharedFetch(asyncio.get_running_loop().create_task(run_fetch(), name="single-flight"))
        shared_fetch.task.add_done_callback(lambda task: self._end_fetch(key, shared_fetch, task))
        return shared_fetch

    def _end_fetch(self, key: K, shared_fetch: _SharedFetch[V], task: asyncio.Task[V]) -> None:
        """Remove a finished fetch from the running fetches."""
        self._forget(key, shared_fetch)
        if not task.cancelled():
            # Otherwise, asyncio would warn about an unretrieved error if all waiters were cancelled in the same step.
            task.exception()

    def _forget(self, key: K, shared_fetch: _SharedFetch[V]) -> None:
        if self._fetches.get(key) is shared_fetch:
            del self._fetches[key]

    def check_invariants(self) -> None:
        """Check that no cancelled fetch is still listed, and that no fetch has a negative number of waiters.

        Only tests call this.

        Raises:
            AssertionError: One of the conditions is not met.
        """
        for key, shared_fetch in self._fetches.items():
            assert not shared_fetch.task.cancelled(), f"the fetch for {key!r} was cancelled and is still listed"
            assert shared_fetch.waiters >= 0, f"the fetch for {key!r} counts {shared_fetch.waiters} waiters"
