"""Tests of lookups and bitmaps with remote index files: range reads give the same answers as local files."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.index.files import remote as cold
from tests.api.client import Api
from tests.api.indexes.test_bitmaps import (
    build_filter_json,
    build_random_tree,
    create_indexed_table,
    decode_rows,
    read_pages,
)
from tests.api.indexes.test_lookups import (
    create_table_with_deletes,
    decode_found_rows,
    find_expected_rows,
    look_up,
    to_json_key,
)
from tests.api.rest.stored import StoredTable, draw_row
from tests.planner.lakes.tables import RecordingObjects
from tests.server.rig import RunningServer, run_server


class SlowWholeFiles(RecordingObjects):
    """An object store in which reads of whole index files wait until `resume` is called."""

    whole_file_event = asyncio.Event()

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        if location.endswith(".puffin"):
            await self.whole_file_event.wait()
        return await super().read(location, limit_bytes=limit_bytes)

    def resume(self) -> None:
        self.whole_file_event.set()


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningServer]:
    """Yield a server that reads only the required ranges of an index file, and never the whole file.

    The server guesses the size of its first read. Here the guess is too small for the sections of the file, so the
    server must also read the sections by their ranges.
    """
    monkeypatch.setattr(cold, "_FIRST_READ_BYTES", 64)
    async with run_server(tmp_path, index_whole_bytes=0) as server:
        yield server


def delay_whole_files(server: RunningServer) -> SlowWholeFiles:
    """Make reads of whole index files wait until `resume` is called."""
    storage = SlowWholeFiles(server.components.objects)
    storage.whole_file_event = asyncio.Event()
    server.components.indexes._objects = storage
    return storage


@pytest.mark.slow
async def test_few_keys_are_looked_up_by_range_in_every_snapshot(server: RunningServer) -> None:
    api, rng = Api(server), random.Random(7)
    table = await create_table_with_deletes(api, rng, version=2, partitioned=False)
    await table.index("keys", "record", ["name", "id"], table.snapshots[-1].data, parts=3)
    storage = delay_whole_files(server)
    for snapshot in table.snapshots:
        for count in (1, 5, 16):
            keys = [draw_row(rng, 1)[:2] for _ in range(count)]
            json_keys = [to_json_key((name, id)) for id, name in keys]
            answer = await look_up(api, json_keys, index="keys", **{"snapshot-id": snapshot.id})
            assert decode_found_rows(answer) == find_expected_rows(table, snapshot, keys, (1, 2))
            assert answer["complete"]
    assert storage.ranges
    assert not any(name.endswith(".puffin") for name in storage.reads)


async def test_many_keys_wait_for_the_whole_file(server: RunningServer) -> None:
    api, rng = Api(server), random.Random(8)
    table = await create_table_with_deletes(api, rng)
    await table.index("keys", "record", ["id"], table.snapshots[-1].data)
    storage = delay_whole_files(server)
    keys = [draw_row(rng, 1)[:1] for _ in range(30)]
    lookup_task = asyncio.create_task(look_up(api, list(map(to_json_key, keys)), index="keys"))
    await asyncio.sleep(0.1)
    assert not lookup_task.done()
    storage.resume()
    assert decode_found_rows(await lookup_task) == find_expected_rows(table, table.snapshots[-1], keys, (1,))


async def test_range_reads_give_the_same_rows_as_reads_of_whole_index_files(server: RunningServer) -> None:
    api, rng = Api(server), random.Random(9)
    await create_indexed_table(api, rng)
    trees = [build_random_tree(rng, depth=3, columns=(0, 1, 2)) for _ in range(12)]
    bodies: list[dict[str, Any]] = [{"filter": build_filter_json(tree), "limit": 2} for tree in trees]
    storage = delay_whole_files(server)
    pages_by_range = [await read_pages(api, body) for body in bodies]
    assert storage.ranges
    assert not any(name.endswith(".puffin") for name in storage.reads)
    storage.resume()
    for body, expected_pages in zip(bodies, pages_by_range, strict=True):
        assert await read_pages(api, body) == expected_pages
    exact_count = sum(file_report["exact"] for pages in pages_by_range for file_report in pages)
    assert exact_count > 20  # Otherwise the conditions test the bitmaps too little.


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", ["bitmap", "record"])
async def test_damaged_remote_index_is_quarantined_and_gives_no_wrong_answer(server: RunningServer, kind: str) -> None:
    api = Api(server)
    table = await StoredTable.create(api)
    files = [table.write_data_file([(n, "a", 1.5, 1) for n in range(1000)])]
    await table.commit(files)
    await table.index("by_id", kind, ["id"], files)
    (path,) = (table.folder / "_seamark" / "index").glob("**/*.puffin")
    data = bytearray(path.read_bytes())
    middle = len(data) // 2  # The entries of the index are in the middle of the file.
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    storage = delay_whole_files(server)

    async def read_answers() -> Any:
        if kind == "record":
            return [(await look_up(api, list(range(n, n + 10)), index="by_id"))["complete"] for n in range(0, 1000, 10)]
        (page,) = await read_pages(api, {"where": "id = 3"})
        return decode_rows(page["rows"]), page["exact"]

    lookup_task = asyncio.create_task(read_answers())
    while not any(name.endswith(".puffin") for name in storage.reads):
        storage.resume()  # If a range read finds damage, the server reads the whole file.
        await asyncio.sleep(0.01)
    answers = await lookup_task
    assert answers == (None, False) if kind == "bitmap" else not all(answers)
    for _ in range(1000):  # The server quarantines the file in the background, within these 20 seconds.
        body = (await api("GET", "/api/v1/tables/db/t/indexes/by_id")).json
        if body["quarantined"]:
            break
        await asyncio.sleep(0.02)
    assert body["quarantined"] == 1
