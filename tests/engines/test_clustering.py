"""Tests of tables that Spark's tasks cluster. Iceberg's reader in the same Spark checks the rows.

The rows stay the same after any earlier changes, and the files follow the clustering columns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import Conflict, InvalidRequest
from seamark.connector.read.tables import ScanTask, divide_task
from seamark.connector.spark.frames import clustering
from seamark.connector.spark.frames.writes import WriteReport, decode_files
from seamark.connector.write.appends import commit as commit_change
from seamark.connector.write.target import WriteTarget
from seamark.spark import JoinedTable, cluster, write
from tests.connector.lake import open_catalog
from tests.engines.spark.test_spark_writing import ALL_TYPE_COLUMNS, COLUMNS
from tests.engines.tables import SparkTables

SALES = "id bigint, day int, customer int, quantity int, note string"
CUSTOMERS = 200
JOINS = {"customer": JoinedTable("db.customers", on={"customer": "id"})}
CLUSTERING_COLUMNS = ["day", "customer.city"]


class ClusteringTables(SparkTables):
    """Tables of sales, and the table of their customers."""

    def read_rows(self, table: str, columns: str = "*") -> list[str]:
        return sorted(map(repr, self.run_sql(f"SELECT {columns} FROM {{db}}.{table}")))

    def cluster(self, table: str, columns: list[str], **arguments: Any) -> WriteReport:
        return cluster(self.spark, f"db.{table}", columns, client=self.client, **arguments)

    def create_sales(self, table: str, suffix: str = "", version: int = 2, row_count: int = 4000) -> None:
        """Create a table of sales with unordered rows in four files."""
        self.run_sql(
            f"CREATE TABLE {{db}}.{table} ({SALES}) USING iceberg {suffix} TBLPROPERTIES ('format-version'='{version}')"
        )
        columns = (
            *("id", "int(abs(hash(id, 1)) % 100) AS day", f"int(abs(hash(id, 2)) % {CUSTOMERS}) AS customer"),
            *("IF(id % 50 = 0, NULL, int(id % 7)) AS quantity", "concat('n', id) AS note"),
        )
        frame = self.spark.range(0, row_count, 1, 4).selectExpr(*columns)
        write(frame, f"db.{table}", client=self.client, distribution="none")


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusteringTables]:
    with ClusteringTables.open(spark, tmp_path_factory.mktemp("clustering")) as tables:
        tables.run_sql("CREATE TABLE {db}.customers (id bigint, city string, nation int) USING iceberg")
        # The sales of the last ten customers have no city.
        tables.run_sql(
            "INSERT INTO {db}.customers SELECT id, concat('city ', abs(hash(id, 3)) % 20), abs(hash(id, 4)) % 5 "
            f"FROM range(0, {CUSTOMERS - 10}, 1, 1)"
        )
        yield tables


# Tests that clustering does not change rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "partition_clause"),
    [
        (2, ""),
        (3, "PARTITIONED BY (day, bucket(2, id))"),
        (2, "PARTITIONED BY (day, bucket(2, id))"),
        (3, ""),
    ],
)
def test_clustering_keeps_rows_of_every_type_and_their_row_ids(
    rig: ClusteringTables, version: int, partition_clause: str
) -> None:
    table = f"everything_{version}_{len(partition_clause)}"
    rig.run_sql(
        f"CREATE TABLE {{db}}.{table} ({COLUMNS}) USING iceberg {partition_clause} "
        f"TBLPROPERTIES ('format-version'='{version}')"
    )
    for file_number in range(2):
        frame = rig.spark.range(150 * file_number, 150 * file_number + 150).selectExpr(*ALL_TYPE_COLUMNS)
        write(frame, f"db.{table}", client=rig.client, distribution="none")
    columns = "*, _row_id, _last_updated_sequence_number" if version == 3 else "*"
    rows_before = rig.read_rows(table, columns)
    partitions = rig.read_rows(f"{table}.files", "DISTINCT partition") if partition_clause else []
    all_columns = ["n", "f", "d", "p", "s", "b", "day", "ts", "nt", "ok"]
    report = rig.cluster(table, all_columns, files=5)
    assert report.rows == 300
    assert rig.read_rows(table, columns) == rows_before
    if partition_clause:
        assert rig.read_rows(f"{table}.files", "DISTINCT partition") == partitions
    else:
        assert report.files >= 5
    report = rig.cluster(table, ["id"], curve="zorder", target_file_bytes=1 << 30)
    assert rig.read_rows(table, columns) == rows_before
    assert report.files == max(1, len(partitions))


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 3])
def test_clustering_applies_deletes_and_removes_their_files(rig: ClusteringTables, version: int) -> None:
    table = f"deleted_{version}"
    rig.create_sales(table, version=version)
    rig.run_sql(f"ALTER TABLE {{db}}.{table} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')")
    rig.run_sql(f"DELETE FROM {{db}}.{table} WHERE id % 5 = 1 AND day < 60")
    removed_ids = rig.spark.range(0, 4000, 7).selectExpr("id")
    write(removed_ids, f"db.{table}", client=rig.client, mode="delete", strategy="equality")
    columns = "*, _row_id, _last_updated_sequence_number" if version == 3 else "*"
    rows_before = rig.read_rows(table, columns)
    assert len(rig.run_sql(f"SELECT * FROM {{db}}.{table}.delete_files")) > 0
    report = rig.cluster(table, CLUSTERING_COLUMNS, joins=JOINS, files=10)
    assert report.rows == len(rows_before) < 3500
    assert rig.read_rows(table, columns) == rows_before
    assert rig.run_sql(f"SELECT * FROM {{db}}.{table}.delete_files") == []


@pytest.mark.slow
def test_one_large_file_is_clustered_by_several_tasks(rig: ClusteringTables) -> None:
    table = "large"
    properties = "'format-version'='2', 'write.parquet.row-group-limit'='500'"
    rig.run_sql(f"CREATE TABLE {{db}}.{table} ({SALES}) USING iceberg TBLPROPERTIES ({properties})")
    ids = np.arange(4000)
    int_columns = {"day": ids * 7 % 100, "customer": ids * 13 % CUSTOMERS, "quantity": ids % 7}
    rows = pa.table(
        {
            "id": ids,
            **{name: values.astype(np.int32) for name, values in int_columns.items()},
            "note": [f"n{number}" for number in ids],
        }
    )
    with open_catalog(rig.client.url) as catalog:
        catalog.load_table(f"db.{table}").append(rows)
    rig.run_sql(f"ALTER TABLE {{db}}.{table} SET TBLPROPERTIES ('write.delete.mode'='merge-on-read')")
    rig.run_sql(f"DELETE FROM {{db}}.{table} WHERE id % 5 = 1")
    rows_before = rig.read_rows(table)
    with patch.object(clustering, "divide_task", wraps=divide_task) as divide_mock:
        report = rig.cluster(table, CLUSTERING_COLUMNS, joins=JOINS, files=10)
    assert sum(len(list(divide_task(*call.args))) for call in divide_mock.call_args_list) >= 4
    assert report.rows == len(rows_before) == 3200
    assert rig.read_rows(table) == rows_before


@pytest.mark.slow
def test_clustering_keeps_rows_beyond_the_stated_size_of_a_file(rig: ClusteringTables) -> None:
    rig.run_sql("CREATE TABLE {db}.shrunk (id bigint) USING iceberg")
    loaded_table = WriteTarget.from_engine_table(rig.client.load_table("db.shrunk"))
    path = Path(urlsplit(loaded_table.location).path) / "data" / "a.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    field = pa.field("id", pa.int64(), metadata={"PARQUET:field_id": "1"})
    rows = pa.table([pa.array(range(4000))], pa.schema([field]))
    pq.write_table(rows, path, row_group_size=500, use_dictionary=False)
    footer = pq.read_metadata(path)
    offsets = [footer.row_group(number).column(0).data_page_offset for number in range(footer.num_row_groups)]
    stated_size_bytes = path.stat().st_size // 2
    file = {"file-path": path.as_uri(), "file-format": "parquet", "content": "data", "spec-id": 0, "partition": []}
    file |= {"record-count": 4000, "file-size-in-bytes": stated_size_bytes}
    file |= {"split-offsets": [offset for offset in offsets if offset < stated_size_bytes]}
    body = {"operation": "append", "table-uuid": loaded_table.table_uuid, "add": [file]}
    CommitClient(rig.client).commit(("db", "shrunk"), body)

    def divide_without_first_part(task: ScanTask, size_bytes: int) -> list[ScanTask]:
        return list(divide_task(task, size_bytes))[1:]

    # If the job misses a part of a file, it must notice that rows are missing.
    with (
        patch.object(clustering, "divide_task", divide_without_first_part),
        pytest.raises(RuntimeError, match=r"the manifests state 4,000; nothing is committed"),
    ):
        rig.cluster("shrunk", ["id"], files=4)
    assert rig.list_files("shrunk") == {str(path)}
    assert rig.cluster("shrunk", ["id"], files=4).rows == 4000
    assert rig.run_sql("SELECT count(*), sum(id) FROM {db}.shrunk") == [(4000, sum(range(4000)))]


@pytest.mark.slow
def test_clustering_uses_the_current_schema_before_a_snapshot_has_it(rig: ClusteringTables) -> None:
    rig.create_sales("evolved")
    rig.run_sql("ALTER TABLE {db}.evolved RENAME COLUMN day TO weekday")
    rig.run_sql("ALTER TABLE {db}.evolved ALTER COLUMN quantity TYPE bigint")
    rig.run_sql("ALTER TABLE {db}.evolved ADD COLUMN extra string")
    rig.run_sql("ALTER TABLE {db}.evolved DROP COLUMN note")
    rows_before = rig.read_rows("evolved")
    rig.cluster("evolved", ["weekday", "extra", "quantity"], files=3)
    assert rig.read_rows("evolved") == rows_before


@pytest.mark.slow
def test_clustering_commits_a_replace_and_keeps_earlier_snapshots(rig: ClusteringTables) -> None:
    rig.create_sales("told")
    rows_before = rig.read_rows("told")
    (old_snapshot_id,) = rig.run_sql("SELECT snapshot_id FROM {db}.told.snapshots")[0]
    report = rig.cluster("told", CLUSTERING_COLUMNS, joins=JOINS, files=8, summary={"why": "a test"})
    operation, summary = rig.run_sql(
        f"SELECT operation, summary FROM {{db}}.told.snapshots WHERE snapshot_id = {report.snapshot_id}"
    )[0]
    assert operation == "replace"
    assert summary["clustered-by"] == "hilbert(day, customer.city)"
    assert summary["why"] == "a test"
    assert (summary["deleted-data-files"], summary["total-records"]) == ("4", "4000")
    assert rig.read_rows(f"told VERSION AS OF {old_snapshot_id}") == rows_before == rig.read_rows("told")


@pytest.mark.slow
def test_clustering_of_a_branch_changes_only_the_branch(rig: ClusteringTables) -> None:
    rig.create_sales("branched")
    rig.run_sql("ALTER TABLE {db}.branched CREATE BRANCH other")
    rig.run_sql("INSERT INTO {db}.branched.branch_other VALUES (-1, 3, 3, 3, 'other')")
    main_rows, branch_rows = rig.read_rows("branched"), rig.read_rows("branched VERSION AS OF 'other'")
    rig.cluster("branched", ["day"], branch="other", files=2)
    assert rig.read_rows("branched VERSION AS OF 'other'") == branch_rows
    assert rig.read_rows("branched") == main_rows
    assert len(rig.run_sql("SELECT * FROM {db}.branched.files")) == 4


# Tests of the effect of clustering


@pytest.mark.slow
def test_rows_of_a_city_and_some_days_are_in_fewer_files(rig: ClusteringTables) -> None:
    """The test counts the files that have rows of random queries, in a clustered table and in a sorted table.

    The sorted table has as many files, and its sort column is not used by the queries.
    """
    rig.create_sales("sorted")
    rig.create_sales("clustered")
    file_count, row_count = 64, 4000
    task_count = 3 * 2  # Three tasks for each of the two cores.
    for table, columns in (("sorted", ["id"]), ("clustered", CLUSTERING_COLUMNS)):
        report = rig.cluster(table, columns, joins=JOINS, files=file_count)
        # The last file of each task can be smaller, which adds up to one file for each task.
        assert file_count <= report.files <= file_count + task_count
    rng = random.Random(7)
    places_by_table = {}
    for table in ("sorted", "clustered"):
        rows = rig.run_sql(
            f"SELECT city, day, s._file FROM {{db}}.{table} s LEFT JOIN {{db}}.customers c ON s.customer = c.id"
        )
        places_by_table[table] = {(city, day, file) for city, day, file in rows}
        row_counts = [count for (count,) in rig.run_sql(f"SELECT record_count FROM {{db}}.{table}.files")]
        assert max(row_counts) == -(-row_count // file_count)  # Rounded up.
    ratios = []
    for _ in range(50):
        city, first_day = f"city {rng.randrange(20)}", rng.randrange(80)
        files = {
            table: len({file for name, day, file in places if name == city and first_day <= day < first_day + 10})
            for table, places in places_by_table.items()
        }
        ratios.append(files["sorted"] / max(1, files["clustered"]))
    # About 20 of the 4,000 rows match a query, and in the sorted table nearly each of them is in another file.
    assert sum(ratios) / len(ratios) > 3


@pytest.mark.slow
def test_clustering_builds_index_files_of_the_new_files(rig: ClusteringTables) -> None:
    rig.create_sales("indexed")
    rig.client.put_index("db.indexed", "of_customers", kind="bitmap", columns=["customer"])
    report = rig.cluster("indexed", CLUSTERING_COLUMNS, joins=JOINS, files=40)
    assert report.index_files > 0
    explanation = rig.client.explain("db.indexed", "customer = 17")
    matching_paths = rig.run_sql("SELECT DISTINCT _file FROM {db}.indexed WHERE customer = 17")
    assert explanation.files == len(matching_paths) < report.files


@pytest.mark.slow
def test_clustering_uses_attributes_that_are_two_joins_away(rig: ClusteringTables) -> None:
    rig.run_sql("CREATE TABLE {db}.nations (code int, name string) USING iceberg")
    rig.run_sql("INSERT INTO {db}.nations VALUES (0, 'c'), (1, 'a'), (2, 'b'), (3, 'e'), (4, 'd')")
    rig.create_sales("far")
    rows_before = rig.read_rows("far")
    joins = {**JOINS, "nation": JoinedTable("db.nations", on={"customer.nation": "code"})}
    rig.cluster("far", ["nation.name"], joins=joins, files=24)
    assert rig.read_rows("far") == rows_before
    actual = rig.run_sql(
        "SELECT s._file, count(DISTINCT n.name) FROM {db}.far s LEFT JOIN {db}.customers c ON s.customer = c.id "
        "LEFT JOIN {db}.nations n ON c.nation = n.code GROUP BY s._file"
    )
    # Between the five names and the rows without a name are five borders, and each is in one file.
    assert sum(name_count > 1 for _, name_count in actual) <= 5


# Tests of concurrent writers and failures


@pytest.mark.slow
def test_rows_appended_during_clustering_stay_and_a_delete_is_a_conflict(
    rig: ClusteringTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.create_sales("busy")
    concurrent_statement = ""

    def run_statement_and_commit(*arguments: Any) -> Any:
        rig.run_sql(concurrent_statement)
        return commit_change(*arguments)

    monkeypatch.setattr(clustering, "commit", run_statement_and_commit)
    concurrent_statement = "INSERT INTO {db}.busy VALUES (-1, 1, 1, 1, 'came')"
    rig.cluster("busy", ["day"], files=6)
    assert len(rig.read_rows("busy")) == 4001
    for concurrent_statement in (  # noqa: B007 - run_statement_and_commit reads it
        "DELETE FROM {db}.busy WHERE day = 5",
        "UPDATE {db}.busy SET quantity = 9 WHERE id = 77",
    ):
        files_before = rig.list_files("busy")
        with pytest.raises(Conflict):
            rig.cluster("busy", ["day"], files=6)
        new_files = rig.list_files("busy") - files_before
        live_paths = {urlsplit(path).path for (path,) in rig.run_sql("SELECT file_path FROM {db}.busy.files")}
        assert new_files <= live_paths, "files that no snapshot names must be deleted"
        assert rig.run_sql("SELECT count(*) FROM {db}.busy WHERE day = 5") == [(0,)]
    assert rig.run_sql("SELECT quantity FROM {db}.busy WHERE id = 77") == [(9,)]


@pytest.mark.slow
def test_clustering_commits_nothing_if_the_written_files_lack_rows(
    rig: ClusteringTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.create_sales("lossy")
    rows_before, files_before = rig.read_rows("lossy"), rig.list_files("lossy")
    original_decode, pending_losses = decode_files, [True]

    def decode_without_first_file(data: bytes) -> Any:
        decoded = original_decode(data)
        if pending_losses and pending_losses.pop():
            path = decoded.files[0]["file-path"]
            Path(urlsplit(path).path).unlink()
            return type(decoded)(decoded.files[1:], decoded.index_files, decoded.skipped)
        return decoded

    monkeypatch.setattr(clustering, "decode_files", decode_without_first_file)
    with pytest.raises(RuntimeError, match="nothing is committed"):
        rig.cluster("lossy", ["day"], files=12)
    assert rig.read_rows("lossy") == rows_before
    assert rig.list_files("lossy") == files_before


@pytest.mark.slow
def test_invalid_clustering_options_are_refused_before_a_file_is_read(rig: ClusteringTables) -> None:
    rig.run_sql(f"CREATE TABLE {{db}}.empty ({SALES}) USING iceberg")
    report = rig.cluster("empty", ["day"])
    assert (report.files, report.commit) == (0, None)
    for invalid_arguments, expected in (
        ({"columns": ["no"]}, "no column"),
        ({"columns": ["customer.city"]}, "no column"),
        ({"columns": ["day"], "curve": "peano"}, "hilbert, zorder"),
        ({"columns": ["day"], "files": 0}, "at least 1"),
        ({"columns": ["day"], "files": 2, "target_file_bytes": 3}, "or target_file_bytes"),
    ):
        with pytest.raises((InvalidRequest, ValueError), match=expected):
            rig.cluster("empty", **invalid_arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Give uri"):
        cluster(rig.spark, "db.empty", ["day"])
    rig.run_sql("CREATE TABLE {db}.first (id bigint) USING iceberg TBLPROPERTIES ('format-version'='1')")
    with pytest.raises(InvalidRequest, match="version 1"):
        rig.cluster("first", ["id"])
