"""Columns of a data file by Iceberg field id, each row in its physical place.

The rule kept: what is returned is what every reader of the table sees, or nothing is (`Unreadable`). An index made of a
column that readers see otherwise would hide rows; a file without an index is only read once too often. Columns are
found by the ids in the Parquet schema (Iceberg spec: "Column Projection"). A file without ids, as an import leaves it,
is not read: which of its columns is which depends on the table's name mapping, and an index would outlive a change of
that. A column that the file lacks is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from metaserver.iceberg.schema import Schema

FIELD_ID = b"PARQUET:field_id"

Place: TypeAlias = tuple[int, tuple[str, ...]]
"""Field id of a column, and the path of names to it."""


class Unreadable(Exception):
    """The file cannot be read as every reader of the table would: says why."""


@dataclass(frozen=True)
class Projection:
    """How the columns of one table are found in its files.

    `partitioned`: columns whose values stand in the partition of the file's spec, by identity; readers take them from
    there where the file lacks them.
    """

    schema: Schema
    partitioned: frozenset[int] = field(default_factory=frozenset)


def read_columns(
    path: str,
    column_ids: Iterable[int],
    projection: Projection,
    *,
    filesystem: fs.FileSystem,
    rows: int,
) -> dict[int, pa.ChunkedArray]:
    """The columns, each of `rows` rows in the file's order, by id. `path` is as the file system wants it.

    Raises Unreadable when the file has another number of rows, is encrypted, or leaves in doubt what a column is.
    """
    wanted = list(dict.fromkeys(column_ids))
    try:
        with pq.ParquetFile(path, filesystem=filesystem) as file:
            if file.metadata.num_rows != rows:
                raise Unreadable(f"{path} has {file.metadata.num_rows} rows; its manifest says {rows}")
            found = _found(wanted, _places(file.schema_arrow))
            table = file.read(columns=sorted({".".join(names) for names in found.values()}), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    columns: dict[int, pa.ChunkedArray] = {}
    for column_id in wanted:
        if column_id in found:
            columns[column_id] = _column(table, column_id, found[column_id])
        else:
            columns[column_id] = _absent(column_id, rows, projection)
    return columns


def _found(wanted: Iterable[int], places: Iterable[Place]) -> dict[int, tuple[str, ...]]:
    """Where those of the wanted columns are that the file has."""
    found: dict[int, list[tuple[str, ...]]] = {column_id: [] for column_id in wanted}
    for column_id, names in places:
        if column_id in found:
            found[column_id].append(names)
    for column_id, there in found.items():
        if len(there) > 1:
            raise Unreadable(f"the file has {len(there)} columns that may be column {column_id}")
    return {column_id: there[0] for column_id, there in found.items() if there}


def _places(schema: pa.Schema) -> list[Place]:
    """All columns that are not inside a list or map."""
    if ids := list(_by_id(schema)):
        return ids
    raise Unreadable("the file has no field ids; readers tell its columns by a name mapping, which may change")


def _by_id(fields: Iterable[pa.Field], path: tuple[str, ...] = ()) -> Iterator[Place]:
    for one in fields:
        names = (*path, one.name)
        if one.metadata is not None and FIELD_ID in one.metadata:
            yield int(one.metadata[FIELD_ID]), names
        if pa.types.is_struct(one.type):
            yield from _by_id(list(one.type), names)


def _column(table: pa.Table, column_id: int, names: tuple[str, ...]) -> pa.ChunkedArray:
    # By place, not by name: a name may hold a dot, and then another column was read along with it.
    top: Any = [place for place, name in enumerate(table.column_names) if name == names[0]]
    if len(top) != 1:
        raise Unreadable(f"the file has {len(top)} columns named {names[0]!r}, so that column {column_id} is in doubt")
    column = table.column(top[0])
    for name in names[1:]:
        column = pc.struct_field(column, [column.type.get_field_index(name)])  # null where the struct is
    return column


def _absent(column_id: int, rows: int, projection: Projection) -> pa.ChunkedArray:
    column = projection.schema.column(column_id)
    if column is None:
        raise Unreadable(f"the table's schema has no column {column_id}")
    if column_id in projection.partitioned:
        raise Unreadable(f"the file lacks column {column.name}, which readers take from its partition")
    if column.initial_default is not None:
        raise Unreadable(f"the file lacks column {column.name}, which readers fill with its default")
    return pa.chunked_array([pa.nulls(rows)])
