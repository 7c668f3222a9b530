"""Commits new files that replace old files with the same rows: the last step of clustering and compaction.

Invariant: the commit adds, loses and changes no row. The commit has the operation `replace`, so concurrent
appends are preserved, and a concurrent change of a replaced file is a conflict.

`commit_replacement` resolves these conflicts with the origins of the rows in the new files. Rows that were deleted
during the rewrite are deleted in the new files, with position deletes or deletion vectors that the same commit adds.
Therefore the rewrite is not repeated if a writer deletes a few rows. Groups of files that share no rows, for example
files of different partitions, are independent: if too many rows of a group were deleted, the commit leaves out only
this group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import sleep_before_attempt
from seamark.connector.client.errors import Conflict, InvalidRequest, Refused
from seamark.connector.client.names import Name
from seamark.connector.client.progress import add_expected_work, count_part
from seamark.connector.client.values import At
from seamark.connector.parquet.encryption.keys import read_table_keys
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.lineage import FIRST_ROW_ID, SEQUENCE_NUMBER, has_lineage
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan
from seamark.connector.write.appends import commit
from seamark.connector.write.copies import CopyCounts
from seamark.connector.write.delete_files import BY_FILE, GRANULARITY, DeletedRows, WrittenDeletes, write_deletes
from seamark.connector.write.row_origins import OriginLog
from seamark.connector.write.table_writer import WrittenFiles
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.parquet import Unreadable

REPLACE, OVERWRITE = "replace", "overwrite"
DELETED_ROWS_MAX_FRACTION, DELETED_ROWS_MAX_FRACTION_IF_FEWER_FILES = 0.25, 0.6
"""The maximum fractions of the rows in new files that may have been deleted during the rewrite.

New files with more deleted rows are not committed. The second fraction applies if there are fewer new files than
remaining old files, because readers then open fewer files until the next rewrite.
"""
COMMIT_ATTEMPTS_MAX = 8
"""The maximum number of attempts to commit one rewrite."""
FILES, ROWS, RETURNED, TABLE, ATTEMPTS_USED = "files-replaced", "rows-deleted", "rows-returned", "table", "attempts"
NOT_BETTER = "not-worth"
"""The reasons why a rewrite was wasted, in this order:

- Other commits have replaced all of its files.
- Other commits have deleted too many of its rows.
- Deleted rows of its files are live again, for example after a rollback.
- The table was replaced by a table with the same name.
- Concurrent commits conflicted in every attempt.
- The new files are not better than the old files (`NOT_BETTER`).
"""
_WAIT_S, _WAIT_MAX_S = 0.02, 0.5
_NO_ORIGINS: Longs = np.zeros(0, dtype=np.int64)


class Overtaken(Conflict):
    """Raised if a rewrite cannot be committed, because other commits have changed its files.

    Attributes:
        reason: What has changed: `FILES`, `ROWS`, `RETURNED` (rows that were deleted are live again), `TABLE`, or
            `ATTEMPTS_USED` if every attempt had a conflict.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"Other commits have changed the rewritten files ({reason})", status=409)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return Overtaken, (self.reason,)


def open_rewritable(client: SeamarkClient, table: Name, branch: str, *, history: bool = False) -> OpenTable:
    """Open the table at the newest snapshot of a branch, for a rewrite.

    Args:
        history: Whether to load all snapshots.

    Raises:
        InvalidRequest: The table has format version 1.
    """
    source_table = open_table(client, table, At(ref=branch), history=history)
    if source_table.metadata.format_version == 1:
        raise InvalidRequest(
            "The table has format version 1, whose files Seamark does not replace; upgrade the table to version 2"
        )
    return source_table


def build_replacement(
    source_table: OpenTable,
    tasks: Sequence[ScanTask],
    written_files: WrittenFiles,
    *,
    branch: str,
    other_tasks: Iterable[ScanTask] = (),
    deletes: Sequence[Mapping[str, Any]] = (),
    operation: str = REPLACE,
) -> dict[str, Any]:
    """Return the body of a commit that replaces the files of `tasks`.

    The commit also removes the delete files that apply to no other data file, because the new files do not contain the
    deleted rows. The server removes a delete file of a single data file together with the data file.

    Args:
        other_tasks: The tasks of the same plan that are not in `tasks`.
        deletes: Delete files that apply to the new files.
        operation: `OVERWRITE` if the rows of the new files differ from those of the old files.
    """
    used_delete_paths = {delete["file-path"] for task in other_tasks for delete in task.deletes}
    unused_deletes = {
        delete["file-path"]: delete
        for task in tasks
        for delete in task.deletes
        if not delete.get("referenced-data-file") and delete["file-path"] not in used_delete_paths
    }
    # A replacement does not depend on rows of other files, so an overwrite has an empty scope.
    return {
        "operation": operation,
        **({} if operation == REPLACE else {"scope": {"partitions": []}}),
        "branch": branch,
        "table-uuid": source_table.metadata.table_uuid,
        "schema-id": source_table.metadata.current_schema_id,
        "format-version": source_table.metadata.format_version,
        "read-snapshot-id": source_table.snapshot_id,
        "add": [*written_files.files, *deletes],
        "remove": [{"file-path": path} for path in (*(task.path for task in tasks), *unused_deletes)],
        "index-files": list(written_files.index_files),
    }


@dataclass(frozen=True)
class RewrittenFiles:
    """New files, and the origins of their rows.

    The origin of row `p` of the data file `tasks[i]` is `p` plus the total number of records of `tasks[:i]`.
    """

    table: OpenTable
    target: WriteTarget
    tasks: Sequence[ScanTask]
    written: WrittenFiles
    origins: OriginLog
    copies: CopyCounts = field(default_factory=CopyCounts)

    def exclude(self, written_files: WrittenFiles) -> WrittenFiles:
        """Return the new files without the files in `written_files`."""
        paths = {file["file-path"] for file in written_files.files}
        locations = {file["location"] for file in written_files.index_files}
        return WrittenFiles(
            tuple(file for file in self.written.files if file["file-path"] not in paths),
            tuple(file for file in self.written.index_files if file["location"] not in locations),
        )

    def rebase(self, source_table: OpenTable, tasks: Iterable[ScanTask]) -> FileReplacement:
        """Return the replacement of the old files that still exist in a later snapshot.

        For the rows that were deleted in the meantime, the method first writes delete files for the new files.

        Args:
            source_table: The table at the later snapshot.
            tasks: All tasks of the later snapshot.

        Raises:
            Overtaken: It is uncertain which rows are still live, or too few rows are live.
            Unreadable: A file cannot be read.
        """
        metadata = self.table.metadata
        if (metadata.table_uuid, metadata.format_version) != (
            source_table.metadata.table_uuid,
            source_table.metadata.format_version,
        ):
            raise Overtaken(TABLE)
        replaced_paths, current, other_tasks = {task.path for task in self.tasks}, {}, []
        for task in tasks:
            if task.path in replaced_paths:
                current[task.path] = task
            else:
                other_tasks.append(task)
        if not current:
            raise Overtaken(FILES)
        deleted_rows_by_path = {rows.path: rows for rows in self._find_deleted_rows(source_table, current)}
        new_files, old_tasks, bytes_left = list[dict[str, Any]](), list[ScanTask](), 0
        for numbers, files in self._group_files():
            current_tasks = [
                current[task.path] for task in map(self.tasks.__getitem__, numbers) if task.path in current
            ]
            dead_rows = sum(len(deleted_rows_by_path[file["file-path"]].positions) for file in files)
            dead_rows_max_fraction = (
                DELETED_ROWS_MAX_FRACTION_IF_FEWER_FILES
                if len(files) < len(current_tasks)
                else DELETED_ROWS_MAX_FRACTION
            )
            if current_tasks and dead_rows <= dead_rows_max_fraction * sum(file["record-count"] for file in files):
                new_files, old_tasks = [*new_files, *files], [*old_tasks, *current_tasks]
            else:
                other_tasks += current_tasks
                bytes_left += sum(self.tasks[number].size_bytes for number in numbers)
        if not old_tasks:
            raise Overtaken(ROWS)
        # A delete file for several data files could later not be removed without conflicts with other writers.
        target = replace(self.target, properties={**self.target.properties, GRANULARITY: BY_FILE})
        rows = [deleted_rows_by_path[file["file-path"]] for file in new_files]
        deletes = write_deletes(target, rows, Deletes(source_table.storage, source_table.metadata))
        written_files = self.written
        # The index files cover all data files of the rewrite, so they do not fit.
        if len(new_files) < len(written_files.files):
            written_files = WrittenFiles(tuple(new_files), (), written_files.skipped)
        return FileReplacement(source_table, written_files, old_tasks, other_tasks, deletes, bytes_left)

    def _group_files(self) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
        """Yield groups of old and new files such that different groups share no rows.

        The origin of a new row is the number of the old row among the rows of all old files. The origins show which old
        files the rows of a new file come from. Old files with rows in the same new file get the same group number. Each
        group consists of the indexes of the tasks of the old files, and the new files.
        """
        first_origins = np.cumsum([0, *(task.records for task in self.tasks)])
        group_numbers = np.arange(len(self.tasks))
        sources = []
        for file in self.written.files:
            origins = self.origins.create_origins(file["file-path"])
            # A run is a range of consecutive origins, with rows of the old files from `low` to `high` - 1. An old file
            # is in a range if more ranges start than end at or before it.
            low = np.searchsorted(first_origins, origins.starts, "right") - 1
            high = np.searchsorted(first_origins, origins.starts + origins.lengths, "left")
            range_changes = np.bincount(low, minlength=len(first_origins)) - np.bincount(
                high, minlength=len(first_origins)
            )
            numbers = np.flatnonzero(np.cumsum(range_changes))
            sources.append(numbers)
            if len(numbers):
                group_numbers[np.isin(group_numbers, group_numbers[numbers])] = group_numbers[numbers[0]]
        for group in np.unique(group_numbers).tolist():
            files = [
                file
                for file, numbers in zip(self.written.files, sources, strict=True)
                if len(numbers) and group_numbers[numbers[0]] == group
            ]
            yield np.flatnonzero(group_numbers == group).tolist(), files

    def _find_deleted_rows(self, source_table: OpenTable, current: Mapping[str, ScanTask]) -> list[DeletedRows]:
        """Return the rows of the new files that were deleted in the old files during the rewrite.

        The origin of a row is its number among the rows of all old files. The log of origins has the origin of each new
        row, so deleted rows of the old files can be found in the new files.

        Args:
            source_table: The table at its current snapshot.
            current: The current tasks of the old files, by path.

        Raises:
            Overtaken: Live rows of an old file are missing in the new files, for example after a rollback. Or the row
                lineage of an old file has changed.
        """
        positions, keys = plan_read(source_table, [], TRUE, positions=True), read_table_keys(source_table.name)
        reader = TaskReader(positions, source_table.storage, threads=False, keys=keys)
        dead_origins, live_origins = [_NO_ORIGINS], [_NO_ORIGINS]
        lineage = (FIRST_ROW_ID, SEQUENCE_NUMBER) if has_lineage(source_table.metadata) else ()
        first_origin = 0
        for task in self.tasks:
            rows = np.arange(first_origin, first_origin + task.records)
            first_origin += task.records
            current_task = current.get(task.path)
            if current_task is None:
                dead_origins.append(rows)
                continue
            if any(current_task.file.get(name) != task.file.get(name) for name in lineage):
                raise Overtaken(RETURNED)
            if _list_delete_names(current_task.deletes) != _list_delete_names(task.deletes):
                is_dead = np.ones(task.records, dtype=np.bool_)
                for batch in reader.read(current_task):
                    is_dead[batch.column(0).to_numpy()] = False
                dead_origins.append(rows[is_dead])
                live_origins.append(rows[~is_dead])
        files = [(file, self.origins.create_origins(file["file-path"])) for file in self.written.files]
        all_live_origins, all_dead_origins = np.concatenate(live_origins), np.concatenate(dead_origins)
        if sum(len(origins.find_positions(all_live_origins)) for _, origins in files) < len(all_live_origins):
            raise Overtaken(RETURNED)  # The missing rows were deleted when the rewrite read the files.
        return [
            DeletedRows(file["file-path"], file["spec-id"], file["partition"], origins.find_positions(all_dead_origins))
            for file, origins in files
        ]


@dataclass(frozen=True)
class FileReplacement:
    """A replacement of files in one snapshot.

    Attributes:
        written: The new files.
        tasks: The tasks of the old files.
        other_tasks: All other tasks of the same plan.
        deletes: The delete files for the new files.
    """

    table: OpenTable
    written: WrittenFiles
    tasks: Sequence[ScanTask]
    other_tasks: Sequence[ScanTask]
    deletes: WrittenDeletes = field(default_factory=WrittenDeletes)
    bytes_left: int = 0
    """The size of the old files that are not replaced, although they were rewritten."""

    @property
    def rows_deleted(self) -> int:
        return sum(int(file["record-count"]) for file in self.deletes.files)


def commit_replacement(
    client: SeamarkClient,
    new: RewrittenFiles,
    other_tasks: Sequence[ScanTask],
    *,
    branch: str,
    summary: Mapping[str, str],
    operation: str = REPLACE,
) -> FileReplacement:
    """Replace the files of `new.tasks`, and return the committed replacement.

    Rows that were deleted during the rewrite are deleted in the new files. Old files of which too many rows were
    deleted are not replaced. After an error, the new files are deleted, unless the outcome of the commit is unknown.

    Args:
        new: The new files.
        other_tasks: The other tasks of the same plan.

    Raises:
        Overtaken: Other commits have changed the old files too much, or conflicted with every attempt.
        Unreadable: A delete file of a concurrent commit cannot be read.
    """
    storage = new.target.storage
    attempt, current = 1, FileReplacement(new.table, new.written, new.tasks, other_tasks)
    while True:
        body = build_replacement(
            current.table,
            current.tasks,
            current.written,
            branch=branch,
            other_tasks=current.other_tasks,
            deletes=current.deletes.files,
            operation=operation,
        )
        cleanup_flags: list[bool] = []  # Not empty if no snapshot will ever contain the new files.
        try:
            commit(client, new.table.name, {**body, "summary": dict(summary)}, partial(cleanup_flags.append, True))
            new.exclude(current.written).discard(storage)
            return current
        except Refused as error:
            if not cleanup_flags:
                raise
            current.deletes.discard(storage)
            replacement = None
            try:
                if isinstance(error, Conflict):
                    if attempt == COMMIT_ATTEMPTS_MAX or not new.origins.is_complete:
                        raise Overtaken(ATTEMPTS_USED) from error
                    sleep_before_attempt(attempt - 1, first_s=_WAIT_S, max_s=_WAIT_MAX_S)
                    source_table = open_table(client, new.table.name, At(ref=branch))
                    replacement = new.rebase(source_table, plan(client, source_table))
            finally:
                if replacement is None:
                    new.written.discard(storage)
            if replacement is None:
                raise
            attempt, current = attempt + 1, replacement


Rewrite = Callable[[], RewrittenFiles | None]
"""A function that writes the rows of a batch to new files. The function can be pickled.

It returns None if the new files are not better than the old files.
"""
Batches = Iterable[tuple[Sequence[ScanTask], Rewrite]]
BatchRunner = Callable[[Batches], Batches]
"""A function that runs the rewrites of batches in this process, in other processes or on a cluster.

It yields the batches in any order. The function in each pair returns the result of the finished rewrite.
"""


def run_here(batches: Batches) -> Batches:
    """Return the batches unchanged. As a `BatchRunner`, this lets the rewrites run in this process, one by one.

    A rewrite runs when the caller calls the function in its pair.
    """
    return batches


def announce_batches(batches: Batches) -> Batches:
    """Add the files of each batch to the total work in the job's progress, and return the batches."""
    batch_list = list(batches)
    add_expected_work(
        sum(len(tasks) for tasks, _ in batch_list), sum(task.size_bytes for tasks, _ in batch_list for task in tasks)
    )
    return batch_list


@dataclass
class RewriteReport:
    """The result of a rewrite: the numbers and sizes of replaced and new data files, and the reasons for wasted work.

    Attributes:
        rows_deleted: The number of rows that writers deleted during the rewrite.
        conflicts: The number of batches that were not committed because writers changed too many of their rows.
        bytes_read: The size of all files that were rewritten, including wasted rewrites.
        bytes_wasted: The wasted part of `bytes_read`. Rows that writers deleted during a rewrite count as waste.
        wasted_by: `bytes_wasted` by the reason.
        given_up: The number of batches whose new files were not better than the old files.
        recheck_after_s: The time in seconds after which to run again, because files were left out that writers may
            replace soon. It is 0 if no files were left out.
        errors: The errors of batches that could not be read.
        files_skipped: The number of files that cannot be replaced: of another format, encrypted, or in the table twice.
        row_groups_copied: The number of row groups that were copied without decoding.
        bytes_copied: The size of these row groups.
        row_groups_encoded: The number of row groups that were not copied, by the reason (`write/copies.py`).
    """

    commits: int = 0
    conflicts: int = 0
    bytes_read: int = 0
    bytes_wasted: int = 0
    rows_deleted: int = 0
    given_up: int = 0
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    rows: int = 0
    recheck_after_s: float = 0.0
    deletes_applied: int = 0
    files_skipped: int = 0
    row_groups_copied: int = 0
    bytes_copied: int = 0
    row_groups_encoded: dict[str, int] = field(default_factory=dict)
    wasted_by: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def count_waste(self, reason: str, size_bytes: int) -> None:
        self.bytes_wasted += size_bytes
        if size_bytes:
            self.wasted_by[reason] = self.wasted_by.get(reason, 0) + size_bytes


def replace_batches(
    client: SeamarkClient,
    source_table: OpenTable,
    tasks: Sequence[ScanTask],
    batches: Batches,
    *,
    target_bytes: int,
    dry_run: bool,
    branch: str,
    runner: BatchRunner = run_here,
    summary: Mapping[str, str],
    operation: str = REPLACE,
    recheck_after_s: float = 0.0,
) -> RewriteReport:
    """Replace batches of files, each in a separate commit.

    Args:
        tasks: All tasks of the plan.
        batches: The files of each batch, with a function that writes their rows to new files. The function returns None
            if the new files are not better than the old files.
        dry_run: Whether to report the files that would be replaced, and commit nothing. The size of the new files is
            then an estimate.
        runner: A function that runs the rewrites, in this process or elsewhere.
        recheck_after_s: The value of this field in the report.

    Raises:
        Refused: The server refuses a commit.
    """
    report = RewriteReport(files_skipped=len(tasks) - len(select_rewritable(tasks)), recheck_after_s=recheck_after_s)
    for batch, rewrite in batches if dry_run else runner(batches):
        size_bytes = sum(task.size_bytes for task in batch)
        if dry_run:
            report.files_after += -(-size_bytes // target_bytes)
            report.bytes_after += size_bytes
        else:
            batch_paths = {task.path for task in batch}
            other_tasks = [task for task in tasks if task.path not in batch_paths]
            try:
                with count_part(len(batch), size_bytes):
                    new = rewrite()
                report.bytes_read += size_bytes
                if new is None:
                    report.given_up += 1
                    report.count_waste(NOT_BETTER, size_bytes)
                    continue
                outcome = commit_replacement(
                    client, new, other_tasks, branch=branch, summary=summary, operation=operation
                )
            except Conflict as error:
                report.conflicts += 1
                report.count_waste(error.reason if isinstance(error, Overtaken) else ATTEMPTS_USED, size_bytes)
                continue
            except (
                Unreadable,
                Unwritable,
                InvalidRequest,
            ) as error:
                # After the error of a batch, the other batches are still rewritten.
                report.errors.append(str(error))
                continue
            replaced_paths = {task.path for task in outcome.tasks}
            tasks = [task for task in tasks if task.path not in replaced_paths]
            useful = (size_bytes - outcome.bytes_left) * (1 - outcome.rows_deleted / max(1, outcome.written.rows))
            report.count_waste(ROWS, size_bytes - int(useful))
            batch, size_bytes = outcome.tasks, sum(task.size_bytes for task in outcome.tasks)
            report.commits += 1
            report.files_after += len(outcome.written.files)
            report.bytes_after += outcome.written.size_bytes
            report.rows += outcome.written.rows
            report.rows_deleted += outcome.rows_deleted
            report.row_groups_copied += new.copies.copied
            report.bytes_copied += new.copies.copied_bytes
            for reason, count in new.copies.encoded.items():
                report.row_groups_encoded[reason] = report.row_groups_encoded.get(reason, 0) + count
        report.files_before += len(batch)
        report.bytes_before += size_bytes
        report.deletes_applied += len({delete["file-path"] for task in batch for delete in task.deletes})
    return report


def select_rewritable(tasks: Collection[ScanTask]) -> list[ScanTask]:
    """Return the data files that a commit can replace, in the order of the plan.

    A commit removes files by their paths, so it cannot replace a file that was added to the table twice.

    Args:
        tasks: All tasks of a plan.
    """
    counts = Counter(task.path for task in tasks)
    return [task for task in tasks if counts[task.path] == 1 and _has_supported_format(task)]


def _has_supported_format(task: ScanTask) -> bool:
    """Return whether the data file and its delete files have a supported format and are not encrypted."""
    formats = {str(file.get("file-format", "")).lower() for file in task.deletes}
    is_parquet = str(task.file.get("file-format", "")).lower() == "parquet"
    return is_parquet and formats <= {"parquet", "puffin"} and not task.file.get("key-metadata")


def _list_delete_names(deletes: Iterable[Mapping[str, Any]]) -> set[tuple[Any, Any]]:
    return {(delete["file-path"], delete.get("content-offset")) for delete in deletes}
