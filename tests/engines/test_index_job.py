"""Tests of indexes that a Spark job builds on Spark's files. Unmodified Spark and PyIceberg then read fewer files.

The proof is the same as in `test_planning.py`: the test moves data files that the plan leaves out away while an engine
runs its query. In `db.wide`, bounds prune no file, because every file spans the range of every column.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import Explanation
from seamark.connector.index.builds import ClusterFailed, GroupLimits, InProcessWorkers, build
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex
from seamark.connector.spark.index_job import SparkWorkers
from tests.connector import lake
from tests.engines.test_planning import PlanningEngines
from tests.services.s3 import S3
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

FILES, ID_STEP = 6, 6
BRANCH_FILES = 2
"""The number of files that only a branch has."""
SPARK_INDEXES = {"ids": "bloom(id, fpp=0.0001)", "land": "bitmap(land)", "key": "record(st.b, small)"}
IN_PROCESS_INDEXES = {
    "decimals": "bloom(n, fpp=0.0001)",
    "instants": "bloom(at, fpp=0.0001)",
    "doubles": "bloom(f, fpp=0.0001)",
    "bytes": "bloom(bin, fpp=0.0001)",
    "extra": "bitmap(extra)",
    "discount": "bitmap(discount)",
    "qty": "bitmap(qty)",
    "nested": "bitmap(st.a)",
    "days": "bitmap(d)",
    "flags": "bitmap(flag)",
    "lowered": "bitmap(lower(land))",
}
"""Indexes that the test builds in its own process, which takes less time."""
INDEXES = SPARK_INDEXES | IN_PROCESS_INDEXES


@dataclass(frozen=True)
class IndexedLakeTables:
    engines: PlanningEngines
    client: IndexClient
    before_rename: int
    """A snapshot with 4 files, from the time before `country` became `land` and `extra` was added."""
    build_reports: tuple[Any, ...]

    def explain(self, where: str, table: str = "wide") -> Explanation:
        return self.client.explain(f"db.{table}", where)


class InterruptedWorkers(SparkWorkers):
    """Spark's workers that call functions before certain waves of tasks.

    The argument `wave1`, for example, is called before the second wave. `groups` has the sizes of the groups of data
    files in each wave.
    """

    def __init__(self, spark: SparkSession, **waves: Callable[[], Any]) -> None:
        super().__init__(spark)
        self._callbacks = {int(name.removeprefix("wave")): callback for name, callback in waves.items()}
        self.groups: list[list[int]] = []

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> list[WrittenIndex]:
        if callback := self._callbacks.get(len(self.groups)):
            callback()
        self.groups.append([len(group) for group in groups])
        return super().run(task, groups)


@pytest.fixture(scope="module")
def wide_lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexedLakeTables]:
    home = tmp_path_factory.mktemp("indexed")
    with Seamark(home, env={"SEAMARK_LOG_FORMAT": "json"}) as server:
        plain_server = Seamark(
            tmp_path_factory.mktemp("alone"),
            warehouse=server.warehouse,
            database=f"sqlite:///{home / 'seamark.db'}",
            env={"SEAMARK_SCAN_PLANNING_MODE": "client"},
        )
        client = IndexClient(server.base_url)
        with (
            plain_server,
            RestCatalog("indexed", uri=server.base_url) as planned_pyiceberg,
            RestCatalog("alone", uri=plain_server.base_url) as unplanned_pyiceberg,
        ):
            planned_catalog, unplanned_catalog = (
                new_catalog(spark, server.base_url),
                new_catalog(spark, plain_server.base_url),
            )
            spark.sql(f"CREATE NAMESPACE {planned_catalog}.db")
            engines = PlanningEngines(
                server, spark, planned_catalog, unplanned_catalog, planned_pyiceberg, unplanned_pyiceberg
            )
            snapshot_before_rename = _create_wide_table(engines)
            index_properties = ", ".join(f"'seamark.index.{name}' = '{text}'" for name, text in INDEXES.items())
            engines.run_sql(f"ALTER TABLE {{db}}.wide SET TBLPROPERTIES ({index_properties})")
            spark_workers = SparkWorkers(spark)
            reports = tuple(
                build(client, "db.wide", name, spark_workers, limits=GroupLimits(files=4)) for name in SPARK_INDEXES
            )
            in_process_workers = InProcessWorkers()
            reports += tuple(
                build(client, "db.wide", name, in_process_workers, limits=GroupLimits(files=4))
                for name in IN_PROCESS_INDEXES
            )
            yield IndexedLakeTables(engines, client, snapshot_before_rename, reports)
        client.close()


def _create_wide_table(engines: PlanningEngines) -> int:
    """Create 3 snapshots with 2 files each, and a branch with two additional files.

    File k has the ids k, k + 6, …, k + 294. Before the third snapshot, the column `country` is renamed to `land`.

    Returns:
        The id of the second snapshot, in which the column has its first name.
    """
    engines.run_sql(
        "CREATE TABLE {db}.wide (id bigint, p string, country string, discount int, qty int, "
        "st struct<a: int, b: string>, small smallint, at timestamp, d date, n decimal(9, 2), f double, flag boolean, "
        "bin binary) USING iceberg PARTITIONED BY (p)"
    )
    snapshot_before_rename = 0
    for part in range(3):
        if part == 2:
            snapshot_before_rename = engines.run_sql("SELECT snapshot_id FROM {db}.wide.refs WHERE name = 'main'")[0][0]
            engines.run_sql("ALTER TABLE {db}.wide RENAME COLUMN country TO land")
            engines.run_sql("ALTER TABLE {db}.wide ADD COLUMN extra string")
        engines.run_sql(f"INSERT INTO {{db}}.wide {_build_rows_query(part)}")
    engines.run_sql("ALTER TABLE {db}.wide CREATE BRANCH dev")
    engines.run_sql(f"INSERT INTO {{db}}.wide.branch_dev {_build_rows_query(3)}")
    assert engines.run_sql("SELECT count(*) FROM {db}.wide.files") == [(FILES,)]
    return snapshot_before_rename


def _build_rows_query(part: int) -> str:
    """Return a query for the rows of a part, with the columns of the table `wide`.

    j counts from 0 to 49, and k has two values of the part. The first and the last j get the least and the greatest
    text and struct, so that all files have the same bounds of them. The values of discount (j % 11) and qty depend on
    each other.
    """
    text_expression = "CASE j WHEN 0 THEN 'Aa' WHEN 49 THEN 'Zz' WHEN 10 THEN NULL ELSE concat('M', k) END"
    extra_column = f", {text_expression}" if part >= 2 else ""
    return (
        f"SELECT id, if(k % 2 = 0, 'x', 'y'), {text_expression}, int(j % 11), int((j + 3) % 11), "
        f"named_struct('a', if(j IN (0, 49), int(j), int(k)), 'b', concat('k', id)), smallint(j), "
        f"timestampadd(HOUR, id, timestamp'2026-01-01'), date_add(date'2020-01-01', int(id)), id / 4, id * 1.5D, "
        f"j % 2 = 0, cast(concat('b', id) AS binary){extra_column} "
        f"FROM (SELECT *, k + {ID_STEP} * j AS id "
        f"FROM (SELECT id div 2 AS j, {2 * part} + id % 2 AS k FROM range(100)))"
    )


def test_job_builds_every_index_for_all_files(wide_lake: IndexedLakeTables) -> None:
    for report in wide_lake.build_reports:
        assert report.json["state"] == "completed"
        assert (report.progress.files_done, report.files_not_indexed, report.progress.index_files) == (
            FILES + BRANCH_FILES,
            0,
            2,
        )
        assert report.progress.rows_done == 400  # Each of the eight files has 50 rows.
    indexes = wide_lake.client.indexes("db.wide")
    assert {index.name: (index.health, index.files, index.lag_files) for index in indexes} == dict.fromkeys(
        INDEXES, ("ok", FILES, 0)
    )


@dataclass(frozen=True)
class IndexedFilter:
    """A filter in the forms of both engines, the index that it uses, and the number of files that the plan keeps."""

    index: str
    sql: str
    filter_json: dict[str, Any]
    files: int
    pyiceberg_filter: str | None


def _build_equality(name: str, value: Any) -> dict[str, Any]:
    return {"type": "eq", "term": name, "value": value}


CASES = (
    IndexedFilter("ids", "id = 151", _build_equality("id", 151), 1, "id = 151"),
    IndexedFilter("ids", "id IN (151, 152)", {"type": "in", "term": "id", "values": [151, 152]}, 2, "id in (151, 152)"),
    IndexedFilter("decimals", "n = 37.75", _build_equality("n", "37.75"), 1, "n = 37.75"),
    IndexedFilter(
        "instants",
        "at = timestamp'2026-01-07 07:00:00'",
        _build_equality("at", "2026-01-07T07:00:00+00:00"),
        1,
        "at = '2026-01-07T07:00:00+00:00'",
    ),
    IndexedFilter("doubles", "f = 226.5", _build_equality("f", 226.5), 1, "f = 226.5"),
    IndexedFilter("bytes", "bin = X'62313531'", _build_equality("bin", "62313531"), 1, None),
    IndexedFilter("land", "land = 'M3'", _build_equality("land", "M3"), 1, "land = 'M3'"),
    IndexedFilter(
        "land",
        "land > 'M2' AND land < 'M4'",
        {
            "type": "and",
            "left": {"type": "gt", "term": "land", "value": "M2"},
            "right": {"type": "lt", "term": "land", "value": "M4"},
        },
        1,
        "land > 'M2' and land < 'M4'",
    ),
    IndexedFilter("extra", "extra = 'M5'", _build_equality("extra", "M5"), 1, "extra = 'M5'"),
    IndexedFilter("nested", "st.a = 3", _build_equality("st.a", 3), 1, "st.a = 3"),
    IndexedFilter("days", "d = date'2020-05-31'", _build_equality("d", "2020-05-31"), 1, "d = '2020-05-31'"),
    IndexedFilter(
        "key",
        "st.b = 'k151' AND small = 25",
        {"type": "and", "left": _build_equality("st.b", "k151"), "right": _build_equality("small", 25)},
        1,
        "st.b = 'k151' and small = 25",
    ),
)


FAST_INDEXES = ("decimals", "nested", "key")
"""The indexes of the fast tier: each kind, one column, a field of a struct, and two columns."""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.index in FAST_INDEXES else pytest.mark.slow) for case in CASES],
    ids=lambda case: f"{case.index}: {case.sql}",
)
def test_spark_and_pyiceberg_read_fewer_files_with_each_kind_of_index(
    wide_lake: IndexedLakeTables, case: IndexedFilter
) -> None:
    engines = wide_lake.engines
    query = f"SELECT * FROM {{db}}.wide WHERE {case.sql} ORDER BY id"
    expected = engines.run_unplanned_sql(query)
    assert expected
    explanation = wide_lake.explain(case.sql)
    files_left = {stage.name: stage.files_left for stage in explanation.stages}
    assert (files_left["column_stats"], explanation.files) == (FILES, case.files)
    assert case.index in {index["name"] for index in explanation.indexes}
    plan = engines.plan("wide", case.filter_json)
    assert len(plan) == case.files
    with engines.hide_other_files("wide", plan) as hidden_files, engines.record_requests() as requests:
        assert hidden_files >= FILES - case.files
        assert engines.run_sql(query) == expected
        if case.pyiceberg_filter is not None:
            rows = (
                engines.planned_pyiceberg.load_table("db.wide")
                .scan(case.pyiceberg_filter, selected_fields=("id",))
                .to_arrow()
            )
            assert sorted(rows["id"].to_pylist()) == [row[0] for row in expected]
    assert requests.count("planTableScan") == (1 if case.pyiceberg_filter is None else 2)


@pytest.mark.slow
def test_filter_for_two_values_that_never_occur_in_one_row_reads_no_file(wide_lake: IndexedLakeTables) -> None:
    engines = wide_lake.engines
    for term, value in (("discount", 3), ("qty", 6), ("qty", 7)):
        assert wide_lake.explain(f"{term} = {value}").files == FILES
    assert wide_lake.explain("discount = 3 AND qty = 6").files == FILES
    assert wide_lake.explain("discount = 3 AND qty = 7").files == 0
    plan = engines.plan(
        "wide", {"type": "and", "left": _build_equality("discount", 3), "right": _build_equality("qty", 7)}
    )
    with engines.hide_other_files("wide", plan):
        assert engines.run_sql("SELECT id FROM {db}.wide WHERE discount = 3 AND qty = 7") == []
        rows = engines.planned_pyiceberg.load_table("db.wide").scan("discount = 3 and qty = 7").to_arrow()
    assert (plan, len(rows)) == ([], 0)


@pytest.mark.slow
def test_older_snapshots_and_branches_use_the_same_index_files(wide_lake: IndexedLakeTables) -> None:
    engines = wide_lake.engines
    old_options = {"snapshot-id": wide_lake.before_rename}
    assert len(engines.plan("wide", _build_equality("country", "M3"), **old_options)) == 1
    plan = engines.plan("wide", _build_equality("id", 151), **old_options)
    with engines.hide_other_files("wide", plan) as hidden_files:
        query = f"SELECT country FROM {{db}}.wide VERSION AS OF {wide_lake.before_rename} WHERE id = 151"
        assert engines.run_sql(query) == [("M1",)]
        rows = (
            engines.planned_pyiceberg.load_table("db.wide")
            .scan("id = 151", snapshot_id=wide_lake.before_rename)
            .to_arrow()
        )
    assert (len(plan), hidden_files, rows["country"].to_pylist()) == (1, FILES + BRANCH_FILES - 1, ["M1"])
    dev_snapshot_id = engines.run_unplanned_sql("SELECT snapshot_id FROM {db}.wide.refs WHERE name = 'dev'")[0][0]
    plan = engines.plan("wide", _build_equality("id", 150), **{"snapshot-id": dev_snapshot_id})
    with engines.hide_other_files("wide", plan):
        rows = engines.run_sql("SELECT id FROM {db}.wide VERSION AS OF 'dev' WHERE id = 150")
    assert (rows, len(plan)) == ([(150,), (150,)], 2)


def _create_small_table(lake: IndexedLakeTables, name: str) -> None:
    """Create a table of 6 files, each spanning all ids, and a Bloom filter `i` that covers none of the files."""
    lake.engines.run_sql(f"CREATE TABLE {{db}}.{name} (id bigint) USING iceberg")
    for part in range(6):
        _append_part(lake, name, part)
    lake.client.put_index(f"db.{name}", "i", kind="bloom", columns=["id"], fpp=1e-6)


def _append_part(lake: IndexedLakeTables, name: str, part: int) -> None:
    lake.engines.run_sql(f"INSERT INTO {{db}}.{name} SELECT /*+ COALESCE(1) */ {part} + 100 * id FROM range(20)")


@pytest.mark.slow
def test_killed_build_is_continued_and_includes_files_of_a_writer(
    wide_lake: IndexedLakeTables, spark: SparkSession
) -> None:
    class JobKilled(Exception):
        pass

    def kill() -> None:
        raise JobKilled

    _create_small_table(wide_lake, "cut")
    one_file_groups = GroupLimits(files=1)
    # Each group has one file. The build is killed before Spark starts the second wave of groups.
    with pytest.raises(JobKilled):
        build(wide_lake.client, "db.cut", "i", InterruptedWorkers(spark, wave1=kill), limits=one_file_groups)
    assert wide_lake.client.index("db.cut", "i").files == 4
    # A writer appends a file before the first wave of the next build.
    workers = InterruptedWorkers(spark, wave0=lambda: _append_part(wide_lake, "cut", 7))
    report = build(wide_lake.client, "db.cut", "i", workers, limits=one_file_groups)
    assert workers.groups == [[1, 1], [1]]
    assert report.progress.files_done == 3
    assert wide_lake.client.index("db.cut", "i").health == "ok"
    plan = wide_lake.engines.plan("cut", _build_equality("id", 1007))
    with wide_lake.engines.hide_other_files("cut", plan):
        assert wide_lake.engines.run_sql("SELECT id FROM {db}.cut WHERE id = 1007") == [(1007,)]
    assert len(plan) == 1


def test_failed_task_is_reported_in_one_line_and_rolls_the_build_back(
    wide_lake: IndexedLakeTables, spark: SparkSession
) -> None:
    class WorkersWithUnwritableFolder(SparkWorkers):
        def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> list[WrittenIndex]:
            return super().run(replace(task, folder="file:///proc/nowhere"), groups)

    wide_lake.client.put_index("db.wide", "more", kind="bloom", columns=["qty"])
    with pytest.raises(ClusterFailed, match=r"^A Spark job failed: .*/proc/nowhere.*$"):
        build(wide_lake.client, "db.wide", "more", WorkersWithUnwritableFolder(spark))
    (last_instant,) = wide_lake.client.timeline("db.wide", newest_first=True, limit=1)
    assert (last_instant.state, "/proc/nowhere" in last_instant.summary["reason"]) == ("rolled_back", True)
    wide_lake.client.drop_index("db.wide", "more")


@pytest.mark.slow
def test_results_are_right_after_a_compaction_and_a_build_covers_the_new_files(
    wide_lake: IndexedLakeTables, spark: SparkSession
) -> None:
    _create_small_table(wide_lake, "compacted")
    build(wide_lake.client, "db.compacted", "i", SparkWorkers(spark))
    assert wide_lake.explain("id = 1003", "compacted").files == 1
    wide_lake.engines.run_sql(
        "CALL {cat}.system.rewrite_data_files(table => 'db.compacted', options => map('rewrite-all','true'))"
    )
    assert wide_lake.client.index("db.compacted", "i").health == "behind"
    for value, expected in ((1003, [(1003,)]), (1050, [])):
        assert wide_lake.engines.run_sql(f"SELECT id FROM {{db}}.compacted WHERE id = {value}") == expected
    report = build(wide_lake.client, "db.compacted", "i", SparkWorkers(spark))
    assert report.progress.files_done == 1
    assert wide_lake.explain("id = 1003", "compacted").files == 1
    assert wide_lake.explain("id = 1050", "compacted").files == 0
    assert wide_lake.engines.run_sql("SELECT id FROM {db}.compacted WHERE id = 1050") == []


@pytest.mark.slow
def test_vended_credentials_give_access_to_files_in_s3(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    env = {**s3.build_seamark_env(), "SEAMARK_S3_CLIENT_ACCESS": "static"}
    with Seamark(tmp_path / "s3", warehouse=f"s3://{s3.create_bucket()}/warehouse", env=env) as server:
        lake.create_lake_table(server.base_url)
        lake.append_parts(server.base_url, "db.t", lake.spread_ids(3))
        client = IndexClient(server.base_url)
        client.put_index("db.t", "i", kind="record", columns=["id"])
        report = build(client, "db.t", "i", InProcessWorkers())
        assert (report.json["state"], report.progress.files_done) == ("completed", 3), report.skipped
        assert report.json["folder"].startswith("s3://")
        assert client.explain("db.t", "id = 13").files == 1
        client.close()


@pytest.mark.slow
def test_build_command_starts_its_own_spark(wide_lake: IndexedLakeTables) -> None:
    _create_small_table(wide_lake, "own")
    argv = [str(Path(sys.executable).parent / "seamark"), "index", "build", "db.own", "i", "--engine", "spark"]
    environment = {**os.environ, "SEAMARK_URL": wide_lake.engines.server.base_url, "SPARK_MASTER": "local[2]"}
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "Index i: 6 data files, 120 rows" in result.stdout
    assert wide_lake.client.index("db.own", "i").health == "ok"
