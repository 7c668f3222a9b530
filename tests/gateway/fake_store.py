"""A store in memory behind the gateway's cache.

It answers like S3, in pieces of random sizes, and sometimes incompletely.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate

from aiohttp import web

from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.gateway.backend import S3Call
from seamark.metaserver.gateway.caching.store import StoreAnswer
from seamark.metaserver.gateway.conditions import check_read, read_range
from seamark.metaserver.gateway.s3_errors import S3Error, build_error_answer


@dataclass(frozen=True)
class StoredObject:
    data: bytes
    etag: str
    modified_s: int


class FakeStore:
    """The store of the cache, and also the backend behind it.

    `failure_rate` is the share of answers that break.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.objects: dict[str, StoredObject] = {}
        self.failure_rate = 0.0
        self.is_unavailable = False
        self.requests: list[tuple[str, str, str]] = []
        """(method, location, range) of each request for the cache."""
        self._time_s = 1_700_000_000

    def put(self, location: str, data: bytes) -> None:
        self._time_s += 1
        self.objects[location] = StoredObject(data, f'"{hashlib.md5(data).hexdigest()}"', self._time_s)

    @asynccontextmanager
    async def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AsyncIterator[StoreAnswer]:
        self.requests.append((method, f"s3://{bucket}/{key}", headers.get("range", "")))
        await self._pause()
        if self.is_unavailable or self.rng.random() < self.failure_rate:
            raise RetryLater("The store did not answer")
        status, answer_headers, data = self._answer_read(f"s3://{bucket}/{key}", headers, method)
        yield StoreAnswer(status, answer_headers, self._yield_pieces(data if method == "GET" else b""))

    def _answer_read(self, location: str, headers: Mapping[str, str], method: str) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers, data) of a read, which may have conditions and a range."""
        stored_object = self.objects.get(location)
        if stored_object is None:
            return 404, {}, b"<Error/>"
        answer_headers = {
            "etag": stored_object.etag,
            "last-modified": formatdate(stored_object.modified_s, usegmt=True),
            "content-type": "binary/octet-stream",
            "x-amz-meta-kept": "yes",
            "content-length": str(len(stored_object.data)),
        }
        try:
            check_read(headers, stored_object.etag, stored_object.modified_s)
            part = read_range(headers.get("range"), len(stored_object.data)) if method == "GET" else None
        except S3Error as error:
            return error.status, {}, b""
        if part is None:
            return 200, answer_headers, stored_object.data
        start, length = part
        answer_headers["content-range"] = f"bytes {start}-{start + length - 1}/{len(stored_object.data)}"
        return 206, answer_headers | {"content-length": str(length)}, stored_object.data[start : start + length]

    async def _yield_pieces(self, data: bytes) -> AsyncIterator[bytes]:
        """Yield `data` in pieces of random sizes.

        With the probability `failure_rate`, raise RetryLater before the end.
        """
        end = self.rng.randrange(len(data)) if data and self.rng.random() < self.failure_rate else len(data)
        start = 0
        while start < end:
            size = self.rng.choice((1, 100, 4096, 50_000, 300_000))
            await self._pause()
            yield data[start : min(end, start + size)]
            start += size
        if end < len(data):
            raise RetryLater("The store's answer ended early")

    async def _pause(self) -> None:
        """Let other tasks run up to two times, so that requests overlap in many ways."""
        for _ in range(self.rng.randrange(3)):
            await asyncio.sleep(0)

    async def answer(self, call: S3Call) -> web.StreamResponse:
        """Answer a request as the store does, without the cache. `_pause` lets other requests run between the steps."""
        location = f"s3://{call.address.bucket}/{call.address.key}"
        await self._pause()
        if call.method == "PUT":
            assert call.body is None
            data = await call.request.read()
            await self._pause()
            self.put(location, data)
            await self._pause()
            return web.Response(headers={"ETag": self.objects[location].etag})
        if call.method == "DELETE":
            self.objects.pop(location, None)
            await self._pause()
            return web.Response(status=204)
        stored_object = self.objects.get(location)
        if stored_object is None:
            return build_error_answer(S3Error("NoSuchKey", "none"), "", "", is_head=call.method == "HEAD")
        check_read(call.headers, stored_object.etag, stored_object.modified_s)
        status, answer_headers, data = self._answer_read(location, call.headers, "GET")
        if status == 416:
            raise S3Error("InvalidRange", "The requested range is not satisfiable")
        answer_headers.pop("content-length", None)
        return web.Response(status=status, headers=answer_headers, body=data)

    async def close(self) -> None:
        pass
