"""Merges the files of one write before they are published, so that no reader sees small files.

If tasks write without a shuffle, each task writes a file for each partition. The small files of a partition are merged
as in `MERGE FILES`: row groups are copied if possible. A partition does not change if its files are large enough, or if
it has only one file. Nothing is visible before the commit. If a merge fails, the small files are committed, because a
write must not fail because of a merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.client.values import At
from seamark.connector.jobs.file_merges import GOOD_SIZE_FRACTION
from seamark.connector.read.tables import OpenTable, ScanTask, open_table
from seamark.connector.write.compaction import (
    BATCH_BYTES,
    BATCH_FILES,
    divide_groups,
    divide_tasks,
    group_by_partition,
    rewrite_rows,
)
from seamark.connector.write.copies import CopyPolicy
from seamark.connector.write.replacements import BatchRunner, RewrittenFiles, run_here
from seamark.connector.write.table_writer import WrittenFiles, discard_on_error
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.files.parquet import Unreadable

_FAILED = (InvalidRequest, Unreadable, Unwritable, OSError)


def merge_written(
    client: SeamarkClient,
    table: Name,
    target: WriteTarget,
    parts: Sequence[WrittenFiles],
    *,
    runner: BatchRunner = run_here,
    slots: int = 1,
) -> WrittenFiles:
    """Merge the files of the tasks of a write to the target size of the table, and return the files to commit.

    Merged files are deleted. If a batch cannot be merged, its files are returned unchanged. If an exception is raised,
    all files are deleted.

    Args:
        client: A client of the server.
        table: The table.
        target: The state of the table that writers need.
        parts: The files of each task.
        runner: Runs the merges of the batches, by default one after the other in this process.
        slots: The number of batches that `runner` runs at the same time.
    """
    with discard_on_error(parts, target.storage):
        return _merge_small_files(client, table, target, parts, runner, slots)


def _merge_small_files(
    client: SeamarkClient,
    table: Name,
    target: WriteTarget,
    parts: Sequence[WrittenFiles],
    runner: BatchRunner,
    slots: int,
) -> WrittenFiles:
    """Return the written files, of which small files are merged into larger files."""
    policy = CopyPolicy.from_properties(target.properties)
    tasks = [ScanTask(file, ()) for part in parts for file in part.files]
    groups = list(_find_mergeable(tasks, policy.target_bytes, slots))
    if not groups:
        return WrittenFiles.join(parts)
    source_table = open_table(client, table, At())
    # If the schema or the partition spec has changed in the meantime, the commit will detect the conflict.
    if not _has_same_layout(source_table, target):
        return WrittenFiles.join(parts)
    total_bytes = sum(task.size_bytes for group in groups for task in group)
    batches = [
        list(chain.from_iterable(batch)) for batch in divide_groups(groups, max(1, total_bytes // slots), BATCH_FILES)
    ]
    # With a sort order, row groups are not copied, because the rows of all files must be sorted together.
    merge_policy = policy if target.ordering is None else None
    merged_parts, replaced_paths = list[WrittenFiles](), set[str]()
    work = ((batch, partial(_rewrite, source_table, target, batch, merge_policy)) for batch in batches)
    with discard_on_error(merged_parts, target.storage):
        for batch, rewrite in runner(work):
            with suppress(*_FAILED):  # The small files of a failed batch are complete, and are returned unchanged.
                new = rewrite()
                if new is not None:
                    merged_parts.append(new.written)
                    replaced_paths.update(task.path for task in batch)
    remaining, replaced_parts = zip(*(_divide(part, replaced_paths) for part in parts), strict=True)
    WrittenFiles.join(replaced_parts).discard(target.storage)
    return WrittenFiles.join([*remaining, *merged_parts])


def _find_mergeable(tasks: Sequence[ScanTask], target_bytes: int, slots: int) -> Iterator[list[ScanTask]]:
    """Yield groups of small files of a partition. Each group is merged separately into fewer files.

    A group has about the bytes of one slot, so that all slots have equal work, but at least the size of one new file.
    """
    small_tasks = [task for task in tasks if task.size_bytes < GOOD_SIZE_FRACTION * target_bytes]
    bytes_per_slot = sum(task.size_bytes for task in small_tasks) // slots
    for members in group_by_partition(small_tasks):
        limit = min(BATCH_BYTES, max(target_bytes, bytes_per_slot))
        for group in divide_tasks(members, limit, BATCH_FILES):
            if len(group) > max(1, -(-sum(task.size_bytes for task in group) // target_bytes)):
                yield group


def _has_same_layout(source_table: OpenTable, target: WriteTarget) -> bool:
    metadata = source_table.metadata
    return (metadata.table_uuid or "", metadata.current_schema, metadata.default_spec.spec_id) == (
        target.table_uuid,
        target.schema,
        target.spec.spec_id,
    )


def _rewrite(
    source_table: OpenTable, target: WriteTarget, batch: Sequence[ScanTask], policy: CopyPolicy | None
) -> RewrittenFiles:
    return rewrite_rows(source_table, target, batch, policy, published=False)


def _divide(part: WrittenFiles, replaced_paths: set[str]) -> tuple[WrittenFiles, WrittenFiles]:
    """Return the files of a task that are committed, and the files that are deleted.

    An index file covers the data files of its task, and is committed if at least one of them is committed.
    """
    files = tuple(file for file in part.files if file["file-path"] not in replaced_paths)
    skipped_indexes = tuple((path, reason) for path, reason in part.skipped if path not in replaced_paths)
    remaining = WrittenFiles(files, part.index_files if files else (), skipped_indexes)
    replaced_files = tuple(file for file in part.files if file["file-path"] in replaced_paths)
    return remaining, replace(part, files=replaced_files, index_files=() if files else part.index_files, skipped=())
