"""What does a batch of 10,000 rows cost, and does it cost more in a larger table?

The tables have 1, 10 and 50 million rows. Nine of ten keys of a batch are in the table, spread over all of its files.
Seamark writes from plain Python and through PySpark in three ways: it locates rows by a record index; it reads the
column of keys in buckets by key; or, also in buckets, it locates no row and writes equality deletes, as Hudi writes
logs of a bucket. The peers are Iceberg's MERGE INTO in the same Spark session, and Hudi's bucket index in its own
session. The benchmark times the writers alternately, one process at a time, all warm. Each writer has its own table
with the same data files, and gets the same batches. In the end the benchmark counts the rows of each table by version:
they must be exactly those of the batches.

The number of read bytes counts what system calls brought to any process, from files, sockets and pipes. The number of
written bytes counts the new files below the table's folder.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from bench import hudi
from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing import ageing
from bench.writing.hudi import HudiWriter
from bench.writing.merge import TUNINGS, MergeWriter, Tuning, add_hadoop_catalog
from bench.writing.session import WritingLake, open_lake
from bench.writing.tables import BASES, BATCH_ROWS, BUCKETED, FLAT, UPDATED_FRACTION, Batches, RowBatch, open_base
from bench.writing.writers import (
    COPY_ON_WRITE,
    MERGE_ON_READ,
    BenchWriter,
    PythonWriter,
    SparkFrameWriter,
    count_read_bytes,
    list_file_sizes,
    sum_bytes_read_since,
)
from seamark.connector.write.equality_upserts import EQUALITY

SIZES, QUICK_SIZES = (1_000_000, 10_000_000, 50_000_000), (20_000, 40_000)
COPIED_MAX, HUDI_MAX, TRIED_MAX = 10_000_000, 10_000_000, 10_000_000
"""The largest tables, in rows, that are rewritten, that Hudi has, and for which the tunings of MERGE are tried."""
ROUNDS, SLOW_ROUNDS, WARM = 7, 2, 2
SLOW_S, VERY_SLOW_S = 8.0, 24.0
MERGE, HUDI = "merge", "hudi"
RECORD, BUCKET, BLIND = "record index", "bucket", "bucket, equality deletes"
PYTHON, PYSPARK, TASKS = "Python", "PySpark", "PySpark by tasks"
GROWTH_GOAL = 1.2
"""The largest ratio of the time of a batch in the largest table to the time in the smallest table."""
LARGE_TABLE_ROWS = 10_000_000
"""The rows from which a table has the goals of a large table. MERGE INTO takes longer in a larger table."""
HUDI_GOALS = {MERGE_ON_READ: 2.0, COPY_ON_WRITE: 5.0}
COPY_GOAL, PYTHON_GOAL, SPARK_GOAL, SMALL_SPARK_GOAL = 2.0, 20.0, 8.0, 2.0
"""The goals relative to MERGE INTO: for copy-on-write, for plain Python, and for PySpark in large and small tables."""


@dataclass(frozen=True)
class RunSizes:
    """The sizes and numbers of rounds of a run.

    Attributes:
        bases: The folder of the base tables. Each run starts with copies of them.
        rounds: The number of measured batches of each writer.
        warm_steps: The number of batches that each writer writes before the measured batches.
        copied_max: The largest table, in rows, for which copy-on-write is measured.
        hudi_max: The largest table, in rows, for which Hudi is measured.
        tunings: The settings of MERGE INTO that are tried, of which the fastest is measured.
    """

    bases: Path
    rounds: int = ROUNDS
    warm_steps: int = WARM
    copied_max: int = COPIED_MAX
    hudi_max: int = HUDI_MAX
    tunings: tuple[Tuning, ...] = TUNINGS


@dataclass
class WriterMeasurements:
    """The measurements of one writer, for each counted batch: seconds, bytes read, files and bytes written."""

    writer: BenchWriter
    mode: str
    strategy: str
    warm_steps: int = WARM
    rounds: int = ROUNDS
    last_s: float = 0.0
    """The seconds of the last batch, whether it is counted or not."""
    applied_batches: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    read_bytes: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    written_bytes: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def is_due(self) -> bool:
        return len(self.seconds) < self.rounds

    def measure_batch(self, batch: RowBatch) -> None:
        """Write a batch, and record its measurements unless it is a warm-up.

        A slow writer gets fewer batches, to limit the time of the run: fewer warm-ups if a batch takes over
        `VERY_SLOW_S`, and fewer rounds if it takes over `SLOW_S`.
        """
        sizes_before, read_before, started_s = (
            list_file_sizes(self.writer.folder),
            count_read_bytes(),
            time.perf_counter(),
        )
        reported_s = self.writer.upsert(batch)
        elapsed_s = time.perf_counter() - started_s if reported_s is None else reported_s
        read_bytes = sum_bytes_read_since(read_before)
        sizes_after = list_file_sizes(self.writer.folder)
        self.applied_batches.append(batch.batch_number)
        self.last_s = elapsed_s
        self.writer.delete_old_files()
        if len(self.applied_batches) <= self.warm_steps:
            if elapsed_s > VERY_SLOW_S:
                self.warm_steps = len(self.applied_batches)
            if len(self.applied_batches) == self.warm_steps and elapsed_s > SLOW_S:
                self.rounds = min(self.rounds, SLOW_ROUNDS)
            return
        new_files = sizes_after.keys() - sizes_before.keys()
        self.seconds.append(elapsed_s)
        self.read_bytes.append(read_bytes)
        self.files.append(len(new_files))
        self.written_bytes.append(sum(sizes_after[path] for path in new_files))

    def check(self, batches: Batches) -> None:
        """Check that the table has the rows of the applied batches."""
        versions, expected = self.writer.count_rows_by_version(), batches.count_expected_rows(self.applied_batches)
        if versions != expected:
            raise AnswersDiffer(f"{self.writer.name} has {versions} rows by version, the batches make {expected}")


async def run(
    folder: Path, *, quick: bool = False, sizes: Sequence[int] = SIZES, batches: int = ageing.BATCHES
) -> Report:
    report = Report("writing_upserts", "What does a batch of 10,000 rows cost?", peer="as the row says")
    run_sizes = RunSizes(BASES)
    if quick:
        first = {item.mode: item for item in reversed(TUNINGS)}
        sizes, batches = QUICK_SIZES, 4
        run_sizes = RunSizes(folder / "bases", 1, 0, sizes[0], sizes[0], tuple(first.values()))
    with ExitStack() as stack:
        lake_for_run = stack.enter_context(open_lake(folder, run_sizes.bases))
        add_hadoop_catalog(lake_for_run.spark, folder / "hadoop")
        peer = (
            stack.enter_context(hudi.open_session("bench.writing.hudi_peer", folder / "hudi"))
            if hudi.is_hudi_installed()
            else None
        )
        tuning_by_size: dict[str, Tuning] = {}
        tables: dict[int, list[WriterMeasurements]] = {}
        drawn_batches = {rows: Batches(rows, folder) for rows in sizes}
        for rows in sizes:
            tables[rows] = [
                *_prepare_our_writers(lake_for_run, rows, run_sizes),
                *_measure_merge(
                    report, lake_for_run.spark, drawn_batches[rows], folder / "hadoop", run_sizes, tuning_by_size
                ),
                *(
                    []
                    if peer is None or rows > run_sizes.hudi_max
                    else _prepare_hudi_writers(peer, rows, folder, run_sizes)
                ),
            ]
        _run_rounds(tables, drawn_batches)
        for rows in sizes:
            for table in tables[rows]:
                table.check(drawn_batches[rows])
            _report_rows(report, rows, tables[rows])
        _report_growth_with_rows(report, tables)
        aged_rows = max((rows for rows in sizes if rows <= run_sizes.copied_max), default=min(sizes))
        for layout, strategy in ((FLAT, None), (BUCKETED, EQUALITY)):
            ageing.measure_ageing(
                report,
                lake_for_run,
                aged_rows,
                batches,
                run_sizes.bases,
                layout=layout,
                strategy=strategy,
                rounds=1 if quick or strategy else 5,
            )
    report.notes += [
        f"Batches of {BATCH_ROWS:,} rows, {UPDATED_FRACTION:.0%} of them of stored keys; ten columns, UUIDs as keys, 16"
        " data files or buckets; format version 3.",
        f"A time is the median of {ROUNDS} batches, or of {SLOW_ROUNDS} if a batch takes over {SLOW_S:.0f} s. Before"
        f" them, a writer writes two batches that are not counted, or one if a batch takes over {VERY_SLOW_S:.0f} s.",
        f"{TASKS}: the batches are handled as if they were too large for the driver (driver_rows=0).",
    ]
    if peer is None:
        report.notes.append("Hudi is not here: `make hudi`.")
    return report


# The writers


def _prepare_our_writers(lake: WritingLake, rows: int, sizes: RunSizes) -> Iterator[WriterMeasurements]:
    kinds = [
        (PYTHON, MERGE_ON_READ, RECORD),
        (PYSPARK, MERGE_ON_READ, RECORD),
        (PYTHON, MERGE_ON_READ, BLIND),
        (PYSPARK, MERGE_ON_READ, BLIND),
    ]
    if rows <= sizes.copied_max:
        kinds += [
            (TASKS, MERGE_ON_READ, RECORD),
            (PYSPARK, MERGE_ON_READ, BUCKET),
            (PYSPARK, COPY_ON_WRITE, BUCKET),
        ]
    for number, (writer_kind, mode, lookup_method) in enumerate(kinds):
        base_table = open_base(rows, FLAT if lookup_method == RECORD else BUCKETED, bases=sizes.bases)
        table = lake.clone_table(base_table, f"u{rows}_{number}", mode=mode, is_indexed=lookup_method == RECORD)
        name, equality_strategy = f"{writer_kind}, {lookup_method}", EQUALITY if lookup_method == BLIND else None
        writer = (
            PythonWriter(name, table, strategy=equality_strategy)
            if writer_kind == PYTHON
            else SparkFrameWriter(name, table, strategy=equality_strategy, by_tasks=writer_kind == TASKS)
        )
        yield WriterMeasurements(writer, mode, writer_kind, sizes.warm_steps, sizes.rounds)


def _measure_merge(
    report: Report, spark: SparkSession, batches: Batches, warehouse: Path, sizes: RunSizes, tuned: dict[str, Tuning]
) -> Iterator[WriterMeasurements]:
    """Yield the measurements of MERGE INTO with the fastest tuning of each mode.

    If the table is too large to try all tunings, the tuning is that of the previous size.
    """
    rows = batches.base_rows
    for mode in (MERGE_ON_READ, COPY_ON_WRITE) if rows <= sizes.copied_max else (MERGE_ON_READ,):
        tried_tunings = [tuning for tuning in sizes.tunings if tuning.mode == mode]
        if rows > TRIED_MAX and mode in tuned:
            tried_tunings = [tuned[mode]]
        writers = [
            _open_merge_writer(spark, tried_tuning, rows, number, warehouse, sizes.bases)
            for number, tried_tuning in enumerate(tried_tunings)
        ]
        measurements = [WriterMeasurements(writer, mode, MERGE, warm_steps=1, rounds=1) for writer in writers]
        if len(measurements) > 1:
            for _ in range(2):
                batch = batches.write_next_batch()
                for item in measurements:
                    item.measure_batch(batch)
                if min(measurement.last_s for measurement in measurements) > VERY_SLOW_S:
                    break
            tried_times = ", ".join(
                f"{tried_tuning.name} {measurement.last_s:.2f} s"
                for tried_tuning, measurement in zip(tried_tunings, measurements, strict=True)
            )
            report.notes.append(f"MERGE's tunings, {rows:,} rows, {mode}, tried: {tried_times}.")
            measurements.sort(key=lambda measurement: measurement.last_s)
            for item in measurements[1:]:
                shutil.rmtree(item.writer.folder)
        best = measurements[0]
        tuned[mode] = next(writer.tuning_options for writer in writers if writer is best.writer)
        # The writer keeps its table and is already warm.
        rounds = min(sizes.rounds, SLOW_ROUNDS) if best.last_s > SLOW_S else sizes.rounds
        warm_steps = len(best.applied_batches) or sizes.warm_steps
        yield WriterMeasurements(
            best.writer, mode, MERGE, warm_steps, rounds, last_s=best.last_s, applied_batches=best.applied_batches
        )


def _open_merge_writer(
    spark: SparkSession, tuning: Tuning, rows: int, number: int, warehouse: Path, bases: Path
) -> MergeWriter:
    name = f"m{rows}_{tuning.mode.replace('-', '_')}_{number}"
    return MergeWriter(tuning, open_base(rows, tuning.layout, bases=bases), spark, warehouse, name)


def _prepare_hudi_writers(
    peer: hudi.HudiSession, rows: int, folder: Path, sizes: RunSizes
) -> Iterator[WriterMeasurements]:
    for mode in (MERGE_ON_READ, COPY_ON_WRITE) if rows <= sizes.copied_max else (MERGE_ON_READ,):
        base_table = open_base(rows, BUCKETED, bases=sizes.bases)
        writer = HudiWriter(HUDI, base_table, peer, folder / f"h{rows}-{mode}", mode=mode, bases=sizes.bases)
        yield WriterMeasurements(writer, mode, HUDI, sizes.warm_steps, sizes.rounds)


# How they are measured


def _run_rounds(tables: dict[int, list[WriterMeasurements]], batches: dict[int, Batches]) -> None:
    """Run the writers in alternating order until each writer has written all its batches."""
    number = 0
    while any(measurement.is_due for measurements in tables.values() for measurement in measurements):
        number += 1
        for rows, measurements in tables.items():
            due = [measurement for measurement in measurements if measurement.is_due]
            batch = batches[rows].write_next_batch() if due else None
            for item in due if number % 2 else reversed(due):
                assert batch is not None
                item.measure_batch(batch)


MEASURES: dict[str, tuple[str, Callable[[WriterMeasurements], float]]] = {
    "read": ("MB", lambda measurement: statistics.median(measurement.read_bytes) / 1e6),
    "written": ("MB", lambda measurement: statistics.median(measurement.written_bytes) / 1e6),
    "files written": ("", lambda measurement: statistics.median(measurement.files)),
}


def _report_rows(report: Report, rows: int, measurements: Sequence[WriterMeasurements]) -> None:
    for mode in (MERGE_ON_READ, COPY_ON_WRITE):
        mode_measurements = [measurement for measurement in measurements if measurement.mode == mode]
        case = f"{rows:,} rows, {mode}"
        peers = {item.strategy: item for item in mode_measurements if item.strategy in (MERGE, HUDI)}
        seamark_upserts = [item for item in mode_measurements if item.strategy not in peers]
        for our in seamark_upserts:
            for name, peer in peers.items():
                values = {OURS: our.median, name: peer.median}
                factor = _choose_goal(our.strategy, name, mode, rows)
                goal = None if factor is None else values[name] / factor
                report.rows.append(Row(case, f"{our.writer.name}; {name}", "s", values, peer=name, goal=goal))
        for our in seamark_upserts:
            for measure, (unit, value) in MEASURES.items():
                values = {OURS: value(our), **{name: value(peer) for name, peer in peers.items()}}
                report.rows.append(Row(case, f"{our.writer.name}, {measure}", unit, values, peer=MERGE))


def _choose_goal(strategy: str, peer: str, mode: str, rows: int) -> float | None:
    """Return how many times faster than the peer the writer should be, or None without a goal."""
    is_large = rows >= LARGE_TABLE_ROWS
    if peer == HUDI:
        return None if strategy == PYTHON else HUDI_GOALS[mode]
    if mode == COPY_ON_WRITE:
        return COPY_GOAL if is_large else None
    if strategy == PYTHON:
        return PYTHON_GOAL if is_large else None
    return SPARK_GOAL if is_large else SMALL_SPARK_GOAL


def _report_growth_with_rows(report: Report, tables: dict[int, list[WriterMeasurements]]) -> None:
    """Compare the times of merge-on-read in the largest table with those in the smallest table."""
    medians_of_small_table, medians_of_large_table = (
        {
            table.writer.name if table.strategy != MERGE else MERGE: table.median
            for table in tables[rows]
            if table.mode == MERGE_ON_READ
        }
        for rows in (min(tables), max(tables))
    )
    case = f"{max(tables):,} rows beside {min(tables):,}"
    for name in medians_of_large_table:
        if name not in (MERGE, HUDI) and name in medians_of_small_table:
            # Without a record index, the writer reads the keys of all rows in the buckets, so its time grows.
            goal = None if name.endswith(BUCKET) else GROWTH_GOAL
            report.rows.append(
                Row(case, name, "×", {OURS: medians_of_large_table[name] / medians_of_small_table[name]}, goal=goal)
            )
    report.rows.append(Row(case, "MERGE", "×", {MERGE: medians_of_large_table[MERGE] / medians_of_small_table[MERGE]}))
