"""The service that removes orphan files, for tables whose policy enables it."""

from __future__ import annotations

from seamark.metaserver.catalog.purge import is_collectable
from seamark.metaserver.commit.expiration.orphan_files import least_age_ms
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool
from seamark.metaserver.iceberg.metadata.service_switches import ORPHAN_FILES_ENABLED
from seamark.metaserver.services.service import NEVER, Job, Service
from seamark.metaserver.store.model import Entry

_PRIORITY = 10
"""After all that may leave files."""
_PAUSE_S = 24 * 3600.0
"""Least time between two removals of a table: each lists all of its files."""


class OrphanFileRemoval(Service):
    name = "orphan-files"

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Once a day after a change; metadata does not list files that nothing names."""
        if not (as_bool(metadata.properties, ORPHAN_FILES_ENABLED, self._default) and is_collectable(metadata)):
            return None
        try:
            least_age_ms(metadata)
        except BadRequest:  # the property is invalid; a removal by hand says why
            return None
        return Job(self.name, entry.namespace, entry.name, entry.uuid, _PRIORITY, _PAUSE_S)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Files become old enough."""
        return _PAUSE_S if as_bool(metadata.properties, ORPHAN_FILES_ENABLED, self._default) else NEVER
