"""Reads a comparison of a function of a column with a literal as a condition on the column.

For example, `date_trunc('month', ts) = DATE '2026-01-01'` becomes a range of `ts`, `substr(c, 1, 2) = 'ab'` becomes a
condition on the prefix of `c`, and `coalesce(c, 0) > 5` becomes `c > 5`. Only functions that have the same values in
Trino and DuckDB are read.

Arithmetic is in `arithmetic.py`, and functions whose values are texts are in `texts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import product

from sqlglot import exp

from seamark.connector.analysis.arithmetic import compare_days_between, compare_quotient, move_operands_to_literal
from seamark.connector.analysis.comparisons import ComparisonReader, compare_range, have_same_class, make_moment_literal
from seamark.connector.analysis.literals import parse_unit
from seamark.connector.analysis.texts import (
    compare_formatted,
    compare_prefix,
    parse_formatted_time,
    read_case_comparison,
)
from seamark.connector.analysis.truncations import find_period
from seamark.connector.plans.conditions import NEVER, Condition, all_of, any_of
from seamark.connector.plans.literals import LOCAL, Literal


def compare_function(op: str, node: exp.Expr, literal: Literal, reader: ComparisonReader) -> Condition | None:
    """Return a condition that is true for each row for which `node op literal` is true, or None if unsupported."""
    time = parse_formatted_time(node, reader) if literal.kind == "text" else None
    if time is not None:
        return compare_formatted(op, time, literal.value, reader)
    match node:
        case exp.TimestampTrunc() | exp.DateTrunc():
            return _compare_truncated(op, node.this, parse_unit(node), literal, reader)
        case exp.Substring() | exp.Left():
            return compare_prefix(op, node, literal, reader)
        case exp.Lower() | exp.Upper() if op in ("=", "<>") and literal.kind == "text":
            return read_case_comparison(op, node, literal.value, reader)
        case exp.Coalesce() | exp.Case() | exp.If() | exp.Nullif():
            return any_of(_compare_branches(op, node, literal, reader))
        case exp.Cast() if type(node) is exp.Cast and _keeps_value(node, reader):
            return reader.compare(op, node.this, literal)
        case exp.Add() | exp.Sub() | exp.Mul() | exp.Neg() | exp.DateAdd():
            return move_operands_to_literal(op, node, literal, reader)
        # The dialect of this statement defines the quotient of two integers as an integer.
        case exp.Div() if node.args.get("typed"):
            return compare_quotient(op, node.this, literal, node.expression, reader)
        case exp.DateDiff() if parse_unit(node) == "DAY":
            return compare_days_between(op, node, literal, reader)
    return None


def restrict_to_months(parts: list[tuple[exp.Expr, Literal]], reader: ComparisonReader) -> Iterator[Condition | None]:
    """Yield ranges of columns for conjunctions such as `year(c) = 2026 AND month(c) = 3`.

    Each equality of a year is combined with each equality of a month of the same column.

    Args:
        parts: The equalities of a conjunction, as pairs of an expression and the literal that it equals.
        reader: The reader of the condition.
    """
    years, months = (
        [(_find_column(node.unnest(), unit), literal) for node, literal in parts] for unit in ("YEAR", "MONTH")
    )
    for (column, year), (other_column, month) in product(years, months):
        if column is None or column != other_column or not {year.kind, month.kind} <= {"integer"}:
            continue
        try:
            start = datetime(int(year.value), int(month.value), 1)
            yield compare_range(column, *find_period(start, "MONTH"), Literal("date", ""), reader)
        except (ValueError, OverflowError):
            continue


def _find_column(node: exp.Expr, unit: str) -> exp.Expr | None:
    """Return the column if `node` is the year or the month (`unit`) of a column. Otherwise return None."""
    column: exp.Expr | None = None
    match node:
        case exp.Year() if unit == "YEAR":
            column = node.this
        case exp.Month() if unit == "MONTH":
            column = node.this
        case exp.Extract() if type(node.this) is exp.Var and node.name.upper() == unit:
            column = node.expression
    return column


def _compare_branches(
    op: str, node: exp.Expr, literal: Literal, reader: ComparisonReader
) -> Iterator[Condition | None]:
    """Yield one condition for each branch of COALESCE, NULLIF, IF or CASE.

    For each row for which the comparison of `node` is true, at least one of the conditions is true. A condition
    that is None may be true for every row.
    """

    def compare_result(value: exp.Expr, branch_condition: Condition | None = None) -> Condition | None:
        if not have_same_class(literal, reader, value):
            return None
        return all_of([branch_condition, reader.compare(op, value, literal)]) if branch_condition != NEVER else NEVER

    match node:
        case exp.Coalesce():
            nulls: Condition | None = None
            for value in (node.this, *node.expressions):
                yield compare_result(value, nulls)
                nulls = all_of([nulls, reader.is_null(value)])
        case exp.Nullif():  # NULLIF is null if both arguments are equal.
            yield compare_result(node.this) if have_same_class(literal, reader, node.this, node.expression) else None
        case exp.If():
            yield from _read_cases([node], node.args.get("false"), None, reader, compare_result)
        case exp.Case():
            yield from _read_cases(node.args["ifs"], node.args.get("default"), node.this, reader, compare_result)


def _read_cases(
    branches: list[exp.Expr],
    otherwise: exp.Expr | None,
    operand: exp.Expr | None,
    reader: ComparisonReader,
    convert_result: Callable[[exp.Expr, Condition | None], Condition | None],
) -> Iterator[Condition | None]:
    common = None if operand is None else reader.compute_common_type([operand, *(branch.this for branch in branches)])
    for branch in branches:
        if operand is None or common is None:
            branch_condition = reader.read_condition(branch.this)
        else:
            branch_condition = reader.build_equality(operand, branch.this, common)
        yield convert_result(branch.args["true"], branch_condition)
    if otherwise is not None:
        yield convert_result(otherwise, None)


def read_case(
    node: exp.Case | exp.If, reader: ComparisonReader, read_result: Callable[[exp.Expr], Condition | None]
) -> Condition | None:
    """Return a condition for a CASE whose results are themselves conditions, such as `CASE WHEN a = 1 THEN b > 2 END`.

    CASE selects one result for each row. The condition is true for each row that meets its selected result.

    Args:
        node: The CASE or IF expression.
        reader: The reader of the condition.
        read_result: Returns the condition of a result of CASE, or None if every row may meet it.
    """
    case_operand = node.this if isinstance(node, exp.Case) else None
    branches = node.args["ifs"] if isinstance(node, exp.Case) else [node]
    otherwise = node.args.get("default" if isinstance(node, exp.Case) else "false")
    return any_of(
        _read_cases(
            branches,
            otherwise,
            case_operand,
            reader,
            lambda value, branch_condition: all_of([branch_condition, read_result(value)]),
        )
    )


def _compare_truncated(
    op: str, column: exp.Expr, unit: str, literal: Literal, reader: ComparisonReader
) -> Condition | None:
    """Read a comparison of the start of a calendar period with a literal without a zone.

    For example, `date_trunc('month', c) = DATE '2026-01-01'` is true for all values of `c` in this month. A literal
    that is not the start of a period is never equal. The result is None if the comparison is not supported.
    """
    if literal.kind not in ("date", "timestamp") or literal.zone != LOCAL:
        return None
    moment = datetime.fromisoformat(literal.value)
    try:
        start, end = find_period(moment, unit)
    except (KeyError, ValueError, OverflowError):
        return None
    start_literal, end_literal = make_moment_literal(start, literal), make_moment_literal(end, literal)
    is_period_start = start == moment
    match op:
        case "=":
            return compare_range(column, start, end, literal, reader) if is_period_start else NEVER
        case "<>" if is_period_start:
            return any_of(
                [reader.compare_column("<", column, start_literal), reader.compare_column(">=", column, end_literal)]
            )
        case "<" | ">=":
            return reader.compare_column(op, column, start_literal if is_period_start else end_literal)
        case "<=" | ">":
            return reader.compare_column("<" if op == "<=" else ">=", column, end_literal)
    return None


def _keeps_value(node: exp.Cast, reader: ComparisonReader) -> bool:
    target_type, kind = node.to, reader.find_kind(node.this)
    types = exp.DataType.Type
    return not target_type.expressions and (
        (kind in ("int", "long") and target_type.this is types.BIGINT)
        or (kind == "int" and target_type.this is types.INT)
        or (kind == "string" and target_type.this in (types.VARCHAR, types.TEXT))
    )
