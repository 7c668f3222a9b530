"""Commits the same rows in other files: what clustering and compaction end with.

Invariant: no row is added, lost or changed. The commit has the operation `replace`: concurrent appends are preserved,
and a concurrent change of a replaced file is a conflict.

`commit_replacement` resolves such conflicts if it knows where the rows of the new files come from: rows that were
deleted meanwhile are deleted in the new files, by position deletes or deletion vectors that the same commit adds. So a
writer that deletes a few rows costs a rewrite no repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import back_off
from seamark.connector.client.errors import BadRequest, Conflict, Refused
from seamark.connector.client.values import At
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.lineage import FIRST_ROW_ID, SEQUENCE_NUMBER
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan
from seamark.connector.write.appends import commit
from seamark.connector.write.delete_files import BY_FILE, GRANULARITY, DeletedRows, WrittenDeletes, write_deletes
from seamark.connector.write.row_origins import Longs, OriginLog
from seamark.connector.write.table_writer import WrittenFiles
from seamark.connector.write.target import WriteTarget
from seamark.metaserver.iceberg.expressions.expression import TRUE
from seamark.metaserver.iceberg.files.parquet import Unreadable

DELETED_MAX = 0.25
"""A rewrite is given up if a larger part of its rows was deleted meanwhile: the next rewrite would repeat it."""
ATTEMPTS = 8
"""Commits of one rewrite."""
_WAIT_S, _WAIT_MAX_S = 0.02, 0.5
_NONE: Longs = np.zeros(0, dtype=np.int64)


def replacement(
    opened: OpenTable,
    tasks: Sequence[ScanTask],
    written: WrittenFiles,
    *,
    branch: str,
    others: Iterable[ScanTask] = (),
    deletes: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The body of the commit that replaces the files of `tasks`. `others`: the other tasks of the same plan. `deletes`:
    delete files of the new files.

    Also removes delete files that apply to no other data file; their rows are not written again. The server removes
    delete files of a single data file together with it.
    """
    kept = {delete["file-path"] for task in others for delete in task.deletes}
    unused = {
        delete["file-path"]: delete
        for task in tasks
        for delete in task.deletes
        if not delete.get("referenced-data-file") and delete["file-path"] not in kept
    }
    return {
        "operation": "replace",
        "branch": branch,
        "table-uuid": opened.metadata.table_uuid,
        "schema-id": opened.metadata.current_schema_id,
        "format-version": opened.metadata.format_version,
        "read-snapshot-id": opened.snapshot_id,
        "add": [*written.files, *deletes],
        "remove": [{"file-path": path} for path in (*(task.path for task in tasks), *unused)],
        "index-files": list(written.index_files),
    }


@dataclass(frozen=True)
class RewrittenFiles:
    """New files, and the origins of their rows: row `p` of the data file `tasks[i]` has the origin `p` plus the record
    counts of the tasks before it."""

    opened: OpenTable
    target: WriteTarget
    tasks: Sequence[ScanTask]
    written: WrittenFiles
    origins: OriginLog

    def replaced_at(self, opened: OpenTable, tasks: Iterable[ScanTask]) -> FileReplacement | None:
        """The replacement of what is left of the files at a later snapshot with these tasks. None if it is uncertain
        which rows live on, or too few do. Unreadable."""
        known = self.opened.metadata
        if (known.table_uuid, known.format_version) != (opened.metadata.table_uuid, opened.metadata.format_version):
            return None
        replaced, current, others = {task.path for task in self.tasks}, {}, []
        for task in tasks:
            if task.path in replaced:
                current[task.path] = task
            else:
                others.append(task)
        deleted = self._deleted_rows(opened, current) if current else None
        if deleted is None or sum(len(rows.positions) for rows in deleted) > DELETED_MAX * self.written.rows:
            return None
        # Files of deletes for several data files could be in the way of other writers.
        target = replace(self.target, properties={**self.target.properties, GRANULARITY: BY_FILE})
        deletes = write_deletes(target, deleted, Deletes(opened.storage, opened.metadata))
        return FileReplacement(opened, list(current.values()), others, deletes)

    def _deleted_rows(self, opened: OpenTable, current: Mapping[str, ScanTask]) -> list[DeletedRows] | None:
        """The rows of the new files that no longer live in `current`, the old files by path. None if rows of an old
        file live that the new files lack, as after a rollback."""
        reader = TaskReader(plan_read(opened, [], TRUE, positions=True), opened.storage, threads=False)
        dead, living = [_NONE], [_NONE]
        first = 0
        for task in self.tasks:
            rows = np.arange(first, first + task.records)
            first += task.records
            now = current.get(task.path)
            if now is None:
                dead.append(rows)
                continue
            if any(now.file.get(name) != task.file.get(name) for name in (FIRST_ROW_ID, SEQUENCE_NUMBER)):
                return None
            if _names(now.deletes) != _names(task.deletes):
                is_dead = np.ones(task.records, dtype=np.bool_)
                for batch in reader.read(now):
                    is_dead[batch.column(0).to_numpy()] = False
                dead.append(rows[is_dead])
                living.append(rows[~is_dead])
        files = [(file, self.origins.of(file["file-path"])) for file in self.written.files]
        all_living, all_dead = np.concatenate(living), np.concatenate(dead)
        if sum(len(origins.places_of(all_living)) for _, origins in files) < len(all_living):
            return None
        return [
            DeletedRows(file["file-path"], file["spec-id"], file["partition"], origins.places_of(all_dead))
            for file, origins in files
        ]


@dataclass(frozen=True)
class FileReplacement:
    """A replacement at one snapshot: the old files, the other tasks of the same plan, and deletes of the new files."""

    opened: OpenTable
    tasks: Sequence[ScanTask]
    others: Sequence[ScanTask]
    deletes: WrittenDeletes = field(default_factory=WrittenDeletes)

    @property
    def rows_deleted(self) -> int:
        return sum(int(file["record-count"]) for file in self.deletes.files)


def commit_replacement(
    client: SeamarkClient,
    new: RewrittenFiles,
    others: Sequence[ScanTask],
    *,
    branch: str,
    summary: Mapping[str, str],
) -> int:
    """Replaces the files of `new.tasks`, and deletes rows in the new files that were deleted meanwhile; returns their
    number. `others`: the other tasks of the same plan.

    Conflict if the rows that live on are uncertain or too few, or other commits are always faster. Unreadable if a
    delete file of another commit cannot be read. After an error the new files are deleted, unless the outcome of the
    commit is unknown."""
    storage = new.target.storage
    attempt, current = 1, FileReplacement(new.opened, new.tasks, others)
    while True:
        body = replacement(
            current.opened,
            current.tasks,
            new.written,
            branch=branch,
            others=current.others,
            deletes=current.deletes.files,
        )
        unreferenced: list[bool] = []
        try:
            commit(client, new.opened.name, {**body, "summary": dict(summary)}, partial(unreferenced.append, True))
            return current.rows_deleted
        except Refused as error:
            if not unreferenced:
                raise
            current.deletes.discard(storage)
            following = None
            try:
                if isinstance(error, Conflict) and attempt < ATTEMPTS and new.origins.is_complete:
                    back_off(attempt - 1, first_s=_WAIT_S, most_s=_WAIT_MAX_S)
                    opened = open_table(client, new.opened.name, At(ref=branch))
                    following = new.replaced_at(opened, plan(client, opened))
            finally:
                if following is None:
                    new.written.discard(storage)
            if following is None:
                raise
            attempt, current = attempt + 1, following


@dataclass
class RewriteReport:
    """Files and bytes of the replaced and of the new data files. `rows_deleted`: rows that writers deleted meanwhile;
    `conflicts`: batches that were given up because writers changed too much of them; `bytes_wasted`: size of the files
    of these batches; `given_up`: batches that are not worth a commit; `errors`: why others could not be read;
    `files_skipped`: files whose format cannot be rewritten."""

    commits: int = 0
    conflicts: int = 0
    bytes_wasted: int = 0
    rows_deleted: int = 0
    given_up: int = 0
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    rows: int = 0
    deletes_applied: int = 0
    files_skipped: int = 0
    errors: list[str] = field(default_factory=list)


def replace_batches(
    client: SeamarkClient,
    opened: OpenTable,
    tasks: Sequence[ScanTask],
    batches: Iterable[tuple[Sequence[ScanTask], Callable[[], RewrittenFiles | None]]],
    *,
    target_bytes: int,
    dry_run: bool,
    branch: str,
    summary: Mapping[str, str],
) -> RewriteReport:
    """Replaces batches of files, each in a commit of its own. `tasks`: all of the plan. A batch has a function that
    writes its rows to new files, or returns None if it is not worth a commit.

    `dry_run`: reports the files that would be replaced and commits nothing; the size of the new files is then an
    estimate. Refused."""
    report = RewriteReport(files_skipped=sum(not is_rewritable(task) for task in tasks))
    for batch, rewrite in batches:
        size_bytes = sum(task.size_bytes for task in batch)
        if dry_run:
            report.files_after += -(-size_bytes // target_bytes)
            report.bytes_after += size_bytes
        else:
            chosen = {task.path for task in batch}
            others = [task for task in tasks if task.path not in chosen]
            try:
                new = rewrite()
                rows_deleted = 0
                if new is not None:
                    rows_deleted = commit_replacement(client, new, others, branch=branch, summary=summary)
            except Conflict:
                report.conflicts += 1
                report.bytes_wasted += size_bytes
                continue
            except (Unreadable, BadRequest) as error:  # the other batches are not worse for it
                report.errors.append(str(error))
                continue
            if new is None:
                report.given_up += 1
                continue
            tasks = others
            report.commits += 1
            report.files_after += len(new.written.files)
            report.bytes_after += new.written.size_bytes
            report.rows += new.written.rows
            report.rows_deleted += rows_deleted
        report.files_before += len(batch)
        report.bytes_before += size_bytes
        report.deletes_applied += len({delete["file-path"] for task in batch for delete in task.deletes})
    return report


def is_rewritable(task: ScanTask) -> bool:
    """Whether the data file and its delete files have a format that is read, and are not encrypted."""
    formats = {str(file.get("file-format", "")).lower() for file in task.deletes}
    is_parquet = str(task.file.get("file-format", "")).lower() == "parquet"
    return is_parquet and formats <= {"parquet", "puffin"} and not task.file.get("key-metadata")


def _names(deletes: Iterable[Mapping[str, Any]]) -> set[tuple[Any, Any]]:
    return {(delete["file-path"], delete.get("content-offset")) for delete in deletes}
