"""Whether the rows of some keys are as they were in a snapshot that somebody has read: the condition of a
read-modify-write (`read_snapshot_id` of `upserts`).

The rule kept: rows that are told to be unchanged have the same values in both snapshots, as many of each key. Rows that
a compaction or a copy-on-write has moved are unchanged. In doubt they have changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Conflict
from seamark.connector.read.scans import TaskReader, wanted_of
from seamark.connector.read.tables import OpenTable
from seamark.connector.write.row_locations import BatchKeys, FoundRows, LocatedKeys, locate
from seamark.metaserver.iceberg.expressions.expression import TRUE
from seamark.metaserver.iceberg.files.parquet import Unreadable

_CONFLICT = 409
KIND = "RowsChangedException"


def check_unchanged(
    client: SeamarkClient, opened: OpenTable, keys: BatchKeys, read_snapshot_id: int | None, way: str | None
) -> None:
    """Conflict where rows of the keys have changed between a snapshot (None: the empty table) and the one that is
    opened, with its history. Unreadable names a file."""
    if read_snapshot_id == opened.snapshot_id or not keys.count:
        return
    if not _is_ancestor(opened, read_snapshot_id):
        raise rows_changed(
            f"The snapshot {read_snapshot_id}, which the rows were read from, is not in the history of the table's "
            "branch, or has expired; read them again and compute the change anew"
        )
    before = locate(client, replace(opened, snapshot_id=read_snapshot_id), keys, way)
    after = locate(client, opened, keys, way)
    moved = _places(before) ^ _places(after)
    numbers = {number for _, _, number in moved}
    if not numbers or _rows(opened, before, numbers) == _rows(opened, after, numbers):
        return
    named = [field.name for field in keys.fields]
    first = {name: column[min(numbers)].as_py() for name, column in zip(named, keys.columns, strict=True)}
    raise rows_changed(
        f"Rows of up to {len(numbers):,} of the {keys.count:,} keys have changed since snapshot {read_snapshot_id}, "
        f"{str(first)[:200]} may be one; read them again and compute the change anew"
    )


def rows_changed(message: str) -> Conflict:
    return Conflict(message, status=_CONFLICT, kind=KIND)


def _is_ancestor(opened: OpenTable, snapshot_id: int | None) -> bool:
    known = {one.snapshot_id: one for one in opened.history}
    at = opened.snapshot_id
    for _ in range(len(known) + 1):
        if at == snapshot_id:
            return snapshot_id is None or snapshot_id in known
        if at is None or at not in known:
            return False
        at = known[at].parent_snapshot_id
    return False


def _places(located: LocatedKeys) -> set[tuple[str, int, int]]:
    """(path, position, number of the key) of each row."""
    return {
        (one.task.path, position, number)
        for one in located.files
        for position, number in zip(one.positions.tolist(), one.keys.tolist(), strict=True)
    }


def _rows(opened: OpenTable, located: LocatedKeys, numbers: set[int]) -> Counter[tuple[int, str]]:
    """The rows of some keys, by their values in the table's current columns."""
    return Counter(_values(opened, located, numbers))


def _values(opened: OpenTable, located: LocatedKeys, numbers: set[int]) -> Iterator[tuple[int, str]]:
    reader = TaskReader(wanted_of(opened, None, TRUE), opened.storage)
    wanted = np.fromiter(numbers, dtype=np.int64)
    for one in located.files:
        chosen = np.isin(one.keys, wanted)
        if not chosen.any():
            continue
        mine = FoundRows(one.task, one.positions[chosen], one.keys[chosen])
        rows = [row for batch in reader.read(mine.task, mine.positions) for row in batch.to_pylist()]
        if len(rows) != len(mine.keys):
            raise Unreadable(mine.task.path, "it has not all the rows that an index says are live in it")
        yield from zip(mine.keys.tolist(), map(repr, rows), strict=True)
