r"""Decodes and encodes `aws-chunked` bodies: chunks with optional signatures, then optional trailers.

    <size in hex>[;chunk-signature=<64 hex digits>]\r\n <data> \r\n … 0[;chunk-signature=…]\r\n
    [x-amz-checksum-crc32:<base64>\r\n] [x-amz-trailer-signature:<64 hex digits>\r\n] \r\n

The module does no I/O. Each signature covers the previous signature and the hash of the chunk's data. The decoder
returns the last piece of a chunk only after it has verified the chunk's signature. A receiver stores an object only
after it has received all data, so it never stores forged data.

Source: Amazon S3 API reference, "Signature calculations: transferring payload in multiple chunks".
"""

from __future__ import annotations

import hashlib
import hmac
import re

from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.gateway.sigv4 import EMPTY_SHA256, SignatureClaim, derive_signing_key

SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
STREAMING = frozenset((SIGNED, SIGNED_TRAILER, UNSIGNED_TRAILER))
_LINE_BYTES_MAX = 1024
_TRAILER_BYTES_MAX = 4096
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,12})(?:;chunk-signature=([0-9a-f]{64}))?")
_BASE64 = re.compile("[A-Za-z0-9+/]+={0,2}")
_SIGNATURE_DIGITS = 64
_CHECKSUM_CHARS = {
    "x-amz-checksum-crc32": 8,
    "x-amz-checksum-crc32c": 8,
    "x-amz-checksum-crc64nvme": 12,
    "x-amz-checksum-sha1": 28,
    "x-amz-checksum-sha256": 44,
}
"""The length of the value of each checksum, which is in base64."""
_CRLF_BYTES = len("\r\n")
_SIGNATURE_BYTES = len(";chunk-signature=") + _SIGNATURE_DIGITS
_TRAILER_SIGNATURE_BYTES = len("x-amz-trailer-signature:") + _SIGNATURE_DIGITS + _CRLF_BYTES


class ChunkDecoder:
    """Decodes an `aws-chunked` body.

    `feed` receives bytes of the body, and returns data. After all bytes, `finish` returns the trailers. Both raise
    S3Error if the body is malformed, a signature is wrong, or the data do not have the declared length.
    """

    def __init__(self, claim: SignatureClaim, key: bytes, length: int) -> None:
        """Create a decoder.

        Args:
            claim: The authentication of the request. The chain of signatures starts with its signature.
            key: The signing key of the claim.
            length: The length of the decoded data in bytes, which the client declared.
        """
        self._claim = claim
        self._key = key
        self._length = length
        self._is_signed = claim.payload != UNSIGNED_TRAILER
        self._has_trailers = claim.payload != SIGNED
        self._previous = claim.signature
        self._buffer = bytearray()
        self._received_bytes = 0
        self._left: int | None = None
        """The number of bytes of the current chunk that have not arrived, or None between chunks."""
        self._signature = b""
        self._hash = hashlib.sha256()
        self._withheld = b""
        """The last piece of a chunk, until the signature of the chunk is verified."""
        self._has_ended = False
        self.trailers: dict[str, str] = {}

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        pieces: list[bytes] = []
        while self._decode_step(pieces):
            pass
        return pieces

    def finish(self) -> dict[str, str]:
        """Check that the body is complete, and return its trailers, with names in lower case.

        Raises:
            S3Error: The body is incomplete, continues after its last chunk, or has another length than stated.
        """
        if not self._has_ended:
            raise S3Error("IncompleteBody", "The body ended before its last chunk")
        if self._has_trailers:
            self._read_trailers()
        elif self._buffer.strip(b"\r\n"):
            raise S3Error("InvalidRequest", "The body continues after its last chunk")
        if self._received_bytes != self._length:
            raise S3Error(
                "IncompleteBody",
                f"x-amz-decoded-content-length is {self._length}, but the body has {self._received_bytes} bytes",
            )
        return self.trailers

    def _decode_step(self, pieces: list[bytes]) -> bool:
        """Decode the next element in the buffer. Return whether the buffer may contain a further element.

        Raises:
            S3Error: The element is malformed, its signature is wrong, or the trailers are too long.
        """
        if self._has_ended:
            if len(self._buffer) > _TRAILER_BYTES_MAX:
                raise S3Error("InvalidRequest", f"The trailers have more than {_TRAILER_BYTES_MAX} bytes")
            return False
        if self._left is None:
            return self._read_header()
        if self._left:
            return self._read_data(pieces)
        return self._end_chunk(pieces)

    def _read_header(self) -> bool:
        """Read the header of a chunk: its size, and its signature if chunks are signed. A chunk of size 0 is the last.

        Return False if the buffer does not contain the whole header yet.

        Raises:
            S3Error: The header is malformed, or the chunk exceeds the declared length of the body.
        """
        end = self._buffer.find(b"\r\n", 0, _LINE_BYTES_MAX)
        if end < 0:
            if len(self._buffer) >= _LINE_BYTES_MAX:
                raise S3Error("InvalidRequest", "A chunk's header is malformed")
            return False
        match = _CHUNK.fullmatch(bytes(self._buffer[:end]))
        if match is None or (match[2] is not None) != self._is_signed:
            raise S3Error("InvalidRequest", "A chunk's header is malformed")
        size = int(match[1], 16)
        if self._received_bytes + size > self._length:
            raise S3Error("IncompleteBody", f"The body has more than the {self._length} bytes that its header declares")
        del self._buffer[: end + 2]
        self._signature = match[2] or b""
        self._hash = hashlib.sha256()
        if size == 0:
            self._verify()
            self._has_ended = True
        else:
            self._left = size
        return True

    def _read_data(self, pieces: list[bytes]) -> bool:
        """Move the data of the current chunk from the buffer to `pieces`. Return False if the buffer is empty.

        If chunks are signed, the last piece is withheld until the signature of the whole chunk is verified.
        """
        assert self._left is not None
        piece = bytes(self._buffer[: self._left])
        if not piece:
            return False
        del self._buffer[: len(piece)]
        self._left -= len(piece)
        self._received_bytes += len(piece)
        if self._is_signed:
            self._hash.update(piece)
            if self._withheld:
                pieces.append(self._withheld)
            self._withheld = piece
        else:
            pieces.append(piece)
        return True

    def _end_chunk(self, pieces: list[bytes]) -> bool:
        """Read the line break after the data of a chunk, verify the chunk, and add its withheld last piece to `pieces`.

        Return False if the buffer does not contain the whole line break yet.

        Raises:
            S3Error: The chunk is longer than its header states, or its signature does not match.
        """
        if len(self._buffer) < _CRLF_BYTES:
            return False
        if self._buffer[:_CRLF_BYTES] != b"\r\n":
            raise S3Error("InvalidRequest", "The data of a chunk are longer than the size in its header")
        del self._buffer[:_CRLF_BYTES]
        self._verify()
        if self._withheld:
            pieces.append(self._withheld)
            self._withheld = b""
        self._left = None
        return True

    def _verify(self) -> None:
        if not self._is_signed:
            return
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{self._claim.timestamp}\n{self._claim.scope}\n"
        self._check_signature(
            f"{text}{self._previous}\n{EMPTY_SHA256}\n{self._hash.hexdigest()}", self._signature.decode()
        )

    def _check_signature(self, text: str, signature: str) -> None:
        """Check the signature of a chunk or of the trailers, and keep it, because the next signature depends on it.

        Args:
            text: The text that the client has signed.
            signature: The signature in the request.

        Raises:
            S3Error: SignatureDoesNotMatch if the signature is wrong.
        """
        expected = hmac.digest(self._key, text.encode(), "sha256").hex()
        if not hmac.compare_digest(expected.encode(), signature.encode()):  # The operands must be ASCII.
            raise S3Error("SignatureDoesNotMatch", "The signature of a chunk does not match its data")
        self._previous = expected

    def _read_trailers(self) -> None:
        """Read the trailers, which are headers after the body, and check their signature if chunks are signed.

        Raises:
            S3Error: A trailer is malformed, or the signature does not match.
        """
        lines = [line for line in bytes(self._buffer).split(b"\r\n") if line]
        signed_bytes, signature = b"", ""
        for line in lines:
            name, colon, value = (part.strip() for part in line.partition(b":"))
            if not colon:
                raise S3Error("InvalidRequest", "A trailer is malformed")
            lower_name = name.lower().decode("ascii", "replace")
            if lower_name == "x-amz-trailer-signature":
                signature = value.decode("ascii", "replace")
                continue
            self.trailers[lower_name] = value.decode("latin-1")
            signed_bytes += lower_name.encode() + b":" + value + b"\n"
        if self._is_signed:
            text = f"AWS4-HMAC-SHA256-TRAILER\n{self._claim.timestamp}\n{self._claim.scope}\n"
            self._check_signature(f"{text}{self._previous}\n{hashlib.sha256(signed_bytes).hexdigest()}", signature)


class ChunkSigner:
    """Encodes a body as aws-chunked. If the chunks are signed, the first signature covers the header's signature."""

    def __init__(self, secret: str, timestamp: str, region: str, payload: str, seed_signature: str) -> None:
        scope = f"{timestamp[:8]}/{region}/s3/aws4_request"
        self._key = derive_signing_key(secret, scope)
        self._signed_text = f"{timestamp}\n{scope}\n"
        self._is_signed = payload != UNSIGNED_TRAILER
        self._previous = seed_signature

    def sign_chunk(self, data: bytes) -> bytes:
        return self._make_chunk_header(data) + data + b"\r\n"

    def end(self, trailer: str, value: str) -> bytes:
        """Return the last chunk, and the trailer if its name is not empty.

        Raises:
            S3Error: InvalidRequest if the length of the value does not fit the checksum algorithm.
        """
        head = self._make_chunk_header(b"")
        if not trailer:
            return head + b"\r\n"
        # Check the length, because the declared length of the body was computed from it.
        if len(value) != _CHECKSUM_CHARS[trailer] or not _BASE64.fullmatch(value):
            raise S3Error("InvalidRequest", f"The trailer {trailer} is missing or malformed")
        text = f"{trailer}:{value}"
        if self._is_signed:
            signature = self._sign(
                f"AWS4-HMAC-SHA256-TRAILER\n{self._signed_text}", hashlib.sha256(f"{text}\n".encode())
            )
            text += f"\r\nx-amz-trailer-signature:{signature}"
        return head + f"{text}\r\n\r\n".encode()

    def _make_chunk_header(self, data: bytes) -> bytes:
        if not self._is_signed:
            return b"%x\r\n" % len(data)
        description = f"AWS4-HMAC-SHA256-PAYLOAD\n{self._signed_text}"
        signature = self._sign(description, hashlib.sha256(data), f"{EMPTY_SHA256}\n")
        return b"%x;chunk-signature=%s\r\n" % (len(data), signature.encode())

    def _sign(self, description: str, data_hash: hashlib._Hash, extra_line: str = "") -> str:
        text = f"{description}{self._previous}\n{extra_line}{data_hash.hexdigest()}"
        self._previous = hmac.digest(self._key, text.encode(), "sha256").hex()
        return self._previous


def compute_framed_length(length: int, chunk_bytes: int, trailer: str, *, is_signed: bool) -> int:
    """Return the length of an aws-chunked body with `length` bytes of data in chunks of `chunk_bytes`.

    Raises:
        S3Error: InvalidRequest if the trailer is unknown.
    """
    if trailer and trailer not in _CHECKSUM_CHARS:
        raise S3Error("InvalidRequest", f"x-amz-trailer must be one of {', '.join(_CHECKSUM_CHARS)}")
    # Each chunk has a header, which contains its size and its signature, and ends with a line break, as its data do.
    signature_bytes = _SIGNATURE_BYTES if is_signed else 0
    full_chunks, remainder = divmod(length, chunk_bytes)
    framed_bytes = full_chunks * (len(b"%x" % chunk_bytes) + signature_bytes + 2 * _CRLF_BYTES + chunk_bytes)
    if remainder:
        framed_bytes += len(b"%x" % remainder) + signature_bytes + 2 * _CRLF_BYTES + remainder
    framed_bytes += len("0\r\n") + signature_bytes + _CRLF_BYTES
    if trailer:
        framed_bytes += len(f"{trailer}:") + _CHECKSUM_CHARS[trailer] + _CRLF_BYTES
        framed_bytes += _TRAILER_SIGNATURE_BYTES if is_signed else 0
    return framed_bytes
