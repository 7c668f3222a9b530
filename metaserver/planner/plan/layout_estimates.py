"""About how many files a scan would keep if the table were sorted or clustered by columns of its filter.

Nothing is read but what the planner has: the bounds of the columns and the record counts of the files that partitions
keep. The rows of a file are taken as spread evenly over its range. From that follows which share of all rows is less
than a value. A layout into as many files cuts the rows of each partition into equal shares; partitions are taken as
alike. For people who read the explanation of a plan; no plan uses it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.metaserver.iceberg.expressions.expression import And, Bound, Op
from seamark.metaserver.iceberg.expressions.projection import project
from seamark.metaserver.iceberg.expressions.ranges import after_prefix
from seamark.metaserver.iceberg.types.transforms import IDENTITY
from seamark.metaserver.index.blocks.packing import MISSING, Form, Longs, form_of, key_of
from seamark.metaserver.planner.lookup.lookup import FoundFiles, FoundStatistics, RequestedColumn, Strings, files_at
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.pruning.partition_pruning import narrow_by_partition
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.selection import Selection, never

COLUMNS_MAX = 4
"""More columns leave a file too few slices of each."""
_WORK_MAX = 50_000_000
"""Values compared with files, for one column."""
_STRING_FILES_MAX = 100_000
"""Bounds that are strings are objects in memory."""
_KNOWN_MIN = 0.5
"""The share of rows that are in files with bounds, below which nothing is estimated."""
_DIGITS = 6
"""Bytes of a string after what all have in common, as a number that a double holds exactly."""
_WORTHWHILE = 0.5
"""A layout that keeps more than this share of the files is not proposed."""
_ADDED_COLUMN = 0.7
"""A column is added to a clustering if it leaves less than this share of the files."""

Doubles = npt.NDArray[np.float64]
Shares = Sequence[tuple[float, float]]
"""Of intervals: the shares of all rows below the start, and below the end."""
Key = int | float | bytes
Interval = tuple[Key | None, Key | None, bool, bool]
"""(low, high, whether low belongs to it, whether high does); None: no limit."""


class LayoutEstimate(NamedTuple):
    """The files of `files_in` that are kept if these files were laid out again by `columns`, in as many files."""

    columns: tuple[str, ...]
    files_in: int
    files: int


def estimate_layouts(scan: ScanPlan) -> list[LayoutEstimate]:
    """A sort by each column that the filter compares, fewest files first, and the clustering by several of them that
    keeps fewest, if it keeps fewer. Only layouts that keep less than half of the files, and less than the plan."""
    columns = _intervals_by_column(scan)
    if not columns or scan.files <= 1:
        return []
    selection = Selection.everything(scan.view)
    specs = [spec for spec in scan.metadata.partition_specs if spec.spec_id in scan.view.specs]
    narrow_by_partition(selection, {spec.spec_id: project(scan.bound, spec).possible for spec in specs}, never)
    found = files_at(scan.view, selection.entry_ids())
    shares = {name: _row_shares(found, bound, intervals) for name, (bound, intervals) in columns.items()}
    known = {name: each for name, each in shares.items() if each is not None}
    sizes = Counter(group_by_partition(found).files()) if known else Counter[int]()
    singles = [LayoutEstimate((name,), found.files, _kept((each,), sizes)) for name, each in known.items()]
    singles.sort(key=lambda one: one.files)
    limit = min(_WORTHWHILE * found.files, scan.files - 1)
    best = _best_clustering(singles, known, sizes)
    return [one for one in (*([best] if best else ()), *singles) if one.files <= limit]


def _best_clustering(
    singles: Sequence[LayoutEstimate], shares: Mapping[str, Shares], sizes: Mapping[int, int]
) -> LayoutEstimate | None:
    """Columns are added, the most selective first, while each leaves clearly fewer files."""
    if len(singles) < 2:
        return None
    best = singles[0]
    for number in range(2, min(len(singles), COLUMNS_MAX) + 1):
        names = tuple(one.columns[0] for one in singles[:number])
        kept = _kept([shares[name] for name in names], sizes)
        if kept > _ADDED_COLUMN * best.files:
            break
        best = LayoutEstimate(names, best.files_in, kept)
    return best if len(best.columns) > 1 else None


def _kept(columns: Sequence[Shares], sizes: Mapping[int, int]) -> int:
    """Files of all partitions. `sizes`: the number of partitions by their number of files. Each column has equally many
    slices, and a file is a cell."""
    total = 0
    for files, partitions in sizes.items():
        slices = max(1, math.ceil(files ** (1 / len(columns)) - 1e-9))
        cells = math.prod(_slices(shares, slices) for shares in columns)
        total += partitions * min(files, max(1, round(cells * files / slices ** len(columns)))) if cells else 0
    return total


def _slices(shares: Shares, count: int) -> int:
    """How many of `count` equal shares of the rows the intervals touch."""
    touched: set[int] = set()
    for low, high in shares:
        first = min(count - 1, int(low * count))
        last = max(first, min(count - 1, int(np.ceil(high * count)) - 1))
        touched.update(range(first, last + 1))
    return len(touched)


# What the filter compares


def _intervals_by_column(scan: ScanPlan) -> dict[str, tuple[Bound, list[Interval]]]:
    """By column: a part of the filter that compares it, and the intervals that all such parts leave."""
    parts = scan.bound.children if isinstance(scan.bound, And) else (scan.bound,)
    found: dict[str, tuple[Bound, list[Interval]]] = {}
    for part in parts:
        intervals = _intervals(part) if isinstance(part, Bound) else None
        if intervals is None:
            continue
        assert isinstance(part, Bound)
        before = found.get(part.name)
        if before is not None:
            intervals = [both for one in before[1] for other in intervals if (both := _intersection(one, other))]
        found[part.name] = (part, intervals)
    return found


def _intervals(part: Bound) -> list[Interval] | None:
    """None for a part that no order of the rows helps."""
    form = form_of(part.kind)
    if part.transform != IDENTITY or form is None or part.kind == "boolean":
        return None
    keys = [key_of(form, part.kind, value) for value in part.values]
    match part.op:
        case Op.EQ | Op.IN:
            return [(key, key, True, True) for key in keys]
        case Op.LT | Op.LT_EQ:
            return [(None, keys[0], True, part.op == Op.LT_EQ)]
        case Op.GT | Op.GT_EQ:
            return [(keys[0], None, part.op == Op.GT_EQ, True)]
        case Op.STARTS_WITH:
            assert isinstance(keys[0], bytes)
            return [(keys[0], after_prefix(keys[0]), True, False)]
    return None


def _intersection(one: Interval, other: Interval) -> Interval | None:
    low, has_low = _tighter((one[0], one[2]), (other[0], other[2]), lower=True)
    high, has_high = _tighter((one[1], one[3]), (other[1], other[3]), lower=False)
    if low is not None and high is not None and (low > high or (low == high and not (has_low and has_high))):  # type: ignore[operator]
        return None
    return low, high, has_low, has_high


def _tighter(one: tuple[Key | None, bool], other: tuple[Key | None, bool], *, lower: bool) -> tuple[Key | None, bool]:
    if one[0] is None or other[0] is None:
        return other if one[0] is None else one
    if one[0] == other[0]:
        return one[0], one[1] and other[1]
    return one if (one[0] > other[0]) == lower else other  # type: ignore[operator]


# Where the rows are


def _row_shares(found: FoundFiles, part: Bound, intervals: Sequence[Interval]) -> Shares | None:
    """None if too little is known."""
    if not found.files or len(intervals) * found.files > _WORK_MAX:
        return None
    axis = _Axis.read(found.stats(RequestedColumn(part.column_id, part.kind)), found.longs("record_count"))
    if axis is None:
        return None
    return [axis.shares(interval) for interval in intervals]


class _Axis(NamedTuple):
    """The ranges of files as numbers: `lower` and `upper`, float64[files], the end excluded; `rows`, float64[files]."""

    lower: Doubles
    upper: Doubles
    rows: Doubles
    base: int
    """Of integers: what position 0 is."""
    common: bytes
    """Of strings: what all begin with."""
    unit: float
    """The width of one value."""
    scale: float
    """Of floats: what they are multiplied by, so that no difference of two is infinite."""

    @classmethod
    def read(cls, stats: FoundStatistics, counts: Longs) -> _Axis | None:
        assert stats.form is not None
        rows = counts.clip(0).astype(np.float64)
        lower, upper = stats.bounds("lower"), stats.bounds("upper")
        base, common, scale = 0, b"", 1.0
        if isinstance(lower, Strings) or isinstance(upper, Strings):
            assert isinstance(lower, Strings)
            assert isinstance(upper, Strings)
            if len(rows) > _STRING_FILES_MAX:
                return None
            texts = list(zip(lower.values(), upper.values(), strict=True))
            known = np.array([None not in pair for pair in texts], dtype=np.bool_)
            present = [(first, last) for first, last in texts if first is not None and last is not None]
            if not present:
                return None
            common = _common(min(first for first, _ in present), max(last for _, last in present))
            low, high = (np.array([_number(pair[side], common) for pair in present]) for side in (0, 1))
        elif stats.form is Form.FLOATS:
            known = ~(np.isnan(lower) | np.isnan(upper)) & np.isfinite(lower) & np.isfinite(upper)
            scale = 0.25
            low, high = lower[known] * scale, upper[known] * scale
        else:
            known = (lower != MISSING) & (upper != MISSING)
            if not known.any():
                return None
            base = int(lower[known].min())
            # Differences of 64-bit integers need 64 bits without a sign.
            zero, sides = np.uint64(base % (1 << 64)), (lower[known], upper[known])
            low, high = ((side.view(np.uint64) - zero).astype(np.float64) for side in sides)
        if not known.any() or rows[known].sum() < _KNOWN_MIN * max(1.0, rows.sum()):
            return None
        span = max(float(high.max() - low.min()), 1e-300)
        unit = 1.0 if stats.form is Form.INTEGERS else span * 1e-9
        # The sum of a large and a small double may equal the large double, but each range needs a width.
        end = np.maximum(np.maximum(high + unit, low + span * 1e-9), np.nextafter(high, np.inf))
        return cls(low, end, rows[known], base, common, unit, scale)

    def shares(self, interval: Interval) -> tuple[float, float]:
        low, high, has_low, has_high = interval
        start = 0.0 if low is None else self._below(self._at(low, after=not has_low))
        end = 1.0 if high is None else self._below(self._at(high, after=has_high))
        return start, max(start, end)

    def _at(self, key: Key, *, after: bool) -> float:
        """The position of a key. `after`: of the end of its rows."""
        position = _number(key, self.common) if isinstance(key, bytes) else float(key - self.base) * self.scale
        return max(position + self.unit, math.nextafter(position, math.inf)) if after else position

    def _below(self, position: float) -> float:
        with np.errstate(over="ignore"):  # an infinite part is all
            parts = np.clip((position - self.lower) / (self.upper - self.lower), 0.0, 1.0)
        return float(parts @ self.rows / max(1.0, self.rows.sum()))


def _common(first: bytes, last: bytes) -> bytes:
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _number(text: bytes, common: bytes) -> float:
    """A string as a number of the same order, as far as its first bytes after `common` decide."""
    if not text.startswith(common):
        return 0.0 if text < common else float(1 << (8 * _DIGITS))
    return float(int.from_bytes(text[len(common) : len(common) + _DIGITS].ljust(_DIGITS, b"\0"), "big"))
