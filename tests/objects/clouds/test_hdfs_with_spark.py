"""Test of Spark and Seamark's client that share a table in HDFS, through a real NameNode and DataNode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import seamark
from seamark.connector.client.indexes import IndexClient
from tests.services.clouds.hdfs import run_hdfs
from tests.services.seamark import Seamark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.slow
@pytest.mark.spark
def test_spark_shares_a_table_in_hdfs_with_seamark(
    spark: SparkSession, spark_catalog: Callable[..., str], tmp_path: Path
) -> None:
    with (
        run_hdfs(tmp_path) as hdfs,
        Seamark(tmp_path / "home", warehouse=f"{hdfs.create_folder_name()}/lake") as server,
    ):
        name = spark_catalog(server.base_url)
        spark.sql(f"CREATE NAMESPACE {name}.db")
        spark.sql(
            f"CREATE TABLE {name}.db.t USING iceberg PARTITIONED BY (p) TBLPROPERTIES ('format-version'='2', "
            "'write.delete.mode'='merge-on-read') AS SELECT id, concat('a b/', id % 3, 'ü') AS p FROM range(1000)"
        )
        spark.sql(f"DELETE FROM {name}.db.t WHERE id % 2 = 0")
        with closing(IndexClient(server.base_url)) as client:
            seamark.append(client, "db.t", pa.table({"id": [1000], "p": ["seamark"]}))
            rows = seamark.scan(client, "db.t", where="id > 990").to_arrow()
            assert sorted(rows["id"].to_pylist()) == [991, 993, 995, 997, 999, 1000]
        spark.sql(f"INSERT INTO {name}.db.t VALUES (1001, 'spark')")
        files = [row[0] for row in spark.sql(f"SELECT file_path FROM {name}.db.t.files").collect()]
        assert files
        assert all(path.startswith("hdfs://127.0.0.1:") for path in files)
        expected = {(number, f"a b/{number % 3}ü") for number in range(1, 1000, 2)}
        expected |= {(1000, "seamark"), (1001, "spark")}
        assert {tuple(row) for row in spark.sql(f"SELECT id, p FROM {name}.db.t").collect()} == expected
        spark.sql(f"DROP TABLE {name}.db.t")
