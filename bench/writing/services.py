"""Does `seamark serve` alone keep a table healthy, does it delay writers and readers, and what does it rewrite?

Spark appends 300 small files to a table with two indexes. It does so once on a server without table services (quiet),
and once on a server that builds the indexes, compacts the table and expires its snapshots, as the table's properties
request. A reader requests a plan and reads the rows of a key all the time. In the end the benchmark reads both tables:
the rows must be the same, each answer to the reader must have been right, and no writer may have failed.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import SPARK
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from seamark.connector.spark.session import connect
from tests.services.seamark import Seamark
from tests.services.spark import spark_session

APPENDS, ROWS = 300, 1_000
QUICK_APPENDS = 12
PAUSE_S = 0.02
"""The seconds between two reads. The reader represents one of many clients, not the whole load."""
QUIET = "quiet"
TABLE = "bench.events"
MAX_AGE_MS = 60_000
PROPERTIES = {
    "seamark.index.by_id": "bloom(id)",
    "seamark.index.by_country": "bitmap(country)",
    "seamark.compaction.enabled": "true",
    "seamark.expiration.enabled": "true",
    "history.expire.max-snapshot-age-ms": str(MAX_AGE_MS),
}
READ_DELAY_MAX = 1.2
"""The goal: the largest factor by which the services may lengthen a read."""
SETTLED_S = 240.0
"""The maximum time in seconds until the table is indexed and compacted."""


@dataclass
class KeyReader:
    """A client that reads a random appended key again and again in `run`, and records times and errors.

    The caller runs `run` in a thread, and ends it by `end`.
    """

    client: IndexClient
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    committed_batches: int = 0
    """The number of committed batches."""
    _end_event: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        rng = np.random.default_rng(1)
        while not self._end_event.wait(PAUSE_S):
            if not self.committed_batches:
                continue
            key = int(rng.integers(self.committed_batches * ROWS))
            began_s = time.perf_counter()
            try:
                rows = scan(self.client, TABLE, ["id"], f"id = {key}").to_arrow()["id"].to_pylist()
            except Exception as error:  # noqa: BLE001  any failure of a reader is a result of this bench
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            self.seconds.append(time.perf_counter() - began_s)
            if rows != [key]:
                self.errors.append(f"id = {key} has the rows {rows}")

    def end(self) -> None:
        self._end_event.set()


@dataclass(frozen=True)
class ServiceOutcome:
    append_p50_s: float
    append_p99_s: float
    read_p50_s: float
    read_p99_s: float
    reads: int
    failures: int
    files: int
    snapshots: int
    settled_s: float
    """The seconds from the last append until the indexes cover the table and no compaction is due."""
    rewritten: float
    """The bytes that compactions wrote for each byte that Spark appended."""
    rows: int
    ids: int


async def run(folder: Path, *, quick: bool = False) -> Report:
    appends = QUICK_APPENDS if quick else APPENDS
    report = Report("writing_services", "Does a server that maintains a table by itself delay its writers and readers?")
    report.peer = "the same server without table services"
    outcomes: dict[str, ServiceOutcome] = {}
    with spark_session(folder / "spark", SPARK) as spark:
        for name, workers in ((QUIET, "0"), (OURS, "1")):
            outcomes[name] = _measure_service(folder / name, spark, name, workers, appends)
    quiet, busy_outcome = outcomes[QUIET], outcomes[OURS]
    if (quiet.rows, quiet.ids) != (busy_outcome.rows, busy_outcome.ids):
        raise AnswersDiffer(f"the quiet table has {quiet.rows:,} rows, the maintained one {busy_outcome.rows:,}")

    def add(measure: str, unit: str, value: str, factor: float = 1.0, goal: float | None = None) -> None:
        values = {name: factor * getattr(outcome, value) for name, outcome in outcomes.items()}
        report.rows.append(Row(f"{appends} appends by Spark", measure, unit, values, peer=QUIET, goal=goal))

    add("point query, p50", "ms", "read_p50_s", 1000)
    add("point query, p99", "ms", "read_p99_s", 1000, goal=1000 * READ_DELAY_MAX * quiet.read_p99_s)
    add("append, p50", "ms", "append_p50_s", 1000)
    add("append, p99", "ms", "append_p99_s", 1000)
    add("failed operations of the writer and the reader", "", "failures", goal=0)
    add("data files in the end", "", "files")
    add("snapshots in the end", "", "snapshots")
    add("indexed and compacted after the last append", "s", "settled_s")
    add("bytes that compactions wrote, for each appended byte", "", "rewritten")
    report.notes += [
        f"The reader made {quiet.reads:,} queries of the quiet server and {busy_outcome.reads:,} of the other.",
        f"Each append has {ROWS:,} rows. The policy expires snapshots after {MAX_AGE_MS // 1000} s.",
        "Spark, the reader, the server and its worker share the machine.",
    ]
    return report


def _measure_service(folder: Path, spark: SparkSession, name: str, workers: str, appends: int) -> ServiceOutcome:
    env = {"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_SERVICES_WORKERS": workers}
    with (
        Seamark(folder, env=env) as server,
        closing(IndexClient(server.base_url)) as client,
        closing(IndexClient(server.base_url)) as reader_client,
    ):
        connect(spark, name, server.base_url)
        spark.sql(f"CREATE NAMESPACE {name}.bench")
        properties = ", ".join(f"'{key}'='{value}'" for key, value in PROPERTIES.items())
        spark.sql(
            f"CREATE TABLE {name}.{TABLE} (id bigint, country string, text string) USING iceberg "
            f"TBLPROPERTIES ({properties})"
        )
        reader = KeyReader(reader_client)
        thread = threading.Thread(target=reader.run, name="reader")
        thread.start()
        took_s, failures = [], 0
        try:
            for number in range(appends):
                began_s = time.perf_counter()
                try:
                    spark.sql(
                        f"INSERT INTO {name}.{TABLE} SELECT /*+ COALESCE(1) */ id, concat('c', id % 50), "
                        f"sha2(string(id), 256) FROM range({number * ROWS}, {(number + 1) * ROWS})"
                    )
                except Exception as error:  # noqa: BLE001  a failed append is a result of this bench
                    failures += 1
                    reader.errors.append(f"append {number}: {error}")
                took_s.append(time.perf_counter() - began_s)
                reader.committed_batches = number + 1
            settled_s = _wait_until_maintained(client) if workers != "0" else 0.0
        finally:
            reader.end()
            thread.join()
        if reader.errors:
            raise AnswersDiffer(f"{len(reader.errors)} operations failed, the first: {reader.errors[0]}")
        ids = scan(client, TABLE, ["id"]).to_arrow()["id"].to_numpy()
        health = client.health(TABLE)
        return ServiceOutcome(
            *(float(value) for value in np.quantile(took_s, (0.5, 0.99))),
            *(float(value) for value in np.quantile(reader.seconds, (0.5, 0.99))),
            reads=len(reader.seconds),
            failures=failures + len(reader.errors),
            files=health["files"],
            snapshots=health["snapshots"],
            settled_s=settled_s,
            rewritten=_measure_rewritten_ratio(client, health["size-in-bytes"]),
            rows=len(ids),
            ids=len(np.unique(ids)),
        )


def _wait_until_maintained(client: IndexClient) -> float:
    """Wait until the indexes cover the table and no small files are left, at most `SETTLED_S`, and return the seconds.

    After `SETTLED_S`, the function returns as well, and the report shows the problems that are left.
    """
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < SETTLED_S:
        problems = [problem for problem in client.health(TABLE)["problems"] if problem["problem"] == "small files"]
        if not problems and all(index.health == "ok" for index in client.indexes(TABLE)):
            break
        time.sleep(0.5)
    return time.perf_counter() - began_s


def _measure_rewritten_ratio(client: IndexClient, size_bytes: int) -> float:
    runs = [run.summary for run in client.timeline(TABLE, action="maintenance") if run.summary.get("totals")]
    return sum(run["totals"].get("bytes_after", 0) for run in runs) / max(1, size_bytes)
