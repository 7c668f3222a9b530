"""What does it cost a server with 10,000 tables to decide which of them need work?

The metadata of the tables is like that of real tables: each has some snapshots, an index, and policies for compaction
and expiration. The scheduler checks them at its own rate, and puts jobs into its queue. No job runs.
"""

from __future__ import annotations

import asyncio
import resource
import time
from contextlib import suppress
from pathlib import Path

from bench.report import OURS, Report, Row
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.catalog.pointers import make_entry
from seamark.metaserver.services.budgets import apply_window_and_priority, compute_window_wait_s
from seamark.metaserver.services.job_queue import JobQueue
from seamark.metaserver.services.proposer import NEVER, JobProposer
from seamark.metaserver.services.proposers import (
    Compaction,
    Indexing,
    OrphanFileRemoval,
    SnapshotExpiration,
    TableClustering,
)
from seamark.metaserver.services.watch import TableWatch
from seamark.metaserver.store.model import Entry, EntryKind
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace
from tests.api.client import Api
from tests.commits.lake import CommitTable
from tests.server.rig import RunningServer, run_server

TABLES, NAMESPACES, SNAPSHOTS = 10_000, 100, 20
QUICK_TABLES = 300
SECONDS, QUICK_SECONDS = 60.0, 2.0
PROPERTIES = {
    "seamark.index.by_id": "bloom(id)",
    "seamark.compaction.enabled": "true",
    "seamark.expiration.enabled": "true",
    "history.expire.max-snapshot-age-ms": "1",
}
GOAL_S = 1.0


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("writing_decisions", "What does it cost a server of many tables to decide which of them need work?")
    report.peer = "none"
    tables, seconds = (QUICK_TABLES, QUICK_SECONDS) if quick else (TABLES, SECONDS)
    async with run_server(folder, services_workers=0, log_level="warning") as server:
        await _create_tables(server, tables)
        before_bytes = _read_peak_bytes()
        cpu_s, tables_in_time, jobs = await _ScheduledTables(server).check(seconds)
        scheduled_tables = _ScheduledTables(server)
        first_check_s, _, all_jobs = await scheduled_tables.check(None)
        grown_bytes = _read_peak_bytes() - before_bytes
        second_check_s, checked_tables, _ = await scheduled_tables.check(None)
    case = f"{tables:,} tables"
    report.rows += [
        Row(case, "CPU in the first minute", "s", {OURS: cpu_s}, goal=GOAL_S),
        Row(
            case,
            "time to check all tables at this rate",
            "min",
            {OURS: tables / tables_in_time * seconds / 60},
            goal=60,
        ),
        Row(case, "CPU of the first check of all tables after a start", "s", {OURS: first_check_s}),
        Row(case, "CPU of a check without changes", "s", {OURS: second_check_s}),
        Row(case, "growth of the peak of memory", "MB", {OURS: grown_bytes / 1e6}),
        Row(case, "jobs in the queue", "", {OURS: all_jobs}),
    ]
    report.notes += [
        f"In the first {seconds:g} s, {tables_in_time:,} tables were checked and {jobs:,} jobs queued.",
        f"The check without changes reads the names of all tables, and the metadata of {checked_tables:,}.",
        f"Each table has {SNAPSHOTS} snapshots and a metadata file of its own, which a check reads and decodes.",
    ]
    return report


async def _create_tables(server: RunningServer, tables: int) -> None:
    """Create tables whose metadata files are like those of real tables."""
    lake = await CommitTable.create(Api(server), "sample", **PROPERTIES)
    for number in range(SNAPSHOTS):
        await lake.append([(number, 0, "a")])
    sample_entry = await server.components.store.load_entry(EntryKind.TABLE, ("db",), "sample")
    assert sample_entry is not None
    text = Path(sample_entry.metadata_location.removeprefix("file://")).read_text()
    folder = lake.folder.parent / "copies"
    folder.mkdir()
    await server.components.store.transact([CreateNamespace(path=(f"n{n}",), properties={}) for n in range(NAMESPACES)])
    batch = []
    for number in range(tables):
        uuid = str(server.components.clock.uuid4())
        path = folder / f"{number}.metadata.json"
        path.write_text(text.replace(sample_entry.uuid, uuid))
        entry = make_entry((f"n{number % NAMESPACES}",), f"t{number}", uuid, f"file://{path}", 0)
        batch.append(CreateEntry(entry=entry))
        if len(batch) == 500 or number == tables - 1:
            await server.components.store.transact(batch)
            batch = []


class _ScheduledTables:
    """The tables of a server, with the watch and the queue of a scheduler."""

    def __init__(self, server: RunningServer) -> None:
        parts, settings = server.components, server.components.settings
        self._clock = parts.clock
        self._services: list[JobProposer] = [
            proposer(settings, parts.clock)
            for proposer in (Indexing, TableClustering, Compaction, SnapshotExpiration, OrphanFileRemoval)
        ]
        self._queue = JobQueue(parts.clock.monotonic, limit=10 * TABLES)
        self._watch = TableWatch(parts.store, parts.timeline, parts.catalog.documents.peek, parts.clock)
        self._checked_tables = 0

    async def check(self, seconds: float | None) -> tuple[float, int, int]:
        """Check tables for some seconds, or all tables without pauses.

        Returns:
            The CPU seconds, the number of tables, and the number of jobs in the queue.
        """
        began_s, self._checked_tables = time.process_time(), 0
        if seconds is None:
            await self._watch.examine_all(self._check_table, pause=False)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._watch.examine_all(self._check_table)
        return time.process_time() - began_s, self._checked_tables, len(self._queue)

    def _check_table(self, entry: Entry, metadata: TableMetadata) -> float:
        self._checked_tables += 1
        recheck_after_s = NEVER
        for service in self._services:
            recheck_after_s = min(recheck_after_s, service.recheck_after_s(metadata))
            job = service.propose(entry, metadata)
            if job is not None:
                job = apply_window_and_priority(job, metadata.properties)
                self._queue.put(job, delay_s=compute_window_wait_s(job.window, self._clock.now_ms()))
        return recheck_after_s


def _read_peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
