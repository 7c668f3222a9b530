"""Partitions of files found: which file lies in which, without an object per file, and what each adds up to.

Partitions are told apart as Iceberg tells them (spec, "Scan Planning", note 3): by spec and by values, floats by their
bits but for NaN, which is one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from metaserver.iceberg.types.values import Value, value_key
from metaserver.index.blocks.packing import NONE, Form, Longs, PackedColumn
from metaserver.index.blocks.strings import strings
from metaserver.planner.lookup.lookup import FoundFiles, Segment


class PartitionFieldValue(NamedTuple):
    """A value as a manifest has it, of the type that the field had then."""

    field_id: int
    kind: str
    value: Value | None


class PartitionTuple(NamedTuple):
    spec_id: int
    fields: tuple[PartitionFieldValue, ...]


class FilesByPartition(NamedTuple):
    """`numbers` int64[files]: places in `partitions`, which come in the order of their first files."""

    numbers: Longs
    partitions: tuple[PartitionTuple, ...]

    def sums(self, values: Longs) -> list[int]:
        """Of one value a file, by partition; exact, and below zero counts as nothing."""
        totals = np.zeros(len(self.partitions), dtype=np.int64)
        np.add.at(totals, self.numbers, np.maximum(values, 0))
        return [int(total) for total in totals]

    def files(self) -> list[int]:
        return [int(count) for count in np.bincount(self.numbers, minlength=len(self.partitions))]


def grouped(found: FoundFiles) -> FilesByPartition:
    known: dict[tuple[object, ...], int] = {}
    partitions: list[PartitionTuple] = []
    parts: list[Longs] = []
    for segment in found.segments:
        examples, alike = _alike(segment)
        numbers = []
        for row in examples.tolist():
            partition = _partition(segment, row)
            key = (partition.spec_id, *((field.field_id, value_key(field.value)) for field in partition.fields))
            number = known.setdefault(key, len(partitions))
            if number == len(partitions):
                partitions.append(partition)
            numbers.append(number)
        parts.append(np.array(numbers, dtype=np.int64)[alike])
    return FilesByPartition(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64), tuple(partitions))


def _partition(segment: Segment, row: int) -> PartitionTuple:
    block = segment.block
    values = zip(block.partition_fields, block.partition(row), strict=True)
    return PartitionTuple(
        block.spec_id, tuple(PartitionFieldValue(field_id, kind, value) for (field_id, kind), value in values)
    )


def _alike(segment: Segment) -> tuple[Longs, Longs]:
    """(a row of the block for each of its partitions, int64[files]: which of those each file is like).

    In the order of their first files.
    """
    files = segment.files
    alike = np.zeros(files, dtype=np.int64)
    rows = segment.local()
    for column in segment.block.partition_columns:
        if column is None or (column.packed.width == 0 and column.packed.presence == NONE):
            continue
        _, of_column = np.unique(_ordinals(column, rows), return_inverse=True)
        # Renumbered after each column, so that the product stays below the square of the files.
        _, alike = np.unique(alike * (int(of_column.max(initial=0)) + 1) + of_column, return_inverse=True)
    _, first, alike = np.unique(alike, return_index=True, return_inverse=True)
    order = np.argsort(first)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return rows[first[order]], places[alike]


def _ordinals(column: PackedColumn, rows: Longs) -> Longs:
    """int64[rows] that are equal where the column's values are."""
    if column.packed.form == Form.STRINGS:
        known: dict[bytes | None, int] = {}
        return np.array([known.setdefault(text, len(known)) for text in strings(column, rows)], dtype=np.int64)
    if column.packed.form == Form.INTEGERS:
        numbers = column.longs()[rows]
    else:
        doubles = column.doubles()[rows]
        doubles[np.isnan(doubles)] = np.nan
        numbers = doubles.view(np.int64)
    if column.packed.presence == NONE:
        return numbers
    _, dense = np.unique(numbers, return_inverse=True)
    return np.where(column.present()[rows], dense, -1)
