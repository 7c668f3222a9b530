"""A server, and a Spark session with the catalog of the server, for the benchmarks of writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from bench.writing.tables import BASES, NAMESPACE, BaseTable
from bench.writing.writers import OurTable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.session import connect
from tests.services.seamark import Seamark
from tests.services.spark import spark_session

CATALOG = "sea"
SPARK = {"spark.driver.memory": "4g", "spark.driver.extraJavaOptions": "", "spark.sql.shuffle.partitions": "4"}
"""Options of a JVM that compiles like a JVM in a cluster. The JVM of the tests starts faster."""


@dataclass(frozen=True)
class WritingLake:
    folder: Path
    server: Seamark
    client: IndexClient
    spark: SparkSession

    def clone_table(self, base: BaseTable, name: str, *, mode: str, is_indexed: bool) -> OurTable:
        """Clone the base, register the clone in the server, and return it."""
        folder = self.folder / "warehouse" / NAMESPACE / name
        return OurTable.create(base, self.client, self.spark, CATALOG, folder, mode=mode, is_indexed=is_indexed)


@contextmanager
def run_bench_server(folder: Path, bases: Path = BASES) -> Iterator[Seamark]:
    """Run a server that may read the files of base tables."""
    env = {"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_ALLOWED_LOCATIONS": bases.resolve().as_uri()}
    with Seamark(folder / "home", warehouse=(folder / "warehouse").as_uri(), env=env) as server:
        yield server


@contextmanager
def open_lake(folder: Path, bases: Path = BASES) -> Iterator[WritingLake]:
    with (
        run_bench_server(folder, bases) as server,
        closing(IndexClient(server.base_url, timeout_s=600)) as client,
        spark_session(folder / "spark", SPARK) as spark,
    ):
        connect(spark, CATALOG, server.base_url)
        yield WritingLake(folder, server, client, spark)
