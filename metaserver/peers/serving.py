"""The server for other replicas, on a separate port: one route, one file per answer, for requests with a valid ticket.

For each request, it waits for a slot, verifies the ticket, and checks the location against the warehouse and the
allowed locations. After that, it reads the cache or the storage.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import structlog
from aiohttp import web

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.connections import ConnectionLimits, ConnectionRunner, DirectAnswers
from seamark.formats.runtime.errors import BadRequest, ObjectMissing, SeamarkError, TooLarge, Unauthenticated
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.peers.blobs import FileCache, StoredFile
from seamark.metaserver.peers.protocol import (
    CHECK_HEADER,
    FILE_PATH,
    FROM_CACHE,
    FROM_STORAGE,
    HEAD_BYTES,
    LOCATION_HEADER,
    SOURCE_HEADER,
    TICKET_HEADER,
    AnswerHead,
    Outcome,
    PeerTickets,
    is_immutable,
)

OPERATION = "peerFile"
"""The operation name in the metrics of requests from other replicas."""
_CACHE_WAIT_S = 0.003
"""The time in seconds within which an answer must be ready to count as an answer from the cache.

Reading a mapped file takes less than 1 ms.
"""
_PIECE_BYTES = 256 << 10
"""The size of the parts in which the content is sent."""
_BACKLOG = 1024
_STATUS_DISCONNECTED = 499
"""The status in the metrics if the other replica disconnects. Proxies use the same number."""
_NO_DIGEST = bytes(32)
_log = structlog.get_logger("seamark.peers")


class RequestObserver(Protocol):
    """The interface that receives the data of each request for metrics."""

    def observe(self, operation: str, status: int, seconds: float, error: BaseException | None) -> None: ...


class PeerServer:
    """The handler of requests from other replicas.

    At most `limit` requests run at the same time. Further requests are refused with 503.
    """

    def __init__(
        self,
        address: str,
        warehouse: Warehouse,
        cache: FileCache,
        tickets: PeerTickets,
        clock: Clock,
        observer: RequestObserver,
        *,
        limit: int,
    ) -> None:
        self._address = address
        self._warehouse = warehouse
        self._cache = cache
        self._tickets = tickets
        self._clock = clock
        self._observer = observer
        self._limit = limit
        self._running_requests = 0
        self._read_tasks: set[asyncio.Task[StoredFile]] = set()

    def build_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get(FILE_PATH, self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of another replica."""
        began_s = self._clock.monotonic()
        if self._running_requests >= self._limit:
            return self._refuse(503, began_s)
        self._running_requests += 1
        try:
            location, mac = self._tickets.verify_request(
                self._address, request.headers.get(LOCATION_HEADER, ""), request.headers.get(TICKET_HEADER, "")
            )
            checked_location = str(self._warehouse.parse(location))
            if not is_immutable(checked_location):
                raise BadRequest(
                    f"The name of {checked_location!r} can be used again, so replicas do not cache the file"
                )
            response = await self._answer(request, checked_location, mac)
        except Unauthenticated:
            return self._refuse(401, began_s)
        except BadRequest as error:
            _log.warning("a replica requested a file outside the warehouse", error=error.message)
            return self._refuse(400, began_s)
        except ConnectionError:
            return self._refuse(_STATUS_DISCONNECTED, began_s)
        finally:
            self._running_requests -= 1
        self._observer.observe(OPERATION, 200, self._clock.monotonic() - began_s, None)
        return response

    def _refuse(self, status: int, began_s: float) -> web.Response:
        self._observer.observe(OPERATION, status, self._clock.monotonic() - began_s, None)
        return web.Response(status=status)

    async def _answer(self, request: web.Request, location: str, mac: bytes) -> web.StreamResponse:
        """Send the headers after at most `_CACHE_WAIT_S`, and the file when it has been read."""
        # Continue the read if the other replica disconnects, so that the next request finds the file here.
        is_checked = CHECK_HEADER in request.headers
        read_task = asyncio.get_running_loop().create_task(
            self._cache.get(location, is_checked=is_checked), name="peer-file"
        )
        self._read_tasks.add(read_task)
        read_task.add_done_callback(self._forget_task)
        # A cached file is usually read within this time. A longer read is reported as a read from the storage.
        await asyncio.wait((read_task,), timeout=_CACHE_WAIT_S)
        source = FROM_CACHE if read_task.done() else FROM_STORAGE
        response = web.StreamResponse(
            headers={SOURCE_HEADER: source, "Content-Type": "application/octet-stream", "Server": "seamark"}
        )
        result = self._make_answer_parts(read_task) if read_task.done() else None
        if result is not None:
            # With a known length, the content is not split into chunks, which would copy it on both sides.
            response.content_length = HEAD_BYTES + len(result[1])
        # This call sends the headers.
        await response.prepare(request)
        if result is None:
            await asyncio.wait((read_task,))
            result = self._make_answer_parts(read_task)
        head, content = result
        await response.write(self._tickets.seal(mac, head))
        for start in range(0, len(content), _PIECE_BYTES):
            await response.write(content[start : start + _PIECE_BYTES])
        await response.write_eof()
        return response

    def _forget_task(self, read_task: asyncio.Task[StoredFile]) -> None:
        self._read_tasks.discard(read_task)
        if not read_task.cancelled():
            # Retrieve the error: the requester may have disconnected, and no other request does it.
            read_task.exception()

    def _make_answer_parts(self, read_task: asyncio.Task[StoredFile]) -> tuple[AnswerHead, memoryview]:
        """Return the head and the content of the answer, from a task that has ended."""
        try:
            file = read_task.result()
        except ObjectMissing:
            return AnswerHead(Outcome.MISSING, 0, _NO_DIGEST), memoryview(b"")
        except TooLarge:
            return AnswerHead(Outcome.TOO_LARGE, 0, _NO_DIGEST), memoryview(b"")
        except SeamarkError as error:
            _log.info("a file for another replica was not read", error=error.message)
            return AnswerHead(Outcome.FAILED, 0, _NO_DIGEST), memoryview(b"")
        return AnswerHead(Outcome.FOUND, len(file.content), file.sha256), file.content

    async def close(self) -> None:
        for task in tuple(self._read_tasks):
            task.cancel()
        await asyncio.gather(*self._read_tasks, return_exceptions=True)


@asynccontextmanager
async def serve_peers(
    server: PeerServer,
    sock: socket.socket,
    limits: ConnectionLimits,
    tls: ssl.SSLContext | None,
    observer: RequestObserver,
    *,
    idle_timeout_s: float,
    shutdown_timeout_s: float,
) -> AsyncIterator[None]:
    """Answer requests on `sock`, a bound socket, while the context is active."""
    runner = ConnectionRunner(
        server.build_app(),
        limits,
        DirectAnswers(
            lambda status, kind, message: web.Response(status=status, body=b""),
            partial(observer.observe, OPERATION, 400, 0.0, None),
        ),
        tls=tls,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=idle_timeout_s,
        shutdown_timeout=shutdown_timeout_s,
    )
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=_BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
        await server.close()
