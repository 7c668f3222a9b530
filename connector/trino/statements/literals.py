"""Literals of Trino's SQL, and their spelling in the predicates that the catalog takes.

Only those are taken whose value is plain from the text alone, the same to Trino and to Iceberg: numbers, texts, dates,
timestamps, and what is added to or taken from dates and numbers. A literal without a zone beside a column with one is
of the session's zone, and so is one with a zone beside a date: `LiteralText.zone` says which of the two it is.

What Trino does not compute, since the value is beyond the type's range, is no literal: the statement is to fail as it
would without a plan, or to be answered as it would where the value does not matter.
"""

from __future__ import annotations

import math
import re
from calendar import monthrange
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from decimal import Context, Decimal

from sqlglot import exp

from seamark.connector.plans.quotes import quoted_text

LOCAL, ZONED = "local", "zoned"
_Type = exp.DataType.Type
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)", re.ASCII)
_DOUBLE = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2}) ([0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.([0-9]{1,6}))?)?)( UTC|[+-][0-9]{2}:[0-9]{2})?",
    re.ASCII,
)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_DIGITS_MAX = 38
_EXACT = Context(prec=2 * _DIGITS_MAX)
_CAST_PRECISION = 3
"""Digits of a second that `CAST(… AS timestamp)` keeps."""
_BITS = {_Type.TINYINT: 8, _Type.SMALLINT: 16, _Type.INT: 32, _Type.BIGINT: 64}
_OFFSET_HOURS_MAX = 14


@dataclass(frozen=True)
class LiteralText:
    """`kind`: null, boolean, integer, decimal, double, text, date, timestamp, uuid. `value`: its plain text."""

    kind: str
    value: str
    zone: str | None = None
    bits: int = field(default=64, compare=False)
    """Of the integer type that Trino gives it. Where the text leaves two, the smaller one."""

    @property
    def sql(self) -> str:
        if self.kind == "text":
            return quoted_text(self.value)
        if self.kind in ("date", "timestamp", "uuid"):
            return f"{self.kind.upper()} '{self.value}'"
        return self.value


def parse_literal(node: exp.Expr | None, *, casts_decimal: bool) -> LiteralText | None:
    """None for what is no plain literal.

    `casts_decimal`: what looks like `DECIMAL '1.5'` may have been `CAST('1.5' AS DECIMAL)`, which is 2.
    """
    match node:
        case exp.Paren():
            return parse_literal(node.this, casts_decimal=casts_decimal)
        case exp.Null():
            return LiteralText("null", "NULL")
        case exp.Boolean():
            return LiteralText("boolean", "TRUE" if node.this else "FALSE")
        case exp.Literal():
            return LiteralText("text", str(node.this)) if node.is_string else _number(str(node.this))
        case exp.Neg():
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            if inner is None or inner.kind not in ("integer", "decimal", "double") or inner.value.startswith("-"):
                return None
            if inner.kind == "integer":  # Trino may read the sign as a part of the number
                return _integer(-int(inner.value), min(inner.bits, _bits_of(-int(inner.value))))
            return LiteralText(inner.kind, f"-{inner.value}")
        case exp.Add() | exp.Sub():
            return _sum(node, casts_decimal)
        case exp.Date() if list(node.args) == ["this"] or not any(v for k, v in node.args.items() if k != "this"):
            inner = parse_literal(node.this, casts_decimal=casts_decimal)
            return _date(inner.value) if inner is not None and inner.kind in ("text", "date") else None
        case exp.Cast() if type(node) is exp.Cast and not (node.args.get("format") or node.args.get("default")):
            return _cast(parse_literal(node.this, casts_decimal=casts_decimal), node.to, casts_decimal)
    return None


def _number(text: str) -> LiteralText | None:
    if "e" in text.lower():
        return _double(text)
    if _INTEGER.fullmatch(text):
        return _integer(int(text), _bits_of(int(text)))
    return _decimal(text)


def _bits_of(value: int) -> int:
    """Of the type that a number without a type has."""
    return 32 if _fits(value, 32) else 64


def _fits(value: int, bits: int) -> bool:
    return -(1 << bits - 1) <= value < 1 << bits - 1


def _integer(value: int, bits: int) -> LiteralText | None:
    return LiteralText("integer", str(value), bits=bits) if _fits(value, bits) else None


def _double(text: str) -> LiteralText | None:
    return LiteralText("double", text) if _DOUBLE.fullmatch(text) and math.isfinite(float(text)) else None


def _decimal(text: str) -> LiteralText | None:
    if not _DECIMAL.fullmatch(text) or sum(one.isdigit() for one in text) > _DIGITS_MAX:
        return None
    return LiteralText("decimal", format(Decimal(text), "f"))


def _date(text: str) -> LiteralText | None:
    if not _DATE.fullmatch(text):
        return None
    try:
        date.fromisoformat(text)
    except ValueError:
        return None
    return LiteralText("date", text, LOCAL)


def _timestamp(text: str, to: exp.DataType) -> LiteralText | None:
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        return None
    day, time, fraction, zone = match.groups()
    try:
        datetime.fromisoformat(f"{day} {time}")
    except ValueError:
        return None
    sizes = [one.name for one in to.expressions]
    if len(fraction or "") > (int(sizes[0]) if sizes and sizes[0].isdigit() else _CAST_PRECISION):
        return None
    if (to.this is _Type.TIMESTAMPTZ) != (zone is not None):  # a conversion by the session's zone
        return None
    if zone and zone != " UTC" and (int(zone[1:3]), int(zone[4:])) > (_OFFSET_HOURS_MAX, 0):
        return None
    return LiteralText("timestamp", text, ZONED if zone else LOCAL)


def _cast(given: LiteralText | None, to: exp.DataType, casts_decimal: bool) -> LiteralText | None:
    if given is None or given.kind == "null":
        return given
    target, kind, text = to.this, given.kind, given.value
    if target is _Type.DATE:
        return _date(text) if kind in ("text", "date") else None
    if kind == "text" and target in (_Type.TIMESTAMP, _Type.TIMESTAMPTZ):
        return _timestamp(text, to)
    if target in (_Type.VARCHAR, _Type.TEXT):
        return given if kind == "text" and not to.expressions else None
    if kind == "text" and target is _Type.UUID:
        return LiteralText("uuid", text.lower()) if _UUID.fullmatch(text) else None
    if kind not in ("text", "integer", "decimal"):
        return None
    if target in _BITS and _INTEGER.fullmatch(text):
        return _integer(int(text), _BITS[target])
    if target is _Type.DOUBLE and kind == "text" and _DOUBLE.fullmatch(text):
        return _double(text if "e" in text.lower() else f"{text}E0")
    if target is _Type.DECIMAL and kind == "text" and not to.expressions:
        return None if casts_decimal and "." in text else _decimal(text)
    return None


def _sum(node: exp.Add | exp.Sub, casts_decimal: bool) -> LiteralText | None:
    """Of numbers, and of dates and intervals."""
    left = parse_literal(node.this, casts_decimal=casts_decimal)
    if left is None:
        return None
    sign = -1 if isinstance(node, exp.Sub) else 1
    if isinstance(node.expression, exp.Interval):
        return _later(left, node.expression, sign) if left.kind == "date" else None
    right = parse_literal(node.expression, casts_decimal=casts_decimal)
    kinds = {left.kind, right.kind} if right is not None else set()
    if right is None or not kinds <= {"integer", "decimal"}:
        return None
    if kinds == {"integer"}:
        return _integer(int(left.value) + sign * int(right.value), max(left.bits, right.bits))
    parts = Decimal(left.value), Decimal(right.value)
    total = _EXACT.add(parts[0], sign * parts[1])
    scale = max(_scale(one) for one in parts)
    if any(len(one.as_tuple().digits) - _scale(one) + scale > _DIGITS_MAX for one in (*parts, total)):
        return None
    return LiteralText("decimal", format(total, "f"))


def _scale(number: Decimal) -> int:
    exponent = number.as_tuple().exponent
    return -exponent if isinstance(exponent, int) else 0


def _later(given: LiteralText, interval: exp.Interval, sign: int) -> LiteralText | None:
    """A month's last day at most, as in Trino: a month after 31 January is 28 or 29 February."""
    number, unit = interval.this, interval.args.get("unit")
    if not isinstance(number, exp.Literal) or not _INTEGER.fullmatch(str(number.this)) or type(unit) is not exp.Var:
        return None
    count, start = sign * int(str(number.this)), date.fromisoformat(given.value)
    try:
        match unit.name.upper():
            case "DAY":
                return _date((start + timedelta(days=count)).isoformat())
            case "MONTH" | "YEAR" as name:
                year, month = divmod(start.year * 12 + start.month - 1 + count * (12 if name == "YEAR" else 1), 12)
                last = monthrange(year, month + 1)[1]
                return _date(date(year, month + 1, min(start.day, last)).isoformat())
    except (ValueError, OverflowError):
        pass
    return None
