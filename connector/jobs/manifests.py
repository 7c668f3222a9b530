"""Asks the server to rewrite the manifests of a table: the server writes all manifests and manifest lists."""

from __future__ import annotations

from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path
from seamark.connector.client.values import given

_TIMEOUT_S = 1800.0


def rewrite_manifests(
    client: SeamarkClient, table: Name, *, min_count: int | None = None, dry_run: bool = False
) -> dict[str, Any]:
    """The report, as docs/reference/openapi.json has it (rewriteManifests). `min_count`: manifests of one partition
    spec and content from which on they are rewritten; None: by the table's property. NotFound; BadRequest for a table
    of format version 1."""
    body = given({"dry-run": dry_run, "min-count": min_count})
    return client._json("POST", f"{table_path(table)}/rewrite-manifests", {}, body, timeout_s=_TIMEOUT_S)
