"""Tests of plan tables with unmodified Spark and PyIceberg: the rows of the filtered table, from the files of the plan.

To prove it, the test moves every other data file away while the engine reads the plan table.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import SparkSession

from seamark.connector.client.client import SeamarkClient
from tests.engines.conftest import StorageLake, collect_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog


@dataclass(frozen=True)
class PlanTableEngines:
    """A server, and the catalogs of Spark and PyIceberg that read its tables."""

    server: Seamark
    client: SeamarkClient
    spark: SparkSession
    db: str
    pyiceberg_catalog: RestCatalog

    def run_sql(self, statement: str) -> list[tuple[Any, ...]]:
        return collect_rows(self.spark.sql(statement.replace("{db}", self.db)))

    def list_files(self, table: str, snapshot_id: int | None = None) -> set[str]:
        """Return the data files that Spark finds in the manifests."""
        version = "" if snapshot_id is None else f" VERSION AS OF {snapshot_id}"
        return {path for (path,) in self.run_sql(f"SELECT file_path FROM {{db}}.`{table}`.data_files{version}")}

    @contextmanager
    def hide_files(self, paths: set[str]) -> Iterator[None]:
        hidden_paths = [Path(path.removeprefix("file:")) for path in paths]
        for path in hidden_paths:
            path.rename(f"{path}.away")
        try:
            yield
        finally:
            for path in hidden_paths:
                Path(f"{path}.away").rename(path)


@pytest.fixture(scope="module")
def engines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanTableEngines]:
    with (
        Seamark(tmp_path_factory.mktemp("plan-tables")) as server,
        RestCatalog("plans", uri=server.base_url) as pyiceberg_catalog,
    ):
        client = SeamarkClient(server.base_url)
        new_engines = PlanTableEngines(
            server, client, spark, f"{new_catalog(spark, server.base_url)}.db", pyiceberg_catalog
        )
        new_engines.run_sql("CREATE NAMESPACE {db}")
        yield new_engines
        client.close()


def test_spark_and_pyiceberg_read_only_the_files_of_a_plan_table(engines: PlanTableEngines) -> None:
    engines.run_sql("CREATE TABLE {db}.ranges (id bigint, s string) USING iceberg")
    for first_id in range(0, 60, 10):
        engines.run_sql(
            "INSERT INTO {db}.ranges SELECT /*+ COALESCE(1) */ id, concat('n', id) "
            f"FROM range({first_id}, {first_id + 10})"
        )
    plan = engines.client.plan_table("db.ranges", "id BETWEEN 18 AND 23")
    assert plan.name is not None
    assert (plan.files, plan.considered_files) == (2, 6)
    file_paths = engines.list_files(plan.name)
    assert len(file_paths) == 2
    with engines.hide_files(engines.list_files("ranges") - file_paths):
        assert engines.run_sql(f"SELECT * FROM {{db}}.`{plan.name}` WHERE id BETWEEN 18 AND 23 ORDER BY id") == [
            (number, f"n{number}") for number in range(18, 24)
        ]
        actual_rows = engines.pyiceberg_catalog.load_table(("db", plan.name)).scan().to_arrow()
        assert sorted(actual_rows["id"].to_pylist()) == list(range(10, 30))


def draw_predicates(rng: random.Random) -> Iterator[str]:
    yield from ("id < 0", "true", "note IS NULL", "land = 'l1' AND id > 60")
    for _ in range(4):
        low = rng.randrange(110)
        high = low + rng.choice([0, 3, 12, 50])
        id_list = ", ".join(str(rng.randrange(140)) for _ in range(3))
        yield rng.choice(
            [
                f"id BETWEEN {low} AND {high}",
                f"id IN ({id_list})",
                f"land = 'l{rng.randrange(4)}' AND id <= {high}",
                f"day >= DATE '2026-01-{low % 28 + 1:02}' AND id > {low}",
                f"note > 'n{high}' OR id = {low}",
            ]
        )


MERGE_ON_READ_PROPERTIES = "'write.delete.mode'='merge-on-read', 'write.update.mode'='merge-on-read'"
TABLES = {
    "version 1": "'format-version'='1'",
    "version 2, rows deleted by position": f"'format-version'='2', {MERGE_ON_READ_PROPERTIES}",
    "version 3, deletion vectors": f"'format-version'='3', {MERGE_ON_READ_PROPERTIES}",
}


# tests/planner/test_plan_writer.py covers each format version against Iceberg's own planner.
@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLES)
def test_plan_table_has_the_rows_row_ids_and_files_of_the_filtered_table(engines: PlanTableEngines, kind: str) -> None:
    """The table has deleted and updated rows, added and dropped columns, and three partition specs."""
    seed = len(kind)  # The kinds have different lengths.
    rng = random.Random(seed)
    name = f"kept{seed}"
    engines.run_sql(
        f"CREATE TABLE {{db}}.{name} (id bigint, land string, day date, gone int) USING iceberg "
        f"PARTITIONED BY (land) TBLPROPERTIES ({TABLES[kind]}, 'commit.manifest.min-count-to-merge'='3')"
    )

    def insert(first_id: int, note: str = "") -> None:
        engines.run_sql(
            f"INSERT INTO {{db}}.{name} SELECT id, concat('l', id % 4), date_add(date'2026-01-01', int(id % 28)), "
            f"1{note} FROM range({first_id}, {first_id + 20}, 1, 2)"
        )

    insert(0)
    insert(20)
    engines.run_sql(f"ALTER TABLE {{db}}.{name} ADD PARTITION FIELD bucket(3, id)")
    engines.run_sql(f"ALTER TABLE {{db}}.{name} ADD COLUMN note string")
    insert(40, ", concat('n', id)")
    insert(60, ", NULL")
    is_changed = kind != "version 1"
    if is_changed:
        engines.run_sql(f"DELETE FROM {{db}}.{name} WHERE id % 10 = 3")
        engines.run_sql(f"UPDATE {{db}}.{name} SET note = 'n777' WHERE id IN (1, 42, 77)")
    engines.run_sql(f"ALTER TABLE {{db}}.{name} DROP PARTITION FIELD land")
    engines.run_sql(f"ALTER TABLE {{db}}.{name} DROP COLUMN gone")
    engines.run_sql(f"INSERT INTO {{db}}.{name} SELECT id, 'l9', date'2026-02-01', 'z' FROM range(100, 130, 1, 3)")
    lineage = ", _row_id, _last_updated_sequence_number" if kind.startswith("version 3") else ""
    columns, table_files = f"id, land, day, note{lineage}, _spec_id, _file, _pos", engines.list_files(name)
    predicates, pruned_count = list(draw_predicates(rng)), 0
    conditions = ", ".join(f"({predicate})" for predicate in predicates)
    all_rows = engines.run_sql(f"SELECT {conditions}, {columns} FROM {{db}}.{name} ORDER BY id")
    for number, predicate in enumerate(predicates):
        note = f"{kind}, seed {seed}: {predicate}"
        plan = engines.client.plan_table(f"db.{name}", predicate)
        assert plan.name is not None, note
        planned_files = engines.list_files(plan.name)
        assert len(planned_files) == plan.files, note
        assert planned_files <= table_files, note
        pruned_count += len(table_files - planned_files)
        expected = [row[len(predicates) :] for row in all_rows if row[number]]
        with engines.hide_files(table_files - planned_files):
            actual = engines.run_sql(f"SELECT {columns} FROM {{db}}.`{plan.name}` WHERE {predicate} ORDER BY id")
            assert actual == expected, note
            engines.run_sql(f"SELECT count(*) FROM {{db}}.`{plan.name}`")
            if not lineage and not is_changed:
                actual_ids = engines.pyiceberg_catalog.load_table(("db", plan.name)).scan().to_arrow()["id"].to_pylist()
                assert {row[0] for row in expected} <= set(actual_ids), note
    assert pruned_count > 30


@pytest.mark.slow
def test_spark_can_neither_change_nor_clean_up_a_plan_table(engines: PlanTableEngines) -> None:
    engines.run_sql("CREATE TABLE {db}.safe (id bigint) USING iceberg")
    for first_id in (0, 10):
        engines.run_sql(f"INSERT INTO {{db}}.safe SELECT /*+ COALESCE(1) */ id FROM range({first_id}, {first_id + 10})")
    plan_name = engines.client.plan_table("db.safe", "id = 3").name
    catalog = engines.db.partition(".")[0]
    for statement in (
        f"INSERT INTO {{db}}.`{plan_name}` VALUES (5)",
        f"DELETE FROM {{db}}.`{plan_name}` WHERE id = 3",
        f"ALTER TABLE {{db}}.`{plan_name}` ADD COLUMN n int",
        f"ALTER TABLE {{db}}.`{plan_name}` RENAME TO {{db}}.mine",
        f"DROP TABLE {{db}}.`{plan_name}`",
        f"DROP TABLE {{db}}.`{plan_name}` PURGE",
        f"CALL {catalog}.system.expire_snapshots(table => 'db.`{plan_name}`', older_than => now())",
        f"CALL {catalog}.system.remove_orphan_files(table => 'db.`{plan_name}`')",
        "CREATE TABLE {db}.`t~plan~x` (id bigint) USING iceberg",
    ):
        with pytest.raises(Exception, match=r"(?i)plan table|plan~|gc\.enabled|GC is disabled"):
            engines.run_sql(statement)
    assert engines.run_sql("SELECT count(*) FROM {db}.safe") == [(20,)]
    assert engines.run_sql(f"SELECT count(*) FROM {{db}}.`{plan_name}`") == [(10,)]
    assert plan_name not in {row[1] for row in engines.run_sql("SHOW TABLES IN {db}")}


@pytest.mark.slow
def test_plan_table_is_read_with_the_credentials_of_its_table(lake: StorageLake, spark: SparkSession) -> None:
    """The test includes remote signing, in which the server signs each request for the table under the table's name."""
    db = f"{new_catalog(spark, lake.server.base_url, extra=lake.client_properties)}.db"
    spark.sql(f"CREATE NAMESPACE {db}")
    spark.sql(f"CREATE TABLE {db}.t (id bigint, s string) USING iceberg TBLPROPERTIES ('format-version'='3')")
    for first_id in range(0, 40, 10):
        spark.sql(
            f"INSERT INTO {db}.t SELECT /*+ COALESCE(1) */ id, concat('n', id) FROM range({first_id}, {first_id + 10})"
        )
    client = SeamarkClient(lake.server.base_url)
    plan = client.plan_table("db.t", "id IN (5, 38)")
    client.close()
    assert (plan.files, plan.considered_files) == (2, 4)
    actual = collect_rows(spark.sql(f"SELECT id, _row_id FROM {db}.`{plan.name}` ORDER BY id"))
    expected = collect_rows(spark.sql(f"SELECT id, _row_id FROM {db}.t WHERE id < 10 OR id >= 30 ORDER BY id"))
    assert actual == expected
