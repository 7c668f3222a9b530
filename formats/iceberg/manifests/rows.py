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


def select_rows(decoded: DecodedManifest, rows: Longs) -> DecodedManifest:
    """Return a manifest with some rows of another manifest.

    Args:
        decoded: The other manifest.
        rows: int64[n], the distinct rows of the manifest in ascending order. They keep their order.
    """
    subset = DecodedManifest(
        location=decoded.location,
        rows=len(rows),
        metadata=decoded.metadata,
        longs={name: values[rows] for name, values in decoded.longs.items()},
        texts={name: _select_spans(spans, rows) for name, spans in decoded.texts.items()},
        lists={name: _select_list(*given, rows) for name, given in decoded.lists.items()},
        partition=tuple(_select_partition_rows(values, rows) for values in decoded.partition),
        counts={name: _read_by_column(columns, rows, decoded.rows) for name, columns in decoded.counts.items()},
        bounds={name: _read_by_column(columns, rows, decoded.rows) for name, columns in decoded.bounds.items()},
        heap=decoded.heap,
    )
    return _compact_heap(subset)


def _select_spans(spans: Spans, rows: Longs) -> Spans:
    return Spans(spans.starts[rows], spans.lengths[rows])


def _select_list(counts: Any, values: Any, rows: Longs) -> tuple[Any, Any]:
    sizes = np.maximum(counts, 0).astype(np.int64)
    return counts[rows], values[_list_span_positions(np.cumsum(sizes)[rows] - sizes[rows], sizes[rows])]


def _select_partition_rows(values: PartitionFieldValues, rows: Longs) -> PartitionFieldValues:
    def some(array: Any) -> Any:
        return None if array is None else array[rows]

    spans = None if values.spans is None else _select_spans(values.spans, rows)
    return replace(
        values, longs=some(values.longs), doubles=some(values.doubles), valid=some(values.valid), spans=spans
    )


def _read_by_column(columns: dict[int, Any], rows: Longs, of: int) -> dict[int, Any]:
    by_column = {}
    for column, (at, *values) in columns.items():
        if len(at) == of:  # Each row has a value of this column.
            by_column[column] = (np.arange(len(rows), dtype=at.dtype), *(array[rows] for array in values))
            continue
        positions = at.searchsorted(rows)
        is_present = np.flatnonzero(at.take(positions, mode="clip") == rows) if len(at) else positions[:0]
        if len(is_present):
            by_column[column] = (is_present.astype(at.dtype), *(array[positions[is_present]] for array in values))
    return by_column


def _list_spans(decoded: DecodedManifest) -> Iterator[tuple[Longs, NDArray[np.int32]]]:
    for spans in (*decoded.texts.values(), *(field.spans for field in decoded.partition if field.spans is not None)):
        yield spans.starts, spans.lengths
    for columns in decoded.bounds.values():
        for _, starts, lengths in columns.values():
            yield starts, lengths


def _compact_heap(decoded: DecodedManifest) -> DecodedManifest:
    """Return the manifest with a heap that contains only the bytes in its spans."""
    spans = list(_list_spans(decoded))
    lengths = [np.maximum(sizes_of_spans, 0).astype(np.int64) for _, sizes_of_spans in spans]
    sizes = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    heap = decoded.heap[_list_span_positions(np.concatenate([starts for starts, _ in spans]), sizes)]
    moved = iter(np.split(np.cumsum(sizes) - sizes, np.cumsum([len(counts) for counts in lengths])[:-1]))

    def again(spans: Spans) -> Spans:
        return Spans(next(moved), spans.lengths)

    # The order must be the same as in `_list_spans`.
    texts = {name: again(each) for name, each in decoded.texts.items()}
    partition = tuple(
        each if each.spans is None else replace(each, spans=again(each.spans)) for each in decoded.partition
    )
    bounds = {
        name: {column: (at, next(moved), sizes) for column, (at, _, sizes) in columns.items()}
        for name, columns in decoded.bounds.items()
    }
    return replace(decoded, texts=texts, partition=partition, bounds=bounds, heap=heap)


def _list_span_positions(starts: Longs, sizes: Longs) -> Longs:
    """Return the positions of all bytes of some spans, int64[sum of sizes].

    The positions of a span are consecutive, from its start.
    """
    offsets = np.cumsum(sizes) - sizes
    return np.repeat(starts - offsets, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
