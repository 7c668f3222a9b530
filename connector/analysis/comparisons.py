"""Defines what all readers of comparisons use: operators, values of literals, and the interface of the reader.

The operators are =, <>, <, <=, > and >=. A comparison is never true for null, so its negation is read as the opposite
comparison.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol

from sqlglot import exp

from seamark.connector.analysis.literals import make_timestamp_literal
from seamark.connector.analysis.operands import EXACT, TEXT, CommonType, get_kind_class, get_literal_class
from seamark.connector.analysis.operands import LOCAL as LOCAL_CLASS
from seamark.connector.plans.conditions import NEVER, Atom, ColumnComparison, Condition, all_of
from seamark.connector.plans.literals import LOCAL, Literal
from seamark.formats.iceberg.types.transforms import IDENTITY

FLIPPED = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
"""The operators that give the same result with exchanged sides, by operator."""
OPPOSITE = {"=": "<>", "<>": "=", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
"""The operators that are true for exactly the non-null values for which an operator is false, by operator."""
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_EXACT_CLASSES = (EXACT, TEXT, LOCAL_CLASS, "boolean")
"""The classes whose values are compared exactly. Conversions may change values of floats, so they are not included."""


class ComparisonReader(Protocol):
    """The methods of the condition reader that the readers of comparisons use."""

    def compare(self, op: str, side: exp.Expr, literal: Literal) -> Condition | None:
        """Return the condition `side op literal`. `side` may itself be a function."""

    def compare_column(self, op: str, side: exp.Expr, literal: Literal) -> ColumnComparison | None:
        """Return a comparison of a column, or of the day or year of a column. Return None for other expressions."""

    def read_condition(self, node: exp.Expr) -> Condition | None: ...

    def compute_common_type(self, operands: Iterable[exp.Expr]) -> CommonType:
        """Return the type in which all operands of a predicate are compared."""

    def build_equality(self, left: exp.Expr, right: exp.Expr, compared_in: CommonType) -> Condition | None:
        """Return the condition `left = right`, compared in the common type of a predicate."""

    def is_null(self, node: exp.Expr) -> Condition | None: ...

    def read_literal(self, node: exp.Expr) -> Literal | None: ...

    def find_kind(self, node: exp.Expr) -> str | None:
        """Return the Iceberg type of a column with stored values, or None."""


def compare_literals(op: str, left: Literal, right: Literal) -> bool | None:
    """Return the result of a comparison of two literals.

    Returns:
        The result, or None if it is unknown. The result is False if a literal is null, because the comparison is then
        never true.
    """
    if "null" in (left.kind, right.kind):
        return False
    values = _to_comparable(left), _to_comparable(right)
    if left.kind == right.kind == "boolean":
        return _OPERATORS[op](left.value == "TRUE", right.value == "TRUE") if op in ("=", "<>") else None
    if None in values or get_literal_class(left) != get_literal_class(right):
        return None
    return _OPERATORS[op](*values)


def _to_comparable(literal: Literal) -> object:
    """Return a Python value that can be compared with the values of literals of the same class, or None.

    A class is a group of types, such as integers and decimals. The result is None for all other kinds of literals, such
    as floats and times with a zone. Texts are compared by code points, which is the order of their UTF-8 bytes.
    """
    match literal.kind:
        case "integer" | "decimal":
            return Decimal(literal.value)
        case "text":
            return literal.value
        case "date" | "timestamp" if literal.zone == LOCAL:
            return datetime.fromisoformat(literal.value)
    return None


def have_same_class(literal: Literal, reader: ComparisonReader, *nodes: exp.Expr) -> bool:
    """Return whether the literal and all `nodes` have the same class, and values of this class are compared exactly.

    A class is a group of types, such as integers and decimals. The nodes are columns or literals. Null literals are
    ignored.
    """
    expected_class = get_literal_class(literal)
    for node in nodes:
        other, kind = reader.read_literal(node), reader.find_kind(node)
        if other is not None and other.kind == "null":
            continue
        own_class = get_kind_class(kind) if other is None else get_literal_class(other)
        if own_class != expected_class or own_class not in _EXACT_CLASSES:
            return False
    return True


def compare_range(
    column: exp.Expr, start: datetime, end: datetime, like: Literal, reader: ComparisonReader
) -> Condition | None:
    """Return the condition that a column is at or after `start`, and before `end`.

    Args:
        column: The column.
        start: The inclusive start of the range.
        end: The exclusive end of the range.
        like: A literal with the kind of the bounds. If it is a date, bounds at midnight become dates.
        reader: The reader of the condition.
    """
    bounds = ((">=", make_moment_literal(start, like)), ("<", make_moment_literal(end, like)))
    return all_of(reader.compare_column(op, column, bound) for op, bound in bounds)


def make_moment_literal(moment: datetime, like: Literal) -> Literal:
    if like.kind == "date" and moment == moment.replace(hour=0, minute=0, second=0, microsecond=0):
        return Literal("date", moment.date().isoformat(), LOCAL)
    return make_timestamp_literal(moment)


def evaluate_literals(atom: Atom, find_literal: Callable[[str], Literal | None]) -> Condition | None:
    """Evaluate a comparison of an output that is a literal.

    Args:
        atom: A condition on one column.
        find_literal: A function that returns the literal of an output by its name, or None if it is not a literal.

    Returns:
        `atom` itself if its column is not a literal. Otherwise `NEVER` if the comparison is false for the literal, and
        None if it is true or unknown.
    """
    literal = find_literal(atom.column[1]) if isinstance(atom, ColumnComparison) else None
    if literal is None or not isinstance(atom, ColumnComparison):
        return atom
    return NEVER if _is_false_for(atom, literal) else None


def _is_false_for(comparison: ColumnComparison, literal: Literal) -> bool:
    """Return whether the comparison is certainly not true for the value of `literal`."""
    literals, op = comparison.literals, comparison.op
    if comparison.transform != IDENTITY:
        return False
    if op == "IS NULL":
        return not comparison.negated
    if op == "IN" and not comparison.negated:
        return all(compare_literals("=", literal, member) is False for member in literals)
    if op not in OPPOSITE:
        return False
    return compare_literals(OPPOSITE[op] if comparison.negated else op, literal, literals[0]) is False
