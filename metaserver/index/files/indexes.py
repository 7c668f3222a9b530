"""Index files, opened: read through the cache tiers, shared by all plans, within a budget.

The rules it keeps. An index that is missing, damaged, slow or of an unknown version is no index: whoever asked goes on
without it, and no failure here fails a query. What is wrong at its source is quarantined, so that nobody meets it
again and the data files it described count as uncovered, which is what the indexer builds for. A storage that does not
answer is asked again after a while; nothing is known to be wrong then.

The memory tier counts an eighth of a mapped file: its pages are the kernel's. Were they counted in full, indexes that
are asked in turns would be mapped and checked anew each time. Plans that are under way hold what they use.
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

from cache.memory import MemoryCache
from cache.opening import open_stack
from cache.single_flight import SingleFlight
from cache.stack import Stack, StackStats
from metaserver.clock import Clock
from metaserver.errors import Corrupt, ObjectMissing, SeamarkError, TooLarge
from metaserver.index.files.index_file import FilesTable, IndexHeader, UnknownVersion, open_index_file
from metaserver.index.files.registry import Registry
from metaserver.index.files.remote import ColdIndex, open_cold
from metaserver.index.kinds.kind import OpenedBlob
from metaserver.index.kinds.kinds import KINDS
from metaserver.objects.port import ObjectStore
from metaserver.settings import Settings
from metaserver.store.port import RegisteredIndexFile

RETRY_S = 5.0
"""How long an index file is left alone that could not be read."""
_LATER_MAX, _LATER_BYTES = 10_000, 400
"""Locations of such files that are remembered, and what each takes."""

_COLD_BYTES = 64 << 20
"""Of large index files, what is kept to ask them by range."""

_MAPPED_SHARE = 8
"""Of a mapped file, what counts: its directory, and page tables, are a hundredth at least."""

DISK_S = 0.02
"""How long a large index file may take to come from the local disk before it is asked from afar."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class OpenIndex:
    """`index` answers by the number of a data file in `files`."""

    location: str
    files: FilesTable
    index: OpenedBlob
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
        """`limit_bytes`: larger index files are not read; `whole_bytes`: larger ones may be asked by range."""
        self._objects = objects
        self.registry = registry
        self._stack = stack
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._whole_bytes = whole_bytes
        self._cold: MemoryCache[str, ColdIndex] = MemoryCache(_COLD_BYTES)
        self._chilling: SingleFlight[str, ColdIndex] = SingleFlight()
        self._fetching: dict[str, asyncio.Task[OpenIndex | None]] = {}
        self._suspected: dict[str, asyncio.Task[None]] = {}
        """By location: looked at behind those who found them damaged."""
        self._later: MemoryCache[str, float] = MemoryCache(_LATER_MAX * _LATER_BYTES)
        """Location → monotonic time before which it is not tried again; infinity for an unknown version."""
        self.failures = 0
        """Index files that could not be used, since the start."""
        self.quarantined = 0

    def held(self, file: RegisteredIndexFile) -> OpenIndex | None:
        """The opened file if memory has it, at once."""
        return self._stack.cached(_key(file.location))

    async def open(self, file: RegisteredIndexFile) -> OpenIndex | None:
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

    def is_beyond_us(self, file: RegisteredIndexFile) -> bool:
        """Whether it was found to be of a version that this program cannot read, and will not read later either."""
        return self._later.get(file.location) == math.inf

    def fetch(self, file: RegisteredIndexFile) -> asyncio.Task[OpenIndex | None]:
        """`open`, one at a time of each file, whoever waits for it, and for however long."""
        task = self._fetching.get(file.location)
        if task is None:
            task = self._fetching[file.location] = asyncio.create_task(self.open(file), name="index")
            task.add_done_callback(lambda _: self._fetching.pop(file.location))
        return task

    def is_coming(self, file: RegisteredIndexFile) -> bool:
        return file.location in self._fetching

    def has_cold_door(self, file: RegisteredIndexFile) -> bool:
        """Whether it can be asked without being here, and is large enough for that to pay."""
        return self._whole_bytes < file.size_bytes <= self._limit_bytes

    async def open_cold(self, file: RegisteredIndexFile) -> ColdIndex | None:
        """One that has a cold door, ready to be asked by range; None where it cannot be. Never raises."""
        cold = self._cold.get(file.location)
        if cold is not None:
            return cold

        async def load() -> ColdIndex:
            header, opened = await open_cold(self._objects, file)
            _check(header, file)
            self._cold.put(file.location, opened, opened.size_bytes)
            return opened

        try:
            return await self._chilling.run(file.location, load)
        except (SeamarkError, ValueError) as error:  # who reads the whole file finds out whether it is damaged
            log.info("index file not opened by range", location=file.location, reason=str(error))
            return None

    async def by_range(self, file: RegisteredIndexFile, ask: Callable[[ColdIndex], Awaitable[T | None]]) -> T | None:
        """What `ask` makes of an index file that is not here; None where it cannot be opened by range, or is not to be
        asked so, or breaks. Never raises what `ask` raises for damage and for a storage that does not answer."""
        cold = await self.open_cold(file)
        if cold is None:
            return None
        try:
            said = await ask(cold)
        except ValueError as error:
            self._cold.discard(file.location)
            self.suspect_soon([file], str(error))
            return None
        except SeamarkError as error:
            log.info("index file not asked by range", location=file.location, reason=str(error))
            return None
        if said is None and cold.is_full:
            self._cold.discard(file.location)
        elif self._cold.get(file.location) is cold:
            self._cold.put(file.location, cold, cold.size_bytes)
        return said

    async def ready(
        self, file: RegisteredIndexFile, ask: Callable[[ColdIndex], Awaitable[T | None]]
    ) -> OpenIndex | T | None:
        """The opened file where it is here or small, else what `ask` makes of it by range, else the file once it is
        here, however long that takes; None when it cannot be used."""
        held = self.held(file)
        if held is not None or not self.has_cold_door(file):
            return held or await self.open(file)
        fresh = not self.is_coming(file)
        coming = self.fetch(file)
        if fresh:  # the local disk may have it, which takes no time
            await asyncio.wait([coming], timeout=DISK_S)
        if not coming.done():
            said = await self.by_range(file, ask)
            if said is not None:
                return said
            await asyncio.wait([coming])
        return coming.result()

    def suspect_soon(self, files: Iterable[RegisteredIndexFile], reason: str) -> None:
        """`suspect`, behind whoever found damage."""
        for file in files:
            if file.location not in self._suspected:
                task = asyncio.create_task(self.suspect([file], reason), name="suspect")
                self._suspected[file.location] = task
                task.add_done_callback(partial(self._looked_at, file.location))

    def _looked_at(self, location: str, _: asyncio.Task[None]) -> None:
        del self._suspected[location]

    async def suspect(self, files: Iterable[RegisteredIndexFile], reason: str) -> None:
        """A probe found damage. What the caches hold may be what is damaged, so the source decides: if that is damaged
        too, the file is quarantined. Never raises."""
        for file in files:
            self._stack.discard(_key(file.location))
            try:
                data = await self._objects.read(file.location, limit_bytes=self._limit_bytes)
                await asyncio.to_thread(_verify, memoryview(data), file)
            except UnknownVersion as error:  # nothing that is here was read from it
                self._leave_alone(file, str(error), until_s=math.inf)
            except (ValueError, Corrupt, ObjectMissing, TooLarge) as error:
                await self._quarantine(file, f"{reason}; {error}")
            except SeamarkError as error:
                self._leave_alone(file, error.message)

    async def _quarantine(self, file: RegisteredIndexFile, reason: str) -> None:
        self._leave_alone(file, reason)
        try:
            await self.registry.quarantine(file.uuid, file.location, reason)
            self.quarantined += 1
        except SeamarkError as error:  # gone from the registry, or the store is away: the next who meets it tries again
            log.warning("index file not quarantined", location=file.location, reason=str(error))

    def _leave_alone(self, file: RegisteredIndexFile, reason: str, *, until_s: float | None = None) -> None:
        self.failures += 1
        until_s = self._clock.monotonic() + RETRY_S if until_s is None else until_s
        self._later.put(file.location, until_s, _LATER_BYTES)
        log.warning("index file not used", location=file.location, reason=reason)

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self._fetching.values(), *self._suspected.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stats(self) -> StackStats:
        return self._stack.stats()


def _opened(data: memoryview, file: RegisteredIndexFile) -> OpenIndex:
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


def _check(header: IndexHeader, file: RegisteredIndexFile) -> None:
    said = (header.table_uuid, header.definition, header.kind)
    if said != (file.uuid, file.definition, file.kind):
        raise Corrupt(f"{file.location} is of table, definition and kind {said}; it is registered as of another")


def _verify(data: memoryview, file: RegisteredIndexFile) -> None:
    """Reads everything. Corrupt or ValueError for what is damaged."""
    _opened(data, file).index.verify()


def _key(location: str) -> str:
    return f"index/{location}"


@asynccontextmanager
async def open_indexes(
    settings: Settings, objects: ObjectStore, registry: Registry, clock: Clock
) -> AsyncIterator[Indexes]:
    """With their memory and their folder on the local disk."""
    folder = Path(settings.index_disk_folder) if settings.index_disk_folder else settings.home / "cache" / "indexes"
    files_in: AbstractAsyncContextManager[Stack[OpenIndex]] = open_stack(
        MemoryCache(settings.index_memory_bytes),
        weigh=lambda index: index.size_bytes,
        weigh_mapped=lambda index: index.size_bytes // _MAPPED_SHARE,
        pending_bytes_max=settings.index_memory_bytes,
        folder=folder,
        disk_bytes=settings.index_disk_bytes,
        threads=settings.plan_threads or max(1, len(os.sched_getaffinity(0))),
        name="indexes",
    )
    async with files_in as stack:
        indexes = Indexes(
            objects,
            registry,
            stack,
            clock,
            limit_bytes=settings.index_file_limit_bytes,
            whole_bytes=settings.index_whole_bytes,
        )
        try:
            yield indexes
        finally:
            await indexes.close()
