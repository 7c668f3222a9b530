"""The bitmap index: for each key, the data files and the rows that contain it.

A blob has a section for each data file (`slices.py`) and postings, which map each key to its files
(`postings.py`). A section does not depend on the other sections, so merging copies sections unchanged.

    bytes  0–7   magic                       bytes  8–11  version of this layout
    byte   12    form of the keys            bytes 13–15  zero
    bytes 16–23  files                       bytes 24–31  bytes of the postings
    bytes 32–39  bytes of the blob           bytes 40–43  CRC-32 of the directory
    bytes 44–59  zero                        bytes 60–63  CRC-32 of bytes 0–59
    directory    u64[files] bytes of each section, u64[files] rows, u64[files] distinct keys, u8[files]
    flags, zeros up
                 to a multiple of 8
    postings, then the sections in the order of the files

All numbers are little-endian, and the size of each part is a multiple of 8 bytes, so that arrays are read
in place. Answers are exact, except for predicates with a bound of more than 1 KiB (`exact`), whose
answers may contain more rows. If a part is damaged, ValueError is raised when the part is first read.
`docs/reference/index-format.md` specifies every byte. This module is pure.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from seamark.cache.memory import MemoryCache
from seamark.formats.iceberg.expressions.expression import Bound
from seamark.formats.index.kernels import _bitmap, _ordered, _rows
from seamark.formats.index.keys.hashing import hash_keys
from seamark.formats.index.keys.key_set import KeySet, WantedKeys, Words
from seamark.formats.index.keys.keys import Bits, Key, KeyRange, KeyRanges, Keys, has_codes, unpack_bits
from seamark.formats.index.kinds.bits import list_positions
from seamark.formats.index.kinds.dictionary import BYTES, CODES, Bounds, read_distinct
from seamark.formats.index.kinds.kind import BlobReader, IndexKind, Mask
from seamark.formats.index.kinds.pieces import compute_head_bytes
from seamark.formats.index.kinds.postings import PIECES_MAX, Marks, Postings, build_postings
from seamark.formats.index.kinds.queries import Flags
from seamark.formats.index.kinds.slices import (
    CLIPPED,
    EQUALITY,
    NANS,
    NULLS,
    SECTION_PIECES_MAX,
    Section,
    build_section,
)
from seamark.formats.index.kinds.sparse import Range, SparseMemory

VERSION = 1
DECODED_BYTES = 32 << 20
"""The maximum memory of decompressed slices per opened blob."""
REMOTE_VALUES_MAX = 1000
"""The maximum number of values of a predicate on a remote index."""
FILLED_MAX_BYTES = 32 << 20
"""The maximum number of bytes of a remote index that are fetched and kept."""
_MAGIC = b"SMKBMP\r\n"
_HEAD = struct.Struct("<8sIB3xQQQI16x")
_HEAD_CHECKSUM = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _HEAD_CHECKSUM.size
_ENTRY_BYTES = 25
"""The size of a file's entry in the directory: three numbers of 8 bytes, and a byte of flags."""
_NUMBERS_BYTES = 24
"""The size of the numbers of a file's entry."""
_FILE_MEMORY_BYTES = 64
"""The memory of a file of a remote index."""
_SECTION_HEAD_BYTES = compute_head_bytes(SECTION_PIECES_MAX)


@dataclass(frozen=True, slots=True)
class FileBitmap:
    """The part of a bitmap index for one data file, called its section: its keys, and the rows that have them.

    A process that builds it can pickle it for another process.
    """

    section: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.section)


def build_bitmap(keys: Keys) -> FileBitmap:
    """Build the bitmap of a term's keys in a data file.

    Raises:
        ValueError: The file has too many rows for a bitmap index.
    """
    return FileBitmap(build_section(keys))


def encode_bitmaps(entries: Sequence[FileBitmap]) -> list[bytes | memoryview]:
    """Encode the blob of a bitmap index from the sections of its data files, in order.

    Raises:
        ValueError: Keys are codes in one file and bytes in another.
    """
    return _assemble_blob([memoryview(entry.section) for entry in entries])


def merge_bitmaps(parts: Iterable[tuple[Bitmap, npt.NDArray[np.bool_]]]) -> list[bytes | memoryview]:
    """Merge the sections of some files of several blobs into one blob.

    Its bytes equal those of a blob that is built from these files.

    Args:
        parts: The opened blobs, each with the files to keep as bool[files].

    Raises:
        ValueError: A section that is kept is damaged.
    """
    sections = []
    for bitmap, keep in parts:
        if len(keep) != bitmap.files:
            raise ValueError(
                f"the mask of the files to keep has {len(keep)} items, but the index has {bitmap.files} files"
            )
        for file in np.flatnonzero(keep).tolist():
            start, length = bitmap.find_section_range(file)
            bitmap.open_section(file).verify()
            sections.append(bitmap.memory[start : start + length])
    return _assemble_blob(sections)


def _assemble_blob(sections: Sequence[memoryview]) -> list[bytes | memoryview]:
    """Encode a blob from the encoded sections of its files.

    The blob begins with a head of fixed size: the version, the form of the keys, sizes and checksums. A directory with
    the sizes of the sections follows, then the postings, which list the files of each key, and the sections.

    Raises:
        ValueError: The sections have keys of different forms.
    """
    open_sections = [Section(section) for section in sections]
    forms = {section.form for section in open_sections}
    if len(forms) > 1:
        raise ValueError("an index cannot have keys of 8 bytes for some files and longer keys for others")
    form = forms.pop() if forms else CODES
    lengths = [len(section) for section in sections]
    columns = [lengths, [section.rows for section in open_sections], [section.cardinality for section in open_sections]]
    directory = np.array(columns, dtype="<u8").tobytes() + bytes(section.flags for section in open_sections)
    directory += bytes(-len(directory) % 8)  # Fill the last word, so that the next part is aligned.
    postings = build_postings(open_sections, form, sum(lengths))
    total_bytes = _HEAD_BYTES + len(directory) + len(postings) + sum(lengths)
    checksum = isal_zlib.crc32(directory)
    head = _HEAD.pack(_MAGIC, VERSION, form, len(sections), len(postings), total_bytes, checksum)
    return [head + _HEAD_CHECKSUM.pack(isal_zlib.crc32(head)), directory, postings, *sections]


def _read_head(memory: memoryview | bytes) -> tuple[int, int, int, int, int]:
    """Return the form of the keys, the number of files, the sizes of postings and blob, and the checksum of the
    directory.

    Raises:
        ValueError: The first bytes are damaged, or are those of an unknown version.
    """
    if len(memory) < _HEAD_BYTES:
        raise ValueError(f"a bitmap index cannot have only {len(memory)} bytes")
    if isal_zlib.crc32(memory[: _HEAD.size]) != _HEAD_CHECKSUM.unpack_from(memory, _HEAD.size)[0]:
        raise ValueError("the head of a bitmap index does not match its checksum")
    magic, version, form, files, postings, total, checksum = _HEAD.unpack_from(memory)
    if magic != _MAGIC or version != VERSION or form not in (CODES, BYTES):
        raise ValueError(f"a bitmap index of version {version} and form {form} cannot be read")
    return form, files, postings, total, checksum


def _compute_directory_end(files: int) -> int:
    """Return the position after the directory, which is a multiple of 8."""
    return _HEAD_BYTES + -(-_ENTRY_BYTES * files // 8) * 8


def read_header_size(start: memoryview | bytes) -> int:
    """Return the number of bytes at the start of a blob that `Bitmap` reads when it opens the blob.

    They include the directory of the files, and the header of the postings, which list the files of each key.

    Args:
        start: At least the first 64 bytes of the blob.

    Raises:
        ValueError: The first 64 bytes are damaged.
    """
    _, files, postings, *_ = _read_head(start)
    return _compute_directory_end(files) + min(postings, compute_head_bytes(PIECES_MAX))


class Bitmap:
    """An opened blob. Several threads can use it.

    A file is identified by its index in the blob.

    Raises:
        ValueError: The blob is damaged. The constructor and all methods can raise this error.
    """

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._form, self.files, postings, total, checksum = _read_head(memory)
        end = _compute_directory_end(self.files)
        if total != len(memory) or end + postings > total:
            raise ValueError(f"a bitmap index has {len(memory)} bytes instead of {total}")
        if isal_zlib.crc32(memory[_HEAD_BYTES:end]) != checksum:
            raise ValueError("the directory of a bitmap index does not match its checksum")
        flags_offset = _HEAD_BYTES + _NUMBERS_BYTES * self.files
        table = np.frombuffer(memory[_HEAD_BYTES:flags_offset], dtype="<u8").reshape(3, -1)
        self._flags = np.frombuffer(memory[flags_offset : flags_offset + self.files], dtype=np.uint8)
        section_bytes, self._rows, self._cardinalities = table
        self._starts: list[int] = np.cumsum(np.concatenate([[end + postings], section_bytes.astype(np.int64)])).tolist()
        if self._starts[-1] != total:
            raise ValueError(
                f"the sections of a bitmap index end at byte {self._starts[-1]}, but the index has {total} bytes"
            )
        self._has_keys = self._cardinalities > 0
        self._postings = Postings(memory[end : end + postings], self._form, self.files, int(self._cardinalities.sum()))
        self._postings_start = end
        self._sections: dict[int, Section] = {}
        self._decoded_slices: MemoryCache[int, _bitmap.Slices] = MemoryCache(DECODED_BYTES, "bitmaps")
        self._lock = threading.Lock()
        self._last_bounds: tuple[KeyRanges, Bounds] | None = None

    def find_section_range(self, file: int) -> tuple[int, int]:
        """Return the offset and the length of a file's section in the blob.

        Raises:
            IndexError: The blob has no file with this index.
        """
        start, end = self._starts[file], self._starts[file + 1]
        return start, end - start

    def open_section(self, file: int) -> Section:
        """Open the part of the blob for one file, which stays open for later calls.

        Raises:
            ValueError: The section differs from its description in the directory.
        """
        section = self._sections.get(file)
        if section is None:
            start, length = self.find_section_range(file)
            section = Section(self.memory[start : start + length])
            expected = (self._form, int(self._rows[file]), int(self._cardinalities[file]), int(self._flags[file]))
            if (section.form, section.rows, section.cardinality, section.flags) != expected:
                raise ValueError(f"section {file} of a bitmap index belongs to another file")
            self._sections[file] = section
        return section

    def is_exact_for(self, ranges: KeyRanges) -> bool:
        """Return whether answers to the predicate are exact. If not, they may contain more rows.

        An answer is inexact only if a bound has more than 1 KiB and the index has values of this length.
        """
        return self._read_bounds(ranges).exact or not (self._flags & CLIPPED).any()

    def mark_files(self, ranges: KeyRanges) -> Marks:
        """Return 1 for each file with a row in the ranges, otherwise 0, as uint8[files].

        A row that is null or NaN counts if the ranges include null or NaN.
        """
        marks = self._postings.mark_files(self._read_bounds(ranges), self._has_keys, self.open_section)
        flags = (NULLS if ranges.nulls else 0) | (NANS if ranges.nans else 0)
        if flags:
            marks |= (self._flags & flags) != 0
        return marks

    def mark_files_with_keys(self, keys: KeySet) -> Marks:
        """Return 1 for each file with a row that has one of the keys, otherwise 0, as uint8[files].

        For keys of bytes, other files may also be marked.
        """
        self._check_form(keys)
        return self._postings.mark_files_with_keys(keys, self._has_keys, self.open_section)

    def has_only(self, keys: WantedKeys) -> bool:
        """Return whether all rows of all files certainly have one of the keys. Null and NaN are no keys."""
        self._check_form(keys)
        return not (self._flags & (NULLS | NANS)).any() and self._postings.has_only(keys)

    def find_rows_with_keys(self, file: int, keys: WantedKeys, candidate_rows: Bits | None = None) -> Bits:
        """Return the rows of a file that have one of the keys.

        For keys of bytes, which are compared by their hashes, other rows may also be returned.

        Args:
            file: The index of the file.
            keys: The keys.
            candidate_rows: The rows to search, or None for all rows of the file.

        Raises:
            ValueError: The keys have another form than those of the index, or the section is damaged.
        """
        self._check_form(keys)
        section = self.open_section(file)
        marks = keys.mark_keys(read_distinct(section.dictionary))
        return section.find_marked_rows(marks, candidate_rows, partial(self._read_slices, file))

    def find_column(self, file: int, table: tuple[Words | None, int, int]) -> _rows.Column | None:
        """Return the input of `_rows.any_row`, compiled code that searches rows with one of several keys.

        That code supports only keys that are codes (64-bit numbers), and rows whose keys are stored as slices. Slice i
        is a bitmap with bit i of the rank of each row's key. For other files, the result is None. If the slices need no
        decoding, the section keeps the input for later calls.

        Args:
            file: The index of the file.
            table: The searched codes as a table of bits (see `KeySet.bit_table`).
        """
        section = self._sections.get(file) or self.open_section(file)
        column = section.ready
        if column is None:
            dictionary = section.dictionary
            if section.layout == EQUALITY or not isinstance(dictionary, _ordered.Numbers):
                return None
            column = dictionary, self._read_slices(file), section.keyless
            if section.is_flat:
                section.ready = column
        return *column, *table

    def share(self, keys: WantedKeys) -> float:
        """Return the fraction of the index's distinct keys that are in `keys`, or 1 if the fraction is unknown."""
        self._check_form(keys)
        return self._postings.share(keys)

    def _check_form(self, keys: WantedKeys) -> None:
        """Check that the index has keys of the same form as `keys`.

        Raises:
            ValueError: The keys are codes and the index has bytes, or vice versa.
        """
        if has_codes(keys.kind) != (self._form == CODES):
            raise ValueError(
                f"the index has keys of another form, so keys of type {keys.kind} cannot be looked up in it"
            )

    def list_parts_to_read(self, ranges: KeyRanges) -> Iterator[list[tuple[int, int]]]:
        """Yield the offsets and lengths of the parts that `mark_files` reads after the first `read_header_size` bytes.

        Offsets are in the blob. The parts are yielded in steps: the caller loads each list into memory before it
        requests the next list. The postings, which map keys to files, are read first. If they do not decide whether a
        file contains one of the keys, the first bytes of the file's own section are loaded. They contain the position
        of the file's dictionary of distinct keys, which is loaded next.
        """
        bounds = self._read_bounds(ranges)
        for pieces in self._postings.list_parts_to_read(bounds):
            yield [(self._postings_start + start, length) for start, length in pieces]
        if numbers := self._postings.list_undecided_files(bounds, self._has_keys).tolist():
            yield [(start, min(length, _SECTION_HEAD_BYTES)) for start, length in map(self.find_section_range, numbers)]
            yield [self._locate_dictionary(number) for number in numbers]

    def _locate_dictionary(self, file: int) -> tuple[int, int]:
        """Return the offset and the length of a file's dictionary in the blob."""
        start, length = self.open_section(file).dictionary_range
        return self._starts[file] + start, length

    def find_rows(self, file: int, ranges: KeyRanges) -> Bits:
        """Return the rows of a file that are in the ranges.

        A row that is null or NaN is returned if the ranges include null or NaN.
        """
        section = self.open_section(file)
        return section.find_rows_where(
            self._read_bounds(ranges), ranges.nulls, ranges.nans, partial(self._read_slices, file)
        )

    def verify(self) -> None:
        """Read the complete blob.

        Raises:
            ValueError: Some bytes differ from the bytes that were written.
        """
        self._postings.verify()
        for file in range(self.files):
            self.open_section(file).verify()

    def _read_bounds(self, ranges: KeyRanges) -> Bounds:
        """Return the bounds of the ranges. The result is cached, because a plan uses the same ranges for many files."""
        if self._last_bounds is not None:
            last_ranges, bounds = self._last_bounds
            if last_ranges is ranges:
                return bounds
        bounds = Bounds(ranges, self._form)
        self._last_bounds = (ranges, bounds)
        return bounds

    def _read_slices(self, file: int) -> _bitmap.Slices:
        """Return the decompressed slices of a file's section. The result is cached.

        A section has the keys of one data file. Slice i is a bitmap with bit i of the rank of each row's key.
        """
        with self._lock:
            slices = self._decoded_slices.get(file)
        if slices is None:
            slices, size_bytes = self.open_section(file).decode_slices()
            with self._lock:
                self._decoded_slices.put(file, slices, size_bytes + _bitmap.SLICES_BYTES)
        return slices


@dataclass(frozen=True, slots=True, eq=False)
class BitmapQuery:
    """A query for files with a key in some ranges, or with null or NaN if the ranges include null or NaN."""

    ranges: KeyRanges

    def mark_files(self, index: Bitmap) -> Flags:
        """Return the files that may match, as `IndexQuery.mark_files` does."""
        return index.mark_files(self.ranges)


@dataclass(frozen=True, slots=True, eq=False)
class KeysQuery:
    """A query for files with at least one key of a large set."""

    keys: KeySet

    def mark_files(self, index: Bitmap) -> Flags:
        """Return the files that may match, as `IndexQuery.mark_files` does."""
        return index.mark_files_with_keys(self.keys)


class RemoteBitmap:
    """A remote bitmap index of which some parts are loaded.

    Any thread can use `bitmap`. It raises ValueError if it needs a part that is not loaded.
    """

    def __init__(self, blob: BlobReader, sparse_memory: SparseMemory, bitmap: Bitmap) -> None:
        self._blob, self._sparse_memory, self.bitmap = blob, sparse_memory, bitmap
        self.data_files = bitmap.files

    @property
    def size_bytes(self) -> int:
        return self._sparse_memory.filled_bytes + _FILE_MEMORY_BYTES * self.data_files

    @property
    def is_full(self) -> bool:
        return 2 * self.size_bytes > FILLED_MAX_BYTES

    async def probe(self, query: BitmapQuery) -> Flags | None:
        for byte_ranges in self.bitmap.list_parts_to_read(query.ranges):
            if not await self._load(byte_ranges):
                return None
        return await asyncio.to_thread(query.mark_files, self.bitmap)

    async def load_rows(self, files: Iterable[int]) -> bool:
        """Load the sections of some files, and return whether `bitmap` can return their rows.

        The result is False if the memory limit or a failed read prevents it.
        """
        return await self._load([self.bitmap.find_section_range(file) for file in files])

    def has_rows(self, file: int) -> bool:
        return not self._sparse_memory.list_missing([self.bitmap.find_section_range(file)])

    async def _load(self, ranges: Iterable[Range]) -> bool:
        """Load the missing parts of byte ranges, and return whether all ranges are loaded.

        The result is False if they exceed the memory limit, or if the reader refuses so many ranges or bytes.
        """
        missing_ranges = self._sparse_memory.list_missing(ranges)
        if self._sparse_memory.filled_bytes + sum(length for _, length in missing_ranges) > FILLED_MAX_BYTES:
            return False
        parts = await self._blob.read_all(missing_ranges)
        if parts is None:
            return False
        for (offset, _), data in zip(missing_ranges, parts, strict=True):
            self._sparse_memory.fill(offset, data)
        return True


class BitmapKind(IndexKind[FileBitmap, Bitmap]):
    """The index kind of bitmap indexes."""

    name = "bitmap"
    remote_values_max = REMOTE_VALUES_MAX
    answers_rows = True
    takes_attributes = True

    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> FileBitmap:
        return build_bitmap(columns[0])

    def encode(self, entries: Sequence[FileBitmap]) -> list[bytes | memoryview]:
        return encode_bitmaps(entries)

    def merge(self, parts: Sequence[tuple[Bitmap, Mask]]) -> list[bytes | memoryview]:
        return merge_bitmaps(parts)

    def open(self, blob: memoryview) -> Bitmap:
        return Bitmap(blob)

    async def open_remote(self, blob: BlobReader) -> RemoteBitmap:
        start = await blob.read_head(read_header_size)
        sparse_memory = SparseMemory(blob.length)
        sparse_memory.fill(0, start)
        return RemoteBitmap(blob, sparse_memory, Bitmap(sparse_memory.memory))

    def supports(self, predicate: Bound) -> bool:
        return True

    def query(self, ranges: Sequence[KeyRanges]) -> BitmapQuery:
        return BitmapQuery(ranges[0])

    def make_keys_query(self, keys: KeySet) -> KeysQuery:
        return KeysQuery(keys)

    def compare(
        self, index: Bitmap, number: int, columns: Sequence[Keys], sampled_rows: Sequence[int]
    ) -> Iterator[str]:
        keys = columns[0]
        rows_with_keys = np.arange(keys.rows) if keys.present is None else np.flatnonzero(keys.present)
        hashes = hash_keys(keys, 0)
        for row in sampled_rows:
            key = _get_key(keys, row)
            ranges = KeyRanges(keys.kind, (KeyRange(key, key),))
            indexed_rows = list_positions(index.find_rows(number, ranges))
            # This assumes that different values have different hashes.
            expected_rows = rows_with_keys[hashes[rows_with_keys] == hashes[row]]
            if index.is_exact_for(ranges) and not np.array_equal(indexed_rows, expected_rows):
                yield (
                    f"the bitmap has {len(indexed_rows)} rows with the value of row {row}, but the data file has "
                    f"{len(expected_rows)}"
                )
        expected_nulls = 0 if keys.valid is None else keys.rows - int(unpack_bits(keys.valid, keys.rows).sum())
        indexed_nulls = len(list_positions(index.find_rows(number, KeyRanges(keys.kind, (), nulls=True))))
        if indexed_nulls != expected_nulls:
            yield f"the bitmap has {indexed_nulls} nulls, but the data file has {expected_nulls}"


def _get_key(keys: Keys, row: int) -> Key:
    """Return the key of a row."""
    if keys.codes is not None:
        return int(keys.codes[row])
    assert keys.starts is not None
    assert keys.heap is not None
    return keys.heap[keys.starts[row] : keys.starts[row + 1]].tobytes()


BITMAP = BitmapKind()
