"""Tests of client commits whose summary claims to be a flush. The server refuses them, so readers skip no row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.formats.protocol.wire import FLUSH_KEYS
from tests.streams.test_read_stream import list_ids, read_batches
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        yield stream


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("key", FLUSH_KEYS)
async def test_engine_cannot_commit_a_snapshot_that_claims_to_be_a_flush(stream: StreamServer, key: str) -> None:
    rows = pa.table({"id": pa.array([2], pa.int64())}, schema=pa.schema([pa.field("id", pa.int64(), nullable=False)]))

    def append(properties: dict[str, str]) -> None:
        stream.catalog.load_table("db.t").append(rows, snapshot_properties=properties)

    with pytest.raises(Exception, match=f"has the key '{key}', which only the server writes"):
        await asyncio.to_thread(append, {key: "0:0-1000"})
    assert await stream.count_snapshots() == 1
    await asyncio.to_thread(append, {"source": "nightly"})
    await stream.post({"id": 3})
    assert sorted(list_ids(await read_batches(stream))) == [1, 2, 3]


@pytest.mark.parametrize("key", FLUSH_KEYS)
async def test_native_commit_cannot_claim_to_be_a_flush(stream: StreamServer, key: str) -> None:
    body: dict[str, Any] = {"add": [], "summary": {key: "0:0-1000"}, "producer": {"id": "p", "sequence": 0}}
    url = f"{stream.server.url}/api/v1/tables/db/t/commit"
    async with stream.server.http.post(url, json=body) as answer:
        assert answer.status == 400
        assert f"the server writes '{key}'" in (await answer.json())["error"]["message"]
