"""Tests of unmodified Trino over Seamark with compose's configuration: it writes, reads, and sees the work of other
engines.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.types import IntegerType
from pyspark.sql import SparkSession
from trino.exceptions import TrinoQueryError

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import CURRENT, At
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.index.indexer import Indexer
from seamark.connector.jobs.statistics import compute_statistics
from tests.services.needs import NEEDS_TRINO
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog
from tests.services.trino import BY_NAME, CATALOG, Trino
from tests.services.trino_lake import REMOTE, TrinoLake

pytestmark = NEEDS_TRINO


@dataclass
class TrinoCatalog:
    """A Seamark server and its catalog in Trino.

    `client_properties` contains the catalog properties for other engines.
    """

    seamark: Seamark
    trino: Trino
    catalog: str
    client_properties: dict[str, str]

    def read_rows(self, sql: str, session: dict[str, str] | None = None) -> list[list[Any]]:
        return self.trino.rows(sql, session, catalog=self.catalog)

    @property
    def with_named_plans(self) -> TrinoCatalog:
        """The Trino catalog of the same server that reads stored plans as tables with names.

        The catalog of `self` reads stored plans as snapshots of the planned table.
        """
        return replace(self, catalog=f"{self.catalog}{BY_NAME}")


@pytest.fixture(params=[CATALOG, REMOTE])
def lake(request: pytest.FixtureRequest, trino_lake: TrinoLake) -> TrinoCatalog:
    """Return a catalog whose tables are in local files, or a catalog whose tables are in S3."""
    name = request.param
    return TrinoCatalog(trino_lake.servers[name], trino_lake.trino, name, trino_lake.client_properties[name])


LOCAL = pytest.mark.parametrize("lake", [CATALOG, pytest.param(REMOTE, marks=pytest.mark.slow)], indirect=True)
"""Runs the test only on local files. Other tests of this module write and read files over S3 too."""


def write_with_pyiceberg(lake: TrinoCatalog, table: str) -> None:
    catalog = load_catalog("seamark", type="rest", uri=lake.seamark.base_url, **lake.client_properties)
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", "c"]})
    catalog.create_table(table, schema=rows.schema).append(rows)
    catalog.close()


def test_trino_writes_and_reads_through_seamark(lake: TrinoCatalog) -> None:
    run = lake.read_rows
    run("CREATE SCHEMA sales")
    values = "(1, DATE '2026-01-01', 10.5e0), (2, DATE '2026-01-02', 20e0)"
    run(
        "CREATE TABLE sales.orders WITH (partitioning = ARRAY['day']) AS "
        f"SELECT * FROM (VALUES {values}) t (id, day, price)"
    )
    assert run("SELECT id, price FROM sales.orders ORDER BY id") == [[1, 10.5], [2, 20.0]]
    run("INSERT INTO sales.orders VALUES (3, DATE '2026-01-02', 30e0)")
    run("UPDATE sales.orders SET price = 0 WHERE id = 1")
    run("DELETE FROM sales.orders WHERE id = 2")
    assert run("SELECT id, price FROM sales.orders ORDER BY id") == [[1, 0.0], [3, 30.0]]
    [[first_snapshot_id]] = run('SELECT snapshot_id FROM sales."orders$snapshots" ORDER BY committed_at LIMIT 1')
    assert run(f"SELECT count(*) FROM sales.orders FOR VERSION AS OF {first_snapshot_id}") == [[2]]
    run("DROP TABLE sales.orders")
    assert run("SHOW TABLES FROM sales") == []


@pytest.mark.slow
def test_trino_reads_a_table_that_pyiceberg_wrote(lake: TrinoCatalog) -> None:
    lake.read_rows("CREATE SCHEMA py")
    write_with_pyiceberg(lake, "py.people")
    assert lake.read_rows("SELECT name FROM py.people WHERE id > 1 ORDER BY 1") == [["b"], ["c"]]


@pytest.mark.slow
@LOCAL
def test_view_created_in_trino_is_listed_and_read(lake: TrinoCatalog) -> None:
    lake.read_rows("CREATE SCHEMA views")
    lake.read_rows("CREATE TABLE views.t AS SELECT * FROM (VALUES 1, 2, 3) t (n)")
    lake.read_rows("CREATE VIEW views.v AS SELECT sum(n) AS total FROM views.t")
    assert lake.read_rows("SELECT total FROM views.v") == [[6]]


@LOCAL
def test_trino_and_pyiceberg_change_one_table_alternately(lake: TrinoCatalog) -> None:
    catalog = load_catalog("seamark", type="rest", uri=lake.seamark.base_url, **lake.client_properties)
    catalog.create_namespace("turns")
    rows = pa.table({"id": list(range(100)), "word": [str(number) for number in range(100)]})
    table = catalog.create_table("turns.t", schema=rows.schema)
    table.append(rows)
    assert lake.read_rows("SELECT count(*), sum(id) FROM turns.t") == [[100, 4950]]
    lake.read_rows("DELETE FROM turns.t WHERE id >= 50")
    table.refresh()
    assert table.scan().to_arrow()["id"].to_pylist() == list(range(50))
    with table.update_schema() as change:
        change.add_column("extra", IntegerType())
    lake.read_rows("INSERT INTO turns.t VALUES (1000, 'x', 7)")
    table.refresh()
    assert table.scan("id = 1000").to_arrow()["extra"].to_pylist() == [7]
    catalog.close()


@pytest.mark.slow  # This starts another JVM.
@pytest.mark.spark
def test_trino_and_spark_change_one_table_alternately(lake: TrinoCatalog, spark: SparkSession) -> None:
    name = new_catalog(spark, lake.seamark.base_url, extra=lake.client_properties)
    spark.sql(f"CREATE NAMESPACE {name}.shared")
    spark.sql(f"CREATE TABLE {name}.shared.t USING iceberg AS SELECT id, cast(id AS string) AS word FROM range(100)")
    assert lake.read_rows("SELECT count(*), sum(id) FROM shared.t") == [[100, 4950]]
    lake.read_rows("DELETE FROM shared.t WHERE id >= 50")
    assert spark.table(f"{name}.shared.t").count() == 50
    spark.sql(f"ALTER TABLE {name}.shared.t ADD COLUMN extra int")
    lake.read_rows("INSERT INTO shared.t VALUES (1000, 'x', 7)")
    assert [row[0] for row in spark.sql(f"SELECT extra FROM {name}.shared.t WHERE id = 1000").collect()] == [7]


def make_plan(lake: TrinoCatalog, table: str, predicate: str, *, at: At = CURRENT) -> str:
    client = SeamarkClient(lake.seamark.base_url)
    try:
        name = client.plan_table(table, predicate, at=at).name
    finally:
        client.close()
    assert name is not None
    return name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lake", "version"),
    [
        (CATALOG, 3),
        (CATALOG, 2),
        (REMOTE, 2),
        (REMOTE, 3),
    ],
    indirect=["lake"],
)
def test_trino_reads_a_plan_table_like_the_table(lake: TrinoCatalog, version: int) -> None:
    """The table has deleted rows and a snapshot that is not current."""
    run, schema = lake.with_named_plans.read_rows, f"plans{version}"
    run(f"CREATE SCHEMA {schema}")
    run(
        f"CREATE TABLE {schema}.t (id bigint, land varchar, day date) "
        f"WITH (partitioning = ARRAY['land'], format_version = {version})"
    )
    for first_id in range(0, 60, 10):
        values = ", ".join(
            f"({row_id}, 'l{row_id % 2}', DATE '2026-01-{row_id % 28 + 1:02}')"
            for row_id in range(first_id, first_id + 10)
        )
        run(f"INSERT INTO {schema}.t VALUES {values}")
    run(f"DELETE FROM {schema}.t WHERE id IN (25, 26, 57)")
    run(f"UPDATE {schema}.t SET day = DATE '2027-01-01' WHERE id IN (21, 51)")
    files = {path for (path,) in run(f'SELECT file_path FROM {schema}."t$files" WHERE content = 0')}
    *_, [old_snapshot_id], _ = run(f'SELECT snapshot_id FROM {schema}."t$snapshots" ORDER BY committed_at')
    for predicate in ("id BETWEEN 18 AND 31", "land = 'l1' AND id > 45", "day = DATE '2027-01-01'", "id < 0", "true"):
        name = make_plan(lake, f"plans{version}.t", predicate)
        plan = f'{schema}."{name}"'
        columns = 'id, land, day, "$path", "$partition"'
        expected = run(f"SELECT {columns} FROM {schema}.t WHERE {predicate} ORDER BY id")
        assert run(f"SELECT {columns} FROM {plan} WHERE {predicate} ORDER BY id") == expected
        live_paths = {path for (path,) in run(f'SELECT file_path FROM {schema}."{name}$files" WHERE content = 0')}
        assert live_paths <= files
        assert (live_paths == files) == (predicate == "true"), predicate
        assert {path for *_, path, _ in expected} <= live_paths
        join = f"SELECT count(*) FROM {plan} a JOIN {schema}.t b ON a.id = b.id JOIN {plan} c ON b.id = c.id"
        assert run(join) == run(f"SELECT count(*) FROM {plan}")
    old_plan = make_plan(lake, f"plans{version}.t", "id = 21", at=At(snapshot_id=old_snapshot_id))
    expected = run(f"SELECT day FROM {schema}.t FOR VERSION AS OF {old_snapshot_id} WHERE id = 21")
    assert run(f'SELECT day FROM {schema}."{old_plan}" WHERE id = 21') == expected
    assert run(f'SELECT day FROM {schema}."{old_plan}" FOR VERSION AS OF {old_snapshot_id} WHERE id = 21') == expected
    assert expected != run(f"SELECT day FROM {schema}.t WHERE id = 21")
    assert run(f"SHOW TABLES FROM {schema}") == [["t"]]


@pytest.mark.slow
@LOCAL
def test_trino_cannot_damage_a_plan_table_or_its_table(lake: TrinoCatalog) -> None:
    """A plan table is a table name under which Trino reads only the files that a plan has chosen."""
    lake = lake.with_named_plans
    run = lake.read_rows
    run("CREATE SCHEMA harm")
    run("CREATE TABLE harm.t AS SELECT * FROM (VALUES 1, 2, 3) t (n)")
    run("INSERT INTO harm.t VALUES 100")
    name = f'harm."{make_plan(lake, "harm.t", "n = 1")}"'
    for statement in (
        f"INSERT INTO {name} VALUES 5",
        f"DELETE FROM {name} WHERE n < 3",
        f"ALTER TABLE {name} RENAME TO harm.mine",
        f"ALTER TABLE {name} ADD COLUMN m int",
        f"DROP TABLE {name}",
        'CREATE TABLE harm."t~plan~x" (n int)',
        'CREATE VIEW harm."t~plan~x" AS SELECT 1 AS n',
    ):
        with pytest.raises(TrinoQueryError):
            run(statement)
    # The plan table does not name the files that the plan excludes. A clean-up must not delete them as orphans.
    lake.read_rows(
        f"ALTER TABLE {name} EXECUTE remove_orphan_files(retention_threshold => '0s')",
        session={f"{lake.catalog}.remove_orphan_files_min_retention": "0s"},
    )
    assert run("SELECT n FROM harm.t ORDER BY n") == [[1], [2], [3], [100]]
    assert run(f"SELECT n FROM {name} ORDER BY n") == [[1], [2], [3]]


@pytest.mark.slow
def test_trino_reads_statistics_of_seamark_and_seamark_those_of_trino(trino_lake: TrinoLake) -> None:
    lake = TrinoCatalog(trino_lake.servers[CATALOG], trino_lake.trino, CATALOG, trino_lake.client_properties[CATALOG])
    run = lake.read_rows
    run("CREATE SCHEMA counted")
    run(
        "CREATE TABLE counted.t AS SELECT n, n % 7 AS k, CAST(n AS varchar) AS s, "
        "CAST(n % 500 AS decimal(10, 2)) AS d, "
        "date_add('day', n % 40, DATE '2020-01-01') AS at, CAST(n % 3 AS double) AS f, n % 2 = 0 AS b "
        "FROM UNNEST(sequence(1, 9000)) u (n)"
    )
    run("ALTER TABLE counted.t EXECUTE drop_extended_stats")
    client = IndexClient(lake.seamark.base_url)

    def show_stats() -> dict[str, float]:
        return {row[0]: row[2] for row in run("SHOW STATS FOR counted.t") if row[0] and row[2] is not None}

    compute_statistics(client, "counted.t")
    seamark_stats = show_stats()
    assert {name: seamark_stats.get(name) for name in ("k", "d", "f", "b")} == {
        "k": 7,
        "d": 500,
        "f": 3,
        "b": 2,
    }
    assert seamark_stats["at"] == 40
    assert seamark_stats["n"] == pytest.approx(9000, rel=0.05)
    assert seamark_stats["s"] == pytest.approx(9000, rel=0.05)
    run("ALTER TABLE counted.t EXECUTE drop_extended_stats")
    run("ANALYZE counted.t")
    assert show_stats() == pytest.approx(seamark_stats, rel=0.05)
    # Trino merges the sketches of new rows with those of the previous snapshot. Then Seamark merges its sketches with
    # Trino's sketches.
    run("INSERT INTO counted.t SELECT n, n % 9, CAST(n AS varchar), 1, DATE '2021-01-01', 9, true "
         "FROM UNNEST(sequence(8001, 9100)) u (n)")  # fmt: skip
    compute_statistics(client, "counted.t")
    run("INSERT INTO counted.t VALUES (1, 11, 'x', 2, DATE '2022-01-01', 10, true)")
    report = compute_statistics(client, "counted.t")
    assert report.columns_read == 0
    assert show_stats()["k"] == 10
    assert show_stats()["at"] == 42
    assert show_stats()["n"] == pytest.approx(9100, rel=0.05)
    client.close()


@pytest.mark.slow
def test_index_deleted_by_trinos_remove_orphan_files_is_built_again(trino_lake: TrinoLake) -> None:
    """Trino lists the whole location of a table, and keeps the files that its metadata names."""
    lake = TrinoCatalog(trino_lake.servers[CATALOG], trino_lake.trino, CATALOG, trino_lake.client_properties[CATALOG])
    run = lake.read_rows
    run("CREATE SCHEMA keep")
    run("CREATE TABLE keep.t AS SELECT * FROM (VALUES 'a', 'c') t (land)")
    run("INSERT INTO keep.t VALUES 'b'")
    client = IndexClient(lake.seamark.base_url)
    client.put_index("keep.t", "lands", kind="bitmap", columns=["land"])
    build(client, "keep.t", "lands", InProcessWorkers())
    compute_statistics(client, "keep.t")
    assert client.explain("keep.t", "land = 'bb'").files == 0
    location = Path(json.loads(client.load_table("keep.t").metadata)["location"].removeprefix("file://"))
    lake.read_rows(
        "ALTER TABLE keep.t EXECUTE remove_orphan_files(retention_threshold => '0s')",
        session={f"{lake.catalog}.remove_orphan_files_min_retention": "0s"},
    )
    assert not list(location.rglob("_seamark/**/*.puffin")), (
        "the how-to guide about indexes says that Trino deletes these files"
    )
    statistics_paths = [
        file["statistics-path"] for file in json.loads(client.load_table("keep.t").metadata)["statistics"]
    ]
    assert statistics_paths
    assert all(Path(path.removeprefix("file://")).exists() for path in statistics_paths)
    run("INSERT INTO keep.t VALUES 'bb'")
    assert run("SELECT land FROM keep.t WHERE land = 'bb'") == [["bb"]]
    assert client.explain("keep.t", "land = 'bb'").files >= 1
    Indexer(client, lambda: closing(InProcessWorkers())).maintain_all_tables()
    assert client.index("keep.t", "lands").health == "ok"
    assert client.explain("keep.t", "land = 'bc'").files == 0
    client.close()
