"""Grouping of files by partition, without an object for each file, and sums of values for each partition.

Partitions are distinguished as in Iceberg (spec, "Scan Planning", note 3): by spec and values. Floats are compared by
their bits, except that all NaNs are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.types.values import Value, make_value_key
from seamark.formats.index.packing import NONE, Form, Longs, PackedColumn
from seamark.metaserver.index.blocks.strings import read_strings
from seamark.metaserver.planner.lookup.lookup import FoundFiles, Segment


class PartitionFieldValue(NamedTuple):
    """A partition value in a manifest, with the type that the field had when the manifest was written."""

    field_id: int
    kind: str
    value: Value | None


class PartitionTuple(NamedTuple):
    """The partition values of a file, with the id of its partition spec."""

    spec_id: int
    fields: tuple[PartitionFieldValue, ...]


class FilesByPartition(NamedTuple):
    """The partitions of files, in the order of their first files.

    Attributes:
        numbers: int64[files]: the index of each file's partition in `partitions`.
    """

    numbers: Longs
    partitions: tuple[PartitionTuple, ...]

    def sum_values(self, values: Longs) -> list[int]:
        """Return the exact sum of the files' values for each partition.

        Negative values count as 0.
        """
        totals = np.zeros(len(self.partitions), dtype=np.int64)
        np.add.at(totals, self.numbers, np.maximum(values, 0))
        return [int(total) for total in totals]

    def count_files(self) -> list[int]:
        """Return the number of files of each partition."""
        return [int(count) for count in np.bincount(self.numbers, minlength=len(self.partitions))]


def group_by_partition(data_files: FoundFiles) -> FilesByPartition:
    """Group files by partition. Partitions are in the order of their first files.

    The rows of each block are grouped first, so that Python reads only one partition tuple for each group.
    """
    number_by_partition: dict[tuple[object, ...], int] = {}
    partitions: list[PartitionTuple] = []
    parts: list[Longs] = []
    for segment in data_files.segments:
        examples, group_numbers = _group_rows(segment)
        numbers = []
        for row in examples.tolist():
            partition = _read_partition(segment, row)
            key = (partition.spec_id, *((field.field_id, make_value_key(field.value)) for field in partition.fields))
            number = number_by_partition.setdefault(key, len(partitions))
            if number == len(partitions):
                partitions.append(partition)
            numbers.append(number)
        parts.append(np.array(numbers, dtype=np.int64)[group_numbers])
    return FilesByPartition(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), tuple(partitions))


def _read_partition(segment: Segment, row: int) -> PartitionTuple:
    """Return the partition tuple of a file."""
    block = segment.block
    values = zip(block.partition_fields, block.partition(row), strict=True)
    return PartitionTuple(
        block.spec_id, tuple(PartitionFieldValue(field_id, kind, value) for (field_id, kind), value in values)
    )


def _group_rows(segment: Segment) -> tuple[Longs, Longs]:
    """Group the rows of a block by partition.

    Returns:
        The first row of each partition, and for each file the position of its partition among these rows,
        int64[files]. Partitions are in the order of their first files.
    """
    files = segment.row_count
    group_numbers = np.zeros(files, dtype=np.int64)
    rows = segment.compute_local_rows()
    for column in segment.block.partition_columns:
        if column is None or (column.packed.width == 0 and column.packed.presence == NONE):
            continue
        _, value_numbers = np.unique(_read_ordinals(column, rows), return_inverse=True)
        # Numbers are assigned again after each column, so that the product stays below the square of the number of
        # files.
        _, group_numbers = np.unique(
            group_numbers * (int(value_numbers.max(initial=0)) + 1) + value_numbers, return_inverse=True
        )
    _, first, group_numbers = np.unique(group_numbers, return_index=True, return_inverse=True)
    order = np.argsort(first)
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return rows[first[order]], ranks[group_numbers]


def _read_ordinals(column: PackedColumn, rows: Longs) -> Longs:
    """Return numbers that are equal if and only if the column's values are equal, int64[rows].

    Floats are compared by their bits, and all NaNs get the same bits. All missing values have the same number.
    """
    if column.packed.form == Form.STRINGS:
        ids: dict[bytes | None, int] = {}
        return np.array([ids.setdefault(text, len(ids)) for text in read_strings(column, rows)], dtype=np.int64)
    if column.packed.form == Form.INTEGERS:
        numbers = column.read_longs()[rows]
    else:
        doubles = column.doubles()[rows]
        doubles[np.isnan(doubles)] = np.nan
        numbers = doubles.view(np.int64)
    if column.packed.presence == NONE:
        return numbers
    _, ordinals = np.unique(numbers, return_inverse=True)
    return np.where(column.present()[rows], ordinals, -1)
