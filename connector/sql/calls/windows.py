"""Translates window functions to DuckDB's SQL."""

from __future__ import annotations

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.arithmetic import sum_decimals
from seamark.connector.sql.expressions import Expressions
from seamark.connector.sql.scopes import NameScope, SqlValue, describe
from seamark.connector.sql.types import (
    BIGINT,
    PRECISION_MAX,
    UNKNOWN,
    SqlType,
    UnsupportedInDuckDB,
    make_decimal,
    name_duckdb_type,
)
from seamark.connector.sql.values import check_args, check_comparable, read_whole_number, to_common_type

_RANKS: dict[type[exp.Expr], str] = {exp.RowNumber: "row_number", exp.Rank: "rank", exp.DenseRank: "dense_rank"}
_SHIFTS: dict[type[exp.Expr], str] = {exp.Lag: "lag", exp.Lead: "lead"}
_ENDS: dict[type[exp.Expr], str] = {exp.FirstValue: "first_value", exp.LastValue: "last_value"}
WINDOW_FUNCTIONS: tuple[type[exp.Expr], ...] = (*_RANKS, *_SHIFTS, *_ENDS, exp.Ntile)
"""The functions that are allowed only with OVER."""
_NUMBER_MAX = 1_000_000
"""The maximum number of rows in a frame or in `lag`, and of buckets in `ntile`."""


def translate_window(expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
    """Translate a function with OVER.

    Ranks and shifts (`lag`, `lead`) need an order and have no frame. The result is cast to Trino's type, because DuckDB
    returns other integer types. A sum of decimals has its own translation, which detects an overflow.

    Raises:
        UnsupportedInDuckDB: The function, its order or its frame is not translated.
        InvalidRequest: The frame ends before its start.
    """
    check_args(node, frozenset(("this", "partition_by", "order", "spec", "over")))
    function, order, spec = node.this, node.args.get("order"), node.args.get("spec")
    kind: SqlType
    if type(function) in _RANKS or isinstance(function, exp.Ntile):
        name, kind = _translate_rank(function), BIGINT
    elif type(function) in _SHIFTS:
        name, kind = _translate_shift(expressions, function, scope)
    elif type(function) in _ENDS:
        check_args(function)
        value = expressions.translate_value(function.this, scope)
        name, kind = f"{_ENDS[type(function)]}({value.sql})", value.type
    else:
        name, kind = _translate_window_aggregate(expressions, function, scope)
    if (type(function) in _RANKS or type(function) in _SHIFTS) and order is None:
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated without ORDER BY")
    if spec is not None and (type(function) in (*_RANKS, *_SHIFTS) or isinstance(function, exp.Ntile)):
        raise UnsupportedInDuckDB(f"{describe(node)}: a frame is not translated for this function")
    keys = [expressions.translate_value(key, scope) for key in node.args.get("partition_by") or ()]
    for key in keys:
        check_comparable(key, node)
    window_parts = [f"PARTITION BY {', '.join(key.sql for key in keys)}"] if keys else []
    if order is not None:
        window_parts.append(
            "ORDER BY "
            + ", ".join(
                translate_sort_key(expressions.translate_value(key.this, scope), key) for key in order.expressions
            )
        )
    if spec is not None:
        window_parts.append(_translate_frame(spec, node))
    if isinstance(function, exp.Sum) and kind.name == "decimal":
        return sum_decimals(
            expressions.translate_value(function.this, scope), over_clause=f" OVER ({' '.join(window_parts)})"
        )
    text = f"{name} OVER ({' '.join(window_parts)})"
    # A nested type has no name in DuckDB's SQL. The function returns the type of its argument.
    return SqlValue(text if kind.is_nested else f"CAST({text} AS {name_duckdb_type(kind)})", kind)


def _translate_rank(function: exp.Expr) -> str:
    if not isinstance(function, exp.Ntile):
        return f"{_RANKS[type(function)]}()"
    check_args(function)
    buckets = read_whole_number(function.this, _NUMBER_MAX)
    if not buckets:
        raise UnsupportedInDuckDB(f"{describe(function)}: the number of buckets must be a literal")
    return f"ntile({buckets})"


def _translate_shift(expressions: Expressions, function: exp.Expr, scope: NameScope) -> tuple[str, SqlType]:
    """Translate `lag` and `lead`, and return the SQL and the type of the result.

    Raises:
        UnsupportedInDuckDB: The number of rows is not a literal, or the value has no type, but the default has one.
    """
    check_args(function, frozenset(("this", "offset", "default")))
    value, offset, default = expressions.translate_value(function.this, scope), function.args.get("offset"), None
    rows = 1 if offset is None else read_whole_number(offset, _NUMBER_MAX)
    if rows is None:
        raise UnsupportedInDuckDB(f"{describe(function)}: the number of rows must be a literal")
    arguments = [value.sql, str(rows)]
    if function.args.get("default") is not None:
        default = expressions.translate_value(function.args["default"], scope)
        if value.type == UNKNOWN and default.type != UNKNOWN:
            raise UnsupportedInDuckDB(f"{describe(function)} is not translated for a value without a type")
        value, default = to_common_type([value, default], function)
        arguments = [value.sql, str(rows), default.sql]
    return f"{_SHIFTS[type(function)]}({', '.join(arguments)})", value.type


def _translate_window_aggregate(expressions: Expressions, function: exp.Expr, scope: NameScope) -> tuple[str, SqlType]:
    if isinstance(function, exp.Count) and isinstance(function.this, exp.Star):
        return "count(*)", BIGINT
    if isinstance(function, exp.Count | exp.Sum | exp.Min | exp.Max) and not isinstance(function.this, exp.Distinct):
        check_args(function)
        value = expressions.translate_value(function.this, scope)
        name = type(function).__name__.lower()
        if isinstance(function, exp.Count):
            return f"count({value.sql})", BIGINT
        if value.type.is_integer or value.type.name == "decimal":
            total = BIGINT if value.type.is_integer else make_decimal(PRECISION_MAX, value.type.scale)
            return f"{name}({value.sql})", total if isinstance(function, exp.Sum) else value.type
        if not isinstance(function, exp.Sum) and value.type.is_comparable and not value.type.is_float:
            return f"{name}({value.sql})", value.type
    raise UnsupportedInDuckDB(f"{describe(function)} OVER is not translated")


def _translate_frame(spec: exp.Expr, node: exp.Expr) -> str:
    """Translate a frame of ROWS, or the frame of RANGE from the first row to the current row.

    Raises:
        InvalidRequest: The frame ends before its start.
        UnsupportedInDuckDB: The frame has another form.
    """
    check_args(spec, frozenset(("kind", "start", "start_side", "end", "end_side")))
    start = _translate_bound(spec.args.get("start"), spec.args.get("start_side"))
    end = _translate_bound(spec.args.get("end") or "CURRENT ROW", spec.args.get("end_side"))
    kind = spec.text("kind").upper()
    if start is None or end is None or kind not in ("ROWS", "RANGE"):
        raise UnsupportedInDuckDB(f"{describe(node)}: this frame is not translated")
    (start_text, start_rank), (end_text, end_rank) = start, end
    if kind == "RANGE" and (start_text, end_text) != ("UNBOUNDED PRECEDING", "CURRENT ROW"):
        raise UnsupportedInDuckDB(f"{describe(node)}: this frame is not translated")
    if start_rank > end_rank:
        raise InvalidRequest(f"{describe(node)}: the frame ends before its start")
    return f"{kind} BETWEEN {start_text} AND {end_text}"


def _translate_bound(bound: exp.Expr | str | None, side: str | None) -> tuple[str, int] | None:
    """Return a bound of a window frame in DuckDB's SQL and its rank, or None if the bound is not translated.

    The rank grows from 0 for the first row of the partition to 4 for its last row.
    """
    side = str(side or "").upper()
    if isinstance(bound, exp.Expr):
        rows = read_whole_number(bound, _NUMBER_MAX)
        if rows is None or side not in ("PRECEDING", "FOLLOWING"):
            return None
        return f"{rows} {side}", 1 if side == "PRECEDING" else 3
    match str(bound or "").upper(), side:
        case "CURRENT ROW", "":
            return "CURRENT ROW", 2
        case "UNBOUNDED", "PRECEDING":
            return "UNBOUNDED PRECEDING", 0
        case "UNBOUNDED", "FOLLOWING":
            return "UNBOUNDED FOLLOWING", 4
    return None


def translate_sort_key(value: SqlValue, node: exp.Expr) -> str:
    """Return a key of ORDER BY in DuckDB's SQL. Nulls are last in both directions, unless `node` has NULLS FIRST.

    Raises:
        UnsupportedInDuckDB: Values of this type cannot be sorted.
    """
    if not value.type.is_comparable:
        raise UnsupportedInDuckDB(f"{describe(node)}: values of the type {value.type} cannot be sorted")
    direction = "DESC" if node.args.get("desc") else "ASC"
    return f"{value.sql} {direction} NULLS {'FIRST' if node.args.get('nulls_first') else 'LAST'}"
