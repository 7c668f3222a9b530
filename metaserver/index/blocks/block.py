"""The columnar block: the live entries of one manifest as packed columns, in one buffer.

A block contains only the data of its manifest. Inherited sequence numbers and row ids are missing, because the manifest
list defines them. So a block depends only on its manifest, and is valid for every snapshot that lists the manifest. A
bound that is unreadable, not UTF-8, or inconsistent with the other bound is omitted. A missing bound prunes nothing.

The memory is little-endian: `SMB2`, the directory's length and its CRC-32 (uint32 each), zeros up to byte 16,
the directory (MessagePack), zeros up to a multiple of 64, then the arrays. The offsets in the directory count
from the start of the arrays.

The memory may be a mapped file, whose pages take memory only after they are read. To read few pages, opening a block
verifies only the directory. The arrays of a column are verified when they are first used: each access begins with
`verify`.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.packing import (
    ALIGNMENT_BYTES,
    MISSING,
    NONE,
    Form,
    Longs,
    Packed,
    PackedColumn,
    decode_value,
)
from seamark.formats.runtime.decoding import convert_msgpack
from seamark.formats.runtime.errors import CacheDamaged, Corrupt

_charging_lock = threading.Lock()


class SizedValue(Protocol):
    """A value that a block keeps, and whose memory size is known."""

    @property
    def size_bytes(self) -> int: ...


K = TypeVar("K", bound=SizedValue)


class DerivedValues:
    """Values that are computed from a block or a view of blocks, and kept with it: at most one value of each type.

    If several threads compute a value at the same time, all of them get the value that was stored first.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[type[Any], Any] = {}

    def get(self, kind: type[K]) -> K | None:
        value: K | None = self._values.get(kind)
        return value

    def keep(self, value: K) -> K:
        """Store the value, and return it.

        If another thread has already stored a value of this type, return that value.
        """
        stored_value: K = self._values.setdefault(type(value), value)
        return stored_value

    @property
    def size_bytes(self) -> int:
        """The current memory of the values in bytes. Values may grow."""
        return sum([value.size_bytes for value in list(self._values.values())])


class BlockMemory:
    """The memory of a block and of the values derived from the block.

    This object outlives the block, so that the code that has counted the memory can subtract the same amount.
    """

    __slots__ = ("_head_bytes", "_is_mapped", "_used_bytes", "on_growth", "size_bytes", "verified")

    def __init__(self, size_bytes: int, head_bytes: int) -> None:
        """Begin to count the memory of a block.

        Args:
            size_bytes: The size of the whole block.
            head_bytes: The size of the first part of the block, which is always used.
        """
        self.size_bytes = size_bytes
        self._head_bytes = head_bytes
        self._used_bytes = 0
        self._is_mapped = False
        self.on_growth: Callable[[int], None] | None = None
        """A function that receives each change of the size in bytes, which may be negative. Any thread may call it."""
        self.verified: set[int] = set()
        """The offsets of the columns whose checksums were compared."""

    def add(self, size_bytes: int) -> None:
        """Add to the size, and report the change to `on_growth`. `size_bytes` is negative if the memory shrinks."""
        with _charging_lock:
            self.size_bytes += size_bytes
        if self.on_growth is not None:
            self.on_growth(size_bytes)

    def use(self, start: int, size_bytes: int) -> None:
        """Record that the column at offset `start` is verified and used.

        The system loads only the used columns of a mapped file into memory, so their size is added at the first use.
        """
        with _charging_lock:
            if start in self.verified:
                return
            self.verified.add(start)
            self._used_bytes += size_bytes
            is_mapped = self._is_mapped
        if is_mapped:
            self.add(size_bytes)

    def mark_as_mapped(self, whole_bytes: int) -> None:
        """From now on, count only the used memory, because the block is a mapped file of `whole_bytes`.

        Further calls do nothing.
        """
        with _charging_lock:
            if self._is_mapped:
                return
            self._is_mapped = True
            unused_bytes = whole_bytes - self._head_bytes - self._used_bytes
        self.add(-unused_bytes)


MAGIC = b"SMB2"
HEAD = struct.Struct("<4sII4x")
_DIRECTORY_FACTOR, _BLOCK_BYTES = 8, 600
"""The measured memory of a decoded directory for each byte of the directory, and of the other objects of a block."""
VERSION = 4
"""The version of the layout and the content of blocks.

It is part of every cache key, so that blocks of different versions are never read.
"""

COUNTS = ("value_counts", "null_value_counts", "nan_value_counts", "column_sizes")


class ColumnEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The statistics of one column. Each row of a block describes a file of the manifest.

    The last four fields say for how many rows a property is true: 0 for no row, 1 for all rows, 2 for some rows.
    """

    column_id: int
    kind: str
    lower: Packed | None
    upper: Packed | None
    counts: tuple[Packed | None, Packed | None, Packed | None, Packed | None]
    nulls_only: int
    """Whether all values of the file in a row are null. The next three fields are similar."""
    nans_only: int
    no_nulls: int
    no_nans: int


class _PartitionEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition field in the directory of a block."""

    field_id: int
    kind: str
    values: Packed | None
    """The values of the partition field, or None if the value of every row is null."""


class _ListEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A field of lists in the directory of a block, such as `split_offsets`.

    Attributes:
        counts: The length of each row's list.
        values: The values of all lists, one list after the other.
        total: The number of all values.
    """

    counts: Packed | None
    values: Packed | None
    total: int


class _Directory(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The directory of a block. It describes the arrays that follow it.

    Attributes:
        content: 1 if the manifest lists delete files, 0 if it lists data files or does not state its content.
        may_have_dots: Whether a file path may contain two consecutive dots, as in the segment `..`.
        has_unusable_bounds: Whether the block omits bounds of the manifest, because they are invalid.
    """

    location: str
    rows: int
    content: int
    spec_id: int
    longs: dict[str, Packed]
    texts: dict[str, Packed]
    lists: dict[str, _ListEntry]
    partition: tuple[_PartitionEntry, ...]
    columns: tuple[ColumnEntry, ...]
    may_have_dots: bool
    has_unusable_bounds: bool


class Block:
    """The block of a manifest.

    The block is immutable except for `derived`. This contains values that other modules compute from the block, and
    that `keep` stores.
    """

    __slots__ = (
        "__weakref__",
        "_arrays",
        "_columns",
        "_directory",
        "_size_bytes",
        "address",
        "derived",
        "memory",
        "on_damage",
        "partition_fields",
    )

    def __init__(self, memory: memoryview | bytes) -> None:
        """Read the output of `encode_block`.

        Raises:
            Corrupt: The bytes are not a block.
        """
        data = np.frombuffer(memory, dtype=np.uint8)
        if len(data) < HEAD.size or data[: len(MAGIC)].tobytes() != MAGIC:
            raise Corrupt("A cached block does not start with its magic bytes")
        _, directory_bytes, checksum = HEAD.unpack(data[: HEAD.size].tobytes())
        directory = data[HEAD.size : HEAD.size + directory_bytes].tobytes()
        if isal_zlib.crc32(directory) != checksum:
            raise Corrupt("The checksum of a cached block's directory does not match")
        try:
            self._directory = convert_msgpack(directory, _Directory)
        except msgspec.DecodeError as error:
            raise Corrupt(f"The directory of a cached block cannot be read: {error}") from None
        self._arrays = data[align_size(HEAD.size + directory_bytes) :]
        self._size_bytes = len(data) + _DIRECTORY_FACTOR * directory_bytes + _BLOCK_BYTES
        self.memory = BlockMemory(self._size_bytes, self._size_bytes - len(self._arrays))
        self.derived = DerivedValues()
        self.on_damage: Callable[[], None] | None = None
        """A function that is called if a checksum does not match. Any thread may call it."""
        address, _ = self._arrays.__array_interface__["data"]
        self.address = int(address)
        """The address of the arrays, for kernels."""
        self._columns = {entry.column_id: entry for entry in self._directory.columns}
        self.partition_fields = tuple([(entry.field_id, entry.kind) for entry in self._directory.partition])
        """The id and the type of each partition field, in the order of the partition tuple."""

    def __repr__(self) -> str:
        return f"<Block {self.location}: {self.rows} rows, {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """The memory of the block in bytes, including derived values. Of a mapped file, only the used part counts."""
        return self.memory.size_bytes

    def keep(self, value: K) -> K:
        """Store a derived value of constant size as long as the block exists.

        If a value of the same type is already stored, the method returns the stored value.
        """
        stored_value = self.derived.keep(value)
        if stored_value is value:
            self.memory.add(value.size_bytes)
        return stored_value

    @property
    def location(self) -> str:
        return self._directory.location

    @property
    def rows(self) -> int:
        return self._directory.rows

    @property
    def content(self) -> int:
        """The content of the files that the manifest lists: 0 for data files, 1 for delete files."""
        return self._directory.content

    @property
    def spec_id(self) -> int:
        return self._directory.spec_id

    @property
    def columns(self) -> tuple[int, ...]:
        """The ids of the columns with statistics."""
        return tuple(self._columns)

    @property
    def may_have_dots(self) -> bool:
        """Whether a file path may contain two consecutive dots. If it is False, no path contains them."""
        return self._directory.may_have_dots

    @property
    def has_unusable_bounds(self) -> bool:
        """Whether the manifest has bounds that the block omits, and with which other readers may fail."""
        return self._directory.has_unusable_bounds

    @property
    def partition_columns(self) -> tuple[PackedColumn | None, ...]:
        """The partition values of each field, in the order of the partition tuple. None if all values are null."""
        return tuple([self._open_column(entry.values) for entry in self._directory.partition])

    def verify(self, packed_column: Packed) -> None:
        """Compare a column's arrays with their checksum, unless this was done before.

        This method must be called before each read.

        Raises:
            CacheDamaged: A mapped file is damaged. The file is not used again.
        """
        if packed_column.start in self.memory.verified or not packed_column.size:
            return
        if (
            isal_zlib.crc32(self._arrays[packed_column.start : packed_column.start + packed_column.size])
            != packed_column.crc
        ):
            if self.on_damage is not None:
                self.on_damage()
            raise CacheDamaged(
                f"The local copy of manifest {self.location} is damaged. The manifest is read again; repeat the request"
            )
        self.memory.use(packed_column.start, packed_column.size)

    def is_valid(self) -> bool:
        """Verify all columns, and return whether all checksums match."""
        try:
            for packed_column in self._iterate_packed_columns():
                self.verify(packed_column)
        except CacheDamaged:
            return False
        return True

    def _iterate_packed_columns(self) -> Iterator[Packed]:
        """Return an iterator over all packed columns."""
        directory = self._directory
        packed_columns: list[Packed | None] = [*directory.longs.values(), *directory.texts.values()]
        for entry in directory.lists.values():
            packed_columns += entry.counts, entry.values
        packed_columns += [entry.values for entry in directory.partition]
        for column in directory.columns:
            packed_columns += column.lower, column.upper, *column.counts
        return (packed_column for packed_column in packed_columns if packed_column is not None)

    def mark_as_mapped(self) -> None:
        """From now on, count only the used memory of the block, because the block is a mapped file."""
        self.memory.mark_as_mapped(self._size_bytes)

    def _open_column(self, packed_column: Packed | None, rows: int | None = None) -> PackedColumn | None:
        if packed_column is None:
            return None
        self.verify(packed_column)
        return PackedColumn(self._arrays, packed_column, self.rows if rows is None else rows)

    def get_packed_longs(self, name: str) -> Packed | None:
        """Return where the block stores an integer field, or None if no row has a value. No values are verified."""
        return self._directory.longs.get(name)

    def get_packed_texts(self, name: str) -> Packed | None:
        return self._directory.texts.get(name)

    def find_long_column(self, name: str) -> PackedColumn | None:
        """Return the column of an integer field such as `sequence_number`, or None if no row has a value."""
        return self._open_column(self._directory.longs.get(name))

    def read_longs(self, name: str) -> Longs:
        """Return the values of an integer field such as `sequence_number`, int64[rows]. A null is `MISSING`."""
        column = self.find_long_column(name)
        return np.full(self.rows, MISSING, dtype=np.int64) if column is None else column.read_longs()

    def read_long(self, name: str, row: int) -> int | None:
        column = self.find_long_column(name)
        key = None if column is None else column.read_key(row)
        assert key is None or isinstance(key, int)
        return key

    def find_text_column(self, name: str) -> PackedColumn | None:
        return self._open_column(self._directory.texts.get(name))

    def get_raw(self, name: str, row: int) -> bytes | None:
        """Return a text field of a row as bytes, or None if the row has no value.

        `name` is `file_path`, `file_format`, `key_metadata` or `referenced_data_file`.
        """
        column = self.find_text_column(name)
        key = None if column is None else column.read_key(row)
        assert key is None or isinstance(key, bytes)
        return key

    def read_text(self, name: str, row: int) -> str | None:
        raw = self.get_raw(name, row)
        return None if raw is None else raw.decode("utf-8", "replace")

    def read_lists(self, name: str) -> list[list[int] | None]:
        """Return `split_offsets` or `equality_ids` of every row, with None for a row without a list."""
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None:
            return [None] * self.rows
        # A row without a list has the count MISSING, which is negative.
        counts = self.read_column(entry.counts).read_longs()
        column = self._open_column(entry.values, entry.total)
        values = [] if column is None else column.read_longs().tolist()
        ends = np.cumsum(np.maximum(counts, 0)).tolist()
        sizes = counts.tolist()
        return [None if size == MISSING else values[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def list_columns(self, name: str) -> tuple[PackedColumn, PackedColumn] | None:
        """Return `split_offsets` or `equality_ids` as packed columns: the length of each row's list, and all values.

        Returns:
            None if no row has a value.
        """
        entry = self._directory.lists.get(name)
        if entry is None or entry.counts is None:
            return None
        values = self._open_column(entry.values, entry.total)
        return None if values is None else (self.read_column(entry.counts), values)

    def partition(self, row: int) -> tuple[Value | None, ...]:
        """Return the values of a row's partition tuple."""
        return tuple(
            [_decode_value(self._open_column(entry.values), entry.kind, row) for entry in self._directory.partition]
        )

    def find_partition_column(self, field_id: int) -> tuple[str, Packed | None] | None:
        """Return the type and the packed values of a partition field, or None if the block's spec lacks the field.

        The second item is None if all values are null.
        """
        for entry in self._directory.partition:
            if entry.field_id == field_id:
                return entry.kind, entry.values
        return None

    def find_entry(self, column_id: int) -> ColumnEntry | None:
        return self._columns.get(column_id)

    def find_kind(self, column_id: int) -> str | None:
        """Return the column's type in the manifest's schema, or None if the block has no statistics of the column."""
        entry = self._columns.get(column_id)
        return None if entry is None else entry.kind

    def count(self, name: str, column_id: int) -> Longs:
        """Return one kind of counts of a column, int64[rows]. A row without a count has `MISSING`.

        The names of the kinds are `value_counts`, `null_value_counts`, `nan_value_counts` and `column_sizes`.
        """
        column = self.find_count_column(name, column_id)
        return np.full(self.rows, MISSING, dtype=np.int64) if column is None else column.read_longs()

    def find_count_column(self, name: str, column_id: int) -> PackedColumn | None:
        """Return the packed counts of a column with this name, or None if no row has such a count."""
        entry = self._columns.get(column_id)
        return None if entry is None else self._open_column(entry.counts[COUNTS.index(name)])

    def get_bound_column(self, side: str, column_id: int) -> PackedColumn | None:
        """Return the lower or upper bounds of a column, or None if no row has such a bound.

        Args:
            side: "lower" or "upper".
            column_id: The field id of the column.
        """
        entry = self._columns.get(column_id)
        return None if entry is None else self._open_column(entry.lower if side == "lower" else entry.upper)

    def get_bound(self, side: str, column_id: int, row: int) -> Value | None:
        column = self.get_bound_column(side, column_id)
        return None if column is None else _decode_value(column, self._columns[column_id].kind, row)

    def read_column(self, packed_column: Packed) -> PackedColumn:
        """Verify a packed column of this block, and return an object that reads it."""
        self.verify(packed_column)
        return PackedColumn(self._arrays, packed_column, self.rows)


def read_longs_at(column: PackedColumn, rows: Longs) -> Longs:
    """Return the integers of some rows of a column, int64[n]. A row without a value has `MISSING`.

    The column stores each value as an unsigned code, its difference to the smallest value `base`.
    """
    packed_values = column.packed
    if packed_values.width == 0:  # All values are equal, so no codes are stored.
        values = np.full(len(rows), packed_values.base, dtype=np.int64)
    else:
        codes = column.read_array(packed_values.codes, f"<u{packed_values.width}", column.rows)[rows].astype(np.uint64)
        # Unsigned numbers wrap around, so a negative base is added as its two's complement.
        values = (codes + np.uint64(packed_values.base & 0xFFFFFFFFFFFFFFFF)).view(np.int64)
    if packed_values.presence != NONE:
        values[~read_present_at(column, rows)] = MISSING
    return values


def read_doubles_at(column: PackedColumn, rows: Longs) -> npt.NDArray[np.float64]:
    """Return the floating-point numbers of some rows of a column, float64[n]."""
    packed_values = column.packed
    return column.read_array(packed_values.codes, f"<f{packed_values.width}", column.rows)[rows].astype(np.float64)


def read_present_at(column: PackedColumn, rows: Longs) -> npt.NDArray[np.bool_]:
    """Return whether each of some rows has a value in the column, bool[n]."""
    if column.packed.presence == NONE:  # No bits are stored if every row has a value.
        return np.ones(len(rows), dtype=np.bool_)
    bits = column.read_array(column.packed.presence, "<u1", (column.rows + 7) // 8)
    # Row r is bit r % 8 of byte r // 8.
    return np.asarray(bits[rows >> 3] >> (rows & 7).astype(np.uint8) & 1).view(np.bool_)


def _decode_value(column: PackedColumn | None, kind: str, row: int) -> Value | None:
    """Return the value of a row in a column of the type `kind`, or None if the row has no value.

    `column` is None if no row has a value.
    """
    key = None if column is None else column.read_key(row)
    if column is None or key is None:
        return None
    return decode_value(Form(column.packed.form), kind, key)


def align_size(size: int) -> int:
    """Return the smallest multiple of `ALIGNMENT_BYTES` that is at least `size`."""
    return size + (-size % ALIGNMENT_BYTES)
