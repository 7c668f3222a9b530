"""Tests that the server plans the scans of unmodified Spark and PyIceberg, which open only the returned files.

To prove it, the test moves every other data file away while the engine runs its query. The expected rows are those of
the same engine when it plans itself.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from tests.engines.conftest import collect_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog


@dataclass(frozen=True)
class PlanningEngines:
    """Two servers on the same tables, each with a catalog in Spark and in PyIceberg.

    The clients of the second server plan their own scans.
    """

    server: Seamark
    spark: SparkSession
    planned_catalog: str
    unplanned_catalog: str
    planned_pyiceberg: Catalog
    unplanned_pyiceberg: Catalog

    def run_sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run the statement in a Spark catalog whose scans the server plans.

        In the statement, `{cat}` is replaced by the catalog, and `{db}` by the catalog and the namespace.
        """
        return collect_rows(
            self.spark.sql(
                statement.replace("{db}", f"{self.planned_catalog}.db").replace("{cat}", self.planned_catalog)
            )
        )

    def run_unplanned_sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run the statement in a Spark catalog that plans itself."""
        return collect_rows(
            self.spark.sql(
                statement.replace("{db}", f"{self.unplanned_catalog}.db").replace("{cat}", self.unplanned_catalog)
            )
        )

    def plan(self, table: str, where: Any = True, **fields: Any) -> list[str]:
        """Return the data files in all pages of the server's plan."""
        path = f"/v1/namespaces/db/tables/{table}"
        answer = self._post(f"{path}/plan", {"filter": where, **fields})
        assert answer["status"] == "completed"
        answers = [
            answer,
            *(self._post(f"{path}/tasks", {"plan-task": plan_task}) for plan_task in answer.get("plan-tasks", [])),
        ]
        return [task["data-file"]["file-path"] for answer in answers for task in answer["file-scan-tasks"]]

    def _post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(self.server.base_url + path, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    @contextmanager
    def record_requests(self) -> Iterator[list[str]]:
        """Yield a list. At the end of the block, it receives the operations that the server answered in the block."""
        log_size = self.server.log.stat().st_size
        operations: list[str] = []
        yield operations
        with self.server.log.open() as log:
            log.seek(log_size)
            lines = [json.loads(line) for line in log if line.startswith("{")]
        assert [line for line in lines if line.get("status", 200) >= 500] == []
        operations += [line["operation"] for line in lines if "operation" in line]

    @contextmanager
    def hide_other_files(self, table: str, kept_paths: list[str]) -> Iterator[int]:
        """Move all data files of the table away within the block, except `kept_paths`.

        The block gets the number of moved files.
        """
        all_paths = {path for (path,) in self.run_unplanned_sql(f"SELECT file_path FROM {{db}}.{table}.all_data_files")}
        assert set(kept_paths) <= all_paths
        hidden_paths = [Path(path.removeprefix("file:")) for path in all_paths - set(kept_paths)]
        for path in hidden_paths:
            path.rename(f"{path}.away")
        try:
            yield len(hidden_paths)
        finally:
            for path in hidden_paths:
                Path(f"{path}.away").rename(path)


@pytest.fixture(scope="module")
def engines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanningEngines]:
    """Yield the engines with two servers over one database, of which only the first plans scans.

    A plan of at most three files is in one answer. A larger plan has pages of two files. So both kinds of answers
    occur.
    """
    home = tmp_path_factory.mktemp("planned")
    page_settings = {"SEAMARK_PLAN_INLINE_LIMIT": "3", "SEAMARK_PLAN_PAGE_SIZE": "2"}
    with Seamark(home, env={"SEAMARK_LOG_FORMAT": "json", **page_settings}) as server:
        plain_server = Seamark(
            tmp_path_factory.mktemp("alone"),
            warehouse=server.warehouse,
            database=f"sqlite:///{home / 'seamark.db'}",
            env={"SEAMARK_SCAN_PLANNING_MODE": "client"},
        )
        with (
            plain_server,
            RestCatalog("planned", uri=server.base_url) as planned_pyiceberg,
            RestCatalog("alone", uri=plain_server.base_url) as unplanned_pyiceberg,
        ):
            planned_catalog, unplanned_catalog = (
                new_catalog(spark, server.base_url),
                new_catalog(spark, plain_server.base_url),
            )
            spark.sql(f"CREATE NAMESPACE {planned_catalog}.db")
            new_engines = PlanningEngines(
                server, spark, planned_catalog, unplanned_catalog, planned_pyiceberg, unplanned_pyiceberg
            )
            _create_tables(new_engines)
            yield new_engines


def _create_tables(engines: PlanningEngines) -> None:
    """Create the tables `ranges`, `parts` (partitioned by a string) and `hashed` (partitioned by buckets of the ids).

    `ranges` has six files with ten ids each. In the fifth file all texts are null, and in the last all structs.
    """
    engines.run_sql(
        "CREATE TABLE {db}.ranges (id bigint, s string, st struct<a: int>, d date, at timestamp, n decimal(9, 2)) "
        "USING iceberg"
    )
    for first_id in range(0, 60, 10):
        text_expression = "NULL" if first_id == 40 else "concat('n', id)"
        struct_expression = "NULL" if first_id == 50 else "named_struct('a', int(id) * 10)"
        engines.run_sql(
            f"INSERT INTO {{db}}.ranges SELECT /*+ COALESCE(1) */ id, {text_expression}, {struct_expression}, "
            f"date_add(date'2026-01-01', int(id)), timestampadd(HOUR, id, timestamp'2026-01-01'), id / 4 "
            f"FROM range({first_id}, {first_id + 10})"
        )
    engines.run_sql("CREATE TABLE {db}.parts (id bigint, p string) USING iceberg PARTITIONED BY (p)")
    engines.run_sql(
        "INSERT INTO {db}.parts SELECT id, element_at(array('a', 'b', NULL), int(id % 3) + 1) FROM range(30)"
    )
    engines.run_sql("CREATE TABLE {db}.hashed (id bigint, p int) USING iceberg PARTITIONED BY (bucket(4, id))")
    engines.run_sql("INSERT INTO {db}.hashed SELECT id, int(id % 7) FROM range(100)")


def _build_equality(name: Any, value: Any) -> dict[str, Any]:
    return {"type": "eq", "term": name, "value": value}


def _build_conjunction(left: Any, right: Any, kind: str = "and") -> dict[str, Any]:
    return {"type": kind, "left": left, "right": right}


@dataclass(frozen=True)
class FilterForms:
    """One filter as SQL, as the JSON of a plan and, if PyIceberg supports it, in PyIceberg's syntax."""

    name: str
    table: str
    sql: str
    filter_json: dict[str, Any]
    files: int
    """The number of files that the server keeps."""
    pyiceberg_filter: str | None


CASES = (
    FilterForms("eq", "ranges", "id = 13", _build_equality("id", 13), 1, "id = 13"),
    FilterForms("not-eq", "parts", "p <> 'a'", {"type": "not-eq", "term": "p", "value": "a"}, 2, "p != 'a'"),
    FilterForms("lt", "ranges", "id < 13", {"type": "lt", "term": "id", "value": 13}, 2, "id < 13"),
    FilterForms("gt", "ranges", "id > 47", {"type": "gt", "term": "id", "value": 47}, 2, "id > 47"),
    FilterForms(
        "in", "ranges", "id IN (3, 4, 55)", {"type": "in", "term": "id", "values": [3, 4, 55]}, 2, "id in (3, 4, 55)"
    ),
    FilterForms(
        "starts-with",
        "ranges",
        "s LIKE 'n2%'",
        {"type": "starts-with", "term": "s", "value": "n2"},
        2,
        "s like 'n2%'",
    ),
    FilterForms("is-null", "ranges", "s IS NULL", {"type": "is-null", "term": "s"}, 1, "s is null"),
    FilterForms("not-null", "ranges", "s IS NOT NULL", {"type": "not-null", "term": "s"}, 5, "s is not null"),
    FilterForms(
        "and",
        "ranges",
        "id >= 15 AND s < 'n3'",
        _build_conjunction({"type": "gt-eq", "term": "id", "value": 15}, {"type": "lt", "term": "s", "value": "n3"}),
        2,
        "id >= 15 and s < 'n3'",
    ),
    FilterForms(
        "or",
        "ranges",
        "id = 5 OR s = 'n31'",
        _build_conjunction(_build_equality("id", 5), _build_equality("s", "n31"), "or"),
        2,
        "id = 5 or s = 'n31'",
    ),
    FilterForms(
        "not",
        "parts",
        "p NOT IN ('a', 'c')",
        _build_conjunction(
            {"type": "not-null", "term": "p"},
            {"type": "not", "child": {"type": "in", "term": "p", "values": ["a", "c"]}},
        ),
        1,
        "p is not null and not (p in ('a', 'c'))",
    ),
    FilterForms("a partition that is null", "parts", "p IS NULL", {"type": "is-null", "term": "p"}, 1, "p is null"),
    FilterForms(
        "a transform",
        "hashed",
        "{cat}.system.bucket(4, id) = 1",
        _build_equality({"type": "transform", "transform": "bucket[4]", "term": "id"}, 1),
        1,
        None,
    ),
    FilterForms("a bucket by its column", "hashed", "id = 42", _build_equality("id", 42), 1, "id = 42"),
    FilterForms("nested", "ranges", "st.a = 250", _build_equality("st.a", 250), 1, "st.a = 250"),
    FilterForms("a date", "ranges", "d = date'2026-02-01'", _build_equality("d", "2026-02-01"), 1, "d = '2026-02-01'"),
    FilterForms(
        "a timestamp",
        "ranges",
        "at < timestamp'2026-01-01 04:00:00'",
        {"type": "lt", "term": "at", "value": "2026-01-01T04:00:00+00:00"},
        1,
        "at < '2026-01-01T04:00:00+00:00'",
    ),
    FilterForms("a decimal", "ranges", "n = 3.25", _build_equality("n", "3.25"), 1, "n = 3.25"),
)


SPARK_CASES = {"in", "not", "a transform", "a timestamp"}
"""The cases of the fast tier, in which Spark's requests differ from PyIceberg's.

PyIceberg runs all cases.
"""


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in SPARK_CASES else pytest.mark.slow) for case in CASES],
)
def test_spark_reads_only_the_files_that_the_server_returns(engines: PlanningEngines, case: FilterForms) -> None:
    query = f"SELECT * FROM {{db}}.{case.table} WHERE {case.sql} ORDER BY id"
    expected = engines.run_unplanned_sql(query)
    plan = engines.plan(case.table, case.filter_json)
    assert len(plan) == case.files
    with engines.hide_other_files(case.table, plan) as hidden_files, engines.record_requests() as requests:
        assert hidden_files
        assert engines.run_sql(query) == expected
    assert expected
    assert requests.count("planTableScan") == 1
    if case.files > 3:
        assert "fetchScanTasks" in requests


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.pyiceberg_filter is not None], ids=lambda case: case.name
)
def test_pyiceberg_reads_only_the_files_that_the_server_returns(engines: PlanningEngines, case: FilterForms) -> None:
    assert case.pyiceberg_filter is not None
    unplanned_rows = engines.unplanned_pyiceberg.load_table(f"db.{case.table}").scan(case.pyiceberg_filter)
    with engines.record_requests() as requests:
        expected = _sort_rows(unplanned_rows.to_arrow())
    assert "planTableScan" not in requests
    plan = engines.plan(case.table, case.filter_json)
    scan = engines.planned_pyiceberg.load_table(f"db.{case.table}").scan(case.pyiceberg_filter)
    with engines.hide_other_files(case.table, plan), engines.record_requests() as requests:
        assert _sort_rows(scan.to_arrow()) == expected
        assert sorted(task.file.file_path for task in scan.plan_files()) == sorted(plan)
        count = scan.count()
    assert count == unplanned_rows.count(), (
        "for p != 'a' both differ from the number of rows, because PyIceberg counts nulls without reading them"
    )
    assert expected
    assert "planTableScan" in requests


def _sort_rows(table: Any) -> list[dict[str, Any]]:
    return sorted(table.to_pylist(), key=lambda row: row["id"])


@pytest.mark.slow
def test_sparks_metrics_count_the_rows_of_the_returned_file_only(engines: PlanningEngines) -> None:
    """Only Iceberg's own planner sets the metrics of files and manifests. With the server's plans, they stay zero."""
    record_counts = engines.run_unplanned_sql("SELECT file_path, record_count FROM {db}.hashed.files")
    (kept_path,) = engines.plan("hashed", _build_equality("id", 42))
    frame = engines.spark.sql(f"SELECT * FROM {engines.planned_catalog}.db.hashed WHERE id = 42")
    assert len(frame.collect()) == 1
    plan = frame._jdf.queryExecution().executedPlan()
    assert _read_metric(plan, "numSplits", "BatchScan") == 1
    # The table has 100 rows.
    assert _read_metric(plan, "numOutputRows", "BatchScan") == dict(record_counts)[kept_path] < 100


def _read_metric(plan: Any, name: str, node: str) -> int:
    """Return the sum of a metric over the nodes of the plan whose names begin with `node`."""
    if plan.nodeName().startswith("AdaptiveSparkPlan"):
        return _read_metric(plan.executedPlan(), name, node)
    if plan.nodeName().startswith(node):
        return int(plan.metrics().apply(name).value())
    children = plan.children()
    return sum(_read_metric(children.apply(number), name, node) for number in range(children.size()))


@pytest.mark.slow
def test_aggregates_that_spark_computes_from_file_metrics_equal_aggregates_of_the_rows(
    engines: PlanningEngines,
) -> None:
    """Spark requests the bounds of the columns in a second plan."""
    query = "SELECT count(*), min(id), max(id), max(d) FROM {db}.ranges"
    with engines.record_requests() as requests:
        actual = engines.run_sql(query)
    assert actual == engines.run_unplanned_sql(query)
    assert "planTableScan" in requests


@pytest.mark.slow
def test_limit_returns_the_requested_number_of_rows(engines: PlanningEngines) -> None:
    assert len(engines.run_sql("SELECT * FROM {db}.ranges LIMIT 12")) == 12
    assert len(engines.run_sql("SELECT * FROM {db}.ranges LIMIT 1000")) == 60


@pytest.mark.parametrize("mode", [pytest.param("copy-on-write", marks=pytest.mark.slow), "merge-on-read"])
def test_deleted_rows_stay_deleted(engines: PlanningEngines, mode: str) -> None:
    table = f"deleted_{mode[:4]}".replace("-", "_")
    engines.run_sql(
        f"CREATE TABLE {{db}}.{table} (id bigint, v string) USING iceberg PARTITIONED BY (truncate(10, id)) "
        f"TBLPROPERTIES ('format-version'='2', 'write.delete.mode'='{mode}', 'write.update.mode'='{mode}')"
    )
    engines.run_sql(f"INSERT INTO {{db}}.{table} SELECT id, concat('v', id) FROM range(50)")
    engines.run_sql(f"DELETE FROM {{db}}.{table} WHERE id % 3 = 0 AND id < 40")
    engines.run_sql(f"UPDATE {{db}}.{table} SET v = 'new' WHERE id IN (1, 45)")
    engines.run_sql(f"INSERT INTO {{db}}.{table} VALUES (3, 'again')")
    expected = {n: "new" if n in (1, 45) else f"v{n}" for n in range(50) if n % 3 or n >= 40} | {3: "again"}
    delete_file_count = engines.run_sql(f"SELECT count(*) FROM {{db}}.{table}.delete_files")[0][0]
    assert (delete_file_count > 0) == (mode == "merge-on-read")
    with engines.record_requests() as requests:
        assert dict(engines.run_sql(f"SELECT id, v FROM {{db}}.{table}")) == expected
        assert engines.run_sql(f"SELECT count(*) FROM {{db}}.{table} WHERE id < 10") == [(7,)]
    assert "planTableScan" in requests
    pyiceberg_scan = engines.planned_pyiceberg.load_table(f"db.{table}").scan()
    assert {row["id"]: row["v"] for row in pyiceberg_scan.to_arrow().to_pylist()} == expected
    assert pyiceberg_scan.count() == len(expected)
    plan = engines.plan(table, {"type": "lt", "term": "id", "value": 10})
    with engines.hide_other_files(table, plan):
        actual = engines.run_sql(f"SELECT id FROM {{db}}.{table} WHERE id < 10 ORDER BY id")
    assert actual == [(n,) for n in (1, 2, 3, 4, 5, 7, 8)]


def test_snapshots_branches_and_tags_are_planned_with_their_own_schema(engines: PlanningEngines) -> None:
    engines.run_sql("CREATE TABLE {db}.history (id int, v string) USING iceberg")
    engines.run_sql("INSERT INTO {db}.history VALUES (1, 'a')")
    first_snapshot_id = engines.run_sql("SELECT snapshot_id FROM {db}.history.snapshots")[0][0]
    engines.run_sql("ALTER TABLE {db}.history CREATE TAG v1")
    engines.run_sql("ALTER TABLE {db}.history CREATE BRANCH dev")
    engines.run_sql("INSERT INTO {db}.history.branch_dev VALUES (2, 'b')")
    engines.run_sql("ALTER TABLE {db}.history RENAME COLUMN v TO w")
    engines.run_sql("INSERT INTO {db}.history VALUES (3, 'c')")
    with engines.record_requests() as requests:
        assert engines.run_sql("SELECT id FROM {db}.history WHERE w >= 'a' ORDER BY id") == [(1,), (3,)]
        assert engines.run_sql("SELECT id FROM {db}.history VERSION AS OF 'dev' WHERE id > 0 ORDER BY id") == [
            (1,),
            (2,),
        ]
        assert engines.run_sql("SELECT id, v FROM {db}.history VERSION AS OF 'v1' WHERE v = 'a'") == [(1, "a")]
        assert engines.run_sql(f"SELECT id FROM {{db}}.history VERSION AS OF {first_snapshot_id} WHERE id < 9") == [
            (1,)
        ]
    assert requests.count("planTableScan") == 4
    table = engines.planned_pyiceberg.load_table("db.history")
    with engines.record_requests() as requests:
        assert table.scan("id < 9", snapshot_id=first_snapshot_id).to_arrow()["id"].to_pylist() == [1]
        assert sorted(table.scan().use_ref("dev").to_arrow()["id"].to_pylist()) == [1, 2]
        assert table.scan().use_ref("v1").to_arrow()["id"].to_pylist() == [1]
    assert requests.count("planTableScan") == 3


@pytest.mark.slow
def test_engines_read_partition_values_of_every_kind(engines: PlanningEngines) -> None:
    """Spark uses partition values as column values if possible. PyIceberg fails on values that it cannot parse."""
    engines.run_sql(
        "CREATE TABLE {db}.kinds (id bigint, d date, at timestamp, n decimal(9, 2), s string, b boolean, x binary,"
        " f double) USING iceberg PARTITIONED BY (d, days(at), n, s, b, x, f, truncate(2, s))"
    )
    engines.run_sql(
        "INSERT INTO {db}.kinds VALUES"
        " (1, date'2026-01-02', timestamp'2026-01-02 03:04:05.678', 1.50, 'a\"b/ü', true, X'00FF', 1.5),"
        " (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL),"
        " (3, date'1969-12-31', timestamp'1969-12-31 23:59:59.999', -0.01, '', false, X'', double('infinity')),"
        " (4, date'9999-12-31', timestamp'2026-01-02 03:04:05', 1234567.89, 'c', true, X'41', -0.0D)"
    )
    query = "SELECT *, _partition FROM {db}.kinds ORDER BY id"
    assert engines.run_sql(query) == engines.run_unplanned_sql(query)
    for number in (1, 2, 3, 4):
        assert engines.run_sql(f"SELECT id FROM {{db}}.kinds WHERE id = {number}") == [(number,)]
    assert engines.run_sql("SELECT id FROM {db}.kinds WHERE n < 0") == [(3,)]
    planned_rows = engines.planned_pyiceberg.load_table("db.kinds").scan().to_arrow()
    assert _sort_rows(planned_rows) == _sort_rows(engines.unplanned_pyiceberg.load_table("db.kinds").scan().to_arrow())


def test_version_3_tables_are_planned_by_spark_and_read_by_both(engines: PlanningEngines) -> None:
    engines.run_sql(
        "CREATE TABLE {db}.v3 (id bigint) USING iceberg "
        "TBLPROPERTIES ('format-version'='3', 'write.delete.mode'='merge-on-read')"
    )
    engines.run_sql("INSERT INTO {db}.v3 SELECT id FROM range(20)")
    with engines.record_requests() as requests:
        engines.run_sql("DELETE FROM {db}.v3 WHERE id % 2 = 0")
        assert engines.run_sql("SELECT sum(id), count(*) FROM {db}.v3") == [(100, 10)]
    assert "loadTable" in requests
    assert "planTableScan" not in requests
    with engines.record_requests() as requests:
        actual_rows = engines.planned_pyiceberg.load_table("db.v3").scan().to_arrow()
    assert sorted(actual_rows["id"].to_pylist()) == list(range(1, 20, 2))
    assert "planTableScan" in requests


def test_table_property_leaves_the_planning_of_the_table_to_spark(engines: PlanningEngines) -> None:
    engines.run_sql(
        "CREATE TABLE {db}.own USING iceberg TBLPROPERTIES ('seamark.scan-planning-mode'='client') AS SELECT 1 AS id"
    )
    with engines.record_requests() as requests:
        assert engines.run_sql("SELECT id FROM {db}.own") == [(1,)]
    assert "planTableScan" not in requests


@pytest.mark.slow
def test_engines_wait_for_a_plan_that_is_answered_later(
    engines: PlanningEngines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("later")
    warehouse, database = engines.server.warehouse, f"sqlite:///{engines.server.home / 'seamark.db'}"
    env = {"SEAMARK_LOG_FORMAT": "json", "SEAMARK_PLAN_ASYNC_FILES": "0"}
    with Seamark(home, env=env, warehouse=warehouse, database=database) as server:
        catalog = new_catalog(engines.spark, server.base_url)
        actual = collect_rows(engines.spark.sql(f"SELECT id FROM {catalog}.db.ranges WHERE id > 55"))
        assert sorted(actual) == [(56,), (57,), (58,), (59,)]
        log = server.log.read_text()
        assert '"fetchPlanningResult"' in log
    cold_server = Seamark(home, env={**env, "SEAMARK_PLAN_DISK_BYTES": "0"}, warehouse=warehouse, database=database)
    with cold_server as server, RestCatalog("later", uri=server.base_url) as pyiceberg_catalog:
        assert pyiceberg_catalog.load_table("db.ranges").scan("id > 55").count() == 4


@pytest.mark.slow
def test_earlier_snapshot_is_filtered_by_its_own_column_names(engines: PlanningEngines) -> None:
    """Java's client binds a residual to the current schema, in which the name may belong to another column."""
    engines.run_sql("CREATE TABLE {db}.renamed (id bigint, country string, p int) USING iceberg PARTITIONED BY (p)")
    engines.run_sql(
        "INSERT INTO {db}.renamed SELECT id, element_at(array('FR', 'DE'), int(id % 2) + 1), int(id % 3) FROM range(30)"
    )
    ((snapshot_id,),) = engines.run_sql("SELECT snapshot_id FROM {db}.renamed.snapshots")
    engines.run_sql("ALTER TABLE {db}.renamed RENAME COLUMN country TO nation")
    engines.run_sql("ALTER TABLE {db}.renamed ADD COLUMN country string")
    # A query of an earlier snapshot uses the names of that snapshot. Other queries use the current names.
    for query in (
        "SELECT id FROM {db}.renamed WHERE nation = 'FR' AND p < 2 ORDER BY id",
        "SELECT count(*) FROM {db}.renamed WHERE country IS NULL AND p = 1",
        f"SELECT id FROM {{db}}.renamed VERSION AS OF {snapshot_id} WHERE country = 'FR' AND p < 2 ORDER BY id",
    ):
        assert engines.run_sql(query) == engines.run_unplanned_sql(query) != [], query
    engines.run_sql("INSERT INTO {db}.renamed VALUES (100, 'IT', 0, 'FR')")
    for query in (
        f"SELECT id FROM {{db}}.renamed VERSION AS OF {snapshot_id} WHERE country = 'FR' AND p < 2 ORDER BY id",
        f"SELECT count(*) FROM {{db}}.renamed VERSION AS OF {snapshot_id} WHERE country = 'DE' OR p = 1",
        "SELECT id FROM {db}.renamed WHERE nation = 'DE' ORDER BY id",
        "SELECT id FROM {db}.renamed WHERE country = 'FR'",
    ):
        assert engines.run_sql(query) == engines.run_unplanned_sql(query) != [], query


def test_filters_on_partitions_with_swapped_names_return_the_right_rows(engines: PlanningEngines) -> None:
    """Spark does not filter rows by conditions on partition columns alone, so the files must be right."""
    columns, partitions = "id bigint, a date, b date, x int, y int", "months(a), months(b), bucket(4, x), bucket(4, y)"
    engines.run_sql(f"CREATE TABLE {{db}}.crossed ({columns}) USING iceberg PARTITIONED BY ({partitions})")
    date_expression = "date_add(date'2026-01-01', 31 * int(id % {}))"
    rows = (
        f"SELECT id, {date_expression.format(2)}, {date_expression.format(3)}, int(id % 4), int(id % 5) FROM range(12)"
    )
    engines.run_sql(f"INSERT INTO {{db}}.crossed {rows}")
    for old_name, new_name in (("x", "z"), ("y", "x"), ("z", "y")):
        engines.run_sql(f"ALTER TABLE {{db}}.crossed RENAME COLUMN {old_name} TO {new_name}")
    # Spark filters rows by conditions on buckets.
    query = "SELECT id FROM {db}.crossed WHERE x = 1 AND a < '2026-02-01' ORDER BY id"
    assert engines.run_sql(query) == engines.run_unplanned_sql(query) != []
    for old_name, new_name in (("a", "c"), ("b", "a"), ("c", "b")):
        engines.run_sql(f"ALTER TABLE {{db}}.crossed RENAME COLUMN {old_name} TO {new_name}")
    query_by_partition = "SELECT id FROM {db}.crossed WHERE a < '2026-02-01' ORDER BY id"
    with engines.record_requests() as requests:
        assert engines.run_sql(query_by_partition) == engines.run_unplanned_sql(query_by_partition) != []
    assert "planTableScan" not in requests, "a client that loads the table after the change must plan itself"
    engines.run_sql("ALTER TABLE {db}.crossed SET TBLPROPERTIES ('seamark.scan-planning-mode'='server')")
    with pytest.raises(Exception, match="ambiguous"):
        engines.run_sql(query_by_partition)
    assert engines.run_sql("SELECT count(*) FROM {db}.crossed WHERE id < 5") == [(5,)]
    engines.run_sql("INSERT INTO {db}.crossed VALUES (100, date'2026-03-01', date'2026-01-01', 1, 1)")
    assert engines.run_sql(query) == engines.run_unplanned_sql(query) != []


REUSED_NAME_CASES = [
    # (case, columns before the changes, changes that reuse the name, conditions on the name, a new value of the column)
    ("text", "f int", ("DROP COLUMN f", "ADD COLUMN f string"), ("f = 'x'", "f LIKE 'x%'", "f > 'a'"), "'x'"),
    ("number", "f string", ("DROP COLUMN f", "ADD COLUMN f int"), ("f = 7", "f IN (1, 2)", "f < 3"), "7"),
    ("cased", "f string", ("DROP COLUMN f", "ADD COLUMN F int"), ("f = 7", "F IN (1, 2)"), "7"),
    ("wide", "f int", ("DROP COLUMN f", "ADD COLUMN f double"), ("isnan(f)", "f = 1.5D"), "1.5D"),
    ("deep", "s struct<f:int>", ("DROP COLUMN s.f", "ADD COLUMN s.f string"), ("s.f = 'x'", "s.f <> 'x'"), None),
    (
        "exchanged",
        "f int, g string",
        ("RENAME COLUMN f TO h", "RENAME COLUMN g TO f", "RENAME COLUMN h TO g"),
        ("f = 'v3'", "g = 3", "g < 5 AND f <> 'v1'"),
        "7, 'x'",
    ),
]


CACHED_TABLE_CASES = [
    pytest.param(False, id="table held by the session", marks=pytest.mark.slow),
    pytest.param(True, id="table loaded anew"),
]


@pytest.mark.slow  # `test_filters_on_partitions_with_swapped_names…` is a faster test of reused names.
@pytest.mark.parametrize("is_fresh", CACHED_TABLE_CASES)
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{case[0]}-{mode}")
        for case in REUSED_NAME_CASES
        for mode in ("copy-on-write", "merge-on-read")
    ],
)
def test_reused_column_name_is_read_and_written_before_the_next_data_commit(
    engines: PlanningEngines, case: tuple[Any, ...], mode: str, is_fresh: bool
) -> None:
    """The statements are SELECT, UPDATE, DELETE and MERGE in each write mode.

    The expected rows are those of a Spark that plans itself.
    """
    name, columns, changes, conditions, value = case
    caching_catalog = new_catalog(
        engines.spark, engines.server.base_url, extra={"cache-enabled": str(not is_fresh).lower()}
    )
    caching_engines = replace(engines, planned_catalog=caching_catalog)
    table = f"{name}_{'fresh' if is_fresh else 'held'}"
    expressions = {"f": "int(id)", "s": "named_struct('f', int(id))", "g": "concat('v', id)"}
    inserted_values = [expressions[column_text.split()[0]] for column_text in columns.split(", ")]
    if columns == "f string":
        inserted_values = ["concat('v', id)"]
    modes = ", ".join(f"'write.{operation}.mode'='{mode}'" for operation in ("delete", "update", "merge"))
    for number, condition in enumerate(conditions):
        caching_engines.run_sql(f"DROP TABLE IF EXISTS {{db}}.{table}")
        caching_engines.run_sql(
            f"CREATE TABLE {{db}}.{table} (id bigint, {columns}) USING iceberg TBLPROPERTIES ({modes})"
        )
        caching_engines.run_sql(f"INSERT INTO {{db}}.{table} SELECT id, {', '.join(inserted_values)} FROM range(8)")
        assert caching_engines.run_sql(f"SELECT count(*) FROM {{db}}.{table} WHERE id < 3") == [(3,)]
        for change in changes:
            caching_engines.run_sql(f"ALTER TABLE {{db}}.{table} {change}")
        query = f"SELECT * FROM {{db}}.{table} WHERE {condition} ORDER BY id"
        assert caching_engines.run_sql(query) == engines.run_unplanned_sql(query), condition
        matching_ids = {row[0] for row in engines.run_unplanned_sql(f"SELECT id FROM {{db}}.{table} WHERE {condition}")}
        # The first condition is used by DELETE, the second by UPDATE, and the third by MERGE.
        if number == 0:
            caching_engines.run_sql(f"DELETE FROM {{db}}.{table} WHERE {condition}")
            expected_ids = [(row_id,) for row_id in range(8) if row_id not in matching_ids]
        elif number == 1:
            caching_engines.run_sql(f"UPDATE {{db}}.{table} SET id = id + 100 WHERE {condition}")
            expected_ids = [(row_id + 100 * (row_id in matching_ids),) for row_id in range(8)]
        else:
            source = "(SELECT explode(sequence(0, 7)) AS k)"
            caching_engines.run_sql(
                f"MERGE INTO {{db}}.{table} t USING {source} s ON t.id = s.k AND {condition} "
                "WHEN MATCHED THEN UPDATE SET id = id + 100"
            )
            expected_ids = [(row_id + 100 * (row_id in matching_ids),) for row_id in range(8)]
        assert sorted(engines.run_unplanned_sql(f"SELECT id FROM {{db}}.{table}")) == sorted(expected_ids), (
            mode,
            condition,
        )
        if value is not None:
            caching_engines.run_sql(f"INSERT INTO {{db}}.{table} VALUES (50, {value})")
        assert sorted(caching_engines.run_sql(query)) == sorted(engines.run_unplanned_sql(query)), condition


@pytest.mark.slow
def test_pyiceberg_reads_a_reused_column_name_before_the_next_data_commit(engines: PlanningEngines) -> None:
    engines.run_sql("CREATE TABLE {db}.again (id bigint, f int) USING iceberg")
    engines.run_sql("INSERT INTO {db}.again SELECT id, int(id) FROM range(8)")
    engines.run_sql("ALTER TABLE {db}.again DROP COLUMN f")
    engines.run_sql("ALTER TABLE {db}.again ADD COLUMN f string")
    for where, count in (("f = 'x'", 0), ("f IS NULL", 8), ("id < 3", 3)):
        assert engines.planned_pyiceberg.load_table("db.again").scan(where).to_arrow().num_rows == count


@pytest.mark.slow
def test_partitions_of_a_widened_type_are_read_before_the_next_data_commit(engines: PlanningEngines) -> None:
    engines.run_sql("CREATE TABLE {db}.widened (id bigint, p int) USING iceberg PARTITIONED BY (p)")
    engines.run_sql("INSERT INTO {db}.widened SELECT id, int(id % 3) FROM range(9)")
    engines.run_sql("ALTER TABLE {db}.widened ALTER COLUMN p TYPE bigint")
    query = "SELECT id FROM {db}.widened WHERE p = 2 ORDER BY id"
    with engines.record_requests() as requests:
        assert engines.run_sql(query) == [(2,), (5,), (8,)]
    assert "planTableScan" in requests
