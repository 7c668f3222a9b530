"""Tests of appends and overwrites by plain Python: PyIceberg and the catalog read the expected rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import BucketTransform, IdentityTransform
from pyiceberg.types import FloatType, LongType, NestedField, StringType

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import InvalidRequest, Refused, ServerFailed, Unavailable, Unreachable, parse_error
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append, open_destination, overwrite, overwrite_partitions
from seamark.connector.write.table_writer import WrittenFiles, write_batches
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "land", StringType(), required=False),
)
BY_LAND = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "land"))
BY_BUCKET = PartitionSpec(PartitionField(1, 1000, BucketTransform(4), "id_bucket"))
INDEX_PROPERTIES = {
    "seamark.index.ids": "record(id)",
    "seamark.index.lands": "bitmap(land)",
    "seamark.index.b": "bloom(id)",
}
FILES_OF_AN_APPEND = 1 + len(INDEX_PROPERTIES)
"""An append to one partition writes one data file and one file of each index."""


@pytest.fixture
def client(server: ServerThread) -> Iterator[IndexClient]:
    with open_catalog(server.url) as catalog:
        catalog.create_table("db.t", SCHEMA, partition_spec=BY_LAND, properties=INDEX_PROPERTIES)
        catalog.create_table("db.b", SCHEMA, partition_spec=BY_BUCKET)
    with closing(IndexClient(server.url)) as client:
        yield client


def build_rows(*ids: int, land: str | None = "de") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "land": pa.array([land] * len(ids), pa.string())})


def read_ids_by_land(client: IndexClient, name: str = "db.t") -> dict[str | None, list[int]]:
    """Return the ids that PyIceberg reads, by land."""
    ids_by_partition: dict[str | None, list[int]] = {}
    with open_catalog(client.url) as catalog:
        table: Table = catalog.load_table(name)
        for row in table.scan().to_arrow().sort_by("id").to_pylist():
            ids_by_partition.setdefault(row["land"], []).append(row["id"])
    return ids_by_partition


def test_appended_rows_are_in_the_table_and_its_indexes(client: IndexClient, server: ServerThread) -> None:
    answer = append(client, "db.t", [build_rows(1, 2), build_rows(3, land=None)], summary={"job": "nightly"})
    assert answer is not None
    assert answer["operation"] == "append"
    assert answer["summary"]["added-records"] == "3"
    assert answer["summary"]["job"] == "nightly"
    assert read_ids_by_land(client) == {"de": [1, 2], None: [3]}
    for index in client.indexes("db.t"):
        assert (index.files, index.lag_files) == (2, 0), index.name
    lookup = client.lookup("db.t", {"id": [2, 3, 4]})
    assert (lookup.missing, lookup.complete, lookup.rows.num_rows) == (1, True, 2)
    assert client.explain("db.t", "land = 'de' AND id = 2", files=True).files == 1


def test_append_with_too_many_index_files_commits_only_some_of_them(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40  # The default limit of client and server is a thousand files.
    for module_name in ("seamark.connector.write.table_writer", "seamark.metaserver.commit.change_requests.change"):
        monkeypatch.setattr(f"{module_name}.INDEX_FILES_MAX", limit)
    destination = open_destination(client, "db.t")
    # Rounded up: together, the tasks write more than `limit` index files.
    task_count = -(-(limit + 1) // len(INDEX_PROPERTIES))
    written_files = WrittenFiles.join(
        write_batches(destination.target, [build_rows(number).to_batches()[0]]) for number in range(task_count)
    )
    assert len(written_files.index_files) > limit
    destination.commit(client, written_files)
    assert read_ids_by_land(client) == {"de": list(range(task_count))}
    puffins = [written_file for written_file in server.list_written_files() if written_file.suffix == ".puffin"]
    assert len(puffins) == limit, "index files that no commit names are deleted"
    index_reports = client.indexes("db.t")
    assert sum(report.files for report in index_reports) == limit
    assert sum(report.lag_files for report in index_reports) == task_count * len(INDEX_PROPERTIES) - limit


def test_appends_to_the_same_table_all_succeed(client: IndexClient) -> None:
    for number in range(5):
        append(client, "db.b", build_rows(number, number + 100))
    assert read_ids_by_land(client, "db.b") == {"de": [*range(5), *range(100, 105)]}


def test_append_of_no_rows_commits_nothing(client: IndexClient, server: ServerThread) -> None:
    assert append(client, "db.t", build_rows()) is None
    assert overwrite_partitions(client, "db.t", []) is None
    assert read_ids_by_land(client) == {}
    assert server.list_written_files() == set()


def test_append_with_a_repeated_producer_sequence_is_committed_once(client: IndexClient, server: ServerThread) -> None:
    first_report = append(client, "db.t", build_rows(1), producer=("job", 1))
    files_before = server.list_written_files()
    second_report = append(client, "db.t", build_rows(1), producer=("job", 1))
    assert server.list_written_files() == files_before, "the repeated write leaves no file"
    assert first_report is not None
    assert second_report is not None
    assert (first_report["duplicate"], second_report["duplicate"]) == (False, True)
    assert second_report["snapshot-id"] == first_report["snapshot-id"]
    append(client, "db.t", build_rows(2), producer=("job", 2))
    assert read_ids_by_land(client) == {"de": [1, 2]}


def test_files_of_a_commit_with_a_lost_answer_are_kept(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = CommitClient.commit

    def commit_twice(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        commit(self, table, body)  # The client does not receive this answer, and sends the commit again.
        return commit(self, table, body)

    monkeypatch.setattr(CommitClient, "commit", commit_twice)
    answer = append(client, "db.t", build_rows(1, 2), producer=("job", 1))
    assert answer is not None
    assert answer["duplicate"]
    assert read_ids_by_land(client) == {"de": [1, 2]}
    assert len(server.list_written_files()) == FILES_OF_AN_APPEND


def test_overwrite_replaces_exactly_the_partitions_of_its_rows(client: IndexClient) -> None:
    append(client, "db.t", [build_rows(1, 2), build_rows(3, land="fr"), build_rows(4, land=None)])
    answer = overwrite_partitions(client, "db.t", [build_rows(7), build_rows(8, land=None)])
    assert answer is not None
    assert answer["operation"] == "overwrite"
    assert read_ids_by_land(client) == {"de": [7], "fr": [3], None: [8]}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("where", ["land = 'de'", {"type": "eq", "term": "land", "value": "de"}])
def test_overwrite_replaces_the_rows_that_its_predicate_matches(client: IndexClient, where: Any) -> None:
    append(client, "db.t", [build_rows(1, 2), build_rows(3, land="fr")])
    overwrite(client, "db.t", build_rows(9), where=where)
    assert read_ids_by_land(client) == {"de": [9], "fr": [3]}
    overwrite(client, "db.t", build_rows(), where=where)
    assert read_ids_by_land(client) == {"fr": [3]}
    overwrite(client, "db.t", build_rows(5, land="it"))
    assert read_ids_by_land(client) == {"it": [5]}


def test_overwrite_that_splits_a_file_is_refused_and_leaves_no_file(client: IndexClient, server: ServerThread) -> None:
    append(client, "db.t", build_rows(1, 2))
    files_before = server.list_written_files()
    with pytest.raises(InvalidRequest):
        overwrite(client, "db.t", build_rows(9), where="id = 1")
    with pytest.raises(InvalidRequest, match="exactly by all parts of this predicate: id"):
        overwrite(client, "db.t", build_rows(9), where="id + 1 = 2")
    assert server.list_written_files() == files_before
    assert read_ids_by_land(client) == {"de": [1, 2]}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("where", ["f < 0.1", "f > 0.1", "f = 0.1"])
def test_overwrite_with_an_inexact_literal_is_refused(client: IndexClient, where: str) -> None:
    with open_catalog(client.url) as catalog:
        catalog.create_table("db.f", Schema(NestedField(1, "f", FloatType(), required=False)))
    # The predicate cannot match this value exactly, because no float equals 0.1.
    table = pa.table({"f": pa.array([0.1], pa.float32())})
    append(client, "db.f", table)
    with pytest.raises(InvalidRequest, match="a column cannot hold its literal"):
        overwrite(client, "db.f", table.slice(0, 0), where=where)
    with open_catalog(client.url) as catalog:
        assert catalog.load_table("db.f").scan().to_arrow().num_rows == 1


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "answers",
    [
        [(503, ""), (409, "AlreadyExistsException")],
        [(503, ""), (409, "CommitFailedException")],
        [(409, "AlreadyExistsException")],
    ],
)
@pytest.mark.parametrize("producer", [None, ("p", 1)])
def test_files_are_kept_if_an_earlier_request_may_have_committed_them(
    client: IndexClient,
    server: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[tuple[int, str]],
    producer: tuple[str, int] | None,
) -> None:
    """A proxy may answer 503 although it has forwarded the request. Then the commit may use the files."""
    remaining_answers, send_request = list(answers), IndexClient._request

    def refuse_request(self: IndexClient, method: str, path: str, *arguments: Any, **options: Any) -> bytes:
        if not path.endswith("/commit"):
            return send_request(self, method, path, *arguments, **options)
        status, kind = remaining_answers.pop(0)
        raise parse_error(status, json.dumps({"error": {"message": "no", "type": kind}}).encode(), "")

    monkeypatch.setattr("seamark.connector.client.client.SeamarkClient._request", refuse_request)
    with pytest.raises((Refused, Unavailable)):
        append(client, "db.t", build_rows(1, 2), producer=producer)
    assert len(server.list_written_files()) == FILES_OF_AN_APPEND


def test_append_of_invalid_rows_commits_nothing(client: IndexClient, server: ServerThread) -> None:
    with pytest.raises(Unwritable, match="column id is required"):
        append(client, "db.t", [build_rows(1), pa.table({"id": pa.array([None], pa.int64())})])
    assert server.list_written_files() == set()
    assert read_ids_by_land(client) == {}


def test_conflicting_overwrite_is_refused_and_leaves_no_file(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(client, "db.t", build_rows(1))
    commit = CommitClient.commit
    kept_paths: set[Path] = set()

    def append_and_commit(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        monkeypatch.setattr(CommitClient, "commit", commit)
        written_files = server.list_written_files()
        append(client, "db.t", build_rows(2))
        kept_paths.update(server.list_written_files() - written_files)
        return commit(self, table, body)

    files_before = server.list_written_files()
    monkeypatch.setattr(CommitClient, "commit", append_and_commit)
    with pytest.raises(Refused) as error:
        overwrite(client, "db.t", build_rows(9), where="land = 'de'")
    assert error.value.status == 409
    assert server.list_written_files() == files_before | kept_paths
    assert read_ids_by_land(client) == {"de": [1, 2]}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("error", [Unreachable("cut off"), ServerFailed("?", status=500)])
def test_files_of_a_commit_with_an_unknown_outcome_are_kept(
    client: IndexClient, server: ServerThread, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    commit = CommitClient.commit

    def lose_answer(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        commit(self, table, body)
        raise error

    monkeypatch.setattr(CommitClient, "commit", lose_answer)
    with pytest.raises(type(error)):
        append(client, "db.t", build_rows(1, 2))
    assert read_ids_by_land(client) == {"de": [1, 2]}
    assert len(server.list_written_files()) == FILES_OF_AN_APPEND


def test_rows_are_appended_to_a_branch(client: IndexClient) -> None:
    append(client, "db.t", build_rows(1))
    with open_catalog(client.url) as catalog:
        table = catalog.load_table("db.t")
        snapshot = table.current_snapshot()
        assert snapshot is not None
        table.manage_snapshots().create_branch(snapshot.snapshot_id, "audit").commit()
    append(client, "db.t", build_rows(2), branch="audit")
    overwrite_partitions(client, "db.t", build_rows(3), branch="audit")
    assert read_ids_by_land(client) == {"de": [1]}
    with open_catalog(client.url) as catalog:
        table = catalog.load_table("db.t")
        branch = table.snapshot_by_name("audit")
        assert branch is not None
        assert table.scan(snapshot_id=branch.snapshot_id).to_arrow()["id"].to_pylist() == [3]


def test_append_is_refused_if_another_table_has_taken_the_name(
    client: IndexClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = CommitClient.commit

    def replace_and_commit(self: CommitClient, table: Any, body: dict[str, Any]) -> dict[str, Any]:
        with open_catalog(client.url) as catalog:
            catalog.drop_table("db.b")
            catalog.create_table("db.b", SCHEMA, partition_spec=BY_BUCKET)
        return commit(self, table, body)

    monkeypatch.setattr(CommitClient, "commit", replace_and_commit)
    with pytest.raises(Refused) as error:
        append(client, "db.b", build_rows(1))
    assert error.value.status == 409
    monkeypatch.setattr(CommitClient, "commit", commit)
    assert read_ids_by_land(client, "db.b") == {}
