"""Tests of unmodified PyIceberg and Spark that append to one table concurrently, without retries.

With the table's `seamark.commit.rebase`, no append fails and each row is in the table once. The engines delete only
files that no snapshot needs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException
from pyspark.sql import SparkSession

from tests.catalog.appender import Row, read_list, read_snapshot, to_local_path
from tests.engines.conftest import collect_rows
from tests.faults.rigs.http import HttpClient
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

NO_RETRIES = {"commit.retry.num-retries": "0"}
REBASE = {"seamark.commit.rebase": "append", **NO_RETRIES}
MERGE = {"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "2"}
SCHEMA = pa.schema([("writer", pa.int64()), ("number", pa.int64())])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("rebase") / "home") as server:
        with _open_catalog(server) as catalog:
            catalog.create_namespace("db")
        yield server


def _open_catalog(server: Seamark) -> RestCatalog:
    return RestCatalog("seamark", uri=server.base_url)


class PyIcebergWriter:
    """A writer whose commits are based on the state after its own last commit, because it never refreshes its table."""

    def __init__(self, server: Seamark, name: str, writer: int) -> None:
        self._table = _open_catalog(server).load_table(f"db.{name}")
        self._writer = writer

    def __call__(self, number: int) -> None:
        self._table.append(pa.table([[self._writer] * 2, [2 * number, 2 * number + 1]], schema=SCHEMA))


class IsolatedSparkWriter:
    """A writer with its own catalog in Spark, so that it shares no cached table with other writers."""

    def __init__(self, spark: SparkSession, server: Seamark, name: str, writer: int) -> None:
        self._spark, self._writer = spark, writer
        self._table = f"{new_catalog(spark, server.base_url)}.db.{name}"

    def __call__(self, number: int) -> None:
        values = ", ".join(f"({self._writer}, {2 * number + i})" for i in range(2))
        self._spark.sql(f"INSERT INTO {self._table} VALUES {values}")


def _append_at_once(writers: Sequence[Callable[[int], None]], times: int) -> Counter[tuple[int, int]]:
    """Append two rows `times` times with each writer, all writers at once, and return the expected rows."""
    start_barrier = Barrier(len(writers))

    def write_repeatedly(write: Callable[[int], None]) -> None:
        for number in range(times):
            if number == 0:
                start_barrier.wait(timeout=120)
            write(number)

    with ThreadPoolExecutor(len(writers)) as pool:
        for future in [pool.submit(write_repeatedly, writer) for writer in writers]:
            future.result(timeout=300)
    return Counter(itertools.product(range(len(writers)), range(2 * times)))


def _read_metadata(server: Seamark, name: str) -> Row:
    status, body = HttpClient(server.base_url).call("GET", f"/v1/namespaces/db/tables/{name}?snapshots=all")
    assert status == 200, body
    metadata: Row = body["metadata"]
    return metadata


def _check_files(metadata: Row, appends: int) -> int:
    """Check that all files of every snapshot exist, and that each snapshot has one append more than its parent.

    Returns:
        The number of rebased snapshots.
    """
    snapshots = sorted(metadata["snapshots"], key=lambda snapshot: snapshot["sequence-number"])
    assert len(snapshots) == appends
    previous_files: set[str] = set()
    for parent, snapshot in zip([None, *snapshots], snapshots, strict=False):
        assert snapshot.get("parent-snapshot-id") == (parent and parent["snapshot-id"])
        files = read_snapshot(snapshot)
        assert previous_files < set(files)
        assert all(to_local_path(path).is_file() for path in files)
        assert snapshot["summary"]["total-data-files"] == str(len(files))
        assert snapshot["summary"]["total-records"] == str(sum(file.records for file in files.values()))
        assert {file.sequence_number for path, file in files.items() if path not in previous_files} == {
            snapshot["sequence-number"]
        }
        previous_files = set(files)
    return sum(map(_is_rebased, snapshots))


def _is_rebased(snapshot: Row) -> bool:
    """Return True if the name of the manifest list, snap-ID-NUMBER-COMMIT, shows a rebase.

    Engines number their attempts, and make only one attempt in these tests. The names of their manifests begin with the
    commit id. Seamark numbers the files that it writes for a snapshot, and may write only the manifest list.
    """
    number, commit = snapshot["manifest-list"].rpartition("/")[2].removesuffix(".avro").split("-", 3)[2:]
    added_manifests = [row for row in read_list(snapshot) if row["added_snapshot_id"] == snapshot["snapshot-id"]]
    return number not in ("0", "1") or all(commit not in row["manifest_path"] for row in added_manifests)


def _list_unneeded_files(metadata: Row) -> set[str]:
    """Return the names of the manifests and manifest lists that no snapshot needs.

    Also check that the manifests and manifest lists of all snapshots exist.
    """
    list_names = {to_local_path(snapshot["manifest-list"]).name for snapshot in metadata["snapshots"]}
    manifest_names = {
        to_local_path(row["manifest_path"]).name for snapshot in metadata["snapshots"] for row in read_list(snapshot)
    }
    avro_names = {path.name for path in (to_local_path(metadata["location"]) / "metadata").glob("*.avro")}
    assert list_names | manifest_names <= avro_names
    return avro_names - list_names - manifest_names


def _create_table(server: Seamark, name: str, properties: dict[str, str]) -> None:
    with _open_catalog(server) as catalog:
        catalog.create_table(f"db.{name}", schema=SCHEMA, properties=properties)


def _read_by_pyiceberg(server: Seamark, name: str) -> Counter[tuple[int, int]]:
    with _open_catalog(server) as catalog:
        rows = catalog.load_table(f"db.{name}").scan().to_arrow().to_pylist()
    return Counter((row["writer"], row["number"]) for row in rows)


APPEND_KINDS = [
    pytest.param(False, id="fast append", marks=pytest.mark.slow),
    pytest.param(True, id="merge append"),
]


@pytest.mark.slow
@pytest.mark.parametrize("merges_manifests", APPEND_KINDS)
def test_appends_of_eight_pyiceberg_writers_to_one_table_all_succeed(server: Seamark, merges_manifests: bool) -> None:
    name = f"pyicebergs_{merges_manifests}".lower()
    _create_table(server, name, REBASE | (MERGE if merges_manifests else {}))
    expected = _append_at_once([PyIcebergWriter(server, name, writer) for writer in range(8)], times=5)
    assert _read_by_pyiceberg(server, name) == expected
    metadata = _read_metadata(server, name)
    assert _check_files(metadata, appends=40) > 10
    manifests = read_list(max(metadata["snapshots"], key=lambda snapshot: snapshot["sequence-number"]))
    assert any(row["existing_files_count"] for row in manifests) == merges_manifests


def test_concurrent_appends_fail_without_rebase(server: Seamark) -> None:
    _create_table(server, "refused", NO_RETRIES)
    with pytest.raises(CommitFailedException):
        _append_at_once([PyIcebergWriter(server, "refused", writer) for writer in range(8)], times=5)


@pytest.mark.slow
@pytest.mark.parametrize("merges_manifests", APPEND_KINDS)
def test_appends_of_spark_and_pyiceberg_to_one_table_all_succeed(
    server: Seamark, spark: SparkSession, merges_manifests: bool
) -> None:
    name = f"mixed_{merges_manifests}".lower()
    _create_table(server, name, REBASE | (MERGE if merges_manifests else {"commit.manifest-merge.enabled": "false"}))
    writers: list[Any] = [PyIcebergWriter(server, name, writer) for writer in range(4)]
    writers += [IsolatedSparkWriter(spark, server, name, writer) for writer in range(4, 8)]
    expected = _append_at_once(writers, times=4)
    assert _check_files(_read_metadata(server, name), appends=32) > 5
    assert _read_by_pyiceberg(server, name) == expected
    read_rows = collect_rows(spark.sql(f"SELECT writer, number FROM {new_catalog(spark, server.base_url)}.db.{name}"))
    assert Counter(read_rows) == expected


@pytest.mark.slow
@pytest.mark.parametrize("merges_manifests", APPEND_KINDS)
def test_rows_of_rebased_appends_have_unique_row_ids_in_version_3(
    server: Seamark, spark: SparkSession, merges_manifests: bool
) -> None:
    name, catalog = f"rows_{merges_manifests}".lower(), new_catalog(spark, server.base_url)
    properties = (
        REBASE | {"format-version": "3"} | (MERGE if merges_manifests else {"commit.manifest-merge.enabled": "false"})
    )
    table_properties = ", ".join(f"'{key}'='{value}'" for key, value in properties.items())
    spark.sql(
        f"CREATE TABLE {catalog}.db.{name} (writer bigint, number bigint) USING iceberg "
        f"TBLPROPERTIES ({table_properties})"
    )
    expected = _append_at_once([IsolatedSparkWriter(spark, server, name, writer) for writer in range(6)], times=4)
    metadata = _read_metadata(server, name)
    assert _check_files(metadata, appends=24) > 3
    assert _list_unneeded_files(metadata) == set(), "Java has deleted the manifests of its failed attempts"
    select = "SELECT writer, number, _row_id, _last_updated_sequence_number FROM "
    row_ids = collect_rows(spark.sql(f"{select}{new_catalog(spark, server.base_url)}.db.{name}"))
    assert Counter(row[:2] for row in row_ids) == expected
    ids = sorted(row[2] for row in row_ids)
    assert len(set(ids)) == len(ids)
    assert ids[-1] < metadata["next-row-id"]
    if not merges_manifests:
        assert ids == list(range(len(ids))), "the row ids of each append follow the row ids of the previous append"
        assert metadata["next-row-id"] == len(ids)
    last_snapshot = max(metadata["snapshots"], key=lambda snapshot: snapshot["sequence-number"])
    assert {row[3] for row in row_ids} == {file.sequence_number for file in read_snapshot(last_snapshot).values()}
