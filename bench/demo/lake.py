"""The tables of the demo.

Spark writes them, the server indexes them, and Seamark's Spark job clusters them.

Two fact tables have the same rows: one as Spark wrote it, and one in Seamark's layout. Two tables make it
possible to measure the three columns of the demo alternately.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession
from rich.progress import Progress

from bench import connect
from bench.demo.options import DemoFailed, Options
from bench.ssb.generate import TABLES
from bench.ssb.spark import FACT, write_table
from seamark.connector.client.engines import build_catalog_conf
from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.frames.clustering import cluster
from seamark.connector.spark.session import iceberg_jars, open_session, session_conf
from seamark.connector.write.clustering import JoinedTable
from tests.services.java import configure_local_files
from tests.services.process import CACHE, ServiceFailed

NAMESPACE = "ssb"
WRITTEN, CLUSTERED = (NAMESPACE, FACT), ("clustered", FACT)
"""The facts as Spark wrote them, and in Seamark's layout."""
INDEXED_COLUMNS = ("lo_custkey", "lo_suppkey", "lo_partkey", "lo_orderdate", "lo_discount", "lo_quantity")
"""All columns that the queries join or compare."""
JOINS = {
    "customer": JoinedTable((NAMESPACE, "customer"), {"lo_custkey": "c_custkey"}),
    "supplier": JoinedTable((NAMESPACE, "supplier"), {"lo_suppkey": "s_suppkey"}),
    "part": JoinedTable((NAMESPACE, "part"), {"lo_partkey": "p_partkey"}),
}
CLUSTERED_BY = ("lo_orderdate", "customer.c_city", "supplier.s_city", "part.p_brand1")
OWN_PLANS = {"seamark.scan-planning-mode": "client"}
"""The settings with which Spark plans queries itself, as it does with any other catalog."""
STALLED_S_MAX = 300.0
"""The longest time in seconds without another indexed file."""


@contextlib.contextmanager
def open_demo_session(uri: str, folder: Path) -> Iterator[SparkSession]:
    """Start Spark with the server at `uri` as its catalog and `ssb` as its namespace.

    The JVM writes its messages to spark.log.
    """
    conf = {
        **session_conf(iceberg_jars(CACHE / "jars")),
        **build_catalog_conf(connect.CATALOG, uri),
        "spark.driver.memory": "2g",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
    }
    with contextlib.suppress(ServiceFailed):  # A Java runtime without a compiler writes files more slowly.
        conf |= configure_local_files()
    with _redirect_stderr(folder / "spark.log"):
        spark = open_session("seamark-demo", conf)
    try:
        for namespace, _ in (WRITTEN, CLUSTERED):
            spark.sql(f"CREATE NAMESPACE {connect.CATALOG}.{namespace}")
        spark.sql(f"USE {connect.CATALOG}.{NAMESPACE}")
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _redirect_stderr(path: Path) -> Iterator[None]:
    """Make processes that start inside the block inherit `path` as their standard error."""
    sys.stderr.flush()
    saved = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def write(spark: SparkSession, data: Path, options: Options, progress: Progress) -> None:
    """Write the tables with Spark, the facts by date.

    A copy of the facts, in the order of the source, is clustered next.
    """
    tables = [*((NAMESPACE, table) for table in TABLES), CLUSTERED]
    for namespace, table in progress.track(tables, description="Spark writes the tables"):
        target = f"{connect.CATALOG}.{namespace}.{table}"
        files = None if (namespace, table) == CLUSTERED else options.fact_files
        write_table(spark, data, table, target, files, OWN_PLANS)


def cluster_facts(spark: SparkSession, client: IndexClient, options: Options, progress: Progress) -> None:
    """Rewrite the second fact table into Seamark's layout."""
    task = progress.add_task("Seamark clusters the facts", total=1)
    cluster(spark, CLUSTERED, CLUSTERED_BY, joins=JOINS, files=options.fact_files, client=client)
    progress.update(task, completed=1)


def define_indexes(client: IndexClient, table: tuple[str, str]) -> None:
    """Define the indexes. The server begins to build them at once."""
    for column in INDEXED_COLUMNS:
        client.put_index(table, f"of_{column}", kind="bitmap", columns=[column])


def wait_for_indexes(client: IndexClient, progress: Progress) -> None:
    """Wait until the server has built the indexes of both tables.

    Raises:
        DemoFailed: The build makes no progress.
    """
    indexes = [(table, f"of_{column}") for table in (WRITTEN, CLUSTERED) for column in INDEXED_COLUMNS]
    task = progress.add_task(f"the server builds {len(indexes)} bitmap indexes", total=None)
    maximum, until = 0, time.monotonic() + STALLED_S_MAX
    while time.monotonic() < until:
        summaries = [client.index(table, name) for table, name in indexes]
        indexed_files = sum(item.files for item in summaries)
        progress.update(task, completed=indexed_files, total=sum(item.files_total for item in summaries))
        if indexed_files > maximum:
            maximum, until = indexed_files, time.monotonic() + STALLED_S_MAX
        if all(item.files == item.files_total for item in summaries):
            return
        time.sleep(0.5)
    raise DemoFailed(f"The server has indexed no file for {STALLED_S_MAX:g} s")
