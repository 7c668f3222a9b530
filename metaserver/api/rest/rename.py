"""Iceberg REST: renames of tables and views, also between namespaces. The caller needs rights on both namespaces."""

from __future__ import annotations

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.idempotency import once
from seamark.metaserver.api.http.keys import CATALOG
from seamark.metaserver.api.http.requests import allow, allow_somewhere, read_json
from seamark.metaserver.catalog.tables import Tables
from seamark.metaserver.catalog.values import Caller, TableIdentifier
from seamark.metaserver.catalog.views import Views
from seamark.metaserver.wire import check_name, check_namespace


class _Rename(msgspec.Struct):
    source: TableIdentifier
    destination: TableIdentifier


async def rename_table(request: web.Request) -> web.Response:
    return await _rename(request, request.app[CATALOG].tables)


async def rename_view(request: web.Request) -> web.Response:
    return await _rename(request, request.app[CATALOG].views)


async def _rename(request: web.Request, entries: Tables | Views) -> web.Response:
    allow_somewhere(request)
    body = await read_json(request, _Rename)
    for what, end in (("source", body.source), ("destination", body.destination)):
        check_namespace(end.namespace)
        check_name(end.name, f"{what} name")
    allow(request, body.source.namespace, body.destination.namespace)

    async def work(caller: Caller) -> None:
        await entries.rename(caller, body.source, body.destination)

    async def answer(_: None) -> web.Response:
        return web.Response(status=204)

    return await once(request, work, answer)


def add_routes(app: web.Application) -> None:
    add_operations(app, "/v1/{prefix}/tables/rename", {"POST": rename_table})
    add_operations(app, "/v1/{prefix}/views/rename", {"POST": rename_view})
