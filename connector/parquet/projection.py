"""Projects the columns of a Parquet file to the table's schema by field id, with type promotion and default values.

The Iceberg spec defines the rules ("Column Projection" and "Schema Evolution"). Columns are matched by id, regardless
of their names and positions. A column that the file does not have gets the value of an identity partition field,
otherwise its initial default, otherwise null. Files without ids are read only with the table's name mapping, because
readers disagree on other ways to match columns. Types can only widen. If a type cannot be promoted to the table's type,
AmbiguousColumn is raised with the name of the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.expressions.arrow import build_arrow_array, to_row_type
from seamark.formats.iceberg.files.parquet import AmbiguousColumn, get_field_id
from seamark.formats.iceberg.types.schema import Field, ListType, MapType, StructType, Type
from seamark.formats.iceberg.types.values import Value, decode_json

Convert = Callable[[pa.Array], pa.Array]


class FileProjection:
    """Projects batches of one file to fields of the table. The results have the types that `to_row_type` returns."""

    def __init__(
        self, file: Sequence[pa.Field], fields: Iterable[Field], partition: Mapping[int, Value | None]
    ) -> None:
        """Match the fields with the columns of the file.

        Args:
            file: The columns of the file, with field ids (`apply_name_mapping`).
            fields: The fields of the table.
            partition: The values of identity partition fields, by column id.

        Raises:
            AmbiguousColumn: Several columns match a field, or the type of a column cannot be promoted.
        """
        names, ids = [column.name for column in file], [get_field_id(column) for column in file]
        self._sources: dict[int, tuple[str, Convert] | pa.Scalar] = {}
        for field in fields:
            position = _find_position(ids, field.id)
            if position is None:
                self._sources[field.id] = _find_missing_value(field, partition)
                continue
            name = names[position]
            if names.count(name) > 1:
                raise AmbiguousColumn(f"the file has {names.count(name)} columns named {name!r}")
            self._sources[field.id] = (name, _make_converter(file[position].type, field.type, field.name, partition))

    def list_names(self, column_ids: Iterable[int]) -> list[str]:
        """Return the names of the file's columns that contain these table columns.

        A table column that the file lacks adds no name.
        """
        sources = (self._sources[column_id] for column_id in column_ids)
        return list(dict.fromkeys(source[0] for source in sources if isinstance(source, tuple)))

    def project_columns(
        self, batch: pa.RecordBatch | None, column_ids: Iterable[int], rows: int
    ) -> dict[int, pa.Array]:
        """Return the projected columns by id.

        Args:
            batch: `rows` rows with at least the columns that `list_names` returns, or None if it returns no columns.
            column_ids: The ids of the columns to return.
            rows: The number of rows.
        """
        arrays = {}
        for column_id in column_ids:
            source = self._sources[column_id]
            if isinstance(source, tuple) and batch is not None:
                name, convert = source
                arrays[column_id] = convert(batch.column(batch.schema.names.index(name)))
            elif isinstance(source, pa.Scalar):
                arrays[column_id] = _repeat(source, rows)
        return arrays


def _find_position(ids: Sequence[int | None], field_id: int) -> int | None:
    count = ids.count(field_id)
    if count > 1:
        raise AmbiguousColumn(f"the file has {count} columns that may be column {field_id}")
    return ids.index(field_id) if count else None


def _find_missing_value(field: Field, partition: Mapping[int, Value | None]) -> pa.Scalar:
    """Return the value that all rows of a file have in a column that the file does not contain.

    It is the partition value of the column, the initial default value, or null.
    """
    if isinstance(field.type, str) and field.id in partition:
        return build_arrow_array(field.type, [partition[field.id]])[0]
    if isinstance(field.type, str) and field.initial_default is not None:
        return build_arrow_array(field.type, [decode_json(field.type, field.initial_default)])[0]
    return pa.scalar(None, to_row_type(field.type))


def _repeat(value: pa.Scalar, rows: int) -> pa.Array:
    return pa.repeat(value, rows) if value.is_valid else pa.nulls(rows, value.type)


def _make_converter(kind: pa.DataType, target: Type, name: str, partition: Mapping[int, Value | None]) -> Convert:
    """Return a function that converts arrays of the type in a file to the table's type.

    Raises:
        AmbiguousColumn: The type in the file cannot be read as the table's type.
    """
    arrow_type = to_row_type(target)
    match target:
        case StructType() if pa.types.is_struct(kind):
            return _make_struct_converter(kind, target, name, partition)
        case ListType() if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            _check_id(kind.value_field, target.element_id, name)
            element = _make_converter(kind.value_type, target.element, f"{name}.element", {})
            return lambda array: _convert_list(array, element, arrow_type)
        case MapType() if pa.types.is_map(kind):
            _check_id(kind.key_field, target.key_id, name)
            _check_id(kind.item_field, target.value_id, name)
            key = _make_converter(kind.key_type, target.key, f"{name}.key", {})
            value = _make_converter(kind.item_type, target.value, f"{name}.value", {})
            return lambda array: _convert_map(array, key, value, arrow_type)
        case str() if kind.equals(arrow_type):
            return lambda array: array
        case str() if _can_widen(_get_storage_type(kind), arrow_type):
            return lambda array: _cast_exactly(array, arrow_type, name)
    raise AmbiguousColumn(f"the column for {name} is of type {kind}, which cannot be read as {arrow_type}")


def _make_struct_converter(
    kind: pa.DataType, target: StructType, name: str, partition: Mapping[int, Value | None]
) -> Convert:
    """Return a function that converts structs.

    A field that the file does not have gets its partition value, its initial default value, or null.
    """
    sources: list[tuple[int, Convert] | pa.Scalar] = []
    for field in target.fields:
        position = _find_position([get_field_id(inner) for inner in kind], field.id)
        if position is None:
            sources.append(_find_missing_value(field, partition))
        else:
            sources.append(
                (position, _make_converter(kind.field(position).type, field.type, f"{name}.{field.name}", partition))
            )
    fields = list(to_row_type(target))

    def convert(array: pa.Array) -> pa.Array:
        children = []
        for source in sources:
            if isinstance(source, tuple):
                position, convert_child = source
                children.append(convert_child(pc.struct_field(array, [position])))
            else:
                children.append(_repeat(source, len(array)))
        # StructArray.from_arrays derives the length from its children, so a struct without children needs a special
        # case.
        if not children:
            return pa.array([{} if valid else None for valid in array.is_valid().to_pylist()], pa.struct([]))
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())

    return convert


def _check_id(field: pa.Field, field_id: int, name: str) -> None:
    if get_field_id(field) not in (None, field_id):
        raise AmbiguousColumn(
            f"an inner field of its column for {name} has the id {get_field_id(field)}, not {field_id}"
        )


def _convert_list(array: pa.Array, element: Convert, arrow_type: pa.DataType) -> pa.Array:
    offsets, first, last = _read_offsets(array)
    values = element(array.values.slice(first, last - first))
    return pa.ListArray.from_arrays(offsets, values, type=arrow_type, mask=array.is_null())


def _convert_map(array: pa.Array, key: Convert, value: Convert, arrow_type: pa.DataType) -> pa.Array:
    offsets, first_offset, last_offset = _read_offsets(array)
    keys, items = (
        key(array.keys.slice(first_offset, last_offset - first_offset)),
        value(array.items.slice(first_offset, last_offset - first_offset)),
    )
    return pa.MapArray.from_arrays(offsets, keys, items, type=arrow_type, mask=array.is_null())


def _read_offsets(array: pa.Array) -> tuple[pa.Array, int, int]:
    """Return the offsets relative to the first offset, the first offset, and the last offset."""
    offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    return pa.array((offsets - offsets[0]).astype(np.int32)), int(offsets[0]), int(offsets[-1])


def _get_storage_type(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _get_storage_type(kind.storage_type)
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _can_widen(kind: pa.DataType, target: pa.DataType) -> bool:
    """Return whether values of an Arrow type can be read as the target type, by promotion or unchanged."""
    if kind.equals(target) or pa.types.is_null(kind):
        return True
    if pa.types.is_integer(target):
        return bool(pa.types.is_integer(kind)) and kind.bit_width <= target.bit_width
    if pa.types.is_floating(target):
        return bool(pa.types.is_floating(kind)) and kind.bit_width <= target.bit_width
    if pa.types.is_decimal(target):
        return bool(pa.types.is_decimal(kind)) and kind.scale == target.scale and kind.precision <= target.precision
    if pa.types.is_timestamp(target):
        # INT96 timestamps have no time zone, so the type in the table determines whether they have a zone.
        return bool(pa.types.is_timestamp(kind) or (pa.types.is_date(kind) and target.tz is None))
    if pa.types.is_time(target):
        return bool(pa.types.is_time(kind))
    return target in (pa.string(), pa.binary()) and kind in _BYTES


_BYTES = frozenset(
    {
        *(pa.string(), pa.large_string(), pa.string_view()),
        *(pa.binary(), pa.large_binary(), pa.binary_view()),
    }
)


def _cast_exactly(array: pa.Array, target: pa.DataType, name: str) -> pa.Array:
    """Cast values without rounding or truncation.

    Raises:
        AmbiguousColumn: A value does not fit the type. Callers report this error and the path of the file together.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    try:
        if pa.types.is_timestamp(target) and pa.types.is_timestamp(array.type):
            local_times = array.view(pa.timestamp(array.type.unit))
            return local_times.cast(pa.timestamp(target.unit)).view(target)
        return array.cast(target)
    except pa.ArrowException:  # The error is hidden, because it may quote a value of an encrypted file.
        raise AmbiguousColumn(f"a value in the file's column for {name} does not fit the type {target}") from None
