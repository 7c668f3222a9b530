"""The service that removes the values of expired columns, for tables whose policy gives columns an age."""

from __future__ import annotations

from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import BadRequest
from seamark.metaserver.iceberg.metadata.column_ttl import TtlPolicy
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import as_bool
from seamark.metaserver.iceberg.metadata.service_switches import COLUMN_TTL_ENABLED
from seamark.metaserver.services.service import NEVER, Job, Service
from seamark.metaserver.store.model import Entry

_PRIORITY = 6
"""Before compaction, which would rewrite the expired columns as well."""
_PAUSE_S, _PAUSE_MAX_S = 600.0, 6 * 3600.0
"""Least time between two jobs of a table: a hundredth of the shortest age, within these limits. Each plans the old
partitions."""


class ColumnTtl(Service):
    name = "column-ttl"

    def __init__(self, clock: Clock, *, default: bool) -> None:
        super().__init__(default=default)
        self._clock = clock

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        """Again and again, because partitions expire by time alone; the job finds those that have expired."""
        if metadata.current_snapshot is None or metadata.format_version == 1:
            return None
        if not as_bool(metadata.properties, COLUMN_TTL_ENABLED, self._default):
            return None
        try:
            policy = TtlPolicy.of(metadata.properties)
            if policy is None or not policy.rules(metadata, self._clock.now_ms()):
                return None
        except BadRequest:  # a property is invalid; `seamark run column-ttl` says why
            return None
        return Job(self.name, entry.namespace, entry.name, entry.uuid, _PRIORITY, _pause_s(policy))

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        if not as_bool(metadata.properties, COLUMN_TTL_ENABLED, self._default):
            return NEVER
        try:
            policy = TtlPolicy.of(metadata.properties)
        except BadRequest:
            return NEVER
        return NEVER if policy is None else _pause_s(policy)


def _pause_s(policy: TtlPolicy) -> float:
    return min(max(min(policy.ages_h.values()) * 36.0, _PAUSE_S), _PAUSE_MAX_S)
