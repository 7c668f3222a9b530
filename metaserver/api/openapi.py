"""GET /api/v1/openapi.json: OpenAPI 3.1 of Seamark's API, built from the descriptions of the handlers.

The Iceberg routes under /v1 are specified by the Iceberg REST specification and not repeated here. The file
`docs/reference/openapi.json` contains this document; a test compares them.
"""

from __future__ import annotations

import importlib.metadata
import re
from typing import Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.admin.admin import AUDIT_SCHEMA, GRANT_SCHEMA, TOKEN_SCHEMA
from seamark.metaserver.api.commits.commits import COMMITTED_SCHEMA
from seamark.metaserver.api.commits.dropped import DROPPED_SCHEMA, REPORT_SCHEMA
from seamark.metaserver.api.commits.timeline import EVENT_STREAM, INSTANT_SCHEMA
from seamark.metaserver.api.http.describe import (
    Description,
    Parameter,
    ResponseSpec,
    describe,
    description_of,
    is_described,
)
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.indexes.build_state import BUILD_SCHEMA
from seamark.metaserver.api.indexes.indexes import INDEX_SCHEMA
from seamark.metaserver.api.lookups.bitmaps import BITMAP_SCHEMA
from seamark.metaserver.api.lookups.lookups import LOOKUP_SCHEMA
from seamark.metaserver.api.lookups.metadata import COLUMN_STATS_SCHEMA, FILE_SCHEMA, PARTITION_SCHEMA
from seamark.metaserver.api.plans.explain import EXPLANATION_SCHEMA
from seamark.metaserver.api.plans.joins import JOIN_SCHEMA
from seamark.metaserver.api.plans.plan_tables import PLAN_TABLE_SCHEMA

DOCUMENT: web.AppKey[dict[str, Any]] = web.AppKey("openapi", dict)

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


@describe(
    "openapi",
    "This document",
    tags=("operation",),
    answers=(ResponseSpec(200, "OpenAPI 3.1", {"type": "object"}),),
    public=True,
)
async def openapi(request: web.Request) -> web.Response:
    return json_answer(request.app[DOCUMENT])


def build_document(app: web.Application) -> dict[str, Any]:
    """The document for all described routes of `app`, sorted by path."""
    paths: dict[str, dict[str, Any]] = {}
    body_types = {described.body_type: None for described in _descriptions(app) if described.body_type is not None}
    references, derived = msgspec.json.schema_components(body_types, ref_template="#/components/schemas/{name}")
    bodies = dict(zip(body_types, references, strict=True))
    for route in app.router.routes():
        if route.resource is None or route.method == "HEAD" or not is_described(route.handler):
            continue
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical)
        paths.setdefault(path, {})[route.method.lower()] = _operation(description_of(route.handler), bodies)
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
                "Instant": INSTANT_SCHEMA,
                "Dropped": DROPPED_SCHEMA,
                "MetricsReport": REPORT_SCHEMA,
                "File": FILE_SCHEMA,
                "ColumnStats": COLUMN_STATS_SCHEMA,
                "Partition": PARTITION_SCHEMA,
                "Committed": COMMITTED_SCHEMA,
                "Explanation": EXPLANATION_SCHEMA,
                "Index": INDEX_SCHEMA,
                "IndexBuild": BUILD_SCHEMA,
                "Lookup": LOOKUP_SCHEMA,
                "Bitmap": BITMAP_SCHEMA,
                "PlanTable": PLAN_TABLE_SCHEMA,
                "Join": JOIN_SCHEMA,
                "Token": TOKEN_SCHEMA,
                "Grant": GRANT_SCHEMA,
                "AuditRecord": AUDIT_SCHEMA,
                "Error": _ERROR_SCHEMA,
                **derived,
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}, {}],
    }


def _descriptions(app: web.Application) -> list[Description]:
    return [description_of(route.handler) for route in app.router.routes()]


def _operation(described: Description, bodies: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": described.operation,
        "summary": described.summary,
        "tags": list(described.tags),
        "responses": {str(answer.status): _response(answer, described.waits) for answer in described.answers},
    }
    operation["responses"]["default"] = {
        "description": "An error, in the form of the Iceberg REST specification",
        "content": _ERROR_CONTENT,
    }
    if described.parameters:
        operation["parameters"] = [_parameter(parameter) for parameter in described.parameters]
    body, required = described.body, False
    if described.body_type is not None:
        body, required = bodies[described.body_type], True
    if body is not None:
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": body}}}
    if described.public:
        operation["security"] = []
    return operation


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.where,
        "description": parameter.description,
        "required": parameter.required,
        "schema": parameter.schema,
    }


def _response(answer: ResponseSpec, streams: bool) -> dict[str, Any]:
    response: dict[str, Any] = {"description": answer.description}
    if answer.schema is not None:
        response["content"] = {answer.content_type: {"schema": answer.schema}}
        if streams:
            response["content"][EVENT_STREAM] = {"schema": {"type": "string"}}
    elif answer.status >= 400:
        response["content"] = _ERROR_CONTENT
    return response


def add_routes(app: web.Application) -> None:
    """Registered last: the document contains the routes registered before."""
    app.router.add_get("/api/v1/openapi.json", openapi)
    app[DOCUMENT] = build_document(app)
