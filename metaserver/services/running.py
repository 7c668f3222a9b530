"""The running jobs with their progress, and the waiting jobs.

The replica that runs the jobs writes this state into the lease of the table services at each renewal. So each
replica can list the jobs, and they disappear when the lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.services.job import Job, JobProgress, Report
from seamark.metaserver.services.job_queue import JobQueue
from seamark.metaserver.store.lease import SERVICES
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.store.port import PointerStore

NOT_STARTED = "no server runs them at this moment; a server takes a minute to start or to replace another"
OFF = "the setting services_workers is 0 on this server, and no other server runs them"
WAITING_JOBS_LISTED_MAX = 50
"""The maximum number of waiting jobs in the lease. They take about 10 kB, which each renewal writes."""
NAMESPACES_LISTED_MAX = 500
"""The maximum number of namespaces that the lease lists for the remaining waiting jobs."""


class RunningJob(msgspec.Struct, frozen=True, rename="kebab"):
    """A job that is running.

    Attributes:
        launcher: The launcher that runs the job.
        started_ms: The start in milliseconds since the epoch.
    """

    service: str
    namespace: NamespacePath
    table: str
    uuid: str
    launcher: str
    started_ms: int
    progress: JobProgress = JobProgress()


class WaitingJob(msgspec.Struct, frozen=True, rename="kebab"):
    """A job that waits. Times are in milliseconds since the epoch.

    Attributes:
        asked_ms: The time at which the job was proposed.
        due_ms: The time from which the job may start. It is in the past if the job waits for a free worker.
        failures: The number of failed runs since the job's last successful run.
    """

    service: str
    namespace: NamespacePath
    table: str
    uuid: str
    asked_ms: int
    due_ms: int
    failures: int


class JobsState(msgspec.Struct, frozen=True, rename="kebab"):
    """The running and the next waiting jobs of the server.

    The state does not contain the number of all waiting jobs, so that a caller receives information only about
    namespaces that it may read.

    Attributes:
        waiting: The jobs that start next, at most `WAITING_JOBS_LISTED_MAX`.
        unlisted: The namespaces of the other waiting jobs, at most `NAMESPACES_LISTED_MAX`.
        more: Whether `unlisted` lacks some of the namespaces.
    """

    running: tuple[RunningJob, ...] = ()
    waiting: tuple[WaitingJob, ...] = ()
    unlisted: tuple[NamespacePath, ...] = ()
    more: bool = False
    problem: str = ""
    """The reason why the replica that holds the lease runs no jobs."""
    is_held: bool = False
    """Whether a replica holds the lease. The value is True in each state that was read from the lease."""

    def is_complete(self, is_selected: Callable[[NamespacePath], bool]) -> bool:
        """Return whether the state lists all waiting jobs in the namespaces for which `is_selected` is true.

        `unlisted` has the namespaces with waiting jobs that the state does not list. `more` means that there are
        further such namespaces, which are not in `unlisted`.
        """
        return not self.more and not any(is_selected(namespace) for namespace in self.unlisted)


class ServicesState(msgspec.Struct, frozen=True, rename="kebab"):
    """The state of the table services.

    Attributes:
        running: Whether a replica runs table services now.
        problem: The reason why no replica runs table services, or None if a replica runs them.
        enabled: Whether the settings of some server enable table services, as far as this server knows.
    """

    running: bool
    enabled: bool
    problem: str | None = None


class ServicesStatus:
    """The state of table services in this process.

    `enabled` says whether the settings of the process enable table services. `problem` is the reason why the process
    cannot run table services. It is empty if the process can.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.problem = ""


class JobSlots:
    """Limits the jobs of several warehouses. A slot goes to the warehouse that has waited longest."""

    def __init__(self, count: int) -> None:
        self._slots = asyncio.Semaphore(count)

    @asynccontextmanager
    async def hold_slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the context is active."""
        async with self._slots:
            yield


class SharedJobs:
    """The parts of the table services that the further warehouses of a process share.

    Args:
        workers: The maximum number of jobs of all further warehouses at the same time.
    """

    def __init__(self, workers: int) -> None:
        self.slots = JobSlots(max(1, workers))
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The URL of the server. It has a value when the server accepts requests."""


class RunningJobs:
    """The running jobs of this replica.

    An instance belongs to one event loop.
    """

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], RunningJob] = {}

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(self._jobs.values())

    @contextmanager
    def track_job(self, job: Job, launcher: str, started_ms: int) -> Iterator[Report]:
        """While the context is active, list the job as running.

        Yields:
            A function that receives the progress of the job.
        """
        self._jobs[job.key] = RunningJob(job.service, job.namespace, job.table, job.uuid, launcher, started_ms)

        def report(progress: JobProgress) -> None:
            self._jobs[job.key] = msgspec.structs.replace(self._jobs[job.key], progress=progress)

        try:
            yield report
        finally:
            del self._jobs[job.key]

    def encode(self, queue: JobQueue, now_ms: int) -> str:
        """Encode the state for the lease: the running jobs, and the next waiting jobs of the queue."""
        waiting_jobs = [
            WaitingJob(
                entry.job.service,
                entry.job.namespace,
                entry.job.table,
                entry.job.uuid,
                now_ms - round(entry.waited_s * 1000),
                now_ms + round(entry.due_in_s * 1000),
                entry.failures,
            )
            for entry in queue.list_next_jobs(WAITING_JOBS_LISTED_MAX)
        ]
        namespaces = queue.count_waiting_by_namespace()
        namespaces.subtract(job.namespace for job in waiting_jobs)
        unlisted_namespaces = sorted(+namespaces)  # The plus drops namespaces whose count is 0.
        return encode_state(
            JobsState(
                tuple(self),
                tuple(waiting_jobs),
                tuple(unlisted_namespaces[:NAMESPACES_LISTED_MAX]),
                more=len(unlisted_namespaces) > NAMESPACES_LISTED_MAX,
            )
        )


def encode_state(state: JobsState) -> str:
    """Encode a state as the replica with the lease writes it into the lease."""
    return msgspec.json.encode(state).decode()


async def load_jobs(store: PointerStore, now_ms: int) -> JobsState:
    """Load the jobs from the last renewal of the lease.

    The result is empty if no replica runs table services. If the state cannot be decoded, because the replica has a
    different version, the result states only that a replica holds the lease.
    """
    state = await store.lease_state(SERVICES, now_ms)
    try:
        return msgspec.structs.replace(convert_json(state, JobsState), is_held=True) if state else JobsState()
    except msgspec.DecodeError:
        return JobsState(is_held=True)


def compute_services_state(jobs: JobsState, status: ServicesStatus) -> ServicesState:
    """Return the state of the table services of all replicas.

    Args:
        jobs: The jobs from the lease of the table services, into which the replica that runs the jobs writes them.
        status: The status of this process, which is used while no replica holds the lease.
    """
    if jobs.is_held:
        return ServicesState(running=not jobs.problem, enabled=True, problem=jobs.problem or None)
    if not status.enabled:
        return ServicesState(running=False, enabled=False, problem=OFF)
    return ServicesState(running=False, enabled=True, problem=status.problem or NOT_STARTED)
