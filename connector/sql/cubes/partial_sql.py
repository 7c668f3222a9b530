"""Writes the SQL that computes partial aggregates of rows, and that combines partial aggregates to aggregates."""

from __future__ import annotations

from seamark.connector.sql.arithmetic import divide_decimals, sum_decimals
from seamark.connector.sql.scopes import SqlValue
from seamark.connector.sql.types import (
    BIGINT,
    DOUBLE,
    PRECISION_MAX,
    REAL,
    ZONED,
    SqlType,
    as_decimal,
    make_decimal,
    name_duckdb_type,
)
from seamark.connector.sql.values import cast
from seamark.formats.index.keys.measures import MAX


def count_value(value: str) -> str:
    """Return an expression in DuckDB's SQL whose value is 0 if `value` is null, and otherwise 1."""
    return f"CASE WHEN {value} IS NULL THEN 0 ELSE 1 END"


def truncate_time(unit: str, value: SqlValue) -> str:
    """Return the truncated time in DuckDB's SQL, with the type of the value."""
    source = f"CAST({value.sql} AS TIMESTAMP)" if value.type == ZONED else value.sql
    return f"CAST(date_trunc('{unit}', {source}) AS {name_duckdb_type(value.type)})"


def find_sum_type(kind: SqlType) -> SqlType:
    """Return the type of partial sums, into which every sum of rows of one file fits."""
    return DOUBLE if kind.is_float else make_decimal(PRECISION_MAX, 0 if kind.is_integer else kind.scale)


def combine_extremes(function: str, value: SqlValue) -> SqlValue:
    """Return the minimum or maximum of partial minimums or maximums."""
    if value.type.is_float and function == MAX:  # NaN is the result only if all values are NaN.
        numbers = f"max(CASE WHEN isnan({value.sql}) THEN NULL ELSE {value.sql} END)"
        return SqlValue(f"coalesce({numbers}, max({value.sql}))", value.type)
    return SqlValue(f"{function}({value.sql})", value.type)


def combine_sum(partial: str, kind: SqlType) -> SqlValue:
    """Return the sum of partial sums. Its type is the type of a sum of values of type `kind`."""
    if kind.is_integer:
        return SqlValue(f"CAST(sum({partial}) AS BIGINT)", BIGINT)
    if kind.name == "decimal":
        return sum_decimals(SqlValue(partial, find_sum_type(kind)))
    return SqlValue(f"CAST(sum({partial}) AS {name_duckdb_type(kind)})", kind)


def combine_average(partial: str, count: str, kind: SqlType) -> SqlValue:
    """Return the average of values of type `kind`, computed from partial sums and counts."""
    if kind.name == "decimal":
        counts = SqlValue(f"CAST(nullif(sum({count}), 0) AS DECIMAL(19, 0))", as_decimal(BIGINT))
        return divide_decimals(sum_decimals(SqlValue(partial, find_sum_type(kind))), counts, kind)
    average = f"(CAST(sum({partial}) AS DOUBLE) / CAST(nullif(sum({count}), 0) AS DOUBLE))"
    return cast(SqlValue(average, DOUBLE), REAL) if kind == REAL else SqlValue(average, DOUBLE)
