"""What does it cost a write job to merge its small files before the commit?

A Spark job that does not shuffle writes a file for each task and partition with `seamark.spark.write`, with and without
`merge_files`. Each file is one row group, so a merge copies row groups. The last case shuffles the rows by partition
instead. Times include plan, commit and fsync. All tables must have equal rows in the end.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import SPARK
from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.session import connect
from seamark.spark import write
from tests.services.seamark import Seamark
from tests.services.spark import spark_session

TASKS, ROWS = 4, 1_500_000
"""The number of tasks, and the rows of each task: about 60 MB in each of two partitions."""
QUICK_ROWS = 2000
ROUNDS, QUICK_ROUNDS = 5, 1
CATALOG, SMALL, SHUFFLED = "sea", "small files", "shuffle by partition"
COLUMNS = "id bigint, part int, city string, price double, payload string"


async def run(folder: Path, *, quick: bool = False) -> Report:
    rows, rounds = (QUICK_ROWS, QUICK_ROUNDS) if quick else (ROWS, ROUNDS)
    report = Report("parquet_written_merges", "What does it cost a write job to merge its files?", peer=SMALL)
    env = {"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_SERVICES_WORKERS": "0"}
    ways: dict[str, dict[str, Any]] = {
        OURS: {"distribution": "none", "merge_files": True},
        SMALL: {"distribution": "none"},
        SHUFFLED: {"distribution": "hash"},
    }
    with (
        Seamark(folder / "home", env=env) as server,
        closing(IndexClient(server.base_url, timeout_s=600)) as client,
        spark_session(folder / "spark", SPARK) as spark,
    ):
        connect(spark, CATALOG, server.base_url)
        spark.sql(f"CREATE NAMESPACE {CATALOG}.bench")
        frame = _build_frame(spark, rows)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        files: dict[str, int] = {}
        for number in range(rounds + 1):
            results = set()
            for place, (name, write_options) in enumerate(ways.items() if number % 2 else reversed(ways.items())):
                table = f"bench.t{number}_{place}"
                spark.sql(f"CREATE TABLE {CATALOG}.{table} ({COLUMNS}) USING iceberg PARTITIONED BY (part)")
                started_s = time.perf_counter()
                report_of_write = write(frame, table, client=client, **write_options)
                seconds[name].append(time.perf_counter() - started_s)
                files[name] = report_of_write.files
                results.add(_read_sums(spark, table))
                spark.sql(f"DROP TABLE {CATALOG}.{table} PURGE")
            if len(results) != 1:
                raise AnswersDiffer(f"the tables have other rows: {results}")
    values = {name: min(times[1:]) for name, times in seconds.items()}
    report.rows.append(Row("write, and merge before the commit", "job", "s", values, peer=SMALL))
    report.notes.append(
        f"{TASKS} tasks of {rows:,} rows, in 2 partitions; best of {rounds} rounds, the ways taking turns. Files: "
        + ", ".join(f"{name} {count}" for name, count in files.items())
        + "."
    )
    return report


def _build_frame(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(0, TASKS * rows, 1, TASKS).selectExpr(
        "id",
        "cast(id % 2 AS int) AS part",
        "concat('city ', id % 250) AS city",
        "cast(xxhash64(id) AS double) / 1e18 AS price",
        "sha2(cast(id AS string), 256) AS payload",
    )


def _read_sums(spark: SparkSession, table: str) -> tuple[int, ...]:
    sums = "count(*), sum(xxhash64(id, part, city, price, payload) % 1000003)"
    return tuple(spark.sql(f"SELECT {sums} FROM {CATALOG}.{table}").collect()[0])
