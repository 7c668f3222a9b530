"""Rewrites data files without the changed rows, and adds new rows (copy-on-write).

The new files contain all live rows of the rewritten files except the changed rows, with the current schema.
Therefore the commit that adds the new files can remove the rewritten files. In a table with row lineage,
remaining rows keep their row ids and sequence numbers. New files have the encryption of the old files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from seamark.connector.parquet.copy.protection import FileProtection
from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable
from seamark.connector.write.data_files import divide_by_protection, require_unchanged_scheme
from seamark.connector.write.row_locations import MatchedRows
from seamark.connector.write.table_writer import TableWriter, WrittenFiles, discard_on_error
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.formats.iceberg.expressions.expression import TRUE


def rewrite_files(
    source_table: OpenTable,
    target: WriteTarget,
    files: Sequence[MatchedRows],
    new: Iterable[pa.RecordBatch],
    protection: FileProtection | None = None,
) -> WrittenFiles:
    """Write the remaining rows of these files, and the new rows, to new files.

    A file of which all rows are changed is not read. New rows may have a column `_row_id`, which is not null for
    updated rows. If an error occurs, the written files are deleted.

    Args:
        source_table: The table.
        target: The write target of the table.
        files: The rows to leave out, grouped by file.
        new: The new rows.
        protection: The encryption of the files with new rows. Remaining rows keep their encryption.

    Raises:
        Unreadable: A file cannot be read.
        Unwritable: The rows cannot be written.
    """
    names = [field.name for field in source_table.schema.fields]
    if files and has_lineage(source_table.metadata):
        names, target = [*names, *NAMES], with_lineage(target)
    read_plan = plan_read(source_table, names, TRUE, positions=True)
    # The position column is the last column. It is not found by name, because a column may have the same name.
    columns = list(range(len(names)))
    files_with_remainder = {file.task.path: file for file in files if not file.is_whole}
    tasks_by_protection = divide_by_protection(
        (file.task for file in files_with_remainder.values()), target, source_table.keys
    )
    new_rows_scheme = None if protection is None else protection.scheme
    schemes = [
        None if file_protection is None else file_protection.scheme for file_protection, _ in tasks_by_protection
    ]
    if new_rows_scheme not in schemes:
        tasks_by_protection, schemes = [*tasks_by_protection, (protection, [])], [*schemes, new_rows_scheme]
    parts: list[WrittenFiles] = []
    with discard_on_error(parts, target.storage):
        for scheme, (file_protection, tasks) in zip(schemes, tasks_by_protection, strict=True):
            check = require_unchanged_scheme(scheme, target, source_table.keys)
            reader = TaskReader(read_plan, source_table.storage, keys=source_table.keys, check=check)
            with TableWriter(target, protection=file_protection) as writer:
                for task in tasks:
                    deleted_positions = files_with_remainder[task.path].positions
                    for batch in reader.read(task):
                        remaining = ~np.isin(batch.column(len(names)).to_numpy(), deleted_positions, assume_unique=True)
                        if remaining.any():
                            writer.write(batch.select(columns).filter(pa.array(remaining)))
                for batch in new if scheme == new_rows_scheme else ():
                    writer.write(batch)
                parts.append(writer.close())
    return WrittenFiles.join(parts)
