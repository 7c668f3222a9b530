"""Sends an answer that comes in pieces, such that the event loop is never held up for long.

Small ones become one body. Large ones are gathered, so that one that fails is an error, and then written piece by
piece; from `STREAM_FROM_BYTES` on they are sent as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from aiohttp import web
from isal import isal_zlib

from metaserver.api.http.keys import CLOCK, REQUEST_ID
from metaserver.api.http.render import GZIP_FROM_BYTES, accepts_gzip

STREAM_FROM_BYTES = 4 << 20
"""Answers are gathered up to this, and sent as they come beyond it."""
BODY_BYTES_MAX = 512 << 10
"""Larger answers are not joined to one body: to join megabytes and to hand them over takes milliseconds."""
TURN_S = 0.001
"""How long an answer is written before others have their turn."""
_GZIP = 31
"""zlib's window bits for gzip."""
_HEADERS = {"Content-Type": "application/json", "Vary": "Accept-Encoding"}


class _Encoder:
    """Gathers an answer, packed from the moment that it is worth it."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._packer: Any = None
        self._pieces: list[bytes] = []
        self.size_bytes = 0

    def add(self, piece: bytes) -> None:
        if self._packer is None and self._gzip and self.size_bytes + len(piece) >= GZIP_FROM_BYTES:
            self._packer = isal_zlib.compressobj(1, isal_zlib.DEFLATED, _GZIP)
            piece = b"".join(self.take()) + piece
        if self._packer is not None:
            piece = self._packer.compress(piece)
        self._pieces.append(piece)
        self.size_bytes += len(piece)

    @property
    def headers(self) -> dict[str, str]:
        return _HEADERS if self._packer is None else {**_HEADERS, "Content-Encoding": "gzip"}

    def take(self) -> list[bytes]:
        """What was gathered since the last time."""
        taken, self._pieces = self._pieces, []
        self.size_bytes = 0
        return taken

    def finish(self) -> list[bytes]:
        """The rest."""
        if self._packer is not None:
            self._pieces.append(self._packer.flush())
        return self.take()


async def send(request: web.Request, pieces: Iterator[bytes]) -> web.StreamResponse:
    """The pieces as one JSON answer; others have their turn after each `TURN_S` of work.

    One that fails before it has `STREAM_FROM_BYTES` is an error.
    """
    encoder = _Encoder(gzip=accepts_gzip(request))
    monotonic = request.app[CLOCK].monotonic
    until_s = monotonic() + TURN_S
    for piece in pieces:
        encoder.add(piece)
        if encoder.size_bytes >= STREAM_FROM_BYTES:
            return await _stream(request, encoder, pieces)
        if monotonic() >= until_s:
            await asyncio.sleep(0)
            until_s = monotonic() + TURN_S
    gathered = encoder.finish()
    size = sum(map(len, gathered))
    if size <= BODY_BYTES_MAX:
        return web.Response(body=b"".join(gathered), headers=encoder.headers)
    response = await _begin(request, encoder, size)
    with _cut_off(request):
        await _write(response, gathered)
        await response.write_eof()
    return response


async def _stream(request: web.Request, encoder: _Encoder, pieces: Iterator[bytes]) -> web.StreamResponse:
    """Sends what was gathered, and the rest as it comes."""
    response = await _begin(request, encoder)
    with _cut_off(request):
        await _write(response, encoder.take())
        for piece in pieces:
            encoder.add(piece)
            await _write(response, encoder.take())
        await _write(response, encoder.finish())
        await response.write_eof()
    return response


async def _write(response: web.StreamResponse, pieces: list[bytes]) -> None:
    """Others have their turn between two of them."""
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(0)


async def _begin(request: web.Request, encoder: _Encoder, size: int | None = None) -> web.StreamResponse:
    response = web.StreamResponse(headers={**encoder.headers, "X-Request-Id": request[REQUEST_ID], "Server": "seamark"})
    response.content_length = size
    await response.prepare(request)
    return response


@contextlib.contextmanager
def _cut_off(request: web.Request) -> Iterator[None]:
    """Whoever reads an answer that fails half-way must not take it for a whole one."""
    try:
        yield
    except BaseException:
        if request.transport is not None:
            request.transport.abort()
        raise
