"""Finds the type in which an engine compares the operands of one predicate.

Trino, DuckDB and Spark convert all operands of IN, BETWEEN and simple CASE to their common type before they compare any
operands. For example, `id IN (9007199254740993, 1e0)` compares doubles, so it is also true for 9007199254740992, and
`ts BETWEEN … AND now()` compares times in the session's zone. Therefore a predicate is split into comparisons of a
column with single literals only after its literals are converted to the common type (`CommonType.choose_literal`).

This module works with classes of types. Values of the types of one class are compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlglot import exp

from seamark.connector.plans.literals import ZONED as ZONED_LITERAL
from seamark.connector.plans.literals import Literal

EXACT, REAL, DOUBLE = "exact", "real", "double"
"""`EXACT`: integers and decimals. `REAL` and `DOUBLE`: floating-point numbers of 32 and 64 bits."""
LOCAL, ZONED = "local", "zoned"
"""`LOCAL`: dates and timestamps. `ZONED`: timestamps with a zone."""
TEXT, NULL, ANY = "text", "null", "any"
"""`NULL` is the class of a NULL without a type. `ANY` is the class of a column whose type is unknown."""
_NUMBERS, _TIMES = (EXACT, REAL, DOUBLE), (LOCAL, ZONED)
_CLASSES_BY_LITERAL_KIND = {"integer": EXACT, "decimal": EXACT, "date": LOCAL}
_CLASSES_BY_ICEBERG_TYPE = {
    "int": EXACT,
    "long": EXACT,
    "decimal": EXACT,
    "float": REAL,
    "string": TEXT,
    "date": LOCAL,
    "timestamp": LOCAL,
    "timestamptz": ZONED,
    "fixed": "binary",
    **{kind: kind for kind in ("boolean", "binary", "double", "time", "uuid")},
}
_Type = exp.DataType.Type
_CLASSES_BY_CAST_TYPE = {
    **dict.fromkeys((_Type.TINYINT, _Type.SMALLINT, _Type.INT, _Type.BIGINT, _Type.DECIMAL), EXACT),
    **dict.fromkeys((_Type.VARCHAR, _Type.TEXT), TEXT),
    **dict.fromkeys((_Type.DATE, _Type.TIMESTAMP), LOCAL),
    _Type.FLOAT: REAL,
    _Type.DOUBLE: DOUBLE,
    _Type.TIMESTAMPTZ: ZONED,
    _Type.BOOLEAN: "boolean",
    _Type.UUID: "uuid",
    _Type.VARBINARY: "binary",
}
"""The class of each type in a CAST. CHAR is missing, because the engines compare CHAR values with padding."""
_ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod)
_TEXT_FUNCTIONS = (exp.Substring, exp.Left, exp.Lower, exp.Upper)
_INTEGER_FUNCTIONS = (exp.Year, exp.Month, exp.Day, exp.Extract, exp.DateDiff, exp.Length)
_DOUBLE_DIGITS_MAX, _DOUBLE_SCALE_MAX = 15, 22
"""The maximum length and scale of decimals that every engine converts to the same double."""
NULLS_WITHOUT_EFFECT = frozenset({EXACT, LOCAL, TEXT, "boolean", "uuid", "binary"})
"""The classes of typed NULLs that do not change the common type of the other operands."""


def get_literal_class(literal: Literal) -> str:
    if literal.kind == "timestamp":
        return ZONED if literal.zone == ZONED_LITERAL else LOCAL
    return _CLASSES_BY_LITERAL_KIND.get(literal.kind, literal.kind)


def get_kind_class(kind: str | None) -> str | None:
    """Return the class of an Iceberg type, or None if it has no class."""
    return _CLASSES_BY_ICEBERG_TYPE.get((kind or "").partition("(")[0].strip())


def get_cast_class(target_type: exp.DataType) -> str | None:
    return _CLASSES_BY_CAST_TYPE.get(target_type.this) if isinstance(target_type.this, _Type) else None


def compute_common_class(classes: Iterable[str | None]) -> str | None:
    """Return the class of the common type of operands of these classes.

    Return None if the class of an operand is unknown, or if there is no common type. A family is a list of classes, of
    which each can be converted to the next.
    """
    distinct = set(classes) - {NULL}
    if not distinct:
        return NULL
    for family in (_NUMBERS, _TIMES):
        if distinct <= set(family):
            return max(distinct, key=lambda class_: family.index(str(class_)))
    return distinct.pop() if len(distinct) == 1 else None


@dataclass(frozen=True)
class CommonType:
    """The type to which an engine converts all operands of one predicate before it compares them.

    A class is a group of types whose values are compared exactly, such as `EXACT` (integers and decimals) or `TEXT`.

    Attributes:
        target: The class of the common type, or None if it is unknown.
        utc: Whether the session's zone is UTC. In UTC, times with and without a zone can be compared with each other.
    """

    target: str | None
    utc: bool
    classes: Mapping[int, str | None] = field(default_factory=dict)
    """The classes of the operands, by the `id` of their nodes."""

    def choose_literal(self, literal: Literal, operand_class: str | None) -> Literal | None:
        """Return the literal to compare with a column, so that the result is the same as in the common type.

        If the common type is DOUBLE, an integer or decimal becomes a double. If the common type is a time with a zone,
        a literal without a zone stays unchanged in a session in UTC. Return None if no literal gives the same result.

        Args:
            literal: The literal of the predicate.
            operand_class: The class of the column or expression that is compared with the literal. `ANY` means an
                unknown type.
        """
        literal_class = get_literal_class(literal)
        if self.target is None:
            return None
        if (
            literal_class == NULL
            or (literal_class if operand_class == ANY else compute_common_class((literal_class, operand_class)))
            == self.target
        ):
            return literal
        if self.target == DOUBLE and literal_class == EXACT:
            return _convert_to_double(literal)
        return literal if self.target == ZONED and self.utc else None

    def convert_literal(self, operand: exp.Expr, literal: Literal) -> Literal | None:
        """Return the literal to compare with the expression `operand`, or None, as `choose_literal` does."""
        return self.choose_literal(literal, self.classes.get(id(operand)))


def _convert_to_double(literal: Literal) -> Literal | None:
    """Return an integer or decimal as a double literal, which is a number with an exponent, such as `1.5e0`.

    Return None for a decimal with so many digits that engines may convert it to different doubles.
    """
    digits, _, fraction = literal.value.lstrip("-").partition(".")
    if literal.kind == "decimal" and (
        len((digits + fraction).lstrip("0")) > _DOUBLE_DIGITS_MAX or len(fraction) > _DOUBLE_SCALE_MAX
    ):
        return None
    return replace(literal, kind="double", value=f"{literal.value}e0")


def compute_common_type(classes: Iterable[str | None], *, utc: bool) -> CommonType:
    """Return the common type of operands of these classes. A class is a group of types, such as integers and decimals.

    One of the classes may be `ANY`, the class of a column whose type is unknown.
    """
    return CommonType(_choose_target(list(classes)), utc)


def _choose_target(classes: Sequence[str | None]) -> str | None:
    known_classes = [class_ for class_ in classes if class_ != ANY]
    return compute_common_class(known_classes) if len(classes) - len(known_classes) <= 1 else None


class OperandClasses:
    """Finds the classes of operands.

    Args:
        literal: A function that returns the literal of a node (`comparisons.ComparisonReader.read_literal`).
        kind: A function that returns the Iceberg type of a column (`comparisons.ComparisonReader.find_kind`).
    """

    def __init__(self, literal: Callable[[exp.Expr], Literal | None], kind: Callable[[exp.Expr], str | None]) -> None:
        self._literal = literal
        self._kind = kind

    def compute_common_type(self, operands: Iterable[exp.Expr], *, utc: bool) -> CommonType:
        classes = [(id(operand), self.find_class(operand)) for operand in operands]
        return CommonType(_choose_target([class_ for _, class_ in classes]), utc, dict(classes))

    def find_class(self, node: exp.Expr) -> str | None:
        """Return the class of the type of `node`, or None if it is unknown.

        A class is a group of types that engines compare in the same way. A column of an unknown type has the class
        `ANY`. An operation or a CASE has the common class of its operands or results.
        """
        node = node.unnest()
        literal = self._literal(node)
        if literal is not None:
            return get_literal_class(literal)
        match node:
            case exp.Column():
                kind = self._kind(node)
                return get_kind_class(kind) if kind else ANY
            case exp.Cast() | exp.TryCast():
                return get_cast_class(node.to)
            case exp.Date() | exp.CurrentDate() | exp.Localtimestamp():
                return LOCAL
            case exp.CurrentTimestamp() | exp.AtTimeZone() | exp.FromISO8601Timestamp():
                return ZONED
            case exp.TimeToStr():
                return TEXT
        if isinstance(node, _INTEGER_FUNCTIONS):
            return EXACT
        if isinstance(node, _ARITHMETIC):
            sides = [side for side in (node.this, node.expression) if not isinstance(side, exp.Interval)]
            class_ = compute_common_class(map(self.find_class, sides))
            return class_ if class_ in _NUMBERS or len(sides) == 1 else None
        if isinstance(node, (*_TEXT_FUNCTIONS, exp.Concat, exp.DPipe)):
            parts = node.expressions or [part for part in (node.this, node.args.get("expression")) if part is not None]
            parts = [node.this] if isinstance(node, _TEXT_FUNCTIONS) else parts
            return TEXT if compute_common_class(map(self.find_class, parts)) == TEXT else None
        results = list(_iter_results(node))
        return compute_common_class(map(self.find_class, results)) if results else None


def _iter_results(node: exp.Expr) -> Iterator[exp.Expr]:
    """Yield the operands whose common type is the type of the node, such as the results of CASE."""
    match node:
        case exp.Neg() | exp.TimestampTrunc() | exp.DateTrunc() | exp.DateAdd() | exp.Nullif():
            yield node.this
        case exp.Coalesce():
            yield from (node.this, *node.expressions)
        case exp.If():
            yield from (branch for branch in (node.args["true"], node.args.get("false")) if branch is not None)
        case exp.Case():
            yield from (branch.args["true"] for branch in node.args["ifs"])
            if node.args.get("default") is not None:
                yield node.args["default"]
