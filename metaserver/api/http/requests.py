"""Decodes requests to Iceberg routes: names in the path, query, body and principal.

Names are decoded from the raw path, because aiohttp's decoded path does not distinguish `%25FF` from `%FF`. In a path
segment `+` is a space, as in a form: Iceberg Java's client (Spark, Trino, Flink) encodes names that way, and PyIceberg
sends a plus as `%2B`. BadRequest names the parameter that cannot be decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes

from aiohttp import web

from seamark.metaserver.access.authorizer import changes
from seamark.metaserver.api.http import bodies
from seamark.metaserver.api.http.describe import description_of
from seamark.metaserver.api.http.keys import AUTHENTICATOR, AUTHORIZER, PRINCIPAL, REQUEST_ID, SETTINGS
from seamark.metaserver.api.http.plan_audience import audience_of
from seamark.metaserver.catalog.values import Caller, IdempotencyKey
from seamark.metaserver.errors import BadRequest, NoSuchTable
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.wire import (
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
    """The table, view or function in `{variable}`. BadRequest for an invalid name, and for a plan table's name in an
    operation that changes tables. NoSuchTable for a plan table's name when plans are shown as snapshots."""
    name = _name(_segment(request, variable), variable)
    if variable == "table":
        _check_audience(request, name)
    return _changeable(request, name)


def path_namespace(request: web.Request) -> NamespacePath:
    """The namespace in the path; levels are separated by 0x1F (`%1F`)."""
    return _namespace(_segment(request, "namespace"))


def path_table(request: web.Request) -> tuple[NamespacePath, str]:
    """`path_namespace` and `path_name` for the route of a table."""
    resource = request.match_info.route.resource
    assert resource is not None
    namespace, name = _table(request.rel_url.raw_path, resource.canonical)
    _check_audience(request, name)
    return namespace, _changeable(request, name)


@lru_cache(maxsize=8192)  # pure, and called for every load of a table
def table_path(namespace: NamespacePath, name: str, prefix: str) -> str:
    """`v1/…/namespaces/{namespace}/tables/{name}`, percent-encoded, relative to the catalog's URI."""
    levels = quote(NAMESPACE_SEPARATOR.join(namespace), safe="")
    base = f"v1/{quote(prefix, safe='')}" if prefix else "v1"
    return f"{base}/namespaces/{levels}/tables/{quote(name, safe='')}"


async def read_body(request: web.Request) -> bytes:
    """The body, decompressed by its Content-Encoding. Errors as in `bodies.read`."""
    return await bodies.read(request)


async def read_json(request: web.Request, shape: type[T]) -> T:
    """The body as `shape`, a msgspec type, for any content type. BadRequest names the invalid field."""
    return await bodies.parse(request, await bodies.read(request), shape)


def parse_body(body: bytes, shape: type[T]) -> T:
    """Like `read_json`, for a body that was read. Large bodies are decoded in a thread."""
    return bodies.parse_now(body, shape)


def page_query(request: web.Request) -> tuple[str | None, int | None]:
    """`(pageToken, pageSize)`, None when absent."""
    size = request.query.get("pageSize")
    return request.query.get("pageToken"), None if size is None else _page_size(size)


def boolean_query(request: web.Request, name: str) -> bool:
    """False when absent. PyIceberg sends True, Iceberg Java true."""
    text = request.query.get(name, "false")
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise BadRequest(f"{name} is {text[:40]!r}; it must be true or false")
    return value


def allow(request: web.Request, *namespaces: NamespacePath) -> None:
    """Forbidden unless the caller may do this operation in each of `namespaces`; the empty path is the catalog."""
    operation = _operation_of(request.match_info.route.handler)
    authorizer, principal = request.app[AUTHORIZER], request[PRINCIPAL]
    for namespace in namespaces:
        authorizer.require(principal, operation, namespace)


def allow_somewhere(request: web.Request) -> None:
    """Forbidden unless the caller may do this operation in some namespace. For operations whose bodies name the
    namespace: called before the body is read, and `allow` after it."""
    operation = _operation_of(request.match_info.route.handler)
    request.app[AUTHORIZER].require_somewhere(request[PRINCIPAL], operation)


async def recheck(request: web.Request, *namespaces: NamespacePath) -> None:
    """Repeats the checks for long answers: Unauthenticated when the login has ended, Forbidden when the caller has lost
    the right in one of `namespaces`."""
    request[PRINCIPAL] = await request.app[AUTHENTICATOR].authenticate(request.headers, request.remote)
    allow(request, *namespaces)


def may_do(request: web.Request, namespace: NamespacePath) -> bool:
    """Whether the caller may do this operation in `namespace`."""
    operation = _operation_of(request.match_info.route.handler)
    return request.app[AUTHORIZER].allows(request[PRINCIPAL], operation, namespace)


def may_write(request: web.Request, namespace: NamespacePath) -> bool:
    """Whether the caller may change tables in `namespace`."""
    return request.app[AUTHORIZER].allows(request[PRINCIPAL], "updateTable", namespace)


def may_see(request: web.Request, namespace: NamespacePath) -> bool:
    """Whether a listing may include this namespace."""
    return request.app[AUTHORIZER].visible(request[PRINCIPAL], namespace)


def caller(request: web.Request, key: IdempotencyKey | None = None) -> Caller:
    """The caller, as the catalog records it."""
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
    # int() accepts '1_000' and Unicode digits, and its time is quadratic in the number of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= _INT_DIGITS_MAX and int(text) > 0):
        raise BadRequest(f"pageSize is {text[:40]!r}; it must be a whole number of at least 1")
    return int(text)


def _segment(request: web.Request, variable: str) -> str:
    resource = request.match_info.route.resource
    assert resource is not None
    return _segment_of(request.rel_url.raw_path, resource.canonical, variable)


def _segment_of(raw_path: str, template: str, variable: str) -> str:
    return raw_path.split("/")[_position(template, variable)]


# Engines send the same names repeatedly. Refused names are not cached, so that the cached names are short.
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
            raise BadRequest(f"The {what} in the path is not percent-encoded; encode % as %25")
        at = raw.find(b"%", at + 3)
    try:
        return unquote_to_bytes(raw.replace(b"+", b" ")).decode()
    except UnicodeDecodeError:
        raise BadRequest(f"The {what} in the path is not valid UTF-8 after percent-decoding") from None
