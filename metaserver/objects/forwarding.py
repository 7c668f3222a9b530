"""An object store that passes every request on to another; a class that changes some of them derives from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from seamark.metaserver.objects.port import ObjectInfo, ObjectStore, Upload


class ForwardingObjects:
    def __init__(self, stored: ObjectStore) -> None:
        self._stored = stored

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        return await self._stored.read(location, limit_bytes=limit_bytes)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        return await self._stored.read_range(location, start, length)

    async def create(self, location: str, data: bytes) -> None:
        await self._stored.create(location, data)

    async def exists(self, location: str) -> bool:
        return await self._stored.exists(location)

    async def delete(self, location: str) -> None:
        await self._stored.delete(location)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        return self._stored.list(prefix)

    def uploads(self, prefix: str) -> AsyncIterator[Upload]:
        return self._stored.uploads(prefix)

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return await self._stored.abort_uploads(uploads)

    async def ping(self) -> None:
        await self._stored.ping()
