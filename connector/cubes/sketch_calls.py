"""The SQL of DuckDB with which queries call the functions for sketches (`connector/duckdb/sketch_functions.py`)."""

from __future__ import annotations

SKETCH_PREFIX = "seamark_sketch_"
COUNT_SKETCHES = "seamark_count_sketches"
FUNCTION_ENDS = {
    "BIGINT": "bigint",
    "VARCHAR": "text",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMPTZ": "timestamptz",
}
"""The ends of the names of functions, by the type of their argument."""
_WIDENED = {"INTEGER": "BIGINT"}


def can_sketch_type(kind: str) -> bool:
    """Return whether sketches can estimate the number of distinct values of this type of DuckDB."""
    return kind in FUNCTION_ENDS or kind in _WIDENED


def format_sketch_sql(value: str, kind: str) -> str:
    """Return the sketch of a value, in SQL.

    Args:
        value: The value, in SQL.
        kind: Its type, for which `can_sketch_type` is true.
    """
    argument = _WIDENED.get(kind, kind)
    return f"{SKETCH_PREFIX}{FUNCTION_ENDS[argument]}(CAST({value} AS {argument}))"


def format_count_sql(sketch: str, where: str = "") -> str:
    """Return the aggregate that estimates the number of distinct values from sketches, in SQL.

    Args:
        sketch: The sketches, in SQL.
        where: An empty text, or FILTER with a condition.
    """
    return f"{COUNT_SKETCHES}(list(DISTINCT {sketch}){where})"
