"""The service that keeps the statistics of tables fresh, for tables whose policy enables it."""

from __future__ import annotations

from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool, count_of
from seamark.metaserver.iceberg.metadata.service_switches import STATISTICS_ENABLED
from seamark.metaserver.iceberg.metadata.statistics import StatisticsPolicy, known_statistics
from seamark.metaserver.services.service import Job, Service, rewrite_pause_s
from seamark.metaserver.store.model import Entry

_PRIORITY = 11
"""After what rewrites files: a replacement of files needs new statistics only once."""


class TableStatistics(Service):
    name = "statistics"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """By the summaries of the snapshots since the newest statistics."""
        snapshot = metadata.current_snapshot
        if snapshot is None or not as_bool(metadata.properties, STATISTICS_ENABLED, self._default):
            return None
        try:
            policy = StatisticsPolicy.of(metadata.properties)
        except BadRequest:  # a property is invalid; `seamark run statistics` says why
            return None
        if not known_statistics(metadata, snapshot).is_stale(metadata, policy):
            return None
        files = count_of(snapshot.summary_map(), "total-data-files", 0)
        return Job(self.name, entry.namespace, entry.name, entry.uuid, _PRIORITY, rewrite_pause_s(files))
