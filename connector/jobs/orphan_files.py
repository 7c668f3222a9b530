"""Asks the server to remove the orphan files of a table: files in its folders that no snapshot names, and unfinished
multipart uploads of such files."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name


@dataclass
class OrphanTotals:
    """Of all requests. `listed`: the files in the folders. `locations`: the first of the removed files. `uploads`:
    unfinished multipart uploads that were aborted. `files_unconfirmed`: files whose age only the clock says; they stay
    until the catalog has seen that time pass."""

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
    """Removes all orphan files. With `dry_run`, those that one request finds: `is_complete` is False if there are more.
    BadRequest."""
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
