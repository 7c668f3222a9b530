"""Single flight: however many ask for a key at once, one fetch runs, and all get what it brings or how it failed.

The rule it keeps: a waiter's cancellation is its own. The fetch runs in a task of its own that no caller's
cancellation reaches, until the last waiter has gone: then nobody wants the result and the fetch is cancelled.
Nothing is remembered after a flight lands: keeping results is the cache's business, and a failure is not a result.
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
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    def __len__(self) -> int:
        """Fetches in flight."""
        return len(self._flights)

    async def run(self, key: K, fetch: Callable[[], Awaitable[V]]) -> V:
        """What `fetch` returns or raises, or what the fetch already in flight for this key does.

        CancelledError when the caller is cancelled, or when the fetch cancels itself.
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
            # An error's traceback holds this frame, and the task the error: no cycle, so that what else it holds goes.
            del flight

    def _start(self, key: K, fetch: Callable[[], Awaitable[V]]) -> _Flight[V]:
        async def fly() -> V:
            return await fetch()

        flight = _Flight(asyncio.get_running_loop().create_task(fly(), name="single-flight"))
        flight.task.add_done_callback(lambda task: self._land(key, flight, task))
        return flight

    def _land(self, key: K, flight: _Flight[V], task: asyncio.Task[V]) -> None:
        self._forget(key, flight)
        if not task.cancelled():
            # Waiters cancelled in the same step leave nobody to take the error; asyncio would warn of it.
            task.exception()

    def _forget(self, key: K, flight: _Flight[V]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]

    def check_invariants(self) -> None:
        """AssertionError when a landed or abandoned flight is still listed. For tests."""
        for key, flight in self._flights.items():
            assert not flight.task.cancelled(), f"the flight for {key!r} was cancelled and is still listed"
            assert flight.waiters >= 0, f"the flight for {key!r} counts {flight.waiters} waiters"
