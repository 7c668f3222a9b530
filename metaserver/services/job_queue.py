"""The queue of jobs: one job per table and service, fair between tenants, with backoff after failures.

A tenant is a top-level namespace. The next job is from the tenant whose recent jobs have taken the least time. Among
the jobs of a tenant, priority decides, and then age. A tenant that had no jobs for some time gets no advantage from it.
So a tenant with thousands of tables delays only its own jobs.

The number of a tenant's waiting jobs is at most `_WAITING_JOBS_PER_FREE_PLACE` times the number of free places, so some
places always stay free for other tenants. A refused job is proposed again when its table is examined again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush, nsmallest

import msgspec

from seamark.metaserver.services.job import Job
from seamark.metaserver.store.model import NamespacePath

BACKOFF_S, BACKOFF_MAX_S = 5.0, 3600.0
"""The pauses after the first failure of a job and after many failures. Each failure doubles the pause."""
_BACKOFF_DOUBLINGS_MAX = 16
"""After this many doublings, the pause exceeds its maximum anyway. A larger power could overflow."""
_WAITING_JOBS_PER_FREE_PLACE = 4
_STARTED_S = 1.0
"""The time that a running job counts for its tenant, in seconds. When the job ends, its real duration counts."""
_WAIT_MIN_S = 0.01
"""The minimum time for which `take` waits, so that rounding of the due time causes no busy loop."""
_STALE_MIN = 1000
"""Stale items, and times of tenants without jobs, are removed only if there are more of them than this."""

Key = tuple[str, str]


class _Entry(msgspec.Struct):
    """A waiting job in the queue."""

    job: Job
    due_s: float
    order: int
    """The number of the job in the order of first proposals. Older jobs have lower numbers."""
    asked_s: float
    """The time of the first proposal."""
    item: int = 0
    """The number of the entry's valid item in the heap. Items with other numbers are stale."""


class QueuedJob(msgspec.Struct, frozen=True):
    """A waiting job.

    Attributes:
        waited_s: The time since the job was proposed, in seconds.
        due_in_s: The time until the job is due, in seconds. It is negative if the job has been due for some time.
        failures: The number of consecutive failed runs of the job.
    """

    job: Job
    waited_s: float
    due_in_s: float
    failures: int


class JobQueue:
    """The waiting and running jobs of a replica.

    The queue is fair: it takes the next job from the tenant whose jobs have run for the shortest time so far.

    An instance belongs to one event loop. `now` returns the monotonic time in seconds. `limit` is the maximum number of
    waiting jobs.
    """

    def __init__(self, now: Callable[[], float], *, limit: int) -> None:
        self._now = now
        self._limit = limit
        self._waiting: dict[Key, _Entry] = {}
        self._counts: Counter[str] = Counter()
        """The number of waiting jobs of each tenant."""
        self._running_since_s: dict[Key, float] = {}
        """The start time of each running job."""
        self._repeated_jobs: dict[Key, tuple[Job, float]] = {}
        """Jobs that were proposed while they ran, with the time at which they are due."""
        self._backoffs: dict[Key, tuple[float, int]] = {}
        """The earliest next start and the number of consecutive failures of ended jobs, as long as they matter."""
        self._delayed_heap: list[tuple[float, int, Key]] = []
        self._ready_heaps: dict[str, list[tuple[int, int, int, Key]]] = {}
        """The due jobs of each tenant, as heaps of (priority, order, item, key)."""
        self._run_s_by_tenant: dict[str, float] = {}
        """The time that each tenant's jobs have taken. A tenant that had no jobs starts with `_newest_run_s`."""
        self._newest_run_s = 0.0
        """The run time of the tenant that was served last, or of an earlier tenant if that is larger."""
        self._change_event = asyncio.Event()
        self._last_order = self._last_item = 0
        """The numbers of the newest job and of the newest item."""
        self._item_count = 0
        """The number of items in all heaps."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running_since_s)

    def count_waiting_by_namespace(self) -> Counter[NamespacePath]:
        """Return the number of jobs that wait in each namespace."""
        return Counter(entry.job.namespace for entry in self._waiting.values())

    def list_next_jobs(self, limit: int) -> list[QueuedJob]:
        """Return the next jobs: first the due jobs by priority and age, then the other jobs by due time.

        The real order may be different, because it alternates between tenants.
        """
        now_s = self._now()
        next_waiting = nsmallest(
            limit,
            self._waiting.items(),
            key=lambda key_and_entry: (
                max(key_and_entry[1].due_s, now_s),
                key_and_entry[1].job.priority,
                key_and_entry[1].order,
            ),
        )
        return [
            QueuedJob(entry.job, now_s - entry.asked_s, entry.due_s - now_s, self._backoffs.get(key, (0.0, 0))[1])
            for key, entry in next_waiting
        ]

    def measure_lags(self) -> dict[str, float]:
        """Return, by service, for how many seconds its longest waiting job has been due."""
        now_s = self._now()
        lags: dict[str, float] = {}
        for entry in self._waiting.values():
            lag_s = now_s - max(entry.asked_s, entry.due_s)
            if lag_s > lags.get(entry.job.service, 0.0):
                lags[entry.job.service] = lag_s
        return lags

    def count_failing(self) -> dict[str, int]:
        """Return, by service, the number of tables whose last job failed."""
        return Counter(service for (service, _), (_, failures) in self._backoffs.items() if failures)

    def put(self, job: Job, *, delay_s: float = 0.0) -> bool:
        """Add the job, or replace the waiting job of the same table and service.

        The job is due in `delay_s` seconds, or when the pause after its last run has ended, if that is later.

        Returns:
            False if the tenant has no free place.
        """
        key, due_s = job.key, self._now() + delay_s
        if key in self._running_since_s:
            # The job is running, and may not see the change that caused this proposal. So `finish` repeats it.
            self._repeated_jobs[key] = job, due_s
            return True
        # A job without a delay and a pause is due at time 0. So a second proposal does not change its due time.
        due_s = max(due_s if delay_s else 0.0, self._backoffs.get(key, (0.0, 0))[0])
        waiting_entry = self._waiting.get(key)
        if waiting_entry is not None:
            keeps_place = (waiting_entry.job.priority, waiting_entry.job.tenant, waiting_entry.due_s) == (
                job.priority,
                job.tenant,
                due_s,
            )
            if waiting_entry.job.tenant != job.tenant:
                self._change_waiting_count(waiting_entry.job, -1)
                self._change_waiting_count(job, 1)
            waiting_entry.job, waiting_entry.due_s = job, due_s
            if not keeps_place:
                self._push_item(waiting_entry)
            return True
        # The fewer places are free, the fewer jobs one tenant may have, so that there are places for other tenants.
        if self._counts[job.tenant] >= _WAITING_JOBS_PER_FREE_PLACE * (self._limit - len(self._waiting)):
            return False
        self._last_order += 1
        self._waiting[key] = entry = _Entry(job, due_s, self._last_order, self._now())
        self._change_waiting_count(job, 1)
        self._push_item(entry)
        return True

    def discard(self, key: Key) -> None:
        """Remove the waiting job with a key, or the planned repetition if the job is running."""
        waiting_entry = self._waiting.pop(key, None)
        if waiting_entry is not None:
            self._change_waiting_count(waiting_entry.job, -1)
        self._repeated_jobs.pop(key, None)

    async def take(self) -> Job:
        """Wait until a job is due, and return it.

        The caller calls `finish` when the job has ended.
        """
        while True:
            now = self._now()
            job = self._pop_due_job(now)
            if job is not None:
                del self._waiting[job.key]
                self._change_waiting_count(job, -1)
                self._running_since_s[job.key] = now
                # Charge the tenant now, so that its other jobs do not all start before this job ends.
                self._run_s_by_tenant[job.tenant] += _STARTED_S
                return job
            self._change_event.clear()
            next_due_s = self._delayed_heap[0][0] if self._delayed_heap else None
            try:
                async with asyncio.timeout(None if next_due_s is None else max(_WAIT_MIN_S, next_due_s - now)):
                    await self._change_event.wait()
            except TimeoutError:
                continue

    def finish(self, job: Job, *, failed: bool, idle: bool = False) -> float:
        """End a job that `take` returned, and return the seconds until it may run again.

        A failed job is due again after this pause. A job that was proposed while it ran is due after a pause that
        is at least as long as the job took.

        Args:
            idle: Whether the job had nothing to do.
        """
        now = self._now()
        took_s = now - self._running_since_s.pop(job.key)
        # `take` has charged the tenant with `_STARTED_S` in advance. Replace this amount by the real duration.
        self._run_s_by_tenant[job.tenant] = max(
            self._newest_run_s, self._run_s_by_tenant.get(job.tenant, self._newest_run_s) + took_s - _STARTED_S
        )
        failures = self._backoffs.get(job.key, (0.0, 0))[1] + 1 if failed else 0
        job_pause_s = job.idle_pause_s if idle and job.idle_pause_s is not None else job.pause_s
        pause_s = (
            min(BACKOFF_S * 2 ** min(failures - 1, _BACKOFF_DOUBLINGS_MAX), BACKOFF_MAX_S)
            if failed
            else max(job_pause_s, took_s)
        )
        self._forget_ended_pauses(now)
        self._backoffs[job.key] = (now + pause_s, failures)
        # A failed job is repeated even if it was not proposed again while it ran.
        repeated_job, due_s = self._repeated_jobs.pop(job.key, (job if failed else None, now))
        if repeated_job is not None:
            self.put(repeated_job, delay_s=max(0.0, due_s - now))
        return pause_s

    def check_invariants(self) -> None:
        """Assert that the queue is consistent, for tests."""
        counts = Counter(entry.job.tenant for entry in self._waiting.values())
        assert counts == self._counts
        stored_items = {(key, item) for _, item, key in self._delayed_heap}
        stored_items |= {(key, item) for heap in self._ready_heaps.values() for _, _, item, key in heap}
        assert all((key, entry.item) in stored_items for key, entry in self._waiting.items())
        assert len(stored_items) <= 2 * len(self._waiting) + _STALE_MIN + 1
        assert self._item_count == len(self._delayed_heap) + sum(map(len, self._ready_heaps.values()))
        assert not self._running_since_s.keys() & self._waiting.keys()

    def _change_waiting_count(self, job: Job, change: int) -> None:
        """Add `change` to the number of waiting jobs of the job's tenant."""
        self._counts[job.tenant] += change
        if not self._counts[job.tenant]:
            del self._counts[job.tenant]

    def _push_item(self, entry: _Entry) -> None:
        """Add an item for a waiting job to the heap of delayed jobs. An earlier item of the job becomes stale.

        If the heaps have too many items for the number of jobs, they are built again without the stale items.
        """
        self._last_item += 1
        entry.item = self._last_item
        heappush(self._delayed_heap, (entry.due_s, entry.item, entry.job.key))
        self._item_count += 1
        if self._item_count > 2 * len(self._waiting) + _STALE_MIN:
            self._rebuild_heaps()
        self._change_event.set()

    def _rebuild_heaps(self) -> None:
        """Build the heaps again without stale items. Each change of a waiting job leaves a stale item."""
        self._ready_heaps.clear()
        self._delayed_heap = [(entry.due_s, entry.item, key) for key, entry in self._waiting.items()]
        heapify(self._delayed_heap)
        self._item_count = len(self._delayed_heap)

    def _pop_due_job(self, now: float) -> Job | None:
        """Remove the next due job from the heaps, and return it, or None if no job is due.

        The job is from the tenant whose jobs have run for the shortest time, `_run_s_by_tenant`. Among the jobs of
        this tenant, the lowest priority number decides, then the age. Items of jobs that were changed or removed since
        (stale items) are skipped.

        Args:
            now: The monotonic time in seconds.
        """
        while self._delayed_heap and self._delayed_heap[0][0] <= now:
            _, item, key = heappop(self._delayed_heap)
            entry = self._waiting.get(key)
            if entry is not None and entry.item == item:
                tenant = entry.job.tenant
                # A tenant that had no jobs starts with the run time of the tenant that was served last. Otherwise its
                # own run time would be the shortest, and it would run all its jobs first.
                self._run_s_by_tenant[tenant] = max(self._newest_run_s, self._run_s_by_tenant.get(tenant, 0.0))
                heappush(self._ready_heaps.setdefault(tenant, []), (entry.job.priority, entry.order, item, key))
            else:
                self._item_count -= 1
        while self._ready_heaps:
            tenant = min(
                self._ready_heaps, key=lambda tenant: (self._run_s_by_tenant[tenant], self._ready_heaps[tenant][0][:2])
            )
            heap = self._ready_heaps[tenant]
            _, _, item, key = heappop(heap)
            self._item_count -= 1
            if not heap:
                del self._ready_heaps[tenant]
            entry = self._waiting.get(key)
            if entry is not None and entry.item == item:
                self._newest_run_s = max(self._newest_run_s, self._run_s_by_tenant[tenant])
                return entry.job
        return None

    def fail(self, job: Job) -> None:
        """End a job that `take` returned, with a failure, unless the job has already ended."""
        if job.key in self._running_since_s:
            self.finish(job, failed=True)

    def _forget_ended_pauses(self, now_s: float) -> None:
        """Forget pauses that have ended, and tenants without jobs, if there are many of them.

        `now_s` is the monotonic time in seconds.

        A tenant without jobs is kept while its jobs have run for longer than those of the tenant that was served last
        (`_newest_run_s`). Otherwise it would start again with a shorter time, and get more than its share.
        """
        if len(self._backoffs) >= self._limit:
            self._backoffs = {key: backoff for key, backoff in self._backoffs.items() if backoff[0] > now_s}
        if len(self._run_s_by_tenant) > 2 * len(self._counts) + _STALE_MIN:
            tenants_with_jobs = {*self._ready_heaps, *self._counts}
            self._run_s_by_tenant = {
                tenant: served_s
                for tenant, served_s in self._run_s_by_tenant.items()
                if tenant in tenants_with_jobs or served_s > self._newest_run_s
            }
