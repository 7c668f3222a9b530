"""Schemas (Iceberg spec: "Schemas and Data Types"): structs as in metadata JSON, an index, and validation.

A schema is validated once, when a client sends it. A stored schema is not validated, so that irregular tables of
engines stay readable. Types are names or nested structs. Two schemas are the same if their canonical forms are equal.
These include the identifier fields, but not the schema id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from seamark.formats.iceberg.types.reading import Int32
from seamark.formats.iceberg.types.types import (
    canonicalize_primitive,
    check_default,
    get_base_name,
    get_min_format_version,
)
from seamark.formats.runtime.errors import BadRequest

NAMES_MAX = 16 << 20
"""The maximum number of characters of all full names in a schema.

The name of a struct is part of the name of each field inside it.
"""
DEPTH_MAX = 100
"""The maximum nesting of a schema. Java's JSON parser stops slightly above 300 levels."""

DEFAULTS_MIN_FORMAT_VERSION = 3


class Field(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    id: Int32
    name: str
    required: bool
    type: str | StructType | ListType | MapType
    doc: str | None = None
    initial_default: Any = None
    write_default: Any = None


class StructType(msgspec.Struct, frozen=True, tag="struct", tag_field="type"):
    fields: tuple[Field, ...]


class ListType(msgspec.Struct, frozen=True, tag="list", tag_field="type", rename="kebab"):
    element_id: Int32
    element: str | StructType | ListType | MapType
    element_required: bool


class MapType(msgspec.Struct, frozen=True, tag="map", tag_field="type", rename="kebab"):
    key_id: Int32
    key: str | StructType | ListType | MapType
    value_id: Int32
    value: str | StructType | ListType | MapType
    value_required: bool


Type = str | StructType | ListType | MapType


class Column(NamedTuple):
    """A field anywhere in a schema, including list elements and map keys and values."""

    id: int
    name: str
    """The full name of the column: the path from the root, joined by dots."""
    type: Type
    required: bool
    parent: int | None
    initial_default: object
    write_default: object


class SchemaIndex(NamedTuple):
    """The columns of a schema by id and by name."""

    by_id: dict[int, Column]
    by_name: dict[str, int]
    """The column ids by full name and by short name.

    A short name omits `element` and `value` before a struct, unless it conflicts with another name.
    """


class Schema(
    msgspec.Struct, frozen=True, dict=True, omit_defaults=True, tag="struct", tag_field="type", rename="kebab"
):
    """A schema: its fields as in metadata JSON, and lookups by id and name."""

    fields: tuple[Field, ...]
    schema_id: Int32 | None = None
    identifier_field_ids: tuple[Int32, ...] = ()

    @property
    def id(self) -> int:
        """The schema's id. If it is missing, as version 1 metadata allows, the id is 0."""
        return self.schema_id or 0

    @cached_property
    def index(self) -> SchemaIndex:
        """The columns by id and by name.

        Raises:
            BadRequest: Two fields share an id or a full name.
        """
        return _build_index(self)

    def column(self, column_id: int) -> Column | None:
        return self.index.by_id.get(column_id)

    def list_ancestors(self, column: Column) -> Iterator[Column]:
        """Yield the structs, lists and maps that contain the column, innermost first."""
        while column.parent is not None:
            column = self.index.by_id[column.parent]
            yield column

    def list_path(self, column: Column) -> tuple[str, ...]:
        """Return the names from the root to the column. A name can contain dots."""
        names: list[str] = []
        for ancestor in self.list_ancestors(column):
            names.insert(0, column.name[len(ancestor.name) + 1 :])
            column = ancestor
        return (column.name, *names)

    def find_column_by_name(self, name: str) -> Column | None:
        column_id = self.index.by_name.get(name)
        return None if column_id is None else self.index.by_id[column_id]

    @property
    def highest_field_id(self) -> int:
        return max(self.index.by_id, default=0)

    @cached_property
    def canonical(self) -> tuple[tuple[Field, ...], frozenset[int]]:
        """The parts that are equal in equal schemas: the fields in canonical form and the identifier fields.

        Raises:
            BadRequest: A type is unknown.
        """
        return _canonicalize_fields(self.fields, 0), frozenset(self.identifier_field_ids)

    def is_same_as(self, other: Schema) -> bool:
        try:
            return self.canonical == other.canonical
        except BadRequest:
            # A stored schema may have a type of a later format version.
            return False


def normalize_schema(schema: Schema, schema_id: int | None = None) -> Schema:
    """Return the schema in canonical form. If `schema_id` is set, it becomes the id of the schema.

    Raises:
        BadRequest: The schema is invalid.
    """
    fields, identifiers = schema.canonical
    result = Schema(fields, schema.id if schema_id is None else schema_id, tuple(sorted(identifiers)))
    for column in result.index.by_id.values():
        _check_column(column)
    for field_id in result.identifier_field_ids:
        _check_identifier(field_id, result.index.by_id)
    return result


def copy_with_id(schema: Schema, schema_id: int) -> Schema:
    return schema if schema.schema_id == schema_id else Schema(schema.fields, schema_id, schema.identifier_field_ids)


def check_format_version(schema: Schema, format_version: int) -> None:
    """Check that the table's format version supports all types and defaults of a schema.

    Raises:
        BadRequest: A type or default is not supported. The message lists all of them.
    """
    problems: dict[int, str] = {}
    for column in schema.index.by_id.values():
        if isinstance(column.type, str) and format_version < (needed := get_min_format_version(column.type)):
            problems[column.id] = f"Invalid type for {column.name}: {column.type} is not supported until v{needed}"
        for default_name, value in (("initial", column.initial_default), ("write", column.write_default)):
            if value is not None and format_version < DEFAULTS_MIN_FORMAT_VERSION:
                problems[column.id] = (
                    f"Invalid {default_name} default for {column.name}: non-null default ({value}) is not supported "
                    f"until v{DEFAULTS_MIN_FORMAT_VERSION}"
                )
    if problems:
        lines = "\n- ".join(problem for _, problem in sorted(problems.items()))
        raise BadRequest(f"Invalid schema for v{format_version}:\n- {lines}")


def assign_fresh_ids(schema: Schema, schema_id: int) -> tuple[Schema, dict[int, int]]:
    """Return the schema with column ids 1, 2, …, and a dictionary of new ids by old ids.

    The order is that of Java (`AssignFreshIds`) and PyIceberg: all fields of a struct come first, and the fields inside
    these fields follow.
    """
    new_ids_by_old_id: dict[int, int] = {}

    def assign_id(old_id: int) -> int:
        new_ids_by_old_id[old_id] = len(new_ids_by_old_id) + 1
        return new_ids_by_old_id[old_id]

    fields = _renumber_fields(schema.fields, assign_id)
    identifiers = tuple(sorted(new_ids_by_old_id[old_id] for old_id in schema.identifier_field_ids))
    return Schema(fields, schema_id, identifiers), new_ids_by_old_id


def is_primitive(kind: Type) -> bool:
    """Return whether a type is primitive. Variant is not primitive, because its values have an inner structure."""
    return isinstance(kind, str) and get_base_name(kind) != "variant"


def describe_type(kind: Type) -> str:
    """Return the name of a type for error messages."""
    if isinstance(kind, str):
        return kind
    return {StructType: "struct", ListType: "list", MapType: "map"}[type(kind)]


def _build_index(schema: Schema) -> SchemaIndex:
    """Build the index of a schema's columns by id and by name.

    The characters of all full names are limited, because deeply nested fields could have names of gigabytes. A full
    name takes precedence over an equal short name.

    Raises:
        BadRequest: Two columns have the same id or the same full name, or the names or the nesting exceed a limit.
    """
    by_id: dict[int, Column] = {}
    ids_by_full_name: dict[str, int] = {}
    ids_by_short_name: dict[str, int] = {}
    remaining_characters = NAMES_MAX

    def add_field(field: Field, path: tuple[str, ...], short_path: tuple[str, ...], parent_id: int | None) -> None:
        nonlocal remaining_characters
        remaining_characters -= sum(map(len, path)) + len(path) + len(field.name)
        if remaining_characters < 0:
            raise BadRequest(f"Invalid schema: the full names of its fields have more than {NAMES_MAX:,} characters")
        name = ".".join((*path, field.name))
        if field.id in by_id:
            raise BadRequest(f"Invalid schema: multiple fields for id {field.id}: {by_id[field.id].name} and {name}")
        if name in ids_by_full_name:
            raise BadRequest(
                f"Invalid schema: multiple fields for name {name}: {ids_by_full_name[name]} and {field.id}"
            )
        by_id[field.id] = Column(
            field.id, name, field.type, field.required, parent_id, field.initial_default, field.write_default
        )
        ids_by_full_name[name] = field.id
        ids_by_short_name.setdefault(".".join((*short_path, field.name)), field.id)

    def add_fields_inside(
        kind: Type, path: tuple[str, ...], short_path: tuple[str, ...], parent_id: int | None
    ) -> None:
        if len(path) > DEPTH_MAX:
            raise BadRequest(f"Invalid schema: nested deeper than {DEPTH_MAX} levels")
        for field, is_omitted in _list_children(kind):
            add_field(field, path, short_path, parent_id)
            inner_short_path = (
                short_path if is_omitted and isinstance(field.type, StructType) else (*short_path, field.name)
            )
            add_fields_inside(field.type, (*path, field.name), inner_short_path, field.id)

    add_fields_inside(StructType(schema.fields), (), (), None)
    return SchemaIndex(by_id, {**ids_by_short_name, **ids_by_full_name})


def _list_children(kind: Type) -> list[tuple[Field, bool]]:
    """Return the direct children of a type, and whether short names can omit the name of the child.

    A short name omits the names `element` and `value`, such as `points.x` instead of `points.element.x`.
    """
    if isinstance(kind, StructType):
        return [(field, False) for field in kind.fields]
    if isinstance(kind, ListType):
        return [(Field(kind.element_id, "element", kind.element_required, kind.element), True)]
    if isinstance(kind, MapType):
        return [
            (Field(kind.key_id, "key", True, kind.key), False),
            (Field(kind.value_id, "value", kind.value_required, kind.value), True),
        ]
    return []


def _canonicalize_type(kind: Type, depth: int) -> Type:
    if depth > DEPTH_MAX:
        raise BadRequest(f"Invalid schema: nested deeper than {DEPTH_MAX} levels")
    if isinstance(kind, str):
        return canonicalize_primitive(kind)
    if isinstance(kind, StructType):
        return StructType(_canonicalize_fields(kind.fields, depth))
    if isinstance(kind, ListType):
        return ListType(kind.element_id, _canonicalize_type(kind.element, depth + 1), kind.element_required)
    key, value = _canonicalize_type(kind.key, depth + 1), _canonicalize_type(kind.value, depth + 1)
    return MapType(kind.key_id, key, kind.value_id, value, kind.value_required)


def _canonicalize_fields(fields: tuple[Field, ...], depth: int) -> tuple[Field, ...]:
    return tuple(msgspec.structs.replace(field, type=_canonicalize_type(field.type, depth + 1)) for field in fields)


def _renumber_fields(fields: tuple[Field, ...], assign_id: Callable[[int], int]) -> tuple[Field, ...]:
    ids = [assign_id(field.id) for field in fields]
    return tuple(
        msgspec.structs.replace(field, id=new_id, type=_renumber_type(field.type, assign_id))
        for field, new_id in zip(fields, ids, strict=True)
    )


def _renumber_type(kind: Type, assign_id: Callable[[int], int]) -> Type:
    if isinstance(kind, StructType):
        return StructType(_renumber_fields(kind.fields, assign_id))
    if isinstance(kind, ListType):
        element_id = assign_id(kind.element_id)
        return ListType(element_id, _renumber_type(kind.element, assign_id), kind.element_required)
    if isinstance(kind, MapType):
        key_id, value_id = assign_id(kind.key_id), assign_id(kind.value_id)
        key, value = _renumber_type(kind.key, assign_id), _renumber_type(kind.value, assign_id)
        return MapType(key_id, key, value_id, value, kind.value_required)
    return kind


def _check_column(column: Column) -> None:
    """Check that a column may have its type and its defaults.

    Raises:
        BadRequest: It may not have them.
    """
    if column.type == "unknown" and column.required:
        raise BadRequest(f"Cannot create required field with unknown type: {column.name}")
    for value in (column.initial_default, column.write_default):
        if value is None:
            continue
        if not isinstance(column.type, str):
            kind = describe_type(column.type)
            raise BadRequest(f"Invalid default value for {column.name}: a {kind} can only default to null")
        check_default(column.type, value, column.name)


def _check_identifier(field_id: int, by_id: dict[int, Column]) -> None:
    """Check that a column can be an identifier field (spec: "Identifier Field IDs"). Raise BadRequest if it cannot.

    Identifier fields identify a row. So their values must exist, be comparable, and occur once in a row.
    """
    column = by_id.get(field_id)
    if column is None:
        raise BadRequest(f"Cannot add fieldId {field_id} as an identifier field: field does not exist")
    error_start = f"Cannot add field {column.name} as an identifier field: "
    if not is_primitive(column.type):
        raise BadRequest(error_start + "not a primitive type field")
    if not column.required:
        raise BadRequest(error_start + "not a required field")
    if column.type in ("float", "double"):
        raise BadRequest(error_start + "must not be float or double field")
    parent = None if column.parent is None else by_id[column.parent]
    while parent is not None:
        if not isinstance(parent.type, StructType):
            raise BadRequest(error_start + f"must not be nested in {parent.name}")
        if not parent.required:
            raise BadRequest(error_start + f"must not be nested in an optional field {parent.name}")
        parent = None if parent.parent is None else by_id[parent.parent]
