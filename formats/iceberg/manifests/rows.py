"""Copy some rows of a decoded manifest to a new manifest that does not keep the other rows in memory.

Numbers and the rows' parts of the heap are copied, so the memory depends on the selected rows, not on the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seamark.formats.iceberg.manifests.manifest import DecodedManifest, PartitionFieldValues, Spans

Longs = NDArray[np.int64]


def select_rows(manifest: DecodedManifest, rows: Longs) -> DecodedManifest:
    """Return a manifest with some rows of another manifest.

    Args:
        manifest: The other manifest.
        rows: int64[n], the distinct rows of the manifest in ascending order. They keep their order.
    """
    subset = DecodedManifest(
        location=manifest.location,
        rows=len(rows),
        metadata=manifest.metadata,
        longs={name: values[rows] for name, values in manifest.longs.items()},
        texts={name: _select_spans(spans, rows) for name, spans in manifest.texts.items()},
        lists={name: _select_list(*list_columns, rows) for name, list_columns in manifest.lists.items()},
        partition=tuple(_select_partition_rows(values, rows) for values in manifest.partition),
        counts={name: _select_by_column(columns, rows, manifest.rows) for name, columns in manifest.counts.items()},
        bounds={name: _select_by_column(columns, rows, manifest.rows) for name, columns in manifest.bounds.items()},
        heap=manifest.heap,
    )
    return _compact_heap(subset)


def _select_spans(spans: Spans, rows: Longs) -> Spans:
    return Spans(spans.starts[rows], spans.lengths[rows])


def _select_list(counts: Any, values: Any, rows: Longs) -> tuple[Any, Any]:
    sizes = np.maximum(counts, 0).astype(np.int64)
    return counts[rows], values[_list_span_positions(np.cumsum(sizes)[rows] - sizes[rows], sizes[rows])]


def _select_partition_rows(values: PartitionFieldValues, rows: Longs) -> PartitionFieldValues:
    def select(array: Any) -> Any:
        return None if array is None else array[rows]

    spans = None if values.spans is None else _select_spans(values.spans, rows)
    return replace(
        values, longs=select(values.longs), doubles=select(values.doubles), valid=select(values.valid), spans=spans
    )


def _select_by_column(columns: dict[int, Any], rows: Longs, row_count: int) -> dict[int, Any]:
    """Return the counts or bounds of some rows, by column id.

    Args:
        columns: The ascending numbers of the rows with a value, and arrays of the values, by column id.
        rows: The rows to keep, ascending. They get new numbers from 0.
        row_count: The number of rows before the selection.
    """
    by_column = {}
    for column, (row_numbers, *values) in columns.items():
        if len(row_numbers) == row_count:  # Each row has a value of this column.
            by_column[column] = (np.arange(len(rows), dtype=row_numbers.dtype), *(array[rows] for array in values))
            continue
        positions = row_numbers.searchsorted(rows)
        present_rows = (
            np.flatnonzero(row_numbers.take(positions, mode="clip") == rows) if len(row_numbers) else positions[:0]
        )
        if len(present_rows):
            by_column[column] = (
                present_rows.astype(row_numbers.dtype),
                *(array[positions[present_rows]] for array in values),
            )
    return by_column


def _list_spans(manifest: DecodedManifest) -> Iterator[tuple[Longs, NDArray[np.int32]]]:
    """Yield the starts and the lengths of all texts, partition values and bounds in the heap of the manifest.

    The heap is the array with their bytes.
    """
    for spans in (*manifest.texts.values(), *(field.spans for field in manifest.partition if field.spans is not None)):
        yield spans.starts, spans.lengths
    for columns in manifest.bounds.values():
        for _, starts, lengths in columns.values():
            yield starts, lengths


def _compact_heap(manifest: DecodedManifest) -> DecodedManifest:
    """Return the manifest without the bytes that no value uses.

    The heap is the array with the bytes of all texts, partition values and bounds. A span is the position and the
    length of one of these values in the heap.
    """
    spans = list(_list_spans(manifest))
    lengths = [np.maximum(span_lengths, 0).astype(np.int64) for _, span_lengths in spans]
    sizes = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    heap = manifest.heap[_list_span_positions(np.concatenate([starts for starts, _ in spans]), sizes)]
    new_starts = iter(np.split(np.cumsum(sizes) - sizes, np.cumsum([len(array) for array in lengths])[:-1]))

    def move_spans(spans: Spans) -> Spans:
        return Spans(next(new_starts), spans.lengths)

    # The order must be the same as in `_list_spans`.
    texts = {name: move_spans(text_spans) for name, text_spans in manifest.texts.items()}
    partition = tuple(
        field if field.spans is None else replace(field, spans=move_spans(field.spans)) for field in manifest.partition
    )
    bounds = {
        name: {column: (row_numbers, next(new_starts), sizes) for column, (row_numbers, _, sizes) in columns.items()}
        for name, columns in manifest.bounds.items()
    }
    return replace(manifest, texts=texts, partition=partition, bounds=bounds, heap=heap)


def _list_span_positions(starts: Longs, sizes: Longs) -> Longs:
    """Return the positions of all bytes of some spans, int64[sum of sizes].

    The positions of a span are consecutive, from its start.
    """
    offsets = np.cumsum(sizes) - sizes
    return np.repeat(starts - offsets, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
