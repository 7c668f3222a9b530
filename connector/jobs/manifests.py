"""Asks the server to rewrite the manifests of a table: the server writes all manifests and manifest lists."""

from __future__ import annotations

from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path

_TIMEOUT_S = 1800.0


def rewrite_manifests(
    client: SeamarkClient, table: Name, *, min_count: int | None = None, dry_run: bool = False
) -> dict[str, Any]:
    """The report, as docs/reference/openapi.json has it (rewriteManifests). `min_count`: manifests of one partition
    spec and content from which on they are rewritten; None: by the table's property. NotFound; BadRequest for a table
    of format version 1."""
    body: dict[str, Any] = {"dry-run": dry_run}
    if min_count is not None:
        body["min-count"] = min_count
    path = f"{table_path(table)}/rewrite-manifests"
    report: dict[str, Any] = client._json("POST", path, {}, body, timeout_s=_TIMEOUT_S)
    return report
