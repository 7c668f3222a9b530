"""The present layout of a table's files, read from the manifests and compared with simulated layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.formats.index.packing import MISSING
from seamark.metaserver.planner.advice.replay import SimulatedLayout
from seamark.metaserver.planner.advice.row_samples import RowSample, SampledColumn
from seamark.metaserver.planner.lookup.lookup import FoundFiles, RequestedColumn, Strings

_CURRENT_FILES_MAX = 20_000
"""The maximum number of files whose bounds are read. From a larger number of files, this number is drawn."""
_BOUNDS_MAX = 20_000
"""The maximum number of bounds that become values of a sampled column."""


def add_bounds(sample: RowSample, files: FoundFiles) -> RowSample:
    """Return the sample with the bounds of all files added to the values of its columns.

    The sampled files of a clustered table have only some of the values. A range between two sampled values would then
    match no file, although there are files with these values. If there are more than `_BOUNDS_MAX` bounds, evenly
    spaced bounds are used.
    """
    columns = {}
    for column_id, column in sample.columns.items():
        stats = files.find_statistics(RequestedColumn(column_id, column.kind))
        bounds = [_list_distinct_bounds(stats.read_bounds(side)) for side in ("lower", "upper")]
        added_values = np.unique(np.concatenate([*bounds, column.values[:0]]))
        if len(added_values) > _BOUNDS_MAX:
            added_values = added_values[np.linspace(0, len(added_values) - 1, _BOUNDS_MAX).astype(np.int64)]
        columns[column_id] = column.with_values(added_values)
    return RowSample(columns, sample.files, sample.rows)


def _list_distinct_bounds(bounds: object) -> npt.NDArray[Any]:
    """Return the distinct lower or upper bounds of a column, without missing bounds.

    Strings are an array of Python objects, because NumPy's own strings would drop trailing zero bytes.
    """
    if isinstance(bounds, Strings):
        texts = {text for text in bounds.list_values() if text is not None}
        values = np.empty(len(texts), dtype=object)
        values[:] = sorted(texts)
        return values
    numbers = np.asarray(bounds)
    return np.unique(numbers[np.isfinite(numbers) if numbers.dtype == np.float64 else numbers != MISSING])


def make_current_layout(files: FoundFiles, sample: RowSample) -> SimulatedLayout:
    """Return the layout of a table's files, by their column bounds. A file without bounds may have any value.

    The codes of a column are 1 for its smallest sampled value, 2 for the next value, and 0 for null. A large table is
    represented by a random part of its files.
    """
    lower, upper, nulls = {}, {}, {}
    records, sizes = files.read_longs("record_count"), files.read_longs("file_size_in_bytes").astype(np.float64)
    drawn_files = np.arange(files.file_count)
    if files.file_count > _CURRENT_FILES_MAX:
        rng = np.random.default_rng(files.file_count)
        drawn_files = np.sort(rng.choice(files.file_count, _CURRENT_FILES_MAX, replace=False))
    for column_id, column in sample.columns.items():
        stats = files.find_statistics(RequestedColumn(column_id, column.kind))
        count = len(column.values)
        low = _compute_bound_codes(stats.read_bounds("lower"), column, "left", drawn_files)
        high = _compute_bound_codes(stats.read_bounds("upper"), column, "right", drawn_files)
        null_counts = stats.counts("null_value_counts")[drawn_files]
        nulls_only = null_counts == records[drawn_files]
        lower[column_id] = np.where(low < 0, 1, low + 1).astype(np.int32)
        upper[column_id] = np.where(nulls_only, 0, np.where(high < 0, count, high)).astype(np.int32)
        nulls[column_id] = null_counts != 0
    weights = sizes[drawn_files] / max(1.0, sizes[drawn_files].sum())
    return SimulatedLayout(lower, upper, nulls, weights)


def _compute_bound_codes(
    bounds: object, column: SampledColumn, side: str, picked_files: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the number of distinct values below each bound of the picked files, int64[picked].

    The number is -1 for a file without a bound.

    If `side` is `left`, a value that equals the bound does not count. If it is `right`, the value counts.
    """
    if isinstance(bounds, Strings):
        all_texts = bounds.list_values()
        texts = [all_texts[number] for number in picked_files.tolist()]
        has_bound = np.array([text is not None for text in texts], dtype=np.bool_)
        places = np.array([np.searchsorted(column.values, text or b"", side) for text in texts], dtype=np.int64)  # type: ignore[call-overload]
    else:
        numbers = np.asarray(bounds)[picked_files]
        has_bound = np.isfinite(numbers) if numbers.dtype == np.float64 else numbers != MISSING
        places = np.searchsorted(column.values, numbers, side).astype(np.int64)  # type: ignore[call-overload]
    return np.where(has_bound, places, -1)
