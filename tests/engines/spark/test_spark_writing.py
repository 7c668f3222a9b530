"""Tests of DataFrames that tasks write and the server commits. Iceberg's reader in the same Spark checks the rows."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.spark.frames.writes import WriteReport
from seamark.connector.spark.session import connect
from seamark.connector.write.target import WriteTarget
from seamark.spark import write
from tests.engines.spark.star import collect_rows
from tests.services.seamark import Seamark

ALL_TYPE_COLUMNS = (
    "id",
    "IF(id % 7 = 0, NULL, CAST(id % 20 AS int)) AS n",
    "CASE WHEN id % 11 = 0 THEN float('NaN') WHEN id % 5 = 0 THEN -0.0F ELSE CAST(id % 4 AS float) END AS f",
    "CASE WHEN id % 13 = 0 THEN double('NaN') WHEN id % 6 = 0 THEN NULL ELSE CAST(id AS double) / 3 END AS d",
    "CAST(id % 50 AS decimal(9,2)) / 4 AS p",
    "IF(id % 9 = 0, NULL, concat('sé', id % 30)) AS s",
    "CAST(concat('b', id % 5) AS binary) AS b",
    "date_add(DATE'2026-01-01', CAST(id % 3 AS int)) AS day",
    "TIMESTAMP'2026-01-01 00:00:00' + make_interval(0, 0, 0, 0, CAST(id % 50 AS int)) AS ts",
    "TIMESTAMP_NTZ'2026-01-01 00:00:00' + make_interval(0, 0, 0, 0, CAST(id % 50 AS int)) AS nt",
    "id % 3 = 0 AS ok",
    "IF(id % 8 = 0, NULL, named_struct('a', IF(id % 4 = 0, NULL, CAST(id % 6 AS int)), 'u', concat('u', id))) AS st",
    "IF(id % 6 = 0, NULL, array(named_struct('x', CAST(id AS int)), NULL)) AS li",
    "IF(id % 10 = 0, NULL, map('k', CAST(id AS int))) AS m",
)
COLUMNS = (
    "id bigint NOT NULL, n int, f float, d double, p decimal(18,4), s string, b binary, day date, ts timestamp, "
    "nt timestamp_ntz, ok boolean, st struct<a: int, u: string>, li array<struct<x: int>>, m map<string, int>"
)


@dataclass(frozen=True)
class WritingTables:
    """Tables of one server, which tests write with DataFrames and read with Iceberg."""

    spark: SparkSession
    server: Seamark

    def run_sql(self, text: str) -> DataFrame:
        return self.spark.sql(text.replace("{db}", "writes.db"))

    def write(self, frame: DataFrame, table: str, **arguments: Any) -> WriteReport:
        return write(frame, f"db.{table}", uri=self.server.base_url, **arguments)

    def list_files(self, table: str) -> list[str]:
        """Return the data files on storage, whether or not a table names them."""
        target = WriteTarget.from_engine_table(SeamarkClient(self.server.base_url).load_table(f"db.{table}"))
        location = Path(urlsplit(target.location).path)
        return sorted(str(path) for path in (location / "data").rglob("*.parquet"))


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WritingTables]:
    with Seamark(tmp_path_factory.mktemp("writes")) as server:
        connect(spark, "writes", server.base_url)
        tables = WritingTables(spark, server)
        tables.run_sql("CREATE NAMESPACE writes.db")
        yield tables


@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_iceberg_reads_the_written_rows_of_every_type(rig: WritingTables, version: int) -> None:
    table = f"everything_{version}"
    rig.run_sql(
        f"CREATE TABLE {{db}}.{table} ({COLUMNS}) USING iceberg PARTITIONED BY (day, bucket(2, id)) "
        f"TBLPROPERTIES ('format-version'='{version}')"
    )
    frame = rig.spark.range(300).selectExpr(*ALL_TYPE_COLUMNS)
    report = rig.write(frame, table)
    assert (report.rows, report.files, report.snapshot_id is not None) == (300, 6, True)  # 3 days and 2 buckets.
    expected_frame = frame.withColumn("p", frame.p.cast("decimal(18,4)"))
    assert collect_rows(rig.run_sql(f"SELECT * FROM {{db}}.{table}")) == collect_rows(expected_frame)
    where = "day = DATE'2026-01-02' AND n > 3 AND s LIKE 'sé1%'"
    assert collect_rows(rig.run_sql(f"SELECT * FROM {{db}}.{table} WHERE {where}")) == collect_rows(
        expected_frame.where(where)
    )


@pytest.mark.slow
def test_rows_of_a_partition_are_in_one_file_unless_distribution_is_none(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.spread (id bigint, k bigint) USING iceberg PARTITIONED BY (bucket(4, k))")
    frame = rig.spark.range(0, 4000, 1, 4).selectExpr("id", "id % 97 AS k")
    assert rig.write(frame, "spread").files == 4
    assert rig.write(frame, "spread", distribution="none").files == 16
    assert rig.run_sql("SELECT count(*), count(DISTINCT id) FROM {db}.spread").collect()[0] == (8000, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_small_files_of_tasks_are_merged_before_the_commit(rig: WritingTables, version: int) -> None:
    """The writes have static and dynamic partitions. A partition with one file keeps the file of its task."""
    table = f"merged_{version}"
    rig.run_sql(
        f"CREATE TABLE {{db}}.{table} (id bigint, k bigint) USING iceberg PARTITIONED BY (k) "
        f"TBLPROPERTIES ('format-version'='{version}')"
    )
    written_frame = rig.spark.range(0, 4000, 1, 4).selectExpr("id", "IF(id < 1000, 3, id % 3) AS k")
    report = rig.write(written_frame, table, distribution="none", merge_files=True)
    # Three tasks wrote nine files of three partitions, and one task wrote the file of the fourth partition.
    assert (report.files, report.merged) == (4, 9)
    assert collect_rows(rig.run_sql(f"SELECT * FROM {{db}}.{table}")) == collect_rows(written_frame)
    assert len(rig.list_files(table)) == 4
    new_rows = rig.spark.range(5000, 5100, 1, 4).selectExpr("id", "id % 2 AS k")
    report = rig.write(new_rows, table, mode="overwrite_partitions", distribution="none", merge_files=True)
    assert (report.files, report.merged) == (2, 8)
    assert collect_rows(rig.run_sql(f"SELECT * FROM {{db}}.{table}")) == collect_rows(
        written_frame.where("k > 1").union(new_rows)
    )
    frame = rig.spark.range(6000, 6050, 1, 2).selectExpr("id", "2L AS k")
    report = rig.write(frame, table, mode="overwrite", where="k = 2", distribution="none", merge_files=True)
    assert (report.files, report.merged) == (1, 2)
    expected = written_frame.where("k = 3").union(new_rows).union(frame)
    assert collect_rows(rig.run_sql(f"SELECT * FROM {{db}}.{table}")) == collect_rows(expected)
    write_frame(rig, frame.selectExpr("id + 100 AS id", "k"), table, "append", distribution="none", merge_files="true")
    assert rig.run_sql(f"SELECT * FROM {{db}}.{table}.files WHERE partition.k = 2").count() == 2
    if version == 3:
        assert rig.run_sql(f"SELECT count(DISTINCT _row_id) = count(*) FROM {{db}}.{table}").collect() == [(True,)]


def test_files_of_a_sorted_table_have_disjoint_ranges_and_are_sorted(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.ordered (id bigint, v double) USING iceberg")
    rig.run_sql("ALTER TABLE {db}.ordered WRITE ORDERED BY v DESC NULLS LAST")
    frame = rig.spark.range(0, 4000, 1, 4).selectExpr("id", "IF(id % 50 = 0, NULL, double((id * 7919) % 4001)) AS v")
    # With default limits, one task would get all of these few rows.
    rig.spark.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")
    try:
        report = rig.write(frame, "ordered")
    finally:
        rig.spark.conf.unset("spark.sql.adaptive.coalescePartitions.enabled")
    actual_rows = rig.run_sql(
        "SELECT readable_metrics.v.lower_bound, readable_metrics.v.upper_bound, sort_order_id FROM {db}.ordered.files"
    ).collect()
    bounds = sorted((low, high) for low, high, _ in actual_rows if low is not None)
    assert len(actual_rows) == report.files > 1
    assert all(previous_bound[1] <= next_bound[0] for previous_bound, next_bound in pairwise(bounds)), bounds
    assert {order for _, _, order in actual_rows} == {1}
    for path in rig.list_files("ordered"):
        values = pq.read_table(path).column("v").to_pylist()
        present_values = [value for value in values if value is not None]
        assert present_values == sorted(present_values, reverse=True)
        assert values[len(present_values) :] == [None] * (len(values) - len(present_values))


def test_overwrite_replaces_the_rows_of_its_filter(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.days (id bigint, day date) USING iceberg PARTITIONED BY (day)")
    old_rows = rig.spark.range(30).selectExpr("id", "date_add(DATE'2026-01-01', CAST(id % 3 AS int)) AS day")
    rig.write(old_rows, "days")
    new_rows = rig.spark.range(100, 103).selectExpr("id", "DATE'2026-01-02' AS day")
    rig.write(new_rows, "days", mode="overwrite", where="day = '2026-01-02'")
    expected = collect_rows(old_rows.where("day <> DATE'2026-01-02'").union(new_rows))
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.days")) == expected
    with pytest.raises(Refused, match="may match the filter"):
        rig.write(new_rows, "days", mode="overwrite", where="id < 5")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.days")) == expected
    rig.write(new_rows, "days", mode="overwrite")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.days")) == collect_rows(new_rows)


def test_overwrite_of_partitions_keeps_the_other_partitions(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.parts (id bigint, k int) USING iceberg PARTITIONED BY (k)")
    old_rows = rig.spark.range(30).selectExpr("id", "CAST(id % 3 AS int) AS k")
    rig.write(old_rows, "parts")
    new_rows = rig.spark.range(100, 104).selectExpr("id", "CAST(id % 2 AS int) AS k")
    rig.write(new_rows, "parts", mode="overwrite_partitions")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.parts")) == collect_rows(
        old_rows.where("k = 2").union(new_rows)
    )


def test_index_files_are_committed_with_the_rows_and_used_by_the_next_plan(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.indexed (id bigint, k bigint) USING iceberg PARTITIONED BY (bucket(4, id))")
    client = IndexClient(rig.server.base_url)
    client.put_index("db.indexed", "by_k", kind="bloom", columns=["k"])
    frame = rig.spark.range(4000).selectExpr("id", "id * 7919 % 100003 AS k")
    report = rig.write(frame, "indexed")
    index = client.index("db.indexed", "by_k")
    assert (report.index_files > 0, index.health, index.files) == (True, "ok", report.files)
    assert client.explain("db.indexed", "k = 7919").files == 1
    assert collect_rows(rig.run_sql("SELECT id FROM {db}.indexed WHERE k = 7919")) == ["(1,)"]


def test_failed_write_job_commits_nothing_and_leaves_no_file(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.failing (id bigint NOT NULL, v int) USING iceberg")
    count_before = rig.run_sql("SELECT * FROM {db}.failing.snapshots").count()
    failing_frame = rig.spark.range(0, 1000, 1, 1).selectExpr("IF(id = 999, NULL, id) AS id", "CAST(id AS int) AS v")
    with pytest.raises(PySparkException, match="id"):
        rig.write(failing_frame, "failing")
    assert rig.run_sql("SELECT * FROM {db}.failing.snapshots").count() == count_before
    assert rig.list_files("failing") == []


def test_repeated_write_of_a_producer_is_committed_once_and_leaves_no_file(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.once (id bigint) USING iceberg")
    frame = rig.spark.range(10)
    first_report = rig.write(frame, "once", producer=("job", 1))
    files_before = rig.list_files("once")
    second_report = rig.write(frame, "once", producer=("job", 1))
    assert second_report.commit is not None
    assert (second_report.commit["duplicate"], second_report.snapshot_id) == (True, first_report.snapshot_id)
    assert rig.list_files("once") == files_before
    assert rig.run_sql("SELECT * FROM {db}.once").count() == 10


def write_frame(rig: WritingTables, frame: DataFrame, table: str, mode: str, **options: str) -> None:
    write_options = {name.replace("_", "-"): value for name, value in options.items()}
    table_options = {"uri": rig.server.base_url, "table": f"db.{table}", **write_options}
    frame.write.format("seamark").options(**table_options).mode(mode).save()


@pytest.mark.slow
def test_format_seamark_appends_and_overwrites(rig: WritingTables) -> None:
    rig.run_sql("CREATE TABLE {db}.sunk (id bigint, k int) USING iceberg PARTITIONED BY (k)")
    old_rows = rig.spark.range(30).selectExpr("id", "CAST(id % 3 AS int) AS k")
    write_frame(rig, old_rows, "sunk", "append")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.sunk")) == collect_rows(old_rows)
    new_rows = rig.spark.range(100, 104).selectExpr("id", "CAST(id % 2 AS int) AS k")
    write_frame(rig, new_rows, "sunk", "overwrite", replace_partitions="true")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.sunk")) == collect_rows(old_rows.where("k = 2").union(new_rows))
    write_frame(rig, new_rows.where("k = 1"), "sunk", "overwrite", replace_where="k = 1 OR k = 2")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.sunk")) == collect_rows(new_rows)
    write_frame(rig, old_rows, "sunk", "overwrite")
    assert collect_rows(rig.run_sql("SELECT * FROM {db}.sunk")) == collect_rows(old_rows)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("append", {"replace_where": "id = 1"}, "require mode"),
        ("overwrite", {"replace_where": "id = 1", "replace_partitions": "true"}, "both set"),
        ("append", {"colour": "blue"}, "Unknown options colour"),
        ("append", {"producer": "job"}, "Unknown options producer"),
        ("overwrite", {"replace-partitions": "1"}, "replace-partitions is '1'; it must be true or false"),
    ],
)
def test_contradictory_write_options_are_refused(
    rig: WritingTables, mode: str, options: dict[str, str], message: str
) -> None:
    rig.run_sql("CREATE TABLE IF NOT EXISTS {db}.told (id bigint) USING iceberg")
    with pytest.raises(PySparkException, match=message):
        write_frame(rig, rig.spark.range(3), "told", mode, **options)
    assert rig.run_sql("SELECT * FROM {db}.told").count() == 0


@dataclass(frozen=True)
class FolderStream:
    """A stream that reads one file of a folder in each batch, and writes it into a table of `id` and `v`."""

    rig: WritingTables
    input_folder: Path
    checkpoint: Path
    table: str

    def add_source_file(self, first_id: int, end_id: int) -> None:
        frame = self.rig.spark.range(first_id, end_id, 1, 1).selectExpr("id", "concat('v', id) AS v")
        frame.write.mode("append").parquet(str(self.input_folder))

    def run(self, transform: Callable[[DataFrame], DataFrame] = lambda frame: frame) -> None:
        """Process all files that were added since the last run."""
        reader = self.rig.spark.readStream.schema("id bigint, v string").option("maxFilesPerTrigger", 1)
        writer = transform(reader.parquet(str(self.input_folder))).writeStream.format("seamark")
        options = {"uri": self.rig.server.base_url, "table": f"db.{self.table}"}
        writer = writer.options(**options).option("checkpointLocation", str(self.checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    def read_ids(self) -> list[int]:
        return sorted(row.id for row in self.rig.run_sql(f"SELECT id FROM {{db}}.{self.table}").collect())


@pytest.mark.slow
def test_restarted_stream_commits_every_row_once(rig: WritingTables, tmp_path: Path) -> None:
    rig.run_sql("CREATE TABLE {db}.stream (id bigint, v string) USING iceberg TBLPROPERTIES ('format-version'='3')")
    checkpoint = tmp_path / "checkpoint"
    stream = FolderStream(rig, tmp_path / "given", checkpoint, "stream")
    stream.add_source_file(0, 100)
    stream.add_source_file(100, 200)
    stream.run()
    files_before, snapshot_count = rig.list_files("stream"), rig.run_sql("SELECT * FROM {db}.stream.snapshots").count()
    assert snapshot_count == 2
    last_commit = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last_commit.unlink()  # The test deletes Spark's record of the batch, as if Spark had died after Seamark's commit.
    last_commit.with_name(f".{last_commit.name}.crc").unlink()
    stream.run()
    assert (rig.list_files("stream"), rig.run_sql("SELECT * FROM {db}.stream.snapshots").count()) == (
        files_before,
        snapshot_count,
    )
    stream.add_source_file(200, 300)
    stream.run()
    assert rig.run_sql("SELECT count(*), count(DISTINCT id), sum(id) FROM {db}.stream").collect()[0] == (
        300,
        300,
        sum(range(300)),
    )
    summary = rig.run_sql("SELECT summary FROM {db}.stream.snapshots ORDER BY committed_at DESC").first()
    assert summary is not None
    assert summary[0]["seamark.producer-sequence"] == "2"


@pytest.mark.slow
def test_stream_with_an_older_checkpoint_fails_and_one_with_a_new_checkpoint_continues(
    rig: WritingTables, tmp_path: Path
) -> None:
    """A batch with the number of an earlier batch, but of a different checkpoint, is not treated as a repeat."""
    rig.run_sql("CREATE TABLE {db}.older (id bigint, v string) USING iceberg")
    stream = FolderStream(rig, tmp_path / "given", tmp_path / "checkpoint", "older")
    stream.add_source_file(0, 10)
    stream.run()
    shutil.copytree(stream.checkpoint, tmp_path / "restored")
    for first_id in (10, 20):
        stream.add_source_file(first_id, first_id + 10)
    stream.run()
    files_before = rig.list_files("older")
    with pytest.raises(PySparkException, match=r"batch 1 of this query.* up to 2: the checkpoint is older"):
        replace(stream, checkpoint=tmp_path / "restored").run()
    assert (stream.read_ids(), rig.list_files("older")) == ([*range(30)], files_before)
    other_stream = replace(stream, input_folder=tmp_path / "other", checkpoint=tmp_path / "new")
    other_stream.add_source_file(100, 105)
    other_stream.run()
    assert stream.read_ids() == [*range(30), *range(100, 105)]


@pytest.mark.slow
def test_stream_writes_nothing_into_a_table_that_replaced_its_target(rig: WritingTables, tmp_path: Path) -> None:
    rig.run_sql("CREATE TABLE {db}.replaced (id bigint, v string) USING iceberg")
    stream = FolderStream(rig, tmp_path / "given", tmp_path / "checkpoint", "replaced")
    stream.add_source_file(0, 10)
    tables_url = f"{rig.server.base_url}/v1/namespaces/db/tables"
    fields = [{"id": 1, "name": "id", "type": "long"}, {"id": 2, "name": "v", "type": "string"}]
    schema = {"type": "struct", "fields": [{**field, "required": False} for field in fields]}
    request_body = json.dumps({"name": "replaced", "schema": schema}).encode()

    def replace_table_after(batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, then replace the table by a new table."""
        yield from batches
        for request in (
            urllib.request.Request(f"{tables_url}/replaced", method="DELETE"),
            urllib.request.Request(tables_url, request_body, {"Content-Type": "application/json"}),
        ):
            urllib.request.urlopen(request).close()

    with pytest.raises(PySparkException, match="replaced by another table while rows were written"):
        stream.run(lambda frame: frame.mapInArrow(replace_table_after, frame.schema))
    loaded_table = SeamarkClient(rig.server.base_url).load_table("db.replaced", history=True)
    assert json.loads(loaded_table.metadata).get("snapshots", []) == []
    stream.run()  # This run repeats the batch for the current table.
    assert stream.read_ids() == [*range(10)]
