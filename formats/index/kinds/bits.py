"""Sets of rows as *bits*: uint64[ceil(rows / 64)].

Row r is bit r % 64 of word r // 64. Bits after the last row are 0. numpy provides AND and OR.

A set is stored in the coding that is clearly the smallest: flat words, which are the fastest to read; words compressed
with zstd; roaring bitmaps for few rows or long runs; or no data if all bits are equal. The functions have no side
effects.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyroaring

from seamark.formats.index.kernels import _bitmap
from seamark.formats.index.keys.keys import Bits, Longs
from seamark.formats.index.kinds.pieces import Piece

COMPRESSED_MAX_FRACTION = 0.75
"""The maximum size of a compressed coding, as a fraction of the flat size."""
_CHUNK_ROWS = 1 << 16
"""The number of rows of a container of a roaring bitmap."""
_CHUNK_WORDS = _CHUNK_ROWS // 64
_CHUNK_BYTES = 16
"""The maximum size of a container's entry in the header of a roaring bitmap, in bytes."""
_LISTED_ROWS = 1 << 20
"""The number of rows of a roaring bitmap that are listed at a time. It must be a multiple of 64."""
_ZSTD = pa.Codec("zstd", 1)


class Coding(IntEnum):
    """How a set of rows is stored: as nothing if all bits are equal, flat, compressed, or as a roaring bitmap."""

    ZEROS = 0
    ONES = 1
    FLAT = 2
    ZSTD = 3
    ROARING = 4


def count_words(rows: int) -> int:
    return -(-rows // 64)


def make_empty_bits(rows: int) -> Bits:
    return np.zeros(count_words(rows), dtype=np.uint64)


def make_full_bits(rows: int) -> Bits:
    bits = np.full(count_words(rows), 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    if rows % 64:
        bits[-1] >>= np.uint64(64 - rows % 64)
    return bits


def count_set_bits(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def list_positions(bits: Bits) -> Longs:
    """Return the rows of the set, int64[n], in ascending order."""
    return _bitmap.positions(bits, count_set_bits(bits))


def to_roaring(bits: Bits) -> pyroaring.BitMap:
    """Convert the set to a roaring bitmap.

    `serialize` writes the portable format, and `run_optimize` adds run containers.
    """
    word_counts = np.zeros(-(-len(bits) // _CHUNK_WORDS) * _CHUNK_WORDS, dtype=np.uint8)
    word_counts[: len(bits)] = np.bitwise_count(bits)
    chunk_counts = word_counts.reshape(-1, _CHUNK_WORDS).sum(axis=1, dtype=np.int64)
    return pyroaring.BitMap.deserialize(_bitmap.roaring_of(bits, chunk_counts))


def encode_bits(bits: Bits, rows: int) -> Piece:
    """Encode the bits of a file's rows, in the coding that is clearly the smallest.

    A slower coding must be clearly smaller than a faster coding to be chosen. The size of a roaring bitmap is first
    estimated, because creating it takes longer.
    """
    set_rows = count_set_bits(bits)
    if set_rows in (0, rows):
        return Piece(Coding.ONES if set_rows else Coding.ZEROS, b"")
    smallest = Piece(Coding.FLAT, bits.view(np.uint8).data)
    compressed = _ZSTD.compress(smallest.data, asbytes=True)
    if len(compressed) < COMPRESSED_MAX_FRACTION * len(smallest.data):
        smallest = Piece(Coding.ZSTD, compressed)
    # A run begins at each set bit that follows a cleared bit. The estimate also counts a run at the start of each word.
    runs = count_set_bits(bits & ~(bits << np.uint64(1)))
    # A row of a roaring bitmap takes 2 bytes, and a run takes 4 bytes.
    roaring_bytes = min(2 * set_rows, 4 * runs) + _CHUNK_BYTES * -(-rows // _CHUNK_ROWS)
    if roaring_bytes < COMPRESSED_MAX_FRACTION * len(smallest.data):
        bitmap = to_roaring(bits)
        bitmap.run_optimize()
        serialized = bitmap.serialize()
        if len(serialized) < COMPRESSED_MAX_FRACTION * len(smallest.data):
            smallest = Piece(Coding.ROARING, serialized)
    return smallest


def decode_bits(piece: Piece, rows: int) -> Bits | bool:
    """Decode a piece to bits, or to True or False if all bits are equal.

    Flat bits are not copied.

    Raises:
        ValueError: The piece does not fit `rows` rows.
    """
    match piece.coding:
        case Coding.ZEROS | Coding.ONES if not len(piece.data):
            return piece.coding == Coding.ONES
        case Coding.FLAT if len(piece.data) == 8 * count_words(rows):
            return np.frombuffer(piece.data, dtype=np.uint64)
        case Coding.ZSTD:
            try:
                words = _ZSTD.decompress(piece.data, 8 * count_words(rows), asbytes=True)
            except OSError as error:
                raise ValueError(f"a bitmap cannot be inflated: {error}") from None
            if len(words) != 8 * count_words(rows):
                raise ValueError(f"a bitmap of {rows} rows inflates to {len(words)} bytes")
            return np.frombuffer(words, dtype=np.uint64)
        case Coding.ROARING:
            return _convert_bitmap(pyroaring.BitMap.deserialize(bytes(piece.data)), rows)
    raise ValueError(f"a bitmap of {rows} rows cannot have {len(piece.data)} bytes in coding {piece.coding}")


def _convert_bitmap(bitmap: pyroaring.BitMap, rows: int) -> Bits:
    """Convert a roaring bitmap to bits.

    The rows are listed in steps, because a run of a few bytes can contain any number of rows, and each listed row takes
    4 bytes.

    Raises:
        ValueError: The bitmap contains a row that the file does not have.
    """
    if len(bitmap) and bitmap.max() >= rows:
        raise ValueError(f"a bitmap contains rows beyond the {rows} rows of its file")
    if len(bitmap) <= _LISTED_ROWS:
        return _bitmap.bits_at(np.asarray(bitmap.to_array(), dtype=np.uint32), rows)
    bits = make_empty_bits(rows)
    for start in range(0, rows, _LISTED_ROWS):
        end = min(start + _LISTED_ROWS, rows)
        part = np.asarray((bitmap & pyroaring.BitMap(range(start, end))).to_array(), dtype=np.uint32)
        bits[start // 64 : count_words(end)] = _bitmap.bits_at(part - np.uint32(start), end - start)
    return bits
