"""An object store that passes every request on to another store.

Subclasses change some of the requests, or the locations of the objects in the other store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from seamark.metaserver.objects.port import ObjectInfo, ObjectStore, Upload


class ForwardingObjects:
    def __init__(self, stored_objects: ObjectStore) -> None:
        self._stored_objects = stored_objects

    def _map_location(self, location: str) -> str:
        """Return the location of the same object in `_stored_objects`. Subclasses can override this method."""
        return location

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        return await self._stored_objects.read(self._map_location(location), limit_bytes=limit_bytes)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        return await self._stored_objects.read_range(self._map_location(location), start, length)

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        await self._stored_objects.create(self._map_location(location), data, durable=durable)

    async def exists(self, location: str) -> bool:
        return await self._stored_objects.exists(self._map_location(location))

    async def check_links(self, locations: Sequence[str]) -> None:
        await self._stored_objects.check_links([self._map_location(location) for location in locations])

    async def delete(self, location: str) -> None:
        await self._stored_objects.delete(self._map_location(location))

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._stored_objects.list(self._map_location(prefix))

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        return self._stored_objects.list_uploads(self._map_location(prefix))

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return await self._stored_objects.abort_uploads(uploads)

    async def ping(self) -> None:
        await self._stored_objects.ping()
