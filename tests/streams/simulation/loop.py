"""An event loop with simulated time. It never waits, and the same program always runs in the same order."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVarTuple

from seamark.formats.runtime.clock import SimulatedClock

_Ts = TypeVarTuple("_Ts")
TIME_MAX_S = 600
"""The maximum simulated time of one run, in seconds."""
_TIMERS_MIN, _CANCELLED_MAX = 100, 0.5
"""The loop removes all cancelled timers if it has more timers, and if a larger share of them is cancelled."""


class _Call:
    """A callback that the loop runs once. It replaces asyncio's handles, which take a third of the time of a run."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "is_timer", "loop")

    def __init__(
        self, loop: SimulatedLoop, callback: Callable[..., Any], args: Any, context: Context | None, *, is_timer: bool
    ) -> None:
        self.loop = loop
        self.is_timer = is_timer
        self.callback = callback
        self.args = args
        self.context = copy_context() if context is None else context
        self.is_cancelled = False

    def __lt__(self, other: _Call) -> bool:
        """Return False, because calls with the same time have no defined order."""
        return False

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            self.loop.cancelled_count += self.is_timer

    def cancelled(self) -> bool:
        return self.is_cancelled


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop that runs tasks in the order in which they become ready.

    The order equals that of asyncio's own loop, so a seed gives the same run with both loops.
    """

    _ready: deque[_Call]
    _stopping: bool
    _clock_resolution: float

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock = clock
        self._clock_ms = 0
        self._timers: list[tuple[float, _Call]] = []
        self.cancelled_count = 0
        """The number of timers that are cancelled but not removed yet."""
        self.steps = 0

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None) -> Any:
        call = _Call(self, callback, args, context, is_timer=False)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon

    def call_at(
        self, call_time_s: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> Any:
        call = _Call(self, callback, args, context, is_timer=True)
        heapq.heappush(self._timers, (call_time_s, call))
        return call

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """Run all ready calls. If no call is ready, move the simulated time to the next timer first."""
        self._remove_cancelled()
        timers, ready_calls = self._timers, self._ready
        self.steps += 1
        if not ready_calls and not self._stopping:
            if not timers:
                raise RuntimeError("deadlock: every task waits for another task")
            next_time_s, _ = timers[0]
            self._pass_time(max(0, next_time_s - self._now_s))
        end_s = self._now_s + self._clock_resolution
        while timers:
            time_s, call = timers[0]
            if time_s >= end_s:
                break
            heapq.heappop(timers)
            call.is_timer = False
            ready_calls.append(call)
        for _ in range(len(ready_calls)):
            call = ready_calls.popleft()
            if not call.is_cancelled:
                call.context.run(call.callback, *call.args)

    def _remove_cancelled(self) -> None:
        """Remove cancelled timers by the rules of asyncio.

        The removal determines the order of timers with the same time.
        """
        timers = self._timers
        if len(timers) > _TIMERS_MIN and self.cancelled_count > len(timers) * _CANCELLED_MAX:
            self._timers = [(time_s, call) for time_s, call in timers if not call.is_cancelled]
            heapq.heapify(self._timers)
            self.cancelled_count = 0
        else:
            while timers:
                _, next_call = timers[0]
                if not next_call.is_cancelled:
                    break
                heapq.heappop(timers)
                self.cancelled_count -= 1

    def _pass_time(self, seconds: float) -> None:
        """Advance the loop's time and the clock. The clock counts whole milliseconds."""
        if self._now_s > TIME_MAX_S:
            raise RuntimeError("the run exceeds the maximum simulated time")
        self._now_s += seconds
        passed_ms = int(self._now_s * 1000) - self._clock_ms
        if passed_ms > 0:
            self._clock.advance(passed_ms)
            self._clock_ms += passed_ms


def run_simulated(clock: SimulatedClock, main_coroutine: Coroutine[Any, Any, None]) -> int:
    """Run `main_coroutine` in a simulated loop. Return the number of iterations of the loop."""
    loop = SimulatedLoop(clock)
    asyncio.set_event_loop(None)
    try:
        task = loop.create_task(main_coroutine)
        loop.run_until_complete(task)
    finally:
        waiting_tasks = asyncio.all_tasks(loop)
        for waiter in waiting_tasks:
            waiter.cancel()
        if waiting_tasks:
            loop.run_until_complete(asyncio.gather(*waiting_tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    return loop.steps
