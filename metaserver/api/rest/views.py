"""Iceberg REST: views."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.idempotency import once
from seamark.metaserver.api.http.keys import CATALOG
from seamark.metaserver.api.http.plan_audience import audience_of
from seamark.metaserver.api.http.render import json_answer, view_answer
from seamark.metaserver.api.http.requests import allow, page_query, path_name, path_namespace, read_json
from seamark.metaserver.catalog.values import Caller, CreateView, LoadedView
from seamark.metaserver.errors import NoSuchView
from seamark.metaserver.wire import is_plan_name, show


class _CreateView(msgspec.Struct, rename="kebab"):
    name: str
    schema: dict[str, Any]
    view_version: dict[str, Any]
    location: str | None = None
    properties: dict[str, str] | None = None


class _RegisterView(msgspec.Struct, rename="kebab"):
    name: str
    metadata_location: str


class _ReplaceView(msgspec.Struct):
    updates: list[dict[str, Any]]
    requirements: list[dict[str, Any]] | None = None


async def list_views(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    page = await request.app[CATALOG].views.list(namespace, *page_query(request))
    identifiers = [{"namespace": namespace, "name": name} for name in page.items]
    return json_answer({"identifiers": identifiers, "next-page-token": page.next_token})


async def create_view(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    body = await read_json(request, _CreateView)
    new = CreateView(
        name=body.name,
        schema=body.schema,
        view_version=body.view_version,
        location=body.location,
        properties=body.properties or {},
    )

    async def work(caller: Caller) -> LoadedView:
        return await request.app[CATALOG].views.create(caller, namespace, new)

    return await _once(request, work)


async def register_view(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    body = await read_json(request, _RegisterView)

    async def work(caller: Caller) -> LoadedView:
        return await request.app[CATALOG].views.register(caller, namespace, body.name, body.metadata_location)

    return await _once(request, work)


async def load_view(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "view")
    allow(request, namespace)
    catalog = request.app[CATALOG]
    if is_plan_name(name):
        return view_answer(request, await catalog.plan_views.load(namespace, name, audience_of(request)))
    return view_answer(request, await catalog.views.load(namespace, name))


async def replace_view(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "view")
    allow(request, namespace)
    body = await read_json(request, _ReplaceView)

    async def work(caller: Caller) -> LoadedView:
        return await request.app[CATALOG].views.replace(caller, namespace, name, body.requirements or [], body.updates)

    return await _once(request, work)


async def drop_view(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "view")
    allow(request, namespace)

    async def work(caller: Caller) -> None:
        await request.app[CATALOG].views.drop(caller, namespace, name)

    async def answer(_: None) -> web.Response:
        return web.Response(status=204)

    return await once(request, work, answer)


async def view_exists(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "view")
    allow(request, namespace)
    if is_plan_name(name):
        await request.app[CATALOG].plan_views.load(namespace, name, audience_of(request))
    elif not await request.app[CATALOG].views.exists(namespace, name):
        raise NoSuchView(f"View does not exist: {show(namespace, name)}")
    return web.Response(status=204)


async def _once(request: web.Request, work: Callable[[Caller], Awaitable[LoadedView]]) -> web.Response:
    async def answer(loaded: LoadedView) -> web.Response:
        return view_answer(request, loaded)

    return await once(request, work, answer, replayed=LoadedView)


def add_routes(app: web.Application) -> None:
    namespace = "/v1/{prefix}/namespaces/{namespace}"
    add_operations(app, f"{namespace}/views", {"GET": list_views, "POST": create_view})
    add_operations(
        app,
        f"{namespace}/views/{{view}}",
        {"GET": load_view, "POST": replace_view, "DELETE": drop_view, "HEAD": view_exists},
    )
    add_operations(app, f"{namespace}/register-view", {"POST": register_view})
