"""Index files in memory. They are read through the cache tiers, and shared between plans; their memory is limited.

An index file that is missing, damaged, slow or of an unknown version cannot be used. The caller continues without
it, so no failure in this module fails a query. If the stored object itself is damaged, the file is quarantined: it
is no longer used, and the indexer rebuilds the index for its data files. If the storage does not answer,
the file is read again after a delay.

The memory tier counts only an eighth of the size of a mapped file, because its pages belong to the kernel's page cache.
If it counted the whole size, index files that are used in turn would evict each other, and would be mapped and checked
again each time. Running plans reference the index files that they use.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from seamark.cache.memory import MemoryCache
from seamark.cache.opening import open_stack
from seamark.cache.single_flight import SingleFlight
from seamark.cache.stack import Stack, StackStats
from seamark.formats.index.index_file import FilesTable, IndexHeader, open_index_file
from seamark.formats.index.kinds.kind import OpenedBlob, UnknownVersion
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Corrupt, ObjectMissing, SeamarkError, TooLarge
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.index.files.remote import RemoteIndexFile, open_remote
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import RegisteredIndexFile

RETRY_S = 5.0
"""The delay after which the server tries again to read an index file, in seconds."""
_DEFERRED_MAX, _DEFERRED_BYTES = 10_000, 400
"""The maximum number of index files whose next attempt is stored, and the memory of each."""

_REMOTE_PARTS_BYTES = 64 << 20
"""The memory for the parts of large index files that are read by range."""

_MAPPED_SIZE_DIVISOR = 8
"""The divisor of a mapped file's size. Its directory and page tables take at least a hundredth of the size."""

DISK_S = 0.02
"""The time that a plan waits for a large index file from the local disk before it reads the file remotely."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class OpenIndex:
    """An open index file.

    `index` evaluates queries. Its results are in the order of the data files in `files`.
    """

    location: str
    files: FilesTable
    index: OpenedBlob
    size_bytes: int


class Indexes:
    """Opens and caches index files.

    An instance belongs to one event loop.
    """

    def __init__(
        self,
        objects: ObjectStore,
        registry: Registry,
        stack: Stack[OpenIndex],
        clock: Clock,
        *,
        stored_objects: ObjectStore,
        limit_bytes: int,
        whole_bytes: int,
    ) -> None:
        """Create a cache of index files.

        Args:
            objects: The storage of index files, possibly with caches.
            registry: The registry of index files in the database.
            stack: The caches of index files in memory and on the local disk.
            clock: The clock for retries.
            stored_objects: The storage itself, without the caches that `objects` may have.
            limit_bytes: The maximum size of an index file that is read.
            whole_bytes: The maximum size of an index file that is always read as a whole. Larger files may be read by
                range.
        """
        self._objects = objects
        self._stored_objects = stored_objects
        self.registry = registry
        self._stack = stack
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._whole_bytes = whole_bytes
        self._remote_files: MemoryCache[str, RemoteIndexFile] = MemoryCache(_REMOTE_PARTS_BYTES, "remote-indexes")
        self._remote_openings: SingleFlight[str, RemoteIndexFile] = SingleFlight()
        self._fetch_tasks: dict[str, asyncio.Task[OpenIndex | None]] = {}
        self._verification_tasks: dict[str, asyncio.Task[None]] = {}
        """The verification tasks, by location of the index file."""
        self._retry_times: MemoryCache[str, float] = MemoryCache(_DEFERRED_MAX * _DEFERRED_BYTES, "index-registry")
        """The monotonic time of the next attempt to read a file, by location.

        It is infinite for a file of an unknown format version, which is never read again.
        """
        self.failures = 0
        """The number of index files that could not be used since the start."""
        self.quarantined = 0

    def find_in_memory(self, file: RegisteredIndexFile) -> OpenIndex | None:
        """Return the open file if it is in memory, otherwise None."""
        return self._stack.get_cached(_make_cache_key(file.location))

    async def open(self, file: RegisteredIndexFile) -> OpenIndex | None:
        """Open an index file, or return None if the file cannot be used.

        The method never raises.
        """
        open_file = self.find_in_memory(file)
        if open_file is not None:
            return open_file
        until_s = self._retry_times.get(file.location)
        if until_s is not None and self._clock.monotonic() < until_s:
            return None
        try:
            return await self._stack.get(
                _make_cache_key(file.location),
                lambda: self._objects.read(file.location, limit_bytes=self._limit_bytes),
                lambda data: _open_registered_file(data, file),
            )
        except (Corrupt, ObjectMissing, TooLarge) as error:
            if self._stored_objects is self._objects:
                await self._quarantine_file(file, error.message)
            else:
                # A cache may have caused the error, so read the storage itself.
                self._defer_reading(file, error.message)
                await self.verify_source([file], error.message)
        except UnknownVersion as error:
            self._defer_reading(file, str(error), until_s=math.inf)
        except SeamarkError as error:
            self._defer_reading(file, error.message)
        return None

    def is_unsupported(self, file: RegisteredIndexFile) -> bool:
        """Return whether a read has shown that this program cannot read the version of the file."""
        return self._retry_times.get(file.location) == math.inf  # Such a file is never read again.

    def fetch(self, file: RegisteredIndexFile) -> asyncio.Task[OpenIndex | None]:
        """Run `open` as a task, or return the task that already opens this file."""
        task = self._fetch_tasks.get(file.location)
        if task is None:
            task = self._fetch_tasks[file.location] = asyncio.create_task(self.open(file), name="index")
            task.add_done_callback(lambda _: self._fetch_tasks.pop(file.location))
        return task

    def is_being_fetched(self, file: RegisteredIndexFile) -> bool:
        return file.location in self._fetch_tasks

    def supports_remote_reads(self, file: RegisteredIndexFile) -> bool:
        """Return whether the file is large enough to be read by range, and within the size limit."""
        return self._whole_bytes < file.size_bytes <= self._limit_bytes

    async def open_remote(self, file: RegisteredIndexFile) -> RemoteIndexFile | None:
        """Open an index file that supports remote reads, or return None if this fails.

        An error of the storage, a damaged file and an unknown format version are logged and not raised.
        """
        remote = self._remote_files.get(file.location)
        if remote is not None:
            return remote

        async def load() -> RemoteIndexFile:
            header, open_file = await open_remote(self._objects, file)
            _check_registration(header, file)
            self._remote_files.put(file.location, open_file, open_file.size_bytes)
            return open_file

        try:
            return await self._remote_openings.run(file.location, load)
        except (SeamarkError, ValueError) as error:  # The caller reads the whole file, and this reports any damage.
            log.info("index file not opened by range", location=file.location, reason=str(error))
            return None

    async def read_remotely(
        self, file: RegisteredIndexFile, read_value: Callable[[RemoteIndexFile], Awaitable[T | None]]
    ) -> T | None:
        """Open an index file by range, and return the result of `read_value` for it.

        Returns:
            None if the file cannot be opened by range, if `read_value` returns None, or if `read_value` fails because
            the file is damaged or the storage does not answer.
        """
        remote = await self.open_remote(file)
        if remote is None:
            return None
        try:
            result = await read_value(remote)
        except ValueError as error:
            self._remote_files.discard(file.location)
            self.schedule_verification([file], str(error))
            return None
        except SeamarkError as error:
            log.info("index file not read by range", location=file.location, reason=str(error))
            return None
        # No result may mean that the file's cache is full. The next opening starts with an empty cache.
        if result is None and remote.is_full:
            self._remote_files.discard(file.location)
        elif self._remote_files.get(file.location) is remote:  # The read may have changed the size that is counted.
            self._remote_files.put(file.location, remote, remote.size_bytes)
        return result

    async def open_or_read(
        self, file: RegisteredIndexFile, read_value: Callable[[RemoteIndexFile], Awaitable[T | None]]
    ) -> OpenIndex | T | None:
        """Open an index file completely, or return the result of `read_value` for the file opened by range.

        If the file is in memory or small, the method returns the open file. Otherwise, it opens the file by range and
        calls `read_value`. If `read_value` gives no result, the whole file is loaded. The method waits as long as
        necessary.

        Returns:
            None if the file cannot be used.
        """
        open_file = self.find_in_memory(file)
        if open_file is not None or not self.supports_remote_reads(file):
            return open_file or await self.open(file)
        is_first_caller = not self.is_being_fetched(file)
        task = self.fetch(file)
        if is_first_caller:  # Reading from the local disk takes little time.
            await asyncio.wait([task], timeout=DISK_S)
        if not task.done():
            result = await self.read_remotely(file, read_value)
            if result is not None:
                return result
            await asyncio.wait([task])
        return task.result()

    def schedule_verification(self, files: Iterable[RegisteredIndexFile], reason: str) -> None:
        """Start a task for each of these files which verifies the stored index file, because a probe found damage.

        The damage may be only in a cached copy. A file whose task is still running does not get a second task.
        """
        for file in files:
            if file.location not in self._verification_tasks:
                task = asyncio.create_task(self.verify_source([file], reason), name="verify-index-file")
                self._verification_tasks[file.location] = task
                task.add_done_callback(partial(self._forget_verification, file.location))

    def _forget_verification(self, location: str, _: asyncio.Task[None]) -> None:
        del self._verification_tasks[location]

    async def verify_source(self, files: Iterable[RegisteredIndexFile], reason: str) -> None:
        """Verify the stored objects of index files after a probe found damage, which may be only in a cached copy.

        A file whose stored object is damaged or missing is quarantined. A file of an unknown format version is never
        read again. After another error, the file is read again later. The method never raises.
        """
        for file in files:
            self._stack.discard(_make_cache_key(file.location))
            try:
                data = await self._stored_objects.read(file.location, limit_bytes=self._limit_bytes)
                await asyncio.to_thread(_verify_data, memoryview(data), file)
            except UnknownVersion as error:  # The data are from the storage, so no cached copy is the cause.
                self._defer_reading(file, str(error), until_s=math.inf)
            except (ValueError, Corrupt, ObjectMissing, TooLarge) as error:
                await self._quarantine_file(file, f"{reason}; {error}")
            except SeamarkError as error:
                self._defer_reading(file, error.message)

    async def _quarantine_file(self, file: RegisteredIndexFile, reason: str) -> None:
        """Mark a damaged index file in the registry, so that no server reads it for plans.

        This server also defers reading, in case the registry cannot be changed.
        """
        self._defer_reading(file, reason)
        try:
            await self.registry.quarantine_file(file.uuid, file.location, reason)
            self.quarantined += 1
        except SeamarkError as error:
            # The file is not in the registry, or the store is unavailable. The next failure tries again.
            log.warning("index file not quarantined", location=file.location, reason=str(error))

    def _defer_reading(self, file: RegisteredIndexFile, reason: str, *, until_s: float | None = None) -> None:
        """Do not use a file until a time, count the failure, and log the reason.

        `until_s` is a time of the monotonic clock. The default is `RETRY_S` from now.
        """
        self.failures += 1
        until_s = self._clock.monotonic() + RETRY_S if until_s is None else until_s
        self._retry_times.put(file.location, until_s, _DEFERRED_BYTES)
        log.warning("index file not used", location=file.location, reason=reason)

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._fetch_tasks.values(), *self._verification_tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def read_stats(self) -> StackStats:
        return self._stack.read_stats()


def _open_registered_file(data: memoryview, file: RegisteredIndexFile) -> OpenIndex:
    """Open the data of an index file, and check that they belong to the registered file.

    Raises:
        Corrupt: The file does not match its registration.
        UnknownVersion: A server of a different version wrote the file.
    """
    content = open_index_file(data, file.location)
    _check_registration(content.header, file)
    try:
        index = KINDS[file.kind].open(content.blob)
    except UnknownVersion as error:
        raise UnknownVersion(f"{file.location}: {error}") from None
    except ValueError as error:
        raise Corrupt(f"{file.location}: {error}") from None
    if index.files != len(content.files):
        raise Corrupt(f"{file.location} indexes {index.files} data files, but lists {len(content.files)}")
    return OpenIndex(file.location, content.files, index, len(data))


def _check_registration(header: IndexHeader, file: RegisteredIndexFile) -> None:
    """Check that a header belongs to the registered index file.

    Raises:
        Corrupt: The header belongs to another table or index.
    """
    header_identity = (header.table_uuid, header.definition, header.kind)
    registered_identity = (file.uuid, file.definition, file.kind)
    if header_identity != registered_identity:
        raise Corrupt(
            f"{file.location} has table, definition and kind {header_identity}, but is registered with "
            f"{registered_identity}"
        )


def _verify_data(data: memoryview, file: RegisteredIndexFile) -> None:
    """Verify the data of an index file completely.

    Raises:
        Corrupt, ValueError: The file is damaged.
        UnknownVersion: A server of a different version wrote the file.
    """
    _open_registered_file(data, file).index.verify()


def _make_cache_key(location: str) -> str:
    return f"index/{location}"


@asynccontextmanager
async def open_indexes(
    settings: Settings,
    objects: ObjectStore,
    registry: Registry,
    clock: Clock,
    *,
    stored_objects: ObjectStore | None = None,
) -> AsyncIterator[Indexes]:
    """Open `Indexes` with its memory tier and its folder on the local disk.

    Args:
        settings: The server's settings.
        objects: The storage, possibly with caches.
        registry: The registry of index files.
        clock: The clock.
        stored_objects: The storage without caches. If it is None, `objects` is used.
    """
    folder = Path(settings.index_disk_folder) if settings.index_disk_folder else settings.home / "cache" / "indexes"
    opened_stack: AbstractAsyncContextManager[Stack[OpenIndex]] = open_stack(
        MemoryCache(settings.index_memory_bytes, "indexes"),
        weigh=lambda index: index.size_bytes,
        weigh_mapped=lambda index: index.size_bytes // _MAPPED_SIZE_DIVISOR,
        pending_bytes_max=settings.index_memory_bytes,
        folder=folder,
        disk_bytes=settings.index_disk_bytes,
        threads=settings.plan_threads or max(1, len(os.sched_getaffinity(0))),
        name="indexes",
    )
    async with opened_stack as stack:
        indexes = Indexes(
            objects,
            registry,
            stack,
            clock,
            stored_objects=stored_objects or objects,
            limit_bytes=settings.index_file_limit_bytes,
            whole_bytes=settings.index_whole_bytes,
        )
        try:
            yield indexes
        finally:
            await indexes.close()
