"""The jobs by the name of their service."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.rewrite_lease import RewriteRunning, rewrite_lease
from seamark.connector.index.builds import InProcessWorkers
from seamark.connector.index.indexer import AuditLimits, Indexer
from seamark.connector.jobs.access_check import check_access
from seamark.connector.jobs.bucket_splitting import split_buckets
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.column_ttl import expire_columns
from seamark.connector.jobs.expiration import expire
from seamark.connector.jobs.manifests import rewrite_manifests
from seamark.connector.jobs.orphan_files import remove_orphan_files
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.write.compaction import compact
from seamark.connector.write.replacements import BatchRunner, RewriteReport, run_here
from seamark.formats.protocol.wire import ACCESS_CHECK, RECHECK_AFTER

Table = tuple[str, ...]
AUDIT_S_MAX = 600.0
ANOTHER_RUNS_S = 5.0
"""Time until a job runs again after it found another job at work."""


def run_indexing(client: IndexClient, table: Table) -> dict[str, Any]:
    """Builds, merges and audits the indexes of a table. The totals are empty if there was nothing to do. RuntimeError
    if something failed, or data files are left out; the rest is done."""
    audit = AuditLimits(size_bytes=1 << 62, seconds=AUDIT_S_MAX)
    indexer = Indexer(client, lambda: nullcontext(InProcessWorkers()), audit=audit)
    done = indexer.maintain(table)
    if done.failed:
        raise RuntimeError(f"{done.failed} of the table's index jobs failed; the log of the worker says why")
    if done.files_not_indexed:
        raise RuntimeError(f"{done.reason}. Queries read these files unless their column statistics exclude them")
    if done.left:  # that builder may have been killed
        raise RuntimeError(f"{done.left} of the table's index jobs wait for another builder of the same index")
    if not (done.builds or done.merges or done.verified):
        return {}
    return {name: count for name, count in dataclasses.asdict(done).items() if count}


def run_compaction(
    client: IndexClient, table: Table, *, wait_s: float = 0.0, runner: BatchRunner = run_here
) -> dict[str, Any]:
    """Compacts a table by its policy. RuntimeError if some files could not be read; the rest is done."""
    return _alone(client, table, "compaction", lambda: compact(client, table, settled=True, runner=runner), wait_s)


def _alone(
    client: IndexClient, table: Table, job: str, rewrite: Callable[[], RewriteReport], wait_s: float = 0.0
) -> dict[str, Any]:
    """Runs a rewrite of a table unless another job rewrites it for so long; then it is due again soon."""
    try:
        with rewrite_lease(client, table, job=job, wait_s=wait_s):
            report = rewrite()
    except RewriteRunning:
        return {RECHECK_AFTER: ANOTHER_RUNS_S}
    if report.errors:
        raise RuntimeError(f"{len(report.errors)} parts of the table are not rewritten, the first: {report.errors[0]}")
    return {name: count for name, count in dataclasses.asdict(report).items() if count}


def run_column_ttl(client: IndexClient, table: Table) -> dict[str, Any]:
    """Removes expired columns by the policy of a table. RuntimeError if some files could not be read; the rest is
    done."""
    return _alone(client, table, "column-ttl", lambda: expire_columns(client, table))


def run_clustering(
    client: IndexClient, table: Table, *, full: bool = False, wait_s: float = 0.0, runner: BatchRunner = run_here
) -> dict[str, Any]:
    """Clusters what is new in a table, by its policy. RuntimeError if some files could not be read; the rest is
    done."""
    return _alone(
        client,
        table,
        "clustering",
        lambda: cluster_incrementally(client, table, full=full, settled=not full, runner=runner),
        wait_s,
    )


def run_expiration(client: IndexClient, table: Table) -> dict[str, Any]:
    """Expires the snapshots of a table by its policy."""
    return {name: count for name, count in dataclasses.asdict(expire(client, table)).items() if count}


def run_orphan_files(client: IndexClient, table: Table) -> dict[str, Any]:
    """Removes the orphan files of a table by its policy. RuntimeError if the storage did not delete some."""
    totals = remove_orphan_files(client, table)
    if totals.files_failed:
        raise RuntimeError(f"the storage did not delete {totals.files_failed} files; the log of the server says why")
    return {"files": totals.files, "size_bytes": totals.size_bytes} if totals.files else {}


def run_statistics(client: IndexClient, table: Table) -> dict[str, Any]:
    """Computes the statistics of a table, if its policy says that they are stale."""
    report = dataclasses.asdict(compute_statistics(client, table, if_stale=True))
    return report if report.pop("snapshot_id") is not None else {}


def run_manifests(client: IndexClient, table: Table) -> dict[str, Any]:
    """Rewrites the manifests of a table by its policy."""
    report = rewrite_manifests(client, table)
    if report["snapshot-id"] is None:
        return {"conflicts": report["conflicts"]} if report["conflicts"] else {}
    return {name.replace("-", "_"): value for name, value in report.items() if name != "snapshot-id"}


def run_bucket_splitting(client: IndexClient, table: Table) -> dict[str, Any]:
    """Splits the files of earlier bucket counts. RuntimeError if some could not be read; the rest is done."""
    return _alone(client, table, "bucket-splitting", lambda: split_buckets(client, table, settled=True))


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    ACCESS_CHECK: check_access,
    "bucket-splitting": run_bucket_splitting,
    "clustering": run_clustering,
    "column-ttl": run_column_ttl,
    "compaction": run_compaction,
    "expiration": run_expiration,
    "indexing": run_indexing,
    "manifests": run_manifests,
    "orphan-files": run_orphan_files,
    "statistics": run_statistics,
}
