"""The one middleware around every handler: request id, bound, identity, errors, metrics, log, audit, trace.

One function rather than ten: each layer of middleware costs a coroutine and a frame per request, and the order between
them is easier to see in one place. What is logged: method, route template, status, time, size, who, request id. Never a
query string, a header or a body, which may hold secrets.
"""

from __future__ import annotations

import re

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from metaserver.api.describe import Description, description_of
from metaserver.api.errors import from_http_exception, from_seamark_error, from_unexpected
from metaserver.api.keys import DRAIN, REQUEST_ID
from metaserver.api.metrics import Metrics
from metaserver.clock import Clock
from metaserver.errors import RetryLater, SeamarkError
from metaserver.settings import Settings

_log = structlog.get_logger("seamark.request")
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}\Z")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?\Z")
_UNROUTED = ("unrouted", Description("unrouted", ""))
_propagator = TraceContextTextMapPropagator()


class _Around:
    """The middleware's state and its steps. `metrics.in_flight_now` is held against the bound on requests."""

    def __init__(self, settings: Settings, clock: Clock, metrics: Metrics, tracer: Tracer | None) -> None:
        self._limit = settings.requests_limit
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._routes: dict[int, tuple[str, Description]] = {}

    async def handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        clock = self._clock
        started = clock.monotonic()
        template, described = self._route(request)
        headers = request.headers
        given = headers.get("X-Request-Id")
        request_id = given if given is not None and _SANE_ID.match(given) else str(clock.uuid7())
        request[REQUEST_ID] = request_id
        if self._tracer is None:
            response, error = await self._answer(request, handler, described, request_id)
        else:
            response, error = await self._traced(self._tracer, request, handler, template, described, request_id)
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
            if request.app[DRAIN].is_set():
                response.force_close()
        seconds = clock.monotonic() - started
        self._metrics.observe(described.operation, response.status, seconds, error)
        fields = {
            "method": request.method,
            "route": template,
            "operation": described.operation,
            "status": response.status,
            "ms": round(seconds * 1000, 2),
            "bytes": response.content_length,
            "request_id": request_id,
        }
        if (parent := headers.get("traceparent")) is not None and (parsed := _TRACEPARENT.match(parent)):
            fields["trace_id"] = parsed[1]
        _log.info("request", **fields)
        return response

    async def _answer(
        self, request: web.Request, handler: Handler, described: Description, request_id: str
    ) -> tuple[web.StreamResponse, Exception | None]:
        """What the handler answers, or its error in the wire's shape, and that error."""
        metrics = self._metrics
        counted = not (described.public or described.waits)
        metrics.in_flight_now += counted
        try:
            if counted and metrics.in_flight_now > self._limit:
                raise RetryLater(f"{self._limit} requests are being answered already; try again shortly")
            return await handler(request), None
        except SeamarkError as error:
            return from_seamark_error(error, head=request.method == "HEAD"), error
        except web.HTTPException as error:
            return from_http_exception(error, request), error
        except Exception as error:  # noqa: BLE001  the last place where a bug can still be answered and logged
            _log.error("unexpected error", request_id=request_id, operation=described.operation, exc_info=error)
            return from_unexpected(request_id, head=request.method == "HEAD"), error
        finally:
            metrics.in_flight_now -= counted

    async def _traced(
        self,
        tracer: Tracer,
        request: web.Request,
        handler: Handler,
        template: str,
        described: Description,
        request_id: str,
    ) -> tuple[web.StreamResponse, Exception | None]:
        attributes = {
            "http.request.method": request.method,
            "http.route": template,
            "seamark.request_id": request_id,
        }
        with tracer.start_as_current_span(
            described.operation,
            context=_propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            response, error = await self._answer(request, handler, described, request_id)
            span.set_attribute("http.response.status_code", response.status)
            if response.status >= 500:
                span.set_status(StatusCode.ERROR, type(error).__name__ if error is not None else None)
            return response, error

    def _route(self, request: web.Request) -> tuple[str, Description]:
        """Template and description of the matched route. A bounded set: what matched nothing is "unrouted"."""
        route = request.match_info.route
        known = self._routes.get(id(route))
        if known is None:
            resource = route.resource
            if resource is None:
                return _UNROUTED
            known = self._routes[id(route)] = (resource.canonical, description_of(route.handler))
        return known


def build_middleware(settings: Settings, clock: Clock, metrics: Metrics, tracer: Tracer | None) -> Middleware:
    """`tracer`: None where no traces are wanted."""
    around = _Around(settings, clock, metrics, tracer)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await around.handle(request, handler)

    return middleware
