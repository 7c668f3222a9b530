"""The client's access to a catalog: namespaces and tables page by page, and the storage of a table's files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import NoSuchResource
from seamark.formats.iceberg.metadata.table_json import decode_table
from tests.connector.lake import SCHEMA, append_parts, create_lake_table, open_catalog
from tests.connector.server_thread import ServerThread


def test_namespaces_of_all_levels_and_their_tables_are_listed_page_by_page(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.connector.client.client._NAMES_PER_PAGE", 2)
    names = [("a",), ("a", "b"), ("a", "b", "c"), ("d",), ("e",), ("f",), ("a", "x.y")]
    with open_catalog(server.url) as catalog:
        for name in names:
            catalog.create_namespace(name)
        for number in range(5):
            catalog.create_table(("a", "x.y", f"t{number}"), schema=SCHEMA)
    client = SeamarkClient(server.url)
    namespaces = list(client.namespaces())
    assert sorted(namespaces) == sorted([*names, ("db",)])
    assert all(namespaces.index(name[:-1]) < namespaces.index(name) for name in namespaces if len(name) > 1)
    assert list(client.tables(("a", "x.y"))) == [("a", "x.y", f"t{number}") for number in range(5)]
    assert list(client.tables(("d",))) == []
    with pytest.raises(NoSuchResource):
        list(client.tables(("nope",)))
    client.close()


def test_table_is_loaded_below_the_servers_prefix(tmp_path: Path) -> None:
    server = ServerThread(tmp_path, warehouse=tmp_path.as_uri(), prefix="main")
    server.start()
    try:
        create_lake_table(server.url)
        append_parts(server.url, "db.t", [[1, 2], [3]])
        client = SeamarkClient(server.url)
        loaded_table = client.load_table("db.t")
        metadata = decode_table(loaded_table.metadata, loaded_table.location)
        assert (metadata.location, [snapshot.snapshot_id for snapshot in metadata.snapshots]) == (
            loaded_table.location,
            [metadata.current_snapshot_id],
        )
        assert [field.name for field in metadata.current_schema.fields] == SCHEMA.names
        with pytest.raises(NoSuchResource):
            client.load_table("db.nope")
        client.close()
    finally:
        server.stop()


def test_credentials_of_the_longest_prefix_are_used_and_are_in_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        b'{"metadata":{"location":"s3://lake/db/t"},"config":{"s3.endpoint":"http://s3","s3.access-key-id":"any"},'
        b'"storage-credentials":[{"prefix":"s3://lake/db/t/","config":{"s3.access-key-id":"mine"}},'
        b'{"prefix":"s3://lake/","config":{"s3.access-key-id":"all","s3.session-token":"hush"}},'
        b'{"prefix":"s3://lake/db/t/data/","config":{"s3.access-key-id":"deeper"}}]}'
    )
    client = SeamarkClient("http://127.0.0.1:9")
    response = SimpleNamespace(status=200, data=answer, headers={})
    monkeypatch.setattr(client, "_request", lambda *_, **__: b"{}")
    monkeypatch.setattr(client, "_send", lambda *_, **__: response)
    loaded_table = client.load_table("db.t")
    assert loaded_table.storage == {
        "s3.endpoint": "http://s3",
        "s3.access-key-id": "mine",
        "s3.session-token": "hush",
    }
    assert "hush" not in repr(loaded_table)
