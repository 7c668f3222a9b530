"""Which of many data files hold a key: the distinct keys of all files in order, and the files of each.

Where keys are shared by files, the files of a key are stored, as a row of bits or as a list, whichever is smaller.
Where they are not, that would store every key twice to say little: then each file's least and most are kept, and what
those leave open is asked of the files' own dictionaries. A range of many keys is decided for most files by their least
and most alone. Pure.

Stored as `pieces.py`: the numbers distinct keys and files, the form of the keys, the layout. Pieces of MATRIX and
LISTS: dictionary; each file's least and most rank, u32[files] twice (2^32 - 1 and 0 of a file without keys); then the
bits, u64[keys][ceil(files / 64)], or the files of each key one after the other, in 1, 2 or 4 bytes, and their starts,
`pack_numbers` of keys + 1. Of EDGES: each file's least and most key, u64[files] twice, or their first 64 bytes with
zeros behind, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.metaserver.index.kernels import _bitmap, _ordered
from seamark.metaserver.index.keys.key_set import KeySet, WantedKeys
from seamark.metaserver.index.keys.keys import Bytes
from seamark.metaserver.index.keys.ranks import Distinct, Ranks, ranked_bytes, ranked_codes
from seamark.metaserver.index.kinds import bits
from seamark.metaserver.index.kinds.bits import MARGIN, Coding
from seamark.metaserver.index.kinds.dictionary import CODES, Bounds, Places, aligned, distinct_of, opened, pack
from seamark.metaserver.index.kinds.pieces import Head, Piece, Pieces, write_pieces

MATRIX, LISTS, EDGES = 0, 1, 2
"""Layouts."""
_DICTIONARY, _LEAST, _MOST, _FILES, _STARTS = range(5)
"""Pieces; of EDGES the first two are the edges."""
PIECES_MAX = _STARTS + 1
EDGE_BYTES = 64

SHARE, SHARE_ALONE = 1.0, 0.25
"""Of the bytes of the files' sections: so much may be spent on the files of each key, where keys are shared and where
they are not,"""
SPEND_MIN = 1 << 16
"""or so many bytes at any rate."""
SHARED_BY = 4
"""So many files have a key on average, where keys are shared."""
KEYS_MAX = 1 << 22
HEAP_MAX = 1 << 28
"""Distinct keys, and bytes of them, that are put in order in memory; more are too many to be shared by files."""
_NEVER = (1 << 32) - 1
"""The least rank of a file without keys: no range begins there or before, and ends behind it."""
_BATCH_KEYS = 1 << 22
_WIDE_MAX = 32
"""Ranges of several keys that are first held against each file's least and most."""

_ZSTD = pa.Codec("zstd", 1)
_INFLATED_MAX = 1 << 28
"""Of one piece. Longer ones are kept as they are, and mapped."""

Marks = npt.NDArray[np.uint8]
_NO_MARK = np.zeros(1, dtype=np.uint8)


class Searchable(Protocol):
    """A file's section, as far as it is asked for keys."""

    cardinality: int

    @property
    def dictionary(self) -> _ordered.Numbers | _ordered.Strings: ...


Sections = Callable[[int], Searchable]


def build_postings(sections: Sequence[Searchable], form: int, section_bytes: int) -> bytes:
    """Of data files whose sections have a `dictionary`, in their order, and take `section_bytes`."""
    total = sum(section.cardinality for section in sections)
    most = max(SHARE * section_bytes, SPEND_MIN)
    distinct = _union(sections, form, most) if len(sections) < 1 << 32 else None
    if distinct is not None:
        alone = SHARED_BY * len(distinct) > total
        made = _by_key(sections, form, distinct, total, max(SHARE_ALONE * section_bytes, SPEND_MIN) if alone else most)
        if made is not None:
            return made
    return _edges(sections, form)


def _batches(sections: Sequence[Searchable]) -> list[list[int]]:
    """Numbers of files, as many at a time as have `_BATCH_KEYS` keys between them, or one."""
    batches: list[list[int]] = [[]]
    held = 0
    for number, section in enumerate(sections):
        if batches[-1] and held + section.cardinality > _BATCH_KEYS:
            batches.append([])
            held = 0
        batches[-1].append(number)
        held += section.cardinality
    return batches


def _union(sections: Sequence[Searchable], form: int, spend: float) -> Distinct | None:
    """The distinct keys of all; None where they are too many."""
    found = _ranked([], form)[0]
    for batch in _batches(sections):
        parts = [distinct_of(sections[number].dictionary) for number in batch]
        found = _ranked([found, *parts], form)[0]
        if len(found) > min(KEYS_MAX, spend) or (found.heap is not None and len(found.heap) > HEAP_MAX):
            return None  # each key takes a byte at least
    return found


def union_of(parts: Sequence[Distinct], form: int) -> Distinct:
    """All keys of the parts, each once."""
    return _ranked(parts, form)[0]


def _ranked(parts: Sequence[Distinct], form: int) -> tuple[Distinct, Ranks]:
    """All keys of the parts together, and the rank of each in turn."""
    if form == CODES:
        codes = [part.codes for part in parts if part.codes is not None]
        return ranked_codes(np.concatenate([np.zeros(0, dtype=np.uint64), *codes]))
    starts, heaps, base = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.uint8)], 0
    for part in parts:
        if part.starts is not None and part.heap is not None:
            starts.append(part.starts[1:] + base)
            heaps.append(part.heap)
            base += len(part.heap)
    together = np.concatenate(starts)
    return ranked_bytes(together[:-1], together[1:], np.concatenate(heaps))


def _by_key(sections: Sequence[Searchable], form: int, distinct: Distinct, total: int, spend: float) -> bytes | None:
    """None where it would take more than `spend` bytes. `total`: keys of all files, together."""
    files, keys = len(sections), len(distinct)
    words, width = bits.words_of(files), 1 if files <= 1 << 8 else 2 if files <= 1 << 16 else 4
    matrix_bytes, lists_bytes = 8 * words * keys, width * total
    dictionary = pack(distinct)
    if len(dictionary) + 8 * files + min(matrix_bytes, lists_bytes) > spend:
        return None
    layout = MATRIX if matrix_bytes <= lists_bytes else LISTS
    least, most = np.full(files, _NEVER, dtype=np.uint32), np.zeros(files, dtype=np.uint32)
    matrix = np.zeros((keys, words) if layout == MATRIX else (0, 0), dtype=np.uint64)
    pairs: list[tuple[Ranks, npt.NDArray[np.uint32]]] = []
    for batch in _batches(sections):
        parts = [distinct_of(sections[number].dictionary) for number in batch]
        ranks = _ranked([distinct, *parts], form)[1][keys:]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        owners = np.repeat(np.array(batch, dtype=np.uint32), lengths)
        ends = np.cumsum(lengths)
        there = np.flatnonzero(lengths)
        at = np.array(batch, dtype=np.int64)[there]
        least[at], most[at] = ranks[(ends - lengths)[there]], ranks[ends[there] - 1]
        if layout == MATRIX:
            _bitmap.fill_matrix(matrix, ranks, owners)
        else:
            pairs.append((ranks, owners))
    pieces = [_flat(dictionary), _packed(least), _packed(most)]
    if layout == MATRIX:
        pieces.append(_packed(matrix))
    else:
        pieces += _lists(pairs, keys, width)
    return write_pieces(Head(keys, files, form, layout, 0), pieces)


def _lists(pairs: Sequence[tuple[Ranks, npt.NDArray[np.uint32]]], keys: int, width: int) -> list[Piece]:
    ranks = np.concatenate([pair[0] for pair in pairs])
    owners = np.concatenate([pair[1] for pair in pairs])
    starts = np.zeros(keys + 1, dtype=np.uint64)
    np.cumsum(np.bincount(ranks, minlength=keys), out=starts[1:])
    listed = owners[np.argsort(ranks, kind="stable")].astype(f"<u{width}")
    return [_packed(listed), _flat(_ordered.pack_numbers(starts))]


def _edges(sections: Sequence[Searchable], form: int) -> bytes:
    """The least and the most key of each file; of one without keys zeros."""
    if form == CODES:
        sides = np.zeros((2, len(sections)), dtype=np.uint64)
    else:
        sides = np.zeros((2, len(sections)), dtype=f"S{EDGE_BYTES}")
    for number, section in enumerate(sections):
        if section.cardinality:
            sides[0, number], sides[1, number] = section.dictionary.edges()
    pieces = [_packed(np.ascontiguousarray(side)) for side in sides]
    return write_pieces(Head(0, len(sections), form, EDGES, 0), pieces)


def _flat(array: Bytes) -> Piece:
    return Piece(Coding.FLAT, array.data)


def _packed(array: npt.NDArray[Any]) -> Piece:
    """Flat, or zstd behind the length of what it inflates to (u64) where that is clearly smaller."""
    data = array.reshape(-1).view(np.uint8).data
    if len(data) > _INFLATED_MAX:
        return Piece(Coding.FLAT, data)
    packed = len(data).to_bytes(8, "little") + _ZSTD.compress(data, asbytes=True)
    return Piece(Coding.ZSTD, packed) if len(packed) < MARGIN * len(data) else Piece(Coding.FLAT, data)


def _is_wide(begins: Places, ends: Places) -> bool:
    """Whether intervals of several keys are first held against each file's least and most."""
    return 0 < int(np.count_nonzero(ends - begins > 1)) <= _WIDE_MAX


class Postings:
    """Reads what `build_postings` made. ValueError where something cannot be right, when it is first read."""

    def __init__(self, memory: memoryview, form: int, files: int, pairs: int) -> None:
        """`pairs`: distinct keys of each file, added up, so many at most are listed."""
        self._pieces = Pieces(memory)
        self._keys, there, has_form, self.layout, _ = self._pieces.head
        pieces = {MATRIX: _STARTS, LISTS: _STARTS + 1, EDGES: 2}.get(self.layout)
        if (there, has_form, self._pieces.count) != (files, form, pieces):
            raise ValueError(f"postings of {there} files in {self._pieces.count} pieces cannot be right")
        if self._keys >= _NEVER or self._keys > pairs:
            raise ValueError(f"postings of {self._keys} keys, where files have {pairs}, cannot be right")
        self._pairs = pairs
        self._form = form
        self._files = files
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._dictionary: _ordered.Numbers | _ordered.Strings | None = None
        self._starts: _ordered.Numbers | None = None
        self._marked: tuple[WantedKeys, Marks] | None = None

    def verify(self) -> None:
        self._pieces.verify()

    def files_with(self, bounds: Bounds, there: npt.NDArray[np.bool_], section: Sections) -> Marks:
        """uint8[files]: 1 where a file holds a key within the bounds. `there`: the files that have keys."""
        if not bounds.count:
            return np.zeros(self._files, dtype=np.uint8)
        if self.layout == EDGES:
            return self._asked(bounds, *self._by_edges(bounds, there), section)
        return self._by_key(bounds)

    def reads(self, bounds: Bounds) -> Iterator[list[tuple[int, int]]]:
        """(offset, length) of the pieces that `files_with` reads, step by step: each is to be in memory before the next
        is asked for. Not those of the files' own sections (`left_open`)."""
        if not bounds.count:
            return
        if self.layout == EDGES:
            yield [self._pieces.spot(0), self._pieces.spot(1)]
            return
        yield [self._pieces.spot(_DICTIONARY)]
        begins, ends = bounds.intervals(self._opened())
        if _is_wide(begins, ends):
            yield [self._pieces.spot(_LEAST), self._pieces.spot(_MOST)]
            _, begins, ends = self._by_extremes(begins, ends)
        if len(begins):
            yield [self._pieces.spot(number) for number in range(_FILES, self._pieces.count)]

    def left_open(self, bounds: Bounds, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """The files of which `files_with` asks the sections' dictionaries."""
        if not bounds.count or self.layout != EDGES:
            return np.empty(0, dtype=np.intp)
        return self._by_edges(bounds, there)[1]

    def files_with_keys(self, keys: KeySet, there: npt.NDArray[np.bool_], section: Sections) -> Marks:
        """As `files_with`, of many keys: what is here is looked up among them."""
        if self.layout != EDGES:
            marks = self._marks_of(keys)
            if marks.all():
                return there.astype(np.uint8)
            edges = np.diff(np.concatenate([_NO_MARK, marks, _NO_MARK]).view(np.int8))
            begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
            if not len(begins):
                return np.zeros(self._files, dtype=np.uint8)
            return self._listed(begins.astype(np.uint64), ends.astype(np.uint64))
        found = np.zeros(self._files, dtype=np.uint8)
        bounds = Bounds(keys.extremes, self._form)
        if bounds.count:
            for number in np.flatnonzero(self._between(bounds, there)).tolist():
                found[number] = keys.marks(distinct_of(section(number).dictionary)).any()
        return found

    def has_only(self, keys: WantedKeys) -> bool:
        """Whether every key of every file is known to be one of these."""
        return self.layout != EDGES and bool(self._marks_of(keys).all())

    def share(self, keys: WantedKeys) -> float:
        """Which part of the distinct keys are among these; 1 where that is not known."""
        if self.layout == EDGES or not self._keys:
            return 1.0
        return float(np.count_nonzero(self._marks_of(keys))) / self._keys

    def _marks_of(self, keys: WantedKeys) -> Marks:
        """uint8[distinct keys]: those that are among the wanted. The last that was asked is remembered."""
        marked = self._marked
        if marked is None or marked[0] is not keys:
            self._marked = marked = (keys, keys.marks(distinct_of(self._opened())))
        return marked[1]

    def _between(self, bounds: Bounds, there: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """bool[files]: those whose least and most key do not exclude that they have one within the bounds."""
        marks, numbers = self._by_edges(bounds, there)
        possible: npt.NDArray[np.bool_] = marks != 0
        possible[numbers] = True
        return possible

    def _opened(self) -> _ordered.Numbers | _ordered.Strings:
        if self._dictionary is None:
            self._dictionary = opened(self._pieces.read(_DICTIONARY).data, self._keys, self._form)
        return self._dictionary

    def _by_key(self, bounds: Bounds) -> Marks:
        begins, ends = bounds.intervals(self._opened())
        marks = np.zeros(self._files, dtype=np.uint8)
        if _is_wide(begins, ends):
            marks, begins, ends = self._by_extremes(begins, ends)
        if len(begins):
            marks |= self._listed(begins, ends)
        return marks

    def _by_extremes(self, begins: Places, ends: Places) -> tuple[Marks, Places, Places]:
        """What each file's least and most say of wide intervals, and the intervals that are to be asked yet."""
        marks = np.zeros(self._files, dtype=np.uint8)
        many = ends - begins > 1
        least, most = (self._array(number, "<u4", self._files) for number in (_LEAST, _MOST))
        open_ = np.zeros(self._files, dtype=np.bool_)
        for begin, end in zip(begins[many].tolist(), ends[many].tolist(), strict=True):
            below, above = least < begin, most >= end
            apart = (most < begin) | (least >= end)
            marks |= ~apart & ~(below & above)
            open_ |= ~apart & below & above
        if not (open_ & (marks == 0)).any():
            begins, ends = begins[~many], ends[~many]
        return marks, begins, ends

    def _listed(self, begins: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]) -> Marks:
        if self.layout == MATRIX:
            words = bits.words_of(self._files)
            matrix = self._array(_FILES, "<u8", words * self._keys)
            found = _bitmap.mark_rows(matrix.reshape(self._keys, words), begins, ends)
            return np.unpackbits(found.view(np.uint8), count=self._files, bitorder="little")
        if self._starts is None:
            self._starts = _ordered.Numbers(aligned(self._pieces.read(_STARTS).data), self._keys + 1)
        width = 1 if self._files <= 1 << 8 else 2 if self._files <= 1 << 16 else 4
        marks = np.zeros(self._files, dtype=np.uint8)
        pairs = int(self._starts.at(np.array([self._keys], dtype=np.uint64))[0])
        if pairs > self._pairs:
            raise ValueError(f"postings list {pairs} files, where the files have {self._pairs} keys")
        listed = self._array(_FILES, f"<u{width}", pairs)
        _bitmap.mark_listed(listed, self._starts.at(begins), self._starts.at(ends), marks)
        return marks

    def _by_edges(self, bounds: Bounds, there: npt.NDArray[np.bool_]) -> tuple[Marks, npt.NDArray[np.intp]]:
        """The files that least and most key decide for, and the numbers of those that they leave open."""
        dtype = "<u8" if self._form == CODES else f"S{EDGE_BYTES}"
        least, most = self._array(0, dtype, self._files), self._array(1, dtype, self._files)
        lows, highs = bounds.edges(EDGE_BYTES)
        # the first range that does not end before the least key of a file begins no later than its most, or none does
        place = np.searchsorted(highs, least, side="left")
        possible = there & (place < len(highs))
        possible[possible] = lows[place[possible]] <= most[possible]
        marks = np.zeros(self._files, dtype=np.uint8)
        if self._form == CODES:
            sure = possible.copy()
            sure[possible] = lows[place[possible]] <= least[possible]
            marks[sure] = 1
            possible &= ~sure
        return marks, np.flatnonzero(possible)

    def _asked(self, bounds: Bounds, marks: Marks, numbers: npt.NDArray[np.intp], section: Sections) -> Marks:
        """With the marks of the files numbered by what their dictionaries hold."""
        if self._form == CODES:
            dictionaries = [section(number).dictionary for number in numbers.tolist()]
            marks[numbers] = _ordered.holding(cast("list[_ordered.Numbers]", dictionaries), bounds.lows, bounds.highs)
            return marks
        for number in numbers.tolist():
            marks[number] = len(bounds.intervals(section(number).dictionary).begins) > 0
        return marks

    def _array(self, number: int, dtype: str, count: int) -> npt.NDArray[Any]:
        """A piece as so many numbers, kept when it had to be inflated. Not before it is known how much that makes."""
        held = self._arrays.get(number)
        if held is not None:
            return held
        piece = self._pieces.read(number)
        if piece.coding == Coding.ZSTD:
            size = int.from_bytes(piece.data[:8], "little")
            if size != count * np.dtype(dtype).itemsize or size > _INFLATED_MAX:
                raise ValueError(f"a piece of {count} numbers cannot inflate to {size:,} bytes")
            try:
                data = _ZSTD.decompress(piece.data[8:], size, asbytes=True)
            except OSError as error:
                raise ValueError(f"a piece does not inflate: {error}") from None
            found = np.frombuffer(data, dtype=dtype)
        elif piece.coding == Coding.FLAT:
            found = aligned(piece.data).view(dtype)
        else:
            raise ValueError(f"a piece has the coding {piece.coding}")
        if len(found) != count:
            raise ValueError(f"a piece has {len(found)} numbers, not {count}")
        self._arrays[number] = found
        return found
