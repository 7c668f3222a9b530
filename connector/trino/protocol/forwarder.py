"""One request passed on to a coordinator, and its answer passed back, as they are.

The rule kept: nothing is read that need not be. Bodies go through chunk by chunk, as fast as the slower side takes
them, compressed or not; headers go both ways but for those that are about one connection alone (RFC 9110, 7.6.1).
Trino makes the URIs of its answers from `X-Forwarded-*`, so no answer is ever changed. A client that leaves takes its
request to the coordinator along; an answer that breaks off below breaks off above.

`X-Forwarded-*` of the client's own are dropped unless the proxy is told that a proxy before it is to be trusted: Trino
decides by them whether a connection is safe enough for passwords.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import structlog
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy, istr
from yarl import URL

from seamark.connector.trino.protocol.coordinators import Coordinator

HEADER_BYTES_MAX = 1 << 20
"""Of one header field, either way: prepared statements come in headers. Of a client's whole header by default."""
HEADERS_MAX = 1000
_CONNECT_S = 5.0
_READ_S = 600.0
"""Without a byte from the coordinator; its longest answers are long-polls of seconds."""
_KEEPALIVE_S = 15.0
"""Of idle connections to coordinators, which close theirs after minutes: none is used that is just being closed."""
_VIA = "1.1 seamark"
_HOP_BY_HOP = (
    *map(istr, ("Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade")),
    *map(istr, ("Proxy-Authenticate", "Proxy-Authorization")),
)
# All that Jetty's ForwardedRequestCustomizer, and Trino, believe of a proxy.
_OF_PROXIES = (
    *map(istr, ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Prefix")),
    *map(istr, ("X-Forwarded-Proto", "X-Forwarded-Server", "X-Proxied-Https", "Proxy-Auth-Cert", "Proxy-Ssl-Id")),
)
_NOT_UP = (*_HOP_BY_HOP, *_OF_PROXIES, *map(istr, ("Host", "Expect", "X-Seamark")))
_log = structlog.get_logger("seamark.trino-proxy")

Body = bytes | AsyncIterable[bytes] | None
Passing = Callable[[Coordinator, aiohttp.ClientResponse, CIMultiDict[str]], Awaitable[web.StreamResponse]]
"""The coordinator that answered, its answer, and the headers that the client is to get."""
_BODY_RATE_LEAST = 64 << 10
"""Bytes a second that a client's body must have beyond its time."""
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class RefusedBody(Exception):
    """`status` and message are for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ClientBody:
    """A client's body within bounds of size and time. Time counts while the client is waited for: how long a
    coordinator takes to accept what came does not. `refusal` says how it fell out of them, since aiohttp's client hides
    the errors of a body that it sends."""

    def __init__(self, content: aiohttp.StreamReader, *, size_max: int, timeout_s: float) -> None:
        self._content = content
        self._size_max = size_max
        self._timeout_s = timeout_s
        self._size = 0
        self._waited_s = 0.0
        self.refusal: RefusedBody | None = None

    async def readany(self) -> bytes:
        """What has come, b"" at the end. RefusedBody."""
        if self._content.is_eof() and self.refusal is None:  # most came with their headers
            chunk = self._content.read_nowait()
        else:
            chunk = await self._wait()
        self._size += len(chunk)
        if self._size > self._size_max:
            raise self._refuse(413, f"The request body is larger than {self._size_max:,} bytes (--body-bytes)")
        return chunk

    def at_eof(self) -> bool:
        return self._content.at_eof()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """All that is still to come. RefusedBody."""
        while chunk := await self.readany():
            yield chunk

    async def _wait(self) -> bytes:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        left_s = self._timeout_s + self._size / _BODY_RATE_LEAST - self._waited_s
        try:
            async with asyncio.timeout(left_s):
                return await self._content.readany()
        except TimeoutError:
            raise self._refuse(
                408, f"The request body took too long: {self._size:,} bytes came (--body-timeout)"
            ) from None
        finally:
            self._waited_s += loop.time() - begun_s

    def _refuse(self, status: int, message: str) -> RefusedBody:
        self.refusal = RefusedBody(status, message)
        return self.refusal


@asynccontextmanager
async def open_session(tls: ssl.SSLContext | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """To the coordinators. It keeps no cookies (they are the clients'), adds no headers, and unpacks nothing."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=tls or True),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S),
        max_line_size=HEADER_BYTES_MAX,
        max_field_size=HEADER_BYTES_MAX,
        max_headers=HEADERS_MAX,
    )
    async with session:
        yield session


class Forwarder:
    """Over the coordinators' `session`. `trust_forwarded`: the client is a proxy, whose `X-Forwarded-*` are true."""

    def __init__(self, session: aiohttp.ClientSession, *, trust_forwarded: bool) -> None:
        self._session = session
        self._trust = trust_forwarded

    async def send(
        self,
        method: str,
        coordinator: Coordinator,
        target: str,
        headers: CIMultiDict[str],
        body: Body = None,
    ) -> aiohttp.ClientResponse:
        """The coordinator's answer, its body unread. `target` is a path and query as they came, still escaped."""
        url = URL(coordinator.url + target, encoded=True)
        return await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)

    def headers_up(self, request: web.BaseRequest, coordinator: Coordinator) -> CIMultiDict[str]:
        """The client's headers as the coordinator gets them."""
        headers = _without(request.headers, _NOT_UP)
        before = request.headers if self._trust else {}
        proto = before.get("X-Forwarded-Proto") or ("https" if request.secure else "http")
        host = before.get("X-Forwarded-Host") or request.headers.get("Host") or _own_address(request)
        port = before.get("X-Forwarded-Port") or _port(host, proto)
        chain = [*filter(None, [before.get("X-Forwarded-For")]), request.remote or "unknown"]
        headers["X-Forwarded-Proto"], headers["X-Forwarded-Host"], headers["X-Forwarded-Port"] = proto, host, port
        headers["X-Forwarded-For"] = ", ".join(chain)
        prefix = before.get("X-Forwarded-Prefix", "").rstrip("/") + coordinator.prefix
        if prefix:
            headers["X-Forwarded-Prefix"] = prefix
        headers.add("Via", _VIA)
        return headers

    async def forward(
        self,
        request: web.BaseRequest,
        coordinators: Sequence[Coordinator],
        target: str,
        body: Body = None,
        *,
        told: Mapping[str, str] | None = None,
        passing: Passing | None = None,
    ) -> web.StreamResponse:
        """The request sent to the first of the coordinators that can be reached, and its answer passed back with the
        headers `told`. 502 where none can be, or the one that was does not answer. `passing` takes the place of
        passing it back as it is, and gets it unpacked."""
        unreached: aiohttp.ClientError | None = None
        for coordinator in coordinators:
            headers = self.headers_up(request, coordinator)
            if passing is not None:
                headers["Accept-Encoding"] = "identity"
            try:
                answer = await self.send(request.method, coordinator, target, headers, body)
            except _UNREACHED as error:  # nothing was sent: another one may be asked
                _log.warning("coordinator not reached", coordinator=str(coordinator), error=str(error))
                unreached = error
                continue
            except TimeoutError:
                return failed(504, f"{coordinator} has not answered in {_READ_S:g} s")
            except aiohttp.ClientError as error:
                _log.warning("coordinator did not answer", coordinator=str(coordinator), error=repr(error))
                return failed(502, f"{coordinator} did not answer: {error or type(error).__name__}")
            async with answer:
                if passing is None:
                    return await _pass_back(request, answer, told or {})
                try:
                    return await passing(coordinator, answer, headers_down(answer, told or {}))
                except (aiohttp.ClientError, TimeoutError) as error:
                    return failed(502, f"The answer broke off: {error or type(error).__name__}")
        return failed(502, f"No coordinator can be reached: {unreached}")


def headers_down(answer: aiohttp.ClientResponse, told: Mapping[str, str]) -> CIMultiDict[str]:
    """The coordinator's headers as the client gets them, and those `told`."""
    headers = _without(answer.headers, _HOP_BY_HOP)
    headers.update(told)
    headers.setdefault("Server", "seamark")  # else aiohttp tells its version
    return headers


async def _pass_back(
    request: web.BaseRequest, answer: aiohttp.ClientResponse, told: Mapping[str, str]
) -> web.StreamResponse:
    headers = headers_down(answer, told)
    try:
        first = await answer.content.readany()
    except (aiohttp.ClientError, TimeoutError) as error:
        return failed(502, f"The answer broke off before its body: {error or type(error).__name__}")
    if first and answer.content.at_eof():  # most answers are small: head and body in one packet
        headers.popall("Content-Length", None)
        return web.Response(status=answer.status, reason=answer.reason, headers=headers, body=first)
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    await response.prepare(request)
    try:
        if first:
            await response.write(first)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientPayloadError, aiohttp.ServerTimeoutError) as error:
        # The client has part of it. That the connection ends too early is how HTTP says that the rest will not come.
        _log.warning("answer broke off", url=str(answer.url.origin()), error=repr(error))
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the coordinator's answer broke off") from error
    await response.write_eof()
    return response


async def rest_of(read: bytes, content: aiohttp.StreamReader | ClientBody) -> AsyncIterator[bytes]:
    """A body of which `read` has been read already."""
    yield read
    async for chunk in content.iter_any():
        yield chunk


async def read_at_most(content: aiohttp.StreamReader | ClientBody, size_bytes: int) -> tuple[bytes, bool]:
    """The body, or its beginning (a little more than `size_bytes`) where it is longer; and whether that is all."""
    parts: list[bytes] = []
    size = 0
    while size <= size_bytes:
        chunk = await content.readany()
        if not chunk and content.at_eof():
            return b"".join(parts), True
        parts.append(chunk)
        size += len(chunk)
    return b"".join(parts), False


def failed(status: int, why: str) -> web.Response:
    """An answer of the proxy's own."""
    return web.Response(status=status, text=f"Seamark's proxy of Trino: {why}\n", headers={"Server": "seamark"})


def _without(headers: CIMultiDictProxy[str], names: Iterable[str]) -> CIMultiDict[str]:
    """Also without those that `Connection` says are about this connection."""
    left = CIMultiDict(headers)
    for value in headers.getall("Connection", ()):
        for name in value.split(","):
            left.popall(name.strip(), None)
    for name in names:
        if name in left:
            left.popall(name)
    return left


def _own_address(request: web.BaseRequest) -> str:
    sock: Any = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if not sock:
        raise asyncio.CancelledError  # the connection is gone
    host = f"[{sock[0]}]" if ":" in sock[0] else sock[0]
    return f"{host}:{sock[1]}"


def _port(host: str, proto: str) -> str:
    port = host.rpartition(":")[2]
    return port if port.isdigit() and not host.endswith("]") else {"https": "443"}.get(proto, "80")
