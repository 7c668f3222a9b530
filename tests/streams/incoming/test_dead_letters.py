"""Tests that rows that do not fit a stream table go to its dead-letter table, with the reason."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import BadRequestError, ForbiddenError
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, TimestamptzType

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.streams.incoming import prepared_rows
from seamark.metaserver.streams.incoming.dead_letters import DEAD_LETTER_TABLE
from seamark.metaserver.streams.stream_properties import ENABLED
from tests.server.rig import build_settings, run_server
from tests.streams.test_rows_over_http import (
    ARROW,
    LINES,
    NEVER_MS,
    SCHEMA,
    StreamServer,
    create_stream_table,
    encode_arrow,
    open_stream_server,
)

LETTERS = Schema(
    NestedField(1, "raw", StringType(), required=True),
    NestedField(2, "reason", StringType(), required=True),
    NestedField(3, "time", TimestamptzType()),
    NestedField(4, "producer", StringType()),
    NestedField(5, "table", StringType()),
)


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={DEAD_LETTER_TABLE: "db.t_errors"})
        yield stream


async def create_dead_letter_table(stream: StreamServer, schema: Schema = LETTERS, **properties: str) -> None:
    await asyncio.to_thread(
        stream.catalog.create_table, "db.t_errors", schema, properties={ENABLED: "true", **properties}
    )


async def read_dead_letter_rows(stream: StreamServer) -> list[dict[str, Any]]:
    return await asyncio.to_thread(lambda: stream.catalog.load_table("db.t_errors").scan().to_arrow().to_pylist())


async def test_invalid_row_is_written_to_the_dead_letter_table_with_the_reason(stream: StreamServer) -> None:
    await create_dead_letter_table(stream)
    lines = [b'{"id": 1}', b'{"id": "x"}', b"{", b'{"id": 2, "town": 1}', b"[3]", b'{"name": "a"}', b'{"id": 4}']
    status, answer = await stream.send(b"\n".join(lines), LINES, "?producer=p&sequence=0")
    assert (status, answer["rows"], answer["rejected"]) == (200, 2, 5)
    assert await stream.ids() == [1, 4]
    letters = await read_dead_letter_rows(stream)
    assert [letter["raw"].encode() for letter in letters] == lines[1:6]
    assert {(letter["producer"], letter["table"]) for letter in letters} == {("p", "db.t")}
    assert all(letter["time"] is not None for letter in letters)
    reasons = ("not a valid long", "not valid JSON", "the column 'town'", "not an object", "id is required")
    for letter, reason in zip(letters, reasons, strict=True):
        assert reason in letter["reason"]
        assert not letter["reason"].startswith("Row")
    status, answer = await stream.send(b"\n".join(lines), LINES, "?producer=p&sequence=0")
    assert answer["duplicate"]
    assert len(await read_dead_letter_rows(stream)) == 5


async def test_request_with_too_many_unfit_rows_is_refused(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_dead_letter_table(stream)
    monkeypatch.setattr(prepared_rows, "REJECTED_ROWS_MAX", 3)
    status, text = await stream.send_and_read_error(json.dumps([{"id": 1}, *[{"id": "x"}] * 4]).encode())
    assert (status, "More than 3 rows do not fit" in text) == (400, True)
    assert (await stream.ids(), await read_dead_letter_rows(stream)) == ([], [])
    await stream.post({"id": 1}, *[{"id": "x"}] * 3)
    assert (await stream.ids(), len(await read_dead_letter_rows(stream))) == ([1], 3)


async def test_invalid_arrow_row_is_written_to_the_dead_letter_table(stream: StreamServer) -> None:
    await create_dead_letter_table(stream)
    ids = pa.array([1, None, 3], pa.int64())
    status, answer = await stream.send(encode_arrow(id=ids, name=["a", "b", "c"]), ARROW)
    assert (status, answer["rows"], answer["rejected"]) == (200, 2, 1)
    assert await stream.ids() == [1, 3]
    assert [json.loads(letter["raw"]) for letter in await read_dead_letter_rows(stream)] == [{"id": None, "name": "b"}]


async def test_arrow_value_without_a_python_equivalent_is_a_dead_letter(stream: StreamServer) -> None:
    await create_dead_letter_table(stream)
    days = pa.array([0, 1 << 30], pa.int32()).view(pa.date32())
    body = encode_arrow(id=pa.array([1, None], pa.int64()), name=["a", "b"], day=days)
    status, answer = await stream.send(body, ARROW)
    assert (status, answer["rows"], answer["rejected"]) == (200, 1, 1)
    (letter,) = await read_dead_letter_rows(stream)
    assert json.loads(letter["raw"]).keys() == {"id", "name", "day"}


async def test_request_is_refused_if_dead_letter_table_cannot_store_rows(stream: StreamServer) -> None:
    async def read_reason() -> str:
        status, text = await stream.send_and_read_error(b'[{"id": 1}, {"id": "x"}]')
        assert status == 400
        return text

    assert "db.t_errors does not exist" in await read_reason()
    await create_dead_letter_table(stream, Schema(NestedField(1, "raw", StringType())))
    assert "has no column reason" in await read_reason()
    await asyncio.to_thread(stream.catalog.drop_table, "db.t_errors")
    wrong_schema = Schema(NestedField(1, "raw", IntegerType()), NestedField(2, "reason", StringType()))
    await create_dead_letter_table(stream, wrong_schema)
    assert "the column raw of another type than string" in await read_reason()
    await asyncio.to_thread(stream.catalog.drop_table, "db.t_errors")
    await create_dead_letter_table(stream, Schema(*LETTERS.fields, NestedField(6, "more", LongType(), required=True)))
    assert "more is required" in await read_reason()
    await asyncio.to_thread(stream.catalog.drop_table, "db.t_errors")
    await create_dead_letter_table(stream, **{ENABLED: "false"})
    assert "is not a stream table" in await read_reason()
    assert await stream.ids() == []


async def test_setting_a_dead_letter_table_requires_the_right_to_write_to_it(tmp_path: Path) -> None:
    grants = [Grant("ann", "writer", ("db",))]
    clock = SystemClock()
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        ann_token = await create_token(store, clock, "ann", 3600, grants)
        root_token = await create_token(store, clock, "root", 3600, [Grant("root", "admin", ())])
    async with run_server(tmp_path, auth="token", stream_flush_interval_ms=NEVER_MS) as server:

        def open_catalog(token: str) -> RestCatalog:
            return RestCatalog("streams", uri=server.url, token=token)

        def create_tables() -> None:
            catalog = open_catalog(root_token)
            for namespace in ("db", "other"):
                catalog.create_namespace_if_not_exists(namespace)
            catalog.create_table("other.errors", LETTERS, properties={ENABLED: "true"})
            catalog.create_table("db.t", SCHEMA, properties={ENABLED: "true", DEAD_LETTER_TABLE: "other.errors"})
            catalog.create_table("db.u", SCHEMA, properties={ENABLED: "true"})

        await asyncio.to_thread(create_tables)
        headers = {"Authorization": f"Bearer {ann_token}"}
        url = f"{server.url}/api/v1/tables/db/t/rows"
        async with server.http.post(url, json=[{"id": "x"}], headers=headers) as answer:
            assert answer.status == 403

        def set_property() -> None:
            with open_catalog(ann_token).load_table("db.u").transaction() as change:
                change.set_properties({DEAD_LETTER_TABLE: "other.errors"})

        with pytest.raises(ForbiddenError):
            await asyncio.to_thread(set_property)

        def create_table(*, staged: bool) -> None:
            properties = {ENABLED: "true", DEAD_LETTER_TABLE: "other.errors"}
            catalog = open_catalog(ann_token)
            if staged:
                catalog.create_table_transaction("db.v", SCHEMA, properties=properties).commit_transaction()
            else:
                catalog.create_table("db.v", SCHEMA, properties=properties)

        for is_staged in (False, True):
            with pytest.raises(ForbiddenError, match="appendRows"):
                await asyncio.to_thread(create_table, staged=is_staged)


async def test_name_of_dead_letter_table_needs_a_namespace(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        with pytest.raises(BadRequestError, match="name a table with its namespace"):
            await create_stream_table(stream, SCHEMA, properties={DEAD_LETTER_TABLE: "errors"})
