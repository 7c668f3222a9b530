"""Tests of the circuit breaker of a failing server.

The breaker opens for growing times. After each time, one request tries the server.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamark.connector.trino.protocol.circuit_breaker import BACKOFF_MAX_S, BACKOFF_S, FAILURES_MAX, Breaker


class BreakerClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def open_breaker(clock: BreakerClock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(FAILURES_MAX):
        assert breaker.allow_request()
        breaker.record_failure()
    return breaker


def test_breaker_opens_only_after_failures_in_a_row() -> None:
    breaker = Breaker(BreakerClock())
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            breaker.record_failure()
        assert breaker.allow_request()
        breaker.record_success()
    for _ in range(FAILURES_MAX):
        breaker.record_failure()
    assert not breaker.allow_request()
    assert breaker.is_open


def test_open_breaker_allows_one_trial_request_whose_success_closes_it() -> None:
    clock = BreakerClock()
    breaker = open_breaker(clock)
    clock.now_s += BACKOFF_S
    assert [breaker.allow_request() for _ in range(3)] == [True, False, False]
    breaker.record_success()
    assert breaker.allow_request()
    assert not breaker.is_open


def test_each_failed_trial_doubles_the_pause_up_to_a_maximum() -> None:
    clock = BreakerClock()
    breaker = open_breaker(clock)
    pauses_s = []
    for _ in range(10):
        start_s = clock.now_s
        while not breaker.allow_request():
            clock.now_s += BACKOFF_S / 4
        pauses_s.append(clock.now_s - start_s)
        breaker.record_failure()
    assert pauses_s[:4] == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S, 8 * BACKOFF_S]
    assert pauses_s[-1] == BACKOFF_MAX_S


def test_failures_of_requests_that_were_sent_before_the_breaker_opened_change_nothing() -> None:
    clock = BreakerClock()
    breaker = open_breaker(clock)
    for _ in range(100):
        breaker.record_failure()
    clock.now_s += BACKOFF_S
    assert breaker.allow_request()


def test_trial_without_a_result_is_followed_by_another_trial() -> None:
    clock = BreakerClock()
    breaker = open_breaker(clock)
    clock.now_s += BACKOFF_S
    assert breaker.allow_request()
    clock.now_s += BACKOFF_S
    assert breaker.allow_request()


@given(st.lists(st.sampled_from(["ask", "succeeded", "failed", "wait"]), max_size=60))
def test_breaker_always_allows_a_request_in_the_end(steps: list[str]) -> None:
    clock = BreakerClock()
    breaker = Breaker(clock)
    for step in steps:
        match step:
            case "ask":
                breaker.allow_request()
            case "wait":
                clock.now_s += 0.7
            case "succeeded":
                breaker.record_success()
                assert breaker.allow_request()
            case "failed":
                breaker.record_failure()
    clock.now_s += BACKOFF_MAX_S
    assert breaker.allow_request()
