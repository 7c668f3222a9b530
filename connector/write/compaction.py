"""Compaction: merges small data files, and applies delete files, partition by partition.

Invariant: no row is added, lost or changed, and row ids and sequence numbers of rows stay. Each batch of files is a
commit of its own, so an interrupted compaction keeps what it has done. Writers never wait: rows that they delete
meanwhile are deleted in the new files. If they change too much of a batch, it is given up, and the next compaction
plans it again.

Small files are merged by tiers: a file is rewritten only together with smaller files that are as large together. A row
of a table that grows by small commits is therefore rewritten a logarithmic number of times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import BadRequest
from seamark.connector.client.names import Name
from seamark.connector.client.policies import effective_properties
from seamark.connector.client.values import At
from seamark.connector.read.lineage import NAMES, has_lineage
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan
from seamark.connector.write.replacements import RewriteReport, RewrittenFiles, is_rewritable, replace_batches
from seamark.connector.write.row_origins import OriginLog
from seamark.connector.write.table_writer import TableWriter, WrittenFiles
from seamark.connector.write.target import WriteTarget, target_of, with_lineage
from seamark.metaserver.iceberg.expressions.expression import TRUE
from seamark.metaserver.iceberg.metadata.compaction import DELETED, MIN_FILES, MIN_FILES_DEFAULT, SMALL, small_below
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    as_int,
    as_long,
)
from seamark.metaserver.iceberg.metadata.snapshot import MAIN

WORTH = 0.75
"""A batch without deletes is committed only if its new files are at most this part of its old ones, because the next
compaction would rewrite them again."""
DELETE_FILES = 5
"""A file to which this number of delete files applies is rewritten: readers open each of them."""
_EQUAL = 2
"""Two files are of one tier if the larger is at most this many times as large."""
BATCH_BYTES, BATCH_FILES = 1 << 30, 2000
"""Limits of the files that one commit replaces."""


DeleteKey = tuple[str, int | None]


@dataclass(frozen=True)
class CompactionPolicy:
    """`min_files`: the number of small files of a partition from which on they are merged."""

    target_bytes: int = TARGET_FILE_BYTES_DEFAULT
    min_files: int = MIN_FILES_DEFAULT
    small: float = SMALL

    @staticmethod
    def of(metadata: TableMetadata, inherited: Mapping[str, str]) -> CompactionPolicy:
        """By the table's properties, then by `inherited`. BadRequest for a value that is no number."""
        properties = {**inherited, **metadata.properties}
        return CompactionPolicy(
            max(1, as_long(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT)),
            max(2, as_int(properties, MIN_FILES, MIN_FILES_DEFAULT)),
            small_below(metadata),
        )


def compact(
    client: SeamarkClient,
    table: Name,
    *,
    policy: CompactionPolicy | None = None,
    dry_run: bool = False,
    branch: str = MAIN,
) -> RewriteReport:
    """Compacts a branch of a table, by default with the policy of its properties.

    `dry_run`: reports the files that would be replaced and commits nothing; the size of the new files is then an
    estimate. BadRequest for a table of version 1; Unreadable, Refused.
    """
    opened = open_table(client, table, At(ref=branch))
    if opened.metadata.format_version == 1:
        raise BadRequest("The table has format version 1, of which no files are replaced; upgrade it to version 2")
    if policy is None:
        policy = CompactionPolicy.of(opened.metadata, effective_properties(client, table))
    tasks = list(plan(client, opened))
    batches = _batches([task for task in tasks if is_rewritable(task)], policy)
    return replace_batches(
        client,
        opened,
        tasks,
        ((batch, partial(_rewrite, opened, batch)) for batch in batches),
        target_bytes=policy.target_bytes,
        dry_run=dry_run,
        branch=branch,
        summary={"compacted-by": "seamark"},
    )


def _batches(tasks: Sequence[ScanTask], policy: CompactionPolicy) -> Iterator[list[ScanTask]]:
    """The files to replace, in the order of the plan, a batch for each commit."""
    shared = count_deletes(tasks)
    batch: list[ScanTask] = []
    size_bytes = 0
    for members in group_by_partition(tasks):
        for task in _chosen(members, shared, policy):
            if batch and (size_bytes + task.size_bytes > BATCH_BYTES or len(batch) == BATCH_FILES):
                yield batch
                batch, size_bytes = [], 0
            batch.append(task)
            size_bytes += task.size_bytes
    if batch:
        yield batch


def group_by_partition(tasks: Iterable[ScanTask]) -> Iterable[list[ScanTask]]:
    """The files of each partition, in the order of the plan."""
    partitions: defaultdict[bytes, list[ScanTask]] = defaultdict(list)
    for task in tasks:
        partitions[msgspec.json.encode((task.spec_id, task.file.get("partition") or []))].append(task)
    return partitions.values()


def count_deletes(tasks: Iterable[ScanTask]) -> Counter[DeleteKey]:
    """To how many of the data files each delete applies."""
    return Counter(_delete_key(delete) for task in tasks for delete in task.deletes)


def _delete_key(delete: Mapping[str, Any]) -> DeleteKey:
    """A file of deletion vectors has one for each data file, at an offset."""
    return delete["file-path"], delete.get("content-offset")


def _chosen(members: Sequence[ScanTask], shared: Counter[DeleteKey], policy: CompactionPolicy) -> list[ScanTask]:
    """The files of a partition to replace: those with many deletes, and those that tiers merge."""
    chosen = {task.path for task in members if has_many_deletes(task, shared)}
    small = [
        task for task in members if task.size_bytes < policy.small * policy.target_bytes and task.path not in chosen
    ]
    for tier in _tiers(small):
        if len(tier) >= policy.min_files:
            chosen.update(task.path for task in tier)
    return [task for task in members if task.path in chosen]


def _tiers(small: Sequence[ScanTask]) -> Iterator[list[ScanTask]]:
    """Divides files by size: each is at most as large as all smaller files of its tier together."""
    tier: list[ScanTask] = []
    size_bytes = 0
    for task in sorted(small, key=lambda task: task.size_bytes):
        if tier and task.size_bytes > size_bytes * (1 if len(tier) > 1 else _EQUAL):
            yield tier
            tier, size_bytes = [], 0
        tier.append(task)
        size_bytes += task.size_bytes
    yield tier


def has_many_deletes(task: ScanTask, shared: Counter[DeleteKey]) -> bool:
    """By an estimate: the rows of a delete file are divided among the data files to which it applies."""
    deleted = sum(delete.get("record-count", 0) / shared[_delete_key(delete)] for delete in task.deletes)
    return len(task.deletes) >= DELETE_FILES or deleted >= DELETED * max(1, task.records)


def _rewrite(opened: OpenTable, batch: Sequence[ScanTask]) -> RewrittenFiles | None:
    """None if it is not worth a commit. Unreadable, Unwritable."""
    target, origins = target_of(opened.metadata, opened.storage), OriginLog()
    written = _write(opened, target, batch, origins)
    if len(written.files) > WORTH * len(batch) and not any(task.deletes for task in batch):
        written.discard(target.storage)
        return None
    return RewrittenFiles(opened, target, batch, written.limit_indexes(target.storage), origins)


def _write(opened: OpenTable, target: WriteTarget, batch: Sequence[ScanTask], origins: OriginLog) -> WrittenFiles:
    names = [field.name for field in opened.schema.fields]
    if has_lineage(opened.metadata):
        names, target = [*names, *NAMES], with_lineage(target)
    reader = TaskReader(plan_read(opened, names, TRUE, positions=True), opened.storage, threads=False)
    columns = list(range(len(names)))  # by position: a column of the table may have the name of the position column
    rows = first = 0
    with TableWriter(target, origins=origins) as writer:
        for task in batch:
            for rows_read in reader.read(task):
                rows += rows_read.num_rows
                writer.write(rows_read.select(columns), rows_read.column(len(names)).to_numpy() + first)
            first += task.records
        written = writer.close()
    if written.rows != rows:
        written.discard(target.storage)
        raise RuntimeError(f"{rows:,} rows were read and {written.rows:,} written; nothing is committed")
    return written
