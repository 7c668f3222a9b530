"""Writes the groups of a cube as VALUES in Trino's SQL."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, time
from typing import Any
from uuid import UUID

import pyarrow as pa

from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.statements import CubeStatement
from seamark.connector.plans.quotes import quote_text

_ROWS_PER_CHECK = 100
"""The number of rows that are written between two checks of the size."""
_CHARACTERS_MIN = 3
"""The minimum number of characters of a value, with the comma and the space after it."""


def count_characters(groups: pa.Table) -> int:
    """Estimate the number of characters of the relation that `write_values` writes."""
    values: int = groups.num_rows * groups.num_columns
    return int(groups.nbytes) + _CHARACTERS_MIN * values


def write_values(groups: pa.Table, statement: CubeStatement, characters_max: int) -> str:
    """Return a relation with the groups, for a FROM clause.

    Args:
        groups: The groups.
        statement: The query over the cube.
        characters_max: The maximum number of characters of the relation.

    Raises:
        NotFromCube: The relation would be too long, or Trino's SQL has no literal for a value.
    """
    column_names = ", ".join(statement.columns)
    if groups.num_rows == 0:
        return (
            f"(VALUES ({', '.join('NULL' for _ in statement.columns)})) AS seamark_groups ({column_names}) WHERE FALSE"
        )
    if _CHARACTERS_MIN * groups.num_rows * groups.num_columns > characters_max:
        raise _make_length_error(statement, characters_max)
    writers = [
        _find_writer(statement, name, column.type)
        for name, column in zip(statement.columns, groups.columns, strict=True)
    ]
    rows: list[str] = []
    size = 0
    for batch in groups.to_batches(max_chunksize=_ROWS_PER_CHECK):
        try:
            columns = [
                ["NULL" if value is None else write(value) for value in column.to_pylist()]
                for write, column in zip(writers, batch.columns, strict=True)
            ]
        except (ValueError, OverflowError) as error:  # Python supports years up to 9999.
            raise NotFromCube(f"{statement.cube.name}: a value cannot be written in SQL: {error}") from None
        size += sum(len(text) + 2 for column in columns for text in column)
        if size > characters_max:
            raise _make_length_error(statement, characters_max)
        rows += [f"({', '.join(row)})" for row in zip(*columns, strict=True)]
    return f"(VALUES {', '.join(rows)}) AS seamark_groups ({column_names})"


def _make_length_error(statement: CubeStatement, characters_max: int) -> NotFromCube:
    return NotFromCube(
        f"{statement.cube.name}: its groups have more than {characters_max:,} characters of SQL, the maximum for a "
        "statement"
    )


def _find_writer(statement: CubeStatement, name: str, kind: pa.DataType) -> Callable[[Any], str]:
    """Return a function that writes a value of a column of the groups.

    Raises:
        NotFromCube: Trino's SQL has no literal for the type.
    """
    is_uuid = name.startswith("d") and statement.cube.terms[int(name[1:])].source == "uuid"
    return _write_uuid if is_uuid else _choose_writer(kind)


def _choose_writer(kind: pa.DataType) -> Callable[[Any], str]:
    """Return a function that writes a value of a type."""
    for matches, write in _WRITERS:
        if matches(kind):
            return write
    raise NotFromCube(f"values of type {kind} cannot be written in SQL")


def _write_float(kind: str) -> Callable[[float], str]:
    def write(value: float) -> str:
        if math.isnan(value):
            return f"CAST(nan() AS {kind})"
        if math.isinf(value):
            return f"CAST({'-' if value < 0 else ''}infinity() AS {kind})"
        return f"{kind} '{value!r}'"

    return write


def _write_timestamp(value: datetime) -> str:
    utc_time = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    zone = "" if value.tzinfo is None else " UTC"
    return f"TIMESTAMP '{utc_time.isoformat(' ', 'microseconds')}{zone}'"


def _write_time(value: time) -> str:
    return f"TIME '{value.isoformat('microseconds')}'"


def _write_uuid(value: bytes) -> str:
    return f"UUID '{UUID(bytes=value)}'"


_WRITERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], str]], ...] = (
    (pa.types.is_boolean, lambda value: "TRUE" if value else "FALSE"),
    (pa.types.is_integer, str),
    (pa.types.is_float32, _write_float("REAL")),
    (pa.types.is_float64, _write_float("DOUBLE")),
    (pa.types.is_decimal, lambda value: f"DECIMAL '{value:f}'"),
    (pa.types.is_string, quote_text),
    (pa.types.is_large_string, quote_text),
    (pa.types.is_date, lambda value: f"DATE '{value.isoformat()}'"),
    (pa.types.is_timestamp, _write_timestamp),
    (pa.types.is_time, _write_time),
    (pa.types.is_binary, lambda value: f"X'{value.hex()}'"),
    (pa.types.is_large_binary, lambda value: f"X'{value.hex()}'"),
    (pa.types.is_fixed_size_binary, lambda value: f"X'{value.hex()}'"),
)
