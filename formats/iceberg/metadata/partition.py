"""Partition specs: their JSON structs, field ids and compatibility with a schema (Iceberg spec: "Partitioning").

A spec refers to columns by id. It is validated against a schema when it is added, and when the spec or the schema
becomes current. Old specs are kept even if their source columns have been dropped, so that old files can still be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec

from seamark.formats.iceberg.types.reading import Int32
from seamark.formats.iceberg.types.schema import Schema, StructType, describe_type, is_primitive
from seamark.formats.iceberg.types.transforms import VOID, accepts_type, canonicalize_transform, get_transform_name
from seamark.formats.runtime.errors import BadRequest

FIELD_ID_START = 1000
"""The first partition field id. The last-partition-id of an unpartitioned table is one less."""


class PartitionField(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    """A field of a partition spec: a transform of one or several columns."""

    name: str
    transform: str
    source_id: Int32 | None = None
    source_ids: tuple[Int32, ...] = ()
    """The source columns of a version 3 transform of several columns.

    A single source is always written as `source-id`.
    """
    field_id: Int32 | None = None

    @property
    def sources(self) -> tuple[int, ...]:
        return self.source_ids if self.source_id is None else (self.source_id,)

    @property
    def is_void(self) -> bool:
        """Whether the field is null for every row. In version 1, such a field replaces a dropped field."""
        return self.transform.lower() == VOID

    def describe(self) -> str:
        sources = ", ".join(map(str, self.sources))
        return f"{self.field_id}: {self.name}: {self.transform}({sources})"


class PartitionSpec(msgspec.Struct, frozen=True, dict=True, rename="kebab"):
    """A partition spec: the fields from which the partition values of a file are computed."""

    spec_id: Int32
    fields: tuple[PartitionField, ...]

    @property
    def last_field_id(self) -> int:
        return max((field.field_id or 0 for field in self.fields), default=FIELD_ID_START - 1)

    @property
    def partition_source_ids(self) -> frozenset[int]:
        """The ids of the columns from which the partition values in manifests are computed."""
        return frozenset(source for field in self.fields if not field.is_void for source in field.sources)

    def list_fields_with_source(self, column_id: int) -> tuple[PartitionField, ...]:
        """Return the fields that have an id and whose only source is this column."""
        return self._fields_by_source.get(column_id, ())

    @cached_property
    def _fields_by_source(self) -> dict[int, tuple[PartitionField, ...]]:
        fields_by_source: dict[int, tuple[PartitionField, ...]] = {}
        for field in self.fields:
            if field.field_id is not None and len(field.sources) == 1:
                source = field.sources[0]
                fields_by_source[source] = (*fields_by_source.get(source, ()), field)
        return fields_by_source

    def has_same_fields(self, other: PartitionSpec) -> bool:
        """Return whether two specs are equal except for their spec id and field ids.

        The specification does not allow adding an equal spec again.
        """
        field_keys = [(field.sources, field.transform, field.name) for field in self.fields]
        return field_keys == [(field.sources, field.transform, field.name) for field in other.fields]


class PartitionSpecInput(msgspec.Struct, frozen=True, rename="kebab"):
    """A spec from a client. The server assigns its missing ids."""

    fields: tuple[PartitionField, ...]
    spec_id: Int32 = 0


UNPARTITIONED = PartitionSpec(0, ())


def normalize_spec(spec: PartitionSpecInput) -> PartitionSpec:
    """Return the client's spec in canonical form, in which either all fields have ids or none has.

    Raises:
        BadRequest: The spec is invalid.
    """
    fields = tuple(_normalize_field(field) for field in spec.fields)
    field_ids = [field.field_id for field in fields if field.field_id is not None]
    if field_ids and len(field_ids) != len(fields):
        missing_count = len(fields) - len(field_ids)
        raise BadRequest(f"Cannot parse spec with missing field IDs: {missing_count} missing of {len(fields)} fields.")
    if len(set(field_ids)) != len(field_ids):
        raise BadRequest(f"Cannot use partition field id more than once: {field_ids}")
    return PartitionSpec(spec.spec_id, fields)


def _normalize_field(field: PartitionField) -> PartitionField:
    """Return a field in canonical form. Raise BadRequest if it has no source column.

    A single source column is always stored as `source_id`, and several columns as `source_ids`.
    """
    sources = field.sources
    if not sources:
        raise BadRequest(f"Invalid partition field {field.name}: missing required field `source-id`")
    has_single_source = len(sources) == 1
    return PartitionField(
        field.name,
        canonicalize_transform(field.transform),
        sources[0] if has_single_source else None,
        () if has_single_source else sources,
        field.field_id,
    )


def number_fields(spec: PartitionSpec) -> PartitionSpec:
    """Assign the field ids 1000, 1001, … to a spec without ids, as readers of old version 1 metadata do."""
    return fill_field_ids(spec, (FIELD_ID_START + position for position in range(len(spec.fields))))


def fill_field_ids(spec: PartitionSpec, ids: Iterable[int]) -> PartitionSpec:
    """Assign `ids` to the fields of a spec that have no id."""
    fields = (
        field if field.field_id is not None else msgspec.structs.replace(field, field_id=field_id)
        for field, field_id in zip(spec.fields, ids, strict=True)
    )
    return PartitionSpec(spec.spec_id, tuple(fields))


def assign_field_ids(spec: PartitionSpec, existing_specs: Iterable[PartitionSpec], last_field_id: int) -> PartitionSpec:
    """Assign ids to the fields of a spec.

    A field gets the id of an equal field in `existing_specs`, otherwise the next free id (spec, version 2). An id is
    used only once in a spec, even if two of its fields are equal.

    Args:
        spec: The spec. Existing ids of its fields stay.
        existing_specs: The other specs of the table.
        last_field_id: The highest id that was assigned before.
    """
    known_ids = {(field.sources, field.transform): field.field_id for old in existing_specs for field in old.fields}
    ids: list[int] = []
    used_ids: set[int] = set()
    for field in spec.fields:
        field_id = known_ids.get((field.sources, field.transform))
        if field_id is None or field_id in used_ids:
            last_field_id += 1
            field_id = last_field_id
        ids.append(field_id)
        used_ids.add(field_id)
    return fill_field_ids(spec, ids)


def has_sequential_ids(spec: PartitionSpec) -> bool:
    return all(field.field_id == FIELD_ID_START + position for position, field in enumerate(spec.fields))


def check_names(spec: PartitionSpec, schema: Schema) -> None:
    """Check that Java can parse the names of the spec together with the schema.

    Raises:
        BadRequest: A name is empty, repeated, or conflicts with a column.
    """
    seen_names: set[str] = set()
    for field in spec.fields:
        if not field.name:
            raise BadRequest("Cannot use empty partition name")
        if field.name in seen_names:
            raise BadRequest(f"Cannot use partition name more than once: {field.name}")
        seen_names.add(field.name)
        # A field can have the name of its source column, or any name if its source column was dropped.
        column = schema.find_column_by_name(field.name)
        if column is not None and column.id not in field.sources and schema.column(field.sources[0]) is not None:
            raise BadRequest(f"Cannot create identity partition sourced from different field in schema: {field.name}")


def check_promotions(spec: PartitionSpec, old_schema: Schema, new_schema: Schema) -> None:
    """Check that a new type of a column does not change the partition values of its rows (spec: "Schema Evolution").

    A timestamp has a different hash from its date, so planners would not find the rows of stored files.

    Raises:
        BadRequest: A promotion changes partition values.
    """
    for field in spec.fields:
        if get_transform_name(canonicalize_transform(field.transform)) != "bucket":
            continue
        for source_id in field.sources:
            old_column, new_column = old_schema.column(source_id), new_schema.column(source_id)
            if old_column is not None and new_column is not None and old_column.type == "date" != new_column.type:
                raise BadRequest(
                    f"Cannot change type of column {new_column.name} from date to {describe_type(new_column.type)}: "
                    f"partition field {field.describe()} would have other values"
                )


def check_compatible(spec: PartitionSpec, schema: Schema) -> None:
    """Check that each field can be computed from the schema's columns.

    Raises:
        BadRequest: A field cannot be computed.
    """
    for field in spec.fields:
        if field.is_void:
            # In version 1, a void field replaces a dropped field. Its source may be missing.
            continue
        for source_id in field.sources:
            _check_source(field, source_id, schema)


def _check_source(field: PartitionField, source_id: int, schema: Schema) -> None:
    """Check that a partition field can be computed from a column. Raise BadRequest if it cannot.

    The column must be primitive, and not inside a list or map, where it would have several values in a row.
    """
    column = schema.column(source_id)
    if column is None:
        raise BadRequest(f"Cannot find source column for partition field: {field.describe()}")
    if not is_primitive(column.type) or not isinstance(column.type, str):
        raise BadRequest(f"Cannot partition by non-primitive source field: {describe_type(column.type)}")
    if not accepts_type(canonicalize_transform(field.transform), column.type):
        raise BadRequest(f"Invalid source type {column.type} for transform: {field.transform}")
    for parent in schema.list_ancestors(column):
        if not isinstance(parent.type, StructType):
            raise BadRequest(f"Invalid partition field parent: {describe_type(parent.type)}")
