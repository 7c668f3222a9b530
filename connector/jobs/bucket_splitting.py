"""Splits data files of earlier bucket counts: after a resize, it writes their rows to files of the current buckets.

Invariant: the job adds, loses and changes no row (`write/replacements.py`). Each batch of files is a separate
commit, so an interrupted split keeps the batches that it has committed. Writers never wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name
from seamark.connector.client.policies import read_effective_properties
from seamark.connector.read.settled_files import now_ms, select_settled_tasks
from seamark.connector.read.tables import ScanTask, plan
from seamark.connector.write.compaction import CompactionPolicy, divide_tasks, group_by_partition, rewrite_batch
from seamark.connector.write.replacements import (
    RewriteReport,
    announce_batches,
    open_rewritable,
    replace_batches,
    select_rewritable,
)
from seamark.formats.iceberg.metadata.bucket_counts import list_coarser_specs
from seamark.formats.iceberg.metadata.snapshot import MAIN

SPLIT_BY = "split-by"
"""A key in the summary of the commits that split buckets."""
BATCH_BYTES, BATCH_FILES = 512 << 20, 500
"""The maximum total size and number of the files that a commit replaces."""


def split_buckets(
    client: SeamarkClient, table: Name, *, dry_run: bool = False, settled: bool = False, branch: str = MAIN
) -> RewriteReport:
    """Split all files of partition specs with fewer buckets.

    Args:
        client: A client of the server.
        table: The table.
        dry_run: Whether to report the files that would be replaced, and commit nothing.
        settled: Whether to leave out files that writers will probably replace soon.
        branch: The branch whose files are split.

    Raises:
        InvalidRequest: The table has format version 1.
        Unreadable: A file cannot be read.
        Refused: The server refuses a commit.
    """
    source_table = open_rewritable(client, table, branch, history=settled)
    coarse_spec_ids = list_coarser_specs(source_table.metadata)
    began_ms = now_ms()
    tasks = list(plan(client, source_table, sequence_numbers=settled)) if coarse_spec_ids else []
    coarse_tasks: Sequence[ScanTask] = [task for task in select_rewritable(tasks) if task.spec_id in coarse_spec_ids]
    recheck_after_s = 0.0
    if settled:
        coarse_tasks, recheck_after_s = select_settled_tasks(
            source_table, coarse_tasks, choose_rewritten=lambda tasks: tasks, planned_ms=now_ms() - began_ms
        )
    # The files are split partition by partition, so that each commit writes to few of the new buckets.
    ordered_tasks = (task for members in group_by_partition(coarse_tasks) for task in members)
    batches = divide_tasks(ordered_tasks, BATCH_BYTES, BATCH_FILES)
    policy = CompactionPolicy.from_metadata(source_table.metadata, read_effective_properties(client, table))
    return replace_batches(
        client,
        source_table,
        tasks,
        announce_batches((batch, partial(rewrite_batch, source_table, batch)) for batch in batches),
        target_bytes=policy.target_bytes,
        dry_run=dry_run,
        branch=branch,
        recheck_after_s=recheck_after_s,
        summary={SPLIT_BY: "seamark"},
    )
