"""Convert sqlglot's nodes of SQL literals to typed literals."""

from __future__ import annotations

import re

from sqlglot import exp

from seamark.formats.iceberg.expressions.typed_literals import TypedLiteral, is_exact_number

_Type = exp.DataType.Type
_INTEGER = re.compile(r"\s*[+-]?\d{1,100}\s*", re.ASCII)
_INTEGER_TYPES = (_Type.TINYINT, _Type.SMALLINT, _Type.INT, _Type.BIGINT)
_KINDS = {
    _Type.DATE: "date",
    _Type.TIME: "time",
    _Type.TIMESTAMP: "timestamp",
    _Type.TIMESTAMPNTZ: "timestamp",
    _Type.DATETIME: "timestamp",
    _Type.TIMESTAMPTZ: "timestamptz",
    _Type.TIMESTAMPLTZ: "timestamptz",
    _Type.UUID: "uuid",
}
_WIDENING_TYPES = (_Type.FLOAT, _Type.DOUBLE, _Type.TIMESTAMPTZ, _Type.TIMESTAMPLTZ, _Type.CHAR, _Type.NCHAR)
"""The types to which engines may convert the other operands of a predicate."""
_DEFAULT_PRECISION_MIN = 10
"""The precision of DECIMAL without sizes in Spark, with the scale 0. Other engines have a higher precision."""


def parse_literal(node: exp.Expr | None) -> TypedLiteral | None:
    """Return the literal of a node, or None.

    The result is None if the node is not a literal, or if it is a cast of a literal with an unclear result.
    """
    match node:
        case exp.Paren():
            return parse_literal(node.this)
        case exp.Null():
            return TypedLiteral("null", "")
        case exp.Boolean():
            return TypedLiteral("boolean", "true" if node.this else "false")
        case exp.Literal():
            text = str(node.this)
            if node.is_string:
                return TypedLiteral("text", text)
            return TypedLiteral("double" if "e" in text.lower() else "number", text)
        case exp.Neg():
            inner = parse_literal(node.this)
            if inner is None or inner.kind not in ("number", "double") or inner.text.startswith("-"):
                return None
            return TypedLiteral(inner.kind, f"-{inner.text}")
        case exp.HexString():
            return TypedLiteral("bytes", str(node.this))
        case exp.Cast() if type(node) is exp.Cast and not (node.args.get("format") or node.args.get("default")):
            return _cast_literal(parse_literal(node.this), node.to)
        case exp.Date() if len(list(node.iter_expressions())) == 1:
            return _cast_literal(parse_literal(node.this), exp.DataType.build("DATE"))
    return None


def _cast_literal(literal: TypedLiteral | None, target_type: exp.DataType) -> TypedLiteral | None:
    """Return the literal that a cast of `literal` gives in all engines, or None if the result depends on the engine.

    A cast to a date, a time or a similar type keeps the text. A cast of a number is only clear if it is exact.
    """
    if literal is None:
        return None
    if literal.kind == "null":  # The type of a NULL may change how the other operands are compared.
        return None if target_type.this in _WIDENING_TYPES else literal
    kind, text, target = literal.kind, literal.text, target_type.this
    if target in _KINDS:
        return TypedLiteral(_KINDS[target], text) if kind in ("text", _KINDS[target]) else None
    if target in (_Type.VARCHAR, _Type.TEXT):
        return literal if kind == "text" and not target_type.expressions else None
    if kind not in ("number", "text") or not is_exact_number(text):
        return None
    if target in _INTEGER_TYPES and _INTEGER.fullmatch(text):
        return TypedLiteral("number", text)
    if target is _Type.DOUBLE:
        return TypedLiteral("double", text)
    if target is _Type.DECIMAL:
        return TypedLiteral("number", text) if _fits_decimal(text, target_type, is_text=kind == "text") else None
    return None


def _fits_decimal(text: str, target_type: exp.DataType, *, is_text: bool) -> bool:
    """Return whether a cast to decimal leaves the number unchanged in all engines.

    Args:
        text: The number.
        target_type: The decimal type, with or without precision and scale.
        is_text: Whether the number is written as a text, as in `DECIMAL '1.5'`.
    """
    # Precision and scale have at most two digits.
    sizes = [int(size.name) for size in target_type.expressions if size.name.isdigit() and len(size.name) <= 2]
    scale = sizes[1] if len(sizes) > 1 else 0
    if len(sizes) < len(target_type.expressions):
        return False
    if not sizes:
        # The literal `DECIMAL '1.5'` keeps its digits. sqlglot parses a cast of a text to the same node.
        if is_text:
            return True
        sizes = [_DEFAULT_PRECISION_MIN]
    integer_digits, _, fraction = text.lstrip("+-").partition(".")
    return len(fraction.rstrip("0")) <= scale and len(integer_digits.lstrip("0")) <= sizes[0] - scale
