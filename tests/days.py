"""The current day, for tests whose server uses the system clock and counts days."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime

_DAY_S = 86_400


def wait_for_day_with_seconds_left(least_s: int = 120) -> date:
    """Return the current day in UTC. If the day ends within `least_s` seconds, wait for the next day first."""
    left_s = _DAY_S - time.time() % _DAY_S
    if left_s < least_s:
        time.sleep(left_s + 1)
    return datetime.now(UTC).date()
