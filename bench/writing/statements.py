"""What do MERGE, UPDATE and DELETE of 10,000 keys cost through `seamark.spark.sql`, and as Iceberg's own statements?

Both run the same text in the same session, on two tables with the same data files; Seamark's table has a record index
on the key. They run alternately, and the order is reversed each time. Iceberg's join may make a hash table of the keys.
In the end both tables must have the same rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.writing.merge import HASH_JOIN
from bench.writing.session import CATALOG, WritingLake, open_lake
from bench.writing.tables import BASES, COLUMNS, FLAT, KEY, NAMESPACE, Batches, open_base
from bench.writing.writers import COPY_ON_WRITE, MERGE_ON_READ, build_frame, configure_session
from seamark.spark import execute

ROWS, QUICK_ROWS = 10_000_000, 40_000
ROUNDS, WARM = 2, 1
ICEBERG = "iceberg"
RATIO_GOAL = 8.0
_MERGE_TEMPLATE = "MERGE INTO {t} t USING batch s ON t.{k} = s.{k} WHEN MATCHED"
STATEMENTS = {
    "MERGE": f"{_MERGE_TEMPLATE} THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *",
    "MERGE with a condition": f"{_MERGE_TEMPLATE} AND s.quantity > t.quantity THEN UPDATE SET quantity = s.quantity, "
    "version = s.version",
    "UPDATE": "UPDATE {t} SET status = 'paid', version = version + 1 WHERE {k} IN (SELECT {k} FROM batch)",
    "DELETE": "DELETE FROM {t} WHERE {k} IN (SELECT {k} FROM batch)",
}
COPYING_STATEMENTS = ("MERGE", "DELETE")
"""The statements that are also measured with copy-on-write. They rewrite the whole table, as all files contain keys."""


@dataclass
class StatementPair:
    """The names of two tables with the same rows, one for Seamark's statements and one for Iceberg's."""

    our_table: str
    their_table: str


async def run(folder: Path, *, quick: bool = False, sizes: Sequence[int] = (ROWS,)) -> Report:
    report = Report("writing_statements", "What do MERGE, UPDATE and DELETE of 10,000 keys cost?", peer="Iceberg's own")
    rows, rounds = (QUICK_ROWS, 1) if quick else (sizes[-1], ROUNDS)
    bases = folder / "bases" if quick else BASES
    with open_lake(folder, bases) as new_lake:
        batches = Batches(rows, folder)
        for mode in (MERGE_ON_READ, COPY_ON_WRITE):
            pair = _create_pair(new_lake, bases, rows, mode)
            for name, text in STATEMENTS.items():
                if mode == MERGE_ON_READ or name in COPYING_STATEMENTS:
                    values = _measure_statements(new_lake, pair, text, batches, rounds if mode == MERGE_ON_READ else 1)
                    goal = None if quick else values[ICEBERG] / RATIO_GOAL
                    report.rows.append(Row(f"{rows:,} rows, {mode}", name, "s", values, peer=ICEBERG, goal=goal))
            if _summarize_rows(new_lake, pair.our_table) != _summarize_rows(new_lake, pair.their_table):
                raise AnswersDiffer(f"the tables of {mode} differ")
    report.notes = [
        f"{rows:,} rows of ten columns in 16 files; the keys of a batch are spread over all files, and nine of ten are "
        "stored. Copy-on-write writes every file again.",
        f"Medians of {rounds} rounds after {WARM} warm one; copy-on-write has one round.",
    ]
    return report


def _create_pair(lake: WritingLake, bases: Path, rows: int, mode: str) -> StatementPair:
    names = []
    for engine, is_indexed in ((OURS, True), (ICEBERG, False)):
        table = lake.clone_table(
            open_base(rows, FLAT, bases=bases), f"{engine}_{mode.replace('-', '_')}", mode=mode, is_indexed=is_indexed
        )
        names.append(f"{CATALOG}.{NAMESPACE}.{table.name}")
    return StatementPair(*names)


def _measure_statements(
    lake: WritingLake, pair: StatementPair, text: str, batches: Batches, rounds: int
) -> dict[str, float]:
    """Return the median seconds of each statement."""
    seconds: dict[str, list[float]] = {OURS: [], ICEBERG: []}
    runs: dict[str, Callable[[], object]] = {
        OURS: lambda: _check_located(lake, text.format(t=pair.our_table, k=KEY)),
        ICEBERG: lambda: lake.spark.sql(text.format(t=pair.their_table, k=KEY)),
    }
    for number in range(WARM + rounds):
        build_frame(lake.spark, batches.write_next_batch()).createOrReplaceTempView("batch")
        for engine in (OURS, ICEBERG) if number % 2 else (ICEBERG, OURS):
            # For Iceberg's join, Spark may make a hash table of the keys and avoid a sort of the rows.
            with configure_session(lake.spark, HASH_JOIN if engine == ICEBERG else {}):
                started_s = time.perf_counter()
                runs[engine]()
                if number >= WARM:
                    seconds[engine].append(time.perf_counter() - started_s)
    return {engine: statistics.median(durations_s) for engine, durations_s in seconds.items()}


def _check_located(lake: WritingLake, text: str) -> None:
    rows = execute(lake.spark, text)
    if rows.report is None:
        raise AnswersDiffer(f"a statement was not located: {rows.reason}")


def _summarize_rows(lake: WritingLake, table: str) -> list[tuple[int, ...]]:
    """Return the version, the number of rows and the sum of their hashes, for each version of rows."""
    frame: DataFrame = lake.spark.table(table)
    row_hash = frame.groupBy("version").agg(
        sf.count("*").alias("rows"), sf.sum(sf.xxhash64(*COLUMNS).cast("decimal(38,0)")).alias("hashes")
    )
    return sorted(tuple(row) for row in row_hash.collect())
