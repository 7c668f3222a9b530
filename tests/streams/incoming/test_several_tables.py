"""Tests of requests with rows for several stream tables. The server stores all rows once, or no row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.api.streams import several_tables
from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE
from seamark.metaserver.streams.incoming.new_columns import NEW_COLUMNS
from seamark.metaserver.streams.stream_properties import ENABLED
from tests.streams.incoming.test_dead_letters import create_letters, read_letters
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, open_stream_server


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
    async with stream.server.http.post(f"{stream.server.url}/api/v1/rows", json={"tables": tables}) as refusal:
        assert (refusal.status, "twice" in (await refusal.json())["error"]["message"]) == (400, True)
    assert (await read_ids(stream, "t"), await read_ids(stream, "u")) == ([], [])


async def test_tables_share_a_dead_letter_table(stream: StreamServer) -> None:
    await create_letters(stream)

    def set_property(name: str) -> None:
        with stream.catalog.load_table(f"db.{name}").transaction() as change:
            change.set_properties({DEAD_LETTER_TABLE: "db.t_errors"})

    for name in ("t", "u"):
        await asyncio.to_thread(set_property, name)
    status, answer = await send_rows(stream, t=[{"id": 1}, {"id": "x"}], u=[{"id": "y"}])
    assert (status, [table["rejected"] for table in answer["tables"]]) == (200, [1, 1])
    assert sorted(letter["table"] for letter in await read_letters(stream)) == ["db.t", "db.u"]
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
