"""Tests of engines that read and write tables through the gateway, only with vended credentials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog

from tests.gateway.rig import GatewayRig
from tests.services.s3 import S3

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

S3_IO = {"io-impl": "org.apache.iceberg.aws.s3.S3FileIO", "client.region": "us-east-1"}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("file_io_class", ["pyiceberg.io.pyarrow.PyArrowFileIO", "pyiceberg.io.fsspec.FsspecFileIO"])
def test_pyiceberg_writes_and_reads_a_table(rig: GatewayRig, file_io_class: str) -> None:
    catalog = RestCatalog("gateway", uri=rig.seamark.base_url, **{"py-io-impl": file_io_class})
    namespace = file_io_class.rpartition(".")[2].lower()
    catalog.create_namespace_if_not_exists(namespace)
    data = pa.table({"id": range(1000), "part": [f"p {number % 3}/ü" for number in range(1000)]})
    table = catalog.create_table((namespace, "t"), schema=data.schema)
    table.append(data)
    table.append(data.slice(0, 10))
    rows = catalog.load_table((namespace, "t")).scan(row_filter="id < 5").to_arrow()
    assert sorted(rows["id"].to_pylist()) == sorted([0, 1, 2, 3, 4] * 2)


@pytest.mark.slow
@pytest.mark.spark
def test_spark_writes_and_reads_tables(
    spark: SparkSession, spark_catalog: Callable[..., str], store_rig: GatewayRig, folder_rig: GatewayRig
) -> None:
    for rig in (store_rig, folder_rig):
        name = spark_catalog(rig.seamark.base_url, extra=S3_IO)
        spark.sql(f"CREATE NAMESPACE {name}.spark")
        spark.sql(
            f"CREATE TABLE {name}.spark.t USING iceberg PARTITIONED BY (p) AS "
            "SELECT id, concat('a b/', id % 3) AS p FROM range(1000)"
        )
        spark.sql(f"DELETE FROM {name}.spark.t WHERE id % 2 = 0")
        spark.sql(f"INSERT INTO {name}.spark.t VALUES (5000, 'ü')")
        assert [tuple(row) for row in spark.sql(f"SELECT count(*), max(p) FROM {name}.spark.t").collect()] == [
            (501, "ü")
        ]
        files = [row[0] for row in spark.sql(f"SELECT file_path FROM {name}.spark.t.files").collect()]
        assert files
        assert all((rig.folder / path.removeprefix("s3://")).is_file() for path in files)


@pytest.mark.slow
@pytest.mark.trino
def test_trino_writes_and_reads_tables(tmp_path: Path, store_rig: GatewayRig, folder_rig: GatewayRig) -> None:
    from tests.services.trino import CATALOG, trino_server

    direct_store: Any = store_rig.direct_store
    for rig in (store_rig, folder_rig):
        gateway_s3 = S3(rig.gateway, "unused", "unused", direct_store.region, rig.folder, direct_store.process)
        vended_properties = {"iceberg.rest-catalog.vended-credentials-enabled": "true"}
        folder = tmp_path / rig.gateway.rpartition(":")[2]
        with trino_server(folder, uri=rig.seamark.base_url, s3=gateway_s3, catalog=vended_properties) as trino:
            trino.rows(f"CREATE SCHEMA {CATALOG}.trino")
            trino.rows(
                f"CREATE TABLE {CATALOG}.trino.t WITH (partitioning = ARRAY['p']) AS "
                "SELECT n AS id, 'a b/' || CAST(n % 3 AS varchar) AS p FROM UNNEST(sequence(0, 999)) AS x(n)"
            )
            trino.rows(f"DELETE FROM {CATALOG}.trino.t WHERE id % 2 = 0")
            assert trino.rows(f"SELECT count(*), max(id) FROM {CATALOG}.trino.t") == [[500, 999]]
            paths = [row[0] for row in trino.rows(f'SELECT file_path FROM {CATALOG}.trino."t$files"')]
            assert paths
            assert all((rig.folder / path.removeprefix("s3://")).is_file() for path in paths)
