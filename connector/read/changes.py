"""What changed between two snapshots of a branch, as tasks to read: rows inserted, and rows deleted.

The rule it keeps: the rows before, with the inserted and without the deleted ones, are the rows after, as multisets.
It is told from the plans of both snapshots, so deletes of every kind are: a file that only the later one has was
inserted, one that only the earlier one has was deleted, and of a file that both have those rows were deleted that the
later one's deletes took and the earlier one's did not. Rewriting files changes no rows (operation `replace`), so what
lies between two such snapshots is compared, never across one. Rows that a copy-on-write commit carried over into a new
file are deleted and inserted.

Plans are made without a filter: an index may rule a file out of one snapshot and not be there for the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.read.tables import OpenTable, ScanTask, plan
from seamark.metaserver.iceberg.metadata.snapshot import Snapshot

INSERT, DELETE = "insert", "delete"
OPERATION = "operation"
APPEND, REPLACE = "append", "replace"


class SnapshotChange(NamedTuple):
    kind: str
    """INSERT or DELETE."""
    task: ScanTask


def history(table: OpenTable, start: int | None, end: int) -> list[Snapshot]:
    """The snapshots after `start`, up to and with `end`, oldest first. `table` was opened with its history.

    BadRequest unless the start is an ancestor of the end, or the end has no ancestor that has expired.
    """
    known = {one.snapshot_id: one for one in table.history}
    found: list[Snapshot] = []
    at: int | None = end
    while at is not None and at != start:
        snapshot = known.get(at)
        if snapshot is None and start is None and found:
            raise BadRequest(f"Snapshot {at} has expired, so that what was there before it is not known: give a start")
        if snapshot is None or len(found) > len(known):
            raise BadRequest(f"Cannot find snapshot {at}: it is not, or no longer, in the table's metadata")
        found.append(snapshot)
        at = snapshot.parent_snapshot_id
    if at != start:
        raise BadRequest(f"Snapshot {start} is not an ancestor of snapshot {end}")
    return found[::-1]


def changes(client: SeamarkClient, table: OpenTable, start: int | None, end: int) -> Iterator[SnapshotChange]:
    """From the rows of `start` (none: the empty table) to those of `end`, both snapshots of the table."""
    for before, after in _segments(history(table, start, end), start):
        yield from _between(client, table, before, after)


def _segments(snapshots: Iterable[Snapshot], start: int | None) -> Iterator[tuple[int | None, int]]:
    """(before, after) without a `replace` in between."""
    before, after = start, start
    for one in snapshots:
        if one.summary_map().get(OPERATION) == REPLACE:
            if after is not None and after != before:
                yield before, after
            before = one.snapshot_id
        after = one.snapshot_id
    if after is not None and after != before:
        yield before, after


def _between(client: SeamarkClient, table: OpenTable, before: int | None, after: int) -> Iterator[SnapshotChange]:
    earlier: dict[str, ScanTask] = {}
    if before is not None:
        earlier = {one.path: one for one in plan(client, replace(table, snapshot_id=before))}
    for task in plan(client, replace(table, snapshot_id=after)):
        was = earlier.pop(task.path, None)
        if was is None:
            yield SnapshotChange(INSERT, task)
        elif list(was.deletes) != list(task.deletes):
            yield SnapshotChange(DELETE, replace(was, removed_by=task.deletes))
            if any(one not in task.deletes for one in was.deletes):  # deletes that were taken back, or replaced
                yield SnapshotChange(INSERT, replace(task, removed_by=was.deletes))
    for gone in earlier.values():
        yield SnapshotChange(DELETE, gone)
