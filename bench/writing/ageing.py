"""How much slower are reads after a hundred merge-on-read batches, and after a rewrite of the files?

A hundred batches leave a hundred small data files, and a deletion vector for each data file with changed rows.
Iceberg's own reader reads four columns of the whole table: before the batches, after them, and after
`rewrite_data_files`. The times are multiples of the first time. The time of the last batches, compared with the first
batches, shows the cost for writers. With equality deletes, in buckets by key, a batch adds two files to each bucket.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import CATALOG, WritingLake
from bench.writing.tables import NAMESPACE, Batches, open_base
from bench.writing.writers import MERGE_ON_READ, PythonWriter

BATCHES = 100
REWRITE = "map('delete-file-threshold', '1', 'rewrite-all', 'true')"


def measure_ageing(
    report: Report,
    lake: WritingLake,
    rows: int,
    batches: int,
    bases: Path,
    *,
    layout: str,
    strategy: str | None,
    rounds: int,
) -> None:
    name = f"aged_{layout}"
    table = lake.clone_table(
        open_base(rows, layout, bases=bases), name, mode=MERGE_ON_READ, is_indexed=strategy is None
    )
    writer, drawn_batches = PythonWriter("aged", table, strategy=strategy), Batches(rows, lake.folder)
    read_s = {"before": _measure_read_s(lake.spark, name, rounds)}
    durations = []
    for _ in range(batches):
        batch = drawn_batches.write_next_batch()
        started_s = time.perf_counter()
        writer.upsert(batch)
        durations.append(time.perf_counter() - started_s)
        batch.path.unlink()
    read_s["after"] = _measure_read_s(lake.spark, name, rounds)
    lake.spark.sql(f"CALL {CATALOG}.system.rewrite_data_files(table => '{NAMESPACE}.{name}', options => {REWRITE})")
    read_s["rewritten"] = _measure_read_s(lake.spark, name, rounds)
    if (versions := writer.count_rows_by_version()) != (
        expected := drawn_batches.count_expected_rows(range(1, batches + 1))
    ):
        raise AnswersDiffer(f"the aged table has {versions} rows by version, the batches make {expected}")
    delete_kind = "deletion vectors" if strategy is None else "equality deletes"
    case, part = f"{rows:,} rows, after {batches} batches, {delete_kind}", max(1, batches // 5)
    last, first = statistics.median(durations[-part:]), statistics.median(durations[:part])
    report.rows += [
        Row(case, "scan of the whole table", "×", {OURS: read_s["after"] / read_s["before"]}),
        Row(
            case,
            "scan of the whole table after rewrite_data_files",
            "×",
            {OURS: read_s["rewritten"] / read_s["before"]},
        ),
        Row(case, "last batches compared with the first", "×", {OURS: last / first}),
    ]
    report.notes.append(
        f"{case}: four columns read by Iceberg's own reader {read_s['before']:.2f} s before, "
        f"{read_s['after']:.2f} s after,"
        f" {read_s['rewritten']:.2f} s once rewritten. The median time of a batch is {first:.3f} s in the first fifth"
        f" of the batches, and {last:.3f} s in the last fifth."
    )


def _measure_read_s(spark: SparkSession, name: str, rounds: int) -> float:
    durations = []
    for _ in range(rounds + 1):
        started_s = time.perf_counter()
        spark.table(f"{CATALOG}.{NAMESPACE}.{name}").agg(
            sf.count("version"), sf.sum("price"), sf.sum("quantity"), sf.max("city")
        ).collect()
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations[1:])
