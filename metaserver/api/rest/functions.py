"""Functions: the Iceberg REST specification covers reads; put and drop are Seamark's API."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from seamark.metaserver.api.http.describe import NAMESPACE, Parameter, ResponseSpec, describe
from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.keys import CATALOG
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, caller, page_query, path_name, path_namespace, read_json
from seamark.metaserver.catalog.values import LoadedFunction
from seamark.metaserver.wire import encode_json


async def list_functions(request: web.Request) -> web.Response:
    namespace = path_namespace(request)
    allow(request, namespace)
    page = await request.app[CATALOG].functions.list(namespace, *page_query(request))
    # CatalogObjectIdentifier: levels and name in one list.
    return json_answer({"identifiers": [[*namespace, name] for name in page.items], "next-page-token": page.next_token})


async def load_function(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "function")
    allow(request, namespace)
    return _loaded(await request.app[CATALOG].functions.load(namespace, name))


_NAME = Parameter("function", "path", "The name of the function.", {"type": "string"}, True)


@describe(
    "putFunction",
    "Creates a function or replaces its metadata",
    tags=("functions",),
    parameters=(NAMESPACE, _NAME),
    body={"type": "object", "description": "Function metadata of the Iceberg UDF spec, format version 1."},
    answers=(
        ResponseSpec(200, "The answer of the standard's loadFunction", {"type": "object", "required": ["metadata"]}),
        ResponseSpec(400, "Not metadata of the UDF spec, or the function-uuid differs from the existing function"),
        ResponseSpec(404, "No such namespace"),
    ),
)
async def put_function(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "function")
    allow(request, namespace)
    document = await read_json(request, dict[str, Any])
    return _loaded(await request.app[CATALOG].functions.put(caller(request), namespace, name, document))


@describe(
    "dropFunction",
    "Drops a function permanently; it cannot be restored",
    tags=("functions",),
    parameters=(NAMESPACE, _NAME),
    answers=(ResponseSpec(204, "Dropped"), ResponseSpec(404, "No such function")),
)
async def drop_function(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "function")
    allow(request, namespace)
    await request.app[CATALOG].functions.drop(caller(request), namespace, name)
    return web.Response(status=204)


def _loaded(loaded: LoadedFunction) -> web.Response:
    location = encode_json(loaded.entry.metadata_location)
    body = b'{"metadata":' + loaded.document + b',"metadata-location":' + location + b"}"
    return web.Response(body=body, content_type="application/json")


def add_own_routes(app: web.Application) -> None:
    """The routes in addition to those of the specification."""
    app.router.add_put("/api/v1/functions/{namespace}/{function}", put_function)
    app.router.add_delete("/api/v1/functions/{namespace}/{function}", drop_function)


def add_routes(app: web.Application) -> None:
    namespace = "/v1/{prefix}/namespaces/{namespace}"
    add_operations(app, f"{namespace}/functions", {"GET": list_functions})
    add_operations(app, f"{namespace}/functions/{{function}}", {"GET": load_function})
