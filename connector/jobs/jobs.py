"""Defines the jobs of the table services. A job reads and commits like any client.

A job is registered with the declaration of its service (`formats/services/services.py`). It receives a client and a
table, and returns its totals, which are empty if there was nothing to do. A job that raises an error is repeated later.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name
from seamark.connector.client.rewrite_lease import RewriteRunning, rewrite_lease
from seamark.connector.index.builds import InProcessWorkers
from seamark.connector.index.indexer import AuditLimits, Indexer
from seamark.connector.jobs.access_check import check_access
from seamark.connector.jobs.auto_advice import take_next_step
from seamark.connector.jobs.bucket_splitting import split_buckets
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.column_ttl import expire_columns
from seamark.connector.jobs.failures import FilesNotIndexed, JobIncomplete
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files, rewrite_manifests
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.write.compaction import compact
from seamark.connector.write.replacements import BatchRunner, RewriteReport, run_here
from seamark.formats.protocol.wire import ACCESS_CHECK, RECHECK_AFTER
from seamark.formats.services.service import TableService
from seamark.formats.services.services import (
    AUTO_ADVICE,
    BUCKET_SPLITTING,
    CLUSTERING,
    COLUMN_TTL,
    COMPACTION,
    EXPIRATION,
    INDEXING,
    MANIFESTS,
    ORPHAN_FILES,
    STATISTICS,
)

Table = tuple[str, ...]
RunJob = Callable[..., dict[str, Any]]
AUDIT_S_MAX = 600.0
"""The maximum time in seconds of the audits of one job."""
_UNLIMITED_BYTES = 1 << 62
RETRY_BUSY_TABLE_S = 5.0
"""The time in seconds after which a job runs again if a different job has the table or one of its indexes."""
_BUILDER_POLL_S = 1.0

JOBS: dict[str, RunJob] = {ACCESS_CHECK: check_access}
"""The jobs by the name of their service. The access check is a job without a service."""


def table_job(service: TableService) -> Callable[[RunJob], RunJob]:
    """Register the decorated function as the job of a service that rewrites no data files."""
    assert not service.rewrites_files, f"{service.name} rewrites data files; use rewriting_job"

    def register(job: RunJob) -> RunJob:
        JOBS[service.name] = job
        return job

    return register


def rewriting_job(service: TableService) -> Callable[[Callable[..., RewriteReport]], RunJob]:
    """Register the decorated function as the job of a service that rewrites data files.

    The registered job takes the rewrite lease of the table. If a different job still has the lease after `wait_s`
    seconds, the job does nothing and runs again soon. If some files cannot be read, the job rewrites the remaining
    files and then raises JobIncomplete.
    """
    assert service.rewrites_files, f"{service.name} rewrites no data files; use table_job"

    def register(rewrite: Callable[..., RewriteReport]) -> RunJob:
        @wraps(rewrite)
        def run(client: IndexClient, table: Table, *, wait_s: float = 0.0, **arguments: Any) -> dict[str, Any]:
            try:
                with rewrite_lease(client, table, job=service.name, wait_s=wait_s):
                    report = rewrite(client, table, **arguments)
            except RewriteRunning:
                return {RECHECK_AFTER: RETRY_BUSY_TABLE_S}
            if report.errors:
                raise JobIncomplete(
                    f"{len(report.errors)} parts of the table were not rewritten; the first error: {report.errors[0]}"
                )
            return {name: count for name, count in dataclasses.asdict(report).items() if count}

        JOBS[service.name] = run
        return run

    return register


@table_job(INDEXING)
def run_indexing(client: IndexClient, table: Table) -> dict[str, Any]:
    """Build, merge and audit the indexes of a table.

    If a different builder has one of the indexes, the job runs again soon, because that builder may have been killed.

    Raises:
        JobIncomplete: A part of the work failed. The remaining work was done.
        FilesNotIndexed: Data files were left out.
    """
    audit = AuditLimits(size_bytes=_UNLIMITED_BYTES, seconds=AUDIT_S_MAX)
    indexer = Indexer(client, lambda: nullcontext(InProcessWorkers()), audit_limits=audit)
    counts = indexer.maintain(table)
    if counts.failed:
        raise JobIncomplete(f"{counts.failed} of the table's index jobs failed; the log of the worker has the reasons")
    if counts.files_not_indexed:
        raise FilesNotIndexed(f"{counts.reason}. Queries read these files unless their column statistics exclude them")
    recheck_fields = {RECHECK_AFTER: RETRY_BUSY_TABLE_S} if counts.left else {}
    if not (counts.builds or counts.merges or counts.verified):
        return dict[str, Any](recheck_fields)
    return {name: count for name, count in dataclasses.asdict(counts).items() if count} | recheck_fields


def build_all_indexes(client: IndexClient, table: Table, *, wait_s: float) -> None:
    """Build the indexes of a table, and wait while a different builder has one of them.

    Raises:
        RewriteRunning: A different builder still has an index after `wait_s` seconds.
        JobIncomplete: A part of the work failed.
        FilesNotIndexed: Data files were left out.
    """
    until_s = time.monotonic() + wait_s
    while RECHECK_AFTER in run_indexing(client, table):
        if time.monotonic() >= until_s:
            raise RewriteRunning(f"A different builder has an index of {join_name(table)}; try again later")
        time.sleep(_BUILDER_POLL_S)


@rewriting_job(COMPACTION)
def run_compaction(client: IndexClient, table: Table, *, runner: BatchRunner = run_here) -> RewriteReport:
    """Compact a table by its policy. Files that writers will probably replace soon are left out (`settled`)."""
    return compact(client, table, settled=True, runner=runner)


@rewriting_job(COLUMN_TTL)
def run_column_ttl(client: IndexClient, table: Table) -> RewriteReport:
    """Remove columns from the files of old partitions, as the table's policy requires."""
    return expire_columns(client, table)


@rewriting_job(CLUSTERING)
def run_clustering(
    client: IndexClient, table: Table, *, full: bool = False, runner: BatchRunner = run_here
) -> RewriteReport:
    """Cluster the new rows of a table by its policy.

    Args:
        full: Whether to also cluster files that were clustered by different columns.
    """
    # A full run also takes files that writers will probably replace soon (`settled` leaves them out).
    return cluster_incrementally(client, table, full=full, settled=not full, runner=runner)


@table_job(EXPIRATION)
def run_expiration(client: IndexClient, table: Table) -> dict[str, Any]:
    """Expire the snapshots of a table by its policy."""
    return {name: count for name, count in dataclasses.asdict(expire(client, table)).items() if count}


@table_job(ORPHAN_FILES)
def run_orphan_files(client: IndexClient, table: Table) -> dict[str, Any]:
    """Remove the orphan files of a table by its policy.

    Raises:
        JobIncomplete: The storage did not delete some files.
    """
    totals = remove_orphan_files(client, table)
    if totals.files_failed:
        raise JobIncomplete(
            f"the storage did not delete {totals.files_failed} files; the log of the server has the reasons"
        )
    return {"files": totals.files, "size_bytes": totals.size_bytes} if totals.files else {}


@table_job(STATISTICS)
def run_statistics(client: IndexClient, table: Table) -> dict[str, Any]:
    """Compute the statistics of a table if they are stale by its policy."""
    report = dataclasses.asdict(compute_statistics(client, table, if_stale=True))
    return report if report.pop("snapshot_id") is not None else {}


@table_job(MANIFESTS)
def run_manifest_rewrite(client: IndexClient, table: Table) -> dict[str, Any]:
    """Rewrite the manifests of a table by its policy."""
    report = rewrite_manifests(client, table)
    if report["snapshot-id"] is None:
        return {"conflicts": report["conflicts"]} if report["conflicts"] else {}
    return {name.replace("-", "_"): value for name, value in report.items() if name != "snapshot-id"}


@rewriting_job(BUCKET_SPLITTING)
def run_bucket_splitting(client: IndexClient, table: Table) -> RewriteReport:
    """Split the data files that were written with an earlier bucket count of the table.

    Files that writers will probably replace soon are left out (`settled`).
    """
    return split_buckets(client, table, settled=True)


@table_job(AUTO_ADVICE)
def run_auto_advice(client: IndexClient, table: Table) -> dict[str, Any]:
    """Take the next step of the policy `auto`: apply a proposal, or judge the applied changes."""
    return take_next_step(client, table, build_indexes=lambda: build_all_indexes(client, table, wait_s=0.0))
