"""The benchmark's tables and queries on Spark, through whatever catalog the session knows by a name.

How many files a query read is asked of the query's own executed plan: each scan's tasks name the files they were given.
So the figure is Spark's, not the server's, and the same whoever planned the scan.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.ssb.generate import TABLES, table_path

FACT = "lineorder"
_ORDER = ("lo_orderdate", "lo_orderkey", "lo_linenumber")
_FILTERS = re.compile(r"\bfilters=(.*), runtimeFilters=")
_COMMA = re.compile(r", (?![^(]*\))")
"""Between filters, not within a list of values."""


@dataclass(frozen=True)
class Answer:
    """One query: its rows, wall seconds (planning, reading and fetching), and by table the data files read and what
    was asked of the table's rows, in SQL: all that Spark tells whoever plans."""

    rows: list[tuple[Any, ...]]
    seconds: float
    files_read: dict[str, int]
    pushed: dict[str, str]


def write_table(spark: SparkSession, folder: Path, table: str, target: str, fact_files: int) -> None:
    """Creates `target` (catalog.namespace.table) from the Parquet file of `table` with Spark's DataFrame writer.

    The fact is cut by order date into `fact_files` files of about equal rows, ordered within; a dimension is one file.
    """
    frame = spark.read.parquet(str(table_path(folder, table)))
    if table == FACT:
        frame = frame.repartitionByRange(fact_files, *_ORDER[:2]).sortWithinPartitions(*_ORDER)
    else:
        frame = frame.coalesce(1)
    # Distribution none: Spark keeps the cut made here instead of shuffling the rows into few large files.
    writer = frame.writeTo(target).using("iceberg").tableProperty("format-version", "2")
    writer.tableProperty("write.distribution-mode", "none").create()


def files_in(spark: SparkSession, target: str) -> int:
    """Data files in the current snapshot."""
    return int(spark.sql(f"SELECT count(*) FROM {target}.files").collect()[0][0])


def ask(spark: SparkSession, sql: str) -> Answer:
    started = time.perf_counter()
    frame = spark.sql(sql)
    rows = [tuple(row) for row in frame.collect()]
    seconds = time.perf_counter() - started
    plan = frame._jdf.queryExecution().executedPlan()
    scans = {_table(node): node for node in _scans(plan)}
    read = {name: _files(node) for name, node in scans.items() if name in TABLES}
    return Answer(rows, seconds, read, {name: _pushed(scans[name]) for name in read})


def _scans(plan: Any) -> Iterator[Any]:
    """Every BatchScanExec of a plan.

    Of an adaptive plan the initial one is walked: the final one drops what turned out not to matter (a join whose
    other side came up empty), whether or not it was read by then. A scan that never ran has 0 in its metrics.
    """
    kind = plan.getClass().getSimpleName()
    if kind == "BatchScanExec":
        yield plan
    elif kind == "AdaptiveSparkPlanExec":
        yield from _scans(plan.initialPlan())
    else:
        children = plan.children()
        for index in range(children.size()):
            yield from _scans(children.apply(index))


def _table(node: Any) -> str:
    return str(node.table().name()).rsplit(".", 1)[-1]


def _files(node: Any) -> int:
    """Data files that its planning let through.

    Not the metric `resultDataFiles`: it stays 0 where a server planned.
    """
    partitions = node.inputPartitions()
    files = {
        str(task.file().location())
        for number in range(partitions.size())
        for task in partitions.apply(number).taskGroup().tasks().toArray()
    }
    return len(files)


def _pushed(node: Any) -> str:
    """Of numbers only: in texts a comma could not be told from one between filters. Empty where nothing was pushed."""
    found = _FILTERS.search(str(node.scan().description()))
    return " AND ".join(_COMMA.split(found[1])) if found else ""
