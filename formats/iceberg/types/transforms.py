"""Transforms: their names, the types that they accept, and their results (Iceberg spec: "Partition Transforms").

An unknown transform is valid: it is kept and accepts any type, but cannot be applied (spec: readers must ignore it,
writers must not use it). Values have the form that `expression.py` describes. Results equal the results of Java's
writers, including integer overflow, because they are compared with the partition values that writers stored. The
exception is ints truncated to a width above 2^30, for which writers differ (`ranges.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from typing import Any

import mmh3

from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import Value
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize

IDENTITY = "identity"
VOID = "void"

_TRANSFORM_WITH_WIDTH = re.compile(r"(bucket|truncate)\[(\d+)\]", re.ASCII | re.IGNORECASE)
_TRANSFORMS_WITHOUT_WIDTH = frozenset({IDENTITY, "year", "month", "day", "hour", VOID})
_WIDTH_MAX = 2**31 - 1
_WIDTH_DIGITS_MAX = 10

_TIMESTAMPS = frozenset({"timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"})
_DATES_AND_TIMESTAMPS = _TIMESTAMPS | {"date"}
_ACCEPTED_TYPES: dict[str, frozenset[str]] = {
    "year": _DATES_AND_TIMESTAMPS,
    "month": _DATES_AND_TIMESTAMPS,
    "day": _DATES_AND_TIMESTAMPS,
    "hour": _TIMESTAMPS,
    "bucket": _DATES_AND_TIMESTAMPS | {"int", "long", "time", "string", "binary", "fixed", "decimal", "uuid"},
    "truncate": frozenset({"int", "long", "string", "binary", "decimal"}),
}


@memoize(1024)
def canonicalize_transform(transform: str) -> str:
    """Return the canonical form of a transform: its name in lower case, and its width without leading zeros.

    An unknown transform is returned unchanged.

    Raises:
        BadRequest: The width is zero or does not fit into 32 bits.
    """
    if match := _TRANSFORM_WITH_WIDTH.fullmatch(transform):
        width = int(match[2]) if len(match[2]) <= _WIDTH_DIGITS_MAX else _WIDTH_MAX + 1
        if not 0 < width <= _WIDTH_MAX:
            raise BadRequest(f"Invalid transform {transform}: the width must be between 1 and {_WIDTH_MAX}")
        return f"{match[1].lower()}[{width}]"
    lower = transform.lower()
    return lower if lower in _TRANSFORMS_WITHOUT_WIDTH else transform


def accepts_type(transform: str, source_type: str) -> bool:
    """Return whether a transform can be applied to a primitive type. The transform must be canonical.

    Transforms without listed types, such as unknown transforms of later versions, accept all types.
    """
    kind = get_base_name(source_type)
    name = transform.partition("[")[0]
    if name == IDENTITY:
        return kind not in ("variant", "geometry", "geography")
    return name not in _ACCEPTED_TYPES or kind in _ACCEPTED_TYPES[name]


def get_transform_name(transform: str) -> str:
    """Return the name of a transform without its width, such as `bucket` for `bucket[4]`."""
    return transform.partition("[")[0]


def get_transform_width(transform: str) -> int:
    """Return the N of a canonical transform `bucket[N]` or `truncate[N]`."""
    return int(transform.partition("[")[2].removesuffix("]"))


def is_known(transform: str) -> bool:
    """Return whether the spec defines the transform, which must be canonical."""
    return transform in _TRANSFORMS_WITHOUT_WIDTH or _TRANSFORM_WITH_WIDTH.fullmatch(transform) is not None


def compute_result_type(transform: str, kind: str) -> str:
    """Return the type of a canonical transform's results for a primitive type.

    For an unknown transform, it is `string`, as in Java.
    """
    if not is_known(transform):
        return "string"
    name = get_transform_name(transform)
    if name in (IDENTITY, VOID, "truncate"):
        return kind
    return "date" if name == "day" else "int"


@memoize(1024)
def compute_values_type(transform: str, kind: str) -> str:
    """Return the type of a transform's results for a primitive type. The transform can have any form."""
    return compute_result_type(canonicalize_transform(transform), kind)


def compute_transform(transform: str, kind: str, value: Value | None) -> Value | None:
    """Apply a canonical transform to a value of type `kind`. The result for null is null.

    Raises:
        BadRequest: The transform is unknown, or does not accept the type.
    """
    return None if value is None else make_function(transform, kind)(value)


@memoize(1024)
def make_function(transform: str, kind: str) -> Callable[..., Value | None]:
    """Return a function that applies a canonical transform to values of type `kind` that are not null.

    For many values, the function is faster than `compute_transform`. A result that does not fit its integer type
    overflows, as in Java.

    Raises:
        BadRequest: The transform is unknown, or does not accept the type.
    """
    if not is_known(transform) or not accepts_type(transform, kind):
        raise BadRequest(f"Cannot apply transform {transform} to a column of type {kind}")
    name = get_transform_name(transform)
    if name == VOID:
        return lambda _: None
    if name == "bucket":
        encode, width = _HASH_ENCODERS[get_base_name(kind)], get_transform_width(transform)
        # The spec removes the sign bit of the hash, so that the bucket is not negative.
        return lambda value: (mmh3.hash(encode(value), signed=False) & 0x7FFFFFFF) % width
    compute_exact = make_monotone_function(transform, kind)
    bits = INTEGER_BITS.get(compute_result_type(transform, kind))
    if bits is None or name == IDENTITY:
        return compute_exact
    return lambda value: wrap_to_bits(compute_exact(value), bits)


def make_monotone_function(transform: str, kind: str) -> Callable[..., Any]:
    """Return a function that applies an order-preserving transform.

    Results that are integers have any size. They do not overflow, unlike stored results, so they keep the order. A
    truncated text or binary value is a prefix of the value.
    """
    name = get_transform_name(transform)
    if name == "truncate":
        width = get_transform_width(transform)
        if get_base_name(kind) in ("string", "binary"):
            return lambda value: value[:width]
        # Like the spec's remainder, Python's remainder of a negative number is not negative.
        return lambda value: value - value % width
    if name == IDENTITY or (name == "day" and kind == "date"):
        return lambda value: value
    if name == "hour":
        hour_units = UNITS_PER_DAY[kind] // 24
        return lambda value: value // hour_units
    day_units = UNITS_PER_DAY[kind]
    if name == "day":
        return lambda value: value // day_units
    if name == "month":
        return lambda value: _count_months(value // day_units)
    return lambda value: _count_months(value // day_units) // 12


UNITS_PER_DAY = {
    "date": 1,
    "timestamp": 86_400_000_000,
    "timestamptz": 86_400_000_000,
    "timestamp_ns": 86_400_000_000_000,
    "timestamptz_ns": 86_400_000_000_000,
}

INTEGER_BITS = {"int": 32, "date": 32, "long": 64, "time": 64} | dict.fromkeys(_TIMESTAMPS, 64)


def wrap_to_bits(value: int, bits: int) -> int:
    """Return the lowest `bits` bits of `value` as a signed number. Java stores this number if a result overflows."""
    half_range = 1 << bits - 1
    return (value + half_range) % (2 * half_range) - half_range


_DAYS_BEFORE_EPOCH = date(1970, 1, 1).toordinal() - 1
_DAYS_PER_400_YEARS = 146_097


def _count_months(days: int) -> int:
    """Return the number of months from 1970-01 to the month of a day. The day is in days since 1970-01-01."""
    # The calendar repeats every 400 years, and the dates of the standard library end with the year 9999.
    cycles, day = divmod(days + _DAYS_BEFORE_EPOCH, _DAYS_PER_400_YEARS)
    cycle_date = date.fromordinal(day + 1)
    return (cycle_date.year + 400 * cycles - 1970) * 12 + cycle_date.month - 1


def find_start_of_month(month: int) -> int:
    """Return the first day of a month, in days since 1970-01-01. The month is in months since 1970-01."""
    years, month_of_year = divmod(month, 12)
    cycles, year = divmod(1970 + years - 1, 400)
    day = date(year + 1, month_of_year + 1, 1).toordinal() - 1
    return day + cycles * _DAYS_PER_400_YEARS - _DAYS_BEFORE_EPOCH


def _encode_long(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _encode_nanoseconds(value: int) -> bytes:
    return _encode_long(value // 1000)


def _encode_decimal(value: int) -> bytes:
    """Encode the unscaled value in two's complement, in the minimum number of bytes."""
    magnitude = value if value >= 0 else ~value
    return value.to_bytes(magnitude.bit_length() // 8 + 1, "big", signed=True)


def _encode_string(value: str) -> bytes:
    # UTF-8 cannot encode a lone surrogate; Java hashes a question mark instead.
    return value.encode("utf-8", errors="replace")


_HASH_ENCODERS: dict[str, Callable[..., bytes]] = {
    **dict.fromkeys(("int", "long", "date", "time", "timestamp", "timestamptz"), _encode_long),
    **dict.fromkeys(("timestamp_ns", "timestamptz_ns"), _encode_nanoseconds),
    **dict.fromkeys(("uuid", "fixed", "binary"), bytes),
    "decimal": _encode_decimal,
    "string": _encode_string,
}
