"""Conversion of a JSON literal of a filter, in any client's format, to a value of the column's type.

Java sends raw numbers (days, microseconds), decimals as strings, bytes as hexadecimal and infinities as strings.
PyIceberg sends ISO dates and timestamps, the latter without an offset, and every number with a decimal point that it
parsed from a string as a string. So the column's type determines the conversion.

A literal outside the column's type must not change a result: it becomes a position, `Between` two adjacent values or
outside the range, and comparisons with a position are exact.

Three kinds of literals are rounded, because every client rounds them before it compares rows. A double for a float
column becomes the nearest float (Java writes a float as the shortest digits that parse to it; engines that compare as
doubles send no literal that a float cannot hold). A JSON integer for a double column becomes the nearest double. A JSON
number with a decimal point for a decimal column is rounded half up; a decimal string is exact.

Integers for timestamps are microseconds, also for nanosecond columns (Java's `LongLiteral`). A timestamp without an
offset is UTC if the column has a time zone. The sign of zero is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias
from uuid import UUID

from seamark.formats.iceberg.types.types import base_name
from seamark.formats.iceberg.types.values import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    NANOS_PER_DAY,
    NANOS_PER_MICRO,
    Value,
    decimal_precision,
    decimal_scale,
    fixed_length,
    parse_decimal,
    parse_iso_date,
    parse_iso_time,
    parse_iso_timestamp,
    round_to,
    unscaled_floor,
)
from seamark.formats.runtime.errors import BadRequest

FINITE_MAX = {"float": (2.0 - 2.0**-23) * 2.0**127, "double": (2.0 - 2.0**-52) * 2.0**1023}
"""The largest finite value of each floating-point type."""

_INFINITIES = {"Infinity": math.inf, "+Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Above:
    """A literal above every (finite) value of the type; `infinite` if it equals the type's infinity."""

    infinite: bool = False


@dataclass(frozen=True, slots=True)
class Below:
    """A literal below every (finite) value of the type; `infinite` if it equals the type's negative infinity."""

    infinite: bool = False


@dataclass(frozen=True, slots=True)
class Between:
    """A literal above `lower` and below `upper`, its successor in the type."""

    lower: int
    upper: int


Literal: TypeAlias = Value | Above | Below | Between


def parse_literal(kind: str, json: object) -> Literal:
    """`json` as a value of a primitive type, or its position among the values. Raises BadRequest."""
    parse = _PARSERS.get(base_name(kind))
    if parse is None:
        raise BadRequest(f"a column of type {kind} cannot be compared with a literal")
    if json != json or (json == "NaN" and kind in FINITE_MAX):
        raise BadRequest("cannot create expression literal from NaN; use is-nan or not-nan instead")
    try:
        literal = parse(kind, json) if kind == "boolean" or not isinstance(json, bool) else None
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"invalid value for conversion to type {kind}: {_shown(json)} ({_cut(str(error))})") from None
    if literal is None:
        raise BadRequest(f"invalid value for conversion to type {kind}: {_shown(json)}")
    return literal


def _shown(json: object) -> str:
    return _cut(repr(json))


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "…"


def _boolean(_: str, json: object) -> Literal | None:
    if isinstance(json, bool):
        return json
    return {"true": True, "false": False}.get(json.lower()) if isinstance(json, str) else None


def _integer(kind: str, json: object) -> Literal | None:
    limits = (INT_MIN, INT_MAX) if kind == "int" else (LONG_MIN, LONG_MAX)
    match json:
        case int():
            return _placed(json, True, *limits)
        case float():
            return _beyond(json) if math.isinf(json) else _placed(math.floor(json), json.is_integer(), *limits)
        case str():
            return _placed(*unscaled_floor(parse_decimal(json), 0), *limits)
    return None


def _floating(kind: str, json: object) -> Literal | None:
    match json:
        case int() | float():
            number = _as_float(json)
        case str() if json in _INFINITIES:
            return _beyond(_INFINITIES[json])
        case str():
            number = float(parse_decimal(json))
            if math.isinf(number):
                return Above() if number > 0 else Below()
        case _:
            return None
    if math.isinf(number):
        return _beyond(number) if isinstance(json, float) else Above() if number > 0 else Below()
    try:
        # the shortest digits of the largest float are a double above it, which rounds to the float
        return round_to(kind, number)
    except ValueError:
        return Above() if number > 0 else Below()


def _as_float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _beyond(infinity: float) -> Literal:
    return Above(infinite=True) if infinity > 0 else Below(infinite=True)


def _decimal(kind: str, json: object) -> Literal | None:
    scale, limit = decimal_scale(kind), 10 ** decimal_precision(kind) - 1
    match json:
        case int():
            return _placed(json * 10**scale, True, -limit, limit)
        case float() if math.isinf(json):
            return _beyond(json)
        case float():
            # half up, as both clients do: the first digit beyond the scale decides
            magnitude = (unscaled_floor(Decimal(repr(abs(json))), scale + 1)[0] + 5) // 10
            return _placed(-magnitude if json < 0 else magnitude, True, -limit, limit)
        case str():
            return _placed(*unscaled_floor(parse_decimal(json), scale), -limit, limit)
    return None


def _date(_: str, json: object) -> Literal | None:
    match json:
        case int():
            return _placed(json, True, INT_MIN, INT_MAX)
        case str() if "T" in json.upper():
            days, rest = divmod(parse_iso_timestamp(json)[0], NANOS_PER_DAY)
            return _placed(days, rest == 0, INT_MIN, INT_MAX)
        case str():
            return _placed(parse_iso_date(json), True, INT_MIN, INT_MAX)
    return None


def _time(_: str, json: object) -> Literal | None:
    match json:
        case int():
            return _placed(json, True, LONG_MIN, LONG_MAX)
        case str():
            micros, rest = divmod(parse_iso_time(json), NANOS_PER_MICRO)
            return _placed(micros, rest == 0, LONG_MIN, LONG_MAX)
    return None


def _timestamp(kind: str, json: object) -> Literal | None:
    match json:
        case int():
            nanos = json * NANOS_PER_MICRO
        case str() if "T" in json.upper():
            nanos, offset = parse_iso_timestamp(json)
            if offset is not None and "tz" not in kind:
                raise ValueError("the column has no time zone: omit the offset")
        case str():
            nanos = parse_iso_date(json) * NANOS_PER_DAY
        case _:
            return None
    unit = 1 if kind.endswith("_ns") else NANOS_PER_MICRO
    count, rest = divmod(nanos, unit)
    return _placed(count, rest == 0, LONG_MIN, LONG_MAX)


def _string(_: str, json: object) -> Literal | None:
    if isinstance(json, str):
        json.encode()  # a lone surrogate cannot be in a file
        return json
    return None


def _uuid(_: str, json: object) -> Literal | None:
    if isinstance(json, str) and len(json) in (32, 36):
        return UUID(json).bytes
    return None


def _bytes(kind: str, json: object) -> Literal | None:
    if not isinstance(json, str) or " " in json:
        return None
    data = bytes.fromhex(json)
    if base_name(kind) == "fixed" and len(data) != fixed_length(kind):
        raise ValueError(f"{len(data)} bytes")
    return data


def _placed(floor: int, exact: bool, low: int, high: int) -> Literal:
    """The literal with this floor, among the integers from `low` to `high`."""
    if floor > high or (floor == high and not exact):
        return Above()
    if floor < low:
        return Below()
    return floor if exact else Between(floor, floor + 1)


# Only `boolean` gets Python's booleans, which are integers, too.
_PARSERS: dict[str, Callable[[str, object], Literal | None]] = {
    "boolean": _boolean,
    "int": _integer,
    "long": _integer,
    "float": _floating,
    "double": _floating,
    "decimal": _decimal,
    "date": _date,
    "time": _time,
    **dict.fromkeys(("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), _timestamp),
    "string": _string,
    "uuid": _uuid,
    "fixed": _bytes,
    "binary": _bytes,
}
