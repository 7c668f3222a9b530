"""Columns of a data file by Iceberg field id, each row in its physical place.

The rule kept: what is returned is what every reader of the table sees, or nothing is (`Unreadable`). An index made of a
column that readers see otherwise would hide rows; a file without an index is only read once too often. Columns are
found by the ids in the Parquet schema (Iceberg spec: "Column Projection"). A file without ids, as an import leaves it,
is not read: which of its columns is which depends on the table's name mapping, and an index would outlive a change of
that. A column that the file lacks is null.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import fs

from seamark.metaserver.iceberg.files.budget import decoded_budget
from seamark.metaserver.iceberg.files.parquet import InDoubt, Unreadable, has_ids, places_of
from seamark.metaserver.iceberg.files.parquet_reading import BoundedParquet
from seamark.metaserver.iceberg.types.schema import Schema

DECODED_BYTES = 4 << 30
"""Memory that the columns of one file may take; a file whose columns take more is not indexed."""


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

    Raises Unreadable when the file has another number of rows, is encrypted, takes too much memory, or leaves in doubt
    what a column is.
    """
    wanted = list(dict.fromkeys(column_ids))
    try:
        with filesystem.open_input_file(path) as source:
            file = BoundedParquet(source, path, decoded_budget(DECODED_BYTES))
            if file.rows != rows:
                raise Unreadable(path, f"it has {file.rows} rows; its manifest says {rows}")
            if not has_ids(file.schema):
                told = "it has no field ids; readers tell its columns by a name mapping, which may change"
                raise Unreadable(path, told)
            columns = file.plain_columns(places_of(file.schema, wanted))
    except InDoubt as error:
        raise Unreadable(path, str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(path, f"it cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from error
    for column_id in wanted:
        if column_id not in columns:
            if told := _why_unknown(column_id, projection):
                raise Unreadable(path, told)
            columns[column_id] = pa.chunked_array([pa.nulls(rows)])
    return {column_id: columns[column_id] for column_id in wanted}


def _why_unknown(column_id: int, projection: Projection) -> str:
    """Why a column that the file lacks is not null for readers, or nothing."""
    column = projection.schema.column(column_id)
    if column is None:
        return f"the table's schema has no column {column_id}"
    if column_id in projection.partitioned:
        return f"it lacks column {column.name}, which readers take from its partition"
    if column.initial_default is not None:
        return f"it lacks column {column.name}, which readers fill with its default"
    return ""
