"""Forwards a request to a coordinator, and returns the coordinator's response unchanged.

Invariant: the proxy reads only the data that it needs. Bodies are streamed in chunks at the speed of the slower side,
    without being decompressed. Headers are forwarded in both directions, except hop-by-hop headers (RFC 9110, 7.6.1).
    Trino derives the URIs in its responses from `X-Forwarded-*`, so responses need no change. If the client
    disconnects, the request to the coordinator is cancelled. If the coordinator's response ends early, the client's
    response also ends early.

The client's own `X-Forwarded-*` headers are dropped, because Trino decides by these headers whether a connection is
secure enough for passwords. They are kept if the proxy is configured to trust a further proxy between it and clients.
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
"""The maximum size of one header field in both directions. Headers may contain prepared statements.

By default, it is also the maximum total size of the header fields of a client's request.
"""
HEADERS_MAX = 1000
_CONNECT_S = 5.0
_READ_S = 600.0
"""The maximum time in seconds without a byte from the coordinator. Its slowest responses take a few seconds."""
_KEEPALIVE_S = 15.0
"""The idle time in seconds after which connections to coordinators are closed.

Coordinators close idle connections after minutes. The time is shorter, so that the proxy sends no request on a
connection that the coordinator is closing.
"""
_VIA = "1.1 seamark"
_HOP_BY_HOP_HEADERS = (
    *map(istr, ("Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade")),
    *map(istr, ("Proxy-Authenticate", "Proxy-Authorization")),
)
# The headers that Jetty's ForwardedRequestCustomizer and Trino accept from proxies.
_PROXY_HEADERS = (
    *map(istr, ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Prefix")),
    *map(istr, ("X-Forwarded-Proto", "X-Forwarded-Server", "X-Proxied-Https", "Proxy-Auth-Cert", "Proxy-Ssl-Id")),
)
_HEADERS_NOT_FORWARDED = (*_HOP_BY_HOP_HEADERS, *_PROXY_HEADERS, *map(istr, ("Host", "Expect", "X-Seamark")))
_log = structlog.get_logger("seamark.trino-proxy")

Body = bytes | AsyncIterable[bytes] | None
ResponseHandler = Callable[[Coordinator, aiohttp.ClientResponse, CIMultiDict[str]], Awaitable[web.StreamResponse]]
"""A function that handles a response. Its arguments are the coordinator, the response, and headers for the client."""
_BODY_BYTES_PER_SECOND_MIN = 64 << 10
"""The minimum rate at which a client must send its body, in bytes per second.

The time limit of the body grows with the received bytes at this rate.
"""
_CONNECTION_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class RefusedBody(Exception):
    """Raised if the body of a request is refused. The client receives the status and the message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ClientBody:
    """The body of a client's request, with limits of size and time.

    The time limit includes only the time for which the proxy waits for the client, and not the time that a coordinator
    needs to accept the data.

    Attributes:
        refusal: The error of the exceeded limit, or None. It is stored because aiohttp's client hides the errors of a
            body that it sends.
    """

    def __init__(self, content: aiohttp.StreamReader, *, size_max: int, timeout_s: float) -> None:
        self._content = content
        self._size_max = size_max
        self._timeout_s = timeout_s
        self._size = 0
        self._waited_s = 0.0
        self.refusal: RefusedBody | None = None

    async def readany(self) -> bytes:
        """Return the bytes that were received since the last call, or b"" at the end of the body.

        Raises:
            RefusedBody: A limit is exceeded.
        """
        # Most bodies arrive together with their headers.
        if self._content.is_eof() and self.refusal is None:
            chunk = self._content.read_nowait()
        else:
            chunk = await self._wait_for_chunk()
        self._size += len(chunk)
        if self._size > self._size_max:
            raise self._refuse(413, f"The request body is larger than {self._size_max:,} bytes (--body-bytes)")
        return chunk

    def at_eof(self) -> bool:
        return self._content.at_eof()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yield the remaining chunks of the body.

        Raises:
            RefusedBody: A limit is exceeded.
        """
        while chunk := await self.readany():
            yield chunk

    async def _wait_for_chunk(self) -> bytes:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        left_s = self._timeout_s + self._size / _BODY_BYTES_PER_SECOND_MIN - self._waited_s
        try:
            async with asyncio.timeout(left_s):
                return await self._content.readany()
        except TimeoutError:
            raise self._refuse(
                408, f"The request body took too long; {self._size:,} bytes were received in time (--body-timeout)"
            ) from None
        finally:
            self._waited_s += loop.time() - begun_s

    def _refuse(self, status: int, message: str) -> RefusedBody:
        self.refusal = RefusedBody(status, message)
        return self.refusal


@asynccontextmanager
async def open_session(tls: ssl.SSLContext | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a client session for requests to coordinators.

    The session stores no cookies, adds no headers, and does not decompress responses.
    """
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
    """Forwards requests to coordinators.

    Attributes:
        trust_forwarded: Whether clients are proxies whose `X-Forwarded-*` headers are trusted.
    """

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
        """Send a request, and return the coordinator's response, whose body has not been read.

        Args:
            method: The HTTP method.
            coordinator: The coordinator that receives the request.
            target: The escaped path and query, as the client sent them.
            headers: The headers that the coordinator receives.
            body: The body of the request, or None.
        """
        url = URL(coordinator.url + target, encoded=True)
        return await self._session.request(method, url, headers=headers, data=body, allow_redirects=False)

    def request_headers(self, request: web.BaseRequest, coordinator: Coordinator) -> CIMultiDict[str]:
        headers = _drop_headers(request.headers, _HEADERS_NOT_FORWARDED)
        trusted_headers = request.headers if self._trust else {}
        proto = trusted_headers.get("X-Forwarded-Proto") or ("https" if request.secure else "http")
        host = trusted_headers.get("X-Forwarded-Host") or request.headers.get("Host") or _make_own_address(request)
        port = trusted_headers.get("X-Forwarded-Port") or _read_port(host, proto)
        chain = [*filter(None, [trusted_headers.get("X-Forwarded-For")]), request.remote or "unknown"]
        headers["X-Forwarded-Proto"], headers["X-Forwarded-Host"], headers["X-Forwarded-Port"] = proto, host, port
        headers["X-Forwarded-For"] = ", ".join(chain)
        prefix = trusted_headers.get("X-Forwarded-Prefix", "").rstrip("/") + coordinator.prefix
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
        extra_headers: Mapping[str, str] | None = None,
        response_handler: ResponseHandler | None = None,
    ) -> web.StreamResponse:
        """Send the request to the first coordinator that can be reached, and return its response with `extra_headers`.

        The response has the status 502 if no coordinator can be reached, or if the connection to the reached
        coordinator fails. It has the status 504 if this coordinator has not answered within the time limit.

        Args:
            response_handler: A handler that creates the client's response from the coordinator's response, which is
                then not compressed. Without a handler, the coordinator's response is returned unchanged.
        """
        last_error: aiohttp.ClientError | None = None
        for coordinator in coordinators:
            headers = self.request_headers(request, coordinator)
            if response_handler is not None:
                headers["Accept-Encoding"] = "identity"
            try:
                answer = await self.send(request.method, coordinator, target, headers, body)
            except _CONNECTION_ERRORS as error:  # Nothing was sent, so the request can be sent to the next coordinator.
                _log.warning("the coordinator cannot be reached", coordinator=str(coordinator), error=str(error))
                last_error = error
                continue
            except TimeoutError:
                return make_error_response(504, f"{coordinator} has not answered in {_READ_S:g} s")
            except aiohttp.ClientError as error:
                _log.warning("the coordinator did not respond", coordinator=str(coordinator), error=repr(error))
                return make_error_response(502, f"{coordinator} did not answer: {error or type(error).__name__}")
            async with answer:
                if response_handler is None:
                    return await _send_to_client(request, answer, extra_headers or {})
                try:
                    return await response_handler(
                        coordinator, answer, make_response_headers(answer, extra_headers or {})
                    )
                except (aiohttp.ClientError, TimeoutError) as error:
                    return make_error_response(502, f"The answer ended early: {error or type(error).__name__}")
        return make_error_response(502, f"No coordinator can be reached: {last_error}")


def make_response_headers(answer: aiohttp.ClientResponse, extra_headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers that the client receives: the coordinator's headers and `extra_headers`."""
    headers = _drop_headers(answer.headers, _HOP_BY_HOP_HEADERS)
    headers.update(extra_headers)
    headers.setdefault("Server", "seamark")  # By default, aiohttp adds a header with its version.
    return headers


async def _send_to_client(
    request: web.BaseRequest, answer: aiohttp.ClientResponse, extra_headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send the coordinator's response to the client.

    A small response is sent as a whole. The chunks of other responses are sent as they arrive. If the coordinator's
    response ends before its body, the client gets the status 502.

    Raises:
        ConnectionResetError: The body ended early, after its first part was sent. The client's connection is closed.
    """
    headers = make_response_headers(answer, extra_headers)
    try:
        first_bytes = await answer.content.readany()
    except (aiohttp.ClientError, TimeoutError) as error:
        return make_error_response(
            502, f"The coordinator's response ended before its body: {error or type(error).__name__}"
        )
    if first_bytes and answer.content.at_eof():  # Most responses are small and arrive in one packet.
        headers.popall("Content-Length", None)
        return web.Response(status=answer.status, reason=answer.reason, headers=headers, body=first_bytes)
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    await response.prepare(request)
    try:
        if first_bytes:
            await response.write(first_bytes)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientPayloadError, aiohttp.ServerTimeoutError) as error:
        # The client has received a part of the body. Closing the connection shows the client that the body is
        # incomplete.
        _log.warning("the response of the coordinator ended early", url=str(answer.url.origin()), error=repr(error))
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the coordinator's response ended early") from error
    await response.write_eof()
    return response


async def read_rest(first_bytes: bytes, content: aiohttp.StreamReader | ClientBody) -> AsyncIterator[bytes]:
    """Yield a whole body. `first_bytes` contains the bytes that have already been read."""
    yield first_bytes
    async for chunk in content.iter_any():
        yield chunk


async def read_at_most(content: aiohttp.StreamReader | ClientBody, size_bytes: int) -> tuple[bytes, bool]:
    """Read the beginning of a body.

    Returns:
        The whole body and True. If the body is longer than `size_bytes`, its first `size_bytes` bytes or slightly more,
        and False.
    """
    parts: list[bytes] = []
    size = 0
    while size <= size_bytes:
        chunk = await content.readany()
        if not chunk and content.at_eof():
            return b"".join(parts), True
        parts.append(chunk)
        size += len(chunk)
    return b"".join(parts), False


def make_error_response(status: int, reason: str) -> web.Response:
    """Return a response for an error of the proxy itself."""
    return web.Response(status=status, text=f"Seamark's proxy of Trino: {reason}\n", headers={"Server": "seamark"})


def _drop_headers(headers: CIMultiDictProxy[str], names: Iterable[str]) -> CIMultiDict[str]:
    """Return the headers without `names`, and without the headers that `Connection` lists as hop-by-hop."""
    remaining_headers = CIMultiDict(headers)
    for value in headers.getall("Connection", ()):
        for name in value.split(","):
            remaining_headers.popall(name.strip(), None)
    for name in names:
        if name in remaining_headers:
            remaining_headers.popall(name)
    return remaining_headers


def _make_own_address(request: web.BaseRequest) -> str:
    """Return the address and port at which the proxy received the request. An IPv6 address is in brackets."""
    sock: Any = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if not sock:
        raise asyncio.CancelledError  # The client has closed the connection.
    host = f"[{sock[0]}]" if ":" in sock[0] else sock[0]
    return f"{host}:{sock[1]}"


def _read_port(host: str, proto: str) -> str:
    port = host.rpartition(":")[2]
    return port if port.isdigit() and not host.endswith("]") else {"https": "443"}.get(proto, "80")
