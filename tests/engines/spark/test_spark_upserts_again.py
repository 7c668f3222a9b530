"""Tests of upserts that conflict, fail or run twice, because of another writer, Spark, or a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Row as SparkRow

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.commits import CommitClient
from seamark.connector.spark.frames import upserts as upserting
from seamark.connector.write.latest_rows import read_column
from seamark.connector.write.row_changes import Report
from seamark.connector.write.upserts import COPY_ON_WRITE, MERGE_ON_READ, upsert
from seamark.spark import write
from tests.engines.spark.upserts import BUCKETS, RECORD, TASKS, Model, UpsertTables


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpsertTables]:
    with UpsertTables.open(spark, tmp_path_factory.mktemp("upserts_again")) as tables:
        yield tables


def run_before_commits(monkeypatch: pytest.MonkeyPatch, *operations: Any) -> None:
    """Run the first operation before the next commit, the second before the commit after it, and so on."""
    real_commit, pending_operations = CommitClient.commit, list(operations)

    def commit(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        if pending_operations:
            operation = pending_operations.pop(0)
            with monkeypatch.context() as patch:
                patch.setattr(CommitClient, "commit", real_commit)
                operation()
        response: dict[str, Any] = real_commit(self, table, body)
        return response

    monkeypatch.setattr(CommitClient, "commit", commit)


@pytest.mark.parametrize("row_mode", [MERGE_ON_READ, pytest.param(COPY_ON_WRITE, marks=pytest.mark.slow)])
def test_conflicting_upsert_is_repeated_with_the_same_rows_and_leaves_no_file(
    rig: UpsertTables, row_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"raced_{row_mode[:4]}"
    rig.create(table, BUCKETS)
    model: Model = dict.fromkeys(range(20), ("de", 0, 0))
    write(rig.build_frame(model), f"db.{table}", client=rig.client)
    accumulator = rig.spark.sparkContext.accumulator(0)
    competing_files: set[str] = set()

    def write_concurrently() -> None:
        files_before = rig.list_files(table)
        competing_rows = pa.table(
            {"id": [7], "land": ["plain"], "v": pa.array([9], pa.int32()), "ts": pa.array([9], pa.int32())}
        )
        upsert(rig.client, f"db.{table}", competing_rows, keys=["id"])
        competing_files.update(rig.list_files(table) - files_before)

    def record_sizes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            accumulator.add(batch.num_rows)
            yield batch

    files_before = rig.list_files(table)
    run_before_commits(monkeypatch, write_concurrently)
    random_frame = rig.spark.range(5, 25).selectExpr("id", "uuid() AS land", "1 AS v", "1 AS ts")
    counted_frame = random_frame.mapInArrow(record_sizes, "id bigint, land string, v int, ts int")
    report = rig.upsert(counted_frame, table, columns=["land"], row_mode=row_mode, **TASKS)
    assert (report.attempts, report.updated, report.inserted) == (2, 15, 5)
    assert accumulator.value == 20
    rows_after = rig.read_model(table)
    assert len({row[0] for id_, row in rows_after.items() if id_ >= 5}) == 20
    assert rows_after[7][1:] == (9, 9)
    assert {id_: row[1:] for id_, row in rows_after.items() if id_ not in (7, *range(20, 25))} == {
        number: (0, 0) for number in range(20) if number != 7
    }
    assert len(rig.list_files(table) - files_before - competing_files) == report.files_written


def test_failed_upsert_job_leaves_no_file_and_no_snapshot(rig: UpsertTables) -> None:
    rig.create("failing", BUCKETS, RECORD, columns="id bigint NOT NULL, v int")
    frame = rig.spark.range(40).selectExpr("IF(id = 39, NULL, id) AS id", "1 AS v")
    # Other tests of this session may have cached frames.
    cached_before = set(rig.spark.sparkContext._jsc.getPersistentRDDs())
    with pytest.raises(PySparkException, match=r"column id is null in 1 of the rows"):
        rig.upsert(frame.repartition(1), "failing", **TASKS)
    with pytest.raises(Unwritable, match=r"column id is null in 1 of the rows"):
        rig.upsert(frame, "failing")
    assert rig.run_sql("SELECT * FROM {db}.failing.snapshots") == []
    assert rig.list_files("failing") == set()
    assert set(rig.spark.sparkContext._jsc.getPersistentRDDs()) <= cached_before  # The job has cached no frame.


@pytest.mark.slow
@pytest.mark.parametrize("row_mode", [MERGE_ON_READ, pytest.param(COPY_ON_WRITE, marks=pytest.mark.slow)])
def test_only_one_result_of_a_repeated_task_counts(
    rig: UpsertTables, row_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks run in this process. The first attempt is speculative, and Spark discards its result.

    `tests/faults/test_spark_tasks.py` tests tasks that Spark kills.
    """
    table = f"again_{row_mode[:4]}"
    rig.create(table, BUCKETS)
    model: Model = dict.fromkeys(range(60), ("de", 0, 0))
    write(rig.build_frame(model), f"db.{table}", client=rig.client)
    task_numbers: list[int] = []

    def run_tasks_twice(df: DataFrame, work: Any) -> Any:
        input_table = df.toArrow()
        task_of_row = work.distribution.assign_tasks(
            [read_column(input_table, field) for field in work.distribution.fields]
        )
        input_table = input_table.append_column("_seamark_task", pa.array(task_of_row))
        results = []
        for number in range(work.distribution.tasks):
            own_batches = input_table.filter(pa.array(task_of_row == number)).to_batches()
            list(upserting.change_rows_of_task(work, own_batches))
            results += [
                SparkRow(result=batch[0][0].as_py()) for batch in upserting.change_rows_of_task(work, own_batches)
            ]
            task_numbers.append(number)
        return SimpleNamespace(collect=lambda: results)

    monkeypatch.setattr(upserting, "run_tasks", run_tasks_twice)
    expected: Model = dict.fromkeys(range(0, 100, 3), ("x", 1, None))
    report = rig.upsert(rig.build_frame(expected), table, row_mode=row_mode, **TASKS)
    assert len(task_numbers) > 1
    assert (report.updated, report.inserted, report.attempts) == (20, 14, 1)
    assert rig.read_model(table) == model | expected


@pytest.mark.slow
def test_stream_upserts_each_batch_once_for_each_checkpoint(rig: UpsertTables, tmp_path: Path) -> None:
    rig.create("stream", BUCKETS)
    source, checkpoint = tmp_path / "given", tmp_path / "checkpoint"
    reports: list[Report] = []
    queries: list[str] = []

    def add_source_file(model: Model) -> None:
        rig.build_frame(model).coalesce(1).write.mode("append").parquet(str(source))

    def upsert_batch(df: DataFrame, batch_number: int) -> None:
        queries.append(df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or "")
        reports.append(rig.upsert(df, "stream", precombine="ts", producer=(f"orders-{queries[-1]}", batch_number)))

    def run(checkpoint: Path = checkpoint) -> None:
        stream = rig.spark.readStream.schema("id int, land string, v int, ts int").option("maxFilesPerTrigger", 1)
        writer = stream.parquet(str(source)).writeStream.option("checkpointLocation", str(checkpoint))
        query = writer.foreachBatch(upsert_batch).trigger(availableNow=True).start()
        query.awaitTermination()
        assert queries[-1] == query.id

    add_source_file(dict.fromkeys(range(10), ("de", 1, 1)))
    run()
    add_source_file(dict.fromkeys(range(5, 15), ("fr", 2, 2)))
    run()
    model = dict.fromkeys(range(5), ("de", 1, 1)) | dict.fromkeys(range(5, 15), ("fr", 2, 2))
    assert [(report.inserted, report.updated, report.duplicate) for report in reports] == [
        (10, 0, False),
        (5, 5, False),
    ]
    files_before, snapshots_before = (
        rig.list_files("stream"),
        rig.run_sql("SELECT snapshot_id FROM {db}.stream.snapshots"),
    )
    last_commit = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last_commit.unlink()  # The test deletes Spark's record of the batch, as if Spark had died after Seamark's commit.
    last_commit.with_name(f".{last_commit.name}.crc").unlink()
    run()
    assert (len(reports), reports[-1].duplicate) == (3, True)
    assert (rig.list_files("stream"), rig.run_sql("SELECT snapshot_id FROM {db}.stream.snapshots")) == (
        files_before,
        snapshots_before,
    )
    assert rig.read_model("stream") == model
    rig.delete(rig.spark.range(3), "stream", keys=["id"])
    run(tmp_path / "another")
    # The ids 0 to 2 were deleted, and the stored rows of the ids 5 to 9 are later.
    upsert_counts = [(report.inserted, report.stale, report.duplicate) for report in reports[3:]]
    assert upsert_counts == [(3, 5, False), (0, 0, False)]
    assert rig.read_model("stream") == model
