"""Remembers which jobs depend on other tables, such as builds of indexes on attributes of dimension tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set

import msgspec

from seamark.metaserver.services.job import Job
from seamark.metaserver.services.job_queue import Key

DEPENDENTS_MAX = 100_000
"""The maximum number of remembered pairs of a job and a table. Further jobs wait for the next examination."""
PAIRS_PER_TENANT_MAX = DEPENDENTS_MAX // 4
"""The maximum number of remembered pairs whose jobs are on tables of one top-level namespace."""
PAUSE_S = 60.0
"""The minimum time between two runs of a job, in seconds, if a change of another table caused the earlier run.

A table with a commit each second would otherwise cause a build each second.
"""
TableName = tuple[str, ...]
"""The levels of the namespace, and the name."""


class DependentJobs:
    """The jobs that the changes of other tables cause."""

    def __init__(self) -> None:
        self._jobs_by_table: defaultdict[TableName, dict[Key, Job]] = defaultdict(dict)
        self._tables_by_job: dict[Key, Set[TableName]] = {}
        self._tenants_by_job: dict[Key, str] = {}
        self._pair_count = 0
        """The number of pairs of a job and a table on which it depends."""
        self._pairs_by_tenant: Counter[str] = Counter()
        """The number of these pairs for each tenant."""
        self._unseen_uuids: set[str] = set()
        """The UUIDs of recorded tables that the present sweep over all tables has not seen yet."""

    def record(self, job: Job, tables: Set[TableName]) -> None:
        """Record the tables on which a job depends. They replace the tables that were recorded before.

        The current sweep over all tables then keeps the jobs of the job's table (`mark_seen`).

        If the limit of recorded tables is reached, nothing is recorded, and changes of the tables cause no job. The
        recorded job has a minimum pause, because several tables may change often.
        """
        self.mark_seen(job.uuid)
        self.forget(job.key)
        if not tables or not self._has_room(job.tenant, len(tables)):
            return
        self._tables_by_job[job.key] = tables
        self._tenants_by_job[job.key] = job.tenant
        self._pair_count += len(tables)
        self._pairs_by_tenant[job.tenant] += len(tables)
        caused_job = msgspec.structs.replace(job, pause_s=max(job.pause_s, PAUSE_S))
        for table in tables:
            self._jobs_by_table[table][job.key] = caused_job

    def _has_room(self, tenant: str, pair_count: int) -> bool:
        """Return whether a tenant may have `pair_count` more pairs of a job and a table."""
        is_in_share = self._pairs_by_tenant[tenant] + pair_count <= PAIRS_PER_TENANT_MAX
        return is_in_share and self._pair_count + pair_count <= DEPENDENTS_MAX

    def forget(self, key: Key) -> None:
        """Remove a job."""
        tables = self._tables_by_job.pop(key, frozenset())
        if not tables:
            return
        tenant = self._tenants_by_job.pop(key)
        self._pair_count -= len(tables)
        self._pairs_by_tenant[tenant] -= len(tables)
        if not self._pairs_by_tenant[tenant]:
            del self._pairs_by_tenant[tenant]
        for table in tables:
            del self._jobs_by_table[table][key]
            if not self._jobs_by_table[table]:
                del self._jobs_by_table[table]

    def begin_sweep(self) -> None:
        """Begin a sweep over all tables. The caller calls `mark_seen` for each table."""
        self._unseen_uuids = {uuid for _, uuid in self._tables_by_job}

    def mark_seen(self, uuid: str) -> None:
        """Record that the current sweep over all tables has found a table, so that `end_sweep` keeps its jobs."""
        self._unseen_uuids.discard(uuid)

    def end_sweep(self) -> None:
        """Remove the jobs of the tables that the sweep has not seen, because they no longer exist.

        A table that is renamed during the sweep may be unseen. It is examined after the rename, and recorded again.
        """
        for key in [key for key in self._tables_by_job if key[1] in self._unseen_uuids]:
            self.forget(key)
        self._unseen_uuids = set()

    def list_jobs(self, table: TableName) -> Iterable[Job]:
        """Return the jobs that depend on a table."""
        return list(self._jobs_by_table.get(table, {}).values())
