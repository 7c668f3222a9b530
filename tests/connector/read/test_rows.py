"""Lookups and bitmaps of the client against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa
import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, NoSuchResource, ServerFailed
from seamark.connector.client.row_answers import encode_keys, parse_lookup
from seamark.connector.client.values import At
from tests.api.rest.stored import StoredTable
from tests.connector.server_thread import ServerThread


@pytest.fixture
def stored_table(server: ServerThread) -> StoredTable:
    """Return a table with 3 files of 10 rows, one deleted row, and two indexes. `keys` covers only two files."""

    async def make() -> StoredTable:
        new_table = await StoredTable.create(server.api)
        files = [new_table.write_data_file([(10 * n + index, "a", None, 1) for index in range(10)]) for n in range(3)]
        await new_table.commit(files)
        await new_table.commit(deletes=[new_table.write_position_deletes([(files[0].path, 5)])])
        await new_table.index("keys", "record", ["id", "name"], files[:2])
        await new_table.index("marks", "bitmap", ["id"], files)
        return new_table

    table: StoredTable = server.run(make())
    return table


@pytest.fixture
def client(server: ServerThread) -> Iterator[SeamarkClient]:
    with closing(SeamarkClient(server.url)) as client:
        yield client


def test_keys_are_found_by_the_names_of_their_columns(client: SeamarkClient, stored_table: StoredTable) -> None:
    files = [file.path for file in stored_table.snapshots[-1].data]
    lookup = client.lookup("db.t", {"name": ["a", "a", "b", "a"], "id": [4, 5, 4, 25]}, partitions=True)
    assert (lookup.snapshot_id, lookup.index, lookup.missing) == (2, "keys", 3)
    assert (lookup.complete, lookup.uncovered_files, lookup.uncovered) == (False, 1, (files[2],))
    assert (lookup.undecided, lookup.problems) == (0, ())
    assert lookup.rows.to_pylist() == [
        {"key": 0, "file_path": files[0], "position": 4, "undecided": False, "spec_id": 0, "partition": "{}"}
    ]
    old_result = client.lookup("db.t", pa.table({"id": [5], "name": ["a"]}), index="keys", at=At(snapshot_id=1))
    assert old_result.rows.column("position").to_pylist() == [5]


def test_bitmap_returns_the_rows_of_a_predicate_file_by_file(client: SeamarkClient, stored_table: StoredTable) -> None:
    files = [file.path for file in stored_table.snapshots[-1].data]
    bitmap = list(client.bitmap("db.t", "id BETWEEN 4 AND 11", deletes=True))
    assert [(file_rows.file_path, file_rows.positions.tolist(), file_rows.exact) for file_rows in bitmap] == [
        (files[0], [4, *range(6, 10)], True),
        (files[1], [0, 1], True),
    ]
    assert [
        file_rows.count for file_rows in client.bitmap("db.t", filter={"type": "eq", "term": "id", "value": 5})
    ] == [1]
    (file,) = client.bitmap("db.t", "id = 5 AND name = 'a'", at=At(snapshot_id=1))
    assert (file.positions.tolist(), file.exact) == ([5], False)
    all_bitmaps = list(client.bitmap("db.t", "name = 'a'"))
    assert [(file_rows.roaring, file_rows.positions.tolist()) for file_rows in all_bitmaps] == [
        (None, list(range(10)))
    ] * 3


def test_client_follows_the_pages_of_a_bitmap(
    server: ServerThread, client: SeamarkClient, stored_table: StoredTable
) -> None:
    bodies = []
    request = client._request

    def request_one_row(method: str, path: str, query: dict[str, object], body: bytes, **options: object) -> bytes:
        bodies.append(body)
        return request(method, path, query, body.replace(b"{", b'{"limit": 1, ', 1), **options)  # type: ignore[arg-type]

    client._request = request_one_row  # type: ignore[method-assign, assignment]
    assert [file_rows.count for file_rows in client.bitmap("db.t", "id >= 0")] == [10, 10, 10]
    assert len(bodies) == 3


def test_errors_of_the_server_are_raised_with_their_message(client: SeamarkClient, stored_table: StoredTable) -> None:
    with pytest.raises(InvalidRequest, match="No record index is on id"):
        client.lookup("db.t", {"id": [1]})
    with pytest.raises(NoSuchResource, match="no index 'nope'"):
        client.lookup("db.t", {"id": [1]}, index="nope")
    with pytest.raises(InvalidRequest, match="not valid SQL"):
        list(client.bitmap("db.t", "id ="))


def test_invalid_answer_to_a_lookup_is_a_server_failure(client: SeamarkClient) -> None:
    client._request = lambda *_, **__: encode_keys({"id": [1]})  # type: ignore[method-assign]
    with pytest.raises(ServerFailed, match="not a lookup"):
        client.lookup("db.t", {"id": [1]})
    with pytest.raises(KeyError):
        parse_lookup(pa.table({"key": [1]}))
