"""Iceberg REST: remote signing. A client gets single S3 requests to one table signed, by the rights of its login."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from seamark.formats.runtime.lazy_module import LazyModule, load
from seamark.metaserver.api.http.dispatch import Call, Route, json_answer
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, SETTINGS

if TYPE_CHECKING:
    from seamark.metaserver.objects import signing
else:
    signing = LazyModule("seamark.metaserver.objects.signing")


@Route("POST", "/v1/{prefix}/namespaces/{namespace}/tables/{table}/sign", "signRequest").takes(dict[str, Any])
async def sign_request(call: Call, s3_request: dict[str, Any]) -> web.Response:
    catalog = call.app[CATALOG]
    stage = call.query.get("stage")
    if stage is None:
        location = await catalog.owned_location(call.namespace, call.name)
    else:
        location = await catalog.staged_location(stage, call.namespace, call.name)
    settings = call.app[SETTINGS]
    await load(signing)
    work = partial(
        signing.sign,
        s3_request,
        table_location=location,
        writable=call.may(call.namespace, "updateTable"),
        settings=settings,
        now_ms=call.app[CLOCK].now_ms(),
    )
    # Credentials of AWS's provider chain may have to be fetched first, which blocks.
    signed = work() if settings.s3_access_key_id else await asyncio.to_thread(work)
    response = json_answer(signed)
    response.headers["Cache-Control"] = signing.cache_control(s3_request)
    return response
