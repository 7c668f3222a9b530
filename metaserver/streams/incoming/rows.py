"""Decodes the JSON rows or JSON lines of a request, and converts them to record batches. The module does no I/O.

JSON values have the form of Iceberg's single-value serialization (Iceberg spec, Appendix D). Dates and times are in ISO
8601. Decimals, and long integers beyond 2^53, are strings or numbers. Binary values are hexadecimal digits, and structs
are objects whose keys are the names of the fields. The error for a value that does not fit its column contains the row,
the column and the value. No value is rounded, except numbers with a fraction, which become the nearest number of a
floating-point column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from seamark.formats.iceberg.expressions.arrow import build_arrow_array, to_row_type
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema, StructType, Type
from seamark.formats.iceberg.types.values import decode_json as decode_value
from seamark.formats.runtime.errors import BadRequest, TooLarge, UnsupportedMediaType
from seamark.metaserver.streams.incoming.json_members import find_repeated_key, has_repeated_key

_SHOWN_CHARACTERS = 100
_PLAIN = {"string": str, "long": int, "int": int, "double": float, "boolean": bool}
"""The Iceberg types whose JSON values Arrow accepts without conversion, with their types in Python."""
_LONG_CHARACTERS_MAX = 20
"""The maximum length of a 64-bit integer in decimal digits, with a sign."""
_STRUCT_VALUES_MAX = 1 << 24
"""The maximum number of values, including nulls, in the structs of a column: 64 MB of integers."""


class RowFormat(Enum):
    """The format of a body, by its media type."""

    ARROW = ("application/vnd.apache.arrow.stream",)
    JSON = ("application/json",)
    LINES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


def parse_format(content_type: str) -> RowFormat:
    """Return the format of a media type.

    Raises:
        UnsupportedMediaType: The server does not support the media type.
    """
    for row_format in RowFormat:
        if content_type in row_format.value:
            return row_format
    types = ", ".join(name for row_format in RowFormat for name in row_format.value)
    raise UnsupportedMediaType(f"The Content-Type is {content_type[:100]!r}; rows are sent as one of {types}")


class RejectedRow(NamedTuple):
    """A row that does not fit the table, and the reason.

    Attributes:
        raw: The row as text.
        reason: A message for the client.
    """

    raw: str
    reason: str


def decode_rows(body: bytes, row_format: RowFormat, *, rows_max: int) -> list[Any]:
    """Decode JSON rows (an array, or an object with the array `rows`), or JSON lines.

    A line that is not valid JSON, or contains an object with a repeated key, becomes a `RejectedRow`.

    Raises:
        BadRequest: The body is not valid JSON of this form.
        TooLarge: The body has more than `rows_max` rows.
    """
    rows: Any
    if row_format is RowFormat.LINES:
        lines = split_lines(body)
        _check_count(len(lines), rows_max)
        row_values = [_decode_line(line) for line in lines]
        if any(isinstance(row, RejectedRow) for row in row_values) or has_repeated_key(body, row_values):
            row_values = [_check_line(line, row) for line, row in zip(lines, row_values, strict=True)]
        return row_values
    rows = _decode_json(body, "The body ")
    _check_keys(body, rows, "The body ")
    if isinstance(rows, dict) and set(rows) == {"rows"}:
        rows = rows["rows"]
    if not isinstance(rows, list):
        raise BadRequest('The body has to be an array of objects, or an object with the array "rows"')
    _check_count(len(rows), rows_max)
    return rows


def split_lines(body: bytes) -> list[bytes]:
    """Return the lines that are not empty."""
    return [line for line in body.splitlines() if line.strip()]


def _decode_line(line: bytes) -> Any:
    try:
        return _decode_json(line, "")
    except BadRequest as error:
        return RejectedRow(line.decode("utf-8", "replace"), error.message)


def _check_count(count: int, rows_max: int) -> None:
    if count > rows_max:
        raise TooLarge(f"The body has {count:,} rows; the limit is {rows_max:,} rows. Send several requests")


def _decode_json(text: bytes, subject: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"{subject}is not valid JSON: {error}") from None


def _check_keys(text: bytes, decoded: Any, subject: str) -> None:
    """Check that no object in JSON has the same key twice.

    Args:
        text: The JSON.
        decoded: The decoded JSON.
        subject: The beginning of the message, such as `The body `.

    Raises:
        BadRequest: An object has the same key twice.
    """
    if has_repeated_key(text, [decoded]):
        shown_key = repr(find_repeated_key(text)[:_SHOWN_CHARACTERS])
        raise BadRequest(f"{subject}has an object with the key {shown_key} twice; send each key once")


def _check_line(line: bytes, row: Any) -> Any:
    """Return the decoded row of a line, or a `RejectedRow` if an object in it has a repeated key."""
    if isinstance(row, RejectedRow):
        return row
    try:
        _check_keys(line, row, "")
    except BadRequest as error:
        return RejectedRow(line.decode("utf-8", "replace"), error.message)
    return row


def to_batch(rows: Sequence[Mapping[str, Any]], schema: Schema) -> pa.RecordBatch:
    """Convert JSON rows to a batch with the columns that occur in them.

    A row that lacks a column has a null in it. If all rows are empty objects, the batch has the first column of the
    table, with nulls.

    Raises:
        BadRequest: A column is unknown, or a value does not fit. The message contains the number of the row.
    """
    names: set[str] = set().union(*rows) if rows else set()
    if rows and not names:
        if not schema.fields:
            raise BadRequest("The table has no columns; add one")
        names = {schema.fields[0].name}  # A batch without columns could not state the number of its rows.
    fields = [field for field in schema.fields if field.name in names]
    if unknown_names := sorted(names - {field.name for field in fields}):
        number = next(number for number, row in enumerate(rows) if unknown_names[0] in row)
        columns = ", ".join(field.name for field in schema.fields)
        raise BadRequest(
            f"Row {number} has the column {unknown_names[0][:_SHOWN_CHARACTERS]!r}, which the table does not have; "
            f"it has {columns[:500]}"
        )
    arrays = [_to_array([row.get(field.name) for row in rows], field.type, field.name) for field in fields]
    return pa.RecordBatch.from_arrays(arrays, names=[field.name for field in fields])


def _to_array(values: list[Any], kind: Type, path: str) -> pa.Array:
    """Convert JSON values to an array of the type.

    A column of plain values, which need no conversion, takes a fast path.

    Args:
        values: The values, in the order of the rows.
        kind: The Iceberg type.
        path: The name of the column, for messages.

    Raises:
        BadRequest: A value does not fit. The message contains the number of its row.
    """
    python_type = _PLAIN.get(kind) if isinstance(kind, str) else None
    if python_type is not None and set(map(type, values)) <= {python_type, type(None)}:
        try:
            # Create large strings, as in data files, so that no cast is necessary.
            return pa.array(values, pa.large_string() if python_type is str else to_row_type(kind))
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            pass  # The slower conversion below finds the invalid row.
    try:
        if not isinstance(kind, str):
            convert_nested = _make_nested_converter(kind, _Budget())
            converted_values = [
                _convert_value(convert_nested, value, number, path, kind) for number, value in enumerate(values)
            ]
            return pa.array(converted_values, to_row_type(kind))
        return build_arrow_array(
            kind,
            [_convert_value(_make_converter(kind), value, number, path, kind) for number, value in enumerate(values)],
        )
    except MemoryError:
        # Arrow's out-of-memory error is also an `ArrowException`. Raise it, because the values are not the reason.
        raise
    except (ValueError, pa.ArrowException) as error:
        raise BadRequest(f"Column {path}: {str(error)[:300]}") from None


def _convert_value(convert: Callable[[Any], Any], value: Any, row: int, path: str, kind: Type) -> Any:
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError) as error:
        reason_text = f": {error}" if str(error) else ""
        kind_text = kind if isinstance(kind, str) else "its type"
        raise BadRequest(
            f"Row {row}, column {path}: the value {_show_value(value)} is not a valid {kind_text}{reason_text[:200]}"
        ) from None


def _make_converter(kind: str) -> Callable[[Any], Any]:
    """Return a function that converts a JSON value to a Python value of a primitive type.

    Besides the JSON form of the Iceberg specification, it accepts integers for decimals, text for long integers (which
    JavaScript cannot represent as numbers), and timestamps with a space or a Z. An integer for a floating-point column
    must be exact.
    """

    def convert(value: Any) -> Any:
        if kind.startswith("decimal") and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        elif (
            kind == "long"
            and isinstance(value, str)
            and value.lstrip("-").isdigit()
            and len(value) <= _LONG_CHARACTERS_MAX
        ):
            value = int(value)
        elif kind in ("float", "double") and isinstance(value, int) and not isinstance(value, bool):
            _check_exact(value, kind)
        elif kind in ("timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns") and isinstance(value, str):
            value = value.replace(" ", "T", 1)
            if value.endswith(("Z", "z")):
                value = value[:-1] + "+00:00"
        decoded_value = decode_value(kind, value)
        if isinstance(decoded_value, str):
            decoded_value.encode()  # Refuse half of a surrogate pair, which JSON may contain.
        return decoded_value

    return convert


def _check_exact(number: int, kind: str) -> None:
    """Check that a floating-point column can store an integer without changing it.

    Accept an integer that is the usual decimal form of a large floating-point number, with zeros at the end. It may
    differ from the exact value of this number.

    Raises:
        ValueError: The column cannot hold the integer.
    """
    with np.errstate(over="ignore"):  # A number outside the range of the column is refused later.
        nearest = np.float32(number) if kind == "float" else np.float64(number)
    if np.isfinite(nearest) and number not in (int(nearest), Decimal(str(nearest))):
        raise ValueError(f"the nearest {kind} is {nearest}; send an integer that the column can hold, or a fraction")


class _Budget:
    """Limits the number of values in structs, because the short text `{}` may become a struct with many fields."""

    def __init__(self) -> None:
        self.remaining = _STRUCT_VALUES_MAX

    def spend(self, values: int) -> None:
        self.remaining -= values
        if self.remaining < 0:
            raise TooLarge(
                f"The structs of a column have more than {_STRUCT_VALUES_MAX:,} values; send them in several requests"
            )


def count_leaves(kind: Type) -> int:
    """Return the number of values that Arrow stores for a null of the type."""
    return sum(count_leaves(field.type) for field in kind.fields) if isinstance(kind, StructType) else 1


def _make_nested_converter(kind: Type, budget: _Budget) -> Callable[[Any], Any]:
    """Return a function that converts JSON to the Python value from which pyarrow creates a value of the type.

    All structs of a column share the budget of values. A null struct uses as much of it as any other struct, because
    Arrow stores a null for each of its fields.

    Args:
        kind: A nested type, or the type of a part of it.
        budget: The number of values that the structs of the column may still have.
    """
    if isinstance(kind, StructType):
        children = [(field, _make_nested_converter(field.type, budget)) for field in kind.fields]
        leaves = count_leaves(kind)

        def convert_struct(value: Any) -> Any:
            budget.spend(leaves)
            return None if value is None else _convert_struct(value, children)

        return convert_struct
    if isinstance(kind, ListType):
        convert_element = _make_nested_converter(kind.element, budget)
        return lambda value: None if value is None else [convert_element(item) for item in _require_type(value, list)]
    if isinstance(kind, MapType):
        convert_key, convert_item = (_make_nested_converter(part, budget) for part in (kind.key, kind.value))
        return lambda value: None if value is None else _convert_map_entries(value, convert_key, convert_item)
    convert, arrow_kind = _make_converter(kind), kind

    def convert_primitive(value: Any) -> Any:
        # The converter of the primitive type returns a Python value, such as a datetime or a Decimal.
        return build_arrow_array(arrow_kind, [convert(value)])[0].as_py()

    return convert if kind in _PLAIN else convert_primitive


def _convert_struct(value: Any, children: Sequence[tuple[Field, Callable[[Any], Any]]]) -> dict[str, Any]:
    fields = _require_type(value, dict)
    if unknown_names := fields.keys() - {field.name for field, _ in children}:
        raise ValueError(f"there is no field {min(unknown_names)!r}")
    return {field.name: convert(fields.get(field.name)) for field, convert in children}


def _convert_map_entries(
    value: Any, convert_key: Callable[[Any], Any], convert_item: Callable[[Any], Any]
) -> list[tuple[Any, Any]]:
    """Return the entries of a map.

    Args:
        value: An object whose names are the keys, or Iceberg's object with the arrays `keys` and `values`.
        convert_key: Converts a key.
        convert_item: Converts the value of an entry.

    Raises:
        ValueError: A key occurs twice, or a key or a value does not fit.
    """
    entries = _require_type(value, dict)
    pairs = entries.items()
    if set(entries) == {"keys", "values"} and all(isinstance(part, list) for part in entries.values()):
        pairs = zip(entries["keys"], entries["values"], strict=True)
    map_entries = [(convert_key(entry_key), convert_item(entry_value)) for entry_key, entry_value in pairs]
    texts: set[str] = set()
    for entry_key, _ in map_entries:
        text = repr(entry_key)  # Compare the texts, because a key may be a struct, which is not hashable.
        if text in texts:
            raise ValueError(f"the map has the key {text[:_SHOWN_CHARACTERS]} twice")
        texts.add(text)
    return map_entries


def _require_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"the value is not an {'array' if kind is list else 'object'}")
    return value


def _show_value(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
