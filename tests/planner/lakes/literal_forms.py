"""Literals of filters in each client's JSON, and the meaning of each form, for the oracles.

Forms: `java` is the form of Iceberg Java's expressions (raw numbers), `pyiceberg` that of PyIceberg (ISO, timestamps
without an offset), `spec` the specification's single-value JSON (ISO, zoned timestamps with +00:00).
"""

from __future__ import annotations

import math
import re
import uuid
from datetime import date, timedelta
from fractions import Fraction
from typing import Any

from tests.planner.lakes.kinds import (
    BYTES,
    DAY_US,
    FLOATS,
    NANOSECOND_TYPES,
    TEMPORAL_LONGS,
    format_decimal,
    parse_decimal,
    strip_parameters,
    to_float32,
)

FORMS = ("java", "pyiceberg", "spec")
EPOCH = date(1970, 1, 1)
DAYS_PER_400_YEARS = 146_097
MIN_DAY, MAX_DAY = (date(1, 1, 1) - EPOCH).days, (date(9999, 12, 31) - EPOCH).days


def render(kind: str, value: Any, form: str) -> Any:
    """Return the JSON of a value in one of `FORMS`.

    A fraction, which equals no value of an integer type, becomes a number with a decimal point.
    """
    name = strip_parameters(kind)
    if isinstance(value, Fraction):
        return _format_fraction(kind, value)
    if name == "decimal":
        return format_decimal(kind, value)
    if name in FLOATS and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if name == "uuid":
        return str(uuid.UUID(bytes=value))
    if name in BYTES:
        return value.hex() if form == "java" else value.hex().upper()
    if name == "time" and form != "java":
        return _format_clock(value * 1000)
    if name == "date" and form != "java" and MIN_DAY <= value <= MAX_DAY:
        return (EPOCH + timedelta(value)).isoformat()
    if "timestamp" in name:
        return _format_timestamp(kind, value, form)
    return value


def _format_fraction(kind: str, value: Fraction) -> Any:
    if strip_parameters(kind) != "decimal":
        return float(value)
    scale = parse_decimal(kind)[1] + 3  # The fraction is in thousandths of the last digit.
    return format_decimal(f"decimal(38, {scale})", int(value * 1000))


def _format_timestamp(kind: str, value: int, form: str) -> Any:
    """Return the JSON of a timestamp: a text or an integer.

    It is an integer if a text cannot represent the time. In Java's form, it is also an integer if the time is a whole
    number of microseconds.

    Args:
        kind: The type of the column.
        value: The time in units of the type: nanoseconds or microseconds.
        form: The client whose form the JSON has, for example java.
    """
    nanos = value if kind in NANOSECOND_TYPES else value * 1000
    days, remainder = divmod(nanos, DAY_US * 1000)
    whole_micros = kind not in NANOSECOND_TYPES or value % 1000 == 0
    if not MIN_DAY <= days <= MAX_DAY or (form == "java" and whole_micros):
        # An integer is in microseconds even for nanosecond columns, as in Java's LongLiteral.
        return value // 1000 if kind in NANOSECOND_TYPES else value
    text = f"{(EPOCH + timedelta(days)).isoformat()}T{_format_clock(remainder)}"
    return text + "+00:00" if "tz" in kind and form != "pyiceberg" else text


def _format_clock(nanos: int) -> str:
    seconds, fraction = divmod(nanos, 1_000_000_000)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    digits = f"{fraction:09d}"
    return text if not fraction else f"{text}.{digits[:6] if digits.endswith('000') else digits}"


def parse(kind: str, json: Any) -> Any:
    """Return the value that the JSON literal of a client means.

    Floats are rounded. If the type has no equal value, the result is a `Fraction`.
    """
    name = strip_parameters(kind)
    if name == "boolean":
        return json == "true" if isinstance(json, str) else json
    if name in FLOATS:
        number = math.inf * (-1 if json.startswith("-") else 1) if str(json).endswith("Infinity") else float(json)
        return to_float32(number) if kind == "float" else number
    if name == "decimal":
        unscaled_value = Fraction(str(json)) * 10 ** parse_decimal(kind)[1]
        return int(unscaled_value) if unscaled_value.denominator == 1 else unscaled_value
    if name in ("int", "long"):
        exact_value = Fraction(json)
        return int(exact_value) if exact_value.denominator == 1 else exact_value
    if name == "uuid":
        return uuid.UUID(json).bytes
    if name in BYTES:
        return bytes.fromhex(json)
    if name == "date":
        return json if isinstance(json, int) else _parse_days(json)
    if name in TEMPORAL_LONGS:
        return _parse_time(kind, json)
    return json


def _parse_time(kind: str, json: Any) -> int:
    if isinstance(json, int):
        return json * 1000 if kind in NANOSECOND_TYPES else json
    if kind == "time":
        return _parse_clock(json) // 1000
    day, clock = json.split("T")
    nanos = _parse_days(day) * DAY_US * 1000 + _parse_clock(re.sub(r"(\+00:00|Z)$", "", clock))
    return nanos if kind in NANOSECOND_TYPES else nanos // 1000


def _parse_days(text: str) -> int:
    """Return the days since the epoch of an ISO date, even for years outside `datetime.date`.

    The calendar repeats every 400 years.
    """
    match = re.fullmatch(r"([+-]?\d{4,})-(\d\d)-(\d\d)", text)
    if match is None:
        raise ValueError(f"not an ISO date: {text!r}")
    cycles, year = divmod(int(match[1]) - 1970, 400)
    return (date(1970 + year, int(match[2]), int(match[3])) - EPOCH).days + cycles * DAYS_PER_400_YEARS


def _parse_clock(text: str) -> int:
    hour, minute, *remaining_parts = text.split(":")
    second, _, fraction = (remaining_parts[0] if remaining_parts else "0").partition(".")
    return (int(hour) * 3600 + int(minute) * 60 + int(second)) * 1_000_000_000 + int(fraction.ljust(9, "0") or 0)
