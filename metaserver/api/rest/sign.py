"""Serves remote signing: the server signs a single S3 request to a table if the client has the right."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from seamark.formats.storage.locations import parse_location
from seamark.metaserver.api.http.dispatch import Call, Route, make_json_answer
from seamark.metaserver.objects.storages import find_storage


@Route("POST", "/v1/{prefix}/namespaces/{namespace}/tables/{table}/sign", "signRequest").takes(dict[str, Any])
async def sign_request(call: Call, s3_request: dict[str, Any]) -> web.Response:
    """Sign a request to S3 for a client.

    The request must be for a file of the table. The parameter `stage` identifies a table whose creation is staged, so
    that it is not in the catalog yet.
    """
    catalog = call.components.catalog
    stage = call.query.get("stage")
    if stage is None:
        location = await catalog.load_location(call.namespace, call.name)
    else:
        location = await catalog.find_staged_location(call.caller, stage, call.namespace, call.name)
    signed_request, cache_control = await find_storage(location, "The table's location").sign(
        s3_request,
        parse_location(location),
        call.components.settings,
        writable=await call.may(call.securable, "updateTable"),
        now_ms=call.components.clock.now_ms(),
    )
    response = make_json_answer(signed_request)
    response.headers["Cache-Control"] = cache_control
    return response
