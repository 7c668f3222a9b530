"""How many commits per second do eight writers of one table make, and how many of their commits fail?

Seamark's writers upsert ten rows at a time through the commit API, each writer into its own buckets, or they append.
PyIceberg appends the same rows: once with its default retries, and once without retries on a table with
`seamark.commit.rebase` = `append`. Each writer is a process that has its rows ready and has committed once. All writers
then start at the same time, and the measurement ends with the last commit. The cases run one after the other. Each rate
comes from four hundred commits. In the end the benchmark reads each table: each row of a successful commit must exist
exactly once.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.managers import SyncManager
from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import run_bench_server
from bench.writing.tables import COLUMNS, KEY, NAMESPACE, build_rows, create_bench_table, make_uuid_texts
from bench.writing.writers import INDEX, MERGE_ON_READ, MODES
from seamark.connector.arrow.partitions import apply_transform
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import open_table, plan
from seamark.connector.write.appends import append
from seamark.connector.write.upserts import upsert
from seamark.formats.iceberg.expressions.expression import TRUE

WRITERS, CHANGES_PER_WRITER, ROWS = 8, 50, 10
QUICK_WRITERS, QUICK_TIMES = 2, 5
STORED_ROWS = 100_000
"""The number of rows of the target table. A writer upserts only rows in its buckets."""
BUCKETS = 16
UPSERTS, APPENDS, REBASED, RETRYING = "upserts", "appends", "pyiceberg-rebased", "pyiceberg-retrying"
NO_RETRIES = {"commit.retry.num-retries": "0"}


@dataclass(frozen=True)
class Job:
    """The work of one process. The rows in `batches` belong to this process only."""

    kind: str
    url: str
    table: str
    batches: tuple[pa.Table, ...]


@dataclass(frozen=True)
class ContentionOutcome:
    """The commits of one process.

    Attributes:
        began_s, end_s: Times in seconds, of a clock that all processes share.
        attempts: The number of attempts of Seamark's upserts.
    """

    began_s: float
    end_s: float
    commits: int
    """The number of commits after the first commit, which is not counted."""
    failures: int
    attempts: int
    rows: int
    """The number of rows of all commits."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("writing_contention", "Eight writers at one table", peer="PyIceberg, trying again")
    writers, times = (QUICK_WRITERS, QUICK_TIMES) if quick else (WRITERS, CHANGES_PER_WRITER)
    rates: dict[str, float] = {}
    failed_counts: dict[str, float] = {}
    attempts = 0.0
    with (
        run_bench_server(folder) as server,
        closing(IndexClient(server.base_url)) as client,
        get_context("spawn").Manager() as manager,
        ProcessPoolExecutor(writers, mp_context=get_context("spawn")) as pool,
    ):
        for kind in (UPSERTS, APPENDS, REBASED, RETRYING):
            name = kind.replace("-", "_")
            jobs, stored_rows = _prepare(client, kind, name, writers, times + 1)
            outcomes = _run_at_once(pool, manager, jobs)
            commit_count = sum(item.commits for item in outcomes)
            _check_rows(client, name, stored_rows + (0 if kind == UPSERTS else sum(item.rows for item in outcomes)))
            rates[kind] = commit_count / (max(item.end_s for item in outcomes) - min(item.began_s for item in outcomes))
            failed_counts[kind] = 100 * sum(item.failures for item in outcomes) / (writers * times)
            if kind == UPSERTS:
                attempts = sum(item.attempts for item in outcomes) / max(1, commit_count)
    case = f"{writers} writers × {times} commits"
    for measured_writers, label in (
        (UPSERTS, "upserts"),
        (APPENDS, "appends"),
        (REBASED, "PyIceberg's appends, rebased"),
    ):
        baseline_rates = {OURS: rates[measured_writers], RETRYING: rates[RETRYING]}
        report.rows += [
            Row(case, f"{label}, commits", "/s", baseline_rates, lower_is_better=False, peer=RETRYING),
            Row(
                case,
                f"{label}, failed",
                "%",
                {OURS: failed_counts[measured_writers], RETRYING: failed_counts[RETRYING]},
                peer=RETRYING,
                goal=0.0,
            ),
        ]
    report.rows.append(Row(case, "upserts, attempts a commit", "", {OURS: attempts}, peer=RETRYING))
    report.notes += [
        f"{ROWS} rows a commit. Upserts replace stored rows of a table with {STORED_ROWS:,} rows in {BUCKETS} buckets"
        " and a record index. No two writers write to the same bucket.",
        f"{RETRYING}: PyIceberg without changes, which retries as often as by default, on the same server.",
    ]
    return report


def _prepare(client: IndexClient, kind: str, name: str, writers: int, times: int) -> tuple[list[Job], int]:
    """Create the table, and return the jobs and the number of rows that the table has before they start."""
    properties = {
        UPSERTS: dict.fromkeys(MODES, MERGE_ON_READ),
        APPENDS: {},
        REBASED: {"seamark.commit.rebase": "append", **NO_RETRIES},
        RETRYING: {},
    }[kind]
    if kind != UPSERTS:  # PyIceberg cannot write version 3.
        create_bench_table(client, name, 0, {**properties, "format-version": "2"})
        numbers = np.arange(writers * times * ROWS).reshape(writers, times, ROWS)
        return _build_jobs(kind, client.url, name, [[build_rows(item, 1) for item in part] for part in numbers]), 0
    create_bench_table(client, name, BUCKETS, properties)
    stored_keys = np.arange(STORED_ROWS)
    append(client, (NAMESPACE, name), build_rows(stored_keys, 0))
    client.put_index((NAMESPACE, name), INDEX, kind="record", columns=[KEY])
    with closing(InProcessWorkers()) as workers:
        build(client, (NAMESPACE, name), INDEX, workers)
    buckets = apply_transform(f"bucket[{BUCKETS}]", COLUMNS[KEY], make_uuid_texts(stored_keys))
    bucket = np.array(buckets.values)[buckets.codes]
    batches = []
    for writer in range(writers):
        draw = np.random.default_rng(writer)
        own_rows = stored_keys[bucket % writers == writer]
        batches.append([build_rows(draw.choice(own_rows, ROWS, replace=False), number + 1) for number in range(times)])
    return _build_jobs(kind, client.url, name, batches), STORED_ROWS


def _build_jobs(kind: str, url: str, name: str, batches: Sequence[Sequence[pa.Table]]) -> list[Job]:
    return [Job(kind, url, name, tuple(batch)) for batch in batches]


def _run_at_once(pool: ProcessPoolExecutor, manager: SyncManager, jobs: Sequence[Job]) -> list[ContentionOutcome]:
    return list(pool.map(partial(_run_job, manager.Barrier(len(jobs))), jobs))


def _run_job(barrier: Barrier, job: Job) -> ContentionOutcome:
    """Commit the batches of a job in this process, and return the measurements.

    The first commit loads the table and opens connections. It is not measured: the measurement begins when all
    processes have made their first commit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyIceberg leaves sockets to the garbage collector.
        logging.getLogger("pyiceberg").setLevel(logging.ERROR)  # PyIceberg logs each retry.
        write = _build_pyiceberg_writer(job) if job.kind in (REBASED, RETRYING) else _build_seamark_writer(job)
        first, *other_writes = (partial(write, batch) for batch in job.batches)
        rows = ROWS if _try_commit(first) else 0
        barrier.wait(300)
        began_s = time.monotonic()
        tries = [_try_commit(item) for item in other_writes]
        commit_count = sum(item > 0 for item in tries)
        rows += ROWS * commit_count
        return ContentionOutcome(began_s, time.monotonic(), commit_count, len(tries) - commit_count, sum(tries), rows)


def _try_commit(commit: Callable[[], int]) -> int:
    """Return the number of attempts of the commit, or 0 if it failed."""
    try:
        return commit()
    except (CommitFailedException, ClientError):
        return 0


def _build_seamark_writer(job: Job) -> Callable[[pa.Table], int]:
    """Return a function that writes a batch with Seamark's client, and returns the number of attempts of its commit.

    The number is always 1 for appends, because `append` does not report its attempts.
    """
    client, table_name = SeamarkClient(job.url), (NAMESPACE, job.table)

    def upsert_batch(rows: pa.Table) -> int:
        return upsert(client, table_name, rows, keys=[KEY]).attempts

    def append_batch(rows: pa.Table) -> int:
        append(client, table_name, rows)
        return 1

    return upsert_batch if job.kind == UPSERTS else append_batch


def _build_pyiceberg_writer(job: Job) -> Callable[[pa.Table], int]:
    """Return a function that appends rows with PyIceberg, and returns 1, because PyIceberg does not report retries."""
    table = RestCatalog("bench", uri=job.url).load_table((NAMESPACE, job.table))

    def append_batch(rows: pa.Table) -> int:
        try:
            table.append(rows)
        except CommitFailedException:
            table.refresh()  # A client that continues after a failure would do the same.
            raise
        return 1

    return append_batch


def _check_rows(client: IndexClient, name: str, expected: int) -> None:
    """Check that the table has `expected` rows, and that each key occurs once.

    Raises:
        AnswersDiffer: The table has other rows.
    """
    table = open_table(client, (NAMESPACE, name), CURRENT)
    reader = TaskReader(plan_read(table, [KEY], TRUE), table.storage)
    keys = [batch.column(0) for task in plan(client, table, TRUE) for batch in reader.read(task)]
    key_column = pa.chunked_array(keys, pa.string())
    if len(key_column) != expected or len(key_column.unique()) != expected:
        raise AnswersDiffer(f"{name} has {len(key_column):,} rows, the commits made {expected:,}")
