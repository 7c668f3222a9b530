"""The tables of the demo. PyIceberg writes them, the server indexes them, and Seamark's Spark job clusters them.

Three fact tables have the same rows: the first as PyIceberg wrote it, the second in Seamark's layout, the third with
cubes. With separate tables, the demo can measure its columns alternately.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.table import Table
from pyspark.sql import SparkSession
from rich.progress import Progress

from bench import connect
from bench.demo.options import DemoFailed, Options
from bench.ssb.cube_definitions import CUBES, define_cubes
from bench.ssb.generate import TABLES, get_table_path
from bench.ssb.spark import FACT
from seamark.connector.client.engines import build_catalog_conf
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import read_service_jobs
from seamark.connector.spark.frames.clustering import cluster
from seamark.connector.spark.session import iceberg_jars, open_session, session_conf
from seamark.connector.write.clustering import JoinedTable
from tests.services.java import SHORT_LIVED, configure_local_files
from tests.services.process import CACHE, ServiceFailed

NAMESPACE = "ssb"
WRITTEN, CLUSTERED, CUBED = (NAMESPACE, FACT), ("clustered", FACT), ("cubed", FACT)
"""The facts as PyIceberg wrote them, in Seamark's layout, and with cubes."""
INDEXED_COLUMNS = ("lo_custkey", "lo_suppkey", "lo_partkey", "lo_orderdate", "lo_discount", "lo_quantity")
"""All columns that the queries join or compare."""
INDEXES = {f"seamark.index.of_{column}": f"bitmap({column})" for column in INDEXED_COLUMNS}
"""The properties that define the indexes of a table of facts."""
NO_INDEXES: Mapping[str, str] = {}
JOINS = {
    "customer": JoinedTable((NAMESPACE, "customer"), {"lo_custkey": "c_custkey"}),
    "supplier": JoinedTable((NAMESPACE, "supplier"), {"lo_suppkey": "s_suppkey"}),
    "part": JoinedTable((NAMESPACE, "part"), {"lo_partkey": "p_partkey"}),
}
CLUSTERING_COLUMNS = ("lo_orderdate", "customer.c_city", "supplier.s_city", "part.p_brand1")
OWN_PLANS = {"seamark.scan-planning-mode": "client"}
"""The settings with which Spark plans queries itself, as it does with any other catalog."""
STALLED_S_MAX = 300.0
"""The longest time in seconds to wait for the next indexed file."""
_IDLE_POLLS = 4
"""The number of successive polls without a job after which the server has tried all cubes."""
_APPENDED_ROWS = 1_000_000
"""The approximate number of rows of an append; all of them are in memory at the same time."""


@contextlib.contextmanager
def open_demo_session(uri: str, folder: Path) -> Iterator[SparkSession]:
    """Start Spark with the server at `uri` as its catalog.

    The JVM writes its messages to spark.log. It runs only for minutes, so Spark uses the options of `SHORT_LIVED`, with
    which the JVM compiles code quickly instead of optimizing it.
    """
    conf = {
        **session_conf(iceberg_jars(CACHE / "jars")),
        **build_catalog_conf(connect.CATALOG, uri),
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": " ".join(SHORT_LIVED),
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.warehouse.dir": str(folder / "spark-warehouse"),
    }
    # `configure_local_files` compiles a faster file system class, which needs a JDK. With a Java runtime that has no
    # compiler, Spark uses Hadoop's class, which writes files more slowly.
    with contextlib.suppress(ServiceFailed):
        conf |= configure_local_files()
    with _redirect_stderr(folder / "spark.log"):
        spark = open_session("seamark-demo", conf)
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _redirect_stderr(path: Path) -> Iterator[None]:
    """Make processes that start inside the block inherit `path` as their standard error."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def write_demo_tables(uri: str, data: Path, options: Options, progress: Progress) -> None:
    """Write the tables with PyIceberg, the facts in the order of the source, which is by date.

    The two other fact tables begin as copies of the source file. The server builds the indexes of a table as soon as
    the table has rows. It builds them with one worker, and begins with the fact table as PyIceberg wrote it. Meanwhile
    the Spark job that clusters the table `CLUSTERED` builds most indexes of that table.
    """
    facts = get_table_path(data, FACT)
    task = progress.add_task("PyIceberg writes the tables", total=len(TABLES) + 2)
    with contextlib.closing(RestCatalog("demo", uri=uri)) as catalog:
        for namespace, _ in (WRITTEN, CLUSTERED, CUBED):
            catalog.create_namespace(namespace)
        for name in TABLES:
            table = _create_table(catalog, (NAMESPACE, name), data)
            if name == FACT:
                _append_facts(table, facts, options.fact_files)
                _set_properties(table, INDEXES)
            else:
                table.append(pq.read_table(get_table_path(data, name)))
            progress.advance(task)
        _add_copy(_create_table(catalog, CUBED, data), facts)
        with contextlib.closing(IndexClient(uri)) as client:
            define_cubes(client, CUBED, NAMESPACE)
        progress.advance(task)
        _add_copy(_create_table(catalog, CLUSTERED, data, INDEXES), facts)
        progress.advance(task)


def _create_table(
    catalog: RestCatalog, name: tuple[str, str], data: Path, properties: Mapping[str, str] = NO_INDEXES
) -> Table:
    schema = pq.read_schema(get_table_path(data, name[-1]))
    return catalog.create_table(name, schema=schema, properties={**OWN_PLANS, **properties})


def _set_properties(table: Table, properties: Mapping[str, str]) -> None:
    with table.transaction() as transaction:
        transaction.set_properties(dict(properties))


def _append_facts(table: Table, source: Path, files: int) -> None:
    """Append the rows of `source` in their order, in `files` files of equal size."""
    with pq.ParquetFile(source) as facts:
        file_rows = math.ceil(facts.metadata.num_rows / files)
        for rows in _read_slices(facts, file_rows * max(1, _APPENDED_ROWS // file_rows)):
            # PyIceberg splits the rows by their size in memory.
            size_bytes = math.ceil(file_rows * rows.nbytes / rows.num_rows) + 1
            with table.transaction() as transaction:
                transaction.set_properties({"write.target-file-size-bytes": str(size_bytes)})
                transaction.append(rows)


def _read_slices(file: pq.ParquetFile, count: int) -> Iterator[pa.Table]:
    """Yield the rows of a file in tables of `count` rows. The last table may have fewer."""
    rows = file.schema_arrow.empty_table()
    for group in range(file.num_row_groups):
        rows = pa.concat_tables([rows, file.read_row_group(group)])
        while rows.num_rows >= count:
            yield rows.slice(0, count).combine_chunks()
            rows = rows.slice(count)
    if rows.num_rows:
        yield rows.combine_chunks()


def _add_copy(table: Table, source: Path) -> None:
    """Add a copy of the Parquet file `source` to a table, so that the table does not own the source file."""
    location = f"{table.location()}/data/{source.name}"
    path = Path(urlsplit(location).path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    table.add_files([location])


def cluster_facts(spark: SparkSession, client: IndexClient, options: Options, progress: Progress) -> None:
    """Run `USE` for the namespace `ssb` in the session, and rewrite the second fact table into Seamark's layout.

    `USE` stays in effect for later queries, which name the tables other than the facts without a namespace.
    """
    spark.sql(f"USE {connect.CATALOG}.{NAMESPACE}")
    task = progress.add_task("Seamark clusters the facts", total=1)
    cluster(spark, CLUSTERED, CLUSTERING_COLUMNS, joins=JOINS, files=options.fact_files, client=client)
    progress.update(task, completed=1)


def wait_for_indexes(client: IndexClient, progress: Progress) -> None:
    """Wait until the server has built the bitmap indexes, and all cubes that are smaller than the facts.

    Raises:
        DemoFailed: No file was indexed for `STALLED_S_MAX` seconds.
    """
    bitmaps = [(table, f"of_{column}") for table in (WRITTEN, CLUSTERED) for column in INDEXED_COLUMNS]
    cubes = [(CUBED, name) for name in CUBES]
    task = progress.add_task(f"the server builds {len(bitmaps)} bitmaps, {len(cubes)} cubes", total=None)
    maximum, until = -1, time.monotonic() + STALLED_S_MAX
    idle_polls = 0
    while time.monotonic() < until:
        summaries = {index: client.index(*index) for index in (*bitmaps, *cubes)}
        indexed_files = sum(item.files for item in summaries.values())
        progress.update(task, completed=indexed_files, total=sum(item.files_total for item in summaries.values()))
        if indexed_files > maximum:
            maximum, until = indexed_files, time.monotonic() + STALLED_S_MAX
        unfinished_indexes = [index for index, item in summaries.items() if item.files < item.files_total]
        # At a small scale, a cube that does not shrink the facts has no entry.
        idle_polls = idle_polls + 1 if _is_idle(client, CUBED) else 0
        if not unfinished_indexes or (idle_polls >= _IDLE_POLLS and not set(unfinished_indexes) & set(bitmaps)):
            progress.update(task, completed=indexed_files, total=indexed_files)
            return
        time.sleep(0.5)
    raise DemoFailed(f"The server has indexed no file for {STALLED_S_MAX:g} s")


def _is_idle(client: IndexClient, table: tuple[str, str]) -> bool:
    """Return whether no job of a table runs or waits for its first attempt."""
    jobs = read_service_jobs(client, table)
    return not jobs["jobs"] and all(job["failures"] for job in jobs["waiting"])
