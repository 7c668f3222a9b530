"""Defines read plans: the columns that a scan returns, and its filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.fs

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.read.lineage import LINEAGE, NAMES
from seamark.connector.read.tables import OpenTable
from seamark.formats.iceberg.expressions.arrow import to_row_type
from seamark.formats.iceberg.expressions.arrow_filters import check_filter
from seamark.formats.iceberg.expressions.expression import TRUE, Expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field, Schema

FILE, POSITION = "_file", "_pos"
"""Metadata columns (Iceberg spec: "Reserved Field IDs"): the path of the data file, and the position of the row in the
file.

The columns of row lineage are also metadata columns. If the table has a column with the name of a metadata column, the
table's column takes precedence.
"""
BATCH_ROWS = 65_536
"""The maximum number of rows of a batch."""
METADATA_COLUMNS = {FILE: pa.string(), POSITION: pa.int64(), **dict.fromkeys(NAMES, pa.int64())}


@dataclass
class ReadCounts:
    """The numbers of files, row groups and rows that a scan has read so far."""

    files: int = 0
    row_groups: int = 0
    row_groups_skipped: int = 0
    """The number of row groups of which at most the columns of the filter and of deletes were read."""
    row_groups_by_pages: int = 0
    """The number of row groups of which only some pages were read, except for columns of the filter and of deletes."""
    rows: int = 0


@dataclass(frozen=True)
class ReadPlan:
    """The columns to read of each task, and the filter on its rows. Instances can be pickled.

    Attributes:
        where: A filter that is bound to `schema`.
        metadata: The table metadata.
        names: The columns of the result in order. They are columns of the schema and metadata columns.
        positions: Whether the result has the row positions as a last column, int64. Unlike `_pos`, this column cannot
            be confused with a column of the table.
    """

    metadata: TableMetadata
    schema: Schema
    names: tuple[str, ...]
    where: Expression = TRUE
    positions: bool = False

    def __post_init__(self) -> None:
        """Check the columns and the filter.

        Raises:
            InvalidRequest: A column is unknown or repeated, or a column or the filter has an unsupported type.
        """
        column_names = {field.name for field in self.schema.fields}
        for name in self.names:
            if name not in column_names and name not in METADATA_COLUMNS:
                raise InvalidRequest(f"Cannot read {name!r}: the table's columns are {', '.join(sorted(column_names))}")
        if len(set(self.names)) != len(self.names):
            raise InvalidRequest(f"A column is repeated: {', '.join(self.names)}")
        try:
            check_filter(self.where)
            _ = self.arrow
        except ValueError as error:
            raise InvalidRequest(f"The columns and the filter cannot be read: {error}") from None

    @cached_property
    def fields(self) -> list[Field]:
        """The fields of `names` that are columns of the table."""
        by_name = {field.name: field for field in self.schema.fields}
        return [by_name[name] for name in self.names if name in by_name]

    @cached_property
    def lineage(self) -> list[Field]:
        """The fields of `names` that are columns of row lineage."""
        table_names = {field.name for field in self.fields}
        return [field for field in LINEAGE if field.name in self.names and field.name not in table_names]

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema of the result."""
        types = METADATA_COLUMNS | {field.name: to_row_type(field.type) for field in self.fields}
        fields = [pa.field(name, types[name]) for name in self.names]
        return pa.schema([*fields, *([pa.field(POSITION, pa.int64())] if self.positions else [])])


def plan_read(
    table: OpenTable, columns: Sequence[str] | None, where: Expression, *, positions: bool = False
) -> ReadPlan:
    """Return the read plan for the given columns, or for all columns if `columns` is None.

    Args:
        table: The table.
        columns: The names of the columns, or None.
        where: The filter.
        positions: Whether the result also has the position of each row in its file, as the last column.
    """
    names = [field.name for field in table.schema.fields] if columns is None else columns
    return ReadPlan(table.metadata, table.schema, tuple(names), where, positions)
