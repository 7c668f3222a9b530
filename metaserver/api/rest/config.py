"""GET /v1/config: the first request of every client. What it lists is what the router serves, by construction."""

from __future__ import annotations

from aiohttp import web

from metaserver.api.http.endpoints import add_operations, served_endpoints
from metaserver.api.http.keys import CATALOG, SETTINGS
from metaserver.api.http.render import PLANNING_MODE, json_answer
from metaserver.errors import BadRequest, NoSuchWarehouse
from metaserver.objects.locations import parse_location


async def get_config(request: web.Request) -> web.Response:
    _check_warehouse(request)
    settings = request.app[SETTINGS]
    return json_answer(
        {
            "defaults": _defaults(request),
            "overrides": {"prefix": settings.prefix} if settings.prefix else {},
            "endpoints": served_endpoints(request.app),
            # Its presence tells clients that keys are honoured (ISO 8601 duration).
            "idempotency-key-lifetime": f"PT{settings.idempotency_ttl_s}S",
        }
    )


def _defaults(request: web.Request) -> dict[str, str]:
    """PyIceberg takes the planning mode from its catalog's properties only, never from a table's `config`.

    So it has all tables or none planned by the server. All is right for it: it plans only what it reads through the
    server, and what it changes by itself. Not for other clients, which would take this for a wish against the table's.
    """
    is_pyiceberg = request.headers.get("User-Agent", "").startswith("PyIceberg/")
    if is_pyiceberg and request.app[SETTINGS].scan_planning_mode != "client":
        return {PLANNING_MODE: "server"}
    return {}


def _check_warehouse(request: web.Request) -> None:
    """NoSuchWarehouse when the client asks for a URI, or by name for a prefix, that is not this server's.

    A server without a prefix has one warehouse without a name, and answers to any: Iceberg's compliance kit and many
    configurations in the field make one up. A URI says where the client expects its files, and is never waved through.
    """
    asked = request.query.get("warehouse", "")
    ours, prefix = request.app[CATALOG].warehouse.uri, request.app[SETTINGS].prefix
    if not asked or asked == prefix:
        return
    if ":" not in asked and not prefix:
        return
    try:
        found = str(parse_location(asked))
    except BadRequest:
        found = asked
    if found != ours:
        named = f"{prefix!r} ({ours})" if prefix else ours
        raise NoSuchWarehouse(f"No warehouse {asked[:200]!r} here: ask for {named}, or for none")


def add_routes(app: web.Application) -> None:
    add_operations(app, "/v1/config", {"GET": get_config})
