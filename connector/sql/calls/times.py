"""Translates functions of dates and times to DuckDB's SQL."""

from __future__ import annotations

import re

from sqlglot import exp

from seamark.connector.analysis.literals import parse_literal
from seamark.connector.plans.quotes import quote_text
from seamark.connector.sql.arithmetic import round_to_milliseconds, shift_by_interval
from seamark.connector.sql.expressions import Expressions, FunctionTranslator, check_length
from seamark.connector.sql.literals import parse_typed_text
from seamark.connector.sql.scopes import NameScope, SqlValue, describe
from seamark.connector.sql.types import DATE, INTERVAL, TIMESTAMP, VARCHAR, ZONED, UnsupportedInDuckDB
from seamark.connector.sql.values import cast, check_args, read_whole_number

_ADDED_UNITS = {
    **{unit: (1, unit) for unit in ("MILLISECOND", "SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "YEAR")},
    "QUARTER": (3, "MONTH"),
}
"""For each unit of `date_add`, the number of DuckDB's units in it, and DuckDB's unit."""
_ADDED_MAX = 100_000
"""The maximum number of units in `date_add`."""
_FORMATTED = {
    "Y": ("year", 4),
    "m": ("month", 2),
    "d": ("day", 2),
    "H": ("hour", 2),
    "M": ("minute", 2),
    "S": ("second", 2),
}
"""The fields of a format, each with DuckDB's function and the number of digits.

sqlglot has replaced the letters of MySQL, which Trino uses, by those of strftime.
"""
_FORMAT_PIECE = re.compile(r"%(.)|([^%]+)", re.DOTALL)
_FORMAT_CHARS_MAX = 100
_YEAR_MAX = 9999


def _translate_addition(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `date_add`.

    Raises:
        UnsupportedInDuckDB: The number of units is not a literal, or is too large. Or the unit or the type is not
            translated.
    """
    check_args(node, frozenset(("this", "expression", "unit")))
    count, unit = node.expression, node.text("unit").upper()
    sign = "-" if isinstance(count, exp.Neg) else "+"
    units = read_whole_number(count.this if isinstance(count, exp.Neg) else count, _ADDED_MAX)
    if unit not in _ADDED_UNITS or units is None:
        raise UnsupportedInDuckDB(
            f"{describe(node)}: only a literal number of units up to {_ADDED_MAX:,} is translated"
        )
    factor, word = _ADDED_UNITS[unit]
    interval = SqlValue(f"INTERVAL {units * factor} {word}", INTERVAL, node)
    value = expressions.translate_value(node.this, scope)
    if not value.type.is_time:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    return shift_by_interval(expressions.require_utc(value, node), interval, sign, node)


def _translate_last_day(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if value.type not in (DATE, TIMESTAMP):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    return SqlValue(f"last_day({value.sql})", DATE)


def _translate_date(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `date(x)`, which is `CAST(x AS date)`."""
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if value.type not in (DATE, TIMESTAMP):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    return cast(value, DATE)


def _translate_constant_time(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate functions that parse a literal: `from_iso8601_date`, `date_parse` and `from_unixtime`.

    Raises:
        InvalidRequest: The literal is not a valid date or time.
        UnsupportedInDuckDB: The argument is not a literal of a date or time.
    """
    literal = parse_literal(node, casts_decimal=True)
    if literal is None or literal.kind not in ("date", "timestamp"):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    if literal.kind == "date":
        return parse_typed_text(literal.value, DATE, node)
    is_zoned = isinstance(node, exp.UnixToTime)
    return parse_typed_text(literal.value, ZONED if is_zoned else TIMESTAMP, node)


def _translate_format(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `date_format` with fields of a fixed length.

    A year before 0 or after 9999 is an error of the query.

    Raises:
        InvalidRequest: The translated expression is too long.
        UnsupportedInDuckDB: The format has other fields or is no literal, or the value is no date or timestamp.
    """
    check_args(node, frozenset(("this", "format")))
    pattern = node.args.get("format")
    text = str(pattern.this) if isinstance(pattern, exp.Literal) and pattern.is_string else ""
    value = expressions.translate_value(node.this, scope)
    if not text or len(text) > _FORMAT_CHARS_MAX or value.type not in (DATE, TIMESTAMP):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    # Trino formats a time with milliseconds.
    moment = (round_to_milliseconds(value) if value.type == TIMESTAMP else cast(value, TIMESTAMP)).sql
    check_length(len(moment) * len(text), node)
    pieces, position = [], 0
    for piece in _FORMAT_PIECE.finditer(text):
        if piece.start() != position or (piece[1] is not None and piece[1] not in _FORMATTED):
            raise UnsupportedInDuckDB(f"{describe(node)}: this format is not translated")
        position = piece.end()
        if piece[1] is None:
            pieces.append(quote_text(piece[2]))
        else:
            function, digits = _FORMATTED[piece[1]]
            pieces.append(f"lpad(CAST({function}({moment}) AS VARCHAR), {digits}, '0')")
    if position != len(text):
        raise UnsupportedInDuckDB(f"{describe(node)}: this format is not translated")
    is_outside = f"year({moment}) NOT BETWEEN 0 AND {_YEAR_MAX}"
    error = "error('date_format of a year before 0 or after 9999 is not translated')"
    return SqlValue(f"(CASE WHEN {is_outside} THEN {error} ELSE {' || '.join(pieces)} END)", VARCHAR)


METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.DateAdd: _translate_addition,
    exp.LastDay: _translate_last_day,
    exp.Date: _translate_date,
    exp.FromISO8601Date: _translate_constant_time,
    exp.StrToTime: _translate_constant_time,
    exp.UnixToTime: _translate_constant_time,
    exp.TimeToStr: _translate_format,
}
