"""When are rows that bitmap indexes choose read faster than by Iceberg's own reader, and what does a full scan cost?

One Spark, one table, two readers, the same query in turns: `format("seamark")` with the predicate, and Iceberg's reader
over the files that the server planned; then what `connector.spark.session.read` makes of it, which is one of the two.
Values of a key are spread evenly, so that no minimum or maximum leaves out a file or a row group; but of one more key,
by which each file is in order, few row groups hold all rows of a value. All three must find the same.

Bytes are those that system calls brought to the JVM and to Python's workers, from files and from each other. Workers
that Spark starts to plan and to read import what they run: the query that finds no row tells how much that is.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from bench.report import OURS, Report, Row
from bench.writing.session import CATALOG, Lake, lake
from bench.writing.tables import ARROW, NAMESPACE
from bench.writing.writers import AnswersDiffer, read_since, reads
from connector.building import InProcess, build
from connector.spark.session import read
from connector.writing import append

FILES, ROWS = 8, 800_000
QUICK_FILES, QUICK_ROWS = 2, 20_000
SHARES = (100_000, 10_000, 1_000, 100, 20, 5)
"""One row of so many is chosen."""
CLUSTERED = 100
"""Values of the key by which each file's rows are in order."""
ROUNDS = 5
TABLE = f"{NAMESPACE}.read"
READ = ("id", "price", "quantity", "name")
ICEBERG, CHOSEN = "iceberg", "chosen"


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("writing_reader", "Rows chosen by bitmaps, and all of them, read by Spark", peer="Iceberg's reader")
    files, rows, rounds = (QUICK_FILES, QUICK_ROWS, 1) if quick else (FILES, ROWS, ROUNDS)
    shares = [one for one in SHARES if one * 10 <= files * rows]
    with lake(folder) as made:
        _fill(made, files, rows, shares)
        for share in shares:
            _compared(report, made, f"one row of {share:,}", f"k{share} = 3", rounds)
        _compared(report, made, "no row", "clustered = -1", rounds)
        _compared(report, made, f"one row of {CLUSTERED}, side by side", "clustered = 3", rounds)
        _compared(report, made, "all rows", None, rounds)
    quicker = [row.case for row in report.rows if row.measure == "time" and (row.ratio() or 0) > 1]
    report.notes += [
        f"{files} files of {rows:,} rows; count and sums over the four columns of the rows chosen; two cores.",
        f"Wall clock, medians of {rounds} rounds in turns, after one.",
        f"Ours is the quicker for: {', '.join(quicker) or 'nothing'}.",
    ]
    return report


def _fill(made: Lake, files: int, rows: int, shares: list[int]) -> None:
    kinds = {"id": "long", **{f"k{share}": "int" for share in shares}, "clustered": "int"}
    kinds |= {"price": "double", "quantity": "int", "name": "string"}
    made.client._request("POST", "/v1/namespaces", {}, json.dumps({"namespace": [NAMESPACE]}).encode())
    fields = [
        {"id": number, "name": name, "required": False, "type": kind}
        for number, (name, kind) in enumerate(kinds.items(), 1)
    ]
    # Row groups of 4 MB, so that there are some to skip in files of this size.
    properties = {"format-version": "3", "write.parquet.row-group-size-bytes": str(4 << 20)}
    body = {"name": "read", "schema": {"type": "struct", "fields": fields}, "properties": properties}
    made.client._request("POST", f"/v1/namespaces/{NAMESPACE}/tables", {}, json.dumps(body).encode())
    names = pa.array([f"name {one}" for one in range(5_000)])
    for number in range(files):
        draw = np.random.default_rng(number)
        columns = {
            "id": np.arange(number, files * rows, files),
            **{f"k{share}": draw.integers(0, share, rows, dtype=np.int32) for share in shares},
            "clustered": np.sort(draw.integers(0, CLUSTERED, rows, dtype=np.int32)),
            "price": draw.integers(100, 1_000_000, rows) / 100,
            "quantity": draw.integers(1, 51, rows, dtype=np.int32),
            "name": names.take(pa.array(draw.integers(0, len(names), rows))),
        }
        schema = pa.schema([(name, ARROW[kind]) for name, kind in kinds.items()])
        append(made.client, TABLE, pa.table(columns, schema=schema))
    for column in (*(f"k{share}" for share in shares), "clustered"):
        made.client.put_index(TABLE, f"by_{column}", kind="bitmap", columns=[column])
        with closing(InProcess()) as workers:
            build(made.client, TABLE, f"by_{column}", workers)


def _compared(report: Report, made: Lake, case: str, where: str | None, rounds: int) -> None:
    ways: dict[str, Callable[[], DataFrame]] = {
        OURS: partial(_ours, made, where),
        ICEBERG: partial(_native, made, where),
        CHOSEN: partial(read, made.spark, f"{CATALOG}.{TABLE}", where),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    got: dict[str, list[float]] = {name: [] for name in ways}
    answers = set()
    for turn in range(rounds + 1):
        for name in ways if turn % 2 else reversed(ways):
            before, started = reads(), time.perf_counter()
            answers.add(_answer(ways[name]().select(*READ)))
            seconds, size = time.perf_counter() - started, read_since(before)
            if turn:
                took[name].append(seconds)
                got[name].append(size / 1e6)
    if len(answers) != 1:
        raise AnswersDiffer(f"{case}: {answers}")
    report.rows += [
        Row(case, "time", "s", {name: statistics.median(each) for name, each in took.items()}, peer=ICEBERG),
        Row(case, "read", "MB", {name: statistics.median(each) for name, each in got.items()}, peer=ICEBERG),
    ]
    plan = ways[CHOSEN]()._jdf.queryExecution().executedPlan().toString()
    who = "ours" if "BatchScan seamark" in plan else "Iceberg's"
    report.notes.append(f"{case}: the reading function chooses {who}.")


def _ours(made: Lake, where: str | None) -> DataFrame:
    options = {"uri": made.server.base_url, "table": TABLE, "columns": ",".join(READ)}
    options |= {} if where is None else {"where": where}
    return made.spark.read.format("seamark").options(**options).load()


def _native(made: Lake, where: str | None) -> DataFrame:
    frame = made.spark.table(f"{CATALOG}.{TABLE}")
    return frame if where is None else frame.where(where)


def _answer(frame: DataFrame) -> tuple[int, int, float, int, int]:
    sums = sf.sum("id"), sf.sum("price"), sf.sum("quantity"), sf.sum(sf.length("name"))
    (row,) = frame.agg(sf.count("*"), *sums).collect()
    return row[0], row[1], round(row[2] or 0, 2), row[3], row[4]
