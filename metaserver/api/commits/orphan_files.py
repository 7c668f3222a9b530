"""The route that removes orphan files."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.keys import ORPHAN_REMOVAL
from seamark.metaserver.commit.expiration.orphan_files import FILES_MAX, OrphanReport, OrphanRequest


class RemoveOrphanFilesRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    older_than_ms: Annotated[
        Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None,
        doc(
            "In ms since the epoch: files that were last modified before are removed; at least one day ago. Default: "
            "by the table property seamark.orphan-files.min-age-ms, or 3 days ago."
        ),
    ] = None
    dry_run: Annotated[bool, doc("Only report what would be removed.")] = False


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/remove-orphan-files",
    "removeOrphanFiles",
    f"Removes files in the table's folders that no snapshot names, at most {FILES_MAX:,} a request",
    tags=("commits",),
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "What was removed; repeat while files-left is true", OrphanReport),
        ResponseSpec(400, "The table's properties forbid deletion or are invalid, or the time is too late"),
        ResponseSpec(404, "No such table"),
    ),
).takes(RemoveOrphanFilesRequest)
async def remove_orphan_files(call: Call, body: RemoveOrphanFilesRequest) -> OrphanReport:
    request = OrphanRequest(body.older_than_ms, body.dry_run)
    return await call.app[ORPHAN_REMOVAL].remove(call.caller, call.namespace, call.name, request)
