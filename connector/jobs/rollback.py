"""Undoes the commit of a job: a compaction, a clustering, a split of buckets, or a rewrite of manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.names import Name
from seamark.connector.jobs.bucket_splitting import SPLIT_BY
from seamark.formats.iceberg.metadata.clustering import CLUSTERED_BY
from seamark.formats.iceberg.metadata.compaction import COMPACTED_BY, REPLACEMENTS_UNDONE, UNDONE
from seamark.formats.iceberg.metadata.manifest_policy import REWRITTEN_BY_MARK
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.metadata.table_json import decode_table


@dataclass(frozen=True)
class RolledBack:
    """The result of a rollback.

    Attributes:
        undone_id: The id of the undone snapshot.
        snapshot_id: The id of the new snapshot.
        files_restored: The number of restored files, which is 0 after the rollback of a rewrite of manifests.
        files_removed: The number of removed files, which is 0 after the rollback of a rewrite of manifests.
    """

    undone_id: int
    snapshot_id: int
    files_restored: int
    files_removed: int


def undo_job(client: SeamarkClient, table: Name, snapshot_id: int | None = None, *, branch: str = MAIN) -> RolledBack:
    """Restore the files that the commit of a job has replaced, and keep later commits of writers.

    Args:
        client: A client of the server.
        table: The table.
        snapshot_id: The snapshot of the job. None means the newest snapshot of a job that has not been undone.
        branch: The branch of the snapshot.

    Raises:
        InvalidRequest: There is no such job, or it cannot be undone.
        Conflict: Later commits changed the files of the job.
    """
    if snapshot_id is None:
        snapshot_id = _find_newest_id(client, table, branch)
    body: dict[str, Any] = {"branch": branch, "undo-snapshot-id": snapshot_id}
    answer = CommitClient(client).commit(table, body)
    summary = answer["summary"]

    def sum_counts(kind: str, *names: str) -> int:
        return sum(int(summary.get(f"{kind}-{name}", 0)) for name in names)

    restored_files = sum_counts("added", "data-files", "delete-files")
    removed_files = sum_counts("deleted", "data-files") + sum_counts("removed", "delete-files")
    return RolledBack(snapshot_id, int(answer["snapshot-id"]), restored_files, removed_files)


def _find_newest_id(client: SeamarkClient, table: Name, branch: str) -> int:
    """Return the id of the newest snapshot of a rewriting job that is not undone.

    The search follows the parents from the newest snapshot of the branch. If the branch does not exist, it begins at
    the current snapshot. The summary of a snapshot that undid a job has the id of the undone snapshot, so undone jobs
    are known before they are reached.

    Raises:
        InvalidRequest: The branch has no such snapshot.
        Corrupt: The table metadata are invalid.
    """
    metadata = decode_table(client.load_table(table, history=True).metadata, str(table))
    ref = metadata.refs.get(branch)
    snapshot = metadata.current_snapshot if ref is None else metadata.snapshot(ref.snapshot_id)
    undone: set[str] = set()
    while snapshot is not None:
        summary = snapshot.build_summary_map()
        undone.update(filter(None, summary.get(REPLACEMENTS_UNDONE, "").split(",")))
        if UNDONE in summary:
            undone.add(summary[UNDONE])
        elif _is_job_summary(summary) and str(snapshot.snapshot_id) not in undone:
            return snapshot.snapshot_id
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else metadata.snapshot(parent)
    raise InvalidRequest(
        "The branch has no snapshot of a compaction, a clustering, a split of buckets or a rewrite of manifests that "
        "is not undone"
    )


def _is_job_summary(summary: Mapping[str, str]) -> bool:
    name, value = REWRITTEN_BY_MARK
    return not {COMPACTED_BY, CLUSTERED_BY, SPLIT_BY}.isdisjoint(summary) or summary.get(name) == value
