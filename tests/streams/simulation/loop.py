"""An event loop whose time is simulated: it never waits, and the same program runs in the same order each time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from seamark.formats.runtime.clock import SimulatedClock

TIME_MAX_S = 600
"""The longest simulated time of one run."""


class _NoSockets:
    """Replaces the selector of the event loop: instead of waiting for sockets, it moves the simulated time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits for another task: a deadlock")
        self._loop.pass_time(timeout)
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs tasks in the order in which they become ready."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock = clock
        self._clock_ms = 0
        self._selector = _NoSockets(self)
        self.steps = 0

    def time(self) -> float:
        return self._now_s

    def pass_time(self, seconds: float) -> None:
        """Move the loop's time and the clock ahead. The clock counts whole milliseconds."""
        self.steps += 1
        if self._now_s > TIME_MAX_S:
            raise RuntimeError("the run exceeds its simulated time")
        self._now_s += seconds
        passed_ms = int(self._now_s * 1000) - self._clock_ms
        if passed_ms > 0:
            self._clock.advance(passed_ms)
            self._clock_ms += passed_ms

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_simulated(clock: SimulatedClock, main: Coroutine[Any, Any, None]) -> int:
    """Run `main` and return the number of steps of time."""
    loop = SimulatedLoop(clock)
    asyncio.set_event_loop(None)
    try:
        task = loop.create_task(main)
        loop.run_until_complete(task)
    finally:
        waiting = asyncio.all_tasks(loop)
        for each in waiting:
            each.cancel()
        if waiting:
            loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    return loop.steps
