"""Idempotency keys: a repeated request with the same key gets the first answer and has no further effect.

The catalog writes the record in the same transaction as the work, so that neither exists without the other. Recorded
are (REST specification, `Idempotency-Key`) successes, and refusals that a repeat cannot change. Not recorded are 5xx,
401 and 403, which concern the caller, and 409 CommitFailedException, which asks the client to retry.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.bodies import QUICK_BYTES
from seamark.metaserver.api.http.errors import from_seamark_error
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, PRINCIPAL, SETTINGS, STORE
from seamark.metaserver.api.http.requests import caller, read_body
from seamark.metaserver.catalog.quotas import Quota
from seamark.metaserver.catalog.values import Caller, IdempotencyKey
from seamark.metaserver.errors import (
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Forbidden,
    RequestError,
    RetryLater,
    TooLarge,
    Unauthenticated,
    Unprocessable,
)
from seamark.metaserver.store.model import IdempotencyRecord
from seamark.metaserver.store.operations import SaveIdempotency
from seamark.metaserver.store.port import IdempotencyTaken

HEADER = "Idempotency-Key"
KEPT: web.AppKey[Quota] = web.AppKey("kept-refusals", Quota)
KEPT_MAX = 20_000
"""The largest number of recorded refusals of one principal, per worker."""
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_NOT_KEPT = (Unauthenticated, Forbidden, TooLarge)

T = TypeVar("T")


async def once(
    request: web.Request,
    work: Callable[[Caller], Awaitable[T]],
    answer: Callable[[T], Awaitable[web.Response]],
    *,
    replayed: type[T] | None = None,
    later: Callable[[], Awaitable[T]] | None = None,
) -> web.Response:
    """`answer(await work(caller))`, or the first answer if the request's key was used before.

    `replayed` is the type that `work` returns, if the record may name a metadata file instead of containing the answer.
    `later` returns a value that includes that outcome when the file is gone.
    BadRequest for a key that is not a UUIDv7; Unprocessable for a key that another request has used.
    """
    key = await _key_of(request)
    if key is None:
        return await answer(await work(caller(request)))
    first = await request.app[STORE].idempotency(key.key, request.app[CLOCK].now_ms())
    if first is None:
        try:
            done = await work(caller(request, key))
        except IdempotencyTaken:
            first = await request.app[STORE].idempotency(key.key, request.app[CLOCK].now_ms())
        except CommitConflict:
            # A concurrent request with the same key may have won; after a refusal the client would delete live files.
            first = await request.app[STORE].idempotency(key.key, request.app[CLOCK].now_ms())
            if first is None:
                raise
        except RequestError as error:
            if isinstance(error, _NOT_KEPT):
                raise
            first = await _keep(request, key, from_seamark_error(error))
            if first is None:
                raise
        else:
            return await answer(done)
    if first is None:
        raise RetryLater(f"Another request with the {HEADER} {key.key} is in progress; try again")
    _check_same(first, key)
    return await _replay(request, first, answer, replayed, later)


async def _key_of(request: web.Request) -> IdempotencyKey | None:
    given = request.headers.getall(HEADER, None)
    if not given:
        return None
    if len(given) > 1:
        raise BadRequest(f"The request has {len(given)} {HEADER} headers; send one")
    key = given[0].strip().lower()
    if not _UUID7.fullmatch(key):
        raise BadRequest(f"{HEADER} is {given[0][:60]!r}; it must be a UUID of version 7 (RFC 9562)")
    scope = "\n".join((request[PRINCIPAL].name, request.method, request.rel_url.raw_path))
    body, query = await read_body(request), request.query_string
    large = len(body) > QUICK_BYTES
    digest = await asyncio.to_thread(_hash, body, query) if large else _hash(body, query)
    return IdempotencyKey(key=key, scope=scope, request_hash=digest)


def _hash(body: bytes, query: str) -> str:
    """A digest of the request: JSON with sorted keys, so that a repeat may be serialised differently."""
    try:
        canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        canonical = body  # the handler refuses it with a better message
    digest = hashlib.sha256(canonical)
    digest.update(b"\n" + query.encode())
    return digest.hexdigest()


async def _keep(request: web.Request, key: IdempotencyKey, refusal: web.Response) -> IdempotencyRecord | None:
    """Records a refusal. Returns the record of another request with this key, if that was faster."""
    now_ms = request.app[CLOCK].now_ms()
    now_s, ttl_s = request.app[CLOCK].monotonic(), request.app[SETTINGS].idempotency_ttl_s
    kept, who = request.app[KEPT], request[PRINCIPAL].name
    if not kept.has_room(who, now_s):  # then a repeat is evaluated again
        return None
    kept.add(who, now_s, now_s + ttl_s)
    body = refusal.body
    record = IdempotencyRecord(
        key=key.key,
        scope=key.scope,
        request_hash=key.request_hash,
        status=refusal.status,
        body=bytes(body) if isinstance(body, bytes | bytearray) else None,
        expires_ms=now_ms + ttl_s * 1000,
    )
    try:
        await request.app[STORE].transact([SaveIdempotency(record=record)])
    except IdempotencyTaken:
        return await request.app[STORE].idempotency(key.key, now_ms)
    return None


def _check_same(first: IdempotencyRecord, key: IdempotencyKey) -> None:
    if (first.scope, first.request_hash) != (key.scope, key.request_hash):
        raise Unprocessable(f"The {HEADER} {key.key} was used for a different request; use a new key for each request")


async def _replay(
    request: web.Request,
    first: IdempotencyRecord,
    answer: Callable[[T], Awaitable[web.Response]],
    replayed: type[T] | None,
    later: Callable[[], Awaitable[T]] | None,
) -> web.Response:
    if first.metadata_location is not None and replayed is not None:
        try:
            loaded = await request.app[CATALOG].replay(first)
        except CommitUnknown:
            if later is None:
                raise
            return await answer(await later())
        assert isinstance(loaded, replayed), f"{first.metadata_location} was recorded by another operation"
        return await answer(loaded)
    if first.body is None:
        return web.Response(status=first.status)
    return web.Response(status=first.status, body=first.body, content_type="application/json")
