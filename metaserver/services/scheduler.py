"""The scheduler of jobs: one replica at a time finds what tables need, and runs it.

The replica that holds the lease follows the timeline, looks at all tables in turn, queues the jobs that the services
propose, and runs them in worker processes. A replica that loses the lease stops its jobs. If two overlap for a moment,
both may run the same job, which is harmless (`service.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import SeamarkError
from seamark.metaserver.gathering import gathered
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.services.jobs import JobQueue
from seamark.metaserver.services.runs import RunLog
from seamark.metaserver.services.service import Job, JobFailed, Launcher, Service
from seamark.metaserver.services.watch import SWEEP_S, TableWatch
from seamark.metaserver.store.lease import Lease, LeaseLost
from seamark.metaserver.store.model import Entry
from seamark.metaserver.timeline.timeline import Timeline

IDLE_S = 60.0
"""A worker without a job for this long is stopped, which frees its memory."""
_RETRY_S = 5.0
_log = structlog.get_logger("seamark.services")


class JobObserver(Protocol):
    """Receives what metrics show."""

    def job_ended(self, service: str, outcome: str, seconds: float) -> None: ...

    def jobs_queued(self, count: int) -> None: ...


class Scheduler:
    """Belongs to one event loop. `launchers`: one for each job that may run concurrently."""

    def __init__(
        self,
        services: Sequence[Service],
        launchers: Sequence[Launcher],
        watch: TableWatch,
        timeline: Timeline,
        runs: RunLog,
        lease: Lease,
        clock: Clock,
        observer: JobObserver,
    ) -> None:
        self._services = services
        self._launchers = launchers
        self._watch = watch
        self._timeline = timeline
        self._runs = runs
        self._lease = lease
        self._clock = clock
        self._observer = observer

    async def run(self) -> None:
        """Until cancelled: runs jobs while this replica has the lease, and waits while another has it."""
        while True:
            try:
                await self._lease.hold()
                try:
                    await self._lead()
                finally:
                    await self._lease.release()
            except LeaseLost:
                self._observer.jobs_queued(0)
                await asyncio.sleep(self._lease.lasts_s / 3)
            except SeamarkError as error:
                self._observer.jobs_queued(0)
                _log.warning("table services wait for the store", error=error.message)
                await asyncio.sleep(_RETRY_S)

    async def _lead(self) -> None:
        """Until the lease is lost, or the store fails."""
        queue = JobQueue(self._clock.monotonic)

        def look(entry: Entry, metadata: TableMetadata) -> None:
            for service in self._services:
                job = service.propose(entry, metadata)
                if job is None:
                    queue.discard((service.name, entry.uuid))
                elif not queue.put(job):
                    _log.warning("job not queued, the queue is full", service=job.service, table=job.table)
            self._observer.jobs_queued(len(queue))

        async def sweep() -> None:
            while True:
                tables = await self._watch.sweep(look)
                _log.debug("tables examined", tables=tables, jobs=len(queue))
                await asyncio.sleep(SWEEP_S)

        # Before the first sweep, so that no change falls between the two.
        since = await self._timeline.head()
        work: list[Callable[[], Any]] = [self._renew, lambda: self._watch.follow(look, since), sweep]
        work += [lambda launcher=launcher: self._run_jobs(queue, launcher) for launcher in self._launchers]  # type: ignore[misc]
        await gathered(work)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease.lasts_s / 3)
            await self._lease.hold()

    async def _run_jobs(self, queue: JobQueue, launcher: Launcher) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        job = await queue.take()
                except TimeoutError:
                    await launcher.close()
                    continue
                await self._run_job(queue, launcher, job)
                self._observer.jobs_queued(len(queue))
        finally:
            await launcher.close()

    async def _is_needed(self, job: Job) -> bool:
        found = await self._watch.find(job.namespace, job.table)
        if found is None or found[0].uuid != job.uuid:
            return False
        return any(service.name == job.service and service.propose(*found) is not None for service in self._services)

    async def _run_job(self, queue: JobQueue, launcher: Launcher, job: Job) -> None:
        if not await self._is_needed(job):  # the table was dropped or renamed, or its policy has changed
            queue.discard(job.key)
            queue.finish(job, failed=False)
            return
        log = _log.bind(service=job.service, namespace=".".join(job.namespace), table=job.table)
        began_s, began_ms = self._clock.monotonic(), self._clock.now_ms()
        totals: Mapping[str, Any] = {}
        error = ""
        try:
            totals = await launcher.run(job)
        except JobFailed as failed:
            error = str(failed)
        again_in_s = queue.finish(job, failed=bool(error))
        seconds = self._clock.monotonic() - began_s
        self._observer.job_ended(job.service, "failed" if error else "completed", seconds)
        if error:
            log.warning("job failed", error=error, seconds=round(seconds, 3), again_in_s=again_in_s)
        else:
            log.info("job completed", seconds=round(seconds, 3), **totals)
        await self._runs.record(job, began_ms, totals, error)
