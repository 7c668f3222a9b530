"""What do buckets save a reader in queries for a key, and in joins and groupings by the key?

Two tables with the same keys have 16 buckets by key each. A third table has the rows of the first without buckets, in
as many files. Queries for one key read the first and the third table. Joins and groupings read the bucketed tables
twice: with buckets turned on, and with buckets turned off, so that Spark exchanges the rows. A join with the third
    table
exchanges only that table. Broadcast joins are off, because Spark would not broadcast tables of this size. The numbers
of files and exchanges come from the executed plan. Each pair of queries must give the same answer.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import DataFrame, SparkSession

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.session import CATALOG, open_lake
from bench.writing.tables import BASES, BUCKETED, BUCKETS, FLAT, KEY, NAMESPACE, make_uuid_texts, open_base
from bench.writing.writers import MERGE_ON_READ, configure_session

ROWS, QUICK_ROWS = 10_000_000, 20_000
ROUNDS, EQUALS = 5, 15
NO_BROADCAST = {"spark.sql.autoBroadcastJoinThreshold": "-1"}
FORGOTTEN = {"spark.sql.sources.v2.bucketing.enabled": "false"}
UNBUCKETED, EXCHANGED = "unbucketed", "exchanged"
WAYS: dict[str, Mapping[str, str]] = {OURS: {}, EXCHANGED: FORGOTTEN}
JOIN = "SELECT count(*), sum(l.quantity), sum(r.discount) FROM {} l JOIN {} r ON l.k = r.k"
GROUPING_QUERY = "SELECT count(*), max(n), sum(q) FROM (SELECT k, count(*) n, sum(quantity) q FROM {} GROUP BY k)"


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("writing_buckets", "What do buckets by key save a reader?", peer="the same without buckets")
    rows, rounds, equals, bases = (QUICK_ROWS, 1, 2, folder / "bases") if quick else (ROWS, ROUNDS, EQUALS, BASES)
    with open_lake(folder, bases) as new_lake, configure_session(new_lake.spark, NO_BROADCAST):
        spark = new_lake.spark
        for name, layout in (("left", BUCKETED), ("right", BUCKETED), ("flat", FLAT)):
            new_lake.clone_table(open_base(rows, layout, bases=bases), name, mode=MERGE_ON_READ, is_indexed=False)
        left_table, right_table, flat_table = (f"{CATALOG}.{NAMESPACE}.{name}" for name in ("left", "right", "flat"))
        _measure_equalities(report, spark, rows, {OURS: left_table, UNBUCKETED: flat_table}, equals)
        for case, query in (
            ("join of two bucketed tables", JOIN.format(left_table, right_table)),
            ("join of a bucketed and an unbucketed table", JOIN.format(left_table, flat_table)),
            ("grouping by the key", GROUPING_QUERY.format(left_table)),
        ):
            _compare_with_exchange(report, spark, case, query, rounds)
    report.notes += [
        f"{rows:,} rows a table, in {BUCKETS} files. The figures are medians of {rounds} rounds, or of {equals} "
        "keys for the rows of one key. One round or key before them is not counted.",
        f"{EXCHANGED}: the same tables with {next(iter(FORGOTTEN))} = false. All use Iceberg's own reader, on two "
        "cores.",
    ]
    return report


def _measure_equalities(report: Report, spark: SparkSession, rows: int, tables: Mapping[str, str], count: int) -> None:
    numbers = np.random.default_rng(5).choice(rows, count + 1, replace=False)
    durations: dict[str, list[float]] = {name: [] for name in tables}
    files: dict[str, list[int]] = {name: [] for name in tables}
    for round_number, key in enumerate(make_uuid_texts(numbers).to_pylist()):
        results = set()
        for name, table in tables.items():
            frame = spark.sql(f"SELECT customer, city FROM {table} WHERE {KEY} = '{key}'")
            seconds, answer = _measure_s(frame)
            results.add(len(answer))
            if round_number:
                durations[name].append(seconds)
                files[name].append(_count_files(frame))
        if results != {1}:
            raise AnswersDiffer(f"{key} has {results} rows")
    for measure, unit, values_by_table in (("time", "s", durations), ("files read", "", files)):
        values = {name: float(statistics.median(measurements)) for name, measurements in values_by_table.items()}
        report.rows.append(Row("rows of one key", measure, unit, values, peer=UNBUCKETED))


def _compare_with_exchange(report: Report, spark: SparkSession, case: str, query: str, rounds: int) -> None:
    """Measure a query with and without the use of buckets, in rounds of alternating order."""
    durations: dict[str, list[float]] = {name: [] for name in WAYS}
    exchanges: dict[str, int] = {}
    answers = set()
    for round_number in range(rounds + 1):  # The first round warms up and is not counted.
        for name in WAYS if round_number % 2 else reversed(WAYS):
            with configure_session(spark, WAYS[name]):
                frame = spark.sql(query)
                seconds, answer = _measure_s(frame)
                answers.add(tuple(answer[0]))
                exchanges[name] = _count_exchanges(frame)
            if round_number:
                durations[name].append(seconds)
    if len(answers) != 1:
        raise AnswersDiffer(f"{case}: {answers}")
    median_s = {name: statistics.median(seconds) for name, seconds in durations.items()}
    exchange_counts = {name: float(exchange) for name, exchange in exchanges.items()}
    report.rows += [
        Row(case, "time", "s", median_s, peer=EXCHANGED),
        Row(case, "exchanges of rows", "", exchange_counts, peer=EXCHANGED),
    ]


def _measure_s(frame: DataFrame) -> tuple[float, Sequence[Any]]:
    started_s = time.perf_counter()
    rows = frame.collect()
    return time.perf_counter() - started_s, rows


def _count_exchanges(frame: DataFrame) -> int:
    """Return the number of exchanges of rows by key or bucket, without the exchange of a global aggregate.

    With adaptive execution, the text of the plan has the final plan and then the initial plan, which is ignored.
    """
    final_plan = frame._jdf.queryExecution().executedPlan().toString().split("== Initial Plan ==")[0]
    return len(re.findall(r"\bExchange (?!SinglePartition)", final_plan))


def _count_files(frame: DataFrame) -> int:
    """Return the number of data files that the tasks of the only scan received."""
    leaves = frame._jdf.queryExecution().executedPlan().collectLeaves()
    partitions = leaves.head().inputPartitions()
    tasks = [
        task for number in range(partitions.size()) for task in partitions.apply(number).taskGroup().tasks().toArray()
    ]
    return len({str(task.file().location()) for task in tasks})
