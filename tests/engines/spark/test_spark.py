"""Tests of unmodified Spark 4.1: common SQL statements of data engineers work, and reads return the right rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.engines.conftest import StorageLake, collect_rows
from tests.faults.rigs.http import HttpClient
from tests.services.spark import new_catalog
from tests.waits import block_until

S3_IO = {"io-impl": "org.apache.iceberg.aws.s3.S3FileIO", "client.region": "us-east-1"}


@pytest.fixture(scope="module")
def catalog(spark: SparkSession, lake: StorageLake) -> Iterator[str]:
    catalog_options = {**lake.client_properties, **(S3_IO if lake.storage.startswith("S3") else {})}
    name = new_catalog(spark, lake.server.base_url, extra=catalog_options)
    spark.sql(f"CREATE NAMESPACE {name}.db")
    return name


@pytest.fixture
def sql(spark: SparkSession, catalog: str) -> Any:
    """Return a function that runs a statement and returns its rows.

    The function replaces `{db}` in the statement by the catalog and namespace, and `{cat}` by the catalog.
    """

    def run(statement: str) -> list[tuple[Any, ...]]:
        return collect_rows(spark.sql(statement.replace("{db}", f"{catalog}.db").replace("{cat}", catalog)))

    return run


@pytest.mark.few_cases(1)
def test_spark_creates_inserts_and_creates_tables_as_select(sql: Any) -> None:
    sql("CREATE TABLE {db}.a (id bigint, data string, at timestamp) USING iceberg PARTITIONED BY (bucket(4, id))")
    sql("INSERT INTO {db}.a VALUES (1, 'x', timestamp'2026-01-01'), (2, 'y', timestamp'2026-01-02'), (3, null, null)")
    assert sql("SELECT count(*), count(data) FROM {db}.a") == [(3, 2)]
    sql("CREATE TABLE {db}.b USING iceberg PARTITIONED BY (data) AS SELECT id, data FROM {db}.a WHERE data IS NOT NULL")
    assert sql("SELECT * FROM {db}.b ORDER BY id") == [(1, "x"), (2, "y")]
    sql("CREATE OR REPLACE TABLE {db}.b USING iceberg AS SELECT 9 AS n")
    assert sql("SELECT * FROM {db}.b") == [(9,)]
    sql("INSERT OVERWRITE {db}.b SELECT 10")
    assert sql("SELECT * FROM {db}.b") == [(10,)]
    assert ("db", "a", False) in sql("SHOW TABLES IN {db}")


@pytest.mark.parametrize(
    ("mode", "version"),
    [("copy-on-write", 1), ("copy-on-write", 2), ("copy-on-write", 3), ("merge-on-read", 2), ("merge-on-read", 3)],
)
def test_spark_merges_updates_and_deletes(sql: Any, version: int, mode: str) -> None:
    """Format version 1 has no delete files."""
    table = f"{{db}}.m{version}_{mode.replace('-', '_')}"
    properties = ", ".join(f"'write.{operation}.mode'='{mode}'" for operation in ("delete", "update", "merge"))
    sql(
        f"CREATE TABLE {table} (id bigint, v string) USING iceberg "
        f"TBLPROPERTIES ('format-version'='{version}', {properties})"
    )
    sql(f"INSERT INTO {table} SELECT id, concat('v', id) FROM range(100)")
    sql(f"DELETE FROM {table} WHERE id % 10 = 3")
    sql(f"UPDATE {table} SET v = 'updated' WHERE id % 10 = 4")
    sql(
        f"MERGE INTO {table} t USING (SELECT id, 'merged' AS v FROM range(95, 105)) s ON t.id = s.id "
        "WHEN MATCHED AND s.id = 99 THEN DELETE WHEN MATCHED THEN UPDATE SET v = s.v WHEN NOT MATCHED THEN INSERT *"
    )
    expected = {number: f"v{number}" for number in range(100) if number % 10 != 3}
    expected |= {number: "updated" for number in expected if number % 10 == 4}
    expected |= dict.fromkeys(range(95, 105), "merged")
    del expected[99]
    assert dict(sql(f"SELECT id, v FROM {table}")) == expected
    delete_files = sql(f"SELECT file_format FROM {table}.delete_files")
    if mode == "merge-on-read":
        assert delete_files
        assert {kind for (kind,) in delete_files} == ({"PUFFIN"} if version == 3 else {"PARQUET"})
    else:
        assert delete_files == []


@pytest.mark.slow
def test_spark_reads_rows_of_evolved_schemas(sql: Any) -> None:
    sql("CREATE TABLE {db}.s (id int, gone string, point struct<x: int>) USING iceberg")
    sql("INSERT INTO {db}.s VALUES (1, 'g', named_struct('x', 1))")
    sql("ALTER TABLE {db}.s ADD COLUMNS (extra double, point.y int)")
    sql("ALTER TABLE {db}.s RENAME COLUMN id TO key")
    sql("ALTER TABLE {db}.s ALTER COLUMN key TYPE bigint")
    sql("ALTER TABLE {db}.s DROP COLUMN gone")
    sql("ALTER TABLE {db}.s ALTER COLUMN extra FIRST")
    sql("INSERT INTO {db}.s VALUES (2.5, 2, named_struct('x', 2, 'y', 3))")
    assert sql("SELECT key, extra, point.x, point.y FROM {db}.s ORDER BY key") == [(1, None, 1, None), (2, 2.5, 2, 3)]


@pytest.mark.slow
def test_spark_reads_rows_of_evolved_partition_specs(sql: Any) -> None:
    sql("CREATE TABLE {db}.p (id bigint, day date) USING iceberg")
    sql("INSERT INTO {db}.p VALUES (1, date'2026-01-01')")
    sql("ALTER TABLE {db}.p ADD PARTITION FIELD months(day)")
    sql("INSERT INTO {db}.p VALUES (2, date'2026-02-01')")
    sql("ALTER TABLE {db}.p REPLACE PARTITION FIELD months(day) WITH days(day)")
    sql("INSERT INTO {db}.p VALUES (3, date'2026-03-01'), (4, date'2026-03-02')")
    sql("ALTER TABLE {db}.p WRITE ORDERED BY id DESC")
    assert sql("SELECT id FROM {db}.p WHERE day >= date'2026-02-01' ORDER BY id") == [(2,), (3,), (4,)]
    assert sql("SELECT count(DISTINCT spec_id) FROM {db}.p.files") == [(3,)]


@pytest.mark.slow
def test_spark_reads_branches_tags_and_earlier_snapshots(sql: Any) -> None:
    sql("CREATE TABLE {db}.t (id int) USING iceberg")
    sql("INSERT INTO {db}.t VALUES (1)")
    first_id = sql("SELECT snapshot_id FROM {db}.t.snapshots")[0][0]
    sql("ALTER TABLE {db}.t CREATE TAG v1")
    sql("ALTER TABLE {db}.t CREATE BRANCH dev RETAIN 7 DAYS")
    sql("INSERT INTO {db}.t.branch_dev VALUES (2)")
    sql("INSERT INTO {db}.t VALUES (3)")
    assert sql("SELECT id FROM {db}.t ORDER BY id") == [(1,), (3,)]
    assert sql("SELECT id FROM {db}.t VERSION AS OF 'dev' ORDER BY id") == [(1,), (2,)]
    assert sql("SELECT id FROM {db}.t VERSION AS OF 'v1'") == [(1,)]
    assert sql(f"SELECT id FROM {{db}}.t VERSION AS OF {first_id}") == [(1,)]
    sql(f"CALL {{cat}}.system.rollback_to_snapshot('db.t', {first_id})")
    assert sql("SELECT id FROM {db}.t") == [(1,)]
    sql("CALL {cat}.system.fast_forward('db.t', 'main', 'dev')")
    assert sql("SELECT id FROM {db}.t ORDER BY id") == [(1,), (2,)]
    sql("ALTER TABLE {db}.t DROP BRANCH dev")
    sql("ALTER TABLE {db}.t DROP TAG v1")
    assert sql("SELECT name FROM {db}.t.refs") == [("main",)]


def test_spark_creates_replaces_renames_and_drops_views(sql: Any) -> None:
    sql("CREATE TABLE {db}.base (id int, v string) USING iceberg")
    sql("INSERT INTO {db}.base VALUES (1, 'a'), (2, 'b')")
    sql("CREATE VIEW {db}.view (id COMMENT 'the key') AS SELECT id FROM {db}.base WHERE v = 'b'")
    assert sql("SELECT * FROM {db}.view") == [(2,)]
    sql("CREATE OR REPLACE VIEW {db}.view AS SELECT id FROM {db}.base WHERE v = 'a'")
    assert sql("SELECT * FROM {db}.view") == [(1,)]
    sql("ALTER VIEW {db}.view SET TBLPROPERTIES ('team' = 'me')")
    sql("ALTER VIEW {db}.view RENAME TO {db}.seen")
    assert ("db", "seen", False) in sql("SHOW VIEWS IN {db}")
    with pytest.raises(Exception, match="already exists"):
        sql("CREATE TABLE {db}.seen (id int) USING iceberg")
    sql("DROP VIEW {db}.seen")
    assert sql("SHOW VIEWS IN {db}") == []


@pytest.mark.slow
def test_sparks_maintenance_procedures_rewrite_and_expire(sql: Any) -> None:
    sql("CREATE TABLE {db}.c (id bigint) USING iceberg")
    for number in range(4):
        sql(f"INSERT INTO {{db}}.c VALUES ({number})")
    assert sql("SELECT count(*) FROM {db}.c.files") == [(4,)]
    sql("CALL {cat}.system.rewrite_data_files(table => 'db.c', options => map('min-input-files', '2'))")
    assert sql("SELECT count(*) FROM {db}.c.files") == [(1,)]
    sql("CALL {cat}.system.rewrite_manifests('db.c')")
    sql("CALL {cat}.system.expire_snapshots(table => 'db.c', older_than => timestamp'2100-01-01', retain_last => 1)")
    assert sql("SELECT count(*) FROM {db}.c.snapshots") == [(1,)]
    assert sql("SELECT count(*) FROM {db}.c") == [(4,)]


@pytest.mark.slow
def test_spark_renames_and_drops_a_table_that_is_then_restored_and_purged(sql: Any, lake: StorageLake) -> None:
    client = HttpClient(lake.server.base_url)
    sql("CREATE TABLE {db}.d USING iceberg AS SELECT id FROM range(5)")
    sql("ALTER TABLE {db}.d RENAME TO db.e")
    sql("DROP TABLE {db}.e")
    _, body = client.call("GET", "/api/v1/dropped")
    dropped_entry = next(row for row in body["dropped"] if row["name"] == "e")
    status, _ = client.call("POST", f"/api/v1/dropped/{dropped_entry['id']}/undrop", {})
    assert status == 200
    assert sql("SELECT count(*) FROM {db}.e") == [(5,)]
    sql("DROP TABLE {db}.e PURGE")
    with pytest.raises(Exception, match="cannot be found"):
        sql("SELECT * FROM {db}.e")
    _, body = client.call("GET", "/api/v1/dropped")
    dropped_entry = next(row for row in body["dropped"] if row["name"] == "e")
    assert dropped_entry["purge"], (
        "with rest-catalog-purge, Spark asks the catalog to purge and deletes no files itself"
    )
    assert client.call("POST", f"/api/v1/dropped/{dropped_entry['id']}/undrop", {})[0] == 200
    assert sql("SELECT count(*) FROM {db}.e") == [(5,)]
    client.close()


@pytest.mark.slow
def test_metadata_table_without_its_namespace_is_not_found(spark: SparkSession, sql: Any) -> None:
    """Spark parses `w.files` as a namespace and a table, and then requests the table `w` in the empty namespace."""
    sql("CREATE TABLE {db}.w USING iceberg AS SELECT 1 AS id")
    old_catalog, old_database = spark.catalog.currentCatalog(), spark.catalog.currentDatabase()
    sql("USE {db}")
    try:
        assert sql("SELECT record_count FROM db.w.files") == [(1,)]
        with pytest.raises(Exception, match="TABLE_OR_VIEW_NOT_FOUND"):
            sql("SELECT count(*) FROM w.files")
    finally:
        spark.catalog.setCurrentCatalog(old_catalog)
        spark.catalog.setCurrentDatabase(old_database)


@pytest.mark.slow
def test_scan_and_commit_reports_of_spark_are_stored(sql: Any, lake: StorageLake) -> None:
    # Java's client reports the scans that it plans itself.
    properties = "TBLPROPERTIES ('seamark.scan-planning-mode'='client')"
    sql(f"CREATE TABLE {{db}}.r USING iceberg {properties} AS SELECT id FROM range(10)")
    sql("INSERT INTO {db}.r VALUES (10)")
    sql("SELECT * FROM {db}.r WHERE id > 3")
    with closing(HttpClient(lake.server.base_url)) as client:

        def list_report_kinds() -> set[str]:
            status, body = client.call("GET", "/api/v1/tables/db/r/metrics")
            assert status == 200
            return {report["report-type"] for report in body["reports"]}

        # Java sends the reports concurrently with the statement.
        block_until(lambda: list_report_kinds() == {"scan-report", "commit-report"})
