"""Estimates of how many files a scan would read if the table were sorted or clustered by columns of its filter.

A clustering divides a large partition into several layers, and the rows of each layer equally into files of the target
size. So the number of files that a filter keeps follows from the share of the rows that match.

This share is measured in a sample of the column (`column_samples.py`). Without a sample, the share of a
range follows from the bounds and record counts of the files that partition pruning keeps. The estimate
assumes that the rows of a file are evenly distributed over the file's range. The share of a value follows
from the number of distinct values in the table's statistics. Without this number, there is no estimate.

A layout that the clustering policy of the table requests already is not proposed, and a proposed layout keeps
the columns of the policy. The explanation of a plan shows the estimates. Planning does not use them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.expressions.expression import And, Bound, Op
from seamark.formats.iceberg.expressions.projection import project
from seamark.formats.iceberg.expressions.ranges import find_end_of_prefix
from seamark.formats.iceberg.metadata.clustering import COLUMNS_MAX as POLICY_COLUMNS_MAX
from seamark.formats.iceberg.metadata.clustering import LAYER_BYTES, LAYER_FILES, ClusteringLayout
from seamark.formats.iceberg.metadata.properties import TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT, parse_count
from seamark.formats.iceberg.metadata.statistics import NDV, THETA
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.packing import MISSING, Form, Longs, encode_key, get_form
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.planner.advice.column_samples import NOT_SAMPLED, ColumnSample, Samples
from seamark.metaserver.planner.lookup.lookup import (
    FoundFiles,
    FoundStatistics,
    RequestedColumn,
    Strings,
    find_files_at,
)
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import FileSelection, never_expires

COLUMNS_MAX = 4
"""The maximum number of columns of a clustering. With more columns, each column would divide the rows too coarsely."""
_WORK_MAX = 50_000_000
"""The maximum number of comparisons of values with files, for one column."""
_STRING_FILES_MAX = 100_000
"""The maximum number of files with string bounds, which are Python objects and need more memory."""
_BOUNDED_ROWS_MIN_FRACTION = 0.5
"""The minimum share of rows that are in files with bounds. With a smaller share, there is no estimate."""
_STRING_DIGITS_BYTES = 6
"""The number of bytes after the common prefix of strings that are converted to a number.

A double represents such a number exactly.
"""
_PROPOSED_FILES_MAX_FRACTION = 0.5
"""A layout that keeps more than this share of the files is not proposed."""
_PROPOSED_BYTES_MAX_FRACTION = 0.9
"""A layout has to keep less than this share of the bytes of the plan."""
_VALUES_MAX = 32
"""The maximum length of a list of values for which the rows of each value are counted."""
_ADDED_COLUMN_MAX_FRACTION = 0.7
"""A column is added to a clustering only if the clustering then keeps less than this share of the files."""

Doubles = npt.NDArray[np.float64]
Shares = Sequence[tuple[float, float]]
"""For each interval, the share of all rows below its start and the share below its end."""
_ALL_ROWS: Shares = ((0.0, 1.0),)
"""The value for a column that the filter does not compare: a single interval that contains all rows."""
Key = int | float | bytes
Interval = tuple[Key | None, Key | None, bool, bool]
"""(low, high, whether the interval contains low, whether it contains high). None means no limit."""


class LayoutEstimate(NamedTuple):
    """An estimate of the files that a scan would read if the table were clustered by `columns`."""

    columns: tuple[str, ...]
    files_in: int
    """The number of files of the table."""
    files: int
    """The number of files that the scan would read."""


class LayoutEstimates(NamedTuple):
    """The estimated layouts, sorted by the number of files.

    Attributes:
        layouts: The layouts. The layout with the fewest files is first.
        unknown: The reason why there is no estimate, by column.
    """

    layouts: list[LayoutEstimate]
    unknown: dict[str, str]


class _PartitionSize(NamedTuple):
    """The numbers of files and layers of a partition after a rewrite.

    A layer is a group of files that a rewrite sorts together. Each layer spans all values of the partition.
    """

    files: int
    layers: int


def estimate_layouts(scan: ScanPlan, samples: Samples, properties: Mapping[str, str]) -> LayoutEstimates:
    """Estimate a sort by each column that the filter compares, and a clustering by several of these columns.

    Only the clustering that keeps the fewest files is returned.

    Args:
        scan: The plan.
        samples: The samples of the columns that the filter of the plan compares.
        properties: The properties of the table, with the policies of its namespaces.

    Returns:
        Only layouts that keep less than half of the files of the table, and clearly fewer files than the plan keeps
        now.
    """
    columns = _group_intervals_by_column(scan)
    if not columns or scan.files <= 1:
        return LayoutEstimates([], {})
    selection = FileSelection.select_all(scan.view)
    specs = [spec for spec in scan.metadata.partition_specs if spec.spec_id in scan.view.specs]
    narrow_by_partition(selection, {spec.spec_id: project(scan.bound, spec).possible for spec in specs}, never_expires)
    files = find_files_at(scan.view, selection.list_entry_ids())
    policy = _read_policy_columns(properties)
    shares_by_name: dict[str, Shares] = {}
    unknown: dict[str, str] = {}
    for name, (parts, intervals) in columns.items():
        if name in policy:
            continue
        shares = _estimate_row_shares(scan, files, parts, intervals, samples.get(parts[0].column_id))
        if isinstance(shares, str):
            unknown[name] = shares
        elif shares is not None:
            shares_by_name[name] = shares
    if not shares_by_name:
        return LayoutEstimates([], unknown)
    partitions = _count_partitions(files, properties)
    files_in = sum(partition_size.files * count for partition_size, count in partitions.items())
    files_max = files_in * min(
        _PROPOSED_FILES_MAX_FRACTION, _PROPOSED_BYTES_MAX_FRACTION * _compute_share_of_bytes(scan, files)
    )
    if policy:
        policy_conditions = {name: columns[name] for name in policy if name in columns}
        policy_shares = [
            _estimate_row_shares(scan, files, *conditions, samples.get(conditions[0][0].column_id))
            for conditions in policy_conditions.values()
        ]
        column_shares = [
            *(shares for shares in policy_shares if shares and not isinstance(shares, str)),
            *shares_by_name.values(),
        ]
        column_shares += [_ALL_ROWS] * (len(policy) + len(shares_by_name) - len(column_shares))
        layout = LayoutEstimate((*policy, *shares_by_name), files_in, _count_kept_files(column_shares, partitions))
        is_proposed = len(layout.columns) <= POLICY_COLUMNS_MAX and layout.files <= files_max
        return LayoutEstimates([layout] if is_proposed else [], unknown)
    sort_estimates = [
        LayoutEstimate((name,), files_in, _count_kept_files((shares,), partitions))
        for name, shares in shares_by_name.items()
    ]
    sort_estimates.sort(key=lambda estimate: estimate.files)
    best_clustering = _choose_clustering(sort_estimates, shares_by_name, partitions)
    return LayoutEstimates(
        [
            estimate
            for estimate in (*([best_clustering] if best_clustering else ()), *sort_estimates)
            if estimate.files <= files_max
        ],
        unknown,
    )


def _read_policy_columns(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns by which the policy clusters the table, or `()` if the table has no valid policy."""
    try:
        layout = ClusteringLayout.from_properties(properties)
    except BadRequest:
        return ()
    return () if layout is None else layout.columns


def _count_partitions(candidates: FoundFiles, properties: Mapping[str, str]) -> Counter[_PartitionSize]:
    """Count the partitions by their numbers of files and layers after a rewrite.

    A layer is a group of files that are clustered together. A large partition has several layers.
    """
    target_bytes = max(1, parse_count(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))
    files_by_partition = group_by_partition(candidates)
    sizes = np.bincount(
        files_by_partition.numbers,
        weights=candidates.read_longs("file_size_in_bytes").clip(0).astype(np.float64),
        minlength=len(files_by_partition.partitions),
    )
    return Counter(
        _PartitionSize(
            max(1, math.ceil(size_bytes / target_bytes)),
            max(1, math.ceil(size_bytes / LAYER_BYTES), math.ceil(files / LAYER_FILES)),
        )
        for size_bytes, files in zip(sizes.tolist(), files_by_partition.count_files(), strict=True)
    )


def _compute_share_of_bytes(scan: ScanPlan, candidates: FoundFiles) -> float:
    """Return the share of the bytes of `candidates` that the plan keeps after its last stage of pruning."""
    return min(1.0, scan.stages[-1].bytes_left / max(1, int(candidates.read_longs("file_size_in_bytes").clip(0).sum())))


def _choose_clustering(
    sort_estimates: Sequence[LayoutEstimate], shares: Mapping[str, Shares], partitions: Mapping[_PartitionSize, int]
) -> LayoutEstimate | None:
    """Return the clustering that keeps the fewest files, or None if none keeps clearly fewer than a sort by a column.

    Columns are added in order of selectivity, as long as each added column leaves clearly fewer files.

    Args:
        sort_estimates: The estimates of the sorts by one column. The sort that keeps the fewest files is first.
        shares: The shares of the rows, by column.
        partitions: The number of partitions of each size.
    """
    if len(sort_estimates) < 2:
        return None
    best_estimate = sort_estimates[0]
    for count in range(2, min(len(sort_estimates), COLUMNS_MAX) + 1):
        names = tuple(estimate.columns[0] for estimate in sort_estimates[:count])
        kept_files = _count_kept_files([shares[name] for name in names], partitions)
        if kept_files > _ADDED_COLUMN_MAX_FRACTION * best_estimate.files:
            break
        best_estimate = LayoutEstimate(names, best_estimate.files_in, kept_files)
    return best_estimate if len(best_estimate.columns) > 1 else None


def _count_kept_files(columns: Sequence[Shares], partitions: Mapping[_PartitionSize, int]) -> int:
    """Return the number of files that the filter keeps in all partitions.

    A layer is a group of files that a rewrite sorts together. The estimate assumes that each column divides a layer
    into the same number of slices, and that each file contains one combination of slices, a cell.

    Args:
        columns: For each column of the clustering, the ranges of its sorted rows that may match the filter, as
            fractions from 0 to 1.
        partitions: The number of partitions of each size.
    """
    total = 0
    for (all_files, layers), count in partitions.items():
        files = math.ceil(all_files / layers)
        # A root such as 8 ** (1 / 3) can be slightly larger than the integer, so subtract the rounding error.
        slices = max(1, math.ceil(files ** (1 / len(columns)) - 1e-9))
        cells = math.prod(_count_slices(shares, slices) for shares in columns)
        kept_files = min(files, max(1, round(cells * files / slices ** len(columns)))) if cells else 0
        total += count * min(all_files, layers * kept_files)
    return total


def _count_slices(shares: Shares, count: int) -> int:
    """Return how many of `count` equal slices of the rows overlap the intervals in `shares`."""
    touched_slices: set[int] = set()
    for low, high in shares:
        first_slice = min(count - 1, int(low * count))
        last_slice = max(first_slice, min(count - 1, int(np.ceil(high * count)) - 1))
        touched_slices.update(range(first_slice, last_slice + 1))
    return len(touched_slices)


# The intervals of the filter


def _group_intervals_by_column(scan: ScanPlan) -> dict[str, tuple[list[Bound], list[Interval]]]:
    """Return, for each column, the predicates of the filter on it, and the intervals of values that match them.

    A row must satisfy all predicates, so the intervals of several predicates on a column are intersected.
    """
    parts = scan.bound.children if isinstance(scan.bound, And) else (scan.bound,)
    columns: dict[str, tuple[list[Bound], list[Interval]]] = {}
    for part in parts:
        intervals = _find_intervals(part) if isinstance(part, Bound) else None
        if intervals is None:
            continue
        assert isinstance(part, Bound)
        bounds_and_intervals = columns.get(part.name)
        if bounds_and_intervals is not None:
            intervals = [
                intersection
                for earlier_interval in bounds_and_intervals[1]
                for interval in intervals
                if (intersection := _intersect_intervals(earlier_interval, interval))
            ]
        columns[part.name] = ([*(() if bounds_and_intervals is None else bounds_and_intervals[0]), part], intervals)
    return columns


def _find_intervals(part: Bound) -> list[Interval] | None:
    """Return the intervals of values that match the predicate, or None if sorted rows do not help the predicate.

    They do not help a predicate on a transformed value, on a boolean, or with an operator such as `!=`, because the
    matching rows are then not close together in the order, or are in nearly all files.
    """
    form = get_form(part.kind)
    if part.transform != IDENTITY or form is None or part.kind == "boolean":
        return None
    keys = [encode_key(form, part.kind, value) for value in part.values]
    match part.op:
        case Op.EQ | Op.IN:
            return [(key, key, True, True) for key in keys]
        case Op.LT | Op.LT_EQ:
            return [(None, keys[0], True, part.op == Op.LT_EQ)]
        case Op.GT | Op.GT_EQ:
            return [(keys[0], None, part.op == Op.GT_EQ, True)]
        case Op.STARTS_WITH:
            assert isinstance(keys[0], bytes)
            return [(keys[0], find_end_of_prefix(keys[0]), True, False)]
    return None


def _intersect_intervals(left: Interval, right: Interval) -> Interval | None:
    """Return the intersection of two intervals, or None if it is empty."""
    left_low, left_high, left_has_low, left_has_high = left
    right_low, right_high, right_has_low, right_has_high = right
    low, has_low = _choose_tighter((left_low, left_has_low), (right_low, right_has_low), lower=True)
    high, has_high = _choose_tighter((left_high, left_has_high), (right_high, right_has_high), lower=False)
    if low is not None and high is not None and (low > high or (low == high and not (has_low and has_high))):  # type: ignore[operator]
        return None
    return low, high, has_low, has_high


def _choose_tighter(
    left: tuple[Key | None, bool], right: tuple[Key | None, bool], *, lower: bool
) -> tuple[Key | None, bool]:
    """Return the limit that leaves fewer values. None means that there is no limit.

    Args:
        left: A limit, and whether the interval contains it.
        right: Another limit of the same kind.
        lower: Whether both are lower limits. Then the larger limit leaves fewer values, otherwise the smaller one.
    """
    if left[0] is None or right[0] is None:
        return right if left[0] is None else left
    if left[0] == right[0]:
        return left[0], left[1] and right[1]
    return left if (left[0] > right[0]) == lower else right  # type: ignore[operator]


# The shares of the rows


def _estimate_row_shares(
    scan: ScanPlan,
    candidates: FoundFiles,
    parts: Sequence[Bound],
    intervals: Sequence[Interval],
    sample: ColumnSample | str | None,
) -> Shares | str | None:
    """Estimate where each interval of values starts and ends, as shares of the rows of the table.

    The shares are from the sample. Without a sample, they are from the bounds of the files, which cannot show how many
    rows have a single value. So an equality also needs the number of distinct values.

    Args:
        scan: The scan.
        candidates: The files whose bounds are used.
        parts: The conditions on one column.
        intervals: The intervals of values that satisfy all conditions.
        sample: The sample of the column, a text that says why the column was not sampled, or None for no sample.

    Returns:
        The shares, or a text that says why they are unknown. None if no value can satisfy the condition, or if the
        computation would be too large.
    """
    part = parts[0]
    if not intervals or not candidates.file_count or len(intervals) * candidates.file_count > _WORK_MAX:
        return None
    axis = _Axis.read(
        candidates.find_statistics(RequestedColumn(part.column_id, part.kind)), candidates.read_longs("record_count")
    )
    axis_shares = None if axis is None else [axis.compute_shares(interval) for interval in intervals]
    if isinstance(sample, ColumnSample):
        # The sample has the share of the rows in an interval, and the bounds show where the interval starts. Without
        # bounds, the starts are evenly distributed.
        starts = (
            [start for start, _ in axis_shares] if axis_shares else [n / len(intervals) for n in range(len(intervals))]
        )
        rows = max(1, int(candidates.read_longs("record_count").clip(0).sum()))
        widths = [share * sample.rows_left / rows for share in _measure_shares(sample, parts, len(intervals))]
        return [(max(0.0, min(low, 1 - width)), low + width) for low, width in zip(starts, widths, strict=True)]
    if axis_shares is None:
        return None
    if not any(low == high for low, high, *_ in intervals):
        return axis_shares
    distinct_values = _count_distinct_values(scan, part.column_id)
    if distinct_values is None:
        return sample or NOT_SAMPLED  # Here `sample` is the reason why there is no sample, or None.
    return [(low, max(high, min(1.0, low + 1 / distinct_values))) for low, high in axis_shares]


def _measure_shares(sample: ColumnSample, parts: Sequence[Bound], intervals: int) -> list[float]:
    """Return the share of the rows of the sample in each interval.

    The values of a short list are measured one by one. In all other cases, the intervals share the matching rows
    equally.

    Args:
        sample: The sample of the column.
        parts: The conditions on the column.
        intervals: The number of intervals that the conditions allow.
    """
    part = parts[0]
    if len(parts) == 1 and len(part.values) == intervals <= _VALUES_MAX and part.op in (Op.EQ, Op.IN):
        equalities = (msgspec.structs.replace(part, op=Op.EQ, values=(value,)) for value in part.values)
        return [sample.compute_share_of_rows(equality) for equality in equalities]
    conjunction = And(tuple(parts)) if len(parts) > 1 else part
    return [sample.compute_share_of_rows(conjunction) / intervals] * intervals


def _count_distinct_values(scan: ScanPlan, column_id: int) -> int | None:
    """Return the number of distinct values of the column, or None if it is unknown.

    The number is from the newest statistics of the table that contain the column.
    """
    for file in reversed(scan.metadata.statistics):
        for blob in file.blob_metadata:
            if blob.type == THETA and blob.fields == (column_id,):
                return parse_count(blob.properties or {}, NDV, 0) or None
    return None


class _Axis(NamedTuple):
    """The value ranges of files, as positions on an axis of numbers.

    Attributes:
        lower: float64[files]: the lower bounds.
        upper: float64[files]: the upper bounds; a range does not contain its upper bound.
        rows: float64[files]: the record counts.
    """

    lower: Doubles
    upper: Doubles
    rows: Doubles
    base: int
    """The integer whose position on the axis is 0."""
    common: bytes
    """The common prefix of all strings."""
    unit: float
    """The width of one value."""
    scale: float
    """A factor that is applied to floats, so that the difference of two floats is never infinite."""

    @classmethod
    def read(cls, stats: FoundStatistics, counts: Longs) -> _Axis | None:
        """Convert the bounds of a column to positions, or return None if too few rows are in files with bounds.

        It is also None for strings in more than `_STRING_FILES_MAX` files. Infinite bounds of floats count as missing.

        Numbers are positions relative to the smallest bound. Strings are positions by their first bytes after the
        common prefix. Files without bounds are left out.
        """
        assert stats.form is not None
        rows = counts.clip(0).astype(np.float64)
        lower, upper = stats.read_bounds("lower"), stats.read_bounds("upper")
        base, common, scale = 0, b"", 1.0
        if isinstance(lower, Strings) or isinstance(upper, Strings):
            assert isinstance(lower, Strings)
            assert isinstance(upper, Strings)
            if len(rows) > _STRING_FILES_MAX:
                return None
            texts = list(zip(lower.list_values(), upper.list_values(), strict=True))
            is_known = np.array([None not in pair for pair in texts], dtype=np.bool_)
            known_bounds = [(first, last) for first, last in texts if first is not None and last is not None]
            if not known_bounds:
                return None
            common = _find_common_prefix(min(first for first, _ in known_bounds), max(last for _, last in known_bounds))
            low, high = (np.array([_to_number(pair[side], common) for pair in known_bounds]) for side in (0, 1))
        elif stats.form is Form.FLOATS:
            is_known = ~(np.isnan(lower) | np.isnan(upper)) & np.isfinite(lower) & np.isfinite(upper)
            scale = 0.25  # The difference of two quarters of a double is finite.
            low, high = lower[is_known] * scale, upper[is_known] * scale
        else:
            is_known = (lower != MISSING) & (upper != MISSING)
            if not is_known.any():
                return None
            base = int(lower[is_known].min())
            # The difference of two int64 values needs uint64.
            zero, sides = np.uint64(base % (1 << 64)), (lower[is_known], upper[is_known])
            low, high = ((side.view(np.uint64) - zero).astype(np.float64) for side in sides)
        if not is_known.any() or rows[is_known].sum() < _BOUNDED_ROWS_MIN_FRACTION * max(1.0, rows.sum()):
            return None
        span = max(float(high.max() - low.min()), 1e-300)
        # Values other than integers have no fixed distance, so one value gets a tiny part of the axis.
        unit = 1.0 if stats.form is Form.INTEGERS else span * 1e-9
        # Adding a small width to a large double may not change the double, but each range needs a width.
        end = np.maximum(np.maximum(high + unit, low + span * 1e-9), np.nextafter(high, np.inf))
        return cls(low, end, rows[is_known], base, common, unit, scale)

    def compute_shares(self, interval: Interval) -> tuple[float, float]:
        """Return the share of all rows below the start of the interval, and the share below its end."""
        low, high, has_low, has_high = interval
        start = 0.0 if low is None else self._compute_share_below(self._locate_key(low, after=not has_low))
        end = 1.0 if high is None else self._compute_share_below(self._locate_key(high, after=has_high))
        return start, max(start, end)

    def _locate_key(self, key: Key, *, after: bool) -> float:
        """Return the position of a value on the axis, a number that is compared with the positions of the bounds.

        The position of a number is its distance from the smallest bound. The position of a string is the number that
        its first bytes after the common prefix of all bounds form.

        Args:
            key: The value.
            after: Whether to return the position after the rows with the key, instead of the position before them.
        """
        position = _to_number(key, self.common) if isinstance(key, bytes) else float(key - self.base) * self.scale
        return max(position + self.unit, math.nextafter(position, math.inf)) if after else position

    def _compute_share_below(self, position: float) -> float:
        """Return the share of all rows below the position, if the rows of a file are evenly distributed."""
        with np.errstate(over="ignore"):  # Division by a tiny width may give infinity, which is clipped to 1.
            parts = np.clip((position - self.lower) / (self.upper - self.lower), 0.0, 1.0)
        return float(parts @ self.rows / max(1.0, self.rows.sum()))


def _find_common_prefix(left: bytes, right: bytes) -> bytes:
    length = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


def _to_number(text: bytes, common: bytes) -> float:
    """Return a number that orders strings like their first bytes after the prefix `common`.

    A string without the prefix is before or after all strings with the prefix, so it gets the smallest number or a
    number larger than all others.
    """
    if not text.startswith(common):
        return 0.0 if text < common else float(1 << (8 * _STRING_DIGITS_BYTES))
    return float(
        int.from_bytes(text[len(common) : len(common) + _STRING_DIGITS_BYTES].ljust(_STRING_DIGITS_BYTES, b"\0"), "big")
    )
