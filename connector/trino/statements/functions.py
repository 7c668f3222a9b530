"""Comparisons of a function of a column with a literal, as conditions on the column.

`date_trunc('month', ts) = DATE '2026-01-01'` is a range of `ts`, `substr(c, 1, 2) = 'ab'` is a prefix of `c`, and
`coalesce(c, 0) > 5` is `c > 5`. Only functions are read that give the same values in Trino and DuckDB.

Each comparison is one of =, <>, <, <=, >, >=. It is true for no null, so its negation is the opposite comparison.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import product
from typing import Any, Protocol

from sqlglot import exp

from seamark.connector.plans.conditions import NEVER, ColumnComparison, ColumnReference, Condition, Like, all_of, any_of
from seamark.connector.plans.literals import LOCAL, Literal
from seamark.connector.trino.statements.literals import EXACT, UNITS, interval_of, timestamp_literal, unit_of
from seamark.connector.trino.statements.truncations import period
from seamark.metaserver.wire import PATTERN_MAX

FLIPPED = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
"""The operators for exchanged sides."""
OPPOSITE = {"=": "<>", "<>": "=", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
"""The operators that are true where these are false."""
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CLASSES = {"integer": "exact", "decimal": "exact", "text": "text", "date": "time", "timestamp": "time"}
_KIND_CLASSES = {
    "int": "exact",
    "long": "exact",
    "decimal": "exact",
    "string": "text",
    "date": "time",
    "timestamp": "time",
}
"""Types and literals of one class are compared by their exact values. Floats are not: a conversion changes them."""
_FORMATS = {"%Y": "YEAR", "%Y-%m": "MONTH", "%Y%m": "MONTH", "%Y-%m-%d": "DAY", "%Y%m%d": "DAY"}
_VARIANTS_MAX = 128
_LOWER_ALSO = {"k": "\u212a", "i": "\u0130"}
_UPPER_ALSO = {"S": "\u017f", "I": "\u0131"}
"""The characters beyond ASCII that `lower` and `upper` convert to an ASCII letter."""
_DIGITS_MAX = 38
_FOUR_DIGITS = 1000


class Comparisons(Protocol):
    """What the reader of conditions offers to a function that is compared."""

    def compared(self, op: str, side: exp.Expr, literal: Literal) -> Condition | None:
        """`side op literal`; `side` may be a function again."""

    def column(self, op: str, side: exp.Expr, literal: Literal) -> ColumnComparison | None:
        """Of a column alone, or of its day or year."""

    def condition(self, node: exp.Expr) -> Condition | None: ...

    def is_null(self, node: exp.Expr) -> Condition | None: ...

    def literal(self, node: exp.Expr) -> Literal | None: ...

    def kind(self, node: exp.Expr) -> str | None:
        """The Iceberg type of a column with stored values."""


def compare_function(op: str, node: exp.Expr, literal: Literal, reader: Comparisons) -> Condition | None:
    """A condition that is true where `node op literal` is; None for a function that is not read."""
    match node:
        case exp.TimestampTrunc() | exp.DateTrunc():
            return _truncated(op, node.this, unit_of(node), literal, reader)
        case exp.TimeToStr() if literal.kind == "text" and op == "=":
            return _formatted(node, literal, reader)
        case exp.Substring() | exp.Left():
            return _prefix(op, node, literal, reader)
        case exp.Lower() | exp.Upper() if op in ("=", "<>") and literal.kind == "text":
            return _in_case(op, node, literal.value, reader)
        case exp.Coalesce() | exp.Case() | exp.If() | exp.Nullif():
            return any_of(_branches(op, node, literal, reader))
        case exp.Cast() if type(node) is exp.Cast and _keeps_value(node, reader):
            return reader.compared(op, node.this, literal)
        case exp.Add() | exp.Sub() | exp.Mul() | exp.Neg() | exp.DateAdd():
            return _moved(op, node, literal, reader)
        case exp.Div() if node.args.get("typed"):  # `/` of a dialect that divides integers as integers
            return _quotient(op, node.this, literal, node.expression, reader)
        case exp.DateDiff() if unit_of(node) == "DAY":
            return _days_between(op, node, literal, reader)
    return None


def compare_literals(op: str, left: Literal, right: Literal) -> bool | None:
    """None if it is unknown; False if one is null, because the result is never true."""
    if "null" in (left.kind, right.kind):
        return False
    values = _value(left), _value(right)
    if left.kind == right.kind == "boolean":
        return _OPERATORS[op](left.value == "TRUE", right.value == "TRUE") if op in ("=", "<>") else None
    if None in values or _CLASSES.get(left.kind) != _CLASSES.get(right.kind):
        return None
    return _OPERATORS[op](*values)


def month_of_year(parts: list[tuple[exp.Expr, Literal]], reader: Comparisons) -> Iterator[Condition | None]:
    """The ranges that `year(c) = 2026 AND month(c) = 3` give; `parts` are the equalities of a conjunction."""
    years, months = ([(_field(node.unnest(), unit), one) for node, one in parts] for unit in ("YEAR", "MONTH"))
    for (column, year), (other, month) in product(years, months):
        if column is None or column != other or not {year.kind, month.kind} <= {"integer"}:
            continue
        try:
            start = datetime(int(year.value), int(month.value), 1)
            yield _between(column, *period(start, "MONTH"), Literal("date", ""), reader)
        except (ValueError, OverflowError):
            continue


def _field(node: exp.Expr, unit: str) -> exp.Expr | None:
    """The column of which `node` is the year or the month."""
    found: exp.Expr | None = None
    match node:
        case exp.Year() if unit == "YEAR":
            found = node.this
        case exp.Month() if unit == "MONTH":
            found = node.this
        case exp.Extract() if type(node.this) is exp.Var and node.name.upper() == unit:
            found = node.expression
    return found


def _value(literal: Literal) -> object:
    """Comparable within a class. Texts are compared by code points, as UTF-8 is."""
    match literal.kind:
        case "integer" | "decimal":
            return Decimal(literal.value)
        case "text":
            return literal.value
        case "date" | "timestamp" if literal.zone == LOCAL:
            return datetime.fromisoformat(literal.value)
    return None


def _same_class(literal: Literal, reader: Comparisons, *nodes: exp.Expr) -> bool:
    """Whether the literal, the columns and the other literals are compared by their exact values."""
    wanted = _CLASSES.get(literal.kind, literal.kind)
    for node in nodes:
        other, kind = reader.literal(node), reader.kind(node)
        if other is not None and other.kind == "null":
            continue
        found = None if other is None else _CLASSES.get(other.kind, other.kind)
        if other is None and kind is not None:
            base = kind.partition("(")[0].strip()
            found = _KIND_CLASSES.get(base, base)
        if found != wanted or found not in ("exact", "text", "time", "boolean"):
            return False
    return True


def _branches(op: str, node: exp.Expr, literal: Literal, reader: Comparisons) -> Iterator[Condition | None]:
    """Conditions, at least one of them true where the value of `node` compares so."""

    def result(value: exp.Expr, when: Condition | None = None) -> Condition | None:
        if not _same_class(literal, reader, value):
            return None
        return all_of([when, reader.compared(op, value, literal)]) if when != NEVER else NEVER

    match node:
        case exp.Coalesce():
            nulls: Condition | None = None
            for value in (node.this, *node.expressions):
                yield result(value, nulls)
                nulls = all_of([nulls, reader.is_null(value)])
        case exp.Nullif():  # null where both are equal
            yield result(node.this) if _same_class(literal, reader, node.this, node.expression) else None
        case exp.If():
            yield from _cases([node], node.args.get("false"), None, reader, result)
        case exp.Case():
            yield from _cases(node.args["ifs"], node.args.get("default"), node.this, reader, result)


def _cases(
    branches: list[exp.Expr],
    otherwise: exp.Expr | None,
    compared: exp.Expr | None,
    reader: Comparisons,
    result: Callable[[exp.Expr, Condition | None], Condition | None],
) -> Iterator[Condition | None]:
    for branch in branches:
        when = branch.this if compared is None else exp.EQ(this=compared, expression=branch.this)
        yield result(branch.args["true"], reader.condition(when))
    if otherwise is not None:
        yield result(otherwise, None)


def case_condition(
    node: exp.Case | exp.If, reader: Comparisons, read: Callable[[exp.Expr], Condition | None]
) -> Condition | None:
    """A condition that is true where CASE itself, whose results are conditions, has the truth value of `read`."""
    simple = node.this if isinstance(node, exp.Case) else None
    branches = node.args["ifs"] if isinstance(node, exp.Case) else [node]
    otherwise = node.args.get("default" if isinstance(node, exp.Case) else "false")
    return any_of(_cases(branches, otherwise, simple, reader, lambda value, when: all_of([when, read(value)])))


def _truncated(op: str, column: exp.Expr, unit: str, literal: Literal, reader: Comparisons) -> Condition | None:
    """Of the start of a period of the calendar. In the column's zone, as the literal is."""
    if literal.kind not in ("date", "timestamp") or literal.zone != LOCAL:
        return None
    moment = datetime.fromisoformat(literal.value)
    try:
        start, end = period(moment, unit)
    except (KeyError, ValueError, OverflowError):
        return None
    begins, ends = _moment(start, literal), _moment(end, literal)
    exact = start == moment
    match op:
        case "=":
            return _between(column, start, end, literal, reader) if exact else NEVER
        case "<>" if exact:
            return any_of([reader.column("<", column, begins), reader.column(">=", column, ends)])
        case "<" | ">=":
            return reader.column(op, column, begins if exact else ends)
        case "<=" | ">":
            return reader.column("<" if op == "<=" else ">=", column, ends)
    return None


def _between(column: exp.Expr, start: datetime, end: datetime, like: Literal, reader: Comparisons) -> Condition | None:
    return all_of([reader.column(">=", column, _moment(start, like)), reader.column("<", column, _moment(end, like))])


def _moment(moment: datetime, like: Literal) -> Literal:
    if like.kind == "date" and moment == moment.replace(hour=0, minute=0, second=0, microsecond=0):
        return Literal("date", moment.date().isoformat(), LOCAL)
    return timestamp_literal(moment)


def _formatted(node: exp.TimeToStr, literal: Literal, reader: Comparisons) -> Condition | None:
    """`date_format(ts, '%Y-%m') = '2026-01'`."""
    pattern = node.args.get("format")
    text = str(pattern.this) if isinstance(pattern, exp.Literal) and pattern.is_string else ""
    unit = _FORMATS.get(text)
    if unit is None:
        return None
    try:
        start = datetime.strptime(literal.value, text)
        if start.year < _FOUR_DIGITS:  # Python's strftime writes such a year without zeros
            return None
        if start.strftime(text) != literal.value:
            return NEVER
        return _between(node.this, *period(start, unit), Literal("date", ""), reader)
    except (ValueError, OverflowError):
        return None


def _prefix(op: str, node: exp.Expr, literal: Literal, reader: Comparisons) -> Condition | None:
    """`substr(c, 1, n)`: the first `n` code points."""
    if isinstance(node, exp.Substring):
        start, size = node.args.get("start"), node.args.get("length")
        if not isinstance(start, exp.Literal) or str(start.this) != "1":
            return None
    else:
        size = node.expression
    if literal.kind != "text" or not isinstance(size, exp.Literal) or not str(size.this).isdigit():
        return None
    left = int(str(size.this)) - len(literal.value)
    if int(str(size.this)) < 1:
        return None
    match op:
        case "=" | "<>":
            if left < 0:
                return NEVER if op == "=" else None
            if left > 0:
                return reader.column(op, node.this, literal)
            found = reader.column("STARTS WITH", node.this, literal)
            return found if found is None or op == "=" else found.negation()
        case "<" | ">=" if left >= 0:
            return reader.column(op, node.this, literal)
        case ">" if left >= 0:  # the prefix may be equal where the column is greater
            return reader.column(op, node.this, literal)
        case "<=" if left > 0:
            return reader.column(op, node.this, literal)
    return None


def _in_case(op: str, node: exp.Lower | exp.Upper, text: str, reader: Comparisons) -> Condition | None:
    """`lower(c) = text`."""
    column = reader.column("=", node.this, Literal("text", text))
    if column is None:
        return None
    pattern = "".join(f"\\{one}" if one in "%_\\" else one for one in text)
    like = like_predicate(column.column, pattern, "\\", function_of(node), negated=op == "<>")
    given = _variants(text, lower=isinstance(node, exp.Lower)) if op == "=" else []
    found = any_of(reader.column("=", node.this, Literal("text", one)) for one in given) if given else None
    return all_of([found, like])


def like_predicate(
    reference: ColumnReference, pattern: str, escape: str | None, function: str | None, *, negated: bool
) -> Like | None:
    """None if the server does not evaluate it. Without ESCAPE, a backslash has no meaning in Trino but in Spark."""
    if len(pattern) > PATTERN_MAX or (escape is None and "\\" in pattern):
        return None
    return Like(reference, pattern, escape, function, negated)


def function_of(node: exp.Expr) -> str | None:
    """The function that `Like` applies."""
    return "lower" if isinstance(node, exp.Lower) else "upper" if isinstance(node, exp.Upper) else None


def _variants(text: str, *, lower: bool) -> list[str]:
    """The texts that become `text` in lower case, or in upper case; empty if there are too many."""
    also = _LOWER_ALSO if lower else _UPPER_ALSO
    choices, count = [], 1
    for one in text:
        if not one.isascii():
            return []
        if one != (one.lower() if lower else one.upper()):
            return []  # no text becomes it
        same = {one, one.swapcase(), *also.get(one, "")}
        choices.append(sorted(same))
        count *= len(same)
        if count > _VARIANTS_MAX:
            return []
    return ["".join(one) for one in product(*choices)]


def _keeps_value(node: exp.Cast, reader: Comparisons) -> bool:
    to, kind = node.to, reader.kind(node.this)
    types = exp.DataType.Type
    return not to.expressions and (
        (kind in ("int", "long") and to.this is types.BIGINT)
        or (kind == "int" and to.this is types.INT)
        or (kind == "string" and to.this in (types.VARCHAR, types.TEXT))
    )


def _moved(op: str, node: exp.Expr, literal: Literal, reader: Comparisons) -> Condition | None:
    """The comparison of the column, with the operation reversed in the literal. An overflow of Trino is an error."""
    if isinstance(node, exp.Neg):
        return _reversed(FLIPPED[op], node.this, literal, -1, Decimal(0), reader)
    if isinstance(node, exp.DateAdd):
        by = interval_of(exp.Interval(this=node.expression, unit=node.args.get("unit")))
        return None if by is None else _days_later(op, node.this, literal, by[0], -by[1], reader)
    if isinstance(node, exp.Add | exp.Sub) and isinstance(node.expression, exp.Interval):
        by = interval_of(node.expression)
        sign = -1 if isinstance(node, exp.Add) else 1
        return None if by is None else _days_later(op, node.this, literal, by[0], sign * by[1], reader)
    for side, other in ((node.this, node.expression), (node.expression, node.this)):
        number = reader.literal(other)
        if number is None or number.kind not in ("integer", "decimal"):
            continue
        by_number = Decimal(number.value)
        match node:
            case exp.Add():
                return _reversed(op, side, literal, 1, -by_number, reader)
            case exp.Sub() if side is node.this:
                return _reversed(op, side, literal, 1, by_number, reader)
            case exp.Sub():
                return _reversed(FLIPPED[op], side, literal, -1, by_number, reader)
            case exp.Mul() if by_number == by_number.to_integral_value() and by_number:
                return _divided(op if by_number > 0 else FLIPPED[op], side, literal, int(by_number), reader)
    return None


def _reversed(
    op: str, side: exp.Expr, literal: Literal, sign: int, added: Decimal, reader: Comparisons
) -> Condition | None:
    """`side op sign * literal + added`. Only of exact numbers; a float may be rounded."""
    if literal.kind not in ("integer", "decimal") or not _same_class(literal, reader, _innermost(side)):
        return None
    value = EXACT.add(sign * Decimal(literal.value), added)
    if abs(value.adjusted()) > _DIGITS_MAX or len(value.as_tuple().digits) > _DIGITS_MAX:
        return None
    return reader.compared(op, side, _number(value))


def _divided(op: str, side: exp.Expr, literal: Literal, by: int, reader: Comparisons) -> Condition | None:
    if literal.kind != "integer" or (reader.kind(_innermost(side)) or "") not in ("int", "long"):
        return None
    down, rest = divmod(int(literal.value), by)
    match op:
        case "=" | "<>":
            if rest:
                return NEVER if op == "=" else None
            return reader.compared(op, side, _number(Decimal(down)))
        case "<" | ">=":
            return reader.compared(op, side, _number(Decimal(down + bool(rest))))
    return reader.compared(op, side, _number(Decimal(down)))


def _quotient(op: str, side: exp.Expr, literal: Literal, by: exp.Expr, reader: Comparisons) -> Condition | None:
    """`c / 100` of integers, which is truncated towards zero."""
    divisor = reader.literal(by)
    if divisor is None or {literal.kind, divisor.kind} != {"integer"} or int(divisor.value) < 1:
        return None
    if (reader.kind(side) or "") not in ("int", "long"):
        return None
    count, value = int(divisor.value), int(literal.value)
    first, last = count * value, count * value
    first -= count - 1 if value <= 0 else 0
    last += count - 1 if value >= 0 else 0

    def column(op: str, bound: int) -> Condition | None:
        return reader.column(op, side, Literal("integer", str(bound)))

    match op:
        case "=":
            return all_of([column(">=", first), column("<=", last)])
        case "<>":
            return any_of([column("<", first), column(">", last)])
        case "<" | ">=":
            return column(op, first)
    return column(op, last)


def _innermost(node: exp.Expr) -> exp.Expr:
    """The column that a chain of operations with literals starts from."""
    while isinstance(node, exp.Paren | exp.Neg) or type(node) in (exp.Add, exp.Sub, exp.Mul):
        if isinstance(node, exp.Paren | exp.Neg):
            node = node.this
        else:
            node = node.expression if isinstance(node.this.unnest(), exp.Literal | exp.Neg) else node.this
    return node


def _number(value: Decimal) -> Literal:
    if value == value.to_integral_value():
        return Literal("integer", str(int(value)))
    return Literal("decimal", format(value, "f"))


def _days_later(
    op: str, side: exp.Expr, literal: Literal, unit: str, count: int, reader: Comparisons
) -> Condition | None:
    """Intervals of days or less. Months are not reversible: two dates may have the same date a month later."""
    kind = reader.kind(side)
    if unit not in UNITS or kind not in ("date", "timestamp") or literal.zone != LOCAL:
        return None
    if kind == "date" and UNITS[unit] < timedelta(days=1):
        return None
    try:
        moment = datetime.fromisoformat(literal.value) + count * UNITS[unit]
    except (ValueError, OverflowError):
        return None
    return reader.column(op, side, _moment(moment, literal))


def _days_between(op: str, node: exp.DateDiff, literal: Literal, reader: Comparisons) -> Condition | None:
    """`date_diff('day', from, to) op n`, with a day more on each side: Trino counts complete days of timestamps, and
    DuckDB counts midnights."""
    if literal.kind != "integer" or op == "<>" or abs(int(literal.value)) > 10**6:
        return None
    count, start, end = int(literal.value), node.expression, node.this
    parts: list[Condition | None] = []
    for column, given, sign in ((start, end, -1), (end, start, 1)):  # a later start is a smaller difference
        if op in ("<", "<=", "="):
            parts.append(reader.condition(_within_days(column, given, sign, count + 1)))
        if op in (">", ">=", "="):
            parts.append(reader.condition(_within_days(column, given, -sign, 1 - count)))
    return all_of(parts)


def _within_days(column: exp.Expr, given: exp.Expr, sign: int, days: int) -> exp.Expr:
    """`column <= given + days` or, with a negative sign, `column >= given - days`."""
    days *= sign
    interval = exp.Interval(this=exp.Literal.string(abs(days)), unit=exp.Var(this="DAY"))
    moved = (exp.Add if days >= 0 else exp.Sub)(this=given, expression=interval)
    return (exp.LTE if sign > 0 else exp.GTE)(this=column, expression=moved)
