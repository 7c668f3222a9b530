"""Iceberg REST: functions, which the standard only reads."""

from __future__ import annotations

from aiohttp import web

from metaserver.api.endpoints import add_operations
from metaserver.api.keys import CATALOG
from metaserver.api.render import json_answer
from metaserver.api.requests import allow, page_query, path_name, path_namespace
from metaserver.wire import encode_json


async def list_functions(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    page = await request.app[CATALOG].functions.list(namespace, *page_query(request))
    # CatalogObjectIdentifier: levels and name in one list.
    return json_answer({"identifiers": [[*namespace, name] for name in page.items], "next-page-token": page.next_token})


async def load_function(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "function")
    allow(request, namespace)
    loaded = await request.app[CATALOG].functions.load(namespace, name)
    location = encode_json(loaded.entry.metadata_location)
    body = b'{"metadata":' + loaded.document + b',"metadata-location":' + location + b"}"
    return web.Response(body=body, content_type="application/json")


def add_routes(app: web.Application) -> None:
    namespace = "/v1/{prefix}/namespaces/{namespace}"
    add_operations(app, f"{namespace}/functions", {"GET": list_functions})
    add_operations(app, f"{namespace}/functions/{{function}}", {"GET": load_function})
