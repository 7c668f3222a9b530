"""Conversion of single values from and to bytes and JSON (Iceberg spec, appendix D).

The values have the form that `expression.py` describes. The bytes are the bounds in manifests. They have no type, and
promotion does not rewrite them. Therefore their length determines the type that was written (spec: "Schema Evolution"):
four bytes for a long are an int, for a double a float, and for a timestamp a date. JSON is the form of partitions and
residuals in REST answers, as in Iceberg's Java library. Invalid input raises ValueError, and the caller adds the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import copysign, isfinite, isnan
from typing import TypeAlias
from uuid import UUID

from seamark.formats.iceberg.types.types import get_base_name

Value: TypeAlias = bool | int | float | str | bytes
"""A value of a predicate or a partition. `expressions/expression.py` lists its form by Iceberg type."""

MICROS_PER_DAY = 86_400_000_000
NANOS_PER_MICRO = 1000
NANOS_PER_DAY = MICROS_PER_DAY * NANOS_PER_MICRO
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LONG_MIN, LONG_MAX = -(2**63), 2**63 - 1

INTS = frozenset({"int", "date"})
LONGS = frozenset({"long", "time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})
TIMESTAMPS = frozenset({"timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})
FLOATS = frozenset({"float", "double"})


_INT, _LONG, _FLOAT, _DOUBLE = (struct.Struct(form) for form in ("<i", "<q", "<f", "<d"))
_DECIMAL_BYTES_MAX = 16
"""The maximum size of a decimal in bytes. The format's limit is 38 digits, which fit into 127 bits."""

_SHIFT_MAX = 2 * 38
"""The largest power of ten by which a number is multiplied. It exceeds each decimal type of 38 digits."""
_UUID_BYTES, _UUID_CHARACTERS = 16, 36
_NANOS_PER_SECOND = 1_000_000_000
_OFFSET_HOURS_MAX = 18
"""The largest offset of a time zone that Java accepts."""

_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}

_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
_DAYS_PER_400_YEARS = 146_097
_DATETIME_EPOCH = datetime(1970, 1, 1)
_DATETIME_FIRST, _DATETIME_LAST = (
    (at - _DATETIME_EPOCH) // timedelta(microseconds=1) for at in (datetime.min, datetime.max)
)
"""The range of the standard library's datetime, in microseconds since the epoch."""

_DECIMAL = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:E[+-]?\d++)?", re.ASCII | re.IGNORECASE)
"""The pattern of a decimal number.

The repetitions are possessive, because with backtracking, the time would grow with the square of the number of digits.
"""
DECIMAL_CHARACTERS_MAX = 1_200
"""The maximum number of characters of a decimal number. A double has up to 1,075 digits."""
_DATE = r"([+-]?\d{4,9})-(\d\d)-(\d\d)"
_TIME = r"(\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?"
_ISO_DATE = re.compile(_DATE, re.ASCII)
_ISO_TIME = re.compile(_TIME, re.ASCII)
_UTC = frozenset({"Z", "z", "+00:00", "-00:00"})
_ISO_TIMESTAMP = re.compile(_DATE + "T" + _TIME + r"(Z|[+-]\d\d:\d\d)?", re.ASCII | re.IGNORECASE)


def compute_partition_key(partition: Sequence[Value | None]) -> tuple[object, ...]:
    """Return a key that is equal for partitions of a spec that Iceberg treats as the same."""
    return tuple(map(make_value_key, partition))


def make_value_key(value: Value | None) -> object:
    """Return a key that is equal for partition values that Iceberg treats as equal.

    Floats are compared by their bits, so that the zeros differ, but all NaNs are equal (spec: "Scan
    Planning", note 3).
    """
    if isinstance(value, float):
        return "NaN" if isnan(value) else (value, copysign(1.0, value))
    return value


@lru_cache(maxsize=256)
def get_decimal_scale(kind: str) -> int:
    """Return the scale S of `decimal(P, S)`."""
    return int(kind.rstrip(")").rpartition(",")[2])


@lru_cache(maxsize=256)
def get_decimal_precision(kind: str) -> int:
    """Return the precision P of `decimal(P, S)`."""
    return int(kind.partition("(")[2].partition(",")[0])


@lru_cache(maxsize=256)
def get_fixed_length(kind: str) -> int:
    """Return the length L of `fixed[L]`."""
    return int(kind.partition("[")[2].rstrip("]"))


def decode_single_value(kind: str, data: bytes) -> Value:
    """Decode a value in single-value serialization (spec, appendix D).

    The type of a column can be promoted, so the bytes can be a value of an older type: an int of a long column, a date
    of a timestamp column, or a float of a double column.

    Raises:
        ValueError: No writer could have written the bytes.
    """
    name = get_base_name(kind)
    size = len(data)
    match name:
        case "boolean" if size == 1:
            return data != b"\x00"
        case "int" | "date" if size == 4:
            return int(_INT.unpack(data)[0])
        case _ if name in LONGS and size == 8:
            return int(_LONG.unpack(data)[0])
        case "long" if size == 4:
            return int(_INT.unpack(data)[0])
        case "timestamp" if size == 4:
            return _promote_date(data, MICROS_PER_DAY)
        case "timestamp_ns" if size == 4:
            return _promote_date(data, NANOS_PER_DAY)
        case "float" | "double" if size == 4:
            return float(_FLOAT.unpack(data)[0])
        case "double" if size == 8:
            return float(_DOUBLE.unpack(data)[0])
        case "decimal" if 0 < size <= _DECIMAL_BYTES_MAX:
            return int.from_bytes(data, "big", signed=True)
        case "string":
            return str(data, "utf-8")
        case "uuid" if size == _UUID_BYTES:
            return bytes(data)
        # Bounds of fixed columns can be truncated, like bounds of binary columns.
        case "fixed" if size <= get_fixed_length(kind):
            return bytes(data)
        case "binary":
            return bytes(data)
    raise ValueError(f"{size} bytes are not a value of type {kind}")


def decode_bound(kind: str, data: bytes) -> Value:
    """Decode a bound of a column.

    Raises:
        ValueError: The bytes are not a value of the type, or are NaN, which is not a valid bound.
    """
    value = decode_single_value(kind, data)
    name = get_base_name(kind)
    if value != value:
        raise ValueError("NaN is not a valid bound")
    if name == "decimal" and abs(int(value)) >= 10 ** get_decimal_precision(kind):
        raise ValueError(f"the value has more digits than the type {kind}")
    if name == "time" and not 0 <= int(value) < MICROS_PER_DAY:
        raise ValueError("the time is not between 00:00 and 24:00")
    return value


def promote_value(stored_type: str, kind: str, value: Value) -> Value:
    """Convert a value of type `stored_type` to `kind`, the current type of its column (spec: "Schema Evolution")."""
    if stored_type == "date" and kind in ("timestamp", "timestamp_ns"):
        assert isinstance(value, int)
        return value * (NANOS_PER_DAY if kind == "timestamp_ns" else MICROS_PER_DAY)
    return value


def _promote_date(data: bytes, units_per_day: int) -> int:
    """Decode a date as a number of smaller units. Raise ValueError if it does not fit into 64 bits."""
    units = int(_INT.unpack(data)[0]) * units_per_day
    if not LONG_MIN <= units <= LONG_MAX:
        raise ValueError("the date is outside the range of type timestamp")
    return units


def encode_single_value(kind: str, value: Value) -> bytes:
    """Encode a value of the type in single-value serialization (spec, appendix D).

    Raises:
        ValueError: The value is outside the type.
    """
    try:
        return _ENCODERS[get_base_name(kind)](value)
    except (KeyError, TypeError, AttributeError, OverflowError, struct.error):
        raise ValueError(f"{value!r} cannot be written as a value of type {kind}") from None


def _encode_decimal(value: int) -> bytes:
    # The sign needs one more bit: -128 fits into one byte, but 128 does not.
    bits = (value if value >= 0 else ~value).bit_length() + 1
    return value.to_bytes((bits + 7) // 8, "big", signed=True)


def _encode_raw(value: Value) -> bytes:
    if isinstance(value, bytes):
        return value
    raise TypeError("not bytes")


_ENCODERS: dict[str, Callable[..., bytes]] = {
    "boolean": lambda value: b"\x01" if value else b"\x00",
    **dict.fromkeys(INTS, _INT.pack),
    **dict.fromkeys(LONGS, _LONG.pack),
    "float": _FLOAT.pack,
    "double": _DOUBLE.pack,
    "decimal": _encode_decimal,
    "string": lambda value: value.encode(),
    **dict.fromkeys(("uuid", "fixed", "binary"), _encode_raw),
}


def encode_json(kind: str, value: Value | None) -> object:
    """Convert a value to JSON. None represents null.

    NaN and the infinities become strings, as in Java, because JSON has no numbers for them, and null has another
    meaning.

    Raises:
        ValueError: The type has no JSON form.
    """
    if value is None:
        return None
    name = get_base_name(kind)
    match value:
        case bool() | str() if name in ("boolean", "string"):
            return value
        case int() if name in ("int", "long"):
            return value
        case int() | float() if name in FLOATS:
            value = float(value)
            return value if isfinite(value) else "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case int() if name == "decimal":
            return format_decimal(value, get_decimal_scale(kind))
        case int() if name == "date":
            return format_iso_date(value)
        case int() if name == "time":
            return format_iso_time(value * NANOS_PER_MICRO)
        case int() if name in TIMESTAMPS:
            nanos = value if name.endswith("_ns") else value * NANOS_PER_MICRO
            return format_iso_timestamp(nanos) + ("+00:00" if "tz" in name else "")
        case bytes() if name == "uuid":
            return str(UUID(bytes=value))
        case bytes() if name in ("fixed", "binary"):
            return value.hex().upper()
    raise ValueError(f"{value!r} cannot be written as JSON of type {kind}")


def decode_json(kind: str, json: object) -> Value | None:
    """Convert the JSON that `encode_json` returns to a value. The JSON null becomes None.

    Raises:
        ValueError: The JSON is not a value of the type.
    """
    if json is None:
        return None
    name = get_base_name(kind)
    match json:
        case bool():
            if name == "boolean":
                return json
        case int() if name in ("int", "long"):
            minimum, maximum = (INT_MIN, INT_MAX) if name == "int" else (LONG_MIN, LONG_MAX)
            if minimum <= json <= maximum:
                return json
        case int() | float() if name in FLOATS:
            return round_to_type(kind, _parse_double(json, kind))
        case str():
            return _decode_text(name, kind, json)
    raise ValueError(f"{json!r} is not a value of type {kind}")


def _parse_double(number: float, kind: str) -> float:
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"the integer is outside the range of {kind}") from None


def _decode_text(name: str, kind: str, text: str) -> Value:
    """Parse a JSON text as a value of the type `kind`, whose name without parameters is `name`.

    A timestamp has an offset exactly if its type has a time zone, and the offset must be zero.
    """
    match name:
        case "string":
            return text
        case "float" | "double" if text in _NOT_FINITE:
            return _NOT_FINITE[text]
        case "decimal":
            return _unscale_exactly(text, get_decimal_scale(kind))
        case "date":
            return parse_iso_date(text)
        case "time":
            return _to_whole_micros(parse_iso_time(text))
        case "uuid" if len(text) == _UUID_CHARACTERS:
            return UUID(text).bytes
        case "fixed" if len(text) == 2 * get_fixed_length(kind):
            return bytes.fromhex(text)
        case "binary":
            return bytes.fromhex(text)
        case _ if name in TIMESTAMPS:
            nanos, offset = parse_iso_timestamp(text)
            if ("tz" in name) == (offset is not None) and not offset:
                return nanos if name.endswith("_ns") else _to_whole_micros(nanos)
    raise ValueError(f"{text!r} is not a value of type {kind}")


def _unscale_exactly(text: str, scale: int) -> int:
    unscaled_value, exact = floor_unscaled(parse_decimal(text), scale)
    if not exact:
        raise ValueError(f"{text!r} is not a decimal of scale {scale}")
    return unscaled_value


def parse_decimal(text: str) -> Decimal:
    """Parse a finite decimal number, and keep all of its digits.

    Raises:
        ValueError: The text is not a finite decimal number, or is too long.
    """
    if len(text) > DECIMAL_CHARACTERS_MAX:
        raise ValueError(f"a decimal number has {len(text)} characters; the limit is {DECIMAL_CHARACTERS_MAX}")
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a decimal number")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} has an exponent that is too large") from None


def floor_unscaled(number: Decimal, scale: int) -> tuple[int, bool]:
    """Return the floor of `number` · 10^`scale`, and whether it is exact.

    The function calculates with integers, because decimal arithmetic rounds to its context. A very large exponent is
    replaced by a smaller one that still exceeds every decimal type, so that a short text cannot produce gigabytes of
    digits.
    """
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    coefficient = int("".join(map(str, digits))) * (-1 if sign else 1)
    shift = exponent + scale
    if shift >= 0:
        return coefficient * 10 ** min(shift, _SHIFT_MAX), True
    floor, remainder = divmod(coefficient, 10 ** min(-shift, len(digits) + 1))
    return floor, remainder == 0


def _to_whole_micros(nanos: int) -> int:
    micros, remainder = divmod(nanos, NANOS_PER_MICRO)
    if remainder:
        raise ValueError("the type has microseconds, not nanoseconds")
    return micros


def round_to_type(kind: str, number: float) -> float:
    """Return the value of the type that is nearest to a double.

    Raises:
        ValueError: The number is finite, but outside the range of floats.
    """
    if kind == "double":
        return number
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(number))[0])
    except OverflowError:
        raise ValueError(f"{number} is beyond the range of floats") from None


def format_decimal(unscaled_value: int, scale: int) -> str:
    """Return the plain digits of a decimal, with `scale` digits after the point."""
    if scale == 0:
        return str(unscaled_value)
    digits = str(abs(unscaled_value)).rjust(scale + 1, "0")
    return f"{'-' if unscaled_value < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"


def format_iso_date(days: int) -> str:
    """Format days since the epoch as a date in the same way as Java. Years after 9999 have a sign."""
    # Python's dates end with the year 9999, but the calendar repeats every 400 years.
    cycles, day = divmod(days + _EPOCH_ORDINAL - 1, _DAYS_PER_400_YEARS)
    cycle_date = date.fromordinal(day + 1)
    year = cycle_date.year + 400 * cycles
    text = f"{year:04d}" if 0 <= year <= 9999 else f"+{year}" if year > 0 else f"-{-year:04d}"
    return f"{text}-{cycle_date.month:02d}-{cycle_date.day:02d}"


def format_iso_time(nanos: int) -> str:
    """Format nanoseconds since midnight as a time with a fraction of zero, six or nine digits."""
    seconds, fraction = divmod(nanos, _NANOS_PER_SECOND)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    if fraction % NANOS_PER_MICRO:
        return f"{text}.{fraction:09d}"
    return f"{text}.{fraction // NANOS_PER_MICRO:06d}" if fraction else text


def format_iso_timestamp(nanos: int) -> str:
    """Format nanoseconds since the epoch as a timestamp without an offset."""
    micros, remainder = divmod(nanos, NANOS_PER_MICRO)
    if not remainder and _DATETIME_FIRST <= micros <= _DATETIME_LAST:
        return (_DATETIME_EPOCH + timedelta(microseconds=micros)).isoformat()
    days, nanos_of_day = divmod(nanos, NANOS_PER_DAY)
    return f"{format_iso_date(days)}T{format_iso_time(nanos_of_day)}"


def parse_iso_date(text: str) -> int:
    """Parse a date, and return its days since the epoch.

    Raises:
        ValueError: The text is not a date.
    """
    match = _ISO_DATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a date such as 2024-01-31")
    return _count_days(*match.groups())


def parse_iso_time(text: str) -> int:
    """Parse a time, and return its nanoseconds since midnight.

    Raises:
        ValueError: The text is not a time.
    """
    match = _ISO_TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time such as 23:59:59.123456")
    return _count_nanos(*match.groups())


def parse_iso_timestamp(text: str) -> tuple[int, int | None]:
    """Parse a timestamp. Return its nanoseconds since the epoch, and its offset in seconds or None.

    If it has an offset, the nanoseconds are in UTC.

    Raises:
        ValueError: The text is not a timestamp.
    """
    match = _ISO_TIMESTAMP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a timestamp such as 2024-01-31T23:59:59.123456 or …+00:00")
    year, month, day, hour, minute, second, fraction, offset = match.groups()
    nanos = _count_days(year, month, day) * NANOS_PER_DAY + _count_nanos(hour, minute, second, fraction)
    if offset is None:
        return nanos, None
    if offset in _UTC:
        return nanos, 0
    sign, hours, minutes = offset[0], int(offset[1:3]), int(offset[4:6])
    offset_seconds = hours * 3600 + minutes * 60
    if minutes > 59 or offset_seconds > _OFFSET_HOURS_MAX * 3600:
        raise ValueError(f"{text!r} has an invalid offset")
    if sign == "-":
        offset_seconds = -offset_seconds
    return nanos - offset_seconds * _NANOS_PER_SECOND, offset_seconds


def _count_days(year: str, month: str, day: str) -> int:
    """Return the days of a date since the epoch. Python's dates end with the year 9999, so use cycles of 400 years."""
    cycles, years_of_cycle = divmod(int(year) - 1, 400)
    return date(years_of_cycle + 1, int(month), int(day)).toordinal() + cycles * _DAYS_PER_400_YEARS - _EPOCH_ORDINAL


def _count_nanos(hour: str, minute: str, second: str | None, fraction: str | None) -> int:
    hours, minutes, seconds = int(hour), int(minute), int(second or 0)
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(f"{hours:02}:{minutes:02}:{seconds:02} is not a time of day; the last second is 23:59:59")
    nanos = int((fraction or "").ljust(9, "0"))
    return (hours * 3600 + minutes * 60 + seconds) * _NANOS_PER_SECOND + nanos
