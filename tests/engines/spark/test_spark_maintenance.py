"""Spark's own maintenance procedures beside ours: `remove_orphan_files` leaves index files and plan files, though no
metadata of the table names them and they are old; `expire_snapshots` keeps no snapshot that our expiration removes."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.jobs.expiration import expire
from tests.engines.tables import SparkTables

pytestmark = pytest.mark.spark
DAY_S = 86_400


def test_remove_orphan_files_leaves_index_files_and_plan_files(spark: SparkSession, tmp_path: Path) -> None:
    with SparkTables.served(spark, tmp_path) as tables:
        tables.sql("CREATE TABLE {db}.t (id bigint, land string) USING iceberg")
        for first in range(0, 40, 10):
            tables.sql(
                f"INSERT INTO {{db}}.t SELECT /*+ COALESCE(1) */ id, concat('l', id % 7) "
                f"FROM range({first}, {first + 10})"
            )
        tables.client.put_index("db.t", "lands", kind="bitmap", columns=["land"])
        build(tables.client, "db.t", "lands", InProcessWorkers())
        plan = tables.client.plan_table("db.t", "id = 3")
        location = Path(json.loads(tables.client.load_table("db.t").metadata)["location"].removeprefix("file://"))
        orphan = location / "data" / "orphan.parquet"
        orphan.write_bytes(b"left over")
        old_s = time.time() - 30 * DAY_S
        for path in location.rglob("*"):
            if path.is_file():
                os.utime(path, (old_s, old_s))
        kept = {path for path in location.rglob("_seamark/**/*") if path.is_file()}
        assert any(path.match("_seamark/index/*/*.puffin") for path in kept)
        assert any("plans" in path.parts for path in kept)
        catalog = tables.db.partition(".")[0]
        removed = tables.sql(f"CALL {catalog}.system.remove_orphan_files(table => 'db.t')")
        assert [path.rpartition("/")[2] for (path,) in removed] == ["orphan.parquet"]
        assert {path for path in location.rglob("_seamark/**/*") if path.is_file()} == kept
        assert tables.client.index("db.t", "lands").health == "ok"
        assert tables.client.explain("db.t", "land = 'l9'").files == 0
        assert tables.sql(f"SELECT count(*) FROM {{db}}.`{plan.name}`") == [(10,)]


@pytest.mark.parametrize("names", ["a", pytest.param("abc", marks=pytest.mark.slow)])
def test_an_expiration_removes_only_what_icebergs_own_would(spark: SparkSession, tmp_path: Path, names: str) -> None:
    """Spark then finds no more than the snapshot before each, whose age it counts from its own commit; and Spark reads
    every snapshot that is left."""
    rng, removed = random.Random(7), 0
    with SparkTables.served(spark, tmp_path) as tables:
        catalog = tables.db.partition(".")[0]
        for name in names:
            tables.sql(f"CREATE TABLE {{db}}.{name} (id bigint) USING iceberg TBLPROPERTIES ('format-version'='2')")
            for number in range(8):
                tables.sql(f"INSERT INTO {{db}}.{name} SELECT /*+ COALESCE(1) */ id FROM range({number + 1})")
                if rng.random() < 0.3:
                    tables.sql(f"DELETE FROM {{db}}.{name} WHERE id = {number}")
                if rng.random() < 0.2:
                    tables.sql(f"ALTER TABLE {{db}}.{name} CREATE BRANCH b{number}")
            commits = [at for (at,) in tables.sql(f"SELECT committed_at FROM {{db}}.{name}.snapshots ORDER BY 1")]
            older, least = rng.choice(commits[2:]), rng.randint(1, 3)
            contents = {
                id_: tables.sql(f"SELECT id FROM {{db}}.{name} VERSION AS OF {id_} ORDER BY id")
                for (id_,) in tables.sql(f"SELECT snapshot_id FROM {{db}}.{name}.snapshots")
            }
            kept_by_spark = {
                id_ for id_, at in tables.sql(f"SELECT snapshot_id, committed_at FROM {{db}}.{name}.snapshots")
                if at >= older
            }  # fmt: skip
            older_ms = int(older.timestamp() * 1000)
            totals = expire(tables.client, f"db.{name}", older_than_ms=older_ms, retain_last=least)
            left = {id_ for (id_,) in tables.sql(f"SELECT snapshot_id FROM {{db}}.{name}.snapshots")}
            assert len(contents) - len(left) == totals.snapshots
            removed += totals.snapshots
            assert kept_by_spark <= left
            tables.sql(
                f"CALL {catalog}.system.expire_snapshots(table => 'db.{name}', retain_last => {least}, "
                f"older_than => TIMESTAMP '{older}')"
            )
            left_by_spark = {id_ for (id_,) in tables.sql(f"SELECT snapshot_id FROM {{db}}.{name}.snapshots")}
            heads = tables.sql(f"SELECT count(*) FROM {{db}}.{name}.refs WHERE type = 'BRANCH'")[0][0]
            assert len(left - left_by_spark) <= heads
            for id_ in left_by_spark:
                found = tables.sql(f"SELECT id FROM {{db}}.{name} VERSION AS OF {id_} ORDER BY id")
                assert found == contents[id_]
    assert removed > len(names)
