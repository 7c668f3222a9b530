"""Reader of the bodies of requests, with limits for their size, their time, and the memory of all bodies together.

The size is that of the uncompressed body. It is counted while the body arrives, because the headers are not trusted.
Compressed bodies are inflated in small steps, one body at a time in each worker, and the event loop runs other tasks
between two steps. A route declares the class of its limit: lists of files, keys and values have larger limits, and
logins have smaller limits. A body is read after the login. If the path determines the namespace, it is also read after
the check of the right. Only `getToken` reads bodies of unauthenticated clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from aiohttp import web

from seamark.formats.protocol.wire import decode_as
from seamark.formats.runtime.connections import Connection
from seamark.formats.runtime.errors import BadRequest, ClientGone, RequestTimeout, TooLarge
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.content_codings import Inflater, parse_content_encoding
from seamark.metaserver.api.http.describe import BodySize, get_description
from seamark.metaserver.api.http.keys import PRINCIPAL
from seamark.metaserver.api.http.slots import RequestSlot
from seamark.metaserver.settings.settings import Settings

T = TypeVar("T")

SLOT: web.RequestKey[RequestSlot] = web.RequestKey("slot", RequestSlot)
_BODY: web.RequestKey[bytes] = web.RequestKey("body", bytes)
_UNREADABLE: web.RequestKey[bool] = web.RequestKey("unreadable", bool)
TOKEN_BODY_MAX = 16 << 10
"""The maximum number of bytes of the body of a login."""
BYTES_PER_SECOND_MIN = 64 << 10
"""The minimum rate, in bytes per second, of a body that takes longer than `body_timeout_s`."""
_LINGERING_BYTES = 1 << 20
"""The maximum number of bytes of a body that are read after the answer.

Some clients read the answer only after they have sent the body.
"""
_INFLATED_BYTES = 64 << 10
"""The number of bytes that a step inflates before the event loop runs other tasks.

A step takes a fraction of a millisecond.
"""
_CHUNK_BYTES = 8 << 10
"""The smallest size of received bytes that are not copied. Smaller pieces are joined to save memory."""
_STEP_BYTES = 1 << 20
"""The number of bytes that are copied or searched in one step, which takes a fraction of a millisecond."""
QUICK_BYTES = 256 << 10
"""The maximum size of a body that is parsed in the event loop."""
_CONTAINERS_MAX, _CONTAINERS_MAX_LARGE = 100_000, 4_000_000
"""The maximum numbers of objects and arrays in a body, and in a body of the class LARGE. Each takes about 60 bytes."""
_VALUES_MAX = 600_000
"""The maximum number of commas in a body that is not of the class LARGE. A filter may list half a million numbers."""


def get_body_limit(size: BodySize, settings: Settings) -> int:
    """Return the maximum number of uncompressed bytes of a body of this class.

    msgspec parses a body in one call that blocks the event loop. So the limits of the smaller classes are sizes that
    take only some milliseconds.
    """
    limit = settings.body_limit_bytes
    if size is BodySize.LARGE:
        return limit
    if size is BodySize.MEDIUM:
        return min(limit, settings.medium_body_limit_bytes)
    return min(limit, settings.small_body_limit_bytes if size is BodySize.SMALL else TOKEN_BODY_MAX)


async def read_body(request: web.Request, size: BodySize | None = None) -> bytes:
    """Read the body, and uncompress it according to its Content-Encoding. A second call returns the same bytes.

    Args:
        request: The request.
        size: The class of the route's limit, if the caller knows it.

    Raises:
        TooLarge: The body exceeds the limit.
        BadRequest: The body cannot be uncompressed.
        UnsupportedMediaType: The server does not support the content coding.
        RequestTimeout: The body took too long to arrive.
        ClientGone: The client has closed the connection.
        RetryLater: All bodies together take too much memory.
        TooManyRequests: The bodies of this client take too much memory.
    """
    slot = _get_slot(request)
    body: bytes | None = request.get(_BODY) if slot is None else slot.body
    if body is not None:
        return body
    settings = request.app[COMPONENTS].settings
    if size is None:
        size = get_description(request.match_info.route.handler).body_size
    limit = get_body_limit(size, settings)
    content = request.content
    codings = request.headers.getall("Content-Encoding", None)
    coding = "" if codings is None else parse_content_encoding(codings)
    try:
        if not coding and content.is_eof() and content.exception() is None:
            # The body arrived with the headers, as most bodies do.
            if content.total_bytes > limit:
                raise _make_too_large_error(limit)
            body = bytes(content.read_nowait())
            if slot is not None:
                slot.reserve_memory(len(body))
        else:
            if (request.content_length or 0) > limit:
                raise _make_too_large_error(limit)
            timeout_s = settings.body_timeout_s if PRINCIPAL in request else settings.header_timeout_s
            body = await _receive_body(request, limit, timeout_s, slot, coding)
    except web.RequestPayloadError:
        # Otherwise, aiohttp would continue to read the body after the answer, fail, and break off the answer.
        content.feed_eof()
        request[_UNREADABLE] = True
        raise BadRequest("The request body does not have the form that its headers state; check its encoding") from None
    except ConnectionError:
        raise ClientGone("The client closed the connection before the whole request had arrived") from None
    if len(body) > QUICK_BYTES and size is not BodySize.LARGE:
        # Parsed values take much more memory than their text, so check their number in a long body. The function that
        # decodes a body of the class LARGE checks it with higher limits.
        _check_values(body)
    if slot is None:
        request[_BODY] = body
    else:
        slot.body = body
    return body


def _get_slot(request: web.Request) -> RequestSlot | None:
    try:  # The method `get` of aiohttp's requests takes twice as long.
        return request[SLOT]
    except KeyError:
        return None


async def _receive_body(
    request: web.Request, limit: int, timeout_s: float, slot: RequestSlot | None, coding: str
) -> bytes:
    """Receive and uncompress the body of a request.

    Raises:
        TooLarge: The body exceeds the limit.
        RequestTimeout: The body took too long to arrive.
    """
    buffer, pieces, size = bytearray(), list[bytes](), 0
    inflater = Inflater(coding) if coding else None
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    def add_chunk(chunk: bytes) -> None:
        nonlocal buffer, size
        if size + len(chunk) > limit:
            raise _make_too_large_error(limit)
        if slot is not None:
            slot.reserve_memory(len(chunk))
        is_large = len(chunk) >= _CHUNK_BYTES
        if not is_large:
            buffer += chunk
        if buffer and (is_large or len(buffer) >= _STEP_BYTES):
            pieces.append(bytes(buffer))
            buffer = bytearray()
        if is_large:
            pieces.append(chunk)
        size += len(chunk)
        deadline.reschedule(begun_s + timeout_s + size / BYTES_PER_SECOND_MIN)

    if slot is not None:
        slot.begin_reading()
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            async for encoded_chunk in _iterate_chunks(request):
                if inflater is None:
                    add_chunk(encoded_chunk)
                    continue
                inflater.feed(encoded_chunk)
                while chunk := await _inflate_body(request, inflater):
                    add_chunk(chunk)
    except TimeoutError:
        raise RequestTimeout(
            f"The request body took too long: {size:,} bytes arrived in {loop.time() - begun_s:.0f} s"
        ) from None
    if inflater is not None:
        inflater.finish()
    if slot is not None:
        slot.end_reading()
    pieces.append(bytes(buffer))
    if size < _STEP_BYTES:
        return b"".join(pieces)
    # Copy in a thread, without the GIL, because copying 64 MB takes tens of milliseconds.
    return await asyncio.to_thread(b"".join, pieces)


async def _iterate_chunks(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the bytes of a body as they arrive, without a copy if possible."""
    if request.content_length is None:  # The client may send very many small HTTP chunks, which are joined.
        async for chunk in request.content.iter_any():
            yield chunk
        return
    async for chunk, _ in request.content.iter_chunks():
        yield chunk


async def _inflate_body(request: web.Request, inflater: Inflater) -> bytes:
    """Inflate one step of the body. The event loop runs other tasks after the step.

    Only one compressed body is inflated at a time, so all compressed bodies together use no more of the event loop than
    one body.
    """
    async with request.app[COMPONENTS].worker_limits.inflating.hold(_find_holder(request)):
        chunk = inflater.inflate(_INFLATED_BYTES)
        await asyncio.sleep(0)
    return chunk


def _find_holder(request: web.Request) -> str:
    """Return the client to which a body is counted: the principal, or the address of an unauthenticated client."""
    principal = request.get(PRINCIPAL)
    return f"address {request.remote}" if principal is None else principal.name


def end_unread(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after the answer to a request whose body was not read completely.

    The server does not know where the next request begins. The rest of a large body is not read, because this would
    cost too much.
    """
    # A body whose encoding is invalid also seems to be at its end, but was not read.
    if request.content.is_eof() and (response.status < 400 or _UNREADABLE not in request):
        return
    response.force_close()
    response.headers["Connection"] = "close"
    length = request.content_length
    # Do not wait for the rest of a large body. A small body is read, because some clients send it before they read.
    is_large = length is None or length > _LINGERING_BYTES or "Content-Encoding" in request.headers
    if is_large and isinstance(request.protocol, Connection):
        request.protocol.leave_unread()


def parse_body(body: bytes, shape: type[T]) -> T:
    """Decode a JSON body as a value of this msgspec type.

    Raises:
        BadRequest: The body is not JSON of this type; the message names the invalid field.
        TooLarge: The body has too many objects and arrays.
    """
    if not body:
        raise BadRequest("The request body is empty; send a JSON object")
    if len(body) > QUICK_BYTES:
        _check_containers(body, _CONTAINERS_MAX_LARGE)
    return decode_as(body, shape, "The request body")


def _check_values(body: bytes) -> None:
    """Check the numbers of objects, arrays and commas in a body that is not of the class LARGE.

    The number of commas limits the number of values. Commas in strings also count.

    Raises:
        TooLarge: The body has too many of them.
    """
    _check_containers(body, _CONTAINERS_MAX)
    if body.count(b",") > _VALUES_MAX:
        raise TooLarge(f"The request body has more than {_VALUES_MAX:,} values")


def _check_containers(body: bytes, containers_max: int) -> None:
    """Check the number of objects and arrays in a body.

    Opening braces and brackets in the bytes are counted, also those in strings.

    Raises:
        TooLarge: The body has more of them than `containers_max`.
    """
    # Search in steps, because this thread may check 64 MB. Other threads, such as the event loop, run between two
    # steps.
    steps = [(start, start + _STEP_BYTES) for start in range(0, len(body), _STEP_BYTES)]
    if sum(body.count(b"{", *step) + body.count(b"[", *step) for step in steps) > containers_max:
        raise TooLarge(f"The request body has more than {containers_max:,} objects and arrays")


def _make_too_large_error(limit: int) -> TooLarge:
    return TooLarge(f"The request body is too large: this operation takes at most {limit:,} bytes")
