"""Serves GET /v1/config, the first request of every client. The answer lists the endpoints of the server."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from seamark.formats.runtime.errors import BadRequest, NoSuchWarehouse
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.api.http.dispatch import Call, Check, Route, list_served_endpoints
from seamark.metaserver.api.http.render import PLANNING_MODE
from seamark.metaserver.settings.settings import Settings

_COMPLIANCE_KIT = "rck_warehouse"
"""The name of the warehouse that Iceberg's compliance kit requests by default.

A server without a prefix accepts it.
"""
_ENDPOINTS: web.AppKey[list[str]] = web.AppKey("served-endpoints", list[str])


@Route("GET", "/v1/config", "getConfig", check=Check.LOGIN)
async def get_config(call: Call) -> dict[str, Any]:
    """Return the configuration of the catalog for a client."""
    settings = await _find_settings(call)
    return {
        "defaults": _list_defaults(call, settings),
        "overrides": {"prefix": settings.prefix} if settings.prefix else {},
        "endpoints": _list_endpoints(call.app),
        # This property announces to clients that the server supports idempotency keys (ISO 8601 duration).
        "idempotency-key-lifetime": f"PT{settings.idempotency_ttl_s}S",
    }


def _list_endpoints(app: web.Application) -> list[str]:
    """Return the endpoints of the server. The list is made once, because the routes do not change while it runs."""
    endpoints = app[_ENDPOINTS]
    if not endpoints:
        endpoints += list_served_endpoints(app)
    return endpoints


def _list_defaults(call: Call, settings: Settings) -> dict[str, str]:
    """Return the default properties of the catalog.

    PyIceberg reads the planning mode only from the properties of its catalog, not from the `config` of a table. For
    PyIceberg, the server therefore plans either all tables or none. It may plan all tables, because PyIceberg uses the
    server's plans only for reads, and plans its changes itself. Other clients do not get the property, because it would
    override the mode of a table.
    """
    is_pyiceberg = call.headers.get("User-Agent", "").startswith("PyIceberg/")
    if is_pyiceberg and settings.scan_planning_mode != "client":
        return {PLANNING_MODE: "server"}
    return {}


async def _find_settings(call: Call) -> Settings:
    """Return the settings of the warehouse that the client requests.

    The name of the server's warehouse is the configured prefix. Without a prefix, the warehouse has no name. A client
    may also send a URI, which states where it expects its files. The URI must be the location of a warehouse. Iceberg's
    compliance kit requests a fixed name, which a server without a prefix accepts.

    Raises:
        NoSuchWarehouse: The server has no warehouse with this URI or name.
    """
    requested_warehouse = call.query.get("warehouse", "")
    settings, warehouse_uri = call.components.settings, call.components.catalog.warehouse.uri
    if requested_warehouse in ("", settings.prefix) or (requested_warehouse == _COMPLIANCE_KIT and not settings.prefix):
        return settings
    try:
        location = str(parse_location(requested_warehouse))
    except BadRequest:
        location = requested_warehouse
    if location == warehouse_uri:
        return settings
    warehouses = call.components.warehouses
    if warehouses is not None:
        warehouse = await warehouses.find(requested_warehouse) or await warehouses.find_by_location(location)
        if warehouse is not None:
            return warehouses.make_client_settings(warehouse)
    allowed_names = f"{settings.prefix!r} ({warehouse_uri})" if settings.prefix else warehouse_uri
    raise NoSuchWarehouse(
        f"Warehouse {requested_warehouse[:200]!r} does not exist; set {allowed_names}, or leave it out"
    )


def add_components(app: web.Application) -> None:
    app[_ENDPOINTS] = []
