"""Translates functions and aggregates of the dialect to DuckDB's SQL.

A function is in the table of this module only if DuckDB returns the value that the dialect defines for all arguments
that the translation accepts.
"""

from __future__ import annotations

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.cubes.sketch_calls import can_sketch_type, format_count_sql, format_sketch_sql
from seamark.connector.sql.arithmetic import divide_decimals, sum_decimals
from seamark.connector.sql.calls import nested, numbers, texts, times, windows
from seamark.connector.sql.expressions import Expressions, FunctionTranslator
from seamark.connector.sql.scopes import NameScope, SqlValue, describe
from seamark.connector.sql.types import (
    BIGINT,
    BOOLEAN,
    DATE,
    DOUBLE,
    INTEGER,
    INTERVAL,
    PRECISION_MAX,
    REAL,
    TIME,
    TIMESTAMP,
    VARCHAR,
    ZONED,
    SqlType,
    UnsupportedInDuckDB,
    as_decimal,
    make_decimal,
    name_duckdb_type,
)
from seamark.connector.sql.values import cast, check_args, check_comparable, find_type, require_type, to_common_type

_PARTS: dict[type[exp.Expr], tuple[str, tuple[str, ...]]] = {
    exp.Year: ("year", ("date", "timestamp")),
    exp.Quarter: ("quarter", ("date", "timestamp")),
    exp.Month: ("month", ("date", "timestamp")),
    exp.WeekOfYear: ("week", ("date", "timestamp")),
    exp.Day: ("day", ("date", "timestamp")),
    exp.DayOfMonth: ("day", ("date", "timestamp")),
    exp.DayOfWeekIso: ("isodow", ("date", "timestamp")),
    exp.DayOfYear: ("dayofyear", ("date", "timestamp")),
    exp.YearOfWeek: ("isoyear", ("date", "timestamp")),
    exp.Hour: ("hour", ("timestamp",)),
    exp.Minute: ("minute", ("timestamp",)),
    exp.Second: ("second", ("timestamp",)),
}
"""The name of the part that a function extracts from a date or time, and the types that have this part.

Times with a zone are read in UTC, because the time zone of the session is UTC.
"""
_EXTRACTED_UNITS = {
    **{unit: unit.lower() for unit in ("YEAR", "QUARTER", "MONTH", "WEEK", "DAY", "HOUR", "MINUTE", "SECOND")},
    **dict.fromkeys(("DOW", "DAY_OF_WEEK"), "isodow"),
    **dict.fromkeys(("DOY", "DAY_OF_YEAR"), "dayofyear"),
    **dict.fromkeys(("YOW", "YEAR_OF_WEEK"), "isoyear"),
    "DAY_OF_MONTH": "day",
}
"""The units of `extract`, with DuckDB's functions."""
_TIMES_OF_DAY = {"HOUR", "MINUTE", "SECOND"}
_TRUNCATED_UNITS = {"SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "QUARTER", "YEAR"}
_UNITS_OF_DATES = {"DAY", "WEEK", "MONTH", "QUARTER", "YEAR"}
_COUNTED_UNITS = {"SECOND", "MINUTE", "HOUR", "DAY"}
_GROUPING_COLUMNS_MAX = 31
"""The maximum number of arguments for which the result of `grouping` is an integer in Trino."""
_ROUND_DIGITS_MAX = 15
_TEXT_POSITION_MAX = 10_000_000
"""The maximum start and length, in characters, that `substring` accepts."""


def translate_function(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    method = _METHODS.get(type(node))
    if method is not None:
        return method(expressions, node, scope)
    if type(node) in _PARTS:
        check_args(node)
        return extract_part(*_PARTS[type(node)], _translate_moment(expressions, node.this, node, scope), node)
    if isinstance(node, exp.Anonymous):
        name, arguments = str(node.this).lower(), node.expressions
        if name == "every" and len(arguments) == 1:
            return _translate_all_or_any(expressions, exp.LogicalAnd(this=arguments[0].copy()), scope)
        if name in numbers.CONSTANTS and not arguments:
            return numbers.translate_constant(expressions, node, scope)
        if name in numbers.FLOAT_TESTS and len(arguments) == 1:
            return numbers.translate_float_test(expressions, node, scope)
        if name == "yow" and len(arguments) == 1:
            return extract_part(
                *_PARTS[exp.YearOfWeek], _translate_moment(expressions, arguments[0], node, scope), node
            )
    if type(node) in windows.WINDOW_FUNCTIONS:
        raise InvalidRequest(f"{describe(node)} requires OVER")
    raise UnsupportedInDuckDB(f"{describe(node)} is not translated")


def _translate_moment(expressions: Expressions, argument: exp.Expr, node: exp.Expr, scope: NameScope) -> SqlValue:
    return expressions.require_utc(expressions.translate_value(argument, scope), node)


def extract_part(name: str, kinds: tuple[str, ...], value: SqlValue, node: exp.Expr) -> SqlValue:
    if value.type == ZONED and "timestamp" in kinds:
        value = SqlValue(f"CAST({value.sql} AS TIMESTAMP)", TIMESTAMP)
    if value.type in (TIME, INTERVAL):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    if value.type.name not in (*kinds, "unknown"):
        raise InvalidRequest(f"{describe(node)} is not defined for the type {value.type}")
    return SqlValue(f"{name}({value.sql})", BIGINT)


def _translate_extract(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    unit = node.name.upper()
    if unit not in _EXTRACTED_UNITS:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    kinds = ("timestamp",) if unit in _TIMES_OF_DAY else ("date", "timestamp")
    return extract_part(
        _EXTRACTED_UNITS[unit], kinds, _translate_moment(expressions, node.expression, node, scope), node
    )


def _translate_truncation(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node, frozenset(("this", "unit", "input_type_preserved")))
    unit, value = node.args["unit"].name.upper(), expressions.translate_value(node.this, scope)
    if (
        unit not in _TRUNCATED_UNITS
        or value.type not in (DATE, TIMESTAMP)
        or (value.type == DATE and unit not in _UNITS_OF_DATES)
    ):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    return SqlValue(f"CAST(date_trunc('{unit.lower()}', {value.sql}) AS {name_duckdb_type(value.type)})", value.type)


def _translate_difference(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `date_diff`, which counts full units, to `date_sub` of DuckDB.

    In sqlglot's node, the end of the period is the first argument.

    Raises:
        UnsupportedInDuckDB: The unit or the type is not supported. For dates, only days are supported.
    """
    check_args(node, frozenset(("this", "expression", "unit")))
    end, start = to_common_type(expressions.translate_values([node.this, node.expression], scope), node)
    unit = node.args["unit"].name.upper()
    if unit not in _COUNTED_UNITS or end.type not in (DATE, TIMESTAMP) or (end.type == DATE and unit != "DAY"):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {end.type}")
    if end.type == TIMESTAMP:  # Trino ignores digits after the milliseconds.
        sides = [f"date_trunc('milliseconds', {side.sql})" for side in (start, end)]
        return SqlValue(f"date_sub('{unit.lower()}', {sides[0]}, {sides[1]})", BIGINT)
    return SqlValue(f"date_sub('{unit.lower()}', {start.sql}, {end.sql})", BIGINT)


def _translate_abs(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if not value.type.is_number:
        raise InvalidRequest(f"{describe(node)} is not defined for the type {value.type}")
    return SqlValue(f"abs({value.sql})", value.type)


def _translate_floor_or_ceiling(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if value.type.is_integer:
        return value
    name, kind = "floor" if isinstance(node, exp.Floor) else "ceil", value.type
    if kind.name == "decimal":
        kind = make_decimal(min(PRECISION_MAX, kind.precision - kind.scale + min(1, kind.scale)), 0)
        return SqlValue(f"CAST({name}({value.sql}) AS {name_duckdb_type(kind)})", kind)
    if not kind.is_float:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {kind}")
    return SqlValue(f"{name}({value.sql})", kind)


def _translate_round(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `round` of integers and decimals.

    A cast to fewer digits rounds a decimal as Trino does. The result has one more digit, because 9.9 becomes 10.

    Raises:
        UnsupportedInDuckDB: The value is neither an integer nor a decimal, or the number of digits is no literal or too
            large.
    """
    check_args(node, frozenset(("this", "decimals")))
    value, digits = expressions.translate_value(node.this, scope), node.args.get("decimals")
    places = 0
    if digits is not None:
        if not (isinstance(digits, exp.Literal) and not digits.is_string and str(digits.this).isdigit()):
            raise UnsupportedInDuckDB(f"{describe(node)}: the number of digits must be a literal")
        places = int(str(digits.this))
    if value.type.is_integer:
        return value
    if value.type.name != "decimal" or places > _ROUND_DIGITS_MAX:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    value_type = value.type
    if digits is not None:  # Trino keeps the scale of the decimal.
        kind = make_decimal(min(PRECISION_MAX, value_type.precision + 1), value_type.scale)
        if places >= value_type.scale:
            return cast(value, kind)
        rounded_type = make_decimal(min(PRECISION_MAX, value_type.precision - value_type.scale + places + 1), places)
        return cast(SqlValue(f"CAST({value.sql} AS {name_duckdb_type(rounded_type)})", rounded_type), kind)
    kind = make_decimal(min(PRECISION_MAX, value_type.precision - value_type.scale + min(1, value_type.scale)), 0)
    return SqlValue(f"CAST({value.sql} AS {name_duckdb_type(kind)})", kind)


def _translate_grouping(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node, frozenset(("expressions",)))
    if not node.expressions or not all(isinstance(column, exp.Column) for column in node.expressions):
        raise UnsupportedInDuckDB(f"{describe(node)} is translated only for columns")
    if len(node.expressions) > _GROUPING_COLUMNS_MAX:
        raise UnsupportedInDuckDB(f"grouping is translated for at most {_GROUPING_COLUMNS_MAX} columns")
    values = expressions.translate_values(node.expressions, scope)
    return SqlValue(f"CAST(grouping({', '.join(value.sql for value in values)}) AS INTEGER)", INTEGER)


def _translate_square_root(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    value = expressions.translate_value(node.this, scope)
    if not value.type.is_number:
        raise InvalidRequest(f"{describe(node)} is not defined for the type {value.type}")
    text = cast(value, DOUBLE).sql
    return SqlValue(f"(CASE WHEN {text} < 0 THEN CAST('nan' AS DOUBLE) ELSE sqrt({text}) END)", DOUBLE)


def _translate_greatest_or_least(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `greatest` or `least`, whose result is null if an argument is null.

    Raises:
        UnsupportedInDuckDB: The values are floats, or are not comparable.
    """
    values = to_common_type(expressions.translate_values([node.this, *node.expressions], scope), node)
    kind = find_type(values)
    if kind.is_float or not kind.is_comparable:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {kind}")
    name = "greatest" if isinstance(node, exp.Greatest) else "least"
    nulls = " OR ".join(f"{value.sql} IS NULL" for value in values)
    return SqlValue(f"(CASE WHEN {nulls} THEN NULL ELSE {name}({', '.join(value.sql for value in values)}) END)", kind)


def _make_text_translator(name: str, kind: SqlType) -> FunctionTranslator:
    def translate(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
        check_args(node)
        arguments = [argument for argument in (node.this, node.args.get("expression")) if argument is not None]
        values = [require_type(expressions.translate_value(argument, scope), VARCHAR, node) for argument in arguments]
        return SqlValue(f"{name}({', '.join(value.sql for value in values)})", kind)

    return translate


def _translate_upper(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `upper`, character by character, because Trino keeps `ß` and DuckDB converts it.

    The text of the argument is written only once, because otherwise n nested calls would write it 3 to the power of n
    times.
    """
    check_args(node)
    text = require_type(expressions.translate_value(node.this, scope), VARCHAR, node).sql
    parts = f"list_transform(string_split({text}, 'ß'), lambda part: upper(part))"
    return SqlValue(f"array_to_string({parts}, 'ß')", VARCHAR)


def _translate_substring(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node, frozenset(("this", "start", "length")))
    value = require_type(expressions.translate_value(node.this, scope), VARCHAR, node)
    numbers = [node.args.get("start"), node.args.get("length")]
    texts = [str(argument.this) for argument in numbers if isinstance(argument, exp.Literal) and not argument.is_string]
    if len(texts) != sum(argument is not None for argument in numbers) or not all(
        argument.isdigit() and int(argument) <= _TEXT_POSITION_MAX for argument in texts
    ):
        raise UnsupportedInDuckDB(f"{describe(node)}: start and length must be literals")
    if int(texts[0]) < 1:
        raise UnsupportedInDuckDB(f"{describe(node)}: the start must be at least 1")
    return SqlValue(f"substring({value.sql}, {', '.join(texts)})", VARCHAR)


def _translate_position(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node, frozenset(("this", "substr")))
    value, part = (
        require_type(text, VARCHAR, node)
        for text in expressions.translate_values([node.this, node.args["substr"]], scope)
    )
    return SqlValue(f"strpos({value.sql}, {part.sql})", BIGINT)


def _translate_replace(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node, frozenset(("this", "expression", "replacement")))
    old = node.expression
    if not (isinstance(old, exp.Literal) and old.is_string and str(old.this)):
        raise UnsupportedInDuckDB(f"{describe(node)}: the text to replace must be a literal")
    new = node.args.get("replacement")
    values = [require_type(value, VARCHAR, node) for value in expressions.translate_values([node.this, old], scope)]
    replacement = "''" if new is None else require_type(expressions.translate_value(new, scope), VARCHAR, node).sql
    return SqlValue(f"replace({values[0].sql}, {values[1].sql}, {replacement})", VARCHAR)


# Aggregates


def _translate_count(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    if isinstance(node.this, exp.Star):
        return SqlValue("count(*)", BIGINT)
    distinct, inner = _parse_argument(node, "count")
    value = expressions.translate_value(inner, scope)
    if distinct:
        check_comparable(value, node)
    return SqlValue(f"count({distinct}{value.sql})", BIGINT)


def _translate_count_if(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    return SqlValue(
        f"count(CASE WHEN {require_type(expressions.translate_value(node.this, scope), BOOLEAN, node).sql} THEN 1 END)",
        BIGINT,
    )


def _refuse_interval(value: SqlValue, node: exp.Expr) -> None:
    if value.type == INTERVAL:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")


def _translate_sum(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    distinct, inner = _parse_argument(node, "sum")
    value = expressions.translate_value(inner, scope)
    if value.type.is_integer:
        return SqlValue(f"CAST(sum({distinct}{value.sql}) AS BIGINT)", BIGINT)
    if value.type.name == "decimal":
        return sum_decimals(value, distinct)
    if value.type == DOUBLE:
        return SqlValue(f"sum({distinct}{value.sql})", DOUBLE)
    if value.type == REAL:
        return SqlValue(f"CAST(sum({distinct}CAST({value.sql} AS DOUBLE)) AS FLOAT)", REAL)
    _refuse_interval(value, node)
    raise InvalidRequest(f"{describe(node)} is not defined for the type {value.type}")


def _translate_average(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `avg`. Its result is a decimal for decimals, a real for reals, and otherwise a double, as in Trino.

    Raises:
        InvalidRequest: The values are not numbers.
    """
    check_args(node)
    distinct, inner = _parse_argument(node, "avg")
    value = expressions.translate_value(inner, scope)
    if value.type.name == "decimal":
        sums = sum_decimals(value, distinct)
        # With NULLIF, the average of no values is null, and there is no division by zero.
        counts = SqlValue(f"CAST(nullif(count({distinct}{value.sql}), 0) AS DECIMAL(19, 0))", as_decimal(BIGINT))
        return divide_decimals(sums, counts, value.type)
    if value.type.is_integer or value.type == DOUBLE:
        return SqlValue(f"avg({distinct}{cast(value, DOUBLE).sql})", DOUBLE)
    if value.type == REAL:
        return SqlValue(f"CAST(avg({distinct}CAST({value.sql} AS DOUBLE)) AS FLOAT)", REAL)
    _refuse_interval(value, node)
    raise InvalidRequest(f"{describe(node)} is not defined for the type {value.type}")


def _translate_min_or_max(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `min` or `max`, whose result is NaN only if all values are NaN.

    In DuckDB, NaN is greater than all numbers. So only `max` needs a CASE that leaves NaN out.

    Raises:
        UnsupportedInDuckDB: The values are booleans, or are not comparable.
    """
    check_args(node)
    name = "max" if isinstance(node, exp.Max) else "min"
    value = expressions.translate_value(_parse_argument(node, name)[1], scope)
    if not value.type.is_comparable or value.type == BOOLEAN:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    if value.type.is_float and name == "max":
        numbers = f"max(CASE WHEN isnan({value.sql}) THEN NULL ELSE {value.sql} END)"
        return SqlValue(f"coalesce({numbers}, max({value.sql}))", value.type)
    return SqlValue(f"{name}({value.sql})", value.type)


def _translate_approx_distinct(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `approx_distinct` to sketches, which cubes also store. DuckDB's own sketch has a larger error."""
    check_args(node)
    sketch = sketch_value(expressions.translate_value(node.this, scope), node)
    return SqlValue(format_count_sql(sketch), BIGINT)


def sketch_value(value: SqlValue, node: exp.Expr) -> str:
    """Return the sketch of a value in DuckDB's SQL. Sketches estimate the number of distinct values.

    Raises:
        UnsupportedInDuckDB: There are no sketches of values of this type.
    """
    kind = name_duckdb_type(value.type)
    if not can_sketch_type(kind):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for the type {value.type}")
    return format_sketch_sql(value.sql, kind)


def _translate_all_or_any(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    check_args(node)
    name = "bool_and" if isinstance(node, exp.LogicalAnd) else "bool_or"
    return SqlValue(
        f"{name}({require_type(expressions.translate_value(node.this, scope), BOOLEAN, node).sql})", BOOLEAN
    )


def _translate_value_at_extreme(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `max_by` and `min_by`. The result may be null, but rows whose key is null are left out."""
    check_args(node)
    value, key = expressions.translate_values([node.this, node.expression], scope)
    if key.type.is_float or not key.type.is_comparable or key.type == BOOLEAN:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated for keys of the type {key.type}")
    name = "arg_max_null" if isinstance(node, exp.ArgMax) else "arg_min_null"
    return SqlValue(f"{name}({value.sql}, {key.sql})", value.type)


def _translate_filter(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate `sum(x) FILTER (WHERE y)` to an aggregate of CASE.

    The CASE is null for rows that do not meet the condition, and these aggregates ignore nulls. FILTER itself is not
    used, because some translations of an aggregate contain several aggregates.

    Raises:
        UnsupportedInDuckDB: The aggregate is not translated with FILTER.
    """
    aggregate, condition = node.this, node.expression.this
    if not isinstance(aggregate, exp.Count | exp.Sum | exp.Avg | exp.Min | exp.Max | exp.ApproxDistinct):
        raise UnsupportedInDuckDB(f"{describe(node)}: FILTER is not translated for this aggregate")
    inner = aggregate.copy()
    argument = inner.this.expressions[0] if isinstance(inner.this, exp.Distinct) else inner.this
    value = exp.Literal.number(1) if isinstance(argument, exp.Star) else argument.copy()
    argument.replace(exp.If(this=condition.copy(), true=value))
    return expressions.translate_value(inner, scope)


def _parse_argument(node: exp.Expr, name: str) -> tuple[str, exp.Expr]:
    """Return `DISTINCT ` or an empty text, and the argument of an aggregate. `name` is used in the error message."""
    if isinstance(node.this, exp.Distinct):
        if len(node.this.expressions) != 1:
            raise UnsupportedInDuckDB(f"{name}(DISTINCT …) with several columns is not translated")
        return "DISTINCT ", node.this.expressions[0]
    return "", node.this


_METHODS: dict[type[exp.Expr], FunctionTranslator] = {
    exp.Extract: _translate_extract,
    exp.TimestampTrunc: _translate_truncation,
    exp.DateTrunc: _translate_truncation,
    exp.DateDiff: _translate_difference,
    exp.Abs: _translate_abs,
    exp.Floor: _translate_floor_or_ceiling,
    exp.Ceil: _translate_floor_or_ceiling,
    exp.Round: _translate_round,
    exp.Sqrt: _translate_square_root,
    exp.Greatest: _translate_greatest_or_least,
    exp.Least: _translate_greatest_or_least,
    exp.Lower: _make_text_translator("lower", VARCHAR),
    exp.Upper: _translate_upper,
    exp.StartsWith: _make_text_translator("starts_with", BOOLEAN),
    exp.Substring: _translate_substring,
    exp.StrPosition: _translate_position,
    exp.Replace: _translate_replace,
    exp.Count: _translate_count,
    exp.CountIf: _translate_count_if,
    exp.Sum: _translate_sum,
    exp.Avg: _translate_average,
    exp.Min: _translate_min_or_max,
    exp.Max: _translate_min_or_max,
    exp.ApproxDistinct: _translate_approx_distinct,
    exp.LogicalAnd: _translate_all_or_any,
    exp.LogicalOr: _translate_all_or_any,
    exp.Filter: _translate_filter,
    exp.Grouping: _translate_grouping,
    exp.ArgMax: _translate_value_at_extreme,
    exp.ArgMin: _translate_value_at_extreme,
    exp.Window: windows.translate_window,
    **numbers.METHODS,
    **texts.METHODS,
    **times.METHODS,
    **nested.METHODS,
}
