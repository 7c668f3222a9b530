"""Rows as *bits*: uint64[ceil(rows / 64)], row r in bit r % 64 of word r // 64, what is beyond the last row zero.

AND and OR of two are numpy's. What is stored is stored in the form that is smaller by a clear margin: flat words, since
nothing is faster to read; zstd of them; roaring where few rows are set, or long runs; nothing at all where all bits
are the same. Pure.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pyarrow as pa
import pyroaring

from seamark.metaserver.index.kernels import _bitmap
from seamark.metaserver.index.keys.keys import Bits, Longs
from seamark.metaserver.index.kinds.pieces import Piece

MARGIN = 0.75
"""What is not at least a quarter smaller is not worth decoding."""
_CHUNK_ROWS = 1 << 16
_CHUNK_BYTES = 16
"""At most, of a container in a roaring bitmap's header."""
_ZSTD = pa.Codec("zstd", 1)


class Coding(IntEnum):
    """How the bytes of a piece are to be read."""

    ZEROS = 0
    ONES = 1
    FLAT = 2
    ZSTD = 3
    ROARING = 4


def words_of(rows: int) -> int:
    return -(-rows // 64)


def none_of(rows: int) -> Bits:
    return np.zeros(words_of(rows), dtype=np.uint64)


def all_of(rows: int) -> Bits:
    bits = np.full(words_of(rows), 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    if rows % 64:
        bits[-1] >>= np.uint64(64 - rows % 64)
    return bits


def count(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def positions(bits: Bits) -> Longs:
    """int64[n]: the rows that are set, ascending."""
    return _bitmap.positions(bits, count(bits))


def roaring(bits: Bits) -> pyroaring.BitMap:
    """The rows that are set. Its `serialize` is the portable form; runs are made by its `run_optimize`."""
    padded = np.zeros(-(-len(bits) // 1024) * 1024, dtype=np.uint8)
    padded[: len(bits)] = np.bitwise_count(bits)
    counts = padded.reshape(-1, 1024).sum(axis=1, dtype=np.int64)
    return pyroaring.BitMap.deserialize(_bitmap.roaring_of(bits, counts))


def encode(bits: Bits, rows: int) -> Piece:
    """The bits as a piece, in whichever coding is clearly smaller."""
    there = count(bits)
    if there in (0, rows):
        return Piece(Coding.ONES if there else Coding.ZEROS, b"")
    best = Piece(Coding.FLAT, bits.view(np.uint8).data)
    packed = _ZSTD.compress(best.data, asbytes=True)
    if len(packed) < MARGIN * len(best.data):
        best = Piece(Coding.ZSTD, packed)
    runs = count(bits & ~(bits << np.uint64(1)))
    if min(2 * there, 4 * runs) + _CHUNK_BYTES * -(-rows // _CHUNK_ROWS) < MARGIN * len(best.data):
        sparse = roaring(bits)
        sparse.run_optimize()
        written = sparse.serialize()
        if len(written) < MARGIN * len(best.data):
            best = Piece(Coding.ROARING, written)
    return best


def decode(piece: Piece, rows: int) -> Bits | bool:
    """The bits, or what all of them are. Flat ones lie where they lay. ValueError where the piece is not of `rows`."""
    match piece.coding:
        case Coding.ZEROS | Coding.ONES if not len(piece.data):
            return piece.coding == Coding.ONES
        case Coding.FLAT if len(piece.data) == 8 * words_of(rows):
            return np.frombuffer(piece.data, dtype=np.uint64)
        case Coding.ZSTD:
            try:
                words = _ZSTD.decompress(piece.data, 8 * words_of(rows), asbytes=True)
            except OSError as error:
                raise ValueError(f"a bitmap does not inflate: {error}") from None
            if len(words) != 8 * words_of(rows):
                raise ValueError(f"a bitmap of {rows} rows inflates to {len(words)} bytes")
            return np.frombuffer(words, dtype=np.uint64)
        case Coding.ROARING:
            found = pyroaring.BitMap.deserialize(bytes(piece.data))
            return _bitmap.bits_at(np.asarray(found.to_array(), dtype=np.uint32), rows)
    raise ValueError(f"a bitmap of {rows} rows cannot be {len(piece.data)} bytes in coding {piece.coding}")
