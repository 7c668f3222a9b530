"""Reads the conditions of Spark's analysed plans into conditions of `connector/plans/conditions.py`.

Spark's analyser writes each conversion as a cast, so a literal has the type of the column that it is compared with.
Expressions that depend on the time of evaluation are not read, because a DataFrame is evaluated later than its
condition is read.

This module reads comparisons of columns with literals, for all types. Functions of columns are read by the rules that
are shared by all engines (`expressions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from sqlglot import exp

from seamark.connector.analysis.algebra.relations import is_exact
from seamark.connector.analysis.conditions import ConditionReader
from seamark.connector.plans.conditions import (
    DAY,
    NEVER,
    YEAR,
    Atom,
    ColumnComparison,
    ColumnReference,
    Condition,
    SemiJoin,
    all_of,
    any_of,
    keep_comparisons,
    keep_functions,
    weaken,
)
from seamark.connector.plans.literals import LOCAL, ZONED, Literal
from seamark.connector.plans.zones import is_utc
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.query.expressions import CURRENT, SparkExpressions, can_list_uppercase_texts
from seamark.connector.spark.scala import to_list
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern, split_pattern
from seamark.formats.iceberg.types.transforms import IDENTITY

CONDITION_PARTS_MAX = 2_000
"""The maximum number of expressions and values in a condition. A larger condition is not used."""
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
"""Spark's names of the Iceberg types whose values Spark compares as Iceberg does, by Iceberg's name.

A uuid is missing because Spark reads it as a string. A fixed is missing because Spark reads it as a binary of any
length.
"""
_ICEBERG_KINDS = {kind: iceberg for iceberg, kind in SAME_TYPES.items()}
_COMPARISON_OPERATORS = {
    "EqualTo": "=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "EqualNullSafe": "IS NOT DISTINCT FROM",
}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_RULES = ConditionReader(casts_decimal=False)
_RULE_KINDS = {
    "boolean": "boolean",
    "int": "int",
    "bigint": "long",
    "string": "string",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ntz": "timestamp",
}
"""The names in the shared rules of the Spark types that the rules support, except decimals.

In the rules, an instant is a time in UTC.
"""
_MONTHS = frozenset({"interval year", "interval month", "interval year to month"})
_FIRST_DAY, _LAST_DAY = "0001-01-01", "9999-12-31"
_ON_OTHER_DAYS = {"<": "<=", "<=": "<=", ">": ">", ">=": ">"}
"""For a comparison with a time later than midnight, the operator for the comparison with the day of this time."""
_EPOCH, _EPOCH_DAY = datetime(1970, 1, 1, tzinfo=UTC), date(1970, 1, 1)


class SparkColumn(NamedTuple):
    """A column, or a field of a struct, in a condition."""

    name: str
    """The name of the column. The name of a struct field includes the names of its structs."""
    kind: str
    """Spark's name of the type: `bigint`, `decimal(9,2)` and so on, or `struct`."""
    fields: tuple[SparkColumn, ...] = ()
    """The fields of a struct that Spark compares as Iceberg does."""


class _Term(NamedTuple):
    """A column, or the day or year of a column."""

    column: str
    transform: str
    kind: str
    """The type of the literals with which the term may be compared."""

    def compare(self, op: str, *literals: Literal) -> ColumnComparison:
        # The condition is on one relation, whose number is 0.
        return ColumnComparison((0, self.column), op, literals, self.transform)


def find_spark_kind(iceberg_type: object) -> str | None:
    """Return Spark's name of an Iceberg type, or None if Spark and Iceberg compare its values differently."""
    if not isinstance(iceberg_type, str):  # The type is nested.
        return None
    if iceberg_type.startswith("decimal("):
        return iceberg_type.replace(" ", "")
    return SAME_TYPES.get(iceberg_type)


def find_iceberg_kind(kind: str) -> str | None:
    """Return Iceberg's name of a Spark type, or None if Spark and Iceberg compare its values differently."""
    return kind if kind.startswith("decimal(") else _ICEBERG_KINDS.get(kind)


def list_spark_columns(fields: Iterable[Mapping[str, Any]], path_prefix: str = "") -> tuple[SparkColumn, ...]:
    """Return the columns of a schema whose values Spark compares as Iceberg does.

    A struct is included if it has such fields.
    """
    columns = []
    names_and_types = [(str(field["name"]), field["type"]) for field in fields]
    # The server would read a name with a dot as a field of a struct.
    has_dots = any("." in name for name, _ in names_and_types)
    for name, kind in names_and_types:
        if "." in name:
            continue
        is_struct = isinstance(kind, Mapping) and kind.get("type") == "struct" and not has_dots
        inner = list_spark_columns(kind["fields"], f"{path_prefix}{name}.") if is_struct else ()
        column_kind = "struct" if inner else find_spark_kind(kind)
        columns += [] if column_kind is None else [SparkColumn(f"{path_prefix}{name}", column_kind, inner)]
    return tuple(columns)


class Conditions:
    """Reads the conditions in the plans of one session."""

    def __init__(self, catalyst: Catalyst) -> None:
        self._catalyst = catalyst

    def read(self, node: Node, columns: Mapping[int, SparkColumn]) -> Condition | None:
        """Return a condition that is true for each row for which the node is true, without LIKE predicates.

        The result is None if every row may meet the node. The condition refers to each column as (0, column name). 0 is
        the number of the only relation.

        Args:
            node: An expression.
            columns: The columns, by the ids of Spark's attributes.
        """
        return keep_comparisons(self.read_with_likes([node], columns))

    def read_with_likes(self, nodes: Sequence[Node], columns: Mapping[int, SparkColumn]) -> Condition | None:
        """Return a condition that is true for each row for which all nodes are true. It may contain LIKE predicates.

        A node that cannot be read is left out. The result is None if every row may meet the nodes. The server evaluates
        LIKE predicates only on the rows of a dimension.
        """
        conditions: list[Condition | None] = []
        for node in nodes:
            try:
                conditions.append(_SingleConditionReader(self._catalyst, columns).read(node, negated=False))
            except (_TooLarge, RecursionError):
                continue
        # Equalities of the year and of the month may be in different nodes, but only together they give a range.
        try:
            conditions += _SingleConditionReader(self._catalyst, columns).read_months(nodes)
        except (_TooLarge, RecursionError):
            pass
        # Conditions on struct fields that can be true for null are left out (`_keep_certain`).
        return weaken(all_of(conditions), _keep_certain)

    def read_exact_comparison(self, node: Node, columns: Mapping[int, SparkColumn]) -> ColumnComparison | None:
        """Return a comparison of a column that is true for exactly the rows for which `node` is true, or None."""
        reader = _SingleConditionReader(self._catalyst, columns)
        try:
            return reader.read_exact_comparison(node)
        except (_TooLarge, RecursionError):
            return None


class _TooLarge(Exception):
    """Raised if a condition has more than `CONDITION_PARTS_MAX` parts."""


class _SingleConditionReader:
    """The state of reading one condition: the columns, and the number of parts that may still be read."""

    def __init__(self, catalyst: Catalyst, columns: Mapping[int, SparkColumn]) -> None:
        self._catalyst = catalyst
        self._columns = columns
        self._parts_left = CONDITION_PARTS_MAX

    def _count_parts(self, parts: int) -> None:
        self._parts_left -= parts
        if self._parts_left < 0:
            raise _TooLarge

    def read(self, node: Node, *, negated: bool) -> Condition | None:
        """Return a condition that is true for each row for which `node` is true or, with `negated`, false.

        The result is None if every row may meet `node`. NOT is moved to the operands, where it exchanges AND and OR.
        """
        self._count_parts(1)
        kind = self._catalyst.find_kind(node)
        if kind == "Not":
            return self.read(node.child(), negated=not negated)
        if kind in ("And", "Or"):
            nodes = self._catalyst.list_operands(node, kind)
            parts = [self.read(part, negated=negated) for part in nodes]
            if (kind == "And") == negated:
                return any_of(parts)
            return all_of([*parts, *(() if negated else self.read_months(nodes))])
        if kind == "Literal":
            value = node.value()
            return NEVER if value is None or bool(value) == negated else None
        comparison = self._read_leaf(node, kind)
        if comparison is None:
            return self._read_by_rules(node, negated=negated)
        return comparison.negate() if negated else comparison

    def read_exact_comparison(self, node: Node) -> ColumnComparison | None:
        """Return a comparison of a column with the same meaning as `node`, or None if there is none."""
        comparison = self._read_leaf(node, self._catalyst.find_kind(node))
        if comparison is None or not comparison.exact or comparison.transform != IDENTITY:
            return None
        name = comparison.column[1]
        is_column = "." not in name and is_exact(find_iceberg_kind(self._kinds[name]))
        return comparison if is_column else None

    def read_months(self, nodes: Iterable[Node]) -> Iterable[Condition | None]:
        """Yield ranges of columns for conjunctions such as `year(c) = 2026 AND month(c) = 3`.

        A condition on the month alone gives no range, so the equalities of years and months are read together.

        Args:
            nodes: The parts of a conjunction.
        """
        kinds: dict[str, list[Node]] = {"Year": [], "Month": []}
        for node in nodes:
            if self._catalyst.find_kind(node) == "EqualTo":
                for side in (node.left(), node.right()):
                    kinds.get(self._catalyst.find_kind(side), []).append(node)
        if all(kinds.values()):
            conditions = [
                SparkExpressions(self._catalyst, self).write_condition(node)
                for nodes in kinds.values()
                for node in nodes
            ]
            yield self._read_tree(exp.and_(*conditions))

    def _read_by_rules(self, node: Node, *, negated: bool) -> Condition | None:
        """Read a condition on functions of columns with the rules that all engines share.

        With `negated`, read the negation of the condition. The result is None if every row may meet it.
        """
        expressions = SparkExpressions(self._catalyst, self)
        tree = expressions.write_condition(node)
        condition = self._read_tree(exp.Not(this=exp.Paren(this=tree)) if negated else tree)
        if condition is None or not expressions.shifted_columns:
            return condition
        # If days are added to a date far outside these years, the result may wrap around and meet the condition.
        bounds = ((op, Literal("date", day, LOCAL)) for op, day in (("<", _FIRST_DAY), (">", _LAST_DAY)))
        names = sorted(expressions.shifted_columns)
        out_of_range = [ColumnComparison((0, name), op, (day,)) for op, day in bounds for name in names]
        return any_of([condition, *out_of_range])

    def _read_tree(self, tree: exp.Expr) -> Condition | None:
        """Return the condition of an expression on columns of one table, which has the number 0 in the condition.

        The result is None if every row may meet the expression.

        Conditions on functions of columns are dropped if the tree compares the result of `upper`, and not all texts
        that `upper` converts to the compared text can be listed.
        """
        kinds = self._kinds

        def find_kind(reference: ColumnReference) -> str | None:
            return _find_rule_kind(kinds[reference[1]])

        rules = _RULES
        if tree.find(*CURRENT) is not None:
            rules = ConditionReader(casts_decimal=False, today=datetime.now(UTC).date())
        condition = weaken(
            rules.read(tree, lambda column: (0, column.name), find_kind), lambda atom: _convert_literals(atom, kinds)
        )
        return condition if can_list_uppercase_texts(tree) else keep_functions(condition)

    @cached_property
    def _kinds(self) -> dict[str, str]:
        """The types of columns and fields, by name."""
        kinds_by_name, pending_columns = {}, list(self._columns.values())
        while pending_columns:
            column = pending_columns.pop()
            pending_columns += column.fields
            kinds_by_name[column.name] = column.kind
        return kinds_by_name

    def _read_leaf(self, node: Node, kind: str) -> ColumnComparison | None:
        """Read a predicate without AND, OR and NOT. Return None if it is not a supported comparison of a column."""
        if kind in _COMPARISON_OPERATORS:
            return self._compare(_COMPARISON_OPERATORS[kind], node.left(), node.right())
        match kind:
            case "In":
                return self._read_in(self._parse_term(node.value()), to_list(node.list()))
            case "IsNull" | "IsNotNull":
                term = self._parse_term(node.child())
                comparison = None if term is None else term.compare("IS NULL")
                return comparison.negate() if comparison is not None and kind == "IsNotNull" else comparison
            case "StartsWith" | "Like":
                return self._read_like(node, kind)
        term = self._parse_term(node)
        return term.compare("IS TRUE") if term is not None and term.kind == "boolean" else None

    def _compare(self, op: str, left: Node, right: Node) -> ColumnComparison | None:
        term = self._parse_term(left)
        if term is None:
            term, right, op = self._parse_term(right), left, _FLIPPED.get(op, op)
        literal = None if term is None else self._read_literal(right, term.kind)
        return None if term is None or literal is None else term.compare(op, literal)

    def _read_in(self, term: _Term | None, values: list[Node]) -> ColumnComparison | None:
        self._count_parts(len(values))
        if term is None:
            return None
        literals = [self._read_literal(value, term.kind) for value in values]
        known_literals = [literal for literal in literals if literal is not None]
        return term.compare("IN", *known_literals) if known_literals and len(known_literals) == len(literals) else None

    def _read_like(self, node: Node, kind: str) -> ColumnComparison | None:
        """Read a LIKE predicate or STARTSWITH whose pattern is only a prefix. Return None for other predicates.

        Spark's optimiser rules have already split other patterns if possible.
        """
        term = self._parse_term(node.left())
        value = None if term is None or term.kind != "string" else self._evaluate(node.right(), "string")
        if term is None or value is None:
            return None
        if kind == "StartsWith":
            prefix, suffix = str(value), "%"
        else:
            escape = str(node.escapeChar())
            if not is_valid_pattern(str(value), escape):  # Spark fails when it compares a row with such a pattern.
                return None
            prefix, suffix = split_pattern(str(value), escape)
        return term.compare("STARTS WITH", Literal("text", prefix)) if prefix and suffix == "%" else None

    def _parse_term(self, node: Node) -> _Term | None:
        column = self._find_column(node)
        if column is not None:
            return _Term(column.name, IDENTITY, column.kind)
        kind = self._catalyst.find_kind(node)
        if kind == "Year":
            inner = self._find_column(node.child()) or self._find_day_column(node.child())
            if inner is not None and inner.kind in ("date", "timestamp", "timestamp_ntz"):
                return _Term(inner.name, YEAR, "int")
        inner = self._find_day_column(node)
        return None if inner is None else _Term(inner.name, DAY, "date")

    def _find_day_column(self, node: Node) -> SparkColumn | None:
        """Return the timestamp column if `node` is the day of a timestamp in UTC. Otherwise return None.

        The day of a time without a zone does not depend on the session's zone, so the zone is not checked for it.
        """
        if self._catalyst.find_kind(node) != "Cast" or self._catalyst.read_type(node) != "date":
            return None
        column = self._find_column(node.child())
        if column is None or column.kind not in ("timestamp", "timestamp_ntz"):
            return None
        zone = node.timeZoneId()
        if column.kind == "timestamp" and (zone.isEmpty() or not is_utc(zone.get())):
            return None
        return column

    def _find_column(self, node: Node) -> SparkColumn | None:
        """Return the column that a node represents, without casts to the same type, or None."""
        column = self._find_reference(self._catalyst.remove_identity_casts(node))
        return column if column is not None and column.kind == self._catalyst.read_type(node) else None

    def _find_reference(self, node: Node) -> SparkColumn | None:
        """Return the column, or the field of a struct, that a node refers to. Return None for any other node."""
        kind = self._catalyst.find_kind(node)
        if kind == "AttributeReference":
            return self._columns.get(self._catalyst.read_id(node))
        if kind != "GetStructField":
            return None
        struct = self._find_reference(node.child())
        if struct is None or not struct.fields:
            return None
        name = f"{struct.name}.{node.childSchema().fieldNames()[node.ordinal()]}"
        return next((field for field in struct.fields if field.name == name), None)

    # The methods of `expressions.LeafReader`

    def find_column_name(self, node: Node) -> str | None:
        self._count_parts(1)
        column = self._find_column(node)
        return column.name if column is not None and _find_rule_kind(column.kind) is not None else None

    def read_constant(self, node: Node) -> Literal | None:
        kind = self._catalyst.read_type(node)
        return self._read_literal(node, kind) if kind == "void" or _find_rule_kind(kind) is not None else None

    def read_row_values(self, node: Node) -> list[Literal | None] | None:
        if self._catalyst.find_kind(node) != "Literal" or node.value() is None:
            return None
        kind, value = node.dataType(), node.value()
        match str(kind.typeName()):
            case "struct":
                kinds = [field.dataType() for field in kind.fields()]
            case "array":
                kinds = [kind.elementType()] * value.numElements()
            case _:
                return None
        self._count_parts(len(kinds))
        return [self._read_element(value, number, element_kind) for number, element_kind in enumerate(kinds)]

    def _read_element(self, row: Any, number: int, kind: Node) -> Literal | None:
        if row.isNullAt(number):
            return Literal("null", "NULL")
        name = str(kind.catalogString())
        return None if _find_rule_kind(name) is None else make_literal(row.get(number, kind), name)

    def read_interval_us(self, node: Node) -> int | None:
        kind = self._catalyst.read_type(node)
        if not kind.startswith("interval ") or "month" in kind or "year" in kind:
            return None
        value = self._evaluate(node, kind)
        return None if value is None else int(value)

    def read_interval_months(self, node: Node) -> int | None:
        kind = self._catalyst.read_type(node)
        value = self._evaluate(node, kind) if kind in _MONTHS else None
        return None if value is None else int(value)

    def _read_literal(self, node: Node, kind: str) -> Literal | None:
        """Return the literal of a constant node, or None if the node is not a constant of type `kind`."""
        if self._catalyst.find_kind(node) == "Literal" and node.value() is None:
            return Literal("null", "NULL")
        value = self._evaluate(node, kind)
        return None if value is None else make_literal(value, kind)

    def _evaluate(self, node: Node, kind: str) -> Any:
        """Return the value of a constant node of type `kind`. Return None for another node, and for null.

        A decimal may have another precision and scale than `kind`, because Iceberg compares decimals by value.
        """
        node_kind = self._catalyst.read_type(node)
        if node_kind != kind and not (node_kind.startswith("decimal(") and kind.startswith("decimal(")):
            return None
        if self._catalyst.find_kind(node) == "Literal":
            return node.value()
        if not self._catalyst.is_constant(node):
            return None
        try:
            return node.eval(None)
        except (Py4JError, PySparkException):  # Spark reports this error again when it runs the query.
            return None


def _find_rule_kind(kind: str) -> str | None:
    return kind if kind.startswith("decimal(") else _RULE_KINDS.get(kind)


def _keep_certain(atom: Atom) -> Atom | None:
    """Return the condition, or None if it is a condition on a struct field that can be true for null.

    Some file formats do not count the fields of a null struct as nulls, so such a condition could skip a file with
    matching rows. LIKE conditions are only on columns.
    """
    if isinstance(atom, SemiJoin) or "." not in atom.column[1]:
        return atom
    return atom if atom.rejects_null and isinstance(atom, ColumnComparison) else None


def _convert_literals(atom: Atom, kinds: Mapping[str, str]) -> Atom | None:
    """Convert the literals of a condition to the type of its column: dates, instants, or times without a zone.

    A condition that compares another type, or a transform of a column, is returned unchanged. `kinds` has the types of
    the columns, by name. The result is None if a condition on a date column compares times, and no comparison of days
    gives the same result.
    """
    if not isinstance(atom, ColumnComparison) or atom.transform != IDENTITY:
        return atom
    kind = kinds[atom.column[1]]
    literal_moments = [_parse_moment(literal) for literal in atom.literals]
    if kind not in ("date", "timestamp", "timestamp_ntz") or None in literal_moments:
        return atom
    moments = [moment for moment in literal_moments if moment is not None]
    if kind != "date":
        return replace(atom, literals=tuple(_make_time_literal(moment, kind) for moment in moments))
    days = tuple(Literal("date", moment.date().isoformat(), LOCAL) for moment in moments)
    if all(moment.time() == time() for moment in moments):
        return replace(atom, literals=days)
    # For a time later than midnight, only the operators in `_ON_OTHER_DAYS` have an equivalent for days. For example, a
    # date is before noon of a day if it is this day or an earlier day.
    if atom.op not in _ON_OTHER_DAYS or atom.negated:
        return None
    return replace(atom, op=_ON_OTHER_DAYS[atom.op], literals=days)


def _parse_moment(literal: Literal) -> datetime | None:
    """Return the moment of a date or of a time without a zone. Return None for another literal."""
    if literal.kind not in ("date", "timestamp") or literal.zone == ZONED:
        return None
    return datetime.fromisoformat(literal.value)


def _make_time_literal(moment: datetime, kind: str) -> Literal:
    has_zone = kind == "timestamp"
    text = moment.isoformat(sep=" ")
    return Literal("timestamp", f"{text} UTC" if has_zone else text, ZONED if has_zone else LOCAL)


def make_literal(value: Any, kind: str) -> Literal | None:
    """Return a value of the JVM as a literal, or None if Iceberg cannot read any text form of the value."""
    match kind:
        case "boolean":
            return Literal("boolean", str(bool(value)).upper())
        case "int" | "bigint":
            return Literal("integer", str(int(value)))
        case "float" | "double":
            # NaN and infinities have no text form. Spark treats both zeros as equal.
            return Literal("double", repr(float(value) + 0.0)) if isfinite(value) else None
        case "string":
            return Literal("text", str(value))
        case "binary":
            return Literal("binary", bytes(value).hex())
        case "date" | "timestamp" | "timestamp_ntz":
            return _convert_time(int(value), kind)
    return Literal("decimal", format(value.toJavaBigDecimal(), "f"))


def _convert_time(value: int, kind: str) -> Literal | None:
    """Convert a number of days or microseconds since 1970 in UTC to a literal.

    Returns:
        The literal, or None if the year does not have four digits.
    """
    try:
        if kind == "date":
            return Literal("date", str(_EPOCH_DAY + timedelta(days=value)), LOCAL)
        time = (_EPOCH + timedelta(microseconds=value)).replace(tzinfo=None)
    except OverflowError:
        return None
    return _make_time_literal(time, kind)
