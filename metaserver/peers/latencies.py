"""Decisions about slow and failing replicas: how long to wait before the storage is read, and which replicas to skip.

Callers pass the time. The module does no I/O.
"""

from __future__ import annotations

from collections import deque

LATENCY_SAMPLES = 128
"""The number of latest durations from which a percentile is computed."""
_SAMPLES_PER_COMPUTATION = 16
"""After this many new durations, the percentile is computed again."""


class Percentile:
    """The 95th percentile of the last `LATENCY_SAMPLES` durations, times `factor`, limited to `min_s` to `max_s`.

    Before the first `_SAMPLES_PER_COMPUTATION` durations, `value_s` is `initial_s`.
    """

    def __init__(self, initial_s: float, *, min_s: float, max_s: float, factor: float = 1.5) -> None:
        self._samples: deque[float] = deque(maxlen=LATENCY_SAMPLES)
        self._min_s = min_s
        self._max_s = max_s
        self._factor = factor
        self._samples_since_computation = 0
        self.value_s = initial_s

    def add(self, seconds: float) -> None:
        """Add a duration. After every `_SAMPLES_PER_COMPUTATION` durations, compute the percentile again."""
        self._samples.append(seconds)
        self._samples_since_computation += 1
        if self._samples_since_computation >= _SAMPLES_PER_COMPUTATION:
            self._samples_since_computation = 0
            sorted_samples = sorted(self._samples)
            percentile = sorted_samples[min(len(sorted_samples) - 1, int(len(sorted_samples) * 0.95))]
            self.value_s = min(self._max_s, max(self._min_s, percentile * self._factor))


class CircuitBreaker:
    """A circuit breaker, which is closed at first.

    After `failures_max` consecutive failures, it opens for `pause_s`, which doubles up to `pause_max_s` with each
    further failure. After the pause, one request is allowed as a trial.
    """

    def __init__(self, *, failures_max: int = 3, pause_s: float = 1.0, pause_max_s: float = 30.0) -> None:
        self._failures_max = failures_max
        self._first_pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._pause_s = pause_s
        self._failures = 0
        self._until_s = 0.0
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    def admit_request(self, now_s: float) -> bool:
        """Return whether the caller may send a request now.

        After failures, the breaker is open, and admits only one trial request after each pause. The method starts the
        next pause when it admits a trial.
        """
        if not self._is_open:
            return True
        if now_s < self._until_s:
            return False
        # Other requests wait for the result of the trial.
        self._until_s = now_s + self._pause_s
        return True

    def record_success(self) -> None:
        self._failures, self._is_open, self._pause_s = 0, False, self._first_pause_s

    def record_failure(self, now_s: float) -> None:
        """Count a failure. Open the breaker after `failures_max` failures, or lengthen its pause after a trial."""
        self._failures += 1
        if self._is_open:
            self._pause_s = min(self._pause_max_s, self._pause_s * 2)
            self._until_s = now_s + self._pause_s
        elif self._failures >= self._failures_max:
            self._is_open, self._until_s = True, now_s + self._pause_s
