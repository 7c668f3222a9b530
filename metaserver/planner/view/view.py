"""The files of a snapshot in columns (`TableView`).

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
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.types.values import get_decimal_scale
from seamark.formats.index.packing import NONE, Form, Longs, Packed
from seamark.metaserver.index.blocks.block import Block, ColumnEntry, DerivedValues
from seamark.metaserver.index.blocks.sketches import ROWS_MIN, STRING_ROWS_MIN, WIDTH_MIN, find_sketch

Flags = npt.NDArray[np.uint8]
Objects = npt.NDArray[np.object_]
Array = TypeVar("Array", bound=npt.NDArray[Any])
_WIDENED = {("int", "long"), ("long", "int"), ("float", "double"), ("double", "float")}
_LAYOUT_FIELDS = 15
_FORM, _WIDTH, _ROWS, _FIRST, _VALUE_BASE, _SKETCH = 0, 1, 4, 5, 6, 13
"""The columns of an array of layouts (`BoundColumn.layout`)."""
_SUMMARY_ROWS, _SUMMARY_SPEC, _SUMMARY_HAS_EMPTY_FILES = range(3)
"""The columns of the array of block summaries (`_summarize_block`)."""
NO_FILES, ALL_FILES, SOME_FILES = 0, 1, 2
"""The values of a flag of a block: whether something is true for none, for all, or for some of the block's files."""
_VIEW_BLOCK_BYTES, _STATISTICS_BLOCK_BYTES, _PARTITION_BLOCK_BYTES, _REFERENCE_BYTES = 400, 32, 17, 8
"""The estimated memory for each block: of a view, of `ColumnStatistics` and `PartitionValues`, and of a reference."""
_SKETCHED_ROWS_MIN = 100_000
"""The minimum number of rows that a comparison may read for which the column gets sketches."""
ENTRY_BITS = 32
ENTRY_MASK = (1 << ENTRY_BITS) - 1
"""The bits of an entry id that contain the number of the entry in its manifest."""


class BoundColumn:
    """The lower or upper bounds of a column in one form.

    The bounds of a column may have several forms, such as integers and strings. Each form has its own instance.

    Attributes:
        form: The form of the values.
        layout: int64[blocks, 15]: the addresses and sizes of each block's arrays, in the format of `_scan.pyx`.
        low: The smallest value of each block.
        high: The largest value of each block.
    """

    __slots__ = ("form", "high", "layout", "low", "packed")

    def __init__(
        self, form: Form, packed_columns: Objects, view: TableView, base_columns: Sequence[BoundColumn] | None
    ) -> None:
        """Read the bounds of new blocks, and copy those of the blocks that an older view of the table has read.

        Args:
            form: The form of the values.
            packed_columns: object[blocks]: the packed columns. None for a block without values in this form.
            view: The view. Its base is the older view, with which it shares blocks.
            base_columns: The same column of the view's base, in all forms. None if the base has not read it.
        """
        dtype = (np.int64, np.float64, np.uint64)[form]
        self.form = form
        self.layout: Longs = np.zeros((len(packed_columns), _LAYOUT_FIELDS), dtype=np.int64)
        self.layout[:, _FORM] = -1
        self.low: npt.NDArray[Any] = np.zeros(len(packed_columns), dtype=dtype)
        self.high: npt.NDArray[Any] = np.zeros(len(packed_columns), dtype=dtype)
        self.packed = packed_columns
        """object[blocks]: the packed columns. None for a block without values in this form."""
        self._read_blocks(range(len(packed_columns)) if base_columns is None else view.new_blocks, view)
        shared, in_base = view.shared_blocks  # The numbers of the shared blocks in this view and in its base.
        for side in base_columns or ():
            if side.form == form:
                self.layout[shared] = side.layout[in_base]
                self.low[shared], self.high[shared] = side.low[in_base], side.high[in_base]
        # The position of a block's first file is a position in this view, so it is not copied from the base.
        has_form = self.layout[:, _FORM] >= 0
        self.layout[has_form, _FIRST] = view.extents[has_form, _FIRST]

    def _read_blocks(self, numbers: Sequence[int], view: TableView) -> None:
        """Read the layouts and the smallest and largest values of the column in some blocks, given by their numbers."""
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
        """Add sketches to the layouts of the blocks where reading a sketch takes less time than reading the codes.

        A sketch has one byte for each row, with which most comparisons are decided.
        """
        layout = self.layout
        rows_min = STRING_ROWS_MIN if self.form is Form.STRINGS else ROWS_MIN
        is_wide = (layout[:, _FORM] >= 0) & (layout[:, _WIDTH] >= WIDTH_MIN) & (layout[:, _ROWS] >= rows_min)
        for number in np.flatnonzero(is_wide & (layout[:, _SKETCH] == 0)).tolist():
            # A sketch is described by two numbers.
            layout[number, _SKETCH : _SKETCH + 2] = find_sketch(view.blocks[number], self.packed[number])

    @property
    def size_bytes(self) -> int:
        return self.layout.nbytes + self.low.nbytes + self.high.nbytes + _REFERENCE_BYTES * len(self.packed)

    def count_rows_read(self) -> int:
        """Return the maximum number of rows that a comparison with any value reads.

        A comparison reads the blocks whose minimum and maximum enclose the value.
        """
        numbers = np.flatnonzero(self.layout[:, _FORM] >= 0)
        rows, low, high = self.layout[numbers, _ROWS], self.low[numbers], self.high[numbers]
        # At each minimum, the rows that are read are those of all ranges that have begun, less those that have ended.
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

    def __init__(
        self, view: TableView, column_id: int, kind: str, base_statistics: ColumnStatistics | None = None
    ) -> None:
        """Read the statistics of new blocks, and copy those of the blocks that an older view of the table has read.

        Args:
            view: The view. Its base is the older view, with which it shares blocks.
            column_id: The field id of the column.
            kind: The type as which the values are compared.
            base_statistics: The same statistics of the view's base, or None if the base has not read them.
        """
        usable_entries = [
            _to_usable_entry(view.blocks[number].find_entry(column_id), kind)
            for number in view.list_blocks_to_compute(base_statistics)
        ]
        self.entries: Objects = view.join_base(
            make_object_array(usable_entries), None if base_statistics is None else base_statistics.entries
        )
        """object[blocks]: the `ColumnEntry` of each block, or None."""
        flags = np.zeros((len(usable_entries), 4), dtype=np.uint8)
        for number, entry in enumerate(usable_entries):
            if entry is not None:
                flags[number] = entry.nulls_only, entry.nans_only, entry.no_nulls, entry.no_nans
        self._flags: Flags = view.join_base(flags, None if base_statistics is None else base_statistics._flags)
        self.nulls_only, self.nans_only, self.no_nulls, self.no_nans = (
            np.ascontiguousarray(flag) if flag.any() else None for flag in self._flags.T
        )
        lower = make_object_array([None if entry is None else entry.lower for entry in usable_entries])
        upper = make_object_array([None if entry is None else entry.upper for entry in usable_entries])
        if base_statistics is None:
            self._bounds = lower, upper
        else:
            self._bounds = (
                view.join_base(lower, base_statistics._bounds[0]),
                view.join_base(upper, base_statistics._bounds[1]),
            )
        self.lower: tuple[BoundColumn, ...] = compute_bound_columns(
            view, self._bounds[0], None if base_statistics is None else base_statistics.lower
        )
        self.upper: tuple[BoundColumn, ...] = compute_bound_columns(
            view, self._bounds[1], None if base_statistics is None else base_statistics.upper
        )
        self.rows_read = max(sum(side.count_rows_read() for side in sides) for sides in (self.lower, self.upper))
        """The maximum number of rows that a comparison with any value reads."""
        for side in (*self.lower, *self.upper):
            if side.count_rows_read() >= _SKETCHED_ROWS_MIN:
                side.add_sketches(view)

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in (*self.lower, *self.upper)) + _STATISTICS_BLOCK_BYTES * len(self.entries)


class PartitionValues:
    """The exact values of one partition field.

    Attributes:
        known: bool[blocks]: whether the spec of each block has the field.
        nulls: uint8[blocks]: `NO_FILES`, `ALL_FILES` or `SOME_FILES`: whether no value of a block is null, all values,
            or some values.
        has_nulls: Whether any value is null.
        packed: object[blocks]: the packed values of each block. None for a block in which all values are null.
        sides: The values as bounds, in each of their forms. A value is both its lower and its upper bound.
    """

    __slots__ = ("has_nulls", "is_known_for_all_blocks", "known", "nulls", "packed", "sides")

    def __init__(self, view: TableView, field_id: int, kind: str, base_values: PartitionValues | None = None) -> None:
        """Read the values of a partition field in new blocks, and copy those that an older view of the table has read.

        Args:
            view: The view. Its base is the older view, with which it shares blocks.
            field_id: The id of the partition field.
            kind: The type as which the values are compared. Blocks with values of other types count as unknown.
            base_values: The same values of the view's base, or None if the base has not read them.
        """
        stored_entries = [
            view.blocks[number].find_partition_column(field_id) for number in view.list_blocks_to_compute(base_values)
        ]
        # An entry is the type of the field in the block, and its packed values.
        usable_entries = [
            entry if entry is not None and are_comparable(entry[0], kind) else None for entry in stored_entries
        ]
        has_field = np.array([entry is not None for entry in usable_entries], dtype=np.bool_)
        packed_columns = [None if entry is None else entry[1] for entry in usable_entries]
        nulls = [
            ALL_FILES if values is None else NO_FILES if values.presence == NONE else SOME_FILES
            for values in packed_columns
        ]
        self.known: npt.NDArray[np.bool_] = view.join_base(
            has_field, None if base_values is None else base_values.known
        )
        self.packed: Objects = view.join_base(
            make_object_array(packed_columns), None if base_values is None else base_values.packed
        )
        self.nulls: Flags = view.join_base(
            np.array(nulls, dtype=np.uint8), None if base_values is None else base_values.nulls
        )
        self.sides: tuple[BoundColumn, ...] = compute_bound_columns(
            view, self.packed, None if base_values is None else base_values.sides
        )
        self.has_nulls = bool(self.nulls.any())
        self.is_known_for_all_blocks = bool(self.known.all())
        """Whether all blocks have the field."""

    @property
    def size_bytes(self) -> int:
        return sum(side.size_bytes for side in self.sides) + _PARTITION_BLOCK_BYTES * len(self.known)


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

        Args:
            manifests: The data manifests.
            blocks: The decoded data files of each manifest.
            delete_manifests: The delete manifests.
            delete_blocks: The decoded delete files of each delete manifest.
            ordinals: The number of each data manifest in the snapshot's list of data manifests. None if the view has
                all of them.
            base: An older view that shares blocks with this view, such as the view of the previous snapshot. While the
                base is in memory, the columns that it has read are reused.
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
        summaries = [_summarize_block(self.blocks[number]) for number in self.list_blocks_to_compute(base)]
        self._block_summaries: Longs = self.join_base(
            np.array(summaries, dtype=np.int64).reshape(len(summaries), 3),
            None if base is None else base._block_summaries,
        )
        """int64[blocks, 3]: the result of `_summarize_block` for each block."""
        ends: Longs = np.cumsum(self._block_summaries[:, _SUMMARY_ROWS])
        self.starts: list[int] = [0, *ends.tolist()]
        self.delete_starts = _compute_starts(self.delete_blocks)
        self.spec_ids: Longs = np.ascontiguousarray(self._block_summaries[:, _SUMMARY_SPEC])
        self.specs = frozenset(np.unique(self.spec_ids).tolist())
        self._stats: dict[tuple[int, str], ColumnStatistics] = {}
        self._partition: dict[tuple[int, str], PartitionValues] = {}
        self.extents: Longs = np.zeros((len(self.blocks), _LAYOUT_FIELDS), dtype=np.int64)
        """The layouts for kernels that read no column. They have the row count of each block, the position of its first
        file, and its first entry id in place of a column's smallest value, to which the codes of a column are added."""
        self.extents[:, _ROWS] = self._block_summaries[:, _SUMMARY_ROWS]
        self.extents[:, _FIRST] = ends - self._block_summaries[:, _SUMMARY_ROWS]
        self.extents[:, _VALUE_BASE] = self.ordinals << ENTRY_BITS
        has_empty_files = self._block_summaries[:, _SUMMARY_HAS_EMPTY_FILES]
        self.blocks_with_empty_files: list[int] = np.flatnonzero(has_empty_files).tolist()
        """The numbers of the blocks with a file whose record count is 0 or unknown."""
        self._size_cache = (0, 0)
        """The number of columns that the view has read, and their size in bytes."""
        self.derived = DerivedValues()
        """Data that other modules compute from the view, and that are kept with it."""

    @property
    def row_counts(self) -> Longs:
        """The number of rows of each block, int64[blocks]."""
        return self.extents[:, _ROWS]

    @property
    def file_count(self) -> int:
        """The number of data files."""
        return self.starts[-1]

    @property
    def base(self) -> TableView | None:
        """The older view whose columns this view reuses, or None if there is none or it is no longer in memory.

        A view contains the decoded manifests of one snapshot. The next snapshot shares most of them.
        """
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
        return self.extents.nbytes + _VIEW_BLOCK_BYTES * len(self.blocks) + size + self.derived.size_bytes

    def find_blocks(self, manifests: Sequence[ManifestFile]) -> list[Block | None]:
        """Return the view's block of each manifest, or None for a manifest object that the view does not contain."""
        positions, positions_in_view = _find_shared(_list_identities(manifests), _list_identities(self.manifests))
        blocks = np.full(len(manifests), None, dtype=np.object_)
        blocks[positions] = make_object_array(self.blocks)[positions_in_view]
        block_list: list[Block | None] = blocks.tolist()
        return block_list

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
        """Return the entry ids at these positions, int64[n]. This is the inverse of `find_positions`.

        An entry id has the number of the manifest in its high 32 bits, and the number of the entry in its low 32 bits.
        """
        starts = np.array(self.starts[:-1], dtype=np.int64)
        numbers = np.searchsorted(starts, positions, side="right") - 1
        entry_ids: Longs = (self.ordinals[numbers] << ENTRY_BITS) + positions - starts[numbers]
        return entry_ids

    def list_block_entry_ids(self, number: int) -> Longs:
        """Return the entry ids of a block, int64[rows]."""
        first = int(self.ordinals[number]) << ENTRY_BITS
        return np.arange(first, first + self.blocks[number].rows, dtype=np.int64)

    def locate_delete(self, row: int) -> tuple[Block, int]:
        """Return the block of a delete row, and the row in the block.

        A delete row is the number of a delete file among the files of all delete blocks.
        """
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
            base_statistics = None if base is None else base.find_computed_stats(column_id, kind)
            column = self._stats[key] = ColumnStatistics(self, column_id, kind, base_statistics)
        return column

    def find_cheap_stats(self, column_id: int, kind: str) -> ColumnStatistics | None:
        """Return the statistics of a column if this reads few blocks, otherwise None.

        It reads few blocks if the statistics are already computed, or if the view's base has them and at most half of
        the blocks are new.
        """
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
            base_values = None if base is None else base._partition.get(key)
            column = self._partition[key] = PartitionValues(self, field_id, kind, base_values)
        return column

    def compute_columns_like(self, other: TableView) -> None:
        """Compute the same columns that another view has computed, so that the first plan of this view is fast.

        The method may be called in any thread.
        """
        for column_id, kind in list(other._stats):
            self.find_statistics(column_id, kind)
        for field_id, kind in list(other._partition):
            self.partition(field_id, kind)

    def list_blocks_to_compute(self, base_data: object) -> Sequence[int]:
        """Return the numbers of the blocks for which a result is computed: all blocks, or only the new blocks.

        `base_data` is the same result for the older view whose results this view reuses, or None if that view has no
        such result. A block is new if the older view does not have it.
        """
        return range(len(self.blocks)) if base_data is None else self.new_blocks

    def join_base(self, new_rows: Array, base_rows: Array | None) -> Array:
        """Combine the rows of a result for the new blocks with those of the base. The output has a row for each block.

        The base is the older view of the table with which this view shares blocks.

        Args:
            new_rows: The rows of the new blocks, or of all blocks if `base_rows` is None.
            base_rows: The same result for the blocks of the base. None if the base has not computed it.
        """
        if base_rows is None:
            return new_rows
        all_rows = np.empty((len(self.blocks), *base_rows.shape[1:]), dtype=base_rows.dtype)
        shared, in_base = self.shared_blocks  # The numbers of the shared blocks in this view and in the base.
        all_rows[shared] = base_rows[in_base]
        all_rows[self.new_blocks] = new_rows
        return cast("Array", all_rows)


def _compute_starts(blocks: Sequence[Block]) -> list[int]:
    """Return the position of the first row of each block, and the number of all rows."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.rows)
    return starts


def _make_layout(block: Block, packed_column: Packed) -> tuple[int, ...]:
    """Return the numbers that describe a block's column to the compiled code, in the order of `BoundColumn.layout`.

    The last two numbers describe a sketch, which is added later. The number after the rows is the position of the
    block's first file in the view, which is set later.
    """
    address = block.address

    def to_address(offset: int) -> int:
        return 0 if offset == NONE else address + offset

    return (
        packed_column.form,
        packed_column.width,
        to_address(packed_column.codes),
        to_address(packed_column.presence),
        block.rows,
        0,
        packed_column.base,
        to_address(packed_column.common_at),
        len(packed_column.common),
        to_address(packed_column.lengths),
        to_address(packed_column.ends),
        to_address(packed_column.tails),
        packed_column.lengths_width,
        0,
        0,
    )


def compute_bound_columns(
    view: TableView, packed_columns: Objects, base_columns: Sequence[BoundColumn] | None
) -> tuple[BoundColumn, ...]:
    """Return a column in each of its forms. A decimal column that was widened to more than 18 digits has two forms.

    Args:
        view: The view.
        packed_columns: object[blocks]: the packed columns, or None.
        base_columns: The same column of the view's base. None if the base has not read it.
    """
    columns_to_compute = [packed_columns[number] for number in view.list_blocks_to_compute(base_columns)]
    computed_forms = np.array([-1 if column is None else column.form for column in columns_to_compute], dtype=np.int8)
    forms_of_base = None
    if base_columns is not None:
        forms_of_base = np.full(view.base_blocks, -1, dtype=np.int8)
        for side in base_columns:
            forms_of_base[side.layout[:, _FORM] >= 0] = side.form
    forms = view.join_base(computed_forms, forms_of_base)
    distinct_forms = np.unique(forms[forms >= 0]).tolist()
    if len(distinct_forms) == 1:
        return (BoundColumn(Form(distinct_forms[0]), packed_columns, view, base_columns),)
    return tuple(
        BoundColumn(Form(form), _replace_unselected(packed_columns, forms == form), view, base_columns)
        for form in distinct_forms
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


def _summarize_block(block: Block) -> tuple[int, int, bool]:
    """Return the number of rows of a block, its spec id, and whether any file may have no rows or an unknown count."""
    counts = block.get_packed_longs("record_count")
    return block.rows, block.spec_id, counts is None or counts.low <= 0


def _list_identities(values: Sequence[object]) -> Longs:
    """Return the identities of live objects, int64[objects]. Equal identities mean the same object."""
    return np.fromiter(map(id, values), dtype=np.int64, count=len(values))


def _find_shared(identities: Longs, base_identities: Longs | None) -> tuple[Longs, Longs]:
    """Return the positions in both arrays of the identities that both contain."""
    if base_identities is None or not len(base_identities):
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing
    order = np.argsort(base_identities)
    positions = np.minimum(np.searchsorted(base_identities[order], identities), len(base_identities) - 1)
    candidates = order[positions]
    shared = np.flatnonzero(base_identities[candidates] == identities)
    return shared, candidates[shared]


def _to_usable_entry(entry: ColumnEntry | None, kind: str) -> ColumnEntry | None:
    """Return the statistics of a column. If its values cannot be compared as `kind`, they have no bounds.

    Counts of nulls and NaNs stay, because they do not depend on the type.
    """
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
