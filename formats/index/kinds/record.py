"""The record index: maps the 128-bit hash of a key to its rows, each a data file and a position.

A blob is one sorted run. It consists of pages of 4,096 bytes, with 170 entries of 24 bytes each and a checksum per
page; then the *fences* (the high half of each page's first hash), the number of entries of each data file, and a
trailer. A merge therefore writes the blob sequentially and keeps only a few pages in memory. A lookup in memory starts
at the position of a uniformly distributed hash, and finds its entry within two or three cache lines. A remote lookup
has the fences in memory and reads one page.

Every row has an entry, including rows with nulls in the key (`hash_rows` encodes null and NaN). Therefore a file has as
many entries as rows, and an audit can compare the counts. A lookup returns every row of a key in every file. The caller
removes rows that are not in the snapshot or are deleted. If two keys have the same hash, the lookup returns the rows of
both. With 2^32 rows, that happens in one of 10^19 tables.

Encoding and lookups have no side effects. Heavy work runs in C without the GIL (`_record.pyx`). If a blob is damaged,
ValueError is raised. `docs/reference/index-format.md` specifies every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.files.puffin import Part
from seamark.formats.index.kernels._record import (
    DROPPED_FILE,
    ENTRIES_A_PAGE,
    ENTRY_BYTES,
    PAGE_BYTES,
    Merger,
    Pages,
    sorted_run,
    stretches,
)
from seamark.formats.index.keys.hashing import Hashes, compute_checksum, hash_halves
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import KeyRanges, Keys
from seamark.formats.index.kinds.kind import BlobReader, IndexKind
from seamark.formats.index.kinds.queries import KEYS_MAX, Flags, list_point_keys

Words = npt.NDArray[np.uint64]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
RowPositions = tuple[Longs, Ints, Longs]
"""The rows that match, as arrays (query, file, position), in the order of query, file and position."""

ROWS_MAX = (1 << 32) - 1
"""The maximum number of rows of a data file. Positions are uint32."""
FILES_MAX = (1 << 31) - 1
TRAILER_BYTES = 64
COLUMNS_MAX = 32
"""The maximum number of columns of a key."""

_MAGIC = b"SMRECORD"
_TRAILER = struct.Struct("<8sQQIIQ16x")
"""The trailer of a blob.

Its fields are the magic, the numbers of entries, pages and data files, the bytes per page, the XXH64 of fences
and counts, and zeros. The XXH64 of the trailer follows.
"""
_TRAILER_CHECKSUM = struct.Struct("<Q")
_PAGES_PER_CHUNK = 256
"""The number of pages that are written at a time."""
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class FileRecords:
    """The entries of a data file.

    Attributes:
        sorted_entries: uint8[24 * rows], an entry of 24 bytes for each row, in ascending order: the hash of the row's
            key, its file and its position.
    """

    sorted_entries: Bytes

    @property
    def rows(self) -> int:
        return len(self.sorted_entries) // ENTRY_BYTES


def build_records(columns: Sequence[Keys]) -> FileRecords:
    """Build the entries of a data file from its key columns, in the order of the definition.

    Raises:
        ValueError: The file has more than ROWS_MAX rows.
    """
    if columns and columns[0].rows > ROWS_MAX:
        raise ValueError(
            f"a data file of {columns[0].rows} rows cannot have a record index; the limit is {ROWS_MAX} rows"
        )
    return FileRecords(sorted_run(*hash_halves(columns)))


def encode_record_entries(entries: Sequence[FileRecords]) -> Iterator[Part]:
    """Yield the parts of a blob from the entries of its data files, which are numbered in the given order."""
    # The merger merges runs of sorted entries. These runs are not divided into pages, so their number of pages is -1.
    runs = [(records.sorted_entries, -1, np.array([number], np.uint32)) for number, records in enumerate(entries)]
    return _write_parts(Merger(runs, len(entries)), len(entries))


def merge_records(parts: Sequence[tuple[RecordBlob, Mask]]) -> Iterator[Part]:
    """Merge blobs into one blob, and yield its parts. The merge has only a few pages in memory.

    The result has the kept files of each blob, in order.

    Args:
        parts: The blobs, each with the files to keep as bool[files].

    Raises:
        ValueError: A page is damaged.
    """
    runs, total_files = [], 0
    for record, keep in parts:
        if len(keep) != record.files:
            raise ValueError(
                f"the mask of the files to keep has {len(keep)} items, but the index has {record.files} data files"
            )
        # The merger drops the entries of files with this number.
        new_numbers = np.full(record.files, DROPPED_FILE, np.uint32)
        kept_files = int(np.count_nonzero(keep))
        kept_numbers = np.arange(total_files, total_files + kept_files, dtype=np.uint32)
        new_numbers[np.asarray(keep, dtype=np.bool_)] = kept_numbers
        total_files += kept_files
        runs.append((record.memory, len(record.fences.first_hashes), new_numbers))
    return _write_parts(Merger(runs, total_files), total_files)


def _write_parts(merger: Merger, files: int) -> Iterator[Part]:
    """Yield the parts of a blob whose entries `merger` sorts: its pages, its directory and its trailer.

    A fixed number of pages is in memory at the same time. The directory has the first hash of each page (its fence) and
    the number of entries of each data file.

    Raises:
        ValueError: There are too many data files for one record index.
    """
    if files > FILES_MAX:
        raise ValueError(f"{files} data files do not fit into one record index; the limit is {FILES_MAX}")
    counts = np.zeros(files, dtype="<u8")
    fences = [np.empty(0, dtype="<u8")]
    pages = 0
    while True:
        chunk = np.empty(_PAGES_PER_CHUNK * PAGE_BYTES, np.uint8)
        chunk_fences = np.empty(_PAGES_PER_CHUNK, dtype="<u8")
        filled_pages = merger.fill(chunk, pages, chunk_fences, counts)
        if not filled_pages:
            break
        yield chunk[: filled_pages * PAGE_BYTES].data
        fences.append(chunk_fences[:filled_pages])
        pages += filled_pages
    directory = np.concatenate([*fences, counts]).view(np.uint8)
    yield directory.data
    trailer = _TRAILER.pack(_MAGIC, int(counts.sum()), pages, files, PAGE_BYTES, compute_checksum(directory))
    yield trailer + _TRAILER_CHECKSUM.pack(compute_checksum(trailer))


class Fences:
    """The directory of a blob in memory, which is all that a remote lookup needs before it reads pages. It is
    immutable.

    The entries of a blob are sorted by hash, so the first hash of each page (its fence) shows which pages can contain a
    hash.

    Attributes:
        first_hashes: The high half of each page's first hash, uint64[pages].
        counts: The number of entries of each file, uint64[files].
    """

    def __init__(self, tail: Part, blob_bytes: int) -> None:
        """Read the directory.

        Args:
            tail: At least the last `compute_directory_bytes` of a blob.
            blob_bytes: The size of the blob.

        Raises:
            ValueError: The directory is damaged.
        """
        entries, pages, files, checksum = _read_trailer(tail, blob_bytes)
        size = _WORD_BYTES * (pages + files)
        if len(tail) < size + TRAILER_BYTES:
            raise ValueError(f"a directory of {size + TRAILER_BYTES} bytes does not fit into {len(tail)} bytes")
        start = len(tail) - TRAILER_BYTES - size
        directory = np.frombuffer(tail, np.uint8, size, start).copy()
        if compute_checksum(directory) != checksum:
            raise ValueError("the directory does not match its checksum")
        words = directory.view("<u8")
        self.first_hashes, self.counts = words[:pages], words[pages:]
        self.entries = entries
        self.files = files
        if (counted_entries := int(self.counts.sum())) != entries:
            raise ValueError(f"the directory counts {counted_entries} entries, but the trailer {entries}")
        if (self.first_hashes[1:] < self.first_hashes[:-1]).any():
            raise ValueError("the first hashes of the pages are not in ascending order")

    @staticmethod
    def compute_directory_bytes(tail: Part, blob_bytes: int) -> int:
        """Return the size of the directory at a blob's end, in bytes.

        Args:
            tail: At least the last TRAILER_BYTES of the blob.
            blob_bytes: The size of the blob.
        """
        _, pages, files, _ = _read_trailer(tail, blob_bytes)
        return _WORD_BYTES * (pages + files) + TRAILER_BYTES

    def list_page_ranges(self, hi: Words, lo: Words) -> list[tuple[int, int]]:
        """Return the offsets and lengths in the blob of all pages that may contain one of the hashes, ascending.

        Adjacent pages are joined. A hash needs one page, or two pages if its entries may cross a page boundary. Only a
        key of hundreds of rows needs more pages. The directory has the high half of each page's first hash, so the
        low halves do not matter.
        """
        spans = self._find_page_spans(hi)
        return [(first_page * PAGE_BYTES, (end - first_page) * PAGE_BYTES) for first_page, end in spans.tolist()]

    def _find_page_spans(self, high_halves: Words) -> Longs:
        """Return the ranges of pages that may contain the hashes: first page and page after the last, int64[n, 2].

        The ranges are found by the high halves of the hashes, and of the first hash of each page.
        """
        return stretches(self.first_hashes, np.sort(high_halves))

    def look_up_in_pages(self, hi: Words, lo: Words, pages: Sequence[Part]) -> RowPositions:
        """Return the result of `RecordBlob.lookup` from pages that were already read.

        Args:
            hi: The high halves of the hashes.
            lo: The low halves of the hashes.
            pages: The bytes of the ranges that `list_page_ranges` returns for the same hashes, in the same order.
        """
        spans = self._find_page_spans(hi)
        if len(pages) != len(spans):
            raise ValueError(f"{len(pages)} ranges of pages were read instead of {len(spans)}")
        page_numbers = np.concatenate([np.empty(0, np.int64), *(np.arange(first, end) for first, end in spans)])
        memory = np.frombuffer(b"".join(pages), np.uint8)
        if not len(page_numbers):
            return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        return Pages(memory, self.first_hashes[page_numbers], page_numbers, self.files).lookup(hi, lo)


def _read_trailer(tail: Part, blob_bytes: int) -> tuple[int, int, int, int]:
    """Read the trailer, the last bytes of a blob, and check that its numbers fit the size of the blob.

    Returns:
        The numbers of entries, pages and files, and the checksum of the directory.
    """
    if len(tail) < TRAILER_BYTES or blob_bytes < TRAILER_BYTES:
        raise ValueError(f"a record index cannot have only {min(len(tail), blob_bytes)} bytes")
    trailer = memoryview(tail)[len(tail) - TRAILER_BYTES :]
    (checksum,) = _TRAILER_CHECKSUM.unpack_from(trailer, _TRAILER.size)
    if checksum != compute_checksum(trailer[: _TRAILER.size]):
        raise ValueError("the trailer does not match its checksum")
    magic, entries, pages, files, page_bytes, directory_checksum = _TRAILER.unpack_from(trailer)
    if magic != _MAGIC:
        raise ValueError(
            f"the trailer does not belong to a record index: its magic number is {magic!r}, not {_MAGIC!r}"
        )
    if page_bytes != PAGE_BYTES:
        raise ValueError(f"the pages have {page_bytes} bytes, not {PAGE_BYTES}")
    expected_bytes = pages * PAGE_BYTES + _WORD_BYTES * (pages + files) + TRAILER_BYTES
    if pages != -(-entries // ENTRIES_A_PAGE) or expected_bytes != blob_bytes:
        raise ValueError(f"{entries} entries of {files} data files in {pages} pages cannot have {blob_bytes} bytes")
    return entries, pages, files, directory_checksum


class RecordBlob:
    """An opened blob, which can be a memory-mapped file. Several threads can use it.

    Raises:
        ValueError: The blob is damaged. The constructor checks the directory, and the first read of a page checks the
            page.
    """

    def __init__(self, blob: memoryview) -> None:
        self.fences = Fences(blob, len(blob))
        self.memory = np.frombuffer(blob, np.uint8, len(self.fences.first_hashes) * PAGE_BYTES)
        """The bytes of the pages."""
        self._pages = Pages(self.memory, self.fences.first_hashes, np.empty(0, np.int64), self.fences.files)

    @property
    def files(self) -> int:
        return self.fences.files

    @property
    def count(self) -> int:
        """The number of entries, which is the number of rows of the data files."""
        return self.fences.entries

    @property
    def counts(self) -> Words:
        """The number of entries of each file, uint64[files], from the directory of the blob."""
        return self.fences.counts

    def lookup(self, hi: Words, lo: Words) -> RowPositions:
        """Return the rows with some hashes (`hash_halves`).

        Args:
            hi: The high halves of the hashes, uint64[n].
            lo: The low halves of the hashes, uint64[n].

        Returns:
            (query int64[m], file int32[m], position int64[m]), in the order of query, file and position.
        """
        return self._pages.lookup(hi, lo)

    def find(self, hi: int, lo: int) -> list[tuple[int, int]]:
        """Return the file and the position of each row with one hash, like `lookup` but without arrays."""
        return self._pages.find(hi, lo)

    def verify(self) -> None:
        """Read the complete blob, and check checksums, order, and the number of entries of each file.

        Raises:
            ValueError: The blob is damaged. The message describes the damage.
        """
        counts = np.zeros(self.files, np.uint64)
        if self._pages.check(counts) != self.count or (counts != self.counts).any():
            raise ValueError("the number of entries of a data file differs from the directory")


def mark_files(rows: RowPositions, files: int) -> Flags:
    """Return 1 for each file with a row in `rows`, otherwise 0, as uint8[files]."""
    flags = np.zeros(files, dtype=np.uint8)
    _, files_of_rows, _ = rows
    flags[files_of_rows] = 1
    return flags


@dataclass(frozen=True, slots=True, eq=False)
class RecordQuery:
    """A query for files with a row that has one of the hashes, which are given as halves (seeds 0 and 1)."""

    high: Hashes
    low: Hashes

    @staticmethod
    def from_keys(columns: Sequence[Keys]) -> RecordQuery:
        """Return the query for some keys. Each part of the key is a column."""
        return RecordQuery(*hash_halves(columns))

    def mark_files(self, index: RecordBlob) -> Flags:
        """Return the files that may match, as `IndexQuery.mark_files` does."""
        return mark_files(index.lookup(self.high, self.low), index.files)


class RemoteRecord:
    """An index file in the storage. Its directory is in memory, and each query reads the pages that it needs.

    The directory has the first hash of each page, so a lookup reads only the pages that can contain its hashes.
    """

    is_full = False  # No pages are cached, so the memory does not grow.

    def __init__(self, blob: BlobReader, fences: Fences) -> None:
        self._blob, self._fences = blob, fences
        self.size_bytes = fences.first_hashes.nbytes + fences.counts.nbytes
        self.data_files = fences.files

    async def probe(self, query: RecordQuery) -> Flags | None:
        matches = await self.look_up_rows(query.high, query.low)
        return None if matches is None else mark_files(matches, self.data_files)

    async def look_up_rows(self, high: Hashes, low: Hashes) -> RowPositions | None:
        """Look up hashes like `RecordBlob.lookup`, or return None if the lookup needs too many reads.

        Only the pages that can contain one of the hashes are read, by the first hash of each page.

        Args:
            high: The high halves of the hashes.
            low: The low halves of the hashes.
        """
        pages = await self._blob.read_all(self._fences.list_page_ranges(high, low))
        return None if pages is None else self._fences.look_up_in_pages(high, low, pages)


class RecordKind(IndexKind[FileRecords, RecordBlob]):
    """The index kind of record indexes."""

    name = "record"
    alignment = PAGE_BYTES
    """The alignment of the blob in bytes, so that the pages of the index are aligned to pages of the disk."""
    columns_max = COLUMNS_MAX
    answers_keys = True

    def build(self, columns: Sequence[Keys], parameters: Mapping[str, float]) -> FileRecords:
        return build_records(columns)

    def encode(self, entries: Sequence[FileRecords]) -> Iterator[Part]:
        return encode_record_entries(entries)

    def merge(self, parts: Sequence[tuple[RecordBlob, Mask]]) -> Iterator[Part]:
        return merge_records(parts)

    def open(self, blob: memoryview) -> RecordBlob:
        return RecordBlob(blob)

    async def open_remote(self, blob: BlobReader) -> RemoteRecord:
        """Open a blob by reading only its directory, which is at the end of the blob.

        The directory has the first hash of each page (its fence), by which a lookup finds the pages to read.
        """

        def find_directory_bytes(tail: bytes) -> int:
            return Fences.compute_directory_bytes(tail, blob.length)

        tail = await blob.read_tail(find_directory_bytes)
        return RemoteRecord(blob, Fences(tail[-find_directory_bytes(tail) :], blob.length))

    def query(self, ranges: Sequence[KeyRanges]) -> RecordQuery | None:
        columns = list_point_keys(ranges)
        return None if columns is None else RecordQuery.from_keys(columns)

    def make_keys_query(self, keys: KeySet) -> RecordQuery | None:
        return None if len(keys) > KEYS_MAX else RecordQuery.from_keys([keys.keys])

    def check_rows(self, index: RecordBlob, rows: int) -> str | None:
        return (
            None if index.count == rows else f"the index has {index.count} entries, but the data files have {rows} rows"
        )

    def compare(
        self, index: RecordBlob, number: int, columns: Sequence[Keys], sampled_rows: Sequence[int]
    ) -> Iterator[str]:
        """Yield the differences between the index and all rows of the data file `number`, not only the sampled rows.

        Each row's key must be in the index at the position of the row.
        """
        rows = columns[0].rows
        if int(index.counts[number]) != rows:
            yield f"the index has {int(index.counts[number])} entries, but the data file has {rows} rows"
        queries, files, positions = index.lookup(*hash_halves(columns))
        is_found = np.zeros(rows, dtype=np.bool_)
        is_correct = (files == number) & (positions == queries)
        is_found[queries[is_correct]] = True
        if not is_found.all():
            yield f"the index does not return the key of row {int(np.flatnonzero(~is_found)[0])} at its position"


RECORD = RecordKind()
