"""Tests whose server has the system clock, and that count in days."""

from __future__ import annotations

import time
from datetime import UTC, date, datetime

_DAY_S = 86_400


def lasting_today(for_s: int = 120) -> date:
    """Today in UTC, and so for `for_s` seconds: shortly before midnight this waits for the next day."""
    left_s = _DAY_S - time.time() % _DAY_S
    if left_s < for_s:
        time.sleep(left_s + 1)
    return datetime.now(UTC).date()
