"""Passes authorised requests on to an S3-compatible store, signed again with the server's keys.

The store answers all requests (ranges, conditions, multipart uploads, listings, errors), so a client receives the same
bytes and errors as without the gateway. Bodies are passed on in pieces in both directions, with the framing that the
client has chosen. If the client sends the hash of the body in a header, the store receives it too. An aws-chunked body
is verified, and encoded again with the server's signatures. So the store can detect an incomplete body, as it could
without the gateway. A trailing checksum is passed on, and the store verifies and stores it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from urllib.parse import quote, urlsplit

import aiohttp
import structlog
from aiohttp import web
from yarl import URL

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater, StorageError
from seamark.metaserver.gateway.aws_chunked import SIGNED, SIGNED_TRAILER, STREAMING, ChunkSigner, compute_framed_length
from seamark.metaserver.gateway.backend import PromptResponse, S3Call
from seamark.metaserver.gateway.body import Body
from seamark.metaserver.gateway.caching.records import parse_content_range, read_content_range
from seamark.metaserver.gateway.caching.store import StoreAnswer
from seamark.metaserver.gateway.s3_errors import S3Error
from seamark.metaserver.gateway.sigv4 import EMPTY_SHA256, RequestTarget, format_canonical_query, sign_headers
from seamark.metaserver.objects.credentials import S3Keys, load_server_keys
from seamark.metaserver.objects.s3 import get_bucket_endpoint
from seamark.metaserver.objects.s3_scope import Address
from seamark.metaserver.settings.settings import Settings

READ_BYTES = 512 << 10
"""The size of the read buffer of an answer. Up to twice this number of bytes are read before the client receives them.

With aiohttp's default of 64 KiB, reading would pause and resume after every few pieces.
"""
_CHUNK_BYTES = 128 << 10
_FORWARDED_HEADERS = frozenset(
    (
        *("range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range"),
        *("content-type", "content-md5", "content-encoding", "content-language", "content-disposition"),
        *("cache-control", "expires"),
    )
)
_OWN_HEADERS = frozenset(("x-amz-date", "x-amz-security-token", "x-amz-content-sha256", "x-amz-decoded-content-length"))
_NOT_RETURNED_HEADERS = frozenset(
    (
        *("connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authenticate"),
        *("server", "date", "set-cookie", "location", "strict-transport-security", "alt-svc"),
    )
)
_ERROR_BYTES_MAX = 64 << 10
_KEYS_REFUSED = re.compile(rb"<Code>(?:InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken)</Code>")
_REFRESH_S = 60.0
_FORWARD_ATTEMPTS_MAX = 3
"""The maximum number of attempts to read the next byte of an answer from the store."""
_PAUSE_S = 0.1
_log = structlog.get_logger("seamark.gateway")


class Forwarding:
    """A `Backend` that passes requests on to a store.

    An instance belongs to one event loop. It has at most `connections` connections to the store.
    """

    def __init__(self, settings: Settings, clock: Clock, *, connections: int) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: S3Keys | None = None
        self._keys_until_s = 0.0
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=15),
            timeout=aiohttp.ClientTimeout(total=None, connect=5, sock_read=settings.storage_timeout_s),
            skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent", "Accept"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES,
            max_line_size=65_536,
            max_field_size=65_536,
        )

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def request(
        self, method: str, bucket: str, key: str, headers: Mapping[str, str]
    ) -> AsyncIterator[StoreAnswer]:
        """Send a request to the store, and yield its answer, whose body is read while the context is active.

        Raises:
            RetryLater: The store cannot be reached, or does not answer.
        """
        url, signed_headers = self._sign(
            method, Address(bucket, key, {}), headers, EMPTY_SHA256, await self._load_server_keys()
        )
        try:
            async with self._session.request(method, url, headers=signed_headers, allow_redirects=False) as answer:
                yield StoreAnswer(answer.status, _select_returned_headers(answer), _read_pieces(answer.content))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryLater(f"The store did not answer; try again later: {type(error).__name__}") from None

    async def answer(self, call: S3Call) -> web.StreamResponse:
        """Send the request to the store, signed with the server's keys, and return the store's answer.

        An aws-chunked body is encoded again, so its headers state the new encoding.

        Raises:
            S3Error: The body of the client is invalid.
            RetryLater: The store did not answer.
        """
        headers = _select_forwarded_headers(call.headers)
        payload = _choose_payload(call)
        if payload in STREAMING and call.body is not None:
            headers["x-amz-decoded-content-length"] = str(call.body.length)
            headers["content-encoding"] = ",".join(filter(None, ("aws-chunked", headers.get("content-encoding", ""))))
        keys, region = await self._load_server_keys(), self._settings.s3_region
        url, signed_headers = self._sign(call.method, call.address, headers, payload, keys)
        signature = signed_headers["authorization"].rpartition("Signature=")[2]
        signer = ChunkSigner(keys.secret_access_key, signed_headers["x-amz-date"], region, payload, signature)
        data, length = _frame_body(call, payload, signer)
        if length is not None:
            signed_headers["content-length"] = str(length)
        try:
            async with self._session.request(
                call.method, url, headers=signed_headers, data=data, allow_redirects=False
            ) as answer:
                return await self._return_answer(call, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            cause = error.__cause__ or error.__context__
            # Raise the error of the client's body, which the session has wrapped.
            if isinstance(cause, S3Error):
                raise cause from None
            raise RetryLater(f"The store did not answer; try again later: {type(error).__name__}") from None

    def _sign(
        self, method: str, address: Address, headers: Mapping[str, str], payload: str, keys: S3Keys
    ) -> tuple[URL, dict[str, str]]:
        """Return the URL and the signed headers of a request to the store."""
        url = _make_url(address, self._settings)
        parts = urlsplit(url)
        signed_headers = sign_headers(
            RequestTarget(method, parts.path, parts.query, {**headers, "host": parts.netloc}),
            access_key_id=keys.access_key_id,
            secret=keys.secret_access_key,
            token=keys.token,
            region=self._settings.s3_region,
            payload=payload,
            now_ms=self._clock.now_ms(),
        )
        return URL(url, encoded=True), signed_headers

    async def _return_answer(self, call: S3Call, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        if answer.status == 403 and call.method != "HEAD":
            error_body = await answer.content.read(_ERROR_BYTES_MAX)
            # Do not pass the store's message on: it contains the server's key, and no client can correct the error.
            if _KEYS_REFUSED.search(error_body):
                raise StorageError("The store refuses the server's keys; the operator of the server must correct them")
            return web.Response(status=403, body=error_body, headers=_list_headers(answer))
        part = _read_content_range(answer)
        if part is not None:
            start, end, _ = part
            if answer.content_length not in (None, end - start):
                raise RetryLater("The store's answer does not have the length of its range; try again")
        response = PromptResponse(status=answer.status, reason=answer.reason, headers=_list_headers(answer))
        # Answers with the status 204 or 304 have no body, and aiohttp allows no length for them.
        if answer.content_length is not None and answer.status not in (204, 304):
            response.content_length = answer.content_length
        pieces = self._read_whole(call, answer)
        async with aclosing(pieces):
            try:
                # The first piece is read before the header is sent, so that an error can have its own status.
                first_piece = None if call.method == "HEAD" else await anext(pieces, None)
                await _send_to_client(response.prepare(call.request))
                if first_piece is not None:
                    await _send_to_client(response.write(first_piece))
                    async for piece in pieces:
                        await _send_to_client(response.write(piece))
            except (aiohttp.ClientError, TimeoutError, RetryLater) as error:
                if not response.prepared:
                    raise
                # The header was sent, so only an aborted connection shows the client that bytes are missing.
                _log.warning("answer could not be completed", error=type(error).__name__)
                if call.request.transport is not None:
                    call.request.transport.abort()
                return response
        await _send_to_client(response.write_eof())
        return response

    async def _read_whole(self, call: S3Call, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
        """Yield the body of an answer.

        If the body ends early, further requests with If-Match read the missing bytes of the same object.

        Raises:
            RetryLater: The last `_FORWARD_ATTEMPTS_MAX` requests returned no new bytes.
            aiohttp.ClientError, TimeoutError: The body ended early, and further requests cannot complete it.
        """
        span, received_bytes = _read_span(call, response), 0
        pieces = _read_pieces(response.content)
        async with aclosing(pieces):
            try:
                async for piece in pieces:
                    received_bytes += len(piece)
                    yield piece
                return
            except (aiohttp.ClientError, TimeoutError):
                if span is None:
                    raise
        # Release the connection to the store.
        response.close()
        start, end, size = span
        start, failed_attempts = start + received_bytes, 0
        etag = response.headers["ETag"]
        while start < end:
            headers = {"range": f"bytes={start}-{end - 1}", "if-match": etag}
            try:
                async with self.request("GET", call.address.bucket, call.address.key, headers) as answer:
                    if answer.status != 206 or answer.headers.get("etag") != etag:
                        raise RetryLater("The object has changed, or the store refuses the read; try again")
                    if parse_content_range(answer) != (start, end, size):
                        raise RetryLater("The store answered with another range; try again")
                    async for piece in answer.pieces:
                        piece = piece[: end - start]
                        start, failed_attempts = start + len(piece), 0
                        yield piece
            except RetryLater:
                failed_attempts += 1
                if failed_attempts == _FORWARD_ATTEMPTS_MAX:
                    raise
                await asyncio.sleep(_PAUSE_S * failed_attempts)

    async def _load_server_keys(self) -> S3Keys:
        """Return the keys from the settings or from AWS's credential chain, which may have to fetch them."""
        if self._settings.s3_access_key_id:
            return load_server_keys(self._settings)
        if self._keys is None or self._clock.monotonic() >= self._keys_until_s:
            self._keys = await asyncio.to_thread(load_server_keys, self._settings)
            self._keys_until_s = self._clock.monotonic() + _REFRESH_S
        return self._keys


def _make_url(address: Address, settings: Settings) -> str:
    bucket, path = address.bucket, quote(address.key, safe="/-_.~")
    if settings.s3_endpoint:
        base = get_bucket_endpoint(bucket, settings)
    else:
        host = f"s3.{settings.s3_region}.amazonaws.com"
        base = f"https://{host}" if settings.s3_path_style else f"https://{bucket}.{host}"
    path = f"/{bucket}/{path}" if settings.s3_path_style else f"/{path}"
    query = format_canonical_query(address.query.items())
    return f"{base}{path.rstrip('/') if not address.key else path}{'?' if query else ''}{query}"


def _select_forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    forwarded_headers = {
        name: value
        for name, value in headers.items()
        if name in _FORWARDED_HEADERS or (name.startswith("x-amz-") and name not in _OWN_HEADERS)
    }
    codings = [part.strip() for part in forwarded_headers.get("content-encoding", "").split(",")]
    if "aws-chunked" in codings:
        remaining_codings = ",".join(part for part in codings if part and part != "aws-chunked")
        if remaining_codings:
            forwarded_headers["content-encoding"] = remaining_codings
        else:
            del forwarded_headers["content-encoding"]
    return forwarded_headers


def _choose_payload(call: S3Call) -> str:
    """Return the value of x-amz-content-sha256 for the store, which states the framing of the body."""
    if call.document is not None:
        return hashlib.sha256(call.document).hexdigest()
    if call.body is None:
        return EMPTY_SHA256
    return call.body.payload


def _frame_body(
    call: S3Call, payload: str, signer: ChunkSigner
) -> tuple[AsyncIterator[bytes] | bytes | None, int | None]:
    """Return the body of the request to the store, and its length in bytes.

    The data of an aws-chunked body are framed again, because the store verifies the signatures of the server. The
    length is None if the request has no Content-Length.
    """
    body = call.body
    if body is None:
        document = call.document or b""
        return call.document, len(document) if call.method in ("PUT", "POST") else None
    if payload == SIGNED:
        return _encode_chunks(body, "", signer), compute_framed_length(body.length, _CHUNK_BYTES, "", is_signed=True)
    if payload in STREAMING:
        trailer = call.headers.get("x-amz-trailer", "").lower()
        is_signed = payload == SIGNED_TRAILER
        return _encode_chunks(body, trailer, signer), compute_framed_length(
            body.length, _CHUNK_BYTES, trailer, is_signed=is_signed
        )
    return body.iter_pieces(), body.length


async def _encode_chunks(body: Body, trailer: str, signer: ChunkSigner) -> AsyncIterator[bytes]:
    """Yield the data of a body as aws-chunked.

    The chunks have a fixed size, so that the length of the encoded body is known in advance. The last chunk is yielded
    only after the whole body of the client was verified.
    """
    pending = bytearray()
    async for piece in body.iter_pieces():
        pending += piece
        while len(pending) >= _CHUNK_BYTES:
            yield signer.sign_chunk(bytes(pending[:_CHUNK_BYTES]))
            del pending[:_CHUNK_BYTES]
    last = signer.sign_chunk(bytes(pending)) if pending else b""
    yield last + signer.end(trailer, body.trailers.get(trailer, ""))


def _read_content_range(answer: aiohttp.ClientResponse) -> tuple[int, int, int] | None:
    """Return the start, the end (exclusive) and the size of the object from a partial answer, or None."""
    if answer.status != 206:
        return None
    return read_content_range(answer.headers.get("Content-Range", ""))


def _read_span(call: S3Call, answer: aiohttp.ClientResponse) -> tuple[int, int, int] | None:
    """Return the start, the end (exclusive) and the size of the object if further requests can complete the answer.

    This is possible only for a plain read of an object with a strong ETag. Otherwise the result is None.
    """
    headers = {name.lower(): value for name, value in answer.headers.items()}
    is_plain = call.method == "GET" and call.address.query.keys() <= {"x-id"} and "content-encoding" not in headers
    if not is_plain or not headers.get("etag", "").startswith('"'):
        return None
    # A further request would not contain the key with which the client lets the store decrypt the object.
    if any(name.startswith("x-amz-server-side-encryption-customer-") for name in call.headers):
        return None
    if answer.status == 206:
        return _read_content_range(answer)
    length = answer.content_length
    return (0, length, length) if answer.status == 200 and length is not None else None


async def _send_to_client(work: Awaitable[object]) -> None:
    """Run `work`, which sends bytes to the client. If the client has closed the connection, raise ConnectionError.

    aiohttp raises the same error for connections to the store, so without this function, the gateway could not
    distinguish them.
    """
    try:
        await work
    except aiohttp.ClientError as error:
        raise ConnectionResetError("The client closed the connection") from error


async def _read_pieces(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the bytes of each read of the socket. aiohttp's `iter_any` would join several reads, and so copy them."""
    while True:
        piece, _ = await content.readchunk()
        if piece:
            yield piece
        elif content.at_eof():  # An empty piece means the end of the body, or only the end of a chunk.
            return


def _list_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the headers for the client, without Content-Length, which the caller sets.

    Each name occurs once, because some stores send the id of a request under two spellings of the header's name.
    """
    return {name: value for name, value in _select_returned_headers(answer).items() if name != "content-length"}


def _select_returned_headers(answer: aiohttp.ClientResponse) -> dict[str, str]:
    headers = {name.lower(): value for name, value in answer.headers.items()}
    return {name: value for name, value in headers.items() if name not in _NOT_RETURNED_HEADERS}
