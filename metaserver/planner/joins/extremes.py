"""Conditions on a column that equals the minimum or the maximum of another column, from statistics of files.

`day = (SELECT max(day) FROM t)` requires that `day` is at least as great as any value of `t`. If a file has no deletes
and has a non-null value, then this value is not less than the lower bound of the file. So the greatest of these lower
bounds is a limit for `day`, even if bounds are wider than the values. The functions have no side effects.
"""

from __future__ import annotations

import numpy as np

from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.packing import MISSING, Form, value_of
from seamark.formats.protocol.wire import MAXIMUM, MINIMUM
from seamark.metaserver.planner.lookup.lookup import RequestedColumn, files_at
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

EXTREMES = (MINIMUM, MAXIMUM)
FILES_MAX = 10_000
"""The maximum number of files whose deletes are looked up. They are the files with the nearest bounds."""
_KINDS = frozenset({"int", "long", "date", "timestamp", "timestamptz"})
"""The types whose bounds are integers in the order of the values."""


def has_extremes(kind: str, other: str) -> bool:
    """Return whether the extreme of a column of type `other` can limit a column of type `kind`."""
    return kind == other and kind in _KINDS


def find_extreme_condition(
    column_id: int, name: str, extreme: str, other_id: int, kind: str, scan: ScanPlan
) -> Expression:
    """Return the condition that limits a column by the extreme of another column in all rows of a scan.

    Args:
        column_id: The id of the column.
        name: Its full name.
        extreme: `MINIMUM` or `MAXIMUM`.
        other_id: The id of the scan's column.
        kind: The type of both columns.
        scan: A plan of the other table without a filter.

    Raises:
        ValueError: The statistics of no file prove that it has a row that is not deleted.
    """
    files = files_at(scan.view, scan.entry_ids)
    statistics = files.stats(RequestedColumn(other_id, kind))
    bounds = statistics.bounds("lower" if extreme == MAXIMUM else "upper")
    assert isinstance(bounds, np.ndarray)
    nulls, rows = statistics.counts("null_value_counts"), files.longs("record_count")
    has_values = np.flatnonzero((bounds != MISSING) & (nulls != MISSING) & (nulls >= 0) & (nulls < rows))
    ordered = has_values[np.argsort(bounds[has_values], kind="stable")]
    nearest = (ordered[::-1] if extreme == MAXIMUM else ordered)[:FILES_MAX]
    deletes = scan.deletes_of(np.sort(scan.entry_ids[nearest]))
    live = np.sort(nearest)[[not of_file for of_file in deletes]]
    if not len(live):
        raise ValueError("the statistics of its files do not show that any of them has a row that is not deleted")
    limit = int(bounds[live].max() if extreme == MAXIMUM else bounds[live].min())
    op = Op.GT_EQ if extreme == MAXIMUM else Op.LT_EQ
    return Bound(op, column_id, name, kind, IDENTITY, kind, (value_of(Form.INTEGERS, kind, limit),))
