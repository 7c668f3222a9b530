"""Iceberg REST: namespaces."""

from __future__ import annotations

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.idempotency import once
from seamark.metaserver.api.http.keys import CATALOG
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, allow_somewhere, may_see, page_query, path_namespace, read_json
from seamark.metaserver.catalog.values import Caller, PropertyChanges
from seamark.metaserver.errors import NoSuchNamespace
from seamark.metaserver.store.model import Namespace
from seamark.metaserver.wire import check_namespace, parse_namespace, show


class _CreateNamespace(msgspec.Struct):
    namespace: tuple[str, ...]
    properties: dict[str, str] | None = None


class _UpdateProperties(msgspec.Struct):
    removals: list[str] | None = None
    updates: dict[str, str] | None = None


async def list_namespaces(request: web.Request) -> web.Response:
    token, size = page_query(request)
    text = request.query.get("parent", "")
    parent = parse_namespace(text) if text else ()
    if parent:  # the top level is open to all; namespaces that the caller may not see are left out
        allow(request, parent)
    page = await request.app[CATALOG].namespaces.list(parent, token, size, lambda path: may_see(request, path))
    shown = [namespace.path for namespace in page.items]
    return json_answer({"namespaces": shown, "next-page-token": page.next_token})


async def create_namespace(request: web.Request) -> web.Response:
    allow_somewhere(request)
    body = await read_json(request, _CreateNamespace)
    path = check_namespace(body.namespace)
    allow(request, path)

    async def work(caller: Caller) -> Namespace:
        return await request.app[CATALOG].namespaces.create(caller, path, body.properties or {})

    return await once(request, work, _described)


async def load_namespace_metadata(request: web.Request) -> web.Response:
    path = path_namespace(request)
    allow(request, path)
    return await _described(await request.app[CATALOG].namespaces.get(path))


async def namespace_exists(request: web.Request) -> web.Response:
    path = path_namespace(request)
    allow(request, path)
    if not await request.app[CATALOG].namespaces.exists(path):
        raise NoSuchNamespace(f"Namespace does not exist: {show(path)}")
    return web.Response(status=204)


async def drop_namespace(request: web.Request) -> web.Response:
    path = path_namespace(request)
    allow(request, path)

    async def work(caller: Caller) -> None:
        await request.app[CATALOG].namespaces.drop(caller, path)

    return await once(request, work, _done)


async def update_properties(request: web.Request) -> web.Response:
    path = path_namespace(request)
    allow(request, path)
    body = await read_json(request, _UpdateProperties)

    async def work(caller: Caller) -> PropertyChanges:
        return await request.app[CATALOG].namespaces.update_properties(
            caller, path, body.removals or [], body.updates or {}
        )

    async def answer(changes: PropertyChanges) -> web.Response:
        return json_answer(changes)

    return await once(request, work, answer)


async def _described(namespace: Namespace) -> web.Response:
    return json_answer({"namespace": namespace.path, "properties": namespace.properties})


async def _done(_: None) -> web.Response:
    return web.Response(status=204)


def add_routes(app: web.Application) -> None:
    add_operations(app, "/v1/{prefix}/namespaces", {"GET": list_namespaces, "POST": create_namespace})
    add_operations(
        app,
        "/v1/{prefix}/namespaces/{namespace}",
        {"GET": load_namespace_metadata, "HEAD": namespace_exists, "DELETE": drop_namespace},
    )
    add_operations(app, "/v1/{prefix}/namespaces/{namespace}/properties", {"POST": update_properties})
