"""The route that rewrites manifests."""

from __future__ import annotations

from typing import Annotated

import msgspec

from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.keys import MANIFEST_REWRITE
from seamark.metaserver.commit.rewriting.manifest_rewrite import ManifestReport, ManifestRequest


class RewriteManifestsRequest(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    min_count: Annotated[
        Annotated[int, msgspec.Meta(ge=2, lt=1 << 31)] | None,
        doc(
            "Manifests of one partition spec and content from which on they are rewritten. Default: the table property "
            "seamark.manifests.min-count, or 20."
        ),
    ] = None
    dry_run: Annotated[bool, doc("Only report what would be replaced.")] = False


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/rewrite-manifests",
    "rewriteManifests",
    "Lists the files of the main branch in fewer manifests, sorted by partition; the files stay the same",
    tags=("commits",),
    is_body_optional=True,
    answers=(
        ResponseSpec(200, "What was replaced; nothing if other commits were faster (conflicts)", ManifestReport),
        ResponseSpec(400, "The table has format version 1, or an invalid property"),
        ResponseSpec(404, "No such table"),
    ),
).takes(RewriteManifestsRequest)
async def rewrite_manifests(call: Call, body: RewriteManifestsRequest) -> ManifestReport:
    request = ManifestRequest(body.min_count, body.dry_run)
    return await call.app[MANIFEST_REWRITE].rewrite(call.caller, call.namespace, call.name, request)
