"""Reads columns of a data file by Iceberg field id, for indexes; rows keep their physical positions.

The result equals what all readers of the table see; otherwise Unreadable is raised. An index of other values would hide
rows, while a file without an index is only read more often. Columns are matched by the ids in the Parquet schema
(Iceberg spec: "Column Projection"), or by a name mapping in a file without ids, for example an imported file. A column
that the file lacks is null.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import fs

from seamark.metaserver.iceberg.files.budget import decoded_budget
from seamark.metaserver.iceberg.files.parquet import AmbiguousColumn, Unreadable, places_of, with_mapped_ids
from seamark.metaserver.iceberg.files.parquet_reading import BoundedParquet
from seamark.metaserver.iceberg.metadata.name_mapping import NameMapping
from seamark.metaserver.iceberg.types.schema import Schema

DECODED_BYTES = 4 << 30
"""Memory that the columns of one file may take; a file whose columns take more is not indexed."""


@dataclass(frozen=True)
class Projection:
    """How columns of a table are matched with the columns of its files.

    `partitioned`: columns with an identity field in the file's partition spec; if the file lacks them, readers take
    their values from the partition. `mapping`: for files without field ids, which are not read without it.
    """

    schema: Schema
    partitioned: frozenset[int] = field(default_factory=frozenset)
    mapping: NameMapping | None = None


def read_columns(
    path: str,
    column_ids: Iterable[int],
    projection: Projection,
    *,
    filesystem: fs.FileSystem,
    rows: int,
) -> dict[int, pa.ChunkedArray]:
    """The columns by id, each with `rows` rows in the file's order. `path` has the form of the file system.

    Unreadable if the file has another number of rows, is encrypted, exceeds the memory limit, or has no unique column
    for an id.
    """
    distinct_ids = list(dict.fromkeys(column_ids))
    try:
        with filesystem.open_input_file(path) as source:
            file = BoundedParquet(source, path, decoded_budget(DECODED_BYTES))
            if file.rows != rows:
                raise Unreadable(path, f"it has {file.rows} rows; its manifest says {rows}")
            fields = with_mapped_ids(list(file.schema), projection.mapping)
            columns = file.plain_columns(places_of(fields, distinct_ids))
    except AmbiguousColumn as error:
        raise Unreadable(path, str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise Unreadable(path, f"it cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from error
    for column_id in distinct_ids:
        if column_id not in columns:
            if reason := _why_not_null(column_id, projection):
                raise Unreadable(path, reason)
            columns[column_id] = pa.chunked_array([pa.nulls(rows)])
    return {column_id: columns[column_id] for column_id in distinct_ids}


def _why_not_null(column_id: int, projection: Projection) -> str:
    """Why a column that the file lacks is not null for readers; empty if it is null."""
    column = projection.schema.column(column_id)
    if column is None:
        return f"the table's schema has no column {column_id}"
    if column_id in projection.partitioned:
        return f"it lacks column {column.name}, which readers take from its partition"
    if column.initial_default is not None:
        return f"it lacks column {column.name}, which readers fill with its default"
    return ""
