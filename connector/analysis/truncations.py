"""Computes the starts and ends of calendar periods."""

from __future__ import annotations

from datetime import date, datetime, timedelta

_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}
_CLOCK = {"HOUR": timedelta(hours=1), "MINUTE": timedelta(minutes=1), "SECOND": timedelta(seconds=1)}


def find_period(moment: datetime, unit: str) -> tuple[datetime, datetime]:
    """Return the inclusive start and the exclusive end of the period that contains `moment`.

    Raises:
        KeyError: The unit is unknown.
        OverflowError: The end is outside the range of dates.
        ValueError: The end is outside the range of dates.
    """
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    if unit in _CLOCK:
        start = midnight + (moment - midnight) // _CLOCK[unit] * _CLOCK[unit]
        return start, start + _CLOCK[unit]
    if unit == "DAY":
        return midnight, midnight + timedelta(days=1)
    if unit == "WEEK":  # A week begins on Monday.
        start = midnight - timedelta(days=midnight.weekday())
        return start, start + timedelta(days=7)
    months = _MONTHS[unit]
    first = (midnight.month - 1) // months * months + 1
    start = midnight.replace(month=first, day=1)
    year, month = divmod(start.year * 12 + first - 1 + months, 12)
    return start, start.replace(year=year, month=month + 1)


def truncate(day: date, unit: str) -> date:
    """Return the first day of the period that contains `day`, or `day` itself for a period shorter than a day."""
    return day if unit in _CLOCK else find_period(datetime(day.year, day.month, day.day), unit)[0].date()
