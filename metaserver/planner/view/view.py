"""The files of a snapshot in columns (`TableView`), and selections of them (`FileSelection`), which pruning narrows.

A view consists of the blocks of a snapshot in sequence, and of one row of summaries for each block and queried column.
No data are copied: the lower or upper bounds of a column (`BoundColumn`) contain the addresses of the blocks' arrays,
which kernels read. The bounds are assembled for the first predicate on the column, and are cached. The view of the next
snapshot reuses the blocks.

An entry id consists of the ordinal of a manifest in the manifest list, and of the number of an entry in the manifest:
`ordinal << 32 | entry`. So a view with only some of a snapshot's manifests has the same entry ids as the full view, and
the files of two plans can be compared. A position counts the files of all blocks of a view, as masks do.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.types.values import get_decimal_scale
from seamark.formats.index.kernels import _scan
from seamark.formats.index.packing import NONE, Form, Longs, Packed
from seamark.metaserver.index.blocks.block import Block, ColumnEntry, DerivedValues
from seamark.metaserver.index.blocks.sketches import ROWS_MIN, STRING_ROWS_MIN, WIDTH_MIN, find_sketch

Flags = npt.NDArray[np.uint8]
Objects = npt.NDArray[np.object_]
Array = TypeVar("Array", bound=npt.NDArray[Any])
_WIDENED = {("int", "long"), ("long", "int"), ("float", "double"), ("double", "float")}
_LAYOUT_FIELDS = 15
_FORM, _WIDTH, _ROWS, _FIRST, _BASE, _SKETCH = 0, 1, 4, 5, 6, 13
"""The columns of an array of layouts (`BoundColumn.layout`)."""
_SKETCHED_ROWS_MIN = 100_000
"""The minimum number of rows that a comparison may read for which the column gets sketches."""
ENTRY_BITS = 32
ENTRY_MASK = (1 << ENTRY_BITS) - 1
"""The bits of an entry id that contain the number of the entry in its manifest."""


class BoundColumn:
    """The lower or upper bounds of a column in one form.

    `layout`, int64[blocks, 15], has the format of `_scan.pyx`. `low` and `high` contain the minimum and the maximum of
    each block.
    """

    __slots__ = ("form", "high", "layout", "low", "packed")

    def __init__(
        self, form: Form, packed_columns: Objects, view: TableView, of_base: Sequence[BoundColumn] | None
    ) -> None:
        """Read the bounds of the blocks that are not in the view's base.

        Args:
            form: The form of the values.
            packed_columns: object[blocks]: the packed columns. None for a block without values in this form.
            view: The view.
            of_base: The same column of the view's base, in all forms. None if the base has not read it.
        """
        dtype = (np.int64, np.float64, np.uint64)[form]
        self.form = form
        self.layout: Longs = np.zeros((len(packed_columns), _LAYOUT_FIELDS), dtype=np.int64)
        self.layout[:, _FORM] = -1
        self.low: npt.NDArray[Any] = np.zeros(len(packed_columns), dtype=dtype)
        self.high: npt.NDArray[Any] = np.zeros(len(packed_columns), dtype=dtype)
        self.packed = packed_columns
        """object[blocks]: the packed columns. None for a block without values in this form."""
        self._add(range(len(packed_columns)) if of_base is None else view.new_blocks, view)
        shared, in_base = view.shared_blocks
        for side in of_base or ():
            if side.form == form:
                self.layout[shared] = side.layout[in_base]
                self.low[shared], self.high[shared] = side.low[in_base], side.high[in_base]
        has_form = self.layout[:, _FORM] >= 0
        self.layout[has_form, _FIRST] = view.extents[has_form, _FIRST]

    def _add(self, numbers: Sequence[int], view: TableView) -> None:
        """Read the columns of some blocks."""
        positions, rows, low, high = [], [], [], []
        for number in numbers:
            column = self.packed[number]
            if column is not None:
                view.blocks[number].verify(column)
                positions.append(number)
                rows.append(_make_layout(view.blocks[number], column))
                low.append(column.low)
                high.append(column.high)
        if positions:
            self.layout[positions] = rows
            self.low[positions] = np.array(low, dtype=self.low.dtype)
            self.high[positions] = np.array(high, dtype=self.high.dtype)

    def add_sketches(self, view: TableView) -> None:
        """Add sketches to the layouts of the blocks where reading a sketch takes less time than reading the codes."""
        layout = self.layout
        rows_min = STRING_ROWS_MIN if self.form is Form.STRINGS else ROWS_MIN
        is_wide = (layout[:, _FORM] >= 0) & (layout[:, _WIDTH] >= WIDTH_MIN) & (layout[:, _ROWS] >= rows_min)
        for number in np.flatnonzero(is_wide & (layout[:, _SKETCH] == 0)).tolist():
            layout[number, _SKETCH : _SKETCH + 2] = find_sketch(view.blocks[number], self.packed[number])

    @property
    def size_bytes(self) -> int:
        return self.layout.nbytes + self.low.nbytes + self.high.nbytes + 8 * len(self.packed)

    def count_rows_read(self) -> int:
        """Return the maximum number of rows that a comparison with any value reads.

        A comparison reads the blocks whose minimum and maximum enclose the value.
        """
        with_values = np.flatnonzero(self.layout[:, _FORM] >= 0)
        rows, low, high = self.layout[with_values, _ROWS], self.low[with_values], self.high[with_values]
        low_order, high_order = np.argsort(low), np.argsort(high)
        started_rows = np.cumsum(rows[low_order])
        ended_rows = np.concatenate(([0], np.cumsum(rows[high_order])))
        return int((started_rows - ended_rows[np.searchsorted(high[high_order], low[low_order])]).max(initial=0))


class ColumnStatistics:
    """The statistics of one column, compared as one type.

    Flags have the values of those in `ColumnEntry`. An array of flags is None if all of its flags are 0.
    """

    __slots__ = (
        "_bounds",
        "_flags",
        "entries",
        "lower",
        "nans_only",
        "no_nans",
        "no_nulls",
        "nulls_only",
        "rows_read",
        "upper",
    )

    def __init__(self, view: TableView, column_id: int, kind: str, of_base: ColumnStatistics | None = None) -> None:
        """Read the statistics of the blocks that are not in the view's base.

        `of_base` are the same statistics of the view's base, or None if the base has not read them.
        """
        usable_entries = [
            _to_usable_entry(view.blocks[number].find_entry(column_id), kind)
            for number in view.list_blocks_to_compute(of_base)
        ]
        self.entries: Objects = view.join_base(
            make_object_array(usable_entries), None if of_base is None else of_base.entries
        )
        """object[blocks]: the `ColumnEntry` of each block, or None."""
        flags = np.zeros((len(usable_entries), 4), dtype=np.uint8)
        for number, entry in enumerate(usable_entries):
            if entry is not None:
                flags[number] = entry.nulls_only, entry.nans_only, entry.no_nulls, entry.no_nans
        self._flags: Flags = view.join_base(flags, None if of_base is None else of_base._flags)
        self.nulls_only, self.nans_only, self.no_nulls, self.no_nans = (
            np.ascontiguousarray(flag) if flag.any() else None for flag in self._flags.T
        )
        lower = make_object_array([None if entry is None else entry.lower for entry in usable_entries])
        upper = make_object_array([None if entry is None else entry.upper for entry in usable_entries])
        if of_base is None:
            self._bounds = lower, upper
        else:
            self._bounds = (
                view.join_base(lower, of_base._bounds[0]),
                view.join_base(upper, of_base._bounds[1]),
            )
        self.lower: tuple[BoundColumn, ...] = compute_bound_columns(
            view, self._bounds[0], None if of_base is None else of_base.lower
        )
        self.upper: tuple[BoundColumn, ...] = compute_bound_columns(
            view, self._bounds[1], None if of_base is None else of_base.upper
        )
        self.rows_read = max(sum(side.count_rows_read() for side in sides) for sides in (self.lower, self.upper))
        """The maximum number of rows that a comparison with any value reads."""
        for side in (*self.lower, *self.upper):
            if side.count_rows_read() >= _SKETCHED_ROWS_MIN:
                side.add_sketches(view)

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in (*self.lower, *self.upper)) + 32 * len(self.entries)


class PartitionValues:
    """The exact values of one partition field.

    Attributes:
        known: bool[blocks]: whether the spec of each block has the field.
        nulls: uint8[blocks]: 0 if no value is null, 1 if all values are null, 2 if some values are null.
        has_nulls: Whether any item of `nulls` is not 0.
    """

    __slots__ = ("has_nulls", "is_known", "known", "nulls", "packed", "sides")

    def __init__(self, view: TableView, field_id: int, kind: str, of_base: PartitionValues | None = None) -> None:
        """Read the values of the blocks that are not in the view's base.

        `of_base` are the same values of the view's base, or None if the base has not read them.
        """
        stored_entries = [
            view.blocks[number].find_partition_column(field_id) for number in view.list_blocks_to_compute(of_base)
        ]
        usable = [entry if entry is not None and are_comparable(entry[0], kind) else None for entry in stored_entries]
        has_field = np.array([entry is not None for entry in usable], dtype=np.bool_)
        packed_columns = [None if entry is None else entry[1] for entry in usable]
        nulls = [1 if values is None else 0 if values.presence == NONE else 2 for values in packed_columns]
        self.known: npt.NDArray[np.bool_] = view.join_base(has_field, None if of_base is None else of_base.known)
        self.packed: Objects = view.join_base(
            make_object_array(packed_columns), None if of_base is None else of_base.packed
        )
        self.nulls: Flags = view.join_base(np.array(nulls, dtype=np.uint8), None if of_base is None else of_base.nulls)
        self.sides: tuple[BoundColumn, ...] = compute_bound_columns(
            view, self.packed, None if of_base is None else of_base.sides
        )
        self.has_nulls = bool(self.nulls.any())
        self.is_known = bool(self.known.all())
        """Whether all blocks have the field."""

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in self.sides) + len(self.known) * 17


class TableView:
    """The data files of a snapshot, or the files of some of its manifests.

    `blocks[i]` is the block of `manifests[i]`. This is the data manifest with the number `ordinals[i]` in the snapshot.
    The ordinals are ascending. By default, they are those of all data manifests. `delete_blocks` are the blocks of
    `delete_manifests`, which are all delete manifests of the snapshot.
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
        """Create a view of these blocks.

        `base` is a view that shares blocks with this view, such as the view of the previous snapshot. While the base
        is in memory, its columns are reused.
        """
        self.manifests = tuple(manifests)
        self.blocks = tuple(blocks)
        self.delete_manifests = tuple(delete_manifests)
        self.delete_blocks = tuple(delete_blocks)
        self.ordinals: Longs = np.array(range(len(self.blocks)) if ordinals is None else ordinals, dtype=np.int64)
        self.base_blocks = 0 if base is None else len(base.blocks)
        self._numbers: dict[int, int] = dict(zip(self.ordinals.tolist(), range(len(self.blocks)), strict=True))
        self._identities = _list_identities(self.blocks)
        self._base = None if base is None else weakref.ref(base)
        self.shared_blocks = _find_shared(self._identities, None if base is None else base._identities)
        """The numbers of the shared blocks in this view, and their numbers in the base, int64[shared] each."""
        is_new = np.ones(len(self.blocks), dtype=np.bool_)
        is_new[self.shared_blocks[0]] = False
        self.new_blocks: list[int] = np.flatnonzero(is_new).tolist()
        """The numbers of the blocks that are not in the base."""
        heads = [_read_head(self.blocks[number]) for number in self.list_blocks_to_compute(base)]
        self._heads: Longs = self.join_base(
            np.array(heads, dtype=np.int64).reshape(len(heads), 3), None if base is None else base._heads
        )
        ends: Longs = np.cumsum(self._heads[:, 0])
        self.starts: list[int] = [0, *ends.tolist()]
        self.delete_starts = _compute_starts(self.delete_blocks)
        self.spec_ids: Longs = np.ascontiguousarray(self._heads[:, 1])
        self.specs = frozenset(np.unique(self.spec_ids).tolist())
        self._stats: dict[tuple[int, str], ColumnStatistics] = {}
        self._partition: dict[tuple[int, str], PartitionValues] = {}
        self.extents: Longs = np.zeros((len(self.blocks), _LAYOUT_FIELDS), dtype=np.int64)
        """The layouts for kernels that read no column: row counts, first positions and, as base, first entry ids."""
        self.extents[:, _ROWS] = self._heads[:, 0]
        self.extents[:, _FIRST] = ends - self._heads[:, 0]
        self.extents[:, _BASE] = self.ordinals << ENTRY_BITS
        self.blocks_with_empty_files: list[int] = np.flatnonzero(self._heads[:, 2]).tolist()
        """The numbers of the blocks with a file whose record count is 0 or unknown."""
        self._size_cache = (0, 0)
        self.derived = DerivedValues()
        """Data that other modules compute from the view, and that are kept with it."""

    @property
    def file_count(self) -> int:
        """The number of data files."""
        return self.starts[-1]

    @property
    def base(self) -> TableView | None:
        """The view from which this view was made, or None if it is no longer in memory."""
        return None if self._base is None else self._base()

    @property
    def edges(self) -> frozenset[Block]:
        """The first and the last block. The view of a neighbouring snapshot usually has at least one of them."""
        return frozenset({*self.blocks[:1], *self.blocks[-1:]})

    @property
    def delete_file_count(self) -> int:
        return self.delete_starts[-1]

    @property
    def size_bytes(self) -> int:
        """The memory of the view and of the data derived from it, without its blocks."""
        columns, size = self._size_cache
        column_count = len(self._stats) + len(self._partition)
        if column_count != columns:
            # Iterate over copies, because plans in other threads may add a column concurrently.
            size = sum(column.size_bytes for column in list(self._stats.values()))
            size += sum(column.size_bytes for column in list(self._partition.values()))
            self._size_cache = column_count, size
        return self.extents.nbytes + 400 * len(self.blocks) + size + self.derived.size_bytes

    def find_blocks(self, manifests: Sequence[ManifestFile]) -> list[Block | None]:
        """Return the view's block of each manifest, or None for a manifest object that the view does not contain."""
        positions, of_view = _find_shared(_list_identities(manifests), _list_identities(self.manifests))
        blocks = np.full(len(manifests), None, dtype=np.object_)
        blocks[positions] = make_object_array(self.blocks)[of_view]
        entry_blocks: list[Block | None] = blocks.tolist()
        return entry_blocks

    def locate(self, entry_id: int) -> tuple[Block, int]:
        """Return the block of an entry id, and the row in the block."""
        return self.blocks[self._numbers[entry_id >> ENTRY_BITS]], entry_id & ENTRY_MASK

    def find_block_number(self, entry_id: int) -> int:
        """Return the number of the block that contains an entry id."""
        number: int = self._numbers[entry_id >> ENTRY_BITS]
        return number

    def find_manifest(self, entry_id: int) -> ManifestFile:
        return self.manifests[self._numbers[entry_id >> ENTRY_BITS]]

    def split_entry_ids(self, entry_ids: Longs) -> tuple[Longs, Longs]:
        """Return the block number of each entry id, and the row in the block, int64[n] each."""
        return np.searchsorted(self.ordinals, entry_ids >> ENTRY_BITS), entry_ids & ENTRY_MASK

    def find_positions(self, entry_ids: Longs) -> Longs:
        """Return the positions of entry ids among the files of all blocks, int64[n]."""
        numbers, local = self.split_entry_ids(entry_ids)
        positions: Longs = np.asarray(self.starts, dtype=np.int64)[numbers] + local
        return positions

    def find_entry_ids(self, positions: Longs) -> Longs:
        """Return the entry ids at these positions, int64[n]. This is the inverse of `find_positions`."""
        starts = np.array(self.starts[:-1], dtype=np.int64)
        numbers = np.searchsorted(starts, positions, side="right") - 1
        entry_ids: Longs = (self.ordinals[numbers] << ENTRY_BITS) + positions - starts[numbers]
        return entry_ids

    def list_block_entry_ids(self, number: int) -> Longs:
        """Return the entry ids of a block, int64[rows]."""
        first = int(self.ordinals[number]) << ENTRY_BITS
        return np.arange(first, first + self.blocks[number].rows, dtype=np.int64)

    def locate_delete(self, row: int) -> tuple[Block, int]:
        """Return the block of a delete row, and the row in the block. Delete rows count across all delete blocks."""
        number = bisect_right(self.delete_starts, row) - 1
        return self.delete_blocks[number], row - self.delete_starts[number]

    def find_statistics(self, column_id: int, kind: str) -> ColumnStatistics:
        """Return the statistics of a column for comparisons as type `kind`.

        Blocks whose values cannot be compared as this type have no bounds.
        """
        key = (column_id, kind)
        column = self._stats.get(key)
        if column is None:
            base = self.base
            of_base = None if base is None else base.find_computed_stats(column_id, kind)
            column = self._stats[key] = ColumnStatistics(self, column_id, kind, of_base)
        return column

    def find_cheap_stats(self, column_id: int, kind: str) -> ColumnStatistics | None:
        """Return the statistics of a column, or None if this would read most of the blocks."""
        base = self.base
        has_few_new_blocks = base is not None and 2 * len(self.new_blocks) <= len(self.blocks)
        if has_few_new_blocks and base is not None and base.find_computed_stats(column_id, kind) is not None:
            return self.find_statistics(column_id, kind)
        return self.find_computed_stats(column_id, kind)

    def find_computed_stats(self, column_id: int, kind: str) -> ColumnStatistics | None:
        """Return the statistics of a column if they are already computed, otherwise None."""
        return self._stats.get((column_id, kind))

    def partition(self, field_id: int, kind: str) -> PartitionValues:
        """Return the values of a partition field for comparisons as type `kind`."""
        key = (field_id, kind)
        column = self._partition.get(key)
        if column is None:
            base = self.base
            of_base = None if base is None else base._partition.get(key)
            column = self._partition[key] = PartitionValues(self, field_id, kind, of_base)
        return column

    def compute_columns_like(self, other: TableView) -> None:
        """Compute the same columns that another view has computed.

        The method may be called in any thread.
        """
        for column_id, kind in list(other._stats):
            self.find_statistics(column_id, kind)
        for field_id, kind in list(other._partition):
            self.partition(field_id, kind)

    def list_blocks_to_compute(self, of_base: object) -> Sequence[int]:
        """Return the numbers of the blocks to compute: all blocks if `of_base` is None, otherwise the new blocks."""
        return range(len(self.blocks)) if of_base is None else self.new_blocks

    def join_base(self, new_rows: Array, of_base: Array | None) -> Array:
        """Combine rows computed for the new blocks with the rows of the base. The result has a row for each block."""
        if of_base is None:
            return new_rows
        all_rows = np.empty((len(self.blocks), *of_base.shape[1:]), dtype=of_base.dtype)
        shared, in_base = self.shared_blocks
        all_rows[shared] = of_base[in_base]
        all_rows[self.new_blocks] = new_rows
        return cast("Array", all_rows)


def _compute_starts(blocks: Sequence[Block]) -> list[int]:
    """Return the position of the first row of each block, and the number of all rows."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.rows)
    return starts


def _make_layout(block: Block, packed_column: Packed) -> tuple[int, ...]:
    """Return the row of `BoundColumn.layout` for a block, without a sketch, and with the first position 0."""
    address = block.address

    def at(offset: int) -> int:
        return 0 if offset == NONE else address + offset

    return (
        packed_column.form,
        packed_column.width,
        at(packed_column.codes),
        at(packed_column.presence),
        block.rows,
        0,
        packed_column.base,
        at(packed_column.common_at),
        len(packed_column.common),
        at(packed_column.lengths),
        at(packed_column.ends),
        at(packed_column.tails),
        packed_column.lengths_width,
        0,
        0,
    )


def compute_bound_columns(
    view: TableView, packed_columns: Objects, of_base: Sequence[BoundColumn] | None
) -> tuple[BoundColumn, ...]:
    """Return a column in each of its forms. A decimal column that was widened to more than 18 digits has two forms.

    Args:
        packed_columns: object[blocks]: the packed columns, or None.
        of_base: The same column of the view's base. None if the base has not read it.
    """
    columns_to_compute = [packed_columns[number] for number in view.list_blocks_to_compute(of_base)]
    computed_forms = np.array([-1 if column is None else column.form for column in columns_to_compute], dtype=np.int8)
    forms_of_base = None
    if of_base is not None:
        forms_of_base = np.full(view.base_blocks, -1, dtype=np.int8)
        for side in of_base:
            forms_of_base[side.layout[:, _FORM] >= 0] = side.form
    forms = view.join_base(computed_forms, forms_of_base)
    several = np.unique(forms[forms >= 0]).tolist()
    if len(several) == 1:
        return (BoundColumn(Form(several[0]), packed_columns, view, of_base),)
    return tuple(
        BoundColumn(Form(form), _replace_unselected(packed_columns, forms == form), view, of_base) for form in several
    )


def _replace_unselected(values: Objects, is_selected: npt.NDArray[np.bool_]) -> Objects:
    """Replace the values for which `is_selected` is False by None."""
    selected_values = np.full(len(values), None, dtype=np.object_)
    selected_values[is_selected] = values[is_selected]
    return selected_values


def make_object_array(values: Sequence[object]) -> Objects:
    """Return a one-dimensional array of Python objects, object[values]."""
    array = np.empty(len(values), dtype=np.object_)
    array[:] = values
    return array


def _read_head(block: Block) -> tuple[int, int, bool]:
    """Return the number of rows, the spec id, and whether any record count is 0 or unknown."""
    counts = block.get_packed_longs("record_count")
    return block.rows, block.spec_id, counts is None or counts.low <= 0


def _list_identities(values: Sequence[object]) -> Longs:
    """Return the identities of live objects, int64[objects]. Equal identities mean the same object."""
    return np.fromiter(map(id, values), dtype=np.int64, count=len(values))


def _find_shared(identities: Longs, of_base: Longs | None) -> tuple[Longs, Longs]:
    """Return the positions in both arrays of the identities that both contain."""
    if of_base is None or not len(of_base):
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing
    order = np.argsort(of_base)
    positions = np.minimum(np.searchsorted(of_base[order], identities), len(of_base) - 1)
    nearest = order[positions]
    shared = np.flatnonzero(of_base[nearest] == identities)
    return shared, nearest[shared]


def _to_usable_entry(entry: ColumnEntry | None, kind: str) -> ColumnEntry | None:
    """Return the entry. If values of its type cannot be compared as `kind`, return it without bounds."""
    if entry is None or are_comparable(entry.kind, kind):
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


def are_comparable(stored_type: str, kind: str) -> bool:
    """Return whether the types are equal, or Iceberg promotes one to the other without changing the meaning of values.

    When a date is promoted to a timestamp (format version 3), its unit changes, so the bounds are not comparable.
    """
    if stored_type == kind or (stored_type, kind) in _WIDENED:
        return True
    return (
        stored_type.startswith("decimal")
        and kind.startswith("decimal")
        and get_decimal_scale(stored_type) == get_decimal_scale(kind)
    )


Expired = Callable[[], bool]
_WAITING_MAX = 16
"""The maximum number of comparisons that kernels evaluate together."""


class FileSelection:
    """The selected files of a view, as rows of its blocks.

    `state`, uint8[blocks], is 0 if no row of the block is selected, 1 if all rows are selected, and 2 if some rows
    are selected. A selected row has the byte 1 in `mask`, uint8[rows].

    Comparisons are queued until the selection is read. Then they are evaluated together, block by block. A plan of
    millions of files mostly waits for memory. If a block is compared several times in succession, its data stay in the
    processor's cache. If only the rows are read, no mask is made.
    """

    __slots__ = ("_mask", "_state", "_waiting", "view")

    def __init__(
        self, view: TableView, state: npt.NDArray[np.uint8], mask: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Create a selection. If there is no mask, no block may have state 2."""
        self.view = view
        self._state = state
        self._mask = mask
        self._waiting: list[_scan.Comparison] = []

    @property
    def state(self) -> npt.NDArray[np.uint8]:
        if self._waiting:
            self.apply_waiting()
        return self._state

    @property
    def mask(self) -> npt.NDArray[np.uint8]:
        """The mask, with a byte for each file of the view. Pending selections are applied first."""
        if self._waiting:
            self.apply_waiting()
        if self._mask is None:
            self._mask = np.empty(self.view.file_count, dtype=np.uint8)
        return self._mask

    def compare(self, side: BoundColumn, op: int, literal: float | bytes) -> None:
        """Keep rows whose value is absent or satisfies the kernels' comparison `op` with the literal."""
        if len(self._waiting) == _WAITING_MAX:
            self.apply_waiting()
        self._waiting.append((side.layout, side.low, side.high, op, literal))

    def apply_waiting(self) -> None:
        """Apply the queued comparisons."""
        comparisons, self._waiting = self._waiting, []
        if comparisons:
            _scan.narrow_all(comparisons, self.view.extents, self._state, self.mask)

    @property
    def is_empty(self) -> bool:
        """Whether no row is selected. Queued comparisons are not considered."""
        # A search in bytes is much faster than `any` on the array.
        state = self._state.tobytes()
        return b"\1" not in state and b"\2" not in state

    @classmethod
    def select_all(cls, view: TableView) -> FileSelection:
        # The result is the same as with `np.ones`. It takes a third of the time if the code of `np.ones` is not
        # in the processor's cache.
        return cls(view, np.frombuffer(bytearray(b"\1" * len(view.blocks)), dtype=np.uint8))

    def copy(self) -> FileSelection:
        """Return a copy whose mask is not shared."""
        state = self.state.copy()
        return FileSelection(self.view, state, self.mask.copy() if (state == 2).any() else None)

    def list_entry_ids(self) -> Longs:
        """Return the ascending entry ids of the selected files, int64[selected]."""
        return _scan.collect_all(self._waiting, self.view.extents, self._state, self._mask)

    def list_positions(self) -> Longs:
        """Return the ascending positions of the selected files in the view, int64[selected]."""
        return self.view.find_positions(self.list_entry_ids())

    def intersect(self, mask: npt.NDArray[np.uint8]) -> None:
        """Narrow to the rows whose byte in `mask`, uint8[rows], is 1."""
        _scan.intersect(self.view.extents, self.state, self.mask, mask)

    def count(self) -> int:
        return _scan.count(self.view.extents, self.state, self.mask)

    def sum_file_bytes(self) -> int:
        """Return the total size of the selected files in bytes. The method reads the size of every file."""
        total = 0
        for number in np.flatnonzero(self.state).tolist():
            sizes = self.view.blocks[number].read_longs("file_size_in_bytes")
            if self.state[number] == 2:
                sizes = sizes[self.mask[self.view.starts[number] : self.view.starts[number + 1]] != 0]
            total += int(sizes.sum())
        return total

    def measure_size(self) -> tuple[int, int]:
        """Return the number of selected files, and their total bytes."""
        return self.count(), self.sum_file_bytes()

    def clear(self) -> None:
        """Remove all files from the selection."""
        self._waiting = []
        self._state[:] = 0

    def copy_block(self, number: int, other: FileSelection) -> None:
        """Set the selection of one block to the selection of this block in `other`."""
        first, end = self.view.starts[number], self.view.starts[number + 1]
        self.state[number] = other.state[number]
        self.mask[first:end] = other.mask[first:end]

    def add(self, other: FileSelection) -> None:
        """Add the files of another selection of the same view."""
        _scan.merge(self.view.extents, self.state, self.mask, other.state, other.mask)

    def keep(self, number: int, rows: npt.NDArray[np.bool_]) -> None:
        """Narrow one block to the rows for which `rows` is True."""
        first, end = self.view.starts[number], self.view.starts[number + 1]
        if self.state[number] == 1:
            self.mask[first:end] = rows
        else:
            self.mask[first:end] &= rows.view(np.uint8)
        self.state[number] = 2 if self.mask[first:end].any() else 0

    def check_invariants(self) -> None:
        """Check, for tests, that every state and mask byte is valid."""
        assert set(np.unique(self.state).tolist()) <= {0, 1, 2}
        for number in np.flatnonzero(self.state == 2):
            part = self.mask[self.view.starts[number] : self.view.starts[number + 1]]
            assert set(np.unique(part).tolist()) <= {0, 1}


def never_expires() -> bool:
    """Return False. The function replaces `expired` where there is no time budget."""
    return False


def narrow_to_any(
    selection: FileSelection, branches: Iterable[Callable[[FileSelection], None]], is_expired: Expired = never_expires
) -> None:
    """Narrow to the union of the files that the branches keep."""
    union: FileSelection | None = None
    for branch in branches:
        if is_expired():
            return  # The time budget ended before all branches were evaluated, so all files must be kept.
        part = selection.copy()
        branch(part)
        if union is None:
            union = part
        else:
            union.add(part)
    selection.clear()
    if union is not None:
        # The merge changes only blocks of `union`, because other selections may share the mask of the other blocks.
        selection.add(union)
