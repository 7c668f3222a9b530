"""Conditions on a column that is compared with the minimum or the maximum of another column, from statistics of files.

The maximum of the rows that satisfy a filter has two limits:
- The maximum is not greater than the greatest upper bound of the files that may have such a row.
- Some files have no deletes, have a value other than null, and all of their rows satisfy the filter. Each of these
  files has a value that is not less than the file's lower bound. So the maximum is not less than the greatest of these
  lower bounds. This is true even if the bounds are wider than the values.

The limits of the minimum are the same in the other direction. If no file may have a value, the extreme is null. The
functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from seamark.formats.iceberg.expressions.expression import FALSE, Expression, join_by_and
from seamark.formats.index.packing import MISSING, Longs
from seamark.formats.protocol.wire import MAXIMUM, MINIMUM
from seamark.metaserver.planner.joins.ranges import PlannedColumn, make_limit_condition
from seamark.metaserver.planner.lookup.lookup import FoundFiles, FoundStatistics, RequestedColumn, find_files_at
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_partition, narrow_by_stats
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import FileSelection, never_expires

EXTREMES = (MINIMUM, MAXIMUM)
FILES_MAX = 10_000
"""The maximum number of files whose deletes are looked up. They are the files with bounds nearest to the extreme."""


@dataclass(frozen=True)
class RowsOutside:
    """The rows that are not considered for a minimum or maximum, because the filter is not true for them.

    Attributes:
        condition: A condition that is true for at least these rows.
        by_spec: The condition on partition values that follows from `condition`, by spec id, as in
            `narrow_by_partition`.
    """

    condition: Expression
    by_spec: Mapping[int, Expression]


@dataclass(frozen=True)
class ExtremeLimits:
    """The lower and the upper limit of an extreme, the MIN or MAX of a column. A limit that is not known is None.

    If `is_null` is True, no row has a value, so no comparison with the extreme is true.
    """

    low: int | None = None
    high: int | None = None
    is_null: bool = False


def find_extreme_limits(
    extreme: str, column: RequestedColumn, scan: ScanPlan, outside: RowsOutside | None
) -> ExtremeLimits:
    """Return the limits between which the MIN or MAX of a column is, in the rows that satisfy the filter of a scan.

    Args:
        extreme: `MINIMUM` or `MAXIMUM`.
        column: The column. Its bounds are integers.
        scan: The plan of a scan with the filter.
        outside: The rows that do not satisfy the filter, or None if these rows are not known exactly.
    """
    files = find_files_at(scan.view, scan.entry_ids)
    statistics = files.find_statistics(column)
    outermost = _find_outer_bound(extreme, files, statistics)
    if outermost is None:
        return ExtremeLimits(is_null=True)
    nearest_bound = None if outside is None else _find_inner_bound(extreme, files, statistics, scan, outside)
    outer = outermost[0] if outermost else None  # An empty tuple means that there is no limit on this side.
    return ExtremeLimits(nearest_bound, outer) if extreme == MAXIMUM else ExtremeLimits(outer, nearest_bound)


def _find_outer_bound(extreme: str, files: FoundFiles, statistics: FoundStatistics) -> tuple[int, ...] | None:
    """Return a limit of all values of the column, as a tuple with one item.

    For the maximum, no value is greater than the limit, which is the greatest upper bound of the files. For the
    minimum, no value is less than the limit, which is the least lower bound.

    Returns:
        An empty tuple if a file that may have a value has no bound, or None if no file has a value.
    """
    nulls, rows = statistics.counts("null_value_counts"), files.read_longs("record_count")
    may_have_values = (nulls == MISSING) | (nulls < 0) | (rows < 0) | (nulls < rows)
    if not may_have_values.any():
        return None
    bounds = _list_bounds(statistics, "upper" if extreme == MAXIMUM else "lower")[may_have_values]
    if (bounds == MISSING).any():
        return ()
    return (int(bounds.max() if extreme == MAXIMUM else bounds.min()),)


def _find_inner_bound(
    extreme: str, files: FoundFiles, statistics: FoundStatistics, scan: ScanPlan, outside: RowsOutside
) -> int | None:
    """Return a value that MAX is certainly not less than, or that MIN is certainly not greater than.

    For MAX, it is the greatest lower bound of the files that have a value. For MIN, it is the least upper bound.

    Args:
        extreme: `MINIMUM` or `MAXIMUM`.
        files: The files of the scan.
        statistics: The statistics of the column.
        scan: The plan of the scan.
        outside: The rows that do not satisfy the filter of the scan. Files that may have such rows do not count.

    Returns:
        None if no file is known to have a value in a row that satisfies the filter.
    """
    bounds = _list_bounds(statistics, "lower" if extreme == MAXIMUM else "upper")
    nulls, rows = statistics.counts("null_value_counts"), files.read_longs("record_count")
    has_values = (bounds != MISSING) & (nulls != MISSING) & (nulls >= 0) & (nulls < rows)
    if outside.condition != FALSE:
        selection = FileSelection.select_all(scan.view)
        narrow_by_partition(selection, outside.by_spec, never_expires)
        narrow_by_stats(selection, outside.condition, never_expires)
        has_values &= ~np.isin(scan.entry_ids, selection.list_entry_ids())
    # A deleted row may be the only row with a value, so files with deletes do not count. Finding deletes takes time,
    # so only the `FILES_MAX` files with the best bounds are examined.
    positions = np.flatnonzero(has_values)
    sorted_positions = positions[np.argsort(bounds[positions], kind="stable")]
    nearest_files = np.sort((sorted_positions[::-1] if extreme == MAXIMUM else sorted_positions)[:FILES_MAX])
    deletes_by_file = scan.find_deletes_by_file(scan.entry_ids[nearest_files])
    files_without_deletes = nearest_files[[not deletes for deletes in deletes_by_file]]
    if not len(files_without_deletes):
        return None
    return int(bounds[files_without_deletes].max() if extreme == MAXIMUM else bounds[files_without_deletes].min())


def _list_bounds(statistics: FoundStatistics, side: str) -> Longs:
    """Return the lower or upper bounds of the files, int64[files]."""
    bounds = statistics.read_bounds(side)
    assert isinstance(bounds, np.ndarray)
    return bounds.astype(np.int64, copy=False)


def make_extreme_condition(column: PlannedColumn, op: str, extreme_kind: str, limits: ExtremeLimits) -> Expression:
    """Return the condition that follows from a comparison of a column with the MIN or MAX of another column.

    Args:
        column: The column.
        op: The operator in `column op extreme`: `=`, `<`, `<=`, `>` or `>=`.
        extreme_kind: The type of the extreme, which may differ from the type of the column.
        limits: The limits of the extreme.

    Raises:
        ValueError: No condition follows from the limits.
    """
    if limits.is_null:
        return FALSE
    # A column that is greater than the extreme is greater than the extreme's lower limit. The reverse holds for less.
    low = limits.low if op in ("=", ">", ">=") else None
    high = limits.high if op in ("=", "<", "<=") else None
    if low is None and high is None:
        raise ValueError("the statistics of the table's files give no limit")
    return join_by_and(
        *([] if low is None else [make_limit_condition(column, op if op != "=" else ">=", low, extreme_kind)]),
        *([] if high is None else [make_limit_condition(column, op if op != "=" else "<=", high, extreme_kind)]),
    )
