"""Tests of Spark's maintenance procedures together with Seamark's jobs.

`remove_orphan_files` keeps old index files and plan files, although the table's metadata do not name them.
`expire_snapshots` expires every snapshot that Seamark's expiration removes. Iceberg's Java library reads
Seamark's statistics and manifests.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.jobs.server_jobs import expire, rewrite_manifests
from seamark.connector.jobs.statistics import compute_statistics
from seamark.spark import sql
from tests.engines.tables import SparkTables

DAY_S = 86_400


@pytest.mark.slow
def test_remove_orphan_files_keeps_index_files_and_plan_files(spark: SparkSession, tmp_path: Path) -> None:
    with SparkTables.open(spark, tmp_path) as tables:
        tables.run_sql("CREATE TABLE {db}.t (id bigint, land string) USING iceberg")
        for first_id in range(0, 40, 10):
            tables.run_sql(
                f"INSERT INTO {{db}}.t SELECT /*+ COALESCE(1) */ id, concat('l', id % 7) "
                f"FROM range({first_id}, {first_id + 10})"
            )
        compute_statistics(tables.client, "db.t")
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
        kept_paths = {path for path in location.rglob("_seamark/**/*") if path.is_file()}
        kept_paths |= set(location.rglob("metadata/*.stats"))
        assert any(path.suffix == ".stats" for path in kept_paths)
        assert any(path.match("_seamark/index/*/*.puffin") for path in kept_paths)
        assert any("plans" in path.parts for path in kept_paths)
        catalog = tables.db.partition(".")[0]
        removed_files = tables.run_sql(f"CALL {catalog}.system.remove_orphan_files(table => 'db.t')")
        assert [path.rpartition("/")[2] for (path,) in removed_files] == ["orphan.parquet"]
        assert all(path.exists() for path in kept_paths)
        assert tables.client.index("db.t", "lands").health == "ok"
        assert tables.client.explain("db.t", "land = 'l9'").files == 0
        assert tables.run_sql(f"SELECT count(*) FROM {{db}}.`{plan.name}`") == [(10,)]


@pytest.mark.slow
@pytest.mark.parametrize("table_names", ["a", "abc"])
def test_expiration_removes_only_snapshots_that_iceberg_would_expire(
    spark: SparkSession, tmp_path: Path, table_names: str
) -> None:
    """Afterwards Spark expires at most one more snapshot for each branch, and can read all snapshots that remain.

    Spark counts the age of a snapshot from its own commit, and Seamark from the commit that replaced the snapshot.
    """
    rng, removed_count = random.Random(7), 0
    with SparkTables.open(spark, tmp_path) as tables:
        catalog = tables.db.partition(".")[0]
        for name in table_names:
            tables.run_sql(f"CREATE TABLE {{db}}.{name} (id bigint) USING iceberg TBLPROPERTIES ('format-version'='2')")
            for number in range(8):
                tables.run_sql(f"INSERT INTO {{db}}.{name} SELECT /*+ COALESCE(1) */ id FROM range({number + 1})")
                if rng.random() < 0.3:
                    tables.run_sql(f"DELETE FROM {{db}}.{name} WHERE id = {number}")
                if rng.random() < 0.2:
                    tables.run_sql(f"ALTER TABLE {{db}}.{name} CREATE BRANCH b{number}")
            commit_times = [
                committed_at
                for (committed_at,) in tables.run_sql(f"SELECT committed_at FROM {{db}}.{name}.snapshots ORDER BY 1")
            ]
            oldest_kept_time, snapshots_min = rng.choice(commit_times[2:]), rng.randint(1, 3)
            rows_by_snapshot = {
                id_: tables.run_sql(f"SELECT id FROM {{db}}.{name} VERSION AS OF {id_} ORDER BY id")
                for (id_,) in tables.run_sql(f"SELECT snapshot_id FROM {{db}}.{name}.snapshots")
            }
            all_commits = tables.run_sql(f"SELECT snapshot_id, committed_at FROM {{db}}.{name}.snapshots")
            young_ids = {id_ for id_, committed_at in all_commits if committed_at >= oldest_kept_time}
            older_ms = int(oldest_kept_time.timestamp() * 1000)
            totals = expire(tables.client, f"db.{name}", older_than_ms=older_ms, retain_last=snapshots_min)
            live_snapshot_ids = {id_ for (id_,) in tables.run_sql(f"SELECT snapshot_id FROM {{db}}.{name}.snapshots")}
            assert len(rows_by_snapshot) - len(live_snapshot_ids) == totals.snapshots
            removed_count += totals.snapshots
            assert young_ids <= live_snapshot_ids
            tables.run_sql(
                f"CALL {catalog}.system.expire_snapshots(table => 'db.{name}', retain_last => {snapshots_min}, "
                f"older_than => TIMESTAMP '{oldest_kept_time}')"
            )
            remaining_ids = {id_ for (id_,) in tables.run_sql(f"SELECT snapshot_id FROM {{db}}.{name}.snapshots")}
            branch_count = tables.run_sql(f"SELECT count(*) FROM {{db}}.{name}.refs WHERE type = 'BRANCH'")[0][0]
            assert len(live_snapshot_ids - remaining_ids) <= branch_count
            for id_ in remaining_ids:
                actual = tables.run_sql(f"SELECT id FROM {{db}}.{name} VERSION AS OF {id_} ORDER BY id")
                assert actual == rows_by_snapshot[id_]
    assert removed_count > len(table_names)


# In the fast tier, Trino reads Seamark's statistics, and Iceberg's Java planner reads the manifests.
@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 3])
def test_icebergs_java_library_reads_seamarks_statistics_and_manifests(
    spark: SparkSession, tmp_path: Path, version: int
) -> None:
    with SparkTables.open(spark, tmp_path) as tables:
        tables.run_sql(
            "CREATE TABLE {db}.t (id bigint, land string, at timestamp, price decimal(20, 2), n int) USING iceberg "
            f"PARTITIONED BY (land) TBLPROPERTIES ('format-version'='{version}', 'write.delete.mode'='merge-on-read', "
            "'commit.manifest-merge.enabled'='false')"
        )
        for first_id in range(0, 30_000, 10_000):
            tables.run_sql(
                "INSERT INTO {db}.t SELECT id, concat('l', id % 3), timestamp_seconds(id * 7), id / 100, id % 1000 "
                f"FROM range({first_id}, {first_id + 10_000})"
            )
        tables.run_sql("DELETE FROM {db}.t WHERE id % 3 = 1 AND id < 100")
        query = "SELECT id, land, at, price, n FROM {db}.t ORDER BY id"
        rows, live_entries = tables.run_sql(query), _read_live_entries(tables)
        assert compute_statistics(tables.client, "db.t").columns == 5
        catalog = tables.db.partition(".")[0]
        ndv, sketches, partitions = _read_statistics(spark, tables)
        exact_counts = tables.run_sql("SELECT count(distinct id), count(distinct land), count(distinct n) FROM {db}.t")[
            0
        ]
        for column, count in zip((1, 2, 5), exact_counts, strict=True):
            assert ndv[column] == pytest.approx(count, rel=0.05)
            assert sketches[column] == pytest.approx(ndv[column], abs=1)
        # Spark's procedure hashes the same bytes, so it states similar numbers of distinct values.
        tables.run_sql(f"CALL {catalog}.system.compute_table_stats(table => 'db.t')")
        statistics = _read_statistics(spark, tables)[0]
        assert {column: pytest.approx(count, rel=0.05) for column, count in statistics.items()} == ndv
        assert statistics[2] == ndv[2] == 3
        assert statistics[5] == ndv[5] == 1000
        expected = tables.run_sql(
            "SELECT partition.land, record_count, file_count, position_delete_record_count, "
            "last_updated_snapshot_id FROM {db}.t.partitions ORDER BY 1"
        )
        assert [(land, *totals) for land, *totals in partitions] == [tuple(row) for row in expected]
        report = rewrite_manifests(tables.client, "db.t", min_count=2)
        assert report["manifests-after"] < report["manifests-before"]
        assert _read_live_entries(tables) == live_entries
        assert tables.run_sql(query) == rows
        tables.run_sql("INSERT INTO {db}.t SELECT 99999, 'l1', now(), 1, 1")
        tables.run_sql("DELETE FROM {db}.t WHERE id % 3 = 2 AND id < 100")
        # One row was inserted, and 33 of the ids below 100 have the remainder 2.
        assert len(tables.run_sql(query)) == len(rows) + 1 - 33


def _read_live_entries(tables: SparkTables) -> list[tuple[object, ...]]:
    """Return the live manifest entries that Iceberg's Java library reads."""
    statement_rows = tables.run_sql(
        "SELECT snapshot_id, sequence_number, file_sequence_number, data_file.content, data_file.file_path, "
        "data_file.record_count, data_file.first_row_id, data_file.referenced_data_file FROM {db}.t.entries "
        "WHERE status < 2 ORDER BY data_file.file_path, data_file.content_offset"
    )
    return [tuple(row) for row in statement_rows]


def _iterate_java(iterable: Any) -> Iterator[Any]:
    """Yield the elements of a Java Iterable."""
    iterator = iterable.iterator()
    while iterator.hasNext():
        yield iterator.next()


def _read_statistics(
    spark: SparkSession, tables: SparkTables
) -> tuple[dict[int, int], dict[int, float], list[tuple[object, ...]]]:
    """Return the statistics of the current snapshot, as Iceberg's Java library reads them.

    Returns:
        The stated numbers of distinct values, the estimates of the sketches, and the partition statistics.
    """
    jvm = spark._jvm
    assert jvm is not None
    table = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, f"{tables.db}.t")
    current_id = table.currentSnapshot().snapshotId()
    (current_file,) = [
        statistics_file for statistics_file in table.statisticsFiles() if statistics_file.snapshotId() == current_id
    ]
    stated_counts = {blob.fields()[0]: int(blob.properties()["ndv"]) for blob in current_file.blobMetadata()}
    reader = jvm.org.apache.iceberg.puffin.Puffin.read(table.io().newInputFile(current_file.path())).build()
    sketches = {}
    try:
        for pair in _iterate_java(reader.readAll(reader.fileMetadata().blobs())):
            data = jvm.org.apache.iceberg.util.ByteBuffers.toByteArray(pair.second())
            memory = jvm.org.apache.datasketches.memory.Memory.wrap(data)
            sketch = jvm.org.apache.datasketches.theta.CompactSketch.heapify(memory)
            sketches[pair.first().inputFields()[0]] = sketch.getEstimate()
    finally:
        reader.close()
    char_sequence = jvm.java.lang.Class.forName("java.lang.CharSequence")
    partitions: list[tuple[object, ...]] = [
        (
            str(row.partition().get(0, char_sequence)),
            row.dataRecordCount(),
            row.dataFileCount(),
            row.positionDeleteRecordCount(),
            row.lastUpdatedSnapshotId(),
        )
        for row in _iterate_java(table.newPartitionStatisticsScan().useSnapshot(current_id).scan())
    ]
    return stated_counts, sketches, partitions


def test_sql_runs_maintenance_statements_as_jobs_and_other_statements_in_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    with SparkTables.open(spark, tmp_path) as tables:
        tables.run_sql(
            "CREATE TABLE {db}.t (id bigint, day date, payload string, ext string) USING iceberg PARTITIONED BY (day)"
        )
        for first_id in range(0, 40, 10):
            tables.run_sql(
                "INSERT INTO {db}.t SELECT /*+ COALESCE(1) */ id, date_add(DATE'2026-01-01', CAST(id % 2 AS int)), "
                f"concat('p', id), concat('e', id) FROM range({first_id}, {first_id + 10})"
            )
        statement = f"ALTER TABLE {tables.db}.t PARTITION (day < DATE '2026-01-02') DROP COLUMNS (payload, EXT)"
        report = sql(spark, statement).collect()[0]
        assert (report.files_before, report.files_after) == (4, 1)
        rows = tables.run_sql("SELECT id, payload, ext FROM {db}.t ORDER BY id")
        assert rows == [(n, f"p{n}" if n % 2 else None, f"e{n}" if n % 2 else None) for n in range(40)]
        catalog = spark.catalog.currentCatalog()
        try:
            spark.sql(f"USE {tables.db}")
            report = sql(spark, "alter table t merge files target size '1GB'").collect()[0]
        finally:
            spark.catalog.setCurrentCatalog(catalog)
        assert (report.files_before, report.files_after) == (4, 1)
        assert tables.run_sql("SELECT id, payload, ext FROM {db}.t ORDER BY id") == rows
        assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None
        sql(spark, f"ALTER TABLE {tables.db}.t DROP COLUMNS (ext)")
        assert tables.run_sql("DESCRIBE {db}.t")[2][0] == "payload"
        assert len([row for row in tables.run_sql("DESCRIBE {db}.t") if row[0] == "ext"]) == 0
