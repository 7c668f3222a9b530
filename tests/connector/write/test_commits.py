"""Tests of the client of the commit route: pickled clients, repeated commits and refused commits."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.commits import CommitClient
from seamark.connector.client.errors import InvalidRequest, NoSuchResource, Refused
from tests.commits.lake import CommitTable
from tests.commits.reader import find_snapshot, read_snapshot_rows
from tests.connector.server_thread import ServerThread


@pytest.fixture
def table(server: ServerThread) -> CommitTable:
    new_table: CommitTable = server.run(CommitTable.create(server.api))
    return new_table


def test_commit_returns_its_snapshot_and_whether_it_is_a_duplicate(server: ServerThread, table: CommitTable) -> None:
    client = pickle.loads(pickle.dumps(CommitClient(SeamarkClient(server.url))))
    body: dict[str, Any] = {"add": [table.write_data_file([(1, 0, "a")])], "producer": {"id": "p", "sequence": 1}}
    first_answer = client.commit("db.t", body)
    second_answer = client.commit(("db", "t"), body)
    assert (first_answer["duplicate"], second_answer["duplicate"]) == (False, True)
    assert first_answer["snapshot-id"] == second_answer["snapshot-id"]
    assert read_snapshot_rows(find_snapshot(server.run(table.read_metadata()))) == [(1, 0, "a")]
    client.client.close()


def test_refused_commit_raises_an_error_of_its_kind(server: ServerThread, table: CommitTable) -> None:
    client = CommitClient(SeamarkClient(server.url))
    with pytest.raises(InvalidRequest, match="The change is empty"):
        client.commit("db.t", {})
    with pytest.raises(NoSuchResource):
        client.commit("db.none", {"add": [table.write_data_file([(1, 0, "a")])]})
    with pytest.raises(Refused, match="no longer in the table") as error:
        client.commit("db.t", {"remove": [{"file-path": "file:///x"}], "read-snapshot-id": None})
    assert (error.value.status, error.value.kind) == (409, "CommitFailedException")
    client.client.close()
