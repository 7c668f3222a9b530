"""Find the columns of a Parquet file by Iceberg field id (spec: "Column Projection").

A column is identified by its field id, not by its name. If a file has no ids, the table's name mapping assigns
them. If two columns have the id, or a path is ambiguous, `AmbiguousColumn` is raised, and the caller adds the file's
path. Readers handle the names and defaults of missing columns. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from seamark.formats.iceberg.metadata.name_mapping import NAME_MAPPING, NameMapping
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = LazyModule("pyarrow.compute")

FIELD_ID = b"PARQUET:field_id"
"""The key of a field id in the metadata of an Arrow field."""

ColumnPath: TypeAlias = tuple[str, ...]
"""The names on the path from the root to a column."""


class Unreadable(Exception):
    """The content of a file cannot be determined.

    Attributes:
        path: The path of the file.
        reason: The cause.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class EncryptedFile(Unreadable):
    """The file is encrypted, and the reader has no keys."""


class UnfitColumn(Unreadable):
    """A column of the file cannot be read as the type that it has in the schema of the reader."""


class AmbiguousColumn(ValueError):
    """Several columns of a file may be the requested column. The message begins with "the file", without its path."""


def get_field_id(field: pa.Field) -> int | None:
    """Return the field id of a column, or None.

    Raises:
        ValueError: The field id is not a number.
    """
    field_id = None if field.metadata is None else field.metadata.get(FIELD_ID)
    return None if field_id is None else int(field_id)


def has_ids(fields: Iterable[pa.Field]) -> bool:
    """Return whether a column at any level of nesting has a field id."""
    return any(get_field_id(field) is not None or has_ids(_list_children(field.type)) for field in fields)


def _list_children(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(kind):
        return list(kind)
    if pa.types.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.value_field] if pa.types.is_list(kind) or pa.types.is_large_list(kind) else []


def apply_name_mapping(fields: Sequence[pa.Field], mapping: NameMapping | None) -> list[pa.Field]:
    """Return the columns of a file with field ids: the file's own ids if it has any, otherwise those of the mapping.

    Args:
        fields: The columns of the file.
        mapping: The table's name mapping, which has the field id for each name of a column.

    Raises:
        AmbiguousColumn: The file has no ids, and there is no name mapping; or the mapping is ambiguous.
    """
    if has_ids(fields):
        return list(fields)
    if mapping is None:
        raise AmbiguousColumn(f"the file has no field ids, and the table has no name mapping ({NAME_MAPPING})")
    return [_map_ids(field, field.name, mapping) for field in fields]


def _map_ids(field: pa.Field, name: str, mapping: NameMapping) -> pa.Field:
    """Return a column with the field ids of the name mapping, including the columns inside it.

    A column that the mapping does not have stays without an id, so readers do not find it.

    Args:
        field: The column.
        name: The name of the column in the mapping. The parts of lists and maps have fixed names.
        mapping: The part of the name mapping for the columns of this level.

    Raises:
        AmbiguousColumn: The mapping has the name several times.
    """
    entries = [candidate for candidate in mapping if name in candidate.names]
    if len(entries) > 1:
        raise AmbiguousColumn(f"the table's name mapping maps the file's column {name!r} {len(entries)} times")
    if not entries:
        return field
    kind, children = field.type, entries[0].fields
    if pa.types.is_struct(kind):
        kind = pa.struct([_map_ids(child, child.name, children) for child in kind])
    elif pa.types.is_map(kind):
        kind = pa.map_(_map_ids(kind.key_field, "key", children), _map_ids(kind.item_field, "value", children))
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = pa.list_(_map_ids(kind.value_field, "element", children))
    mapped_field = pa.field(field.name, kind, nullable=field.nullable)
    field_id = entries[0].field_id
    return mapped_field if field_id is None else mapped_field.with_metadata({FIELD_ID: str(field_id)})


def find_columns(fields: Iterable[pa.Field], column_ids: Iterable[int]) -> dict[int, ColumnPath]:
    """Return the paths of some columns, by field id.

    Missing columns, and columns inside lists and maps, are omitted.

    Raises:
        AmbiguousColumn: Several columns may have the same id.
    """
    column_paths: dict[int, list[ColumnPath]] = {column_id: [] for column_id in column_ids}
    for column_id, column_path in _find_paths(fields):
        if column_id in column_paths:
            column_paths[column_id].append(column_path)
    for column_id, matches in column_paths.items():
        if len(matches) > 1:
            raise AmbiguousColumn(f"the file has {len(matches)} columns that may be column {column_id}")
    return {column_id: matches[0] for column_id, matches in column_paths.items() if matches}


def _find_paths(fields: Iterable[pa.Field], path: ColumnPath = ()) -> Iterator[tuple[int, ColumnPath]]:
    """Yield the field id and the path of each column that has an id, except columns inside lists and maps."""
    for field in fields:
        column_path = (*path, field.name)
        column_id = get_field_id(field)
        if column_id is not None:
            yield column_id, column_path
        if pa.types.is_struct(field.type):
            yield from _find_paths(list(field.type), column_path)


def to_dotted_names(column_paths: Iterable[ColumnPath]) -> list[str]:
    """Return the distinct column paths as names joined by dots, as pyarrow expects them, in alphabetical order."""
    return sorted({".".join(column_path) for column_path in column_paths})


def get_column(table: pa.Table, column_path: Sequence[str]) -> pa.ChunkedArray:
    """Return the column at a path.

    pyarrow selects columns by dotted names. If a name contains a dot, the table may also contain another column.

    Raises:
        AmbiguousColumn: Several columns have the first name of the path.
    """
    top_name, *inner_names = column_path
    indexes = [index for index, name in enumerate(table.column_names) if name == top_name]
    if len(indexes) != 1:
        raise AmbiguousColumn(f"the file has {len(indexes)} columns named {top_name!r}")
    column: Any = table.column(indexes[0])
    for name in inner_names:
        # The value is null if the struct is null.
        column = pc.struct_field(column, [column.type.get_field_index(name)])
    return column
