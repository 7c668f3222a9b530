"""Tests of buckets in Spark: an equality reads one bucket, and joins and groupings by the key need no exchange.

The tests check the plans that Spark has run. The expected rows are those of the same query with all shuffles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.spark.session import SHUFFLE_FREE, connect
from seamark.connector.write.appends import append
from tests.services.seamark import Seamark

JOIN = "SELECT l.id, l.v, r.v FROM free.db.{} l JOIN free.db.{} r ON l.id = r.id"
ROWS = 2_000


@pytest.fixture(scope="module")
def server(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    """Yield a server with four tables of the same ids: two with 8 buckets, one with 4, and one without buckets."""
    with Seamark(tmp_path_factory.mktemp("buckets")) as server, closing(SeamarkClient(server.base_url)) as client:
        connect(spark, "free", server.base_url)
        spark.sql("CREATE NAMESPACE free.db")
        for number, (name, buckets) in enumerate((("eight", 8), ("also_eight", 8), ("four", 4), ("plain", 0))):
            partition_clause = f"PARTITIONED BY (bucket({buckets}, id))" if buckets else ""
            spark.sql(f"CREATE TABLE free.db.{name} (id bigint, v bigint) USING iceberg {partition_clause}")
            for start in (0, ROWS // 2):  # Each bucket has two files, which Spark must read as one group.
                ids = range(start, start + ROWS // 2)
                append(client, f"db.{name}", pa.table({"id": ids, "v": [(number + 1) * id_ for id_ in ids]}))
        yield server


@contextmanager
def change_conf(spark: SparkSession, **settings: str) -> Iterator[None]:
    old_settings = [(name, spark.conf.get(name, None)) for name in settings]
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old_value in old_settings:
            spark.conf.unset(name) if old_value is None else spark.conf.set(name, old_value)


@pytest.fixture(autouse=True)
def no_broadcast(spark: SparkSession) -> Iterator[None]:
    """Forbid broadcast joins, which Spark chooses for small tables such as these."""
    with change_conf(spark, **{"spark.sql.autoBroadcastJoinThreshold": "-1"}):
        yield


def run_and_count_exchanges(frame: DataFrame) -> tuple[list[tuple[int, ...]], int]:
    """Return the sorted rows, and the number of exchanges in the executed plan."""
    rows = sorted(tuple(row) for row in frame.collect())
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "Scan" in plan
    final_plan = plan.split("== Initial Plan ==")[0]
    return rows, len(re.findall(r"\bExchange\b", final_plan))


def run_with_shuffles(spark: SparkSession, query: str) -> list[tuple[int, ...]]:
    with change_conf(
        spark, **dict.fromkeys((name for name in SHUFFLE_FREE if "v2.bucketing.enabled" in name), "false")
    ):
        rows, exchange_count = run_and_count_exchanges(spark.sql(query))
    assert exchange_count >= 1
    return rows


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("eight", "also_eight"),
        pytest.param("eight", "four", marks=pytest.mark.slow),
        pytest.param("four", "eight", marks=pytest.mark.slow),
    ],
)
def test_join_of_two_bucketed_tables_by_the_key_has_no_exchange(
    server: Seamark, spark: SparkSession, left: str, right: str
) -> None:
    query = JOIN.format(left, right)
    actual, exchange_count = run_and_count_exchanges(spark.sql(query))
    assert exchange_count == 0
    assert len(actual) == ROWS
    assert actual == run_with_shuffles(spark, query)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "right"), [("eight", "plain"), pytest.param("plain", "eight", marks=pytest.mark.slow)]
)
def test_join_with_an_unbucketed_table_exchanges_only_that_table(
    server: Seamark, spark: SparkSession, left: str, right: str
) -> None:
    query = JOIN.format(left, right)
    actual, exchange_count = run_and_count_exchanges(spark.sql(query))
    assert exchange_count == 1
    assert actual == run_with_shuffles(spark, query)


@pytest.mark.slow
def test_grouping_by_the_bucketed_key_has_no_exchange(server: Seamark, spark: SparkSession) -> None:
    query = "SELECT id, sum(v), count(*) FROM free.db.eight GROUP BY id"
    actual, exchange_count = run_and_count_exchanges(spark.sql(query))
    assert exchange_count == 0
    assert actual == run_with_shuffles(spark, query) == [(number, number, 1) for number in range(ROWS)]


@pytest.mark.slow
def test_grouping_of_a_join_by_the_bucketed_key_has_no_exchange(server: Seamark, spark: SparkSession) -> None:
    query = (
        "SELECT l.id, sum(l.v + r.v) FROM free.db.eight l JOIN free.db.also_eight r ON l.id = r.id "
        "WHERE l.v > 100 GROUP BY l.id"
    )
    actual, exchange_count = run_and_count_exchanges(spark.sql(query))
    assert exchange_count == 0
    assert actual == run_with_shuffles(spark, query) == [(number, 3 * number) for number in range(101, ROWS)]


@pytest.mark.slow
def test_join_with_a_resized_table_returns_the_right_rows(server: Seamark, spark: SparkSession) -> None:
    """The table has files of both specs, so Spark must not rely on either bucket count."""
    spark.sql("CREATE TABLE free.db.grown (id bigint, v bigint) USING iceberg PARTITIONED BY (bucket(4, id))")
    spark.sql("INSERT INTO free.db.grown SELECT id, id FROM range(0, 1000)")
    spark.sql("ALTER TABLE free.db.grown REPLACE PARTITION FIELD id_bucket WITH bucket(8, id)")
    spark.sql("INSERT INTO free.db.grown SELECT id, id FROM range(1000, 2000)")
    query = JOIN.format("grown", "eight")
    actual, _ = run_and_count_exchanges(spark.sql(query))
    assert actual == run_with_shuffles(spark, query) == [(number, number, number) for number in range(ROWS)]


def test_equality_on_the_key_reads_the_files_of_one_bucket(server: Seamark, spark: SparkSession) -> None:
    with RestCatalog("free", uri=server.base_url) as catalog:
        table = catalog.load_table("db.eight")
        all_paths = [task.file.file_path for task in table.scan().plan_files()]
        assert len(all_paths) == 16
        for key in range(0, ROWS, 389):
            kept_file_paths = [task.file.file_path for task in table.scan(row_filter=f"id = {key}").plan_files()]
            # Each file has ids of one half of the table, so bounds exclude one of the two files in the bucket.
            assert len(kept_file_paths) == 1
            other_paths = [Path(path.removeprefix("file://")) for path in all_paths if path not in kept_file_paths]
            for path in other_paths:  # The test moves all other files away, which proves that Spark does not open them.
                path.rename(path.with_suffix(".away"))
            try:
                assert spark.table("free.db.eight").where(f"id = {key}").collect() == [(key, key)]
            finally:
                for path in other_paths:
                    path.with_suffix(".away").rename(path)
