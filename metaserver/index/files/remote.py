"""The cold door of an index: answers from a few ranges of a large file that is not here.

What tells where things lie (footer, files table, the blob's directory) is read once and kept. A question then reads
what it touches: of a bloom index the pages that hold its rows of bits, of a record index the pages of its keys, one or
two each, of a bitmap index the pieces of the postings, and for rows the sections of their files. All of these have
checksums of their own, which are compared before anything is believed. So nobody waits until hundreds of megabytes
have come.

Damage is a ValueError to who asked; what becomes of the file is `indexes.py`'s to say.
"""

from __future__ import annotations

import asyncio
import mmap
from bisect import bisect_right, insort
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from metaserver.iceberg.files.puffin import footer_size_bytes
from metaserver.index.files.index_file import FilesTable, IndexHeader, read_files, read_header
from metaserver.index.keys.hashing import Hashes
from metaserver.index.kinds import bitmap, bloom
from metaserver.index.kinds.bitmap import Bitmap
from metaserver.index.kinds.bloom import Bloom
from metaserver.index.kinds.questions import BitmapQuestion, BloomQuestion, Flags, Question, RecordQuestion, files_of
from metaserver.index.kinds.record import TRAILER_BYTES, Fences, Found
from metaserver.objects.port import ObjectStore
from metaserver.store.port import RegisteredIndexFile

KEYS_MAX = 16
"""Keys that are looked for by hash in one go; for more the whole file is waited for."""
RANGES_MAX, BYTES_MAX = 128, 8 << 20
"""Reads that one step of a question may take, and what they may bring."""
FILLED_MAX_BYTES = 32 << 20
"""Of one bitmap index, what is read by range and kept."""
_GUESS_BYTES = 64 << 10
"""Read of a file's end, and of its blob's start or end, before it is known how much that should be."""

Range = tuple[int, int]
"""(offset in the blob, length)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Blob:
    """Where an index file's blob lies."""

    objects: ObjectStore
    location: str
    offset: int
    length: int

    async def read(self, start: int, length: int) -> bytes:
        """ValueError where that is not within the blob, or less comes; what `read_range` raises."""
        if start < 0 or length < 0 or start + length > self.length:
            raise ValueError(f"{self.location}: bytes {start} to {start + length} are not of a blob of {self.length}")
        data = await self.objects.read_range(self.location, self.offset + start, length) if length else b""
        if len(data) != length:
            raise ValueError(f"{self.location}: {len(data)} bytes were read at {start} of the blob, not {length}")
        return data

    async def read_all(self, ranges: Sequence[Range]) -> list[bytes] | None:
        """None where that would take too many reads."""
        if len(ranges) > RANGES_MAX or sum(length for _, length in ranges) > BYTES_MAX:
            return None
        return await asyncio.gather(*(self.read(start, length) for start, length in ranges))


class _Sparse:
    """A blob's memory, filled where somebody has read it: the rest is zeros, and takes no memory.

    What is there once is never written again: checksums are compared once.
    """

    def __init__(self, length: int) -> None:
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = memoryview(self._map)
        self._there: list[Range] = []
        """(start, end), ascending and apart."""
        self.filled_bytes = 0
        """Pages of memory are taken whole."""

    def missing(self, ranges: Iterable[Range]) -> list[Range]:
        """(offset, length) of what is to be read yet of these, neighbours together, ascending."""
        found: list[Range] = []
        for offset, length in sorted(ranges):
            for start, end in self._gaps(offset, offset + length):
                if found and start <= found[-1][1]:
                    found[-1] = found[-1][0], max(found[-1][1], end)
                else:
                    found.append((start, end))
        return [(start, end - start) for start, end in found]

    def fill(self, offset: int, data: bytes) -> None:
        for start, end in list(self._gaps(offset, offset + len(data))):
            self.memory[start:end] = data[start - offset : end - offset]
            self._add(start, end)
            self.filled_bytes += end - start + mmap.PAGESIZE

    def _gaps(self, start: int, end: int) -> Iterator[Range]:
        """(start, end) of what is not there between these two."""
        place = max(0, bisect_right(self._there, (start, len(self.memory))) - 1)
        for begun, ended in self._there[place:]:
            if begun >= end:
                break
            if begun > start:
                yield start, begun
            start = max(start, ended)
        if start < end:
            yield start, end

    def _add(self, start: int, end: int) -> None:
        """Of a gap; with its neighbours where they touch."""
        place = bisect_right(self._there, (start, end))
        if place < len(self._there) and self._there[place][0] == end:
            end = self._there.pop(place)[1]
        if place and self._there[place - 1][1] == start:
            start = self._there.pop(place - 1)[0]
        insort(self._there, (start, end))


class ColdBloom:
    """`bloom` knows its header alone."""

    def __init__(self, blob: _Blob, opened: Bloom, size_bytes: int) -> None:
        self._blob, self._bloom, self.size_bytes = blob, opened, size_bytes
        self.data_files = opened.files

    @staticmethod
    async def open(blob: _Blob) -> ColdBloom:
        start = await blob.read(0, min(_GUESS_BYTES, blob.length))
        head = bloom.header_size(start)
        if head > len(start):
            start += await blob.read(len(start), head - len(start))
        return ColdBloom(blob, Bloom(bytes(start[:head]), blob.length), 16 * head)

    async def ask(self, question: Question) -> Flags | None:
        assert isinstance(question, BloomQuestion)
        parts = await self._blob.read_all(self._bloom.cold_ranges(question.hashes))
        return None if parts is None else self._bloom.probe_cold(question.hashes, parts)


class ColdRecord:
    """The directory is here, the pages are not."""

    def __init__(self, blob: _Blob, fences: Fences) -> None:
        self._blob, self._fences = blob, fences
        self.size_bytes = fences.first.nbytes + fences.counts.nbytes
        self.data_files = fences.files

    @staticmethod
    async def open(blob: _Blob) -> ColdRecord:
        guess = min(_GUESS_BYTES, blob.length)
        tail = await blob.read(blob.length - guess, guess)
        needed = Fences.directory_bytes(tail, blob.length)
        if needed > len(tail):
            tail = await blob.read(blob.length - needed, needed - len(tail)) + tail
        return ColdRecord(blob, Fences(tail[-max(needed, TRAILER_BYTES) :], blob.length))

    async def ask(self, question: Question) -> Flags | None:
        assert isinstance(question, RecordQuestion)
        found = await self.rows(question.high, question.low)
        return None if found is None else files_of(found, self.data_files)

    async def rows(self, high: Hashes, low: Hashes) -> Found | None:
        """As `Record.lookup`; None where it would take too many reads."""
        pages = await self._blob.read_all(self._fences.cold_pages(high, low))
        return None if pages is None else self._fences.lookup_cold(high, low, pages)


class ColdBitmap:
    """`bitmap` may be asked for what was loaded, by any thread; of anything else it says that it is damaged."""

    def __init__(self, blob: _Blob, sparse: _Sparse, opened: Bitmap) -> None:
        self._blob, self._sparse, self.bitmap = blob, sparse, opened
        self.data_files = opened.files

    @staticmethod
    async def open(blob: _Blob) -> ColdBitmap:
        start = await blob.read(0, min(_GUESS_BYTES, blob.length))
        head = bitmap.header_size(start)
        if head > len(start):
            start += await blob.read(len(start), head - len(start))
        sparse = _Sparse(blob.length)
        sparse.fill(0, start)
        return ColdBitmap(blob, sparse, Bitmap(sparse.memory))

    @property
    def size_bytes(self) -> int:
        return self._sparse.filled_bytes + 64 * self.data_files

    async def ask(self, question: Question) -> Flags | None:
        assert isinstance(question, BitmapQuestion)
        for wanted in self.bitmap.reads(question.ranges):
            if not await self._load(wanted):
                return None
        return await asyncio.to_thread(question.of, self.bitmap)

    async def load_rows(self, files: Iterable[int]) -> bool:
        """Whether from now on these files can be asked for rows."""
        return await self._load([self.bitmap.section_range(file) for file in files])

    def has_rows(self, file: int) -> bool:
        return not self._sparse.missing([self.bitmap.section_range(file)])

    async def _load(self, ranges: Iterable[Range]) -> bool:
        missing = self._sparse.missing(ranges)
        if self._sparse.filled_bytes + sum(length for _, length in missing) > FILLED_MAX_BYTES:
            return False
        parts = await self._blob.read_all(missing)
        if parts is None:
            return False
        for (offset, _), data in zip(missing, parts, strict=True):
            self._sparse.fill(offset, data)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class ColdIndex:
    location: str
    files: FilesTable
    blob: ColdBloom | ColdBitmap | ColdRecord
    files_bytes: int
    """Of the files table."""

    @property
    def size_bytes(self) -> int:
        """In memory; a bitmap's grows with what it is asked."""
        return self.files_bytes + self.blob.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether it has read about as much as it may keep; one that is opened anew has room."""
        return isinstance(self.blob, ColdBitmap) and 2 * self.blob.size_bytes > FILLED_MAX_BYTES

    @property
    def bitmap(self) -> ColdBitmap:
        assert isinstance(self.blob, ColdBitmap)
        return self.blob

    @property
    def record(self) -> ColdRecord:
        assert isinstance(self.blob, ColdRecord)
        return self.blob

    async def ask(self, question: Question) -> Flags | None:
        """As the question is answered by a file that is here; None where that would take too many reads. ValueError for
        damage; what `read_range` raises."""
        return await self.blob.ask(question)


_OPEN: dict[str, Callable[[_Blob], Awaitable[ColdBloom | ColdBitmap | ColdRecord]]] = {
    "bloom": ColdBloom.open,
    "bitmap": ColdBitmap.open,
    "record": ColdRecord.open,
}


async def open_remote(objects: ObjectStore, file: RegisteredIndexFile) -> tuple[IndexHeader, ColdIndex]:
    """In three to five reads. Corrupt, UnknownVersion, ValueError; what `read_range` raises."""
    location, size = file.location, file.size_bytes
    tail = await _end(objects, location, size, _GUESS_BYTES)
    needed = footer_size_bytes(tail, location)
    if needed > len(tail):
        tail = await _end(objects, location, size, needed)
    header = read_header(tail, size, location)
    blob = _Blob(objects, location, header.offset, header.length)
    table, opened = await asyncio.gather(
        objects.read_range(location, header.files_offset, header.files_length), _OPEN[header.kind](blob)
    )
    files = read_files(table, header)
    if opened.data_files != len(files):
        raise ValueError(f"{location} indexes {opened.data_files} data files and lists {len(files)}")
    return header, ColdIndex(location, files, opened, len(table))


async def _end(objects: ObjectStore, location: str, size: int, length: int) -> bytes:
    start = max(0, size - length)
    return await objects.read_range(location, start, size - start)
