"""The ObjectStore of a server, which chooses the storage by the scheme of a location.

See `metaserver/objects/storages.py` for the storages.

Every location is checked here again, even if the caller has checked it. So no code path reads, writes or
deletes outside the warehouse and the allowed locations. At most `CONCURRENT_REQUESTS_MAX` requests run at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from seamark.formats.runtime.clock import Clock
from seamark.formats.storage.locations import Location
from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore, Upload
from seamark.metaserver.objects.storages import SERVER_STORAGES
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.settings.settings import Settings

CONCURRENT_REQUESTS_MAX = 64
"""The maximum number of concurrent storage requests of one process.

Further requests wait. The setting requests_limit limits their number.
"""


class RoutedObjects:
    """An ObjectStore that passes each call on to the store of the location's scheme.

    Args:
        warehouse: The warehouse that contains all accepted locations.
        stores: The stores by scheme. There is a store for the scheme of each root.
        concurrency: The maximum number of requests that run at the same time.
    """

    def __init__(self, warehouse: Warehouse, stores: Mapping[str, ObjectStore], *, concurrency: int) -> None:
        self._warehouse = warehouse
        self._stores = stores
        self._slots = asyncio.Semaphore(concurrency)

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        store, checked_location = self._find_route(location)
        async with self._slots:
            return await store.read(checked_location, limit_bytes=limit_bytes)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        store, checked_location = self._find_route(location)
        async with self._slots:
            return await store.read_range(checked_location, start, length)

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        store, checked_location = self._find_route(location)
        async with self._slots:
            await store.create(checked_location, data, durable=durable)

    async def exists(self, location: str) -> bool:
        store, checked_location = self._find_route(location)
        return await store.exists(checked_location)

    async def check_links(self, locations: Sequence[str]) -> None:
        """Check that none of the locations is a symbolic link or behind a link, in storages that can have links."""
        # Most locations are in a few folders, so parse only one location of each folder.
        schemes_by_folder: dict[str, str] = {}
        locations_by_scheme: dict[str, list[str]] = {}
        for location in locations:
            folder = location.rpartition("/")[0]
            scheme = schemes_by_folder.get(folder)
            if scheme is None:
                scheme = schemes_by_folder[folder] = self._warehouse.parse(location).scheme
            locations_by_scheme.setdefault(scheme, []).append(location)
        for scheme, locations_of_scheme in locations_by_scheme.items():
            if STORAGES[scheme].has_links:
                await self._stores[scheme].check_links(locations_of_scheme)

    async def delete(self, location: str) -> None:
        store, checked_location = self._find_route(location)
        async with self._slots:
            await store.delete(checked_location)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        # A listing takes no slot, because it can last long, and requests one page at a time.
        store, checked_location = self._find_route(prefix, root_ok=True)
        return store.list(checked_location)

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        store, checked_location = self._find_route(prefix, root_ok=True)
        return store.list_uploads(checked_location)

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        uploads_by_scheme: dict[str, list[Upload]] = {}
        for upload in uploads:
            parsed_location = self._warehouse.parse(upload.location)
            uploads_by_scheme.setdefault(parsed_location.scheme, []).append(
                replace(upload, location=str(parsed_location))
            )
        aborted_count = 0
        for scheme, uploads_of_scheme in uploads_by_scheme.items():
            async with self._slots:
                aborted_count += await self._stores[scheme].abort_uploads(uploads_of_scheme)
        return aborted_count

    async def ping(self) -> None:
        """Check that every storage that has a root answers."""
        for store in self._stores.values():
            async with self._slots:
                await store.ping()

    def _find_route(self, location: str, *, root_ok: bool = False) -> tuple[ObjectStore, str]:
        parsed_location = self._warehouse.parse(location, root_ok=root_ok)
        return self._stores[parsed_location.scheme], str(parsed_location)


@asynccontextmanager
async def open_objects(settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
    """Open the object storage of a server. When the context ends, close it.

    Raises:
        ConfigError: The warehouse or an allowed location is invalid.
    """
    warehouse = Warehouse(settings.make_warehouse_uri(), settings.allowed_locations)
    roots_by_scheme: dict[str, list[Location]] = {}
    for root in warehouse.roots:
        roots_by_scheme.setdefault(root.scheme, []).append(root)
    async with AsyncExitStack() as stack:
        stores = {
            scheme: await stack.enter_async_context(SERVER_STORAGES[scheme].open(roots, settings, clock))
            for scheme, roots in roots_by_scheme.items()
        }
        yield RoutedObjects(warehouse, stores, concurrency=CONCURRENT_REQUESTS_MAX)


def prepare_warehouse_root(settings: Settings) -> None:
    """Check the location of the warehouse before a server starts. Create a local folder if it is missing.

    Raises:
        ConfigError: No objects can be created in the warehouse.
    """
    root = Warehouse(settings.make_warehouse_uri(), settings.allowed_locations).roots[0]
    SERVER_STORAGES[root.scheme].prepare_root(root, settings)
