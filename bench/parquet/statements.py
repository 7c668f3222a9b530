"""How much faster are MERGE FILES and DROP COLUMNS than the statements of Spark with the same effect?

The peers are Iceberg's `rewrite_data_files` and `INSERT OVERWRITE` with nulls, in the same Spark session. Seamark's
statements run as Spark jobs through `seamark.spark.sql`, and in one process as `seamark run` executes them. Each engine
has its own table with equal rows, written by Spark; after each run the table is rolled back. Times include plan, commit
and fsync. In the end all tables must have equal rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from pyspark.sql import SparkSession

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import SPARK
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import parse_statement
from seamark.connector.spark.session import connect
from seamark.spark import sql
from tests.services.seamark import Seamark
from tests.services.spark import spark_session

FILES, ROWS = 6, 700_000
"""The number of files of each of two partitions, and of rows of a file: about 35 MB, in one row group."""
QUICK_FILES, QUICK_ROWS = 2, 1000
ROUNDS, QUICK_ROUNDS = 3, 1
CATALOG, IN_SPARK, IN_PROCESS = "sea", "spark", "seamark, one process"
COLUMNS = "id bigint, part int, city string, price double, payload string"


async def run(folder: Path, *, quick: bool = False) -> Report:
    files, rows, rounds = (QUICK_FILES, QUICK_ROWS, QUICK_ROUNDS) if quick else (FILES, ROWS, ROUNDS)
    report = Report("parquet_statements", "How long do MERGE FILES and DROP COLUMNS take?", peer="Spark")
    env = {"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_SERVICES_WORKERS": "0"}
    with (
        Seamark(folder / "home", env=env) as server,
        closing(IndexClient(server.base_url, timeout_s=600)) as client,
        spark_session(folder / "spark", SPARK) as spark,
    ):
        connect(spark, CATALOG, server.base_url)
        spark.sql(f"CREATE NAMESPACE {CATALOG}.bench")
        tables = {OURS: "bench.ours", IN_PROCESS: "bench.process", IN_SPARK: "bench.spark"}
        for table in tables.values():
            _fill_table(spark, table, files, rows)
        size_mb = sum(client.files(tables[OURS])["file_size_in_bytes"].to_pylist()) / 1e6
        for case, statement, run_in_spark in (
            ("merge", "ALTER TABLE {} MERGE FILES", _rewrite_with_iceberg),
            ("drop payload", "ALTER TABLE {} PARTITION (part >= 0) DROP COLUMNS (payload)", _overwrite_with_nulls),
        ):
            operations = {
                OURS: lambda text=statement: sql(spark, text.format(f"{CATALOG}.{tables[OURS]}")),
                IN_PROCESS: lambda text=statement: _run_statement(client, text.format(tables[IN_PROCESS])),
                IN_SPARK: lambda run_statement=run_in_spark: run_statement(spark, tables[IN_SPARK]),
            }
            seconds = _measure_s(spark, tables, operations, rounds)
            for target in (OURS, IN_PROCESS):
                values = {OURS: seconds[target], IN_SPARK: seconds[IN_SPARK]}
                name = case if target == OURS else f"{case}, in one process"
                report.rows.append(Row(name, "statement", "s", values, peer=IN_SPARK))
    report.notes.append(
        f"{2 * files} files of {rows:,} rows, {size_mb:,.0f} MB together, in 2 partitions. Medians of {rounds} rounds, "
        "the engines taking turns; Spark has 2 cores. The first run of each engine is not counted."
    )
    return report


def _fill_table(spark: SparkSession, table: str, files: int, rows: int) -> None:
    spark.sql(
        f"CREATE TABLE {CATALOG}.{table} ({COLUMNS}) USING iceberg PARTITIONED BY (part) "
        "TBLPROPERTIES ('write.parquet.compression-codec'='zstd', 'format-version'='2')"
    )
    for number in range(files):
        for part in range(2):
            first = (2 * number + part) * rows
            spark.sql(
                f"INSERT INTO {CATALOG}.{table} SELECT /*+ COALESCE(1) */ id, {part}, concat('city ', id % 250), "
                f"cast(xxhash64(id) AS double) / 1e18, sha2(cast(id AS string), 256) "
                f"FROM range({first}, {first + rows})"
            )


def _run_statement(client: IndexClient, text: str) -> None:
    statement = parse_statement(text)
    assert statement is not None
    run_statement(client, statement, utc=True)


def _rewrite_with_iceberg(spark: SparkSession, table: str) -> None:
    spark.sql(
        f"CALL {CATALOG}.system.rewrite_data_files(table => '{table}', options => map('rewrite-all', 'true'))"
    ).collect()


def _overwrite_with_nulls(spark: SparkSession, table: str) -> None:
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    spark.sql(
        f"INSERT OVERWRITE {CATALOG}.{table} SELECT id, part, city, price, CAST(NULL AS string) "
        f"FROM {CATALOG}.{table} WHERE part >= 0"
    )


def _measure_s(
    spark: SparkSession, tables: dict[str, str], operations: dict[str, Callable[[], object]], rounds: int
) -> dict[str, float]:
    """Return the median seconds of each operation in interleaved rounds, without the first round.

    After each round the tables are rolled back.
    """
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    snapshot_ids = {name: _read_snapshot_id(spark, table) for name, table in tables.items()}
    for number in range(rounds + 1):
        results = {}
        for name in operations if number % 2 else reversed(operations):
            started_s = time.perf_counter()
            operations[name]()
            seconds[name].append(time.perf_counter() - started_s)
            results[name] = _sum_rows(spark, tables[name])
            arguments = f"table => '{tables[name]}', snapshot_id => {snapshot_ids[name]}"
            spark.sql(f"CALL {CATALOG}.system.rollback_to_snapshot({arguments})")
        if len(set(results.values())) != 1:
            raise AnswersDiffer(f"the tables have other rows: {results}")
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def _read_snapshot_id(spark: SparkSession, table: str) -> int:
    rows = spark.sql(f"SELECT snapshot_id FROM {CATALOG}.{table}.refs WHERE name = 'main'")
    return int(rows.collect()[0][0])


def _sum_rows(spark: SparkSession, table: str) -> tuple[int, ...]:
    spark.sql(f"REFRESH TABLE {CATALOG}.{table}")
    sums = "count(*), count(payload), sum(xxhash64(id, part, city, price, payload) % 1000003)"
    return tuple(spark.sql(f"SELECT {sums} FROM {CATALOG}.{table}").collect()[0])
