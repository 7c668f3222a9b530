"""Declares a route once, and dispatches its requests in this order: namespace, rights, names, body, handler, encoding.

A `Route` states method, path, operation, parameters, answers, limits, and where the right is checked. A handler takes a
`Call` and the parsed body, returns a value, and does not see the HTTP request. The body is read only after the caller
has passed the check of rights. Values that depend on the declaration alone are computed when the module is loaded.

Iceberg's routes have the templates of the REST specification: `/v1/{prefix}/…` is served without a prefix and with the
configured prefix. Other prefixes are names of further warehouses (`forwarding.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec
from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute
from multidict import CIMultiDictProxy

from seamark.formats.protocol.wire import check_changeable, decode_as, encode_json, format_path, is_plan_name
from seamark.formats.runtime.errors import CacheDamaged, NoSuchTable, NoSuchView, RequestError
from seamark.formats.runtime.fair_lock import free_later
from seamark.metaserver.access.authorizer import is_audited_change, needs_writer
from seamark.metaserver.access.principal import ANONYMOUS_NAME, Principal
from seamark.metaserver.access.rights.decisions import THE_SERVER, WAREHOUSE, Securable, have_privileges
from seamark.metaserver.access.rights.privileges import MANAGE_GRANTS
from seamark.metaserver.api.http import bodies
from seamark.metaserver.api.http.client_certificates import read_client_certificate
from seamark.metaserver.api.http.components import COMPONENTS, ServerComponents
from seamark.metaserver.api.http.describe import VARIABLE, Description, Handler, attach_description
from seamark.metaserver.api.http.joined_tables import may_use_plan
from seamark.metaserver.api.http.keys import PRINCIPAL, REQUEST_ID
from seamark.metaserver.api.http.parameters.paging import parse_page_size
from seamark.metaserver.api.http.parameters.plan_audience import HEADER, read_audience
from seamark.metaserver.api.http.parameters.requests import parse_names, read_namespace, read_request_key
from seamark.metaserver.catalog.values import Caller, IdempotencyKey
from seamark.metaserver.settings.fleet import READ, refuse_change
from seamark.metaserver.store.model import FUNCTION, TABLE, VIEW, NamespacePath, StoredPlanTable

PATHS_MAX = 4096
"""The maximum number of paths that the router caches. All are removed before the next path is cached."""
PATH_CHARACTERS_MAX = 300
"""The maximum length of a path that the router caches."""
_CONCURRENT_EXPLANATIONS_MAX = 16
"""The maximum number of objects of one request whose refusals are explained at the same time."""


class Router(web.UrlDispatcher):
    """A router that caches the routes of recent paths.

    Engines repeat few paths, and aiohttp searches all routes for each request.

    The cache has only matched routes of short paths. A route depends on the method and the path alone,
    not on the client; identity and rights are checked later, for each request.
    """

    def __init__(self) -> None:
        super().__init__()
        self._routes_by_path: dict[tuple[str, str], tuple[dict[str, str], AbstractRoute]] = {}

    async def resolve(self, request: web.Request) -> web.UrlMappingMatchInfo:
        """Return the route of a request. Recent paths are cached."""
        key = request.method, request.rel_url.raw_path
        match = self._routes_by_path.get(key)
        if match is not None:
            return web.UrlMappingMatchInfo(*match)  # Each request needs its own copy of the variables.
        match_info = await super().resolve(request)
        if match_info.http_exception is None and len(key[1]) <= PATH_CHARACTERS_MAX:
            if len(self._routes_by_path) >= PATHS_MAX:
                self._routes_by_path.clear()
            self._routes_by_path[key] = dict(match_info), match_info.route
        return match_info


PREFIX: web.AppKey[str] = web.AppKey("prefix", str)
"""The segment after `/v1` that the server announces to clients, or empty."""
_PREFIXED = "/v1/{prefix}/"
_UNPREFIXED = ("/v1/config", "/v1/oauth/tokens")


def list_served_paths(app: web.Application, template: str) -> list[str]:
    """Return the paths at which the server serves a template of the specification."""
    if not template.startswith(_PREFIXED):
        return [template]
    prefixes = ["/v1/", _make_prefix_path(app)]
    return [template.replace(_PREFIXED, prefix) for prefix in prefixes if prefix]


def list_served_endpoints(app: web.Application) -> list[str]:
    """Return all registered Iceberg operations as `METHOD template` of the specification, sorted."""
    skipped_prefix = _make_prefix_path(app)  # The server also serves each path with this prefix.
    endpoints = set()
    for route in app.router.routes():
        if route.resource is None:
            continue
        path = route.resource.canonical
        if not path.startswith("/v1/") or (skipped_prefix and path.startswith(skipped_prefix)) or route.method == "*":
            continue
        path = VARIABLE.sub(lambda match: f"{{{match[1].replace('_', '-')}}}", path)
        template = path if path in _UNPREFIXED else path.replace("/v1/", _PREFIXED, 1)
        endpoints.add(f"{route.method} {template}")
    return sorted(endpoints)


def _make_prefix_path(app: web.Application) -> str | None:
    """Return `/v1/<prefix>/`, or None if no prefix is configured."""
    prefix = app.get(PREFIX)
    return f"/v1/{quote(prefix, safe='')}/" if prefix else None


B = TypeVar("B")
ENTRY_KINDS = (TABLE, VIEW, FUNCTION)
"""The variables of paths that name tables, views and functions, on which principals have rights."""
_NOT_NAMES = ("namespace", "name", "plan_id", "statement", "warehouse")
"""The variables of paths that are not names of entries. Handlers read them from `Call.variables`."""


class Check(Enum):
    """The object on which the dispatcher checks the caller's right before it reads the body."""

    CATALOG = "the whole catalog"
    NAMESPACE = "the namespace in the path"
    SOMEWHERE = "any namespace; the handler checks the namespaces that the body names"
    HANDLER = "the handler checks the namespaces that the query names; such routes have no body"
    LOGIN = "nowhere: any login may call the route; such routes have no body"


class Call:
    """A request, as handlers see it."""

    __slots__ = (
        "_request",
        "_route",
        "app",
        "body_bytes",
        "components",
        "headers",
        "is_checked",
        "names",
        "namespace",
        "principal",
        "securable",
    )

    def __init__(self, request: web.Request, route: Route) -> None:
        self._request = request
        self._route = route
        self.app = request.app
        self.components = request.app[COMPONENTS]
        self.headers: CIMultiDictProxy[str] = request.headers
        self.principal: Principal = request[PRINCIPAL]
        self.namespace: NamespacePath = ()
        self.securable = WAREHOUSE
        """The object in the path: the table, view or function, else the namespace, else the whole catalog."""
        self.names: tuple[str, ...] = ()
        """The names of entries in the path, in order: those of the table, its index, and so on."""
        self.body_bytes = 0
        """The length of the body, unpacked, once it is read."""
        self.is_checked = route.check is Check.LOGIN
        """Whether the right was checked for a namespace or the catalog."""

    @property
    def operation(self) -> str:
        """The operation of the route."""
        return self._route.operation

    @property
    def name(self) -> str:
        """The first name in the path: the name of the table, view or function."""
        return self.names[0]

    @property
    def query(self) -> Mapping[str, str]:
        return self._request.query

    @property
    def variables(self) -> Mapping[str, str]:
        """The variables of the path that are not names of catalog entries, as aiohttp decodes them."""
        return self._request.match_info

    @property
    def content_type(self) -> str:
        return self._request.content_type

    @property
    def request_id(self) -> str:
        return self._request[REQUEST_ID]

    @property
    def audience(self) -> str | None:
        return read_audience(self._request)

    @property
    def caller(self) -> Caller:
        return self.make_caller(None)

    @property
    def request(self) -> web.Request:
        """The request, for routes that declare that they stream.

        Raises:
            RuntimeError: The route does not declare it.
        """
        if not self._route.streams:
            raise RuntimeError(f"{self._route.operation} does not declare that it streams")
        return self._request

    def make_caller(self, key: IdempotencyKey | None) -> Caller:
        """Return the caller, as the catalog records it."""
        principal, authorizer = self.principal, self.components.authorizer
        confined_to = authorizer.list_writable_namespaces(principal)
        return Caller(
            principal_name=principal.name,
            request_id=self.request_id,
            idempotency=key,
            confined_to=confined_to,
            names_owners=_may_name_owners(principal, self.components, confined_to),
            owns_created_in=authorizer.list_namespaces_granting_ownership(principal),
            reuses_locations_in=authorizer.list_namespaces_for_location_reuse(principal),
            request_bytes=self.body_bytes,
        )

    async def parse(self, body: bytes, shape: type[B]) -> B:
        """Return the value of a JSON body of this msgspec type.

        A large body is parsed in a thread, one body at a time, because the value takes many times the memory of the
        body.

        Raises:
            BadRequest: The body is not JSON of this type; the message names the wrong field.
        """
        if len(body) <= bodies.QUICK_BYTES:
            return bodies.parse_body(body, shape)
        return await self.run_in_turn(partial(bodies.parse_body, body, shape))

    def reserve_memory(self, size_bytes: int) -> None:
        """Reserve memory that the request uses until its answer, in addition to the bytes of its body.

        Raises:
            RetryLater: The requests in progress use all of the memory.
            TooManyRequests: The requests of this client use its whole share.
        """
        slot = self._request.get(bodies.SLOT)
        if slot is not None:
            slot.reserve_memory(size_bytes)

    async def run_in_turn(self, work: Callable[[], B]) -> B:
        """Return the result of `work`, which is long Python work on the content of the request.

        The work runs in a thread, one piece of work at a time in the whole process. All principals get an equal share.
        """
        return await self.components.worker_limits.parsing.run(self.principal.name, work)

    async def read_idempotency_key(self) -> IdempotencyKey | None:
        if not self._route.is_idempotent:
            raise RuntimeError(f"{self._route.operation} does not declare that it is idempotent")
        return await read_request_key(self._request)

    async def allow(self, *securables: Securable, operation: str | None = None) -> None:
        """Check that the caller may do an operation on each object. The default is the operation of the route.

        Raises:
            Forbidden: The caller may not do the operation on one of them.
            NoSuchTable, NoSuchView, NoSuchFunction: The caller may not browse one of them.
        """
        if not securables:
            raise RuntimeError(f"{self._route.operation} checks the right on no object")
        authorizer = self.components.authorizer
        for securable in securables:
            await authorizer.require(self.principal, operation or self._route.operation, securable)
        self.is_checked = True

    async def find_refusals(self, securables: Sequence[Securable], operation: str) -> dict[Securable, RequestError]:
        """Return the objects on which the caller may not do an operation, each with the error that `allow` raises.

        All objects are checked in one call. Only the refused objects are checked again, to get their errors.

        Raises:
            RetryLater: The policy server gives no decision.
        """
        authorizer = self.components.authorizer
        allowed_flags = await authorizer.allows_each(self.principal, operation, securables)
        refused_securables = [
            securable for securable, is_allowed in zip(securables, allowed_flags, strict=True) if not is_allowed
        ]
        explanation_slots = asyncio.Semaphore(_CONCURRENT_EXPLANATIONS_MAX)

        async def explain(securable: Securable) -> RequestError | None:
            async with explanation_slots:
                try:
                    await authorizer.require(self.principal, operation, securable)
                except RequestError as error:
                    return error
            return None  # The right was granted meanwhile.

        errors = await asyncio.gather(*map(explain, refused_securables))
        return {
            securable: error for securable, error in zip(refused_securables, errors, strict=True) if error is not None
        }

    async def record_refusal(self, operation: str, resource: str, error: RequestError) -> None:
        """Record in the audit log that a part of the request was refused, as if it had been a request.

        Args:
            operation: The operation of the part.
            resource: The path of a request for only this part.
            error: The refusal.
        """
        await self.components.audit.record(
            principal_name=self.principal.name,
            operation=operation,
            resource=resource,
            status=error.code,
            request_id=self.request_id,
            remote=self._request.remote,
            kind=error.kind,
        )

    async def allow_new_name(self, kind: str, namespace: NamespacePath, name: str) -> None:
        """Check that the caller may give a table or view the name, before the name is looked up.

        Raises:
            Forbidden: An object with this name may exist, and the caller may neither browse nor create it.
        """
        securable = Securable(namespace, kind, name)
        await self.components.authorizer.require_new_name(self.principal, self._route.operation, securable)

    async def recheck(self, *securables: Securable) -> None:
        """Repeat the checks of login and rights during a long answer.

        If there are no objects, and the route checks the right on any object, the right on some object of the catalog
        suffices.

        Raises:
            Unauthenticated: The login has ended.
            Forbidden: The caller has lost the right on one of the objects.
            NoSuchTable, NoSuchView, NoSuchFunction: The caller may no longer browse one of them.
        """
        request = self._request
        self.principal = request[PRINCIPAL] = await self.components.authenticator.authenticate(
            request.headers, request.remote, read_client_certificate(self.components, request)
        )
        if securables or self._route.check is not Check.SOMEWHERE:
            await self.allow(*securables)
        else:
            await self.components.authorizer.require_somewhere(self.principal, self._route.operation)

    async def may(self, securable: Securable, operation: str | None = None) -> bool:
        """Return whether the caller may do `operation` on an object. The default is the operation of the route."""
        return await self.components.authorizer.allows(self.principal, operation or self._route.operation, securable)

    async def select(
        self, items: Sequence[B], find_securable: Callable[[B], Securable], operation: str | None = None
    ) -> list[B]:
        """Return the items on whose objects the caller may do an operation, by default that of the route.

        If the caller may do the operation everywhere in the warehouse, the items are not checked one by one.
        """
        authorizer, operation = self.components.authorizer, operation or self._route.operation
        if authorizer.allows_everywhere(self.principal, operation, WAREHOUSE.namespace):
            return list(items)
        allowed_flags = await authorizer.allows_each(
            self.principal, operation, [find_securable(item) for item in items]
        )
        return [item for item, is_allowed in zip(items, allowed_flags, strict=True) if is_allowed]

    async def select_names(self, kind: str, names: list[str], operation: str) -> list[str]:
        """Return the names of tables, views or functions of the namespace in the path that a listing may include."""
        if self.components.authorizer.allows_everywhere(self.principal, operation, self.namespace):
            return names
        return await self.select(names, lambda name: Securable(self.namespace, kind, name), operation)

    async def select_seen(self, parent: NamespacePath, paths: list[NamespacePath]) -> list[NamespacePath]:
        """Return those of `paths`, which are namespaces in `parent`, that a listing may include."""
        authorizer = self.components.authorizer
        if authorizer.allows_everywhere(self.principal, "namespaceExists", parent):
            return paths
        visibility = await authorizer.sees(self.principal, paths)
        return [path for path, is_seen in zip(paths, visibility, strict=True) if is_seen]

    def list_visible_children(self, parent: NamespacePath) -> frozenset[str] | None:
        """Return the names in `parent` that a listing may include.

        The result is None if each name must be checked separately, by `select_seen`.
        """
        return self.components.authorizer.list_visible_children(self.principal, parent)

    def read_paging(self) -> tuple[str | None, int]:
        """Return the page token as the client sent it, and the size of the page."""
        query, page_limit = self.query, self.components.settings.page_limit
        return query.get("pageToken"), parse_page_size(query.get("pageSize", str(page_limit)), "pageSize", page_limit)


Answer = dict[str, Any] | msgspec.Struct | web.StreamResponse | None
"""A JSON object, an encoded response, or None for an answer without a body."""


def _may_name_owners(
    principal: Principal, components: ServerComponents, confined_to: Sequence[NamespacePath] | None
) -> bool:
    """Return whether a principal may set any user as the owner of a view.

    Engines run the view with the rights of its owner, which can include rights in other warehouses. So on a server with
    several warehouses, write access to the whole of one warehouse does not suffice.

    Args:
        principal: The principal.
        components: The components of the warehouse of the view.
        confined_to: The namespaces to which the principal is confined, or None if it may write the whole warehouse.
    """
    if principal.name in components.settings.trusted_engines:
        return True
    if confined_to is not None:
        return False
    warehouses = components.warehouses
    if warehouses is None:  # The view is in one of several warehouses, besides the server's own.
        # The anonymous principal of a server without logins has all rights anyway.
        return principal.name == ANONYMOUS_NAME
    return not warehouses.may_have_further_warehouses or have_privileges(principal.grants, THE_SERVER, MANAGE_GRANTS)


async def _find_plan(call: Call, kind: str) -> StoredPlanTable | None:
    """Return the plan in the path, or None if there is none, or if it is not needed to check the caller's rights."""
    if kind == FUNCTION or not is_plan_name(call.names[0]):
        return None
    # A caller that has the right of the route and the right to read on the whole warehouse needs no further check, so
    # the plan need not be read.
    operations = ("loadCredentials", call.operation)
    authorizer = call.components.authorizer
    if all(authorizer.allows_everywhere(call.principal, name, WAREHOUSE.namespace) for name in operations):
        return None
    return await call.components.store.load_plan_table(call.namespace, call.names[0])


AwaitRoom: TypeAlias = Callable[[Call, int], AbstractAsyncContextManager[None]]
"""A function that returns the context in which a large body is received, from the call and the announced bytes."""


class Route(Description, frozen=True):
    """The declaration of a route.

    As a decorator, it makes an `Endpoint` of a handler without a body. `takes` and `takes_bytes` make an `Endpoint`
    of a handler with a body. If the handler of a read-only operation finds a damaged file in the local cache, it is
    called once more. The second call reads the file from the storage.
    """

    check: Check = Check.NAMESPACE
    is_secret: bool = False
    """Whether caches may not store the answer."""
    is_idempotent: bool = False
    """Whether a repeated request with the same Idempotency-Key gets the first answer (`idempotency.run_idempotent`)."""
    streams: bool = False
    """Whether the handler sends its answer itself and therefore receives the request."""

    def __call__(self, handler: Callable[[Call], Awaitable[Answer]]) -> Endpoint:
        """Make an endpoint of a handler without a body.

        If a cached file is damaged, the handler runs again, because the cache then reads the file again. Changes are
        not repeated.
        """
        open_call, encode, is_change = self._make_opener(), self._make_encoder(), is_audited_change(self.operation)

        async def handle(request: web.Request) -> web.StreamResponse:
            call = await open_call(request)
            try:
                answer = await handler(call)
            except CacheDamaged:
                if is_change:
                    raise
                answer = await handler(call)
            return encode(call, answer)

        return self._make_endpoint(handle)

    def takes(self, body: type[B]) -> Callable[[Callable[[Call, B], Awaitable[Answer]]], Endpoint]:
        """Make an endpoint of a handler with a JSON body.

        `body` is the type of the JSON body, from which the OpenAPI schema is derived. If a cached file is damaged, the
        handler runs again, because the cache then reads the file again. Changes are not repeated.
        """
        self._check_body()
        open_call, encode, is_change = self._make_opener(), self._make_encoder(), is_audited_change(self.operation)
        is_optional, body_size = self.is_body_optional, self.body_size

        def make(handler: Callable[[Call, B], Awaitable[Answer]]) -> Endpoint:
            async def handle(request: web.Request) -> web.StreamResponse:
                call = await open_call(request)
                data = await bodies.read_body(request, body_size)
                call.body_bytes = len(data)
                if is_optional:
                    arguments = decode_as(data, body, "The body") if data else body()
                else:
                    arguments = await call.parse(data, body)
                try:
                    try:
                        answer = await handler(call, arguments)
                    except CacheDamaged:
                        if is_change:
                            raise
                        answer = await handler(call, arguments)
                    return encode(call, answer)
                finally:
                    if len(data) > bodies.QUICK_BYTES:
                        free_later(*_find_lists(arguments))

            return msgspec.structs.replace(self, body=self.body or body)._make_endpoint(handle)

        return make

    def takes_bytes(
        self, body: Any = None, *, await_room: AwaitRoom | None = None
    ) -> Callable[[Callable[[Call, bytes], Awaitable[Answer]]], Endpoint]:
        """Make an endpoint of a handler that parses the body itself.

        If a cached file is damaged, the handler runs again, as in `takes`.

        Args:
            body: The type from which the OpenAPI schema is derived.
            await_room: Returns the context in which a body of more than `QUICK_BYTES` is received, from the call and
                the announced size of the body. None means that every body is received without such a context.
        """
        self._check_body()
        open_call, encode, is_change = self._make_opener(), self._make_encoder(), is_audited_change(self.operation)
        body_size = self.body_size

        def make(handler: Callable[[Call, bytes], Awaitable[Answer]]) -> Endpoint:
            async def handle(request: web.Request) -> web.StreamResponse:
                call = await open_call(request)
                announced_bytes = request.content_length or 0
                if await_room is None or announced_bytes <= bodies.QUICK_BYTES:
                    data = await bodies.read_body(request, body_size)
                else:
                    async with await_room(call, announced_bytes):
                        data = await bodies.read_body(request, body_size)
                call.body_bytes = len(data)
                try:
                    answer = await handler(call, data)
                except CacheDamaged:
                    if is_change:
                        raise
                    answer = await handler(call, data)
                return encode(call, answer)

            return msgspec.structs.replace(self, body=body)._make_endpoint(handle)

        return make

    def takes_request(self, handle: Handler) -> Endpoint:
        """Return the endpoint of a handler that takes the request itself. A decorator for public routes.

        Their requests have no principal, so the handler cannot take a call.
        """
        if not self.public:
            raise TypeError(f"{self.operation} is not public, so its right has to be checked")

        async def answer(request: web.Request) -> web.StreamResponse:
            return await handle(request)

        return self._make_endpoint(answer)

    def _check_body(self) -> None:
        if self.check in (Check.HANDLER, Check.LOGIN):
            raise TypeError(f"{self.operation} has a body, so its right has to be checked before the handler")

    def _make_opener(self) -> Callable[[web.Request], Awaitable[Call]]:
        """Return the function that runs before the body is read: it checks namespace, right and names."""
        check, operation, variables = self.check, self.operation, self.variables
        names = tuple(variable for variable in variables if variable not in _NOT_NAMES)
        has_namespace, is_table, is_change = "namespace" in variables, "table" in names, is_audited_change(operation)
        kind = names[0] if has_namespace and names and names[0] in ENTRY_KINDS else None
        is_write = needs_writer(operation)
        if check is Check.NAMESPACE and not has_namespace:
            raise TypeError(f"{operation} has no namespace in its path; declare where its right is checked")

        async def open_call(request: web.Request) -> Call:
            call = Call(request, self)
            if is_write and call.components.settings.role == READ:
                raise refuse_change(call.components.settings, operation)
            if has_namespace or names:
                resource = request.match_info.route.resource
                assert resource is not None
                path_and_template = request.rel_url.raw_path, resource.canonical
            if has_namespace:
                call.namespace = read_namespace(*path_and_template)
                call.securable = Securable(call.namespace)
            plan = None
            if names:
                call.names = entry_names = parse_names(*path_and_template, names)
                if kind is not None:
                    plan = await _find_plan(call, kind)
                    # The rights on the planned table or view apply to the plan.
                    name = call.names[0] if plan is None else plan.of_name
                    call.securable = Securable(call.namespace, kind, name)
            if check is Check.NAMESPACE or check is Check.CATALOG:
                shown_name = call.names[0] if kind is not None else None
                await call.components.authorizer.require(call.principal, operation, call.securable, shown_name)
                call.is_checked = True
            elif check is Check.SOMEWHERE:
                await call.components.authorizer.require_somewhere(call.principal, operation)
            if plan is not None and not await may_use_plan(call.components, call.principal, plan.joined_tables):
                # The answer is the same as for a plan that does not exist.
                error, noun = (NoSuchTable, "Table") if is_table else (NoSuchView, "View")
                raise error(f"{noun} does not exist: {format_path(call.namespace, call.names[0])}")
            if names:
                # With the header, plans are snapshots of a table, so a plan table does not exist under its name.
                if (
                    is_table
                    and HEADER in request.headers
                    and is_plan_name(entry_names[0])
                    and read_audience(request) is not None
                ):
                    raise NoSuchTable(f"Table does not exist: {format_path(call.namespace, entry_names[0])}")
                if is_change:
                    for name in entry_names:
                        check_changeable(name)
            return call

        return open_call

    def _make_encoder(self) -> Callable[[Call, Answer], web.StreamResponse]:
        """Return the function that turns the answer of the handler into a response."""
        status = self.answers[0].status if self.answers else None
        body_status, empty_status, operation, is_secret = status or 200, status or 204, self.operation, self.is_secret

        def encode(call: Call, answer: Answer) -> web.StreamResponse:
            if not call.is_checked:
                raise RuntimeError(f"The handler of {operation} did not check the caller's right")
            # Check the exact class first. aiohttp's responses are mappings, and checks for mappings run slowly in
            # Python.
            if type(answer) is web.Response or isinstance(answer, web.StreamResponse):
                return answer
            response = web.Response(status=empty_status) if answer is None else make_json_answer(answer, body_status)
            if is_secret:
                response.headers["Cache-Control"] = "no-store"
            return response

        return encode

    def _make_endpoint(self, handle: Handler) -> Endpoint:
        attach_description(handle, self)
        return Endpoint(self, handle)


class Endpoint(msgspec.Struct, frozen=True):
    """A route with the function that aiohttp calls."""

    route: Route
    handle: Handler


def _find_lists(body: object) -> list[list[Any] | tuple[Any, ...]]:
    """Return the lists and tuples in the fields of a parsed body. They may be long, so the caller frees them later."""
    field_names: tuple[str, ...] = getattr(body, "__struct_fields__", ())
    return [value for name in field_names if isinstance(value := getattr(body, name), list | tuple)]


def make_json_answer(value: object, status: int = 200) -> web.Response:
    """Return a small value as a JSON response."""
    return web.Response(status=status, body=encode_json(value), content_type="application/json")


def add_endpoints(app: web.Application, *modules: ModuleType) -> None:
    """Register all endpoints of the modules, in this order.

    A GET route of Seamark's API also answers HEAD.
    """
    endpoints_by_path: dict[str, list[Endpoint]] = {}
    for module in modules:
        for endpoint in vars(module).values():
            if isinstance(endpoint, Endpoint):
                endpoints_by_path.setdefault(endpoint.route.path, []).append(endpoint)
    for template, endpoints in endpoints_by_path.items():
        for path in list_served_paths(app, template):
            # aiohttp's default pattern for a variable excludes braces, which names may contain; variables have no
            # hyphens.
            resource = app.router.add_resource(
                VARIABLE.sub(lambda match: f"{{{match[1].replace('-', '_')}:[^/]+}}", path)
            )
            for endpoint in endpoints:
                method = endpoint.route.method
                if method == "GET" and not path.startswith("/v1/"):
                    resource.add_route("HEAD", endpoint.handle)
                resource.add_route(method, endpoint.handle)
