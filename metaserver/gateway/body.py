"""Reads the body of a request in pieces, within limits of size and time. The whole body is never in memory.

A reader receives the last piece of a body only after everything that the signature covers is verified. So
a backend that needs all bytes before it stores an object never stores a forged or truncated object. Before the last
piece, the rights are checked again: a body may take hours, and meanwhile its table may be dropped, and another table
may use its location.
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

BYTES_PER_SECOND_MIN = 64 << 10
"""The minimum rate of a body: for each of these numbers of bytes, one second is added to the timeout."""
FRAMING_BYTES_MAX = 1 << 20
"""The framing of an aws-chunked body may have as many bytes as the data, plus this number of bytes."""
_LENGTH_DIGITS_MAX = 15
PIECE_BYTES = 256 << 10
"""The maximum size of a piece of a body. Each request has only a few pieces in memory."""


class Body:
    """The body of a request.

    Attributes:
        length: The length of the data in bytes, without the framing of aws-chunked.
        is_chunked: Whether the body is encoded as aws-chunked.
    """

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
        """Check the declared length of the body.

        Args:
            request: The request.
            claim: The authentication of the request.
            key: The signing key of the claim.
            clock: The clock.
            confirm: Raises an error if the request may no longer store its body.
            limit_bytes: The maximum length of the data.
            timeout_s: The time limit of the body, in seconds. Each byte that arrives extends it.

        Raises:
            S3Error: The body has no length, or is longer than `limit_bytes`.
        """
        self._request = request
        self._claim = claim
        self._key = key
        self._clock = clock
        self._confirm = confirm
        self._timeout_s = timeout_s
        self.payload = claim.payload
        self.is_chunked = claim.payload in STREAMING
        # Some clients send only the length of the data of an aws-chunked body, and no Content-Length.
        name = "x-amz-decoded-content-length" if self.is_chunked else "Content-Length"
        self.length = _parse_length(request.headers.get(name), name)
        if self.length > limit_bytes:
            raise S3Error("EntityTooLarge", f"The body has {self.length} bytes; the limit is {limit_bytes} bytes")
        # The framing of an aws-chunked body (the sizes and signatures of its chunks) may be as long as the data plus
        # `FRAMING_BYTES_MAX`. The addition matters for short data, whose framing can be longer than the data.
        self._raw_bytes_max = self.length + (self.length + FRAMING_BYTES_MAX if self.is_chunked else 0)
        self.trailers: dict[str, str] = {}
        """The trailers of an aws-chunked body, which are known after all pieces were read."""

    async def iter_pieces(self) -> AsyncIterator[bytes]:
        """Yield the data of the body, and verify them.

        The last piece of a plain body is withheld until the hash of the body is verified and `confirm` succeeds. So a
        receiver never has all bytes of an invalid plain body.

        The last piece of each signed chunk of an aws-chunked body is withheld until the signature of the chunk is
        verified. But the trailers are checked, and `confirm` is called, after the last piece. So a receiver must use
        the data only after the iteration has ended without an error.

        Raises:
            S3Error: The hash or a signature is wrong, or the body ends early or is too slow.
            SeamarkError: `confirm` has raised it.
        """
        if self.is_chunked:
            decoder = ChunkDecoder(self._claim, self._key, self.length)
            async for piece in self.iter_raw():
                for data in decoder.feed(piece):
                    yield data
            self.trailers = decoder.finish()
            await self._confirm()
            return
        expected = None if self._claim.payload == UNSIGNED_PAYLOAD else self._claim.payload
        hasher, withheld = hashlib.sha256(), b""
        async for piece in self.iter_raw():
            if expected is not None:
                hasher.update(piece)
            if withheld:
                yield withheld
            withheld = piece
        if expected is not None and hasher.hexdigest() != expected:
            raise S3Error("XAmzContentSHA256Mismatch", "x-amz-content-sha256 is not the hash of the body")
        await self._confirm()
        if withheld:
            yield withheld

    async def iter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body as it was sent.

        Raises:
            S3Error: The body ends early, is too slow, or does not have the declared length.
        """
        # Request the body only now (`Expect: 100-continue`), so that a client whose request is refused does not send
        # it.
        if self._request.headers.get("Expect", "").lower() == "100-continue":
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._request.writer.output_size = 0  # The answer itself has not begun.
        content, received_bytes, started_s = self._request.content, 0, self._clock.monotonic()
        while True:
            # Each byte that arrives extends the deadline, so a slow client must send at least `BYTES_PER_SECOND_MIN`.
            deadline_s = started_s + self._timeout_s + received_bytes / BYTES_PER_SECOND_MIN
            try:
                async with asyncio.timeout(max(0.0, deadline_s - self._clock.monotonic())):
                    piece = await content.readany()
            except TimeoutError:
                elapsed_s = self._clock.monotonic() - started_s
                raise S3Error(
                    "RequestTimeout",
                    f"Only {received_bytes:,} bytes of the body arrived in {elapsed_s:.0f} s; send it faster",
                ) from None
            except (ConnectionError, web.RequestPayloadError) as error:
                raise S3Error("IncompleteBody", "The connection ended before the body") from error
            if not piece:
                break
            received_bytes += len(piece)
            if received_bytes > self._raw_bytes_max:
                raise S3Error(
                    "InvalidRequest",
                    f"The body has more than {self._raw_bytes_max:,} bytes, but its header declares {self.length:,}",
                )
            for start in range(0, len(piece), PIECE_BYTES):
                yield piece[start : start + PIECE_BYTES]
        if not self.is_chunked and received_bytes != self.length:
            raise S3Error("IncompleteBody", f"Content-Length is {self.length}, but the body has {received_bytes} bytes")

    async def read(self, limit_bytes: int) -> bytes:
        """Return the whole body, such as XML, which may have at most `limit_bytes`."""
        if self.length > limit_bytes:
            raise S3Error("MalformedXML", f"The body has {self.length} bytes; the limit is {limit_bytes} bytes")
        return b"".join([piece async for piece in self.iter_pieces()])


def _parse_length(text: str | None, name: str) -> int:
    if text is None:
        raise S3Error("MissingContentLength", f"The request has no {name}; send it")
    if not text.isascii() or not text.isdigit() or len(text) > _LENGTH_DIGITS_MAX:
        raise S3Error("InvalidArgument", f"{name} must be a number of bytes")
    return int(text)
