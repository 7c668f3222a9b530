"""Decode delete files from their bytes to positions of rows, or to keys of rows.

A delete file is either decoded completely or `Unreadable` with a reason. So no deleted row counts as live because a
file was too large, damaged, or of an unsupported format.

Supported are Parquet files with positions and with keys (Iceberg spec, "Position Delete Files", "Equality Delete
Files"), and deletion vectors (Puffin spec, `deletion-vector-v1`) at the positions in the manifest. Keys are stored as
hashes. This module has no side effects.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyroaring
from isal import isal_zlib

from seamark.formats.iceberg.files.budget import Budget, create_decoding_budget
from seamark.formats.iceberg.files.parquet import AmbiguousColumn, Unreadable, find_columns
from seamark.formats.iceberg.files.parquet_reading import BoundedParquet
from seamark.formats.iceberg.types.reserved import DELETED_PATH, DELETED_POSITION
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import Hashes, hash_halves
from seamark.formats.index.keys.keys import Keys, Mask
from seamark.formats.index.packing import MISSING, Longs

EQUALITY = 2

_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_POSITION_BYTES = 40
"""The memory for a deleted row while positions are sorted, in bytes."""
_VECTOR_ROW_BYTES = 24
"""The memory for a row of a deletion vector while its rows are listed, in bytes."""
_ROARING_GROWTH_MAX_FACTOR = 16
"""The maximum ratio of a roaring bitmap's memory to its size in bytes.

The ratio is high if there are many small containers, each of which is an allocation.
"""
_LENGTH, _CHECKSUM = struct.Struct(">I"), struct.Struct(">I")
_ERROR_CHARACTERS_MAX = 200
_ZERO, _NEGATIVE_ZERO = np.uint64(1 << 63), np.uint64((1 << 63) - 1)
"""The codes of 0.0 and -0.0 (`keys.py`)."""

Columns: TypeAlias = tuple[tuple[int, str], ...]
"""The id and the Iceberg type of each column of a key, in the order of the ids."""


class DeleteFile(NamedTuple):
    """The entry of a delete file in its manifest."""

    path: str
    format: str
    content: int
    size_bytes: int
    records: int
    referenced: str | None
    offset: int
    """The offset of a deletion vector in its Puffin file, or MISSING for other files."""
    length: int
    columns: tuple[int, ...]
    """The ids of the columns that equality deletes compare."""

    @property
    def is_vector(self) -> bool:
        return self.format == "puffin"

    @property
    def read_bytes(self) -> int:
        return self.length if self.is_vector else self.size_bytes


@dataclass(frozen=True)
class Positions:
    """The deleted positions of some data files.

    Attributes:
        files: The index of each data file, by path.
        starts: int64[files + 1], the index of the first position of each data file.
        positions: int64[deletes], distinct and ascending within each data file.
    """

    files: Mapping[str, int]
    starts: Longs
    positions: Longs

    def get_positions(self, path: str) -> Longs:
        """Return the deleted positions of a data file, ascending."""
        index = self.files.get(path)
        return self.positions[:0] if index is None else self.positions[self.starts[index] : self.starts[index + 1]]


class HashSet:
    """A set of 128-bit hashes: their high halves, uint64[n] in ascending order, and their low halves."""

    def __init__(self, high: Hashes, low: Hashes) -> None:
        order = np.argsort(high, kind="stable")
        self._high, self._low = high[order], low[order]

    def has(self, high: Hashes, low: Hashes) -> Mask:
        """Return whether the set contains each of some hashes, bool[n]."""
        mask = np.zeros(len(high), dtype=np.bool_)
        positions = np.searchsorted(self._high, high, side="left")
        ends = np.searchsorted(self._high, high, side="right")
        candidates = np.flatnonzero(positions < ends)
        # A second iteration occurs only if two hashes have the same high half.
        while len(candidates):
            is_equal = self._low[positions[candidates]] == low[candidates]
            mask[candidates[is_equal]] = True
            candidates = candidates[~is_equal]
            positions[candidates] += 1
            candidates = candidates[positions[candidates] < ends[candidates]]
        return mask


@dataclass(frozen=True)
class DeletedKeys:
    """The keys of an equality delete file, twice, because engines differ in whether -0.0 equals 0.0.

    Attributes:
        exact: The keys, in which -0.0 and 0.0 differ.
        with_equal_zeros: The keys with 0.0 instead of -0.0, or None if no column has floats.
    """

    exact: HashSet
    with_equal_zeros: HashSet | None

    @staticmethod
    def from_columns(columns: list[Keys]) -> DeletedKeys:
        merged_columns = merge_zeros(columns)
        return DeletedKeys(
            HashSet(*hash_halves(columns)), None if merged_columns is None else HashSet(*hash_halves(merged_columns))
        )


def merge_zeros(columns: list[Keys]) -> list[Keys] | None:
    """Return the columns with 0.0 instead of -0.0, or None if no column has floats."""
    if not any(column.kind in FLOATS for column in columns):
        return None
    return [_unify_zeros(column) if column.kind in FLOATS else column for column in columns]


def _unify_zeros(column: Keys) -> Keys:
    """Return a column of floats with 0.0 instead of -0.0."""
    assert column.codes is not None
    codes = np.where(column.codes == _NEGATIVE_ZERO, _ZERO, column.codes)
    return Keys(column.kind, column.rows, codes, None, None, column.valid, column.nan)


Content: TypeAlias = Positions | DeletedKeys


def decode_delete_content(data: bytes | memoryview, file: DeleteFile, columns: Columns, *, limit_bytes: int) -> Content:
    """Decode a delete file or a deletion vector.

    Args:
        data: The bytes of the file or of the deletion vector.
        file: The entry of the file in its manifest.
        columns: The columns of an equality delete's keys.
        limit_bytes: The maximum memory.

    Raises:
        Unreadable: The file cannot be decoded, or needs more than `limit_bytes` of memory.
    """
    if file.format not in ("parquet", "puffin"):
        raise Unreadable(file.path, f"delete files of format {file.format!r} are not supported")
    if file.is_vector:
        return _decode_vector(data, file, limit_bytes)
    budget = create_decoding_budget(limit_bytes)
    return (
        _decode_keys(data, file, columns, budget) if file.content == EQUALITY else _decode_positions(data, file, budget)
    )


def _decode_positions(data: bytes | memoryview, file: DeleteFile, budget: Budget) -> Positions:
    """Decode a position delete file, which lists paths of data files and positions of deleted rows.

    Its columns have reserved field ids. In a file without field ids, the columns are found by name.

    Raises:
        Unreadable: The file cannot be read, has a null, or needs more memory than the budget has.
    """
    try:
        parquet = BoundedParquet(pa.BufferReader(data), file.path, budget)
        budget.take(_POSITION_BYTES * max(0, parquet.rows), file.path)
        column_paths = {DELETED_PATH: ("file_path",), DELETED_POSITION: ("pos",)}
        columns = parquet.read_columns(column_paths | find_columns(parquet.schema, column_paths))
        paths, positions = columns[DELETED_PATH].combine_chunks(), columns[DELETED_POSITION].combine_chunks()
        if isinstance(paths, pa.ChunkedArray):  # The file has no rows.
            return Positions({}, np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64))
        if paths.null_count or positions.null_count:
            raise Unreadable(file.path, "a path or a position in the file is null")
        if not pa.types.is_dictionary(paths.type):
            paths = paths.dictionary_encode()
        codes = paths.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        rows = positions.cast(pa.int64()).to_numpy(zero_copy_only=False)
        distinct_paths: list[str] = paths.dictionary.cast(pa.string()).to_pylist()
    except AmbiguousColumn as error:
        raise Unreadable(file.path, str(error)) from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise Unreadable(file.path, f"the file cannot be read: {_shorten_error(error)}") from None
    order = np.lexsort((rows, codes))
    codes, rows = codes[order], rows[order]
    # Store each position once, because merged files can repeat a position.
    is_first = np.ones(len(rows), dtype=np.bool_)
    is_first[1:] = (codes[1:] != codes[:-1]) | (rows[1:] != rows[:-1])
    codes, rows = codes[is_first], rows[is_first]
    starts = np.searchsorted(codes, np.arange(len(distinct_paths) + 1))
    return Positions({path: index for index, path in enumerate(distinct_paths)}, starts, rows)


def _decode_keys(data: bytes | memoryview, file: DeleteFile, columns: Columns, budget: Budget) -> DeletedKeys:
    """Decode an equality delete file, whose rows are the keys of deleted rows.

    The columns are found only by field id, because a wrong column would delete wrong rows.

    Raises:
        Unreadable: The file cannot be read, lacks a column, or needs more memory than the budget has.
    """
    try:
        parquet = BoundedParquet(pa.BufferReader(data), file.path, budget)
        column_paths = find_columns(parquet.schema, [column_id for column_id, _ in columns])
        missing_ids = [column_id for column_id, _ in columns if column_id not in column_paths]
        if missing_ids:
            raise Unreadable(file.path, f"the file has no column with field id {missing_ids[0]}")
        arrays = parquet.read_plain_columns(column_paths)
        return DeletedKeys.from_columns([convert_to_keys(arrays[column_id], kind) for column_id, kind in columns])
    except AmbiguousColumn as error:
        raise Unreadable(file.path, str(error)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Unreadable(file.path, f"the file cannot be read: {_shorten_error(error)}") from None


def _decode_vector(data: bytes | memoryview, file: DeleteFile, limit_bytes: int) -> Positions:
    """Decode a deletion vector, which lists the deleted rows of one data file.

    It consists of the length of magic and bitmap, the magic, a 64-bit roaring bitmap, and the CRC-32 of magic and
    bitmap. The memory is estimated before the bitmap is decoded, and again before its rows are listed, because a run of
    a few bytes can contain any number of rows.

    Raises:
        Unreadable: The vector is missing, damaged or too large, or has another number of rows than its manifest states.
    """
    bytes_min = _LENGTH.size + len(_VECTOR_MAGIC) + _CHECKSUM.size
    if file.offset == MISSING or file.referenced is None or len(data) != file.length or len(data) < bytes_min:
        raise Unreadable(file.path, f"there is no deletion vector of {file.length} bytes at {file.offset}")
    magic_and_bitmap = memoryview(data)[_LENGTH.size : -_CHECKSUM.size]
    (stated_length,), (checksum,) = _LENGTH.unpack_from(data), _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if stated_length != len(magic_and_bitmap) or magic_and_bitmap[: len(_VECTOR_MAGIC)] != _VECTOR_MAGIC:
        raise Unreadable(file.path, f"the data at {file.offset} do not start with a deletion vector's magic bytes")
    if checksum != isal_zlib.crc32(magic_and_bitmap):
        raise Unreadable(file.path, f"the deletion vector at {file.offset} does not match its checksum")
    if len(magic_and_bitmap) * _ROARING_GROWTH_MAX_FACTOR > limit_bytes:
        raise Unreadable(file.path, f"the deletion vector at {file.offset} is too long: {file.length:,} bytes")
    try:
        bitmap = pyroaring.BitMap64.deserialize(bytes(magic_and_bitmap[len(_VECTOR_MAGIC) :]))
    except ValueError as error:
        raise Unreadable(file.path, f"the deletion vector at {file.offset} cannot be read: {error}") from None
    if len(bitmap) != file.records:
        raise Unreadable(
            file.path,
            f"the deletion vector at {file.offset} has {len(bitmap)} rows, but its manifest states {file.records}",
        )
    if _VECTOR_ROW_BYTES * len(bitmap) > limit_bytes:
        raise Unreadable(
            file.path, f"the deletion vector at {file.offset} has {len(bitmap):,} rows, which exceed the memory limit"
        )
    rows = np.asarray(bitmap.to_array(), dtype=np.uint64).astype(np.int64)
    return Positions({file.referenced: 0}, np.array([0, len(rows)], dtype=np.int64), rows)


def _shorten_error(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has no message.

    The text is cut after `_ERROR_CHARACTERS_MAX` characters.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:_ERROR_CHARACTERS_MAX]
