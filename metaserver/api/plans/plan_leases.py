"""Routes that renew the leases of plan tables and plan snapshots, for clients that wait before they read them.

A principal that may read the table may renew its plans, because it may also create them. If the lease of a name has
ended, renewing it makes the name resolve again, as long as the files of the plan exist. Creating the plan again does
not renew the lease, because after a commit to the table, the result is a different plan.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.formats.iceberg.types.reading import Int64
from seamark.formats.protocol.wire import format_path, is_plan_name
from seamark.formats.runtime.errors import BadRequest, NoSuchTable
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.parameters.plan_audience import AUDIENCE, HEADER
from seamark.metaserver.catalog.plans.plan_tables import build_plan_limit_error
from seamark.metaserver.settings.settings import Settings

SNAPSHOTS_MAX = 1000


class LeasePlanSnapshotsRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to renew or end the leases of plan snapshots.

    A plan snapshot is a snapshot of the table with only the files of a scan plan.
    """

    snapshot_ids: Annotated[
        list[Int64],
        msgspec.Meta(
            min_length=1,
            max_length=SNAPSHOTS_MAX,
            description="The ids of plan snapshots of this table or view that were created with the same "
            "X-Seamark-Plans.",
        ),
    ]
    lease_s: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            description="The lease in seconds, from now. loadTable includes the snapshots of the plans until it ends. "
            "0 ends the lease at once.",
        ),
    ]


class LeasePlanSnapshotsResponse(msgspec.Struct):
    """The number of plan snapshots whose leases were renewed or ended."""

    renewed: Annotated[int, doc("The number of ids whose plans exist for this value of X-Seamark-Plans.")] = (
        msgspec.field(name="found")
    )


class RenewPlanTableRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """A request to renew the lease of a plan table."""

    lease_s: Annotated[
        int | None,
        doc("The lease in seconds from now, at least 1. Settings determine the default and the maximum."),
    ] = None


class RenewPlanTableResponse(msgspec.Struct, rename="kebab"):
    """The new end of the lease of a plan table."""

    expires_at_ms: Annotated[
        int, doc("The end of the lease, in milliseconds since the epoch. It is at least half of lease-s from now.")
    ]


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/lease",
    "renewPlanTable",
    "Renew the lease of a plan table",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "The new end of the lease", RenewPlanTableResponse),
        ResponseSpec(400, "The lease is invalid"),
        ResponseSpec(404, "No plan table of this name exists"),
    ),
).takes(RenewPlanTableRequest)
async def renew_plan_table(call: Call, body: RenewPlanTableRequest) -> RenewPlanTableResponse:
    """Renew the lease of a plan table."""
    namespace, name = call.namespace, call.name
    check_lease(body.lease_s)
    lease_s = grant_lease_s(body.lease_s, call.components.settings)
    plans, principal = call.components.catalog.plan_tables, call.principal.name
    plan = await plans.find_and_renew(namespace, name, lease_s, principal) if is_plan_name(name) else None
    # `find_and_renew` also returns None if the lease would exceed the limit of the principal.
    if plan is None and not await plans.check_or_count_refusal(principal):
        raise build_plan_limit_error(principal)
    if plan is None:
        raise NoSuchTable(f"Plan table does not exist: {format_path(namespace, name)}")
    return RenewPlanTableResponse(plan.expires_ms)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/plan-snapshots",
    "leasePlanSnapshots",
    "Renew or end the leases of plan snapshots that were created with X-Seamark-Plans",
    tags=("metadata",),
    parameters=(AUDIENCE,),
    answers=(
        ResponseSpec(200, "The number of existing plans", LeasePlanSnapshotsResponse),
        ResponseSpec(400, "The ids or the lease are invalid, or the header is missing"),
    ),
).takes(LeasePlanSnapshotsRequest)
async def lease_plan_snapshots(call: Call, body: LeasePlanSnapshotsRequest) -> LeasePlanSnapshotsResponse:
    """Renew or end the leases of plan snapshots that were created with X-Seamark-Plans."""
    audience = call.audience
    if audience is None:
        raise BadRequest(f"The header {HEADER} is missing; send the value with which the plans were created")
    lease_s = min(body.lease_s, call.components.settings.plan_table_lease_max_s)
    plans = call.components.catalog.plan_tables
    ids, principal = body.snapshot_ids, call.principal.name
    return LeasePlanSnapshotsResponse(await plans.lease(call.namespace, call.name, audience, ids, lease_s, principal))


def check_lease(lease_s: int | None) -> None:
    """Check that a lease lasts at least one second.

    Raises:
        BadRequest: The lease is shorter than one second.
    """
    if lease_s is not None and lease_s < 1:
        raise BadRequest(f"lease-s is {lease_s}; it must be at least 1")


def grant_lease_s(lease_s: int | None, settings: Settings) -> int:
    """Return the duration of a lease in seconds: the requested or the default duration, up to the limit."""
    return min(lease_s or settings.plan_table_lease_s, settings.plan_table_lease_max_s)
