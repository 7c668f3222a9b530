"""Content codings of request bodies (RFC 9110, 8.4), decoded in steps of bounded size.

The module uses no clock and no I/O.

aiohttp inflates all bytes that have arrived in one step, in the event loop, before a handler can refuse them. With this
module, the caller inflates only as many bytes as it has time for. Before more bytes are inflated, two limits are
checked: the number of bytes, and the ratio of uncompressed bytes to received bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from seamark.formats.runtime.errors import BadRequest, TooLarge, UnsupportedMediaType

ACCEPTED = ("gzip", "deflate")
"""The content codings that the server accepts besides identity. x-gzip is gzip (RFC 9110, 8.4.1.3)."""
MEMBERS_MAX = 1000
"""The maximum number of members of one gzip body (RFC 1952, 2.2). Each member needs its own decompressor."""
RATIO_MAX = 200
"""The maximum ratio of uncompressed to received bytes for a body above `RATIO_FREE_BYTES`.

The ratio of usual text is a tenth of this limit.
"""
RATIO_FREE_BYTES = 1 << 20
"""The uncompressed size up to which a body may have any ratio."""
_PIECE_BYTES = 4 << 10
"""The number of compressed bytes that are inflated between two checks of the ratio."""
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15
"""The values of zlib's window bits that select the formats."""


def parse_content_encoding(values: Sequence[str]) -> str:
    """Return the coding that the values of Content-Encoding list, or "" if they list no coding.

    Raises:
        UnsupportedMediaType: The coding is not in `ACCEPTED`, or there are several codings. Each further coding would
            multiply the size to which a byte may expand.
    """
    header_codings = [coding.strip().lower() for value in values for coding in value.split(",")]
    codings = [coding for coding in header_codings if coding not in ("", "identity")]
    if not codings:
        return ""
    if len(codings) > 1:
        raise UnsupportedMediaType(f"Content-Encoding lists {len(codings)} codings; use one of {_CODINGS_TEXT}")
    coding = "gzip" if codings[0] == "x-gzip" else codings[0]
    if coding not in ACCEPTED:
        raise UnsupportedMediaType(f"Content-Encoding {coding[:40]!r} is not supported; use one of {_CODINGS_TEXT}")
    return coding


class Inflater:
    """Inflates one body.

    Call `feed` with each received part, and then call `inflate` until it returns no bytes. At the end of the input,
    call `finish`.
    """

    def __init__(self, coding: str) -> None:
        self._coding_name = coding
        self._input = b""
        self._position = 0
        self._received_bytes = 0
        self._inflated_bytes = 0
        self._members = 1
        self._is_full = False
        """Whether the last step gave the maximum size, so that there may be more bytes without further input."""
        self._stream = zlib.decompressobj(_GZIP) if coding == "gzip" else None

    def feed(self, data: bytes) -> None:
        """Add a part of the compressed body. The caller has inflated all earlier parts."""
        assert self._position == len(self._input)
        self._input, self._position = data, 0

    def inflate(self, size: int) -> bytes:
        """Return at most `size` uncompressed bytes, or b"" if more input is needed.

        Raises:
            BadRequest: The data are not valid for the coding.
            TooLarge: The ratio of uncompressed to received bytes is too large.
        """
        while self._is_full or self._get_undecoded() or self._position < len(self._input):
            output = self._inflate_step(size)
            self._inflated_bytes += len(output)
            if self._inflated_bytes > RATIO_FREE_BYTES and self._inflated_bytes > RATIO_MAX * self._received_bytes:
                raise TooLarge(f"The request body unpacks to more than {RATIO_MAX} times its size; send it unpacked")
            if output:
                return output
        return b""

    def finish(self) -> None:
        """Check that the compressed stream is complete at the end of the input. An input without bytes is complete.

        Raises:
            BadRequest: The input ends before the compressed stream ends.
        """
        if self._received_bytes and not (self._stream is not None and self._stream.eof):
            raise self._make_bad_request("ends too early")

    def _get_undecoded(self) -> bytes:
        stream = self._stream
        # At the end of a member, both attributes of zlib's object contain the bytes after the member.
        return b"" if stream is None or stream.eof else stream.unconsumed_tail

    def _inflate_step(self, size: int) -> bytes:
        """Inflate at most `size` bytes in one call of zlib.

        Raises:
            BadRequest: The data are not valid for the coding.
        """
        compressed_bytes = self._get_undecoded()
        if not compressed_bytes and not self._is_full:
            compressed_bytes = self._input[self._position : self._position + _PIECE_BYTES]
            self._position += len(compressed_bytes)
            self._received_bytes += len(compressed_bytes)
        stream = self._open_member(compressed_bytes)
        try:
            output = stream.decompress(compressed_bytes, size)
        except zlib.error:
            raise self._make_bad_request("is corrupt") from None
        # After a full output, zlib may have more output without more input.
        self._is_full = len(output) == size and not stream.eof
        if stream.eof:  # The bytes after the end belong to the next member.
            unused_bytes = len(stream.unused_data)
            self._position -= unused_bytes
            self._received_bytes -= unused_bytes
        return output

    def _open_member(self, compressed_bytes: bytes) -> zlib._Decompress:
        """Return the decompressor of the member that `compressed_bytes` continues or begins.

        Raises:
            BadRequest: The coding allows no further member.
        """
        if self._stream is None:
            # Some clients leave out zlib's header, which RFC 9110, 8.4.1.2, requires.
            self._stream = zlib.decompressobj(_ZLIB if compressed_bytes[0] & 0x0F == zlib.DEFLATED else _RAW_DEFLATE)
        elif self._stream.eof:
            if self._coding_name != "gzip":
                raise self._make_bad_request("has bytes after its end")
            self._members += 1
            if self._members > MEMBERS_MAX:
                raise BadRequest(f"The gzip request body has more than {MEMBERS_MAX:,} members; send one member")
            self._stream = zlib.decompressobj(_GZIP)
        return self._stream

    def _make_bad_request(self, reason: str) -> BadRequest:
        return BadRequest(f"The {self._coding_name} request body {reason}; check its encoding")


_CODINGS_TEXT = f"{', '.join(ACCEPTED)}, identity"
