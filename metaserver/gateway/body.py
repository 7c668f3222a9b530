"""The body of a request, read in pieces within limits of size and time; never kept as a whole.

The rule: a reader gets the last piece of a body only after everything that the signature covers has been verified, so
that a backend that needs all bytes before it stores an object never stores a forged or truncated object. The rights
are confirmed again at that point: a body may take hours, in which its table is dropped and its place another table's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.gateway.aws_chunked import STREAMING, ChunkDecoder
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.gateway.sigv4 import SignatureClaim
from seamark.metaserver.objects.s3_scope import UNSIGNED_PAYLOAD

RATE_LEAST = 64 << 10
"""Bytes a second that a body must have beyond its timeout."""
FRAMING_BYTES_MAX = 1 << 20
"""Of an aws-chunked body, beyond as many bytes as its data has."""
PIECE_BYTES = 256 << 10
"""The largest piece: what a request holds in memory is a few of them."""


class Body:
    """`length` is that of the data, without the framing of aws-chunked; `is_chunked` whether there is such framing."""

    def __init__(
        self,
        request: web.Request,
        claim: SignatureClaim,
        key: bytes,
        clock: Clock,
        confirm: Callable[[], Awaitable[None]],
        *,
        limit_bytes: int,
        timeout_s: float,
    ) -> None:
        """S3Error for a body without a length, or above `limit_bytes`.

        `key` is the signing key of the claim. `confirm` raises if the request may no longer store what it sends.
        """
        self._request = request
        self._claim = claim
        self._key = key
        self._clock = clock
        self._confirm = confirm
        self._timeout_s = timeout_s
        self.payload = claim.payload
        self.is_chunked = claim.payload in STREAMING
        # Of the two lengths of an aws-chunked body, some clients send only that of the data.
        name = "x-amz-decoded-content-length" if self.is_chunked else "Content-Length"
        self.length = _length(request.headers.get(name), name)
        if self.length > limit_bytes:
            raise S3Error("EntityTooLarge", f"The body has {self.length} bytes; at most {limit_bytes} are allowed")
        self._raw_max = self.length + (self.length + FRAMING_BYTES_MAX if self.is_chunked else 0)
        self.trailers: dict[str, str] = {}
        """Of an aws-chunked body, once its pieces were read."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the data, verified.

        Raises:
            S3Error: For a wrong hash or signature, and for a body that ends early or is too slow; what `confirm`
                raises.
        """
        if self.is_chunked:
            decoder = ChunkDecoder(self._claim, self._key, self.length)
            async for piece in self.raw():
                for data in decoder.feed(piece):
                    yield data
            self.trailers = decoder.finish()
            await self._confirm()
            return
        expected = None if self._claim.payload == UNSIGNED_PAYLOAD else self._claim.payload
        hashed, withheld = hashlib.sha256(), b""
        async for piece in self.raw():
            if expected is not None:
                hashed.update(piece)
            if withheld:
                yield withheld
            withheld = piece
        if expected is not None and hashed.hexdigest() != expected:
            raise S3Error("XAmzContentSHA256Mismatch", "x-amz-content-sha256 is not the hash of the body")
        await self._confirm()
        if withheld:
            yield withheld

    async def raw(self) -> AsyncIterator[bytes]:
        """Yield the body as it was sent.

        Raises:
            S3Error: If it ends early or is too slow.
        """
        # Not before: until then, a refusal spares the client the body.
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._request.writer.output_size = 0
        content, received, started_s = self._request.content, 0, self._clock.monotonic()
        while True:
            deadline_s = started_s + self._timeout_s + received / RATE_LEAST
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self._clock.monotonic())):
                    piece = await content.readany()
            except TimeoutError:
                raise S3Error("RequestTimeout", "The body took too long to arrive") from None
            except (ConnectionError, web.RequestPayloadError) as error:
                raise S3Error("IncompleteBody", "The connection ended before the body") from error
            if not piece:
                break
            received += len(piece)
            if received > self._raw_max:
                raise S3Error("InvalidRequest", "The body is longer than its header declares")
            for start in range(0, len(piece), PIECE_BYTES):
                yield piece[start : start + PIECE_BYTES]
        if not self.is_chunked and received != self.length:
            raise S3Error("IncompleteBody", f"Content-Length is {self.length}; the body has {received} bytes")

    async def read(self, limit_bytes: int) -> bytes:
        """Return a small body as a whole: XML."""
        if self.length > limit_bytes:
            raise S3Error("MalformedXML", f"The body has {self.length} bytes; at most {limit_bytes} are read")
        return b"".join([piece async for piece in self.pieces()])


def _length(text: str | None, name: str) -> int:
    if text is None:
        raise S3Error("MissingContentLength", f"The request needs {name}")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise S3Error("InvalidArgument", f"{name} has to be a number of bytes")
    return int(text)
