"""Merges small data files, and applies delete files, partition by partition (compaction).

Invariant: a compaction adds, loses and changes no row, and rows keep their row ids and sequence numbers. Each
batch of files is a separate commit, so an interrupted compaction keeps the batches that it has committed.
Writers never wait. Rows that writers delete during the compaction are also deleted in the new files. If
writers change too many rows of a batch, the batch is not committed, and the next compaction plans it again.

Small files are merged by tiers: a file is rewritten only together with smaller files whose total size is at least the
size of the file. If a table grows by small commits, each row is therefore rewritten a logarithmic number of times.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.partitions import Partition
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name
from seamark.connector.client.policies import read_effective_properties
from seamark.connector.client.progress import advance
from seamark.connector.groups import divide
from seamark.connector.parquet.encryption.keys import ParquetKeys, read_table_keys
from seamark.connector.parquet.metrics import find_float_columns
from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.read_ahead import read_tasks
from seamark.connector.read.read_plan import BATCH_ROWS, plan_read
from seamark.connector.read.settled_files import now_ms, select_settled_tasks
from seamark.connector.read.tables import OpenTable, ScanTask, plan
from seamark.connector.write.copies import CopyCounts, CopyPolicy, CopyWriter
from seamark.connector.write.replacements import (
    BatchRunner,
    RewriteReport,
    RewrittenFiles,
    announce_batches,
    open_rewritable,
    replace_batches,
    run_here,
    select_rewritable,
)
from seamark.connector.write.row_origins import OriginLog
from seamark.connector.write.table_writer import IndexBuilder, TableWriter, WrittenFiles, discard_on_error
from seamark.connector.write.target import WriteTarget, create_target, has_lineage_columns, with_lineage
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.metadata.compaction import (
    COMPACTED_BY,
    DELETED_ROWS_MIN_FRACTION,
    MIN_FILES,
    MIN_FILES_DEFAULT,
    SMALL_FILE_MAX_FRACTION,
    get_small_file_fraction,
)
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    parse_int,
    parse_long,
)
from seamark.formats.iceberg.metadata.snapshot import MAIN

NEW_FILES_MAX_FRACTION = 0.75
"""The maximum number of new files of a batch without deletes, as a fraction of the number of its old files.

If there are more new files, the batch is not committed, because the next compaction would rewrite them again.
"""
REWRITE_DELETE_FILES_MIN = 5
"""The minimum number of delete files of a data file that is rewritten for this reason. Readers open all of them."""
_TIER_SIZE_RATIO_MAX = 2
"""The maximum ratio of the sizes of two files of one tier."""
BATCH_BYTES, BATCH_FILES = 1 << 30, 2000
"""The maximum total size and number of the files that a commit replaces."""
_CONCURRENT_PARTITIONS_MAX = 2
"""The number of partitions that are copied at the same time."""
_JOINED_BATCH_BYTES_MAX = 64 << 20
"""The maximum total size of the batches of small files that are joined and written as one batch."""


DeleteKey = tuple[str, int | None]
_Group = tuple[list[ScanTask], Partition]


@dataclass(frozen=True)
class CompactionPolicy:
    """The rules by which a compaction selects the files to merge.

    Attributes:
        min_files: The minimum number of small files in a partition that are merged.
        small_file_fraction: A file is small if its size is less than this fraction of `target_bytes`.
    """

    target_bytes: int = TARGET_FILE_BYTES_DEFAULT
    min_files: int = MIN_FILES_DEFAULT
    small_file_fraction: float = SMALL_FILE_MAX_FRACTION

    @staticmethod
    def from_metadata(metadata: TableMetadata, inherited_properties: Mapping[str, str]) -> CompactionPolicy:
        """Return the policy in the table's properties.

        Args:
            inherited_properties: The values for properties that the table does not set.

        Raises:
            InvalidRequest: A value is not a number.
        """
        properties = {**inherited_properties, **metadata.properties}
        return CompactionPolicy(
            max(1, parse_long(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT)),
            max(2, parse_int(properties, MIN_FILES, MIN_FILES_DEFAULT)),
            get_small_file_fraction(metadata),
        )


def compact(
    client: SeamarkClient,
    table: Name,
    *,
    policy: CompactionPolicy | None = None,
    dry_run: bool = False,
    settled: bool = False,
    branch: str = MAIN,
    runner: BatchRunner = run_here,
) -> RewriteReport:
    """Compact a branch of a table. The default policy comes from the table's properties.

    Args:
        dry_run: Whether to report the files that would be replaced, and commit nothing. The size of the new files is
            then an estimate.
        settled: Whether to leave out files that writers will probably replace soon.
        runner: A function that runs the rewrites, in this process or elsewhere.

    Raises:
        InvalidRequest: The table has format version 1.
        Unreadable: A file cannot be read.
        Refused: The server refuses a commit.
    """
    source_table = open_rewritable(client, table, branch, history=settled)
    if policy is None:
        policy = CompactionPolicy.from_metadata(source_table.metadata, read_effective_properties(client, table))
    began_ms = now_ms()
    tasks = list(plan(client, source_table, stats=find_float_columns(source_table.schema), sequence_numbers=settled))
    candidates: Sequence[ScanTask] = select_rewritable(tasks)
    recheck_after_s = 0.0
    if settled:
        choose = partial(_select_all, policy=policy)
        candidates, recheck_after_s = select_settled_tasks(source_table, candidates, choose, now_ms() - began_ms)
    task_batches = divide_tasks(_select_all(candidates, policy), BATCH_BYTES, BATCH_FILES)
    batches = ((batch, partial(_rewrite, source_table, batch)) for batch in task_batches)
    return replace_batches(
        client,
        source_table,
        tasks,
        announce_batches(batches),
        target_bytes=policy.target_bytes,
        dry_run=dry_run,
        branch=branch,
        runner=runner,
        recheck_after_s=recheck_after_s,
        summary={COMPACTED_BY: "seamark"},
    )


def _select_all(tasks: Sequence[ScanTask], policy: CompactionPolicy) -> Iterator[ScanTask]:
    """Return the files to replace, in the order of the plan."""
    shared_deletes = count_deletes(tasks)
    return (
        task for members in group_by_partition(tasks) for task in _select_in_partition(members, shared_deletes, policy)
    )


def divide_tasks(tasks: Iterable[ScanTask], bytes_max: int, files_max: int) -> Iterator[list[ScanTask]]:
    """Yield batches of consecutive files within the limits. A file above the limits is a separate batch."""
    return divide(tasks, lambda task: (task.size_bytes, 1), (bytes_max, files_max))


def divide_groups(groups: Iterable[list[ScanTask]], bytes_max: int, files_max: int) -> Iterator[list[list[ScanTask]]]:
    """Yield batches of consecutive groups of files within the limits.

    A group above the limits is a separate batch.
    """
    return divide(groups, lambda group: (sum(task.size_bytes for task in group), len(group)), (bytes_max, files_max))


def group_by_partition(tasks: Iterable[ScanTask]) -> Iterable[list[ScanTask]]:
    """Return the files of each partition as a group, in the order of the plan."""
    partitions: defaultdict[bytes, list[ScanTask]] = defaultdict(list)
    for task in tasks:
        partitions[msgspec.json.encode((task.spec_id, task.file.get("partition") or []))].append(task)
    return partitions.values()


def count_deletes(tasks: Iterable[ScanTask]) -> Counter[DeleteKey]:
    """Return the number of data files to which each delete file or deletion vector applies."""
    return Counter(_make_delete_key(delete) for task in tasks for delete in task.deletes)


def _make_delete_key(delete: Mapping[str, Any]) -> DeleteKey:
    """Return the identity of a delete file: its path and, for a deletion vector, its offset in the Puffin file."""
    return delete["file-path"], delete.get("content-offset")


def _select_in_partition(
    members: Sequence[ScanTask], shared: Counter[DeleteKey], policy: CompactionPolicy
) -> list[ScanTask]:
    """Return the files of a partition to replace: files with many deletes, and small files that are merged.

    Small files are divided into tiers by size (`_divide_into_tiers`). A tier is merged if it has at least
    `policy.min_files` files.
    """
    chosen_paths = {task.path for task in members if has_many_deletes(task, shared)}
    small_tasks = [
        task
        for task in members
        if task.size_bytes < policy.small_file_fraction * policy.target_bytes and task.path not in chosen_paths
    ]
    for tier in _divide_into_tiers(small_tasks):
        if len(tier) >= policy.min_files:
            chosen_paths.update(task.path for task in tier)
    return [task for task in members if task.path in chosen_paths]


def _divide_into_tiers(small_tasks: Sequence[ScanTask]) -> Iterator[list[ScanTask]]:
    """Divide files, from the smallest to the largest, into tiers.

    The files of a tier are merged if there are enough of them. If a table grows by small commits, each row is
    therefore rewritten a logarithmic number of times.

    A file is added to a tier if it is at most as large as all files of the tier together. The second file of a tier may
    be up to `_TIER_SIZE_RATIO_MAX` times as large as the first file.
    """
    tier: list[ScanTask] = []
    size_bytes = 0
    for task in sorted(small_tasks, key=lambda task: task.size_bytes):
        if tier and task.size_bytes > size_bytes * (1 if len(tier) > 1 else _TIER_SIZE_RATIO_MAX):
            yield tier
            tier, size_bytes = [], 0
        tier.append(task)
        size_bytes += task.size_bytes
    yield tier


def has_many_deletes(task: ScanTask, shared: Counter[DeleteKey]) -> bool:
    """Return whether a file has many delete files, or an estimate of its deleted rows is high.

    The estimate divides the rows of a delete file among the data files to which it applies.
    """
    deleted_rows = sum(delete.get("record-count", 0) / shared[_make_delete_key(delete)] for delete in task.deletes)
    return len(task.deletes) >= REWRITE_DELETE_FILES_MIN or deleted_rows >= DELETED_ROWS_MIN_FRACTION * max(
        1, task.records
    )


def _rewrite(source_table: OpenTable, batch: Sequence[ScanTask]) -> RewrittenFiles | None:
    """Write the rows of the files to new files. Return None if the new files are not worth a commit.

    They are not worth a commit if they are nearly as many as the old files, and no old file has deletes. The new files
    are then deleted.

    Raises:
        Unreadable: A file cannot be read.
        Unwritable: The rows cannot be written.
    """
    rewrite = rewrite_batch(source_table, batch)
    if len(rewrite.written.files) > NEW_FILES_MAX_FRACTION * len(batch) and not any(task.deletes for task in batch):
        rewrite.written.discard(rewrite.target.storage)
        return None
    return rewrite


def rewrite_batch(source_table: OpenTable, batch: Sequence[ScanTask]) -> RewrittenFiles:
    """Write the rows of the files to files of the current partition spec.

    Raises:
        Unreadable: A file cannot be read.
        Unwritable: The rows cannot be written.
    """
    target = create_target(source_table.metadata, source_table.storage, source_table.name)
    # In a table with a sort order, the rows of several files are sorted together.
    policy = CopyPolicy.from_properties(target.properties) if target.ordering is None else None
    return rewrite_rows(source_table, target, batch, policy)


def rewrite_rows(
    source_table: OpenTable,
    target: WriteTarget,
    batch: Sequence[ScanTask],
    policy: CopyPolicy | None,
    *,
    published: bool = True,
) -> RewrittenFiles:
    """Write the live rows of these files to new files, partition by partition.

    The result has the origin of each new row: the number of the old row if the rows of all files of the batch are
    numbered consecutively.

    Args:
        source_table: The table, with the schema of the new files.
        target: A target of the same schema.
        policy: The rules by which row groups are copied. If it is None, all rows are encoded again.
        published: Whether the files of the batch have been committed. If not, their rows have no row ids.

    Raises:
        Unreadable: A file cannot be read.
        Unwritable: The rows cannot be written.
    """
    origins = OriginLog()
    if published and has_lineage(source_table.metadata):
        target = with_lineage(target)
    first_origins = dict(
        zip([task.path for task in batch], accumulate([0, *(task.records for task in batch)]), strict=False)
    )
    to_encode, parts, counts, keys = list(batch), list[WrittenFiles](), CopyCounts(), read_table_keys(source_table.name)
    # Encrypted files are written only by the copier, so it also sorts their rows.
    if policy is None and keys is not None and target.ordering is not None:
        policy = replace(CopyPolicy.from_properties(target.properties), sorts=True)
    with discard_on_error(parts, target.storage):
        if policy is not None:
            copied_files, counts, to_encode = _PartitionCopier(source_table, target, policy, keys, first_origins).write(
                batch, origins
            )
            parts.append(copied_files)
        parts.append(_rewrite_rows(source_table, target, to_encode, first_origins, origins))
    written_files = WrittenFiles.join(parts).limit_indexes(target.storage)
    return RewrittenFiles(source_table, target, batch, written_files, origins, counts)


@dataclass(frozen=True)
class _PartitionCopier:
    """Copies the files of the partitions that have large row groups.

    Attributes:
        first_origins: The origins of the first rows of the files, by path.
    """

    table: OpenTable
    target: WriteTarget
    policy: CopyPolicy
    keys: ParquetKeys | None
    first_origins: Mapping[str, int]

    def write(self, batch: Sequence[ScanTask], origins: OriginLog) -> tuple[WrittenFiles, CopyCounts, list[ScanTask]]:
        """Copy the partitions for which copying row groups saves work.

        Returns:
            The written files, the counts, and the tasks of the files that were not copied.

        Raises:
            Unreadable: A file cannot be read.
            Unwritable: The rows cannot be written.
        """
        with CopyWriter(self.table, self.target, self.policy, origins, self.keys) as writer:
            groups, not_copied = list[_Group](), list[ScanTask]()
            for tasks in group_by_partition(batch):
                partition = writer.find_copyable_partition(tasks)
                if partition is None:
                    not_copied += tasks
                elif self.keys is None:
                    groups.append((tasks, partition))
                else:  # The key service is the user's code, which may not be thread-safe.
                    self._copy(writer, tasks, partition)
            threads = min(_CONCURRENT_PARTITIONS_MAX, len(groups), os.cpu_count() or 1)
            if threads > 1:
                written_files, counts = self._copy_concurrently(groups, threads, origins)
                return written_files, counts, not_copied
            for tasks, partition in groups:
                self._copy(writer, tasks, partition)
            return writer.close(), writer.counts, not_copied

    def _copy(self, writer: CopyWriter, tasks: Sequence[ScanTask], partition: Partition) -> None:
        writer.write([(task, self.first_origins[task.path]) for task in tasks], partition)
        advance(len(tasks), sum(task.size_bytes for task in tasks))

    def _copy_concurrently(
        self, groups: Sequence[_Group], threads: int, origins: OriginLog
    ) -> tuple[WrittenFiles, CopyCounts]:
        """Copy several partitions at the same time, because a single thread cannot use the whole bandwidth of the disk.

        Index files are built afterwards, so that there are as few index files as with one writer. After an error, all
        written files are deleted.
        """
        target_without_indexes, counts, parts = replace(self.target, indexes=()), CopyCounts(), list[WrittenFiles]()
        indexes = IndexBuilder(self.target.indexes)
        with ThreadPoolExecutor(threads, thread_name_prefix="copies") as pool:
            copies = [pool.submit(self._copy_separately, target_without_indexes, *group) for group in groups]
            try:
                for (tasks, _), copy in zip(groups, copies, strict=True):
                    log, written_files, group_counts = copy.result()
                    parts.append(written_files)
                    origins.take(log)
                    counts.add(group_counts)
                    # Only the job's own thread can report its progress.
                    advance(len(tasks), sum(task.size_bytes for task in tasks))
                for file in WrittenFiles.join(parts).files:
                    indexes.add(file, None)
                index_files, skipped_indexes = indexes.close()
            except BaseException:
                for copy in copies:
                    copy.cancel()
                wait(copies)
                written_parts = [
                    copy.result()[1] for copy in copies if not copy.cancelled() and copy.exception() is None
                ]
                WrittenFiles.join([*written_parts, WrittenFiles((), tuple(indexes.written))]).discard(
                    self.target.storage
                )
                raise
        return WrittenFiles.join([*parts, WrittenFiles((), index_files, skipped_indexes)]), counts

    def _copy_separately(
        self, target: WriteTarget, tasks: Sequence[ScanTask], partition: Partition
    ) -> tuple[OriginLog, WrittenFiles, CopyCounts]:
        """Copy a partition with its own writer, which deletes its files if an error occurs.

        The returned log has the origin of each new row: its number among the rows of all old files.
        """
        log = OriginLog()
        with CopyWriter(self.table, target, self.policy, log) as writer:
            writer.write([(task, self.first_origins[task.path]) for task in tasks], partition)
            return log, writer.close(), writer.counts


def _rewrite_rows(
    source_table: OpenTable,
    target: WriteTarget,
    tasks: Sequence[ScanTask],
    first_origins: Mapping[str, int],
    origins: OriginLog,
) -> WrittenFiles:
    """Read the live rows of these files, and write them to new files.

    The origin of a new row is the number of the old row among the rows of all old files.

    Args:
        source_table: The table at the snapshot that is compacted.
        target: The target of the new files.
        tasks: The files.
        first_origins: The origin of the first row of each file, by path.
        origins: The log to which the origins of the new rows are added.
    """
    names = [field.name for field in source_table.schema.fields]
    names += NAMES if has_lineage_columns(target) else ()
    read_plan = plan_read(source_table, names, TRUE, positions=True)
    # If the files have the target's spec, all rows of a partition stay in this partition. The new file of a partition
    # is then written while the files of the next partition are read.
    keeps_spec = all(task.spec_id == target.spec.spec_id for task in tasks)
    groups = list(group_by_partition(tasks)) if keeps_spec else [list(tasks)]
    task_batches = read_tasks(read_plan, source_table.storage, (task for members in groups for task in members))
    rows = 0
    with TableWriter(target, origins=origins) as writer, closing(task_batches):
        for members in groups:
            for batch, numbers in _replace_positions_by_origins(islice(task_batches, len(members)), first_origins):
                rows += batch.num_rows
                writer.write(batch, numbers)
            if keeps_spec:
                writer.close_files()
        written_files = writer.close()
    return written_files.discard_unless_complete(rows, target.storage)


def _replace_positions_by_origins(
    task_batches: Iterable[tuple[ScanTask, Iterable[pa.RecordBatch]]], first_origins: Mapping[str, int]
) -> Iterator[tuple[pa.RecordBatch, Longs]]:
    """Yield batches of rows without the column of positions, each with the origins of its rows.

    The origin of a row is its number among the rows of all files: the origin of the file's first row, plus the row's
    position in the file. Batches of small files are joined, because the fixed cost of a batch is higher than the cost
    of a thousand rows.
    """
    buffer, starts, rows, size_bytes = list[pa.RecordBatch](), list[int](), 0, 0
    for task, batches in task_batches:
        for batch in batches:
            if buffer and (rows + batch.num_rows > BATCH_ROWS or size_bytes + batch.nbytes > _JOINED_BATCH_BYTES_MAX):
                yield _concatenate(buffer, starts)
                buffer, starts, rows, size_bytes = [], [], 0, 0
            buffer.append(batch)
            starts.append(first_origins[task.path])
            rows, size_bytes = rows + batch.num_rows, size_bytes + batch.nbytes
        advance(1, task.size_bytes)  # The progress of the job: one more file has been read.
    if buffer:
        yield _concatenate(buffer, starts)


def _concatenate(batches: Sequence[pa.RecordBatch], starts: Sequence[int]) -> tuple[pa.RecordBatch, Longs]:
    """Join batches, and return the rows and their origins (their numbers among the rows of all files).

    The column of positions is the last column. It cannot be found by name, because a column of the table may have the
    same name.

    Args:
        batches: The batches. Their last column has the position of each row in its file.
        starts: The origin of the first row of the file of each batch.
    """
    joined_batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    column_count = joined_batch.num_columns - 1
    origins = joined_batch.column(column_count).to_numpy() + np.repeat(starts, [batch.num_rows for batch in batches])
    return joined_batch.select(list(range(column_count))), origins
