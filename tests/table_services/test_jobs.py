"""The queue of jobs: each table and service has one job at a time, failed ones wait longer each time."""

from __future__ import annotations

import asyncio
import random

from seamark.metaserver.services.jobs import BACKOFF_MAX_S, BACKOFF_S, QUEUE_MAX, JobQueue
from seamark.metaserver.services.service import Job


class Now:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def a_job(table: str, priority: int = 5, service: str = "indexing") -> Job:
    return Job(service, ("db",), table, f"uuid-of-{table}", priority)


async def taken(queue: JobQueue) -> Job | None:
    try:
        async with asyncio.timeout(0.05):
            return await queue.take()
    except TimeoutError:
        return None


async def test_jobs_run_by_priority_and_then_by_age() -> None:
    queue = JobQueue(Now())
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", 1)):
        assert queue.put(a_job(name, priority))
    assert [(await queue.take()).table for _ in range(4)] == ["b", "d", "a", "c"]


async def test_a_job_that_is_proposed_while_it_runs_runs_once_more_after_a_pause() -> None:
    now = Now()
    queue = JobQueue(now)
    queue.put(a_job("t"))
    job = await queue.take()
    queue.put(a_job("t"))
    queue.put(a_job("t"))
    assert await taken(queue) is None
    now.s = 7.0
    assert queue.finish(job, failed=False) == 7.0
    assert await taken(queue) is None
    now.s = 14.0
    assert await taken(queue) == job
    assert await taken(queue) is None


async def test_failed_jobs_wait_twice_as_long_each_time_until_one_succeeds() -> None:
    now = Now()
    queue = JobQueue(now)
    queue.put(a_job("t"))
    pauses = []
    for _ in range(12):
        job = await queue.take()
        pauses.append(queue.finish(job, failed=True))
        assert await taken(queue) is None
        now.s += pauses[-1]
    assert pauses == [min(BACKOFF_S * 2**number, BACKOFF_MAX_S) for number in range(12)]
    queue.finish(await queue.take(), failed=False)
    assert len(queue) == 0
    queue.put(a_job("t"))
    now.s += 100
    assert queue.finish(await queue.take(), failed=True) == BACKOFF_S


async def test_a_change_does_not_end_the_backoff_of_a_failing_job() -> None:
    now = Now()
    queue = JobQueue(now)
    queue.put(a_job("t"))
    queue.finish(await queue.take(), failed=True)
    queue.put(a_job("t"))
    assert await taken(queue) is None
    now.s += BACKOFF_S
    assert await taken(queue) is not None


async def test_the_queue_is_bounded_and_refuses_what_is_beyond() -> None:
    queue = JobQueue(Now())
    assert all(queue.put(a_job(f"t{number}")) for number in range(QUEUE_MAX))
    assert not queue.put(a_job("one more"))
    assert queue.put(a_job("t7", priority=0))
    assert (await queue.take()).table == "t7"


async def test_random_histories_lose_no_proposal_and_run_no_job_twice_at_once() -> None:
    """Whatever is proposed after a job began is followed by a run that began later."""
    rng = random.Random(20)
    now = Now()
    queue = JobQueue(now)
    unseen: set[str] = set()
    running: dict[str, Job] = {}
    for _ in range(3000):
        now.s += rng.random() * 2
        step = rng.random()
        if step < 0.4:
            name = f"t{rng.randrange(12)}"
            queue.put(a_job(name))
            unseen.add(name)
        elif step < 0.7 and len(running) < 3:
            if any(name not in running for name in unseen):
                job = await taken(queue)
                if job is not None:
                    assert job.table not in running
                    running[job.table] = job
                    unseen.discard(job.table)
        elif running:
            name = rng.choice(sorted(running))
            failed = rng.random() < 0.3
            queue.finish(running.pop(name), failed=failed)
            if failed:
                unseen.add(name)
    for job in running.values():
        queue.finish(job, failed=False)
    now.s += 10 * BACKOFF_MAX_S
    while unseen:
        job = await taken(queue)
        assert job is not None, unseen
        unseen.discard(job.table)
        queue.finish(job, failed=False)
        now.s += 10
    assert len(queue) == 0
