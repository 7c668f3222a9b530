"""Pieces: byte strings, each with a coding and a checksum, after a common header with a checksum.

    bytes  0–7   a number              bytes 8–15   another
    byte   16    form                  byte 17      layout
    byte   18    flags                 byte 19      zero
    bytes 20–23  number of pieces
    per piece    u32 length, u32 coding, u32 CRC-32 of its bytes
    u32          CRC-32 of all bytes before it
    zeros        up to a multiple of 8; each piece follows, and zeros up to a multiple of 8

All numbers are little-endian. The owner defines the meaning of the numbers, the form, the layout and the
codings. A piece is checked when it is first read, so that a query spends time only on the pieces that it
reads. This module is pure.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

_HEAD = struct.Struct("<QQBBBxI")
_HEADER_CHECKSUM = struct.Struct("<I")
_ENTRY_BYTES = 12
_LENGTH_MAX = (1 << 32) - 1
PIECES_MAX = 1024


class Piece(NamedTuple):
    """A part of an index section: its bytes, and a number for their coding. The user of the piece defines codings."""

    coding: int
    data: bytes | memoryview


class PiecesHeader(NamedTuple):
    """The numbers that precede the pieces of a part of an index. The writer of the part defines what they mean.

    A piece is a byte string, such as a compressed array. Two parts are stored as pieces: the section of a data file
    (its rows by value), and the postings of an index (the files of each key).

    Attributes:
        first_count: Below 2^64. For the section of a data file, its number of rows. For postings, the number of keys.
        second_count: Below 2^64. For a section, its number of distinct keys. For postings, the number of files.
        form: The form of the keys, below 256: codes (64-bit numbers) or bytes.
        layout: The layout of the pieces, below 256.
        flags: Bits, below 256.
    """

    first_count: int
    second_count: int
    form: int
    layout: int
    flags: int


def compute_head_bytes(count: int) -> int:
    """Return the size in bytes of a header of `count` pieces."""
    return _HEAD.size + _ENTRY_BYTES * count + _HEADER_CHECKSUM.size


def write_pieces(head: PiecesHeader, pieces: Sequence[Piece]) -> bytes:
    """Encode a header and pieces. The size of the result is a multiple of 8 bytes.

    Raises:
        ValueError: A piece has 4 GiB or more.
    """
    if any(len(piece.data) > _LENGTH_MAX for piece in pieces):
        raise ValueError("a part of an index has 4 GiB or more and cannot be stored; index fewer rows per file")
    table = np.array([(len(piece.data), piece.coding, isal_zlib.crc32(piece.data)) for piece in pieces], dtype="<u4")
    header = _HEAD.pack(*head, len(pieces)) + table.tobytes()
    header += _HEADER_CHECKSUM.pack(isal_zlib.crc32(header))
    parts: list[bytes | memoryview] = [header, bytes(-len(header) % 8)]
    for piece in pieces:
        parts += (piece.data, bytes(-len(piece.data) % 8))
    return b"".join(parts)


class Pieces:
    """A reader of the bytes of `write_pieces`, which does not copy them.

    Raises:
        ValueError: The header, a length or a checksum is wrong.
    """

    __slots__ = ("_checked_pieces", "_memory", "_starts", "_table", "count", "head")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        if len(memory) < _HEAD.size + _HEADER_CHECKSUM.size:
            raise ValueError(f"{len(memory)} bytes are too few for the header of the pieces")
        *numbers, count = _HEAD.unpack_from(memory)
        end = _HEAD.size + _ENTRY_BYTES * count
        if count > PIECES_MAX or end + _HEADER_CHECKSUM.size > len(memory):
            raise ValueError(f"a header cannot have {count} pieces")
        if isal_zlib.crc32(memory[:end]) != _HEADER_CHECKSUM.unpack_from(memory, end)[0]:
            raise ValueError("the header of the pieces does not match its checksum")
        self.head = PiecesHeader(*numbers)
        self.count: int = count
        self._table: npt.NDArray[np.uint32] = np.frombuffer(memory[_HEAD.size : end], dtype="<u4").reshape(-1, 3)
        lengths = self._table[:, 0].astype(np.int64)
        starts = np.cumsum(
            np.concatenate([[-(-(end + _HEADER_CHECKSUM.size) // 8) * 8], -(-lengths // 8) * 8])
        ).tolist()
        if starts[-1] != len(memory):
            raise ValueError(f"the header states {starts[-1]} bytes of pieces, but the memory has {len(memory)} bytes")
        self._starts: list[int] = starts
        self._checked_pieces = bytearray(count)

    def read(self, number: int) -> Piece:
        """Return a piece.

        Raises:
            ValueError: The checksum of the piece does not match.
        """
        length, coding, checksum = self._table[number].tolist()
        start = self._starts[number]
        data = self._memory[start : start + length]
        if not self._checked_pieces[number]:
            if isal_zlib.crc32(data) != checksum:
                raise ValueError(f"piece {number} of {self.count} does not match its checksum")
            self._checked_pieces[number] = 1
        return Piece(coding, data)

    def locate(self, number: int) -> tuple[int, int]:
        """Return the offset and the length of a piece."""
        return self._starts[number], self.get_length(number)

    def get_coding(self, number: int) -> int:
        return int(self._table[number, 1])

    def get_length(self, number: int) -> int:
        """Return the size of a piece in bytes."""
        return int(self._table[number, 0])

    def verify(self) -> None:
        """Check the checksums of all pieces, also of pieces that were checked before.

        Raises:
            ValueError: The checksum of a piece does not match.
        """
        for number in range(self.count):
            self._checked_pieces[number] = 0
            self.read(number)
