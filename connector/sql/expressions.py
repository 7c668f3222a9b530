"""Translates expressions of the dialect to DuckDB's SQL, with their types.

Only the expressions that are listed here and in `functions.py` are translated. The text consists of these translations,
so no other expression can reach DuckDB. If DuckDB differs from the dialect, the text computes the result that the
dialect defines: NaN is not equal to any value, a division of integers by zero is an error, a division of decimals is a
decimal, and only explicit casts convert values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from sqlglot import exp

from seamark.connector.analysis.conditions import COMPARISONS
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.plans.quotes import quote_text
from seamark.connector.sql.arithmetic import (
    make_operation_error,
    round_to_milliseconds,
    shift_by_interval,
    translate_comparison,
    translate_decimal_operation,
    translate_integer_operation,
)
from seamark.connector.sql.literals import (
    MILLISECOND_DIGITS,
    TIME_DIGITS_MAX,
    count_fraction_digits,
    has_zone_other_than_utc,
    parse_number,
    parse_target_type,
    parse_typed_text,
    read_time_precision,
)
from seamark.connector.sql.scopes import NameScope, SqlValue, describe
from seamark.connector.sql.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INTERVAL,
    REAL,
    TIME,
    TIMESTAMP,
    UNKNOWN,
    UUID,
    VARCHAR,
    ZONED,
    SqlType,
    UnsupportedInDuckDB,
    find_common_type,
    name_duckdb_type,
)
from seamark.connector.sql.values import cast, check_args, check_comparable, find_type, require_type, to_common_type
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern

QueryTranslator = Callable[[exp.Expr, NameScope], tuple[str, list[tuple[str, SqlType]]]]
"""A function that translates a nested query, and returns its text and its columns."""
_UNITS = {"day": "DAY", "week": "WEEK", "month": "MONTH", "year": "YEAR", "hour": "HOUR", "minute": "MINUTE"}
_UNITS["second"] = "SECOND"
_INTERVAL_MAX = 100_000
_NEGATABLE = frozenset(("this", "expression", "negate"))
"""The nodes that may have the argument `negate`.

In sqlglot, `NOT LIKE` is one node. In some dialects, `IS NOT NULL` is one node too.
"""
TEXT_MAX = 1 << 20
"""The maximum number of characters of an expression in DuckDB's SQL."""
_TRANSLATED_MAX = 1 << 23
"""The maximum number of characters of all expressions of a statement in DuckDB's SQL.

An operand counts again in each expression that contains it.
"""


class Expressions:
    """Translates the expressions of one statement. Its current time is `now`."""

    def __init__(self, translate_query: QueryTranslator, functions: FunctionTranslator, now: datetime) -> None:
        self.translate_query = translate_query
        self._functions = functions
        self.now = now
        self._has_other_zone = False
        """Whether the statement has a literal with a zone other than UTC."""
        self._requires_utc = False
        """Whether a call of the statement is correct only for times in UTC (`require_utc`)."""
        self._translated_characters = 0
        """The length of all texts that were translated. `_TRANSLATED_MAX` limits it."""

    def translate_condition(self, node: exp.Expr, scope: NameScope) -> str:
        """Return the text of a condition in a context in which null and false have the same effect.

        NaN is compared without CASE, so DuckDB can still use hash joins.
        """
        text = self._translate_condition(node, scope)
        self.count_text(text, node)
        return text

    def _translate_condition(self, node: exp.Expr, scope: NameScope) -> str:
        match node:
            case exp.Paren():
                return self.translate_condition(node.this, scope)
            case exp.And() | exp.Or():
                word = "AND" if isinstance(node, exp.And) else "OR"
                sides = [self.translate_condition(part, scope) for part in _flatten_chain(node, type(node))]
                return f"({f' {word} '.join(sides)})"
        if type(node) in COMPARISONS:
            return self._translate_comparison(node, scope, positive=True).sql
        return require_type(self.translate_value(node, scope), BOOLEAN, node).sql

    def translate_value(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        """Translate an expression.

        Raises:
            InvalidRequest: The expression is invalid.
            UnsupportedInDuckDB: The expression is not translated.
        """
        kind = type(node)
        method = _METHODS.get(kind)
        if kind in COMPARISONS:
            check_args(node)
            value = self._translate_comparison(node, scope, positive=False)
        elif method is not None:
            value = method(self, node, scope)
        else:
            value = self._functions(self, node, scope)
        self.count_text(value.sql, node)
        return value

    def count_text(self, text: str, node: exp.Expr) -> None:
        """Count the characters of a translated expression.

        Some translations repeat their operands, so the text may become much longer than the statement.

        Raises:
            InvalidRequest: The expression is too long, or all expressions together are too long.
        """
        check_length(len(text), node)
        self._translated_characters += len(text)
        if self._translated_characters > _TRANSLATED_MAX:
            raise InvalidRequest(
                f"The expressions of the statement have more than {_TRANSLATED_MAX:,} characters in DuckDB's SQL; "
                "simplify them or divide the statement"
            )

    def require_utc(self, value: SqlValue, node: exp.Expr) -> SqlValue:
        """Return `value` after a check: if it has a zone, no time in the statement may have a zone other than UTC.

        The caller computes the date or time of day of the value in UTC, but Trino computes it in the zone of the value.
        The values of columns have the zone UTC, so only literals can have another zone. The use is recorded, so that
        such a literal that follows in the statement is also refused.

        Raises:
            UnsupportedInDuckDB: The statement has times with other zones.
        """
        if value.type == ZONED:
            self._requires_utc = True
            self._check_zones(node)
        return value

    def _check_zones(self, node: exp.Expr) -> None:
        if self._requires_utc and self._has_other_zone:
            raise UnsupportedInDuckDB(f"{describe(node)}: a zone other than UTC is not translated here")

    def translate_values(self, nodes: Sequence[exp.Expr], scope: NameScope) -> list[SqlValue]:
        return [self.translate_value(node, scope) for node in nodes]

    # Literals

    def _translate_literal(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        text = str(node.this)
        if node.args["is_string"]:
            if "\0" in text:
                raise UnsupportedInDuckDB("A text literal contains the character NUL")
            return SqlValue(quote_text(text), VARCHAR, node)
        return parse_number(text, node)

    def _translate_boolean(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        return SqlValue("TRUE" if node.this else "FALSE", BOOLEAN, node)

    def _translate_null(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        return SqlValue("NULL", UNKNOWN, node)

    def _translate_column(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        assert isinstance(node, exp.Column)
        if isinstance(node.this, exp.Star):
            raise InvalidRequest("The star * is allowed only in SELECT and count(*)")
        return scope.resolve_column(node)

    def _translate_paren(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        return self.translate_value(node.this, scope)

    def _translate_interval(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        count, unit = node.this, node.args.get("unit")
        text = str(count.this) if isinstance(count, exp.Literal) else ""
        word = _UNITS.get(unit.name.lower()) if isinstance(unit, exp.Var) else None
        if word is None or not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > _INTERVAL_MAX:
            raise UnsupportedInDuckDB(
                f"{describe(node)}: only intervals with one unit and up to {_INTERVAL_MAX:,} are translated"
            )
        return SqlValue(f"INTERVAL {int(text)} {word}", INTERVAL, node)

    def _translate_current_date(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node)
        return SqlValue(f"DATE '{self.now.date().isoformat()}'", DATE)

    # Logic

    def _translate_and_or(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        word = "AND" if isinstance(node, exp.And) else "OR"
        sides = [
            require_type(self.translate_value(operand, scope), BOOLEAN, node).sql
            for operand in _flatten_chain(node, type(node))
        ]
        return SqlValue(f"({f' {word} '.join(sides)})", BOOLEAN)

    def _translate_not(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        return SqlValue(f"(NOT {require_type(self.translate_value(node.this, scope), BOOLEAN, node).sql})", BOOLEAN)

    def _translate_is(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node, _NEGATABLE)
        value = self.translate_value(node.this, scope)
        if isinstance(node.expression, exp.Null):
            return SqlValue(f"({value.sql} IS {_write_not(node)}NULL)", BOOLEAN)
        if isinstance(node.expression, exp.Boolean):
            truth = "TRUE" if node.expression.this else "FALSE"
            text = require_type(value, BOOLEAN, node).sql
            word = "DISTINCT FROM" if node.args.get("negate") else "NOT DISTINCT FROM"
            return SqlValue(f"({text} IS {word} {truth})", BOOLEAN)
        raise UnsupportedInDuckDB(f"{describe(node)}: only IS [NOT] NULL, TRUE and FALSE are translated")

    def _translate_comparison(self, node: exp.Expr, scope: NameScope, *, positive: bool) -> SqlValue:
        if isinstance(node.this, exp.Tuple) and isinstance(node.expression, exp.Tuple):
            return self._translate_row_comparison(node, scope)
        in_node = _to_in(node)
        if in_node is not None:
            return self.translate_value(in_node, scope)
        sides = to_common_type(
            [self.translate_value(node.this, scope), self.translate_value(node.expression, scope)], node
        )
        return translate_comparison(COMPARISONS[type(node)], sides, node, positive=positive)

    def _translate_row_comparison(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        """Translate `(a, b) = (1, 2)`, and `<>`, field by field, because each field has its own common type."""
        rows = [self.translate_values(side.expressions, scope) for side in (node.this, node.expression)]
        if len(rows[0]) != len(rows[1]):
            raise InvalidRequest(f"{describe(node)} compares rows of {len(rows[0])} and {len(rows[1])} fields")
        op = COMPARISONS[type(node)]
        if op not in ("=", "<>"):
            raise UnsupportedInDuckDB(f"{describe(node)}: the order of rows is not translated")
        fields = [
            translate_comparison(op, to_common_type(sides, node), node, positive=False).sql
            for sides in zip(*rows, strict=True)
        ]
        return SqlValue(f"({' AND '.join(fields) if op == '=' else ' OR '.join(fields)})", BOOLEAN)

    def _translate_distinct_from(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node)
        left, right = to_common_type(
            [self.translate_value(node.this, scope), self.translate_value(node.expression, scope)], node
        )
        check_comparable(left, node)
        word = "DISTINCT FROM" if isinstance(node, exp.NullSafeNEQ) else "NOT DISTINCT FROM"
        return SqlValue(f"({left.sql} IS {word} {right.sql})", BOOLEAN)

    def _translate_between(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node, frozenset(("this", "low", "high")))
        value, low, high = to_common_type(
            self.translate_values([node.this, node.args["low"], node.args["high"]], scope), node
        )
        parts = [
            translate_comparison(op, [value, side], node, positive=False) for op, side in ((">=", low), ("<=", high))
        ]
        return SqlValue(f"({parts[0].sql} AND {parts[1].sql})", BOOLEAN)

    def _translate_in(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        """Translate IN with a list or a query. The values of a list are converted to their common type."""
        query = node.args.get("query")
        if query is not None:
            check_args(node, frozenset(("this", "query")))
            return self._translate_in_query(node, query, scope)
        check_args(node, frozenset(("this", "expressions")))
        list_values = _list_values(node)
        if isinstance(node.this, exp.Tuple):
            # In Trino, IN of a row with a null field is null, even if another field differs.
            raise UnsupportedInDuckDB(f"{describe(node)}: IN with several columns is not translated")
        value, *candidates = to_common_type(self.translate_values([node.this, *list_values], scope), node)
        check_comparable(value, node)
        if value.type.is_float and list_values != node.expressions:  # In Trino, NaN is in VALUES that contain NaN.
            raise UnsupportedInDuckDB(f"{describe(node)}: IN with VALUES of the type {value.type} is not translated")
        if value.type.is_float:
            check_length(len(value.sql) * len(candidates), node)
            # In DuckDB, 0.0 and -0.0 are equal, but IN distinguishes them.
            equalities = [
                translate_comparison("=", [value, candidate], node, positive=False).sql for candidate in candidates
            ]
            return SqlValue(f"({' OR '.join(equalities)})", BOOLEAN)
        return SqlValue(f"({value.sql} IN ({', '.join(candidate.sql for candidate in candidates)}))", BOOLEAN)

    def _translate_in_query(self, node: exp.Expr, query: exp.Expr, scope: NameScope) -> SqlValue:
        """Translate IN with a query of one column. Floats are not translated, because DuckDB's IN finds NaN."""
        if isinstance(node.this, exp.Tuple):
            raise UnsupportedInDuckDB(f"{describe(node)}: IN with several columns is not translated")
        value = self.translate_value(node.this, scope)
        text, columns = self.translate_query(query, scope)
        if len(columns) != 1:
            raise InvalidRequest(f"{describe(node)}: the query must have one column; it has {len(columns)}")
        kind = find_common_type(value.type, columns[0][1])
        if kind is None:
            raise InvalidRequest(f"{describe(node)} compares the types {value.type} and {columns[0][1]}; use CAST")
        if kind.is_float or not kind.is_comparable:
            raise UnsupportedInDuckDB(
                f"{describe(node)}: IN with a query whose column has the type {kind} is not translated"
            )
        if kind not in (columns[0][1], UNKNOWN):
            text = f"SELECT CAST(c0 AS {name_duckdb_type(kind)}) FROM ({text})"  # noqa: S608
        return SqlValue(f"({cast(value, kind).sql} IN ({text}))", BOOLEAN)

    def _translate_exists(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        return SqlValue(f"(EXISTS ({self.translate_query(node.this, scope)[0]}))", BOOLEAN)

    def _translate_scalar_query(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        text, columns = self.translate_query(node, scope)
        if len(columns) != 1:
            raise InvalidRequest(
                f"{describe(node)}: a query in an expression must have one column; it has {len(columns)}"
            )
        return SqlValue(f"({text})", columns[0][1])

    def _translate_like(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        like, escape = (node.this, node.expression) if isinstance(node, exp.Escape) else (node, None)
        if type(like) is not exp.Like:
            raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
        check_args(like, _NEGATABLE)
        word = f"{_write_not(like)}LIKE"
        value, pattern = (
            require_type(text, VARCHAR, node) for text in self.translate_values([like.this, like.expression], scope)
        )
        if escape is None:
            return SqlValue(f"({value.sql} {word} {pattern.sql})", BOOLEAN)
        if not (isinstance(escape, exp.Literal) and escape.is_string and len(str(escape.this)) == 1):
            raise UnsupportedInDuckDB(f"{describe(node)}: ESCAPE must be one character")
        if pattern.literal is None or not is_valid_pattern(str(like.expression.this), str(escape.this)):
            raise UnsupportedInDuckDB(
                f"{describe(node)}: the pattern must be a text in which each escape is followed by %, _ or itself"
            )
        return SqlValue(f"({value.sql} {word} {pattern.sql} ESCAPE {quote_text(str(escape.this))})", BOOLEAN)

    # CASE and similar expressions

    def _translate_case(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        """Translate CASE. `CASE x WHEN y …` becomes a CASE with the conditions `x = y`, so that NaN equals nothing."""
        branches = node.args["ifs"]
        if node.this is None:
            tests = [self.translate_condition(branch.this, scope) for branch in branches]
        else:  # All compared values are converted to one type, as in Trino.
            value, *branch_values = to_common_type(
                self.translate_values([node.this, *(branch.this for branch in branches)], scope), node
            )
            check_length(len(value.sql) * len(branch_values), node)
            tests = [
                translate_comparison("=", [value, branch_value], node, positive=True).sql
                for branch_value in branch_values
            ]
        results = [self.translate_value(branch.args["true"], scope) for branch in branches]
        default = node.args.get("default")
        results.append(SqlValue("NULL", UNKNOWN) if default is None else self.translate_value(default, scope))
        return _build_case(tests, to_common_type(results, node))

    def _translate_if(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        else_node = node.args.get("false")
        results = [
            self.translate_value(node.args["true"], scope),
            SqlValue("NULL", UNKNOWN) if else_node is None else self.translate_value(else_node, scope),
        ]
        return _build_case([self.translate_condition(node.this, scope)], to_common_type(results, node))

    def _translate_coalesce(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        values = to_common_type(self.translate_values([node.this, *node.expressions], scope), node)
        return SqlValue(f"coalesce({', '.join(value.sql for value in values)})", find_type(values))

    def _translate_nullif(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        first, second = self.translate_values([node.this, node.expression], scope)
        equality = translate_comparison("=", to_common_type([first, second], node), node, positive=True)
        return SqlValue(f"CASE WHEN {equality.sql} THEN NULL ELSE {first.sql} END", first.type)

    # Arithmetic

    def _translate_negation(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        inner = node.this
        if isinstance(inner, exp.Literal) and not inner.is_string:
            constant = parse_number(str(inner.this), node, negative=True)
            return SqlValue(constant.sql, constant.type, node)
        value = self.translate_value(inner, scope)
        if value.type in (INTERVAL, UNKNOWN):
            raise UnsupportedInDuckDB(f"{describe(node)}: - is not translated for the type {value.type}")
        if not value.type.is_number:
            raise InvalidRequest(f"{describe(node)}: a value of the type {value.type} cannot be negated")
        return SqlValue(f"(-{value.sql})", value.type)

    def _translate_arithmetic(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node)
        left, right = self.translate_values([node.this, node.expression], scope)
        sign = _SIGNS[type(node)]
        if INTERVAL in (left.type, right.type):
            self.require_utc(left if right.type == INTERVAL else right, node)
            return shift_by_interval(left, right, sign, node)
        if UNKNOWN in (left.type, right.type):
            operand_type = right.type if left.type == UNKNOWN else left.type
            if operand_type == TIME:
                raise UnsupportedInDuckDB(f"{describe(node)}: {sign} is not translated for the type {operand_type}")
            if not (operand_type == UNKNOWN or operand_type.is_number or operand_type.is_time):
                raise InvalidRequest(f"{describe(node)}: {sign} is not defined for the type {operand_type}")
            return SqlValue(
                "NULL" if operand_type == UNKNOWN else f"CAST(NULL AS {name_duckdb_type(operand_type)})", operand_type
            )
        if not (left.type.is_number and right.type.is_number):
            raise make_operation_error(left, right, sign, node)
        kind = find_common_type(left.type, right.type)
        assert kind is not None
        if kind.is_float:
            left, right = cast(left, kind), cast(right, kind)
            if sign == "%":
                raise UnsupportedInDuckDB(f"{describe(node)}: the remainder of doubles is not translated")
            return SqlValue(f"({left.sql} {sign} {right.sql})", kind)
        if kind.is_integer:
            kind = left.type if left.type == right.type else BIGINT
            return translate_integer_operation(sign, cast(left, kind), cast(right, kind))
        return translate_decimal_operation(sign, left, right, node)

    def _translate_concat(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        parts = node.expressions if isinstance(node, exp.Concat) else _flatten_chain(node, exp.DPipe)
        values = [require_type(value, VARCHAR, node) for value in self.translate_values(parts, scope)]
        return SqlValue(f"({' || '.join(value.sql for value in values)})", VARCHAR)

    def _translate_cast(self, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node, frozenset(("this", "to")))
        target_type = parse_target_type(node.args["to"], node)
        inner = node.this
        digits = read_time_precision(node.args["to"])
        if isinstance(inner, exp.Literal) and inner.is_string:
            text = str(inner.this)
            if target_type in (TIMESTAMP, ZONED) and count_fraction_digits(text) > digits:
                raise UnsupportedInDuckDB(f"{describe(node)}: the text has more than {digits} digits of a second")
            if target_type == ZONED and has_zone_other_than_utc(text):
                self._has_other_zone = True
                self._check_zones(node)
            return parse_typed_text(text, target_type, node)
        value = self.translate_value(inner, scope)
        if target_type in (TIMESTAMP, ZONED) and value.type in (TIMESTAMP, ZONED) and digits < TIME_DIGITS_MAX:
            if digits != MILLISECOND_DIGITS or target_type == ZONED:
                raise UnsupportedInDuckDB(f"{describe(node)}: {digits} digits of a second are not translated")
            return round_to_milliseconds(cast(self.require_utc(value, node), TIMESTAMP))
        if value.type == target_type:
            return value
        if target_type in (TIMESTAMP, DATE):
            self.require_utc(value, node)
        if not _is_exact_cast(value.type, target_type):
            raise UnsupportedInDuckDB(
                f"{describe(node)}: a conversion from {value.type} to {target_type} is not translated"
            )
        return SqlValue(f"CAST({value.sql} AS {name_duckdb_type(target_type)})", target_type)


def check_length(characters: int, node: exp.Expr) -> None:
    """Check the length of an expression in DuckDB's SQL.

    A translation that repeats an operand must call this function before it writes the text.

    Raises:
        InvalidRequest: The expression is too long.
    """
    if characters > TEXT_MAX:
        raise InvalidRequest(
            f"An expression is too long: {describe(node)} has more than {TEXT_MAX:,} characters in DuckDB's SQL"
        )


def _build_case(tests: Sequence[str], results: Sequence[SqlValue]) -> SqlValue:
    branches = " ".join(f"WHEN {test} THEN {result.sql}" for test, result in zip(tests, results[:-1], strict=True))
    return SqlValue(f"(CASE {branches} ELSE {results[-1].sql} END)", find_type(results))


def _is_exact_cast(source: SqlType, target_type: SqlType) -> bool:
    """Return whether DuckDB's cast has the same result as Trino's cast for all values."""
    if source == UNKNOWN:
        return True
    if source.is_integer:
        return target_type.is_number or target_type == VARCHAR
    if source.name == "decimal":
        return target_type.name in ("decimal", "double", "bigint", "integer")
    if source == REAL:
        return target_type == DOUBLE
    if source == BOOLEAN:
        return target_type == VARCHAR or target_type.is_integer
    # A cast to a time with a zone uses the zone of the session, which is UTC. Casts from a time with a zone are
    # checked separately, by `require_utc`.
    return (source, target_type) in {
        (DATE, TIMESTAMP),
        (TIMESTAMP, DATE),
        (DATE, VARCHAR),
        (UUID, VARCHAR),
        (DATE, ZONED),
        (TIMESTAMP, ZONED),
        (ZONED, TIMESTAMP),
        (ZONED, DATE),
    }


def _list_values(node: exp.Expr) -> list[exp.Expr]:
    """Return the values after IN. `IN (VALUES 1, 2)` has the same values as `IN (1, 2)`."""
    values = list(node.expressions)
    if len(values) == 1 and isinstance(values[0], exp.Values):
        check_args(values[0], frozenset(("expressions",)))
        return [
            row.expressions[0] if isinstance(row, exp.Tuple) and len(row.expressions) == 1 else row
            for row in values[0].expressions
        ]
    return values


def _to_in(node: exp.Expr) -> exp.Expr | None:
    """Return the IN that equals `x = ANY (SELECT …)` or `x <> ALL (SELECT …)`, or None for other comparisons."""
    quantifier = node.expression
    if (type(node), type(quantifier)) not in ((exp.EQ, exp.Any), (exp.NEQ, exp.All)):
        return None
    query = quantifier.this.copy()
    query = query if isinstance(query, exp.Subquery) else exp.Subquery(this=query)
    membership = exp.In(this=node.this.copy(), query=query)
    return membership if isinstance(quantifier, exp.Any) else exp.Not(this=membership)


def _write_not(node: exp.Expr) -> str:
    return "NOT " if node.args.get("negate") else ""


def _flatten_chain(node: exp.Expr, kind: type[exp.Expr]) -> list[exp.Expr]:
    """Return the operands of a chain such as `a AND b AND c`.

    The function is not recursive, and DuckDB parses a flat chain without a deep tree, so a chain may have thousands of
    operands.
    """
    operands, pending = [], [node]
    while pending:
        operand = pending.pop()
        if type(operand) is kind:
            pending += [operand.expression, operand.this]
        else:
            operands.append(operand)
    return operands


_SIGNS: dict[type[exp.Expr], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
FunctionTranslator = Callable[[Expressions, exp.Expr, NameScope], SqlValue]
"""A function that translates an expression. `functions.py` contains those of functions and aggregates."""
_METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.Literal: Expressions._translate_literal,
    exp.Boolean: Expressions._translate_boolean,
    exp.Null: Expressions._translate_null,
    exp.Column: Expressions._translate_column,
    exp.Paren: Expressions._translate_paren,
    exp.Interval: Expressions._translate_interval,
    exp.CurrentDate: Expressions._translate_current_date,
    exp.And: Expressions._translate_and_or,
    exp.Or: Expressions._translate_and_or,
    exp.Not: Expressions._translate_not,
    exp.Is: Expressions._translate_is,
    exp.NullSafeEQ: Expressions._translate_distinct_from,
    exp.NullSafeNEQ: Expressions._translate_distinct_from,
    exp.Between: Expressions._translate_between,
    exp.In: Expressions._translate_in,
    exp.Exists: Expressions._translate_exists,
    exp.Subquery: Expressions._translate_scalar_query,
    exp.Like: Expressions._translate_like,
    exp.Escape: Expressions._translate_like,
    exp.Case: Expressions._translate_case,
    exp.If: Expressions._translate_if,
    exp.Coalesce: Expressions._translate_coalesce,
    exp.Nullif: Expressions._translate_nullif,
    exp.Neg: Expressions._translate_negation,
    exp.DPipe: Expressions._translate_concat,
    exp.Concat: Expressions._translate_concat,
    exp.Cast: Expressions._translate_cast,
    **dict.fromkeys(_SIGNS, Expressions._translate_arithmetic),
}
