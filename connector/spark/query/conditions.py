"""What Spark's conditions say of a table's columns, in the SQL that the catalog takes: the same, or less.

Conditions come from Spark's analyser, so that whatever it converts is visible as a cast, and a literal has the type of
the column beside it. SQL's logic has three values, and a row counts where its condition is *true*. So a part that is
not understood becomes "true" in the place where it stands: below AND it goes, an OR with it goes whole. NOT is pushed
down to the comparisons, which keep it; what negating them says of nulls and of NaN is for the catalog to judge, which
never leaves out what Spark would find (`metaserver/iceberg/expressions/sql.py`).

Left out is what depends on when it is evaluated: a DataFrame runs later than its condition is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from math import isfinite
from typing import Any, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from seamark.connector.plans.quotes import quoted_name, quoted_text
from seamark.connector.plans.zones import is_utc
from seamark.connector.spark.query.catalyst import Catalyst, Node, items

TEXT_MAX = 100_000
"""Characters of a predicate that the catalog takes."""
PARTS_MAX = 2_000
"""Expressions looked at in one condition; what has more says nothing."""
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
"""Of Iceberg's types those that mean to Spark what they mean to the catalog, and Spark's names for them. Not uuid,
which is text to Spark, nor fixed, which is of any length."""
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
    """As Spark has it: `bigint`, `decimal(9,2)`, …"""


class ColumnPredicate(NamedTuple):
    """A predicate, and the columns that it names."""

    sql: str
    names: frozenset[str]


class _Term(NamedTuple):
    """A column, or the day or the year of one."""

    column: str
    sql: str
    kind: str
    """Of the literals that it is compared with."""


def spark_kind(iceberg_type: object) -> str | None:
    """None for a type whose values Spark compares otherwise."""
    if not isinstance(iceberg_type, str):  # nested
        return None
    if iceberg_type.startswith("decimal("):
        return iceberg_type.replace(" ", "")
    return SAME_TYPES.get(iceberg_type)


def all_of(parts: list[ColumnPredicate]) -> ColumnPredicate | None:
    """As many of them as fit."""
    kept: dict[ColumnPredicate, None] = {}
    left = TEXT_MAX
    for part in parts:
        if len(part.sql) + 10 <= left:
            kept[part] = None
            left -= len(part.sql) + 10
    return _joined("AND", list(kept)) if kept else None


def any_of(parts: list[ColumnPredicate | None]) -> ColumnPredicate | None:
    there = list(dict.fromkeys(part for part in parts if part is not None))
    if None in parts or not there or sum(len(part.sql) + 10 for part in there) > TEXT_MAX:
        return None
    return _joined("OR", there)


def _joined(word: str, parts: list[ColumnPredicate]) -> ColumnPredicate:
    if len(parts) == 1:
        return parts[0]
    names = frozenset[str]().union(*(part.names for part in parts))
    return ColumnPredicate("(" + f" {word} ".join(part.sql for part in parts) + ")", names)


class Conditions:
    """Reads conditions of one session."""

    def __init__(self, catalyst: Catalyst) -> None:
        self._catalyst = catalyst

    def predicate(self, node: Node, columns: Mapping[int, SparkColumn]) -> ColumnPredicate | None:
        """Of these columns alone, which have the ids of Spark's attributes."""
        found = _Reading(self._catalyst, columns).read(node, negated=False)
        return found if found is not None and len(found.sql) <= TEXT_MAX else None


class _Reading:
    """Of one condition."""

    def __init__(self, catalyst: Catalyst, columns: Mapping[int, SparkColumn]) -> None:
        self._catalyst = catalyst
        self._columns = columns
        self._left = PARTS_MAX

    def read(self, node: Node, *, negated: bool) -> ColumnPredicate | None:
        """What holds wherever `node` is true, or with `negated` wherever it is false."""
        self._left -= 1
        if self._left < 0:
            return None
        kind = self._catalyst.kind(node)
        if kind == "Not":
            return self.read(node.child(), negated=not negated)
        if kind in ("And", "Or"):
            parts = [self.read(one, negated=negated) for one in self._catalyst.operands(node, kind)]
            if (kind == "And") != negated:
                return all_of([one for one in parts if one is not None])
            return any_of(parts)
        found = self._leaf(node, kind)
        return ColumnPredicate(f"NOT ({found.sql})", found.names) if negated and found is not None else found

    def _leaf(self, node: Node, kind: str) -> ColumnPredicate | None:
        if kind in _COMPARED:
            return self._compared(_COMPARED[kind], node.left(), node.right())
        match kind:
            case "In":
                return self._in(self._term(node.value()), items(node.list()))
            case "IsNull" | "IsNotNull":
                term = self._term(node.child())
                return None if term is None else _of(term, f"{term.sql} IS {'NOT ' * (kind == 'IsNotNull')}NULL")
            case "StartsWith" | "Like":
                return self._like(node, kind)
            case "Literal":
                value = node.value()
                return ColumnPredicate("NULL" if value is None else str(value).upper(), frozenset())
        term = self._term(node)
        return _of(term, term.sql) if term is not None and term.kind == "boolean" else None

    def _compared(self, op: str, left: Node, right: Node) -> ColumnPredicate | None:
        term = self._term(left)
        if term is None:
            term, right, op = self._term(right), left, _FLIPPED.get(op, op)
        if term is None:
            return None
        literal = self._literal(right, term.kind)
        return None if literal is None else _of(term, f"{term.sql} {op} {literal}")

    def _in(self, term: _Term | None, values: list[Node]) -> ColumnPredicate | None:
        self._left -= len(values)
        if term is None or self._left < 0:
            return None
        literals = [self._literal(one, term.kind) for one in values]
        there = [one for one in literals if one is not None]
        return _of(term, f"{term.sql} IN ({', '.join(there)})") if there and len(there) == len(literals) else None

    def _like(self, node: Node, kind: str) -> ColumnPredicate | None:
        """Where all of the pattern is a beginning: `abc%`. What is left of another one is not exact, so it could not be
        negated, and Spark's own rules have taken those that are apart."""
        term = self._term(node.left())
        if term is None or term.kind != "string":
            return None
        found = self._value(node.right(), "string")
        pattern = None if found is None else str(found)
        if pattern is None or (kind == "Like" and not pattern.endswith("%")):
            return None
        prefix = pattern if kind == "StartsWith" else pattern[:-1]
        if not prefix or any(mark in prefix for mark in "%_\\"):
            return None
        if kind == "Like" and str(node.escapeChar()) in prefix:
            return None
        return _of(term, f"{term.sql} LIKE {quoted_text(prefix + '%')}")

    def _term(self, node: Node) -> _Term | None:
        column = self._column(node)
        if column is not None:
            return _Term(column.name, quoted_name(column.name), column.kind)
        kind = self._catalyst.kind(node)
        if kind == "Year":
            inner = self._column(node.child()) or self._day(node.child())
            if inner is not None and inner.kind in ("date", "timestamp", "timestamp_ntz"):
                return _Term(inner.name, f"YEAR({quoted_name(inner.name)})", "int")
        inner = self._day(node)
        return None if inner is None else _Term(inner.name, f"CAST({quoted_name(inner.name)} AS DATE)", "date")

    def _day(self, node: Node) -> SparkColumn | None:
        """The time of which `node` is the day, in UTC."""
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
        if self._catalyst.kind(node) != "AttributeReference":
            return None
        column = self._columns.get(self._catalyst.id_of(node))
        return column if column is not None and column.kind == self._catalyst.type_of(node) else None

    def _literal(self, node: Node, kind: str) -> str | None:
        """As the catalog has it, beside a column of type `kind`; None where it is no literal of that type."""
        if self._catalyst.kind(node) == "Literal" and node.value() is None:
            return "NULL"
        value = self._value(node, kind)
        return None if value is None else _written(value, kind)

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
        except (Py4JError, PySparkException):  # whatever is wrong with it Spark will say
            return None


def _of(term: _Term, sql: str) -> ColumnPredicate:
    return ColumnPredicate(sql, frozenset({term.column}))


def _written(value: Any, kind: str) -> str | None:
    match kind:
        case "boolean":
            return str(bool(value)).upper()
        case "int" | "bigint":
            return str(int(value))
        case "float" | "double":
            # NaN and what is beyond all numbers have no spelling; both zeros are equal to Spark.
            return repr(float(value) + 0.0) if isfinite(value) else None
        case "string":
            return quoted_text(str(value))
        case "binary":
            return f"X'{bytes(value).hex()}'"
        case "date" | "timestamp" | "timestamp_ntz":
            return _time(int(value), kind)
    return format(value.toJavaBigDecimal(), "f")


def _time(value: int, kind: str) -> str | None:
    """Of days, or of microseconds in UTC, since 1970. None for years that take more or less than four digits."""
    try:
        if kind == "date":
            return f"DATE '{_EPOCH_DAY + timedelta(days=value)}'"
        at = (_EPOCH + timedelta(microseconds=value)).replace(tzinfo=None).isoformat(sep=" ")
    except OverflowError:
        return None
    return f"TIMESTAMP '{at}{' UTC' if kind == 'timestamp' else ''}'"
