"""Limits of connections before and between requests, below the handlers. The server and the Trino proxy use them.

aiohttp's protocol has one timer, for idle connections. This module adds:

- time limits for the header, and for a client that does not read its answer;
- a limit on the size of the whole header;
- limits on the number of connections, in total and per address;
- answers to requests that are not HTTP.

With TLS, a connection counts before its handshake. At a limit, the connection that has waited longest without a request
is closed. If there is none, the connection that has been idle longest is closed. Requests in flight are never
interrupted. Therefore a flood of silent connections cannot exclude clients.

This module does not log data from clients, because a header that cannot be parsed may contain a token.
"""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
import traceback
from asyncio.sslproto import SSLProtocol
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, cast

import structlog
from aiohttp import StreamReader, web
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest

from seamark.formats.runtime.errors import RequestTimeout, TooManyRequests
from seamark.formats.runtime.protocol_errors import EXPECTATION_FAILED, HEADER_TOO_LARGE, explain_unreadable

CONNECTIONS_MAX = 10_000
_CONNECTIONS_MIN = 4
_OPEN_FILES_DEFAULT = 64
"""The assumed number of open files if the system does not list them."""
_NOTICE_INTERVAL_S = 10.0
"""The minimum interval between two log entries of the same event."""
_LINGERING_S = 2.0
"""The time in seconds in which the rest of a body is read and discarded after an early answer.

Otherwise the client might not receive the answer.
"""
_LEAVING_S = 0.5
"""The time in seconds in which a client can read an early answer before its connection is closed."""
_PROGRESS_BYTES = 64 << 10
"""The number of bytes of an answer that a client must read within `send_timeout_s`."""
_IDLE_CACHE_SIZE = 256
"""The number of idle connections that are cached after a search."""
_log = structlog.get_logger("seamark.connections")


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open files to the hard limit, and return the new limit.

    If there is no hard limit, the result is a number that is enough for all connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else CONNECTIONS_MAX * 4


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The limits of the connections of a worker."""

    connections: int
    """The maximum number of connections."""
    per_address: int
    """The maximum number of connections of one address."""
    header_bytes: int
    """The maximum size in bytes of the request line and all headers of a request."""
    header_timeout_s: float
    """The time in which the header of a request must arrive."""
    send_timeout_s: float
    """The time in which a client must read a part of an answer."""


@dataclass(frozen=True)
class DirectAnswers:
    """Functions for answers that are sent without a handler.

    Attributes:
        respond: Returns an answer with a status, a type and a message.
        count_unreadable: Counts a request that is not HTTP.
    """

    respond: Callable[[int, str, str], web.Response]
    count_unreadable: Callable[[], None]


def compute_connections_max(limit: int, *, files_each: int, minimum: int) -> int:
    """Return the maximum number of connections.

    If the settings have no limit, and this process can open fewer than `minimum` files, a warning is logged.

    Args:
        limit: The limit in the settings. If it is 0, the connections can use half of the files that this process can
            still open.
        files_each: The number of files that a connection needs.
        minimum: The number of files below which a warning is logged.
    """
    if limit:
        return limit
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    available = (
        CONNECTIONS_MAX * 2 * files_each if files_max == resource.RLIM_INFINITY else files_max - _count_open_files()
    )
    limit = max(_CONNECTIONS_MIN, min(CONNECTIONS_MAX, available // (2 * files_each)))
    if available < minimum:
        _log.warning(
            "this process may open only a few files: raise the limit (ulimit -n)", files=files_max, connections=limit
        )
    return limit


def _count_open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return _OPEN_FILES_DEFAULT


def _get_address(transport: asyncio.BaseTransport) -> str:
    """Return the IP address of a client, or "" if it is unknown."""
    match transport.get_extra_info("peername"):
        case (address, *_):
            return str(address)
    return ""


class Connection(RequestHandler):
    """A connection. The base class reads requests and writes answers."""

    __slots__ = (
        "_all_connections",
        "_discards_input",
        "_handshake",
        "_header_bytes",
        "_header_timer",
        "_last_body",
        "_send_timer",
        "address",
        "admitted",
    )

    def __init__(self, connections: Connections, handshake: Handshake | None, **options: Any) -> None:
        """Create a connection.

        Args:
            connections: All connections of the worker, with their limits.
            handshake: The handshake that is counted instead of the connection until it is complete.
            options: The options of aiohttp's RequestHandler.
        """
        super().__init__(connections, **options)
        self._handshake = handshake
        self.address = ""
        self.admitted = False
        """Whether the connection was accepted, and not answered with 429."""
        self._discards_input = False
        """Whether further input is discarded, because the connection will soon be closed."""
        self._all_connections = connections
        self._header_bytes = 0
        # The body of the last request whose header was parsed. While it is incomplete, the next bytes are not a header.
        self._last_body: StreamReader | None = None
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def idle_since(self) -> float | None:
        """The time since which the connection is idle plus a constant, or None while a request is in flight.

        It is the time at which the base class would close the connection. This time is always equally long after the
        last answer, so it gives the same order of connections as the time of the answer.
        """
        is_waiting = self._waiter is not None and not self._waiter.done()
        return self._next_keepalive_close_time if is_waiting else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the connection, or answer 429 and close it if there are too many connections.

        From now on, this connection is counted instead of its TLS handshake. While the server shuts down, the
        connection is closed without an answer.
        """
        self.address = _get_address(transport)
        if self._handshake is not None:
            self._all_connections.release(self._handshake)
            self._handshake = None
        if not self._all_connections.admit(self):
            self._force_close = True
            socket_transport = cast(asyncio.Transport, transport)
            if not self._all_connections.is_shut:
                socket_transport.write(self._all_connections.crowded_response)
            socket_transport.close()
            return
        self.admitted = True
        super().connection_made(transport)
        self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection and its timers."""
        if not self.admitted:
            return
        for timer in (self._header_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._all_connections.release(self)
        waiter, task = self._waiter, self._task_handler
        super().connection_lost(exc)
        if waiter is not None and waiter.done() and task is not None:
            # The task was woken for a request, but the base class can no longer create the request, so the task would
            # fail.
            task.cancel()

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser, and check the limits of the header.

        If the parser has read a request, its header is complete, and its timer ends. Otherwise, the bytes are a part of
        a header, unless the body of the previous request is incomplete.
        """
        if self._discards_input:
            return
        previous_count, previous_body = self._request_count, self._last_body
        # The base class also calls this without data, for each request.
        is_header = bool(data) and (previous_body is None or previous_body.is_eof())
        try:
            super().data_received(data)
        except Exception as error:  # noqa: BLE001  the event loop would log the message, which may quote a header
            self._all_connections.count_unreadable(self, error)
            self.force_close()
            return
        if self._request_count != previous_count:
            self._header_bytes = 0
            _, self._last_body = self._messages[-1]
            if self._header_timer is not None:
                self._all_connections.record_header(self)
                self._header_timer.cancel()
                self._header_timer = None
        elif is_header:
            self._header_bytes += len(data)
            if self._header_bytes > self._all_connections.limits.header_bytes:
                self._refuse_large_header()
            elif self._header_timer is None and not self._is_in_flight():
                self._start_header_timer()

    def _is_in_flight(self) -> bool:
        """Return whether a request is in flight: a handler runs, or a request waits in the queue.

        For a short time, the result is False although a request was taken from the queue, until its handler starts.
        """
        return self._current_request is not None or bool(self._messages)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def leave_unread(self) -> None:
        """Stop reading the body of the request, without reading and discarding the rest.

        The client has a short time to read the answer. Then the base class closes the connection.
        """
        self._discards_input = True
        self._lingering_time = _LEAVING_S
        self._pause_transport_reading()

    def _resume_transport_reading(self) -> None:
        if not self._discards_input:
            super()._resume_transport_reading()

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to a request for which no handler returned an answer.

        The answer has no text of the exception, which may quote the request.

        Raises:
            ConnectionError: The response has already started.
        """
        if status == 400:
            self._all_connections.count_unreadable(self, exc)
            status, kind, message = explain_unreadable(exc)
        else:
            _log.error("request failed outside of its handler", status=status, **_trace_error(exc))
            kind, message = "InternalServerError", "Internal error; see the server's log"
        if request.writer.output_size > 0:
            raise ConnectionError("The response has already started, so it cannot be replaced")
        response = self._all_connections.answers.respond(status, kind, message)
        response.headers["Server"] = "seamark"
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log an exception without its text, which the base class would log."""
        _log.error("connection failed", **_trace_error(kw.get("exc_info")))

    def _start_header_timer(self) -> None:
        request_count = self._request_count
        self._header_timer = self._loop.call_later(
            self._all_connections.limits.header_timeout_s, self._stop_waiting, request_count
        )

    def _stop_waiting(self, request_count: int) -> None:
        """Close the connection if no header has arrived since the timer was started.

        Args:
            request_count: The number of requests of the connection when the timer was started.
        """
        self._header_timer = None
        if request_count != self._request_count or self.transport is None:
            return
        if self._is_in_flight():  # The header after a request in flight is not late.
            self._start_header_timer()
            return
        self._refuse("header too slow", self._all_connections.slow_header_response)
        self.force_close()

    def _refuse_large_header(self) -> None:
        """Answer that the header is too large, discard further input for a short time, and then close the connection.

        If a connection is closed with unread input, the client does not receive the answer.
        """
        self._discards_input = True
        self._refuse("header too large", self._all_connections.large_header_response)
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = self._loop.call_later(_LEAVING_S, self.force_close)

    def _refuse(self, event: str, answer: bytes) -> None:
        """Log an event, and send an answer although no request was read.

        Args:
            event: The text of the event.
            answer: The complete bytes of the answer.
        """
        self._all_connections.note(event, self.address)
        if self.transport is not None:
            self.transport.write(answer)

    def _start_send_timer(self) -> None:
        """Start the timer that checks whether the client reads the answer."""
        self._send_timer = self._loop.call_later(
            self._all_connections.limits.send_timeout_s, self._check_sent, self._count_buffered_bytes()
        )

    def _count_buffered_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def _check_sent(self, previous_bytes: int) -> None:
        """Abort the connection if the client has read less than `_PROGRESS_BYTES` since the timer started.

        A slow client that reads more is not interrupted, because a large answer may need several times the limit.

        Args:
            previous_bytes: The number of bytes that waited to be sent when the timer started.
        """
        self._send_timer = None
        if self._count_buffered_bytes() <= previous_bytes - _PROGRESS_BYTES:
            self._start_send_timer()
            return
        self._all_connections.note("answer not read", self.address)
        if self.transport is not None:
            self.transport.abort()


class Handshake(SSLProtocol):
    """The TLS handshake of a connection, which counts as a connection from its start.

    The event loop's own TLS reports a connection only after the handshake. Therefore clients that never begin a
    handshake could keep any number of files open.
    """

    idle_since: float | None = None

    def __init__(self, connections: Connections, tls: ssl.SSLContext) -> None:
        self._all_connections = connections
        self._raw_transport: asyncio.Transport | None = None
        self.address = ""
        super().__init__(
            asyncio.get_running_loop(),
            connections.create_connection(self),
            tls,
            cast(Any, None),  # No `waiter`: this future would receive the result of the handshake.
            server_side=True,
            ssl_handshake_timeout=cast(int, connections.limits.header_timeout_s),  # A timeout may be a float.
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.address = _get_address(transport)
        socket_transport = cast(asyncio.Transport, transport)
        if not self._all_connections.admit(self):
            socket_transport.abort()
            return
        self._raw_transport = socket_transport
        super().connection_made(socket_transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._all_connections.release(self)
        if self._raw_transport is not None:
            super().connection_lost(exc)

    def force_close(self) -> None:
        if self._raw_transport is not None:
            self._raw_transport.abort()


class Connections(web.Server):
    """All connections of a worker.

    Args:
        inner: The server with the request handler and aiohttp's options.
        limits: The limits of the connections.
        answers: The answers that are sent without a handler.
        tls: The TLS context, or None for plain HTTP.
    """

    def __init__(
        self, inner: web.Server, limits: ConnectionLimits, answers: DirectAnswers, tls: ssl.SSLContext | None = None
    ) -> None:
        options = {**inner._kwargs, "lingering_time": _LINGERING_S}

        async def refuse() -> web.StreamResponse:
            answer = answers.respond(
                417, EXPECTATION_FAILED, "The header Expect can only be 100-continue (RFC 9110, 10.1.1)"
            )
            answer.force_close()  # The client may never send the body.
            answer.headers["Server"] = "seamark"
            return answer

        def handle(request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
            # Without this check, aiohttp would answer an unknown Expect header before any handler and middleware. Its
            # answer contains its version, and quotes the header.
            expected = request.headers.get("Expect")
            is_usual = expected is None or expected.strip().lower() in ("", "100-continue")
            return inner.request_handler(request) if is_usual else refuse()

        super().__init__(
            handle,
            request_factory=inner.request_factory,
            handler_cancellation=inner.handler_cancellation,
            loop=inner._loop,
            **options,
        )
        self.limits = limits
        self.answers = answers
        self.crowded_response = self._format_response(
            429, TooManyRequests.type, "Too many connections; use those that are open"
        )
        self.slow_header_response = self._format_response(
            408, RequestTimeout.type, "The header of the request took too long to arrive"
        )
        self.large_header_response = self._format_response(
            431, HEADER_TOO_LARGE, "The header of the request is too large"
        )
        self._tls = tls
        self.is_shut = False
        self._addresses: Counter[str] = Counter()
        self._open: set[Connection | Handshake] = set()
        self._silent: dict[Connection | Handshake, None] = {}
        """The connections that have not sent a request, oldest first."""
        self._idle: dict[str | None, deque[tuple[float, Connection | Handshake]]] = {}
        """The connections that have been idle longest, with the start of their idle time, by address.

        The key None has the connections of all addresses.
        """
        self._notices: dict[str, tuple[float, int]] = {}
        """The time of the last log entry of an event, and the number of equal events since then, by event."""

    def __call__(self) -> RequestHandler:
        if self._tls is not None:
            return cast(RequestHandler, Handshake(self, self._tls))
        return self.create_connection()

    def create_connection(self, handshake: Handshake | None = None) -> Connection:
        return Connection(self, handshake, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut = True  # Without this, a connection that was just accepted would stay open.
        for handshake in [connection for connection in self._open if isinstance(connection, Handshake)]:
            handshake.force_close()
        await super().shutdown(timeout)

    @property
    def count(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection | Handshake) -> bool:
        """Count a new connection, and return True, or return False if it is refused.

        At a limit, another connection without a request in flight is closed to make room. The connection is refused if
        there is no such connection, or if the server shuts down.
        """
        address = connection.address
        if self.is_shut:
            return False
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

    def record_header(self, connection: Connection | Handshake) -> None:
        """Record that the connection has sent the header of a request."""
        self._silent.pop(connection, None)

    def release(self, connection: Connection | Handshake) -> None:
        """Stop counting a connection, which was closed, or which the caller closes next."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        self._silent.pop(connection, None)
        remaining_count = self._addresses[connection.address] - 1
        if remaining_count > 0:
            self._addresses[connection.address] = remaining_count
        else:
            del self._addresses[connection.address]
            self._idle.pop(connection.address, None)

    def count_unreadable(self, connection: Connection, error: BaseException | None) -> None:
        """Count a request that is not HTTP, and log it at most once per interval."""
        self.answers.count_unreadable()
        self.note("request is not HTTP", connection.address, error=type(error).__name__)

    def note(self, event: str, address: str, **fields: Any) -> None:
        """Log an event, at most once per interval.

        The field `more` of the entry is the number of equal events after the previous entry that were not logged.
        """
        now_s = self._loop.time()
        last_s, skipped_count = self._notices.get(event, (-_NOTICE_INTERVAL_S, 0))
        if now_s - last_s < _NOTICE_INTERVAL_S:
            self._notices[event] = (last_s, skipped_count + 1)
            return
        self._notices[event] = (now_s, 0)
        _log.warning(event, address=address, more=skipped_count, connections=len(self._open), **fields)

    def check_invariants(self) -> None:
        assert sum(self._addresses.values()) == len(self._open) <= self.limits.connections
        assert self._open.issuperset(self._silent)

    def _format_response(self, status: int, kind: str, message: str) -> bytes:
        """Return the bytes of an answer that is sent although no request was read.

        The arguments are those of `DirectAnswers.respond`.
        """
        response = self.answers.respond(status, kind, message)
        body = response.body
        assert isinstance(body, bytes)
        head = (
            f"HTTP/1.1 {status} {response.reason}\r\nServer: seamark\r\nContent-Type: {response.content_type}\r\n"
            f"Retry-After: 1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _make_room(self, address: str | None) -> bool:
        """Close a connection and return True, or return False if all connections have requests in flight.

        A connection that has not sent a header is closed first, and otherwise the connection that was idle longest.

        Args:
            address: The address whose connections can be closed, or None for all addresses.
        """
        silent = (connection for connection in self._silent if address in (None, connection.address))
        closed_connection = next(silent, None) or self._find_longest_idle(address)
        if closed_connection is None:
            return False
        self.release(closed_connection)
        closed_connection.force_close()
        return True

    def _find_longest_idle(self, address: str | None) -> Connection | Handshake | None:
        """Return the connection that has been idle longest, or None if no connection is idle.

        A search through all connections finds several idle connections, which are cached for the next calls. Without
        the cache, a client with many idle connections could block the event loop, because each new connection would
        need a search. Connections that became idle after the search have been idle for a shorter time. A new search is
        only needed if no cached connection is still idle.

        Args:
            address: The address whose connections are searched, or None for all addresses.
        """
        for searches_again in (False, True):
            if searches_again:
                idle = [
                    (since, id(connection), connection)
                    for connection in self._open
                    if address in (None, connection.address) and (since := connection.idle_since) is not None
                ]
                self._idle[address] = deque(
                    (since, idle_connection) for since, _, idle_connection in nsmallest(_IDLE_CACHE_SIZE, idle)
                )
            idle_connections = self._idle.get(address, deque())
            while idle_connections:
                since, connection = idle_connections.popleft()
                if connection in self._open and connection.idle_since == since:
                    return connection
        return None


class ConnectionRunner(web.AppRunner):
    """A runner of an application with limited connections.

    The connections themselves start TLS, not aiohttp's site, so that unfinished handshakes count as connections.
    """

    __slots__ = ("_answers", "_limits", "_tls")

    def __init__(
        self,
        app: web.Application,
        limits: ConnectionLimits,
        answers: DirectAnswers,
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


def _trace_error(error: object) -> dict[str, Any]:
    """Return the class and the stack trace of an exception, without its text, or no fields for any other value."""
    if not isinstance(error, BaseException):
        return {}
    return {"error": type(error).__name__, "at": "".join(traceback.format_tb(error.__traceback__))}
