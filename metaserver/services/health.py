"""What is wrong with a table, what that costs its queries, and what is done about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
import numpy as np

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.expressions.residuals import Residuals
from seamark.formats.iceberg.metadata.bucket_counts import coarser_specs
from seamark.formats.iceberg.metadata.clustering import ClusteringLayout, layer_of
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS as TTL_COLUMNS
from seamark.formats.iceberg.metadata.column_ttl import TtlPolicy, TtlRule
from seamark.formats.iceberg.metadata.compaction import DELETED, MIN_FILES, MIN_FILES_DEFAULT, small_below
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import (
    PREVIOUS_VERSIONS_MAX,
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    as_bool,
    count_of,
)
from seamark.formats.iceberg.metadata.replacement import difference
from seamark.formats.iceberg.metadata.service_switches import (
    BUCKET_SPLITTING_ENABLED,
    COLUMN_TTL_ENABLED,
    COMPACTION_ENABLED,
    EXPIRATION_ENABLED,
    MANIFESTS_ENABLED,
    STATISTICS_ENABLED,
)
from seamark.formats.iceberg.metadata.statistics import StatisticsPolicy, known_statistics
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.commit.expiration.policy import ExpirationPolicy, find_expired
from seamark.metaserver.planner.lookup.lookup import RequestedColumn, lookup
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.services.budgets import WINDOW, wait_s
from seamark.metaserver.services.launching.launchers import AUTO, why_ignored
from seamark.metaserver.services.launching.launchers import PROPERTY as LAUNCHER
from seamark.metaserver.services.proposals import Indexing, is_clustered
from seamark.metaserver.services.running import ServicesState
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Instant

_MANY_SNAPSHOTS = 100
"""Snapshots from which on metadata files are noticeably large: about 1 KB each, read by each query of an engine."""
_FILES_A_MANIFEST = 100
"""Fewer data files a manifest mean that engines that plan by themselves open many manifests."""
_MANY_MANIFESTS = 20
_LARGE_METADATA_BYTES = 4 << 20


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """`service`: the table service that corrects it. `enabled`: whether the server runs that for this table; None
    without a service. `after_s`: seconds until the table's window begins, for a service that waits for it."""

    problem: str
    detail: str
    cost: str
    service: str | None = None
    enabled: bool | None = None
    after_s: float = 0.0


class TableHealth(msgspec.Struct, frozen=True, rename="kebab"):
    """Of the current snapshot. Sizes in bytes. `deleted_records`: by the totals of the snapshot; a row that two delete
    files name counts twice."""

    snapshot_id: int | None
    format_version: int
    files: int
    records: int
    size_in_bytes: int
    target_file_size_in_bytes: int
    small_files: int
    files_if_compacted: int
    delete_files: int
    deleted_records: int
    manifests: int
    metadata_size_in_bytes: int
    snapshots: int
    expired_snapshots: int
    problems: tuple[Problem, ...]


class _Sizes(NamedTuple):
    files: int
    records: int
    size_bytes: int
    small_files: int
    files_if_compacted: int


def health_of(metadata: TableMetadata, view: TableView, settings: Settings, now_ms: int) -> TableHealth:
    """`view`: that of the current snapshot; empty without one."""
    target_bytes = max(1, count_of(metadata.properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))
    sizes = _sizes(view, target_bytes, small_below(metadata) * target_bytes)
    snapshot = metadata.current_snapshot
    totals = {} if snapshot is None else snapshot.summary_map()
    problems: list[Problem] = []
    expired_snapshots = 0
    try:
        expired_snapshots = len(find_expired(metadata, ExpirationPolicy.of(metadata, now_ms), now_ms).snapshot_ids)
    except BadRequest as error:
        problems.append(Problem("invalid property", error.message, "no snapshot expires"))
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
        deleted_records=count_of(totals, "total-position-deletes", 0) + count_of(totals, "total-equality-deletes", 0),
        manifests=len(view.manifests) + len(view.delete_manifests),
        metadata_size_in_bytes=len(encode_table(metadata)),
        snapshots=len(metadata.snapshots),
        expired_snapshots=expired_snapshots,
        problems=(),
    )
    found = (
        *problems,
        *_launcher_problems(metadata, settings),
        *_layout_problems(view, metadata, settings),
        *_problems(health, metadata, settings),
        *_bucket_problems(view, metadata, settings),
        *_ttl_problems(view, metadata, settings, now_ms),
        *_statistics_problems(metadata, settings),
        *_metadata_problems(health, metadata),
        *_replacement_problems(metadata),
    )
    # Indexes, which are built at any time, are no problems here.
    after_s = wait_s(metadata.properties.get(WINDOW, ""), now_ms)
    timed = (msgspec.structs.replace(problem, after_s=after_s if problem.enabled else 0.0) for problem in found)
    return msgspec.structs.replace(health, problems=tuple(timed))


def problems_of_services(
    metadata: TableMetadata, health: TableHealth, state: ServicesState, failed: Mapping[str, Instant]
) -> Iterator[Problem]:
    """Yield why table services do not do what the table's policy and indexes ask for.

    Args:
        metadata: Of the table, with the policies of its namespaces.
        health: What the services would correct.
        state: Whether a server runs table services.
        failed: The last runs of services on the table that failed, by service.
    """
    has_indexes = bool(read_definitions(metadata).enabled)
    waits = has_indexes or any(problem.enabled for problem in health.problems)
    if state.problem is not None and state.enabled and waits:
        yield Problem("table services are off", state.problem, "nothing is indexed, clustered, compacted or expired")
    for service, run in failed.items():
        if service == Indexing.name and not has_indexes:  # the index that failed is gone
            continue
        when = datetime.fromtimestamp(run.requested_ms / 1000, UTC).isoformat(" ", "minutes").removesuffix("+00:00")
        yield Problem(
            "failed job",
            f"the last run of {service}, at {when} UTC, failed: {run.summary['error']}",
            "its work is not done, or not all of it; the server tries again, at the latest after an hour",
        )


def _sizes(view: TableView, target_bytes: int, small_bytes_max: float) -> _Sizes:
    files = lookup(view)
    records, bytes_of = files.longs("record_count").clip(0), files.longs("file_size_in_bytes").clip(0)
    grouped = group_by_partition(files)
    small = bytes_of < small_bytes_max
    small_bytes = np.zeros(len(grouped.partitions), dtype=np.int64)
    np.add.at(small_bytes, grouped.numbers[small], bytes_of[small])
    small_files = int(small.sum())
    merged = int((-(-small_bytes // target_bytes)).sum())
    return _Sizes(
        len(bytes_of),
        int(records.sum()),
        int(bytes_of.sum()),
        small_files,
        len(bytes_of) - small_files + merged,
    )


def _launcher_problems(metadata: TableMetadata, settings: Settings) -> Iterator[Problem]:
    chosen = metadata.properties.get(LAUNCHER, AUTO)
    why = why_ignored(chosen, settings.services_launchers)
    if why is None:
        return
    yield Problem(
        "ignored property",
        f"{LAUNCHER} is {chosen[:100]!r}; {why}",
        f"its jobs run as with {AUTO!r}, by their size",
    )


def _layout_problems(view: TableView, metadata: TableMetadata, settings: Settings) -> Iterator[Problem]:
    try:
        layout = ClusteringLayout.of(metadata.properties)
    except BadRequest as error:
        yield Problem("invalid property", error.message, "no files are clustered")
        return
    if layout is None:
        return
    layers = Counter(layer_of((path or b"").decode()) for path in lookup(view).texts("file_path").values())
    files, loose = layers.total(), layers.pop(None, 0)
    if loose < max(2, count_of(metadata.properties, MIN_FILES, MIN_FILES_DEFAULT)):
        return
    yield Problem(
        "unclustered files",
        f"{loose:,} of {files:,} data files are not clustered by {layout.text}; the others form {len(layers):,} layers",
        "a query that filters on these columns opens all of them, and some files of each layer",
        "clustering",
        settings.services_workers > 0
        and metadata.format_version > 1
        and is_clustered(metadata.properties, settings.services_clustering),
    )


def _bucket_problems(view: TableView, metadata: TableMetadata, settings: Settings) -> Iterator[Problem]:
    coarse = coarser_specs(metadata)
    specs = lookup(view).by_segment([segment.block.spec_id for segment in lookup(view).segments])
    shared = int(np.isin(specs, list(coarse)).sum()) if coarse else 0
    if not shared:
        return
    yield Problem(
        "shared files",
        f"{shared:,} of {len(specs):,} data files were written before the number of buckets grew",
        "each belongs to several buckets: engines shuffle joins by the key, and an equality reads all of the file",
        "bucket-splitting",
        settings.services_workers > 0
        and metadata.format_version > 1
        and as_bool(metadata.properties, BUCKET_SPLITTING_ENABLED, settings.services_bucket_splitting),
    )


def _ttl_problems(view: TableView, metadata: TableMetadata, settings: Settings, now_ms: int) -> Iterator[Problem]:
    try:
        policy = TtlPolicy.of(metadata.properties)
        rules = [] if policy is None else policy.rules(metadata, now_ms)
        found = [_expired_files(view, metadata, rule) for rule in rules]
    except BadRequest as error:
        yield Problem("invalid property", error.message, "no column expires")
        return
    files, size_bytes = np.zeros(0, dtype=np.int64), 0
    for left, rule_bytes in found:
        files, size_bytes = np.union1d(files, left), max(size_bytes, rule_bytes)
    if not len(files):
        return
    yield Problem(
        "expired columns",
        f"{len(files):,} data files of old partitions have values of columns that have expired",
        f"their columns take at least {size_bytes:,} bytes of storage",
        "column-ttl",
        settings.services_workers > 0
        and metadata.format_version > 1
        and as_bool(metadata.properties, COLUMN_TTL_ENABLED, settings.services_column_ttl),
    )


def _expired_files(view: TableView, metadata: TableMetadata, rule: TtlRule) -> tuple[Longs, int]:
    """The files in expired partitions that have values of the rule's columns, and the bytes of these columns, by the
    metrics of manifests; columns without metrics do not count. BadRequest."""
    files, schema = lookup(view), metadata.current_schema
    expression = bind(parse_expression(rule.where), schema, (), case_sensitive=True)
    grouped = group_by_partition(files)
    residuals: dict[int, Residuals] = {}
    expired = np.zeros(len(grouped.partitions), dtype=np.bool_)
    for number, partition in enumerate(grouped.partitions):
        spec = metadata.spec(partition.spec_id)
        if spec is not None:
            residual = residuals.setdefault(partition.spec_id, Residuals(expression, spec))
            expired[number] = residual({field.field_id: field.value for field in partition.fields}) == TRUE
    is_expired, rows = expired[grouped.numbers], files.longs("record_count")
    holds, size_bytes = np.zeros(files.files, dtype=np.bool_), 0
    for name in rule.columns:
        column = schema.column_named(name)
        if column is None:
            raise BadRequest(f"{TTL_COLUMNS} names {name[:100]!r}, which is no column of the table")
        for leaf in schema.index.by_id.values():
            if isinstance(leaf.type, str) and column.id in {leaf.id, *(one.id for one in schema.ancestors(leaf))}:
                stats = files.stats(RequestedColumn(leaf.id, leaf.type))
                sizes = stats.counts("column_sizes")
                has_values = is_expired & (sizes > 0) & (stats.counts("null_value_counts") != rows)
                holds |= has_values
                size_bytes += int(sizes[has_values].sum())
    return np.flatnonzero(holds), size_bytes


def _statistics_problems(metadata: TableMetadata, settings: Settings) -> Iterator[Problem]:
    """Only of tables that have statistics, or whose policy enables them: most queries need none."""
    snapshot = metadata.current_snapshot
    enabled = as_bool(metadata.properties, STATISTICS_ENABLED, settings.services_statistics)
    try:
        policy = StatisticsPolicy.of(metadata.properties)
    except BadRequest as error:
        yield Problem("invalid property", error.message, "no statistics are computed")
        return
    known = None if snapshot is None else known_statistics(metadata, snapshot)
    if known is None or not (enabled or known.file is not None) or not known.is_stale(metadata, policy):
        return
    detail = "no snapshot has the distinct values of all columns"
    if known.file is not None:
        changed, commits = known.added + known.removed, len(known.since)
        detail = f"{changed:,} of {known.rows:,} rows were added or removed in {commits:,} commits since the statistics"
    yield Problem(
        "stale statistics",
        detail,
        "engines order joins by them",
        "statistics",
        settings.services_workers > 0 and enabled,
    )


def _metadata_problems(health: TableHealth, metadata: TableMetadata) -> Iterator[Problem]:
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


def _replacement_problems(metadata: TableMetadata) -> Iterator[Problem]:
    found = {}
    for snapshot in metadata.snapshots:
        parent_id = snapshot.parent_snapshot_id
        parent = None if parent_id is None else metadata.snapshot(parent_id)
        if (why := difference(snapshot, parent)) is not None:
            found[snapshot.snapshot_id] = why
    if not found:
        return
    newest, why = list(found.items())[-1]
    yield Problem(
        "replacement with other rows",
        f"{len(found):,} snapshots have the operation replace, but not the rows of the snapshot before; of the "
        f"newest, {newest}, the summary says that {why}",
        "readers of changes may miss these rows; find out which program committed it",
    )


def _problems(health: TableHealth, metadata: TableMetadata, settings: Settings) -> Iterator[Problem]:
    properties, runs = metadata.properties, settings.services_workers > 0
    by_clustering = is_clustered(properties, settings.services_clustering)
    rewrites = by_clustering or as_bool(properties, COMPACTION_ENABLED, settings.services_compaction)
    service = "clustering" if by_clustering else "compaction"
    compacts = runs and metadata.format_version > 1 and rewrites
    least = max(2, count_of(properties, MIN_FILES, MIN_FILES_DEFAULT)) - 1
    # A clustering keeps small layers, until there is as much new data.
    if not by_clustering and health.files - health.files_if_compacted >= least:
        yield Problem(
            "small files",
            f"{health.small_files:,} of {health.files:,} data files are smaller than "
            f"{small_below(metadata):.0%} of {health.target_file_size_in_bytes:,} bytes",
            f"a scan of the whole table opens {health.files:,} files; {health.files_if_compacted:,} would do",
            service,
            compacts,
        )
    if health.deleted_records >= DELETED * max(1, health.records):
        yield Problem(
            "deleted rows",
            f"{health.delete_files:,} delete files delete about {health.deleted_records:,} of {health.records:,} rows",
            "readers open the delete files, and read the deleted rows and drop them",
            service,
            compacts,
        )
    if health.expired_snapshots:
        yield Problem(
            "expired snapshots",
            f"{health.expired_snapshots:,} of {health.snapshots:,} snapshots have expired",
            "they keep files that queries no longer need, and each query of an engine loads their list",
            "expiration",
            runs and as_bool(properties, EXPIRATION_ENABLED, settings.services_expiration),
        )
    elif health.snapshots > _MANY_SNAPSHOTS:
        yield Problem(
            "many snapshots",
            f"{health.snapshots:,} snapshots are within the retention of the table",
            "each query of an engine loads their list; reduce history.expire.max-snapshot-age-ms",
        )
    if health.manifests >= _MANY_MANIFESTS and health.files < _FILES_A_MANIFEST * health.manifests:
        yield Problem(
            "small manifests",
            f"{health.manifests:,} manifests list {health.files:,} files",
            "an engine that plans without the server opens each",
            "manifests",
            runs
            and metadata.format_version > 1
            and as_bool(properties, MANIFESTS_ENABLED, settings.services_manifests),
        )
