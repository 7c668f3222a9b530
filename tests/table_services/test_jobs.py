"""Tests of the job queue: one job for each table and service at a time, and growing pauses after failures."""

from __future__ import annotations

import asyncio
import heapq
import random
from typing import Any

import pytest

from seamark.metaserver.services import job_queue
from seamark.metaserver.services.job import Job
from seamark.metaserver.services.job_queue import BACKOFF_MAX_S, BACKOFF_S, JobQueue

QUEUE_LIMIT = 20_000


class JobClock:
    """A clock in seconds, which tests set."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def build_job(table: str, priority: int = 5, service: str = "indexing", tenant: str = "db") -> Job:
    return Job(service, (tenant,), table, f"uuid-of-{table}", priority)


async def take_job(queue: JobQueue) -> Job | None:
    """Return the next job, or None if none is due within 0.05 seconds."""
    try:
        async with asyncio.timeout(0.05):
            return await queue.take()
    except TimeoutError:
        return None


async def test_jobs_run_by_priority_and_then_by_age() -> None:
    queue = JobQueue(JobClock(), limit=QUEUE_LIMIT)
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", 1)):
        assert queue.put(build_job(name, priority))
    assert [(await queue.take()).table for _ in range(4)] == ["b", "d", "a", "c"]


async def test_job_proposed_while_it_runs_runs_again_after_a_pause() -> None:
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    queue.put(build_job("t"))
    job = await queue.take()
    queue.put(build_job("t"))
    queue.put(build_job("t"))
    assert await take_job(queue) is None
    now.s = 7.0
    assert queue.finish(job, failed=False) == 7.0
    assert await take_job(queue) is None
    now.s = 14.0
    assert await take_job(queue) == job
    assert await take_job(queue) is None


async def test_pause_after_a_job_without_work_is_shorter() -> None:
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    manifest_job = Job("manifests", ("db",), "t", "uuid", pause_s=600.0, idle_pause_s=60.0)
    for is_idle, pause_s in ((True, 60.0), (False, 600.0)):
        queue.put(manifest_job)
        assert queue.finish(await queue.take(), failed=False, idle=is_idle) == pause_s
        queue.put(manifest_job)
        now.s += pause_s - 1
        assert await take_job(queue) is None
        now.s += 1
        assert queue.finish(await queue.take(), failed=False, idle=is_idle) == pause_s
        now.s += pause_s
    queue.put(build_job("t"))
    assert queue.finish(await queue.take(), failed=False, idle=True) == 1.0


async def test_pause_of_a_failing_job_doubles_until_it_succeeds() -> None:
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    queue.put(build_job("t"))
    pauses = []
    for _ in range(12):
        job = await queue.take()
        pauses.append(queue.finish(job, failed=True))
        assert await take_job(queue) is None
        now.s += pauses[-1]
    assert pauses == [min(BACKOFF_S * 2**number, BACKOFF_MAX_S) for number in range(12)]
    queue.finish(await queue.take(), failed=False)
    assert len(queue) == 0
    queue.put(build_job("t"))
    now.s += 100
    assert queue.finish(await queue.take(), failed=True) == BACKOFF_S


async def test_change_does_not_end_the_pause_of_a_failing_job() -> None:
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    queue.put(build_job("t"))
    queue.finish(await queue.take(), failed=True)
    queue.put(build_job("t"))
    assert await take_job(queue) is None
    now.s += BACKOFF_S
    assert await take_job(queue) is not None


async def test_next_jobs_are_listed_by_due_time_priority_and_age() -> None:
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    queue.put(build_job("failing"))
    queue.finish(await queue.take(), failed=True)
    for name, priority, delay_s in (("late", 0, 60.0), ("old", 5, 0.0), ("new", 5, 0.0), ("urgent", 1, 0.0)):
        queue.put(build_job(name, priority=priority), delay_s=delay_s)
        now.s += 1
    next_jobs = queue.list_next_jobs(10)
    assert [item.job.table for item in next_jobs] == ["urgent", "old", "new", "failing", "late"]
    assert [item.failures for item in next_jobs] == [0, 0, 0, 1, 0]
    assert (next_jobs[1].waited_s, next_jobs[3].due_in_s, next_jobs[4].due_in_s) == (3, BACKOFF_S - 4, 56)
    assert queue.list_next_jobs(2) == next_jobs[:2]
    assert queue.count_waiting_by_namespace().total() == 5


async def test_one_tenant_cannot_use_all_places_of_the_queue() -> None:
    queue = JobQueue(JobClock(), limit=100)
    is_accepted = [queue.put(build_job(f"t{number}")) for number in range(200)]
    # One tenant can use 80 % of the places of the queue.
    assert is_accepted == [True] * 80 + [False] * 120
    assert queue.put(build_job("t7", priority=0))  # The job is already in the queue.
    for tenant in ("x", "y", "z"):
        assert queue.put(build_job(f"of {tenant}", tenant=tenant))
    assert len(queue) == 83
    assert (await queue.take()).table == "t7"
    queue.check_invariants()


@pytest.mark.slow
async def test_tenant_with_thousands_of_jobs_does_not_delay_one_with_a_single_job() -> None:
    """While several tenants have waiting jobs, each tenant gets the same running time, not the same number of jobs."""
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    job_seconds = {"large": 1.0, "slow": 10.0, "small": 1.0}
    for number in range(3000):
        queue.put(build_job(f"large {number}", tenant="large"))
    for number in range(40):
        queue.put(build_job(f"slow {number}", tenant="slow"))
    spent_seconds = dict.fromkeys(job_seconds, 0.0)
    for round_number in range(220):
        if round_number == 50:  # The other tenants already share the time.
            queue.put(build_job("small", tenant="small"))
        job = await queue.take()
        if round_number in (50, 51) and job.tenant == "small":
            spent_seconds["small"] += 1
        now.s += job_seconds[job.tenant]
        spent_seconds[job.tenant] += 0 if job.tenant == "small" else job_seconds[job.tenant]
        queue.finish(job, failed=False)
        queue.check_invariants()
    assert spent_seconds["small"] == 1  # The job of the small tenant runs in the first or second turn.
    # The times may differ by two jobs of the slow tenant.
    assert abs(spent_seconds["large"] - spent_seconds["slow"]) <= 2 * job_seconds["slow"]


@pytest.mark.slow
async def test_cost_of_the_queue_grows_little_with_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test counts heap operations, each of which has logarithmic cost, for 10,000 tables with three services."""
    operation_counts = {"push": 0, "pop": 0}

    def push(heap: list[Any], item: Any) -> None:
        operation_counts["push"] += 1
        heapq.heappush(heap, item)

    def pop(heap: list[Any]) -> Any:
        operation_counts["pop"] += 1
        return heapq.heappop(heap)

    monkeypatch.setattr(job_queue, "heappush", push)
    monkeypatch.setattr(job_queue, "heappop", pop)
    queue = JobQueue(JobClock(), limit=50_000)
    table_count = 10_000
    services = ("indexing", "compaction", "expiration")
    job_count = table_count * len(services)
    for _ in range(3):  # In the second and third rounds, each job is already in the queue.
        for number in range(table_count):
            for service in services:
                assert queue.put(build_job(f"t{number}", service=service))
    assert operation_counts == {"push": job_count, "pop": 0}
    for _ in range(job_count):
        queue.finish(await queue.take(), failed=False)
    # Each job is in two heaps, first in that of delayed jobs and then in that of due jobs.
    assert operation_counts["pop"] == operation_counts["push"] == 2 * job_count
    assert len(queue) == 0


async def test_lag_is_the_delay_of_the_most_overdue_job_and_failing_tables_are_counted() -> None:
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    queue.put(build_job("a"))
    now.s = 10.0
    queue.put(build_job("b"))
    queue.put(build_job("c", service="compaction"), delay_s=5.0)
    assert queue.measure_lags() == {"indexing": 10.0}
    now.s = 17.0
    assert queue.measure_lags() == {"indexing": 17.0, "compaction": 2.0}
    queue.finish(await queue.take(), failed=True)
    assert queue.count_failing() == {"indexing": 1}
    # The failed job is not due yet, so it does not count.
    assert queue.measure_lags() == {
        "indexing": 7.0,
        "compaction": 2.0,
    }


async def test_random_histories_lose_no_proposal_and_run_no_job_concurrently_with_itself() -> None:
    """After each proposal, a run starts. If the job was already running, it runs again."""
    rng = random.Random(20)
    now = JobClock()
    queue = JobQueue(now, limit=QUEUE_LIMIT)
    proposed_tables: set[str] = set()
    running_jobs: dict[str, Job] = {}
    for _ in range(3000):
        now.s += rng.random() * 2
        draw = rng.random()
        if draw < 0.4:
            name = f"t{rng.randrange(12)}"
            queue.put(build_job(name, rng.randrange(3)), delay_s=rng.choice((0.0, 0.0, 5.0)))
            proposed_tables.add(name)
        elif draw < 0.7 and len(running_jobs) < 3:
            if any(name not in running_jobs for name in proposed_tables):
                job = await take_job(queue)
                if job is not None:
                    assert job.table not in running_jobs
                    running_jobs[job.table] = job
                    proposed_tables.discard(job.table)
        elif running_jobs:
            name = rng.choice(sorted(running_jobs))
            has_failed = rng.random() < 0.3
            queue.finish(running_jobs.pop(name), failed=has_failed)
            if has_failed:
                proposed_tables.add(name)
        queue.check_invariants()
    for job in running_jobs.values():
        queue.finish(job, failed=False)
    now.s += 10 * BACKOFF_MAX_S  # From now on, each failed job is due.
    while proposed_tables:
        job = await take_job(queue)
        assert job is not None, proposed_tables
        proposed_tables.discard(job.table)
        queue.finish(job, failed=False)
        now.s += 10
    assert len(queue) == 0
