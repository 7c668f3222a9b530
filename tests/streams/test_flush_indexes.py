"""Tests of the index files of flushes. The commit of a flush registers them, and plans and lookups use them at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.metaserver.streams.keys import KEY
from tests.seeds import first_seed, mark_fast
from tests.streams.test_rows_over_http import BY_NAME, StreamServer, create_stream_table, open_stream_server

INDEXES = {"r": ("record", ["id"]), "b": ("bloom", ["id"]), "m": ("bitmap", ["name"])}


async def create_indexes(stream: StreamServer) -> None:
    for name, (kind, columns) in INDEXES.items():
        url = f"{stream.server.url}/api/v1/tables/db/t/indexes/{name}"
        async with stream.server.http.put(url, json={"kind": kind, "columns": columns}) as answer:
            assert answer.status in (200, 201), await answer.text()


async def read_coverage(stream: StreamServer) -> dict[str, tuple[int, int]]:
    """Return (covered data files, live data files) for each index."""
    counts = {}
    for name in INDEXES:
        status, index = await stream.server.get(f"/api/v1/tables/db/t/indexes/{name}")
        assert status == 200, index
        counts[name] = index["files"], index["files-total"]
    return counts


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await create_indexes(stream)
        yield stream


async def test_plans_use_the_indexes_of_a_flush_at_once(stream: StreamServer) -> None:
    for first_id, name in ((0, "n0"), (3, "n10"), (6, "n20")):  # All ids are multiples of three.
        await stream.post(*({"id": first_id + 3 * number, "name": name} for number in range(5)))
        await stream.flush()
    assert await read_coverage(stream) == dict.fromkeys(INDEXES, (3, 3))

    def count_files(where: str) -> int:
        return len(list(stream.catalog.load_table("db.t").scan(row_filter=where).plan_files()))

    # The id is within the bounds of two files, so only the index excludes these files.
    assert await asyncio.to_thread(count_files, "id = 4") == 0
    assert await asyncio.to_thread(count_files, "name = 'n10'") == 1
    lookup = await asyncio.to_thread(lambda: SeamarkClient(stream.server.url).lookup("db.t", {"id": [0, 3, 4]}))
    assert (lookup.complete, lookup.missing) == (True, 1)


async def test_flush_succeeds_although_its_index_files_fail(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no index today")

    monkeypatch.setattr(stream.server.components.streams.row_files, "encode_index_files", fail)
    await stream.post({"id": 1}, {"id": 2})
    assert await stream.flush() == 2
    assert await read_coverage(stream) == dict.fromkeys(INDEXES, (0, 1))
    assert await stream.ids("id = 2") == [2]


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 20), 1))
async def test_filters_and_gets_of_random_flushes_equal_a_dictionary_of_the_rows(tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    expected: dict[int, str] = {}
    async with open_stream_server(tmp_path) as stream:
        partitions = {"partition_spec": BY_NAME} if rng.random() < 0.5 else {}
        await create_stream_table(stream, properties={KEY: "id", "format-version": rng.choice("23")}, **partitions)
        await create_indexes(stream)
        client = SeamarkClient(stream.server.url)
        for round_number in range(8):
            ids = rng.sample(range(30), rng.randint(1, 8))
            rows = [{"id": key, "name": f"n{rng.randrange(4)}"} for key in ids]
            await stream.post(*rows, *({"id": key, "_op": "delete"} for key in ids[:1]))
            expected |= {row["id"]: row["name"] for row in rows}
            del expected[ids[0]]
            if rng.random() < 0.7:
                await stream.flush()
                covered_files = await read_coverage(stream)
                assert all(files == live_files for files, live_files in covered_files.values()), (
                    round_number,
                    covered_files,
                )
            name, key = f"n{rng.randrange(4)}", rng.randrange(30)
            assert await stream.ids(f"name = '{name}'") == sorted(key for key in expected if expected[key] == name)
            expected_ids = [key] if key in expected else []
            assert await stream.ids(f"id = {key}") == expected_ids
            answer = await asyncio.to_thread(lambda key=key: seamark.get_rows(client, "db.t", [key]).to_pylist())
            assert [row["name"] for row in answer] == [expected[key] for key in expected_ids]
