"""Tests of engines that share tables in S3, Azure and Google Cloud Storage, only with keys of the gateway.

The engines use S3 for all of them, so they need no library of a cloud.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from pyiceberg.catalog.rest import RestCatalog

import seamark.duckdb
from tests.gateway.rig import GatewayRig, open_cloud_rig, open_rig
from tests.gateway.test_engines import S3_IO
from tests.services.clouds.azurite import HOST, Azurite
from tests.services.clouds.gcs import GoogleStorage
from tests.services.s3 import S3

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def rigs(tmp_path: Path, s3: S3, azurite: Azurite, google_storage: GoogleStorage) -> Iterator[dict[str, GatewayRig]]:
    """Yield a server for each storage, by the name of the storage."""
    container = azurite.create_container().removeprefix("abfss://").removesuffix(f"@{HOST}")
    bucket = google_storage.create_bucket().removeprefix("gs://")
    azure = {"s3_backend": f"abfss://{HOST}", **azurite.make_settings()}
    google = {"s3_backend": "gs://", **google_storage.make_settings()}
    with ExitStack() as stack:
        yield {
            "s3": stack.enter_context(open_rig(tmp_path / "s3", s3)),
            "azure": stack.enter_context(open_cloud_rig(tmp_path / "azure", container, azure)),
            "google": stack.enter_context(open_cloud_rig(tmp_path / "google", bucket, google)),
        }


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.trino
def test_engines_share_tables_in_each_cloud_with_keys_for_one_table(
    spark: SparkSession, spark_catalog: Callable[..., str], rigs: dict[str, GatewayRig], tmp_path: Path
) -> None:
    from tests.services.trino import trino_server

    catalogs = {name: build_trino_catalog(rig) for name, rig in rigs.items()}
    first = next(iter(rigs.values()))
    with trino_server(tmp_path / "trino", uri=first.seamark.base_url, changed_catalogs=catalogs) as trino:
        for name, rig in rigs.items():
            in_spark = f"{spark_catalog(rig.seamark.base_url, extra=S3_IO)}.shared.t"
            spark.sql(f"CREATE NAMESPACE {in_spark.removesuffix('.t')}")
            spark.sql(
                f"CREATE TABLE {in_spark} USING iceberg PARTITIONED BY (p) TBLPROPERTIES ('format-version'='2', "
                "'write.delete.mode'='merge-on-read') AS SELECT id, concat('a b/', id % 3, 'ü') AS p FROM range(1000)"
            )
            expected = {(number, f"a b/{number % 3}ü") for number in range(1000)}

            in_trino = f"{name}.shared.t"
            trino.rows(f"INSERT INTO {in_trino} VALUES (1000, 'trino')")
            trino.rows(f"DELETE FROM {in_trino} WHERE id % 2 = 0 AND id < 100")
            expected = {row for row in expected if row[0] % 2 or row[0] >= 100} | {(1000, "trino")}

            catalog = RestCatalog("cloud", uri=rig.seamark.base_url)
            catalog.load_table("shared.t").append(pa.table({"id": [1001], "p": ["pyiceberg"]}))
            expected.add((1001, "pyiceberg"))

            with closing(seamark.duckdb.connect(rig.seamark.base_url, on_s3=True)) as con:
                con.execute("INSERT INTO sea.shared.t VALUES (1002, 'duckdb')")
                expected.add((1002, "duckdb"))
                spark.sql(f"DELETE FROM {in_spark} WHERE id % 5 = 1 AND id < 1000")
                expected = {row for row in expected if row[0] % 5 != 1 or row[0] >= 1000}

                assert set(map(tuple, con.sql("SELECT id, p FROM sea.shared.t").fetchall())) == expected
            assert {tuple(row) for row in spark.sql(f"SELECT id, p FROM {in_spark}").collect()} == expected
            assert {tuple(row) for row in trino.rows(f"SELECT id, p FROM {in_trino}")} == expected
            arrow = catalog.load_table("shared.t").scan().to_arrow()
            assert sorted(zip(arrow["id"].to_pylist(), arrow["p"].to_pylist(), strict=True)) == sorted(expected)

            trino.rows(f"CREATE TABLE {name}.shared.own AS SELECT 1 AS id")
            assert spark.sql(f"SELECT id FROM {in_spark.removesuffix('.t')}.own").collect()[0][0] == 1
            check_keys_of_one_table(rig, "t", "own")
            trino.rows(f"DROP TABLE {name}.shared.own")
            spark.sql(f"DROP TABLE {in_spark}")


def build_trino_catalog(rig: GatewayRig) -> dict[str, str]:
    """Return the properties of a catalog in Trino whose only keys are those of the gateway."""
    return {
        "iceberg.rest-catalog.uri": rig.seamark.base_url,
        "iceberg.rest-catalog.vended-credentials-enabled": "true",
        "s3.endpoint": rig.gateway,
        "s3.region": "us-east-1",
        "s3.aws-access-key": "unused",
        "s3.aws-secret-key": "unused",
    }


def check_keys_of_one_table(rig: GatewayRig, own_table: str, other_table: str) -> None:
    """Check that the keys of one table read and write its objects, and no objects of another table."""
    own_keys = rig.load_keys(own_table, namespace="shared")
    other_keys = rig.load_keys(other_table, namespace="shared")
    client: Any = own_keys.make_client()
    foreign = other_keys.make_client().list_objects_v2(Bucket=other_keys.bucket, Prefix=other_keys.prefix)
    address = {"Bucket": other_keys.bucket, "Key": foreign["Contents"][0]["Key"]}
    assert client.list_objects_v2(Bucket=own_keys.bucket, Prefix=own_keys.prefix)["KeyCount"] > 0
    copy = {"Bucket": own_keys.bucket, "Key": f"{own_keys.prefix}copy", "CopySource": address}
    for call, arguments in (
        (client.get_object, address),
        (client.put_object, {**address, "Body": b"x"}),
        (client.delete_object, address),
        (client.list_objects_v2, {"Bucket": other_keys.bucket, "Prefix": other_keys.prefix}),
        (client.copy_object, copy),
    ):
        with pytest.raises(ClientError, match="AccessDenied"):
            call(**arguments)
