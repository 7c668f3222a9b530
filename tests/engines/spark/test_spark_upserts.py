"""DataFrames upserted and deleted by key, by the driver and by tasks, as Iceberg's own reader in the same Spark finds
the table: it equals a plain dict at every snapshot."""

from __future__ import annotations

import itertools
import random
from collections import Counter
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
from seamark.connector.arrow.partitions import apply_transform
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import Conflict
from seamark.connector.spark.frames import file_changes
from seamark.connector.spark.frames import upserts as upserting
from seamark.connector.write.latest_rows import column_of
from seamark.connector.write.row_changes import Report
from seamark.connector.write.upserts import COPY_ON_WRITE, MERGE_ON_READ, MODES, upsert
from seamark.metaserver.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.metaserver.iceberg.types.schema import Field
from seamark.spark import write
from tests.engines.conftest import rows
from tests.engines.spark.test_spark_writing import EVERYTHING
from tests.engines.tables import SparkTables

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
BUCKETS, RECORD = "PARTITIONED BY (bucket(4, id))", "'seamark.index.ids'='record(id)'"

Row = tuple[str | None, int | None, int | None]
Model = dict[int, Row]


class Rig(SparkTables):
    def create(self, name: str, spec: str = "", *properties: str, version: int = 3, columns: str = "") -> None:
        named = ", ".join([f"'format-version'='{version}'", *properties])
        columns = columns or "id bigint NOT NULL, land string, v int, ts int"
        self.sql(f"CREATE TABLE {{db}}.{name} ({columns}) USING iceberg {spec} TBLPROPERTIES ({named})")

    def frame(self, model: Model) -> DataFrame:
        given = [(one, *row) for one, row in model.items()]
        return self.spark.createDataFrame(given, "id int, land string, v int, ts int")

    def upsert(self, frame: DataFrame, table: str, **given: Any) -> Report:
        return write(frame, f"db.{table}", client=self.client, mode="upsert", **{"keys": ["id"], **given})

    def delete(self, frame: DataFrame, table: str, **given: Any) -> Report:
        return write(frame, f"db.{table}", client=self.client, mode="delete", **given)

    def held(self, table: str, at: str = "") -> Model:
        """AssertionError where a key is there twice."""
        found = self.sql(f"SELECT id, land, v, ts FROM {{db}}.{table} {at}")
        made = {one: (land, v, ts) for one, land, v, ts in found}
        assert len(made) == len(found), sorted(found)
        return made

    def live(self, table: str) -> int:
        return len(self.sql(f"SELECT 1 FROM {{db}}.{table}.data_files"))


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig.served(spark, tmp_path_factory.mktemp("upserts")) as made:
        yield made


TASKS = {"driver_rows": 0}


# Histories


def step(rig: Rig, rng: random.Random, table: str, number: int, model: Model) -> tuple[str, Model]:
    """Something is done to the table; what, and the model after it."""
    kind = rng.choice(("insert", "upsert", "upsert", "latest", "partial", "delete"))
    how = {"row_mode": rng.choice(MODES), "driver_rows": rng.choice((0, 0, 1000))}
    some = rng.sample(range(60), 20)
    row: Row = (None, None, None)
    given = {one: (rng.choice(("de", "fr", None)), number, rng.randrange(40)) for one in some}
    if kind == "insert":
        fresh = {100 * number + one: row for one, row in given.items()}
        write(rig.frame(fresh), f"db.{table}", client=rig.client)
        return kind, model | fresh
    if kind == "delete":
        gone = rig.frame(given).select("id")
        rig.delete(gone, table, **how)
        return f"{kind} {how}", {one: row for one, row in model.items() if one not in given}
    if kind == "upsert":
        rig.upsert(rig.frame(given), table, **how)
        return f"{kind} {how}", model | given
    if kind == "partial":
        rig.upsert(rig.frame(given).select("v", "id", "land"), table, columns=["v"], **how)
        merged = {one: ((old := model.get(one, row))[0], given[one][1], old[2]) for one in given}
        return f"{kind} {how}", model | merged
    # Of each key several rows, of which the last by ts counts, if it is not older than what is stored.
    frame, made = rig.frame(given), dict(model)
    late = {one: ("late", number, ts + 1) for one, (_, _, ts) in given.items() if ts is not None and one % 3 == 0}
    rig.upsert(frame.union(rig.frame(late)).union(frame), table, precombine="ts", **how)
    for one, new in (given | late).items():
        stored = model.get(one)
        if stored is None or stored[2] is None or (new[2] is not None and new[2] >= stored[2]):
            made[one] = new
    return f"{kind} {how}", made


def play(rig: Rig, table: str, seed: int, steps: int, note: str) -> None:
    """Each snapshot is read again at the end: later ones leave it as it was."""
    rng = random.Random(seed)
    model: Model = {}
    after: dict[int, tuple[str, Model]] = {}
    for number in range(1, steps + 1):
        told, model = step(rig, rng, table, number, model)
        snapshots = rig.sql(f"SELECT snapshot_id FROM {{db}}.{table}.snapshots ORDER BY committed_at")
        after.setdefault(snapshots[-1][0] if snapshots else 0, (told, model))
        assert rig.held(table) == model, f"{note}, seed {seed}, step {number}: {told}"
    for snapshot_id, (told, model) in after.items():
        if snapshot_id:
            assert rig.held(table, f"VERSION AS OF {snapshot_id}") == model, f"{note}, seed {seed}, {told}"


SHAPES = {
    "bucketed": (3, BUCKETS, ()),
    "by record index": (2, "", (RECORD,)),
    "by reading": (3, "PARTITIONED BY (land)", ()),
    "by record index in buckets": (3, BUCKETS, (RECORD,)),
    "bucketed, position deletes": (2, "PARTITIONED BY (land, bucket(3, id))", ()),
}


@pytest.mark.parametrize(
    "shape", ["bucketed", *(pytest.param(one, marks=pytest.mark.slow) for one in ("by reading", "by record index"))]
)
def test_a_table_is_at_every_snapshot_what_its_history_says(
    rig: Rig, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, spec, properties = SHAPES[shape]
    monkeypatch.setattr(upserting, "TASK_ROWS", 8)
    table = f"history_{list(SHAPES).index(shape)}"
    rig.create(table, spec, *properties, version=version)
    play(rig, table, version, 4, shape)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_so_it_is_after_long_histories(rig: Rig, shape: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    version, spec, properties = SHAPES[shape]
    monkeypatch.setattr(upserting, "TASK_ROWS", 8)
    monkeypatch.setattr(file_changes, "DRIVER_FILES", 2)
    table = f"long_{list(SHAPES).index(shape)}_{seed}"
    rig.create(table, spec, *properties, version=version)
    play(rig, table, 1000 + seed, 12, shape)


# What is read, written and planned


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[DataFrame]:
    """What the tasks were to tell: the frames that were collected."""
    found: list[DataFrame] = []
    real = upserting.run_tasks

    def spread(df: DataFrame, work: Any) -> DataFrame:
        found.append(real(df, work))
        return found[-1]

    monkeypatch.setattr(upserting, "run_tasks", spread)
    return found


def executed(frame: DataFrame) -> str:
    """The plan that was run."""
    plan: str = frame._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    return plan.partition("== Initial Plan ==")[0]


@pytest.mark.parametrize("row_mode", [MERGE_ON_READ, pytest.param(COPY_ON_WRITE, marks=pytest.mark.slow)])
def test_rows_are_exchanged_once_and_joined_with_nothing_and_only_their_buckets_are_read(
    rig: Rig, row_mode: str, collected: list[DataFrame]
) -> None:
    table = f"plan_{row_mode[:4]}"
    rig.create(table, "PARTITIONED BY (bucket(16, id))")
    write(rig.frame(dict.fromkeys(range(400), ("de", 0, 0))), f"db.{table}", client=rig.client)
    assert rig.live(table) == 16
    wanted = dict.fromkeys((3, 5, 7, 399), ("fr", 1, 1))
    report = rig.upsert(rig.frame(wanted), table, row_mode=row_mode, **TASKS)
    (plan,) = [executed(one) for one in collected]
    assert "MapInArrow" in plan
    assert plan.count("Exchange ") == 1, plan
    assert "Join" not in plan
    assert "BatchScan" not in plan
    assert (report.updated, report.inserted, report.attempts) == (4, 0, 1)
    assert report.files_read <= 4
    if row_mode == COPY_ON_WRITE:
        assert (report.files_removed, rig.live(table)) == (report.files_written, 16)  # rows come into the copies
    assert rig.held(table) == dict.fromkeys(range(400), ("de", 0, 0)) | wanted


def test_a_task_owns_files_of_which_it_has_all_keys() -> None:
    field = Field(1, "id", True, "long")
    keys = pa.array(range(5000))
    seen = set()
    for width, buckets, theirs in itertools.product((1, 6, 8, 16), (1, 2, 3, 6, 8), (1, 2, 4, 6, 8, 16, 32)):
        distribution = upserting.RowDistribution((field,), min(width, buckets), 1, width)
        places = distribution.places([keys])
        assert places.max() < distribution.tasks
        spec = PartitionSpec(0, (PartitionField("b", f"bucket[{theirs}]", 1),))
        codes = apply_transform(f"bucket[{theirs}]", "long", keys).codes
        apart = any(len(set(places[codes == code].tolist())) > 1 for code in range(theirs))
        assert distribution.owns(spec) == (not apart), (width, buckets, theirs)
        seen.add(apart)
    assert seen == {True, False}


def test_rows_of_one_bucket_and_many_keys_are_shared_among_all_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of one tenant in a table that is in buckets by tenant, with keys of tenant and number."""
    monkeypatch.setattr(upserting, "record_index", lambda *_: None)
    spec = PartitionSpec(0, (PartitionField("b", "bucket[16]", 1),))
    opened: Any = SimpleNamespace(metadata=SimpleNamespace(default_spec=spec, partition_specs=(spec,)))
    fields = [Field(1, "tenant", True, "string"), Field(2, "id", True, "long")]
    count = 20_000
    for both in (fields, fields[::-1]):
        columns = {"tenant": pa.array(["acme"] * count, pa.large_string()), "id": pa.array(range(count))}
        distribution = upserting.RowDistribution.of(opened, both, 16 * upserting.TASK_ROWS, 4, None)
        assert distribution.tasks == 16
        sizes = Counter(distribution.places([columns[one.name] for one in both]).tolist())
        assert max(sizes.values()) < 1.2 * count / distribution.tasks, sizes
        assert not distribution.owns(spec)
    alone = upserting.RowDistribution.of(opened, fields[:1], 16 * upserting.TASK_ROWS, 4, None)
    assert (alone.tasks, alone.owns(spec)) == (16, True)


def test_where_keys_are_looked_up_few_rows_have_few_tasks_however_many_cores_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upserting, "record_index", lambda *_: "record(id)")
    spec = PartitionSpec(0, ())
    opened: Any = SimpleNamespace(metadata=SimpleNamespace(default_spec=spec, partition_specs=(spec,)))
    for count, cores, tasks in (
        (1, 4000, 1),
        (20_000, 4000, 1),
        (20_001, 4000, 2),
        (200_000, 4000, 10),
        (200_000, 4, 4),
        (9_000_000, 4, 9),
    ):
        distribution = upserting.RowDistribution.of(opened, [Field(1, "id", True, "long")], count, cores, None)
        assert distribution.tasks == tasks, (count, cores)


@pytest.mark.parametrize(
    ("version", "row_mode"),
    [*(pytest.param(one, MERGE_ON_READ, marks=pytest.mark.slow) for one in (2, 3)), (3, COPY_ON_WRITE)],
)
def test_a_file_with_keys_of_several_tasks_gets_one_copy_or_one_vector(
    rig: Rig, version: int, row_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upserting, "TASK_ROWS_MIN", 5)
    table = f"shared_{version}_{row_mode[:4]}"
    rig.create(table, "", RECORD, version=version)
    write(rig.frame(dict.fromkeys(range(50), ("de", 0, 0))).coalesce(1), f"db.{table}", client=rig.client)
    for turn in (1, 2):
        wanted = dict.fromkeys(range(0, 60, 3), ("fr", turn, turn))
        report = rig.upsert(rig.frame(wanted).repartition(3), table, row_mode=row_mode, **TASKS)
        assert report.updated + report.inserted == 20
        assert rig.held(table) == dict.fromkeys(range(50), ("de", 0, 0)) | wanted
    assert rig.delete(rig.spark.range(1000), table, keys=["id"], row_mode=row_mode, **TASKS).deleted == 53
    assert rig.held(table) == {}


@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_deletes_of_many_files_are_written_by_tasks_and_each_file_has_one(
    rig: Rig, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "DRIVER_FILES", 2)
    rig.create(f"many_{version}", BUCKETS, version=version)
    model: Model = dict.fromkeys(range(80), ("de", 0, 0))
    write(rig.frame(model), f"db.many_{version}", client=rig.client)
    upsert(rig.client, f"db.many_{version}", pa.table({"id": [100], "land": ["x"]}), keys=["id"])
    model[100] = ("x", None, None)
    for gone in (range(0, 80, 2), range(1, 80, 5)):
        report = rig.delete(
            rig.frame(dict.fromkeys(gone, (None, 0, 0))).select("id"),
            f"many_{version}",
            row_mode=MERGE_ON_READ,
            **TASKS,
        )
        assert report.deleted == len([one for one in gone if one in model])
        model = {one: row for one, row in model.items() if one not in gone}
        assert rig.held(f"many_{version}") == model
    if version == 3:
        vectors = rig.sql("SELECT referenced_data_file FROM {db}.many_3.delete_files")
        assert len(vectors) == len(set(vectors)) >= 4


@pytest.mark.parametrize(
    "spec",
    [pytest.param("PARTITIONED BY (bucket(2, id))", marks=pytest.mark.slow), "PARTITIONED BY (day, truncate(2, s))"],
)
def test_frames_of_every_type_come_through_the_tasks(rig: Rig, spec: str) -> None:
    table = f"everything_{len(spec)}"
    columns = (
        "id bigint, n int, f float, d double, p decimal(18,4), s string, b binary, day date, ts timestamp, "
        "nt timestamp_ntz, ok boolean, st struct<a: int, u: string>, li array<struct<x: int>>, m map<string, int>"
    )
    rig.create(table, spec, columns=columns)
    frame = rig.spark.range(120).selectExpr(*EVERYTHING)
    rig.upsert(frame.where("id < 80"), table, **TASKS)
    rig.upsert(frame.where("id > 40"), table, row_mode=MERGE_ON_READ, **TASKS)
    found = rig.spark.table(f"{rig.db}.{table}")
    wanted = frame.withColumn("p", frame.p.cast("decimal(18,4)"))
    assert sorted(map(repr, rows(found))) == sorted(map(repr, rows(wanted)))


def test_keys_are_equal_as_the_table_has_them_in_whichever_type_they_come(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upserting, "TASK_ROWS", 2)
    rig.create("floats", columns="k double, w string, v int")
    values = "('nan', 'a'), ('0.0', 'a'), ('-0.0', 'a'), ('1.5', 'a'), ('1.5', 'b')"
    given = rig.spark.sql(
        f"SELECT CAST(x AS {{kind}}) AS k, w, 0 AS v FROM VALUES {values} AS g(x, w)".replace("{kind}", "double")
    )
    rig.upsert(given, "floats", keys=["k", "w"], **TASKS)
    narrow = rig.spark.sql(
        f"SELECT w, CAST(x AS float) AS k, 1 AS v FROM VALUES {values}, ('nan', 'a'), ('1.5', 'c') AS g(x, w)"
    )
    report = rig.upsert(narrow, "floats", keys=["k", "w"], row_mode=MERGE_ON_READ, **TASKS)
    assert (report.updated, report.inserted) == (4, 1)
    found = sorted((repr(abs(k)), w, v) for k, w, v in rig.sql("SELECT k, w, v FROM {db}.floats"))
    assert found == [
        ("0.0", "a", 1),
        ("1.5", "a", 1),
        ("1.5", "b", 1),
        ("1.5", "c", 1),
        ("nan", "a", 1),
    ]


# Others, failures, repeats


def overtaken(monkeypatch: pytest.MonkeyPatch, *works: Any) -> None:
    """Each of the works is done just before one commit, in turn."""
    real, left = CommitClient.commit, list(works)

    def commit(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        if left:
            work = left.pop(0)
            with monkeypatch.context() as patch:
                patch.setattr(CommitClient, "commit", real)
                work()
        answer: dict[str, Any] = real(self, table, body)
        return answer

    monkeypatch.setattr(CommitClient, "commit", commit)


@pytest.mark.parametrize("row_mode", [MERGE_ON_READ, pytest.param(COPY_ON_WRITE, marks=pytest.mark.slow)])
def test_an_overtaken_upsert_is_done_anew_with_the_same_rows_and_leaves_no_file(
    rig: Rig, row_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"raced_{row_mode[:4]}"
    rig.create(table, BUCKETS)
    model: Model = dict.fromkeys(range(20), ("de", 0, 0))
    write(rig.frame(model), f"db.{table}", client=rig.client)
    seen = rig.spark.sparkContext.accumulator(0)
    fresh: set[str] = set()

    def other() -> None:
        before = rig.files(table)
        named = pa.table(
            {"id": [7], "land": ["plain"], "v": pa.array([9], pa.int32()), "ts": pa.array([9], pa.int32())}
        )
        upsert(rig.client, f"db.{table}", named, keys=["id"])
        fresh.update(rig.files(table) - before)

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            seen.add(batch.num_rows)
            yield batch

    before = rig.files(table)
    overtaken(monkeypatch, other)
    chance = rig.spark.range(5, 25).selectExpr("id", "uuid() AS land", "1 AS v", "1 AS ts")
    once = chance.mapInArrow(counted, "id bigint, land string, v int, ts int")
    report = rig.upsert(once, table, columns=["land"], row_mode=row_mode, **TASKS)
    assert (report.attempts, report.updated, report.inserted) == (2, 15, 5)
    assert seen.value == 20
    held = rig.held(table)
    assert len({row[0] for one, row in held.items() if one >= 5}) == 20
    assert held[7][1:] == (9, 9)
    assert {one: row[1:] for one, row in held.items() if one not in (7, *range(20, 25))} == {
        one: (0, 0) for one in range(20) if one != 7
    }
    assert len(rig.files(table) - before - fresh) == report.files_written


@pytest.mark.parametrize(
    ("most", "how", "by_tasks"),
    [
        (0, {"row_mode": COPY_ON_WRITE}, True),
        (0, {"row_mode": MERGE_ON_READ}, False),
        (1 << 30, {"row_mode": COPY_ON_WRITE}, False),
        (1 << 30, {"row_mode": COPY_ON_WRITE, "driver_rows": 13}, True),
        (1 << 30, {"row_mode": COPY_ON_WRITE, "driver_rows": 14}, False),
    ],
    ids=["many bytes", "nothing is copied", "few bytes", "many rows", "few rows"],
)
def test_a_small_frame_is_changed_by_the_driver_unless_many_bytes_are_to_be_copied(
    rig: Rig, most: int, how: dict[str, Any], by_tasks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = f"small_{len(rig.sql('SHOW TABLES IN {db}'))}"
    rig.create(table, BUCKETS)
    model: Model = dict.fromkeys(range(30), ("de", 0, 0))
    write(rig.frame(model), f"db.{table}", client=rig.client)
    jobs: list[str] = []
    spread = upserting.run_tasks
    monkeypatch.setattr(upserting, "run_tasks", lambda *given: jobs.append("tasks") or spread(*given))
    monkeypatch.setattr(upserting, "COPIED_BYTES_MAX", most)
    given = rig.spark.range(0, 42, 3).selectExpr("int(id) id", "'x' land", "1 v", "int(null) ts")
    report = rig.upsert(given, table, **how)
    assert jobs == ["tasks"] * by_tasks
    assert (report.updated, report.inserted, report.attempts) == (10, 4, 1)
    assert rig.held(table) == model | dict.fromkeys(range(0, 42, 3), ("x", 1, None))


@pytest.mark.parametrize("most", [2**31 - 1, 1 << 40, 0, -1])
def test_the_driver_takes_as_many_rows_as_it_is_told(rig: Rig, most: int) -> None:
    table = f"most_{len(rig.sql('SHOW TABLES IN {db}'))}"
    rig.create(table)
    report = rig.upsert(rig.spark.range(0, 5).selectExpr("int(id) id"), table, driver_rows=most)
    assert report.inserted == 5


def test_rows_that_are_larger_than_spark_thinks_are_left_to_tasks(rig: Rig) -> None:
    rig.create("large")
    given = rig.spark.range(20_001).selectExpr("int(id) id", "repeat(string(id), 400) land")
    conf, limit = rig.spark.sparkContext._jsc.sc().conf(), "spark.driver.maxResultSize"
    before = conf.get(limit, "1g")
    conf.set(limit, "4m")
    try:
        report = rig.upsert(given, "large", driver_rows=20_000)
    finally:
        conf.set(limit, before)
    assert report.inserted == 20_001


def test_a_job_that_fails_leaves_nothing(rig: Rig) -> None:
    rig.create("failing", BUCKETS, RECORD, columns="id bigint NOT NULL, v int")
    frame = rig.spark.range(40).selectExpr("IF(id = 39, NULL, id) AS id", "1 AS v")
    before = set(rig.spark.sparkContext._jsc.getPersistentRDDs())  # of other tests in this session
    with pytest.raises(PySparkException, match=r"column id is null in 1 of the rows"):
        rig.upsert(frame.repartition(1), "failing", **TASKS)
    with pytest.raises(Unwritable, match=r"column id is null in 1 of the rows"):
        rig.upsert(frame, "failing")
    assert rig.sql("SELECT * FROM {db}.failing.snapshots") == []
    assert rig.files("failing") == set()
    assert set(rig.spark.sparkContext._jsc.getPersistentRDDs()) <= before  # nothing more is held


@pytest.mark.parametrize("row_mode", MODES)
def test_of_a_task_that_is_run_twice_one_result_counts(
    rig: Rig, row_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Task after task in this process: the first attempt is a speculative one whose result nobody takes. What becomes
    of such as are killed, `tests/faults/test_spark_tasks.py` shows."""
    table = f"again_{row_mode[:4]}"
    rig.create(table, BUCKETS)
    model: Model = dict.fromkeys(range(60), ("de", 0, 0))
    write(rig.frame(model), f"db.{table}", client=rig.client)
    ran: list[int] = []

    def tasks(df: DataFrame, work: Any) -> Any:
        given = df.toArrow()
        places = work.distribution.places([column_of(given, one) for one in work.distribution.fields])
        given = given.append_column("_seamark_task", pa.array(places))
        results = []
        for number in range(work.distribution.tasks):
            mine = given.filter(pa.array(places == number)).to_batches()
            list(upserting.change_task(work, mine))
            results += [SparkRow(result=one[0][0].as_py()) for one in upserting.change_task(work, mine)]
            ran.append(number)
        return SimpleNamespace(collect=lambda: results)

    monkeypatch.setattr(upserting, "run_tasks", tasks)
    wanted: Model = dict.fromkeys(range(0, 100, 3), ("x", 1, None))
    report = rig.upsert(rig.frame(wanted), table, row_mode=row_mode, **TASKS)
    assert len(ran) > 1
    assert (report.updated, report.inserted, report.attempts) == (20, 14, 1)
    assert rig.held(table) == model | wanted


def test_a_stream_upserts_each_of_its_batches_once_and_all_again_with_a_new_checkpoint(
    rig: Rig, tmp_path: Path
) -> None:
    rig.create("stream", BUCKETS)
    given, checkpoint = tmp_path / "given", tmp_path / "checkpoint"
    reports: list[Report] = []
    queries: list[str] = []

    def arrive(model: Model) -> None:
        rig.frame(model).coalesce(1).write.mode("append").parquet(str(given))

    def each(df: DataFrame, number: int) -> None:
        queries.append(df.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId") or "")
        reports.append(rig.upsert(df, "stream", precombine="ts", producer=(f"orders-{queries[-1]}", number)))

    def run(checkpoint: Path = checkpoint) -> None:
        read = rig.spark.readStream.schema("id int, land string, v int, ts int").option("maxFilesPerTrigger", 1)
        writer = read.parquet(str(given)).writeStream.option("checkpointLocation", str(checkpoint))
        query = writer.foreachBatch(each).trigger(availableNow=True).start()
        query.awaitTermination()
        assert queries[-1] == query.id

    arrive(dict.fromkeys(range(10), ("de", 1, 1)))
    run()
    arrive(dict.fromkeys(range(5, 15), ("fr", 2, 2)))
    run()
    model = dict.fromkeys(range(5), ("de", 1, 1)) | dict.fromkeys(range(5, 15), ("fr", 2, 2))
    assert [(one.inserted, one.updated, one.duplicate) for one in reports] == [(10, 0, False), (5, 5, False)]
    files, snapshots = rig.files("stream"), rig.sql("SELECT snapshot_id FROM {db}.stream.snapshots")
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()  # as if Spark had died after our commit, before it could note that
    last.with_name(f".{last.name}.crc").unlink()
    run()
    assert (len(reports), reports[-1].duplicate) == (3, True)
    assert (rig.files("stream"), rig.sql("SELECT snapshot_id FROM {db}.stream.snapshots")) == (files, snapshots)
    assert rig.held("stream") == model
    rig.delete(rig.spark.range(3), "stream", keys=["id"])
    run(tmp_path / "another")
    told = [(one.inserted, one.stale, one.duplicate) for one in reports[3:]]
    assert told == [(3, 5, False), (0, 0, False)]
    assert rig.held("stream") == model


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "upsert"}, "name the key columns"),
        ({"mode": "upsert", "keys": "id"}, "lists of names"),
        ({"mode": "upsert", "keys": ["id"], "where": "id = 1"}, "takes no where"),
        ({"mode": "upsert", "keys": ["id"], "row_mode": "both"}, "it may be merge-on-read or copy-on-write"),
        ({"mode": "upsert", "keys": ["id"], "strategy": "guess"}, "located by lookup or scan"),
        ({"mode": "delete", "precombine": "ts"}, "takes no precombine"),
        ({"mode": "append", "keys": ["id"]}, "takes no keys"),
        ({"mode": "merge"}, "there is no mode 'merge'"),
        ({"mode": "append", "producer": "job"}, "producer is 'job'; it must be a name and a whole number"),
        ({"mode": "upsert", "keys": ["id"], "producer": ("job", "1")}, "it must be a name and a whole number"),
    ],
)
def test_what_makes_no_sense_is_told(rig: Rig, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        write(rig.spark.range(3), "db.none", client=rig.client, **given)


def test_columns_that_are_not_there_are_told_before_any_row_is_looked_at(rig: Rig) -> None:
    rig.create("told")
    frame = rig.spark.range(3).selectExpr("id", "raise_error('evaluated') AS land")
    for given, said in (
        ({"keys": ["key"]}, "the rows have no column key"),
        ({"keys": ["id"], "columns": ["v"]}, "the rows have no column v"),
        ({"keys": ["id"], "precombine": "ts"}, "the rows have no column ts"),
    ):
        with pytest.raises(Unwritable, match=said):
            rig.upsert(frame, "told", **given)
    with pytest.raises(Unwritable, match="the rows have 2 columns id"):
        rig.upsert(frame.select("id", "id"), "told")
    with pytest.raises(Unwritable, match="the table has no column colour"):
        rig.upsert(frame.selectExpr("*", "'red' AS colour"), "told")


# Read-modify-write, keys by name, and what the driver refuses


@pytest.mark.parametrize(
    ("row_mode", "how"),
    [
        pytest.param(mode, how, id=f"{mode}, by {'tasks' if how else 'the driver'}", marks=marks)
        for mode, how, marks in (
            (MERGE_ON_READ, {}, ()),
            (COPY_ON_WRITE, TASKS, ()),
            (MERGE_ON_READ, TASKS, pytest.mark.slow),
            (COPY_ON_WRITE, {}, pytest.mark.slow),
        )
    ],
)
def test_rows_that_changed_since_they_were_read_are_left_alone(rig: Rig, row_mode: str, how: dict[str, Any]) -> None:
    table = f"counted_{row_mode.replace('-', '_')}_{len(how)}"
    rig.create(table, BUCKETS)
    write(rig.frame(dict.fromkeys(range(20), ("c", 0, 0))), f"db.{table}", client=rig.client)
    ((snapshot,),) = rig.sql(f"SELECT snapshot_id FROM {{db}}.{table}.snapshots")
    counted = rig.spark.sql(f"SELECT id, land, v + 1 AS v, ts FROM {rig.db}.{table} VERSION AS OF {snapshot}")
    report = rig.upsert(counted, table, row_mode=row_mode, read_snapshot_id=snapshot, **how)
    assert report.updated == 20
    files = rig.files(table)
    with pytest.raises(Conflict, match=f"changed since snapshot {snapshot}"):
        rig.upsert(counted, table, row_mode=row_mode, read_snapshot_id=snapshot, **how)
    with pytest.raises(Conflict, match=f"changed since snapshot {snapshot}"):
        rig.delete(counted.select("id"), table, row_mode=row_mode, read_snapshot_id=snapshot, **how)
    assert rig.held(table) == dict.fromkeys(range(20), ("c", 1, 0))
    assert rig.files(table) == files


def test_a_delete_goes_by_keys_that_are_named_or_the_tables_own(rig: Rig) -> None:
    rig.create("named")
    model: Model = {one: ("a", one, one) for one in range(5)}
    write(rig.frame(model), "db.named", client=rig.client)
    other = rig.frame({1: ("other", 7, 7), 9: ("a", 9, 9)})
    with pytest.raises(Unwritable, match="no identifier fields; name the key columns"):
        rig.delete(other, "named")
    assert rig.delete(other, "named", keys=["id"]).deleted == 1
    rig.sql("ALTER TABLE {db}.named SET IDENTIFIER FIELDS id")
    assert rig.delete(rig.frame({2: ("other", 7, 7)}), "named").deleted == 1
    assert rig.delete(rig.frame({3: ("other", 7, 7)}), "named", **TASKS).deleted == 1
    assert rig.held("named").keys() == {0, 4}


@pytest.mark.parametrize("mode", ["append", "overwrite", "overwrite_partitions"])
def test_columns_that_do_not_fit_are_told_by_the_driver_before_a_task_starts(rig: Rig, mode: str) -> None:
    table = f"fits_{mode}"
    rig.create(table)
    begun = rig.spark.sparkContext.accumulator(0)

    def count(batches: Any) -> Any:
        for batch in batches:
            begun.add(1)
            yield batch

    frame = rig.frame({1: ("a", 1, 1)})
    for wrong, said in (
        (frame.selectExpr("*", "1 AS extra"), "the table has no column extra; it has id, land, v, ts"),
        (frame.selectExpr("id", "land", "array(v) AS v", "ts"), "v"),
    ):
        counted = wrong.mapInArrow(count, wrong.schema)
        with pytest.raises(Unwritable, match=said):
            write(counted, f"db.{table}", client=rig.client, mode=mode)  # type: ignore[call-overload]
    assert begun.value == 0
    assert rig.held(table) == {}


def test_a_version_1_table_takes_no_upserts_from_spark(rig: Rig) -> None:
    rig.create("old", version=1)
    files = rig.files("old")
    for change in (rig.upsert, rig.delete):
        with pytest.raises(Unwritable, match="version 1 supports only appends"):
            change(rig.frame({1: ("a", 1, 1)}), "old", keys=["id"], **TASKS)
    assert rig.files("old") == files


def test_a_table_made_with_its_rows_gets_no_refusal_of_its_reports(rig: Rig) -> None:
    rig.sql("CREATE TABLE {db}.source (id bigint) USING iceberg TBLPROPERTIES ('seamark.scan-planning-mode'='client')")
    rig.sql("INSERT INTO {db}.source VALUES (1), (2)")
    rig.sql("CREATE TABLE {db}.made USING iceberg AS SELECT * FROM {db}.source WHERE id > 1")
    assert rig.sql("SELECT * FROM {db}.made") == [(2,)]
