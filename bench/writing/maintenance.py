"""How long do Seamark's maintenance jobs take, compared with Spark's procedures and Trino's `ANALYZE` and `optimize`?

The jobs are statistics, manifests, compaction, expiration of snapshots, and removal of orphan files (the last three are
in `upkeep.py`). Each engine has its own table, and the same commits write equal rows into all tables. The benchmark
times a job as its user sees it. Seamark's jobs are function calls of a client, which sends requests to the server.
Spark's and Trino's jobs are statements in a running session, so no figure contains the start of a JVM. In the end the
numbers of distinct values, and the files of each table, must agree.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing import upkeep
from bench.writing.session import SPARK
from bench.writing.upkeep import IN_SPARK, IN_TRINO
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.server_jobs import rewrite_manifests
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.spark.session import connect
from seamark.connector.write.appends import append
from tests.services.seamark import Seamark
from tests.services.spark import spark_session
from tests.services.trino import Trino, trino_server

COMMITS, ROWS = 100, 10_000
QUICK_COMMITS = 10
ROUNDS = 3
DISTINCT_COUNT_ERROR_MAX = 0.06
"""The largest relative difference between two counts of distinct values, which all engines only estimate."""
CATALOG, TRINO = "sea", "seamark"
TABLES = {OURS: "bench.ours", IN_SPARK: "bench.spark", IN_TRINO: "bench.trino"}
SMALL = {name: f"{table}_small" for name, table in TABLES.items()}
"""The small tables on which each job runs first, so that the engines are warm."""
PROPERTIES = "'commit.manifest-merge.enabled'='false', 'format-version'='2'"
COLUMNS = ("id", "part", "text", "price")


async def run(folder: Path, *, quick: bool = False, commits: int | None = None) -> Report:
    """Run the benchmark.

    Args:
        commits: The number of commits of each table.
    """
    rounds = 1 if quick else ROUNDS
    commits = commits or (QUICK_COMMITS if quick else COMMITS)
    report = Report("writing_maintenance", "How long does the upkeep of a table take?")
    report.peer = "Spark's procedures, or Trino's ANALYZE and optimize"
    env = {"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_SERVICES_WORKERS": "0"}
    with (
        Seamark(folder / "home", env=env) as server,
        closing(IndexClient(server.base_url)) as client,
        spark_session(folder / "spark", SPARK) as spark,
        trino_server(folder / "trino", uri=server.base_url) as trino,
    ):
        connect(spark, CATALOG, server.base_url)
        spark.sql(f"CREATE NAMESPACE {CATALOG}.bench")
        for table, appends in [*((name, commits) for name in TABLES.values()), *((name, 3) for name in SMALL.values())]:
            spark.sql(
                f"CREATE TABLE {CATALOG}.{table} (id bigint, part int, text string, price decimal(12, 2)) "
                f"USING iceberg PARTITIONED BY (part) TBLPROPERTIES ({PROPERTIES})"
            )
            for number in range(appends):
                append(client, table, _build_rows(number * ROWS))
        _add_rows(report, commits, _measure_statistics(client, spark, trino, rounds, commits))
        _add_rows(report, commits, _measure_manifests(client, spark))
        measured = upkeep.measure_upkeep(
            client, spark, trino, TABLES, SMALL, (CATALOG, TRINO), url=server.base_url, folder=folder
        )
        _add_rows(report, commits, measured)
    report.notes += [
        f"{commits} commits of {ROWS:,} rows in 8 partitions. Statistics: medians of {rounds} rounds, the engines "
        "taking turns.",
        "Rewrites of manifests, compaction, expiration and removal of orphan files: one run of each engine, one after "
        "the other.",
        "A compaction with the start of its process: `seamark run compact`, and a new JVM with a session of Spark.",
        "Spark, Trino and the server share the machine. The first run of each engine is not counted.",
    ]
    return report


def _build_rows(first: int) -> pa.Table:
    ids = range(first, first + ROWS)
    columns = {
        "id": pa.array(ids, pa.int64()),
        "part": pa.array([number % 8 for number in ids], pa.int32()),
        "text": pa.array([f"text {number % 50_000}" for number in ids]),
        "price": pa.array([number % 9973 for number in ids]).cast(pa.decimal128(21, 2)).cast(pa.decimal128(12, 2)),
    }
    return pa.table(columns)


def _add_rows(report: Report, commits: int, measured: dict[str, dict[str, float]]) -> None:
    """Add a row for each measure and each peer.

    Args:
        measured: The values by name of the engine, for each measure. A measure is a name, with its unit in parentheses
            unless the unit is ms.
    """
    for measure, values in measured.items():
        for peer in (name for name in (IN_SPARK, IN_TRINO) if name in values):
            report.rows.append(
                Row(
                    f"{commits} commits",
                    f"{measure.partition(' (')[0]}, beside {peer}",
                    measure.partition(" (")[2].rstrip(")") or "ms",
                    {OURS: values[OURS], peer: values[peer]},
                    peer=peer,
                )
            )


def _measure_statistics(
    client: IndexClient, spark: SparkSession, trino: Trino, rounds: int, commits: int
) -> dict[str, dict[str, float]]:
    """Measure the statistics of the whole table, and again after one more commit.

    The other engines read the whole table in both cases.
    """
    operations: dict[str, Callable[[], object]] = {
        OURS: lambda: compute_statistics(client, TABLES[OURS], full=True),
        IN_SPARK: lambda: spark.sql(
            f"CALL {CATALOG}.system.compute_table_stats(table => '{TABLES[IN_SPARK]}')"
        ).collect(),
        IN_TRINO: lambda: trino.rows(f"ANALYZE {TABLES[IN_TRINO]}", catalog=TRINO),
    }
    full_ms = _measure_ms(operations, rounds, lambda: None)
    counts = {name: _read_distinct_counts(client, table) for name, table in TABLES.items()}
    for name, actual_count in counts.items():
        for column, count in actual_count.items():
            if abs(count - counts[OURS][column]) > DISTINCT_COUNT_ERROR_MAX * count:
                raise AnswersDiffer(
                    f"{name} counts {count:,} distinct values of {column}, and Seamark {counts[OURS][column]:,}"
                )
    commit_numbers = itertools.count(commits + 1)

    def commit_rows() -> None:
        number = next(commit_numbers)
        for table in TABLES.values():
            append(client, table, _build_rows(number * ROWS))

    operations_after_commit = {**operations, OURS: lambda: compute_statistics(client, TABLES[OURS])}
    return {
        "statistics of the whole table": full_ms,
        "statistics after one more commit": _measure_ms(operations_after_commit, rounds, commit_rows),
    }


def _measure_ms(
    operations: dict[str, Callable[[], object]], rounds: int, prepare: Callable[[], None]
) -> dict[str, float]:
    """Return the median milliseconds of each operation, without the first round, which warms up the engines.

    `prepare` runs before each round.
    """
    durations: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds + 1):
        prepare()
        for name, work in operations.items():
            began_s = time.perf_counter()
            work()
            if number:
                durations[name].append(1000 * (time.perf_counter() - began_s))
    return {name: statistics.median(values) for name, values in durations.items()}


def _read_distinct_counts(client: IndexClient, table: str) -> dict[str, int]:
    metadata = json.loads(client.load_table(table).metadata)
    (file,) = [
        statistic for statistic in metadata["statistics"] if statistic["snapshot-id"] == metadata["current-snapshot-id"]
    ]
    return {COLUMNS[blob["fields"][0] - 1]: int(blob["properties"]["ndv"]) for blob in file["blob-metadata"]}


def _measure_manifests(client: IndexClient, spark: SparkSession) -> dict[str, dict[str, float]]:
    """Measure one rewrite of manifests, because a second rewrite has nothing to do.

    Spark is warm, because it has run its procedures on the small table.
    """
    files = {name: client.files(table).num_rows for name, table in TABLES.items()}
    began_s = time.perf_counter()
    report = rewrite_manifests(client, TABLES[OURS], min_count=2)
    ours_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    spark.sql(f"CALL {CATALOG}.system.rewrite_manifests('{TABLES[IN_SPARK]}')").collect()
    spark_s = time.perf_counter() - began_s
    manifest_counts = {name: client.health(TABLES[name])["manifests"] for name in (OURS, IN_SPARK)}
    if report["snapshot-id"] is None or manifest_counts[OURS] > manifest_counts[IN_SPARK]:
        raise AnswersDiffer(f"we leave {manifest_counts[OURS]} manifests, Spark {manifest_counts[IN_SPARK]}")
    if any(client.files(TABLES[name]).num_rows != files[name] for name in manifest_counts):
        raise AnswersDiffer("a rewrite of manifests changed the files of a table")
    return {"rewrite of the manifests": {OURS: 1000 * ours_s, IN_SPARK: 1000 * spark_s}}
