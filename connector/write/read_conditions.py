"""Checks that rows have not changed since a snapshot: the condition of a read-modify-write (`read_snapshot_id`).

Rows have not changed if both snapshots have the same number of equal rows with the keys. A compaction or a
copy-on-write commit that only moves rows to new files does not change them. If the snapshots cannot be compared, the
rows count as changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from msgspec import UNSET, UnsetType

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Conflict
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable
from seamark.connector.write.row_locations import BatchKeys, LocatedKeys, MatchedRows, locate
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.files.parquet import Unreadable

_CONFLICT_STATUS = 409
KIND = "RowsChangedException"


def check_unchanged(
    client: SeamarkClient,
    source_table: OpenTable,
    keys: BatchKeys,
    read_snapshot_id: int | UnsetType | None,
    strategy: str | None,
) -> None:
    """Check that the rows with the keys are the same in an earlier snapshot and in the opened snapshot.

    Args:
        source_table: The table, with its history.
        keys: The keys.
        read_snapshot_id: The earlier snapshot, or None for the state before the first snapshot. With UNSET, nothing is
            checked.
        strategy: The strategy that locates the rows (`row_locations.locate`).

    Raises:
        Conflict: Rows have changed, or the earlier snapshot is not in the history of the table's branch.
        Unreadable: A file cannot be read.
    """
    if read_snapshot_id is UNSET or read_snapshot_id == source_table.snapshot_id or not keys.count:
        return
    if not _is_ancestor(source_table, read_snapshot_id):
        raise make_rows_changed_error(
            f"The snapshot {read_snapshot_id}, from which the rows were read, is not in the history of the table's "
            "branch, or has expired; read them again and repeat the change"
        )
    keys_before = locate(client, replace(source_table, snapshot_id=read_snapshot_id), keys, strategy)
    keys_after = locate(client, source_table, keys, strategy)
    differing_places = _collect_places(keys_before) ^ _collect_places(keys_after)
    ordinals = {ordinal for _, _, ordinal in differing_places}
    if not ordinals or _count_row_values(source_table, keys_before, ordinals) == _count_row_values(
        source_table, keys_after, ordinals
    ):
        return
    names = [field.name for field in keys.fields]
    first_key = {name: column[min(ordinals)].as_py() for name, column in zip(names, keys.columns, strict=True)}
    raise make_rows_changed_error(
        f"Rows of up to {len(ordinals):,} of the {keys.count:,} keys have changed since snapshot {read_snapshot_id}, "
        f"for example rows of {str(first_key)[:200]}; read them again and repeat the change"
    )


def make_rows_changed_error(message: str) -> Conflict:
    return Conflict(message, status=_CONFLICT_STATUS, kind=KIND)


def _is_ancestor(source_table: OpenTable, snapshot_id: int | None) -> bool:
    """Return whether a snapshot is the current snapshot of the table or an ancestor of it.

    None is the state before the first snapshot. The result is False if the table no longer has the snapshot, or a
    snapshot between it and the current snapshot.
    """
    by_id = {snapshot.snapshot_id: snapshot for snapshot in source_table.history}
    current_id = source_table.snapshot_id
    for _ in range(len(by_id) + 1):
        if current_id == snapshot_id:
            return snapshot_id is None or snapshot_id in by_id
        if current_id is None or current_id not in by_id:
            return False
        current_id = by_id[current_id].parent_snapshot_id
    return False


def _collect_places(located_keys: LocatedKeys) -> set[tuple[str, int, int]]:
    """Return the path, the position, and the index of the key of each located row."""
    return {
        (rows.task.path, position, ordinal)
        for rows in located_keys.files
        for position, ordinal in zip(rows.positions.tolist(), rows.keys.tolist(), strict=True)
    }


def _count_row_values(
    source_table: OpenTable, located_keys: LocatedKeys, ordinals: set[int]
) -> Counter[tuple[int, str]]:
    """Count the rows with these keys by the index of the key and the values of the current columns."""
    return Counter(_read_values(source_table, located_keys, ordinals))


def _read_values(source_table: OpenTable, located_keys: LocatedKeys, ordinals: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the index of the key and the values of each located row, for the keys with the indexes `ordinals`.

    The values are a text (`repr`), which can be hashed and counted, unlike a row with lists.
    """
    reader = TaskReader(plan_read(source_table, None, TRUE), source_table.storage, keys=source_table.keys)
    ordinal_array = np.fromiter(ordinals, dtype=np.int64)
    for rows in located_keys.files:
        is_chosen = np.isin(rows.keys, ordinal_array)
        if not is_chosen.any():
            continue
        rows_of_keys = MatchedRows(rows.task, rows.positions[is_chosen], rows.keys[is_chosen])
        values = [row for batch in reader.read(rows_of_keys.task, rows_of_keys.positions) for row in batch.to_pylist()]
        if len(values) != len(rows_of_keys.keys):
            raise Unreadable(
                rows_of_keys.task.path,
                "according to an index, some of its rows are live, but the file does not have them",
            )
        yield from zip(rows_of_keys.keys.tolist(), map(repr, values), strict=True)
