"""Serves the namespaces of the Iceberg REST specification."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from seamark.formats.protocol.wire import check_namespace, format_path, parse_namespace
from seamark.formats.runtime.errors import NoSuchNamespace
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call, Check, Route, make_json_answer
from seamark.metaserver.api.http.idempotency import run_idempotent
from seamark.metaserver.api.http.parameters.requests import read_page_query
from seamark.metaserver.store.model import Namespace

_NAMESPACES = "/v1/{prefix}/namespaces"
_NAMESPACE = f"{_NAMESPACES}/{{namespace}}"


class _CreateNamespace(msgspec.Struct):
    """The body of a request that creates a namespace."""

    namespace: tuple[str, ...]
    properties: dict[str, str] | None = None


class _UpdateProperties(msgspec.Struct):
    """The body of a request that changes the properties of a namespace."""

    removals: list[str] | None = None
    updates: dict[str, str] | None = None


@Route("GET", _NAMESPACES, "listNamespaces", check=Check.LOGIN)
async def list_namespaces(call: Call) -> dict[str, Any]:
    """Return a page of the namespaces in a namespace, or of the top level."""
    token, size = read_page_query(call.query)
    parent_text = call.query.get("parent", "")
    parent = parse_namespace(parent_text) if parent_text else ()
    if parent:  # Everyone may list the top level. Namespaces that the caller may not see are left out.
        await call.allow(Securable(parent))
    page = await call.components.catalog.namespaces.list(parent, token, size, call.list_visible_children(parent))
    return {"namespaces": await call.select_seen(parent, page.items), "next-page-token": page.next_token}


@Route("POST", _NAMESPACES, "createNamespace", check=Check.SOMEWHERE, is_idempotent=True).takes(_CreateNamespace)
async def create_namespace(call: Call, body: _CreateNamespace) -> web.Response:
    """Create a namespace."""
    path = check_namespace(body.namespace)
    await call.allow(Securable(path))
    namespaces = call.components.catalog.namespaces
    return await run_idempotent(
        call,
        lambda caller: namespaces.create(caller, path, body.properties or {}),
        lambda namespace: make_json_answer(_describe_namespace(namespace)),
    )


@Route("GET", _NAMESPACE, "loadNamespaceMetadata")
async def load_namespace_metadata(call: Call) -> dict[str, Any]:
    """Return a namespace and its properties."""
    return _describe_namespace(await call.components.catalog.namespaces.get(call.namespace))


@Route("HEAD", _NAMESPACE, "namespaceExists")
async def namespace_exists(call: Call) -> None:
    """Answer whether a namespace exists.

    Raises:
        NoSuchNamespace: The namespace does not exist.
    """
    if not await call.components.catalog.namespaces.exists(call.namespace):
        raise NoSuchNamespace(f"Namespace does not exist: {format_path(call.namespace)}")


@Route("DELETE", _NAMESPACE, "dropNamespace", is_idempotent=True)
async def drop_namespace(call: Call) -> web.Response:
    """Drop an empty namespace."""
    return await run_idempotent(call, lambda caller: call.components.catalog.namespaces.drop(caller, call.namespace))


@Route("POST", f"{_NAMESPACE}/properties", "updateProperties", is_idempotent=True).takes(_UpdateProperties)
async def update_properties(call: Call, body: _UpdateProperties) -> web.Response:
    """Change properties of a namespace."""
    update, removals, updates = (
        call.components.catalog.namespaces.update_properties,
        body.removals or [],
        body.updates or {},
    )
    return await run_idempotent(
        call, lambda caller: update(caller, call.namespace, removals, updates), make_json_answer
    )


def _describe_namespace(namespace: Namespace) -> dict[str, Any]:
    """Return a namespace in the form of the answer."""
    return {"namespace": namespace.path, "properties": namespace.properties}
