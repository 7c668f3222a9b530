"""The scheduler over a real store: one replica leads, changes lead to jobs, failed jobs are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.server import new_holder
from seamark.metaserver.services import jobs, watch
from seamark.metaserver.services.runs import RunLog
from seamark.metaserver.services.scheduler import Scheduler
from seamark.metaserver.services.service import Job, JobFailed
from seamark.metaserver.services.watch import TableWatch
from seamark.metaserver.store.lease import Lease
from seamark.metaserver.store.model import Entry
from tests.catalog.rig import SCHEMA
from tests.server.rig import Running, running
from tests.waits import until


class EveryTable:
    name = "every-table"
    unwanted: frozenset[str] | set[str] = frozenset()

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        if entry.name in self.unwanted:
            return None
        return Job(self.name, entry.namespace, entry.name, entry.uuid)


@dataclass
class Recorder:
    """A launcher that records its jobs, fails the first `failures`, and takes `takes_s`."""

    ran: list[str] = field(default_factory=list)
    failures: int = 0
    takes_s: float = 0.0
    stopped: int = 0
    outcomes: list[str] = field(default_factory=list)

    async def run(self, job: Job) -> dict[str, Any]:
        self.ran.append(job.table)
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        if self.failures:
            self.failures -= 1
            raise JobFailed("not now")
        return {}

    async def close(self) -> None:
        pass

    def job_ended(self, service: str, outcome: str, seconds: float) -> None:
        self.outcomes.append(outcome)

    def jobs_queued(self, count: int) -> None:
        pass


@asynccontextmanager
async def scheduled(server: Running, recorder: Recorder, lasts_s: float = 30.0) -> AsyncIterator[asyncio.Task[None]]:
    parts = server.parts
    lease = Lease(parts.store, parts.clock, "services", new_holder(parts.clock), lasts_s=lasts_s)
    tables = TableWatch(parts.store, parts.timeline, parts.catalog.documents.table, parts.clock)
    runs = RunLog(parts.store, parts.timeline, parts.clock)
    scheduler = Scheduler([EveryTable()], [recorder], tables, parts.timeline, runs, lease, parts.clock, recorder)
    task = asyncio.create_task(scheduler.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def create(server: Running, namespace: str, *names: str) -> None:
    await server.http.post(f"{server.url}/v1/namespaces", json={"namespace": namespace.split("\x1f")})
    for name in names:
        path = f"{server.url}/v1/namespaces/{namespace.replace(chr(31), '%1F')}/tables"
        async with server.http.post(path, json={"name": name, "schema": SCHEMA}) as answer:
            assert answer.status == 200, await answer.text()


async def test_existing_tables_of_all_namespaces_and_later_changes_are_examined(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        await create(server, "a", "t1", "t2")
        await create(server, "a\x1fdeep", "t3")
        await create(server, "z", "t4")
        recorder = Recorder()
        async with scheduled(server, recorder):
            await until(lambda: sorted(recorder.ran) == ["t1", "t2", "t3", "t4"])
            await create(server, "z", "t5")
            await until(lambda: recorder.ran[4:] == ["t5"])
        assert set(recorder.outcomes) == {"completed"}


async def test_a_failed_job_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "BACKOFF_S", 0.05)
    async with running(tmp_path) as server:
        await create(server, "a", "t")
        recorder = Recorder(failures=2)
        async with scheduled(server, recorder):
            await until(lambda: recorder.outcomes == ["failed", "failed", "completed"])


async def test_one_replica_leads_and_another_takes_over_when_it_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        await create(server, "a", "t")
        first, second = Recorder(takes_s=100), Recorder()
        async with scheduled(server, first, lasts_s=0.6):
            await until(lambda: first.ran)
            async with scheduled(server, second, lasts_s=0.6):
                await asyncio.sleep(1.0)
                assert (first.ran, second.ran) == (["t"], [])
        assert first.stopped == 1
        async with scheduled(server, second, lasts_s=0.6):
            await until(lambda: second.ran == ["t"])


async def test_a_job_that_is_no_longer_wanted_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy has changed, the table was dropped, or another has its name: also a failed job is not repeated."""
    monkeypatch.setattr(jobs, "BACKOFF_S", 0.3)
    async with running(tmp_path) as server:
        await create(server, "a", "disabled", "dropped", "replaced", "wanted")
        recorder = Recorder(failures=4)
        async with scheduled(server, recorder):
            await until(lambda: len(recorder.outcomes) == 4)
            monkeypatch.setattr(EveryTable, "unwanted", {"disabled"})
            for name in ("dropped", "replaced"):
                async with server.http.delete(f"{server.url}/v1/namespaces/a/tables/{name}") as answer:
                    assert answer.status == 204
            await create(server, "a", "replaced")
            await until(lambda: sorted(recorder.ran[4:]) == ["replaced", "wanted"])
            await asyncio.sleep(1.0)
        assert sorted(recorder.ran[4:]) == ["replaced", "wanted"]


async def test_a_table_with_unreadable_metadata_does_not_stop_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        await create(server, "a", "bad", "good")
        _, loaded = await server.get("/v1/namespaces/a/tables/bad")
        Path(loaded["metadata-location"].removeprefix("file://")).write_text("{")
    async with running(tmp_path) as server:  # whose cache is empty
        recorder = Recorder()
        async with scheduled(server, recorder):
            await until(lambda: "good" in recorder.ran)
        assert "bad" not in recorder.ran


async def test_a_look_at_many_tables_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop belongs to requests: beyond the first tables, a sweep takes a small share of its time."""
    monkeypatch.setattr(watch, "_FREE_TABLES", 0)
    async with running(tmp_path) as server:
        await create(server, "a", *(f"t{number}" for number in range(20)))
        parts = server.parts
        tables = TableWatch(parts.store, parts.timeline, parts.catalog.documents.table, parts.clock)
        seen: list[str] = []
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        monkeypatch.setattr(asyncio, "sleep", sleep)
        began_s = parts.clock.monotonic()
        assert await tables.sweep(lambda entry, metadata: seen.append(entry.name)) == 20
        busy_s = parts.clock.monotonic() - began_s
        assert len(seen) == 20
        assert 0 < sum(slept) <= busy_s / 0.02
