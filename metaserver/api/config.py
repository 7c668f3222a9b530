"""GET /v1/config: the first request of every client. What it lists is what the router serves, by construction."""

from __future__ import annotations

from aiohttp import web

from metaserver.api.endpoints import add_operations, served_endpoints
from metaserver.api.keys import CATALOG, SETTINGS
from metaserver.api.render import json_answer
from metaserver.errors import BadRequest, NoSuchWarehouse
from metaserver.objects.locations import parse_location


async def get_config(request: web.Request) -> web.Response:
    _check_warehouse(request)
    settings = request.app[SETTINGS]
    return json_answer(
        {
            "defaults": {},
            "overrides": {"prefix": settings.prefix} if settings.prefix else {},
            "endpoints": served_endpoints(request.app),
            # Its presence tells clients that keys are honoured (ISO 8601 duration).
            "idempotency-key-lifetime": f"PT{settings.idempotency_ttl_s}S",
        }
    )


def _check_warehouse(request: web.Request) -> None:
    """NoSuchWarehouse unless the client asks for this one, by its URI or prefix, or for none in particular.

    Answering for any name would hide a wrong address: tables would appear in a catalog that nobody meant.
    """
    asked = request.query.get("warehouse", "")
    ours = request.app[CATALOG].warehouse.uri
    if not asked or asked == request.app[SETTINGS].prefix:
        return
    try:
        found = str(parse_location(asked))
    except BadRequest:
        found = asked
    if found != ours:
        raise NoSuchWarehouse(f"No warehouse {asked[:200]!r} here; this server has {ours!r}, or leave the name out")


def add_routes(app: web.Application) -> None:
    add_operations(app, "/v1/config", {"GET": get_config})
