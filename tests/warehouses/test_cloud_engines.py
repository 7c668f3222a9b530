"""Tests of engines that use warehouses in S3, Azure and Google Cloud Storage of one server, only with gateway keys.

The engines use S3 for all of them, so they need no library of a cloud.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from botocore.exceptions import ClientError
from pyiceberg.catalog.rest import RestCatalog

import seamark.duckdb
from tests.gateway.rig import GatewayRig, Keys, read_keys
from tests.gateway.test_engines import S3_IO
from tests.services.clouds.azurite import HOST, Azurite
from tests.services.clouds.gcs import GoogleStorage
from tests.services.process import choose_free_port
from tests.services.s3 import S3
from tests.services.seamark import Seamark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ("", "azure", "google")
"""The warehouses of the server. The server's own warehouse, which is in S3, has no name."""


@dataclass(frozen=True)
class CloudWarehouses:
    """A server with a warehouse in each cloud."""

    rig: GatewayRig

    @property
    def uri(self) -> str:
        return self.rig.seamark.base_url

    def load_keys(self, warehouse: str, table: str) -> Keys:
        prefix = f"/v1/{warehouse}" if warehouse else "/v1"
        return read_keys(self.rig.request("GET", f"{prefix}/namespaces/shared/tables/{table}"))

    def open_catalog(self, warehouse: str) -> RestCatalog:
        return RestCatalog(f"cloud {warehouse}", uri=self.uri, **({"warehouse": warehouse} if warehouse else {}))


@pytest.fixture
def clouds(tmp_path: Path, s3: S3, azurite: Azurite, google_storage: GoogleStorage) -> Iterator[CloudWarehouses]:
    container_uri, bucket_uri = azurite.create_container(), google_storage.create_bucket()
    port = choose_free_port()
    env = {
        f"SEAMARK_{name.upper()}": value
        for name, value in {
            **azurite.make_settings(),
            **google_storage.make_settings(),
            "gateway_port": str(port),
            "s3_client_access": "gateway",
            "warehouse_roots": f"{container_uri},{bucket_uri}",
        }.items()
    }
    bucket_in_s3 = s3.create_bucket("seamark-clouds")
    with Seamark(tmp_path / "home", warehouse=f"s3://{bucket_in_s3}/wh", env=s3.build_seamark_env() | env) as server:
        rig = GatewayRig(server, f"http://127.0.0.1:{port}", s3, s3.root)
        for name, root, backend in (("azure", container_uri, f"abfss://{HOST}"), ("google", bucket_uri, "gs://")):
            bucket_name = root.partition("://")[2].partition("@")[0]
            definition = {"location": f"s3://{bucket_name}/{name}", "settings": {"s3_backend": backend}}
            rig.request("PUT", f"/api/v1/warehouses/{name}", definition)
        yield CloudWarehouses(rig)


def build_trino_catalog(clouds: CloudWarehouses, warehouse: str) -> dict[str, str]:
    """Return the properties of a catalog in Trino.

    Its configured keys are invalid, so Trino can read tables only with the keys that the server sends for the gateway.
    """
    return {
        "iceberg.rest-catalog.uri": clouds.uri,
        "iceberg.rest-catalog.vended-credentials-enabled": "true",
        "s3.endpoint": clouds.rig.gateway,
        "s3.region": "us-east-1",
        "s3.aws-access-key": "unused",
        "s3.aws-secret-key": "unused",
        **({"iceberg.rest-catalog.warehouse": warehouse} if warehouse else {}),
    }


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.trino
def test_engines_share_tables_in_three_clouds_of_one_server_with_keys_for_one_table(
    spark: SparkSession, spark_catalog: Callable[..., str], clouds: CloudWarehouses, tmp_path: Path
) -> None:
    from tests.services.trino import trino_server

    catalogs = {f"in_{name}": build_trino_catalog(clouds, name) for name in NAMES}
    with trino_server(tmp_path / "trino", uri=clouds.uri, changed_catalogs=catalogs) as trino:
        for name in NAMES:
            extra = {**S3_IO, **({"warehouse": name} if name else {})}
            spark_namespace = f"{spark_catalog(clouds.uri, extra=extra)}.shared"
            spark.sql(f"CREATE NAMESPACE {spark_namespace}")
            spark.sql(
                f"CREATE TABLE {spark_namespace}.t USING iceberg PARTITIONED BY (p) "
                "TBLPROPERTIES ('format-version'='2', "
                "'write.delete.mode'='merge-on-read') AS SELECT id, concat('a b/', id % 3, 'ü') AS p FROM range(1000)"
            )
            expected = {(number, f"a b/{number % 3}ü") for number in range(1000)}
            expected.add((2000, name))
            spark.sql(f"INSERT INTO {spark_namespace}.t VALUES (2000, '{name}')")

            trino_schema = f"in_{name}.shared"
            trino.rows(f"INSERT INTO {trino_schema}.t VALUES (1000, 'trino')")
            trino.rows(f"DELETE FROM {trino_schema}.t WHERE id % 2 = 0 AND id < 100")
            expected = {row for row in expected if row[0] % 2 or row[0] >= 100} | {(1000, "trino")}

            catalog = clouds.open_catalog(name)
            catalog.load_table("shared.t").append(pa.table({"id": [1001], "p": ["pyiceberg"]}))
            expected.add((1001, "pyiceberg"))

            duckdb_uri = f"{clouds.uri}/warehouses/{name}" if name else clouds.uri
            with closing(seamark.duckdb.connect(duckdb_uri, on_s3=True)) as con:
                con.execute("INSERT INTO sea.shared.t VALUES (1002, 'duckdb')")
                expected.add((1002, "duckdb"))
                spark.sql(f"DELETE FROM {spark_namespace}.t WHERE id % 5 = 1 AND id < 1000")
                expected = {row for row in expected if row[0] % 5 != 1 or row[0] >= 1000}

                assert set(map(tuple, con.sql("SELECT id, p FROM sea.shared.t").fetchall())) == expected
            assert {tuple(row) for row in spark.sql(f"SELECT id, p FROM {spark_namespace}.t").collect()} == expected
            assert {tuple(row) for row in trino.rows(f"SELECT id, p FROM {trino_schema}.t")} == expected
            arrow_rows = catalog.load_table("shared.t").scan().to_arrow()
            assert sorted(zip(arrow_rows["id"].to_pylist(), arrow_rows["p"].to_pylist(), strict=True)) == sorted(
                expected
            )

            trino.rows(f"CREATE TABLE {trino_schema}.own AS SELECT 1 AS id")
            assert spark.sql(f"SELECT id FROM {spark_namespace}.own").collect()[0][0] == 1

        keys_by_table = {(name, table): clouds.load_keys(name, table) for name in NAMES for table in ("t", "own")}
        for own_keys, other_keys in itertools.permutations(keys_by_table.values(), 2):
            check_keys_reach_only_their_table(own_keys, other_keys)
        check_stores_do_not_know_the_keys(clouds, keys_by_table["", "own"])
        for name in NAMES:
            trino.rows(f"DROP TABLE in_{name}.shared.own")
            clouds.open_catalog(name).drop_table("shared.t")


def check_keys_reach_only_their_table(own_keys: Keys, other_keys: Keys) -> None:
    """Check that the keys read an object of their table, and cannot use objects of another table."""
    client: Any = own_keys.make_client()
    foreign_client: Any = other_keys.make_client()
    foreign_objects = foreign_client.list_objects_v2(Bucket=other_keys.bucket, Prefix=other_keys.prefix)["Contents"]
    address = {"Bucket": other_keys.bucket, "Key": foreign_objects[0]["Key"]}
    own_objects = client.list_objects_v2(Bucket=own_keys.bucket, Prefix=own_keys.prefix)["Contents"]
    assert client.get_object(Bucket=own_keys.bucket, Key=own_objects[0]["Key"])["Body"].read()
    copy_arguments = {"Bucket": own_keys.bucket, "Key": f"{own_keys.prefix}copy", "CopySource": address}
    for call, arguments in (
        (client.get_object, address),
        (client.head_object, address),
        (client.put_object, {**address, "Body": b"x"}),
        (client.delete_object, address),
        (client.list_objects_v2, {"Bucket": other_keys.bucket, "Prefix": other_keys.prefix}),
        (client.copy_object, copy_arguments),
    ):
        with pytest.raises(ClientError, match=r"AccessDenied|Forbidden"):
            call(**arguments)


def check_stores_do_not_know_the_keys(clouds: CloudWarehouses, keys: Keys) -> None:
    """Check that a client cannot bypass the gateway with the keys that it has."""
    assert clouds.rig.direct_store is not None
    store = clouds.rig.direct_store
    for token in (keys.token, ""):
        client = replace(keys, endpoint=store.endpoint, region=store.region, token=token).make_client()
        with pytest.raises(ClientError, match=r"InvalidToken|XAdminUserNotFound|InvalidAccessKeyId"):
            client.list_objects_v2(Bucket=keys.bucket, Prefix=keys.prefix)
