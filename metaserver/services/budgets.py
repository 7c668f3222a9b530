"""The time and order of a table's jobs: the properties `seamark.services.window` and `.priority`.

A window is a time of day in UTC, such as 22:00-06:00. The property may have several windows, separated by
commas. Jobs of a service that ignores windows (`TableService.ignores_windows`) run at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from seamark.formats.services.services import SERVICES
from seamark.metaserver.services.job import Job

WINDOW, PRIORITY = "seamark.services.window", "seamark.services.priority"
NORMAL = "normal"
PRIORITIES = {"high": -10, NORMAL: 0, "low": 10}
"""The number that each value of the property `seamark.services.priority` adds to the priority of a job.

The services have the priorities 5 to 11.
"""
_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")
_DAY_MINUTES = 24 * 60
_WINDOWS_MAX = 24

Window = tuple[int, int]
"""A time window: its first minute of the day, and the minute after its last minute.

The second number exceeds a day if the window ends on the next day.
"""


def parse_windows(text: str) -> tuple[Window, ...] | None:
    """Parse the time windows in which jobs may run, such as `22:00-06:00`, from a property.

    Returns:
        An empty tuple if the text names no window, or None if the text is invalid.
    """
    windows: list[Window] = []
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        match = _WINDOW.fullmatch(part)
        if match is None or len(parts) > _WINDOWS_MAX:
            return None
        hour, minute, end_hour, end_minute = map(int, match.groups())
        start, end = 60 * hour + minute, 60 * end_hour + end_minute
        if end > _DAY_MINUTES or start == end:
            return None
        # A window whose end is not after its start ends on the next day.
        windows.append((start, end if end > start else end + _DAY_MINUTES))
    return tuple(windows)


def compute_window_wait_s(windows: str, now_ms: int) -> float:
    """Return the seconds until the next time window for jobs begins.

    The result is 0 if a window is open, or if no window is valid.

    Args:
        windows: The property of the table that lists the windows.
        now_ms: The current time in milliseconds since 1970.
    """
    parsed_windows = parse_windows(windows)
    if not parsed_windows:
        return 0.0
    second_of_day = now_ms / 1000 % (60 * _DAY_MINUTES)
    waits = []
    for start, end in parsed_windows:
        # A window that ends after midnight may have begun on the previous day.
        if any(60 * start <= second_of_day + 60 * offset < 60 * end for offset in (0, _DAY_MINUTES)):
            return 0.0
        waits.append((60 * start - second_of_day) % (60 * _DAY_MINUTES))
    return min(waits)


def apply_window_and_priority(job: Job, properties: Mapping[str, str]) -> Job:
    """Return the job with the time window and the priority from the table's properties.

    Invalid values are ignored, and also the window for services whose jobs run at any time.
    """
    window = "" if _ignores_windows(job.service) else properties.get(WINDOW, "")
    priority_change = PRIORITIES.get(properties.get(PRIORITY, NORMAL), 0)
    if not window and not priority_change:
        return job
    return msgspec.structs.replace(job, window=window, priority=job.priority + priority_change)


def _ignores_windows(service: str) -> bool:
    """Return whether the jobs of a service run at any time."""
    return service in SERVICES and SERVICES[service].ignores_windows
