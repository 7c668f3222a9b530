"""The service that lays out new rows by the clustering columns of tables that have some."""

from __future__ import annotations

from collections.abc import Mapping

from seamark.metaserver.iceberg.metadata.clustering import CLUSTERED_BY, COLUMNS
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool, count_of
from seamark.metaserver.iceberg.metadata.service_switches import CLUSTERING_ENABLED
from seamark.metaserver.services.launching.launchers import rewrite_job
from seamark.metaserver.services.service import Job, Service
from seamark.metaserver.store.model import Entry

_PRIORITY = 8
"""Lower than indexing: a missing index slows queries more than unclustered rows."""


def is_clustered(properties: Mapping[str, str], default: bool) -> bool:
    """Whether the service, and not that of compaction, rewrites the files of a table."""
    return bool(properties.get(COLUMNS, "").strip()) and as_bool(properties, CLUSTERING_ENABLED, default)


class TableClustering(Service):
    name = "clustering"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """For each change of the files; the job plans the table and finds what is worth a rewrite."""
        snapshot = metadata.current_snapshot
        if snapshot is None or metadata.format_version == 1 or not is_clustered(metadata.properties, self._default):
            return None
        files = count_of(snapshot.summary_map(), "total-data-files", 0)
        return rewrite_job(self.name, entry, metadata, _PRIORITY, files, CLUSTERED_BY)
