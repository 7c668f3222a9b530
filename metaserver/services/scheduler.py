"""The scheduler of jobs. One replica at a time finds the jobs that tables need, and runs them.

The replica that holds the lease follows the timeline and examines all tables in turn. It queues the jobs that the
services propose, and runs them in worker processes. A replica that loses the lease stops its jobs. For a moment, two
replicas may believe that they hold the lease. Both may then run the same job, which is harmless (`proposer.py`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import RECHECK_AFTER
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.formats.services.services import SERVICES, list_affecting_prefixes
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.runtime.background import log_safely
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.services.budgets import apply_window_and_priority, compute_window_wait_s
from seamark.metaserver.services.dependents import DependentJobs
from seamark.metaserver.services.job import Job, JobFailed, JobRunner
from seamark.metaserver.services.job_queue import JobQueue
from seamark.metaserver.services.launching.access_probe import NO_ANSWER, PROBE_S
from seamark.metaserver.services.proposer import NEVER, JobProposer
from seamark.metaserver.services.running import (
    JobSlots,
    JobsState,
    RunningJob,
    RunningJobs,
    ServicesStatus,
    encode_state,
)
from seamark.metaserver.services.runs import RunLog
from seamark.metaserver.services.watch import SWEEP_S, TableWatch
from seamark.metaserver.store.lease import Lease, LeaseLost
from seamark.metaserver.store.model import TABLE, Entry
from seamark.metaserver.timeline.timeline import Timeline

IDLE_S = 60.0
"""The time after which a worker without a job is stopped, to free its memory."""
_RETRY_S = 5.0
"""The pause after a failure of the store, and before a job that waits for another rewrite of its table."""
_PREFIX_OF_ALL_SERVICES = "seamark.services."
"""The prefix of the properties that control the jobs of every service."""
_REFUSED_S = 300.0
"""The seconds after which all tables are examined again if the queue had no place for some jobs."""
_log = structlog.get_logger("seamark.services")


class JobObserver(Protocol):
    """Receives data about jobs for metrics."""

    def count_ended_job(self, service: str, outcome: str, seconds: float, totals: Mapping[str, Any]) -> None: ...

    def set_queued_jobs(self, count: int) -> None: ...

    def set_job_lag(self, service: str, lag_s: float, failing_tables: int) -> None: ...

    def set_running_jobs(self, service: str, count: int, bytes_done: int, bytes_total: int) -> None: ...

    def set_services_state(self, *, leading: bool, blocked: bool) -> None: ...


class Scheduler:
    """Schedules and runs jobs on this replica.

    An instance belongs to one event loop. `launchers` has one item for each job that may run concurrently.
    """

    def __init__(
        self,
        proposers: Sequence[JobProposer],
        launchers: Sequence[JobRunner],
        watch: TableWatch,
        timeline: Timeline,
        runs: RunLog,
        lease: Lease,
        clock: Clock,
        observer: JobObserver,
        *,
        queue_limit: int,
        probe: Callable[[], Job] | None = None,
        status: ServicesStatus | None = None,
        rights: StandingRights,
        slots: JobSlots | None = None,
    ) -> None:
        """Create a scheduler that does not run yet.

        Args:
            proposers: The proposers of the table services.
            launchers: The launchers, each of which runs one job at a time.
            watch: Finds the tables that have changed.
            timeline: The timeline of the catalog.
            runs: Records the runs of jobs.
            lease: The lease that only one replica holds at a time.
            clock: The clock.
            observer: Receives data about jobs for metrics.
            queue_limit: The maximum number of waiting jobs.
            probe: A function that makes the job that must succeed before this replica runs other jobs.
            status: The object that receives the reason why this replica runs no jobs.
            rights: The rights of the principals that set policies.
            slots: The slots for jobs that several warehouses share. None if the scheduler shares no slots.
        """
        self._slots = slots
        self._probe = probe
        self._status = status or ServicesStatus(enabled=True)
        self._rights = rights
        self._queue_limit = queue_limit
        self._running_jobs = RunningJobs()
        self._proposers = proposers
        self._launchers = launchers
        self._watch = watch
        self._timeline = timeline
        self._runs = runs
        self._lease = lease
        self._clock = clock
        self._observer = observer

    async def run(self) -> None:
        """Wait for the lease, and run jobs while this replica holds it. The method runs until it is cancelled."""
        try:
            await self._take_turns()
        finally:
            for launcher in self._launchers:
                await launcher.close()

    async def _take_turns(self) -> None:
        """Take the lease, and run jobs until the lease is lost or this replica cannot run jobs. Then repeat."""
        while True:
            try:
                await self._lease.hold(encode_state(JobsState()))
                try:
                    if await self._check_and_report_access():
                        await self._run_as_leader()
                finally:
                    await self._lease.release()
                    self._observer.set_services_state(leading=False, blocked=bool(self._status.problem))
                await asyncio.sleep(self._blocked_s)  # Another replica may be able to run jobs.
            except LeaseLost:
                self._observer.set_queued_jobs(0)
                await asyncio.sleep(self._lease.lasts_s / 3)
            except SeamarkError as error:
                self._observer.set_queued_jobs(0)
                _log.warning("table services wait for the store", error=error.message)
                await asyncio.sleep(_RETRY_S)

    @property
    def _blocked_s(self) -> float:
        """The time for which a replica that cannot run jobs keeps the lease.

        Then the replica releases the lease, and waits as long again, so that another replica can take the lease. The
        replica does not renew the lease while it keeps it, so this time is shorter than the lease.
        """
        return self._lease.lasts_s * 2 / 3

    async def _check_and_report_access(self) -> bool:
        """Run a job that checks the access to the server and the storage, and return whether it has access.

        This replica holds the lease of the table services meanwhile. If the job has no access, the method writes the
        reason into the lease for other replicas, and waits. The caller then releases the lease.
        """
        if self._probe is None:
            return True
        probe_task = asyncio.create_task(self._find_problem(self._probe()))
        try:
            while not probe_task.done():
                await asyncio.wait({probe_task}, timeout=self._lease.lasts_s / 3)
                await self._lease.hold(encode_state(JobsState()))
        finally:
            probe_task.cancel()
            await asyncio.gather(probe_task, return_exceptions=True)
        self._status.problem = problem = probe_task.result()
        if not problem:
            return True
        _log.error("table services cannot run here", problem=problem)
        self._observer.set_services_state(leading=False, blocked=True)
        # After `forget`, `hold` writes the new state at once. Otherwise it would wait until the lease must be renewed.
        self._lease.forget()
        await self._lease.hold(encode_state(JobsState(problem=problem)))
        await asyncio.sleep(self._blocked_s)
        return False

    async def _find_problem(self, probe: Job) -> str:
        """Return the reason why a job of this replica fails. It is empty if the job succeeds."""
        try:
            async with self._take_slot(self._launchers[0]), asyncio.timeout(PROBE_S):
                await self._launchers[0].run(probe, lambda _: None)
        except JobFailed as launch_error:
            return str(launch_error)
        except TimeoutError:
            return NO_ANSWER
        except Exception as error:  # noqa: BLE001  the replica must try again after any error
            log_safely(_log.exception, "the check of table services failed unexpectedly")
            return f"the check failed unexpectedly: {error}"
        return ""

    async def _run_as_leader(self) -> None:
        """Examine tables and run jobs until the lease is lost, or the store fails."""
        self._observer.set_services_state(leading=True, blocked=False)
        queue = JobQueue(self._clock.monotonic, limit=self._queue_limit)
        self._watch.forget_due_times()
        refused_count = 0
        dependents = DependentJobs()

        def examine_table(entry: Entry, metadata: TableMetadata) -> float:
            """Queue the jobs that a table needs, and return the seconds until its next examination."""
            nonlocal refused_count
            recheck_after_s = NEVER
            for proposer in self._proposers:
                recheck_after_s = min(recheck_after_s, proposer.recheck_after_s(metadata))
                job = proposer.propose(entry, metadata)
                if job is None:
                    queue.discard((proposer.name, entry.uuid))
                    dependents.forget((proposer.name, entry.uuid))
                    continue
                job = apply_window_and_priority(job, metadata.properties)
                dependents.record(job, proposer.list_source_tables(metadata))
                if not queue.put(job, delay_s=compute_window_wait_s(job.window, self._clock.now_ms())):
                    # The queue has no place for the job, so the next sweep examines the table again.
                    refused_count += 1
                    recheck_after_s = 0.0
            for job in dependents.list_jobs((*entry.namespace, entry.name)):
                queue.put(job, delay_s=compute_window_wait_s(job.window, self._clock.now_ms()))
            self._observer.set_queued_jobs(len(queue))
            return recheck_after_s

        async def sweep_repeatedly() -> None:
            """Examine all tables again and again, sooner if the queue had no place for some jobs."""
            nonlocal refused_count
            while True:
                refused_count = 0
                dependents.begin_sweep()
                tables = await self._watch.examine_all(examine_table, on_table=dependents.mark_seen)
                dependents.end_sweep()
                _log.debug("tables examined", tables=tables, jobs=len(queue))
                if refused_count:
                    _log.warning("jobs wait for a place in the queue", jobs=refused_count, limit=self._queue_limit)
                await asyncio.sleep(_REFUSED_S if refused_count else SWEEP_S)

        # Read the position before the first sweep, so that no change during the sweep is missed.
        since = await self._timeline.load_head()
        tasks: list[Callable[[], Any]] = [
            lambda: self._renew_lease(queue),
            lambda: self._watch.follow(examine_table, since),
            sweep_repeatedly,
        ]
        tasks += [lambda launcher=launcher: self._run_jobs(queue, launcher) for launcher in self._launchers]  # type: ignore[misc]
        await gather(tasks)

    async def _renew_lease(self, queue: JobQueue) -> None:
        """Renew the lease, and write the state of the jobs into it, until the lease is lost."""
        try:
            while True:
                await asyncio.sleep(self._lease.lasts_s / 3)
                await self._lease.hold(self._running_jobs.encode(queue, self._clock.now_ms()))
                self._report_lag(queue.measure_lags(), queue.count_failing())
                self._report_running(self._running_jobs)
        finally:
            # Another replica may now hold the lease, and reports its own jobs.
            self._report_lag({}, {})
            self._report_running(())

    def _report_lag(self, lags: Mapping[str, float], failing_tables: Mapping[str, int]) -> None:
        for proposer in self._proposers:
            self._observer.set_job_lag(
                proposer.name, lags.get(proposer.name, 0.0), failing_tables.get(proposer.name, 0)
            )

    def _report_running(self, jobs: Iterable[RunningJob]) -> None:
        """Report the number of running jobs of each service, and their progress."""
        counts: Counter[str] = Counter()
        done_bytes: Counter[str] = Counter()
        total_bytes: Counter[str] = Counter()
        for job in jobs:
            counts[job.service] += 1
            done_bytes[job.service] += job.progress.bytes_done
            total_bytes[job.service] += job.progress.bytes_total
        for proposer in self._proposers:
            name = proposer.name
            self._observer.set_running_jobs(name, counts[name], done_bytes[name], total_bytes[name])

    async def _run_jobs(self, queue: JobQueue, launcher: JobRunner) -> None:
        """Run jobs of the queue with one launcher, one after another, until the lease is lost or the store fails.

        An unexpected error counts as a failure of its job.
        """
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_S):
                        job = await queue.take()
                except TimeoutError:
                    await launcher.close()  # End the idle worker process, which keeps memory.
                    continue
                try:
                    async with self._take_slot(launcher):
                        await self._run_job(queue, launcher, job)
                except (SeamarkError, LeaseLost):
                    raise
                except Exception:  # noqa: BLE001  an error of one table must not end the jobs of other tables
                    log_safely(_log.exception, "a job failed unexpectedly", service=job.service, table=job.table)
                    queue.fail(job)
                self._observer.set_queued_jobs(len(queue))
        finally:
            await launcher.close()

    @asynccontextmanager
    async def _take_slot(self, launcher: JobRunner) -> AsyncIterator[None]:
        """Wait for a slot for one job, and occupy it while the context is active.

        If warehouses share the slot, end the worker process of the launcher with the slot. Otherwise each warehouse
        could have an idle process, so that the slots would not limit the processes and their memory.
        """
        if self._slots is None:
            yield
            return
        async with self._slots.hold_slot():
            try:
                yield
            finally:
                await launcher.close()

    async def _explain_forbidden_job(self, job: Job) -> str | None:
        """Return the reason why the principals that set the job's policy may not run the job, or None if they may.

        The job has a token of the server, but a principal may have lost the right to change the table.
        """
        table = await self._watch.find(job.namespace, job.table)
        target = Securable(job.namespace, TABLE, job.table)
        prefixes = (_PREFIX_OF_ALL_SERVICES, *list_affecting_prefixes(job.service))
        for name, setter in ({} if table is None else await self._watch.list_setters(table[0])).items():
            if not name.startswith(prefixes):
                continue
            if (reason := await self._rights.explain_loss(setter, "putTablePolicy", target)) is not None:
                return (
                    f"{setter} set {name} and may not write the table now: {reason}; "
                    "remove the property and set it again"
                )
        return None

    async def _is_needed(self, job: Job) -> bool:
        """Return whether the table still needs the job."""
        table = await self._watch.find(job.namespace, job.table)
        if table is None or table[0].uuid != job.uuid:
            return False
        return any(
            proposer.name == job.service and proposer.propose(*table) is not None for proposer in self._proposers
        )

    async def _run_job(self, queue: JobQueue, launcher: JobRunner, job: Job) -> None:
        """Run a job that the queue returned, if it is still needed, and record its result.

        If another job rewrites files of the table, or the time window of the job has closed, the job is queued again. A
        job that is not permitted fails.
        """
        if not await self._is_needed(job):  # The table was dropped or renamed, or its policy changed.
            queue.discard(job.key)
            queue.finish(job, failed=False)
            return
        forbidden_reason = await self._explain_forbidden_job(job)
        # Do not await before the job starts, so that no other job of the table can start meanwhile.
        if _rewrites_files(job.service) and any(
            other.uuid == job.uuid and _rewrites_files(other.service) for other in self._running_jobs
        ):
            queue.finish(job, failed=False)
            queue.put(job, delay_s=_RETRY_S)
            return
        # The time window of the job may have closed while the job waited.
        if (closed_s := compute_window_wait_s(job.window, self._clock.now_ms())) > 0:
            queue.finish(job, failed=False)
            queue.put(job, delay_s=closed_s)
            return
        launcher_name = launcher.find_launcher_name(job)
        log = _log.bind(service=job.service, namespace=".".join(job.namespace), table=job.table, launcher=launcher_name)
        began_s, began_ms = self._clock.monotonic(), self._clock.now_ms()
        totals: dict[str, Any] = {}
        error = ""
        try:
            if forbidden_reason is not None:
                raise JobFailed(forbidden_reason)
            with self._running_jobs.track_job(job, launcher_name, began_ms) as report_progress:
                totals = await launcher.run(msgspec.structs.replace(job, fence=self._lease.fence), report_progress)
        except JobFailed as launch_error:
            error = str(launch_error)
        again_in_s = queue.finish(job, failed=bool(error), idle=not totals)
        if (recheck_s := totals.pop(RECHECK_AFTER, 0.0)) > 0:
            queue.put(job, delay_s=recheck_s)
        seconds = self._clock.monotonic() - began_s
        self._observer.count_ended_job(job.service, "failed" if error else "completed", seconds, totals)
        if error:
            log.warning("job failed", error=error, seconds=round(seconds, 3), again_in_s=again_in_s)
        else:
            log.info("job completed", seconds=round(seconds, 3), **totals)
        await self._runs.record(job, launcher_name, began_ms, totals, error)


def _rewrites_files(service: str) -> bool:
    """Return whether jobs of a service rewrite data files.

    For each table, only one of these jobs runs at a time. Otherwise, two jobs could rewrite the same files.
    """
    return service in SERVICES and SERVICES[service].rewrites_files
