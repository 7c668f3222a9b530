"""The route that expires snapshots."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.keys import EXPIRATION
from seamark.metaserver.commit.expiration.expiration import SNAPSHOTS_MAX, ExpirationReport, ExpirationRequest


class ExpireSnapshotsRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    older_than_ms: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None,
        doc(
            "In ms since the epoch: snapshots that were replaced before expire. Default: the table property "
            "history.expire.max-snapshot-age-ms, or 5 days."
        ),
    ] = None
    retain_last: Annotated[
        Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)] | None,
        doc(
            "How many snapshots of each branch stay in any case. Default: the table property "
            "history.expire.min-snapshots-to-keep, or 1."
        ),
    ] = None
    dry_run: Annotated[bool, doc("Only report what would be removed.")] = False


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/expire-snapshots",
    "expireSnapshots",
    f"Removes expired snapshots and references, at most {SNAPSHOTS_MAX:,} snapshots a request, and deletes the files "
    "that no other snapshot needs",
    tags=("commits",),
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "What was removed; repeat while snapshots-left is not 0", ExpirationReport),
        ResponseSpec(400, "The table's properties forbid the deletion of files, or are invalid"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "Other commits were faster each time; nothing was removed"),
    ),
).takes(ExpireSnapshotsRequest)
async def expire_snapshots(call: Call, body: ExpireSnapshotsRequest) -> ExpirationReport:
    request = ExpirationRequest(body.older_than_ms, body.retain_last, body.dry_run)
    return await call.app[EXPIRATION].expire(call.caller, call.namespace, call.name, request)
