"""Columns of a Parquet file as the table has them: found by field id, of the types of today, filled in where absent.

The rule it keeps (Iceberg spec, "Column Projection" and "Schema Evolution"): a column is the one that carries its id,
whatever it is called now and wherever it stands; one that the file lacks is the partition's value, where the file's
spec has it by identity, else its initial default, else null. Files without ids are read by the table's name mapping, or
not at all: readers disagree on what else their columns may be. Types only widen; a file whose column is of a type that
cannot become the table's is refused, naming it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.metaserver.iceberg.expressions.arrow import arrow_array, plain_type
from seamark.metaserver.iceberg.files.parquet import FIELD_ID, InDoubt, has_ids, id_of
from seamark.metaserver.iceberg.types.schema import Field, ListType, MapType, StructType, Type
from seamark.metaserver.iceberg.types.values import Value, decode_json

Convert = Callable[[pa.Array], pa.Array]


class NameMapping(msgspec.Struct, frozen=True, rename="kebab"):
    """One field of the table's property `schema.name-mapping.default` (spec: "Name Mapping Serialization")."""

    names: tuple[str, ...]
    field_id: int | None = None
    fields: tuple[NameMapping, ...] = ()


def parse_name_mapping(text: str) -> tuple[NameMapping, ...]:
    """ValueError for what is none."""
    try:
        return msgspec.json.decode(text, type=tuple[NameMapping, ...])
    except msgspec.MsgspecError as error:
        raise ValueError(f"the table's name mapping makes no sense: {error}") from None


def identified(fields: Sequence[pa.Field], mapping: Sequence[NameMapping] | None) -> list[pa.Field]:
    """The columns of a file, with the ids that it has or that the mapping gives it. InDoubt where there are none."""
    if has_ids(fields):
        return list(fields)
    if mapping is None:
        raise InDoubt("it has no field ids, and the table has no name mapping (schema.name-mapping.default)")
    return [_mapped(one, one.name, mapping) for one in fields]


def _mapped(field: pa.Field, name: str, mapping: Iterable[NameMapping]) -> pa.Field:
    found = next((one for one in mapping if name in one.names), None)
    if found is None:
        return field
    kind, inside = field.type, found.fields
    if pa.types.is_struct(kind):
        kind = pa.struct([_mapped(one, one.name, inside) for one in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(_mapped(kind.key_field, "key", inside), _mapped(kind.item_field, "value", inside))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = pa.list_(_mapped(kind.value_field, "element", inside))
    made = pa.field(field.name, kind, nullable=field.nullable)
    return made if found.field_id is None else made.with_metadata({FIELD_ID: str(found.field_id)})


class Projected:
    """How the wanted columns are made of the batches of one file; their types are those of `plain_type`."""

    def __init__(
        self, file: Sequence[pa.Field], wanted: Iterable[Field], partition: Mapping[int, Value | None]
    ) -> None:
        """`file` with ids (`identified`); `partition` the values that its partition has by identity, by column id.
        InDoubt where it is unclear which column is meant, or what it holds is not what the table has there."""
        names = [one.name for one in file]
        self._made: dict[int, tuple[str, Convert] | pa.Scalar] = {}
        for field in wanted:
            place = _place(file, field.id)
            if place is None:
                self._made[field.id] = _filled(field, partition)
                continue
            name = names[place]
            if names.count(name) > 1:
                raise InDoubt(f"it has {names.count(name)} columns named {name!r}")
            self._made[field.id] = (name, _converted(file[place].type, field.type, field.name, partition))

    def names(self, column_ids: Iterable[int]) -> list[str]:
        """Of those of the columns that are to be read from the file."""
        found = (self._made[one] for one in column_ids)
        return list(dict.fromkeys(one[0] for one in found if isinstance(one, tuple)))

    def columns(self, batch: pa.RecordBatch | None, column_ids: Iterable[int], rows: int) -> dict[int, pa.Array]:
        """Of a batch of so many rows that holds these `names`, maybe beside others; None where there are none."""
        made = {}
        for column_id in column_ids:
            found = self._made[column_id]
            if isinstance(found, tuple) and batch is not None:
                name, convert = found
                made[column_id] = convert(batch.column(batch.schema.names.index(name)))
            elif isinstance(found, pa.Scalar):
                made[column_id] = _repeated(found, rows)
        return made


def _place(fields: Iterable[pa.Field], field_id: int) -> int | None:
    found = [number for number, one in enumerate(fields) if id_of(one) == field_id]
    if len(found) > 1:
        raise InDoubt(f"it has {len(found)} columns that may be column {field_id}")
    return found[0] if found else None


def _filled(field: Field, partition: Mapping[int, Value | None]) -> pa.Scalar:
    if isinstance(field.type, str) and field.id in partition:
        return arrow_array(field.type, [partition[field.id]])[0]
    if isinstance(field.type, str) and field.initial_default is not None:
        return arrow_array(field.type, [decode_json(field.type, field.initial_default)])[0]
    return pa.scalar(None, plain_type(field.type))


def _repeated(value: pa.Scalar, rows: int) -> pa.Array:
    return pa.repeat(value, rows) if value.is_valid else pa.nulls(rows, value.type)


def _converted(kind: pa.DataType, target: Type, name: str, partition: Mapping[int, Value | None]) -> Convert:
    wanted = plain_type(target)
    match target:
        case StructType() if pa.types.is_struct(kind):
            return _struct(kind, target, name, partition)
        case ListType() if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            _same_id(kind.value_field, target.element_id, name)
            element = _converted(kind.value_type, target.element, f"{name}.element", {})
            return lambda array: _listed(array, element, wanted)
        case MapType() if pa.types.is_map(kind):
            _same_id(kind.key_field, target.key_id, name)
            _same_id(kind.item_field, target.value_id, name)
            key = _converted(kind.key_type, target.key, f"{name}.key", {})
            value = _converted(kind.item_type, target.value, f"{name}.value", {})
            return lambda array: _mapping(array, key, value, wanted)
        case str() if kind.equals(wanted):
            return lambda array: array
        case str() if _widens(_stored(kind), wanted):
            return lambda array: _cast(array, wanted, name)
    raise InDoubt(f"its column for {name} is of type {kind}, which cannot be read as {wanted}")


def _struct(kind: pa.DataType, target: StructType, name: str, partition: Mapping[int, Value | None]) -> Convert:
    made: list[tuple[int, Convert] | pa.Scalar] = []
    for field in target.fields:
        place = _place(kind, field.id)
        if place is None:
            made.append(_filled(field, partition))
        else:
            made.append((place, _converted(kind.field(place).type, field.type, f"{name}.{field.name}", partition)))
    fields = list(plain_type(target))

    def convert(array: pa.Array) -> pa.Array:
        children = [
            one[1](pc.struct_field(array, [one[0]])) if isinstance(one, tuple) else _repeated(one, len(array))
            for one in made
        ]
        if not children:  # from which no length could be told
            return pa.array([{} if one else None for one in array.is_valid().to_pylist()], pa.struct([]))
        return pa.StructArray.from_arrays(children, fields=fields, mask=array.is_null())

    return convert


def _same_id(field: pa.Field, field_id: int, name: str) -> None:
    if id_of(field) not in (None, field_id):
        raise InDoubt(f"what is inside its column for {name} has the id {id_of(field)}, not {field_id}")


def _listed(array: pa.Array, element: Convert, wanted: pa.DataType) -> pa.Array:
    offsets, first, last = _offsets(array)
    values = element(array.values.slice(first, last - first))
    return pa.ListArray.from_arrays(offsets, values, type=wanted, mask=array.is_null())


def _mapping(array: pa.Array, key: Convert, value: Convert, wanted: pa.DataType) -> pa.Array:
    offsets, first, last = _offsets(array)
    keys, items = key(array.keys.slice(first, last - first)), value(array.items.slice(first, last - first))
    return pa.MapArray.from_arrays(offsets, keys, items, type=wanted, mask=array.is_null())


def _offsets(array: pa.Array) -> tuple[pa.Array, int, int]:
    """From 0 on, and where the first begins and the last ends."""
    found = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    return pa.array((found - found[0]).astype(np.int32)), int(found[0]), int(found[-1])


def _stored(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _stored(kind.storage_type)
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _widens(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a file's column of one Arrow type can be read as another: promotions, and other spellings of one type."""
    if kind.equals(wanted) or pa.types.is_null(kind):
        return True
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(kind)) and kind.bit_width <= wanted.bit_width
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(kind)) and kind.bit_width <= wanted.bit_width
    if pa.types.is_decimal(wanted):
        return bool(pa.types.is_decimal(kind)) and kind.scale == wanted.scale and kind.precision <= wanted.precision
    if pa.types.is_timestamp(wanted):
        # A zone or none is the table's to say: writers of INT96 could not.
        return bool(pa.types.is_timestamp(kind) or (pa.types.is_date(kind) and wanted.tz is None))
    if pa.types.is_time(wanted):
        return bool(pa.types.is_time(kind))
    return wanted in (pa.string(), pa.binary()) and kind in _BYTES


_BYTES = frozenset(
    {
        *(pa.string(), pa.large_string(), pa.string_view()),
        *(pa.binary(), pa.large_binary(), pa.binary_view()),
    }
)


def _cast(array: pa.Array, wanted: pa.DataType, name: str) -> pa.Array:
    """Nothing is rounded or cut off."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    try:
        if pa.types.is_timestamp(wanted) and pa.types.is_timestamp(array.type):
            plain = array.view(pa.timestamp(array.type.unit))
            return plain.cast(pa.timestamp(wanted.unit)).view(wanted)
        return array.cast(wanted)
    except pa.ArrowException as error:
        raise InDoubt(f"its column for {name} does not hold {wanted}: {str(error).splitlines()[0]}") from None
