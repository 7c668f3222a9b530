"""Records of the runs of jobs on the timeline, and the search for failed runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.worker_tokens import SERVICE_PRINCIPAL
from seamark.metaserver.services.job import Job
from seamark.metaserver.store.model import EntryKind, Instant, InstantState
from seamark.metaserver.store.operations import RecordInstant
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.instants import MAINTENANCE
from seamark.metaserver.timeline.timeline import Timeline

_ERROR_CHARACTERS_MAX = 1000
_SEARCHED_RUNS_MAX = 50
"""The number of the latest runs of a table among which the last run of each service is searched."""
FAILED_MS = 26 * 3_600_000
"""Callers of `find_failed_runs` ignore failures that are older than this, in milliseconds.

A failed job is repeated within an hour, or in the next time window of its table. If it is not repeated within this
time, the policy or the index that required it has been removed.
"""
_JOBS_WITHOUT_FAILURE_MAX = 100_000


async def find_failed_runs(timeline: Timeline, table_uuid: str | None, since_ms: int = 0) -> dict[str, Instant]:
    """Return the failed runs of a table: the last recorded run of each service, if it failed, by service.

    Args:
        timeline: The timeline, which records the runs.
        table_uuid: The UUID of the table, or None for all tables.
        since_ms: Failures before this time are left out, because a job that still fails runs again within `FAILED_MS`.
    """
    run_filter = InstantFilter(uuid=table_uuid, action=MAINTENANCE, newest_first=True, archived=False)
    last_runs: dict[str, Instant] = {}
    for run in await timeline.read(run_filter, _SEARCHED_RUNS_MAX):
        last_runs.setdefault(str(run.summary.get("service")), run)
    runs = last_runs.items()
    return {service: run for service, run in runs if "error" in run.summary and run.requested_ms >= since_ms}


class RunLog:
    """Records the runs of jobs on the timeline."""

    def __init__(self, store: PointerStore, timeline: Timeline, clock: Clock) -> None:
        self._store = store
        self._timeline = timeline
        self._clock = clock
        self._jobs_without_failure: set[tuple[str, str]] = set()
        """The keys of the jobs whose last recorded run did not fail."""

    async def record(self, job: Job, launcher: str, began_ms: int, totals: Mapping[str, Any], error: str) -> None:
        """Record the run of a job that changed something or failed, as an instant on the timeline.

        The run of a job that had nothing to do is recorded only if its last run failed. This shows that the job no
        longer fails.
        """
        if not totals and not error and not await self._has_failed(job):
            return
        self._note_result(job, failed=bool(error))
        now_ms = self._clock.now_ms()
        seconds = round((now_ms - began_ms) / 1000, 3)
        summary: dict[str, Any] = {"service": job.service, "launcher": launcher, "seconds": seconds}
        summary |= {"error": error[:_ERROR_CHARACTERS_MAX]} if error else {"totals": dict(totals)}
        instant = Instant(
            id=str(self._clock.uuid7()),
            action=MAINTENANCE,
            state=InstantState.ROLLED_BACK if error else InstantState.COMPLETED,
            kind=EntryKind.TABLE,
            namespace=job.namespace,
            name=job.table,
            uuid=job.uuid,
            requested_ms=began_ms,
            completed_ms=now_ms,
            principal_name=SERVICE_PRINCIPAL,
            summary=summary,
        )
        await self._store.transact([RecordInstant(instant=instant)])
        self._timeline.notify()

    async def _has_failed(self, job: Job) -> bool:
        """Return whether the last recorded run of the job failed."""
        if job.key in self._jobs_without_failure:
            return False
        has_failed = job.service in await find_failed_runs(self._timeline, job.uuid)
        self._note_result(job, failed=has_failed)
        return has_failed

    def _note_result(self, job: Job, *, failed: bool) -> None:
        """Remember whether the last run of a job succeeded.

        If `_jobs_without_failure` has too many jobs, all are forgotten. `_has_failed` then reads the timeline again.
        """
        if failed:
            self._jobs_without_failure.discard(job.key)
            return
        if len(self._jobs_without_failure) >= _JOBS_WITHOUT_FAILURE_MAX:
            self._jobs_without_failure.clear()
        self._jobs_without_failure.add(job.key)
