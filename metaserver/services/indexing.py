"""The service that keeps indexes built, merged and audited."""

from __future__ import annotations

from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.index.files.definitions import read_definitions
from seamark.metaserver.services.service import NEVER, RECHECK_S, Job, Service
from seamark.metaserver.store.model import Entry


class Indexing(Service):
    """Proposes a job for each table with enabled indexes. The job asks which files lack an index: that needs the
    manifests, which this decision does not read."""

    name = "indexing"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        if not read_definitions(metadata).enabled:
            return None
        return Job(self.name, entry.namespace, entry.name, entry.uuid)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Indexes are audited from time to time."""
        return RECHECK_S if read_definitions(metadata).enabled else NEVER
