"""Tests of `seamark rollback`, which returns a table or a namespace to its state at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.rigs.http import HttpClient
from tests.services.seamark import Seamark
from tests.support.commands import invoke_seamark

FIRST_MS = 1_700_000_000_000
"""The time, in milliseconds, of snapshot 0. Snapshot n of `HttpClient.append` is n milliseconds later."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("rollback") / Path("home")) as server:
        yield server


@pytest.fixture
def client(server: Seamark) -> HttpClient:
    client = HttpClient(server.base_url)
    for name in client.call("GET", "/v1/namespaces/db/tables")[1].get("identifiers", []):
        client.call("DELETE", f"/v1/namespaces/db/tables/{name['name']}")
    return client


def create_table(client: HttpClient, name: str, snapshots: int) -> None:
    assert client.create_table(name)[0] == 200
    for number in range(1, snapshots + 1):
        assert client.append(number, number - 1 or None, number, name)[0] == 200


def roll_back(server: Seamark, *arguments: str, snapshot_id: int) -> tuple[int, str]:
    return invoke_seamark("rollback", *arguments, "--to", str(FIRST_MS + snapshot_id), url=server.base_url)


def test_table_is_moved_back_to_the_snapshot_of_the_time(server: Seamark, client: HttpClient) -> None:
    create_table(client, "t", 4)
    code, text = roll_back(server, "db.t", "--dry-run", snapshot_id=2)
    assert (code, "1 table would be moved back" in text) == (0, True), text
    assert client.read_head("t")[0] == 4
    assert roll_back(server, "db.t", snapshot_id=2)[0] == 0
    assert client.read_head("t")[0] == 2
    assert roll_back(server, "db.t", snapshot_id=4)[0] == 0
    assert client.read_head("t")[0] == 4


def test_namespace_is_moved_back_in_one_transaction(server: Seamark, client: HttpClient) -> None:
    for name, snapshots in (("a", 4), ("b", 2), ("c", 1), ("empty", 0)):
        create_table(client, name, snapshots)
    code, text = roll_back(server, "--namespace", "db", "--json", snapshot_id=2)
    assert code == 0, text
    assert json.loads(text) == [{"table": "db.a", "from": 4, "to": 2}]
    assert [client.read_head(name)[0] for name in ("a", "b", "c", "empty")] == [2, 2, 1, None]


def test_table_without_a_snapshot_at_the_time_stops_the_rollback_unless_skipped(
    server: Seamark, client: HttpClient
) -> None:
    create_table(client, "old", 3)
    assert client.create_table("young")[0] == 200
    assert client.append(7, None, 50, "young")[0] == 200
    code, text = roll_back(server, "--namespace", "db", snapshot_id=2)
    assert (code, "db.young: the table had no snapshot" in text) == (1, True), text
    assert client.read_head("old")[0] == 3
    assert roll_back(server, "--namespace", "db", "--skip", snapshot_id=2)[0] == 0
    assert (client.read_head("old")[0], client.read_head("young")[0]) == (2, 7)


def test_rollback_needs_a_table_or_a_namespace(server: Seamark) -> None:
    for arguments in ((), ("db.t", "--namespace", "db")):
        assert roll_back(server, *arguments, snapshot_id=1)[0] == 2
    assert roll_back(server, "db.none", snapshot_id=1)[0] == 1
