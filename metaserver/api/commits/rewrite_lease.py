"""The route of the lease that jobs hold while they rewrite files of a table, so that no two rewrite the same files.

The lease only avoids wasted work: commits do not need it, and two rewrites of the same files conflict as before.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web

from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route, add_endpoints
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, STORE
from seamark.metaserver.errors import CommitConflict
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.operations import REWRITE, TakeLease

LASTS_MS = 5000
"""A killed job delays the next by at most this time; jobs renew the lease several times meanwhile."""


class RewriteLeaseRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    holder: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=64)],
        doc("A random name of the job, the same in each renewal."),
    ]
    release: Annotated[bool, doc("Ends the lease.")] = False


class RewriteLease(msgspec.Struct, frozen=True, rename="kebab"):
    lasts_ms: int


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/rewrite-lease",
    "takeRewriteLease",
    "Takes, renews or ends the lease of a job that rewrites files of the table; commits do not need it",
    tags=("commits",),
    answers=(
        ResponseSpec(200, "The job has the lease for this time; 0 after its end", RewriteLease),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "Another job has the lease"),
    ),
).takes(RewriteLeaseRequest)
async def take_rewrite_lease(call: Call, body: RewriteLeaseRequest) -> RewriteLease:
    entry = await call.app[CATALOG].parts.require_entry(EntryKind.TABLE, call.namespace, call.name)
    now_ms, lasts_ms = call.app[CLOCK].now_ms(), 0 if body.release else LASTS_MS
    lease = TakeLease(f"{REWRITE}{entry.uuid}", body.holder, now_ms, now_ms + lasts_ms)
    try:
        await call.app[STORE].transact([lease])
    except CommitConflict:
        raise CommitConflict(
            f"Another job rewrites files of the table {call.name} now; try again in {LASTS_MS // 1000} seconds"
        ) from None
    return RewriteLease(lasts_ms)


def add_routes(app: web.Application) -> None:
    add_endpoints(app, take_rewrite_lease)
