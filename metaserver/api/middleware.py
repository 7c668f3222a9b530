"""The one middleware around every handler: request id, bound, identity, errors, metrics, log, audit, trace.

One function rather than ten: each layer of middleware costs a coroutine and a frame per request, and the order
between them is easier to see in one place. What is logged: method, route template, status, time, size, who, request
id. Never a query string, a header or a body, which may hold secrets.
"""

from __future__ import annotations

import re

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from metaserver.api.describe import Description, description_of
from metaserver.api.errors import from_http_exception, from_seamark_error, from_unexpected
from metaserver.api.keys import DRAIN, METRICS, REQUEST_ID, SETTINGS
from metaserver.clock import Clock
from metaserver.errors import RetryLater, SeamarkError

_log = structlog.get_logger("seamark.request")
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}\Z")
_UNROUTED = Description("unrouted", "")


def build_middleware(clock: Clock) -> Middleware:
    routes: dict[int, tuple[str, Description]] = {}
    in_flight = 0

    @web.middleware
    async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal in_flight
        started = clock.monotonic()
        app = request.app
        template, described = _route(request, routes)
        request_id = _request_id(request, clock)
        request[REQUEST_ID] = request_id
        counted = not (described.public or described.waits)
        error: BaseException | None = None
        response: web.StreamResponse
        in_flight += counted
        try:
            if counted and in_flight > app[SETTINGS].requests_limit:
                raise RetryLater(f"{in_flight - 1} requests are being answered already; try again shortly")
            response = await handler(request)
        except SeamarkError as failure:
            error = failure
            response = from_seamark_error(failure, head=request.method == "HEAD")
        except web.HTTPException as failure:
            error = failure
            response = from_http_exception(failure, request)
        except Exception as failure:  # noqa: BLE001  the last place where a bug can still be answered and logged
            error = failure
            _log.error("unexpected error", request_id=request_id, operation=described.operation, exc_info=failure)
            response = from_unexpected(request_id, head=request.method == "HEAD")
        finally:
            in_flight -= counted
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id
            if app[DRAIN].is_set():
                response.force_close()
        seconds = clock.monotonic() - started
        app[METRICS].observe(described.operation, response.status, seconds, error)
        _log.info(
            "request",
            method=request.method,
            route=template,
            operation=described.operation,
            status=response.status,
            ms=round(seconds * 1000, 2),
            bytes=response.content_length,
            request_id=request_id,
        )
        return response

    return around


def _route(request: web.Request, routes: dict[int, tuple[str, Description]]) -> tuple[str, Description]:
    """Template and description of the matched route. A bounded set: what matched nothing is "unrouted"."""
    route = request.match_info.route
    resource = route.resource
    if resource is None:
        return "unrouted", _UNROUTED
    known = routes.get(id(route))
    if known is None:
        known = routes[id(route)] = (resource.canonical, description_of(route.handler))
    return known


def _request_id(request: web.Request, clock: Clock) -> str:
    given = request.headers.get("X-Request-Id")
    return given if given is not None and _SANE_ID.match(given) else str(clock.uuid7())
