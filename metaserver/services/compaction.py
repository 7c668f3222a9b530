"""The service that merges small data files and applies delete files, for tables whose policy enables it."""

from __future__ import annotations

from seamark.metaserver.iceberg.metadata.compaction import (
    COMPACTED_BY,
    MIN_FILES,
    MIN_FILES_DEFAULT,
    small_below,
)
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    as_bool,
    count_of,
)
from seamark.metaserver.iceberg.metadata.service_switches import COMPACTION_ENABLED
from seamark.metaserver.services.clustering import is_clustered
from seamark.metaserver.services.launching.launchers import rewrite_job
from seamark.metaserver.services.service import Job, Service
from seamark.metaserver.store.model import Entry

_PRIORITY = 7
"""After indexes, which queries miss more."""


class Compaction(Service):
    """`clusters`: whether tables with clustering columns are clustered without the property. Their files are rewritten
    by that service."""

    name = "compaction"

    def __init__(self, *, default: bool, clusters: bool) -> None:
        super().__init__(default=default)
        self._clusters = clusters

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """By the totals of the current snapshot; the job plans the table and finds what is worth a rewrite."""
        snapshot = metadata.current_snapshot
        if snapshot is None or metadata.format_version == 1:
            return None
        properties = metadata.properties
        if not as_bool(properties, COMPACTION_ENABLED, self._default) or is_clustered(properties, self._clusters):
            return None
        totals = snapshot.summary_map()
        files = count_of(totals, "total-data-files", 0)
        if not count_of(totals, "total-delete-files", 0):
            target_bytes = count_of(properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT)
            size_bytes = count_of(totals, "total-files-size", 0)
            min_files = count_of(properties, MIN_FILES, MIN_FILES_DEFAULT)
            is_large = size_bytes >= small_below(metadata) * target_bytes * files  # on average
            if files < min_files or is_large:
                return None
        return rewrite_job(self.name, entry, metadata, _PRIORITY, files, COMPACTED_BY)
