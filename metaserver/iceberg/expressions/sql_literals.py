"""SQL literals, and whether they can be compared with a column of some type independent of the engine.

A literal is converted for a column only if every engine compares the two the same way. Otherwise it is Unfit, and the
comparison is not used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from sqlglot import exp

from seamark.metaserver.iceberg.types.transforms import IDENTITY
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.iceberg.types.values import decimal_precision, decimal_scale, fixed_length, round_to

_Type = exp.DataType.Type
_DATE = re.compile(r"\s*(\d{4}-\d\d-\d\d)\s*", re.ASCII)
_TIME = re.compile(r"\s*(\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)\s*", re.ASCII)
_TIMESTAMP = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?))?\s*(Z|UTC|[+-]\d\d(?::\d\d)?)?\s*", re.ASCII
)
_INTEGER = re.compile(r"\s*[+-]?\d{1,100}\s*", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_EXACT_DOUBLE_DIGITS = 15
_EXACT_DOUBLE_MAX = 2**53
_WHOLE = (_Type.TINYINT, _Type.SMALLINT, _Type.INT, _Type.BIGINT)
_TYPED = {
    _Type.DATE: "date",
    _Type.TIME: "time",
    _Type.TIMESTAMP: "timestamp",
    _Type.TIMESTAMPNTZ: "timestamp",
    _Type.DATETIME: "timestamp",
    _Type.TIMESTAMPTZ: "timestamptz",
    _Type.TIMESTAMPLTZ: "timestamptz",
    _Type.UUID: "uuid",
}


class Inconvertible(Exception):
    """Engines convert the literal or the column in different ways, so the comparison is not used."""


@dataclass(frozen=True, slots=True)
class SqlLiteral:
    """An SQL literal with its written `text`.

    `kind`: null, boolean, number (exact), double, text, bytes (as hexadecimal), date, time, timestamp, timestamptz,
    uuid.
    """

    kind: str
    text: str

    def number(self) -> Decimal:
        return Decimal(self.text)


def literal_of(node: exp.Expr | None) -> SqlLiteral | None:
    """None if the node is not a literal, or a cast of one with an unclear result."""
    match node:
        case exp.Paren():
            return literal_of(node.this)
        case exp.Null():
            return SqlLiteral("null", "")
        case exp.Boolean():
            return SqlLiteral("boolean", "true" if node.this else "false")
        case exp.Literal():
            text = str(node.this)
            if node.is_string:
                return SqlLiteral("text", text)
            return SqlLiteral("double" if "e" in text.lower() else "number", text)
        case exp.Neg():
            inner = literal_of(node.this)
            if inner is None or inner.kind not in ("number", "double") or inner.text.startswith("-"):
                return None
            return SqlLiteral(inner.kind, f"-{inner.text}")
        case exp.HexString():
            return SqlLiteral("bytes", str(node.this))
        case exp.Cast() if type(node) is exp.Cast and not (node.args.get("format") or node.args.get("default")):
            return _cast(literal_of(node.this), node.to)
        case exp.Date() if len(list(node.iter_expressions())) == 1:
            return _cast(literal_of(node.this), exp.DataType.build("DATE"))
    return None


def _cast(given: SqlLiteral | None, to: exp.DataType) -> SqlLiteral | None:
    if given is None or given.kind == "null":
        return given
    kind, text, target = given.kind, given.text, to.this
    if target in _TYPED:
        return SqlLiteral(_TYPED[target], text) if kind in ("text", _TYPED[target]) else None
    if target in (_Type.VARCHAR, _Type.TEXT):
        return given if kind == "text" and not to.expressions else None
    if kind not in ("number", "text") or _NUMBER.fullmatch(text) is None:
        return None
    if target in _WHOLE and _INTEGER.fullmatch(text):
        return SqlLiteral("number", text)
    if target is _Type.DOUBLE:
        return SqlLiteral("double", text)
    if target is _Type.DECIMAL:
        return SqlLiteral("number", text) if _within(text, to) else None
    return None


def _within(text: str, to: exp.DataType) -> bool:
    """Whether a cast to decimal leaves the number unchanged."""
    sizes = [int(size.name) for size in to.expressions if size.name.isdigit()]
    scale = sizes[1] if len(sizes) > 1 else 0
    if not sizes:  # the default differs between engines; `DECIMAL '1.5'` has the literal's scale
        return True
    whole, _, fraction = text.lstrip("+-").partition(".")
    return len(fraction.rstrip("0")) <= scale and len(whole.lstrip("0")) <= sizes[0] - scale


def convert_literal(given: SqlLiteral, kind: str, transform: str = IDENTITY, origin: int = 0) -> tuple[object, bool]:
    """(the JSON literal for a term of type `kind`, whether it is exact in the type). Raises Unfit.

    `origin` is subtracted from a number; the transform `day` accepts days since 1970 and dates.
    """
    name = base_name(kind)
    fit = _FITS.get(name)
    if fit is None:
        raise Inconvertible
    if transform == "day" and given.kind == "number" and _INTEGER.fullmatch(given.text):
        return int(given.text), True
    if origin:
        if given.kind != "number" or not _INTEGER.fullmatch(given.text):
            raise Inconvertible
        return int(given.text) - origin, True
    return fit(given, kind)


def _boolean(given: SqlLiteral, _: str) -> tuple[object, bool]:
    if given.kind in ("boolean", "text") and given.text.lower() in ("true", "false"):
        return given.text.lower() == "true", True
    raise Inconvertible


def _integer(given: SqlLiteral, _: str) -> tuple[object, bool]:
    if given.kind == "number" or (given.kind == "text" and _INTEGER.fullmatch(given.text)):
        return given.text.strip(), True
    if given.kind == "double":
        # Engines compare as doubles, which is exact for integers that doubles represent.
        value = float(given.text)
        if abs(value) < _EXACT_DOUBLE_MAX:
            return format(Decimal(value), "f"), True
    raise Inconvertible


def _floating(given: SqlLiteral, kind: str) -> tuple[object, bool]:
    if given.kind not in ("number", "double"):
        raise Inconvertible
    value = float(given.text)
    try:
        return given.text, round_to(kind, value) == value
    except ValueError:  # beyond the range of floats
        return given.text, False


def _decimal(given: SqlLiteral, kind: str) -> tuple[object, bool]:
    if given.kind == "number":
        return given.text, True
    if given.kind == "text" and _NUMBER.fullmatch(given.text):
        if len(given.text.partition(".")[2]) <= decimal_scale(kind):
            return given.text, True
    elif given.kind == "double" and decimal_precision(kind) <= _EXACT_DOUBLE_DIGITS:
        return _exact(given.text), True
    raise Inconvertible


def _exact(text: str) -> str:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise Inconvertible from None
    if abs(number.adjusted()) > _EXACT_DOUBLE_DIGITS or len(number.as_tuple().digits) > _EXACT_DOUBLE_DIGITS:
        raise Inconvertible
    return format(number, "f")


def _date(given: SqlLiteral, _: str) -> tuple[object, bool]:
    if given.kind in ("text", "date") and (match := _DATE.fullmatch(given.text)):
        return match[1], True
    if given.kind in ("timestamp", "timestamptz"):
        return _iso(given), True
    raise Inconvertible


def _time(given: SqlLiteral, _: str) -> tuple[object, bool]:
    if given.kind in ("text", "time") and (match := _TIME.fullmatch(given.text)):
        return match[1], True
    raise Inconvertible


def _timestamp(given: SqlLiteral, kind: str) -> tuple[object, bool]:
    if given.kind == "date" and (match := _DATE.fullmatch(given.text)):
        return match[1], True
    if given.kind not in ("text", "timestamp", "timestamptz"):
        raise Inconvertible
    text = _iso(given)
    if "tz" not in kind and (given.kind == "timestamptz" or text.endswith("Z") or text[-6] in "+-"):
        raise Inconvertible
    return text, True


def _iso(given: SqlLiteral) -> str:
    match = _TIMESTAMP.fullmatch(given.text)
    if match is None:
        raise Inconvertible
    zone = match[3] or ("Z" if given.kind == "timestamptz" else "")
    if zone == "UTC":
        zone = "Z"
    elif len(zone) == 3:
        zone += ":00"
    return f"{match[1]}T{match[2] or '00:00:00'}{zone}"


def _string(given: SqlLiteral, _: str) -> tuple[object, bool]:
    if given.kind == "text":
        return given.text, True
    raise Inconvertible


def _uuid(given: SqlLiteral, _: str) -> tuple[object, bool]:
    if given.kind in ("text", "uuid") and _UUID.fullmatch(given.text):
        return given.text, True
    raise Inconvertible


def _bytes(given: SqlLiteral, kind: str) -> tuple[object, bool]:
    if given.kind != "bytes" or len(given.text) % 2:
        raise Inconvertible
    if base_name(kind) == "fixed" and len(given.text) != 2 * fixed_length(kind):
        raise Inconvertible
    return given.text, True


_FITS = {
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
