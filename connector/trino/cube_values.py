"""Writes the groups of a cube in Trino's SQL: few groups as VALUES, and more as one JSON text for each column.

Trino analyses each literal of a statement, so a thousand groups as VALUES take longer than the query itself. A JSON
text is one literal. Its values are texts, integers and booleans, and the query over the groups casts them to their
types.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, time
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa

from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.statements import CubeStatement
from seamark.connector.plans.quotes import quote_text

_ROWS_PER_CHECK = 100
"""The number of rows that are written between two checks of the size."""
_VALUES_MAX = 100
"""The maximum number of literals in VALUES."""
_CHARACTERS_MIN = 3
"""The minimum number of characters of a value, with the comma and the space after it."""


def count_characters(groups: pa.Table) -> int:
    """Estimate the number of characters of the relation that `write_values` writes."""
    values: int = groups.num_rows * groups.num_columns
    return int(groups.nbytes) + _CHARACTERS_MIN * values


def write_values(groups: pa.Table, statement: CubeStatement, characters_max: int) -> str:
    """Return a relation with the groups, for a FROM clause.

    A few groups are written as VALUES. Many groups are written as JSON, which Trino parses faster. Without groups, the
    relation has one row of nulls and the condition FALSE, because VALUES cannot be empty.

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
    if groups.num_rows * groups.num_columns > _VALUES_MAX:
        return _write_json(groups, statement, characters_max)
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
        size += sum(len(text) + len(", ") for column in columns for text in column)
        if size > characters_max:
            raise _make_length_error(statement, characters_max)
        rows += [f"({', '.join(row)})" for row in zip(*columns, strict=True)]
    return f"(VALUES {', '.join(rows)}) AS seamark_groups ({column_names})"


def _write_json(groups: pa.Table, statement: CubeStatement, characters_max: int) -> str:
    """Return the relation with a JSON text for each column.

    Raises:
        NotFromCube: The relation would be too long, or a value cannot be written.
    """
    forms = [
        _find_json_form(statement, name, column.type)
        for name, column in zip(statement.columns, groups.columns, strict=True)
    ]
    texts: list[list[str]] = [[] for _ in forms]
    size = 0
    for batch in groups.to_batches(max_chunksize=_ROWS_PER_CHECK):
        for form, column, parts in zip(forms, batch.columns, texts, strict=True):
            try:
                values = [None if value is None else form.write(value) for value in column.to_pylist()]
            except (ValueError, OverflowError) as error:  # Python supports years up to 9999.
                raise NotFromCube(f"{statement.cube.name}: a value cannot be written in SQL: {error}") from None
            # The brackets are left out, because the parts are joined to one array.
            parts.append(json.dumps(values, ensure_ascii=False, separators=(",", ":"))[1:-1])
            size += len(parts[-1])
        if size > characters_max:
            raise _make_length_error(statement, characters_max)
    arrays = ", ".join(
        f"CAST(json_parse({quote_text('[' + ','.join(parts) + ']')}) AS ARRAY({form.kind}))"
        for form, parts in zip(forms, texts, strict=True)
    )
    outputs = ", ".join(
        f"{form.sql_format.format(name)} AS {name}" for name, form in zip(statement.columns, forms, strict=True)
    )
    column_list = ", ".join(statement.columns)
    return (
        f"(SELECT {outputs} FROM UNNEST({arrays}) AS seamark_groups ({column_list})) AS seamark_groups ({column_list})"  # noqa: S608
    )


class _JsonForm(NamedTuple):
    """The form of a column's values in JSON.

    Attributes:
        write: A function that converts a value to a value of JSON.
        kind: The type to which Trino casts the JSON value.
        sql_format: The format of the value in SQL, with the name of the column.
    """

    write: Callable[[Any], Any]
    kind: str = "VARCHAR"
    sql_format: str = "{}"


def _find_json_form(statement: CubeStatement, name: str, kind: pa.DataType) -> _JsonForm:
    """Return the form in which the values of a column of the groups are written as JSON.

    Raises:
        NotFromCube: Values of the type cannot be written as JSON.
    """
    if _is_uuid_column(statement, name):
        return _JsonForm(lambda value: str(UUID(bytes=value)))
    for matches, form in _JSON_FORMS:
        if matches(kind):
            return form
    raise NotFromCube(f"values of type {kind} cannot be written as JSON")


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
    return _write_uuid if _is_uuid_column(statement, name) else _choose_writer(kind)


def _is_uuid_column(statement: CubeStatement, name: str) -> bool:
    """Return whether a column of the groups has UUIDs. The column of the term n of the cube is named `dn`."""
    return name.startswith("d") and statement.cube.terms[int(name[1:])].source == "uuid"


def _choose_writer(kind: pa.DataType) -> Callable[[Any], str]:
    """Return a function that writes a value of a type."""
    for matches, write in _WRITERS:
        if matches(kind):
            return write
    raise NotFromCube(f"values of type {kind} cannot be written in SQL")


def _make_float_writer(kind: str) -> Callable[[float], str]:
    def write(value: float) -> str:
        if math.isnan(value):
            return f"CAST(nan() AS {kind})"
        if math.isinf(value):
            return f"CAST({'-' if value < 0 else ''}infinity() AS {kind})"
        return f"{kind} '{value!r}'"

    return write


def _name_float(value: float) -> str:
    """Return the name that Trino gives to a value that is not finite, or an empty text."""
    if math.isnan(value):
        return "NaN"
    return "" if math.isfinite(value) else "-Infinity" if value < 0 else "Infinity"


def _write_timestamp(value: datetime) -> str:
    return f"TIMESTAMP '{_format_timestamp(value)}'"


def _format_timestamp(value: datetime) -> str:
    plain = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
    zone = "" if value.tzinfo is None else " UTC"
    return f"{plain.isoformat(' ', 'microseconds')}{zone}"


def _write_time(value: time) -> str:
    return f"TIME '{value.isoformat('microseconds')}'"


def _write_uuid(value: bytes) -> str:
    return f"UUID '{UUID(bytes=value)}'"


_BINARY = _JsonForm(lambda value: base64.b64encode(value).decode(), sql_format="from_base64({})")
_JSON_FORMS: tuple[tuple[Callable[[pa.DataType], bool], _JsonForm], ...] = (
    (pa.types.is_boolean, _JsonForm(bool, "BOOLEAN")),
    (pa.types.is_integer, _JsonForm(int, "BIGINT")),
    (pa.types.is_floating, _JsonForm(lambda value: _name_float(value) or repr(value))),
    (pa.types.is_decimal, _JsonForm(lambda value: f"{value:f}")),
    (pa.types.is_string, _JsonForm(str)),
    (pa.types.is_large_string, _JsonForm(str)),
    (pa.types.is_date, _JsonForm(lambda value: value.isoformat())),
    (pa.types.is_timestamp, _JsonForm(lambda value: _format_timestamp(value))),
    (pa.types.is_time, _JsonForm(lambda value: value.isoformat("microseconds"))),
    (pa.types.is_binary, _BINARY),
    (pa.types.is_large_binary, _BINARY),
    (pa.types.is_fixed_size_binary, _BINARY),
)
_WRITERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], str]], ...] = (
    (pa.types.is_boolean, lambda value: "TRUE" if value else "FALSE"),
    (pa.types.is_integer, str),
    (pa.types.is_float32, _make_float_writer("REAL")),
    (pa.types.is_float64, _make_float_writer("DOUBLE")),
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
