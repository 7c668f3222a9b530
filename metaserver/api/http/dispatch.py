"""Declares a route once, and dispatches its requests: names, rights, body, handler, encoding, in this order.

A `Route` states method, path, operation, parameters, answers, body, and where the right is checked. A handler takes a
`Call` and the parsed body, returns a value, and does not see the HTTP request. No body is read before the caller passed
the check of rights. What depends on the declaration alone is computed when the module is loaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from seamark.metaserver.access.principal import Principal
from seamark.metaserver.api.http import paging
from seamark.metaserver.api.http.describe import Description, Handler, Parameter, ResponseSpec, attach
from seamark.metaserver.api.http.keys import AUTHORIZER, PRINCIPAL
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow_somewhere, caller, path_name, path_namespace, read_json
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.store.port import NamespacePath

B = TypeVar("B")


class Check(Enum):
    """Where the dispatcher checks the right before it reads the body."""

    CATALOG = "the whole catalog"
    NAMESPACE = "the namespace in the path"
    SOMEWHERE = "any namespace; the handler checks the namespaces that the body names"
    HANDLER = "the handler checks the namespaces that the query names; such routes have no body"


class Call:
    """A request, as handlers see it."""

    __slots__ = ("_request", "app", "is_checked", "names", "namespace", "operation", "principal")

    def __init__(self, request: web.Request, route: Route) -> None:
        self._request = request
        self.app = request.app
        self.principal: Principal = request[PRINCIPAL]
        self.operation = route.operation
        self.namespace: NamespacePath = path_namespace(request) if route.has_namespace else ()
        self.names = tuple([path_name(request, variable) for variable in route.names])
        self.is_checked = False
        """Whether the right was checked for a namespace or the catalog."""

    @property
    def query(self) -> Mapping[str, str]:
        return self._request.query

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables of the path as aiohttp decodes them, for those that are not names of catalog entries."""
        return self._request.match_info

    @property
    def caller(self) -> Caller:
        return caller(self._request)

    def allow(self, *namespaces: NamespacePath) -> None:
        """Forbidden unless the caller may do this operation in each of `namespaces`; the empty path is the catalog."""
        authorizer = self.app[AUTHORIZER]
        for namespace in namespaces:
            authorizer.require(self.principal, self.operation, namespace)
        self.is_checked = True

    def paging(self) -> tuple[str | None, int]:
        """(token as sent, size)."""
        return paging.paging(self._request)


Answer = dict[str, Any] | web.Response | None
"""A JSON object, a response that is encoded already, or None for an answer without a body."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a route. As a decorator it makes an `Endpoint` of a handler without a body; `takes` makes one
    of a handler with a body."""

    method: str
    path: str
    operation: str
    summary: str
    check: Check
    tags: tuple[str, ...] = ()
    has_namespace: bool = False
    """Whether the path has the variable `{namespace}`."""
    names: tuple[str, ...] = ()
    """Variables of the path that are names of catalog entries."""
    parameters: tuple[Parameter, ...] = ()
    answers: tuple[ResponseSpec, ...] = ()
    """The first is the success."""
    is_secret: bool = False
    """Whether caches may not store the answer."""

    def __call__(self, work: Callable[[Call], Awaitable[Answer]]) -> Endpoint:
        async def handle(request: web.Request) -> web.StreamResponse:
            call = self._open(request)
            return self._encode(call, await work(call))

        return self._endpoint(handle, None)

    def takes(self, body: type[B]) -> Callable[[Callable[[Call, B], Awaitable[Answer]]], Endpoint]:
        """`body`: the type of the JSON body, from which OpenAPI's schema is derived."""
        if self.check is Check.HANDLER:
            raise TypeError(f"{self.operation} has a body, so that its right has to be checked before the handler")

        def make(work: Callable[[Call, B], Awaitable[Answer]]) -> Endpoint:
            async def handle(request: web.Request) -> web.StreamResponse:
                call = self._open(request)
                return self._encode(call, await work(call, await read_json(request, body)))

            return self._endpoint(handle, body)

        return make

    def _open(self, request: web.Request) -> Call:
        call = Call(request, self)
        if self.check is Check.SOMEWHERE:
            allow_somewhere(request)
        elif self.check is not Check.HANDLER:
            call.allow(call.namespace)
        return call

    def _encode(self, call: Call, answer: Answer) -> web.Response:
        if not call.is_checked:
            raise RuntimeError(f"The handler of {self.operation} did not check the caller's right")
        if isinstance(answer, web.Response):
            return answer
        status = self.answers[0].status
        response = web.Response(status=status) if answer is None else json_answer(answer, status)
        if self.is_secret:
            response.headers["Cache-Control"] = "no-store"
        return response

    def _endpoint(self, handle: Handler, body: Any) -> Endpoint:
        attach(
            handle,
            Description(
                self.operation,
                self.summary,
                self.tags,
                self.parameters,
                answers=self.answers,
                body_type=body,
            ),
        )
        return Endpoint(self, handle)


class Endpoint(msgspec.Struct, frozen=True):
    """A route with the function that aiohttp calls."""

    route: Route
    handle: Handler


def add_endpoints(app: web.Application, *endpoints: Endpoint) -> None:
    """Registers the endpoints in this order. A GET route also answers HEAD."""
    for endpoint in endpoints:
        route = endpoint.route
        if route.method == "GET":
            app.router.add_get(route.path, endpoint.handle)
        else:
            app.router.add_route(route.method, route.path, endpoint.handle)
