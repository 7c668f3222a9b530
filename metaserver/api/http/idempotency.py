"""Idempotency keys: a repeated request with the same key gets the first answer and has no further effect.

The catalog writes the record in the same transaction as the effects of the request, so either both exist or
neither. As the REST specification says (`Idempotency-Key`), the server records successes, and refusals that a
repeated request would get again. Three kinds of answers are not recorded: 5xx; 401 and 403, which concern the
caller; and 409 CommitFailedException, after which the client retries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from seamark.formats.runtime.errors import (
    CommitConflict,
    CommitUnknown,
    Forbidden,
    RequestError,
    RetryLater,
    TooLarge,
    Unauthenticated,
    Unprocessable,
)
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.errors import from_seamark_error
from seamark.metaserver.api.http.parameters.requests import IDEMPOTENCY_KEY
from seamark.metaserver.catalog.quotas import Quota
from seamark.metaserver.catalog.values import Caller, IdempotencyKey
from seamark.metaserver.store.model import IdempotencyRecord
from seamark.metaserver.store.operations import SaveIdempotency
from seamark.metaserver.store.port import IdempotencyTaken

KEPT: web.AppKey[Quota] = web.AppKey("kept-refusals", Quota)
KEPT_MAX = 20_000
"""The maximum number of recorded refusals of one principal, per worker."""
_NOT_RECORDED = (Unauthenticated, Forbidden, TooLarge)

T = TypeVar("T")


async def run_idempotent(
    call: Call,
    work: Callable[[Caller], Awaitable[T]],
    answer: Callable[[T], web.Response | Awaitable[web.Response]] = lambda _: web.Response(status=204),
    *,
    answer_type: type[T] | None = None,
    recover: Callable[[], Awaitable[T]] | None = None,
) -> web.Response:
    """Run `work` and return its answer, or the first answer if the request's key was used before.

    Args:
        call: The request.
        work: The operation of the request.
        answer: Makes the response from the result of `work`.
        answer_type: The type of the result of `work`, if the record may name a metadata file instead of containing the
            answer.
        recover: Returns a result that includes the first outcome, if the metadata file in the record no longer
            exists.

    Raises:
        BadRequest: The key is not a UUIDv7.
        Unprocessable: Another request has used the key.
        RetryLater: A request with the same key is in progress.
    """
    key = await call.read_idempotency_key()
    if key is None:
        return await _await_answer(answer(await work(call.make_caller(None))))
    first_record = await call.components.store.find_idempotency_record(key.key, call.components.clock.now_ms())
    if first_record is None:
        try:
            outcome = await work(call.make_caller(key))
        except IdempotencyTaken:
            first_record = await call.components.store.find_idempotency_record(key.key, call.components.clock.now_ms())
        except CommitConflict:
            # A concurrent request with the same key may have succeeded. After a refusal, the client would delete live
            # files.
            first_record = await call.components.store.find_idempotency_record(key.key, call.components.clock.now_ms())
            if first_record is None:
                raise
        except RequestError as error:
            if isinstance(error, _NOT_RECORDED):
                raise
            first_record = await _record_refusal(call, key, from_seamark_error(error))
            if first_record is None:
                raise
        else:
            return await _await_answer(answer(outcome))
    if first_record is None:
        raise RetryLater(f"Another request with the {IDEMPOTENCY_KEY} {key.key} is in progress; try again")
    _check_same_request(first_record, key)
    return await _replay_answer(call, first_record, answer, answer_type, recover)


async def _await_answer(answer: web.Response | Awaitable[web.Response]) -> web.Response:
    return answer if isinstance(answer, web.Response) else await answer


async def _record_refusal(call: Call, key: IdempotencyKey, refusal: web.Response) -> IdempotencyRecord | None:
    """Record a refusal, so that a repeated request gets the same answer.

    Each principal may record only a limited number of refusals.

    Returns:
        None, or the record of another request with this key if that request was recorded first.
    """
    now_ms = call.components.clock.now_ms()
    now_s, ttl_s = call.components.clock.monotonic(), call.components.settings.idempotency_ttl_s
    quota, principal_name = call.app[KEPT], call.principal.name
    if not quota.has_room(principal_name, now_s):  # Without a record, a repeated request is evaluated again.
        return None
    quota.add(principal_name, now_s, now_s + ttl_s)
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
        await call.components.store.transact([SaveIdempotency(record=record)])
    except IdempotencyTaken:
        return await call.components.store.find_idempotency_record(key.key, now_ms)
    return None


def _check_same_request(first_record: IdempotencyRecord, key: IdempotencyKey) -> None:
    """Check that a repeated key has the same request.

    Raises:
        Unprocessable: The first request with the key was a different one.
    """
    if (first_record.scope, first_record.request_hash) != (key.scope, key.request_hash):
        raise Unprocessable(
            f"The {IDEMPOTENCY_KEY} {key.key} was used for a different request; use a new key for each request"
        )


async def _replay_answer(
    call: Call,
    first_record: IdempotencyRecord,
    answer: Callable[[T], web.Response | Awaitable[web.Response]],
    answer_type: type[T] | None,
    recover: Callable[[], Awaitable[T]] | None,
) -> web.Response:
    """Answer a repeated request from the record of the first request.

    Args:
        call: The repeated request.
        first_record: The record of the first request.
        answer: Returns the response for the state of the table or view.
        answer_type: The type of this state, or None if the recorded body is the response.
        recover: Returns the state if the catalog can no longer determine it. If it is None, the error is raised.
    """
    if first_record.metadata_location is not None and answer_type is not None:
        try:
            entry_state = await call.components.catalog.replay(first_record)
        except CommitUnknown:
            if recover is None:
                raise
            return await _await_answer(answer(await recover()))
        assert isinstance(entry_state, answer_type), (
            f"{first_record.metadata_location} was recorded by another operation"
        )
        return await _await_answer(answer(entry_state))
    if first_record.body is None:
        return web.Response(status=first_record.status)
    return web.Response(status=first_record.status, body=first_record.body, content_type="application/json")


def add_components(app: web.Application) -> None:
    app[KEPT] = Quota(KEPT_MAX)
