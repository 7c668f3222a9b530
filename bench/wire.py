"""The HTTP/1.1 client of the load generator: keep-alive, prepared requests, answers that are split but not parsed.

An ordinary client needs more CPU for each request than the measured servers, so it would measure itself. This client
implements only the body formats of the servers: Content-Length and chunked. Every report contains the load of the
generator (`generator_cpu`: a value near 1 means that the generator, not the server, was the limit).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast


class LoadError(Exception):
    """The server violated the protocol, closed a connection, or failed a request; the measurement is invalid."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as bytes.

    Attributes:
        head: The method is HEAD, so the answer has no body.
        counted_statuses: The statuses of successful answers.
        tolerated_statuses: The statuses of answers that are neither successes nor failures.
    """

    raw: bytes
    head: bool = False
    counted_statuses: frozenset[int] = frozenset({200, 204})
    tolerated_statuses: frozenset[int] = frozenset()
    label: str = ""


@dataclass(slots=True)
class Response:
    status: int
    header: bytes
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def get_field(self, name: str) -> str:
        """Return the value of a header, or an empty text if it is missing."""
        for line in self.header.split(b"\r\n"):
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode()
        return ""


def build_request(
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    counted_statuses: tuple[int, ...] = (200, 204),
    tolerated_statuses: tuple[int, ...] = (),
    label: str = "",
) -> Request:
    """Return a request as bytes. `body` is any JSON value, or bytes that are sent unchanged."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Accept: application/json"]
    if payload:
        lines += ["Content-Type: application/json", f"Content-Length: {len(payload)}"]
    elif method == "POST":
        lines.append("Content-Length: 0")
    lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
    raw = ("\r\n".join(lines) + "\r\n\r\n").encode() + payload
    return Request(raw, method == "HEAD", frozenset(counted_statuses), frozenset(tolerated_statuses), label or method)


_STATUS_SLICE = slice(9, 12)
"""The bytes of the status in a header that begins with, for example, `HTTP/1.1 200`."""
_LENGTH_FIELD = b"\r\ncontent-length:"


class Connection(asyncio.BufferedProtocol):
    """One connection, with one request at a time.

    The event loop writes received bytes directly into the buffer from which answers are cut.
    """

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 18)
        self._buffered_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Response] | None = None
        self._head = False
        self._status = 0
        self._header = b""
        self._body_start = -1
        self._length = -1
        self._chunk_position = 0

    @staticmethod
    async def open(port: int) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        return connection

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def ask(self, request: Request) -> Response:
        assert self._transport is not None
        assert self._waiter is None, "the connection is still waiting for the answer to the previous request"
        self._waiter = asyncio.get_running_loop().create_future()
        self._head = request.head
        self._transport.write(request.raw)
        return await self._waiter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The class of uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(LoadError(f"the server closed the connection before it answered ({exc})"))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._buffered_bytes == len(self._buffer):
            self._grow(2 * len(self._buffer))
        return memoryview(self._buffer)[self._buffered_bytes :]

    def _grow(self, size: int) -> None:
        larger_buffer = bytearray(size)
        larger_buffer[: self._buffered_bytes] = memoryview(self._buffer)[: self._buffered_bytes]
        self._buffer = larger_buffer  # It must be a new buffer, because the old buffer may still be exported.

    def buffer_updated(self, nbytes: int) -> None:
        self._buffered_bytes += nbytes
        if self._body_start < 0 and not self._read_header():
            return
        body = self._parse_body()
        if body is not None:
            answer = Response(self._status, self._header, body)
            self._buffered_bytes = 0
            self._body_start = -1
            waiter, self._waiter = self._waiter, None
            if waiter is not None and not waiter.done():
                waiter.set_result(answer)

    def _read_header(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, self._buffered_bytes)
        if end < 0:
            return False
        self._header = bytes(self._buffer[:end])
        self._status = int(self._header[_STATUS_SLICE])
        self._body_start = self._chunk_position = end + 4
        lower_header = self._header.lower()
        offset = lower_header.find(_LENGTH_FIELD)
        if self._head or self._status in (204, 304):
            self._length = 0
        elif offset >= 0:
            start = offset + len(_LENGTH_FIELD)
            self._length = int(lower_header[start : (lower_header + b"\r\n").find(b"\r\n", start)])
            if len(self._buffer) < self._body_start + self._length:
                self._grow(self._body_start + self._length)
        elif b"\r\ntransfer-encoding: chunked" in lower_header:
            self._length = -1
        else:
            raise LoadError(f"the answer has neither Content-Length nor chunked encoding: {self._header!r}")
        return True

    def _parse_body(self) -> bytes | None:
        if self._length >= 0:
            end = self._body_start + self._length
            return bytes(memoryview(self._buffer)[self._body_start : end]) if self._buffered_bytes >= end else None
        while (line_end := self._buffer.find(b"\r\n", self._chunk_position, self._buffered_bytes)) >= 0:
            size = self._parse_chunk_size(self._chunk_position, line_end)
            chunk_end = line_end + 2 + size + 2
            if self._buffered_bytes < chunk_end:
                return None
            if size == 0:
                return self._join_chunks()
            self._chunk_position = chunk_end
        return None

    def _parse_chunk_size(self, start: int, end: int) -> int:
        return int(bytes(self._buffer[start:end]).split(b";")[0], 16)

    def _join_chunks(self) -> bytes:
        parts, offset = [], self._body_start
        while True:
            line_end = self._buffer.find(b"\r\n", offset, self._buffered_bytes)
            size = self._parse_chunk_size(offset, line_end)
            if size == 0:
                return b"".join(parts)
            parts.append(memoryview(self._buffer)[line_end + 2 : line_end + 2 + size])
            offset = line_end + 2 + size + 2
