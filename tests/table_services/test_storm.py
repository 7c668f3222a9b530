"""A storm: writers of all kinds, readers, schema and partition changes, and all table services at full speed.

Processes of services are killed at random. Every snapshot that a reader opens must agree with the writers' records.
Each writer has its own keys. With each upsert, it also writes the number of its step into a separate row. So a snapshot
shows the step of each writer, and what it must contain.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import LongType

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import InvalidRequest, NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.jobs.server_jobs import expire, remove_orphan_files
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from seamark.connector.write.buckets import resize
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.connector.write.upserts import MODES, delete, upsert
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.metaserver.commit.engine_commits.rebase import PROPERTY as REBASE
from tests.connector.jobs.test_expiration import list_needed_files, list_stored_files, to_path
from tests.connector.write.test_compaction import ARROW, SCHEMA
from tests.seeds import first_seed
from tests.services.seamark import Seamark
from tests.table_services import job_loop

IDS_PER_WRITER = 1_000_000
STEP_ROWS = 3
READABLE_S, READABLE_LONG_S = 10, 30
"""The seconds for which snapshots are kept, in short and in long storms. A reader needs less time for a snapshot."""
AGED_AFTER_S = 30.0
"""The age, in seconds, after which the test makes a file look a month old. A writer commits its files earlier."""
LATE_S = 120.0
WASTED_MAX = 0.2
"""The largest fraction of the bytes read by rewrites that may be wasted, if jobs choose files like the server's jobs.
"""
REWRITES_MIN = 20
"""With fewer rewrites the fraction is not checked, because each lost one is a large part. A busy machine does few."""
KINDS = (
    *("clustering", "compaction", "expiration", "indexing", "orphan-files"),
    *("statistics", "manifests", "bucket-splitting"),
)
"""The kinds of jobs. The storm runs both clustering and compaction, but the server runs only one of them for a
table.
"""

State = frozenset[tuple[int, str]]


@dataclass
class StormWriter:
    """A writer that upserts and deletes its own keys in numbered steps.

    Attributes:
        allowed_states: For each step, the sets of rows that a snapshot can show after it and before the next step.
            There are several sets if rows are deleted between the steps.
        acknowledged_number: The last step that the server has acknowledged.
    """

    number: int
    allowed_states: dict[int, list[State]] = field(default_factory=lambda: defaultdict(list, {-1: [frozenset()]}))
    acknowledged_number: int = -1

    @property
    def first_id(self) -> int:
        return self.number * IDS_PER_WRITER

    def check(self, rows: Sequence[tuple[int, str]], least_step: int) -> int:
        """Return the step that the rows of a snapshot show.

        Raises:
            AssertionError: The rows are not an allowed state of a step, or the step is earlier than `least_step`.
        """
        text_by_id = dict(rows)
        assert len(text_by_id) == len(rows), f"writer {self.number}: a key occurs twice, {Counter(rows).most_common(3)}"
        step = int(text_by_id.get(self.first_id, -1))
        assert step >= least_step, (
            f"writer {self.number}: step {least_step} was acknowledged, the snapshot shows {step}"
        )
        assert frozenset(rows) in self.allowed_states[step], f"writer {self.number}: at step {step}, {sorted(rows)}"
        return step


class StormAppender(StormWriter):
    def check(self, rows: Sequence[tuple[int, str]], least_step: int) -> int:
        step_count = len(rows) // STEP_ROWS
        assert sorted(rows) == [row for step in range(step_count) for row in self.list_rows(step)], (
            f"writer {self.number}"
        )
        assert step_count - 1 >= least_step, (
            f"writer {self.number}: step {least_step} was acknowledged, the snapshot shows {step_count - 1}"
        )
        return step_count - 1

    def list_rows(self, step: int) -> list[tuple[int, str]]:
        return [(self.first_id + STEP_ROWS * step + number, str(step)) for number in range(STEP_ROWS)]


def build_table(rows: Sequence[tuple[int, str]]) -> pa.Table:
    ids = [key for key, _ in rows]
    return pa.table({"id": ids, "part": [key % 3 for key in ids], "text": [text for _, text in rows]}, schema=ARROW)


class Storm:
    """Writers, readers and table services at work on one table, with the rows that each reader may see."""

    def __init__(self, url: str, seed: int, seconds: float, readable_s: float) -> None:
        self.url = url
        self.readable_s = readable_s
        self.rng = random.Random(seed)
        self.stop = threading.Event()
        self.ends_s = time.monotonic() + seconds
        self.goals: Callable[[], dict[str, bool]] = dict
        """The events that must happen before the end. A busy machine gets `LATE_S` more seconds for them."""
        self.writers = [StormWriter(1), StormWriter(2), StormAppender(3), StormAppender(4)]
        self.checked_count = self.expired_count = 0
        self.refusals: list[str] = []
        """The reasons why commits of the writer by PyIceberg failed. Only changes of the schema and the partitioning
        are allowed.
        """

    def is_running(self) -> bool:
        late_s = time.monotonic() - self.ends_s
        if late_s > LATE_S or (late_s > 0 and all(self.goals().values())):
            self.stop.set()
        return not self.stop.is_set()

    def run(self, *operations: Callable[[], None]) -> None:
        """Run all operations concurrently until the time is over. The first error ends all of them."""

        def guard_work(work: Callable[[], None]) -> None:
            try:
                work()
            finally:
                self.stop.set()

        with ThreadPoolExecutor(len(operations)) as pool:
            for future in [pool.submit(guard_work, work) for work in operations]:
                future.result()

    def upsert(self, writer: StormWriter, seed: int) -> None:
        """Upsert and delete random keys of this writer until the end, and record each allowed state."""
        rng, client = random.Random(seed), IndexClient(self.url)
        rows: dict[int, str] = {}
        step = 0
        while self.is_running():
            ids = rng.sample(range(writer.first_id + 1, writer.first_id + 40), rng.randint(1, 8))
            if rng.random() < 0.3:
                for key in ids:
                    rows.pop(key, None)
                writer.allowed_states[step - 1].append(frozenset(rows.items()))
                delete(client, "db.t", keys=pa.table({"id": ids}), mode=rng.choice(MODES))
                continue
            changed_rows = {key: f"{step}:{key}" for key in ids} | {writer.first_id: str(step)}
            rows |= changed_rows
            writer.allowed_states[step].append(frozenset(rows.items()))
            strategy = "equality" if rng.random() < 0.15 else None
            mode = None if strategy else rng.choice(MODES)
            table = build_table(list(changed_rows.items()))
            try:
                upsert(client, "db.t", table, keys=["id"], mode=mode, strategy=strategy)
            except Unwritable:  # This happens after the table is partitioned by more than the key.
                assert strategy == "equality"
                upsert(client, "db.t", table, keys=["id"])
            writer.acknowledged_number = step
            step += 1

    def append(self, writer: StormAppender) -> None:
        client, step = IndexClient(self.url), 0
        while self.is_running():
            append(client, "db.t", build_table(writer.list_rows(step)))
            writer.acknowledged_number = step
            step += 1
            time.sleep(0.02)

    def append_by_pyiceberg(self, writer: StormAppender) -> None:
        """Append with PyIceberg until the end, and record each refused commit."""
        step = 0
        with contextlib.closing(RestCatalog("s", uri=self.url)) as catalog:
            while self.is_running():
                table = catalog.load_table("db.t")
                rows = build_table(writer.list_rows(step))
                for name in table.schema().column_names[3:]:  # Columns that `evolve` has added.
                    rows = rows.append_column(name, pa.nulls(len(rows), pa.int64()))
                try:
                    table.append(rows)
                except CommitFailedException as error:
                    self.refusals.append(str(error))
                    continue
                except IndexError:  # After a change of the partition spec, PyIceberg's own retry fails with this error.
                    continue
                writer.acknowledged_number = step
                step += 1
                time.sleep(0.05)

    def evolve(self, pause_s: float) -> None:
        """Make four changes of the schema or the partitioning, then wait until the end."""
        with contextlib.closing(RestCatalog("s", uri=self.url)) as catalog:
            for number in range(4):
                if self.stop.wait(pause_s):
                    return
                table = catalog.load_table("db.t")
                for _ in range(20):  # Other writers commit all the time, so a change needs several attempts.
                    try:
                        if number == 1:
                            table.update_spec().add_field("part", IdentityTransform(), "part_value").commit()
                        elif number == 2 and table.spec().fields[0].name.startswith("id_bucket"):
                            resize(IndexClient(self.url), "db.t", buckets=4)
                        else:
                            table.update_schema().add_column(f"extra{number}", LongType()).commit()
                        break
                    except CommitFailedException:
                        table.refresh()
            while self.is_running():
                time.sleep(0.1)

    def read(self, seed: int) -> None:
        """Read the current snapshot or a random one until the end. Only an expired snapshot may be unreadable."""
        rng, client = random.Random(seed), IndexClient(self.url)
        with contextlib.closing(RestCatalog("s", uri=self.url)) as catalog:
            while self.is_running():
                if rng.random() < 0.6:
                    least_steps = [writer.acknowledged_number for writer in self.writers]
                    started_s = time.monotonic()
                    try:
                        self.check(client, At(), least_steps)
                    except Unreadable:
                        # On a busy machine, a reader may take longer than the time for which its snapshot is kept.
                        if time.monotonic() - started_s < self.readable_s:
                            raise
                        self.expired_count += 1
                    continue
                snapshots = catalog.load_table("db.t").metadata.snapshots
                if not snapshots:
                    continue
                chosen_snapshot_id = rng.choice(snapshots).snapshot_id
                try:
                    self.check(client, At(chosen_snapshot_id), [-1] * len(self.writers))
                except (NoSuchResource, InvalidRequest, Unreadable):
                    # The snapshot has expired, and its files are deleted. A snapshot that is still listed must be
                    # readable.
                    listed_snapshots = catalog.load_table("db.t").metadata.snapshots
                    assert chosen_snapshot_id not in {snapshot.snapshot_id for snapshot in listed_snapshots}
                    self.expired_count += 1

    def check(self, client: IndexClient, at: At, least_steps: Sequence[int]) -> None:
        actual_rows = scan(client, "db.t", ["id", "part", "text"], at=at).to_arrow().to_pylist()
        assert all(row["part"] == row["id"] % 3 for row in actual_rows)
        rows_by_writer: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for row in actual_rows:
            rows_by_writer[row["id"] // IDS_PER_WRITER].append((row["id"], row["text"]))
        for writer, least_step in zip(self.writers, least_steps, strict=True):
            writer.check(rows_by_writer.pop(writer.number, []), least_step)
        assert not rows_by_writer
        self.checked_count += 1

    def age_files(self, folder: Path) -> None:
        """Make files look a month old when they are older than AGED_AFTER_S, so that orphan removal may delete them.

        Files that look older than a day have already been changed.
        """
        while self.is_running():
            now_s = time.time()
            for path in folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and AGED_AFTER_S < now_s - path.stat().st_mtime < 86_400:
                        os.utime(path, (now_s - 30 * 86_400,) * 2)
            time.sleep(1)


class JobProcesses:
    """One process for each kind of job. Processes are killed at random and restarted."""

    def __init__(self, storm: Storm, log: Path, min_age_s: int, *, yields: bool) -> None:
        """Prepare the processes.

        Args:
            storm: The running server and writers.
            log: The file to which jobs write their results.
            min_age_s: The minimum age of snapshots that expire, in seconds.
            yields: Whether rewrites run one at a time, and omit files that writers will probably replace.
        """
        self._storm = storm
        self._min_age_ms = 1000 * min_age_s
        self._log = log
        self._yields = yields
        # The fork server has loaded all modules, so a new process starts at once.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([job_loop.__name__])
        self.killed_count = 0

    def run(self, seed: int) -> None:
        """Kill a random job process at random times, and start it again, until the end."""
        rng = random.Random(seed)
        running_jobs: dict[str, BaseProcess] = {kind: self._start(kind) for kind in KINDS}
        try:
            while self._storm.is_running():
                time.sleep(rng.uniform(0.1, 1.5))
                kind = rng.choice(KINDS)
                assert running_jobs[kind].is_alive(), f"the job {kind} has ended with {running_jobs[kind].exitcode}"
                running_jobs[kind].kill()
                running_jobs[kind].join()
                self.killed_count += 1
                running_jobs[kind] = self._start(kind)
        finally:
            for process in running_jobs.values():
                process.kill()
                process.join()

    def _start(self, kind: str) -> BaseProcess:
        arguments = (kind, self._storm.url, "db.t", str(self._log), self._min_age_ms, self._yields)
        process = self._context.Process(target=job_loop.run_jobs, args=arguments, daemon=True)
        process.start()
        return process

    def sum_totals(self) -> dict[str, Counter[str]]:
        """Return the sums of the counts that jobs have written to the log, by the kind of job.

        `runs` is the number of these jobs. Jobs that were killed before they wrote their counts are not included.
        """
        totals: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        for line in self._log.read_text().splitlines() if self._log.exists() else ():
            kind, counts = json.loads(line)
            totals[kind].update({"runs": 1, **counts})
        return totals


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seamark]:
    with Seamark(tmp_path / "home") as server:
        yield server


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("version", "seconds"),
    [
        pytest.param(2, 13, id="short, version 2", marks=pytest.mark.slow),
        pytest.param(2, 120, id="long, version 2", marks=pytest.mark.slow),
        pytest.param(3, 120, id="long, version 3", marks=pytest.mark.slow),
    ],
)
def test_services_never_change_rows_or_stop_a_writer(
    server: Seamark, tmp_path: Path, version: int, seconds: float
) -> None:
    seed = first_seed()
    catalog, client = RestCatalog("s", uri=server.base_url), IndexClient(server.base_url)
    catalog.create_namespace("db")
    properties = {"format-version": str(version), "seamark.index.by_text": "bloom(text)", REBASE: "append"}
    properties["seamark.clustering.columns"] = "text,id"
    bucket = PartitionField(1, 1000, BucketTransform(2), "id_bucket")
    # Version 2 has no buckets, because PyIceberg cannot append to them.
    spec = PartitionSpec(*[bucket] if version > 2 else [])
    catalog.create_table("db.t", SCHEMA, partition_spec=spec, properties=properties)
    # The short storm checks only rows. Its jobs compete for all files, and lose more of their work.
    is_long = seconds > 60
    readable_s = READABLE_LONG_S if is_long else READABLE_S
    storm = Storm(server.base_url, seed, seconds, readable_s)
    first_writer, second_writer, appender, pyiceberg_appender = storm.writers
    assert isinstance(appender, StormAppender)
    assert isinstance(pyiceberg_appender, StormAppender)
    jobs = JobProcesses(storm, tmp_path / "jobs.jsonl", readable_s, yields=is_long)

    def check_goals() -> dict[str, bool]:
        """Return whether each event that the campaign must cover has happened."""
        totals = jobs.sum_totals()
        # In version 3, each upsert changes deletion vectors, so a compaction may lose all races.
        has_merged = totals["compaction"]["commits"] + totals["clustering"]["commits"] > 0 or version > 2
        return {
            "each writer writes": min(writer.acknowledged_number for writer in storm.writers) > 2,
            "readers read": storm.checked_count > 5,
            "jobs are killed": jobs.killed_count > 5,
            "each job ends": all(totals[kind]["runs"] for kind in KINDS),
            "snapshots expire": totals["expiration"]["snapshots"] > 0,
            "manifests are rewritten": totals["manifests"]["commits"] > 0,
            "statistics are written": totals["statistics"]["files"] > 0,
            "files are rewritten": has_merged,
        }

    storm.goals = check_goals
    storm.run(
        lambda: storm.upsert(first_writer, seed),
        lambda: storm.upsert(second_writer, seed + 1),
        lambda: storm.append(appender),
        lambda: (
            storm.append_by_pyiceberg(pyiceberg_appender) if version < 3 else storm.append(pyiceberg_appender)
        ),  # PyIceberg cannot write version 3.
        lambda: storm.evolve(seconds / 6),
        lambda: storm.read(seed + 2),
        lambda: storm.age_files(tmp_path / "home" / "warehouse"),
        lambda: jobs.run(seed + 3),
    )
    totals = jobs.sum_totals()
    steps = [writer.acknowledged_number for writer in storm.writers]
    print(
        f"seed {seed}: steps {steps}, {storm.checked_count} reads, {storm.expired_count} expired,"
        f" {jobs.killed_count} killed, {totals}"
    )
    rewritten = totals["compaction"] + totals["clustering"] + totals["bucket-splitting"]
    wasted_share = rewritten["bytes_wasted"] / max(1, rewritten["bytes_read"])
    print(f"wasted work: {wasted_share:.0%} of {rewritten['bytes_read']:,} bytes that rewrites read")
    assert [error for error in storm.refusals if "schema" not in error and "spec" not in error] == []
    assert [goal for goal, is_reached in check_goals().items() if not is_reached] == []
    if is_long and rewritten["commits"] + rewritten["conflicts"] >= REWRITES_MIN:
        assert wasted_share < WASTED_MAX

    # The services remove the files of killed jobs. The test itself removes no files.
    storm.check(client, At(), steps)
    compact(client, "db.t", policy=CompactionPolicy(job_loop.TARGET_BYTES, 2))
    compute_statistics(client, "db.t")
    expire(client, "db.t", older_than_ms=1 << 60)
    table = catalog.load_table("db.t")
    for path in (tmp_path / "home" / "warehouse").rglob("*"):
        # The newest file keeps its age, which shows the age of the others.
        if path.is_file() and path != to_path(table.metadata_location):
            os.utime(path, (time.time() - 30 * 86_400,) * 2)
    remove_orphan_files(client, "db.t")
    statistics = {to_path(file.statistics_path) for file in table.metadata.statistics}
    statistics |= {to_path(file.statistics_path) for file in table.metadata.partition_statistics}
    assert statistics
    paths = {path for path in list_stored_files(table) if "_seamark" not in path.parts}
    assert paths | statistics == list_needed_files(table) | statistics
    storm.check(client, At(), steps)
