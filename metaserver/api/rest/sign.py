"""Iceberg REST: remote signing. A client gets single S3 requests to one table signed, by the rights of its login."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from seamark.metaserver.api.http.endpoints import add_operations
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, SETTINGS
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, may_write, path_name, path_namespace, read_json
from seamark.metaserver.deferred import Deferred

if TYPE_CHECKING:
    from seamark.metaserver.objects import signing
else:
    signing = Deferred("seamark.metaserver.objects.signing")


async def sign_request(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    s3_request = await read_json(request, dict[str, Any])
    catalog = request.app[CATALOG]
    stage = request.query.get("stage")
    if stage is None:
        location = await catalog.owned_location(namespace, name)
    else:
        location = await catalog.staged_location(stage, namespace, name)
    settings = request.app[SETTINGS]
    work = partial(
        signing.sign,
        s3_request,
        table_location=location,
        writable=may_write(request, namespace),
        settings=settings,
        now_ms=request.app[CLOCK].now_ms(),
    )
    # Credentials of AWS's provider chain may have to be fetched first, which blocks.
    signed = work() if settings.s3_access_key_id else await asyncio.to_thread(work)
    response = json_answer(signed)
    response.headers["Cache-Control"] = signing.cache_control(s3_request)
    return response


def add_routes(app: web.Application) -> None:
    add_operations(app, "/v1/{prefix}/namespaces/{namespace}/tables/{table}/sign", {"POST": sign_request})
