"""The service that splits files of earlier bucket counts, for tables whose policy enables it."""

from __future__ import annotations

from seamark.metaserver.iceberg.metadata.bucket_counts import coarser_specs
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool, count_of
from seamark.metaserver.iceberg.metadata.service_switches import BUCKET_SPLITTING_ENABLED
from seamark.metaserver.services.service import Job, Service, rewrite_pause_s
from seamark.metaserver.store.model import Entry

_PRIORITY = 6
"""Before compaction, which would merge the files first."""


class BucketSplitting(Service):
    name = "bucket-splitting"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """While the table has a spec with fewer buckets; the job plans the table and finds its files."""
        snapshot = metadata.current_snapshot
        if (
            snapshot is None
            or metadata.format_version == 1
            or not as_bool(metadata.properties, BUCKET_SPLITTING_ENABLED, self._default)
        ):
            return None
        if not coarser_specs(metadata):
            return None
        files = count_of(snapshot.summary_map(), "total-data-files", 0)
        return Job(self.name, entry.namespace, entry.name, entry.uuid, _PRIORITY, rewrite_pause_s(files))
