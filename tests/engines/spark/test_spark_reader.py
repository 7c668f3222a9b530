"""Tests of `format("seamark")` against Iceberg's reader in the same Spark: every read returns the same rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.types import DecimalType, DoubleType, IntegerType, LongType, StringType
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import At
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.changes import changes, list_snapshots_between
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader, scan
from seamark.connector.read.tables import open_table, plan
from seamark.connector.spark import reader_choice as choosing
from seamark.connector.spark.session import connect, read
from seamark.connector.spark.source.filters import build_expression
from seamark.connector.spark.source.reader import PUSHDOWN
from seamark.formats.iceberg.expressions.expression import TRUE
from tests.engines.spark.star import collect_rows
from tests.services.seamark import Seamark

MERGE_ON_READ_PROPERTIES = ", ".join(
    f"'write.{operation}.mode'='merge-on-read'" for operation in ("delete", "update", "merge")
)
COPY_ON_WRITE = ", ".join(f"'write.{operation}.mode'='copy-on-write'" for operation in ("delete", "update", "merge"))


@dataclass(frozen=True)
class ReaderSession:
    """A Spark session whose catalog `reads` is a Seamark server."""

    spark: SparkSession
    server: Seamark

    def run_sql(self, text: str) -> DataFrame:
        return self.spark.sql(text.replace("{db}", "reads.db"))

    def load_with_seamark(self, table: str, schema: str | None = None, **options: Any) -> DataFrame:
        reader_options = {name.replace("_", "-"): str(value) for name, value in options.items()}
        reader = self.spark.read.format("seamark").options(
            uri=self.server.base_url, table=f"db.{table}", **reader_options
        )
        return (reader if schema is None else reader.schema(schema)).load()

    def list_snapshots(self, table: str) -> list[int]:
        snapshot_rows = self.run_sql(f"SELECT snapshot_id FROM {{db}}.{table}.snapshots ORDER BY committed_at")
        return [row[0] for row in snapshot_rows.collect()]


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReaderSession]:
    with Seamark(tmp_path_factory.mktemp("reads")) as server:
        connect(spark, "reads", server.base_url)
        session = ReaderSession(spark, server)
        session.run_sql("CREATE NAMESPACE reads.db")
        yield session


def create_typed_table(rig: ReaderSession, table: str, version: int) -> None:
    """Create a table with all types, two schemas, two specs, nulls, NaN, both zeros, and changed rows."""
    rig.run_sql(
        f"CREATE TABLE {{db}}.{table} (id bigint NOT NULL, n int, f float, d double, p decimal(9,2), s string, "
        "b binary, day date, ts timestamp, nt timestamp_ntz, ok boolean, st struct<a: int, u: string>, "
        "li array<struct<x: int>>, m map<string, int>) USING iceberg PARTITIONED BY (bucket(3, id)) "
        f"TBLPROPERTIES ('format-version'='{version}', {MERGE_ON_READ_PROPERTIES})"
    )
    hours = "make_interval(0, 0, 0, 0, id % 50)"
    first_select = (
        "id, IF(id % 7 = 0, NULL, CAST(id % 20 AS int)), CASE WHEN id % 11 = 0 THEN float('NaN') WHEN id % 5 = 0 THEN "
        "-0.0F ELSE CAST(id % 4 AS float) END, CASE WHEN id % 13 = 0 THEN double('NaN') WHEN id % 6 = 0 THEN NULL "
        "WHEN id % 5 = 0 THEN -0.0D WHEN id % 17 = 0 THEN double('Infinity') ELSE CAST(id % 4 AS double) END, "
        "CAST(id % 50 AS decimal(9,2)) / 4, IF(id % 9 = 0, NULL, concat('s', id % 30)), "
        "CAST(concat('b', id % 5) AS binary), date_add(DATE'2026-01-01', CAST(id % 40 AS int)), "
        f"TIMESTAMP'2026-01-01 00:00:00' + {hours}, TIMESTAMP_NTZ'2026-01-01 00:00:00' + {hours}, id % 3 = 0, "
        "IF(id % 8 = 0, NULL, named_struct('a', IF(id % 4 = 0, NULL, CAST(id % 6 AS int)), 'u', concat('u', id))), "
        "IF(id % 6 = 0, NULL, array(named_struct('x', CAST(id AS int)), NULL)), "
        "IF(id % 10 = 0, NULL, map('k', CAST(id AS int)))"
    )
    rig.run_sql(f"INSERT INTO {{db}}.{table} SELECT {first_select} FROM range(200)")
    rig.run_sql(f"DELETE FROM {{db}}.{table} WHERE id % 10 = 3")
    with RestCatalog("sea", uri=rig.server.base_url) as catalog:
        changed_table = catalog.load_table(f"db.{table}")
        with changed_table.update_schema() as update:
            update.rename_column("s", "text")
            update.update_column("n", LongType())
            update.update_column("f", DoubleType())
            update.update_column("p", DecimalType(18, 2))
            update.add_column(("st", "z"), DoubleType())
            update.rename_column("st.a", "aa")
            update.add_column(("li", "y"), StringType())
            update.add_column("late", IntegerType())
            update.delete_column("day")
        with changed_table.update_spec() as spec:
            spec.add_identity("text")
    second_select = first_select.replace("'u', concat('u', id)", "'u', concat('u', id), 'z', double(id)").replace(
        "('a',", "('aa',"
    )
    second_select = second_select.replace(
        "named_struct('x', CAST(id AS int))", "named_struct('x', CAST(id AS int), 'y', 'why')"
    )
    second_select = (
        second_select.replace("date_add(DATE'2026-01-01', CAST(id % 40 AS int)), ", "") + ", CAST(id AS int)"
    )
    rig.run_sql(f"INSERT INTO {{db}}.{table} SELECT {second_select} FROM range(200, 300)")
    rig.run_sql(f"ALTER TABLE {{db}}.{table} CREATE BRANCH dev")
    rig.run_sql(f"INSERT INTO {{db}}.{table}.branch_dev SELECT {second_select} FROM range(1000, 1010)")
    rig.run_sql(f"UPDATE {{db}}.{table} SET late = -1 WHERE id % 25 = 4")


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def table(request: pytest.FixtureRequest, rig: ReaderSession) -> str:
    name = f"v{request.param}"
    create_typed_table(rig, name, request.param)
    return name


NAN, INF = float("nan"), float("inf")
SAMPLE_TIME = datetime(2026, 1, 1, 5)
FILTERS: list[tuple[str, Filter]] = [
    ("id = 17", EqualTo(("id",), 17)),
    ("id IN (1, 2, 150, 5000)", In(("id",), (1, 2, 150, 5000))),
    ("id NOT IN (1, 2, 3)", Not(In(("id",), (1, 2, 3)))),
    ("n IS NULL", IsNull(("n",))),
    ("n IS NOT NULL", IsNotNull(("n",))),
    ("n <> 5", Not(EqualTo(("n",), 5))),
    ("NOT (n > 5)", Not(GreaterThan(("n",), 5))),
    ("n <=> NULL", EqualNullSafe(("n",), None)),
    ("n <=> 5", EqualNullSafe(("n",), 5)),
    ("NOT (n <=> 5)", Not(EqualNullSafe(("n",), 5))),
    ("f = 0.0D", EqualTo(("f",), 0.0)),
    ("f > 2", GreaterThan(("f",), 2.0)),
    ("f <= 2", LessThanOrEqual(("f",), 2.0)),
    ("NOT (f > 2)", Not(GreaterThan(("f",), 2.0))),
    ("NOT (f <= 2)", Not(LessThanOrEqual(("f",), 2.0))),
    ("f = double('NaN')", EqualTo(("f",), NAN)),
    ("f <> double('NaN')", Not(EqualTo(("f",), NAN))),
    ("f < double('NaN')", LessThan(("f",), NAN)),
    ("f >= double('NaN')", GreaterThanOrEqual(("f",), NAN)),
    ("f > double('NaN')", GreaterThan(("f",), NAN)),
    ("d <= double('NaN')", LessThanOrEqual(("d",), NAN)),
    ("NOT (d < double('NaN'))", Not(LessThan(("d",), NAN))),
    ("f IN (1.0D, double('NaN'))", In(("f",), (1.0, NAN))),
    ("f NOT IN (0.0D, double('NaN'))", Not(In(("f",), (0.0, NAN)))),
    ("d IN (0.0D, 2.0D)", In(("d",), (0.0, 2.0))),
    ("d >= double('Infinity')", GreaterThanOrEqual(("d",), INF)),
    ("d > double('Infinity')", GreaterThan(("d",), INF)),
    ("d < double('Infinity')", LessThan(("d",), INF)),
    ("d = double('Infinity')", EqualTo(("d",), INF)),
    ("d <> double('Infinity')", Not(EqualTo(("d",), INF))),
    ("d > double('-Infinity')", GreaterThan(("d",), -INF)),
    ("d <> 0.0D", Not(EqualTo(("d",), 0.0))),
    ("d < 0.0D", LessThan(("d",), 0.0)),
    ("p = 3.25", EqualTo(("p",), Decimal("3.25"))),
    ("p < 3.3", LessThan(("p",), Decimal("3.3"))),
    ("text = 's7'", EqualTo(("text",), "s7")),
    ("text > 's5'", GreaterThan(("text",), "s5")),
    ("text LIKE 's1%'", StringStartsWith(("text",), "s1")),
    ("text NOT LIKE 's1%'", Not(StringStartsWith(("text",), "s1"))),
    ("text IN ('s1', NULL)", In(("text",), ("s1", None))),
    ("text NOT IN ('s1', NULL)", Not(In(("text",), ("s1", None)))),
    ("b = CAST('b3' AS binary)", EqualTo(("b",), b"b3")),
    ("b > CAST('b3' AS binary)", GreaterThan(("b",), b"b3")),
    ("ts >= TIMESTAMP'2026-01-01 05:00:00'", GreaterThanOrEqual(("ts",), SAMPLE_TIME.replace(tzinfo=UTC))),
    ("nt < TIMESTAMP_NTZ'2026-01-01 05:00:00'", LessThan(("nt",), SAMPLE_TIME)),
    ("ok", EqualTo(("ok",), True)),
    ("NOT ok", Not(EqualTo(("ok",), True))),
    ("st IS NULL", IsNull(("st",))),
    ("st.aa = 2", EqualTo(("st", "aa"), 2)),
    ("st.aa IS NULL", IsNull(("st", "aa"))),
    ("NOT (st.aa >= 2)", Not(GreaterThanOrEqual(("st", "aa"), 2))),
    ("st.z > 250", GreaterThan(("st", "z"), 250.0)),
    ("late IS NULL", IsNull(("late",))),
]


def test_pushed_filters_match_the_rows_that_spark_selects(rig: ReaderSession, table: str) -> None:
    filter_columns = ", ".join(f"({sql}) AS w{number}" for number, (sql, _) in enumerate(FILTERS))
    spark_rows = rig.run_sql(f"SELECT id, {filter_columns} FROM {{db}}.{table}").collect()
    with closing(SeamarkClient(rig.server.base_url)) as client:
        opened_table = open_table(client, f"db.{table}", At())
        for number, (sql, spark_filter) in enumerate(FILTERS):
            where = build_expression(spark_filter, opened_table.schema)
            assert where is not None, sql
            reader = TaskReader(plan_read(opened_table, ["id"], where), opened_table.storage)
            values = [
                value
                for batch in reader.read_all(plan(client, opened_table, where))
                for value in batch["id"].to_pylist()
            ]
            assert sorted(values) == sorted(row["id"] for row in spark_rows if row[f"w{number}"] is True), sql


@pytest.mark.slow
def test_inexact_filters_are_left_to_spark(rig: ReaderSession, table: str) -> None:
    with closing(SeamarkClient(rig.server.base_url)) as client:
        schema = open_table(client, f"db.{table}", At()).schema
    for spark_filter in (
        StringContains(("text",), "s"), EqualTo(("n",), "5"), EqualTo(("text",), 5), EqualTo(("n",), True),
        EqualTo(("nt",), SAMPLE_TIME.replace(tzinfo=UTC)), EqualTo(("nothing",), 5), EqualTo(("li", "x"), 5),
        Not(StringEndsWith(("text",), "s")), EqualTo(("st",), 1), LessThan(("m",), 1), EqualTo(("ts",), SAMPLE_TIME),
    ):  # fmt: skip
        assert build_expression(spark_filter, schema) is None, spark_filter


@pytest.mark.slow
def test_reader_returns_the_rows_of_icebergs_reader(rig: ReaderSession, table: str) -> None:
    iceberg_frame, seamark_frame = rig.run_sql(f"SELECT * FROM {{db}}.{table}"), rig.load_with_seamark(table)
    assert seamark_frame.schema.simpleString() == iceberg_frame.schema.simpleString()
    assert collect_rows(seamark_frame) == collect_rows(iceberg_frame)
    where = "id < 5 OR (text = 's7' AND NOT f > 2) OR (late IS NULL AND st.aa = 2)"
    expected = collect_rows(iceberg_frame.where(where).select("id", "text", "_file", "_pos"))
    assert collect_rows(rig.load_with_seamark(table, where=where, columns="id, text, _file,_pos")) == expected
    # Several queries use one `load()`. A filter of one query must not affect the next query.
    for other_condition in ("id = 17", "true"):
        assert collect_rows(seamark_frame.where(other_condition).select("id")) == collect_rows(
            iceberg_frame.where(other_condition).select("id")
        ), other_condition
    assert rig.load_with_seamark(table, where=where, limit=3).count() == 3
    assert collect_rows(rig.load_with_seamark(table, "text string, id bigint").limit(1000)) == collect_rows(
        iceberg_frame.select("text", "id")
    )


@pytest.mark.slow
def test_snapshots_branches_and_tags_are_read_with_icebergs_schemas(rig: ReaderSession, table: str) -> None:
    first_id, _, third_id, *_ = rig.list_snapshots(table)
    rig.run_sql(f"ALTER TABLE {{db}}.{table} CREATE TAG then AS OF VERSION {first_id}")
    for options, version in (
        ({"snapshot_id": first_id}, first_id),
        ({"snapshot_id": third_id}, third_id),
        ({"branch": "dev"}, "'dev'"),
        ({"tag": "then"}, "'then'"),
    ):
        expected = rig.run_sql(f"SELECT * FROM {{db}}.{table} VERSION AS OF {version}")
        actual = rig.load_with_seamark(table, **options)
        assert actual.columns == expected.columns
        assert collect_rows(actual) == collect_rows(expected)
    commit_time = rig.run_sql(
        f"SELECT committed_at FROM {{db}}.{table}.snapshots WHERE snapshot_id = {third_id}"
    ).collect()[0][0]
    assert collect_rows(rig.load_with_seamark(table, as_of=commit_time.isoformat(), columns="id")) == collect_rows(
        rig.load_with_seamark(table, snapshot_id=third_id).select("id")
    )


@pytest.mark.slow
def test_filters_are_pushed_only_if_the_option_is_set(rig: ReaderSession, table: str) -> None:
    iceberg_frame = rig.run_sql(f"SELECT id, text, n FROM {{db}}.{table}")
    rig.spark.conf.set(PUSHDOWN, "true")
    for where, is_repeated_by_spark in (("text LIKE 's1%' AND n > 3", False), ("n < 9 AND text LIKE '%1'", True)):
        actual = rig.load_with_seamark(table, columns="id,text,n", push_filters="true").where(where)
        assert collect_rows(actual) == collect_rows(iceberg_frame.where(where))
        assert ("Filter " in format_plan(actual)) == is_repeated_by_spark
    rig.spark.conf.set(PUSHDOWN, "false")
    with pytest.raises(PySparkException, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
        rig.load_with_seamark(table, push_filters="true").where("n = 3").collect()


def format_plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


@pytest.mark.slow
def test_invalid_read_options_are_refused(rig: ReaderSession) -> None:
    rig.run_sql("CREATE TABLE {db}.one (id bigint, text string) USING iceberg")
    for expected, options in (
        ("no column 'nothing'", {"columns": "id,nothing"}),
        ("Unknown options snapshot", {"snapshot": 5}),
        ("branch or tag 'away'", {"branch": "away"}),
        ("both set", {"branch": "dev", "snapshot_id": 1}),
        ("limit is 'some'", {"limit": "some"}),
    ):
        with pytest.raises(PySparkException, match=expected):
            rig.load_with_seamark("one", **options)
    with pytest.raises(PySparkException, match="this predicate: UPPER"):
        rig.load_with_seamark("one", where="upper(text) = 'S1'").collect()
    with pytest.raises(PySparkException, match="text is string in the table"):
        rig.load_with_seamark("one", "text int").collect()
    assert rig.load_with_seamark("one").collect() == []


# Changes between snapshots


@pytest.mark.slow  # Another test, which is fast, reads appended rows with a stream of Spark.
@pytest.mark.parametrize(
    ("version", "mode"), [(2, MERGE_ON_READ_PROPERTIES), (3, MERGE_ON_READ_PROPERTIES), (2, COPY_ON_WRITE)]
)
def test_first_snapshot_with_the_changes_equals_the_last_snapshot(rig: ReaderSession, version: int, mode: str) -> None:
    table = f"c{version}{'m' if mode is MERGE_ON_READ_PROPERTIES else 'c'}"
    rig.run_sql(
        f"CREATE TABLE {{db}}.{table} (id bigint, v int) USING iceberg "
        f"TBLPROPERTIES ('format-version'='{version}', {mode})"
    )
    for statement in (
        "INSERT INTO {t} SELECT /*+ REPARTITION(1) */ id, 0 FROM range(40)",
        "DELETE FROM {t} WHERE id % 5 = 1",
        "UPDATE {t} SET v = 2 WHERE id IN (2, 14)",
        f"CALL reads.system.rewrite_data_files(table => 'db.{table}', options => map('rewrite-all', 'true'))",
        "DELETE FROM {t} WHERE id % 5 = 2",
    ):
        rig.run_sql(statement.replace("{t}", f"{{db}}.{table}"))
    with closing(SeamarkClient(rig.server.base_url)) as client:
        opened_table = open_table(client, f"db.{table}", At(), history=True)
        snapshots = [
            snapshot.snapshot_id
            for snapshot in list_snapshots_between(opened_table, None, opened_table.snapshot_id or 0)
        ]

        def read_at(snapshot: int) -> Counter[Any]:
            actual_rows = scan(client, f"db.{table}", at=At(snapshot_id=snapshot)).to_arrow()
            return Counter((row["id"], row["v"]) for row in actual_rows.to_pylist())

        states = [Counter[Any](), *map(read_at, snapshots)]
        reader = TaskReader(plan_read(opened_table, None, TRUE), opened_table.storage)
        for start_number, end_number in [(0, 5), (1, 2), (2, 3), (3, 4), (4, 5), (1, 5), (1, 3)]:
            counts: dict[str, Counter[Any]] = {"insert": Counter(), "delete": Counter()}
            start_id = snapshots[start_number - 1] if start_number else None
            for kind, task in changes(client, opened_table, start_id, snapshots[end_number - 1]):
                for batch in reader.read(task):
                    counts[kind] += Counter(zip(*batch.to_pydict().values(), strict=True))
            assert not counts["delete"] - (states[start_number] + counts["insert"])
            assert states[start_number] + counts["insert"] - counts["delete"] == states[end_number], (
                start_number,
                end_number,
            )
            if (start_number, end_number) == (3, 4):
                assert not counts["insert"]  # The files were rewritten, but no row changed.
    frame = rig.load_with_seamark(table, changes="true", start_snapshot_id=snapshots[0], end_snapshot_id=snapshots[1])
    assert frame.columns == ["id", "v", "_change_type"]
    counts = Counter(row[2] for row in frame.collect())
    assert counts["delete"] - counts["insert"] == 8  # 8 of the 40 ids have the remainder 1.


@pytest.mark.slow
def test_appends_between_snapshots_equal_icebergs_incremental_read(rig: ReaderSession) -> None:
    rig.run_sql("CREATE TABLE {db}.a (id bigint, n int) USING iceberg")
    for start in (0, 10, 20):
        rig.run_sql(f"INSERT INTO {{db}}.a SELECT id, id % 3 FROM range({start}, {start + 10})")
    first_id, _, last_id = rig.list_snapshots("a")
    range_options = {"start-snapshot-id": str(first_id), "end-snapshot-id": str(last_id)}
    iceberg_frame = rig.spark.read.options(**range_options).table("reads.db.a")
    actual = rig.load_with_seamark("a", start_snapshot_id=first_id, end_snapshot_id=last_id, where="n = 1")
    assert collect_rows(actual) == collect_rows(iceberg_frame.where("n = 1"))
    with pytest.raises(PySparkException, match="is not an ancestor"):
        rig.load_with_seamark("a", start_snapshot_id=5).collect()


def run_stream(rig: ReaderSession, folder: Path, **options: str) -> list[str]:
    """Run a stream on `db.s` until it has read all rows, and return the rows of all its runs."""
    reader = rig.spark.readStream.format("seamark").options(uri=rig.server.base_url, table="db.s", **options)
    query = (
        reader.load().writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(once=True).start(str(folder / "out"))
    )  # fmt: skip
    query.awaitTermination()
    return collect_rows(rig.spark.read.parquet(str(folder / "out")).select("id", "v"))


def create_stream_table(rig: ReaderSession) -> None:
    rig.run_sql("DROP TABLE IF EXISTS {db}.s")
    rig.run_sql("CREATE TABLE {db}.s (id bigint, v string) USING iceberg PARTITIONED BY (bucket(2, id))")
    rig.run_sql("INSERT INTO {db}.s SELECT id, 'a' FROM range(10)")


def test_stream_reads_each_appended_row_once_after_a_restart(rig: ReaderSession, tmp_path: Path) -> None:
    create_stream_table(rig)
    assert len(run_stream(rig, tmp_path)) == 10
    rig.run_sql("INSERT INTO {db}.s SELECT id, 'b' FROM range(10, 15)")
    assert run_stream(rig, tmp_path) == collect_rows(rig.run_sql("SELECT * FROM {db}.s"))


@pytest.mark.slow
def test_stream_reads_each_appended_row_once_over_several_restarts(rig: ReaderSession, tmp_path: Path) -> None:
    create_stream_table(rig)
    assert run_stream(rig, tmp_path) == collect_rows(rig.run_sql("SELECT * FROM {db}.s"))
    rig.run_sql("INSERT INTO {db}.s SELECT id, 'b' FROM range(10, 15)")
    rig.run_sql("ALTER TABLE {db}.s ADD PARTITION FIELD v")
    rig.run_sql("INSERT INTO {db}.s SELECT id, 'c' FROM range(15, 18)")
    assert run_stream(rig, tmp_path) == collect_rows(rig.run_sql("SELECT * FROM {db}.s"))
    assert run_stream(rig, tmp_path) == collect_rows(rig.run_sql("SELECT * FROM {db}.s"))
    rig.run_sql("CALL reads.system.rewrite_data_files(table => 'db.s', options => map('rewrite-all', 'true'))")
    rig.run_sql("INSERT INTO {db}.s SELECT id, 'd' FROM range(18, 20)")
    expected = collect_rows(rig.run_sql("SELECT * FROM {db}.s"))
    assert run_stream(rig, tmp_path) == expected
    rig.run_sql("DELETE FROM {db}.s WHERE id = 19")
    with pytest.raises(PySparkException, match="a stream has only appended rows"):
        run_stream(rig, tmp_path)
    rig.run_sql("INSERT INTO {db}.s VALUES (20, 'e')")
    assert run_stream(rig, tmp_path, **{"skip-changes": "true"}) == expected  # The run repeats the failed batch.
    assert run_stream(rig, tmp_path, **{"skip-changes": "true"}) == sorted([*expected, repr((20, "e"))])


# Bitmaps, and the choice of a reader


@pytest.mark.slow
def test_seamarks_reader_is_chosen_if_bitmaps_leave_few_pages(
    rig: ReaderSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "BREAK_EVEN_ROWS", 1000)
    monkeypatch.setattr(choosing, "PAGE_ROWS", 100)
    table_properties = (
        "'write.parquet.row-group-size-bytes'='20000', 'write.parquet.row-group-check-min-record-count'='100'"
    )
    rig.run_sql(
        f"CREATE TABLE {{db}}.big (id bigint, k int, v string) USING iceberg TBLPROPERTIES ({table_properties})"
    )
    rig.run_sql("INSERT INTO {db}.big SELECT /*+ REPARTITION(2) */ id, hash(id) % 10000, uuid() FROM range(40000)")
    with closing(IndexClient(rig.server.base_url)) as client:
        client.put_index("db.big", "by_k", kind="bitmap", columns=["k"])
        build(client, "db.big", "by_k", InProcessWorkers())
    where = "k = 77"
    expected = collect_rows(rig.run_sql(f"SELECT * FROM {{db}}.big WHERE {where}"))
    selected_rows = read(rig.spark, "reads.db.big", where)
    assert collect_rows(selected_rows) == expected
    assert expected
    assert "seamark" in format_plan(selected_rows)
    columns = ["v", "id"]
    selected_columns = read(rig.spark, "reads.db.big", where, columns=columns)
    assert "seamark" in format_plan(selected_columns)
    assert collect_rows(selected_columns) == collect_rows(rig.run_sql(f"SELECT v, id FROM {{db}}.big WHERE {where}"))
    all_rows = read(rig.spark, "reads.db.big", "k > 77", columns=columns)
    assert collect_rows(all_rows) == collect_rows(rig.run_sql("SELECT v, id FROM {db}.big WHERE k > 77"))
    for condition in (None, "k > 77", "id = 5", "upper(v) = 'A'"):
        frame = read(rig.spark, "reads.db.big", condition)
        assert "seamark" not in format_plan(frame)
        assert frame.count() == rig.run_sql(f"SELECT * FROM {{db}}.big WHERE {condition or 'true'}").count()
    first_id = rig.list_snapshots("big")[0]
    assert collect_rows(read(rig.spark, "reads.db.big", where, at=At(snapshot_id=first_id))) == expected
    # Both readers support a time, and names in any case.
    committed_ms = rig.run_sql(
        f"SELECT unix_millis(committed_at) FROM {{db}}.big.snapshots WHERE snapshot_id = {first_id}"
    ).first()[0]
    count = rig.run_sql("SELECT * FROM {db}.big").count()
    rig.run_sql("INSERT INTO {db}.big VALUES (40001, 77, 'later')")
    assert collect_rows(read(rig.spark, "reads.db.big", where, at=At(as_of_ms=committed_ms))) == expected
    assert read(rig.spark, "reads.db.big", at=At(as_of_ms=committed_ms)).count() == count
    with pytest.raises(InvalidRequest, match="no snapshot at or before"):
        read(rig.spark, "reads.db.big", at=At(as_of_ms=1))
    for predicate in (where, "k > 77"):
        assert read(rig.spark, "reads.db.big", predicate, columns=["V", "iD"]).columns == ["V", "iD"]
    assert collect_rows(read(rig.spark, "reads.db.big", where, columns=["V"])) == collect_rows(
        rig.run_sql(f"SELECT v FROM {{db}}.big WHERE {where}")
    )
