"""Translates functions of texts to DuckDB's SQL."""

from __future__ import annotations

from sqlglot import exp

from seamark.connector.plans.quotes import quote_text
from seamark.connector.sql.expressions import Expressions, FunctionTranslator
from seamark.connector.sql.scopes import NameScope, SqlValue, describe
from seamark.connector.sql.types import BIGINT, VARBINARY, VARCHAR, UnsupportedInDuckDB
from seamark.connector.sql.values import check_args, read_whole_number, require_type

_WHITESPACE = "".join(
    map(chr, (*range(0x09, 0x0E), *range(0x1C, 0x21), 0x1680, *range(0x2000, 0x2007), *range(0x2008, 0x200B)))
) + "".join(map(chr, (0x2028, 0x2029, 0x205F, 0x3000)))
"""The characters that `trim` removes in Trino: the white space of Java, without the no-break spaces."""
_TRIMS = {"": "trim", "LEADING": "ltrim", "TRAILING": "rtrim"}
_FIELD_MAX = 10_000
"""The maximum number of the field in `split_part`."""


def _translate_trim(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node, frozenset(("this", "position")))
    value = require_type(expressions.translate_value(node.this, scope), VARCHAR, node)
    return SqlValue(f"{_TRIMS[node.text('position').upper()]}({value.sql}, {quote_text(_WHITESPACE)})", VARCHAR)


def _translate_length(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `length`: the number of characters of a text, or of bytes of a binary value."""
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if value.type == VARBINARY:
        return SqlValue(f"octet_length({value.sql})", BIGINT)
    return SqlValue(f"length({require_type(value, VARCHAR, node).sql})", BIGINT)


def _translate_split_part(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `split_part` to a list, because DuckDB's function returns an empty text for a field that is absent.

    Raises:
        InvalidRequest: The value is not a text.
        UnsupportedInDuckDB: The delimiter or the number of the field is not a valid literal, or the value is binary or
            nested.
    """
    check_args(node, frozenset(("this", "delimiter", "part_index")))
    delimiter, index = node.args["delimiter"], node.args["part_index"]
    if not (isinstance(delimiter, exp.Literal) and delimiter.is_string and str(delimiter.this)):
        raise UnsupportedInDuckDB(f"{describe(node)}: the delimiter must be a literal that is not empty")
    field = read_whole_number(index, _FIELD_MAX)
    if not field:
        raise UnsupportedInDuckDB(f"{describe(node)}: the field must be a literal from 1 to {_FIELD_MAX:,}")
    value, separator = (
        require_type(argument, VARCHAR, node)
        for argument in expressions.translate_values([node.this, delimiter], scope)
    )
    return SqlValue(f"string_split({value.sql}, {separator.sql})[{field}]", VARCHAR)


def _translate_concat_with_separator(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `concat_ws`. In both engines, null arguments are left out, and a null separator gives null.

    Raises:
        InvalidRequest: An argument is not a text.
        UnsupportedInDuckDB: There is no text to join, or an argument is binary or nested.
    """
    check_args(node, frozenset(("expressions", "safe", "coalesce")))
    values = [
        require_type(argument, VARCHAR, node) for argument in expressions.translate_values(node.expressions, scope)
    ]
    if len(values) < 2:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    return SqlValue(f"concat_ws({', '.join(value.sql for value in values)})", VARCHAR)


METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.Trim: _translate_trim,
    exp.Length: _translate_length,
    exp.SplitPart: _translate_split_part,
    exp.ConcatWs: _translate_concat_with_separator,
}
