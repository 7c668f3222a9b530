"""Tests of the scheduler with a real store. One replica leads, changes cause jobs, and failed jobs are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import RECHECK_AFTER
from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.services.services import SERVICES
from seamark.metaserver.access.standing_rights import StandingRights
from seamark.metaserver.server import make_holder_name
from seamark.metaserver.services import job_queue, scheduler, watch
from seamark.metaserver.services.dependents import DEPENDENTS_MAX, PAIRS_PER_TENANT_MAX, DependentJobs
from seamark.metaserver.services.job import Job, JobFailed, JobProgress, Report
from seamark.metaserver.services.proposer import NEVER
from seamark.metaserver.services.running import JobSlots
from seamark.metaserver.services.runs import RunLog
from seamark.metaserver.services.scheduler import Scheduler
from seamark.metaserver.services.watch import TableWatch
from seamark.metaserver.store.lease import Lease
from seamark.metaserver.store.model import Entry
from tests.catalog.rig import SCHEMA
from tests.server.rig import RunningServer, run_server
from tests.waits import until


class EveryTable:
    """A table service that proposes a job for each table except `unwanted_tables`."""

    unwanted_tables: frozenset[str] | set[str] = frozenset()

    def __init__(self, name: str = "every-table", pause_s: float = 1.0, idle_pause_s: float | None = None) -> None:
        self.name, self.pause_s, self.idle_pause_s = name, pause_s, idle_pause_s

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        if entry.name in self.unwanted_tables:
            return None
        key = (self.name, entry.namespace, entry.name, entry.uuid)
        return Job(*key, pause_s=self.pause_s, idle_pause_s=self.idle_pause_s)

    def recheck_after_s(self, metadata: TableMetadata) -> float:
        return NEVER

    def list_source_tables(self, metadata: TableMetadata) -> frozenset[tuple[str, ...]]:
        return frozenset()


class DependentTable(EveryTable):
    """A table service that proposes a job for the table `facts`, which depends on `shops`."""

    def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
        return super().propose(entry, metadata) if entry.name == "facts" else None

    def list_source_tables(self, metadata: TableMetadata) -> frozenset[tuple[str, ...]]:
        return frozenset({("a", "shops")})


@dataclass
class ScriptedLauncher:
    """A launcher that records its jobs. It fails the first `failures` jobs, and each job takes `duration_s` seconds.

    Attributes:
        repeats: The number of jobs that request another run.
    """

    started_tables: list[str] = field(default_factory=list)
    failures: int = 0
    duration_s: float = 0.0
    stop_count: int = 0
    close_count: int = 0
    repeats: int = 0
    services: list[str] = field(default_factory=list)
    running_count: int = 0
    running_max: int = 0
    outcomes: list[str] = field(default_factory=list)
    reported_progress: JobProgress | None = None
    progress: list[tuple[str, int, int, int]] = field(default_factory=list)
    states: list[tuple[bool, bool]] = field(default_factory=list)

    async def run(self, job: Job, report: Report) -> dict[str, Any]:
        """Record the job, wait, and then fail, ask for a recheck or succeed as scripted."""
        self.started_tables.append(job.table)
        self.services.append(job.service)
        self.running_count += 1
        self.running_max = max(self.running_max, self.running_count)
        if self.reported_progress is not None:
            report(self.reported_progress)
        try:
            await asyncio.sleep(self.duration_s)
        except asyncio.CancelledError:
            self.stop_count += 1
            raise
        finally:
            self.running_count -= 1
        if self.failures:
            self.failures -= 1
            raise JobFailed("not now")
        if self.repeats:
            self.repeats -= 1
            return {RECHECK_AFTER: 0.01}
        return {}

    async def close(self) -> None:
        self.close_count += 1

    def find_launcher_name(self, job: Job) -> str:
        return "worker"

    def set_job_lag(self, service: str, lag_s: float, failing_count: int) -> None:
        pass

    def count_ended_job(self, service: str, outcome: str, seconds: float, totals: Mapping[str, Any]) -> None:
        self.outcomes.append(outcome)

    def set_queued_jobs(self, count: int) -> None:
        pass

    def set_services_state(self, *, leading: bool, blocked: bool) -> None:
        self.states.append((leading, blocked))

    def set_running_jobs(self, service: str, count: int, bytes_done: int, bytes_total: int) -> None:
        self.progress.append((service, count, bytes_done, bytes_total))


@asynccontextmanager
async def run_scheduler(
    server: RunningServer,
    launcher: ScriptedLauncher,
    lasts_s: float = 30.0,
    services: Sequence[EveryTable] = (),
    concurrent_jobs: int = 1,
    rights: StandingRights | None = None,
    slots: JobSlots | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Run a scheduler with its own lease on the server's tables, and cancel it at the end.

    Args:
        server: The server.
        launcher: Starts the jobs, and observes their progress.
        lasts_s: The length of the lease in seconds.
        services: The table services that propose jobs. The default is one job for every table.
        concurrent_jobs: The number of jobs that run at the same time.
        rights: The rights of the principals for which jobs run.
        slots: Limits the jobs of all schedulers.
    """
    components = server.components
    lease = Lease(components.store, components.clock, "services", make_holder_name(components.clock), lasts_s=lasts_s)
    tables = TableWatch(components.store, components.timeline, components.catalog.documents.peek, components.clock)
    runs = RunLog(components.store, components.timeline, components.clock)
    started_scheduler = Scheduler(
        services or [EveryTable()],
        [launcher] * concurrent_jobs,
        tables,
        components.timeline,
        runs,
        lease,
        components.clock,
        launcher,
        queue_limit=1000,
        rights=rights or StandingRights(components.store, components.clock, components.settings),
        slots=slots,
    )
    task = asyncio.create_task(started_scheduler.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def create_tables(server: RunningServer, namespace: str, *names: str) -> None:
    await server.http.post(f"{server.url}/v1/namespaces", json={"namespace": namespace.split("\x1f")})
    for name in names:
        path = f"{server.url}/v1/namespaces/{namespace.replace(chr(31), '%1F')}/tables"
        async with server.http.post(path, json={"name": name, "schema": SCHEMA}) as answer:
            assert answer.status == 200, await answer.text()


async def test_every_replica_lists_running_jobs_with_their_progress(tmp_path: Path) -> None:
    """The lease of the replica that runs the jobs contains them. They disappear when the lease ends."""
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "t1")

        async def list_entries(path: str, list_name: str = "jobs") -> list[dict[str, Any]]:
            async with server.http.get(f"{server.url}/api/v1/{path}") as answer:
                assert answer.status == 200, await answer.text()
                entries: list[dict[str, Any]] = (await answer.json())[list_name]
                return entries

        assert await list_entries("jobs") == []
        launcher = ScriptedLauncher(duration_s=60, reported_progress=JobProgress(3, 12, 1 << 20, 5 << 20))
        async with run_scheduler(server, launcher, lasts_s=0.3):
            # The renewal of the lease has published the progress.
            await until(lambda: ("every-table", 1, 1 << 20, 5 << 20) in launcher.progress)
            assert len(await list_entries("jobs")) == 1
            (job,) = await list_entries("tables/a/t1/jobs")
            assert (job["service"], job["namespace"], job["table"], job["launcher"]) == (
                "every-table",
                ["a"],
                "t1",
                "worker",
            )
            assert job["progress"] == {
                "files-done": 3,
                "files-total": 12,
                "bytes-done": 1 << 20,
                "bytes-total": 5 << 20,
            }
            environment = {"SEAMARK_URL": server.url}
            output = await asyncio.to_thread(CliRunner().invoke, cli, ["services", "a.t1"], env=environment)
            assert "running: 3 of 12 files, 1 MiB of 5 MiB (20 %)" in " ".join(output.output.split()), output.output
            await create_tables(server, "a", "t2")
            assert await list_entries("tables/a/t2/jobs") == []
            async with asyncio.timeout(60):
                # The next renewal has published this state.
                while not (waiting_entries := await list_entries("tables/a/t2/jobs", "waiting")):
                    await asyncio.sleep(0.05)
            assert [(job["service"], job["table"], job["failures"]) for job in waiting_entries] == [
                ("every-table", "t2", 0)
            ]
            assert await list_entries("jobs", "waiting") == waiting_entries
            output = await asyncio.to_thread(CliRunner().invoke, cli, ["services", "a.t2"], env=environment)
            assert "waiting, not before" in " ".join(output.output.split()), output.output
        assert await list_entries("jobs") == []
        assert await list_entries("jobs", "waiting") == []
        assert launcher.progress[-1] == ("every-table", 0, 0, 0)


async def test_existing_tables_of_all_namespaces_and_later_changes_are_examined(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "t1", "t2")
        await create_tables(server, "a\x1fdeep", "t3")
        await create_tables(server, "z", "t4")
        recorder = ScriptedLauncher()
        async with run_scheduler(server, recorder):
            await until(lambda: sorted(recorder.started_tables) == ["t1", "t2", "t3", "t4"])
            await create_tables(server, "z", "t5")
            await until(lambda: recorder.started_tables[4:] == ["t5"])
        assert set(recorder.outcomes) == {"completed"}


async def test_failed_job_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "BACKOFF_S", 0.05)
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "t")
        recorder = ScriptedLauncher(failures=2)
        async with run_scheduler(server, recorder):
            await until(lambda: recorder.outcomes == ["failed", "failed", "completed"])


async def test_worker_process_with_a_shared_slot_ends_after_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "IDLE_S", 1e6)
    recorder = ScriptedLauncher()
    async with run_server(tmp_path, services_workers=0) as server, run_scheduler(server, recorder, slots=JobSlots(1)):
        await create_tables(server, "db", "t")
        await until(lambda: recorder.close_count > 0)
        assert recorder.started_tables[0] == "t"


async def test_job_with_remaining_work_runs_again_without_a_change(tmp_path: Path) -> None:
    async with run_server(tmp_path, services_workers=0) as server:
        await create_tables(server, "db", "t")
        recorder = ScriptedLauncher(repeats=2)
        async with run_scheduler(server, recorder, services=[EveryTable(pause_s=0.01)]):
            await until(lambda: recorder.outcomes == ["completed"] * 3)


async def test_table_without_work_is_examined_again_soon(tmp_path: Path) -> None:
    async with run_server(tmp_path, services_workers=0) as server:
        await create_tables(server, "db", "t")
        recorder = ScriptedLauncher()
        async with run_scheduler(server, recorder, services=[EveryTable(pause_s=1e6, idle_pause_s=0.01)]):
            for examination_count in range(1, 4):
                await until(lambda expected_count=examination_count: len(recorder.outcomes) == expected_count)
                change = {
                    "requirements": [],
                    "updates": [{"action": "set-properties", "updates": {"n": str(examination_count)}}],
                }
                async with server.http.post(f"{server.url}/v1/namespaces/db/tables/t", json=change) as answer:
                    assert answer.status == 200, await answer.text()


async def test_services_that_rewrite_files_of_a_table_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_RETRY_S", 0.05)
    names = sorted(service.name for service in SERVICES.values() if service.rewrites_files)
    async with run_server(tmp_path, services_workers=0) as server:
        await create_tables(server, "db", "t")
        recorder = ScriptedLauncher(duration_s=0.05)
        async with run_scheduler(
            server, recorder, services=[EveryTable(name, pause_s=0.01) for name in names], concurrent_jobs=len(names)
        ):
            await until(lambda: set(recorder.services) == set(names))
        assert recorder.running_max == 1


async def test_one_replica_leads_and_another_takes_over_when_it_is_gone(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "t")
        first_launcher, second_launcher = ScriptedLauncher(duration_s=100), ScriptedLauncher()
        async with run_scheduler(server, first_launcher, lasts_s=4.0):
            await until(lambda: first_launcher.started_tables)
            async with run_scheduler(server, second_launcher, lasts_s=4.0):
                # This is longer than the lease, which is so long that even a busy machine renews it in time.
                await asyncio.sleep(4.5)
                assert (first_launcher.started_tables, second_launcher.started_tables) == (["t"], [])
        assert first_launcher.stop_count == 1
        async with run_scheduler(server, second_launcher, lasts_s=2.0):
            await until(lambda: second_launcher.started_tables == ["t"])


async def test_obsolete_job_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job fails once, and is repeated only if its table still exists and its policy still wants the job.

    The job of a dropped table is also not repeated for a new table with the same name, which has its own job.
    """
    monkeypatch.setattr(job_queue, "BACKOFF_S", 0.3)
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "disabled", "dropped", "replaced", "wanted")
        recorder = ScriptedLauncher(failures=4)
        async with run_scheduler(server, recorder):
            await until(lambda: len(recorder.outcomes) == 4)
            monkeypatch.setattr(EveryTable, "unwanted_tables", {"disabled"})
            for name in ("dropped", "replaced"):
                async with server.http.delete(f"{server.url}/v1/namespaces/a/tables/{name}") as answer:
                    assert answer.status == 204
            await create_tables(server, "a", "replaced")
            await until(lambda: sorted(recorder.started_tables[4:]) == ["replaced", "wanted"])
            await asyncio.sleep(1.0)  # Longer than the backoff, after which an obsolete job would be repeated.
        assert sorted(recorder.started_tables[4:]) == ["replaced", "wanted"]


async def test_table_with_unreadable_metadata_does_not_stop_jobs_of_other_tables(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "bad", "good")
        _, loaded_table = await server.get("/v1/namespaces/a/tables/bad")
        Path(loaded_table["metadata-location"].removeprefix("file://")).write_text("{")
    async with run_server(tmp_path) as server:  # The cache of this new server is empty.
        recorder = ScriptedLauncher()
        async with run_scheduler(server, recorder):
            await until(lambda: "good" in recorder.started_tables)
        assert "bad" not in recorder.started_tables


async def test_failure_caused_by_one_table_does_not_stop_jobs_of_other_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may trigger a bug of a service, or take over a worker process with a data file."""

    class FailingProposer(EveryTable):
        def propose(self, entry: Entry, metadata: TableMetadata) -> Job | None:
            if entry.name == "a-fault":
                raise RecursionError
            return super().propose(entry, metadata)

    class FailingRecorder(ScriptedLauncher):
        async def run(self, job: Job, report: Report) -> dict[str, Any]:
            result = await super().run(job, report)
            if job.table == "a-worker":
                raise RecursionError
            return {RECHECK_AFTER: "soon", "event": 1} if job.table == "an-answer" else result

    monkeypatch.setattr(job_queue, "BACKOFF_S", 0.01)
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "a-fault", "a-worker", "an-answer", "good")
        recorder = FailingRecorder()
        async with run_scheduler(server, recorder, services=[FailingProposer(pause_s=0.01)]) as leader:
            await until(lambda: "good" in recorder.started_tables)
            await until(lambda: recorder.started_tables.count("a-worker") > 1)
            assert not leader.done()
        assert "a-fault" not in recorder.started_tables
        assert "an-answer" in recorder.started_tables


async def test_sweep_over_many_tables_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop must serve requests, so after the first tables a sweep takes only a small share of its time."""
    monkeypatch.setattr(watch, "_TABLES_WITHOUT_PAUSE", 0)  # The sweep pauses from the first table on.
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", *(f"t{number}" for number in range(20)))
        components = server.components
        tables = TableWatch(components.store, components.timeline, components.catalog.documents.peek, components.clock)
        examined_names: list[str] = []
        sleeps_s: list[float] = []

        def record_and_never_recheck(entry: Entry, metadata: TableMetadata) -> float:
            examined_names.append(entry.name)
            return NEVER

        original_sleep, sweep = asyncio.sleep, asyncio.current_task()

        async def record_sleep(seconds: float) -> None:
            if asyncio.current_task() is sweep:
                sleeps_s.append(seconds)
            else:  # Other loops of the server must still sleep.
                await original_sleep(seconds)

        monkeypatch.setattr(asyncio, "sleep", record_sleep)
        began_s = components.clock.monotonic()
        assert await tables.examine_all(record_and_never_recheck) == 20
        busy_s = components.clock.monotonic() - began_s
        assert len(examined_names) == 20
        assert 0 < sum(sleeps_s) <= busy_s / watch._CPU_MAX_FRACTION


async def test_sweep_repeats_only_changed_or_waiting_tables(tmp_path: Path) -> None:
    """A table is checked again after a change of the table, of its name or of a namespace's policy.

    It is also checked again after a refusal.
    """
    async with run_server(tmp_path) as server:
        await create_tables(server, "a")
        await create_tables(server, "a\x1fdeep", "never", "changed", "renamed", "refused", "late")
        await create_tables(server, "z", "other")
        components, clock = server.components, SimulatedClock(1)
        read_paths: list[str] = []
        recheck_after_s = {"refused": 0.0, "late": 100.0}

        async def load(location: str) -> TableMetadata:
            read_paths.append(location)
            return await components.catalog.documents.peek(location)

        tables = TableWatch(components.store, components.timeline, load, clock)

        async def sweep_names() -> set[str]:
            names: set[str] = set()
            read_paths.clear()

            def record_and_plan_recheck(entry: Entry, metadata: TableMetadata) -> float:
                names.add(entry.name)
                return recheck_after_s.get(entry.name, NEVER)

            assert await tables.examine_all(record_and_plan_recheck) == len(read_paths) == len(names)
            return names

        async def post(path: str, body: dict[str, Any]) -> None:
            async with server.http.post(f"{server.url}/v1/{path}", json=body) as answer:
                assert answer.status < 300, await answer.text()

        assert len(await sweep_names()) == 6
        assert await sweep_names() == {"refused"}
        deep_filter = {"namespace": ["a", "deep"]}
        update = {"action": "set-properties", "updates": {"k": "v"}}
        await post("namespaces/a%1Fdeep/tables/changed", {"requirements": [], "updates": [update]})
        await post(
            "tables/rename",
            {"source": {**deep_filter, "name": "renamed"}, "destination": {**deep_filter, "name": "new"}},
        )
        assert await sweep_names() == {"refused", "changed", "new"}
        assert await sweep_names() == {"refused"}
        clock.advance(101_000)
        assert await sweep_names() == {"refused", "late"}
        await post("namespaces/a/properties", {"updates": {"seamark.compaction.enabled": "true"}, "removals": []})
        assert await sweep_names() == {"refused", "late", "never", "changed", "new"}
        tables.forget_due_times()
        assert len(await sweep_names()) == 6


async def test_change_of_a_table_causes_the_jobs_that_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep keeps the jobs of existing tables, and forgets those of dropped tables."""
    dependents = DependentJobs()
    job_counts: list[int] = []
    end_sweep = dependents.end_sweep

    def record_sweep() -> None:
        end_sweep()
        job_counts.append(len(list(dependents.list_jobs(("a", "shops")))))

    monkeypatch.setattr(dependents, "end_sweep", record_sweep)
    monkeypatch.setattr(scheduler, "DependentJobs", lambda: dependents)
    monkeypatch.setattr(scheduler, "SWEEP_S", 0.05)
    async with run_server(tmp_path) as server:
        await create_tables(server, "a", "facts", "other")
        recorder = ScriptedLauncher()
        async with run_scheduler(server, recorder, services=[DependentTable()]):
            await until(lambda: recorder.started_tables == ["facts"])
            await until(lambda: len(job_counts) > 2)
            assert set(job_counts) == {1}
            await create_tables(server, "a", "shops")
            await until(lambda: recorder.started_tables == ["facts", "facts"])
            async with server.http.delete(f"{server.url}/v1/namespaces/a/tables/facts") as answer:
                assert answer.status == 204
            await until(lambda: job_counts[-1] == 0)


def test_dependent_jobs_of_one_top_level_namespace_leave_room_for_others() -> None:
    dependents = DependentJobs()

    def record_job(namespace: str, number: int, table_count: int) -> int:
        """Record a job, and return the number of jobs that depend on its first table."""
        job = Job("indexing", (namespace,), "facts", f"{namespace}-{number}")
        dependents.record(job, {("d", f"{namespace}-{number}-{table}") for table in range(table_count)})
        return len(list(dependents.list_jobs(("d", f"{namespace}-{number}-0"))))

    job_count = 100
    assert DEPENDENTS_MAX == 4 * PAIRS_PER_TENANT_MAX
    dependent_counts = [
        record_job("greedy", number, PAIRS_PER_TENANT_MAX // job_count) for number in range(job_count + 1)
    ]
    assert dependent_counts == [1] * job_count + [0]
    assert record_job("other", 0, job_count) == 1
    dependents.forget(("indexing", "greedy-0"))
    assert record_job("greedy", job_count, job_count) == 1
    assert record_job("greedy", job_count + 1, PAIRS_PER_TENANT_MAX // job_count) == 0
