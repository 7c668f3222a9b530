"""Tests that Spark Structured Streaming reads each row of a stream table once, also after restarts of the query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.spark.source.source import register
from seamark.connector.streams.status import flush_stream
from tests.engines.test_streams import PROPERTIES, SparkStreamTables, stream
from tests.waits import block_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]
__all__ = ["stream"]


class CopyQuery:
    """A query that copies the rows of `db.t` to Parquet files, with a checkpoint."""

    def __init__(self, spark: SparkSession, url: str, folder: Path, **options: str) -> None:
        register(spark)
        self._spark, self._folder = spark, folder
        self._options = {"uri": url, "table": "db.t", **options}

    def start(self, **trigger: Any) -> Any:
        frame = self._spark.readStream.format("seamark").options(**self._options).load()
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self._folder / "checkpoint"))
        return writer.trigger(**trigger).start(str(self._folder / "rows"))

    def run(self) -> None:
        """Process all rows that exist now, and end."""
        self.start(availableNow=True).awaitTermination()

    def read_ids(self) -> list[int]:
        if not any((self._folder / "rows" / "_spark_metadata").glob("[0-9]*")):
            return []
        return sorted(row.id for row in self._spark.read.parquet(str(self._folder / "rows")).collect())


def test_restarted_query_reads_each_row_once_across_flushes_and_appends(
    stream: SparkStreamTables, spark: SparkSession, tmp_path: Path
) -> None:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + PROPERTIES)
    client = SeamarkClient(stream.server.base_url)
    query = CopyQuery(spark, stream.server.base_url, tmp_path / "query")
    stream.run_sql("INSERT INTO {db}.t VALUES (1, 'a')")
    stream.post("t", {"id": 2})
    query.run()
    assert query.read_ids() == [1, 2]
    flush_stream(client, "db.t")
    query.run()
    assert query.read_ids() == [1, 2]
    stream.post("t", {"id": 3})
    stream.run_sql("INSERT INTO {db}.t VALUES (4, 'd')")
    flush_stream(client, "db.t")
    stream.post("t", {"id": 5}, {"id": 6})
    query.run()
    assert query.read_ids() == [1, 2, 3, 4, 5, 6]


def test_repeated_batch_of_spark_has_the_same_rows(
    stream: SparkStreamTables, spark: SparkSession, tmp_path: Path
) -> None:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + PROPERTIES)
    query = CopyQuery(spark, stream.server.base_url, tmp_path / "query", **{"from": "latest"})
    stream.post("t", {"id": 1})
    query.run()
    stream.post("t", {"id": 2})
    query.run()
    for folder in ("checkpoint/commits", "rows/_spark_metadata"):  # As if Spark had died before it recorded the batch.
        last_commit = max((tmp_path / "query" / folder).glob("[0-9]*"), key=lambda path: int(path.name))
        last_commit.unlink()
        last_commit.with_name(f".{last_commit.name}.crc").unlink()
    flush_stream(SeamarkClient(stream.server.base_url), "db.t")
    stream.post("t", {"id": 3})
    query.run()  # Spark repeats the batch, and ends: for this source, availableNow is one batch.
    assert query.read_ids() == [2]
    query.run()
    assert query.read_ids() == [2, 3]


def test_running_query_sees_rows_before_their_flush(
    stream: SparkStreamTables, spark: SparkSession, tmp_path: Path
) -> None:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + PROPERTIES)
    query = CopyQuery(spark, stream.server.base_url, tmp_path / "query")
    stream.post("t", {"id": 1})
    flush_stream(SeamarkClient(stream.server.base_url), "db.t")
    running_query = query.start(processingTime="0 seconds")
    try:
        for number in (2, 3):
            stream.post("t", {"id": number})
            block_until(lambda expected=number: query.read_ids() == list(range(1, expected + 1)), within_s=60)
    finally:
        running_query.stop()
    assert stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)]
