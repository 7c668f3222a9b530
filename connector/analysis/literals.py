"""Reads literals of Trino's SQL.

A literal is read only if its value depends only on the text and is the same in Trino and Iceberg. Numbers, texts,
dates, timestamps, sums and differences of numbers, and sums and differences of a date or timestamp and an interval are
supported. If a literal without a zone is compared with a column with a zone, it is in the session's zone.
`Literal.zone` distinguishes literals with and without a zone.

A value outside the range of its type is not read as a literal. Trino fails for such a value, so the statement fails
with or without a plan.
"""

from __future__ import annotations

import math
import re
from calendar import monthrange
from datetime import UTC, date, datetime, timedelta
from decimal import Context, Decimal

from sqlglot import exp

from seamark.connector.analysis.operands import NULLS_WITHOUT_EFFECT, get_cast_class
from seamark.connector.plans.literals import LOCAL, ZONED, Literal

_Type = exp.DataType.Type
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)", re.ASCII)
_DOUBLE = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
"""`_DECIMAL` and `_DOUBLE` use possessive quantifiers. With backtracking, the time would grow with the square of the
number of digits.
"""
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.([0-9]{1,6}))?)?)( UTC|[+-][0-9]{2}:[0-9]{2})?",
    re.ASCII,
)
_ISO_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})T([0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,3})?)?)(Z|[+-][0-9]{2}:[0-9]{2})",
    re.ASCII,
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_DIGITS_MAX = 38
"""The maximum number of digits of a decimal in Trino."""
EXACT = Context(prec=2 * _DIGITS_MAX)
"""A context in which sums and products of two decimals are not rounded."""
_CAST_PRECISION = 3
"""The number of fractional digits of a second that `CAST(… AS timestamp)` keeps."""
_BITS = {_Type.TINYINT: 8, _Type.SMALLINT: 16, _Type.INT: 32, _Type.BIGINT: 64}
_OFFSET_HOURS_MAX = 14
_PARSED_FORMATS = frozenset(
    {"%Y-%m-%d", "%Y%m%d", "%Y-%m", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y%m%d%H%M%S"}
)
_FOUR_DIGIT_YEAR_MIN = 1000
"""The first year that Python's strftime writes with four digits."""
_SECONDS_MAX = 253_402_300_799
"""The last second of the year 9999, as a Unix time."""
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}
UNITS = {
    "WEEK": timedelta(days=7),
    "DAY": timedelta(days=1),
    "HOUR": timedelta(hours=1),
    "MINUTE": timedelta(minutes=1),
    "SECOND": timedelta(seconds=1),
}
"""The units of intervals with a fixed length."""


def parse_literal(node: exp.Expr | None, *, casts_decimal: bool) -> Literal | None:
    """Return the literal that a node represents, or None if the node is not a literal.

    Args:
        casts_decimal: Whether the statement may convert values to decimals. sqlglot parses `CAST('1.5' AS DECIMAL)`,
            whose value is 2, into the same node as `DECIMAL '1.5'`, so typed decimals are then not read.
    """
    match node:
        case exp.Paren():
            return parse_literal(node.this, casts_decimal=casts_decimal)
        case exp.Null():
            return Literal("null", "NULL")
        case exp.Boolean():
            return Literal("boolean", "TRUE" if node.this else "FALSE")
        case exp.Literal():
            return Literal("text", str(node.this)) if node.is_string else _parse_number(str(node.this))
        case exp.Neg():
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            if inner is None or inner.kind not in ("integer", "decimal", "double") or inner.value.startswith("-"):
                return None
            if inner.kind == "integer":  # In Trino, the sign may be a part of the number.
                return _make_integer_literal(-int(inner.value), min(inner.bits, _count_bits(-int(inner.value))))
            return Literal(inner.kind, f"-{inner.value}")
        case exp.Add() | exp.Sub():
            return _parse_sum(node, casts_decimal)
        case exp.Date() if list(node.args) == ["this"] or not any(
            value for name, value in node.args.items() if name != "this"
        ):
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            return _parse_date(inner.value) if inner is not None and inner.kind in ("text", "date") else None
        case exp.FromISO8601Timestamp():
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            return _parse_iso_timestamp(inner.value) if inner is not None and inner.kind == "text" else None
        case exp.FromISO8601Date():
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            return _parse_date(inner.value) if inner is not None and inner.kind == "text" else None
        case exp.StrToTime():
            return _parse_time(node.this, node.args.get("format"))
        case exp.UnixToTime() if not any(value for name, value in node.args.items() if name != "this"):
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            return _convert_unix_time(int(inner.value)) if inner is not None and inner.kind == "integer" else None
        case exp.Cast() if type(node) is exp.Cast and not (node.args.get("format") or node.args.get("default")):
            return _cast(parse_literal(node.this, casts_decimal=casts_decimal), node.to, casts_decimal)
    return None


def _parse_number(text: str) -> Literal | None:
    if "e" in text.lower():
        return _parse_double(text)
    if _INTEGER.fullmatch(text):
        return _make_integer_literal(int(text), _count_bits(int(text)))
    return _parse_decimal(text)


def _count_bits(value: int) -> int:
    """Return the size in bits of the type of an integer literal."""
    return 32 if _fits(value, 32) else 64


def _fits(value: int, bits: int) -> bool:
    return -(1 << bits - 1) <= value < 1 << bits - 1


def _make_integer_literal(value: int, bits: int) -> Literal | None:
    return Literal("integer", str(value), bits=bits) if _fits(value, bits) else None


def _parse_double(text: str) -> Literal | None:
    return Literal("double", text) if _DOUBLE.fullmatch(text) and math.isfinite(float(text)) else None


def _parse_decimal(text: str) -> Literal | None:
    if not _DECIMAL.fullmatch(text) or sum(letter.isdigit() for letter in text) > _DIGITS_MAX:
        return None
    return Literal("decimal", format(Decimal(text), "f"))


def _parse_date(text: str) -> Literal | None:
    if not _DATE.fullmatch(text):
        return None
    try:
        date.fromisoformat(text)
    except ValueError:
        return None
    return Literal("date", text, LOCAL)


def _parse_timestamp(text: str, target_type: exp.DataType) -> Literal | None:
    """Return the value of a text that is cast to a timestamp type.

    The result is None if the text is not a valid timestamp, if the cast would round the value, or if only one of the
    text and the type has a zone.
    """
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    day, time, fraction, zone = match.groups()
    try:
        datetime.fromisoformat(f"{day} {time}")
    except ValueError:
        return None
    sizes = [parameter.name for parameter in target_type.expressions]
    if len(fraction or "") > (int(sizes[0]) if sizes and sizes[0].isdigit() else _CAST_PRECISION):
        return None
    # The engine would convert the value by the session's zone.
    if (target_type.this is _Type.TIMESTAMPTZ) != (zone is not None):
        return None
    if zone and zone != " UTC" and (int(zone[1:3]), int(zone[4:])) > (_OFFSET_HOURS_MAX, 0):
        return None
    return Literal("timestamp", text, ZONED if zone else LOCAL)


def _parse_iso_timestamp(text: str) -> Literal | None:
    """Parse the argument of `from_iso8601_timestamp`. The result has a zone and milliseconds.

    Returns:
        The timestamp, or None if the text has no zone or another form.
    """
    match = _ISO_TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    day, time, zone = match.groups()
    return _parse_timestamp(f"{day} {time}{' UTC' if zone == 'Z' else zone}", exp.DataType(this=_Type.TIMESTAMPTZ))


def _parse_time(node: exp.Expr, pattern: exp.Expr | None) -> Literal | None:
    """Return the value of an expression such as `date_parse('2026-01-31', '%Y-%m-%d')`. It has no zone.

    The result is None if an argument is not a text, if the format is not in `_PARSED_FORMATS`, or if the text differs
    from the formatted value. Engines may parse such a text differently.
    """
    if not all(isinstance(text, exp.Literal) and text.is_string for text in (node, pattern)):
        return None
    text, form = str(node.this), str(pattern.this) if pattern is not None else ""
    if form not in _PARSED_FORMATS:
        return None
    try:
        moment = datetime.strptime(text, form)
    except ValueError:
        return None
    is_same = moment.year >= _FOUR_DIGIT_YEAR_MIN and moment.strftime(form) == text
    return make_timestamp_literal(moment) if is_same else None


def _convert_unix_time(seconds: int) -> Literal | None:
    """Return the value of an expression such as `from_unixtime(0)`, whose zone is UTC.

    The result is None for a time before 1970 or far in the future.
    """
    if not 0 <= seconds <= _SECONDS_MAX:
        return None
    return Literal("timestamp", f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC", ZONED)


def _cast(literal: Literal | None, target_type: exp.DataType, casts_decimal: bool) -> Literal | None:
    """Return the literal cast to a type, or None if the cast is not supported or its result is uncertain.

    Args:
        literal: The literal, or None.
        target_type: The type to which it is cast.
        casts_decimal: Whether the statement may convert values to decimals. A text with a fraction is then not read as
            a decimal, because the conversion may round it.
    """
    if literal is None:
        return None
    if literal.kind == "null":  # A NULL with a type can change the common type of the other operands.
        return literal if get_cast_class(target_type) in NULLS_WITHOUT_EFFECT else None
    target, kind, text = target_type.this, literal.kind, literal.value
    if target is _Type.DATE:
        return _parse_date(text) if kind in ("text", "date") else None
    if kind == "text" and target in (_Type.TIMESTAMP, _Type.TIMESTAMPTZ):
        return _parse_timestamp(text, target_type)
    if target in (_Type.VARCHAR, _Type.TEXT):
        return literal if kind == "text" and not target_type.expressions else None
    if kind == "text" and target is _Type.UUID:
        return Literal("uuid", text.lower()) if _UUID.fullmatch(text) else None
    if kind not in ("text", "integer", "decimal"):
        return None
    if target in _BITS and _INTEGER.fullmatch(text):
        return _make_integer_literal(int(text), _BITS[target])
    if target is _Type.DOUBLE and kind == "text" and _DOUBLE.fullmatch(text):
        return _parse_double(text if "e" in text.lower() else f"{text}E0")
    if target is _Type.DECIMAL and kind == "text" and not target_type.expressions:
        return None if casts_decimal and "." in text else _parse_decimal(text)
    return None


def _parse_sum(node: exp.Add | exp.Sub, casts_decimal: bool) -> Literal | None:
    """Return the sum or difference of two exact numbers, or of a date or timestamp and an interval, otherwise None.

    The result is also None if an exact decimal result would need more than `_DIGITS_MAX` digits.
    """
    left = parse_literal(node.this, casts_decimal=casts_decimal)
    if left is None:
        return None
    sign = -1 if isinstance(node, exp.Sub) else 1
    if isinstance(node.expression, exp.Interval):
        return _add_interval(left, node.expression, sign) if left.kind in ("date", "timestamp") else None
    right = parse_literal(node.expression, casts_decimal=casts_decimal)
    kinds = {left.kind, right.kind} if right is not None else set()
    if right is None or not kinds <= {"integer", "decimal"}:
        return None
    if kinds == {"integer"}:
        return _make_integer_literal(int(left.value) + sign * int(right.value), max(left.bits, right.bits))
    parts = Decimal(left.value), Decimal(right.value)
    total = EXACT.add(parts[0], sign * parts[1])
    scale = max(_get_scale(part) for part in parts)
    if any(len(part.as_tuple().digits) - _get_scale(part) + scale > _DIGITS_MAX for part in (*parts, total)):
        return None
    return Literal("decimal", format(total, "f"))


def _get_scale(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _add_interval(literal: Literal, interval: exp.Interval, sign: int) -> Literal | None:
    interval_parts = parse_interval(interval)
    if interval_parts is None:
        return None
    unit, count = interval_parts[0], sign * interval_parts[1]
    try:
        if literal.kind == "date":
            start = date.fromisoformat(literal.value)
            if unit in _MONTHS:
                return _parse_date(add_months(start, unit, count).isoformat())
            return _parse_date((start + timedelta(days=count)).isoformat()) if unit == "DAY" else None
        if literal.zone == ZONED:
            return None
        start = datetime.fromisoformat(literal.value)
        day = add_months(start.date(), unit, count) if unit in _MONTHS else None
        moment = start + count * UNITS[unit] if day is None else datetime.combine(day, start.time())
    except (ValueError, OverflowError):
        return None
    return make_timestamp_literal(moment)


def make_timestamp_literal(moment: datetime) -> Literal:
    """Return a timestamp literal without a zone."""
    return Literal("timestamp", moment.isoformat(" ", "auto"), LOCAL)


def parse_interval(node: exp.Expr | None) -> tuple[str, int] | None:
    """Return the unit of an interval in upper case, and the number of units.

    Return None for other expressions.
    """
    if type(node) is not exp.Interval:
        return None
    number, unit, sign = node.this, node.args.get("unit"), 1
    if isinstance(number, exp.Neg):
        number, sign = number.this, -1
    if not isinstance(number, exp.Literal) or not _INTEGER.fullmatch(str(number.this)) or type(unit) is not exp.Var:
        return None
    name = unit.name.upper().removesuffix("S")
    return (name, sign * int(str(number.this))) if name in _MONTHS or name in UNITS else None


def parse_unit(node: exp.Expr) -> str:
    """Return the unit argument of a date or time function in upper case.

    Return "" if the unit is not a name.
    """
    unit = node.args.get("unit")
    return unit.name.upper() if isinstance(unit, exp.Var) else ""


def add_months(day: date, unit: str, count: int) -> date:
    """Add a number of months, quarters or years to a date.

    As in Trino, the day of the result is at most the last day of its month: one month after 31 January is 28 or
    29 February.

    Raises:
        ValueError: The result is outside the range of dates.
    """
    year, month = divmod(day.year * 12 + day.month - 1 + count * _MONTHS[unit], 12)
    return date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))
