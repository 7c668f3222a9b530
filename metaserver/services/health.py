"""Measures of a table, and its problems with their costs for queries and the jobs that correct them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from seamark.formats.iceberg.metadata.compaction import get_small_file_fraction
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import (
    PREVIOUS_VERSIONS_MAX,
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    parse_count,
)
from seamark.formats.iceberg.metadata.replacement import find_row_count_mismatch
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.index.definitions import read_definitions
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest
from seamark.formats.services.services import INDEXING
from seamark.metaserver.commit.expiration.policy import ExpirationPolicy, find_expired
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.services.budgets import WINDOW, compute_window_wait_s
from seamark.metaserver.services.launching.launchers import AUTO, explain_ignored_launcher
from seamark.metaserver.services.launching.launchers import PROPERTY as LAUNCHER
from seamark.metaserver.services.proposer import Problem, TableHealth, TableState
from seamark.metaserver.services.proposers import make_proposers
from seamark.metaserver.services.running import ServicesState
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Instant

_SNAPSHOTS_ALERT_COUNT = 100
"""With more snapshots than this, metadata files are noticeably large.

A snapshot takes about 1 KB, and each query of an engine reads the file.
"""
_LARGE_METADATA_BYTES = 4 << 20
"""A metadata file of at least this size is a problem, because each commit writes it again."""


class _Sizes(NamedTuple):
    """The numbers and sizes of a table's data files."""

    files: int
    records: int
    size_bytes: int
    small_files: int
    files_if_compacted: int


def measure_health(
    metadata: TableMetadata, view: TableView, settings: Settings, clock: Clock, now_ms: int
) -> TableHealth:
    """Measure a table, and find its problems, except problems of indexes.

    Args:
        metadata: The metadata of the table, with the policies of its namespaces.
        view: The view of the current snapshot. It is empty if the table has no snapshot.
        settings: The settings, which determine the services that run.
        clock: The clock of the table services.
        now_ms: The time that decides which snapshots and columns have expired.
    """
    target_bytes = max(1, parse_count(metadata.properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))
    sizes = _measure_files(view, target_bytes, get_small_file_fraction(metadata) * target_bytes)
    snapshot = metadata.current_snapshot
    totals = {} if snapshot is None else snapshot.build_summary_map()
    expired_snapshots, expiration_problem = 0, ""
    try:
        expired_snapshots = len(
            find_expired(metadata, ExpirationPolicy.from_metadata(metadata, now_ms), now_ms).snapshot_ids
        )
    except BadRequest as error:
        expiration_problem = error.message
    health = TableHealth(
        snapshot_id=metadata.current_snapshot_id,
        format_version=metadata.format_version,
        files=sizes.files,
        records=sizes.records,
        size_in_bytes=sizes.size_bytes,
        target_file_size_in_bytes=target_bytes,
        small_files=sizes.small_files,
        files_if_compacted=sizes.files_if_compacted,
        delete_files=view.delete_file_count,
        deleted_records=parse_count(totals, "total-position-deletes", 0)
        + parse_count(totals, "total-equality-deletes", 0),
        manifests=len(view.manifests) + len(view.delete_manifests),
        metadata_size_in_bytes=len(encode_table(metadata)),
        snapshots=len(metadata.snapshots),
        expired_snapshots=expired_snapshots,
        problems=(),
    )
    state = TableState(metadata, view, health, now_ms, expiration_problem)
    problems = (
        *_find_launcher_problems(metadata, settings),
        *chain.from_iterable(proposer.find_problems(state) for proposer in make_proposers(settings, clock)),
        *_find_snapshot_problems(health),
        *_find_metadata_problems(health, metadata),
        *_find_replacement_problems(metadata),
    )
    # The maintenance window delays the jobs that correct these problems. It does not apply to indexes, which are built
    # at any time; their problems are not in this list.
    after_s = compute_window_wait_s(metadata.properties.get(WINDOW, ""), now_ms)
    timed_problems = (
        msgspec.structs.replace(problem, after_s=after_s if problem.enabled else 0.0) for problem in problems
    )
    return msgspec.structs.replace(health, problems=tuple(timed_problems))


def find_service_problems(
    metadata: TableMetadata, health: TableHealth, state: ServicesState, failed_runs: Mapping[str, Instant]
) -> Iterator[Problem]:
    """Yield the problems that prevent table services from doing the work that the table requires.

    Args:
        metadata: The metadata of the table, with the policies of its namespaces.
        health: The problems that the services would correct.
        state: The state of the table services.
        failed_runs: The last run of each service that failed on the table, by service.
    """
    has_indexes = bool(read_definitions(metadata).enabled)
    has_work = has_indexes or any(problem.enabled for problem in health.problems)
    if state.problem is not None and state.enabled and has_work:
        yield Problem("table services are off", state.problem, "nothing is indexed, clustered, compacted or expired")
    for service, run in failed_runs.items():
        # After the failure, all indexes of the table were dropped.
        if service == INDEXING.name and not has_indexes:
            continue
        time_text = (
            datetime.fromtimestamp(run.requested_ms / 1000, UTC).isoformat(" ", "minutes").removesuffix("+00:00")
        )
        yield Problem(
            "failed job",
            f"the last run of {service}, at {time_text} UTC, failed: {run.summary['error']}",
            "its work is not done completely; the server tries again within an hour",
        )


def _measure_files(view: TableView, target_bytes: int, small_bytes_max: float) -> _Sizes:
    """Count the files of a table, its small files, and the files that would remain after compaction."""
    files = find_files_by_prefix(view)
    records, sizes = files.read_longs("record_count").clip(0), files.read_longs("file_size_in_bytes").clip(0)
    files_by_partition = group_by_partition(files)
    is_small = sizes < small_bytes_max
    small_bytes = np.zeros(len(files_by_partition.partitions), dtype=np.int64)
    np.add.at(small_bytes, files_by_partition.numbers[is_small], sizes[is_small])
    small_files = int(is_small.sum())
    merged_files = int((-(-small_bytes // target_bytes)).sum())  # The quotient of each partition is rounded up.
    return _Sizes(
        len(sizes),
        int(records.sum()),
        int(sizes.sum()),
        small_files,
        len(sizes) - small_files + merged_files,
    )


def _find_launcher_problems(metadata: TableMetadata, settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the launcher in the table's properties cannot be used."""
    launcher_name = metadata.properties.get(LAUNCHER, AUTO)
    reason = explain_ignored_launcher(launcher_name, settings.services_launchers)
    if reason is None:
        return
    yield Problem(
        "ignored property",
        f"{LAUNCHER} is {launcher_name[:100]!r}; {reason}",
        f"its jobs run as if it were {AUTO!r}: where a job runs depends on its size",
    )


def _find_snapshot_problems(health: TableHealth) -> Iterator[Problem]:
    """Yield a problem if the table retains many snapshots."""
    if not health.expired_snapshots and health.snapshots > _SNAPSHOTS_ALERT_COUNT:
        yield Problem(
            "many snapshots",
            f"{health.snapshots:,} snapshots are within the retention of the table",
            "each query of an engine loads their list; reduce history.expire.max-snapshot-age-ms",
        )


def _find_metadata_problems(health: TableHealth, metadata: TableMetadata) -> Iterator[Problem]:
    """Yield a problem if the metadata file is large."""
    if health.metadata_size_in_bytes < _LARGE_METADATA_BYTES:
        return
    yield Problem(
        "large metadata file",
        f"the metadata file has {health.metadata_size_in_bytes:,} bytes: {health.snapshots:,} snapshots, "
        f"{len(metadata.metadata_log):,} earlier metadata files, {len(metadata.schemas):,} schemas, "
        f"{len(metadata.statistics):,} statistics files",
        "each commit writes it, and each query of an engine reads it; expire snapshots, and reduce "
        f"{PREVIOUS_VERSIONS_MAX}",
    )


def _find_replacement_problems(metadata: TableMetadata) -> Iterator[Problem]:
    """Yield a problem if a snapshot with the operation `replace` changed the number of rows."""
    mismatches = {}
    for snapshot in metadata.snapshots:
        parent_id = snapshot.parent_snapshot_id
        parent = None if parent_id is None else metadata.snapshot(parent_id)
        if (reason := find_row_count_mismatch(snapshot, parent)) is not None:
            mismatches[snapshot.snapshot_id] = reason
    if not mismatches:
        return
    newest_id, reason = list(mismatches.items())[-1]
    yield Problem(
        "replacement with other rows",
        f"{len(mismatches):,} snapshots have the operation replace, but other rows than their parents; the summary of "
        f"the newest, {newest_id}, says that {reason}",
        "readers of changes may miss these rows; find out which program committed them",
    )
