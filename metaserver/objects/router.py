"""One ObjectStore in front of all: the location's scheme picks local files or S3, and none leaves the warehouse.

The rule it keeps: every location is checked again here, whatever its caller checked, so no code path can read, write or
delete outside the warehouse and the allowed locations; and at most `CONCURRENCY` requests run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from metaserver.clock import Clock
from metaserver.home import is_in_home
from metaserver.objects.local import LocalObjects
from metaserver.objects.locations import Location, Warehouse
from metaserver.objects.port import ObjectInfo, ObjectStore
from metaserver.objects.s3 import S3Objects
from metaserver.settings import Settings

LOCAL_THREADS = 8
"""Files being read or written at once: enough to overlap syncs, few enough not to fight over one disk."""

CONCURRENCY = 64
"""Storage requests of one process at once; more wait. Those who wait are bounded by the setting requests_limit."""


class RoutedObjects:
    """An ObjectStore that hands each call to `local` or `s3`."""

    def __init__(self, warehouse: Warehouse, *, local: ObjectStore, s3: ObjectStore, concurrency: int) -> None:
        self._warehouse = warehouse
        self._local = local
        self._s3 = s3
        self._slots = asyncio.Semaphore(concurrency)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        store, checked = self._route(location)
        async with self._slots:
            return await store.read(checked, limit_bytes=limit_bytes)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        store, checked = self._route(location)
        async with self._slots:
            return await store.read_range(checked, start, length)

    async def create(self, location: str, data: bytes) -> None:
        store, checked = self._route(location)
        async with self._slots:
            await store.create(checked, data)

    async def exists(self, location: str) -> bool:
        store, checked = self._route(location)
        return await store.exists(checked)

    async def delete(self, location: str) -> None:
        store, checked = self._route(location)
        async with self._slots:
            await store.delete(checked)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        # No slot is held: a listing lasts as long as its caller takes, and asks for one page at a time.
        store, checked = self._route(prefix, root_ok=True)
        return store.list(checked)

    async def ping(self) -> None:
        """Asks every storage that holds a root."""
        for scheme in {root.scheme for root in self._warehouse.roots}:
            async with self._slots:
                await self._store(scheme).ping()

    def _route(self, location: str, *, root_ok: bool = False) -> tuple[ObjectStore, str]:
        parsed = self._warehouse.parse(location, root_ok=root_ok)
        return self._store(parsed.scheme), str(parsed)

    def _store(self, scheme: str) -> ObjectStore:
        return self._s3 if scheme == "s3" else self._local


@asynccontextmanager
async def open_objects(settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
    """The object storage of a server, closed when the block ends. ConfigError for a warehouse that is no location."""
    warehouse = Warehouse(settings.warehouse_uri(), settings.allowed_locations)
    async with AsyncExitStack() as stack:
        local = LocalObjects(
            [root.file_path for root in warehouse.roots if root.scheme == "file"],
            clock,
            threads=LOCAL_THREADS,
            timeout_s=settings.storage_timeout_s,
            umasks=_umasks(warehouse, settings),
        )
        stack.push_async_callback(local.close)
        s3 = S3Objects(_s3_roots(warehouse), settings, clock)
        yield RoutedObjects(warehouse, local=local, s3=s3, concurrency=CONCURRENCY)


def _s3_roots(warehouse: Warehouse) -> list[Location]:
    return [root for root in warehouse.roots if root.scheme == "s3"]


def _umasks(warehouse: Warehouse, settings: Settings) -> dict[str, int]:
    """Of those local roots that are outside the home; what is inside it is private."""
    if not settings.warehouse_umask:
        return {}
    umask = int(settings.warehouse_umask, 8)
    paths = [root.file_path for root in warehouse.roots if root.scheme == "file"]
    return {path: umask for path in paths if not is_in_home(settings, path)}
