"""Translates expressions of the dialect to DuckDB's SQL, with their types.

Only what is listed here and in `functions.py` is translated; the text is built from these pieces, so nothing else can
reach DuckDB. Where DuckDB differs, the text computes what the dialect defines: NaN is equal to nothing, a division of
integers by zero is an error, a division of decimals is a decimal, and values are converted by explicit casts only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from sqlglot import exp

from seamark.connector.analysis.conditions import COMPARISONS
from seamark.connector.client.errors import BadRequest
from seamark.connector.plans.quotes import quoted_text
from seamark.connector.sql.arithmetic import comparison, decimal_operation, integer_operation, moved_by_interval
from seamark.connector.sql.literals import number, target_type, typed_text
from seamark.connector.sql.scopes import NameScope, UnsupportedInDuckDB, Value, shown
from seamark.connector.sql.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INTERVAL,
    REAL,
    TIMESTAMP,
    UNKNOWN,
    UUID,
    VARCHAR,
    ZONED,
    SqlType,
    common_type,
    duckdb_name,
)
from seamark.connector.sql.values import cast, check_args, check_comparable, need, together, type_of
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern

QueryTranslator = Callable[[exp.Expr, NameScope], tuple[str, list[tuple[str, SqlType]]]]
"""Translates a nested query: its text, and its columns."""
_UNITS = {"day": "DAY", "week": "WEEK", "month": "MONTH", "year": "YEAR", "hour": "HOUR", "minute": "MINUTE"}
_UNITS["second"] = "SECOND"
_INTERVAL_MAX = 100_000
_NEGATABLE = frozenset(("this", "expression", "negate"))
"""For sqlglot, `NOT LIKE` and, in some dialects, `IS NOT NULL` are one node with `negate`."""
TEXT_MAX = 1 << 20
"""Characters of an expression in DuckDB's SQL."""


class Expressions:
    """The expressions of one statement.

    `now`: the statement's time.
    """

    def __init__(self, query: QueryTranslator, functions: FunctionTranslator, now: datetime) -> None:
        self.query = query
        self._functions = functions
        self.now = now

    def condition(self, node: exp.Expr, scope: NameScope) -> str:
        """Return a condition that is used where only *true* counts: NaN is compared without CASE, so that joins stay
        hash joins.
        """
        match node:
            case exp.Paren():
                return self.condition(node.this, scope)
            case exp.And() | exp.Or():
                word = "AND" if isinstance(node, exp.And) else "OR"
                sides = [self.condition(one, scope) for one in _flat(node, type(node))]
                return f"({f' {word} '.join(sides)})"
        if type(node) in COMPARISONS:
            return self._compared(node, scope, positive=True).sql
        return need(self.value(node, scope), BOOLEAN, node).sql

    def value(self, node: exp.Expr, scope: NameScope) -> Value:
        """BadRequest for an invalid expression; UnsupportedInDuckDB for one that is not translated."""
        kind = type(node)
        method = _METHODS.get(kind)
        if kind in COMPARISONS:
            check_args(node)
            found = self._compared(node, scope, positive=False)
        elif method is not None:
            found = method(self, node, scope)
        else:
            found = self._functions(self, node, scope)
        if len(found.sql) > TEXT_MAX:  # some translations repeat their operands
            raise BadRequest(f"An expression is too long: {shown(node)}")
        return found

    def values(self, nodes: Sequence[exp.Expr], scope: NameScope) -> list[Value]:
        return [self.value(one, scope) for one in nodes]

    # Literals

    def _literal(self, node: exp.Expr, scope: NameScope) -> Value:
        text = str(node.this)
        if node.args["is_string"]:
            if "\0" in text:
                raise UnsupportedInDuckDB("A text contains the character NUL")
            return Value(quoted_text(text), VARCHAR, node)
        return number(text, node)

    def _boolean(self, node: exp.Expr, scope: NameScope) -> Value:
        return Value("TRUE" if node.this else "FALSE", BOOLEAN, node)

    def _null(self, node: exp.Expr, scope: NameScope) -> Value:
        return Value("NULL", UNKNOWN, node)

    def _column(self, node: exp.Expr, scope: NameScope) -> Value:
        assert isinstance(node, exp.Column)
        if isinstance(node.this, exp.Star):
            raise BadRequest("* is allowed only in SELECT and count(*)")
        return scope.column(node)

    def _paren(self, node: exp.Expr, scope: NameScope) -> Value:
        return self.value(node.this, scope)

    def _interval(self, node: exp.Expr, scope: NameScope) -> Value:
        count, unit = node.this, node.args.get("unit")
        text = str(count.this) if isinstance(count, exp.Literal) else ""
        word = _UNITS.get(unit.name.lower()) if isinstance(unit, exp.Var) else None
        if word is None or not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > _INTERVAL_MAX:
            raise UnsupportedInDuckDB(
                f"{shown(node)}: only intervals of one unit up to {_INTERVAL_MAX:,} are translated"
            )
        return Value(f"INTERVAL {int(text)} {word}", INTERVAL, node)

    def _current_date(self, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node)
        return Value(f"DATE '{self.now.date().isoformat()}'", DATE)

    # Logic

    def _and_or(self, node: exp.Expr, scope: NameScope) -> Value:
        word = "AND" if isinstance(node, exp.And) else "OR"
        sides = [need(self.value(one, scope), BOOLEAN, node).sql for one in _flat(node, type(node))]
        return Value(f"({f' {word} '.join(sides)})", BOOLEAN)

    def _not(self, node: exp.Expr, scope: NameScope) -> Value:
        return Value(f"(NOT {need(self.value(node.this, scope), BOOLEAN, node).sql})", BOOLEAN)

    def _is(self, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node, _NEGATABLE)
        value = self.value(node.this, scope)
        if isinstance(node.expression, exp.Null):
            return Value(f"({value.sql} IS {_not_of(node)}NULL)", BOOLEAN)
        raise UnsupportedInDuckDB(f"{shown(node)}: of IS only IS [NOT] NULL is translated")

    def _compared(self, node: exp.Expr, scope: NameScope, *, positive: bool) -> Value:
        sides = together([self.value(node.this, scope), self.value(node.expression, scope)], node)
        return comparison(COMPARISONS[type(node)], sides, node, positive=positive)

    def _distinct_from(self, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node)
        left, right = together([self.value(node.this, scope), self.value(node.expression, scope)], node)
        check_comparable(left, node)
        word = "DISTINCT FROM" if isinstance(node, exp.NullSafeNEQ) else "NOT DISTINCT FROM"
        return Value(f"({left.sql} IS {word} {right.sql})", BOOLEAN)

    def _between(self, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node, frozenset(("this", "low", "high")))
        value, low, high = together(self.values([node.this, node.args["low"], node.args["high"]], scope), node)
        parts = [comparison(op, [value, side], node, positive=False) for op, side in ((">=", low), ("<=", high))]
        return Value(f"({parts[0].sql} AND {parts[1].sql})", BOOLEAN)

    def _in(self, node: exp.Expr, scope: NameScope) -> Value:
        query = node.args.get("query")
        if query is not None:
            check_args(node, frozenset(("this", "query")))
            return self._in_query(node, query, scope)
        check_args(node, frozenset(("this", "expressions")))
        value, *others = together(self.values([node.this, *node.expressions], scope), node)
        check_comparable(value, node)
        if value.type.is_float:  # to DuckDB, zeros of both signs are equal, and not IN each other
            equal = [comparison("=", [value, one], node, positive=False).sql for one in others]
            return Value(f"({' OR '.join(equal)})", BOOLEAN)
        return Value(f"({value.sql} IN ({', '.join(one.sql for one in others)}))", BOOLEAN)

    def _in_query(self, node: exp.Expr, query: exp.Expr, scope: NameScope) -> Value:
        if isinstance(node.this, exp.Tuple):
            raise UnsupportedInDuckDB(f"{shown(node)}: IN with several columns is not translated")
        value = self.value(node.this, scope)
        text, columns = self.query(query, scope)
        if len(columns) != 1:
            raise BadRequest(f"{shown(node)}: the query must have one column; it has {len(columns)}")
        kind = common_type(value.type, columns[0][1])
        if kind is None:
            raise BadRequest(f"{shown(node)} compares the types {value.type} and {columns[0][1]}: use CAST")
        if kind.is_float or not kind.is_comparable:
            raise UnsupportedInDuckDB(f"{shown(node)}: IN with a query of the type {kind} is not translated")
        if kind not in (columns[0][1], UNKNOWN):
            text = f"SELECT CAST(c0 AS {duckdb_name(kind)}) FROM ({text})"  # noqa: S608
        return Value(f"({cast(value, kind).sql} IN ({text}))", BOOLEAN)

    def _exists(self, node: exp.Expr, scope: NameScope) -> Value:
        return Value(f"(EXISTS ({self.query(node.this, scope)[0]}))", BOOLEAN)

    def _scalar(self, node: exp.Expr, scope: NameScope) -> Value:
        text, columns = self.query(node, scope)
        if len(columns) != 1:
            raise BadRequest(f"{shown(node)}: a query in an expression must have one column; it has {len(columns)}")
        return Value(f"({text})", columns[0][1])

    def _like(self, node: exp.Expr, scope: NameScope) -> Value:
        like, escape = (node.this, node.expression) if isinstance(node, exp.Escape) else (node, None)
        if type(like) is not exp.Like:
            raise UnsupportedInDuckDB(f"{shown(node)} is not translated")
        check_args(like, _NEGATABLE)
        word = f"{_not_of(like)}LIKE"
        value, pattern = (need(one, VARCHAR, node) for one in self.values([like.this, like.expression], scope))
        if escape is None:
            return Value(f"({value.sql} {word} {pattern.sql})", BOOLEAN)
        if not (isinstance(escape, exp.Literal) and escape.is_string and len(str(escape.this)) == 1):
            raise UnsupportedInDuckDB(f"{shown(node)}: ESCAPE must be one character")
        if pattern.literal is None or not is_valid_pattern(str(like.expression.this), str(escape.this)):
            raise UnsupportedInDuckDB(
                f"{shown(node)}: the pattern must be a text in which each escape is followed by %, _ or itself"
            )
        return Value(f"({value.sql} {word} {pattern.sql} ESCAPE {quoted_text(str(escape.this))})", BOOLEAN)

    # Choices

    def _case(self, node: exp.Expr, scope: NameScope) -> Value:
        branches = node.args["ifs"]
        if node.this is None:
            tests = [self.condition(branch.this, scope) for branch in branches]
        else:  # one type for all that are compared, as in Trino
            value, *others = together(self.values([node.this, *(branch.this for branch in branches)], scope), node)
            tests = [comparison("=", [value, other], node, positive=True).sql for other in others]
        results = [self.value(branch.args["true"], scope) for branch in branches]
        default = node.args.get("default")
        results.append(Value("NULL", UNKNOWN) if default is None else self.value(default, scope))
        return _choice(tests, together(results, node))

    def _if(self, node: exp.Expr, scope: NameScope) -> Value:
        other = node.args.get("false")
        results = [
            self.value(node.args["true"], scope),
            Value("NULL", UNKNOWN) if other is None else self.value(other, scope),
        ]
        return _choice([self.condition(node.this, scope)], together(results, node))

    def _coalesce(self, node: exp.Expr, scope: NameScope) -> Value:
        values = together(self.values([node.this, *node.expressions], scope), node)
        return Value(f"coalesce({', '.join(one.sql for one in values)})", type_of(values))

    def _nullif(self, node: exp.Expr, scope: NameScope) -> Value:
        first, second = self.values([node.this, node.expression], scope)
        equal = comparison("=", together([first, second], node), node, positive=True)
        return Value(f"CASE WHEN {equal.sql} THEN NULL ELSE {first.sql} END", first.type)

    # Arithmetic

    def _neg(self, node: exp.Expr, scope: NameScope) -> Value:
        inner = node.this
        if isinstance(inner, exp.Literal) and not inner.is_string:
            found = number(str(inner.this), node, negative=True)
            return Value(found.sql, found.type, node)
        value = self.value(inner, scope)
        if not value.type.is_number:
            raise BadRequest(f"{shown(node)}: a value of the type {value.type} has no sign")
        return Value(f"(-{value.sql})", value.type)

    def _arithmetic(self, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node)
        left, right = self.values([node.this, node.expression], scope)
        sign = _SIGNS[type(node)]
        if INTERVAL in (left.type, right.type):
            return moved_by_interval(left, right, sign, node)
        if UNKNOWN in (left.type, right.type):
            known = right.type if left.type == UNKNOWN else left.type
            return Value("NULL" if known == UNKNOWN else f"CAST(NULL AS {duckdb_name(known)})", known)
        if not (left.type.is_number and right.type.is_number):
            raise BadRequest(f"{shown(node)}: {sign} is not defined for the types {left.type} and {right.type}")
        kind = common_type(left.type, right.type)
        assert kind is not None
        if kind.is_float:
            left, right = cast(left, kind), cast(right, kind)
            if sign == "%":
                raise UnsupportedInDuckDB(f"{shown(node)}: the remainder of doubles is not translated")
            return Value(f"({left.sql} {sign} {right.sql})", kind)
        if kind.is_integer:
            kind = left.type if left.type == right.type else BIGINT
            return integer_operation(sign, cast(left, kind), cast(right, kind))
        return decimal_operation(sign, left, right, node)

    def _concat(self, node: exp.Expr, scope: NameScope) -> Value:
        parts = node.expressions if isinstance(node, exp.Concat) else _flat(node, exp.DPipe)
        values = [need(one, VARCHAR, node) for one in self.values(parts, scope)]
        return Value(f"({' || '.join(one.sql for one in values)})", VARCHAR)

    def _cast(self, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node, frozenset(("this", "to")))
        to = target_type(node.args["to"], node)
        inner = node.this
        if isinstance(inner, exp.Literal) and inner.is_string:
            return typed_text(str(inner.this), to, node)
        value = self.value(inner, scope)
        if value.type == to:
            return value
        if not _is_exact_cast(value.type, to):
            raise UnsupportedInDuckDB(f"{shown(node)}: a conversion from {value.type} to {to} is not translated")
        return Value(f"CAST({value.sql} AS {duckdb_name(to)})", to)


def _choice(tests: Sequence[str], results: Sequence[Value]) -> Value:
    branches = " ".join(f"WHEN {test} THEN {one.sql}" for test, one in zip(tests, results[:-1], strict=True))
    return Value(f"(CASE {branches} ELSE {results[-1].sql} END)", type_of(results))


def _is_exact_cast(one: SqlType, to: SqlType) -> bool:
    """Return whether DuckDB converts as Trino does, for all values."""
    if one == UNKNOWN:
        return True
    if one.is_integer:
        return to.is_number or to == VARCHAR
    if one.name == "decimal":
        return to.name in ("decimal", "double", "bigint", "integer")
    if one == REAL:
        return to == DOUBLE
    return (one, to) in {(DATE, TIMESTAMP), (TIMESTAMP, DATE), (DATE, VARCHAR), (UUID, VARCHAR)} or (
        (one, to) in {(DATE, ZONED), (TIMESTAMP, ZONED), (ZONED, TIMESTAMP), (ZONED, DATE)}
    )


def _not_of(node: exp.Expr) -> str:
    return "NOT " if node.args.get("negate") else ""


def _flat(node: exp.Expr, kind: type[exp.Expr]) -> list[exp.Expr]:
    """Return the operands of a chain, without recursion: a chain of thousands is no deep tree to DuckDB."""
    found, left = [], [node]
    while left:
        one = left.pop()
        if type(one) is kind:
            left += [one.expression, one.this]
        else:
            found.append(one)
    return found


_SIGNS: dict[type[exp.Expr], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
FunctionTranslator = Callable[[Expressions, exp.Expr, NameScope], Value]
"""Translates functions (`functions.py`)."""
_METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.Literal: Expressions._literal,
    exp.Boolean: Expressions._boolean,
    exp.Null: Expressions._null,
    exp.Column: Expressions._column,
    exp.Paren: Expressions._paren,
    exp.Interval: Expressions._interval,
    exp.CurrentDate: Expressions._current_date,
    exp.And: Expressions._and_or,
    exp.Or: Expressions._and_or,
    exp.Not: Expressions._not,
    exp.Is: Expressions._is,
    exp.NullSafeEQ: Expressions._distinct_from,
    exp.NullSafeNEQ: Expressions._distinct_from,
    exp.Between: Expressions._between,
    exp.In: Expressions._in,
    exp.Exists: Expressions._exists,
    exp.Subquery: Expressions._scalar,
    exp.Like: Expressions._like,
    exp.Escape: Expressions._like,
    exp.Case: Expressions._case,
    exp.If: Expressions._if,
    exp.Coalesce: Expressions._coalesce,
    exp.Nullif: Expressions._nullif,
    exp.Neg: Expressions._neg,
    exp.DPipe: Expressions._concat,
    exp.Concat: Expressions._concat,
    exp.Cast: Expressions._cast,
    **dict.fromkeys(_SIGNS, Expressions._arithmetic),
}
