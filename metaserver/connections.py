"""What a connection may cost before and between its requests: the layer below the handlers, of the server and of the
proxy before Trino.

aiohttp's protocol has one timer, for idle connections. This module adds the rest: a time limit for the header and for a
client that does not read its answer, bounds on the header as a whole, on connections in all and per address, and
answers of our own for what is not HTTP. With TLS, a connection counts before its handshake. At a bound, the connection
that has waited longest without having sent a request makes room, then the one that is idle longest; requests under way
are never cut off. So a flood of silent connections cannot keep clients out.

Nothing that a client sent is logged here: a header that does not parse may be a token.
"""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
import traceback
from asyncio.sslproto import SSLProtocol
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, cast

import structlog
from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from seamark.metaserver.errors import RequestTimeout, TooManyRequests

CONNECTIONS_MAX = 10_000
_CONNECTIONS_LEAST = 4
_NOTICE_INTERVAL_S = 10.0
_LINGERING_S = 2.0
"""How long the rest of a body is read and thrown away after an early answer, so that the client reads the answer."""
_LEAVING_S = 0.5
_REMEMBERED = 256
"""Idle connections that are found at once."""
_HEADER_TOO_LARGE = "RequestHeaderFieldsTooLargeException"
_log = structlog.get_logger("seamark.connections")


def raise_descriptor_limit() -> int:
    """Raises the soft limit on open files to the hard one. The limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else CONNECTIONS_MAX * 4


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    connections: int
    per_address: int
    header_bytes: int
    """Of the request line and all headers of a request."""
    header_timeout_s: float
    send_timeout_s: float


@dataclass(frozen=True)
class Answers:
    """What a server says where no handler does: `respond` makes an answer from status, type and message, `unreadable`
    counts a request that is not HTTP."""

    respond: Callable[[int, str, str], web.Response]
    unreadable: Callable[[], None]


def connections_max(limit: int, *, files_each: int, least: int) -> int:
    """`limit`; where that is 0, so many that half of the files that this process may still open are left for the rest
    of its work, each taking `files_each` of them. A warning where not even `least` files are free."""
    if limit:
        return limit
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = CONNECTIONS_MAX * 2 * files_each if files == resource.RLIM_INFINITY else files - _open_files()
    limit = max(_CONNECTIONS_LEAST, min(CONNECTIONS_MAX, free // (2 * files_each)))
    if free < least:
        _log.warning("few files may be opened: raise the limit (ulimit -n)", files=files, connections=limit)
    return limit


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 64


def _address_of(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


class Connection(RequestHandler):
    """One connection; its base reads requests and writes answers."""

    __slots__ = (
        "_guard",
        "_handshake",
        "_header_bytes",
        "_header_timer",
        "_leaving",
        "_send_timer",
        "address",
        "admitted",
    )

    def __init__(self, guard: Connections, handshake: Handshake | None, **options: Any) -> None:
        """`handshake` counts in its place until it is made."""
        super().__init__(guard, **options)
        self._handshake = handshake
        self.address = ""
        self.admitted = False
        self._leaving = False
        self._guard = guard
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def idle_since(self) -> float | None:
        """When the last answer went out, by the timer of the base; None while a request is under way."""
        waits = self._waiter is not None and not self._waiter.done()
        return self._next_keepalive_close_time if waits else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.address = _address_of(transport)
        if self._handshake is not None:
            self._guard.release(self._handshake)
            self._handshake = None
        if not self._guard.admit(self):
            self._force_close = True
            open_transport = cast(asyncio.Transport, transport)
            open_transport.write(self._guard.crowded)
            open_transport.close()
            return
        self.admitted = True
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.admitted:
            return
        for timer in (self._header_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._guard.release(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._leaving:
            return
        before = self._request_count
        in_header = self._awaits_header()
        try:
            super().data_received(data)
        except Exception as error:  # noqa: BLE001  the event loop would log the message, which may quote a header
            self._guard.unreadable(self, error)
            self.force_close()
            return
        self._header_bytes = self._header_bytes + len(data) if in_header and self._request_count == before else 0
        if self._header_bytes > self._guard.limits.header_bytes:
            self._leave_header()
        elif self._request_count != before:
            self._disarm()
        elif data and self._header_timer is None and self._current_request is None and not self._messages:
            self._arm()

    def _awaits_header(self) -> bool:
        """Whether what comes next belongs to no body."""
        if self._messages:
            return self._messages[-1][1].is_eof()
        return self._current_request is None or self._current_request.content.is_eof()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self._loop.call_later(self._guard.limits.send_timeout_s, self._stop_sending)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def leave_unread(self) -> None:
        """The rest of the body is not read, not even to throw it away; the client has a moment to read the answer."""
        self._leaving = True
        self._lingering_time = _LEAVING_S
        self._pause_transport_reading()

    def _resume_transport_reading(self) -> None:
        if not self._leaving:
            super()._resume_transport_reading()

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer where none of ours was made; nothing of the exception's words, which quote the request."""
        if status == 400:
            self._guard.unreadable(self, exc)
            status, kind, message = _explain(exc)
        else:
            _log.error("request failed outside of its handler", status=status, **_traced(exc))
            kind, message = "InternalServerError", "Internal error; the server's log tells more"
        if request.writer.output_size > 0:
            raise ConnectionError("The answer has begun; it cannot become another one")
        response = self._guard.answers.respond(status, kind, message)
        response.headers["Server"] = "seamark"
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """What the base would log with the exception's words."""
        _log.error("connection failed", **_traced(kw.get("exc_info")))

    def _arm(self) -> None:
        count = self._request_count
        self._header_timer = self._loop.call_later(self._guard.limits.header_timeout_s, self._stop_waiting, count)

    def _disarm(self) -> None:
        self._guard.proven(self)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_waiting(self, count: int) -> None:
        self._header_timer = None
        if count != self._request_count or self.transport is None:
            return
        self._refuse("header too slow", self._guard.slow)
        self.force_close()

    def _leave_header(self) -> None:
        """What still comes is thrown away for a moment: to close with bytes unread would take the answer back."""
        self._leaving = True
        self._refuse("header too large", self._guard.too_large)
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = self._loop.call_later(_LEAVING_S, self.force_close)

    def _refuse(self, event: str, answer: bytes) -> None:
        self._guard.note(event, self.address)
        if self.transport is not None:
            self.transport.write(answer)

    def _stop_sending(self) -> None:
        self._send_timer = None
        self._guard.note("answer not read", self.address)
        if self.transport is not None:
            self.transport.abort()


class Handshake(SSLProtocol):
    """The TLS of one connection, which counts from before its handshake: the loop's own TLS would tell of a connection
    only when that is done, and a stranger who never begins one would keep any number of files open."""

    idle_since: float | None = None

    def __init__(self, guard: Connections, tls: ssl.SSLContext) -> None:
        self._guard = guard
        self._raw: asyncio.Transport | None = None
        self.address = ""
        super().__init__(
            asyncio.get_running_loop(),
            guard.new_connection(self),
            tls,
            cast(Any, None),
            server_side=True,
            ssl_handshake_timeout=cast(int, guard.limits.header_timeout_s),  # of seconds, in parts too
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.address = _address_of(transport)
        opened = cast(asyncio.Transport, transport)
        if not self._guard.admit(self):
            opened.abort()
            return
        self._raw = opened
        super().connection_made(opened)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._guard.release(self)
        if self._raw is not None:
            super().connection_lost(exc)

    def force_close(self) -> None:
        if self._raw is not None:
            self._raw.abort()


class Connections(web.Server):
    """All connections of one worker. `inner` has the handler of requests, and aiohttp's options."""

    def __init__(
        self, inner: web.Server, limits: ConnectionLimits, answers: Answers, tls: ssl.SSLContext | None = None
    ) -> None:
        options = {**inner._kwargs, "lingering_time": _LINGERING_S}
        super().__init__(
            inner.request_handler,
            request_factory=inner.request_factory,
            handler_cancellation=inner.handler_cancellation,
            loop=inner._loop,
            **options,
        )
        self.limits = limits
        self.answers = answers
        self.crowded = self._raw(429, TooManyRequests.type, "Too many connections; use those that are open")
        self.slow = self._raw(408, RequestTimeout.type, "The header of the request took too long to arrive")
        self.too_large = self._raw(431, _HEADER_TOO_LARGE, "The header of the request is too large")
        self._tls = tls
        self._addresses: Counter[str] = Counter()
        self._open: set[Connection | Handshake] = set()
        self._silent: dict[Connection | Handshake, None] = {}
        """Those that have not sent a request yet, oldest first."""
        self._idle: dict[str | None, deque[tuple[float, Connection | Handshake]]] = {}
        """Of an address, None for all: some that have been idle for longest, with the time since."""
        self._notices: dict[str, tuple[float, int]] = {}

    def __call__(self) -> RequestHandler:
        if self._tls is not None:
            return cast(RequestHandler, Handshake(self, self._tls))
        return self.new_connection()

    def new_connection(self, handshake: Handshake | None = None) -> Connection:
        return Connection(self, handshake, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:
        for one in [one for one in self._open if isinstance(one, Handshake)]:
            one.force_close()
        await super().shutdown(timeout)

    @property
    def count(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection | Handshake) -> bool:
        """Whether there is room for it, where needed in the place of one that does nothing."""
        address = connection.address
        if self._addresses[address] >= self.limits.per_address:
            self.note("an address has too many connections", address)
            if not self._make_room(address):
                return False
        elif len(self._open) >= self.limits.connections:
            self.note("too many connections", address)
            if not self._make_room(None):
                return False
        self._open.add(connection)
        self._silent[connection] = None
        self._addresses[address] += 1
        return True

    def proven(self, connection: Connection | Handshake) -> None:
        """It has sent the header of a request."""
        self._silent.pop(connection, None)

    def release(self, connection: Connection | Handshake) -> None:
        if connection not in self._open:
            return
        self._open.discard(connection)
        self._silent.pop(connection, None)
        left = self._addresses[connection.address] - 1
        if left > 0:
            self._addresses[connection.address] = left
        else:
            del self._addresses[connection.address]
            self._idle.pop(connection.address, None)

    def unreadable(self, connection: Connection, error: BaseException | None) -> None:
        """Counts a request that is no HTTP."""
        self.answers.unreadable()
        self.note("request is not HTTP", connection.address, error=type(error).__name__)

    def note(self, event: str, address: str, **fields: Any) -> None:
        """Logs it, at most once in a while; `more` says how often it happened since the last line."""
        now_s = self._loop.time()
        last_s, more = self._notices.get(event, (-_NOTICE_INTERVAL_S, 0))
        if now_s - last_s < _NOTICE_INTERVAL_S:
            self._notices[event] = (last_s, more + 1)
            return
        self._notices[event] = (now_s, 0)
        _log.warning(event, address=address, more=more, connections=len(self._open), **fields)

    def check_invariants(self) -> None:
        assert sum(self._addresses.values()) == len(self._open) <= self.limits.connections
        assert self._open.issuperset(self._silent)

    def _raw(self, status: int, kind: str, message: str) -> bytes:
        """An answer as it is sent where there is no request that it could be of."""
        response = self.answers.respond(status, kind, message)
        body = response.body
        assert isinstance(body, bytes)
        head = (
            f"HTTP/1.1 {status} {response.reason}\r\nServer: seamark\r\nContent-Type: {response.content_type}\r\n"
            f"Retry-After: 1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _make_room(self, address: str | None) -> bool:
        """Closes one connection, of this address where one is given. False where all have requests under way."""
        silent = (one for one in self._silent if address is None or one.address == address)
        victim = next(silent, None)
        if victim is None:
            victim = self._longest_idle(address)
        if victim is None:
            return False
        self.release(victim)
        victim.force_close()
        return True

    def _longest_idle(self, address: str | None) -> Connection | Handshake | None:
        """To look through all for each that comes would let a stranger with many idle ones stop the loop, so some are
        remembered. Those that fell idle later than that are not among the longest."""
        for is_fresh in (False, True):
            if is_fresh:
                mine = self._open if address is None else [one for one in self._open if one.address == address]
                idle = [(since, id(one), one) for one in mine if (since := one.idle_since) is not None]
                self._idle[address] = deque((since, one) for since, _, one in nsmallest(_REMEMBERED, idle))
            known = self._idle.get(address, deque())
            while known:
                since, one = known.popleft()
                if one in self._open and one.idle_since == since:
                    return one
        return None


class ConnectionRunner(web.AppRunner):
    """An application's runner whose connections are bounded. TLS is begun by them, not by the site."""

    __slots__ = ("_answers", "_limits", "_tls")

    def __init__(
        self,
        app: web.Application,
        limits: ConnectionLimits,
        answers: Answers,
        *,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self._limits = limits
        self._answers = answers
        self._tls = tls

    async def _make_server(self) -> web.Server:
        return Connections(await super()._make_server(), self._limits, self._answers, self._tls)


def _explain(error: BaseException | None) -> tuple[int, str, str]:
    """(status, type, message) for what is not HTTP, in words of our own."""
    if isinstance(error, http_exceptions.LineTooLong):
        return 431, _HEADER_TOO_LARGE, "The request line or a header is too long"
    if isinstance(error, http_exceptions.InvalidHeader):
        return 400, "BadRequestException", "A header of the request is malformed (RFC 9112, 5)"
    if isinstance(error, http_exceptions.BadStatusLine | http_exceptions.InvalidURLError):
        return 400, "BadRequestException", "The request line is malformed (RFC 9112, 3): use HTTP/1.1 and a valid path"
    if isinstance(error, http_exceptions.PayloadEncodingError):
        return 400, "BadRequestException", "The body is not encoded as the headers of the request announce"
    return 400, "BadRequestException", "The request is not HTTP/1.1 that this server reads"


def _traced(error: object) -> dict[str, Any]:
    """Where an exception came from, without its words."""
    if not isinstance(error, BaseException):
        return {}
    return {"error": type(error).__name__, "at": "".join(traceback.format_tb(error.__traceback__))}
