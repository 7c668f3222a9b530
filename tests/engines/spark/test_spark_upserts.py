"""Tests of DataFrames that are upserted and deleted by key, by the driver and by tasks.

At every snapshot, Iceberg's reader in the same Spark returns the rows of a plain dict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import Conflict
from seamark.connector.spark.frames import file_changes
from seamark.connector.spark.frames import upserts as upserting
from seamark.connector.write.upserts import COPY_ON_WRITE, MERGE_ON_READ, MODES, upsert
from seamark.spark import write
from tests.engines.conftest import collect_rows
from tests.engines.spark.test_spark_writing import ALL_TYPE_COLUMNS
from tests.engines.spark.upserts import BUCKETS, RECORD, TASKS, Model, Row, UpsertTables


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpsertTables]:
    with UpsertTables.open(spark, tmp_path_factory.mktemp("upserts")) as tables:
        yield tables


# Random histories


def take_step(rig: UpsertTables, rng: random.Random, table: str, number: int, model: Model) -> tuple[str, Model]:
    """Change the table at random, and return a description and the new model."""
    kind = rng.choice(("insert", "upsert", "upsert", "latest", "partial", "delete"))
    write_options = {"row_mode": rng.choice(MODES), "driver_rows": rng.choice((0, 0, 1000))}
    some_numbers = rng.sample(range(60), 20)
    missing_row: Row = (None, None, None)
    new_rows = {row_id: (rng.choice(("de", "fr", None)), number, rng.randrange(40)) for row_id in some_numbers}
    if kind == "insert":
        inserted_rows = {100 * number + row_id: row for row_id, row in new_rows.items()}
        write(rig.build_frame(inserted_rows), f"db.{table}", client=rig.client)
        return kind, model | inserted_rows
    if kind == "delete":
        removed_ids = rig.build_frame(new_rows).select("id")
        rig.delete(removed_ids, table, **write_options)
        return f"{kind} {write_options}", {row_id: row for row_id, row in model.items() if row_id not in new_rows}
    if kind == "upsert":
        rig.upsert(rig.build_frame(new_rows), table, **write_options)
        return f"{kind} {write_options}", model | new_rows
    if kind == "partial":
        rig.upsert(rig.build_frame(new_rows).select("v", "id", "land"), table, columns=["v"], **write_options)
        merged_rows = {
            row_id: ((old_row := model.get(row_id, missing_row))[0], new_rows[row_id][1], old_row[2])
            for row_id in new_rows
        }
        return f"{kind} {write_options}", model | merged_rows
    # Each key has several rows. The row with the latest ts replaces the stored row, unless the stored row is later.
    frame, new_model = rig.build_frame(new_rows), dict(model)
    late_rows = {
        row_id: ("late", number, ts + 1)
        for row_id, (_, _, ts) in new_rows.items()
        if ts is not None and row_id % 3 == 0
    }
    rig.upsert(frame.union(rig.build_frame(late_rows)).union(frame), table, precombine="ts", **write_options)
    for row_id, new_row in (new_rows | late_rows).items():
        stored_row = model.get(row_id)
        if stored_row is None or stored_row[2] is None or (new_row[2] is not None and new_row[2] >= stored_row[2]):
            new_model[row_id] = new_row
    return f"{kind} {write_options}", new_model


def run_upserts(rig: UpsertTables, table: str, seed: int, steps: int, note: str) -> None:
    """Run random steps, and at the end read every snapshot again, because later commits must not change it."""
    rng = random.Random(seed)
    model: Model = {}
    models: dict[int, tuple[str, Model]] = {}
    for number in range(1, steps + 1):
        step_description, model = take_step(rig, rng, table, number, model)
        snapshots = rig.run_sql(f"SELECT snapshot_id FROM {{db}}.{table}.snapshots ORDER BY committed_at")
        models.setdefault(snapshots[-1][0] if snapshots else 0, (step_description, model))
        assert rig.read_model(table) == model, f"{note}, seed {seed}, step {number}: {step_description}"
    for snapshot_id, (step_description, model) in models.items():
        if snapshot_id:
            assert rig.read_model(table, f"VERSION AS OF {snapshot_id}") == model, (
                f"{note}, seed {seed}, {step_description}"
            )


SHAPES = {
    "bucketed": (3, BUCKETS, ()),
    "by record index": (2, "", (RECORD,)),
    "by reading": (3, "PARTITIONED BY (land)", ()),
    "by record index in buckets": (3, BUCKETS, (RECORD,)),
    "bucketed, position deletes": (2, "PARTITIONED BY (land, bucket(3, id))", ()),
}
"""The format version, the partitioning and the properties of tables."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["bucketed", "by reading", "by record index"])
def test_every_snapshot_has_the_rows_of_its_history(
    rig: UpsertTables, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, spec, properties = SHAPES[shape]
    monkeypatch.setattr(upserting, "TASK_ROWS", 8)
    table = f"history_{list(SHAPES).index(shape)}"
    rig.create(table, spec, *properties, version=version)
    run_upserts(rig, table, version, 4, shape)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_every_snapshot_has_the_rows_of_its_long_history(
    rig: UpsertTables, shape: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, spec, properties = SHAPES[shape]
    monkeypatch.setattr(upserting, "TASK_ROWS", 8)
    monkeypatch.setattr(file_changes, "DRIVER_FILES_MAX", 2)
    table = f"long_{list(SHAPES).index(shape)}_{seed}"
    rig.create(table, spec, *properties, version=version)
    run_upserts(rig, table, 1000 + seed, 12, shape)


# Reads, writes and plans


@pytest.fixture
def result_frames(monkeypatch: pytest.MonkeyPatch) -> list[DataFrame]:
    """Return a list to which each distribution of work to tasks adds its result frame."""
    frames: list[DataFrame] = []
    run_tasks = upserting.run_tasks

    def spread_and_record(df: DataFrame, work: Any) -> DataFrame:
        frames.append(run_tasks(df, work))
        return frames[-1]

    monkeypatch.setattr(upserting, "run_tasks", spread_and_record)
    return frames


def read_executed_plan(frame: DataFrame) -> str:
    """Return the text of the executed plan."""
    plan: str = frame._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    return plan.partition("== Initial Plan ==")[0]


@pytest.mark.parametrize("row_mode", [MERGE_ON_READ, pytest.param(COPY_ON_WRITE, marks=pytest.mark.slow)])
def test_upsert_exchanges_rows_once_without_a_join_and_reads_only_their_buckets(
    rig: UpsertTables, row_mode: str, result_frames: list[DataFrame]
) -> None:
    table = f"plan_{row_mode[:4]}"
    rig.create(table, "PARTITIONED BY (bucket(16, id))")
    write(rig.build_frame(dict.fromkeys(range(400), ("de", 0, 0))), f"db.{table}", client=rig.client)
    assert rig.count_live_files(table) == 16
    expected = dict.fromkeys((3, 5, 7, 399), ("fr", 1, 1))
    report = rig.upsert(rig.build_frame(expected), table, row_mode=row_mode, **TASKS)
    (plan,) = [read_executed_plan(frame) for frame in result_frames]
    assert "MapInArrow" in plan
    assert plan.count("Exchange ") == 1, plan
    assert "Join" not in plan
    assert "BatchScan" not in plan
    assert (report.updated, report.inserted, report.attempts) == (4, 0, 1)
    assert report.files_read <= 4
    if row_mode == COPY_ON_WRITE:
        # The new rows are written into the copies.
        assert (report.files_removed, rig.count_live_files(table)) == (
            report.files_written,
            16,
        )
    assert rig.read_model(table) == dict.fromkeys(range(400), ("de", 0, 0)) | expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "row_mode"),
    [*(pytest.param(version, MERGE_ON_READ, marks=pytest.mark.slow) for version in (2, 3)), (3, COPY_ON_WRITE)],
)
def test_file_with_keys_of_several_tasks_gets_one_copy_or_one_vector(
    rig: UpsertTables, version: int, row_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upserting, "TASK_ROWS_MIN", 5)
    table = f"shared_{version}_{row_mode[:4]}"
    rig.create(table, "", RECORD, version=version)
    write(rig.build_frame(dict.fromkeys(range(50), ("de", 0, 0))).coalesce(1), f"db.{table}", client=rig.client)
    for round_number in (1, 2):
        expected = dict.fromkeys(range(0, 60, 3), ("fr", round_number, round_number))
        report = rig.upsert(rig.build_frame(expected).repartition(3), table, row_mode=row_mode, **TASKS)
        assert report.updated + report.inserted == 20
        assert rig.read_model(table) == dict.fromkeys(range(50), ("de", 0, 0)) | expected
    assert rig.delete(rig.spark.range(1000), table, keys=["id"], row_mode=row_mode, **TASKS).deleted == 53
    assert rig.read_model(table) == {}


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_tasks_write_one_delete_file_or_vector_for_each_of_many_files(
    rig: UpsertTables, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "DRIVER_FILES_MAX", 2)
    rig.create(f"many_{version}", BUCKETS, version=version)
    model: Model = dict.fromkeys(range(80), ("de", 0, 0))
    write(rig.build_frame(model), f"db.many_{version}", client=rig.client)
    upsert(rig.client, f"db.many_{version}", pa.table({"id": [100], "land": ["x"]}), keys=["id"])
    model[100] = ("x", None, None)
    for removed_ids in (range(0, 80, 2), range(1, 80, 5)):
        report = rig.delete(
            rig.build_frame(dict.fromkeys(removed_ids, (None, 0, 0))).select("id"),
            f"many_{version}",
            row_mode=MERGE_ON_READ,
            **TASKS,
        )
        assert report.deleted == len([id_ for id_ in removed_ids if id_ in model])
        model = {id_: row for id_, row in model.items() if id_ not in removed_ids}
        assert rig.read_model(f"many_{version}") == model
    if version == 3:
        vectors = rig.run_sql("SELECT referenced_data_file FROM {db}.many_3.delete_files")
        assert len(vectors) == len(set(vectors)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    ["PARTITIONED BY (bucket(2, id))", "PARTITIONED BY (day, truncate(2, s))"],
)
def test_tasks_upsert_frames_with_every_type(rig: UpsertTables, spec: str) -> None:
    table = f"everything_{len(spec)}"
    columns = (
        "id bigint, n int, f float, d double, p decimal(18,4), s string, b binary, day date, ts timestamp, "
        "nt timestamp_ntz, ok boolean, st struct<a: int, u: string>, li array<struct<x: int>>, m map<string, int>"
    )
    rig.create(table, spec, columns=columns)
    frame = rig.spark.range(120).selectExpr(*ALL_TYPE_COLUMNS)
    rig.upsert(frame.where("id < 80"), table, **TASKS)
    rig.upsert(frame.where("id > 40"), table, row_mode=MERGE_ON_READ, **TASKS)
    table_frame = rig.spark.table(f"{rig.db}.{table}")
    expected = frame.withColumn("p", frame.p.cast("decimal(18,4)"))
    assert sorted(map(repr, collect_rows(table_frame))) == sorted(map(repr, collect_rows(expected)))


@pytest.mark.slow
def test_keys_are_compared_in_the_type_of_the_table(rig: UpsertTables, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upserting, "TASK_ROWS", 2)
    rig.create("floats", columns="k double, w string, v int")
    values = "('nan', 'a'), ('0.0', 'a'), ('-0.0', 'a'), ('1.5', 'a'), ('1.5', 'b')"
    frame = rig.spark.sql(f"SELECT CAST(x AS double) AS k, w, 0 AS v FROM VALUES {values} AS g(x, w)")
    rig.upsert(frame, "floats", keys=["k", "w"], **TASKS)
    narrow_frame = rig.spark.sql(
        f"SELECT w, CAST(x AS float) AS k, 1 AS v FROM VALUES {values}, ('nan', 'a'), ('1.5', 'c') AS g(x, w)"
    )
    report = rig.upsert(narrow_frame, "floats", keys=["k", "w"], row_mode=MERGE_ON_READ, **TASKS)
    assert (report.updated, report.inserted) == (4, 1)
    actual = sorted((repr(abs(k)), w, v) for k, w, v in rig.run_sql("SELECT k, w, v FROM {db}.floats"))
    assert actual == [
        ("0.0", "a", 1),
        ("1.5", "a", 1),
        ("1.5", "b", 1),
        ("1.5", "c", 1),
        ("nan", "a", 1),
    ]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("copy_bytes_max", "write_options", "by_tasks"),
    [
        (0, {"row_mode": COPY_ON_WRITE}, True),
        pytest.param(0, {"row_mode": MERGE_ON_READ}, False, marks=pytest.mark.slow),
        pytest.param(1 << 30, {"row_mode": COPY_ON_WRITE}, False, marks=pytest.mark.slow),
        # The frame has 14 rows.
        (1 << 30, {"row_mode": COPY_ON_WRITE, "driver_rows": 13}, True),
        (1 << 30, {"row_mode": COPY_ON_WRITE, "driver_rows": 14}, False),
    ],
    ids=["many bytes", "nothing is copied", "few bytes", "many rows", "few rows"],
)
def test_driver_changes_a_small_frame_unless_it_must_copy_many_bytes(
    rig: UpsertTables,
    copy_bytes_max: int,
    write_options: dict[str, Any],
    by_tasks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = f"small_{len(rig.run_sql('SHOW TABLES IN {db}'))}"
    rig.create(table, BUCKETS)
    model: Model = dict.fromkeys(range(30), ("de", 0, 0))
    write(rig.build_frame(model), f"db.{table}", client=rig.client)
    task_runs: list[str] = []
    run_tasks = upserting.run_tasks
    monkeypatch.setattr(upserting, "run_tasks", lambda *arguments: task_runs.append("tasks") or run_tasks(*arguments))
    monkeypatch.setattr(upserting, "DRIVER_COPY_BYTES_MAX", copy_bytes_max)
    frame = rig.spark.range(0, 42, 3).selectExpr("int(id) id", "'x' land", "1 v", "int(null) ts")
    report = rig.upsert(frame, table, **write_options)
    assert task_runs == ["tasks"] * by_tasks
    assert (report.updated, report.inserted, report.attempts) == (10, 4, 1)
    assert rig.read_model(table) == model | dict.fromkeys(range(0, 42, 3), ("x", 1, None))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("rows_max", [2**31 - 1, 1 << 40, 0, -1])
def test_driver_accepts_the_configured_number_of_rows(rig: UpsertTables, rows_max: int) -> None:
    table = f"most_{len(rig.run_sql('SHOW TABLES IN {db}'))}"
    rig.create(table)
    report = rig.upsert(rig.spark.range(0, 5).selectExpr("int(id) id"), table, driver_rows=rows_max)
    assert report.inserted == 5


@pytest.mark.slow
def test_rows_larger_than_sparks_estimate_are_left_to_tasks(rig: UpsertTables) -> None:
    rig.create("large")
    frame = rig.spark.range(20_001).selectExpr("int(id) id", "repeat(string(id), 400) land")
    conf, limit_name = rig.spark.sparkContext._jsc.sc().conf(), "spark.driver.maxResultSize"
    old_value = conf.get(limit_name, "1g")
    conf.set(limit_name, "4m")
    try:
        report = rig.upsert(frame, "large", driver_rows=20_000)
    finally:
        conf.set(limit_name, old_value)
    assert report.inserted == 20_001


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "upsert"}, "set the key columns"),
        ({"mode": "upsert", "keys": "id"}, "lists of names"),
        ({"mode": "upsert", "keys": ["id"], "where": "id = 1"}, "takes no where"),
        ({"mode": "upsert", "keys": ["id"], "row_mode": "both"}, "it must be merge-on-read or copy-on-write"),
        ({"mode": "upsert", "keys": ["id"], "strategy": "guess"}, "it must be lookup, scan or equality"),
        ({"mode": "delete", "precombine": "ts"}, "takes no precombine"),
        ({"mode": "append", "keys": ["id"]}, "takes no keys"),
        ({"mode": "merge"}, "there is no mode 'merge'"),
        ({"mode": "append", "producer": "job"}, "producer is 'job'; it must be a name and a whole number"),
        ({"mode": "upsert", "keys": ["id"], "producer": ("job", "1")}, "it must be a name and a whole number"),
    ],
)
def test_invalid_write_options_are_refused(rig: UpsertTables, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(rig.spark.range(3), "db.none", client=rig.client, **options)


@pytest.mark.slow
def test_missing_columns_are_reported_before_any_row_is_evaluated(rig: UpsertTables) -> None:
    rig.create("told")
    frame = rig.spark.range(3).selectExpr("id", "raise_error('evaluated') AS land")
    for write_options, message in (
        ({"keys": ["key"]}, "the rows have no column key"),
        ({"keys": ["id"], "columns": ["v"]}, "the rows have no column v"),
        ({"keys": ["id"], "precombine": "ts"}, "the rows have no column ts"),
    ):
        with pytest.raises(Unwritable, match=message):
            rig.upsert(frame, "told", **write_options)
    with pytest.raises(Unwritable, match="the rows have 2 columns id"):
        rig.upsert(frame.select("id", "id"), "told")
    with pytest.raises(Unwritable, match="the table has no column colour"):
        rig.upsert(frame.selectExpr("*", "'red' AS colour"), "told")


# Read-modify-write, keys by name, and refusals by the driver


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("row_mode", "write_options"),
    [
        pytest.param(mode, task_options, id=f"{mode}, by {'tasks' if task_options else 'the driver'}", marks=marks)
        for mode, task_options, marks in (
            (MERGE_ON_READ, {}, ()),
            (COPY_ON_WRITE, TASKS, ()),
            (MERGE_ON_READ, TASKS, pytest.mark.slow),
            (COPY_ON_WRITE, {}, pytest.mark.slow),
        )
    ],
)
def test_rows_that_changed_since_they_were_read_are_not_changed(
    rig: UpsertTables, row_mode: str, write_options: dict[str, Any]
) -> None:
    table = f"counted_{row_mode.replace('-', '_')}_{len(write_options)}"
    rig.create(table, BUCKETS)
    write(rig.build_frame(dict.fromkeys(range(20), ("c", 0, 0))), f"db.{table}", client=rig.client)
    ((snapshot_id,),) = rig.run_sql(f"SELECT snapshot_id FROM {{db}}.{table}.snapshots")
    incremented_rows = rig.spark.sql(
        f"SELECT id, land, v + 1 AS v, ts FROM {rig.db}.{table} VERSION AS OF {snapshot_id}"
    )
    report = rig.upsert(incremented_rows, table, row_mode=row_mode, read_snapshot_id=snapshot_id, **write_options)
    assert report.updated == 20
    files_before = rig.list_files(table)
    with pytest.raises(Conflict, match=f"changed since snapshot {snapshot_id}"):
        rig.upsert(incremented_rows, table, row_mode=row_mode, read_snapshot_id=snapshot_id, **write_options)
    with pytest.raises(Conflict, match=f"changed since snapshot {snapshot_id}"):
        rig.delete(
            incremented_rows.select("id"), table, row_mode=row_mode, read_snapshot_id=snapshot_id, **write_options
        )
    assert rig.read_model(table) == dict.fromkeys(range(20), ("c", 1, 0))
    assert rig.list_files(table) == files_before


@pytest.mark.slow
def test_delete_uses_the_named_keys_or_the_tables_identifier_fields(rig: UpsertTables) -> None:
    rig.create("named")
    model: Model = {number: ("a", number, number) for number in range(5)}
    write(rig.build_frame(model), "db.named", client=rig.client)
    other_rows = rig.build_frame({1: ("other", 7, 7), 9: ("a", 9, 9)})
    with pytest.raises(Unwritable, match="no identifier fields; name the key columns"):
        rig.delete(other_rows, "named")
    assert rig.delete(other_rows, "named", keys=["id"]).deleted == 1
    rig.run_sql("ALTER TABLE {db}.named SET IDENTIFIER FIELDS id")
    assert rig.delete(rig.build_frame({2: ("other", 7, 7)}), "named").deleted == 1
    assert rig.delete(rig.build_frame({3: ("other", 7, 7)}), "named", **TASKS).deleted == 1
    assert rig.read_model("named").keys() == {0, 4}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("mode", ["append", "overwrite", "overwrite_partitions"])
def test_driver_refuses_unknown_or_unsuitable_columns_before_a_task_starts(rig: UpsertTables, mode: str) -> None:
    table = f"fits_{mode}"
    rig.create(table)
    accumulator = rig.spark.sparkContext.accumulator(0)

    def count_batches(batches: Any) -> Any:
        for batch in batches:
            accumulator.add(1)
            yield batch

    frame = rig.build_frame({1: ("a", 1, 1)})
    for invalid_frame, message in (
        (frame.selectExpr("*", "1 AS extra"), "the table has no column extra; it has id, land, v, ts"),
        (frame.selectExpr("id", "land", "array(v) AS v", "ts"), "v"),
    ):
        counted_rows = invalid_frame.mapInArrow(count_batches, invalid_frame.schema)
        with pytest.raises(Unwritable, match=message):
            write(counted_rows, f"db.{table}", client=rig.client, mode=mode)  # type: ignore[call-overload]
    assert accumulator.value == 0
    assert rig.read_model(table) == {}


@pytest.mark.slow
def test_upsert_to_a_version_1_table_is_refused(rig: UpsertTables) -> None:
    rig.create("old", version=1)
    files_before = rig.list_files("old")
    for change in (rig.upsert, rig.delete):
        with pytest.raises(Unwritable, match="version 1 supports only appends"):
            change(rig.build_frame({1: ("a", 1, 1)}), "old", keys=["id"], **TASKS)
    assert rig.list_files("old") == files_before


@pytest.mark.slow
def test_create_table_as_select_works_with_scan_reports(rig: UpsertTables) -> None:
    rig.run_sql(
        "CREATE TABLE {db}.source (id bigint) USING iceberg TBLPROPERTIES ('seamark.scan-planning-mode'='client')"
    )
    rig.run_sql("INSERT INTO {db}.source VALUES (1), (2)")
    rig.run_sql("CREATE TABLE {db}.made USING iceberg AS SELECT * FROM {db}.source WHERE id > 1")
    assert rig.run_sql("SELECT * FROM {db}.made") == [(2,)]
