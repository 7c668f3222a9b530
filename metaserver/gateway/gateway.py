"""The gateway's application: checks the keys and the scope of each S3 request, and lets the backend answer it.

A request is checked in these steps:

1. Parse the request target.
2. Verify the session token and the signature.
3. Check the operation against the grant: every object of the request must be below the table's location
   (`objects/s3_scope.py`).
4. Check that the table still owns the location.
5. Wait for a free slot.

The body is read last.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, ClientGone, Forbidden, SeamarkError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.access.gateway_keys import GatewayKeys, ObjectGrant
from seamark.metaserver.api.http.observability.metrics import ServerMetrics
from seamark.metaserver.api.http.slots import HolderLimit
from seamark.metaserver.gateway.backend import Backend, BrokenAnswer, S3Call, S3Read, StartedAnswer
from seamark.metaserver.gateway.body import Body
from seamark.metaserver.gateway.caching.caching import CachingBackend
from seamark.metaserver.gateway.connection import SentAnswer
from seamark.metaserver.gateway.ownership import GrantChecker
from seamark.metaserver.gateway.s3_errors import S3Error, build_error_answer, convert_error
from seamark.metaserver.gateway.sigv4 import (
    RequestTarget,
    SignatureClaim,
    check_signed_headers,
    derive_signing_key,
    is_signed,
    read_claim,
    split_presigned,
)
from seamark.metaserver.objects.s3_scope import (
    DELETE_BODY_MAX,
    READ_METHODS,
    WRITE_METHODS,
    Address,
    check_request,
    parse_target,
)
from seamark.metaserver.settings.settings import Settings

OPERATION = "gateway"
"""The prefix of the operation under which metrics count a request. The method follows, as in `gatewayGet`."""
PARTS_XML_BYTES_MAX = 4 << 20
"""The maximum size of the XML of CompleteMultipartUpload: 10,000 parts, each with its number, ETag and checksums."""
_HEADERS_MAX = 100
_REFUSED_HEADER_CHARS = re.compile(r"[\ud800-\udfff]|[^\S \t]")
"""Matches characters that a header must not contain: bytes that are not UTF-8, which aiohttp passes on as surrogates,
and white space other than spaces and tabs, which only some programs remove before they sign a request."""
_PRINCIPAL_NAME: web.RequestKey[str] = web.RequestKey("principal_name", str)
_log = structlog.get_logger("seamark.gateway")


@dataclass(frozen=True, slots=True)
class _AdmittedRequest:
    """A request with a valid signature, and the rights of its keys. `headers` do not contain the session token."""

    address: Address
    headers: dict[str, str]
    claim: SignatureClaim
    grant: ObjectGrant
    secret: str


class StartedRequest:
    """A request that `Gateway.begin` has admitted.

    If it has an answer, the first bytes of the answer were sent, and the request keeps its slot until the answer ends.
    """

    def __init__(self, gateway: Gateway, admitted: _AdmittedRequest, request_id: str, started_s: float) -> None:
        self.gateway = gateway
        self.admitted = admitted
        self.request_id = request_id
        self.started_s = started_s
        self.answer: StartedAnswer | None = None
        self._release_slot: Callable[[], None] | None = None

    def keep(self, answer: StartedAnswer, release_slot: Callable[[], None]) -> None:
        self.answer, self._release_slot = answer, release_slot

    def abandon(self) -> None:
        """Release the answer, because the connection was lost before `Gateway.handle` began."""
        self.release()
        self.gateway.forget(self)

    def release(self) -> None:
        """Release the slot and the memory of the answer."""
        release_slot, self._release_slot = self._release_slot, None
        if release_slot is not None:
            release_slot()
        if self.answer is not None and self.answer.abandon is not None:
            self.answer.abandon()


class Gateway:
    """Handles the requests with the keys of one warehouse.

    Args:
        settings: The settings of the warehouse.
        clock: The clock.
        keys: Verifies the keys of the warehouse.
        ownership: Checks that a grant is still valid.
        backend: Answers the requests.
        metrics: The metrics of the server.
        document_limit: The limit for the memory of XML in bodies, which all gateways of the server share.
        warehouse_name: The name of a further warehouse, or an empty text for the server's own warehouse.
        recheck: Checks a grant again while the body of a request is read. The default is the method of `ownership`. For
            a further warehouse, it must also succeed after the warehouse was changed and opened again.
    """

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        keys: GatewayKeys,
        ownership: GrantChecker,
        backend: Backend,
        metrics: ServerMetrics,
        document_limit: HolderLimit,
        warehouse_name: str = "",
        recheck: Callable[[ObjectGrant], Awaitable[None]] | None = None,
    ) -> None:
        self._warehouse_name = warehouse_name
        limit = settings.gateway_requests_limit
        self._settings = settings
        self._clock = clock
        self._keys = keys
        self._ownership = ownership
        self._recheck = recheck or ownership.check
        self._backend = backend
        self._metrics = metrics
        # Without logins, all requests have the same principal, which may use all slots. Otherwise it may use half.
        share_divisor = 1 if settings.auth == "none" else 2
        self._slots = HolderLimit("gateway requests at once", limit, limit // share_divisor)
        self._document_limit = document_limit
        self._begin_answer = backend.begin if isinstance(backend, CachingBackend) else None
        self._running: set[object] = set()
        """The requests that have begun and not ended."""
        self._idle = asyncio.Event()

    async def check(self, grant: ObjectGrant) -> None:
        """Check that a grant is still valid. See `GrantChecker.check`."""
        await self._ownership.check(grant)

    def forget(self, started: StartedRequest) -> None:
        """Forget a started request whose connection was lost."""
        self._running.discard(started)
        if not self._running:
            self._idle.set()

    async def end(self) -> None:
        """Wait up to `drain_timeout_s` for running requests, and close the backend."""
        deadline_s = self._clock.monotonic() + self._settings.drain_timeout_s
        while self._running and (left_s := deadline_s - self._clock.monotonic()) > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), left_s)
        await self._backend.close()

    def begin(self, message: RawRequestMessage, transport: asyncio.Transport) -> StartedRequest | bool:
        """Answer a read of data in memory immediately, after the same checks as in `handle`.

        Returns:
            True if the whole answer was sent, and False if nothing was done. Otherwise a StartedRequest: `handle`
            continues with it, and does not repeat the checks that it contains.
        """
        if self._begin_answer is None or message.method not in READ_METHODS:
            return False
        started_s, request_id = self._clock.monotonic(), self._clock.uuid7().hex
        try:
            admission = self._admit(message.method, message.path, message.headers.items())
        except (S3Error, SeamarkError):
            return False
        started, grant = StartedRequest(self, admission, request_id, started_s), admission.grant
        self._running.add(started)
        if not self._ownership.is_confirmed(grant):
            return started
        try:
            check_request(message.method, admission.address, admission.headers, None, parse_location(grant.location))
            self._slots.take(grant.principal_name)
        except (S3Error, SeamarkError):
            return started
        answer: StartedAnswer | None = None
        try:
            s3_read = S3Read(
                message.method, admission.address, admission.headers, request_id, grant.principal_name, grant.pinned
            )
            answer = self._begin_answer(s3_read, transport)
        finally:
            if answer is None or answer.send_body is None:
                self._slots.release(grant.principal_name)
        if answer is None:
            return started
        if answer.send_body is None:
            self._running.discard(started)
            self._report(
                message.method, answer.status, answer.length, grant.principal_name, request_id, started_s, None
            )
            return True
        started.keep(answer, lambda: self._slots.release(grant.principal_name))
        return started

    async def handle(
        self, request: web.Request, started: StartedRequest | None = None, refusal: SeamarkError | None = None
    ) -> web.StreamResponse:
        """Answer a request.

        Args:
            request: The request, whose body is not read yet.
            started: The same request if `begin` has started it.
            refusal: The error with which to refuse the request.
        """
        started_s, request_id = self._clock.monotonic(), self._clock.uuid7().hex
        failure: Exception | None = None
        self._metrics.requests.answering += 1
        running_request = started or object()
        self._running.add(running_request)
        try:
            if refusal is not None:
                raise refusal
            if started is not None:
                started_s, request_id = started.started_s, started.request_id
                admission = started.admitted
            else:
                admission = self._admit(request.method, request.raw_path, request.headers.items())
            request[_PRINCIPAL_NAME] = admission.grant.principal_name
            if started is not None and started.answer is not None:
                response = await self._finish(request, started, started.answer)
            else:
                response = await self._answer(request, admission, request_id)
        except SeamarkError as error:
            failure, response = error, self._refuse(convert_error(error), request, request_id)
        except S3Error as error:
            failure, response = error, self._refuse(error, request, request_id)
        except ConnectionError:
            failure, response = ClientGone("The client closed the connection"), web.Response(status=ClientGone.code)
        except Exception as error:  # noqa: BLE001  the last place that can answer and log an unexpected error
            _log.error("unexpected error", request_id=request_id, method=request.method, exc_info=error)
            internal_error = S3Error("InternalError", f"Internal error; see the server log for request id {request_id}")
            failure, response = error, self._refuse(internal_error, request, request_id)
        finally:
            self._metrics.requests.answering -= 1
            self._running.discard(running_request)
            if not self._running:
                self._idle.set()
        length, client = response.content_length, request.get(_PRINCIPAL_NAME, "")
        self._report(request.method, response.status, length, client, request_id, started_s, failure)
        return response

    async def _finish(self, request: web.Request, started: StartedRequest, answer: StartedAnswer) -> web.StreamResponse:
        """Send the remaining bytes of a started answer, and release its slot and its memory."""
        # Make aiohttp assume that its writer has sent bytes. On an error, aiohttp then closes the connection instead of
        # sending an error response.
        request.writer.output_size = 1
        try:
            if answer.send_body is not None:
                await answer.send_body(request.writer)
        except BrokenAnswer:
            if request.transport is not None:
                request.transport.abort()
        finally:
            started.release()
        return SentAnswer(answer.status, answer.length)

    def _report(
        self,
        method: str,
        status: int,
        length: int | None,
        client: str,
        request_id: str,
        started_s: float,
        failure: Exception | None,
    ) -> None:
        """Log a request, and count it in the metrics.

        Args:
            method: The method of the request.
            status: The status of the answer.
            length: The length of the answer in bytes, or None if it is unknown.
            client: The principal, or an empty text if the request was not authenticated.
            request_id: The id of the request.
            started_s: The time at which the request began, in monotonic seconds.
            failure: The error of the request, or None.
        """
        is_known = method in READ_METHODS or method in WRITE_METHODS
        operation = f"{OPERATION}{method.title()}" if is_known else OPERATION
        seconds = self._clock.monotonic() - started_s
        self._metrics.observe(operation, status, seconds, failure)
        if self._warehouse_name:
            self._metrics.warehouses.count_request(self._warehouse_name, status)
        # Do not log the target: keys contain partition values, and a query may contain a signature. Do not log requests
        # without authentication, because they could fill the log.
        log = _log.info if client else _log.debug
        log(
            "request",
            method=method,
            operation=operation,
            status=status,
            ms=round(seconds * 1000, 2),
            bytes=length,
            principal_name=client,
            request_id=request_id,
        )

    def _refuse(self, error: S3Error, request: web.Request, request_id: str) -> web.StreamResponse:
        """Return the answer for an error. If the answer of the request has begun, abort the connection instead."""
        if request.writer.output_size > 0:
            # The status of a started answer cannot change, so abort the connection to show the error.
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=error.status)
        response = build_error_answer(error, request.path, request_id, is_head=request.method == "HEAD")
        if not request.content.is_eof():
            response.force_close()  # Otherwise the server would read the rest of a body that it has refused.
        return response

    def _admit(self, method: str, target: str, received_headers: Iterable[tuple[str, str]]) -> _AdmittedRequest:
        """Check the signature of a request, and that its keys allow the method.

        Raises:
            S3Error: The signature or the request is invalid.
            Forbidden: The keys do not allow the method.
        """
        if method not in READ_METHODS and method not in WRITE_METHODS:
            raise S3Error("MethodNotAllowed", "The method is not allowed against this resource")
        headers = _join_headers(received_headers)
        try:
            address = parse_target(target)
        except BadRequest as error:
            raise S3Error("InvalidArgument", error.message) from None
        query, presigned_query = split_presigned(address.query)
        address = Address(address.bucket, address.key, query)
        path, _, raw_query = target.partition("?")
        claim, grant, secret = self._authenticate(RequestTarget(method, path, raw_query, headers), presigned_query)
        headers.pop("x-amz-security-token", None)
        if method in WRITE_METHODS and not grant.writable:
            raise Forbidden(f"{method} needs write access to this table")
        return _AdmittedRequest(address, headers, claim, grant, secret)

    async def _answer(self, request: web.Request, admission: _AdmittedRequest, request_id: str) -> web.StreamResponse:
        """Check what an authenticated request may access, read its XML document if it has one, and answer it."""
        address, headers, grant = admission.address, admission.headers, admission.grant
        with self._slots.reserve(grant.principal_name), contextlib.ExitStack() as reservations:
            await self._ownership.check(grant)
            table, is_multi_delete = parse_location(grant.location), "delete" in address.query
            # The body of a multi-object delete names the objects, so such a request is checked after its body is read.
            if not is_multi_delete:
                check_request(request.method, address, headers, None, table)
            body = self._open_body(request, admission)
            document = None
            if body is not None and (request.method == "POST" or "tagging" in address.query):
                reservations.enter_context(self._document_limit.reserve(grant.principal_name, body.length))
                document = await body.read(DELETE_BODY_MAX if is_multi_delete else PARTS_XML_BYTES_MAX)
                body = None  # The body is read completely, and is available as `document`.
            if is_multi_delete:
                check_request(request.method, address, headers, _decode_text(document), table)
            call = S3Call(
                request.method,
                address,
                headers,
                request_id,
                grant.principal_name,
                grant.pinned,
                request,
                body,
                document,
            )
            return await self._backend.answer(call)

    def _authenticate(
        self, target: RequestTarget, presigned_query: Mapping[str, str]
    ) -> tuple[SignatureClaim, ObjectGrant, str]:
        claim = read_claim(target, presigned_query, now_ms=self._clock.now_ms())
        if claim.region != self._settings.s3_region:
            raise S3Error(
                "AuthorizationHeaderMalformed",
                f"the region {claim.region[:64]!r} is wrong; expecting {self._settings.s3_region!r}",
            )
        if not claim.token:
            raise S3Error("AccessDenied", "The request has no session token; use all keys of the table's config")
        grant, secret = self._keys.verify(claim.token, claim.access_key_id)
        check_signed_headers(claim, target.headers)
        if not is_signed(claim, target, secret):
            raise S3Error("SignatureDoesNotMatch", "The request's signature does not match; check the secret key")
        return claim, grant, secret

    def _open_body(self, request: web.Request, admission: _AdmittedRequest) -> Body | None:
        """Return the unread body of a request, or None if its method has no body or if it copies another object.

        Raises:
            S3Error: InvalidRequest if the request has a body that its method does not allow.
        """
        address, claim = admission.address, admission.claim
        if request.method not in ("PUT", "POST") or (request.method == "POST" and "uploads" in address.query):
            if request.body_exists:
                raise S3Error("InvalidRequest", f"A {request.method} request must not have a body")
            return None
        if "x-amz-copy-source" in request.headers:
            return None  # The content is that of another object, which the header names.
        settings = self._settings
        return Body(
            request,
            claim,
            derive_signing_key(admission.secret, claim.scope),
            self._clock,
            partial(self._recheck, admission.grant),
            limit_bytes=settings.gateway_put_limit_bytes,
            timeout_s=settings.body_timeout_s,
        )


def _decode_text(document: bytes | None) -> str | None:
    try:
        return None if document is None else document.decode("utf-8")
    except UnicodeDecodeError:
        raise S3Error("MalformedXML", "The XML is not UTF-8") from None


def _join_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers by lower-case name. Several values of a header are joined by commas, as HTTP defines.

    Raises:
        S3Error: There are too many headers, a value has a forbidden character, or a header occurs twice that a signed
            request may have only once.
    """
    headers_by_name: dict[str, str] = {}
    for number, (name, value) in enumerate(headers):
        if number == _HEADERS_MAX:
            raise S3Error("InvalidRequest", f"The request has more than {_HEADERS_MAX} headers")
        lower_name = name.lower()
        if _REFUSED_HEADER_CHARS.search(value):
            raise S3Error(
                "InvalidArgument",
                f"The header {name[:100]} must be UTF-8 with no white space but spaces and tabs",
            )
        if lower_name in headers_by_name and lower_name in (
            "host",
            "authorization",
            "content-length",
            "x-amz-security-token",
        ):
            raise S3Error("InvalidRequest", f"The header {name} is present twice")
        headers_by_name[lower_name] = (
            f"{headers_by_name[lower_name]},{value.strip()}" if lower_name in headers_by_name else value.strip()
        )
    return headers_by_name
