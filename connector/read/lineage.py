"""Row lineage of format version 3: which row it is, and which commit changed it last (Iceberg spec, "Row Lineage").

A file tells both of its rows by two columns, `_row_id` and `_last_updated_sequence_number`. Where it has none, or null,
a row's id is the file's first row id and the row's position, and its commit is the one that added the file. So rows
that move into another file take both along, written as columns; a row that is updated takes its id alone, and a new row
neither. A file without a first row id, as those from before the table was upgraded until a commit lists them, has rows
without lineage: both are null there, as Iceberg's readers have it, and the commit that takes rows over gives them new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from seamark.metaserver.iceberg.files.parquet import InDoubt
from seamark.metaserver.iceberg.metadata.metadata import ROW_LINEAGE_MIN_FORMAT_VERSION, TableMetadata
from seamark.metaserver.iceberg.types.reserved import LAST_UPDATED_SEQUENCE_NUMBER, ROW_ID
from seamark.metaserver.iceberg.types.schema import Field

ROW_ID_NAME, LAST_UPDATED_NAME = "_row_id", "_last_updated_sequence_number"
LINEAGE = (
    Field(ROW_ID, ROW_ID_NAME, False, "long"),
    Field(LAST_UPDATED_SEQUENCE_NUMBER, LAST_UPDATED_NAME, False, "long"),
)
NAMES = tuple(one.name for one in LINEAGE)
FIRST_ROW_ID, SEQUENCE_NUMBER = "first-row-id", "data-sequence-number"
"""Of a task's data file."""


def has_lineage(metadata: TableMetadata) -> bool:
    return metadata.format_version >= ROW_LINEAGE_MIN_FORMAT_VERSION


@dataclass(frozen=True)
class Inherited:
    """What the rows of a file have that say nothing themselves."""

    first_row_id: int
    sequence_number: int

    @staticmethod
    def of(file: Mapping[str, Any]) -> Inherited | None:
        """Of a plan's data file; None where its rows have no lineage. InDoubt where the plan does not say all."""
        first = file.get(FIRST_ROW_ID)
        if first is None:
            return None
        if file.get(SEQUENCE_NUMBER) is None:
            raise InDoubt("the plan does not tell its sequence number, so that the lineage of its rows is not known")
        return Inherited(int(first), int(file[SEQUENCE_NUMBER]))

    def filled(self, field_id: int, stored: pa.Array, positions: npt.NDArray[np.int64]) -> pa.Array:
        """One of the two columns, int64[rows], of rows at these positions; `stored` is what the file has."""
        if not stored.null_count:
            return stored
        if field_id == ROW_ID:
            return pc.coalesce(stored, pa.array(positions + self.first_row_id))
        return pc.fill_null(stored, self.sequence_number)
