"""The proposers of all table services. Each decides when a table needs a job, and which problems the job corrects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.expressions.residuals import Residuals
from seamark.formats.iceberg.metadata.bucket_counts import list_coarser_specs
from seamark.formats.iceberg.metadata.clustering import CLUSTERED_BY, COLUMNS, ClusteringLayout, parse_layer
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS as TTL_COLUMNS
from seamark.formats.iceberg.metadata.column_ttl import TtlPolicy, TtlRule
from seamark.formats.iceberg.metadata.compaction import (
    COMPACTED_BY,
    DELETED_ROWS_MIN_FRACTION,
    MIN_FILES,
    MIN_FILES_DEFAULT,
    get_small_file_fraction,
)
from seamark.formats.iceberg.metadata.manifest_policy import MIN_COUNT, MIN_COUNT_DEFAULT, REWRITTEN_BY_MARK
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    parse_bool,
    parse_count,
)
from seamark.formats.iceberg.metadata.retention import MAX_REF_AGE
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.metadata.statistics import StatisticsPolicy, find_known_statistics
from seamark.formats.index.definitions import read_definitions
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest
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
    SERVICES,
    STATISTICS,
)
from seamark.metaserver.catalog.purge import is_collectable
from seamark.metaserver.commit.expiration.orphan_files import read_minimum_age_ms
from seamark.metaserver.commit.expiration.policy import ExpirationPolicy
from seamark.metaserver.planner.lookup.lookup import RequestedColumn, find_files_by_prefix
from seamark.metaserver.planner.lookup.partitions import group_by_partition
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.services.job import Job
from seamark.metaserver.services.launching.launchers import read_launcher, sum_bytes_since
from seamark.metaserver.services.proposer import (
    NEVER,
    RECHECK_S,
    JobProposer,
    Problem,
    RewriteProposer,
    TableState,
    compute_rewrite_pause_s,
)
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry

_FILES_PER_MANIFEST_MIN = 100
"""The minimum average number of data files in a manifest. With fewer, planning on the client opens many manifests."""
_MANIFESTS_REWRITE_MIN = 20
"""With fewer manifests than this, small manifests are not reported as a problem."""
_TTL_PAUSES_PER_AGE = 100
_TTL_PAUSE_MIN_S, _TTL_PAUSE_MAX_S = 600.0, 6 * 3600.0
"""The limits of the pause between two jobs that remove expired columns."""


class Indexing(JobProposer):
    """Proposes jobs that build, merge and audit indexes.

    Each table with enabled indexes gets a job. The job itself finds the files that lack an index, because this needs
    the manifests, which a proposal does not read. `seamark health` reports problems of indexes separately.
    """

    service = INDEXING

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        return self.make_job(entry) if read_definitions(metadata).enabled else None

    def list_source_tables(self, metadata: TableMetadata) -> frozenset[tuple[str, ...]]:
        """Return the dimension tables whose attributes the indexes have. The job defines these indexes again."""
        return frozenset().union(*(definition.dimension_tables for definition in read_definitions(metadata).enabled))

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Return the time until indexes are audited again."""
        return RECHECK_S if read_definitions(metadata).enabled else NEVER


class Compaction(RewriteProposer):
    """Proposes jobs that merge small data files and apply delete files.

    Clustered tables are excluded, because clustering rewrites their files.
    """

    service = COMPACTION

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job from the totals of the current snapshot.

        The job plans the table and selects the files to rewrite.
        """
        snapshot, properties = metadata.current_snapshot, metadata.properties
        if snapshot is None or not self.is_on(metadata) or self._is_clustered(metadata):
            return None
        totals, files = snapshot.build_summary_map(), _count_data_files(snapshot)
        # If there are delete files, the job decides. Without them, only small files are a reason for a job.
        if not parse_count(totals, "total-delete-files", 0):
            target_bytes = parse_count(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT)
            size_bytes = parse_count(totals, "total-files-size", 0)
            min_files = parse_count(properties, MIN_FILES, MIN_FILES_DEFAULT)
            # Compare the average size of the files.
            is_large = size_bytes >= get_small_file_fraction(metadata) * target_bytes * files
            if files < min_files or is_large:
                return None
        size_bytes, launcher = sum_bytes_since(metadata, COMPACTED_BY), read_launcher(properties)
        return self.make_job(entry, compute_rewrite_pause_s(files), size_bytes=size_bytes, launcher=launcher)

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem for small files, and one for deleted rows.

        Clustered tables are excluded. Clustering sorts the new rows of a table into new files (a layer), and keeps a
        small layer until enough new data have been added.
        """
        if self._is_clustered(state.metadata):
            return
        health = state.health
        min_files = max(2, parse_count(state.metadata.properties, MIN_FILES, MIN_FILES_DEFAULT))
        # Merging `min_files` files into one file removes all but one of them.
        if health.files - health.files_if_compacted >= min_files - 1:
            yield self.make_problem(
                state,
                "small files",
                f"{health.small_files:,} of {health.files:,} data files are smaller than "
                f"{get_small_file_fraction(state.metadata):.0%} of {health.target_file_size_in_bytes:,} bytes",
                f"a scan of the whole table opens {health.files:,} files; after compaction, it opens "
                f"{health.files_if_compacted:,}",
            )
        yield from _report_deleted_rows(self, state)

    def _is_clustered(self, metadata: TableMetadata) -> bool:
        return is_clustered(metadata.properties, self._settings.runs_by_default(CLUSTERING))


class TableClustering(RewriteProposer):
    """Proposes jobs that sort the new rows of a table by its clustering columns."""

    service = CLUSTERING

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job for each change of the files.

        The job plans the table and selects the files to rewrite.
        """
        snapshot = metadata.current_snapshot
        if snapshot is None or not self.is_on(metadata):
            return None
        size_bytes, launcher = sum_bytes_since(metadata, CLUSTERED_BY), read_launcher(metadata.properties)
        return self.make_job(
            entry, compute_rewrite_pause_s(_count_data_files(snapshot)), size_bytes=size_bytes, launcher=launcher
        )

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem for files that are not clustered, and one for the deleted rows of a clustered table."""
        metadata = state.metadata
        yield from self._report_unclustered_files(state)
        if is_clustered(metadata.properties, self._settings.runs_by_default(CLUSTERING)):
            yield from _report_deleted_rows(self, state)

    def _report_unclustered_files(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem if many files are not clustered, or if the clustering property is invalid.

        The name of a clustered file contains its layer: the files of a layer are sorted together.
        """
        try:
            layout = ClusteringLayout.from_properties(state.metadata.properties)
        except BadRequest as error:
            yield Problem("invalid property", error.message, "no files are clustered")
            return
        if layout is None:
            return
        paths = find_files_by_prefix(state.view).read_texts("file_path").list_values()
        layers = Counter(parse_layer((path or b"").decode()) for path in paths)
        files, unclustered_count = layers.total(), layers.pop(None, 0)
        if unclustered_count < max(2, parse_count(state.metadata.properties, MIN_FILES, MIN_FILES_DEFAULT)):
            return
        yield self.make_problem(
            state,
            "unclustered files",
            f"{unclustered_count:,} of {files:,} data files are not clustered by {layout.text}; the other files form "
            f"{len(layers):,} layers",
            "a query that filters on these columns opens all unclustered files, and some files of each layer",
        )

    def is_on(self, metadata: TableMetadata) -> bool:
        return super().is_on(metadata) and bool(metadata.properties.get(COLUMNS, "").strip())


def is_clustered(properties: Mapping[str, str], by_default: bool) -> bool:
    """Return whether clustering instead of compaction rewrites the files of a table.

    Args:
        properties: The properties of the table, including inherited properties.
        by_default: Whether clustering runs on tables that do not have the property that enables or disables it.
    """
    switch = CLUSTERING.switch
    assert switch is not None
    return bool(properties.get(COLUMNS, "").strip()) and parse_bool(properties, switch, by_default)


def _report_deleted_rows(proposer: JobProposer, state: TableState) -> Iterator[Problem]:
    """Yield a problem if many rows of the table are deleted. The service of `proposer` corrects it."""
    health = state.health
    if health.deleted_records >= DELETED_ROWS_MIN_FRACTION * max(1, health.records):
        yield proposer.make_problem(
            state,
            "deleted rows",
            f"{health.delete_files:,} delete files delete about {health.deleted_records:,} of {health.records:,} rows",
            "readers open the delete files, and read deleted rows only to drop them",
        )


class ColumnTtl(RewriteProposer):
    """Proposes jobs that remove the values of expired columns, for tables whose policy limits the age of columns."""

    service = COLUMN_TTL

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job regularly, because partitions expire as time passes.

        The job finds the expired partitions.
        """
        if metadata.current_snapshot is None or not self.is_on(metadata):
            return None
        try:
            policy = TtlPolicy.from_properties(metadata.properties)
            if policy is None or not policy.list_rules(metadata, self._clock.now_ms()):
                return None
        except BadRequest:  # A property is invalid; `seamark run column-ttl` reports it.
            return None
        return self.make_job(entry, _compute_ttl_pause_s(policy))

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Return the seconds after which the table is checked again, or NEVER if no column can expire."""
        if not self.is_on(metadata):
            return NEVER
        try:
            policy = TtlPolicy.from_properties(metadata.properties)
        except BadRequest:
            return NEVER
        return NEVER if policy is None else _compute_ttl_pause_s(policy)

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem if files of old partitions have values of expired columns, or if a property is invalid."""
        metadata = state.metadata
        try:
            policy = TtlPolicy.from_properties(metadata.properties)
            rules = [] if policy is None else policy.list_rules(metadata, state.now_ms)
            expired_by_rule = [_find_expired_files(state.view, metadata, rule) for rule in rules]
        except BadRequest as error:
            yield Problem("invalid property", error.message, "no column expires")
            return
        files, size_bytes = np.zeros(0, dtype=np.int64), 0
        # The rules may have columns in common, so the largest size is reported: the sum would count bytes twice.
        for rule_files, rule_bytes in expired_by_rule:
            files, size_bytes = np.union1d(files, rule_files), max(size_bytes, rule_bytes)
        if len(files):
            yield self.make_problem(
                state,
                "expired columns",
                f"{len(files):,} data files of old partitions contain values of expired columns",
                f"these values take at least {size_bytes:,} bytes of storage",
            )


def _compute_ttl_pause_s(policy: TtlPolicy) -> float:
    """Return the pause between two jobs of a table in seconds.

    The pause is a hundredth of the shortest age, but at least 10 minutes and at most 6 hours, because each job plans
    the old partitions.
    """
    shortest_age_s = min(policy.ages_h.values()) * 3600
    return min(max(shortest_age_s / _TTL_PAUSES_PER_AGE, _TTL_PAUSE_MIN_S), _TTL_PAUSE_MAX_S)


def _find_expired_files(view: TableView, metadata: TableMetadata, rule: TtlRule) -> tuple[Longs, int]:
    """Return the files in expired partitions with values of the rule's columns, and the bytes of these columns.

    Both results are from the metrics in manifests. Columns without metrics are ignored.

    Raises:
        BadRequest: The rule names a column that the table does not have.
    """
    files, schema = find_files_by_prefix(view), metadata.current_schema
    expression = bind(parse_expression(rule.where), schema, (), case_sensitive=True)
    files_by_partition = group_by_partition(files)
    residuals_by_spec: dict[int, Residuals] = {}
    expired_partitions = np.zeros(len(files_by_partition.partitions), dtype=np.bool_)
    for number, partition in enumerate(files_by_partition.partitions):
        spec = metadata.spec(partition.spec_id)
        if spec is not None:
            residual = residuals_by_spec.setdefault(partition.spec_id, Residuals(expression, spec))
            expired_partitions[number] = residual({field.field_id: field.value for field in partition.fields}) == TRUE
    is_expired, rows = expired_partitions[files_by_partition.numbers], files.read_longs("record_count")
    has_any_values, size_bytes = np.zeros(files.file_count, dtype=np.bool_), 0
    for name in rule.columns:
        column = schema.find_column_by_name(name)
        if column is None:
            raise BadRequest(f"{TTL_COLUMNS} names {name[:100]!r}, but the table has no such column")
        for leaf in schema.index.by_id.values():
            if isinstance(leaf.type, str) and column.id in {
                leaf.id,
                *(outer.id for outer in schema.list_ancestors(leaf)),
            }:
                stats = files.find_statistics(RequestedColumn(leaf.id, leaf.type))
                sizes = stats.counts("column_sizes")
                # If all values of the column are null, there is nothing to remove.
                has_values = is_expired & (sizes > 0) & (stats.counts("null_value_counts") != rows)
                has_any_values |= has_values
                size_bytes += int(sizes[has_values].sum())
    return np.flatnonzero(has_any_values), size_bytes


class SnapshotExpiration(JobProposer):
    """Proposes jobs that remove old snapshots, and the files that only these snapshots need."""

    service = EXPIRATION
    _PAUSE_MIN_S, _PAUSE_MAX_S = 60.0, 3600.0
    """The limits of the minimum time between two expirations of a table, which is a tenth of the age of snapshots.

    Each expiration reads the manifests of the remaining snapshots.
    """

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job according to the age of the oldest snapshot.

        The server determines the expired snapshots when the job runs.
        """
        if not (self.is_on(metadata) and is_collectable(metadata)):
            return None
        try:
            now_ms = self._clock.now_ms()
            policy = ExpirationPolicy.from_metadata(metadata, now_ms)
        except BadRequest:  # A property is invalid; a manual expiration reports it.
            return None
        has_refs_with_limits = any(
            ref.max_snapshot_age_ms is not None or ref.max_ref_age_ms is not None for ref in metadata.refs.values()
        )
        if not has_refs_with_limits and MAX_REF_AGE not in metadata.properties:
            # The oldest snapshot can expire only if the snapshot that replaced it as the current one is old enough.
            second_snapshot_ms = [snapshot.timestamp_ms for snapshot in metadata.snapshots[1:2]]
            if len(metadata.snapshots) <= policy.retain_last or second_snapshot_ms[0] >= policy.older_than_ms:
                return None
        # A snapshot then exceeds its maximum age by at most a tenth.
        tenth_of_age_s = (now_ms - policy.older_than_ms) / 1000 / 10
        pause_s = max(tenth_of_age_s, self._PAUSE_MIN_S)
        return self.make_job(entry, min(pause_s, self._PAUSE_MAX_S))

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Return the seconds after which snapshots may be old enough to expire."""
        return RECHECK_S if self.is_on(metadata) else NEVER

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem if snapshots have expired, or if a property is invalid."""
        if state.why_not_expired:
            yield Problem("invalid property", state.why_not_expired, "no snapshot expires")
        if state.health.expired_snapshots:
            yield self.make_problem(
                state,
                "expired snapshots",
                f"{state.health.expired_snapshots:,} of {state.health.snapshots:,} snapshots have expired",
                "they keep files that queries no longer need, and each query of an engine loads their list",
            )


class OrphanFileRemoval(JobProposer):
    """Proposes jobs that remove orphan files: files in a table's folders that no snapshot and no metadata name."""

    service = ORPHAN_FILES
    _PAUSE_S = 24 * 3600.0
    """The minimum time between two removals for a table. Each removal lists all files of the table."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job if the service is on for the table, and the server may delete the table's files.

        The job has to search the storage, because the metadata do not list orphan files. So the queue starts at most
        one job in `_PAUSE_S`.
        """
        if not (self.is_on(metadata) and is_collectable(metadata)):
            return None
        try:
            read_minimum_age_ms(metadata)
        except BadRequest:  # The property is invalid; a manual removal reports it.
            return None
        return self.make_job(entry, self._PAUSE_S)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Return the seconds until the table is checked again for orphan files, or NEVER if the service is off."""
        return self._PAUSE_S if self.is_on(metadata) else NEVER


class TableStatistics(JobProposer):
    """Proposes jobs that compute the statistics of tables again."""

    service = STATISTICS

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job according to the summaries of the snapshots since the newest statistics."""
        snapshot = metadata.current_snapshot
        if snapshot is None or not self.is_on(metadata):
            return None
        try:
            policy = StatisticsPolicy.from_properties(metadata.properties)
        except BadRequest:  # A property is invalid; `seamark run statistics` reports it.
            return None
        if not find_known_statistics(metadata, snapshot).is_stale(metadata, policy):
            return None
        return self.make_job(entry, compute_rewrite_pause_s(_count_data_files(snapshot)))

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem if the statistics of a table are stale, or if a property is invalid.

        Tables without statistics are ignored unless their policy enables statistics, because most queries need none.
        """
        metadata, snapshot = state.metadata, state.metadata.current_snapshot
        try:
            policy = StatisticsPolicy.from_properties(metadata.properties)
        except BadRequest as error:
            yield Problem("invalid property", error.message, "no statistics are computed")
            return
        newest = None if snapshot is None else find_known_statistics(metadata, snapshot)
        if newest is None or not (self.is_on(metadata) or newest.file is not None):
            return
        if not newest.is_stale(metadata, policy):
            return
        detail = "no snapshot has statistics with the number of distinct values of all columns"
        if newest.file is not None:
            changed_rows, commits = newest.added + newest.removed, len(newest.later_snapshots)
            detail = f"{changed_rows:,} of {newest.rows:,} rows were added or removed "
            detail += f"in {commits:,} commits since the statistics"
        yield self.make_problem(state, "stale statistics", detail, "engines use the statistics to order joins")


class ManifestRewriting(RewriteProposer):
    """Proposes jobs that list the files of a table in fewer manifests."""

    service = MANIFESTS
    _PAUSE_S = 600.0
    """The minimum time between two rewrites of a table, because each rewrite writes a large part of its manifests.

    The pause is shorter after a job that found too few manifests, because a table with frequent commits can have
    hundreds of manifests ten minutes later.
    """

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job if the table has changed since the last rewrite.

        Metadata do not contain the number of manifests, but each manifest lists at least one file. The server
        reads the manifest list when the job runs.
        """
        snapshot = metadata.current_snapshot
        if snapshot is None or not self.is_on(metadata):
            return None
        summary = snapshot.build_summary_map()
        name, value = REWRITTEN_BY_MARK
        files = _count_data_files(snapshot) + parse_count(summary, "total-delete-files", 0)
        # With at least 4 manifests, a bad order of the entries is also a reason for a rewrite.
        min_files = min(4, max(2, parse_count(metadata.properties, MIN_COUNT, MIN_COUNT_DEFAULT)))
        if summary.get(name) == value or files < min_files:
            return None
        return self.make_job(entry, self._PAUSE_S, idle_pause_s=min(self._PAUSE_S, compute_rewrite_pause_s(files)))

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem if there are many manifests with few files each."""
        health = state.health
        if health.manifests >= _MANIFESTS_REWRITE_MIN and health.files < _FILES_PER_MANIFEST_MIN * health.manifests:
            yield self.make_problem(
                state,
                "small manifests",
                f"{health.manifests:,} manifests list {health.files:,} files",
                "an engine that plans without the server opens each manifest",
            )


class BucketSplitting(RewriteProposer):
    """Proposes jobs that split files which were written with fewer buckets."""

    service = BUCKET_SPLITTING

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job while the table has an old spec with fewer buckets than its current spec.

        The job plans the table and finds the files of the old spec.
        """
        snapshot = metadata.current_snapshot
        if snapshot is None or not self.is_on(metadata) or not list_coarser_specs(metadata):
            return None
        return self.make_job(entry, compute_rewrite_pause_s(_count_data_files(snapshot)))

    def find_problems(self, state: TableState) -> Iterator[Problem]:
        """Yield a problem if files were written with fewer buckets than the current spec has."""
        coarse_spec_ids = list_coarser_specs(state.metadata)
        files = find_files_by_prefix(state.view)
        spec_ids = files.repeat_by_segment([segment.block.spec_id for segment in files.segments])
        shared_count = int(np.isin(spec_ids, list(coarse_spec_ids)).sum()) if coarse_spec_ids else 0
        if shared_count:
            yield self.make_problem(
                state,
                "shared files",
                f"{shared_count:,} of {len(spec_ids):,} data files were written before the number of buckets grew",
                "each of these files belongs to several buckets: engines shuffle joins by the key, and an equality "
                "reads the whole file",
            )


class AutoAdvice(RewriteProposer):
    """Proposes jobs that apply proposals of the advisor, and that judge the applied changes."""

    service = AUTO_ADVICE

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Propose a job that does the next step of a trial: apply a proposal, measure it, and keep or undo it.

        The job is proposed regularly, because neither statements nor the end of a measurement change the table.
        """
        if metadata.current_snapshot is None or not self.is_on(metadata):
            return None
        return self.make_job(entry, RECHECK_S)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Return the seconds after which `propose` must be called again, or NEVER if the service is off."""
        return RECHECK_S if self.is_on(metadata) else NEVER


def _count_data_files(snapshot: Snapshot) -> int:
    return parse_count(snapshot.build_summary_map(), "total-data-files", 0)


PROPOSERS: dict[str, type[JobProposer]] = {
    proposer.service.name: proposer
    for proposer in (
        Indexing,
        Compaction,
        TableClustering,
        ColumnTtl,
        SnapshotExpiration,
        OrphanFileRemoval,
        TableStatistics,
        ManifestRewriting,
        BucketSplitting,
        AutoAdvice,
    )
}
"""The proposer of each table service, by the name of the service."""


def make_proposers(settings: Settings, clock: Clock) -> list[JobProposer]:
    """Make the proposer of each declared table service, in the order of the declarations.

    Raises:
        KeyError: A declared service has no proposer in `PROPOSERS`.
    """
    return [PROPOSERS[name](settings, clock) for name in SERVICES]
