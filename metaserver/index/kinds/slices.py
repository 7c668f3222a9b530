"""The rows of one data file by value: an ordered dictionary, and the bits of each row's rank.

Row by row a value is its rank in the file's dictionary. Slice i holds bit i of all ranks, so ceil(log2(cardinality))
slices hold the column, and any comparison is an interval of ranks, answered by reading each slice once. Where most
rows have one value and few any other, a bitmap per value takes less room and is stored instead; in all other cases
compressed slices are as small (measured). Null and NaN have bitmaps of their own, and rank 0, which those mask. Pure.

A section is `pieces.py` with the numbers rows and cardinality, the form of the keys, layout SLICES or EQUALITY, flags
NULLS, NANS and CLIPPED, and the pieces: dictionary, null rows, NaN rows, then the slices, lowest first, or the bitmaps
by rank. Bytes beyond 1,024 of a value are not kept: what a predicate's bound of more asks for is a superset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from seamark.metaserver.index.kernels import _bitmap, _ordered
from seamark.metaserver.index.keys.keys import Bits, Bytes, Keys
from seamark.metaserver.index.keys.ranks import ROWS_MAX, Ranks, ranked
from seamark.metaserver.index.kinds import bits
from seamark.metaserver.index.kinds.bits import Coding
from seamark.metaserver.index.kinds.dictionary import BYTES, CODES, Bounds, Intervals, aligned, opened, pack
from seamark.metaserver.index.kinds.pieces import Head, Piece, Pieces, write_pieces

SLICES, EQUALITY = 0, 1
"""Layouts."""
NULLS, NANS, CLIPPED = 1, 2, 4
"""Flags."""
DICTIONARY, NULL_ROWS, NAN_ROWS, FIRST = 0, 1, 2, 3
"""Pieces."""

EQUALITY_MAX = 64
"""Values, of a column that may be stored as a bitmap of each."""
_CHANGE_BYTES = 2
"""At least, of a row that has another value than the one before it; a roaring bitmap's containers have headers too."""
_CONTAINER_BYTES = 14
SECTION_PIECES_MAX = FIRST + EQUALITY_MAX
COMPARED_MAX: Final = 128
"""So many bounds are compared. For more it is cheaper to put each row's rank together and look it up (measured)."""


def slice_count(cardinality: int) -> int:
    """How many bits a rank has."""
    return max(cardinality - 1, 0).bit_length()


def build_section(keys: Keys) -> bytes:
    """The section of one data file. ValueError where it has more rows or longer dictionaries than can be stored."""
    distinct, ranks = ranked(keys)
    nulls = bits.none_of(keys.rows) if keys.valid is None else bits.all_of(keys.rows) & ~keys.valid
    nans = bits.none_of(keys.rows) if keys.nan is None else keys.nan
    flags = (NULLS if nulls.any() else 0) | (NANS if nans.any() else 0) | (CLIPPED if distinct.clipped else 0)
    layout, stored = _stored(ranks, len(distinct), _present(nulls, nans, keys.rows))
    pieces = [
        Piece(Coding.FLAT, pack(distinct).data),
        bits.encode(nulls, keys.rows),
        bits.encode(nans, keys.rows),
        *stored,
    ]
    form = CODES if keys.codes is not None else BYTES
    return write_pieces(Head(keys.rows, len(distinct), form, layout, flags), pieces)


def _present(nulls: Bits, nans: Bits, rows: int) -> Bits:
    return bits.all_of(rows) & ~(nulls | nans)


def _stored(ranks: Ranks, cardinality: int, present: Bits) -> tuple[int, list[Piece]]:
    """Layout and bitmaps, of which there are as many as take less room."""
    rows = len(ranks)
    slices = [bits.encode(one, rows) for one in _bitmap.slice_ranks(ranks, slice_count(cardinality))]
    if cardinality > EQUALITY_MAX or not slices:
        return SLICES, slices
    size = sum(len(piece.data) for piece in slices)
    containers = cardinality * -(-rows // (1 << 16))
    if _CHANGE_BYTES * _bitmap.changes(ranks) + _CONTAINER_BYTES * containers >= size:
        return SLICES, slices
    by_value = [bits.encode(one & present, rows) for one in _bitmap.split_ranks(ranks, cardinality)]
    if sum(len(piece.data) for piece in by_value) >= size:
        return SLICES, slices
    return EQUALITY, by_value


class Section:
    """One file's section where it lies. ValueError where a length or a checksum is wrong, when that is first read."""

    def __init__(self, memory: memoryview) -> None:
        self._pieces = Pieces(memory)
        head = self._pieces.head
        self.rows, self.cardinality, self.form, self.layout, self.flags = head
        by_value = self.layout == EQUALITY
        bitmaps = self.cardinality if by_value else slice_count(self.cardinality)
        if (
            self.form not in (CODES, BYTES)
            or self.layout not in (SLICES, EQUALITY)
            or self.rows > ROWS_MAX
            or self.cardinality > (EQUALITY_MAX if by_value else self.rows)
            or self._pieces.count != FIRST + bitmaps
        ):
            raise ValueError(f"a section of {self._pieces.count} pieces and {self.cardinality} values cannot be right")
        self.bitmaps = bitmaps
        """How many are stored: slices, or one a value."""
        self._dictionary: _ordered.Numbers | _ordered.Strings | None = None
        self.ready: tuple[_ordered.Numbers, _bitmap.Slices, Bits | None] | None = None
        """Dictionary, slices and `keyless`, put there by who asks for them often, where that takes no room."""

    def verify(self) -> None:
        """Reads everything. ValueError where anything is not as it was written."""
        self._pieces.verify()

    @property
    def dictionary(self) -> _ordered.Numbers | _ordered.Strings:
        if self._dictionary is None:
            self._dictionary = opened(self._pieces.read(DICTIONARY).data, self.cardinality, self.form)
        return self._dictionary

    @property
    def bitmaps_bytes(self) -> int:
        """Of the slices or the values' bitmaps, as stored."""
        return sum(self._pieces.length(FIRST + number) for number in range(self.bitmaps))

    @property
    def dictionary_spot(self) -> tuple[int, int]:
        """Offset and length in the section."""
        return self._pieces.spot(DICTIONARY)

    @property
    def dictionary_bytes(self) -> int:
        return self._pieces.length(DICTIONARY)

    def intervals(self, bounds: Bounds) -> Intervals:
        return bounds.intervals(self.dictionary)

    def rows_where(self, bounds: Bounds, nulls: bool, nans: bool, slices: Callable[[], _bitmap.Slices]) -> Bits:
        """The rows whose key is within the bounds, and those that are null or NaN if asked for.

        `slices` gives what `decoded` does, from wherever it is kept."""
        wanted = self.intervals(bounds)
        found = self._ranked(wanted, slices)
        null_rows = self._marks(NULL_ROWS, NULLS)
        nan_rows = self._marks(NAN_ROWS, NANS)
        for marks, asked in ((null_rows, nulls), (nan_rows, nans)):
            if marks is not None:
                found = found | marks if asked else found & ~marks
        return found

    def rows_marked(self, marks: Bytes, among: Bits | None, slices: Callable[[], _bitmap.Slices]) -> Bits:
        """The rows in `among` (None: all) whose rank's byte in `marks`, uint8[cardinality], is 1. Neither null nor NaN.

        `slices` as of `rows_where`."""
        found, gone = bits.all_of(self.rows) if among is None else among, self.keyless
        if gone is not None:
            found = found & ~gone
        wanted = int(np.count_nonzero(marks))
        if wanted == 0:
            return bits.none_of(self.rows)
        if wanted == self.cardinality:
            return found
        if self.layout == EQUALITY:
            ranks = np.flatnonzero(marks)
            return found & self._any_of(ranks.tolist(), (ranks + 1).tolist())
        return slices().where_marked(marks, found)

    @property
    def is_flat(self) -> bool:
        """Whether rows are read where they lie, and all of them have a key."""
        codings = {self._pieces.coding(FIRST + number) for number in range(self.bitmaps)}
        return not self.flags & (NULLS | NANS) and codings <= {Coding.FLAT, Coding.ZEROS, Coding.ONES}

    @property
    def keyless(self) -> Bits | None:
        """The rows that are null or NaN; None where there are none."""
        nulls, nans = self._marks(NULL_ROWS, NULLS), self._marks(NAN_ROWS, NANS)
        return nulls if nans is None else nans if nulls is None else nulls | nans

    def _marks(self, piece: int, flag: int) -> Bits | None:
        if not self.flags & flag:
            return None
        return self._bits(piece)

    def _bits(self, piece: int) -> Bits:
        found = self._decoded(piece)
        if isinstance(found, bool):
            return bits.all_of(self.rows) if found else bits.none_of(self.rows)
        return found

    def _decoded(self, number: int) -> Bits | bool:
        piece = self._pieces.read(number)
        if piece.coding == Coding.FLAT:
            piece = Piece(piece.coding, aligned(piece.data).data)
        return bits.decode(piece, self.rows)

    def decoded(self) -> tuple[_bitmap.Slices, int]:
        """The slices, ready to be compared, and the bytes that they take beside what is stored."""
        slices = [self._decoded(FIRST + number) for number in range(self.bitmaps)]
        spent = sum(
            one.nbytes
            for number, one in enumerate(slices)
            if not isinstance(one, bool) and self._pieces.coding(FIRST + number) != Coding.FLAT
        )
        return _bitmap.Slices(slices, self.rows), spent

    def _ranked(self, wanted: Intervals, slices: Callable[[], _bitmap.Slices]) -> Bits:
        """Rows by rank; of rows without a key, which have rank 0, anything."""
        begins, ends = wanted
        if not len(begins):
            return bits.none_of(self.rows)
        if begins[0] == 0 and ends[0] == self.cardinality:
            return bits.all_of(self.rows)
        if self.layout == EQUALITY:
            return self._any_of(begins.tolist(), ends.tolist())
        return where(slices(), wanted, self.cardinality)

    def _any_of(self, begins: Sequence[int], ends: Sequence[int]) -> Bits:
        """The union of values' bitmaps, or what the union of the others leaves, whichever reads fewer."""
        asked = [rank for begin, end in zip(begins, ends, strict=True) for rank in range(begin, end)]
        turned = 2 * len(asked) > self.cardinality
        found = bits.none_of(self.rows)
        for rank in sorted(set(range(self.cardinality)) - set(asked)) if turned else asked:
            found |= self._bits(FIRST + rank)
        return bits.all_of(self.rows) & ~found if turned else found


def where(slices: _bitmap.Slices, wanted: Intervals, cardinality: int) -> Bits:
    """Rows whose rank is in one of the intervals, of which there is one or more."""
    begins, ends = wanted
    if len(begins) == 1:
        return _where_one(slices, int(begins[0]), int(ends[0]), cardinality)
    single = ends - begins == 1
    points, starts, stops = begins[single], begins[~single], ends[~single]
    if len(points) + 2 * len(starts) > COMPARED_MAX:
        return slices.where_listed(begins, ends)
    every = len(stops) > 0 and int(stops[-1]) == cardinality
    cuts = np.concatenate([starts[starts > 0], stops[stops < cardinality]])
    return slices.where(cuts, points, bool(every))


def _where_one(slices: _bitmap.Slices, begin: int, end: int, cardinality: int) -> Bits:
    if end - begin == 1:
        return slices.where(_NO_RANKS, np.array([begin], dtype=np.uint64), False)
    cuts = [cut for cut in (begin, end) if 0 < cut < cardinality]
    return slices.where(np.array(cuts, dtype=np.uint64), _NO_RANKS, end == cardinality)


_NO_RANKS = np.zeros(0, dtype=np.uint64)
