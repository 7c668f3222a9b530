"""Tests of Seamark's equality deletes in unmodified Spark: its reader applies them, and Spark writes between them."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.client import SeamarkClient
from seamark.connector.spark.frames import upserts as upserting
from seamark.connector.spark.frames.writes import write
from seamark.connector.write.buckets import resize
from seamark.connector.write.equality_upserts import EQUALITY
from seamark.connector.write.upserts import MODES, delete, upsert
from tests.engines.conftest import collect_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog


def make_rows(ids: list[int], value: int) -> pa.Table:
    return pa.table({"id": ids, "v": pa.array([value] * len(ids), pa.int64())})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "partition_clause", "steps"),
    [
        (3, "", 2),
        (3, "", 4),
        (2, "PARTITIONED BY (bucket(4, id))", 4),
    ],
)
def test_spark_reads_the_rows_after_equality_upserts_and_deletes(
    spark: SparkSession,
    tmp_path_factory: pytest.TempPathFactory,
    version: int,
    partition_clause: str,
    steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upserting, "TASK_ROWS_MIN", 5)  # With this value, 20 rows are spread over several tasks.
    rng, model = random.Random(version), dict[int, int]()
    with Seamark(tmp_path_factory.mktemp("unlocated")) as server:
        client, db = SeamarkClient(server.base_url), f"{new_catalog(spark, server.base_url)}.db"
        spark.sql(f"CREATE NAMESPACE {db}")
        spark.sql(
            f"CREATE TABLE {db}.t (id bigint, v bigint) USING iceberg {partition_clause} TBLPROPERTIES "
            f"('format-version' = '{version}', 'write.merge.mode' = 'merge-on-read')"
        )
        for step in range(steps):
            upserted_ids = rng.sample(range(60), 20)
            upsert(client, "db.t", make_rows(upserted_ids, 10 * step), keys=["id"], strategy=EQUALITY)
            model |= dict.fromkeys(upserted_ids, 10 * step)
            merged_ids = rng.sample(range(60), 5)
            source_rows = ", ".join(f"({id_}L, {10 * step + 1}L)" for id_ in merged_ids)
            spark.sql(
                f"MERGE INTO {db}.t t USING (SELECT * FROM VALUES {source_rows} AS g(id, v)) s ON t.id = s.id "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )
            model |= dict.fromkeys(merged_ids, 10 * step + 1)
            removed_ids = rng.sample(range(60), 5)
            delete(client, "db.t", keys=pa.table({"id": removed_ids}), strategy=EQUALITY)
            rewritten_ids = rng.sample(range(60), 5)
            upsert(client, "db.t", make_rows(rewritten_ids, 10 * step + 2), keys=["id"], mode=rng.choice(MODES))
            model = {id_: value for id_, value in model.items() if id_ not in removed_ids}
            model |= dict.fromkeys(rewritten_ids, 10 * step + 2)
            # Many tasks run, but none of them looks up stored rows.
            ids_of_tasks = rng.sample(range(60), 20)
            frame = spark.createDataFrame([(id_, 10 * step + 3) for id_ in ids_of_tasks], "id bigint, v bigint")
            task_options = {"client": client, "strategy": EQUALITY, "driver_rows": 0}
            report = write(frame, "db.t", mode="upsert", keys=["id"], **task_options)
            assert report.attempts == 1
            assert report.files_written >= 4, "at least two tasks must write data and deletes"
            write(frame.filter("id < 10").select("id"), "db.t", mode="delete", **task_options)
            model |= dict.fromkeys(ids_of_tasks, 10 * step + 3)
            model = {id_: value for id_, value in model.items() if not (id_ in ids_of_tasks and id_ < 10)}
            if partition_clause and step == 1:
                resize(client, "db.t", buckets=8)
            actual = collect_rows(spark.sql(f"SELECT id, v FROM {db}.t"))
            assert sorted(actual) == sorted(model.items()), f"version {version}, step {step}"
        client.close()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("table_clause", "keys", "message"),
    [
        ("TBLPROPERTIES ('format-version' = '1')", ["id"], "it has no delete files"),
        ("PARTITIONED BY (v)", ["id"], "has the field v, which is not derived from the key"),
        ("", ["x"], "readers compare differently"),
    ],
    ids=["version 1", "other partitions", "floating point"],
)
def test_options_that_need_stored_rows_are_refused_before_a_task_runs(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, table_clause: str, keys: list[str], message: str
) -> None:
    with Seamark(tmp_path_factory.mktemp("unsaid")) as server:
        client, db = SeamarkClient(server.base_url), f"{new_catalog(spark, server.base_url)}.db"
        spark.sql(f"CREATE NAMESPACE {db}")
        spark.sql(f"CREATE TABLE {db}.t (id bigint, v bigint, x double) USING iceberg {table_clause}")
        frame = spark.createDataFrame([(1, 1, 1.0)], "id bigint, v bigint, x double")
        with pytest.raises(Unwritable, match=message):
            write(frame, "db.t", client=client, mode="upsert", keys=keys, strategy=EQUALITY, driver_rows=0)
        client.close()
