"""Tests that a stream table keeps its rows when it is unregistered, registered or overwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.store.operations import ReleaseLocations
from seamark.metaserver.streams import catalog_tables
from seamark.metaserver.streams.pauses import Pauses, StreamPaused
from tests.streams.incoming.test_append_gates import commit_table, make_schema_updates
from tests.streams.keys.test_row_keys import create_table
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server


async def request(stream: StreamServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    url = f"{stream.server.url}/v1/namespaces/db/{path}"
    async with stream.server.http.request(method, url, json=body) as answer:
        return answer.status, await answer.json()


async def test_table_that_is_registered_again_has_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("all snapshots are searched for flushes, although the database has the offsets")

    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        _, first_table = await request(stream, "GET", "tables/t")
        await stream.post({"id": 0}, {"id": 1})
        await stream.flush()
        await stream.post({"id": 2})
        assert await commit_table(stream, make_schema_updates([(1, "id", "long", False)], [])) == 200
        await stream.post({"id": 3})
        (uuid,) = stream.server.components.streams.tables
        _, last_table = await request(stream, "POST", "tables/t/unregister", {})
        openings = stream.server.components.streams.openings
        await openings._remove_purged()
        status, answer = await request(
            stream, "POST", "register", {"name": "t", "metadata-location": first_table["metadata-location"]}
        )
        assert (status, "lack its schemas 1" in str(answer)) == (400, True)
        registration = {"name": "t", "metadata-location": last_table["metadata-location"]}
        assert (await request(stream, "POST", "register", registration))[0] == 200
        await stream.post({"id": 4})
        assert await stream.ids() == [0, 1, 2, 3, 4]
        await stream.server.components.streams.flush(uuid)
        assert await stream.ids() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(catalog_tables, "find_returning_offsets", refuse)
    async with open_stream_server(tmp_path) as stream:
        await stream.post({"id": 5})
        assert await stream.ids() == [0, 1, 2, 3, 4, 5]


async def test_table_that_returns_after_the_database_has_forgotten_its_offsets_has_each_row_once(
    tmp_path: Path,
) -> None:
    async def register(stream: StreamServer, location: str) -> tuple[int, Any]:
        return await request(stream, "POST", "register", {"name": "t", "metadata-location": location})

    async def unregister(stream: StreamServer) -> str:
        _, last_table = await request(stream, "POST", "tables/t/unregister", {})
        await stream.server.components.store.transact([ReleaseLocations(uuid=last_table["metadata"]["table-uuid"])])
        return str(last_table["metadata-location"])

    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        _, first_table = await request(stream, "GET", "tables/t")
        await stream.post({"id": 0})
        await stream.flush()
        columns = [(1, "id", "long", True), (9, "c", "int", False)]
        assert await commit_table(stream, make_schema_updates(columns, [])) == 200
        await stream.post({"id": 1, "c": 5})
        last_location = await unregister(stream)
        status, answer = await register(stream, first_table["metadata-location"])
        assert (status, "lack its schemas 1" in str(answer)) == (400, True)
        assert (await register(stream, last_location))[0] == 200
        assert await stream.ids() == [0, 1]
        await stream.post({"id": 2})
        assert await stream.ids() == [0, 1, 2]
        await stream.flush()
    async with open_stream_server(tmp_path) as stream:
        assert (await register(stream, await unregister(stream)))[0] == 200
        await stream.post({"id": 3})
        assert await stream.ids() == [0, 1, 2, 3]
        await stream.flush()
        assert await stream.ids() == [0, 1, 2, 3]


async def test_stream_table_is_not_overwritten_with_other_metadata(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        _, first_table = await request(stream, "GET", "tables/t")
        overwrite = {"name": "t", "metadata-location": first_table["metadata-location"], "overwrite": True}
        assert (await request(stream, "POST", "register", overwrite))[0] == 200
        assert (
            await commit_table(stream, make_schema_updates([(1, "id", "long", False), (9, "c", "int", False)], []))
            == 200
        )
        for _ in range(2):  # A first row may arrive at the same time, so a table without rows is not overwritten.
            status, answer = await request(stream, "POST", "register", overwrite)
            assert (status, "it is a stream table" in str(answer)) == (400, True)
            await stream.post({"id": 1, "c": 5})
        assert await stream.ids() == [1, 1]


def test_pause_is_forgotten_when_another_server_registers_earlier_metadata() -> None:
    """The other server cannot notify this server, so this server remembers a pause for a minute only."""
    metadata, clock = create_table("id"), SimulatedClock(1)
    pauses = Pauses(clock)
    pauses.record("uuid", metadata)
    with pytest.raises(StreamPaused):
        pauses.check("uuid", metadata, "db.t")
    clock.advance(61_000)  # The minute ended a second ago.
    pauses.check("uuid", metadata, "db.t")
