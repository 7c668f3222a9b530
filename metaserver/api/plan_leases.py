"""Our own route that makes a plan table's name good for longer: for who has to wait before the name is read.

Whoever may read the table may renew it, as they may have another one made. A name whose lease has ended comes back, as
long as its files are there. Asking the same question anew would not do: of a table that has changed it is another one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from metaserver.api.describe import Answer, describe
from metaserver.api.keys import CATALOG, SETTINGS
from metaserver.api.render import json_answer
from metaserver.api.requests import allow, parse_body, path_name, path_namespace, read_body
from metaserver.api.timeline import NAMESPACE, TABLE
from metaserver.errors import BadRequest, NoSuchTable
from metaserver.settings import Settings
from metaserver.wire import is_plan_name, show

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


class _Wanted(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    lease_s: int | None = None


class _Renewed(msgspec.Struct, rename="kebab"):
    expires_at_ms: int


@describe(
    "renewPlanTable",
    "Makes the name of a plan table good for longer",
    tags=("metadata",),
    parameters=(NAMESPACE, TABLE),
    body=_BODY_SCHEMA,
    answers=(
        Answer(200, "When it ends now", _LEASE_SCHEMA),
        Answer(400, "The lease makes no sense"),
        Answer(404, "No plan table of that name is there any more"),
    ),
)
async def renew_plan_table(request: web.Request) -> web.Response:
    namespace, name = path_namespace(request), path_name(request, "table")
    allow(request, namespace)
    wanted = parse_body(await read_body(request), _Wanted)
    check_lease(wanted.lease_s)
    lease_s = granted_s(wanted.lease_s, request.app[SETTINGS])
    plan = await request.app[CATALOG].plan_tables.share(namespace, name, lease_s) if is_plan_name(name) else None
    if plan is None:
        raise NoSuchTable(f"Plan table does not exist: {show(namespace, name)}")
    return json_answer(_Renewed(plan.expires_ms))


def check_lease(lease_s: int | None) -> None:
    """BadRequest for one that is over before it begins."""
    if lease_s is not None and lease_s < 1:
        raise BadRequest(f"lease-s is {lease_s}; it must be at least 1")


def granted_s(lease_s: int | None, settings: Settings) -> int:
    """How long a name is to be good for: as asked, or by default, but no longer than the bound."""
    return min(lease_s or settings.plan_table_lease_s, settings.plan_table_lease_max_s)


def add_routes(app: web.Application) -> None:
    app.router.add_post("/api/v1/tables/{namespace:[^/]+}/{table:[^/]+}/lease", renew_plan_table)
