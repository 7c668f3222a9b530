"""The view of a snapshot: its blocks side by side, with one row of summaries per block for each column asked about.

Nothing is copied: a side of a column is the addresses of the blocks' arrays, which the kernels walk. It is put together
at the first predicate on the column and kept; a view of the next snapshot starts from blocks that are already there.

A row is named by its manifest's place in the manifest list and its own place in the manifest: `ordinal << 32 | row`.
So a view that holds only the manifests a plan needs names the same rows as the view of the whole snapshot, and rows of
a later plan can be compared with those of an earlier one. Within the view, masks count rows through its blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.types.values import decimal_scale
from metaserver.index.blocks.block import Block, ColumnEntry
from metaserver.index.blocks.packing import NONE, Form, Longs, Packed

Flags = npt.NDArray[np.uint8]
_WIDENED = {("int", "long"), ("long", "int"), ("float", "double"), ("double", "float")}
_LAYOUT = 13
_FORM, _ROWS, _FIRST, _BASE = 0, 4, 5, 6
"""Places in a row of a layout."""
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
"""Of a row's name: its place in its manifest."""
_UNKNOWN = (-1,) + (0,) * (_LAYOUT - 1)


class Side:
    """One side of a column in one form: `layout` int64[blocks, 13] as `_scan.pyx` wants it, summaries `low`, `high`."""

    __slots__ = ("form", "high", "layout", "low", "packed")

    def __init__(self, form: Form, packed: Sequence[Packed | None], view: TableView) -> None:
        rows = [_UNKNOWN] * len(packed)
        low: list[int | float] = [0] * len(packed)
        high: list[int | float] = [0] * len(packed)
        blocks, starts = view.blocks, view.starts
        for number, column in enumerate(packed):
            if column is not None:
                rows[number] = _layout(blocks[number], column, starts[number])
                low[number] = column.low
                high[number] = column.high
        self.form = form
        self.layout: Longs = np.array(rows, dtype=np.int64).reshape(len(packed), _LAYOUT)
        dtype = (np.int64, np.float64, np.uint64)[form]
        self.low: npt.NDArray[Any] = np.array(low, dtype=dtype)
        self.high: npt.NDArray[Any] = np.array(high, dtype=dtype)
        self.packed = packed
        """None where the block knows nothing of this side in this form."""

    @property
    def size_bytes(self) -> int:
        return self.layout.nbytes + self.low.nbytes + self.high.nbytes + 8 * len(self.packed)

    def rows_read(self) -> int:
        """How many rows a comparison with one value may have to look at: those of the blocks between whose least and
        greatest values it lies, for the value that most of them are about."""
        known = np.flatnonzero(self.layout[:, _FORM] >= 0)
        rows, low, high = self.layout[known, _ROWS], self.low[known], self.high[known]
        by_low, by_high = np.argsort(low), np.argsort(high)
        begun = np.cumsum(rows[by_low])
        ended = np.concatenate(([0], np.cumsum(rows[by_high])))
        return int((begun - ended[np.searchsorted(high[by_high], low[by_low])]).max(initial=0))


class ColumnStatistics:
    """What the blocks know of one column, of one type. Flags are as in `ColumnEntry`, None where all are 0."""

    __slots__ = ("entries", "lower", "nans_only", "no_nans", "no_nulls", "nulls_only", "rows_read", "upper")

    def __init__(self, view: TableView, column_id: int, kind: str) -> None:
        entries = [_usable(block.entry(column_id), kind) for block in view.blocks]
        self.entries = entries
        self.lower = _sides(view, [None if entry is None else entry.lower for entry in entries])
        self.upper = _sides(view, [None if entry is None else entry.upper for entry in entries])
        self.nulls_only = _flags(entries, lambda entry: entry.nulls_only)
        self.nans_only = _flags(entries, lambda entry: entry.nans_only)
        self.no_nulls = _flags(entries, lambda entry: entry.no_nulls)
        self.no_nans = _flags(entries, lambda entry: entry.no_nans)
        self.rows_read = max(sum(side.rows_read() for side in sides) for sides in (self.lower, self.upper))
        """By one comparison, at most."""

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in (*self.lower, *self.upper)) + 12 * len(self.entries)


class PartitionValues:
    """One partition field's values; exact, unlike bounds. `known` bool[blocks]: the block's spec has the field.

    `nulls` uint8[blocks]: how many of the values are null, 0 none, 1 all, 2 some. `has_nulls` where it is not all 0.
    """

    __slots__ = ("has_nulls", "is_known", "known", "nulls", "packed", "sides")

    def __init__(self, view: TableView, field_id: int, kind: str) -> None:
        found = [block.partition_column(field_id) for block in view.blocks]
        usable = [entry if entry is not None and comparable(entry[0], kind) else None for entry in found]
        self.known = np.array([entry is not None for entry in usable], dtype=np.bool_)
        self.packed = [None if entry is None else entry[1] for entry in usable]
        self.nulls: Flags = np.array(
            [1 if packed is None else 0 if packed.presence == NONE else 2 for packed in self.packed], dtype=np.uint8
        )
        self.sides = _sides(view, self.packed)
        self.has_nulls = bool(self.nulls.any())
        self.is_known = bool(self.known.all())
        """In all blocks."""

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in self.sides) + len(self.known) * 17


class TableView:
    """`blocks[i]` is the block of `manifests[i]`, a data manifest, the one at `ordinals[i]` of the snapshot (ascending;
    by default the view is of all). `delete_blocks` and `delete_manifests` are those of all delete manifests."""

    def __init__(
        self,
        manifests: Sequence[ManifestFile],
        blocks: Sequence[Block],
        delete_manifests: Sequence[ManifestFile] = (),
        delete_blocks: Sequence[Block] = (),
        *,
        ordinals: Sequence[int] | None = None,
    ) -> None:
        self.manifests = tuple(manifests)
        self.blocks = tuple(blocks)
        self.delete_manifests = tuple(delete_manifests)
        self.delete_blocks = tuple(delete_blocks)
        self.ordinals: Longs = np.array(range(len(self.blocks)) if ordinals is None else ordinals, dtype=np.int64)
        self._numbers = {ordinal: number for number, ordinal in enumerate(self.ordinals.tolist())}
        self.starts = _starts(self.blocks)
        self.delete_starts = _starts(self.delete_blocks)
        self.spec_ids = np.array([block.spec_id for block in self.blocks], dtype=np.int64)
        self.specs = frozenset(self.spec_ids.tolist())
        self._stats: dict[tuple[int, str], ColumnStatistics] = {}
        self._partition: dict[tuple[int, str], PartitionValues] = {}
        self.extents: Longs = np.zeros((len(self.blocks), _LAYOUT), dtype=np.int64)
        """As a layout, with only rows, first rows and, as base, the names of those: for kernels that read no column."""
        self.extents[:, _ROWS] = [block.rows for block in self.blocks]
        self.extents[:, _FIRST] = self.starts[:-1]
        self.extents[:, _BASE] = self.ordinals << ROW_BITS
        counts = [block.long_column("record_count") for block in self.blocks]
        self.odd_counts = [number for number, column in enumerate(counts) if column is None or column.packed.low <= 0]
        """The blocks with files that have no rows, or whose rows nobody counted."""
        self._sized = (0, 0)

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.starts[-1]

    @property
    def delete_rows(self) -> int:
        return self.delete_starts[-1]

    @property
    def size_bytes(self) -> int:
        """What the view adds to its blocks."""
        columns, size = self._sized
        known = len(self._stats) + len(self._partition)
        if known != columns:
            # Lists, because plans in threads may put another column together meanwhile.
            size = sum(column.size_bytes for column in list(self._stats.values()))
            size += sum(column.size_bytes for column in list(self._partition.values()))
            self._sized = known, size
        return self.extents.nbytes + 400 * len(self.blocks) + size

    def locate(self, row: int) -> tuple[Block, int]:
        """The block of a row of the view, and the row's number in it."""
        return self.blocks[self._numbers[row >> ROW_BITS]], row & ROW_MASK

    def manifest_of(self, row: int) -> ManifestFile:
        """The manifest that a row of the view is of."""
        return self.manifests[self._numbers[row >> ROW_BITS]]

    def split(self, rows: Longs) -> tuple[Longs, Longs]:
        """(block numbers, rows of those blocks), each int64[n], of n rows of the view."""
        return np.searchsorted(self.ordinals, rows >> ROW_BITS), rows & ROW_MASK

    def rows_of(self, number: int) -> Longs:
        """int64[rows], the names of all rows of a block."""
        first = int(self.ordinals[number]) << ROW_BITS
        return np.arange(first, first + self.blocks[number].rows, dtype=np.int64)

    def locate_delete(self, row: int) -> tuple[Block, int]:
        """As `locate`, among the delete blocks."""
        number = bisect_right(self.delete_starts, row) - 1
        return self.delete_blocks[number], row - self.delete_starts[number]

    def stats(self, column_id: int, kind: str) -> ColumnStatistics:
        """`kind` is the type that values are compared as; blocks that hold another one know nothing."""
        key = (column_id, kind)
        column = self._stats.get(key)
        if column is None:
            column = self._stats[key] = ColumnStatistics(self, column_id, kind)
        return column

    def known_stats(self, column_id: int, kind: str) -> ColumnStatistics | None:
        """As `stats` where the column has been asked for before, so that it costs nothing now."""
        return self._stats.get((column_id, kind))

    def partition(self, field_id: int, kind: str) -> PartitionValues:
        key = (field_id, kind)
        column = self._partition.get(key)
        if column is None:
            column = self._partition[key] = PartitionValues(self, field_id, kind)
        return column


def _starts(blocks: Sequence[Block]) -> list[int]:
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.rows)
    return starts


def _layout(block: Block, packed: Packed, first: int) -> tuple[int, ...]:
    address = block.address

    def at(offset: int) -> int:
        return 0 if offset == NONE else address + offset

    return (
        packed.form,
        packed.width,
        at(packed.codes),
        at(packed.presence),
        block.rows,
        first,
        packed.base,
        at(packed.common_at),
        len(packed.common),
        at(packed.lengths),
        at(packed.ends),
        at(packed.tails),
        packed.lengths_width,
    )


def _sides(view: TableView, packed: Sequence[Packed | None]) -> tuple[Side, ...]:
    """One side a form: a decimal that was widened past 18 digits has two."""
    forms = {column.form for column in packed if column is not None}
    return tuple(
        Side(Form(form), [column if column is not None and column.form == form else None for column in packed], view)
        for form in sorted(forms)
    )


def _flags(entries: Sequence[ColumnEntry | None], read: Callable[[ColumnEntry], int]) -> Flags | None:
    flags = np.array([0 if entry is None else read(entry) for entry in entries], dtype=np.uint8)
    return flags if flags.any() else None


def _usable(entry: ColumnEntry | None, kind: str) -> ColumnEntry | None:
    """The entry without bounds where its type's values do not compare with those of `kind`."""
    if entry is None or comparable(entry.kind, kind):
        return entry
    return ColumnEntry(
        entry.column_id,
        entry.kind,
        None,
        None,
        entry.counts,
        entry.nulls_only,
        entry.nans_only,
        entry.no_nulls,
        entry.no_nans,
    )


def comparable(stored: str, asked: str) -> bool:
    """Same type, or one that Iceberg promotes to the other without changing what a value means.

    Dates promoted to timestamps (version 3) change their unit, so their bounds are not used.
    """
    if stored == asked or (stored, asked) in _WIDENED:
        return True
    return (
        stored.startswith("decimal") and asked.startswith("decimal") and decimal_scale(stored) == decimal_scale(asked)
    )
