"""Primitive type names and default values of Iceberg (spec: "Primitive Types", "Single-value serialization").

A type is represented by its canonical name, as Java prints it. So all forms of a type compare equal, and engines can
read them. Defaults are validated as strictly as Java parses them, because Java could not read the table otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal, InvalidOperation
from math import isfinite
from uuid import UUID

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.runtime.memoization import memoize

_TYPES_WITHOUT_PARAMETERS = frozenset(
    [
        "boolean",
        "int",
        "long",
        "float",
        "double",
        "date",
        "time",
        "timestamp",
        "timestamptz",
        "timestamp_ns",
        "timestamptz_ns",
        "string",
        "uuid",
        "binary",
        "unknown",
        "variant",
        "geometry",
        "geography",
    ]
)

_DECIMAL = re.compile(r"decimal\(\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\)", re.ASCII)
_FIXED = re.compile(r"fixed\[\s*(\d{1,9})\s*\]", re.ASCII)
# The quantifiers are possessive. With backtracking, 5,000 blanks would take hours, while no other thread could run.
_GEOMETRY = re.compile(r"geometry\s*+\(([^)]*+)\)", re.IGNORECASE)
_GEOGRAPHY = re.compile(r"geography\s*+\(([^,)]*+)(?:,([^)]*+))?\)", re.IGNORECASE)
_EDGE_ALGORITHMS = frozenset({"spherical", "vincenty", "thomas", "andoyer", "karney"})
_DEFAULT_CRS = "OGC:CRS84"
_DECIMAL_PRECISION_MAX = 38
_UUID_CHARACTERS = 36
_NAME_MAX = 1000
"""The maximum number of characters of a type.

A coordinate reference system in a type has a short name, or the name of a property.
"""

_VERSION_3_TYPES = frozenset({"timestamp_ns", "timestamptz_ns", "variant", "unknown", "geometry", "geography"})
_TYPES_WITHOUT_DEFAULT = frozenset({"unknown", "variant", "geometry", "geography"})


@memoize(1024)
def get_base_name(name: str) -> str:
    """Return the name of a type without its parameters, such as `decimal` for `decimal(9, 2)`."""
    return re.split(r"[\[(\s]", name, maxsplit=1)[0].lower()


def get_min_format_version(name: str) -> int:
    """Return the lowest table format version that has the primitive type."""
    return 3 if get_base_name(name) in _VERSION_3_TYPES else 1


@memoize(1024)
def canonicalize_primitive(name: str) -> str:
    """Return the canonical name of a primitive (or variant) type.

    Raises:
        BadRequest: The type is unknown.
    """
    if len(name) > _NAME_MAX:
        raise BadRequest(f"A type has {len(name):,} characters; the limit is {_NAME_MAX:,}: {name[:40]}")
    lower = name.lower()
    if lower in _TYPES_WITHOUT_PARAMETERS:
        return lower
    if match := _DECIMAL.fullmatch(lower):
        precision, scale = int(match[1]), int(match[2])
        if precision > _DECIMAL_PRECISION_MAX:
            raise BadRequest(f"Decimals with precision larger than 38 are not supported: {precision}")
        return f"decimal({precision}, {scale})"
    if match := _FIXED.fullmatch(lower):
        return f"fixed[{int(match[1])}]"
    if match := _GEOMETRY.fullmatch(name):
        crs = match[1].strip()
        return "geometry" if crs in ("", _DEFAULT_CRS) else f"geometry({crs})"
    if match := _GEOGRAPHY.fullmatch(name):
        return _canonicalize_geography(match[1].strip(), None if match[2] is None else match[2].strip())
    raise BadRequest(f"Cannot parse type string to primitive: {name}")


def _canonicalize_geography(crs: str, algorithm: str | None) -> str:
    if algorithm is None:
        return "geography" if crs in ("", _DEFAULT_CRS) else f"geography({crs})"
    if algorithm.lower() not in _EDGE_ALGORITHMS:
        raise BadRequest(f"Invalid edge interpolation algorithm: {algorithm}")
    return f"geography({crs or _DEFAULT_CRS}, {algorithm.lower()})"


_FLOAT_LIMIT = (2.0 - 2.0**-24) * 2.0**127
"""The least number that does not round to a float. Java writes the largest float as 3.4028235E38, which is less."""
_NANOSECOND_TIMES = "1677-09-21T00:12:43.145224192", "2262-04-11T23:47:16.854775807"
"""The first and the last time whose number of nanoseconds since 1970 has 64 bits."""


def check_default(type_name: str, value: object, column: str) -> None:
    """Check that the default of a column is a JSON single value of its type (spec, appendix D).

    Args:
        type_name: The canonical primitive type of the column.
        value: The JSON of the default.
        column: The name of the column, for errors.

    Raises:
        BadRequest: The value is not a single value of the type.
    """
    kind = get_base_name(type_name)
    if kind in _TYPES_WITHOUT_DEFAULT:
        raise BadRequest(f"Invalid default value for {column}: {type_name} columns can only default to null")
    try:
        is_valid = _CHECKS[kind](value, type_name)
    except (ValueError, InvalidOperation):
        is_valid = False
    if not is_valid:
        raise BadRequest(f"Cannot parse default of {column} as a {type_name} value: {value!r}")


def _is_int(value: object, bits: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << bits - 1) <= value < 1 << bits - 1


def _is_decimal(value: object, type_name: str) -> bool:
    """Return whether a column's default is a decimal as text, with the digits that the type has after the point."""
    if not isinstance(value, str):
        return False
    number = Decimal(value).as_tuple()
    _, _, parameters = type_name.rstrip(")").partition("(")
    precision, scale = parameters.split(",")
    if not isinstance(number.exponent, int) or -number.exponent != int(scale):
        return False
    # Readers use the default for rows of files without the column, and cannot represent a default with more digits.
    return len(number.digits) <= int(precision)


def _is_date(value: object, _: str) -> bool:
    return isinstance(value, str) and date.fromisoformat(value) is not None


def _is_time(value: object, _: str) -> bool:
    return isinstance(value, str) and time.fromisoformat(_to_micros(value)).tzinfo is None


def _is_timestamp(value: object, type_name: str) -> bool:
    if not isinstance(value, str) or "T" not in value:
        return False
    timestamp = datetime.fromisoformat(_to_micros(value))
    if "timestamptz" in type_name:
        has_expected_zone = value.endswith(("+00:00", "Z")) and timestamp.tzinfo is not None
    else:
        has_expected_zone = timestamp.tzinfo is None
    return has_expected_zone and (not type_name.endswith("_ns") or _fits_nanoseconds(timestamp, value))


def _fits_nanoseconds(timestamp: datetime, value: str) -> bool:
    """Return whether the nanoseconds of a time since 1970 fit into 64 bits.

    Args:
        timestamp: The time without its fraction beyond microseconds.
        value: The text of the time, which can have nine digits of a fraction.
    """
    fraction = re.search(r"[.,](\d{1,9})", value)
    seconds = timestamp.replace(microsecond=0, tzinfo=None).isoformat()
    fraction_digits = "" if fraction is None else fraction[1]
    first, last = _NANOSECOND_TIMES
    # Times of the same form have the order of their texts.
    return first <= f"{seconds}.{fraction_digits:0<9}" <= last


def _to_micros(value: str) -> str:
    # Python parses at most six fractional digits, but nanosecond types have nine.
    return re.sub(r"(\.\d{6})\d{1,3}", r"\1", value)


def _is_uuid(value: object, _: str) -> bool:
    return isinstance(value, str) and len(value) == _UUID_CHARACTERS and UUID(value) is not None


def _is_hex(value: object, type_name: str) -> bool:
    if not isinstance(value, str) or re.fullmatch(r"(?:[0-9a-fA-F]{2})*", value) is None:
        return False
    if not type_name.startswith("fixed"):
        return True
    length = int(type_name.removeprefix("fixed[").removesuffix("]"))
    return len(value) == 2 * length


_CHECKS: dict[str, Callable[[object, str], bool]] = {
    "boolean": lambda value, _: isinstance(value, bool),
    "int": lambda value, _: _is_int(value, 32),
    "long": lambda value, _: _is_int(value, 64),
    # Java rejects an integer here: with `1`, it could not read the metadata; with `1.0`, it can.
    "float": lambda value, _: isinstance(value, float) and abs(value) < _FLOAT_LIMIT,
    "double": lambda value, _: isinstance(value, float) and isfinite(value),
    "decimal": _is_decimal,
    "string": lambda value, _: isinstance(value, str),
    "date": _is_date,
    "time": _is_time,
    "timestamp": _is_timestamp,
    "timestamptz": _is_timestamp,
    "timestamp_ns": _is_timestamp,
    "timestamptz_ns": _is_timestamp,
    "uuid": _is_uuid,
    "fixed": _is_hex,
    "binary": _is_hex,
}
