"""Sending of an answer that is generated in pieces, without blocking the event loop for long.

Small answers become one body. Larger answers are buffered first, so that an error can still become an error answer, and
then written piece by piece. Answers above `STREAM_FROM_BYTES` are streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import web
from isal import isal_zlib

from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.keys import REQUEST_ID
from seamark.metaserver.api.http.render import GZIP_FROM_BYTES, accepts_gzip

STREAM_FROM_BYTES = 4 << 20
"""The maximum size of an answer that is buffered. Larger answers are streamed."""
BODY_BYTES_MAX = 512 << 10
"""The maximum size of an answer that becomes one body, because joining megabytes would block the event loop."""
SLICE_S = 0.001
"""The time for which the server writes an answer before the event loop runs other tasks, in seconds."""
_GZIP_LEVEL = 1
_GZIP_WINDOW_BITS = 31
"""The value of zlib's window bits that selects the format gzip."""
_HEADERS = {"Content-Type": "application/json", "Vary": "Accept-Encoding"}


class _Encoder:
    """Buffers an answer, and compresses it if it is large enough."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._compressor: Any = None
        self._pieces: list[bytes] = []
        self.size_bytes = 0

    def add(self, piece: bytes) -> None:
        """Add a piece of the body. The body is compressed from the piece with which it becomes long."""
        if self._compressor is None and self._gzip and self.size_bytes + len(piece) >= GZIP_FROM_BYTES:
            self._compressor = isal_zlib.compressobj(_GZIP_LEVEL, isal_zlib.DEFLATED, _GZIP_WINDOW_BITS)
            piece = b"".join(self.take()) + piece
        if self._compressor is not None:
            piece = self._compressor.compress(piece)
        self._pieces.append(piece)
        self.size_bytes += len(piece)

    @property
    def headers(self) -> dict[str, str]:
        return _HEADERS if self._compressor is None else {**_HEADERS, "Content-Encoding": "gzip"}

    def take(self) -> list[bytes]:
        """Return and clear the buffer."""
        pieces, self._pieces = self._pieces, []
        self.size_bytes = 0
        return pieces

    def finish(self) -> list[bytes]:
        """Return the remaining pieces."""
        if self._compressor is not None:
            self._pieces.append(self._compressor.flush())
        return self.take()


Run = Callable[[Callable[[], bytes | None]], Awaitable[bytes | None]]
"""A function that calls its argument outside the event loop, and returns the result."""


async def send_pieces(request: web.Request, pieces: Iterator[bytes], *, run: Run | None = None) -> web.StreamResponse:
    """Send the pieces as one JSON answer. The event loop runs other tasks after each `SLICE_S` seconds of work.

    An error within the first `STREAM_FROM_BYTES` becomes an error answer.

    Args:
        request: The request.
        pieces: The pieces of the JSON text.
        run: A function that runs `next` outside the event loop, or None to run it in the event loop. The function is
            for pieces that take long to make.
    """
    encoder = _Encoder(gzip=accepts_gzip(request.headers))
    monotonic = request.app[COMPONENTS].clock.monotonic
    until_s = monotonic() + SLICE_S
    read_next = partial(next, pieces, None)
    while (piece := read_next() if run is None else await run(read_next)) is not None:
        encoder.add(piece)
        if encoder.size_bytes >= STREAM_FROM_BYTES:
            return await _stream_pieces(request, encoder, read_next, run)
        if monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = monotonic() + SLICE_S
    body = encoder.finish()
    size = sum(map(len, body))  # Joining megabytes into one body would block the event loop.
    if size <= BODY_BYTES_MAX:
        return web.Response(body=b"".join(body), headers=encoder.headers)
    response = await _begin_response(request, encoder, size)
    with _abort_on_error(request):
        await _write_pieces(response, body)
        await response.write_eof()
    return response


async def _stream_pieces(
    request: web.Request, encoder: _Encoder, read_next: Callable[[], bytes | None], run: Run | None
) -> web.StreamResponse:
    """Send the buffer, and then each further piece as soon as it exists.

    Args:
        request: The request.
        encoder: The encoder with the buffered pieces.
        read_next: Returns the next piece, or None at the end.
        run: A function that runs `read_next` outside the event loop, or None to run it in the event loop.
    """
    response = await _begin_response(request, encoder)
    with _abort_on_error(request):
        await _write_pieces(response, encoder.take())
        while (piece := read_next() if run is None else await run(read_next)) is not None:
            encoder.add(piece)
            await _write_pieces(response, encoder.take())
        await _write_pieces(response, encoder.finish())
        await response.write_eof()
    return response


async def _write_pieces(response: web.StreamResponse, pieces: list[bytes]) -> None:
    """Write the pieces. The event loop runs other tasks between two pieces."""
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)


async def _begin_response(request: web.Request, encoder: _Encoder, size: int | None = None) -> web.StreamResponse:
    response = web.StreamResponse(headers={**encoder.headers, "X-Request-Id": request[REQUEST_ID], "Server": "seamark"})
    response.content_length = size
    await response.prepare(request)
    return response


@contextlib.contextmanager
def _abort_on_error(request: web.Request) -> Iterator[None]:
    """Abort the connection on an error, so that no client takes a partial answer for a complete answer."""
    try:
        yield
    except BaseException:
        if request.transport is not None:
            request.transport.abort()
        raise
