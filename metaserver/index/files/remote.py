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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seamark.metaserver.iceberg.files.puffin import footer_size_bytes
from seamark.metaserver.index.files.index_file import FilesTable, IndexHeader, read_files, read_header
from seamark.metaserver.index.kinds.bitmap import RemoteBitmap
from seamark.metaserver.index.kinds.kind import RemoteIndex
from seamark.metaserver.index.kinds.kinds import KINDS
from seamark.metaserver.index.kinds.questions import Flags, Question
from seamark.metaserver.index.kinds.record import RemoteRecord
from seamark.metaserver.index.kinds.sparse import Range
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.store.port import RegisteredIndexFile

RANGES_MAX, BYTES_MAX = 128, 8 << 20
"""Reads that one step of a question may take, and what they may bring."""
_GUESS_BYTES = 64 << 10
"""Read of a file's end, and of its blob's start or end, before it is known how much that should be."""


@dataclass(frozen=True, slots=True, eq=False)
class _Blob:
    """Where an index file's blob lies. A `BlobReader`."""

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

    async def read_head(self, size_of: Callable[[bytes], int]) -> bytes:
        """As of `BlobReader`: in one read, or two."""
        start = await self.read(0, min(_GUESS_BYTES, self.length))
        needed = size_of(start)
        return start if needed <= len(start) else start + await self.read(len(start), needed - len(start))

    async def read_tail(self, size_of: Callable[[bytes], int]) -> bytes:
        """As of `BlobReader`: in one read, or two."""
        guess = min(_GUESS_BYTES, self.length)
        tail = await self.read(self.length - guess, guess)
        needed = size_of(tail)
        return tail if needed <= len(tail) else await self.read(self.length - needed, needed - len(tail)) + tail


@dataclass(frozen=True, slots=True, eq=False)
class ColdIndex:
    location: str
    files: FilesTable
    blob: RemoteIndex
    files_bytes: int
    """Of the files table."""

    @property
    def size_bytes(self) -> int:
        """In memory; a bitmap's grows with what it is asked."""
        return self.files_bytes + self.blob.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether it has read about as much as it may keep; one that is opened anew has room."""
        return self.blob.is_full

    @property
    def bitmap(self) -> RemoteBitmap:
        """Of a kind that answers rows."""
        assert isinstance(self.blob, RemoteBitmap)
        return self.blob

    @property
    def record(self) -> RemoteRecord:
        """Of a kind that answers keys."""
        assert isinstance(self.blob, RemoteRecord)
        return self.blob

    async def ask(self, question: Question) -> Flags | None:
        """As the question is answered by a file that is here; None where that would take too many reads. ValueError for
        damage; what `read_range` raises."""
        return await self.blob.ask(question)


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
        objects.read_range(location, header.files_offset, header.files_length), KINDS[header.kind].open_remote(blob)
    )
    files = read_files(table, header)
    if opened.data_files != len(files):
        raise ValueError(f"{location} indexes {opened.data_files} data files and lists {len(files)}")
    return header, ColdIndex(location, files, opened, len(table))


async def _end(objects: ObjectStore, location: str, size: int, length: int) -> bytes:
    start = max(0, size - length)
    return await objects.read_range(location, start, size - start)
