"""Remote reads of an index: queries that read a few byte ranges of a large file in object storage.

The footer, the files table and the blob's directory are read once and cached. A query then reads only the parts that it
needs:

- in a bloom index, the pages with the query's rows of bits;
- in a record index, one or two pages for each key;
- in a bitmap index, pieces of the postings, and for a query of rows also the sections of the data files.

Each part has a checksum, which is compared before the part is used. So no plan waits for a download of hundreds of
megabytes.

If a file is damaged, the functions raise a ValueError. `indexes.py` decides how to handle the file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seamark.formats.iceberg.files.puffin import read_footer_size
from seamark.formats.index.index_file import FilesTable, IndexHeader, read_files, read_header
from seamark.formats.index.kinds.bitmap import RemoteBitmap
from seamark.formats.index.kinds.kind import RemoteIndex
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.queries import Flags, IndexQuery
from seamark.formats.index.kinds.record import RemoteRecord
from seamark.formats.index.kinds.sparse import Range
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.store.model import RegisteredIndexFile

RANGES_MAX, BYTES_MAX = 128, 8 << 20
"""The maximum number of reads and of bytes in one step of a query."""
_FIRST_READ_BYTES = 64 << 10
"""The size of the first read of a file's or blob's end, or of a blob's start, while the required size is unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class _Blob:
    """A `BlobReader` of the blob of an index file. `offset` is the position of the blob in the file."""

    objects: ObjectStore
    location: str
    offset: int
    length: int

    async def read(self, start: int, length: int) -> bytes:
        """Read a range of the blob.

        Errors of `read_range` are not converted.

        Raises:
            ValueError: The range is outside the blob, or the storage returned fewer bytes.
        """
        if start < 0 or length < 0 or start + length > self.length:
            raise ValueError(
                f"{self.location}: bytes {start} to {start + length} are not in the blob, which has {self.length} bytes"
            )
        data = await self.objects.read_range(self.location, self.offset + start, length) if length else b""
        if len(data) != length:
            raise ValueError(f"{self.location}: requested {length} bytes at {start} of the blob, but read {len(data)}")
        return data

    async def read_all(self, ranges: Sequence[Range]) -> list[bytes] | None:
        """Return the bytes of each range, or None if there are too many ranges or bytes."""
        if len(ranges) > RANGES_MAX or sum(length for _, length in ranges) > BYTES_MAX:
            return None
        return await asyncio.gather(*(self.read(start, length) for start, length in ranges))

    async def read_head(self, compute_size: Callable[[bytes], int]) -> bytes:
        """Return the first bytes of the blob, with one or two reads.

        Args:
            compute_size: A function that returns the size of the head, from the bytes of the first read.
        """
        start = await self.read(0, min(_FIRST_READ_BYTES, self.length))
        needed_bytes = compute_size(start)
        return start if needed_bytes <= len(start) else start + await self.read(len(start), needed_bytes - len(start))

    async def read_tail(self, compute_size: Callable[[bytes], int]) -> bytes:
        """Return the last bytes of the blob, with one or two reads.

        Args:
            compute_size: A function that returns the size of the tail, from the bytes of the first read.
        """
        first_read_bytes = min(_FIRST_READ_BYTES, self.length)
        tail = await self.read(self.length - first_read_bytes, first_read_bytes)
        needed_bytes = compute_size(tail)
        return (
            tail
            if needed_bytes <= len(tail)
            else await self.read(self.length - needed_bytes, needed_bytes - len(tail)) + tail
        )


@dataclass(frozen=True, slots=True, eq=False)
class RemoteIndexFile:
    """An index file that is read by range."""

    location: str
    files: FilesTable
    blob: RemoteIndex
    files_bytes: int
    """The size of the files table."""

    @property
    def size_bytes(self) -> int:
        """The memory of the object in bytes. For a bitmap index, it grows with queries, which cache what they read."""
        return self.files_bytes + self.blob.size_bytes

    @property
    def is_full(self) -> bool:
        """Whether the cache of the file has used more than half of its limit.

        When the file is opened again, the cache is empty.
        """
        return self.blob.is_full

    @property
    def bitmap(self) -> RemoteBitmap:
        """The bitmaps of the rows. The caller uses them only for index kinds that find rows, not only files."""
        assert isinstance(self.blob, RemoteBitmap)
        return self.blob

    @property
    def record_index(self) -> RemoteRecord:
        """The opened record index, which finds rows by their keys. The index kind must have `answers_keys`."""
        assert isinstance(self.blob, RemoteRecord)
        return self.blob

    async def probe(self, query: IndexQuery) -> Flags | None:
        """Return for each data file whether it may match a query, or None if this would need too many reads.

        Errors of `read_range` are not converted.

        Raises:
            ValueError: The file is damaged.
        """
        return await self.blob.probe(query)


async def open_remote(objects: ObjectStore, file: RegisteredIndexFile) -> tuple[IndexHeader, RemoteIndexFile]:
    """Open an index file with three to five reads of its footer, its table of data files, and the start of its blob.

    Errors of `read_range` are not converted.

    Raises:
        Corrupt, ValueError: The file is damaged.
        UnknownVersion: This program cannot read the format version of the file.
    """
    location, size = file.location, file.size_bytes
    tail = await _read_end(objects, location, size, _FIRST_READ_BYTES)
    needed_bytes = read_footer_size(tail, location)
    if needed_bytes > len(tail):
        tail = await _read_end(objects, location, size, needed_bytes)
    header = read_header(tail, size, location)
    blob = _Blob(objects, location, header.offset, header.length)
    table, open_file = await asyncio.gather(
        objects.read_range(location, header.files_offset, header.files_length), KINDS[header.kind].open_remote(blob)
    )
    files = read_files(table, header)
    if open_file.data_files != len(files):
        raise ValueError(f"{location} indexes {open_file.data_files} data files, but lists {len(files)}")
    return header, RemoteIndexFile(location, files, open_file, len(table))


async def _read_end(objects: ObjectStore, location: str, size: int, length: int) -> bytes:
    """Return the last `length` bytes of a file of `size` bytes, or the whole file if it is shorter."""
    start = max(0, size - length)
    return await objects.read_range(location, start, size - start)
