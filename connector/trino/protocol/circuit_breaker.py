"""Implements a circuit breaker, which blocks calls for a time after several successive failures.

A closed breaker allows all calls, and an open breaker allows no call. When the time has passed, one call is allowed as
a trial. A successful trial closes the breaker. A failed trial opens it again for twice the time. A breaker belongs to
one event loop and is not thread-safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES_MAX = 5
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0


class Breaker:
    """Blocks calls after `FAILURES_MAX` successive failures.

    Attributes:
        now: A function that returns the time of a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures = 0
        self._backoff_s = BACKOFF_S
        self._open_until_s: float | None = None
        self._is_trial = False

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None

    def allow_request(self) -> bool:
        """Return whether a call is allowed.

        After an allowed call, the caller records the outcome with `record_success` or `record_failure`.
        """
        if self._open_until_s is None:
            return True
        if self._now() < self._open_until_s:
            return False
        # This call is the trial. If its outcome is never recorded, a new trial is allowed after the same time.
        self._open_until_s, self._is_trial = self._now() + self._backoff_s, True
        return True

    def record_success(self) -> None:
        self._failures, self._backoff_s, self._open_until_s, self._is_trial = 0, BACKOFF_S, None, False

    def record_failure(self) -> None:
        """Record a failed call. The breaker opens after `FAILURES_MAX` failures, or after the failure of a trial.

        After each failed trial, it stays open for twice as long, up to `BACKOFF_MAX_S`.
        """
        if self._open_until_s is not None and not self._is_trial:
            return  # The failed call started before the breaker opened.
        self._failures += 1
        if self._is_trial:
            self._backoff_s = min(2 * self._backoff_s, BACKOFF_MAX_S)
        if self._is_trial or self._failures >= FAILURES_MAX:
            self._open_until_s, self._is_trial = self._now() + self._backoff_s, False
