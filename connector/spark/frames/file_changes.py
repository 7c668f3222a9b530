"""Changes the data files of located rows, on the driver or, if there are many files, in Spark tasks.

With merge-on-read, the rows are marked as deleted. With copy-on-write, the remaining rows of the files are written to
new files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from pyroaring import BitMap64
from pyspark.sql import SparkSession

from seamark.connector.groups import divide
from seamark.connector.read.tables import OpenTable, ScanTask
from seamark.connector.write.delete_files import WrittenDeletes
from seamark.connector.write.rewrites import rewrite_files
from seamark.connector.write.row_locations import MatchedRows
from seamark.connector.write.table_writer import WrittenFiles, discard_on_error, write_batches
from seamark.connector.write.target import WriteTarget, with_lineage
from seamark.connector.write.upserts import delete_by_position

DRIVER_COPY_BYTES_MAX = 64 << 20
"""The maximum size of the data files that the driver rewrites itself."""
DRIVER_FILES_MAX = 500
"""The maximum number of data files whose deletes the driver writes itself."""
_TASK_BYTES_MAX = 1 << 30
"""The maximum size of the data files that a task rewrites."""
T = TypeVar("T")


class PackedRows(msgspec.Struct, frozen=True):
    """Some rows of one data file, in a form that Spark tasks can send to each other.

    Attributes:
        file: The file in the JSON form of a scan plan.
        deletes: The delete files of the file, in the same form.
        positions: The positions of the rows in the file, as a 64-bit roaring bitmap.
    """

    file: dict[str, Any]
    deletes: list[dict[str, Any]]
    positions: bytes

    @staticmethod
    def pack(rows: MatchedRows) -> PackedRows:
        positions = BitMap64(rows.positions.astype(np.uint64)).serialize()
        return PackedRows(dict(rows.task.file), [dict(delete) for delete in rows.task.deletes], positions)

    def unpack(self) -> MatchedRows:
        positions = np.asarray(BitMap64.deserialize(self.positions).to_array(), dtype=np.int64)
        # The rows are only deleted by their positions, so the indexes of their keys are not packed.
        no_keys = np.zeros_like(positions)
        return MatchedRows(ScanTask(self.file, tuple(self.deletes)), positions, keys=no_keys)


@dataclass(frozen=True)
class FileChanges:
    """Changes the files of located rows, on the driver or, if there are many files, in Spark tasks."""

    spark: SparkSession
    table: OpenTable
    target: WriteTarget

    def copy_files(
        self, files: Sequence[MatchedRows], new: Sequence[pa.RecordBatch] = (), *, tracked: bool = False
    ) -> WrittenFiles:
        """Write the remaining rows of these files, and new rows, to new files (copy-on-write).

        The driver writes a small amount of data itself. If there is more, it writes only the new rows, and Spark tasks
        write the remaining rows. Nothing remains of a file of which all rows are deleted.

        Args:
            files: The rows to delete, grouped by file.
            new: The new rows.
            tracked: Whether the new rows have row ids.
        """
        partial_files = [file for file in files if not file.is_whole]
        if sum(file.task.size_bytes for file in partial_files) <= DRIVER_COPY_BYTES_MAX:
            return rewrite_files(self.table, self.target, files, new)
        new_files = write_batches(with_lineage(self.target) if tracked else self.target, new)
        with discard_on_error([new_files], self.target.storage):
            return WrittenFiles.join((new_files, self.copy_by_tasks(partial_files)))

    def copy_by_tasks(self, files: Sequence[MatchedRows]) -> WrittenFiles:
        """Write the remaining rows of these files to new files, in Spark tasks."""
        total = sum(file.task.size_bytes for file in files)
        bytes_per_task = min(_TASK_BYTES_MAX, -(-total // self._cores))
        groups = divide(files, lambda file: (file.task.size_bytes,), (bytes_per_task,))
        return WrittenFiles.join(_run_tasks(self.spark, partial(_copy, self.table, self.target), groups))

    def mark_deleted(self, files: Sequence[MatchedRows]) -> WrittenDeletes:
        """Write deletes of these rows (merge-on-read), in Spark tasks if there are too many files for the driver."""
        if len(files) <= DRIVER_FILES_MAX:
            return delete_by_position(self.table, self.target, files)
        groups = divide(files, lambda _: (1,), (max(DRIVER_FILES_MAX, -(-len(files) // self._cores)),))
        parts = _run_tasks(self.spark, partial(_mark, self.table, self.target), groups)
        return WrittenDeletes.join(parts)

    @property
    def _cores(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)


def _copy(source_table: OpenTable, target: WriteTarget, rows: Sequence[PackedRows]) -> WrittenFiles:
    return rewrite_files(source_table, target, [rows_of_file.unpack() for rows_of_file in rows], ())


def _mark(source_table: OpenTable, target: WriteTarget, rows: Sequence[PackedRows]) -> WrittenDeletes:
    return delete_by_position(source_table, target, [rows_of_file.unpack() for rows_of_file in rows])


def _run_tasks(
    spark: SparkSession, task: Callable[[Sequence[PackedRows]], T], groups: Iterable[Sequence[MatchedRows]]
) -> list[T]:
    """Run a task for each group of files, and return the results in the order of the groups.

    If a task fails after Spark's retries, the job fails, and files of the other tasks remain as orphan files.
    """
    context = spark.sparkContext
    packed_groups = [[PackedRows.pack(file) for file in group] for group in groups]
    return list(context.parallelize(packed_groups, len(packed_groups)).map(task).collect())
