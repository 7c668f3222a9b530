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


class _Flight(Generic[V]):
    __slots__ = ("task", "waiters")

    def __init__(self, task: asyncio.Task[V]) -> None:
        self.task = task
        self.waiters = 0


class SingleFlight(Generic[K, V]):
    """The running fetches by key. An instance belongs to one event loop."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        """Return the number of running fetches."""
        return len(self._flights)

    async def run(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """Return the result of the running fetch for this key. If no fetch runs, start `fetch`.

        An error of the fetch is raised for all its waiters.

        Raises:
            CancelledError: The caller is cancelled, or the fetch cancels itself.
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = self._start(key, fetch)
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0 and not flight.task.done():
                # Later callers must not join a flight that is being cancelled.
                self._forget(key, flight)
                flight.task.cancel()
            # The traceback of an error references this frame, and the task references the error. Break this cycle.
            del flight

    def _start(self, key: K, fetch: Callable[[], Awaitable[V]]) -> _Flight[V]:
        async def run_fetch() -> V:
            return await fetch()

        flight = _Flight(asyncio.get_running_loop().create_task(run_fetch(), name="single-flight"))
        flight.task.add_done_callback(lambda task: self._end_flight(key, flight, task))
        return flight

    def _end_flight(self, key: K, flight: _Flight[V], task: asyncio.Task[V]) -> None:
        self._forget(key, flight)
        if not task.cancelled():
            # Otherwise, asyncio would warn about an unretrieved error if all waiters were cancelled in the same step.
            task.exception()

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def check_invariants(self) -> None:
        """Check that no finished or abandoned fetch is still listed. Only tests call this.

        Raises:
            AssertionError: A finished or abandoned fetch is listed.
        """
        for key, flight in self._flights.items():
            assert not flight.task.cancelled(), f"the flight for {key!r} was cancelled and is still listed"
            assert flight.waiters >= 0, f"the flight for {key!r} counts {flight.waiters} waiters"
