"""GET /api/v1/openapi.json: the OpenAPI 3.1 document of Seamark's API, built from the descriptions of the routes.

The Iceberg REST specification specifies the Iceberg routes under /v1, so the document does not repeat them. The file
`docs/reference/openapi.json` contains the document, and a test compares both.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.commits.timeline import EVENT_STREAM
from seamark.metaserver.api.http.describe import Description, Parameter, ResponseSpec, get_description
from seamark.metaserver.api.http.dispatch import Route, make_json_answer
from seamark.metaserver.api.indexes.build_state import BUILD_SCHEMA
from seamark.metaserver.api.indexes.indexes import INDEX_SCHEMA
from seamark.metaserver.api.lookups.metadata import COLUMN_STATS_SCHEMA, FILE_SCHEMA, PARTITION_SCHEMA

DOCUMENT: web.AppKey[Callable[[], dict[str, Any]]] = web.AppKey("openapi")
"""The function that builds the document.

It runs at the first request for the document, because it takes longer than the whole start of the server.
"""

_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "integer"},
                "stack": {"type": "array", "items": {"type": "string"}},
            },
        }
    },
}
_ERROR_CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}


@Route(
    "GET",
    "/api/v1/openapi.json",
    "openapi",
    "This document",
    tags=("operation",),
    answers=(ResponseSpec(200, "OpenAPI 3.1", {"type": "object"}),),
    public=True,
).takes_request
async def openapi(request: web.Request) -> web.Response:
    """Return the OpenAPI description of the routes."""
    return make_json_answer(request.app[DOCUMENT]())


def build_document(app: web.Application) -> dict[str, Any]:
    """Build the document for the routes of `app` that describe their answers, sorted by path."""
    routes = [route for route in app.router.routes() if route.resource is not None and route.method != "HEAD"]
    described_routes = [(route, get_description(route.handler)) for route in routes]
    described_routes = [(route, description) for route, description in described_routes if description.answers]
    schemas, derived_schemas = _derive_schemas([description for _, description in described_routes])
    paths: dict[str, dict[str, Any]] = {}
    for route, description in described_routes:
        assert route.resource is not None
        # Variables in the paths of aiohttp contain a pattern, such as {name:[^/]+}.
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)
        paths.setdefault(path, {})[route.method.lower()] = _describe_operation(description, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Seamark",
            "version": importlib.metadata.version("seamark"),
            "description": "Seamark's routes in addition to the Iceberg REST specification, which is served under /v1.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {
                "ContentFile": FILE_SCHEMA,
                "ColumnStats": COLUMN_STATS_SCHEMA,
                "Partition": PARTITION_SCHEMA,
                "Index": INDEX_SCHEMA,
                "IndexBuild": BUILD_SCHEMA,
                "Error": _ERROR_SCHEMA,
                **derived_schemas,
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _derive_schemas(descriptions: list[Description]) -> tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]:
    """Derive the schemas of bodies and answers from their types.

    Returns:
        A function that returns the schema of a declared body or answer, and the components of the document.
    """
    body_schemas = [description.body for description in descriptions]
    body_schemas += [answer.schema for description in descriptions for answer in description.answers]
    types = [schema for schema in body_schemas if schema is not None and not isinstance(schema, dict)]
    references, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    references_by_type = {id(schema): reference for schema, reference in zip(types, references, strict=True)}
    return lambda schema: schema if isinstance(schema, dict) else references_by_type[id(schema)], components


def _describe_operation(description: Description, make_schema: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI object of an operation."""
    operation: dict[str, Any] = {
        "operationId": description.operation,
        "summary": description.summary,
        "tags": list(description.tags),
        "responses": {
            str(answer.status): _describe_response(answer, make_schema, description.waits)
            for answer in description.answers
        },
    }
    operation["responses"]["default"] = {
        "description": "An error, in the form of the Iceberg REST specification",
        "content": _ERROR_CONTENT,
    }
    if description.all_parameters:
        operation["parameters"] = [_describe_parameter(parameter) for parameter in description.all_parameters]
    if description.body is not None:
        content = {"application/json": {"schema": make_schema(description.body)}}
        operation["requestBody"] = {"required": not description.is_body_optional, "content": content}
    if description.public:
        operation["security"] = []
    return operation


def _describe_parameter(parameter: Parameter) -> dict[str, Any]:
    """Return the OpenAPI object of a parameter."""
    return {
        "name": parameter.name,
        "in": parameter.where,
        "description": parameter.description,
        "required": parameter.required,
        "schema": parameter.schema,
    }


def _describe_response(
    answer: ResponseSpec, make_schema: Callable[[Any], dict[str, Any]], streams: bool
) -> dict[str, Any]:
    """Return the OpenAPI object of a response.

    If `streams` is true, the client may request the answer as server-sent events.
    """
    response: dict[str, Any] = {"description": answer.description}
    if answer.schema is not None:
        response["content"] = {"application/json": {"schema": make_schema(answer.schema)}}
        if streams:
            response["content"][EVENT_STREAM] = {"schema": {"type": "string"}}
    elif answer.status >= 400:
        response["content"] = _ERROR_CONTENT
    return response


def add_components(app: web.Application) -> None:
    document: Callable[[], dict[str, Any]] = cache(partial(build_document, app))
    app[DOCUMENT] = document
