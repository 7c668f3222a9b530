"""Which reader suits a query: Iceberg's own over the files that the server leaves, or ours, which has less to read in
them.

Iceberg's reads all rows of these files, of the columns of the query and of its filter, but for row groups that
statistics rule out. Ours reads the pages that have a row which bitmap indexes choose, at about the cost of a row that
Iceberg's has where all pages have one; and Spark plans it in two workers of Python and reads in others. `bench/writing/
reader.py` measures both, and the two numbers here are where they are even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap

from seamark.connector.client.client import SeamarkClient
from seamark.connector.read.tables import OpenTable, plan, with_rows
from seamark.metaserver.iceberg.expressions.expression import Expression

EVEN_SHARE = 0.75
"""Of the rows of the files, those on pages with a chosen row, where large tables are read as fast by both."""
EVEN_ROWS = 1_000_000
"""So many rows Iceberg's reader reads while Python's workers are talked to."""
PAGE_ROWS = 20_000
"""What Iceberg and we write to a page: `write.parquet.page-row-limit`, by default."""


@dataclass
class RemainingRows:
    """What the server leaves of a table, in rows."""

    held: int = 0
    """In the files that are left."""
    touched: int = 0
    """Of these, those on pages with a chosen row, if pages have `PAGE_ROWS`."""
    chosen: int = 0

    @property
    def suits_ours(self) -> bool:
        return self.touched + EVEN_ROWS < EVEN_SHARE * self.held


def found_by(client: SeamarkClient, table: OpenTable, where: Expression) -> RemainingRows:
    """By one plan, and the bitmaps where there are any."""
    found = RemainingRows()
    for task in with_rows(client, table, where, plan(client, table, where)):
        touched = chosen = task.records
        if task.rows is not None:
            rows = np.asarray(BitMap.deserialize(task.rows).to_array(), dtype=np.int64)
            touched = min(task.records, PAGE_ROWS * len(np.unique(rows // PAGE_ROWS)))
            chosen = len(rows)
        found.held += task.records
        found.touched += touched
        found.chosen += chosen
    return found
