"""The table services: when each of them proposes a job for a table, in the order of their priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from seamark.formats.iceberg.metadata import service_switches as switches
from seamark.formats.iceberg.metadata.bucket_counts import coarser_specs
from seamark.formats.iceberg.metadata.clustering import CLUSTERED_BY, COLUMNS
from seamark.formats.iceberg.metadata.column_ttl import TtlPolicy
from seamark.formats.iceberg.metadata.compaction import COMPACTED_BY, MIN_FILES, MIN_FILES_DEFAULT, small_below
from seamark.formats.iceberg.metadata.manifest_policy import MARK, MIN_COUNT, MIN_COUNT_DEFAULT
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    as_bool,
    count_of,
)
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.iceberg.metadata.statistics import StatisticsPolicy, known_statistics
from seamark.formats.index.definitions import read_definitions
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.catalog.purge import is_collectable
from seamark.metaserver.commit.expiration.orphan_files import least_age_ms
from seamark.metaserver.commit.expiration.policy import MAX_REF_AGE, ExpirationPolicy
from seamark.metaserver.services.launching.launchers import bytes_since, launcher_of
from seamark.metaserver.services.service import NEVER, RECHECK_S, Job, Service, rewrite_pause_s
from seamark.metaserver.store.model import Entry


class Indexing(Service):
    """Keeps indexes built, merged and audited. Proposes a job for each table with enabled indexes. The job asks which
    files lack an index: that needs the manifests, which this decision does not read."""

    name = "indexing"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        if not read_definitions(metadata).enabled:
            return None
        return Job(self.name, entry.namespace, entry.name, entry.uuid)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Indexes are audited from time to time."""
        return RECHECK_S if read_definitions(metadata).enabled else NEVER


class SwitchedService(Service):
    """A service that a table property switches. `default`: whether it runs for tables without that property."""

    switch: ClassVar[str]
    priority: ClassVar[int]

    def __init__(self, *, default: bool) -> None:
        self._default = default

    def _is_on(self, metadata: TableMetadata) -> bool:
        return as_bool(metadata.properties, self.switch, self._default)

    def _snapshot_to_rewrite(self, metadata: TableMetadata) -> Snapshot | None:
        """The current snapshot if the service is on; None for tables of version 1, whose files no job replaces."""
        return metadata.current_snapshot if metadata.format_version > 1 and self._is_on(metadata) else None

    def _job(self, entry: Entry, pause_s: float, **details: Any) -> Job:
        return Job(self.name, entry.namespace, entry.name, entry.uuid, self.priority, pause_s, **details)


class ColumnTtl(SwitchedService):
    """Removes the values of expired columns, for tables whose policy gives columns an age."""

    name = "column-ttl"
    switch = switches.COLUMN_TTL_ENABLED
    priority = 6
    """Before compaction, which would rewrite the expired columns as well."""

    def __init__(self, clock: Clock, *, default: bool) -> None:
        super().__init__(default=default)
        self._clock = clock

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Again and again, because partitions expire by time alone; the job finds those that have expired."""
        if self._snapshot_to_rewrite(metadata) is None:
            return None
        try:
            policy = TtlPolicy.of(metadata.properties)
            if policy is None or not policy.rules(metadata, self._clock.now_ms()):
                return None
        except BadRequest:  # a property is invalid; `seamark run column-ttl` says why
            return None
        return self._job(entry, _ttl_pause_s(policy))

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        if not self._is_on(metadata):
            return NEVER
        try:
            policy = TtlPolicy.of(metadata.properties)
        except BadRequest:
            return NEVER
        return NEVER if policy is None else _ttl_pause_s(policy)


def _ttl_pause_s(policy: TtlPolicy) -> float:
    """A hundredth of the shortest age, from ten minutes to six hours: each job plans the old partitions."""
    return min(max(min(policy.ages_h.values()) * 36.0, 600.0), 6 * 3600.0)


class BucketSplitting(SwitchedService):
    """Splits files of earlier bucket counts."""

    name = "bucket-splitting"
    switch = switches.BUCKET_SPLITTING_ENABLED
    priority = 6
    """Before compaction, which would merge the files first."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """While the table has a spec with fewer buckets; the job plans the table and finds its files."""
        snapshot = self._snapshot_to_rewrite(metadata)
        if snapshot is None or not coarser_specs(metadata):
            return None
        return self._job(entry, rewrite_pause_s(_data_files(snapshot)))


class Compaction(SwitchedService):
    """Merges small data files and applies delete files. `clusters`: whether tables with clustering columns are
    clustered without the property. Their files are rewritten by that service."""

    name = "compaction"
    switch = switches.COMPACTION_ENABLED
    priority = 7
    """After indexes, which queries miss more."""

    def __init__(self, *, default: bool, clusters: bool) -> None:
        super().__init__(default=default)
        self._clusters = clusters

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """By the totals of the current snapshot; the job plans the table and finds what is worth a rewrite."""
        snapshot, properties = self._snapshot_to_rewrite(metadata), metadata.properties
        if snapshot is None or is_clustered(properties, self._clusters):
            return None
        totals, files = snapshot.summary_map(), _data_files(snapshot)
        if not count_of(totals, "total-delete-files", 0):
            target_bytes = count_of(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT)
            size_bytes = count_of(totals, "total-files-size", 0)
            min_files = count_of(properties, MIN_FILES, MIN_FILES_DEFAULT)
            is_large = size_bytes >= small_below(metadata) * target_bytes * files  # on average
            if files < min_files or is_large:
                return None
        size_bytes, launcher = bytes_since(metadata, COMPACTED_BY), launcher_of(properties)
        return self._job(entry, rewrite_pause_s(files), size_bytes=size_bytes, launcher=launcher)


class TableClustering(SwitchedService):
    """Lays out new rows by the clustering columns of tables that have some."""

    name = "clustering"
    switch = switches.CLUSTERING_ENABLED
    priority = 8
    """Lower than indexing: a missing index slows queries more than unclustered rows."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """For each change of the files; the job plans the table and finds what is worth a rewrite."""
        snapshot = self._snapshot_to_rewrite(metadata)
        if snapshot is None or not is_clustered(metadata.properties, self._default):
            return None
        size_bytes, launcher = bytes_since(metadata, CLUSTERED_BY), launcher_of(metadata.properties)
        return self._job(entry, rewrite_pause_s(_data_files(snapshot)), size_bytes=size_bytes, launcher=launcher)


def is_clustered(properties: Mapping[str, str], default: bool) -> bool:
    """Whether the service of clustering, and not that of compaction, rewrites the files of a table."""
    return bool(properties.get(COLUMNS, "").strip()) and as_bool(properties, TableClustering.switch, default)


class ManifestRewriting(SwitchedService):
    name = "manifests"
    switch = switches.MANIFESTS_ENABLED
    priority = 8
    """After compaction, which makes entries unneeded."""
    _PAUSE_S = 600.0
    """Least time between two rewrites of a table: each writes a large part of its manifests. After a look that found
    too few, less: a table that is fed fast has hundreds ten minutes later."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """For each change since the last rewrite; metadata does not say how many manifests there are, but each lists at
        least one file. The server reads the manifest list when the job runs."""
        snapshot = self._snapshot_to_rewrite(metadata)
        if snapshot is None:
            return None
        summary = snapshot.summary_map()
        name, value = MARK
        files = _data_files(snapshot) + count_of(summary, "total-delete-files", 0)
        # From 4 manifests on, a bad order of the entries is a reason too.
        least = min(4, max(2, count_of(metadata.properties, MIN_COUNT, MIN_COUNT_DEFAULT)))
        if summary.get(name) == value or files < least:
            return None
        return self._job(entry, self._PAUSE_S, idle_pause_s=min(self._PAUSE_S, rewrite_pause_s(files)))


class SnapshotExpiration(SwitchedService):
    name = "expiration"
    switch = switches.EXPIRATION_ENABLED
    priority = 9
    """After compaction, which makes files unused."""
    _PAUSE_S, _PAUSE_MAX_S = 60.0, 3600.0
    """Least time between two expirations of a table: a tenth of the age of snapshots, within these limits. Each reads
    the manifests of the remaining snapshots."""

    def __init__(self, clock: Clock, *, default: bool) -> None:
        super().__init__(default=default)
        self._clock = clock

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """By the age of the oldest snapshot; the server determines what has expired when the job runs."""
        if not (self._is_on(metadata) and is_collectable(metadata)):
            return None
        try:
            now_ms = self._clock.now_ms()
            policy = ExpirationPolicy.of(metadata, now_ms)
        except BadRequest:  # the properties are invalid; an expiration by hand says why
            return None
        has_refs = any(
            ref.max_snapshot_age_ms is not None or ref.max_ref_age_ms is not None for ref in metadata.refs.values()
        )
        if not has_refs and MAX_REF_AGE not in metadata.properties:
            replaced_ms = [snapshot.timestamp_ms for snapshot in metadata.snapshots[1:2]]
            if len(metadata.snapshots) <= policy.retain_last or replaced_ms[0] >= policy.older_than_ms:
                return None
        return self._job(entry, min(max((now_ms - policy.older_than_ms) / 10_000, self._PAUSE_S), self._PAUSE_MAX_S))

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Snapshots become old enough."""
        return RECHECK_S if self._is_on(metadata) else NEVER


class OrphanFileRemoval(SwitchedService):
    name = "orphan-files"
    switch = switches.ORPHAN_FILES_ENABLED
    priority = 10
    """After all that may leave files."""
    _PAUSE_S = 24 * 3600.0
    """Least time between two removals of a table: each lists all of its files."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Once a day after a change; metadata does not list files that nothing names."""
        if not (self._is_on(metadata) and is_collectable(metadata)):
            return None
        try:
            least_age_ms(metadata)
        except BadRequest:  # the property is invalid; a removal by hand says why
            return None
        return self._job(entry, self._PAUSE_S)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Files become old enough."""
        return self._PAUSE_S if self._is_on(metadata) else NEVER


class TableStatistics(SwitchedService):
    """Keeps the statistics of tables fresh."""

    name = "statistics"
    switch = switches.STATISTICS_ENABLED
    priority = 11
    """After what rewrites files: a replacement of files needs new statistics only once."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """By the summaries of the snapshots since the newest statistics."""
        snapshot = metadata.current_snapshot
        if snapshot is None or not self._is_on(metadata):
            return None
        try:
            policy = StatisticsPolicy.of(metadata.properties)
        except BadRequest:  # a property is invalid; `seamark run statistics` says why
            return None
        if not known_statistics(metadata, snapshot).is_stale(metadata, policy):
            return None
        return self._job(entry, rewrite_pause_s(_data_files(snapshot)))


def _data_files(snapshot: Snapshot) -> int:
    return count_of(snapshot.summary_map(), "total-data-files", 0)
