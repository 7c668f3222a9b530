"""Convert the rows of a SQL answer to JSON.

Numbers become JSON numbers. NaN, infinity, decimals, times and UUIDs become strings, bytes become base64 strings, and
nested values become lists and objects.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

_DAYS_PER_400_YEARS = 146_097
_MICROS_PER_DAY = 86_400_000_000
YEAR_MAX = 9999
"""The last year that Trino writes without a sign."""


def to_json_rows(batch: pa.RecordBatch) -> list[list[Any]]:
    """Return the values of each row, in the order of the columns.

    Raises:
        ValueError: A nested value has a date or a time that Python does not support.
    """
    columns = [_to_json_column(column) for column in batch.columns]
    return [list(row) for row in zip(*columns, strict=True)]


def _to_json_column(column: pa.Array) -> list[Any]:
    """Return the values of a column in their JSON form."""
    kind = column.type
    try:
        values: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):  # Python supports only dates in the years 1 to 9999.
        return _format_times_of_any_year(column)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_null(kind):
        return values
    return [convert_to_json(value) for value in values]


def _format_times_of_any_year(column: pa.Array) -> list[str | None]:
    """Format dates and timestamps of any year in the same way as Trino. Nulls become None.

    Raises:
        ValueError: A nested value has a date or time outside the years 1 to 9999.
    """
    kind = column.type
    if pa.types.is_date32(kind):
        return [None if day is None else _format_day(day) for day in column.cast(pa.int32()).to_pylist()]
    if not pa.types.is_timestamp(kind):
        raise ValueError("A nested value has a date or time outside the years 1 to 9999; select its fields separately")
    zone = "" if kind.tz is None else " UTC"
    timestamps = column.cast(pa.timestamp("us", kind.tz)).cast(pa.int64()).to_pylist()
    return [None if micros is None else f"{_format_timestamp(micros)}{zone}" for micros in timestamps]


def _format_timestamp(micros: int) -> str:
    """Format a timestamp, given its microseconds since 1970-01-01."""
    days, micros_of_day = divmod(micros, _MICROS_PER_DAY)
    time_of_day = (datetime(1970, 1, 1) + timedelta(microseconds=micros_of_day)).time()
    return f"{_format_day(days)} {time_of_day.isoformat()}"


def _format_day(days: int) -> str:
    """Format a date, given its number of days since 1970-01-01.

    The calendar repeats its dates every 400 years, so the function uses a year that Python supports.
    """
    cycles, day_of_cycle = divmod(days, _DAYS_PER_400_YEARS)
    day = date(1970, 1, 1) + timedelta(days=day_of_cycle)
    year = day.year + 400 * cycles
    sign = "+" if year > YEAR_MAX else "-" if year < 0 else ""
    return f"{sign}{abs(year):04d}-{day.month:02d}-{day.day:02d}"


def convert_to_json(value: Any) -> Any:
    """Return a value of a row in its JSON form.

    NaN and infinities, dates, times and decimals become texts, and bytes become base64. Zoned timestamps are in UTC.
    """
    match value:
        case float():
            return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
        case Decimal():
            return format(value, "f")
        case datetime():
            text = value.replace(tzinfo=None).isoformat(" ")
            return text if value.tzinfo is None else f"{text} UTC"
        case date() | time():
            return value.isoformat()
        case bytes():
            return base64.b64encode(value).decode()
        case Mapping():
            return {str(name): convert_to_json(child) for name, child in value.items()}
        case list():
            return [convert_to_json(item) for item in value]
        case tuple():  # The value is an entry of a map: a pair of key and value.
            return [convert_to_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else str(value)
