"""Chooses the reader for a query: Iceberg's reader, or Seamark's reader if it reads much less of the planned files.

Iceberg's reader reads all rows of the planned files, in the columns of the query and of its filter, except row groups
that statistics exclude. Seamark's reader reads only pages with a row that bitmap indexes select. If all pages have such
a row, the cost per row is about equal for both readers. But Spark starts two Python workers to plan Seamark's source,
and other workers to read it. `bench/writing/reader.py` measures both readers. The first two constants of this module
are the break-even points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap

from seamark.connector.client.client import SeamarkClient
from seamark.connector.read.tables import OpenTable, plan, restrict_to_rows
from seamark.formats.iceberg.expressions.expression import Expression

BREAK_EVEN_FRACTION = 0.75
"""The fraction of rows on pages with a selected row at which both readers take the same time, for large tables."""
BREAK_EVEN_ROWS = 1_000_000
"""The number of rows that Iceberg's reader reads in the time that Spark needs for its Python workers."""
PAGE_ROWS = 20_000
"""The number of rows in a page that Iceberg and Seamark write. It is the default of `write.parquet.page-row-limit`."""


@dataclass
class RemainingRows:
    """The numbers of rows of a table's planned files that each reader would read.

    Iceberg's reader reads all planned rows. Seamark's reader reads only pages (parts of a column in a file) with a
    selected row, but Spark needs time to start Python workers for it.
    """

    planned: int = 0
    """The number of rows in the planned files."""
    touched: int = 0
    """The number of rows on pages with a selected row, if all pages have `PAGE_ROWS` rows."""
    chosen: int = 0
    """The number of selected rows."""

    @property
    def suits_seamark(self) -> bool:
        return self.touched + BREAK_EVEN_ROWS < BREAK_EVEN_FRACTION * self.planned


def estimate_remaining_rows(client: SeamarkClient, table: OpenTable, where: Expression) -> RemainingRows:
    """Estimate the rows that each reader would read, from one plan and, if there are bitmap indexes, from bitmaps.

    Iceberg's reader reads all rows of the planned files. Seamark's reader reads only pages with a selected row.
    """
    remaining = RemainingRows()
    for task in restrict_to_rows(client, table, where, plan(client, table, where)):
        touched_rows = chosen_rows = task.records
        if task.rows is not None:
            rows = np.asarray(BitMap.deserialize(task.rows).to_array(), dtype=np.int64)
            touched_rows = min(task.records, PAGE_ROWS * len(np.unique(rows // PAGE_ROWS)))
            chosen_rows = len(rows)
        remaining.planned += task.records
        remaining.touched += touched_rows
        remaining.chosen += chosen_rows
    return remaining
