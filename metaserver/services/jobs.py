"""The queue of jobs: one per table and service, by priority and age, with backoff after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from seamark.metaserver.services.service import Job

QUEUE_MAX = 20_000
BACKOFF_S, BACKOFF_MAX_S = 5.0, 3600.0

Key = tuple[str, str]


class _Entry(msgspec.Struct):
    job: Job
    due_s: float
    order: int


class JobQueue:
    """Belongs to one event loop. `now`: monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._waiting: dict[Key, _Entry] = {}
        self._running: dict[Key, float] = {}
        """When each running job began."""
        self._repeated: dict[Key, Job] = {}
        """Jobs that were proposed while they ran."""
        self._resting: dict[Key, tuple[float, int]] = {}
        """(not before, failures in a row) of jobs that ended, until both are without effect."""
        self._changed = asyncio.Event()
        self._orders = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def put(self, job: Job) -> bool:
        """Adds the job, or replaces the waiting one of the same table and service. False when the queue is full."""
        key = job.key
        if key in self._running:
            self._repeated[key] = job
            return True
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.job = job
            return True
        if len(self._waiting) >= QUEUE_MAX:
            return False
        self._orders += 1
        due_s = self._resting.get(key, (0.0, 0))[0]
        self._waiting[key] = _Entry(job, due_s, self._orders)
        self._changed.set()
        return True

    def discard(self, key: Key) -> None:
        """Removes a waiting job, and the repeat of a running one."""
        self._waiting.pop(key, None)
        self._repeated.pop(key, None)

    async def take(self) -> Job:
        """Waits for a job that is due. The caller calls `finish` for it."""
        while True:
            now = self._now()
            due = [entry for entry in self._waiting.values() if entry.due_s <= now]
            if due:
                chosen = min(due, key=lambda entry: (entry.job.priority, entry.order)).job
                del self._waiting[chosen.key]
                self._running[chosen.key] = now
                return chosen
            self._changed.clear()
            first_s = min((entry.due_s for entry in self._waiting.values()), default=None)
            try:
                async with asyncio.timeout(None if first_s is None else max(0.01, first_s - now)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def finish(self, job: Job, *, failed: bool) -> float:
        """Ends a job that `take` returned. A failed one is due again after the returned seconds; so is one that was
        proposed meanwhile, after a pause at least as long as the job took."""
        now = self._now()
        took_s = now - self._running.pop(job.key)
        failures = self._resting.get(job.key, (0.0, 0))[1] + 1 if failed else 0
        pause_s = min(BACKOFF_S * 2 ** (failures - 1), BACKOFF_MAX_S) if failed else max(job.pause_s, took_s)
        self._forget_rested(now)
        self._resting[job.key] = (now + pause_s, failures)
        again = self._repeated.pop(job.key, job if failed else None)
        if again is not None:
            self.put(again)
        return pause_s

    def _forget_rested(self, now: float) -> None:
        if len(self._resting) >= QUEUE_MAX:
            self._resting = {key: rest for key, rest in self._resting.items() if rest[0] > now}
