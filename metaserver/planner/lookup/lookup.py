"""Lookups: columns of the files in some partitions, read from the blocks.

A lookup reads only the blocks that contain a file of the partitions, and only the requested columns. It selects
segments of the blocks' rows. Reading a column gathers its values into an array, without a Python object for each row
(`_lookup.pyx`). The results are the exact values of the manifest, converted to the current type of the column.

    files = lookup(view, prefix)                      # `EVERYTHING` is the prefix of all files.
    statistics = files.find_statistics(column)        # statistics.read_bounds("lower"), …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.iceberg.types.transforms import UNITS_PER_DAY
from seamark.formats.index.keys.keys import WIDE_DECIMAL_BYTES
from seamark.formats.index.packing import MISSING, Form, Longs, Packed, PackedColumn, get_form
from seamark.metaserver.index.blocks.block import COUNTS, Block
from seamark.metaserver.planner.lookup import _lookup
from seamark.metaserver.planner.lookup.prefix import EVERYTHING, Prefix
from seamark.metaserver.planner.view.view import (
    ENTRY_BITS,
    ENTRY_MASK,
    BoundColumn,
    TableView,
    compute_bound_columns,
    make_object_array,
)

_NO_PICKS: Longs = np.empty(0, dtype=np.int64)
_CACHED_COLUMNS_MAX = 256
"""The maximum number of columns whose layouts are cached for a view. A layout takes 150 bytes for each block."""
_SIDES = frozenset({"lower", "upper"})
_ABSENT_LONG = MISSING.to_bytes(8, "little", signed=True)
_ABSENT_DOUBLE = np.full(1, np.nan).tobytes()


class Strings(NamedTuple):
    """Concatenated byte strings.

    Attributes:
        ends: int64[rows + 1]: 0, and the end of each string in `data`.
        data: uint8[n]: the bytes of all strings.
        present: uint8[rows]: 1 for rows with a string, 0 for null.
    """

    ends: Longs
    data: npt.NDArray[np.uint8]
    present: npt.NDArray[np.uint8]

    def list_values(self) -> list[bytes | None]:
        """Return the strings, with None for missing strings."""
        data, ends = self.data.tobytes(), self.ends.tolist()
        return [
            data[start:end] if is_present else None
            for start, end, is_present in zip(ends, ends[1:], self.present.tolist(), strict=False)
        ]


class Segment(NamedTuple):
    """Some rows of one block, which contains the files of one manifest. Each row is a file.

    The segment contains the rows in `rows`. If `rows` is None, it contains `row_count` consecutive rows from `first`.
    """

    number: int
    """The number of the block."""
    block: Block
    first: int
    row_count: int
    rows: Longs | None

    def compute_local_rows(self) -> Longs:
        """Return the numbers of the rows in the block, int64[files]."""
        return np.arange(self.first, self.first + self.row_count) if self.rows is None else self.rows


@dataclass(frozen=True, slots=True)
class RequestedColumn:
    """A column whose statistics are requested, with its current type."""

    id: int
    kind: str


class FoundFiles:
    """The files of a view that a lookup has found, in the order of the view.

    `segments` and `picks` have the format of `_lookup.pyx`. No segment is empty.

    Args:
        view: The view, the files of a snapshot.
        segments: int64[segments, 4]: for each block with found files, the number of the block, its first found row, the
            number of found rows, and the position of these rows in `picks`; -1 if the rows are consecutive.
        picks: int64[picks]: the found rows of the blocks whose found rows are not consecutive.
    """

    def __init__(self, view: TableView, segments: Longs, picks: Longs = _NO_PICKS) -> None:
        self.view = view
        self.file_count = _lookup.count_rows(segments)
        self._table, self._picks = segments, picks
        self._layouts = _get_layouts(view)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The found files, divided by block. A block contains the files of one manifest."""
        blocks, picks = self.view.blocks, self._picks
        return tuple(
            Segment(
                number,
                blocks[number],
                first,
                row_count,
                # `picks` lists the rows unless they are consecutive, which the position -1 means.
                rows=None if pick_start < 0 else picks[pick_start : pick_start + row_count],
            )
            for number, first, row_count, pick_start in self._table.tolist()
        )

    def list_entry_ids(self) -> Longs:
        """Return the entry ids of the files in the view, int64[files]."""
        return _lookup.list_entry_ids(self.view.extents, self._table, self._picks)

    def read_longs(self, name: str) -> Longs:
        """Return an integer field of the manifest entries, such as `record_count`, int64[files]; MISSING for null.

        The array is read-only, like every array of a lookup, because a constant column is stored as one value.
        """
        return self._read_longs(self._layouts.find_number_layouts(self.view, name))

    def read_texts(self, name: str) -> Strings:
        """Return `file_path`, `file_format`, `key_metadata` or `referenced_data_file` of each file."""
        return self._read_strings(self._layouts.find_text_layouts(self.view, name))

    def repeat_by_segment(self, values: Sequence[int]) -> Longs:
        """Repeat the value of each segment for the files of the segment, and return int64[files]."""
        row_counts = self._table[:, 2]
        return np.repeat(np.array(values, dtype=np.int64), row_counts)

    def read_sequence_numbers(self) -> Longs:
        """Return the data sequence numbers of the files, int64[files].

        Entries without a sequence number inherit the sequence number of the manifest (spec, "Inheritance").
        """
        return self._read_inherited_longs("sequence_number", lambda manifest: manifest.sequence_number)

    def read_snapshot_ids(self) -> Longs:
        """Return the id of the snapshot that added each file, int64[files].

        Entries without a snapshot id inherit the snapshot id of the manifest.
        """
        return self._read_inherited_longs("snapshot_id", lambda manifest: manifest.added_snapshot_id)

    def find_statistics(self, column: RequestedColumn) -> FoundStatistics:
        return FoundStatistics(self, column)

    def slice_files(self, start: int, end: int) -> FoundFiles:
        """Return the files from index `start` (included) to `end` (excluded).

        The columns of `_table` are the block, the first row, the number of files, and the start in `picks`.
        """
        if start <= 0 and end >= self.file_count:
            return self
        counts = self._table[:, 2]
        ends = np.cumsum(counts)
        low = np.clip(start - (ends - counts), 0, counts)
        high = np.clip(end - (ends - counts), low, counts)
        segments = self._table.copy()
        # A segment of consecutive rows moves its first row forward. A segment of picked rows moves its start in
        # `picks` forward.
        has_picks = segments[:, 3] >= 0
        segments[:, 1] += np.where(has_picks, 0, low)
        segments[:, 3] += np.where(has_picks, low, 0)
        segments[:, 2] = high - low
        return FoundFiles(self.view, segments[high > low], self._picks)

    def _read_inherited_longs(self, name: str, get_inherited_value: Callable[[ManifestFile], int | None]) -> Longs:
        """Return an integer field of the entries. An entry without a value inherits the value of its manifest.

        Args:
            name: The name of the field.
            get_inherited_value: A function that returns the value of a manifest.
        """
        stored_values = self.read_longs(name)
        is_missing = stored_values == MISSING
        if is_missing.any():
            inherited_values = [
                get_inherited_value(self.view.manifests[number]) for number in self._table[:, 0].tolist()
            ]
            stored_values = np.where(
                is_missing,
                self.repeat_by_segment([MISSING if value is None else value for value in inherited_values]),
                stored_values,
            )
        return stored_values

    def _read_longs(self, bound_columns: tuple[BoundColumn, ...]) -> Longs:
        bound_column = _find_column_of_form(bound_columns, Form.INTEGERS)
        if bound_column is None:
            return np.ndarray(self.file_count, np.int64, _ABSENT_LONG, strides=(0,))
        return _lookup.read_longs((bound_column.layout,), self._table, self._picks)[0]

    def _read_doubles(self, bound_columns: tuple[BoundColumn, ...]) -> npt.NDArray[np.float64]:
        bound_column = _find_column_of_form(bound_columns, Form.FLOATS)
        if bound_column is None:
            return np.ndarray(self.file_count, np.float64, _ABSENT_DOUBLE, strides=(0,))
        return _lookup.read_doubles(bound_column.layout, self._table, self._picks)

    def _read_strings(self, bound_columns: tuple[BoundColumn, ...]) -> Strings:
        """Return the strings of a column, or missing values if the column has no strings.

        `bound_columns` has a layout for each form in which blocks store the column.
        """
        bound_column = _find_column_of_form(bound_columns, Form.STRINGS)
        if bound_column is None:
            files = self.file_count
            return Strings(np.zeros(files + 1, np.int64), np.empty(0, np.uint8), np.zeros(files, np.uint8))
        return Strings(*_lookup.read_strings(bound_column.layout, self._table, self._picks))


class FoundStatistics:
    """Statistics of one column of the found files."""

    def __init__(self, files: FoundFiles, column: RequestedColumn) -> None:
        self._files = files
        self.column = column
        self.form = get_form(column.kind)
        """The form of the bounds, or None for types without bounds."""

    def read(self, names: Sequence[str]) -> list[Longs | npt.NDArray[np.float64] | Strings]:
        """Read several columns at once, which is faster than separate calls.

        The names `lower` and `upper` read the bounds, like `read_bounds`. Other names read counts, like `counts`.
        Integers of all columns are read together. Bounds that need a conversion are read alone.
        """
        files = self._files
        view, layouts_of_view, column_id = files.view, files._layouts, self.column.id
        is_plain = self.form is Form.INTEGERS and (self.column.kind == "date" or not self._may_have_dates())
        results: list[Any] = [None] * len(names)
        result_positions, layouts = [], []
        for position, name in enumerate(names):
            if name not in _SIDES:
                packed_columns = layouts_of_view.find_count_layouts(view, name, column_id)
            elif is_plain:
                packed_columns = layouts_of_view.find_bound_layouts(view, name, column_id)
            else:
                results[position] = self.read_bounds(name)
                continue
            packed_column = _find_column_of_form(packed_columns, Form.INTEGERS)
            if packed_column is None:
                results[position] = files._read_longs(())
            else:
                result_positions.append(position)
                layouts.append(packed_column.layout)
        columns = _lookup.read_longs(layouts, files._table, files._picks)
        for position, longs in zip(result_positions, columns, strict=True):
            results[position] = longs
        return results

    def read_integer_counts(self, name: str) -> IntegerColumn:
        """Return counts of the column, such as `null_value_counts`, for each file.

        The values are read later, when the result is written into an Arrow buffer.
        """
        files = self._files
        return IntegerColumn(
            files,
            _find_column_of_form(files._layouts.find_count_layouts(files.view, name, self.column.id), Form.INTEGERS),
        )

    def read_integer_bounds(self, side: str) -> IntegerColumn | None:
        """Return the lower or the upper bounds of the column for each file.

        The values are read later, when the result is written into an Arrow buffer.

        Returns:
            None if the bounds are not integers, or need a conversion.
        """
        if self.form is not Form.INTEGERS or (self.column.kind != "date" and self._may_have_dates()):
            return None
        files = self._files
        return IntegerColumn(
            files,
            _find_column_of_form(files._layouts.find_bound_layouts(files.view, side, self.column.id), Form.INTEGERS),
        )

    def counts(self, name: str) -> Longs:
        """Return the counts with this name, int64[files]; MISSING if a file has no count.

        The names are `value_counts`, `null_value_counts`, `nan_value_counts` and `column_sizes`.
        """
        return self._files._read_longs(self._files._layouts.find_count_layouts(self._files.view, name, self.column.id))

    def read_bounds(self, side: str) -> Longs | npt.NDArray[np.float64] | Strings:
        """Return the lower or the upper bounds of the files.

        Depending on `form`, the bounds are int64 (MISSING if absent), float64 (NaN if absent) or bytes. The values are
        those of `Block.bound`: dates in days, times and timestamps in the unit of the type, decimals unscaled. Decimals
        with more than 18 digits are 16 bytes, the big-endian unscaled value plus 2**127.
        """
        files, kind = self._files, self.column.kind
        bound_columns = files._layouts.find_bound_layouts(files.view, side, self.column.id)
        if self.form is Form.FLOATS:
            return files._read_doubles(bound_columns)
        if self.form is Form.STRINGS:
            strings = files._read_strings(bound_columns)
            if kind.startswith("decimal") and _find_column_of_form(bound_columns, Form.INTEGERS) is not None:
                return _widen_decimals(strings, files._read_longs(bound_columns))
            return strings
        longs = files._read_longs(bound_columns)
        if kind in UNITS_PER_DAY and kind != "date":
            return self._promote_dates(longs)
        return longs

    def _may_have_dates(self) -> bool:
        """Return whether bounds may be dates, because the column is a date, or a timestamp promoted from a date."""
        column = self.column
        if column.kind not in UNITS_PER_DAY:
            return False
        return any(segment.block.find_kind(column.id) == "date" for segment in self._files.segments)

    def _promote_dates(self, longs: Longs) -> Longs:
        """Convert bounds of a date column to the unit of its promoted type (spec, "Schema Evolution")."""
        if not self._may_have_dates():
            return longs
        files = self._files
        dates = [segment.block.find_kind(self.column.id) == "date" for segment in files.segments]
        units = files.repeat_by_segment([UNITS_PER_DAY[self.column.kind] if date else 1 for date in dates])
        return np.where(longs == MISSING, longs, longs * units)


class IntegerColumn:
    """An integer column that can be written directly into an Arrow buffer."""

    def __init__(self, files: FoundFiles, bounds: BoundColumn | None) -> None:
        self._files = files
        self._layout = None if bounds is None else bounds.layout
        self.nullable = self._layout is None or not _lookup.are_all_present(self._layout, files._table)
        """True if some rows may have no value."""

    def write(self, values: memoryview, width: int, bits: memoryview) -> int:
        """Write the values and the validity bits of the column in Arrow's format.

        Args:
            values: The buffer for the values.
            width: The size of a value in bytes, 4 or 8.
            bits: The buffer for the validity bits. It is empty if the column is not `nullable`.

        Returns:
            The number of absent values.
        """
        files = self._files
        bits[:] = bytes(len(bits))
        if self._layout is None:
            values[:] = bytes(len(values))
            return files.file_count
        return _lookup.write_integers(self._layout, files._table, files._picks, values, width, bits)


def find_files_by_prefix(view: TableView, prefix: Prefix = EVERYTHING) -> FoundFiles:
    """Return the data files in the partitions of a prefix, in the order of the view."""
    numbers = prefix.find_whole_blocks(view)
    if numbers is None:
        return find_files_at(view, prefix.select(view).list_entry_ids())
    return FoundFiles(view, _get_layouts(view).whole.take(numbers, axis=0))


def find_files_at(view: TableView, entry_ids: Longs) -> FoundFiles:
    """Return the data files with these ascending entry ids, int64[files].

    An entry id has the ordinal of the manifest in its upper bits, and the row in its block in its lower bits. Each
    block gives a segment: the number of the block, its first found row, the number of found rows, and the position of
    these rows in the list of rows. The position is -1 if the rows are consecutive, so that no list is needed.
    """
    if not len(entry_ids):
        return FoundFiles(view, np.empty((0, 4), dtype=np.int64))
    ordinals, local = entry_ids >> ENTRY_BITS, entry_ids & ENTRY_MASK
    edges = np.flatnonzero(np.diff(ordinals)) + 1
    starts, ends = np.append(0, edges), np.append(edges, len(entry_ids))
    counts, firsts = ends - starts, local[starts]
    is_consecutive = local[ends - 1] - firsts + 1 == counts
    numbers = np.searchsorted(view.ordinals, ordinals[starts])
    segments = np.stack(
        [numbers, np.where(is_consecutive, firsts, 0), counts, np.where(is_consecutive, -1, starts)], axis=1
    )
    return FoundFiles(view, segments.astype(np.int64, copy=False), local)


def _find_column_of_form(bound_columns: tuple[BoundColumn, ...], form: Form) -> BoundColumn | None:
    """Return the layout whose values have this form (integers, floats or strings), or None."""
    for bound_column in bound_columns:
        if bound_column.form is form:
            return bound_column
    return None


def _widen_decimals(strings: Strings, longs: Longs) -> Strings:
    """Convert all decimals to the 16-byte form.

    `longs` contains the decimals with at most 18 digits, and `strings` contains the longer decimals.
    """
    is_short = longs != MISSING
    rows = len(longs)
    matrix = np.zeros((rows, WIDE_DECIMAL_BYTES), dtype=np.uint8)
    matrix[strings.present != 0] = strings.data.reshape(-1, WIDE_DECIMAL_BYTES)
    # The form is the value plus 2**127, so its upper half is the sign extension of the value (0 or -1) plus 2**63.
    high = np.where(longs < 0, (1 << 63) - 1, 1 << 63).astype(np.uint64)
    halves = np.stack([high, longs.view(np.uint64)], axis=1).astype(">u8")
    matrix[is_short] = halves.view(np.uint8).reshape(rows, WIDE_DECIMAL_BYTES)[is_short]
    is_present = ((strings.present != 0) | is_short).astype(np.uint8)
    ends = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(is_present, out=ends[1:])
    return Strings(ends * WIDE_DECIMAL_BYTES, matrix[is_present != 0].reshape(-1), is_present)


# Column layouts


class _Layouts:
    """The layouts of columns in the blocks of a view.

    The layouts depend only on the view, and are cached as long as it exists. A column has one layout for each form of
    its values. A decimal column that was widened to more than 18 digits has two forms.
    """

    def __init__(self, view: TableView) -> None:
        self.whole: Longs = np.zeros((len(view.blocks), 4), dtype=np.int64)
        """int64[blocks, 4]: for each block, the segment of all of its rows.

        The columns are the number of the block, its first row, its number of rows, and -1, because the rows are
        consecutive (`FoundFiles`).
        """
        self.whole[:, 0] = np.arange(len(view.blocks))
        self.whole[:, 2] = view.row_counts
        self.whole[:, 3] = -1
        self._bound_columns: dict[tuple[str, int], tuple[BoundColumn, ...]] = {}

    @property
    def size_bytes(self) -> int:
        cached_columns = [column for columns in list(self._bound_columns.values()) for column in columns]
        return self.whole.nbytes + sum(column.size_bytes for column in cached_columns)

    def find_number_layouts(self, view: TableView, name: str) -> tuple[BoundColumn, ...]:
        """Return the layouts of a column of numbers in all blocks."""
        cached_columns = self._bound_columns.get(key := (name, _NUMBER))
        return (
            self._compute_layouts(view, key, lambda block: _get_packing(block.find_long_column(name)))
            if cached_columns is None
            else cached_columns
        )

    def find_text_layouts(self, view: TableView, name: str) -> tuple[BoundColumn, ...]:
        """Return the layouts of a column of texts in all blocks."""
        cached_columns = self._bound_columns.get(key := (name, _TEXT))
        return (
            self._compute_layouts(view, key, lambda block: _get_packing(block.find_text_column(name)))
            if cached_columns is None
            else cached_columns
        )

    def find_count_layouts(self, view: TableView, name: str, column_id: int) -> tuple[BoundColumn, ...]:
        """Return the layouts of the counts of a column in all blocks."""
        cached_columns = self._bound_columns.get(key := (name, column_id))
        return (
            self._compute_layouts(view, key, lambda block: _get_packed_counts(block, name, column_id))
            if cached_columns is None
            else cached_columns
        )

    def find_bound_layouts(self, view: TableView, side: str, column_id: int) -> tuple[BoundColumn, ...]:
        """Return the layouts of the lower or upper bounds of a column in all blocks."""
        cached_columns = self._bound_columns.get(key := (side, column_id))
        if cached_columns is None:
            cached_columns = self._compute_layouts(
                view, key, lambda block: _get_packing(block.get_bound_column(side, column_id))
            )
        return cached_columns

    def _compute_layouts(
        self, view: TableView, key: tuple[str, int], get_packed: Callable[[Block], Packed | None]
    ) -> tuple[BoundColumn, ...]:
        """Compute the layouts of a column in all blocks, and cache them.

        A layout has the addresses of the arrays. There is a layout for each form in which blocks store the column.

        Args:
            view: The view with the blocks.
            key: The key of the column in the cache.
            get_packed: A function that returns the packed column of a block.
        """
        bound_columns = compute_bound_columns(
            view, make_object_array([get_packed(block) for block in view.blocks]), None
        )
        if len(self._bound_columns) >= _CACHED_COLUMNS_MAX:
            self._bound_columns.clear()
        self._bound_columns[key] = bound_columns
        return bound_columns


_NUMBER, _TEXT = -1, -2
"""The values that replace a column id in the cache keys of manifest fields: number fields and text fields."""


def _get_layouts(view: TableView) -> _Layouts:
    """Return the layouts of a view: where its blocks store each column. They are kept with the view."""
    return view.derived.get(_Layouts) or view.derived.keep(_Layouts(view))


def _get_packing(column: PackedColumn | None) -> Packed | None:
    """Return the packed values of a column, or None if the block lacks the column."""
    return None if column is None else column.packed


def _get_packed_counts(block: Block, name: str, column_id: int) -> Packed | None:
    """Return the packed counts of a column in a block, or None if the block has no counts of the column."""
    entry = block.find_entry(column_id)
    return None if entry is None else entry.counts[COUNTS.index(name)]
