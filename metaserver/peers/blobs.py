"""The files that this replica keeps for all replicas: read from the storage once, unchanged, with their SHA-256.

A stored value is the digest (32 bytes) and the content. The digest is computed when the content arrives
from the storage, and the reader that uses the content compares it. So a fault of a disk, of memory or of
the network cannot cause a wrong answer.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from seamark.cache.memory import MemoryCache
from seamark.cache.opening import open_stack
from seamark.cache.stack import Stack, StackStats
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.settings.settings import Settings

DIGEST_BYTES = 32
_THREADS = 2
_INLINE_BYTES = 128 << 10
"""The maximum number of bytes whose digest is computed without a thread. Switching threads would take longer."""
_MAPPED_SIZE_DIVISOR = 8
"""The divisor of a mapped file's size for the memory budget. Its pages belong to the kernel, which can reclaim them."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredFile:
    """The content of a file, and its digest from the time when the storage sent it."""

    sha256: bytes
    content: memoryview

    @property
    def size_bytes(self) -> int:
        return len(self.content) + DIGEST_BYTES


class FileCache:
    """The cache of the files that this replica keeps for all replicas. An instance belongs to one event loop."""

    def __init__(self, stored_objects: ObjectStore, stack: Stack[StoredFile], *, limit_bytes: int) -> None:
        self._stored_objects = stored_objects
        self._stack = stack
        self.limit_bytes = limit_bytes
        self.damaged = 0

    def is_in_memory(self, location: str) -> bool:
        return self._stack.get_cached(_make_key(location)) is not None

    async def get(self, location: str, *, is_checked: bool = True) -> StoredFile:
        """Return a file from memory, the disk, or the storage.

        If `is_checked` is False, the content may not match its digest. If it does not, call the method again with True.

        Raises:
            TooLarge: The file exceeds `limit_bytes`.
            Corrupt: The cached copy was damaged, and is damaged again after it was loaded again.
            SeamarkError: `ObjectStore.read` failed.
        """
        file = await self._load(location)
        if not is_checked or await is_intact(file):
            return file
        # A mapped file was changed on the disk. The disk tier checks the file when it is opened again.
        self.damaged += 1
        self._stack.discard(_make_key(location))
        file = await self._load(location)
        if not await is_intact(file):
            raise Corrupt(f"The cached copy of {location} is damaged")
        return file

    async def _load(self, location: str) -> StoredFile:
        return await self._stack.get(_make_key(location), lambda: self._fetch(location), _split_stored_value)

    async def _fetch(self, location: str) -> tuple[bytes, bytes]:
        content = await self._stored_objects.read(location, limit_bytes=self.limit_bytes)
        return await asyncio.to_thread(compute_digest, content), content

    def read_stats(self) -> StackStats:
        return self._stack.read_stats()


def compute_digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


async def is_intact(file: StoredFile) -> bool:
    """Return whether the content matches its digest. Large content is checked in a thread."""
    if len(file.content) <= _INLINE_BYTES:
        return compute_digest(file.content) == file.sha256
    return await asyncio.to_thread(compute_digest, file.content) == file.sha256


def _make_key(location: str) -> str:
    return f"file/1/{location}"


def _split_stored_value(payload: memoryview) -> StoredFile:
    """Split a stored value into the digest and the content.

    Raises:
        ValueError: The value is shorter than a digest.
    """
    if len(payload) < DIGEST_BYTES:
        raise ValueError("the cached value is shorter than a digest")
    return StoredFile(bytes(payload[:DIGEST_BYTES]), payload[DIGEST_BYTES:])


@asynccontextmanager
async def open_file_cache(settings: Settings, stored_objects: ObjectStore) -> AsyncIterator[FileCache]:
    """Open the cache of this replica's files, in memory and on disk."""
    folder = Path(settings.peer_disk_folder) if settings.peer_disk_folder else settings.home / "cache" / "files"
    memory: MemoryCache[str, StoredFile] = MemoryCache(settings.peer_memory_bytes, "peer-files")
    # A mapped file counts as less than its size, because the system can remove its pages from memory.
    async with open_stack(
        memory,
        weigh=lambda file: file.size_bytes,
        weigh_mapped=lambda file: file.size_bytes // _MAPPED_SIZE_DIVISOR,
        pending_bytes_max=max(settings.peer_memory_bytes, 1 << 20),
        folder=folder,
        disk_bytes=settings.peer_disk_bytes,
        threads=_THREADS,
        name="files",
    ) as stack:
        yield FileCache(stored_objects, stack, limit_bytes=settings.peer_file_limit_bytes)
