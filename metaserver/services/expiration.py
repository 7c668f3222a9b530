"""The service that expires snapshots, for tables whose policy enables it."""

from __future__ import annotations

from seamark.metaserver.catalog.purge import is_collectable
from seamark.metaserver.clock import Clock
from seamark.metaserver.commit.expiration.policy import MAX_REF_AGE, ExpirationPolicy
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool
from seamark.metaserver.iceberg.metadata.service_switches import EXPIRATION_ENABLED
from seamark.metaserver.services.service import NEVER, RECHECK_S, Job, Service
from seamark.metaserver.store.model import Entry

_PRIORITY = 9
"""After compaction, which makes files unused."""
_PAUSE_S, _PAUSE_MAX_S = 60.0, 3600.0
"""Least time between two expirations of a table: a tenth of the age of snapshots, within these limits. Each reads the
manifests of the remaining snapshots."""


class SnapshotExpiration(Service):
    name = "expiration"

    def __init__(self, clock: Clock, *, default: bool) -> None:
        super().__init__(default=default)
        self._clock = clock

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """By the age of the oldest snapshot; the server determines what has expired when the job runs."""
        if not (as_bool(metadata.properties, EXPIRATION_ENABLED, self._default) and is_collectable(metadata)):
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
        pause_s = min(max((now_ms - policy.older_than_ms) / 10_000, _PAUSE_S), _PAUSE_MAX_S)
        return Job(self.name, entry.namespace, entry.name, entry.uuid, _PRIORITY, pause_s)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        """Snapshots become old enough."""
        return RECHECK_S if as_bool(metadata.properties, EXPIRATION_ENABLED, self._default) else NEVER
