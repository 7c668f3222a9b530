"""Serves functions. The routes that read belong to the Iceberg REST specification, the others to Seamark's API."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from seamark.formats.protocol.wire import encode_json
from seamark.metaserver.api.http.describe import ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.parameters.requests import read_page_query
from seamark.metaserver.catalog.values import LoadedFunction
from seamark.metaserver.store.model import FUNCTION

_FUNCTIONS = "/v1/{prefix}/namespaces/{namespace}/functions"
_FUNCTION = "/api/v1/functions/{namespace}/{function}"


@Route("GET", _FUNCTIONS, "listFunctions")
async def list_functions(call: Call) -> dict[str, Any]:
    """Return a page of the functions of a namespace."""
    page = await call.components.catalog.functions.list(call.namespace, *read_page_query(call.query))
    # A CatalogObjectIdentifier has the levels and the name in one list.
    names = await call.select_names(FUNCTION, page.items, "loadFunction")
    return {"identifiers": [[*call.namespace, name] for name in names], "next-page-token": page.next_token}


@Route("GET", f"{_FUNCTIONS}/{{function}}", "loadFunction")
async def load_function(call: Call) -> web.Response:
    """Return the metadata of a function."""
    return _answer_with_function(await call.components.catalog.functions.load(call.namespace, call.name))


@Route(
    "PUT",
    _FUNCTION,
    "putFunction",
    "Create a function or replace its metadata",
    tags=("functions",),
    body={
        "type": "object",
        "description": "The metadata of the function, by the Iceberg UDF specification, format version 1.",
    },
    answers=(
        ResponseSpec(
            200,
            "The function, in the form of the standard's loadFunction",
            {"type": "object", "required": ["metadata"]},
        ),
        ResponseSpec(400, "The metadata are invalid, or function-uuid differs from the UUID of the existing function"),
        ResponseSpec(404, "The namespace does not exist"),
    ),
).takes(dict[str, Any])
async def put_function(call: Call, document: dict[str, Any]) -> web.Response:
    """Create a function, or replace it by a new version."""
    return _answer_with_function(
        await call.components.catalog.functions.put(call.caller, call.namespace, call.name, document)
    )


@Route(
    "DELETE",
    _FUNCTION,
    "dropFunction",
    "Drop a function permanently; it cannot be restored",
    tags=("functions",),
    answers=(ResponseSpec(204, "The function is dropped"), ResponseSpec(404, "The function does not exist")),
)
async def drop_function(call: Call) -> None:
    """Drop a function permanently."""
    await call.components.catalog.functions.drop(call.caller, call.namespace, call.name)


def _answer_with_function(loaded_function: LoadedFunction) -> web.Response:
    """Return the response with a function."""
    location = encode_json(loaded_function.entry.metadata_location)
    body = b'{"metadata":' + loaded_function.document + b',"metadata-location":' + location + b"}"
    return web.Response(body=body, content_type="application/json")
