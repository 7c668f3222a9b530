"""Reads conditions of Spark's analysed plans (`connector/plans/conditions.py`).

Spark's analyser makes conversions visible as casts, so a literal has the type of the column that it is compared with.
Expressions that depend on the time of evaluation are not read: a DataFrame is evaluated after its condition is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from math import isfinite
from typing import Any, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from seamark.connector.plans.conditions import DAY, NEVER, YEAR, ColumnComparison, Condition, all_of, any_of
from seamark.connector.plans.literals import LOCAL, ZONED, Literal
from seamark.connector.plans.zones import is_utc
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import items
from seamark.metaserver.iceberg.expressions.like_patterns import split_pattern
from seamark.metaserver.iceberg.types.transforms import IDENTITY

PARTS_MAX = 2_000
"""Expressions and values that are read in one condition; a larger condition is not used."""
SAME_TYPES = {
    "boolean": "boolean",
    "int": "int",
    "long": "bigint",
    "float": "float",
    "double": "double",
    "date": "date",
    "timestamptz": "timestamp",
    "timestamp": "timestamp_ntz",
    "string": "string",
    "binary": "binary",
}
"""Iceberg types whose values Spark compares as Iceberg does, with Spark's names. A uuid is a string in Spark, and fixed
is a binary of any length."""
_COMPARED = {
    "EqualTo": "=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "EqualNullSafe": "IS NOT DISTINCT FROM",
}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_EPOCH, _EPOCH_DAY = datetime(1970, 1, 1, tzinfo=UTC), date(1970, 1, 1)


class SparkColumn(NamedTuple):
    name: str
    kind: str
    """Spark's type: `bigint`, `decimal(9,2)`, …"""


class _Term(NamedTuple):
    """A column, or its day or year."""

    column: str
    transform: str
    kind: str
    """The type of literals that it may be compared with."""

    def compared(self, op: str, *literals: Literal) -> ColumnComparison:
        return ColumnComparison((0, self.column), op, literals, self.transform)


def spark_kind(iceberg_type: object) -> str | None:
    """Spark's name of a type; None if Spark compares its values in another way than Iceberg."""
    if not isinstance(iceberg_type, str):  # nested
        return None
    if iceberg_type.startswith("decimal("):
        return iceberg_type.replace(" ", "")
    return SAME_TYPES.get(iceberg_type)


class Conditions:
    """Reads conditions of one session."""

    def __init__(self, catalyst: Catalyst) -> None:
        self._catalyst = catalyst

    def read(self, node: Node, columns: Mapping[int, SparkColumn]) -> Condition | None:
        """A condition on these columns, which are by the ids of Spark's attributes. Its places are (0, column)."""
        try:
            return _Reading(self._catalyst, columns).read(node, negated=False)
        except _TooLarge:
            return None


class _TooLarge(Exception):
    """The condition has more than `PARTS_MAX` parts."""


class _Reading:
    """Reads one condition."""

    def __init__(self, catalyst: Catalyst, columns: Mapping[int, SparkColumn]) -> None:
        self._catalyst = catalyst
        self._columns = columns
        self._left = PARTS_MAX

    def _count(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise _TooLarge

    def read(self, node: Node, *, negated: bool) -> Condition | None:
        """A condition that is true where `node` is true or, with `negated`, where it is false."""
        self._count(1)
        kind = self._catalyst.kind(node)
        if kind == "Not":
            return self.read(node.child(), negated=not negated)
        if kind in ("And", "Or"):
            parts = [self.read(one, negated=negated) for one in self._catalyst.operands(node, kind)]
            return all_of(parts) if (kind == "And") != negated else any_of(parts)
        if kind == "Literal":
            value = node.value()
            return NEVER if value is None or bool(value) == negated else None
        found = self._leaf(node, kind)
        return found.negation() if found is not None and negated else found

    def _leaf(self, node: Node, kind: str) -> ColumnComparison | None:
        if kind in _COMPARED:
            return self._compared(_COMPARED[kind], node.left(), node.right())
        match kind:
            case "In":
                return self._in(self._term(node.value()), items(node.list()))
            case "IsNull" | "IsNotNull":
                term = self._term(node.child())
                found = None if term is None else term.compared("IS NULL")
                return found.negation() if found is not None and kind == "IsNotNull" else found
            case "StartsWith" | "Like":
                return self._like(node, kind)
        term = self._term(node)
        return term.compared("IS TRUE") if term is not None and term.kind == "boolean" else None

    def _compared(self, op: str, left: Node, right: Node) -> ColumnComparison | None:
        term = self._term(left)
        if term is None:
            term, right, op = self._term(right), left, _FLIPPED.get(op, op)
        literal = None if term is None else self._literal(right, term.kind)
        return None if term is None or literal is None else term.compared(op, literal)

    def _in(self, term: _Term | None, values: list[Node]) -> ColumnComparison | None:
        self._count(len(values))
        if term is None:
            return None
        literals = [self._literal(one, term.kind) for one in values]
        there = [one for one in literals if one is not None]
        return term.compared("IN", *there) if there and len(there) == len(literals) else None

    def _like(self, node: Node, kind: str) -> ColumnComparison | None:
        """Patterns that are a prefix alone. Spark's own rules have split other patterns where that is possible."""
        term = self._term(node.left())
        value = None if term is None or term.kind != "string" else self._value(node.right(), "string")
        if term is None or value is None:
            return None
        prefix, rest = (str(value), "%") if kind == "StartsWith" else split_pattern(str(value), str(node.escapeChar()))
        return term.compared("STARTS WITH", Literal("text", prefix)) if prefix and rest == "%" else None

    def _term(self, node: Node) -> _Term | None:
        column = self._column(node)
        if column is not None:
            return _Term(column.name, IDENTITY, column.kind)
        kind = self._catalyst.kind(node)
        if kind == "Year":
            inner = self._column(node.child()) or self._day(node.child())
            if inner is not None and inner.kind in ("date", "timestamp", "timestamp_ntz"):
                return _Term(inner.name, YEAR, "int")
        inner = self._day(node)
        return None if inner is None else _Term(inner.name, DAY, "date")

    def _day(self, node: Node) -> SparkColumn | None:
        """The timestamp column whose day in UTC `node` is."""
        if self._catalyst.kind(node) != "Cast" or self._catalyst.type_of(node) != "date":
            return None
        column = self._column(node.child())
        if column is None or column.kind not in ("timestamp", "timestamp_ntz"):
            return None
        zone = node.timeZoneId()
        if column.kind == "timestamp" and (zone.isEmpty() or not is_utc(zone.get())):
            return None
        return column

    def _column(self, node: Node) -> SparkColumn | None:
        node = self._catalyst.uncast(node)
        if self._catalyst.kind(node) != "AttributeReference":
            return None
        column = self._columns.get(self._catalyst.id_of(node))
        return column if column is not None and column.kind == self._catalyst.type_of(node) else None

    def _literal(self, node: Node, kind: str) -> Literal | None:
        """None if it is no literal of type `kind`."""
        if self._catalyst.kind(node) == "Literal" and node.value() is None:
            return Literal("null", "NULL")
        value = self._value(node, kind)
        return None if value is None else _literal_of(value, kind)

    def _value(self, node: Node, kind: str) -> Any:
        given = self._catalyst.type_of(node)
        if given != kind and not (given.startswith("decimal(") and kind.startswith("decimal(")):
            return None
        if self._catalyst.kind(node) == "Literal":
            return node.value()
        if not self._catalyst.is_constant(node):
            return None
        try:
            return node.eval(None)
        except (Py4JError, PySparkException):  # Spark reports the error when it runs the query
            return None


def _literal_of(value: Any, kind: str) -> Literal | None:
    match kind:
        case "boolean":
            return Literal("boolean", str(bool(value)).upper())
        case "int" | "bigint":
            return Literal("integer", str(int(value)))
        case "float" | "double":
            # NaN and infinities have no text; Spark treats both zeros as equal.
            return Literal("double", repr(float(value) + 0.0)) if isfinite(value) else None
        case "string":
            return Literal("text", str(value))
        case "binary":
            return Literal("binary", bytes(value).hex())
        case "date" | "timestamp" | "timestamp_ntz":
            return _time(int(value), kind)
    return Literal("decimal", format(value.toJavaBigDecimal(), "f"))


def _time(value: int, kind: str) -> Literal | None:
    """Days or microseconds since 1970 in UTC. None for years without four digits."""
    try:
        if kind == "date":
            return Literal("date", str(_EPOCH_DAY + timedelta(days=value)), LOCAL)
        at = (_EPOCH + timedelta(microseconds=value)).replace(tzinfo=None).isoformat(sep=" ")
    except OverflowError:
        return None
    zoned = kind == "timestamp"
    return Literal("timestamp", f"{at} UTC" if zoned else at, ZONED if zoned else LOCAL)
