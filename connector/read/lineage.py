"""Reads the row lineage of tables of format version 3: the id and the last sequence number of each row.

The Iceberg spec defines row lineage ("Row Lineage").

A file stores both values in the columns `_row_id` and `_last_updated_sequence_number`. If a value is missing or null,
the row id is the file's first row id plus the row's position, and the sequence number is that of the file. A rewrite
therefore writes both columns for rows that it moves. For an updated row, it writes only the row id. For a new row, it
writes neither column.

The rows of a file without a first row id have no lineage, so both values are null, as in Iceberg's readers. Such a file
is older than the table's upgrade, and no later commit has listed it. A commit that rewrites the rows assigns new ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.files.parquet import AmbiguousColumn
from seamark.formats.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.formats.iceberg.types.reserved import LAST_UPDATED_SEQUENCE_NUMBER, ROW_ID
from seamark.formats.iceberg.types.schema import Field

ROW_ID_NAME, LAST_UPDATED_NAME = "_row_id", "_last_updated_sequence_number"
LINEAGE = (
    Field(ROW_ID, ROW_ID_NAME, False, "long"),
    Field(LAST_UPDATED_SEQUENCE_NUMBER, LAST_UPDATED_NAME, False, "long"),
)
NAMES = tuple(field.name for field in LINEAGE)
FIRST_ROW_ID, SEQUENCE_NUMBER = "first-row-id", "data-sequence-number"
"""The fields of a data file in a scan task whose values the rows of the file inherit."""


def has_lineage(metadata: TableMetadata) -> bool:
    return metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION


@dataclass(frozen=True)
class InheritedLineage:
    """The lineage of the rows of a file, for the rows whose lineage the file does not store."""

    first_row_id: int
    sequence_number: int

    @staticmethod
    def from_file(file: Mapping[str, Any]) -> InheritedLineage | None:
        """Return the lineage of a data file of a plan, or None if its rows have no lineage.

        Raises:
            AmbiguousColumn: The plan has no sequence number.
        """
        first_row_id = file.get(FIRST_ROW_ID)
        if first_row_id is None:
            return None
        if file.get(SEQUENCE_NUMBER) is None:
            raise AmbiguousColumn("the plan has no sequence number for the file, so the row lineage is unknown")
        return InheritedLineage(int(first_row_id), int(file[SEQUENCE_NUMBER]))

    def fill(self, field_id: int, stored_values: pa.Array, positions: npt.NDArray[np.int64]) -> pa.Array:
        """Return a lineage column for the rows at the given positions, as int64[rows].

        Args:
            field_id: The id of the lineage column.
            stored_values: The column that the file stores, which may have nulls.
            positions: The positions of the rows.
        """
        if not stored_values.null_count:
            return stored_values
        if field_id == ROW_ID:
            return pc.coalesce(stored_values, pa.array(positions + self.first_row_id))
        return pc.fill_null(stored_values, self.sequence_number)
