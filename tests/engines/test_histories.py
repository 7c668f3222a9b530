"""Tests of tables with a random history of upserts and deletes. Iceberg's and Seamark's reader in Spark read them.

The histories are those of `tests/connector/write/test_upserts_history.py`. That test reads every snapshot with plain
Python and compares it with a dict. Here, Spark reads some of the same snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.spark.session import connect
from tests.connector.write.test_upserts import COLUMNS, read_rows
from tests.connector.write.test_upserts_history import SHAPES, run_steps
from tests.services.seamark import Seamark


@pytest.fixture(scope="module")
def client(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexClient]:
    with Seamark(tmp_path_factory.mktemp("past")) as server, closing(IndexClient(server.base_url)) as client:
        connect(spark, "past", server.base_url)
        spark.sql("CREATE NAMESPACE past.db")
        yield client


def read_history_rows(frame: DataFrame) -> list[tuple[object, ...]]:
    return [tuple(row) for row in frame.select(*COLUMNS).orderBy("id").collect()]


def check_spark_readers_agree(
    client: IndexClient, spark: SparkSession, seed: int, number: int, count: int, check_interval: int
) -> None:
    name = f"h{seed}_{number}"
    run_steps(client, seed, SHAPES[number], count, writers=2, check_interval=check_interval, name=name)
    actual_rows = spark.sql(f"SELECT snapshot_id FROM past.db.{name}.snapshots ORDER BY committed_at").collect()
    snapshots = [row[0] for row in actual_rows]
    for snapshot in {*snapshots[::check_interval], snapshots[-1]}:
        expected = read_rows(client, f"db.{name}", At(snapshot_id=snapshot))
        text = f"seed {seed}, {SHAPES[number]}, snapshot {snapshots.index(snapshot)} of {len(snapshots)}"
        assert read_history_rows(spark.read.option("versionAsOf", snapshot).table(f"past.db.{name}")) == expected, text
        seamark_reader = spark.read.format("seamark").options(uri=client.url, table=f"db.{name}")
        assert read_history_rows(seamark_reader.option("snapshot-id", str(snapshot)).load()) == expected, text


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 4])
def test_both_readers_in_spark_return_the_rows_of_each_snapshot(
    client: IndexClient, spark: SparkSession, number: int
) -> None:
    check_spark_readers_agree(client, spark, 700 + number, number, count=16, check_interval=7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_both_readers_in_spark_return_the_rows_of_long_histories(
    client: IndexClient, spark: SparkSession, number: int
) -> None:
    check_spark_readers_agree(client, spark, 800 + number, number, count=120, check_interval=10)
