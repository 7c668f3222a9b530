"""Stock Trino over Seamark, with the configuration that compose mounts: it writes, reads, and sees the others' work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import SparkSession

from tests.services.java import java_25_home
from tests.services.s3 import S3
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog
from tests.services.trino import Trino, trino_server

pytestmark = [
    pytest.mark.trino,
    pytest.mark.timeout(400),
    pytest.mark.skipif(java_25_home() is None, reason="Trino needs a JDK 25 (JAVA25, or one below /usr/lib/jvm)"),
]


@dataclass
class Lake:
    """One Seamark server and a Trino over it; `client` are the catalog properties for other engines."""

    seamark: Seamark
    trino: Trino
    client: dict[str, str]


@pytest.fixture(scope="module")
def local_lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """Tables on local files."""
    folder = tmp_path_factory.mktemp("trino-local")
    with Seamark(folder / "seamark") as seamark, trino_server(folder / "trino", uri=seamark.base_url) as trino:
        yield Lake(seamark, trino, {})


@pytest.fixture(scope="module")
def s3_lake(tmp_path_factory: pytest.TempPathFactory, s3: S3) -> Iterator[Lake]:
    """Tables in S3, as in compose."""
    folder = tmp_path_factory.mktemp("trino-s3")
    warehouse = f"s3://{s3.create_bucket()}/warehouse"
    with (
        Seamark(folder / "seamark", warehouse=warehouse, env=s3.seamark_env()) as seamark,
        trino_server(folder / "trino", uri=seamark.base_url, s3=s3) as trino,
    ):
        yield Lake(seamark, trino, s3.client_properties())


@pytest.fixture(params=["local", "s3"])
def lake(request: pytest.FixtureRequest) -> Lake:
    found: Lake = request.getfixturevalue(f"{request.param}_lake")
    return found


def write_with_pyiceberg(lake: Lake, table: str) -> None:
    catalog = load_catalog("seamark", type="rest", uri=lake.seamark.base_url, **lake.client)
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", "c"]})
    catalog.create_table(table, schema=rows.schema).append(rows)
    catalog.close()


def test_trino_writes_and_reads_through_seamark(lake: Lake) -> None:
    rows = lake.trino.rows
    rows("CREATE SCHEMA seamark.sales")
    values = "(1, DATE '2026-01-01', 10.5e0), (2, DATE '2026-01-02', 20e0)"
    rows(
        "CREATE TABLE seamark.sales.orders WITH (partitioning = ARRAY['day']) AS "
        f"SELECT * FROM (VALUES {values}) t (id, day, price)"
    )
    assert rows("SELECT id, price FROM seamark.sales.orders ORDER BY id") == [[1, 10.5], [2, 20.0]]
    rows("INSERT INTO seamark.sales.orders VALUES (3, DATE '2026-01-02', 30e0)")
    rows("UPDATE seamark.sales.orders SET price = 0 WHERE id = 1")
    rows("DELETE FROM seamark.sales.orders WHERE id = 2")
    assert rows("SELECT id, price FROM seamark.sales.orders ORDER BY id") == [[1, 0.0], [3, 30.0]]
    first = rows('SELECT snapshot_id FROM seamark.sales."orders$snapshots" ORDER BY committed_at LIMIT 1')[0][0]
    assert rows(f"SELECT count(*) FROM seamark.sales.orders FOR VERSION AS OF {first}") == [[2]]
    rows("DROP TABLE seamark.sales.orders")
    assert rows("SHOW TABLES FROM seamark.sales") == []


def test_trino_sees_a_table_that_pyiceberg_wrote(lake: Lake) -> None:
    lake.trino.rows("CREATE SCHEMA seamark.py")
    write_with_pyiceberg(lake, "py.people")
    assert lake.trino.rows("SELECT name FROM seamark.py.people WHERE id > 1 ORDER BY 1") == [["b"], ["c"]]


def test_a_view_made_in_trino_is_listed_and_read(lake: Lake) -> None:
    lake.trino.rows("CREATE SCHEMA seamark.views")
    lake.trino.rows("CREATE TABLE seamark.views.t AS SELECT * FROM (VALUES 1, 2, 3) t (n)")
    lake.trino.rows("CREATE VIEW seamark.views.v AS SELECT sum(n) AS total FROM seamark.views.t")
    assert lake.trino.rows("SELECT total FROM seamark.views.v") == [[6]]


@pytest.mark.spark
def test_trino_and_spark_change_one_table_in_turn(lake: Lake, spark: SparkSession) -> None:
    name = new_catalog(spark, lake.seamark.base_url, extra=lake.client)
    spark.sql(f"CREATE NAMESPACE {name}.shared")
    spark.sql(f"CREATE TABLE {name}.shared.t USING iceberg AS SELECT id, cast(id AS string) AS word FROM range(100)")
    assert lake.trino.rows("SELECT count(*), sum(id) FROM seamark.shared.t") == [[100, 4950]]
    lake.trino.rows("DELETE FROM seamark.shared.t WHERE id >= 50")
    assert spark.table(f"{name}.shared.t").count() == 50
    spark.sql(f"ALTER TABLE {name}.shared.t ADD COLUMN extra int")
    lake.trino.rows("INSERT INTO seamark.shared.t VALUES (1000, 'x', 7)")
    assert [row[0] for row in spark.sql(f"SELECT extra FROM {name}.shared.t WHERE id = 1000").collect()] == [7]
