"""The times of the partitions of files: when the partitions end, and when the oldest does."""

from __future__ import annotations

import numpy as np

from seamark.metaserver.iceberg.metadata.column_ttl import TimeColumn, partition_end_ms, time_columns
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.index.blocks.block import longs_at
from seamark.metaserver.index.blocks.packing import MISSING, Longs
from seamark.metaserver.planner.view.view import ENTRY_MASK, TableView

_FAR_MS = 1 << 62


def oldest_end_ms(view: TableView, rows: Longs, metadata: TableMetadata) -> int | None:
    """The end of the oldest partition of these rows, as time since the epoch; None if it is unknown for some. Rows
    without a time do not count; without others the end is far away."""
    oldest = _FAR_MS
    for number, local in by_block(view, rows):
        found = _partition_times(view, number, local, metadata)
        if found is None:
            return None
        time, values = found
        known = values[values != MISSING]
        if len(known):
            oldest = min(oldest, partition_end_ms(time, int(known.min())))
    return oldest


def by_block(view: TableView, entry_ids: Longs) -> list[tuple[int, Longs]]:
    """(block number, rows in the block) of entry ids, which are in order."""
    if not len(entry_ids):
        return []
    ends = entry_ids[[0, -1]]
    if (ends[0] ^ ends[1]) <= ENTRY_MASK:  # most plans keep few files, which are in one block
        return [(int(view.split(ends)[0][0]), entry_ids & ENTRY_MASK)]
    numbers, local = view.split(entry_ids)
    firsts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    stops = [*firsts[1:], len(entry_ids)]
    return [(int(numbers[first]), local[first:stop]) for first, stop in zip(firsts, stops, strict=True)]


def partition_ends_ms(view: TableView, number: int, local: Longs, metadata: TableMetadata) -> Longs | None:
    """int64[rows]: the end of the partition of each row of a block; MISSING for a partition without a time. None if the
    block's spec has no time, or several."""
    found = _partition_times(view, number, local, metadata)
    if found is None:
        return None
    time, values = found
    distinct, numbers = np.unique(values, return_inverse=True)
    ends = [MISSING if value == MISSING else partition_end_ms(time, value) for value in distinct.tolist()]
    return np.array(ends, dtype=np.int64)[numbers]


def _partition_times(
    view: TableView, number: int, local: Longs, metadata: TableMetadata
) -> tuple[TimeColumn, Longs] | None:
    """The values of the time by which the rows of a block are partitioned, MISSING for null."""
    block = view.blocks[number]
    spec = metadata.spec(block.spec_id)
    times = [] if spec is None else time_columns(metadata, spec)
    if len(times) != 1:
        return None
    for (field_id, _), column in zip(block.partition_fields, block.partition_columns, strict=True):
        if field_id == times[0].field_id:
            empty = np.full(len(local), MISSING, dtype=np.int64)
            return times[0], empty if column is None else longs_at(column, local)
    return None
