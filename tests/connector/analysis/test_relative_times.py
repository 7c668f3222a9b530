"""Tests that an expression of the current time has a value within its computed span, in every zone and at any time."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, time, timedelta, timezone

import pytest
from sqlglot import parse_one

from seamark.connector.analysis.literals import add_months
from seamark.connector.analysis.relative_times import parse_span
from tests.seeds import examples, first_seed

ZONES = [timezone(timedelta(minutes=60 * hours)) for hours in (-12, -11, -8, -5, 0, 1, 2, 9, 14)] + [
    timezone(timedelta(hours=5, minutes=45))
]
"""Time zones without daylight saving time. Daylight saving time would change an offset by up to three hours."""


def truncate_time(moment: datetime, unit: str) -> datetime:
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    match unit:
        case "year":
            return midnight.replace(month=1, day=1)
        case "quarter":
            return midnight.replace(month=(moment.month - 1) // 3 * 3 + 1, day=1)
        case "month":
            return midnight.replace(day=1)
        case "week":
            return midnight - timedelta(days=moment.weekday())
    return midnight


def add_calendar_months(moment: datetime, count: int) -> datetime:
    return datetime.combine(add_months(moment.date(), "MONTH", count), moment.timetz())


def draw_expression(rng: random.Random, now: datetime) -> tuple[str, list[datetime]]:
    """Return an expression and its two values: the instant in UTC, and the local time in the zone of `now`."""
    text, value = rng.choice(["now()", "current_timestamp", "localtimestamp", "current_date"]), now
    if text == "current_date":
        value = truncate_time(now, "day")
    for _ in range(rng.randrange(4)):
        count = rng.choice([-1, 1]) * rng.choice([1, 2, 3, 7, 30])
        match rng.randrange(5):
            case 0:
                unit = rng.choice(["year", "quarter", "month", "week", "day"])
                text, value = f"date_trunc('{unit}', {text})", truncate_time(value, unit)
            case 1:
                text, value = f"({text} + INTERVAL '{count}' MONTH)", add_calendar_months(value, count)
            case 2:
                text, value = f"date_add('month', {count}, {text})", add_calendar_months(value, count)
            case 3:
                text, value = f"({text} - INTERVAL '{count}' DAY)", value - timedelta(days=count)
            case 4:
                text, value = f"CAST({text} AS date)", truncate_time(value, "day")
    return text, [value.astimezone(UTC).replace(tzinfo=None), value.replace(tzinfo=None)]


def test_value_of_a_relative_time_is_within_its_span_in_every_zone() -> None:
    rng, read_count, expression_count = random.Random(first_seed()), 0, examples(2000, 200)
    for _ in range(expression_count):
        # Half of the days are near the end of a month.
        day = date(2023, 1, 1) + timedelta(days=rng.randrange(1200))
        if rng.random() < 0.5:
            day = add_months(day.replace(day=1), "MONTH", 1) + timedelta(days=rng.randint(-4, 3))
        time_of_day = rng.choice([time(0), time(23, 59, 59), time(11, 59), time(12), time(10, 30)])
        analysis_time = datetime.combine(day, time_of_day, UTC)
        # A plan for DuckDB and Spark is valid for a day.
        for delay in (timedelta(0), timedelta(hours=23)):
            now = (analysis_time + delay).astimezone(rng.choice(ZONES))
            text, values = draw_expression(rng, now)
            span = parse_span(parse_one(text, read="trino"), analysis_time.date())
            if span is None:
                continue
            read_count += 1
            low, high = (datetime.combine(day, time()) for day in (span.low, span.high))
            assert all(low <= value <= high for value in values), (text, now, span, values)
    assert read_count > expression_count, "most of the expressions have a span"


def test_span_of_a_relative_time_is_no_wider_than_the_zones_need() -> None:
    for text, days_max in (("current_date - INTERVAL '7' DAY", 5), ("now() - INTERVAL '1' MONTH", 12)):
        span = parse_span(parse_one(text, read="trino"), date(2026, 3, 12))
        assert span is not None
        assert (span.high - span.low).days <= days_max


@pytest.mark.parametrize("conversion_count", [1, 2])
def test_relative_time_has_a_span_only_with_at_most_one_zone_conversion(conversion_count: int) -> None:
    text = "now()"
    for _ in range(conversion_count):
        text = f"CAST({text} AT TIME ZONE 'Pacific/Kiritimati' AS timestamp)"
    span = parse_span(parse_one(text, read="trino"), date(2026, 3, 12))
    assert (span is None) == (conversion_count > 1)
