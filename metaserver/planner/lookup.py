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
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from metaserver.iceberg.manifest import ManifestFile
from metaserver.iceberg.transforms import UNITS_PER_DAY
from metaserver.index.block import COUNTS, Block
from metaserver.index.packing import MISSING, Column, Form, Longs, Packed, form_of
from metaserver.planner import _lookup
from metaserver.planner.prefix import EVERYTHING, Prefix
from metaserver.planner.view import Side, TableView

_NO_PICKS: Longs = np.empty(0, dtype=np.int64)
_SIDES_MAX = 256
"""Columns whose places are kept per view: 150 bytes a block each."""
_places: WeakKeyDictionary[TableView, dict[tuple[str, int], tuple[Side, ...]]] = WeakKeyDictionary()
"""Where columns lie in each block, which depends on nothing but the view, and dies with it."""


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
class StatsColumn:
    """A column whose statistics are asked for, and the type that it has now."""

    id: int
    kind: str


class Found:
    """Files of a view, in its order."""

    def __init__(self, view: TableView, segments: tuple[Segment, ...], rows: Callable[[], Longs]) -> None:
        self.view = view
        self.segments = segments
        self.files = sum([segment.files for segment in segments])
        self.rows = rows
        """int64[files], rows of the view: made when they are asked for."""
        self._table, self._picks = _table(segments)

    def longs(self, name: str) -> Longs:
        """int64[files] of a number that manifest entries have (see `Block.longs`), MISSING where null."""
        return self._read_longs(_long_places(self.view, name))

    def texts(self, name: str) -> Strings:
        """file_path, file_format, key_metadata or referenced_data_file."""
        return self._read_strings(_text_places(self.view, name))

    def by_segment(self, values: Sequence[int]) -> Longs:
        """int64[files]: one value a segment, given to all of its files."""
        return np.repeat(np.array(values, dtype=np.int64), [segment.files for segment in self.segments])

    def sequence_numbers(self) -> Longs:
        """int64[files], data sequence numbers; entries without one have their manifest's (spec, "Inheritance")."""
        return self._inherited("sequence_number", [self._manifest(one).sequence_number for one in self.segments])

    def snapshot_ids(self) -> Longs:
        """int64[files]: the snapshot that added the file, or carried it over first."""
        return self._inherited("snapshot_id", [self._manifest(one).added_snapshot_id for one in self.segments])

    def stats(self, column: StatsColumn) -> Stats:
        return Stats(self, column)

    def part(self, start: int, end: int) -> Found:
        """The files from number `start` up to, not including, `end`."""
        segments = []
        at = 0
        for segment in self.segments:
            low, high = max(start - at, 0), min(end - at, segment.files)
            if low < high:
                rows = None if segment.rows is None else segment.rows[low:high]
                segments.append(segment._replace(first=segment.first + low, files=high - low, rows=rows))
            at += segment.files
        return Found(self.view, tuple(segments), lambda: self.rows()[max(start, 0) : end])

    def _inherited(self, name: str, of_manifest: Sequence[int | None]) -> Longs:
        own = self.longs(name)
        missing = own == MISSING
        if missing.any():
            given = self.by_segment([MISSING if one is None else one for one in of_manifest])
            own = np.where(missing, given, own)
        return own

    def _manifest(self, segment: Segment) -> ManifestFile:
        return self.view.manifests[segment.number]

    def _read_longs(self, sides: tuple[Side, ...]) -> Longs:
        side = _of_form(sides, Form.INTEGERS)
        if side is None:
            return np.full(self.files, MISSING, dtype=np.int64)
        return _lookup.longs(side.layout, self._table, self._picks)

    def _read_doubles(self, sides: tuple[Side, ...]) -> npt.NDArray[np.float64]:
        side = _of_form(sides, Form.FLOATS)
        if side is None:
            return np.full(self.files, np.nan)
        return _lookup.doubles(side.layout, self._table, self._picks)

    def _read_strings(self, sides: tuple[Side, ...]) -> Strings:
        side = _of_form(sides, Form.STRINGS)
        if side is None:
            files = self.files
            return Strings(np.zeros(files + 1, np.int64), np.empty(0, np.uint8), np.zeros(files, np.uint8))
        return Strings(*_lookup.strings(side.layout, self._table, self._picks))


class Stats:
    """Statistics of one column in the files found."""

    def __init__(self, found: Found, column: StatsColumn) -> None:
        self._found = found
        self.column = column
        self.form = form_of(column.kind)
        """None for a type without bounds."""

    def counts(self, name: str) -> Longs:
        """int64[files] of value_counts, null_value_counts, nan_value_counts or column_sizes; MISSING where absent."""
        return self._found._read_longs(_count_places(self._found.view, name, self.column.id))

    def bounds(self, side: str) -> Longs | npt.NDArray[np.float64] | Strings:
        """Lower or upper bounds: int64 (MISSING where absent), float64 (NaN where absent) or bytes, by `form`.

        As `Block.bound`: dates are days, times and timestamps units of the type, decimals unscaled; decimals of more
        than 18 digits are 16 bytes, big-endian, of the unscaled value plus 2**127.
        """
        found, kind = self._found, self.column.kind
        places = _bound_places(found.view, side, self.column.id)
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

    def _promoted(self, longs: Longs) -> Longs:
        """Bounds that were written when the column held dates, in the unit that it has now (spec, "Evolution")."""
        found = self._found
        dates = [segment.block.kind(self.column.id) == "date" for segment in found.segments]
        if not any(dates):
            return longs
        units = found.by_segment([UNITS_PER_DAY[self.column.kind] if date else 1 for date in dates])
        return np.where(longs == MISSING, longs, longs * units)


def lookup(view: TableView, prefix: Prefix = EVERYTHING) -> Found:
    """The data files in the partitions of a prefix, in the order of the view."""
    selection = prefix.select(view)
    state = selection.state
    numbers = np.flatnonzero(state).tolist()
    blocks = view.blocks
    if (state == 2).any():
        return files_at(view, selection.rows())
    whole = [Segment(number, blocks[number], 0, blocks[number].rows, None) for number in numbers]
    return Found(view, tuple([segment for segment in whole if segment.files]), selection.rows)


def files_at(view: TableView, rows: Longs) -> Found:
    """The data files at int64[files] rows of the view, ascending."""
    numbers, local = view.split(rows)
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)] if len(rows) else []
    segments = []
    for start, end in pairwise(edges):
        number, first, last = int(numbers[start]), int(local[start]), int(local[end - 1])
        picked = None if last - first + 1 == end - start else local[start:end]
        segments.append(Segment(number, view.blocks[number], first if picked is None else 0, end - start, picked))
    return Found(view, tuple(segments), lambda: rows)


def _table(segments: Sequence[Segment]) -> tuple[Longs, Longs]:
    """(segments, picks) as `_lookup.pyx` takes them."""
    rows, picks, at = [], [], 0
    for segment in segments:
        if segment.rows is None:
            rows.append((segment.number, segment.first, segment.files, -1))
        else:
            rows.append((segment.number, 0, segment.files, at))
            picks.append(segment.rows)
            at += segment.files
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 4)
    return table, np.concatenate(picks) if picks else _NO_PICKS


def _of_form(sides: tuple[Side, ...], form: Form) -> Side | None:
    return next((side for side in sides if side.form is form), None)


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


def _long_places(view: TableView, name: str) -> tuple[Side, ...]:
    return _kept(view, ("long " + name, 0), lambda block: _packed(block.long_column(name)))


def _text_places(view: TableView, name: str) -> tuple[Side, ...]:
    return _kept(view, ("text " + name, 0), lambda block: _packed(block.text_column(name)))


def _count_places(view: TableView, name: str, column_id: int) -> tuple[Side, ...]:
    position = COUNTS.index(name)

    def packed(block: Block) -> Packed | None:
        entry = block.entry(column_id)
        return None if entry is None else entry.counts[position]

    return _kept(view, (name, column_id), packed)


def _bound_places(view: TableView, side: str, column_id: int) -> tuple[Side, ...]:
    return _kept(view, (side, column_id), lambda block: _packed(block.bound_column(side, column_id)))


def _packed(column: Column | None) -> Packed | None:
    return None if column is None else column.packed


def _kept(view: TableView, key: tuple[str, int], packed_of: Callable[[Block], Packed | None]) -> tuple[Side, ...]:
    """One side a form: a decimal that was widened past 18 digits has two."""
    places = _places.get(view)
    if places is None:
        places = _places[view] = {}
    known = places.get(key)
    if known is None:
        packed = [packed_of(block) for block in view.blocks]
        forms = sorted({column.form for column in packed if column is not None})
        known = tuple(
            Side(Form(form), [one if one is not None and one.form == form else None for one in packed], view)
            for form in forms
        )
        if len(places) >= _SIDES_MAX:
            places.clear()
        places[key] = known
    return known
