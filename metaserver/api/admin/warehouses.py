"""The routes of further warehouses. They require the role admin on the whole catalog of the server.

Requests may contain credentials. Answers only say whether the warehouse has credentials.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from seamark.formats.runtime.errors import AlreadyExists, BadRequest, ConfigError, NoSuchWarehouse
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.api.http.components import make_warehouse_path
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.warehouses.definitions import CREDENTIALS, WAREHOUSE_SETTINGS
from seamark.metaserver.warehouses.warehouses import Warehouses

_FORBIDDEN = ResponseSpec(403, "The caller does not have the role admin on the whole catalog of the server")
_MISSING = ResponseSpec(404, "No such warehouse")
_INVALID = ResponseSpec(400, "The definition is invalid, or the operator does not allow the location or the endpoint")
_OwnSettings = Annotated[
    dict[str, Any],
    doc(f"The settings in which the warehouse differs from the server: {', '.join(WAREHOUSE_SETTINGS)}."),
]
_Credentials = Annotated[
    dict[str, str] | None,
    doc(
        f"The keys of the warehouse: {', '.join(CREDENTIALS)}. No answer shows them. If it is null or absent, the keys "
        "stay as they are. This is refused for a login if federation_uri changes. If it is an empty object, the "
        "warehouse uses the keys of the server."
    ),
]


class WarehouseAnswer(msgspec.Struct, frozen=True, rename="kebab"):
    """A further warehouse, besides the server's own. Its credentials are left out."""

    name: Annotated[str, doc("The prefix of its routes, and the value of `warehouse` in /v1/config.")]
    id: str
    location: str
    settings: Annotated[dict[str, Any], doc("The settings in which the warehouse differs from the server.")]
    has_credentials: Annotated[bool, doc("True if the warehouse has its own storage credentials.")]
    path: Annotated[str, doc("The path of the URL at which the server serves all routes of the warehouse.")]
    created_ms: int
    created_by: str
    version: int


class WarehousePage(msgspec.Struct, frozen=True, rename="kebab"):
    """A listing of all further warehouses of the server. It has a single page."""

    warehouses: Annotated[list[WarehouseAnswer], doc("The warehouses, sorted by name.")]


class CreateWarehouseRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to create a further warehouse."""

    name: Annotated[str, doc("The name: 1 to 63 characters a-z, 0-9, _ or -.")]
    location: Annotated[str, doc("The URI of the root of its tables, below one of the server's warehouse_roots.")]
    settings: _OwnSettings = {}
    credentials: _Credentials = None


class PutWarehouseRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """The declared state of a further warehouse."""

    location: Annotated[
        str | None,
        doc("The URI of the root of its tables. It is required to create the warehouse, and cannot be changed."),
    ] = None
    settings: _OwnSettings = {}
    credentials: _Credentials = None


@Route(
    method="GET",
    path="/api/v1/warehouses",
    operation="listWarehouses",
    summary="List the further warehouses of the server, besides its own",
    check=Check.CATALOG,
    tags=("warehouses",),
    answers=(ResponseSpec(200, "All further warehouses", WarehousePage), _FORBIDDEN),
)
async def list_warehouses(call: Call) -> WarehousePage:
    """List the further warehouses of the server, besides its own."""
    return WarehousePage([_describe_warehouse(warehouse) for warehouse in await _require_warehouses(call).list()])


@Route(
    method="POST",
    path="/api/v1/warehouses",
    operation="createWarehouse",
    summary="Create a further warehouse, in which the caller becomes an admin",
    check=Check.CATALOG,
    tags=("warehouses",),
    answers=(
        ResponseSpec(201, "The warehouse", WarehouseAnswer),
        _INVALID,
        _FORBIDDEN,
        ResponseSpec(409, "A warehouse has this name"),
    ),
).takes(CreateWarehouseRequest)
async def create_warehouse(call: Call, body: CreateWarehouseRequest) -> WarehouseAnswer:
    """Create a warehouse."""
    warehouses = _require_warehouses(call)
    return _describe_warehouse(
        await warehouses.create(body.name, body.location, body.settings, body.credentials or {}, call.principal.name)
    )


@Route(
    method="GET",
    path="/api/v1/warehouses/{warehouse}",
    operation="loadWarehouse",
    summary="Return a further warehouse",
    check=Check.CATALOG,
    tags=("warehouses",),
    answers=(ResponseSpec(200, "The warehouse", WarehouseAnswer), _FORBIDDEN, _MISSING),
)
async def load_warehouse(call: Call) -> WarehouseAnswer:
    """Return a warehouse."""
    return _describe_warehouse(await _require_warehouses(call).require(call.variables["warehouse"]))


@Route(
    method="PUT",
    path="/api/v1/warehouses/{warehouse}",
    operation="putWarehouse",
    summary="Create a further warehouse, or replace the settings of an existing one; idempotent",
    check=Check.CATALOG,
    tags=("warehouses",),
    answers=(
        ResponseSpec(200, "The warehouse", WarehouseAnswer),
        _INVALID,
        _FORBIDDEN,
        ResponseSpec(409, "Another request changed the warehouse"),
    ),
).takes(PutWarehouseRequest)
async def put_warehouse(call: Call, body: PutWarehouseRequest) -> WarehouseAnswer:
    """Create a warehouse, or replace its settings."""
    warehouses, name = _require_warehouses(call), call.variables["warehouse"]
    stored_warehouse = await warehouses.find(name)
    if stored_warehouse is None:
        if body.location is None:
            raise NoSuchWarehouse(f"Warehouse does not exist: {name[:80]}; set location to create it")
        try:
            stored_warehouse = await warehouses.create(
                name, body.location, body.settings, body.credentials or {}, call.principal.name
            )
        except AlreadyExists:  # A concurrent request has created the warehouse.
            stored_warehouse = await warehouses.require(name)
        else:
            return _describe_warehouse(stored_warehouse)
    if body.location is not None and str(parse_location(body.location)) != stored_warehouse.location:
        raise BadRequest(
            f"The warehouse {name} is at {stored_warehouse.location!r}, and a location cannot be changed; omit "
            "location, or create another warehouse"
        )
    try:
        return _describe_warehouse(await warehouses.change(name, body.settings, body.credentials))
    except ConfigError as error:
        raise BadRequest(error.message) from None


@Route(
    method="DELETE",
    path="/api/v1/warehouses/{warehouse}",
    operation="dropWarehouse",
    summary="Drop an empty warehouse. Its files and its database are not deleted",
    check=Check.CATALOG,
    tags=("warehouses",),
    answers=(
        ResponseSpec(204, "Dropped"),
        _FORBIDDEN,
        _MISSING,
        ResponseSpec(409, "The warehouse has namespaces, or dropped tables and views whose files are not deleted yet"),
    ),
)
async def drop_warehouse(call: Call) -> None:
    """Drop a warehouse."""
    await _require_warehouses(call).drop(call.variables["warehouse"])


def _require_warehouses(call: Call) -> Warehouses:
    warehouses = call.components.warehouses
    assert warehouses is not None  # The authorizer of a further warehouse refuses these operations.
    return warehouses


def _describe_warehouse(warehouse: StoredWarehouse) -> WarehouseAnswer:
    """Return a warehouse in the form of the answer, without its credentials."""
    return WarehouseAnswer(
        name=warehouse.name,
        id=warehouse.id,
        location=warehouse.location,
        settings=warehouse.settings,
        has_credentials=warehouse.credentials is not None,
        path=make_warehouse_path(warehouse.name),
        created_ms=warehouse.created_ms,
        created_by=warehouse.principal_name,
        version=warehouse.version,
    )
