"""Translates Spark's expressions into the trees that the shared rules read (`connector/analysis/conditions.py`).

The same rules read functions of columns in the conditions of all engines. This module writes Catalyst's expressions as
the sqlglot trees that these rules read. An expression is written only if the tree has the same value as Spark's
expression for each row for which Spark does not fail. Any other expression is hidden, and removes no row.

These differences of Spark are handled here:
- Without ANSI mode, integers wrap around. Days that are added to dates always wrap around. Therefore arithmetic is
  written only if an overflow is an error or null. `shifted_columns` has the date columns to which days were added.
  These columns need a further condition for values far outside the usual years.
- Functions of instants depend on the session's zone. They are written only if the zone is UTC. Instants are then
  written as times without a zone.
- `upper` may convert one character to two letters.
- The current time is written unchanged. The rules use a span of days for it, so neither the session's zone nor the time
  at which Spark runs the query matters. A plan that depends on the current time lasts for at most a day (`queries.py`).
- A substring is written only if it starts at the first character, and a formatted date only with certain patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from sqlglot import exp

from seamark.connector.plans.literals import Literal
from seamark.connector.plans.zones import is_utc
from seamark.connector.spark.query.catalyst import Catalyst, Node
from seamark.connector.spark.scala import to_list

_HIDDEN = "seamark_hidden"
_COMPARISONS: dict[str, type[exp.Expr]] = {
    "EqualTo": exp.EQ,
    "LessThan": exp.LT,
    "LessThanOrEqual": exp.LTE,
    "GreaterThan": exp.GT,
    "GreaterThanOrEqual": exp.GTE,
}
_TRUNCATION_UNITS = {
    **dict.fromkeys(("year", "yyyy", "yy"), "YEAR"),
    **dict.fromkeys(("month", "mon", "mm"), "MONTH"),
    **dict.fromkeys(("quarter", "week"), ""),
    **dict.fromkeys(("day", "dd"), "DAY"),
    **dict.fromkeys(("hour", "minute", "second"), ""),
}
"""The names that sqlglot uses for the units of Spark's `date_trunc` and `trunc`. "" means the same name."""
_DATE_UNITS = frozenset({"YEAR", "QUARTER", "MONTH", "WEEK"})
"""The units that `trunc` supports. For any other unit, `trunc` returns null."""
_FORMATS = {"yyyy": "%Y", "yyyy-MM": "%Y-%m", "yyyyMM": "%Y%m", "yyyy-MM-dd": "%Y-%m-%d", "yyyyMMdd": "%Y%m%d"}
_LETTER_PAIRS = ("SS", "FF", "FI", "FL", "ST", "J\u030c", "H\u0331", "T\u0308", "W\u030a", "Y\u030a", "A\u02be")
"""Letter pairs that begin with an ASCII letter and into which `upper` converts one character, such as ß and ǰ."""
_DECIMAL = re.compile(r"decimal\(([0-9]+),([0-9]+)\)")
_DIGITS = {"int": 10, "bigint": 19}
_PRECISION_MAX = 38
"""The maximum precision of decimals. A result of this precision may be rounded."""
_SECOND_US = 1_000_000
CURRENT = (exp.CurrentDate, exp.CurrentTimestamp, exp.Localtimestamp)
_LISTED_ROWS_MAX = 1_000


class LeafReader(Protocol):
    """Reads the columns and constants in an expression. The reader of conditions implements this protocol."""

    def find_column_name(self, node: Node) -> str | None:
        """Return the name of the column that the node represents with its stored value, or None."""

    def read_constant(self, node: Node) -> Literal | None:
        """Return a constant as a literal of the node's type.

        An instant is in UTC. Return None if the node is not a constant.
        """

    def read_row_values(self, node: Node) -> list[Literal | None] | None:
        """Return the fields of a constant struct, or the elements of a constant array. Otherwise return None."""

    def read_interval_us(self, node: Node) -> int | None:
        """Return the length of a constant interval in microseconds, or None if the interval has years or months."""

    def read_interval_months(self, node: Node) -> int | None:
        """Return the number of months of a constant interval of years and months. Otherwise return None."""


class SparkExpressions:
    """Writes the expressions of one condition as trees for the rules."""

    def __init__(self, catalyst: Catalyst, leaves: LeafReader) -> None:
        self._catalyst = catalyst
        self._leaves = leaves
        self.shifted_columns: set[str] = set()
        """The names of the date columns to which days were added."""

    def write_condition(self, node: Node) -> exp.Expr:
        """Return a sqlglot tree with the same value (true, false or null) as Spark's condition.

        A part that has no such tree becomes the expression of `make_unknown_call`, from which no condition is read.
        """
        kind = self._catalyst.find_kind(node)
        if kind in ("And", "Or"):
            parts = [self.write_condition(operand) for operand in self._catalyst.list_operands(node, kind)]
            return exp.and_(*parts) if kind == "And" else exp.or_(*parts)
        if kind == "Not":
            return exp.Not(this=exp.Paren(this=self.write_condition(node.child())))
        if kind in _COMPARISONS:
            if self._is_row(node.left()):
                return self._write_rows(node.left(), [node.right()]) if kind == "EqualTo" else make_unknown_call()
            sides = [self.write_value(operand) for operand in (node.left(), node.right())]
            return make_unknown_call() if None in sides else _COMPARISONS[kind](this=sides[0], expression=sides[1])
        match kind:
            case "In":
                if self._is_row(node.value()):
                    return self._write_rows(node.value(), to_list(node.list()))
                return self._write_in(node.value(), [self.write_value(element) for element in to_list(node.list())])
            case "ArrayContains":
                return self._write_array_contains(node)
            case "IsNull" | "IsNotNull":
                value = self.write_value(node.child())
                null_test = make_unknown_call() if value is None else exp.Is(this=value, expression=exp.Null())
                return null_test if kind == "IsNull" or value is None else exp.Not(this=exp.Paren(this=null_test))
            case "StartsWith" | "EndsWith" | "Contains" | "Like":
                return self._write_like(node, kind)
            case "If" | "CaseWhen":
                return self._write_case(node, kind, self.write_condition)
        value = self.write_value(node) if self._catalyst.read_type(node) == "boolean" else None
        if value is None or isinstance(value, exp.Boolean | exp.Null):
            return make_unknown_call() if value is None else value
        return value if isinstance(value, exp.Column) else exp.EQ(this=value, expression=exp.true())

    def write_value(self, node: Node) -> exp.Expr | None:
        """Return a tree with the same value as Spark's expression, or None if the expression is not supported."""
        node = self._catalyst.remove_identity_casts(node)
        name = self._leaves.find_column_name(node)
        if name is not None:
            return make_column(name)
        literal = self._leaves.read_constant(node)
        if literal is not None:
            return build_expression(literal)
        kind = self._catalyst.find_kind(node)
        match kind:
            case "Cast":
                return self._write_cast(node)
            case "Year" | "Month":
                day = self._find_day_column(node.child())
                return None if day is None else (exp.Year if kind == "Year" else exp.Month)(this=day)
            case "TruncDate" | "TruncTimestamp":
                return self._write_truncation(node, kind)
            case "DateFormatClass":
                return self._write_formatted(node)
            case "Substring":
                return self._write_prefix(node)
            case "Lower" | "Upper":
                text = self._write_text(node.child())
                return None if text is None else (exp.Lower if kind == "Lower" else exp.Upper)(this=text)
            case "Coalesce":
                # A value that is not supported becomes a call of an unknown function, which gives no condition.
                values = [self.write_value(child) or make_unknown_call() for child in to_list(node.children())]
                return exp.Coalesce(this=values[0], expressions=values[1:])
            case "If" | "CaseWhen":
                return self._write_case(node, kind, lambda result: self.write_value(result) or make_unknown_call())
            case "Add" | "Subtract" | "Multiply" | "UnaryMinus":
                return self._write_arithmetic(node, kind)
            case "IntegralDivide" if all(
                self._catalyst.read_type(side) in _DIGITS for side in (node.left(), node.right())
            ):  # Decimals are not written, because Spark cuts off the digits of the result after the point.
                sides = [self.write_value(operand) for operand in (node.left(), node.right())]
                return None if None in sides else exp.Div(this=sides[0], expression=sides[1], typed=True, safe=False)
            case "CurrentDate":
                return exp.CurrentDate()
            case "CurrentTimestamp" | "Now":
                return exp.CurrentTimestamp()
            case "LocalTimestamp":
                return exp.Localtimestamp()
            case "AddMonths" | "DateAddYMInterval" | "TimestampAddYMInterval":
                return self._add_months(node, kind)
            case "DateAdd" | "DateSub":
                return self._add_days(node, kind)
            case "TimestampAddInterval" | "TimeAdd":
                return self._add_interval(node)
        return None

    # Conditions

    def _is_row(self, node: Node) -> bool:
        return self._catalyst.find_kind(node) == "CreateNamedStruct"

    def _write_rows(self, left: Node, rows: Sequence[Node]) -> exp.Expr:
        """Write comparisons of rows, such as `(a, b) = (1, 2)` and `(a, b) IN ((1, 2), …)`.

        Rows with nulls are not written, because Spark compares nulls in rows as values. More than `_LISTED_ROWS_MAX`
        rows, and comparisons of other expressions than columns, are not written either. The result is then a call of an
        unknown function, from which no condition is read.
        """
        columns = [self.write_value(value) for value in to_list(left.valExprs())]
        tuples = []
        for row in rows if len(rows) <= _LISTED_ROWS_MAX else ():
            values = self._leaves.read_row_values(row)
            if values is None and self._is_row(row):
                values = [self._leaves.read_constant(value) for value in to_list(row.valExprs())]
            if values is None or any(value is None or value.kind == "null" for value in values):
                return make_unknown_call()
            tuples.append(exp.Tuple(expressions=[build_expression(value) for value in values if value is not None]))
        if not tuples or any(type(column) is not exp.Column for column in columns):
            return make_unknown_call()
        return exp.In(this=exp.Tuple(expressions=columns), expressions=tuples)

    def _write_in(self, value: Node, constants: Sequence[exp.Expr | None]) -> exp.Expr:
        side = self.write_value(value)
        known_constants = [constant for constant in constants if constant is not None]
        return (
            exp.In(this=side, expressions=known_constants)
            if side and known_constants and len(known_constants) == len(constants)
            else make_unknown_call()
        )

    def _write_array_contains(self, node: Node) -> exp.Expr:
        values = self._leaves.read_row_values(node.left())
        if values is None and self._catalyst.find_kind(node.left()) == "CreateArray":
            values = [self._leaves.read_constant(child) for child in to_list(node.left().children())]
        elements = [build_expression(value) for value in values or () if value is not None]
        return (
            self._write_in(node.right(), elements) if values and len(elements) == len(values) else make_unknown_call()
        )

    def _write_like(self, node: Node, kind: str) -> exp.Expr:
        """Write LIKE, `startswith`, `contains` or `endswith` (`kind` is Spark's name of the predicate).

        `contains` and `endswith` become LIKE. The special characters of LIKE in their text are escaped. If the pattern
        is not a constant text, the result is a call of an unknown function, from which no condition is read.
        """
        side, pattern = self._write_text(node.left()), self._leaves.read_constant(node.right())
        if side is None or pattern is None or pattern.kind != "text":
            return make_unknown_call()
        if kind == "StartsWith":
            return exp.StartsWith(this=side, expression=build_expression(pattern))
        text, escape = pattern.value, "\\"
        if kind == "Like":
            escape = str(node.escapeChar())
        else:
            # The text has no wildcards, so each character that LIKE would read as a wildcard is escaped.
            text = "".join(f"\\{character}" if character in "%_\\" else character for character in text)
            text = f"%{text}%" if kind == "Contains" else f"%{text}"
        like = exp.Like(this=side, expression=exp.Literal.string(text))
        return exp.Escape(this=like, expression=exp.Literal.string(escape))

    def _write_case(self, node: Node, kind: str, write_result: Callable[[Node], exp.Expr]) -> exp.Expr:
        """Write IF or CASE. `write_result` writes the results of its branches."""
        if kind == "If":
            pairs, otherwise = [(node.predicate(), node.trueValue())], node.falseValue()
        else:
            pairs = [(branch._1(), branch._2()) for branch in to_list(node.branches())]
            otherwise = node.elseValue().get() if node.elseValue().isDefined() else None
        branches = [
            exp.If(this=self.write_condition(condition), true=write_result(result)) for condition, result in pairs
        ]
        return exp.Case(ifs=branches, default=None if otherwise is None else write_result(otherwise))

    # Values

    def _write_cast(self, node: Node) -> exp.Expr | None:
        """Return the value of a cast if the cast keeps the value or the day of a time. Otherwise return None.

        Casts between dates and times depend on the time zone, except a cast of the current time, whose bounds have a
        margin for all zones.
        """
        child, target = node.child(), self._catalyst.read_type(node)
        source = self._catalyst.read_type(child)
        times = ("date", "timestamp", "timestamp_ntz")
        if source in times and target in times:
            inner = self.write_value(child)
            if is_current_time(inner):
                return inner
            if "timestamp" in (source, target) and not _is_in_utc(node):
                return None
            if target == "date":
                return exp.cast(inner, exp.DataType.Type.DATE) if isinstance(inner, exp.Column) else None
            return inner
        return self.write_value(child) if _keeps_number(source, target) else None

    def _find_day_column(self, node: Node) -> exp.Expr | None:
        """Return the date or time column if the node is the day of such a column. Otherwise return None."""
        value = self.write_value(node)
        if type(value) is exp.Cast and value.to.this is exp.DataType.Type.DATE:
            value = value.this
        return value if isinstance(value, exp.Column) else None

    def _write_truncation(self, node: Node, kind: str) -> exp.Expr | None:
        """Write `trunc` or `date_trunc` of a column or of the current time.

        Return None if the result depends on the time zone of the session, or if the unit or the argument is not
        supported.
        """
        unit = self._leaves.read_constant(node.format())
        if unit is None or unit.kind != "text":
            return None
        name = unit.value.lower()
        # An empty name in `_TRUNCATION_UNITS` means that sqlglot uses Spark's name of the unit.
        name = (_TRUNCATION_UNITS[name] or name.upper()) if name in _TRUNCATION_UNITS else ""
        if not name or (kind == "TruncDate" and name not in _DATE_UNITS):
            return None
        current = self.write_value(node.date() if kind == "TruncDate" else node.timestamp())
        if is_current_time(current):  # The bounds of the current time have a margin for all time zones.
            return exp.TimestampTrunc(this=current, unit=exp.Var(this=name))
        if kind == "TruncTimestamp" and not _is_in_utc(node):
            return None
        # The argument of `trunc` is a date, so a time column has a cast to its day.
        inner = self._find_day_column(node.date()) if kind == "TruncDate" else self.write_value(node.timestamp())
        return exp.TimestampTrunc(this=inner, unit=exp.Var(this=name)) if isinstance(inner, exp.Column) else None

    def _write_formatted(self, node: Node) -> exp.Expr | None:
        """Write `date_format` of a column, with a pattern of years, months and days."""
        pattern, inner = self._leaves.read_constant(node.right()), self.write_value(node.left())
        text = None if pattern is None or pattern.kind != "text" else _FORMATS.get(pattern.value)
        if text is None or not isinstance(inner, exp.Column) or not _is_in_utc(node) or self._has_legacy_formats():
            return None
        return exp.TimeToStr(this=inner, format=exp.Literal.string(text))

    def _has_legacy_formats(self) -> bool:
        """Return whether Spark formats times as Spark 2 does, where a year has no sign."""
        policy = self._catalyst.session.conf().get("spark.sql.legacy.timeParserPolicy", "CORRECTED")
        return str(policy).upper() == "LEGACY"

    def _write_prefix(self, node: Node) -> exp.Expr | None:
        """Write `substring` of a column from its first character, with a constant length. Otherwise return None."""
        start, size = (self._leaves.read_constant(operand) for operand in (node.pos(), node.len()))
        inner = self._write_text(node.str())
        if inner is None or start is None or size is None or {start.kind, size.kind} != {"integer"}:
            return None
        # For Spark, both 0 and 1 are the position of the first character.
        if int(start.value) not in (0, 1) or int(size.value) < 1:
            return None
        return exp.Substring(this=inner, start=exp.Literal.number(1), length=exp.Literal.number(int(size.value)))

    def _write_text(self, node: Node) -> exp.Expr | None:
        return self.write_value(node) if self._catalyst.read_type(node) == "string" else None

    def _write_arithmetic(self, node: Node, kind: str) -> exp.Expr | None:
        """Write +, -, * or a negation of numbers, if an overflow is an error or null. Otherwise return None.

        If an overflow is neither, Spark's result may wrap around and meet a condition that the exact result does not
        meet. Decimals with the maximum precision are left out, because Spark may round them.
        """
        result = self._catalyst.read_type(node)
        precision = _DECIMAL.fullmatch(result)
        if result not in _DIGITS and (precision is None or int(precision[1]) >= _PRECISION_MAX):
            return None
        if kind == "UnaryMinus":
            inner = self.write_value(node.child()) if node.failOnError() else None
            return None if inner is None else exp.Neg(this=exp.Paren(this=inner))
        if str(node.evalMode().toString()) not in ("ANSI", "TRY"):
            return None
        left, right = (self.write_value(operand) for operand in (node.left(), node.right()))
        if left is None or right is None:
            return None
        left, right = (side if _is_operand(side) else exp.Paren(this=side) for side in (left, right))
        return {"Add": exp.Add, "Subtract": exp.Sub, "Multiply": exp.Mul}[kind](this=left, expression=right)

    def _add_days(self, node: Node, kind: str) -> exp.Expr | None:
        """Write a date column or the current time with days added or subtracted. Return None for other operands.

        The column is added to `shifted_columns`, because the sum of a date far in the past or future may wrap around.
        """
        value, days = self.write_value(node.left()), self._leaves.read_constant(node.right())
        if value is None or days is None or days.kind != "integer":
            return None
        count = int(days.value) * (1 if kind == "DateAdd" else -1)
        if is_current_time(value):
            return _shift(value, count, "DAY")
        if not isinstance(value, exp.Column):
            return None
        if self._catalyst.read_type(node.left()) != "date":
            return None
        self.shifted_columns.add(value.name)
        return _shift(value, count, "DAY")

    def _add_months(self, node: Node, kind: str) -> exp.Expr | None:
        """Write the current time with months added or subtracted. Return None for another time.

        Adding months to a column is not written, because no bounds of the column follow from it.
        """
        value = self.write_value(node.left())
        if value is None or not is_current_time(value):
            return None
        if kind == "AddMonths":
            months = self._leaves.read_constant(node.right())
            count = int(months.value) if months is not None and months.kind == "integer" else None
        else:
            count = self._leaves.read_interval_months(node.right())
        return None if count is None else _shift(value, count, "MONTH")

    def _add_interval(self, node: Node) -> exp.Expr | None:
        """Write a time plus an interval of days or less. Only intervals of whole seconds are written.

        Spark fails if the result is outside the range of times, so the result cannot wrap around. The time must be a
        column, in the time zone UTC, or the current time, whose bounds have a margin for all zones. Otherwise, the
        result is None.
        """
        value, moved_us = self.write_value(node.start()), self._leaves.read_interval_us(node.interval())
        if value is None or moved_us is None or moved_us % _SECOND_US:
            return None
        if not is_current_time(value) and not (isinstance(value, exp.Column) and _is_in_utc(node)):
            return None
        return _shift(value, moved_us // _SECOND_US, "SECOND")


def make_column(name: str) -> exp.Column:
    return exp.Column(this=exp.to_identifier(name, quoted=True))


def is_current_time(tree: exp.Expr | None) -> bool:
    """Return whether the tree is the current time, possibly truncated or moved by an interval."""
    while isinstance(tree, exp.Add | exp.Sub | exp.TimestampTrunc):
        tree = tree.this
    return isinstance(tree, CURRENT)


def can_list_uppercase_texts(tree: exp.Expr) -> bool:
    """Return whether all texts that `upper` converts to the texts in the tree can be listed.

    Some letters become two letters in upper case, such as `ß`. A text with such a pair is not supported.
    """
    if tree.find(exp.Upper) is None:
        return True
    texts = [str(node.this) for node in tree.find_all(exp.Literal) if node.is_string]
    return not any(pair in text for text in texts for pair in _LETTER_PAIRS)


def make_unknown_call() -> exp.Expr:
    """Return a call of an unknown function, which is never read as a condition that could leave out files."""
    return exp.Anonymous(this=_HIDDEN)


def build_expression(literal: Literal) -> exp.Expr:
    """Return the tree of a literal, or a call of an unknown function if the literal's kind has no tree here.

    A condition with an unknown function leaves out no rows.
    """
    text = literal.value
    match literal.kind:
        case "null":
            return exp.Null()
        case "boolean":
            return exp.Boolean(this=text == "TRUE")
        case "integer" | "decimal":
            number = exp.Literal.number(text.removeprefix("-"))
            return exp.Neg(this=number) if text.startswith("-") else number
        case "date":
            return exp.cast(exp.Literal.string(text), exp.DataType.Type.DATE)
        case "timestamp":
            # Instants are in UTC, and the shared rules read them as times without a zone.
            target_type = exp.DataType.build("TIMESTAMP(6)", dialect="trino")
            return exp.cast(exp.Literal.string(text.removesuffix(" UTC")), target_type)
        case "text":
            return exp.Literal.string(text)
    return make_unknown_call()


def _is_in_utc(node: Node) -> bool:
    """Return whether an expression that depends on the time zone is evaluated in UTC.

    The result is False for a cast between a date and a time without a zone, because such a cast has no time zone.
    """
    zone = node.timeZoneId()
    return bool(zone.isDefined()) and is_utc(zone.get())


def _keeps_number(source: str, target: str) -> bool:
    """Return whether a cast of a number is exact for all values: the target has enough digits on both sides.

    The result is True only for casts to decimals, and from int to bigint. For any other cast, it is False, even if the
    cast is exact.

    Args:
        source: The Spark type of the number.
        target: The Spark type to which it is cast.
    """
    if (source, target) == ("int", "bigint"):
        return True
    target_decimal, source_decimal = _DECIMAL.fullmatch(target), _DECIMAL.fullmatch(source)
    if target_decimal is None or (source_decimal is None and source not in _DIGITS):
        return False
    digits, scale = (
        (_DIGITS[source], 0)
        if source_decimal is None
        else (int(source_decimal[1]) - int(source_decimal[2]), int(source_decimal[2]))
    )
    return int(target_decimal[1]) - int(target_decimal[2]) >= digits and int(target_decimal[2]) >= scale


def _is_operand(node: exp.Expr) -> bool:
    return isinstance(node, exp.Column | exp.Literal | exp.Neg)


def _shift(value: exp.Expr, count: int, unit: str) -> exp.Expr:
    interval = exp.Interval(this=exp.Literal.string(str(abs(count))), unit=exp.Var(this=unit))
    return (exp.Add if count >= 0 else exp.Sub)(this=value, expression=interval)
