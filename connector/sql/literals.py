"""Parses literals of the dialect, and the types in CAST."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.plans.quotes import quote_text
from seamark.connector.sql.scopes import SqlValue, describe
from seamark.connector.sql.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INTEGER,
    PRECISION_MAX,
    REAL,
    TIMESTAMP,
    UUID,
    VARCHAR,
    ZONED,
    SqlType,
    UnsupportedInDuckDB,
    make_decimal,
    name_duckdb_type,
)
from seamark.connector.sql.values import cast

_Type = exp.DType
_SHOWN_CHARACTERS_MAX = 40
"""The maximum length of a literal in an error message."""
_CASTS = {
    _Type.BOOLEAN: BOOLEAN,
    _Type.INT: INTEGER,
    _Type.BIGINT: BIGINT,
    _Type.FLOAT: REAL,
    _Type.DOUBLE: DOUBLE,
    _Type.VARCHAR: VARCHAR,
    _Type.TEXT: VARCHAR,
    _Type.DATE: DATE,
    _Type.TIMESTAMP: TIMESTAMP,
    _Type.TIMESTAMPTZ: ZONED,
    _Type.UUID: UUID,
}
_INT32, _INT64 = 1 << 31, 1 << 63
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TIMESTAMP = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})(?:[ T]([0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?))?"
    r"(?: ?(UTC|Z|[+-][0-9]{2}:[0-9]{2}))?",
    re.ASCII,
)
_UTC = re.compile(r"(?: ?(?:UTC|Z|[+-]00:00))?", re.ASCII)
_FRACTION = re.compile(r":[0-9]{2}\.([0-9]+)", re.ASCII)
MILLISECOND_DIGITS, TIME_DIGITS_MAX = 3, 6
"""The number of digits of a second in the type `timestamp` of Trino, and in the times of Iceberg."""
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_WHOLE = re.compile(r"[+-]?[0-9]{1,19}", re.ASCII)
_DOUBLE = re.compile(r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,2})?", re.ASCII)
_NUMBER = re.compile(r"([0-9]*)(?:\.([0-9]*))?", re.ASCII)


def parse_number(text: str, node: exp.Expr, *, negative: bool = False) -> SqlValue:
    """Return the value of a numeric literal.

    A literal with an exponent is a double, any other literal with a decimal point is a decimal, and the rest are
    integers.

    Raises:
        InvalidRequest: The text is not a number, is out of the range of bigint, or has too many digits for a decimal.
    """
    sign = "-" if negative else ""
    if "e" in text.lower():
        try:
            double_value = float(sign + text)
        except ValueError:
            raise InvalidRequest(f"{text[:_SHOWN_CHARACTERS_MAX]!r} is not a number") from None
        return SqlValue(f"CAST('{double_value!r}' AS DOUBLE)", DOUBLE, node)
    match = _NUMBER.fullmatch(text)
    if match is None or not any(match.groups("")):
        raise InvalidRequest(f"{text[:_SHOWN_CHARACTERS_MAX]!r} is not a number")
    integer_digits, fraction = match[1].lstrip("0"), match[2]
    if fraction is None:
        size = int(integer_digits or "0")
        if size >= _INT64 + negative:
            raise InvalidRequest(f"{sign}{text[:_SHOWN_CHARACTERS_MAX]} is out of the range of bigint")
        kind = INTEGER if size < _INT32 + negative else BIGINT
        return SqlValue(
            f"CAST({sign}{size} AS {name_duckdb_type(kind)})" if kind == BIGINT or negative else str(size), kind, node
        )
    kind = make_decimal(max(1, len(integer_digits) + len(fraction)), len(fraction))
    if kind.precision > PRECISION_MAX:
        raise InvalidRequest(f"{text[:_SHOWN_CHARACTERS_MAX]} has more than {PRECISION_MAX} digits")
    return SqlValue(f"CAST('{sign}{integer_digits or '0'}.{fraction or '0'}' AS {name_duckdb_type(kind)})", kind, node)


def parse_typed_text(text: str, target_type: SqlType, node: exp.Expr) -> SqlValue:
    """Return the value of a typed text such as `DATE '…'`.

    A timestamp with a zone is converted to UTC, which is the zone of the session in DuckDB. The type of a decimal has
    the precision 0 if the digits of the text determine its precision.

    Raises:
        InvalidRequest: The text is not a value of the type.
        UnsupportedInDuckDB: The text may be valid in Trino, but its form is not translated.
    """
    try:
        if target_type == VARCHAR:
            return SqlValue(quote_text(text), VARCHAR, node)
        if target_type == DATE and _DAY.fullmatch(text):
            return SqlValue(f"DATE '{date.fromisoformat(text).isoformat()}'", DATE, node)
        match = _TIMESTAMP.fullmatch(text)
        if target_type in (TIMESTAMP, ZONED) and match is not None:
            day, clock, zone = match.groups()
            offset = "" if target_type == TIMESTAMP else "+00:00" if zone in (None, "Z", "UTC") else zone
            if target_type == ZONED or zone is None:
                moment = datetime.fromisoformat(f"{day}T{clock or '00:00'}{offset}")
                moment = moment if target_type == TIMESTAMP else moment.astimezone(UTC).replace(tzinfo=None)
                name, suffix = ("TIMESTAMP", "") if target_type == TIMESTAMP else ("TIMESTAMPTZ", "+00")
                return SqlValue(f"{name} '{moment.isoformat(' ')}{suffix}'", target_type, node)
        if target_type == UUID and _UUID.fullmatch(text):
            return SqlValue(f"UUID '{text.lower()}'", UUID, node)
        if target_type.is_integer and _WHOLE.fullmatch(text):
            return cast(parse_number(text.lstrip("+-"), node, negative=text.startswith("-")), target_type)
        if target_type.is_float and _DOUBLE.fullmatch(text):
            return SqlValue(f"CAST('{text}' AS {name_duckdb_type(target_type)})", target_type, node)
        if target_type == BOOLEAN and text.lower() in ("true", "false"):
            return SqlValue(text.upper(), BOOLEAN, node)
        if target_type.name == "decimal" and _NUMBER.fullmatch(text.lstrip("-")):
            decimal_value = parse_number(
                text.lstrip("-") + ("" if "." in text else "."), node, negative=text.startswith("-")
            )
            return decimal_value if target_type.precision == 0 else cast(decimal_value, target_type)
    except (ValueError, OverflowError):
        raise InvalidRequest(f"{text[:_SHOWN_CHARACTERS_MAX]!r} is not a valid {target_type}") from None
    raise UnsupportedInDuckDB(f"{describe(node)}: this text is not supported as a {target_type}")


def count_fraction_digits(text: str) -> int:
    """Return the number of digits of the fraction of a second in the text of a time."""
    match = _FRACTION.search(text)
    return len(match[1]) if match is not None else 0


def has_zone_other_than_utc(text: str) -> bool:
    """Return whether the text of a time names a zone or an offset other than UTC, such as `+02:00`."""
    match = _TIMESTAMP.fullmatch(text)
    return match is not None and match[3] is not None and not _UTC.fullmatch(match[3])


def read_time_precision(node: exp.Expr) -> int:
    """Return the number of digits of a fraction of a second that a type in CAST has. The default is milliseconds."""
    sizes = [size.name for size in node.expressions]
    return int(sizes[0]) if sizes and sizes[0].isdigit() else MILLISECOND_DIGITS


def parse_target_type(node: exp.Expr, type_node: exp.Expr) -> SqlType:
    """Return the type to which a literal or a value is cast.

    Raises:
        InvalidRequest: The precision or the scale of a decimal is invalid.
        UnsupportedInDuckDB: The type is not translated.
    """
    params = [
        int(str(expression.this.this)) for expression in node.expressions if isinstance(expression.this, exp.Literal)
    ]
    if node.this is _Type.DECIMAL:
        if not params and isinstance(type_node.this, exp.Literal):
            return make_decimal(0, 0)  # The caller derives the precision from the digits of the text.
        # DECIMAL means DECIMAL(38, 0), and DECIMAL(p) means DECIMAL(p, 0).
        precision, scale = (*params, PRECISION_MAX, 0)[:2] if len(params) != 1 else (params[0], 0)
        if not (1 <= precision <= PRECISION_MAX and 0 <= scale <= precision):
            raise InvalidRequest(f"{describe(type_node)}: a decimal has 1 to {PRECISION_MAX} digits")
        return make_decimal(precision, scale)
    target = _CASTS.get(node.this)
    if target is None or (target == VARCHAR and params):
        raise UnsupportedInDuckDB(f"{describe(type_node)}: the type {describe(node)} is not translated")
    return target
