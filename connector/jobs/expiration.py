"""Asks the server to expire the snapshots of a table: the server has the rights to delete files, and knows whose they
are."""

from __future__ import annotations

from dataclasses import dataclass

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name


@dataclass
class ExpirationTotals:
    """Of all requests. `size_bytes`: of data files, delete files and manifests that were deleted."""

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
    """Removes all expired snapshots. With `dry_run`, the files are those of the first request. BadRequest, Conflict."""
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
