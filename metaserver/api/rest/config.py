"""GET /v1/config, the first request of every client. The answer lists the endpoints that the router serves."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from seamark.formats.runtime.errors import BadRequest, NoSuchWarehouse
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.api.http.dispatch import Call, Check, Route, list_served_endpoints
from seamark.metaserver.api.http.render import PLANNING_MODE

_COMPLIANCE_KIT = "rck_warehouse"
"""The name of the warehouse that Iceberg's compliance kit requests by default.

A server without a prefix accepts it.
"""
_ENDPOINTS: web.AppKey[list[str]] = web.AppKey("served-endpoints", list[str])


@Route("GET", "/v1/config", "getConfig", check=Check.LOGIN)
async def get_config(call: Call) -> dict[str, Any]:
    _check_warehouse(call)
    settings = call.components.settings
    return {
        "defaults": _list_defaults(call),
        "overrides": {"prefix": settings.prefix} if settings.prefix else {},
        "endpoints": _list_endpoints(call.app),
        # This property announces to clients that the server supports idempotency keys (ISO 8601 duration).
        "idempotency-key-lifetime": f"PT{settings.idempotency_ttl_s}S",
    }


def _list_endpoints(app: web.Application) -> list[str]:
    """Return the endpoints. The list is made once, because the routes of a running server do not change."""
    endpoints = app[_ENDPOINTS]
    if not endpoints:
        endpoints += list_served_endpoints(app)
    return endpoints


def _list_defaults(call: Call) -> dict[str, str]:
    """Return the default properties of the catalog.

    PyIceberg reads the planning mode only from its catalog's properties, not from a table's `config`. The server
    therefore plans all tables for PyIceberg, or none. Planning all tables is correct: PyIceberg uses the server's
    plans only for reads, and plans its changes itself. Other clients do not get the property, because it would
    override the mode of a table.
    """
    is_pyiceberg = call.headers.get("User-Agent", "").startswith("PyIceberg/")
    if is_pyiceberg and call.components.settings.scan_planning_mode != "client":
        return {PLANNING_MODE: "server"}
    return {}


def _check_warehouse(call: Call) -> None:
    """Check that the server has the warehouse that the client requests.

    A server has one warehouse. Its name is the prefix; if there is no prefix, it has no name. If the client sends a
    URI, it states where the client expects its files, so it must match.

    Raises:
        NoSuchWarehouse: The server does not have a warehouse with this URI or name.
    """
    warehouse = call.query.get("warehouse", "")
    warehouse_uri, prefix = call.components.catalog.warehouse.uri, call.components.settings.prefix
    if warehouse in ("", prefix) or (warehouse == _COMPLIANCE_KIT and not prefix):
        return
    try:
        location = str(parse_location(warehouse))
    except BadRequest:
        location = warehouse
    if location != warehouse_uri:
        allowed_names = f"{prefix!r} ({warehouse_uri})" if prefix else warehouse_uri
        raise NoSuchWarehouse(f"Warehouse {warehouse[:200]!r} does not exist; set {allowed_names}, or leave it out")


def add_components(app: web.Application) -> None:
    app[_ENDPOINTS] = []
