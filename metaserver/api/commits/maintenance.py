"""Routes that maintain the files of a table: expire snapshots, remove orphan files, rewrite manifests."""

from __future__ import annotations

from seamark.metaserver.api.http.describe import ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.commit.expiration.expiration import SNAPSHOTS_MAX, ExpirationReport, ExpireSnapshotsRequest
from seamark.metaserver.commit.expiration.orphan_files import FILES_MAX, OrphanReport, RemoveOrphanFilesRequest
from seamark.metaserver.commit.rewriting.manifest_rewrite import ManifestReport, RewriteManifestsRequest


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/expire-snapshots",
    "expireSnapshots",
    f"Remove expired snapshots and references, at most {SNAPSHOTS_MAX:,} snapshots per request, and delete the files "
    "that no other snapshot needs",
    tags=("commits",),
    is_body_optional=True,
    answers=(
        ResponseSpec(
            200, "The removed snapshots and files. Repeat the request while snapshots-left is not 0", ExpirationReport
        ),
        ResponseSpec(400, "The table's properties forbid the deletion of files, or are invalid"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "Concurrent commits conflicted in every attempt; nothing was removed"),
    ),
).takes(ExpireSnapshotsRequest)
async def expire_snapshots(call: Call, body: ExpireSnapshotsRequest) -> ExpirationReport:
    """Remove expired snapshots and references, and delete the files that no other snapshot needs."""
    return await call.components.expiration.expire(call.caller, call.namespace, call.name, body)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/rewrite-manifests",
    "rewriteManifests",
    "List the files of the main branch in fewer manifests, sorted by partition. The files stay the same",
    tags=("commits",),
    is_body_optional=True,
    answers=(
        ResponseSpec(
            200, "The replaced manifests. If other commits conflicted (conflicts), none are replaced", ManifestReport
        ),
        ResponseSpec(400, "The table has format version 1, or an invalid property"),
        ResponseSpec(404, "No such table"),
    ),
).takes(RewriteManifestsRequest)
async def rewrite_manifests(call: Call, body: RewriteManifestsRequest) -> ManifestReport:
    """List the files of the main branch in fewer manifests, sorted by partition. The files stay the same."""
    return await call.components.manifest_rewrite.rewrite(call.caller, call.namespace, call.name, body)


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/remove-orphan-files",
    "removeOrphanFiles",
    f"Remove files in the table's folders that no snapshot names, at most {FILES_MAX:,} per request",
    tags=("commits",),
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "The removed files. Repeat the request while files-left is true", OrphanReport),
        ResponseSpec(400, "The table's properties forbid deletion or are invalid, or the time is too late"),
        ResponseSpec(404, "No such table"),
    ),
).takes(RemoveOrphanFilesRequest)
async def remove_orphan_files(call: Call, body: RemoveOrphanFilesRequest) -> OrphanReport:
    """Remove files in the table's folders that no snapshot names."""
    return await call.components.orphan_removal.remove(call.caller, call.namespace, call.name, body)
