"""The tables and queries of the Star Schema Benchmark in Spark, in any catalog of the session.

The files that a query read come from its executed plan: the tasks of each scan name their files. So the figures are
Spark's, not the server's, and do not depend on the planner of the scan.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from bench.ssb.generate import TABLES, get_table_path
from seamark.formats.protocol.wire import PLAN_MARK

FACT = "lineorder"
NO_OPTIONS: Mapping[str, str] = {}
_LOCATION = re.compile(r"\bfile=(.*?), partition_data=")
"""The pattern of a file location in the text of a task."""
_ORDER = ("lo_orderdate", "lo_orderkey", "lo_linenumber")


@dataclass(frozen=True)
class FilesRead:
    """The number of data files that a scan read, and their size in bytes."""

    files: int
    size_bytes: int


@dataclass(frozen=True)
class SparkAnswer:
    """The result of one query.

    Attributes:
        rows: The rows of the result.
        seconds: The time of planning, reading and fetching.
        read_files: The files that were read, by table name.
    """

    rows: list[tuple[Any, ...]]
    seconds: float
    read_files: dict[str, FilesRead]


def write_table(
    spark: SparkSession,
    folder: Path,
    table: str,
    target: str,
    fact_files: int | None,
    properties: Mapping[str, str] = NO_OPTIONS,
) -> None:
    """Create `target` (catalog.namespace.table) from the Parquet file of `table` with Spark's DataFrame writer.

    The facts are split by order date into `fact_files` files with about the same number of rows, sorted in each file.
    With
    None they are copied in the order of the source, into one file for each task. A dimension has one file.
    """
    frame = spark.read.parquet(str(get_table_path(folder, table)))
    if table == FACT and fact_files is not None:
        frame = frame.repartitionByRange(fact_files, *_ORDER[:2]).sortWithinPartitions(*_ORDER)
    elif table != FACT:
        frame = frame.coalesce(1)
    # With distribution "none", Spark keeps this split instead of shuffling the rows into a few large files.
    writer = frame.writeTo(target).using("iceberg").tableProperty("format-version", "2")
    writer = writer.tableProperty("write.distribution-mode", "none")
    for key, value in properties.items():
        writer = writer.tableProperty(key, value)
    writer.create()


def count_files(spark: SparkSession, target: str) -> int:
    """Return the number of data files in the current snapshot."""
    return int(spark.sql(f"SELECT count(*) FROM {target}.files").collect()[0][0])


def run_spark_query(run: Callable[[str], DataFrame], sql: str) -> SparkAnswer:
    """Run a query, and return its answer. `run` is a function such as `spark.sql`."""
    started_s = time.perf_counter()
    frame = run(sql)
    rows = [tuple(row) for row in frame.collect()]
    seconds = time.perf_counter() - started_s
    read = {
        name: _count_files(node)
        for node in _find_scans(frame._jdf.queryExecution().executedPlan())
        if (name := _find_table_name(node)) in TABLES
    }
    return SparkAnswer(rows, seconds, read)


def _find_scans(plan: Any) -> Iterator[Any]:
    """Yield every BatchScanExec of a plan.

    The scans of an adaptive plan are those of its initial plan. The final plan leaves out scans whose rows turned
    out not to matter, for example because the other side of a join was empty, even if they had read files. A scan that
    never ran has 0 in its metrics.
    """
    kind = plan.getClass().getSimpleName()
    if kind == "BatchScanExec":
        yield plan
    elif kind == "AdaptiveSparkPlanExec":
        yield from _find_scans(plan.initialPlan())
    else:
        children = plan.children()
        for index in range(children.size()):
            yield from _find_scans(children.apply(index))


def _find_table_name(node: Any) -> str:
    """Return the name of the scanned table; a plan table has the name of its planned table."""
    return str(node.table().name()).rsplit(".", 1)[-1].partition(PLAN_MARK)[0]


def _count_files(node: Any) -> FilesRead:
    """Return the number and size of the data files of the scan.

    The metric `resultDataFiles` is 0 if a server planned the scan.

    A call into the JVM is slow, and there are thousands of files. So one call reads the text of a whole group of tasks.
    If that text has a location for each task, the locations are taken from it. The size is that of the group.
    """
    partitions = node.inputPartitions()
    locations: set[str] = set()
    size_bytes = 0
    for number in range(partitions.size()):
        group = partitions.apply(number).taskGroup()
        tasks = group.tasks()
        paths = _LOCATION.findall(str(tasks.toString()))
        if len(paths) != tasks.size():
            paths = [str(task.file().location()) for task in tasks.toArray()]
        locations.update(paths)
        size_bytes += int(group.sizeBytes())
    return FilesRead(len(locations), size_bytes)
