"""Connections that can answer a request immediately, in the call that receives it, without waking a task.

A task, a request object and a response object of aiohttp take more time than the answer with a cached range. A request
is answered immediately only if it has no body, and the connection is waiting for a request and has sent all earlier
answers. The task of aiohttp handles all other requests, refusals and errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from seamark.formats.runtime.connections import Connection, ConnectionRunner, Connections, Handshake

_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_SEND_BUFFER_MAX_BYTES = 1 << 20
_SEND_BUFFER_MIN_BYTES = 16 << 10
_KERNEL_BUDGET_DIVISOR = 4
"""The divisor of the budget that gives the share of each connection.

A connection gets its share when it is opened, and the share is larger if there are few connections. So the total of all
shares grows with the logarithm of the number of connections.
"""


class Unfinished(Protocol):
    """A started answer, which the task of the request finishes."""

    def abandon(self) -> None:
        """Release the answer. The connection calls this if it is lost before the task begins."""


ImmediateAnswer = Callable[[RawRequestMessage, asyncio.Transport], "Unfinished | bool"]
"""A function that answers a request immediately, if possible.

It returns True if it has sent the whole answer, False if it has sent nothing, or the started answer.
"""


class GatewayConnection(Connection):
    __slots__ = ("_answer_immediately", "_connections", "_kernel_bytes", "_unfinished")

    def __init__(
        self,
        connections: GatewayConnections,
        handshake: Handshake | None,
        answer_immediately: ImmediateAnswer,
        **options: Any,
    ) -> None:
        super().__init__(connections, handshake, **options)
        self._answer_immediately = answer_immediately
        self._connections = connections
        self._kernel_bytes = 0
        self._unfinished: Unfinished | None = None

    def take_unfinished(self) -> Unfinished | None:
        """Return the answer that was started for the present request, or None. A further call returns None."""
        pending, self._unfinished = self._unfinished, None
        return pending

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # With the smallest buffer, each write is tried immediately, so the number of bytes that the kernel has not
        # accepted is known. The limit must not be 0, because asyncio's TLS transport would pause the writer of an empty
        # buffer and never resume it.
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=1)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes of a client. If they complete a request, try to answer it at once.

        An immediate answer is faster, because the event loop does not need to wake the task of the connection first.
        """
        # The limit per connection changes with the number of connections.
        if self._kernel_bytes != self._connections.kernel_bytes:
            self._limit_kernel_bytes()
        waiter = self._waiter
        if waiter is None or waiter.done() or self._messages:
            super().data_received(data)
            return
        # The base class wakes the task only if there is a waiter, so remove the waiter meanwhile.
        self._waiter = None
        try:
            super().data_received(data)
            if len(self._messages) == 1 and not self._force_close:
                self._try_immediate_answer()
        finally:
            self._waiter = waiter
            if not waiter.done():
                if self._force_close:
                    waiter.cancel()
                elif self._messages:
                    waiter.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        unfinished_answer = self.take_unfinished()
        if unfinished_answer is not None:
            unfinished_answer.abandon()
        super().connection_lost(exc)

    def _limit_kernel_bytes(self) -> None:
        """Limit the unsent bytes that the kernel keeps for a client that does not read.

        Unlike the size of the send buffer, this limit does not include the bytes in transit, so it does not slow down
        distant clients.
        """
        self._kernel_bytes = self._connections.kernel_bytes
        sock = None if self.transport is None else self.transport.get_extra_info("socket")
        if sock is not None and _NOTSENT_LOWAT is not None:
            # Ignore errors, because setting the option fails if the connection is lost.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, self._kernel_bytes)

    def _try_immediate_answer(self) -> None:
        """Try to answer the first waiting request at once, without waking the task of the connection.

        If only a part of the answer is sent, keep the started answer, so that the task can finish it.
        """
        message, payload = self._messages[0]
        transport = self.transport
        if payload is not EMPTY_PAYLOAD or isinstance(message, _ErrInfo) or message.should_close or message.upgrade:
            return
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return
        result = self._answer_immediately(message, transport)
        if result is not True:  # The result is False if nothing was sent, or the started answer.
            self._unfinished = result or None
            return
        self._messages.popleft()
        if self._parser is not None:
            self._parser.message_consumed()
        if self._manager is not None:
            self._manager.requests_count += 1
        self._wait_again()

    def _wait_again(self) -> None:
        """Wait for the next request, as the base class does after an answer. Close the connection if it stays idle."""
        self._keepalive = True
        close_time = self._loop.time() + self._keepalive_timeout
        self._next_keepalive_close_time = close_time
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(close_time, self._process_keepalive)


class GatewayConnections(Connections):
    def __init__(
        self, server: web.Server, answer_immediately: ImmediateAnswer, unsent_bytes: int, *options: Any
    ) -> None:
        super().__init__(server, *options)
        self._answer_immediately = answer_immediately
        self._unsent_bytes = unsent_bytes

    @property
    def kernel_bytes(self) -> int:
        """The maximum number of unsent bytes that the kernel keeps for a new connection.

        The more connections exist, the lower is the value, so that all connections together keep about the budget. It
        is a power of two, so that it changes rarely.
        """
        share = self._unsent_bytes // (_KERNEL_BUDGET_DIVISOR * max(1, self.count))
        return max(_SEND_BUFFER_MIN_BYTES, min(_SEND_BUFFER_MAX_BYTES, 1 << share.bit_length() - 1 if share else 0))

    def create_connection(self, handshake: Handshake | None = None) -> Connection:
        return GatewayConnection(self, handshake, self._answer_immediately, loop=self._loop, **self._kwargs)


class GatewayRunner(ConnectionRunner):
    __slots__ = ("_answer_immediately", "_unsent_bytes")

    def __init__(
        self,
        app: web.Application,
        answer_immediately: ImmediateAnswer,
        unsent_bytes: int,
        *options: Any,
        **keywords: Any,
    ) -> None:
        super().__init__(app, *options, **keywords)
        self._answer_immediately = answer_immediately
        self._unsent_bytes = unsent_bytes

    async def _make_server(self) -> web.Server:
        server = await web.AppRunner._make_server(self)
        return GatewayConnections(
            server, self._answer_immediately, self._unsent_bytes, self._limits, self._answers, self._tls
        )


class SentAnswer(web.StreamResponse):
    """A response that makes aiohttp assume that the answer was already sent."""

    def __init__(self, status: int, length: int) -> None:
        super().__init__(status=status)
        self.content_length = length
        self._keep_alive = True

    async def prepare(self, request: web.BaseRequest) -> None:
        pass

    async def write_eof(self, data: Any = b"") -> None:
        pass
