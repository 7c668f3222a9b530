"""Index files, opened: read through the cache tiers, shared by all plans, within a budget.

The rules it keeps. An index that is missing, damaged, slow or of an unknown version is no index: whoever asked goes on
without it, and no failure here fails a query. What is wrong at its source is quarantined, so that nobody meets it
again and the data files it described count as uncovered, which is what the indexer builds for. A storage that does not
answer is asked again after a while; nothing is known to be wrong then.

The memory tier counts a mapped file as if all of it were in memory. Plans that are under way hold what they use.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from cache.claims import Claims
from cache.disk import DiskTier
from cache.memory import MemoryCache
from cache.single_flight import SingleFlight
from cache.stack import Stack, StackStats
from metaserver.clock import Clock
from metaserver.errors import Corrupt, ObjectMissing, SeamarkError, TooLarge
from metaserver.index.bitmap import Bitmap
from metaserver.index.bloom import Bloom
from metaserver.index.cold import ColdBloom, open_cold, probe_cold
from metaserver.index.hashing import Hashes
from metaserver.index.index_file import FilesTable, IndexHeader, UnknownVersion, open_index_file
from metaserver.index.keys import Bytes
from metaserver.index.kinds import KINDS
from metaserver.index.record import Record
from metaserver.index.registry import Registry
from metaserver.objects.port import ObjectStore
from metaserver.settings import Settings
from metaserver.store.port import IndexFile

RETRY_S = 5.0
"""How long an index file is left alone that could not be read."""
_LATER_MAX, _LATER_BYTES = 10_000, 400
"""Locations of such files that are remembered, and what each takes."""

_COLD_BYTES = 64 << 20
"""Of large index files, what is kept to ask them by range."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class OpenIndex:
    """`index` answers by the number of a data file in `files`."""

    location: str
    files: FilesTable
    index: Bloom | Bitmap | Record
    size_bytes: int


class Indexes:
    """Belongs to one event loop."""

    def __init__(
        self,
        objects: ObjectStore,
        registry: Registry,
        stack: Stack[OpenIndex],
        clock: Clock,
        *,
        limit_bytes: int,
        whole_bytes: int,
    ) -> None:
        """`limit_bytes`: larger index files are not read; `whole_bytes`: larger bloom indexes may be asked by range."""
        self._objects = objects
        self.registry = registry
        self._stack = stack
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._whole_bytes = whole_bytes
        self._cold: MemoryCache[str, ColdBloom] = MemoryCache(_COLD_BYTES)
        self._chilling: SingleFlight[str, ColdBloom] = SingleFlight()
        self._later: MemoryCache[str, float] = MemoryCache(_LATER_MAX * _LATER_BYTES)
        """Location → monotonic time before which it is not tried again; infinity for an unknown version."""
        self.failures = 0
        """Index files that could not be used, since the start."""
        self.quarantined = 0

    def held(self, file: IndexFile) -> OpenIndex | None:
        """The opened file if memory has it, at once."""
        return self._stack.held(_key(file.location))

    async def open(self, file: IndexFile) -> OpenIndex | None:
        """None when it cannot be used, for whatever reason. Never raises."""
        held = self.held(file)
        if held is not None:
            return held
        until_s = self._later.get(file.location)
        if until_s is not None and self._clock.monotonic() < until_s:
            return None
        try:
            return await self._stack.get(
                _key(file.location),
                lambda: self._objects.read(file.location, limit_bytes=self._limit_bytes),
                lambda data: _opened(data, file),
            )
        except (Corrupt, ObjectMissing, TooLarge) as error:
            await self._quarantine(file, error.message)
        except UnknownVersion as error:
            self._leave_alone(file, str(error), until_s=math.inf)
        except SeamarkError as error:
            self._leave_alone(file, error.message)
        return None

    def is_beyond_us(self, file: IndexFile) -> bool:
        """Whether it was found to be of a version that this program cannot read, and will not read later either."""
        return self._later.get(file.location) == math.inf

    async def open_all(self, files: Sequence[IndexFile]) -> list[OpenIndex]:
        """Those that can be used, in the order given."""
        opened = await asyncio.gather(*(self.open(file) for file in files))
        return [one for one in opened if one is not None]

    def has_cold_door(self, file: IndexFile) -> bool:
        """Whether it can be asked without being here, and is large enough for that to pay."""
        return file.kind == "bloom" and self._whole_bytes < file.size_bytes <= self._limit_bytes

    async def open_cold(self, file: IndexFile) -> ColdBloom | None:
        """One that has a cold door, ready to be asked by range; None where it cannot be. Never raises."""
        cold = self._cold.get(file.location)
        if cold is not None:
            return cold

        async def load() -> ColdBloom:
            header, opened = await open_cold(self._objects, file)
            _check(header, file)
            self._cold.put(file.location, opened, opened.size_bytes)
            return opened

        try:
            return await self._chilling.run(file.location, load)
        except (SeamarkError, ValueError) as error:
            log.info("index file not opened by range", location=file.location, reason=str(error))
            return None

    async def probe_cold(self, cold: ColdBloom, hashes: Hashes) -> Bytes | None:
        """As `Bloom.probe`, by a few reads; None where that is not to be. Never raises."""
        try:
            return await probe_cold(self._objects, cold, hashes)
        except (SeamarkError, ValueError) as error:
            self._cold.discard(cold.location)
            log.info("index file not asked by range", location=cold.location, reason=str(error))
            return None

    async def suspect(self, files: Iterable[IndexFile], reason: str) -> None:
        """A probe found damage. What the caches hold may be what is damaged, so the source decides: if that is damaged
        too, the file is quarantined. Never raises."""
        for file in files:
            self._stack.discard(_key(file.location))
            try:
                data = await self._objects.read(file.location, limit_bytes=self._limit_bytes)
                await asyncio.to_thread(_verify, memoryview(data), file)
            except (ValueError, Corrupt, ObjectMissing, TooLarge) as error:
                await self._quarantine(file, f"{reason}; {error}")
            except SeamarkError as error:
                self._leave_alone(file, error.message)

    async def _quarantine(self, file: IndexFile, reason: str) -> None:
        self._leave_alone(file, reason)
        try:
            await self.registry.quarantine(file.uuid, file.location, reason)
            self.quarantined += 1
        except SeamarkError as error:  # gone from the registry, or the store is away: the next who meets it tries again
            log.warning("index file not quarantined", location=file.location, reason=str(error))

    def _leave_alone(self, file: IndexFile, reason: str, *, until_s: float | None = None) -> None:
        self.failures += 1
        until_s = self._clock.monotonic() + RETRY_S if until_s is None else until_s
        self._later.put(file.location, until_s, _LATER_BYTES)
        log.warning("index file not used", location=file.location, reason=reason)

    def stats(self) -> StackStats:
        return self._stack.stats()


def _opened(data: memoryview, file: IndexFile) -> OpenIndex:
    """Corrupt when it is not what the registry says."""
    found = open_index_file(data, file.location)
    _check(found.header, file)
    try:
        index = KINDS[file.kind].open(found.blob)
    except ValueError as error:
        raise Corrupt(f"{file.location}: {error}") from None
    if index.files != len(found.files):
        raise Corrupt(f"{file.location} indexes {index.files} data files and lists {len(found.files)}")
    return OpenIndex(file.location, found.files, index, len(data))


def _check(header: IndexHeader, file: IndexFile) -> None:
    said = (header.table_uuid, header.definition, header.kind)
    if said != (file.uuid, file.definition, file.kind):
        raise Corrupt(f"{file.location} is of table, definition and kind {said}; it is registered as of another")


def _verify(data: memoryview, file: IndexFile) -> None:
    """Reads everything. Corrupt or ValueError for what is damaged."""
    _opened(data, file).index.verify()


def _key(location: str) -> str:
    return f"index/{location}"


@asynccontextmanager
async def open_indexes(
    settings: Settings, objects: ObjectStore, registry: Registry, clock: Clock
) -> AsyncIterator[Indexes]:
    """With their memory and their folder on the local disk."""
    threads = settings.plan_threads or max(1, len(os.sched_getaffinity(0)))
    executor = ThreadPoolExecutor(threads, thread_name_prefix="indexes")
    disk = claims = None
    if settings.index_disk_bytes:
        folder = Path(settings.index_disk_folder) if settings.index_disk_folder else settings.home / "cache" / "indexes"
        disk = await asyncio.to_thread(DiskTier, folder, settings.index_disk_bytes, mapped_max=0)
        claims = Claims(folder.with_name(folder.name + ".claims"))
    stack: Stack[OpenIndex] = Stack(
        MemoryCache(settings.index_memory_bytes),
        disk,
        weigh=lambda index: index.size_bytes,
        pending_bytes_max=settings.index_memory_bytes,
        claims=claims,
        executor=executor,
    )
    try:
        yield Indexes(
            objects,
            registry,
            stack,
            clock,
            limit_bytes=settings.index_file_limit_bytes,
            whole_bytes=settings.index_whole_bytes,
        )
    finally:
        await stack.close()
        executor.shutdown(wait=True, cancel_futures=True)
