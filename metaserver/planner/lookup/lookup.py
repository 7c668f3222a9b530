"""Lookups: columns of the files of a partition, read from the blocks where they lie.

The rule it keeps: only blocks that hold a file of the partition are touched, and of those only the columns that are
asked for. A lookup finds segments of blocks' rows; its columns are gathered when they are read, into arrays, with no
object for a row (`_lookup.pyx`). Answers are exact: what a manifest says, in the type that the table has now.

    found = lookup(view, Prefix or EVERYTHING)
    stats = found.stats(column)          # of the files found: stats.lower(), stats.counts("null_value_counts"), …
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.types.transforms import UNITS_PER_DAY
from metaserver.index.blocks.block import COUNTS, Block
from metaserver.index.blocks.packing import MISSING, Form, Longs, Packed, PackedColumn, form_of
from metaserver.planner.lookup import _lookup
from metaserver.planner.lookup.prefix import EVERYTHING, Prefix
from metaserver.planner.view.view import ROW_BITS, ROW_MASK, Side, TableView

_NO_PICKS: Longs = np.empty(0, dtype=np.int64)
_SIDES_MAX = 256
"""Columns whose places are kept per view: 150 bytes a block each."""
_SIDES = frozenset({"lower", "upper"})
_ABSENT_LONG = MISSING.to_bytes(8, "little", signed=True)
_ABSENT_DOUBLE = np.full(1, np.nan).tobytes()


class Strings(NamedTuple):
    """Byte strings one after another: `ends` int64[rows + 1], the first 0; `present` uint8[rows]."""

    ends: Longs
    data: npt.NDArray[np.uint8]
    present: npt.NDArray[np.uint8]

    def values(self) -> list[bytes | None]:
        data, ends = self.data.tobytes(), self.ends.tolist()
        return [
            data[start:end] if there else None
            for start, end, there in zip(ends, ends[1:], self.present.tolist(), strict=False)
        ]


class Segment(NamedTuple):
    """Rows of one block: those in `rows`, or where that is None `files` of them from `first` on."""

    number: int
    block: Block
    first: int
    files: int
    rows: Longs | None

    def local(self) -> Longs:
        """int64[files], rows of the block."""
        return np.arange(self.first, self.first + self.files) if self.rows is None else self.rows


@dataclass(frozen=True, slots=True)
class RequestedColumn:
    """A column whose statistics are asked for, and the type that it has now."""

    id: int
    kind: str


class FoundFiles:
    """Files of a view, in its order. `segments`, `picks`: as `_lookup.pyx` takes them, none of them empty."""

    def __init__(self, view: TableView, segments: Longs, picks: Longs = _NO_PICKS) -> None:
        self.view = view
        self.files = _lookup.count(segments)
        self._table, self._picks = segments, picks
        self._places = _places_of(view)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        blocks, picks = self.view.blocks, self._picks
        return tuple(
            Segment(number, blocks[number], first, files, None if at < 0 else picks[at : at + files])
            for number, first, files, at in self._table.tolist()
        )

    def rows(self) -> Longs:
        """int64[files], rows of the view."""
        return _lookup.rows(self.view.extents, self._table, self._picks)

    def longs(self, name: str) -> Longs:
        """int64[files] of a number that manifest entries have (see `Block.longs`), MISSING where null.

        Not to be written to, as no array of a lookup: one that is the same everywhere has one value in memory.
        """
        return self._read_longs(self._places.longs(self.view, name))

    def texts(self, name: str) -> Strings:
        """file_path, file_format, key_metadata or referenced_data_file."""
        return self._read_strings(self._places.texts(self.view, name))

    def by_segment(self, values: Sequence[int]) -> Longs:
        """int64[files]: one value a segment, given to all of its files."""
        return np.repeat(np.array(values, dtype=np.int64), self._table[:, 2])

    def sequence_numbers(self) -> Longs:
        """int64[files], data sequence numbers; entries without one have their manifest's (spec, "Inheritance")."""
        return self._inherited("sequence_number", lambda manifest: manifest.sequence_number)

    def snapshot_ids(self) -> Longs:
        """int64[files]: the snapshot that added the file, or carried it over first."""
        return self._inherited("snapshot_id", lambda manifest: manifest.added_snapshot_id)

    def stats(self, column: RequestedColumn) -> Stats:
        return Stats(self, column)

    def part(self, start: int, end: int) -> FoundFiles:
        """The files from number `start` up to, not including, `end`."""
        if start <= 0 and end >= self.files:
            return self
        counts = self._table[:, 2]
        ends = np.cumsum(counts)
        low = np.clip(start - (ends - counts), 0, counts)
        high = np.clip(end - (ends - counts), low, counts)
        segments = self._table.copy()
        # Where rows follow one another the first of them moves, else the place of the first of those that are picked.
        picked = segments[:, 3] >= 0
        segments[:, 1] += np.where(picked, 0, low)
        segments[:, 3] += np.where(picked, low, 0)
        segments[:, 2] = high - low
        return FoundFiles(self.view, segments[high > low], self._picks)

    def _inherited(self, name: str, of_manifest: Callable[[ManifestFile], int | None]) -> Longs:
        own = self.longs(name)
        missing = own == MISSING
        if missing.any():
            given = [of_manifest(self.view.manifests[number]) for number in self._table[:, 0].tolist()]
            own = np.where(missing, self.by_segment([MISSING if one is None else one for one in given]), own)
        return own

    def _read_longs(self, sides: tuple[Side, ...]) -> Longs:
        side = _of_form(sides, Form.INTEGERS)
        if side is None:
            return np.ndarray(self.files, np.int64, _ABSENT_LONG, strides=(0,))
        return _lookup.longs((side.layout,), self._table, self._picks)[0]

    def _read_doubles(self, sides: tuple[Side, ...]) -> npt.NDArray[np.float64]:
        side = _of_form(sides, Form.FLOATS)
        if side is None:
            return np.ndarray(self.files, np.float64, _ABSENT_DOUBLE, strides=(0,))
        return _lookup.doubles(side.layout, self._table, self._picks)

    def _read_strings(self, sides: tuple[Side, ...]) -> Strings:
        side = _of_form(sides, Form.STRINGS)
        if side is None:
            files = self.files
            return Strings(np.zeros(files + 1, np.int64), np.empty(0, np.uint8), np.zeros(files, np.uint8))
        return Strings(*_lookup.strings(side.layout, self._table, self._picks))


class Stats:
    """Statistics of one column in the files found."""

    def __init__(self, found: FoundFiles, column: RequestedColumn) -> None:
        self._found = found
        self.column = column
        self.form = form_of(column.kind)
        """None for a type without bounds."""

    def read(self, names: Sequence[str]) -> list[Longs | npt.NDArray[np.float64] | Strings]:
        """`bounds` of lower and upper, `counts` of any other name; together they take less time than one by one."""
        found = self._found
        view, places, column_id = found.view, found._places, self.column.id
        plain = self.form is Form.INTEGERS and (self.column.kind == "date" or not self._dated())
        made: list[Any] = [None] * len(names)
        at, layouts = [], []
        for number, name in enumerate(names):
            if name not in _SIDES:
                sides = places.counts(view, name, column_id)
            elif plain:
                sides = places.bounds(view, name, column_id)
            else:
                made[number] = self.bounds(name)
                continue
            side = _of_form(sides, Form.INTEGERS)
            if side is None:
                made[number] = found._read_longs(())
            else:
                at.append(number)
                layouts.append(side.layout)
        for number, longs in zip(at, _lookup.longs(layouts, found._table, found._picks), strict=True):
            made[number] = longs
        return made

    def integer_counts(self, name: str) -> Integers:
        """As `counts`, not read yet."""
        found = self._found
        return Integers(found, _of_form(found._places.counts(found.view, name, self.column.id), Form.INTEGERS))

    def integer_bounds(self, side: str) -> Integers | None:
        """As `bounds`, not read yet; None where they are no integers, or have to be converted."""
        if self.form is not Form.INTEGERS or (self.column.kind != "date" and self._dated()):
            return None
        found = self._found
        return Integers(found, _of_form(found._places.bounds(found.view, side, self.column.id), Form.INTEGERS))

    def counts(self, name: str) -> Longs:
        """int64[files] of value_counts, null_value_counts, nan_value_counts or column_sizes; MISSING where absent."""
        return self._found._read_longs(self._found._places.counts(self._found.view, name, self.column.id))

    def bounds(self, side: str) -> Longs | npt.NDArray[np.float64] | Strings:
        """Lower or upper bounds: int64 (MISSING where absent), float64 (NaN where absent) or bytes, by `form`.

        As `Block.bound`: dates are days, times and timestamps units of the type, decimals unscaled; decimals of more
        than 18 digits are 16 bytes, big-endian, of the unscaled value plus 2**127.
        """
        found, kind = self._found, self.column.kind
        places = found._places.bounds(found.view, side, self.column.id)
        if self.form is Form.FLOATS:
            return found._read_doubles(places)
        if self.form is Form.STRINGS:
            strings = found._read_strings(places)
            if kind.startswith("decimal") and _of_form(places, Form.INTEGERS) is not None:
                return _widened(strings, found._read_longs(places))
            return strings
        longs = found._read_longs(places)
        if kind in UNITS_PER_DAY and kind != "date":
            return self._promoted(longs)
        return longs

    def _dated(self) -> bool:
        """Whether bounds may be of dates: of a column of dates, or of one of times that held dates once."""
        column = self.column
        if column.kind not in UNITS_PER_DAY:
            return False
        return any(segment.block.kind(column.id) == "date" for segment in self._found.segments)

    def _promoted(self, longs: Longs) -> Longs:
        """Bounds that were written when the column held dates, in the unit that it has now (spec, "Evolution")."""
        if not self._dated():
            return longs
        found = self._found
        dates = [segment.block.kind(self.column.id) == "date" for segment in found.segments]
        units = found.by_segment([UNITS_PER_DAY[self.column.kind] if date else 1 for date in dates])
        return np.where(longs == MISSING, longs, longs * units)


class Integers:
    """A column of integers that can be written straight into an answer."""

    def __init__(self, found: FoundFiles, side: Side | None) -> None:
        self._found = found
        self._layout = None if side is None else side.layout
        self.nullable = self._layout is None or not _lookup.whole(self._layout, found._table)
        """Whether one may be absent."""

    def write(self, values: memoryview, width: int, bits: memoryview) -> int:
        """Fills `values` with `width` bytes each, 4 or 8, and `bits` (empty where not `nullable`) as Arrow has them.

        Returns how many are absent.
        """
        found = self._found
        bits[:] = bytes(len(bits))
        if self._layout is None:
            values[:] = bytes(len(values))
            return found.files
        return _lookup.write_integers(self._layout, found._table, found._picks, values, width, bits)


def lookup(view: TableView, prefix: Prefix = EVERYTHING) -> FoundFiles:
    """The data files in the partitions of a prefix, in the order of the view."""
    numbers = prefix.whole_blocks(view)
    if numbers is None:
        return files_at(view, prefix.select(view).rows())
    return FoundFiles(view, _places_of(view).whole.take(numbers, axis=0))


def files_at(view: TableView, rows: Longs) -> FoundFiles:
    """The data files at int64[files] rows of the view, ascending."""
    if not len(rows):
        return FoundFiles(view, np.empty((0, 4), dtype=np.int64))
    ordinals, local = rows >> ROW_BITS, rows & ROW_MASK
    edges = np.flatnonzero(np.diff(ordinals)) + 1
    starts, ends = np.append(0, edges), np.append(edges, len(rows))
    counts, firsts = ends - starts, local[starts]
    follow = local[ends - 1] - firsts + 1 == counts
    numbers = np.searchsorted(view.ordinals, ordinals[starts])
    segments = np.stack([numbers, np.where(follow, firsts, 0), counts, np.where(follow, -1, starts)], axis=1)
    return FoundFiles(view, segments.astype(np.int64, copy=False), local)


def _of_form(sides: tuple[Side, ...], form: Form) -> Side | None:
    for side in sides:
        if side.form is form:
            return side
    return None


def _widened(strings: Strings, longs: Longs) -> Strings:
    """Decimals that were written with 18 digits or fewer among longer ones."""
    there = longs != MISSING
    rows = len(longs)
    matrix = np.zeros((rows, 16), dtype=np.uint8)
    matrix[strings.present != 0] = strings.data.reshape(-1, 16)
    high = np.where(longs < 0, (1 << 63) - 1, 1 << 63).astype(np.uint64)
    short = np.stack([high, longs.view(np.uint64)], axis=1).astype(">u8").view(np.uint8).reshape(rows, 16)
    matrix[there] = short[there]
    present = ((strings.present != 0) | there).astype(np.uint8)
    ends = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(present, out=ends[1:])
    return Strings(ends * 16, matrix[present != 0].reshape(-1), present)


# Where columns lie


class _Places:
    """Where columns lie in each block of a view, which depends on nothing but the view, and dies with it.

    Each column is told as one side a form: a decimal that was widened past 18 digits has two.
    """

    def __init__(self, view: TableView) -> None:
        self.whole: Longs = np.zeros((len(view.blocks), 4), dtype=np.int64)
        """int64[blocks, 4]: the segments that are all of each block."""
        self.whole[:, 0] = np.arange(len(view.blocks))
        self.whole[:, 2] = view.extents[:, 4]
        self.whole[:, 3] = -1
        self._sides: dict[tuple[str, int], tuple[Side, ...]] = {}

    def longs(self, view: TableView, name: str) -> tuple[Side, ...]:
        known = self._sides.get(key := (name, _NUMBER))
        return self._read(view, key, lambda block: _packed(block.long_column(name))) if known is None else known

    def texts(self, view: TableView, name: str) -> tuple[Side, ...]:
        known = self._sides.get(key := (name, _TEXT))
        return self._read(view, key, lambda block: _packed(block.text_column(name))) if known is None else known

    def counts(self, view: TableView, name: str, column_id: int) -> tuple[Side, ...]:
        known = self._sides.get(key := (name, column_id))
        return self._read(view, key, lambda block: _count(block, name, column_id)) if known is None else known

    def bounds(self, view: TableView, side: str, column_id: int) -> tuple[Side, ...]:
        known = self._sides.get(key := (side, column_id))
        if known is None:
            known = self._read(view, key, lambda block: _packed(block.bound_column(side, column_id)))
        return known

    def _read(
        self, view: TableView, key: tuple[str, int], packed_of: Callable[[Block], Packed | None]
    ) -> tuple[Side, ...]:
        packed = [packed_of(block) for block in view.blocks]
        forms = sorted({column.form for column in packed if column is not None})
        known = tuple(
            Side(Form(form), [one if one is not None and one.form == form else None for one in packed], view)
            for form in forms
        )
        if len(self._sides) >= _SIDES_MAX:
            self._sides.clear()
        self._sides[key] = known
        return known


_NUMBER, _TEXT = -1, -2
"""In place of a column's id, for what entries have once."""
_kept: WeakKeyDictionary[TableView, _Places] = WeakKeyDictionary()


def _places_of(view: TableView) -> _Places:
    places = _kept.get(view)
    if places is None:
        places = _kept[view] = _Places(view)
    return places


def _packed(column: PackedColumn | None) -> Packed | None:
    return None if column is None else column.packed


def _count(block: Block, name: str, column_id: int) -> Packed | None:
    entry = block.entry(column_id)
    return None if entry is None else entry.counts[COUNTS.index(name)]
