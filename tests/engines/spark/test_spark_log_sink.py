"""Tests of `writeStream.format("seamark").option("log", "true")`: Spark appends each batch to the log once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.spark.source.source import register
from seamark.connector.streams.status import flush_stream, load_stream
from tests.engines.test_streams import PROPERTIES, SparkStreamTables, stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]
__all__ = ["stream"]


class SinkQuery:
    """A streaming query that reads one file of a folder in each batch, and writes it into `db.t`."""

    def __init__(self, spark: SparkSession, url: str, folder: Path) -> None:
        register(spark)
        self._spark, self._folder = spark, folder
        self._client = SeamarkClient(url)
        self._options = {"uri": url, "table": "db.t"}
        self.checkpoint = folder / "checkpoint"

    def add_source_file(self, first: int, last: int, partitions: int = 1) -> None:
        frame = self._spark.range(first, last, 1, 1).selectExpr("id", "concat('v', id) AS name")
        frame.coalesce(partitions).write.mode("append").parquet(str(self._folder / "source"))

    def run(self, change: Callable[[DataFrame], DataFrame] = lambda frame: frame, **options: str) -> None:
        """Process all files that were added since the last run."""
        reader = self._spark.readStream.schema("id bigint, name string").option("maxFilesPerTrigger", 1)
        frame = change(reader.parquet(str(self._folder / "source")))
        writer = frame.writeStream.format("seamark").options(**{**self._options, "log": "true", **options})
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    def forget_last_commit(self) -> None:
        """Delete Spark's record of the last batch, as if Spark had died after the append."""
        last_commit = max((self.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        last_commit.unlink()
        last_commit.with_name(f".{last_commit.name}.crc").unlink()

    def read_ids(self) -> list[int]:
        rows = seamark.scan(self._client, "db.t", ["id"]).to_arrow()
        return sorted(rows.column("id").to_pylist())


@pytest.fixture
def query(stream: SparkStreamTables, spark: SparkSession, tmp_path: Path) -> SinkQuery:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + PROPERTIES)
    return SinkQuery(spark, stream.server.base_url, tmp_path)


def test_restarted_query_appends_every_row_once_before_and_after_flushes(
    query: SinkQuery, stream: SparkStreamTables
) -> None:
    client = SeamarkClient(stream.server.base_url)
    query.add_source_file(0, 100)
    query.add_source_file(100, 150)
    query.run(lambda frame: frame.repartition(3))
    assert query.read_ids() == list(range(150))
    assert sum(shard["durable"] for shard in load_stream(client, "db.t")["shards"]) == 150
    query.forget_last_commit()
    query.run(lambda frame: frame.repartition(5))  # Spark repeats the batch with different tasks.
    assert query.read_ids() == list(range(150))
    flush_stream(client, "db.t")
    query.forget_last_commit()
    query.add_source_file(150, 160)
    query.run()
    assert query.read_ids() == list(range(160))


def test_batch_without_rows_is_recorded_under_its_number(query: SinkQuery) -> None:
    query.add_source_file(0, 10)
    query.add_source_file(10, 20)
    query.add_source_file(20, 30)
    query.run(lambda frame: frame.where("id < 5 OR id >= 20"))
    assert query.read_ids() == [*range(5), *range(20, 30)]
    query.forget_last_commit()
    query.run(lambda frame: frame.where("id < 5 OR id >= 20"))
    assert query.read_ids() == [*range(5), *range(20, 30)]


def test_rows_with_a_kind_replace_and_delete_rows_of_a_keyed_table(stream: SparkStreamTables, query: SinkQuery) -> None:
    stream.run_sql("ALTER TABLE {db}.t SET TBLPROPERTIES ('seamark.stream.key'='id')")
    query.add_source_file(0, 6)
    query.run()
    query.add_source_file(2, 4)
    query.run(lambda frame: frame.selectExpr("id", "name", "CASE WHEN id = 3 THEN 'delete' END AS _op"))
    assert query.read_ids() == [0, 1, 2, 4, 5]


def test_query_with_an_older_checkpoint_is_refused(query: SinkQuery) -> None:
    for batch in range(3):
        query.add_source_file(10 * batch, 10 * batch + 10)
        query.run()
    query.forget_last_commit()
    query.forget_last_commit()
    for name in ("2", ".2.crc"):
        (query.checkpoint / "offsets" / name).unlink()
    with pytest.raises(PySparkException, match="already has batch 1 of this query, and later batches up to 2"):
        query.run()
    assert query.read_ids() == list(range(30))


def test_query_that_wrote_earlier_batches_by_commits_is_refused(query: SinkQuery) -> None:
    query.add_source_file(0, 10)
    query.run(log="false")
    query.add_source_file(10, 20)
    with pytest.raises(PySparkException, match="does not have the batches of this query before batch 1"):
        query.run()
    with pytest.raises(PySparkException, match="log is 'yes'; it must be true or false"):
        query.run(log="yes")
    assert query.read_ids() == list(range(10))
    query.run(log="false")
    assert query.read_ids() == list(range(20))
