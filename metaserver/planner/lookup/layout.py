"""The layout of a column: the distribution of the data files' ranges over the column's values, as a few numbers.

A file's range extends from its lower to its upper bound. Each bound is replaced by its rank among all bounds. So the
computation uses integers for all types, and every count is exact. The size of the result depends only on the requested
numbers, not on the number of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.formats.index.packing import MISSING, Form, Longs
from seamark.metaserver.planner.lookup.lookup import FoundFiles, FoundStatistics, RequestedColumn, Strings

Positions = npt.NDArray[np.float64]
Key = int | float | bytes


class Axis(NamedTuple):
    """The distinct bounds of a column's files in ascending order, each with a position from 0 to 1 for a diagram.

    Attributes:
        keys: The bounds, an array of numbers or a list of bytes. The rank of a key is its index.
        by_value: Whether positions are proportional to the values. If it is False, they are proportional to the ranks.
    """

    keys: Any
    """An array of numbers, or a list of bytes. Ten million numbers as Python objects would need a gigabyte."""
    positions: Positions
    by_value: bool

    def get_key(self, rank: int) -> Key:
        """Return the key at a rank."""
        key: Key = self.keys[rank] if isinstance(self.keys, list) else self.keys[rank].item()
        return key

    def list_ranks(self, count: int) -> Longs:
        """Return the distinct ranks of the values at `count` evenly spaced positions.

        The positions are from 0 to 1. If no value is at a position, the result has the last value before the position,
        or the first value if there is none.
        """
        if not len(self.positions):
            return np.empty(0, dtype=np.int64)
        positions = np.searchsorted(self.positions, np.linspace(0.0, 1.0, count), side="right") - 1
        return np.unique(positions.clip(0)).astype(np.int64)


class Ranges(NamedTuple):
    """The ranges of the files of a snapshot whose bounds are known.

    A bound is represented by its rank among the sorted distinct bounds of all files.

    Attributes:
        lower: The lower bounds, as int64[files with bounds].
        upper: The upper bounds, as int64[files with bounds].
        files: The number of all data files, including files without a bound.
    """

    files: int
    lower: Longs
    upper: Longs

    def count_overlaps(self, ranks: Longs) -> Longs:
        """Return the number of files whose range contains each value, int64[ranks]."""
        started_counts = np.searchsorted(np.sort(self.lower), ranks, side="right")
        return started_counts - np.searchsorted(np.sort(self.upper), ranks, side="left")

    def compute_mean_depth(self, axis: Axis) -> float | None:
        """Return the mean depth of a file: the mean number of files whose range contains a value of the file.

        The method assumes that the values are evenly distributed over the range of the file. The result is the mean
        over all files, or None if there are no files.
        """
        if not len(self.lower):
            return None
        rank_widths = np.diff(axis.positions)
        # No bound is between two neighbouring values, so the depth between them is constant.
        started_counts = np.searchsorted(np.sort(self.lower), np.arange(len(rank_widths)), side="right")
        ended_counts = np.searchsorted(np.sort(self.upper), np.arange(len(rank_widths)), side="right")
        areas = np.append(0.0, np.cumsum((started_counts - ended_counts) * rank_widths))
        widths = axis.positions[self.upper] - axis.positions[self.lower]
        is_point = widths <= 0
        covered_areas = areas[self.upper] - areas[self.lower]
        mean_depths = np.divide(covered_areas, widths, out=np.zeros(len(widths)), where=~is_point)
        mean_depths[is_point] = self.count_overlaps(self.lower[is_point])
        return float(mean_depths.mean())


class Bar(NamedTuple):
    """A group of files with neighbouring ranges of a column's values, which a diagram shows as one bar.

    Attributes:
        low, high: The positions on the axis, from 0 to 1, of the lowest lower bound and the highest upper bound.
        median: The position on the axis of the median upper bound.
    """

    files: int
    low: float
    median: float
    high: float


class SizeClass(NamedTuple):
    """Files with at least `size_bytes`, a power of two or 0, and less than twice that size."""

    size_bytes: int
    files: int
    total_bytes: int


def read_layouts(snapshots: Sequence[FoundFiles], column: RequestedColumn, by_rank: bool) -> tuple[Axis, list[Ranges]]:
    """Return an axis with the bounds of a column, and the ranges of each snapshot's files on the axis.

    The type of `column` must have bounds. All snapshots share the axis, so that their diagrams can be compared.
    `by_rank` places the bounds evenly on the axis, instead of by their values.
    """
    bounds = [_read_known_bounds(files.find_statistics(column)) for files in snapshots]
    axis, ranks = _build_axis([keys for lower_and_upper in bounds for keys in lower_and_upper], by_rank)
    # The lower and the upper bounds of the snapshots alternate.
    pairs = zip(ranks[::2], ranks[1::2], strict=True)
    return axis, [
        Ranges(files.file_count, lower, upper) for files, (lower, upper) in zip(snapshots, pairs, strict=True)
    ]


def build_bars(ranges: Ranges, axis: Axis, count: int) -> list[Bar]:
    """Return at most `count` bars, ordered by lower and then by upper bound.

    A bar has the positions of the lowest lower bound, the median upper bound and the highest upper bound of its files.
    If there are at most `count` files, each file is a bar.
    """
    files = len(ranges.lower)
    order = np.lexsort((ranges.upper, ranges.lower))
    lower, upper = ranges.lower[order], ranges.upper[order]
    edges = np.linspace(0, files, min(count, files) + 1).astype(np.int64).tolist()
    bars = []
    for start, end in pairwise(edges):
        ends = np.sort(upper[start:end])
        bounds_of_bar = axis.positions[[lower[start], ends[(end - start - 1) // 2], ends[-1]]].tolist()
        bars.append(Bar(end - start, *bounds_of_bar))
    return bars


def count_size_classes(data_files: FoundFiles) -> list[SizeClass]:
    """Return the non-empty size classes in ascending order."""
    sizes = data_files.read_longs("file_size_in_bytes").clip(0)
    classes = np.frexp(sizes.astype(np.float64))[1]  # 2 ** (exponent - 1) <= size < 2 ** exponent
    numbers, class_positions = np.unique(classes, return_inverse=True)
    counts = np.bincount(class_positions, minlength=len(numbers))
    totals = np.zeros(len(numbers), dtype=np.int64)
    np.add.at(totals, class_positions, sizes)
    return [
        SizeClass(1 << (int(number) - 1) if number else 0, int(files), int(total))
        for number, files, total in zip(numbers, counts, totals, strict=True)
    ]


def _read_known_bounds(stats: FoundStatistics) -> tuple[Any, Any]:
    """Return the lower and the upper bounds of the files that have both, as arrays of numbers or lists of bytes."""
    lower, upper = stats.read_bounds("lower"), stats.read_bounds("upper")
    if isinstance(lower, Strings) or isinstance(upper, Strings):
        assert isinstance(lower, Strings)
        assert isinstance(upper, Strings)
        texts = zip(lower.list_values(), upper.list_values(), strict=True)
        pairs = [pair for pair in texts if None not in pair]
        return [low for low, _ in pairs], [high for _, high in pairs]
    if stats.form is Form.FLOATS:
        is_known = ~(np.isnan(lower) | np.isnan(upper))
    else:
        is_known = (lower != MISSING) & (upper != MISSING)
    return lower[is_known], upper[is_known]


def _build_axis(bounds: Sequence[Any], by_rank: bool) -> tuple[Axis, list[Longs]]:
    """Return the axis of all keys, and for each item of `bounds`, the ranks of its keys.

    Numbers are placed by value, unless `by_rank` is True, a key is infinite, or there is only one key. Strings are
    always placed by rank.
    """
    if any(isinstance(item, list) for item in bounds):
        texts: list[Key] = sorted({key for item in bounds for key in item})
        rank_by_key = {key: number for number, key in enumerate(texts)}
        ranks = [np.array([rank_by_key[key] for key in item], dtype=np.int64) for item in bounds]
        return Axis(texts, _place_evenly(len(texts)), False), ranks
    keys = np.unique(np.concatenate(list(bounds)))
    ranks = [np.searchsorted(keys, item).astype(np.int64) for item in bounds]
    values = keys.astype(np.float64)
    by_value = not by_rank and len(keys) > 1 and bool(np.isfinite(values[[0, -1]] / 2).all())
    if by_value:
        halves = values / 2  # The difference of two doubles may overflow, but the difference of their halves does not.
        positions = (halves - halves[0]) / (halves[-1] - halves[0])
    else:
        positions = _place_evenly(len(keys))
    return Axis(keys, positions, by_value), ranks


def _place_evenly(count: int) -> Positions:
    """Return evenly spaced positions from 0 to 1, float64[count]."""
    return np.linspace(0.0, 1.0, count) if count > 1 else np.zeros(count)
