"""Typed literals, and their conversion to the type of a column.

A literal is converted only if all engines compare it with the column in the same way. If they do not, it is
`Inconvertible`, and the comparison is not used.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from struct import Struct

from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import (
    get_decimal_precision,
    get_decimal_scale,
    get_fixed_length,
    round_to_type,
)

_DATE = re.compile(r"\s*(\d{4}-\d\d-\d\d)\s*", re.ASCII)
_TIME = re.compile(r"\s*(\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)\s*", re.ASCII)
_TIMESTAMP = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?))?\s*+(Z|UTC|[+-]\d\d(?::\d\d)?)?\s*", re.ASCII
)
_INTEGER = re.compile(r"\s*[+-]?\d{1,100}\s*", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?|\.\d++)", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_SHOWN_MAX = 40
_EXACT_DOUBLE_DIGITS = 15
"""The maximum digits of a decimal number that a double preserves."""
_EXACT_DOUBLE_MAX = 2**53
"""The limit below which a double can represent all integers."""
_EXACT_DIVISION_DIGITS_MAX = {"float": (7, 10), "double": (15, 22)}
"""The maximum digits of a number, in total and after the point, for which a single division gives the correctly rounded
value.
"""
_ROUNDING_STEPS_MAX = 4
"""The maximum distance between the nearest value and the value that an engine uses, in steps.

An engine rounds up to three times.
"""
_FLOAT_AND_BITS_STRUCTS = {"float": (Struct("<f"), Struct("<I")), "double": (Struct("<d"), Struct("<Q"))}
_DOUBLE = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_NUMBER_MAX = 100
"""The maximum number of characters of a number."""


class Inconvertible(Exception):
    """Engines convert the literal or the column in different ways, so the comparison is not used."""


class AmbiguousRounding(Inconvertible):
    """Engines round the literal to different values of the column's type.

    Attributes:
        nearest: The text of the literal, which is rounded once when it is parsed, and whether the rounded value equals
            the literal.
        values: All values that an engine may use for the literal, as text in ascending order.
    """

    def __init__(self, nearest: tuple[str, bool], values: tuple[str, ...]) -> None:
        super().__init__()
        self.nearest = nearest
        self.values = values


@dataclass(frozen=True, slots=True)
class TypedLiteral:
    """A literal with its kind and its text.

    Attributes:
        kind: null, boolean, number (exact), double, text, bytes (as hexadecimal), date, time, timestamp, timestamptz or
            uuid.
        text: The text as written.
    """

    kind: str
    text: str

    @property
    def data_type(self) -> str:
        """The literal's Iceberg type without parameters. Null has no type."""
        return "long" if self.kind == "number" and "." not in self.text else _TYPES_BY_KIND[self.kind]

    def parse_number(self) -> Decimal:
        return Decimal(self.text)


_KINDS_BY_TYPE = {
    "int": "number",
    "long": "number",
    "decimal": "number",
    "float": "double",
    "double": "double",
    "string": "text",
    "binary": "bytes",
    "fixed": "bytes",
    **{kind: kind for kind in ("boolean", "date", "time", "timestamp", "timestamptz", "uuid")},
}
_TYPES_BY_KIND = {kind: name for name, kind in _KINDS_BY_TYPE.items()} | {"double": "double", "bytes": "binary"}
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*", re.ASCII)


def parse_typed_literal(data_type: str, text: str) -> TypedLiteral:
    """Return a literal from its Iceberg type and the text of its value.

    Raises:
        ValueError: The type or the value is invalid.
    """
    kind = _KINDS_BY_TYPE.get(get_base_name(data_type))
    if kind is None:
        raise ValueError(f"there are no literals of type {data_type[:_SHOWN_MAX]!r}")
    is_invalid_number = kind == "number" and not is_exact_number(text)
    is_invalid_double = kind == "double" and (len(text) > _NUMBER_MAX or not _is_finite(text))
    if is_invalid_number or is_invalid_double or (kind == "bytes" and _HEX.fullmatch(text) is None):
        raise ValueError(f"{text[:_SHOWN_MAX]!r} is not a {data_type[:_SHOWN_MAX]}")
    return TypedLiteral(kind, text)


def is_exact_number(text: str) -> bool:
    """Return whether the text is a number without an exponent and has at most `_NUMBER_MAX` characters."""
    return len(text) <= _NUMBER_MAX and _NUMBER.fullmatch(text) is not None


def _is_finite(text: str) -> bool:
    return _DOUBLE.fullmatch(text) is not None and math.isfinite(float(text))


def convert_literal(
    literal: TypedLiteral, kind: str, transform: str = IDENTITY, origin: int = 0
) -> tuple[object, bool]:
    """Convert a literal to a JSON literal for a term. Also return whether it is exact in the term's type.

    The transform `day` accepts days since 1970 and dates. An `origin` is set only for SQL's years, because Iceberg's
    years are counted from 1970.

    Args:
        literal: The literal.
        kind: The type of the term.
        transform: The transform of the term.
        origin: The number that is subtracted from the literal: 1970 for SQL's years, otherwise 0.

    Raises:
        Inconvertible: Engines convert the literal or the column in different ways.
    """
    name = get_base_name(kind)
    fit = _FITS.get(name)
    if fit is None:
        raise Inconvertible
    if transform == "day" and literal.kind == "number" and _INTEGER.fullmatch(literal.text):
        return int(literal.text), True
    if origin:
        if literal.kind != "number" or not _INTEGER.fullmatch(literal.text):
            raise Inconvertible
        return int(literal.text) - origin, True
    return fit(literal, kind)


def _fit_boolean(literal: TypedLiteral, _: str) -> tuple[object, bool]:
    if literal.kind in ("boolean", "text") and literal.text.lower() in ("true", "false"):
        return literal.text.lower() == "true", True
    raise Inconvertible


def _fit_integer(literal: TypedLiteral, _: str) -> tuple[object, bool]:
    """Convert a literal for an int or long column.

    Returns:
        The text of the number, and True, because no engine rounds it.

    Raises:
        Inconvertible: The literal is not a number that all engines compare exactly.
    """
    if literal.kind == "number" or (literal.kind == "text" and _INTEGER.fullmatch(literal.text)):
        return literal.text.strip(), True
    if literal.kind == "double":
        # Engines compare as doubles, which is exact for integers that a double can represent.
        value = float(literal.text)
        if abs(value) < _EXACT_DOUBLE_MAX:
            return format(Decimal(value), "f"), True
    raise Inconvertible


def _fit_float(literal: TypedLiteral, kind: str) -> tuple[object, bool]:
    """Convert a number for a float or double column. Also return whether it is exact in the type of the column.

    Raises:
        Inconvertible: The literal is not a number.
        AmbiguousRounding: Engines may round the number to different values.
    """
    if literal.kind not in ("number", "double"):
        raise Inconvertible
    value = float(literal.text)
    try:
        rounded_value = round_to_type(kind, value)
    except ValueError:  # The value is outside the range of floats.
        return literal.text, False
    nearest = literal.text, rounded_value == value
    if literal.kind == "number" and "." in literal.text and rounded_value:
        # Trino divides the digits by a power of ten in the column's type, which rounds longer numbers twice.
        digits, scale = _EXACT_DIVISION_DIGITS_MAX[get_base_name(kind)]
        if (
            len(literal.text.lstrip("+-").replace(".", "").lstrip("0")) > digits
            or _count_fraction_digits(literal.text) > scale
        ):
            raise AmbiguousRounding(
                nearest, tuple(repr(neighbour) for neighbour in _find_values_around(get_base_name(kind), rounded_value))
            )
    return nearest


def _find_values_around(kind: str, value: float) -> list[float]:
    """Return the finite values of a type that are at most `_ROUNDING_STEPS_MAX` steps from `value`, in ascending order.

    Values of the other sign are left out. `value` must be a value of the type. The bits of positive floats, as
    integers, are in the order of the floats, so the neighbours of a float have the neighbouring integers.
    """
    float_struct, integer_struct = _FLOAT_AND_BITS_STRUCTS[kind]
    bits: int = integer_struct.unpack(float_struct.pack(abs(value)))[0]
    steps = range(max(bits - _ROUNDING_STEPS_MAX, 0), bits + _ROUNDING_STEPS_MAX + 1)
    neighbours = [float(float_struct.unpack(integer_struct.pack(step))[0]) for step in steps]
    return sorted(math.copysign(neighbour, value) for neighbour in neighbours if math.isfinite(neighbour))


def _count_fraction_digits(text: str) -> int:
    return len(text.partition(".")[2])


def _fit_decimal(literal: TypedLiteral, kind: str) -> tuple[object, bool]:
    """Return the decimal text of a literal, and True because the text is exact.

    Raises:
        Inconvertible: Engines compare the literal with a decimal in different ways.
    """
    if literal.kind == "number":
        return literal.text, True
    if literal.kind == "text" and is_exact_number(literal.text):
        if _count_fraction_digits(literal.text) <= get_decimal_scale(kind):
            return literal.text, True
    elif literal.kind == "double" and get_decimal_precision(kind) <= _EXACT_DOUBLE_DIGITS:
        return _to_exact_text(literal.text), True
    raise Inconvertible


def _to_exact_text(text: str) -> str:
    """Return a double as a decimal number without an exponent.

    Raises:
        Inconvertible: The text is not a number, or has too many digits.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise Inconvertible from None
    if abs(number.adjusted()) > _EXACT_DOUBLE_DIGITS or len(number.as_tuple().digits) > _EXACT_DOUBLE_DIGITS:
        raise Inconvertible
    return format(number, "f")


def _fit_date(literal: TypedLiteral, _: str) -> tuple[object, bool]:
    if literal.kind in ("text", "date") and (match := _DATE.fullmatch(literal.text)):
        return match[1], True
    if literal.kind in ("timestamp", "timestamptz"):
        return _to_iso_text(literal), True
    raise Inconvertible


def _fit_time(literal: TypedLiteral, _: str) -> tuple[object, bool]:
    if literal.kind in ("text", "time") and (match := _TIME.fullmatch(literal.text)):
        return match[1], True
    raise Inconvertible


def _fit_timestamp(literal: TypedLiteral, kind: str) -> tuple[object, bool]:
    if literal.kind == "date" and (match := _DATE.fullmatch(literal.text)):
        return match[1], True
    if literal.kind not in ("text", "timestamp", "timestamptz"):
        raise Inconvertible
    text = _to_iso_text(literal)
    if "tz" not in kind and (literal.kind == "timestamptz" or text.endswith("Z") or text[-len("+02:00")] in "+-"):
        raise Inconvertible
    return text, True


def _to_iso_text(literal: TypedLiteral) -> str:
    """Return a timestamp in ISO format. Raise Inconvertible if the literal is not a timestamp."""
    match = _TIMESTAMP.fullmatch(literal.text)
    if match is None:
        raise Inconvertible
    zone = match[3] or ("Z" if literal.kind == "timestamptz" else "")
    if zone == "UTC":
        zone = "Z"
    elif len(zone) == len("+02"):
        zone += ":00"
    return f"{match[1]}T{match[2] or '00:00:00'}{zone}"


def _fit_string(literal: TypedLiteral, _: str) -> tuple[object, bool]:
    if literal.kind == "text":
        return literal.text, True
    raise Inconvertible


def _fit_uuid(literal: TypedLiteral, _: str) -> tuple[object, bool]:
    if literal.kind in ("text", "uuid") and _UUID.fullmatch(literal.text):
        return literal.text, True
    raise Inconvertible


def _fit_bytes(literal: TypedLiteral, kind: str) -> tuple[object, bool]:
    if literal.kind != "bytes" or len(literal.text) % 2:
        raise Inconvertible
    if get_base_name(kind) == "fixed" and len(literal.text) != 2 * get_fixed_length(kind):
        raise Inconvertible
    return literal.text, True


_FITS = {
    "boolean": _fit_boolean,
    "int": _fit_integer,
    "long": _fit_integer,
    "float": _fit_float,
    "double": _fit_float,
    "decimal": _fit_decimal,
    "date": _fit_date,
    "time": _fit_time,
    **dict.fromkeys(("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), _fit_timestamp),
    "string": _fit_string,
    "uuid": _fit_uuid,
    "fixed": _fit_bytes,
    "binary": _fit_bytes,
}
