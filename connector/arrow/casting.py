"""Casts Arrow data to the columns of a table. Columns are matched by name, and missing columns get their defaults.

A cast never changes a value. If it would truncate, round or wrap a value, `Unwritable` is raised with the name of the
column and the range of its values. `Unwritable` is also raised for a null in a required column and for an unknown
column. If the data does not have a column, the column gets its write default or null (Iceberg spec: "Default values").

The Arrow schema of a table has field ids at every level, which pyarrow writes to Parquet files. It has the column names
that Iceberg's writers use in files. A column of type unknown is always null and is not written to files (spec:
"Primitive Types").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.arrays import Mask
from seamark.formats.iceberg.expressions.arrow import build_arrow_array, to_row_type
from seamark.formats.iceberg.files.parquet import FIELD_ID
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema, StructType, Type, describe_type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import decode_json
from seamark.formats.runtime.repetitions import find_repeated

UNKNOWN = "unknown"
_FILE_TYPES = {"string": pa.large_string(), "binary": pa.large_binary(), "uuid": pa.uuid()}
"""The Arrow types in files that differ from the types of `to_row_type`, by Iceberg type.

Large types allow a column to have more than 2 GiB of text. Parquet has a type for UUIDs.
"""
_OFFSET_MAX = 2**31 - 1
"""The maximum offset in a list array, whose offsets are signed 32-bit integers."""
_INTEGER_DIGITS = 20
"""The number of decimal digits of the largest unsigned 64-bit integer."""
_UUID_BYTES, _UUID_CHARACTERS = 16, 36


class Unwritable(Exception):
    """Raised if the data cannot be written to the table. The message contains the column and the reason."""


# Types


def build_arrow_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of a table's data files.

    Raises:
        Unwritable: A column has an unsupported type.
    """
    return pa.schema(_to_arrow_fields(schema.fields, ""))


def get_arrow_type(kind: Type, path: str = "") -> pa.DataType:
    """Return the Arrow type that a column has in data files, with field ids on nested fields.

    Raises:
        Unwritable: The type is unsupported. The message contains `path`.
    """
    if isinstance(kind, StructType):
        return pa.struct(_to_arrow_fields(kind.fields, f"{path}."))
    if isinstance(kind, ListType):
        return pa.list_(_to_arrow_field("element", kind.element_id, kind.element, kind.element_required, path))
    if isinstance(kind, MapType):
        key = _to_arrow_field("key", kind.key_id, kind.key, True, path)
        return pa.map_(key, _to_arrow_field("value", kind.value_id, kind.value, kind.value_required, path))
    try:
        if kind != UNKNOWN:
            return _FILE_TYPES.get(kind) or to_row_type(kind)
    except ValueError:
        pass
    raise Unwritable(f"column {path} is {kind}; Seamark cannot write values of this type")


def _to_arrow_fields(fields: Iterable[Field], prefix: str) -> list[pa.Field]:
    """Return the Arrow fields of data files. Columns of the type unknown are not stored, because they have only nulls.

    `prefix` is the path of the enclosing struct, for error messages.
    """
    arrow_fields: list[pa.Field] = []
    used_names: set[str] = set()
    for field in fields:
        if field.type == UNKNOWN:
            continue
        name = make_file_name(field.name)
        # Two columns may have the same name in files (`a b` and `a_x20b`), because readers match columns by id.
        if name in used_names:
            name = f"{name}_{field.id}"
        used_names.add(name)
        kind = get_arrow_type(field.type, prefix + field.name)
        arrow_fields.append(pa.field(name, kind, not field.required, {FIELD_ID: str(field.id)}))
    return arrow_fields


def _to_arrow_field(name: str, field_id: int, kind: Type, required: bool, path: str) -> pa.Field:
    return pa.field(name, get_arrow_type(kind, f"{path}.{name}"), not required, {FIELD_ID: str(field_id)})


@lru_cache(maxsize=4096)
def make_file_name(name: str) -> str:
    """Return the name of a column in data files, as Iceberg's writers encode it.

    Each character that is not a letter, a digit or `_` is replaced by `_x<hex>`. `_` precedes a digit at the start.
    """
    if re.fullmatch(r"[^\W\d]\w*", name):
        return name
    first_character = f"_{name[0]}" if name[:1].isdigit() else _escape(name[:1])
    return first_character + "".join(map(_escape, name[1:]))


def _escape(character: str) -> str:
    return character if re.fullmatch(r"\w", character) else f"_x{ord(character):X}"


# Rows


def conform(batch: pa.RecordBatch, schema: Schema, arrow: pa.Schema) -> pa.RecordBatch:
    """Cast a batch of rows to exactly the columns of the table.

    Args:
        batch: The rows.
        schema: The schema of the table.
        arrow: The result of `build_arrow_schema(schema)`.

    Raises:
        Unwritable: The rows cannot be written.
    """
    names = batch.schema.names
    if _needs_no_cast(batch, names, schema, arrow):
        arrays = batch.columns
    else:
        arrays = _cast_fields(names, batch.columns, schema.fields, batch.num_rows, None, "")
    return pa.RecordBatch.from_arrays(arrays, schema=arrow)


def _needs_no_cast(batch: pa.RecordBatch, names: Sequence[str], schema: Schema, arrow: pa.Schema) -> bool:
    """Return whether a batch already has all columns in order, with their types in files and without invalid nulls."""
    types = arrow.types
    return (
        batch.schema.types == types
        and list(names) == [field.name for field in schema.fields]
        and not any(map(pa.types.is_nested, types))
        and not any(field.required and column.null_count for field, column in zip(schema.fields, batch, strict=True))
    )


def _cast_fields(
    names: Sequence[str],
    arrays: Sequence[pa.Array],
    fields: Iterable[Field],
    rows: int,
    parent_mask: Mask | None,
    prefix: str,
) -> list[pa.Array]:
    """Cast the columns of the data to fields with the same names.

    A missing column gets its default. A column of the type unknown is checked, but not returned, because it is not
    stored in files.

    Args:
        names: The names of the columns of the data.
        arrays: The columns of the data.
        fields: The fields of the table or of a struct.
        rows: The number of rows.
        parent_mask: Whether the enclosing struct of each row is not null, as bool[rows], or None if it never is null.
        prefix: The path of the enclosing struct, for messages.

    Raises:
        Unwritable: The data have a repeated or unknown column, or a value does not fit its field.
    """
    by_name = dict(zip(names, arrays, strict=True))
    if (repeated_name := find_repeated(names)) is not None:
        raise Unwritable(f"the data has several columns named {prefix}{repeated_name}")
    columns = {field.name: field for field in fields}
    if extra := [name for name in by_name if name not in columns]:
        columns_text = ", ".join(prefix + name for name in columns)
        raise Unwritable(f"the table has no column {prefix}{extra[0]}; it has {columns_text[:500]}")
    cast_arrays = []
    for name, field in columns.items():
        path, array = prefix + name, by_name.get(name)
        if field.type == UNKNOWN:
            if array is not None and array.null_count < rows:
                raise Unwritable(
                    f"column {path} has the type unknown, which allows only nulls; the data has other values"
                )
        elif array is None:
            cast_arrays.append(_build_default_column(field, rows, path))
        else:
            cast_arrays.append(
                _check_nulls(_cast(array, field.type, parent_mask, path), not field.required, parent_mask, path)
            )
    return cast_arrays


def _cast(array: pa.Array, kind: Type, parent_mask: Mask | None, path: str) -> pa.Array:
    array = _to_plain_array(array)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), get_arrow_type(kind, path))
    if isinstance(kind, StructType):
        return _cast_struct(array, kind, parent_mask, path)
    if isinstance(kind, ListType):
        return _cast_list(array, kind, path)
    if isinstance(kind, MapType):
        return _cast_map(array, kind, path)
    return _cast_primitive(array, kind, path)


def _to_plain_array(array: pa.Array) -> pa.Array:
    """Return an array with the same values, but without extension type, dictionary, run-end encoding or views."""
    if isinstance(array, pa.ExtensionArray):
        return _to_plain_array(array.storage)
    if pa.types.is_dictionary(array.type):
        return _to_plain_array(array.dictionary_decode())
    if pa.types.is_run_end_encoded(array.type):
        return _to_plain_array(pc.run_end_decode(array))
    if pa.types.is_string_view(array.type):
        return array.cast(pa.large_string())
    if pa.types.is_binary_view(array.type):
        return array.cast(pa.large_binary())
    return array


def _check_nulls(array: pa.Array, nullable: bool, parent_mask: Mask | None, path: str) -> pa.Array:
    """Check that a required column has no null, and return the column.

    Nulls inside null structs are permitted. The column is then returned without a validity bitmap, because files store
    no nulls of a required field.

    Args:
        array: The column.
        nullable: Whether the column is optional.
        parent_mask: Whether the enclosing struct of each row is not null, or None if it never is null.
        path: The name of the column, for messages.

    Raises:
        Unwritable: A required column has a null.
    """
    if nullable or not array.null_count:
        return array
    nulls = array.is_null().to_numpy(zero_copy_only=False)
    null_rows = np.flatnonzero(nulls if parent_mask is None else nulls & parent_mask)
    if len(null_rows):
        raise Unwritable(
            f"column {path} is required, but {len(null_rows):,} of its values are null; "
            f"the first is in row {null_rows[0]}"
        )
    return _drop_validity(array)


def _drop_validity(array: pa.Array) -> pa.Array:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(kind, _drop_validity(array.storage))
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays(
            [array.field(position) for position in range(kind.num_fields)], fields=list(kind)
        )
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, array.keys, array.items, type=kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, array.values, type=kind)
    return pa.Array.from_buffers(kind, len(array), [None, *array.buffers()[1:]], 0, array.offset)


def _cast_struct(array: pa.Array, kind: StructType, parent_mask: Mask | None, path: str) -> pa.Array:
    if not pa.types.is_struct(array.type):
        raise _make_type_error(array, kind, path)
    mask = None
    if array.null_count:
        mask = array.is_null()
        valid = ~mask.to_numpy(zero_copy_only=False)
        parent_mask = valid if parent_mask is None else parent_mask & valid
    arrays = [array.field(position) for position in range(array.type.num_fields)]
    names = [field.name for field in array.type]
    children = _cast_fields(names, arrays, kind.fields, len(array), parent_mask, f"{path}.")
    return pa.StructArray.from_arrays(children, fields=list(get_arrow_type(kind, path)), mask=mask)


_LIST_CHECKS: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def _cast_list(array: pa.Array, kind: ListType, path: str) -> pa.Array:
    if not any(is_list(array.type) for is_list in _LIST_CHECKS):
        raise _make_type_error(array, kind, path)
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    values = _cast_elements(pc.list_flatten(array), kind.element, kind.element_required, f"{path}.element")
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(_compute_offsets(lengths, path), values, type=get_arrow_type(kind, path), mask=mask)


def _cast_map(array: pa.Array, kind: MapType, path: str) -> pa.Array:
    """Cast the keys and values of a map column. Only entries of maps that are not null are cast."""
    if not pa.types.is_map(array.type):
        raise _make_type_error(array, kind, path)
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    keys, items = (child.slice(offsets[0], offsets[-1] - offsets[0]) for child in (array.keys, array.items))
    mask = None
    if array.null_count:
        mask = array.is_null()
        nulls = mask.to_numpy(zero_copy_only=False)
        if lengths[nulls].any():  # Arrow permits that a null map has entries.
            is_kept = pa.array(np.repeat(~nulls, lengths))
            keys, items = keys.filter(is_kept), items.filter(is_kept)
            lengths = np.where(nulls, 0, lengths)
    keys = _cast_elements(keys, kind.key, True, f"{path}.key")
    items = _cast_elements(items, kind.value, kind.value_required, f"{path}.value")
    return pa.MapArray.from_arrays(
        _compute_offsets(lengths, path), keys, items, type=get_arrow_type(kind, path), mask=mask
    )


def _cast_elements(array: pa.Array, kind: Type, required: bool, path: str) -> pa.Array:
    return _check_nulls(_cast(array, kind, None, path), not required, None, path)


def _compute_offsets(lengths: npt.NDArray[Any], path: str) -> pa.Array:
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if ends[-1] > _OFFSET_MAX:
        raise Unwritable(
            f"column {path} has too many elements ({ends[-1]:,}) in one batch of rows; write smaller batches"
        )
    return pa.array(ends.astype(np.int32))


# Values


def _cast_primitive(array: pa.Array, kind: str, path: str) -> pa.Array:
    target, name, source = get_arrow_type(kind, path), get_base_name(kind), array.type
    if source == target:
        return array
    type_checks, cast = _CASTS[name]
    if not any(has_type(source) for has_type in type_checks):
        raise _make_type_error(array, kind, path)
    if pa.types.is_timestamp(source) and (source.tz is None) != (target.tz is None):
        actual, expected = ("no time zone", "instants") if source.tz is None else ("a time zone", "local times")
        raise Unwritable(f"column {path} is {kind}, of {expected}; the data's {source} has {actual}")
    try:
        return cast(array, target)
    except (pa.ArrowInvalid, ValueError) as error:
        raise Unwritable(
            f"column {path} is {kind}, which cannot hold all values of the data ({source}{_format_range(array)}): "
            f"{str(error).splitlines()[0]}"
        ) from None


def _format_range(array: pa.Array) -> str:
    """Return the range of the values as text for a message.

    Dates and times are shown as integers, because Python cannot represent all of them. The text is empty if Arrow
    cannot compare values of the type.
    """
    if pa.types.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    try:
        min_max = pc.min_max(array)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return ""
    minimum, maximum = (str(min_max[bound])[:50] for bound in ("min", "max"))
    return f" from {minimum} to {maximum}"


def _make_type_error(array: pa.Array, kind: Type, path: str) -> Unwritable:
    return Unwritable(
        f"column {path} is {describe_type(kind)}; the data has {array.type}, which cannot be cast to this type"
    )


def _cast_safely(array: pa.Array, target: pa.DataType) -> pa.Array:
    return array.cast(target)


def _to_float(array: pa.Array, target: pa.DataType) -> pa.Array:
    if not pa.types.is_float64(array.type) or target != pa.float32():
        return array.cast(target)
    floats = array.cast(target, safe=False)
    is_exact = pc.or_(pc.equal(floats.cast(array.type), array), pc.is_nan(array))
    if pc.all(is_exact).as_py() is False:
        raise ValueError("a double cannot be stored exactly as a float; round it to 32 bits first")
    return floats


def _to_decimal(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_integer(array.type):
        array = array.cast(pa.decimal128(_INTEGER_DIGITS, 0))
    return array.cast(target)


def _to_uuid(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        values = [None if text is None else _to_uuid_bytes(text) for text in array.to_pylist()]
        storage = pa.array(values, pa.binary(_UUID_BYTES))
    else:
        storage = _to_fixed(array, pa.binary(_UUID_BYTES))
    return pa.ExtensionArray.from_storage(target, storage)


def _to_uuid_bytes(text: str) -> bytes:
    if len(text) != _UUID_CHARACTERS:
        raise ValueError(f"{text[:50]!r} is not a UUID of {_UUID_CHARACTERS} characters")
    return UUID(text).bytes


def _to_fixed(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_binary(array.type) and array.type != target:
        raise ValueError(f"the values have {array.type.byte_width} bytes, not {target.byte_width}")
    lengths = pc.binary_length(array)
    if pc.all(pc.equal(lengths, target.byte_width)).as_py() is False:
        raise ValueError(f"not all values have {target.byte_width} bytes")
    return array if array.type == target else pa.array(array.to_pylist(), target)


_TEXTS = (pa.types.is_string, pa.types.is_large_string)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
_Cast = tuple[tuple[Callable[[pa.DataType], bool], ...], Callable[[pa.Array, pa.DataType], pa.Array]]
_TIMESTAMP: _Cast = ((pa.types.is_timestamp,), _cast_safely)
_CASTS: dict[str, _Cast] = {
    "boolean": ((pa.types.is_boolean,), _cast_safely),
    "int": ((pa.types.is_integer,), _cast_safely),
    "long": ((pa.types.is_integer,), _cast_safely),
    "float": ((pa.types.is_floating, pa.types.is_integer), _to_float),
    "double": ((pa.types.is_floating, pa.types.is_integer), _to_float),
    "decimal": ((pa.types.is_decimal, pa.types.is_integer), _to_decimal),
    "date": ((pa.types.is_date,), _cast_safely),
    "time": ((pa.types.is_time,), _cast_safely),
    "timestamp": _TIMESTAMP,
    "timestamptz": _TIMESTAMP,
    "timestamp_ns": _TIMESTAMP,
    "timestamptz_ns": _TIMESTAMP,
    "string": (_TEXTS, _cast_safely),
    "binary": (_BYTES, _cast_safely),
    "fixed": (_BYTES, _to_fixed),
    "uuid": ((*_BYTES, *_TEXTS), _to_uuid),
}
"""The accepted source types, and the function that casts from them, by Iceberg type.

The function raises ArrowInvalid or ValueError if the cast would change a value.
"""


# Missing columns


def _build_default_column(field: Field, rows: int, path: str) -> pa.Array:
    if field.write_default is not None:
        return _repeat_default(field.type, field.write_default, rows, path)
    if field.required:
        raise Unwritable(f"column {path} is required, but the data does not have it")
    return pa.nulls(rows, get_arrow_type(field.type, path))


def _repeat_default(kind: Type, default: object, rows: int, path: str) -> pa.Array:
    """Return an array that repeats a default value `rows` times. The value is in JSON.

    Raises:
        Unwritable: The default is invalid.
    """
    if isinstance(kind, StructType) and default == {}:  # The default of each field is used.
        children = _cast_fields([], [], kind.fields, rows, None, f"{path}.")
        return pa.StructArray.from_arrays(children, fields=list(get_arrow_type(kind, path)))
    if not isinstance(kind, str):
        raise Unwritable(f"column {path} has an unsupported write default; add the column to the data")
    try:
        value = decode_json(kind, default)
    except ValueError as error:
        raise Unwritable(f"column {path} has an invalid write default: {error}; add the column to the data") from None
    default_array = pa.repeat(build_arrow_array(kind, [value])[0], rows)
    return _cast_primitive(default_array, kind, path)
