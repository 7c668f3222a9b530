"""The end times of the partitions of files."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.metadata.column_ttl import TimeColumn, compute_partition_end_ms, find_time_columns
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.packing import MISSING, NONE, Longs, PackedColumn
from seamark.metaserver.index.blocks.block import read_longs_at
from seamark.metaserver.planner.view.view import ENTRY_MASK, TableView

_FAR_MS = 1 << 62
"""A time in the far future."""
_LISTED_VALUES_MAX = 64
"""The maximum number of values whose minimum Python computes, which is faster than numpy for few values."""
_TIMES_BYTES, _TIME_BYTES = 500, 300
"""The estimated memory of a `_TimesOfView` without its time columns, and of one time column."""


def find_oldest_end_ms(view: TableView, rows: Longs, metadata: TableMetadata) -> int | None:
    """Return the end of the oldest time partition of these rows, in milliseconds since the epoch.

    Rows without a time are ignored. If no row has a time, the result is far in the future.

    Returns:
        None if the end of a partition is unknown.
    """
    oldest = _FAR_MS
    for number, ids_of_block in _group_ids_by_block(view, rows):
        time_and_column = _find_time_column(view, number, metadata)
        if time_and_column is None:
            return None
        time, column = time_and_column
        if column is None:
            continue
        if column.packed.width == 0 and column.packed.presence == NONE:  # All rows have the same value.
            oldest = min(oldest, compute_partition_end_ms(time, column.packed.base))
            continue
        values = read_longs_at(column, ids_of_block & ENTRY_MASK)
        if column.packed.presence != NONE:
            values = values[values != MISSING]
        if len(values):
            # For few values, Python is faster than NumPy.
            earliest = min(values.tolist()) if len(values) <= _LISTED_VALUES_MAX else int(values.min())
            oldest = min(oldest, compute_partition_end_ms(time, earliest))
    return oldest


def group_by_block(view: TableView, entry_ids: Longs) -> list[tuple[int, Longs]]:
    """Return (block number, rows of the block) for each block that contains some of the ascending entry ids."""
    return [(number, ids_of_block & ENTRY_MASK) for number, ids_of_block in _group_ids_by_block(view, entry_ids)]


def _group_ids_by_block(view: TableView, entry_ids: Longs) -> list[tuple[int, Longs]]:
    """Return (block number, entry ids in the block) for each block that contains some of the ascending entry ids."""
    if not len(entry_ids):
        return []
    first_id = int(entry_ids[0])
    if (first_id ^ int(entry_ids[-1])) <= ENTRY_MASK:  # Most plans keep few files, all in one block.
        return [(view.find_block_number(first_id), entry_ids)]
    numbers, _ = view.split_entry_ids(entry_ids)
    firsts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]
    stops = [*firsts[1:], len(entry_ids)]
    return [(int(numbers[first]), entry_ids[first:stop]) for first, stop in zip(firsts, stops, strict=True)]


def find_partition_ends_ms(view: TableView, block_number: int, rows: Longs, metadata: TableMetadata) -> Longs | None:
    """Return the end of each row's partition in milliseconds, int64[rows]; MISSING for a partition without a time.

    Args:
        view: The files of a snapshot, in blocks.
        block_number: The number of a block.
        rows: The rows of the block.
        metadata: The metadata of the table.

    Returns:
        None if the block's partition spec does not have exactly one field that contains a time or truncates a time.
    """
    time_and_column = _find_time_column(view, block_number, metadata)
    if time_and_column is None:
        return None
    time, column = time_and_column
    values = np.full(len(rows), MISSING, dtype=np.int64) if column is None else read_longs_at(column, rows)
    distinct, numbers = np.unique(values, return_inverse=True)
    ends = [MISSING if value == MISSING else compute_partition_end_ms(time, value) for value in distinct.tolist()]
    return np.array(ends, dtype=np.int64)[numbers]


def _find_time_column(
    view: TableView, number: int, metadata: TableMetadata
) -> tuple[TimeColumn, PackedColumn | None] | None:
    """Return the time column by which a block is partitioned, and the partition values of the column.

    The second item is None if all values are null.
    """
    block = view.blocks[number]
    derived_values = view.derived
    times = derived_values.get(_TimesOfView) or derived_values.keep(_TimesOfView())
    time = times.find_time_column(metadata, block.spec_id)
    kind_and_column = None if time is None else block.find_partition_column(time.partition_field_id)
    if time is None or kind_and_column is None:
        return None
    return time, None if kind_and_column[1] is None else block.read_column(kind_and_column[1])


class _CachedTimes(NamedTuple):
    """The time column of each spec, and the metadata in which the columns were found."""

    schemas: tuple[Schema, ...]
    schema_id: int
    specs: tuple[PartitionSpec, ...]
    time_columns: dict[int, TimeColumn | None]
    """The time column by spec id, or None if the spec does not have exactly one."""


class _TimesOfView:
    """The time column of each spec, for the metadata of the latest plan.

    The next plan nearly always uses the same metadata.
    """

    def __init__(self) -> None:
        self._cached_times: _CachedTimes | None = None

    @property
    def size_bytes(self) -> int:
        """The memory of the object.

        Schemas and specs are not included, because other metadata of the table share them.
        """
        cached_times = self._cached_times
        return _TIMES_BYTES if cached_times is None else _TIMES_BYTES + _TIME_BYTES * len(cached_times.time_columns)

    def find_time_column(self, metadata: TableMetadata, spec_id: int) -> TimeColumn | None:
        """Return the time column by which a spec partitions, or None if there is not exactly one such column."""
        cached_times = self._cached_times
        if (
            cached_times is None
            or cached_times.schema_id != metadata.current_schema_id
            or cached_times.schemas != metadata.schemas
            or cached_times.specs != metadata.partition_specs
        ):
            cached_times = self._cached_times = _CachedTimes(
                metadata.schemas, metadata.current_schema_id, metadata.partition_specs, {}
            )
        by_spec = cached_times.time_columns
        if spec_id not in by_spec:
            spec = metadata.spec(spec_id)
            times = [] if spec is None else find_time_columns(metadata, spec)
            by_spec[spec_id] = times[0] if len(times) == 1 else None
        return by_spec[spec_id]
