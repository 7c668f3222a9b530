"""Buckets, as engines use them: equality opens one of them, joins and groupings by the key need no exchange.

Plans are the ones that Spark has run; the rows are those of the same query where Spark shuffles everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.spark.session import SHUFFLE_FREE, connect
from seamark.connector.write.appends import append
from tests.services.seamark import Seamark

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

JOIN = "SELECT l.id, l.v, r.v FROM free.db.{} l JOIN free.db.{} r ON l.id = r.id"
ROWS = 2_000


@pytest.fixture(scope="module")
def server(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    """Tables of the same ids, in 8 buckets twice (eight and eleven), in 4, and in none."""
    with Seamark(tmp_path_factory.mktemp("buckets")) as server, closing(SeamarkClient(server.base_url)) as client:
        connect(spark, "free", server.base_url)
        spark.sql("CREATE NAMESPACE free.db")
        for number, (name, buckets) in enumerate((("eight", 8), ("eleven", 8), ("four", 4), ("plain", 0))):
            by = f"PARTITIONED BY (bucket({buckets}, id))" if buckets else ""
            spark.sql(f"CREATE TABLE free.db.{name} (id bigint, v bigint) USING iceberg {by}")
            for start in (0, ROWS // 2):  # two files a bucket, as groups that are to be read together
                ids = range(start, start + ROWS // 2)
                append(client, f"db.{name}", pa.table({"id": ids, "v": [(number + 1) * one for one in ids]}))
        yield server


@contextmanager
def conf(spark: SparkSession, **settings: str) -> Iterator[None]:
    before = [(name, spark.conf.get(name, None)) for name in settings]
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before:
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


@pytest.fixture(autouse=True)
def no_broadcast(spark: SparkSession) -> Iterator[None]:
    with conf(spark, **{"spark.sql.autoBroadcastJoinThreshold": "-1"}):
        yield


def run(frame: DataFrame) -> tuple[list[tuple[int, ...]], int]:
    """Return (its rows, in order; the exchanges of the plan that gave them)."""
    found = sorted(tuple(row) for row in frame.collect())
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "Scan" in plan
    final = plan.split("== Initial Plan ==")[0]
    return found, len(re.findall(r"\bExchange\b", final))


def shuffled(spark: SparkSession, query: str) -> list[tuple[int, ...]]:
    with conf(spark, **dict.fromkeys((name for name in SHUFFLE_FREE if "v2.bucketing.enabled" in name), "false")):
        found, exchanges = run(spark.sql(query))
    assert exchanges >= 1
    return found


@pytest.mark.parametrize(
    ("left", "right"), [("eight", "eleven"), pytest.param("eight", "four", marks=pytest.mark.slow), ("four", "eight")]
)
def test_a_join_on_the_key_of_two_bucketed_tables_has_no_exchange(
    server: Seamark, spark: SparkSession, left: str, right: str
) -> None:
    query = JOIN.format(left, right)
    found, exchanges = run(spark.sql(query))
    assert exchanges == 0
    assert len(found) == ROWS
    assert found == shuffled(spark, query)


@pytest.mark.parametrize(
    ("left", "right"), [("eight", "plain"), pytest.param("plain", "eight", marks=pytest.mark.slow)]
)
def test_a_join_with_a_table_that_is_not_bucketed_exchanges_that_one_alone(
    server: Seamark, spark: SparkSession, left: str, right: str
) -> None:
    query = JOIN.format(left, right)
    found, exchanges = run(spark.sql(query))
    assert exchanges == 1
    assert found == shuffled(spark, query)


def test_a_grouping_by_the_key_has_no_exchange(server: Seamark, spark: SparkSession) -> None:
    query = "SELECT id, sum(v), count(*) FROM free.db.eight GROUP BY id"
    found, exchanges = run(spark.sql(query))
    assert exchanges == 0
    assert found == shuffled(spark, query) == [(one, one, 1) for one in range(ROWS)]


def test_a_grouping_of_a_join_on_the_key_has_no_exchange(server: Seamark, spark: SparkSession) -> None:
    query = (
        "SELECT l.id, sum(l.v + r.v) FROM free.db.eight l JOIN free.db.eleven r ON l.id = r.id "
        "WHERE l.v > 100 GROUP BY l.id"
    )
    found, exchanges = run(spark.sql(query))
    assert exchanges == 0
    assert found == shuffled(spark, query) == [(one, 3 * one) for one in range(101, ROWS)]


@pytest.mark.slow
def test_a_join_of_a_table_that_was_resized_has_its_rows(server: Seamark, spark: SparkSession) -> None:
    """Files of both specs: Spark can group by none of them, and must see that."""
    spark.sql("CREATE TABLE free.db.grown (id bigint, v bigint) USING iceberg PARTITIONED BY (bucket(4, id))")
    spark.sql("INSERT INTO free.db.grown SELECT id, id FROM range(0, 1000)")
    spark.sql("ALTER TABLE free.db.grown REPLACE PARTITION FIELD id_bucket WITH bucket(8, id)")
    spark.sql("INSERT INTO free.db.grown SELECT id, id FROM range(1000, 2000)")
    query = JOIN.format("grown", "eight")
    found, _ = run(spark.sql(query))
    assert found == shuffled(spark, query) == [(one, one, one) for one in range(ROWS)]


def test_equality_on_the_key_opens_the_files_of_one_bucket(server: Seamark, spark: SparkSession) -> None:
    with RestCatalog("free", uri=server.base_url) as catalog:
        table = catalog.load_table("db.eight")
        everything = [task.file.file_path for task in table.scan().plan_files()]
        assert len(everything) == 16
        for key in range(0, ROWS, 389):
            kept = [task.file.file_path for task in table.scan(row_filter=f"id = {key}").plan_files()]
            # Ids of each file are one half of the table's, so bounds leave one of the bucket's two files.
            assert len(kept) == 1
            others = [Path(path.removeprefix("file://")) for path in everything if path not in kept]
            for path in others:  # nobody opens them: they are not there
                path.rename(path.with_suffix(".away"))
            try:
                assert spark.table("free.db.eight").where(f"id = {key}").collect() == [(key, key)]
            finally:
                for path in others:
                    path.with_suffix(".away").rename(path)
