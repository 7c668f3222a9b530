"""The jobs by the name of their service."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers
from seamark.connector.index.indexer import AuditLimits, Indexer
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.expiration import expire
from seamark.connector.jobs.orphan_files import remove_orphan_files
from seamark.connector.write.compaction import compact
from seamark.connector.write.replacements import RewriteReport

Table = tuple[str, ...]
AUDIT_S_MAX = 600.0


def run_indexing(client: IndexClient, table: Table) -> dict[str, Any]:
    """Builds, merges and audits the indexes of a table. The totals are empty if there was nothing to do. RuntimeError
    if something failed; the rest is done."""
    audit = AuditLimits(size_bytes=1 << 62, seconds=AUDIT_S_MAX)
    indexer = Indexer(client, lambda: nullcontext(InProcessWorkers()), audit=audit)
    done = indexer.maintain(table)
    if done.failed:
        raise RuntimeError(f"{done.failed} of the table's index jobs failed; the log of the worker says why")
    if done.left:  # that builder may have been killed
        raise RuntimeError(f"{done.left} of the table's index jobs wait for another builder of the same index")
    if not (done.builds or done.merges or done.verified):
        return {}
    return {name: count for name, count in dataclasses.asdict(done).items() if count}


def run_compaction(client: IndexClient, table: Table) -> dict[str, Any]:
    """Compacts a table by its policy. RuntimeError if some files could not be read; the rest is done."""
    return _totals_of(compact(client, table))


def _totals_of(report: RewriteReport) -> dict[str, Any]:
    if report.errors:
        raise RuntimeError(f"{len(report.errors)} parts of the table are not rewritten, the first: {report.errors[0]}")
    return {name: count for name, count in dataclasses.asdict(report).items() if count}


def run_clustering(client: IndexClient, table: Table) -> dict[str, Any]:
    """Clusters what is new in a table, by its policy. RuntimeError if some files could not be read; the rest is
    done."""
    return _totals_of(cluster_incrementally(client, table))


def run_expiration(client: IndexClient, table: Table) -> dict[str, Any]:
    """Expires the snapshots of a table by its policy."""
    return {name: count for name, count in dataclasses.asdict(expire(client, table)).items() if count}


def run_orphan_files(client: IndexClient, table: Table) -> dict[str, Any]:
    """Removes the orphan files of a table by its policy. RuntimeError if the storage did not delete some."""
    totals = remove_orphan_files(client, table)
    if totals.files_failed:
        raise RuntimeError(f"the storage did not delete {totals.files_failed} files; the log of the server says why")
    return {"files": totals.files, "size_bytes": totals.size_bytes} if totals.files else {}


JOBS: dict[str, Callable[[IndexClient, Table], dict[str, Any]]] = {
    "clustering": run_clustering,
    "compaction": run_compaction,
    "expiration": run_expiration,
    "indexing": run_indexing,
    "orphan-files": run_orphan_files,
}
