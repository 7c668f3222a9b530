"""Tests of row lineage that Seamark and Spark write in turn. Unmodified Spark reads the lineage of a plain dict."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seamark.connector.read.lineage import NAMES
from seamark.connector.read.scans import scan
from seamark.connector.write.upserts import COPY_ON_WRITE, delete, upsert
from tests.engines.tables import SparkTables


class LineageTables(SparkTables):
    """Tables of version 3, with the lineage of their rows."""

    def read_lineage(self, name: str) -> dict[int, tuple[str, int, int, int]]:
        """Return (land, v, row id, sequence number) of each row, by id.

        Also check that Spark and Seamark read the same rows.
        """
        spark_rows = self.run_sql(f"SELECT id, land, v, {', '.join(NAMES)} FROM {{db}}.{name}")
        seamark_rows = scan(self.client, f"db.{name}", ["id", "land", "v", *NAMES]).to_arrow().to_pylist()
        assert sorted(tuple(row.values()) for row in seamark_rows) == sorted(spark_rows)
        assert len({row[3] for row in spark_rows}) == len(spark_rows), "no two rows have the same row id"
        return {row[0]: row[1:] for row in spark_rows}


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineageTables]:
    with LineageTables.open(spark, tmp_path_factory.mktemp("lineage")) as tables:
        yield tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "partition_clause"),
    [
        pytest.param("copy-on-write", "", marks=pytest.mark.slow),
        ("merge-on-read", "PARTITIONED BY (bucket(2, id))"),
    ],
)
def test_spark_reads_row_lineage_of_seamark_and_seamark_that_of_spark(
    lake: LineageTables, mode: str, partition_clause: str
) -> None:
    """`mode` is the write mode of Spark.

    Updates by Spark, and copy-on-write updates by Seamark, keep row ids. Neither changes the lineage of rows that are
    only copied.
    """
    rng = random.Random(len(partition_clause))
    name = f"t{len(partition_clause)}"
    lake.run_sql(
        f"CREATE TABLE {{db}}.{name} (id bigint, land string, v int) USING iceberg {partition_clause} TBLPROPERTIES "
        f"('format-version' = '3', 'write.update.mode' = '{mode}', 'write.merge.mode' = '{mode}')"
    )
    lake.run_sql(f"INSERT INTO {{db}}.{name} SELECT id, 'de', 0 FROM range(0, 30, 1, 2)")
    lineage_before = lake.read_lineage(name)
    kinds = ["upsert", "update", "upsert", "delete", "merge", "upsert", "update"]
    for step, kind in enumerate(kinds, 1):
        note = f"{mode}, step {step}, {kind}"
        changed_ids = rng.sample(range(45), 6)
        match kind:
            case "upsert":
                table = pa.table({"id": changed_ids, "land": ["fr"] * 6, "v": pa.array([step] * 6, pa.int32())})
                upsert(lake.client, f"db.{name}", table, keys=["id"], mode=COPY_ON_WRITE)
                new_rows = dict.fromkeys(changed_ids, ("fr", step))
            case "update":
                lake.run_sql(f"UPDATE {{db}}.{name} SET land = 'es', v = {step} WHERE id IN ({str(changed_ids)[1:-1]})")
                new_rows = {row_id: ("es", step) for row_id in changed_ids if row_id in lineage_before}
            case "delete":
                delete(lake.client, f"db.{name}", keys=pa.table({"id": changed_ids}), mode=COPY_ON_WRITE)
                new_rows = {}
                lineage_before = {row_id: row for row_id, row in lineage_before.items() if row_id not in changed_ids}
            case "merge":
                values = ", ".join(f"({row_id}, 'it', {step})" for row_id in changed_ids)
                lake.run_sql(
                    f"MERGE INTO {{db}}.{name} t USING (SELECT * FROM VALUES {values} AS g(id, land, v)) s "
                    "ON t.id = s.id WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
                )
                new_rows = dict.fromkeys(changed_ids, ("it", step))
        lineage = lake.read_lineage(name)
        (((sequence_number,),)) = lake.run_sql(f"SELECT max(sequence_number) FROM {{db}}.{name}.entries")
        assert lineage.keys() == lineage_before.keys() | new_rows.keys(), note
        for row_id, row in lineage.items():
            if row_id not in new_rows:
                assert row == lineage_before[row_id], f"{note}: the lineage of the copied row {row_id} has changed"
            else:
                assert (row[:2], row[3]) == (new_rows[row_id], sequence_number), f"{note}: row {row_id} was changed"
                if row_id in lineage_before:
                    assert row[2] == lineage_before[row_id][2], f"{note}: the row id of row {row_id} has changed"
                else:
                    assert row[2] > max(old_row[2] for old_row in lineage_before.values()), (
                        f"{note}: row {row_id} is new"
                    )
        lineage_before = lineage


@pytest.mark.slow
def test_metrics_of_lineage_columns_equal_the_metrics_that_spark_writes(lake: LineageTables) -> None:
    """Seamark and Spark each rewrite a file, and the files have the same rows."""
    metrics = []
    for writer in ("ours", "spark"):
        lake.run_sql(
            f"CREATE TABLE {{db}}.{writer} (id bigint, land string, v int) USING iceberg TBLPROPERTIES "
            "('format-version' = '3', 'write.update.mode' = 'copy-on-write')"
        )
        lake.run_sql(f"INSERT INTO {{db}}.{writer} SELECT id, 'de', 0 FROM range(0, 10, 1, 1)")
        if writer == "ours":
            table = pa.table({"id": [3], "land": ["fr"], "v": pa.array([1], pa.int32())})
            upsert(lake.client, "db.ours", table, keys=["id"], mode=COPY_ON_WRITE)
        else:
            lake.run_sql("UPDATE {db}.spark SET land = 'fr', v = 1 WHERE id = 3")
        columns = "record_count, first_row_id, value_counts, null_value_counts, lower_bounds, upper_bounds"
        metrics.append(lake.run_sql(f"SELECT {columns} FROM {{db}}.{writer}.files"))
    assert metrics[0] == metrics[1]
