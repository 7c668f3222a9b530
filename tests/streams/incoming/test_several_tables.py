"""Tests of requests with rows for several stream tables. The server stores all rows once, or no row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from seamark.metaserver.api.streams import several_tables
from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE
from seamark.metaserver.streams.incoming.new_columns import NEW_COLUMNS
from seamark.metaserver.streams.stream_properties import ENABLED
from seamark.metaserver.streams.stream_table import StreamTable
from tests.seeds import first_seed
from tests.streams.incoming.test_dead_letters import create_dead_letter_table, read_dead_letter_rows
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, open_stream_server
from tests.waits import PATIENCE_S, until


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        for name in ("t", "u"):
            await asyncio.to_thread(stream.catalog.create_table, f"db.{name}", SCHEMA, properties={ENABLED: "true"})
        yield stream


async def send_rows(stream: StreamServer, query: str = "", **rows: list[Any]) -> tuple[int, Any]:
    tables = [{"namespace": ["db"], "name": name, "rows": values} for name, values in rows.items()]
    async with stream.server.http.post(f"{stream.server.url}/api/v1/rows{query}", json={"tables": tables}) as answer:
        return answer.status, await answer.json()


async def read_ids(stream: StreamServer, name: str) -> list[int]:
    rows = await asyncio.to_thread(lambda: stream.catalog.load_table(f"db.{name}").scan().to_arrow())
    return sorted(rows.column("id").to_pylist())


async def test_rows_of_several_tables_are_appended_once(stream: StreamServer) -> None:
    for is_repeated in (False, True):
        status, answer = await send_rows(stream, "?producer=p&sequence=0", t=[{"id": 1}], u=[{"id": 2}, {"id": 3}])
        assert status == 200
        assert [(table["rows"], table["duplicate"]) for table in answer["tables"]] == [
            (1, is_repeated),
            (2, is_repeated),
        ]
    assert (await read_ids(stream, "t"), await read_ids(stream, "u")) == ([1], [2, 3])


async def test_request_for_several_tables_is_refused_as_a_whole_if_one_row_is_invalid(stream: StreamServer) -> None:
    status, answer = await send_rows(stream, t=[{"id": 1}], u=[{"id": "x"}])
    assert (status, "Row 0, column id" in answer["error"]["message"]) == (400, True)
    status, answer = await send_rows(stream, t=[{"id": 1}], missing=[{"id": 1}])
    assert status == 404
    status, answer = await send_rows(stream)
    assert (status, "name 1 to 100" in answer["error"]["message"]) == (400, True)
    tables = [{"namespace": ["db"], "name": "t", "rows": []}] * 2
    async with stream.server.http.post(f"{stream.server.url}/api/v1/rows", json={"tables": tables}) as response:
        assert (response.status, "twice" in (await response.json())["error"]["message"]) == (400, True)
    assert (await read_ids(stream, "t"), await read_ids(stream, "u")) == ([], [])


async def test_tables_share_a_dead_letter_table(stream: StreamServer) -> None:
    await create_dead_letter_table(stream)

    def set_property(name: str) -> None:
        with stream.catalog.load_table(f"db.{name}").transaction() as change:
            change.set_properties({DEAD_LETTER_TABLE: "db.t_errors"})

    for name in ("t", "u"):
        await asyncio.to_thread(set_property, name)
    status, answer = await send_rows(stream, t=[{"id": 1}, {"id": "x"}], u=[{"id": "y"}])
    assert (status, [table["rejected"] for table in answer["tables"]]) == (200, [1, 1])
    assert sorted(letter["table"] for letter in await read_dead_letter_rows(stream)) == ["db.t", "db.u"]
    status, answer = await send_rows(stream, t=[{"id": "x"}], t_errors=[{"raw": "a", "reason": "b"}])
    assert (status, "db.t_errors is the dead-letter table of another table" in answer["error"]["message"]) == (
        400,
        True,
    )


async def test_tables_get_new_columns_of_their_rows_if_all_rows_fit(stream: StreamServer) -> None:
    def set_rule(name: str, rule: str) -> None:
        with stream.catalog.load_table(f"db.{name}").transaction() as change:
            change.set_properties({NEW_COLUMNS: rule})

    async def list_columns() -> list[list[str]]:
        tables = [await asyncio.to_thread(stream.catalog.load_table, f"db.{name}") for name in ("t", "u")]
        return [[field.name for field in table.schema().fields] for table in tables]

    column_names = await list_columns()
    await asyncio.to_thread(set_rule, "t", "add")
    rows = [{"id": 1, "town": "Ulm", "later": None}]
    for other_rows in ([{"id": 1, "size": 3}], [{"id": "x"}]):
        status, answer = await send_rows(stream, t=rows, u=other_rows)
        assert status == 400, answer
        assert await list_columns() == column_names, "a refused request must not add columns"
    await asyncio.to_thread(set_rule, "u", "add")
    for is_repeated in (False, True):
        status, answer = await send_rows(stream, "?producer=p&sequence=0", t=rows, u=[{"id": 2, "size": 3}, {"id": 3}])
        assert status == 200, answer
        assert [table["duplicate"] for table in answer["tables"]] == [is_repeated] * 2
    assert await list_columns() == [[*column_names[0], "town"], [*column_names[1], "size"]]
    t, u = [
        await asyncio.to_thread(lambda name=name: stream.catalog.load_table(f"db.{name}").scan().to_arrow())
        for name in ("t", "u")
    ]
    assert (t.column("town").to_pylist(), sorted(u.column("size").to_pylist(), key=str)) == (["Ulm"], [3, None])


async def test_rows_of_all_tables_share_one_limit_of_bytes(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_tables, "DECODED_BYTES_MAX", 3_000)
    status, answer = await send_rows(stream, t=[{"id": 1}] * 100, u=[{"id": 2}] * 100)
    assert (status, "more than 3,000 bytes" in answer["error"]["message"]) == (413, True)
    assert (await read_ids(stream, "t"), await read_ids(stream, "u")) == ([], [])


async def open_tables(stream: StreamServer) -> list[StreamTable]:
    """Append a row to each table, wait until they are flushed, and return the open tables t and u."""
    assert (await send_rows(stream, t=[{"id": 0}], u=[{"id": 0}]))[0] == 200
    streams = stream.server.components.streams
    await until(lambda: len(streams.tables) == 2 and streams.size_bytes == 0)
    entries = [await stream.server.components.catalog.tables.load_entry(("db",), name) for name in ("t", "u")]
    return [streams.tables[entry.uuid] for entry in entries]


async def test_large_request_waits_until_all_tables_have_memory(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", PATIENCE_S)
    t, u = await open_tables(stream)
    room = stream.server.components.streams.body_room
    # With new rows, a table may not use more memory than remains free. Now each table uses a third of the memory, and
    # a third is free, so neither table has memory for a large body.
    t.appending_bytes = u.appending_bytes = stream.server.components.settings.stream_memory_bytes // 3
    large_rows = [{"id": 1, "name": "x" * 150_000}]  # The memory is 1 MiB, and has room for these rows of both tables.
    # The requests name the tables in opposite orders.
    requests = [asyncio.create_task(send_rows(stream, t=large_rows, u=large_rows)) for _ in range(2)]
    requests += [asyncio.create_task(send_rows(stream, u=large_rows, t=large_rows)) for _ in range(2)]
    await until(lambda: room.waiter_count == 4)
    tables = [{"namespace": ["db"], "name": name, "rows": [{"id": 2}]} for name in ("t", "u")]
    async with stream.server.http.post(f"{stream.server.url}/api/v1/rows", json={"tables": tables}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
    t.appending_bytes = 0
    u.appending_bytes *= 2
    async with asyncio.timeout(PATIENCE_S / 2):  # A large body for the table t does not wait for the table u.
        assert (await send_rows(stream, t=[{"id": 3, "name": "x" * 300_000}]))[0] == 200
    assert not any(task.done() for task in requests), "the table u has no memory yet"
    u.appending_bytes = 0
    assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
    assert (t.reserved_bytes, u.reserved_bytes, room.waiter_count) == (0, 0, 0)
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", 0.0)
    u.appending_bytes = stream.server.components.settings.stream_memory_bytes
    assert (await send_rows(stream, t=large_rows, u=large_rows))[0] == 429
    assert (t.reserved_bytes, room.waiter_count) == (0, 0)
    u.appending_bytes = 0
    assert await read_ids(stream, "t") == [0, 1, 1, 1, 1, 3]


async def test_rows_of_all_tables_must_fit_into_the_memory_together(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path, stream_memory_bytes=1 << 20) as stream:
        for name in ("t", "u"):
            await asyncio.to_thread(stream.catalog.create_table, f"db.{name}", SCHEMA, properties={ENABLED: "true"})
        await open_tables(stream)
        large_rows = [{"id": 1, "name": "x" * 400_000}]  # Each table may use half of the memory alone.
        status, answer = await send_rows(stream, t=large_rows, u=large_rows)
        assert (status, "the rows of the other tables" in answer["error"]["message"]) == (413, True), answer
        smaller_rows = [{"id": 1, "name": "x" * 300_000}]
        assert (await send_rows(stream, t=smaller_rows, u=smaller_rows))[0] == 200


async def test_requests_for_tables_in_any_order_never_block_each_other(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(first_seed())
    tables = await open_tables(stream)
    streams = stream.server.components.streams
    limit_bytes = streams._context.settings.stream_memory_bytes
    entries = [await stream.server.components.catalog.tables.load(("db",), name) for name in ("t", "u")]

    async def reserve() -> None:
        chosen_tables = rng.sample(entries, rng.randint(1, 2))
        async with streams.body_room.reserve(
            [(loaded, rng.randrange(limit_bytes // 2)) for loaded in chosen_tables], ""
        ):
            await asyncio.sleep(0.001)
            used_bytes = sum(table.reserved_bytes for table in tables)
            assert used_bytes <= limit_bytes

    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", PATIENCE_S)
    # All requests may wait at the same time.
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room._WAITING_SHARE", 1e9)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(reserve() for _ in range(32)))
    assert (streams.body_room.waiter_count, [table.reserved_bytes for table in tables]) == (0, [0, 0])
