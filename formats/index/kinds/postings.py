"""Postings: the distinct keys of all data files in ascending order, and the files that contain each key.

If keys occur in several files, the files of each key are stored as a row of bits or as a list, in the smaller form. If
they do not, this would store every key twice, with little benefit. In this case, only the lowest and the greatest key
of each file are stored. If these two keys do not decide a lookup, it searches the file's own dictionary. For a range of
many keys, the lowest and the greatest rank decide most files. The functions have no side effects.

Postings are stored in the form of `pieces.py`: the numbers of distinct keys and of files, the form of the keys, and the
layout.

The pieces of MATRIX and LISTS are: the dictionary; the lowest ranks and the greatest ranks of the files, u32[files]
each (2^32 - 1 and 0 for a file without keys). For MATRIX, the bits follow, u64[keys][ceil(files / 64)]. For LISTS, the
concatenated lists of the files of all keys follow, in 1, 2 or 4 bytes, and then the starts of the lists, `pack_numbers`
of keys + 1.

The pieces of EDGES are the lowest keys and the greatest keys of the files, u64[files] each, or the first 64 bytes of
these keys, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.index.kernels import _bitmap, _ordered
from seamark.formats.index.keys.key_set import KeySet, WantedKeys
from seamark.formats.index.keys.keys import Bytes
from seamark.formats.index.keys.ranks import Distinct, Ranks, rank_bytes, rank_codes
from seamark.formats.index.kinds import bits
from seamark.formats.index.kinds.bits import COMPRESSED_MAX_FRACTION, Coding
from seamark.formats.index.kinds.dictionary import (
    CODES,
    Bounds,
    RankArray,
    align_bytes,
    open_dictionary,
    pack_dictionary,
    read_distinct,
)
from seamark.formats.index.kinds.pieces import Piece, Pieces, PiecesHeader, write_pieces

MATRIX, LISTS, EDGES = 0, 1, 2
"""The layouts: a bit for each key and file; the list of the files of each key; the lowest and greatest key of each
file.
"""
_DICTIONARY, _LOWEST_RANKS, _GREATEST_RANKS, _FILES, _STARTS = range(5)
"""The indexes of the pieces in the layouts MATRIX and LISTS."""
_LOWEST_KEYS, _GREATEST_KEYS = 0, 1
"""The indexes of the pieces in the layout EDGES."""
PIECES_MAX = _STARTS + 1
EDGE_BYTES = 64

SHARED_MAX_FRACTION, UNSHARED_MAX_FRACTION = 1.0, 0.25
"""The maximum size of the postings' files, as a fraction of the size of the sections.

The first limit is for keys that files share, the second one for other keys.
"""
SMALL_INDEX_MAX_BYTES = 1 << 16
"""The maximum size of postings in a small index in bytes. In a larger index, the size of the sections limits them."""
SHARED_KEY_MIN_FILES = 4
"""The average number of files per key from which files are considered to share keys."""
KEYS_MAX = 1 << 22
HEAP_MAX = 1 << 28
"""The maximum number of distinct keys, and of their bytes, that are sorted in memory.

Files with more are considered not to share keys.
"""
_NO_RANK = (1 << 32) - 1
"""The lowest rank of a file without keys. No interval of ranks contains it."""
_KEYS_PER_BATCH = 1 << 22
_WIDE_RANGES_MAX = 32
"""The maximum number of wide ranges (of several keys) that are first compared with the ranks of each file.

The lowest and the greatest rank of a file are compared.
"""

_SIZE_BYTES = 8
"""The size of the decompressed size before a compressed piece."""
_ZSTD = pa.Codec("zstd", 1)
_INFLATED_MAX = 1 << 28
"""The maximum size of a piece before compression in bytes. Longer pieces are stored uncompressed and memory-mapped."""

Marks = npt.NDArray[np.uint8]
_NO_MARK = np.zeros(1, dtype=np.uint8)


class Searchable(Protocol):
    """The part of a bitmap index for one data file, in which keys can be searched."""

    cardinality: int

    @property
    def dictionary(self) -> _ordered.Numbers | _ordered.Strings: ...


Sections = Callable[[int], Searchable]


def build_postings(sections: Sequence[Searchable], form: int, section_bytes: int) -> bytes:
    """Encode the postings of some data files, which map each key to the files that contain it.

    If this takes too many bytes, or there are too many keys, store only the lowest and the greatest key of each file.
    If few files share a key, the limit is lower, because the postings would repeat most keys with little benefit.

    Args:
        sections: The parts of the index for each file, in order.
        form: The form of the keys: CODES or BYTES.
        section_bytes: The total size of the sections.
    """
    total = sum(section.cardinality for section in sections)
    budget = max(SHARED_MAX_FRACTION * section_bytes, SMALL_INDEX_MAX_BYTES)
    distinct = _union_keys(sections, form, budget) if len(sections) < 1 << 32 else None
    if distinct is not None:
        limit = budget
        if SHARED_KEY_MIN_FILES * len(distinct) > total:
            limit = max(UNSHARED_MAX_FRACTION * section_bytes, SMALL_INDEX_MAX_BYTES)
        postings = _encode_by_key(sections, form, distinct, total, limit)
        if postings is not None:
            return postings
    return _encode_edges(sections, form)


def _compute_index_bytes(files: int) -> int:
    """Return how many bytes a list of files needs for each file's index: the fewest that fit `files` indexes."""
    return 1 if files <= 1 << 8 else 2 if files <= 1 << 16 else 4


def _batch_files(sections: Sequence[Searchable]) -> list[list[int]]:
    """Return the indexes of the files in batches of at most `_KEYS_PER_BATCH` keys.

    A file with more keys has its own batch.
    """
    batches: list[list[int]] = [[]]
    batch_keys = 0
    for number, section in enumerate(sections):
        if batches[-1] and batch_keys + section.cardinality > _KEYS_PER_BATCH:
            batches.append([])
            batch_keys = 0
        batches[-1].append(number)
        batch_keys += section.cardinality
    return batches


def _union_keys(sections: Sequence[Searchable], form: int, budget: float) -> Distinct | None:
    """Return the distinct keys of all sections, or None if there are too many keys.

    The keys are merged in batches of files, which limits the memory.

    Args:
        sections: The parts of the index for each file.
        form: The form of the keys: CODES or BYTES.
        budget: The maximum size of the postings in bytes.
    """
    union = merge_distinct([], form)
    for batch in _batch_files(sections):
        parts = [read_distinct(sections[number].dictionary) for number in batch]
        union = merge_distinct([union, *parts], form)
        if len(union) > min(KEYS_MAX, budget) or (union.heap is not None and len(union.heap) > HEAP_MAX):
            return None  # Each key takes at least one byte, so more keys than `budget` bytes do not fit.
    return union


def merge_distinct(parts: Sequence[Distinct], form: int) -> Distinct:
    """Return the distinct keys of all parts.

    Args:
        parts: The distinct keys of each part, ascending.
        form: The form of the keys: CODES (64-bit numbers) or BYTES.
    """
    distinct, _ = rank_parts(parts, form)
    return distinct


def rank_parts(parts: Sequence[Distinct], form: int) -> tuple[Distinct, Ranks]:
    """Return the distinct keys of all parts, and the rank of each key of the parts, in the order of the parts."""
    if form == CODES:
        codes = [part.codes for part in parts if part.codes is not None]
        return rank_codes(np.concatenate([np.zeros(0, dtype=np.uint64), *codes]))
    starts, heaps, joined_bytes = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.uint8)], 0
    for part in parts:
        if part.starts is not None and part.heap is not None:
            starts.append(part.starts[1:] + joined_bytes)
            heaps.append(part.heap)
            joined_bytes += len(part.heap)
    joined_starts = np.concatenate(starts)
    return rank_bytes(joined_starts[:-1], joined_starts[1:], np.concatenate(heaps))


def _encode_by_key(
    sections: Sequence[Searchable], form: int, distinct: Distinct, total: int, budget: float
) -> bytes | None:
    """Encode postings, which map each key to its files, or return None if they take more than `budget` bytes.

    The smaller layout is used: MATRIX has a bit for each key and file, and LISTS has the list of the files of each key.

    Args:
        sections: The parts of the index for each file, in order.
        form: The form of the keys: CODES (64-bit numbers) or BYTES.
        distinct: The distinct keys of all files.
        total: The sum of the numbers of keys of all files.
        budget: The maximum size.
    """
    files, keys = len(sections), len(distinct)
    words, width = bits.count_words(files), _compute_index_bytes(files)
    matrix_bytes, lists_bytes = 8 * words * keys, width * total
    dictionary = pack_dictionary(distinct)
    if len(dictionary) + 8 * files + min(matrix_bytes, lists_bytes) > budget:
        return None
    layout = MATRIX if matrix_bytes <= lists_bytes else LISTS
    lowest_ranks, greatest_ranks = np.full(files, _NO_RANK, dtype=np.uint32), np.zeros(files, dtype=np.uint32)
    matrix = np.zeros((keys, words) if layout == MATRIX else (0, 0), dtype=np.uint64)
    pairs: list[tuple[Ranks, npt.NDArray[np.uint32]]] = []
    for batch in _batch_files(sections):
        parts = [read_distinct(sections[number].dictionary) for number in batch]
        _, all_ranks = rank_parts([distinct, *parts], form)
        ranks = all_ranks[keys:]  # The first ranks are those of `distinct` itself.
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        file_indexes = np.repeat(np.array(batch, dtype=np.uint32), lengths)
        ends = np.cumsum(lengths)
        non_empty = np.flatnonzero(lengths)
        files_with_keys = np.array(batch, dtype=np.int64)[non_empty]
        lowest_ranks[files_with_keys] = ranks[(ends - lengths)[non_empty]]
        greatest_ranks[files_with_keys] = ranks[ends[non_empty] - 1]
        if layout == MATRIX:
            _bitmap.fill_matrix(matrix, ranks, file_indexes)
        else:
            pairs.append((ranks, file_indexes))
    pieces = [_make_flat_piece(dictionary), _pack_array(lowest_ranks), _pack_array(greatest_ranks)]
    if layout == MATRIX:
        pieces.append(_pack_array(matrix))
    else:
        pieces += _encode_lists(pairs, keys, width)
    return write_pieces(PiecesHeader(keys, files, form, layout, 0), pieces)


def _encode_lists(pairs: Sequence[tuple[Ranks, npt.NDArray[np.uint32]]], keys: int, width: int) -> list[Piece]:
    """Encode the lists of the files of all keys, and the starts of the lists.

    Args:
        pairs: Arrays of ranks of keys, each with an array of the indexes of the files that contain these keys.
        keys: The number of distinct keys.
        width: The number of bytes in which the index of a file is stored.
    """
    ranks = np.concatenate([ranks for ranks, _ in pairs])
    file_indexes = np.concatenate([file_indexes for _, file_indexes in pairs])
    starts = np.zeros(keys + 1, dtype=np.uint64)
    np.cumsum(np.bincount(ranks, minlength=keys), out=starts[1:])
    sorted_file_indexes = file_indexes[np.argsort(ranks, kind="stable")].astype(f"<u{width}")
    return [_pack_array(sorted_file_indexes), _make_flat_piece(_ordered.pack_numbers(starts))]


def _encode_edges(sections: Sequence[Searchable], form: int) -> bytes:
    """Encode the lowest and the greatest key of each file, instead of the files of each key (the layout EDGES).

    For a file without keys, they are zeros.

    Args:
        sections: The parts of the index for each file, in order.
        form: The form of the keys: CODES (64-bit numbers) or BYTES, of which the first `EDGE_BYTES` bytes are stored.
    """
    if form == CODES:
        sides = np.zeros((2, len(sections)), dtype=np.uint64)
    else:
        sides = np.zeros((2, len(sections)), dtype=f"S{EDGE_BYTES}")
    for number, section in enumerate(sections):
        if section.cardinality:
            sides[0, number], sides[1, number] = section.dictionary.edges()
    pieces = [_pack_array(np.ascontiguousarray(side)) for side in sides]
    return write_pieces(PiecesHeader(0, len(sections), form, EDGES, 0), pieces)


def _make_flat_piece(array: Bytes) -> Piece:
    return Piece(Coding.FLAT, array.data)


def _pack_array(array: npt.NDArray[Any]) -> Piece:
    """Return the bytes of an array, compressed with zstd if this saves enough bytes (COMPRESSED_MAX_FRACTION).

    A compressed piece begins with its decompressed size (u64). An array above the readers' limit for decompressed sizes
    is not compressed.
    """
    data = array.reshape(-1).view(np.uint8).data
    if len(data) > _INFLATED_MAX:
        return Piece(Coding.FLAT, data)
    compressed = len(data).to_bytes(_SIZE_BYTES, "little") + _ZSTD.compress(data, asbytes=True)
    return (
        Piece(Coding.ZSTD, compressed)
        if len(compressed) < COMPRESSED_MAX_FRACTION * len(data)
        else Piece(Coding.FLAT, data)
    )


def _has_few_wide_intervals(begins: RankArray, ends: RankArray) -> bool:
    """Return whether some intervals are wide, but few enough to be compared with the ranks of each file.

    A wide interval contains several keys. To mark its files key by key would take longer than to compare it with the
    lowest and the greatest rank of each file.
    """
    return 0 < int(np.count_nonzero(ends - begins > 1)) <= _WIDE_RANGES_MAX


class Postings:
    """A reader of the bytes of `build_postings`.

    Raises:
        ValueError: A part is damaged. The error is raised when the part is first read.
    """

    def __init__(self, memory: memoryview, form: int, files: int, pairs: int) -> None:
        """Open postings without copying them.

        The layout MATRIX has a bit for each key and file, LISTS has the list of the files of each key, and EDGES has
        only the lowest and the greatest key of each file. Each array of a layout is a piece with its own checksum.

        Args:
            memory: The bytes of the postings.
            form: The form of the keys: CODES (64-bit numbers) or BYTES.
            files: The number of data files.
            pairs: The sum of the numbers of distinct keys of all files. The lists have at most this number of entries.

        Raises:
            ValueError: The postings do not fit `form`, `files` or `pairs`.
        """
        self._pieces = Pieces(memory)
        self._keys, stored_files, stored_form, self.layout, _ = self._pieces.head
        expected_pieces = {MATRIX: _STARTS, LISTS: _STARTS + 1, EDGES: 2}.get(self.layout)
        if (stored_files, stored_form, self._pieces.count) != (files, form, expected_pieces):
            raise ValueError(f"postings cannot have {stored_files} files in {self._pieces.count} pieces")
        if self._keys >= _NO_RANK or self._keys > pairs:
            raise ValueError(f"postings cannot have {self._keys} keys if the files have {pairs}")
        self._pairs = pairs
        self._form = form
        self._files = files
        self._arrays: dict[int, npt.NDArray[Any]] = {}
        self._dictionary: _ordered.Numbers | _ordered.Strings | None = None
        self._starts: _ordered.Numbers | None = None
        self._marked: tuple[WantedKeys, Marks] | None = None

    def verify(self) -> None:
        self._pieces.verify()

    def mark_files(self, bounds: Bounds, has_keys: npt.NDArray[np.bool_], get_section: Sections) -> Marks:
        """Return 1 for each file that contains a key within the bounds, otherwise 0, as uint8[files].

        In the layout EDGES, the postings have only the lowest and the greatest key of each file. If these keys do not
        decide a file, its own keys are searched.

        Args:
            bounds: The bounds.
            has_keys: bool[files], False for a file without keys.
            get_section: A function that returns the part of the index for one file. This part contains the file's keys.
        """
        if not bounds.count:
            return np.zeros(self._files, dtype=np.uint8)
        if self.layout == EDGES:
            return self._search_sections(bounds, *self._mark_by_edge_keys(bounds, has_keys), get_section)
        return self._mark_by_key(bounds)

    def list_parts_to_read(self, bounds: Bounds) -> Iterator[list[tuple[int, int]]]:
        """Yield the offsets and lengths of the pieces (arrays of the postings) that `mark_files` reads.

        The pieces are yielded in steps: the caller loads each list into memory before it requests the next list. Wide
        ranges are first compared with the lowest and the greatest rank of each file. The files of each key are read
        only if this comparison does not decide all files. The sections of the files (`list_undecided_files`) are not
        included.
        """
        if not bounds.count:
            return
        if self.layout == EDGES:
            yield [self._pieces.locate(_LOWEST_KEYS), self._pieces.locate(_GREATEST_KEYS)]
            return
        yield [self._pieces.locate(_DICTIONARY)]
        begins, ends = bounds.find_intervals(self._open_dictionary())
        if _has_few_wide_intervals(begins, ends):
            yield [self._pieces.locate(_LOWEST_RANKS), self._pieces.locate(_GREATEST_RANKS)]
            _, begins, ends = self._mark_by_extremes(begins, ends)
        if len(begins):
            yield [self._pieces.locate(number) for number in range(_FILES, self._pieces.count)]

    def list_undecided_files(self, bounds: Bounds, has_keys: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
        """Return the indexes of the files whose own keys `mark_files` searches.

        This is necessary only in the layout EDGES, in which the postings have only the lowest and the greatest key of
        each file. The own keys of a file are searched if these two keys do not decide whether it has a key within the
        bounds.
        """
        if not bounds.count or self.layout != EDGES:
            return np.empty(0, dtype=np.intp)
        _, undecided_files = self._mark_by_edge_keys(bounds, has_keys)
        return undecided_files

    def mark_files_with_keys(self, keys: KeySet, has_keys: npt.NDArray[np.bool_], get_section: Sections) -> Marks:
        """Return 1 for each file that contains one of many keys, otherwise 0, as uint8[files].

        The keys of the index are looked up in `keys`, not vice versa. In the layout EDGES, the postings have only the
        lowest and the greatest key of each file, so the keys of each file that may match are read from its section.

        Args:
            keys: The keys.
            has_keys: bool[files], False for a file without keys.
            get_section: A function that returns the section of a file, the part of the index for this file.
        """
        if self.layout != EDGES:
            marks = self._mark_wanted_keys(keys)
            if marks.all():
                return has_keys.astype(np.uint8)
            # A difference of 1 is the beginning of an interval of marked ranks, and -1 is its end.
            edges = np.diff(np.concatenate([_NO_MARK, marks, _NO_MARK]).view(np.int8))
            begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
            if not len(begins):
                return np.zeros(self._files, dtype=np.uint8)
            return self._mark_files(begins.astype(np.uint64), ends.astype(np.uint64))
        file_marks = np.zeros(self._files, dtype=np.uint8)
        bounds = Bounds(keys.extremes, self._form)
        if bounds.count:
            for number in np.flatnonzero(self._mark_possible_files(bounds, has_keys)).tolist():
                file_marks[number] = keys.mark_keys(read_distinct(get_section(number).dictionary)).any()
        return file_marks

    def has_only(self, keys: WantedKeys) -> bool:
        """Return whether all keys of all files are certainly in `keys`.

        In the layout EDGES, the postings have only the lowest and the greatest key of each file, so the result is
        False.
        """
        return self.layout != EDGES and bool(self._mark_wanted_keys(keys).all())

    def share(self, keys: WantedKeys) -> float:
        """Return the fraction of the index's distinct keys that are in `keys`, or 1 if the fraction is unknown.

        It is unknown in the layout EDGES, in which the postings have only the lowest and the greatest key of each file.
        """
        if self.layout == EDGES or not self._keys:
            return 1.0
        return float(np.count_nonzero(self._mark_wanted_keys(keys))) / self._keys

    def _mark_wanted_keys(self, keys: WantedKeys) -> Marks:
        """Return 1 for each distinct key that is in `keys`, otherwise 0, as uint8[distinct keys].

        The result for the last `keys` is cached.
        """
        if self._marked is not None:
            marked_keys, marks = self._marked
            if marked_keys is keys:
                return marks
        marks = keys.mark_keys(read_distinct(self._open_dictionary()))
        self._marked = (keys, marks)
        return marks

    def _mark_possible_files(self, bounds: Bounds, has_keys: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return whether each file may have a key within the bounds, as bool[files].

        The lowest and the greatest key of a file can exclude it.
        """
        marks, undecided_files = self._mark_by_edge_keys(bounds, has_keys)
        may_have_key: npt.NDArray[np.bool_] = marks != 0
        may_have_key[undecided_files] = True
        return may_have_key

    def _open_dictionary(self) -> _ordered.Numbers | _ordered.Strings:
        if self._dictionary is None:
            self._dictionary = open_dictionary(self._pieces.read(_DICTIONARY).data, self._keys, self._form)
        return self._dictionary

    def _mark_by_key(self, bounds: Bounds) -> Marks:
        """Return the marks of `mark_files` for the layouts MATRIX and LISTS, which store the files of each key.

        Wide ranges are first compared with the lowest and the greatest rank of each file, which decide most files.
        """
        begins, ends = bounds.find_intervals(self._open_dictionary())
        marks = np.zeros(self._files, dtype=np.uint8)
        if _has_few_wide_intervals(begins, ends):
            marks, begins, ends = self._mark_by_extremes(begins, ends)
        if len(begins):
            marks |= self._mark_files(begins, ends)
        return marks

    def _mark_by_extremes(self, begins: RankArray, ends: RankArray) -> tuple[Marks, RankArray, RankArray]:
        """Compare wide intervals with the lowest and the greatest rank of each file.

        A file has a key in an interval if its lowest or its greatest rank is inside. It has none if all its ranks are
        on one side. If the interval is between its lowest and greatest rank, the comparison does not decide.

        Returns:
            The marks that this comparison decides, and the starts and the ends of the intervals that still have to be
            looked up.
        """
        marks = np.zeros(self._files, dtype=np.uint8)
        is_wide = ends - begins > 1
        lowest_ranks, greatest_ranks = (
            self._read_array(number, "<u4", self._files) for number in (_LOWEST_RANKS, _GREATEST_RANKS)
        )
        is_undecided = np.zeros(self._files, dtype=np.bool_)
        for begin, end in zip(begins[is_wide].tolist(), ends[is_wide].tolist(), strict=True):
            is_low_below, is_high_above = lowest_ranks < begin, greatest_ranks >= end
            is_outside = (greatest_ranks < begin) | (lowest_ranks >= end)
            marks |= ~is_outside & ~(is_low_below & is_high_above)
            is_undecided |= ~is_outside & is_low_below & is_high_above
        if not (is_undecided & (marks == 0)).any():
            begins, ends = begins[~is_wide], ends[~is_wide]
        return marks, begins, ends

    def _mark_files(self, begins: npt.NDArray[np.uint64], ends: npt.NDArray[np.uint64]) -> Marks:
        """Return 1 for each file with a rank in the intervals, otherwise 0, as uint8[files].

        The layout MATRIX has a bit for each key and file. The layout LISTS has the indexes of each key's files.
        """
        if self.layout == MATRIX:
            words = bits.count_words(self._files)
            matrix = self._read_array(_FILES, "<u8", words * self._keys)
            file_words = _bitmap.mark_rows(matrix.reshape(self._keys, words), begins, ends)
            return np.unpackbits(file_words.view(np.uint8), count=self._files, bitorder="little")
        if self._starts is None:
            self._starts = _ordered.Numbers(align_bytes(self._pieces.read(_STARTS).data), self._keys + 1)
        width = _compute_index_bytes(self._files)
        marks = np.zeros(self._files, dtype=np.uint8)
        (pairs,) = self._starts.at(np.array([self._keys], dtype=np.uint64)).tolist()
        if pairs > self._pairs:
            raise ValueError(
                f"the index has {pairs} pairs of a key and a file, but its files have {self._pairs} keys in total"
            )
        file_numbers = self._read_array(_FILES, f"<u{width}", pairs)
        _bitmap.mark_listed(file_numbers, self._starts.at(begins), self._starts.at(ends), marks)
        return marks

    def _mark_by_edge_keys(self, bounds: Bounds, has_keys: npt.NDArray[np.bool_]) -> tuple[Marks, npt.NDArray[np.intp]]:
        """Compare the bounds with the lowest and the greatest key of each file.

        A file is excluded if no range overlaps the range from its lowest to its greatest key. It is marked if a range
        contains its lowest key, and keys are codes (64-bit numbers). Of keys that are bytes, only the first bytes are
        stored, so these keys mark no file.

        Returns:
            1 for each marked file, otherwise 0, as uint8[files], and the indexes of the files that are neither marked
            nor excluded.
        """
        dtype = "<u8" if self._form == CODES else f"S{EDGE_BYTES}"
        lowest_keys, greatest_keys = (
            self._read_array(number, dtype, self._files) for number in (_LOWEST_KEYS, _GREATEST_KEYS)
        )
        lows, highs = bounds.list_edges(EDGE_BYTES)
        # If a range contains a key of the file, it is the first range that does not end before the file's lowest key.
        range_indexes = np.searchsorted(highs, lowest_keys, side="left")
        may_have_key = has_keys & (range_indexes < len(highs))
        may_have_key[may_have_key] = lows[range_indexes[may_have_key]] <= greatest_keys[may_have_key]
        marks = np.zeros(self._files, dtype=np.uint8)
        if self._form == CODES:
            has_key = may_have_key.copy()
            has_key[may_have_key] = lows[range_indexes[may_have_key]] <= lowest_keys[may_have_key]
            marks[has_key] = 1
            may_have_key &= ~has_key
        return marks, np.flatnonzero(may_have_key)

    def _search_sections(
        self, bounds: Bounds, marks: Marks, numbers: npt.NDArray[np.intp], get_section: Sections
    ) -> Marks:
        """Search the dictionaries of some files for keys within the bounds, and return the completed marks.

        Args:
            bounds: The bounds.
            marks: 1 for each file with a key within the bounds, otherwise 0. The marks of `numbers` are set here.
            numbers: The indexes of the files that the lowest and the greatest key do not decide.
            get_section: A function that returns the part of the index for one file. This part contains the dictionary
                of the file's keys.
        """
        if self._form == CODES:
            dictionaries = [get_section(number).dictionary for number in numbers.tolist()]
            marks[numbers] = _ordered.holding(cast("list[_ordered.Numbers]", dictionaries), bounds.lows, bounds.highs)
            return marks
        for number in numbers.tolist():
            marks[number] = len(bounds.find_intervals(get_section(number).dictionary).begins) > 0
        return marks

    def _read_array(self, number: int, dtype: str, count: int) -> npt.NDArray[Any]:
        """Return a piece of the postings as an array, which is cached.

        The size is checked before the piece is decompressed, because a damaged size could need any amount of memory.

        Args:
            number: The index of the piece.
            dtype: The numpy type of an item.
            count: The number of items.

        Raises:
            ValueError: The piece is damaged, or has another number of items.
        """
        array = self._arrays.get(number)
        if array is not None:
            return array
        piece = self._pieces.read(number)
        if piece.coding == Coding.ZSTD:
            size = int.from_bytes(piece.data[:_SIZE_BYTES], "little")
            if size != count * np.dtype(dtype).itemsize or size > _INFLATED_MAX:
                raise ValueError(f"a piece of {count} numbers cannot have {size:,} bytes after decompression")
            try:
                data = _ZSTD.decompress(piece.data[_SIZE_BYTES:], size, asbytes=True)
            except OSError as error:
                raise ValueError(f"a piece cannot be inflated: {error}") from None
            array = np.frombuffer(data, dtype=dtype)
        elif piece.coding == Coding.FLAT:
            array = align_bytes(piece.data).view(dtype)
        else:
            raise ValueError(f"a piece has the unknown coding {piece.coding}")
        if len(array) != count:
            raise ValueError(f"a piece has {len(array)} numbers instead of {count}")
        self._arrays[number] = array
        return array
