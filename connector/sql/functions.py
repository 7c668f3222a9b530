"""Translates functions and aggregates of the dialect to DuckDB's SQL.

A function is in the table only if DuckDB gives the same value for all arguments that the translation lets through.
"""

from __future__ import annotations

from sqlglot import exp

from seamark.connector.client.errors import BadRequest
from seamark.connector.sql.arithmetic import quotient
from seamark.connector.sql.expressions import Expressions, FunctionTranslator
from seamark.connector.sql.scopes import NameScope, UnsupportedInDuckDB, Value, shown
from seamark.connector.sql.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    PRECISION_MAX,
    REAL,
    TIMESTAMP,
    VARCHAR,
    ZONED,
    SqlType,
    as_decimal,
    decimal,
    duckdb_name,
)
from seamark.connector.sql.values import cast, check_args, need, together, type_of

_PARTS: dict[type[exp.Expr], tuple[str, tuple[str, ...]]] = {
    exp.Year: ("year", ("date", "timestamp")),
    exp.Quarter: ("quarter", ("date", "timestamp")),
    exp.Month: ("month", ("date", "timestamp")),
    exp.WeekOfYear: ("week", ("date", "timestamp")),
    exp.Day: ("day", ("date", "timestamp")),
    exp.DayOfMonth: ("day", ("date", "timestamp")),
    exp.DayOfWeekIso: ("isodow", ("date", "timestamp")),
    exp.DayOfYear: ("dayofyear", ("date", "timestamp")),
    exp.Hour: ("hour", ("timestamp",)),
    exp.Minute: ("minute", ("timestamp",)),
    exp.Second: ("second", ("timestamp",)),
}
"""The part, and the types that have it. Times with a zone are read in UTC, as the session's zone is."""
_EXTRACTED = {"YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "HOUR", "MINUTE", "SECOND"}
_TRUNCATED = {"SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "QUARTER", "YEAR"}
_OF_DATES = {"DAY", "WEEK", "MONTH", "QUARTER", "YEAR"}
_COUNTED = {"SECOND", "MINUTE", "HOUR", "DAY"}
_RANKS = {exp.RowNumber: "row_number", exp.Rank: "rank", exp.DenseRank: "dense_rank"}
_DECIMALS_MAX = 15
_SUMMED_PRECISION_MAX = 26
"""Digits of decimals whose sum cannot exceed 38 digits: of 10 to the power of 12 rows."""
_TEXT_MAX = 10_000_000
"""Positions in texts."""


def translate_function(expressions: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    method = _METHODS.get(type(node))
    if method is not None:
        return method(expressions, node, scope)
    if type(node) in _PARTS:
        check_args(node)
        return part(*_PARTS[type(node)], expressions.value(node.this, scope), node)
    if isinstance(node, exp.Anonymous) and str(node.this).lower() == "every" and len(node.expressions) == 1:
        return _all_or_any(expressions, exp.LogicalAnd(this=node.expressions[0].copy()), scope)
    if type(node) in _RANKS:
        raise BadRequest(f"{shown(node)} needs OVER")
    raise UnsupportedInDuckDB(f"{shown(node)} is not translated")


def part(name: str, kinds: tuple[str, ...], value: Value, node: exp.Expr) -> Value:
    if value.type == ZONED and "timestamp" in kinds:
        value = Value(f"CAST({value.sql} AS TIMESTAMP)", TIMESTAMP)
    if value.type.name not in (*kinds, "unknown"):
        raise BadRequest(f"{shown(node)} is not defined for the type {value.type}")
    return Value(f"{name}({value.sql})", BIGINT)


def _extract(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    unit = node.name.upper()
    if unit not in _EXTRACTED:
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated")
    kinds = ("date", "timestamp") if unit in _OF_DATES else ("timestamp",)
    return part(unit.lower(), kinds, e.value(node.expression, scope), node)


def _truncated(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node, frozenset(("this", "unit", "input_type_preserved")))
    unit, value = node.args["unit"].name.upper(), e.value(node.this, scope)
    if unit not in _TRUNCATED or value.type not in (DATE, TIMESTAMP) or (value.type == DATE and unit not in _OF_DATES):
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated for the type {value.type}")
    return Value(f"CAST(date_trunc('{unit.lower()}', {value.sql}) AS {duckdb_name(value.type)})", value.type)


def _difference(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    """sqlglot's node has the end first."""
    check_args(node, frozenset(("this", "expression", "unit")))
    end, start = together(e.values([node.this, node.expression], scope), node)
    unit = node.args["unit"].name.upper()
    if unit not in _COUNTED or end.type not in (DATE, TIMESTAMP) or (end.type == DATE and unit != "DAY"):
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated for the type {end.type}")
    if end.type == TIMESTAMP:  # Trino counts in milliseconds
        sides = [f"date_trunc('milliseconds', {one.sql})" for one in (start, end)]
        return Value(f"date_sub('{unit.lower()}', {sides[0]}, {sides[1]})", BIGINT)
    return Value(f"date_sub('{unit.lower()}', {start.sql}, {end.sql})", BIGINT)


def _absolute(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    value = e.value(node.this, scope)
    if not value.type.is_number:
        raise BadRequest(f"{shown(node)} is not defined for the type {value.type}")
    return Value(f"abs({value.sql})", value.type)


def _floor_or_ceiling(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    value = e.value(node.this, scope)
    if value.type.is_integer:
        return value
    if not value.type.is_float:
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated for the type {value.type}")
    return Value(f"{'floor' if isinstance(node, exp.Floor) else 'ceil'}({value.sql})", value.type)


def _rounded(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node, frozenset(("this", "decimals")))
    value, given = e.value(node.this, scope), node.args.get("decimals")
    places = 0
    if given is not None:
        if not (isinstance(given, exp.Literal) and not given.is_string and str(given.this).isdigit()):
            raise UnsupportedInDuckDB(f"{shown(node)}: the number of digits must be a literal")
        places = int(str(given.this))
    if value.type.is_integer:
        return value
    if value.type.name != "decimal" or places > _DECIMALS_MAX:
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated for the type {value.type}")
    one = value.type
    if given is not None:  # Trino keeps the scale
        kind = decimal(min(PRECISION_MAX, one.precision + 1), one.scale)
        if places >= one.scale:
            return cast(value, kind)
        narrow = decimal(min(PRECISION_MAX, one.precision - one.scale + places + 1), places)
        return cast(Value(f"CAST({value.sql} AS {duckdb_name(narrow)})", narrow), kind)
    kind = decimal(min(PRECISION_MAX, one.precision - one.scale + min(1, one.scale)), 0)
    return Value(f"CAST({value.sql} AS {duckdb_name(kind)})", kind)


def _square_root(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    value = e.value(node.this, scope)
    if not value.type.is_number:
        raise BadRequest(f"{shown(node)} is not defined for the type {value.type}")
    text = cast(value, DOUBLE).sql
    return Value(f"(CASE WHEN {text} < 0 THEN CAST('nan' AS DOUBLE) ELSE sqrt({text}) END)", DOUBLE)


def _largest(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    """Null if an argument is."""
    values = together(e.values([node.this, *node.expressions], scope), node)
    kind = type_of(values)
    if kind.is_float or not kind.is_comparable:
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated for the type {kind}")
    name = "greatest" if isinstance(node, exp.Greatest) else "least"
    nulls = " OR ".join(f"{one.sql} IS NULL" for one in values)
    return Value(f"(CASE WHEN {nulls} THEN NULL ELSE {name}({', '.join(one.sql for one in values)}) END)", kind)


def _text_function(name: str, kind: SqlType) -> FunctionTranslator:
    def translate(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
        check_args(node)
        given = [one for one in (node.this, node.args.get("expression")) if one is not None]
        values = [need(e.value(one, scope), VARCHAR, node) for one in given]
        return Value(f"{name}({', '.join(one.sql for one in values)})", kind)

    return translate


def _upper(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    """Character by character, as Trino: `ß` stays, which DuckDB converts to its capital form.

    The text is written once: nested calls would else write it as often as 3 to the power of their number.
    """
    check_args(node)
    text = need(e.value(node.this, scope), VARCHAR, node).sql
    parts = f"list_transform(string_split({text}, 'ß'), lambda part: upper(part))"
    return Value(f"array_to_string({parts}, 'ß')", VARCHAR)


def _substring(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node, frozenset(("this", "start", "length")))
    value = need(e.value(node.this, scope), VARCHAR, node)
    numbers = [node.args.get("start"), node.args.get("length")]
    texts = [str(one.this) for one in numbers if isinstance(one, exp.Literal) and not one.is_string]
    if len(texts) != sum(one is not None for one in numbers) or not all(
        one.isdigit() and int(one) <= _TEXT_MAX for one in texts
    ):
        raise UnsupportedInDuckDB(f"{shown(node)}: start and length must be literals")
    if int(texts[0]) < 1:
        raise UnsupportedInDuckDB(f"{shown(node)}: the start must be at least 1")
    return Value(f"substring({value.sql}, {', '.join(texts)})", VARCHAR)


def _position(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node, frozenset(("this", "substr")))
    value, part_of = (need(one, VARCHAR, node) for one in e.values([node.this, node.args["substr"]], scope))
    return Value(f"strpos({value.sql}, {part_of.sql})", BIGINT)


def _replaced(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node, frozenset(("this", "expression", "replacement")))
    old = node.expression
    if not (isinstance(old, exp.Literal) and old.is_string and str(old.this)):
        raise UnsupportedInDuckDB(f"{shown(node)}: the text to replace must be a literal")
    new = node.args.get("replacement")
    values = [need(one, VARCHAR, node) for one in e.values([node.this, old], scope)]
    by = "''" if new is None else need(e.value(new, scope), VARCHAR, node).sql
    return Value(f"replace({values[0].sql}, {values[1].sql}, {by})", VARCHAR)


# Aggregates


def _count(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    if isinstance(node.this, exp.Star):
        return Value("count(*)", BIGINT)
    distinct, inner = _argument(node, "count")
    value = e.value(inner, scope)
    return Value(f"count({distinct}{value.sql})", BIGINT)


def _count_if(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    return Value(f"count(CASE WHEN {need(e.value(node.this, scope), BOOLEAN, node).sql} THEN 1 END)", BIGINT)


def _sum(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    distinct, inner = _argument(node, "sum")
    value = e.value(inner, scope)
    if value.type.is_integer:
        return Value(f"CAST(sum({distinct}{value.sql}) AS BIGINT)", BIGINT)
    if value.type.name == "decimal":
        return _decimal_sum(value, distinct)
    if value.type == DOUBLE:
        return Value(f"sum({distinct}{value.sql})", DOUBLE)
    if value.type == REAL:
        return Value(f"CAST(sum({distinct}CAST({value.sql} AS DOUBLE)) AS FLOAT)", REAL)
    raise BadRequest(f"{shown(node)} is not defined for the type {value.type}")


def _decimal_sum(value: Value, distinct: str = "", over: str = "") -> Value:
    """Return the sum of decimals.

    DuckDB adds them as integers of 128 bits, and begins again at the other end of their range without an error.

    Args:
        over: The window.
    """
    kind = decimal(PRECISION_MAX, value.type.scale)
    total = f"CAST(sum({distinct}{value.sql}){over} AS {duckdb_name(kind)})"
    if value.type.precision <= _SUMMED_PRECISION_MAX:
        return Value(total, kind)
    size = f"abs(sum({distinct}CAST({value.sql} AS DOUBLE)){over})"
    limit = f"CAST('1.000001e{PRECISION_MAX - kind.scale}' AS DOUBLE)"  # the sum of doubles is rounded
    return Value(f"(CASE WHEN {size} >= {limit} THEN error('Decimal overflow') ELSE {total} END)", kind)


def _average(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    distinct, inner = _argument(node, "avg")
    value = e.value(inner, scope)
    if value.type.name == "decimal":
        sums = _decimal_sum(value, distinct)
        # NULLIF: an average of nothing is null, and no division by zero.
        counts = Value(f"CAST(nullif(count({distinct}{value.sql}), 0) AS DECIMAL(19, 0))", as_decimal(BIGINT))
        return quotient(sums, counts, value.type)
    if value.type.is_integer or value.type == DOUBLE:
        return Value(f"avg({distinct}{cast(value, DOUBLE).sql})", DOUBLE)
    if value.type == REAL:
        return Value(f"CAST(avg({distinct}CAST({value.sql} AS DOUBLE)) AS FLOAT)", REAL)
    raise BadRequest(f"{shown(node)} is not defined for the type {value.type}")


def _extreme(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    """NaN is the result only if there is nothing else."""
    check_args(node)
    name = "max" if isinstance(node, exp.Max) else "min"
    value = e.value(_argument(node, name)[1], scope)
    if not value.type.is_comparable or value.type == BOOLEAN:
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated for the type {value.type}")
    if value.type.is_float and name == "max":
        numbers = f"max(CASE WHEN isnan({value.sql}) THEN NULL ELSE {value.sql} END)"
        return Value(f"coalesce({numbers}, max({value.sql}))", value.type)
    return Value(f"{name}({value.sql})", value.type)


def _all_or_any(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node)
    name = "bool_and" if isinstance(node, exp.LogicalAnd) else "bool_or"
    return Value(f"{name}({need(e.value(node.this, scope), BOOLEAN, node).sql})", BOOLEAN)


def _filtered(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    """`sum(x) FILTER (WHERE y)` is the aggregate of CASE: some translations have several aggregates."""
    aggregate, where = node.this, node.expression.this
    if not isinstance(aggregate, exp.Count | exp.Sum | exp.Avg | exp.Min | exp.Max):
        raise UnsupportedInDuckDB(f"{shown(node)}: FILTER is not translated for this aggregate")
    inner = aggregate.copy()
    argument = inner.this.expressions[0] if isinstance(inner.this, exp.Distinct) else inner.this
    value = exp.Literal.number(1) if isinstance(argument, exp.Star) else argument.copy()
    argument.replace(exp.If(this=where.copy(), true=value))
    return e.value(inner, scope)


def _argument(node: exp.Expr, name: str) -> tuple[str, exp.Expr]:
    """`DISTINCT ` or nothing, and the argument."""
    if isinstance(node.this, exp.Distinct):
        if len(node.this.expressions) != 1:
            raise UnsupportedInDuckDB(f"{name}(DISTINCT …) with several columns is not translated")
        return "DISTINCT ", node.this.expressions[0]
    return "", node.this


def _window(e: Expressions, node: exp.Expr, scope: NameScope) -> Value:
    check_args(node, frozenset(("this", "partition_by", "order", "spec", "over")))
    function, order = node.this, node.args.get("order")
    spec = node.args.get("spec")
    if spec is not None and not _is_running(spec):
        raise UnsupportedInDuckDB(f"{shown(node)}: this frame is not translated")
    if type(function) in _RANKS:
        if spec is not None or order is None:
            raise UnsupportedInDuckDB(f"{shown(node)} is not translated")
        name, kind = f"{_RANKS[type(function)]}()", BIGINT
    else:
        name, kind = _window_aggregate(e, function, scope)
    keys = [e.value(one, scope).sql for one in node.args.get("partition_by") or ()]
    within = [f"PARTITION BY {', '.join(keys)}"] if keys else []
    if order is not None:
        within.append("ORDER BY " + ", ".join(ordered(e.value(one.this, scope), one) for one in order.expressions))
    if spec is not None:
        within.append(f"{spec.text('kind').upper()} BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW")
    if isinstance(function, exp.Sum) and kind.name == "decimal":
        return _decimal_sum(e.value(function.this, scope), over=f" OVER ({' '.join(within)})")
    text = f"{name} OVER ({' '.join(within)})"
    return Value(f"CAST({text} AS {duckdb_name(kind)})", kind)


def _window_aggregate(e: Expressions, function: exp.Expr, scope: NameScope) -> tuple[str, SqlType]:
    if isinstance(function, exp.Count) and isinstance(function.this, exp.Star):
        return "count(*)", BIGINT
    if isinstance(function, exp.Count | exp.Sum | exp.Min | exp.Max) and not isinstance(function.this, exp.Distinct):
        check_args(function)
        value = e.value(function.this, scope)
        name = type(function).__name__.lower()
        if isinstance(function, exp.Count):
            return f"count({value.sql})", BIGINT
        if value.type.is_integer or value.type.name == "decimal":
            total = BIGINT if value.type.is_integer else decimal(PRECISION_MAX, value.type.scale)
            return f"{name}({value.sql})", total if isinstance(function, exp.Sum) else value.type
        if not isinstance(function, exp.Sum) and value.type.is_comparable and not value.type.is_float:
            return f"{name}({value.sql})", value.type
    raise UnsupportedInDuckDB(f"{shown(function)} OVER is not translated")


def _is_running(spec: exp.Expr) -> bool:
    given = {name: str(value).upper() for name, value in spec.args.items() if value}
    kind = given.pop("kind", "")
    return kind in ("ROWS", "RANGE") and given == {
        "start": "UNBOUNDED",
        "start_side": "PRECEDING",
        "end": "CURRENT ROW",
    }


def ordered(value: Value, node: exp.Expr) -> str:
    """Return a key of ORDER BY: nulls last unless the statement says otherwise, in both directions."""
    if not value.type.is_comparable:
        raise UnsupportedInDuckDB(f"{shown(node)}: values of the type {value.type} are not sorted")
    direction = "DESC" if node.args.get("desc") else "ASC"
    return f"{value.sql} {direction} NULLS {'FIRST' if node.args.get('nulls_first') else 'LAST'}"


_METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.Extract: _extract,
    exp.TimestampTrunc: _truncated,
    exp.DateTrunc: _truncated,
    exp.DateDiff: _difference,
    exp.Abs: _absolute,
    exp.Floor: _floor_or_ceiling,
    exp.Ceil: _floor_or_ceiling,
    exp.Round: _rounded,
    exp.Sqrt: _square_root,
    exp.Greatest: _largest,
    exp.Least: _largest,
    exp.Lower: _text_function("lower", VARCHAR),
    exp.Upper: _upper,
    exp.Length: _text_function("length", BIGINT),
    exp.StartsWith: _text_function("starts_with", BOOLEAN),
    exp.Substring: _substring,
    exp.StrPosition: _position,
    exp.Replace: _replaced,
    exp.Count: _count,
    exp.CountIf: _count_if,
    exp.Sum: _sum,
    exp.Avg: _average,
    exp.Min: _extreme,
    exp.Max: _extreme,
    exp.LogicalAnd: _all_or_any,
    exp.LogicalOr: _all_or_any,
    exp.Filter: _filtered,
    exp.Window: _window,
}
