"""Translates functions of numbers and of binary values to DuckDB's SQL."""

from __future__ import annotations

import re

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.expressions import Expressions, FunctionTranslator
from seamark.connector.sql.scopes import NameScope, SqlValue, describe
from seamark.connector.sql.types import BOOLEAN, DOUBLE, VARBINARY
from seamark.connector.sql.values import cast, check_args

_DUCKDB_TESTS = {"is_nan": "isnan", "is_finite": "isfinite", "is_infinite": "isinf"}
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*", re.ASCII)


def translate_constant(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `nan()` and `infinity()`."""
    return SqlValue(f"CAST('{str(node.this).lower()}' AS DOUBLE)", DOUBLE)


def translate_is_nan(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    return _translate_float_test("is_nan", expressions, node.this, node, scope)


def translate_float_test(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `is_finite` and `is_infinite`."""
    return _translate_float_test(str(node.this).lower(), expressions, node.expressions[0], node, scope)


def _translate_float_test(
    name: str, expressions: Expressions, argument: exp.Expr, node: exp.Expr, scope: NameScope
) -> SqlValue:
    value = expressions.translate_value(argument, scope)
    if not value.type.is_number and value.type.name != "unknown":
        raise InvalidRequest(f"{describe(node)} is not defined for the type {value.type}")
    return SqlValue(f"{_DUCKDB_TESTS[name]}({value.sql if value.type.is_float else cast(value, DOUBLE).sql})", BOOLEAN)


def translate_binary_literal(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `X'00FF'`.

    Raises:
        InvalidRequest: The text is not an even number of hexadecimal digits.
    """
    text = str(node.this)
    if not _HEX.fullmatch(text):
        raise InvalidRequest(f"X'{text[:40]}' needs an even number of hexadecimal digits")
    return SqlValue(f"unhex('{text}')", VARBINARY, node)


FLOAT_TESTS: frozenset[str] = frozenset(("is_finite", "is_infinite"))
CONSTANTS: frozenset[str] = frozenset(("nan", "infinity"))
METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.IsNan: translate_is_nan,
    exp.HexString: translate_binary_literal,
}
