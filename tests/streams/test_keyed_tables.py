"""Keyed stream tables over HTTP, read by stock PyIceberg: the latest row of each key, before and after flushes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.metaserver.streams.keys import KEY
from tests.seeds import examples, first_seed
from tests.streams.test_rows_over_http import ARROW, Stream, arrow_body, create, streaming

SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType(), required=True),
    NestedField(3, "town", StringType()),
    identifier_field_ids=[1],
)
VERSIONS = ("2", "3")


@pytest.fixture(params=VERSIONS)
async def stream(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stream]:
    async with streaming(tmp_path) as stream:
        await create(stream, SCHEMA, properties={"format-version": request.param})
        yield stream


async def read(stream: Stream, where: str | None = None) -> dict[int, str]:
    """The names by id that stock PyIceberg reads."""

    def scan() -> pa.Table:
        options = {"row_filter": where} if where else {}
        return stream.catalog.load_table("db.t").scan(**options).to_arrow()

    rows = (await asyncio.to_thread(scan)).to_pylist()
    names = {row["id"]: row["name"] for row in rows}
    assert len(names) == len(rows), "a key has several rows"
    return names


async def test_later_row_replaces_row_with_its_key_before_and_after_flush(stream: Stream) -> None:
    await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 1, "name": "c"})
    assert await read(stream) == {1: "c", 2: "b"}
    await stream.flush()
    assert await read(stream) == {1: "c", 2: "b"}
    await stream.post({"id": 2, "name": "d"}, {"id": 3, "name": "e"})
    assert await read(stream) == {1: "c", 2: "d", 3: "e"}
    assert await read(stream, "name = 'b'") == {}
    await stream.post({"id": 2, "name": "f"})
    assert await read(stream) == {1: "c", 2: "f", 3: "e"}
    await stream.flush()
    assert await read(stream) == {1: "c", 2: "f", 3: "e"}
    await stream.post({"id": 2, "name": "g"}, {"id": 1, "_op": "delete"})
    for _ in range(2):
        assert await read(stream) == {2: "g", 3: "e"}
        await stream.flush()
