"""What a request to an Iceberg route says: names in its path, query, body, and who asks.

Names are taken from the path as it was sent, not from aiohttp's decoded one, which cannot tell `%25FF` from `%FF`. In a
path segment `+` is a space, as in a form: Java's client (Spark, Trino, Flink) encodes names that way, and PyIceberg
writes a plus as `%2B`. What does not decode is a BadRequest that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes

from aiohttp import web

from metaserver.access.authorizer import changes
from metaserver.api.http import bodies
from metaserver.api.http.describe import description_of
from metaserver.api.http.keys import AUTHENTICATOR, AUTHORIZER, PRINCIPAL, REQUEST_ID, SETTINGS
from metaserver.api.http.plan_audience import audience_of
from metaserver.catalog.values import Caller, IdempotencyKey
from metaserver.errors import BadRequest, NoSuchTable
from metaserver.store.port import NamespacePath
from metaserver.wire import (
    NAMESPACE_SEPARATOR,
    check_changeable,
    check_name,
    is_plan_name,
    parse_namespace,
    show,
)

T = TypeVar("T")

_HEX = frozenset(b"0123456789abcdefABCDEF")
_INT_DIGITS_MAX = 18
_BOOLEANS = {"true": True, "false": False}


def path_name(request: web.Request, variable: str) -> str:
    """The table, view or function named by `{variable}`. BadRequest for a name that cannot exist, and for a plan
    table's where the operation would change it. NoSuchTable for a plan table's where plans are shown as snapshots."""
    name = _name(_segment(request, variable), variable)
    if variable == "table":
        _check_audience(request, name)
    return _changeable(request, name)


def path_namespace(request: web.Request) -> NamespacePath:
    """The namespace of the path, levels separated by 0x1F (`%1F`)."""
    return _namespace(_segment(request, "namespace"))


def path_table(request: web.Request) -> tuple[NamespacePath, str]:
    """`path_namespace` and `path_name` of a table's route."""
    resource = request.match_info.route.resource
    assert resource is not None
    namespace, name = _table(request.rel_url.raw_path, resource.canonical)
    _check_audience(request, name)
    return namespace, _changeable(request, name)


@lru_cache(maxsize=8192)  # pure, and every load of a table asks
def table_path(namespace: NamespacePath, name: str, prefix: str) -> str:
    """`v1/…/namespaces/{namespace}/tables/{name}`, percent-encoded, relative to the catalog's URI."""
    levels = quote(NAMESPACE_SEPARATOR.join(namespace), safe="")
    base = f"v1/{quote(prefix, safe='')}" if prefix else "v1"
    return f"{base}/namespaces/{levels}/tables/{quote(name, safe='')}"


async def read_body(request: web.Request) -> bytes:
    """The body's bytes, unpacked as its Content-Encoding says; refusals as of `bodies.read`."""
    return await bodies.read(request)


async def read_json(request: web.Request, shape: type[T]) -> T:
    """The body as `shape`, a msgspec type, whatever its content type says. BadRequest names the field that is wrong."""
    return await bodies.parse(request, await bodies.read(request), shape)


def parse_body(body: bytes, shape: type[T]) -> T:
    """As `read_json`, of a body at hand; in a thread where it may be large."""
    return bodies.parse_now(body, shape)


def page_query(request: web.Request) -> tuple[str | None, int | None]:
    """`(pageToken, pageSize)`, None where not given."""
    size = request.query.get("pageSize")
    return request.query.get("pageToken"), None if size is None else _page_size(size)


def boolean_query(request: web.Request, name: str) -> bool:
    """False where not given. PyIceberg writes True, Java true."""
    text = request.query.get(name, "false")
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise BadRequest(f"{name} is {text[:40]!r}; it must be true or false")
    return value


def allow(request: web.Request, *namespaces: NamespacePath) -> None:
    """Forbidden unless who asks may do this operation in each of `namespaces`; the empty path is the whole catalog."""
    operation = _operation_of(request.match_info.route.handler)
    authorizer, principal = request.app[AUTHORIZER], request[PRINCIPAL]
    for namespace in namespaces:
        authorizer.require(principal, operation, namespace)


def allow_somewhere(request: web.Request) -> None:
    """Forbidden unless who asks may do this operation in some namespace. For operations whose bodies say where: asked
    before the body is read, and `allow` after it."""
    operation = _operation_of(request.match_info.route.handler)
    request.app[AUTHORIZER].require_somewhere(request[PRINCIPAL], operation)


async def recheck(request: web.Request, *namespaces: NamespacePath) -> None:
    """As when the request came: Unauthenticated or Forbidden where who asks is logged in no more, or may no more do
    this in each of `namespaces`. For answers that take long."""
    request[PRINCIPAL] = await request.app[AUTHENTICATOR].authenticate(request.headers, request.remote)
    allow(request, *namespaces)


def may_do(request: web.Request, namespace: NamespacePath) -> bool:
    """Whether who asks may do this operation in `namespace`, too."""
    operation = _operation_of(request.match_info.route.handler)
    return request.app[AUTHORIZER].allows(request[PRINCIPAL], operation, namespace)


def may_write(request: web.Request, namespace: NamespacePath) -> bool:
    """Whether who asks may change tables in `namespace`."""
    return request.app[AUTHORIZER].allows(request[PRINCIPAL], "updateTable", namespace)


def may_see(request: web.Request, namespace: NamespacePath) -> bool:
    """Whether a listing may show this namespace."""
    return request.app[AUTHORIZER].visible(request[PRINCIPAL], namespace)


def caller(request: web.Request, key: IdempotencyKey | None = None) -> Caller:
    """Who asks, as the catalog records it."""
    principal = request[PRINCIPAL]
    confined_to = request.app[AUTHORIZER].confines(principal)
    return Caller(
        who=principal.name,
        request_id=request[REQUEST_ID],
        idempotency=key,
        confined_to=confined_to,
        names_owners=confined_to is None or principal.name in request.app[SETTINGS].trusted_engines,
    )


def _check_audience(request: web.Request, name: str) -> None:
    if is_plan_name(name) and audience_of(request) is not None:
        raise NoSuchTable(f"Table does not exist: {show(path_namespace(request), name)}")


def _changeable(request: web.Request, name: str) -> str:
    return check_changeable(name) if changes(_operation_of(request.match_info.route.handler)) else name


def _page_size(text: str) -> int:
    # Below int(): it takes '1_000' and Unicode digits, and is quadratic in their number.
    if not (text.isascii() and text.isdigit() and len(text) <= _INT_DIGITS_MAX and int(text) > 0):
        raise BadRequest(f"pageSize is {text[:40]!r}; it must be a whole number of at least 1")
    return int(text)


def _segment(request: web.Request, variable: str) -> str:
    resource = request.match_info.route.resource
    assert resource is not None
    return _segment_of(request.rel_url.raw_path, resource.canonical, variable)


def _segment_of(raw_path: str, template: str, variable: str) -> str:
    return raw_path.split("/")[_position(template, variable)]


# Engines name the same tables over and over. What is refused is not remembered, so that no name here is long.
@lru_cache(maxsize=2048)
def _name(segment: str, variable: str) -> str:
    return check_name(_decoded(segment, variable), f"{variable} name")


@lru_cache(maxsize=1024)
def _namespace(segment: str) -> NamespacePath:
    return parse_namespace(_decoded(segment, "namespace"))


@lru_cache(maxsize=1024)
def _table(raw_path: str, template: str) -> tuple[NamespacePath, str]:
    namespace = _namespace(_segment_of(raw_path, template, "namespace"))
    return namespace, _name(_segment_of(raw_path, template, "table"), "table")


@lru_cache(maxsize=256)  # one entry for each handler
def _operation_of(handler: Callable[..., object]) -> str:
    return description_of(handler).operation


@lru_cache(maxsize=256)  # one entry for each variable of each route
def _position(template: str, variable: str) -> int:
    return template.split("/").index(f"{{{variable}}}")


def _decoded(segment: str, what: str) -> str:
    raw = segment.encode()
    at = raw.find(b"%")
    while at >= 0:
        if len(raw) < at + 3 or raw[at + 1] not in _HEX or raw[at + 2] not in _HEX:
            raise BadRequest(f"The {what} in the path is not percent-encoded: write % as %25")
        at = raw.find(b"%", at + 3)
    try:
        return unquote_to_bytes(raw.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"The {what} in the path is not UTF-8 once percent-decoded") from None
