"""How soon does Spark read a row of a stream table, and how soon with a Structured Streaming job?

In the first part, a writer sends rows to a stream table, and Spark, without Seamark's code, reads them in a loop. The
second part is the usual way today: a Structured Streaming job that commits to an Iceberg table at its shortest trigger.
PyIceberg reads both tables. Both use the same catalog server.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from bench.measure import read_cpu_s
from bench.report import OURS, Report, Row
from bench.streams.visible import SCHEMA, add_delays, measure_visibility, read_by_pyiceberg, read_until
from seamark.connector.client.client import SeamarkClient
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog, spark_session

PEER = "structured streaming"
RATE, QUICK_RATE = 10_000, 500
SECONDS, QUICK_SECONDS = 60.0, 4.0
WARM_S_MAX = 20.0
"""The maximum time in seconds of the scans before the measurement."""
FLUSH_S = 30
"""The seconds between two flushes of the stream tables.

Readers see rows before their flush, so the interval only affects the size of the files.
"""
GOAL_MS = 300.0
MILLION = 1_000_000


class StreamOutcome(NamedTuple):
    """The measurements of one way to store and read the rows.

    Attributes:
        delays: The delay of each row in milliseconds.
        files: The number of data files of the table in the end.
        cpu_s: The CPU seconds that the processes which store rows need for a million rows.
    """

    delays: list[float]
    files: int
    cpu_s: float


async def run(folder: Path, *, quick: bool = False) -> Report:
    return await asyncio.to_thread(
        _run_bench, folder, QUICK_RATE if quick else RATE, QUICK_SECONDS if quick else SECONDS
    )


def _run_bench(folder: Path, rate: int, seconds: float) -> Report:
    report = Report(
        "streams_spark",
        "After how long does unmodified Spark read a row of a stream table?",
        peer="Structured Streaming",
    )
    with (
        Seamark(folder / "home", env={"SEAMARK_STREAM_FLUSH_INTERVAL_MS": str(1000 * FLUSH_S)}) as server,
        spark_session(folder / "spark") as spark,
    ):
        catalog = RestCatalog("bench", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
        catalog.create_namespace("bench")
        name = new_catalog(spark, server.base_url)
        # The first scans compile the code of Spark.
        read_rows = partial(_read_by_spark, spark, name)
        _measure_stream(server, catalog, "warm", min(rate, 1_000), min(seconds / 2, WARM_S_MAX), read_rows)
        spark_report = _measure_stream(server, catalog, "s", rate, seconds, read_rows)
        pyiceberg_report = _measure_stream(server, catalog, "p", rate, seconds, None)
        job = _measure_job(server, catalog, spark, name, folder, rate, seconds)
    case = f"{rate:,} rows/s, read by"
    add_delays(report, f"{case} Spark", spark_report.delays, {}, "", goal_ms=GOAL_MS)
    add_delays(report, f"{case} PyIceberg", pyiceberg_report.delays, {PEER: job.delays}, PEER, goal_ms=GOAL_MS)
    report.rows += [
        Row(f"{rate:,} rows/s", "data files", "files", {OURS: pyiceberg_report.files, PEER: job.files}, peer=PEER),
        Row(
            f"{rate:,} rows/s",
            "CPU for 1,000,000 rows",
            "s",
            {OURS: pyiceberg_report.cpu_s, PEER: job.cpu_s},
            peer=PEER,
        ),
    ]
    report.notes += [
        f"Each measurement takes {seconds:g} s. The stream table is flushed every {FLUSH_S} s, and in the end. The job "
        "has the trigger "
        "processingTime='0 seconds'. Its rows come from Spark's source `rate`, which makes all rows of a second at the "
        "end of the second. This adds half a second to the median delay of the job.",
        "The CPU is that of the server, and of the Spark process of the job.",
    ]
    return report


def _read_by_spark(spark: SparkSession, catalog: str, name: str, last_number: int) -> pa.Table:
    return spark.sql(f"SELECT id, at FROM {catalog}.bench.{name} WHERE id > {last_number}").toArrow()


def _measure_stream(
    server: Seamark,
    catalog: Catalog,
    name: str,
    rate: int,
    seconds: float,
    read_by_spark: partial[pa.Table] | None,
) -> StreamOutcome:
    """Send rows to a stream table, and read them by Spark, or by PyIceberg if `read_by_spark` is None."""
    properties = {"seamark.stream.enabled": "true", "format-version": "2"}
    catalog.create_table(f"bench.{name}", SCHEMA, properties=properties)
    client = SeamarkClient(server.base_url)
    before_s = read_cpu_s(server.pid)
    read_new_rows = read_by_pyiceberg(catalog, name) if read_by_spark is None else partial(read_by_spark, name)
    delays, _ = measure_visibility(server.base_url, name, rate, seconds, read_new_rows)
    client._request_json("POST", f"/api/v1/tables/bench/{name}/flush")
    cpu_s = (read_cpu_s(server.pid) - before_s) * MILLION / (rate * seconds)
    return StreamOutcome(delays, _count_files(catalog, name), cpu_s)


def _measure_job(
    server: Seamark, catalog: Catalog, spark: SparkSession, spark_catalog: str, folder: Path, rate: int, seconds: float
) -> StreamOutcome:
    """Run a Structured Streaming job that writes into a table, and read the table with PyIceberg."""
    spark.sql(f"CREATE TABLE {spark_catalog}.bench.job (id bigint, at double, payload string) USING iceberg")
    (jvm,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "java"]
    before_s = read_cpu_s(server.pid) + read_cpu_s(jvm.pid)
    rows = spark.readStream.format("rate").option("rowsPerSecond", rate).load()
    query = (
        rows.selectExpr("value AS id", "unix_micros(timestamp) / 1e6 AS at", "repeat('x', 80) AS payload")
        .writeStream.format("iceberg")
        .trigger(processingTime="0 seconds")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .toTable(f"{spark_catalog}.bench.job")
    )
    try:
        delays, _ = read_until(read_by_pyiceberg(catalog, "job"), None, seconds)
    finally:
        query.stop()
    count = catalog.load_table("bench.job").scan().count()
    cpu_s = (read_cpu_s(server.pid) + read_cpu_s(jvm.pid) - before_s) * MILLION / count
    return StreamOutcome(delays, _count_files(catalog, "job"), cpu_s)


def _count_files(catalog: Catalog, name: str) -> int:
    return int(catalog.load_table(f"bench.{name}").inspect.data_files().num_rows)
