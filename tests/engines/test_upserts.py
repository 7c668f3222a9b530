"""Tests of upserts and deletes from plain Python between Spark's own statements.

Unmodified Spark reads the rows of a plain dict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seamark.connector.write.upserts import MODES, delete, upsert
from tests.engines.tables import SparkTables

Model = dict[int, tuple[str | None, int]]


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkTables]:
    with SparkTables.open(spark, tmp_path_factory.mktemp("upserts")) as tables:
        yield tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "partition_clause"),
    [
        pytest.param(3, "", marks=pytest.mark.slow),
        pytest.param(3, "PARTITIONED BY (bucket(4, id))", marks=pytest.mark.slow),
        (3, "PARTITIONED BY (land)"),
        pytest.param(2, "PARTITIONED BY (bucket(4, id))", marks=pytest.mark.slow),
    ],
)
def test_spark_and_seamark_change_one_table_in_turn(lake: SparkTables, version: int, partition_clause: str) -> None:
    seed = 10 * version + len(partition_clause)
    rng = random.Random(seed)
    name = f"t{seed}"
    lake.run_sql(
        f"CREATE TABLE {{db}}.{name} (id bigint, land string, v int) USING iceberg {partition_clause} TBLPROPERTIES "
        f"('format-version' = '{version}', 'write.merge.mode' = 'merge-on-read', 'write.delete.mode' = 'merge-on-read')"
    )
    model: Model = {}
    kinds = ["upsert", "merge", "upsert", "delete", "where", "merge"]
    rng.shuffle(kinds)
    for step, kind in enumerate(["upsert", *kinds]):
        changed_ids = rng.sample(range(60), 12)
        input_model: Model = {number: (rng.choice(("de", "fr", None)), step) for number in changed_ids}
        note = f"seed {seed}, step {step}, {kind}"
        match kind:
            case "upsert":
                table = pa.table(
                    {
                        "id": list(input_model),
                        "land": pa.array([value[0] for value in input_model.values()], pa.string()),
                        "v": pa.array([value[1] for value in input_model.values()], pa.int32()),
                    }
                )
                upsert(lake.client, f"db.{name}", table, keys=["id"], mode=rng.choice(MODES))
                model |= input_model
            case "delete":
                delete(lake.client, f"db.{name}", keys=pa.table({"id": changed_ids}), mode=rng.choice(MODES))
                model = {id_: row for id_, row in model.items() if id_ not in input_model}
            case "where":
                delete(lake.client, f"db.{name}", where=f"v = {step - 1}", mode=rng.choice(MODES))
                model = {id_: row for id_, row in model.items() if row[1] != step - 1}
            case "merge":
                values = ", ".join(f"({id_}, {land!r}, {v})" for id_, (land, v) in input_model.items()).replace(
                    "None", "null"
                )
                lake.run_sql(
                    f"MERGE INTO {{db}}.{name} t USING (SELECT * FROM VALUES {values} AS g(id, land, v)) s "
                    "ON t.id = s.id WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
                )
                model |= input_model
        actual = {id_: (land, v) for id_, land, v in lake.run_sql(f"SELECT id, land, v FROM {{db}}.{name}")}
        assert actual == model, note
        assert lake.run_sql(f"SELECT count(*) FROM {{db}}.{name}") == [(len(model),)], note
