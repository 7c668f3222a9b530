"""Routes that renew the leases of plan tables and plan snapshots, for clients that wait before they read them.

A principal that may read the table may renew its plans, because it may also create them. A name whose lease has ended
resolves again as long as its files exist. Creating the plan again does not renew it: after a commit to the table it is
another plan.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.describe import NAMESPACE, TABLE, ResponseSpec, describe
from seamark.metaserver.api.http.keys import CATALOG, PRINCIPAL, SETTINGS
from seamark.metaserver.api.http.plan_audience import AUDIENCE, HEADER, audience_of
from seamark.metaserver.api.http.render import json_answer
from seamark.metaserver.api.http.requests import allow, path_name, path_namespace, read_json
from seamark.metaserver.catalog.plans.plan_tables import too_many_plans
from seamark.metaserver.errors import BadRequest, NoSuchTable
from seamark.metaserver.iceberg.types.reading import Int64
from seamark.metaserver.settings import Settings
from seamark.metaserver.wire import is_plan_name, show

SNAPSHOTS_MAX = 1000
_LEASE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["expires-at-ms"],
    "properties": {
        "expires-at-ms": {
            "type": "integer",
            "description": "When the name stops to resolve: at least half of lease-s from now.",
        }
    },
}
_BODY_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "lease-s": {
            "type": "integer",
            "minimum": 1,
            "description": "The time in seconds for which the name resolves from now on. Settings give default and "
            "limit.",
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
            "description": "Ids of plans of this table or view that were created with the same X-Seamark-Plans.",
        },
        "lease-s": {
            "type": "integer",
            "minimum": 0,
            "description": "The time in seconds for which loadTable adds the snapshots from now on. 0 withdraws them.",
        },
    },
}
_LEASED_COUNT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["found"],
    "properties": {"found": {"type": "integer", "description": "The number of ids that are plans of this header."}},
}


class _Snapshots(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    snapshot_ids: Annotated[list[Int64], msgspec.Meta(min_length=1, max_length=SNAPSHOTS_MAX)]
    lease_s: Annotated[int, msgspec.Meta(ge=0)]


class _LeasedCount(msgspec.Struct):
    found: int


class _RenewRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
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
    body = await read_json(request, _RenewRequest)
    check_lease(body.lease_s)
    lease_s = granted_s(body.lease_s, request.app[SETTINGS])
    plans, who = request.app[CATALOG].plan_tables, request[PRINCIPAL].name
    plan = await plans.share(namespace, name, lease_s, who) if is_plan_name(name) else None
    if plan is None and not await plans.has_room(who):
        raise too_many_plans(who)
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
        ResponseSpec(200, "The number of existing plans", _LEASED_COUNT_SCHEMA),
        ResponseSpec(400, "The ids or the lease are invalid, or the header is missing"),
    ),
)
async def lease_plan_snapshots(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    audience = audience_of(request)
    if audience is None:
        raise BadRequest(f"The header {HEADER} is missing; send the value that the plans were created with")
    body = await read_json(request, _Snapshots)
    lease_s = min(body.lease_s, request.app[SETTINGS].plan_table_lease_max_s)
    plans = request.app[CATALOG].plan_tables
    ids, who = body.snapshot_ids, request[PRINCIPAL].name
    return json_answer(_LeasedCount(await plans.lease(namespace, name, audience, ids, lease_s, who)))


def check_lease(lease_s: int | None) -> None:
    """BadRequest for a lease shorter than a second."""
    if lease_s is not None and lease_s < 1:
        raise BadRequest(f"lease-s is {lease_s}; it must be at least 1")


def granted_s(lease_s: int | None, settings: Settings) -> int:
    """The lease in seconds: as requested or by default, up to the limit."""
    return min(lease_s or settings.plan_table_lease_s, settings.plan_table_lease_max_s)


def add_routes(app: web.Application) -> None:
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/lease", renew_plan_table)
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/plan-snapshots", lease_plan_snapshots)
