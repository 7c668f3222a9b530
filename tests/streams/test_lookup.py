"""Tests of lookups by key, in a copy of the table in memory and in the table itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, Unreachable
from seamark.connector.streams import lookup, reader
from seamark.connector.streams.lookup import LookupFailed
from tests.streams.test_rows_over_http import create_stream_table, open_stream_server
from tests.waits import until


async def test_a_copy_in_memory_follows_rows_appends_and_deletes(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        client = SeamarkClient(stream.server.url)
        await asyncio.to_thread(seamark.append, client, "db.t", pa.table({"id": [1, 2], "name": ["a", "b"]}))
        await stream.post({"id": 3, "name": "c"})
        copy = await asyncio.to_thread(lambda: seamark.lookup_table(client, "db.t", key=["id"], columns=["id", "name"]))
        try:
            assert copy.get(2) == {"id": 2, "name": "b"}
            assert copy.get_many([3, 9]) == [{"id": 3, "name": "c"}, None]
            await stream.post({"id": 2, "name": "later"})
            await until(lambda: copy.get(2) == {"id": 2, "name": "later"})
            await asyncio.to_thread(lambda: seamark.delete(client, "db.t", where="id = 1"))
            await until(lambda: copy.get(1) is None)
            assert len(copy) == 2
        finally:
            await asyncio.to_thread(copy.close)


async def test_copy_is_loaded_after_a_lost_connection_and_several_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [Unreachable("lost"), InvalidRequest("a DELETE"), InvalidRequest("another DELETE")]

    def iterate(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return reader.iterate(*args, **options)

    monkeypatch.setattr(lookup, "iterate", iterate)
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        client = SeamarkClient(stream.server.url)
        copy = await asyncio.to_thread(lambda: seamark.lookup_table(client, "db.t", key=["id"], columns=["id"]))
        try:
            assert copy.get(1) == {"id": 1}
        finally:
            await asyncio.to_thread(copy.close)


async def test_lookup_table_fails_with_too_many_keys_or_without_its_table(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        client = SeamarkClient(stream.server.url)
        await stream.post({"id": 1}, {"id": 2}, {"id": 3})
        with pytest.raises(LookupFailed, match="more than 2 keys"):
            await asyncio.to_thread(lambda: seamark.lookup_table(client, "db.t", key=["id"], rows_max=2))
        with pytest.raises(LookupFailed, match="does not exist"):
            await asyncio.to_thread(lambda: seamark.lookup_table(client, "db.nothing", key=["id"]))
        with pytest.raises(InvalidRequest, match="columns does not contain the key column 'id'"):
            seamark.lookup_table(client, "db.t", key=["id"], columns=["name"])


async def test_a_lookup_returns_the_rows_of_the_keys(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        client = SeamarkClient(stream.server.url)
        rows = pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]})
        await asyncio.to_thread(seamark.append, client, "db.t", rows)

        def look_up_names(keys: dict[str, list[object]]) -> list[str]:
            return sorted(seamark.lookup(client, "db.t", keys).column("name").to_pylist())

        assert await asyncio.to_thread(look_up_names, {"id": [1, 3, 9]}) == ["a", "c"]
        assert await asyncio.to_thread(look_up_names, {"id": [1, 2], "name": ["a", "c"]}) == ["a"]
        assert await asyncio.to_thread(look_up_names, {"id": []}) == []
