"""A process that runs one kind of job on a table continuously, until a test kills it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time

from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.rewrite_lease import rewrite_lease
from seamark.connector.jobs.bucket_splitting import split_buckets
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files, rewrite_manifests
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.write.compaction import CompactionPolicy, compact

TARGET_BYTES = 3000


def run_jobs(kind: str, url: str, table: str, log: str, min_age_ms: int, yields: bool) -> None:
    """Run jobs until the process is killed. Append [kind, counts] of each job to the file `log`.

    Args:
        min_age_ms: The minimum age of snapshots that expire, in milliseconds.
        yields: If True, rewrites run one at a time, and omit files that writers will probably replace, as in the
        server.
    """
    client, rng = IndexClient(url), random.Random()
    log_descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    while True:
        counts: dict[str, int] = {}
        # A job that conflicts with a writer or another job is repeated, as in the server. On a busy machine, a job may
        # take longer than the time for which its snapshot is kept.
        with contextlib.suppress(ClientError, RuntimeError, FileNotFoundError):
            if kind in ("compaction", "clustering"):
                compacts = kind == "compaction"
                policy = CompactionPolicy(TARGET_BYTES, 2)
                with rewrite_lease(client, table, job=kind) if yields else contextlib.nullcontext():
                    report = (
                        compact(client, table, policy=policy, settled=yields)
                        if compacts
                        else cluster_incrementally(client, table, settled=yields)
                    )
                counts = {"commits": report.commits, "conflicts": report.conflicts, "rows_deleted": report.rows_deleted}
                counts |= {"bytes_read": report.bytes_read, "bytes_wasted": report.bytes_wasted, **report.wasted_by}
            elif kind == "expiration":
                limit_ms = time.time_ns() // 1_000_000 - min_age_ms
                totals = expire(client, table, older_than_ms=limit_ms, retain_last=rng.randint(1, 3))
                counts = {"snapshots": totals.snapshots, "files": totals.content_files}
            elif kind == "statistics":
                counts = {"files": compute_statistics(client, table).files}
            elif kind == "manifests":
                report = rewrite_manifests(client, table, min_count=2)
                counts = {"commits": report["snapshot-id"] is not None, "conflicts": report["conflicts"]}
            elif kind == "bucket-splitting":
                with rewrite_lease(client, table, job=kind) if yields else contextlib.nullcontext():
                    split_result = split_buckets(client, table, settled=yields)
                counts = {"commits": split_result.commits, "conflicts": split_result.conflicts}
                counts |= {
                    "bytes_read": split_result.bytes_read,
                    "bytes_wasted": split_result.bytes_wasted,
                    **split_result.wasted_by,
                }
            elif kind == "orphan-files":
                counts = {"orphans": remove_orphan_files(client, table).files}
            else:
                counts = {"builds": run_indexing(client, tuple(table.split("."))).get("builds", 0)}
        os.write(log_descriptor, json.dumps([kind, counts]).encode() + b"\n")  # A kill cannot split a single write.
        time.sleep(rng.uniform(0.05, 0.3))
