"""A section: the rows of a data file by value, as an ordered dictionary and the bits of each row's rank.

A row's value is stored as its rank in the file's dictionary. Slice i has bit i of all ranks, so that
ceil(log2(cardinality)) slices represent the column. A comparison is an interval of ranks, and reads each slice once. If
most rows have one value and few rows have other values, a bitmap per value is smaller and is stored instead. In all
other cases, compressed slices are equally small (measured). Null and NaN have separate bitmaps, because their rows have
the rank 0 too. The functions have no side effects.

A section is stored in the form of `pieces.py`: the numbers of rows and of distinct values, the form of the keys, the
layout SLICES or EQUALITY, the flags NULLS, NANS and CLIPPED, and the pieces. The pieces are the dictionary, the null
rows, the NaN rows, and then the slices, the lowest first, or the bitmaps by rank. Values are truncated to 1,024 bytes,
so the result for a longer bound can contain more rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from seamark.formats.index.kernels import _bitmap, _ordered
from seamark.formats.index.keys.keys import Bits, Bytes, Keys
from seamark.formats.index.keys.ranks import ROWS_MAX, Ranks, rank_keys
from seamark.formats.index.kinds import bits
from seamark.formats.index.kinds.bits import Coding
from seamark.formats.index.kinds.dictionary import (
    BYTES,
    CODES,
    Bounds,
    Intervals,
    align_bytes,
    open_dictionary,
    pack_dictionary,
)
from seamark.formats.index.kinds.pieces import Piece, Pieces, PiecesHeader, write_pieces

SLICES, EQUALITY = 0, 1
"""Layouts."""
NULLS, NANS, CLIPPED = 1, 2, 4
"""Flags."""
DICTIONARY, NULL_ROWS, NAN_ROWS, FIRST_BITMAP = 0, 1, 2, 3
"""The indexes of the pieces."""

EQUALITY_MAX = 64
"""The maximum number of distinct values of a column that can be stored as one bitmap per value."""
_CHANGE_BYTES = 2
"""The minimum number of bytes for a row whose value differs from the value before, without the headers of containers.
"""
_CONTAINER_BYTES = 14
"""The minimum number of bytes of a container's header and of its bitmap's other bytes."""
_CONTAINER_ROWS = 1 << 16
SECTION_PIECES_MAX = FIRST_BITMAP + EQUALITY_MAX
DECODED_MAX_BYTES = 256 << 20
"""The maximum size of the compressed slices of a section after decompression, in bytes.

A writer stores longer slices without compression, and they are read without copying them.
"""
COMPARED_MAX: Final = 128
"""The maximum number of bounds that are compared.

For more bounds, it is faster to assemble each row's rank and to look it up (measured).
"""


def compute_slice_count(cardinality: int) -> int:
    """Return the number of slices for `cardinality` distinct keys: one slice for each bit of a key's rank.

    Slice i is a bitmap with bit i of the rank of each row's key.
    """
    return max(cardinality - 1, 0).bit_length()


def build_section(keys: Keys) -> bytes:
    """Encode the section of a data file in a bitmap index.

    It consists of a dictionary of the distinct keys, the rows with null, the rows with NaN, and bitmaps that give the
    rank of each row's key in the dictionary. The flag CLIPPED states that the dictionary has only the first bytes of a
    long key, so a lookup of such a key may return more rows.

    Raises:
        ValueError: The file has too many rows, or its dictionary is too long.
    """
    distinct, ranks = rank_keys(keys)
    nulls = bits.make_empty_bits(keys.rows) if keys.valid is None else bits.make_full_bits(keys.rows) & ~keys.valid
    nans = bits.make_empty_bits(keys.rows) if keys.nan is None else keys.nan
    flags = (NULLS if nulls.any() else 0) | (NANS if nans.any() else 0) | (CLIPPED if distinct.clipped else 0)
    layout, encoded_pieces = _choose_layout(ranks, len(distinct), _find_present(nulls, nans, keys.rows))
    pieces = [
        Piece(Coding.FLAT, pack_dictionary(distinct).data),
        bits.encode_bits(nulls, keys.rows),
        bits.encode_bits(nans, keys.rows),
        *encoded_pieces,
    ]
    form = CODES if keys.codes is not None else BYTES
    return write_pieces(PiecesHeader(keys.rows, len(distinct), form, layout, flags), pieces)


def _find_present(nulls: Bits, nans: Bits, rows: int) -> Bits:
    """Return the rows that are neither null nor NaN."""
    return bits.make_full_bits(rows) & ~(nulls | nans)


def _choose_layout(ranks: Ranks, cardinality: int, present_rows: Bits) -> tuple[int, list[Piece]]:
    """Return the smaller layout, and its bitmaps.

    The layout SLICES has a bitmap for each bit of the ranks. The layout EQUALITY has a bitmap for each distinct key,
    which is only smaller if few rows differ from their neighbours. This is first estimated from the number of changes,
    because encoding the bitmaps takes longer. If the slices would take too much memory once decoded, they are stored
    without compression (`FLAT`).

    Args:
        ranks: The rank of each row's key.
        cardinality: The number of distinct keys.
        present_rows: The rows with a key. The other rows have the rank 0 too.
    """
    rows = len(ranks)
    words_of_slices = _bitmap.slice_ranks(ranks, compute_slice_count(cardinality))
    slices = [bits.encode_bits(words, rows) for words in words_of_slices]
    if _count_decoded_bytes([piece.coding for piece in slices], rows) > DECODED_MAX_BYTES:
        slices = [Piece(Coding.FLAT, words.view(np.uint8).data) for words in words_of_slices]
    if cardinality > EQUALITY_MAX or not slices:
        return SLICES, slices
    slices_bytes = sum(len(piece.data) for piece in slices)
    containers = cardinality * -(-rows // _CONTAINER_ROWS)
    if _CHANGE_BYTES * _bitmap.changes(ranks) + _CONTAINER_BYTES * containers >= slices_bytes:
        return SLICES, slices
    bitmaps = [bits.encode_bits(words & present_rows, rows) for words in _bitmap.split_ranks(ranks, cardinality)]
    if sum(len(piece.data) for piece in bitmaps) >= slices_bytes:
        return SLICES, slices
    return EQUALITY, bitmaps


def _count_decoded_bytes(codings: Iterable[int], rows: int) -> int:
    """Return the memory in bytes that bitmaps of these codings need in addition to the stored bytes."""
    return 8 * bits.count_words(rows) * sum(coding in (Coding.ZSTD, Coding.ROARING) for coding in codings)


class Section:
    """The section of a file, which is read without copying it.

    Raises:
        ValueError: A length or a checksum is wrong. The error is raised when the part is first read.
    """

    def __init__(self, memory: memoryview) -> None:
        self._pieces = Pieces(memory)
        head = self._pieces.head
        self.rows, self.cardinality, self.form, self.layout, self.flags = head
        is_by_value = self.layout == EQUALITY
        bitmaps = self.cardinality if is_by_value else compute_slice_count(self.cardinality)
        if (
            self.form not in (CODES, BYTES)
            or self.layout not in (SLICES, EQUALITY)
            or self.rows > ROWS_MAX
            or self.cardinality > (EQUALITY_MAX if is_by_value else self.rows)
            or self._pieces.count != FIRST_BITMAP + bitmaps
        ):
            raise ValueError(f"a section cannot have {self._pieces.count} pieces and {self.cardinality} values")
        self.bitmaps = bitmaps
        """The number of stored bitmaps: slices, or bitmaps of values."""
        self._dictionary: _ordered.Numbers | _ordered.Strings | None = None
        self.ready: tuple[_ordered.Numbers, _bitmap.Slices, Bits | None] | None = None
        """The dictionary, the slices, and the rows without a key (null or NaN).

        A caller that reads them often stores them here if they are views of the blob, which need no memory.
        """

    def verify(self) -> None:
        """Read the complete section.

        Raises:
            ValueError: Some bytes differ from the bytes that were written.
        """
        self._pieces.verify()

    @property
    def dictionary(self) -> _ordered.Numbers | _ordered.Strings:
        if self._dictionary is None:
            self._dictionary = open_dictionary(self._pieces.read(DICTIONARY).data, self.cardinality, self.form)
        return self._dictionary

    @property
    def bitmaps_bytes(self) -> int:
        """The stored size of the slices, or of the bitmaps of values."""
        return sum(self._pieces.get_length(FIRST_BITMAP + number) for number in range(self.bitmaps))

    @property
    def dictionary_range(self) -> tuple[int, int]:
        """The offset and the length of the dictionary in the section."""
        return self._pieces.locate(DICTIONARY)

    @property
    def dictionary_bytes(self) -> int:
        return self._pieces.get_length(DICTIONARY)

    def find_intervals(self, bounds: Bounds) -> Intervals:
        return bounds.find_intervals(self.dictionary)

    def find_rows_where(self, bounds: Bounds, nulls: bool, nans: bool, slices: Callable[[], _bitmap.Slices]) -> Bits:
        """Return the rows whose key is within the bounds.

        Rows with null or NaN have the rank of another key, so they are added or removed separately.

        Args:
            bounds: The bounds.
            nulls: Whether null rows are also returned.
            nans: Whether NaN rows are also returned.
            slices: A function that returns the first result of `decode_slices`, which may be cached.
        """
        rows = self._select_ranks(self.find_intervals(bounds), slices)
        null_rows = self._read_keyless_rows(NULL_ROWS, NULLS)
        nan_rows = self._read_keyless_rows(NAN_ROWS, NANS)
        for keyless_rows, is_included in ((null_rows, nulls), (nan_rows, nans)):
            if keyless_rows is not None:
                rows = rows | keyless_rows if is_included else rows & ~keyless_rows
        return rows

    def find_marked_rows(self, marks: Bytes, candidate_rows: Bits | None, slices: Callable[[], _bitmap.Slices]) -> Bits:
        """Return the rows whose key has a marked rank. Null and NaN rows have no key, and are not returned.

        Args:
            marks: 1 for each marked rank, otherwise 0, as uint8[cardinality].
            candidate_rows: The rows to search, or None for all rows.
            slices: A function that returns the decoded slices (`decode_slices`), which may be cached. Slice i is a
                bitmap with bit i of the rank of each row's key.
        """
        rows, keyless = bits.make_full_bits(self.rows) if candidate_rows is None else candidate_rows, self.keyless
        if keyless is not None:
            rows = rows & ~keyless
        marked_count = int(np.count_nonzero(marks))
        if marked_count == 0:
            return bits.make_empty_bits(self.rows)
        if marked_count == self.cardinality:
            return rows
        if self.layout == EQUALITY:
            ranks = np.flatnonzero(marks)
            return rows & self._union_bitmaps(ranks.tolist(), (ranks + 1).tolist())
        return slices().where_marked(marks, rows)

    @property
    def is_flat(self) -> bool:
        """Whether all slices, or bitmaps of values, are read without decoding or copying, and every row has a key."""
        codings = {self._pieces.get_coding(FIRST_BITMAP + number) for number in range(self.bitmaps)}
        return not self.flags & (NULLS | NANS) and codings <= {Coding.FLAT, Coding.ZEROS, Coding.ONES}

    @property
    def keyless(self) -> Bits | None:
        """The rows that are null or NaN, or None if all rows have a key."""
        nulls, nans = self._read_keyless_rows(NULL_ROWS, NULLS), self._read_keyless_rows(NAN_ROWS, NANS)
        return nulls if nans is None else nans if nulls is None else nulls | nans

    def _read_keyless_rows(self, piece: int, flag: int) -> Bits | None:
        """Return the null rows or the NaN rows, or None if there are none. `flag` states whether there are any."""
        if not self.flags & flag:
            return None
        return self._read_bits(piece)

    def _read_bits(self, piece: int) -> Bits:
        """Return a piece, which is a stored array of the section, as a set of rows."""
        rows = self._decode_piece(piece)
        if isinstance(rows, bool):
            return bits.make_full_bits(self.rows) if rows else bits.make_empty_bits(self.rows)
        return rows

    def _decode_piece(self, number: int) -> Bits | bool:
        """Return the bits of a piece, or True or False if all bits are equal."""
        piece = self._pieces.read(number)
        if piece.coding == Coding.FLAT:  # These bytes are used in place, as 64-bit numbers. Other codings are decoded.
            piece = Piece(piece.coding, align_bytes(piece.data).data)
        return bits.decode_bits(piece, self.rows)

    def decode_slices(self) -> tuple[_bitmap.Slices, int]:
        """Return the slices of the section, and the memory in bytes that they need in addition to the stored section.

        Slice i is a bitmap with bit i of the rank of each row's key. Slices that are stored without compression need no
        more memory.

        Raises:
            ValueError: The decoded slices need too much memory.
        """
        decoded_bytes = _count_decoded_bytes(
            (self._pieces.get_coding(FIRST_BITMAP + number) for number in range(self.bitmaps)), self.rows
        )
        if decoded_bytes > DECODED_MAX_BYTES:
            raise ValueError(
                f"the slices of a section take {decoded_bytes:,} bytes; the limit is {DECODED_MAX_BYTES:,} bytes"
            )
        slices = [self._decode_piece(FIRST_BITMAP + number) for number in range(self.bitmaps)]
        size_bytes = sum(
            words.nbytes
            for number, words in enumerate(slices)
            if not isinstance(words, bool) and self._pieces.get_coding(FIRST_BITMAP + number) != Coding.FLAT
        )
        return _bitmap.Slices(slices, self.rows), size_bytes

    def _select_ranks(self, intervals: Intervals, slices: Callable[[], _bitmap.Slices]) -> Bits:
        """Return the rows whose key has a rank in the intervals.

        Rows without a key (null and NaN) have the rank 0, and may be in the result. The caller removes them.
        """
        begins, ends = intervals
        if not len(begins):
            return bits.make_empty_bits(self.rows)
        if begins[0] == 0 and ends[0] == self.cardinality:
            return bits.make_full_bits(self.rows)
        if self.layout == EQUALITY:
            return self._union_bitmaps(begins.tolist(), ends.tolist())
        return find_rows(slices(), intervals, self.cardinality)

    def _union_bitmaps(self, begins: Sequence[int], ends: Sequence[int]) -> Bits:
        """Return the rows whose rank is in one of the intervals [begin, end), from a bitmap for each rank.

        If fewer ranks are outside the intervals, their bitmaps are joined instead, and the result is inverted. It can
        then also contain rows without a key.
        """
        ranks = [rank for begin, end in zip(begins, ends, strict=True) for rank in range(begin, end)]
        uses_complement = 2 * len(ranks) > self.cardinality
        rows = bits.make_empty_bits(self.rows)
        for rank in sorted(set(range(self.cardinality)) - set(ranks)) if uses_complement else ranks:
            rows |= self._read_bits(FIRST_BITMAP + rank)
        return bits.make_full_bits(self.rows) & ~rows if uses_complement else rows


def find_rows(slices: _bitmap.Slices, intervals: Intervals, cardinality: int) -> Bits:
    """Return the rows whose rank is in one of the intervals. There must be at least one interval.

    A few intervals are compared with the slices, which are bitmaps of the bits of the ranks. For many intervals, it is
    faster to compute the rank of each row and look it up. An edge at the first or after the last rank needs no
    comparison.

    Args:
        slices: The slices.
        intervals: The intervals [begin, end) of ranks.
        cardinality: The number of ranks.
    """
    begins, ends = intervals
    if len(begins) == 1:
        return _find_rows_in_interval(slices, int(begins[0]), int(ends[0]), cardinality)
    is_single = ends - begins == 1
    points, starts, stops = begins[is_single], begins[~is_single], ends[~is_single]
    if len(points) + 2 * len(starts) > COMPARED_MAX:
        return slices.where_listed(begins, ends)
    includes_last_rank = len(stops) > 0 and int(stops[-1]) == cardinality
    cuts = np.concatenate([starts[starts > 0], stops[stops < cardinality]])
    return slices.where(cuts, points, bool(includes_last_rank))


def _find_rows_in_interval(slices: _bitmap.Slices, begin: int, end: int, cardinality: int) -> Bits:
    """Return the rows whose rank is in the interval [begin, end).

    A single rank is compared for equality. Otherwise, the ranks are compared with both edges of the interval. The last
    argument of `where` states whether ranks above the last edge are included.
    """
    if end - begin == 1:
        return slices.where(_NO_RANKS, np.array([begin], dtype=np.uint64), False)
    # An edge at the end of all ranks needs no comparison.
    cuts = [edge for edge in (begin, end) if 0 < edge < cardinality]
    return slices.where(np.array(cuts, dtype=np.uint64), _NO_RANKS, end == cardinality)


_NO_RANKS = np.zeros(0, dtype=np.uint64)
