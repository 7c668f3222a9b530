"""Requests the jobs that run in the server: expiring snapshots, removing orphan files, and rewriting manifests.

They run in the server because it writes all manifests and manifest lists, has the right to delete files, and knows
which tables need the files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name, make_table_path
from seamark.connector.client.values import omit_none

_MANIFESTS_TIMEOUT_S = 1800.0


@dataclass
class ExpirationTotals:
    """The totals of all requests of an expiration of snapshots.

    Attributes:
        size_bytes: The size of the data files, delete files and manifests that were deleted.
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
    """Remove all expired snapshots.

    Args:
        client: A client of the server.
        table: The table.
        older_than_ms: The time, in milliseconds since the epoch, before which snapshots expire. None means the policy
            of the table.
        retain_last: The minimum number of snapshots that each branch keeps. None means the policy of the table.
        dry_run: Whether to report the files that the first request would delete, and delete nothing.

    Raises:
        InvalidRequest: A property or an argument is invalid.
        Conflict: Concurrent commits conflicted in every attempt.
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
        # One request handles a part of the snapshots. A dry run cannot continue, so it adds the remaining number.
        if dry_run:
            totals.snapshots += report["snapshots-left"]
        if dry_run or not report["snapshots-left"]:
            return totals


@dataclass
class OrphanTotals:
    """The totals of all requests of a removal of orphan files.

    Attributes:
        listed: The number of files in the folders.
        locations: The locations of the first removed files.
        uploads: The number of unfinished multipart uploads that were aborted.
        files_unconfirmed: The number of files that are old according to the clock, but not according to the time that
            the catalog has seen pass. They are not removed yet.
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
    """Remove all orphan files of a table: files in its folders to which no snapshot refers.

    Unfinished multipart uploads to these folders are aborted. The requests end when no orphan files remain, or when a
    request removes none.

    Args:
        client: A client of the server.
        table: The table.
        older_than_ms: The time, in milliseconds since the epoch. Only files that were last modified before it are
            removed. None means the policy of the table.
        dry_run: Whether to report the totals of one request, and remove nothing. `is_complete` is False if there are
            more orphan files.

    Raises:
        InvalidRequest: A property or an argument is invalid.
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
        totals.uploads += report.get("uploads", 0)  # Older servers do not send this field.
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
        min_count: The minimum number of manifests of one partition spec and content for which they are rewritten. None
            means the value of the table's property.
        dry_run: Whether to report the manifests that would be replaced, and commit nothing.

    Returns:
        The report, whose form docs/reference/openapi.json defines (rewriteManifests).

    Raises:
        NoSuchResource: The table does not exist.
        InvalidRequest: The table has format version 1.
    """
    body = omit_none({"dry-run": dry_run, "min-count": min_count})
    return client._request_json(
        "POST", f"{make_table_path(table)}/rewrite-manifests", {}, body, timeout_s=_MANIFESTS_TIMEOUT_S
    )
