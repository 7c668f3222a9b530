"""Copy-on-write: data files written anew without the rows that go, and with others.

The rule it keeps: of each file every live row stays but those that are told to go, as it is read today; rows that
deletes took before stay away. So the files that were read can be removed in the commit that adds the new ones. Where
the table has row lineage, a row that stays is the row that it was, last updated when it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.scans import TaskReader, wanted_of
from seamark.connector.read.tables import OpenTable
from seamark.connector.write.appends import TableWriter, WrittenFiles
from seamark.connector.write.row_locations import FoundRows
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.metaserver.iceberg.expressions.expression import TRUE


def rewritten(
    opened: OpenTable, target: WriteTarget, files: Sequence[FoundRows], new: Iterable[pa.RecordBatch]
) -> WrittenFiles:
    """The rows of these files but those found, and the new ones. Unreadable, Unwritable: nothing is left behind.

    Files of which all rows were found are not read. Of new rows those are updated ones that have a `_row_id`, which may
    be null."""
    names = [one.name for one in opened.schema.fields]
    if files and has_lineage(opened.metadata):
        names, target = [*names, *NAMES], with_lineage(target)
    reader = TaskReader(wanted_of(opened, names, TRUE, positions=True), opened.storage)
    columns = list(range(len(names)))  # by number: the table may have a column that is called as the positions are
    with TableWriter(target) as writer:
        for one in (file for file in files if not file.is_whole):
            for batch in reader.read(one.task):
                stays = ~np.isin(batch.column(len(names)).to_numpy(), one.positions, assume_unique=True)
                if stays.any():
                    writer.write(batch.select(columns).filter(pa.array(stays)))
        for batch in new:
            writer.write(batch)
        return writer.close()
