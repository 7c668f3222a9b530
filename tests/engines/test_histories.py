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
    client: IndexClient, spark: SparkSession, seed: int, shape_number: int, count: int, check_interval: int
) -> None:
    name = f"h{seed}_{shape_number}"
    run_steps(client, seed, SHAPES[shape_number], count, writers=2, check_interval=check_interval, name=name)
    snapshot_rows = spark.sql(f"SELECT snapshot_id FROM past.db.{name}.snapshots ORDER BY committed_at").collect()
    snapshot_ids = [row[0] for row in snapshot_rows]
    for snapshot_id in {*snapshot_ids[::check_interval], snapshot_ids[-1]}:
        expected = read_rows(client, f"db.{name}", At(snapshot_id=snapshot_id))
        note = f"seed {seed}, {SHAPES[shape_number]}, snapshot {snapshot_ids.index(snapshot_id)} of {len(snapshot_ids)}"
        assert read_history_rows(spark.read.option("versionAsOf", snapshot_id).table(f"past.db.{name}")) == expected, (
            note
        )
        seamark_reader = spark.read.format("seamark").options(uri=client.url, table=f"db.{name}")
        assert read_history_rows(seamark_reader.option("snapshot-id", str(snapshot_id)).load()) == expected, note


@pytest.mark.slow
@pytest.mark.parametrize("shape_number", [0, 4])
def test_both_readers_in_spark_return_the_rows_of_each_snapshot(
    client: IndexClient, spark: SparkSession, shape_number: int
) -> None:
    check_spark_readers_agree(client, spark, 700 + shape_number, shape_number, count=16, check_interval=7)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape_number", range(len(SHAPES)))
def test_both_readers_in_spark_return_the_rows_of_long_histories(
    client: IndexClient, spark: SparkSession, shape_number: int
) -> None:
    check_spark_readers_agree(client, spark, 800 + shape_number, shape_number, count=120, check_interval=10)
