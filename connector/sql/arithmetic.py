"""Translates comparisons and arithmetic with Trino's rules for NaN, division by zero, and the digits of decimals."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.scopes import SqlValue, describe
from seamark.connector.sql.types import (
    BOOLEAN,
    DATE,
    INTERVAL,
    PRECISION_MAX,
    TIME,
    TIMESTAMP,
    SqlType,
    UnsupportedInDuckDB,
    as_decimal,
    make_decimal,
    name_duckdb_type,
)
from seamark.connector.sql.values import cast, check_comparable

_QUOTIENT_SCALE_MIN = 6
"""The minimum number of digits after the point in a quotient of decimals."""
_SUMMED_PRECISION_MAX = 26
"""The maximum precision of decimals whose sum is computed without a check for overflow.

The sum of 10 to the power of 12 of these decimals has at most 38 digits.
"""
DIVISION_BY_ZERO = "error('Division by zero')"


def translate_comparison(op: str, sides: Sequence[SqlValue], node: exp.Expr, *, positive: bool) -> SqlValue:
    """Return the translation of a comparison of two values of the same type.

    NaN is not equal to any value, not smaller than any value, and not larger than any value. DuckDB sorts NaN after all
    numbers, so NaN is tested separately.

    Args:
        op: The operator, such as `<=`.
        sides: The two values.
        node: The comparison in the statement, for error messages.
        positive: Whether the comparison is a condition that is not negated, so that null has the same effect as false.
    """
    left, right = sides
    check_comparable(left, node)
    check_comparable(right, node)
    comparison = f"({left.sql} {op} {right.sql})"
    if op == "=" and left.type.is_float and left.literal is None and right.literal is None:
        # DuckDB's hash joins distinguish 0.0 and -0.0. The sum of either zero and 0 is 0.0.
        comparison = f"({left.sql} + 0 = {right.sql} + 0)"
    float_sides = [side.sql for side in sides if side.type.is_float and side.literal is None]
    if not float_sides:
        return SqlValue(comparison, BOOLEAN)
    if positive and op != "<>":
        return SqlValue(f"({comparison}{''.join(f' AND NOT isnan({text})' for text in float_sides)})", BOOLEAN)
    nan = " OR ".join(f"isnan({text})" for text in float_sides)
    nan_result = "TRUE" if op == "<>" else "FALSE"
    return SqlValue(
        f"(CASE WHEN {comparison} IS NULL THEN NULL WHEN {nan} THEN {nan_result} ELSE {comparison} END)", BOOLEAN
    )


def translate_integer_operation(sign: str, left: SqlValue, right: SqlValue) -> SqlValue:
    if sign in "+-*":
        return SqlValue(f"({left.sql} {sign} {right.sql})", left.type)
    operator = "//" if sign == "/" else "%"
    if _is_nonzero_literal(right.literal):
        return SqlValue(f"({left.sql} {operator} {right.sql})", left.type)
    return SqlValue(
        f"(CASE WHEN {right.sql} = 0 THEN {DIVISION_BY_ZERO} ELSE {left.sql} {operator} {right.sql} END)", left.type
    )


def _is_nonzero_literal(node: exp.Expr | None) -> bool:
    """Return whether the node is the literal of a number that is not zero. It may have a minus sign."""
    number = node.this if isinstance(node, exp.Neg) else node
    return isinstance(number, exp.Literal) and not number.is_string and bool(str(number.this).strip("0"))


def translate_decimal_operation(sign: str, left: SqlValue, right: SqlValue, node: exp.Expr) -> SqlValue:
    """Translate an operation on decimals with Trino's rules for precision and scale.

    Both operands are cast to decimals with enough digits for the result, because DuckDB computes in the operands' type.
    """
    a_type, b_type = as_decimal(left.type), as_decimal(right.type)
    scale = max(a_type.scale, b_type.scale)
    integer_digits = max(a_type.precision - a_type.scale, b_type.precision - b_type.scale)
    match sign:
        case "+" | "-":
            kind = make_decimal(min(PRECISION_MAX, integer_digits + scale + 1), scale)
            wide_sides = [cast(side, kind) for side in (left, right)]
            return SqlValue(f"CAST({wide_sides[0].sql} {sign} {wide_sides[1].sql} AS {name_duckdb_type(kind)})", kind)
        case "*":
            if a_type.scale + b_type.scale > PRECISION_MAX:
                raise InvalidRequest(f"{describe(node)} has more than {PRECISION_MAX} digits after the decimal point")
            kind = make_decimal(min(PRECISION_MAX, a_type.precision + b_type.precision), a_type.scale + b_type.scale)
            # If both operands have at most 18 digits, DuckDB multiplies in a type of 18 digits, so one operand is
            # widened.
            wide_type = make_decimal(PRECISION_MAX, a_type.scale) if kind.precision > 18 else a_type
            return SqlValue(
                f"CAST({cast(left, wide_type).sql} * {cast(right, b_type).sql} AS {name_duckdb_type(kind)})", kind
            )
        case "%":
            kind = make_decimal(min(a_type.precision - a_type.scale, b_type.precision - b_type.scale) + scale, scale)
            common = make_decimal(min(PRECISION_MAX, integer_digits + scale), scale)
            a, b = cast(left, common).sql, cast(right, common).sql
            return SqlValue(
                f"CAST(CASE WHEN {b} = 0 THEN {DIVISION_BY_ZERO} ELSE {a} % {b} END AS {name_duckdb_type(kind)})", kind
            )
    exact_scale = max(_QUOTIENT_SCALE_MIN, a_type.scale + b_type.precision + 1)
    integer_digits = a_type.precision - a_type.scale + b_type.scale
    scale = (
        exact_scale
        if integer_digits + exact_scale <= PRECISION_MAX
        else max(PRECISION_MAX - integer_digits, _QUOTIENT_SCALE_MIN)
    )
    kind = make_decimal(min(PRECISION_MAX, integer_digits + scale), scale)
    return divide_decimals(cast(left, a_type), cast(right, b_type), kind)


def divide_decimals(left: SqlValue, right: SqlValue, kind: SqlType) -> SqlValue:
    """Return the quotient of two decimals, rounded half up to the scale of `kind`.

    Decimals are divided as integers without a decimal point. One of them is multiplied by a power of 10 (`shift`), so
    that the integer quotient has the digits of the result. It is rounded away from zero if the remainder is at least
    half of the denominator.

    DuckDB computes the quotient with 128-bit integers. If it does not fit 128 bits, the statement fails.
    """
    shift = kind.scale - left.type.scale + right.type.scale
    numerator = f"({_to_unscaled_integer(left)} * CAST('1{'0' * max(0, shift)}' AS HUGEINT))"
    denominator = f"({_to_unscaled_integer(right)} * CAST('1{'0' * max(0, -shift)}' AS HUGEINT))"
    rounding_condition = f"2 * abs({numerator} % {denominator}) >= abs({denominator})"
    rounding_step = f"CASE WHEN {rounding_condition} THEN sign({numerator}) * sign({denominator}) ELSE 0 END"
    unscaled_sql = f"CAST({numerator} // {denominator} + {rounding_step} AS DECIMAL({PRECISION_MAX}, 0))"
    unit = f"CAST('1e-{kind.scale}' AS DECIMAL({kind.scale + 1}, {kind.scale}))" if kind.scale else "1"
    scaled_sql = f"CAST({unscaled_sql} * {unit} AS {name_duckdb_type(kind)})"
    return SqlValue(f"(CASE WHEN {right.sql} = 0 THEN {DIVISION_BY_ZERO} ELSE {scaled_sql} END)", kind)


def sum_decimals(value: SqlValue, distinct: str = "", over_clause: str = "") -> SqlValue:
    """Return the sum of decimals.

    DuckDB adds them as 128-bit integers, whose overflow is not an error. If the values have so many digits that the sum
    may overflow, a sum of doubles is computed to detect the overflow.

    Args:
        value: The decimals.
        distinct: `DISTINCT ` or an empty text.
        over_clause: The window of the sum, or an empty text.
    """
    kind = make_decimal(PRECISION_MAX, value.type.scale)
    total = f"CAST(sum({distinct}{value.sql}){over_clause} AS {name_duckdb_type(kind)})"
    if value.type.precision <= _SUMMED_PRECISION_MAX:
        return SqlValue(total, kind)
    approximate_total = f"abs(sum({distinct}CAST({value.sql} AS DOUBLE)){over_clause})"
    # The limit is slightly larger than the maximum, because rounding makes a sum of doubles depend on the order of
    # rows.
    limit = f"CAST('1.000001e{PRECISION_MAX - kind.scale}' AS DOUBLE)"
    return SqlValue(f"(CASE WHEN {approximate_total} >= {limit} THEN error('Decimal overflow') ELSE {total} END)", kind)


def _to_unscaled_integer(value: SqlValue) -> str:
    return f"CAST(replace(CAST({value.sql} AS VARCHAR), '.', '') AS HUGEINT)"


def round_to_milliseconds(value: SqlValue) -> SqlValue:
    """Return a timestamp rounded to milliseconds, as Trino rounds it: half a millisecond is rounded up."""
    # DuckDB's % is negative for times before 1970, so the remainder is made positive.
    shifted_micros = f"(epoch_us({value.sql}) + 500)"
    return SqlValue(f"make_timestamp({shifted_micros} - ({shifted_micros} % 1000 + 1000) % 1000)", TIMESTAMP)


def make_operation_error(left: SqlValue, right: SqlValue, sign: str, node: exp.Expr) -> Exception:
    """Return the error of an operation that is not translated: `UnsupportedInDuckDB` if Trino defines it."""
    types = f"the types {left.type} and {right.type}"
    if _is_operation_of_times(left.type, right.type, sign):
        return UnsupportedInDuckDB(f"{describe(node)}: {sign} is not translated for {types}")
    return InvalidRequest(f"{describe(node)}: {sign} is not defined for {types}")


def _is_operation_of_times(left: SqlType, right: SqlType, sign: str) -> bool:
    """Return whether Trino defines the operation for intervals, dates and times of these types."""
    if left == right == INTERVAL:
        return sign in "+-"
    if INTERVAL in (left, right):
        other = right if left == INTERVAL else left
        if other.is_number:
            return sign == "*" or (sign == "/" and left == INTERVAL)
        return other == TIME and (sign == "+" or (sign == "-" and left == TIME))
    return sign == "-" and (left == right == TIME or (left.is_time and right.is_time))


def shift_by_interval(left: SqlValue, right: SqlValue, sign: str, node: exp.Expr) -> SqlValue:
    """Return a time plus or minus an interval."""
    if left.type == INTERVAL and sign == "+":
        left, right = right, left
    if right.type != INTERVAL or sign not in "+-" or not left.type.is_time:
        raise make_operation_error(left, right, sign, node)
    text = f"({left.sql} {sign} {right.sql})"
    if left.type == DATE:
        if right.sql.rpartition(" ")[2] not in ("DAY", "WEEK", "MONTH", "YEAR"):
            raise InvalidRequest(
                f"{describe(node)}: an interval that is added to a date must have a unit of days or longer"
            )
        text = f"CAST({text} AS DATE)"
    return SqlValue(text, left.type)
