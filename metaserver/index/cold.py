"""The cold door of a bloom index: an answer from a few ranges of a large file that is not here.

A probe of a few keys reads some rows of bits. What tells where they lie, the footer, the files table and the blob's
header, is read once and kept; each probe reads the pages that hold its rows, which have checksums of their own. So a
plan need not wait until hundreds of megabytes have come.

Whatever is wrong is an error to who asked and to nobody else: who reads the whole file, which happens meanwhile, finds
out whether it is to be quarantined.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from metaserver.iceberg.puffin import footer_size_bytes
from metaserver.index.bloom import Bloom, header_size
from metaserver.index.hashing import Hashes
from metaserver.index.index_file import FilesTable, IndexHeader, read_files, read_header
from metaserver.index.keys import Bytes
from metaserver.objects.port import ObjectStore
from metaserver.store.port import IndexFile

KEYS_MAX = 16
"""Keys that are looked for in one go; for more the whole file is waited for."""
RANGES_MAX, BYTES_MAX = 128, 4 << 20
"""Reads that one probe may take, and what they may bring."""
_GUESS_BYTES = 64 << 10
"""Read of a file's end and of its blob's start before it is known how much that should be."""


@dataclass(frozen=True, slots=True, eq=False)
class ColdBloom:
    """`bloom` knows its header alone; its blob begins at `offset` of the file."""

    location: str
    files: FilesTable
    bloom: Bloom
    offset: int
    size_bytes: int
    """In memory."""


async def open_cold(objects: ObjectStore, file: IndexFile) -> tuple[IndexHeader, ColdBloom]:
    """Of a bloom index file, in three to five reads. Corrupt, UnknownVersion, ValueError; what `read_range` raises."""
    location, size = file.location, file.size_bytes
    tail = await _end(objects, location, size, _GUESS_BYTES)
    needed = footer_size_bytes(tail, location)
    if needed > len(tail):
        tail = await _end(objects, location, size, needed)
    header = read_header(tail, size, location)
    if header.kind != "bloom":
        raise ValueError(f"{location} is of kind {header.kind}; only bloom indexes are asked by range")
    table, start = await asyncio.gather(
        objects.read_range(location, header.files_offset, header.files_length),
        objects.read_range(location, header.offset, min(_GUESS_BYTES, header.length)),
    )
    head = header_size(start)
    if head > header.length:
        raise ValueError(f"{location}: a header of {head} bytes does not fit into a blob of {header.length}")
    if head > len(start):
        start += await objects.read_range(location, header.offset + len(start), head - len(start))
    bloom = Bloom(bytes(start[:head]), header.length)
    files = read_files(table, header)
    if bloom.files != len(files):
        raise ValueError(f"{location} indexes {bloom.files} data files and lists {len(files)}")
    return header, ColdBloom(location, files, bloom, header.offset, len(table) + 16 * head)


async def _end(objects: ObjectStore, location: str, size: int, length: int) -> bytes:
    start = max(0, size - length)
    return await objects.read_range(location, start, size - start)


async def probe_cold(objects: ObjectStore, cold: ColdBloom, hashes: Hashes) -> Bytes | None:
    """As `Bloom.probe`; None where it would take too many reads. ValueError for damage; what `read_range` raises."""
    ranges = cold.bloom.cold_ranges(hashes)
    if len(ranges) > RANGES_MAX or sum(length for _, length in ranges) > BYTES_MAX:
        return None
    reads = (objects.read_range(cold.location, cold.offset + start, length) for start, length in ranges)
    return cold.bloom.probe_cold(hashes, await asyncio.gather(*reads))
