"""Finds the rows that were inserted and deleted between two snapshots of a branch, as scan tasks.

The rows of the earlier snapshot plus the inserted rows minus the deleted rows are the rows of the later snapshot. The
changes are computed from the plans of both snapshots. A file that is only in the later plan is inserted, and a file
that is only in the earlier plan is deleted. In a file of both plans, some rows may be deleted only by delete files of
the later plan. These rows are deleted. Rewrites of files (operation `replace`) do not change rows, so snapshots are
compared only between rewrites, and not across them. Rows that a copy-on-write commit copies to a new file are both
deleted and inserted.

The plans have no filter, because an index may prune a file in one snapshot and not in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.read.tables import OpenTable, ScanTask, plan
from seamark.formats.iceberg.metadata.replacement import is_replace
from seamark.formats.iceberg.metadata.snapshot import Snapshot

INSERT, DELETE = "insert", "delete"
OPERATION = "operation"
APPEND = "append"


class SnapshotChange(NamedTuple):
    """A scan task with inserted or deleted rows."""

    kind: str
    """The kind of the change: INSERT or DELETE."""
    task: ScanTask


def list_snapshots_between(table: OpenTable, start: int | None, end: int) -> list[Snapshot]:
    """Return the snapshots after `start`, up to and including `end`, the oldest first.

    `table` must be opened with its history.

    Raises:
        InvalidRequest: `start` is not an ancestor of `end`. Or `start` is None, and an ancestor of `end` has expired.
    """
    by_id = {snapshot.snapshot_id: snapshot for snapshot in table.history}
    path: list[Snapshot] = []
    snapshot_id: int | None = end
    while snapshot_id is not None and snapshot_id != start:
        snapshot = by_id.get(snapshot_id)
        if snapshot is None and start is None and path:
            raise InvalidRequest(
                f"Snapshot {snapshot_id} has expired, so the state before it is unknown; set a start snapshot"
            )
        if snapshot is None or len(path) > len(by_id):
            raise InvalidRequest(
                f"Cannot find snapshot {snapshot_id}: it is not in the table's metadata, or has expired"
            )
        path.append(snapshot)
        snapshot_id = snapshot.parent_snapshot_id
    if snapshot_id != start:
        raise InvalidRequest(f"Snapshot {start} is not an ancestor of snapshot {end}")
    return path[::-1]


def changes(client: SeamarkClient, table: OpenTable, start: int | None, end: int) -> Iterator[SnapshotChange]:
    """Yield the changes from snapshot `start` to snapshot `end`.

    If `start` is None, the changes start from an empty table.
    """
    for from_snapshot_id, to_snapshot_id in _divide_at_replaces(list_snapshots_between(table, start, end), start):
        yield from _compare_plans(client, table, from_snapshot_id, to_snapshot_id)


def _divide_at_replaces(snapshots: Iterable[Snapshot], start: int | None) -> Iterator[tuple[int | None, int]]:
    """Yield pairs of snapshots (before, after) with no `replace` between them.

    A snapshot with the operation `replace` rewrites files without a change of rows, so it is not compared.
    """
    from_snapshot_id, to_snapshot_id = start, start
    for snapshot in snapshots:
        if is_replace(snapshot):
            if to_snapshot_id is not None and to_snapshot_id != from_snapshot_id:
                yield from_snapshot_id, to_snapshot_id
            from_snapshot_id = snapshot.snapshot_id
        to_snapshot_id = snapshot.snapshot_id
    if to_snapshot_id is not None and to_snapshot_id != from_snapshot_id:
        yield from_snapshot_id, to_snapshot_id


def _compare_plans(
    client: SeamarkClient, table: OpenTable, from_snapshot_id: int | None, to_snapshot_id: int
) -> Iterator[SnapshotChange]:
    """Compare the files and delete files of two snapshots, and yield tasks for the deleted and inserted rows.

    A file may be in both snapshots with different delete files. Its deleted rows are those that only the later delete
    files remove (`removed_by`). If earlier delete files are missing later, the rows that only they remove are inserted.
    """
    earlier: dict[str, ScanTask] = {}
    if from_snapshot_id is not None:
        earlier = {task.path: task for task in plan(client, replace(table, snapshot_id=from_snapshot_id))}
    for task in plan(client, replace(table, snapshot_id=to_snapshot_id)):
        earlier_task = earlier.pop(task.path, None)
        if earlier_task is None:
            yield SnapshotChange(INSERT, task)
        elif list(earlier_task.deletes) != list(task.deletes):
            yield SnapshotChange(DELETE, replace(earlier_task, removed_by=task.deletes))
            # Delete files were removed or replaced between the two snapshots.
            if any(file not in task.deletes for file in earlier_task.deletes):
                yield SnapshotChange(INSERT, replace(task, removed_by=earlier_task.deletes))
    for task in earlier.values():
        yield SnapshotChange(DELETE, task)
