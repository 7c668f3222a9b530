"""Tests that unmodified Spark reads rows of a stream table before their commit, and each row once across flushes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from seamark.connector.spark.session import read
from seamark.connector.spark.source.source import register
from seamark.connector.spark.sql import sql
from tests.engines.conftest import collect_rows
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog
from tests.waits import block_until

pytestmark = pytest.mark.slow

NEVER_MS = 3_600_000
"""A flush interval that is longer than the tests."""
VERSION_3 = "TBLPROPERTIES ('seamark.stream.enabled'='true', 'format-version'='3')"
PROPERTIES = "TBLPROPERTIES ('seamark.stream.enabled'='true')"


class SparkStreamTables:
    """A server with tables that receive streams of rows, and a Spark session that reads them in several ways."""

    def __init__(self, server: Seamark, spark: SparkSession) -> None:
        self.server = server
        self._spark = spark
        self._catalog = new_catalog(spark, server.base_url)
        self._fresh_catalog = new_catalog(spark, server.base_url, extra={"header.X-Seamark-Fresh": "true"})

    def run_sql(self, statement: str) -> list[tuple[Any, ...]]:
        return collect_rows(self._spark.sql(statement.replace("{db}", f"{self._catalog}.db")))

    def run_fresh_sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement in a catalog that sends the header `X-Seamark-Fresh`, so scans include unflushed rows."""
        return collect_rows(self._spark.sql(statement.replace("{db}", f"{self._fresh_catalog}.db")))

    def run_planned_sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement with `seamark.spark.sql`, which reads plan tables (the files that a plan keeps)."""
        return collect_rows(sql(self._spark, statement.replace("{db}", f"{self._catalog}.db")))

    def load(self, table: str, **options: str) -> list[tuple[Any, ...]]:
        """Read a table with `format("seamark")`."""
        register(self._spark)
        options |= {"uri": self.server.base_url, "table": f"db.{table}"}
        return collect_rows(self._spark.read.format("seamark").options(**options).load())

    def read(self, table: str) -> list[tuple[Any, ...]]:
        """Read a table with `seamark.spark.read`."""
        return collect_rows(read(self._spark, f"{self._catalog}.db.{table}"))

    def flush(self, table: str) -> None:
        request = urllib.request.Request(f"{self.server.base_url}/api/v1/tables/db/{table}/flush", b"", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

    def post(self, table: str, *rows: dict[str, Any]) -> None:
        url = f"{self.server.base_url}/api/v1/tables/db/{table}/rows"
        request = urllib.request.Request(url, json.dumps(rows).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["rows"] == len(rows)


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> Iterator[SparkStreamTables]:
    with Seamark(tmp_path, env={"SEAMARK_STREAM_FLUSH_INTERVAL_MS": str(NEVER_MS)}) as server:
        stream = SparkStreamTables(server, spark)
        stream.run_sql("CREATE NAMESPACE {db}")
        yield stream


def test_spark_reads_rows_before_their_commit(stream: SparkStreamTables) -> None:
    stream.run_sql(
        "CREATE TABLE {db}.t (id bigint, name string, day date) USING iceberg PARTITIONED BY (day) " + PROPERTIES
    )
    stream.post("t", {"id": 1, "name": "a", "day": "2026-01-01"})
    block_until(lambda: stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)])
    stream.post("t", {"id": 2, "name": "b", "day": "2026-01-01"}, {"id": 3, "name": None, "day": "2026-01-02"})
    assert stream.run_sql("SELECT id, name FROM {db}.t ORDER BY id") == [(1, "a"), (2, "b"), (3, None)]
    stream.post("t", {"id": 4, "day": "2026-01-02"})
    assert stream.run_sql("SELECT count(*), min(id), max(id) FROM {db}.t") == [(4, 1, 4)]
    assert stream.run_sql("SELECT id FROM {db}.t WHERE day = DATE '2026-01-02' ORDER BY id") == [(3,), (4,)]
    assert stream.run_sql("SELECT id FROM {db}.t WHERE id > 3") == [(4,)]
    assert stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)]
    assert stream.run_fresh_sql("SELECT count(*) FROM {db}.t WHERE id > 1") == [(3,)]


def test_spark_reads_unflushed_rows_of_version_3_with_a_header(stream: SparkStreamTables) -> None:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + VERSION_3)
    stream.post("t", {"id": 1, "name": "a"})
    block_until(lambda: stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)])
    stream.post("t", {"id": 2, "name": "b"})
    assert stream.run_sql("SELECT id FROM {db}.t") == [(1,)]
    assert stream.run_fresh_sql("SELECT id, name FROM {db}.t ORDER BY id") == [(1, "a"), (2, "b")]
    assert stream.run_fresh_sql("SELECT count(*), max(id) FROM {db}.t WHERE name = 'b'") == [(1, 2)]


@pytest.mark.parametrize("version", [2, 3])
def test_readers_of_seamark_in_spark_return_rows_before_their_flush(stream: SparkStreamTables, version: int) -> None:
    properties = PROPERTIES if version == 2 else VERSION_3
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + properties)
    stream.post("t", {"id": 1, "name": "a"})
    block_until(lambda: stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)])
    stream.post("t", {"id": 2, "name": "b"}, {"id": 3, "name": "a"})
    join_query = "SELECT a.id FROM {db}.t a JOIN {db}.t b ON a.name = b.name WHERE b.id = 3 ORDER BY a.id"
    for _ in range(2):
        assert stream.run_planned_sql("SELECT count(*) FROM {db}.t") == [(3,)]
        assert stream.run_planned_sql("SELECT id FROM {db}.t WHERE name = 'b'") == [(2,)]
        assert stream.run_planned_sql(join_query) == [(1,), (3,)]
        assert sorted(row[0] for row in stream.load("t")) == [1, 2, 3]
        assert sorted(row[0] for row in stream.load("t", where="id > 1")) == [2, 3]
        assert sorted(row[0] for row in stream.read("t")) == [1, 2, 3]
        stream.flush("t")


def test_append_through_a_catalog_with_the_header_adds_only_its_rows(stream: SparkStreamTables) -> None:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + PROPERTIES)
    stream.post("t", {"id": 1, "name": "a"})
    block_until(lambda: stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)])
    for number in (2, 4, 6):
        stream.post("t", {"id": number, "name": "s"})
        stream.run_fresh_sql(f"INSERT INTO {{db}}.t VALUES ({number + 1}, 'w')")
    expected = [(number,) for number in range(1, 8)]
    assert stream.run_sql("SELECT id FROM {db}.t ORDER BY id") == expected
    stream.flush("t")
    assert stream.run_sql("SELECT id FROM {db}.t ORDER BY id") == expected
    assert stream.run_fresh_sql("SELECT id FROM {db}.t ORDER BY id") == expected


def test_statement_that_changes_rows_flushes_the_stream_first(stream: SparkStreamTables) -> None:
    stream.run_sql("CREATE TABLE {db}.t (id bigint, name string) USING iceberg " + PROPERTIES)
    stream.post("t", {"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    block_until(lambda: stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)])
    stream.post("t", {"id": 3, "name": "a"})
    with pytest.raises(Exception, match="conflicting"):
        stream.run_sql("UPDATE {db}.t SET name = 'z' WHERE name = 'a'")
    stream.run_sql("UPDATE {db}.t SET name = 'z' WHERE name = 'a'")
    assert stream.run_sql("SELECT id, name FROM {db}.t ORDER BY id") == [(1, "z"), (2, "b"), (3, "z")]


@pytest.mark.parametrize("version", ["2", "3"])
def test_spark_reads_the_latest_row_of_each_key_before_and_after_flushes(
    stream: SparkStreamTables, version: str
) -> None:
    properties = f"('seamark.stream.enabled'='true', 'seamark.stream.key'='id', 'format-version'='{version}')"
    stream.run_sql(f"CREATE TABLE {{db}}.t (id bigint, name string) USING iceberg TBLPROPERTIES {properties}")
    stream.post("t", {"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "c"})
    block_until(lambda: stream.run_sql("SELECT count(*) FROM {db}.t.snapshots") == [(1,)])
    stream.post("t", {"id": 1, "name": "d"}, {"id": 2, "_op": "delete"}, {"id": 4, "name": "e"})
    assert stream.run_fresh_sql("SELECT id, name FROM {db}.t ORDER BY id") == [(1, "d"), (3, "c"), (4, "e")]
    stream.post("t", {"id": 4, "name": "f"})
    expected = [(1, "d"), (3, "c"), (4, "f")]
    # In version 3, Spark reads rows before they are flushed (fresh rows) only with the header X-Seamark-Fresh.
    readers = [stream.run_sql, stream.run_fresh_sql] if version == "2" else [stream.run_fresh_sql]
    for _ in range(2):
        for run in readers:
            assert run("SELECT id, name FROM {db}.t ORDER BY id") == expected
            assert run("SELECT count(*), min(name) FROM {db}.t") == [(3, "c")]
            assert run("SELECT id FROM {db}.t WHERE name = 'a'") == []
        stream.flush("t")
        readers = [stream.run_sql, stream.run_fresh_sql]
    stream.run_sql("UPDATE {db}.t SET name = 'g' WHERE id = 3")
    stream.post("t", {"id": 3, "name": "h"})
    assert stream.run_fresh_sql("SELECT name FROM {db}.t WHERE id = 3") == [("h",)]
