"""The service that rewrites manifests, for tables whose policy enables it."""

from __future__ import annotations

from seamark.metaserver.iceberg.metadata.manifest_policy import MARK, MIN_COUNT, MIN_COUNT_DEFAULT
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool, count_of
from seamark.metaserver.iceberg.metadata.service_switches import MANIFESTS_ENABLED
from seamark.metaserver.services.service import Job, Service, rewrite_pause_s
from seamark.metaserver.store.model import Entry

_PRIORITY = 8
"""After compaction, which makes entries unneeded."""
_PAUSE_S = 600.0
"""Least time between two rewrites of a table: each writes a large part of its manifests. After a look that found too
few, less: a table that is fed fast has hundreds ten minutes later."""


class ManifestRewriting(Service):
    name = "manifests"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """For each change since the last rewrite; metadata does not say how many manifests there are, but each lists at
        least one file. The server reads the manifest list when the job runs."""
        snapshot = metadata.current_snapshot
        if snapshot is None or metadata.format_version == 1:
            return None
        if not as_bool(metadata.properties, MANIFESTS_ENABLED, self._default):
            return None
        summary = snapshot.summary_map()
        name, value = MARK
        files = count_of(summary, "total-data-files", 0) + count_of(summary, "total-delete-files", 0)
        # From 4 manifests on, a bad order of the entries is a reason too.
        least = min(4, max(2, count_of(metadata.properties, MIN_COUNT, MIN_COUNT_DEFAULT)))
        if summary.get(name) == value or files < least:
            return None
        idle_pause_s = min(_PAUSE_S, rewrite_pause_s(files))
        key = (self.name, entry.namespace, entry.name, entry.uuid)
        return Job(*key, _PRIORITY, _PAUSE_S, idle_pause_s=idle_pause_s)
