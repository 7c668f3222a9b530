"""Name mappings, which map the columns of a file without field ids to columns of the table.

The table's property `schema.name-mapping.default` contains the mapping (Iceberg spec: "Name Mapping Serialization"). It
applies only to files in which no column has a field id. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import chain

import msgspec

from seamark.formats.runtime.decoding import convert_json

NAME_MAPPING = "schema.name-mapping.default"


class MappedField(msgspec.Struct, frozen=True, rename="kebab", omit_defaults=True):
    """An entry of a name mapping.

    Attributes:
        names: The possible names of the column in files.
        field_id: The field id of the column.
        fields: The entries of the columns inside the column.
    """

    names: tuple[str, ...]
    field_id: int | None = None
    fields: tuple[MappedField, ...] = ()


NameMapping = tuple[MappedField, ...]


def parse_name_mapping(text: str) -> NameMapping:
    """Parse a name mapping.

    Raises:
        ValueError: The name mapping is invalid.
    """
    try:
        return convert_json(text, NameMapping)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the table's name mapping is invalid: {error}") from None


def read_name_mapping(properties: Mapping[str, str]) -> NameMapping | None:
    """Return the name mapping of a table, or None.

    The result is None if the table has no mapping, or has one that readers may interpret in different ways.
    """
    text = properties.get(NAME_MAPPING)
    if text is None:
        return None
    try:
        mapping = parse_name_mapping(text)
    except ValueError:
        return None
    return mapping if _has_unique_names(mapping) else None


def select_columns(mapping: NameMapping, column_ids: Iterable[int]) -> NameMapping:
    """Return the part of the mapping for some columns, in canonical form: entries and names are sorted.

    If two mappings have equal parts, they map these columns in the same way.
    """
    return _restrict_mapping(mapping, frozenset(column_ids))


def _restrict_mapping(mapping: NameMapping, column_ids: Set[int]) -> NameMapping:
    """Return the entries of some columns, and of the columns that contain them. Entries and names are sorted."""
    entries = []
    for entry in mapping:
        fields = _restrict_mapping(entry.fields, column_ids)
        field_id = entry.field_id if entry.field_id in column_ids else None
        if fields or field_id is not None:
            entries.append(MappedField(tuple(sorted(entry.names)), field_id, fields))
    return tuple(sorted(entries, key=lambda entry: entry.names))


def _has_unique_names(mapping: NameMapping) -> bool:
    """Return whether no two entries of a column have a name in common."""
    names = list(chain.from_iterable(entry.names for entry in mapping))
    return len(names) == len(set(names)) and all(_has_unique_names(entry.fields) for entry in mapping)
