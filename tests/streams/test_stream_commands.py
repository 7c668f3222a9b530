"""`seamark stream`, and the listing of stream tables that it prints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.status import list_streams
from tests.services.command import run_seamark
from tests.streams.test_rows_over_http import SCHEMA, create, streaming


async def run(url: str, *arguments: str) -> str:
    """Run `seamark stream` with the arguments, and return what it prints."""

    done = await asyncio.to_thread(run_seamark, "stream", *arguments, "--url", url)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_stream_is_listed_shown_and_flushed(tmp_path: Path) -> None:
    async with streaming(tmp_path) as stream:
        url = stream.server.url
        assert "No stream table" in await run(url, "list")
        await create(stream, properties={"seamark.stream.shards": "2"})
        await stream.post({"id": 1})
        await stream.flush()
        await stream.post({"id": 2}, {"id": 3})
        await stream.post({"id": 4})
        (listed,) = json.loads(await run(url, "list", "--json"))
        assert (listed["namespace"], listed["table"], listed["waiting-rows"]) == (["db"], "t", 3)
        assert sum(shard["flushed"] for shard in listed["shards"]) == 1
        assert sum(shard["durable"] for shard in listed["shards"]) == 4
        assert listed["oldest-ms"] is not None
        text = await run(url, "list")
        assert "db.t" in text
        assert " 3 " in text
        assert json.loads(await run(url, "show", "db.t", "--json"))["waiting-rows"] == 3
        assert "3 rows" in await run(url, "show", "db.t")
        assert await run(url, "flush", "db.t") == "3 rows of db.t were flushed\n"
        (listed,) = json.loads(await run(url, "list", "--json"))
        assert (listed["waiting-rows"], listed["oldest-ms"]) == (0, None)
        assert await stream.ids() == [1, 2, 3, 4]


async def test_the_listing_has_pages_and_survives_a_restart(tmp_path: Path) -> None:
    async with streaming(tmp_path) as stream:
        await create(stream)
        for name in ("a", "b"):
            await asyncio.to_thread(
                stream.catalog.create_table, f"db.{name}", SCHEMA, properties={"seamark.stream.enabled": "true"}
            )
        for name in ("a", "b", "t"):
            url = f"{stream.server.url}/api/v1/tables/db/{name}/rows"
            async with stream.server.http.post(url, json=[{"id": 1}]) as answer:
                assert answer.status == 200
    async with streaming(tmp_path) as stream:
        pages: list[Any] = []
        query = "?pageSize=2"
        while True:
            status, page = await stream.server.get(f"/api/v1/streams{query}")
            assert status == 200, page
            pages.append(page["streams"])
            if page["next-page-token"] is None:
                break
            query = f"?pageSize=2&pageToken={page['next-page-token']}"
        assert [len(page) for page in pages] == [2, 1]
        assert sorted(listed["table"] for page in pages for listed in page) == ["a", "b", "t"]
        status, answer = await stream.server.get("/api/v1/streams?pageToken=x")
        assert (status, "pageToken" in answer["error"]["message"]) == (400, True)
        client = SeamarkClient(stream.server.url)
        listed = await asyncio.to_thread(lambda: list(list_streams(client)))
        assert sorted(table["table"] for table in listed) == ["a", "b", "t"]
