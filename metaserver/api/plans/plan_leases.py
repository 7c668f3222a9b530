"""Our own route that makes a plan table's name good for longer: for who has to wait before the name is read.

Whoever may read the table may renew it, as they may have another one made. A name whose lease has ended comes back, as
long as its files are there. Asking the same question anew would not do: of a table that has changed it is another one.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web

from metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from metaserver.api.http.keys import CATALOG, SETTINGS
from metaserver.api.http.plan_audience import AUDIENCE, HEADER, audience_of
from metaserver.api.http.render import json_answer
from metaserver.api.http.requests import allow, path_name, path_namespace, read_json
from metaserver.errors import BadRequest, NoSuchTable
from metaserver.iceberg.types.reading import Int64
from metaserver.settings import Settings
from metaserver.wire import is_plan_name, show

SNAPSHOTS_MAX = 1000
_LEASE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["expires-at-ms"],
    "properties": {
        "expires-at-ms": {
            "type": "integer",
            "description": "When the name is good no longer. Half of lease-s from now at least.",
        }
    },
}
_BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "lease-s": {
            "type": "integer",
            "minimum": 1,
            "description": "How long the name is to be good for from now on; default and bound are settings.",
        }
    },
}


_SNAPSHOTS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["snapshot-ids", "lease-s"],
    "properties": {
        "snapshot-ids": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 1,
            "maxItems": SNAPSHOTS_MAX,
            "description": "Ids of plans of this table, or view, made with the same value of X-Seamark-Plans.",
        },
        "lease-s": {
            "type": "integer",
            "minimum": 0,
            "description": "How long loadTable is to add them from now on. 0 withdraws them at once.",
        },
    },
}
_FOUND_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["found"],
    "properties": {"found": {"type": "integer", "description": "Number of the ids that are plans of this header."}},
}


class _Snapshots(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    snapshot_ids: Annotated[list[Int64], msgspec.Meta(min_length=1, max_length=SNAPSHOTS_MAX)]
    lease_s: Annotated[int, msgspec.Meta(ge=0)]


class _Found(msgspec.Struct):
    found: int


class _Wanted(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    lease_s: int | None = None


class _Renewed(msgspec.Struct, rename="kebab"):
    expires_at_ms: int


@describe(
    "renewPlanTable",
    "Renews the lease of a plan table",
    tags=("metadata",),
    parameters=(NAMESPACE, TABLE),
    body=_BODY_SCHEMA,
    answers=(
        ResponseSpec(200, "The new end of the lease", _LEASE_SCHEMA),
        ResponseSpec(400, "The lease is invalid"),
        ResponseSpec(404, "No plan table of this name exists"),
    ),
)
async def renew_plan_table(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    wanted = await read_json(request, _Wanted)
    check_lease(wanted.lease_s)
    lease_s = granted_s(wanted.lease_s, request.app[SETTINGS])
    plan = await request.app[CATALOG].plan_tables.share(namespace, name, lease_s) if is_plan_name(name) else None
    if plan is None:
        raise NoSuchTable(f"Plan table does not exist: {show(namespace, name)}")
    return json_answer(_Renewed(plan.expires_ms))


@describe(
    "leasePlanSnapshots",
    "Renews or ends the leases of plan snapshots, created with X-Seamark-Plans",
    tags=("metadata",),
    parameters=(NAMESPACE, TABLE, AUDIENCE),
    body=_SNAPSHOTS_SCHEMA,
    answers=(
        ResponseSpec(200, "The number of existing plans", _FOUND_SCHEMA),
        ResponseSpec(400, "The ids or the lease are invalid, or the header is missing"),
    ),
)
async def lease_plan_snapshots(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    audience = audience_of(request)
    if audience is None:
        raise BadRequest(f"{HEADER} is missing; send the value that the plans were made with")
    wanted = await read_json(request, _Snapshots)
    lease_s = min(wanted.lease_s, request.app[SETTINGS].plan_table_lease_max_s)
    plans = request.app[CATALOG].plan_tables
    return json_answer(_Found(await plans.lease(namespace, name, audience, wanted.snapshot_ids, lease_s)))


def check_lease(lease_s: int | None) -> None:
    """BadRequest for one that is over before it begins."""
    if lease_s is not None and lease_s < 1:
        raise BadRequest(f"lease-s is {lease_s}; it must be at least 1")


def granted_s(lease_s: int | None, settings: Settings) -> int:
    """How long a name is to be good for: as asked, or by default, but no longer than the bound."""
    return min(lease_s or settings.plan_table_lease_s, settings.plan_table_lease_max_s)


def add_routes(app: web.Application) -> None:
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/lease", renew_plan_table)
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/plan-snapshots", lease_plan_snapshots)
