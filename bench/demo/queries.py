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
"""The compared configurations, which are the columns of the result.

They are Iceberg alone, Seamark's plans over files as written, Seamark's layout, and cubes.
"""
CONFIGURATIONS = (ICEBERG, UNTOUCHED, CLUSTERED, CUBED)
FILE_CONFIGURATIONS = (ICEBERG, UNTOUCHED, CLUSTERED)
"""The configurations whose numbers of files are compared. The facts with cubes have a different number of files."""
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
        needed_files: The number of files of the clustered layout with a row of the answer. No plan has fewer files.
        measurements: The measurements of each round, by configuration.
    """

    name: str
    needed_files: int
    measurements: dict[str, list[DemoMeasurement]] = field(
        default_factory=lambda: {configuration: [] for configuration in CONFIGURATIONS}
    )

    def count_files(self, configuration: str) -> int:
        """Return the number of files that the query opened with a configuration, the largest of all rounds."""
        return max(item.files for item in self.measurements[configuration])

    def size_bytes(self, configuration: str) -> int:
        return max(item.size_bytes for item in self.measurements[configuration])

    def compute_median_s(self, configuration: str) -> float:
        """Return the median seconds of all rounds with a configuration."""
        return statistics.median(item.seconds for item in self.measurements[configuration])


@dataclass(frozen=True)
class Comparison:
    """The results of all queries in one `engine`.

    A `configuration` is one of `CONFIGURATIONS`, such as Iceberg alone or Seamark's layout.
    """

    engine: str
    queries: list[DemoQuery]

    def total(self, measure: Callable[[DemoQuery], float]) -> float:
        return sum(measure(query) for query in self.queries)

    def compute_mean(self, measure: Callable[[DemoQuery], float]) -> float:
        """Return the geometric mean of all queries."""
        return _compute_geometric_mean(map(measure, self.queries))

    def compare_files(self, configuration: str) -> float:
        """Return the number of files that Iceberg alone opens, divided by the number that `configuration` opens.

        The result is the geometric mean of this ratio over all queries. A query that opens no file counts as one file.
        """
        return self.compute_mean(lambda query: query.count_files(ICEBERG) / max(1, query.count_files(configuration)))

    def compare_seconds(self, configuration: str) -> float:
        """Return the median seconds of Iceberg alone, divided by those of `configuration`.

        The result is the geometric mean of this ratio over all queries.
        """
        return self.compute_mean(lambda query: query.compute_median_s(ICEBERG) / query.compute_median_s(configuration))

    def list_queries_from_cubes(self) -> list[DemoQuery]:
        """Return the queries that are answered from cubes, which read no file of the facts."""
        return [query for query in self.queries if not query.count_files(CUBED)]

    def compare_seconds_from_cubes(self) -> float:
        """Return how many times faster answers from cubes are than with Iceberg, in the geometric mean."""
        return _compute_geometric_mean(
            query.compute_median_s(ICEBERG) / query.compute_median_s(CUBED) for query in self.list_queries_from_cubes()
        )

    def find_worst_ratio(self) -> float:
        """Return the largest ratio of files opened in Seamark's layout to files with a row of the answer."""
        return max(max(1, query.count_files(CLUSTERED)) / max(1, query.needed_files) for query in self.queries)


def _compute_geometric_mean(values: Iterable[float]) -> float:
    return exp(statistics.fmean(map(log, values)))


FLIGHTS = tuple(name for name in QUERIES if name.endswith(".1"))
"""The first query of each flight; the queries of a flight join the same tables."""


def replace_facts(facts: tuple[str, str], text: str) -> str:
    """Return the query `text` with `facts` as its table of facts."""
    return _FACT_NAME.sub(".".join(facts), text)


def build_spark_runners(spark: SparkSession) -> dict[str, RunQuery]:
    """Return the functions that run a query in Spark, by the configuration of the demo."""

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
    """Run queries before the measurement, so that the engine has compiled and cached its code.

    The benchmark's queries form four groups (flights), in which all queries join the same tables. The first query of
    each group runs `repeats` times, with the next configuration each time.

    Raises:
        DemoFailed: An answer is wrong.
    """
    names = FLIGHTS * repeats
    for position, name in enumerate(progress.track(names, description=f"{engine} warms up")):
        _run_and_check(engine, query_runners, oracle, name, CONFIGURATIONS[position % len(CONFIGURATIONS)])


def _run_and_check(
    engine: str, query_runners: Mapping[str, RunQuery], oracle: Oracle, name: str, configuration: str
) -> DemoMeasurement:
    rows, measurement = query_runners[configuration](QUERIES[name])
    if difference := oracle.describe_difference(QUERIES[name], rows):
        raise DemoFailed(f"{name} in {engine}, {configuration}, has a wrong answer: {difference}")
    return measurement


def compare_configurations(
    engine: str,
    query_runners: Mapping[str, RunQuery],
    oracle: Oracle,
    needed_files: Mapping[str, int],
    progress: Progress,
    *,
    rounds: int,
) -> Comparison:
    """Run each query `rounds` times with each of the four configurations, and compare its answers with DuckDB's.

    The first round ends with Iceberg alone, so an engine that has just started is not a disadvantage for Iceberg.

    Args:
        oracle: Gives the right answers, which DuckDB computes from the source data.
        needed_files: The smallest possible number of files of each query, by the query's name.

    Raises:
        DemoFailed: An answer is wrong.
    """
    queries = [DemoQuery(name, needed_files[name]) for name in QUERIES]
    total = len(queries) * rounds * len(CONFIGURATIONS)
    task = progress.add_task(f"13 queries in {engine}, four configurations", total=total)
    for number in range(rounds):
        for query in queries:
            for configuration in CONFIGURATIONS if number % 2 else CONFIGURATIONS[::-1]:
                query.measurements[configuration].append(
                    _run_and_check(engine, query_runners, oracle, query.name, configuration)
                )
                progress.advance(task)
    return Comparison(engine, queries)
