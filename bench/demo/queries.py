"""The 13 queries, which run alternately in four ways, and the data that an engine read for them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from rich.progress import Progress

from bench.demo import lake
from bench.demo.options import DemoFailed
from bench.ssb.queries import QUERIES, Oracle
from bench.ssb.spark import FACT, FilesRead, run_spark_query
from seamark.connector.cubes.summaries import ON
from seamark.connector.spark.query.queries import sql as seamark_sql

ICEBERG, UNTOUCHED, CLUSTERED, CUBED = "Iceberg", "Seamark", "layout", "cubes"
"""The columns: Iceberg alone; Seamark's plans over files as written; Seamark's layout; cubes."""
COLUMNS = (ICEBERG, UNTOUCHED, CLUSTERED, CUBED)
FILE_COLUMNS = (ICEBERG, UNTOUCHED, CLUSTERED)
"""The columns whose numbers of files are compared. The facts with cubes have a different number of files."""
NOTHING_READ = FilesRead(0, 0)
"""The result for a query that reads no file of the facts."""
_FACT_NAME = re.compile(rf"\b{FACT}\b")


@dataclass(frozen=True)
class DemoMeasurement:
    """The amount of data of the fact table that an engine read, and the seconds from the query to the last row."""

    files: int
    size_bytes: int
    seconds: float


RunQuery = Callable[[str], tuple[list[tuple[Any, ...]], DemoMeasurement]]
"""A function that runs a query in an engine, and returns its rows and its measurement."""


@dataclass
class DemoQuery:
    """One query and its measurements.

    Attributes:
        bound: The number of files of the clustered layout with a row of the answer. No plan can have fewer files.
        answers: The measurements of each round, by column.
    """

    name: str
    bound: int
    answers: dict[str, list[DemoMeasurement]] = field(default_factory=lambda: {column: [] for column in COLUMNS})

    def files(self, column: str) -> int:
        """Return the largest number of files of any round."""
        return max(answer.files for answer in self.answers[column])

    def size_bytes(self, column: str) -> int:
        return max(answer.size_bytes for answer in self.answers[column])

    def compute_median_s(self, column: str) -> float:
        """Return the median seconds of all rounds."""
        return statistics.median(answer.seconds for answer in self.answers[column])


@dataclass(frozen=True)
class Comparison:
    """The results of all queries in one `engine`."""

    engine: str
    queries: list[DemoQuery]

    def total(self, measure: Callable[[DemoQuery], float]) -> float:
        return sum(measure(query) for query in self.queries)

    def compute_mean(self, measure: Callable[[DemoQuery], float]) -> float:
        """Return the geometric mean of all queries."""
        return _compute_geometric_mean(map(measure, self.queries))

    def compare_files(self, column: str) -> float:
        """Return how many times fewer files `column` opens than Iceberg, in the geometric mean.

        A query that opens no file counts as one file.
        """
        return self.compute_mean(lambda query: query.files(ICEBERG) / max(1, query.files(column)))

    def compare_seconds(self, column: str) -> float:
        """Return how many times faster `column` is than Iceberg, in the geometric mean."""
        return self.compute_mean(lambda query: query.compute_median_s(ICEBERG) / query.compute_median_s(column))

    def list_queries_from_cubes(self) -> list[DemoQuery]:
        """Return the queries that are answered from cubes, which read no file of the facts."""
        return [query for query in self.queries if not query.files(CUBED)]

    def compare_seconds_from_cubes(self) -> float:
        """Return how many times faster answers from cubes are than with Iceberg, in the geometric mean."""
        return _compute_geometric_mean(
            query.compute_median_s(ICEBERG) / query.compute_median_s(CUBED) for query in self.list_queries_from_cubes()
        )

    def find_worst_ratio(self) -> float:
        """Return the largest ratio of files opened in Seamark's layout to files with a row of the answer."""
        return max(max(1, query.files(CLUSTERED)) / max(1, query.bound) for query in self.queries)


def _compute_geometric_mean(values: Iterable[float]) -> float:
    return exp(statistics.fmean(map(log, values)))


FLIGHTS = tuple(name for name in QUERIES if name.endswith(".1"))
"""The first query of each flight; the queries of a flight join the same tables."""


def replace_facts(facts: tuple[str, str], text: str) -> str:
    """Return the query `text` with `facts` as its table of facts."""
    return _FACT_NAME.sub(".".join(facts), text)


def build_spark_runners(spark: SparkSession) -> dict[str, RunQuery]:
    """Return the functions that run a query in Spark, by the column of the demo."""

    def measure_query(run: Callable[[str], DataFrame]) -> RunQuery:
        def ask_spark(text: str) -> tuple[list[tuple[Any, ...]], DemoMeasurement]:
            answer = run_spark_query(run, text)
            facts = answer.read_files.get(FACT, NOTHING_READ)
            return answer.rows, DemoMeasurement(facts.files, facts.size_bytes, answer.seconds)

        return ask_spark

    return {
        ICEBERG: measure_query(spark.sql),
        UNTOUCHED: measure_query(lambda text: seamark_sql(spark, text)),
        CLUSTERED: measure_query(lambda text: seamark_sql(spark, replace_facts(lake.CLUSTERED, text))),
        CUBED: measure_query(lambda text: seamark_sql(spark, replace_facts(lake.CUBED, text), cubes=ON)),
    }


def warm_up(
    engine: str, query_runners: Mapping[str, RunQuery], oracle: Oracle, progress: Progress, *, repeats: int = 1
) -> None:
    """Run one query of each flight `repeats` times, so that the engine has compiled and cached its code.

    The columns alternate. The times are not counted.
    Raises:
        DemoFailed: An answer is wrong.
    """
    names = FLIGHTS * repeats
    for place, name in enumerate(progress.track(names, description=f"{engine} warms up")):
        _run_and_check(engine, query_runners, oracle, name, COLUMNS[place % len(COLUMNS)])


def _run_and_check(
    engine: str, query_runners: Mapping[str, RunQuery], oracle: Oracle, name: str, column: str
) -> DemoMeasurement:
    rows, measurement = query_runners[column](QUERIES[name])
    if difference := oracle.describe_difference(QUERIES[name], rows):
        raise DemoFailed(f"{name} in {engine}, {column}, has a wrong answer: {difference}")
    return measurement


def compare_columns(
    engine: str,
    query_runners: Mapping[str, RunQuery],
    oracle: Oracle,
    bounds: Mapping[str, int],
    progress: Progress,
    *,
    rounds: int,
) -> Comparison:
    """Run the queries `rounds` times in each way.

    The first round ends with Iceberg, so a cold engine is not a disadvantage for Iceberg.

    Args:
        bounds: The smallest possible number of files of each query.

    Raises:
        DemoFailed: An answer is wrong.
    """
    queries = [DemoQuery(name, bounds[name]) for name in QUERIES]
    total = len(queries) * rounds * len(COLUMNS)
    task = progress.add_task(f"13 queries in {engine}, four ways in turns", total=total)
    for number in range(rounds):
        for query in queries:
            for column in COLUMNS if number % 2 else COLUMNS[::-1]:
                query.answers[column].append(_run_and_check(engine, query_runners, oracle, query.name, column))
                progress.advance(task)
    return Comparison(engine, queries)
