"""Tests of time windows and priorities of jobs, which table properties set."""

from __future__ import annotations

import random

import pytest

from seamark.metaserver.services.budgets import apply_window_and_priority, compute_window_wait_s, parse_windows
from seamark.metaserver.services.job import Job

DAY_S = 86_400


def to_milliseconds(text: str) -> int:
    """Return a time of day, on a fixed day, in milliseconds since the epoch."""
    hour, minute = map(int, text.split(":"))
    start_of_day_s = 20_000 * DAY_S  # Any day will do.
    return 1000 * (start_of_day_s + 3600 * hour + 60 * minute)


@pytest.mark.parametrize(
    ("windows", "now", "wait_minutes"),
    [
        ("", "12:00", 0),
        ("22:00-06:00", "23:59", 0),
        ("22:00-06:00", "05:59", 0),
        ("22:00-06:00", "06:00", 16 * 60),
        ("22:00-06:00", "21:00", 60),
        ("01:00-02:00, 12:00-24:00", "02:00", 600),
        ("01:00-02:00, 12:00-24:00", "23:59", 0),
        ("nonsense", "12:00", 0),
    ],
)
def test_job_waits_until_its_window_begins(windows: str, now: str, wait_minutes: int) -> None:
    assert compute_window_wait_s(windows, to_milliseconds(now)) == 60 * wait_minutes


def test_random_windows_agree_with_a_loop_over_minutes() -> None:
    rng = random.Random(3)
    for _ in range(100):
        start, end = rng.sample(range(0, 1440, 15), 2)
        window = f"{start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
        open_minutes = {minute % 1440 for minute in range(start, end if end > start else end + 1440)}
        now = rng.randrange(1440)
        wait_minutes = next(minutes for minutes in range(1441) if (now + minutes) % 1440 in open_minutes)
        assert compute_window_wait_s(window, 60_000 * now) == 60 * wait_minutes


@pytest.mark.parametrize("text", ["25:00-26:00", "1:00-2:00", "10:00-10:00", "10:00", "10:00-24:30", "a," * 30])
def test_invalid_window_is_ignored(text: str) -> None:
    assert parse_windows(text) is None


def test_index_jobs_ignore_windows_and_high_priority_precedes_normal() -> None:
    properties = {"seamark.services.window": "01:00-02:00", "seamark.services.priority": "high"}
    index_job = apply_window_and_priority(Job("indexing", ("db",), "t", "u", 5), properties)
    expiration_job = apply_window_and_priority(Job("expiration", ("db",), "t", "u", 9), properties)
    assert (index_job.window, expiration_job.window) == ("", "01:00-02:00")
    assert expiration_job.priority < 5
