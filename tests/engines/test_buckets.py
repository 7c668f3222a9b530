"""Tests that double the number of buckets while unmodified Spark uses the table.

A session that has loaded the table before can still write to it. Spark's reader returns the rows of a plain dict from
files of all specs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.write.buckets import resize
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.engines.conftest import collect_rows
from tests.engines.test_unlocated import make_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

Model = dict[int, int]


@dataclass(frozen=True)
class BucketLake:
    """Tables of `id` and `v` in buckets, which Spark and a Seamark client change."""

    client: SeamarkClient
    spark: SparkSession
    db: str
    old_session: str
    """The name of a catalog that caches loaded tables, as Iceberg does by default."""

    def run_sql(self, text: str) -> list[tuple[Any, ...]]:
        return collect_rows(self.spark.sql(text.format(db=self.db, old=self.old_session)))

    def read_rows(self, name: str) -> Model:
        actual = self.run_sql(f"SELECT id, v FROM {{db}}.{name}")
        model = dict(actual)
        assert len(model) == len(actual)
        return model

    def list_specs(self, name: str) -> set[int]:
        """Return the specs of the data files that the last snapshot added."""
        metadata = json.loads(self.client.load_table(f"db.{name}").metadata)
        files = self.client.files(f"db.{name}", content="data").to_pylist()
        return {file["spec_id"] for file in files if file["snapshot_id"] == metadata["current-snapshot-id"]}


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketLake]:
    with Seamark(tmp_path_factory.mktemp("buckets")) as server:
        client = SeamarkClient(server.base_url)
        cache_properties = {"cache-enabled": "true", "cache.expiration-interval-ms": "-1"}
        caching_catalog = new_catalog(spark, server.base_url, extra=cache_properties)
        bucket_lake = BucketLake(client, spark, f"{new_catalog(spark, server.base_url)}.db", f"{caching_catalog}.db")
        bucket_lake.run_sql("CREATE NAMESPACE IF NOT EXISTS {db}")
        yield bucket_lake
        client.close()


def create_table(lake: BucketLake, name: str, version: int) -> None:
    lake.run_sql(
        f"CREATE TABLE {{db}}.{name} (id bigint, v bigint) USING iceberg PARTITIONED BY (bucket(8, id)) TBLPROPERTIES "
        f"('format-version' = '{version}', 'write.merge.mode' = 'merge-on-read')"
    )


# The fast tier tests the same doublings without Spark, and with a Spark session that loaded the table before them.
@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 3])
def test_spark_and_seamark_write_to_one_table_from_8_to_64_buckets(lake: BucketLake, version: int) -> None:
    rng, name, model = random.Random(version), f"changed_{version}", Model()
    create_table(lake, name, version)
    for step, bucket_count in enumerate((8, 16, 32, 64)):
        assert resize(lake.client, f"db.{name}", buckets=bucket_count).spec_id == step
        upserted_ids = rng.sample(range(80), 20)
        upsert(lake.client, f"db.{name}", make_rows(upserted_ids, 10 * step), keys=["id"], mode=rng.choice(MODES))
        model |= dict.fromkeys(upserted_ids, 10 * step)
        assert lake.list_specs(name) == {step}
        updated_ids = rng.sample(range(100), 20)
        values = ", ".join(f"({id_}L, {10 * step + 1}L)" for id_ in updated_ids)
        lake.run_sql(
            f"MERGE INTO {{db}}.{name} t USING (SELECT * FROM VALUES {values} AS g(id, v)) s ON t.id = s.id "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        model |= dict.fromkeys(updated_ids, 10 * step + 1)
        assert lake.list_specs(name) == {step}
        removed_ids = rng.sample(range(100), 5)
        delete(lake.client, f"db.{name}", keys=pa.table({"id": removed_ids}), mode=rng.choice(MODES))
        model = {id_: value for id_, value in model.items() if id_ not in removed_ids}
        assert lake.read_rows(name) == model, f"version {version}, {bucket_count} buckets"
        for id_ in rng.sample(range(100), 3):
            expected = [(model[id_],)] if id_ in model else []
            assert lake.run_sql(f"SELECT v FROM {{db}}.{name} WHERE id = {id_}") == expected
    # A metadata table has one struct for the partitions of all specs, so field names must differ.
    (columns,) = {tuple(row[0].asDict()) for row in lake.run_sql(f"SELECT _partition FROM {{db}}.{name}")}
    assert set(columns) == {"id_bucket", "id_bucket_16", "id_bucket_32", "id_bucket_64"}
    record_count = sum(row[0] for row in lake.run_sql(f"SELECT record_count FROM {{db}}.{name}.partitions"))
    assert record_count == sum(lake.client.files(f"db.{name}", content="data")["record_count"].to_pylist())


@pytest.mark.slow
def test_spark_session_that_loaded_the_table_before_a_resize_still_appends(lake: BucketLake) -> None:
    create_table(lake, "open", 2)
    lake.run_sql("INSERT INTO {old}.open VALUES (0, 0)")
    model = {0: 0}
    for step, bucket_count in enumerate((16, 32, 64)):
        resize(lake.client, "db.open", buckets=bucket_count)
        ids = range(10 * step + 1, 10 * step + 10)
        lake.run_sql("INSERT INTO {old}.open VALUES " + ", ".join(f"({id_}, {step})" for id_ in ids))
        assert lake.list_specs("open") == {step}, (
            "Spark must write with the spec that it has loaded, not with the current spec"
        )
        model |= dict.fromkeys(ids, step)
        assert lake.read_rows("open") == model
    upsert(lake.client, "db.open", make_rows(list(range(15)), 99), keys=["id"])
    assert lake.read_rows("open") == model | dict.fromkeys(range(15), 99)
    assert lake.list_specs("open") == {3}
