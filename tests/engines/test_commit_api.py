"""Tests of snapshots that the server commits, and that unmodified Spark reads and continues.

They cover deletes, row ids and manifests.
"""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import SparkSession

from tests.commits.lake import BY_PART, CommitTable
from tests.commits.reader import check_snapshots, find_snapshot
from tests.commits.reader import read_snapshot_rows as read_rows
from tests.connector.server_thread import ServerThread
from tests.engines.conftest import collect_rows
from tests.services.spark import new_catalog

T = TypeVar("T")


def _sort_rows(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return sorted(rows, key=repr)


class CommitApiTable:
    """A table that a test changes both by Seamark's commit API (`commit`) and by Spark's SQL (`run_sql`)."""

    def __init__(self, server: ServerThread, spark: SparkSession, version: int) -> None:
        self.server, self.spark = server, spark
        self.catalog = new_catalog(spark, server.url)
        properties = {"commit.manifest.min-count-to-merge": "3", "write.delete.mode": "merge-on-read"}
        self.lake = self.run(CommitTable.create(server.api, f"v{version}", version=version, spec=BY_PART, **properties))
        self.name = f"{self.catalog}.db.v{version}"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.server.run(work)  # type: ignore[no-any-return]

    def commit(self, **body: Any) -> Any:
        return self.run(self.lake.commit(body))

    def run_sql(self, statement: str) -> list[tuple[Any, ...]]:
        return collect_rows(self.spark.sql(statement.replace("{t}", self.name)))

    def check_and_read_rows(self) -> list[tuple[Any, ...]]:
        """Check that Spark and the reader of the tests return the same rows, and return these rows."""
        self.run_sql("REFRESH TABLE {t}")
        metadata = self.run(self.lake.read_metadata())
        snapshot = find_snapshot(metadata)
        spark_rows = _sort_rows(self.run_sql("SELECT id, part, value FROM {t}"))
        assert spark_rows == read_rows(snapshot)
        return spark_rows


@pytest.mark.slow
@pytest.mark.parametrize("version", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_spark_reads_and_changes_snapshots_of_the_server(
    server: ServerThread, spark: SparkSession, version: int
) -> None:
    table = CommitApiTable(server, spark, version)
    lake = table.lake
    files = [lake.write_data_file([(n * 10 + index, n % 2, f"r{n}{index}") for index in range(4)]) for n in range(4)]
    last_answer = [table.commit(add=[file]) for file in files][-1]
    check_snapshots(table.run(lake.read_metadata()))
    if version == 3:
        delete_files = lake.write_vectors({files[0]["file-path"]: {0, 2}, files[2]["file-path"]: {1}}, 0)
    else:
        delete_files = [lake.write_position_deletes([(files[0]["file-path"], 0), (files[0]["file-path"], 2)], 0)]
        delete_files.append(lake.write_position_deletes([(files[2]["file-path"], 1)], 0, names_data_file=True))
    table.commit(add=delete_files, **{"read-snapshot-id": last_answer["snapshot-id"]})
    assert len(table.check_and_read_rows()) == 13  # Three of the 16 rows are deleted.
    table.commit(add=[lake.write_equality_deletes([10, 31], 1), lake.write_data_file([(10, 1, "upserted")])])
    assert (10, 1, "upserted") in table.check_and_read_rows()

    # Spark deletes by position and inserts rows. Both commits continue from the server's manifests, row ids and
    # sequence numbers.
    table.run_sql("REFRESH TABLE {t}")
    table.run_sql("DELETE FROM {t} WHERE id IN (1, 22)")
    table.run_sql("INSERT INTO {t} VALUES (100, 0, 'by spark')")
    rows = table.check_and_read_rows()
    assert (100, 0, "by spark") in rows
    assert not {1, 22} & {row[0] for row in rows}
    metadata = table.run(lake.read_metadata())
    head_id = metadata["current-snapshot-id"]
    remove = [{"file-path": files[3]["file-path"]}]
    table.commit(remove=remove, add=[lake.write_data_file([(30, 1, "rewritten")])], **{"read-snapshot-id": head_id})
    check_snapshots(table.run(lake.read_metadata()))
    rows = table.check_and_read_rows()
    assert {row for row in rows if row[0] is not None and row[0] >= 30} == {(30, 1, "rewritten"), (100, 0, "by spark")}
    if version == 3:
        ids = [row[0] for row in table.run_sql("SELECT _row_id FROM {t}")]
        assert len(set(ids)) == len(ids) == len(rows)
        assert None not in ids
    operations = [row[0] for row in table.run_sql("SELECT operation FROM {t}.snapshots ORDER BY committed_at")]
    assert operations[-1] == "overwrite"


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with ServerThread(tmp_path, warehouse=tmp_path.as_uri()) as server:
        yield server
