"""Converts comparisons of text functions of a column to conditions on the column.

The functions return prefixes, texts in lower or upper case, and formatted dates and times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlglot import exp

from seamark.connector.analysis.comparisons import ComparisonReader, compare_range, make_moment_literal
from seamark.connector.analysis.truncations import find_period
from seamark.connector.plans.conditions import (
    NEVER,
    ColumnComparison,
    ColumnReference,
    Condition,
    Like,
    all_of,
    any_of,
)
from seamark.connector.plans.literals import LOCAL, Literal
from seamark.formats.iceberg.expressions.like_patterns import split_pattern
from seamark.formats.iceberg.types.functions import LOWER, UPPER
from seamark.formats.protocol.wire import PATTERN_MAX

_ISO_DAY = "%Y-%m-%d"
_FORMATS = {
    "%Y": "YEAR",
    "%Y-%m": "MONTH",
    "%Y%m": "MONTH",
    _ISO_DAY: "DAY",
    "%Y%m%d": "DAY",
    "%Y-%m-%d %H": "HOUR",
    "%Y-%m-%d %H:%M": "MINUTE",
    "%Y-%m-%d %H:%M:%S": "SECOND",
}
"""The periods that formatted times represent, by format. In these formats, texts sort in the order of the times."""
_FIRST_DAY, _LAST_DAY = "1000-01-01", "9999-12-31"
_DAY_PREFIX = re.compile(r"([0-9]{4})-?(?:(?<=-)([0-9]{2})-?(?:(?<=-)([0-9]{2}))?)?", re.ASCII)
_TEXTS = (exp.DataType.Type.VARCHAR, exp.DataType.Type.TEXT)
_VARIANTS_MAX = 128
_LOWER_ALSO = {"k": "\u212a", "i": "\u0130"}
_UPPER_ALSO = {"S": "\u017f", "I": "\u0131"}
"""The non-ASCII characters that `lower` or `upper` converts to an ASCII letter, by the letter."""
_FOUR_DIGIT_YEAR_MIN = 1000


class FormattedTime(NamedTuple):
    """A date or time that is formatted as a text. Texts of years with four digits sort in the order of the times."""

    column: exp.Expr
    format: str
    """A format of Python's `strftime`."""


def parse_formatted_time(node: exp.Expr, reader: ComparisonReader) -> FormattedTime | None:
    """Return the formatted time that an expression such as `date_format(ts, '%Y-%m')` represents, or None."""
    match node:
        case exp.TimeToStr():
            pattern = node.args.get("format")
            text = str(pattern.this) if isinstance(pattern, exp.Literal) and pattern.is_string else ""
            return FormattedTime(node.this, text) if text in _FORMATS else None
        case exp.Cast() if type(node) is exp.Cast and node.to.this in _TEXTS and not node.to.expressions:
            return FormattedTime(node.this, _ISO_DAY) if reader.find_kind(node.this) == "date" else None
    return None


def compare_formatted(op: str, time: FormattedTime, text: str, reader: ComparisonReader) -> Condition | None:
    """Read a comparison of a formatted time, such as `date_format(ts, '%Y-%m') >= '2026-01'`.

    The text represents a period, here a month. Years without exactly four digits do not sort as texts, so the condition
    also includes these years. For `=`, the result is `NEVER` if no formatted time equals the text. The
    result is None if no condition follows.
    """
    try:
        start = datetime.strptime(text, time.format)
        if start.year < _FOUR_DIGIT_YEAR_MIN:  # Python's strftime writes such a year without leading zeros.
            return None
        if start.strftime(time.format) != text:
            return NEVER if op == "=" else None
        start, end = find_period(start, _FORMATS[time.format])
    except (ValueError, OverflowError):
        return None
    column, like = time.column, Literal("date", "")
    if op == "=":
        return compare_range(column, start, end, like, reader)
    start_literal, end_literal = make_moment_literal(start, like), make_moment_literal(end, like)
    match op:
        case "<>":
            return any_of(
                [reader.compare_column("<", column, start_literal), reader.compare_column(">=", column, end_literal)]
            )
        case "<" | "<=":
            return any_of(
                [
                    reader.compare_column("<", column, start_literal if op == "<" else end_literal),
                    _compare_later_years(column, reader),
                ]
            )
    return any_of(
        [
            reader.compare_column(">=", column, start_literal if op == ">=" else end_literal),
            _compare_earlier_years(column, reader),
        ]
    )


def _compare_later_years(column: exp.Expr, reader: ComparisonReader) -> Condition | None:
    """Return the condition that a time is after the year 9999.

    The formatted text of such a time has more than four digits for the year, so texts do not sort like the times.
    """
    return reader.compare_column(">", column, Literal("date", _LAST_DAY, LOCAL))


def _compare_earlier_years(column: exp.Expr, reader: ComparisonReader) -> Condition | None:
    """Return the condition that a time is in a year before 1000, which only some engines write with leading zeros."""
    return reader.compare_column("<", column, Literal("date", _FIRST_DAY, LOCAL))


def compare_formatted_prefix(node: exp.Expr, prefix: str, reader: ComparisonReader) -> Condition | None:
    """Return a condition that is true if a formatted time begins with `prefix`, which contains at least a year.

    The result is None if `node` is not a time in a format that begins with the date, or if `prefix` does not end after
    its year, month or day.
    """
    time, match = parse_formatted_time(node, reader), _DAY_PREFIX.fullmatch(prefix)
    if time is None or match is None or not time.format.startswith(_ISO_DAY):
        return None
    year, month, day = (None if part is None else int(part) for part in match.groups())
    try:
        start = datetime(year or 0, month or 1, day or 1)
        start, end = find_period(start, "YEAR" if month is None else "MONTH" if day is None else "DAY")
    except (ValueError, OverflowError):
        return None
    # A text such as 10000-01-01 also begins with 1000: a year after 9999 has five digits.
    return any_of(
        [compare_range(time.column, start, end, Literal("date", ""), reader), _compare_later_years(time.column, reader)]
    )


def compare_prefix(op: str, node: exp.Expr, literal: Literal, reader: ComparisonReader) -> Condition | None:
    """Read a comparison of the first code points of a text, such as `substr(c, 1, 2) = 'ab'`.

    If the literal has fewer characters than `substr` can return, the whole column compares like its prefix. For
    example, `substr(c, 1, 2) = 'a'` is true only if c is 'a'. If the literal has more characters, the prefix never
    equals it. The result is None if no condition follows from the comparison.
    """
    if isinstance(node, exp.Substring):
        start, size = node.args.get("start"), node.args.get("length")
        if not isinstance(start, exp.Literal) or str(start.this) != "1":
            return None
    else:
        size = node.expression
    if literal.kind != "text" or not isinstance(size, exp.Literal) or not str(size.this).isdigit():
        return None
    if (
        op == "="
        and int(str(size.this)) == len(literal.value)
        and (times := compare_formatted_prefix(node.this, literal.value, reader))
    ):
        return times
    missing_chars = int(str(size.this)) - len(literal.value)
    if int(str(size.this)) < 1:
        return None
    match op:
        case "=" | "<>":
            if missing_chars < 0:
                return NEVER if op == "=" else None
            if missing_chars > 0:
                return reader.compare_column(op, node.this, literal)
            comparison = reader.compare_column("STARTS WITH", node.this, literal)
            return comparison if comparison is None or op == "=" else comparison.negate()
        case "<" | ">=" if missing_chars >= 0:
            return reader.compare_column(op, node.this, literal)
        case ">" if missing_chars >= 0:  # If the column is greater than the literal, the prefix may be equal to it.
            return reader.compare_column(op, node.this, literal)
        case "<=" if missing_chars > 0:
            return reader.compare_column(op, node.this, literal)
    return None


def read_case_comparison(op: str, node: exp.Lower | exp.Upper, text: str, reader: ComparisonReader) -> Condition | None:
    """Read a comparison of `lower(c)` or `upper(c)` with a text.

    The result has up to three conditions, of which the server uses those that it can evaluate: comparisons of the
    column with each text that the function converts to `text`, a comparison for an index on the function, and a LIKE.
    """
    column = _find_text_column(node, reader)
    if column is None:
        return None
    pattern = "".join(f"\\{character}" if character in "%_\\" else character for character in text)
    like = read_like_predicate(column, pattern, "\\", find_function(node), negated=op == "<>")
    condition = None
    if op == "=":
        variants, is_whole = _list_case_variants(text, lower=isinstance(node, exp.Lower))
        comparison_op = "=" if is_whole else "STARTS WITH"
        if variants:
            condition = any_of(
                reader.compare_column(comparison_op, node.this, Literal("text", variant)) for variant in variants
            )
        condition = all_of([condition, _compare_function_value("=", column, node, [Literal("text", text)])])
    return all_of([condition, like])


def read_case_list(
    node: exp.Lower | exp.Upper, literals: Sequence[Literal], reader: ComparisonReader
) -> Condition | None:
    """Read `lower(c) IN (texts)` or `upper(c) IN (texts)` as a condition that an index on the function can evaluate."""
    column = _find_text_column(node, reader)
    if column is None or any(literal.kind != "text" for literal in literals):
        return None
    return _compare_function_value("IN", column, node, literals)


def read_case_pattern(
    node: exp.Lower | exp.Upper, pattern: str, escape: str | None, reader: ComparisonReader
) -> Condition | None:
    """Read `lower(c) LIKE 'ab%'` as a comparison with the text before the first wildcard.

    An index on the function can evaluate the comparison. The result is None if the function is not on a text column, or
    if the pattern begins with a wildcard.
    """
    column = _find_text_column(node, reader)
    prefix, suffix = split_pattern(pattern, escape)
    if column is None or not (prefix or suffix == ""):
        return None
    return _compare_function_value("STARTS WITH" if suffix else "=", column, node, [Literal("text", prefix)])


def _find_text_column(node: exp.Lower | exp.Upper, reader: ComparisonReader) -> ColumnReference | None:
    """Return the text column in `lower(c)` or `upper(c)`, or None if the operand is not a text column."""
    comparison = reader.compare_column("=", node.this, Literal("text", ""))
    return None if comparison is None else comparison.column


def _compare_function_value(op: str, column: ColumnReference, node: exp.Expr, literals: Sequence[Literal]) -> Condition:
    function = find_function(node)
    assert function is not None
    return ColumnComparison(column, op, tuple(literals), function, exact=False)


def read_like_predicate(
    reference: ColumnReference, pattern: str, escape: str | None, function: str | None, *, negated: bool
) -> Like | None:
    """Return the LIKE predicate, or None if the server cannot evaluate it.

    A backslash in a pattern without ESCAPE is not supported: it is an escape in Spark, but not in Trino.
    """
    if len(pattern) > PATTERN_MAX or (escape is None and "\\" in pattern):
        return None
    return Like(reference, pattern, escape, function, negated)


def find_function(node: exp.Expr) -> str | None:
    """Return the name of the function if an index can be on it, or None for other functions."""
    return LOWER if isinstance(node, exp.Lower) else UPPER if isinstance(node, exp.Upper) else None


def _list_case_variants(text: str, *, lower: bool) -> tuple[list[str], bool]:
    """Return the texts that `lower` or `upper` converts to `text`.

    Returns:
        The texts and True. If there are too many texts, or if `text` is not ASCII, prefixes of the texts and False. The
        list is empty if there are no texts, or no known prefixes.
    """
    other_letters = _LOWER_ALSO if lower else _UPPER_ALSO
    variants = [""]
    for position, letter in enumerate(text):
        if letter != (letter.lower() if lower else letter.upper()):
            return [], True  # No text becomes `text`.
        letters = sorted({letter, letter.swapcase(), *other_letters.get(letter, "")})
        if not letter.isascii() or len(variants) * len(letters) > _VARIANTS_MAX:
            return (variants if position else []), False
        variants = [f"{prefix}{character}" for prefix in variants for character in letters]
    return variants, True
