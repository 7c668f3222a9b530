"""Spark and PyIceberg, unmodified, read plan tables: the rows are those of the table with the filter, and the files are
those of the plan.

The proof: every data file that the plan left out is taken away while the engine reads the plan table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from connector.client import SeamarkClient
from tests.engines.conftest import rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


@dataclass(frozen=True)
class Engines:
    server: Seamark
    client: SeamarkClient
    spark: SparkSession
    db: str
    python: RestCatalog

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        return rows(self.spark.sql(statement.replace("{db}", self.db)))

    def files(self, table: str, at: int | None = None) -> set[str]:
        """Data files, as Spark finds them in the manifests."""
        version = "" if at is None else f" VERSION AS OF {at}"
        return {path for (path,) in self.sql(f"SELECT file_path FROM {{db}}.`{table}`.data_files{version}")}

    @contextmanager
    def without(self, paths: set[str]) -> Iterator[None]:
        gone = [Path(path.removeprefix("file:")) for path in paths]
        for path in gone:
            path.rename(f"{path}.away")
        try:
            yield
        finally:
            for path in gone:
                Path(f"{path}.away").rename(path)


@pytest.fixture(scope="module")
def engines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with (
        Seamark(tmp_path_factory.mktemp("plan-tables")) as server,
        RestCatalog("plans", uri=server.base_url) as python,
    ):
        client = SeamarkClient(server.base_url)
        made = Engines(server, client, spark, f"{new_catalog(spark, server.base_url)}.db", python)
        made.sql("CREATE NAMESPACE {db}")
        yield made
        client.close()


def test_spark_and_pyiceberg_read_a_plan_table_without_the_files_that_the_plan_left_out(engines: Engines) -> None:
    engines.sql("CREATE TABLE {db}.ranges (id bigint, s string) USING iceberg")
    for first in range(0, 60, 10):
        engines.sql(
            f"INSERT INTO {{db}}.ranges SELECT /*+ COALESCE(1) */ id, concat('n', id) FROM range({first}, {first + 10})"
        )
    plan = engines.client.plan_table("db.ranges", "id BETWEEN 18 AND 23")
    assert plan.name is not None
    assert (plan.files, plan.considered_files) == (2, 6)
    kept = engines.files(plan.name)
    assert len(kept) == 2
    with engines.without(engines.files("ranges") - kept):
        assert engines.sql(f"SELECT * FROM {{db}}.`{plan.name}` WHERE id BETWEEN 18 AND 23 ORDER BY id") == [
            (number, f"n{number}") for number in range(18, 24)
        ]
        found = engines.python.load_table(("db", plan.name)).scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == list(range(10, 30))
