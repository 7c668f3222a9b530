"""Jobs that the server does on request: expiration of snapshots, removal of orphan files, and rewriting of manifests.

The server writes all manifests and manifest lists. It has the rights to delete files, and knows which tables need them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, table_path
from seamark.connector.client.values import omit_none

_MANIFESTS_TIMEOUT_S = 1800.0


@dataclass
class ExpirationTotals:
    """The totals of all requests.

    Attributes:
        size_bytes: Of the data files, delete files and manifests that were deleted.
    """

    snapshots: int = 0
    refs: int = 0
    content_files: int = 0
    manifests: int = 0
    other_files: int = 0
    size_bytes: int = 0
    files_failed: int = 0


def expire(
    client: SeamarkClient,
    table: Name,
    *,
    older_than_ms: int | None = None,
    retain_last: int | None = None,
    dry_run: bool = False,
) -> ExpirationTotals:
    """Remove all expired snapshots. With `dry_run`, the files are those of the first request.

    Raises:
        BadRequest: A property or an argument is invalid.
        Conflict: Other commits were first.
    """
    totals = ExpirationTotals()
    while True:
        report = client.expire_snapshots(table, older_than_ms=older_than_ms, retain_last=retain_last, dry_run=dry_run)
        totals.snapshots += report["snapshots"]
        totals.refs += len(report["refs"])
        totals.content_files += report["content-files"]
        totals.manifests += report["manifests"]
        totals.other_files += report["other-files"]
        totals.size_bytes += report["size-in-bytes"]
        totals.files_failed += report["files-failed"]
        if dry_run:
            totals.snapshots += report["snapshots-left"]
        if dry_run or not report["snapshots-left"]:
            return totals


@dataclass
class OrphanTotals:
    """The totals of all requests.

    Attributes:
        listed: The files in the folders.
        locations: The first of the removed files.
        uploads: Unfinished multipart uploads that were aborted.
        files_unconfirmed: Files whose age only the clock says; they stay until the catalog has seen that time pass.
    """

    files: int = 0
    size_bytes: int = 0
    files_failed: int = 0
    listed: int = 0
    is_complete: bool = True
    locations: list[str] = field(default_factory=list)
    uploads: int = 0
    files_unconfirmed: int = 0


def remove_orphan_files(
    client: SeamarkClient, table: Name, *, older_than_ms: int | None = None, dry_run: bool = False
) -> OrphanTotals:
    """Remove all orphan files: files in the folders of the table that no snapshot names, and unfinished multipart
    uploads of such files.

    With `dry_run`, the totals are those of one request: `is_complete` is False if there are more.

    Raises:
        BadRequest: A property or an argument is invalid.
    """
    totals = OrphanTotals()
    while True:
        report = client.remove_orphan_files(table, older_than_ms=older_than_ms, dry_run=dry_run)
        totals.files += report["files"]
        totals.size_bytes += report["size-in-bytes"]
        totals.files_failed += report["files-failed"]
        totals.listed = report["listed"]
        totals.is_complete = not report["files-left"]
        totals.locations += report["locations"]
        totals.uploads += report.get("uploads", 0)  # an older server has none
        totals.files_unconfirmed = report.get("files-unconfirmed", 0)
        if dry_run or totals.is_complete or not report["files"]:
            return totals


def rewrite_manifests(
    client: SeamarkClient, table: Name, *, min_count: int | None = None, dry_run: bool = False
) -> dict[str, Any]:
    """Rewrite the manifests of a table.

    Args:
        client: A client of the server.
        table: The table.
        min_count: Number of manifests of one partition spec and content from which on they are rewritten; None: by the
            table's property.
        dry_run: Report the manifests that would be replaced, and commit nothing.

    Returns:
        The report, as docs/reference/openapi.json has it (rewriteManifests).

    Raises:
        NotFound: The table does not exist.
        BadRequest: The table has format version 1.
    """
    body = omit_none({"dry-run": dry_run, "min-count": min_count})
    return client._json("POST", f"{table_path(table)}/rewrite-manifests", {}, body, timeout_s=_MANIFESTS_TIMEOUT_S)
