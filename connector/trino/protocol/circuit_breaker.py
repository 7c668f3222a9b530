"""A circuit breaker: after some failures in a row nobody is asked for a while, which doubles while trials fail.

Closed, all ask. Open, nobody does. When its time is over, one asks as a trial: success closes it, failure opens it for
twice as long. Single-threaded, like the event loop that owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES_MAX = 5
PATIENCE_S, PATIENCE_MAX_S = 1.0, 60.0


class Breaker:
    """`now` is a clock that never steps back, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures = 0
        self._patience_s = PATIENCE_S
        self._open_until_s: float | None = None
        self._trial = False

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def may_ask(self) -> bool:
        """Whoever gets True asks, and says what came of it: `succeeded` or `failed`."""
        if self._open_until_s is None:
            return True
        if self._now() < self._open_until_s:
            return False
        # The trial is this one's. Should it never say what came of it, another one follows.
        self._open_until_s, self._trial = self._now() + self._patience_s, True
        return True

    def succeeded(self) -> None:
        self._failures, self._patience_s, self._open_until_s, self._trial = 0, PATIENCE_S, None, False

    def failed(self) -> None:
        if self._open_until_s is not None and not self._trial:
            return  # asked before it opened: nothing new
        self._failures += 1
        if self._trial:
            self._patience_s = min(2 * self._patience_s, PATIENCE_MAX_S)
        if self._trial or self._failures >= FAILURES_MAX:
            self._open_until_s, self._trial = self._now() + self._patience_s, False
