"""The middleware around every handler: request id, limits, identity, errors, metrics, log, audit and trace.

The middleware is one function, because each layer of middleware needs a coroutine and a frame for each request. Also,
the order of the steps is visible in one place. The log contains the method, the route template, the status, the time,
the size, the principal and the request id. It contains no query string, no header and no body, because these may
contain secrets.
"""

from __future__ import annotations

import logging
import math
import re

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ClientGone, SeamarkError
from seamark.metaserver.access.authorizer import is_audited_change
from seamark.metaserver.access.principal import ANONYMOUS, CURRENT, Principal
from seamark.metaserver.access.refusals import Refusals
from seamark.metaserver.api.http.bodies import SLOT, end_unread
from seamark.metaserver.api.http.client_certificates import read_client_certificate
from seamark.metaserver.api.http.components import ServerComponents
from seamark.metaserver.api.http.describe import Description, get_description
from seamark.metaserver.api.http.errors import from_http_exception, from_seamark_error, from_unexpected
from seamark.metaserver.api.http.forwarding import FORWARDED, forward
from seamark.metaserver.api.http.keys import PRINCIPAL, REQUEST_ID, STALENESS
from seamark.metaserver.api.http.slots import RequestSlot
from seamark.metaserver.runtime.staleness import Staleness, allow_staleness, parse_staleness_s

_log = structlog.get_logger("seamark.request")
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}\Z")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?\Z")
_BODILESS = ("GET", "HEAD")
_UNMATCHED = Description("", "", "unrouted")
"""The description of paths that match no route."""
_UNROUTED = ("unrouted", _UNMATCHED)
_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
"""The digit of a UUID that contains its variant and two random bits, by a random digit (RFC 9562, 4.1)."""
_propagator = TraceContextTextMapPropagator()


class _RequestPipeline:
    """The state and the steps of the middleware."""

    def __init__(self, components: ServerComponents) -> None:
        self._components = components
        self._limits = components.worker_limits
        self._clock = components.clock
        self._metrics = components.metrics
        self._tracer = components.tracer
        self._authenticator = components.authenticator
        self._audit = components.audit
        self._warehouses = components.warehouses
        self._database_shares = components.database_shares
        self._drain = components.drain
        self._logs_requests = logging.getLevelNamesMapping()[components.settings.log_level.upper()] <= logging.INFO
        self._routes: dict[int, tuple[str, Description]] = {}
        """The path template and the description of each route, by the `id()` of the route object."""
        self._ids = _RequestIds(components.clock)
        # Up to 20 refused logins of each address are logged per minute.
        self._unrouted_refusals = Refusals(each_address=20, each_principal=0, keys_max=1000)
        self._stale_limit_s = components.settings.stale_limit_s
        self._stale_wait_s = components.settings.stale_wait_s
        self._audit_decisions: dict[tuple[str, int], bool] = {}
        """Whether the audit log records a request, by operation and HTTP status."""

    @web.middleware
    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, and record it in the log, the audit log and the metrics."""
        clock = self._clock
        start_s = clock.monotonic()
        template, description = self._find_route(request)
        if description is FORWARDED and self._warehouses is not None:
            forwarded = await forward(request, self._warehouses)
            if forwarded is not None:
                self._metrics.warehouses.count_request(request.match_info["warehouse"], forwarded.status)
                return forwarded
        headers = request.headers
        sent_id = headers.get("X-Request-Id")
        request_id = sent_id if sent_id is not None and _VALID_ID.match(sent_id) else self._ids.generate()
        request[REQUEST_ID] = request_id
        staleness = self._read_staleness(request, description) if self._stale_limit_s else None
        if self._tracer is None:
            pending_answer = self._answer_request(request, handler, description, request_id)
        else:
            pending_answer = self._answer_in_span(self._tracer, request, handler, template, description, request_id)
        if staleness is None:
            response, error = await pending_answer
        else:
            request[STALENESS] = staleness
            with allow_staleness(staleness):
                response, error = await pending_answer
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
            response.headers["Server"] = "seamark"  # By default, aiohttp sends its version and Python's version.
            if self._drain.is_set():
                response.force_close()
            if error is not None or response.status >= 400 or not request.content.is_eof():
                end_unread(request, response)
        is_logged = self._logs_requests
        is_audited = self._audit_decisions.get((description.operation, response.status))
        if is_audited is None:
            is_audited = self._decide_audit(description, response.status)
        if is_audited:
            is_recorded = await self._audit.record(
                principal_name=_read_principal_name(request),
                operation=description.operation,
                resource=request.path,
                status=response.status,
                request_id=request_id,
                remote=request.remote,
                kind=error.kind if isinstance(error, SeamarkError) else None,
            )
            is_logged = is_logged and (is_recorded or response.status not in (401, 403))
        elif is_logged and response.status == 401:
            # No audit record limits these lines, so log only some of them for each address.
            self._unrouted_refusals.end_window_if_due(clock.now_ms())
            is_logged = self._unrouted_refusals.count_and_check_limit("", request.remote or "", unauthenticated=True)
        seconds = clock.monotonic() - start_s
        self._metrics.observe(description.operation, response.status, seconds, error)
        if is_logged:
            self._log_line(request, response, template, description, seconds, request_id)
        return response

    def _read_staleness(self, request: web.Request, description: Description) -> Staleness | None:
        """Return how old the answer to a read-only request may be, or None if it may not be stale.

        The request states the age in `Cache-Control`. The setting `stale_limit_s` limits it.
        """
        cache_control = request.headers.get("Cache-Control")
        if cache_control is None or description.public or description.waits or is_audited_change(description.operation):
            return None
        allowed_s = parse_staleness_s(cache_control)
        return Staleness(min(allowed_s, self._stale_limit_s), self._stale_wait_s) if allowed_s else None

    def _log_line(
        self,
        request: web.Request,
        response: web.StreamResponse,
        template: str,
        description: Description,
        seconds: float,
        request_id: str,
    ) -> None:
        """Log an answered request.

        The line has the trace id that the client sent, so that logs and traces can be joined. `template` is the path of
        the route with variables in braces.
        """
        fields = {
            "method": request.method,
            "route": template,
            "operation": description.operation,
            "status": response.status,
            "ms": round(seconds * 1000, 2),
            "bytes": response.content_length,
            "who": _read_principal_name(request),
            "request_id": request_id,
        }
        parent = request.headers.get("traceparent")
        if parent is not None and (match := _TRACEPARENT.match(parent)):
            fields["trace_id"] = match[1]
        _log.info("request", **fields)

    async def _answer_request(
        self, request: web.Request, handler: Handler, description: Description, request_id: str
    ) -> tuple[web.StreamResponse, Exception | None]:
        """Return the answer of the handler and None, or the answer for an error and the error."""
        requests = self._metrics.requests
        requests.answering += 1
        slot: RequestSlot | None = None
        try:
            if not description.public:
                if self._authenticator.open:
                    self._authenticator.check_certificate(read_client_certificate(self._components, request))
                    principal = self._authenticator.identify_local(request.headers, request.remote)
                else:
                    principal = await self._log_in_client(request)
                request[PRINCIPAL] = principal
                if request.method != "DELETE" and is_audited_change(description.operation):
                    self._database_shares.require_room(principal.name)
                holder = None if principal is ANONYMOUS else principal.name
                slot = RequestSlot(self._limits, holder, "watching" if description.waits else "working")
                request[SLOT] = slot
                token = CURRENT.set(principal.name)
                try:
                    return await handler(request), None
                finally:
                    CURRENT.reset(token)
            if request.method not in _BODILESS:
                request[SLOT] = slot = RequestSlot(self._limits, f"address {request.remote}", "tokens")
            return await handler(request), None
        except SeamarkError as error:
            return from_seamark_error(error, head=request.method == "HEAD"), error
        except web.HTTPException as error:
            return from_http_exception(error, request), error
        except Exception as error:  # noqa: BLE001  the last place that can answer and log an unexpected error
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                client_error = ClientGone("The client closed the connection before the answer")
                return from_seamark_error(client_error, head=request.method == "HEAD"), client_error
            _log.error("unexpected error", request_id=request_id, operation=description.operation, exc_info=error)
            return from_unexpected(request_id, head=request.method == "HEAD"), error
        finally:
            requests.answering -= 1
            if slot is not None:
                slot.leave()

    async def _log_in_client(self, request: web.Request) -> Principal:
        """Log in the client of a request, and return its principal.

        Logins have a separate limit by address, so that unauthenticated clients take no slots from authenticated
        requests.
        """
        logins, address = self._limits.logging_in, f"address {request.remote}"
        logins.take(address)
        try:
            certificate = read_client_certificate(self._components, request)
            return await self._authenticator.authenticate(request.headers, request.remote, certificate)
        finally:
            logins.release(address)

    async def _answer_in_span(
        self,
        tracer: Tracer,
        request: web.Request,
        handler: Handler,
        template: str,
        description: Description,
        request_id: str,
    ) -> tuple[web.StreamResponse, Exception | None]:
        """Answer a request within a span of the tracer, which continues the trace of the client.

        Returns:
            The answer, and the error from which it was made, or None if there was no error.
        """
        attributes = {
            "http.request.method": request.method,
            "http.route": template,
            "seamark.request_id": request_id,
        }
        with tracer.start_as_current_span(
            description.operation,
            context=_propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            response, error = await self._answer_request(request, handler, description, request_id)
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_status(StatusCode.ERROR, type(error).__name__ if error is not None else None)
            return response, error

    def _decide_audit(self, description: Description, status: int) -> bool:
        """Decide whether requests with this operation and status are recorded in the audit log. Cache the decision.

        The audit log omits unmatched paths, which scanners send by the thousand, and successes of public routes. It
        also omits refusals by a limit, because recording each refusal would bypass the limit.
        """
        is_unwanted = (
            status == 429 or description in (_UNMATCHED, FORWARDED) or (description.public and status not in (401, 403))
        )
        is_audited = self._audit_decisions[description.operation, status] = not is_unwanted and self._audit.is_kept(
            description.operation, status
        )
        return is_audited

    def _find_route(self, request: web.Request) -> tuple[str, Description]:
        """Return the template and the description of the matched route.

        The number of templates is bounded: all unmatched paths have the template "unrouted".
        """
        route = request.match_info.route
        route_description = self._routes.get(id(route))
        if route_description is None:
            resource = route.resource
            if resource is None:
                return _UNROUTED
            route_description = self._routes[id(route)] = (resource.canonical, get_description(route.handler))
        return route_description


def _read_principal_name(request: web.Request) -> str:
    principal = request.get(PRINCIPAL)
    return ANONYMOUS.name if principal is None else principal.name


class _RequestIds:
    """A generator of UUIDv7 as text.

    The random part is drawn once, and then incremented (RFC 9562, 5.7 and 6.2). Request ids need not be secret, and
    drawing random bytes for each id would take most of the time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        random_hex = clock.draw_bytes(10).hex()
        self._tail = f"{_VARIANTS[random_hex[0]]}{random_hex[1:4]}-{random_hex[4:16]}"
        self._count = int(random_hex[16:], 16)

    def generate(self) -> str:
        """Return a new id. Ids are unique for up to 4,096 requests per millisecond."""
        self._count = count = self._count + 1 & 0xFFF
        timestamp_hex = f"{self._clock.now_ms():012x}"
        return f"{timestamp_hex[:8]}-{timestamp_hex[8:]}-7{count:03x}-{self._tail}"


async def add_age(request: web.Request, response: web.StreamResponse) -> None:
    """Add the header Age (RFC 9111, 5.1) to an answer that was made without the database or the storage.

    Error answers, and answers with the age 0, do not receive the header.
    """
    staleness = request.get(STALENESS)
    if staleness is not None and staleness.age_s > 0 and response.status < 400:
        response.headers["Age"] = str(math.ceil(staleness.age_s))


def build_middleware(components: ServerComponents) -> Middleware:
    return _RequestPipeline(components).handle
