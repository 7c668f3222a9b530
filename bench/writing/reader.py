"""For which queries is the reader with bitmap indexes faster than Iceberg's own reader, and how fast is a full scan?

One Spark session has two tables and two readers, and runs the same query alternately: `format("seamark")` with the
predicate, and Iceberg's reader over the files that the server planned. A third run uses the reader that
`seamark.connector.spark.session.read` chooses. The values of a key are spread evenly, so that no minimum or maximum
excludes a file or a row group. Each file is sorted by a second key, so that a few row groups contain all rows of a
value. All three runs must find the same rows.

The smaller table has row groups of 4 MB, so that a reader can skip some. The larger table has Iceberg's row groups of
128 MB, in which a reader can skip only pages. The files are in `.cache/bench/writing`; missing files are created.

The number of bytes counts the bytes that system calls brought to the JVM and to Python's workers, from files and from
each other. The query that finds no row shows the fixed cost of a query.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import CATALOG, WritingLake, open_lake
from bench.writing.tables import (
    ARROW,
    BASES,
    NAMESPACE,
    clone_table,
    create_bench_table,
    load_or_create_base,
    read_metadata,
    register_metadata,
    run_server,
    write_at_once,
)
from bench.writing.writers import count_read_bytes, sum_bytes_read_since
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.values import CURRENT
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.scans import bind_filter
from seamark.connector.read.tables import open_table
from seamark.connector.spark.reader_choice import (
    BREAK_EVEN_FRACTION,
    BREAK_EVEN_ROWS,
    RemainingRows,
    estimate_remaining_rows,
)
from seamark.connector.spark.session import read
from seamark.connector.write.appends import open_destination
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from seamark.connector.write.target import WriteTarget


@dataclass(frozen=True)
class TableSize:
    """The size of a table.

    Attributes:
        distinct_counts: The number of distinct values of each key column. Each value is in about as many rows.
        group_bytes: The bytes of a row group.
        rounds: The number of runs of each query.
    """

    label: str
    files: int
    rows: int
    distinct_counts: tuple[int, ...]
    group_bytes: int
    rounds: int

    @property
    def columns(self) -> dict[str, str]:
        keys = {f"k{distinct_count}": "int" for distinct_count in self.distinct_counts}
        return {"id": "long", **keys, "clustered": "int", "price": "double", "quantity": "int", "name": "string"}


SIZES = (
    TableSize("", 8, 6_400_000, (100_000, 10_000, 1_000, 100, 20), 4 << 20, 3),
    TableSize("30 M rows: ", 8, 30_000_000, (1_000_000, 100_000, 10_000, 1_000, 100), 128 << 20, 3),
)
QUICK = (
    TableSize("", 2, 40_000, (1_000, 100), 1 << 18, 1),
    TableSize("larger: ", 2, 60_000, (1_000, 100), 128 << 20, 1),
)
PAGES = 100_000
"""The number of values of a key for a query that selects few pages, near the point of equal speed."""
CLUSTERED_VALUES = 100
"""The number of values of the key by which the rows of each file are sorted."""
READ_COLUMNS = ("id", "price", "quantity", "name")
ICEBERG, CHOSEN = "iceberg", "chosen"
_CHUNK_ROWS = 1 << 18


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("writing_reader", "Rows chosen by bitmaps, and all of them, read by Spark", peer="Iceberg's reader")
    bases = folder / "bases" if quick else BASES
    bases.mkdir(parents=True, exist_ok=True)
    with open_lake(folder, bases) as new_lake:
        for size in QUICK if quick else SIZES:
            table = _fill_table(new_lake, size, bases)
            measurements = [
                _compare_readers(report, new_lake, table, size, case, where) for case, where in _list_queries(size)
            ]
            report.notes.append(f"{size.label}{_describe_break_even(measurements)}")
    report.notes += [
        "`seamark.spark.read` chooses Seamark's reader if the rows on pages with a chosen row, plus "
        f"{BREAK_EVEN_ROWS:,} rows, are fewer than {BREAK_EVEN_FRACTION:.0%} of the rows of the remaining files.",
        "The tables have 6.4 M rows in row groups of 4 MB, and 30 M rows in row groups of 128 MB, in 8 files each.",
        "A query counts the chosen rows and sums their four columns, on two cores. The times are medians of wall-clock "
        "times of rounds in alternating order.",
    ]
    return report


def _list_queries(size: TableSize) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the condition of each query. The condition None means all rows.

    The first keys occur in any order, but the rows with the same value of `clustered` follow each other in each file.
    """
    for distinct_count in size.distinct_counts:
        yield f"one row of {distinct_count:,}", f"k{distinct_count} = 3"
        if distinct_count == PAGES:
            yield f"three rows of {distinct_count:,}", f"k{distinct_count} IN (3, 4, 5)"
    yield "no row", "clustered = -1"
    yield f"one row of {CLUSTERED_VALUES}, consecutive rows", "clustered = 3"
    yield "all rows", None


def _describe_break_even(measurements: Sequence[tuple[float, float]]) -> str:
    """Return a sentence that says for which fraction of rows Seamark is faster than its peer, and for which slower.

    The fraction counts the rows on pages that contain a selected row.
    """
    smallest_loss = min((fraction for fraction, ratio in measurements if ratio < 1), default=1.0)
    largest_win = max(
        (fraction for fraction, ratio in measurements if ratio >= 1 and fraction < smallest_loss), default=0.0
    )
    return (
        f"Seamark is faster if at most {largest_win:.0%} of the rows of the remaining files are on pages with a"
        f" selected row. It is slower from {smallest_loss:.0%}."
    )


# Tables


def _fill_table(lake: WritingLake, size: TableSize, bases: Path) -> str:
    base = load_or_create_base(size.rows, "read", partial(_write_files, size=size), bases=bases)
    name = f"read{size.rows}"
    register_metadata(lake.client, name, clone_table(base, lake.folder / "warehouse" / NAMESPACE / name, {}))
    table = f"{NAMESPACE}.{name}"
    for column in (*(f"k{distinct_count}" for distinct_count in size.distinct_counts), "clustered"):
        lake.client.put_index(table, f"by_{column}", kind="bitmap", columns=[column])
        with closing(InProcessWorkers()) as workers:
            build(lake.client, table, f"by_{column}", workers)
    return table


def _write_files(folder: Path, size: TableSize) -> tuple[WrittenFiles, dict[str, Any]]:
    with run_server(folder) as client:
        create_bench_table(
            client, "base", 0, {"write.parquet.row-group-size-bytes": str(size.group_bytes)}, size.columns
        )
        destination = open_destination(client, (NAMESPACE, "base"))
        written_files = write_at_once(partial(_write_file, destination.target, size), range(size.files))
        destination.commit(client, written_files)
        return written_files, read_metadata(client, "base")


def _write_file(target: WriteTarget, size: TableSize, number: int) -> WrittenFiles:
    return write_batches(target, _build_batches(size, number))


def _build_batches(size: TableSize, number: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of data file `number`.

    The ids of all files are interleaved, so each file spans nearly the whole range of ids.
    """
    rows, draw = size.rows // size.files, np.random.default_rng(number)
    schema = pa.schema([(name, ARROW[kind]) for name, kind in size.columns.items()])
    clustered_values = np.sort(draw.integers(0, CLUSTERED_VALUES, rows, dtype=np.int32))
    names = pa.array([f"name {number}" for number in range(5_000)])
    for start in range(0, rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, rows - start)
        columns = {
            "id": np.arange(start, start + count) * size.files + number,
            **{
                f"k{distinct_count}": draw.integers(0, distinct_count, count, dtype=np.int32)
                for distinct_count in size.distinct_counts
            },
            "clustered": clustered_values[start : start + count],
            "price": draw.integers(100, 1_000_000, count) / 100,
            "quantity": draw.integers(1, 51, count, dtype=np.int32),
            "name": names.take(pa.array(draw.integers(0, len(names), count))),
        }
        yield from pa.table(columns, schema=schema).to_batches()


# Turns


def _compare_readers(
    report: Report, lake: WritingLake, table: str, size: TableSize, case: str, where: str | None
) -> tuple[float, float]:
    ways: dict[str, Callable[[], DataFrame]] = {
        OURS: partial(_read_with_seamark, lake, table, where),
        ICEBERG: partial(_read_natively, lake, table, where),
        CHOSEN: partial(read, lake.spark, f"{CATALOG}.{table}", where, columns=READ_COLUMNS),
    }
    durations: dict[str, list[float]] = {name: [] for name in ways}
    actual: dict[str, list[float]] = {name: [] for name in ways}
    answers = set()
    case = size.label + case
    for round_number in range(size.rounds + 1):
        for name in ways if round_number % 2 else reversed(ways):
            bytes_before, started_s = count_read_bytes(), time.perf_counter()
            answers.add(_collect_answer(ways[name]().select(*READ_COLUMNS)))
            seconds, bytes_read = time.perf_counter() - started_s, sum_bytes_read_since(bytes_before)
            if round_number:
                durations[name].append(seconds)
                actual[name].append(bytes_read / 1e6)
    if len(answers) != 1:
        raise AnswersDiffer(f"{case}: {answers}")
    time_row = Row(case, "time", "s", {name: statistics.median(each) for name, each in durations.items()}, peer=ICEBERG)
    report.rows += [
        time_row,
        Row(case, "read", "MB", {name: statistics.median(each) for name, each in actual.items()}, peer=ICEBERG),
    ]
    plan = ways[CHOSEN]()._jdf.queryExecution().executedPlan().toString()
    reader = "Seamark's" if "BatchScan seamark" in plan else "Iceberg's"
    row_numbers = _find_rows(lake.client, table, where)
    report.notes.append(
        f"{case}: {row_numbers.chosen:,} rows are chosen. The pages with a chosen row have {row_numbers.touched:,} of "
        f"the {row_numbers.planned:,} rows of the remaining files. `seamark.spark.read` chooses {reader} reader."
    )
    return (row_numbers.touched / row_numbers.planned if row_numbers.planned else 1.0), time_row.compute_ratio() or 0.0


def _find_rows(client: SeamarkClient, table: str, where: str | None) -> RemainingRows:
    opened_table = open_table(client, table, CURRENT)
    return estimate_remaining_rows(client, opened_table, bind_filter(where, opened_table))


def _read_with_seamark(lake: WritingLake, table: str, where: str | None) -> DataFrame:
    options = {"uri": lake.server.base_url, "table": table, "columns": ",".join(READ_COLUMNS)}
    options |= {} if where is None else {"where": where}
    return lake.spark.read.format("seamark").options(**options).load()


def _read_natively(lake: WritingLake, table: str, where: str | None) -> DataFrame:
    frame = lake.spark.table(f"{CATALOG}.{table}")
    return frame if where is None else frame.where(where)


def _collect_answer(frame: DataFrame) -> tuple[int, int, float, int, int]:
    sums = sf.sum("id"), sf.sum("price"), sf.sum("quantity"), sf.sum(sf.length("name"))
    (row,) = frame.agg(sf.count("*"), *sums).collect()
    return row[0], row[1], round(row[2] or 0, 2), row[3], row[4]
