"""The view of a snapshot: its blocks in sequence, with one row of summaries per block for each queried column.

Nothing is copied: a side of a column holds the addresses of the blocks' arrays, which kernels read. It is built at the
first predicate on the column and cached; the view of the next snapshot reuses the blocks.

A row id consists of the ordinal of its manifest in the manifest list and its row in the manifest: `ordinal << 32 |
row`. So a view with only some of a snapshot's manifests has the same row ids as the full view, and the rows of two
plans can be compared. Within a view, a mask counts positions across its blocks.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from seamark.metaserver.iceberg.manifests.manifest import ManifestFile
from seamark.metaserver.iceberg.types.values import decimal_scale
from seamark.metaserver.index.blocks.block import Block, ColumnEntry
from seamark.metaserver.index.blocks.derived import Derived
from seamark.metaserver.index.blocks.packing import NONE, Form, Longs, Packed

Flags = npt.NDArray[np.uint8]
_WIDENED = {("int", "long"), ("long", "int"), ("float", "double"), ("double", "float")}
_LAYOUT = 13
_FORM, _ROWS, _FIRST, _BASE = 0, 4, 5, 6
"""Columns of a layout row."""
ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
"""The part of a row id that is the row in its manifest."""


class Side:
    """One side of a column in one form: `layout`, int64[blocks, 13], in the format of `_scan.pyx`; summaries `low`,
    `high`.
    """

    __slots__ = ("form", "high", "layout", "low", "packed")

    def __init__(self, form: Form, packed: Sequence[Packed | None], view: TableView, known: Side | None = None) -> None:
        """`known`: the same side of the view's base."""
        dtype = (np.int64, np.float64, np.uint64)[form]
        self.form = form
        self.layout: Longs = np.zeros((len(packed), _LAYOUT), dtype=np.int64)
        self.layout[:, _FORM] = -1
        self.low: npt.NDArray[Any] = np.zeros(len(packed), dtype=dtype)
        self.high: npt.NDArray[Any] = np.zeros(len(packed), dtype=dtype)
        self.packed = packed
        """None for a block without values of this side in this form."""
        numbers: Sequence[int] = range(len(packed))
        if known is not None:
            numbers = view.new_blocks
            shared, of_base = view.shared_blocks
            self.layout[shared] = known.layout[of_base]
            self.low[shared], self.high[shared] = known.low[of_base], known.high[of_base]
        self._add(numbers, view)
        placed = self.layout[:, _FORM] >= 0
        self.layout[placed, _FIRST] = np.asarray(view.starts[:-1], dtype=np.int64)[placed]

    def _add(self, numbers: Sequence[int], view: TableView) -> None:
        """Reads the columns of some blocks."""
        places, rows, low, high = [], [], [], []
        for number in numbers:
            column = self.packed[number]
            if column is not None:
                view.blocks[number].verify(column)
                places.append(number)
                rows.append(_layout(view.blocks[number], column))
                low.append(column.low)
                high.append(column.high)
        if places:
            self.layout[places] = rows
            self.low[places] = np.array(low, dtype=self.low.dtype)
            self.high[places] = np.array(high, dtype=self.high.dtype)

    @property
    def size_bytes(self) -> int:
        return self.layout.nbytes + self.low.nbytes + self.high.nbytes + 8 * len(self.packed)

    def rows_read(self) -> int:
        """The maximum number of rows that a comparison with one value reads, over all values.

        A comparison reads the blocks whose minimum and maximum enclose the value.
        """
        with_values = np.flatnonzero(self.layout[:, _FORM] >= 0)
        rows, low, high = self.layout[with_values, _ROWS], self.low[with_values], self.high[with_values]
        by_low, by_high = np.argsort(low), np.argsort(high)
        started = np.cumsum(rows[by_low])
        ended = np.concatenate(([0], np.cumsum(rows[by_high])))
        return int((started - ended[np.searchsorted(high[by_high], low[by_low])]).max(initial=0))


class ColumnStatistics:
    """The statistics of one column, compared as one type. Flags are as in `ColumnEntry`; None if all are 0."""

    __slots__ = ("entries", "lower", "nans_only", "no_nans", "no_nulls", "nulls_only", "rows_read", "upper")

    def __init__(self, view: TableView, column_id: int, kind: str, known: ColumnStatistics | None = None) -> None:
        """`known`: those of the view's base."""
        entries = _with_known(
            view, None if known is None else known.entries, lambda block: _usable(block.entry(column_id), kind)
        )
        self.entries: list[ColumnEntry | None] = entries
        lower, upper = (None, None) if known is None else (known.lower, known.upper)
        lowers = [None if entry is None else entry.lower for entry in entries]
        uppers = [None if entry is None else entry.upper for entry in entries]
        self.lower: tuple[Side, ...] = _sides(view, lowers, lower)
        self.upper: tuple[Side, ...] = _sides(view, uppers, upper)
        self.nulls_only = _flags(entries, lambda entry: entry.nulls_only)
        self.nans_only = _flags(entries, lambda entry: entry.nans_only)
        self.no_nulls = _flags(entries, lambda entry: entry.no_nulls)
        self.no_nans = _flags(entries, lambda entry: entry.no_nans)
        self.rows_read = max(sum(side.rows_read() for side in sides) for sides in (self.lower, self.upper))
        """The maximum for one comparison."""

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in (*self.lower, *self.upper)) + 12 * len(self.entries)


class PartitionValues:
    """The exact values of one partition field. `known`, bool[blocks]: whether the block's spec has the field.

    `nulls`, uint8[blocks]: how many values are null: 0 none, 1 all, 2 some. `has_nulls`: whether any entry is not 0.
    """

    __slots__ = ("has_nulls", "is_known", "known", "nulls", "packed", "sides")

    def __init__(self, view: TableView, field_id: int, kind: str) -> None:
        stored = [block.partition_column(field_id) for block in view.blocks]
        usable = [entry if entry is not None and comparable(entry[0], kind) else None for entry in stored]
        self.known = np.array([entry is not None for entry in usable], dtype=np.bool_)
        self.packed = [None if entry is None else entry[1] for entry in usable]
        self.nulls: Flags = np.array(
            [1 if packed is None else 0 if packed.presence == NONE else 2 for packed in self.packed], dtype=np.uint8
        )
        self.sides = _sides(view, self.packed)
        self.has_nulls = bool(self.nulls.any())
        self.is_known = bool(self.known.all())
        """Whether all blocks have the field."""

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in self.sides) + len(self.known) * 17


class TableView:
    """The data files of a snapshot, or those of some of its manifests.

    `blocks[i]` is the block of `manifests[i]`, the data manifest at `ordinals[i]` of the snapshot (ascending; by
    default all). `delete_blocks` and `delete_manifests` are those of all delete manifests.
    """

    def __init__(
        self,
        manifests: Sequence[ManifestFile],
        blocks: Sequence[Block],
        delete_manifests: Sequence[ManifestFile] = (),
        delete_blocks: Sequence[Block] = (),
        *,
        ordinals: Sequence[int] | None = None,
        base: TableView | None = None,
    ) -> None:
        """`base`: a view that shares blocks, as that of the previous snapshot. Columns are assembled from it while it
        is in memory."""
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
        """A layout with only row counts, first positions and, as base, first row ids: for kernels that read no
        column.
        """
        self.extents[:, _ROWS] = [block.rows for block in self.blocks]
        self.extents[:, _FIRST] = self.starts[:-1]
        self.extents[:, _BASE] = self.ordinals << ROW_BITS
        counts = [block.packed_longs("record_count") for block in self.blocks]
        self.blocks_with_empty_files = [
            number for number, packed in enumerate(counts) if packed is None or packed.low <= 0
        ]
        """Blocks with files whose record count is 0 or unknown."""
        self._base = None if base is None else weakref.ref(base)
        numbers_of_base = {id(block): number for number, block in enumerate(base.blocks)} if base is not None else {}
        pairs = [
            (number, numbers_of_base[id(block)])
            for number, block in enumerate(self.blocks)
            if id(block) in numbers_of_base
        ]
        shared = np.array(pairs, dtype=np.int64).reshape(len(pairs), 2)
        self.shared_blocks = shared[:, 0], shared[:, 1]
        """int64[shared] each: the numbers of the blocks that the base has too, here and there."""
        self.new_blocks = sorted({*range(len(self.blocks))} - {*shared[:, 0].tolist()})
        """The numbers of the other blocks."""
        self._size_cache = (0, 0)
        self.derived = Derived()
        """What other modules compute from the view."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.starts[-1]

    @property
    def edges(self) -> frozenset[Block]:
        """The first and the last block, one of which a neighbouring snapshot keeps."""
        return frozenset({*self.blocks[:1], *self.blocks[-1:]})

    @property
    def delete_rows(self) -> int:
        return self.delete_starts[-1]

    @property
    def size_bytes(self) -> int:
        """Memory of the view with what is derived from it, without its blocks."""
        columns, size = self._size_cache
        computed = len(self._stats) + len(self._partition)
        if computed != columns:
            # Copies, because plans in other threads may add a column concurrently.
            size = sum(column.size_bytes for column in list(self._stats.values()))
            size += sum(column.size_bytes for column in list(self._partition.values()))
            self._size_cache = computed, size
        return self.extents.nbytes + 400 * len(self.blocks) + size + self.derived.size_bytes

    def locate(self, row: int) -> tuple[Block, int]:
        """(block, row in the block) of a row id."""
        return self.blocks[self._numbers[row >> ROW_BITS]], row & ROW_MASK

    def manifest_of(self, row: int) -> ManifestFile:
        """The manifest of a row id."""
        return self.manifests[self._numbers[row >> ROW_BITS]]

    def split(self, rows: Longs) -> tuple[Longs, Longs]:
        """(block numbers, rows in those blocks), each int64[n], of n row ids."""
        return np.searchsorted(self.ordinals, rows >> ROW_BITS), rows & ROW_MASK

    def rows_of(self, number: int) -> Longs:
        """int64[rows], the row ids of a block."""
        first = int(self.ordinals[number]) << ROW_BITS
        return np.arange(first, first + self.blocks[number].rows, dtype=np.int64)

    def locate_delete(self, row: int) -> tuple[Block, int]:
        """(block, row in the block) of a row of the delete blocks."""
        number = bisect_right(self.delete_starts, row) - 1
        return self.delete_blocks[number], row - self.delete_starts[number]

    def stats(self, column_id: int, kind: str) -> ColumnStatistics:
        """Statistics for comparisons as type `kind`; blocks that store an incomparable type have no bounds."""
        key = (column_id, kind)
        column = self._stats.get(key)
        if column is None:
            base = None if self._base is None else self._base()
            known = None if base is None else base.known_stats(column_id, kind)
            column = self._stats[key] = ColumnStatistics(self, column_id, kind, known)
        return column

    def known_stats(self, column_id: int, kind: str) -> ColumnStatistics | None:
        """The cached statistics of a column, None if they are not computed yet."""
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


def _layout(block: Block, packed: Packed) -> tuple[int, ...]:
    """A row of a layout, with 0 as first position."""
    address = block.address

    def at(offset: int) -> int:
        return 0 if offset == NONE else address + offset

    return (
        packed.form,
        packed.width,
        at(packed.codes),
        at(packed.presence),
        block.rows,
        0,
        packed.base,
        at(packed.common_at),
        len(packed.common),
        at(packed.lengths),
        at(packed.ends),
        at(packed.tails),
        packed.lengths_width,
    )


def _sides(view: TableView, packed: Sequence[Packed | None], known: Sequence[Side] | None = None) -> tuple[Side, ...]:
    """One side per form: a decimal column widened past 18 digits has two forms. `known`: those of the view's base."""
    forms = sorted({column.form for column in packed if column is not None})
    if len(forms) == 1:
        same = known is not None and len(known) == 1 and known[0].form == forms[0]
        return (Side(Form(forms[0]), packed, view, known[0] if same and known is not None else None),)
    return tuple(
        Side(Form(form), [column if column is not None and column.form == form else None for column in packed], view)
        for form in forms
    )


def _with_known(
    view: TableView, known: Sequence[ColumnEntry | None] | None, read: Callable[[Block], ColumnEntry | None]
) -> list[ColumnEntry | None]:
    """What `read` returns for each block; `known` has it for the blocks of the view's base."""
    if known is None:
        return [read(block) for block in view.blocks]
    shared, of_base = view.shared_blocks
    entries: list[ColumnEntry | None] = [None] * len(view.blocks)
    for number, of_known in zip(shared.tolist(), of_base.tolist(), strict=True):
        entries[number] = known[of_known]
    for number in view.new_blocks:
        entries[number] = read(view.blocks[number])
    return entries


def _flags(entries: Sequence[ColumnEntry | None], read: Callable[[ColumnEntry], int]) -> Flags | None:
    flags = np.array([0 if entry is None else read(entry) for entry in entries], dtype=np.uint8)
    return flags if flags.any() else None


def _usable(entry: ColumnEntry | None, kind: str) -> ColumnEntry | None:
    """The entry, without its bounds if values of its type cannot be compared as `kind`."""
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


def comparable(stored: str, kind: str) -> bool:
    """Whether the types are equal, or Iceberg promotes one to the other without changing the meaning of values.

    A date promoted to a timestamp (format version 3) changes its unit, so its bounds are not comparable.
    """
    if stored == kind or (stored, kind) in _WIDENED:
        return True
    return stored.startswith("decimal") and kind.startswith("decimal") and decimal_scale(stored) == decimal_scale(kind)
