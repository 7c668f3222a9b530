"""Tests that a large body of rows is complete, however its bytes arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

from tests.seeds import first_seed
from tests.streams.test_rows_over_http import create_stream_table, open_stream_server


async def test_body_that_arrives_in_pieces_of_any_size_is_complete(tmp_path: Path) -> None:
    rng = Random(first_seed())
    names = {number: rng.randbytes(200_000 * number).hex() for number in range(1, 4)}
    body = json.dumps([{"id": number, "name": name} for number, name in names.items()]).encode()

    async def split_body() -> AsyncIterator[bytes]:
        start = 0
        while start < len(body):
            size = rng.choice((1, 100, 5_000, 8_192, 70_000, 400_000))
            yield body[start : start + size]
            start += size
            if rng.random() < 0.3:
                await asyncio.sleep(0.001)

    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        url = f"{stream.server.url}/api/v1/tables/db/t/rows"
        for length_header in ({"Content-Length": str(len(body))}, {}):
            headers = {"Content-Type": "application/json", **length_header}
            async with stream.server.http.post(url, data=split_body(), headers=headers) as answer:
                assert answer.status == 200, await answer.text()
        rows = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
    assert sorted((row["id"], row["name"]) for row in rows) == sorted([*names.items(), *names.items()])
