"""A circuit breaker. After several failures in a row, it blocks calls for a time, which doubles with each failed trial.

If the breaker is closed, all calls are allowed. If it is open, no call is allowed. When the time is over, one call is
allowed as a trial. A successful trial closes the breaker. A failed trial opens the breaker for twice the time. A
breaker belongs to one event loop and is not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES_MAX = 5
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0


class Breaker:
    """A circuit breaker.

    Attributes:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures = 0
        self._backoff_s = BACKOFF_S
        self._open_until_s: float | None = None
        self._trial = False

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def allow_request(self) -> bool:
        """Return whether the call is allowed.

        After an allowed call, the caller reports the outcome with `record_success` or `record_failure`.
        """
        if self._open_until_s is None:
            return True
        if self._now() < self._open_until_s:
            return False
        # This call is the trial. If it never reports an outcome, another trial is allowed after the same time.
        self._open_until_s, self._trial = self._now() + self._backoff_s, True
        return True

    def record_success(self) -> None:
        self._failures, self._backoff_s, self._open_until_s, self._trial = 0, BACKOFF_S, None, False

    def record_failure(self) -> None:
        if self._open_until_s is not None and not self._trial:
            return  # The call started before the breaker opened.
        self._failures += 1
        if self._trial:
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        if self._trial or self._failures >= FAILURES_MAX:
            self._open_until_s, self._trial = self._now() + self._backoff_s, False
