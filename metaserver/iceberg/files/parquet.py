"""Where the columns of a Parquet file are, by Iceberg field id (spec: "Column Projection"). Pure.

The rule it keeps: a column is the one that carries the id, whatever it is called, or it is not there. Where two carry
it, or a name leads to two, it is in doubt (`InDoubt`), and the caller, who knows the file, names it. Names and defaults
for what is not there are left to readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from metaserver.deferred import Deferred

if TYPE_CHECKING:
    import pyarrow.compute as pc
else:
    pc = Deferred("pyarrow.compute")

FIELD_ID = b"PARQUET:field_id"
"""Under which Arrow keeps the ids of a Parquet schema in the metadata of its fields."""

Place: TypeAlias = tuple[str, ...]
"""The path of names to a column."""


class Unreadable(Exception):
    """What a file says is not known: `reason`, for people."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class InDoubt(ValueError):
    """Says what is in doubt, of a file that "it" stands for."""


def id_of(field: pa.Field) -> int | None:
    """The field id of one column. ValueError for one that is no number."""
    found = None if field.metadata is None else field.metadata.get(FIELD_ID)
    return None if found is None else int(found)


def has_ids(fields: Iterable[pa.Field]) -> bool:
    """Whether any column that is not inside a list or map has one."""
    return next(_by_id(fields), None) is not None


def places_of(fields: Iterable[pa.Field], wanted: Iterable[int]) -> dict[int, Place]:
    """Of the wanted columns those that are there, by id; columns inside a list or map are not. InDoubt."""
    found: dict[int, list[Place]] = {column_id: [] for column_id in wanted}
    for column_id, place in _by_id(fields):
        if column_id in found:
            found[column_id].append(place)
    for column_id, there in found.items():
        if len(there) > 1:
            raise InDoubt(f"it has {len(there)} columns that may be column {column_id}")
    return {column_id: there[0] for column_id, there in found.items() if there}


def _by_id(fields: Iterable[pa.Field], path: Place = ()) -> Iterator[tuple[int, Place]]:
    for one in fields:
        place = (*path, one.name)
        column_id = id_of(one)
        if column_id is not None:
            yield column_id, place
        if pa.types.is_struct(one.type):
            yield from _by_id(list(one.type), place)


def dotted(places: Iterable[Place]) -> list[str]:
    """As pyarrow wants to be told which columns to read."""
    return sorted({".".join(place) for place in places})


def column_of(table: pa.Table, place: Sequence[str]) -> pa.ChunkedArray:
    """By place, not by name: a name may hold a dot, and then another column was read along with it. InDoubt."""
    top: Any = [number for number, name in enumerate(table.column_names) if name == place[0]]
    if len(top) != 1:
        raise InDoubt(f"it has {len(top)} columns named {place[0]!r}")
    column = table.column(top[0])
    for name in place[1:]:
        column = pc.struct_field(column, [column.type.get_field_index(name)])  # null where the struct is
    return column
