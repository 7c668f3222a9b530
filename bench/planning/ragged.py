"""Avro records for many rows at once: each field is a matrix of bytes with a mask, and one `compress` joins the fields.

A writer that goes row by row makes about 10,000 manifest entries per second in Python; this writer encodes a whole
column at a time. Source of the encodings: the Avro specification, "Binary Encoding" (zigzag varints, length-prefixed
bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Cells:
    """One byte string for each row.

    Attributes:
        matrix: uint8[rows, width], the bytes.
        used_mask: bool[rows, width], True for the bytes that belong to the value; None means all.
    """

    matrix: Bytes
    used_mask: Mask | None = None

    def mask(self) -> Mask:
        return np.ones(self.matrix.shape, np.bool_) if self.used_mask is None else self.used_mask

    def list_lengths(self) -> Ints:
        rows, width = self.matrix.shape
        return np.full(rows, width, np.int64) if self.used_mask is None else self.used_mask.sum(axis=1, dtype=np.int64)


def join_cells(*parts: Cells) -> Cells:
    """Return the concatenation of the parts in each row."""
    matrix = np.hstack([part.matrix for part in parts])
    if all(part.used_mask is None for part in parts):
        return Cells(matrix)
    return Cells(matrix, np.hstack([part.mask() for part in parts]))


def fill_cells(value: bytes, rows: int) -> Cells:
    """Return `value` in each of `rows` rows."""
    return Cells(np.broadcast_to(np.frombuffer(value, np.uint8), (rows, len(value))))


def filter_cells(part: Cells, presence: Mask) -> Cells:
    """Return `part` in the rows where `presence` (bool[rows]) is true, and empty cells elsewhere."""
    return Cells(part.matrix, part.mask() & presence[:, None])


def encode_little_endian(values: NDArray[np.generic]) -> Cells:
    """Encode numbers of any fixed width as their little-endian bytes."""
    ordered = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return Cells(ordered.view(np.uint8).reshape(len(values), -1))


def encode_varints(values: Ints) -> Cells:
    """Encode Avro's int and long: zigzag, then seven bits per byte, the lowest first."""
    zigzag = ((values << 1) ^ (values >> 63)).astype(np.uint64)
    width = max(1, -(-int(zigzag.max(initial=0)).bit_length() // 7))
    shifted_values = zigzag[:, None] >> (np.uint64(7) * np.arange(width, dtype=np.uint64))
    has_carry = np.zeros(shifted_values.shape, np.bool_)
    has_carry[:, :-1] = shifted_values[:, 1:] > 0
    matrix = (shifted_values & np.uint64(0x7F)).astype(np.uint8) | has_carry.astype(np.uint8) * np.uint8(0x80)
    mask = shifted_values > 0
    mask[:, 0] = True
    return Cells(matrix, mask)


def encode_varint(value: int) -> bytes:
    """Encode one number as a varint."""
    cells = encode_varints(np.array([value], np.int64))
    return cells.matrix[cells.mask()].tobytes()


def encode_unscaled_decimal(values: Ints) -> Cells:
    """Encode Iceberg's decimal bounds: two's complement, big-endian, in the fewest bytes (spec, appendix D)."""
    matrix: Bytes = np.ascontiguousarray(values, ">i8").view(np.uint8).reshape(len(values), 8)
    magnitude = np.where(values < 0, ~values, values)
    mask = np.ones(matrix.shape, np.bool_)
    for dropped_bytes in range(7):  # The byte is redundant if the bytes after it hold the value and the sign.
        mask[:, dropped_bytes] = magnitude >= 1 << (8 * (7 - dropped_bytes) - 1)
    return Cells(matrix, mask)


def format_digits(values: Ints, width: int) -> Cells:
    """Return decimal digits, padded with zeros to `width`.

    Raises:
        ValueError: A number is negative, or has more digits, which would be lost.
    """
    if values.min(initial=0) < 0:
        raise ValueError(f"{int(values.min())} is negative; only numbers without a sign can be padded with zeros")
    if values.max(initial=0) >= 10**width:
        raise ValueError(f"{int(values.max())} has more than {width} digits")
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    return Cells((values[:, None] // powers % 10 + ord("0")).astype(np.uint8))


def format_decimal(values: Ints) -> Cells:
    """Return non-negative numbers as text, without leading zeros."""
    width = len(str(int(values.max(initial=0))))
    mask = values[:, None] >= 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    mask[:, -1] = True
    return Cells(format_digits(values, width).matrix, mask)


def choose_words(words: list[bytes], index: Ints) -> Cells:
    """Return `words[index]` for each row. `index` is int64[rows]."""
    width = max(map(len, words))
    table = np.frombuffer(b"".join(word.ljust(width, b"\0") for word in words), np.uint8).reshape(-1, width)
    mask = np.arange(width) < np.array([len(word) for word in words])[:, None]
    return Cells(table[index], mask[index])


def encode_with_lengths(values: Cells) -> Cells:
    """Encode values of Avro's types bytes and string: the length of each value as a varint, then its bytes."""
    if values.used_mask is None:
        rows, width = values.matrix.shape
        return join_cells(fill_cells(encode_varint(width), rows), values)
    return join_cells(encode_varints(values.list_lengths()), values)


def encode_records(fields: list[Cells]) -> tuple[Bytes, Ints]:
    """Join the encoded fields of all records.

    Returns:
        The bytes of all records, one after another, and the length of each record.
    """
    record_cells = join_cells(*fields)
    mask = record_cells.mask()
    return record_cells.matrix[mask], mask.sum(axis=1, dtype=np.int64)
