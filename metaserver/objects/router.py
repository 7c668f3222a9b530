"""The ObjectStore of a server: the scheme of a location selects local files or S3, which may be a local folder, too.

Every location is checked here again, independent of its caller, so that no code path reads, writes or deletes outside
the warehouse and the allowed locations. At most `CONCURRENCY` requests run concurrently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError, StorageError
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects.folder import FolderObjects
from seamark.metaserver.objects.local import LocalObjects, check_writable
from seamark.metaserver.objects.port import ObjectInfo, ObjectStore, Upload
from seamark.metaserver.objects.s3 import S3Objects
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.runtime.home import is_in_home
from seamark.metaserver.settings.settings import Settings

LOCAL_THREADS = 8
"""Files read or written concurrently: enough to overlap syncs, few enough to limit contention on one disk."""

CONCURRENCY = 64
"""Concurrent storage requests of one process; others wait. The setting requests_limit bounds their number."""


class RoutedObjects:
    """An ObjectStore that delegates each call to `local` or `s3`."""

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

    async def check_links(self, locations: Sequence[str]) -> None:
        # Most locations are files of a few folders: one of each folder is parsed.
        stores: dict[str, ObjectStore] = {}
        near = []
        for location in locations:
            folder = location.rpartition("/")[0]
            if folder not in stores:
                stores[folder] = self._route(location)[0]
            if stores[folder] is self._local:
                near.append(location)
        if near:
            await self._local.check_links(near)

    async def delete(self, location: str) -> None:
        store, checked = self._route(location)
        async with self._slots:
            await store.delete(checked)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        # Takes no slot: a listing lasts as long as its caller needs, and requests one page at a time.
        store, checked = self._route(prefix, root_ok=True)
        return store.list(checked)

    def uploads(self, prefix: str) -> AsyncIterator[Upload]:
        store, checked = self._route(prefix, root_ok=True)
        return store.uploads(checked)

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        checked = [replace(upload, location=self._route(upload.location)[1]) for upload in uploads]
        async with self._slots:
            return await self._s3.abort_uploads(checked) if checked else 0

    async def ping(self) -> None:
        """Pings every storage that has a root."""
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
    """The object storage of a server, closed at the end of the block. ConfigError for an invalid warehouse location."""
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
        s3: ObjectStore = S3Objects(_s3_roots(warehouse), settings, clock)
        if settings.s3_folder:
            files = LocalObjects(
                [settings.s3_folder], clock, threads=LOCAL_THREADS, timeout_s=settings.storage_timeout_s
            )
            stack.push_async_callback(files.close)
            s3 = FolderObjects(files, settings.s3_folder)
        yield RoutedObjects(warehouse, local=local, s3=s3, concurrency=CONCURRENCY)


def check_local_warehouse(settings: Settings) -> None:
    """Creates the warehouse's folder, if it is to be a local one. ConfigError if no files can be created there."""
    warehouse = Warehouse(settings.warehouse_uri(), settings.allowed_locations)
    root = warehouse.roots[0]
    if root.scheme != "file":
        return
    try:
        check_writable(root.file_path, _umasks(warehouse, settings).get(root.file_path))
    except StorageError as error:
        raise ConfigError(f"{error.message}; choose another warehouse with --warehouse") from None


def _s3_roots(warehouse: Warehouse) -> list[Location]:
    return [root for root in warehouse.roots if root.scheme == "s3"]


def _umasks(warehouse: Warehouse, settings: Settings) -> dict[str, int]:
    """Umasks of local roots outside the home folder; files inside it are private."""
    if not settings.warehouse_umask:
        return {}
    umask = int(settings.warehouse_umask, 8)
    paths = [root.file_path for root in warehouse.roots if root.scheme == "file"]
    return {path: umask for path in paths if not is_in_home(settings, path)}
